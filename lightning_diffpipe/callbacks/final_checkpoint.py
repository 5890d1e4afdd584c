"""A checkpoint of the very end of training, under a name that is known beforehand."""

from __future__ import annotations

from pathlib import Path

import lightning as L


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
