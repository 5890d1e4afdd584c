"""Does a step take as long as its plan says? Planned beside measured, on real and on emulated ranks.

Real ranks: two processes with one thread each profile the model, measure their link, plan, and train; the
clock of `Engine.run_step` is compared with the plan. A shared machine does not keep its speed from the profile to
the run, so both ranks also time an ordinary step of one microbatch, before and after the profile and between
the pipeline's steps: the change is divided out, and shown. Emulated ranks: layers that sleep for the time
their profile gives them, on four and eight processes.

    python benchmarks/planned_vs_measured/main.py --json out.json
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.harness import main, on_ranks
from benchmarks.planned_vs_measured.models import CASES, Case, batch_of
from benchmarks.planned_vs_measured.sleepers import SLEEPING, Sleeping, sleeper_of
from lightning_diffpipe.pipeline import Pipeline, Process
from lightning_diffpipe.planning.cluster import Cluster
from lightning_diffpipe.planning.timeline import Span, Timeline
from lightning_diffpipe.preparation import PipelineOptions, prepare
from lightning_diffpipe.profiling.cache import CACHE_VARIABLE, cache_folder
from lightning_diffpipe.viewing.gap import explain_gap
from lightning_diffpipe.viewing.measured import measured_timeline

WARMUP, TURNS, REFERENCES = 3, 3, 6
TOLERANCE, POINTS = 0.03, 2.0


def measure_model(rank: int, case: Case, rounds: int) -> list[dict[str, Any]]:
    """A real model on real ranks: profiled, planned and run in turns."""
    batch = batch_of(case.batch_size)
    options = PipelineOptions(
        num_stages=case.num_stages,
        num_microbatches=case.num_microbatches,
        schedule=case.schedule,
        filling="none",
    )
    process = Process(rank, 2, torch.device("cpu"), "gloo", timeout_s=60.0)
    step = lambda module, part: module.training_step(part, 0)
    whole, part = case.make(), batch_of(case.batch_size // case.num_microbatches)
    one_process = lambda: step(whole, part).backward()
    turns = []
    for _ in range(TURNS):
        shutil.rmtree(cache_folder(), ignore_errors=True)
        dist.barrier()
        torch.manual_seed(0)
        when_profiled = [timed(one_process) for _ in range(REFERENCES)]
        pipeline = prepare(case.make(), step, batch, options, process)
        when_profiled += [timed(one_process) for _ in range(REFERENCES)]
        turns.append(compared(pipeline, batch, rounds, one_process, when_profiled))
    return turns


def measure_sleeping(rank: int, case: Sleeping, rounds: int) -> list[dict[str, Any]]:
    """Layers that sleep, on as many ranks as the case has."""
    profile, module = sleeper_of(case)
    batch = torch.zeros(case.batch_size, 4)
    process = Process(rank, case.num_ranks, torch.device("cpu"), "gloo", timeout_s=60.0)
    options = PipelineOptions(
        num_stages=case.num_stages,
        num_microbatches=case.num_microbatches,
        schedule=case.schedule,
        filling="none",
        profile=profile,
        cluster=Cluster(case.num_ranks),
    )
    step = lambda module, part: module.training_step(part)
    return [compared(prepare(module, step, batch, options, process), batch, rounds)]


def timed(step: Callable[[], None]) -> float:
    """Seconds of a step that both ranks begin together."""
    dist.barrier()
    start_s = time.perf_counter()
    step()
    return time.perf_counter() - start_s


def compared(
    pipeline: Pipeline,
    batch: Any,
    rounds: int,
    one_process: Callable[[], None] | None = None,
    when_profiled: Sequence[float] = (),
) -> dict[str, Any]:
    """Runs steps, and puts the median one beside the plan.

    Of the steps, those count in which other processes took a core away least often.

    Args:
        pipeline: What to run.
        batch: Its batch.
        rounds: Counted steps.
        one_process: A step to be timed between the others.
        when_profiled: What that step took around the profile.
    """
    found: list[tuple[int, Timeline]] = []
    now: list[float] = []
    placement, ranks = pipeline.plan.placement, dist.get_world_size()
    for index in range(WARMUP + rounds):
        if one_process is not None:
            now.append(timed(one_process))
        dist.barrier()
        before = preemptions()
        result = pipeline.engine.run_step(batch, index)
        mine = (preemptions() - before, list(result.recording.spans))
        noted: list[tuple[int, list[Span]]] = [(0, [])] * ranks
        dist.all_gather_object(noted, mine)
        if index >= WARMUP:
            spans = [own for _, own in noted]
            timeline = measured_timeline(spans, [0.0] * ranks, placement)
            found.append((sum(count for count, _ in noted), timeline))
    found.sort(key=lambda step: step[0])
    timelines = [timeline for _, timeline in found[: max(rounds // 2, 1)]]
    planned = pipeline.plan.planned
    drift = torch.ones(1)
    if one_process is not None:
        drift[0] = statistics.median(now[WARMUP:]) / statistics.median(when_profiled)
        dist.all_reduce(drift)
        drift /= ranks
    middle_s = statistics.median(timeline.iteration_s for timeline in timelines)
    median = min(timelines, key=lambda timeline: abs(timeline.iteration_s - middle_s))
    return {
        "ranks": ranks,
        "planned_s": planned.iteration_s,
        "measured_s": middle_s,
        "drift": float(drift),
        "planned_ratio": planned.bubble_ratio,
        "measured_ratio": statistics.median(timeline.bubble_ratio for timeline in timelines),
        "parts": {part.name: part.added_s for part in explain_gap(pipeline.plan, median).parts},
    }


def preemptions() -> int:
    """How often this process has lost its core to another one."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def row_of(name: str, turns: list[dict[str, Any]]) -> dict[str, Any]:
    """The median turn as a row of the table."""
    excess = lambda turn: turn["measured_s"] / turn["drift"] / turn["planned_s"] - 1
    slower = statistics.median(map(excess, turns))
    points = 100 * statistics.median(t["measured_ratio"] - t["planned_ratio"] for t in turns)
    median = min(turns, key=lambda turn: abs(excess(turn) - slower))
    parts = sorted(median["parts"].items(), key=lambda part: -abs(part[1]))
    return {
        "model": name,
        "ranks": median["ranks"],
        "planned, ms": 1e3 * median["planned_s"],
        "measured, ms": 1e3 * median["measured_s"],
        "machine": f"{100 * (median['drift'] - 1):+.1f} %",
        "difference": f"{100 * slower:+.1f} %",
        "bubbles planned": f"{100 * median['planned_ratio']:.1f} %",
        "bubbles measured": f"{100 * median['measured_ratio']:.1f} %",
        "holds": "no" if abs(slower) > TOLERANCE or abs(points) > POINTS else "yes",
        "largest parts of the difference, ms": ", ".join(
            f"{part} {1e3 * added_s:+.1f}" for part, added_s in parts[:3]
        ),
    }


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each case whose name has the pattern in `$ONLY`."""
    rows: list[dict[str, Any]] = []
    only = os.environ.get("ONLY", "")
    with tempfile.TemporaryDirectory() as folder:
        os.environ[CACHE_VARIABLE] = folder
        for case in CASES:
            if re.search(only, case.name):
                turns = on_ranks(2, measure_model, case, arguments.rounds)
                rows.append(row_of(case.name, turns))
                print(rows[-1], flush=True)
        for nap in SLEEPING:
            if re.search(only, nap.name):
                turns = on_ranks(nap.num_ranks, measure_sleeping, nap, arguments.rounds)
                rows.append(row_of(nap.name, turns))
                print(rows[-1], flush=True)
    return rows


if __name__ == "__main__":
    main(run, __doc__)
