"""Layers that do the same take the same time.

A slow step is timed a few times only, and on a shared machine each layer of it is off by some per cent. A
planner believes what it reads: it would cut a transformer of equal blocks into unequal stages. Blocks that
have the same weights' shapes, operations and outputs are therefore timed as one, by the mean of all
of them in a step, so that the step takes as long as before:

    as timed   block.0 36   block.1 41   block.2 34   block.3 37   head 5
    evened     block.0 37   block.1 37   block.2 37   block.3 37   head 5

A disturbance makes all of them slower in that step; the median over steps leaves such steps out.

Glue in front of a layer keeps its own time going forward.
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

from torch import nn

from lightning_diffpipe.graph.layer import Layer, LayerGraph
from lightning_diffpipe.profiling.glue import StepTimes


def alike(graph: LayerGraph, module: nn.Module) -> list[list[int]]:
    """Groups of layers that do the same, by what the probe has seen of them."""
    parameters = dict(module.named_parameters())
    groups: dict[Hashable, list[int]] = {}
    for layer in graph.layers:
        groups.setdefault(_work_of(layer, graph, parameters), []).append(layer.index)
    return list(groups.values())


def evened(times: StepTimes, groups: Sequence[Sequence[int]]) -> StepTimes:
    """The times of a step with one time for all layers of a group.

    Example:
        >>> times = StepTimes((0, 0, 0), (3.0, 5.0, 1.0), 0, (6.0, 8.0, 2.0), 0)
        >>> evened(times, [[0, 1], [2]]).inside
        (4.0, 4.0, 1.0)
    """
    inside, backward = list(times.inside), list(times.backward)
    for group in groups:
        for seconds in (inside, backward):
            mean = statistics.fmean(seconds[index] for index in group)
            for index in group:
                seconds[index] = mean
    return replace(times, inside=tuple(inside), backward=tuple(backward))


def _work_of(layer: Layer, graph: LayerGraph, parameters: Mapping[str, nn.Parameter]) -> Hashable:
    """What tells a layer's work apart from another's."""
    shapes = [
        (tuple(parameters[name].shape), name in graph.trained)
        for name in layer.parameters
        if name in parameters
    ]
    outputs = [
        (spec.shape, spec.stride, spec.dtype, spec.requires_grad)
        for spec in map(graph.spec, layer.tensor_keys)
    ]
    # The first trained layer passes no gradient on, which saves a third of its work.
    passes_gradient = any(graph.spec(key).requires_grad for key in layer.reads)
    return (
        layer.cost_flops,
        layer.frozen,
        layer.carries_gradient,
        passes_gradient,
        tuple(sorted(shapes)),
        tuple(outputs),
        len(graph.stream(layer.index)),
    )
