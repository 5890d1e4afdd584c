"""AdamW and a learning rate that warms up, stays, and falls: the same for all built-in modules."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import lightning as L
import torch

from lightning_diffpipe.errors import ConfigurationError, require_number

Decay = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class Optimization:
    """How a module is optimized.

    Attributes:
        lr: Highest learning rate.
        betas: AdamW's two averaging factors.
        weight_decay: AdamW's decoupled weight decay.
        warmup_steps: Steps in which the learning rate rises from zero.
        decay: How the learning rate falls at the end.
        decay_share: Share of all steps, at the end, in which it falls; 1 right after the warm-up.
        final_share: Learning rate of the last step, as a share of `lr`.

    Raises:
        ConfigurationError: A value that cannot be.
    """

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.01
    warmup_steps: int = 100
    decay: Decay = "cosine"
    decay_share: float = 1.0
    final_share: float = 0.02

    def __post_init__(self) -> None:
        for name in ("lr", "weight_decay", "warmup_steps", "decay_share", "final_share"):
            require_number(name, getattr(self, name), 0)
        if self.decay not in (known := get_args(Decay)):
            raise ConfigurationError(f"decay must be one of {', '.join(known)}; got {self.decay!r}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigurationError(f"betas must be two numbers in [0, 1); got {self.betas}")

    def factor(self, step: int, num_steps: float) -> float:
        """Returns the learning rate at a step, as a share of `lr`.

        Args:
            step: Optimizer steps taken so far.
            num_steps: Steps of the whole run; infinity where nobody knows.
        """
        warmup = min(1.0, (step + 1) / max(self.warmup_steps, 1))
        if self.decay == "constant" or math.isinf(num_steps):
            return warmup
        decay_steps = max(1.0, self.decay_share * (num_steps - self.warmup_steps))
        done = min(1.0, max(0.0, 1 - (num_steps - step) / decay_steps))
        falling = 1 - done if self.decay == "linear" else (1 + math.cos(math.pi * done)) / 2
        return warmup * (self.final_share + (1 - self.final_share) * falling)

    def configure(self, module: L.LightningModule) -> dict[str, Any]:
        """Builds what `configure_optimizers` returns, over all parameters that ask for gradients.

        Raises:
            ConfigurationError: Nothing in the module is trained.
        """
        trained = [p for p in module.parameters() if p.requires_grad]
        if not trained:
            raise ConfigurationError(f"{type(module).__name__} has no trainable parameter")
        num_steps = module.trainer.estimated_stepping_batches
        if num_steps < 0:  # Lightning's max_steps for "no limit", with loaders without a length
            num_steps = math.inf
        optimizer = torch.optim.AdamW(
            trained, lr=self.lr, betas=tuple(self.betas), weight_decay=self.weight_decay
        )
        factor: Callable[[int], float] = lambda step: self.factor(step, num_steps)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }
