"""The Predictor in one process: against diffusers' own pipelines, and what it refuses."""

import json
import math
import shutil
import threading
from functools import partial

import diffusers
import numpy as np
import pytest
import torch
from diffusers.configuration_utils import register_to_config
from safetensors.torch import load_file, save_file

from lightning_diffpipe import LatentDiffusion
from lightning_diffpipe.errors import CheckpointError, ConfigurationError
from lightning_diffpipe.graph.placement import is_placeholder
from lightning_diffpipe.model_sources import open_source
from lightning_diffpipe.modules.latent_diffusion import as_pil
from lightning_diffpipe.modules.parts import built_in
from lightning_diffpipe.predictor import Predictor
from lightning_diffpipe.sampling.call import Call
from lightning_diffpipe.sampling.skeleton import SafetensorsFolder, load_weights, skeleton
from tests.distributed.stored import store_in_8_bits
from tests.modules.tiny_parts import (
    perturbed_latent_diffusion,
    save_checkpoint,
    save_with_averages,
    tiny_cascade,
    tiny_latent_diffusion,
)
from tests.predictor import tiny_pipelines as tiny
from tests.predictor.scenarios import as_array
from tests.predictor.tiny_pipelines import (
    PIPELINES,
    options_of,
    prompts_of,
    thresholding,
    with_scheduler,
)

SETTINGS = {"num_inference_steps": 3, "guidance_scale": 4.0}


def by_diffusers(path, name, **settings):
    return as_array(tiny.by_diffusers(path, name, **options_of(name), **SETTINGS | settings))


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in ("pixart", "dit") else pytest.mark.slow) for n in PIPELINES],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_process_equals_the_pipeline_bit_for_bit(name, dtype, folder_of):
    """History: PixArt and DiT in bfloat16 were up to 4 of 255 levels off, with their tables of positions cast."""
    expected = by_diffusers(folder_of(name), name, dtype=dtype)
    predictor = Predictor.from_pretrained(folder_of(name), method="single", dtype=dtype)
    found = predictor(prompts_of(name), **SETTINGS, **options_of(name))
    assert (as_array(found) == expected).all()
    assert expected.std() > 5


@pytest.mark.slow
def test_options_of_the_pipeline_are_passed_on(folder_of):
    path, settings = folder_of("stable_diffusion"), options_of("stable_diffusion")
    options = {"negative_prompt": ["bad", "ugly"], "guidance_rescale": 0.5}
    expected = by_diffusers(path, "stable_diffusion", seed=7, **options)
    predictor = Predictor.from_pretrained(path, method="single")
    found = predictor(prompts_of("stable_diffusion"), seed=7, **SETTINGS, **settings, **options)
    assert (as_array(found) == expected).all()


@pytest.mark.slow
def test_one_negative_prompt_is_that_of_all_prompts(folder_of):
    """History: pipelines that want one for each prompt ended in a traceback."""
    settings = SETTINGS | options_of("stable_diffusion")
    predictor = Predictor.from_pretrained(folder_of("stable_diffusion"), method="single")
    found, expected = (
        predictor(prompts_of("stable_diffusion"), negative_prompt=text, **settings)
        for text in ("bad", ["bad", "bad"])
    )
    assert (as_array(found) == as_array(expected)).all()


def test_a_model_of_the_project_takes_texts_only():
    predictor = Predictor.from_module(perturbed_latent_diffusion(), "single")
    with pytest.raises(ConfigurationError, match="prompts of this model are texts"):
        predictor([4])


@pytest.mark.slow
def test_guidance_by_two_calls_a_step(folder_of):
    options = {"negative_prompt": ["bad", "ugly"], "true_cfg_scale": 3.0}
    expected = by_diffusers(folder_of("flux"), "flux", **options)
    predictor = Predictor.from_pretrained(folder_of("flux"), method="pipefusion", num_patches=1)
    found = predictor(prompts_of("flux"), **SETTINGS, **options_of("flux"), **options)
    assert (as_array(found) == expected).all()


