"""Gradients are summed in buckets, of which only some are under way at a time.

No gradient shares memory with another one, nor with a message on its way.

Microbatches of one sample, so that parameters are shaped like activations; parameters that are added to each
other, and as views. Messages are read when they are received, as late as a network may. The reference adds up
gradients of all microbatches itself, as autograd's own accumulation shares memory, too.
"""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_diffpipe.comm import mesh
from lightning_diffpipe.comm.mesh import Mesh, RankLayout
from lightning_diffpipe.comm.transport import Transport
from lightning_diffpipe.errors import PipelineTimeoutError
from lightning_diffpipe.graph.trial import hooks_off
from lightning_diffpipe.planning.schedule import Placement
from lightning_diffpipe.runtime import reduction
from lightning_diffpipe.runtime.reduction import GradientReducer, call_hooks
from tests.runtime.loopback import Loopback
from tests.zoo import in_double

NUM_BUCKETS = 40
RANKS = (0, 1)


class Sums:
    """Stands for `torch.distributed`: two ranks with the same gradients; the peer stops after some sums.

    Args:
        num_until_lost: So many.
        more: Is added to all sums: what the peer has and this rank has not.
    """

    Work = object

    def __init__(self, num_until_lost=NUM_BUCKETS, more=0):
        self.more = more
        self.num_begun, self.num_until_lost, self.most, self.num_over = 0, num_until_lost, 0, 0

    def all_reduce(self, flat, group, async_op):
        number, self.num_begun = self.num_begun, self.num_begun + 1
        self.most = max(self.most, self.num_begun - self.num_over)

        def wait(timeout):
            if number >= self.num_until_lost:
                raise RuntimeError("Connection closed by peer")
            self.num_over += 1
            flat.mul_(2).add_(self.more)

        return SimpleNamespace(wait=wait)


@pytest.fixture
def parts(monkeypatch):
    """The parameters, and how to sum their gradients: each has a bucket of its own."""
    parameters = {f"weight{i:02}": nn.Parameter(torch.zeros(3)) for i in range(NUM_BUCKETS)}
    for number, parameter in enumerate(parameters.values()):
        parameter.grad = torch.full((3,), float(number))
    monkeypatch.setattr(reduction, "_BUCKET_BYTES", 1)
    own = Mesh(
        RankLayout(2, Placement.of_replicas([2])), 0, torch.device("cpu"), "gloo", timeout_s=9.0
    )
    own._reduction[RANKS] = "group"
    reducer = GradientReducer(own, parameters, dict.fromkeys(parameters, RANKS))
    transport = Transport(own)
    return parameters, lambda: reducer.start(transport.awaited)


def poll(under_way):
    while not under_way.is_ready():
        pass


@pytest.mark.slow
@pytest.mark.parametrize("polled", [False, True])
def test_all_buckets_are_summed_and_few_are_under_way(parts, monkeypatch, polled):
    """History: what is filled into the wait ended with the first buckets, after which the rest blocked."""
    parameters, start = parts
    sums = Sums()
    monkeypatch.setattr(mesh, "dist", sums)
    under_way = start()
    if polled:
        poll(under_way)
    assert sums.num_over == (NUM_BUCKETS if polled else 0)
    under_way.wait()
    assert [p.grad.mean().item() for p in parameters.values()] == [2.0 * i for i in range(40)]
    assert sums.most == 16


@pytest.mark.slow
@pytest.mark.parametrize("num_until_lost", [0, 15, 16, 39])
@pytest.mark.parametrize("polled", [False, True])
def test_a_peer_lost_in_any_bucket_gives_the_same_error(parts, monkeypatch, num_until_lost, polled):
    """History: after the first 16 buckets a lost peer ended the run in gloo's own error, without a rank."""
    _, start = parts
    monkeypatch.setattr(mesh, "dist", Sums(num_until_lost))
    under_way = start()
    with pytest.raises(PipelineTimeoutError, match="rank 0 waited for summed gradients: lost a"):
        poll(under_way) if polled else under_way.wait()


def backward_then_hooks(weight):
    with hooks_off([weight]) as hooks:
        weight.sum().backward()  # nobody is called
        call_hooks(weight, hooks)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_that_a_hook_puts_or_removes(register):
    """History: one that was put while others were set aside was lost."""
    weight, seen = nn.Parameter(torch.zeros(2)), []

    def once(_):
        seen.append("once")
        handles["once"].remove()
        handles["later"] = getattr(weight, register)(lambda _: seen.append("later"))

    handles = {"once": getattr(weight, register)(once)}
    for _ in range(2):
        backward_then_hooks(weight)
    weight.sum().backward()
    assert seen == ["once", "later", "later"]
    handles["later"].remove()
    weight.sum().backward()
    assert len(seen) == 3


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_after_one_that_removes_itself_are_called(register):
    """History: where no hook was left, what had stood in their place stayed there for good."""
    weight, seen = nn.Parameter(torch.zeros(2)), []
    once = getattr(weight, register)(lambda _: once.remove())
    backward_then_hooks(weight)
    getattr(weight, register)(lambda _: seen.append("later"))
    backward_then_hooks(weight)
    weight.sum().backward()
    assert seen == ["later", "later"]


