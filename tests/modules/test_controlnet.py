"""A ControlNet listens to a second image, and nothing else is trained."""

import diffusers
import pytest
import torch

from lightning_diffpipe import ControlNetDiffusion, LatentDiffusion
from lightning_diffpipe.data import GlyphDataModule
from lightning_diffpipe.data.captioned import edges
from lightning_diffpipe.errors import CheckpointError, ConfigurationError
from lightning_diffpipe.model_sources import open_source, refuse_module
from lightning_diffpipe.modules import Optimization
from lightning_diffpipe.modules.latent_diffusion import tokenize
from tests.modules.tiny_parts import (
    SCHEDULERS,
    fit,
    loss_of,
    tiny_clip,
    tiny_controlnet_diffusion,
    tiny_tokenizer,
    tiny_unet,
    tiny_vae,
)

PROMPTS = ["digit four", "alpha"]


@pytest.fixture
def batch(batch):
    generator = torch.Generator().manual_seed(1)
    return {**batch, "condition": torch.rand(batch["image"].shape, generator=generator)}


def conditions(size=8):
    return torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(2))


def drawn(module, condition, **options):
    generator = torch.Generator().manual_seed(3)
    return module.sample(
        PROMPTS, num_inference_steps=3, generator=generator, condition=condition, **options
    )


def test_it_begins_without_influence(batch):
    module = tiny_controlnet_diffusion(perturbed=False)
    plain = LatentDiffusion(
        module.vae, module.text_encoder, module.tokenizer, module.scheduler, module.unet
    )
    plain.hparams.caption_dropout = module.hparams.caption_dropout
    assert torch.equal(loss_of(module, batch), loss_of(plain, batch))


@pytest.mark.parametrize("prediction", ["epsilon", "v"])
def test_images_are_those_of_diffusers_own_pipeline(prediction):
    module, condition = tiny_controlnet_diffusion(prediction).eval(), conditions()
    names = ("vae", "text_encoder", "tokenizer", "unet", "controlnet", "scheduler")
    pipe = diffusers.StableDiffusionControlNetPipeline(
        **{name: getattr(module, name) for name in names},
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    with torch.no_grad():
        text, empty = (
            module.encode_text(tokenize(module.tokenizer, captions, "cpu"))
            for captions in (PROMPTS, [""] * 2)
        )
    theirs = pipe(
        image=condition, prompt_embeds=text, negative_prompt_embeds=empty,
        latents=torch.randn(2, 4, 4, 4, generator=torch.Generator().manual_seed(3)), num_inference_steps=3,
        guidance_scale=4.0, output_type="pt",
    ).images  # fmt: skip
    torch.testing.assert_close(drawn(module, condition), theirs, rtol=1e-4, atol=1e-5)


def test_only_the_controlnet_is_trained(batch, tmp_path):
    module = tiny_controlnet_diffusion(optimization=Optimization(lr=1e-2, warmup_steps=1))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    fit(module, batch, tmp_path)
    changed = {
        n.partition(".")[0] for n, v in module.state_dict().items() if not v.equal(before[n])
    }
    assert changed == {"controlnet"}
    assert module.controlnet.training
    assert not any(
        m.training
        for part in (module.unet, module.vae, module.text_encoder)
        for m in part.modules()
    )


@pytest.mark.slow
def test_a_folder_is_read_back_by_us_and_by_diffusers(batch, tmp_path):
    module = tiny_controlnet_diffusion(caption_dropout=0.25)
    module.pipeline_index = {"_class_name": "StableDiffusionPipeline", "safety_checker": [None] * 2}
    fit(module, batch, tmp_path).save_checkpoint(tmp_path / "last.ckpt")
    again = ControlNetDiffusion.from_checkpoint(tmp_path / "last.ckpt")
    assert again.hparams == {"caption_dropout": 0.25}
    again.save_pretrained(tmp_path / "model")
    index = diffusers.DiffusionPipeline.load_config(tmp_path / "model")
    assert index["_class_name"] == "StableDiffusionControlNetPipeline"
    for other in (
        ControlNetDiffusion.from_pretrained(tmp_path / "model"),
        ControlNetDiffusion.from_pretrained(
            tmp_path / "model", controlnet=tmp_path / "model" / "controlnet"
        ),
    ):
        torch.testing.assert_close(other.state_dict(), module.state_dict(), rtol=0, atol=0)
    pipe = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "model")
    assert isinstance(pipe, diffusers.StableDiffusionControlNetPipeline)
    controlnet = diffusers.ControlNetModel.from_pretrained(tmp_path / "model" / "controlnet")
    assert controlnet.controlnet_mid_block.weight.equal(
        module.controlnet.controlnet_mid_block.weight
    )


def test_a_new_controlnet_comes_of_a_folder_without_one(tmp_path):
    plain = LatentDiffusion(
        tiny_vae(), tiny_clip(), tiny_tokenizer(), SCHEDULERS["epsilon"](), tiny_unet()
    )
    plain.save_pretrained(tmp_path)
    module = ControlNetDiffusion.from_pretrained(tmp_path)
    assert module.controlnet.conv_in.weight.equal(plain.unet.conv_in.weight)
    assert not module.controlnet.controlnet_mid_block.weight.any()


def test_predicting_takes_the_conditions_of_the_batch(batch):
    module = tiny_controlnet_diffusion()
    module.sampling = {"num_inference_steps": 2}
    images = module.predict_step(batch, 0)
    assert [image.size for image in images] == [(8, 8)] * 4


