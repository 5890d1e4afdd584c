"""Two ranks of which one is slower: the measured partition against the equal one.

Layers sleep, so that two ranks do not compete for cores; on rank 1 they sleep longer.

    python benchmarks/unequal_ranks/main.py --json out.json
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
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
from lightning_diffpipe.planning.cluster import Cluster

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
    """Seconds of each step."""

    def __init__(self) -> None:
        self.ended_s: list[float] = []

    def on_train_batch_end(self, *arguments: Any) -> None:
        """Stamps the end of a step."""
        self.ended_s.append(time.perf_counter())


def train(rank: int, slowdown: float, measured: bool) -> dict[str, Any]:
    """Fits, and returns a row."""
    warnings.simplefilter("ignore")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    cluster: Any = "measure" if measured else Cluster(2)
    strategy = DiffPipeStrategy(
        num_stages=2, num_microbatches=MICROBATCHES, cluster=cluster, profile="measure"
    )
    clock = Clock()
    trainer = L.Trainer(
        accelerator="cpu", devices=2, max_steps=NUM_STEPS, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, strategy=strategy, callbacks=[clock],
    )  # fmt: skip
    trainer.fit(Model(slowdown), DataLoader(torch.zeros(BATCH_SIZE * NUM_STEPS, 4), BATCH_SIZE))
    steps_s = [after - before for before, after in pairwise(clock.ended_s)]
    assert strategy.plan is not None
    return {
        "rank 1 is slower by": slowdown,
        "partition": "measured" if measured else "as if ranks were equal",
        "layers": [stage.stop - stage.first_layer for stage in strategy.plan.stages],
        "planned step, s": strategy.plan.planned.iteration_s if measured else None,
        "step, s": statistics.median(steps_s[2:]),
    }


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Two rows for each slowdown."""
    return [
        on_ranks(2, train, slowdown, measured)
        for slowdown in arguments.slowdowns
        for measured in (False, True)
    ]


def options(parser: argparse.ArgumentParser) -> None:
    """Adds what is measured."""
    parser.add_argument("--slowdowns", nargs="+", type=float, default=[1.0, 2.0, 3.0])


if __name__ == "__main__":
    main(run, __doc__, options)
