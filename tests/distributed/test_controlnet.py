"""The ready-made ControlNet as a pipeline: the numbers of one process, and half of its U-Net in the bubbles."""

import pytest
import torch

from lightning_diffpipe import ControlNetDiffusion
from lightning_diffpipe.modules import Optimization
from tests.distributed.scenarios import check_parity
from tests.distributed.tiny import Images
from tests.modules.tiny_parts import tiny_controlnet_diffusion

pytestmark = pytest.mark.distributed


class Conditioned(Images):
    """Images with conditions."""

    resolution = 8

    def samples(self):
        generator = torch.Generator().manual_seed(2)
        for sample in super().samples():
            condition = torch.rand(3, 8, 8, generator=generator, dtype=torch.float64)
            yield {**sample, "condition": condition}


class Controlled(ControlNetDiffusion):
    """Tiny, and equal in every process; none of its exits is zero, as those of a new one are."""

    def __init__(self):
        tiny = tiny_controlnet_diffusion()
        super().__init__(**tiny.parts, optimization=Optimization(lr=1e-2, warmup_steps=1))


def test_it_learns_what_one_process_learns():
    """Another on two ranks does in `test_porting.py`.

    The module computes noise and loss in single precision, so that rounding may differ once in a while.
    """
    outcomes, expected = check_parity(
        3, 3, tolerance=1e-6, module_class=Controlled, data_class=Conditioned, trainer={"max_steps": 4},
        strategy={"num_stages": 3, "schedule": "zero_bubble"},
    )  # fmt: skip
    trained = {name.partition(".")[0] for name in expected.gradients[0]}
    assert trained == {"controlnet"}
    assert outcomes[0].plan.options.filling == "shares"
    encoders = outcomes[0].basis.profile.encoders
    frozen = {layer.name for encoder in encoders for layer in encoder.layers}
    assert any(name.startswith("unet.down_blocks") for name in frozen)
    way_up = {name for name in frozen if name.startswith("unet.up_blocks")}
    assert {name.rpartition(".")[2] for name in way_up} <= {"time_emb_proj", "to_k", "to_v"}
