"""Data are loaded once per pipeline, by one rank, which calls hooks as often as one process does."""

import contextlib
import os

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler
from torchmetrics import MeanMetric, SumMetric

from tests.distributed.scenarios import (
    Settings,
    fit,
    fit_module,
    make,
    on_ranks,
    quick_strategy,
    quiet_trainer,
)
from tests.distributed.tiny import Data, Samples, Stream, TinyDiffusion
from tests.ranks import run_ranks
from tests.rows import row

pytestmark = pytest.mark.distributed

HOOKS = (
    "train_dataloader",
    "val_dataloader",
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
)


class Counted(Dataset):
    """Samples; notes which were asked for."""

    def __init__(self, size=12):
        self.samples, self.asked = Samples(size), []

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        self.asked.append(index)
        return self.samples[index]


class Own:
    """A loader that is no `DataLoader`."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter(DataLoader(self.data, 4))


def batches(data, count=3):
    """A generator of batches."""
    loader = DataLoader(data, 4)
    for _ in range(count):
        yield from loader


LOADERS = {
    "in order": lambda data: DataLoader(data, 4),
    "the last one smaller": lambda data: DataLoader(data, 5),
    "a batch sampler": lambda data: DataLoader(data, batch_sampler=[[3, 1], [0, 2, 5], [4]]),
    "a stream": lambda data: DataLoader(Stream(data), 4),
    "a stream that goes on": lambda data: DataLoader(Stream(data, iter(list(range(12)) * 3)), 4),
    "a generator": batches,
    "a loader of one's own": lambda data: Own(data),
    "two loaders": lambda data: {
        "a": DataLoader(data, 2),
        "b": DataLoader(data, 2, sampler=[4, 7]),
    },
    "the shorter one ends": lambda data: CombinedLoader(
        {"a": DataLoader(data, 2), "b": DataLoader(data, 2, sampler=[4, 7, 8, 1])}, "min_size"
    ),
}


class Counts(TinyDiffusion):
    """Counts its hooks, and notes what it trains on."""

    def __init__(self, kind):
        super().__init__(num_blocks=2)
        self.kind, self.data, self.val_data = kind, Counted(), Counted(4)
        self.calls, self.seen = dict.fromkeys(HOOKS, 0), []

    def train_dataloader(self):
        self.calls["train_dataloader"] += 1
        return LOADERS[self.kind](self.data)

    def val_dataloader(self):
        self.calls["val_dataloader"] += 1
        return DataLoader(self.val_data, 2)

    def training_step(self, batch, batch_idx):
        parts = [batch] if "image" in batch else [batch["a"], batch["b"]]
        return sum(self.loss(each) for each in parts)

    def on_train_batch_start(self, batch, batch_idx):
        parts = [batch] if "image" in batch else [batch["a"], batch["b"]]
        self.seen.append([each["image"].sum().item() for each in parts])

    def on_before_batch_transfer(self, batch, dataloader_idx):
        self.calls["on_before_batch_transfer"] += 1
        return batch

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        self.calls["transfer_batch_to_device"] += 1
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.calls["on_after_batch_transfer"] += 1
        return batch


def count(rank, world_size, kind, options, trainer_options):
    module = make(Counts, kind=kind)
    trainer = fit_module(
        module, world_size, None, options, num_sanity_val_steps=1, **trainer_options
    )
    return module.calls, module.data.asked, module.val_data.asked, module.seen, trainer.global_step


OPTIONS = {
    "two epochs": {"max_epochs": 2},
    "steps": {"max_epochs": -1, "max_steps": 4},
    "accumulating": {"max_epochs": 1, "accumulate_grad_batches": 2},
    "a part": {"max_epochs": 2, "limit_train_batches": 2},
    "reloading": {"max_epochs": 2, "reload_dataloaders_every_n_epochs": 1},
}


@pytest.mark.parametrize(
    ("options", "filling"),
    [
        ("two epochs", "shares"),
        *(row(name, filling) for name in OPTIONS for filling in ("shares", "none")),
    ],
)
def test_samples_are_read_and_hooks_called_on_one_rank_as_in_one_process(options, filling):
    """History: every rank read all samples, the first ones once more, and hooks ran for them twice."""
    settings = OPTIONS[options]
    for kind in LOADERS:
        if kind in ("a generator", "a stream that goes on") and options == "reloading":
            continue  # plain Lightning begins them twice, and loses a batch
        alone = count(0, 0, kind, {}, settings)
        calls, asked, val_asked, seen, steps = alone
        if options == "reloading" and len(asked) == 28:  # plain Lightning reads a batch twice
            alone = calls, list(range(12)) * 2, val_asked, seen, steps
        first, second = run_ranks(count, 2, 2, kind, {"filling": filling}, settings)
        assert first == alone, kind
        assert second[3:] == (seen, steps), kind
        made = {name: calls[name] for name in HOOKS[:2]}
        assert second[0] == {**dict.fromkeys(HOOKS, 0), **made}, kind
        assert second[1:3] == ([], []), kind
        assert val_asked


class Rows(Dataset):
    """Numbers, shifted at random."""

    def __len__(self):
        return 7

    def __getitem__(self, index):
        return torch.full((4,), float(index)) + torch.rand(4)


class OwnBatches(BatchSampler):
    """A batch sampler that Lightning does not know how to make."""

    def __init__(self):
        super().__init__(SequentialSampler(Rows()), 2, False)

    def __iter__(self):
        return iter([[6, 1], [0], [2, 3, 4, 5]])

    def __len__(self):
        return 3


EVALUATED = {
    "in order": lambda: DataLoader(Rows(), 2),
    "shuffled": lambda: DataLoader(Rows(), 3, shuffle=True),
    "a batch sampler": lambda: DataLoader(
        Rows(), batch_sampler=BatchSampler(SequentialSampler(Rows()), 3, False)
    ),
    "several": lambda: [DataLoader(Rows(), 2), DataLoader(Rows(), 3)],
    "a stream": lambda: DataLoader(Stream(Rows()), 2),
    "a batch sampler of one's own": lambda: DataLoader(Rows(), batch_sampler=OwnBatches()),
}


class Evaluated(L.LightningModule):
    """Draws numbers in its steps, and logs in all ways."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.Linear(4, 2))
        self.mean, self.sum = MeanMetric(), SumMetric()
        self.seen, self.transfers = [], 0

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.transfers += 1
        return batch + torch.rand(())

    def _evaluate(self, batch, batch_idx, dataloader_idx=0):
        self.seen.append((batch_idx, dataloader_idx, batch.tolist()))
        value = self.net(batch + torch.rand_like(batch)).square().mean()
        self.log("plain", value)
        self.log("synced", value, sync_dist=True)
        self.log("total", value, sync_dist=True, reduce_fx="sum")
        self.mean(value)
        self.sum(value)
        self.log_dict({"mean metric": self.mean, "sum metric": self.sum})

    validation_step = test_step = _evaluate

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        self.seen.append((batch_idx, dataloader_idx, batch.tolist()))
        return self.net(batch + torch.rand_like(batch)).tolist()


