"""A step that changes after it was probed is noticed, and the user told what changed."""

import contextlib
import dataclasses
import logging
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_diffpipe.errors import ConfigurationError, GraphError
from lightning_diffpipe.training import pipeline as pipelines
from lightning_diffpipe.training.pipeline import StepWatch
from tests.runtime.loopback import Loopback

BATCH = torch.linspace(-1, 1, 16).reshape(4, 4)


class Dropping(nn.Linear):
    """A layer that draws random numbers in training mode."""

    def forward(self, x):
        return F.dropout(super().forward(x), 0.5, self.training)


class Chain(nn.Module):
    """Layers in a row, and terms that begin later."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        self.dropping = Dropping(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.shift = nn.Parameter(torch.zeros(4))
        self.epoch = 0

    def forward(self, x):
        first = self.layers[0](x)
        last = self.norm(self.dropping(self.layers[1:](first)))
        loss = last.square().mean()
        if self.epoch == 1:
            loss = loss + 0.1 * first.square().mean()
        if self.epoch == 2:
            loss = loss + self.shift.square().mean()
        return loss


class Checked(Chain):
    """Looks at values, and bears no NaN."""

    def forward(self, x):
        first = self.layers[0](x)
        if not first.isfinite().all():
            raise ValueError("the first layer is sick")
        return self.norm(self.dropping(self.layers[1:](first))).square().mean()


@contextlib.contextmanager
def pipeline(epoch=0, module_class=Chain):
    """A pipeline of two stages in eval mode, whose module is then told an epoch; and the last rank's watch."""
    module, step = module_class().eval(), lambda module, batch: module(batch)
    with Loopback(module, step, BATCH, num_stages=2, num_microbatches=2) as ranks:
        last = ranks.ranks[-1]
        watch = StepWatch(last.module, last.engine.layout, {"shift": last.module.shift})
        for rank in ranks.ranks:
            rank.module.epoch = epoch
        yield ranks, last.module, watch


def last_rank(**options):
    """The module of the last rank and its watch, when the pipeline is gone."""
    with pipeline(**options) as (_, module, watch):
        return module, watch


def test_a_branch_that_begins_later_reads_no_zeros():
    """History: what no stage read when the step was probed was full of zeros, and a later term trained nothing."""
    with pipeline(epoch=1) as (ranks, _, _):
        loss = ranks.run_step(BATCH, 0)
    assert loss != loss


def test_a_loss_that_is_not_finite_is_said_once_with_both_causes(caplog):
    _, watch = last_rank()
    with caplog.at_level(logging.WARNING):
        for loss in (1.0, float("nan"), float("inf"), 1.0, float("nan")):
            watch.after_step(torch.tensor(loss), 7)
    (said,) = (record.message for record in caplog.records)
    assert said.startswith("the loss of batch 7 is not finite. Either training diverges: ")
    assert "Or the step reads since then what it did not read when it was probed" in said


def test_a_gradient_that_nobody_puts_aside_is_refused():
    """History: a parameter whose term began later lost its gradients to zero_grad and never moved."""
    module, watch = last_rank()
    watch.after_step(torch.tensor(1.0), 7)
    module.shift.grad = torch.ones(4)
    with pytest.raises(GraphError, match=r"shift got a gradient, though .* from the first step on"):
        watch.after_step(torch.tensor(1.0), 7)


@pytest.mark.parametrize("value", [1e30, float("nan"), float("inf"), float("-inf")])
def test_a_gradient_that_is_not_finite_diverges_and_a_large_one_does_not(value):
    """The square of a large one is not finite, either."""
    _, watch = last_rank()
    watch.after_step(torch.tensor(1.0), 7, [torch.ones(4), None, torch.tensor([1, value])])
    assert watch.num_diverged == (value != 1e30)


@pytest.mark.parametrize("value", [1.0, float("nan")])
@pytest.mark.parametrize("kind", ["spread", "complex", "conjugate", "negated", "sparse"])
def test_gradients_that_the_operator_refuses_are_looked_at_too(kind, value):
    """Next to one that it takes, which stays as it is."""
    made = {
        "spread": lambda: torch.tensor([value]).expand(4),
        "complex": lambda: torch.tensor([complex(1, value)]),
        "conjugate": lambda: torch.tensor([complex(1, value)]).conj(),
        "negated": lambda: torch.tensor([complex(1, value)]).conj().imag,
        "sparse": lambda: torch.sparse_coo_tensor([[1]], torch.tensor([value]), (4,)),
    }
    first, (_, watch) = torch.linspace(-1, 1, 4), last_rank()
    watch.after_step(torch.tensor(1.0), 7, [first, made[kind]()])
    assert watch.num_diverged == (value != value)
    assert first.equal(torch.linspace(-1, 1, 4))


@pytest.fixture
def late(monkeypatch):
    """A device whose values nobody waits for."""
    at_once = pipelines._values
    event = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(
        pipelines, "_values", lambda *step: dataclasses.replace(at_once(*step), event=event)
    )


def test_the_last_step_is_looked_at_too(late):
    """On a GPU a step is looked at when the next one has come."""
    _, watch = last_rank()
    watch.after_step(torch.tensor(float("nan")), 7)
    assert watch.num_diverged == 0
    watch.finish()
    assert watch.num_diverged == 1
    watch.finish()
    assert watch.num_diverged == 1


@pytest.mark.parametrize("name", ["dropping", "norm"])
def test_modes_that_change_what_is_drawn_or_written_are_refused(name):
    """History: dropout switched on after the probe drew masks that depended on where the layers were cut."""
    module, watch = last_rank()
    watch.before_step(BATCH, ())
    module.get_submodule(name).train()
    with pytest.raises(ConfigurationError, match=rf"{name} \(train\), .* Set modes before trainer"):
        watch.before_step(BATCH, ())


def test_modes_that_change_nothing_are_let_be(monkeypatch):
    module, watch = last_rank()
    module.layers.train()
    watch.before_step(BATCH, ())
    monkeypatch.setattr(watch, "layout", SimpleNamespace())  # is not asked again
    watch.before_step(BATCH, ())


def test_modes_are_let_be_with_a_warning_where_the_step_bears_no_placeholders(caplog):
    """History: `.eval()` of a part without dropout ended healthy runs of steps that look at values."""
    module, watch = last_rank(module_class=Checked)
    module.layers.train()
    with caplog.at_level(logging.WARNING, "lightning_diffpipe.training.pipeline"):
        for _ in range(2):
            watch.before_step(BATCH, ())
    said = [record.message for record in caplog.records if "cannot be found out" in record.message]
    assert len(said) == 1
    assert "(ValueError: the first layer is sick). Set modes before trainer.fit" in said[0]
