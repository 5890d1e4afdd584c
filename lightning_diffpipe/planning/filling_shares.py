"""Filling by shares: every rank encodes its own samples, as many as its bubbles have room for.

Rank `r` takes `n_r` samples through all frozen layers, so many that all ranks are done at the same time, as
far as steps of a share allow. They are averages: layers run on groups of samples, and of one batch a rank may
take a group more than of the next. A layer that does not fit into what is left of a bubble runs for
as many samples as do fit, and for the others later. Nothing has to move between ranks before the exchange
at the end, which needs each sample once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from lightning_diffpipe.planning.filling import (
    MARGIN,
    FrozenLayer,
    FrozenPiece,
    Placed,
    gaps_by_rank,
)
from lightning_diffpipe.planning.timeline import Timeline


def fill_by_shares(
    timeline: Timeline, layers: Sequence[FrozenLayer], steps: Sequence[int]
) -> tuple[Placed, ...]:
    """Places the frozen work of a batch.

    Args:
        timeline: The pipeline alone.
        layers: The frozen layers, in an order in which they can run.
        steps: Samples of each piece of the pipeline's next batch that a rank may take or leave.
    """
    placed: list[Placed] = []
    idle, gaps = timeline.idle_by_rank_s(), gaps_by_rank(timeline)
    step_s = sum(layer.seconds(sum(steps)) for layer in layers) / len(steps)
    bounds = (0, *accumulate(steps))
    first = 0
    for rank, count in enumerate(shares(idle, step_s, len(steps))):
        start, stop = bounds[first], bounds[first + count]
        placed += _fill_rank(gaps[rank], rank, layers, start, stop - start, len(placed))
        first += count
    return tuple(placed)


def shares(idle_s: Sequence[float], group_s: float, num_groups: int) -> tuple[int, ...]:
    """How many groups of samples each rank encodes, so that all are done at the same time.

    Args:
        idle_s: Idle time of each rank.
        group_s: Time of a group through all frozen layers.
        num_groups: Groups to share.

    Example:
        >>> shares([4.0, 2.0, 0.0], group_s=1.0, num_groups=6), shares([0, 0], 1.0, 3)
        ((4, 2, 0), (2, 1))
    """
    # Every rank works until the same moment: `idle + level`, which may be before its bubbles end.
    ranked = sorted(idle_s, reverse=True)
    level = 0.0
    for count in range(1, len(ranked) + 1):
        level = (num_groups * group_s - sum(ranked[:count])) / count
        if count == len(ranked) or level + ranked[count] <= 0:
            break
    exact = [max(idle + level, 0.0) / group_s if group_s else 0.0 for idle in idle_s]
    whole = [int(n + 1e-9) for n in exact]
    by_rest = sorted(range(len(exact)), key=lambda r: (whole[r] - exact[r], r))
    for position in range(num_groups - sum(whole)):
        whole[by_rest[position % len(whole)]] += 1
    return tuple(whole)


def even_shares(busy_s: Sequence[float], group_s: float, num_groups: int) -> tuple[int, ...]:
    """The shares with which all ranks are done at the same time, if none of them ever waits.

    Args:
        busy_s: What each rank has to do beside.
        group_s: Time of a group through all frozen layers.
        num_groups: Groups to share.

    Example:
        >>> even_shares([1.0, 3.0], group_s=1.0, num_groups=4)
        (3, 1)
    """
    return shares([max(busy_s) - busy for busy in busy_s], group_s, num_groups)


def all_done_s(busy_s: Sequence[float], counts: Sequence[int], group_s: float) -> float:
    """When all ranks are done if none of them ever waits, each with so many groups.

    Example:
        >>> all_done_s([1.0, 3.0], (3, 1), group_s=1.0)
        4.0
    """
    return max(busy + count * group_s for busy, count in zip(busy_s, counts, strict=True))


def _fill_rank(
    gaps: Sequence[tuple[float, float]],
    rank: int,
    layers: Sequence[FrozenLayer],
    first_sample: int,
    samples: int,
    index: int,
) -> list[Placed]:
    """One rank's samples through all layers, gap after gap; what is left comes behind the pipeline."""
    todo = [(layer, first_sample, first_sample + samples) for layer in layers] if samples else []
    placed: list[Placed] = []
    for gap_start, gap_stop in gaps:
        left = (gap_stop - gap_start) * (1 - MARGIN)
        while todo:
            layer, start, stop = todo[0]
            fitting = _most_samples(layer, stop - start, left)
            if not fitting:
                break
            duration = layer.seconds(fitting)
            piece = FrozenPiece(
                index + len(placed), rank, layer.encoder, layer.layer, start, start + fitting
            )
            placed.append(Placed(piece, duration, gap_start))
            left -= duration
            todo[:1] = [] if start + fitting == stop else [(layer, start + fitting, stop)]
    for layer, start, stop in todo:
        piece = FrozenPiece(index + len(placed), rank, layer.encoder, layer.layer, start, stop)
        placed.append(Placed(piece, layer.seconds(stop - start), None))
    return placed


def _most_samples(layer: FrozenLayer, samples: int, time_s: float) -> int:
    """The most samples, up to `samples`, for which the layer takes no longer than `time_s`."""
    if layer.seconds(samples) <= time_s:
        return samples
    low, high = 0, samples - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if layer.seconds(middle) <= time_s else (low, middle - 1)
    return low
