"""The ready-made ControlNet as a pipeline: the numbers of one process, and half of its U-Net in the bubbles."""

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_diffpipe import ControlNetDiffusion
from lightning_diffpipe.data.captioned import collate
from lightning_diffpipe.modules import Optimization
from tests.distributed.scenarios import Settings, assert_equal_runs, fit, reference
from tests.modules.tiny_parts import tiny_controlnet_diffusion
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed


class Images(L.LightningDataModule):
    """Made-up images, captions and conditions, in order."""

    def __init__(self, batch_size=6):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(18, 3, 8, 8, generator=generator, dtype=torch.float64)
        conditions = torch.rand(18, 3, 8, 8, generator=generator, dtype=torch.float64)
        samples = [
            {"image": image, "caption": f"glyph {index}", "condition": condition}
            for index, (image, condition) in enumerate(zip(images, conditions, strict=True))
        ]
        return DataLoader(samples, batch_size=self.batch_size, collate_fn=collate)


class Controlled(ControlNetDiffusion):
    """Tiny, and equal in every process; none of its exits is zero, as those of a new one are."""

    def __init__(self):
        tiny = tiny_controlnet_diffusion()
        super().__init__(**tiny.parts, optimization=Optimization(lr=1e-2, warmup_steps=1))


def test_it_learns_what_one_process_learns():
    """Another on two ranks does in `test_porting.py`.

    The module computes noise and loss in single precision, so that rounding may differ once in a while.
    """
    settings = Settings(
        module_class=Controlled, data_class=Images, trainer={"max_steps": 4, "max_epochs": -1}
    )
    expected = reference(settings, 3)
    settings.strategy = {"num_stages": 3, "num_microbatches": 3, "schedule": "zero_bubble"}
    outcomes = run_ranks(fit, 3, settings, 3)
    assert_equal_runs(outcomes, expected, 1e-6)
    trained = {name.partition(".")[0] for name in expected.gradients[0]}
    assert trained == {"controlnet"}
    assert outcomes[0].plan.options.filling == "shares"
    encoders = outcomes[0].basis.profile.encoders
    frozen = {layer.name for encoder in encoders for layer in encoder.layers}
    assert any(name.startswith("unet.down_blocks") for name in frozen)
    way_up = {name for name in frozen if name.startswith("unet.up_blocks")}
    assert {name.rpartition(".")[2] for name in way_up} <= {"time_emb_proj", "to_k", "to_v"}
