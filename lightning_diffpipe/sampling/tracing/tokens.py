"""Who owns which token, and which tokens make a part.

Rows of the latents are grouped in *units*, the smallest slices that no token straddles (two rows for a patch
size of two). Every token of every tensor that enters or leaves a block, and every position of the keys of every
attention call, belongs to a unit or to the text, or it is no token at all:

    keys of a joint attention    t0 t1 t2 | 0 0 0 | 1 1 1 | 2 2 2 | 3 3 3        4 units of 3 tokens, 3 of text
    with 2 patches               patch 0, with the text ----| patch 1 ----|
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

NOBODY = -1
_FIRST_TEXT = -2

Units = range | tuple[range, ...]
"""Some units, in increasing order."""


def ranges_of(units: Units) -> tuple[range, ...]:
    """Units as ranges."""
    return (units,) if isinstance(units, range) else units


def text_token(number: int | Tensor) -> int | Tensor:
    """The owner code of a text token; units are their own codes."""
    return _FIRST_TEXT - number


@dataclass(frozen=True)
class Part:
    """What one run of the model computes: some tokens of some samples.

    Attributes:
        units: Units of rows, one range or several; None means all tokens, text included.
        text: `(k, n)`: the k-th of n equal shares of the text tokens; None means none of them.
        samples: `(k, n)`: the k-th of n shares of the samples, as equal as can be; None means all.
    """

    units: Units | None = None
    text: tuple[int, int] | None = None
    samples: tuple[int, int] | None = None

    def samples_of(self, size: int) -> slice:
        """The samples, among `size` of them."""
        k, n = self.samples or (0, 1)
        return slice(size * k // n, size * (k + 1) // n)


WHOLE = Part()


@dataclass(frozen=True)
class Selection:
    """Positions on an axis, in increasing order.

    Attributes:
        size: Length of the axis.
        index: The positions; None means all.
    """

    size: int
    index: Tensor | None = None

    def __post_init__(self) -> None:
        runs = [] if self.index is None else _runs(self.index.tolist())
        object.__setattr__(self, "_runs", runs)
        object.__setattr__(self, "_length", sum(stop - start for start, stop in runs))
        object.__setattr__(self, "_there", self.index)

    def __len__(self) -> int:
        return self.size if self.index is None else self._length  # type: ignore[attr-defined,no-any-return]

    def take(self, x: Tensor, axis: int) -> Tensor:
        """A dense copy of these positions; the tensor itself if they are all."""
        runs: list[tuple[int, int]] = self._runs  # type: ignore[attr-defined]
        if self.index is None:
            return x
        if len(runs) == 1:
            start, stop = runs[0]
            piece = x.narrow(axis, start, stop - start)
            return piece.clone(memory_format=torch.contiguous_format)
        return x.index_select(axis, self._index_on(x.device))

    def put(self, x: Tensor, axis: int, values: Tensor) -> None:
        """Writes values to these positions."""
        if self.index is None:
            x.copy_(values)
            return
        runs: list[tuple[int, int]] = self._runs  # type: ignore[attr-defined]
        if len(runs) > 16:
            x.index_copy_(axis, self._index_on(x.device), values)
            return
        at = 0
        for start, stop in runs:
            x.narrow(axis, start, stop - start).copy_(values.narrow(axis, at, stop - start))
            at += stop - start

    def _index_on(self, device: torch.device) -> Tensor:
        """The index on a device; copied there once, as the host waits for a copy."""
        assert self.index is not None
        there: Tensor = self._there  # type: ignore[attr-defined]
        if there.device != device:
            there = self.index.to(device)
            object.__setattr__(self, "_there", there)
        return there


def _runs(index: list[int]) -> list[tuple[int, int]]:
    """Consecutive numbers as half-open intervals."""
    runs: list[tuple[int, int]] = []
    for i in index:
        if runs and runs[-1][1] == i:
            runs[-1] = (runs[-1][0], i + 1)
        else:
            runs.append((i, i + 1))
    return runs


@dataclass
class TokenAxis:
    """One axis of a tensor that runs over tokens.

    Attributes:
        axis: Which one.
        owner: For each index the unit, the text token (`text_token`), or `NOBODY`.
    """

    axis: int
    owner: Tensor
    _selected: dict[Any, Selection] = field(default_factory=dict, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {"axis": self.axis, "owner": self.owner, "_selected": {}}

    @property
    def size(self) -> int:
        """Tokens on the axis."""
        return len(self.owner)

    @property
    def num_units(self) -> int:
        """One more than the last unit on the axis."""
        return int(self.owner.max()) + 1

    def owned(self, part: Part, num_text: int) -> Selection:
        """The tokens of a part, in a block with so many text tokens."""
        return self._selection(part, num_text, ghost=False)

    def fed(self, part: Part, num_text: int, ghost: bool) -> Selection:
        """The tokens a block is fed for a part: its own, and a ghost if a block cannot do without text."""
        return self._selection(part, num_text, ghost)

    def own_among_fed(self, part: Part, num_text: int, ghost: bool) -> Selection | None:
        """The tokens of a part among those a block is fed for it; None if it is fed no ghost."""
        own, fed = self.owned(part, num_text), self.fed(part, num_text, ghost)
        if len(own) == len(fed):
            return None
        key = (part.units, part.text, num_text, "own")
        if key not in self._selected:
            mine = torch.isin(fed.index, own.index).nonzero().squeeze(1)
            self._selected[key] = Selection(len(fed), mine)
        return self._selected[key]

    def _selection(self, part: Part, num_text: int, ghost: bool) -> Selection:
        key = (part.units, part.text, num_text, ghost)
        if key not in self._selected:
            mask = self._mask(part, num_text, ghost)
            index = None if mask is None else mask.nonzero().squeeze(1)
            self._selected[key] = Selection(self.size, index)
        return self._selected[key]

    def _mask(self, part: Part, num_text: int, ghost: bool) -> Tensor | None:
        if part.units is None:
            return None
        mask = torch.zeros(self.size, dtype=torch.bool)
        for units in ranges_of(part.units):
            mask |= (self.owner >= units.start) & (self.owner < units.stop)
        text = self.owner <= _FIRST_TEXT
        if part.text is not None:
            k, n = part.text
            number = _FIRST_TEXT - self.owner
            mask |= text & (number >= num_text * k // n) & (number < num_text * (k + 1) // n)
        if ghost and text.any() and not (mask & text).any():
            mask |= self.owner == text_token(0)
        return mask
