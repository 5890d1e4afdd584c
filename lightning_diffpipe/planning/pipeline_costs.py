"""The costs of one pipeline as plain tables: what the simulator reads, and what a plan keeps.

Stored in the plan, they let a plan be drawn, compared and simulated again without the profile. Their JSON has
one row for each size of microbatch, not for each microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from lightning_diffpipe.planning.cluster import Cluster, Link
from lightning_diffpipe.planning.codec import Node, read_value
from lightning_diffpipe.planning.cost import CostModel, LayerRun
from lightning_diffpipe.planning.filling import EncodePart
from lightning_diffpipe.planning.instruction import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Encode,
    Forward,
    ForwardNoGrad,
    UpdateWeights,
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
        encode_s: By frozen part.
        all_reduce_s: Summing the gradients of its stages, by rank.
        all_gather_s: Exchange of the frozen results.
        holds_sender: See `Costs`.
        split_s: What `BackwardInput` and `BackwardWeight` together take longer than `Backward`; nothing
            if empty.
        first_layers: Where the stages begin that these are the costs of; empty where that is not known.
    """

    sizes: tuple[int, ...]
    forward_s: Table
    backward_s: Table
    weight_gradient_s: Table
    activation_s: Table
    gradient_s: Table
    encode_s: tuple[float, ...] = ()
    all_reduce_s: tuple[float, ...] = ()
    all_gather_s: float = 0.0
    holds_sender: bool = False
    split_s: Table = ()
    first_layers: tuple[int, ...] = ()

    def compute_s(self, instruction: Compute) -> float:
        """See `Costs`."""
        match instruction:
            case Forward(stage, microbatch) | ForwardNoGrad(stage, microbatch):
                return self.forward_s[stage][microbatch]
            case Backward(stage, microbatch):
                return self.backward_s[stage][microbatch]
            case BackwardInput(stage, microbatch):
                whole_s = self.backward_s[stage][microbatch]
                weight_s = self._weight_s(stage, microbatch)
                return whole_s - weight_s + self._added_s(stage, microbatch)
            case BackwardWeight(stage, microbatch):
                return self._weight_s(stage, microbatch) + self._added_s(stage, microbatch)
            case Encode(part):
                return self.encode_s[part]
            case UpdateWeights(stage):  # of a schedule that gives every rank one stage, in order
                return self.reduce_s(stage)
        return 0.0

    def repeated(self, num_batches: int) -> PipelineCosts:
        """The same for so many batches in a row."""

        def longer(table: Table) -> Table:
            return tuple(row * num_batches for row in table)

        return replace(
            self,
            sizes=self.sizes * num_batches,
            forward_s=longer(self.forward_s),
            backward_s=longer(self.backward_s),
            weight_gradient_s=longer(self.weight_gradient_s),
            activation_s=longer(self.activation_s),
            gradient_s=longer(self.gradient_s),
            split_s=longer(self.split_s),
        )

    def _weight_s(self, stage: int, microbatch: int) -> float:
        """The part of a backward that makes weight gradients; rounding, or a plan by hand, may exceed the whole."""
        return min(self.weight_gradient_s[stage][microbatch], self.backward_s[stage][microbatch])

    def _added_s(self, stage: int, microbatch: int) -> float:
        """What splitting adds to either half of a backward."""
        return self.split_s[stage][microbatch] / 2 if self.split_s else 0.0

    def message_s(self, message: Message) -> float:
        """See `Costs`."""
        if message.kind == "gradient":
            return self.gradient_s[message.stage][message.microbatch]
        return self.activation_s[message.stage][message.microbatch]

    def link_s(self) -> float:
        """Seconds of all messages between stages."""
        return sum(sum(row) for table in (self.activation_s, self.gradient_s) for row in table)

    def reduce_s(self, rank: int) -> float:
        """See `Costs`."""
        return self.all_reduce_s[rank] if self.all_reduce_s else 0.0

    def exchange_s(self) -> float:
        """See `Costs`."""
        return self.all_gather_s


@dataclass(frozen=True)
class PipelineLinks:
    """Which links the messages of one of several equal pipelines take.

    Of several pipelines, or replicas, the one on the slowest links counts.

    Attributes:
        cluster: The links there are.
        placement: Where the stages run.
        num_pipelines: Pipelines side by side; gradients are summed over all of them.
    """

    cluster: Cluster
    placement: Placement
    num_pipelines: int = 1

    def _first_ranks(self) -> range:
        """The first rank of every pipeline."""
        num_ranks = self.placement.num_ranks
        return range(0, self.num_pipelines * num_ranks, num_ranks)

    def _between(self, stage: int, reader: int) -> tuple[Link, ...]:
        ranks = self.placement.stage_ranks
        pairs = {(a, b) for a in ranks[stage] for b in ranks[reader] if a != b}
        between, firsts = self.cluster.p2p_between, self._first_ranks()
        return tuple({between(f + a, f + b) for f in firsts for a, b in pairs})

    @cached_property
    def downwards(self) -> tuple[tuple[Link, ...], ...]:
        """By stage: the different links to the stage after; none after the last."""
        after = [self.placement.next_stage(s) for s in range(self.placement.num_stages)]
        return tuple(() if a is None else self._between(s, a) for s, a in enumerate(after))

    @cached_property
    def reductions(self) -> tuple[tuple[Link, int], ...]:
        """By stage: the link its gradients are summed over, and the number of ranks that hold it."""
        groups = [
            tuple(first + rank for first in self._first_ranks() for rank in ranks)
            for ranks in self.placement.stage_ranks
        ]
        return tuple((self.cluster.all_reduce_among(group), len(group)) for group in groups)

    def all_gather_s(self, num_bytes: float) -> float:
        """Bytes from all ranks of a pipeline to all of them: half an all-reduce."""
        group = tuple(range(self.placement.num_ranks))
        return self.cluster.all_reduce_among(group).all_reduce_s(num_bytes, len(group)) / 2


