"""Where receives begin on a device that runs them, so that any rank may wait for its whole device at any time.

On NCCL a receive runs on the device until its message is there, and a send until the message is taken. A host that
waits for its device (for memory to be given back, in cuDNN's benchmark, in `torch.cuda.synchronize`) waits for all
it has begun, and begins nothing meanwhile. Were receives begun where a program posts them, this would hang:

    rank 0 | 0g0<1 0F0 1a0>1 ...      waits in 0F0 for the gradient of what it has yet to send
    rank 1 | 1a0<0 1a0?0 1F0 1B0      waits for the activation

So a receive begins in front of its `Wait`: it needs nothing then that its own rank has yet to do. For interleaved
stages this can be too late: two ranks that have sent each other something, and compute on before they take it,
would each wait for the other to take it. There one of them begins its receive where it stands.

Both places are found by running all programs with hosts that wait for their devices in front of every instruction.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import NamedTuple

from lightning_diffpipe.planning.instruction import (
    Instruction,
    Kind,
    Program,
    Receive,
    Send,
    Wait,
)
from lightning_diffpipe.planning.schedule import Placement, Schedule


def num_posted_ahead(placement: Placement) -> int:
    """Messages of an edge, behind the one that is worked on, for which a device has buffers; see `lower`.

    Two where ranks hold several stages: a receive that has to begin early needs its buffer by then.
    """
    return 2 if placement.num_stages > placement.num_ranks else 1


def receives_due(schedule: Schedule) -> tuple[dict[Instruction, tuple[Receive, ...]], ...]:
    """By rank: the receives that begin in front of an instruction; those of an edge in the order of the sends.

    Args:
        schedule: With communication.

    Example:
        >>> from lightning_diffpipe.planning.lowering import lower
        >>> from lightning_diffpipe.planning.schedules.one_f_one_b import one_f_one_b
        >>> of_rank = receives_due(lower(one_f_one_b(2, 2)))
        >>> {str(at): [str(receive) for receive in receives] for at, receives in of_rank[0].items()}
        {'0g0?1': ['0g0<1'], '0g1?1': ['0g1<1']}
    """
    taken = _Taken(set(), set())
    hosts = [_Host(program, taken) for program in schedule.programs]
    while any(host.goes_on() for host in hosts) or any(host.begins_early() for host in hosts):
        pass
    return tuple({at: tuple(receives) for at, receives in host.due.items()} for host in hosts)


class _Message(NamedTuple):
    """What both ends of a message know of it."""

    kind: Kind
    stage: int
    microbatch: int

    @classmethod
    def of(cls, instruction: Send | Receive | Wait) -> _Message:
        return cls(instruction.kind, instruction.stage, instruction.microbatch)


class _Taken(NamedTuple):
    """Messages that were sent, and those whose receives have begun."""

    sent: set[_Message]
    begun: set[_Message]

    def __call__(self, message: _Message) -> bool:
        return message in self.sent and message in self.begun


class _Host:
    """A rank that waits for its device in front of every instruction.

    Args:
        program: Its instructions.
        taken: Of all ranks.

    Attributes:
        due: What begins in front of which instruction.
    """

    def __init__(self, program: Program, taken: _Taken) -> None:
        self.due: dict[Instruction, list[Receive]] = {}
        self._program = program
        self._taken = taken
        self._position = 0
        self._posted: dict[int, deque[Receive]] = defaultdict(
            deque
        )  # by sender; they have not begun
        self._under_way: list[_Message] = []

    def goes_on(self) -> bool:
        """Runs until something that it has begun needs another rank; says whether it did anything."""
        did = False
        while self._position < len(self._program):
            instruction = self._program[self._position]
            if isinstance(instruction, Wait):
                did |= self._begin_upto(instruction)
            self._under_way = [m for m in self._under_way if not self._taken(m)]
            if self._under_way:
                break
            if isinstance(instruction, Send):
                self._taken.sent.add(_Message.of(instruction))
                self._under_way.append(_Message.of(instruction))
            elif isinstance(instruction, Receive):
                self._posted[instruction.from_rank].append(instruction)
            self._position += 1
            did = True
        return did

    def begins_early(self) -> bool:
        """Begins the receive of a message that waits to be taken, if there is one."""
        for posted in self._posted.values():
            if posted and _Message.of(posted[0]) in self._taken.sent:
                self._begin(posted.popleft())
                return True
        return False

    def _begin_upto(self, wait: Wait) -> bool:
        """Begins the receive that is waited for, behind those of messages that were sent before."""
        posted, message = self._posted[wait.from_rank], _Message.of(wait)
        if all(_Message.of(receive) != message for receive in posted):
            return False  # it has begun
        while message not in self._taken.begun:
            self._begin(posted.popleft())
        return True

    def _begin(self, receive: Receive) -> None:
        self.due.setdefault(self._program[self._position], []).append(receive)
        self._under_way.append(_Message.of(receive))
        self._taken.begun.add(_Message.of(receive))
