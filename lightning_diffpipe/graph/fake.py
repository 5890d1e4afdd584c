"""A copy of a module whose tensors have shapes but no memory, to probe full-size models in seconds.

The copy is deep, so that the step may change caches, counters and schedulers of it at will; only the
trainer and its like are shared. Parameters and buffers are replaced while copying (`memo`), so that
no weight is ever duplicated. Parameters of other ranks, which are placeholders here, get the strides
they have where they live, and all ranks see the same.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import logging
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lightning_diffpipe.graph import rng
from lightning_diffpipe.graph.placement import true_stride

_log = logging.getLogger(__name__)

SHARED_ATTRIBUTES = ("_trainer", "_fabric", "trainer")


def _fake_like(tensor: Tensor) -> Tensor:
    """Same shape, strides, type and device; must be called under the fake mode."""
    fake = torch.empty_strided(
        tensor.shape, true_stride(tensor), dtype=tensor.dtype, device=tensor.device
    )
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake


def fake_copy(root: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Copies a module with fake tensors; the original stays untouched.

    Raises:
        Exception: Whatever an attribute that cannot be copied raises.
    """
    memo: dict[int, Any] = {}
    shared = []
    for name, module in root.named_modules():
        for attribute in SHARED_ATTRIBUTES:
            value = module.__dict__.get(attribute)
            if value is not None:
                memo[id(value)] = value
                shared.append((name, attribute, value))
    with mode:
        for tensor in [*root.parameters(), *root.buffers()]:
            memo[id(tensor)] = _fake_like(tensor)
    duplicate = copy.deepcopy(root, memo)
    for name, attribute, value in shared:  # Lightning drops its trainer when it is copied
        duplicate.get_submodule(name).__dict__[attribute] = value
    return duplicate


def fake_batch(batch: Any, mode: FakeTensorMode) -> Any:
    """The batch with fake tensors of the same strides."""
    with mode:
        return pytree.tree_map_only(Tensor, _fake_like, batch)


def forget_fakes(mode: FakeTensorMode) -> None:
    """Removes fake tensors that the step left in caches outside the copy (class attributes, lru_cache).

    Otherwise the first real step would find them there. Attributes become None and cached entries are
    dropped, as if the step had never run.
    """
    gc.collect()  # the copy goes: modules are full of cycles
    survivors = {
        id(o): o for o in gc.get_objects() if type(o) is FakeTensor and o.fake_mode is mode
    }
    if not survivors:
        return
    # Each search for referrers walks the whole heap, so there is one for all.
    holders = [h for h in gc.get_referrers(*survivors.values()) if h is not survivors]
    outer = gc.get_referrers(*holders)
    for holder in holders:
        _drop(holder, survivors, outer)
    _log.debug("dropped %d fake tensors from caches outside the module", len(survivors))


def _drop(holder: Any, fakes: dict[int, Any], outer: list[Any]) -> None:
    if isinstance(holder, functools._lru_cache_wrapper):
        holder.cache_clear()
    elif isinstance(holder, dict):
        owners = [o for o in outer if isinstance(o, type) and any(r is holder for r in gc.get_referents(o))]
        for key in [k for k, v in holder.items() if id(v) in fakes]:
            for owner in owners:
                setattr(owner, key, None)
            if not owners:
                del holder[key]
    elif isinstance(holder, tuple):
        for wrapper in outer:
            if isinstance(wrapper, functools._lru_cache_wrapper):
                wrapper.cache_clear()


@contextlib.contextmanager
def untouched(root: nn.Module) -> Iterator[None]:
    """Puts back what a real probe changes: buffers, training flags, random number generators."""
    buffers = [(b, b._version, b.detach().clone()) for b in root.buffers()]
    training = [(m, m.training) for m in root.modules()]
    with rng.preserved(host=True):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, version, value in buffers:
                    if buffer._version != version:
                        buffer.copy_(value)
            for module, flag in training:
                module.training = flag
