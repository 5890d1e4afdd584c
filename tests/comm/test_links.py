"""Links: order, counting, and what happens when somebody is gone."""

import datetime
import itertools
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_diffpipe.comm import links as links_module
from lightning_diffpipe.comm.links import ProcessLinks, exchange, start_all_gather
from lightning_diffpipe.comm.loopback import LoopbackNetwork
from lightning_diffpipe.comm.mesh import connected_group
from lightning_diffpipe.comm.packing import TensorShape, pack, packed_shape, unpack
from lightning_diffpipe.errors import ConfigurationError, PipelineTimeoutError
from lightning_diffpipe.planning.cluster import Link
from tests.ranks import run_ranks


def test_messages_of_a_kind_keep_their_order():
    def rank(links):
        shape = TensorShape((2,), torch.float32)
        if links.rank == 0:
            for i in range(3):
                links.send(torch.full((2,), float(i)), 1, "hidden")
            links.send(torch.full((2,), 9.0), 1, "latents")
            return None
        late = links.receive(shape, 0, "latents")
        posted = [links.receive(shape, 0, "hidden") for _ in range(3)]
        return [float(p.wait()[0]) for p in posted] + [float(late.wait()[0])]

    assert LoopbackNetwork(2).run(rank)[1] == [0.0, 1.0, 2.0, 9.0]


def test_traffic_is_counted_by_kind():
    def rank(links):
        mine = torch.zeros(links.rank + 1, dtype=torch.float64)
        shapes = [TensorShape((r + 1,), torch.float64) for r in range(3)]
        start_all_gather(links, mine, shapes, "prediction")()
        exchange(
            links,
            {0: mine} if links.rank else {},
            {1: shapes[1], 2: shapes[2]} if not links.rank else {},
            "halo",
        )
        return links.traffic

    traffic = LoopbackNetwork(3).run(rank)
    assert [t.bytes_sent["prediction"] for t in traffic] == [16, 32, 48]
    assert [t.messages_sent["prediction"] for t in traffic] == [2, 2, 2]
    assert [t.bytes_received["prediction"] for t in traffic] == [40, 32, 24]
    assert traffic[0].bytes_received["halo"] == 40


def test_a_sent_tensor_may_be_changed_by_the_receiver_only():
    def rank(links):
        x = torch.zeros(2)
        if links.rank == 0:
            links.send(x, 1, "hidden")
            return x
        got = links.receive(TensorShape.of(x), 0, "hidden").wait()
        return got.add_(1)

    sent, got = LoopbackNetwork(2).run(rank)
    assert not sent.any()
    assert got.all()


def test_an_error_on_one_rank_ends_the_others():
    def rank(links):
        if links.rank == 0:
            raise ValueError("on purpose")
        links.receive(TensorShape((1,), torch.float32), 0, "hidden").wait()

    with pytest.raises(ValueError, match="on purpose"):
        LoopbackNetwork(2).run(rank)


def test_a_refusal_on_rank_0_is_raised_everywhere():
    def refuse():
        raise ConfigurationError("no")

    def rank(links):
        with pytest.raises(ConfigurationError, match="no"):
            links.broadcast_object(refuse)
        return True

    assert LoopbackNetwork(3).run(rank) == [True] * 3


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("steps_late", "held"), [(0, [False, False, False, True]), (1, [False, True, True, True])]
)
def test_what_was_exchanged_leaves_memory_with_the_next_exchange(steps_late, held):
    """History: over gloo all that a request had sent stayed to its end, 0.7 MB a block and step of 256 tokens."""
    assert run_ranks(_held_after_exchanges, 3, steps_late) == [held] * 3


def _held_after_exchanges(rank, steps_late):
    links = ProcessLinks.connect([range(3)], torch.device("cpu"), timeout_s=20)
    sent, started = [], []
    for step in range(4):
        mine = torch.full((100,), float(step))
        sent.append(StorageWeakRef(mine.untyped_storage()))
        shapes = [TensorShape.of(mine)] * 3
        started.append(start_all_gather(links, mine, shapes, "key_value"))
        if len(started) > steps_late:
            assert [float(x[0]) for x in started.pop(0)()] == [step - steps_late] * 3
    del mine
    held = [not each.expired() for each in sent]
    for wait in started:
        wait()
    links.finish()
    started.clear()
    return held


def test_silence_times_out():
    def rank(links):
        if links.rank == 1:
            links.receive(TensorShape((1,), torch.float32), 0, "hidden").wait()

    with pytest.raises(PipelineTimeoutError, match="rank 1 waited for hidden: rank 0 sent nothing"):
        LoopbackNetwork(2, timeout_s=0.1).run(rank)


def expect_four(rank, size):
    links = ProcessLinks.connect([[0, 1]], torch.device("cpu"), timeout_s=1.0)
    waits = links.finish
    if rank == 0:
        links.send(torch.zeros(size), 1, "hidden")
    else:
        waits = links.receive(TensorShape((4,), torch.float32), 0, "hidden").wait
    try:
        return waits()
    except PipelineTimeoutError as error:
        return str(error)


@pytest.mark.distributed
@pytest.mark.parametrize("size", [3, 5])
def test_a_message_of_another_length_never_comes(size):
    """History: a longer one ended the process, of a shorter one the rest was what the memory held before."""
    _, said = run_ranks(expect_four, 2, size)
    assert "rank 1 waited for hidden of 16 bytes: rank 0 sent nothing for 1 s" in said


