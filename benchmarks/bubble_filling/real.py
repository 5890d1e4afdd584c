"""Two real ranks: gradients of every system compared with one process, then all timed in turns."""

from __future__ import annotations

import argparse
import copy
import importlib.util
import statistics
import warnings
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.bubble_filling.peers import (
    FILLED,
    LIMITS,
    OURS,
    SYSTEMS,
    filled,
    gradients,
    half_of,
)
from benchmarks.bubble_filling.workloads import make
from benchmarks.harness import interleaved, medians, on_ranks, table
from benchmarks.two_ranks.main import worst_error
from lightning_diffpipe import profile

STEPS_PER_TURN = 6  # by default; caches and memory are another system's at first
PROFILE_BUDGET_S = 40.0  # one profile for all plans of a case
WORKLOADS = (
    "stable_diffusion", "controlnet", "stable_diffusion_large", "controlnet_large", "light_encoders"
)  # fmt: skip
CASES = [(name, m) for name in WORKLOADS for m in (2, 4)]


def compare(
    rank: int,
    workload: str,
    microbatches: int,
    rounds: int,
    systems: list[str],
    num_steps: int = STEPS_PER_TURN,
) -> dict[str, Any]:
    """Checks gradients of all systems, then times them in turns of a few steps."""
    warnings.simplefilter("ignore")
    model, batch = make(workload)
    reference = copy.deepcopy(model)
    reference.training_step(batch, 0).backward()
    wanted = gradients(reference)
    measured = profile(model, batch, budget_s=PROFILE_BUDGET_S)
    steps, errors, planned, work_s = {}, {}, {}, {}
    for name in systems:
        own = copy.deepcopy(model)
        options = {"profile": measured} if name in OURS else {}
        step = SYSTEMS[name](own, batch, microbatches, rank, **options)
        if name in FILLED:
            planned[name] = step.planned.no_bubble_limit_s, step.planned.iteration_s
            work_s[name] = step.work_s
        errors[name] = parity(name, step, own, wanted)
        steps[name] = turns(step, own, num_steps)
    times = interleaved(steps, rounds, warmup_rounds=2)
    return {
        "times": {n: [t / num_steps for t in times[n]] for n in times},
        "errors": errors,
        "planned": planned,
        "work": {name: over_ranks(work_s[name][-rounds * num_steps :]) for name in work_s},
        "frozen share": frozen_share(model, batch, microbatches),
    }


def parity(name: str, step: Any, model: Any, wanted: dict[str, torch.Tensor]) -> float:
    """The worst error of a system's gradients against one process; later steps must agree, too."""
    if name in LIMITS:  # half of the batch on each rank, nothing summed
        return 0.0
    found = getattr(step, "gradients", None)
    error = 0.0
    # The second step of a filled pipeline reads what the first encoded.
    for _ in range(1 if found else 2):
        if not found:
            step()
        got = found or gradients(model)
        wrong = worst_error(got, wanted)
        assert wrong < 1e-3, f"{name}: gradients are off by {wrong:.1e}"
        error = max(error, wrong)
    return error


