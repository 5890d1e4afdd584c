"""A profile without running anything: times from operation counts.

Good enough to place cuts before weights exist, or where one rank cannot hold the whole module. Counts
are not times: attention and convolutions reach different speeds, and small layers are bound by memory.
Where the module fits, `measure_profile` is better.

A layer with trained weights has a backward of twice its forward, half of it for the weights; a layer
that only passes gradients on (a locked decoder, layers under LoRA) has one of about its forward.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from lightning_diffpipe.graph.cut import boundary_bytes
from lightning_diffpipe.graph.layer import Layer, LayerGraph
from lightning_diffpipe.planning.profile import (
    BackboneProfile,
    EncoderLayerProfile,
    EncoderProfile,
    LayerProfile,
    ModelProfile,
    Seconds,
)

# Only ratios matter without links; this makes the seconds of a profile plausible on one CPU core.
_NOMINAL_FLOPS_PER_S = 3e10


def estimate_profile(module: nn.Module, graph: LayerGraph) -> ModelProfile:
    """Derives a profile from the operation counts of a probed step.

    Args:
        module: The module; only sizes of its parameters are read.
        graph: Its layers, unfolded.

    Returns:
        One backbone with the layers of the trained path in call order, and one encoder for every
        top-level module with frozen layers.
    """
    sizes = {name: p.numel() * p.element_size() for name, p in module.named_parameters()}
    samples = graph.num_samples or 1
    boundaries = boundary_bytes(graph)
    path = [graph.layers[index] for index in graph.path]
    claimed: set[str] = set()
    layers = []
    for position, layer in enumerate(path, start=1):
        own = layer.parameters - claimed
        claimed |= layer.parameters
        layers.append(_path_layer(layer, own, graph, sizes, boundaries[position] // samples, samples))
    return ModelProfile(
        name=type(module).__name__,
        backbones=(BackboneProfile("backbone", tuple(layers)),),
        encoders=encoders_of(graph, sizes, samples),
    )


def _path_layer(
    layer: Layer,
    own: Iterable[str],
    graph: LayerGraph,
    sizes: dict[str, int],
    boundary_bytes_per_sample: int,
    samples: int,
) -> LayerProfile:
    forward_s = layer.cost_flops / samples / _NOMINAL_FLOPS_PER_S
    trains = bool(layer.parameters & graph.trained)
    return LayerProfile(
        name=layer.name,
        forward_s=Seconds.per_sample(forward_s),
        backward_s=Seconds.per_sample(forward_s * (2 if trains else 1)),
        weight_gradient_s=Seconds.per_sample(forward_s if trains else 0.0),
        parameter_bytes=sum(sizes.get(name, 0) for name in own),
        gradient_bytes=sum(sizes.get(name, 0) for name in own if name in graph.trained),
        boundary_bytes_per_sample=boundary_bytes_per_sample,
        activation_bytes_per_sample=_output_bytes(layer, graph) // samples,
    )


def encoders_of(
    graph: LayerGraph, sizes: dict[str, int], samples: int
) -> tuple[EncoderProfile, ...]:
    """Frozen layers, grouped by the top-level module they belong to."""
    groups: dict[str, list[Layer]] = {}
    for index in graph.frozen:
        layer = graph.layers[index]
        groups.setdefault(_encoder_name(layer), []).append(layer)
    profiles = []
    for name, layers in groups.items():
        needed = {_encoder_name(graph.layers[d]) for layer in layers for d in layer.deps}
        earlier = {profile.name for profile in profiles}
        profiles.append(
            EncoderProfile(
                name,
                tuple(
                    EncoderLayerProfile(
                        layer.name,
                        Seconds.per_sample(layer.cost_flops / samples / _NOMINAL_FLOPS_PER_S),
                        sum(sizes.get(parameter, 0) for parameter in layer.parameters),
                        _output_bytes(layer, graph) // samples,
                    )
                    for layer in layers
                ),
                tuple(sorted((needed - {name}) & earlier)),
            )
        )
    return tuple(profiles)


def _encoder_name(layer: Layer) -> str:
    return f"frozen {layer.name.partition('.')[0]}"


def _output_bytes(layer: Layer, graph: LayerGraph) -> int:
    return sum(graph.spec(key).nbytes for key in layer.tensor_keys)