class Writer(BasePredictionWriter):
    """Notes the indices that it is to write predictions of."""

    def __init__(self):
        super().__init__("batch_and_epoch")
        self.indices, self.of_epoch = [], None

    def write_on_batch_end(self, trainer, module, prediction, indices, batch, batch_idx, loader):
        self.indices.append(indices)

    def write_on_epoch_end(self, trainer, module, predictions, indices):
        self.of_epoch = indices


def evaluate(rank, devices, options, names):
    """What is logged, seen, predicted and written for each kind of loader, outside of `fit`."""
    found = {}
    for name in names:
        for call in ("validate", "test", "predict"):
            if call == "predict" and name == "a batch sampler of one's own":
                continue  # as Lightning, which makes it again
            module, writer = Evaluated(), Writer()
            strategy = quick_strategy(**options) if devices else "auto"
            trainer = quiet_trainer(
                devices=max(devices, 1), strategy=strategy, callbacks=[writer],
                use_distributed_sampler=True,
            )  # fmt: skip
            torch.manual_seed(5)
            quiet = {} if call == "predict" else {"verbose": False}
            results = getattr(trainer, call)(module, EVALUATED[name](), **quiet)
            found[name, call] = (results, module.seen, writer.indices, writer.of_epoch)
            found[name, call, "transfers"] = module.transfers
    return found


