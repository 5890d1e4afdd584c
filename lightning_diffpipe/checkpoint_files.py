"""The checkpoint files of a run: how they are written, where they go, and from which of them it goes on.

    before processes start    `ckpt_path` is checked: "last" is the newest file that can be read
    start of fit              folders can be written
    every save                a file is written next to its place, then moved there
    end of fit                one more is written, after the last step (`FinalCheckpoint`)

Lightning finds `ckpt_path="last"` by the name `last.ckpt`. While a callback saves, there is a moment without one,
or with a link to a file that is gone, and whoever was killed then began at step 0. So any checkpoint counts here.
"""

import contextlib
import sys
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol, get_filesystem
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.serialization import safe_globals

from lightning_diffpipe.checkpoint_shards import is_sharded, read_shards
from lightning_diffpipe.errors import CheckpointError, MissingCheckpointError
from lightning_diffpipe.files import check_writable, remove_abandoned, replacing

_ENDING = ModelCheckpoint.FILE_EXTENSION
# Entries from which training continues, in addition to the weights.
_STATES = ("optimizer_states", "lr_schedulers", "loops")


class WholeFiles(TorchCheckpointIO):
    """Checkpoints that are whole or not there, written straight next to their place.

    Lightning's own are made in memory first, then in the folder for temporary files, and copied from there, where a
    full disk or the end of the process leaves half of one under its final name.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Writes a file; one on other than the local file system as Lightning does.

        Raises:
            CheckpointError: The folder is full or cannot be written; has the path.
        """
        if storage_options is not None or not _is_local_file_protocol(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        path = local(path)
        try:
            with replacing(path) as file:
                torch.save(checkpoint, file)
        except OSError as error:
            raise CheckpointError(
                f"cannot write the checkpoint {path}: {error.strerror}. Nothing was left of it, and what was "
                "there before is as it was. Make room, or name another folder, and go on from the latest checkpoint"
            ) from error


def newest(
    files: Iterable[Path], to_train: bool = True, weights_only: bool | None = None
) -> tuple[Path, int] | None:
    """Returns the newest checkpoint that can be read, and the step after which it was written.

    Of several of one step it is the first one: a file that is written at the end of training counts the epoch as
    over, and would lose the rest of it.

    Args:
        files: Candidates; links are followed.
        to_train: Training shall go on, so files of weights alone do not count.
        weights_only: Argument of `torch.load`.

    Raises:
        CheckpointError: There are files, and none of them can be read; says why of the newest.
    """
    newest_readable, unreadable = None, None
    paths = {path.resolve() for path in files if path.is_file() or is_sharded(path)}
    for path in sorted(paths, key=lambda file: (file.stat().st_mtime_ns, file.name), reverse=True):
        try:
            step = checked(path, to_train, weights_only).get("global_step", 0)
        except CheckpointError as error:
            unreadable = unreadable or (error if newest_readable is None else None)
            continue
        if newest_readable is not None and step != newest_readable[1]:
            break
        newest_readable = path, step
    if unreadable is not None:
        if newest_readable is None:
            raise unreadable
        rank_zero_warn(f"a newer checkpoint is skipped: {unreadable}")
    return newest_readable


def checked(
    path: str | Path, to_train: bool = True, weights_only: bool | None = None
) -> dict[str, Any]:
    """Finds out in milliseconds whether a checkpoint is whole; its tensors are not read.

    Args:
        path: The file.
        to_train: Whether the file must have everything that training continues from.
        weights_only: Argument of `torch.load`.

    Returns:
        What it holds; tensors are read when they are used.

    Raises:
        CheckpointError: It is not there, is empty, cut short, or no such checkpoint; a line with the remedy.
    """
    checkpoint = mapped(path, weights_only, wanted=lambda _: False)
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise CheckpointError(f"{path} is no checkpoint of Lightning: it has no 'state_dict'")
    missing = [key for key in _STATES if key not in checkpoint]
    if to_train and missing:
        raise CheckpointError(
            f"{path} has weights only (no {missing[0]!r}, as by save_weights_only=True), so training cannot go on "
            "from it; load the weights into the module, and begin without ckpt_path"
        )
    return checkpoint


def mapped(path: str | Path, weights_only: bool | None, wanted: Callable[[str], bool]) -> Any:
    """Maps a checkpoint into memory: tensors of a file are read when used, `wanted` ones of shards now."""
    require_file(path)
    try:
        with safe_globals(types_of_hydra_configs()):
            if is_sharded(path):
                return read_shards(path, weights_only, wanted)
            return torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
    except Exception as error:  # torch raises errors of many types
        raise unreadable(path, error) from error


def require_file(path: str | Path) -> None:
    """Finds out whether there is anything to read at a path, of this machine or one that fsspec knows.

    Raises:
        CheckpointError: There is not, or it is an address of the web; a line with the remedy.
    """
    if str(path).startswith(("http://", "https://")):
        raise CheckpointError(
            f"{path} is an address, and checkpoints are read from files, by every rank: download it first "
            f"(curl -LO {path}), and give the path of the file"
        )
    if not _is_local_file_protocol(path):
        try:
            exists = get_filesystem(str(path)).exists(str(path))
        except Exception as error:  # of any package that knows the protocol
            raise CheckpointError(f"cannot look for the checkpoint {path}: {error}") from error
        if not exists:
            raise MissingCheckpointError(f"there is no checkpoint {path}")
        return
    file = local(path)
    if not file.exists():
        raise MissingCheckpointError(f"there is no checkpoint {path}")
    if file.is_dir() and not is_sharded(file):
        raise CheckpointError(
            f"{path} is a folder, and no checkpoint of this strategy. One of FSDP or DeepSpeed becomes a file by "
            f"`python -m lightning.pytorch.utilities.consolidate_checkpoint {path}`"
        )


def unreadable(path: str | Path, error: Exception) -> CheckpointError:
    """Returns the message for a file that torch does not read."""
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    if local(path).is_file() and not zipfile.is_zipfile(local(path)):  # torch speaks of mmap
        reason = "it is no whole archive of tensors as torch.save writes it"
    return CheckpointError(
        f"cannot read the checkpoint {path}: {reason}. If it was cut short while being written, take an earlier "
        "one; if it holds other than tensors and plain values and you trust it, pass weights_only=False"
    )


def types_of_hydra_configs() -> list[Any]:
    """Returns the types of which a Hydra config consists in a checkpoint: plain values, read without trusting it.

    A module that has one among its hyperparameters has imported omegaconf; nothing here needs it.
    """
    omegaconf = sys.modules.get("omegaconf")
    if omegaconf is None:
        return []
    base, nodes = omegaconf.base, omegaconf.nodes
    containers = [omegaconf.DictConfig, omegaconf.ListConfig, base.ContainerMetadata, base.Metadata]
    return [*containers, nodes.AnyNode, Any, defaultdict, dict, list, int]


# ------------------------------------------------------------------------------------- of a trainer


class FinalCheckpoint(L.Callback):
    """Writes a full checkpoint when training ends, while the module is still divided over the ranks.

    `ModelCheckpoint` writes every so many steps, and the last step is rarely one of them.

    Args:
        path: File to write, of this machine or one that fsspec knows.

    Attributes:
        is_written: This run has written it; not so if there was nothing left to train.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path) if _is_local_file_protocol(path) else path
        self.is_written = False

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Writes the file; every rank takes part. A trial run (`fast_dev_run`) leaves what is there alone."""
        if not trainer.fast_dev_run:
            trainer.save_checkpoint(self.path)
            self.is_written = True


def local(path: str | Path) -> Path:
    """Returns the path of a file on this machine, also of its address."""
    return Path(str(path).removeprefix("file://"))


def _folders(trainer: Any) -> Iterator[Path]:
    """Yields folders on this machine into which callbacks of a trainer save."""
    for callback in trainer.callbacks:
        if isinstance(callback, ModelCheckpoint):
            folder = callback._ModelCheckpoint__resolve_ckpt_dir(trainer)  # type: ignore[attr-defined]
            if _is_local_file_protocol(folder):
                yield local(folder)
        elif isinstance(callback, FinalCheckpoint) and isinstance(callback.path, Path):
            yield callback.path.parent


def files_of(trainer: Any) -> list[Path]:
    """Returns checkpoints that callbacks of a trainer have left in their folders, in this run and earlier ones."""
    folders = dict.fromkeys(folder.absolute() for folder in _folders(trainer))
    return [file for folder in folders for file in sorted(folder.glob(f"*{_ENDING}"))]


def chosen(
    trainer: Any, path: str | Path | None, fits: bool, weights_only: bool | None = None
) -> Any:
    """Returns the checkpoint that a run goes on from, before its processes start.

    Args:
        trainer: About to fit or to evaluate.
        path: The user's `ckpt_path`.
        fits: Training shall go on; else something is evaluated.
        weights_only: The user's argument of that name.

    Returns:
        The path; in the place of "last" the newest file that can be read, None if there is no file yet.

    Raises:
        CheckpointError: There is nothing to read at the path, or no checkpoint among the "last" can be read.
    """
    saves = any(isinstance(callback, ModelCheckpoint) for callback in trainer.callbacks)
    if path == "last" and saves and not list(_folders(trainer)):
        raise CheckpointError(
            'ckpt_path="last" is looked for in folders of this machine, and callbacks save elsewhere: name a file '
            "to go on from, or leave ckpt_path out to begin at step 0"
        )
    if path == "last":
        latest = newest(files_of(trainer), fits, weights_only)
        if latest is not None:
            rank_zero_info(f"going on from {latest[0]} (step {latest[1]})")
            return str(latest[0])
        places = ", ".join(str(folder) for folder in dict.fromkeys(_folders(trainer)))
        missing = f'ckpt_path="last", but there is no checkpoint in {places or "any folder of a callback"}'
        if not fits:
            raise MissingCheckpointError(missing)
        rank_zero_warn(f"{missing} yet, so training begins at step 0")
        return None
    named = path in ("best", "hpc") or str(path).startswith("registry")
    if path is None and fits and trainer.global_step == 0:
        with contextlib.suppress(CheckpointError):  # no harm in starting over
            if latest := newest(files_of(trainer)):
                rank_zero_warn(
                    f"training begins at step 0, though {latest[0]} is there, an earlier run's at step "
                    f'{latest[1]}: ckpt_path="last" goes on from it'
                )
    elif path is not None and not named:
        require_file(path)
    return path


def require_writable(trainer: Any) -> None:
    """Raises CheckpointError, before anything costly, if checkpoints cannot be written to a folder; for rank 0."""
    for folder in dict.fromkeys(_folders(trainer)):
        try:
            check_writable(folder / "any")
        except OSError as error:
            raise CheckpointError(
                f"checkpoints cannot be written to {folder}: {error.strerror}. Name another folder "
                "(ModelCheckpoint(dirpath=...), Trainer(default_root_dir=...)), or make it writable"
            ) from error
        remove_abandoned(folder)


def keep_last(trainer: Any) -> None:
    """Makes a resumed run go on with its `last.ckpt`, where Lightning writes `last-v1.ckpt` next to it.

    The first checkpoint of a run does not know yet that there will be a `last.ckpt`, and a run that goes on from it
    finds the name taken.
    """
    for callback in trainer.callbacks:
        if (
            isinstance(callback, ModelCheckpoint)
            and callback.save_last
            and trainer.ckpt_path is not None
            and not callback.last_model_path
            and "{" not in callback.CHECKPOINT_NAME_LAST
        ):
            last = Path(str(callback.dirpath), f"{callback.CHECKPOINT_NAME_LAST}{_ENDING}")
            if Path(trainer.ckpt_path).resolve().parent == last.parent.resolve():
                callback.last_model_path = str(last)
