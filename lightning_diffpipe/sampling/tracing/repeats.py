"""Calls of equal blocks on equal marks are looked at once.

Problem: a look at a model follows marks through its blocks some tens of times, and Flux has 57, of two kinds. Idea:
where NaN goes is decided by how a block computes and by where NaN is in what it is given, not by its weights. So of
the calls of one run those are answered like an earlier one that are of a block of the same kind (structure and
settings) on arguments of the same shapes with NaN at the same places.

    block      0       1       2       3        all of one kind
    marks      a       b       b       b        of their arguments
    runs       yes     yes     as 1    as 1
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from lightning_diffpipe.graph.layer import CONSTANT_TYPES
from lightning_diffpipe.graph.versions import (
    OF_EVERY_MODULE,
    bytes_of,
    plain_tensors,
    settings_digest,
)

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_DESCRIBED_OTHERWISE = {*OF_EVERY_MODULE, "forward", "_compiled_call_impl"}
_OURS = __name__.partition(".")[0]  # such as a step cache, one object for all blocks
_MOST_OBJECTS = 1000  # of a block that are looked into

T = TypeVar("T")
Marks = list[tuple[Tensor, Tensor | None]]
"""Of each tensor that a call is given, where it is NaN, or else its numbers; and itself if it is to be the same."""


class BlockKinds:
    """Describes calls of a model's blocks, so that equal descriptions mean calls of one kind."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules: dict[str, str] = {}
        self._numbers = itertools.count()
        # Those of instances, before anything is wrapped around them.
        self._forwards = {m: own for m in model.modules() if (own := _own_forward(m)) is not None}

    def of(self, name: str, args: Any, kwargs: Any) -> str:
        """Returns the kind of a call: how its block computes, and on what shapes."""
        if name not in self._modules:
            described = self._described(self._model.get_submodule(name))
            self._modules[name] = described.replace(f"{name}.", "")  # some objects know their place
        flat, spec = pytree.tree_flatten((args, kwargs))
        leaves = [(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x for x in flat]
        # Neither its class nor what it prints says what is in an object.
        alone = "" if all(map(_is_plain, flat)) else next(self._numbers)
        return f"{self._modules[name]} {spec} {leaves} {alone}"

    def _described(self, block: nn.Module) -> str:
        described: list[Any] = [(key, _of_tensor(x)) for key, x in block.named_parameters()]
        described += [(key, _of_tensor(x)) for key, x in block.named_buffers()]
        seen: dict[int, str] = {}
        for module in block.modules():
            own = [(k, x) for k, x in vars(module).items() if k not in _DESCRIBED_OTHERWISE]
            own += [(k, hook) for k in _HOOKS for hook in vars(module)[k].values()]
            own.append(("forward", self._forwards.get(module)))
            described.append([(key, _of_object(x, seen)) for key, x in own])
        return f"{settings_digest(block)} {described}"


def _own_forward(module: nn.Module) -> Any:
    """Returns what an instance has in place of its class's `forward`, below our own wrappers; None for nothing."""
    own = vars(module).get("forward")
    own = getattr(own, "diffpipe_original", own)
    return None if getattr(own, "__func__", None) is type(module).forward else own


def _is_plain(x: Any) -> bool:
    if isinstance(x, tuple):  # such as a shape
        return all(map(_is_plain, x))
    return isinstance(x, (Tensor, *CONSTANT_TYPES))


def _of_tensor(x: Tensor) -> Any:
    """Describes a tensor of a block: whole numbers, such as indices, decide where values go, and others do not."""
    kind = id(type(x)), x.dtype, tuple(x.shape)
    if x.is_floating_point() or x.is_complex() or isinstance(x, nn.Parameter) or x.is_meta:
        return kind
    return kind, [hashlib.sha256(bytes_of(each)).hexdigest() for each in plain_tensors(x)]


def _of_object(x: Any, seen: dict[int, str]) -> Any:
    """Describes an attribute: an object by its attributes, a function by its code, others by their identity."""
    if isinstance(x, CONSTANT_TYPES):
        return repr(x)
    if isinstance(x, nn.Module):
        return id(type(x))
    if isinstance(x, Tensor):
        return _of_tensor(x)
    if id(x) in seen or len(seen) > _MOST_OBJECTS:
        return seen.get(id(x), id(x))
    seen[id(x)] = f"object {len(seen)}"
    if isinstance(x, Mapping):
        parts = [part for item in x.items() for part in item]
    elif isinstance(x, list | tuple):
        parts = list(x)
    elif isinstance(x, functools.partial):
        parts = [x.func, x.args, x.keywords]
    elif isinstance(x, types.MethodType):
        parts = [x.__func__, x.__self__]
    elif isinstance(x, types.FunctionType):
        cells = [c.cell_contents for c in x.__closure__ or () if c != types.CellType()]
        return id(x.__code__), [
            _of_object(p, seen) for p in (x.__defaults__, x.__kwdefaults__, *cells)
        ]
    elif isinstance(x, type) or not hasattr(x, "__dict__") or type(x).__module__.startswith(_OURS):
        return id(x)
    else:
        parts = [part for item in vars(x).items() for part in item]
    return id(type(x)), [_of_object(part, seen) for part in parts]


class RepeatedCalls:
    """Answers repeated calls of the blocks in one run.

    Args:
        kinds: Of the model.
        by_value: Numbers matter, too: what is no result of a block must be the same tensor.
    """

    def __init__(self, kinds: BlockKinds, by_value: bool = False) -> None:
        self._kinds, self._by_value = kinds, by_value
        self._known: dict[str, list[tuple[Marks, int, Any]]] = {}
        self._results: dict[int, weakref.ref[Tensor]] = {}  # of blocks
        self.sources: list[int] = []
        """For each call the number of the one that ran in its place."""

    def answer(self, name: str, args: Any, kwargs: Any, run: Callable[[], T]) -> T:
        """Runs a call of a block; returns the result, or a copy of that of an equal call before it."""
        kind, flat = self._kinds.of(name, args, kwargs), pytree.tree_leaves((args, kwargs))
        marks, here = self._marks(flat), len(self.sources)
        for before, source, answer in self._known.get(kind, ()):
            if _equal(marks, before):
                self.sources.append(source)
                return self._noted(_copied(answer))
        self.sources.append(here)
        answer = run()
        if _equal(marks, self._marks(flat)):  # else it has written into what it was given
            self._known.setdefault(kind, []).append((marks, here, _copied(answer)))
        return self._noted(answer)

    def _noted(self, answer: T) -> T:
        for x in pytree.tree_leaves(answer) if self._by_value else ():
            if isinstance(x, Tensor):
                self._results[id(x)] = weakref.ref(x)
        return answer

    def _marks(self, flat: Sequence[Any]) -> Marks:
        marks: Marks = []
        for x in flat:
            if isinstance(x, Tensor):
                by_value = self._by_value and self._results.get(id(x), lambda: None)() is not x
                is_number = x.is_floating_point() or x.is_complex()
                marks.append((x.isnan() if is_number else x.clone(), x if by_value else None))
        return marks


def _copied(answer: T) -> T:
    """Copies the tensors of an answer, into which others may write."""
    copied: T = pytree.tree_map_only(Tensor, torch.clone, answer)
    return copied


def _equal(marks: Marks, others: Marks) -> bool:
    pairs = zip(marks, others, strict=True)
    return all(torch.equal(a, b) and x is y for (a, x), (b, y) in pairs)