def without_condition(batch):
    return {name: value for name, value in batch.items() if name != "condition"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (without_condition, r"no 'condition', .*data.condition=edges"),
        (lambda b: {**b, "condition": b["condition"][..., :4]}, r"of 8x4 pixels next to .* 8x8"),
        (
            lambda b: {**b, **dict.fromkeys(("image", "condition"), torch.rand(4, 3, 8, 7))},
            r"no multiple of 2",
        ),
    ],
)
def test_batches_it_cannot_learn_from_are_refused(batch, changed, message):
    with pytest.raises(ConfigurationError, match=message):
        loss_of(tiny_controlnet_diffusion(), changed(batch))


@pytest.mark.parametrize(("condition", "number"), [(None, 0), (torch.zeros(3, 3, 8, 8), 3)])
def test_each_prompt_needs_a_condition(condition, number):
    with pytest.raises(ConfigurationError, match=rf"2 prompts and {number} conditions"):
        drawn(tiny_controlnet_diffusion(), condition)


def controlnet(**changes):
    parts = {"conditioning_embedding_out_channels": (8, 8), **changes}
    return diffusers.ControlNetModel.from_config(
        {**diffusers.ControlNetModel.from_unet(tiny_unet()).config, **parts}
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cross_attention_dim": 24}, r"another U-Net: its cross_attention_dim is 24, .* 16"),
        (
            {"conditioning_embedding_out_channels": (8, 8, 8)},
            r"shrinks conditions by 4, .* images by 2; make one with 2",
        ),
    ],
)
def test_a_controlnet_of_another_model_is_refused(changes, message):
    tiny_controlnet_diffusion(controlnet=controlnet())
    with pytest.raises(ConfigurationError, match=message):
        tiny_controlnet_diffusion(controlnet=controlnet(**changes))


def test_a_controlnet_of_another_kind_is_refused():
    with pytest.raises(ConfigurationError, match=r"this is a UNet2DConditionModel"):
        tiny_controlnet_diffusion(controlnet=tiny_unet())


def test_a_missing_controlnet_is_named(tmp_path):
    tiny_controlnet_diffusion().save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match=r"nowhere' is neither a folder of a ControlNet"):
        ControlNetDiffusion.from_pretrained(tmp_path, controlnet="nowhere")


def test_a_folder_of_other_weights_is_not_taken_for_a_controlnet(tmp_path):
    """diffusers reads what it finds, and goes on with random numbers for the rest."""
    tiny_controlnet_diffusion().save_pretrained(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"unet lacks \d+ of \d+ tensors of ControlNetModel: contr"
    ):
        ControlNetDiffusion.from_pretrained(tmp_path, controlnet=tmp_path / "unet")


def test_a_model_trained_on_without_its_controlnet_is_a_plain_one(tmp_path):
    module = tiny_controlnet_diffusion()
    module.pipeline_index = {"_class_name": "StableDiffusionPipeline"}
    module.save_pretrained(tmp_path)
    LatentDiffusion.from_pretrained(tmp_path).save_pretrained(tmp_path / "tuned")
    index = diffusers.DiffusionPipeline.load_config(tmp_path / "tuned")
    assert index["_class_name"] == "StableDiffusionPipeline"
    assert index["controlnet"] == [None, None]


def test_the_predictor_does_not_leave_it_out(batch, tmp_path):
    """Images would be those of the locked model, whatever the ControlNet has learnt."""
    module = tiny_controlnet_diffusion()
    fit(module, batch, tmp_path).save_checkpoint(tmp_path / "last.ckpt")
    module.save_pretrained(tmp_path / "model")
    module.pipeline_index = {"_class_name": "StableDiffusionPipeline"}
    module.save_pretrained(tmp_path / "pipeline")
    # As a pipeline of diffusers it is drawn to images, by the pipeline's own call.
    source = open_source(tmp_path / "pipeline", True, torch.device("cpu"), torch.float32)
    assert isinstance(source.part("controlnet"), diffusers.ControlNetModel)
    for path in (tmp_path / "last.ckpt", tmp_path / "model"):
        with pytest.raises(ConfigurationError, match=r"has a ControlNet, which takes an image"):
            open_source(path, True, torch.device("cpu"), torch.float32)
    with pytest.raises(ConfigurationError, match=r"this ControlNetDiffusion has a ControlNet"):
        refuse_module(module)


def test_glyphs_come_with_their_edges():
    data = GlyphDataModule(resolution=32, alphabets=["digits"], batch_size=4, condition="edges")
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert batch["condition"].shape == (4, 3, 32, 32)
    for image, condition in zip(batch["image"], batch["condition"], strict=True):
        assert torch.equal(condition, edges(image))
        assert 0 <= condition.min() < 0.1 < 0.9 < condition.max() <= 1
    assert data.held_back_conditions(2).shape == (2, 3, 32, 32)


def test_edges_lie_between_black_and_white():
    image = torch.full((3, 4, 6), -1.0)
    image[..., 3:] = 1.0
    expected = torch.tensor([0.0, 0.0, 1.0, 1.0, 0.0, 0.0]).expand(3, 4, 6)
    torch.testing.assert_close(edges(image), expected)


def test_an_unknown_condition_is_named():
    with pytest.raises(ConfigurationError, match=r"condition='depth'; choose None or edges"):
        GlyphDataModule(condition="depth")
