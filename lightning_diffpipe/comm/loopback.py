"""Links between threads of one process: the network of emulators and tests.

A dict is the network. With a `Link`, messages take as long as they would on it, so that a schedule can be tried on
any number of ranks and any speed of network. Every rank has one adapter, through which all its messages leave one
after the other, whoever they are for: as with one network card in each host, or with one GPU's way to the switch.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_diffpipe.comm.links import (
    Incoming,
    Links,
    MessageKind,
    Traffic,
    outcome_of,
    value_of,
)
from lightning_diffpipe.comm.packing import TensorShape
from lightning_diffpipe.comm.waiting import in_thread, no_message
from lightning_diffpipe.planning.cluster import Link


@dataclass(eq=False)
class LoopbackNetwork:
    """Positions that are threads of one process.

    Attributes:
        link: Speed at which messages leave a rank; None means at once.
        timeout_s: Limit of any wait, in seconds.
        links: Links of each position.

    Example:
        >>> network = LoopbackNetwork(2)
        >>> def rank(links):
        ...     if links.rank == 0:
        ...         links.send(torch.arange(3), 1, "hidden")
        ...         return None
        ...     return links.receive(TensorShape((3,), torch.int64), 0, "hidden").wait().tolist()
        >>> network.run(rank)
        [None, [0, 1, 2]]
    """

    num_ranks: int
    device: torch.device | str = "cpu"
    link: Link | None = None
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        self.links = [LoopbackLinks(self, rank) for rank in range(self.num_ranks)]
        self._changed = threading.Condition()
        self._mail: dict[Any, tuple[Any, float]] = {}
        self._adapter_free_s: dict[int, float] = {}
        self._failed: int | None = None

    def run(self, function: Callable[[LoopbackLinks], Any]) -> list[Any]:
        """Calls `function(links)` for each position in a thread; returns all results, or raises the first error."""

        def main(links: LoopbackLinks) -> Any:
            try:
                return function(links)
            except BaseException:
                with self._changed:
                    self._failed = links.rank if self._failed is None else self._failed
                    self._changed.notify_all()
                raise

        ranks = [in_thread(partial(main, links), "diffpipe-rank") for links in self.links]
        wait(ranks)
        if self._failed is not None:
            ranks[self._failed].result()
        return [rank.result() for rank in ranks]

    def put(self, key: Any, value: Any, nbytes: int = 0) -> None:
        """Delivers a value; it can be taken when it would have arrived."""
        with self._changed:
            now = time.monotonic()
            if self.link is not None and nbytes:
                sender = key[0]
                start = max(now, self._adapter_free_s.get(sender, 0.0))
                self._adapter_free_s[sender] = now = start + self.link.seconds(nbytes)
            self._mail[key] = (value, now)
            self._changed.notify_all()

    def take(self, key: Any, what: str) -> Any:
        """Takes a value out of the mail, or waits for it."""
        with self._changed:
            notified = self._changed.wait_for(
                lambda: key in self._mail or self._failed is not None, self.timeout_s
            )
            if key not in self._mail:
                peer, waited_s = (self._failed, 0.0) if notified else (key[0], self.timeout_s)
                raise no_message(key[1], what, f"rank {peer}", waited_s, self.timeout_s)
            value, arrival_s = self._mail.pop(key)
        time.sleep(max(arrival_s - time.monotonic(), 0.0))
        return value


class LoopbackLinks(Links):
    """One position of a `LoopbackNetwork`."""

    def __init__(self, network: LoopbackNetwork, rank: int) -> None:
        self._network, self.rank = network, rank
        self.num_ranks, self.device = network.num_ranks, torch.device(network.device)
        self.traffic = Traffic()
        self.occupies_device = False
        self._turns: dict[tuple[bool, int, str], Iterator[int]] = defaultdict(itertools.count)

    def send(self, tensor: Tensor, to: int, kind: MessageKind) -> None:
        """Puts a copy into the peer's mail."""
        turn, nbytes = next(self._turns[True, to, kind]), TensorShape.of(tensor).nbytes
        copy = tensor.clone(memory_format=torch.contiguous_format)
        self._network.put((self.rank, to, kind, turn), copy, nbytes)
        self.traffic.count_sent(nbytes, kind)

    def receive(self, shape: TensorShape, source: int, kind: MessageKind) -> Incoming:
        """Remembers which message is meant."""
        key = source, self.rank, kind, next(self._turns[False, source, kind])
        return _FromThread(self, key, shape, kind)

    def broadcast_object(self, make: Callable[[], Any]) -> Any:
        """Makes an object on position 0 and returns it on all."""
        turn = next(self._turns[True, -1, "control"])
        if self.rank == 0:
            outcome = outcome_of(make)
            for peer in range(1, self.num_ranks):
                self._network.put((0, peer, "object", turn), outcome)
            return value_of(outcome)
        return value_of(self._network.take((0, self.rank, "object", turn), "plain data"))


@dataclass
class _FromThread:
    links: LoopbackLinks
    key: tuple[int, int, str, int]
    shape: TensorShape
    kind: MessageKind

    def begin(self) -> None:
        """Messages need no receiver to travel."""

    def wait(self) -> Tensor:
        tensor: Tensor = self.links._network.take(self.key, self.kind)
        assert TensorShape.of(tensor) == self.shape, (TensorShape.of(tensor), self.shape)
        self.links.traffic.bytes_received[self.kind] += self.shape.nbytes
        return tensor
