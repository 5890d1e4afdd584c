"""All ranks of a pipeline in one process: engines of copies of one module, messages through a dict.

Everything but the network and the sums of gradients is what a real rank runs: placeholders for foreign
parameters, frozen parts shared out over the ranks, lowered programs, executors, stashes, messages. Dummies
are NaN. So a model that trains here as one process would has been cut, packed and scheduled correctly.

    pipeline = Loopback(module, step, batch, num_stages=3, num_microbatches=3)
    loss = pipeline.run_step(batch, batch_index=0)      # gradients are in .grad of every rank's module
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_diffpipe.comm.mesh import Mesh, RankLayout
from lightning_diffpipe.comm.transport import MessageKey, Parcel, PendingWork
from lightning_diffpipe.errors import ScheduleError
from lightning_diffpipe.graph.interception import Interception
from lightning_diffpipe.graph.layer import LayerGraph
from lightning_diffpipe.graph.placement import place_parameters
from lightning_diffpipe.graph.probe import fold, probe
from lightning_diffpipe.graph.step import batch_signature, take_samples
from lightning_diffpipe.planning.instruction import Encode, Instruction, Program, ShareResults
from lightning_diffpipe.planning.schedule import Placement
from lightning_diffpipe.planning.schedules import SCHEDULES
from lightning_diffpipe.runtime.batch_layout import BatchLayout, num_samples
from lightning_diffpipe.runtime.bubbles import FrozenWork
from lightning_diffpipe.runtime.engine import Engine
from lightning_diffpipe.runtime.executor import Executor, Works
from lightning_diffpipe.runtime.free_running import FreeRunningEngine
from lightning_diffpipe.runtime.partitioned import PartitionedStepCache, cut_for
from lightning_diffpipe.runtime.reduction import holders_of
from lightning_diffpipe.runtime.stage import PartitionedStep

CPU = torch.device("cpu")


class LoopbackTransport:
    """All ranks of a pipeline in one process; messages are copied through a shared dict.

    Args:
        network: The dict that all ranks of the pipeline share.
        rank: This rank's position.
    """

    def __init__(self, network: dict[tuple[int, MessageKey], Tensor], rank: int) -> None:
        self._network = network
        self._rank = rank
        self._posted: dict[MessageKey, Tensor] = {}
        self.num_bytes_sent = 0

    def send(self, key: MessageKey, buffer: Tensor, to: int) -> None:
        """Puts a copy of the buffer into the peer's mailbox."""
        self._network[to, key] = buffer.clone()
        self.num_bytes_sent += buffer.numel()

    def receive(self, key: MessageKey, buffer: Tensor, source: int) -> None:
        """Remembers where the message shall go."""
        self._posted[key] = buffer

    def come_to(self, instruction: Instruction) -> None:
        """Begins posted receives that are due before an instruction, to which this rank's program has come."""

    def is_ready(self, key: MessageKey) -> bool:
        """Returns whether the peer has sent."""
        return (self._rank, key) in self._network

    def wait(self, key: MessageKey) -> Tensor:
        """Takes the message out of the mailbox; the caller has checked `is_ready`."""
        buffer = self._posted.pop(key)
        buffer.copy_(self._network.pop((self._rank, key)))
        return buffer

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> PendingWork:
        """Puts all sends into their mailboxes."""
        for parcel in sends:
            self.send(parcel.key, parcel.buffer, parcel.peer)
        for parcel in receives:
            self.receive(parcel.key, parcel.buffer, parcel.peer)
        return _LoopbackWork(self, [parcel.key for parcel in receives])

    def awaited(self, works: Sequence[Any], what: str, then: Any = None) -> PendingWork:
        """Raises, as nothing is started elsewhere in one process."""
        raise NotImplementedError(f"no {what} between processes in one process")

    def follow(self, *_facts: Any) -> None:
        """Mailboxes need to know no schedule."""

    def finish(self) -> None:
        """Does nothing, as sends are copies."""


@dataclass
class _LoopbackWork:
    transport: LoopbackTransport
    keys: list[MessageKey]

    def is_ready(self) -> bool:
        return all(map(self.transport.is_ready, self.keys))

    def wait(self) -> None:
        for key in self.keys:
            self.transport.wait(key)


class LateTransport(LoopbackTransport):
    """Reads a message as late as a network may: who changes its buffer meanwhile is found out."""

    def send(self, key: MessageKey, buffer: Tensor, to: int) -> None:
        self._network[to, key] = buffer


