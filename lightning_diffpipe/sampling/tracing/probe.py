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
   results that code between blocks only passes on (`glue.py`).

That is about `log2(units) + 6` runs of the model, most of which follow NaN only and multiply nothing; in each,
equal blocks run once (`marks.py`). Weights do not matter, so placeholders will do.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_diffpipe.comm.packing import TensorShape
from lightning_diffpipe.errors import LayoutError
from lightning_diffpipe.graph.calltree import Forward
from lightning_diffpipe.graph.versions import settings_digest
from lightning_diffpipe.sampling.rehearsal import failing
from lightning_diffpipe.sampling.request import Request
from lightning_diffpipe.sampling.tracing.attention import (
    AttentionByName,
    AttentionHandler,
    AttentionIntercepted,
)
from lightning_diffpipe.sampling.tracing.blocks import BlockTracer
from lightning_diffpipe.sampling.tracing.glue import find_invariants, find_passed
from lightning_diffpipe.sampling.tracing.layout import (
    AttentionSize,
    Block,
    Layout,
    TokenAxis,
    shapes_of,
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
