"""A profile without running anything: times from operation counts.

Good enough to place cuts before weights exist, or where one rank cannot hold the whole module. Counts
are not times: attention and convolutions reach different speeds, and small layers are bound by memory.
Where the module can be run, `measure_profile` is better.

A layer with trained weights has a backward of twice its forward, half of it for the weights; a layer
that only passes gradients on (a locked decoder, layers under LoRA) has one of about its forward.
"""

from __future__ import annotations

from torch import nn

from lightning_diffpipe.graph.layer import LayerGraph
from lightning_diffpipe.planning.profile import ModelProfile, Seconds
from lightning_diffpipe.profiling.assembly import LayerCost, assemble, output_bytes

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
    samples = graph.num_samples or 1
    costs = {}
    for layer in graph.layers:
        forward_s = layer.cost_flops / samples / _NOMINAL_FLOPS_PER_S
        trains = bool(layer.parameters & graph.trained) and layer.carries_gradient
        kept = output_bytes(layer, graph) // samples if layer.carries_gradient else 0
        costs[layer.index] = LayerCost(
            forward_s=Seconds.per_sample(forward_s),
            backward_s=Seconds.per_sample(forward_s * (1 + trains) * layer.carries_gradient),
            weight_gradient_s=Seconds.per_sample(forward_s if trains else 0.0),
            activation_bytes_per_sample=kept,
        )
    return assemble(type(module).__name__, module, graph, costs)
