"""How messages of training travel between processes.

A message is known by its `MessageKey`: what it is (activation or gradient), the stage that consumes it
and its microbatch. Both ends derive from the plan when it is sent and how large it is, so no header
travels. Receives are posted early. Sends keep their buffer alive until a later message confirms that it has
arrived: nothing else does on gloo, and on NCCL the host is ahead of the device.

On gloo each message has a tag of its own, so the order of posting cannot deadlock, and a posted receive begins at
once. On NCCL each directed edge has a communicator of its own, and a receive occupies the device: it begins where
no host that waits for its device can wait for it in vain (`planning/lowering.py`), in a stream of its own, since
what was computed after it was posted has no say in it.

`Transport` is what the runtime asks for; tests have one that passes messages inside one process.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_diffpipe.comm.mesh import Mesh
from lightning_diffpipe.comm.waiting import Pending, SideStreams, Waiter, no_message
from lightning_diffpipe.planning.instruction import Instruction

MessageKind = Literal["activation", "gradient", "feedback", "frozen", "end"]
_KINDS: tuple[MessageKind, ...] = ("activation", "gradient", "feedback", "frozen", "end")
_TAGS_PER_KIND = 1 << 20


class MessageKey(NamedTuple):
    """Names one message of a step: what it is, who consumes it, for which microbatch."""

    kind: MessageKind
    stage: int
    microbatch: int

    def tag(self, num_stages: int) -> int:
        """Returns a number no other message of the step has."""
        return _KINDS.index(self.kind) * _TAGS_PER_KIND + self.microbatch * num_stages + self.stage


class Parcel(NamedTuple):
    """A message of a many-to-many exchange: its key, buffer, and the peer's position."""

    key: MessageKey
    buffer: Tensor
    peer: int


class Transport(Protocol):
    """Carries flat byte buffers between the positions of one pipeline.

    Attributes:
        num_bytes_sent: Bytes of all messages sent so far.
    """

    num_bytes_sent: int

    def send(self, key: MessageKey, buffer: Tensor, to: int) -> None:
        """Starts sending; the buffer lives until it has left."""

    def receive(self, key: MessageKey, buffer: Tensor, source: int) -> None:
        """Posts a receive into `buffer`; returns at once."""

    def come_to(self, instruction: Instruction) -> None:
        """Begins posted receives that are due before an instruction, to which the program has come."""

    def is_ready(self, key: MessageKey) -> bool:
        """Returns whether `wait` would return at once; the rank waits for no other message until it does."""

    def wait(self, key: MessageKey) -> Tensor:
        """Blocks until the posted receive has its message, and hands out the buffer."""

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> PendingWork:
        """Starts sending and receiving many messages at once."""

    def awaited(
        self, works: Sequence[dist.Work], what: str, then: Callable[[], None]
    ) -> PendingWork:
        """Operations that were started elsewhere, to be waited for in the same way.

        Args:
            works: The operations.
            what: Their name in the error of a timeout.
            then: Is called by `wait` when they are over.
        """

    def follow(
        self,
        num_stages: int,
        delivered: Mapping[MessageKey, Sequence[MessageKey]],
        due: Mapping[Instruction, Sequence[MessageKey]] | None,
    ) -> None:
        """Follows another schedule from now on, when nothing is in flight. Arguments as of `P2PTransport`."""

    def finish(self) -> None:
        """Waits until every send has left."""

    def close(self) -> None:
        """Ends threads and frees buffers, when nothing is in flight any more."""


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
    work: dist.Work | None = None
    pending: Pending | None = None


