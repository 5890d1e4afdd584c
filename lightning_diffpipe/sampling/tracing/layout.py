"""The layout of a model: plain data by which it is run in parts, for one shape of latents.

Which calls of blocks there are, which of their arguments and results run over tokens, who reads what between
blocks, and what need not be computed for every part. One layout serves any number of patches. `probe.py` finds it
by tracing values; rank 0 sends it to the others as it stands.

Rows of the latents are grouped in *units*, the smallest slices that no token straddles (two rows for a patch
size of two). Every token of every tensor that enters or leaves a block, and every position of the keys of every
attention call, belongs to a unit or to the text, or it is no token at all:

    keys of a joint attention    t0 t1 t2 | 0 0 0 | 1 1 1 | 2 2 2 | 3 3 3        4 units of 3 tokens, 3 of text
    with 2 patches               patch 0, with the text ----| patch 1 ----|
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from lightning_diffpipe.comm.packing import TensorShape
from lightning_diffpipe.errors import ConfigurationError

NOBODY = -1
_FIRST_TEXT = -2
_TOKENS_PER_RUN = 64  # on average: below, an index costs less than the copy of each run

Units = range | tuple[range, ...]
"""Some units, in increasing order."""

BETWEEN = -1
"""Stands for a call of a block where something happens between blocks."""

CallPlace = tuple[int, str, int]
"""Call of a block or `BETWEEN`, name of a module, how often it was called there before."""


def text_token(number: int | Tensor) -> int | Tensor:
    """Returns the owner code of a text token; units are their own codes."""
    return _FIRST_TEXT - number


@dataclass(frozen=True)
class Part:
    """Some tokens of some samples, which one run of the model computes.

    Attributes:
        units: Units of rows, one range or several; None means all tokens, text included.
        text: `(k, n)`: the k-th of n equal shares of the text tokens; None means none of them.
        samples: `(k, n)`: the k-th of n shares of the samples, as equal as can be; None means all.
    """

    units: Units | None = None
    text: tuple[int, int] | None = None
    samples: tuple[int, int] | None = None

    def samples_of(self, size: int) -> slice:
        """Returns the samples, among `size` of them."""
        mine = share(size, *(self.samples or (0, 1)))
        return slice(mine.start, mine.stop)


WHOLE = Part()


def share(size: int, k: int, n: int) -> range:
    """Returns the k-th of n shares of a number of things, as equal as can be.

    Example:
        >>> [share(5, k, 2) for k in range(2)]
        [range(0, 2), range(2, 5)]
    """
    return range(size * k // n, size * (k + 1) // n)


class Selection:
    """Positions on an axis of length `size`, in increasing order; all of them if `index` is None."""

    def __init__(self, size: int, index: Tensor | None = None) -> None:
        self.size, self.index = size, index
        self._there = index
        # Start and length of those that follow each other, if there are few such runs: copied as they lie.
        self._runs: list[tuple[int, int]] = []
        if index is not None and len(index):
            ends = [*((index.diff() > 1).nonzero().squeeze(1) + 1).tolist(), len(index)]
            if len(ends) == 1 or len(index) >= _TOKENS_PER_RUN * len(ends):
                starts = [0, *ends[:-1]]
                self._runs = [(int(index[a]), b - a) for a, b in zip(starts, ends, strict=True)]

    def __len__(self) -> int:
        return self.size if self.index is None else len(self.index)

    def take(self, x: Tensor, axis: int) -> Tensor:
        """Copies these positions densely; the tensor itself if they are all."""
        if self.index is None:
            return x
        if len(self._runs) == 1:
            return x.narrow(axis, *self._runs[0]).clone(memory_format=torch.contiguous_format)
        return x.index_select(axis, self._index_on(x.device))

    def take_into(self, out: Tensor, x: Tensor, axis: int) -> None:
        """Copies these positions into a tensor that is as long on the axis."""
        if not self._runs:
            out.copy_(self.take(x, axis))
        for (start, length), piece in self._with_runs(out, axis):
            piece.copy_(x.narrow(axis, start, length))

    def put(self, x: Tensor, axis: int, values: Tensor) -> None:
        """Writes values to these positions."""
        if self.index is None:
            x.copy_(values)
        elif not self._runs:
            x.index_copy_(axis, self._index_on(x.device), values.to(x.dtype))
        for (start, length), piece in self._with_runs(values, axis):
            x.narrow(axis, start, length).copy_(piece)

    def _with_runs(self, dense: Tensor, axis: int) -> Iterator[tuple[tuple[int, int], Tensor]]:
        """Yields each run with its piece of a tensor that has these positions only."""
        pieces: Sequence[Tensor] = [dense] * len(self._runs)
        if len(pieces) > 1:
            pieces = dense.split([length for _, length in self._runs], axis)
        return zip(self._runs, pieces, strict=True)

    def _index_on(self, device: torch.device) -> Tensor:
        """Returns the index on a device; copied there once, as the host waits for a copy."""
        if self._there is None or self._there.device != device:
            self._there = self.index.to(device)
        return self._there


@dataclass(eq=False)
class TokenAxis:
    """One axis of a tensor that runs over tokens.

    Attributes:
        axis: Index of the axis.
        owner: For each index the unit, the text token (`text_token`), or `NOBODY`.
        num_text: Text tokens in the attention of the block, of which parts get shares.
        dummy_text: Text tokens that some block cannot do without, by stream: a part that has none of a stream is
            given the first one, whose result is dropped.
    """

    axis: int
    owner: Tensor
    num_text: int = 0
    dummy_text: tuple[frozenset[int], ...] = ()
    _selected: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_selected": {}}

    def __eq__(self, other: object) -> bool:
        """Returns whether both hold the same tokens in the same order."""
        if not isinstance(other, TokenAxis):
            return NotImplemented
        return self is other or (self.axis == other.axis and torch.equal(self.owner, other.owner))

    @property
    def size(self) -> int:
        """Tokens on the axis."""
        return len(self.owner)

    @property
    def num_units(self) -> int:
        """One more than the last unit on the axis."""
        return int(self.owner.max()) + 1

    def owned(self, part: Part) -> Selection:
        """Returns the tokens of a part."""
        return self._select(part, with_dummy_text=False)

    def input_of(self, part: Part) -> Selection:
        """Returns the tokens a block is given for a part: its own, and perhaps dummy text."""
        return self._select(part, with_dummy_text=bool(self.dummy_text))

    def without_dummy_text(self) -> TokenAxis:
        """Returns the same axis, of whose parts blocks are given no more than their own tokens."""
        if self.dummy_text and "bare" not in self._selected:
            self._selected["bare"] = TokenAxis(self.axis, self.owner, self.num_text)
        return self._selected["bare"] if self.dummy_text else self

    def _select(self, part: Part, with_dummy_text: bool) -> Selection:
        key = (part.units, part.text, with_dummy_text)
        if key not in self._selected:
            index = None
            if part.units is not None:
                index = self._mask_of(part, with_dummy_text).nonzero().squeeze(1)
            self._selected[key] = Selection(self.size, index)
        return self._selected[key]

    def _mask_of(self, part: Part, with_dummy_text: bool) -> Tensor:
        """Returns which tokens are of a part's units, or of its share of the text."""
        mask = torch.zeros(self.size, dtype=torch.bool)
        for units in (part.units,) if isinstance(part.units, range) else part.units:
            mask |= (self.owner >= units.start) & (self.owner < units.stop)
        text = range(0)  # numbers of the part's text tokens
        if part.text is not None:
            text = share(self.num_text, *part.text)
            number = _FIRST_TEXT - self.owner  # negative for all that is no text
            mask |= (number >= text.start) & (number < text.stop)
        for stream in self.dummy_text if with_dummy_text else ():
            # Decided by numbers, so alike on all axes, whichever tokens they have.
            if stream.isdisjoint(text):
                mask |= self.owner == text_token(min(stream))
        return mask

    def own_in_input(self, part: Part) -> Selection:
        """Returns the tokens of a part among those a block is given for it: all, but for dummy text."""
        key = (part.units, part.text, "own")
        if key not in self._selected:
            self._selected[key] = _among(self.owned(part), self.input_of(part))
        return self._selected[key]

    def owned_among(self, part: Part, together: Part) -> Selection:
        """Returns the tokens of a part among those of another one that contains it."""
        key = (part.units, part.text, together.units, together.text)
        if key not in self._selected:
            self._selected[key] = _among(self.owned(part), self.owned(together))
        return self._selected[key]