def pipeline_costs(
    model: CostModel,
    links: PipelineLinks,
    runs: Sequence[LayerRun],
    sizes: Sequence[int],
    parts: Sequence[EncodePart] = (),
    group_size: int | None = None,
) -> PipelineCosts:
    """Tables for one of several equal pipelines.

    Args:
        model: The cost model.
        links: What its messages travel over.
        runs: The layers of each stage.
        sizes: Samples of each microbatch.
        parts: Frozen parts, by index.
        group_size: Samples on which frozen layers run at a time; None for all of a part.
    """
    placement, distinct = links.placement, frozenset(sizes)

    def row(seconds: Callable[[int], float]) -> tuple[float, ...]:
        of_size = {size: seconds(size) for size in distinct}
        return tuple([of_size[size] for size in sizes])

    def table(seconds: Callable[[LayerRun, float], float]) -> Table:
        return tuple(row(partial(seconds, run)) for run in runs)

    crossing = model.crossing_bytes(runs, placement)

    def boundary_s(stage: int, size: int) -> float:
        messages_s = (link.seconds(size * crossing[stage]) for link in links.downwards[stage])
        return max(messages_s, default=0.0)

    # What goes down over a cut as activations comes back over it as gradients.
    stages = range(placement.num_stages)
    gradient = tuple(row(partial(boundary_s, stage)) for stage in stages)
    before = [placement.previous_stage(stage) for stage in stages]
    nothing = (0.0,) * len(sizes)
    sums_s = [
        link.all_reduce_s(model.gradient_bytes(run), num_ranks)
        for run, (link, num_ranks) in zip(runs, links.reductions, strict=True)
    ]
    return PipelineCosts(
        sizes=tuple(sizes),
        forward_s=table(model.forward_s),
        backward_s=table(model.backward_s),
        weight_gradient_s=table(model.weight_gradient_s),
        activation_s=tuple(nothing if b is None else gradient[b] for b in before),
        gradient_s=gradient,
        encode_s=tuple(model.encode_s(part.num_samples, group_size) for part in parts),
        all_reduce_s=tuple(
            sum(sums_s[stage] for stage in placement.stages_of(rank))
            for rank in range(placement.num_ranks)
        ),
        all_gather_s=links.all_gather_s(sum(sizes) * model.encoding_bytes_per_sample),
        holds_sender=links.cluster.p2p.holds_sender,
        split_s=table(model.split_s) if any(b.split_s for b in model.profile.backbones) else (),
        first_layers=tuple([run.first for run in runs]),
    )


TABLES = ("forward_s", "backward_s", "weight_gradient_s", "activation_s", "gradient_s")


def costs_to_json(costs: PipelineCosts) -> dict[str, object]:
    """The JSON form: tables as `{samples: [seconds of each stage]}`."""
    first = {size: costs.sizes.index(size) for size in sorted(set(costs.sizes))}
    tables: dict[str, object] = {
        name: _table_to_json(getattr(costs, name), first) for name in TABLES
    }
    return {
        "sizes": list(costs.sizes),
        **tables,
        "encode_s": list(costs.encode_s),
        "all_reduce_s": list(costs.all_reduce_s),
        "all_gather_s": costs.all_gather_s,
        **({"holds_sender": True} if costs.holds_sender else {}),
        **({"split_s": _table_to_json(costs.split_s, first)} if costs.split_s else {}),
        **({"first_layers": list(costs.first_layers)} if costs.first_layers else {}),
    }


def _table_to_json(table: Table, first: Mapping[int, int]) -> dict[str, list[float]]:
    return {str(size): [row[at] for row in table] for size, at in first.items()}


def costs_from_node(node: Node) -> PipelineCosts:
    """Reads the JSON form back.

    Raises:
        DiffPipeError: Of the node's type; names the bad key.
    """
    keys = ("sizes", *TABLES, "encode_s", "all_reduce_s", "all_gather_s")
    node.check_keys(keys, ("holds_sender", "split_s", "first_layers"))
    sizes = tuple(size.integer(minimum=1) for size in node["sizes"].elements())
    tables = {name: _read_table(node[name], sizes) for name in (*TABLES, "split_s") if name in node}
    first_layers = node["first_layers"].elements() if "first_layers" in node else ()
    return PipelineCosts(
        sizes=sizes,
        **tables,
        encode_s=read_value(tuple[float, ...], node["encode_s"]),
        all_reduce_s=read_value(tuple[float, ...], node["all_reduce_s"]),
        all_gather_s=node["all_gather_s"].number(),
        holds_sender="holds_sender" in node and node["holds_sender"].flag(),
        first_layers=tuple(layer.integer() for layer in first_layers),
    )


def _read_table(node: Node, sizes: tuple[int, ...]) -> Table:
    node.check_keys(sorted({str(size) for size in sizes}))
    columns = [read_value(tuple[float, ...], node[str(size)]) for size in sizes]
    for size, column in zip(sizes, columns, strict=True):
        if len(column) != len(columns[0]):
            raise node[str(size)].expected(f"{len(columns[0])} numbers, one for each stage")
    return tuple(zip(*columns, strict=True))
