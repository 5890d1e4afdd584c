"""Steps that ask their trainer for what is made only once there is a pipeline."""

import time

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_diffpipe.errors import ConfigurationError
from tests.distributed.scenarios import Recorder, fit_module, make, quick_strategy, quiet_trainer
from tests.distributed.tiny import Samples, TinyDiffusion
from tests.ranks import run_ranks


class Asks(TinyDiffusion):
    """Logs its learning rate and weighs its loss by how far training has come."""

    made = 0
    answers = ()  # of the class, as probes look at copies

    def training_step(self, batch, batch_idx):
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        num_steps = self.trainer.estimated_stepping_batches
        num_batches = self.trainer.num_training_batches
        assert len(self.trainer.train_dataloader) == num_batches
        rate = optimizer.param_groups[0]["lr"]
        assert [rate, rate] == [group["lr"] for group in self.trainer.optimizers[0].param_groups]
        assert scheduler.get_last_lr() == [rate, rate]
        Asks.answers = (*Asks.answers, num_steps)
        self.log("rate", rate)
        loss = self.loss(batch) * (1 + self.global_step / num_steps)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        Asks.made += 1
        optimizer = super().configure_optimizers()["optimizer"]
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=steps + 1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class Rates(Recorder):
    """Notes what was logged, too."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)
        self.rates = (*getattr(self, "rates", ()), float(trainer.callback_metrics["rate"]))


class Batches:
    """Batches of indices; counts how often somebody begins to read them."""

    passes = 0  # of the class, as one batch is taken from a copy

    def __iter__(self):
        Batches.passes += 1
        return iter([range(first, first + 4) for first in range(0, 24, 4)])

    def __len__(self):
        return 6


def train(rank, world_size, strategy=(), trainer=(), **loading):
    """Two epochs of 24 samples in batches of 4; what was answered, logged and lost."""
    Asks.made, Asks.answers = 0, ()
    recorder, loader = Rates(), DataLoader(Samples(24), **(loading or {"batch_size": 4}))
    options = {"use_distributed_sampler": True, "max_epochs": 2, **dict(trainer)}
    fit_module(Asks, world_size, loader, strategy, callbacks=[recorder], **options)
    return set(Asks.answers), Asks.made, recorder.rates, recorder.losses


def test_the_number_of_steps_is_known_outside_of_a_run():
    """History: an AttributeError, as nobody had shared the data out yet."""
    trainer = quiet_trainer(devices=1, strategy=quick_strategy(num_stages=1), max_epochs=2)
    module, loader = TinyDiffusion().double(), DataLoader(Samples(24), 4)
    trainer.strategy.connect(module)
    trainer._data_connector.attach_data(module, train_dataloaders=loader)
    assert trainer.estimated_stepping_batches == 12
    trainer.fit(module, loader)
    assert trainer.global_step == trainer.estimated_stepping_batches == 12


@pytest.mark.slow
def test_a_step_may_ask_for_optimizers_and_the_number_of_steps():
    """History: the set-up ended in errors of Lightning's, as it runs steps before there are optimizers."""
    runs, passes = [], []
    for world_size in (0, 1):
        Batches.passes, alone = 0, {"num_microbatches": 1}
        separate = {"use_distributed_sampler": False}
        runs.append(train(0, world_size, alone, separate, batch_sampler=Batches()))
        passes.append(Batches.passes)
    (answers, made, rates, losses), expected = runs[1], runs[0]
    assert answers == expected[0] == {12}
    assert made == expected[1] == 1, "what is made for trial runs leaves no trace"
    assert rates == pytest.approx(expected[2], rel=1e-6), "Lightning keeps single precision"
    assert len(set(rates)) == len(losses) == 12
    assert passes[1] == passes[0], "the first batch is planned with, and counting begins no pass"


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("strategy", "num_steps"), [({}, 12), ({"num_stages": 1, "data_parallel": 2}, 6)]
)
def test_all_ranks_read_their_own_optimizers_and_the_steps_of_their_pipeline(strategy, num_steps):
    """History: a loader made for the probe gave each rank samples of its own, and half as many steps."""
    alone = train(0, 1, trainer={"max_steps": num_steps})
    for answers, made, rates, losses in run_ranks(train, 2, 2, strategy):
        assert answers == {num_steps}
        assert made == 1
        assert rates == pytest.approx(alone[2])
        assert len(losses) == num_steps
        if num_steps == 12:  # else each rank has half of the samples
            assert losses == pytest.approx(alone[3], rel=1e-9)


class AsksForBatchesOnly(TinyDiffusion):
    """Weighs its loss by the place in the epoch, and asks for nothing else."""

    def training_step(self, batch, batch_idx):
        num_batches = int(self.trainer.num_training_batches)
        loss = self.loss(batch) * (1 + batch_idx / num_batches)
        self.log("loss", loss)
        self.log("batches", float(num_batches + len(self.trainer.train_dataloader)))
        return loss


def train_by_batches(rank, world_size):
    recorder, loader = Recorder(), DataLoader(Samples(24), 4)
    trainer = fit_module(AsksForBatchesOnly, world_size, loader, callbacks=[recorder])
    return float(trainer.callback_metrics["batches"]), recorder.losses


@pytest.mark.distributed
def test_the_number_of_batches_alone_may_be_asked_for():
    """History: OverflowError, as it was infinite until somebody asked for the number of steps."""
    alone = train_by_batches(0, 1)
    assert alone[0] == 12
    for batches, losses in run_ranks(train_by_batches, 2, 2):
        assert batches == 12
        assert losses == pytest.approx(alone[1], rel=1e-9)


class NeverMade(TinyDiffusion):
    """Has no optimizer to be made."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * self.optimizers().param_groups[0]["lr"]

    def configure_optimizers(self):
        raise KeyError("there is no setting lr")


@pytest.mark.slow
def test_what_fails_in_configure_optimizers_is_raised_where_a_step_asks():
    """History: "'_OnFirstUse' object has no attribute 'param_groups'"."""
    with pytest.raises(KeyError, match="there is no setting lr"):
        fit_module(NeverMade)


class RefusesOnOneRank(Asks):
    """A step that comes so far on rank 0 only."""

    def training_step(self, batch, batch_idx):
        if self.trainer.global_rank == 1:
            raise ConfigurationError("there is no embedding of this caption")
        return super().training_step(batch, batch_idx)


def train_until_refused(rank):
    module, started_s = make(RefusesOnOneRank), time.monotonic()
    with pytest.raises(ConfigurationError, match="no embedding of this caption"):
        fit_module(module, 2, DataLoader(Samples(24), 4))
    return time.monotonic() - started_s


@pytest.mark.distributed
def test_what_one_rank_refuses_is_raised_where_others_ask_for_the_number_of_steps():
    """History: they waited for it in the barrier after which Lightning counts batches."""
    assert max(run_ranks(train_until_refused, 2)) < 40, "the default group's timeout is 60 s"
