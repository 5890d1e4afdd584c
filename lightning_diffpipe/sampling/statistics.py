"""What a sampler counted while it ran: bytes and messages on the wire, seconds, spans."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lightning_diffpipe.clock import clock_for
from lightning_diffpipe.comm.links import Links, Traffic
from lightning_diffpipe.planning.instruction import Instruction
from lightning_diffpipe.planning.sampling.pipefusion import PipeFusionPlan
from lightning_diffpipe.planning.timeline import Span
from lightning_diffpipe.sampling.freshness import Freshness


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
        """The statistics of two parts of a request; what was planned for one of them says nothing of both."""
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
    """Everything inside is one request on the rank of the first links; the sampler gets new statistics of it."""
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
        """Everything inside is work on this instruction, unless it is waiting."""
        self._instruction, self._start_s = instruction, time.perf_counter()
        try:
            yield
        finally:
            self._note()
            self._instruction = None

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Everything inside is waiting."""
        self._note()
        try:
            yield
        finally:
            self._start_s = time.perf_counter()

    @contextlib.contextmanager
    def learning(self) -> Iterator[None]:
        """Everything inside is no part of a step, but done once for many requests."""
        self._note()
        instruction, self._instruction = self._instruction, None
        start = self._clock.stamp()
        try:
            yield
        finally:
            self._apart.append((len(self._ends) - 1, start, self._clock.stamp()))
            self._instruction, self._start_s = instruction, time.perf_counter()

    def step_done(self) -> None:
        """A denoising step ends here."""
        self._ends.append(self._clock.stamp())

    def stop(self) -> None:
        """The request ends here; waits for the device."""
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
