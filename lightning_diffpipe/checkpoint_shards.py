"""Checkpoints in shards: a folder that each rank writes its part of, as large as the model may be.

A file needs the whole model, and all optimizer states, in the memory of rank 0's host. A folder has

    __0_0.distcp, __1_0.distcp, ...   tensors of every rank, as `torch.distributed.checkpoint` (DCP) writes them
    .metadata                         names and shapes of all, whichever rank has written them
    meta.pt                           everything else, with the names of tensors in their places

It is written next to its place and moved there when all ranks are done. Asynchronously, each rank copies its part
to the host, and a thread writes the copy while training goes on; the threads meet in a process group of their own.

Nothing in a folder depends on how the module was divided, so any number of ranks reads it.
`python -m lightning_diffpipe.checkpoint_shards FOLDER FILE` makes an ordinary file of it. Weights are called
`model.<name>`, as in Lightning's own sharded checkpoints, so that its tool
(`python -m lightning.pytorch.utilities.consolidate_checkpoint FOLDER`) finds them; optimizer states in its file are
found by what reads folders here.
"""

import contextlib
import pickle
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_diffpipe.comm.mesh import Mesh
from lightning_diffpipe.comm.waiting import in_thread
from lightning_diffpipe.errors import CheckpointError
from lightning_diffpipe.files import replacing, sync_folder, unfinished_path

_REST, _INDEX = "meta.pt", ".metadata"
_TENSORS, _MODEL = "diffpipe_tensors", "model"
_REFERENCE = "diffpipe-tensor:"


class Divided(dict[Any, Any]):
    """This rank's entries of a part of a checkpoint that is divided over ranks."""


def is_sharded(path: str | Path) -> bool:
    """Returns whether there is a checkpoint in shards at a path."""
    return Path(path, _INDEX).is_file() and Path(path, _REST).is_file()


def write_shards(
    checkpoint: dict[str, Any], path: Path, mesh: Mesh, asynchronously: bool = False
) -> Future[None]:
    """Writes a checkpoint in shards; a collective call of several ranks.

    Args:
        checkpoint: Rank 0's, and of other ranks the values that are `Divided`.
        path: The folder; an existing one is replaced.
        mesh: This rank's groups.
        asynchronously: Return when this rank's part is copied to the host, and let a thread write the copy. Nothing
            else may be written until that is done, as the threads of all ranks share one group.

    Returns:
        A future that is done when the folder is in its place, or holds the error; the same on all ranks.

    Raises:
        CheckpointError: The disk is full, or the folder cannot be written by a rank; on all ranks.
    """
    tensors: dict[str, dict[str, Tensor]] = {_MODEL: {}, _TENSORS: {}}
    is_first, outline = mesh.rank == 0, dict[Any, Any]()  # names in place of tensors
    divided = {
        _keys(path): _outline(part, _keys(path), tensors)
        for path, part in pytree.tree_flatten_with_path(checkpoint)[0]
        if isinstance(part, Divided)
    }
    divided_of_ranks = mesh.on_first(divided, of_world=True)
    if is_first:
        outline = _outline(checkpoint, (), tensors)
        for of_rank in divided_of_ranks[1:]:
            for keys, entries in of_rank.items():
                target = outline
                for key in keys:
                    target = target[key]
                target.update({key: value for key, value in entries.items() if key not in target})
    folder, error = unfinished_path(path), ""
    if is_first:  # before this returns, as the caller may change the values afterwards
        try:
            with replacing(folder / _REST) as file:
                torch.save(outline, file)
            if asynchronously and not (path.exists() or path.is_symlink()):
                path.mkdir()  # callbacks look for a name that is not there yet
        except (OSError, pickle.PicklingError, TypeError, AttributeError) as raised:
            error = _in_one_line(raised)
    place, error = mesh.of_rank(0, (str(folder), error))  # the same on all ranks
    write = partial(_write_tensors, tensors, Path(place), path, mesh)
    if error or not asynchronously:
        write(mesh.world, error)
        done: Future[None] = Future()
        done.set_result(None)
        return done
    for by_name in tensors.values():
        by_name.update({name: tensor.to("cpu", copy=True) for name, tensor in by_name.items()})
    mesh.connect_background()
    return in_thread(partial(write, mesh.background), "checkpoint")


