"""The denoisers whose samples are compared.

* The built-in U-Net: 8 x 8 latents, one down-sampling, so that a band has at least two rows.
* The built-in PixArt transformer of the same latents and texts, 64 tokens: what PipeFusion needs, too.
  `train_transformer` made it.
* A U-Net of 32 x 32 pixels with two down-samplings, trained here in a few minutes, and kept in `outputs/`: 8
  bands of four rows, which are one row at its lowest level. This is where statistics of single bands are worst.

All are trained on the glyphs of the fonts that matplotlib brings.

    python -m benchmarks.sampling_quality.denoisers        # makes the weights in examples/glyphs_transformer again
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import PixArtTransformer2DModel, UNet2DModel
from torch import Tensor, nn

from lightning_diffpipe import LatentDiffusion
from lightning_diffpipe.data.glyphs import GlyphDataset
from lightning_diffpipe.modules.latent_diffusion import tokenize
from lightning_diffpipe.modules.parts import built_in

ALPHABETS = ("digits", "latin")


def train(
    model: nn.Module, loss: Callable[[nn.Module], Tensor], num_steps: int, learning_rate: float
) -> nn.Module:
    """Minimises `loss(model)`, and returns the average of the weights on the way."""
    average = copy.deepcopy(model).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    started_s, total = time.perf_counter(), 0.0
    for step in range(num_steps):
        done = step / num_steps
        for group in optimizer.param_groups:
            group["lr"] = (
                learning_rate * min(1.0, (step + 1) / 50) * (1 + math.cos(math.pi * done)) / 2
            )
        value = loss(model)
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            keep = min(0.995, (step + 1) / (step + 10))
            for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(parameter, 1 - keep)
        total += value.item()
        if step % 200 == 199:
            seconds = time.perf_counter() - started_s
            print(f"  step {step + 1}: loss {total / 200:.4f}, {seconds:.0f} s", flush=True)
            total = 0.0
    return average


def kept(path: Path, model: nn.Module, make: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Loads weights from a file, or makes and stores them."""
    if path.exists():
        model.load_state_dict(torch.load(path, weights_only=True))
    else:
        print(f"training {path.stem}")
        torch.manual_seed(0)
        model = make(model)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), path)
    return model.eval().requires_grad_(False)


@torch.inference_mode(False)  # weights as they are stored have versions
def built_in_model(name: str) -> LatentDiffusion:
    """A model that comes with the package."""
    return LatentDiffusion.from_pretrained(built_in(name)).eval().requires_grad_(False)


def train_transformer(num_steps: int = 1200) -> LatentDiffusion:
    """Makes the built-in transformer: the built-in model with a transformer in place of its U-Net."""
    parts = built_in_model("glyphs")
    torch.manual_seed(0)
    transformer = PixArtTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=24,
        in_channels=4,
        out_channels=4,
        num_layers=6,
        cross_attention_dim=96,
        caption_channels=parts.unet.config.cross_attention_dim,
        sample_size=8,
        patch_size=1,
        use_additional_conditions=False,
    )
    model = LatentDiffusion(
        parts.vae, parts.text_encoder, parts.tokenizer, parts.scheduler, transformer=transformer
    )

    torch.manual_seed(0)
    latents, states, mask = _encoded(parts)
    empty = tokenize(parts.tokenizer, [""], torch.device("cpu"))
    with torch.no_grad():
        nothing = parts.encode_text(empty)[0]

    def loss(transformer: nn.Module) -> Tensor:
        chosen = torch.randint(len(latents), (32,))
        corrupted = model.noise_schedule.corrupt(latents[chosen])
        drop = torch.rand(32) < 0.1
        text = torch.where(drop[:, None, None], nothing, states[chosen])
        seen = torch.where(drop[:, None], empty.attention_mask, mask[chosen])
        prediction = model.denoise(corrupted.noisy, corrupted.timesteps, text, seen)
        return F.mse_loss(prediction, corrupted.target)

    model.transformer = train(transformer, loss, num_steps, 2e-3)
    return model.eval().requires_grad_(False)


@torch.no_grad()
def _encoded(parts: LatentDiffusion) -> tuple[Tensor, Tensor, Tensor]:
    dataset = GlyphDataset("all", alphabets=ALPHABETS, shifts_per_axis=1)
    latents, states, masks = [], [], []
    for start in range(0, len(dataset), 64):
        samples = [dataset[i] for i in range(start, min(start + 64, len(dataset)))]
        latents.append(
            parts.encode_images(torch.stack([s["image"] for s in samples]), sample=False)
        )
        tokens = tokenize(parts.tokenizer, [s["caption"] for s in samples], torch.device("cpu"))
        states.append(parts.encode_text(tokens))
        masks.append(tokens.attention_mask)
    return torch.cat(latents), torch.cat(states), torch.cat(masks)


def pixel_unet(folder: Path, num_steps: int = 400) -> UNet2DModel:
    """Glyphs of 32 x 32 pixels without a caption, noise prediction."""
    torch.manual_seed(0)
    model = UNet2DModel(
        sample_size=32,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(32, 64, 64),
        norm_num_groups=8,
        attention_head_dim=16,
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
    )

    def make(model: nn.Module) -> nn.Module:
        dataset = GlyphDataset("all", alphabets=("latin",), resolution=32, shifts_per_axis=1)
        images = torch.stack([dataset[i]["image"][:1] for i in range(len(dataset))])
        betas = torch.linspace(1e-4, 0.02, 1000)
        kept_share = (1 - betas).cumprod(0)

        def loss(model: nn.Module) -> Tensor:
            clean, noise = images[torch.randint(len(images), (16,))], torch.randn(16, 1, 32, 32)
            t = torch.randint(0, 1000, (16,))
            share = kept_share[t][:, None, None, None]
            noisy = share.sqrt() * clean + (1 - share).sqrt() * noise
            return F.mse_loss(model(noisy, t).sample, noise)

        return train(model, loss, num_steps, 1e-3)

    return kept(folder / "pixel_unet.pt", model, make)


if __name__ == "__main__":
    torch.set_num_threads(1)
    trained = nn.Module.to(train_transformer().transformer, torch.float16)
    trained.save_pretrained(built_in("glyphs_transformer") / "transformer")
