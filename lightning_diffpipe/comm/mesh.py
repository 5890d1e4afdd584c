"""The layout of ranks, and the process groups in which they communicate.

A world of ranks is one or more identical pipelines side by side (data parallelism), and each pipeline
places its stages on its ranks, a stage perhaps on several:

    world rank      0   1   2   3       4   5   6   7
                   └── pipeline 0 ──┘  └── pipeline 1 ──┘
    stage ranks     0   1   1   2       0   1   1   2        (stage 1 has two replicas)

Lightning and users' hooks communicate over the default group whenever they like, so nothing here ever
does: every message and every sum of ours runs in a group made here. Groups are made once, in the same
order on every rank, and connected before the first step, because lazily made connections can wait for each other.
"""

import contextlib
import datetime
import pickle
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_diffpipe.comm.packing import PickledValue, flat_bytes, pickled_value
from lightning_diffpipe.comm.waiting import in_words, lost
from lightning_diffpipe.comm.watcher import watcher
from lightning_diffpipe.errors import ConfigurationError, PipelineTimeoutError
from lightning_diffpipe.planning.schedule import Placement

ProcessGroup, Work = dist.ProcessGroup, dist.Work

_WATCHDOG_S = 30.0  # after our own error, which names a rank, NCCL's ends the process
_CLOCK_TAG, _CLOCK_ROUNDS = 3_888_888, 6


