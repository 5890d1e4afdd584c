"""Work that need not run for every patch: code between blocks that looks at nothing, and constant modules.

Glue, the code between blocks, sees full shapes (`pipefusion/patch.py`), but most of it never looks into what a
block returns: it hands it to the next. One run with stubbed blocks follows every result as an object through it:

    block 0 ── x ── block 1 ── y ── norm_out ── proj_out ── unpatchify

* x is *passed*: nothing but blocks gets it. It needs no memory; the next block takes the tokens of the part.
* norm_out and proj_out are *local*: of a part of the tokens they make that part of what they make of all, whatever
  their weights are. They run on the part, and y is passed, too.

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
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_diffpipe.comm.packing import TensorShape
from lightning_diffpipe.graph.calltree import Forward, callable_modules, forward_replaced
from lightning_diffpipe.sampling.tracing.layout import (
    BETWEEN,
    Block,
    Glue,
    LocalCall,
    Place,
    TokenAxis,
    shapes_of_call,
)
from lightning_diffpipe.sampling.tracing.marks import WithoutProducts, all_to_all, has_nan
from lightning_diffpipe.sampling.tracing.repeats import BlockKinds, RepeatedCalls

_LOOKS_AT_NO_NUMBER = {
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "requires_grad")
    ),
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__,
    torch.is_tensor, torch.is_floating_point,
}  # fmt: skip
_MIN_TOKENS = 3  # fewer may be broadcast
_NEARLY = 0.05  # of the largest number; where numbers are this coarse, a module that is not local differs by more


def find_glue(
    run: Callable[[Callable[..., Any]], Tensor],
    model: nn.Module,
    blocks: list[Block],
    constants: Collection[Place],
    device: torch.device,
    tried: Mapping[Place, LocalCall] | None = None,
) -> Glue:
    """Follows the results of blocks; `run` lets a function answer their calls, `tried` limits what may be local."""
    follower = _Follower(model, blocks, constants, device, tried)
    between, _ = _around_blocks(model, {block.name for block in blocks})
    with forward_replaced(model, between, follower.make), follower:
        follower.touch(run(follower.answer))
    return follower.found()


class _Followed(NamedTuple):
    """An object that is followed: where it comes from, and which of its axes runs over tokens."""

    value: Tensor
    key: Any
    tokens: TokenAxis


class _Follower(TorchFunctionMode):
    def __init__(
        self,
        model: nn.Module,
        blocks: list[Block],
        constants: Collection[Place],
        device: torch.device,
        tried: Mapping[Place, LocalCall] | None,
    ) -> None:
        super().__init__()
        self._model, self._blocks, self._constants, self._device = model, blocks, constants, device
        self._tried = tried
        self._known: dict[int, _Followed] = {}
        self._touched: set[Any] = set()
        self._local: dict[Place, LocalCall] = {}
        self._turns: Counter[str] = Counter()
        self._position, self._inside, self._storing = 0, 0, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _LOOKS_AT_NO_NUMBER:
            self.touch((args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def touch(self, tree: Any) -> None:
        """Notes that the values of everything in a tree are read."""
        for x in pytree.tree_leaves(tree):
            if id(x) in self._known:
                self._touched.add(self._known[id(x)].key)

    def answer(self, name: str, forward: Forward, args: Any, kwargs: Any) -> Any:
        here, self._position = self._position, self._position + 1
        block = self._blocks[here]
        leaves = block.dummy(0.0, self._device)
        for leaf, tokens in block.outputs.items():
            self._follow(leaves[leaf], (here, leaf), tokens)
        return block.nested(leaves)

    def make(self, name: str, forward: Forward) -> Forward:

        def followed(*args: Any, **kwargs: Any) -> Any:
            if self._storing:
                return forward(*args, **kwargs)
            place = (BETWEEN, name, self._turns[name])
            self._turns[name] += 1
            if place in self._constants:
                return self._within("_storing", forward, args, kwargs)
            if self._inside:
                return forward(*args, **kwargs)
            return self._outermost(place, forward, args, kwargs)

        return followed

    def found(self) -> Glue:
        block_results = {
            (here, leaf) for here, block in enumerate(self._blocks) for leaf in block.outputs
        }
        local = {
            place: call._replace(passed=place not in self._touched)
            for place, call in self._local.items()
        }
        return Glue(frozenset(block_results - self._touched), local)

    def _outermost(self, place: Place, forward: Forward, args: Any, kwargs: Any) -> Any:
        flat, spec = pytree.tree_flatten((args, kwargs))
        leaves = [i for i, x in enumerate(flat) if id(x) in self._known]
        source = self._known[id(flat[leaves[0]])] if len(leaves) == 1 else None
        axis = source and self._axis_of_tokens(place, flat, spec, leaves[0], source.tokens)
        if source is None or axis is None:
            return self._within("_inside", forward, args, kwargs)
        del self._known[id(source.value)]
        out = self._within("_inside", forward, args, kwargs)
        self._known[id(source.value)] = source
        tokens = TokenAxis(axis, source.tokens.owner, source.tokens.num_text)
        self._local[place] = LocalCall(leaves[0], source.tokens, tokens, TensorShape.of(out), False)
        self._follow(out, place, tokens)
        return out

    def _axis_of_tokens(
        self, place: Place, flat: list[Any], spec: Any, leaf: int, tokens: TokenAxis
    ) -> int | None:
        """Returns the axis of tokens in the result of a call that is local."""
        if self._tried is not None:
            call = self._tried.get(place)
            if call is None or call.leaf != leaf or call.given != tokens:
                return None
            return call.made.axis
        module = self._model.get_submodule(place[1])
        before = self._known, self._storing
        self._known, self._storing = {}, True  # what runs meanwhile is none of the request's
        try:
            return _axis_of_local(module, flat, spec, leaf, tokens.axis)
        finally:
            self._known, self._storing = before

    def _within(self, flag: str, forward: Forward, args: Any, kwargs: Any) -> Any:
        before = getattr(self, flag)
        setattr(self, flag, True)
        try:
            return forward(*args, **kwargs)
        finally:
            setattr(self, flag, before)

    def _follow(self, x: Tensor, key: Any, tokens: TokenAxis) -> None:
        self._known[id(x)] = _Followed(x, key, tokens)


def _axis_of_local(
    module: nn.Module, flat: list[Any], spec: Any, leaf: int, axis: int
) -> int | None:
    """Returns the axis of tokens of a module's result, if it is local by a trial with random weights."""
    tensor, size = flat[leaf], flat[leaf].shape[axis]
    draw = torch.Generator(tensor.device).manual_seed(0)

    def random(like: Tensor) -> Tensor:
        drawn = torch.randn(like.shape, generator=draw, device=like.device)
        return drawn.to(like.dtype)

    def run(tokens: Tensor) -> Tensor | None:
        cut = [tokens.contiguous() if i == leaf else x for i, x in enumerate(flat)]
        args, kwargs = pytree.tree_unflatten(cut, spec)
        try:
            out = torch.func.functional_call(module, weights, args, kwargs)
        except (RuntimeError, IndexError, ValueError):
            return None
        return out if isinstance(out, Tensor) and out.is_floating_point() else None

    if size < _MIN_TOKENS or not tensor.is_floating_point():
        return None
    weights = {n: random(p) for n, p in module.named_parameters() if p.is_floating_point()}
    x, cut = random(tensor), size // 3
    if (whole := run(x)) is None:
        return None
    axes = [a for a in range(whole.ndim) if whole.shape[a] == size]
    for start, length in ((0, cut), (cut, size - cut)):
        part = run(x.narrow(axis, start, length))
        axes = [a for a in axes if _close(part, whole.narrow(a, start, length))]
    return axes[0] if axes else None


