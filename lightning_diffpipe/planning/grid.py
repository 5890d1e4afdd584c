"""Timelines as text: one row for each rank, one cell for each tick.

    rank 0 | F0 F1  .  . B0 -- B1 --
    rank 1 |  . F0 F1 B0 -- B1 --  .

A cell shows the instruction that begins in it, `--` while that goes on, and a point while the
rank has nothing to do. The number of the stage is left out on ranks that hold one stage only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from lightning_diffpipe.planning.instruction import Instruction, Staged, without_stage


class Drawable(Protocol):
    """What can be drawn: a span of a timeline."""

    @property
    def rank(self) -> int: ...  # noqa: D102
    @property
    def instruction(self) -> Instruction: ...  # noqa: D102
    @property
    def start_s(self) -> float: ...  # noqa: D102
    @property
    def stop_s(self) -> float: ...  # noqa: D102


def draw(
    spans: Sequence[Drawable],
    num_ranks: int,
    tick_s: float | None = None,
    max_columns: int = 120,
    notes: Mapping[int, str] | None = None,
) -> str:
    """Draws spans as one row of cells for each rank.

    Args:
        spans: What to draw.
        num_ranks: Number of rows.
        tick_s: Seconds of one cell; chosen if None: exact where durations are small multiples of
            each other, otherwise so that a row has at most `max_columns` characters.
        max_columns: Widest row, for a chosen tick.
        notes: Text behind the row of a rank.
    """
    labels = _labels(spans)
    width = max((len(label) for label in labels), default=2)
    tick_s = tick_s or _tick(spans, max(max_columns // (width + 1), 8))
    num_cells = max((round(span.stop_s / tick_s) for span in spans), default=0)
    rows = [["."] * num_cells for _ in range(num_ranks)]
    for span, label in zip(spans, labels, strict=True):
        start, stop = round(span.start_s / tick_s), round(span.stop_s / tick_s)
        row = rows[span.rank]
        if span.stop_s > span.start_s and start == stop and start < num_cells and row[start] == ".":
            row[start] = label  # Too short for a cell, yet worth showing where there is room.
        elif stop > start:
            row[start:stop] = [label] + ["-" * min(width, 2)] * (stop - start - 1)
    name_width = len(str(num_ranks - 1))
    lines = []
    for rank, row in enumerate(rows):
        cells = "".join(f" {cell:>{width}}" for cell in row)
        note = (notes or {}).get(rank, "")
        lines.append(f"rank {rank:>{name_width}} |{cells}{note}")
    return "\n".join(lines)


def _labels(spans: Sequence[Drawable]) -> list[str]:
    """The text of every span, without the stage where its rank has one stage only."""
    stages: dict[int, set[int]] = {}
    for span in spans:
        if isinstance(span.instruction, Staged):
            stages.setdefault(span.rank, set()).add(span.instruction.stage)
    only = {rank: next(iter(held)) if len(held) == 1 else None for rank, held in stages.items()}
    return [without_stage(span.instruction, only.get(span.rank)) for span in spans]


def _tick(spans: Sequence[Drawable], max_cells: int) -> float:
    """A tick that divides all times, else one that makes `max_cells` cells."""
    durations = [span.stop_s - span.start_s for span in spans if span.stop_s > span.start_s]
    if not durations:
        return 1.0
    end, shortest = max(span.stop_s for span in spans), min(durations)
    times = {time for span in spans for time in (span.start_s, span.stop_s)}
    for parts in (1, 2, 3, 4):
        tick = shortest / parts
        if end / tick > 4 * max_cells:
            break
        if all(abs(time / tick - round(time / tick)) < 1e-6 for time in times):
            return tick
    return end / max_cells
