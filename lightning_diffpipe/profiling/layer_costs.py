"""Computes a profile from sizes and times of layers, and finds results of encoders.

However costs were found (measured, modelled, estimated from operation counts), `assemble` puts a profile together.

A stage runs its own layers and the glue that feeds them, so the glue before a layer counts for it, and the loss for
the last one: times of a stage's layers add up to the time of the stage, and those of all layers to the time of the
step. Glue before a *frozen* layer runs twice in a pipeline, once with the frozen layers and once with the stages
that skip them, so it counts for the next layer of the path as well; glue inside a frozen container (an
autoencoder's residual additions) runs with the frozen layers only.

    |-- glue --| vae |-- glue --| conv_in | block |g| block |-- loss --|
    |<- vae      ->|
    |<- and ->|     |<- conv_in         ->|<block>|<-block           ->|

Stages after the first run the glue at the top of the step again, with dummies: see `repeated_s`. Left out is glue
further down that later stages pass on their way to their own first layer.

Times are taken of the finest layers; a run folds containers that are all frozen into one layer again, and what
crosses to other ranks are the outputs of those. So the results of encoders are read off a graph folded as if every
trained layer were a stage of its own. Whether they can be stored is found by running the frozen layers twice with
different random numbers; whether they give the same for some of the samples only, by running them on single
samples.

`estimate_profile` derives costs from operation counts, without running anything: good enough to place cuts before
weights exist, or where one rank cannot hold the whole module. Counts are not times: attention and convolutions
reach different speeds, and small layers are bound by memory.
"""

import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn

from lightning_diffpipe.errors import GraphError
from lightning_diffpipe.graph.cut import cut
from lightning_diffpipe.graph.frozen import FrozenView, why_not_splittable
from lightning_diffpipe.graph.interception import Interception
from lightning_diffpipe.graph.layer import Layer, LayerGraph, TensorKey
from lightning_diffpipe.graph.memo import repeatable, why_not_remembered
from lightning_diffpipe.graph.probe import fold
from lightning_diffpipe.graph.sizes import layer_sizes, layers_by_encoder
from lightning_diffpipe.graph.step import Step, StepCall
from lightning_diffpipe.planning.profile import (
    EncoderProfile,
    FrozenResult,
    ModelProfile,
    Seconds,
)
from lightning_diffpipe.profiling.step_run import KeptBytes, Rounds, StepTimes, typical

_log = logging.getLogger(__name__)

Splits = Mapping[int, Sequence[float]]
"""By sample count: seconds of backwards in two halves; empty where a stage runs them as one."""

MIN_FLOPS_PER_BYTE = 10.0
"""As `EncodingCache` has it: layers that compute less for each byte they give are not stored."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Observations of the layers of a folded graph.

    Attributes:
        steady: Indices of those whose arguments do not follow noise or timesteps; None if unknown.
        mixing: Names of those that give something else for single samples.
    """

    steady: frozenset[int] | None
    mixing: frozenset[str]


Observe = Callable[[LayerGraph], Seen]


class Encoding(NamedTuple):
    """An encoder's results, as far as they are known; see `EncoderProfile`."""

    results: tuple[FrozenResult, ...]
    cacheable: bool | None
    stored_bytes_per_sample: int
    splittable: bool | None
    follow_sample: tuple[bool, ...] | None

    def of(self, encoder: EncoderProfile) -> EncoderProfile:
        """Returns the profile of an encoder that has these results."""
        fields = self._asdict()
        del fields["follow_sample"]
        return self.filled_in(replace(encoder, **fields))

    def filled_in(self, encoder: EncoderProfile) -> EncoderProfile:
        """Returns a profile of the encoder with how it can be split and stored first, if it does not know."""
        layers, follow = encoder.layers, self.follow_sample
        if follow is not None and len(follow) == len(layers):
            layers = tuple(
                x if x.follows_sample is not None else replace(x, follows_sample=value)
                for x, value in zip(layers, follow, strict=True)
            )
        splittable = encoder.splittable
        return replace(
            encoder, layers=layers, splittable=self.splittable if splittable is None else splittable
        )


