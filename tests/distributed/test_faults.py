"""Bad input and broken peers: a clear error, early, on every rank, and nothing hangs."""

import contextlib
import dataclasses
import functools
import os
import random
import re
import signal
import time
import types
import warnings

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from diffusers.training_utils import EMAModel
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.quasirandom import SobolEngine

from lightning_diffpipe import DiffPipeStrategy
from lightning_diffpipe.callbacks import FinalCheckpoint
from lightning_diffpipe.comm import watcher
from lightning_diffpipe.comm.rendezvous import align_parameters
from lightning_diffpipe.errors import CheckpointError, ConfigurationError, DiffPipeError
from lightning_diffpipe.training import pipeline
from lightning_diffpipe.training.processes import ProcessHooks
from lightning_diffpipe.training.refusals import refuse_on_several_ranks
from tests.distributed.scenarios import Recorder, Settings, build, fit, fit_module, make, on_ranks
from tests.distributed.tiny import Data, TinyDiffusion
from tests.ranks import RankError, run_in_turn, run_ranks
from tests.rows import row

pytestmark = pytest.mark.distributed


@functools.cache
def plan_of_two_ranks():
    return on_ranks(2, trainer={"max_steps": 1})[0].plan


class Frozen(TinyDiffusion):
    """A module in which nothing is trained."""

    def __init__(self):
        super().__init__()
        self.requires_grad_(False)


class Sick(TinyDiffusion):
    """One of its layers produces NaN from the second batch on."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            batch = {**batch, "image": batch["image"] * float("nan")}
        return super().training_step(batch, batch_idx)


# -------------------------------------------------------------------------------------- refusals


def fit_unlike(rank, module_of_rank_1):
    fit(rank, Settings(module=module_of_rank_1 if rank else {}), 2)


@pytest.mark.parametrize(
    ("module_of_rank_1", "message"),
    [
        ({"num_blocks": 5},
         r"'blocks\.4\.norm\.weight' is \(12,\) of torch.float64 on rank 1, and missing on rank 0"),
        row({"num_blocks": 3}, r"'blocks\.3\.norm\.weight' is missing on rank 1, and \(12,\) of torch.float64 on"),
    ],
)  # fmt: skip
def test_ranks_that_build_other_modules_are_named(module_of_rank_1, message):
    """History: gloo ended processes without a word, as messages had other lengths."""
    with pytest.raises(RankError, match=message):
        run_ranks(fit_unlike, 2, module_of_rank_1)


def align_in_other_order(rank):
    """Parameters that a set of names, say, registers in the order of the process."""
    module = nn.Module()
    for name in ("ab", "ba")[rank]:
        module.register_parameter(name, nn.Parameter(torch.full((3,), float(ord(name) + rank))))
    align_parameters(module, dist.new_group(backend="gloo"))
    return {name: value.tolist() for name, value in module.state_dict().items()}


def test_weights_are_aligned_by_name():
    """History: a rank got the weights that were registered first, whatever their name."""
    first, second = run_ranks(align_in_other_order, 2)
    assert first == second == {"a": [97.0] * 3, "b": [98.0] * 3}


class Manual(TinyDiffusion):
    """Steps its optimizer itself."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class WithBackbone(TinyDiffusion):
    """Has what callbacks of Lightning's freeze, and unfreeze later."""

    def __init__(self):
        super().__init__()
        self.backbone = self.blocks[0]


class OwnBackward(TinyDiffusion):
    """Overrides backward."""

    def backward(self, loss):
        loss.backward()


class Normalizes(TinyDiffusion):
    """Has a batch norm, which the step does not even call."""

    def __init__(self, kind=nn.BatchNorm1d):
        super().__init__()
        self.norm = kind(2)


class ClipsByItself(TinyDiffusion):
    """Clips as scripts for one process do."""

    def configure_gradient_clipping(self, optimizer, **_):
        nn.utils.clip_grad_norm_(self.parameters(), 0.05)


class Unfreezes(L.Callback):
    """Trains the text table, too, from the second epoch on."""

    def on_train_epoch_start(self, trainer, module):
        module.text.requires_grad_(trainer.current_epoch == 1)


class Later(TinyDiffusion):
    """A layer of the first stage enters the loss from the second epoch on, by what a hook sets."""

    is_late = False

    def on_train_epoch_start(self):
        self.is_late = self.current_epoch > 0

    def denoise(self, noisy, t, text):
        first = self.blocks[0](noisy, self.time(t[:, None]))
        prediction = super().denoise(noisy, t, text)
        return prediction + first if self.is_late else prediction


