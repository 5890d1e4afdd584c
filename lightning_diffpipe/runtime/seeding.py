"""Random numbers that depend on what is computed, not on when or where.

Every microbatch of every step has a seed of its own, made from the run's seed, the data-parallel rank,
the number of the batch and the number of the microbatch. All ranks of a pipeline make the same one, so
noise and timesteps agree on all stages, and filling, restarts and other cuts change nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

from lightning_diffpipe.graph import rng


def derived_seed(*parts: int | str) -> int:
    """Returns a 63-bit seed made from numbers and words, the same on every machine.

    Example:
        >>> derived_seed(1, 0, 5, 2) == derived_seed(1, 0, 5, 2) != derived_seed(1, 1, 5, 2)
        True
    """
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def microbatch_seed(seed: int, pipeline: int, batch_index: int, microbatch: int) -> int:
    """Seeds what a microbatch draws outside its layers; the same on all ranks of its pipeline."""
    return derived_seed(seed, pipeline, batch_index, microbatch)


@contextlib.contextmanager
def isolated_random_numbers(seed: int) -> Iterator[None]:
    """Seeds torch (CPU and this rank's GPU), `random` and numpy inside, and puts their states back afterwards."""
    with rng.preserved(host=True):
        rng.seed_all(seed, host=True)
        yield
