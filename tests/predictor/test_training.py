"""From training to images: samples at validation on the training's own partition, and `trainer.predict`."""

import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import SD3ControlNetModel, StableDiffusion3ControlNetPipeline
from torch import nn
from torch.utils.data import DataLoader

from lightning_diffpipe import EMA, DiffPipeStrategy, LatentDiffusion
from lightning_diffpipe.callbacks import FinalCheckpoint, SampleImages
from lightning_diffpipe.callbacks.sample_images import StageSampler
from lightning_diffpipe.errors import PartitionError
from lightning_diffpipe.modules import Optimization, PipelineDiffusion
from lightning_diffpipe.predictor import Predictor
from lightning_diffpipe.sampling.source import call_of
from tests.distributed.scenarios import quiet_trainer
from tests.modules.tiny_parts import perturbed_latent_diffusion, tiny_latent_diffusion
from tests.predictor.scenarios import as_array
from tests.predictor.tiny_pipelines import build
from tests.ranks import run_in_turn, run_ranks
from tests.rows import row
from tests.zoo.case import perturb

PROMPTS = ["a", "b", "c", "d"]


def tiny_module():
    module = perturbed_latent_diffusion()
    module.sampling = {"num_inference_steps": 2, "guidance_scale": 2.0}
    return module


def batches():
    torch.manual_seed(1)
    images = torch.rand(8, 3, 8, 8) * 2 - 1
    return DataLoader([{"image": image, "caption": "a"} for image in images], batch_size=4)


class Remembering(SampleImages):
    """Remembers what it drew."""

    drawn = ()

    def sample(self, trainer, module):
        images = super().sample(trainer, module)
        self.drawn = [*self.drawn, images.numpy()]
        return images


def train_and_predict(rank, world_size, folder, num_patches=1):
    settings = {"num_inference_steps": 3, "guidance_scale": 2.0, "seed": 4}
    samples = Remembering(PROMPTS, every_n_steps=None, num_patches=num_patches, **settings)
    strategy = DiffPipeStrategy(num_stages=2, profile="flops", seed=1, timeout_s=20)
    trainer = quiet_trainer(
        devices=world_size, strategy=strategy if world_size > 1 else "auto", default_root_dir=folder,
        callbacks=[EMA(decay=0.5), samples, FinalCheckpoint(folder / "final.ckpt")],
    )  # fmt: skip
    module = tiny_module()
    trainer.fit(module, batches(), batches())
    assert not samples.samples_by_layers
    predicted = trainer.predict(module, DataLoader(PROMPTS, batch_size=1))
    return samples.drawn[-1], [as_array(p) for p in predicted]


@pytest.mark.slow
@pytest.mark.distributed
def test_samples_in_training_are_those_of_the_averaged_weights(tmp_path):
    (drawn, first), (drawn_there, second) = run_ranks(train_and_predict, 2, 2, tmp_path)
    assert (drawn == drawn_there).all()
    whole = LatentDiffusion.from_checkpoint(tmp_path / "final.ckpt")
    expected = whole.sample(PROMPTS, 3, 2.0, torch.Generator().manual_seed(4)).numpy()
    np.testing.assert_allclose(drawn, expected, atol=1e-5)
    images = Predictor.from_pretrained(tmp_path / "final.ckpt", "single")(PROMPTS, 3, 2.0, seed=4)
    as_images = (expected.transpose(0, 2, 3, 1) * 255).round().astype(np.uint8)
    assert (as_array(images) == as_images).all()
    # In `trainer.predict` each rank has the whole model, and all prompts of its pipeline.
    raw = LatentDiffusion.from_checkpoint(tmp_path / "final.ckpt", ema=False)
    for predicted in (first, second):
        for seed, (images, prompt) in enumerate(zip(predicted, PROMPTS, strict=True)):
            alone = raw.sample([prompt], 2, 2.0, torch.Generator().manual_seed(seed))
            wanted = (alone.permute(0, 2, 3, 1) * 255).round().byte().numpy()
            assert np.abs(images.astype(int) - wanted.astype(int)).max() <= 1