@pytest.mark.slow
def test_a_second_request_does_not_know_of_the_first(folder_of):
    path, settings = folder_of("pixart"), SETTINGS | options_of("pixart")
    options = {"method": "pipefusion", "num_patches": 2, "warmup_steps": 0}
    used = Predictor.from_pretrained(path, **options)
    used(["x", "y"], seed=9, **settings)
    fresh = Predictor.from_pretrained(path, **options)
    again, once = (p(prompts_of("pixart"), **settings) for p in (used, fresh))
    assert (as_array(again) == as_array(once)).all()


@pytest.mark.slow
def test_a_training_checkpoint_is_sampled_with_its_averages(tmp_path):
    save_with_averages(tmp_path / "last.ckpt")
    for ema in (True, False):
        whole = LatentDiffusion.from_checkpoint(tmp_path / "last.ckpt", ema=ema)
        generator = torch.Generator().manual_seed(3)
        expected = as_pil(whole.sample(["a", "b"], 3, 4.0, generator))
        predictor = Predictor.from_pretrained(tmp_path / "last.ckpt", "single", ema=ema)
        found = predictor(["a", "b"], num_inference_steps=3, guidance_scale=4.0, seed=3)
        assert (as_array(found) == as_array(expected)).all()
    from_memory = Predictor.from_module(whole, "single")(["a", "b"], 3, 4.0, seed=3)
    assert (as_array(from_memory) == as_array(expected)).all()


