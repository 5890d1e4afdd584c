"""Four and eight emulated ranks: real messages of the real size on links of limited speed, sleeping blocks.

Every rank is a thread that runs the sampler as it is; only a block's arithmetic is replaced by sleeping as long as
its share of the tokens would take, and links are as slow as they are set to be. What is measured is therefore the
schedule: how well computing and sending overlap. It is shown next to what the planner expects, which gets a profile
of the sleeping model as the Predictor would. What the planner chooses is among the rows.

What is neither slept nor sent is the work of the threads in one interpreter. It is measured by the same request
without sleep and on free links: nothing that several computers would have to wait for.

    python benchmarks/sampling_speed/emulated.py --json emulated.json
    python benchmarks/sampling_speed/emulated.py --ranks 2 --block-s 0.005            # whether it runs
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))
from lightning_diffpipe.planning.sampling_choice import (
    DenoiserProfile,
    SamplingChoice,
    SamplingWish,
    choose_sampling,
)
from lightning_diffpipe.sampling.auto import profile_request

from benchmarks.harness import environment, table
from lightning_diffpipe.comm.links import Links
from lightning_diffpipe.comm.loopback import LoopbackNetwork
from lightning_diffpipe.planning.cluster import Link
from lightning_diffpipe.sampling.distrifusion import DistriFusion
from lightning_diffpipe.sampling.pipefusion import PipeFusion, SequenceParallel
from lightning_diffpipe.sampling.request import Request

BLOCKS, ROWS, WIDTH, STEPS = 16, 256, 64, 10
LINKS = {
    "free": Link(),
    "1.3 MB/s, 1 ms": Link(1.3e6, 1e-3),
    "0.3 MB/s, 1 ms": Link(0.3e6, 1e-3),
}
NAMES = {"pipefusion": "PipeFusion", "sequence": "Ulysses", "distrifusion": "DistriFusion"}


class SleepingBlock(nn.Module):
    """Attention over rows; the time everything takes is slept."""

    sleep_s = 0.0  # for all tokens

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 8, WIDTH // 8)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        time.sleep(SleepingBlock.sleep_s * x.shape[1] / ROWS)
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


def measured_profile(block_s: float) -> DenoiserProfile:
    """What `method="auto"` would measure: with what a call of a block costs beside sleeping."""
    SleepingBlock.sleep_s = block_s
    return profile_request(request_for(Denoiser()), 1, 1)


def sampler_of(choice: SamplingChoice, model: nn.Module, links: Links) -> Any:
    """One rank's part in a method."""
    if choice.method == "sequence":
        return SequenceParallel(model, links)
    assert choice.warmup_steps is not None
    if choice.method == "distrifusion":
        return DistriFusion(model, links, warmup_steps=choice.warmup_steps)
    assert choice.num_patches is not None
    return PipeFusion(
        model, links, num_patches=choice.num_patches, warmup_steps=choice.warmup_steps,
        split=[BLOCKS * r // choice.ranks for r in range(1, choice.ranks)],
    )  # fmt: skip


def measure(choice: SamplingChoice, link: Link, block_s: float) -> tuple[float, float]:
    """Seconds of one request, of the slowest rank; then without sleep and on free links."""
    torch.manual_seed(0)
    models = [copy.deepcopy(model) for model in [Denoiser()] * choice.ranks]
    network = LoopbackNetwork(choice.ranks, timeout_s=300)
    samplers = [
        sampler_of(choice, m, links) for m, links in zip(models, network.links, strict=True)
    ]

    def rank(links: Any) -> float:
        samplers[links.rank].sample(request_for(models[links.rank]))
        return float(samplers[links.rank].statistics.total_s)

    SleepingBlock.sleep_s = 0.0
    network.run(rank)  # finds layouts
    awake_s = max(network.run(rank))
    SleepingBlock.sleep_s, network.link = block_s, link
    return float(max(network.run(rank))), float(awake_s)


def choices(
    profile: DenoiserProfile, link: Link, num_ranks: int
) -> tuple[SamplingChoice, list[SamplingChoice]]:
    """What the planner takes; that, PipeFusion with M = N and M = 2N, Ulysses and DistriFusion."""
    wishes = [
        SamplingWish(methods=("pipefusion",), num_patches=num_ranks, sequence=1),
        SamplingWish(methods=("pipefusion",), num_patches=2 * num_ranks, sequence=1),
        SamplingWish(methods=("sequence",)),
        SamplingWish(methods=("distrifusion",)),
    ]
    chosen = choose_sampling(profile, link, num_ranks, STEPS)
    found = [choose_sampling(profile, link, num_ranks, STEPS, wish=wish) for wish in wishes]
    known = {name_of(choice) for choice in found}
    can_run = chosen.method in NAMES and chosen.sequence == 1
    return chosen, [chosen] * (can_run and name_of(chosen) not in known) + found


def name_of(choice: SamplingChoice) -> str:
    """Of a row."""
    name = NAMES.get(choice.method, choice.method)
    name += f", M={choice.num_patches}" if choice.num_patches else ""
    return name + (f", {choice.mesh}" if choice.sequence > 1 else "")


def rows_of(
    profile: DenoiserProfile, num_ranks: int, name: str, block_s: float
) -> list[dict[str, Any]]:
    """The rows of one number of ranks and one link."""
    link, one_s, rows = LINKS[name], STEPS * BLOCKS * block_s, []
    chosen, found = choices(profile, link, num_ranks)
    for choice in found:
        seconds, awake_s = measure(choice, link, block_s)
        rows.append(
            {
                "ranks": num_ranks,
                "link": name,
                "method": name_of(choice),
                "planned": one_s / choice.seconds,
                "speed-up": one_s / seconds,
                "measured / planned": choice.seconds / seconds,
                "s": seconds,
                "planned s": choice.seconds,
                "s awake": awake_s,
                "planner's choice": "yes" if name_of(choice) == name_of(chosen) else "",
            }
        )
    if name_of(chosen) not in {row["method"] for row in rows}:
        print(f"{num_ranks} ranks, {name}: the planner takes {name_of(chosen)}, which is not run")
    fastest = min(rows, key=lambda row: row["s"])
    for row in rows:
        row["fastest"] = "yes" if row is fastest else ""
    return rows


def main() -> None:
    """Runs all and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--block-s", type=float, default=0.12, help="all tokens through one block")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    profile = measured_profile(arguments.block_s)
    print(profile, flush=True)
    rows = []
    for num_ranks in arguments.ranks:
        for name in LINKS:
            rows += rows_of(profile, num_ranks, name, arguments.block_s)
            print(f"{num_ranks} ranks, {name}: done", flush=True)
    print(table(rows))
    if arguments.json:
        out = {"environment": environment(), "profile": vars(profile), "rows": rows}
        arguments.json.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