def _among(inner: Selection, outer: Selection) -> Selection:
    index = None
    if len(inner) < len(outer):
        index = inner.index if outer.index is None else torch.searchsorted(outer.index, inner.index)
    return Selection(len(outer), index)


@dataclass(frozen=True, slots=True)
class AttentionSize:
    """One call of attention.

    Attributes:
        key_heads: Heads of keys and values; fewer than `heads` with grouped queries.
        head_size: Width of a query or key.
        value_size: Width of a value.
        element_bytes: Bytes of one number.
    """

    batch: int
    heads: int
    key_heads: int
    head_size: int
    value_size: int
    element_bytes: int


@dataclass
class Block:
    """One call of one block.

    Attributes:
        inputs: Token axes of arguments, by position among the leaves of `(args, kwargs)`.
        outputs: Token axes of results, by position among the leaves.
        attention: Token axis of the keys of each attention call; None for cross-attention, whose keys belong to
            nobody.
        sizes: Size of each attention call, cross-attention included.
        needs_text: It cannot run without text tokens.
        cuts_samples: It can run on a part of the samples.
        input_samples: Axes of arguments that count samples.
        output_samples: Axes of results that count samples.
        results: Shape of every result, or its value if it is no tensor.
        kind: Equal for calls that compute alike on arguments of the same shapes, which therefore take equally long.
    """

    name: str
    results: list[TensorShape | Any]
    tree: Any
    arguments: tuple[Any, ...] = ()
    inputs: dict[int, TokenAxis] = field(default_factory=dict)
    outputs: dict[int, TokenAxis] = field(default_factory=dict)
    attention: list[TokenAxis | None] = field(default_factory=list)
    sizes: tuple[AttentionSize, ...] = ()
    needs_text: bool = False
    cuts_samples: bool = False
    input_samples: dict[int, int] = field(default_factory=dict)
    output_samples: dict[int, int] = field(default_factory=dict)
    kind: int = 0

    @property
    def axes(self) -> list[TokenAxis]:
        """All axes that run over tokens."""
        return [*self.inputs.values(), *self.outputs.values(), *filter(None, self.attention)]

    @property
    def num_text(self) -> int:
        """Text tokens in its attention."""
        return max((int((x.owner < -1).sum()) for x in self.attention if x), default=0)

    def dummy(self, fill: float, device: torch.device) -> list[Any]:
        """Makes results of the right shapes, all entries of which share one number in memory."""

        def filled(shape: TensorShape) -> Tensor:
            return torch.full((), fill, dtype=shape.dtype, device=device).expand(shape.shape)

        return [filled(r) if isinstance(r, TensorShape) else r for r in self.results]

    def nested(self, leaves: list[Any]) -> Any:
        """Nests results as the block would return them."""
        return pytree.tree_unflatten(leaves, self.tree)

    @property
    def streams(self) -> tuple[frozenset[int], ...]:
        """Numbers of text tokens of each argument that has only such; those of the block if there is none."""
        owners = [frozenset(x.owner.tolist()) for x in self.inputs.values() if x.owner.max() < -1]
        streams = {frozenset(_FIRST_TEXT - owner for owner in each) for each in owners}
        return tuple(streams or [frozenset(range(self.num_text))] * (self.num_text > 0))

    def shapes(self, part: Part) -> list[TensorShape]:
        """Returns the shapes of a part's tokens, for each result that has tokens."""
        shapes = []
        for leaf, tokens in sorted(self.outputs.items()):
            shape = list(self.results[leaf].shape)
            shape[tokens.axis] = len(tokens.owned(part))
            if leaf in self.output_samples:
                axis = self.output_samples[leaf]
                samples = part.samples_of(shape[axis])
                shape[axis] = samples.stop - samples.start
            shapes.append(TensorShape(tuple(shape), self.results[leaf].dtype))
        return shapes


