"""From what each rank noted to one timeline of all of them, comparable with the planned one.

A rank stamps every instruction with its own clock, waits included. Three things keep the notes of
several ranks from being a timeline:

* clocks differ: each rank's offset is subtracted, so that all times are rank 0's;
* waiting is not work: a `Wait`, or the wait for the loss, is dropped, and what ran inside it (frozen
  work, say) stays;
* in a collective, the first to come wait for the last: it begins when the last has come.

    as noted    rank 0 | F0 F1 ?? ?? B0 -- ?? B1 --        ??: inside a wait
                rank 1 | ?? F0 B0 -- F1 B1 --
    timeline    rank 0 | F0 F1  .  . B0 --  . B1 --
                rank 1 |  . F0 B0 -- F1 B1 --  .  .
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lightning_diffpipe.planning.instruction import (
    Encode,
    ExchangeFrozen,
    Receive,
    ReduceGradients,
    Send,
    ShareResults,
    Staged,
    Wait,
)
from lightning_diffpipe.planning.schedule import Message, Placement
from lightning_diffpipe.planning.timeline import Span, Timeline, Transfer


@dataclass(frozen=True, slots=True)
class Occupation:
    """What the ranks of a pipeline did with one iteration; seconds, by rank where there are several.

    Attributes:
        iteration_s: From the first instruction of any rank to the last.
        bubble_ratio: Idle time of all ranks over iteration time times ranks.
        busy_s: Time at work.
        idle_s: Time with nothing to do.
        before_s: Frozen work before the pipeline begins anywhere.
        filled_s: Frozen work while the pipeline runs: in its bubbles.
        leftover_s: Frozen work after the pipeline has ended everywhere.
    """

    iteration_s: float
    bubble_ratio: float
    busy_s: tuple[float, ...]
    idle_s: tuple[float, ...]
    before_s: tuple[float, ...]
    filled_s: tuple[float, ...]
    leftover_s: tuple[float, ...]


def measured_timeline(
    noted: Sequence[Sequence[Span]], offsets_s: Sequence[float], placement: Placement
) -> Timeline:
    """Joins what the ranks of a pipeline noted.

    Args:
        noted: By rank, in the order of the program: every instruction with its times.
        offsets_s: By rank: its clock minus rank 0's.
        placement: Who meets whom when gradients are summed.

    Returns:
        A timeline that begins at 0.
    """
    shifted = [
        [
            replace(s, rank=rank, start_s=s.start_s - offset_s, stop_s=s.stop_s - offset_s)
            for s in spans
        ]
        for rank, (spans, offset_s) in enumerate(zip(noted, offsets_s, strict=True))
    ]
    met = [[_shortened(span, shifted, placement) for span in own] for own in shifted]
    spans = [span for own in met for span in _at_work(own)]
    begin_s = min((span.start_s for span in spans), default=0.0)
    return Timeline(
        tuple(
            replace(s, start_s=s.start_s - begin_s, stop_s=s.stop_s - begin_s)
            for s in sorted(spans, key=lambda s: (s.rank, s.start_s))
        ),
        len(noted),
        tuple(_transfers(shifted, begin_s)),
    )


def without_posts(timeline: Timeline) -> Timeline:
    """Returns the timeline without sends and receives, which take next to no time: for drawings."""
    kept = tuple(s for s in timeline.spans if not isinstance(s.instruction, Send | Receive))
    return replace(timeline, spans=kept)


def occupation(timeline: Timeline) -> Occupation:
    """Adds up what the ranks did."""
    ranks = range(timeline.num_ranks)
    staged = [span for span in timeline.spans if isinstance(span.instruction, Staged)]
    first_s = min((span.start_s for span in staged), default=0.0)
    last_s = max((span.stop_s for span in staged), default=0.0)
    frozen = [[s for s in timeline.spans if s.rank == r and _is_frozen(s)] for r in ranks]
    before = tuple(_overlap(own, 0.0, first_s) for own in frozen)
    within = tuple(_overlap(own, first_s, last_s) for own in frozen)
    after = tuple(_overlap(own, last_s, timeline.iteration_s) for own in frozen)
    return Occupation(
        timeline.iteration_s,
        timeline.bubble_ratio,
        tuple(timeline.busy_s(rank) for rank in ranks),
        timeline.idle_by_rank_s(),
        before,
        within,
        after,
    )


def _is_frozen(span: Span) -> bool:
    return isinstance(span.instruction, Encode)


def _overlap(spans: Iterable[Span], start_s: float, stop_s: float) -> float:
    return sum(max(min(s.stop_s, stop_s) - max(s.start_s, start_s), 0.0) for s in spans)


def _shortened(span: Span, noted: list[list[Span]], placement: Placement) -> Span:
    """Lets a collective begin when the last rank of its group has come."""
    kind = span.instruction
    if not isinstance(kind, ExchangeFrozen | ReduceGradients):
        return span
    if isinstance(kind, ExchangeFrozen):
        group = set(range(len(noted)))
    else:
        stages = placement.stages_of(span.rank)
        group = {rank for stage in stages for rank in placement.stage_ranks[stage]}
    number = [s.instruction for s in noted[span.rank] if s.start_s <= span.start_s].count(kind)
    arrivals = [
        [s.start_s for s in noted[rank] if s.instruction == kind][number - 1 : number]
        for rank in group
    ]
    last_s = max((start for own in arrivals for start in own), default=span.start_s)
    return replace(span, start_s=min(max(span.start_s, last_s), span.stop_s))


def _at_work(own: list[Span]) -> list[Span]:
    """Returns one rank's spans without waits, none inside another."""
    waits = Wait | ShareResults
    working = [s for s in own if not isinstance(s.instruction, waits) and s.duration_s > 0]
    encodes = [s for s in working if _is_frozen(s)]
    found: list[Span] = []
    for span in working:
        inside = [e for e in encodes if e is not span and _overlap([e], span.start_s, span.stop_s)]
        found += _cut_out(span, inside) if not _is_frozen(span) else [span]
    return found


def _cut_out(span: Span, inside: list[Span]) -> list[Span]:
    """Returns what is left of a span around others that ran while it was under way."""
    left, now = [], span.start_s
    for other in sorted(inside, key=lambda s: s.start_s):
        if other.start_s > now:
            left.append(replace(span, start_s=now, stop_s=other.start_s))
        now = max(now, other.stop_s)
    if now < span.stop_s:
        left.append(replace(span, start_s=now))
    return left


def _transfers(noted: list[list[Span]], begin_s: float) -> Iterable[Transfer]:
    """Every message from when it was sent until its reader went on, at most."""
    waits = {(s.rank, s.instruction): s for own in noted for s in own}
    for own in noted:
        for span in own:
            if isinstance(span.instruction, Send):
                send = span.instruction
                message = Message(send.kind, send.stage, send.microbatch, span.rank, send.to_rank)
                wait = waits.get((send.to_rank, message.wait()))
                if wait is not None:
                    stop_s = max(wait.stop_s, span.start_s) - begin_s
                    yield Transfer(message, span.start_s - begin_s, stop_s)
