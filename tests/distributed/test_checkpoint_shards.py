"""Checkpoints in shards: what a file would hold, read by any number of ranks, whole or not there."""

import contextlib
import os
import runpy
import shutil
import signal
import sys
import time
from threading import Event
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_diffpipe import Predictor
from lightning_diffpipe.callbacks import EMA
from lightning_diffpipe.checkpoint_files import newest
from lightning_diffpipe.checkpoint_shards import (
    Divided,
    consolidated,
    is_sharded,
    read_shards,
    write_shards,
)
from lightning_diffpipe.comm.mesh import Mesh, RankLayout
from lightning_diffpipe.errors import CheckpointError
from lightning_diffpipe.modules import LatentDiffusion
from lightning_diffpipe.planning.schedule import Placement
from lightning_diffpipe.training import checkpointing
from tests.distributed.scenarios import fit_module, make, weights_of
from tests.modules.tiny_parts import save_with_averages
from tests.ranks import RankError, run_ranks
from tests.rows import row

pytestmark = pytest.mark.distributed

UNEVEN = {"num_stages": 2, "num_replicas": (2, 1), "shard_optimizer": True}
PIPELINES = {"num_stages": 2, "num_replicas": 1, "data_parallel": 2, "shard_optimizer": True}
TWO, ONE = {"num_stages": 2, "num_replicas": 1}, {"num_stages": 1, "num_replicas": 1}


def train(rank, world_size, strategy, folder=None, load=None, kind="sharded", epochs=2):
    """Saves after each epoch; the last one and its copy stay."""
    module, save = make(), []
    if folder:
        save = [
            ModelCheckpoint(folder, "{epoch}", save_last=True, monitor="epoch_seen", mode="max")
        ]
    fit_module(
        module, world_size, strategy={**strategy, "state_dict_type": kind}, ckpt_path=load, max_epochs=epochs,
        enable_checkpointing=bool(folder), callbacks=[EMA(), Counted(), *save], gradient_clip_val=0.5,
    )  # fmt: skip
    return weights_of(module)


class Counted(L.Callback):
    """Has states that are no tensors, and one that is."""

    def on_train_epoch_end(self, trainer, module):
        module.log("epoch_seen", float(trainer.current_epoch))

    def state_dict(self):
        return {"nothing": None, "empty": {}, "list": [1, torch.tensor(2.0)]}


def assert_same(got, wanted, where="checkpoint"):
    """To the last bit, down to the keys of empty dicts, but for where callbacks have saved."""
    assert type(got) is type(wanted), where
    if isinstance(wanted, dict):
        keys = [key for key in wanted if "ModelCheckpoint" not in str(key)]
        assert {k for k in got if "ModelCheckpoint" not in str(k)} == set(keys), where
        for key in keys:
            assert_same(got[key], wanted[key], f"{where}.{key}")
    elif isinstance(wanted, list | tuple):
        assert len(got) == len(wanted), where
        for index, member in enumerate(wanted):
            assert_same(got[index], member, f"{where}.{index}")
    elif isinstance(wanted, torch.Tensor):
        assert got.dtype == wanted.dtype, where
        assert torch.equal(got, wanted), where
    else:
        assert got == wanted, where


@pytest.mark.parametrize(
    ("world_size", "strategy", "kind"),
    [
        (3, UNEVEN, "sharded_async"),
        row(3, UNEVEN, "sharded"),
        row(4, PIPELINES, "sharded"),
        row(4, PIPELINES, "sharded_async"),
    ],
)
def test_shards_hold_what_a_file_holds_and_are_read_by_any_number_of_ranks(
    world_size, strategy, kind, tmp_path
):
    shards, files = tmp_path / "shards", tmp_path / "files"
    run_ranks(train, world_size, world_size, strategy, shards, None, kind, 1)
    straight, *_ = run_ranks(train, world_size, world_size, strategy)
    saved = shards / "epoch=0.ckpt"
    assert sorted(path.name for path in shards.iterdir()) == ["epoch=0.ckpt", "last.ckpt"]
    assert is_sharded(saved)
    assert is_sharded(shards / "last.ckpt")
    parts = [path.stat().st_size for path in saved.glob("*.distcp")]
    assert len(parts) == world_size
    assert max(parts) < 0.8 * sum(parts), "one rank has written all"
    run_ranks(train, world_size, world_size, strategy, files, None, "full", 1)
    wanted = torch.load(files / "epoch=0.ckpt", weights_only=True)
    assert_same(read_shards(saved), wanted)
    whole, tool = tmp_path / "whole.ckpt", tmp_path / "tool.ckpt"
    for module, *arguments in (
        ("lightning_diffpipe.cli", "export", saved, whole),
        ("lightning.pytorch.utilities.consolidate_checkpoint", saved, "--output_file", tool),
    ):
        with mock.patch.object(sys, "argv", [module, *map(str, arguments)]):
            runpy.run_module(module, run_name="__main__")
    assert_same(torch.load(whole, weights_only=True), wanted)
    assert_same(consolidated(torch.load(tool, weights_only=True)), wanted)
    if world_size == 3:  # of one pipeline: numbers do not depend on the ranks
        for size, other, path in ((2, TWO, saved), (1, ONE, saved), (1, ONE, tool)):
            for weights in run_ranks(train, size, size, other, None, path):
                torch.testing.assert_close(weights, straight, rtol=0, atol=1e-11)


