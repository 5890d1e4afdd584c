"""Filling as DiffusionPipe does: bubble after bubble, whole layers and at most one partial one.

A bubble is an interval in which the same `d` ranks idle. Each of them runs `1 / d` of the samples of a
layer. For every bubble, in chronological order, all combinations of next layers of the encoders that fit
are tried; to each, at most one layer for part of the batch may be added; the combination that takes
longest wins. Candidates grow as a product over encoders, which are few.

Source:
    DiffusionPipe, Tian et al. (2024), https://arxiv.org/abs/2405.01248, as on its slides. The sizes of
    partial batches, and which layer may be partial, are ours. Where pieces go does not depend on what moving
    intermediate results between ranks takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from lightning_diffpipe.planning.filling import (
    MARGIN,
    FrozenLayer,
    FrozenPiece,
    Placed,
    grouped_s,
    split_evenly,
)
from lightning_diffpipe.planning.profile import EncoderLayerProfile, EncoderProfile
from lightning_diffpipe.planning.timeline import Span, Timeline

PARTIAL_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96)
"""Samples of a partial batch, over all idle ranks together."""


@dataclass
class _Component:
    """A frozen encoder and how far it has come."""

    name: str
    needs: tuple[str, ...]
    layers: list[FrozenLayer]
    num_samples: int
    next_layer: int = 0
    done_samples: int = 0

    def todo(self, ahead: int) -> int:
        """Samples left of the layer that many after the next."""
        return self.num_samples - (self.done_samples if ahead == 0 else 0)

    def seconds(self, ahead: int, ranks: int) -> float:
        """The rest of a layer, on so many ranks."""
        return self.layers[self.next_layer + ahead].seconds(math.ceil(self.todo(ahead) / ranks))

    @property
    def layers_left(self) -> int:
        return len(self.layers) - self.next_layer


Choice = tuple[tuple[int, ...], tuple[int, int] | None]
"""(whole layers of each component, (component, samples) of the partial layer)."""


def fill_like_diffusionpipe(
    timeline: Timeline,
    encoders: Sequence[EncoderProfile],
    num_samples: int,
    group_size: int | None = None,
) -> tuple[Placed, ...]:
    """Places the frozen work of a batch.

    Args:
        timeline: The pipeline alone.
        encoders: The frozen encoders.
        num_samples: Samples of the pipeline's next batch.
        group_size: Samples on which a layer runs at a time; None for all at once.
    """

    def layer_of(encoder: int, index: int, layer: EncoderLayerProfile) -> FrozenLayer:
        seconds = partial(grouped_s, layer.forward_s.at, group_size=group_size)
        return FrozenLayer(encoder, index, seconds)

    components = [
        _Component(
            encoder.name,
            encoder.needs,
            [layer_of(i, j, layer) for j, layer in enumerate(encoder.layers)],
            num_samples,
        )
        for i, encoder in enumerate(encoders)
    ]
    placed: list[Placed] = []
    for bubble in bubbles(timeline):
        time_s, ranks = bubble.duration_s * (1 - MARGIN), bubble.ranks
        ready = _available(components)
        if ready:
            _take(ready, _best_choice(ready, time_s, len(ranks)), ranks, bubble.start_s, placed)
    everybody = tuple(range(timeline.num_ranks))
    while ready := _available(components):
        whole = tuple(component.layers_left for component in ready)
        _take(ready, (whole, None), everybody, None, placed)
    return tuple(placed)


@dataclass(frozen=True, slots=True)
class Bubble:
    """An interval in which the same ranks have nothing to do; as long as it can be."""

    start_s: float
    stop_s: float
    ranks: tuple[int, ...]

    @property
    def duration_s(self) -> float:
        """Its length."""
        return self.stop_s - self.start_s


def bubbles(timeline: Timeline) -> tuple[Bubble, ...]:
    """All maximal intervals with a constant, non-empty set of idle ranks, in order."""
    eps = 1e-9 * timeline.iteration_s
    out: list[Bubble] = []
    for start, stop, busy in _constant_intervals(timeline.spans, timeline.iteration_s):
        idle = tuple(rank for rank in range(timeline.num_ranks) if rank not in busy)
        if stop - start <= eps or not idle:
            continue
        if out and start - out[-1].stop_s <= eps and out[-1].ranks == idle:
            start = out.pop().start_s
        out.append(Bubble(start, stop, idle))
    return tuple(out)


def _constant_intervals(
    spans: Iterable[Span], until_s: float
) -> Iterable[tuple[float, float, frozenset[int]]]:
    """Cuts time at every start and stop; yields `(start, stop, busy ranks)`."""
    events: list[tuple[float, int, int]] = []
    for span in spans:
        if span.stop_s > span.start_s:
            events += [(span.start_s, 1, span.rank), (span.stop_s, -1, span.rank)]
    events.sort()
    working: dict[int, int] = {}
    now, busy = 0.0, frozenset[int]()
    for time, change, rank in [*events, (until_s, 0, 0)]:
        if time > now:
            yield now, time, busy
            now = time
        working[rank] = working.get(rank, 0) + change
        busy = busy | {rank} if working[rank] else busy - {rank}


def _available(components: Sequence[_Component]) -> list[_Component]:
    """Components with work left whose inputs are complete."""
    complete = {c.name for c in components if not c.layers_left}
    return [c for c in components if c.layers_left and complete.issuperset(c.needs)]


def _whole_layers(
    components: Sequence[_Component], time_s: float, ranks: int
) -> Iterator[tuple[int, ...]]:
    """Every number of whole next layers that fits; the last component takes as many as it can."""
    component, *others = components
    used, fitting = [0.0], 0
    while fitting < component.layers_left:
        after = used[-1] + component.seconds(fitting, ranks)
        if after > time_s:
            break
        used.append(after)
        fitting += 1
    if not others:
        yield (fitting,)
        return
    for count in range(fitting, -1, -1):
        for rest in _whole_layers(others, time_s - used[count], ranks):
            yield (count, *rest)


def _best_choice(components: Sequence[_Component], time_s: float, ranks: int) -> Choice:
    """The candidate that fills the bubble best."""
    best_s, best = 0.0, ((0,) * len(components), None)  # type: tuple[float, Choice]
    for whole in _whole_layers(components, time_s, ranks):
        used = sum(
            component.seconds(ahead, ranks)
            for component, count in zip(components, whole, strict=True)
            for ahead in range(count)
        )
        if used > best_s:
            best_s, best = used, (whole, None)
        for which, (component, count) in enumerate(zip(components, whole, strict=True)):
            if count == component.layers_left:
                continue
            layer = component.layers[component.next_layer + count]
            for samples in PARTIAL_SIZES:
                total = used + layer.seconds(math.ceil(samples / ranks))
                if samples < component.todo(count) and best_s < total <= time_s:
                    best_s, best = total, (whole, (which, samples))
    return best


def _take(
    components: Sequence[_Component],
    choice: Choice,
    ranks: tuple[int, ...],
    gap_s: float | None,
    placed: list[Placed],
) -> None:
    """Runs what was chosen, and moves the components on."""
    whole, partial = choice
    for which, (component, count) in enumerate(zip(components, whole, strict=True)):
        for _ in range(count):
            _run(component, component.todo(0), ranks, gap_s, placed)
        if partial is not None and partial[0] == which:
            _run(component, partial[1], ranks, gap_s, placed)


def _run(
    component: _Component,
    samples: int,
    ranks: tuple[int, ...],
    gap_s: float | None,
    placed: list[Placed],
) -> None:
    layer, start = component.layers[component.next_layer], component.done_samples
    for rank, count in zip(ranks, split_evenly(samples, len(ranks)), strict=True):
        if count:
            piece = FrozenPiece(len(placed), rank, layer.encoder, layer.layer, start, start + count)
            placed.append(Placed(piece, layer.seconds(count), gap_s))
            start += count
    component.done_samples = start
    if start == component.num_samples:
        component.next_layer, component.done_samples = component.next_layer + 1, 0
