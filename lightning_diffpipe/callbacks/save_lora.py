"""Adapters as files while they are trained, for other programs to draw with.

A checkpoint has what training needs to go on; these files have the adapters alone, averaged if there are averages.
"""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L

from lightning_diffpipe.callbacks.ema import EMA
from lightning_diffpipe.errors import require_number


class SaveLora(L.Callback):
    """Writes the adapters of a ready-made module every so many steps, into `folder/step=000500`.

    Args:
        folder: Where to.
        every_n_steps: Optimizer steps between two files.
        names: As in `PartsModule.save_lora`.

    Raises:
        ConfigurationError: No such number of steps.
    """

    def __init__(
        self, folder: str | Path, every_n_steps: int = 500, names: Mapping[str, str] | None = None
    ) -> None:
        require_number("every_n_steps", every_n_steps, 1, whole=True)
        self.folder, self.every_n_steps, self.names = Path(folder), every_n_steps, names
        self._last_step = 0

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        """Writes after an optimizer step; every rank takes part, and the first one writes."""
        step = trainer.global_step
        if step == self._last_step or step % self.every_n_steps:
            return
        self._last_step = step
        with contextlib.ExitStack() as stack:
            for callback in trainer.callbacks:
                if isinstance(callback, EMA):
                    stack.enter_context(callback.averaged(pl_module))
            state = trainer.strategy.lightning_module_state_dict()
        if trainer.is_global_zero:
            pl_module.save_lora(self.folder / f"step={step:06}", self.names, state)
