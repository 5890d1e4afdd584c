"""What PipelineMonitor costs: the same training, the monitor switched on for every other ten steps.

python benchmarks/monitor_overhead/main.py --json out.json
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.harness import main, on_ranks
from benchmarks.two_ranks.main import TOKENS, WIDTH, Model
from lightning_diffpipe import DiffPipeStrategy, PipelineMonitor

BLOCK = 10  # steps with the monitor, then as many without


class Switched(PipelineMonitor):
    """A monitor that sees every other block of steps."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen = 0
        self.look_s: list[float] = []

    def on_train_batch_start(self, *arguments: Any) -> None:
        self.seen += 1
        if self.is_on:
            super().on_train_batch_start(*arguments)

    def on_train_batch_end(self, *arguments: Any) -> None:
        if self.is_on:
            start_s = time.perf_counter()
            super().on_train_batch_end(*arguments)
            if self._looks(self._num_steps):
                self.look_s.append(time.perf_counter() - start_s)

    @property
    def is_on(self) -> bool:
        return bool(((self.seen - 1) // BLOCK) % 2)


class Blocks(L.Callback):
    """Seconds of every block; stands after the monitor, so that its time counts."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.steps, self.start_s = 0, 0.0

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.steps += 1
        if self.steps % BLOCK == 0:
            now_s = time.perf_counter()
            self.seconds.append(now_s - self.start_s)
            self.start_s = now_s


class Trained(Model):
    """The model of the benchmark of two ranks, with an optimizer."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.denoiser.parameters(), lr=1e-4)


def measure(
    rank: int, batch_size: int, blocks: int, every_n_steps: int
) -> tuple[list[float], list[float]]:
    warnings.simplefilter("ignore")
    # Lightning starts processes of its own unless the environment says that they are there.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    torch.manual_seed(0)
    sample = {"x": torch.randn(TOKENS, WIDTH), "y": torch.randn(TOKENS, WIDTH)}
    loader = DataLoader([sample] * (batch_size * BLOCK * (2 * blocks + 2)), batch_size)
    timer, monitor = Blocks(), Switched(every_n_steps=every_n_steps)
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            accelerator="cpu", devices=2, max_epochs=1, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, logger=CSVLogger(folder),
            strategy=DiffPipeStrategy(num_stages=2, num_microbatches=2, profile="flops", seed=0),
            callbacks=[monitor, timer],
        )  # fmt: skip
        trainer.fit(Trained(2), loader)
    return timer.seconds[2:], monitor.look_s[2:]


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each length of a step."""
    rows = []
    for batch_size in (2, 4):
        seconds, looks = on_ranks(2, measure, batch_size, arguments.rounds, BLOCK)
        without, with_monitor = seconds[0::2], seconds[1::2]
        pairs = [b / a for a, b in zip(without, with_monitor, strict=False)]
        step_s = statistics.median(without) / BLOCK
        look_s = statistics.median(looks)
        rows.append(
            {
                "step, ms": 1e3 * step_s,
                "ten steps and a look / ten steps": statistics.median(pairs),
                "a look, ms": 1e3 * look_s,
                "cost at every 50 steps": f"{100 * look_s / (50 * step_s):.2f}%",
            }
        )
    return rows


if __name__ == "__main__":
    main(run, __doc__)
