"""Finding the layout of a denoiser by running it without attention.

Attention is replaced by "return the query", so that a transformer is local to a token. Then

1. one row of the latents is marked: the rows of the prediction it reaches are one *unit*;
2. units are marked by code words: each position of the keys of each attention call says which unit it belongs
   to (none: text; no unit in the whole call: cross-attention), and the prediction must be reached by its own
   units only. A position reached by two units, or a row reached by a foreign one, means that something besides
   attention mixes tokens: the model is refused, and the operator named;
3. one clean run traces the arguments of each kind of block (`blocks.py`);
4. blocks are stubbed, and the result of one after the other is marked: who reads it through code between blocks?
5. runs with all latents marked find modules whose result need not be computed for every patch; one with stubs finds
   results that code between blocks only passes on.

That is about `log2(units) + 6` runs of the model, most of which follow NaN only and multiply nothing; in each,
equal blocks run once (`marks.py`). Weights do not matter, so placeholders will do.

What patches can share or leave out: glue, the code between blocks, sees full shapes (`pipefusion/patch.py`), but
most of it never looks into what a block returns: it passes it to the next one. One run with stubbed blocks follows
every result as an object:

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
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_diffpipe.comm.packing import TensorShape
from lightning_diffpipe.errors import LayoutError
from lightning_diffpipe.graph.calltree import Forward, callable_modules, forward_replaced
from lightning_diffpipe.graph.versions import settings_digest
from lightning_diffpipe.sampling.rehearsal import failing
from lightning_diffpipe.sampling.request import Request
from lightning_diffpipe.sampling.tracing.attention import (
    AttentionByName,
    AttentionHandler,
    AttentionIntercepted,
)
from lightning_diffpipe.sampling.tracing.blocks import BlockTracer
from lightning_diffpipe.sampling.tracing.layout import (
    BETWEEN,
    AttentionSize,
    Block,
    CallPlace,
    Layout,
    TokenAxis,
    shapes_of,
    shapes_of_call,
    text_token,
)
from lightning_diffpipe.sampling.tracing.marks import (
    MIXED,
    UNREACHED,
    BlockKinds,
    CallAnswer,
    CodeWords,
    RepeatedCalls,
    WithoutProducts,
    all_to_all,
    calls_answered,
    finite_placeholders,
    has_nan,
    lines,
    marked,
    mixing_operator,
    token_local,
)

MAX_LAYOUTS = 8
"""So many layouts of one model are known at a time."""

_MAX_ROWS_OF_A_TOKEN = 4  # what reaches more than that, and everything, is no token
_WRITES = "code between blocks writes into what a block returned"
_Log = list[tuple[Tensor, Tensor | None]]
_Owners = list[TokenAxis | None]
_MarkedCall = tuple[str, list[Tensor]]
"""A block that a marked run calls, and for each call of attention which keys are NaN."""
_Key = tuple[torch.Size, torch.dtype, str]


def probe(request: Request, axis: int | None = None) -> Layout:
    """Finds the layout of a request's model for latents of its shape.

    Args:
        request: Nothing in it is changed.
        axis: The axis of the latents to cut, e.g. 2 for the frames of a video; by default rows, or tokens
            where latents are packed into (samples, tokens, channels).

    Returns:
        The layout: plain data, valid for every number of patches and ranks.

    Raises:
        LayoutError: The model mixes tokens outside attention, or hides its attention.
    """
    with request.inferring(), finite_placeholders(request.model):
        return _Probe(request, axis).run()


class _Probe:
    def __init__(self, request: Request, axis: int | None) -> None:
        self._model, self._denoise = request.model, request.denoise
        self._latents = request.latents
        # Two timesteps, so that what depends on time can be told from what does not.
        self._t, self._other_t = request.timesteps[0], request.timesteps[-1]
        ndim = self._latents.ndim
        default = 1 if ndim == 3 else -2
        self._axis = (default if axis is None else axis) % ndim - ndim
        # Members of the outermost `ModuleList`s: what transformers keep their blocks in.
        lists = {n: m for n, m in self._model.named_modules() if isinstance(m, nn.ModuleList)}
        outer = [a for a in lists if not any(a.startswith(b + ".") for b in lists)]
        self._names = [f"{name}.{i}" for name in outer for i in range(len(lists[name]))]
        self._by_name = True
        self._without_products = WithoutProducts()
        self._kinds = BlockKinds(self._model)

    def run(self) -> Layout:
        num_rows = self._latents.shape[self._axis]
        per_unit = self._rows_per_unit(num_rows)
        owners = self._owners(num_rows, per_unit)
        used = {name for name, calls in owners if any(calls)}
        if not used:
            raise LayoutError(
                "no block of the model sends image tokens through scaled_dot_product_attention; "
                "set an attention processor that uses it, and keep blocks in an nn.ModuleList"
            )
        self._names = [name for name in self._names if name in used]
        blocks = self._blocks([c for name, c in owners if name in used])
        readers, glue_parameters = self._readers(blocks)
        constants, step_constants = find_invariants(
            self._run, self._model, self._kinds, self._names, self._latents, self._t, self._other_t
        )
        passed = find_passed(
            lambda answer: self._run(self._latents, self._t, answer), blocks, self._latents.device
        )
        return Layout(
            blocks, self._axis, num_rows, per_unit, readers, constants, step_constants, passed,
            self._by_name, glue_parameters,
        )  # fmt: skip

    # --- 1, 2: units, and who owns which key --------------------------------------------------------

    def _rows_per_unit(self, num_rows: int) -> int:
        """Returns the rows of the prediction that the first row of the latents reaches."""
        first = torch.arange(num_rows) == 0
        out, _ = self._denoise_marked(first)
        if out.shape[self._axis] != num_rows:
            raise LayoutError(
                f"denoise returned {tuple(out.shape)} for latents {tuple(self._latents.shape)}; "
                "it must return a prediction of the latents' shape"
            )
        reached = lines(out, self._axis)
        size = int(reached.sum())
        everywhere = size == num_rows > _MAX_ROWS_OF_A_TOKEN
        if size == 0 or num_rows % size or not reached[:size].all() or everywhere:
            raise self._mixes(f"row 0 reaches rows {_listed(reached)}")
        return size

    def _owners(self, num_rows: int, per_unit: int) -> list[tuple[str, _Owners]]:
        """Returns the calls of candidates in order: name, and for each call of attention the owners of its keys."""
        words = CodeWords(num_rows // per_unit)
        runs: list[list[_MarkedCall]] = []  # one for each bit of the code words
        for marks in words.marks:
            rows = marks.repeat_interleave(per_unit)
            out, calls = self._denoise_marked(rows)
            reached = lines(out, self._axis)
            if not torch.equal(reached, rows):
                raise self._mixes(f"rows {_listed(reached != rows)} are reached by others")
            runs.append(calls)
        owners: list[tuple[str, _Owners]] = []
        for in_all_runs in zip(*runs, strict=True):
            name, _ = in_all_runs[0]
            keys = zip(*(marked_keys for _, marked_keys in in_all_runs), strict=True)
            owners.append((name, [self._owner(words, name, bits) for bits in keys]))
        return owners

    def _owner(self, words: CodeWords, name: str, bits: tuple[Tensor, ...]) -> TokenAxis | None:
        """Returns the unit, or text token, of each key of an attention call; None for cross-attention."""
        units = words.decode(bits)
        if (units == MIXED).any():
            raise LayoutError(
                f"{name}: keys depend on several rows of the latents; tokens are mixed on the way "
                "to attention, so that the model cannot be sampled in patches"
            )
        text = units == UNREACHED
        if text.all():
            return None
        units[text] = text_token(torch.arange(int(text.sum())))
        return TokenAxis(-2, units)

    def _denoise_marked(self, rows: Tensor) -> tuple[Tensor, list[_MarkedCall]]:
        """Runs the model with NaN in some rows; returns the prediction, and which keys of each block are NaN."""
        repeats, calls = RepeatedCalls(self._kinds), list[_MarkedCall]()

        def wrap(name: str, forward: Forward, args: Any, kwargs: Any) -> Any:
            def run() -> tuple[Any, list[Tensor]]:
                log: _Log = []
                with AttentionIntercepted(token_local(log, strict=True)):
                    out = forward(*args, **kwargs)
                return out, [lines(key, -2) for key, _ in log]

            out, keys = repeats.answer(name, args, kwargs, run)
            calls.append((name, keys))
            return out

        with self._without_products:
            prediction = self._run(marked(self._latents, self._axis, rows), self._t, wrap)
        return prediction, calls

    def _mixes(self, what: str) -> LayoutError:
        operator = mixing_operator(self._model, self._denoise, self._latents, self._axis, self._t)
        return LayoutError(
            f"the model mixes rows of the latents outside scaled_dot_product_attention: {what}; the "
            f"first operator that does is {operator or 'one that could not be found'}. Sample it with "
            "DistriFusion, or in one process"
        )

    # --- 3: axes of arguments and results -----------------------------------------------------------

    def _blocks(self, owners: list[_Owners]) -> list[Block]:
        """Traces the arguments and results of every call of a block, of equal calls the first one."""
        traced = dict[Hashable, tuple[Block, Any]]()  # by kind of call: the block, and its results
        blocks: list[Block] = []

        def wrap(name: str, forward: Forward, args: Any, kwargs: Any) -> Any:
            attention = owners[len(blocks)]
            keys = [tokens and tuple(tokens.owner.tolist()) for tokens in attention]
            kind = self._kinds.of(name, args, kwargs), *keys
            if kind not in traced:
                block, out = self._traced(name, forward, args, kwargs, attention)
                traced[kind] = replace(block, kind=len(traced)), out
            block, out = traced[kind]
            blocks.append(replace(block, name=name, arguments=shapes_of((args, kwargs))))
            return pytree.tree_map_only(Tensor, torch.clone, out)

        self._run(self._latents, self._t, wrap)
        needs_text = any(block.needs_text for block in blocks)
        for block in blocks:
            for tokens in block.axes:
                tokens.num_text = block.num_text
                tokens.dummy_text = block.streams if needs_text else ()
        return blocks

    def _traced(
        self, name: str, forward: Forward, args: Any, kwargs: Any, attention: _Owners
    ) -> tuple[Block, Any]:
        """Traces one call; returns the block, and what the call returned.

        Notes whether all attention is looked up by its name, where samplers can then replace it at less cost.
        """
        sizes, num_by_name = list[AttentionSize](), 0

        def note_size(attend: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
            widths = q.shape[-1], v.shape[-1], q.element_size()
            sizes.append(AttentionSize(q.shape[0], q.shape[1], k.shape[1], *widths))
            return q

        def count(attend: Any, *tensors: Tensor, **options: Any) -> Tensor:
            nonlocal num_by_name
            num_by_name += 1
            return attend(*tensors, **options)

        with AttentionIntercepted(note_size), AttentionByName(count):
            out = forward(*args, **kwargs)
        self._by_name &= num_by_name == len(sizes)
        leaves, tree = pytree.tree_flatten(out)
        results = [TensorShape.of(x) if isinstance(x, Tensor) else x for x in leaves]
        block = Block(name, results, tree, attention=attention, sizes=tuple(sizes))
        BlockTracer(block, forward, *pytree.tree_flatten((args, kwargs))).trace()
        return block, out

    # --- 4: who reads what between blocks -----------------------------------------------------------

    def _readers(self, blocks: list[Block]) -> tuple[list[frozenset[int]], frozenset[str]]:
        """Returns who reads the result of each call, and parameters of blocks that code between blocks reads."""
        inside = {
            id(p): f"{name}.{key}"
            for name in self._names
            for key, p in self._model.get_submodule(name).named_parameters()
        }
        touched = _Touched(inside)
        readers = [self._readers_of(source, blocks, touched) for source in range(len(blocks))]
        return readers, frozenset(touched.names)

    def _readers_of(self, source: int, blocks: list[Block], touched: _Touched) -> frozenset[int]:
        """Runs the code between stubbed blocks, one of which returns NaN; returns the calls that NaN reaches."""
        readers, positions = set[int](), iter(range(len(blocks)))

        def wrap(name: str, forward: Forward, args: Any, kwargs: Any) -> Any:
            here = next(positions)
            if any(map(has_nan, pytree.tree_leaves((args, kwargs)))):
                readers.add(here)
            fill = math.nan if here == source else 0.0
            return blocks[here].nested(blocks[here].dummy(fill, self._latents.device))

        with self._without_products, touched:
            prediction = self._run(self._latents, self._t, wrap)
        if prediction.isnan().any():
            readers.add(len(blocks))
        return frozenset(readers)

    def _run(
        self,
        latents: Tensor,
        t: Tensor,
        wrap: CallAnswer,
        attention: AttentionHandler | None = None,
    ) -> Tensor:
        """Runs `denoise`; `wrap` answers the outermost calls of candidates."""
        with (
            calls_answered(self._model, self._names, wrap),
            AttentionIntercepted(attention or token_local([])),
        ):
            return self._denoise(latents, t)


class _Touched(TorchFunctionMode):
    """Notes which of some parameters are arguments of a function of torch."""

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.names: set[str] = set()
        self._known = names

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in (*args, *(kwargs or {}).values()):
            if id(x) in self._known:
                self.names.add(self._known[id(x)])
        return func(*args, **(kwargs or {}))


def _listed(rows: Tensor) -> list[int]:
    return rows.nonzero().flatten().tolist()[:8]


class LayoutStore:
    """Layouts of one model, newest first, so that the next request of the same shapes need not be probed.

    What the shapes of a request are is only known inside the user's closure: the length of a prompt, a control
    image. So a known layout is tried on, by running the closure with all blocks stubbed and comparing the shapes
    of their arguments; that costs no more than the code between blocks.

    Args:
        axis: Axis of the latents that is cut; None for the default.
    """

    def __init__(self, axis: int | None = None) -> None:
        self._axis = axis
        self._known: list[tuple[_Key, Layout]] = []

    def layout_for(self, request: Request) -> Layout:
        """Returns a layout that fits the request: a stored one, or a new one by probing.

        Raises:
            LayoutError: The model cannot be sampled in parts, or fails while it is probed.
            ConfigurationError: Memory does not suffice to probe it.
        """
        key = _key(request)
        for stored, layout in self._known:
            if stored == key and fits(layout, request):
                return layout
        with failing("while it is probed", "sample it with method=single", _WRITES):
            layout = probe(request, self._axis)
        self.add(request, layout)
        return layout

    def add(self, request: Request, layout: Layout) -> None:
        """Stores the layout of a request."""
        self._known = [(_key(request), layout), *self._known][:MAX_LAYOUTS]


def _key(request: Request) -> _Key:
    # A model whose attention processors were exchanged since is probed again.
    return request.latents.shape, request.latents.dtype, settings_digest(request.model)


def fits(layout: Layout, request: Request) -> bool:
    """Returns whether blocks are called as the layout says, on the same shapes, with the same code between them."""
    calls: list[tuple[str, Any]] = []

    def run(answer: CallAnswer) -> Tensor:
        def stubbed(name: str, forward: Forward, args: Any, kwargs: Any) -> Any:
            calls.append((name, shapes_of((args, kwargs))))
            return answer(name, forward, args, kwargs)

        with calls_answered(request.model, layout.block_names, stubbed):
            return request.denoise(request.latents, request.timesteps[0])

    try:
        with request.inferring():
            passed = find_passed(run, layout.blocks, request.latents.device)
    except (IndexError, RuntimeError, ValueError):
        return False
    same_calls = calls == [(block.name, block.arguments) for block in layout.blocks]
    return same_calls and passed == layout.passed


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
