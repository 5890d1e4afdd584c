"""Which checkpoint a run goes on from, whatever happened while the ones before were written.

Files that are whole or not there.
"""

import errno
import os
import subprocess
import tempfile

import fsspec
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from omegaconf import OmegaConf

from lightning_diffpipe import DiffPipeStrategy, files
from lightning_diffpipe.callbacks import FinalCheckpoint
from lightning_diffpipe.checkpoint_files import WholeFiles, newest
from lightning_diffpipe.errors import CheckpointError, MissingCheckpointError
from lightning_diffpipe.files import write_atomically
from lightning_diffpipe.modules.parts import read_checkpoint
from tests.distributed.scenarios import Settings, build, quick_strategy, quiet_trainer
from tests.distributed.tiny import Data


def train(folder, max_steps, ckpt_path=None, callbacks=(), **checkpoint):
    """Trains on one rank, saving every step as the shipped configs do every 500th."""
    saving = ModelCheckpoint(
        folder, filename="{step:06d}", auto_insert_metric_name=False,
        **{"every_n_train_steps": 1, "save_last": "link", **checkpoint},
    )  # fmt: skip
    trainer = quiet_trainer(
        devices=1, strategy=quick_strategy(), enable_checkpointing=True, max_epochs=-1,
        max_steps=max_steps, callbacks=[saving, *callbacks],
    )  # fmt: skip
    trainer.fit(build(Settings()), datamodule=Data(), ckpt_path=ckpt_path)
    return trainer


def steps_in(folder):
    return {torch.load(path)["global_step"] for path in folder.glob("0*.ckpt")}


class Killed(BaseException):
    """Stands for SIGKILL before a call that changes a folder."""


@pytest.mark.slow
def test_a_run_killed_at_any_moment_of_saving_is_gone_on_with(tmp_path, monkeypatch):
    """History: killed between removing and remaking last.ckpt, 1 of 20 runs began at step 0 again."""
    count = [0]
    calls = [(os, name) for name in ("replace", "rename", "remove", "unlink", "symlink", "fsync")]

    def killing(owner, name, at):
        own = getattr(owner, name)

        def call(*args, **options):
            if str(tmp_path) in str(args) or isinstance(args[0], int):
                count[0] += 1
                if count[0] == at:
                    raise Killed
            return own(*args, **options)

        return call

    moments = 0
    while True:
        moments += 1
        folder, count[0] = tmp_path / str(moments), 0
        with monkeypatch.context() as patch:
            for owner, name in calls:
                patch.setattr(owner, name, killing(owner, name, moments))
            try:
                train(folder, 2)
            except Killed:
                pass
            else:
                break
        there = steps_in(folder) if folder.exists() else set()
        found = newest(folder.glob("*.ckpt"))
        assert (found[1] if found else 0) == max(there, default=0), f"moment {moments}: {there}"
        if moments % 3:
            continue
        trainer = train(folder, 3, "last")
        assert (trainer.ckpt_path is None) == (not there), f"moment {moments}: {there}"
        assert trainer.global_step == 3
        assert torch.load(folder / "last.ckpt")["global_step"] == 3
        assert not list(folder.glob("last-*")), f"moment {moments}"
    assert moments > 10, "the calls that save were not met"


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_its_link(tmp_path):
    """History: last.ckpt kept pointing at an old file, beside a newer last-v1.ckpt."""
    train(tmp_path, 1)
    train(tmp_path, 2, tmp_path / "000001.ckpt")
    assert [p.name for p in sorted(tmp_path.glob("last*"))] == ["last.ckpt"]
    assert (tmp_path / "last.ckpt").resolve().name == "000002.ckpt"


@pytest.mark.slow
def test_a_checkpoint_cut_short_is_skipped_with_a_word(tmp_path):
    train(tmp_path, 2, save_top_k=-1)
    newer = tmp_path / "000003.ckpt"
    newer.write_bytes((tmp_path / "000002.ckpt").read_bytes()[:-100])
    (tmp_path / "000004.ckpt").touch()
    with pytest.warns(
        UserWarning,
        match=r"a newer checkpoint is skipped: cannot read the checkpoint .*000004.ckpt: ",
    ):
        trainer = train(tmp_path, 3, "last")
    assert (trainer.ckpt_path, trainer.global_step) == (str(tmp_path / "000002.ckpt"), 3)
    for path in tmp_path.glob("*.ckpt"):
        path.unlink()
    newer.write_bytes(b"no checkpoint")
    with pytest.raises(CheckpointError, match=r"cannot read .*000003"):
        train(tmp_path, 3, "last")


