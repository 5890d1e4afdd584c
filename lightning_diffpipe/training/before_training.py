"""Batch, optimizers and schedulers, for a plan and a probed step that read them before training.

The plan must exist before Lightning makes optimizers, and needs a batch. So Lightning's loop sets its loader up by
then, once and for all, which also tells the numbers of batches and steps; the batch is the first one.

Steps are probed and timed before training, too. The optimizers and schedulers for which one asks its module or
trainer come from a call of `configure_optimizers`, and are thrown away once there is a pipeline: what is trained
with, Lightning makes later.

Runs of W&B begin once there is a pipeline: Lightning asks each logger for its run before the strategy is set up, so
for that long there seems to be one (`put_off_runs`), and what is refused while one is set up leaves no empty run.
"""

import contextlib
import copy
import functools
import math
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core.optimizer import LightningOptimizer, _init_optimizers_and_lr_schedulers
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.loggers.logger import DummyLogger, Logger
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.utils.data import DistributedSampler

from lightning_diffpipe.errors import ConfigurationError, raised_by_all
from lightning_diffpipe.graph.call_sequences import Moment
from lightning_diffpipe.graph.trial import in_trial
from lightning_diffpipe.training.loader import place_of, telling_place
from lightning_diffpipe.training.patching import made_on_demand, patched


def first_batch(trainer: Any, strategy: Any) -> tuple[Any, tuple[Any, ...]]:
    """Returns a copy of the first training batch, and further arguments of `training_step`.

    The batch has passed the hooks of transfer to the host, where the module still is, and will be trained on.

    Raises:
        ConfigurationError: There is no training data.
    """
    module, loop, mesh = strategy.lightning_module, trainer.fit_loop, strategy.mesh
    if not loop._data_source.is_defined():
        with raised_by_all():
            raise ConfigurationError("there is no train_dataloader; pass one to Trainer.fit")
    epoch, *place = place_of(trainer, None)
    # Else what was asked for before the checkpoint was read would start over.
    if any((epoch, *place)):
        loop._combined_loader = None
    with telling_place(trainer, epoch):
        loop.setup_data()
        loop._last_train_dl_reload_epoch = epoch
        feed = loop._combined_loader
        batches = feed.ahead(1, torch.device("cpu"))
        if not batches and any((epoch, *place)):  # a loader was put to the end of its last pass
            iter(feed)
            batches = feed.ahead(1, torch.device("cpu"))
    if not batches:
        with raised_by_all():
            raise ConfigurationError(why_empty(feed))
    batch = batches[0]
    with contextlib.suppress(Exception):  # of whatever a batch of one rank may hold
        batch = copy.deepcopy(batch)
    if mesh.layout.num_pipelines > 1:
        batch = mesh.of_rank(0, batch)
    takes_index = is_param_in_hook_signature(
        module.training_step, "batch_idx", explicit=False, min_args=2
    )
    return batch, (0,) if takes_index else ()


def why_empty(loader: Any) -> str:
    """Returns why a loader, or one of several, gives no batch, and what to do about it."""
    loaders = loader.iterables if isinstance(loader, CombinedLoader) else loader
    for part in pytree.tree_leaves(loaders):
        batches = getattr(part, "batch_sampler", None)
        sampler, size = getattr(batches, "sampler", None), getattr(batches, "batch_size", 0)
        count = sized_len(sampler) or 0
        if 0 < count < size and getattr(batches, "drop_last", False):
            share = " for each pipeline" if isinstance(sampler, DistributedSampler) else ""
            return (
                f"{count} training samples{share} make no batch of {size}, and smaller ones are left out "
                f"(drop_last=True); set the batch size (data.batch_size) to {count} or less"
            )
    return "the training data loader is empty: it yields no batch"


def later_moments(trainer: Any) -> list[Moment]:
    """Returns moments at which a step may call other layers than now, as far as the trainer's own numbers decide.

    These are its second optimizer step, the middle and the last two of training, in which `global_step`,
    `current_epoch` and `batch_idx` are even and odd; some far ones where nobody knows when training ends.
    """
    loop = trainer.fit_loop
    steps_per_epoch = max(trainer.num_training_batches / trainer.accumulate_grad_batches, 1)
    max_epochs = _FAR if loop.max_epochs in (None, -1) else loop.max_epochs
    max_steps = _FAR if trainer.max_steps == -1 else trainer.max_steps
    num_steps = int(min(max_steps, max_epochs * steps_per_epoch))
    # Where loaders do not tell when an epoch ends, any of them may be reached.
    num_epochs = int(min(max_epochs, math.ceil(num_steps / steps_per_epoch) or max_epochs))
    num_batches = int(min(trainer.num_training_batches, _FAR))
    steps = loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total

    @contextlib.contextmanager
    def moment(step: int, epoch: int, batch: int) -> Iterator[int]:
        with patched(steps, completed=step), patched(loop.epoch_progress.current, completed=epoch):
            yield batch

    middle = num_steps // 2, num_epochs // 2, num_batches // 2
    last = ((num_steps - n, num_epochs - n, num_batches - n) for n in (2, 1))
    return [partial(moment, *(max(n, 0) for n in place)) for place in ((1, 0, 1), middle, *last)]


