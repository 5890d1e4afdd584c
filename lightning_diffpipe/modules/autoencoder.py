"""Trains the `AutoencoderKL` of a latent diffusion model.

Loss: L1 + L2 between picture and reconstruction, plus a small KL term that keeps the latents near a
standard normal. There is no adversary and no perceptual network: for line art such as glyphs the
pixel losses are sharp enough, and nothing has to be downloaded.

Source: the autoencoder of Latent Diffusion, Rombach et al. (2022), https://arxiv.org/abs/2112.10752,
without its discriminator.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from torch import Tensor

from lightning_diffpipe.data.captioned import Batch
from lightning_diffpipe.modules.optimization import Optimization
from lightning_diffpipe.modules.parts import PartsModule


class AutoencoderTraining(PartsModule):
    """An `AutoencoderKL` in training.

    After training, `save_pretrained` stores one over the standard deviation of the latents as the
    `scaling_factor`, so that a denoiser sees latents of unit variance.

    Args:
        vae: The autoencoder.
        kl_weight: Weight of the KL term, per latent value.
        optimization: Optimizer and learning rate.
    """

    part_names: ClassVar[tuple[str, ...]] = ("vae",)

    def __init__(
        self,
        vae: AutoencoderKL,
        kl_weight: float = 1e-3,
        optimization: Optimization | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["vae", "optimization"])
        self.vae = vae
        self.optimization = optimization or Optimization(lr=2e-3, weight_decay=1e-4)
        # Count, sum and sum of squares of the latents seen in the last validation.
        self.register_buffer("latent_moments", torch.zeros(3))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Returns the loss of one batch of pictures, `(B, 3, H, W)` in [-1, 1]."""
        image = batch["image"]
        posterior = self.vae.encode(image).latent_dist
        mean, log_variance = posterior.mean.float(), posterior.logvar.float()
        latent = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)
        reconstruction = self.vae.decode(latent).sample.float()

        kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
        pixels = F.l1_loss(reconstruction, image) + F.mse_loss(reconstruction, image)
        loss = pixels + self.hparams.kl_weight * kl
        num_samples = len(image)
        self.log("train/loss", loss, prog_bar=True, batch_size=num_samples)
        self.log("train/pixel_loss", pixels, batch_size=num_samples)
        self.log("train/kl", kl, batch_size=num_samples)
        return loss

    def on_validation_epoch_start(self) -> None:
        """Starts measuring latents anew."""
        self.latent_moments.zero_()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Logs the peak signal-to-noise ratio, in dB, of the mean reconstruction."""
        image = batch["image"]
        latent = self.vae.encode(image).latent_dist.mode().float()
        reconstruction = self.vae.decode(latent).sample.float().clamp(-1, 1)
        error = ((reconstruction - image) / 2).square().mean()
        self.log(
            "val/psnr", -10 * error.log10(), prog_bar=True, batch_size=len(image), sync_dist=True
        )
        count = torch.full((), float(latent.numel()), device=latent.device)
        self.latent_moments += torch.stack([count, latent.sum(), latent.square().sum()])

    def on_validation_epoch_end(self) -> None:
        """Adds up what pipelines side by side, or other ranks, have measured of their shares."""
        total = self.trainer.strategy.reduce(self.latent_moments.clone(), reduce_op="sum")
        self.latent_moments.copy_(total)

    def save_pretrained(self, path: Any, dtype: torch.dtype | None = None) -> None:
        """Writes the autoencoder, with the measured `scaling_factor` if there was a validation."""
        count, total, squares = self.latent_moments.tolist()
        if count:
            variance = squares / count - (total / count) ** 2
            self.vae.register_to_config(scaling_factor=variance**-0.5)
        super().save_pretrained(path, dtype)
