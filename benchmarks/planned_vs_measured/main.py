"""Does a step take as long as its plan says? Planned beside measured, on real and on emulated ranks.

Processes with one thread each profile the model, measure their links, plan, and train. A shared machine does not
keep its speed from the profile to the run, so the layers are timed once more, and runs of that profile and steps
of the pipeline take turns: what is compared with the measured step is the same plan, simulated with times from the
same minutes. Real ranks are two; on four and eight emulated ones, layers sleep.

    python benchmarks/planned_vs_measured/main.py --json out.json
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.harness import main, on_ranks
from benchmarks.planned_vs_measured.models import CASES, Case
from benchmarks.planned_vs_measured.sleepers import SLEEPING
from lightning_diffpipe.comm.bandwidth import measure_cluster
from lightning_diffpipe.graph.probe import probe
from lightning_diffpipe.graph.step import take_samples
from lightning_diffpipe.planning.cost import CostModel
from lightning_diffpipe.planning.evaluation import Evaluator, Proposal
from lightning_diffpipe.planning.plan import PipelinePlan
from lightning_diffpipe.planning.profile import ModelProfile
from lightning_diffpipe.planning.timeline import Span, Timeline
from lightning_diffpipe.profiling.measure import LayerTimer, default_counts
from lightning_diffpipe.training.pipeline import Pipeline, Process
from lightning_diffpipe.training.plan_source import PipelineOptions, measured_by_all
from lightning_diffpipe.training.preparation import prepare
from lightning_diffpipe.viewing.measured import explain_gap, measured_timeline

WARMUP = 3
TOLERANCE, POINTS = 0.03, 2.0

Step = tuple[int, Timeline]
"""How often other processes took a core away meanwhile, and what was measured."""


def measure_model(rank: int, case: Case, rounds: int) -> list[dict[str, Any]]:
    """A model on its ranks, several times from the start."""
    process = Process(rank, case.num_ranks, torch.device("cpu"), "gloo", timeout_s=60.0)
    turns = []
    for _ in range(case.turns):
        dist.barrier()
        torch.manual_seed(0)
        turns.append(planned_and_run(case, process, rounds))
    return turns


def planned_and_run(case: Case, process: Process, rounds: int) -> dict[str, Any]:
    """Plans as for a user; then pipeline steps between the runs of another profile."""
    batch, size = case.batch(case.batch_size), case.batch_size
    step = lambda module, part: module.training_step(part, 0)
    options = PipelineOptions(
        num_stages=case.num_stages,
        num_microbatches=case.num_microbatches,
        schedule=case.schedule,
        filling="none",
    )
    pipeline = prepare(case.make(), step, batch, options, process)
    steps = [one_step(pipeline, batch) for _ in range(WARMUP)]
    module = case.make()
    timer = LayerTimer(
        module,
        step,
        batch,
        probe(module, step, take_samples(batch, size, 2)),
        sample_counts=default_counts(size, size // case.num_microbatches),
        repeats=rounds,
        progress=lambda what, share: steps.append(one_step(pipeline, batch)),
        finds_results=False,
    )
    profile, _ = measured_by_all(timer, dist.group.WORLD)
    pipeline.dismantle()
    return compared(pipeline.plan, planned_again(pipeline.plan, profile), steps[WARMUP:])


def planned_again(plan: PipelinePlan, profile: ModelProfile) -> PipelinePlan:
    """The same cut and schedule with other layer times; links are measured anew, too."""
    cluster = measure_cluster(dist.group.WORLD, torch.device("cpu"))
    model = CostModel(profile, cluster, plan.options.optimizer_bytes_factor)
    return Evaluator(model, plan.options).plan(Proposal.of(plan, profile))


def one_step(pipeline: Pipeline, batch: Any) -> Step:
    """Runs a step that all ranks begin together, and puts their recordings side by side."""
    dist.barrier()
    before = preemptions()
    result = pipeline.engine.run_step(batch, 0)
    mine = (preemptions() - before, list(result.recording.spans))
    ranks = dist.get_world_size()
    noted: list[tuple[int, list[Span]]] = [(0, [])] * ranks
    dist.all_gather_object(noted, mine)
    timeline = measured_timeline([own for _, own in noted], [0.0] * ranks, pipeline.plan.placement)
    return sum(count for count, _ in noted), timeline


def compared(promised: PipelinePlan, plan: PipelinePlan, steps: list[Step]) -> dict[str, Any]:
    """Puts the median step beside the plan.

    Of the steps, those count in which other processes took a core away least often.

    Args:
        promised: The plan that is run.
        plan: The same with layer times from the minutes of the run.
        steps: All of them.
    """
    steps = sorted(steps, key=lambda step: step[0])
    timelines = [timeline for _, timeline in steps[: max(len(steps) // 2, 1)]]
    middle_s = statistics.median(timeline.iteration_s for timeline in timelines)
    median = min(timelines, key=lambda timeline: abs(timeline.iteration_s - middle_s))
    return {
        "ranks": plan.num_ranks,
        "promised_s": promised.planned.iteration_s,
        "planned_s": plan.planned.iteration_s,
        "measured_s": middle_s,
        "planned_ratio": plan.planned.bubble_ratio,
        "measured_ratio": statistics.median(timeline.bubble_ratio for timeline in timelines),
        "parts": {part.name: part.added_s for part in explain_gap(plan, median).parts},
    }


def preemptions() -> int:
    """How often this process has lost its core to another one."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def row_of(name: str, turns: list[dict[str, Any]]) -> dict[str, Any]:
    """The median turn as a row of the table."""
    excess = lambda turn: turn["measured_s"] / turn["planned_s"] - 1
    slower = statistics.median(map(excess, turns))
    points = 100 * statistics.median(t["measured_ratio"] - t["planned_ratio"] for t in turns)
    median = min(turns, key=lambda turn: abs(excess(turn) - slower))
    parts = sorted(median["parts"].items(), key=lambda part: -abs(part[1]))
    return {
        "model": name,
        "ranks": median["ranks"],
        "promised, ms": 1e3 * median["promised_s"],
        "planned, ms": 1e3 * median["planned_s"],
        "measured, ms": 1e3 * median["measured_s"],
        "difference": f"{100 * slower:+.1f} %",
        "turns": ", ".join(f"{100 * excess(turn):+.1f}" for turn in turns),
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
    for case in (*CASES, *SLEEPING):
        if re.search(only, case.name):
            turns = on_ranks(case.num_ranks, measure_model, case, arguments.rounds)
            rows.append(row_of(case.name, turns))
            print(rows[-1], flush=True)
    return rows


if __name__ == "__main__":
    main(run, __doc__)