class KeepsAverages(TinyDiffusion):
    """Averages its blocks as scripts without our callback do."""

    def __init__(self):
        super().__init__()
        self.ema = EMAModel(self.blocks.parameters())

    def on_train_batch_end(self, *_):
        self.ema.step(self.blocks.parameters())


@pytest.mark.parametrize(
    ("world_size", "settings", "message"),
    [
        (1, {"module_class": Manual}, "manual optimization"),
        (1, {"module_class": OwnBackward}, "OwnBackward.backward is overridden"),
        (1, {"trainer": {"callbacks": [StochasticWeightAveraging(1e-2)]}},
         "StochasticWeightAveraging copies the module"),
        (1, {"module_class": WithBackbone, "trainer": {"callbacks": [BackboneFinetuning(0)]}},
         "parameters were unfrozen during training"),
        # History: layers that began frozen ran without gradients, and never moved.
        (1, {"trainer": {"callbacks": [Unfreezes()], "max_epochs": 2}},
         r"unfrozen during training, e\.g\. text\.weight, but the plan"),
        (2, {"module_class": Sick, "strategy": {"check_finite": True}},
         r"BoundaryError: the output of layer '.*' is not finite on its way"),
        (2, {"module_class": Normalizes, "trainer": {"sync_batchnorm": True}},
         r"ConfigurationError: norm .*sync_batchnorm=True.* nn\.GroupNorm"),
        # History: averages of weights on other ranks became NaN, and rank 0 wrote them.
        (2, {"module_class": KeepsAverages},
         r"ForeignLayerError: .* lives on stage .*callback lightning_diffpipe\.EMA"),
        # History: each stage was scaled by another factor, another direction than one process takes.
        (2, {"module_class": ClipsByItself}, r"ConfigurationError: torch\.nn\.utils .* took a norm"),
        # History: what was not read when the step was probed was full of zeros, and training went on with them.
        (2, {"module_class": Later, "trainer": {"max_epochs": 2}},
         r"GraphError: the loss of batch \d+ is not finite, as .* now reads output 0 of blocks\.0"),
    ],
)  # fmt: skip
def test_what_cannot_work_ends_the_run_with_the_reason(world_size, settings, message):
    with pytest.raises(RankError, match=message):
        on_ranks(world_size, **settings)


def test_a_plan_for_another_world_is_refused():
    with pytest.raises(RankError, match="2 ranks per pipeline, which does not divide the 3 ranks"):
        on_ranks(3, strategy={"plan": plan_of_two_ranks()})


class RefusesOnRank1(TinyDiffusion):
    """Its step cannot be run on rank 1."""

    def training_step(self, batch, batch_idx):
        if os.environ["LOCAL_RANK"] == "1":
            raise ConfigurationError("rank 1 has no vocabulary")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("kind", "wish"), [(nn.BatchNorm1d, True), (nn.SyncBatchNorm, None), (nn.BatchNorm1d, None)]
)
def test_batch_norms_over_all_ranks_are_refused(kind, wish):
    """History: `Trainer(sync_batchnorm=True)` was ignored without a word."""
    module = Normalizes(kind)
    trainer = types.SimpleNamespace(
        callbacks=[],
        state=types.SimpleNamespace(fn=TrainerFn.FITTING),
        fit_loop=types.SimpleNamespace(_combined_loader=None),
    )
    strategy = types.SimpleNamespace(
        lightning_module=module, world_size=2, precision_plugin=None, _layer_sync=wish
    )
    if wish or kind is nn.SyncBatchNorm:
        with pytest.raises(
            ConfigurationError, match=rf"norm \({kind.__name__}\) would take .* all 2 ranks"
        ):
            refuse_on_several_ranks(trainer, strategy)
    module.norm.eval()
    refuse_on_several_ranks(trainer, strategy)


@pytest.mark.parametrize("kind", [ModelCheckpoint, OnExceptionCheckpoint])
def test_saving_when_a_rank_has_failed_is_refused(tmp_path, kind):
    """History: the failed rank waited `timeout_s` for weights of ranks that waited for it, and hid its error."""
    option = {"save_on_exception": True} if kind is ModelCheckpoint else {}
    trainer = types.SimpleNamespace(callbacks=[kind(tmp_path, **option)])
    message = r"saves when training fails, but .* over 2 ranks.*every_n_train_steps"
    with pytest.raises(ConfigurationError, match=message):
        refuse_on_several_ranks(trainer, types.SimpleNamespace(world_size=2))