def test_a_limited_link_takes_its_time():
    started = time.monotonic()  # of both: the receiver's thread may start after the send

    def rank(links):
        if links.rank == 0:
            links.send(torch.zeros(1000, dtype=torch.uint8), 1, "hidden")
            return 0.0
        links.receive(TensorShape((1000,), torch.uint8), 0, "hidden").wait()
        return time.monotonic() - started

    network = LoopbackNetwork(2, link=Link(bandwidth_bytes_per_s=10_000.0, latency_s=0.05))
    assert 0.14 < network.run(rank)[1] < 5.0


@pytest.mark.slow
def test_a_rank_has_one_adapter_for_all_its_messages():
    """Two messages to two peers, at once: the second leaves after the first; those of the peers do not wait."""

    started = time.monotonic()  # of all: a receiver's thread may start after the first send

    def rank(links):
        for peer in (1, 2) if links.rank == 0 else ():
            links.send(torch.zeros(500, dtype=torch.uint8), peer, "hidden")
        if links.rank:
            links.receive(TensorShape((500,), torch.uint8), 0, "hidden").wait()
        return time.monotonic() - started

    network = LoopbackNetwork(3, link=Link(bandwidth_bytes_per_s=1_000.0))
    _, first, second = network.run(rank)
    assert 0.49 < first < second  # half a second apart, which a thread may oversleep
    assert second > 0.99


def test_messages_of_several_types_have_no_padding():
    tensors = [torch.arange(3, dtype=torch.int8), torch.randn(2, 3, dtype=torch.float64).mT]
    shapes = [TensorShape.of(x) for x in tensors]
    message = pack(tensors)
    assert packed_shape(shapes) == TensorShape((3 + 48,), torch.uint8) == TensorShape.of(message)
    for found in (unpack(message, shapes), unpack(message, shapes, copy=False)):
        for x, y in zip(tensors, found, strict=True):
            assert torch.equal(x, y)


class Wires:
    """Stands for `torch.distributed` on the first of three ranks; notes what begins where."""

    def __init__(self):
        self.started = []

    def get_rank(self):
        return 0

    def isend(self, tensor, dst, group, tag=0):
        self.started.append(("isend", dst, group))
        return SimpleNamespace(wait=lambda: True, is_completed=lambda: True)

    def irecv(self, tensor, src, group, tag=0):
        self.started.append(("irecv", src, group))
        return SimpleNamespace(wait=lambda: True, is_completed=lambda: True)

    def P2POp(self, operation, tensor, peer, group):
        return operation.__name__, peer, group

    def batch_isend_irecv(self, operations):
        self.started.append(operations)
        return [SimpleNamespace(wait=lambda: True, is_completed=lambda: True)]


@pytest.fixture
def nccl(monkeypatch):
    """Links of the first of three ranks over NCCL, and what begins."""
    wires = Wires()
    monkeypatch.setattr(links_module, "dist", wires)
    edges = {(a, b): f"{a}>{b}" for a, b in itertools.permutations(range(3), 2)}
    cpu = torch.device("cpu")
    return ProcessLinks(range(3), cpu, "nccl", 1.0, edges, "control", "all"), wires.started


def test_over_nccl_what_all_do_at_once_is_one_operation_in_one_communicator(nccl):
    """History: one communicator for each edge, of which a GPU has to run many at a time and has no queues for."""
    links, started = nccl
    shape = TensorShape((2,), torch.float32)
    parts = start_all_gather(links, torch.zeros(2), [shape] * 3, "key_value")
    whole = [("isend", 1, "all"), ("isend", 2, "all"), ("irecv", 1, "all"), ("irecv", 2, "all")]
    assert started == [whole]
    assert [len(part) for part in parts()] == [2, 2, 2]
    assert links.traffic.messages_sent == {"key_value": 2}
    assert links.traffic.bytes_sent == {"key_value": 16}
    assert links.traffic.bytes_received == {"key_value": 16}


def test_over_nccl_receives_begin_when_they_are_waited_for_in_the_order_of_their_edge(nccl):
    links, started = nccl
    shape = TensorShape((2,), torch.float32)
    first, second, other = (links.receive(shape, source, "hidden") for source in (1, 1, 2))
    assert started == []
    second.wait()
    assert started == [("irecv", 1, "1>0")] * 2
    first.wait()
    other.begin()
    other.wait()
    assert started == [*[("irecv", 1, "1>0")] * 2, ("irecv", 2, "2>0")]


@pytest.mark.parametrize(("backend", "limit_s"), [("gloo", 120.0), ("nccl", 150.0)])
def test_the_watchdog_of_nccl_comes_after_our_own_error(backend, limit_s, monkeypatch):
    """History: both had `timeout_s`, so that the process could end before it had said which rank it waited for."""
    made = []
    monkeypatch.setattr(dist, "new_group", lambda *_, timeout, **__: made.append(timeout))
    monkeypatch.setattr(dist, "barrier", lambda group: None)
    connected_group([0, 1], backend, datetime.timedelta(seconds=120.0))
    assert made == [datetime.timedelta(seconds=limit_s)]