@pytest.mark.parametrize(
    ("devices", "options"),
    [
        (2, {"num_stages": 2}),
        row(2, {}),
        row(3, {"num_stages": 3}),
        row(2, {"num_stages": 1, "num_replicas": 2}),
        row(1, {}),
    ],
)
def test_evaluation_outside_of_fit_is_that_of_one_process(devices, options):
    """History: each rank of a pipeline got every second sample, and its own random numbers."""
    alone = evaluate(0, 0, {}, EVALUATED)
    for rank, found in enumerate(run_ranks(evaluate, devices, devices, options, list(EVALUATED))):
        for key, expected in alone.items():
            if "transfers" in key:
                assert found[key] == (0 if rank else expected), key
                continue
            for one, other in zip(found[key], expected, strict=True):
                if one and isinstance(one[0], dict):
                    assert [each.keys() for each in one] == [each.keys() for each in other]
                    for logged, right in zip(one, other, strict=True):
                        assert logged == pytest.approx(right, rel=1e-6), key
                else:
                    assert one == other, key


def test_pipelines_outside_of_fit_share_samples_as_in_fit():
    options = {"num_stages": 1, "data_parallel": 2}
    first, second = run_ranks(evaluate, 2, 2, options, ["in order"])
    indices = [found["in order", "predict"][2] for found in (first, second)]
    assert indices == [[[0, 2], [4, 6]], [[1, 3], [5]]]


class Unlike(Data):
    """Another order of samples on rank 1."""

    def loader(self, size):
        loader = super().loader(size)
        if os.environ.get("LOCAL_RANK") == "1":
            loader.dataset.images = loader.dataset.images.flip(0)
        return loader


def test_ranks_whose_data_differ_train_on_those_of_the_first():
    """History: each rank trained its layers on what it had loaded."""
    alone = fit(0, Settings(strategy={"num_microbatches": 2}), 1)
    for outcome in on_ranks(2, data_class=Unlike):
        assert outcome.losses == pytest.approx(alone.losses, rel=1e-9)


class Unlucky(Counted):
    """One sample cannot be read."""

    def __init__(self, bad):
        super().__init__()
        self.bad = bad

    def __getitem__(self, index):
        if index == self.bad:
            raise OSError(f"image {index} is cut short")
        return super().__getitem__(index)


def error_of(rank, *arguments, **options):
    """What training ends with."""
    try:
        fit_module(*arguments, **options, strategy={"timeout_s": 10})
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def fail(rank, bad):
    return error_of(rank, make(num_blocks=2), 2, DataLoader(Unlucky(bad), 4))


@pytest.mark.parametrize("bad", [row(0), 9])
def test_a_sample_that_cannot_be_read_ends_all_ranks_with_its_message(bad):
    first, second = run_ranks(fail, 2, bad)
    assert first.startswith(f"OSError: image {bad} is cut short")
    assert second.startswith("LostRankError")
    assert f"it failed with OSError: image {bad} is cut short" in second


def once(rank, kind):
    module = make(Counts, kind=kind)
    module.stream = batches(module.data, count=1)
    module.train_dataloader = lambda: module.stream
    says = "training stops in epoch 1, for which its loader gave"
    with contextlib.nullcontext() if rank else pytest.warns(UserWarning, match=says):
        fit_module(module, 2, None, max_epochs=-1, max_steps=50)
    return len(module.seen)


def test_a_stream_that_is_used_up_ends_training():
    """History: epochs without a batch followed each other for ever."""
    assert run_ranks(once, 2, "a generator") == [3, 3]


class Unsendable(Counts):
    """Puts into its batches what cannot be pickled."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return {**batch, "later": lambda: batch}


class WholeInTransfer(Counts):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        with self.trainer.strategy.whole_model():
            return batch


class Fetching(Counts):
    def training_step(self, dataloader_iter):
        """Never run."""


def refuse(rank, module_class):
    return error_of(rank, make(module_class, kind="in order"), 2, None)


def fit_no_loader(rank):
    return error_of(rank, make(num_blocks=2), 2, 5)


def test_what_is_no_loader_is_named_on_all_ranks():
    for error in run_ranks(fit_no_loader, 2):
        assert error.startswith("TypeError: An invalid dataloader was passed to `Trainer.fit")


@pytest.mark.parametrize(
    ("module_class", "message"),
    [
        (Unsendable, "a batch cannot be sent to the other ranks of the pipeline"),
        (WholeInTransfer, "use the whole model in the step"),
        (Fetching, "Take (batch, batch_idx)"),
    ],
)
def test_what_cannot_be_where_one_rank_loads_is_refused_with_a_cure(module_class, message):
    first, second = run_ranks(refuse, 2, module_class)
    assert first.startswith("ConfigurationError: ")
    assert message in first
    assert message[:20] in second