class SavesAtOnce(L.Callback):
    """Saves what a run goes on from."""

    def __init__(self, path):
        self.path = path

    def on_train_start(self, trainer, module):
        trainer.save_checkpoint(self.path)


def write_again(rank, world_size, strategy, kind, load, path):
    fit_module(
        make(), world_size, strategy={**strategy, "state_dict_type": kind}, ckpt_path=load, max_epochs=2,
        callbacks=[EMA(), Counted(), SavesAtOnce(path)], gradient_clip_val=0.5,
    )  # fmt: skip


def test_a_file_becomes_shards_and_a_file_again(tmp_path):
    """To the last bit, on other ranks each time."""
    run_ranks(train, 1, 1, ONE, tmp_path, None, "full", 1)
    loaded = whole = tmp_path / "epoch=0.ckpt"
    for size, strategy, kind in ((3, UNEVEN, "sharded"), (2, TWO, "sharded"), (2, TWO, "full")):
        path = tmp_path / f"{size}_{kind}.ckpt"
        run_ranks(write_again, size, size, strategy, kind, loaded, path)
        assert is_sharded(path) == (kind == "sharded")
        loaded = path
    again, wanted = (torch.load(path, weights_only=True) for path in (path, whole))
    assert wanted["optimizer_states"][0]["state"]
    for name in ("state_dict", "optimizer_states", "lr_schedulers", "callbacks"):
        assert_same(again[name], wanted[name], name)


class Beside(L.Callback):
    """Lets the first checkpoint be written after a batch that follows it, and looks at it before the second."""

    def __init__(self, folder, kept, stops):
        self.first, self.kept, self.stops = folder / "epoch=0.ckpt", kept, stops
        self.trained, self.count = Event(), 0

    def on_train_batch_end(self, trainer, *_):
        if trainer.current_epoch == 1:
            assert self.trained.is_set() or not is_sharded(self.first)
            if not self.stops:
                self.trained.set()
            elif trainer.global_rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    def on_exception(self, *_):
        self.trained.set()

    def write_data(self, writes, writer, *arguments):
        self.count += 1
        if self.count == 1:
            assert self.trained.wait(30), "training has waited"
            time.sleep(0.5 if self.stops else 0)
        elif self.kept is not None:
            shutil.copytree(self.first, self.kept)  # what the second one replaces is whole
        return writes(writer, *arguments)


def save_beside(rank, folder, kept, stops=False):
    beside = Beside(folder, kept if rank == 0 else None, stops)
    save = ModelCheckpoint(folder, "{epoch}", save_last="link", monitor="epoch_seen", mode="max")
    writes = dcp.FileSystemWriter.write_data
    write_data = lambda writer, *arguments: beside.write_data(writes, writer, *arguments)
    expected = pytest.raises(SIGTERMException) if stops else contextlib.nullcontext()
    module = make()
    with mock.patch.object(dcp.FileSystemWriter, "write_data", write_data), expected:
        fit_module(
            module, 2, strategy={"state_dict_type": "sharded_async"}, max_epochs=2, gradient_clip_val=0.5,
            enable_checkpointing=True, callbacks=[EMA(), Counted(), beside, save],
        )  # fmt: skip
    assert beside.count == (1 if stops else 2)
    assert f"epoch={beside.count - 1}.ckpt" in module.trainer.strategy.last_saved


def test_what_is_written_beside_training_is_of_its_step_and_replaces_what_was_there_when_whole(
    tmp_path,
):
    folder, files, kept = tmp_path / "shards", tmp_path / "files", tmp_path / "kept"
    run_ranks(save_beside, 2, folder, kept)
    assert sorted(path.name for path in folder.iterdir()) == ["epoch=1.ckpt", "last.ckpt"]
    run_ranks(train, 2, 2, TWO, files, None, "full", 1)
    wanted = torch.load(files / "epoch=0.ckpt", weights_only=True)
    got = read_shards(kept)
    for key in ("state_dict", "optimizer_states", "callbacks"):
        assert_same(got[key], wanted[key], key)
    after = read_shards(folder / "last.ckpt")["state_dict"]
    assert any(not torch.equal(value, wanted["state_dict"][name]) for name, value in after.items())