def run_together(
    executors: Sequence[Executor],
    programs: Sequence[Program],
    works: Sequence[Works],
    frozen: Sequence[FrozenWork | None],
) -> None:
    """Drives all ranks of a pipeline in one process, on a `LoopbackTransport`.

    Loss and metrics are not shared: they can be read where they are.

    Raises:
        ScheduleError: No rank can go on: the programs wait for each other.
    """
    programs = [tuple(i for i in p if not isinstance(i, ShareResults)) for p in programs]
    for executor in executors:
        executor.begin()
    running = {
        executor.local_rank: executor.run(*arguments)
        for executor, *arguments in zip(executors, programs, works, frozen, strict=True)
    }
    ready: dict[int, Callable[[], bool]] = dict.fromkeys(running, lambda: True)
    while running:
        movable = [rank for rank in running if ready[rank]()]
        if not movable:
            stuck = ", ".join(
                f"rank {rank} at {programs[rank][executors[rank].position]}" for rank in running
            )
            raise ScheduleError(f"the ranks wait for each other: {stuck}")
        for rank in movable:
            try:
                ready[rank] = next(running[rank]).is_ready
            except StopIteration:
                del running[rank]


class SumBetweenCopies:
    """Stands in for `GradientReducer`: notes that a rank asked, and sums when all have."""

    def __init__(self) -> None:
        self.calls = 0

    def start(self, awaited: Any) -> None:
        self.calls += 1

    def sum(self, ranks: Sequence[Rank], holders: dict[str, tuple[int, ...]]) -> None:
        """Gives every holder of a parameter the sum of the gradients of all of them."""
        assert self.calls == len(ranks), "every rank must reduce exactly once in a step"
        self.calls = 0
        for name, positions in holders.items():
            parameters = [ranks[position].trained[name] for position in positions]
            gradients = [p.grad for p in parameters if p.grad is not None]
            for parameter in parameters:
                parameter.grad = sum(gradients[1:], gradients[0]) if gradients else None


@dataclass
class Rank:
    """One copy of the module and what it holds."""

    module: nn.Module
    engine: Engine
    interception: Interception
    trained: dict[str, nn.Parameter]


Known = dict[str, dict[tuple[str, ...], LayerGraph]]
"""Graphs by the signature of a microbatch and the layers that are called."""


