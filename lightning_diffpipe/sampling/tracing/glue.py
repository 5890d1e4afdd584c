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
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
    known: Mapping[Place, LocalCall] | None = None,
) -> Glue:
    """Follows the results of blocks through the code between them.

    Args:
        run: Runs `denoise`; the function it is given answers the calls of blocks.
        model: The denoiser.
        blocks: Calls of its blocks.
        constants: Calls whose results are stored, which are no glue.
        device: Of the results of stubbed blocks.
        known: Calls found to be local for the same shapes before; no others are tried then. None tries all.
    """
    follower = _Follower(model, blocks, constants, device, known)
    between, _ = _around_blocks(model, {block.name for block in blocks})
    with forward_replaced(model, between, follower.make), follower:
        prediction = run(follower.answer)
        follower.note_read(prediction)
    return follower.glue()


class _Followed(NamedTuple):
    """An object that is followed: where it comes from, and which of its axes runs over tokens."""

    value: Tensor
    key: Any
    tokens: TokenAxis


class _Follower(TorchFunctionMode):
    """Stubs blocks, and follows what they return as objects through the code between them.

    A value is *read* if a function of torch is given the object, unless it asks for a shape or the like. What a
    local module does with an object does not count: at sampling it is given the tokens of the part instead.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: list[Block],
        constants: Collection[Place],
        device: torch.device,
        known: Mapping[Place, LocalCall] | None,
    ) -> None:
        super().__init__()
        self._model, self._blocks, self._constants, self._device = model, blocks, constants, device
        self._known = known
        self._followed: dict[int, _Followed] = {}  # by identity of the object
        self._read: set[Any] = set()  # keys of results whose values are read
        self._local: dict[Place, LocalCall] = {}
        self._turns: Counter[str] = Counter()
        self._positions = itertools.count()  # of calls of blocks
        # Inside a module whose result is stored, and inside the outermost one of all others.
        self._is_storing = self._is_inside = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _LOOKS_AT_NO_NUMBER:
            self.note_read((args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def note_read(self, tree: Any) -> None:
        """Notes that the values of everything in a tree are read."""
        leaves = pytree.tree_leaves(tree)
        self._read |= {self._followed[id(x)].key for x in leaves if id(x) in self._followed}

    def answer(self, name: str, forward: Forward, args: Any, kwargs: Any) -> Any:
        """Answers a call of a block with results without memory, which are followed."""
        here = next(self._positions)
        block = self._blocks[here]
        leaves = block.dummy(0.0, self._device)
        for leaf, tokens in block.outputs.items():
            self._follow(leaves[leaf], (here, leaf), tokens)
        return block.nested(leaves)

    def make(self, name: str, forward: Forward) -> Forward:
        """Returns what stands for the forward of a module between blocks."""

        def followed(*args: Any, **kwargs: Any) -> Any:
            if self._is_storing:
                return forward(*args, **kwargs)
            place = (BETWEEN, name, self._turns[name])
            self._turns[name] += 1
            if place in self._constants:
                with self._flag("_is_storing"):
                    return forward(*args, **kwargs)
            if self._is_inside:
                return forward(*args, **kwargs)
            with self._flag("_is_inside"):
                return self._outermost(place, forward, args, kwargs)

        return followed

    def glue(self) -> Glue:
        """Returns what was found in a run."""
        results = {
            (here, leaf) for here, block in enumerate(self._blocks) for leaf in block.outputs
        }
        local = {
            place: call._replace(passed=place not in self._read)
            for place, call in self._local.items()
        }
        return Glue(frozenset(results - self._read), local)

    def _outermost(self, place: Place, forward: Forward, args: Any, kwargs: Any) -> Any:
        """Runs a call that is inside no other; if it is local, its result stands for the same tokens."""
        flat, spec = pytree.tree_flatten((args, kwargs))
        leaves = [i for i, x in enumerate(flat) if id(x) in self._followed]
        if len(leaves) != 1:
            return forward(*args, **kwargs)
        [leaf] = leaves
        source = self._followed[id(flat[leaf])]
        axis = self._axis_of_tokens(place, flat, spec, leaf, source.tokens)
        if axis is None:
            return forward(*args, **kwargs)
        del self._followed[id(source.value)]  # reading it in this call does not count
        out = forward(*args, **kwargs)
        self._followed[id(source.value)] = source
        tokens = TokenAxis(axis, source.tokens.owner, source.tokens.num_text)
        self._local[place] = LocalCall(leaf, source.tokens, tokens, TensorShape.of(out), False)
        self._follow(out, place, tokens)
        return out

    def _axis_of_tokens(
        self, place: Place, flat: list[Any], spec: Any, leaf: int, tokens: TokenAxis
    ) -> int | None:
        """Returns the axis of tokens in the result of a call; None if the call is not local."""
        if self._known is not None:
            call = self._known.get(place)
            is_known = call is not None and (call.leaf, call.given) == (leaf, tokens)
            return call.made.axis if is_known else None
        module = self._model.get_submodule(place[1])
        followed, self._followed = self._followed, {}  # what a trial reads is none of the request's
        try:
            with self._flag("_is_storing"):
                return _axis_of_local(module, flat, spec, leaf, tokens.axis)
        finally:
            self._followed = followed

    @contextlib.contextmanager
    def _flag(self, name: str) -> Iterator[None]:
        before = getattr(self, name)
        setattr(self, name, True)
        try:
            yield
        finally:
            setattr(self, name, before)

    def _follow(self, x: Tensor, key: Any, tokens: TokenAxis) -> None:
        self._followed[id(x)] = _Followed(x, key, tokens)


def _axis_of_local(
    module: nn.Module, flat: list[Any], spec: Any, leaf: int, axis: int
) -> int | None:
    """Returns the axis of tokens of a module's result if it is local, by a trial with random weights.

    Of a third of the tokens, and of the rest, a local module makes that part of what it makes of all.
    """
    like, size = flat[leaf], flat[leaf].shape[axis]
    generator = torch.Generator(like.device).manual_seed(0)

    def random(x: Tensor) -> Tensor:
        return torch.randn(x.shape, generator=generator, device=x.device).to(x.dtype)

    def run(tokens: Tensor) -> Tensor | None:
        leaves = [tokens.contiguous() if i == leaf else x for i, x in enumerate(flat)]
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        try:
            out = torch.func.functional_call(module, weights, args, kwargs)
        except (RuntimeError, IndexError, ValueError):
            return None
        return out if isinstance(out, Tensor) and out.is_floating_point() else None

    if size < _MIN_TOKENS or not like.is_floating_point():
        return None
    weights = {n: random(p) for n, p in module.named_parameters() if p.is_floating_point()}
    tokens = random(like)
    whole = run(tokens)
    if whole is None:
        return None
    axes = [a for a in range(whole.ndim) if whole.shape[a] == size]
    third = size // 3
    for start, length in ((0, third), (third, size - third)):
        part = run(tokens.narrow(axis, start, length))
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

    def record(x: Tensor, at: Tensor, earlier: _Calls | None = None) -> _CallRecorder:
        recorder = _CallRecorder(earlier, RepeatedCalls(kinds, by_value=True))
        # What is not known stays so; equal numbers are looked for in the rest.
        with WithoutProducts(exactly=True), forward_replaced(model, names, recorder.make):
            run(x, at, recorder.wrap_block, all_to_all)
        return recorder

    # The four runs of the table above.
    first = record(unknown, t)
    calls = first.calls
    on_latents, later = record(latents, t, calls), record(unknown, other_t, calls)
    others = [on_latents, later]
    in_step, in_request = _same(calls, on_latents.calls), set[Place]()
    if not torch.equal(t, other_t):
        dtype = t.dtype if t.is_floating_point() else torch.get_default_dtype()
        with contextlib.suppress(Exception):  # not every model can take NaN
            timeless = record(unknown, torch.full_like(t, float("nan"), dtype=dtype), calls)
            others.append(timeless)
            if timeless.calls.keys() == calls.keys():
                without_nan = {place for place, call in timeless.calls.items() if call.copies}
                in_request = in_step & _same(calls, later.calls) & without_nan
    if any(other.sources != first.sources for other in others):
        return {}, {}
    constants, step_constants = _outermost(calls, in_step, in_request)
    for stored in (constants, step_constants):
        stored |= _in_repeated_blocks(stored, first.called, first.sources)
    return constants, step_constants


def _outermost(
    calls: _Calls, in_step: Collection[Place], in_request: Collection[Place]
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
    """Returns the places in calls of blocks that did not run, since an equal one ran in their place.

    Args:
        stored: Places in calls that ran.
        called: Names of blocks, by call.
        sources: For each call the one that ran in its place.
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
        self._open: tuple[Place, ...] = ()  # calls that have not returned
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
            leaves = pytree.tree_leaves(out)
            if self._may_be_constant(place) and all(map(_is_known, leaves)):
                call.results, call.copies = leaves, [x.clone() for x in leaves]
            return out

        return recorded

    def _may_be_constant(self, place: Place) -> bool:
        earlier = self._earlier
        return earlier is None or (place in earlier and bool(earlier[place].copies))


def _is_known(x: Any) -> bool:
    return isinstance(x, Tensor) and not has_nan(x)


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