def over_ranks(work_s: list[float]) -> float:
    """All ranks' forwards, backwards and frozen work of a step over the number of ranks: the mean of some steps."""
    total = torch.tensor(statistics.mean(work_s), dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def turns(step: Any, model: Any, num_steps: int = STEPS_PER_TURN) -> Any:
    """Several steps in a row: a filled step depends on the one before it."""

    def turn() -> None:
        for _ in range(num_steps):
            step()
            model.zero_grad(set_to_none=True)

    return turn


def frozen_share(model: Any, batch: Any, microbatches: int) -> float:
    """Frozen time over trained forward and backward, in one process while the other ranks do the same."""
    with torch.no_grad():
        tokens = model.encoder(batch)
    parts = list(zip(tokens.chunk(microbatches), batch["target"].chunk(microbatches), strict=True))

    def frozen() -> None:
        with torch.no_grad():
            model.encoder(half_of(batch, 0))

    def trained() -> None:
        for part, target in parts[: microbatches // 2]:
            torch.nn.functional.mse_loss(model.denoiser(part), target).backward()

    seconds = medians(interleaved({"frozen": frozen, "trained": trained}, 5))
    return seconds["frozen"] / seconds["trained"]


def two_ranks(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each workload and number of microbatches."""
    rows = []
    systems = [s for s in SYSTEMS if s != "DeepSpeed" or importlib.util.find_spec("deepspeed")]
    if arguments.systems is not None:
        systems = [LIMITS[0], "filled", LIMITS[1], *filter(None, arguments.systems.split(","))]
    for workload, microbatches in CASES:
        if arguments.only and f"{workload}-{microbatches}" not in arguments.only.split(","):
            continue
        found = on_ranks(
            2, compare, workload, microbatches, arguments.rounds, systems, arguments.steps
        )
        median, errors = medians(found["times"]), found["errors"]
        ours = median["filled"]
        others = [s for s in systems if s not in (*LIMITS, *FILLED)]
        planned = found["planned"]
        won = {name: within(found["times"], name) for name in planned}
        rows.append(
            {
                "workload": workload,
                "M": microbatches,
                "x": found["frozen share"],
                "filled, ms": 1e3 * ours,
                **{
                    f"limit / {name}": f"{won[name]:.3f} "
                    f"({planned[name][0] / planned[name][1]:.3f})"
                    for name in planned
                },
                "work / filled": found["work"]["filled"]
                / statistics.mean(found["times"]["filled"]),
                "limit out of step / filled": f"{within(found['times'], 'filled', LIMITS[1]):.3f}",
                **{f"{name} / filled": median[name] / ours for name in others},
                "worst gradient error": f"{max(errors.values()):.0e}",
            }
        )
        print(table(rows[-1:]), flush=True)
    return rows


def within(times: dict[str, list[float]], name: str, limit: str = LIMITS[0]) -> float:
    """How near a system comes to a limit: the median over rounds, as the machine's speed drifts."""
    rounds = zip(times[limit], times[name], strict=True)
    return statistics.median(best / own for best, own in rounds)


def compare_groups(rank: int, microbatches: int, rounds: int) -> dict[str, list[float]]:
    """The workload with one very long frozen layer, encoded in whole shares and in groups of samples."""
    warnings.simplefilter("ignore")
    model, batch = make("long_layer")
    options = {"profile": profile(model, batch, budget_s=PROFILE_BUDGET_S)}
    own = copy.deepcopy(model)
    steps = {"limit": turns(SYSTEMS["limit"](own, batch, microbatches, rank), own)}
    own = copy.deepcopy(model)
    steps["unfilled"] = turns(SYSTEMS["unfilled"](own, batch, microbatches, rank, **options), own)
    for name, size in (
        ("whole shares", len(batch["ids"]) // 2),
        ("parts of 4", 4),
        ("parts of 1", 1),
    ):
        own = copy.deepcopy(model)
        step = filled(own, batch, microbatches, rank, frozen_group_size=size, **options)
        steps[name] = turns(step, own)
    times = interleaved(steps, rounds, warmup_rounds=2)
    return {name: [t / STEPS_PER_TURN for t in values] for name, values in times.items()}


def long_layer(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each number of microbatches."""
    rows = []
    for microbatches in (2, 4):
        times = on_ranks(2, compare_groups, microbatches, arguments.rounds)
        median = medians(times)
        rows.append(
            {
                "M": microbatches,
                "unfilled, ms": 1e3 * median["unfilled"],
                **{
                    f"{name}: limit / filled": within(times, name)
                    for name in ("whole shares", "parts of 4", "parts of 1")
                },
                "unfilled / filled (parts of 4)": median["unfilled"] / median["parts of 4"],
            }
        )
    return rows
