"""The recipes of `conf/experiment` for well-known models, on tiny random folders of the same classes."""

import itertools
import json
import re
import shutil
from importlib.resources import files

import diffusers
import hydra
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from diffusers.training_utils import (
    compute_density_for_timestep_sampling,
    compute_loss_weighting_for_sd3,
)
from hydra import compose, initialize_config_module
from PIL import Image

from lightning_diffpipe import Predictor
from lightning_diffpipe.modules import on_paper
from tests.command import call, run, run_on_forks
from tests.profiling.toys import check_known
from tests.rows import row
from tests.zoo.editing import NUM_REFERENCES
from tests.zoo.pipelines import build
from tests.zoo.qwen_processor import Processor, small_references

RECIPES = {
    "sd21": ("StableDiffusionPipeline", ()),
    "sdxl_lora": ("StableDiffusionXLPipeline", ()),
    "sd3_lora": ("StableDiffusion3Pipeline", ("+model.call.max_sequence_length=8",)),
    "flux_lora": ("FluxPipeline", ("model.call.max_sequence_length=8",)),
    "flux_kontext_lora": ("FluxKontextPipeline", ("model.call.max_sequence_length=8",)),
    "qwen_image_edit_lora": (
        "QwenImageEditPlusPipeline",
        ("model.call.max_sequence_length=480", "optimizer=adamw"),
    ),
    "wan_lora": ("WanPipeline", ("model.call.max_sequence_length=8", "data.num_frames=5")),
    "wan_i2v_lora": ("WanImageToVideoPipeline", ("data.num_frames=5",)),
    "cogvideox_i2v_lora": (
        "CogVideoXImageToVideoPipeline",
        ("model.call.max_sequence_length=8", "data.num_frames=5"),
    ),
    "qwen_image_lora": (
        "QwenImagePipeline",
        ("+model.call.max_sequence_length=8", "optimizer=adamw"),  # bitsandbytes may not be there
    ),
    "sd35_finetune": (
        "StableDiffusion3Pipeline",
        ("+model.call.max_sequence_length=8", "optimizer=adamw"),
    ),
    "controlnet": ("StableDiffusionPipeline", ()),
    "from_scratch": (
        "PixArtAlphaPipeline",
        [
            f"model.transformer.{size}"
            for size in (
                "num_layers=2", "num_attention_heads=2", "attention_head_dim=8", "cross_attention_dim=16",
                "caption_channels=16", "sample_size=16",
            )
        ],
    ),
}  # fmt: skip
NOT_PLANNED = {"wan_i2v_lora", "cogvideox_i2v_lora", "qwen_image_edit_lora"}
"""Whose profiles are not published, and those that no model on paper stands for."""
SMALL = (
    "trainer=cpu", "trainer.max_steps=2", "logger=none", "offline=true", "num_threads=1", "data.resolution=32",
    "data.batch_size=4", "data.num_workers=0", "data.validation_share=0",
)  # fmt: skip
DRAWN = (
    "callbacks.samples.every_n_steps=2",
    "callbacks.samples.prompts=[a cat 1]",
    "callbacks.samples.num_inference_steps=2",
)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Eight images with captions."""
    folder = tmp_path_factory.mktemp("images")
    lines = []
    for i in range(8):
        pixels = np.random.default_rng(i).integers(0, 255, (40, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
        lines.append({"file_name": f"{i}.png", "text": f"cat {i}"})
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def videos(folder):
    """Four videos of six frames, as folders."""
    lines = []
    for i in range(4):
        (folder / f"clip{i}").mkdir()
        for frame in range(6):
            pixels = np.full((32, 32, 3), 40 * frame + i, dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"clip{i}" / f"{frame:03}.png")
        lines.append({"file_name": f"clip{i}", "text": f"clip {i}"})
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def edits(folder, images, num_references):
    """The images, each made from others."""
    lines = []
    for line in (images / "metadata.jsonl").read_text().splitlines():
        entry = json.loads(line)
        entry["file_name"] = str(images / entry["file_name"])
        lines.append({**entry, "references": [entry["file_name"]] * num_references})
    folder.mkdir()
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def arguments_of(name, tmp_path, images):
    pipeline, further = RECIPES[name]
    if pipeline in NUM_REFERENCES:
        images = edits(tmp_path / "edits", images, NUM_REFERENCES[pipeline])
    build(pipeline, tmp_path / "parts").save_pretrained(tmp_path / "model")
    saved = "save_lora" if name.endswith("_lora") else "save_to"
    return [
        "train", f"experiment={name}", f"model.path={tmp_path / 'model'}", f"data.folder={images}",
        f"{saved}={tmp_path / 'saved'}", f"hydra.run.dir={tmp_path / 'run'}", *SMALL, *further,
    ]  # fmt: skip


def opens_in_diffusers(name, tmp_path):
    """Opens what a recipe wrote with diffusers alone."""
    if not name.endswith("_lora"):
        return diffusers.DiffusionPipeline.from_pretrained(tmp_path / "saved")
    pipeline = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "model")
    pipeline.load_lora_weights(tmp_path / "saved")
    weights = safetensors.torch.load_file(
        next((tmp_path / "saved").glob("*.safetensors")), device="cpu"
    )
    if name == "wan_lora":  # as ComfyUI maps them, too
        layer = r"(self_attn|cross_attn)\.[qkvo]|ffn\.[02]"
        known = rf"diffusion_model\.blocks\.\d+\.({layer})\.lora_[AB]\.weight"
        assert all(re.fullmatch(known, key) for key in weights)
    raising = [value for key, value in weights.items() if re.search(r"lora(_B|\.up)\.", key)]
    assert any(value.abs().max() > 0 for value in raising)
    return pipeline


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "flux_lora" else [pytest.mark.slow]) for n in RECIPES]
)
def test_a_recipe_trains_a_tiny_model_of_its_classes(name, tmp_path, images, capsys, monkeypatch):
    folder = videos(tmp_path) if "data.num_frames=5" in RECIPES[name][1] else images
    if name == "qwen_image_edit_lora":  # its processor needs no torchvision
        monkeypatch.setattr(
            transformers.ProcessorMixin, "from_pretrained", Processor.from_pretrained
        )
    arguments = arguments_of(name, tmp_path, folder)
    single = ("strategy=single_device", "trainer.devices=1", "callbacks=training")
    with small_references():
        code, out, err = call(capsys, monkeypatch, *arguments, *single)
    assert code == 0, out + err
    assert opens_in_diffusers(name, tmp_path)
    shutil.rmtree(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sd3_lora", "flux_lora"])
def test_the_loss_of_a_recipe_is_that_of_diffusers_script(name, tmp_path):
    """History: SD3 trained at times that were not shifted, and counted noise more than diffusers' script."""
    pipeline, further = RECIPES[name]
    build(pipeline, tmp_path / "parts").save_pretrained(tmp_path / "model")
    config = tmp_path / "model" / "scheduler" / "scheduler_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"shift": 3.0}))
    with initialize_config_module("lightning_diffpipe.conf", version_base="1.3"):
        settings = [f"experiment={name}", f"model.path={tmp_path / 'model'}", *further]
        module = hydra.utils.instantiate(
            compose("train", [*settings, "model.caption_dropout=0"]).model
        )
    given = {}
    predict = module.step.predict

    def noted(noisy, timesteps, *others):
        given.update(
            noisy=noisy, timesteps=timesteps, prediction=predict(noisy, timesteps, *others)
        )
        return given["prediction"]

    module.step.predict = noted
    images = torch.rand(6, 3, 32, 32, generator=torch.Generator().manual_seed(1)) * 2 - 1
    torch.manual_seed(0)
    loss = module.losses({"image": images, "caption": ["a cat"] * 6})["loss"]

    # train_dreambooth_lora_sd3.py and _flux.py, with the settings they have by default
    torch.manual_seed(0)
    vae, scheduler_class = module.vae, diffusers.FlowMatchEulerDiscreteScheduler
    noise_scheduler = scheduler_class.from_pretrained(tmp_path / "model" / "scheduler")
    model_input = vae.encode(images).latent_dist.sample()
    model_input = (model_input - vae.config.shift_factor) * vae.config.scaling_factor
    if name == "sd3_lora":
        # Its normal numbers have the other sign, as it counts from noise.
        u = torch.nn.functional.sigmoid(-torch.normal(mean=0.0, std=1.0, size=(6,)))
    else:
        u = compute_density_for_timestep_sampling("none", 6)
    indices = (u * noise_scheduler.config.num_train_timesteps).long()
    timesteps = noise_scheduler.timesteps[indices]
    sigmas = noise_scheduler.sigmas[indices].reshape(-1, 1, 1, 1)
    noise = torch.randn(model_input.shape)
    noisy_model_input = (1.0 - sigmas) * model_input + sigmas * noise
    assert torch.equal(given["timesteps"], timesteps)
    torch.testing.assert_close(given["noisy"], noisy_model_input)
    model_pred, target = given["prediction"], noise - model_input
    if name == "sd3_lora":  # precondition_outputs
        model_pred, target = model_pred * (-sigmas) + noisy_model_input, model_input
    weighting = compute_loss_weighting_for_sd3("logit_normal", sigmas)
    errors = (weighting.float() * (model_pred.float() - target.float()) ** 2).reshape(6, -1)
    torch.testing.assert_close(loss, torch.mean(errors, 1).mean())
    assert (timesteps.mean() > 600) == (name == "sd3_lora")  # Flux' script does not shift


