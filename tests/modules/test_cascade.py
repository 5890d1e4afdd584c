"""The ready-made cascade: two losses that know nothing of each other, and images by both."""

from unittest import mock

import pytest
import torch

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.graph.chains import find_chains
from lightning_diffpipe.graph.probe import probe
from lightning_diffpipe.modules import CascadedDiffusion
from tests.modules.tiny_parts import (
    SCHEDULERS,
    fit,
    loss_of,
    tiny_cascade,
    tiny_clip,
    tiny_tokenizer,
    tiny_unet,
)

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