def _write_tensors(
    tensors: dict[str, dict[str, Tensor]],
    folder: Path,
    path: Path,
    mesh: Mesh,
    group: ProcessGroup | None,
    error: str = "",
) -> None:
    """Adds the tensors of all ranks to a folder, and puts it into its place; errors as of `write_shards`."""
    is_first = mesh.rank == 0
    try:
        if not error:
            writer = dcp.FileSystemWriter(folder)
            with mesh.naming(range(mesh.layout.world_size)):
                dcp.save(tensors, storage_writer=writer, process_group=group)
            if is_first:  # after what all do: DCP tells all of an error
                _put(folder, path)
    except (dcp.CheckpointException, OSError) as raised:
        error = _in_one_line(raised)
    error = mesh.of_rank(0, error, group)
    if error:
        if is_first:
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # if there is more than a name
                path.rmdir()
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
        weights_only: Argument of `torch.load`, for all but tensors.
        wanted: Whether to read a tensor, by its place, such as "optimizer_states.0.state.3.exp_avg". The others'
            names are in their places.

    Raises:
        CheckpointError: Something of it is missing or cut short.
    """
    rest = torch.load(Path(path, _REST), map_location="cpu", weights_only=weights_only)
    return dict(read_tensors(path, rest, wanted))


def read_tensors(
    path: str | Path, value: Any, wanted: Callable[[str], bool] = lambda name: True
) -> Any:
    """Returns a part of the value of `read_shards` with the tensors in place of the names that it has left."""
    names = {name: _stored_name(name) for name in _referenced(value) if wanted(name)}
    reader = dcp.FileSystemReader(path)
    metadata = reader.read_metadata().state_dict_metadata
    if missing := set(names.values()) - metadata.keys():
        raise CheckpointError(
            f"{path} lacks {len(missing)} of its tensors, e.g. {min(missing)}; take another checkpoint"
        )
    tensors = {
        n: torch.empty(metadata[n].size, dtype=metadata[n].properties.dtype) for n in names.values()
    }
    with warnings.catch_warnings(action="ignore"):  # that one process reads
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    return _restored(value, {name: tensors[stored] for name, stored in names.items()})


def is_optimizer_state(name: str) -> bool:
    """Returns whether a tensor is one of an optimizer, which a rank needs a part of."""
    return name.startswith("optimizer_states.")


def consolidated(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Returns the checkpoint of a file, also of one that Lightning's tool has made of shards."""
    tensors = checkpoint.pop(_TENSORS, None)
    if tensors is None:
        return checkpoint
    referenced = {name: tensors.get(name) for name in _referenced(checkpoint)}
    weights = checkpoint["state_dict"]
    restored: dict[str, Any] = _restored(checkpoint, referenced)
    return restored | {"state_dict": weights}


def _stored_name(name: str) -> str:
    kind, _, key = name.partition(".")
    return f"{_MODEL}.{key}" if kind == "state_dict" else f"{_TENSORS}.{name}"


def _in_one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[-300:]


def _put(folder: Path, path: Path) -> None:
    before = unfinished_path(path)
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        path.rename(before)
    folder.rename(path)
    sync_folder(path.parent)
    shutil.rmtree(before, ignore_errors=True)


def _outline(value: Any, where: tuple[Any, ...], tensors: dict[str, dict[str, Tensor]]) -> Any:
    """Returns a value with names in place of its tensors, which are added to the given ones.

    Tensors of a class of its own stay, on the host.
    """

    def named(path: pytree.KeyPath, leaf: Any) -> Any:
        place = where + _keys(path)
        if isinstance(leaf, Divided):
            return {key: _outline(member, (*place, key), tensors) for key, member in leaf.items()}
        if type(leaf) not in (Tensor, nn.Parameter):
            return leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf
        name = ".".join(map(str, place))
        kind, _, key = _stored_name(name).partition(".")
        tensors[kind][key] = leaf.detach()
        return _REFERENCE + name

    return pytree.tree_map_with_path(named, value)


def _keys(path: pytree.KeyPath) -> tuple[Any, ...]:
    return tuple(getattr(entry, "key", getattr(entry, "idx", None)) for entry in path)


def _referenced(value: Any) -> list[str]:
    names = (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, str))
    return [n.removeprefix(_REFERENCE) for n in names if n.startswith(_REFERENCE)]


def _restored(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Returns a value with the tensors that its names stand for, as far as they are given."""
    by_reference = {_REFERENCE + name: tensor for name, tensor in tensors.items()}
    return pytree.tree_map_only(str, lambda text: by_reference.get(text, text), value)


if __name__ == "__main__":
    torch.save(read_shards(sys.argv[1], weights_only=False), sys.argv[2])
