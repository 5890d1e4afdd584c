"""Frozen encoders in the bubbles of the pipeline.

    rank 0 | F0 F1 [E0] B0 [E0] B1 [E1]        E: frozen layers (VAE, text encoders, a ControlNet's locked
    rank 1 | [E2] F0 B0 F1 B1 [E2 E3]             half) for samples of COMING batches

While a rank waits for a message it runs frozen layers of the next two batches, which the data loader has
already read. Their results wait until the step reads them. Nothing is approximated: frozen weights do not change
and every batch has its own seeds, so losses and weights are those of a run without filling, bit for bit.

Should frozen weights change all the same (a teacher that follows its student), or a buffer that feeds frozen layers
(losses by timestep, by which the next timesteps are sampled), on all ranks alike, nothing runs ahead after that.
A write through `.data` leaves no trace, nor does a change of what is no buffer: train with `filling=none` then. On
several stages such a teacher becomes NaN, since a rank holds no weights of the other stages to follow.

The strategy adds this callback by itself; give it to the trainer to choose another mode.

Source:
    DiffusionPipe, Tian et al. (2024), https://arxiv.org/abs/2405.01248
"""

from typing import Any

import lightning as L
import torch

from lightning_diffpipe.errors import ConfigurationError, require_choice, require_number
from lightning_diffpipe.planning.filling import LOOKAHEAD_BATCHES
from lightning_diffpipe.runtime.bubbles import FillingMode
from lightning_diffpipe.runtime.upcoming import Filling
from lightning_diffpipe.training.pipeline import Pipeline


class BubbleFilling(L.Callback):
    """Runs frozen layers of coming batches while a rank waits.

    Args:
        mode: `"opportunistic"` runs layers until the awaited message is there, right where a wait blocks
            the host (gloo), refused over NCCL. `"planned"` puts as many layers before each wait as
            took its time in earlier steps, right for CUDA streams (NCCL). `None` chooses by backend.
        deterministic: Keep the ranks' shares of the frozen work as planned rather than adapting them to
            measured times. Results are the same either way; only the course of a run is not. `None`
            follows `Trainer(deterministic=...)`.
        lookahead_batches: Batches whose frozen layers may run ahead of their step. With one, a rank that has
            done its share of the next batch waits for the others in every step; with two (the default)
            on average only, for the memory of one more batch and its encodings.

    Raises:
        ConfigurationError: An argument is none of these, the trainer's strategy is not `diffpipe`, or ranks
            talk over NCCL and `mode` is `"opportunistic"`.

    Example:
        >>> trainer = L.Trainer(
        ...     strategy="diffpipe", callbacks=[BubbleFilling(mode="planned")]
        ... )  # doctest: +SKIP
    """

    def __init__(
        self,
        mode: FillingMode | None = None,
        deterministic: bool | None = None,
        lookahead_batches: int = LOOKAHEAD_BATCHES,
    ) -> None:
        require_choice("mode", mode, (None, "opportunistic", "planned"))
        # Plans count memory for no more.
        require_number("lookahead_batches", lookahead_batches, 1, LOOKAHEAD_BATCHES, whole=True)
        self.mode = mode
        self.deterministic = deterministic
        self.lookahead_batches = lookahead_batches

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Checks that there will be bubbles."""
        if stage != "fit":
            return
        strategy = trainer.strategy
        if not hasattr(strategy, "lookahead_batches"):
            raise ConfigurationError(
                f"BubbleFilling needs strategy='diffpipe'; {type(strategy).__name__} has no "
                "bubbles. Remove the callback, or change the strategy"
            )
        strategy.lookahead_batches = self.lookahead_batches

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Switches filling on, if the plan fills."""
        pipeline = trainer.strategy.pipeline
        if not pipeline.fills:
            return
        deterministic = self.deterministic
        if deterministic is None:
            deterministic = torch.are_deterministic_algorithms_enabled()
        shares = pipeline.planned_shares
        filling = Filling(self.mode, not deterministic, shares, self.lookahead_batches)
        pipeline.engine.fill_bubbles(filling)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Shows the strategy the batches that come next, each once."""
        strategy, pipeline = trainer.strategy, trainer.strategy.pipeline
        if not pipeline.fills:
            return
        loop, left = trainer.fit_loop.epoch_loop, 0
        num_prepared = pipeline.engine.num_prepared_after(loop.total_batch_idx)
        if pipeline.runs_ahead and not loop.batch_progress.is_last_batch:
            left = trainer.num_training_batches - (loop.batch_idx + 1)
            if trainer.max_steps != -1:
                # Batches until the optimizer's last step, counted from its latest one.
                window = trainer.accumulate_grad_batches
                until_last = (trainer.max_steps - trainer.global_step) * window
                left = min(left, until_last - loop.batch_idx % window - 1)
            left = max(0, int(min(left, strategy.lookahead_batches)))
        feed = trainer.fit_loop._combined_loader
        ahead = enumerate(feed.ahead(left, strategy.root_device), 1)
        strategy.upcoming = [(later, batch) for later, batch in ahead if later > num_prepared]

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Frees encodings for a batch that is not trained on."""
        pipeline: Pipeline | None = getattr(trainer.strategy, "pipeline", None)
        if pipeline is not None:
            pipeline.engine.drop_prepared()
