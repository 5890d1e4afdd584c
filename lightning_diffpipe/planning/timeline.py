"""A timeline: what every rank does when. Planned by the simulator, or measured by the runtime.

    rank 0 | F0 F1  .  . B0 -- B1 --
    rank 1 |  . F0 F1 B0 -- B1 --  .

As text, a timeline has one row for each rank and one cell for each tick. A cell shows the instruction that
begins in it, `--` while that goes on, and a point in a bubble. The number of the stage is left out on ranks that
hold one stage only. Both kinds of timeline are the same type, so that they can be compared.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_diffpipe.planning.instruction import Instruction, Staged, without_stage
from lightning_diffpipe.planning.schedule import Message


@dataclass(frozen=True, slots=True)
class Span:
    """One instruction at work on one rank; times in seconds from the start of the iteration."""

    rank: int
    instruction: Instruction
    start_s: float
    stop_s: float

    @property
    def duration_s(self) -> float:
        """Duration, in seconds."""
        return self.stop_s - self.start_s


@dataclass(frozen=True, slots=True)
class Transfer:
    """One message on its link; times in seconds from the start of the iteration."""

    message: Message
    start_s: float
    stop_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The spans of all ranks of one pipeline over one iteration.

    Attributes:
        spans: Work of the ranks; spans of one rank do not overlap. Waiting is not a span.
        num_ranks: Ranks of the pipeline, also those without a span.
        transfers: The messages between ranks, where they are known.
    """

    spans: tuple[Span, ...]
    num_ranks: int
    transfers: tuple[Transfer, ...] = ()

    @property
    def iteration_s(self) -> float:
        """Time at which the last rank is done, in seconds."""
        return max((span.stop_s for span in self.spans), default=0.0)

    def spans_of(self, rank: int) -> tuple[Span, ...]:
        """Returns the spans of one rank in chronological order."""
        return tuple(sorted((s for s in self.spans if s.rank == rank), key=lambda s: s.start_s))

    def busy_s(self, rank: int) -> float:
        """Returns the seconds this rank works."""
        return sum(span.duration_s for span in self.spans if span.rank == rank)

    def idle_by_rank_s(self) -> tuple[float, ...]:
        """Returns the seconds each rank has nothing to do before the last rank is done."""
        busy_s = [0.0] * self.num_ranks
        for span in self.spans:
            busy_s[span.rank] += span.duration_s
        end_s = self.iteration_s
        return tuple(max(end_s - busy, 0.0) for busy in busy_s)  # rounding may add up to more

    @property
    def bubble_ratio(self) -> float:
        """Idle time of all ranks, divided by iteration time times ranks.

        Source:
            DiffusionPipe, Tian et al. (2024), https://arxiv.org/abs/2405.01248
        """
        total_s = self.iteration_s * self.num_ranks
        busy_s = sum(span.duration_s for span in self.spans)
        return max(1 - busy_s / total_s, 0.0) if total_s else 0.0

    def __str__(self) -> str:
        return self.render()

    def render(
        self,
        tick_s: float | None = None,
        max_columns: int = 120,
        notes: Mapping[int, str] | None = None,
    ) -> str:
        """Returns spans as one row of cells for each rank.

        `tick_s` are seconds of one cell; chosen if None: exact where durations are small multiples of each other,
        otherwise so that a row has at most `max_columns` characters. `notes` are texts after the rows of ranks.
        """
        stages: dict[int, set[int]] = {}
        for span in self.spans:
            if isinstance(span.instruction, Staged):
                stages.setdefault(span.rank, set()).add(span.instruction.stage)
        only = {rank: min(hosted) for rank, hosted in stages.items() if len(hosted) == 1}
        labels = [without_stage(span.instruction, only.get(span.rank)) for span in self.spans]
        width = max((len(label) for label in labels), default=2)
        tick_s = tick_s or _tick(self.spans, max(max_columns // (width + 1), 8))
        num_cells = max((round(span.stop_s / tick_s) for span in self.spans), default=0)
        rows = [["."] * num_cells for _ in range(self.num_ranks)]
        for span, label in zip(self.spans, labels, strict=True):
            start, stop = round(span.start_s / tick_s), round(span.stop_s / tick_s)
            row = rows[span.rank]
            if (
                span.stop_s > span.start_s
                and start == stop
                and start < num_cells
                and row[start] == "."
            ):
                row[start] = label  # Too short for a cell, yet worth showing where there is room.
            elif stop > start:
                row[start:stop] = [label] + ["-" * min(width, 2)] * (stop - start - 1)
        name_width, notes = len(str(self.num_ranks - 1)), notes or {}
        return "\n".join(
            f"rank {rank:>{name_width}} |{''.join(f' {cell:>{width}}' for cell in row)}{notes.get(rank, '')}"
            for rank, row in enumerate(rows)
        )


def _tick(spans: Sequence[Span], max_cells: int) -> float:
    """Returns a tick that divides all times, else one that makes `max_cells` cells."""
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