@dataclass
class Layout:
    """All properties of a model by which it runs in parts, for one shape of latents.

    Attributes:
        blocks: Calls of blocks in one call of `denoise`, in order.
        axis: Axis of the latents that is cut, from the end.
        num_rows: Length of that axis.
        rows_per_unit: Rows that belong together.
        readers: For each call, the calls that read its result through code between blocks;
            `len(blocks)` stands for the prediction itself.
        constants: Modules whose result is the same at every step, by place, with the shapes of their
            arguments in a run on all tokens.
        step_constants: Calls whose result is the same for every patch of a step.
        passed: Results of blocks, as (call, leaf), that code between blocks only passes on to blocks.
        attention_by_name: Blocks look up attention by its name whenever they call it.
        glue_parameters: Parameters inside blocks that code between blocks reads.
    """

    blocks: list[Block]
    axis: int
    num_rows: int
    rows_per_unit: int
    readers: list[frozenset[int]]
    constants: dict[CallPlace, Any] = field(default_factory=dict)
    step_constants: dict[CallPlace, Any] = field(default_factory=dict)
    passed: frozenset[tuple[int, int]] = frozenset()
    attention_by_name: bool = False
    glue_parameters: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """Makes equal axes one object, so that they are compared once."""
        unique: dict[Any, TokenAxis] = {}

        def one(tokens: TokenAxis) -> TokenAxis:
            key = tokens.axis, tokens.num_text, tokens.dummy_text, tuple(tokens.owner.tolist())
            return unique.setdefault(key, tokens)

        for block in self.blocks:
            block.inputs = {leaf: one(tokens) for leaf, tokens in block.inputs.items()}
            block.outputs = {leaf: one(tokens) for leaf, tokens in block.outputs.items()}
            block.attention = [tokens and one(tokens) for tokens in block.attention]

    @property
    def dummy_text(self) -> bool:
        """Some block cannot run without text tokens: parts without are given one, see `TokenAxis.dummy_text`."""
        return any(block.needs_text for block in self.blocks)

    @property
    def cuts_samples(self) -> bool:
        """Blocks can run on a part of the samples."""
        return all(block.cuts_samples for block in self.blocks)

    @property
    def num_units(self) -> int:
        """Smallest slices of the latents."""
        return self.num_rows // self.rows_per_unit

    @property
    def block_names(self) -> list[str]:
        """Modules that are called as blocks, in order of their first call: what is split over ranks."""
        return list(dict.fromkeys(block.name for block in self.blocks))

    def split_units(self, num_parts: int, what: str = "num_patches") -> list[range]:
        """Cuts units into balanced ranges, longer ones first, or raises ConfigurationError if there are too few."""
        if not 1 <= num_parts <= self.num_units:
            raise ConfigurationError(
                f"{what}={num_parts}, but the latents have {self.num_rows} rows, which tokens group by "
                f"{self.rows_per_unit}: choose {what} between 1 and {self.num_units}"
            )
        return _balanced(range(self.num_units), num_parts)

    def refuse_microbatches(self, num_parts: int) -> None:
        """Raises ConfigurationError unless the samples of every block can be cut into so many shares."""
        rows = {size.batch for block in self.blocks for size in block.sizes}
        rows |= {
            block.results[leaf].shape[axis]
            for block in self.blocks
            for leaf, axis in block.output_samples.items()
        }
        most = math.gcd(*rows)
        if num_parts > most:
            raise ConfigurationError(
                f"warmup_microbatches={num_parts}, but the model is given {most} samples in a step, branches of "
                f"guidance in the batch included; choose at most {most}"
            )
        # Unequal shares of rows that differ in number would not be of the same samples.
        if len(rows) > 1 and most % num_parts:
            raise ConfigurationError(
                f"warmup_microbatches={num_parts}, but blocks of the model are given "
                f"{', '.join(map(str, sorted(rows)))} samples; choose a divisor of {most}"
            )

    def split_range(self, units: range, num_parts: int) -> list[range]:
        """Shares a patch among the ranks of a stage; raises ConfigurationError for more ranks than units."""
        if num_parts > len(units):
            raise ConfigurationError(
                f"a patch of {len(units)} x {self.rows_per_unit} rows cannot be shared by {num_parts} ranks of "
                f"a stage; choose at most {self.num_units // num_parts} patches, or fewer ranks"
            )
        return _balanced(units, num_parts)

    def take_rows(self, x: Tensor, units: Units | None) -> Tensor:
        """Copies the rows of some units of a tensor shaped like the latents, densely; None means all."""
        rows = self._rows.owned(Part(units)).take(x, self.axis)
        return x.clone(memory_format=torch.contiguous_format) if rows is x else rows

    def put_rows(self, x: Tensor, units: Units | None, values: Tensor) -> None:
        """Writes the rows of some units."""
        self._rows.owned(Part(units)).put(x, self.axis, values)

    @functools.cached_property
    def _rows(self) -> TokenAxis:
        return TokenAxis(self.axis, torch.arange(self.num_rows) // self.rows_per_unit)


def _balanced(units: range, num_parts: int) -> list[range]:
    size, longer = divmod(len(units), num_parts)
    bounds = [units.start + i * size + min(i, longer) for i in range(num_parts + 1)]
    return [range(a, b) for a, b in itertools.pairwise(bounds)]


def shapes_of(arguments: Any) -> tuple[Any, ...]:
    """Returns the shapes of tensors among the leaves of arguments; everything else by type."""
    return tuple(
        (tuple(x.shape), x.dtype) if isinstance(x, Tensor) else type(x)
        for x in pytree.tree_leaves(arguments)
    )


def shapes_of_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Returns the shapes of tensors given to a module; None if there may be others inside containers."""
    inputs = (*args, *kwargs.values())
    if any(isinstance(x, (list, tuple, dict)) for x in inputs):
        return None
    return tuple(tuple(x.shape) if isinstance(x, Tensor) else None for x in inputs)
