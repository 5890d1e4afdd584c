"""How the ranks of one sampler talk: tensors of known shapes between positions 0 .. N - 1.

Both ends of a message know its shape, dtype and turn, so no header travels. Receives are posted early and
sends keep their buffer until it has left. Everything is point-to-point: an all-gather is one message to each
peer, so that what is counted is what is sent.

    a = links.receive(TensorShape((4, 96, 64), torch.float16), source=0, kind="hidden")   # returns at once
    ...
    x = a.wait()                                                              # blocks, or times out

* `ProcessLinks`: `torch.distributed`, gloo or NCCL. On gloo every message has a tag made of its kind and its
  turn among the messages of this kind on this edge; on NCCL each direction of each edge has a communicator.
* `LoopbackLinks` (`loopback.py`): positions are threads of one process.
* `Alone`: one position, no network.
"""

from __future__ import annotations

import datetime
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_diffpipe.errors import PipelineTimeoutError
from lightning_diffpipe.runtime.mesh import open_edge
from lightning_diffpipe.sampling.statistics import Traffic

MessageKind = Literal[
    "hidden",  # what crosses from stage to stage
    "latents",  # from the last rank back to the first
    "key_value",  # keys and values of attention
    "sequence",  # heads for tokens inside attention, and back
    "halo",  # rows at the border of a band
    "statistics",  # of normalisation
    "prediction",  # of the model, to all
    "result",  # final latents, to all
    "control",  # whether synchronous steps go on
]
_KINDS: tuple[MessageKind, ...] = MessageKind.__args__  # type: ignore[attr-defined]
_TURNS = 1 << 20


class TensorShape(NamedTuple):
    """All that a receiver must know about a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @classmethod
    def of(cls, tensor: Tensor) -> TensorShape:
        """The shape of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype)


class Incoming(Protocol):
    """A tensor under way."""

    def wait(self) -> Tensor:
        """Blocks until it is here. May be called once.

        Raises:
            PipelineTimeoutError: It did not come in time, or the peer is gone.
        """


class Links(Protocol):
    """One position's way to all others.

    Attributes:
        rank: This position.
        num_ranks: All positions.
        device: Where received tensors live.
        traffic: What was sent and received here.
    """

    rank: int
    num_ranks: int
    device: torch.device
    traffic: Traffic

    def send(self, tensor: Tensor, to: int, kind: MessageKind) -> None:
        """Starts sending; the caller must not change the tensor afterwards."""

    def receive(self, shape: TensorShape, source: int, kind: MessageKind) -> Incoming:
        """Posts a receive and returns at once."""

    def broadcast_object(self, make: Callable[[], Any]) -> Any:
        """What `make` returns on position 0, on all positions; not counted.

        If it raises there, the exception is raised everywhere.
        """

    def finish(self) -> None:
        """Waits until every send has left."""


def start_all_gather(
    links: Links, tensor: Tensor, shapes: Sequence[TensorShape], kind: MessageKind
) -> Callable[[], list[Tensor]]:
    """Sends a tensor to all peers and posts the receives of theirs.

    Args:
        links: Of this position.
        tensor: This position's part.
        shapes: Shapes of all parts, by position.
        kind: What it is.

    Returns:
        A function that waits, and returns the parts of all positions, in order.
    """
    peers = [rank for rank in range(links.num_ranks) if rank != links.rank]
    incoming = {rank: links.receive(shapes[rank], rank, kind) for rank in peers}
    for rank in peers:
        links.send(tensor, rank, kind)
    return lambda: [
        tensor if rank == links.rank else incoming[rank].wait() for rank in range(links.num_ranks)
    ]


def exchange(
    links: Links,
    outgoing: Mapping[int, Tensor],
    shapes: Mapping[int, TensorShape],
    kind: MessageKind,
) -> dict[int, Tensor]:
    """Sends one tensor to each of some peers and receives one from each of some peers.

    Args:
        links: Of this position.
        outgoing: Tensors by receiver.
        shapes: Shapes of what comes, by sender.
        kind: What it is.
    """
    incoming = {peer: links.receive(shape, peer, kind) for peer, shape in shapes.items()}
    for peer, tensor in outgoing.items():
        links.send(tensor, peer, kind)
    return {peer: posted.wait() for peer, posted in incoming.items()}


