"""From costs of layers to a profile: which bytes count where, and which layers form an encoder.

However costs were found (measured, modelled, estimated from operation counts), a profile is put
together in the same way, here.

`estimate_profile` derives costs from operation counts, without running anything. That is good enough to place cuts
before weights exist, or where one rank cannot hold the whole module. Counts are not times: attention and
convolutions reach different speeds, and small layers are bound by memory. Where the module can be run,
`measure_profile` is better.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import nn

from lightning_diffpipe.graph.chains import passes, without_gradient
from lightning_diffpipe.graph.cut import boundary_bytes, skips
from lightning_diffpipe.graph.layer import Layer, LayerGraph
from lightning_diffpipe.planning.profile import (
    BackboneProfile,
    EncoderLayerProfile,
    EncoderProfile,
    LayerProfile,
    ModelProfile,
    Seconds,
    Skip,
)
from lightning_diffpipe.profiling.encodings import Encoding, encoder_name


@dataclass(frozen=True, slots=True)
class LayerCost:
    """What one layer costs, glue included; see `step_times.py`.

    Attributes:
        forward_s: Forward.
        backward_s: Whole backward; of a frozen layer nothing.
        weight_gradient_s: The part of it that only makes weight gradients.
        activation_bytes_per_sample: Bytes saved for the backward.
        activation_bytes_per_microbatch: Bytes saved besides, whatever the number of samples.
    """

    forward_s: Seconds
    backward_s: Seconds
    weight_gradient_s: Seconds
    activation_bytes_per_sample: int = 0
    activation_bytes_per_microbatch: int = 0


def assemble(
    name: str,
    module: nn.Module,
    graph: LayerGraph,
    costs: Mapping[int, LayerCost],
    repeated_s: Seconds | None = None,
    known: Mapping[str, Encoding] | None = None,
    split_s: Seconds | None = None,
) -> ModelProfile:
    """Puts a profile together.

    A parameter counts for the first layer that reads it, one that only the loss reads for the last.

    Args:
        name: Name of the profile.
        module: The module; only sizes of its parameters are read.
        graph: Its layers, unfolded.
        costs: Costs of all layers by index.
        repeated_s: Glue that every stage runs.
        known: What the encoders hand over, by their names, as far as that was found out.
        split_s: What a backward in two halves takes longer.

    Returns:
        One backbone with the layers of the trained path in call order, and one encoder for every
        top-level module with frozen layers.
    """
    sizes = {name: p.numel() * p.element_size() for name, p in module.named_parameters()}
    samples = graph.num_samples or 1
    boundaries = boundary_bytes(graph)
    path = [graph.layers[index] for index in graph.path]
    claimed: set[str] = set()
    layers, free = [], without_gradient(graph)
    for position, layer in enumerate(path, start=1):
        read = layer.parameters | (graph.tail_parameters if layer is path[-1] else frozenset())
        own, claimed = read - claimed, claimed | read
        cost = costs[layer.index]
        layers.append(
            LayerProfile(
                name=layer.name,
                forward_s=cost.forward_s,
                backward_s=cost.backward_s,
                weight_gradient_s=cost.weight_gradient_s,
                parameter_bytes=sum(sizes.get(key, 0) for key in own),
                gradient_bytes=sum(sizes.get(key, 0) for key in own & graph.trained),
                boundary_bytes_per_sample=boundaries[position] // samples,
                activation_bytes_per_sample=cost.activation_bytes_per_sample,
                flops_per_sample=layer.cost_flops // samples,
                activation_bytes_per_microbatch=cost.activation_bytes_per_microbatch,
                gradient=position - 1 not in free,
            )
        )
    long = tuple(Skip(size // samples, made, readers) for size, made, readers in skips(graph))
    backbone = BackboneProfile("backbone", tuple(layers), repeated_s, split_s, long, passes(graph))
    encoders = tuple(
        replace(encoder, results=e.results, cacheable=e.cacheable,
                stored_bytes_per_sample=e.stored_bytes_per_sample, splittable=e.splittable)
        if (e := (known or {}).get(encoder.name)) else encoder
        for encoder in _encoders(graph, sizes, costs)
    )  # fmt: skip
    return ModelProfile(name, (backbone,), encoders)


def _encoders(
    graph: LayerGraph, sizes: Mapping[str, int], costs: Mapping[int, LayerCost]
) -> tuple[EncoderProfile, ...]:
    """Returns frozen layers, grouped by the top-level module they belong to."""
    groups: dict[str, list[Layer]] = {}
    samples = graph.num_samples or 1
    for index in graph.frozen:
        layer = graph.layers[index]
        groups.setdefault(encoder_name(layer), []).append(layer)
    profiles: list[EncoderProfile] = []
    for name, layers in groups.items():
        needed = {encoder_name(graph.layers[d]) for layer in layers for d in layer.deps}
        earlier = {profile.name for profile in profiles}
        entries, claimed = [], set[str]()
        for layer in layers:
            own, claimed = layer.parameters - claimed, claimed | layer.parameters
            entries.append(
                EncoderLayerProfile(
                    layer.name,
                    costs[layer.index].forward_s,
                    sum(sizes.get(key, 0) for key in own),
                    output_bytes(layer, graph) // samples,
                    layer.cost_flops // samples,
                )
            )
        inputs = tuple(sorted((needed - {name}) & earlier))
        profiles.append(EncoderProfile(name, tuple(entries), inputs))
    return tuple(profiles)


def output_bytes(layer: Layer, graph: LayerGraph) -> int:
    """Returns bytes of all tensors a layer returns, for the batch that was probed."""
    return sum(graph.spec(key).nbytes for key in layer.tensor_keys)


# Only ratios matter without links; this makes the seconds of a profile plausible on one CPU core.
_NOMINAL_FLOPS_PER_S = 3e10


def estimate_profile(module: nn.Module, graph: LayerGraph) -> ModelProfile:
    """Derives a profile from the operation counts of a probed step.

    A layer with trained weights has a backward of twice its forward, half of it for the weights; a layer
    that only passes gradients on (a locked decoder, layers under LoRA) has one of about its forward.

    Args:
        module: The module; only sizes of its parameters are read.
        graph: Its layers, unfolded.

    Returns:
        One backbone with the layers of the trained path in call order, and one encoder for every
        top-level module with frozen layers.
    """
    samples = graph.num_samples or 1
    costs = {}
    for layer in graph.layers:
        forward_s = layer.cost_flops / samples / _NOMINAL_FLOPS_PER_S
        trains = bool(layer.parameters & graph.trained) and layer.carries_gradient
        saved = output_bytes(layer, graph) // samples if layer.carries_gradient else 0
        costs[layer.index] = LayerCost(
            forward_s=Seconds.per_sample(forward_s),
            backward_s=Seconds.per_sample(forward_s * (1 + trains) * layer.carries_gradient),
            weight_gradient_s=Seconds.per_sample(forward_s if trains else 0.0),
            activation_bytes_per_sample=saved,
        )
    return assemble(type(module).__name__, module, graph, costs)
