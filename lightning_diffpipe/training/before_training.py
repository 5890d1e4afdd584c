"""What a plan and a probed step ask for before training: a batch, optimizers, schedulers, the number of batches.

The plan must exist before Lightning makes samplers and optimizers, and a plan needs a batch. Asking the
data loader for its first batch would start its workers and move its samplers, so for ordinary data
sets the samples are taken from the data set itself: the first ones, or those that a copy of the user's own sampler
names. All ranks take one, so that what data count or draw by themselves stays alike, and look at rank 0's.

Steps are probed and timed before that, too. So what a step asks for is made when it does, as it will be in
training, and thrown away once there is a pipeline: what is trained with, Lightning makes later.

    self.optimizers(), self.lr_schedulers(), trainer.optimizers     from a call of configure_optimizers
    trainer.estimated_stepping_batches, .num_training_batches, .train_dataloader
                                                                    from the lengths of a pipeline's loaders

Runs of W&B begin once there is a pipeline: Lightning asks each logger for its run before the strategy is set up, so
for that long there seems to be one (`put_off_runs`), and what is refused while one is set up leaves no empty run.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core.optimizer import LightningOptimizer, _init_optimizers_and_lr_schedulers
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.trainer.connectors.data_connector import (
    _DataLoaderSource,
    _request_dataloader,
)
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.combined_loader import _shutdown_workers_and_reset_iterator
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
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
from lightning_diffpipe.graph.rng import isolated_random_numbers
from lightning_diffpipe.graph.trial import in_trial
from lightning_diffpipe.training.loader import seed_workers, unaligned
from lightning_diffpipe.training.patching import made_on_demand, patched

_ANY_ORDER = (SequentialSampler, RandomSampler, DistributedSampler)
_END = object()


def example_batch(trainer: Any, strategy: Any) -> tuple[Any, tuple[Any, ...]]:
    """Takes one training batch through the module's own transfer hooks.

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
    if not source.is_module():  # else each call gives another one
        with raised_by_all():
            _look_at_iterators(source.instance)
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


def _look_at_iterators(loaders: Any) -> None:
    """Refuses iterators that end for good, and warns of others: they lose the batch that is looked at.

    Raises:
        ConfigurationError: There is one of Python's own, such as a generator.
    """
    loaders = loaders.iterables if isinstance(loaders, CombinedLoader) else loaders
    for one in pytree.tree_leaves(loaders):
        if not isinstance(one, Iterator):
            continue
        kind = type(one)
        if kind.__module__ in ("builtins", "itertools"):
            raise ConfigurationError(
                f"one batch is looked at before training, but the training data ({kind.__name__}) can be "
                "iterated over only once. Give what begins anew each time: a list, a DataLoader, or a class with "
                "__iter__"
            )
        # Others may begin anew when they have ended, as NVIDIA DALI's do.
        _warn_of_lost_batch(f"the training data ({kind.__name__})")


def _warn_of_lost_batch(what: str) -> None:
    rank_zero_warn(
        f"one batch is looked at before training, and {what} is an iterator, which goes on from there: what it "
        "gave for that batch is not trained on, unless it begins anew with each pass. Make iterators in __iter__"
    )


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
    """Yields the first batch as a loader would make it, without moving samplers; a stream's takes its workers."""
    loader = unaligned(loader)
    if isinstance(loader, CombinedLoader):
        loader = loader.iterables
    if isinstance(loader, dict | list | tuple):
        inner, form = pytree.tree_flatten(loader)
        firsts = [next(_first_batches(one), _END) for one in inner]
        if all(first is not _END for first in firsts):
            yield pytree.tree_unflatten(firsts, form)
    elif not isinstance(loader, DataLoader):
        yield from loader
    elif isinstance(loader.dataset, IterableDataset):
        loader = _over_copy(loader)
        seed_workers(loader)
        first = list(itertools.islice(loader, 1))
        _shutdown_workers_and_reset_iterator(loader)  # the pass that comes seeds its own
        yield from first
    else:
        data_set, many = loader.dataset, loader.batch_sampler is not None
        for wanted in _first_wanted(loader):
            if many and getattr(data_set, "__getitems__", None):
                yield loader.collate_fn(data_set.__getitems__(wanted))
            else:
                yield loader.collate_fn([data_set[i] for i in wanted] if many else data_set[wanted])


