import pytest
import torch

from lightning_diffpipe.modules import Optimization
from tests.modules.tiny_parts import tiny_latent_diffusion


@pytest.fixture
def make_model():
    """Builds tiny latent diffusion models; the same arguments give the same weights."""

    def make(denoiser="unet", prediction="flow", **options):
        options.setdefault("optimization", Optimization(lr=1e-2, warmup_steps=1))
        return tiny_latent_diffusion(denoiser, prediction, **options)

    return make


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    return {
        "image": torch.rand(4, 3, 8, 8, generator=generator) * 2 - 1,
        "caption": ["digit four, mono", "alpha", "a", "a rather long caption that is cut"],
    }
