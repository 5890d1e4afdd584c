"""`Trainer(strategy=DiffPipeStrategy(schedule="pipedream"))` against the formula of PipeDream, in double precision.

The oracle (`tests/runtime/formula.py`) is one process that puts the model of every batch together from the versions
that the formula names. Wherever Lightning looks at weights the pipeline is drained: after the last batch of an
epoch, for a checkpoint, for a validation.
"""

import math
import re

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_diffpipe import EMA, PipelineMonitor
from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.graph import rng
from lightning_diffpipe.graph.rng import derived_seed
from tests.distributed.scenarios import fit_module, make, weights_of
from tests.distributed.tiny import Data, Samples, TinyDiffusion
from tests.ranks import run_in_turn, run_ranks
from tests.rows import row
from tests.runtime.formula import DELAYS, SEED, Formula, Scheduler, adam

pytestmark = pytest.mark.distributed


class Chain(TinyDiffusion):
    """Without skips, whose merging layer is called on several stages."""

    def __init__(self, **options):
        super().__init__(**options)
        del self.merge

    def denoise(self, noisy, t, text):
        condition = self.time(t[:, None]) + self.text(text).mean(1)
        h = self.entry(noisy) if self.tied else noisy
        for block in self.blocks:
            h = block(h, condition)
        return self.head(h)

    def configure_optimizers(self):
        optimizer = adam([p for p in self.parameters() if p.requires_grad])
        return [optimizer], [{"scheduler": Scheduler(optimizer), "interval": "step"}]


class Watch(L.Callback):
    """Notes what callbacks see, what this rank trains, and whether batches are under way; stops at will."""

    def __init__(self, save=None, stop=None):
        self.losses, self.batches, self.save, self.names, self.empty = [], [], save, [], []
        self.stop, self.empty_when_validating = stop, []

    def on_train_start(self, trainer, module):
        self.names = list(trainer.strategy.pipeline.trained)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))
        self.batches.append(float(trainer.callback_metrics.get("batch", -1)))
        if self.save and trainer.global_step == self.save[1]:
            trainer.save_checkpoint(self.save[0])
        self.empty.append(trainer.strategy.pipeline.engine.is_empty)
        trainer.should_stop = trainer.global_step == self.stop

    def on_validation_start(self, trainer, module):
        self.empty_when_validating.append(trainer.strategy.pipeline.engine.is_empty)


def fit(rank, world_size, strategy, trainer=(), save=None, load=None, stop=None, data=None):
    module, watch = make(Chain), Watch(save, stop)
    data = data or {
        "data": DataLoader(Samples(30), 6),
        "val_dataloaders": DataLoader(Samples(6), 6),
    }
    options = {"max_epochs": 2, "limit_val_batches": 0, **dict(trainer)}
    options["callbacks"] = [watch, *options.get("callbacks", [])]
    strategy = {"num_microbatches": 1, "seed": SEED, **strategy}
    trainer = fit_module(module, world_size, strategy=strategy, ckpt_path=load, **data, **options)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return weights_of(module), watch, metrics


def formula(outcomes, schedule, microbatches, drains, epochs=2, kind=Formula):
    """The weights at the end, and the losses, of training that is drained after some steps."""
    root = make(Chain)
    stage_of = {name: stage for stage, (_, watch, _) in enumerate(outcomes) for name in watch.names}
    delays = [DELAYS[schedule](stage, len(outcomes)) for stage in range(len(outcomes))]
    emulated = kind(root, stage_of, delays, adam, microbatches)
    losses, batches = [], list(DataLoader(Samples(30), 6)) * epochs
    for index, batch in enumerate(batches):
        losses.append(emulated.train(batch, index))
        if index + 1 in drains:
            emulated.drain()
    emulated.load(lambda stage: len(emulated.versions) - 1)
    return weights_of(emulated.root), losses


def assert_weights(outcomes, expected):
    for weights, _, _ in outcomes:
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-11)


def check(world_size, schedule, drains=(5, 10), strategy=None, **options):
    microbatches = world_size - 1 if schedule == "pipedream_2bw" else 1
    strategy = {"schedule": schedule, "num_microbatches": microbatches, **(strategy or {})}
    trainer = options.pop("trainer", {})
    outcomes = run_ranks(fit, world_size, world_size, strategy, trainer, *options.values())
    expected, losses = formula(outcomes, schedule, microbatches, drains)
    assert_weights(outcomes, expected)
    return outcomes, losses


