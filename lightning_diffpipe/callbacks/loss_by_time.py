"""Loss by timestep: the mean loss says little, as it depends on which timesteps were sampled.

    step      sum and number of the losses in each quantile of the timesteps, over microbatches as other sums
    logged    sums of all steps since the last time, over pipelines side by side, divided by numbers

So what is logged is the mean over the samples of one process, however they were spread over microbatches and ranks.

Source:
    Improved DDPM, Nichol & Dhariwal (2021), logs losses by quartile: https://arxiv.org/abs/2102.09672
"""

from typing import Any

import lightning as L
from torch import Tensor

from lightning_diffpipe.errors import ConfigurationError, require_number


class LossByTime(L.Callback):
    """Logs the training loss by quantile of the timesteps, `train/loss_q0` (least noise), `train/loss_q1`, ...

    Each is the mean over all samples since it was logged last (`Trainer.log_every_n_steps`) with timesteps in the
    quantile. One without samples is left out. A sample counts as it is trained, with its weights and mask.

    Args:
        num_quantiles: Equal parts of the timesteps.

    Raises:
        ConfigurationError: Not a number of parts; the module's losses are not those of its `noise_schedule`; or
            PipeDream trains it, where losses of several batches come back at once.
    """

    def __init__(self, num_quantiles: int = 4) -> None:
        require_number("num_quantiles", num_quantiles, 1, whole=True)
        self.num_quantiles = num_quantiles
        self._sums: Tensor | None = None  # since the last time, as `logged_sums` has them
        self._last_step = 0

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        """Has the noise schedule sum its losses."""
        if not hasattr(getattr(pl_module, "noise_schedule", None), "num_quantiles"):
            raise ConfigurationError(
                f"LossByTime is for modules that compute their losses by noise_schedule.losses, as LatentDiffusion "
                f"does, and {type(pl_module).__name__} has none; leave it out"
            )
        pl_module.noise_schedule.num_quantiles = self.num_quantiles

    def teardown(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        """Has the noise schedule stop summing."""
        pl_module.noise_schedule.num_quantiles = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Forgets the sums of an earlier run."""
        pipeline = getattr(trainer.strategy, "pipeline", None)
        if pipeline is not None and pipeline.plan.runs_free:
            raise ConfigurationError(
                "LossByTime cannot tell the batches of PipeDream apart; leave it out, or take another schedule"
            )
        self._sums, self._last_step = None, trainer.global_step

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        """Adds the batch; logs after every `log_every_n_steps`-th step."""
        sums = pl_module.noise_schedule.logged_sums(trainer.callback_metrics)
        if sums is None:
            raise ConfigurationError(
                f"{type(pl_module).__name__} logs no losses by time: they are not those of noise_schedule.losses; "
                "leave LossByTime out (callbacks.loss_by_time=null)"
            )
        self._sums = sums if self._sums is None else self._sums + sums
        step = trainer.global_step
        if step == self._last_step or not trainer.log_every_n_steps:
            return  # accumulation: several batches, one step
        self._last_step = step
        if step % trainer.log_every_n_steps == 0:
            losses, counts = trainer.strategy.reduce(self._sums, reduce_op="sum").cpu()
            self._sums = None
            pairs = enumerate(zip(losses, counts, strict=True))
            means = {f"train/loss_q{k}": loss / count for k, (loss, count) in pairs if count > 0}
            trainer.callback_metrics.update(means)
            numbers = {name: float(mean) for name, mean in means.items()}
            for logger in trainer.loggers:  # with this step's other numbers
                logger.log_metrics(numbers, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
