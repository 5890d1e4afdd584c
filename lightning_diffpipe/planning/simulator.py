"""The simulator: how long does a schedule take, and does it end at all?

Every rank runs its program in order; every directed link carries its messages in order, one at a time,
both directions at once. An instruction starts when its rank is free and what it reads has arrived.
A message travels by itself, unless the processor that computes also has to move it (gloo).
That is all: the same rules hold for training schedules, frozen work and forward-only patch schedules.
If no rank can go on before all are done, the schedule is refused with a picture of where it stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lightning_diffpipe.errors import ScheduleError
from lightning_diffpipe.planning.execution import COMPUTE, MEET, SEND, WAIT, Execution, execution_of
from lightning_diffpipe.planning.instruction import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Encode,
    Forward,
    ForwardNoGrad,
    Instruction,
    ReduceGradients,
    Send,
    UpdateWeights,
    Wait,
)
from lightning_diffpipe.planning.lowering import lower
from lightning_diffpipe.planning.schedule import Message, Schedule
from lightning_diffpipe.planning.timeline import Span, Timeline, Transfer, draw

__all__ = ["Costs", "TickCosts", "replay", "simulate"]


PerStage = float | Sequence[float]


@dataclass(frozen=True, slots=True)
class TickCosts:
    """Costs for pictures and tests: the same for every microbatch. A number, or one for each stage.

    Attributes:
        forward: Forward of one microbatch.
        backward: Whole backward; in two parts it takes as long.
        weight_gradient: The part of `backward` that is `BackwardWeight`.
        no_grad: Forward without gradients.
        encode: One part of the frozen work, or one number for each part.
        activation: Time on the link of an activation, by the stage that reads it.
        gradient: Time on the link of a gradient, by the stage that reads it.
        feedback: Time on the link from the last stage back to the first.
        reduce: Gradient reduction at the end.
        exchange: Exchange of frozen results.
        holds_sender: See `Costs`.
    """

    forward: PerStage = 1
    backward: PerStage = 2
    weight_gradient: PerStage = 1
    no_grad: PerStage = 1
    encode: PerStage = 1
    activation: PerStage = 0
    gradient: PerStage = 0
    feedback: float = 0
    reduce: float = 0
    exchange: float = 0
    holds_sender: bool = False

    def compute_s(self, instruction: Compute) -> float:
        """See `Costs`."""
        match instruction:
            case Forward(stage, _):
                return _at(self.forward, stage)
            case ForwardNoGrad(stage, _):
                return _at(self.no_grad, stage)
            case Backward(stage, _):
                return _at(self.backward, stage)
            case BackwardInput(stage, _):
                return _at(self.backward, stage) - _at(self.weight_gradient, stage)
            case BackwardWeight(stage, _):
                return _at(self.weight_gradient, stage)
            case UpdateWeights():
                return 0.0
            case Encode(part):
                return _at(self.encode, part)

    def message_s(self, message: Message) -> float:
        """See `Costs`."""
        match message.kind:
            case "activation" | "no_grad_activation":
                return _at(self.activation, message.stage)
            case "gradient":
                return _at(self.gradient, message.stage)
            case "feedback":
                return float(self.feedback)

    def reduce_s(self, rank: int) -> float:
        """See `Costs`."""
        return float(self.reduce)

    def exchange_s(self) -> float:
        """See `Costs`."""
        return float(self.exchange)


def _at(value: PerStage, index: int) -> float:
    return float(value[index] if isinstance(value, Sequence) else value)


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
