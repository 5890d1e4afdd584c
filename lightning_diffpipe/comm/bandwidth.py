"""Speeds at which the ranks that are present talk to each other, and read host memory: as a `Cluster`.

Point-to-point: a message goes there and back again between two ranks, in several sizes; half of that is
one way, from tensors to tensors: packing them into one buffer and unpacking them belongs to a message as much
as the wire does. All-reduce: all ranks sum a buffer. Where there are several hosts, either is timed inside the
first one and between hosts. Through the medians of each size goes the line `latency + bytes / bandwidth`, fitted
so that relative errors count, since small messages matter as much as large ones. All ranks take part and all
get rank 0's answer, so that they plan the same.
"""

import contextlib
import itertools
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist

from lightning_diffpipe.comm.mesh import broadcast_object, gathered_objects
from lightning_diffpipe.comm.packing import MessageLayout
from lightning_diffpipe.graph.layer import TensorSpec
from lightning_diffpipe.planning.cluster import Cluster, Link

SIZES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22)
"""Bytes of the messages that are timed."""

_TAG = 3_777_777
_EQUAL_MEMORY = 1.05  # cards of one kind differ by some megabytes
_MIN_REPEATS, _MAX_REPEATS = 3, 20
_BUDGET_OF_TRAINING_S = 0.5
_LONGEST_MESSAGE_S = 2.0
_NUM_TENSORS, _CACHED_BYTES, _COPIED_BYTES = 4, 1 << 25, 1 << 24
_HELD_BACK_SHARE, _HELD_BACK_BYTES = 0.08, 1 << 30

_Load = TypeVar("_Load")


def measure_cluster(
    group: dist.ProcessGroup | None,
    device: torch.device,
    *,
    sizes: Sequence[int] = SIZES,
    budget_s: float = 2.0,
) -> Cluster:
    """Measures the links among the ranks of a group. A collective call.

    Args:
        group: All ranks of the run, in the backend that training uses; None means one rank.
        device: Device of messages in training.
        sizes: Bytes of the messages to time; two different ones at least.
        budget_s: Seconds to spend, about.

    Returns:
        The same cluster on all ranks, with the memory of their devices as its limit.
    """
    if group is None or dist.get_world_size(group) == 1:
        rate = host_bytes_per_s(device)
        return Cluster(1, memory_bytes=memory_bytes(device), host_bytes_per_s=rate)
    bench = _LinkBench(group, device, sizes)
    hosts = gathered_objects(socket.gethostname(), group)
    num_ranks, per_host = len(hosts), _ranks_per_host(hosts)
    several = per_host is not None and per_host > 1
    each_s = budget_s / (4 if several else 2)
    # Hosts that are no regular grid are planned as one, whose links are all those between hosts.
    first_elsewhere = next((rank for rank, host in enumerate(hosts) if host != hosts[0]), 1)
    p2p = bench.point_to_point(1 if several else first_elsewhere, each_s)
    between, reduce_between = None, None
    all_reduce = bench.all_reduce(num_ranks, each_s)
    if several:
        between = bench.point_to_point(first_elsewhere, each_s)
        reduce_between, all_reduce = all_reduce, bench.all_reduce(per_host, each_s)
    cluster = Cluster(
        num_ranks,
        ranks_per_host=per_host,
        # gloo sends by copies that the calling rank makes.
        p2p=replace(p2p, holds_sender=dist.get_backend(group) == "gloo"),
        p2p_between_hosts=between,
        all_reduce=all_reduce,
        all_reduce_between_hosts=reduce_between,
    )
    cluster = with_memory(cluster, group, device)
    dist.barrier(group)  # all copy at once, as they do in training
    rate = min(gathered_objects(host_bytes_per_s(device), group))
    cluster = replace(cluster, host_bytes_per_s=rate)
    return broadcast_object(cluster, dist.get_global_rank(group, 0), group)


def measure_links(backend: str, device: torch.device) -> Cluster:
    """Measures the links between all ranks in a group of its own; collective."""
    group = dist.new_group(backend=backend)
    cluster = measure_cluster(group, device, budget_s=_BUDGET_OF_TRAINING_S)
    dist.destroy_process_group(group)
    return cluster


