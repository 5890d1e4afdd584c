"""Five kinds of diffusion training, shrunk until a step takes some tenths of a second on two cores.

Random weights, the real modules of diffusers and transformers, and an ordinary training step each: what
is timed depends on shapes, not on what was learnt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import (
    AutoencoderKL,
    ControlNetModel,
    FluxTransformer2DModel,
    PixArtTransformer2DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
)
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel

PIXELS, TOKENS, WORDS, TEXT = 128, 16, 1000, 64


def autoencoder() -> AutoencoderKL:
    """A VAE of three levels: latents of an eighth of the edge, as Stable Diffusion has."""
    blocks = 4
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * blocks,
        up_block_types=("UpDecoderBlock2D",) * blocks,
        block_out_channels=(16, 32, 32, 32),
        layers_per_block=1,
        norm_num_groups=8,
        sample_size=PIXELS,
    ).requires_grad_(False)


def text_encoder() -> CLIPTextModel:
    """CLIP's text half with four layers."""
    config = CLIPTextConfig(
        vocab_size=WORDS,
        hidden_size=TEXT,
        intermediate_size=4 * TEXT,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=TOKENS,
        bos_token_id=1,
        eos_token_id=2,
    )
    return CLIPTextModel(config).requires_grad_(False)


def unet(width: int) -> UNet2DConditionModel:
    """Stable Diffusion's U-Net with three levels and attention to text on all but the last."""
    torch.manual_seed(1)
    return UNet2DConditionModel(
        sample_size=PIXELS // 8,
        block_out_channels=(width, 2 * width, 2 * width),
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
        cross_attention_dim=TEXT,
        attention_head_dim=8,
        norm_num_groups=8,
    )


class Base(nn.Module):
    """Frozen encoders and what every training step starts with."""

    def __init__(self) -> None:
        super().__init__()
        self.vae, self.text_encoder = autoencoder(), text_encoder()

    def encoded(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Noisy latents, timesteps, text, noise and latents of a batch."""
        with torch.no_grad():
            latents = self.vae.encode(batch["image"]).latent_dist.sample()
            text = self.text_encoder(batch["ids"]).last_hidden_state
        noise, t = torch.randn_like(latents), torch.randint(0, 1000, (len(latents),))
        share = (t / 1000)[:, None, None, None]
        return (1 - share) * latents + share * noise, t, text, noise, latents


class StableDiffusion(Base):
    """U-Net on VAE latents, conditioned on CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.unet = unet(64)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        noisy, t, text, noise, _ = self.encoded(batch)
        return F.mse_loss(self.unet(noisy, t, text).sample, noise)


class ControlNet(Base):
    """A trained ControlNet beside a locked U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.unet = unet(64)
        self.controlnet = ControlNetModel.from_unet(
            self.unet, conditioning_embedding_out_channels=(8, 16, 16, 32)
        )
        self.unet.requires_grad_(False)
        for name, parameter in self.controlnet.named_parameters():
            if "controlnet_" in name or "conv_out" in name:  # start at zero otherwise
                nn.init.normal_(parameter, std=0.05)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        noisy, t, text, noise, _ = self.encoded(batch)
        down, middle = self.controlnet(
            noisy, t, text, controlnet_cond=batch["hint"], return_dict=False
        )
        predicted = self.unet(
            noisy,
            t,
            text,
            down_block_additional_residuals=down,
            mid_block_additional_residual=middle,
        )
        return F.mse_loss(predicted.sample, noise)


class StableDiffusion3(Base):
    """A transformer with joint attention over image and text, trained by flow matching."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.transformer = SD3Transformer2DModel(
            sample_size=PIXELS // 8,
            patch_size=1,
            in_channels=4,
            out_channels=4,
            num_layers=6,
            attention_head_dim=32,
            num_attention_heads=6,
            joint_attention_dim=TEXT,
            caption_projection_dim=192,
            pooled_projection_dim=TEXT,
            pos_embed_max_size=PIXELS // 8,
        )

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        noisy, t, text, noise, latents = self.encoded(batch)
        predicted = self.transformer(
            hidden_states=noisy,
            timestep=t,
            encoder_hidden_states=text,
            pooled_projections=text[:, -1],
        )
        return F.mse_loss(predicted.sample, noise - latents)


class PixArt(Base):
    """A transformer over image tokens with cross-attention to text, trained to predict noise."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.transformer = PixArtTransformer2DModel(
            sample_size=PIXELS // 8,
            patch_size=1,
            in_channels=4,
            out_channels=4,
            num_layers=8,
            attention_head_dim=32,
            num_attention_heads=6,
            cross_attention_dim=192,
            caption_channels=TEXT,
            use_additional_conditions=False,
        )

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        noisy, t, text, noise, _ = self.encoded(batch)
        predicted = self.transformer(
            noisy,
            encoder_hidden_states=text,
            timestep=t,
            added_cond_kwargs={"resolution": None, "aspect_ratio": None},
        )
        return F.mse_loss(predicted.sample, noise)


class Flux(Base):
    """Joint blocks, then single ones, with rotary positions, trained by flow matching on packed latents."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.transformer = FluxTransformer2DModel(
            in_channels=4,
            num_layers=3,
            num_single_layers=5,
            attention_head_dim=32,
            num_attention_heads=6,
            joint_attention_dim=TEXT,
            pooled_projection_dim=TEXT,
            guidance_embeds=False,
            axes_dims_rope=(8, 12, 12),
        )

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        noisy, t, text, noise, latents = self.encoded(batch)
        edge = noisy.shape[-1]
        rows, columns = torch.meshgrid(torch.arange(edge), torch.arange(edge), indexing="ij")
        places = torch.stack((torch.zeros_like(rows), rows, columns), dim=-1).flatten(0, 1)
        tokens = lambda image: image.flatten(2).transpose(1, 2)
        predicted = self.transformer(
            hidden_states=tokens(noisy),
            timestep=t / 1000,
            encoder_hidden_states=text,
            pooled_projections=text[:, -1],
            img_ids=places.to(noisy),
            txt_ids=torch.zeros(text.shape[1], 3),
        )
        return F.mse_loss(predicted.sample, tokens(noise - latents))


def batch_of(size: int) -> dict[str, Any]:
    """Random images, hints and token ids."""
    generator = torch.Generator().manual_seed(2)
    shape = (size, 3, PIXELS, PIXELS)
    return {
        "image": torch.randn(shape, generator=generator),
        "hint": torch.rand(shape, generator=generator),
        "ids": torch.randint(0, WORDS, (size, TOKENS), generator=generator),
    }


@dataclass(frozen=True)
class Case:
    """One row: a model, its batch and its pipeline; how often it is planned and run from the start."""

    name: str
    make: Callable[[], nn.Module]
    batch_size: int = 16
    num_stages: int = 2
    num_microbatches: int = 4
    schedule: str = "1f1b"
    num_ranks: int = 2
    batch: Callable[[int], Any] = batch_of
    turns: int = 7


CASES = (
    Case("Stable Diffusion", StableDiffusion),
    Case("ControlNet", ControlNet),
    Case("Stable Diffusion 3", StableDiffusion3),
    Case("PixArt", PixArt),
    Case("Flux", Flux),
    Case("Stable Diffusion 3, interleaved", StableDiffusion3, num_stages=4, schedule="interleaved"),
)
