"""Samples per second, over all data-parallel ranks, without a host sync."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
from torch import Tensor


def num_samples(batch: Any) -> int:
    """Returns the number of samples in a batch: the length of its first tensor or list."""
    if isinstance(batch, dict):
        return num_samples(next(iter(batch.values())))
    return len(batch) if isinstance(batch, Tensor) or not batch else len(batch[0])


def num_pipelines(trainer: L.Trainer) -> int:
    """Returns the number of batches that are trained side by side."""
    kwargs = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
    return int(kwargs.get("num_replicas", 1))


class Throughput(L.Callback):
    """Logs `samples_per_s` every few batches.

    The clock is read on the host and nothing waits for the device, so with CUDA the value is right on
    average over many steps only.

    Args:
        every_n_steps: Batches per measurement.
    """

    def __init__(self, every_n_steps: int = 20) -> None:
        self.every_n_steps = every_n_steps
        self._samples = 0
        self._start_s = 0.0

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Starts the clock on the first batch of a measurement."""
        if not self._samples:
            self._start_s = time.perf_counter()

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Counts samples, and logs on the last batch of a measurement."""
        self._samples += num_samples(batch)
        if (batch_idx + 1) % self.every_n_steps:
            return
        elapsed_s = time.perf_counter() - self._start_s
        rate = self._samples * num_pipelines(trainer) / elapsed_s
        self._samples = 0
        for logger in trainer.loggers:
            logger.log_metrics({"samples_per_s": rate}, step=trainer.global_step)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Forgets the measurement under way, which would include the validation."""
        self._samples = 0
