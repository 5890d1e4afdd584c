"""Checkpoints are ordinary Lightning checkpoints, whoever wrote them and whoever reads them."""

import contextlib
import functools
import os
import tempfile
import time
from pathlib import Path

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, WeightAveraging
from omegaconf import OmegaConf
from torch.utils.data import DataLoader, Dataset

from lightning_diffpipe.callbacks import EMA
from lightning_diffpipe.comm.mesh import Mesh, RankLayout
from lightning_diffpipe.data import GlyphDataModule, ImageFolderDataModule, WebDatasetDataModule
from lightning_diffpipe.errors import CheckpointError
from lightning_diffpipe.planning.schedule import Placement
from lightning_diffpipe.runtime.ownership import collect, spread
from tests.data.folders import red_images, write_folder, write_shard
from tests.distributed.scenarios import (
    assert_close,
    fit_module,
    make,
    quick_strategy,
    quiet_trainer,
    weights_of,
)
from tests.distributed.tiny import Data, Reds, TinyDiffusion
from tests.ranks import RankError, run_in_turn, run_ranks
from tests.rows import row

pytestmark = pytest.mark.distributed


class SaveAtEnd(L.Callback):
    """Saves while the pipeline still stands, as ModelCheckpoint does."""

    def __init__(self, path):
        self.path = path

    def on_train_end(self, trainer, module):
        trainer.save_checkpoint(self.path)


def train(rank, world_size, epochs, save=None, load=None):
    """Trains on `world_size` ranks, or with Lightning's own strategy for 0; returns the weights."""
    callbacks = [SaveAtEnd(save)] if save else []
    trainer = fit_module(
        world_size=world_size, ckpt_path=load, max_epochs=epochs, callbacks=callbacks
    )
    return weights_of(trainer.lightning_module)


def test_a_checkpoint_of_two_ranks_looks_like_one_of_one(tmp_path):
    piped, plain = tmp_path / "piped.ckpt", tmp_path / "plain.ckpt"
    weights, _ = run_ranks(train, 2, 2, 1, piped)
    run_ranks(train, 1, 0, 1, plain)
    got = torch.load(piped, weights_only=True)
    wanted = torch.load(plain, weights_only=True)
    assert got.keys() == wanted.keys()
    assert list(got["state_dict"]) == list(wanted["state_dict"])
    torch.testing.assert_close(weights, got["state_dict"], rtol=0, atol=0)
    (got_state,), (wanted_state,) = got["optimizer_states"], wanted["optimizer_states"]
    assert got_state["state"].keys() == wanted_state["state"].keys()
    for index, values in wanted_state["state"].items():
        assert {key: value.shape for key, value in values.items()} == {
            key: value.shape for key, value in got_state["state"][index].items()
        }


def save_twice(rank, folder):
    """Saves at the end of training and after it, and trains an epoch more with the same trainer."""
    module, at_end = make(), SaveAtEnd(folder / "within.ckpt")
    trainer = fit_module(module, 2, callbacks=[EMA(), at_end])
    trainer.save_checkpoint(folder / "after.ckpt")
    trainer.validate(module, datamodule=Data(), verbose=False)
    trainer.save_checkpoint(folder / "later.ckpt")
    trainer.fit_loop.max_epochs, at_end.path = 2, folder / "second.ckpt"
    trainer.fit(module, datamodule=Data(), ckpt_path=folder / "after.ckpt")
    return weights_of(module)


def test_what_is_saved_after_training_is_what_is_saved_at_its_end(tmp_path):
    """History: optimizer states of the other stages were missing, and their averages were arbitrary memory."""
    resumed = run_ranks(save_twice, 2, tmp_path)
    within = torch.load(tmp_path / "within.ckpt", weights_only=True)
    assert within["callbacks"]["EMA"]["averages"].keys() < within["state_dict"].keys()
    for name in ("after", "later"):
        found = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)
        for what in ("state_dict", "optimizer_states", "callbacks"):
            torch.testing.assert_close(found[what], within[what], rtol=0, atol=0)
    for weights in resumed:
        torch.testing.assert_close(weights, straight(), rtol=0, atol=1e-11)


