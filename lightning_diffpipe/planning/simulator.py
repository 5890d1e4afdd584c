"""The simulator: how long does a schedule take, and does it end at all?

Every rank runs its program in order; every directed link carries its messages in order, one at a
time, both directions at once. An instruction starts when its rank is free and what it reads has
arrived. That is all: the same rules hold for training schedules, frozen work and forward-only
patch schedules. If no rank can go on before all are done, the schedule is refused with a picture
of where it stands.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from lightning_diffpipe.errors import ScheduleError
from lightning_diffpipe.planning.grid import draw
from lightning_diffpipe.planning.instruction import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Encode,
    ExchangeFrozen,
    Forward,
    ForwardNoGrad,
    Instruction,
    Receive,
    ReduceGradients,
    Send,
    UpdateWeights,
    Wait,
)
from lightning_diffpipe.planning.lowering import lower
from lightning_diffpipe.planning.schedule import Message, Schedule
from lightning_diffpipe.planning.timeline import Span, Timeline, Transfer

PerStage = float | Sequence[float]


class Costs(Protocol):
    """How long things take, in seconds."""

    def compute_s(self, instruction: Compute) -> float:
        """Time on the rank."""

    def message_s(self, message: Message) -> float:
        """Time for which the message occupies its link; it arrives at the end of it."""

    def reduce_s(self, rank: int) -> float:
        """Time to sum this rank's gradients, from when all ranks that share them are ready."""

    def exchange_s(self) -> float:
        """Time to exchange all frozen results, from when all ranks are ready."""


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
        rank 0 | F0 F1  . B0 -- B1 --
        rank 1 |  . F0 F1 B0 -- B1 --
    """
    run = _Run(schedule if schedule.is_lowered else lower(schedule), costs or TickCosts())
    run.until_nobody_moves()
    if stuck := run.stuck():
        raise ScheduleError(_deadlock(run, stuck))
    return Timeline(tuple(run.spans), schedule.num_ranks, tuple(run.transfers))


_Key = tuple[str, int, int, int]  # kind, stage, microbatch, rank that reads


@dataclass(slots=True)
class _Run:
    """State of one simulation."""

    schedule: Schedule
    costs: Costs
    spans: list[Span] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    position: list[int] = field(init=False)
    clock: list[float] = field(init=False)
    link_free: dict[tuple[int, int], float] = field(default_factory=lambda: defaultdict(float))
    arrival: dict[_Key, float] = field(default_factory=dict)
    waiting: dict[_Key, int] = field(default_factory=dict)
    meeting: dict[tuple[int, ...], list[int]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        self.position = [0] * self.schedule.num_ranks
        self.clock = [0.0] * self.schedule.num_ranks

    def until_nobody_moves(self) -> None:
        """Runs ranks as far as they get; whoever releases a waiting rank puts it back to work."""
        ready = list(range(self.schedule.num_ranks))
        while ready:
            self._run_rank(ready.pop(), ready)

    def _run_rank(self, rank: int, ready: list[int]) -> None:
        program = self.schedule.programs[rank]
        while self.position[rank] < len(program):
            instruction = program[self.position[rank]]
            match instruction:
                case Wait(kind, stage, microbatch):
                    key = (kind, stage, microbatch, rank)
                    if key not in self.arrival:
                        self.waiting[key] = rank
                        return
                    self.clock[rank] = max(self.clock[rank], self.arrival[key])
                case Send():
                    self._send(rank, instruction, ready)
                case Receive():
                    pass
                case ExchangeFrozen():
                    everybody = tuple(range(self.schedule.num_ranks))
                    if not self._meet(everybody, rank, instruction, ready):
                        return
                    continue
                case ReduceGradients():
                    if not self._meet(self._sharers(rank), rank, instruction, ready):
                        return
                    continue
                case _:
                    self._record(rank, instruction, self.costs.compute_s(instruction))
            self.position[rank] += 1

    def _record(self, rank: int, instruction: Instruction, duration_s: float) -> None:
        start = self.clock[rank]
        self.clock[rank] = start + duration_s
        self.spans.append(Span(rank, instruction, start, self.clock[rank]))

    def _send(self, rank: int, send: Send, ready: list[int]) -> None:
        message = Message(send.kind, send.stage, send.microbatch, rank, send.to_rank)
        edge = (rank, send.to_rank)
        start = max(self.link_free[edge], self.clock[rank])
        stop = start + self.costs.message_s(message)
        self.link_free[edge] = stop
        self.transfers.append(Transfer(message, start, stop))
        key = (send.kind, send.stage, send.microbatch, send.to_rank)
        self.arrival[key] = stop
        if key in self.waiting:
            ready.append(self.waiting.pop(key))

    def _meet(
        self, group: tuple[int, ...], rank: int, instruction: Instruction, ready: list[int]
    ) -> bool:
        """A collective: the last of the group to come lets all of them pass."""
        present = self.meeting[group]
        present.append(rank)
        if len(present) < len(group):
            return False
        start = max(self.clock[peer] for peer in present)
        for peer in present:
            reduces = isinstance(instruction, ReduceGradients)
            cost = self.costs.reduce_s(peer) if reduces else self.costs.exchange_s()
            self.clock[peer] = start
            if cost:
                self._record(peer, instruction, cost)
            self.position[peer] += 1
        ready += [peer for peer in present if peer != rank]
        present.clear()
        return True

    def _sharers(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold a copy of one of this rank's stages."""
        place = self.schedule.placement
        return tuple(sorted({r for s in place.stages_of(rank) for r in place.stage_ranks[s]}))

    def stuck(self) -> dict[int, Instruction]:
        """The ranks that have not ended, with the instruction at which each stands."""
        programs = self.schedule.programs
        return {
            rank: programs[rank][at]
            for rank, at in enumerate(self.position)
            if at < len(programs[rank])
        }


def _deadlock(run: _Run, stuck: dict[int, Instruction]) -> str:
    """Names the most telling of the ranks that wait: one whose message is never sent, if any."""
    all_sent = {
        (i.kind, i.stage, i.microbatch, i.to_rank)
        for program in run.schedule.programs
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
            reasons[rank] = (
                not never,
                f"rank {rank} waits for {what}, which rank {i.from_rank} {why}",
            )
        else:
            reasons[rank] = (True, f"rank {rank} waits at {i} for ranks that never come")
    rank = min(reasons, key=lambda r: (reasons[r][0], r))
    notes = dict.fromkeys(stuck, "  ?")
    notes[rank] += "          <-- waits here"
    picture = draw(run.spans, run.schedule.num_ranks, notes=notes)
    return f"{reasons[rank][1]}\n\n" + "\n".join(f"    {line}" for line in picture.splitlines())
