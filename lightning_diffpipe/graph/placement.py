"""Which parameters live on this rank: all others become placeholders without memory.

A placeholder is one NaN, expanded to the shape of the parameter: modules, names, list lengths and
state-dict keys stay as they are, and a value that should not have been read is loud. `Parameter` objects
keep their identity, so that optimizers built before or after find the same ones.

Never call `.to()` on a module with placeholders: moving an expanded tensor allocates all of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_diffpipe.errors import GraphError

_STRIDE = "_diffpipe_stride"


@contextlib.contextmanager
def created_in(dtype: torch.dtype) -> Iterator[None]:
    """Makes tensors inside in a type at once, unless their code names another.

    Converted later, they would need the memory of both types.

    Args:
        dtype: That type.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def is_placeholder(tensor: Tensor) -> bool:
    """Returns whether a parameter lives on another rank."""
    return hasattr(tensor, _STRIDE)


def true_stride(tensor: Tensor) -> tuple[int, ...]:
    """Returns strides of a parameter where it lives; of any other tensor its own."""
    return tuple(getattr(tensor, _STRIDE, None) or tensor.stride())


def place_parameters(
    root: nn.Module, resident: Collection[str], device: torch.device | str
) -> tuple[str, ...]:
    """Frees all parameters but the resident ones, and moves those, buffers and metrics to the device.

    Args:
        root: The module; changed in place. May be called again with other resident names as long as
            no placeholder becomes resident.
        resident: Names of the parameters that stay.
        device: Where they shall live, and where placeholders pretend to live.

    Returns:
        Names of the placeholders.

    Raises:
        GraphError: A name is unknown, or names a parameter whose values are gone.
    """
    parameters = dict(root.named_parameters())
    unknown = set(resident) - parameters.keys()
    gone = [name for name in resident if name in parameters and is_placeholder(parameters[name])]
    if unknown:
        raise GraphError(f"{len(unknown)} resident parameters do not exist, e.g. {min(unknown)}")
    if gone:
        raise GraphError(
            f"{gone[0]} was freed on this rank; load it with restore_parameters() first"
        )
    foreign = []
    for name, parameter in parameters.items():
        if name in resident:
            if parameter.device != torch.device(device):
                parameter.data = parameter.data.to(device)
            continue
        _free(parameter, torch.device(device))
        foreign.append(name)
    for module in root.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.device != torch.device(device):
                module._buffers[key] = buffer.to(device)
    for module in root.modules():  # what `.to()` moves besides
        if "_device" in module.__dict__:  # what `LightningModule.device` answers
            module.__dict__["_device"] = torch.device(device)
        if has_own_tensors(module):
            module._apply(lambda tensor: tensor.to(device))
    return tuple(foreign)


def has_own_tensors(module: nn.Module) -> bool:
    """Returns whether `.to()` moves more of a module than parameters and buffers: metrics have states besides."""
    # Recurrent layers would lay their weights out anew, which are parameters.
    return type(module)._apply is not nn.Module._apply and not isinstance(module, nn.RNNBase)


def own_tensors(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, dict[str, Any]]]:
    """Returns tensors, and lists of them, that are plain attributes of modules: states of metrics."""
    return [
        (module, {name: value for name, value in module.__dict__.items() if _is_tensors(value)})
        for module in modules
        if has_own_tensors(module)
    ]


def _is_tensors(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_tensors, value))
    return isinstance(value, Tensor) and not isinstance(value, nn.Parameter)


def leave_on_host(root: nn.Module) -> None:
    """Lets placeholders pretend to live on the host, so that the module can be moved there."""
    for parameter in root.parameters():
        if is_placeholder(parameter):
            _free(parameter, torch.device("cpu"))


def restore_parameters(root: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Gives placeholders their values, and thereby memory, back.

    Args:
        root: The module; changed in place.
        values: Values by parameter name, of the right shape.

    Raises:
        GraphError: A value has the wrong shape.
    """
    parameters = dict(root.named_parameters())
    for name, value in values.items():
        restore_parameter(name, parameters[name], value)


def restore_parameter(name: str, parameter: Tensor, value: Tensor) -> None:
    """Gives one placeholder its value; see `restore_parameters`."""
    if value.shape != parameter.shape:
        raise GraphError(
            f"{name} has shape {tuple(parameter.shape)}, its value {tuple(value.shape)}"
        )
    real = torch.empty_strided(
        parameter.shape, true_stride(parameter), dtype=parameter.dtype, device=value.device
    )
    parameter.data = real.copy_(value)
    if is_placeholder(parameter):
        delattr(parameter, _STRIDE)


@contextlib.contextmanager
def lent_to_placeholders(values: Mapping[nn.Parameter, Tensor]) -> Iterator[None]:
    """A context in which placeholders have values; after it they are the placeholders that they were.

    Args:
        values: By placeholder, of its shape and dtype, on its device.
    """
    before = {parameter: (parameter.data, true_stride(parameter)) for parameter in values}
    for parameter, value in values.items():
        parameter.data = value
        delattr(parameter, _STRIDE)
    try:
        yield
    finally:
        for parameter, (data, stride) in before.items():
            parameter.data = data
            setattr(parameter, _STRIDE, stride)


def placeholder_of(parameter: Tensor, device: torch.device) -> nn.Parameter:
    """Returns a placeholder with the shape, strides and dtype of a parameter, which may be on the meta device."""
    empty = torch.empty((), dtype=parameter.dtype, device=device).expand(parameter.shape)
    placeholder = nn.Parameter(empty, requires_grad=False)
    setattr(placeholder, _STRIDE, tuple(parameter.stride()))
    _free(placeholder, device)
    return placeholder


def _free(parameter: nn.Parameter, device: torch.device) -> None:
    if not is_placeholder(parameter):
        setattr(parameter, _STRIDE, tuple(parameter.stride()))
    floating = parameter.dtype.is_floating_point or parameter.dtype.is_complex
    value = torch.full((), float("nan") if floating else 0, dtype=parameter.dtype, device=device)
    parameter.grad = None
    parameter.data = value.expand(parameter.shape)