class SavesLess(TinyDiffusion):
    """Leaves what is frozen out of its checkpoints, and calls the head otherwise."""

    strict_loading = False

    def state_dict(self, *args, **kwargs):
        state = super().state_dict(*args, **kwargs)
        own = {name: value for name, value in state.items() if "encoder" not in name}
        return {name.replace("head.", "last."): value for name, value in own.items()}


def save_less(rank, path):
    module = make(SavesLess)
    fit_module(module, 2, callbacks=[SaveAtEnd(path)])
    return weights_of(module), dict(module.named_parameters())


def test_a_module_may_say_itself_what_is_saved(tmp_path):
    """History: training ended with a KeyError, and a renamed entry of another rank was saved as NaN."""
    path = tmp_path / "less.ckpt"
    for saved, parameters in run_ranks(save_less, 2, path):
        found = torch.load(path, weights_only=True)["state_dict"]
        assert found.keys() == saved.keys()
        assert {"last.weight", "blocks.0.mix.weight"} < found.keys()
        torch.testing.assert_close(saved, found, rtol=0, atol=0)
        assert not any(value.isnan().any() for value in parameters.values())


class Fails(L.Callback):
    def on_train_batch_end(self, trainer, module, *args):
        self.trainer = trainer
        raise ZeroDivisionError


def save_after_a_failure(rank, path):
    callback = Fails()
    with pytest.raises(ZeroDivisionError):
        fit_module(world_size=2, callbacks=[callback])
    trainer = callback.trainer
    with pytest.raises(CheckpointError, match="on other ranks when training failed"):
        trainer.save_checkpoint(path)
    with pytest.raises(CheckpointError, match="a run has failed, so rank 0 cannot collect them"):
        trainer.strategy.optimizer_state(trainer.optimizers[0])


def test_nothing_is_saved_after_a_failure(tmp_path):
    """History: weights of the other ranks were saved as NaN."""
    run_ranks(save_after_a_failure, 2, tmp_path / "a.ckpt")


@functools.cache
def straight():
    """The weights of one rank after two epochs without a break."""
    return run_ranks(train, 1, 1, 2)[0]


