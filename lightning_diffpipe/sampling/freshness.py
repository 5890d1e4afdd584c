"""How old is what patches and bands read? Noted where it is read, when asked for, and at no cost otherwise.

A *read* is one patch or band in one call of one layer. Ages are in denoising steps: 0 is fresh, 1 is stale, and
None was never written, so that it is hidden. With M equal patches and N bands

    patch m of PipeFusion     (m + 1) / M of the keys of the image are fresh, (M + 1) / (2 M) on average
    a band of DistriFusion    its share of the rows; 1 / N on average
    a synchronous step        all

Text in joint attention is computed with the first patch, and by every band, so that it is always fresh.

Source:
    PipeFusion, Fang et al. (2024), https://arxiv.org/abs/2405.14430
    DistriFusion, Li et al. (2024), https://arxiv.org/abs/2402.19481
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Attribute = Literal["step", "layer", "kind", "reader"]


@dataclass(frozen=True, slots=True)
class Read:
    """What one patch or band read in one call of a layer.

    Attributes:
        step: The denoising step that read.
        layer: Name of the block, or of the module.
        kind: "key_value", counted in tokens, or "halo" or "statistics", in rows.
        reader: Which patch, or band.
        ages: How much there was of each age, its own included.
    """

    step: int
    layer: str
    kind: str
    reader: int
    ages: Mapping[int | None, int]

    @property
    def fresh_share(self) -> float:
        """How much of it was computed in this step."""
        return self.ages.get(0, 0) / sum(self.ages.values())


@dataclass
class Freshness:
    """Everything that was read in a request, by one rank or by all.

    Attributes:
        reads: In the order in which they happened.

    Example:
        >>> freshness = Freshness()
        >>> freshness.note(0, "blocks.0", "key_value", 0, {0: 8})
        >>> freshness.note(0, "blocks.0", "key_value", 1, {0: 8})
        >>> freshness.note(1, "blocks.0", "key_value", 0, {0: 4, 1: 4})
        >>> freshness.note(1, "blocks.0", "key_value", 1, {0: 8, 1: 0})
        >>> print(freshness)
          step      0      1   mean
             0  1.000  1.000  1.000
             1  0.500  1.000  0.750
        >>> freshness.fresh_share, freshness.of(step=1, reader=0).ages
        (0.875, Counter({0: 4, 1: 4}))
    """

    reads: list[Read] = field(default_factory=list)

    @classmethod
    def joined(cls, several: Iterable[Freshness | None]) -> Freshness:
        """What all ranks read, of whom some may have noted nothing."""
        return cls([read for each in several if each is not None for read in each.reads])

    def note(
        self, step: int, layer: str, kind: str, reader: int, ages: Mapping[int | None, int]
    ) -> None:
        """Adds a read; see `Read`."""
        there = {age: count for age, count in ages.items() if count}
        self.reads.append(Read(step, layer, kind, reader, there))

    def of(self, **wanted: Any) -> Freshness:
        """Only reads with given attributes, such as `step=1, reader=0`."""
        return Freshness(
            [
                read
                for read in self.reads
                if all(getattr(read, name) == value for name, value in wanted.items())
            ]
        )

    @property
    def fresh_share(self) -> float:
        """The mean over all reads; nan if there are none, as in one band alone."""
        shares = [read.fresh_share for read in self.reads]
        return sum(shares) / len(shares) if shares else math.nan

    @property
    def ages(self) -> Counter[int | None]:
        """How much there was of each age."""
        total: Counter[int | None] = Counter()
        for read in self.reads:
            total.update(read.ages)
        return total

    def by(self, attribute: Attribute) -> dict[Any, Freshness]:
        """The reads of each step, layer, kind or reader, in the order in which they were first seen."""
        groups: dict[Any, Freshness] = {}
        for read in self.reads:
            groups.setdefault(getattr(read, attribute), Freshness()).reads.append(read)
        return groups

    def table(self, rows: Attribute = "step", columns: Attribute = "reader") -> str:
        """Mean fresh shares as text, a dash where nothing was read; the mean of each row stands last."""
        groups, heads = self.by(rows), list(self.by(columns))
        width = max([6, len(rows), *(len(str(name)) for name in groups)])
        widths = [max(7, len(str(head)) + 2) for head in (*heads, "mean")]
        titles = zip((*heads, "mean"), widths, strict=True)
        lines = [f"{rows:>{width}}" + "".join(f"{head!s:>{size}}" for head, size in titles)]
        for name, group in groups.items():
            cells = group.by(columns)
            shares = [cells[head].fresh_share if head in cells else None for head in heads]
            texts = ["-" if x is None else f"{x:.3f}" for x in (*shares, group.fresh_share)]
            padded = [f"{text:>{size}}" for text, size in zip(texts, widths, strict=True)]
            lines.append(f"{name!s:>{width}}" + "".join(padded))
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()
