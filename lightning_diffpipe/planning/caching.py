"""Cache or fill? What storing the encodings of frozen layers saves, against running them in bubbles.

    fill    every pass:  steps x T(filled)
    cache   first pass:  steps x (T(filled) + writing)
            others:      steps x (T(without frozen layers) + reading)

Steps are those of plans, simulated; reading and writing are bytes over the rate of the disk, each rank its
own samples, counted in full although bubbles may hide them. Layers that follow noise or timesteps
cannot be cached and stay in both.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.planning.cluster import Cluster
from lightning_diffpipe.planning.options import PlanOptions
from lightning_diffpipe.planning.profile import EncoderProfile, ModelProfile
from lightning_diffpipe.planning.search import find_plan

DISK_BYTES_PER_S = 200e6
"""What one rank reads or writes, if nothing else is known: a network disk or a busy local one."""


@dataclass(frozen=True, slots=True)
class CacheAdvice:
    """The times of both ways, predicted.

    Attributes:
        filled_step_s: A step with frozen layers in bubbles.
        cached_step_s: A step that reads their results, reading included.
        writing_s: What the first pass pays for each step on top.
        num_steps: Steps of a pass.
        num_passes: Passes over the data.
        disk_bytes: What is stored in the end.
        cached: The encoders that can be stored.
    """

    filled_step_s: float
    cached_step_s: float
    writing_s: float
    num_steps: int
    num_passes: float
    disk_bytes: int
    cached: tuple[str, ...]

    @property
    def filled_s(self) -> float:
        """The whole run with filling alone."""
        return self.num_passes * self.num_steps * self.filled_step_s

    @property
    def cached_s(self) -> float:
        """The whole run with a cache, filling in its first pass."""
        first = min(self.num_passes, 1.0)
        others = max(self.num_passes - 1.0, 0.0)
        first_step_s = self.filled_step_s + self.writing_s
        return self.num_steps * (first * first_step_s + others * self.cached_step_s)

    @property
    def use_cache(self) -> bool:
        """Whether the cache saves at least 2% of the run; less is not worth a disk."""
        return self.cached_s < 0.98 * self.filled_s

    @property
    def break_even_passes(self) -> float:
        """Passes after which the cache has paid for its writing; infinite if it never does."""
        saved_s = self.filled_step_s - self.cached_step_s
        return 1 + self.writing_s / saved_s if saved_s > 0 else float("inf")

    def __str__(self) -> str:
        if not self.cached:
            return "Fill: no frozen layer can be stored."
        word = "Cache" if self.use_cache else "Fill"
        gain = 1 - self.cached_s / self.filled_s if self.filled_s else 0.0
        return (
            f"{word}: {self.filled_step_s:.4g} s a step with frozen layers in bubbles, "
            f"{self.cached_step_s:.4g} s when {', '.join(self.cached)} are read from disk; over "
            f"{self.num_passes:g} passes the cache takes {100 * abs(gain):.1f}% "
            f"{'less' if gain >= 0 else 'more'} time and {self.disk_bytes / 1e9:.3g} GB of disk "
            f"(even after {self.break_even_passes:.2g} passes)."
        )


def advise(
    profile: ModelProfile,
    cluster: Cluster,
    options: PlanOptions,
    num_samples: int,
    num_passes: float,
    cacheable: Collection[str] | None = None,
    disk_bytes_per_s: float = DISK_BYTES_PER_S,
) -> CacheAdvice:
    """Compares both ways by their plans.

    Args:
        profile: What layers cost.
        cluster: Where they run.
        options: Everything else; its `filling` is ignored.
        num_samples: Samples of the data set.
        num_passes: Passes over it; samples that are augmented differ in each pass and count as one pass.
        cacheable: Encoders whose results follow from the sample alone; all if not given.
        disk_bytes_per_s: What each rank reads and writes.

    Raises:
        ConfigurationError: A name that is no encoder of the profile, or a rate or count that cannot be.
        PlanError: No plan exists.
    """
    names = [encoder.name for encoder in profile.encoders]
    stored = tuple(names if cacheable is None else (n for n in names if n in cacheable))
    unknown = set(cacheable or ()) - set(names)
    if unknown:
        raise ConfigurationError(f"the profile has no encoders {sorted(unknown)}, but {names}")
    if disk_bytes_per_s <= 0 or num_samples < 1 or num_passes <= 0:
        raise ConfigurationError(
            "disk_bytes_per_s, num_samples and num_passes must be positive; got "
            f"{disk_bytes_per_s}, {num_samples} and {num_passes}"
        )
    kept = tuple(encoder for encoder in profile.encoders if encoder.name in stored)
    rest = replace(profile, encoders=_independent(profile, stored))
    filled = find_plan(profile, cluster, replace(options, filling="auto"))
    without = find_plan(rest, cluster, replace(options, filling="auto"))
    sample_bytes = sum(encoder.layers[-1].output_bytes_per_sample for encoder in kept)
    share = options.global_batch_size / cluster.num_ranks
    disk_s = share * sample_bytes / disk_bytes_per_s
    return CacheAdvice(
        filled.planned.iteration_s,
        without.planned.iteration_s + disk_s,
        disk_s,
        max(num_samples // options.global_batch_size, 1),
        num_passes,
        round(num_samples * sample_bytes),
        stored,
    )


def _independent(profile: ModelProfile, stored: Collection[str]) -> tuple[EncoderProfile, ...]:
    """The encoders that still run; what they needed of stored ones is at hand."""
    return tuple(
        replace(encoder, needs=tuple(n for n in encoder.needs if n not in stored))
        for encoder in profile.encoders
        if encoder.name not in stored
    )
