"""Files of a run: the folder that it has for itself, and the checkpoint of its very end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L


def run_folder(trainer: L.Trainer) -> Path | None:
    """Returns a folder of this run's own, as its first logger has it; a collective call.

    A logger such as `WandbLogger()` that was given no folder names the working directory, where the next
    run would write over what this one left; then its name and the run's are added, as `ModelCheckpoint` does.
    """
    folder = trainer.log_dir
    if folder is None or not trainer.loggers:
        return None if folder is None else Path(folder)
    logger: Any = trainer.loggers[0]
    own: tuple[str, ...] = ()
    if trainer.is_global_zero and Path(folder).resolve() == Path.cwd():
        _ = getattr(logger, "experiment", None)  # the run's name is known once it has begun
        own = (str(logger.name), str(logger.version))
    return Path(folder, *trainer.strategy.broadcast(own))


class FinalCheckpoint(L.Callback):
    """Writes a full checkpoint when training ends, while the module is still divided over the ranks.

    `ModelCheckpoint` writes every so many steps, and the last step is rarely one of them.

    Args:
        path: File to write.

    Attributes:
        is_written: This run has written it; not so if there was nothing left to train.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.is_written = False

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Writes the file; every rank takes part. A trial run (`fast_dev_run`) leaves what is there alone."""
        if not trainer.fast_dev_run:
            trainer.save_checkpoint(self.path)
            self.is_written = True
