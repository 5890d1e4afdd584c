"""The simulator: how long does a schedule take, and does it end at all?

Every rank runs its program in order; every directed link carries its messages in order, one at a time,
both directions at once. An instruction starts when its rank is free and what it reads has arrived.
A message travels by itself, unless the processor that computes also has to move it (gloo).
That is all: the same rules hold for training schedules, frozen work and forward-only patch schedules.
If no rank can go on before all are done, the schedule is refused with an image of where it stands.

Where a schedule is cut decides what its instructions cost, not which of them waits for which. So an `Outline` is
made once for all cuts: one row for each instruction, in an order in which all can run, with the message it reads
and the one it makes. `makespan` goes once over these rows, which is all that the search asks of thousands of
proposals; `simulate` makes the timeline in the same pass. Programs with communication and without give the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from math import lcm
from typing import TypeVar

from lightning_diffpipe.errors import ScheduleError
from lightning_diffpipe.planning.cost import PipelineCosts
from lightning_diffpipe.planning.filling import EncodePart
from lightning_diffpipe.planning.instruction import (
    Compute,
    Encode,
    ExchangeFrozen,
    Instruction,
    Receive,
    ReduceGradients,
    Send,
    ShareResults,
    Staged,
    Wait,
)
from lightning_diffpipe.planning.lowering import lower, with_collectives
from lightning_diffpipe.planning.schedule import Flow, Message, Placement, Schedule
from lightning_diffpipe.planning.schedules.pipedream import unrolled
from lightning_diffpipe.planning.timeline import Span, Timeline, Transfer


def in_ticks(schedule: Schedule) -> PipelineCosts:
    """Returns costs in ticks, for images: forward 1, backward 2, also in parts, frozen work 1, free links."""
    count = schedule.num_microbatches
    one, two, nothing = (((ticks,) * count,) * schedule.num_stages for ticks in (1.0, 2.0, 0.0))
    parts = [i.part for program in schedule.programs for i in program if isinstance(i, Encode)]
    encode_s = (1.0,) * (1 + max(parts, default=-1))
    return PipelineCosts((1,) * count, one, two, one, nothing, nothing, encode_s)


def simulate(
    schedule: Schedule, costs: PipelineCosts | None = None, sizes: Sequence[int] = ()
) -> Timeline:
    """Runs a schedule on paper.

    Args:
        schedule: A schedule, lowered or not.
        costs: Durations in seconds; those of `in_ticks` if None.
        sizes: Samples of each microbatch, where equal ones cost the same; saves time.

    Raises:
        ScheduleError: Deadlock. Names the instruction that waits, and shows all ranks.

    Example:
        >>> from lightning_diffpipe.planning.schedules.gpipe import gpipe
        >>> print(simulate(gpipe(2, 2)))
        rank 0 | F0 F1  .  .  . B0 -- B1 --
        rank 1 |  . F0 F1 B0 -- B1 --  .  .
    """
    costs = costs or in_ticks(schedule)
    outline = outline_of(schedule, sizes or range(schedule.num_microbatches))
    if outline.stuck:  # written down, a message that is waited for has a name
        schedule = schedule if schedule.is_lowered else lower(schedule)
        outline = outline_of(schedule, range(schedule.num_microbatches))
        timeline = _timeline(schedule, outline, costs)
        raise ScheduleError(_deadlock(schedule, outline.stuck, timeline))
    return _timeline(schedule, outline, costs)


def _timeline(schedule: Schedule, outline: Outline, costs: PipelineCosts) -> Timeline:
    """Returns what happens, in the order of the rows; each rank does what stands in its program."""
    starts_s: list[float] = []
    _run(outline, costs, 0.0, starts_s)
    todo = [
        (
            pair
            for pair in zip(p, schedule.outputs_of(p), strict=True)
            if not isinstance(pair[0], _COLLECTIVES)
        )
        for p in schedule.programs
    ]
    link_free_s = [0.0] * outline.num_edges
    spans, transfers = list[Span](), list[Transfer]()
    for (rank, work, meeting, sent, equal_message, edge), now_s in zip(
        outline.rows, starts_s, strict=False
    ):
        if work == _MEETS:
            collective, group = outline.meetings[meeting]
            for peer in group:
                stop_s = now_s + meeting_s(collective, peer, costs)
                if stop_s > now_s:
                    spans.append(Span(peer, collective, now_s, stop_s))
            continue
        instruction, message = next(todo[rank])
        stop_s = now_s
        if isinstance(instruction, (Staged, Encode)):
            stop_s += costs.compute_s(outline.works[work])
            spans.append(Span(rank, instruction, now_s, stop_s))
        if sent >= 0:
            if isinstance(instruction, Send):
                message = Message.of(instruction, rank)
            assert message is not None
            start_s = max(stop_s, link_free_s[edge])
            link_free_s[edge] = start_s + costs.message_s(outline.messages[equal_message])
            transfers.append(Transfer(message, start_s, link_free_s[edge]))
    return Timeline(tuple(spans), outline.num_ranks, tuple(transfers))


def meeting_s(meeting: Instruction, rank: int, costs: PipelineCosts) -> float:
    """Returns what a collective takes on one of its ranks, from when all of them are there."""
    return costs.reduce_s(rank) if isinstance(meeting, ReduceGradients) else costs.exchange_s()


def group_of(placement: Placement, rank: int, instruction: Instruction) -> tuple[int, ...]:
    """Returns who meets at a collective: all ranks, or those that hold a copy of one of this rank's stages."""
    if isinstance(instruction, ExchangeFrozen):
        return tuple(range(placement.num_ranks))
    stages = placement.stages_of(rank)
    return tuple(sorted({r for stage in stages for r in placement.stage_ranks[stage]}))


