"""What a step may do besides computing a loss, and what is refused, on all ranks and before training."""

import copy
import re
from collections import deque

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch import nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities import dim_zero_cat

from lightning_diffpipe.errors import ConfigurationError
from tests.command import ROOT
from tests.distributed.scenarios import Settings, fit, fit_module, make, on_ranks
from tests.distributed.tiny import Data, TinyDiffusion
from tests.ranks import run_in_turn, run_ranks

pytestmark = pytest.mark.distributed


class Talks(TinyDiffusion):
    """Asks the other ranks for something in its step."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def training_step(self, batch, batch_idx):
        return getattr(self, self.how)(super().training_step(batch, batch_idx))

    def all_gather_of_lightning(self, loss):
        return self.all_gather(loss).mean() + loss

    def all_reduce(self, loss):
        total = loss.detach().clone()
        dist.all_reduce(total)
        return loss + total

    def differentiable_all_reduce(self, loss):
        return differentiable.all_reduce(loss)

    def all_gather_object(self, loss):
        box = [None] * dist.get_world_size()
        dist.all_gather_object(box, float(loss))
        return loss

    def barrier(self, loss):
        self.trainer.strategy.barrier()
        return loss


CALLS = {
    "all_gather_of_lightning": "all_gather",
    "all_reduce": "all_reduce",
    "differentiable_all_reduce": "all_reduce",
    "all_gather_object": "all_gather_object",
    "barrier": "barrier",
}


def refusal(rank, how):
    try:
        fit(rank, Settings(module_class=Talks, module={"how": how}), 2)
    except ConfigurationError as error:
        return str(error)


def test_a_collective_in_a_step_is_refused_by_name_on_all_ranks():
    """History: ranks waited for each other until a timeout that named something else."""
    refusals = run_in_turn(refusal, 2, *((how,) for how in CALLS))
    for call, ranks in zip(CALLS.values(), refusals, strict=True):
        for said in ranks:
            assert f"training_step calls {call}, which waits for all ranks" in said
            assert "tests/distributed/test_steps.py:" in said
            assert "self.log" in said


class LogsOverRanks(TinyDiffusion):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train/synced", loss, sync_dist=True)
        return loss


def test_logging_over_ranks_is_the_cure():
    outcomes = on_ranks(
        4, module_class=LogsOverRanks, strategy={"num_stages": 2, "num_replicas": 1}, data={"batch_size": 3},
        trainer={"max_steps": 2},
    )  # fmt: skip
    last = [outcome.losses[-1] for outcome in outcomes]
    assert last[0] == last[1] != last[2]
    for outcome in outcomes:
        assert outcome.metrics["train/synced"] == pytest.approx((last[0] + last[2]) / 2)


class Counts(Metric):
    """A sum over samples, stored in checkpoints."""

    def __init__(self):
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), "sum", persistent=True)
        self.add_state("samples", torch.zeros((), dtype=torch.long), "sum", persistent=True)

    def update(self, errors):
        self.total, self.samples = self.total + errors.sum(), self.samples + len(errors)

    def compute(self):
        return self.total / self.samples


class All(Metric):
    """Everything there was: states of it are lists, empty on ranks that see nothing."""

    def __init__(self):
        super().__init__()
        self.add_state("seen", [], "cat")

    def update(self, errors):
        self.seen.append(errors)

    def compute(self):
        return dim_zero_cat(self.seen).sort().values[1::3].sum()


class Measures(TinyDiffusion):
    """Logs metric objects in training: by themselves, in a dictionary, and updated only."""

    def __init__(self):
        super().__init__()
        self.error, self.all = Counts(), All()
        self.others = MetricCollection({"train/third": Counts()})
        self.epochs, self.saved = [], []

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            mean, log_variance = self.encoder(batch["image"]).chunk(2, -1)
        t = torch.sigmoid(batch["image"].mean((1, 2)))
        wrong = (self.denoise(mean, t, batch["text"]) - log_variance).pow(2).mean((1, 2))
        errors = wrong.detach()
        self.error(errors)
        self.log("train/error", self.error, on_step=True, on_epoch=True)
        self.all.update(errors)
        self.others(3 * errors)
        self.log_dict({"train/all": self.all}, on_step=False, on_epoch=True)
        self.log_dict(self.others, on_step=False, on_epoch=True)
        return wrong.mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        state = self.trainer.strategy.lightning_module_state_dict()
        self.saved.append({name: float(state[name]) for name in state if name.startswith("error.")})

    def on_train_epoch_start(self):
        self.epochs.append({n: float(v) for n, v in self.trainer.callback_metrics.items()})


def measured(rank, world_size, options, batch_size):
    """Metrics of every epoch, and what checkpoints would hold after every batch."""
    module, data = make(Measures), Data(size=24, batch_size=batch_size)
    trainer = fit_module(module, world_size, data, options, max_epochs=3, limit_val_batches=0)
    final = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return [*module.epochs[1:], final], module.saved


@pytest.mark.parametrize(
    "options",
    [
        {"num_stages": 2, "num_microbatches": 3},
        {"num_stages": 2, "num_replicas": (1, 2), "num_microbatches": 3},
        {"num_stages": 2, "num_replicas": 1, "num_microbatches": 2, "data_parallel": 2},
    ],
)
def test_metric_objects_are_logged_as_in_one_process(options):
    """History: one was refused in the first step, on the last rank; the others waited for it."""
    pipelines = options.get("data_parallel", 1)
    world_size = 2 * pipelines if pipelines > 1 else sum(options.get("num_replicas", (1, 1)))
    alone, saved = measured(0, 0, (), 6)
    ranks = run_ranks(measured, world_size, world_size, options, 6 // pipelines)
    for epochs, _ in ranks:
        for found, expected in zip(epochs, alone, strict=True):
            names = expected.keys() if pipelines == 1 else expected.keys() - {"train/error_step"}
            assert {n: found[n] for n in names} == pytest.approx({n: expected[n] for n in names})
    assert [pytest.approx(state) for state in saved] == ranks[0][1]
    assert saved[1]["error.samples"] == 12
    assert saved[5]["error.samples"] == 12, "not reset after an epoch of four batches"


class SavesInside(Measures):
    """Saves in the middle of its epoch, if it is told where."""

    path = None

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 1 and self.path:
            self.trainer.save_checkpoint(self.path)


def error_of_epoch(rank, world_size, save, load):
    """What an epoch gives, which begins or goes on in its middle."""
    module = make(SavesInside)
    module.path = save
    strategy = {"num_microbatches": 3}
    trainer = fit_module(
        module, world_size, Data(size=24), strategy, load, max_epochs=1, limit_val_batches=0
    )
    return float(trainer.callback_metrics["train/error_epoch"])


def test_metrics_go_on_from_checkpoints_and_count_once(tmp_path):
    path = str(tmp_path / "inside.ckpt")
    run_ranks(error_of_epoch, 2, 2, path, None)
    assert torch.load(path, weights_only=False)["state_dict"]["error.samples"] == 12
    alone = error_of_epoch(0, 0, None, None)
    assert run_ranks(error_of_epoch, 2, 2, None, path) == pytest.approx([alone, alone])


class LogsForeign(TinyDiffusion):
    """Keeps a metric where modules are not looked for."""

    def __init__(self):
        super().__init__()
        self.foreign = [Counts()]

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.foreign[0](loss.detach()[None])
        self.log("train/foreign", self.foreign[0])
        return loss


def refuses_foreign(rank):
    with pytest.raises(ConfigurationError, match="no attribute of the module"):
        fit(rank, Settings(module_class=LogsForeign), 2)


def test_a_metric_that_nobody_else_has_is_refused_on_all_ranks():
    run_ranks(refuses_foreign, 2)


class CopiesCallbacks(L.Callback):
    def on_fit_start(self, trainer, pl_module):
        self.copied = copy.deepcopy(trainer.callbacks)


def test_callbacks_are_copied_when_training_starts():
    """History: a progress bar knows its trainer, and that groups of processes, which cannot be copied."""
    callback = CopiesCallbacks()
    trainer = fit_module(max_steps=2, callbacks=[callback], enable_progress_bar=True)
    assert [type(c) for c in callback.copied] == [type(c) for c in trainer.callbacks]


class NormedFeatures(TinyDiffusion):
    """Normalizes one value per sample and channel, of which there must be two."""

    def __init__(self):
        super().__init__()
        self.time = nn.Sequential(self.time, nn.BatchNorm1d(self.time.out_features))


@pytest.mark.parametrize("profile", ["measure", "flops"])
def test_batch_norms_get_two_samples(profile):
    """History: layers were timed on one sample, which torch refused: "Expected more than 1 value per channel"."""
    strategy = {"profile": profile, "num_stages": "auto"}
    data, auto = Data(batch_size=4), {"num_microbatches": "auto"}
    trainer = fit_module(NormedFeatures, 1, data, {**strategy, **auto}, max_steps=2)
    assert trainer.global_step == 2
    with pytest.raises(ConfigurationError, match=r"need two\. Use at most 2"):
        fit_module(NormedFeatures, 1, data, {**strategy, "num_microbatches": 4}, max_steps=2)


class CountsCalls(TinyDiffusion):
    """Reads its loss, so that the real module is run before training, and counts."""

    def __init__(self):
        super().__init__()
        self.calls, self.seen, self.stats, self._last = 0, [], {"losses": deque()}, torch.zeros(())
        self.started = torch.zeros(())

    def training_step(self, batch, batch_idx):
        self.started += 1
        loss = super().training_step(batch, batch_idx)
        self.calls += 1
        self.seen.append(loss.item())
        self.stats["losses"].append(loss.item())
        self._last = loss.detach()
        return loss

    def on_train_start(self):
        assert self.calls == len(self.seen) == 0, "runs before training were counted"
        assert not self.stats["losses"], "runs before training are in what a dict holds"
        assert not self._last
        assert not self.started, "runs before training are in what is written in place"


def test_runs_before_training_do_not_count():
    module = make(CountsCalls)
    strategy = {"profile": "measure", "num_microbatches": 1, "verify": True}
    fit_module(module, strategy=strategy, max_steps=2)
    assert module.calls == len(module.seen) == module.started == 2


def test_rows_of_the_guide_name_tests_that_exist():
    rows = re.findall(r"^\|.*\|$", (ROOT / "docs" / "training.md").read_text(), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(test_\w+)`", row)}
    defined = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) > 25
    assert not {name for name in named if f"def {name}(" not in defined}
