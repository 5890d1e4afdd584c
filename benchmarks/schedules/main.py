"""Every schedule that runs, planned and measured: seconds a batch on 2 to 8 sleeping ranks.

    python benchmarks/schedules/main.py --json out.json
    python benchmarks/schedules/main.py --only 2
    python benchmarks/schedules/main.py --part steps      self-conditioning, a U-Net, frozen work in bubbles

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
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.harness import main, on_ranks
from benchmarks.schedules.steps import PARTS, SAMPLE_SHAPE, Case, profile_of, step
from benchmarks.sleeping import nap
from lightning_diffpipe.comm.transport import MessageKey, Transport
from lightning_diffpipe.planning.cluster import Link
from lightning_diffpipe.planning.filling import LOOKAHEAD_BATCHES
from lightning_diffpipe.runtime.free_running import FreeRunningEngine
from lightning_diffpipe.runtime.upcoming import Filling
from lightning_diffpipe.training.pipeline import Pipeline, Process
from lightning_diffpipe.training.plan_source import PipelineOptions
from lightning_diffpipe.training.preparation import prepare


def measure_all(rank: int, num_ranks: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """All cases of a number of ranks, one after the other."""
    rows = []
    for group in PARTS[arguments.part](num_ranks):
        measured = [measure(rank, num_ranks, case, arguments) for case in group]
        first_ms = measured[0]["measured, ms"]
        rows += [{**row, "of the first": row["measured, ms"] / first_ms} for row in measured]
    return rows


def measure(rank: int, num_ranks: int, case: Case, arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds from one batch to the next, on the first rank."""
    batch = torch.zeros(case.num_samples, *SAMPLE_SHAPE)
    module = case.module(num_ranks, arguments.work)
    cluster = case.cluster(num_ranks, arguments.work)
    options = PipelineOptions(
        num_stages=case.num_stages, num_microbatches=case.num_microbatches, schedule=case.schedule,
        filling="shares" if case.filled else "none", frozen_group_size=1, data_parallel=1,
        profile=profile_of(module, batch), cluster=cluster, optimizer_bytes_factor=0,
    )  # fmt: skip
    process = Process(rank, num_ranks, torch.device("cpu"), "gloo", timeout_s=120.0)
    pipeline = prepare(module, step, batch, options, process)
    with mock.patch.object(Transport, "send", sending_over(cluster.p2p)):
        took_s, sent_bytes = run_steps(pipeline, batch, arguments.rounds)
    pipeline.engine.close()
    box: list[Any] = [None] * num_ranks
    dist.all_gather_object(box, sent_bytes)
    planned, took_s = pipeline.plan.planned, statistics.median(took_s)
    return {
        "step": case.name,
        "ranks": num_ranks,
        "schedule": case.schedule,
        "M": case.num_microbatches,
        "x": f"{case.x:g}",
        "filled": "yes" if case.filled else "no",
        "sent, KiB": round(sum(box) / 1024),
        "limit, ms": 1e3 * planned.no_bubble_limit_s,
        "planned, ms": 1e3 * planned.iteration_s,
        "measured, ms": 1e3 * took_s,
        "measured / planned": took_s / planned.iteration_s,
        "measured / limit": took_s / planned.no_bubble_limit_s,
    }


def sending_over(link: Link) -> Any:
    """`Transport.send` over a link that holds its sender, unless it is free."""
    send = Transport.send
    if link == Link():
        return send

    def send_slowly(transport: Transport, key: MessageKey, buffer: Tensor, to: int) -> None:
        nap(link.seconds(buffer.numel()))
        send(transport, key, buffer, to)

    return send_slowly


def run_steps(pipeline: Pipeline, batch: Tensor, rounds: int) -> tuple[list[float], float]:
    """Seconds from one batch to the next, and bytes that this rank sends for one."""
    engine, num_ranks = pipeline.engine, pipeline.mesh.layout.world_size
    runs_freely = isinstance(engine, FreeRunningEngine)
    optimizer = torch.optim.SGD(pipeline.trained.values(), lr=0.0)
    if pipeline.fills:
        engine.fill_bubbles(Filling(planned_shares=pipeline.planned_shares))
    warmup = 2 * num_ranks if runs_freely else 6 if pipeline.fills else 2
    dist.barrier()
    begun_s = []
    for index in range(warmup + rounds + 1):
        begun_s.append(time.perf_counter())
        if runs_freely:
            engine.optimizers = [optimizer]
            engine.advance(batch, index)
        else:
            missing = LOOKAHEAD_BATCHES - engine.num_prepared_after(index) if pipeline.fills else 0
            engine.run_step(batch, index, upcoming=[(batch, ())] * missing)
            optimizer.step()
            optimizer.zero_grad()
    if runs_freely:
        engine.drain()
    engine.drop_prepared()
    return [b - a for a, b in pairwise(begun_s[warmup:])], engine.num_bytes_sent / len(begun_s)


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each number of ranks and case."""
    rows = []
    for num_ranks in (2, 4, 8):
        if arguments.only in (None, num_ranks):
            rows += on_ranks(num_ranks, measure_all, num_ranks, arguments)
    return rows


def options(parser: argparse.ArgumentParser) -> None:
    """Which rows, and how long they take."""
    parser.add_argument("--part", choices=PARTS, default="schedules", help="which rows")
    parser.add_argument("--only", type=int, help="this number of ranks only")
    parser.add_argument("--work", type=float, default=0.4, help="seconds of a rank and batch")


if __name__ == "__main__":
    main(run, __doc__ or "", options)
