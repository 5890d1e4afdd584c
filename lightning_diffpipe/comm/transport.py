"""Messages of training between processes.

A message is known by its `MessageKey`: what it is (activation or gradient), the stage that consumes it
and its microbatch. Both ends derive from the plan when it is sent and how large it is, so no header
travels. Receives are posted early. Sends keep their buffer alive until a later message confirms that it has
arrived: nothing else does on gloo, and on NCCL the host is ahead of the device.

On gloo each message has a tag of its own, so the order of posting cannot deadlock, and a posted receive begins at
once. On NCCL each directed edge has a communicator of its own, and a receive occupies the device: it begins where
no host that waits for its device can wait for it in vain (`planning/lowering.py`), in a stream of its own, since
what was computed after it was posted has no say in it.
"""

from __future__ import annotations

import datetime
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_diffpipe.comm.mesh import Mesh
from lightning_diffpipe.comm.waiting import SideStreams, in_thread, naming
from lightning_diffpipe.errors import ScheduleError
from lightning_diffpipe.planning.instruction import Instruction, Receive, Send, Wait

MessageKind = Literal["activation", "gradient", "frozen", "end"]
_KINDS: tuple[MessageKind, ...] = ("activation", "gradient", "frozen", "end")
_TAGS_PER_KIND = 1 << 20


class MessageKey(NamedTuple):
    """Names one message of a step: what it is, who consumes it, for which microbatch."""

    kind: MessageKind
    stage: int
    microbatch: int

    def tag(self, num_stages: int) -> int:
        """Returns a number no other message of the step has."""
        return _KINDS.index(self.kind) * _TAGS_PER_KIND + self.microbatch * num_stages + self.stage


def message_key(message: Send | Receive | Wait, ring: int | None = None) -> MessageKey:
    """Returns the key of a message; microbatches without an end are numbered in a ring."""
    microbatch = message.microbatch % ring if ring else message.microbatch
    return MessageKey(message.kind, message.stage, microbatch)


class Parcel(NamedTuple):
    """A message of a many-to-many exchange: its key, buffer, and the peer's position."""

    key: MessageKey
    buffer: Tensor
    peer: int


class PendingWork(Protocol):
    """Messages or sums that are under way."""

    def is_ready(self) -> bool:
        """Returns whether `wait` would return at once."""

    def wait(self) -> None:
        """Blocks until all are over."""


@dataclass
class _Posted:
    buffer: Tensor
    source: int
    staging: Tensor | None
    memory: torch.cuda.Event | None
    started: _AwaitedWork | None = None