class HandlesRequeue(L.Callback):
    """Notes whether SLURM's signal would save."""

    handles = None

    def on_train_start(self, trainer, module):
        self.handles = signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL


def fit_under_slurm(rank, world_size):
    os.environ.update(
        SLURM_NTASKS=str(world_size), SLURM_NTASKS_PER_NODE=str(world_size), SLURM_NODEID="0",
        SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank), SLURM_JOB_ID="7", SLURM_JOB_NAME="train",
    )  # fmt: skip
    callback = HandlesRequeue()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        fit_module(
            world_size=world_size, callbacks=[callback], max_steps=1, plugins=[SLURMEnvironment()]
        )
    return callback.handles, sum("auto-requeue is off" in str(w.message) for w in warned)


def test_no_rank_saves_where_a_signal_of_slurm_finds_it():
    """History: each rank saved in the signal's handler, one before a step that another had made."""
    assert run_ranks(fit_under_slurm, 2, 2) == [(False, 1), (False, 0)]
    assert run_ranks(fit_under_slurm, 1, 1) == [(True, 0)]


class LossAware(TinyDiffusion):
    """Samples more often what had high losses, by a buffer of its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("history", torch.ones(6))

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        t = torch.multinomial(self.history / self.history.sum(), len(batch["text"]), True)
        self.history[t] = loss.detach()
        return loss


def fit_on_one_rank(module_class, num_microbatches, **options):
    data, strategy = Data(batch_size=4), {"num_microbatches": num_microbatches}
    return fit_module(module_class, 1, data, strategy, max_steps=3, **options)


def test_state_outside_of_layers_that_every_microbatch_changes_is_named(recwarn):
    """History: one rank changed a buffer once for each microbatch, without a word."""
    fit_on_one_rank(LossAware, 1)
    assert not any("'history'" in str(each.message) for each in recwarn)
    with pytest.warns(UserWarning, match=r"'history' outside .* each of 2 microbatches .* average"):
        fit_on_one_rank(LossAware, 2)


class KeepsGenerator(TinyDiffusion):
    """Draws noise from a generator of its own."""

    def __init__(self):
        super().__init__()
        self.noise = torch.Generator().manual_seed(0)

    def training_step(self, batch, batch_idx):
        size = batch["image"].shape
        return self.loss({**batch, "image": torch.randn(size, generator=self.noise).double()})


OF_FILE = torch.Generator()


class KeepsAnyGenerator(KeepsGenerator):
    """Draws from one of several kinds, all as they are at the beginning."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.numpy, self.own = np.random.default_rng(0), random.Random(0)
        self.legacy = np.random.RandomState(0)
        self.sobol = SobolEngine(1, scramble=True, seed=0)
        OF_FILE.manual_seed(0)

    def training_step(self, batch, batch_idx):
        drawn = {
            "torch": lambda: torch.rand(1, generator=self.noise),
            "of the file": lambda: torch.rand(1, generator=OF_FILE),
            "numpy": lambda: self.numpy.random(),
            "legacy": lambda: self.legacy.rand(),
            "python": lambda: self.own.random(),
            "sobol": lambda: self.sobol.draw(1)[0],
        }[self.kind]()
        times = torch.full_like(batch["image"][:, 0, :1], float(drawn))
        loss = self.head(self.time(times)).square().mean()
        self.log("loss", loss)
        return loss


@pytest.mark.parametrize("kind", ["torch", "of the file", "numpy", "legacy", "python", "sobol"])
def test_on_one_rank_only_training_draws_from_a_generator_that_outlives_the_step(kind):
    """History: whatever ran besides, such as the probe, drew from it, so that training saw other numbers."""
    losses = []
    for world_size in (0, 1):
        recorder, module = Recorder(), make(KeepsAnyGenerator, kind=kind)
        strategy = {"num_microbatches": 1}
        fit_module(
            module, world_size, Data(batch_size=4), strategy, max_steps=3, callbacks=[recorder]
        )
        losses.append(recorder.losses)
    assert len(set(losses[0])) == 3
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)


class RestoresRows(TinyDiffusion):
    """Trains one row of a table, as diffusers' script for textual inversion does, and puts the others back."""

    def __init__(self, how="plainly"):
        super().__init__()
        self.table, self.how = nn.Embedding(20, 12), how
        self.before = self.table.weight.detach().clone().double()

    def denoise(self, noisy, t, text):
        return super().denoise(noisy + self.table(text).mean(1)[:, None], t, text)

    def on_train_batch_end(self, *_):
        strategy = self.trainer.strategy
        whole = strategy.whole_model() if self.how == "whole" else contextlib.nullcontext()
        with whole, torch.no_grad():
            if self.how != "resident" or strategy.is_resident("table.weight"):
                self.table.weight[:7] = self.before[:7]


