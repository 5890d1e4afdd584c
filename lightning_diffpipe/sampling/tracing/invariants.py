"""Which modules give the same result for every patch of a step, or in every step of a request.

Their results are stored: the embedding of the timestep and what blocks make of it for modulation are computed once
per step instead of once per patch; keys and values of cross-attention, the projected prompt and tables of rope once
per request. Four runs tell which. Attention lets one NaN in a key reach every output, and

    latents        NaN    as they are    NaN    NaN
    timestep       t      t              t'     NaN
    result         ------ equal ------                      the same for every patch of a step
                   ---------- equal ----------  no NaN      the same in every step

A result without NaN that is the same without NaN in the latents does not depend on them, not even by a comparison.
Nor does one on the timestep that is the same at another one and no NaN at NaN; equal numbers alone would not do, as
weights may be a placeholder, one number for all, and what two timesteps make of it differ by less than rounding.
Of modules inside each other the outermost one is stored. What is changed in place later on is not stored.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_diffpipe.graph.calltree import Forward, callable_modules, forward_replaced
from lightning_diffpipe.sampling.tracing.layout import BETWEEN, Place, shapes_of_call
from lightning_diffpipe.sampling.tracing.marks import WithoutProducts, all_to_all

Run = Callable[..., Tensor]
"""`run(latents, t, wrap, attention)`, where `wrap(name, forward, args, kwargs)` answers calls of blocks."""

Constants = dict[Place, tuple[Any, ...] | None]
"""Shapes of the arguments in a run on all tokens, by place."""

_CASTS = {"long", "int", "short", "char", "byte", "to", "type", "type_as", "copy_"}
_SEARCHES = {"bucketize", "searchsorted"}


def find_invariants(
    run: Run, model: nn.Module, blocks: list[str], latents: Tensor, t: Tensor, other_t: Tensor
) -> tuple[Constants, Constants]:
    """Finds the places whose results are the same in every step, and those that are so within one."""
    names = _candidates(model, blocks)
    unknown = torch.full_like(latents, float("nan"))

    def record(x: Tensor, at: Tensor, among: list[_Call] | None = None) -> list[_Call]:
        recorder = _CallRecorder(among)
        # What is not known stays so; equal numbers are looked for in the rest.
        with WithoutProducts(exactly=True), forward_replaced(model, names, recorder.make):
            run(x, at, recorder.wrap_block, all_to_all)
        return recorder.calls

    here = record(unknown, t)
    known, later = record(latents, t, here), record(unknown, other_t, here)
    in_step = _independent(here, known)
    in_request = set[int]()
    if not torch.equal(t, other_t):
        in_request = in_step & _independent(here, later)
        in_request &= _without_time(lambda at: record(unknown, at, here), t, here)
    in_request, in_step = _outermost(here, in_request), _outermost(here, in_step)
    places = _places(here, in_request, in_step)
    return (
        {place: here[i].shapes for i, place in places.items() if i in in_request},
        {place: here[i].shapes for i, place in places.items() if i not in in_request},
    )


def _without_time(
    record: Callable[[Tensor], list[_Call]], t: Tensor, here: list[_Call]
) -> set[int]:
    """Which of the calls `here` NaN for a timestep does not reach; none of a model that cannot take it."""
    dtype = t.dtype if t.is_floating_point() else torch.get_default_dtype()
    with contextlib.suppress(Exception), _NoIndexOfNaN():
        calls = record(torch.full_like(t, float("nan"), dtype=dtype))
        if len(calls) == len(here):
            pairs = enumerate(zip(here, calls, strict=True))
            return {i for i, (at_t, call) in pairs if call.copies and call.is_at(at_t)}
    return set()


class _NoIndexOfNaN(TorchFunctionMode):
    """Refuses whole numbers made of NaN, which stand nowhere in a table: a lookup would end the CUDA context."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Calls, and looks at what is whole."""
        out = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in _CASTS | _SEARCHES and _is_whole(out):
            given = (*args, *(kwargs or {}).values())
            if any(isinstance(x, Tensor) and x.is_floating_point() and _has_nan(x) for x in given):
                raise ValueError("an index would be made of a timestep that is not known")
        return out


def _is_whole(x: Any) -> bool:
    return isinstance(x, Tensor) and not (
        x.is_floating_point() or x.is_complex() or x.dtype == torch.bool
    )