@pytest.mark.slow
def test_a_cascade_is_drawn_as_its_own_sample_does(tmp_path):
    """From a folder, a checkpoint and memory; `noise_level` is an argument of the request."""
    module = tiny_cascade()
    module.save_pretrained(tmp_path / "folder")
    save_checkpoint(module, tmp_path / "last.ckpt")
    sources = [Predictor.from_pretrained(tmp_path / n, "single") for n in ("folder", "last.ckpt")]
    sources.append(Predictor.from_module(module, "single"))
    drawn = set()
    for options in ({}, {"noise_level": 0.1}, {"noise_level": 0.9}):
        generator = torch.Generator().manual_seed(3)
        expected = as_array(as_pil(module.sample(["a", "b"], 3, 4.0, generator, **options)))
        drawn.add(expected.tobytes())
        for predictor in sources:
            assert (as_array(predictor(["a", "b"], 3, 4.0, seed=3, **options)) == expected).all()
    assert len(drawn) == 2, "0.1 is the default, and the level counts"
    for options, message in (
        ({"noise_level": 2}, "noise_level must be a number >= 0 and <= 1; got 2"),
        ({"height": 8}, "CascadedDiffusion takes no 'height'; it takes num_inference_steps, guid"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            sources[0](["a"], **options)
    for method in ("pipefusion", "distrifusion"):
        message = (
            f"method={method} shares one denoiser, and a cascade samples with two.*; take single"
        )
        with pytest.raises(ConfigurationError, match=message):
            Predictor.from_pretrained(tmp_path / "folder", method)
        with pytest.raises(ConfigurationError, match=message):
            Predictor.from_module(module, method)
        # Whatever pipeline it is, and where `auto` tries the method.
        sources[0]._sample = partial(Call.refuse_steps, method=method)
        with pytest.raises(
            ConfigurationError, match=rf"\(3, 4, 4\) and then \(12, 4, 4\).*{method}"
        ):
            sources[0](["a"], 2)


def test_a_pipeline_in_memory_is_refused_with_the_way_to_open_it():
    with pytest.raises(
        ConfigurationError, match=r"CascadedDiffusion; got a Linear.*from_pretrained\(path\)"
    ):
        Predictor.from_module(torch.nn.Linear(1, 1), "single")


def test_a_checkpoint_of_a_self_conditioned_model_is_refused_with_its_reason(tmp_path):
    """History: its first step ended in a convolution that got half of its channels."""
    module = tiny_latent_diffusion("unet", in_channels=8, self_conditioning=0.5)
    save_checkpoint(module, tmp_path / "last.ckpt")
    with pytest.raises(ConfigurationError, match=r"last\.ckpt also takes its own estimate"):
        Predictor.from_pretrained(tmp_path / "last.ckpt", "single")


BAD = [
    ("stable_diffusion", {}, {"prompts": "a cat"}, "prompts must be a list with at least one"),
    ("stable_diffusion", {}, {"prompts": np.array(["a", "b"])}, "prompts must be a list"),
    ("stable_diffusion", {}, {"seed": [1, 2]}, "seed must be a whole number .*; got .1, 2."),
    ("stable_diffusion", {}, {"seed": 2**64}, "seed must be a whole number >= -"),
    ("stable_diffusion", {}, {"num_images_per_prompt": 0}, "num_images_per_prompt must be a whole number >= 1"),
    ("stable_diffusion", {}, {"on_step": True}, "on_step must be a function of two numbers; got True"),
    ("pixart", {}, {"negative_prompt": ["x"]}, "negative_prompt has 1 texts for 2 prompts"),
    ("sdxl", {}, {"negative_prompt_2": ["x"] * 3}, "negative_prompt_2 has 3 texts for 2 prompts"),
    ("stable_diffusion", {}, {"negativ_prompt": ["x"]}, "takes no 'negativ_prompt'; it takes prompt,"),
    ("stable_diffusion", {}, {"return_dict": False}, "return_dict cannot be given"),
    ("stable_diffusion", {"num_patches": "2"}, {}, "num_patches must be a whole number >= 1; got '2'"),
    ("stable_diffusion", {"parallel": 0}, {}, "parallel must be a whole number >= 1; got 0"),
    ("stable_diffusion", {}, {"num_inference_steps": 2.5}, "must be a whole number >= 1; got 2.5"),
    ("stable_diffusion", {"nonsense": 1}, {}, "takes no 'nonsense'; it takes axis, hide_unseen,"),
    ("stable_diffusion", {"method": "distrifusion", "num_patches": 2}, {}, "has no patches, leave it"),
    ("stable_diffusion", {}, {"prompt": "x"}, "prompt cannot be given; use prompts instead"),
    ("stable_diffusion", {}, {"negative_prompt": 3}, "`negative_prompt` should be the same type"),
    ("wan", {}, {"prompts": ["a", 4]}, "prompts of this model are texts, in quotes; got 4"),
    ("dit", {}, {"prompts": ["a"]}, "a class, must be a whole number >= 0; got 'a'"),
    ("pixart", {"num_patches": 99}, {}, "num_patches=99, but the latents have 16 rows"),
    ("pixart", {"num_patches": 2}, {"height": 33}, "have to be divisible by 8"),
    ("stable_diffusion", {}, {"guidance_scale": float("nan")}, "guidance_scale must be a number; got nan"),
    ("sdxl", {}, {"guidance_rescale": float("inf")}, "guidance_rescale must be a number"),
    ("stable_diffusion", {}, {"height": 10**6}, "height must be a whole number >= 1 and <= 65535; got 1000000"),
    ("stable_diffusion", {}, {"height": -8}, "height must be a whole number .*; got -8"),
    ("dit", {"text_encoder_3": None}, {}, "text_encoder_3=None, but the DiTPipeline at .* it has"),
    ("pixart", {"warmup_threshold": "soon"}, {}, "warmup_threshold must be a number >= 0; got 'soon'"),
    ("pixart", {"warmup_microbatches": 0}, {}, "warmup_microbatches must be a whole number >= 1; got 0"),
    ("pixart", {"method": "single"}, {"num_inference_steps": 1}, "ends in IndexError before anything is denoised"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options", "changes", "message"), BAD)
def test_bad_input_is_refused_with_its_remedy(name, options, changes, message, folder_of):
    settings = {"prompts": prompts_of(name)} | SETTINGS | options_of(name) | changes
    with pytest.raises(ConfigurationError, match=message):
        Predictor.from_pretrained(folder_of(name), **options)(**settings)


IMPOSSIBLE = [
    ({"method": "nonsense"}, "method='nonsense'; choose pipefusion, distrifusion, .* or auto"),
    (
        {"method": "single", "torch_dtype": torch.bfloat16},
        "no 'torch_dtype'; it takes none of its own",
    ),
    ({"method": "single", "colour": 1}, "no 'colour'; it takes none of its own"),
    ({"num_patch": 4}, "method=pipefusion takes no 'num_patch'; it takes axis, "),
    ({"sequence_mode": "rnig"}, "sequence_mode='rnig'; choose ulysses or ring"),
    ({"method": "distrifusion", "group_norm": "none"}, "group_norm='none'; choose"),
    ({"guidance": 2}, "cannot use 1 ranks as guidance=2"),
    ({"method": "auto", "guidance": 2}, "1 ranks cannot be divided as guidance=2; choose sizes"),
    ({"method": "auto", "sequence_mode": "rnig"}, "sequence_mode='rnig'; choose"),
    ({"method": "auto", "verfy": False}, "method=auto takes no 'verfy'; it takes axis, "),
    (
        {"method": "auto", "group_norm": "own", "hide_unseen": True},
        "group_norm and hide_unseen tog",
    ),
]


@pytest.mark.parametrize(("options", "message"), IMPOSSIBLE)
def test_what_cannot_work_is_refused_before_a_model_is_looked_for(options, message, tmp_path):
    """History: the first request said so, after the model was loaded: torch_dtype= opened it in float32."""
    with pytest.raises(ConfigurationError, match=message):
        Predictor.from_pretrained(tmp_path / "nowhere", **options)
    with pytest.raises(ConfigurationError, match=message):
        Predictor.from_module(perturbed_latent_diffusion(), **options)


@pytest.mark.parametrize("by_argument", [True, False])
def test_stable_diffusion_3_draws_without_its_largest_text_encoder(
    by_argument, folder_of, tmp_path
):
    """History: neither way to leave it out could be opened."""
    path, without = folder_of("sd3"), {"text_encoder_3": None, "tokenizer_3": None}
    pipeline = diffusers.DiffusionPipeline.from_pretrained(str(path), **without)
    if not by_argument:
        path, without = tmp_path / "without", {}
        pipeline.save_pretrained(path)
        assert not (path / "text_encoder_3").exists()
    settings = SETTINGS | options_of("sd3")
    generator = torch.Generator().manual_seed(0)
    expected = pipeline(prompts_of("sd3"), generator=generator, **settings).images
    found = Predictor.from_pretrained(path, "single", **without)(prompts_of("sd3"), **settings)
    assert (as_array(found) == as_array(expected)).all()


def with_half(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def with_one_tensor_less(file):
    tensors = load_file(file)
    tensors.pop(next(iter(tensors)))
    save_file(tensors, file, {"format": "pt"})


def with_one_tensor_more(file):
    save_file(load_file(file) | {"block.9.weight": torch.zeros(3)}, file, {"format": "pt"})


@pytest.mark.parametrize(
    ("part", "break_it", "message"),
    [
        ("text_encoder", with_half, "cannot read the T5EncoderModel in .*text_encoder"),
        ("text_encoder", with_one_tensor_less, "text_encoder lacks 1 of .* tensors of T5Encoder"),
        ("vae", with_half, "cannot read the AutoencoderKL in .*vae"),
        ("vae", with_one_tensor_less, "vae lacks 1 of .* tensors of AutoencoderKL"),
        ("vae", with_one_tensor_more, "vae has 1 tensors that the config of AutoencoderKL does"),
        ("transformer", with_one_tensor_more, "has 1 tensors that the config .*: block.9.weight"),
    ],
)
def test_a_broken_part_is_named(part, break_it, message, folder_of, tmp_path):
    """History: what a text encoder lacked was random, and what it could not read an error of safetensors."""
    path = shutil.copytree(folder_of("pixart"), tmp_path / "broken")
    [file] = (path / part).glob("*.safetensors")
    break_it(file)
    with pytest.raises(CheckpointError, match=message):
        Predictor.from_pretrained(path)


@pytest.mark.slow
def test_schedulers_that_look_at_all_rows_are_refused_by_name(folder_of, tmp_path):
    path = with_scheduler(folder_of("pixart"), tmp_path / "thresholding", thresholding())
    predictor = Predictor.from_pretrained(path, num_patches=2)
    with pytest.raises(ConfigurationError, match="DDIMScheduler"):
        predictor(prompts_of("pixart"), **SETTINGS, **options_of("pixart"))


@pytest.mark.parametrize("kind", ["learned", "learned_range"])
def test_a_variance_that_no_pipeline_passes_on_is_named(kind, folder_of, tmp_path):
    """History: TypeError, unsupported operand types; in the middle of a request, after which ranks connect anew."""
    scheduler = diffusers.DDPMScheduler(variance_type=kind, clip_sample=False)
    path = with_scheduler(folder_of("dit"), tmp_path / kind, scheduler)
    for options in ({"method": "single"}, {"num_patches": 2}):
        with pytest.raises(ConfigurationError, match=f"{kind} takes a variance .*=fixed_small"):
            Predictor.from_pretrained(path, **options)(prompts_of("dit"), **SETTINGS)


def test_settings_of_another_scheduler_do_not_count(folder_of, tmp_path):
    """History: diffusers keeps them in the config, and Euler, which takes no variance, was refused for them."""
    trained = diffusers.DDPMScheduler(variance_type="learned_range")
    scheduler = diffusers.EulerDiscreteScheduler.from_config(trained.config)
    path = with_scheduler(folder_of("dit"), tmp_path / "euler", scheduler)
    found = Predictor.from_pretrained(path, num_patches=2)(prompts_of("dit"), **SETTINGS)
    assert len(found) == len(prompts_of("dit"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"transformer": ["diffusers", "NoSuchModel"]}, "diffusers.NoSuchModel, not a model of"),
        ({"transformer": None}, "has no transformer and no unet, so nothing"),
        (None, "model_index.json is no JSON"),
    ],
)
def test_what_is_wrong_with_a_folder_is_named(changes, message, folder_of, tmp_path):
    index = json.loads((folder_of("pixart") / "model_index.json").read_text()) | (changes or {})
    index = {name: value for name, value in index.items() if value is not None}
    text = "{" if changes is None else json.dumps(index)
    (tmp_path / "model_index.json").write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        Predictor.from_pretrained(tmp_path)


@pytest.mark.parametrize("leads", [True, False])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vae": [None, None]}, "has no 'vae', which LatentDiffusion needs"),
        ({"unet": ["diffusers", "NoSuchModel"]}, "diffusers.NoSuchModel, which this version"),
    ],
)
def test_what_is_wrong_with_a_folder_of_the_project_is_named(changes, message, leads, tmp_path):
    """History: an AttributeError, and ranks that do not lead, and the command, ended in a KeyError."""
    tiny_latent_diffusion("unet").save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    (tmp_path / "model_index.json").write_text(json.dumps(index | changes))
    with pytest.raises(ConfigurationError, match=message):
        open_source(tmp_path, leads, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("is_pipeline", [True, False])
def test_hub_ids_on_this_machine(is_pipeline, folder_of, tmp_path, monkeypatch):
    """History: one of something else, such as a text model, ended in a FileNotFoundError."""
    if not is_pipeline:
        (tmp_path / "config.json").write_text("{}")
    snapshot = folder_of("dit") if is_pipeline else tmp_path
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *a, **options: str(snapshot))
    if is_pipeline:
        assert Predictor.from_pretrained("me/it", "single").source.name == "transformer"
        return
    with pytest.raises(ConfigurationError, match="'me/it' is neither a folder with a model_index"):
        Predictor.from_pretrained("me/it", "single")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "gpu0"}, "device='gpu0'; choose cpu or cuda"),
        ({"dtype": "fp8"}, "dtype='fp8'; choose bfloat16, float16, float32 or float64"),
        ({"dtype": torch.float8_e4m3fn}, "dtype=torch.float8_e4m3fn; choose bfloat16"),
        ({"timeout_s": 0}, "timeout_s must be a number > 0 and <= 100000000; got 0"),
        ({"timeout_s": -2.0}, "timeout_s must be a number > 0 and <= 100000000; got -2.0"),
        ({"timeout_s": math.inf}, "timeout_s must be a number > 0 and <= 100000000; got inf"),
        ({"timeout_s": 1e30}, r"timeout_s must be a number > 0 and <= 100000000; got 1e\+30"),
        ({"timeout_s": "long"}, "timeout_s must be a number > 0 and <= 100000000; got 'long'"),
    ],
)
def test_devices_types_and_times_that_do_not_exist_are_refused(options, message, folder_of):
    with pytest.raises(ConfigurationError, match=message):
        Predictor.from_pretrained(folder_of("pixart"), **options)


