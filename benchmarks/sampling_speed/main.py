"""Two real ranks: PipeFusion against one rank, its formula, and sequence parallelism.

All candidates sample the same Flux transformer from the same noise. PipeFusion's result is compared with its
emulator bit for bit, the exact methods with one process; that is also what warms everything up. What two
processes cost each other on one machine is measured, too: both compute the whole image at once. And so is what
patches cost in one process, without any messages or waiting: the formula takes it for nothing.

    python benchmarks/sampling_speed/main.py --tokens 576 1024 --json out.json
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.harness import environment, interleaved, medians, on_ranks, table
from lightning_diffpipe.comm.links import ProcessLinks
from lightning_diffpipe.sampling.distrifusion import DistriFusion
from lightning_diffpipe.sampling.pipefusion import PipeFusion, SequenceParallel
from lightning_diffpipe.sampling.request import Request

STEPS, WARMUP, TEXT = 8, 1, 64
BESIDE, PATCHED = "one rank beside another", "one rank in patches"
OTHERS = ("Ulysses", "ring", "synchronous bands", "diffusers Ulysses")


def build() -> FluxTransformer2DModel:
    """Eight blocks of width 512 with random weights."""
    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=2, num_single_layers=6, attention_head_dim=64,
        num_attention_heads=8, joint_attention_dim=64, pooled_projection_dim=32,
        axes_dims_rope=(16, 24, 24),
    )  # fmt: skip
    return model.eval().requires_grad_(False)


def request_for(model: FluxTransformer2DModel, tokens: int) -> Request:
    """A square image of so many tokens; guidance is distilled, so the batch is one."""
    side = int(tokens**0.5)
    draw = torch.Generator().manual_seed(1)
    text, pooled = torch.randn(1, TEXT, 64, generator=draw), torch.randn(1, 32, generator=draw)
    ids = torch.cartesian_prod(torch.arange(1), torch.arange(side), torch.arange(side)).float()
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(STEPS)

    def denoise(x: Tensor, t: Tensor) -> Tensor:
        out: Tensor = model(
            x, encoder_hidden_states=text, pooled_projections=pooled, timestep=t.expand(1) / 1000,
            img_ids=ids, txt_ids=torch.zeros(TEXT, 3), return_dict=False,
        )[0]  # fmt: skip
        return out

    latents = torch.randn(1, tokens, 16, generator=draw)
    return Request(model, denoise, scheduler, scheduler.timesteps, latents)


@torch.inference_mode()
def plainly(request: Request) -> Tensor:
    """One process, as a diffusers pipeline does it."""
    scheduler, x = copy.deepcopy(request.scheduler), request.latents
    for t in request.timesteps:
        x = scheduler.step(request.denoise(x, t), t, x).prev_sample
    return x


def diffusers_ulysses(tokens: int) -> Any:
    """Diffusers' own context parallelism, if it runs here."""
    from diffusers import ContextParallelConfig

    model = build()
    model.set_attention_backend("native")
    # Theirs divides the rank by the number of accelerators, of which a CPU has none.
    with mock.patch("torch.accelerator.device_count", return_value=1):
        model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2))
    request = request_for(model, tokens)
    return lambda: plainly(request)


