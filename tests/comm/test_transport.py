"""What a step's messages hold in memory, on a wire that knows who has read what.

`Transport` itself, all ranks in one process: `torch.distributed` is a dict here, whose works keep their
tensors, as gloo's do, and fail where a real wait would block.
"""

import contextlib
import threading
import time
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_diffpipe.comm import transport, waiting
from lightning_diffpipe.comm.transport import MessageKey, Transport, message_key
from lightning_diffpipe.errors import ScheduleError
from lightning_diffpipe.planning.instruction import Backward, BackwardInput, Forward
from lightning_diffpipe.planning.lowering import delivered, lower
from tests.graph.steps import Skips, StableDiffusion, image_batch, rows, small_unet, step
from tests.runtime.loopback import Loopback

NUM_MICROBATCHES = 8


class Sent:
    """A work of a send, over when the peer has read."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer, self.is_over = buffer, False

    def polled(self) -> bool:
        return self.is_over

    def wait(self, timeout: Any = None) -> None:
        assert self.is_over, "waits for a message that has not arrived"


class Received:
    """A work of a receive; reads when it is asked."""

    def __init__(self, wire: dict[Any, Sent], key: Any, buffer: Tensor) -> None:
        self.wire, self.key, self.buffer, self.is_over = wire, key, buffer, False

    def polled(self) -> bool:
        if not self.is_over and self.key in self.wire:
            sent = self.wire.pop(self.key)
            self.buffer.copy_(sent.buffer)
            self.is_over = sent.is_over = True
        return self.is_over

    def wait(self, timeout: Any = None) -> None:
        assert self.polled(), "waits for a message that was not sent"


class Wire:
    """Stands for `torch.distributed` on every rank.

    A group is the edge of a message, or the number of the rank in an exchange.
    """

    Work = object

    def __init__(self) -> None:
        self.messages: dict[Any, Sent] = {}
        self.exchanged: dict[int, list[StorageWeakRef]] = defaultdict(list)

    def isend(self, buffer, dst, group, tag):
        sent = self.messages[(*group, tag)] = Sent(buffer)
        return sent

    def irecv(self, buffer, src, group, tag):
        return Received(self.messages, (*group, tag), buffer)

    def P2POp(self, operation, buffer, peer, group, tag):
        self.exchanged[group].append(StorageWeakRef(buffer.untyped_storage()))
        edge = (group, peer) if operation == self.isend else (peer, group)
        return lambda: operation(buffer, peer, edge, tag)

    def batch_isend_irecv(self, operations):
        return [operation() for operation in operations]


class PolledTransport(Transport):
    """Asks the wire whether a message is there, instead of waiting in a thread."""

    def is_ready(self, key):
        return self._posted[key].started.works[0].polled()

    def exchange(self, sends, receives):
        exchange = super().exchange(sends, receives)
        exchange.is_ready = lambda: not [w for w in exchange.works if not w.polled()]
        return exchange

    def finish(self):
        """Does not wait: ranks of one process take turns."""
        self._sent.clear()


@pytest.fixture
def wire(monkeypatch) -> Wire:
    wire = Wire()
    monkeypatch.setattr(transport, "dist", wire)
    return wire


def pipeline_on_a_wire(wire: Wire, *arguments: Any, **options: Any) -> Loopback:
    """A pipeline whose ranks send over the wire."""
    pipeline = Loopback(*arguments, **options)
    for number, rank in enumerate(pipeline.ranks):
        mesh = rank.engine.layout.mesh
        positions = range(len(pipeline.ranks))
        mesh.messages = {(a, b): (a, b) for a in positions for b in positions}
        mesh.pipeline_group = number
        confirmed = {
            message_key(wait): list(map(message_key, sends))
            for wait, sends in delivered(lower(pipeline.schedule))[number].items()
        }
        rank.engine.executor.transport = PolledTransport(mesh)
        rank.engine.executor.transport.follow(pipeline.placement.num_stages, confirmed)
    return pipeline


def watched(monkeypatch: Any, pipeline: Loopback, look: Any) -> None:
    """Calls `look(rank, instruction)` before every instruction of every rank."""
    for number, rank in enumerate(pipeline.ranks):
        executor = rank.engine.executor
        execute = executor._execute

        def run(instruction, *arguments, number=number, execute=execute):
            look(number, instruction)
            yield from execute(instruction, *arguments)

        monkeypatch.setattr(executor, "_execute", run)


def alive_of(program: Any) -> int:
    """The most microbatches of a rank that are forwarded, and whose gradients are not sent back."""
    alive = most = 0
    for instruction in program:
        alive += isinstance(instruction, Forward) - isinstance(
            instruction, Backward | BackwardInput
        )
        most = max(most, alive)
    return most


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble"])
@pytest.mark.parametrize("replicas", [(1, 1), (1, 1, 1), (2, 1)], ids=str)
def test_what_was_sent_is_not_kept_longer_than_what_waits_for_a_backward(
    wire, monkeypatch, schedule, replicas
):
    """History: all messages of a step lived until its end, so that memory grew with the number of microbatches."""
    pipeline = pipeline_on_a_wire(
        wire, Skips(), step, rows(16), len(replicas), NUM_MICROBATCHES,
        replicas=replicas, schedule=schedule,
    )  # fmt: skip
    transports = [rank.engine.executor.transport for rank in pipeline.ranks]
    most = [0] * len(transports)

    def look(rank, instruction):
        most[rank] = max(most[rank], len(transports[rank]._sent))

    watched(monkeypatch, pipeline, look)
    pipeline.run_step(rows(16), batch_index=0)
    pipeline.close()
    alive = [alive_of(program) for program in pipeline.schedule.programs]
    stage_ranks = pipeline.placement.stage_ranks
    for rank, count in enumerate(most):
        (stage,) = pipeline.placement.stages_of(rank)
        activations = alive[rank] if stage + 1 < len(replicas) else 0
        gradients = sum(alive[peer] for peer in stage_ranks[stage - 1]) if stage else 0
        assert 0 < count <= activations + gradients
        assert count < NUM_MICROBATCHES or schedule == "gpipe"


@pytest.mark.slow
def test_encodings_that_were_joined_are_not_kept_as_they_were_sent_as_well(wire, monkeypatch):
    """History: to the end of the step every rank held encodings twice, those received and those sent."""
    batch = image_batch(4)
    pipeline = pipeline_on_a_wire(wire, StableDiffusion(small_unet()), step, batch, 2, 2)
    held = []

    def look(rank, instruction):
        if isinstance(instruction, Forward):
            held.append(sum(not exchanged.expired() for exchanged in wire.exchanged[rank]))

    watched(monkeypatch, pipeline, look)
    pipeline.run_step(batch, batch_index=0)
    pipeline.close()
    assert all(len(exchanged) for exchanged in wire.exchanged.values())
    assert held == [0] * 4


class Stream:
    """Stands for a stream of a GPU; notes what is asked of it."""

    def __init__(self, notes: list[str], name: str) -> None:
        self.notes, self.name = notes, name

    def record_event(self):
        self.notes.append(f"{self.name} stamps")
        return self.name

    def wait_event(self, event):
        self.notes.append(f"{self.name} waits for {event}")

    def __enter__(self):
        self.notes.append(f"in {self.name}")

    def __exit__(self, *error):
        self.notes.append("out")


def test_over_nccl_a_posted_receive_has_memory_and_begins_where_it_is_due(monkeypatch):
    """History: it began when it was posted, and occupied the device before what it depends on."""
    notes: list[str] = []
    cuda = SimpleNamespace(
        current_stream=lambda device: Stream(notes, "compute"),
        Stream=lambda device: Stream(notes, "side"),
        stream=lambda stream: stream,
    )
    work = SimpleNamespace(wait=lambda: notes.append("waited"))
    dist = SimpleNamespace(irecv=lambda *_, **__: notes.append("begins") or work)
    monkeypatch.setattr(waiting, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(transport, "dist", dist)
    mesh = SimpleNamespace(
        timeout_s=1.0, backend="nccl", device=SimpleNamespace(type="cuda"), rank=1, local_rank=1,
        messages={(0, 1): None}, world_rank=lambda position: position,
    )  # fmt: skip
    keys = [MessageKey("activation", 1, microbatch) for microbatch in range(2)]
    ranks_own = Transport(mesh)
    ranks_own.follow(2, receives_before={Backward(1, 0): keys[:1]})
    for key in keys:
        ranks_own.receive(key, SimpleNamespace(is_cuda=True, device="cuda"), 0)
    assert notes == ["compute stamps"] * 2
    ranks_own.come_to(Forward(1, 0))
    assert notes == ["compute stamps"] * 2
    begins = ["side waits for compute", "in side", "begins", "out"]
    ranks_own.come_to(Backward(1, 0))
    assert notes[2:] == begins
    ranks_own.wait(keys[0])
    ranks_own.wait(keys[1])  # nobody said where it is due
    assert notes[6:] == ["waited", *begins, "waited"]


def test_sums_are_waited_for_on_behalf_of_the_stream_that_computes(monkeypatch):
    """History: over gloo the thread that waits let its own stream wait, not the one that reads the sum."""
    notes: list[str] = []
    mine = threading.get_ident()

    def current_stream(device):
        assert threading.get_ident() == mine
        return Stream(notes, f"compute of {device.index}")

    cuda = SimpleNamespace(current_stream=current_stream, stream=lambda stream: stream)
    monkeypatch.setattr(waiting, "torch", SimpleNamespace(cuda=cuda))
    mesh = SimpleNamespace(
        timeout_s=1.0, backend="gloo", device=torch.device("cuda", 1), local_rank=0, rank=0
    )
    work = SimpleNamespace(wait=lambda timeout: notes.append("waited"))
    transport_of_rank = Transport(mesh)
    exchange = transport_of_rank.awaited([work], "gradients", lambda: notes.append("read"))
    while not exchange.is_ready():
        time.sleep(1e-3)
    exchange.wait()
    assert notes == ["in compute of 1", "waited", "out", "read"]


def test_a_receive_that_begins_before_an_earlier_one_of_its_sender_is_refused(wire):
    """History: messages of NCCL have no names, so that two of equal size would have been swapped."""
    pipeline = pipeline_on_a_wire(wire, Skips(), step, rows(4), 2, 2)
    carrier = pipeline.ranks[1].engine.executor.transport
    carrier.blocks_host = False  # as over NCCL
    carrier._streams = SimpleNamespace(
        memory_of=lambda buffer: None, receiving=lambda *about: contextlib.nullcontext()
    )
    first, second = (MessageKey("activation", 1, microbatch) for microbatch in range(2))
    for key in (first, second):
        carrier.receive(key, torch.zeros(4, dtype=torch.uint8), 0)
    with pytest.raises(ScheduleError, match=r"microbatch=1.* of rank 0 before .*microbatch=0"):
        carrier.wait(second)
    pipeline.close()
