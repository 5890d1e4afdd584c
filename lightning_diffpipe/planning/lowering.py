"""Lowering: adds the communication to a schedule that says only what is computed where.

Each rank keeps its order of work. What is added:

* a `Send` right after the instruction that makes a message; sends never block;
* a `Wait` right before the instruction that reads one;
* a `Receive` early: on every directed edge the next message is always already posted while the current one is
  worked on. Receives are posted in the order of the sends, since links deliver in order;
* `ReduceGradients` after the last instruction of a stage; frozen work that is left over comes after it.

On NCCL a receive runs on the device until its message is there, and a send until the message is taken. A host that
waits for its device (for memory to be given back, in cuDNN's benchmark) waits for all it has started, and starts
nothing meanwhile. Were receives started where a program posts them, this would hang:

    rank 0 | 0g0<1 0F0 1a0>1 ...      waits in 0F0 for the gradient of what it has yet to send
    rank 1 | 1a0<0 1a0?0 1F0 1B0      waits for the activation

So there a receive begins before its `Wait`: it needs nothing then that its own rank has yet to do. For interleaved
stages this can be too late: two ranks that have sent each other something, and compute on before they take it,
would each wait for the other to take it. There one of them begins its receive where it stands. Both places are
found by running all programs with hosts that wait for their devices before every instruction.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace

from lightning_diffpipe.errors import ScheduleError
from lightning_diffpipe.planning.filling import EncodePart
from lightning_diffpipe.planning.instruction import (
    Backward,
    BackwardInput,
    Encode,
    ExchangeFrozen,
    Forward,
    Instruction,
    Program,
    Receive,
    ReduceGradients,
    Send,
    Staged,
    UpdateWeights,
    Wait,
)
from lightning_diffpipe.planning.schedule import Message, Schedule, messages_of_edge


def lower(schedule: Schedule, num_ahead: int = 1) -> Schedule:
    """Adds communication to a schedule of compute instructions only, whose order on each rank is kept.

    The next `num_ahead` messages of an edge are posted already while one is worked on.
    """
    schedule = with_collectives(schedule)
    edges = messages_of_edge(schedule)
    programs: list[Program] = []
    for rank, program in enumerate(schedule.programs):
        incoming = {edge[0]: messages for edge, messages in edges.items() if edge[1] == rank}
        programs.append(tuple(_lower_program(schedule, program, incoming, num_ahead)))
    return replace(schedule, programs=tuple(programs))


def lower_loop(schedule: Schedule, program: Program, ring: int) -> Program:
    """Adds communication to a part of a loop without end, which `loop_program` made.

    Microbatches are numbered modulo `ring`, more than are ever under way. Receives of activations are posted
    first, those of gradients as soon as the activation was sent.
    """
    schedule = replace(schedule, num_microbatches=ring)
    in_ring = lambda i: replace(i, microbatch=i.microbatch % ring) if isinstance(i, Staged) else i
    program = tuple(map(in_ring, program))
    reads = tuple(schedule.inputs_of(program))
    out: list[Instruction] = [
        message.receive()
        for instruction, message in zip(program, reads, strict=True)
        if isinstance(instruction, Forward) and message is not None
    ]
    makes = schedule.outputs_of(program)
    for instruction, needed, output in zip(program, reads, makes, strict=True):
        if needed is not None:
            out.append(needed.wait())
        out.append(instruction)
        if output is not None:
            out.append(output.send())
            if isinstance(instruction, Forward):
                backward = Backward(instruction.stage, instruction.microbatch)
                gradient = next(schedule.inputs_of((backward,)))
                assert gradient is not None
                out.append(gradient.receive())
    return tuple(out)


def delivered(schedule: Schedule) -> tuple[dict[Wait, tuple[Send, ...]], ...]:
    """Returns, by rank, sends of which the end of a wait tells that they have arrived, so that memory is free.

    Whoever sends a message has read before what its program waits for before. So an activation has arrived when
    its gradient is there, if no earlier message said so; a gradient when a later activation is there.

    Example:
        >>> from lightning_diffpipe.planning.schedules.one_f_one_b import one_f_one_b
        >>> of_rank = delivered(lower(one_f_one_b(2, 3)))
        >>> {str(wait): [str(send) for send in sends] for wait, sends in of_rank[1].items()}
        {'1a0?0': [], '1a1?0': [], '1a2?0': ['0g0>0']}
    """
    arrived: list[dict[Wait, tuple[Send, ...]]] = [{} for _ in schedule.programs]
    for rank, program in enumerate(schedule.programs):
        read: dict[int, list[Send]] = defaultdict(list)
        for i in program:
            match i:
                case Wait(kind, stage, microbatch, peer):
                    read[peer].append(Send(kind, stage, microbatch, rank))
                case Send(kind, stage, microbatch, peer):
                    arrived[peer][Wait(kind, stage, microbatch, rank)] = tuple(read.pop(peer, ()))
    return tuple(arrived)


def with_collectives(schedule: Schedule) -> Schedule:
    """Adds the reduction of gradients, if there are any, and no messages."""
    kinds = {type(instruction) for program in schedule.programs for instruction in program}
    if UpdateWeights in kinds or not kinds & {Backward, BackwardInput}:
        return schedule  # nothing is summed at the end
    programs: list[Program] = []
    # Ranks without a microbatch take part: they hold a replica that must stay equal to the others.
    for program in schedule.programs:
        if ReduceGradients not in map(type, program):
            ends = [i + 1 for i, done in enumerate(program) if isinstance(done, Staged)]
            stop = max(ends, default=len(program))
            program = (*program[:stop], ReduceGradients(), *program[stop:])
        programs.append(program)
    return replace(schedule, programs=tuple(programs))


def prefix_frozen(
    schedule: Schedule, frozen_parts: Sequence[EncodePart], encoded: bool = False
) -> Schedule:
    """Puts the frozen work of this batch, and its exchange, before the pipeline.

    If it is `encoded`, it was done in the bubbles of the last batch, and only the exchange is left.
    """
    if not frozen_parts:
        return schedule
    todo = () if encoded else frozen_parts
    programs = tuple(
        (*(Encode(part.index) for part in todo if part.rank == rank), ExchangeFrozen(), *program)
        for rank, program in enumerate(schedule.programs)
    )
    return replace(schedule, programs=programs)


def _lower_program(
    schedule: Schedule, program: Program, incoming: dict[int, list[Message]], num_ahead: int
) -> list[Instruction]:
    """Adds sends and waits to a program, and receives that are posted `num_ahead` messages early."""
    posted = dict.fromkeys(incoming, 0)
    out: list[Instruction] = []

    def post(peer: int, upto: int) -> None:
        """Posts the receives from `peer` up to and including message number `upto`."""
        for message in incoming[peer][posted[peer] : upto + 1]:
            out.append(message.receive())
        posted[peer] = max(posted[peer], min(upto + 1, len(incoming[peer])))

    started = False
    position = {message: k for messages in incoming.values() for k, message in enumerate(messages)}
    reads, makes = schedule.inputs_of(program), schedule.outputs_of(program)
    for instruction, needed, output in zip(program, reads, makes, strict=True):
        if not started and not isinstance(instruction, (Encode, ExchangeFrozen)):
            started = True
            for peer in sorted(incoming):
                post(peer, num_ahead - 1)
        if needed is not None and not needed.is_local and needed in position:
            post(needed.from_rank, position[needed])
            out.append(needed.wait())
            post(needed.from_rank, position[needed] + num_ahead)
        elif needed is not None and not needed.is_local:
            out += [needed.receive(), needed.wait()]  # Nobody makes it: the simulator will say so.
        out.append(instruction)
        if output is not None and not output.is_local:
            out.append(output.send())
    return out


ReceiveStarts = tuple[dict[Instruction, tuple[Receive, ...]], ...]


def lower_for_devices(schedule: Schedule) -> tuple[Schedule, ReceiveStarts]:
    """Adds communication to a schedule of devices that run receives; returns `receive_starts` as well.

    A receive that has to begin early needs its buffer by then, so more are posted ahead where ranks hold several
    stages: as few as let hosts wait for their devices anywhere.

    Raises:
        ScheduleError: Hosts that wait for their devices would wait for each other for ever.
    """
    fewest = 2 if schedule.num_stages > schedule.num_ranks else 1
    for num_ahead in range(fewest, fewest + schedule.num_microbatches * schedule.num_stages):
        lowered = lower(schedule, num_ahead=num_ahead)
        starts = receive_starts(lowered)
        num_posted = sum(isinstance(i, Receive) for program in lowered.programs for i in program)
        if num_posted == sum(len(receives) for of_rank in starts for receives in of_rank.values()):
            return lowered, starts
    raise ScheduleError(
        f"ranks of these {schedule.num_stages} stages and {schedule.num_microbatches} microbatches wait for each "
        "other's messages in a circle where a device is waited for; choose schedule=1f1b"
    )


def receive_starts(schedule: Schedule) -> ReceiveStarts:
    """Returns, by rank, the receives that begin before an instruction; those of an edge in the order of the sends.

    Example:
        >>> from lightning_diffpipe.planning.lowering import lower
        >>> from lightning_diffpipe.planning.schedules.one_f_one_b import one_f_one_b
        >>> of_rank = receive_starts(lower(one_f_one_b(2, 2)))
        >>> {str(at): [str(receive) for receive in receives] for at, receives in of_rank[0].items()}
        {'0g0?1': ['0g0<1'], '0g1?1': ['0g1<1']}
    """
    sent, started = set[Message](), set[Message]()
    hosts = [_Host(rank, program, sent, started) for rank, program in enumerate(schedule.programs)]
    while any(host.goes_on() for host in hosts) or any(host.begins_early() for host in hosts):
        pass
    return tuple({at: tuple(receives) for at, receives in host.starts.items()} for host in hosts)


class _Host:
    """A rank that waits for its device before every instruction.

    Attributes:
        starts: Receives that begin before an instruction.
    """

    def __init__(
        self, rank: int, program: Program, sent: set[Message], started: set[Message]
    ) -> None:
        self.starts: dict[Instruction, list[Receive]] = {}
        self._rank, self._program, self._sent, self._started = rank, program, sent, started
        self._position = 0
        self._posted: dict[int, deque[Message]] = defaultdict(deque)  # by sender, not started
        self._under_way: list[Message] = []

    def goes_on(self) -> bool:
        """Runs until something that it has started needs another rank; says whether it did anything."""
        did = False
        while self._position < len(self._program):
            instruction = self._program[self._position]
            if isinstance(instruction, Wait):
                # The receive that is waited for begins after those of messages that were sent before.
                message = Message.of(instruction, self._rank)
                posted = self._posted[instruction.from_rank]
                if message in posted:
                    did = True
                    while message not in self._started:
                        self._begin(posted.popleft())
            self._under_way = [
                m for m in self._under_way if m not in self._sent or m not in self._started
            ]
            if self._under_way:
                break
            if isinstance(instruction, Send):
                message = Message.of(instruction, self._rank)
                self._sent.add(message)
                self._under_way.append(message)
            elif isinstance(instruction, Receive):
                message = Message.of(instruction, self._rank)
                self._posted[instruction.from_rank].append(message)
            self._position += 1
            did = True
        return did

    def begins_early(self) -> bool:
        """Begins the receive of a message that waits to be taken, if there is one."""
        for posted in self._posted.values():
            if posted and posted[0] in self._sent:
                self._begin(posted.popleft())
                return True
        return False

    def _begin(self, message: Message) -> None:
        self.starts.setdefault(self._program[self._position], []).append(message.receive())
        self._under_way.append(message)
        self._started.add(message)
