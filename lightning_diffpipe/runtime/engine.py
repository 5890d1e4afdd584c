"""A module trained as a pipeline: everything between a batch and its gradients.

The engine holds one rank's side of a plan. For every batch it cuts microbatches, looks up (or makes)
the layer graph for their sizes, lowers the schedule, runs this rank's program and shares the results:

    batch -> microbatches -> MicrobatchWork -> Executor -> gradients in .grad, loss on every rank

With filling, the batches that come next are laid out too, and their frozen layers run while this one
waits. A step then begins with what is left of its own, and the exchange of the results.

It knows no Lightning: a step is a function of the module and a batch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_diffpipe.clock import clock_for
from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.planning.frozen_parts import (
    BATCHES_AHEAD,
    SHARES_PERIOD,
    EncodePart,
    encode_parts,
    group_size_of,
    num_groups_of,
)
from lightning_diffpipe.planning.instruction import Program, ShareResults
from lightning_diffpipe.planning.lowering import lower, prefix_frozen
from lightning_diffpipe.planning.schedule import Schedule
from lightning_diffpipe.runtime.executor import Executor, run_alone
from lightning_diffpipe.runtime.filling import Filler, FillingMode, FillingTimes
from lightning_diffpipe.runtime.frozen import FrozenWork
from lightning_diffpipe.runtime.mesh import Mesh
from lightning_diffpipe.runtime.microbatch import (
    Fingerprint,
    microbatch_sizes,
    num_samples,
    split,
)
from lightning_diffpipe.runtime.partitioned import PartitionedStepCache, Step
from lightning_diffpipe.runtime.recording import Recording
from lightning_diffpipe.runtime.reduction import GradientReducer
from lightning_diffpipe.runtime.results import Logged, ResultSharing
from lightning_diffpipe.runtime.seeding import microbatch_seed
from lightning_diffpipe.runtime.shares import GroupShares
from lightning_diffpipe.runtime.stage import MicrobatchWork, StageRunner
from lightning_diffpipe.runtime.stash import Stash
from lightning_diffpipe.runtime.transport import Exchange, P2PTransport, Transport


@dataclass(frozen=True)
class StepWork:
    """One batch laid out for one rank.

    Attributes:
        schedule: What all ranks of the pipeline do, with communication.
        program: This rank's part of it.
        works: The microbatches.
        frozen: The frozen parts; `None` if nothing is frozen.
        total_groups: Groups of samples in which all ranks encode them.
        ahead: They may be encoded in bubbles of batches before.
    """

    schedule: Schedule
    program: Program
    works: list[MicrobatchWork]
    frozen: FrozenWork | None
    total_groups: int
    ahead: bool


@dataclass(frozen=True)
class Prepared:
    """A batch that is not trained on yet; its frozen layers may be done.

    Attributes:
        batch_index: Its number since training began.
        fingerprint: Tells whether the batch that comes is the one that was encoded.
        step: What is left to do.
    """

    batch_index: int
    fingerprint: Fingerprint
    step: StepWork


@dataclass(frozen=True)
class Filling:
    """How bubbles are filled.

    Attributes:
        mode: `"opportunistic"` or `"planned"`, see `runtime/filling.py`; `None` by backend.
        adapts: Shares of the ranks follow what is measured.
        planned_shares: Weights of the ranks to begin with; equal if empty.
        batches_ahead: Batches whose frozen layers may run before they are due.
    """

    mode: FillingMode | None = None
    adapts: bool = True
    planned_shares: tuple[float, ...] = ()
    batches_ahead: int = BATCHES_AHEAD


@dataclass(frozen=True)
class StepResult:
    """What a step leaves besides gradients.

    Attributes:
        loss: Mean loss over the samples of the pipeline's batch; a scalar, equal on all its ranks.
        logged: What the user's step logged, averaged the same way.
        recording: When this rank ran what.
    """

    loss: Tensor
    logged: list[Logged]
    recording: Recording


class _Past(NamedTuple):
    """What is kept of a step that is over; `ran` is None if its frozen work was not known before."""

    recording: Recording
    ended_s: float
    ran: Sequence[tuple[Any, Any]] | None
    num_groups: int
    total_groups: int


class Engine:
    """One rank's side of a pipeline.

    Args:
        root: The module, its wrappers installed and its foreign parameters put aside.
        step: The user's step: module and batch to loss.
        schedule: The plan's schedule, compute instructions only.
        steps: Cut steps by signature.
        mesh: This rank's place and groups.
        reducer: Sums gradients.
        seed: Seed of the run; with it all random numbers of a step are derived.
        check_finite: Look for NaN and infinity at stage boundaries.
        transport: Carries messages; made from the mesh if not given.
        picture: Draws a schedule with a mark where a rank waits, for the error of a timeout.
        group_size: Samples on which frozen layers run at a time; `None` chooses.

    Attributes:
        executor: Runs this rank's programs.
        steps: The cut steps.
    """

    def __init__(
        self,
        root: nn.Module,
        step: Step,
        schedule: Schedule,
        steps: PartitionedStepCache,
        mesh: Mesh,
        reducer: GradientReducer,
        seed: int,
        check_finite: bool = False,
        transport: Transport | None = None,
        picture: Callable[[Schedule, int, int], str] | None = None,
        group_size: int | None = None,
    ) -> None:
        self.mesh = mesh
        self.schedule = schedule
        self.reducer = reducer
        self.steps = steps
        self._root = root
        self._step = step
        self._seed = seed
        self._reduces = True
        self._picture = picture
        self._group_size = group_size
        self._clock = clock_for(mesh.device)
        self._filler: Filler | None = None
        self._shares: GroupShares | None = None
        self._prepared: deque[Prepared] = deque()
        self._last: _Past | None = None
        placement = schedule.placement
        stash = Stash()
        self._transport = transport or P2PTransport(mesh, placement.num_stages)
        self.executor = Executor(
            mesh.local_rank,
            StageRunner(stash, mesh.device, check_finite),
            stash,
            self._transport,
            self._start_reduction,
            self._share_results,
            self._clock,
        )
        self._results = ResultSharing(mesh, placement.rank_of(placement.num_stages - 1, 0))
        self._lowered = lru_cache(maxsize=32)(partial(_lower, schedule))

    @property
    def num_pipelines(self) -> int:
        """Pipelines side by side."""
        return self.mesh.layout.num_pipelines

    def fill_bubbles(self, filling: Filling) -> None:
        """From now on the frozen layers of coming batches run while this one waits."""
        mode = filling.mode or ("opportunistic" if self.mesh.backend == "gloo" else "planned")
        self._filler = Filler(FillingTimes(mode, self._clock))
        period = 1 if filling.batches_ahead == 1 else SHARES_PERIOD
        self._shares = GroupShares(
            self.schedule.num_ranks, self._gather, filling.adapts, filling.planned_shares, period
        )

    def num_prepared_behind(self, batch_index: int) -> int:
        """Batches behind this one that `run_step` was given already as `upcoming`."""
        return sum(1 for prepared in self._prepared if prepared.batch_index > batch_index)

    def run_step(
        self,
        batch: Any,
        batch_index: int,
        accumulate: int = 1,
        reduce_gradients: bool = True,
        arguments: tuple[Any, ...] = (),
        upcoming: Sequence[tuple[Any, tuple[Any, ...]]] = (),
    ) -> StepResult:
        """Runs one batch forward and backward; gradients are added to `.grad`.

        Args:
            batch: This pipeline's batch, on this rank's device.
            batch_index: Number of the batch since training began; seeds its random numbers.
            accumulate: Batches whose gradients are averaged before an optimizer step.
            reduce_gradients: Sum gradients over ranks at the end; not before the last batch of an
                accumulation window.
            arguments: Further arguments of the step.
            upcoming: Batches, and their arguments, that come behind this one and those that were given
                before; their frozen layers run in bubbles. Give equally many on all ranks.

        Raises:
            ConfigurationError: The batch has fewer samples than there are microbatches, or is another
                than was given as `upcoming` before.
            PipelineTimeoutError: A message did not come in time.
            GraphError: The step did not call the layers that were probed.
        """
        step = self._take_prepared(batch, batch_index)
        if step is None:
            step = self.lay_out(batch, batch_index, accumulate, arguments)
        self._prepare(upcoming, batch_index, accumulate)
        self._reduces = reduce_gradients
        try:
            run_alone(
                self.executor, step.program, step.works, step.frozen, self._filler,
                picture=lambda position: self._drawn(step.schedule, position),
            )  # fmt: skip
        except BaseException:
            self.drop_prepared()
            raise
        loss, logged = self._results.finish()
        self._observe(step)
        return StepResult(loss, logged, self.executor.recording)

    def _drawn(self, schedule: Schedule, position: int) -> str:
        return self._picture(schedule, position, self.mesh.local_rank) if self._picture else ""

    def lay_out(
        self,
        batch: Any,
        batch_index: int,
        accumulate: int = 1,
        arguments: tuple[Any, ...] = (),
        groups: Callable[[int], tuple[int, ...]] | None = None,
    ) -> StepWork:
        """Cuts a batch into microbatches and adds communication to the schedule; runs nothing.

        Args:
            batch: As for `run_step`.
            batch_index: As for `run_step`.
            accumulate: As for `run_step`.
            arguments: As for `run_step`.
            groups: If its frozen layers are to run in bubbles of batches before: how so many groups are
                shared over the ranks.

        Raises:
            ConfigurationError: The batch has fewer samples than there are microbatches.
        """
        sizes = microbatch_sizes(num_samples(batch), self.schedule.num_microbatches)
        works = self._works(batch, sizes, batch_index, accumulate, arguments)
        splits = self._splits_frozen(works)
        mesh, num_ranks = self.mesh, self.schedule.num_ranks
        group_size = (self._group_size or group_size_of(sizes, num_ranks)) if splits else max(sizes)
        total = num_groups_of(sizes, group_size)
        counts = groups(total) if groups else None
        lowered, parts = self._lowered(sizes, splits, group_size, counts)
        frozen = None
        if parts:
            frozen = FrozenWork(
                parts, group_size if splits else None, works, self.schedule.placement,
                mesh.local_rank, mesh.device,
            )  # fmt: skip
        program = lowered.programs[mesh.local_rank]
        return StepWork(lowered, program, works, frozen, total, ahead=groups is not None)

    def _prepare(
        self, upcoming: Sequence[tuple[Any, tuple[Any, ...]]], batch_index: int, accumulate: int
    ) -> None:
        """Lays out batches that come later, so that their frozen layers can run in bubbles."""
        if self._filler is None or self._shares is None:
            return
        first = batch_index + 1 + len(self._prepared)
        for number, (batch, arguments) in enumerate(upcoming, first):
            counts = partial(self._shares.counts, batch_index=number)
            step = self.lay_out(batch, number, accumulate, arguments, counts)
            if step.frozen is None:
                return
            self._prepared.append(Prepared(number, Fingerprint.of(batch), step))
            self._filler.add(step.frozen)

    def _take_prepared(self, batch: Any, batch_index: int) -> StepWork | None:
        """What earlier steps prepared for this batch, if they did.

        Raises:
            ConfigurationError: They prepared another batch under the same number.
        """
        if not self._prepared:
            return None
        if self._prepared[0].batch_index != batch_index:
            self.drop_prepared()
            return None
        prepared = self._prepared.popleft()
        difference = prepared.fingerprint.difference(Fingerprint.of(batch))
        if difference:
            raise ConfigurationError(
                f"batch {batch_index} is not the one whose frozen layers ran in the bubbles of batches "
                f"before: {difference}. Do not change batches in callbacks; change them in the data set "
                "or in on_after_batch_transfer, or train with filling=none"
            )
        return prepared.step

    def drop_prepared(self) -> None:
        """Forgets the batches that were to come: they will not, or others will."""
        self._prepared.clear()
        if self._filler is not None:
            self._filler.cancel()

    def close(self) -> None:
        """Gives back threads and tensors that outlive a step."""
        self.drop_prepared()
        self._transport.close()

    def _observe(self, step: StepWork) -> None:
        """Lets the shares follow what was measured, a step later: by then a GPU has come by."""
        past, ended_s = self._last, time.perf_counter()
        ran = step.frozen.ran if step.frozen is not None and step.ahead else None
        num_groups = step.frozen.num_own_groups if step.frozen is not None else 0
        recording = self.executor.recording
        self._last = _Past(recording, ended_s, ran, num_groups, step.total_groups)
        if past is None or past.ran is None or self._shares is None or not self._shares.adapts:
            return
        self._shares.observe(
            ended_s - past.ended_s,
            past.recording.compute_s + recording.started_s - past.ended_s,
            self._clock_s(past.ran),
            past.num_groups,
            past.total_groups,
        )

    def _clock_s(self, stamps: Sequence[tuple[Any, Any]]) -> float:
        if stamps and not self._clock.is_past(stamps[-1][1]):
            self._clock.settle()
        return sum(self._clock.seconds(start, stop) for start, stop in stamps)

    def _gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """A few numbers of every rank of the pipeline, on all of them."""
        own = torch.tensor(numbers, dtype=torch.float64)
        gathered = [torch.zeros_like(own) for _ in range(self.schedule.num_ranks)]
        dist.all_gather(gathered, own, group=self.mesh.control)
        return [row.tolist() for row in gathered]

    def _works(
        self,
        batch: Any,
        sizes: tuple[int, ...],
        batch_index: int,
        accumulate: int,
        arguments: tuple[Any, ...],
    ) -> list[MicrobatchWork]:
        total = self._total_samples(sum(sizes))
        return [
            MicrobatchWork(
                index=index,
                call=partial(self._step, self._root, microbatch, *arguments),
                seed=microbatch_seed(self._seed, self.mesh.pipeline, batch_index, index),
                loss_scale=size / total / accumulate,
                partitioned=self.steps.of(microbatch),
                num_samples=size,
            )
            for index, (size, microbatch) in enumerate(zip(sizes, split(batch, sizes), strict=True))
        ]

    def _total_samples(self, own: int) -> int:
        """Samples of this step over all pipelines, so that every sample weighs the same."""
        if self.mesh.layout.num_pipelines == 1:
            return own
        total = torch.tensor([own])
        dist.all_reduce(total, group=self.mesh.data_parallel)
        return int(total)

    def _splits_frozen(self, works: Sequence[MicrobatchWork]) -> bool | None:
        """Whether frozen work can be split by samples; `None` if there is none."""
        views = [work.partitioned.frozen_view for work in works]
        if all(view is None for view in views):
            return None
        return all(view is not None and view.is_splittable for view in views)

    def _share_results(self, works: Sequence[MicrobatchWork]) -> Exchange | None:
        under_way = self._results.start(works)
        if not under_way:
            return None
        return self._transport.awaited(under_way, "loss and metrics", lambda: None)

    def _start_reduction(self) -> Exchange | None:
        if not self._reduces:
            return None
        reduction = self.reducer.start()
        if not reduction.works:
            return None
        return self._transport.awaited(reduction.works, "summed gradients", reduction.finish)


def _lower(
    schedule: Schedule,
    sizes: tuple[int, ...],
    splits_frozen: bool | None,
    group_size: int,
    groups: tuple[int, ...] | None,
) -> tuple[Schedule, tuple[EncodePart, ...]]:
    """The schedule with all communication and, if there is frozen work, its parts."""
    parts: tuple[EncodePart, ...] = ()
    if splits_frozen is not None:
        parts = encode_parts(sizes, schedule.num_ranks, splits_frozen, group_size, groups)
    lowered = lower(prefix_frozen(schedule, parts, encoded=groups is not None))
    programs = tuple((*program, ShareResults()) for program in lowered.programs)
    return replace(lowered, programs=programs), parts