def measure_launched(device: torch.device, patience: timedelta) -> Cluster:
    """Measures the links between processes that a launcher has started, and that have not met; collective."""
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=patience)
    try:
        return measure_cluster(dist.group.WORLD, device)
    finally:
        dist.destroy_process_group()


def fit_link(times: Sequence[tuple[float, float]]) -> Link:
    """Returns the line through `(bytes, seconds)` with the smallest relative errors.

    Example:
        >>> link = fit_link([(1000, 0.0011), (100_000, 0.0110), (1_000_000, 0.1010)])
        >>> round(link.latency_s, 4), round(link.bandwidth_bytes_per_s / 1e6)
        (0.001, 10)
    """
    sizes, times_s = torch.tensor(times, dtype=torch.float64).T
    times_s = times_s.clamp(min=1e-9)
    of_times = torch.stack([1 / times_s, sizes / times_s], 1)  # both terms, relative to the time
    ones = torch.ones(len(of_times), 1, dtype=torch.float64)
    latency_s, slope = torch.linalg.lstsq(of_times, ones).solution.flatten().tolist()
    if latency_s < 0:  # then the best line through the origin
        latency_s, slope = 0.0, torch.linalg.lstsq(of_times[:, 1:], ones).solution.item()
    if slope <= 0:  # larger messages took no longer: too noisy or too small to tell
        return Link(latency_s=float(times_s.pow(-1).sum() / times_s.pow(-2).sum()))
    return Link(1 / slope, latency_s)


