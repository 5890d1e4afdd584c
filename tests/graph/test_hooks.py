"""Gradient hooks that a step puts on tensors: exact where one stage sees all of the gradient, else refused."""

import pytest
import torch
from torch import nn

from lightning_diffpipe.errors import GraphError
from lightning_diffpipe.graph.cut import cut, require_hooks_within_stages
from lightning_diffpipe.graph.probe import probe
from tests.graph.emulate import check_split, reference

SEED = 3
HOOKS = {"linear": lambda g: 0.1 * g, "clipped": lambda g: g.clamp(-1e-3, 1e-3)}


class Layers(nn.Module):
    """Four layers in a row; subclasses put a hook on something between them."""

    hook = staticmethod(HOOKS["linear"])

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(6, 6) for _ in range(4))
        self.encoder = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x):
        return self.loss(x, self.encoder(x))


class ReadLater(Layers):
    def loss(self, x, target):
        h = self.a(x)
        h.register_hook(self.hook)
        return (self.d(self.c(torch.tanh(self.b(x)) + h)) - target).square().mean()


class ReadTwice(Layers):
    def loss(self, x, target):
        h = self.a(x)
        h.register_hook(self.hook)
        return (self.d(self.c(torch.tanh(self.b(h)) + h)) - target).square().mean()


class OnWhatGlueMade(Layers):
    def loss(self, x, target):
        h = self.a(x)
        half = h / 2
        half.register_hook(self.hook)
        return (self.d(self.c(torch.tanh(self.b(h)) + half)) - target).square().mean()


class PutLate(Layers):
    def loss(self, x, target):
        h = self.a(x)
        y = self.b(h)
        h.register_hook(self.hook)
        return (self.d(self.c(torch.tanh(y))) - target).square().mean()


class OnTheLoss(Layers):
    def loss(self, x, target):
        loss = (self.d(self.c(self.b(self.a(x)))) - target).square().mean()
        loss.register_hook(self.hook)
        return loss


class KeepsGradient(Layers):
    def loss(self, x, target):
        h = self.a(x)
        h.retain_grad()
        return (self.d(self.c(torch.tanh(self.b(h)) + h)) - target).square().mean()


# Where the path a b c d may be cut; everywhere else gradients of the hooked tensor come from two stages.
EXACT = {
    ReadLater: [(1,), (2,), (3,), (1, 2, 3)],
    ReadTwice: [(1,), (3,)],
    OnWhatGlueMade: [(1,), (2,), (3,), (1, 2, 3)],
    PutLate: [(1,), (3,)],
    OnTheLoss: [(1, 2, 3)],
    KeepsGradient: [(1, 2, 3)],
}


def step(module, batch):
    return module(batch)


def make(kind, hook="linear"):
    torch.manual_seed(1)
    module, batch = kind().double(), torch.randn(4, 6, dtype=torch.float64)
    module.hook = HOOKS[hook]
    return module, batch, probe(module, step, batch, max_share=1 / 30)


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("kind", EXACT)
def test_a_hook_acts_once_on_the_whole_gradient(kind, hook, halves):
    """History: the stage that read a hooked tensor scaled its gradient, as did the one that made it."""
    module, batch, graph = make(kind, hook)
    expected = reference(module, step, batch, SEED)
    for positions in EXACT[kind]:
        require_hooks_within_stages(graph, cut(graph, positions))
        check_split(module, (graph, positions), step, batch, SEED, expected, halves)


@pytest.mark.parametrize(
    ("kind", "positions", "readers"),
    [(ReadTwice, (2,), "b and c"), (ReadTwice, (1, 2), "b and c"), (PutLate, (2,), "b and c")],
)
def test_gradients_from_several_stages_are_refused(kind, positions, readers):
    """A hook on each part would be right only if it were linear; one put late would miss the first."""
    graph = make(kind)[2]
    with pytest.raises(GraphError, match=rf"2 stages read \(as {readers}\).* write h \* s \+"):
        require_hooks_within_stages(graph, cut(graph, positions))


def test_frozen_layers_can_still_be_cut_into_samples():
    """History: the run that tells how had no gradients, so that hooks ended it."""
    graph = make(ReadTwice)[2]
    assert [graph.layers[i].splits_samples for i in graph.frozen] == [True]


class HooksInside(nn.Linear):
    hook = None

    def forward(self, x):
        h = super().forward(x)
        h.register_hook(self.hook)
        return h


class OnAWeight(nn.Linear):
    """Read twice, so that both ways meet before the hook."""

    hook = None

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.weight.register_hook(lambda g: self.hook(g))

    def forward(self, x):
        return super().forward(super().forward(x))


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("kind", [HooksInside, OnAWeight])
def test_a_hook_inside_a_layer_sees_what_all_stages_send(kind, hook, halves):
    """The remedy that the error names."""
    module, batch, _ = make(KeepsGradient)
    for name in ("a", "b"):
        setattr(module, name, kind(6, 6).double())
        getattr(module, name).hook = HOOKS[hook]
    graph = probe(module, step, batch, max_share=1 / 30)
    expected = reference(module, step, batch, SEED)
    check_split(module, (graph, (1, 2, 3)), step, batch, SEED, expected, halves)
