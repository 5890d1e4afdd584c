"""What a step may ask its trainer for before training: optimizers, schedulers, the number of batches.

In ordinary training they are there before the first step. Here steps are probed and timed first, since optimizers
and samplers follow from the plan. So what a step asks for is made when it does, as it will be in training, and
thrown away once there is a pipeline: what is trained with, Lightning makes later.

    self.optimizers(), self.lr_schedulers(), trainer.optimizers     from a call of configure_optimizers
    trainer.estimated_stepping_batches, .num_training_batches, .train_dataloader
                                                                    from the lengths of a pipeline's loaders
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.core.optimizer import LightningOptimizer, _init_optimizers_and_lr_schedulers
from lightning.pytorch.trainer.connectors.data_connector import (
    _DataLoaderSource,
    _request_dataloader,
)
from lightning.pytorch.utilities import CombinedLoader
from torch.utils._python_dispatch import _disable_current_modes

from lightning_diffpipe.runtime.seeding import isolated_random_numbers

_OPTIMIZERS = ("_optimizers", "_lightning_optimizers", "lr_scheduler_configs")
_OF_LOOP = (
    "_data_source",
    "_combined_loader",
    "_data_fetcher",
    "max_batches",
    "_last_train_dl_reload_epoch",
)
_OF_TRAINER = ("val_check_batch",)


@contextlib.contextmanager
def early_answers(trainer: Any, strategy: Any, num_pipelines: int) -> Iterator[None]:
    """Inside, a step that is run before training gets what it asks its trainer for.

    Args:
        trainer: The trainer being set up.
        strategy: Its strategy, which has no optimizers yet.
        num_pipelines: How many pipelines will share the training data.
    """
    with _optimizers_on_demand(strategy), _loader_on_demand(trainer, strategy, num_pipelines):
        yield


class _OnFirstUse(list[Any]):
    """A list that is filled when somebody looks into it."""

    def __init__(self, make: Callable[[], list[Any]]) -> None:
        super().__init__()
        self._make: Callable[[], list[Any]] | None = make

    def _fill(self) -> None:
        if self._make is not None:
            made = self._make()  # may fail, and then shall do so again
            self._make = None
            self.extend(made)

    def __len__(self) -> int:
        self._fill()
        return super().__len__()

    def __iter__(self) -> Iterator[Any]:
        self._fill()
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        self._fill()
        return super().__getitem__(index)


@contextlib.contextmanager
def _optimizers_on_demand(strategy: Any) -> Iterator[None]:
    """Inside, `configure_optimizers` is called once if a step asks for what it gives, else never."""
    made: dict[str, list[Any]] = {}

    def make(name: str) -> list[Any]:
        if not made:
            with _disable_current_modes():  # of the probe: this is no part of the step
                optimizers, schedulers = _init_optimizers_and_lr_schedulers(
                    strategy.lightning_module
                )
            wrapped = [LightningOptimizer._to_lightning_optimizer(o, strategy) for o in optimizers]
            made.update(zip(_OPTIMIZERS, (optimizers, wrapped, schedulers), strict=True))
        return made[name]

    for name in _OPTIMIZERS:
        setattr(strategy, name, _OnFirstUse(lambda name=name: make(name)))  # type: ignore[misc]
    try:
        yield
    finally:
        for name in _OPTIMIZERS:
            setattr(strategy, name, [])


@contextlib.contextmanager
def _loader_on_demand(trainer: Any, strategy: Any, num_pipelines: int) -> Iterator[None]:
    """Inside, Lightning counts the batches of one of so many pipelines; afterwards its loop has no loader again."""
    loop = trainer.fit_loop
    if loop._combined_loader is not None:  # a single rank's, which may be made at any time
        yield
        return
    saved = [(loop, name, getattr(loop, name)) for name in _OF_LOOP]
    saved += [(trainer, name, getattr(trainer, name)) for name in _OF_TRAINER]

    kind, is_set_up = type(loop), False

    def set_up_data() -> None:
        nonlocal is_set_up
        if is_set_up:  # or about to be
            return
        is_set_up = True
        try:
            with _disable_current_modes(), isolated_random_numbers(0):
                loader = _request_dataloader(loop._data_source)
                # Lightning writes into it.
                own = isinstance(loader, CombinedLoader)
                loader = copy.copy(loader) if own else CombinedLoader(loader, "max_size_cycle")
                loop._data_source = _DataLoaderSource(loader, "")
                with strategy.counting_batches(num_pipelines), _by_itself(strategy):
                    kind.setup_data(loop)
        except BaseException:
            is_set_up = False  # whoever asks next shall get the error as well
            raise

    asked = {name: _after(set_up_data, name) for name in ("max_batches", "_combined_loader")}
    loop.__class__ = type(kind.__name__, (kind,), asked)
    loop.setup_data = set_up_data
    try:
        yield
    finally:
        del loop.setup_data
        loop.__class__ = kind
        for owner, name, value in saved:
            setattr(owner, name, value)


def _after(make: Callable[[], None], name: str) -> property:
    """Returns an attribute that is read after something has been made, and kept where ordinary ones are."""

    def read(owner: Any) -> Any:
        make()
        return vars(owner)[name]

    return property(read, lambda owner, value: vars(owner).__setitem__(name, value))


@contextlib.contextmanager
def _by_itself(strategy: Any) -> Iterator[None]:
    """Inside, Lightning takes this rank's word for that of all: another one's step may never come so far."""
    strategy.barrier = lambda name=None: None
    strategy.reduce = lambda tensor, *args, **kwargs: tensor
    try:
        yield
    finally:
        del strategy.barrier, strategy.reduce


class _WithoutLength:
    """Stands for a loader of which nobody knows how many batches it has."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def only_counted(loader: Any) -> Any:
    """Returns as many batches, without workers that would start, or samplers and streams that would move."""
    size = sized_len(loader)
    return _WithoutLength() if size is None else range(size)
