"""Checkpoints in shards: a folder that each rank writes its part of, as large as the model may be.

A file needs the whole model, and all optimizer states, in the memory of rank 0's host. A folder has

    __0_0.distcp, __1_0.distcp, ...   tensors of every rank, as `torch.distributed.checkpoint` (DCP) writes them
    .metadata                         names and shapes of all, whichever rank has written them
    meta.pt                           everything else, with the names of tensors in their places

It is written beside its place and moved there when all ranks are done. Nothing in it depends on how the module was
divided, so any number of ranks reads it. `python -m lightning_diffpipe.checkpoint_shards FOLDER FILE` makes an
ordinary file of it. Weights are called `model.<name>`, as in Lightning's own sharded checkpoints, so that its tool
(`python -m lightning.pytorch.utilities.consolidate_checkpoint FOLDER`) finds them; optimizer states in its file are
found by what reads folders here.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from lightning_diffpipe.comm.mesh import Mesh
from lightning_diffpipe.errors import CheckpointError
from lightning_diffpipe.files import beside, sync_folder

_REST, _INDEX = "meta.pt", ".metadata"
_TENSORS, _MODEL = "tensors", "model"
_REFERENCE = "diffpipe-tensor:"
_STATES = "optimizer_states"


class Divided(dict[Any, Any]):
    """What this rank has of a part of a checkpoint that is divided over ranks."""


def is_sharded(path: str | Path) -> bool:
    """Returns whether there is a checkpoint in shards at a path."""
    return Path(path, _INDEX).is_file() and Path(path, _REST).is_file()


def write_shards(checkpoint: dict[str, Any], path: Path, mesh: Mesh) -> None:
    """Writes a checkpoint in shards; a collective call of several ranks.

    Args:
        checkpoint: Rank 0's, and of other ranks what is `Divided` in it.
        path: The folder; what is there is replaced.
        mesh: This rank's groups.

    Raises:
        CheckpointError: The disk is full, or the folder cannot be written by a rank; on all ranks.
    """
    tensors: dict[str, dict[str, Tensor]] = {_MODEL: {}, _TENSORS: {}}
    is_first, rest = mesh.rank == 0, dict[Any, Any]()
    divided = {
        where: {key: _outline(value, (*where, key), tensors) for key, value in part.items()}
        for where, part in _divided(checkpoint)
    }
    everywhere = mesh.on_first(divided, of_world=True)
    if is_first:
        rest = _outline(checkpoint, (), tensors)
        for part in everywhere[1:]:
            for where, entries in part.items():
                into = rest
                for key in where:
                    into = into[key]
                into.update({key: value for key, value in entries.items() if key not in into})
    # The same on all ranks, unlike any that another run makes.
    folder = Path(mesh.of_rank(0, str(beside(path))))
    error = ""
    try:
        if is_first:
            folder.mkdir(parents=True)
            with (folder / _REST).open("wb") as file:
                torch.save(rest, file)
                file.flush()
                os.fsync(file.fileno())
    except OSError as raised:
        error = str(raised.strerror)
    error = mesh.of_rank(0, error)
    if not error:
        try:
            writer = dcp.FileSystemWriter(folder)
            dcp.save(tensors, storage_writer=writer, process_group=mesh.world)
            if is_first:
                _put(folder, path)
        except (dcp.CheckpointException, OSError) as raised:
            error = " ".join(str(raised).split())[-300:]
    error = mesh.of_rank(0, error)
    if error:
        if is_first:
            shutil.rmtree(folder, ignore_errors=True)
        raise CheckpointError(
            f"cannot write the checkpoint {path}: {error}. Nothing was left of it, and what was there before is as "
            "it was. Make room, or name a folder that all ranks can write, and go on from the latest checkpoint"
        )


def read_shards(
    path: str | Path,
    weights_only: bool | None = None,
    wanted: Callable[[str], bool] = lambda name: True,
) -> dict[str, Any]:
    """Returns a checkpoint in shards as one of a file, on one process.

    Args:
        path: The folder.
        weights_only: As of `torch.load`, for what is no tensor.
        wanted: Whether to read a tensor, by its place, such as "optimizer_states.0.state.3.exp_avg". The others'
            names are in their places.

    Raises:
        CheckpointError: Something of it is missing or cut short.
    """
    rest = torch.load(Path(path, _REST), map_location="cpu", weights_only=weights_only)
    names = {name: _stored_name(name) for name in _referenced(rest) if wanted(name)}
    found = _tensors(path, set(names.values()))
    restored: dict[str, Any] = _restored(rest, {name: found[own] for name, own in names.items()})
    return restored


def read_states(path: str | Path, states: Any) -> Any:
    """Returns the part of an optimizer's states with the tensors that it names, as `read_shards` may leave them."""
    names = {name: _stored_name(name) for name in _referenced(states)}
    found = _tensors(path, set(names.values()))
    return _restored(states, {name: found[own] for name, own in names.items()})


