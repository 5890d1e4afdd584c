"""Four and eight emulated ranks: real messages of the real size on links of limited speed, sleeping blocks.

Every rank is a thread that runs the sampler as it is; only a block's arithmetic is replaced by sleeping as long as
its share of the tokens would take, and links are as slow as they are told to be. What is measured is therefore the
schedule: how well computing and sending overlap. It is shown next to the plan, and to the planner's choice.

    python benchmarks/sampling_speed/emulated.py --json emulated.json
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.harness import environment, table
from lightning_diffpipe.planning.cluster import Link
from lightning_diffpipe.planning.sampling_candidates import DenoiserProfile
from lightning_diffpipe.planning.sampling_choice import choose_sampling
from lightning_diffpipe.planning.sampling_pipefusion import PipeFusionPlan
from lightning_diffpipe.sampling.loopback import LoopbackNetwork
from lightning_diffpipe.sampling.pipefusion import PipeFusion
from lightning_diffpipe.sampling.request import Request
from lightning_diffpipe.sampling.sequence_parallel import SequenceParallel

BLOCKS, ROWS, WIDTH, STEPS, WARMUP = 16, 256, 64, 10, 1
BLOCK_S = 0.12  # all tokens through one block
CUT_BYTES = ROWS * WIDTH * 4


class SleepingBlock(nn.Module):
    """Attention over rows; the time everything takes is slept."""

    sleeping = False

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 8, WIDTH // 8)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        if SleepingBlock.sleeping:
            time.sleep(BLOCK_S * x.shape[1] / ROWS)
        return 0.5 * x + 0.1 * out


class Denoiser(nn.Module):
    """Nothing but blocks: latents are tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SleepingBlock() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def request_for(model: nn.Module) -> Request:
    """One picture of `ROWS` tokens."""
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(STEPS)
    latents = torch.randn(1, ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    return Request(model, lambda x, t: model(x), scheduler, scheduler.timesteps, latents)


def measure(num_ranks: int, link: Link | None, make: Callable[..., Any]) -> float:
    """Seconds of one request, of the slowest rank."""
    torch.manual_seed(0)
    models = [copy.deepcopy(model) for model in [Denoiser()] * num_ranks]
    network = LoopbackNetwork(num_ranks, link=link, timeout_s=120)
    samplers = [make(m, links) for m, links in zip(models, network.links, strict=True)]
    requests = [request_for(model) for model in models]
    SleepingBlock.sleeping = False
    network.run(lambda links: samplers[links.rank].prepare(requests[links.rank]))
    SleepingBlock.sleeping = True

    def rank(links: Any) -> float:
        samplers[links.rank].sample(requests[links.rank])
        return float(samplers[links.rank].statistics.total_s)

    return float(max(network.run(rank)))


def planned_pipefusion(num_ranks: int, patches: int, link: Link | None) -> float:
    """The planned timeline, for equal stages."""
    plan = PipeFusionPlan(STEPS, WARMUP, patches, num_ranks)
    stage_s = BLOCKS * BLOCK_S / num_ranks
    timeline = plan.timeline(
        [stage_s] * num_ranks, [stage_s / patches] * num_ranks,
        link=link, cut_bytes=[CUT_BYTES] * (num_ranks - 1), latent_bytes=CUT_BYTES,
    )  # fmt: skip
    return timeline.iteration_s


def planned_ulysses(num_ranks: int, link: Link | None) -> float:
    """Computing, and two exchanges per block of which each link carries its share."""
    link = link or Link()
    there = 3 * CUT_BYTES / num_ranks**2
    exchanges = link.seconds(there) + link.seconds(there / 3)
    step_s = BLOCKS * (BLOCK_S / num_ranks + exchanges) + link.seconds(CUT_BYTES / num_ranks)
    return STEPS * step_s


def choice(num_ranks: int, link: Link | None) -> str:
    """What the planner would take."""
    profile = DenoiserProfile(
        step_s=BLOCKS * BLOCK_S, glue_s=0.0, num_samples=1, branches=1, num_blocks=BLOCKS,
        num_units=ROWS, cut_bytes=CUT_BYTES, latent_bytes=CUT_BYTES,
        key_value_bytes=2 * BLOCKS * CUT_BYTES, sequence_bytes=4 * BLOCKS * CUT_BYTES,
        num_attention=BLOCKS,
    )  # fmt: skip
    chosen = choose_sampling(profile, link or Link(), num_ranks, STEPS)
    return f"{chosen.method}, M={chosen.num_patches}" if chosen.num_patches else chosen.method


def rows_of(num_ranks: int, name: str, link: Link | None) -> list[dict[str, Any]]:
    """PipeFusion with M = N and M = 2N, and Ulysses."""
    one_s, rows = STEPS * BLOCKS * BLOCK_S, []

    def row(method: str, seconds: float, planned_s: float) -> None:
        rows.append(
            {
                "ranks": num_ranks, "link": name, "method": method,
                "speed-up": one_s / seconds, "planned": one_s / planned_s,
                "measured / planned": planned_s / seconds, "planner's choice": choice(num_ranks, link),
            }
        )  # fmt: skip

    for patches in (num_ranks, 2 * num_ranks):
        seconds = measure(
            num_ranks, link,
            lambda m, links, p=patches: PipeFusion(
                m, links, num_patches=p, warmup_steps=WARMUP,
                split=[BLOCKS * r // num_ranks for r in range(1, num_ranks)],
            ),
        )  # fmt: skip
        row(f"PipeFusion, M={patches}", seconds, planned_pipefusion(num_ranks, patches, link))
    row("Ulysses", measure(num_ranks, link, SequenceParallel), planned_ulysses(num_ranks, link))
    return rows


def main() -> None:
    """Runs all and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    links = {
        "free": None,
        "1.3 MB/s, 1 ms": Link(1.3e6, 1e-3),
        "0.3 MB/s, 1 ms": Link(0.3e6, 1e-3),
    }
    rows = [row for n in (4, 8) for name, link in links.items() for row in rows_of(n, name, link)]
    print(table(rows))
    if arguments.json:
        out = {"environment": environment(), "rows": rows}
        arguments.json.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
