"""A schedule: which rank holds which stage, the program of every rank, and what else is known of it by its name.

There are two questions. A `Placement` says *where* a stage runs: on one rank, on several (replicas, which take
the microbatches in turn), or several stages on one rank (interleaved, or two backbones). The programs say *in which
order* each rank works. What flows between instructions follows from both, and is derived here once, so that
lowering, simulation and the laws cannot disagree about it.

What the rest of the project knows of a schedule, everything but its name, comes from its `ScheduleSpec`.

Ranks that hold several stages keep what later ones of theirs read. So a tensor travels only where no rank on
its way has it (`route`): with V placement a U-Net's skip not at all. What comes back, a gradient, goes the same
way back.

    stages on 2 ranks, V      0      1      2      3        made by stage 0, read by stage 3
    rank                      0      1      1      0        passed from stage 0 to 3, on rank 0

Round robin over replicas is PipeDream's 1F1B-RR, Narayanan et al. (2019): a microbatch is never
split inside a stage, so that results stay exact for modules that mix samples.

**Laws** that every schedule obeys, whichever algorithm wrote it. One that breaks any of them would train something
else than one process does, or hang:

1. An instruction stands on the rank that holds its stage and takes its microbatch.
2. Every stage does the same complete work for every microbatch, once: forward before backward.
3. Of a lowered schedule: every message that must travel is sent once, received once and waited
   for; sent after it is made and awaited before it is read; and both ends of every directed edge
   handle the messages in the same order, since a link without tags delivers in order.

Freedom from deadlock needs an execution, and is proved by `simulator.simulate`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache, partial
from itertools import product, zip_longest
from typing import Any, NamedTuple

from lightning_diffpipe.errors import ScheduleError
from lightning_diffpipe.planning.instruction import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    ForwardNoGrad,
    Instruction,
    Kind,
    Program,
    Receive,
    Send,
    Staged,
    UpdateWeights,
    Wait,
    format_program,
)


@dataclass(frozen=True, slots=True)
class Message:
    """Tensors that travel to the rank and the stage that read them; nowhere where that is the rank they are on."""

    kind: Kind
    stage: int
    microbatch: int
    from_rank: int
    to_rank: int

    @classmethod
    def of(cls, instruction: Send | Receive | Wait, rank: int) -> Message:
        """Returns the message that a rank sends, expects or waits for."""
        i = instruction
        ends = (rank, i.to_rank) if isinstance(i, Send) else (i.from_rank, rank)
        return cls(i.kind, i.stage, i.microbatch, *ends)

    def __str__(self) -> str:
        return f"the {self.kind} of microbatch {self.microbatch} for stage {self.stage}"

    @property
    def is_local(self) -> bool:
        """Whether writer and reader are the same rank."""
        return self.from_rank == self.to_rank

    def send(self) -> Send:
        """Returns the instruction that sends it."""
        return Send(self.kind, self.stage, self.microbatch, self.to_rank)

    def receive(self) -> Receive:
        """Returns the instruction that posts its receive."""
        return Receive(self.kind, self.stage, self.microbatch, self.from_rank)

    def wait(self) -> Wait:
        """Returns the instruction that waits for it."""
        return Wait(self.kind, self.stage, self.microbatch, self.from_rank)


_ONWARD = (Forward, ForwardNoGrad)
_BACK = (Backward, BackwardInput)


class Flow(NamedTuple):
    """Tensors that travel from the stage that makes them to another one, for every microbatch."""

    kind: Kind
    maker: int
    reader: int


@dataclass(frozen=True)
class Placement:
    """Assignment of stages to ranks.

    Attributes:
        stage_ranks: For every stage its replicas. Microbatch `m` runs on replica `m mod len(replicas)`.
        first_stages: The stages at which a backbone begins; `(0,)` unless there are several backbones.
        no_grad: Stages to which no gradient comes back: they forward only.

    Raises:
        ScheduleError: A stage has no rank, or a rank no stage, or ranks are not numbered from 0.
    """

    stage_ranks: tuple[tuple[int, ...], ...]
    first_stages: tuple[int, ...] = (0,)
    no_grad: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        for stage, ranks in enumerate(self.stage_ranks):
            if not ranks or len(set(ranks)) != len(ranks):
                raise ScheduleError(
                    f"stage {stage} needs distinct ranks, at least one; got {ranks}"
                )
        used = {rank for ranks in self.stage_ranks for rank in ranks}
        if not used or used != set(range(len(used))):
            raise ScheduleError(f"ranks must be numbered from 0 without gaps; got {sorted(used)}")
        if self.first_stages[:1] != (0,) or self.first_stages[-1] >= self.num_stages:
            raise ScheduleError(
                f"backbones must begin at stage 0; they begin at {self.first_stages}"
            )

    @classmethod
    def of_replicas(cls, num_replicas: Sequence[int]) -> Placement:
        """Takes consecutive ranks in stage order: `(1, 3)` puts stage 1 on ranks 1 to 3."""
        starts = [sum(num_replicas[:stage]) for stage in range(len(num_replicas))]
        return cls(tuple(tuple(range(a, a + r)) for a, r in zip(starts, num_replicas, strict=True)))

    @classmethod
    def round_robin(cls, num_stages: int, num_ranks: int) -> Placement:
        """Deals stages out like cards: stage `s` runs on rank `s mod num_ranks`."""
        return cls(tuple((stage % num_ranks,) for stage in range(num_stages)))

    @property
    def num_stages(self) -> int:
        """Stages of all backbones together."""
        return len(self.stage_ranks)

    @cached_property
    def num_ranks(self) -> int:
        """Ranks of one pipeline."""
        return 1 + max(rank for ranks in self.stage_ranks for rank in ranks)

    def rank_of(self, stage: int, microbatch: int) -> int:
        """Returns the rank that runs this microbatch of this stage."""
        ranks = self.stage_ranks[stage]
        return ranks[microbatch % len(ranks)]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Returns the stages a rank holds, in ascending order."""
        return tuple(s for s, ranks in enumerate(self.stage_ranks) if rank in ranks)

    def only_stage_of(self, rank: int) -> int | None:
        """Returns the stage of a rank that holds only one, else None."""
        stages = self.stages_of(rank)
        return stages[0] if len(stages) == 1 else None

    def microbatches_of(self, stage: int, rank: int, num_microbatches: int) -> range:
        """Returns the microbatches of a stage that a rank runs, in ascending order."""
        ranks = self.stage_ranks[stage]
        return range(ranks.index(rank), num_microbatches, len(ranks))

    def previous_stage(self, stage: int) -> int | None:
        """Returns the stage before, within the same backbone."""
        return None if stage in self.first_stages else stage - 1

    def next_stage(self, stage: int) -> int | None:
        """Returns the stage after, within the same backbone."""
        following = stage + 1
        return None if following == self.num_stages or following in self.first_stages else following

    def sends_gradient(self, stage: int) -> bool:
        """Returns whether the stage before waits for its gradient; else splitting its backward gains nothing."""
        before = self.previous_stage(stage)
        return before is not None and before not in self.no_grad

    def backbone_of(self, stage: int) -> range:
        """Returns all stages of the backbone this stage belongs to."""
        start = max(first for first in self.first_stages if first <= stage)
        stops = (*self.first_stages, self.num_stages)
        return range(start, min(stop for stop in stops if stop > stage))


