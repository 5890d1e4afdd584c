"""What patches can share or leave out: modules that make the same for all, and results that are only passed on.

Glue, the code between blocks, sees full shapes (`pipefusion/patch.py`), but most of it never looks into what a
block returns: it passes it to the next one. One run with stubbed blocks follows every result as an object:

    block 0 ── x ── block 1 ── y ── norm_out ── proj_out ── unpatchify

x is *passed*: nothing but blocks gets it. It needs no memory; the next block is given the tokens of the part. y is
read by a module that is no block, and has its full size.

Modules whose result is the same for every patch of a step, or in every step of a request, run once: the embedding
of the timestep and what blocks make of it for modulation; keys and values of cross-attention, the projected prompt
and tables of rope. Four runs tell which. Attention lets one NaN in a key reach every output, and

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
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_diffpipe.graph.calltree import Forward, callable_modules, forward_replaced
from lightning_diffpipe.sampling.tracing.layout import (
    BETWEEN,
    Block,
    CallPlace,
    shapes_of_call,
)
from lightning_diffpipe.sampling.tracing.marks import (
    BlockKinds,
    CallAnswer,
    RepeatedCalls,
    WithoutProducts,
    all_to_all,
    has_nan,
)

_LOOKS_AT_NO_NUMBER = {
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "requires_grad")
    ),
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__,
    torch.is_tensor, torch.is_floating_point,
}  # fmt: skip

RunDenoise = Callable[..., Tensor]
"""`run(latents, t, wrap, attention)`, where `wrap(name, forward, args, kwargs)` answers calls of blocks."""


def find_passed(
    run: Callable[[CallAnswer], Tensor], blocks: list[Block], device: torch.device
) -> frozenset[tuple[int, int]]:
    """Returns the results of blocks, as (call, leaf), that code between blocks only passes on to blocks.

    Args:
        run: Runs `denoise`; the function it is given answers the calls of blocks.
        blocks: Calls of blocks.
        device: Device of the results of stubbed blocks.
    """
    follower = _Follower(blocks, device)
    with follower:
        prediction = run(follower.answer)
    follower.note_read(prediction)
    results = {(here, leaf) for here, block in enumerate(blocks) for leaf in block.outputs}
    return frozenset(results - follower.read)


class _Follower(TorchFunctionMode):
    """Stubs blocks, and follows their results as objects: one is read if a function of torch is given it.

    Functions that ask for a shape or the like read no value.
    """

    def __init__(self, blocks: list[Block], device: torch.device) -> None:
        super().__init__()
        self.read: set[tuple[int, int]] = set()
        self._blocks, self._device, self._num_calls = blocks, device, 0
        # By identity; results are held, so that identities stay what they are.
        self._results: dict[int, tuple[Tensor, tuple[int, int]]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _LOOKS_AT_NO_NUMBER:
            self.note_read((args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def note_read(self, tree: Any) -> None:
        """Notes that the values of everything in a tree are read."""
        leaves = pytree.tree_leaves(tree)
        self.read |= {self._results[id(x)][1] for x in leaves if id(x) in self._results}

    def answer(self, name: str, forward: Forward, args: Any, kwargs: Any) -> Any:
        """Answers a call of a block with results without memory."""
        here, self._num_calls = self._num_calls, self._num_calls + 1
        block = self._blocks[here]
        leaves = block.dummy(0.0, self._device)
        self._results |= {id(leaves[leaf]): (leaves[leaf], (here, leaf)) for leaf in block.outputs}
        return block.nested(leaves)


StoredShapes = dict[CallPlace, tuple[Any, ...] | None]
"""Shapes of the arguments in a run on all tokens, by place."""


def find_invariants(
    run: RunDenoise,
    model: nn.Module,
    kinds: BlockKinds,
    blocks: list[str],
    latents: Tensor,
    t: Tensor,
    other_t: Tensor,
) -> tuple[StoredShapes, StoredShapes]:
    """Finds the places whose results are the same in every step, and those that are so within one.

    None where calls of blocks that are equal in one run are not in another: their results stand for each other.
    """
    within = tuple(f"{name}." for name in blocks)
    # Modules between blocks, and those with parameters inside of one: none contains a block, or is one.
    names = {
        name
        for name in callable_modules(model)
        if name not in blocks and not any(block.startswith(f"{name}.") for block in blocks)
        if not name.startswith(within) or any(True for _ in model.get_submodule(name).parameters())
    }
    unknown = torch.full_like(latents, math.nan)

    def record(x: Tensor, at: Tensor, earlier: _Calls | None = None) -> _CallRecorder:
        recorder = _CallRecorder(earlier, RepeatedCalls(kinds, by_value=True))
        # What is not known stays so; equal numbers are looked for in the rest.
        with WithoutProducts(exactly=True), forward_replaced(model, names, recorder.make):
            run(x, at, recorder.wrap_block, all_to_all)
        return recorder

    # The four runs of the table above.
    first_run = record(unknown, t)
    calls = first_run.calls
    on_latents, later = record(latents, t, calls), record(unknown, other_t, calls)
    other_runs = [on_latents, later]
    in_step, in_request = _same(calls, on_latents.calls), set[CallPlace]()
    if not torch.equal(t, other_t):
        dtype = t.dtype if t.is_floating_point() else torch.get_default_dtype()
        with contextlib.suppress(Exception):  # not every model can take NaN
            nan_time = record(unknown, torch.full_like(t, math.nan, dtype=dtype), calls)
            other_runs.append(nan_time)
            if nan_time.calls.keys() == calls.keys():
                without_nan = {place for place, call in nan_time.calls.items() if call.copies}
                in_request = in_step & _same(calls, later.calls) & without_nan
    if any(other.sources != first_run.sources for other in other_runs):
        return {}, {}
    constants, step_constants = _outermost(calls, in_step, in_request)
    for stored in (constants, step_constants):
        stored |= _in_repeated_blocks(stored, first_run.called, first_run.sources)
    return constants, step_constants


def _outermost(
    calls: _Calls, in_step: Collection[CallPlace], in_request: Collection[CallPlace]
) -> tuple[StoredShapes, StoredShapes]:
    """Returns the constant calls that are inside no other, those of a request and those of a step.

    Calls are numbered as they are at sampling, where modules inside a stored one are not called.
    """
    constants, step_constants = StoredShapes(), StoredShapes()
    turns = Counter[tuple[int, str]]()
    for place, call in calls.items():
        if any(outer in in_step for outer in call.around):
            continue
        where, name, _ = place
        if place in in_step:
            stored = constants if place in in_request else step_constants
            stored[where, name, turns[where, name]] = call.shapes
        turns[where, name] += 1
    return constants, step_constants


def _in_repeated_blocks(
    stored: StoredShapes, called: Sequence[str], sources: Sequence[int]
) -> StoredShapes:
    """Returns the places in calls of blocks that did not run, for those in the calls that ran in their place.

    By call, `called` has the name of the block, and `sources` the call that ran.
    """
    repeated = StoredShapes()
    for here, source in enumerate(sources):
        for (where, name, turn), shapes in stored.items():
            if where == source:
                if name.startswith(f"{called[source]}."):  # else blocks share it
                    name = called[here] + name.removeprefix(called[source])
                repeated[here, name, turn] = shapes
    return repeated


@dataclass
class _Call:
    """One call of a module: the calls around it, the shapes of its arguments, and its results."""

    around: tuple[CallPlace, ...]
    shapes: Any
    results: list[Tensor] = field(default_factory=list)
    copies: list[Tensor] = field(default_factory=list)

    def equals(self, other: _Call) -> bool:
        """Returns whether both calls had equal results, which have not been written to since."""
        shape = (self.around, self.shapes, len(self.copies))
        if shape != (other.around, other.shapes, len(other.copies)):
            return False
        every = (self.results, other.results, other.copies)
        pairs = [(a, b) for others in every for a, b in zip(self.copies, others, strict=True)]
        return all((a.shape, a.dtype) == (b.shape, b.dtype) and torch.equal(a, b) for a, b in pairs)


_Calls = dict[CallPlace, _Call]


def _same(first: _Calls, second: _Calls) -> set[CallPlace]:
    """Finds calls with the same tensors as results in two runs."""
    if first.keys() != second.keys():
        return set()
    return {
        place
        for place, call in first.items()
        if call.copies and call.shapes is not None and call.equals(second[place])
    }


class _CallRecorder:
    """Records the calls of modules in one run, in order.

    Args:
        earlier: Calls of an earlier run. Only what came out without NaN there is stored: of latents that are no NaN
            it would be every activation of the model, twice. None stores all.
        repeats: Answers repeated calls of blocks.

    Attributes:
        called: Names of blocks, in the order of their calls.
        sources: For each call of a block the number of the one that ran in its place.
    """

    def __init__(self, earlier: _Calls | None, repeats: RepeatedCalls) -> None:
        self.calls: _Calls = {}
        self.called, self.sources = list[str](), repeats.sources
        self._earlier, self._repeats = earlier, repeats
        self._where = BETWEEN  # the call of a block that runs
        self._open: tuple[CallPlace, ...] = ()  # calls that have not returned
        self._turns: Counter[tuple[int, str]] = Counter()

    def wrap_block(self, name: str, forward: Forward, args: Any, kwargs: Any) -> Any:
        """Runs a call of a block, or answers it as an equal one."""
        self._where = len(self.called)
        self.called.append(name)
        try:
            return self._repeats.answer(name, args, kwargs, lambda: forward(*args, **kwargs))
        finally:
            self._where = BETWEEN

    def make(self, name: str, forward: Forward) -> Forward:
        """Returns what stands for the forward of a module."""

        def recorded(*args: Any, **kwargs: Any) -> Any:
            where, around = self._where, self._open
            place = (where, name, self._turns[where, name])
            self._turns[where, name] += 1
            # Between blocks everything has its full shape.
            shapes = () if where == BETWEEN else shapes_of_call(args, kwargs)
            call = self.calls[place] = _Call(around, shapes)
            self._open = (*around, place)
            try:
                out = forward(*args, **kwargs)
            finally:
                self._open = around
            leaves, earlier = pytree.tree_leaves(out), self._earlier
            may_be_constant = earlier is None or (place in earlier and bool(earlier[place].copies))
            if may_be_constant and all(isinstance(x, Tensor) and not has_nan(x) for x in leaves):
                call.results, call.copies = leaves, [x.clone() for x in leaves]
            return out

        return recorded
