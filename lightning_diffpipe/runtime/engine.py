"""A module trained as a pipeline: everything between a batch and its gradients.

The engine holds one rank's side of a plan. For every batch it cuts microbatches, looks up (or makes)
the layer graph for their sizes, lowers the schedule, runs this rank's program and shares the results:

    batch -> microbatches -> MicrobatchWork -> Executor -> gradients in .grad, loss on every rank

With filling, the next batch is laid out too, and its frozen layers run while this one waits; the next
step then begins with their results.

It knows no Lightning: a step is a function of the module and a batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_diffpipe.clock import clock_for
from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.planning.frozen_parts import (
    EncodePart,
    encode_parts,
    group_size_of,
    num_groups_of,
)
from lightning_diffpipe.planning.instruction import Program
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
    """

    schedule: Schedule
    program: Program
    works: list[MicrobatchWork]
    frozen: FrozenWork | None
    total_groups: int


@dataclass(frozen=True)
class Prepared:
    """The next batch, its frozen layers done.

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
    """

    mode: FillingMode | None = None
    adapts: bool = True
    planned_shares: tuple[float, ...] = ()


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
        self._times: FillingTimes | None = None
        self._shares: GroupShares | None = None
        self._prepared: Prepared | None = None
        self._ended_s: float | None = None
        placement = schedule.placement
        stash = Stash()
        self._transport = transport or P2PTransport(mesh, placement.num_stages)
        self.executor = Executor(
            mesh.local_rank,
            StageRunner(stash, mesh.device, check_finite),
            stash,
            self._transport,
            self._start_reduction,
            self._clock,
        )
        self._results = ResultSharing(mesh, placement.rank_of(placement.num_stages - 1, 0))
        self._lowered = lru_cache(maxsize=32)(partial(_lower, schedule))

    @property
    def num_pipelines(self) -> int:
        """Pipelines side by side."""
        return self.mesh.layout.num_pipelines

    def fill_bubbles(self, filling: Filling) -> None:
        """From now on the frozen layers of the next batch run while this one waits."""
        mode = filling.mode or ("opportunistic" if self.mesh.backend == "gloo" else "planned")
        self._times = FillingTimes(mode, self._clock)
        self._shares = GroupShares(
            self.schedule.num_ranks, self._gather, filling.adapts, filling.planned_shares
        )

    def run_step(
        self,
        batch: Any,
        batch_index: int,
        accumulate: int = 1,
        reduce_gradients: bool = True,
        arguments: tuple[Any, ...] = (),
        upcoming: tuple[Any, tuple[Any, ...]] | None = None,
    ) -> StepResult:
        """Runs one batch forward and backward; gradients are added to `.grad`.

        Args:
            batch: This pipeline's batch, on this rank's device.
            batch_index: Number of the batch since training began; seeds its random numbers.
            accumulate: Batches whose gradients are averaged before an optimizer step.
            reduce_gradients: Sum gradients over ranks at the end; not before the last batch of an
                accumulation window.
            arguments: Further arguments of the step.
            upcoming: The next batch and its arguments; its frozen layers run in the bubbles. Give it
                on all ranks or on none.

        Raises:
            ConfigurationError: The batch has fewer samples than there are microbatches, or is another
                than the `upcoming` of the step before.
            PipelineTimeoutError: A message did not come in time.
            GraphError: The step did not call the layers that were probed.
        """
        step = self._take_prepared(batch, batch_index)
        if step is None:
            step = self.lay_out(batch, batch_index, accumulate, arguments)
        following = self._lay_out_upcoming(upcoming, batch_index + 1, accumulate)
        filler = Filler(following.step.frozen, self._times) if following else None
        self._reduces = reduce_gradients
        try:
            run_alone(
                self.executor, step.program, step.works, step.frozen, filler,
                picture=lambda position: self._drawn(step.schedule, position),
            )  # fmt: skip
        except BaseException:
            if filler is not None:
                filler.cancel()
            raise
        if following is not None:
            following.step.frozen.exchange(self._transport)
            self._prepared = following
        loss, logged = self._results.share(step.works)
        self._observe(following)
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
            groups: If its frozen layers are to run in the bubbles of the batch before: how so many
                groups are shared over the ranks.

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
        return StepWork(lowered, lowered.programs[mesh.local_rank], works, frozen, total)

    def _lay_out_upcoming(
        self, upcoming: tuple[Any, tuple[Any, ...]] | None, batch_index: int, accumulate: int
    ) -> Prepared | None:
        """The next batch, if its frozen layers shall run in the bubbles of this one."""
        if upcoming is None or self._shares is None:
            return None
        batch, arguments = upcoming
        step = self.lay_out(batch, batch_index, accumulate, arguments, self._shares.counts)
        if step.frozen is None:
            return None
        return Prepared(batch_index, Fingerprint.of(batch), step)

    def _take_prepared(self, batch: Any, batch_index: int) -> StepWork | None:
        """What the step before prepared for this batch, if it did.

        Raises:
            ConfigurationError: It prepared another batch under the same number.
        """
        prepared, self._prepared = self._prepared, None
        if prepared is None or prepared.batch_index != batch_index:
            return None
        difference = prepared.fingerprint.difference(Fingerprint.of(batch))
        if difference:
            raise ConfigurationError(
                f"batch {batch_index} is not the one whose frozen layers ran in the bubbles of the batch "
                f"before: {difference}. Do not change batches in callbacks; change them in the data set "
                "or in on_after_batch_transfer, or train with filling=none"
            )
        return prepared.step

    def drop_prepared(self) -> None:
        """Forgets the next batch: it will not come."""
        self._prepared = None

    def close(self) -> None:
        """Gives back threads and tensors that outlive a step."""
        self.drop_prepared()
        self._transport.close()

    def _observe(self, following: Prepared | None) -> None:
        """Lets the shares follow what was measured."""
        recording, ended_s = self.executor.recording, time.perf_counter()
        if following is not None and self._shares is not None and self._shares.adapts:
            assert following.step.frozen is not None
            before_s = self._ended_s or recording.started_s
            self._shares.observe(
                ended_s - before_s,
                recording.compute_s + recording.started_s - before_s,
                recording.encode_s,
                following.step.frozen.num_own_groups,
                following.step.total_groups,
            )
        self._ended_s = ended_s

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
    """The schedule with communication and, if there is frozen work, its parts."""
    parts: tuple[EncodePart, ...] = ()
    if splits_frozen is not None:
        parts = encode_parts(sizes, schedule.num_ranks, splits_frozen, group_size, groups)
    return lower(prefix_frozen(schedule, parts, encoded=groups is not None)), parts