def _deadlock(lowered: Schedule, stuck: dict[int, Instruction], timeline: Timeline) -> str:
    """Names the most telling of the ranks that wait: one whose message is never sent, if any."""
    all_sent = {
        Message.of(i, rank)
        for rank, program in enumerate(lowered.programs)
        for i in program
        if isinstance(i, Send)
    }
    reasons = []
    for rank, i in stuck.items():
        is_sent, text = True, f"rank {rank} waits at {i} for ranks that never come"
        if isinstance(i, Wait):
            message = Message.of(i, rank)
            is_sent = message in all_sent
            why = "cannot send before: each waits for the other" if is_sent else "never sends"
            text = f"rank {rank} waits for {message}, which rank {i.from_rank} {why}"
        reasons.append((is_sent, rank, text))
    _, rank, reason = min(reasons)
    notes = dict.fromkeys(stuck, "  ?")
    notes[rank] += "          <-- waits here"
    image = timeline.render(notes=notes)
    return f"{reason}\n\n" + "\n".join(f"    {line}" for line in image.splitlines())


Row = tuple[int, int, int, int, int, int]
"""(rank, work, reads, makes, message, edge), each an index, or -1 where there is none.

`reads` and `makes` number the messages, `message` tells which of `Outline.messages` costs the same. Rows
of collectives have no work; their second entry is `_MEETS`, their third one of `Outline.meetings`. Where messages
are written down, those who send and wait have rows of their own, without work.
"""

Meeting = tuple[Instruction, tuple[int, ...]]
"""A collective and the ranks that take part."""

_NO_WORK, _MEETS = -1, -2
_COLLECTIVES = (ExchangeFrozen, ReduceGradients)


@dataclass(frozen=True, slots=True)
class Outline:
    """A schedule as far as its duration depends on it.

    Attributes:
        works: The different compute instructions; of those that cost the same, one.
        messages: The different messages; of those that cost the same, one.
        meetings: The different collectives.
        num_sent: Messages are numbered below this.
        num_edges: Directed edges are numbered below this.
        stuck: Ranks that never end, with the instruction at which each stands.
    """

    num_ranks: int
    rows: tuple[Row, ...]
    works: tuple[Compute, ...]
    messages: tuple[Message, ...]
    meetings: tuple[Meeting, ...]
    num_sent: int
    num_edges: int
    stuck: dict[int, Instruction]


def exchanged_s(parts: Sequence[EncodePart], costs: PipelineCosts) -> float:
    """Returns when all ranks have the encodings of a batch that is encoded before the pipeline."""
    clock = dict.fromkeys((part.rank for part in parts), 0.0)
    for part in parts:
        clock[part.rank] += costs.compute_s(Encode(part.index))
    return max(clock.values()) + costs.exchange_s()


def makespan(outline: Outline, costs: PipelineCosts, start_s: float = 0.0) -> float:
    """Returns when the last rank is done if all begin at `start_s`."""
    assert not outline.stuck, "a schedule of the search never ends"
    return _run(outline, costs, start_s)