@dataclass(frozen=True, slots=True)
class Route:
    """The way of one tensor: stages to which that before sends it, and pairs on one rank that have it together."""

    sent_to: tuple[int, ...]
    local: tuple[tuple[int, int], ...]

    @property
    def readers(self) -> frozenset[int]:
        """All stages that get it."""
        return frozenset({*self.sent_to, *(stage for _, stage in self.local)})


NOWHERE = Route((), ())


@lru_cache(maxsize=4096)
def route(
    maker: int,
    readers: tuple[int, ...],
    stage_ranks: tuple[tuple[int, ...], ...] | None,
    through: frozenset[int] | None = None,
    known: Route = NOWHERE,
) -> Route:
    """Finds the way on which a tensor is sent least often.

    Args:
        maker: The stage that makes it.
        readers: Later stages that read it, in ascending order.
        stage_ranks: Ranks that hold each stage; None if no two stages have the same.
        through: Stages it may pass; None for all. Where there is no way through them, it passes others, too.
        known: Transfers that are made in any case; a part of what is returned.

    Example:
        >>> route(0, (1, 3), ((0,), (1,), (1,), (0,)))
        Route(sent_to=(1,), local=((0, 3),))
    """
    if stage_ranks is None:
        last = max((maker, *readers, *known.sent_to))
        return Route(tuple(range(maker + 1, last + 1)), ())
    sent, local, have = set(known.sent_to), set(known.local), {maker, *known.readers}
    for reader in readers:
        if reader in have:
            continue
        way = _shortest(reader, have, stage_ranks, through)
        for before, stage in way or _shortest(reader, have, stage_ranks, None):
            have.add(stage)
            if stage_ranks[before] == stage_ranks[stage]:
                local.add((before, stage))
            else:
                sent.add(stage)
    return Route(tuple(sorted(sent)), tuple(sorted(local)))


