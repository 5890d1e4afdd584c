"""From a trainer to a pipeline: where module and batch are whenever the user's code runs, in one process."""

from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.trainer.states import RunningStage
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import MeanMetric

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.profiling.state import placed, undisturbed
from tests.distributed.scenarios import Settings, build, quick_strategy, quiet_trainer
from tests.distributed.tiny import Data, Samples, TinyDiffusion

HOST, GPU = torch.device("cpu"), torch.device("cuda", 0)


class MakesTensors(TinyDiffusion):
    """Makes tensors on `self.device` wherever a user may, and notes all devices at hand."""

    seen = ()  # of the class, as probes look at copies

    def __init__(self, **options):
        super().__init__(**options)
        self.inner = L.LightningModule()

    def setup(self, stage):
        self._device = self.inner._device = GPU  # as Lightning does where that is the root device

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.note(batch)
        return {**batch, "image": batch["image"] + torch.zeros(1, device=self.device)}

    def training_step(self, batch, batch_idx):
        self.note(batch)
        return self.loss(batch) + torch.zeros((), device=self.inner.device)

    def note(self, batch):
        tensors = (*self.parameters(), *self.buffers(), *batch.values())
        places = {self.device, self.inner.device, *(tensor.device for tensor in tensors)}
        MakesTensors.seen = (*MakesTensors.seen, places)


@pytest.mark.parametrize("options", [{"profile": "flops"}, {"profile": "measure", "verify": True}])
def test_a_module_knows_that_it_is_still_on_the_host(options, monkeypatch, tmp_path):
    """History: on GPUs every step that used `self.device` failed while it was probed, the built-in one, too.

    Lightning tells modules that they are on their device before anything is there, and probing begins on the host.
    """
    monkeypatch.setenv("DIFFPIPE_CACHE", str(tmp_path))
    monkeypatch.setattr(MakesTensors, "seen", ())
    module = build(Settings(module_class=MakesTensors))
    trainer = quiet_trainer(devices=1, strategy=quick_strategy(**options), max_steps=2)
    trainer.fit(module, datamodule=Data())
    assert len(MakesTensors.seen) > 6
    assert all(places == {HOST} for places in MakesTensors.seen)


def few(size, sampler=None):
    samples = Samples(size)
    sampler = sampler and sampler(samples)
    return DataLoader(samples, 8, sampler=sampler, drop_last=True)


def test_a_batch_that_is_never_full_ends_the_set_up():
    """History: a plan was made, nothing was trained, and the run ended as if all were well."""
    trainer = quiet_trainer(devices=1, strategy=quick_strategy())
    with pytest.raises(ConfigurationError, match="6 training samples make no batch of 8"):
        trainer.fit(build(Settings()), few(6))


def test_a_pipelines_share_that_makes_no_batch_ends_the_set_up():
    """The number of pipelines, which share the data out, is known once there is a plan."""
    strategy, state = quick_strategy(), SimpleNamespace(stage=RunningStage.TRAINING)
    strategy._lightning_module = SimpleNamespace(trainer=SimpleNamespace(state=state))
    strategy.pipeline = SimpleNamespace()
    loader = few(14, lambda samples: DistributedSampler(samples, num_replicas=2, rank=1))
    with pytest.raises(ConfigurationError, match="7 training samples for each pipeline make no"):
        strategy.process_dataloader(loader)


class Lit(L.LightningModule):
    """Has a metric, whose states are no buffers."""

    def __init__(self):
        super().__init__()
        self.mean = MeanMetric()


def test_metrics_are_where_a_step_is_timed_and_forget_it():
    """History: on GPUs a step that updated a metric could not be timed; on the host timing counted as training."""
    module, there = Lit(), torch.device("meta")  # the only other device a CPU has
    module.mean.update(3.0)
    with placed(module, there):
        assert module.mean.mean_value.device == module.mean.device == there
    with undisturbed(module), placed(module, HOST):
        module.mean.update(5.0)
        assert module.mean.compute() == 4.0
    assert module.mean.compute() == 3.0
    assert module.mean.mean_value.device == module.mean.device == HOST
