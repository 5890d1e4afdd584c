"""A data loader that gives every rank of a pipeline the same batches.

All ranks of a pipeline load the same samples, but what a sample looks like may be random: crops, flips,
caption dropout. Those draws come from the main process or from loader workers, and Lightning seeds both
so that ranks differ, or lets them drift apart as soon as one rank draws one number more. Here every
fetch is seeded by the run's seed, the data-parallel rank, the pass over the data (the epoch, and how often
a loader that is shorter than another one has begun anew in it) and the batch, inside isolated random states,
and workers are seeded alike. The order in which a sampler of the user's own wants the samples is the
exception: pipelines side by side share it out, so all of them must draw the same one.

A wrong guess would train on mixed-up samples without any error, so the first batches of every pass are
compared over the pipeline.

For filling, the next batches are read before this one is trained on, and can be looked at.
"""

from __future__ import annotations

import copy
import random
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from lightning_diffpipe.runtime.microbatch import plain_bytes
from lightning_diffpipe.runtime.seeding import derived_seed, isolated_random_numbers

_NUM_COMPARED = 2


class AlignedLoader:
    """Wraps a loader; everything it does not do itself is the wrapped loader's.

    Args:
        loader: The user's loader, with its sampler already in place.
        seed: Seed of the run.
        data_parallel_rank: Which share of the data this rank's pipeline sees.
        pass_index: Tells the epoch, and so which pass over the data begins; survives a resume. None if every
            pass shall draw the same numbers, as validation does.
        compare: Given a batch's checksum, raises if another rank of the pipeline has another.
        looks_ahead: Batches to read ahead.

    Attributes:
        loading_s: Seconds spent so far in waiting for batches of the wrapped loader.
    """

    def __init__(
        self,
        loader: Any,
        seed: int,
        data_parallel_rank: int,
        pass_index: Callable[[], int] | None,
        compare: Callable[[int, int], None],
        looks_ahead: int = 0,
    ) -> None:
        self._loader = loader
        self.loading_s = 0.0
        self._looks_ahead = looks_ahead
        self._read: deque[tuple[Any, Any]] = deque()
        self._state_before: Any = None
        self._seed = seed
        self._data_parallel_rank = data_parallel_rank
        self._compare = compare
        self._pass_index = pass_index
        self._ended = 0, 0
        seed_workers(loader)
        for sampler in _shared_out(loader):
            sampler.dataset._sampler = _SharedOrder(sampler.dataset._sampler, self._seed_of_order)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        # Lightning reads sampler, dataset and more: without the sampler, `set_epoch` would never
        # arrive and every epoch would have the same order. A loader that is not stateful must not
        # look stateful.
        return getattr(self.__dict__["_loader"], name)

    @property
    def _iterator(self) -> Any:
        return self._loader._iterator

    @_iterator.setter
    def _iterator(self, value: Any) -> None:
        # Lightning ends workers that stay, and then sets this: the loader must know that they are gone.
        self._loader._iterator = value

    def __iter__(self) -> Iterator[Any]:
        batches = self._aligned_batches()
        read = self._read = deque()
        while True:
            for batch in islice(batches, self._looks_ahead + 1 - len(read)):
                # A loop that reads no batch ahead would save this state behind this batch.
                read.append((batch, self._state()))
            if not read:
                break
            batch, self._state_before = read.popleft()
            yield batch
        self._state_before = None
        if self._pass_index is not None:
            # Counted where passes end: Lightning may begin one twice before it takes a batch.
            epoch = self._pass_index()
            self._ended = epoch, self._times_ended(epoch) + 1

    @property
    def ahead(self) -> list[Any]:
        """The batches that the pass gives next, as the loader made them; `looks_ahead`, fewer at its end."""
        return [batch for batch, _ in self._read]

    def _state(self) -> Any:
        return (
            self._loader.state_dict() if self._looks_ahead and _is_stateful(self._loader) else None
        )

    def _aligned_batches(self) -> Iterator[Any]:
        name = self._name_of_pass()
        with isolated_random_numbers(self._seed_of(name, -1)):
            batches = iter(self._loader)
        number = 0
        while True:
            with isolated_random_numbers(self._seed_of(name, number)):
                asked_s = time.perf_counter()
                batch = next(batches, _END)
                self.loading_s += time.perf_counter() - asked_s
            if batch is _END:
                return
            if number < _NUM_COMPARED:
                self._compare(number, checksum(batch))
            yield batch
            number += 1

    def _name_of_pass(self) -> str:
        """The epoch and, where a short loader begins anew beside a longer one, how often it has ended in it."""
        if self._pass_index is None:
            return "0"
        epoch = self._pass_index()
        times = self._times_ended(epoch)
        return f"{epoch}.{times}" if times else f"{epoch}"

    def _times_ended(self, epoch: int) -> int:
        return self._ended[1] if epoch == self._ended[0] else 0

    def _seed_of(self, name: str, number: int) -> int:
        return derived_seed(self._seed, "data", self._data_parallel_rank, name, number)

    def _seed_of_order(self) -> int:
        return derived_seed(self._seed, "order", self._name_of_pass())