@pytest.mark.slow
@pytest.mark.distributed
def test_samples_in_training_are_those_of_the_emulator_of_pipefusion(tmp_path):
    """Patches flow through the stages of the training, whose weights stay where they are."""
    outcomes = run_ranks(train_and_predict, 2, 2, tmp_path, 2)
    emulator = Predictor.from_pretrained(tmp_path / "final.ckpt", "pipefusion", num_patches=2)
    images = as_array(emulator(PROMPTS, 3, 2.0, seed=4))
    exact = Predictor.from_pretrained(tmp_path / "final.ckpt", "single")(PROMPTS, 3, 2.0, seed=4)
    assert (images != as_array(exact)).any()  # stale keys show
    for drawn, _ in outcomes:
        assert ((drawn.transpose(0, 2, 3, 1) * 255).round().astype(np.uint8) == images).all()


class Small(PipelineDiffusion):
    """A pipeline of diffusers, the same in every process."""

    def __init__(self, name):
        with tempfile.TemporaryDirectory() as folder:
            pipeline = build(name, Path(folder))
        optimization = Optimization(lr=1e-2, warmup_steps=1)
        call = {"max_sequence_length": 8} if name == "flux" else {}
        super().__init__(pipeline, call=call, optimization=optimization)


class SmallControlNet(Small):
    """A ControlNet of a locked transformer, which a module of one's own trains."""

    samples_to_conditions = True

    def __init__(self, name):
        super().__init__(name)
        self.denoiser.requires_grad_(False)
        config = dict(self.denoiser.config, num_layers=2, extra_conditioning_channels=0)
        torch.manual_seed(2)
        self.controlnet = SD3ControlNetModel.from_config(config)
        perturb(self.controlnet, torch.Generator().manual_seed(2))
        self.register_buffer("text", torch.randn(1, 20, 16))
        # The pipeline encodes conditions with noise, from the global generator: there shall be none.
        last = self.vae.quant_conv
        with torch.no_grad():
            last.weight[4:], last.bias[4:] = 0.0, -30.0

    def training_step(self, batch, batch_idx):
        latents, condition = self.encode(batch["image"]), self.encode(2 * batch["condition"] - 1)
        given = {
            "hidden_states": latents,
            "timestep": torch.rand(len(latents), device=self.device),
            "encoder_hidden_states": self.text.expand(len(latents), -1, -1),
            "pooled_projections": self.text[:, 0].expand(len(latents), -1),
            "return_dict": False,
        }
        (residuals,) = self.controlnet(controlnet_cond=condition, **given)
        (prediction,) = self.transformer(block_controlnet_hidden_states=residuals, **given)
        return (prediction - latents).square().mean()

    def sampling_call(self, prompts, condition, **settings):
        pipeline = StableDiffusion3ControlNetPipeline(
            **self.pipeline.components, controlnet=self.controlnet
        )
        arguments = {"prompt": list(prompts), "control_image": condition, **settings}
        sizes = {"height": 32, "width": 32, "max_sequence_length": 8, "output_type": "pt"}
        return call_of(pipeline, arguments | sizes, self.device)

    @torch.no_grad()
    def sample(self, prompts, *args, **settings):
        call = self.sampling_call(prompts, **settings)
        with self.evaluating():
            return call.pipeline(**call.arguments)[0]


def module_of(name):
    if name == "self-conditioned":
        rates = Optimization(lr=1e-2, warmup_steps=1)
        channels = {"in_channels": 8, "self_conditioning": 0.5}
        return tiny_latent_diffusion("unet", "epsilon", optimization=rates, **channels)
    return (SmallControlNet if name == "sd3" else Small)(name)


