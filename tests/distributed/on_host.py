"""Trains as one rank of two, on a host of its own: `python -m tests.distributed.on_host FOLDER`, as torchrun would.

FOLDER has `settings`, pickled; `outcome0` and `outcome1` are added. Before its third batch rank 0 asks for `cut`.
"""

import os
import pickle
import sys
import time
from pathlib import Path

import lightning as L

from tests.distributed.scenarios import fit


class Waits(L.Callback):
    """Lets whoever holds the link do something to it."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == 2 and trainer.is_global_zero:
            (self.folder / "ready").touch()
            while not (self.folder / "cut").exists():
                time.sleep(0.01)


if __name__ == "__main__":
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    settings = pickle.loads((folder / "settings").read_bytes())
    settings.trainer |= {"num_nodes": 2, "callbacks": [Waits(folder)]}
    (folder / f"outcome{rank}").write_bytes(pickle.dumps(fit(rank, settings, 1)))