def restored(rank, how):
    module = make(RestoresRows, how=how)
    fit_module(module, 2, max_steps=2)
    return (module.table.weight - module.before).abs().amax(1).tolist()


def test_weights_that_hooks_change():
    """History: torch told of "a single memory location" where the weight was on another rank."""
    for how in ("resident", "whole"):
        for changes in run_ranks(restored, 2, how):
            assert changes[:7] == [0] * 7
            assert max(changes[7:]) > 0
    with pytest.raises(
        RankError,
        match=r"ForeignLayerError: table\.weight lives on stage .*is_resident\(name\) .*whole_model",
    ):
        run_ranks(restored, 2, "plainly")


class Prodigy(torch.optim.SGD):
    """Stands for prodigyopt's, which finds one learning rate from all gradients."""

    def step(self, closure=None):
        loss = closure()
        for group in self.param_groups:
            norms = [p.grad.norm().item() for p in group["params"] if p.grad is not None]
            group["lr"] = 1e-3 / (1 + sum(norms))
        super().step()
        return loss


class UsesProdigy(TinyDiffusion):
    def configure_optimizers(self):
        return Prodigy(self.parameters())


def refusal_of(rank, settings):
    """What this rank raises, and whether it knows that all do."""
    strategy = {"num_microbatches": "auto", **settings.strategy}
    data = Data(**settings.data)
    try:
        fit_module(build(settings), 2, data, strategy, **settings.trainer)
    except DiffPipeError as error:
        return f"{type(error).__name__}: {error}", error.is_of_all_ranks


def test_what_is_refused_in_set_up_is_an_error_of_all_ranks():
    """One rank may tell it for all; the command line does."""
    pruning, given = ModelPruning("l1_unstructured", amount=0.5), {"plan": plan_of_two_ranks()}
    cases = {
        "copies the module before": Settings(trainer={"callbacks": [WeightAveraging()]}),
        "no trainable parameters": Settings(module_class=Frozen),
        "num_stages=3": Settings(strategy={"num_stages": 3}),
        "there is no plan at nowhere.json": Settings(strategy={"plan": "nowhere.json"}),
        # History: the other rank waited for the next message, and said that it had lost a peer.
        "rank 1 has no vocabulary": Settings(module_class=RefusesOnRank1),
        "num_microbatches=8 is more than the 6 samples": Settings(strategy={"num_microbatches": 8}),
        r"PartitionError: ": Settings(module={"num_blocks": 0}),
        # History: each rank chose by weights that it did not hold, and trained others than one process would.
        r"ModelPruning compares weights of all layers.*num_stages=1": Settings(
            trainer={"callbacks": [pruning]}
        ),
        # History: every stage changed its own copy, and drew other timesteps from it than the next.
        "the buffer 'history' outside of a layer": Settings(module_class=LossAware),
        # History: every stage and frozen layers drew from copies that fell out of step.
        "from noise, which.*global generator": Settings(module_class=KeepsGenerator),
        "Prodigy computes one step size": Settings(module_class=UsesProdigy),
        r"PlanError: the plan cuts \d+ layers, but this module has \d+": Settings(
            module={"num_blocks": 6}, strategy=given
        ),
        r"6 samples of each pipeline .* first batch of this run has 8": Settings(
            data={"batch_size": 8}, strategy=given
        ),
    }
    told = run_in_turn(refusal_of, 2, *((settings,) for settings in cases.values()))
    for message, (first, other) in zip(cases, told, strict=True):
        assert re.search(message, first[0]), first[0]
        assert first == other
        assert first[1], "each rank would tell it"


def fit_later_on_a_late_device(rank, path):
    at_once, event = pipeline._values, types.SimpleNamespace(synchronize=lambda: None)
    pipeline._values = lambda *step: dataclasses.replace(at_once(*step), event=event)
    callbacks = [FinalCheckpoint(path)] if path else []
    fit_module(Later, 2, max_epochs=2, max_steps=5, callbacks=callbacks)


