"""A user's script of which one rank comes to harm, at the beginning of a phase; it trains, or it samples.

python victim.py FOLDER HARM RANK PHASE TIMEOUT_S      HARM: KILL, STOP, TERM, LINK or CABLE
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_diffpipe import DiffPipeStrategy, Predictor
from lightning_diffpipe.comm.watcher import watcher
from lightning_diffpipe.modules.parts import built_in
from lightning_diffpipe.sampling.world import World

FOLDER, HARM, RANK, PHASE = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
TIMEOUT_S = float(sys.argv[5])
IN_STEP = "training"
NUM_HOSTS = int(os.environ.get("VICTIM_NODES", "1"))
OWN_RANK = int(
    os.environ["NODE_RANK"]
    if NUM_HOSTS > 1
    else os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))
)


def come_to_harm(phase: str) -> None:
    """Does this rank harm, once, if it is the one and this is the phase."""
    mark = FOLDER / "harmed"
    together = phase in (
        "starting processes",
        "connecting",
        "setting up",
    )  # the others shall have come there, too
    (FOLDER / f"{phase}{OWN_RANK}").touch()
    if (phase, OWN_RANK) == (PHASE, RANK) and not mark.exists():
        while together and not (FOLDER / f"{phase}{1 - OWN_RANK}").exists():
            time.sleep(0.1)
        if HARM in ("LINK", "CABLE"):
            time.sleep(1.5 if "(" in phase else 0.2)  # the other one has heard of the phase
        mark.touch()
        if HARM == "LINK":
            while not (FOLDER / "cut").exists():
                time.sleep(0.01)
            return
        if HARM == "CABLE":
            subprocess.run(["ip", "link", "set", f"dp{OWN_RANK}", "down"], check=True)
            return
        os.kill(os.getpid(), getattr(signal, f"SIG{HARM}"))


class Module(L.LightningModule):
    """Some layers, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 8).requires_grad_(False)
        self.layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Comes to harm in the middle of a step."""
        if watcher.phase == IN_STEP and batch_idx == 2:
            come_to_harm(IN_STEP)
        loss = self.layers(self.encoder(batch)).pow(2).mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Uses the whole model."""
        self.log("val", self.layers(batch).mean())

    def configure_optimizers(self) -> Any:
        """Has a state to save."""
        return torch.optim.AdamW(self.layers.parameters(), lr=1e-2)


class Samples(L.Callback):
    """Samples with the whole model, after the second step."""

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Samples."""
        if batch_idx == 1:
            with trainer.strategy.whole_model():
                module.layers(batch)


def sample(method: str) -> None:
    """Samples two images."""
    begin, publish = World.agree, watcher.publish

    def agree_and_come_to_harm(world: World, phase: str, *arguments: Any) -> Any:
        if phase != "sampling":
            come_to_harm(f"{phase} ({method})")
        return begin(world, phase, *arguments)

    def publish_and_come_to_harm(**changes: Any) -> None:
        publish(**changes)
        if changes.get("phase", "sampling") != "sampling":
            come_to_harm(f"{changes['phase']} ({method})")

    def on_step(done: int, steps: int) -> None:
        if done == 2:
            come_to_harm(f"sampling ({method})")

    World.agree, watcher.publish = agree_and_come_to_harm, publish_and_come_to_harm  # type: ignore[method-assign]
    model = built_in("glyphs_transformer" if method == "PipeFusion" else "glyphs")
    predictor = Predictor.from_pretrained(model, method=method.lower(), timeout_s=TIMEOUT_S)
    for _ in range(2):
        predictor(["digit four, serif"], num_inference_steps=8, on_step=on_step)
    predictor.close()
    (FOLDER / "finished").touch()


def train() -> None:
    """Trains two epochs."""
    publish, connect = watcher.publish, watcher.connect

    def publish_and_come_to_harm(**changes: Any) -> None:
        publish(**changes)
        if changes.get("phase", IN_STEP) != IN_STEP:
            come_to_harm(changes["phase"])

    def connect_and_come_to_harm(*arguments: Any) -> str:
        prefix = connect(*arguments)
        come_to_harm("starting processes")
        return prefix

    watcher.publish, watcher.connect = publish_and_come_to_harm, connect_and_come_to_harm  # type: ignore[method-assign]
    L.seed_everything(3, verbose=False)
    data = torch.randn(16, 8)
    strategy = DiffPipeStrategy(num_stages=2, num_microbatches=2, timeout_s=TIMEOUT_S)
    saves = L.pytorch.callbacks.ModelCheckpoint(
        FOLDER / "saved", every_n_train_steps=3, save_top_k=-1
    )
    trainer = L.Trainer(
        accelerator="cpu", devices=2 // NUM_HOSTS, num_nodes=NUM_HOSTS, strategy=strategy, max_epochs=2,
        logger=False, callbacks=[saves, Samples()], enable_model_summary=False, enable_progress_bar=False,
        use_distributed_sampler=False, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(data, 4), DataLoader(data, 4))
    (FOLDER / "finished").touch()


if __name__ == "__main__":
    name, _, method = PHASE.partition(" (")
    sample(method.rstrip(")")) if method else train()
