"""The two halves of a backward add up to the whole, and the first does not touch weights."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from lightning_diffpipe.graph.backward import NestedExits, input_gradients


class Block(nn.Module):
    """Attention, normalisation, a conditioned residual: many kinds of autograd nodes."""

    def __init__(self, width=8):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out, self.scale = nn.Linear(width, width), nn.Linear(width, width)
        self.conv = nn.Conv1d(width, width, 3, padding=1)

    def forward(self, x, condition):
        q, k, v = (self.norm(x) * (1 + self.scale(F.silu(condition))[:, None])).chunk(3, 1)
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v))
        return x + self.conv(self.norm(x).transpose(1, 2)).transpose(1, 2)


def halves(roots, flows, inputs, module):
    found, later = input_gradients(roots, flows, inputs)
    assert all(p.grad is None for p in module.parameters()), "the first half made weight gradients"
    later.run()
    return found, {name: p.grad for name, p in module.named_parameters()}


def whole(roots, flows, inputs, module):
    for tensor in [*inputs, *module.parameters()]:
        tensor.grad = None
    torch.autograd.backward(roots, flows)
    return [x.grad for x in inputs], {name: p.grad for name, p in module.named_parameters()}


def compare(run, inputs, module):
    module.zero_grad()
    roots = run()
    flows = [torch.randn_like(root) for root in roots]
    found, weights = halves(roots, flows, inputs, module)
    expected, expected_weights = whole(run(), flows, inputs, module)
    for got, wanted in zip(found, expected, strict=True):
        assert (got is None) == (wanted is None)
        assert got is None or torch.allclose(got, wanted, rtol=1e-12, atol=1e-12)
    for name, wanted in expected_weights.items():
        got = weights[name]
        assert (got is None) == (wanted is None), name
        assert got is None or torch.allclose(got, wanted, rtol=1e-12, atol=1e-12), name


@pytest.fixture(autouse=True)
def _double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_a_chain_of_blocks_with_a_shared_conditioning_layer():
    module = nn.ModuleDict({"b": nn.ModuleList(Block() for _ in range(3)), "time": nn.Linear(4, 8)})
    x, t = torch.randn(2, 6, 8, requires_grad=True), torch.randn(2, 4)

    def run():
        condition, h = module["time"](t), x
        for block in module["b"]:
            h = block(h, condition)
        return [h]

    compare(run, [x], module)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_group_norms_in_any_memory_format(memory_format):
    """History: a ControlNet with schedule=zero_bubble ended its process in torch's kernel, without a word."""
    module = nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 8, 1), nn.GroupNorm(4, 8)
    )  # fmt: skip
    x = torch.randn(2, 4, 4, 4).to(memory_format=memory_format).requires_grad_()
    compare(lambda: [module(x)], [x], module)


class Scaled(torch.autograd.Function):
    """An operation of one's own, whose backward computes all gradients at once and is counted."""

    runs = 0

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, flow):
        Scaled.runs += 1
        x, weight = ctx.saved_tensors
        return flow * weight, (flow * x).sum((0, 1))


class OwnOperation(nn.Linear):
    def __init__(self, width):
        super().__init__(width, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return Scaled.apply(super().forward(x), self.scale.exp())


class Activated(nn.Linear):
    def forward(self, x):
        return F.silu(F.linear(x, self.weight, self.bias))


@contextlib.contextmanager
def counted_compiler(module):
    """Compiles the blocks of a module by a compiler that counts runs of their backwards."""
    runs = []

    def backward(graph, _):
        return make_boxed_func(lambda *args: runs.append(1) or graph(*args))

    compiler = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward), bw_compiler=backward
    )
    for block in module:
        block.compile(backend=compiler)
    yield runs
    torch._dynamo.reset()


def test_a_backward_that_is_one_piece_runs_once():
    """History: with zero_bubble the whole backward of a compiled block ran in both halves."""
    module = nn.Sequential(*(OwnOperation(8) for _ in range(3)))
    x = torch.randn(2, 6, 8, requires_grad=True)
    Scaled.runs = 0
    compare(lambda: [module(x)], [x], module)
    assert Scaled.runs == 2 * 3  # of the halves, and of the whole
    blocks = nn.Sequential(*(Activated(8, 8) for _ in range(3)))
    with counted_compiler(blocks) as runs:
        compare(lambda: [blocks(x)], [x], blocks)
        assert len(runs) == 2 * 3


def test_received_conditioning_and_several_outputs():
    module = nn.ModuleList(Block() for _ in range(2))
    x, c = torch.randn(2, 6, 8, requires_grad=True), torch.randn(2, 8, requires_grad=True)

    def run():
        first = module[0](x, c)
        return [module[1](first, c), first, F.silu(c)]

    compare(run, [x, c], module)


def test_tied_weights():
    module = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    module[1].weight = module[0].weight
    x = torch.randn(3, 8, requires_grad=True)
    compare(lambda: [module[1](torch.tanh(module[0](x)))], [x], module)


def test_a_first_stage_has_no_inputs_and_a_root_may_miss_them():
    module = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    data, x = torch.randn(3, 8), torch.randn(3, 8, requires_grad=True)
    compare(lambda: [module[1](torch.tanh(module[0](data)))], [], module)
    compare(lambda: [module[1](x), module[0](data)], [x], module)


def test_an_input_that_is_not_used_gets_no_gradient():
    module = nn.Linear(8, 8)
    x, y = (torch.randn(3, 8, requires_grad=True) for _ in range(2))
    compare(lambda: [module(x)], [x, y], module)


def test_a_way_that_leaves_twice_is_refused_not_counted_twice():
    """A value made from weights alone, read by two nodes, one of them through another such value."""
    module = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    x, data = torch.randn(3, 8, requires_grad=True), torch.randn(3, 8)

    def run():
        inner = module[0](data)
        outer = module[1](inner)
        return [(x * outer) + (x * x) * inner]

    with pytest.raises(NestedExits):
        halves(run(), [torch.ones(3, 8)], [x], module)


def a_sum(x, first, second):
    return (x + (first + second)) ** 2


def a_chain_of_sums(x, first, second):
    return (x + first + second) ** 2


def views(x, first, second):
    return (x.view(1, 2, 4) + (first[None] + second[None])) ** 2


def a_sum_without_weights_of_its_own(x, first, second):
    return x**2 + first.sum() + second


@pytest.mark.parametrize("step", [a_sum, a_chain_of_sums, views, a_sum_without_weights_of_its_own])
def test_gradients_of_several_microbatches_add_up(step):
    """History: two parameters that are added up got one tensor as gradient, and were added to twice."""
    weights = [torch.zeros(2, 4, requires_grad=True) for _ in range(2)]
    expected, messages, sent = [torch.zeros(2, 4) for _ in weights], [], []
    for scale in (1.0, 2.0, 3.0):
        x = torch.full((2, 4), scale, requires_grad=True)
        for total, part in zip(
            expected, torch.autograd.grad(step(x, *weights).sum(), weights), strict=True
        ):
            total += part
        loss = step(x, *weights).sum()
        found, later = input_gradients([loss], [torch.ones_like(loss)], [x])
        messages.append(found[0])
        sent.append(found[0].clone())
        later.run()
    for weight, total in zip(weights, expected, strict=True):
        assert torch.equal(weight.grad, total)
    for message, value in zip(messages, sent, strict=True):
        assert torch.equal(message, value), "what was returned has changed"
