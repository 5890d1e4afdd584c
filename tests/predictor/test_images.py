"""Pipelines that are given an image beside the noise: their denoisers predict fewer channels than they are given.

Also schedulers that are stepped with other arguments, and what is missing: packages, classes, folders.
"""

import functools
import inspect
import json
import shutil

import diffusers
import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.predictor import Predictor
from lightning_diffpipe.sampling.methods import MethodOptions
from tests.predictor import tiny_pipelines as tiny
from tests.zoo.case import perturb, silence
from tests.zoo.pipelines import PIPELINES, build
from tests.zoo.sample_pipelines import as_tensor, close, drawn_by_two

SETTINGS = {"num_inference_steps": 3, "output_type": "latent", "height": 32, "width": 32}
WORDS = {"prompt": ["a cat", "dog b"], "guidance_scale": 3.0, "max_sequence_length": 8}


def parts_of(name, folder, **changes):
    """Parts of a pipeline of the zoo, with another denoiser."""
    parts = dict(build(name, folder).components)
    for part, options in changes.items():
        parts[part] = type(parts[part])(**{**parts[part].config, **options})
        perturb(parts[part], torch.Generator().manual_seed(3))
    return parts


def flux_control(folder):
    parts = parts_of("FluxPipeline", folder, transformer={"in_channels": 32, "out_channels": 16})
    parts |= {"image_encoder": None, "feature_extractor": None}
    names = (
        "scheduler", "vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "transformer",
    )  # fmt: skip
    pipeline = diffusers.FluxControlPipeline(**{name: parts[name] for name in names})
    return pipeline, WORDS | {"control_image": tiny.random_image()}


def flux_fill(folder):
    parts = parts_of("FluxPipeline", folder, transformer={"in_channels": 48, "out_channels": 16})
    names = (
        "scheduler", "vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "transformer",
    )  # fmt: skip
    pipeline = diffusers.FluxFillPipeline(**{name: parts[name] for name in names})
    mask = Image.fromarray(np.tile(np.uint8([0, 255]), (32, 16)))
    return pipeline, WORDS | {"image": tiny.random_image(), "mask_image": mask}


def cogvideox_dpm(folder):
    """Its scheduler's step is given what it has predicted a step before, as second argument."""
    scheduler = diffusers.CogVideoXDPMScheduler()
    parts = parts_of("CogVideoXPipeline", folder) | {"scheduler": scheduler}
    return diffusers.CogVideoXPipeline(**parts), WORDS | {"num_frames": 5}


def svd(folder):
    """Draws from an image alone; channels of its denoiser are the third axis."""
    blocks = {"down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
              "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal")}  # fmt: skip
    unet = diffusers.UNetSpatioTemporalConditionModel(
        block_out_channels=(32, 64), layers_per_block=1, in_channels=8, out_channels=4, num_attention_heads=2,
        cross_attention_dim=16, projection_class_embeddings_input_dim=24, addition_time_embed_dim=8, num_frames=3,
        **blocks,
    )  # fmt: skip
    perturb(unet, torch.Generator().manual_seed(3))
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, projection_dim=16, num_hidden_layers=1, num_attention_heads=2, image_size=224,
        intermediate_size=16, patch_size=56,
    )  # fmt: skip
    pipeline = diffusers.StableVideoDiffusionPipeline(
        vae=diffusers.AutoencoderKLTemporalDecoder(
            block_out_channels=(32, 32), down_block_types=("DownEncoderBlock2D",) * 2
        ),
        unet=unet,
        feature_extractor=transformers.CLIPImageProcessor(),
        image_encoder=transformers.CLIPVisionModelWithProjection(vision),
        scheduler=diffusers.EulerDiscreteScheduler(prediction_type="v_prediction"),
    )
    return pipeline, {"image": tiny.random_image(), "num_frames": 3}


FAMILIES = {each.__name__: each for each in (flux_control, flux_fill, cogvideox_dpm, svd)}


@pytest.fixture
def saved(tmp_path):
    def save(family):
        torch.manual_seed(0)
        pipeline, options = FAMILIES[family](tmp_path / "words")
        for part in pipeline.components.values():
            if isinstance(part, torch.nn.Module):
                silence(part.eval())
        pipeline.save_pretrained(tmp_path / "saved")
        takes = inspect.signature(type(pipeline).__call__).parameters
        options = {n: v for n, v in options.items() if n in takes}
        plain = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "saved")
        plain.set_progress_bar_config(disable=True)
        torch.manual_seed(0)  # some encode an image with noise of the default generator
        expected = plain(**options, **SETTINGS, generator=torch.Generator().manual_seed(0))[0]
        prompts = options.pop("prompt", None)
        return tmp_path / "saved", {"prompts": prompts, **options, **SETTINGS}, expected

    return save


