"""Filling: frozen work of the next batch, placed into the bubbles of this one.

Frozen weights never change, so that the conditioning of batch t + 1 can be computed while batch t is
trained: bit for bit the same inputs, at no cost where a rank would have waited. What fits no bubble is
left over and runs behind the pipeline, on all ranks; then all ranks exchange the results.

    rank 0 | F0 F1  . E0 B0 -- E2 B1 -- E3        E0: the first layers of the text encoder, say,
    rank 1 | E1 F0 B0 -- F1 B1 --  .  .           for some samples of the next batch

`filling_shares.py` decides what goes where: it gives `FrozenPiece`s with times at which they start, and this file
weaves them into the programs. A piece never delays the pipeline: the pieces of a gap take no longer than the gap.
DiffusionPipe's own policy is in `benchmarks/filling_policies/`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from lightning_diffpipe.planning.frozen_parts import grouped_s
from lightning_diffpipe.planning.instruction import (
    Encode,
    ExchangeFrozen,
    ForwardNoGrad,
    Instruction,
    ReduceGradients,
)
from lightning_diffpipe.planning.profile import EncoderProfile
from lightning_diffpipe.planning.schedule import Schedule
from lightning_diffpipe.planning.timeline import Timeline

MARGIN = 1e-9
"""Relative slack that keeps rounding from turning a full bubble into a delay."""


@dataclass(frozen=True, slots=True)
class FrozenPiece:
    """One layer of a frozen encoder for some samples of the next batch, on one rank.

    Attributes:
        index: What `Encode` names.
        rank: Rank of the pipeline that runs it.
        encoder: Position of the encoder in the profile.
        layer: Its layer.
        start: First sample, counted within the pipeline's batch.
        stop: One past the last sample.
    """

    index: int
    rank: int
    encoder: int
    layer: int
    start: int
    stop: int

    @property
    def num_samples(self) -> int:
        """Samples of this piece."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class FrozenLayer:
    """A layer of frozen work, with its address and its time."""

    encoder: int
    layer: int
    seconds: Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Placed:
    """A piece and where it goes: into the gap of its rank that begins at `gap_s`, or behind all."""

    piece: FrozenPiece
    duration_s: float
    gap_s: float | None


@dataclass(frozen=True, slots=True)
class Filled:
    """A schedule with frozen work in its bubbles.

    Attributes:
        schedule: The programs, with `Encode` and a final `ExchangeFrozen`.
        pieces: The pieces that `Encode` names.
        piece_s: Seconds of each piece.
        leftover_s: Time behind the pipeline, on the rank with most of it.
    """

    schedule: Schedule
    pieces: tuple[FrozenPiece, ...]
    piece_s: tuple[float, ...]
    leftover_s: float


def frozen_layers(
    encoders: Sequence[EncoderProfile], group_size: int | None = None
) -> tuple[FrozenLayer, ...]:
    """All frozen layers in an order in which they can run: encoders after those they need.

    Args:
        encoders: The frozen encoders.
        group_size: Samples on which a layer runs at a time; None for all at once.
    """
    order: list[int] = []
    names = {encoder.name: index for index, encoder in enumerate(encoders)}
    while len(order) < len(encoders):
        order += [
            index
            for index, encoder in enumerate(encoders)
            if index not in order and all(names[need] in order for need in encoder.needs)
        ]
    return tuple(
        FrozenLayer(index, number, partial(grouped_s, layer.forward_s.at, group_size=group_size))
        for index in order
        for number, layer in enumerate(encoders[index].layers)
    )


def gaps_by_rank(timeline: Timeline) -> list[list[tuple[float, float]]]:
    """The intervals `(start, stop)` in which a rank has nothing to do, until the last is done."""
    gaps: list[list[tuple[float, float]]] = [[] for _ in range(timeline.num_ranks)]
    now = [0.0] * timeline.num_ranks
    for span in sorted(timeline.spans, key=lambda span: span.start_s):
        if span.start_s > now[span.rank]:
            gaps[span.rank].append((now[span.rank], span.start_s))
        now[span.rank] = max(now[span.rank], span.stop_s)
    end_s = timeline.iteration_s
    for own, done_s in zip(gaps, now, strict=True):
        if end_s > done_s:
            own.append((done_s, end_s))
    return gaps


def weave(schedule: Schedule, timeline: Timeline, placed: Sequence[Placed]) -> Filled:
    """Puts pieces into the programs.

    Args:
        schedule: The pipeline alone, compute instructions only.
        timeline: Its timeline.
        placed: The pieces in the order in which they run; their indices count from 0.
    """
    starts: list[dict[Instruction, float]] = [{} for _ in schedule.programs]
    for span in timeline.spans:
        starts[span.rank][span.instruction] = span.start_s
    has_gradients = not all(isinstance(i, ForwardNoGrad) for _, i in schedule.staged())
    reduction = (ReduceGradients(),) if has_gradients else ()
    programs, end_s = [], timeline.iteration_s
    for rank, program in enumerate(schedule.programs):
        own = deque(p for p in placed if p.piece.rank == rank)
        woven: list[Instruction] = []
        for instruction in (*program, *reduction):
            # A reduction that takes no time has no span: it comes behind all gaps.
            start_s = starts[rank].get(instruction, end_s)
            while own and own[0].gap_s is not None and own[0].gap_s < start_s:
                woven.append(Encode(own.popleft().piece.index))
            woven.append(instruction)
        rest = (Encode(p.piece.index) for p in own)
        programs.append((*woven, *rest, ExchangeFrozen()))
    behind = [0.0] * schedule.num_ranks
    for p in placed:
        if p.gap_s is None:
            behind[p.piece.rank] += p.duration_s
    return Filled(
        replace(schedule, programs=tuple(programs)),
        tuple(p.piece for p in placed),
        tuple(p.duration_s for p in placed),
        max(behind),
    )
