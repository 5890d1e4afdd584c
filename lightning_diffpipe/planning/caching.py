"""Cache or fill? What storing the encodings of frozen layers saves, against running them in bubbles.

    fill    every pass:  steps x T(filled)
    cache   first pass:  steps x (T(filled) + writing)
            others:      steps x (T(without frozen layers) + reading)

Steps are those of plans, simulated; reading and writing are bytes over the rate of the disk, each rank its
own samples, counted in full although bubbles may hide them. Layers that follow noise or timesteps
cannot be cached and stay in both.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

from lightning_diffpipe.errors import ConfigurationError, require_number
from lightning_diffpipe.planning.cluster import Cluster
from lightning_diffpipe.planning.options import PlanOptions
from lightning_diffpipe.planning.plan import PipelinePlan
from lightning_diffpipe.planning.profile import EncoderProfile, ModelProfile, Seconds
from lightning_diffpipe.planning.search import find_plan

DISK_BYTES_PER_S = 200e6
"""What one rank reads or writes, if nothing else is known: a network disk or a busy local one."""


@dataclass(frozen=True, slots=True)
class CacheAdvice:
    """The times of both ways, predicted.

    Attributes:
        filled_step_s: A step with frozen layers in bubbles.
        cached_step_s: A step that reads their results, reading included.
        writing_s: What the first pass pays for each step on top; later ones as much for reading.
        num_passes: Passes over the data, if known.
        sample_bytes: What is stored of each sample.
        disk_bytes: What is stored in the end, if known.
        cached: The encoders that can be stored.
        computed: Those that cannot.
        certain: Whether the profile says that what is stored follows from the sample alone.
        disk_bytes_per_s: What each rank was taken to read and write.
    """

    filled_step_s: float
    cached_step_s: float
    writing_s: float
    num_passes: float | None
    sample_bytes: int
    disk_bytes: int | None
    cached: tuple[str, ...]
    computed: tuple[str, ...] = ()
    certain: bool = True
    disk_bytes_per_s: float = DISK_BYTES_PER_S

    @property
    def saved_share(self) -> float:
        """Share of the run, or of a later pass if its length is not known, that a cache saves."""
        if not self.filled_step_s:
            return 0.0
        first = 0.0 if self.num_passes is None else min(1.0, 1.0 / self.num_passes)
        step_s = first * (self.filled_step_s + self.writing_s) + (1 - first) * self.cached_step_s
        return 1 - step_s / self.filled_step_s

    @property
    def use_cache(self) -> bool:
        """Whether the cache saves at least 2%; less is not worth a disk."""
        return bool(self.cached) and self.saved_share > 0.02

    @property
    def break_even_passes(self) -> float:
        """Passes after which the cache has paid for its writing; infinite if it never does."""
        saved_s = self.filled_step_s - self.cached_step_s
        return 1 + self.writing_s / saved_s if saved_s > 0 else float("inf")


def advise(
    profile: ModelProfile,
    cluster: Cluster,
    options: PlanOptions,
    num_samples: int | None = None,
    num_passes: float | None = None,
    cacheable: Collection[str] | None = None,
    disk_bytes_per_s: float = DISK_BYTES_PER_S,
    filled: PipelinePlan | None = None,
    within_s: float = math.inf,
) -> CacheAdvice:
    """Compares both ways by their plans.

    Args:
        profile: What layers cost.
        cluster: Where they run.
        options: Everything else.
        num_samples: Samples of the data set, if known.
        num_passes: Passes over it, if known; samples that are augmented differ in each pass and count as
            one pass.
        cacheable: Encoders whose results follow from the sample alone; all but those of which the profile
            says that they do not, if not given.
        disk_bytes_per_s: What each rank reads and writes.
        filled: The plan without a cache; searched with `filling="auto"` if not given.
        within_s: Seconds after which the best plans found so far are good enough.

    Raises:
        ConfigurationError: A name that is no encoder of the profile, or a rate or count that cannot be.
        PlanError: No plan exists.
    """
    names = [encoder.name for encoder in profile.encoders]
    unknown = set(cacheable or ()) - set(names)
    if unknown:
        raise ConfigurationError(f"the profile has no encoders {sorted(unknown)}, but {names}")
    check_data(disk_bytes_per_s, num_samples, num_passes)
    wanted = cacheable_encoders(profile) if cacheable is None else cacheable
    stored = tuple(name for name in names if name in wanted)
    if filled is None:
        wish = replace(options, filling="auto")
        filled = find_plan(profile, cluster, wish, within_s=within_s)
    # Frozen work that takes no time fills no bubbles.
    wish = replace(options, filling="none" if len(stored) == len(names) else "auto")
    reading, disk_s = with_stored(profile, stored, cluster, options, disk_bytes_per_s)
    cached = find_plan(reading, cluster, wish, within_s=within_s)
    sample_bytes = sum(e.disk_bytes_per_sample for e in profile.encoders if e.name in stored)
    return CacheAdvice(
        filled.planned.iteration_s,
        cached.planned.iteration_s + disk_s,
        disk_s,
        num_passes,
        sample_bytes,
        None if num_samples is None else num_samples * sample_bytes,
        stored,
        tuple(name for name in names if name not in stored),
        all(e.cacheable for e in profile.encoders if e.name in stored) or cacheable is not None,
        disk_bytes_per_s,
    )


def check_data(
    disk_bytes_per_s: object, num_samples: object = None, num_passes: object = None
) -> None:
    """Refuses what cannot be of a disk and a data set; the size of the latter need not be known.

    Raises:
        ConfigurationError: Names the one that is no positive number.
    """
    require_number("disk_bytes_per_s", disk_bytes_per_s, above=0)
    for name, value in (("num_samples", num_samples), ("num_passes", num_passes)):
        if value is not None:
            require_number(name, value, above=0)


def cacheable_encoders(profile: ModelProfile) -> tuple[str, ...]:
    """Returns all but those of which the profile says that their results do not follow from the sample alone."""
    return tuple(e.name for e in profile.encoders if e.cacheable is not False)


def with_stored(
    profile: ModelProfile,
    names: Collection[str],
    cluster: Cluster,
    options: PlanOptions,
    disk_bytes_per_s: float,
) -> tuple[ModelProfile, float]:
    """Returns the profile of a run that reads results of some encoders, and the seconds of reading in each step.

    They take no time then, but stay in memory; each rank reads its share of a step's samples.
    """
    none, encoders, sample_bytes = Seconds.per_sample(0.0), list[EncoderProfile](), 0
    for encoder in profile.encoders:
        if encoder.name in names:
            sample_bytes += encoder.disk_bytes_per_sample
            layers = tuple(replace(layer, forward_s=none) for layer in encoder.layers)
            encoder = replace(encoder, layers=layers)
        encoders.append(encoder)
    read_s = options.global_batch_size / cluster.num_ranks * sample_bytes / disk_bytes_per_s
    return replace(profile, encoders=tuple(encoders)), read_s