@pytest.mark.slow
@pytest.mark.parametrize("shard", [None, "20KB"])
def test_a_folder_with_files_of_a_variant_only(shard, folder_of, tmp_path):
    """History: it could not be opened, with the advice to write safetensors, which it has."""
    path, options = tmp_path / "fp16", {} if shard is None else {"max_shard_size": shard}
    pipeline = diffusers.DiffusionPipeline.from_pretrained(str(folder_of("pixart")))
    pipeline.save_pretrained(path, variant="fp16", **options)
    indices = list((path / "transformer").glob("*.index.*"))
    assert len(indices) == (shard is not None)
    with pytest.raises(CheckpointError, match="has other variants: take variant='fp16'"):
        Predictor.from_pretrained(path)
    with pytest.raises(CheckpointError, match="files without a variant: leave variant out"):
        Predictor.from_pretrained(folder_of("pixart"), variant="fp16")
    if shard is not None:
        (whole := tmp_path / "no_index").mkdir()
        pipeline.transformer.save_pretrained(whole, **options)
        next(whole.glob("*.index.json")).unlink()
        with pytest.raises(CheckpointError, match="not their index: copy the folder again"):
            SafetensorsFolder(whole)
        index = whole / "diffusion_pytorch_model.safetensors.index.json"
        for text in ("", "{}"):
            index.write_text(text)
            with pytest.raises(CheckpointError, match=r"cannot read the index .* Copy it again"):
                SafetensorsFolder(whole)
    settings = SETTINGS | options_of("pixart")
    found = Predictor.from_pretrained(path, "single", variant="fp16")(["a", "b"], **settings)
    expected = Predictor.from_pretrained(folder_of("pixart"), "single")(["a", "b"], **settings)
    assert (as_array(found) == as_array(expected)).all()
    for index in indices:  # as older releases wrote it
        index.rename(index.with_name("diffusion_pytorch_model.safetensors.fp16.index.json"))
    SafetensorsFolder(path / "transformer", "fp16")


