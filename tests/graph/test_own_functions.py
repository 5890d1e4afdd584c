"""Layers that a model calls inside an autograd function of its own, as CompVis' checkpointing does, stay whole."""

import pytest
import torch
from torch import nn

from lightning_diffpipe.errors import GraphError
from lightning_diffpipe.graph.probe import fold, probe
from lightning_diffpipe.profiling.measure import profile
from tests.graph.emulate import check_split, reference

SEED = 2


class CompVisCheckpoint(torch.autograd.Function):
    """As in latent-diffusion's `ldm/modules/diffusionmodules/util.py`."""

    @staticmethod
    def forward(ctx, function, length, *args):
        ctx.function = function
        ctx.tensors, ctx.parameters = list(args[:length]), list(args[length:])
        with torch.no_grad():
            return ctx.function(*ctx.tensors)

    @staticmethod
    def backward(ctx, *gradients):
        ctx.tensors = [x.detach().requires_grad_(True) for x in ctx.tensors]
        with torch.enable_grad():
            out = ctx.function(*[x.view_as(x) for x in ctx.tensors])
        wanted = ctx.tensors + ctx.parameters
        found = torch.autograd.grad(out, wanted, gradients, allow_unused=True)
        del ctx.tensors, ctx.parameters
        return (None, None, *found)


def checkpoint(function, inputs, parameters):
    return CompVisCheckpoint.apply(function, len(inputs), *inputs, *parameters)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1, self.l2 = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return checkpoint(self.compute, (x,), list(self.parameters()))

    def compute(self, x):
        return x + self.l2(torch.tanh(self.l1(x)))


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class AroundBlocks(Blocks):
    """The step itself checkpoints."""

    def forward(self, x):
        x = self.first(x)
        return checkpoint(self.blocks[0].compute, (x,), list(self.blocks[0].parameters())).mean()


def step(module, batch):
    return module(batch)


@pytest.fixture
def blocks():
    torch.manual_seed(0)
    return Blocks().double(), torch.randn(4, 6, dtype=torch.float64)


@pytest.mark.parametrize("mode", ["fake", "real"])
def test_a_block_with_checkpointing_of_its_own_is_one_layer(blocks, mode, caplog):
    """History: a cut inside such a block gave NaN gradients to all before it, while the loss was right."""
    module, batch = blocks
    graph = probe(module, step, batch, max_share=1 / 30, mode=mode)
    assert graph.layer_names == ("first", "blocks.0", "blocks.1")
    assert (
        "2 modules stay whole, e.g.: blocks.0 calls layers inside an autograd.Function"
        in caplog.text
    )
    assert "Use torch.utils.checkpoint" in caplog.text
    expected = reference(module, step, batch, SEED)
    for pieces in ((graph, (1, 2)), fold(module, step, batch, graph, (1, 2))):
        check_split(module, pieces, step, batch, SEED, expected)


def test_layers_inside_a_function_of_the_step_are_refused(blocks):
    with pytest.raises(GraphError, match=r"the step calls layers inside an autograd\.Function"):
        probe(AroundBlocks(), step, torch.ones(2, 6), max_share=1 / 30)


def test_names_of_layers_inside_are_refused(blocks):
    """A profile made before may name them."""
    module, batch = blocks
    names = ("first", "blocks.0.l1", "blocks.0.l2", "blocks.1.l1", "blocks.1.l2")
    with pytest.raises(
        GraphError, match=r"code around blocks.0.l1 calls layers inside an autograd"
    ):
        probe(module, step, batch, layer_names=names)


def test_such_blocks_can_be_timed(blocks):
    """History: a backward in two halves asks a function twice, which had forgotten its inputs and ended the run."""
    module, batch = blocks
    found = profile(module, batch, step=step, max_share=1 / 30, repeats=1, sample_counts=(2, 4))
    assert [layer.name for layer in found.backbones[0].layers] == ["first", "blocks.0", "blocks.1"]
