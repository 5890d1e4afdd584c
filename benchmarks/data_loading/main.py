"""Loading with one rank of a pipeline: samples per second, and processor time of the loader, over all ranks.

Two ranks train on images that are decoded again and again until a batch costs so many steps. Workers decode; on
two cores they compete with the steps, as they do wherever a host has no core to spare.

    python benchmarks/data_loading/main.py --json out.json
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.harness import main, on_ranks
from benchmarks.one_rank_overhead.main import Clock
from benchmarks.two_ranks.main import TOKENS, WIDTH, Model
from lightning_diffpipe import DiffPipeStrategy

BATCH = 4


class Images(Dataset):
    """Images to be decoded; counts how many were, and the processor time of it, in all workers."""

    def __init__(self, size: int, repeats: int) -> None:
        noise = np.random.default_rng(0).integers(0, 256, (TOKENS, WIDTH, 3), np.uint8)
        file = io.BytesIO()
        Image.fromarray(noise).save(file, "png")
        self.encoded, self.size, self.repeats = file.getvalue(), size, repeats
        self.counted = torch.zeros(2, dtype=torch.float64).share_memory_()

    def __len__(self) -> int:
        return self.size

    def decode(self) -> np.ndarray:
        """Decodes an image once."""
        return np.asarray(Image.open(io.BytesIO(self.encoded)), np.float32)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start_s = time.process_time()
        for _ in range(self.repeats):
            image = self.decode()
        x = torch.from_numpy(image[..., 0] / 255 - 0.5)
        self.counted += torch.tensor([1.0, time.process_time() - start_s])
        return {"x": x, "y": x.flip(0)}


class Trained(Model):
    """The model of the benchmark of two ranks, with an optimizer."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.denoiser.parameters(), lr=1e-4)


def fit(steps: int, repeats: int) -> tuple[float, list[float]]:
    """Returns seconds of a step, and over all ranks samples read and processor time."""
    clock, data = Clock(), Images(steps * BATCH, repeats)
    loader = DataLoader(data, BATCH, num_workers=1, multiprocessing_context="spawn")
    L.Trainer(
        accelerator="cpu", devices=2, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[clock],
        strategy=DiffPipeStrategy(num_stages=2, num_microbatches=2, profile="flops", seed=0),
    ).fit(Trained(2), loader)  # fmt: skip
    counted = data.counted.clone()
    dist.all_reduce(counted)
    return statistics.median(clock.step_s), counted.tolist()


def measure(rank: int, rounds: int) -> list[dict[str, Any]]:
    warnings.simplefilter("ignore")
    # Lightning starts processes of its own unless the environment says that they are there.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    torch.manual_seed(0)
    data, start_s = Images(1, 1), time.process_time()
    for _ in range(10):
        data.decode()
    decode_s = (time.process_time() - start_s) / 10
    base_s, _ = fit(max(rounds, 5), 1)
    rows = []
    for share in (0.5, 1.0, 2.0):
        repeats = torch.tensor([max(1, round(share * base_s / BATCH / decode_s))])
        dist.broadcast(repeats, 0)
        steps = max(rounds, 5)
        step_s, (num_read, processor_s) = fit(steps, int(repeats))
        rows.append(
            {
                "loading of a batch / a step": share,
                "samples/s": BATCH / step_s,
                "a sample is read, times": num_read / (steps * BATCH),
                "processor time of loading a sample, ms": 1e3 * processor_s / (steps * BATCH),
            }
        )
    return rows


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each cost of loading."""
    return on_ranks(2, measure, arguments.rounds)


if __name__ == "__main__":
    main(run, __doc__)
