"""Adapters as files while they are trained, for other programs to sample with.

A checkpoint has what training needs to go on; these files have the adapters alone, averaged if there are averages.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L

from lightning_diffpipe.callbacks.ema import EMA
from lightning_diffpipe.errors import require_number


class SaveLora(L.Callback):
    """Writes the adapters of a ready-made module every so many steps, into `folder/step=000500`.

    Args:
        folder: Folder of the files.
        every_n_steps: Optimizer steps between two files.
        names: Names of `PartsModule.save_lora`.
        keep_last: Files of so many of the latest steps stay, and older ones are removed; None for all.

    Raises:
        ConfigurationError: No such number of steps or files.
    """

    def __init__(
        self,
        folder: str | Path,
        every_n_steps: int = 500,
        names: Mapping[str, str] | None = None,
        keep_last: int | None = None,
    ) -> None:
        require_number("every_n_steps", every_n_steps, 1, whole=True)
        if keep_last is not None:
            require_number("keep_last", keep_last, 1, whole=True)
        self.folder, self.every_n_steps, self.names = Path(folder), every_n_steps, names
        self.keep_last = keep_last
        self._last_step = 0

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        """Writes after an optimizer step; every rank takes part, and the first one writes."""
        step = trainer.global_step
        if step == self._last_step or step % self.every_n_steps:
            return
        self._last_step = step
        with EMA.averaged_in(trainer, pl_module):
            state = trainer.strategy.lightning_module_state_dict()
        if trainer.is_global_zero:
            pl_module.save_lora(self.folder / f"step={step:06}", self.names, state)
            # By number: those of a later step are another run's.
            numbers = [path.name[5:] for path in self.folder.glob("step=*")]
            steps = sorted(int(n) for n in numbers if n.isdecimal() and int(n) <= step)
            for old in steps[: -self.keep_last] if self.keep_last else ():
                shutil.rmtree(self.folder / f"step={old:06}")
