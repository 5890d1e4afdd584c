"""Four and eight emulated ranks: real messages of the real size on links of limited speed, sleeping blocks.

Every rank is a thread that runs the sampler as it is; only a block's arithmetic is replaced by sleeping as long as
its share of the tokens would take, and links are as slow as they are set to be. What is measured is therefore the
schedule: how well computing and sending overlap. What `method="auto"` takes is marked.

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
from benchmarks.harness import environment, table
from lightning_diffpipe.comm.links import Links
from lightning_diffpipe.comm.loopback import LoopbackNetwork
from lightning_diffpipe.planning.cluster import Link
from lightning_diffpipe.planning.sampling_rule import SamplingCase, SamplingChoice, ranked_choices
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
    """One image of `ROWS` tokens."""
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(STEPS)
    latents = torch.randn(1, ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    return Request(model, lambda x, t: model(x), scheduler, scheduler.timesteps, latents)


def sampler_of(choice: SamplingChoice, model: nn.Module, links: Links) -> Any:
    """One rank's part in a method."""
    if choice.method == "sequence":
        return SequenceParallel(model, links)
    if choice.method == "distrifusion":
        return DistriFusion(model, links, warmup_steps=4)
    assert choice.num_patches is not None
    return PipeFusion(
        model, links, num_patches=choice.num_patches,
        split=[BLOCKS * r // links.num_ranks for r in range(1, links.num_ranks)],
    )  # fmt: skip


def measure(choice: SamplingChoice, link: Link, block_s: float) -> tuple[float, float]:
    """Seconds of one request, of the slowest rank; then without sleep and on free links."""
    torch.manual_seed(0)
    num_ranks = choice.parallel * choice.sequence
    models = [copy.deepcopy(model) for model in [Denoiser()] * num_ranks]
    network = LoopbackNetwork(num_ranks, timeout_s=300)
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


def rows_of(num_ranks: int, name: str, block_s: float) -> list[dict[str, Any]]:
    """The rows of one number of ranks and one link: PipeFusion with M = N and M = 2N, Ulysses and DistriFusion."""
    link, one_s, rows = LINKS[name], STEPS * BLOCKS * block_s, []
    case = SamplingCase(num_ranks, 1, 1, STEPS, False, link.bandwidth_bytes_per_s, "cpu")
    chosen = ranked_choices(case)[0]
    patches = (num_ranks, 2 * num_ranks)
    for choice in (
        *(SamplingChoice("pipefusion", parallel=num_ranks, num_patches=m) for m in patches),
        SamplingChoice("sequence", sequence=num_ranks),
        SamplingChoice("distrifusion", parallel=num_ranks),
    ):
        seconds, awake_s = measure(choice, link, block_s)
        of_patches = f", M={choice.num_patches}" if choice.num_patches else ""
        rows.append(
            {
                "ranks": num_ranks,
                "link": name,
                "method": NAMES[choice.method] + of_patches,
                "speed-up": one_s / seconds,
                "s": seconds,
                "s awake": awake_s,
                "auto": "yes" if choice == chosen else "",
            }
        )
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
    rows = []
    for num_ranks in arguments.ranks:
        for name in LINKS:
            rows += rows_of(num_ranks, name, arguments.block_s)
            print(f"{num_ranks} ranks, {name}: done", flush=True)
    print(table(rows))
    if arguments.json:
        out = {"environment": environment(), "rows": rows}
        arguments.json.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
