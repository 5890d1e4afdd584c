"""Modules that take no memory while they are built: large parameters lie in files until a rank places them.

A parameter that is made inside of `built_in_files` gets shared memory of a file without a name. Whatever code then
writes or reads it (a constructor, `apply`, a checkpoint, a comparison of ranks) does so there, with the numbers
that it would have in memory; the system keeps as much of the file in memory as it likes. `place_parameters` copies
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
from lightning_diffpipe.graph.placement import keep_stored

_LEAST_BYTES = 2**16  # of a parameter that is worth a file
_UNSET = "_diffpipe_unset"
_TEMPORARY = "/var/tmp"  # on a disk, where /tmp may be memory


@contextlib.contextmanager
def built_in_files(root: nn.Module) -> Iterator[None]:
    """Context in which modules get large parameters in files; at its end those of `root` are, whoever made them."""
    register = nn.Module.register_parameter

    def register_in_file(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            _move_to_file(parameter)
        register(self, name, parameter)

    with mock.patch.object(nn.Module, "register_parameter", register_in_file):
        yield
    for parameter in root.parameters():
        _move_to_file(parameter)
    materialize(root)
    keep_stored(root)


def _move_to_file(parameter: nn.Parameter) -> None:
    value = parameter.data
    if (
        type(parameter) is nn.Parameter
        and type(value) is Tensor
        and (value.device.type, value.layout) == ("cpu", torch.strided)
        and value.untyped_storage().nbytes() == value.nbytes >= _LEAST_BYTES
        and value.untyped_storage().resizable()  # torch's own memory, and nothing that is mapped
    ):
        parameter.data = _empty_like(value).copy_(value)


def _empty_like(tensor: Tensor) -> Tensor:
    """Returns a tensor of the host with the shape, strides and type of another; a large one is in a file."""
    layout = {"size": tensor.shape, "stride": tensor.stride(), "dtype": tensor.dtype}
    num_bytes = torch.empty_strided(**layout, device="meta").untyped_storage().nbytes()
    if num_bytes >= _LEAST_BYTES:
        on_disk = "TMPDIR" not in os.environ and os.access(_TEMPORARY, os.W_OK)
        try:
            with tempfile.NamedTemporaryFile(dir=_TEMPORARY if on_disk else None) as file:
                # A write into a file for which there is no room would end the process.
                os.posix_fallocate(file.fileno(), 0, num_bytes)
                memory = torch.UntypedStorage.from_file(file.name, True, num_bytes)
            empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
            return empty.set_(memory, 0, tensor.shape, tensor.stride())
        except (OSError, AttributeError) as error:  # a full disk, or a system without such files
            warnings.warn(
                "layers of configure_model take memory before they are placed, as no files could be made for them "
                f"({getattr(error, 'strerror', error)}); let TMPDIR be a folder on a disk with room for the "
                "module, once for each rank of this host",
                stacklevel=1,
            )
    return torch.empty_strided(**layout, device="cpu")


def materialize(root: nn.Module) -> None:
    """Gives tensors on the meta device memory, and values by `reset_parameters` of their modules.

    That is called in the order of constructors: of children, and then of the modules that have them, if all of
    theirs was there. What has no value then is refused by `refuse_without_values`, unless it is loaded before.
    """
    to_reset = [module for module in _bottom_up(root) if _is_to_reset(module)]
    made: dict[Tensor, Tensor] = {}
    for module in root.modules():
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None and tensor.is_meta:
                if tensor not in made:
                    made[tensor] = _without_value(tensor)
                setattr(module, key, made[tensor])
    with torch.no_grad():
        for module in to_reset:
            for name in ("reset_parameters", "_reset_parameters"):  # the latter of attention
                if callable(reset := getattr(module, name, None)):
                    reset()
                    break


def _bottom_up(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _bottom_up(child)
    yield module


def _is_to_reset(module: nn.Module) -> bool:
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    everything = [*module.parameters(), *module.buffers()]
    return any(x.is_meta for x in own) or bool(everything and all(x.is_meta for x in everything))


def _without_value(tensor: Tensor) -> Tensor:
    empty = _empty_like(tensor)
    if tensor.is_floating_point() and tensor.numel():
        empty[(0,) * tensor.ndim] = torch.nan  # tells whether something is written past all counts
    if isinstance(tensor, nn.Parameter):
        empty = nn.Parameter(empty, tensor.requires_grad)
    vars(empty).update(vars(tensor))
    setattr(empty, _UNSET, empty._version)
    return empty


def refuse_without_values(root: nn.Module) -> None:
    """Raises ConfigurationError for tensors on the meta device, or that were and have got no value since."""
    for path, module in root.named_modules():
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is None or not (tensor.is_meta or _is_unset(tensor)):
                continue
            raise ConfigurationError(
                f"{f'{path}.{key}'.lstrip('.')} was made on the meta device, and nothing has given it a value: its "
                f"{type(module).__name__} has no reset_parameters() that does, and no checkpoint was loaded. Build "
                'the module in configure_model without torch.device("meta"), where it takes no memory either until '
                "it is placed; or define reset_parameters(), or pass ckpt_path"
            )


def _is_unset(tensor: Tensor) -> bool:
    if not tensor.numel() or tensor._version != getattr(tensor, _UNSET, None):
        return False
    return not tensor.is_floating_point() or bool(tensor[(0,) * tensor.ndim].isnan())
