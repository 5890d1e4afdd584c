"""Sleeping ranks: layers that take their time without using a core, so that eight ranks fit on two.

Bubbles are measured from the stamps of all ranks (one clock: all ranks are on one host) and compared with
the plan's.
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
from lightning_diffpipe.pipeline import Pipeline, Process
from lightning_diffpipe.planning.cluster import Cluster
from lightning_diffpipe.planning.frozen_parts import BATCHES_AHEAD
from lightning_diffpipe.planning.profile import (
    BackboneProfile,
    EncoderLayerProfile,
    EncoderProfile,
    LayerProfile,
    ModelProfile,
    Seconds,
)
from lightning_diffpipe.preparation import PipelineOptions, prepare
from lightning_diffpipe.runtime.ahead import Filling
from lightning_diffpipe.viewing.measured import measured_timeline

SAMPLES = 15  # of a microbatch; in groups of one sample there are about 15 for each rank
NUM_LAYERS, NUM_FROZEN, FORWARD_S = 24, 32, 0.006 / SAMPLES
_TIMER_S = 1.5e-4  # sleeping takes about this much longer than asked for


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


def nap(seconds: float) -> None:
    """Sleeps, the last moment awake, so that it takes as long as it should."""
    until_s = time.perf_counter() + seconds
    time.sleep(max(seconds - _TIMER_S, 0.0))
    while time.perf_counter() < until_s:
        pass


class Nap(torch.autograd.Function):
    """Sleeps in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:  # type: ignore[override]
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        nap(ctx.seconds)
        return gradient, None


class Sleeper(nn.Module):
    """A layer with a weight that takes its time for each sample."""

    def __init__(self, forward_s: float, backward_s: float | None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4), requires_grad=backward_s is not None)
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        nap(self.forward_s * len(x))
        y = x * self.scale
        return y if self.backward_s is None else Nap.apply(y, self.backward_s * len(x))


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


def model_and_profile(x: float) -> tuple[SleepingModel, ModelProfile]:
    """The model, and what it costs."""
    frozen_s = x * NUM_LAYERS * 3 * FORWARD_S / NUM_FROZEN
    forward, backward = Seconds.per_sample(FORWARD_S), Seconds.per_sample(2 * FORWARD_S)
    layers = tuple(LayerProfile(f"layers.{i}", forward, backward) for i in range(NUM_LAYERS))
    encoder = EncoderProfile(
        "encoder",
        tuple(
            EncoderLayerProfile(f"encoder.{i}", Seconds.per_sample(frozen_s))
            for i in range(NUM_FROZEN)
        ),
    )
    profile = ModelProfile("sleeping", (BackboneProfile("backbone", layers),), (encoder,))
    return SleepingModel(frozen_s), profile


def pipeline_of(rank: int, case: Emulated, filling: str) -> Pipeline:
    """A pipeline of sleeping layers."""
    torch.manual_seed(0)
    model, profile = model_and_profile(case.x)
    return prepare(
        model,
        lambda module, part, *arguments: module.training_step(part),
        torch.zeros(case.batch_size, 4),
        PipelineOptions(
            num_stages=case.num_ranks, num_microbatches=case.num_microbatches, filling=filling,
            profile=profile, cluster=Cluster(case.num_ranks), frozen_group_size=1,
        ),
        Process(rank, case.num_ranks, torch.device("cpu"), "gloo", timeout_s=60.0),
    )  # fmt: skip


def measure(rank: int, case: Emulated, rounds: int) -> dict[str, Any]:
    """Iteration times and bubble ratios, unfilled and filled."""
    batch = torch.zeros(case.batch_size, 4)
    found: dict[str, Any] = {}
    for filling in ("none", "shares"):
        pipeline = pipeline_of(rank, case, filling)
        engine, ahead = pipeline.engine, 0
        if filling == "shares":
            engine.fill_bubbles(Filling(planned_shares=pipeline.planned_shares))
            ahead = BATCHES_AHEAD
        steps, ratios = [], []
        warmup = 20 if ahead else 2  # until shares have settled
        for index in range(warmup + rounds):
            dist.barrier()
            started_s = time.perf_counter()
            missing = ahead - engine.num_prepared_behind(index)
            result = engine.run_step(batch, index, upcoming=[(batch, ())] * missing)
            dist.barrier()
            took_s = time.perf_counter() - started_s
            spans: list[Any] = [None] * case.num_ranks
            dist.all_gather_object(spans, list(result.recording.spans))
            timeline = measured_timeline(spans, [0.0] * case.num_ranks, pipeline.plan.placement)
            if index >= warmup:
                steps.append(took_s)
                ratios.append(timeline.bubble_ratio)
        planned = pipeline.plan.planned
        found[filling] = {
            "step_s": statistics.median(steps),
            "ratio": statistics.median(ratios),
            "planned_s": planned.iteration_s,
            "planned_ratio": planned.bubble_ratio,
        }
    return found


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
    }