@functools.cache
def checkpoint_of(world_size):
    """The bytes of a checkpoint after one epoch on as many ranks."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "half.ckpt"
        run_ranks(train, world_size, world_size, 1, path)
        return path.read_bytes()


@pytest.mark.parametrize(("before", "after"), [row(2, 2), (2, 1), (1, 2), (2, 3)])
def test_training_goes_on_from_a_checkpoint_on_other_ranks(tmp_path, before, after):
    path = tmp_path / "half.ckpt"
    path.write_bytes(checkpoint_of(before))
    resumed = run_ranks(train, after, after, 2, None, path)
    for weights in resumed:
        torch.testing.assert_close(weights, straight(), rtol=0, atol=1e-11)


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0)])
def test_checkpoints_travel_between_strategies(tmp_path, before, after):
    """Plain Lightning draws other noise, so only what was loaded is compared; training goes on, so states fit."""
    path = tmp_path / "other.ckpt"
    saved = run_ranks(train, max(before, 1), before, 1, path)[0]
    loaded, _ = run_in_turn(train, max(after, 1), (after, 1, None, path), (after, 2, None, path))
    for weights in loaded:
        torch.testing.assert_close(weights, saved, rtol=0, atol=0)


def watch(rank, world_size, folder):
    checkpoint = ModelCheckpoint(folder, monitor="val/loss", save_top_k=2, filename="{epoch}")
    stopping = EarlyStopping("train/loss", patience=1, min_delta=1e9)
    trainer = fit_module(
        world_size=world_size, max_epochs=10, enable_checkpointing=True, callbacks=[checkpoint, stopping],
    )  # fmt: skip
    return trainer.current_epoch, checkpoint.best_model_path, float(checkpoint.best_model_score)


def test_callbacks_that_decide_by_metrics_decide_alike_on_all_ranks(tmp_path):
    """History: a metric known on the last stage only made one rank save and wait for the other."""
    first, second = run_ranks(watch, 2, 2, tmp_path)
    assert first == second
    assert first[0] < 10, "EarlyStopping did not stop"
    assert len(list(tmp_path.glob("*.ckpt"))) == 2


def test_a_checkpoint_of_another_module_is_refused(tmp_path):
    path = tmp_path / "whole.ckpt"
    path.write_bytes(checkpoint_of(2))
    checkpoint = torch.load(path)
    checkpoint["state_dict"]["extra"] = checkpoint["state_dict"].pop("head.bias")
    torch.save(checkpoint, path)
    with pytest.raises(RankError, match=r"1 names missing \['head.bias'\], 1 unknown \['extra'\]"):
        run_ranks(train, 2, 2, 1, None, path)


class Remembering(TinyDiffusion):
    """Has a hyperparameter that is no plain value, and state that is no tensor."""

    def __init__(self, folder):
        super().__init__()
        self.save_hyperparameters()
        self.seen = 0

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]

    def on_train_batch_start(self, batch, batch_idx):
        self.seen += 1


def save_and_load_unsafe(rank, path):
    """Trains in double precision, and reads what was saved into a module in single precision."""
    torch.manual_seed(3)
    module, resumed, evaluated = (Remembering(path.parent) for _ in range(3))
    options = {"precision": "64-true"}
    fit_module(module, 2, callbacks=[SaveAtEnd(path)], **options)
    with pytest.raises(CheckpointError, match="pass weights_only=False"):
        fit_module(resumed, 2, ckpt_path=path, **options)
    strategy = {"num_stages": 2, "num_microbatches": 2}
    trainer = quiet_trainer(devices=2, strategy=quick_strategy(**strategy), **options)
    trainer.fit(resumed, datamodule=Data(), ckpt_path=path, weights_only=False)
    assert trainer.global_step == 4, "the only epoch was over, so nothing but loading happens"
    quiet_trainer(devices=2, strategy=quick_strategy(**strategy), **options).validate(
        evaluated, datamodule=Data(), ckpt_path=path, weights_only=False, verbose=False
    )
    saved = dict(module.named_parameters())
    for loaded in (resumed, evaluated):
        assert loaded.seen == 4
        for name, parameter in loaded.named_parameters():
            assert torch.equal(parameter, saved[name]), name


class Configured(TinyDiffusion):
    """Keeps a part of a Hydra config as a hyperparameter."""

    def __init__(self, config):
        super().__init__()
        self.save_hyperparameters()


def save_and_load_configured(rank, path):
    config = OmegaConf.create({"width": 4, "rates": [0.1, {"of": "unet"}], "same": "${width}"})
    options = {"precision": "64-true"}
    fit_module(Configured(config), callbacks=[SaveAtEnd(path)], **options)
    return fit_module(Configured(config), ckpt_path=path, **options).global_step


def test_a_checkpoint_with_a_hydra_config_is_read(tmp_path):
    """History: a `DictConfig` in the hyperparameters made a checkpoint that torch would not read."""
    assert run_ranks(save_and_load_configured, 1, tmp_path / "configured.ckpt") == [4]


def test_a_checkpoint_that_is_trusted_is_read_exactly(tmp_path):
    """History: `weights_only=False` was not passed on, so such checkpoints could not be read at all."""
    run_ranks(save_and_load_unsafe, 2, tmp_path / "unsafe.ckpt")


def collect_from_a_late_owner(rank, lateness_s, dies):
    """Rank 2 waits for its turn to send; rank 1, before it, is late."""
    placement = Placement.of_replicas([1, 1, 1])
    mesh = Mesh(RankLayout(3, placement), rank, torch.device("cpu"), "gloo", timeout_s=4.0)
    mesh.connect()
    with contextlib.nullcontext() if not dies else pytest.raises(RuntimeError):
        if rank == 1:
            time.sleep(lateness_s)
            if dies:
                os._exit(1)
        own = {f"weight{owner}": torch.full((50_000,), float(rank)) for owner in range(3)}
        owners = {f"weight{owner}": owner for owner in range(3)}
        whole = collect(own, owners, mesh)
        state = {owner: {"step": 7, "average": own[f"weight{owner}"]} for owner in range(3)}
        states = collect(state, {owner: owner for owner in range(3)}, mesh)
        everywhere = dict(spread(own, owners, mesh))
    if dies:
        raise AssertionError(f"rank {rank} noticed")
    mesh.disconnect()
    with mesh.reconnected():
        again = collect(own, owners, mesh)
    found = [whole, {i: s["average"] for i, s in states.items()}, again, everywhere]
    return [[value.mean().item() for value in values.values()] for values in found]


def reconnect_with_nothing_to_send(rank, joined):
    """Rank 1 joins the group late; the others have nothing to do in it."""
    placement = Placement.of_replicas([1, 1, 1])
    mesh = Mesh(RankLayout(3, placement), rank, torch.device("cpu"), "gloo", timeout_s=30.0)
    new_group = dist.new_group

    def joins_late(*arguments, **options):
        group = new_group(*arguments, **options)
        if rank == 1:
            time.sleep(0.3)
            joined.touch()
        return group

    dist.new_group = joins_late
    with mesh.reconnected():
        pass
    dist.new_group = new_group
    return joined.exists()


def test_a_rank_does_not_leave_a_group_that_others_are_joining(tmp_path):
    """History: saving after training failed now and then, if a stage trained nothing and so sent nothing."""
    assert all(run_ranks(reconnect_with_nothing_to_send, 3, tmp_path / "joined"))


def collect_nested_state(rank):
    """Tensors inside of lists and dicts, as 8-bit Adam, SOAP and Shampoo keep them; nothing of them is pickled."""
    mesh = Mesh(
        RankLayout(2, Placement.of_replicas([1, 1])), rank, torch.device("cpu"), "gloo", 30.0
    )
    mesh.connect()
    gather = dist.gather_object

    def gathers_outlines(own, *further, **options):
        kinds = {
            leaf.device.type for leaf in pytree.tree_leaves(own) if isinstance(leaf, torch.Tensor)
        }
        # Rank 0 sends itself nothing.
        assert kinds == ({"meta"} if rank else set()), (
            "on a GPU they would be unpickled onto rank 0's"
        )
        gather(own, *further, **options)

    dist.gather_object = gathers_outlines
    value = torch.arange(6.0).reshape(2, 3) + rank
    state = {rank: {"step": 3, "quantized": {"state1": value, "map": [value + 1, "fp8"]}}}
    states = collect(state, {0: 0, 1: 1}, mesh)
    dist.gather_object = gather
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.tolist, states)


def test_nested_state_of_an_optimizer_travels_as_its_tensors_do():
    """History: a rank's whole state went in one pickle, and rank 0 unpickled it onto other ranks' GPUs."""
    found, nothing = run_ranks(collect_nested_state, 2)
    rows = torch.arange(6.0).reshape(2, 3)
    assert nothing == {}
    for rank, values in found.items():
        assert values == {
            "step": 3,
            "quantized": {
                "state1": (rows + rank).tolist(),
                "map": [(rows + rank + 1).tolist(), "fp8"],
            },
        }
    assert sorted(found) == [0, 1]


def test_an_owner_waits_for_its_turn_longer_than_a_message_may_take():
    """History: the last owner of a large model gave up after `timeout_s`, while others still sent."""
    at_first, *others = run_ranks(collect_from_a_late_owner, 3, 5.0, False)
    assert at_first == [[0.0, 1.0, 2.0]] * 4
    assert others == [[[], [], [], [0.0, 1.0, 2.0]]] * 2


def test_an_owner_that_is_gone_is_missed_at_once():
    with pytest.raises(RankError, match="rank 0 noticed"):
        run_ranks(collect_from_a_late_owner, 3, 0.1, True)


class WithoutOptimizer(TinyDiffusion):
    """Trains nothing, for its logs or its hooks, as plain Lightning allows with a warning."""

    def configure_optimizers(self):
        return None


class FewerTrained(TinyDiffusion):
    """Its optimizer has one parameter less."""

    def configure_optimizers(self):
        found = super().configure_optimizers()
        found["optimizer"].param_groups[1]["params"].pop()
        return found


def fit_with_fewer_parameters(rank, world_size, folder):
    """Trains one parameter less, and then goes on with all."""
    path = folder / "fewer.ckpt"
    fit_module(FewerTrained, world_size, callbacks=[SaveAtEnd(path)])
    with pytest.raises(CheckpointError) as raised:
        train(rank, world_size, 2, load=path)
    return str(raised.value)


@pytest.mark.parametrize("world_size", [row(1), 2])
def test_optimizers_of_other_parameters_are_counted(tmp_path, world_size):
    """History: torch's message, of a group that does not match the size of a group."""
    groups = TinyDiffusion().configure_optimizers()["optimizer"].param_groups
    decay, rest = (len(group["params"]) for group in groups)
    before, now = (f"1 optimizers (of {decay} + {rest - gone} parameters)" for gone in (1, 0))
    for said in run_ranks(fit_with_fewer_parameters, world_size, world_size, tmp_path):
        assert f"has the states of {before}, and configure_optimizers gives {now}, so" in said


