"""In which order the instructions of all ranks can run, whatever they cost.

Which instruction waits for which does not depend on how long they take. So an order in which everything
can run is found without a clock; if there is none, the schedule hangs. Times are then one pass over
that order. The search, which needs nothing but the end of it, has a shorter way: `makespan`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from lightning_diffpipe.planning.instruction import (
    Compute,
    ExchangeFrozen,
    Instruction,
    Program,
    Receive,
    ReduceGradients,
    Send,
    ShareResults,
    Wait,
)
from lightning_diffpipe.planning.schedule import Message, Schedule

COMPUTE, WAIT, SEND, MEET = range(4)

Step = tuple[int, int, int]
"""(what, rank, index): the index is into `works`, `messages`, `messages` or `meetings`."""


@dataclass(frozen=True, slots=True)
class Execution:
    """An order in which all instructions of a schedule can run.

    Attributes:
        num_ranks: Ranks of the pipeline.
        steps: What happens, in order.
        works: Every compute instruction that a step refers to.
        messages: Every message.
        edge_of: For every message the number of its directed edge.
        meetings: Every collective: the instruction and the ranks that meet.
        stuck: Ranks that never end, with the instruction each stands at.
    """

    num_ranks: int
    steps: tuple[Step, ...]
    works: tuple[Compute, ...]
    messages: tuple[Message, ...]
    edge_of: tuple[int, ...]
    meetings: tuple[tuple[Instruction, tuple[int, ...]], ...]
    stuck: dict[int, Instruction] = field(default_factory=dict)


def execution_of(lowered: Schedule) -> Execution:
    """Finds an order, as far as there is one; `Execution.stuck` tells who could not go on."""
    run = _Run(lowered)
    run.until_nobody_moves()
    edges = {edge: index for index, edge in enumerate({(m.from_rank, m.to_rank) for m in run.sent})}
    return Execution(
        lowered.num_ranks,
        tuple(run.steps),
        tuple(run.works),
        tuple(run.sent),
        tuple(edges[m.from_rank, m.to_rank] for m in run.sent),
        tuple(run.meetings),
        run.stuck(),
    )


def group_of(schedule: Schedule, rank: int, instruction: Instruction) -> tuple[int, ...]:
    """Who meets at a collective: all ranks, or those that hold a copy of one of this rank's stages."""
    if isinstance(instruction, ExchangeFrozen):
        return tuple(range(schedule.num_ranks))
    place = schedule.placement
    return tuple(sorted({r for s in place.stages_of(rank) for r in place.stage_ranks[s]}))


_Key = tuple[str, int, int, int]  # kind, stage, microbatch, rank that reads


class _Run:
    """Runs every rank as far as it gets; whoever releases a waiting rank puts it back to work."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.programs: tuple[Program, ...] = schedule.programs
        self.position = [0] * schedule.num_ranks
        self.steps: list[Step] = []
        self.works: list[Compute] = []
        self.sent: list[Message] = []
        self.sent_as: dict[_Key, int] = {}
        self.waiting: dict[_Key, int] = {}
        self.meetings: list[tuple[Instruction, tuple[int, ...]]] = []
        self.present: dict[tuple[int, ...], list[int]] = defaultdict(list)
        self.ready = list(range(schedule.num_ranks))

    def until_nobody_moves(self) -> None:
        while self.ready:
            rank = self.ready.pop()
            while self.position[rank] < len(self.programs[rank]):
                if not self.advance(rank, self.programs[rank][self.position[rank]]):
                    break

    def advance(self, rank: int, instruction: Instruction) -> bool:
        """Runs one instruction; False if the rank has to wait, or has been moved on already."""
        match instruction:
            case Wait(kind, stage, microbatch):
                key = (kind, stage, microbatch, rank)
                if key not in self.sent_as:
                    self.waiting[key] = rank
                    return False
                self.steps.append((WAIT, rank, self.sent_as[key]))
            case Send(kind, stage, microbatch, to_rank):
                key = (kind, stage, microbatch, to_rank)
                self.sent_as[key] = len(self.sent)
                self.steps.append((SEND, rank, len(self.sent)))
                self.sent.append(Message(kind, stage, microbatch, rank, to_rank))
                if key in self.waiting:
                    self.ready.append(self.waiting.pop(key))
            case Receive() | ShareResults():
                pass
            case ExchangeFrozen() | ReduceGradients():
                return self.meet(rank, instruction)
            case _:
                self.steps.append((COMPUTE, rank, len(self.works)))
                self.works.append(instruction)
        self.position[rank] += 1
        return True

    def meet(self, rank: int, instruction: Instruction) -> bool:
        """A collective: the last of the group to come lets all of them pass."""
        group = group_of(self.schedule, rank, instruction)
        present = self.present[group]
        present.append(rank)
        if len(present) == len(group):
            self.steps.append((MEET, rank, len(self.meetings)))
            self.meetings.append((instruction, group))
            for peer in group:
                self.position[peer] += 1
            self.ready += group
            present.clear()
        return False

    def stuck(self) -> dict[int, Instruction]:
        """The ranks that have not ended, with the instruction at which each stands."""
        ends = (len(program) for program in self.programs)
        return {
            rank: self.programs[rank][at]
            for rank, (at, end) in enumerate(zip(self.position, ends, strict=True))
            if at < end
        }