class Transport:
    """Carries flat byte buffers between the positions of one pipeline, over gloo or NCCL.

    Attributes:
        num_bytes_sent: Bytes of all messages sent so far.
        blocks_host: Whether waiting for a message stops the host, so that it could do something else.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._streams = SideStreams()
        self._posted: dict[MessageKey, _Posted] = {}
        self._next: dict[int, deque[MessageKey]] = defaultdict(deque)  # by sender, not started
        self._sent: dict[MessageKey, tuple[dist.Work, Tensor]] = {}
        # gloo moves host memory only; buffers of a GPU then travel by way of the host.
        self._stages_on_host = mesh.backend == "gloo" and mesh.device.type != "cpu"
        # NCCL works are ordered by the stream: a wait never blocks the host.
        self.blocks_host = mesh.backend == "gloo"
        self.num_bytes_sent = 0
        self.follow(1)

    def follow(
        self,
        num_stages: int,
        delivered: Mapping[MessageKey, Sequence[MessageKey]] | None = None,
        receives_before: Mapping[Instruction, Sequence[MessageKey]] | None = None,
    ) -> None:
        """Follows a schedule from now on, when nothing is in flight.

        Args:
            num_stages: Stages of the plan, by which tags differ.
            delivered: For each message, messages of this rank that have arrived when it has. Those that no message
                confirms are stored until `finish`.
            receives_before: Receives that begin before each instruction, over NCCL. Others begin when they are
                waited for.
        """
        self._num_stages, self._delivered = num_stages, delivered or {}
        self._receives_before = receives_before or {}

    def send(self, key: MessageKey, buffer: Tensor, to: int) -> None:
        """Starts sending to a position of this pipeline; the buffer lives until it has left."""
        if self._stages_on_host:
            buffer = buffer.cpu()
        mesh, tag = self._mesh, key.tag(self._num_stages)
        group = mesh.messages[mesh.local_rank, to]
        work = dist.isend(buffer, mesh.world_rank(to), group=group, tag=tag)
        self.num_bytes_sent += buffer.numel()
        self._sent[key] = work, buffer

    def receive(self, key: MessageKey, buffer: Tensor, source: int) -> None:
        """Posts a receive from a position of this pipeline into `buffer`; returns at once."""
        staging = torch.empty_like(buffer, device="cpu") if self._stages_on_host else None
        memory = None if self.blocks_host else self._streams.memory_of(buffer)
        self._posted[key] = _Posted(buffer, source, staging, memory)
        self._next[source].append(key)
        if self.blocks_host:
            self._begin(key)

    def come_to(self, instruction: Instruction) -> None:
        """Begins the posted receives that belong before an instruction which the program has reached."""
        if self._receives_before:  # over NCCL only; elsewhere no instruction is hashed for nothing
            for key in self._receives_before.get(instruction, ()):
                self._begin(key)

    def _begin(self, key: MessageKey) -> _AwaitedWork:
        mesh, posted = self._mesh, self._posted[key]
        # Messages of NCCL have no names: two of equal size would be taken for each other.
        if (first := self._next[posted.source].popleft()) != key:
            raise ScheduleError(
                f"rank {mesh.rank} begins to receive {key} of rank {mesh.world_rank(posted.source)} before "
                f"{first}, which is sent first; the lowering of this schedule is wrong"
            )
        target = posted.buffer if posted.staging is None else posted.staging
        source, tag = mesh.world_rank(posted.source), key.tag(self._num_stages)
        group = mesh.messages[posted.source, mesh.local_rank]
        with self._streams.receiving(posted.source, posted.buffer, posted.memory):
            work = dist.irecv(target, source, group=group, tag=tag)
        what = f"{key.kind} of microbatch {key.microbatch}"
        posted.started = _AwaitedWork(self, [work], what, source=posted.source)
        return posted.started

    def is_ready(self, key: MessageKey) -> bool:
        """Returns whether `wait` would return at once; asking starts to wait, in a thread."""
        started = self._posted[key].started
        return started is None or started.is_ready()

    def wait(self, key: MessageKey) -> Tensor:
        """Returns the buffer of a posted receive with its message, or raises PipelineTimeoutError."""
        posted = self._posted[key]
        (posted.started or self._begin(key)).wait()
        del self._posted[key]
        if posted.staging is not None:
            posted.buffer.copy_(posted.staging)
        for sent in self._delivered.get(key, ()):
            # Not every call sequence of a step sends all messages, or the pipeline has been drained since.
            if sent in self._sent:
                work, _ = self._sent.pop(sent)
                # It is over; on NCCL the stream learns it.
                self.await_works([work], "a sent message")
        return posted.buffer

    def awaited(
        self, works: Sequence[dist.Work], what: str, then: Callable[[], None] = lambda: None
    ) -> PendingWork:
        """Returns operations that were started elsewhere, to be waited for in the same way.

        An error of a timeout names them `what`; `wait` calls `then` when they are over.
        """
        return _AwaitedWork(self, list(works), what, then)

    def watch(self, wait: Callable[[], None]) -> Future[None]:
        """Waits in a thread, on behalf of the stream that computes here."""
        entered = self._streams.entered(self._mesh.device)

        def wait_there() -> None:
            with entered:
                wait()

        return in_thread(wait_there, "diffpipe-wait")

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> PendingWork:
        """Starts sending and receiving many messages at once, as one group of operations."""
        staging, outgoing = [parcel.buffer for parcel in receives], [each.buffer for each in sends]
        if self._stages_on_host:
            staging = [torch.empty_like(buffer, device="cpu") for buffer in staging]
            outgoing = [buffer.cpu() for buffer in outgoing]
        operations = [
            *map(self._operation, [dist.isend] * len(sends), sends, outgoing),
            *map(self._operation, [dist.irecv] * len(receives), receives, staging),
        ]
        self.num_bytes_sent += sum(buffer.numel() for buffer in outgoing)
        works = dist.batch_isend_irecv(operations) if operations else []
        arriving = list(zip(receives, staging, strict=True))
        del staging

        def unstage() -> None:
            outgoing.clear()  # alive until sent
            for parcel, buffer in arriving:
                if buffer is not parcel.buffer:
                    parcel.buffer.copy_(buffer)
            arriving.clear()  # whoever asked may hold this exchange longer than what it brought

        return self.awaited(works, "frozen results", unstage)

    def _operation(self, operation: Any, parcel: Parcel, buffer: Tensor) -> dist.P2POp:
        mesh, tag = self._mesh, parcel.key.tag(self._num_stages)
        peer = mesh.world_rank(parcel.peer)
        return dist.P2POp(operation, buffer, peer, mesh.pipeline_group, tag)

    def finish(self) -> None:
        """Waits until every send has left, and drops their buffers."""
        self.await_works([work for work, _ in self._sent.values()], "a sent message")
        self._sent.clear()

    def await_works(self, works: Sequence[dist.Work], what: str, source: int | None = None) -> None:
        """Waits for operations, one after the other; raises PipelineTimeoutError if one is not over in time."""
        peer = "a peer" if source is None else f"rank {self._mesh.world_rank(source)}"
        for work in works:
            with naming(self._mesh.rank, what, peer, self._mesh.timeout_s):
                if self.blocks_host:
                    work.wait(datetime.timedelta(seconds=self._mesh.timeout_s))
                else:  # with a timeout NCCL would block the host; its groups have one of their own
                    work.wait()


@dataclass
class _AwaitedWork:
    """Operations that are waited for where they are needed, or in a thread once somebody asks for them."""

    transport: Transport
    works: list[dist.Work]
    what: str
    then: Callable[[], None] = lambda: None
    source: int | None = None
    pending: Future[None] | None = None

    def is_ready(self) -> bool:
        if not self.transport.blocks_host:
            return True
        if self.pending is None:
            self.pending = self.transport.watch(self._await)
        return self.pending.done()

    def wait(self) -> None:
        if self.pending is not None:
            self.pending.result()
        else:
            self._await()
        self.works.clear()  # gloo's hold what they sent
        self.then()

    def _await(self) -> None:
        self.transport.await_works(self.works, self.what, self.source)
