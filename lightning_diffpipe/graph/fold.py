"""Making containers that lie within one stage whole again.

Cut at a fine level, a residual stream `h + f(h) + g(...)` is glue, so that *all* its terms cross the
boundary; as output of a whole block only the sum does. Parameters read by a container itself become
private to its stage, and its glue runs on one stage instead of on all (that of a frozen VAE at image
resolution costs more than a whole stage). Only what stays expanded is seeded and computed elsewhere, so
containers stay expanded whose glue draws random numbers, or which hold much frozen work.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import nn

from lightning_diffpipe.errors import GraphError
from lightning_diffpipe.graph.cut import cut, is_mixed
from lightning_diffpipe.graph.layer import LayerGraph
from lightning_diffpipe.graph.probe import LayerLeakError, Step, trace_layers


def fold(
    root: nn.Module,
    step: Step,
    batch: Any,
    graph: LayerGraph,
    positions: Sequence[int],
    *,
    seed: int = 0,
) -> tuple[LayerGraph, tuple[int, ...]]:
    """Turns every container that lies within one stage, or is all frozen, into one layer.

    Args:
        root: The probed module.
        step: The probed step.
        batch: The batch it was probed with.
        graph: The fine graph.
        positions: Where its path is cut.
        seed: Seeds the step where it must be run on values.

    Returns:
        The folded graph, and the same cuts as positions in its path. Random numbers are seeded as in
        the fine graph, so results are the same.
    """
    cut(graph, positions)  # refuses impossible positions
    stage_of = _stages(graph, positions)
    keep = _must_stay(graph, stage_of)
    while True:
        layers = set(graph.layer_names) | {c.name for c in graph.calls}
        layers -= keep
        try:
            folded = trace_layers(
                root, step, batch, graph, layers, keep, seed=seed, same_batch=True
            )
        except LayerLeakError as error:
            keep.add(error.layer_name)
            continue
        if folded.fine_names != graph.fine_names:
            raise GraphError(
                "the step called other layers when it was run again; seed all it draws"
            )
        labels = [_label(stage_of, *layer.fine) for layer in folded.layers]
        wrong = {
            layer.name
            for layer, label in zip(folded.layers, labels, strict=True)
            if (label is None) != layer.frozen
        }
        if not wrong:
            break
        if wrong <= keep:
            raise GraphError(f"cannot fold {sorted(wrong)[:3]}")
        keep |= wrong
    on_path = [label for label in labels if label is not None]
    return folded, tuple(on_path.index(s) for s in range(1, len(positions) + 1))


def _stages(graph: LayerGraph, positions: Sequence[int]) -> dict[int, int]:
    bounds = [0, *positions, len(graph.path)]
    return {layer: s for s, (a, b) in enumerate(pairwise(bounds)) for layer in graph.path[a:b]}


def _must_stay(graph: LayerGraph, stage_of: dict[int, int]) -> set[str]:
    keep = set(graph.leaky)
    for call in graph.calls:
        owners = {stage_of[i] for i in range(call.first, call.stop) if i in stage_of}
        if len(owners) > 1 or call.draws_random or is_mixed(graph, call):
            keep.add(call.name)
    return keep


def _label(stage_of: dict[int, int], first: int, stop: int) -> int | None:
    return next((stage_of[i] for i in range(first, stop) if i in stage_of), None)
