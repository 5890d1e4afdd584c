"""The laws every schedule obeys, whichever algorithm wrote it.

A schedule that breaks one of these would train something else than one process does, or hang:

1. An instruction stands on the rank that holds its stage and takes its microbatch.
2. Every stage does the same complete work for every microbatch, once: forward before backward.
3. Of a lowered schedule: every message that must travel is sent once, received once and waited
   for; sent after it is made and awaited before it is read; and both ends of every directed edge
   handle the messages in the same order, since a link without tags delivers in order.

Freedom from deadlock needs an execution, and is proved by `simulator.simulate`.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import product, zip_longest

from lightning_diffpipe.errors import ScheduleError
from lightning_diffpipe.planning.instruction import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    ForwardNoGrad,
    Instruction,
    Program,
    Receive,
    Send,
    Staged,
    UpdateWeights,
    Wait,
)
from lightning_diffpipe.planning.schedule import Message, Schedule


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
