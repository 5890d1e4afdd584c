"""From a trainer to a pipeline: where module and batch are whenever the user's code runs, in one process."""

import io
import pickle
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.trainer.states import RunningStage
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, SumMetric

from lightning_diffpipe import DiffPipeStrategy
from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.graph.building import built_bytes, built_in_files
from lightning_diffpipe.graph.trial import untouched
from lightning_diffpipe.profiling.step_run import placed, undisturbed
from lightning_diffpipe.training import strategy
from tests.distributed.scenarios import fit_module, make, quick_strategy, quiet_trainer
from tests.distributed.tiny import Data, Samples, TinyDiffusion


def torch_saved(trainer):
    torch.save(trainer, file := io.BytesIO())
    file.seek(0)
    return pickle.dumps(torch.load(file, weights_only=False))


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


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"profile": "flops"}, {"profile": "measure", "verify": True}])
def test_a_module_knows_that_it_is_still_on_the_host(options, monkeypatch):
    """History: on GPUs every step that used `self.device` failed while it was probed, the built-in one, too."""
    monkeypatch.setattr(MakesTensors, "seen", ())
    whole = {"num_stages": "auto", "num_microbatches": "auto"}
    fit_module(MakesTensors, strategy={**whole, **options}, max_steps=2)
    assert len(MakesTensors.seen) > 6
    assert all(places == {HOST} for places in MakesTensors.seen)