class _TensorSets:
    """Sets of tensors, each of which is sent as one message, as a stage sends the tensors of a boundary.

    They are packed in turn, as in training, where the processor's caches hold other data by the time of a message.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.device = device
        sets = max(1, min(_MAX_REPEATS, _CACHED_BYTES // size))
        shape = (_NUM_TENSORS, size // (4 * _NUM_TENSORS))
        tensors = [torch.zeros(shape, device=device).unbind() for _ in range(sets)]
        self._sets = itertools.cycle(tensors)
        self.layout = MessageLayout.of([TensorSpec.of(tensor) for tensor in next(self._sets)])

    def packed(self) -> torch.Tensor:
        """Returns the next set in a buffer of its own."""
        return self.layout.pack(next(self._sets), self.device)


class _LinkBench:
    """One rank's side of the measurement."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, sizes: Sequence[int]
    ) -> None:
        self._group, self._sizes = group, sizes
        self._rank = dist.get_rank(group)
        self._ranks = dist.get_process_group_ranks(group)
        # gloo moves host memory; what a GPU sends over it is copied to the host first.
        self._device = torch.device("cpu") if dist.get_backend(group) == "gloo" else device

    def point_to_point(self, peer: int, budget_s: float) -> Link:
        """Times half of the way from rank 0 to a peer and back; the other ranks just wait."""
        group, ranks = self._group, self._ranks

        def sent(message: _TensorSets, to: int) -> None:
            dist.send(message.packed(), ranks[to], group=group, tag=_TAG)

        def received(message: _TensorSets, source: int) -> None:
            buffer = message.layout.empty(message.device)
            dist.recv(buffer, ranks[source], group=group, tag=_TAG)
            message.layout.unpack(buffer)

        def there_and_back(message: _TensorSets) -> None:
            if self._rank == 0:
                sent(message, peer)
                received(message, peer)
            elif self._rank == peer:
                received(message, 0)
                sent(message, 0)

        times = self._times(there_and_back, partial(_TensorSets, device=self._device), budget_s)
        return fit_link([(size, seconds / 2) for size, seconds in times])

    def all_reduce(self, num_ranks: int, budget_s: float) -> Link:
        """Times a sum over the first ranks, in which every byte passes `2 (n - 1) / n` times; others just wait."""
        with self._first(num_ranks) as group:

            def summed(buffer: torch.Tensor) -> None:
                if self._rank < num_ranks:
                    dist.all_reduce(buffer, group=group)

            make = lambda size: torch.zeros(size // 4, device=self._device)
            times = self._times(summed, make, budget_s)
        return fit_link([(2 * (num_ranks - 1) / num_ranks * size, s) for size, s in times])

    @contextlib.contextmanager
    def _first(self, num_ranks: int) -> Iterator[dist.ProcessGroup]:
        """Returns the group of the first ranks; every rank makes it, also one that is not in it."""
        if num_ranks == len(self._ranks):
            yield self._group
            return
        ranks, backend = self._ranks[:num_ranks], dist.get_backend(self._group)
        group = dist.new_group(ranks, backend=backend)
        try:
            yield group
        finally:
            dist.destroy_process_group(group)

    def _times(
        self, run: Callable[[_Load], None], make: Callable[[int], _Load], budget_s: float
    ) -> list[tuple[int, float]]:
        each_s = budget_s / len(self._sizes)
        medians_s: list[tuple[int, float]] = []
        for size in self._sizes:
            # Two make a line; a slow link would take minutes for the others.
            if len(medians_s) >= 2:
                before, last_s = medians_s[-1]
                next_s = last_s * size / before
                ends = torch.tensor([next_s > _LONGEST_MESSAGE_S], device=self._device)
                dist.broadcast(ends, src=self._ranks[0], group=self._group)
                if ends:
                    break
            timed_s = partial(self._timed_s, partial(run, make(size)))
            timed_s()  # warm-up: connections are made
            count = int(each_s / max(timed_s(), 1e-6))
            count = min(max(count, _MIN_REPEATS), _MAX_REPEATS)
            repeats = torch.tensor([count], device=self._device)
            dist.broadcast(repeats, src=self._ranks[0], group=self._group)
            medians_s.append((size, statistics.median(timed_s() for _ in range(int(repeats)))))
            del timed_s  # and its load, before the next one is made
        return medians_s

    def _timed_s(self, run: Callable[[], None]) -> float:
        dist.barrier(self._group)
        start_s = time.perf_counter()
        run()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - start_s


def _ranks_per_host(hosts: Sequence[str]) -> int | None:
    """Returns ranks of each host, if hosts hold equally many consecutive ranks; None for one host."""
    count = hosts.count(hosts[0])
    starts = range(0, len(hosts), count)
    regular = len(hosts) % count == 0 and all(len({*hosts[s : s + count]}) == 1 for s in starts)
    return count if regular and count < len(hosts) else None


def memory_bytes(device: torch.device) -> int | None:
    """Returns what plans may use of a GPU's memory; None for other devices, which set no limit.

    8 % of the card are held back, 1 GiB at least. Plans do not count the CUDA context and the kernels loaded
    into it (0.3 to 0.7 GiB), buffers of NCCL, workspaces of cuBLAS and cuDNN, gradients on their way to be
    summed (up to 16 buckets of 32 MiB) and what the allocator cannot hand out in one piece.
    """
    if device.type != "cuda":
        return None
    total = int(torch.cuda.get_device_properties(device).total_memory)
    return total - max(round(_HELD_BACK_SHARE * total), _HELD_BACK_BYTES)


def host_bytes_per_s(device: torch.device) -> float:
    """Returns the rate of copies from host memory, pinned where that is of use, to a device."""
    source = torch.ones(_COPIED_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target, times_s = torch.empty_like(source, device=device, pin_memory=False), list[float]()
    for _ in range(1 + _MIN_REPEATS):  # in the first one, pages are touched for the first time
        start_s = time.perf_counter()
        target.copy_(source)  # waits until it is done
        times_s.append(time.perf_counter() - start_s)
    return _COPIED_BYTES / statistics.median(times_s[1:])


def with_memory(cluster: Cluster, group: dist.ProcessGroup | None, device: torch.device) -> Cluster:
    """Returns a cluster with `memory_bytes`, what a plan may use on each rank of a group; a collective call."""
    limit = memory_bytes(device)
    of_ranks = [limit] if group is None else gathered_objects(limit, group)
    limits = [limit for limit in of_ranks if limit is not None]
    if not limits:
        return cluster
    if max(limits) <= _EQUAL_MEMORY * min(limits):
        return replace(cluster, memory_bytes=min(limits))
    return replace(cluster, rank_memory_bytes=tuple(limits))
