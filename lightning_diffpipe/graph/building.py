"""Modules that take no memory while they are built: large parameters lie in files until a rank places them.

Each has shared memory of a file without a name, which all code reads and writes as usual. `place_parameters` copies
what a rank runs, and frees the room of the rest. What is on the meta device gets such memory by `materialize`.
"""

import contextlib
import os
import tempfile
import warnings
from collections.abc import Iterator
from unittest import mock

import torch
from torch import Tensor, nn

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.graph.placement import is_in_file, keep_stored, stored_value

_LEAST_BYTES = 2**16  # of a parameter that is worth a file
_UNSET = "_diffpipe_unset"


@contextlib.contextmanager
def built_in_files(root: nn.Module) -> Iterator[None]:
    """Builds large parameters in files inside; at its end those new in `root` are, however they were made."""
    register, before = nn.Module.register_parameter, set(root.parameters())

    def register_in_file(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            _move_to_file(parameter)
        register(self, name, parameter)

    with mock.patch.object(nn.Module, "register_parameter", register_in_file):
        yield
    for parameter in root.parameters():
        if parameter not in before:
            _move_to_file(parameter)
    materialize(root)
    keep_stored(root)


def _move_to_file(parameter: nn.Parameter) -> None:
    value = parameter.data
    if type(parameter) is nn.Parameter and value.is_cpu and value.layout is torch.strided:
        memory = value.untyped_storage()  # not to be resized if it is mapped
        if memory.nbytes() == value.nbytes >= _LEAST_BYTES and memory.resizable():
            parameter.data = _empty_like(value).copy_(value)


def _empty_like(tensor: Tensor) -> Tensor:
    """Returns a tensor of the host with the shape, strides and type of another; a large one is in a file."""
    layout = (tensor.shape, tensor.stride())
    outline = torch.empty_strided(*layout, dtype=tensor.dtype, device="meta")
    if (num_bytes := outline.untyped_storage().nbytes()) >= _LEAST_BYTES:
        folder = os.environ.get("TMPDIR", "/var/tmp")  # on a disk, where /tmp may be memory
        try:
            with tempfile.NamedTemporaryFile(dir=folder) as file:
                if hasattr(os, "posix_fallocate"):
                    # A write into a file for which there is no room would end the process.
                    os.posix_fallocate(file.fileno(), 0, num_bytes)
                file.truncate(num_bytes)
                memory = torch.UntypedStorage.from_file(file.name, True, num_bytes)
            return torch.empty(0, dtype=tensor.dtype, device="cpu").set_(memory, 0, *layout)
        except (OSError, RuntimeError) as error:  # a full disk, or no room among addresses
            warnings.warn(
                f"layers take memory before they are placed, as no file could be made in {folder} "
                f"({getattr(error, 'strerror', error)}); let TMPDIR have room for them on each rank",
                stacklevel=1,
            )
    return torch.empty_strided(*layout, dtype=tensor.dtype, device="cpu")


def materialize(root: nn.Module) -> None:
    """Gives tensors on the meta device memory, and values by `reset_parameters`, in the order of constructors."""
    kinds = lambda m, below: {x.is_meta for x in [*m.parameters(below), *m.buffers(below)]}
    modules = dict.fromkeys(_bottom_up(root))  # once each, also where several modules share one
    to_reset = [m for m in modules if kinds(m, True) == {True} or True in kinds(m, False)]
    made: dict[Tensor, Tensor] = {}  # tied ones stay tied
    for module in root.modules():
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None and tensor.is_meta:
                made[tensor] = made[tensor] if tensor in made else _without_value(tensor)
                setattr(module, key, made[tensor])
    with torch.no_grad():
        for module in to_reset:
            of_attention = getattr(module, "_reset_parameters", lambda: None)
            getattr(module, "reset_parameters", of_attention)()


def _bottom_up(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _bottom_up(child)
    yield module


def _without_value(tensor: Tensor) -> Tensor:
    empty = _empty_like(tensor)
    if tensor.is_floating_point():
        empty[(slice(1),) * tensor.ndim] = torch.nan  # `.data` may be written past all counts
    if isinstance(tensor, nn.Parameter):
        empty = nn.Parameter(empty, tensor.requires_grad)
    vars(empty).update(vars(tensor), **{_UNSET: empty._version})
    return empty


def refuse_unset(root: nn.Module) -> None:
    """Raises ConfigurationError for tensors on the meta device, or that were and have got no value since."""
    for name, x in [*root.named_parameters(), *root.named_buffers()]:
        is_set = not hasattr(x, _UNSET) or getattr(x, _UNSET) != x._version
        is_set = is_set or (x.is_floating_point() and not x.flatten()[:1].isnan().any())
        if x.is_meta:
            raise ConfigurationError(
                f"{name} is on the meta device since the setup hook. Make it in configure_model, where it takes no "
                "memory either until it is placed"
            )
        if not is_set and x.numel():
            kind = type(root.get_submodule(name.rpartition(".")[0])).__name__
            raise ConfigurationError(
                f"{name} was made on the meta device, and nothing has given it a value: no checkpoint, and no "
                f'reset_parameters() of its {kind}. Make it in configure_model without torch.device("meta"), where '
                "it takes no memory either until it is placed; or define reset_parameters(), or pass ckpt_path"
            )


def built_bytes(root: nn.Module) -> int:
    """Returns the size of the parameters that are in memory, and in no file."""
    return sum(p.nbytes for p in root.parameters() if not is_in_file(p) and stored_value(p) is None)
