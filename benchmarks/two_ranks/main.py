"""Two ranks, one batch: this project's pipeline against torch's own schedules and DDP.

All candidates train the same transformer denoiser on the same batch with the same microbatches, run
its frozen encoder data-parallel, and have their gradients compared with one process first.

    python benchmarks/two_ranks/main.py --json out.json
"""

from __future__ import annotations

import argparse
import copy
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.harness import interleaved, main, medians, on_ranks
from lightning_diffpipe.training.pipeline import Process
from lightning_diffpipe.training.plan_source import PipelineOptions
from lightning_diffpipe.training.preparation import prepare

WIDTH, TOKENS, LAYERS, BATCH = 256, 256, 12, 8


class Block(nn.Module):
    """A transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, 8, width // 8)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        x = x + self.out(attended.reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(L.LightningModule):
    """Frozen encoder and trained denoiser; the step of an ordinary LightningModule."""

    def __init__(self, num_frozen: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*[Block() for _ in range(num_frozen)]).requires_grad_(False)
        self.denoiser = nn.Sequential(*[Block() for _ in range(LAYERS)])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        with torch.no_grad():
            latent = self.encoder(batch["x"])
        return F.mse_loss(self.denoiser(latent), batch["y"])


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """A copy of what a module accumulated, and a clean slate."""
    found = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad(set_to_none=True)
    return found


def worst_error(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Largest difference of a gradient, relative to the largest entry of that gradient."""
    assert got, "no gradient was computed"
    return max(
        ((value - wanted[name]).abs().max() / wanted[name].abs().max()).item()
        for name, value in got.items()
    )


def ours(model: Model, batch: Any, microbatches: int, rank: int) -> Any:
    """This project's 1F1B, frozen layers spread over both ranks before the pipeline."""
    pipeline = prepare(
        model,
        lambda module, part: module.training_step(part, 0),
        batch,
        PipelineOptions(
            num_stages=2, num_microbatches=microbatches, profile="flops", filling="none"
        ),
        Process(rank, 2, torch.device("cpu"), "gloo", timeout_s=60.0),
    )
    counter = iter(range(10**9))
    return lambda: pipeline.engine.run_step(batch, next(counter))


def encoded(model: Model, x: Tensor, rank: int) -> Tensor:
    """The frozen part, half of the samples on each rank, gathered."""
    with torch.no_grad():
        own = model.encoder(x.chunk(2)[rank])
    halves = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(halves, own)
    return torch.cat(halves)


def torch_schedule(kind: type, model: Model, batch: Any, microbatches: int, rank: int) -> Any:
    """A schedule of torch.distributed.pipelining over the same two halves."""
    half = model.denoiser[: LAYERS // 2] if rank == 0 else model.denoiser[LAYERS // 2 :]
    stage = PipelineStage(half, rank, 2, torch.device("cpu"))
    schedule = kind(stage, microbatches, loss_fn=F.mse_loss)

    def step() -> None:
        latent = encoded(model, batch["x"], rank)
        if rank == 0:
            schedule.step(latent)
        else:
            schedule.step(target=batch["y"], losses=[])

    return step


def data_parallel(model: Model, batch: Any, microbatches: int, rank: int) -> Any:
    """DDP: each rank trains the whole denoiser on half of the microbatches."""
    wrapped = DistributedDataParallel(model.denoiser)
    count = microbatches // 2
    x, y = batch["x"].chunk(2)[rank], batch["y"].chunk(2)[rank]

    def step() -> None:
        with torch.no_grad():
            latent = model.encoder(x)
        pairs = list(zip(latent.chunk(count), y.chunk(count), strict=True))
        for part, target in pairs[:-1]:
            with wrapped.no_sync():
                (F.mse_loss(wrapped(part), target) / count).backward()
        (F.mse_loss(wrapped(pairs[-1][0]), pairs[-1][1]) / count).backward()

    return step


def measure(rank: int, num_frozen: int, microbatches: int, rounds: int) -> dict[str, Any]:
    """Checks gradients of all candidates, then times them in turns."""
    torch.manual_seed(0)
    model = Model(num_frozen)
    batch = {"x": torch.randn(BATCH, TOKENS, WIDTH), "y": torch.randn(BATCH, TOKENS, WIDTH)}
    reference = copy.deepcopy(model)
    reference.training_step(batch, 0).backward()
    wanted = gradients(reference)
    copies = {name: copy.deepcopy(model) for name in ("ours", "1f1b", "gpipe", "ddp")}
    steps = {
        "ours": ours(copies["ours"], batch, microbatches, rank),
        "1f1b": torch_schedule(Schedule1F1B, copies["1f1b"], batch, microbatches, rank),
        "gpipe": torch_schedule(ScheduleGPipe, copies["gpipe"], batch, microbatches, rank),
        "ddp": data_parallel(copies["ddp"], batch, microbatches, rank),
    }
    errors = {}
    for name, step in steps.items():
        step()
        errors[name] = worst_error(gradients(copies[name]), wanted)
        assert errors[name] < 1e-3, f"{name}: gradients are off by {errors[name]:.1e}"
    return {"times": interleaved(steps, rounds), "errors": errors}


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each share of frozen work and number of microbatches."""
    rows = []
    for num_frozen in (0, 15):
        for microbatches in (4,):
            found = on_ranks(2, measure, num_frozen, microbatches, arguments.rounds)
            median = medians(found["times"])
            rows.append(
                {
                    "frozen blocks": num_frozen,
                    "microbatches": microbatches,
                    "ours, ms": 1e3 * median["ours"],
                    "1F1B (torch) / ours": median["1f1b"] / median["ours"],
                    "GPipe (torch) / ours": median["gpipe"] / median["ours"],
                    "DDP / ours": median["ddp"] / median["ours"],
                    "worst gradient error": f"{max(found['errors'].values()):.0e}",
                }
            )
    return rows


if __name__ == "__main__":
    main(run, __doc__)
