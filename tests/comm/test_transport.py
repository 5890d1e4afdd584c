"""What a step's messages hold in memory, on a wire that knows who has read what.

`Transport` itself, all ranks in one process: `torch.distributed` is a dict here, whose works keep their
tensors, as gloo's do, and fail where a real wait would block.

Calls that may never return, each in a thread of its own.

Queues of a GPU are asked for before its first use.
"""

import contextlib
import os
import threading
import time
import weakref
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies.parallel import ParallelStrategy
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_diffpipe import DiffPipeStrategy, predictor
from lightning_diffpipe.comm import transport, waiting
from lightning_diffpipe.comm.transport import MessageKey, Transport, message_key
from lightning_diffpipe.comm.waiting import ask_for_queues, in_thread
from lightning_diffpipe.errors import ConfigurationError, ScheduleError
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


class Buffer:
    """Something whose end can be seen."""


def test_what_a_call_gives_or_raises_comes_to_who_asks():
    def fail():
        raise TimeoutError("nothing came")

    assert in_thread(lambda: 3, "test").result(5) == 3
    with pytest.raises(TimeoutError, match="nothing came"):
        in_thread(fail, "test").result(5)


def test_calls_do_not_wait_for_each_other():
    """One that was made first may end last, or never."""
    ends = [threading.Event() for _ in range(3)]
    calls = [in_thread(end.wait, "test") for end in ends]
    for end, call in reversed(list(zip(ends, calls, strict=True))):
        assert not call.done()
        end.set()
        assert call.result(5)


def test_buffers_of_a_call_that_has_returned_are_free():
    """A receive holds its buffer for as long as it waits, and no longer."""
    buffer = Buffer()
    seen, call = weakref.ref(buffer), in_thread(lambda held=buffer: bool(held), "test")
    del buffer
    assert call.result(5)
    for thread in threading.enumerate():
        if thread.name == "test":
            thread.join(5)
    assert seen() is None


QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


@pytest.fixture
def unused(monkeypatch):
    """A process that has not used CUDA, and in which nobody has said how many queues it shall have."""
    monkeypatch.setenv(QUEUES, "")  # restored after the test, whatever it sets
    monkeypatch.delenv(QUEUES)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)


@pytest.mark.parametrize(
    ("given", "is_initialized", "queues"),
    [
        (
            None,
            False,
            "32",
        ),  # History: with eight, a send could wait for a receive of another for ever.
        ("16", False, "16"),
        (None, True, None),  # processes started later would believe it
    ],
)
def test_all_queues_are_asked_for_unless_the_user_has_said_or_it_is_too_late(
    given, is_initialized, queues, unused, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_initialized)
    if given is not None:
        monkeypatch.setenv(QUEUES, given)
    assert ask_for_queues() == (queues == "32")
    assert os.environ.get(QUEUES) == queues


def test_one_queue_is_refused(unused, monkeypatch):
    """History: the value that Megatron asks for was accepted."""
    monkeypatch.setenv(QUEUES, "1")
    with pytest.raises(ConfigurationError, match=rf"{QUEUES}=1 leaves one queue .* {QUEUES}=32"):
        ask_for_queues()


@pytest.mark.parametrize(
    ("device", "ranks", "queues"), [("cuda:0", 2, "32"), ("cuda:0", 1, None), ("cpu", 2, None)]
)
def test_the_strategy_asks_before_it_sets_the_device(unused, monkeypatch, device, ranks, queues):
    class Sets(Exception):
        """Instead of setting the device."""

    def sets(strategy):
        raise Sets(os.environ.get(QUEUES))

    monkeypatch.setattr(ParallelStrategy, "setup_environment", sets)
    strategy = DiffPipeStrategy()
    strategy.parallel_devices = [torch.device(device)]
    strategy.cluster_environment = LightningEnvironment()
    strategy.cluster_environment.set_world_size(ranks)
    with pytest.raises(Sets) as error:
        strategy.setup_environment()
    assert error.value.args == (queues,)


@pytest.mark.parametrize(("world_size", "queues"), [("2", "32"), ("1", None)])
def test_a_predictor_of_several_ranks_asks_as_well(unused, monkeypatch, world_size, queues):
    monkeypatch.setenv("WORLD_SIZE", world_size)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    predictor._device("cuda:0")
    assert os.environ.get(QUEUES) == queues
