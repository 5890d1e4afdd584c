"""Which backbones know nothing of each other: found by what is read, and by the gradients of the loss's code."""

import re

import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.graph.chains import find_chains
from lightning_diffpipe.graph.probe import probe
from lightning_diffpipe.training.plan_source import PipelineOptions
from lightning_diffpipe.training.refusals import refuse_one_chain
from tests.distributed.tiny import Cascade, Samples


def chains_of(module, batch, step):
    graph = probe(module, step, batch)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state, found = torch.get_rng_state(), find_chains(module, step, batch, graph)
    assert torch.equal(state, torch.get_rng_state())
    torch.testing.assert_close(before, module.state_dict(), rtol=0, atol=0)
    assert all(p.grad is None for p in module.parameters())
    assert not any("forward" in vars(m) for m in module.modules()), "nothing stays intercepted"
    return graph, found


def cascade(form):
    module = Cascade(form).double()
    module.log = module.log_dict = lambda *_, **__: None
    batch = torch.utils.data.default_collate([Samples(2)[0], Samples(2)[1]])
    return chains_of(module, batch, lambda module, batch: module.loss(batch))


def test_a_cascade_has_two_chains():
    graph, found = cascade("independent")
    assert found.joined_by == ""
    assert found.starts == (0, graph.path_names.index("upscaler.time"))
    graph, found = cascade("triple")
    assert len(found.starts) == 3
    assert graph.path_names[found.starts[2]] == "second.time"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ("tied", "the parameter base.entry.weight is read by base.entry and by upscaler.entry: give each a copy"),
        ("stacked", "upscaler.entry reads what base.head gives, be it detached"),
        ("product", "the gradients of base depend on what other backbones give: the loss is no sum"),
        ("smaller", "depend on what other backbones give"),
        ("frozen", "one backbone that is trained, upscaler; frozen are base, encoder, text, which run in bubbles"),
    ],
)  # fmt: skip
def test_why_backbones_are_one_chain(form, reason):
    """It is said where opposite directions are asked for, with a remedy; else nobody is bothered."""
    _, found = cascade(form)
    assert found.starts == (0,)
    assert reason in found.joined_by
    refuse_one_chain(found, PipelineOptions(schedule="auto"))
    with pytest.raises(ConfigurationError, match=re.escape(reason)) as caught:
        refuse_one_chain(found, PipelineOptions(schedule="bidirectional"))
    assert "schedule=1f1b" in str(caught.value) or form == "stacked"


class SideBySide(nn.Module):
    """Two models in turns: layers of both alternate."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.ModuleList(nn.Linear(4, 4) for _ in range(4)) for _ in "ab")

    def forward(self, x, alternating=False, probability=False):
        a = b = x
        for one, other in zip(self.a, self.b, strict=True):
            a = one(a)
            if alternating:
                b = other(b)
        if not alternating:
            for layer in self.b:
                b = layer(b)
        if probability:
            return -torch.log(a.sigmoid()).mean() - torch.log(b.sigmoid()).mean()
        return torch.cat([a.square().mean(1), b.abs().mean(1)]).mean()


@pytest.mark.parametrize(
    ("options", "num_chains"), [({}, 2), ({"probability": True}, 2), ({"alternating": True}, 1)]
)
def test_any_two_models_side_by_side_are_chains_if_they_are_called_one_after_the_other(
    options, num_chains
):
    step = lambda module, batch: module(batch, **options)
    _, found = chains_of(SideBySide(), torch.randn(2, 4), step)
    assert len(found.starts) == num_chains


def test_code_behind_the_last_layer_that_fails_without_layers_makes_one_chain():
    def step(module, batch):
        loss = module(batch)
        if torch.jit.is_tracing() or bool(loss.isnan()):
            raise ValueError("diverged")
        return loss

    _, found = chains_of(SideBySide(), torch.randn(2, 4), step)
    assert found.starts == (0,)
    assert "ends with ValueError: diverged" in found.joined_by


def test_a_step_that_updates_a_metric_is_one_chain():
    """It would see NaN in place of what other backbones give, and be updated several times."""
    module = SideBySide()
    module.seen = MeanMetric()

    def step(module, batch):
        loss = module(batch)
        module.seen.update(loss)
        return loss

    _, found = chains_of(module, torch.randn(2, 4), step)
    assert found.starts == (0,)
    assert "training_step updates the metric seen" in found.joined_by
    assert module.seen._update_count == 0
