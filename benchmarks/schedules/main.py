"""Every schedule that runs, planned and measured: seconds a batch on 2 to 8 sleeping ranks.

    python benchmarks/schedules/main.py --json out.json
    python benchmarks/schedules/main.py --only 2

Layers sleep as long as their profile says, forward, and in both halves of their backward, so that eight ranks
fit on two cores. What a schedule takes more than was planned is the runtime, messages, and other work
of the machine.
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
from lightning_diffpipe.planning.profile import (
    BackboneProfile,
    LayerProfile,
    ModelProfile,
    Seconds,
)
from lightning_diffpipe.runtime.free_running import FreeRunningEngine
from lightning_diffpipe.training.pipeline import Process
from lightning_diffpipe.training.pipeline_options import PipelineOptions
from lightning_diffpipe.training.preparation import prepare

NUM_LAYERS, SAMPLES = 16, 16
WORK_S = 0.4  # of every rank, for a batch


class Backbones(nn.Module):
    """Equal layers, in one chain or in several that know nothing of each other."""

    def __init__(self, num_chains: int, forward_s: float) -> None:
        super().__init__()
        self.num_chains = num_chains
        self.layers = nn.ModuleList(
            Sleeper(forward_s, forward_s, weight_s=forward_s) for _ in range(NUM_LAYERS)
        )

    def training_step(self, batch: Tensor) -> Tensor:
        size, losses = NUM_LAYERS // self.num_chains, []
        for first in range(0, NUM_LAYERS, size):
            x = batch
            for layer in self.layers[first : first + size]:
                x = layer(x)
            losses.append(x.square().mean())
        return torch.stack(losses).sum()


def step(module: nn.Module, part: Tensor) -> Tensor:
    """Module and batch to loss."""
    return module.training_step(part)


def profile_of(forward_s: float) -> ModelProfile:
    """What the layers sleep."""
    seconds = Seconds.per_sample
    layers = tuple(
        LayerProfile(f"layers.{i}", seconds(forward_s), seconds(2 * forward_s), seconds(forward_s))
        for i in range(NUM_LAYERS)
    )
    return ModelProfile("sleeping layers", (BackboneProfile("layers", layers),))


def candidates(num_ranks: int) -> list[tuple[int, str, int, int]]:
    """Chains, schedule, stages, microbatches; others are compared with the first of so many chains."""
    few, many = num_ranks, 2 * num_ranks
    return [
        *((1, name, num_ranks, m) for m in (few, many) for name in ("1f1b", "gpipe", "zero_bubble")),
        *((1, n, 2 * num_ranks, few) for n in ("interleaved", "v", "zero_bubble_v")),
        (1, "pipedream", num_ranks, 1),
        (1, "pipedream_vertical_sync", num_ranks, 1),
        (1, "pipedream_2bw", num_ranks, few),
        (2, "1f1b", num_ranks, few),
        (2, "bidirectional", 2 * num_ranks, few),
    ]  # fmt: skip


def measure_all(rank: int, num_ranks: int, rounds: int) -> list[dict[str, Any]]:
    """All schedules on a number of ranks, one after the other."""
    return [measure(rank, num_ranks, rounds, *choice) for choice in candidates(num_ranks)]


def measure(
    rank: int, num_ranks: int, rounds: int, chains: int, schedule: str, stages: int, count: int
) -> dict[str, Any]:
    """Seconds from one batch to the next, on the first rank."""
    forward_s = WORK_S * num_ranks / (3 * NUM_LAYERS * SAMPLES)
    batch, module = torch.zeros(SAMPLES, 4), Backbones(chains, forward_s)
    options = PipelineOptions(
        num_stages=stages, num_microbatches=count, schedule=schedule, filling="none", data_parallel=1,
        profile=profile_of(forward_s), cluster={"num_ranks": num_ranks}, optimizer_bytes_factor=0,
    )  # fmt: skip
    process = Process(rank, num_ranks, torch.device("cpu"), "gloo", timeout_s=120.0)
    pipeline = prepare(module, step, batch, options, process)
    engine, optimizer = pipeline.engine, torch.optim.SGD(pipeline.trained.values(), lr=0.0)
    warmup = 2 * num_ranks if isinstance(engine, FreeRunningEngine) else 2
    dist.barrier()
    begun_s = []
    for index in range(warmup + rounds + 1):
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
    took_s = [b - a for a, b in pairwise(begun_s[warmup:])]
    planned = pipeline.plan.planned
    engine.close()
    return {
        "ranks": num_ranks,
        "backbones": chains,
        "schedule": schedule,
        "M": count,
        "planned, ms": 1e3 * planned.iteration_s,
        "measured, ms": 1e3 * statistics.median(took_s),
        "measured / planned": statistics.median(took_s) / planned.iteration_s,
    }


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each number of ranks, schedule and number of microbatches."""
    rows = []
    for num_ranks in (2, 4, 8):
        if arguments.only in (None, num_ranks):
            rows += on_ranks(num_ranks, measure_all, num_ranks, arguments.rounds)
    first = {(row["ranks"], row["backbones"]): row["measured, ms"] for row in reversed(rows)}
    return [
        {**row, "of 1F1B": row["measured, ms"] / first[row["ranks"], row["backbones"]]}
        for row in rows
    ]


def options(parser: argparse.ArgumentParser) -> None:
    """Which ranks."""
    parser.add_argument("--only", type=int, help="this number of ranks only")


if __name__ == "__main__":
    main(run, __doc__ or "", options)
