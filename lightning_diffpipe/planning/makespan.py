"""How long does a schedule take? Nothing else is asked of thousands of proposals, so nothing else is done.

Where a schedule is cut decides what its instructions cost, not which of them waits for which. So an
`Outline` is made once for all cuts: one row for each instruction that computes, in an order in which all
can run, with the message it reads and the one it makes. No communication has to be written down for that.
`makespan` goes once over these rows. It gives the `iteration_s` of `simulate`, to the last bit; and
`timeline_of` gives its spans, for the few proposals whose bubbles are filled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from math import lcm
from operator import eq
from typing import TypeVar

from lightning_diffpipe.planning.execution import group_of
from lightning_diffpipe.planning.frozen_parts import EncodePart
from lightning_diffpipe.planning.instruction import (
    Compute,
    Encode,
    ExchangeFrozen,
    Instruction,
    ReduceGradients,
    Staged,
)
from lightning_diffpipe.planning.lowering import with_collectives
from lightning_diffpipe.planning.pipeline_costs import PipelineCosts
from lightning_diffpipe.planning.schedule import Flow, Message, Schedule
from lightning_diffpipe.planning.schedules.pipedream import unrolled
from lightning_diffpipe.planning.simulator import Costs, meeting_s
from lightning_diffpipe.planning.timeline import Span, Timeline

Row = tuple[int, int, int, int, int, int]
"""(rank, work, reads, makes, message, edge), each an index, or -1 where there is none.

