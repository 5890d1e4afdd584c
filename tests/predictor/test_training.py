"""From training to pictures: samples at validation on the training's own partition, and `trainer.predict`."""

import tempfile
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_diffpipe import EMA, DiffPipeStrategy, LatentDiffusion
from lightning_diffpipe.callbacks import FinalCheckpoint, SampleImages
from lightning_diffpipe.modules import Optimization, PipelineDiffusion
from lightning_diffpipe.predictor import Predictor
from tests.modules.tiny_parts import perturbed_latent_diffusion
from tests.predictor.tiny_pipelines import build
from tests.ranks import run_in_turn, run_ranks

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

    def draw(self, trainer, module):
        images = super().draw(trainer, module)
        self.drawn = [*self.drawn, images.numpy()]
        return images


def as_array(images):
    return np.stack([np.asarray(image) for image in images])


def train_and_predict(rank, world_size, folder, num_patches=1):
    settings = {"num_inference_steps": 3, "guidance_scale": 2.0, "seed": 4}
    samples = Remembering(PROMPTS, every_n_steps=None, num_patches=num_patches, **settings)
    strategy = DiffPipeStrategy(num_stages=2, profile="flops", seed=1, timeout_s=20)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=strategy if world_size > 1 else "auto",
        max_epochs=1,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[EMA(decay=0.5), samples, FinalCheckpoint(folder / "final.ckpt")],
    )
    module = tiny_module()
    trainer.fit(module, batches(), batches())
    assert not samples.draws_by_layers
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
    pictures = Predictor.from_pretrained(tmp_path / "final.ckpt", "single")(PROMPTS, 3, 2.0, seed=4)
    as_images = (expected.transpose(0, 2, 3, 1) * 255).round().astype(np.uint8)
    assert (as_array(pictures) == as_images).all()
    # `trainer.predict` divides the prompts over the ranks.
    assert len(first) == len(second) == 2
    raw = LatentDiffusion.from_checkpoint(tmp_path / "final.ckpt", ema=False)
    for predicted, prompts in ((first, "ac"), (second, "bd")):
        for images, prompt in zip(predicted, prompts, strict=True):
            seed = "abcd".index(prompt)  # of one process, too
            alone = raw.sample([prompt], 2, 2.0, torch.Generator().manual_seed(seed))
            wanted = (alone.permute(0, 2, 3, 1) * 255).round().byte().numpy()
            assert np.abs(images.astype(int) - wanted.astype(int)).max() <= 1


@pytest.mark.slow
@pytest.mark.distributed
def test_samples_in_training_are_those_of_the_emulator_of_pipefusion(tmp_path):
    """Patches flow through the stages of the training, whose weights stay where they are."""
    outcomes = run_ranks(train_and_predict, 2, 2, tmp_path, 2)
    emulator = Predictor.from_pretrained(tmp_path / "final.ckpt", "pipefusion", num_patches=2)
    pictures = as_array(emulator(PROMPTS, 3, 2.0, seed=4))
    exact = Predictor.from_pretrained(tmp_path / "final.ckpt", "single")(PROMPTS, 3, 2.0, seed=4)
    assert (pictures != as_array(exact)).any()  # stale keys show
    for drawn, _ in outcomes:
        assert ((drawn.transpose(0, 2, 3, 1) * 255).round().astype(np.uint8) == pictures).all()


class Small(PipelineDiffusion):
    """A pipeline of diffusers, the same in every process."""

    def __init__(self, name):
        with tempfile.TemporaryDirectory() as folder:
            pipeline = build(name, Path(folder))
        optimization = Optimization(lr=1e-2, warmup_steps=1)
        call = {"max_sequence_length": 8} if name == "flux" else {}
        super().__init__(pipeline, call=call, optimization=optimization)


def train(rank, world_size, name, every_n_steps, options=None):
    """Trains for two steps.

    Returns:
        What was drawn; whether layers answered one by one; what the trained module draws, whole; its weights.
    """
    settings = {"num_inference_steps": 2, "guidance_scale": 2.0, "seed": 4}
    samples = Remembering(PROMPTS[:2], every_n_steps=every_n_steps, **settings)
    options = {"num_stages": 2, "num_microbatches": 2} | (options or {})
    strategy = DiffPipeStrategy(profile="flops", timeout_s=20, **options)
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            accelerator="cpu",
            devices=world_size,
            strategy=strategy,
            max_steps=2,
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            callbacks=[samples],
        )
        module = Small(name)
        draw = torch.Generator().manual_seed(1)
        images = torch.rand(8, 3, 32, 32, generator=draw) * 2 - 1
        data = [{"image": image, "caption": "a"} for image in images]
        trainer.fit(module, DataLoader(data, batch_size=4))
    alone = module.sample(PROMPTS[:2], 2, 2.0, torch.Generator().manual_seed(4)).numpy()
    weights = {n: p.detach().numpy() for n, p in module.denoiser.named_parameters()}
    return samples.drawn, samples.draws_by_layers, alone, weights


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("name", "draws_by_layers"), [("flux", False), ("sdxl", True)])
def test_training_goes_on_as_without_samples(name, draws_by_layers):
    """Also after a refusal of PipeFusion, which leaves a U-Net to be drawn layer by layer."""
    (without, _), (outcome, _) = run_in_turn(train, 2, (2, name, 9), (2, name, 1))
    drawn, by_layers, alone, weights = outcome
    assert by_layers == draws_by_layers
    assert len(drawn) == 2
    assert all((value == without[3][key]).all() for key, value in weights.items())
    np.testing.assert_allclose(drawn[-1], alone, atol=1e-4)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("world_size", "options", "draws_by_layers"),
    [
        (2, {"num_stages": 1, "num_replicas": 2}, False),
        (3, {"num_stages": 2, "num_replicas": (2, 1)}, False),
        (2, {"num_stages": 4, "schedule": "interleaved"}, True),
    ],
    ids=["replicas only", "replicas of a stage", "interleaved"],
)
def test_replicas_of_a_stage_draw_by_a_share_of_its_blocks_each(
    world_size, options, draws_by_layers
):
    """History: layers answered one by one, as if a rank lacked blocks. Of interleaved stages they do."""
    for drawn, by_layers, alone, _ in run_ranks(train, world_size, world_size, "flux", 1, options):
        assert by_layers == draws_by_layers
        np.testing.assert_allclose(drawn[-1], alone, atol=1e-4)
