"""From a batch to one rank's work: microbatches, frozen parts, the schedule with all communication.

    batch of 8 -> sizes 3 3 2 -> a MicrobatchWork each: layer graph of its size, seed, weight of its loss
                              -> frozen parts: which rank encodes which samples, in groups
                              -> the plan's schedule lowered for these sizes: this rank's program

No layer runs here, and nothing is decided: everything follows from the plan and the batch's size. The last batch of
an epoch may be smaller, so lowered schedules are cached by size, and a size that is new is probed first. With fewer
samples than the plan has microbatches, it is cut into so many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from torch import nn

from lightning_diffpipe.comm.mesh import Mesh
from lightning_diffpipe.graph.step import StepCall
from lightning_diffpipe.planning.filling import (
    EncodePart,
    encode_parts,
    group_size_of,
    num_groups_of,
)
from lightning_diffpipe.planning.instruction import Program, ShareResults
from lightning_diffpipe.planning.lowering import lower, num_posted_ahead, prefix_frozen
from lightning_diffpipe.planning.passes import widened
from lightning_diffpipe.planning.schedule import Placement, Schedule
from lightning_diffpipe.runtime.frozen_work import FrozenWork
from lightning_diffpipe.runtime.microbatch import microbatch_sizes, num_samples, split
from lightning_diffpipe.runtime.partitioned import PartitionedStepCache, Step
from lightning_diffpipe.runtime.seeding import microbatch_seed
from lightning_diffpipe.runtime.stage import MicrobatchWork


@dataclass(frozen=True)
class StepWork:
    """One batch laid out for one rank.

    Attributes:
        base: The plan's schedule, or for more calls than planned one with stages before it.
        schedule: The same with communication for this batch: what all ranks of the pipeline do.
        program: This rank's part of it.
        works: The microbatches.
        frozen: The frozen parts; `None` if nothing is frozen.
        total_groups: Groups of samples in which all ranks encode them.
        early: They may be encoded in bubbles of batches before.
    """

    base: Schedule
    schedule: Schedule
    program: Program
    works: list[MicrobatchWork]
    frozen: FrozenWork | None
    total_groups: int
    early: bool


class BatchLayout:
    """Lays batches out for one rank.

    Args:
        root: The module, its wrappers installed and its foreign parameters freed.
        step: The user's step: module and batch to loss.
        schedule: The plan's schedule, compute instructions only.
        steps: Cut steps by signature.
        mesh: This rank's place and groups.
        seed: Seed of the run; with it all random numbers of a step are derived.
        group_size: Samples on which frozen layers run at a time; `None` chooses.

    Attributes:
        schedule: As given.
        steps: As given.
        mesh: As given.
    """

    def __init__(
        self,
        root: nn.Module,
        step: Step,
        schedule: Schedule,
        steps: PartitionedStepCache,
        mesh: Mesh,
        seed: int,
        group_size: int | None = None,
    ) -> None:
        self._root = root
        self._step = step
        self.schedule = schedule
        self.steps = steps
        self.mesh = mesh
        self._seed = seed
        self._group_size = group_size
        self._lowered = lru_cache(maxsize=32)(self._lower)
        self._widened = lru_cache(maxsize=8)(partial(widened, schedule))

    def num_ahead(self, placement: Placement) -> int:
        """Returns how many receives of an edge are posted before they are needed."""
        return num_posted_ahead(placement) if self.mesh.backend == "nccl" else 1

    def lay_out(
        self,
        batch: Any,
        batch_index: int,
        arguments: tuple[Any, ...] = (),
        groups: Callable[[int], tuple[int, ...]] | None = None,
    ) -> StepWork:
        """Cuts a batch into microbatches and adds communication to the schedule; asks no rank and runs nothing.

        Args:
            batch: This pipeline's batch, on this rank's device.
            batch_index: Number of the batch since training began; seeds its random numbers.
            arguments: Further arguments of the step.
            groups: If its frozen layers are to run in bubbles of batches before: how so many groups are
                shared over the ranks.
        """
        sizes = microbatch_sizes(
            num_samples(batch, self.steps.form), self.schedule.num_microbatches
        )
        works = self._works(batch, sizes, batch_index, arguments)
        views = [work.partitioned.frozen_view for work in works]
        splits: bool | None = None  # there is no frozen work
        if any(view is not None for view in views):
            splits = all(view is not None and view.is_splittable for view in views)
        mesh, num_ranks = self.mesh, self.schedule.num_ranks
        group_size = (self._group_size or group_size_of(sizes, num_ranks)) if splits else max(sizes)
        total = num_groups_of(sizes, group_size)
        counts = groups(total) if groups else None
        starts = tuple(work.partitioned.first_stage for work in works)
        placement = works[0].partitioned.placement
        base = self.schedule
        if placement != base.placement:
            base = self._widened(placement)
        lowered, parts = self._lowered(base, starts, sizes, splits, group_size, counts)
        frozen = None
        if parts:
            frozen = FrozenWork(
                parts, group_size if splits else None, works, placement, mesh.local_rank, mesh.device
            )  # fmt: skip
        program = lowered.programs[mesh.local_rank]
        return StepWork(base, lowered, program, works, frozen, total, early=groups is not None)

    def still_takes_its_forms(self, step: StepWork) -> bool:
        """Returns whether a step that was laid out before it was due takes the forms that it took then."""
        return all(
            self.steps.of(work.call.batch, work.seed, work.call.arguments, work.index == 0).graph
            is work.partitioned.graph
            for work in step.works
        )

    def weigh(self, works: Sequence[MicrobatchWork], accumulate: int = 1) -> None:
        """Gives the losses of a batch their weights, so that all samples of all pipelines weigh the same.

        A collective call of all pipelines, once for each batch that is trained on; how often batches are laid out
        is each pipeline's own.

        Args:
            works: The microbatches of the batch.
            accumulate: Batches whose gradients are averaged before an optimizer step.
        """
        total = self.mesh.summed_over_pipelines(sum(work.num_samples for work in works))
        for work in works:
            share = 1 if work.partitioned.graph.weighted else work.num_samples / total
            work.loss_scale = share / accumulate

    def _works(
        self,
        batch: Any,
        sizes: tuple[int, ...],
        batch_index: int,
        arguments: tuple[Any, ...],
    ) -> list[MicrobatchWork]:
        microbatches = split(batch, sizes, self.steps.form)
        indices = range(len(microbatches))
        seeds = [microbatch_seed(self._seed, self.mesh.pipeline, batch_index, i) for i in indices]
        cut_steps = self.steps.of_batch(microbatches, seeds, arguments)
        works = []
        for index, microbatch in enumerate(microbatches):
            seed, cut_step = seeds[index], cut_steps[index]
            written = cut_step.graph.batch_writes
            works.append(
                MicrobatchWork(
                    index=index,
                    call=StepCall(self._step, self._root, microbatch, arguments, written),
                    seed=seed,
                    partitioned=cut_step,
                    num_samples=sizes[index],
                )
            )
        return works

    def _lower(
        self,
        schedule: Schedule,
        starts: tuple[int, ...],
        sizes: tuple[int, ...],
        splits_frozen: bool | None,
        group_size: int,
        groups: tuple[int, ...] | None,
    ) -> tuple[Schedule, tuple[EncodePart, ...]]:
        """Returns the schedule with all communication and, if there is frozen work, its parts."""
        parts: tuple[EncodePart, ...] = ()
        if len(sizes) < schedule.num_microbatches:
            schedule = schedule.of_first_microbatches(len(sizes))
        schedule = schedule.starting_at(starts)
        if splits_frozen is not None:
            parts = encode_parts(sizes, schedule.num_ranks, splits_frozen, group_size, groups)
        schedule = prefix_frozen(schedule, parts, encoded=groups is not None)
        lowered = lower(schedule, num_ahead=self.num_ahead(schedule.placement))
        programs = tuple((*program, ShareResults()) for program in lowered.programs)
        return replace(lowered, programs=programs), parts
