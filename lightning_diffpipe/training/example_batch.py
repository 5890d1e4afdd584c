"""One batch to plan with, before training starts.

The plan must exist before Lightning makes samplers and optimizers, and a plan needs a batch. Asking the
data loader for its first batch would start its workers and move its samplers, so for ordinary data
sets the samples are taken from the data set itself: the first ones, or those that a copy of the user's own sampler
names. All ranks take one, so that what data count or draw by themselves stays alike, and look at rank 0's.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.combined_loader import _shutdown_workers_and_reset_iterator
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from lightning_diffpipe.errors import ConfigurationError, raised_by_all
from lightning_diffpipe.runtime.seeding import isolated_random_numbers
from lightning_diffpipe.training.loader import seed_workers, unaligned

_ANY_ORDER = (SequentialSampler, RandomSampler, DistributedSampler)
_END = object()


def example_batch(trainer: Any, strategy: Any) -> tuple[Any, tuple[Any, ...]]:
    """Takes one training batch through the module's own transfer hooks.

    Args:
        trainer: The trainer being set up.
        strategy: Broadcasts the batch.

    Returns:
        The batch on the host, where the module still is, and the further arguments `training_step` takes.

    Raises:
        ConfigurationError: There is no training data.
    """
    module = strategy.lightning_module
    source: _DataLoaderSource = trainer.fit_loop._data_source
    if not source.is_defined():
        with raised_by_all():
            raise ConfigurationError("there is no train_dataloader; pass one to Trainer.fit")
    with isolated_random_numbers(0):
        loader = source.dataloader()
        batch = next(_first_batches(loader), None)
    batch = strategy.broadcast(batch)
    if batch is None:
        with raised_by_all():
            raise ConfigurationError(why_empty(loader))
    with isolated_random_numbers(0):  # of hooks, which are to give the same on all ranks
        batch = strategy.precision_plugin.convert_input(batch)
        batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
        batch = strategy.batch_to_device(batch, torch.device("cpu"), dataloader_idx=0)
    takes_index = is_param_in_hook_signature(
        module.training_step, "batch_idx", explicit=False, min_args=2
    )
    return batch, (0,) if takes_index else ()


def why_empty(loader: Any) -> str:
    """Returns why a loader, or one of several, gives no batch, and what to do about it."""
    loaders = loader.iterables if isinstance(loader, CombinedLoader) else loader
    for one in pytree.tree_leaves(loaders):
        batches = getattr(one, "batch_sampler", None)
        sampler, size = getattr(batches, "sampler", None), getattr(batches, "batch_size", 0)
        count = sized_len(sampler) or 0
        if 0 < count < size and getattr(batches, "drop_last", False):
            share = " for each pipeline" if isinstance(sampler, DistributedSampler) else ""
            return (
                f"{count} training samples{share} make no batch of {size}, and smaller ones are left out "
                f"(drop_last=True); set the batch size (data.batch_size) to {count} or less"
            )
    return "the training data loader is empty: it yields no batch"


def _first_batches(loader: Any) -> Iterator[Any]:
    loader = unaligned(loader)
    if isinstance(loader, DataLoader):
        return _from_data_set(loader)
    if isinstance(loader, CombinedLoader):
        loader = loader.iterables
    if isinstance(loader, dict | list | tuple):
        inner, form = pytree.tree_flatten(loader)
        firsts = [next(_first_batches(one), _END) for one in inner]
        complete = all(first is not _END for first in firsts)
        return iter([pytree.tree_unflatten(firsts, form)] if complete else [])
    return iter(loader)


def _from_data_set(loader: DataLoader[Any]) -> Iterator[Any]:
    """Yields the first batch as the loader would make it, without moving samplers; a stream's takes its workers."""
    data_set = loader.dataset
    if isinstance(data_set, IterableDataset):
        seed_workers(loader)
        first = list(itertools.islice(loader, 1))
        _shutdown_workers_and_reset_iterator(loader)  # the pass that comes seeds its own
        yield from first
        return
    for wanted in _first_wanted(loader):
        many = loader.batch_sampler is not None
        if many and getattr(data_set, "__getitems__", None):
            yield loader.collate_fn(data_set.__getitems__(wanted))
        else:
            yield loader.collate_fn([data_set[i] for i in wanted] if many else data_set[wanted])


def _first_wanted(loader: DataLoader[Any]) -> Iterator[Any]:
    """Yields what the loader asks its data set for first: indices of a batch; one, if it makes no batches.

    Of samplers that give all samples in some order the first ones stand for any. What others give, and what goes
    together in a batch, is theirs to say: buckets of one size, pairs with a resolution, names.
    """
    batches, sampler = loader.batch_sampler, loader.sampler
    if type(batches) is BatchSampler:
        sampler = batches.sampler
    if type(sampler) not in _ANY_ORDER or type(batches) not in (BatchSampler, type(None)):
        own = batches if batches is not None else sampler
        yield from itertools.islice(_copied(own, loader.dataset), 1)
    elif batches is None:
        yield from range(min(1, len(sampler)))
    else:
        count = min(batches.batch_size, len(sampler))
        if count and not (batches.drop_last and count < batches.batch_size):
            yield [index % len(loader.dataset) for index in range(count)]


def _copied(sampler: Any, data_set: Any) -> Any:
    """Returns a copy of a sampler, which may count epochs or hold a generator; the data set is not copied with it.

    Raises:
        ConfigurationError: It cannot be copied, and asking it for a batch would use that up.
    """
    try:
        return copy.deepcopy(sampler, {id(data_set): data_set})
    except Exception as error:  # of whatever it holds
        if any(isinstance(s, Iterator) for s in (sampler, getattr(sampler, "sampler", None))):
            raise ConfigurationError(
                f"one batch is looked at before training, but the sampler ({type(sampler).__name__}) can be "
                "iterated over only once, and not be copied. Give one that begins anew each time: a list, or a "
                "class with __iter__"
            ) from error
        return sampler
