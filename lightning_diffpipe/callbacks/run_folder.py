"""Where a run keeps its files."""

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