@dataclass
class Alone:
    """The links of a sampler that has one rank."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    rank: int = 0
    num_ranks: int = 1
    traffic: Traffic = field(default_factory=Traffic)

    def send(self, tensor: Tensor, to: int, kind: MessageKind) -> None:
        """There is nobody to send to."""
        raise AssertionError(f"one rank alone sends {kind} to {to}")

    def receive(self, shape: TensorShape, source: int, kind: MessageKind) -> Incoming:
        """There is nobody to receive from."""
        raise AssertionError(f"one rank alone waits for {kind} of {source}")

    def broadcast_object(self, make: Callable[[], Any]) -> Any:
        """What it returns."""
        return make()

    def finish(self) -> None:
        """Nothing is under way."""


# ------------------------------------------------------------------------------------------ processes


class ProcessLinks:
    """Links between processes; `connect` makes them.

    Args:
        ranks: World ranks of the positions, in order.
        device: Where tensors live.
        backend: "gloo" or "nccl".
        timeout_s: How long any wait may last.
        groups: Group of each directed edge (from, to) between positions.
        control: A gloo group of all positions.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        device: torch.device,
        backend: str,
        timeout_s: float,
        groups: Mapping[tuple[int, int], dist.ProcessGroup],
        control: dist.ProcessGroup,
    ) -> None:
        self.ranks, self.device, self.timeout_s = tuple(ranks), device, timeout_s
        self.num_ranks = len(self.ranks)
        self.rank = self.ranks.index(dist.get_rank())
        self.traffic = Traffic()
        self.control = control
        self._groups, self._backend = dict(groups), backend
        self._turns: Counter[tuple[bool, int, str]] = Counter()
        self._held: deque[tuple[dist.Work, Tensor]] = deque()
        # gloo moves host memory only; tensors of a GPU then travel by way of the host.
        self._by_host = backend == "gloo" and device.type != "cpu"

    @classmethod
    def connect(
        cls,
        groups_of_ranks: Sequence[Sequence[int]],
        device: torch.device,
        backend: str = "gloo",
        timeout_s: float = 300.0,
    ) -> ProcessLinks:
        """Makes links inside each of some groups of world ranks.

        Collective: every rank of the world calls it at the same time with the same groups, because
        process groups must be made in the same order everywhere.

        Args:
            groups_of_ranks: Disjoint groups; this rank must be in one of them.
            device: Where tensors of this rank live.
            backend: "gloo" or "nccl".
            timeout_s: How long any wait may last.

        Returns:
            The links of this rank's group.
        """
        mine, timeout = None, datetime.timedelta(seconds=timeout_s)
        for ranks in groups_of_ranks:
            control = dist.new_group(list(ranks), backend="gloo", timeout=timeout)
            groups = {}
            for a, b in itertools.permutations(range(len(ranks)), 2):
                groups[a, b] = control
                if backend != "gloo":
                    pair = [ranks[a], ranks[b]]
                    groups[a, b] = dist.new_group(pair, backend=backend, timeout=timeout)
                    open_edge(groups[a, b], *pair, device)
            if dist.get_rank() in ranks:
                mine = cls(ranks, device, backend, timeout_s, groups, control)
        assert mine is not None, "this rank is in no group"
        return mine

    def disconnect(self) -> None:
        """Destroys the groups, once every send has left."""
        self.finish()
        self.abandon()

    def abandon(self) -> None:
        """Destroys the groups as they are. Over gloo, peers that wait for this position are told at once."""
        if not self._groups:
            return
        groups = {id(g): g for g in (*self._groups.values(), self.control)}
        self._held.clear()
        self._groups.clear()
        del self.control  # a connection breaks when nobody holds its group
        while groups:
            dist.destroy_process_group(groups.popitem()[1])

    def send(self, tensor: Tensor, to: int, kind: MessageKind) -> None:
        """Starts sending; the buffer is kept alive until it has left."""
        buffer = _as_bytes(tensor.cpu() if self._by_host else tensor)
        try:
            work = dist.isend(
                buffer,
                dst=self.ranks[to],
                group=self._groups[self.rank, to],
                tag=self._tag(True, to, kind),
            )
        except RuntimeError as error:  # the peer has gone since the last message
            raise self._lost(kind, to, 0.0) from error
        self.traffic.bytes_sent[kind] += buffer.numel()
        self.traffic.messages_sent[kind] += 1
        self._held.append((work, buffer))
        while self._held and self._held[0][0].is_completed():
            self._await(self._held.popleft()[0], "a sent message", None)

    def receive(self, shape: TensorShape, source: int, kind: MessageKind) -> Incoming:
        """Posts a receive."""
        host = torch.device("cpu") if self._by_host else self.device
        buffer = torch.empty(shape.nbytes, dtype=torch.uint8, device=host)
        try:
            work = dist.irecv(
                buffer,
                src=self.ranks[source],
                group=self._groups[source, self.rank],
                tag=self._tag(False, source, kind),
            )
        except RuntimeError as error:
            raise self._lost(kind, source, 0.0) from error
        return _FromProcess(self, work, buffer, shape, source, kind)

    def broadcast_object(self, make: Callable[[], Any]) -> Any:
        """Position 0 makes it, all get it."""
        box: list[Any] = [None]
        if self.rank == 0:
            box = [outcome_of(make)]
        try:
            dist.broadcast_object_list(box, src=self.ranks[0], group=self.control)
        except RuntimeError as error:
            raise self._lost("plain data", 0, 0.0) from error
        return value_of(box[0])

    def finish(self) -> None:
        """Waits until every send has left."""
        while self._held:
            self._await(self._held.popleft()[0], "a sent message", None)

    def _tag(self, sends: bool, peer: int, kind: MessageKind) -> int:
        turn = self._turns[sends, peer, kind]
        self._turns[sends, peer, kind] += 1
        return _KINDS.index(kind) * _TURNS + turn % _TURNS

    def _await(self, work: dist.Work, what: str, source: int | None) -> None:
        started_s = time.monotonic()
        try:
            if self._backend == "gloo":
                work.wait(datetime.timedelta(seconds=self.timeout_s))
            else:  # with a timeout NCCL would block the host; its groups have one of their own
                work.wait()
        except RuntimeError as error:
            raise self._lost(what, source, time.monotonic() - started_s) from error

    def _lost(self, what: str, source: int | None, waited_s: float) -> PipelineTimeoutError:
        peer = "a peer" if source is None else f"rank {self.ranks[source]}"
        reason = (
            f"{peer} sent nothing for {waited_s:.0f} s (timeout_s={self.timeout_s:g})"
            if waited_s >= 0.9 * self.timeout_s
            else f"lost {peer}, which stopped; its own error says why"
        )
        return PipelineTimeoutError(f"rank {self.ranks[self.rank]} waited for {what}: {reason}")


@dataclass
class _FromProcess:
    links: ProcessLinks
    work: dist.Work
    buffer: Tensor
    shape: TensorShape
    source: int
    kind: MessageKind

    def wait(self) -> Tensor:
        self.links._await(self.work, self.kind, self.source)
        self.links.traffic.bytes_received[self.kind] += self.shape.nbytes
        return _from_bytes(self.buffer, self.shape).to(self.links.device)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _from_bytes(buffer: Tensor, shape: TensorShape) -> Tensor:
    return buffer.view(shape.dtype).view(shape.shape)


def outcome_of(make: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """What a function returned or raised, as data."""
    try:
        return make(), None
    except Exception as error:
        return None, error


def value_of(outcome: tuple[Any, Exception | None]) -> Any:
    """The value of an outcome, or its exception."""
    value, error = outcome
    if error is not None:
        raise error
    return value