def encodings(
    module: nn.Module, step: Step, batch: Any, graph: LayerGraph, observe: Observe | None = None
) -> dict[str, Encoding]:
    """Returns the results of every encoder by its name; empty where the step cannot be folded.

    What could be stored, and split, is unknown if there is no `observe`.
    """
    if not graph.frozen:
        return {}
    try:
        folded, positions = fold(module, step, batch, graph, range(1, len(graph.path)))
    except GraphError as error:
        _log.info("results of frozen layers stay unknown: %s", error)
        return {}
    seen: Seen | None = None
    try:
        seen = observe(folded) if observe is not None else None
    except (GraphError, RuntimeError) as error:  # too little memory, say
        _log.info("whether encodings can be stored, or split, stays unknown: %s", error)
    readers: dict[TensorKey, list[int]] = {}  # as many stages as there are trained layers
    for stage in cut(folded, positions).stages:
        for key in stage.frozen_received:
            readers.setdefault(key, []).append(stage.index)
    results = {
        name: _encoding(folded, layers, readers, seen)
        for name, layers in layers_by_encoder(folded).items()
    }
    if seen is None or seen.steady is None:
        return results
    follow = {
        fine
        for index in seen.steady
        if not why_not_remembered(folded.layers[index], folded, 0.0)
        for fine in range(*folded.layers[index].fine)
    }
    return {
        name: results[name]._replace(follow_sample=tuple(layer.index in follow for layer in layers))
        for name, layers in layers_by_encoder(graph).items()
        if name in results
    }


def found_by_running(module: nn.Module, step: Step, batch: Any, stores: bool = True) -> Observe:
    """Runs the frozen layers on a batch, on its samples and, if `stores`, with other random numbers."""

    def observe(folded: LayerGraph) -> Seen:
        call = StepCall(step, module, batch, written=folded.batch_writes)
        with Interception(module, folded.layer_names).installed() as interception:
            view = FrozenView(module, folded, cut(folded, ()).frozen, interception)
            steady = repeatable(view, call, seed=0) if stores else None
            return Seen(steady, view.mixing(call, seed=0))

    return observe


