"""Trains a LightningModule of one's own, which knows nothing of pipelines, as a pipeline over two processes.

    python examples/train_own_module.py                    # two processes on this machine
    python examples/train_own_module.py --devices 4 --num_microbatches 8

About 10 s on two CPU cores. Flow matching of discs of a given radius, in pixels.
"""

import argparse

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_diffpipe  # noqa: F401  registers strategy="diffpipe"
from lightning_diffpipe import DiffPipeStrategy


class Block(nn.Module):
    """Convolutions, shifted by time and radius."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.shift = nn.GroupNorm(4, width), nn.Linear(2, width)
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        """`(B, C, H, W)` and `(B, 2)` to `(B, C, H, W)`."""
        h = self.first(self.norm(x)) + self.shift(condition)[:, :, None, None]
        return x + self.second(F.silu(h))


class Discs(L.LightningModule):
    """Draws discs of a wanted radius."""

    def __init__(self, width: int = 32, depth: int = 6) -> None:
        super().__init__()
        self.enter = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.leave = nn.Conv2d(width, 1, 3, padding=1)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Flow matching, as anybody would write it."""
        image, radius = batch
        noise, t = torch.randn_like(image), torch.rand_like(radius)
        h = self.enter(torch.lerp(image, noise, t[:, None, None, None]))
        for block in self.blocks:
            h = block(h, torch.stack([t, radius], 1))
        loss = F.mse_loss(self.leave(h), noise - image)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """An ordinary optimizer over everything."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def discs(number: int, size: int = 16) -> TensorDataset:
    """Images in [-1, 1], and radii as shares of the size."""
    radius = torch.rand(number) * 0.3 + 0.1
    grid = torch.stack(torch.meshgrid(*[torch.linspace(-0.5, 0.5, size)] * 2, indexing="ij"))
    inside = grid.norm(dim=0) < radius[:, None, None]
    return TensorDataset(inside[:, None].float() * 2 - 1, radius)


def main() -> None:
    """Runs in every process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--num_microbatches", type=int, default=4)
    parser.add_argument("--max_steps", type=int, default=60)
    arguments = parser.parse_args()
    L.seed_everything(0)
    trainer = L.Trainer(
        accelerator="auto",
        devices=arguments.devices,
        strategy=DiffPipeStrategy(
            num_stages=arguments.devices, num_microbatches=arguments.num_microbatches
        ),
        max_steps=arguments.max_steps,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Discs(), DataLoader(discs(512), batch_size=32, shuffle=True))
    if trainer.is_global_zero:
        print(f"loss {float(trainer.callback_metrics['train/loss']):.3f}")


if __name__ == "__main__":
    main()
