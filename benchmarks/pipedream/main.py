"""PipeDream against 1F1B: seconds a batch on 2 to 8 sleeping ranks, planned and measured, and weight versions.

    python benchmarks/pipedream/main.py --json out.json
    python benchmarks/pipedream/main.py --only 2

Layers sleep, so that eight ranks fit on two cores; each batch is as large as the others, whatever it is cut into.
Losses at equal samples are compared by training, see the README.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.harness import main, on_ranks
from benchmarks.sleeping import Sleeper
from lightning_diffpipe.graph.probe import probe
from lightning_diffpipe.profiling.measure import LayerTimer, measure_profile
from lightning_diffpipe.runtime.free_running import FreeRunningEngine
from lightning_diffpipe.training.pipeline import Process
from lightning_diffpipe.training.plan_source import PipelineOptions
from lightning_diffpipe.training.preparation import prepare

SAMPLES, NUM_LAYERS, FORWARD_S = 16, 16, 6e-5
WARMUP = 4


class SleepingModel(nn.Module):
    """Trained layers, all alike."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Sleeper(FORWARD_S, 2 * FORWARD_S) for _ in range(NUM_LAYERS)])

    def training_step(self, batch: Tensor) -> Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return batch.square().mean()


def step(module: nn.Module, part: Tensor) -> Tensor:
    """Module and batch to loss."""
    return module.training_step(part)


def candidates(num_ranks: int) -> list[tuple[str, int]]:
    """Schedules, and microbatches of a batch."""
    return [
        ("1f1b", num_ranks),
        ("1f1b", 2 * num_ranks),
        ("pipedream", 1),
        ("pipedream_2bw", num_ranks),
    ]


def measure_all(rank: int, num_ranks: int, rounds: int) -> list[dict[str, Any]]:
    """All candidates on a number of ranks, one after the other."""
    batch = torch.zeros(SAMPLES, 4)
    module = SleepingModel()
    timer = LayerTimer(
        module, step, batch, probe(module, step, batch[:2]), sample_counts=(1, SAMPLES), repeats=3,
        finds_results=False,
    )  # fmt: skip
    box = [measure_profile(timer) if rank == 0 else None]
    dist.broadcast_object_list(box)
    return [measure(rank, num_ranks, box[0], *choice, rounds) for choice in candidates(num_ranks)]


def measure(
    rank: int, num_ranks: int, profile: Any, schedule: str, microbatches: int, rounds: int
) -> dict[str, Any]:
    """Seconds from one batch to the next, on the first rank."""
    batch = torch.zeros(SAMPLES, 4)
    options = PipelineOptions(
        num_stages=num_ranks, num_microbatches=microbatches, schedule=schedule, filling="none",
        profile=profile, optimizer_bytes_factor=0,
    )  # fmt: skip
    process = Process(rank, num_ranks, torch.device("cpu"), "gloo", timeout_s=60.0)
    pipeline = prepare(SleepingModel(), step, batch, options, process)
    engine, optimizer = pipeline.engine, torch.optim.SGD(pipeline.trained.values(), lr=0.0)
    dist.barrier()
    begun_s = []
    for index in range(WARMUP * num_ranks + rounds):
        begun_s.append(time.perf_counter())
        if isinstance(engine, FreeRunningEngine):
            engine.optimizers = [optimizer]
            engine.advance(batch, index)
        else:
            engine.run_step(batch, index)
            optimizer.step()
            optimizer.zero_grad()
    if isinstance(engine, FreeRunningEngine):
        engine.drain()
    begun_s = begun_s[WARMUP * num_ranks :]
    took_s = [b - a for a, b in pairwise(begun_s)]
    planned = pipeline.plan.planned
    engine.close()
    return {
        "ranks": num_ranks,
        "schedule": schedule,
        "M": microbatches,
        "measured, ms": 1e3 * statistics.fmean(took_s),
        "planned, ms": 1e3 * planned.iteration_s,
        "all ranks busy, ms": 1e3 * planned.no_bubble_limit_s,
    }


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each number of ranks, schedule and number of microbatches."""
    rows = []
    for num_ranks in (2, 4, 8):
        if arguments.only in (None, num_ranks):
            rows += on_ranks(num_ranks, measure_all, num_ranks, arguments.rounds)
    first = {row["ranks"]: row["measured, ms"] for row in reversed(rows)}
    return [
        {**row, "of 1F1B with M = ranks": row["measured, ms"] / first[row["ranks"]]} for row in rows
    ]


def options(parser: argparse.ArgumentParser) -> None:
    """Which ranks."""
    parser.add_argument("--only", type=int, help="this number of ranks only")


if __name__ == "__main__":
    main(run, __doc__ or "", options)
