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
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from lightning_diffpipe.graph import rng
from lightning_diffpipe.graph.placement import own_tensors, true_stride

_log = logging.getLogger(__name__)

_DEVICE_OF = torch.ops.prim.device.default

SHARED_ATTRIBUTES = ("_trainer", "_fabric", "trainer")


def fake_copy(root: nn.Module, mode: TrackedFakeMode) -> nn.Module:
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
    for tensor in [*root.parameters(), *root.buffers()]:
        memo[id(tensor)] = mode.like(tensor)
    duplicate = copy.deepcopy(root, memo)
    for name, attribute, value in shared:  # Lightning drops its trainer when it is copied
        duplicate.get_submodule(name).__dict__[attribute] = value
    return duplicate


def fake_batch(batch: Any, mode: TrackedFakeMode) -> Any:
    """Returns the batch with fake tensors of the same strides."""
    return pytree.tree_map_only(Tensor, mode.like, batch)


class TrackedFakeMode(FakeTensorMode):
    """A fake mode that knows which of its tensors are still alive."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._made: list[StorageWeakRef] = []

    def like(self, tensor: Tensor) -> FakeTensor:
        """Returns a fake tensor of the same shape, strides, type and device; of a parameter, a parameter."""
        shape, stride = tensor.shape, true_stride(tensor)
        meta = torch.empty_strided(shape, stride, dtype=tensor.dtype, device="meta")
        fake = FakeTensor(self, meta, tensor.device)
        self._made.append(StorageWeakRef(fake.untyped_storage()))
        if isinstance(tensor, nn.Parameter):
            fake._is_param = True  # nn.Parameter would detach it, which takes ten times as long
            fake.requires_grad_(tensor.requires_grad)
        return fake

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE_OF:  # asked by autograd for every tensor it sees: half of all calls
            return args[0].device
        if _is_single_draw(func, args) and (value := _drawn(func, args, kwargs or {})) is not None:
            return value
        out = self.dispatch(func, types, args, kwargs or {})
        for leaf in out if isinstance(out, list | tuple) else (out,):
            if isinstance(leaf, FakeTensor):
                self._made.append(StorageWeakRef(leaf.untyped_storage()))
        return out

    def anything_alive(self) -> bool:
        """Returns whether a tensor made under this mode survived the step."""
        self._made = [made for made in self._made if not made.expired()]
        return bool(self._made)


def _is_single_draw(func: Any, args: Sequence[Any]) -> bool:
    """Returns whether an operator draws one random number, of which steps make coins: `torch.rand(()) < p`."""
    if torch.Tag.nondeterministic_seeded not in func.tags or any(
        isinstance(a, Tensor) for a in args
    ):
        return False
    sizes = [a for a in args if isinstance(a, list | tuple)]
    return sizes in ([()], [[]], [(1,)], [[1]])


def _drawn(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """Returns a single number from the generator of the host, as a constant that fake tensors know the value of."""
    if kwargs.get("generator") is not None:
        return None
    with _disable_current_modes():
        value = func(*args, **{**kwargs, "device": "cpu"})
    return torch.tensor(value.tolist(), dtype=value.dtype)


@contextlib.contextmanager
def kept_young() -> Iterator[None]:
    """Keeps what is made inside in the youngest generation, so that its cycles are found without the rest.

    A copy of a module is full of cycles. Searched with everything else that the process has imported, they take
    a third of a second each time; alone a few milliseconds.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def forget_fakes(mode: TrackedFakeMode) -> None:
    """Removes fake tensors that the step left in caches outside the copy (class attributes, lru_cache).

    Otherwise the first real step would find them there. Attributes become None and cached entries are
    dropped, as if the step had never run. The module must be out of use: looking at all objects of the
    process takes a third of a second, and is only done if a tensor survived among them.
    """
    for generation in (0, 2):  # Usually all that is left is as young as `kept_young` makes it.
        if not mode.anything_alive():
            return
        gc.collect(generation)
    if not mode.anything_alive():
        return
    survivors = [o for o in gc.get_objects() if type(o) is FakeTensor and o.fake_mode is mode]
    ids = {id(tensor) for tensor in survivors}
    for holder in _holders(ids) if survivors else ():
        if holder is not survivors:
            _drop(holder, ids)
    _log.debug("dropped %d fake tensors from caches outside the module", len(survivors))


def _holders(ids: set[int]) -> list[Any]:
    """Returns what may cache these objects, and holds one of them.

    `gc.get_referrers` would compare every reference of the process with each object in turn: half a minute
    where something keeps thousands alive. Types are compared, as `isinstance` asks objects for their class.
    """
    kinds = (dict, list, tuple, functools._lru_cache_wrapper)
    return [
        holder
        for holder in gc.get_objects()
        if issubclass(type(holder), kinds) and not ids.isdisjoint(map(id, gc.get_referents(holder)))
    ]


def _drop(holder: Any, tensors: set[int]) -> None:
    if isinstance(holder, functools._lru_cache_wrapper):
        holder.cache_clear()
    elif isinstance(holder, dict):
        keys = [key for key, value in holder.items() if id(value) in tensors]
        owners = [owner for owner in gc.get_referrers(holder) if isinstance(owner, type)]
        for key in keys:
            for owner in owners:
                setattr(owner, key, None)
            if not owners:
                del holder[key]
    elif isinstance(holder, list | tuple):
        for outer in gc.get_referrers(holder):
            if isinstance(outer, functools._lru_cache_wrapper):
                outer.cache_clear()


@contextlib.contextmanager
def untouched(root: nn.Module, modules: Iterable[nn.Module] | None = None) -> Iterator[None]:
    """Restores what a real run changes: buffers, metrics, counters and lists, training flags, random numbers.

    Args:
        root: The module whose step is run; its lists are restored in any case.
        modules: What the run may change otherwise; all modules if not given.
    """
    modules = list(root.modules() if modules is None else modules)
    buffers = [
        (module, key, buffer, buffer.detach().clone())
        for module in modules
        for key, buffer in module._buffers.items()
        if buffer is not None
    ]
    # A run changes copies: code that moved the states here may restore the tensors it found.
    metrics = [(module, dict(vars(module)), own) for module, own in own_tensors(modules)]
    for module, _, own in metrics:
        copies = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), own)
        module.__dict__.update(copies)
    kinds = (bool, int, float, str, type(None))
    plain = [(m, {k: v for k, v in vars(m).items() if isinstance(v, kinds)}) for m in modules]
    containers = [
        (value, value.copy())
        for module in {root, *modules}
        for key, value in vars(module).items()
        if not key.startswith("_") and type(value) in (list, dict, set)
    ]
    training = [(m, m.training) for m in modules]
    with rng.preserved(host=True):
        try:
            yield
        finally:
            with torch.no_grad():
                # Versions do not tell: batch norm changes its statistics without counting them up.
                for module, key, buffer, value in buffers:
                    buffer.copy_(value)
                    module._buffers[key] = buffer  # the step may have put another in its place
            for module, attributes, _ in metrics:
                module.__dict__.update(attributes)
            for module, attributes in plain:
                vars(module).update(attributes)
            for value, before in containers:
                value.clear()
                value.extend(before) if type(value) is list else value.update(before)
            for module, flag in training:
                module.training = flag
