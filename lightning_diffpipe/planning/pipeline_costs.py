"""The costs of one pipeline as plain tables: what the simulator reads, and what a plan keeps.

Kept in the plan, they let a plan be drawn, compared and simulated again without the profile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_diffpipe.planning.cost import CostModel, LayerRun
from lightning_diffpipe.planning.frozen_parts import EncodePart
from lightning_diffpipe.planning.instruction import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Encode,
    Forward,
    ForwardNoGrad,
)
from lightning_diffpipe.planning.schedule import Message, Placement

Table = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class PipelineCosts:
    """Costs of one of several equal pipelines, in seconds.

    Attributes:
        sizes: Samples of each microbatch.
        forward_s: By stage and microbatch, as all tables here.
        backward_s: Whole backward.
        weight_gradient_s: The part of it that is `BackwardWeight`.
        activation_s: Time on the link of the activation that this stage reads.
        gradient_s: Time on the link of the gradient that this stage reads.
        feedback_s: By microbatch.
        encode_s: By frozen part.
        reduce_s: By rank.
        all_gather_s: Exchange of the frozen results.
    """

    sizes: tuple[int, ...]
    forward_s: Table
    backward_s: Table
    weight_gradient_s: Table
    activation_s: Table
    gradient_s: Table
    feedback_s: tuple[float, ...] = ()
    encode_s: tuple[float, ...] = ()
    all_reduce_s: tuple[float, ...] = ()
    all_gather_s: float = 0.0

    def compute_s(self, instruction: Compute) -> float:
        """See `Costs`."""
        match instruction:
            case Forward(stage, microbatch) | ForwardNoGrad(stage, microbatch):
                return self.forward_s[stage][microbatch]
            case Backward(stage, microbatch):
                return self.backward_s[stage][microbatch]
            case BackwardInput(stage, microbatch):
                weight_s = self.weight_gradient_s[stage][microbatch]
                return self.backward_s[stage][microbatch] - weight_s
            case BackwardWeight(stage, microbatch):
                return self.weight_gradient_s[stage][microbatch]
            case Encode(part):
                return self.encode_s[part]
        return 0.0

    def message_s(self, message: Message) -> float:
        """See `Costs`."""
        match message.kind:
            case "feedback":
                return self.feedback_s[message.microbatch]
            case "gradient":
                return self.gradient_s[message.stage][message.microbatch]
        return self.activation_s[message.stage][message.microbatch]

    def reduce_s(self, rank: int) -> float:
        """See `Costs`."""
        return self.all_reduce_s[rank] if self.all_reduce_s else 0.0

    def exchange_s(self) -> float:
        """See `Costs`."""
        return self.all_gather_s


def pipeline_costs(
    model: CostModel,
    placement: Placement,
    runs: Sequence[LayerRun],
    sizes: Sequence[int],
    num_pipelines: int = 1,
    parts: Sequence[EncodePart] = (),
) -> PipelineCosts:
    """Tables for one of several equal pipelines.

    Args:
        model: The cost model.
        placement: Where the stages run.
        runs: The layers of each stage.
        sizes: Samples of each microbatch.
        num_pipelines: Pipelines side by side; gradients are summed over all of them.
        parts: Frozen parts, by index.
    """
    links = _Links(model, placement, tuple(runs), num_pipelines)
    first_samples = model.profile.self_conditioning.feedback_bytes_per_sample

    def table(seconds: Callable[[LayerRun, float], float]) -> Table:
        return tuple(tuple(seconds(run, size) for size in sizes) for run in runs)

    def gradient_row(stage: int) -> tuple[float, ...]:
        # What goes down over a cut as activations comes back over it as gradients.
        return tuple(links.boundary_s(stage, size) for size in sizes)

    stages = range(placement.num_stages)
    gradient = tuple(gradient_row(stage) for stage in stages)
    before = [placement.previous_stage(stage) for stage in stages]
    nothing = (0.0,) * len(sizes)
    return PipelineCosts(
        sizes=tuple(sizes),
        forward_s=table(model.forward_s),
        backward_s=table(model.backward_s),
        weight_gradient_s=table(model.weight_gradient_s),
        activation_s=tuple(nothing if b is None else gradient[b] for b in before),
        gradient_s=gradient,
        feedback_s=tuple(links.feedback_s(size * first_samples) for size in sizes),
        encode_s=tuple(model.encode_s(part.num_samples) for part in parts),
        all_reduce_s=tuple(links.reduce_s(rank) for rank in range(placement.num_ranks)),
        all_gather_s=links.exchange_s(sum(sizes)),
    )


@dataclass(frozen=True, slots=True)
class _Links:
    """Seconds on links; of several pipelines the one on the slowest links counts."""

    model: CostModel
    placement: Placement
    runs: tuple[LayerRun, ...]
    num_pipelines: int

    def first_ranks(self) -> range:
        """The first rank of every pipeline."""
        num_ranks = self.placement.num_ranks
        return range(0, self.num_pipelines * num_ranks, num_ranks)

    def boundary_s(self, stage: int, size: int) -> float:
        """The tensors alive behind a stage, to the stage after."""
        after = self.placement.next_stage(stage)
        if after is None:
            return 0.0
        return self._slowest_s(stage, after, self.model.boundary_bytes(self.runs[stage], size))

    def feedback_s(self, num_bytes: float) -> float:
        """From the last stage to the first."""
        last = self.placement.backbone_of(0)[-1]
        return self._slowest_s(last, 0, num_bytes) if last else 0.0

    def _slowest_s(self, stage: int, reader: int, num_bytes: float) -> float:
        cluster, ranks = self.model.cluster, self.placement.stage_ranks
        pairs = {(a, b) for a in ranks[stage] for b in ranks[reader] if a != b}
        links = {cluster.p2p_between(f + a, f + b) for f in self.first_ranks() for a, b in pairs}
        return max((link.seconds(num_bytes) for link in links), default=0.0)

    def reduce_s(self, rank: int) -> float:
        """All gradients of a rank, over all replicas and pipelines."""
        total = 0.0
        for stage in self.placement.stages_of(rank):
            replicas = self.placement.stage_ranks[stage]
            group = tuple(first + r for first in self.first_ranks() for r in replicas)
            link = self.model.cluster.all_reduce_among(group)
            total += link.all_reduce_s(self.model.gradient_bytes(self.runs[stage]), len(group))
        return total

    def exchange_s(self, samples: int) -> float:
        """All frozen results to all ranks of a pipeline: an all-gather is half an all-reduce."""
        num_bytes = samples * self.model.frozen_output_bytes_per_sample
        group = tuple(range(self.placement.num_ranks))
        return self.model.cluster.all_reduce_among(group).all_reduce_s(num_bytes, len(group)) / 2