class ReturnsMore(TinyDiffusion):
    """Gives callbacks more than the loss, as Lightning allows."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return {"loss": loss, "half": loss / 2, "pred": batch["image"]}


@pytest.mark.slow
@pytest.mark.parametrize("module_class", [ReturnsMore, TinyDiffusion])
def test_what_a_step_returns_beside_the_loss_is_named_once(module_class, recwarn):
    """History: it was dropped without a word, and a callback got a KeyError after the first step."""
    fit_module(module_class, max_steps=2)
    said = [str(w.message) for w in recwarn if "only the loss leaves" in str(w.message)]
    assert len(said) == (module_class is ReturnsMore)
    assert all("training_step returns 'half', 'pred' besides the loss" in text for text in said)


def few(size):
    return DataLoader(Samples(size), 8, drop_last=True)


def test_a_batch_that_is_never_full_ends_the_set_up():
    """History: a plan was made, nothing was trained, and the run ended as if all were well."""
    with pytest.raises(ConfigurationError, match="6 training samples make no batch of 8"):
        fit_module(data=few(6))


def test_a_pipelines_share_that_makes_no_batch_ends_the_set_up():
    """The number of pipelines, which share the data out, is known once there is a plan."""
    strategy, state = quick_strategy(), SimpleNamespace(stage=RunningStage.TRAINING)
    connector = SimpleNamespace(use_distributed_sampler=True)
    trainer = SimpleNamespace(state=state, _accelerator_connector=connector)
    strategy._lightning_module = SimpleNamespace(trainer=trainer)
    layout = SimpleNamespace(num_pipelines=2)
    mesh = SimpleNamespace(layout=layout, pipeline=1, from_first=lambda value: value)
    strategy.pipeline = SimpleNamespace(mesh=mesh)
    with pytest.raises(ConfigurationError, match="7 training samples for each pipeline make no"):
        strategy.process_dataloader(few(14))


class Pairs(Samples):
    """Images, each with a short and a long caption."""

    def __getitem__(self, index):
        return super().__getitem__(index)["image"], ("a" * index, "b" * 2 * index)


def as_pairs(samples):
    images, captions = zip(*samples, strict=True)
    return {"image": torch.stack(images), "captions": list(captions)}


class ReadsPairs(L.LightningModule):
    """Encodes both captions of each image with a frozen layer."""

    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.Linear(2, 8).requires_grad_(False)
        self.body, self.head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 15)
        self.rows = {}

    def training_step(self, batch, batch_idx):
        images = batch["image"]
        lengths = [[len(short), len(long)] for short, long in batch["captions"]]
        coded = self.encoder(torch.tensor(lengths, dtype=images.dtype) / 10)
        return (self.head(self.body(coded).tanh()) - images.flatten(1)).pow(2).mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        pipeline = getattr(self.trainer.strategy, "pipeline", None)
        for name, made in pipeline.engine.layout.steps._made.items() if pipeline else ():
            self.rows[name] = made.graph.layers[0].argument_rows

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def test_two_pairs_of_captions_are_those_of_two_samples():
    """History: probes on two samples, and last batches of two, took them for two parts of the batch."""
    weights = []
    for world_size in (0, 1):
        module = make(ReadsPairs)
        fit_module(module, world_size, DataLoader(Pairs(10), 4, collate_fn=as_pairs))  # 4, 4, 2
        weights.append(dict(module.state_dict()))
    torch.testing.assert_close(*weights)
    assert len(module.rows) == 2, "microbatches of two samples and of one"
    assert set(module.rows.values()) == {(1,)}


class Lit(L.LightningModule):
    """Has metrics, whose states are no buffers."""

    def __init__(self):
        super().__init__()
        self.mean, self.sum = MeanMetric(), SumMetric()


def test_metrics_are_where_a_step_is_timed_and_forget_it():
    """History: on GPUs a step that updated a metric could not be timed; on the host timing and probing counted."""
    module, there = Lit(), torch.device("meta")  # the only other device a CPU has
    module.mean.update(3.0)
    with placed(module, there):
        assert module.mean.mean_value.device == module.mean.device == there
    with undisturbed(module):
        module.mean.update(5.0)
        assert module.mean.compute() == 4.0
    assert module.mean.compute() == 3.0
    assert module.mean.mean_value.device == module.mean.device == HOST
    with placed(module, HOST), untouched(module):
        module.sum.update(7.0)  # in place
    assert module.sum.sum_value == module.sum.update_count == 0


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after fit", "after validate"])
@pytest.mark.parametrize("stored", [pickle.dumps, torch_saved])
def test_a_trainer_can_be_pickled(stored, when):
    """History: after a run one held a nameless function, with which it could not be stored."""
    strategy = quick_strategy(profile="flops")
    trainer = quiet_trainer(devices=1, strategy=strategy, max_steps=2, max_epochs=-1)
    if when != "before":
        run = trainer.fit if when == "after fit" else trainer.validate
        run(make(), datamodule=Data())
    again = pickle.loads(stored(trainer))
    assert type(again.strategy) is DiffPipeStrategy
    assert again.global_step == trainer.global_step
    again.fit_loop.epoch_loop.max_steps = 3
    again.fit(make(), datamodule=Data())
    assert again.global_step == 3


def test_weights_that_take_much_memory_before_they_are_cut_are_told(monkeypatch):
    told = []
    monkeypatch.setattr(strategy, "rank_zero_info", lambda text, *_: told.append(text))
    module = make(TinyDiffusion)
    held = sum(p.nbytes for p in module.parameters())
    for most in (held, held - 1):
        monkeypatch.setattr(strategy, "_MANY_BYTES", most)
        fit_module(module, max_steps=1)
    assert sum("0.0 GiB of weights take memory" in text for text in told) == 1
    with built_in_files(root := nn.Module()):
        root.layer = nn.Linear(64, 2**13, bias=False)
    assert built_bytes(root) == 0


class Resets(L.LightningModule):
    """Gives its only layer new weights in each step."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12, 1)

    def training_step(self, batch, batch_idx):
        self.layer.weight.data = torch.ones_like(self.layer.weight.data)
        return self.layer(batch["image"].flatten(1)[:, :12]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters())


def test_a_step_that_replaces_all_weights_is_refused_by_name():
    """History: nothing was left that is trained, which was an IndexError."""
    with pytest.raises(
        ConfigurationError, match=r"changes 1 parameters itself, e\.g\. layer\.weight"
    ):
        fit_module(Resets)