def every_file_of_adapters(folder):
    """The adapters that a run has written at its end, and those of each step."""
    return {
        path.parent.name: safetensors.torch.load_file(path)
        for path in folder.rglob("*.safetensors")
    }


@pytest.mark.slow
def test_adapters_learn_a_face_that_the_built_in_transformer_has_not_seen(
    tmp_path, capsys, monkeypatch
):
    """History: without callbacks that write a final checkpoint neither was written."""
    small = ("trainer=cpu", "trainer.max_steps=2", "logger=none", "data.batch_size=4")
    single = ("strategy=single_device", "trainer.devices=1", "callbacks=none")
    code, out, err = call(
        capsys,
        monkeypatch,
        *("train", "experiment=glyphs_lora", f"save_to={tmp_path / 'saved'}"),
        *(f"save_lora={tmp_path / 'lora'}", "save_lora_every_n_steps=1"),
        *(f"hydra.run.dir={tmp_path / 'run'}", *small, *single),
    )
    assert code == 0, out + err
    found = every_file_of_adapters(tmp_path / "lora")
    assert found.keys() == {"lora", "step=000001", "step=000002"}
    assert all(torch.equal(found["lora"][key], v) for key, v in found["step=000002"].items())
    assert not all(torch.equal(found["lora"][key], v) for key, v in found["step=000001"].items())
    with Predictor.from_pretrained(tmp_path / "saved", method="single", alone=True) as predictor:
        image = predictor(["digit four, stix italic"], num_inference_steps=1)[0]
    assert image.size == (64, 64)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "run", "profile"),
    [
        ("sdxl_lora", run_on_forks, "flops"),
        row("sdxl_lora", run, "measure"),
        row("qwen_image_lora", run_on_forks, "flops"),
    ],
)
def test_a_recipe_trains_and_draws_on_two_processes(name, run, profile, tmp_path, images):
    """Adapters; those of Flux are trained on two ranks in `distributed/test_adapters.py`."""
    arguments = arguments_of(name, tmp_path, images)
    two = ("trainer.devices=2", "strategy=two_stages", f"strategy.profile={profile}")
    two = (*two, "save_lora_every_n_steps=2")
    done = run(*arguments, *two, *DRAWN, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert opens_in_diffusers(name, tmp_path)
    assert list((tmp_path / "run").rglob("*.png")), "no sample was drawn"
    found = every_file_of_adapters(tmp_path / "saved")
    assert all(torch.equal(v, found["step=000002"][key]) for key, v in found["saved"].items())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        name if name == "from_scratch" else row(name)  # larger ones take seconds to model
        for name in sorted(RECIPES.keys() - NOT_PLANNED)
    ],
)
def test_a_recipe_opens_with_what_the_plan_predicts(name, tmp_path, capsys, monkeypatch):
    found = []

    def modelled(*given):
        found.append(profiled(*given))
        return found[-1]

    profiled = on_paper.modelled
    monkeypatch.setattr(on_paper, "modelled", modelled)
    header = (files("lightning_diffpipe.conf") / "experiment" / f"{name}.yaml").read_text()
    assert "memory:" not in header  # planned for weights of bfloat16, and runs keep float32
    texts = header.split("diffpipe plan ")
    assert len(texts) > 1
    for before, after in itertools.pairwise(texts):
        found.clear()
        command = after.splitlines()[0].split()
        code, out, err = call(capsys, monkeypatch, "plan", *command, f"hydra.run.dir={tmp_path}")
        assert code == 0, out + err
        assert re.findall(r"([\d.]+ m?s) for", before)[-1] == re.search(r"step\s+(.*?),", out)[1]
        settings = {setting.partition("=")[0] for setting in command}
        if settings.isdisjoint(("model.resolution", "model.lora_rank")):
            check_known(found[-1].name.split()[0], found[-1])
