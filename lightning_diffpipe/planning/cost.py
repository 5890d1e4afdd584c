"""Costs of a run of layers on a cluster: seconds, bytes on links, bytes in memory.

A `CostModel` answers for any run of layers, fast, since the partitioner asks many thousand times.
`PipelineCosts` answers for one pipeline, instruction by instruction, which is what the simulator
asks. Stored in the plan, its tables let a plan be shown, compared and simulated again without the
profile; their JSON has one row for each size of microbatch, not for each microbatch.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, wraps
from itertools import accumulate, pairwise
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from lightning_diffpipe.planning.cluster import Cluster, Link
from lightning_diffpipe.planning.codec import Node, read_value, stored
from lightning_diffpipe.planning.filling import (
    EncodePart,
    cheapest_group_size,
    encode_parts,
    group_size_of,
    grouped_s,
)
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
from lightning_diffpipe.planning.options import PlanOptions
from lightning_diffpipe.planning.profile import BackboneProfile, ModelProfile
from lightning_diffpipe.planning.schedule import Message, Placement, route


@dataclass(frozen=True, slots=True)
class LayerRun:
    """Layers `first` (inclusive) to `stop` (exclusive)."""

    first: int
    stop: int


class _Sums(NamedTuple):
    """Running sums over the layers of a backbone: entry `i` is the sum of the first `i` layers."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight_gradient: tuple[float, ...]


_P = ParamSpec("_P")
_R = TypeVar("_R")


