"""Validation, testing and sampling use the whole module, on all ranks together."""

import lightning as L
import pytest
import torch

from tests.distributed.scenarios import Settings, build, quick_strategy, quiet_trainer
from tests.distributed.tiny import Data, TinyDiffusion
from tests.ranks import RankError, run_ranks

pytestmark = pytest.mark.distributed


def strategy(num_stages=2):
    return quick_strategy(num_stages=num_stages, num_microbatches=2)


class Quiet(TinyDiffusion):
    """Validation without random numbers, so that plain Lightning is an oracle for it."""

    def validation_step(self, batch, batch_idx):
        t = torch.full((len(batch["image"]),), 0.5, dtype=batch["image"].dtype)
        mean, _ = self.encoder(batch["image"]).chunk(2, -1)
        loss = self.denoise(mean, t, batch["text"]).pow(2).mean()
        self.log("val/loss", loss, sync_dist=True)

    test_step = validation_step


def validate_between(rank, world_size):
    module = build(Settings(module_class=Quiet))
    trainer = quiet_trainer(
        devices=world_size,
        strategy=strategy() if world_size > 1 else "auto",
        max_epochs=2,
        val_check_interval=2,
        num_sanity_val_steps=1,
        limit_train_batches=0 if world_size == 1 else 1.0,
    )
    trainer.fit(module, datamodule=Data())
    during = float(trainer.callback_metrics["val/loss"])
    after = trainer.validate(module, datamodule=Data(), verbose=False)[0]["val/loss"]
    tested = trainer.test(module, datamodule=Data(), verbose=False)[0]["val/loss"]
    return during, after, tested


def test_validation_in_training_equals_validation_afterwards():
    """Evaluated by two ranks in lock step, then by each rank with the whole module."""
    (during, after, tested), second = run_ranks(validate_between, 2, 2)
    assert during == pytest.approx(after, rel=1e-12)
    assert tested == pytest.approx(after, rel=1e-12)
    assert second == (during, after, tested)


class Sampling(L.Callback):
    """Samples in mid-training, as a picture-logging callback does."""

    def __init__(self):
        self.samples = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        x = torch.ones(2, 5, 12, dtype=torch.float64)
        text = torch.zeros(2, 4, dtype=torch.long)
        with trainer.strategy.whole_model(), torch.no_grad():
            for step in range(3):
                t = torch.full((2,), 1 - step / 3, dtype=torch.float64)
                x = x - module.denoise(x, t, text) / 3
        self.samples.append(x)


def sample(rank, world_size):
    module, sampling = build(Settings()), Sampling()
    trainer = quiet_trainer(
        devices=world_size, strategy=strategy(world_size), max_steps=2, callbacks=[sampling]
    )
    trainer.fit(module, datamodule=Data())
    return sampling.samples


def test_a_callback_samples_with_the_module_that_is_being_trained():
    (alone,) = run_ranks(sample, 1, 1)
    for samples in run_ranks(sample, 3, 3):
        for got, wanted in zip(samples, alone, strict=True):
            torch.testing.assert_close(got, wanted, atol=1e-10, rtol=1e-10)


class Trespasser(L.Callback):
    """Calls a layer of another stage in a hook."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        module.head(torch.zeros(1, 12, dtype=torch.float64))
        module.blocks[0](torch.zeros(1, 5, 12).double(), torch.zeros(1, 12).double())


def trespass(rank):
    trainer = quiet_trainer(devices=2, strategy=strategy(), callbacks=[Trespasser()])
    trainer.fit(build(Settings()), datamodule=Data())


def test_a_hook_that_calls_a_foreign_layer_is_told_whose_it_is():
    with pytest.raises(
        RankError, match=r"was called outside a pipeline step.* live on stage [01] \(rank"
    ):
        run_ranks(trespass, 2)


def fit_validate_fit(rank):
    module = build(Settings())
    trainer = quiet_trainer(devices=2, strategy=strategy(), max_epochs=1)
    import torch.distributed as dist

    groups = len(dist.distributed_c10d._world.pg_map)
    trainer.fit(module, datamodule=Data())
    trainer.validate(module, datamodule=Data(), verbose=False)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, datamodule=Data())
    assert module.head.weight.is_contiguous()
    assert "forward" not in vars(module.head)
    return groups, len(dist.distributed_c10d._world.pg_map), trainer.current_epoch


def test_a_trainer_can_be_used_again_and_leaves_nothing_behind():
    for before, after, epoch in run_ranks(fit_validate_fit, 2):
        assert before == after, "process groups leaked"
        assert epoch == 2
