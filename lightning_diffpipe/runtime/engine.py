"""A module trained as a pipeline: everything between a batch and its gradients.

The engine holds one rank's side of a plan. For every batch it cuts microbatches, looks up (or makes)
the layer graph for their sizes, lowers the schedule, runs this rank's program and shares the results:

    batch -> microbatches -> MicrobatchWork -> Executor -> gradients in .grad, loss on every rank

It knows no Lightning: a step is a function of the module and a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_diffpipe.graph.cut import Cut, cut, uncut
from lightning_diffpipe.graph.frozen import FrozenView
from lightning_diffpipe.graph.interception import Interception
from lightning_diffpipe.graph.layer import LayerGraph, batch_signature
from lightning_diffpipe.graph.probe import reprobe
from lightning_diffpipe.graph.view import StageView
from lightning_diffpipe.planning.frozen_parts import EncodePart, encode_parts
from lightning_diffpipe.planning.instruction import Program
from lightning_diffpipe.planning.lowering import lower
from lightning_diffpipe.planning.schedule import Placement, Schedule
from lightning_diffpipe.planning.timeline import Span
from lightning_diffpipe.runtime.executor import Executor, run_alone
from lightning_diffpipe.runtime.frozen import FrozenWork
from lightning_diffpipe.runtime.mesh import Mesh
from lightning_diffpipe.runtime.microbatch import microbatch_sizes, num_samples, split
from lightning_diffpipe.runtime.reduction import GradientReducer
from lightning_diffpipe.runtime.results import Logged, ResultSharing
from lightning_diffpipe.runtime.seeding import microbatch_seed
from lightning_diffpipe.runtime.stage import MicrobatchWork, PartitionedStep, StageRunner
from lightning_diffpipe.runtime.stash import Stash
from lightning_diffpipe.runtime.transport import P2PTransport, Transport

Step = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True)
class StepWork:
    """One batch laid out for one rank.

    Attributes:
        schedule: What all ranks of the pipeline do, with communication.
        program: This rank's part of it.
        works: The microbatches.
        frozen: The frozen parts; `None` if nothing is frozen.
    """

    schedule: Schedule
    program: Program
    works: list[MicrobatchWork]
    frozen: FrozenWork | None


@dataclass(frozen=True)
class StepResult:
    """What a step leaves besides gradients.

    Attributes:
        loss: Mean loss over the samples of the pipeline's batch; a scalar, equal on all its ranks.
        logged: What the user's step logged, averaged the same way.
        spans: When this rank ran what, in seconds of its own clock.
    """

    loss: Tensor
    logged: list[Logged]
    spans: list[Span]


class PartitionedStepCache:
    """One cut step for each signature of a microbatch.

    Args:
        root: The module.
        step: The user's step.
        graph: The graph that was planned with.
        positions: Where its path is cut.
        placement: Ranks of the stages.
        local_rank: This rank's position.
        interception: The installed wrappers.
        device: Where this rank computes.
        verify: Fill dummies with NaN.
    """

    def __init__(
        self,
        root: nn.Module,
        step: Step,
        graph: LayerGraph,
        positions: Sequence[int],
        placement: Placement,
        local_rank: int,
        interception: Interception,
        device: torch.device,
        verify: bool = False,
    ) -> None:
        self._root = root
        self._step = step
        self._verify = verify
        self._graph = graph
        self._positions = tuple(positions)
        self._stages = placement.stages_of(local_rank)
        self._alone = placement.num_ranks == 1
        self._interception = interception
        self._made: dict[str, PartitionedStep] = {}
        if device.type == "cpu":  # the probe saw host tensors, whose types autocast leaves alone
            self._made[graph.signature] = self._partition(graph)

    def of(self, microbatch: Any) -> PartitionedStep:
        """The cut step for a microbatch; probes sizes that were not seen before.

        Raises:
            GraphError: With these sizes the step calls other layers.
        """
        key = batch_signature(microbatch)
        if key not in self._made:
            graph = reprobe(self._root, self._step, microbatch, self._graph)
            self._made[key] = self._partition(graph)
        return self._made[key]

    def _partition(self, graph: LayerGraph) -> PartitionedStep:
        pieces = cut_for(graph, self._positions, self._alone)
        views = {
            stage: StageView(
                self._root, graph, pieces.stages[stage], self._interception, verify=self._verify
            )
            for stage in self._stages
        }
        frozen = (
            FrozenView(self._root, graph, pieces.frozen, self._interception, verify=self._verify)
            if pieces.frozen.layers
            else None
        )
        return PartitionedStep(graph, pieces, views, frozen)


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

    Attributes:
        executor: Runs this rank's programs.
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
    ) -> None:
        self.mesh = mesh
        self.schedule = schedule
        self.reducer = reducer
        self._root = root
        self._step = step
        self._steps = steps
        self._seed = seed
        self._reduces = True
        self._picture = picture
        placement = schedule.placement
        stash = Stash()
        self._transport = transport or P2PTransport(mesh, placement.num_stages)
        self.executor = Executor(
            mesh.local_rank,
            StageRunner(stash, mesh.device, check_finite),
            stash,
            self._transport,
            self._reduce_gradients,
        )
        self._results = ResultSharing(mesh, placement.rank_of(placement.num_stages - 1, 0))
        self._lowered = lru_cache(maxsize=32)(partial(_lower, schedule))

    @property
    def num_pipelines(self) -> int:
        """Pipelines side by side."""
        return self.mesh.layout.num_pipelines

    def run_step(
        self, batch: Any, batch_index: int, accumulate: int = 1, reduce_gradients: bool = True
    ) -> StepResult:
        """Runs one batch forward and backward; gradients are added to `.grad`.

        Args:
            batch: This pipeline's batch, on this rank's device.
            batch_index: Number of the batch since training began; seeds its random numbers.
            accumulate: Batches whose gradients are averaged before an optimizer step.
            reduce_gradients: Sum gradients over ranks at the end; not before the last batch of an
                accumulation window.

        Raises:
            ConfigurationError: The batch has fewer samples than there are microbatches.
            PipelineTimeoutError: A message did not come in time.
            GraphError: The step did not call the layers that were probed.
        """
        step = self.lay_out(batch, batch_index, accumulate)
        self._reduces = reduce_gradients
        run_alone(
            self.executor,
            step.program,
            step.works,
            step.frozen,
            picture=lambda position: (
                self._picture(step.schedule, position, self.mesh.local_rank)
                if self._picture
                else ""
            ),
        )
        loss, logged = self._results.share(step.works)
        return StepResult(loss, logged, self.executor.spans)

    def lay_out(self, batch: Any, batch_index: int, accumulate: int = 1) -> StepWork:
        """Cuts a batch into microbatches and adds communication to the schedule; runs nothing.

        Args:
            batch: As for `run_step`.
            batch_index: As for `run_step`.
            accumulate: As for `run_step`.

        Raises:
            ConfigurationError: The batch has fewer samples than there are microbatches.
        """
        sizes = microbatch_sizes(num_samples(batch), self.schedule.num_microbatches)
        works = self._works(batch, sizes, batch_index, accumulate)
        lowered, parts = self._lowered(sizes, self._splits_frozen(works))
        mesh, placement = self.mesh, self.schedule.placement
        frozen = (
            FrozenWork(parts, works, placement, mesh.local_rank, mesh.device) if parts else None
        )
        return StepWork(lowered, lowered.programs[mesh.local_rank], works, frozen)

    def _works(
        self, batch: Any, sizes: tuple[int, ...], batch_index: int, accumulate: int
    ) -> list[MicrobatchWork]:
        total = self._total_samples(sum(sizes))
        return [
            MicrobatchWork(
                index=index,
                call=partial(self._step, self._root, microbatch),
                seed=microbatch_seed(self._seed, self.mesh.pipeline, batch_index, index),
                loss_scale=size / total / accumulate,
                partitioned=self._steps.of(microbatch),
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

    def _reduce_gradients(self) -> None:
        if self._reduces:
            self.reducer.reduce()


def _lower(
    schedule: Schedule, sizes: tuple[int, ...], splits_frozen: bool | None
) -> tuple[Schedule, tuple[EncodePart, ...]]:
    """The schedule with communication and, if there is frozen work, its parts."""
    parts: tuple[EncodePart, ...] = ()
    if splits_frozen is not None:
        parts = encode_parts(sizes, schedule.num_ranks, splits_frozen)
    return lower(schedule, parts), parts


def cut_for(graph: LayerGraph, positions: Sequence[int], alone: bool) -> Cut:
    """Cuts a graph; a rank alone runs frozen layers where they are called, not in advance."""
    pieces = cut(graph, positions)
    if not alone:
        return pieces
    nothing = replace(pieces.frozen, layers=frozenset(), sent=(), parameters=frozenset())
    return replace(pieces, frozen=nothing, stages=(uncut(graph),))


def holders_of(cut_step: Cut, mesh: Mesh, trained: frozenset[str]) -> Mapping[str, tuple[int, ...]]:
    """World ranks that hold each trained parameter, over all pipelines."""
    stages_of: dict[str, set[int]] = {}
    for stage in cut_step.stages:
        for name in stage.parameters & trained:
            stages_of.setdefault(name, set()).add(stage.index)
    return {name: mesh.layout.ranks_of_stages(stages) for name, stages in stages_of.items()}
