"""Samples per second, over all data-parallel ranks, without a host sync."""

from __future__ import annotations

import time
from typing import Any

import lightning as L

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.graph.samples import count_samples


def num_samples(trainer: L.Trainer, batch: Any) -> int:
    """Returns the number of samples of the batch that was trained on last; 0 if nothing tells it."""
    result = getattr(trainer.strategy, "last_step", None)
    return count_samples(batch) or 0 if result is None else int(result.num_samples)


def num_pipelines(trainer: L.Trainer) -> int:
    """Returns the number of batches that are trained side by side."""
    kwargs = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
    return int(kwargs.get("num_replicas", 1))


class Throughput(L.Callback):
    """Logs `samples_per_s` every few batches; validation and what happens between epochs is not counted.

    The clock is read on the host and nothing waits for the device, so with CUDA the value is right on
    average over many steps only.

    Args:
        every_n_steps: Batches per measurement, also over ends of epochs; 0 logs nothing.

    Raises:
        ConfigurationError: It is negative.
    """

    def __init__(self, every_n_steps: int = 20) -> None:
        if every_n_steps < 0:
            raise ConfigurationError(
                f"every_n_steps must be at least 1, or 0 to log nothing; got {every_n_steps}"
            )
        self.every_n_steps = every_n_steps
        self._reset()

    def _reset(self) -> None:
        self._batches = self._samples = 0
        self._elapsed_s = 0.0
        self._since_s: float | None = None

    def _stop_clock(self) -> None:
        if self._since_s is not None:
            self._elapsed_s += time.perf_counter() - self._since_s
            self._since_s = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Forgets the run before."""
        self._reset()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Starts the clock where it stands."""
        if self._since_s is None:
            self._since_s = time.perf_counter()

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Counts samples, and logs on the last batch of a measurement."""
        self._batches += 1
        self._samples += num_samples(trainer, batch)
        if self._batches != self.every_n_steps:
            return
        self._stop_clock()
        rate = self._samples * num_pipelines(trainer) / self._elapsed_s
        for logger in trainer.loggers:
            logger.log_metrics({"samples_per_s": rate}, step=trainer.global_step)
        self._reset()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stops the clock until the next batch."""
        self._stop_clock()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """As `on_validation_start`."""
        self._stop_clock()