def _shortest(
    reader: int,
    have: Container[int],
    stage_ranks: Sequence[tuple[int, ...]],
    through: Iterable[int] | None,
) -> list[tuple[int, int]]:
    """Returns steps to a reader from some stage that has the tensor; none if there is no way."""
    allowed = range(reader) if through is None else through
    shortest: dict[int, tuple[int, list[tuple[int, int]]]] = {reader: (0, [])}
    for stage in range(reader, -1, -1):  # ways lead from earlier stages to later ones only
        if stage not in shortest:
            continue
        cost, way = shortest[stage]
        for before in range(stage):
            local = stage_ranks[before] == stage_ranks[stage]
            if not local and before != stage - 1:
                continue
            if before not in allowed and before not in have:
                continue
            if before not in shortest or cost + (not local) < shortest[before][0]:
                shortest[before] = cost + (not local), [(before, stage), *way]
    ways = [(cost, -stage, way) for stage, (cost, way) in shortest.items() if stage in have]
    return min(ways)[2] if ways else []


@dataclass(frozen=True, slots=True)
class Schedule:
    """The programs of all ranks of one pipeline.

    `starts` are by microbatch the first stage it runs, where some leave passes out; empty: stage 0.
    """

    placement: Placement
    num_microbatches: int
    programs: tuple[Program, ...]
    starts: tuple[int, ...] = ()

    def only(self, keep: Callable[[Instruction], bool]) -> Schedule:
        """Returns the same with some of its instructions, in the same order."""
        return replace(self, programs=tuple(tuple(filter(keep, p)) for p in self.programs))

    def starting_at(self, starts: Sequence[int]) -> Schedule:
        """Returns the same where microbatches leave out the stages before these."""
        if not any(starts):
            return self
        runs = lambda i: not isinstance(i, Staged) or i.stage >= starts[i.microbatch]
        return replace(self.only(runs), starts=tuple(starts))

    def runs(self, stage: int, microbatch: int) -> bool:
        """Returns whether a microbatch does not leave a stage out."""
        return not self.starts or stage >= self.starts[microbatch]

    def of_first_microbatches(self, count: int) -> Schedule:
        """Returns the same for fewer microbatches, as the last batch of an epoch may have."""
        first = self.only(lambda i: getattr(i, "microbatch", 0) < count)
        return replace(first, num_microbatches=count, starts=self.starts[:count])

    def __post_init__(self) -> None:
        if self.num_microbatches < 1:
            raise ScheduleError(f"need at least one microbatch; got {self.num_microbatches}")
        if len(self.programs) != self.num_ranks:
            raise ScheduleError(f"{len(self.programs)} programs for {self.num_ranks} ranks")

    @property
    def num_ranks(self) -> int:
        """Ranks of this pipeline."""
        return self.placement.num_ranks

    @property
    def num_stages(self) -> int:
        """Stages of this pipeline."""
        return self.placement.num_stages

    @property
    def is_lowered(self) -> bool:
        """Whether messages are sent; where none have to be, lowering twice does no harm."""
        return any(isinstance(i, Send) for program in self.programs for i in program)

    def read_by(self, work: type[Instruction], stage: int) -> Flow | None:
        """Returns what instructions of this type read from another stage, if anything."""
        before, after = self.placement.previous_stage(stage), self.placement.next_stage(stage)
        if work in _ONWARD and before is not None:
            return Flow("activation", before, stage)
        if work in _BACK and after is not None and after not in self.placement.no_grad:
            return Flow("gradient", after, stage)
        return None

    def made_by(self, work: type[Instruction], stage: int) -> Flow | None:
        """Returns what instructions of this type make for another stage, if anything."""
        before, after = self.placement.previous_stage(stage), self.placement.next_stage(stage)
        if work in _ONWARD and after is not None:
            return Flow("activation", stage, after)
        if work in _BACK and before is not None and self.placement.sends_gradient(stage):
            return Flow("gradient", stage, before)
        return None

    def inputs_of(self, program: Program) -> Iterator[Message | None]:
        """Yields what each instruction reads from another stage, if anything."""
        return self._messages(program, self.read_by)

    def outputs_of(self, program: Program) -> Iterator[Message | None]:
        """Yields what each instruction makes for another stage, if anything."""
        return self._messages(program, self.made_by)

    def _messages(
        self, program: Program, flow_of: Callable[[type[Instruction], int], Flow | None]
    ) -> Iterator[Message | None]:
        cached_flow: Callable[[Any, int], Flow | None] = cache(flow_of)
        for i in program:
            flow = cached_flow(type(i), i.stage) if isinstance(i, Staged) else None
            if flow is None or not isinstance(i, Staged):
                yield None
            else:
                yield self.message(flow, i.microbatch)

    def message(self, flow: Flow, microbatch: int) -> Message | None:
        """Returns what the reader needs for one microbatch; None if nothing was, or will be, made for it."""
        rank_of = self.placement.rank_of
        if not (self.runs(flow.maker, microbatch) and self.runs(flow.reader, microbatch)):
            return None
        maker, reader = rank_of(flow.maker, microbatch), rank_of(flow.reader, microbatch)
        return Message(flow.kind, flow.reader, microbatch, maker, reader)

    def staged(self) -> Iterator[tuple[int, Staged]]:
        """Yields all compute instructions of stages with their rank, rank by rank."""
        for rank, program in enumerate(self.programs):
            for instruction in program:
                if isinstance(instruction, Staged):
                    yield rank, instruction

    def __str__(self) -> str:
        width = len(str(self.num_ranks - 1))
        lines = []
        for rank, program in enumerate(self.programs):
            text = format_program(program, self.placement.only_stage_of(rank))
            lines.append(f"rank {rank:>{width}} | {text}")
        return "\n".join(lines)


