"""Messages between the ranks of one sampler: tensors of known shapes between positions 0 .. N - 1.

Both ends of a message know its shape, dtype and turn, so no header travels. Receives are posted early and
sends keep their buffer until it has left. Everything is point-to-point: an all-gather is one message to each
peer, so that what is counted is what is sent.

On NCCL a receive occupies the device until its message is there, and a host that waits for its whole device waits
for it, too. So a posted receive has its buffer, and begins when it is waited for, or when `begin` is called.
What all positions send each other at the same point of their programs begins at once, as one operation.

    a = links.receive(TensorShape((4, 96, 64), torch.float16), source=0, kind="hidden")   # returns at once
    ...
    x = a.wait()                                                              # blocks, or times out

A message is waited for as long as `timeout_s`. Plain objects are made on the way, by a probe perhaps, so that they
are waited for as long as their maker lives (`watcher.py`).

* `ProcessLinks`: `torch.distributed`, gloo or NCCL. On gloo every message has a tag made of its kind, its turn
  among the messages of this kind on this edge, and its length (modulo a prime): of another length than expected it
  does not come, where gloo would end the process, or leave the rest of the buffer as it was. On NCCL each directed
  edge of a chain has a communicator, and all positions together have one for what they do at the same point.
* `LoopbackLinks` (`loopback.py`): positions are threads of one process.
* `Alone`: one position, no network.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import itertools
import operator
import pickle
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_diffpipe.comm.mesh import connected_group, open_edge
from lightning_diffpipe.comm.packing import TensorShape, as_bytes
from lightning_diffpipe.comm.waiting import SideStreams, naming
from lightning_diffpipe.comm.watcher import watcher
from lightning_diffpipe.errors import ConfigurationError, DiffPipeError

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
    "images",  # decoded, to rank 0
]
_KINDS: tuple[MessageKind, ...] = MessageKind.__args__  # type: ignore[attr-defined]
_TURNS, _LENGTHS = 1 << 16, 3001  # lengths modulo a prime, as they are multiples of powers of 2


@dataclass
class Traffic:
    """Bytes of payload and messages of one rank, counted where they are sent and received, by kind."""

    bytes_sent: Counter[str] = field(default_factory=Counter)
    bytes_received: Counter[str] = field(default_factory=Counter)
    messages_sent: Counter[str] = field(default_factory=Counter)

    def copy(self) -> Traffic:
        """Returns a snapshot."""
        return copy.deepcopy(self)

    def since(self, before: Traffic) -> Traffic:
        """Returns the traffic after a snapshot."""
        return Traffic(*map(operator.sub, vars(self).values(), vars(before).values()))

    def plus(self, other: Traffic) -> Traffic:
        """Returns the sum of both."""
        return Traffic(*map(operator.add, vars(self).values(), vars(other).values()))

    def count_sent(self, num_bytes: int, kind: MessageKind) -> None:
        """Counts a message of so many bytes."""
        self.bytes_sent[kind] += num_bytes
        self.messages_sent[kind] += 1


class Incoming(Protocol):
    """A tensor that is being received."""

    def begin(self) -> None:
        """Begins the receive, after those of earlier messages on its edge, if it has not started."""

    def wait(self) -> Tensor:
        """Returns the tensor, or raises PipelineTimeoutError; may be called once."""


class Links(Protocol):
    """One position's way to all others.

    Attributes:
        device: Device of received tensors.
        occupies_device: Whether receives keep the device busy from when they begin, and so begin late.
    """

    rank: int
    num_ranks: int
    device: torch.device
    traffic: Traffic
    occupies_device: bool

    def send(self, tensor: Tensor, to: int, kind: MessageKind) -> None:
        """Starts sending; the caller must not change the tensor afterwards."""

    def receive(self, shape: TensorShape, source: int, kind: MessageKind) -> Incoming:
        """Posts a receive and returns at once."""

    def start_exchange(
        self, outgoing: Mapping[int, Tensor], shapes: Mapping[int, TensorShape], kind: MessageKind
    ) -> dict[int, Incoming]:
        """Starts to send and to receive; all peers concerned do so at the same point of their programs.

        `outgoing` are tensors by receiver, `shapes` those of what comes, by sender.
        """
        # One by one, as receives that have started are in nobody's way.
        incoming = {peer: self.receive(shape, peer, kind) for peer, shape in shapes.items()}
        for peer, tensor in outgoing.items():
            self.send(tensor, peer, kind)
        return incoming

    def broadcast_object(self, make: Callable[[], Any]) -> Any:
        """Returns what `make` returns on position 0, on all positions; not counted.

        If it raises there, the exception is raised everywhere.
        """

    def finish(self) -> None:
        """Waits until every send has left; what comes has been waited for."""

    def disconnect(self) -> None:
        """Destroys process groups made for these links, once every send has left; here there are none."""

    def abandon(self) -> None:
        """Destroys process groups made for these links as they are; here there are none."""


def start_all_gather(
    links: Links, tensor: Tensor, shapes: Sequence[TensorShape], kind: MessageKind
) -> Callable[[], list[Tensor]]:
    """Sends this position's part to all peers and posts the receives of theirs, of shapes by position.

    Returns a function that waits, and returns the parts of all positions, in order.
    """
    ranks = range(links.num_ranks)
    expected = {rank: shapes[rank] for rank in ranks if rank != links.rank}
    incoming = links.start_exchange(dict.fromkeys(expected, tensor), expected, kind)
    return lambda: [tensor if rank == links.rank else incoming[rank].wait() for rank in ranks]


def exchange(
    links: Links,
    outgoing: Mapping[int, Tensor],
    shapes: Mapping[int, TensorShape],
    kind: MessageKind,
) -> dict[int, Tensor]:
    """Sends one tensor to each of some peers and receives one from each of some; as `Links.start_exchange`."""
    incoming = links.start_exchange(outgoing, shapes, kind)
    return {peer: posted.wait() for peer, posted in incoming.items()}


@dataclass
class Alone(Links):
    """The links of a sampler that has one rank, which sends and receives nothing."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    rank: int = 0
    num_ranks: int = 1
    traffic: Traffic = field(default_factory=Traffic)
    occupies_device: bool = False

    def broadcast_object(self, make: Callable[[], Any]) -> Any:
        """Returns the object that `make` makes."""
        return make()

    def gather_object(self, value: Any) -> list[Any]:
        """Returns the value alone."""
        return [value]


