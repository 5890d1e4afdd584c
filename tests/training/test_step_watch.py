"""A step that changes after it was probed is noticed, and the user told what changed."""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_diffpipe.errors import ConfigurationError, GraphError
from lightning_diffpipe.runtime.engine import StepResult
from lightning_diffpipe.runtime.results import Logged
from lightning_diffpipe.training import step_watch
from lightning_diffpipe.training.step_watch import StepWatch
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


def pipeline(epoch=0, module_class=Chain):
    """A pipeline of two stages in eval mode, whose module is then told an epoch; and the last rank's watch."""
    module = module_class().eval()
    ranks = Loopback(
        module, lambda module, batch: module(batch), BATCH, num_stages=2, num_microbatches=2
    )
    last = ranks.ranks[-1]
    watch = StepWatch(last.module, last.engine.layout, {"shift": last.module.shift}, {})
    for rank in ranks.ranks:
        rank.module.epoch = epoch
    return ranks, last.module, watch


def result(loss, **logged):
    found = [Logged(name, torch.tensor(value), {}) for name, value in logged.items()]
    return StepResult(torch.tensor(loss), found, 4, None)


def test_a_branch_that_begins_later_reads_no_zeros():
    """History: what no stage read when the step was probed was full of zeros, and a later term trained nothing."""
    ranks, _, watch = pipeline(epoch=1)
    loss = ranks.run_step(BATCH, 0)
    ranks.close()
    with pytest.raises(
        GraphError,
        match=r"the loss of batch 7 is not finite, as the step has changed .* reads output 0 of layers\.0, .* by 0",
    ):
        watch.after_step(result(loss), BATCH, (), 7)


def test_a_loss_that_diverges_goes_on_as_in_one_process(caplog):
    ranks, _, watch = pipeline()
    ranks.close()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            watch.after_step(result(1.0, psnr=float("inf")), BATCH, (), 7)
        assert not caplog.records
        for _ in range(2):
            watch.after_step(result(float("nan")), BATCH, (), 7)
    assert [record.message for record in caplog.records if "not finite" in record.message] == [
        record.message for record in caplog.records
    ]
    assert len(caplog.records) == 1


@pytest.mark.parametrize("name", ["loss", "psnr"])
def test_a_value_that_was_not_finite_before_is_still_looked_at(name):
    """History: after one NaN, or one infinite psnr, a name was never looked at again."""
    ranks, module, watch = pipeline()
    ranks.close()
    odd = {"loss": result(float("nan")), "psnr": result(1.0, psnr=float("inf"))}[name]
    for found in (odd, result(1.0, psnr=1.0)):
        watch.after_step(found, BATCH, (), 7)
    module.epoch = 1
    if name == "psnr":  # what is only logged has one more step to be finite again
        watch.after_step(odd, BATCH, (), 7)
    with pytest.raises(GraphError, match=r"reads output 0 of layers\.0"):
        watch.after_step(odd, BATCH, (), 7)


def test_a_value_that_comes_and_goes_costs_one_look(monkeypatch):
    ranks, _, watch = pipeline()
    ranks.close()
    looks = []
    monkeypatch.setattr(watch, "_trace_again", lambda *_: looks.append(1))
    for value in [float("nan"), 1.0] * 4 + [float("nan")] * 8:
        watch.after_step(result(1.0, of_a_rare_class=value), BATCH, (), 7)
    assert len(looks) == 4, "at 1, 2, 4 and 8 steps in a row"


def test_a_gradient_that_nobody_puts_aside_is_refused():
    """History: a parameter whose term began later lost its gradients to zero_grad and never moved."""
    ranks, module, watch = pipeline()
    ranks.close()
    watch.after_step(result(1.0), BATCH, (), 7)
    module.shift.grad = torch.ones(4)
    with pytest.raises(GraphError, match=r"shift got a gradient, though .* from the first step on"):
        watch.after_step(result(1.0), BATCH, (), 7)


