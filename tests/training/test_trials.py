"""Runs of a step before training leave no trace and are not seen; on one rank, plain Lightning is the oracle.

What fits measure; why there is no batch to plan with. What the first one is: tests/distributed/test_data.py.
"""

import itertools
import logging
import re
import sys
import types
import warnings
from collections import Counter
from functools import partial
from unittest import mock

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from wandb.integration.torch.wandb_torch import TorchHistory

from lightning_diffpipe.graph.trial import untouched
from lightning_diffpipe.profiling.measure import measure_profile
from lightning_diffpipe.training import preparation
from lightning_diffpipe.training.before_training import autocast_on_host, why_empty
from tests.distributed.scenarios import fit_module
from tests.distributed.tiny import Data, Stream, TinyDiffusion
from tests.rows import row

NUMBER, NUMBERS = 0, {"n": 0}


class Counting(nn.Sequential):
    """A layer, which may divide what it gives by the number of its call."""

    seen = 0
    own = False

    def forward(self, x):
        if not self.own:
            return super().forward(x)
        self.seen += 1
        return super().forward(x) / self.seen


class Holder:
    n = 0


class Module(L.LightningModule):
    """Divides its loss by a number that `count`, given the module, counts up; notes its losses."""

    calls = 0
    numbers = {"n": 0}  # noqa: RUF012

    def __init__(self, count, after=False):
        super().__init__()
        self.held, self.namespace, self.counter = {"n": 0}, types.SimpleNamespace(n=0), Counter()
        self.holder, self.ticks, self.total = Holder(), itertools.count(1), torch.zeros(())
        self.count, self.after, self.losses = count, after, []
        blocks = (Counting(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.net = nn.Sequential(*blocks)

    def loss(self, batch):
        return F.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        early = None if self.after else self.count(self)
        loss = self.loss(batch)
        return loss / (self.count(self) if self.after else early)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"].detach()))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def of_class(module):
    module.calls += 1
    return module.calls


def on_the_class(module):
    type(module).calls += 1
    return module.calls


def by_default(module):
    module.own = getattr(module, "own", 0) + 1
    return module.own


def if_missing(module):
    if not hasattr(module, "own"):
        module.own = 0
    module.own += 1
    return module.own


def in_dict(module, name="held"):
    holder = getattr(module, name)
    holder["n"] += 1
    return holder["n"]


def in_object(module, name="holder"):
    holder = getattr(module, name)
    holder.n += 1
    return holder.n


def of_file(module):
    global NUMBER
    NUMBER += 1
    return NUMBER


def in_dict_of_file(module):
    NUMBERS["n"] += 1
    return NUMBERS["n"]


def by_iterator(module):
    return next(module.ticks)


def in_tensor(module):
    module.total += 1
    return module.total.clone()


def in_layer(module):
    module.net[0].own = True
    return 1


COUNTS = {
    "an attribute first set in the class": of_class,
    "an attribute of the class": on_the_class,
    "getattr with a default": by_default,
    "an attribute set if it is missing": if_missing,
    "a dict": in_dict,
    "a dict of the class": partial(in_dict, name="numbers"),
    "a Counter": partial(in_dict, name="counter"),
    "an object": in_object,
    "a namespace": partial(in_object, name="namespace"),
    "a file": of_file,
    "a dict of a file": in_dict_of_file,
    "an iterator": by_iterator,
    "a tensor": in_tensor,
    "a layer": in_layer,
}
OF_ATTRIBUTES = tuple(COUNTS)[:1] + tuple(COUNTS)[2:4]


def loader():
    torch.manual_seed(0)
    return DataLoader(TensorDataset(torch.randn(18, 4), torch.randn(18, 4)), batch_size=6)


def losses_of(make, world_size=1, num_microbatches=1, **options):
    torch.manual_seed(0)
    module = make()
    strategy = {"num_microbatches": num_microbatches}
    fit_module(module, world_size, loader(), strategy, max_epochs=1, **options)
    return module.losses


@pytest.fixture
def counted_from_0(monkeypatch):
    """Puts back what the oracle has counted in classes and files."""

    def begin():
        monkeypatch.setattr(Module, "calls", 0)
        monkeypatch.setattr(Module, "numbers", {"n": 0})
        monkeypatch.setattr(Holder, "n", 0)
        monkeypatch.setitem(NUMBERS, "n", 0)
        monkeypatch.setattr(sys.modules[__name__], "NUMBER", 0)

    begin()
    return begin


def check(make, begin, **options):
    expected = losses_of(make, world_size=0)
    begin()
    assert losses_of(make, **options) == pytest.approx(expected, rel=1e-5)
    assert len(set(expected)) == len(expected)


@pytest.mark.parametrize(
    "kept_in",
    [k if k in ("an attribute first set in the class", "a layer") else row(k) for k in COUNTS],
)
def test_a_step_counts_from_its_first_batch_on(kept_in, counted_from_0):
    """History: a counter first set in the class went on from what trial runs had counted: loss 0.045 for 0.769."""
    check(partial(Module, COUNTS[kept_in]), counted_from_0, num_microbatches=1)


@pytest.mark.parametrize("after", [False, row(True)])
@pytest.mark.parametrize("kept_in", [OF_ATTRIBUTES[0], *map(row, OF_ATTRIBUTES[1:])])
def test_a_counter_counts_batches_not_microbatches(kept_in, after, counted_from_0):
    make = partial(Module, COUNTS[kept_in], after=after)
    check(make, counted_from_0, num_microbatches=2)


class ToList(DummyLogger):
    """Has a list for what is written."""

    def __init__(self):
        super().__init__()
        self.written = []

    @property
    def experiment(self):
        return types.SimpleNamespace(add=self.written.append)


class Talks(Module):
    """Prints, logs and writes to its logger in every step."""

    def training_step(self, batch, batch_idx):
        print("a step")
        print("a step", file=sys.stderr)
        logging.getLogger("user").info("a step")
        self.logger.experiment.add("a step")
        return self.loss(batch)

    def backward_noted(self, gradient):
        print("a gradient")


def test_nobody_sees_trial_runs(capsys, caplog):
    """History: a step printed 40 times for 4 batches; hooks on gradients saw 208 of trials before 4 right ones."""
    caplog.set_level(logging.INFO)

    def make():
        module = Talks(of_class)
        module.net[0][0].weight.register_hook(module.backward_noted)
        return module

    logger = ToList()
    assert len(losses_of(make, logger=logger)) == 3
    printed = capsys.readouterr()
    assert (printed.out.count("a step"), printed.out.count("a gradient")) == (3, 3)
    assert printed.err.count("a step") == 3
    assert sum(record.name == "user" for record in caplog.records) == 3
    assert logger.written == ["a step"] * 3


def histograms_of(world_size, folder, monkeypatch):
    """Returns how often `WandbLogger.watch` records each tensor while a module trains, and its losses."""
    names, logger = [], WandbLogger(save_dir=folder, offline=True)

    def make():
        module = Module(of_class)
        logger.watch(module.net, log="all", log_freq=1)
        return module

    with monkeypatch.context() as patch:
        record = lambda self, tensor, name: names.append(name)
        patch.setattr(TorchHistory, "log_tensor_stats", record)
        losses = losses_of(make, world_size, logger=logger)
    logger.experiment.finish()
    return Counter(name.replace("graph_1", "") for name in names), losses


@pytest.mark.slow
def test_what_a_logger_watches_is_that_of_training(counted_from_0, tmp_path, monkeypatch):
    """History: 208 histograms of trial runs came before 4 right ones."""
    expected = histograms_of(0, tmp_path, monkeypatch)
    counted_from_0()
    assert histograms_of(1, tmp_path, monkeypatch) == expected
    # In three steps four parameters and their gradients.
    assert (*expected[0].values(),) == (3,) * 8


@pytest.mark.slow
@pytest.mark.parametrize("kind", [CSVLogger, ToList])
def test_trial_runs_find_the_folder_of_the_logger(kind, tmp_path):
    """History: `trainer.log_dir` was None in them, so that a step which wrote there ended before training."""

    class Writes(Module):
        validation_step = None  # as Lightning's own tests say that there is none

        def training_step(self, batch, batch_idx):
            with (tmp_path / "seen").open("a") as file:  # nothing else outlives a trial
                print(self.trainer.log_dir, file=file)
            return self.loss(batch)

    logger = CSVLogger(tmp_path, "name", 3) if kind is CSVLogger else ToList()
    expected = f"{tmp_path}/name/version_3" if kind is CSVLogger else "None"
    losses_of(partial(Writes, of_class), logger=logger)
    folders = (tmp_path / "seen").read_text().splitlines()
    assert len(folders) > 3, "trials have recorded it, too"
    assert {*folders} == {expected}


def test_warnings_of_trial_runs_are_shown():
    """They come once for each line: hidden then, they would never be seen."""
    with pytest.warns(UserWarning, match="once"), untouched(nn.Linear(1, 1)):
        warnings.warn("once", stacklevel=1)


@pytest.mark.parametrize("shuffle", [True, False])
def test_fewer_samples_than_a_batch_make_none_where_the_rest_is_dropped(shuffle):
    """History: a plan was made for ten samples, nothing was trained, and the run ended without an error."""
    loader = DataLoader(range(10), 16, shuffle=shuffle, drop_last=True)
    for loaders in (loader, [loader], CombinedLoader({"a": loader})):
        assert why_empty(loaders) == (
            "10 training samples make no batch of 16, and smaller ones are left out (drop_last=True); set the "
            "batch size (data.batch_size) to 10 or less"
        )
    assert (
        why_empty(DataLoader(Stream(torch.arange(5.0)), 2))
        == "the training data loader is empty: it yields no batch"
    )


def test_autocast_of_gpus_holds_on_the_host_while_a_step_for_one_is_probed_there(monkeypatch):
    """History: a step that relied on the types it would train in failed before training."""
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    layer, x = torch.nn.Linear(2, 2), torch.randn(1, 2)
    with autocast_on_host():
        with torch.autocast("cuda", torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
            with torch.autocast("cuda", enabled=False):
                assert layer(x).dtype == torch.float32
            with pytest.raises(ValueError, match="inside"), torch.autocast("cuda", torch.float16):
                raise ValueError("inside")
            assert layer(x).dtype == torch.bfloat16
        assert layer(x).dtype == torch.float32
    with torch.autocast("cuda", torch.bfloat16):
        assert layer(x).dtype == torch.float32


class Table(nn.Embedding):
    """A frozen layer whose results have one type, whatever that of its weights is."""

    def forward(self, indices):
        return super().forward(indices).double()


@pytest.mark.slow
def test_a_second_fit_takes_the_times_of_the_first_and_says_what_took_how_long(caplog, monkeypatch):
    caplog.set_level(logging.INFO, "lightning_diffpipe")
    monkeypatch.setattr(preparation, "_TOLD_S", 0.0)
    module, counts = TinyDiffusion().double(), []
    module.text = Table.from_pretrained(module.text.weight)
    timed = mock.Mock(side_effect=measure_profile)
    with mock.patch("lightning_diffpipe.training.plan_source.measure_profile", timed):
        for batch_size in (4, 4, 8):
            fit_module(module, 1, Data(batch_size=batch_size), {"profile": "measure"}, max_steps=1)
            counts.append(timed.call_count)
        module.text.float()  # which no graph shows
        fit_module(module, 1, Data(batch_size=8), {"profile": "measure"}, max_steps=1)
    assert [*counts, timed.call_count] == [1, 1, 2, 3]
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("ready in")]
    assert len(lines) == 4
    whole, *parts = map(float, re.findall(r"([0-9.]+) s", lines[0]))
    assert all(part in lines[0] for part in ("probing the step", "profiling layers"))
    assert whole == pytest.approx(sum(parts), abs=0.5)