Ticks = tuple[tuple[float, float], ...]
"""Durations of a forward and a backward of each stage; only proportions matter. Empty if unknown."""


@dataclass(frozen=True, slots=True)
class ScheduleSpec:
    """One schedule; calling it with stages, or a placement, and a number of microbatches makes a `Schedule`.

    Attributes:
        program: The program of one rank alone, given where stages run, how many microbatches there are, and
            the rank; if `timed` also `ticks=`, the times of the stages.
        place: Placement of a number of stages on a number of ranks; None if every stage has ranks of its own, in
            order, and may have several.
        stages_per_rank: Stages of a rank that the search tries.
        most_per_rank: The most there may be.
        nested: A rank has stages equally far from either end of the chain.
        opposite: It is for several backbones, each with a stage on every rank.
        timed: The order of work depends on how long stages take.
        whole_groups: Microbatches move in groups, one for each rank: their number is a multiple of the ranks.
        keeps_all: A rank keeps the activations of all its microbatches.
        splits_backward: Backwards run in two parts where a gradient is sent on, which not every module allows.
        auto: `schedule="auto"` tries it: it does the same work as others in another order.
        advice: Advice to users whose plan could be faster with it; empty for none.
        staleness: Without a flush: how many batches' updates the weights lack with which a stage
            runs a batch, once the pipeline is full, given the placement and the stage. None: batches end before
            others begin, and weights have one version.
        accumulates: Without a flush: several microbatches make a batch; else each is one.
    """

    name: str
    program: Callable[..., Program]
    place: Callable[[int, int], Placement] | None = None
    stages_per_rank: tuple[int, ...] = (1,)
    most_per_rank: float = math.inf
    nested: bool = False
    opposite: bool = False
    timed: bool = False
    whole_groups: bool = False
    keeps_all: bool = False
    splits_backward: bool = False
    auto: bool = False
    advice: str = ""
    staleness: Callable[[Placement, int], int] | None = None
    accumulates: bool = False

    @property
    def flushes(self) -> bool:
        """Whether a batch ends before the next begins."""
        return self.staleness is None

    def weight_versions(self, placement: Placement, stage: int) -> int:
        """Returns versions of its weights that each rank of a stage stores, the latest included."""
        return 1 if self.staleness is None else 1 + self.staleness(placement, stage)

    def __call__(self, stages: int | Placement, num_microbatches: int) -> Schedule:
        """Makes the programs of all ranks, of stages with one rank each or placed ones.

        Raises:
            ScheduleError: No stage; or `num_microbatches` is no multiple of the ranks, and has to be.
        """
        if isinstance(stages, int) and stages < 1:
            raise ScheduleError(f"a pipeline needs at least one stage; got num_stages={stages}")
        placement = Placement.of_replicas([1] * stages) if isinstance(stages, int) else stages
        num_ranks = placement.num_ranks
        if self.whole_groups and num_microbatches % num_ranks:
            raise ScheduleError(
                f"{self.name} stages on {num_ranks} ranks need a multiple of {num_ranks} microbatches; "
                f"got {num_microbatches}"
            )
        ranks = range(num_ranks)
        programs = tuple(self.program(placement, num_microbatches, rank) for rank in ranks)
        return Schedule(placement, num_microbatches, programs)

    def in_time(self, ticks: Ticks) -> ScheduleSpec:
        """Returns the same, in the order for stages that take so long, if that makes a difference."""
        return replace(self, program=partial(self.program, ticks=ticks)) if self.timed else self

    def takes(self, num_stages: int, num_microbatches: int) -> bool:
        """Returns whether a batch may have so many microbatches: without a flush, it depends on weight versions.

        Where several make a batch, the weights of the batch before last have to be there when one begins.
        """
        if self.flushes:
            return True
        return num_microbatches >= num_stages - 1 if self.accumulates else num_microbatches == 1

    def can_place(self, num_stages: int, num_ranks: int, num_microbatches: int) -> bool:
        """Returns whether it can give every rank of a pipeline several stages, so many in all."""
        per_rank, rest = divmod(num_stages, num_ranks)
        grouped = not (self.whole_groups and num_microbatches % num_ranks)
        return num_ranks > 1 and not rest and 1 < per_rank <= self.most_per_rank and grouped