def _close(part: Tensor | None, expected: Tensor) -> bool:
    if part is None or part.shape != expected.shape:
        return False
    scale = max(float(expected.abs().amax()), 1.0)
    difference = float((part - expected).abs().amax())
    return difference <= min(256 * torch.finfo(expected.dtype).eps, _NEARLY) * scale


Run = Callable[..., Tensor]
"""`run(latents, t, wrap, attention)`, where `wrap(name, forward, args, kwargs)` answers calls of blocks."""

StoredShapes = dict[Place, tuple[Any, ...] | None]
"""Shapes of the arguments in a run on all tokens, by place."""


def find_invariants(
    run: Run,
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
    between, inside = _around_blocks(model, blocks)
    names = between | {n for n in inside if any(True for _ in model.get_submodule(n).parameters())}
    unknown = torch.full_like(latents, float("nan"))

    def record(x: Tensor, at: Tensor, among: _Calls | None = None) -> _CallRecorder:
        recorder = _CallRecorder(among, RepeatedCalls(kinds, by_value=True))
        # What is not known stays so; equal numbers are looked for in the rest.
        with WithoutProducts(exactly=True), forward_replaced(model, names, recorder.make):
            run(x, at, recorder.wrap_block, all_to_all)
        return recorder

    first = record(unknown, t)
    here, sources, called = first.calls, first.sources, first.called
    on_latents, later = record(latents, t, here), record(unknown, other_t, here)
    in_step, in_request = _same(here, on_latents.calls), set[Place]()
    others = [on_latents, later]
    if not torch.equal(t, other_t):
        dtype = t.dtype if t.is_floating_point() else torch.get_default_dtype()
        with contextlib.suppress(Exception):  # not every model can take NaN
            timeless = record(unknown, torch.full_like(t, float("nan"), dtype=dtype), here)
            others.append(timeless)
            if timeless.calls.keys() == here.keys():
                unreached = {place for place, call in timeless.calls.items() if call.copies}
                in_request = in_step & _same(here, later.calls) & unreached
    if any(other.sources != sources for other in others):
        return StoredShapes(), StoredShapes()
    constants, step_constants, turns = StoredShapes(), StoredShapes(), Counter[tuple[int, str]]()
    for place, call in here.items():
        if any(outer in in_step for outer in call.around):
            continue  # not counted, either: it comes but once
        where, name, _ = place
        if place in in_step:
            stored = constants if place in in_request else step_constants
            stored[where, name, turns[where, name]] = call.shapes
        turns[where, name] += 1
    for stored in (constants, step_constants):
        of_call: dict[int, StoredShapes] = {}
        for place, shapes in stored.items():
            of_call.setdefault(place[0], {})[place] = shapes
        for here_index, source in enumerate(sources):
            for (_, name, turn), shapes in of_call.get(source, {}).items():
                if name.startswith(f"{called[source]}."):  # else blocks share it
                    name = called[here_index] + name.removeprefix(called[source])
                stored[here_index, name, turn] = shapes
    return constants, step_constants


@dataclass
class _Call:
    """One call of a module: the calls around it, the shapes of its arguments, and its results."""

    around: tuple[Place, ...]
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


_Calls = dict[Place, _Call]


def _same(first: _Calls, second: _Calls) -> set[Place]:
    """Finds calls with the same tensors as results in two runs."""
    if first.keys() != second.keys():
        return set()
    return {
        place
        for place, call in first.items()
        if call.copies and call.shapes is not None and call.equals(second[place])
    }


class _CallRecorder:
    """Notes the calls of one run, in order.

    Args:
        among: Calls of an earlier run. Only what came out without NaN there is stored: of latents that are no NaN
            it would be every activation of the model, twice. None keeps all.
        repeats: Answers repeated calls of blocks.

    Attributes:
        called: Names of blocks, in the order of their calls.
        sources: For each call of a block the number of the one that ran in its place.
    """

    def __init__(self, among: _Calls | None, repeats: RepeatedCalls) -> None:
        self.calls: _Calls = {}
        self.called, self.sources = list[str](), repeats.sources
        self._among, self._repeats = among, repeats
        self._block, self._inside = BETWEEN, False
        self._open: tuple[Place, ...] = ()
        self._turns: Counter[tuple[int, str]] = Counter()

    def wrap_block(self, name: str, forward: Forward, args: Any, kwargs: Any) -> Any:
        self._block, self._inside = self._block + 1, True
        self.called.append(name)
        try:
            return self._repeats.answer(name, args, kwargs, lambda: forward(*args, **kwargs))
        finally:
            self._inside = False

    def make(self, name: str, forward: Forward) -> Forward:

        def recorded(*args: Any, **kwargs: Any) -> Any:
            where = self._block if self._inside else BETWEEN
            place = (where, name, self._turns[where, name])
            self._turns[where, name] += 1
            # Between blocks everything has its full shape.
            shapes = shapes_of_call(args, kwargs) if self._inside else ()
            around = self._open
            call = self.calls[place] = _Call(around, shapes)
            self._open = (*around, place)
            try:
                out = forward(*args, **kwargs)
            finally:
                self._open = around
            leaves, among = pytree.tree_leaves(out), self._among
            is_kept = among is None or (place in among and bool(among[place].copies))
            if is_kept and all(isinstance(x, Tensor) and not has_nan(x) for x in leaves):
                call.results, call.copies = leaves, [x.clone() for x in leaves]
            return out

        return recorded


def _around_blocks(model: nn.Module, blocks: Collection[str]) -> tuple[set[str], set[str]]:
    """Finds modules that contain no block and are none: those between blocks, and those inside of one."""
    within = tuple(f"{name}." for name in blocks)
    names = {
        name
        for name in callable_modules(model)
        if name not in blocks and not any(block.startswith(f"{name}.") for block in blocks)
    }
    inside = {name for name in names if name.startswith(within)}
    return names - inside, inside
