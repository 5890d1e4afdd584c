"""Four training loops that people know from the scripts of diffusers, as LightningModules for strategy="diffpipe".

docs/porting.md says what became of which part of a script. tests/distributed/test_porting.py trains all of them
with tiny models, on two ranks and in one process, and compares weights and gradients.
"""

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor


class Denoising(L.LightningModule):
    """What the four have in common: frozen parts, noise, target and optimizer.

    Args:
        vae: A diffusers `AutoencoderKL`.
        unet: A diffusers `UNet2DConditionModel`.
        scheduler: A diffusers `DDPMScheduler`; only its table and its kind of target are used.
        lr: Learning rate.
        snr_gamma: Where the weight of a timestep ends, in signal-to-noise ratios; None weighs all alike.
    """

    def __init__(
        self, vae: Any, unet: Any, scheduler: Any, lr: float = 1e-5, snr_gamma: float | None = None
    ) -> None:
        super().__init__()
        self.vae = vae.requires_grad_(False).eval()
        self.unet = unet
        self.target_kind = scheduler.config.prediction_type
        self.register_buffer("signal", scheduler.alphas_cumprod.clone(), persistent=False)
        self.lr, self.snr_gamma = lr, snr_gamma

    def noised(self, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Noisy latents, timesteps, and what is to be predicted."""
        latents = self.vae.encode(image).latent_dist.sample() * self.vae.config.scaling_factor
        noise = torch.randn_like(latents)
        timesteps = torch.randint(0, len(self.signal), (len(latents),), device=latents.device)
        signal = self.signal[timesteps].to(latents.dtype)[:, None, None, None]
        noisy = signal.sqrt() * latents + (1 - signal).sqrt() * noise
        if self.target_kind == "v_prediction":
            return noisy, timesteps, signal.sqrt() * noise - (1 - signal).sqrt() * latents
        return noisy, timesteps, noise

    def loss_of(self, predicted: Tensor, target: Tensor, timesteps: Tensor) -> Tensor:
        """The mean over samples, each weighed by its own timestep."""
        errors = F.mse_loss(predicted, target, reduction="none").mean((1, 2, 3))
        if self.snr_gamma is not None:
            snr = self.signal[timesteps] / (1 - self.signal[timesteps])
            bound = snr + 1 if self.target_kind == "v_prediction" else snr
            errors = errors * snr.clamp(max=self.snr_gamma) / bound
        return errors.mean()

    def configure_optimizers(self) -> Any:
        """AdamW over what is trained, after a warm-up."""
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=self.lr)
        warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=100)
        return [optimizer], [{"scheduler": warm_up, "interval": "step"}]


class TextToImage(Denoising):
    """Stable Diffusion 1 and 2: all of the U-Net is trained.

    Batches: `image` `(B, 3, H, W)` in [-1, 1], `input_ids` `(B, L)`.
    """

    def __init__(self, text_encoder: Any, **options: Any) -> None:
        super().__init__(**options)
        self.text_encoder = text_encoder.requires_grad_(False).eval()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """One batch."""
        noisy, timesteps, target = self.noised(batch["image"])
        states = self.text_encoder(batch["input_ids"])[0]
        predicted = self.unet(noisy, timesteps, states, return_dict=False)[0]
        loss = self.loss_of(predicted, target, timesteps)
        self.log("train/loss", loss, prog_bar=True)
        return loss


class TextToImageXL(Denoising):
    """SDXL: two text encoders, and a U-Net that is given how each image was cut.

    Batches: `image` `(B, 3, H, W)` in [-1, 1], `input_ids` and `input_ids_2` `(B, L)`, `original_size` and `crop`
    `(B, 2)`, in pixels.
    """

    def __init__(self, text_encoder: Any, text_encoder_2: Any, **options: Any) -> None:
        super().__init__(**options)
        self.text_encoder = text_encoder.requires_grad_(False).eval()
        self.text_encoder_2 = text_encoder_2.requires_grad_(False).eval()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """One batch."""
        noisy, timesteps, target = self.noised(batch["image"])
        first = self.text_encoder(batch["input_ids"], output_hidden_states=True)
        second = self.text_encoder_2(batch["input_ids_2"], output_hidden_states=True)
        states = torch.cat([first.hidden_states[-2], second.hidden_states[-2]], dim=-1)
        size = torch.full_like(batch["crop"], batch["image"].shape[-1])
        size[:, 0] = batch["image"].shape[-2]
        sizes = torch.cat([batch["original_size"], batch["crop"], size], dim=-1)
        added = {"text_embeds": second[0], "time_ids": sizes.to(states.dtype)}
        predicted = self.unet(noisy, timesteps, states, added_cond_kwargs=added, return_dict=False)
        loss = self.loss_of(predicted[0], target, timesteps)
        self.log("train/loss", loss, prog_bar=True)
        return loss


class DreamBoothLoRA(TextToImage):
    """DreamBooth with prior preservation; adapters are trained, in the U-Net and, if wanted, the text encoder.

    Batches: as `TextToImage`, first all images of the subject, then as many of its class.
    """

    def __init__(
        self, adapter: Any, text_adapter: Any = None, prior_weight: float = 1.0, **options: Any
    ) -> None:
        super().__init__(**options)
        self.unet.requires_grad_(False)
        self.unet.add_adapter(adapter)
        if text_adapter is not None:
            self.text_encoder.add_adapter(text_adapter)
        self.prior_weight = prior_weight

    def count_samples(self, batch: dict[str, Tensor]) -> int:
        """A sample is a pair."""
        return len(batch["image"]) // 2

    def split_batch(self, batch: dict[str, Tensor], sizes: list[int]) -> list[dict[str, Tensor]]:
        """Microbatches of whole pairs."""
        cut = {key: [half.split(sizes) for half in value.chunk(2)] for key, value in batch.items()}
        return [
            {key: torch.cat([half[i] for half in halves]) for key, halves in cut.items()}
            for i in range(len(sizes))
        ]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """One batch of pairs."""
        noisy, timesteps, target = self.noised(batch["image"])
        states = self.text_encoder(batch["input_ids"])[0]
        predicted = self.unet(noisy, timesteps, states, return_dict=False)[0]
        halves = (part.chunk(2) for part in (predicted, target, timesteps))
        subject, prior = (self.loss_of(*half) for half in zip(*halves, strict=True))
        self.log_dict({"train/subject": subject, "train/prior": prior})
        return subject + self.prior_weight * prior


class ControlNetTraining(TextToImage):
    """A ControlNet beside a locked U-Net.

    Batches: as `TextToImage`, and `condition` `(B, 3, H, W)` in [0, 1].
    """

    def __init__(self, controlnet: Any, **options: Any) -> None:
        super().__init__(**options)
        self.unet.requires_grad_(False).eval()
        self.controlnet = controlnet

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """One batch."""
        noisy, timesteps, target = self.noised(batch["image"])
        states = self.text_encoder(batch["input_ids"])[0]
        down, middle = self.controlnet(
            noisy, timesteps, states, controlnet_cond=batch["condition"], return_dict=False
        )
        predicted = self.unet(
            noisy,
            timesteps,
            states,
            down_block_additional_residuals=down,
            mid_block_additional_residual=middle,
            return_dict=False,
        )[0]
        loss = self.loss_of(predicted, target, timesteps)
        self.log("train/loss", loss, prog_bar=True)
        return loss