@dataclass(frozen=True)
class RankLayout:
    """Pure arithmetic of ranks: the pipeline and the stages of each, given the placement inside one pipeline."""

    world_size: int
    placement: Placement

    def __post_init__(self) -> None:
        if self.world_size % self.placement.num_ranks:
            raise ConfigurationError(
                f"a pipeline of {self.placement.num_ranks} ranks does not divide "
                f"{self.world_size} ranks; choose num_stages x num_replicas among the divisors of "
                f"{self.world_size}"
            )

    @property
    def ranks_per_pipeline(self) -> int:
        """Number of ranks that share one copy of the model."""
        return self.placement.num_ranks

    @property
    def num_pipelines(self) -> int:
        """Number of pipelines, which are trained on different data."""
        return self.world_size // self.ranks_per_pipeline

    def local_rank(self, rank: int) -> int:
        """Returns the position of a world rank inside its pipeline."""
        return rank % self.ranks_per_pipeline

    def pipeline_ranks(self, pipeline: int) -> tuple[int, ...]:
        """Returns world ranks of a pipeline, in order."""
        first = pipeline * self.ranks_per_pipeline
        return tuple(range(first, first + self.ranks_per_pipeline))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Returns the stages that a world rank holds."""
        return self.placement.stages_of(self.local_rank(rank))

    def ranks_of_stages(self, stages: Iterable[int]) -> tuple[int, ...]:
        """Returns world ranks, over all pipelines, that hold any of the given stages."""
        local = {rank for stage in stages for rank in self.placement.stage_ranks[stage]}
        return tuple(rank for rank in range(self.world_size) if self.local_rank(rank) in local)


@dataclass
class Mesh:
    """This rank's place in the layout, with the process groups it belongs to.

    Attributes:
        timeout_s: Limit of a wait inside a step, in seconds.
        control: Gloo group of this pipeline's ranks, with that limit.
        transfers: Gloo group of the same ranks, with the limit `patience_s`: for weights, and between two steps.
        world: Gloo group of all ranks, with the limit `patience_s`.
        pipeline_group: Group of this pipeline's ranks in the backend.
        data_parallel: Gloo group of the ranks at this position in all pipelines; None with one pipeline.
        evaluation: Gloo group of the same ranks, with the limit `patience_s`, as pipelines end an evaluation at
            their own pace; None with one pipeline.
        background: Gloo group of all ranks, for a thread of each during training; None until it is asked for.
        messages: Groups by edge, a pair of positions.
    """

    layout: RankLayout
    rank: int
    device: torch.device
    backend: str
    timeout_s: float
    control: dist.ProcessGroup | None = None
    transfers: dist.ProcessGroup | None = None
    world: dist.ProcessGroup | None = None
    pipeline_group: dist.ProcessGroup | None = None
    data_parallel: dist.ProcessGroup | None = None
    evaluation: dist.ProcessGroup | None = None
    background: dist.ProcessGroup | None = None
    messages: dict[tuple[int, int], dist.ProcessGroup] = field(default_factory=dict)
    _reduction: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)
    _owned: list[dist.ProcessGroup] = field(default_factory=list)

    @property
    def pipeline(self) -> int:
        """Index of this rank's pipeline, which is its data-parallel rank."""
        return self.rank // self.layout.ranks_per_pipeline

    @property
    def patience_s(self) -> float:
        """Limit of waits for a rank that may be busy for long, as between steps, in seconds."""
        return max(self.timeout_s, watcher.patience_s)

    @property
    def number_dtype(self) -> torch.dtype:
        """Type of numbers that ranks sum: float32 would round counts above 2^24. Apple's GPUs have no other."""
        return torch.float32 if self.device.type == "mps" else torch.float64

    @cached_property
    def pipeline_ranks(self) -> tuple[int, ...]:
        """World ranks of this rank's pipeline, in order."""
        return self.layout.pipeline_ranks(self.pipeline)

    @cached_property
    def local_rank(self) -> int:
        """Position of this rank in its pipeline."""
        return self.layout.local_rank(self.rank)

    def world_rank(self, local_rank: int) -> int:
        """Returns the world rank of a position in this rank's pipeline."""
        return self.pipeline_ranks[local_rank]

    def connect(self, edges: Iterable[tuple[int, int]] = ()) -> None:
        """Makes this rank's groups, for messages on `edges` (from, to) of positions; every rank calls it."""
        layout = self.layout
        for pipeline in range(layout.num_pipelines):
            ranks = layout.pipeline_ranks(pipeline)
            control = self._new_group(ranks, "gloo")
            transfers = self._patient_group(ranks)
            device_group = control if self.backend == "gloo" else self._summing_group(ranks)
            if self.rank in ranks:
                self.control, self.pipeline_group = control, device_group
                self.transfers = transfers
            for edge in sorted(set(edges)):
                source, target = (ranks[local] for local in edge)
                group = self._message_group(source, target, device_group)
                if self.rank in (source, target):
                    self.messages[edge] = group
        # No more than needed: a group of gloo is a thread that wakes a hundred times a second.
        if layout.num_pipelines == 1:
            self.world = self.transfers
            return
        self.world = self._patient_group(range(layout.world_size))
        for local in range(layout.ranks_per_pipeline):
            peers = [layout.pipeline_ranks(p)[local] for p in range(layout.num_pipelines)]
            group, evaluation = self._new_group(peers, "gloo"), self._patient_group(peers)
            if self.rank in peers:
                self.data_parallel, self.evaluation = group, evaluation

    def connect_edges(self, edges: Iterable[tuple[int, int]]) -> None:
        """Makes the groups of edges that this rank has not; every rank of the pipeline must call it at one time.

        A step with more calls than were planned sends messages along new edges.
        """
        assert self.pipeline_group is not None
        for edge in sorted(set(edges) - set(self.messages)):
            if self.local_rank in edge:
                source, target = map(self.world_rank, edge)
                self.messages[edge] = self._message_group(
                    source, target, self.pipeline_group, members_only=True
                )

    def gathered(self, numbers: Sequence[float], patient: bool = False) -> list[list[float]]:
        """Returns a few numbers of every rank of the pipeline, by position, on all of them.

        Raises PipelineTimeoutError if a rank is gone or late; `patient` where others may be busy for long.
        """
        row = torch.tensor(numbers, dtype=torch.float64)
        rows = row.new_zeros(self.layout.ranks_per_pipeline, len(row))
        with self.naming(self.pipeline_ranks, patient):
            group = self.transfers if patient else self.control
            dist.all_gather(list(rows.unbind()), row, group=group)
        return rows.tolist()

    def summed_over_pipelines(self, number: float) -> float:
        """Returns the sum of a number of all pipelines, on all; raises PipelineTimeoutError for a lost rank."""
        if self.layout.num_pipelines == 1:
            return number
        total = torch.tensor([number], dtype=torch.float64)
        with self._naming_of_position():
            dist.all_reduce(total, group=self.data_parallel)
        return float(total)

    def gathered_over_pipelines(self, value: Any) -> list[Any]:
        """Returns plain data of this position in all pipelines; errors as of `summed_over_pipelines`."""
        if self.layout.num_pipelines == 1:
            return [value]
        with self._naming_of_position():
            return gathered_objects(value, self.data_parallel)

    def _naming_of_position(self) -> contextlib.AbstractContextManager[None]:
        layout = self.layout
        peers = range(self.local_rank, layout.world_size, layout.ranks_per_pipeline)
        return self.naming(peers, patient=False)

    def connect_background(self) -> None:
        """Makes the group for a thread of each rank, unless it is there; every rank calls it."""
        if self.background is None:
            self.background = self._patient_group(range(self.layout.world_size))

    def of_rank(self, source: int, value: Any, group: ProcessGroup | None = None) -> Any:
        """Returns an object of one rank of the world on all of them, by way of the hosts, in `world` or a group.

        Raises:
            PipelineTimeoutError: A rank is gone, or did not come in half an hour.
        """
        with self.naming(range(self.layout.world_size)):
            return broadcast_object(value, source, group or self.world)

    def from_first(self, value: Any = None) -> Any:
        """Returns a value of the pipeline's first rank, a batch perhaps, on all of its ranks.

        What is on the device of the first rank comes to those of the others, and has the same strides there.

        Raises:
            ConfigurationError: It cannot be pickled.
            PipelineTimeoutError: A rank is gone, or did not come in half an hour.
        """
        if self.layout.ranks_per_pipeline == 1:
            return value
        is_first, pickled, tensors = self.local_rank == 0, None, list[Tensor]()
        try:
            if is_first:
                pickled, tensors = pickled_value(value, self.device)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise ConfigurationError(
                f"a batch cannot be sent to the other ranks of the pipeline, of which one loads for all: {error}. "
                "Let the collate_fn and the transfer hooks give tensors, numbers, strings and objects that can be "
                "pickled"
            ) from error
        with self.naming(self.pipeline_ranks):
            pickled = broadcast_object(pickled, self.world_rank(0), self.transfers)
            received = self.put_together(pickled, tensors, 0)
        return value if is_first else received

    def put_together(self, pickled: PickledValue, tensors: Sequence[Tensor], owner: int) -> Any:
        """Returns a value that the rank at a position has pickled, on all other ranks of the pipeline; collective.

        `tensors` are read on that rank, the `owner`, only.
        """
        watcher.note_batch()
        is_owner, works, source = self.local_rank == owner, list[Work](), self.world_rank(owner)
        tensors = tensors if is_owner else pickled.empty(self.device)
        for tensor in filter(Tensor.numel, tensors):
            is_ours = tensor.device.type == self.device.type
            group = self.pipeline_group if is_ours else self.transfers
            works.append(start_broadcast(flat_bytes(tensor), source, group))
        for work in works:
            work.wait()
        return None if is_owner else pickled.put_together(tensors, self.device)

    def on_first(self, value: Any, of_world: bool = False) -> list[Any]:
        """Returns plain data of every rank of the pipeline, or the world, on its first rank; empty elsewhere."""
        layout = self.layout
        size = layout.world_size if of_world else layout.ranks_per_pipeline
        if size == 1:
            return [value]
        first = 0 if of_world else self.world_rank(0)
        values: list[Any] = [None] * size if self.rank == first else []
        group = self.world if of_world else self.transfers
        dist.gather_object(value, values or None, dst=first, group=group)
        return values

    def clock_offsets_s(self) -> list[float]:
        """Estimates by how many seconds each rank's clock (`time.perf_counter`) is ahead of the first rank's.

        A few messages go there and back: the answer has the peer's time, which is taken to be half-way between
        departure and arrival of the quickest round, so that the error is at most half of that round.

            first rank   t0 ------------.                 .------------> t1
            peer                         '--> t (its) ---'               ahead by t - (t0 + t1) / 2

        Returns:
            By position on the first rank of the pipeline; empty elsewhere. A collective call.
        """
        clock, buffer = time.perf_counter, torch.zeros(1, dtype=torch.float64)
        group = self.transfers
        first, *others = self.pipeline_ranks
        if self.local_rank:
            for _ in range(_CLOCK_ROUNDS):
                dist.recv(buffer, first, group=group, tag=_CLOCK_TAG)
                dist.send(buffer.fill_(clock()), first, group=group, tag=_CLOCK_TAG)
            return []
        offsets_s = [0.0]
        for peer in others:
            rounds = []
            for _ in range(_CLOCK_ROUNDS):
                start_s = clock()
                dist.send(buffer, peer, group=group, tag=_CLOCK_TAG)
                dist.recv(buffer, peer, group=group, tag=_CLOCK_TAG)
                stop_s = clock()
                rounds.append((stop_s - start_s, float(buffer) - (start_s + stop_s) / 2))
            offsets_s.append(min(rounds)[1])
        return offsets_s

    def send_to_first(self, tensor: Tensor, of_world: bool = False) -> None:
        """Sends a tensor of the host to the first rank of the pipeline, or of the world."""
        watcher.note_batch()  # one of many that follow each other, as in the two methods below
        group = self.world if of_world else self.transfers
        dist.send(tensor, dst=0 if of_world else self.world_rank(0), group=group)

    def receive_from(self, tensor: Tensor, owner: int, of_world: bool = False) -> None:
        """Fills a tensor of the host with what a rank of the pipeline, or of the world, sends to the first one."""
        watcher.note_batch()
        group = self.world if of_world else self.transfers
        dist.recv(tensor, src=owner if of_world else self.world_rank(owner), group=group)

    def broadcast(self, tensor: Tensor, owner: int) -> None:
        """Fills a tensor of the host with that of the rank at a position, on all ranks of the pipeline."""
        watcher.note_batch()
        dist.broadcast(tensor, src=self.world_rank(owner), group=self.transfers)

    def barrier(self) -> None:
        """Waits for all ranks of the pipeline."""
        dist.barrier(group=self.transfers)

    def reduce(self, tensor: Tensor, largest: bool = False) -> None:
        """Sums a tensor of the device over the pipeline, in place; or takes the largest."""
        op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        dist.all_reduce(tensor, op=op, group=self.pipeline_group)

    @contextlib.contextmanager
    def naming(self, ranks: Iterable[int], patient: bool = True) -> Iterator[None]:
        """Turns what a broken connection or a wait in vain raises into an error that names those waited for.

        World ranks take part, this one perhaps among them; `patient`, in a group with `patience_s`, between steps.
        """
        started_s, limit_s = time.monotonic(), self.patience_s if patient else self.timeout_s
        try:
            yield
        except RuntimeError as error:
            others = [rank for rank in ranks if rank != self.rank]
            several, who = len(others) > 1, in_words(others)
            if time.monotonic() - started_s < 0.9 * limit_s:
                reason = lost("one of them" if several else who)
            else:
                limit = f"{limit_s:.0f} s" if patient else f"{limit_s:g} s (timeout_s)"
                reason = (
                    f"{'one of them' if several else 'it'} has not come so far for {limit}, and is stuck in a "
                    "callback, a hook or its data loader"
                )
            where = " between two steps" if patient else ""
            raise PipelineTimeoutError(
                f"rank {self.rank} waited for {who}{where}: {reason}"
            ) from error

    def reduction_group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """Returns the group that sums the gradients of parameters held by exactly these world ranks."""
        return self._reduction[ranks]

    def connect_reductions(self, holders: Iterable[tuple[int, ...]]) -> None:
        """Makes one group for each set of world ranks that hold the same parameters."""
        for ranks in sorted(set(holders)):
            if ranks not in self._reduction and len(ranks) > 1:
                group = self._summing_group(ranks)
                if self.rank in ranks:
                    self._reduction[ranks] = group

    def disconnect(self) -> None:
        """Destroys every group made here; the default group is not ours and stays."""
        for group in self._owned:
            dist.destroy_process_group(group)
        self._forget()

    @contextlib.contextmanager
    def reconnected(self) -> Iterator[None]:
        """Lets the ranks of a pipeline, and all ranks, communicate on the host inside, after `disconnect`.

        Every rank of the world must enter it at the same time.
        """
        for pipeline in range(self.layout.num_pipelines):
            ranks = self.layout.pipeline_ranks(pipeline)
            group = self._patient_group(ranks)
            if self.rank in ranks:
                self.control = self.transfers = self.world = group
        if self.layout.num_pipelines > 1:
            self.world = self._patient_group(range(self.layout.world_size))
        try:
            yield
        finally:
            self.disconnect()

    def abort(self) -> None:
        """Ends all communication, so that no rank waits for this one, nor this rank's device for others.

        Over gloo, closed connections end the waits of other ranks at once. Over NCCL, a receive whose message never
        comes would hold the stream, and every copy from the device with it. There all groups are aborted, the
        default one, too, as aborting one by one they could wait for each other.
        """
        if self.backend != "nccl":
            self.disconnect()
        elif dist.is_initialized():
            dist.distributed_c10d._abort_process_group()
            self._forget()

    def _forget(self) -> None:
        self._owned.clear()
        self._reduction.clear()
        self.messages.clear()
        self.control = self.transfers = self.world = self.pipeline_group = None
        self.data_parallel = self.evaluation = self.background = None

    def _message_group(
        self,
        source: int,
        target: int,
        pipeline_group: dist.ProcessGroup,
        members_only: bool = False,
    ) -> dist.ProcessGroup:
        # gloo matches messages by tag, so one group serves all edges. NCCL knows no tags and keeps
        # one queue per communicator: each direction of each edge gets its own, so that activations
        # and gradients can never wait for each other.
        if self.backend == "gloo":
            return pipeline_group
        group = self._new_group((source, target), members_only=members_only)
        open_edge(group, source, target, self.device)
        return group

    def _summing_group(self, ranks: Iterable[int]) -> dist.ProcessGroup:
        """Returns a group whose communicator exists, so that some of its ranks may exchange messages in it."""
        ranks = tuple(ranks)
        group = self._new_group(ranks)
        if self.rank in ranks and self.backend != "gloo":
            dist.all_reduce(torch.zeros(1, device=self.device), group=group)
        return group

    def _patient_group(self, ranks: Iterable[int]) -> dist.ProcessGroup:
        return self._new_group(ranks, "gloo", self.patience_s)

    def _new_group(
        self,
        ranks: Iterable[int],
        backend: str | None = None,
        timeout_s: float | None = None,
        members_only: bool = False,
    ) -> dist.ProcessGroup:
        ranks = list(ranks)
        limit = datetime.timedelta(seconds=timeout_s or self.timeout_s)
        group = connected_group(ranks, backend or self.backend, limit, members_only)
        if self.rank in ranks:
            self._owned.append(group)
        return group


