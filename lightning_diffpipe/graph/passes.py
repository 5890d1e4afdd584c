"""Passes: stretches of the trained path in which the same layers are called again, found by their names.

A step that estimates first and then trains on the estimate (self-conditioning), a teacher and a student of one
network, consistency steps: all call their denoiser several times. Nobody has to say so.
"""

from __future__ import annotations

from lightning_diffpipe.graph.layer import LayerGraph


def passes(graph: LayerGraph) -> tuple[tuple[int, int], ...]:
    """Half-open ranges of positions of the path, equally long and apart, that call the same layers.

    Returns:
        At least two, with half of the path's operations or more; none if there are no such ranges.
    """
    names, path = graph.path_names, graph.path
    best: tuple[int, int, tuple[tuple[int, int], ...]] = (0, 0, ())
    for apart in range(2, len(names)):
        first = 0
        while first + apart < len(names):
            stop = first
            while stop + apart < len(names) and names[stop] == names[stop + apart]:
                stop += 1
            count = -(-(stop - first) // apart) + 1
            length = stop - first - (count - 2) * apart
            if count > 1 and length > 1:
                starts = [first + k * apart for k in range(count)]
                found = tuple((start, start + length) for start in starts)
                cost = sum(graph.layers[path[i]].cost_flops for a, b in found for i in range(a, b))
                best = max(best, (cost, count, found))
            first = stop + 1
    total = sum(graph.layers[i].cost_flops for i in path)
    return best[2] if 2 * best[0] >= total else ()


def without_gradient(graph: LayerGraph) -> frozenset[int]:
    """Positions of the path to which no gradient has to come, nor to pass: their stages need no backward."""
    carrying = [graph.layers[i].carries_gradient for i in graph.path]
    ranges = passes(graph)
    if not ranges:
        first = next((i for i, carries in enumerate(carrying) if carries), len(carrying))
        return frozenset(range(first))
    trained = [any(carrying[a:b]) for a, b in ranges]
    stops = [*(stop for _, stop in ranges[:-1]), len(carrying)]
    free: set[int] = set()
    for number, (start, stop) in enumerate(zip((0, *stops), stops, strict=False)):
        between = any(trained[:number]) and any(trained[number + 1 :])
        if not trained[number] and not between:
            free |= {i for i in range(start, stop) if not carrying[i]}
    return frozenset(free)
