"""A run that has left the finite numbers ends with an error, on all ranks, and harms no checkpoint."""

import functools
import re

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_diffpipe import DiffPipeStrategy
from lightning_diffpipe.callbacks import FinalCheckpoint
from lightning_diffpipe.errors import ConfigurationError, DivergenceError
from tests.distributed.scenarios import Recorder, fit_module, make
from tests.distributed.tiny import TinyDiffusion
from tests.ranks import run_ranks
from tests.rows import row

pytestmark = pytest.mark.distributed


class Diverging(TinyDiffusion):
    """Its loss is NaN in some steps."""

    def __init__(self, bad_steps=(), heals=False, **options):
        super().__init__(**options)
        self.bad_steps, self.heals = bad_steps, heals

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if self.global_step in self.bad_steps else loss

    def on_before_optimizer_step(self, optimizer):
        if self.heals:
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad.nan_to_num_(0.0)


class Steep(Diverging):
    """A gradient is NaN in some steps, though the loss is finite: the slope of a root at zero, times zero."""

    def training_step(self, batch, batch_idx):
        loss = TinyDiffusion.training_step(self, batch, batch_idx)
        bad = self.global_step in self.bad_steps
        return loss + (loss * (0.0 if bad else 1.0)).sqrt() * (0.0 if bad else 1.0)


def fit(rank, world_size, folder, strategy, options, module_class=Diverging, max_steps=8):
    """What the run ended with, and the steps of the checkpoints that are left."""
    callbacks = [Recorder()]
    if folder is not None:
        every = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_last="link")
        callbacks += [every, FinalCheckpoint(folder / "final.ckpt")]
    module = make(module_class, **options)
    try:
        trainer = fit_module(
            module, world_size, strategy=strategy, callbacks=callbacks, max_epochs=-1, max_steps=max_steps,
            enable_checkpointing=folder is not None,
        )  # fmt: skip
    except DivergenceError as error:
        return module.trainer.global_step, error.is_of_all_ranks and str(error)
    return trainer.global_step, None


TWO_STAGES = {"num_stages": 2}
TWO_PIPELINES = {"num_stages": 1, "data_parallel": 2, "num_microbatches": 1}
AFTER_FOUR = {"bad_steps": tuple(range(4, 99)), "heals": True}


@pytest.mark.parametrize(
    ("module_class", "strategy"),
    [
        (Diverging, TWO_STAGES),
        row(Diverging, TWO_PIPELINES),
        row(Steep, TWO_STAGES),
        (Steep, TWO_PIPELINES),
    ],
)
def test_a_run_ends_after_so_many_steps_that_are_not_finite(module_class, strategy):
    """History: it went on to the end, with exit code 0."""
    options = {**strategy, "max_diverged_steps": 3}
    ends = run_ranks(
        functools.partial(fit, module_class=module_class), 2, 2, None, options, AFTER_FOUR
    )
    for steps, message in ends:
        assert steps == 7, "steps 4, 5 and 6 were looked at before the next one is done"
        assert "in 3 optimizer steps in a row, up to step 7" in message
        loss = "nan" if module_class is Diverging else r"0\.\d+|\d+\.\d+"
        assert re.search(rf"\(loss ({loss}); the last finite one was \d+\.\d+, of batch", message)


def test_checkpoints_from_before_are_as_they_were(tmp_path):
    """History: the only checkpoint there was full of NaN."""
    options = {**TWO_STAGES, "max_diverged_steps": 3}
    ends = run_ranks(fit, 2, 2, tmp_path, options, {"bad_steps": tuple(range(3, 99))})
    for _, message in ends:
        assert re.match(
            r"no checkpoint is written at step 4: \d+ trained parameters .* e\.g\. ", message
        )
    assert not (tmp_path / "final.ckpt").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"step=2.ckpt", "last.ckpt"}
    state = torch.load(tmp_path / "last.ckpt")["state_dict"]
    assert all(value.isfinite().all() for value in state.values())


def test_the_last_step_counts(tmp_path):
    """A run too short for so many steps, that saves nothing, would end well."""
    for _, message in run_ranks(fit, 2, 2, None, TWO_STAGES, {"bad_steps": (7,)}):
        assert re.match(r"training has ended at step 8: \d+ trained parameters are not", message)


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ({"max_diverged_steps": 2}, {"bad_steps": (1, 3, 4, 6), "heals": True}),
        ({"max_diverged_steps": None}, {"bad_steps": tuple(range(2, 99))}),
    ],
)
def test_single_steps_are_borne_and_none_may_be_looked_at(tmp_path, strategy, options):
    """In 16 bits a step overflows now and then, and who knows that takes the gradients of it away."""
    if strategy["max_diverged_steps"]:
        options = {**options, "bad_steps": (1, 3, 5, 7)}
    assert run_ranks(fit, 2, 2, tmp_path, {**TWO_STAGES, **strategy}, options) == [(8, None)] * 2
    assert (tmp_path / "final.ckpt").exists()


@pytest.mark.parametrize("number", [0, -1, 2.5, "ten"])
def test_the_number_of_steps_is_one(number):
    with pytest.raises(ConfigurationError, match="max_diverged_steps must be a whole number >= 1"):
        DiffPipeStrategy(max_diverged_steps=number)
