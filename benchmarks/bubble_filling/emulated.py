"""Sleeping ranks: layers that take their time without using a core, so that eight ranks fit on two.

The profile is measured as in training, by all ranks at once: on two cores a layer takes longer than it sleeps.
Bubbles and frozen work are measured from the stamps of all ranks (one clock: all ranks are on one host) and
compared with the plan's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.harness import on_ranks, table
from benchmarks.sleeping import Sleeper
from lightning_diffpipe.graph.probe import probe
from lightning_diffpipe.planning.filling import LOOKAHEAD_BATCHES
from lightning_diffpipe.planning.instruction import Encode
from lightning_diffpipe.planning.profile import ModelProfile
from lightning_diffpipe.planning.timeline import Timeline
from lightning_diffpipe.profiling.measure import LayerTimer
from lightning_diffpipe.runtime.upcoming import Filling
from lightning_diffpipe.training.pipeline import Pipeline, Process
from lightning_diffpipe.training.plan_source import PipelineOptions, measured_by_all
from lightning_diffpipe.training.preparation import prepare
from lightning_diffpipe.viewing.measured import measured_timeline

SAMPLES = 15  # of a microbatch; in groups of one sample there are about 15 for each rank
NUM_LAYERS, NUM_FROZEN, FORWARD_S = 24, 8, 0.006 / SAMPLES
PROFILE_RUNS = 5


@dataclass(frozen=True)
class Emulated:
    """One row."""

    num_ranks: int
    num_microbatches: int
    x: float

    @property
    def batch_size(self) -> int:
        """Samples of all microbatches."""
        return SAMPLES * self.num_microbatches


CASES = {
    2: [Emulated(2, 2, 0.43), Emulated(2, 2, 0.8944), Emulated(2, 4, 0.8944)],
    3: [Emulated(3, 3, 0.8944)],
    4: [Emulated(4, 3, 0.8944), Emulated(4, 4, 0.43), Emulated(4, 4, 0.8944)],
    8: [Emulated(8, 8, 0.43), Emulated(8, 8, 0.8944)],
}


class SleepingModel(nn.Module):
    """Frozen layers and trained ones, all alike among themselves."""

    def __init__(self, frozen_s: float) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*[Sleeper(frozen_s, None) for _ in range(NUM_FROZEN)])
        self.layers = nn.ModuleList([Sleeper(FORWARD_S, 2 * FORWARD_S) for _ in range(NUM_LAYERS)])

    def training_step(self, batch: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.encoder(batch)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def step(module: nn.Module, part: Tensor) -> Tensor:
    """Module and batch to loss."""
    return module.training_step(part)


def model_of(case: Emulated) -> SleepingModel:
    """The model of a row; the same on all ranks."""
    torch.manual_seed(0)
    return SleepingModel(case.x * NUM_LAYERS * 3 * FORWARD_S / NUM_FROZEN)


def profile_of(case: Emulated, batch: Tensor) -> ModelProfile:
    """What layers take, by all ranks at once: sleep, and the code around it."""
    module = model_of(case)
    timer = LayerTimer(
        module,
        step,
        batch,
        probe(module, step, batch[:2]),
        sample_counts=(1, SAMPLES),
        repeats=PROFILE_RUNS,
        finds_results=False,
    )
    profile, _ = measured_by_all(timer, dist.group.WORLD)
    return profile


def pipeline_of(rank: int, case: Emulated, filling: str, profile: ModelProfile) -> Pipeline:
    """A pipeline of sleeping layers."""
    return prepare(
        model_of(case),
        step,
        torch.zeros(case.batch_size, 4),
        PipelineOptions(
            num_stages=case.num_ranks, num_microbatches=case.num_microbatches, filling=filling,
            profile=profile, frozen_group_size=1,
        ),
        Process(rank, case.num_ranks, torch.device("cpu"), "gloo", timeout_s=60.0),
    )  # fmt: skip


def measure(rank: int, case: Emulated, rounds: int) -> dict[str, Any]:
    """Iteration times and bubble ratios, unfilled and filled."""
    batch = torch.zeros(case.batch_size, 4)
    profile = profile_of(case, batch)
    found: dict[str, Any] = {}
    for filling in ("none", "shares"):
        pipeline = pipeline_of(rank, case, filling, profile)
        engine, ahead = pipeline.engine, 0
        if filling == "shares":
            engine.fill_bubbles(Filling(planned_shares=pipeline.planned_shares))
            ahead = LOOKAHEAD_BATCHES
        steps, ratios, frozen = [], [], []
        warmup = 20 if ahead else 2  # until shares hardly change
        for index in range(warmup + rounds):
            dist.barrier()
            started_s = time.perf_counter()
            missing = ahead - engine.num_prepared_after(index)
            result = engine.run_step(batch, index, upcoming=[(batch, ())] * missing)
            dist.barrier()
            took_s = time.perf_counter() - started_s
            spans: list[Any] = [None] * case.num_ranks
            dist.all_gather_object(spans, list(result.recording.spans))
            timeline = measured_timeline(spans, [0.0] * case.num_ranks, pipeline.plan.placement)
            if index >= warmup:
                steps.append(took_s)
                ratios.append(timeline.bubble_ratio)
                frozen.append(frozen_s(timeline))
        planned = pipeline.plan.planned
        found[filling] = {
            "step_s": statistics.median(steps),
            "ratio": statistics.median(ratios),
            "frozen_s": statistics.median(frozen),
            "planned_s": planned.iteration_s,
            "planned_ratio": planned.bubble_ratio,
            "planned_frozen_s": frozen_s(pipeline.plan.timeline),
        }
    return found


def frozen_s(timeline: Timeline) -> float:
    """Frozen work in a step, of a rank on average."""
    encodes = [span for span in timeline.spans if isinstance(span.instruction, Encode)]
    return sum(span.duration_s for span in encodes) / timeline.num_ranks


def measure_all(rank: int, num_ranks: int, rounds: int) -> list[dict[str, Any]]:
    """All cases of a number of ranks, in one group of processes."""
    return [measure(rank, case, rounds) for case in CASES[num_ranks]]


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each number of ranks, microbatches and share of frozen work."""
    rows = []
    for num_ranks, cases in CASES.items():
        if arguments.only and int(arguments.only) != num_ranks:
            continue
        results = on_ranks(num_ranks, measure_all, num_ranks, arguments.rounds)
        rows += [row_of(case, found) for case, found in zip(cases, results, strict=True)]
        print(table(rows), flush=True)
    return rows


def row_of(case: Emulated, found: dict[str, Any]) -> dict[str, Any]:
    """Measured beside planned."""
    unfilled, filled = found["none"], found["shares"]
    return {
        "ranks": case.num_ranks,
        "M": case.num_microbatches,
        "x": f"{case.x:g}",
        "unfilled, ms": 1e3 * unfilled["step_s"],
        "filled, ms": 1e3 * filled["step_s"],
        "speed-up": unfilled["step_s"] / filled["step_s"],
        "planned speed-up": unfilled["planned_s"] / filled["planned_s"],
        "bubbles unfilled": f"{100 * unfilled['ratio']:.1f}%",
        "planned unfilled": f"{100 * unfilled['planned_ratio']:.1f}%",
        "bubbles filled": f"{100 * filled['ratio']:.1f}%",
        "planned filled": f"{100 * filled['planned_ratio']:.1f}%",
        "frozen unfilled, ms": 1e3 * unfilled["frozen_s"],
        "frozen filled, ms": 1e3 * filled["frozen_s"],
        "frozen planned, ms": 1e3 * filled["planned_frozen_s"],
    }
