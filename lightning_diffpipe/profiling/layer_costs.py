"""From sizes and costs of layers to a profile, with the results of encoders.

However costs were found (measured, modelled, estimated from operation counts), `assemble` puts a profile together.

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
from collections.abc import Callable, Mapping
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
from lightning_diffpipe.graph.sizes import encoder_name, layer_sizes
from lightning_diffpipe.graph.step import Step, StepCall
from lightning_diffpipe.planning.profile import (
    EncoderProfile,
    FrozenResult,
    ModelProfile,
    Seconds,
)

_log = logging.getLogger(__name__)

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


Look = Callable[[LayerGraph], Seen]


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
    module: nn.Module, step: Step, batch: Any, graph: LayerGraph, look: Look | None = None
) -> dict[str, Encoding]:
    """Returns the results of every encoder by its name; empty where the step cannot be folded.

    What could be stored, and split, is unknown if there is no `look`.
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
        seen = look(folded) if look is not None else None
    except (GraphError, RuntimeError) as error:  # too little memory, say
        _log.info("whether encodings can be stored, or split, stays unknown: %s", error)
    encoders: dict[str, list[Layer]] = {}
    for index in folded.frozen:
        layer = folded.layers[index]
        encoders.setdefault(encoder_name(layer), []).append(layer)
    readers: dict[TensorKey, list[int]] = {}  # as many stages as there are trained layers
    for stage in cut(folded, positions).stages:
        for key in stage.frozen_received:
            readers.setdefault(key, []).append(stage.index)
    results = {name: _encoding(folded, layers, readers, seen) for name, layers in encoders.items()}
    if seen is None or seen.steady is None:
        return results
    follow = {
        fine
        for index in seen.steady
        if not why_not_remembered(folded.layers[index], folded, 0.0)
        for fine in range(*folded.layers[index].fine)
    }
    by_encoder: dict[str, tuple[bool, ...]] = {}
    for index in graph.frozen:
        name = encoder_name(graph.layers[index])
        by_encoder[name] = (*by_encoder.get(name, ()), index in follow)
    return {name: e._replace(follow_sample=by_encoder[name]) for name, e in results.items()}


def found_by_running(module: nn.Module, step: Step, batch: Any, stores: bool = True) -> Look:
    """Runs the frozen layers on a batch, on its samples and, if `stores`, with other random numbers."""

    def look(folded: LayerGraph) -> Seen:
        call = StepCall(step, module, batch, written=folded.batch_writes)
        with Interception(module, folded.layer_names).installed() as interception:
            view = FrozenView(module, folded, cut(folded, ()).frozen, interception)
            steady = repeatable(view, call, seed=0) if stores else None
            return Seen(steady, view.mixing(call, seed=0))

    return look


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
    """Costs of one layer, glue included; see `step_run.py`. Of a frozen one only the forward counts.

    Attributes:
        backward_s: Whole backward.
        weight_gradient_s: The part of it that only makes weight gradients.
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
    by_encoder: dict[str, list[LayerCost]] = {}
    for index in graph.frozen:
        by_encoder.setdefault(encoder_name(graph.layers[index]), []).append(costs[index])
    encoders = []
    for encoder in sizes.encoders:
        entries = zip(encoder.layers, by_encoder[encoder.name], strict=True)
        timed = tuple(replace(layer, forward_s=cost.forward_s) for layer, cost in entries)
        encoder = replace(encoder, layers=timed)
        encoders.append(known[encoder.name].of(encoder) if encoder.name in known else encoder)
    return replace(sizes, backbones=(backbone,), encoders=tuple(encoders))


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