def train(rank, world_size, name, every_n_steps, options=None):
    """Trains for two steps.

    Returns:
        What was drawn; whether layers answered one by one; what the trained module draws, whole; its weights.
    """
    settings = {"num_inference_steps": 2, "guidance_scale": 2.0, "seed": 4}
    controlled = name == "sd3"
    prompts = None if controlled else PROMPTS[:2]
    samples = Remembering(prompts, every_n_steps=every_n_steps, **settings)
    options = {"num_stages": 2, "num_microbatches": 2} | (options or {})
    strategy = DiffPipeStrategy(profile="flops", timeout_s=20, **options)
    with tempfile.TemporaryDirectory() as folder:
        trainer = quiet_trainer(
            devices=world_size, strategy=strategy, max_steps=2, default_root_dir=folder, callbacks=[samples],
        )  # fmt: skip
        module = module_of(name)
        draw = torch.Generator().manual_seed(1)
        images = torch.rand(8, 3, 32, 32, generator=draw) * 2 - 1
        data = [{"image": i, "caption": "a", "condition": i / 2 + 0.5} for i in images]
        trainer.fit(module, DataLoader(data, batch_size=4))
    conditions = {"condition": samples.conditions / 255} if controlled else {}
    settings["generator"] = torch.Generator().manual_seed(settings.pop("seed"))
    alone = module.sample(samples.prompts, **settings, **conditions).numpy()
    weights = {n: p.detach().numpy() for n, p in module.named_parameters() if p.requires_grad}
    return samples.drawn, samples.samples_by_layers, alone, weights


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "samples_by_layers"),
    [("flux", False), row("sdxl", True), row("sd3", False), row("self-conditioned", True)],
)
def test_training_goes_on_as_without_samples(name, samples_by_layers):
    """Also after a refusal of PipeFusion, which leaves a U-Net to be drawn layer by layer."""
    (without, _), (outcome, _) = run_in_turn(train, 2, (2, name, 9), (2, name, 1))
    drawn, by_layers, alone, weights = outcome
    assert by_layers == samples_by_layers
    assert len(drawn) == 2
    assert all((value == without[3][key]).all() for key, value in weights.items())
    np.testing.assert_allclose(drawn[-1], alone, atol=1e-4)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("world_size", "options", "samples_by_layers"),
    [
        row(2, {"num_stages": 1, "num_replicas": 2}, False),
        (3, {"num_stages": 2, "num_replicas": (2, 1)}, False),
        row(2, {"num_stages": 4, "schedule": "interleaved"}, True),
    ],
    ids=["replicas only", "replicas of a stage", "interleaved"],
)
def test_replicas_of_a_stage_draw_by_a_share_of_its_blocks_each(
    world_size, options, samples_by_layers
):
    """History: layers answered one by one, as if a rank lacked blocks. Of interleaved stages they do."""
    for drawn, by_layers, alone, _ in run_ranks(train, world_size, world_size, "flux", 1, options):
        assert by_layers == samples_by_layers
        np.testing.assert_allclose(drawn[-1], alone, atol=1e-4)


@pytest.mark.parametrize(
    ("homes", "cut"),
    [
        ("0 0 0 1", (3,)),
        ("012 012 012", (1, 2)),
        ("012 012 01 01 01 2 2 2", (2, 5)),
        ("01 01 01 1 1 1", (3,)),
        ("0 0 01 1 01 1", (3,)),
        ("01 0 0 01 01 1", (3,)),
        ("012 2 2 2", None),
        ("0 1 0 1", "1 on rank 0, 1 on rank 1, 1 on rank 0, 1 on rank 1"),
        ("01 01 01 0 0", "3 on rank 0 and 1, 2 on rank 0"),
    ],
)
def test_ranges_of_blocks_are_found_where_replicas_and_frozen_blocks_lie(homes, cut):
    """History: where first blocks were frozen, which all ranks have, and a stage replicated, layers answered."""
    homes = homes.split()
    blocks = nn.ModuleDict({f"b{i}": nn.Linear(2, 2) for i in range(len(homes))})
    residents = [
        {name for name, _ in blocks.named_parameters() if str(rank) in homes[int(name[1])]}
        for rank in range(1 + max(int(home[-1]) for home in homes))
    ]
    mesh = SimpleNamespace(layout=SimpleNamespace(ranks_per_pipeline=len(residents)))
    sampler = StageSampler(SimpleNamespace(mesh=mesh, module=blocks, residents=residents), 1)
    layout = SimpleNamespace(block_names=list(blocks))
    if isinstance(cut, tuple):
        assert sampler._positions(blocks, layout) == cut
        return
    with pytest.raises(PartitionError, match=f"lie, in order, {cut or '.*'}; PipeFusion needs"):
        sampler._positions(blocks, layout)