def _encoding(
    folded: LayerGraph,
    layers: list[Layer],
    readers: Mapping[TensorKey, list[int]],
    seen: Seen | None,
) -> Encoding:
    """Returns sizes of the results of an encoder, and whether they can be stored and split; None: unknown."""
    samples = folded.num_samples or 1
    read_by: dict[tuple[int, ...], int] = {}
    for layer in layers:
        for key in layer.tensor_keys:
            if key in readers:
                where = tuple(readers[key])
                read_by[where] = read_by.get(where, 0) + folded.spec(key).nbytes
    storable = [x for x in layers if not why_not_remembered(x, folded, MIN_FLOPS_PER_BYTE)]
    steady = None if seen is None else seen.steady
    stored = [x for x in storable if steady is None or x.index in steady]
    flops = sum(layer.cost_flops for layer in layers)
    cacheable = 2 * sum(layer.cost_flops for layer in stored) > flops
    splittable: bool | None = False
    if not any(map(why_not_splittable, layers)):
        splittable = None if seen is None else seen.mixing.isdisjoint(x.name for x in layers)
    return Encoding(
        tuple(FrozenResult(size // samples, where) for where, size in sorted(read_by.items())),
        cacheable if steady is not None or not cacheable else None,
        sum(map(folded.output_bytes, stored)) // samples,
        splittable,
        None,
    )


class LayerCost(NamedTuple):
    """Costs of one layer, glue included; see `step_run.py`. A frozen one has those of its forward only.

    Attributes:
        activation_bytes_per_microbatch: Bytes saved besides, whatever the number of samples.
    """

    forward_s: Seconds
    backward_s: Seconds
    weight_gradient_s: Seconds
    activation_bytes_per_sample: int = 0
    activation_bytes_per_microbatch: int = 0


def assemble(
    sizes: ModelProfile,
    graph: LayerGraph,
    costs: Mapping[int, LayerCost],
    repeated_s: Seconds | None = None,
    known: Mapping[str, Encoding] = MappingProxyType({}),
    split_s: Seconds | None = None,
) -> ModelProfile:
    """Puts a profile together.

    Args:
        sizes: The profile without times; see `graph/sizes.py`.
        graph: The unfolded layers.
        costs: By layer.
        repeated_s: Times of the glue that every stage runs.
        known: Results of encoders by name, as far as they were found out.
        split_s: Times that a backward in two halves takes longer.
    """
    (backbone,) = sizes.backbones
    pairs = zip(graph.path, backbone.layers, strict=True)
    layers = tuple(replace(layer, **costs[index]._asdict()) for index, layer in pairs)
    backbone = replace(backbone, layers=layers, repeated_s=repeated_s, split_s=split_s)
    encoders, by_encoder = [], layers_by_encoder(graph)
    for encoder in sizes.encoders:
        entries = zip(encoder.layers, by_encoder[encoder.name], strict=True)
        timed = tuple(
            replace(entry, forward_s=costs[layer.index].forward_s) for entry, layer in entries
        )
        encoder = replace(encoder, layers=timed)
        encoders.append(known[encoder.name].of(encoder) if encoder.name in known else encoder)
    return replace(sizes, backbones=(backbone,), encoders=tuple(encoders))


class MeasuredCosts(NamedTuple):
    """Costs of the layers of a step as one rank has measured them, or several.

    Attributes:
        graph: The layers, with types as on the device.
        split_s: Times that a backward in two halves takes longer; None if that was not timed.
    """

    sizes: ModelProfile
    graph: LayerGraph
    rounds: Rounds
    saved: Sequence[KeptBytes]
    split_s: Seconds | None
    known: Mapping[str, Encoding]

    def profile(self) -> ModelProfile:
        """Returns the profile with the typical times of the steps."""
        costs = layer_costs(self.graph, self.rounds, self.saved)
        repeated = {  # the median of the glue that every stage runs
            count: statistics.median(repeated_s(self.graph, times) for times in (*whole, *inputs))
            for count, (whole, inputs) in self.rounds.items()
        }
        of_glue = Seconds.of(repeated)
        return assemble(self.sizes, self.graph, costs, of_glue, self.known, self.split_s)


def forward_s(graph: LayerGraph, times: StepTimes) -> list[float]:
    """Returns the forward seconds of every layer with its glue."""
    seconds = [a + b for a, b in zip(times.before, times.inside, strict=True)]
    following: dict[int, int | None] = {}  # the next layer of the path
    upcoming: int | None = None
    for layer in reversed(graph.layers):
        upcoming = upcoming if layer.frozen else layer.index
        following[layer.index] = upcoming
    for index in graph.frozen:
        reader = following[index]
        if reader is not None and not _inside_frozen_container(graph, index):
            seconds[reader] += times.before[index]
    seconds[graph.path[-1]] += times.tail
    return seconds


def repeated_s(graph: LayerGraph, times: StepTimes) -> float:
    """Returns the seconds of the glue before the first layer of the path, which every stage runs."""
    return sum(
        times.before[index]
        for index in range(graph.path[0] + 1)
        if not _inside_frozen_container(graph, index)
    )


def backward_s(graph: LayerGraph, times: StepTimes) -> list[float]:
    """Returns the backward seconds of every layer with its glue."""
    seconds = list(times.backward)
    seconds[graph.path[-1]] += times.backward_tail
    return seconds


def _inside_frozen_container(graph: LayerGraph, index: int) -> bool:
    """Returns whether layer `index` and the one before it are in one container of frozen layers only."""
    return any(
        call.first < index < call.stop
        and all(graph.layers[i].frozen for i in range(call.first, call.stop))
        for call in graph.calls
    )


def split_seconds(rounds: Rounds, splits: Splits) -> Seconds | None:
    """Returns what a backward in two halves takes longer than the whole one; `None` if it was not timed."""
    added: dict[int, float] = {}
    for count, seconds in splits.items():
        if seconds:
            whole_s = statistics.median(sum(t.backward) + t.backward_tail for t in rounds[count][0])
            added[count] = max(statistics.median(seconds) - whole_s, 0.0)
    return Seconds.of(added) if added else None


def layer_costs(
    graph: LayerGraph, rounds: Rounds, saved: Sequence[KeptBytes]
) -> dict[int, LayerCost]:
    """Returns typical times of every layer."""
    forward: dict[int, list[float]] = {}
    backward: dict[int, list[float]] = {}
    inputs: dict[int, list[float]] = {}
    for count, (whole, without_weights) in rounds.items():
        forward[count] = typical([forward_s(graph, t) for t in (*whole, *without_weights)])
        backward[count] = typical([backward_s(graph, t) for t in whole])
        # Of a trained layer without such times half of the backward is for its weights.
        halves = [seconds / 2 for seconds in backward[count]]
        timed = [backward_s(graph, t) for t in without_weights]
        inputs[count] = typical(timed) if timed else halves
    costs = {}
    for layer in graph.layers:
        i = layer.index
        trains = bool(layer.parameters & graph.trained)
        weights = {n: max(backward[n][i] - inputs[n][i], 0.0) * trains for n in rounds}
        costs[i] = LayerCost(
            Seconds.of({n: forward[n][i] for n in rounds}),
            Seconds.of({n: backward[n][i] for n in rounds}),
            Seconds.of(weights),
            *map(round, saved[i]),
        )
    return costs


def evened(rounds: Rounds, groups: Sequence[Sequence[int]]) -> Rounds:
    """Gives all layers of a group their mean time in each step; see `averaged`."""
    return {
        count: ([averaged(t, groups) for t in whole], [averaged(t, groups) for t in inputs])
        for count, (whole, inputs) in rounds.items()
    }


def averaged(times: StepTimes, groups: Sequence[Sequence[int]]) -> StepTimes:
    """Gives all layers of a group their mean time in a step.

    Example:
        >>> times = StepTimes((0, 0, 0), (3.0, 5.0, 1.0), 0, (6.0, 8.0, 2.0), 0)
        >>> averaged(times, [[0, 1], [2]]).inside
        (4.0, 4.0, 1.0)
    """
    inside, backward = list(times.inside), list(times.backward)
    for group in groups:
        for seconds in (inside, backward):
            mean = statistics.fmean(seconds[index] for index in group)
            for index in group:
                seconds[index] = mean
    return replace(times, inside=tuple(inside), backward=tuple(backward))


# Only ratios matter without links; this makes the seconds of a profile plausible on one CPU core.
_NOMINAL_FLOPS_PER_S = 3e10


def estimate_profile(module: nn.Module, graph: LayerGraph) -> ModelProfile:
    """Derives a profile from the operation counts of a probed step.

    A layer with trained weights has a backward of twice its forward, half of it for the weights; a layer that only
    passes gradients on (a locked decoder, layers under LoRA) has one of about its forward.
    """
    samples = graph.num_samples or 1
    costs = {}
    for layer in graph.layers:
        forward_s = layer.cost_flops / samples / _NOMINAL_FLOPS_PER_S
        trains = bool(layer.parameters & graph.trained) and layer.carries_gradient
        saved = graph.output_bytes(layer) // samples if layer.carries_gradient else 0
        costs[layer.index] = LayerCost(
            forward_s=Seconds.per_sample(forward_s),
            backward_s=Seconds.per_sample(forward_s * (1 + trains) * layer.carries_gradient),
            weight_gradient_s=Seconds.per_sample(forward_s if trains else 0.0),
            activation_bytes_per_sample=saved,
        )
    return assemble(layer_sizes(module, graph), graph, costs)