def _run(
    outline: Outline, costs: PipelineCosts, start_s: float, starts_s: list[float] | None = None
) -> float:
    """Returns when the last rank is done, and adds the start of each row: the inner loop of the search."""
    clock = [start_s] * outline.num_ranks
    link_free = [0.0] * outline.num_edges
    arrival = [0.0] * outline.num_sent
    work_s = [*map(costs.compute_s, outline.works), 0.0]  # the last for rows without work
    travel_s = [costs.message_s(message) for message in outline.messages]
    holds_sender = costs.holds_sender
    for rank, work, reads, makes, message, edge in outline.rows:
        if work == _MEETS:
            meeting, group = outline.meetings[reads]
            start = max(clock[peer] for peer in group)  # when the last of them has come
            for peer in group:
                clock[peer] = start + meeting_s(meeting, peer, costs)
            if starts_s is not None:
                starts_s.append(start)
            continue
        now = clock[rank]
        if reads >= 0 and arrival[reads] > now:
            now = arrival[reads]
        if starts_s is not None:
            starts_s.append(now)
        now += work_s[work]
        if makes >= 0:
            start = link_free[edge] if link_free[edge] > now else now
            link_free[edge] = arrival[makes] = start + travel_s[message]
            if holds_sender:
                now = arrival[makes]
        clock[rank] = now
    return max(clock)


def period_s(batch: Schedule, costs: PipelineCosts) -> float:
    """Returns seconds between batches where none is waited for: what twice as many batches take longer."""
    few = 4 * batch.num_ranks
    ends_s = [
        makespan(outline_of(unrolled(batch, n), costs.sizes * n), costs.repeated(n))
        for n in (few, 2 * few)
    ]
    return (ends_s[1] - ends_s[0]) / few


def outline_of(schedule: Schedule, sizes: Sequence[int]) -> Outline:
    """Makes the outline of a schedule, with communication or without; microbatches of equal sizes cost the same."""
    is_lowered = schedule.is_lowered
    schedule = schedule if is_lowered else with_collectives(schedule)
    numbers = _Numbers(schedule, sizes, is_lowered)
    programs, meetings = numbers.rows(), tuple(numbers.meetings)
    order, position = _in_order(programs, meetings, numbers.num_sent)
    stuck = {
        rank: program[at]
        for rank, (program, at) in enumerate(zip(schedule.programs, position, strict=True))
        if at < len(program)
    }
    works, counts = tuple(numbers.works), (numbers.num_sent, len(numbers.edges))
    messages = tuple(message for _, message in numbers.messages.values())
    return Outline(
        schedule.num_ranks, tuple(order), works, messages, meetings, *counts, stuck=stuck
    )


_Sent = tuple[int, int, int]
"""The last three entries of the row that makes a message."""

_NOTHING_SENT: _Sent = (-1, -1, -1)


