"""What is known of well-known models, whoever modelled them."""

import pytest

from lightning_diffpipe.profiling.known_models import (
    CLIP_H,
    KNOWN_MODELS,
    VAE,
    KnownModel,
    _call_sd,
)

CONTROLNET = 364_228_240
"""Parameters of the one for Stable Diffusion 2.1, as published."""

TINY = KnownModel(
    "tiny",
    (
        "UNet2DConditionModel",
        {
            "sample_size": 8,
            "block_out_channels": (32, 64),
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
            "layers_per_block": 1,
            "cross_attention_dim": 32,
            "attention_head_dim": 8,
        },
    ),
    (VAE[0], {**VAE[1], "block_out_channels": (32, 32), "layers_per_block": 1,
     "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}),
    (("CLIPTextModel", {**CLIP_H[1], "hidden_size": 32, "num_hidden_layers": 1,
                        "intermediate_size": 64, "num_attention_heads": 2}, 77),),
    resolution=64,
    num_parameters=0,
    call=_call_sd,
)  # fmt: skip


def check_known(name, profile):
    """Shares of frozen work are near those DiffusionPipe measured: 38-44 % (SD), 76-89 % (ControlNet)."""
    layers = profile.backbones[0].layers
    trained = CONTROLNET if name == "controlnet" else KNOWN_MODELS[name].num_parameters
    assert sum(x.gradient_bytes for x in layers) == 2 * trained
    path_s = sum(x.forward_s.at(8) + x.backward_s.at(8) for x in layers)
    frozen_s = sum(x.forward_s.at(8) for encoder in profile.encoders for x in encoder.layers)
    shares = {
        "sd21": 0.5,
        "controlnet": 0.75,
        "sdxl": 0.3,
        "sd3": 0.33,
        "flux": 0.05,
        "pixart": 0.45,
        "wan": 0.56,
    }
    assert frozen_s / path_s == pytest.approx(shares[name], rel=0.25)