def test_models_of_the_project_have_no_variants(tmp_path):
    with pytest.raises(ConfigurationError, match="variant='fp16' is of diffusers folders"):
        Predictor.from_pretrained(built_in("glyphs"), variant="fp16")
    (tmp_path / "last.ckpt").write_bytes(b"something")
    with pytest.raises(ConfigurationError, match="variant='fp16' is of diffusers folders"):
        Predictor.from_pretrained(tmp_path / "last.ckpt", variant="fp16")


def test_missing_weights_are_named(folder_of, tmp_path):
    path = shutil.copytree(folder_of("pixart"), tmp_path / "broken")
    file = path / "transformer" / "diffusion_pytorch_model.safetensors"
    kept = dict(list(load_file(file).items())[3:])
    save_file(kept, file)
    with pytest.raises(
        CheckpointError, match=r"lacks 3 of \d+ tensors of PixArtTransformer2DModel"
    ):
        Predictor.from_pretrained(path)
    file.unlink()
    with pytest.raises(CheckpointError, match="has neither diffusion_pytorch_model"):
        Predictor.from_pretrained(path)
    save_file({}, file)
    (path / "transformer" / "config.json").unlink()
    with pytest.raises(ConfigurationError, match="cannot read the config of the PixArt"):
        Predictor.from_pretrained(path)