`reads` and `makes` number the messages, `message` tells which of `Outline.messages` costs the same. Rows
of collectives have no work; their second entry is `_MEETS`, their third one of `Outline.meetings`.
"""

Meeting = tuple[Instruction, tuple[int, ...]]
"""A collective and the ranks that take part."""

_MEETS = -1


@dataclass(frozen=True, slots=True)
class Outline:
    """A schedule as far as its duration depends on it.

    Attributes:
        num_ranks: Ranks of the pipeline.
        rows: What happens, in order.
        works: The different compute instructions; of those that cost the same, one.
        messages: The different messages; of those that cost the same, one.
        meetings: The different collectives.
        num_sent: Messages are numbered below this.
        num_edges: Directed edges are numbered below this.
    """

    num_ranks: int
    rows: tuple[Row, ...]
    works: tuple[Compute, ...]
    messages: tuple[Message, ...]
    meetings: tuple[Meeting, ...]
    num_sent: int
    num_edges: int


def exchanged_s(parts: Sequence[EncodePart], costs: Costs) -> float:
    """When all ranks have the encodings of a batch that is encoded in front of the pipeline.

    Args:
        parts: Who encodes what, in the order of the programs.
        costs: How long that takes, and the exchange.
    """
    clock = dict.fromkeys((part.rank for part in parts), 0.0)
    for part in parts:
        clock[part.rank] += costs.compute_s(Encode(part.index))
    return max(clock.values()) + costs.exchange_s()


def makespan(
    outline: Outline, costs: Costs, start_s: float = 0.0, starts_s: list[float] | None = None
) -> float:
    """When the last rank is done: the inner loop of the search.

    Args:
        outline: What happens in which order.
        costs: How long things take; equally long for microbatches of equal size.
        start_s: When all ranks begin.
        starts_s: If given, when each row begins is appended to it.
    """
    clock = [start_s] * outline.num_ranks
    link_free = [0.0] * outline.num_edges
    arrival = [0.0] * outline.num_sent
    work_s = [costs.compute_s(work) for work in outline.works]
    travel_s = [costs.message_s(message) for message in outline.messages]
    holds_sender = costs.holds_sender
    for rank, work, reads, makes, message, edge in outline.rows:
        if work == _MEETS:
            met_s = _meet(*outline.meetings[reads], clock, costs)
            if starts_s is not None:
                starts_s.append(met_s)
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


def _meet(meeting: Instruction, group: Sequence[int], clock: list[float], costs: Costs) -> float:
    """Moves the clocks of the ranks that meet to the end of the collective; when does it begin?"""
    start = max(clock[peer] for peer in group)
    for peer in group:
        clock[peer] = start + meeting_s(meeting, peer, costs)
    return start


def timeline_of(schedule: Schedule, costs: PipelineCosts) -> Timeline:
    """The spans of `simulate`, in its order, for a schedule that obeys the laws and ends; no transfers."""
    outline = outline_of(schedule, costs.sizes)
    starts_s: list[float] = []
    makespan(outline, costs, starts_s=starts_s)
    todo = [filter(_computes, program) for program in schedule.programs]
    spans: list[Span] = []
    for (rank, work, meeting, *_), start_s in zip(outline.rows, starts_s, strict=True):
        if work == _MEETS:
            instruction, group = outline.meetings[meeting]
            for peer in group:
                stop_s = start_s + meeting_s(instruction, peer, costs)
                if stop_s > start_s:
                    spans.append(Span(peer, instruction, start_s, stop_s))
        else:
            stop_s = start_s + costs.compute_s(outline.works[work])
            spans.append(Span(rank, next(todo[rank]), start_s, stop_s))
    return Timeline(tuple(spans), schedule.num_ranks)


def period_s(batch: Schedule, costs: PipelineCosts) -> float:
    """Seconds from one batch to the next where none is waited for: what twice as many batches take longer.

    Args:
        batch: One batch by itself.
        costs: Of one batch.
    """
    few = 4 * batch.num_ranks
    ends_s = [
        makespan(outline_of(unrolled(batch, n), costs.sizes * n), costs.repeated(n))
        for n in (few, 2 * few)
    ]
    return (ends_s[1] - ends_s[0]) / few


def _computes(instruction: Instruction) -> bool:
    return isinstance(instruction, (Staged, Encode))


def outline_of(schedule: Schedule, sizes: Sequence[int]) -> Outline:
    """The outline of a schedule that obeys the laws and ends.

    Args:
        schedule: Compute instructions, and the exchange of frozen parts if there are any.
        sizes: Samples of each microbatch; equal sizes cost the same.
    """
    numbers = _Numbers(with_collectives(schedule), sizes)
    programs, meetings = numbers.rows(), tuple(numbers.meetings)
    return Outline(
        schedule.num_ranks,
        tuple(_in_order(programs, meetings, numbers.num_sent)),
        tuple(numbers.works),
        tuple(message for _, message in numbers.messages.values()),
        meetings,
        numbers.num_sent,
        len(numbers.edges),
    )


_Sent = tuple[int, int, int]
"""The last three entries of the row that makes a message."""

_NOTHING_SENT: _Sent = (-1, -1, -1)


class _Numbers:
    """Programs as rows of numbers. What holds for all microbatches of a stage is looked up once."""

    def __init__(self, schedule: Schedule, sizes: Sequence[int]) -> None:
        self.schedule = schedule
        self.first_like = [sizes.index(size) for size in sizes]
        self.works: dict[Compute, int] = {}
        self.messages: dict[tuple[str, int, int], tuple[int, Message]] = {}
        self.edges: dict[tuple[int, int], int] = {}
        self.meetings: dict[Meeting, int] = {}
        self.flows: dict[Flow, list[_Sent]] = {}
        self.stages: dict[tuple[type[Staged], int], list[Row]] = {}

    @property
    def num_sent(self) -> int:
        return len(self.flows) * self.schedule.num_microbatches

    def rows(self) -> list[list[Row]]:
        """By rank: its program."""
        return [
            [self.row(rank, instruction) for instruction in program]
            for rank, program in enumerate(self.schedule.programs)
        ]

    def row(self, rank: int, instruction: Instruction) -> Row:
        if isinstance(instruction, Staged):
            key = type(instruction), instruction.stage
            if key not in self.stages:
                self.stages[key] = self.rows_of_stage(*key)
            return self.stages[key][instruction.microbatch]
        if isinstance(instruction, Encode):
            return rank, _number(self.works, instruction), -1, *_NOTHING_SENT
        assert isinstance(instruction, (ExchangeFrozen, ReduceGradients)), "already lowered"
        meeting = instruction, group_of(self.schedule, rank, instruction)
        return rank, _MEETS, _number(self.meetings, meeting), *_NOTHING_SENT

    def rows_of_stage(self, work: type[Staged], stage: int) -> list[Row]:
        """By microbatch: this work of a stage."""
        schedule, count = self.schedule, self.schedule.num_microbatches
        nothing = [_NOTHING_SENT] * count
        read_flow, made_flow = schedule.read_by(work, stage), schedule.made_by(work, stage)
        read = self.sent(read_flow) if read_flow else nothing
        made = [*self.sent(made_flow)[made_flow.lag :], *nothing] if made_flow else nothing
        rank_of = schedule.placement.rank_of
        number = {
            like: _number(self.works, work(stage, like)) for like in dict.fromkeys(self.first_like)
        }
        works = [number[like] for like in self.first_like]
        return [(rank_of(stage, m), works[m], read[m][0], *made[m]) for m in range(count)]

    def sent(self, flow: Flow) -> list[_Sent]:
        """By microbatch of its reader: what travels, where anything has to."""
        if flow not in self.flows:
            first, ranks = self.num_sent, self.schedule.placement.stage_ranks
            period = lcm(len(ranks[flow.maker]), len(ranks[flow.reader]))
            starts = self.schedule.starts or (0,) * self.schedule.num_microbatches
            known: dict[tuple[int, int, int], tuple[int, int] | None] = {}
            self.flows[flow] = [_NOTHING_SENT] * flow.lag
            for microbatch in range(flow.lag, self.schedule.num_microbatches):
                like = microbatch % period, self.first_like[microbatch], starts[microbatch]
                if like not in known:
                    known[like] = self.message_and_edge(flow, microbatch)
                sent = known[like]
                self.flows[flow].append((first + microbatch, *sent) if sent else _NOTHING_SENT)
        return self.flows[flow]

    def message_and_edge(self, flow: Flow, microbatch: int) -> tuple[int, int] | None:
        """Which message costs the same, and its edge; None if nothing has to travel."""
        message = self.schedule.message(flow, microbatch)
        if message is None or message.is_local:
            return None
        edge = _number(self.edges, (message.from_rank, message.to_rank))
        like = flow.kind, flow.reader, self.first_like[microbatch]
        index, _ = self.messages.setdefault(like, (len(self.messages), message))
        return index, edge


_Key = TypeVar("_Key")


def _number(numbers: dict[_Key, int], key: _Key) -> int:
    """The number of a key; the next one if it is new."""
    return numbers.setdefault(key, len(numbers))


def _in_order(
    programs: Sequence[Sequence[Row]], meetings: Sequence[Meeting], num_sent: int
) -> list[Row]:
    """Runs every rank as far as it gets; whoever sends what a rank waits for puts it back to work."""
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
    assert all(map(eq, position, map(len, programs))), "a schedule of the search never ends"
    return order