def check_laws(schedule: Schedule) -> None:
    """Checks every law that does not need a clock; `simulate` finds deadlocks.

    Raises:
        ScheduleError: Names the law, the rank and the instruction.
    """
    _check_places(schedule)
    _check_work(schedule)
    if schedule.is_lowered:
        for rank, program in enumerate(schedule.programs):
            _check_messages_of(schedule, rank, program)
        _check_edges(schedule)


def _check_places(schedule: Schedule) -> None:
    """Law 1: the rank of an instruction holds its stage and takes its microbatch."""
    for rank, instruction in schedule.staged():
        stage, microbatch = instruction.stage, instruction.microbatch
        if stage >= schedule.num_stages or microbatch >= schedule.num_microbatches:
            raise ScheduleError(
                f"rank {rank} runs {instruction}, but there are {schedule.num_stages} stages "
                f"and {schedule.num_microbatches} microbatches"
            )
        if not schedule.runs(stage, microbatch):
            raise ScheduleError(f"rank {rank} runs {instruction}, which its microbatch leaves out")
        if (owner := schedule.placement.rank_of(stage, microbatch)) != rank:
            raise ScheduleError(f"rank {rank} runs {instruction}, which belongs to rank {owner}")


_TRAINED: Sequence[list[type[Staged]]] = (
    [Forward, Backward],
    [Forward, BackwardInput, BackwardWeight],
)