def test_a_signal_to_stop_lets_a_checkpoint_become_whole(tmp_path):
    run_ranks(save_beside, 2, tmp_path, None, True)
    assert is_sharded(tmp_path / "epoch=0.ckpt")
    assert newest(tmp_path.glob("*.ckpt")) is not None


def fail_later(rank, folder, kind, num_written, dies):
    """Saves an epoch and its copy, and while it saves the next one, or its copy, rank 1 fails or dies."""
    writes, count = dcp.FileSystemWriter.write_data, []

    def write_data(self, *arguments):
        count.append(1)
        if rank == 1 and len(count) > num_written:
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(28, "No space left on device")
        return writes(self, *arguments)

    with mock.patch.object(dcp.FileSystemWriter, "write_data", write_data):
        try:
            train(rank, 2, TWO, folder, kind=kind)
        except CheckpointError as error:
            return str(error)


@pytest.mark.parametrize(
    ("kind", "num_written", "dies"),
    [
        row("sharded", 2, False),
        row("sharded", 2, True),
        row("sharded_async", 2, False),  # found by the next save
        ("sharded_async", 3, False),  # by the end of fit
        ("sharded_async", 2, True),
    ],
)
def test_what_was_there_is_left_where_writing_fails(kind, num_written, dies, tmp_path):
    if dies:
        with pytest.raises(RankError, match="rank 1"):
            run_ranks(fail_later, 2, tmp_path, kind, num_written, dies, timeout_s=60)
    else:
        for said in run_ranks(fail_later, 2, tmp_path, kind, num_written, dies, timeout_s=60):
            assert "No space left on device" in said
        assert not list(tmp_path.glob(".*.part"))
    files = list(tmp_path.glob("*.ckpt"))
    names = ("epoch=0.ckpt", "last.ckpt") if num_written == 2 else ("epoch=1.ckpt",)
    assert newest(files)[0].name in names
    assert all(is_sharded(file) for file in files if dies is False)
    weights = read_shards(newest(files)[0])["state_dict"]
    assert all(value.isfinite().all() for value in weights.values())


def save_by_memory(rank, folder, num_bytes):
    with mock.patch.object(checkpointing, "available_bytes", return_value=num_bytes):
        train(rank, 2, TWO, folder, kind="auto", epochs=1)


@pytest.mark.parametrize(("num_bytes", "shards"), [(1000, True), row(1e9, False)])
def test_shards_are_chosen_where_a_file_would_not_fit(num_bytes, shards, tmp_path):
    run_ranks(save_by_memory, 2, tmp_path, num_bytes)
    assert is_sharded(tmp_path / "epoch=0.ckpt") == shards
    assert (tmp_path / "epoch=0.ckpt").is_file() != shards


def write_apart(rank, path):
    """Each rank writes every other weight and average of a model, in place of ranks that train it."""
    checkpoint = torch.load(path, weights_only=True)
    averages = checkpoint["callbacks"]["EMA"]
    for part, key in ((checkpoint, "state_dict"), (averages, "averages")):
        part[key] = Divided({n: v for i, (n, v) in enumerate(part[key].items()) if i % 2 == rank})
    mesh = Mesh(RankLayout(2, Placement(((0,), (1,)))), rank, torch.device("cpu"), "gloo", 20)
    mesh.connect()
    write_shards(checkpoint, path.with_name("shards.ckpt"), mesh)
    mesh.disconnect()


def test_modules_and_the_predictor_open_shards_as_they_open_a_file(tmp_path):
    path = tmp_path / "file.ckpt"
    save_with_averages(path)
    run_ranks(write_apart, 2, path)
    for ema in (True, False):
        wanted = LatentDiffusion.from_checkpoint(path, ema=ema).state_dict()
        found = LatentDiffusion.from_checkpoint(tmp_path / "shards.ckpt", ema=ema).state_dict()
        assert_same(dict(found), dict(wanted))
    images = [
        Predictor.from_pretrained(str(tmp_path / name))(["a cat"], num_inference_steps=2)
        for name in ("file.ckpt", "shards.ckpt")
    ]
    assert_same(*images)


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(RankError, match="is a folder, and no checkpoint of this strategy"):
        run_ranks(train, 1, 1, ONE, None, tmp_path)
