"""Leaving a module as it was found, bit by bit, after running its step many times.

Restored are gradients, buffers (values, and which tensor is bound to the name), training flags, counters and other
plain attributes, and the random number generators of torch, `random` and numpy. Values of parameters are not
saved: no optimizer runs here.
"""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.graph.placement import (
    move_scales,
    moved,
    own_tensors,
    quantized,
    replace_parameters,
)
from lightning_diffpipe.graph.trial import untouched

# Of gradients; more than most caches hold, so that adding to them takes as long as in training.
_SHARED_BYTES = 2**28


@contextlib.contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Restores everything on exit; inside there are no gradients."""
    gradients = [(p, p.grad) for p in module.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with untouched(module):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


def placeable(device: torch.device | str) -> torch.device:
    """Returns a device as tensors name it, a GPU with its number; raises ConfigurationError if there is none."""
    count = torch.cuda.device_count()
    try:
        place = torch.device(device)
        if place.type == "cuda" and (place.index or 0) >= count:
            raise RuntimeError(f"torch sees {count} GPUs")
    except RuntimeError as error:
        raise ConfigurationError(
            f"device={str(device)!r} cannot be used here; take cpu, or cuda where torch sees a GPU; it sees {count}"
        ) from error
    if place.type == "cuda" and place.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return place


@contextlib.contextmanager
def current(device: torch.device) -> Iterator[None]:
    """Makes a GPU the one whose random numbers are restored: of several that is the current one.

    It is initialised before, or the state in which its generator was would be unknown.
    """
    if device.type != "cuda":
        yield
        return
    torch.cuda.init()
    with torch.cuda.device(device):
        yield


@contextlib.contextmanager
def placed(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Lets a module live on a device for a while, quantized as there; its own tensors wait where they are.

    Nothing is copied back: what runs here must not change parameters, and changes of buffers and of the states of
    metrics are lost.
    """
    with quantized(module, device), _moved(module, device):
        yield


@contextlib.contextmanager
def _moved(module: nn.Module, device: torch.device) -> Iterator[None]:
    parameters = [(p, p.data, p.device) for p in module.parameters() if p.device != device]
    others = dict[Any, nn.Parameter]()
    dicts = [(m._buffers, dict(m._buffers)) for m in module.modules()]
    dicts += [(m.__dict__, tensors) for m, tensors in own_tensors(module.modules())]
    # `_device` is what `LightningModule.device` answers.
    devices = [(m, m.__dict__["_device"]) for m in module.modules() if "_device" in m.__dict__]
    try:
        for parameter, *_ in parameters:
            if (other := moved(parameter, device)) is not parameter:
                others[parameter] = other
        replace_parameters(module, others)
        for attributes, values in dicts:
            attributes.update(tree_to(values, device))
        for owner, _ in devices:
            owner.__dict__["_device"] = device
        yield
    finally:
        replace_parameters(module, {after: before for before, after in others.items()})
        for parameter, value, place in parameters:
            if parameter not in others:
                parameter.data = value
                move_scales(parameter, place)
        for attributes, values in dicts:
            attributes.update(values)
        for owner, before in devices:
            owner.__dict__["_device"] = before


def tree_to(tree: Any, device: torch.device) -> Any:
    """Moves all tensors of a tree."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), tree)


def scratch_bytes(parameters: Iterable[Tensor]) -> int:
    """Returns the size of the gradients that `scratch_gradients` gives some parameters."""
    return sum(_scratch_length(alike) * alike[0].itemsize for alike in _by_type(parameters))


@contextlib.contextmanager
def scratch_gradients(module: nn.Module, names: frozenset[str]) -> Iterator[None]:
    """Gives parameters gradients to be added to, as they are in every microbatch but the first.

    Many of them share memory, as nobody reads their values: a rank that times a whole model need not have room for
    the gradients of all of it. Models on the meta device, where none takes memory, count each by itself.
    """
    chosen = [p for name, p in module.named_parameters() if name in names]
    try:
        for alike in _by_type(chosen):
            length, start = _scratch_length(alike), 0
            memory = torch.zeros(length, dtype=alike[0].dtype, device=alike[0].device)
            for parameter in alike:
                outline = torch.zeros_like(parameter, device="meta")
                if memory.is_meta:
                    parameter.grad = outline
                    continue
                start = start if start + parameter.numel() <= length else 0
                strides = outline.stride()
                parameter.grad = memory[start:].as_strided(parameter.shape, strides)
                start += _aligned_length(parameter)
        yield
    finally:
        for parameter in chosen:
            parameter.grad = None


def _by_type(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yields parameters of the same type on the same device."""
    key = lambda parameter: (str(parameter.device), str(parameter.dtype))
    for _, alike in itertools.groupby(sorted(parameters, key=key), key):
        yield list(alike)


def _aligned_length(parameter: Tensor) -> int:
    """Returns the number of elements after which the next gradient begins, at a multiple of 16 bytes."""
    step = max(16 // parameter.itemsize, 1)
    return -(-parameter.numel() // step) * step


def _scratch_length(parameters: Sequence[Tensor]) -> int:
    """Returns the number of gradients, of parameters of the same type, that are there at a time."""
    numbers = [_aligned_length(parameter) for parameter in parameters]
    return min(sum(numbers), max(_SHARED_BYTES // parameters[0].itemsize, *numbers))