def _check_work(schedule: Schedule) -> None:
    """Law 2: one complete set of instructions for each stage and microbatch, in order."""
    done: dict[tuple[int, int], list[type[Staged]]] = defaultdict(list)
    for _, instruction in schedule.staged():
        done[instruction.stage, instruction.microbatch].append(type(instruction))
    trains = any(not {Forward, ForwardNoGrad}.issuperset(kinds) for kinds in done.values())
    for stage, microbatch in product(range(schedule.num_stages), range(schedule.num_microbatches)):
        if not schedule.runs(stage, microbatch):
            continue
        kinds = done[stage, microbatch]
        if kinds[-1:] == [UpdateWeights]:  # after the last microbatch of a batch only
            kinds = kinds[:-1]
        complete: Sequence[list[type[Staged]]] = _TRAINED if trains else ([Forward],)
        if stage in schedule.placement.no_grad:
            complete = ([ForwardNoGrad],)
        if kinds not in complete:
            orders = " or ".join(", ".join(kind.__name__ for kind in each) for each in complete)
            raise ScheduleError(
                f"stage {stage} does {', '.join(kind.__name__ for kind in kinds) or 'nothing'} for microbatch "
                f"{microbatch}; each needs {orders}, once and in this order"
            )


def _check_messages_of(schedule: Schedule, rank: int, program: Program) -> None:
    """Law 3 on one rank: made, then sent; posted, then awaited, then read."""
    seen: set[Instruction] = set()
    for instruction, message in zip(program, schedule.inputs_of(program), strict=True):
        if instruction in seen and isinstance(instruction, (Send, Receive, Wait)):
            raise ScheduleError(f"rank {rank} has {instruction} twice")
        if isinstance(instruction, Wait) and Message.of(instruction, rank).receive() not in seen:
            raise ScheduleError(f"rank {rank} waits with {instruction}, but posted no receive")
        if message is not None and not message.is_local and message.wait() not in seen:
            raise ScheduleError(
                f"rank {rank} runs {instruction} without {message.wait()} before it"
            )
        seen.add(instruction)

    ready: set[Instruction] = set()
    for instruction, message in zip(program, schedule.outputs_of(program), strict=True):
        if isinstance(instruction, Send) and instruction not in ready:
            raise ScheduleError(f"rank {rank} sends {instruction} before it is made")
        if message is not None and not message.is_local:
            ready.add(message.send())
            if message.send() not in seen:
                raise ScheduleError(f"rank {rank} makes {message.send()}, but never sends it")


def _check_edges(schedule: Schedule) -> None:
    """Law 3 between ranks: both ends of a directed edge see the same messages in the same order."""
    sent: dict[tuple[int, int], list[Message]] = defaultdict(list)
    received: dict[tuple[int, int], list[Message]] = defaultdict(list)
    for rank, program in enumerate(schedule.programs):
        for i in program:
            if isinstance(i, Send | Receive):
                message = Message.of(i, rank)
                ends = sent if isinstance(i, Send) else received
                ends[message.from_rank, message.to_rank].append(message)
    for edge in sorted(sent.keys() | received.keys()):
        for position, (out, into) in enumerate(zip_longest(sent[edge], received[edge])):
            if out != into:
                raise ScheduleError(
                    f"message {position} from rank {edge[0]} to rank {edge[1]}: "
                    f"{out or 'nothing'} is sent, but {into or 'nothing'} is received"
                )


def messages_of_edge(schedule: Schedule) -> dict[tuple[int, int], list[Message]]:
    """Maps every directed edge `(from_rank, to_rank)` to its messages in the order of making."""
    edges: dict[tuple[int, int], list[Message]] = defaultdict(list)
    for program in schedule.programs:
        for message in schedule.outputs_of(program):
            if message is not None and not message.is_local:
                edges[message.from_rank, message.to_rank].append(message)
    return dict(edges)
