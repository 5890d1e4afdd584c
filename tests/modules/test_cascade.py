"""The ready-made cascade: two losses that know nothing of each other, and images by both."""

from unittest import mock

import diffusers
import pytest
import torch
from torch.utils.data import DataLoader

from examples.glyph_parts import AutoencoderTraining, TextAlignment
from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.graph.chains import find_chains
from lightning_diffpipe.graph.probe import probe
from lightning_diffpipe.modules import CascadedDiffusion, Optimization
from tests.distributed.scenarios import quick_strategy, quiet_trainer
from tests.modules.tiny_parts import (
    SCHEDULERS,
    fit,
    loss_of,
    tiny_cascade,
    tiny_clip,
    tiny_text_encoder,
    tiny_tokenizer,
    tiny_unet,
    tiny_vae,
)
from tests.ranks import run_ranks

PROMPTS = ["digit four", "alpha"]
GREY = {"in_channels": 1, "out_channels": 1}, {"in_channels": 8, "out_channels": 4}


def drawn(module, **options):
    generator = torch.Generator().manual_seed(3)
    return module.sample(PROMPTS, num_inference_steps=3, generator=generator, **options)


@pytest.mark.slow
@pytest.mark.parametrize("prediction", ["flow", "v"])
def test_both_backbones_are_trained_by_losses_of_their_own(batch, prediction):
    module = tiny_cascade(prediction)
    loss_of(module, batch).backward()
    for part in (module.unet, module.upscaler):
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in part.parameters())
    assert all(p.grad is None for p in module.text_encoder.parameters())
    module.log = lambda *_, **__: None
    step = lambda module, batch: module.training_step(batch, 0)
    graph = probe(module, step, batch)
    found = find_chains(module, step, batch, graph)
    assert found.joined_by == ""
    assert graph.path_names[found.starts[1]].startswith("upscaler.")


def test_the_upscaler_learns_with_noise_of_the_level_it_is_given(batch):
    module = tiny_cascade()
    seen = []
    with mock.patch.object(module, "_predict", side_effect=module._predict) as predict:
        loss_of(module, batch)
        seen += [call.args for call in predict.call_args_list]
    *_, large, level = seen[1]
    assert len(seen[0]) == 5, "the base is given nothing of the large image"
    assert large.shape == (len(level), 12, 4, 4)
    assert ((level >= 0) & (level <= module.hparams.most_noise)).all()
    clean, _ = module._upscaler_inputs(
        torch.zeros(2, 3, 4, 4), torch.zeros(2), torch.ones(2, 3, 4, 4)
    )
    noisy, _ = module._upscaler_inputs(
        torch.zeros(2, 3, 4, 4), torch.ones(2), torch.ones(2, 3, 4, 4)
    )
    assert clean.abs().max() == 0
    assert noisy.min() == 1


def test_images_depend_on_prompt_and_small_image():
    module = tiny_cascade()
    for guidance_scale in (1.0, 4.0):
        both = drawn(module, guidance_scale=guidance_scale)
        assert both.shape == (2, 3, 8, 8)
        assert 0 <= both.min() <= both.max() <= 1
        small = torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(1))
        one = drawn(module, guidance_scale=guidance_scale, small=small)
        other = drawn(
            module, guidance_scale=guidance_scale, small=torch.stack([small[0], 1 - small[1]])
        )
        torch.testing.assert_close(one[0], other[0])
        assert not torch.allclose(one[1], other[1], atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("is_grey", [False, True])
def test_it_survives_checkpoints_and_folders(is_grey, tmp_path, batch):
    """History: a folder did not say that images are grey, and could not be opened."""
    module = tiny_cascade("flow", *GREY if is_grey else ())
    trainer = fit(module, batch, tmp_path)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    module.save_pretrained(tmp_path / "folder")
    for again in (
        CascadedDiffusion.from_checkpoint(tmp_path / "last.ckpt"),
        CascadedDiffusion.from_pretrained(tmp_path / "folder"),
    ):
        torch.testing.assert_close(drawn(again), drawn(module))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unet": {"in_channels": 8, "out_channels": 8}}, "unet takes 8 channels and gives 8: in a cascade"),
        ({"unet": {"in_channels": 4, "out_channels": 4}}, "the unet samples 1 colors and the upscaler 3; both"),
        ({"upscaler": {"in_channels": 12}}, "upscaler takes 12 channels and gives 12: .* twice as many"),
        ({"upscaler": {"class_embed_type": None}}, "class_embed_type=timestep; got None"),
        ({"unet": {"sample_size": 8}}, "the upscaler samples 8 pixels .* and the base 8: not fewer"),
        ({"most_noise": 1.5}, "most_noise"),
    ],
)  # fmt: skip
def test_parts_that_are_no_cascade(options, message):
    with pytest.raises(ConfigurationError, match=message):
        tiny_cascade(**options)


def test_grey_images_have_one_channel(batch):
    module = tiny_cascade("flow", *GREY)
    same = {**batch, "image": batch["image"].mean(1, keepdim=True).expand(-1, 3, -1, -1)}
    torch.testing.assert_close(loss_of(module, batch), loss_of(module, same))
    images = drawn(module)
    assert images.shape == (2, 3, 8, 8)
    assert torch.equal(images[:, 0], images[:, 2])
    small = torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(drawn(module, small=small), drawn(module, small=small.mean(1, True)))


def test_images_of_another_size_are_refused(batch):
    batch = {**batch, "image": batch["image"][..., :4, :4]}
    with pytest.raises(ConfigurationError, match="upscaler samples 8 pixels, but images have 4"):
        loss_of(tiny_cascade(), batch)


def test_a_text_encoder_whose_padding_is_text():
    module = CascadedDiffusion(
        tiny_unet(in_channels=3, out_channels=3),
        tiny_cascade().upscaler,
        tiny_clip(),
        tiny_tokenizer(),
        SCHEDULERS["flow"](),
    )
    assert drawn(module).isfinite().all()


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