def fit_with_other_optimizers(rank, world_size, folder):
    """Trains without optimizers, goes on, and then goes on with one."""
    path, untouched = folder / "without.ckpt", weights_of(make(WithoutOptimizer))
    for epochs, load in [(1, None), (2, path)]:
        module, saving = make(WithoutOptimizer), SaveAtEnd(path)
        fit_module(module, world_size, ckpt_path=load, max_epochs=epochs, callbacks=[saving])
        torch.testing.assert_close(untouched, weights_of(module), rtol=0, atol=0)
    with pytest.raises(
        CheckpointError, match=r"states of 0 optimizers, .* gives 1 optimizers \(of .*, so training"
    ) as raised:
        train(rank, world_size, 3, load=path)
    return raised.value.is_of_all_ranks


@pytest.mark.parametrize("world_size", [row(1), 2])
def test_a_module_may_have_no_optimizer(tmp_path, world_size):
    """History: KeyError: 'state'; going on with an optimizer, the lengths of zip()."""
    assert all(run_ranks(fit_with_other_optimizers, world_size, world_size, tmp_path))


class Expecting(L.Callback):
    """Means of weights over steps, computed by hand."""

    def __init__(self):
        self.means = {}

    def on_train_batch_end(self, trainer, module, *rest):
        for name, value in module.named_parameters():
            mean = self.means.setdefault(name, torch.zeros_like(value))
            mean += (value.detach() - mean) / trainer.global_step


