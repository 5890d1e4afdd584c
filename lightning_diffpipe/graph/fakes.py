"""Modules without values: fake copies, on which a step is probed.

A fake copy has tensors with shapes only, to probe full-size models in seconds. It is deep, so that the step may
change caches, counters and schedulers of it at will; only the trainer and its like are shared. Parameters and
buffers are replaced while copying (`memo`), so that no weight is ever duplicated. Placeholders get the strides
that their parameters have where they live, so that all ranks see the same.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import logging
import operator
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from lightning_diffpipe.errors import clear_variables
from lightning_diffpipe.graph.placement import true_stride

_log = logging.getLogger(__name__)
Result = TypeVar("Result")

DEVICE_OF = torch.ops.prim.device.default
"""Asked by autograd for every fake tensor it sees: half of all calls that modes get."""

_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default

_EMPTIED = (OrderedDict, dict, set, list)
SHARED_ATTRIBUTES = ("_trainer", "_fabric", "trainer")


class _LeftOvers(TorchFunctionMode):
    """Copies what an earlier step has left in an attribute, such as a hidden state that the loss reads, as data."""

    def __init__(self, mode: TrackedFakeMode, states: Iterable[Tensor]) -> None:
        super().__init__()
        self._mode, self._states = mode, {t.untyped_storage()._cdata for t in states}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_copied = (
            func is Tensor.__deepcopy__ and args[0].grad_fn is not None
        )  # torch: leaves only
        if is_copied and args[0].untyped_storage()._cdata not in self._states:
            return self._mode.like(args[0].detach())
        return func(*args, **(kwargs or {}))


class NoCopyError(Exception):
    """A module holds what cannot be copied, a generator perhaps; says what copying raised."""


def fake_copy(root: nn.Module, mode: TrackedFakeMode) -> nn.Module:
    """Copies a module with fake tensors; the original stays untouched.

    Raises:
        NoCopyError: The module holds what cannot be copied.
    """
    memo: dict[int, Any] = {}
    shared = []
    for name, module in root.named_modules():
        for attribute in SHARED_ATTRIBUTES:
            value = module.__dict__.get(attribute)
            if value is not None:
                memo[id(value)] = value
                shared.append((name, attribute, value))
    states = [*root.parameters(), *root.buffers()]
    memo |= {id(tensor): mode.like(tensor) for tensor in states}
    # Most containers of a module are empty, and copying one takes as long as a setting.
    values = (value for module in root.modules() for value in vars(module).values())
    memo |= {id(value): type(value)() for value in values if type(value) in _EMPTIED and not value}
    with _LeftOvers(mode, states):
        try:
            duplicate = copy.deepcopy(root, memo)
        except Exception as error:
            raise NoCopyError(f"{type(error).__name__}: {error}") from error
    for name, attribute, value in shared:  # Lightning drops its trainer when it is copied
        duplicate.get_submodule(name).__dict__[attribute] = value
    for module in duplicate.modules():
        hooks = [value for value in vars(module).values() if isinstance(value, OrderedDict)]
        for table in (vars(module), *hooks):
            for name in [n for n, x in table.items() if isinstance(x, types.FunctionType)]:
                table[name] = _closed_over(table[name], memo)
    for name, module in root.named_modules():
        if getattr(module._parameters.get("weight"), "quant_state", None) is not None:
            packed: Any = duplicate.get_submodule(name)
            packed.forward = functools.partial(_of_shape, packed)
    return duplicate


def _of_shape(packed: Any, x: Tensor) -> Tensor:
    """Computes as a linear layer whose weight is packed with others into bytes (bitsandbytes), on fake tensors."""
    weight = x.new_empty(packed.out_features, packed.in_features)
    return F.linear(x, weight, None if packed.bias is None else packed.bias.to(x.dtype))


def _closed_over(value: Any, memo: dict[int, Any]) -> Any:
    """Returns what a closure, a hook perhaps, shall know in a copy: the copies of `self` and of what is there."""
    if isinstance(value, types.MethodType) and id(value.__self__) in memo:
        return types.MethodType(value.__func__, memo[id(value.__self__)])
    if id(value) in memo or not isinstance(value, types.FunctionType):
        return memo.get(id(value), value)
    memo[id(value)] = value  # it may know itself
    cells = list(value.__closure__ or ())
    for index, cell in enumerate(cells):
        with contextlib.suppress(ValueError):  # of one that is empty
            content = _closed_over(cell.cell_contents, memo)
            cells[index] = cell if content is cell.cell_contents else types.CellType(content)
    if all(map(operator.is_, cells, value.__closure__ or ())):
        return value
    parts = value.__code__, value.__globals__, value.__name__, value.__defaults__, tuple(cells)
    memo[id(value)] = copied = types.FunctionType(*parts)
    copied.__kwdefaults__ = value.__kwdefaults__
    vars(copied).update(vars(value))
    return copied


def fake_batch(batch: Any, mode: TrackedFakeMode) -> Any:
    """Returns the batch with fake tensors of the same strides."""
    return pytree.tree_map_only(Tensor, mode.like, batch)


def shapes_without_values(root: nn.Module, arguments: Mapping[str, Any]) -> list[torch.Size]:
    """Returns shapes of the tensors that a call of a module returns, or raises what it does, on fake tensors."""

    def run(model: nn.Module, mode: TrackedFakeMode) -> list[torch.Size]:
        out = model(**fake_batch(dict(arguments), mode))
        return [x.shape for x in pytree.tree_leaves(out) if isinstance(x, Tensor)]

    return without_values(root, run)


def without_values(root: nn.Module, run: Callable[[nn.Module, TrackedFakeMode], Result]) -> Result:
    """Returns what a function finds out from a fake copy of a module, in whose mode it runs: no fake tensors."""
    mode = TrackedFakeMode()

    def inside() -> Result:  # the copy dies with it
        model = fake_copy(root, mode)
        with mode, torch.no_grad():
            return run(model, mode)

    with without_garbage_collection(), fakes_failing_quietly():
        try:
            return inside()
        except Exception as error:
            clear_variables(error)  # among them are fake tensors
            raise
        finally:
            forget_fakes(mode)


class TrackedFakeMode(FakeTensorMode):
    """A fake mode that knows which of its tensors are still alive."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._made: list[StorageWeakRef] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> TrackedFakeMode:
        return self  # of a tensor that a step copies; weak references would be freed twice

    def empty(
        self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> FakeTensor:
        """Returns a fake tensor."""
        meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        fake = FakeTensor(self, meta, device)
        self._made.append(StorageWeakRef(fake.untyped_storage()))
        return fake

    def like(self, tensor: Tensor) -> FakeTensor:
        """Returns a fake tensor of the same shape, strides, type and device; of a parameter, a parameter."""
        fake = self.empty(tensor.shape, true_stride(tensor), tensor.dtype, tensor.device)
        if isinstance(tensor, nn.Parameter):
            fake._is_param = True  # nn.Parameter would detach it, which takes ten times as long
            fake.requires_grad_(tensor.requires_grad)
        return fake

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE_OF:
            return args[0].device
        if (value := _sampled(func, args, kwargs or {})) is not None:
            return value
        if func is _UNSAFE_VIEW:  # a view that autograd takes for none, and caches for unfit
            func = torch.ops.aten.view.default
        if _is_view(func) and type(args[0]) is FakeTensor and args[0].constant is None:
            out = self._view(func, args, kwargs or {})
        else:
            out = self.dispatch(func, types, args, kwargs or {})
        for leaf in out if isinstance(out, list | tuple) else (out,):
            if isinstance(leaf, FakeTensor):
                self._made.append(StorageWeakRef(leaf.untyped_storage()))
        return out

    def _view(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Returns a view by the code that all devices share; to store the answer would take ten times as long."""
        with in_kernel_invocation_manager(self):
            out = func(*args, **kwargs)
        wrap = lambda leaf: FakeTensor(self, leaf, args[0].fake_device)
        return list(map(wrap, out)) if isinstance(out, list | tuple) else wrap(out)

    def anything_alive(self) -> bool:
        """Returns whether a tensor made under this mode survived the step."""
        self._made = [reference for reference in self._made if not reference.expired()]
        return bool(self._made)


@functools.cache
def _is_view(func: Any) -> bool:
    """Returns whether an operator gives a view in any case; `aten.to` and its like copy in some."""
    return bool(func.is_view and not func._can_decompose())


def _sampled(func: Any, args: Sequence[Any], kwargs: Any) -> Tensor | None:
    """Samples a single random number, of which steps make coins: `torch.rand(()) < p`.

    Returns:
        A number from the generator of the host, on the device that was asked for, as a constant that fake tensors
        know the value of; None if the operator does something else.
    """
    if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
        return None
    sizes = [a for a in args if isinstance(a, list | tuple)]
    if any(isinstance(a, Tensor) for a in args) or sizes not in ([()], [[]], [(1,)], [[1]]):
        return None
    with _disable_current_modes():
        value = func(*args, **{**kwargs, "device": "cpu"})
    return torch.tensor(value.tolist(), dtype=value.dtype, device=kwargs.get("device"))


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Switches automatic collections off: what is made inside stays in the youngest generation.

    A copy of a module is full of cycles. Searched with everything else that the process has imported, they take a
    third of a second each time; alone a few milliseconds.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def fakes_failing_quietly() -> Iterator[None]:
    """Keeps torch from printing a traceback for each operator that fails on fake tensors."""
    reports = logging.getLogger("torch._subclasses.fake_tensor")
    level = reports.level
    reports.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        reports.setLevel(level)


def forget_fakes(mode: TrackedFakeMode) -> None:
    """Removes fake tensors that the step left in caches outside the copy (class attributes, lru_cache).

    Otherwise the first real step would find them there. Attributes become None and cached entries are dropped, as
    if the step had never run. The module must be out of use: searching all objects of the process takes a third
    of a second, and is only done if a tensor survived among them.
    """
    for generation in (
        0,
        2,
    ):  # Usually all that is left is as young as `without_garbage_collection` makes it.
        if not mode.anything_alive():
            return
        gc.collect(generation)
    if not mode.anything_alive():
        return
    survivors = [o for o in gc.get_objects() if type(o) is FakeTensor and o.fake_mode is mode]
    ids = {id(tensor) for tensor in survivors}
    kinds = (dict, list, tuple, functools._lru_cache_wrapper)
    # Types are compared, as `isinstance` asks objects for their class. `gc.get_referrers` would compare every
    # reference of the process with each survivor in turn: half a minute where something keeps thousands alive.
    holders = [
        holder
        for holder in (gc.get_objects() if survivors else ())
        if issubclass(type(holder), kinds) and not ids.isdisjoint(map(id, gc.get_referents(holder)))
    ]
    for holder in holders:
        if holder is not survivors:
            _drop(holder, ids)
    _log.debug("dropped %d fake tensors from caches outside the module", len(survivors))


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
