import diffusers
import pytest
import torch
from torch.utils.data import DataLoader

from examples.glyph_parts import AutoencoderTraining, TextAlignment
from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.modules import Optimization
from tests.distributed.scenarios import quick_strategy, quiet_trainer
from tests.modules.tiny_parts import fit, tiny_text_encoder, tiny_tokenizer, tiny_vae
from tests.ranks import run_ranks


def fit_and_validate(module, batch, folder, steps):
    return fit(
        module, batch, folder, steps, DataLoader([batch] * 2, batch_size=None), check_val_every_n_epoch=None,
        val_check_interval=steps, num_sanity_val_steps=0,
    )  # fmt: skip


@pytest.mark.slow
def test_an_autoencoder_learns_to_reconstruct(batch, tmp_path):
    module = AutoencoderTraining(tiny_vae(), optimization=Optimization(lr=1e-2, warmup_steps=1))
    first = fit_and_validate(module, batch, tmp_path, steps=1).callback_metrics["val/psnr"]
    last = fit_and_validate(module, batch, tmp_path, steps=40).callback_metrics["val/psnr"]
    assert last > first + 1


def test_the_scaling_factor_gives_latents_unit_variance(batch, tmp_path):
    module = AutoencoderTraining(tiny_vae(), optimization=Optimization(lr=1e-2, warmup_steps=1))
    fit_and_validate(module, batch, tmp_path, steps=5)
    module.save_pretrained(tmp_path / "saved")
    vae = diffusers.AutoencoderKL.from_pretrained(tmp_path / "saved", subfolder="vae")
    latent = vae.encode(batch["image"]).latent_dist.mode() * vae.config.scaling_factor
    assert latent.std(correction=0).item() == pytest.approx(1, abs=1e-3)


def validate_while_training(rank, world_size, distributed):
    """Trains an epoch that changes nothing, and validates six images."""
    torch.manual_seed(0)
    images = [{"image": image} for image in torch.rand(6, 3, 8, 8) * 2 - 1]
    module = AutoencoderTraining(tiny_vae(), optimization=Optimization(lr=0.0))
    trainer = quiet_trainer(use_distributed_sampler=True, **distributed)
    trainer.fit(module, DataLoader(images, batch_size=2), DataLoader(images, batch_size=1))
    return float(trainer.callback_metrics["val/psnr"]), module.latent_moments.tolist()


@pytest.mark.distributed
def test_pipelines_side_by_side_validate_as_one_process_does():
    """History: each logged its own share; early stopping differed, and the scaling factor was of the first's."""
    psnr, moments = validate_while_training(0, 1, {})
    strategy = quick_strategy(num_stages=1, num_replicas=1, num_microbatches=1)
    distributed = {"devices": 2, "strategy": strategy}
    for found in run_ranks(validate_while_training, 2, 2, distributed):
        assert found[0] == pytest.approx(psnr, rel=1e-5)
        assert found[1] == pytest.approx(moments, rel=1e-5)


@pytest.mark.slow
def test_a_text_encoder_learns_to_find_images(batch, tmp_path):
    module = TextAlignment(
        tiny_text_encoder(), tiny_tokenizer(), optimization=Optimization(lr=3e-3, warmup_steps=10)
    )
    metrics = fit_and_validate(module, batch, tmp_path, steps=80).callback_metrics
    # Four pairs: guessing has a loss of 2 ln 4 = 2.77.
    assert metrics["train/loss"] < 1.5


def image(optimization, num_steps=40, columns=40, rows=5):
    factors = [optimization.factor(step, num_steps) for step in range(columns)]
    heights = [round(factor * (rows - 1)) for factor in factors]
    lines = ["".join("#" if h == row else " " for h in heights) for row in reversed(range(rows))]
    return [line.rstrip() for line in lines]


def test_learning_rate_warms_up_stays_and_falls():
    optimization = Optimization(warmup_steps=8, decay="linear", decay_share=0.5, final_share=0.0)
    assert image(optimization) == [
        "      #####################",
        "     #                     ###",
        "  ###                         #####",
        " #                                 ###",
        "#                                     ##",
    ]


def test_learning_rate_of_a_run_without_end_stays():
    assert Optimization(warmup_steps=1).factor(10_000, float("inf")) == 1


class Stream(torch.utils.data.IterableDataset):
    """Batches without a length, as most streams are."""

    def __init__(self, batch):
        self.batch = batch

    def __iter__(self):
        return iter([self.batch] * 3)


def test_the_learning_rate_of_a_stream_without_a_length_stays(batch, tmp_path):
    """History: Lightning tells -1 steps of epochs without a length; the whole run had 2 % of its learning rate."""
    module = AutoencoderTraining(tiny_vae(), optimization=Optimization(lr=1e-3, warmup_steps=1))
    trainer = quiet_trainer(default_root_dir=tmp_path)
    trainer.fit(module, DataLoader(Stream(batch), batch_size=None))
    assert trainer.global_step == 3
    assert trainer.optimizers[0].param_groups[0]["lr"] == 1e-3


def test_nothing_to_train_is_refused(tmp_path):
    module = AutoencoderTraining(tiny_vae())
    module.vae.requires_grad_(False)
    with pytest.raises(ConfigurationError, match="AutoencoderTraining has no trainable parameter"):
        Optimization().configure(module)
