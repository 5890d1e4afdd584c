"""One rank: what the strategy costs where there is nothing to gain.

The same latent diffusion module (VAE and text encoder frozen, U-Net trained) is fitted by plain
Lightning and by `strategy="diffpipe"` on one rank, in turns. Time per training step, set-up excluded.

    python benchmarks/one_rank_overhead/main.py --json out.json
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import CLIPTextConfig, CLIPTextModel

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.harness import main
from lightning_diffpipe import DiffPipeStrategy

STEPS, SKIPPED = 12, 2


class Samples(Dataset):
    """Random images and token ids."""

    def __init__(self, size: int, pixels: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(size, 3, pixels, pixels, generator=generator)
        self.ids = torch.randint(3, 99, (size, 9), generator=generator)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"image": self.images[index], "ids": self.ids[index]}


class StableDiffusion(L.LightningModule):
    """A step as in every Stable Diffusion training script.

    Args:
        width: Channels of the first level.
        levels: Of the U-Net.
        layers_per_block: Of the U-Net; the text encoder has twice as many.
    """

    def __init__(self, width: int, levels: int = 3, layers_per_block: int = 2) -> None:
        super().__init__()
        self.vae = AutoencoderKL(
            block_out_channels=(width // 2, width),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            norm_num_groups=8,
        )
        self.text_encoder = CLIPTextModel(
            CLIPTextConfig(
                hidden_size=64,
                intermediate_size=128,
                num_attention_heads=4,
                num_hidden_layers=2 * layers_per_block,
                vocab_size=100,
                max_position_embeddings=12,
            )
        )
        self.vae.requires_grad_(False).eval()
        self.text_encoder.requires_grad_(False).eval()
        self.unet = UNet2DConditionModel(
            sample_size=16,
            block_out_channels=tuple(width * (1 + level) for level in range(levels)),
            down_block_types=(*("CrossAttnDownBlock2D",) * (levels - 1), "DownBlock2D"),
            up_block_types=("UpBlock2D", *("CrossAttnUpBlock2D",) * (levels - 1)),
            layers_per_block=layers_per_block,
            cross_attention_dim=64,
            attention_head_dim=8,
            norm_num_groups=8,
        ).train()
        self.noise = DDPMScheduler()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        with torch.no_grad():
            latents = self.vae.encode(batch["image"]).latent_dist.sample()
            text = self.text_encoder(batch["ids"])[0]
        noise = torch.randn_like(latents)
        t = torch.randint(0, 1000, (len(latents),), device=latents.device)
        noisy = self.noise.add_noise(latents, noise, t)
        loss = F.mse_loss(self.unet(noisy, t, text).sample, noise)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.unet.parameters(), lr=1e-4)


class Clock(L.Callback):
    """Stamps the end of every step."""

    def __init__(self) -> None:
        self.stamps: list[float] = []

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.stamps.append(time.perf_counter())

    @property
    def step_s(self) -> list[float]:
        """Seconds of each step but the first ones."""
        return [
            b - a for a, b in zip(self.stamps[SKIPPED:-1], self.stamps[SKIPPED + 1 :], strict=True)
        ]


def fit(module: L.LightningModule, data: DataLoader, strategy: Any, **options: Any) -> list[float]:
    """Fits for a few steps; returns seconds per step."""
    clock = Clock()
    quiet_trainer(strategy, callbacks=[clock], **options).fit(module, data)
    return clock.step_s


def quiet_trainer(strategy: Any, **options: Any) -> L.Trainer:
    """A trainer of one device that prints and writes nothing, on a CPU unless `options` say otherwise."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": STEPS,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(strategy=strategy, **{**defaults, **options})


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each size of model."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    rows = []
    for name, width, pixels, batch_size in (
        ("tiny", 16, 32, 2),
        ("small", 32, 32, 4),
        ("medium", 64, 64, 4),
    ):
        torch.manual_seed(0)
        module = StableDiffusion(width)
        data = DataLoader(Samples(batch_size * STEPS, pixels), batch_size)
        times: dict[str, list[float]] = {"plain": [], "diffpipe": []}
        for _ in range(arguments.rounds // 3):
            times["plain"] += fit(module, data, "auto")
            strategy = DiffPipeStrategy(num_stages=1, num_microbatches=1, profile="flops")
            times["diffpipe"] += fit(module, data, strategy)
        plain, ours = (statistics.median(times[key]) for key in ("plain", "diffpipe"))
        rows.append(
            {
                "model": name,
                "parameters, M": sum(p.numel() for p in module.parameters()) / 1e6,
                "plain Lightning, ms": 1e3 * plain,
                "diffpipe, ms": 1e3 * ours,
                "diffpipe / plain": ours / plain,
            }
        )
    return rows


if __name__ == "__main__":
    main(run, __doc__)
