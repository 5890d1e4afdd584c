"""The cost of a request in seconds and bytes, and how far its images are from those of one process.

A sampler counts while it runs (`SamplingStatistics`), a rank adds what it has read and sent outside, and
rank 0 joins these for the user (`SamplingReport`):

pipefusion, num_patches=4, warmup_steps=1, on parallel=2
20 steps      0.41 s each; 8.3 s in all, 9.1 s with encoding and decoding
bytes sent    hidden 1.2 MiB, latents 38.0 KiB, result 2.0 KiB
weights       rank 0: 8.1 MiB, rank 1: 7.9 MiB; the whole denoiser has 14.2 MiB
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from lightning_diffpipe.clock import clock_for
from lightning_diffpipe.comm.links import Links, Traffic


@dataclass
class SamplingStatistics:
    """Counts and times of one request on one rank.

    Attributes:
        step_s: Seconds from the end of one denoising step to the end of the next, on this rank, without what is
            found out about the model on the way.
        num_synchronous: Synchronous steps at the start, where the method has such.
        resident_bytes: Bytes of the denoiser's parameters on this rank.
        is_finite: Whether the final latents of this rank's samples are finite.
    """

    traffic: Traffic = field(default_factory=Traffic)
    step_s: list[float] = field(default_factory=list)
    total_s: float = 0.0
    num_synchronous: int | None = None
    resident_bytes: int = 0
    is_finite: bool = True

    def followed_by(self, other: SamplingStatistics) -> SamplingStatistics:
        """Joins the statistics of two parts of a request."""
        counts = self.num_synchronous, other.num_synchronous
        return SamplingStatistics(
            self.traffic.plus(other.traffic),
            self.step_s + other.step_s,
            self.total_s + other.total_s,
            None if None in counts else sum(counts),
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
        statistics: Receives the counts and times.
        device: Device of the model, on which steps are timed, as a host queues work of a GPU long before it runs.
    """

    def __init__(self, statistics: SamplingStatistics, device: torch.device) -> None:
        self._statistics = statistics
        self._origin_s = time.perf_counter()
        self._clock = clock_for(device)
        self._ends = [self._clock.stamp()]
        self._excluded: list[tuple[int, Any, Any]] = []  # in which step, from when to when

    @contextlib.contextmanager
    def learning(self) -> Iterator[None]:
        """Excludes everything inside from the time of steps: it is done once for many requests."""
        start = self._clock.stamp()
        try:
            yield
        finally:
            self._excluded.append((len(self._ends) - 1, start, self._clock.stamp()))

    def step_done(self) -> None:
        """Ends a denoising step."""
        self._ends.append(self._clock.stamp())

    def stop(self) -> None:
        """Ends the request; waits for the device."""
        self._clock.settle()
        seconds = self._clock.seconds
        self._statistics.step_s = [seconds(*ends) for ends in itertools.pairwise(self._ends)]
        for step, start, stop in self._excluded:
            self._statistics.step_s[step] -= seconds(start, stop)
        self._statistics.total_s = time.perf_counter() - self._origin_s


@dataclass(frozen=True)
class SamplingReport:
    """One request on all ranks.

    Attributes:
        mesh: Sizes of the axes, as text.
        num_patches: Patches of PipeFusion; None for others.
        warmup_steps: Sampler warm-up, the number found if it was `"auto"`; None for exact methods.
        reason: Why this method, if it was chosen automatically.
        step_s: Seconds of one denoising step: the median over steps, of the slowest rank.
        sampling_s: Seconds of the denoising loop.
        bytes_sent: Bytes by kind, over all ranks.
        messages_sent: Messages by kind, over all ranks.
        resident_bytes: Bytes of the denoiser's parameters, by rank.
        whole_bytes: Bytes of all its parameters.
        total_s: Seconds of the whole request on rank 0, with encoding and decoding.
        decoder_calls: Calls of the autoencoder's decoder, by rank; empty if rank 0 decoded alone.
        decoder_bytes: Bytes of the autoencoder's weights, which each rank holds if all decode.
    """

    method: str
    mesh: str
    num_patches: int | None
    warmup_steps: int | None
    reason: str | None
    num_steps: int
    step_s: float
    sampling_s: float
    bytes_sent: dict[str, int]
    messages_sent: dict[str, int]
    resident_bytes: list[int]
    whole_bytes: int
    total_s: float = math.nan
    decoder_calls: list[int] = field(default_factory=list)
    decoder_bytes: int = 0

    def __str__(self) -> str:
        numbers = [f"num_patches={self.num_patches}"] if self.num_patches is not None else []
        if self.warmup_steps is not None:
            numbers.append(f"warmup_steps={self.warmup_steps}")
        sent = [f"{kind} {_size(count)}" for kind, count in sorted(self.bytes_sent.items())]
        weights = [f"rank {rank}: {_size(count)}" for rank, count in enumerate(self.resident_bytes)]
        lines = [
            ", ".join([self.method, *numbers]) + f", on {self.mesh}",
            *([f"{'chosen':13} {self.reason}"] if self.reason else []),
            f"{f'{self.num_steps} steps':13} {self.step_s:.3g} s each; {self.sampling_s:.3g} s in all, "
            f"{self.total_s:.3g} s with encoding and decoding",
            f"{'bytes sent':13} {', '.join(sent) or 'none'}",
            f"{'weights':13} {', '.join(weights)}; the whole denoiser has {_size(self.whole_bytes)}",
        ]
        if self.decoder_calls:
            calls = ", ".join(f"rank {rank}: {num}" for rank, num in enumerate(self.decoder_calls))
            lines.append(
                f"{'decoder calls':13} {calls}; each holds an autoencoder of {_size(self.decoder_bytes)}"
            )
        return "\n".join(lines)


def _size(num_bytes: int) -> str:
    power = min(max(num_bytes.bit_length() - 1, 0) // 10, 3)
    return f"{num_bytes / 1024**power:.1f} {'KMG'[power - 1]}iB" if power else f"{num_bytes} B"


# ---------------------------------------------------------------------------------- quality guard


def psnr(image: Any, reference: Any) -> float:
    """Returns the peak signal-to-noise ratio of two images of 8 bits, in dB; infinite if they are equal.

    Example:
        >>> round(psnr(np.full((2, 2), 10, np.uint8), np.full((2, 2), 11, np.uint8)), 2)
        48.13
    """
    a, b = (np.asarray(x, dtype=np.float64) for x in (image, reference))
    error = float(np.mean((a - b) ** 2))
    return 10 * math.log10(255**2 / error) if error else math.inf


def difference(image: Any, reference: Any, gain: float = 8.0) -> np.ndarray:
    """Returns the absolute difference of two images, enlarged `gain` times so that it can be seen; 8 bits."""
    a, b = (np.asarray(x, dtype=np.float64) for x in (image, reference))
    enlarged: np.ndarray = np.clip(np.abs(a - b) * gain, 0, 255).astype(np.uint8)
    return enlarged