@pytest.mark.slow
def test_the_end_of_training_is_gone_on_with_in_the_middle_of_its_epoch(tmp_path):
    """What is written at the end counts the epoch as over: going on from there would skip the rest of it."""
    final = FinalCheckpoint(tmp_path / "final.ckpt")
    train(tmp_path, 2, callbacks=[final])
    path, step = newest(tmp_path.glob("*.ckpt"))
    assert (path.name, step) == ("000002.ckpt", 2)
    train(tmp_path, 3, "last", callbacks=[final], every_n_train_steps=2)
    path, step = newest(tmp_path.glob("*.ckpt"))
    assert (path.name, step) == ("final.ckpt", 3)


@pytest.mark.slow
def test_beginning_anew_next_to_checkpoints_is_named(tmp_path):
    train(tmp_path, 1)
    with pytest.warns(
        UserWarning, match=r"begins at step 0, though .*000001.ckpt is there, .* step 1"
    ):
        train(tmp_path, 1)


def evaluate(folder, path):
    callback = ModelCheckpoint(folder)
    trainer = quiet_trainer(
        devices=1, strategy=quick_strategy(), enable_checkpointing=True, callbacks=[callback]
    )
    trainer.validate(build(Settings()), datamodule=Data(), ckpt_path=path, verbose=False)


def test_there_is_nothing_to_evaluate_without_a_checkpoint(tmp_path):
    """History: with ckpt_path="last" and no checkpoint, the initial weights were evaluated."""
    with pytest.raises(FileNotFoundError, match='ckpt_path="last", but there is no checkpoint in'):
        evaluate(tmp_path, "last")
    train(tmp_path, 1, save_weights_only=True)
    evaluate(tmp_path, "last")  # weights are enough
    with pytest.raises(CheckpointError, match=r"has weights only \(no 'optimizer_states'"):
        train(tmp_path, 2, "last")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "there is no checkpoint .*a.ckpt"),
        (
            lambda path: path.touch(),
            "a.ckpt: it is no whole archive of tensors .* take an earlier one",
        ),
        (lambda path: path.mkdir(), "a.ckpt is a folder, .*consolidate_checkpoint"),
        (lambda path: path.write_bytes(b"text"), "a.ckpt: it is no whole archive of tensors"),
        (lambda path: path.symlink_to("gone.ckpt"), "there is no checkpoint .*a.ckpt"),
    ],
)
def test_what_is_no_checkpoint_is_named_with_its_remedy(tmp_path, make, message):
    """History: a file of 0 bytes was refused for no reason at all."""
    make(tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=message) as raised:
        train(tmp_path, 1, tmp_path / "a.ckpt")
    there = os.path.lexists(tmp_path / "a.ckpt") and not (tmp_path / "a.ckpt").is_symlink()
    assert isinstance(raised.value, MissingCheckpointError) is not there
    assert isinstance(raised.value, FileNotFoundError) is not there


# ------------------------------------------------------------------------------------------- disks


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a disk of one megabyte."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


LARGE = {"state_dict": {str(n): torch.zeros(100_000) for n in range(4)}}


def test_a_full_disk_leaves_what_was_there(small_disk):
    """History: a file cut short was left under its final name."""
    path = small_disk / "last.ckpt"
    WholeFiles().save_checkpoint({"state_dict": {}}, path)
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match=r"cannot write .*last.ckpt: No space left on device"):
        WholeFiles().save_checkpoint(LARGE, path)
    assert list(small_disk.iterdir()) == [path]
    assert path.read_bytes() == before