def _over_copy(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Returns a loader over a copy of a stream, which may count passes, or go on where the last one ended.

    Workers have their own, and what cannot be copied is read itself.
    """
    if loader.num_workers:
        return loader
    stream = loader.dataset
    held = [name for name, value in vars(stream).items() if isinstance(value, Iterator)]
    if held:
        _warn_of_lost_batch(f"{type(stream).__name__}.{held[0]}")
    lent = copy.copy(loader)
    with contextlib.suppress(Exception):  # of whatever the stream holds
        vars(lent)["dataset"] = copy.copy(stream)  # torch lets nobody else write it
    return lent


def _first_wanted(loader: DataLoader[Any]) -> Iterator[Any]:
    """Yields what the loader asks its data set for first: indices of a batch; one, if it makes no batches.

    Of samplers that give all samples in some order the first ones stand for any. What others give, and what goes
    together in a batch, is theirs to say: buckets of one size, pairs with a resolution, names. They are copied, as
    they may count epochs or hold a generator, but the data set is not.
    """
    batches, sampler = loader.batch_sampler, loader.sampler
    if type(batches) is BatchSampler:
        sampler = batches.sampler
    if type(sampler) not in _ANY_ORDER or type(batches) not in (BatchSampler, type(None)):
        own = batches if batches is not None else sampler
        try:
            own = copy.deepcopy(own, {id(loader.dataset): loader.dataset})
        except Exception as error:  # of whatever it holds
            if any(isinstance(s, Iterator) for s in (own, getattr(own, "sampler", None))):
                raise ConfigurationError(
                    f"one batch is looked at before training, but the sampler ({type(own).__name__}) can be "
                    "iterated over only once, and not be copied. Give one that begins anew each time: a list, or a "
                    "class with __iter__"
                ) from error
        yield from itertools.islice(own, 1)
    elif batches is None:
        yield from range(min(1, len(sampler)))
    else:
        count = min(batches.batch_size, len(sampler))
        if count and not (batches.drop_last and count < batches.batch_size):
            yield [index % len(loader.dataset) for index in range(count)]


_OPTIMIZERS = ("_optimizers", "_lightning_optimizers", "lr_scheduler_configs")
_OF_LOOP = ("_data_source", "_combined_loader", "_data_fetcher", "max_batches")


@contextlib.contextmanager
def early_answers(trainer: Any, strategy: Any, num_pipelines: int) -> Iterator[None]:
    """Gives a step that is run before training what it asks its trainer for.

    Args:
        trainer: The trainer being set up.
        strategy: Its strategy, which has no optimizers yet.
        num_pipelines: How many pipelines will share the training data.
    """

    def make_optimizers() -> None:
        optimizers, schedulers = _init_optimizers_and_lr_schedulers(strategy.lightning_module)
        wrapped = [LightningOptimizer._to_lightning_optimizer(o, strategy) for o in optimizers]
        vars(strategy).update(zip(_OPTIMIZERS, (optimizers, wrapped, schedulers), strict=True))

    try:
        with (
            made_on_demand(strategy, _OPTIMIZERS, make_optimizers),
            _loader_on_demand(trainer, strategy, num_pipelines),
        ):
            yield
    finally:
        vars(strategy).update({name: [] for name in _OPTIMIZERS})


@contextlib.contextmanager
def _loader_on_demand(trainer: Any, strategy: Any, num_pipelines: int) -> Iterator[None]:
    """Lets Lightning count the batches of one of so many pipelines; afterwards its loop has no loader again."""
    loop = trainer.fit_loop
    if loop._combined_loader is not None:  # a single rank's, which may be made at any time
        yield
        return
    before = {name: getattr(loop, name) for name in (*_OF_LOOP, "_last_train_dl_reload_epoch")}
    set_up_data = loop.setup_data

    def make_loader() -> None:
        with isolated_random_numbers(0):
            loader = _request_dataloader(loop._data_source)
            # Lightning writes into it.
            own = isinstance(loader, CombinedLoader)
            loader = copy.copy(loader) if own else CombinedLoader(loader, "max_size_cycle")
            loop._data_source = _DataLoaderSource(loader, "")
            with strategy.counting_batches(num_pipelines):
                set_up_data()

    with (
        patched(loop, setup_data=lambda: loop.max_batches, **before),
        patched(trainer, val_check_batch=trainer.val_check_batch),
        made_on_demand(loop, ("max_batches", "_combined_loader"), make_loader),
    ):
        yield


class _WithoutLength:
    """Stands for a loader of which nobody knows how many batches it has."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def only_counted(loader: Any) -> Any:
    """Returns as many batches, without workers that would start, or samplers and streams that would move."""
    size = sized_len(loader)
    return _WithoutLength() if size is None else range(size)


class _NoRunYet:
    """Stands for a run. It counts as false, so that the logger tells the id that it was given."""

    def __bool__(self) -> bool:
        return False


def put_off_runs(trainer: Any) -> None:
    """Lets loggers of W&B seem to have begun, until `allow_runs`; not where somebody needs their runs earlier."""
    checkpoints = [c for c in trainer.callbacks if isinstance(c, ModelCheckpoint)]
    named_by_run = any(checkpoint.dirpath is None for checkpoint in checkpoints)
    for logger in _of_wandb(trainer):
        early = logger._wandb_init.get("sync_tensorboard") or (named_by_run and logger._id is None)
        if logger._experiment is None and not early:
            logger._experiment = _NoRunYet()


def allow_runs(trainer: Any) -> None:
    """Lets loggers begin their runs when they are asked."""
    for logger in _of_wandb(trainer):
        if isinstance(logger._experiment, _NoRunYet):
            logger._experiment = None


def _of_wandb(trainer: Any) -> Iterator[Any]:
    return (logger for logger in trainer.loggers if isinstance(logger, WandbLogger))


@contextlib.contextmanager
def without_loggers(trainer: Any) -> Iterator[None]:
    """Lets a trial run of the step find loggers that write nothing."""
    with patched(trainer, _loggers=[DummyLogger() for _ in trainer.loggers]):
        yield


_NOT_OF_LOGGERS = {"torch", "lightning", *sys.stdlib_module_names}


def silence_watching(trainer: Any) -> None:
    """Lets hooks that a package of a logger has put on modules (`WandbLogger.watch`) do nothing in trial runs.

    Nor with several stages: rank 0 alone has them, and a part of the module.
    """
    strategy = trainer.strategy
    held = [type(value) for logger in trainer.loggers for value in vars(logger).values()]
    packages = {kind.__module__.partition(".")[0] for kind in held} - _NOT_OF_LOGGERS

    def silenced(hook: Any) -> Any:
        @functools.wraps(hook)
        def call(*args: Any, **kwargs: Any) -> Any:
            several = strategy.plan is not None and len(strategy.plan.stages) > 1
            return None if several or in_trial.get() else hook(*args, **kwargs)

        vars(call)["silenced_by"] = strategy
        return call

    for module in trainer.lightning_module.modules() if packages else ():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for number, hook in hooks.items():
                package = str(getattr(hook, "__module__", "")).partition(".")[0]
                if package in packages and getattr(hook, "silenced_by", None) is not strategy:
                    hooks[number] = silenced(hook)
