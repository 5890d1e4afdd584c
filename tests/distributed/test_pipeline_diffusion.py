"""A pipeline of diffusers, trained by its own call on several ranks: the numbers of one process."""

import tempfile
from pathlib import Path

import pytest

from lightning_diffpipe.modules import Noise, Optimization, PipelineDiffusion
from tests.distributed.scenarios import Settings, assert_equal_runs, fit, reference
from tests.distributed.tiny import Images
from tests.predictor import tiny_pipelines as tiny
from tests.ranks import run_ranks
from tests.rows import row

pytestmark = pytest.mark.distributed


class Tiny(PipelineDiffusion):
    """Equal in every process, with a loss of its own that some samples and pixels count more in."""

    def __init__(self, name):
        with tempfile.TemporaryDirectory() as folder:
            pipeline = tiny.build(name, Path(folder))
        options = {"max_sequence_length": 8} if name == "flux" else {}
        noise = Noise(loss="huber", offset=0.1, shift="size" if name == "flux" else None)
        optimization = Optimization(lr=1e-2, warmup_steps=1, groups={"norm|bias": {"lr": 1e-3}})
        super().__init__(pipeline, call=options, optimization=optimization, noise=noise)

    def losses(self, batch, generator=None):
        image = batch["image"]
        own = {"mask": (image[:, :1] > 0).float(), "weight": 1 + image.mean((1, 2, 3))}
        return super().losses({**batch, **own}, generator)


@pytest.mark.parametrize(
    ("name", "world_size", "schedule"), [("flux", 2, "zero_bubble"), row("sdxl", 3, "1f1b")]
)
def test_it_learns_what_one_process_learns(name, world_size, schedule):
    """Noise and loss are computed in single precision, so that rounding may differ once in a while."""
    settings = Settings(
        module={"name": name},
        module_class=Tiny,
        data_class=Images,
        trainer={"max_steps": 3, "max_epochs": -1},
    )
    expected = reference(settings, 3)
    settings.strategy = {"num_stages": world_size, "num_microbatches": 3, "schedule": schedule}
    outcomes = run_ranks(fit, world_size, settings, world_size)
    assert_equal_runs(outcomes, expected, 1e-6)
    assert {n.partition(".")[0] for n in expected.gradients[0]} == {
        "transformer" if name == "flux" else "unet"
    }
    assert outcomes[0].plan.options.filling == "shares"
    encoders = {
        layer.name.partition(".")[0]
        for e in outcomes[0].basis.profile.encoders
        for layer in e.layers
    }
    assert encoders >= {"vae", "text_encoder", "text_encoder_2"}