def fit_averaging(rank, world_size, path):
    """Lightning's own averages, and what they should be."""
    expecting, module = Expecting(), make()
    fit_module(
        module, world_size, strategy={"num_stages": 1, "num_microbatches": 1}, max_steps=3,
        callbacks=[expecting, SaveAtEnd(path), WeightAveraging()],
    )  # fmt: skip
    saved = torch.load(path)
    for name, value in module.named_parameters():  # the averages took their place
        assert_close(value, expecting.means[name], 1e-12, name)
        assert_close(saved["state_dict"][name], expecting.means[name], 1e-12, name)
        still = torch.equal(saved["current_model_state"][name], value)
        assert not still or name.startswith(("encoder", "text"))


@pytest.mark.parametrize("world_size", [row(1), 2])
def test_lightnings_averages_work_where_a_rank_holds_the_whole_module(tmp_path, world_size):
    """History: refused, though plain Lightning has it, and there are no stages."""
    run_ranks(fit_averaging, world_size, world_size, tmp_path / "a.ckpt")


class Turned(Dataset):
    """Images of a user's own data set, with random brightness."""

    def __len__(self):
        return 11

    def __getitem__(self, index):
        return {"image": torch.rand(3, 1, 1).expand(3, 4, 4) * index, "caption": str(index)}


