"""Training steps as people write them: an encoder or two, noise, a denoiser, a loss, something logged.

All are tiny and start from random weights. Images are not square, so that height and width cannot be
confused.
"""

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, ControlNetModel, DDPMScheduler, UNet2DConditionModel
from torch import Tensor, nn
from transformers import CLIPTextModel

from tests.modules.tiny_parts import tiny_clip, tiny_unet, tiny_vae


def step(module: Any, batch: Any) -> Any:
    """The step as a probe wants it."""
    return module.training_step(batch, 0)


def small_vae() -> AutoencoderKL:
    return tiny_vae(0.18215, block_out_channels=(4, 8), norm_num_groups=2, sample_size=16)


def small_clip() -> CLIPTextModel:
    return tiny_clip(
        intermediate_size=32, num_hidden_layers=3, vocab_size=100, max_position_embeddings=12,
        bos_token_id=0, eos_token_id=2, pad_token_id=1,
    )  # fmt: skip


def small_unet(**changes: Any) -> UNet2DConditionModel:
    return tiny_unet(**{"sample_size": 8, "attention_head_dim": 4, **changes})


class StableDiffusion(L.LightningModule):
    """Latents and text from frozen encoders, noise, a U-Net."""

    def __init__(self, unet: nn.Module, train_text: bool = False) -> None:
        super().__init__()
        self.vae = small_vae().requires_grad_(False).eval()
        self.text_encoder = small_clip().requires_grad_(train_text).eval()
        self.unet = unet
        self.noise_scheduler = DDPMScheduler()

    def encode(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            latents = self.vae.encode(batch["image"]).latent_dist.sample()
        return latents * self.vae.config.scaling_factor, self.text_encoder(batch["ids"])[0]

    def denoise(self, noisy: Tensor, t: Tensor, text: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return self.unet(noisy, t, text).sample

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        latents, text = self.encode(batch)
        noise = torch.randn_like(latents)
        t = torch.randint(0, self.noise_scheduler.config.num_train_timesteps, (len(latents),))
        noisy = self.noise_scheduler.add_noise(latents, noise, t)
        loss = F.mse_loss(self.denoise(noisy, t, text, batch), noise)
        self.log("train/loss", loss)
        self.log("train/latent_norm", latents.norm())
        return loss


class StableDiffusionXL(StableDiffusion):
    """The U-Net also gets pooled text and sizes."""

    def denoise(self, noisy: Tensor, t: Tensor, text: Tensor, batch: dict[str, Tensor]) -> Tensor:
        added = {"text_embeds": text.mean(1), "time_ids": batch["time_ids"]}
        return self.unet(noisy, t, text, added_cond_kwargs=added).sample


class ControlNet(StableDiffusion):
    """A trained copy of the encoder half steers a locked U-Net."""

    def __init__(self, unet: UNet2DConditionModel) -> None:
        super().__init__(unet.requires_grad_(False))
        self.controlnet = ControlNetModel.from_unet(
            unet, conditioning_embedding_out_channels=(8, 16)
        ).requires_grad_(True)

    def denoise(self, noisy: Tensor, t: Tensor, text: Tensor, batch: dict[str, Tensor]) -> Tensor:
        down, mid = self.controlnet(
            noisy, t, text, controlnet_cond=batch["image"], return_dict=False
        )
        return self.unet(
            noisy, t, text, down_block_additional_residuals=list(down), mid_block_additional_residual=mid,
        ).sample  # fmt: skip


def image_batch(num_samples: int = 2, seed: int = 3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "image": torch.randn(num_samples, 3, 16, 24, generator=generator),
        "ids": torch.randint(3, 99, (num_samples, 9), generator=generator),
        "time_ids": torch.rand(num_samples, 6, generator=generator),
    }


def lora_unet(dropout: float = 0.0) -> UNet2DConditionModel:
    from peft import LoraConfig

    unet = small_unet().requires_grad_(False)
    targets = ["to_q", "to_k", "to_v", "to_out.0"]
    unet.add_adapter(LoraConfig(r=2, lora_dropout=dropout, target_modules=targets))
    return unet


def checkpointed_unet() -> UNet2DConditionModel:
    unet = small_unet(dropout=0.2)
    unet.enable_gradient_checkpointing()
    return unet


def xl_unet() -> UNet2DConditionModel:
    return small_unet(
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 2),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=16 + 6 * 8,
    )


BUILDERS = {
    "Stable Diffusion": lambda: StableDiffusion(small_unet()),
    "SDXL": lambda: StableDiffusionXL(xl_unet()),
    "ControlNet with a locked U-Net": lambda: ControlNet(small_unet()),
    "LoRA": lambda: StableDiffusion(lora_unet()),
    "LoRA with dropout": lambda: StableDiffusion(lora_unet(dropout=0.2)),
    "text encoder trained along": lambda: StableDiffusion(small_unet(), train_text=True),
    "dropout": lambda: StableDiffusion(small_unet(dropout=0.2)),
    "dropout, activation checkpointing": lambda: StableDiffusion(checkpointed_unet()),
}


DENOISERS = [
    "UNet2DModel", "PixArtTransformer2DModel", "DiTTransformer2DModel", "SD3Transformer2DModel",
    "FluxTransformer2DModel", "HunyuanDiT2DModel", "WanTransformer3DModel",
]  # fmt: skip
"""Of the test zoo: one for each way in which the blocks of a denoiser are wired."""


def build(name: str) -> StableDiffusion:
    """A step in double precision; U-Nets and adapters in training mode, encoders not."""
    torch.manual_seed(0)
    root = BUILDERS[name]().double()
    root.unet.train()
    return root


class Block(nn.Module):
    """A residual block; `0.9` keeps deep towers of it tame."""

    def __init__(self, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.9 * self.dropout(torch.tanh(self.linear(x)))


class Tower(L.LightningModule):
    """Blocks in a row; subclasses change what the step does with them."""

    num_blocks = 6
    block = Block

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.block() for _ in range(self.num_blocks)])

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.run(batch).pow(2).mean()


def rows(num_samples: int = 5, width: int = 16) -> Tensor:
    return torch.randn(num_samples, width, generator=torch.Generator().manual_seed(num_samples))


class Sequential(Tower):
    """Dropout between the layers of a `nn.Sequential`."""

    def __init__(self) -> None:
        super().__init__()
        parts = [(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.3)) for _ in range(6)]
        self.net = nn.Sequential(*[part for group in parts for part in group])
        del self.blocks

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return F.mse_loss(self.net(batch), torch.randn(batch.shape, dtype=batch.dtype))


class Tied(Tower):
    """The first layer's weight is read again by the loss, on the last stage."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return (self.run(batch) @ self.blocks[0].linear.weight.t()).pow(2).mean()


class Twice(Tower):
    """All layers are called twice, so that every weight lives on two stages."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.run(self.run(batch)).pow(2).mean()


class Skips(Tower):
    """Outputs that pass through stages which do not read them."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        hidden, x = [], batch
        for block in self.blocks[:3]:
            x = block(x)
            hidden.append(x)
        for block in self.blocks[3:]:
            x = block(x + hidden.pop())
        return x.pow(2).mean()