@pytest.mark.parametrize("saves", [True, False])
def test_the_loss_of_the_last_step_is_waited_for_before_anything_is_saved(tmp_path, saves):
    """History: on GPUs nobody looked at it, and a checkpoint of NaN was written over a good one."""
    path = tmp_path / "final.ckpt"
    with pytest.raises(RankError, match=r"the loss of batch 4 is not finite, as .* now reads"):
        run_ranks(fit_later_on_a_late_device, 2, path if saves else None)
    assert not path.exists()


def fit_compiled(rank):
    fit_module(torch.compile(make(), backend="eager"))


def test_a_compiled_module_is_refused():
    with pytest.raises(RankError, match=r"(?i)compile"):
        run_ranks(fit_compiled, 1)


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_spawn_and_fork_are_refused(method):
    with pytest.raises(ConfigurationError, match=f"start_method='{method}' is not supported"):
        DiffPipeStrategy(start_method=method)


# ---------------------------------------------------------------------------------- broken peers


def fit_with(rank, world_size, callback, timeout_s):
    watcher._GRACE_S = 30.0  # a busy machine may take long from an error to its traceback
    fit_module(world_size=world_size, strategy={"timeout_s": timeout_s}, callbacks=[callback])


class SavesWhenItFails(L.Callback):
    """Rank 1 fails at its second batch; then its weights shall be saved."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 1 and trainer.global_rank == 1:
            raise ValueError("the second batch is bad")

    def on_exception(self, trainer, module, exception):
        trainer.save_checkpoint("nowhere/never.ckpt")


def test_a_callback_that_saves_when_its_rank_fails_hides_no_error():
    """History: it began a collective save, blocked for `timeout_s`, and its error was all that was printed."""
    with pytest.raises(RankError, match="ranks failed") as caught:
        run_ranks(fit_with, 2, 2, SavesWhenItFails(), 60.0)
    text = str(caught.value)
    assert "has failed on rank 1 with ValueError: the second batch is bad. A callback" in text
    assert "has failed on rank 0 with LostRankError: rank 0 waited for" in text


class Sleepy(TinyDiffusion):
    """Its second step takes for ever on rank 1, which no trial before training shows."""

    is_late = False

    def on_train_batch_start(self, batch, batch_idx):
        self.is_late = batch_idx == 1

    def training_step(self, batch, batch_idx):
        if self.is_late and os.environ["LOCAL_RANK"] == "1":
            time.sleep(600)  # until it is ended, as rank 0 is gone
        return super().training_step(batch, batch_idx)


def fit_sleepy(rank):
    fit_module(Sleepy, 2, strategy={"timeout_s": 5.0})


def test_a_wait_that_lasts_too_long_shows_where_the_plan_stands():
    with pytest.raises(RankError, match="ranks failed") as caught:
        run_ranks(fit_sleepy, 2)
    text = str(caught.value)
    assert "PipelineTimeoutError: rank 0 waited for" in text
    assert "<-- waits here" in text
    assert "rank 1 | " in text


class FailsOnce(TinyDiffusion):
    """Its first run ends in its third step."""

    fails = True

    def on_train_batch_end(self, *args):
        if FailsOnce.fails and self.global_step == 2 and os.environ["LOCAL_RANK"] == "1":
            time.sleep(1.0)  # rank 0 has failed when this one comes to the step

    def training_step(self, batch, batch_idx):
        if FailsOnce.fails and self.global_step == 2:
            raise ValueError("the first run")
        return super().training_step(batch, batch_idx)


def fit_again(rank, world_size):
    """Fits again after a failure that was caught, with the same module and with another."""

    def fit_one(module):
        return fit_module(module, world_size, max_epochs=-1, max_steps=4).global_step

    module = make(FailsOnce)
    with pytest.raises((ValueError, DiffPipeError)):
        fit_one(module)
    FailsOnce.fails = False
    if world_size > 1:  # it holds the part of one rank
        with pytest.raises(CheckpointError, match="to train; build the module again, and go on"):
            fit_one(module)
        module = make(FailsOnce)
    return fit_one(module)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_process_fits_again_after_a_failure_that_it_caught(world_size):
    """History: rank 1, a step late, waited for a word of rank 0 that had gone with the failure, and was ended."""
    assert run_ranks(fit_again, world_size, world_size) == [4] * world_size


def test_who_has_lost_its_processes_does_not_wait_for_them(monkeypatch):
    """History: a second fit waited for processes that had been ended with the first."""
    monkeypatch.setattr(ProcessHooks, "_ended_by", "ValueError: mine")
    with pytest.raises(ConfigurationError, match=r"failed \(ValueError: mine\), and the processes"):
        fit_module(world_size=2)
