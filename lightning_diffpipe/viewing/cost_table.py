"""A profile as a page of text: what every layer costs."""

from __future__ import annotations

from lightning_diffpipe.planning.profile import EncoderLayerProfile, LayerProfile, ModelProfile
from lightning_diffpipe.viewing.units import operations, seconds, size, table

HEADER = ("layer", "forward", "backward", "parameters", "boundary", "activations", "operations")


def cost_table(profile: ModelProfile, samples: int = 1) -> str:
    """One table for each backbone and encoder, with a row for each layer.

    Args:
        profile: What is shown.
        samples: Times are for so many; boundary and activation bytes and operations are of one.
    """
    times = f"times of {samples} sample{'' if samples == 1 else 's'}"
    parts = [f"{profile.name}: {times}; boundary, activations and operations (forward) of one"]
    for backbone in profile.backbones:
        rows = [_path_row(layer, samples) for layer in backbone.layers]
        parts.append(f"{backbone.name}\n{table(HEADER, [*rows, _sum(backbone.layers, samples)])}")
    for encoder in profile.encoders:
        rows = [_frozen_row(layer, samples) for layer in encoder.layers]
        parts.append(f"{encoder.name}\n{table(HEADER, [*rows, _sum(encoder.layers, samples)])}")
    return "\n\n".join(parts)


def _path_row(layer: LayerProfile, samples: int) -> list[str]:
    return [
        layer.name,
        seconds(layer.forward_s.at(samples)),
        seconds(layer.backward_s.at(samples)),
        size(layer.parameter_bytes),
        size(layer.boundary_bytes_per_sample),
        size(_activation_bytes(layer)),
        operations(layer.flops_per_sample),
    ]


def _activation_bytes(layer: LayerProfile) -> int:
    """Of a microbatch of one sample."""
    return layer.activation_bytes_per_sample + layer.activation_bytes_per_microbatch


def _frozen_row(layer: EncoderLayerProfile, samples: int) -> list[str]:
    return [
        layer.name,
        seconds(layer.forward_s.at(samples)),
        "",
        size(layer.parameter_bytes),
        size(layer.output_bytes_per_sample),
        "",
        operations(layer.flops_per_sample),
    ]


def _sum(
    layers: tuple[LayerProfile, ...] | tuple[EncoderLayerProfile, ...], samples: int
) -> list[str]:
    """The last row; what crosses a boundary does not add up."""
    trained = [layer for layer in layers if isinstance(layer, LayerProfile)]
    return [
        "all",
        seconds(sum(layer.forward_s.at(samples) for layer in layers)),
        seconds(sum(layer.backward_s.at(samples) for layer in trained)) if trained else "",
        size(sum(layer.parameter_bytes for layer in layers)),
        "",
        size(sum(map(_activation_bytes, trained))) if trained else "",
        operations(sum(layer.flops_per_sample for layer in layers)),
    ]