@pytest.mark.parametrize(
    ("world_size", "schedule"),
    [row(2, "pipedream"), (3, "pipedream"), (3, "pipedream_vertical_sync"), (3, "pipedream_2bw")],
)
def test_weights_follow_the_formula(world_size, schedule):
    """Two epochs of five batches, drained after each."""
    outcomes, losses = check(world_size, schedule)
    delay = -(-(world_size - 1) // (world_size - 1 if schedule == "pipedream_2bw" else 1))
    for _, watch, metrics in outcomes:
        for epoch in (0, 5):
            logged, numbers = (each[epoch : epoch + 5] for each in (watch.losses, watch.batches))
            assert all(map(math.isnan, logged[:delay])), "no loss is known while the pipeline fills"
            known = [*range(epoch, epoch + 4 - delay), epoch + 4]
            assert numbers[delay:] == known
            assert logged[delay:] == pytest.approx([losses[n] for n in known], rel=1e-10)
        assert metrics["train/loss"] == pytest.approx(losses[9], rel=1e-10)
        assert [n for n, empty in enumerate(watch.empty, 1) if empty] == [5, 10]


def test_verifying_the_step_changes_nothing():
    """History: a step that is run for comparison asked for a schedule that this engine had not recorded."""
    check(2, "pipedream", strategy={"verify": True})


def test_pipelines_side_by_side_step_together():
    """Two pipelines of two ranks: gradients of a batch are means over both; each sees every other sample."""
    strategy = {"schedule": "pipedream", "num_stages": 2, "data_parallel": 2, "num_replicas": 1}
    data = {"data": Data(size=24, batch_size=3)}
    outcomes = run_ranks(fit, 4, 4, strategy, {"max_epochs": 1}, None, None, None, data)
    stage_of = {name: stage for stage in (0, 1) for name in outcomes[stage][1].names}

    class Both(Formula):
        """The mean over the pipelines' batches, each with random numbers of its own."""

        def loss(self, batch, index):
            found = 0.0
            for pipeline in (0, 1):
                rng.seed_all(derived_seed(SEED, pipeline, index, 0), host=True)
                part = {name: value[pipeline::2] for name, value in batch.items()}
                found = found + self.root.training_step(part, 0) / 2
            return found

    emulated = Both(make(Chain), stage_of, [1, 0], adam, 1)
    for index, batch in enumerate(DataLoader(Samples(24), 6)):
        emulated.train(batch, index)
    assert_weights(outcomes, weights_of(emulated.root))


def test_going_on_from_a_checkpoint_equals_a_run_that_drained_there(tmp_path):
    """Saved in the middle of an epoch, three batches under way; drained states are clean."""
    path = tmp_path / "third.ckpt"
    whole, _ = check(3, "pipedream", drains=(3, 5, 10), save=(str(path), 3), load=None)
    assert whole[0][1].empty[2], "saving drains"
    strategy = {"schedule": "pipedream", "num_microbatches": 1}
    resumed = run_ranks(fit, 3, 3, strategy, {}, None, str(path))
    for (weights, _, _), (again, _, _) in zip(whole, resumed, strict=True):
        torch.testing.assert_close(again, weights, rtol=0, atol=0)


def test_a_validation_sees_drained_weights():
    """In the middle of an epoch, and watched by a monitor, which draws what a rank does in a step."""
    trainer = {
        "limit_val_batches": 1,
        "val_check_interval": 2,
        "callbacks": [PipelineMonitor(every_n_steps=2)],
        "gradient_clip_val": 1e-3,
        "gradient_clip_algorithm": "value",
    }
    strategy = {"schedule": "pipedream", "num_microbatches": 1}
    outcomes = run_ranks(fit, 2, 2, strategy, {**trainer, "max_epochs": 1})

    class Clipped(Formula):
        """Clips every gradient."""

        def clip(self):
            torch.nn.utils.clip_grad_value_(self.parameters.values(), 1e-3)

    expected, _ = formula(outcomes, "pipedream", 1, (2, 4, 5), 1, Clipped)
    assert_weights(outcomes, expected)
    for _, watch, metrics in outcomes:
        assert metrics["val/loss"] > 0
        assert watch.empty_when_validating == [True, True], "callbacks come before the strategy"


def test_a_run_that_is_stopped_has_logged_all_its_batches():
    """History: what came back in the end was neither logged nor looked at."""
    strategy = {"schedule": "pipedream", "num_microbatches": 1}
    outcomes = run_ranks(fit, 2, 2, strategy, {}, None, None, 3)
    _, losses = formula(outcomes, "pipedream", 1, (), 1)
    for _, watch, metrics in outcomes:
        assert watch.empty == [False] * 3
        assert metrics["batch"] == 2
        assert metrics["train/loss"] == pytest.approx(losses[2], rel=1e-10)


class LooksAtGradients(L.Callback):
    """Overrides a hook in which Lightning's gradients are there."""

    def on_before_optimizer_step(self, trainer, module, optimizer):
        pass


def test_what_needs_all_stages_at_a_time_is_refused():
    looks = {"callbacks": [LooksAtGradients()]}
    cases = {
        "norm over all stages.*gradient_clip_algorithm='value'": ({"gradient_clip_val": 1.0}, {}),
        "accumulate_grad_batches=2.*pipedream_2bw": ({"accumulate_grad_batches": 2}, {}),
        "EMA averages.*different versions": ({"callbacks": [EMA()]}, {}),
        "LooksAtGradients.on_before_optimizer_step.*no gradients": (looks, {}),
        "stages 0 and 1 both train .*diverge": ({}, {"tied": True}),
    }
    refusals = run_in_turn(refusal, 2, *cases.values())
    for complaint, (said, other) in zip(cases, refusals, strict=True):
        assert re.search(complaint, said, re.DOTALL)
        assert said == other


def refusal(rank, trainer, module):
    strategy, loader = (
        {"schedule": "pipedream", "num_microbatches": "auto"},
        DataLoader(Samples(12), 6),
    )
    with pytest.raises(ConfigurationError) as refused:
        fit_module(make(Chain, **module), 2, loader, strategy, limit_val_batches=0, **trainer)
    return str(refused.value)
