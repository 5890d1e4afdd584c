"""A data loader that gives every rank of a pipeline the same batches.

All ranks of a pipeline load the same samples, but what a sample looks like may be random: crops, flips,
caption dropout. Those draws come from the main process or from loader workers, and Lightning seeds both
so that ranks differ, or lets them drift apart as soon as one rank draws one number more. Here every
fetch is seeded by the run's seed, the data-parallel rank, the pass over the data and the batch, inside
isolated random states, and workers are seeded alike.

A wrong guess would train on mixed-up samples without any error, so the first batches of every pass are
compared over the pipeline.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from lightning_diffpipe.runtime.seeding import derived_seed, isolated_random_numbers

_NUM_COMPARED = 2


class AlignedLoader:
    """Wraps a loader; everything it does not do itself is the wrapped loader's.

    Args:
        loader: The user's loader, with its sampler already in place.
        seed: Seed of the run.
        data_parallel_rank: Which share of the data this rank's pipeline sees.
        pass_index: Tells which pass over the data begins, e.g. the epoch; survives a resume.
        compare: Given a batch's checksum, raises if another rank of the pipeline has another.
    """

    def __init__(
        self,
        loader: Any,
        seed: int,
        data_parallel_rank: int,
        pass_index: Callable[[], int],
        compare: Callable[[int, int], None],
    ) -> None:
        self._loader = loader
        self._seed = seed
        self._data_parallel_rank = data_parallel_rank
        self._compare = compare
        self._pass_index = pass_index
        if isinstance(loader, DataLoader) and loader.num_workers and not loader.worker_init_fn:
            # Workers seed torch from the iterator's base seed but leave numpy to us; set before
            # Lightning would seed them by the global rank, which differs inside a pipeline.
            loader.worker_init_fn = _seed_worker

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        # Lightning reads sampler, dataset and more: without the sampler, `set_epoch` would never
        # arrive and every epoch would have the same order. A loader that is not stateful must not
        # look stateful.
        return getattr(self.__dict__["_loader"], name)

    def __iter__(self) -> Iterator[Any]:
        index = self._pass_index()
        with isolated_random_numbers(self._seed_of(index, -1)):
            batches = iter(self._loader)
        number = 0
        while True:
            with isolated_random_numbers(self._seed_of(index, number)):
                batch = next(batches, _END)
            if batch is _END:
                return
            if number < _NUM_COMPARED:
                self._compare(number, checksum(batch))
            yield batch
            number += 1

    def _seed_of(self, index: int, number: int) -> int:
        return derived_seed(self._seed, "data", self._data_parallel_rank, index, number)


_END = object()


def checksum(batch: Any) -> int:
    """A number that differs for batches that differ in any value."""
    total = 0
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor):
            value = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        else:
            value = repr(leaf).encode()
        total = zlib.crc32(value, total)
    return total


def _seed_worker(worker: int) -> None:
    """Seeds a worker from the iterator's base seed, which was drawn for this pass and pipeline."""
    information = get_worker_info()
    assert information is not None
    own = derived_seed(information.seed, "worker", worker)
    random.seed(own)
    np.random.seed(own % 2**32)
    torch.manual_seed(own)
