"""What a sampler counted while it ran: bytes and messages, seconds, spans, and how old was what it read.

Ages are noted where something is read, when asked for, and at no cost otherwise. A *read* is one patch or band in
one call of one layer. Ages are in denoising steps: 0 is fresh, 1 is stale, and None was never written, so that it
is hidden. With M equal patches and N bands

    patch m of PipeFusion     (m + 1) / M of the keys of the image are fresh, (M + 1) / (2 M) on average
    a band of DistriFusion    its share of the rows; 1 / N on average
    a synchronous step        all

Text in joint attention is computed with the first patch, and by every band, so that it is always fresh.

Source:
    PipeFusion, Fang et al. (2024), https://arxiv.org/abs/2405.14430
    DistriFusion, Li et al. (2024), https://arxiv.org/abs/2402.19481
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from lightning_diffpipe.clock import clock_for
from lightning_diffpipe.comm.links import Links, Traffic
from lightning_diffpipe.planning.instruction import Instruction
from lightning_diffpipe.planning.schedules.pipefusion import PipeFusionPlan
from lightning_diffpipe.planning.timeline import Span

Attribute = Literal["step", "layer", "kind", "reader"]


@dataclass(frozen=True, slots=True)
class Read:
    """What one patch or band read in one call of a layer.

    Attributes:
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
        """Joins what all ranks read, of whom some may have noted nothing."""
        return cls([read for each in several if each is not None for read in each.reads])

    def note(
        self, step: int, layer: str, kind: str, reader: int, ages: Mapping[int | None, int]
    ) -> None:
        """Adds a read; see `Read`."""
        there = {age: count for age, count in ages.items() if count}
        self.reads.append(Read(step, layer, kind, reader, there))

    def of(self, **wanted: Any) -> Freshness:
        """Keeps only reads with given attributes, such as `step=1, reader=0`."""
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
        """Groups reads by step, layer, kind or reader, in the order in which they were first seen."""
        groups: dict[Any, Freshness] = {}
        for read in self.reads:
            groups.setdefault(getattr(read, attribute), Freshness()).reads.append(read)
        return groups

    def table(self, rows: Attribute = "step", columns: Attribute = "reader") -> str:
        """Shows mean fresh shares as text, a dash where nothing was read; the mean of each row stands last."""
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


@dataclass
class SamplingStatistics:
    """What was counted of one request on one rank.

    Attributes:
        traffic: What this rank sent and received.
        step_s: Seconds from the end of one denoising step to the end of the next, on this rank, without what is
            found out about the model on the way.
        spans: What this rank did when, in seconds from the start of the request; waiting is not a span.
            On an accelerator these are the times at which work was handed to it.
        total_s: Seconds of the whole request.
        num_synchronous: Synchronous steps at the start, where the method has such.
        plan: What was planned, for PipeFusion.
        freshness: How old was what was read, if that was to be recorded.
    """

    traffic: Traffic = field(default_factory=Traffic)
    step_s: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    total_s: float = 0.0
    num_synchronous: int | None = None
    plan: PipeFusionPlan | None = None
    freshness: Freshness | None = None

    def followed_by(self, other: SamplingStatistics) -> SamplingStatistics:
        """Joins the statistics of two parts of a request; what was planned for one says nothing of both."""
        synchronous = None
        if self.num_synchronous is not None and other.num_synchronous is not None:
            synchronous = self.num_synchronous + other.num_synchronous
        later = [
            replace(span, start_s=span.start_s + self.total_s, stop_s=span.stop_s + self.total_s)
            for span in other.spans
        ]
        freshness = None
        if self.freshness is not None and other.freshness is not None:
            before = len(self.step_s)
            reads = [replace(each, step=each.step + before) for each in other.freshness.reads]
            freshness = Freshness([*self.freshness.reads, *reads])
        return SamplingStatistics(
            self.traffic.plus(other.traffic),
            self.step_s + other.step_s,
            self.spans + later,
            self.total_s + other.total_s,
            synchronous,
            freshness=freshness,
        )


@contextlib.contextmanager
def measured(
    sampler: Any, request: Any, *links: Links, freshness: Freshness | None = None
) -> Iterator[Stopwatch]:
    """Counts everything inside as one request on the rank of the first links, in new statistics of the sampler."""
    before = [each.traffic.copy() for each in links]
    sampler.statistics = statistics = SamplingStatistics(freshness=freshness)
    watch = Stopwatch(statistics, links[0].rank if links else 0, request.latents.device)
    try:
        yield watch
        watch.stop()
    finally:
        for each, start in zip(links, before, strict=True):
            statistics.traffic = statistics.traffic.plus(each.traffic.since(start))


class Stopwatch:
    """Writes spans and steps of one request on one rank.

    Args:
        statistics: Where to.
        rank: Whose spans they are.
        device: Where the model runs; steps are timed there, as a host hands a GPU its work long before.
    """

    def __init__(self, statistics: SamplingStatistics, rank: int, device: torch.device) -> None:
        self.statistics, self._rank = statistics, rank
        self._origin_s = time.perf_counter()
        self._clock = clock_for(device)
        self._ends = [self._clock.stamp()]
        self._apart: list[tuple[int, Any, Any]] = []  # in which step, from when to when
        self._instruction: Instruction | None = None
        self._start_s = 0.0

    @contextlib.contextmanager
    def working(self, instruction: Instruction) -> Iterator[None]:
        """Takes everything inside for work on this instruction, unless it is waiting."""
        self._instruction, self._start_s = instruction, time.perf_counter()
        try:
            yield
        finally:
            self._note()
            self._instruction = None

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Takes everything inside for waiting."""
        self._note()
        try:
            yield
        finally:
            self._start_s = time.perf_counter()

    @contextlib.contextmanager
    def learning(self) -> Iterator[None]:
        """Takes everything inside for no part of a step, but done once for many requests."""
        self._note()
        instruction, self._instruction = self._instruction, None
        start = self._clock.stamp()
        try:
            yield
        finally:
            self._apart.append((len(self._ends) - 1, start, self._clock.stamp()))
            self._instruction, self._start_s = instruction, time.perf_counter()

    def step_done(self) -> None:
        """Ends a denoising step."""
        self._ends.append(self._clock.stamp())

    def stop(self) -> None:
        """Ends the request; waits for the device."""
        self._clock.settle()
        seconds = self._clock.seconds
        self.statistics.step_s = [seconds(*ends) for ends in itertools.pairwise(self._ends)]
        for step, start, stop in self._apart:
            self.statistics.step_s[step] -= seconds(start, stop)
        self.statistics.total_s = time.perf_counter() - self._origin_s

    def _note(self) -> None:
        if self._instruction is None:
            return
        start, stop = self._start_s - self._origin_s, time.perf_counter() - self._origin_s
        self.statistics.spans.append(Span(self._rank, self._instruction, start, stop))
