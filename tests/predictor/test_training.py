"""From training to pictures: samples at validation on the training's own partition, and `trainer.predict`."""

import lightning as L
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_diffpipe import EMA, DiffPipeStrategy, LatentDiffusion
from lightning_diffpipe.callbacks import FinalCheckpoint, SampleImages
from lightning_diffpipe.predictor import Predictor
from tests.modules.tiny_parts import perturbed_latent_diffusion
from tests.ranks import run_ranks

PROMPTS = ["a", "b", "c", "d"]


def tiny_module():
    module = perturbed_latent_diffusion()
    module.sampling = {"num_inference_steps": 2, "guidance_scale": 2.0}
    return module


def batches():
    torch.manual_seed(1)
    images = torch.rand(8, 3, 8, 8) * 2 - 1
    return DataLoader([{"image": image, "caption": "a"} for image in images], batch_size=4)


class Kept(SampleImages):
    """Remembers what it drew."""

    def draw(self, trainer, module):
        self.images = super().draw(trainer, module)
        return self.images


def as_array(images):
    return np.stack([np.asarray(image) for image in images])


def train_and_predict(rank, world_size, folder):
    samples = Kept(PROMPTS, every_n_steps=None, num_inference_steps=2, guidance_scale=2.0, seed=4)
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
    predicted = trainer.predict(module, DataLoader(PROMPTS, batch_size=1))
    return samples.images.numpy(), [as_array(p) for p in predicted]


@pytest.mark.slow
@pytest.mark.distributed
def test_samples_in_training_are_those_of_the_averaged_weights(tmp_path):
    (drawn, first), (drawn_there, second) = run_ranks(train_and_predict, 2, 2, tmp_path)
    assert (drawn == drawn_there).all()
    whole = LatentDiffusion.from_checkpoint(tmp_path / "final.ckpt")
    expected = whole.sample(PROMPTS, 2, 2.0, torch.Generator().manual_seed(4)).numpy()
    np.testing.assert_allclose(drawn, expected, atol=1e-5)
    pictures = Predictor.from_pretrained(tmp_path / "final.ckpt", "single")(PROMPTS, 2, 2.0, seed=4)
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
