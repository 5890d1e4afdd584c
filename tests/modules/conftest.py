import pytest
import torch

from lightning_diffpipe.modules import LatentDiffusion, Optimization
from tests.modules.tiny_parts import (
    SCHEDULERS,
    tiny_text_encoder,
    tiny_tokenizer,
    tiny_transformer,
    tiny_unet,
    tiny_vae,
)


@pytest.fixture
def make_model():
    """Builds tiny latent diffusion models; the same arguments give the same weights."""

    def make(denoiser="unet", prediction="flow", **kwargs):
        torch.manual_seed(0)
        part = tiny_unet() if denoiser == "unet" else tiny_transformer()
        kwargs.setdefault("optimization", Optimization(lr=1e-2, warmup_steps=1))
        return LatentDiffusion(
            tiny_vae(),
            tiny_text_encoder(),
            tiny_tokenizer(),
            SCHEDULERS[prediction](),
            **{denoiser: part},
            **kwargs,
        )

    return make


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    return {
        "image": torch.rand(4, 3, 8, 8, generator=generator) * 2 - 1,
        "caption": ["digit four, mono", "alpha", "a", "a rather long caption that is cut"],
    }