@pytest.mark.slow
def test_sparse_gradients_are_summed(parts, monkeypatch):
    """History: those of `nn.Embedding(sparse=True)` could not be laid out in a row."""
    parameters, start = parts
    weight = parameters["weight07"]
    weight.grad = weight.grad.to_sparse()
    monkeypatch.setattr(mesh, "dist", Sums(more=1))
    start().wait()
    assert torch.equal(weight.grad, torch.full((3,), 15.0))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", [2.0, math.inf])
def test_norms_of_all_types_are_taken_on_all_devices(device, dtype, order, monkeypatch):
    """History: on a GPU those of float64 should have become float32, which torch refuses."""
    monkeypatch.setattr(Mesh, "reduce", lambda *_, **__: None)
    layout = RankLayout(1, Placement.of_replicas([1]))
    own = Mesh(layout, 0, torch.device(device), "gloo", timeout_s=9.0)
    with FakeTensorMode():
        weight = nn.Parameter(torch.empty(3, dtype=dtype, device=device))
        weight.grad = torch.empty(3, dtype=dtype, device=device)
        reducer = GradientReducer(own, {"weight": weight}, {"weight": (0,)})
        assert reducer.global_norm({"weight": weight}, order).dtype == torch.float64


@pytest.mark.parametrize(
    ("device", "dtype"), [("cpu", "float64"), ("cuda", "float64"), ("mps", "float32")]
)
def test_numbers_are_summed_as_wide_as_a_device_can(device, dtype):
    """History: on GPUs counts above 2^24 and losses of float64 were rounded."""
    layout = RankLayout(2, Placement.of_replicas([2]))
    own = Mesh(layout, 0, torch.device(device), "gloo", timeout_s=9.0)
    assert own.number_dtype == getattr(torch, dtype)


@pytest.mark.parametrize("more", [0, 1])
def test_a_layer_that_all_holders_leave_out_gets_no_gradient(parts, monkeypatch, more):
    """History: it got zeros, by which Adam's moments and weight decay moved it, in sequences without the layer."""
    parameters, start = parts
    parameters["weight07"].grad = None
    monkeypatch.setattr(mesh, "dist", Sums(more=more))
    start().wait()
    if more:
        assert parameters["weight07"].grad.tolist() == [1.0] * 3
    else:
        assert parameters["weight07"].grad is None
    assert parameters["weight08"].grad.tolist() == [16.0 + more] * 3


LENGTH, WIDTH = 6, 4
NUM_MICROBATCHES = 4


class Positions(nn.Module):
    """A block that adds its parameters to each other and to what comes in."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.rows, self.columns = (nn.Parameter(torch.randn(LENGTH, WIDTH)) for _ in range(2))
        self.learned, self.delta = (nn.Parameter(torch.randn(1, LENGTH, WIDTH)) for _ in range(2))
        self.bias, self.shift = (
            nn.Parameter(torch.randn(WIDTH)),
            nn.Parameter(torch.randn(2, 3, WIDTH)),
        )

    def forward(self, x):
        x = x + (self.rows[None] + self.columns[None])
        x = torch.tanh(self.linear(x + (self.learned + self.delta))) + self.bias
        return x.view(-1, 2, 3, WIDTH).add(self.shift[None]).view(-1, LENGTH, WIDTH)


class Reshapes(Positions):
    """Reads its input as a view only, and adds a view: both get views of one gradient."""

    def forward(self, x):
        return super().forward(x.view(-1, LENGTH * WIDTH).add(self.rows.view(1, -1)).view_as(x))


class Chain(nn.Module):
    def __init__(self, block, num_blocks=4):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(num_blocks))


def step(module, batch):
    x = batch
    for block in module.blocks:
        x = block(x)
    return x.pow(2).mean() + sum(block.bias.sum() for block in module.blocks)


def summed_gradients(module, batch):
    names, parameters = zip(*module.named_parameters(), strict=True)
    total = [torch.zeros_like(parameter) for parameter in parameters]
    for sample in batch.split(1):
        found = torch.autograd.grad(step(module, sample) / len(batch), parameters)
        total = [a + b for a, b in zip(total, found, strict=True)]
    return dict(zip(names, total, strict=True))


SCHEDULES = {
    "1f1b": {"num_stages": 3},
    "gpipe": {"num_stages": 3},
    "zero_bubble": {"num_stages": 3},
    "interleaved": {"num_stages": 4, "num_ranks": 2},
    "v": {"num_stages": 4, "num_ranks": 2},
    "zero_bubble_v": {"num_stages": 4, "num_ranks": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("block", [Positions, Reshapes])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_parameters_shaped_like_activations(schedule, block):
    """History: one gradient of two parameters, to which all microbatches but the first were added twice."""
    torch.manual_seed(0)
    with in_double():
        module = Chain(block).double()
        batch = torch.randn(NUM_MICROBATCHES, LENGTH, WIDTH)
        expected = summed_gradients(copy.deepcopy(module), batch)
        with Loopback(
            module, step, batch, num_microbatches=NUM_MICROBATCHES, schedule=schedule,
            leaves_late=True, **SCHEDULES[schedule],
        ) as pipeline:  # fmt: skip
            pipeline.run_step(batch, 0)
            got = pipeline.gradients()
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-10, atol=1e-12, msg=name)