@pytest.mark.parametrize("value", [1e30, float("nan"), float("inf"), float("-inf")])
def test_a_gradient_that_is_not_finite_diverges_and_a_large_one_does_not(value):
    """The square of a large one is not finite, either."""
    ranks, module, watch = pipeline()
    ranks.close()
    watch.trained = {"norm.bias": module.norm.bias, "shift": module.shift}
    for parameter in watch.trained.values():
        parameter.grad = torch.ones(4)
    module.norm.bias.grad[1], watch.idle = value, {}
    watch.after_step(result(1.0), BATCH, (), 7)
    assert watch.num_diverged == (value != 1e30)


@pytest.fixture
def late(monkeypatch):
    """A device whose values nobody waits for."""
    at_once = step_watch._values
    event = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(
        step_watch, "_values", lambda *step: dataclasses.replace(at_once(*step), event=event)
    )


def test_a_branch_of_one_step_is_not_taken_for_divergence(late, caplog):
    """History: GPUs give a loss when counters have gone on, and the user was told to lower the learning rate."""
    ranks, module, watch = pipeline(epoch=1)
    ranks.close()
    watch.after_step(result(float("nan")), BATCH, (), 7)
    module.epoch = 0
    with caplog.at_level(logging.WARNING, "lightning_diffpipe.training.step_watch"):
        watch.after_step(result(1.0), BATCH, (), 8)
    (said,) = (record.message for record in caplog.records if "finite" in record.message)
    assert said.startswith("the loss of batch 7 is not finite. Either training diverges: ")
    assert "Or the step took a branch in this batch" in said
    assert "not the pipeline's doing" not in said


def test_the_last_step_is_looked_at_too(late):
    """History: weights that a changed step had made NaN were saved before anybody looked at its loss."""
    ranks, _, watch = pipeline(epoch=1)
    ranks.close()
    watch.after_step(result(float("nan")), BATCH, (), 7)
    with pytest.raises(GraphError, match=r"batch 7 .* reads output 0 of layers\.0"):
        watch.finish()
    watch.finish()


@pytest.mark.parametrize("without_gradients", [torch.no_grad, torch.inference_mode])
def test_looking_behind_a_validation_finds_the_step_as_it_was(late, without_gradients):
    """Flags are off then, and nothing gets gradients.

    History: in inference mode, which Lightning validates in on NCCL, nothing can turn them on again, and a run
    whose last loss was NaN ended with "no parameter gets a gradient from the loss" instead of a warning.
    """
    ranks, module, watch = pipeline()
    ranks.close()
    watch.after_step(result(float("nan")), BATCH, (), 7)
    module.train()
    with without_gradients():
        watch.finish()
    assert all(part.training for part in module.modules())


@pytest.mark.parametrize("name", ["dropping", "norm"])
def test_modes_that_change_what_is_drawn_or_written_are_refused(name):
    """History: dropout switched on after the probe drew masks that depended on where the layers were cut."""
    ranks, module, watch = pipeline()
    ranks.close()
    watch.before_step(BATCH, ())
    module.get_submodule(name).train()
    with pytest.raises(ConfigurationError, match=rf"{name} \(train\), .* Set modes before trainer"):
        watch.before_step(BATCH, ())


def test_modes_that_change_nothing_are_let_be(monkeypatch):
    ranks, module, watch = pipeline()
    ranks.close()
    module.layers.train()
    watch.before_step(BATCH, ())
    monkeypatch.setattr(watch, "layout", SimpleNamespace())  # is not asked again
    watch.before_step(BATCH, ())


def test_modes_are_let_be_with_a_warning_where_the_step_bears_no_placeholders(caplog):
    """History: `.eval()` of a part without dropout ended healthy runs of steps that look at values."""
    ranks, module, watch = pipeline(module_class=Checked)
    ranks.close()
    module.layers.train()
    with caplog.at_level(logging.WARNING, "lightning_diffpipe.training.step_watch"):
        for _ in range(2):
            watch.before_step(BATCH, ())
    said = [record.message for record in caplog.records if "cannot be found out" in record.message]
    assert len(said) == 1
    assert "(ValueError: the first layer is sick). Set modes before trainer.fit" in said[0]