@pytest.mark.parametrize(
    "family",
    [
        f if f == "svd" else pytest.param(f, marks=[pytest.mark.slow, pytest.mark.table])
        for f in FAMILIES
    ],
)
def test_one_process_and_two_ranks_draw_what_diffusers_draws(family, saved):
    """History: a stand-in predicted as many channels as it was given, and no pipeline of these could be sampled."""
    path, request, expected = saved(family)
    torch.manual_seed(0)
    found = Predictor.from_pretrained(path, "single", alone=True)(**request)
    assert torch.equal(found, expected)
    ways = [MethodOptions("single", data=2)]
    if family in ("cogvideox", "cogvideox_dpm", "ltx", "svd"):
        ways.append(MethodOptions("single", guidance=2, data=1))
    for options in ways:
        torch.manual_seed(0)
        [found] = drawn_by_two(path, options, [request])
        assert close(as_tensor(found), as_tensor(expected)), options


def test_a_scheduler_of_another_step_is_refused_in_patches_by_name(saved):
    path, request, _ = saved("cogvideox_dpm")
    with pytest.raises(ConfigurationError, match="CogVideoXDPMScheduler"):
        drawn_by_two(path, MethodOptions("pipefusion", num_patches=2), [request])


# ------------------------------------------------------------------------------------ what is missing


class Mine(diffusers.StableDiffusionPipeline):
    """A pipeline of one's own."""


@pytest.fixture(scope="module")
def stable_diffusion(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stable_diffusion")
    tiny.build("stable_diffusion", folder / "words").save_pretrained(folder / "saved")
    return folder / "saved"


@pytest.mark.slow
@pytest.mark.parametrize("has_code", [False, True])
def test_a_class_of_ones_own_is_given_as_itself(has_code, stable_diffusion, tmp_path):
    """History: the class ended in a TypeError, and so did a folder that names a file and a class in it."""
    path = tmp_path / "model"
    shutil.copytree(stable_diffusion, path)
    index = json.loads((path / "model_index.json").read_text())
    index["_class_name"] = ["mine", "Mine"]
    (path / "model_index.json").write_text(json.dumps(index))
    if has_code:
        (path / "mine.py").write_text("raise RuntimeError('code of a folder')")
    with pytest.raises(
        ConfigurationError, match=r"Mine of its own mine.py, .* pipeline_class=CLASS"
    ):
        Predictor.from_pretrained(path, "single", alone=True)
    for folder in (path, stable_diffusion):
        predictor = Predictor.from_pretrained(folder, "single", alone=True, pipeline_class=Mine)
        assert type(predictor.source._pipeline) is Mine
        found = predictor(["a cat"], num_inference_steps=2, output_type="latent")
        assert found.std() > 0.01


class OfOneText(diffusers.StableDiffusionPipeline):
    """Says that it takes lists, and refuses them, as Wan's VACE does."""

    @functools.wraps(diffusers.StableDiffusionPipeline.__call__)
    def __call__(self, prompt=None, **options):
        if not isinstance(prompt, str):
            raise ValueError("Passing a list of prompts is not yet supported")
        return super().__call__(prompt, **options)


def test_a_pipeline_that_refuses_lists_draws_one_prompt(stable_diffusion):
    """History: it could not be drawn at all."""
    options = {"num_inference_steps": 2, "output_type": "latent", "negative_prompt": "b"}
    found, expected = (
        Predictor.from_pretrained(stable_diffusion, "single", alone=True, pipeline_class=cls)(
            ["a cat"], **options
        )
        for cls in (OfOneText, Mine)
    )
    assert torch.equal(found, expected)
    predictor = Predictor.from_pretrained(stable_diffusion, alone=True, pipeline_class=OfOneText)
    with pytest.raises(ConfigurationError, match="a list of prompts is not yet supported"):
        predictor(["a cat", "dog b"], **options)


def test_a_class_that_is_no_pipeline_is_refused(stable_diffusion):
    with pytest.raises(
        ConfigurationError, match=r"pipeline_class=<class 'int'> is no pipeline of diffusers"
    ):
        Predictor.from_pretrained(stable_diffusion, "single", alone=True, pipeline_class=int)


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    """History: a NameError of diffusers, which leaves names of optional packages undefined."""
    build("SkyReelsV2Pipeline", tmp_path / "words").save_pretrained(tmp_path / "saved")
    module = __import__(diffusers.SkyReelsV2Pipeline.__module__, fromlist=["x"])
    monkeypatch.delattr(module, "ftfy")
    predictor = Predictor.from_pretrained(tmp_path / "saved", "single", alone=True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ConfigurationError, match=r"SkyReelsV2Pipeline needs the package ftfy.*: pip install ftfy$"
    ):
        predictor(["a cat"], num_inference_steps=2, **PIPELINES["SkyReelsV2Pipeline"].call)


def test_a_single_file_is_named_with_what_to_do(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"")
    with pytest.raises(ConfigurationError, match=r"from_single_file\(.*save_pretrained\(FOLDER\)"):
        Predictor.from_pretrained(path, "single", alone=True)


def test_prompts_are_asked_for_where_a_model_needs_them(stable_diffusion):
    predictor = Predictor.from_pretrained(stable_diffusion, "single", alone=True)
    with pytest.raises(ConfigurationError, match="prompts must be a list with at least one"):
        predictor(None)
    with pytest.raises(ConfigurationError, match="Provide either `prompt` or `prompt_embeds`"):
        predictor(None, num_images_per_prompt=2)