def test_a_model_changed_before_its_weights_are_read_is_not_blamed_on_its_folder(folder_of):
    predictor = Predictor.from_pretrained(folder_of("stable_diffusion"), method="single")
    predictor.source.denoiser.fuse_qkv_projections()
    said = r"UNet2DConditionModel has \d+ tensors.*weights are read at the first request.*leave that out"
    with pytest.raises(ConfigurationError, match=said):
        predictor(prompts_of("stable_diffusion"), **options_of("stable_diffusion"), **SETTINGS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_skeleton_takes_no_memory_and_reads_by_name(dtype, folder_of):
    folder = folder_of("pixart") / "transformer"
    cls = diffusers.PixArtTransformer2DModel
    model = skeleton(cls, cls.load_config(folder), torch.device("cpu"), dtype)
    assert torch.get_default_dtype() == torch.float32
    assert all(map(is_placeholder, model.parameters()))
    name = "transformer_blocks.1.attn1.to_q.weight"
    load_weights(model, SafetensorsFolder(folder), {name})
    whole = cls.from_pretrained(folder, dtype=dtype)
    # History: none asked for gradients, torch took other kernels, and some U-Nets differed by 1e-6 to 2e-5.
    asking = {n: p.requires_grad for n, p in whole.named_parameters()}
    assert {n: p.requires_grad for n, p in model.named_parameters()} == asking
    there = {n for n, p in model.named_parameters() if not is_placeholder(p)}
    assert there == {name}
    assert model.get_parameter(name).equal(whole.get_parameter(name))
    for key, buffer in whole.named_buffers():
        assert model.get_buffer(key).equal(buffer), key
        assert model.get_buffer(key).dtype == buffer.dtype, key


def test_buffers_are_of_the_types_diffusers_gives_them():
    """Made by the model in a type of its own, or in the default one; stored, or not; kept in float32."""
    cls, own = WithBuffers, {"made": torch.float32, "by_default": torch.bfloat16}
    model = skeleton(cls, {}, torch.device("cpu"), torch.bfloat16)
    expected = own | {"stored": torch.bfloat16, "counter": torch.int64, "careful": torch.float32}
    assert {name: buffer.dtype for name, buffer in model.named_buffers()} == expected


MADE_MEANWHILE = []


class Meanwhile(diffusers.ModelMixin, diffusers.ConfigMixin):
    """While it is made, another thread makes a layer."""

    config_name = "config.json"

    @register_to_config
    def __init__(self):
        super().__init__()
        self.own = torch.nn.Linear(2, 2)
        thread = threading.Thread(target=lambda: MADE_MEANWHILE.append(torch.nn.Linear(2, 2)))
        thread.start()
        thread.join()


def test_what_other_threads_make_has_memory():
    """History: their layers lost their weights, without a word."""
    register = torch.nn.Module.register_parameter
    model = skeleton(Meanwhile, {}, torch.device("cpu"), torch.float32)
    assert all(map(is_placeholder, model.parameters()))
    assert not any(p.is_meta for p in MADE_MEANWHILE.pop().parameters())
    assert torch.nn.Module.register_parameter is register


class WithBuffers(diffusers.ModelMixin, diffusers.ConfigMixin):
    """One of each kind."""

    config_name = "config.json"
    _keep_in_fp32_modules = ("careful",)

    @register_to_config
    def __init__(self):
        super().__init__()
        self.register_buffer("made", torch.ones(2, dtype=torch.float32), persistent=False)
        self.register_buffer("by_default", torch.linspace(0, 1, 3), persistent=False)
        self.register_buffer("stored", torch.ones(2, dtype=torch.float32))
        self.register_buffer("counter", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("careful", torch.ones(2))


def test_quantized_weights_whose_config_does_not_say_so_are_refused(folder_of, tmp_path):
    """History: integers of -127 to 127 were taken for weights, and noise was drawn without a word."""
    path = shutil.copytree(folder_of("pixart"), tmp_path / "quantized")
    store_in_8_bits(path / "transformer", says_so=False)
    says = r"attn1.to_k.SCB, .* or are its weights quantized \(SCB, absmax"
    with pytest.raises(CheckpointError, match=says):
        Predictor.from_pretrained(path, method="single")


@pytest.mark.slow
def test_the_built_in_model_settles_on_its_way():
    """Its prediction never did: under guidance it changes by a quarter at the start, and by a third at the end."""
    with Predictor.from_pretrained(
        built_in("glyphs"), method="distrifusion", warmup_steps="auto", alone=True
    ) as predictor:
        predictor(["digit four, sans"], num_inference_steps=20, guidance_scale=4.0)
        assert 1 < predictor.report.warmup_steps < 15


def test_what_a_pipeline_refuses_is_said_without_the_numbers_of_tensors(folder_of):
    """History: a page of them stood before what to do."""
    given = {"prompt_embeds": torch.zeros(1, 12, 16), "num_inference_steps": 1}
    message = r"`prompt_embeds`: tensor\(\.\.\.\)\. Please make sure to only forward one of the two"
    with (
        Predictor.from_pretrained(folder_of("stable_diffusion"), "single") as predictor,
        pytest.raises(ConfigurationError, match=message),
    ):
        predictor(["a"], **given)