def test_a_full_folder_for_temporary_files_does_not_matter(tmp_path, small_disk, monkeypatch):
    """History: checkpoints went through it, and failed without a path although their folder had room."""
    (small_disk / "full").write_bytes(bytes(900_000))
    monkeypatch.setenv("TMPDIR", str(small_disk))
    monkeypatch.setattr(tempfile, "tempdir", None)  # what it has found before
    assert tempfile.gettempdir() == str(small_disk)
    WholeFiles().save_checkpoint({"a": torch.zeros(10**6)}, tmp_path / "a.ckpt")
    assert (tmp_path / "a.ckpt").stat().st_size > 4e6


def test_an_error_of_the_disk_has_the_path(tmp_path, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*plan.json'"):
        files.write_atomically(tmp_path / "plan.json", "{}")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_refused_before_training(tmp_path):
    """History: at the first save, after hours."""
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot be written to .*file/run: Not a directory"):
        train(tmp_path / "file" / "run", 1)


def test_what_killed_writers_left_is_removed_in_time(tmp_path):
    old, young = tmp_path / ".1.part", tmp_path / ".2.part"
    for path in (old, young):
        path.touch()
    os.utime(old, (0, 0))
    files.remove_abandoned(tmp_path)
    assert list(tmp_path.iterdir()) == [young]


@pytest.mark.slow
def test_a_final_checkpoint_goes_where_fsspec_writes(tmp_path, monkeypatch):
    """History: of an address a folder was made on this machine, `memory:/run`."""
    monkeypatch.chdir(tmp_path)
    train(tmp_path / "saved", 2, callbacks=[FinalCheckpoint("memory://run/final.ckpt")])
    assert not list(tmp_path.glob("memory*"))
    assert fsspec.filesystem("memory").exists("/run/final.ckpt")
    trainer = train(tmp_path / "more", 3, ckpt_path="memory://run/final.ckpt")
    assert steps_in(tmp_path / "more") == {3}
    assert trainer.global_step == 3


@pytest.mark.slow
def test_the_last_checkpoint_elsewhere_has_to_be_named():
    """History: folders of other file systems were not looked into, and a run started again next to them."""
    train("memory://last", 2, save_last=True)
    with pytest.raises(CheckpointError, match=r"in folders of this machine.*name a file"):
        train("memory://last", 3, ckpt_path="last", save_last=True)
    trainer = train("memory://last", 3, ckpt_path="memory://last/last.ckpt", save_last=True)
    assert trainer.global_step == 3


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("memory://run/none.ckpt", "there is no checkpoint memory://run/none.ckpt"),
        ("unheard://run/a.ckpt", "cannot look for the checkpoint unheard://run/a.ckpt: "),
        # History: it was said not to exist.
        ("http://localhost/a.ckpt", r"is an address, .* \(curl -LO http://localhost/a.ckpt\)"),
    ],
)
def test_addresses_that_cannot_be_read_are_refused_before_planning(
    path, reason, tmp_path, monkeypatch
):
    monkeypatch.setattr(DiffPipeStrategy, "setup_environment", lambda self: pytest.fail("began"))
    with pytest.raises(CheckpointError, match=reason):
        train(tmp_path, 2, ckpt_path=path)


def test_parts_are_read_beside_a_config_of_hydra(tmp_path):
    """A module may keep one among its hyperparameters; reading it trusts nobody."""
    settings = OmegaConf.create({"sizes": [1, 2]})
    checkpoint = {"state_dict": {}, "diffpipe_parts": {}, "hyper_parameters": {"cfg": settings}}
    torch.save(checkpoint, tmp_path / "a.ckpt")
    assert read_checkpoint(tmp_path / "a.ckpt")["hyper_parameters"]["cfg"] == settings


def test_writing_leaves_nothing_half_done(tmp_path):
    target = tmp_path / "deep" / "p.json"
    write_atomically(target, "one")
    write_atomically(target, "two")
    assert target.read_text() == "two"
    assert list(target.parent.iterdir()) == [target]
    target.unlink()
    target.mkdir()  # a file cannot take the place of a folder
    with pytest.raises(OSError, match="directory"):
        write_atomically(target, "three")
    assert list(target.parent.iterdir()) == [target]


def test_others_may_read_what_is_written(tmp_path):
    """History: plans and profiles of a run could be read by nobody else in the group."""
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "plan.json", b"{}")
    finally:
        os.umask(before)
    assert (tmp_path / "plan.json").stat().st_mode & 0o777 == 0o640
