"""A pipeline of diffusers, trained by its own call on several ranks: the numbers of one process."""

import pytest
import torch
import torch.nn.functional as F

from lightning_diffpipe.callbacks import EncodingCache
from lightning_diffpipe.modules import Lora, Noise, Optimization
from tests.distributed.scenarios import Settings, check_parity, fit
from tests.distributed.tiny import Images, TinyPipeline
from tests.predictor import tiny_pipelines
from tests.ranks import run_ranks
from tests.rows import row
from tests.zoo.image_to_video import Animating

pytestmark = pytest.mark.distributed


class Tiny(TinyPipeline):
    """With a loss of its own that some samples and pixels count more in."""

    def __init__(self, name):
        noise = Noise(loss="huber", offset=0.1, shift="size" if name == "flux" else None)
        optimization = Optimization(lr=1e-2, warmup_steps=1, groups={"norm|bias": {"lr": 1e-3}})
        super().__init__(name, optimization=optimization, noise=noise)

    def losses(self, batch, generator=None):
        image = batch["image"]
        own = {"mask": (image[:, :1] > 0).float(), "weight": 1 + image.mean((1, 2, 3))}
        return super().losses({**batch, **own}, generator)


@pytest.mark.parametrize(
    ("name", "world_size", "schedule"), [("flux", 2, "zero_bubble"), row("sdxl", 3, "1f1b")]
)
def test_it_learns_what_one_process_learns(name, world_size, schedule):
    """Noise and loss are computed in single precision, so that rounding may differ once in a while."""
    outcomes, expected = check_parity(
        world_size, 3, tolerance=1e-6, module={"name": name}, module_class=Tiny, data_class=Images,
        strategy={"num_stages": world_size, "schedule": schedule},
    )  # fmt: skip
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


def set_adapters(module):
    """Adapters that do something from the start."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in module.named_parameters():
        if ".lora_" in name:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)


class Experts(TinyPipeline):
    """Wan 2.2, whose images are videos of a few frames."""

    def __init__(self, lora):
        super().__init__("wan_experts", lora=Lora(rank=2) if lora else None)
        set_adapters(self)
        self.double()

    def losses(self, batch, generator=None):
        size = tiny_pipelines.options_of("wan")
        shape = size["num_frames"], size["height"], size["width"]
        video = F.interpolate(batch["image"].double()[:, :, None], shape, mode="trilinear")
        return super().losses({"video": video, "caption": batch["caption"]}, generator)


@pytest.mark.parametrize(
    ("lora", "world_size", "strategy"),
    [
        row(True, 2, {"num_stages": 2}),
        row(True, 1, {"num_stages": 1}),
        row(False, 2, {"num_stages": 2}),
        row(False, 2, {"num_stages": 4, "schedule": "bidirectional"}),
    ],
)
def test_both_experts_learn_what_they_learn_in_one_process(lora, world_size, strategy):
    _, expected = check_parity(
        world_size, 3, tolerance=1e-6, module={"lora": lora}, module_class=Experts, data_class=Images,
        strategy=strategy,
    )  # fmt: skip
    assert {n.partition(".")[0] for n in expected.gradients[0]} == {"transformer", "transformer_2"}
    assert all(g.abs().max() > 0 for g in expected.gradients[0].values())


class Clips(Animating):
    """Clips whose frames are an image that moves."""

    def __init__(self, kind, lora):
        optimization = Optimization(lr=1e-2, warmup_steps=1)
        super().__init__(kind, lora=Lora(rank=2) if lora else None, optimization=optimization)
        set_adapters(self)

    def losses(self, batch, generator=None):
        image = F.interpolate(batch["image"].double(), (32, 32))
        video = torch.stack([image.roll(3 * frame, -1) for frame in range(5)], 2)
        return super().losses({"video": video, "caption": batch["caption"]}, generator)


@pytest.mark.parametrize(
    ("kind", "lora"),
    [
        ("ltx", False),
        row("hunyuan", True),
        row("hunyuan_concat", True),
        *(row(kind, False) for kind in ("hunyuan", "hunyuan_concat")),
        row("cogvideox", True),
        row("ltx", True),
        row("cogvideox", False),
        *(row(kind, lora) for kind in ("wan22", "wan22_5b") for lora in (True, False)),
    ],
)
def test_clips_begin_with_an_image_as_in_one_process(kind, lora):
    """Wan 2.1 rounds more in its own single precision; in double its stages are exact (`tests/modules`)."""
    for num_stages in (1, 2):
        _, expected = check_parity(
            num_stages, 3, tolerance=1e-6, module={"kind": kind, "lora": lora}, module_class=Clips,
            data_class=Images, strategy={"num_stages": num_stages},
        )  # fmt: skip
    assert all(g.abs().max() > 0 for g in expected.gradients[-1].values())


def fit_remembering(rank, settings, folder):
    cache = EncodingCache(folder, min_flops_per_byte=0.0)
    settings.trainer["callbacks"] = [cache]
    return fit(rank, settings, 1).losses, cache.memo.made, cache.memo.found


@pytest.mark.parametrize("kind", ["ltx", row("wan21")])
def test_first_frames_are_stored_beside_their_clips(kind, tmp_path):
    settings = Settings(
        module={"kind": kind, "lora": False},
        module_class=Clips,
        data_class=Images,
        trainer={"max_epochs": 2},
        strategy={"num_microbatches": 2},
    )
    [outcome] = run_ranks(fit, 1, settings, 1)
    [(losses, made, found)] = run_ranks(fit_remembering, 1, settings, tmp_path)
    assert losses == outcome.losses, "bit for bit"
    images = {name: n for name, n in made.items() if not name.startswith("text_encoder")}
    assert all(found[name] == n for name, n in images.items()), "read in the second epoch"
    num_made = {name.partition(".")[0]: n for name, n in images.items()}
    assert num_made["vae"] >= 2 * 18, "clips and their first frames"
    assert ("image_encoder" in num_made) == (kind == "wan21")