_FAR = 10**6
_OPTIMIZERS = ("_optimizers", "_lightning_optimizers", "lr_scheduler_configs")


@contextlib.contextmanager
def autocast_on_host() -> Iterator[None]:
    """Extends autocast of GPUs that is entered inside to tensors of the host.

    A step for a GPU is probed on the host, where it shall see the types that it will see.
    """
    enter, leave = torch.autocast.__enter__, torch.autocast.__exit__
    of_host = list[torch.autocast]()

    def entered(autocast: Any) -> Any:
        if autocast.device == "cuda":
            settings = autocast.fast_dtype, autocast._enabled, autocast._cache_enabled
            of_host.append(torch.autocast("cpu", *settings))
            enter(of_host[-1])
        return enter(autocast)

    def left(autocast: Any, *error: Any) -> Any:
        if autocast.device == "cuda":
            leave(of_host.pop(), *error)
        return leave(autocast, *error)

    with patched(torch.autocast, __enter__=entered, __exit__=left):
        yield


@contextlib.contextmanager
def early_answers(strategy: Any) -> Iterator[None]:
    """Provides optimizers for a step that asks for them while a strategy has none yet."""

    def make_optimizers() -> None:
        optimizers, schedulers = _init_optimizers_and_lr_schedulers(strategy.lightning_module)
        wrapped = [LightningOptimizer._to_lightning_optimizer(o, strategy) for o in optimizers]
        vars(strategy).update(zip(_OPTIMIZERS, (optimizers, wrapped, schedulers), strict=True))

    try:
        with made_on_demand(strategy, _OPTIMIZERS, make_optimizers):
            yield
    finally:
        vars(strategy).update({name: [] for name in _OPTIMIZERS})


class _NoRunYet:
    """Stands for a run. It counts as false, so that the logger tells the id that it was given."""

    def __bool__(self) -> bool:
        return False


def put_off_runs(trainer: Any) -> None:
    """Keeps loggers of W&B from starting runs until `allow_runs`; not where somebody needs their runs earlier."""
    checkpoints = [c for c in trainer.callbacks if isinstance(c, ModelCheckpoint)]
    named_by_run = any(checkpoint.dirpath is None for checkpoint in checkpoints)
    for logger in _of_wandb(trainer):
        early = logger._wandb_init.get("sync_tensorboard") or (named_by_run and logger._id is None)
        if logger._experiment is None and not early:
            logger._experiment = _NoRunYet()


def allow_runs(trainer: Any) -> None:
    """Allows loggers to start their runs."""
    for logger in _of_wandb(trainer):
        if isinstance(logger._experiment, _NoRunYet):
            logger._experiment = None


def _of_wandb(trainer: Any) -> Iterator[Any]:
    return (logger for logger in trainer.loggers if isinstance(logger, WandbLogger))


class _Silent(DummyLogger):
    """Writes nothing, where another logger would write."""

    def __init__(self, logger: Logger) -> None:
        super().__init__()
        self._logger = logger

    @property
    def name(self) -> str:
        return self._logger.name or ""

    @property
    def version(self) -> Any:
        return self._logger.version

    @property
    def save_dir(self) -> str | None:
        """Folder that `trainer.log_dir` is with the other logger."""
        return getattr(self._logger, "log_dir", None) or self._logger.save_dir


@contextlib.contextmanager
def without_loggers(trainer: Any) -> Iterator[None]:
    """Replaces loggers by some that write nothing, for a trial run of the step."""
    with patched(trainer, _loggers=[*map(_Silent, trainer.loggers)]):
        yield


_NOT_OF_LOGGERS = {"torch", "lightning", *sys.stdlib_module_names}


def silence_watching(trainer: Any) -> None:
    """Lets hooks that a package of a logger has put on modules (`WandbLogger.watch`) do nothing in trial runs.

    Nor with several stages: rank 0 alone has them, and a part of the module.
    """
    strategy = trainer.strategy
    kinds = [type(value) for logger in trainer.loggers for value in vars(logger).values()]
    packages = {kind.__module__.partition(".")[0] for kind in kinds} - _NOT_OF_LOGGERS

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
