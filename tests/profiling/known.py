"""What is known of well-known models, whoever modelled them."""

import pytest

from lightning_diffpipe.profiling.known_models import KNOWN_MODELS

CONTROLNET = 364_228_240
"""Parameters of the one for Stable Diffusion 2.1, as published."""


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
    }
    assert frozen_s / path_s == pytest.approx(shares[name], rel=0.25)