def _remembered(
    method: Callable[Concatenate[CostModel, _P], _R],
) -> Callable[Concatenate[CostModel, _P], _R]:
    """Computes a method once for the same arguments, as the partitioner asks many thousand times."""

    @wraps(method)
    def wrapped(model: CostModel, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        key = (method, args, *kwargs.items())
        if key not in model._memo:
            model._memo[key] = method(model, *args, **kwargs)
        return model._memo[key]  # type: ignore[no-any-return]

    return wrapped


@dataclass(frozen=True, slots=True)
class CostModel:
    """A profile on a cluster.

    Attributes:
        optimizer_bytes_factor: Bytes of optimizer state for each byte of gradient, 2 for Adam; likewise averages.
        is_folded: Layers stand for all calls of theirs in several passes.
        shards_optimizer: The ranks that hold a stage share its optimizer state.
        offloads_optimizer: Whether optimizer states are in host memory.
    """

    profile: ModelProfile
    cluster: Cluster
    optimizer_bytes_factor: float = 2.0
    is_folded: bool = False
    averages_bytes_factor: float = 0.0
    shards_optimizer: bool = False
    offloads_optimizer: bool = False
    recomputes: bool = field(init=False, compare=False)
    _memo: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        recomputes = any(layer.uncheckpointed for layer in self.backbone.layers)
        object.__setattr__(self, "recomputes", recomputes)

    @classmethod
    def of(cls, profile: ModelProfile, cluster: Cluster, options: PlanOptions) -> CostModel:
        """Returns the costs of a profile with what the options say of states that live as long as the weights."""
        factors = options.optimizer_bytes_factor, False, options.averages_bytes_factor
        offloads = options.optimizer_offload == "all"
        return cls(profile, cluster, *factors, options.shard_optimizer is True, offloads)

    @property
    def backbone(self) -> BackboneProfile:
        """The layers that are cut: all backbones, joined."""
        return self.profile.backbones[0]

    @property
    def num_layers(self) -> int:
        """Number of layers of the backbone."""
        return len(self.backbone.layers)

    @property
    def starts(self) -> tuple[int, ...]:
        """First layers of the chains whose stages run in opposite directions; `(0,)` if there is one chain."""
        return tuple([first for _, first in self.backbone.chains]) or (0,)

    @_remembered
    def sums(self, samples: float) -> _Sums:
        """Returns running sums of the times of all layers, for that many samples."""
        layers = self.backbone.layers
        times = (
            [layer.forward_s.at(samples) for layer in layers],
            [layer.backward_s.at(samples) for layer in layers],
            [layer.weight_gradient_at(samples) for layer in layers],
        )
        return _Sums(*(tuple(accumulate(each, initial=0.0)) for each in times))

    @_remembered
    def work_s(self, sizes: tuple[int, ...]) -> tuple[float, ...]:
        """Returns running sums of forwards and backwards of all layers, for all microbatches of these sizes."""
        total = [0.0] * (self.num_layers + 1)
        for size, count in Counter(sizes).items():
            sums = self.sums(size)
            for i, (f, b) in enumerate(zip(sums.forward, sums.backward, strict=True)):
                total[i] += count * (f + b)
        return tuple(total)

    @_remembered
    def need_bytes(
        self, samples: float, microbatches: int, num_holders: int = 1
    ) -> tuple[float, ...]:
        """Returns running sums of what all layers keep, with activations of so many samples."""
        runs = [LayerRun(0, stop) for stop in range(self.num_layers + 1)]
        return tuple(
            self.resident_bytes(run, num_holders)
            + self.activation_bytes(run, samples, microbatches)
            for run in runs
        )

    def forward_s(self, run: LayerRun, samples: float) -> float:
        """Returns seconds of the forward of a microbatch of that many samples."""
        sums = self.sums(samples).forward
        repeated = self.backbone.repeated_s
        again_s = repeated.at(samples) if repeated is not None and run.first else 0.0
        return again_s + sums[run.stop] - sums[run.first]

    def backward_s(self, run: LayerRun, samples: float) -> float:
        """Returns seconds of the whole backward of a microbatch."""
        sums = self.sums(samples).backward
        return sums[run.stop] - sums[run.first]

    def weight_gradient_s(self, run: LayerRun, samples: float) -> float:
        """Returns seconds of the part of the backward that only makes weight gradients."""
        if self.recomputes and self.recomputed_bytes_from(run.first, samples)[run.stop]:
            return 0.0  # such a backward is not split
        sums = self.sums(samples).weight_gradient
        return sums[run.stop] - sums[run.first]

    def split_s(self, run: LayerRun, samples: float) -> float:
        """Returns what two halves of the backward take longer than the whole."""
        split_s, whole_s = self.backbone.split_s, self.sums(samples).backward[-1]
        if split_s is None or not whole_s:
            return 0.0
        return split_s.at(samples) * self.backward_s(run, samples) / whole_s

    def parameter_bytes(self, run: LayerRun) -> int:
        """Returns bytes of the parameters."""
        return self._sum_bytes(run, "parameter_bytes")

    def gradient_bytes(self, run: LayerRun) -> int:
        """Returns bytes of the gradients, as they are summed over replicas."""
        return self._sum_bytes(run, "gradient_bytes")

    def activation_bytes(self, run: LayerRun, samples: float, microbatches: int = 1) -> float:
        """Returns bytes kept between forward and backward of so many samples, in so many microbatches."""
        of_samples = samples * self._sum_bytes(run, "activation_bytes_per_sample")
        return of_samples + microbatches * self._sum_bytes(run, "activation_bytes_per_microbatch")

    @_remembered
    def recomputed_bytes_from(self, first: int, samples: float) -> tuple[float, ...]:
        """Returns bytes of activations that stages from this layer on recompute at a time, by where they stop."""
        whole = (layer.uncheckpointed for layer in self.backbone.layers[first:])
        each = (
            0.0
            if layer is None
            else samples * layer.activation_bytes_per_sample + layer.activation_bytes_per_microbatch
            for layer in whole
        )
        return (0.0,) * first + tuple(accumulate(each, max, initial=0.0))

    @_remembered
    def streamed_bytes_from(self, first: int) -> tuple[int, ...]:
        """Returns bytes of the largest streamed layer of stages from this layer on, by where they stop."""
        each = (layer.streamed_bytes for layer in self.backbone.layers[first:])
        return (0,) * first + tuple(accumulate(each, max, initial=0))

    def boundary_bytes(self, run: LayerRun, samples: float) -> float:
        """Returns bytes of all tensors that are alive across the cut after the run."""
        if run.stop == self.num_layers:
            return 0.0
        return samples * self.backbone.layers[run.stop - 1].boundary_bytes_per_sample

    def crossing_bytes(self, runs: Sequence[LayerRun], placement: Placement) -> tuple[int, ...]:
        """Returns bytes of a sample that travel after every stage: without what later ranks have already."""
        crossing = [round(self.boundary_bytes(run, 1)) for run in runs]
        if placement.num_stages == placement.num_ranks:
            return tuple(crossing)
        stops = [run.stop for run in runs]
        for skip in self.backbone.skips:
            layers = skip.made, *skip.readers
            maker, *readers = (min(bisect_right(stops, at), len(runs) - 1) for at in layers)
            later = tuple(sorted({stage for stage in readers if stage > maker}))
            if later:
                way = route(maker, later, placement.stage_ranks)
                for stage in range(maker, later[-1]):
                    if stage + 1 not in way.sent_to:
                        crossing[stage] -= skip.bytes_per_sample
        return tuple(max(num_bytes, 0) for num_bytes in crossing)

    def nested_bytes(self, first: int, stop: int) -> float:
        """Returns bytes of a sample over two cuts, if layers before `first` and from `stop` on share a rank."""
        layers, num_bytes = self.backbone.layers, 0.0
        for cut in (first, stop):
            num_bytes += layers[cut - 1].boundary_bytes_per_sample
        for skip in self.backbone.skips:
            inside = any(first <= reader < stop for reader in skip.readers)
            if skip.made < first and skip.readers[-1] >= stop:
                num_bytes -= (1 if inside else 2) * skip.bytes_per_sample
        return num_bytes

    @property
    @_remembered
    def frozen_bytes(self) -> int:
        """Bytes of the frozen encoders in memory in training; every rank that may encode holds them all."""
        return self._encoder_bytes(offloaded=False)

    @property
    @_remembered
    def offloaded_bytes(self) -> int:
        """Bytes of the frozen encoders that such a rank holds before training only."""
        return self._encoder_bytes(offloaded=True)

    def _encoder_bytes(self, offloaded: bool) -> int:
        layers = (each for each in self.profile.frozen_layers if each.offloaded == offloaded)
        return sum(layer.parameter_bytes for layer in layers)

    @property
    @_remembered
    def encoding_bytes_per_sample(self) -> int:
        """Bytes of all encodings that the backbone reads."""
        return sum(encoder.result_bytes_per_sample for encoder in self.profile.encoders)

    @property
    @_remembered
    def working_bytes_per_sample(self) -> int:
        """Bytes of a frozen layer's input and output, where they are largest."""
        rows = ([0, *(x.output_bytes_per_sample for x in e.layers)] for e in self.profile.encoders)
        return max((a + b for row in rows for a, b in pairwise(row)), default=0)

    @_remembered
    def read_bytes_from(self, first: int) -> tuple[int, ...]:
        """Returns bytes of the encodings that stages from this layer on read, by where they stop."""
        stops = range(self.num_layers + 1)
        return tuple(self.read_bytes_per_sample(LayerRun(first, stop)) for stop in stops)

    @_remembered
    def read_bytes_per_sample(self, run: LayerRun) -> int:
        """Returns bytes of the encodings that a stage of these layers reads."""
        return sum(
            encoder.result_bytes_per_sample
            if not encoder.results
            else sum(
                result.bytes_per_sample
                for result in encoder.results
                if any(run.first <= reader < run.stop for reader in result.readers)
            )
            for encoder in self.profile.encoders
        )

    @_remembered
    def group_size(self, sizes: tuple[int, ...], num_ranks: int) -> int:
        """Returns samples on which frozen layers run at a time: the cheapest, where the profile tells."""
        if any(len(layer.forward_s.points) > 1 for layer in self.profile.frozen_layers):  # measured
            return cheapest_group_size(self.encode_s, sizes, num_ranks)
        return group_size_of(sizes, num_ranks)

    @_remembered
    def encode_parts(
        self, sizes: tuple[int, ...], num_ranks: int, group_size: int | None, num_encoding: int
    ) -> tuple[EncodePart, ...]:
        """Returns even shares of the frozen work; None as `group_size` if it cannot be split."""
        splits, group_size = group_size is not None, group_size or 1
        return encode_parts(sizes, num_ranks, splits, group_size, num_encoding=num_encoding)

    @_remembered
    def encode_s(self, samples: float, group_size: int | None = None) -> float:
        """Returns seconds of all frozen encoders for that many samples, on one rank, a group at a time."""
        layers = self.profile.frozen_layers
        return sum(grouped_s(layer.forward_s.at, samples, group_size) for layer in layers)

    def resident_bytes(self, run: LayerRun, num_holders: int = 1) -> float:
        """Returns bytes of weights, gradients, averages and optimizer state of a stage on a holder's device."""
        states = 0.0 if self.offloads_optimizer else self._states_factor(num_holders)
        factor = 1 + self.averages_bytes_factor + states
        return self.parameter_bytes(run) + self.gradient_bytes(run) * factor

    def state_bytes(self, run: LayerRun, num_holders: int = 1) -> float:
        """Returns bytes of optimizer state of a stage that one of its holders has, on its device or its host."""
        return self.gradient_bytes(run) * self._states_factor(num_holders)

    def _states_factor(self, num_holders: int) -> float:
        return self.optimizer_bytes_factor / (num_holders if self.shards_optimizer else 1)

    @_remembered
    def parameter_state_bytes_from(self, first: int) -> tuple[float, ...]:
        """Returns bytes of the largest parameter's state of stages from this layer on, by where they stop."""
        layers = self.backbone.layers[first:]
        largest = (min(x.largest_gradient_bytes or math.inf, x.gradient_bytes) for x in layers)
        each = (self._states_factor(1) * num_bytes for num_bytes in largest)
        return (0.0,) * first + tuple(accumulate(each, max, initial=0.0))

    def _sum_bytes(self, run: LayerRun, name: str) -> int:
        sums = self.byte_sums(name)
        return sums[run.stop] - sums[run.first]

    @_remembered
    def byte_sums(self, name: str) -> tuple[int, ...]:
        """Returns running sums over all layers of a number of bytes in their profiles."""
        layers = self.backbone.layers
        return tuple(accumulate((getattr(layer, name) for layer in layers), initial=0))


Table = tuple[tuple[float, ...], ...]
TABLES = ("forward_s", "backward_s", "weight_gradient_s", "activation_s", "gradient_s")


def _table_to_plain(costs: PipelineCosts, key: str) -> dict[str, list[float]]:
    table: Table = getattr(costs, key)
    first = {size: costs.sizes.index(size) for size in sorted(set(costs.sizes))}
    return {str(size): [row[at] for row in table] for size, at in first.items()}


def _table_from_node(costs: Node, key: str) -> Table:
    sizes: tuple[int, ...] = read_value(tuple[int, ...], costs["sizes"], {"minimum": 1})
    table = costs[key].check_keys(sorted(set(map(str, sizes))))
    columns = [read_value(tuple[float, ...], table[str(size)]) for size in sizes]
    for size, column in zip(sizes, columns, strict=True):
        if len(column) != len(columns[0]):
            raise table[str(size)].expected(f"{len(columns[0])} numbers, one for each stage")
    return tuple(zip(*columns, strict=True))


_AS_TABLE = {"read": _table_from_node, "write": _table_to_plain}
"""Tables are written as `{samples: [seconds of each stage]}`."""


@dataclass(frozen=True, slots=True)
class PipelineCosts:
    """Costs of one of several equal pipelines, in seconds.

    Attributes:
        forward_s: Seconds of forwards by stage and microbatch, as all tables here.
        weight_gradient_s: The part of it that is `BackwardWeight`.
        activation_s: Time on the link of the activation that this stage reads.
        gradient_s: Time on the link of the gradient that this stage reads.
        encode_s: Seconds of each frozen part.
        all_reduce_s: Summing the gradients of its stages, and giving updated weights to all holders where these
            share the optimizer state, by rank.
        all_gather_s: Exchange of the frozen results.
        holds_sender: Whether the rank that sends can do nothing else while its message is on the link.
        offload_s: Copies of optimizer states to the device and back, when it steps, by rank; nothing if empty.
        split_s: Time by which `BackwardInput` and `BackwardWeight` together exceed `Backward`; 0 if empty.
    """

    sizes: tuple[int, ...] = field(metadata={"minimum": 1})
    forward_s: Table = field(metadata=_AS_TABLE)
    backward_s: Table = field(metadata=_AS_TABLE)
    weight_gradient_s: Table = field(metadata=_AS_TABLE)
    activation_s: Table = field(metadata=_AS_TABLE)
    gradient_s: Table = field(metadata=_AS_TABLE)
    encode_s: tuple[float, ...] = stored((), always=True)
    all_reduce_s: tuple[float, ...] = stored((), always=True)
    all_gather_s: float = stored(0.0, always=True)
    holds_sender: bool = False
    split_s: Table = field(default=(), metadata=_AS_TABLE)
    offload_s: tuple[float, ...] = ()

    def compute_s(self, instruction: Compute) -> float:
        """Returns the time on the rank."""
        match instruction:
            case Forward(stage, microbatch) | ForwardNoGrad(stage, microbatch):
                return self.forward_s[stage][microbatch]
            case Backward(stage, microbatch):
                return self.backward_s[stage][microbatch]
            case BackwardInput(stage, microbatch) | BackwardWeight(stage, microbatch):
                whole_s = self.backward_s[stage][microbatch]
                # Rounding, or a plan by hand, may exceed the whole.
                weight_s = min(self.weight_gradient_s[stage][microbatch], whole_s)
                half_s = weight_s if isinstance(instruction, BackwardWeight) else whole_s - weight_s
                return half_s + (self.split_s[stage][microbatch] / 2 if self.split_s else 0.0)
            case Encode(part):
                return self.encode_s[part]
            case UpdateWeights(stage):  # of a schedule that gives every rank one stage, in order
                return self.reduce_s(stage) + (self.offload_s[stage] if self.offload_s else 0.0)
        return 0.0

    def repeated(self, num_batches: int) -> PipelineCosts:
        """Returns the same for so many batches in a row."""
        tables: dict[str, Any] = {
            name: tuple(row * num_batches for row in getattr(self, name))
            for name in (*TABLES, "split_s")
        }
        return replace(self, sizes=self.sizes * num_batches, **tables)

    def message_s(self, message: Message) -> float:
        """Returns the time for which a message occupies its link; it arrives at the end of it."""
        if message.kind == "gradient":
            return self.gradient_s[message.stage][message.microbatch]
        return self.activation_s[message.stage][message.microbatch]

    def link_s(self) -> float:
        """Returns seconds of all messages between stages."""
        return sum(sum(row) for table in (self.activation_s, self.gradient_s) for row in table)

    def reduce_s(self, rank: int) -> float:
        """Returns the time to sum this rank's gradients, from when all ranks that share them are ready."""
        return self.all_reduce_s[rank] if self.all_reduce_s else 0.0

    @property
    def states_s(self) -> float:
        """Seconds after a flush in which ranks copy optimizer states: on the rank that has most."""
        return max(self.offload_s, default=0.0)

    def exchange_s(self) -> float:
        """Returns the time to exchange all frozen results, from when all ranks are ready."""
        return self.all_gather_s


@dataclass(frozen=True)
class PipelineLinks:
    """Links that the messages of one of several equal pipelines take.

    The slowest ones of all pipelines and replicas count. Gradients are summed over all pipelines.
    """

    cluster: Cluster
    placement: Placement
    num_pipelines: int = 1

    def _first_ranks(self) -> range:
        num_ranks = self.placement.num_ranks
        return range(0, self.num_pipelines * num_ranks, num_ranks)

    def _between(self, stage: int, reader: int) -> tuple[Link, ...]:
        ranks = self.placement.stage_ranks
        pairs = {(a, b) for a in ranks[stage] for b in ranks[reader] if a != b}
        between, firsts = self.cluster.p2p_between, self._first_ranks()
        return tuple({between(f + a, f + b) for f in firsts for a, b in pairs})

    @cached_property
    def downwards(self) -> tuple[tuple[Link, ...], ...]:
        """Different links from each stage to the next; none from the last."""
        after = [self.placement.next_stage(s) for s in range(self.placement.num_stages)]
        return tuple(() if a is None else self._between(s, a) for s, a in enumerate(after))

    @cached_property
    def reductions(self) -> tuple[tuple[Link, int], ...]:
        """The link over which the gradients of each stage are summed, and the number of ranks that hold it."""
        groups = [
            tuple(first + rank for first in self._first_ranks() for rank in ranks)
            for ranks in self.placement.stage_ranks
        ]
        return tuple((self.cluster.all_reduce_among(group), len(group)) for group in groups)

    @cached_property
    def slowness(self) -> tuple[float, ...]:
        """Slowness of the slowest rank at each position, relative to the fastest rank."""
        count, speeds = self.placement.num_ranks, self.cluster.rank_speeds
        return tuple(1 / min(speeds[position::count], default=1.0) for position in range(count))

    @cached_property
    def stage_slowness(self) -> tuple[float, ...]:
        """Slowness of each stage: that of its slowest rank."""
        return tuple(max(self.slowness[r] for r in ranks) for ranks in self.placement.stage_ranks)

    def all_gather_s(self, num_bytes: float) -> float:
        """Returns seconds for bytes from all ranks of a pipeline to all of them: half an all-reduce."""
        group = tuple(range(self.placement.num_ranks))
        return self.cluster.all_reduce_among(group).all_reduce_s(num_bytes, len(group)) / 2


def offloaded_bytes(
    model: CostModel, links: PipelineLinks, runs: Sequence[LayerRun]
) -> tuple[float, ...]:
    """Returns bytes of optimizer states of each rank of a pipeline in host memory; empty if on the devices."""
    if not model.offloads_optimizer:
        return ()
    states = [
        model.state_bytes(run, num_holders)
        for run, (_, num_holders) in zip(runs, links.reductions, strict=True)
    ]
    placement = links.placement
    return tuple(
        sum(states[stage] for stage in placement.stages_of(rank))
        for rank in range(placement.num_ranks)
    )


def pipeline_costs(
    model: CostModel,
    links: PipelineLinks,
    runs: Sequence[LayerRun],
    sizes: Sequence[int],
    parts: Sequence[EncodePart] = (),
    group_size: int | None = None,
) -> PipelineCosts:
    """Makes the tables of one of several equal pipelines: layers by stage, microbatch sizes, and frozen parts.

    `group_size` are samples on which frozen layers run at a time; None for all of a part.
    """
    placement, distinct = links.placement, frozenset(sizes)

    def row(seconds: Callable[[int], float], slowness: float = 1.0) -> tuple[float, ...]:
        of_size = {size: slowness * seconds(size) for size in distinct}
        return tuple([of_size[size] for size in sizes])

    def table(seconds: Callable[[LayerRun, float], float]) -> Table:
        pairs = zip(runs, links.stage_slowness, strict=True)
        return tuple([row(partial(seconds, run), factor) for run, factor in pairs])

    crossing = model.crossing_bytes(runs, placement)

    def boundary_s(stage: int, size: int) -> float:
        messages_s = (link.seconds(size * crossing[stage]) for link in links.downwards[stage])
        return max(messages_s, default=0.0)

    # What goes down over a cut as activations comes back over it as gradients.
    stages = range(placement.num_stages)
    gradient = tuple(row(partial(boundary_s, stage)) for stage in stages)
    before = [placement.previous_stage(stage) for stage in stages]
    nothing = (0.0,) * len(sizes)
    # With states shared, updated weights go to all holders: half an all-reduce more.
    times = 1.5 if model.shards_optimizer else 1.0
    sums_s = [
        times * link.all_reduce_s(model.gradient_bytes(run), num_ranks)
        for run, (link, num_ranks) in zip(runs, links.reductions, strict=True)
    ]
    return PipelineCosts(
        sizes=tuple(sizes),
        forward_s=table(model.forward_s),
        backward_s=table(model.backward_s),
        weight_gradient_s=table(model.weight_gradient_s),
        activation_s=tuple(nothing if b is None else gradient[b] for b in before),
        gradient_s=gradient,
        encode_s=tuple(
            links.slowness[part.rank] * model.encode_s(part.num_samples, group_size)
            for part in parts
        ),
        all_reduce_s=tuple(
            sum(sums_s[stage] for stage in placement.stages_of(rank))
            for rank in range(placement.num_ranks)
        ),
        all_gather_s=links.all_gather_s(sum(sizes) * model.encoding_bytes_per_sample),
        holds_sender=links.cluster.p2p.holds_sender,
        split_s=table(model.split_s) if model.backbone.split_s else (),
        offload_s=tuple(
            2 * num_bytes / links.cluster.host_bytes_per_s
            for num_bytes in offloaded_bytes(model, links, runs)
        ),
    )
