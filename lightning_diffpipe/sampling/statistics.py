"""What a sampler counted while it ran: bytes and messages, and seconds of steps."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_diffpipe.clock import clock_for
from lightning_diffpipe.comm.links import Links, Traffic


@dataclass
class SamplingStatistics:
    """What was counted of one request on one rank.

    Attributes:
        traffic: What this rank sent and received.
        step_s: Seconds from the end of one denoising step to the end of the next, on this rank, without what is
            found out about the model on the way.
        total_s: Seconds of the whole request.
        num_synchronous: Synchronous steps at the start, where the method has such.
    """

    traffic: Traffic = field(default_factory=Traffic)
    step_s: list[float] = field(default_factory=list)
    total_s: float = 0.0
    num_synchronous: int | None = None

    def followed_by(self, other: SamplingStatistics) -> SamplingStatistics:
        """Joins the statistics of two parts of a request."""
        synchronous = None
        if self.num_synchronous is not None and other.num_synchronous is not None:
            synchronous = self.num_synchronous + other.num_synchronous
        return SamplingStatistics(
            self.traffic.plus(other.traffic),
            self.step_s + other.step_s,
            self.total_s + other.total_s,
            synchronous,
        )


@contextlib.contextmanager
def measured(sampler: Any, request: Any, *links: Links) -> Iterator[Stopwatch]:
    """Counts everything inside as one request, in new statistics of the sampler."""
    before = [each.traffic.copy() for each in links]
    sampler.statistics = statistics = SamplingStatistics()
    watch = Stopwatch(statistics, request.latents.device)
    try:
        yield watch
        watch.stop()
    finally:
        for each, start in zip(links, before, strict=True):
            statistics.traffic = statistics.traffic.plus(each.traffic.since(start))


class Stopwatch:
    """Times the steps of one request on one rank.

    Args:
        statistics: Where to write them.
        device: Where the model runs; steps are timed there, as a host hands a GPU its work long before.
    """

    def __init__(self, statistics: SamplingStatistics, device: torch.device) -> None:
        self._statistics = statistics
        self._origin_s = time.perf_counter()
        self._clock = clock_for(device)
        self._ends = [self._clock.stamp()]
        self._apart: list[tuple[int, Any, Any]] = []  # in which step, from when to when

    @contextlib.contextmanager
    def learning(self) -> Iterator[None]:
        """Takes everything inside for no part of a step, but done once for many requests."""
        start = self._clock.stamp()
        try:
            yield
        finally:
            self._apart.append((len(self._ends) - 1, start, self._clock.stamp()))

    def step_done(self) -> None:
        """Ends a denoising step."""
        self._ends.append(self._clock.stamp())

    def stop(self) -> None:
        """Ends the request; waits for the device."""
        self._clock.settle()
        seconds = self._clock.seconds
        self._statistics.step_s = [seconds(*ends) for ends in itertools.pairwise(self._ends)]
        for step, start, stop in self._apart:
            self._statistics.step_s[step] -= seconds(start, stop)
        self._statistics.total_s = time.perf_counter() - self._origin_s