# ------------------------------------------------------------------------------------------ processes

_Sent = tuple[dist.Work, Sequence[Tensor]]
"""A message under way, with its buffers."""


@dataclass(eq=False)
class ProcessLinks(Links):
    """Links between processes; `connect` makes them.

    Attributes:
        ranks: World ranks of the positions, in order.
        backend: "gloo" or "nccl".
        timeout_s: Limit of a wait for a message, in seconds.
        groups: Group of each directed edge (from, to) between positions.
        control: A gloo group of all positions.
        together: A group of all positions in the given backend.
        is_under_way: Whether anything was sent, or is to be received, since all of it was `finish`ed.
    """

    ranks: Sequence[int]
    device: torch.device
    backend: str
    timeout_s: float
    groups: dict[tuple[int, int], dist.ProcessGroup]
    control: dist.ProcessGroup
    together: dist.ProcessGroup
    is_under_way: bool = False

    def __post_init__(self) -> None:
        self.num_ranks = len(self.ranks)
        self.rank = self.ranks.index(dist.get_rank())
        self.traffic = Traffic()
        self.occupies_device = self.backend != "gloo"
        self._posted: dict[int, deque[_FromProcess]] = defaultdict(deque)  # not started
        self._streams = SideStreams()
        self._turns: dict[tuple[bool, int, str], Iterator[int]] = defaultdict(itertools.count)
        self._held: deque[_Sent] = deque()
        # Over gloo, which does not say what has left: messages of exchanges, until one that the peer sends in a
        # later exchange confirms them, and how many of each exchange are to be waited for.
        self._unconfirmed: dict[int, deque[tuple[int, _Sent]]] = defaultdict(deque)
        self._awaited: dict[int, int] = {}
        self._exchanges = itertools.count()
        # gloo moves host memory only; tensors of a GPU then travel by way of the host.
        self._by_host = self.backend == "gloo" and self.device.type != "cpu"

    @classmethod
    def connect(
        cls,
        groups_of_ranks: Sequence[Sequence[int]],
        device: torch.device,
        backend: str = "gloo",
        timeout_s: float = 300.0,
        patience_s: float | None = None,
        chained: bool = True,
    ) -> ProcessLinks:
        """Makes links inside each of some groups of world ranks.

        Collective: every rank of the world calls it at the same time with the same groups, because
        process groups must be made in the same order everywhere.

        Args:
            groups_of_ranks: Disjoint groups; this rank must be in one of them.
            device: Device of this rank's tensors.
            backend: "gloo" or "nccl".
            timeout_s: Limit of a wait for a message, in seconds.
            patience_s: Limit of a wait for plain objects, in seconds. If not given, it is that of the watcher where
                ranks watch each other, and else `timeout_s`.
            chained: Over NCCL, make communicators for single messages, from each position to the next and from the
                last to all, besides that for exchanges of all positions.

        Returns:
            The links of this rank's group.

        Raises:
            PipelineTimeoutError: A rank was lost.
        """
        if patience_s is None:
            patience_s = watcher.patience_s if watcher.num_ranks > 1 else timeout_s
        patience_s = max(patience_s, timeout_s)

        def group_of(ranks: Sequence[int], backend: str, limit_s: float) -> Any:
            limit = datetime.timedelta(seconds=limit_s)
            make = lambda: connected_group(list(ranks), backend, limit)
            return watcher.call("new connections", make)

        links = None
        for ranks in groups_of_ranks:
            control = group_of(ranks, "gloo", patience_s)
            together, groups = control, {}
            if backend != "gloo" and len(ranks) > 1:
                together = group_of(ranks, backend, timeout_s)
                if dist.get_rank() in ranks:  # makes its communicator
                    dist.all_reduce(torch.zeros(1, device=device), group=together)
            for a, b in itertools.permutations(range(len(ranks)), 2):
                if backend == "gloo":
                    groups[a, b] = control
                elif chained and (b == a + 1 or a == len(ranks) - 1):
                    pair = [ranks[a], ranks[b]]
                    groups[a, b] = group_of(pair, backend, timeout_s)
                    open_edge(groups[a, b], *pair, device)
            if dist.get_rank() in ranks:
                links = cls(ranks, device, backend, timeout_s, groups, control, together)
        assert links is not None, "this rank is in no group"
        return links

    def disconnect(self) -> None:
        """Destroys the groups, once every send has left."""
        self.finish()
        self.abandon()

    def abandon(self) -> None:
        """Destroys the groups as they are. Over gloo, peers that wait for this position get an error at once."""
        if "control" not in vars(self):
            return
        groups = {id(g): g for g in (*self.groups.values(), self.together, self.control)}
        self._held.clear()
        self._unconfirmed.clear()
        self._posted.clear()
        self.groups.clear()
        del self.control, self.together  # a connection breaks when nobody holds its group
        while groups:
            dist.destroy_process_group(groups.popitem()[1])

    def send(self, tensor: Tensor, to: int, kind: MessageKind) -> None:
        """Starts sending; the buffer lives until it has left."""
        self._hold(*self._start_to_send(tensor, to, kind))

    def _start_to_send(self, tensor: Tensor, to: int, kind: MessageKind) -> _Sent:
        self.is_under_way = True
        buffer = as_bytes(tensor.cpu() if self._by_host else tensor)
        group, tag = self.groups[self.rank, to], self._tag(True, to, kind, buffer)
        with self._naming(kind, to):  # the peer may have gone since the last message
            work = dist.isend(buffer, self.ranks[to], group=group, tag=tag)
        self.traffic.count_sent(buffer.numel(), kind)
        return work, [buffer]

    def start_exchange(
        self, outgoing: Mapping[int, Tensor], shapes: Mapping[int, TensorShape], kind: MessageKind
    ) -> dict[int, Incoming]:
        """Starts to send and to receive; over NCCL as one operation, in one communicator of all positions.

        Many communicators at a time could wait for each other: a GPU has few queues, and a send may stand
        after a receive that needs it at the other end.
        """
        if not self.occupies_device:  # who expects nothing cannot tell when it is over
            start = self._start_one_by_one if shapes else super().start_exchange
            return start(outgoing, shapes, kind)
        if not outgoing and not shapes:
            return {}
        self.is_under_way = True
        buffers = {to: as_bytes(tensor) for to, tensor in outgoing.items()}
        incoming = {peer: self._expected(shape, peer, kind) for peer, shape in shapes.items()}
        group, ranks = self.together, self.ranks
        operations = [
            *(dist.P2POp(dist.isend, b, ranks[to], group) for to, b in buffers.items()),
            *(dist.P2POp(dist.irecv, i.buffer, ranks[p], group) for p, i in incoming.items()),
        ]
        with self._naming(kind):
            works = dist.batch_isend_irecv(operations)
        for each in incoming.values():
            each.works = works
        for buffer in buffers.values():
            self.traffic.count_sent(buffer.numel(), kind)
        for work in works:
            self._hold(work, list(buffers.values()))
        return dict(incoming)

    def _start_one_by_one(
        self, outgoing: Mapping[int, Tensor], shapes: Mapping[int, TensorShape], kind: MessageKind
    ) -> dict[int, Incoming]:
        number = next(self._exchanges)
        # Earlier exchanges are over up to here; so they are for all who are at the same point of their programs.
        over = next(iter(self._awaited), number)
        self._awaited[number] = len(shapes)
        incoming: dict[int, Incoming] = {}
        for peer, shape in shapes.items():
            incoming[peer] = posted = self.receive(shape, peer, kind)
            posted.exchange = number, over
        for to, tensor in outgoing.items():
            self._unconfirmed[to].append((number, self._start_to_send(tensor, to, kind)))
        return incoming

    def confirm(self, source: int, number: int, over: int) -> None:
        """Drops what a peer had received when it sent its message of an exchange, which is here now."""
        self._awaited[number] -= 1
        if not self._awaited[number]:
            del self._awaited[number]
        sent = self._unconfirmed[source]
        while sent and sent[0][0] < over:
            self._await(sent.popleft()[1][0], "a sent message", None)

    def _hold(self, work: dist.Work, buffers: Sequence[Tensor]) -> None:
        self._held.append((work, buffers))
        while self._held and self._held[0][0].is_completed():
            self._await(self._held.popleft()[0], "a sent message", None)

    def receive(self, shape: TensorShape, source: int, kind: MessageKind) -> _FromProcess:
        """Posts a receive."""
        self.is_under_way = True
        incoming = self._expected(shape, source, kind)
        self._posted[source].append(incoming)
        if not self.occupies_device:
            incoming.begin()
        return incoming

    def _expected(self, shape: TensorShape, source: int, kind: MessageKind) -> _FromProcess:
        host = torch.device("cpu") if self._by_host else self.device
        buffer = torch.empty(shape.nbytes, dtype=torch.uint8, device=host)
        memory = self._streams.memory_of(buffer) if self.occupies_device else None
        return _FromProcess(self, buffer, memory, shape, source, kind)

    def begin_until(self, incoming: _FromProcess) -> None:
        """Begins the posted receives of an edge, in order, up to one of them."""
        source, posted = incoming.source, self._posted[incoming.source]
        while not incoming.works:
            first = posted.popleft()
            memory = self._streams.receiving(source, first.buffer, first.memory)
            group = self.groups[source, self.rank]
            tag = self._tag(False, source, first.kind, first.buffer)
            with self._naming(first.kind, source), memory:
                first.works = [dist.irecv(first.buffer, self.ranks[source], group=group, tag=tag)]

    def broadcast_object(self, make: Callable[[], Any]) -> Any:
        """Makes an object on position 0 and returns it on all."""
        outcome: Outcome = (None, None)
        size, source = torch.zeros(1, dtype=torch.int64), self.ranks[0]
        pickled = torch.empty(0, dtype=torch.uint8)
        if self.rank == 0:
            with watcher.working():
                outcome, pickled = _pickled(outcome_of(make))
            size += len(pickled)
        self._collective(dist.broadcast, size, source)
        if self.rank > 0:
            pickled = torch.empty(int(size), dtype=torch.uint8)
        self._collective(dist.broadcast, pickled, source)
        return value_of(outcome if self.rank == 0 else _unpickled(pickled))

    def gather_object(self, value: Any) -> list[Any]:
        """Returns plain data of all positions; what cannot be sent is an error of its position."""
        _, pickled = _pickled((value, None))
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in self.ranks]
        self._collective(dist.all_gather, sizes, torch.tensor([len(pickled)]))
        padded = torch.zeros(int(max(sizes)), dtype=torch.uint8)
        padded[: len(pickled)] = pickled
        rows = [torch.empty_like(padded) for _ in self.ranks]
        self._collective(dist.all_gather, rows, padded)
        return [value_of(_unpickled(row[:size])) for row, size in zip(rows, sizes, strict=True)]

    def _collective(self, operation: Callable[..., Any], *arguments: Any) -> None:
        with self._naming("plain data", None if self.rank == 0 else 0):
            work = operation(*arguments, group=self.control, async_op=True)
            watcher.wait(work.is_completed, "the other ranks")
            work.wait()

    def finish(self) -> None:
        """Waits until every send has left."""
        for sent in self._unconfirmed.values():
            self._held.extend(each for _, each in sent)
            sent.clear()
        while self._held:
            self._await(self._held.popleft()[0], "a sent message", None)
        self.is_under_way = False

    def _tag(self, sends: bool, peer: int, kind: MessageKind, buffer: Tensor) -> int:
        turn = next(self._turns[sends, peer, kind])
        return (_KINDS.index(kind) * _TURNS + turn % _TURNS) * _LENGTHS + len(buffer) % _LENGTHS

    def _await(self, work: dist.Work, what: str, source: int | None) -> None:
        with self._naming(what, source):
            if self.backend == "gloo":
                work.wait(datetime.timedelta(seconds=self.timeout_s))
            else:  # with a timeout NCCL would block the host; its groups have one of their own
                work.wait()

    @contextlib.contextmanager
    def _naming(self, what: str, peer: int | None = None) -> Iterator[None]:
        name = "a peer" if peer is None else f"rank {self.ranks[peer]}"
        with watcher.explaining(), naming(self.ranks[self.rank], what, name, self.timeout_s):
            yield