def is_optimizer_state(name: str) -> bool:
    """Returns whether a tensor is one of an optimizer, which a rank needs a part of."""
    return name.startswith(f"{_STATES}.")


def consolidated(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Returns the checkpoint of a file, also of one that Lightning's tool has made of shards."""
    tensors = checkpoint.pop(_TENSORS, None)
    if tensors is None:
        return checkpoint
    known = {name: tensors.get(name) for name in _referenced(checkpoint)}
    weights = checkpoint["state_dict"]
    restored: dict[str, Any] = _restored(checkpoint, known)
    return restored | {"state_dict": weights}


def _stored_name(name: str) -> str:
    kind, _, key = name.partition(".")
    return f"{_MODEL}.{key}" if kind == "state_dict" else f"{_TENSORS}.{name}"


def _tensors(path: str | Path, names: Collection[str]) -> dict[str, Tensor]:
    """Reads tensors of a folder."""
    reader = dcp.FileSystemReader(path)
    known = reader.read_metadata().state_dict_metadata
    if missing := names - known.keys():
        raise CheckpointError(
            f"{path} lacks {len(missing)} of its tensors, e.g. {min(missing)}; take another checkpoint"
        )
    tensors = {n: torch.empty(known[n].size, dtype=known[n].properties.dtype) for n in names}
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def _put(folder: Path, path: Path) -> None:
    """Moves a folder to its place."""
    before = beside(path)
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        path.rename(before)
    folder.rename(path)
    sync_folder(path.parent)
    shutil.rmtree(before, ignore_errors=True)


def _divided(value: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Divided]]:
    if isinstance(value, Divided):
        yield where, value
    elif isinstance(value, Mapping):
        for key, member in value.items():
            yield from _divided(member, (*where, key))
    elif isinstance(value, list | tuple):
        for key, member in enumerate(value):
            yield from _divided(member, (*where, key))


def _outline(value: Any, where: tuple[Any, ...], tensors: dict[str, dict[str, Tensor]]) -> Any:
    """Returns a value with names in the places of its tensors, which are added to those given.

    Tensors of a class of its own stay, on the host.
    """
    if type(value) in (Tensor, nn.Parameter):
        name = ".".join(map(str, where))
        kind, _, key = _stored_name(name).partition(".")
        tensors[kind][key] = value.detach()
        return _REFERENCE + name
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if type(value) is list or type(value) is tuple:
        return type(value)(_outline(v, (*where, i), tensors) for i, v in enumerate(value))
    if not isinstance(value, dict):
        return value
    members = {key: _outline(member, (*where, key), tensors) for key, member in value.items()}
    return members if type(value) in (dict, Divided) else _like(value, members)


def _like(value: dict[Any, Any], members: dict[Any, Any]) -> Any:
    """Returns a dict of a class of its own, such as an OrderedDict, with other values."""
    other = value.copy()
    other.update(members)
    return other


def _referenced(value: Any) -> Iterator[str]:
    if isinstance(value, str) and value.startswith(_REFERENCE):
        yield value.removeprefix(_REFERENCE)
    elif isinstance(value, Mapping):
        for member in value.values():
            yield from _referenced(member)
    elif type(value) is list or type(value) is tuple:
        for member in value:
            yield from _referenced(member)


def _restored(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Returns a value with the tensors that its names stand for, as far as they are given."""
    if isinstance(value, str):
        name = value.removeprefix(_REFERENCE) if value.startswith(_REFERENCE) else ""
        return tensors.get(name, value)
    if type(value) is list or type(value) is tuple:
        return type(value)(_restored(member, tensors) for member in value)
    if not isinstance(value, dict):
        return value
    members = {key: _restored(member, tensors) for key, member in value.items()}
    return members if type(value) is dict else _like(value, members)


if __name__ == "__main__":
    torch.save(read_shards(sys.argv[1], weights_only=False), sys.argv[2])
