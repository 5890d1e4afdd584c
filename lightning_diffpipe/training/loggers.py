"""Runs of W&B begin once there is a pipeline: what is refused while one is set up leaves no empty run behind.

Lightning asks each logger for its run before the strategy is set up, so for that long there seems to be one. After
that whoever is the first to ask begins it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import WandbLogger


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
