"""One batch to plan with, before training starts.

The plan must exist before Lightning makes samplers and optimizers, and a plan needs a batch. Asking the
data loader for its first batch would start its workers and move its samplers, so for ordinary data
sets the samples are taken from the data set itself. Rank 0's batch is given to all ranks, so that all
of them look at the same one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sized
from typing import Any

import torch
import torch.utils._pytree as pytree
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.utils.data import DataLoader, IterableDataset

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.runtime.seeding import isolated_random_numbers


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
        raise ConfigurationError("there is no train_dataloader; pass one to Trainer.fit")
    with isolated_random_numbers(0):
        loader = source.dataloader()
        batch = next(_first_batches(loader), None) if strategy.is_global_zero else None
    batch = strategy.broadcast(batch)
    if batch is None:
        raise ConfigurationError("the training data loader is empty: it yields no batch")
    batch = strategy.precision_plugin.convert_input(batch)
    batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
    batch = strategy.batch_to_device(batch, torch.device("cpu"), dataloader_idx=0)
    takes_index = is_param_in_hook_signature(
        module.training_step, "batch_idx", explicit=False, min_args=2
    )
    return batch, (0,) if takes_index else ()


def _first_batches(loader: Any) -> Iterator[Any]:
    if isinstance(loader, DataLoader):
        return _from_data_set(loader)
    if isinstance(loader, CombinedLoader):
        loader = loader.iterables
    if isinstance(loader, dict | list | tuple):
        return iter([pytree.tree_map(lambda inner: next(_first_batches(inner)), loader)])
    return iter(loader)


def _from_data_set(loader: DataLoader[Any]) -> Iterator[Any]:
    """The first batch in the data set's own order, without workers or samplers."""
    data_set = loader.dataset
    if isinstance(data_set, IterableDataset) or not isinstance(data_set, Sized):
        return itertools.islice(loader, 1)
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if size is None:  # automatic batching is off: the data set hands out batches
        return (loader.collate_fn(data_set[index]) for index in range(min(1, len(data_set))))
    samples = [data_set[index] for index in range(min(size, len(data_set)))]
    return iter([loader.collate_fn(samples)] if samples else [])
