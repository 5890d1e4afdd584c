"""What the rest of the project knows of a schedule: everything but its name comes from its `ScheduleSpec`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from lightning_diffpipe.errors import ScheduleError
from lightning_diffpipe.planning.instruction import Program
from lightning_diffpipe.planning.schedule import Placement, Schedule, as_placement

Ticks = tuple[tuple[float, float], ...]
"""By stage: what a forward and a backward take; only proportions matter. Empty if nobody knows."""


@dataclass(frozen=True, slots=True)
class ScheduleSpec:
    """One schedule; calling it with stages, or a placement, and a number of microbatches makes a `Schedule`.

    Attributes:
        name: As options and plans write it.
        program: The program of one rank alone, given where stages run, how many microbatches there are, and
            the rank; if `timed` also `ticks=`, the times of the stages.
        place: Where so many stages run on so many ranks; None if every stage has ranks of its own, in
            order, and may have several.
        stages_per_rank: Stages of a rank that the search tries.
        most_per_rank: The most there may be.
        nested: A rank has stages equally far from either end of the chain.
        opposite: It is for several backbones, each with a stage on every rank.
        timed: The order of work depends on how long stages take.
        whole_groups: Microbatches move in groups, one for each rank: their number is a multiple of the ranks.
        keeps_all: A rank keeps the activations of all its microbatches.
        splits_backward: Backwards run in two parts, which not every module allows.
        warmup_depth: Forwards of a rank before its first backward, for each rank after it.
        auto: `schedule="auto"` tries it: it does the same work as others in another order.
        advice: What a plan that could be faster with it is advised; empty for none.
        weights_behind: Without a flush: by how many batches' updates the weights are behind with which a stage
            runs a batch, once the pipeline is full, given the placement and the stage. None: batches end before
            others begin, and weights have one version.
        accumulates: Without a flush: several microbatches make a batch; else each is one.
    """

    name: str
    program: Callable[..., Program]
    place: Callable[[int, int], Placement] | None = None
    stages_per_rank: tuple[int, ...] = (1,)
    most_per_rank: float = math.inf
    nested: bool = False
    opposite: bool = False
    timed: bool = False
    whole_groups: bool = False
    keeps_all: bool = False
    splits_backward: bool = False
    warmup_depth: int = 1
    auto: bool = False
    advice: str = ""
    weights_behind: Callable[[Placement, int], int] | None = None
    accumulates: bool = False

    @property
    def flushes(self) -> bool:
        """Whether a batch ends before the next begins."""
        return self.weights_behind is None

    def weight_versions(self, placement: Placement, stage: int) -> int:
        """Versions of its weights that each rank of a stage stores, the latest included."""
        return 1 if self.weights_behind is None else 1 + self.weights_behind(placement, stage)

    def __call__(self, stages: int | Placement, num_microbatches: int) -> Schedule:
        """The programs of all ranks.

        Args:
            stages: Number of stages, one rank each, or where they run.
            num_microbatches: Microbatches of the batch.

        Raises:
            ScheduleError: `num_microbatches` is no multiple of the ranks, and has to be.
        """
        placement = as_placement(stages)
        num_ranks = placement.num_ranks
        if self.whole_groups and num_microbatches % num_ranks:
            raise ScheduleError(
                f"{self.name} stages on {num_ranks} ranks need a multiple of {num_ranks} microbatches; "
                f"got {num_microbatches}"
            )
        ranks = range(num_ranks)
        programs = tuple(self.program(placement, num_microbatches, rank) for rank in ranks)
        return Schedule(placement, num_microbatches, programs)

    def in_time(self, ticks: Ticks) -> ScheduleSpec:
        """The same, in the order for stages that take so long, if that makes a difference."""
        return replace(self, program=partial(self.program, ticks=ticks)) if self.timed else self

    def takes(self, num_stages: int, num_microbatches: int) -> bool:
        """Whether a batch may have so many microbatches: without a flush, it depends on the weight versions.

        Where several make a batch, the weights of the batch before last have to be there when one begins.
        """
        if self.flushes:
            return True
        return num_microbatches >= num_stages - 1 if self.accumulates else num_microbatches == 1

    def can_place(self, num_stages: int, num_ranks: int, num_microbatches: int) -> bool:
        """Whether it can give every rank of a pipeline several stages, so many in all."""
        per_rank, rest = divmod(num_stages, num_ranks)
        grouped = not (self.whole_groups and num_microbatches % num_ranks)
        return num_ranks > 1 and not rest and 1 < per_rank <= self.most_per_rank and grouped