class SharedSteps(PartitionedStepCache):
    """The cut steps of a rank that takes the graphs of new sizes from ranks that have probed them."""

    def __init__(self, known: Known, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._known = known

    def of(self, microbatch: Any, *arguments: Any, **options: Any) -> PartitionedStep:
        shared = self._known.setdefault(batch_signature(microbatch), {})
        for graph in shared.values():
            self._add(graph)
        partitioned = super().of(microbatch, *arguments, **options)
        shared[partitioned.graph.layer_names] = partitioned.graph
        return partitioned


class Loopback:
    """A pipeline in one process.

    Args:
        module: Is copied for every rank and stays untouched.
        step: Module and batch to loss.
        batch: Tells the layers; its first `num_probed` samples are probed.
        num_stages: Stages of the evenly cut path.
        num_microbatches: Microbatches of every batch.
        num_ranks: Ranks that hold several stages each.
        replicas: Ranks for each stage; one each if not given.
        schedule: Name of a schedule.
        seed: Seed of the run.
        max_share: Granularity of the graph.
        num_probed: Samples of the probed microbatch.
        fine: The probed graph, if another pipeline of the same module has probed it.
        shares_probes: One rank probes microbatches of other sizes for all; else each does, as processes do.
        leaves_late: Messages are read when they are received, not when they are sent.
    """

    def __init__(
        self,
        module: nn.Module,
        step: Callable[[Any, Any], Any],
        batch: Any,
        num_stages: int,
        num_microbatches: int,
        *,
        num_ranks: int | None = None,
        replicas: Sequence[int] | None = None,
        schedule: str = "1f1b",
        seed: int = 5,
        max_share: float = 1 / 32,
        num_probed: int = 2,
        fine: LayerGraph | None = None,
        shares_probes: bool = False,
        leaves_late: bool = False,
    ) -> None:
        small = take_samples(batch, num_samples(batch), num_probed)
        self.fine = fine or probe(module, step, small, max_share=max_share)
        size = len(self.fine.path)
        positions = tuple(size * stage // num_stages for stage in range(1, num_stages))
        self.graph, positions = fold(module, step, small, self.fine, positions)
        self.spec = SCHEDULES[schedule]
        self.placement = Placement.of_replicas(replicas or [1] * num_stages)
        if num_ranks is not None:
            self.placement = self.spec.place(num_stages, num_ranks)
        self.schedule = self.spec(self.placement, num_microbatches)
        self.pieces = cut_for(self.graph, positions, self.placement)
        self.reducer = SumBetweenCopies()
        self.transport = LateTransport if leaves_late else LoopbackTransport
        self.known: Known | None = {} if shares_probes else None
        network: dict[Any, Tensor] = {}
        self.ranks = [
            self._rank(module, step, positions, rank, network, seed)
            for rank in range(self.placement.num_ranks)
        ]
        mesh = self.ranks[0].engine.layout.mesh
        self.holders = dict(holders_of(self.pieces, mesh, self.graph.trained))

    def _rank(self, module, step, positions, rank, network, seed) -> Rank:
        root, graph, placement = copy.deepcopy(module), self.graph, self.placement
        stages = [self.pieces.stages[stage].parameters for stage in placement.stages_of(rank)]
        resident = frozenset().union(self.pieces.frozen.parameters, *stages)
        interception = Interception(root).install()
        place_parameters(root, resident, CPU)
        make = PartitionedStepCache if self.known is None else partial(SharedSteps, self.known)
        steps = make(root, step, graph, positions, placement, rank, interception, CPU)
        mesh = Mesh(RankLayout(placement.num_ranks, placement), rank, CPU, "gloo", 1.0)
        layout = BatchLayout(root, step, self.schedule, steps, mesh, seed)
        parameters = dict(root.named_parameters())
        trained = {name: parameters[name] for name in graph.trained & resident}
        transport, staleness = self.transport(network, rank), self.spec.staleness
        if staleness is None:
            engine = Engine(layout, self.reducer, transport=transport)
        else:
            own = list(trained.values())
            engine = FreeRunningEngine(
                layout, self.reducer, own, staleness(placement, rank), transport=transport
            )
        return Rank(root, engine, interception, trained)

    def run_step(self, batch: Any, batch_index: int) -> float:
        """Runs one batch on all ranks; returns its mean loss and leaves summed gradients."""
        steps = [rank.engine.layout.lay_out(batch, batch_index) for rank in self.ranks]
        for rank, step in zip(self.ranks, steps, strict=True):
            rank.engine.layout.weigh(step.works)
        run_together(
            [rank.engine.executor for rank in self.ranks],
            [step.program for step in steps],
            [step.works for step in steps],
            [step.frozen for step in steps],
        )
        self.reducer.sum(self.ranks, self.holders)
        works = [work for step in steps for work in step.works if work.loss is not None]
        assert len(works) == len(steps[0].works), "each microbatch has one loss"
        self.encodes = [sum(isinstance(i, Encode) for i in step.program) for step in steps]
        return float(sum(work.loss * work.loss_scale for work in works))

    def advance(self, batch: Any, batch_index: int) -> float:
        """Without a flush: forwards a batch on all ranks, each takes back what is due; returns its loss."""
        started = [rank.engine.begin(batch, batch_index) for rank in self.ranks]
        self._run_freely([program for _, program, _ in started], [frozen for *_, frozen in started])
        return float(
            sum(w.loss * w.loss_scale for works, *_ in started for w in works if w.loss is not None)
        )

    def drain(self) -> None:
        """Takes back what is under way on all ranks."""
        self._run_freely(
            [rank.engine.begin_drain() for rank in self.ranks], [None] * len(self.ranks), True
        )
        for rank in self.ranks:
            rank.engine.end_drain()

    def _run_freely(self, programs, frozen, flushes=False) -> None:
        for rank in self.ranks:
            rank.engine.executor.flushes = flushes
        works = [rank.engine._works for rank in self.ranks]
        run_together([rank.engine.executor for rank in self.ranks], programs, works, frozen)

    def gradients(self) -> dict[str, Tensor]:
        """Gradients by name; all holders of a parameter must have the same."""
        whole: dict[str, Tensor] = {}
        for rank in self.ranks:
            for name, parameter in rank.trained.items():
                if parameter.grad is None:
                    continue
                assert name not in whole or torch.equal(whole[name], parameter.grad)
                whole[name] = parameter.grad
        return whole

    def weights(self) -> dict[str, Tensor]:
        """Trained parameters by name; all holders must have the same values."""
        whole: dict[str, Tensor] = {}
        for rank in self.ranks:
            for name, parameter in rank.trained.items():
                value = parameter.detach()
                assert name not in whole or torch.equal(whole[name], value)
                whole[name] = value
        return whole

    def optimizers(self, make: Callable[[Iterable[nn.Parameter]], Any]) -> list[Any]:
        """One optimizer for each rank, over all parameters of its module, as Lightning makes it."""
        return [make(rank.module.parameters()) for rank in self.ranks]

    def zero_grad(self) -> None:
        """Forgets the gradients of all ranks."""
        for rank in self.ranks:
            rank.module.zero_grad(set_to_none=True)

    def close(self) -> None:
        """Puts back what is patched globally."""
        for rank in self.ranks:
            rank.interception.uninstall()

    def __enter__(self) -> Loopback:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