class _Numbers:
    """Programs as rows of numbers. What holds for all microbatches of a stage is looked up once."""

    def __init__(self, schedule: Schedule, sizes: Sequence[int], is_lowered: bool) -> None:
        self.schedule, self.is_lowered = schedule, is_lowered
        first_like: dict[int, int] = {}
        self.first_like = [first_like.setdefault(size, m) for m, size in enumerate(sizes)]
        self.works: dict[Compute, int] = {}
        self.messages: dict[tuple[str, int, int], tuple[int, Message]] = {}
        self.edges: dict[tuple[int, int], int] = {}
        self.meetings: dict[Meeting, int] = {}
        self.flows: dict[Flow, list[_Sent]] = {}
        self.stages: dict[tuple[type[Staged], int], list[Row]] = {}
        self.written: dict[tuple[str, int, int, int], int] = {}

    @property
    def num_sent(self) -> int:
        return len(self.flows) * self.schedule.num_microbatches + len(self.written)

    def rows(self) -> list[list[Row]]:
        return [
            [self.row(rank, instruction) for instruction in program]
            for rank, program in enumerate(self.schedule.programs)
        ]

    def row(self, rank: int, instruction: Instruction) -> Row:
        if isinstance(instruction, Staged) and not self.is_lowered:
            key = type(instruction), instruction.stage
            if key not in self.stages:
                self.stages[key] = self.rows_of_stage(*key)
            return self.stages[key][instruction.microbatch]
        match instruction:
            case ExchangeFrozen() | ReduceGradients():
                meeting = instruction, group_of(self.schedule.placement, rank, instruction)
                return rank, _MEETS, _number(self.meetings, meeting), *_NOTHING_SENT
            case Wait(kind, stage, microbatch):
                sent = _number(self.written, (kind, stage, microbatch, rank))
                return rank, _NO_WORK, sent, *_NOTHING_SENT
            case Send(kind, stage, microbatch, to_rank):
                sent = _number(self.written, (kind, stage, microbatch, to_rank))
                message = len(self.messages), Message.of(instruction, rank)
                like, _ = self.messages.setdefault((kind, stage, microbatch), message)
                return rank, _NO_WORK, -1, sent, like, _number(self.edges, (rank, to_rank))
            case Receive() | ShareResults():
                return rank, _NO_WORK, -1, *_NOTHING_SENT
            case _:
                return rank, _number(self.works, instruction), -1, *_NOTHING_SENT

    def rows_of_stage(self, work: type[Staged], stage: int) -> list[Row]:
        """Returns this work of a stage, by microbatch."""
        schedule, count = self.schedule, self.schedule.num_microbatches
        read_flow, made_flow = schedule.read_by(work, stage), schedule.made_by(work, stage)
        read, sent = [_NOTHING_SENT] * count, [_NOTHING_SENT] * count
        if read_flow:
            read = self.sent(read_flow)
        if made_flow:
            sent = self.sent(made_flow)
        rank_of = schedule.placement.rank_of
        number = {
            like: _number(self.works, work(stage, like)) for like in dict.fromkeys(self.first_like)
        }
        works = [number[like] for like in self.first_like]
        return [(rank_of(stage, m), works[m], read[m][0], *sent[m]) for m in range(count)]

    def sent(self, flow: Flow) -> list[_Sent]:
        """Returns what travels, by microbatch of its reader, where anything has to."""
        if flow not in self.flows:
            first, ranks = self.num_sent, self.schedule.placement.stage_ranks
            period = lcm(len(ranks[flow.maker]), len(ranks[flow.reader]))
            starts = self.schedule.starts or (0,) * self.schedule.num_microbatches
            message_of: dict[tuple[int, int, int], tuple[int, int] | None] = {}
            self.flows[flow] = []
            for microbatch in range(self.schedule.num_microbatches):
                like = microbatch % period, self.first_like[microbatch], starts[microbatch]
                if like not in message_of:
                    message_of[like] = self.message_and_edge(flow, microbatch)
                sent = message_of[like]
                self.flows[flow].append((first + microbatch, *sent) if sent else _NOTHING_SENT)
        return self.flows[flow]

    def message_and_edge(self, flow: Flow, microbatch: int) -> tuple[int, int] | None:
        """Returns which message costs the same, and its edge; None if nothing has to travel."""
        message = self.schedule.message(flow, microbatch)
        if message is None or message.is_local:
            return None
        edge = _number(self.edges, (message.from_rank, message.to_rank))
        like = flow.kind, flow.reader, self.first_like[microbatch]
        index, _ = self.messages.setdefault(like, (len(self.messages), message))
        return index, edge


_Key = TypeVar("_Key")


def _number(numbers: dict[_Key, int], key: _Key) -> int:
    """Returns the number of a key; the next one if it is new."""
    return numbers.setdefault(key, len(numbers))


def _in_order(
    programs: Sequence[Sequence[Row]], meetings: Sequence[Meeting], num_sent: int
) -> tuple[list[Row], list[int]]:
    """Returns the rows that run, in order, and how many of its rows each rank has run."""
    order: list[Row] = []
    position, ready = [0] * len(programs), list(range(len(programs)))
    is_sent, waiting, present = bytearray(num_sent), dict[int, int](), [0] * len(meetings)
    while ready:
        rank = ready.pop()
        for row in islice(programs[rank], position[rank], None):
            _, work, reads, makes, _, _ = row
            if work == _MEETS:
                present[reads] += 1
                group = meetings[reads][1]
                if present[reads] == len(group):
                    order.append(row)
                    present[reads] = 0
                    for peer in group:
                        position[peer] += 1
                    ready += group
                break
            if reads >= 0 and not is_sent[reads]:
                waiting[reads] = rank
                break
            position[rank] += 1
            order.append(row)
            if makes >= 0:
                is_sent[makes] = True
                if makes in waiting:
                    ready.append(waiting.pop(makes))
    return order, position