class P2PTransport:
    """Point-to-point messages over `torch.distributed`, on gloo or NCCL.

    Args:
        mesh: Positions and groups.
        num_stages: Stages of the plan; keeps tags apart.
        delivered: By message: what this rank has sent that has arrived when the message has. What no
            message confirms is stored until `finish`.
        due: By instruction: the receives that begin before it, over NCCL. Others begin when they are
            waited for.
    """

    def __init__(
        self,
        mesh: Mesh,
        num_stages: int,
        delivered: Mapping[MessageKey, Sequence[MessageKey]] | None = None,
        due: Mapping[Instruction, Sequence[MessageKey]] | None = None,
    ) -> None:
        self._mesh = mesh
        self._num_stages = num_stages
        self._delivered = delivered or {}
        self._due = due or {}
        self._streams = SideStreams()
        self._posted: dict[MessageKey, _Posted] = {}
        self._sent: dict[MessageKey, tuple[dist.Work, Tensor]] = {}
        self._timeout = datetime.timedelta(seconds=mesh.timeout_s)
        # gloo moves host memory only; buffers of a GPU then travel by way of the host.
        self._stages_on_host = mesh.backend == "gloo" and mesh.device.type != "cpu"
        # NCCL works are ordered by the stream: a wait never blocks the host.
        self._blocks_host = mesh.backend == "gloo"
        self._waiter = Waiter()
        self.num_bytes_sent = 0

    def send(self, key: MessageKey, buffer: Tensor, to: int) -> None:
        """Starts sending a flat buffer to the position `to` of this pipeline."""
        if self._stages_on_host:
            buffer = buffer.cpu()
        mesh = self._mesh
        work = dist.isend(
            buffer,
            dst=mesh.world_rank(to),
            group=mesh.messages[mesh.local_rank, to],
            tag=key.tag(self._num_stages),
        )
        self.num_bytes_sent += buffer.numel()
        self._sent[key] = work, buffer

    def receive(self, key: MessageKey, buffer: Tensor, source: int) -> None:
        """Posts a receive from the position `source` of this pipeline."""
        staging = torch.empty_like(buffer, device="cpu") if self._stages_on_host else None
        memory = None if self._blocks_host else self._streams.memory_of(buffer)
        self._posted[key] = _Posted(buffer, source, staging, memory)
        if self._blocks_host:
            self._begin(key)

    def come_to(self, instruction: Instruction) -> None:
        """Begins posted receives that are due before an instruction."""
        for key in self._due.get(instruction, ()):
            self._begin(key)

    def _begin(self, key: MessageKey) -> dist.Work:
        mesh, posted = self._mesh, self._posted[key]
        with self._streams.receiving(posted.source, posted.buffer, posted.memory):
            work = dist.irecv(
                posted.buffer if posted.staging is None else posted.staging,
                src=mesh.world_rank(posted.source),
                group=mesh.messages[posted.source, mesh.local_rank],
                tag=key.tag(self._num_stages),
            )
        assert work is not None
        posted.work = work
        return work

    def is_ready(self, key: MessageKey) -> bool:
        """Returns whether `wait` would return at once; asking starts to wait, in a thread."""
        if not self._blocks_host:
            return True
        posted = self._posted[key]
        if posted.pending is None:
            posted.pending = self._waiter.watch(lambda: self._await_posted(key, posted))
        return posted.pending.is_over()

    def wait(self, key: MessageKey) -> Tensor:
        """Waits for a posted receive.

        Raises:
            PipelineTimeoutError: Nothing came within the mesh's `timeout_s`, or the peer is gone.
        """
        posted = self._posted[key]
        if posted.pending is not None:
            posted.pending.result()
        else:
            self._await_posted(key, posted)
        del self._posted[key]
        if posted.staging is not None:
            posted.buffer.copy_(posted.staging)
        for sent in self._delivered.get(key, ()):
            # Not every form of a step sends all messages, or the pipeline has been drained since.
            if sent in self._sent:
                work, _ = self._sent.pop(sent)
                # It is over; on NCCL the stream learns it.
                self.await_work(work, "a sent message", None)
        return posted.buffer

    def _await_posted(self, key: MessageKey, posted: _Posted) -> None:
        work = posted.work or self._begin(key)
        self.await_work(work, f"{key.kind} of microbatch {key.microbatch}", posted.source)

    def awaited(
        self, works: Sequence[dist.Work], what: str, then: Callable[[], None]
    ) -> PendingWork:
        """Operations that were started elsewhere; see `Transport`."""
        return _P2PWork(self, list(works), what, then)

    def watch(self, works: Sequence[dist.Work], what: str) -> Pending:
        """Waits for operations in a thread, on behalf of the stream that computes here."""
        entered = self._streams.entered(self._mesh.device)

        def wait() -> None:
            with entered:
                self.await_works(works, what)

        return self._waiter.watch(wait)

    @property
    def blocks_host(self) -> bool:
        """Whether waiting for a message stops the host, so that it could do something else."""
        return self._blocks_host

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> PendingWork:
        """Starts many messages at once, as one group of point-to-point operations."""
        staging = [
            torch.empty_like(parcel.buffer, device="cpu") if self._stages_on_host else parcel.buffer
            for parcel in receives
        ]
        outgoing = [
            parcel.buffer.cpu() if self._stages_on_host else parcel.buffer for parcel in sends
        ]
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
        return dist.P2POp(
            operation,
            buffer,
            self._mesh.world_rank(parcel.peer),
            self._mesh.pipeline_group,
            parcel.key.tag(self._num_stages),
        )

    def follow(
        self,
        num_stages: int,
        delivered: Mapping[MessageKey, Sequence[MessageKey]],
        due: Mapping[Instruction, Sequence[MessageKey]] | None,
    ) -> None:
        """Follows another schedule from now on; see `Transport`."""
        self._num_stages, self._delivered, self._due = num_stages, delivered, due or {}

    def finish(self) -> None:
        """Waits until every send has left, and drops their buffers."""
        self.await_works([work for work, _ in self._sent.values()], "a sent message")
        self._sent.clear()

    def close(self) -> None:
        """Ends the waiting thread."""
        self._waiter.close()

    def await_works(self, works: Sequence[dist.Work], what: str) -> None:
        """Waits for several operations; see `await_work`."""
        for work in works:
            self.await_work(work, what, None)

    def await_work(self, work: dist.Work, what: str, source: int | None) -> None:
        """Waits for one operation; a timeout or a lost peer becomes a `PipelineTimeoutError`."""
        started_s = time.monotonic()
        try:
            if self._blocks_host:
                work.wait(self._timeout)
            else:  # with a timeout NCCL would block the host; its groups have one of their own
                work.wait()
        except RuntimeError as error:
            peer = "a peer" if source is None else f"rank {self._mesh.world_rank(source)}"
            waited_s = time.monotonic() - started_s
            raise no_message(self._mesh.rank, what, peer, waited_s, self._mesh.timeout_s) from error


@dataclass
class _P2PWork:
    transport: P2PTransport
    works: list[dist.Work]
    what: str
    then: Callable[[], None]
    pending: Pending | None = None

    def is_ready(self) -> bool:
        if not self.transport.blocks_host:
            return True
        if self.pending is None:
            self.pending = self.transport.watch(self.works, self.what)
        return self.pending.is_over()

    def wait(self) -> None:
        if self.pending is not None:
            self.pending.result()
        else:
            self.transport.await_works(self.works, self.what)
        self.works.clear()  # gloo's hold what they sent
        self.then()
