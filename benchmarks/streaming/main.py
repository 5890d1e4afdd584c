"""Layers whose frozen weights are copied for each run, beside layers that hold them: planned and measured steps.

Layers sleep, so that two ranks do not compete for cores; copies are real ones, from memory to memory.

    python benchmarks/streaming/main.py --json out.json
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import warnings
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.harness import main, on_ranks
from benchmarks.sleeping import Sleeper
from lightning_diffpipe import DiffPipeStrategy
from lightning_diffpipe.graph.placement import is_placeholder

NUM_LAYERS, NUM_STEPS, BATCH_SIZE = 16, 10, 4
MEGABYTE = 2**20


class FrozenSleeper(Sleeper):
    """A layer with a frozen weight of some megabytes, of which it reads a row, and a small trained one."""

    def __init__(self, run_s: float, megabytes: int) -> None:
        super().__init__(run_s, run_s)
        weight = torch.empty(megabytes * MEGABYTE // 16, 4).zero_()  # in pages of its own
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.weight[-1])


class Model(L.LightningModule):
    """A chain of them."""

    def __init__(self, run_s: float, megabytes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(FrozenSleeper(run_s, megabytes) for _ in range(NUM_LAYERS)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The mean square of what comes out."""
        loss: Tensor = self.layers(batch).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        """Plain descent."""
        parameters = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(parameters, lr=1e-6)


class Watch(L.Callback):
    """Seconds and copied bytes of each step, bytes of weights on the rank, and what was planned with what."""

    def __init__(self) -> None:
        self.ended_s, self.copied, self.held_bytes = list[float](), list[int](), 0
        self.plan, self.basis = None, None

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        """Notes them."""
        self.ended_s.append(time.perf_counter())
        pipeline = trainer.strategy.pipeline  # type: ignore[attr-defined]
        stream = pipeline.engine.layout.steps.stream
        self.copied.append(stream.num_bytes_copied if stream else 0)
        self.held_bytes = sum(p.nbytes for p in module.parameters() if not is_placeholder(p))
        self.held_bytes += stream.slot_bytes if stream else 0
        self.plan, self.basis = pipeline.plan, pipeline.basis


def train(
    rank: int, run_s: float, megabytes: int, streaming: str, profile: Any, cluster: Any
) -> dict[str, Any]:
    """Fits, and returns a row; with what was measured, and the memory that the plan needs."""
    warnings.simplefilter("ignore")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    strategy = DiffPipeStrategy(
        num_stages=2,
        num_microbatches=BATCH_SIZE,
        checkpointing="all",
        streaming=streaming,
        profile=profile,
        cluster=cluster,
    )
    watch = Watch()
    trainer = L.Trainer(
        accelerator="cpu", devices=2, max_steps=NUM_STEPS, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, strategy=strategy, callbacks=[watch],
    )  # fmt: skip
    data = torch.zeros(BATCH_SIZE * NUM_STEPS, 4)
    trainer.fit(Model(run_s, megabytes), DataLoader(data, BATCH_SIZE))
    plan: Any = watch.plan
    copied = plan.planned.copied_bytes[rank] if plan.streamed else 0
    return {
        "run of a layer, ms": 1e3 * run_s,
        "streaming": streaming,
        "streamed layers": f"{len(plan.streamed)} of {NUM_LAYERS}",
        "weights on rank 0, MiB": watch.held_bytes // MEGABYTE,
        "copied a step, planned, MiB": copied // MEGABYTE,
        "copied a step, MiB": (watch.copied[-1] - watch.copied[-2]) // MEGABYTE,
        "planned step, s": plan.planned.iteration_s,
        "step, s": statistics.median([b - a for a, b in pairwise(watch.ended_s)][2:]),
        "basis": watch.basis,
        "memory_bytes": max(plan.planned.peak_memory_bytes),
    }


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """For each time of a run: no layer, half of them, and all are streamed."""
    rows = []
    for run_ms in arguments.runs_ms:
        what = run_ms / 1e3, arguments.megabytes
        none = on_ranks(2, train, *what, "none", "measure", "measure")
        profile, cluster = none["basis"].profile, none["basis"].cluster
        every = on_ranks(2, train, *what, "all", profile, cluster)
        memory_bytes = (none["memory_bytes"] + every["memory_bytes"]) // 2
        limited = replace(cluster, memory_bytes=memory_bytes)
        rows += [none, on_ranks(2, train, *what, "auto", profile, limited), every]
        rate = cluster.host_bytes_per_s / 1e9
        print(f"{run_ms:g} ms: {rate:.1f} GB/s from host memory, as the first run has measured\n")
    hidden = "basis", "memory_bytes"
    return [{name: value for name, value in row.items() if name not in hidden} for row in rows]


def options(parser: argparse.ArgumentParser) -> None:
    """Adds what is measured."""
    parser.add_argument("--runs-ms", nargs="+", type=float, default=[20.0, 2.0])
    parser.add_argument("--megabytes", type=int, default=64, help="frozen weights of a layer")


if __name__ == "__main__":
    main(run, __doc__, options)