_END = object()


class _SharedOrder:
    """A sampler that draws the same order in every pipeline; what else it does is the user's.

    Args:
        sampler: The user's.
        seed: Tells the seed of the order that is drawn now.
    """

    def __init__(self, sampler: Any, seed: Callable[[], int]) -> None:
        self._sampler = sampler
        self._seed = seed

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:  # above all `set_epoch`
        return getattr(self.__dict__["_sampler"], name)

    def __iter__(self) -> Iterator[Any]:
        with isolated_random_numbers(self._seed()):
            return iter(list(self._sampler))


def _shared_out(loader: Any) -> list[DistributedSamplerWrapper]:
    """Samplers with which Lightning gives each pipeline its share of an order of the user's."""
    own = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    found = own[0], getattr(own[1], "sampler", None)
    return list({id(s): s for s in found if isinstance(s, DistributedSamplerWrapper)}.values())


class StatefulAlignedLoader(AlignedLoader):
    """An `AlignedLoader` around a loader that can be resumed in the middle of a pass."""

    def state_dict(self) -> Any:
        """The loader's state, as if nothing had been read ahead."""
        return self._loader.state_dict() if self._state_before is None else self._state_before

    def load_state_dict(self, state: Any) -> None:
        """Puts the loader to where it was."""
        self._loader.load_state_dict(state)


def aligned(loader: Any, *arguments: Any, **options: Any) -> AlignedLoader:
    """Wraps a loader; Lightning asks the type of the result whether it can be resumed."""
    made = StatefulAlignedLoader if _is_stateful(loader) else AlignedLoader
    return made(loader, *arguments, **options)


def unaligned(loader: Any) -> Any:
    """The loader itself, where an earlier run has wrapped it: `trainer.train_dataloader` of that run."""
    return loader._loader if isinstance(loader, AlignedLoader) else loader


def keep_combined_loaders(trainer: Any) -> None:
    """Gives a trainer copies of the user's `CombinedLoader`s, since it writes its own loaders into them.

    They would be there in the next run, with the samplers and ranks of this one.
    """
    loops = (
        trainer.fit_loop,
        trainer.fit_loop.epoch_loop.val_loop,
        trainer.validate_loop,
        trainer.test_loop,
        trainer.predict_loop,
    )
    for source in (loop._data_source for loop in loops):
        source.dataloader = partial(_not_the_users, type(source).dataloader, source)


def _not_the_users(ask: Callable[[Any], Any], source: Any) -> Any:
    loader = ask(source)
    return copy.copy(loader) if isinstance(loader, CombinedLoader) else loader


def epoch_of(trainer: Any) -> int:
    """The epoch whose passes begin now, also where Lightning does not know yet that the run goes on in it.

    The first batch of a loader without a length is read while the run is set up: by `estimated_stepping_batches`
    before the loops are restored, and always before a processed epoch counts as completed.
    """
    loops = (trainer._checkpoint_connector._loaded_checkpoint or {}).get("loops")
    if loops:
        return loops["fit_loop"]["epoch_progress"]["current"]["processed"]
    return trainer.fit_loop.epoch_progress.current.processed


def _is_stateful(loader: Any) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def checksum(batch: Any) -> int:
    """A number that differs for batches that differ in any value; of objects, in type or size."""
    total = 0
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor):
            value = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        else:
            value = plain_bytes(leaf)
        total = zlib.crc32(value, total)
    return total


def seed_workers(loader: Any) -> None:
    """Lets workers be seeded alike on all ranks of a pipeline, unless the user seeds them."""
    if isinstance(loader, DataLoader) and loader.num_workers and not loader.worker_init_fn:
        # Workers seed torch from the iterator's base seed but leave numpy to us; set before
        # Lightning would seed them by the global rank, which differs inside a pipeline.
        loader.worker_init_fn = _seed_worker


def _seed_worker(worker: int) -> None:
    """Seeds a worker from the iterator's base seed, which was drawn for this pass and pipeline."""
    information = get_worker_info()
    assert information is not None
    own = derived_seed(information.seed, "worker", worker)
    random.seed(own)
    np.random.seed(own % 2**32)
    torch.manual_seed(own)