@dataclass
class _Call:
    """One call of a module: where, inside which other call, on what, and what came out."""

    where: int
    name: str
    parent: int | None
    shapes: Any
    results: list[Tensor] = field(default_factory=list)
    copies: list[Tensor] = field(default_factory=list)

    def is_at(self, other: _Call) -> bool:
        """Whether the same module was called at the same place."""
        return (self.where, self.name, self.parent) == (other.where, other.name, other.parent)

    def equals(self, other: _Call) -> bool:
        """Whether the same came out, and stayed as it was."""
        own = (self.shapes, len(self.copies))
        if not self.is_at(other) or own != (other.shapes, len(other.copies)):
            return False
        every = (self.results, other.results, other.copies)
        pairs = [(a, b) for some in every for a, b in zip(self.copies, some, strict=True)]
        return all((a.shape, a.dtype) == (b.shape, b.dtype) and torch.equal(a, b) for a, b in pairs)


class _CallRecorder:
    """Notes the calls of one run, in order.

    Args:
        among: Calls of an earlier run. Only what came out without NaN there is stored: of latents that are no NaN
            it would be every activation of the model, twice. None keeps all.
    """

    def __init__(self, among: list[_Call] | None) -> None:
        self.calls: list[_Call] = []
        self._among = among
        self._block = BETWEEN
        self._inside, self._open = False, list[int]()

    def wrap_block(self, name: str, forward: Forward, args: Any, kwargs: Any) -> Any:
        """Answers the call of a block."""
        self._block, self._inside = self._block + 1, True
        try:
            return forward(*args, **kwargs)
        finally:
            self._inside = False

    def make(self, name: str, forward: Forward) -> Forward:
        """Makes the wrapper of a module."""

        def recorded(*args: Any, **kwargs: Any) -> Any:
            where = self._block if self._inside else BETWEEN
            parent = self._open[-1] if self._open else None
            # Between blocks everything has its full shape.
            shapes = shapes_of_call(args, kwargs) if self._inside else ()
            call = _Call(where, name, parent, shapes)
            index = len(self.calls)
            self._open.append(index)
            self.calls.append(call)
            try:
                out = forward(*args, **kwargs)
            finally:
                self._open.pop()
            leaves = pytree.tree_leaves(out)
            among = self._among
            wanted = among is None or (index < len(among) and bool(among[index].copies))
            if wanted and all(isinstance(x, Tensor) and not _has_nan(x) for x in leaves):
                call.results, call.copies = leaves, [x.clone() for x in leaves]
            return out

        return recorded


def _candidates(model: nn.Module, blocks: list[str]) -> set[str]:
    """Modules to look at: between blocks all that contain no block, inside blocks those with weights."""
    owning = {n for n, m in model.named_modules() if any(True for _ in m.parameters())}
    inside, found = tuple(f"{name}." for name in blocks), set[str]()
    for name in callable_modules(model):
        contains = name in blocks or any(block.startswith(f"{name}.") for block in blocks)
        if not contains and (name in owning or not name.startswith(inside)):
            found.add(name)
    return found


def _independent(first: list[_Call], second: list[_Call]) -> set[int]:
    """Calls with the same tensors as results in two runs."""
    if len(first) != len(second):
        return set()
    return {
        i
        for i, (a, b) in enumerate(zip(first, second, strict=True))
        if a.copies and a.shapes is not None and a.equals(b)
    }


def _outermost(calls: list[_Call], chosen: set[int]) -> set[int]:
    """Those of the chosen that lie in no other."""
    return {i for i in chosen if not any(p in chosen for p in _around(calls, i))}


def _around(calls: list[_Call], i: int) -> list[int]:
    around: list[int] = []
    while (parent := calls[i].parent) is not None:
        around.append(i := parent)
    return around


def _places(calls: list[_Call], in_request: set[int], in_step: set[int]) -> dict[int, Place]:
    """Names for what is stored. Calls inside those are not counted, since they come but once."""
    chosen = in_request | in_step
    turns: Counter[tuple[int, str]] = Counter()
    places: dict[int, Place] = {}
    for i, call in enumerate(calls):
        if any(p in chosen for p in _around(calls, i)):
            continue
        if i in chosen:
            places[i] = (call.where, call.name, turns[call.where, call.name])
        turns[call.where, call.name] += 1
    return places


def _has_nan(x: Tensor) -> bool:
    return bool(x.isnan().any())
