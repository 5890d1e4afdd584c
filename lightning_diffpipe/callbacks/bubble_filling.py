"""Frozen encoders in the bubbles of the pipeline.

    rank 0 | F0 F1 [E0] B0 [E0] B1 [E1]        E: frozen layers (VAE, text encoders, a ControlNet's locked
    rank 1 | [E2] F0 B0 F1 B1 [E2 E3]             half) for the samples of the NEXT batch

While a rank waits for a message it runs frozen layers of the next batch, which the data loader has
already read. Their results wait for the next step. Nothing is approximated: frozen weights do not change
and every batch has its own seeds, so losses and weights are those of a run without filling, bit for bit.

The strategy adds this callback by itself; give it to the trainer to choose another mode.

Source:
    DiffusionPipe, Tian et al. (2024), https://arxiv.org/abs/2405.01248
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.utils._pytree as pytree

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.loader import AlignedLoader
from lightning_diffpipe.runtime.engine import Filling
from lightning_diffpipe.runtime.filling import FillingMode
from lightning_diffpipe.strategy import DiffPipeStrategy


class BubbleFilling(L.Callback):
    """Runs frozen layers of the next batch while a rank waits.

    Args:
        mode: `"opportunistic"` runs layers until the awaited message is there, right where a wait blocks
            the host (gloo). `"planned"` puts as many layers in front of each wait as took its time
            in earlier steps, right for CUDA streams (NCCL). `None` chooses by backend.
        deterministic: Keep the ranks' shares of the frozen work as planned rather than adapting them to
            measured times. Results are the same either way; only the course of a run is not. `None`
            follows `Trainer(deterministic=...)`.

    Raises:
        ConfigurationError: The trainer's strategy is not `diffpipe`, or does not fill.

    Example:
        >>> trainer = L.Trainer(
        ...     strategy="diffpipe", callbacks=[BubbleFilling(mode="planned")]
        ... )  # doctest: +SKIP
    """

    def __init__(self, mode: FillingMode | None = None, deterministic: bool | None = None) -> None:
        if mode not in (None, "opportunistic", "planned"):
            raise ConfigurationError(
                f"mode={mode!r} is unknown; use 'opportunistic', 'planned' or None"
            )
        self.mode = mode
        self.deterministic = deterministic

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Checks that there will be bubbles."""
        if stage == "fit" and not isinstance(trainer.strategy, DiffPipeStrategy):
            raise ConfigurationError(
                f"BubbleFilling needs strategy='diffpipe'; {type(trainer.strategy).__name__} has no "
                "bubbles. Remove the callback, or change the strategy"
            )

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Switches filling on, if the plan fills."""
        pipeline = _strategy(trainer).pipeline
        assert pipeline is not None
        if not pipeline.fills:
            return
        adapts = not (
            torch.are_deterministic_algorithms_enabled()
            if self.deterministic is None
            else self.deterministic
        )
        pipeline.engine.fill_bubbles(Filling(self.mode, adapts, pipeline.planned_shares))

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Shows the strategy the next batch."""
        strategy = _strategy(trainer)
        assert strategy.pipeline is not None
        if not strategy.pipeline.fills:
            return
        upcoming = _next_batch(trainer)
        if upcoming is None or _is_last(trainer, strategy):
            return
        # Lightning will run the same hooks on the loader's batch, and hooks may change it in place.
        upcoming = pytree.tree_map_only(torch.Tensor, torch.clone, upcoming)
        upcoming = trainer.precision_plugin.convert_input(upcoming)
        upcoming = pl_module._on_before_batch_transfer(upcoming, dataloader_idx=0)
        strategy.upcoming = strategy.batch_to_device(upcoming, dataloader_idx=0)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Frees what was encoded for a batch that does not come."""
        pipeline = _strategy(trainer).pipeline
        if pipeline is not None:
            pipeline.engine.drop_prepared()


def _strategy(trainer: L.Trainer) -> DiffPipeStrategy:
    assert isinstance(trainer.strategy, DiffPipeStrategy)
    return trainer.strategy


def _next_batch(trainer: L.Trainer) -> Any:
    """The batch behind the one that is trained on now, of all loaders together; `None` if not known."""
    combined = trainer.fit_loop._combined_loader
    assert combined is not None
    if not all(isinstance(loader, AlignedLoader) for loader in combined.flattened):
        return None
    upcoming = [loader.take() for loader in combined.flattened]
    if combined._mode == "sequential" or any(batch is None for batch in upcoming):
        return None
    _, structure = pytree.tree_flatten(combined.iterables)
    return pytree.tree_unflatten(upcoming, structure)


def _is_last(trainer: L.Trainer, strategy: DiffPipeStrategy) -> bool:
    """Whether no batch follows this one in its epoch."""
    loop = trainer.fit_loop.epoch_loop
    if loop.batch_progress.is_last_batch or loop.batch_idx + 1 >= trainer.num_training_batches:
        return True
    steps = (loop.batch_idx + 1) % trainer.accumulate_grad_batches == 0
    return trainer.max_steps != -1 and steps and trainer.global_step + 1 >= trainer.max_steps