class Images(L.LightningDataModule):
    def __init__(self, loader):
        super().__init__()
        self.train_dataloader = loader


def images(kind, folder, num_workers):
    """The data modules of conf/data, and a loader of a user's own."""
    sizes = {"resolution": 8, "batch_size": 2, "num_workers": num_workers}
    if kind == "glyphs":
        return GlyphDataModule(
            alphabets=["digits"], faces=["sans"], shifts_per_axis=1, validation_share=0, **sizes
        )
    if kind == "image_folder":
        return ImageFolderDataModule(folder, validation_share=0, **sizes)
    if kind == "webdataset":
        return WebDatasetDataModule(f"{folder}/{{0..2}}.tar", samples_per_epoch=10, **sizes)
    return Images(lambda: DataLoader(Turned(), 2, True, num_workers=num_workers))


def interrupted(rank, world_size, kind, folder, num_workers, path):
    """Trains two epochs; then again from a checkpoint in the middle of the second one."""
    return [
        train_on_images(rank, world_size, kind, folder, num_workers, saves, loads)
        for saves, loads in [(path, None), (None, path)]
    ]


def train_on_images(rank, world_size, kind, folder, num_workers, saves, loads):
    module, callbacks = make(Reds), []
    if saves:
        callbacks = [
            ModelCheckpoint(saves.parent, saves.stem, every_n_train_steps=8, save_top_k=-1)
        ]
    fit_module(
        module, world_size, images(kind, folder, num_workers), ckpt_path=loads, max_epochs=2,
        enable_checkpointing=True, callbacks=callbacks,
    )  # fmt: skip
    return module.seen, weights_of(module)


@pytest.mark.parametrize(
    ("kind", "num_workers"),
    [
        *((kind, 0) for kind in ("glyphs", "image_folder", "webdataset", "loader")),
        row("glyphs", 2),
        row("image_folder", 2),
        ("webdataset", 2),
        ("loader", 2),
    ],
)
def test_training_goes_on_in_the_middle_of_an_epoch(tmp_path, kind, num_workers):
    """History: an epoch that was resumed began with its first batches again, and left out its last ones."""
    if kind == "image_folder":
        write_folder(tmp_path, 10)
    if kind == "webdataset":
        pytest.importorskip("webdataset")
        for shard in range(3):
            write_shard(tmp_path / f"{shard}.tar", red_images(range(20 * shard, 20 * shard + 5)))
    (seen, weights), again = interrupted(0, 1, kind, tmp_path, num_workers, tmp_path / "half.ckpt")
    outcomes = [((seen, weights), again)]
    if num_workers == 0:  # beside threads of gloo no process should fork workers
        path = tmp_path / "of_two_ranks.ckpt"
        outcomes += run_ranks(interrupted, 2, 2, kind, tmp_path, 0, path)
    for (own_seen, own_weights), (seen_again, weights_again) in outcomes:
        assert own_seen == seen
        torch.testing.assert_close(own_weights, weights)
        assert seen_again == seen[8:]
        assert all(torch.equal(weights_again[name], own_weights[name]) for name in weights)
