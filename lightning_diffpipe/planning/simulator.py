"""The simulator: how long does a schedule take, and does it end at all?

Every rank runs its program in order; every directed link carries its messages in order, one at a time,
both directions at once. An instruction starts when its rank is free and what it reads has arrived.
A message travels by itself, unless the processor that computes also has to move it (gloo).
That is all: the same rules hold for training schedules, frozen work and forward-only patch schedules.
If no rank can go on before all are done, the schedule is refused with a picture of where it stands.
"""

from __future__ import annotations

from typing import Protocol

from lightning_diffpipe.errors import ScheduleError
from lightning_diffpipe.planning.execution import COMPUTE, MEET, SEND, WAIT, Execution, execution_of
from lightning_diffpipe.planning.grid import draw
from lightning_diffpipe.planning.instruction import (
    Compute,
    Instruction,
    ReduceGradients,
    Send,
    Wait,
)
from lightning_diffpipe.planning.lowering import lower
from lightning_diffpipe.planning.schedule import Message, Schedule
from lightning_diffpipe.planning.ticks import TickCosts
from lightning_diffpipe.planning.timeline import Span, Timeline, Transfer

__all__ = ["Costs", "TickCosts", "replay", "simulate"]


class Costs(Protocol):
    """How long things take, in seconds."""

    def compute_s(self, instruction: Compute) -> float:
        """Time on the rank."""

    @property
    def holds_sender(self) -> bool:
        """Whether the rank that sends can do nothing else while its message is on the link."""

    def message_s(self, message: Message) -> float:
        """Time for which the message occupies its link; it arrives at the end of it."""

    def reduce_s(self, rank: int) -> float:
        """Time to sum this rank's gradients, from when all ranks that share them are ready."""

    def exchange_s(self) -> float:
        """Time to exchange all frozen results, from when all ranks are ready."""


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Runs a schedule on paper.

    Args:
        schedule: A schedule, lowered or not; communication is added if there is none.
        costs: How long things take; forward 1, backward 2 and free links if None.

    Raises:
        ScheduleError: Deadlock. Names the instruction that waits, and shows all ranks.

    Example:
        >>> from lightning_diffpipe.planning.schedules.gpipe import gpipe
        >>> print(simulate(gpipe(2, 2)))
        rank 0 | F0 F1  .  .  . B0 -- B1 --
        rank 1 |  . F0 F1 B0 -- B1 --  .  .
    """
    lowered = schedule if schedule.is_lowered else lower(schedule)
    execution = execution_of(lowered)
    timeline = replay(execution, costs or TickCosts())
    if execution.stuck:
        raise ScheduleError(_deadlock(lowered, execution.stuck, timeline))
    return timeline


def replay(execution: Execution, costs: Costs) -> Timeline:
    """The timeline of an order that has been found, for given costs."""
    clock = [0.0] * execution.num_ranks
    link_free = [0.0] * (1 + max(execution.edge_of, default=0))
    arrival = [0.0] * len(execution.messages)
    spans: list[Span] = []
    transfers: list[Transfer] = []
    for what, rank, index in execution.steps:
        start = clock[rank]
        if what == COMPUTE:
            instruction = execution.works[index]
            clock[rank] = start + costs.compute_s(instruction)
            spans.append(Span(rank, instruction, start, clock[rank]))
        elif what == WAIT:
            clock[rank] = max(start, arrival[index])
        elif what == SEND:
            message, edge = execution.messages[index], execution.edge_of[index]
            start = max(start, link_free[edge])
            link_free[edge] = arrival[index] = start + costs.message_s(message)
            if costs.holds_sender:
                clock[rank] = arrival[index]
            transfers.append(Transfer(message, start, arrival[index]))
        elif what == MEET:
            meeting, group = execution.meetings[index]
            start = max(clock[peer] for peer in group)
            for peer in group:
                clock[peer] = start + meeting_s(meeting, peer, costs)
                if clock[peer] > start:
                    spans.append(Span(peer, meeting, start, clock[peer]))
    return Timeline(tuple(spans), execution.num_ranks, tuple(transfers))


def meeting_s(meeting: Instruction, rank: int, costs: Costs) -> float:
    """What a collective takes on one of its ranks, from when all of them are there."""
    return costs.reduce_s(rank) if isinstance(meeting, ReduceGradients) else costs.exchange_s()


def _deadlock(lowered: Schedule, stuck: dict[int, Instruction], timeline: Timeline) -> str:
    """Names the most telling of the ranks that wait: one whose message is never sent, if any."""
    all_sent = {
        (i.kind, i.stage, i.microbatch, i.to_rank)
        for program in lowered.programs
        for i in program
        if isinstance(i, Send)
    }
    reasons = {}
    for rank, i in stuck.items():
        if isinstance(i, Wait):
            what = (
                f"the {i.kind.replace('_', ' ')} of microbatch {i.microbatch} for stage {i.stage}"
            )
            never = (i.kind, i.stage, i.microbatch, rank) not in all_sent
            why = "never sends" if never else "cannot send before: each waits for the other"
            text = f"rank {rank} waits for {what}, which rank {i.from_rank} {why}"
            reasons[rank] = (not never, text)
        else:
            reasons[rank] = (True, f"rank {rank} waits at {i} for ranks that never come")
    rank = min(reasons, key=lambda r: (reasons[r][0], r))
    notes = dict.fromkeys(stuck, "  ?")
    notes[rank] += "          <-- waits here"
    picture = draw(timeline.spans, lowered.num_ranks, notes=notes)
    return f"{reasons[rank][1]}\n\n" + "\n".join(f"    {line}" for line in picture.splitlines())