@dataclass
class _FromProcess:
    links: ProcessLinks
    buffer: Tensor
    memory: torch.cuda.Event | None
    shape: TensorShape
    source: int
    kind: MessageKind
    works: Sequence[dist.Work] = ()
    exchange: tuple[int, int] | None = None

    def begin(self) -> None:
        self.links.begin_until(self)

    def wait(self) -> Tensor:
        self.begin()
        for work in self.works:
            self.links._await(work, f"{self.kind} of {len(self.buffer)} bytes", self.source)
        if self.exchange is not None:
            self.links.confirm(self.source, *self.exchange)
        self.links.traffic.bytes_received[self.kind] += self.shape.nbytes
        return self.buffer.view(self.shape.dtype).view(self.shape.shape).to(self.links.device)


Outcome = tuple[Any, Exception | None]


def outcome_of(make: Callable[[], Any]) -> Outcome:
    """Calls a function, and returns its result or its exception."""
    try:
        return make(), None
    except Exception as error:
        return None, error


def _pickled(outcome: Outcome) -> tuple[Outcome, Tensor]:
    """Returns an outcome and its bytes, in place of one that cannot be pickled an error that says so."""
    try:
        pickled = pickle.dumps(outcome)
        if outcome[1] is not None:
            pickle.loads(pickled)  # an exception may take other arguments than it was given
    except Exception as error:
        reason = DiffPipeError(f"{type(outcome[1]).__name__}: {outcome[1]}")
        if outcome[1] is None:
            reason = ConfigurationError(
                f"ranks share a request, but a part of it cannot be sent to other processes: {error}; most often "
                "it is a function without a name, such as a lambda in a scheduler or an argument: take another one"
            )
        outcome = (None, reason)
        pickled = pickle.dumps(outcome)
    return outcome, torch.frombuffer(bytearray(pickled), dtype=torch.uint8)


def _unpickled(pickled: Tensor) -> Any:
    return pickle.loads(pickled.numpy().tobytes())


def value_of(outcome: Outcome) -> Any:
    """Returns the value of an outcome, or its exception."""
    value, error = outcome
    if error is not None:
        raise error
    return value