def connected_group(
    ranks: Sequence[int] | None,
    backend: str,
    timeout: datetime.timedelta,
    members_only: bool = False,
) -> dist.ProcessGroup:
    """Makes a process group that is connected on all of its ranks; collective.

    Gloo returns it to each rank as soon as that rank is connected. A rank that destroyed it at once would end the
    connecting of slower ranks with "Connection closed by peer".

    Args:
        ranks: World ranks of the group; None for all.
        backend: "gloo", or "nccl", whose communicators are made by their first message.
        timeout: Limit of a wait in the group.
        members_only: Only these ranks call it; else every rank of the world must.
    """
    if backend != "gloo":
        timeout += datetime.timedelta(seconds=_WATCHDOG_S)
    group = dist.new_group(
        ranks, backend=backend, timeout=timeout, use_local_synchronization=members_only
    )
    if backend == "gloo" and group != dist.GroupMember.NON_GROUP_MEMBER:
        dist.barrier(group)
    return group


def start_sum(tensor: Tensor, group: ProcessGroup | None) -> Work:
    """Begins to sum a tensor over a group, in place: it is the sum once the work has been waited for."""
    return dist.all_reduce(tensor, group=group, async_op=True)


def start_broadcast(tensor: Tensor, source: int, group: ProcessGroup | None) -> Work:
    """Begins to fill a tensor with that of a world rank, on all ranks of a group."""
    return dist.broadcast(tensor, source, group=group, async_op=True)


def broadcast_object(value: Any, source: int, group: ProcessGroup | None) -> Any:
    """Returns plain data of one world rank on all ranks of a group; None for the default group."""
    box = [value]
    dist.broadcast_object_list(box, src=source, group=group)
    return box[0]


def gathered_objects(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Returns plain data of every rank of a group, on all of them, by rank; None for the default group."""
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def is_first_process() -> bool:
    """Returns whether this process is alone, or rank 0 of several."""
    return not dist.is_initialized() or dist.get_rank() == 0


def open_edge(group: dist.ProcessGroup, source: int, target: int, device: torch.device) -> None:
    """Passes one byte along a directed edge between world ranks, so that its communicator exists.

    On NCCL the first message makes it, and the call returns when the other end has made its own. In a
    step one rank may stand in its first receive while the other stands in another one. Called for
    all edges in one order by every rank, it cannot hang.
    """
    byte = torch.zeros(1, dtype=torch.uint8, device=device)
    if dist.get_rank() == source:
        dist.send(byte, target, group=group)
    elif dist.get_rank() == target:
        dist.recv(byte, source, group=group)
