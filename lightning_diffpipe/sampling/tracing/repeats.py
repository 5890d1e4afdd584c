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

import hashlib
import itertools
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from lightning_diffpipe.graph.repeats import UnlikeError, described
from lightning_diffpipe.graph.versions import OF_EVERY_MODULE, bytes_of, plain_tensors

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_DESCRIBED_OTHERWISE = {*OF_EVERY_MODULE, "forward", "_compiled_call_impl"}

T = TypeVar("T")
Marks = list[tuple[Tensor, Tensor | None]]
"""Of each tensor that a call is given, where it is NaN, or else its numbers; and itself if it is to be the same."""


class BlockKinds:
    """Describes calls of a model's blocks, so that equal descriptions mean calls of one kind."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules: dict[str, Hashable] = {}
        self._numbers = itertools.count()
        # Those of instances, before anything is wrapped around them.
        self._forwards = {m: own for m in model.modules() if (own := _own_forward(m)) is not None}

    def of(self, name: str, args: Any, kwargs: Any) -> Hashable:
        """Returns the kind of a call, by its block's code and shapes; a new kind if these cannot be described."""
        flat, spec = pytree.tree_flatten((args, kwargs))
        try:
            if name not in self._modules:
                self._modules[name] = self._described(name)
            leaves = [
                (tuple(x.shape), x.dtype) if isinstance(x, Tensor) else described(x) for x in flat
            ]
        except UnlikeError:
            return next(self._numbers)
        return self._modules[name], str(spec), tuple(leaves)

    def _described(self, block: str) -> Hashable:
        """Describes a block by its modules, their tensors, settings and hooks, or raises UnlikeError."""
        parts = []
        for name, module in self._model.get_submodule(block).named_modules(prefix=block):
            attributes = vars(module)
            settings = [(k, x) for k, x in attributes.items() if k not in _DESCRIBED_OTHERWISE]
            settings += [(k, hook) for k in _HOOKS for hook in attributes[k].values()]
            settings.append(("forward", self._forwards.get(module)))
            tensors = (*module._parameters.items(), *module._buffers.items())
            of_tensors = [(k, x if x is None else _of_tensor(x)) for k, x in tensors]
            of_settings = [(k, described(x, name)) for k, x in settings]
            inner = name.removeprefix(block)
            parts.append((inner, type(module), tuple(of_tensors), tuple(of_settings)))
        return tuple(parts)


def _own_forward(module: nn.Module) -> Any:
    """Returns the `forward` of an instance, below our own wrappers; None if it has that of its class."""
    forward = vars(module).get("forward")
    forward = getattr(forward, "diffpipe_original", forward)
    return None if getattr(forward, "__func__", None) is type(module).forward else forward


def _of_tensor(x: Tensor) -> Hashable:
    """Describes a tensor of a block: whole numbers, such as indices, decide where values go, and others do not."""
    kind = type(x), x.dtype, tuple(x.shape)
    if x.is_floating_point() or x.is_complex() or isinstance(x, nn.Parameter) or x.is_meta:
        return kind
    return kind, *(hashlib.sha256(bytes_of(each)).hexdigest() for each in plain_tensors(x))


class RepeatedCalls:
    """Answers repeated calls of the blocks in one run.

    Args:
        kinds: Of the model.
        by_value: Numbers matter, too: what is no result of a block must be the same tensor.
    """

    def __init__(self, kinds: BlockKinds, by_value: bool = False) -> None:
        self._kinds, self._by_value = kinds, by_value
        self._known: dict[Hashable, list[tuple[Marks, int, Any]]] = {}
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
