"""Two ranks of which one is slower: the measured partition against the equal one.

Layers sleep, so that two ranks do not compete for cores; on rank 1 they sleep longer.

    python benchmarks/unequal_ranks/main.py --json out.json
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.harness import main, on_ranks
from benchmarks.sleeping import Sleeper
from lightning_diffpipe import DiffPipeStrategy

NUM_LAYERS, NUM_STEPS, BATCH_SIZE, MICROBATCHES = 16, 14, 16, 8
FORWARD_S, BACKWARD_S = 0.002, 0.004


class UnequalSleeper(Sleeper):
    """A layer that takes `slowdown` times as long on rank 1."""

    def __init__(self, slowdown: float) -> None:
        super().__init__(FORWARD_S, BACKWARD_S)
        self.slowdown = slowdown

    def forward(self, x: Tensor) -> Tensor:
        factor = self.slowdown if dist.is_initialized() and dist.get_rank() else 1.0
        self.forward_s, self.backward_s = factor * FORWARD_S, factor * BACKWARD_S
        return super().forward(x)


class Model(L.LightningModule):
    """A chain of them."""

    def __init__(self, slowdown: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(UnequalSleeper(slowdown) for _ in range(NUM_LAYERS)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The mean square of what comes out."""
        loss: Tensor = self.layers(batch).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        """Plain descent."""
        return torch.optim.SGD(self.parameters(), lr=1e-6)


class Clock(L.Callback):
    """Seconds of each step, and the plan."""

    def __init__(self) -> None:
        self.ended_s: list[float] = []
        self.plan: Any = None

    def on_train_start(self, trainer: L.Trainer, *arguments: Any) -> None:
        """Keeps the plan, which ends with the run."""
        self.plan = trainer.strategy.plan  # type: ignore[attr-defined]

    def on_train_batch_end(self, *arguments: Any) -> None:
        """Stamps the end of a step."""
        self.ended_s.append(time.perf_counter())


def train(rank: int, slowdown: float, plan: str | None) -> dict[str, Any]:
    """Fits, by a plan if it is given, and returns a row with the plan."""
    warnings.simplefilter("ignore")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    wishes: dict[str, Any] = {
        "num_stages": 2,
        "num_microbatches": MICROBATCHES,
        "profile": "measure",
    }
    strategy = DiffPipeStrategy(**({"plan": plan} if plan else wishes))
    clock = Clock()
    trainer = L.Trainer(
        accelerator="cpu", devices=2, max_steps=NUM_STEPS, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, strategy=strategy, callbacks=[clock],
    )  # fmt: skip
    trainer.fit(Model(slowdown), DataLoader(torch.zeros(BATCH_SIZE * NUM_STEPS, 4), BATCH_SIZE))
    steps_s = [after - before for before, after in pairwise(clock.ended_s)]
    return {
        "rank 1 is slower by": slowdown,
        "partition": "that of equal ranks" if plan else "measured",
        "layers": [stage.stop - stage.first_layer for stage in clock.plan.stages],
        "planned step, s": None if plan else clock.plan.planned.iteration_s,
        "step, s": statistics.median(steps_s[2:]),
        "plan": clock.plan.to_json(),
    }


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for equal ranks, and two for each slowdown."""
    rows = [on_ranks(2, train, 1.0, None)]
    with tempfile.TemporaryDirectory() as folder:
        equal = Path(folder, "plan.json")
        equal.write_text(rows[0]["plan"])
        for slowdown in arguments.slowdowns:
            rows += [on_ranks(2, train, slowdown, plan) for plan in (str(equal), None)]
    return [{name: value for name, value in row.items() if name != "plan"} for row in rows]


def options(parser: argparse.ArgumentParser) -> None:
    """Adds what is measured."""
    parser.add_argument("--slowdowns", nargs="+", type=float, default=[2.0, 3.0])


if __name__ == "__main__":
    main(run, __doc__, options)
