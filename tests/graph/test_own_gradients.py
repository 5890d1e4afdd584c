"""Steps that differentiate by themselves: refused between layers, part of a layer inside of one."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn
from torch.autograd import grad as early

from lightning_diffpipe.errors import GraphError
from lightning_diffpipe.graph.probe import probe
from lightning_diffpipe.profiling.measure import profile
from tests.graph.emulate import check_stages
from tests.graph.steps import Block, Tower, rows, step


def with_tangent(run, x):
    y, tangent = torch.func.jvp(run, (x,), (torch.sin(x),))
    return y + tangent


def with_dual_numbers(run, x):
    with forward_ad.dual_level():
        y, tangent = forward_ad.unpack_dual(run(forward_ad.make_dual(x, torch.sin(x))))
    return y + tangent


def score(run, x):
    with torch.enable_grad():
        y = x.requires_grad_() if x.is_leaf else x
        return torch.autograd.grad(run(y).pow(2).sum(), y, create_graph=True)[0]


def score_by_an_early_name(run, x):
    with torch.enable_grad():
        y = x.requires_grad_() if x.is_leaf else x
        return early(run(y).pow(2).sum(), y, create_graph=True)[0]


WAYS = {
    "torch.func.jvp": with_tangent,
    "torch.autograd.forward_ad": with_dual_numbers,
    "torch.vmap": lambda run, x: torch.vmap(run)(x),
    "torch.func.grad or vjp": lambda run, x: torch.func.grad(lambda y: run(y).pow(2).sum())(x),
    "torch.autograd.grad": score,
    "torch.autograd.grad, imported by name": score_by_an_early_name,
}


class Around(nn.Module):
    """Does something to a block, which is a module of its own, inside its forward."""

    def __init__(self, way):
        super().__init__()
        self.way, self.block = way, Block()

    def forward(self, x):
        return self.way(self.block, x)


class Inside(Tower):
    num_blocks = 4

    def __init__(self, way):
        super().__init__()
        self.blocks[2] = Around(way)


class Between(Tower):
    """The step itself does it."""

    num_blocks = 2

    def __init__(self, way):
        super().__init__()
        self.way = way

    def training_step(self, batch, batch_idx):
        return self.way(self.blocks[1], self.blocks[0](batch)).pow(2).mean()


@pytest.mark.parametrize("name", WAYS)
def test_a_module_that_differentiates_what_it_calls_is_one_layer(name, caplog):
    """History: such a module was expanded where it cost enough, and what errors advised was refused, too."""
    graph = check_stages(Inside(WAYS[name]).double(), rows().double(), splits=(2, 3, 4))
    assert [layer for layer in graph.layer_names if layer.startswith("blocks.2")] == ["blocks.2"]
    assert "blocks.0.linear" in graph.layer_names, "all others are as fine as can be"
    assert "blocks.2 uses torch." in caplog.text


@pytest.mark.parametrize("name", ["torch.func.jvp", "torch.func.grad or vjp"])
def test_such_a_module_can_be_timed(name):
    """History: `torch.func.grad` bears no hooks, such as count what is kept for the backward, and ended the run."""
    batch, options = rows(4).double(), {"repeats": 1, "sample_counts": (2, 4)}
    found = profile(Inside(WAYS[name]).double(), batch, step=step, **options)
    layers = found.backbones[0].layers
    assert "blocks.2" in [layer.name for layer in layers]
    assert all(l.activation_bytes_per_sample + l.activation_bytes_per_microbatch for l in layers)


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("mode", ["fake", "real"])
def test_differentiating_between_layers_is_refused_with_place_and_remedy(name, mode):
    """History: MeanFlow's step ended in "Cannot access storage of TensorWrapper"."""
    way = WAYS[name]
    place, name = "calls" if "autograd.grad" in name else "inside", name.partition(",")[0]
    with pytest.raises(GraphError, match=f"{place} {name}") as refused:
        probe(Between(way), step, rows(), mode=mode)
    file = "steps.py" if name == "torch.autograd.forward_ad" else "test_own_gradients.py"
    assert f"{file}:" in str(refused.value)
    assert "inside the forward of one small module" in str(refused.value)


def test_the_derivative_of_what_is_no_layer_may_be_taken_anywhere():
    class Schedule(Tower):
        """The slope of a noise schedule by its time."""

        def training_step(self, batch, batch_idx):
            t = torch.rand(len(batch), 1, dtype=batch.dtype)
            alpha, slope = torch.func.jvp(torch.cos, (t,), (torch.ones_like(t),))
            return (self.run(alpha * batch) - slope * batch).pow(2).mean()

    check_stages(Schedule().double(), rows().double(), splits=(2,))