def compare(
    rank: int, tokens: int, num_patches: int, rounds: int, others: Sequence[str]
) -> dict[str, Any]:
    """One row of the table, with some of the `OTHERS`."""
    links = ProcessLinks.connect([[0, 1]], torch.device("cpu"))
    model = build()
    request = request_for(model, tokens)
    pipefusion = PipeFusion(model, links, num_patches=num_patches, warmup_steps=WARMUP)
    exact: dict[str, Any] = {
        "Ulysses": SequenceParallel(model, links),
        "ring": SequenceParallel(model, links, mode="ring"),
        "synchronous bands": DistriFusion(model, links, "synchronous"),
    }
    layout = pipefusion.prepare(request).layout
    for mode in ("Ulysses", "ring"):
        exact[mode].layouts.add(request, layout)
    exact = {name: sampler for name, sampler in exact.items() if name in others}
    emulator = PipeFusion(model, num_patches=num_patches, warmup_steps=WARMUP)
    emulator.layouts.add(request, layout)
    check(request, emulator, pipefusion, exact)
    candidates = {
        "one rank": lambda: plainly(request) if rank == 0 else None,
        BESIDE: lambda: plainly(request),
        PATCHED: lambda: emulator.sample(request) if rank == 0 else None,
        "PipeFusion": lambda: pipefusion.sample(request),
    } | {name: lambda sampler=sampler: sampler.sample(request) for name, sampler in exact.items()}
    if "diffusers Ulysses" in others:
        try:
            theirs = diffusers_ulysses(tokens)
            theirs()
            candidates["diffusers Ulysses"] = theirs
        except Exception as error:
            if rank == 0:
                said = f"{type(error).__name__}: {str(error)[:300]}"
                print(f"diffusers' Ulysses does not run here: {said}")
    times = interleaved(candidates, rounds, warmup_rounds=0)
    seconds = medians(times)
    if rank == 0:
        print(tokens, times, flush=True)
    row = {"tokens": tokens, "M": num_patches} | row_of(seconds, num_patches, others)
    row["of what patches allow"] = row["PipeFusion"] / allowed(num_patches, seconds)
    dist.barrier()
    return row


def check(
    request: Request, emulator: PipeFusion, pipefusion: PipeFusion, exact: dict[str, Any]
) -> None:
    """Compares results with what they should be."""
    assert torch.equal(pipefusion.sample(request), emulator.sample(request)), (
        "ranks change the result"
    )
    expected = plainly(request)
    for sampler in exact.values():
        torch.testing.assert_close(sampler.sample(request), expected, rtol=1e-3, atol=1e-3)


def row_of(seconds: dict[str, float], num_patches: int, others: Sequence[str]) -> dict[str, Any]:
    """Speed-ups over one rank."""
    one = seconds["one rank"]
    row: dict[str, Any] = {
        "one rank, s": one,
        "slower beside another": seconds[BESIDE] / one,
        "slower in patches": seconds[PATCHED] / one,
    }
    for name in ("PipeFusion", *others):
        row[name] = one / seconds[name] if name in seconds else "does not run"
    row["formula"] = formula = in_time(num_patches, 1.0)
    row["PipeFusion / formula"] = row["PipeFusion"] / formula
    row["fastest"] = min(("PipeFusion", *others), key=lambda name: seconds.get(name, math.inf))
    return row


def allowed(num_patches: int, seconds: dict[str, float]) -> float:
    """The formula's speed-up on two ranks, with steps in patches as much slower as they are in one process."""
    in_patches = STEPS - WARMUP
    slower = (STEPS * seconds[PATCHED] / seconds["one rank"] - WARMUP) / in_patches
    return in_time(num_patches, slower)


def in_time(num_patches: int, slower: float) -> float:
    """The speed-up of two ranks, `S N / (W N + S - W + (N - 1) / M)` where steps in patches are not slower."""
    return 2 * STEPS / (2 * WARMUP + slower * (STEPS - WARMUP + 1 / num_patches))


def main() -> None:
    """Runs all sizes and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 576, 1024])
    parser.add_argument("--patches", type=int, nargs="+", default=[4], help="PipeFusion's M")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--others", nargs="*", choices=OTHERS, default=OTHERS)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for tokens, num_patches in itertools.product(arguments.tokens, arguments.patches):
        settings = tokens, num_patches, arguments.rounds, arguments.others
        rows.append(on_ranks(2, compare, *settings))
        print(rows[-1], flush=True)
    print(table(rows))
    if arguments.json:
        out = {"environment": environment(), "rows": rows}
        arguments.json.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
