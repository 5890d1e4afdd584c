"""Losses by timestep: those of the samples of one process, over microbatches, replicas and pipelines."""

from collections import Counter

import pytest

from lightning_diffpipe.callbacks import LossByTime
from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.modules.noise import LOSS_BY_TIME, FlowMatching
from lightning_diffpipe.modules.parts import PartsModule
from tests.distributed.scenarios import (
    Settings,
    assert_equal_runs,
    build,
    fit,
    quiet_trainer,
    reference,
)
from tests.distributed.tiny import Data, TinyDiffusion
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed

NAMES = [f"train/loss_q{k}" for k in range(3)]


class Timed(TinyDiffusion):
    """Has the noise schedule, losses and names of the ready-made modules, in double precision."""

    def __init__(self, **options):
        super().__init__(**options)
        self.noise_schedule = FlowMatching()

    def training_step(self, batch, batch_idx):
        clean = self.encoder(batch["image"]).chunk(2, -1)[0]
        corrupted = self.noise_schedule.corrupt(clean)
        prediction = self.denoise(corrupted.noisy, corrupted.timesteps / 1000, batch["text"])
        losses = self.noise_schedule.losses(corrupted, prediction, batch)
        return PartsModule._logged(self, "train", batch, losses)


class Noting(Timed):
    """Notes the sums that each call of the step logs, and after how many optimizer steps."""

    recorded = ()

    def __init__(self, **options):
        super().__init__(**options)
        self.noise_schedule.num_quantiles = len(NAMES)

    def log(self, name, value, **options):
        if name.startswith(LOSS_BY_TIME):
            Noting.recorded = [*self.recorded, (self.trainer.global_step, name, float(value))]


def settings(**strategy):
    trainer = {
        "max_steps": 4,
        "accumulate_grad_batches": 2,
        "log_every_n_steps": 2,
        "max_epochs": -1,
    }
    return Settings(trainer=trainer, strategy=strategy, module_class=Timed, data={"size": 48})


def train(rank, world_size, strategy):
    callback = LossByTime(len(NAMES))
    wanted = settings(**strategy)
    wanted.trainer["callbacks"] = [callback]
    return fit(rank, wanted, world_size)


@pytest.mark.parametrize(
    ("world_size", "num_stages", "num_replicas", "pipelines"),
    [(2, 2, 1, 1), (2, 1, 2, 1), pytest.param(4, 2, 1, 2, marks=pytest.mark.slow)],
)
def test_losses_by_time_are_those_of_one_process(world_size, num_stages, num_replicas, pipelines):
    """Means since they were logged last: two steps of two batches of 6 samples in 3 microbatches."""
    strategy = {"num_stages": num_stages, "num_replicas": num_replicas, "num_microbatches": 3}
    outcomes = run_ranks(train, world_size, world_size, strategy)
    alone = settings()
    alone.module_class, Noting.recorded = Noting, ()
    expected = reference(alone, 3, pipelines)
    totals, recorded = Counter(), Counter()
    for step, name, value in Noting.recorded:
        totals[name] += value if step >= 2 else 0
        recorded[name] += 1
    assert set(recorded.values()) == {8 * 3 * pipelines}
    counts = [totals[f"{LOSS_BY_TIME}count_{k}"] for k in range(len(NAMES))]
    assert sum(counts) == 4 * 6 * pipelines
    assert min(counts) > 0
    means = [totals[f"{LOSS_BY_TIME}sum_{k}"] / counts[k] for k in range(len(NAMES))]
    assert len({round(mean, 6) for mean in means}) == len(NAMES)
    for outcome in outcomes:
        assert [outcome.metrics[name] for name in NAMES] == pytest.approx(means, rel=1e-12)
    assert_equal_runs(outcomes, expected)


def test_modules_without_such_losses_are_refused():
    with pytest.raises(ConfigurationError, match=r"by noise_schedule.losses, .* TinyDiffusion has"):
        quiet_trainer(callbacks=[LossByTime()]).fit(build(Settings()), datamodule=Data())

    class Other(Timed):
        training_step = TinyDiffusion.training_step

    module = build(Settings(module_class=Other))
    with pytest.raises(ConfigurationError, match="Other logs no losses by time"):
        quiet_trainer(callbacks=[LossByTime()]).fit(module, datamodule=Data())
