"""The Predictor draws with LoRA files, several and scaled, as diffusers does."""

import re
import shutil

import diffusers
import huggingface_hub
import numpy as np
import peft
import pytest
import safetensors.torch
import torch
from PIL import Image
from torch import nn

from lightning_diffpipe import LatentDiffusion, Predictor
from lightning_diffpipe.errors import CheckpointError, ConfigurationError
from lightning_diffpipe.modules import Lora, PipelineDiffusion
from lightning_diffpipe.modules.adapters import LORA_FILE
from lightning_diffpipe.modules.latent_diffusion import as_pil
from lightning_diffpipe.sampling import adapters
from lightning_diffpipe.sampling.adapters import AdaptedWeights
from lightning_diffpipe.sampling.skeleton import SafetensorsFolder, skeleton
from tests.command import call
from tests.modules.tiny_parts import save_checkpoint, tiny_latent_diffusion
from tests.predictor import tiny_pipelines as tiny
from tests.predictor.scenarios import failure_of_each_rank
from tests.ranks import run_ranks
from tests.rows import row

CPU = torch.device("cpu")
SCALES = {"first": 0.8, "second": -0.5}


def save_lora(name, folder, seed, of_text=True, **options):
    """Adapters that change images much, as training writes them."""
    module = PipelineDiffusion(
        tiny.build(name, folder / "parts"), lora=Lora(**options), train_text_encoder=of_text
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in module.named_parameters():
            if ".lora_" in key:
                parameter.normal_(std=0.3, generator=generator)
    module.save_lora(folder)
    return folder


@pytest.fixture
def saved(request, tmp_path):
    """A pipeline, and two LoRA files whose outputs are scaled by 3 and by 1, of text encoders, too."""
    name = request.param
    tiny.build(name, tmp_path / "parts").save_pretrained(tmp_path / "model")
    targets = ["to_q", "to_out.0", "q_proj"]
    save_lora(name, tmp_path / "first", 1, rank=2, alpha=6, targets=targets)
    save_lora(name, tmp_path / "second", 2, rank=3, targets=targets)
    return name, tmp_path


def pixels(image):
    return np.asarray(image, dtype=float)


@pytest.mark.slow
@pytest.mark.parametrize("saved", ["sdxl", "stable_diffusion"], indirect=True)
def test_several_loras_are_scaled_and_added_as_in_diffusers(saved):
    name, folder = saved
    options = {"num_inference_steps": 2, **tiny.options_of(name)}
    plain = diffusers.DiffusionPipeline.from_pretrained(folder / "model")
    plain.set_progress_bar_config(disable=True)
    draw = lambda: plain(["a cat 1"], generator=torch.Generator().manual_seed(0), **options).images[
        0
    ]
    without = draw()
    for file in SCALES:
        plain.load_lora_weights(folder / file, adapter_name=file)
    plain.set_adapters(list(SCALES), list(SCALES.values()))
    loras = {folder / file: scale for file, scale in SCALES.items()}
    with Predictor.from_pretrained(
        folder / "model", method="single", loras=loras, alone=True
    ) as predictor:
        got = predictor(["a cat 1"], **options)[0]
    assert abs(pixels(got) - pixels(draw())).max() <= 1
    assert abs(pixels(got) - pixels(without)).max() > 8


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["both", row("low")])
def test_files_of_both_experts_are_added(experts, tmp_path):
    """History: the file of the second one was left out, without a word."""
    tiny.build("wan_experts", tmp_path / "parts").save_pretrained(tmp_path / "model")
    save_lora("wan_experts", tmp_path / "lora", 1, False, rank=2, targets=["to_q", "to_out.0"])
    if experts == "low":
        (tmp_path / "lora" / LORA_FILE).unlink()
    options = {"num_inference_steps": 4, **tiny.options_of("wan_experts"), "output_type": "pt"}
    plain = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "model")
    plain.set_progress_bar_config(disable=True)
    draw = lambda: plain(["a cat 1"], generator=torch.Generator().manual_seed(0), **options).frames
    if experts == "both":
        plain.load_lora_weights(tmp_path / "lora", adapter_name="first")
        plain.set_adapters("first", 0.8)
    with_first = draw()
    second = {"adapter_name": "second", "load_into_transformer_2": True}
    plain.load_lora_weights(tmp_path / "lora" / "transformer_2", **second)
    plain.transformer_2.set_adapters("second", 0.8)
    loras = {tmp_path / "lora": 0.8}
    with Predictor.from_pretrained(tmp_path / "model", "single", loras=loras, alone=True) as ours:
        drawn = torch.stack(list(ours(["a cat 1"], **options)))
    wanted = torch.as_tensor(draw())
    torch.testing.assert_close(drawn, wanted, rtol=0, atol=1e-4)
    assert (wanted - torch.as_tensor(with_first)).abs().max() > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("saved", ["stable_diffusion"], indirect=True)
def test_a_scale_that_would_be_ignored_is_refused(saved):
    """History: in diffusers it scales LoRAs; here they are in the weights, and images differed without a word."""
    _, folder = saved
    options = {"num_inference_steps": 1, **tiny.options_of("stable_diffusion")}
    predictor = Predictor.from_pretrained(
        folder / "model", "single", loras={folder / "first": 1.0}, alone=True
    )
    with pytest.raises(ConfigurationError, match=r"cross_attention_kwargs has scale=0\.3.*loras="):
        predictor(["a"], cross_attention_kwargs={"scale": 0.3}, **options)
    assert predictor(["a"], cross_attention_kwargs={"scale": 1.0}, **options)
    without = Predictor.from_pretrained(folder / "model", "single", alone=True)
    assert without(["a"], cross_attention_kwargs={"scale": 0.3}, **options)


def as_kohya_writes(folder, alpha):
    """The same adapters under the names of Kohya's scripts, which ComfyUI reads, too."""
    weights = {}
    for name, value in safetensors.torch.load_file(folder / LORA_FILE).items():
        name = name.replace(".processor.", ".").replace("to_out_lora.", "to_out.0_lora.")
        layer, kind = re.split(r"_lora\.|\.lora[._]", name)
        layer = layer.replace("text_encoder.", "lora_te.").replace("unet.", "lora_unet.")
        layer, is_up = layer.replace(".", "_"), kind in ("B.weight", "up.weight")
        # Kohya's scripts keep alpha apart.
        value = value * 2 / alpha if is_up else value
        weights[f"{layer}.lora_{'up' if is_up else 'down'}.weight"] = value
        weights[f"{layer}.alpha"] = torch.tensor(float(alpha))
    file = folder.with_suffix(".safetensors")
    safetensors.torch.save_file(weights, file)
    return file


@pytest.mark.slow
@pytest.mark.parametrize("saved", ["stable_diffusion"], indirect=True)
def test_files_of_kohyas_scripts_draw_as_those_of_diffusers(saved):
    name, folder = saved
    options = {"num_inference_steps": 2, **tiny.options_of(name)}
    drawn = []
    for file in (folder / "first", as_kohya_writes(folder / "first", alpha=6)):
        with Predictor.from_pretrained(
            folder / "model", method="single", loras={file: 0.8}, alone=True
        ) as predictor:
            drawn.append(pixels(predictor(["a cat 1"], **options)[0]))
    assert (drawn[0] == drawn[1]).all()


def trained_with_peft(folder, **settings):
    """A file as diffusers writes it, of a small SD3, which is in the folder `model`."""
    tiny.build("sd3", folder / "parts").save_pretrained(folder / "model")
    pipeline = diffusers.StableDiffusion3Pipeline.from_pretrained(folder / "model")
    config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=["to_q", "to_k"], **settings)
    pipeline.transformer.add_adapter(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, parameter in pipeline.transformer.named_parameters():
            if ".lora_magnitude" in key:
                parameter.mul_(1.7)
            elif ".lora_" in key:
                parameter.normal_(std=0.3, generator=generator)
    pipeline.save_lora_weights(
        folder / "lora",
        transformer_lora_layers=peft.get_peft_model_state_dict(pipeline.transformer),
        transformer_lora_adapter_metadata=pipeline.transformer.peft_config["default"].to_dict(),
    )
    return folder / "lora"


def added_to_transformer(folder, dtype, scale):
    """Weights of the small SD3 with the file, which are read as one of this type."""
    cls = diffusers.SD3Transformer2DModel
    model = skeleton(cls, cls.load_config(folder / "model", subfolder="transformer"), CPU, dtype)
    lora = adapters.StoredLora(folder / "lora", scale, diffusers.StableDiffusion3Pipeline)
    stored = SafetensorsFolder(folder / "model" / "transformer")
    return AdaptedWeights(stored, "transformer", model, [lora])


@pytest.mark.parametrize(
    "settings",
    [
        {"use_rslora": True},
        {"alpha_pattern": {"to_q": 8, r"transformer_blocks\.\d+\.attn\.to_k": 1}},
    ],
)
def test_settings_of_peft_scale_adapters_as_in_diffusers(settings, tmp_path):
    """History: alpha / rank of all layers was taken whatever the file says, and nothing said so."""
    file = trained_with_peft(tmp_path, **settings)
    plain = diffusers.StableDiffusion3Pipeline.from_pretrained(tmp_path / "model")
    plain.load_lora_weights(file)
    plain.fuse_lora()
    plain.unload_lora_weights()
    weights = added_to_transformer(tmp_path, torch.float32, 1.0)
    expected = plain.transformer.state_dict()
    for name, value in weights.read(weights.names()):
        torch.testing.assert_close(value, expected[name])


@pytest.mark.parametrize("settings", [{"use_dora": True}, {"lora_bias": True}])
def test_what_is_more_than_low_rank_products_is_refused(settings, tmp_path):
    """History: magnitudes and biases were left out without a word."""
    file = trained_with_peft(tmp_path, **settings)
    with pytest.raises(CheckpointError, match=r"more than low-rank products, such as .*fuse_lora"):
        Predictor.from_pretrained(tmp_path / "model", "single", alone=True, loras={file: 1.0})


def test_weights_are_not_rounded_to_the_stored_type_with_a_lora(tmp_path):
    """History: what was added to weights stored in bfloat16 was lost in their rounding, also for dtype=float32."""
    trained_with_peft(tmp_path)
    folder = tmp_path / "model" / "transformer"
    stored = safetensors.torch.load_file(folder / "diffusion_pytorch_model.safetensors")
    halves = {name: value.bfloat16() for name, value in stored.items()}
    safetensors.torch.save_file(halves, folder / "diffusion_pytorch_model.safetensors")
    name = "transformer_blocks.0.attn.to_q.weight"
    [(_, value)] = added_to_transformer(tmp_path, torch.float32, 1e-4).read([name])
    assert value.dtype == torch.float32
    changed = (value != halves[name].float()).float().mean()
    assert changed > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("saved", ["stable_diffusion"], indirect=True)
def test_a_lora_may_be_a_hub_id_on_this_machine(saved, monkeypatch):
    """History: "When using the offline mode, you must specify a `weight_name`"; so was a file that is not there."""
    _, folder = saved
    ids, whole = {"somebody/style": folder / "first"}, huggingface_hub.snapshot_download
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda path, **options: str(ids[path]) if path in ids else whole(path, **options),
    )
    sources = [
        Predictor.from_pretrained(folder / "model", "single", loras={lora: 1.0}, alone=True).source
        for lora in ("somebody/style", folder / "first")
    ]
    assert sources[0].texts("unet") == sources[1].texts("unet")
    with pytest.raises(
        CheckpointError, match="there is no LoRA somebody/stile; name its file, its"
    ):
        Predictor.from_pretrained(folder / "model", "single", loras={"somebody/stile": 1.0})


@pytest.mark.slow
@pytest.mark.parametrize("saved", ["sdxl"], indirect=True)
def test_a_lora_of_another_model_and_other_files_are_named(saved, tmp_path):
    _, folder = saved

    def opened(loras, path=folder / "model"):
        return Predictor.from_pretrained(path, method="single", loras=loras, alone=True)

    other = save_lora("stable_diffusion", tmp_path / "other", 1, rank=2)
    with pytest.raises(
        CheckpointError, match=r"other into the unet, is it of another model\? .*down_blocks"
    ):
        opened({other: 1.0})
    with pytest.raises(CheckpointError, match=r"there is no LoRA .*nowhere; name its file, its"):
        opened({tmp_path / "nowhere": 1.0})
    with pytest.raises(
        ConfigurationError, match="loras must be a mapping of files to their scales"
    ):
        opened([folder / "first"])
    with pytest.raises(ConfigurationError, match="must be a number; got 'much'"):
        opened({folder / "first": "much"})
    none = tmp_path / "none.safetensors"
    safetensors.torch.save_file({"unet.conv_in.weight": torch.zeros(1)}, none)
    with pytest.raises(CheckpointError, match=r"none\.safetensors"):
        opened({none: 1.0})
    tiny.build("dit", tmp_path / "dit_parts").save_pretrained(tmp_path / "dit")
    with pytest.raises(ConfigurationError, match="DiTPipeline of diffusers takes no LoRA"):
        opened({folder / "first": 1.0}, tmp_path / "dit")


def with_adapters(path):
    """A model of the project with adapters of all that is trained, which change images much."""
    module = LatentDiffusion.from_pretrained(path, lora=Lora(rank=2), train_text_encoder=True)
    with torch.no_grad():
        for key, parameter in module.named_parameters():
            if ".lora_" in key:
                parameter.normal_(std=0.5)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["folder", "checkpoint", "checkpoint of a LoRA"])
@pytest.mark.parametrize("denoiser", ["unet", "transformer"])
def test_models_of_the_project_take_loras(denoiser, kind, tmp_path):
    """History: they were refused, with the built-in models, too; later as other models if text encoders had one."""
    plain, path = tiny_latent_diffusion(denoiser), tmp_path / "folder"
    plain.save_pretrained(path)
    if kind == "checkpoint of a LoRA":
        plain, path = with_adapters(path), tmp_path / "merged"
        plain.save_pretrained(path)
    module = with_adapters(path)
    if kind != "folder":
        path = tmp_path / "last.ckpt"
        save_checkpoint(plain, path)
    module.save_lora(tmp_path / "lora")
    draw = lambda module: as_pil(
        module.sample(["a", "b"], 2, 4.0, torch.Generator().manual_seed(3))
    )
    options = {"method": "single", "loras": {tmp_path / "lora": 1.0}}
    found = Predictor.from_pretrained(path, **options)(["a", "b"], 2, 4.0, seed=3)
    for one, other, without in zip(found, draw(module), draw(plain), strict=True):
        assert abs(pixels(one) - pixels(other)).max() <= 1
        assert abs(pixels(one) - pixels(without)).max() > 8


@pytest.mark.distributed
@pytest.mark.parametrize("saved", ["sdxl"], indirect=True)
def test_ranks_with_another_lora_are_refused(saved, tmp_path):
    """LoRAs are compared by what is in them, and not by path."""
    name, folder = saved
    copied = shutil.copytree(folder / "first", tmp_path / "copied")
    settings = {"num_inference_steps": 1, **tiny.options_of(name)}

    def job(loras):
        return folder / "model", ["a cat 1"], settings, {"method": "single", "loras": loras}

    own = job({folder / "first": 0.8})
    cases = {
        "content": job({folder / "second": 0.8}),
        "scale": job({folder / "first": 0.7}),
        "further file": job({folder / "first": 0.8, folder / "second": -0.5}),
        "none": job(None),
        "same content elsewhere": job({copied: 0.8}),
    }
    first, second = run_ranks(failure_of_each_rank, 2, [(own, other) for other in cases.values()])
    assert first == second
    *refused, drawn = first
    for said in refused:
        assert re.search(r"rank 1 has LoRA \d\.", said)
    assert drawn == "no error"


@pytest.mark.slow
@pytest.mark.parametrize("saved", ["stable_diffusion"], indirect=True)
def test_the_command_takes_loras(saved, capsys, monkeypatch):
    name, folder = saved
    sizes = [f"{key}={value}" for key, value in tiny.options_of(name).items()]
    drawn = []
    for loras in ("null", f"{{{folder / 'first'}: 0.8}}"):
        output = folder / f"output{len(drawn)}"
        arguments = (f"path={folder / 'model'}", "prompts=[a cat 1]", "num_inference_steps=2")
        code, out, err = call(
            capsys, monkeypatch, "sample", *arguments, f"loras={loras}", f"output={output}", *sizes
        )
        assert code == 0, out + err
        drawn.append(pixels(Image.open(next(output.rglob("*.png")))))
    assert abs(drawn[0] - drawn[1]).max() > 8


QUERY = "transformer.transformer_blocks.0.attn.to_q"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shapes", "metadata", "said"),
    [
        (((2, 16), (16, 3)), None, "size mismatch"),
        (((), (16, 2)), None, "size mismatch"),
        (((2, 16), (16, 2)), "[1]", "'list' object"),
        (((2, 16), (16, 2)), '{"transformer.lora_alpha": "x", "transformer.target_modules": ["to_q"]}',
         "unsupported operand"),
        (((2, 16), (16, 2)), '{"transformer.alpha_pattern": {"(": 1}, "transformer.target_modules": ["to_q"]}',
         "unterminated"),
    ],
)  # fmt: skip
def test_damaged_files_are_named(shapes, metadata, said, tmp_path):
    """History: raw errors, of matrices that have no product only when their layer was read."""
    file = trained_with_peft(tmp_path) / LORA_FILE
    kinds = ("lora_A", "lora_B")
    weights = {f"{QUERY}.{k}.weight": torch.ones(s) for k, s in zip(kinds, shapes, strict=True)}
    safetensors.torch.save_file(weights, file, metadata and {"lora_adapter_metadata": metadata})
    with pytest.raises(CheckpointError, match=f"{tmp_path / 'lora'}.*{said}"):
        added_to_transformer(tmp_path, torch.float32, 1.0)


def test_tensors_of_other_layers_are_named(tmp_path):
    """History: files of other models changed nothing, without a word."""
    file = trained_with_peft(tmp_path) / LORA_FILE
    for layer in ("transformer_blocks.7.attn.to_q", "blocks.0.self_attn.q"):
        kinds = ("lora_A", "lora_B")
        more = {f"transformer.{layer}.{kind}.weight": torch.ones(16, 16) for kind in kinds}
        safetensors.torch.save_file(more, file)
        with pytest.raises(CheckpointError, match=r"is of another model|is it of another model"):
            added_to_transformer(tmp_path, torch.float32, 1.0)
    safetensors.torch.save_file({f"vae.{QUERY}.lora_A.weight": torch.ones(2, 2)}, file)
    cls = diffusers.StableDiffusion3Pipeline
    with pytest.raises(CheckpointError, match="it changes vae, and StableDiffusion3Pipeline here"):
        adapters.read_loras({tmp_path / "lora": 1.0}, cls, ["transformer"])


@pytest.mark.parametrize("size", [0, 5, 100])
def test_what_is_wrong_with_a_file_that_was_cut_is_said(size, tmp_path):
    """History: it could not be loaded, and nothing said why."""
    file = tmp_path / "file.safetensors"
    kinds = ("lora_A", "lora_B")
    safetensors.torch.save_file(
        {f"{QUERY}.{kind}.weight": torch.ones(2, 2) for kind in kinds}, file
    )
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(CheckpointError, match=r"cannot read the LoRA .*; .*deserializing header"):
        adapters.StoredLora(file, 1.0, diffusers.StableDiffusion3Pipeline)


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_scales_are_finite(scale, tmp_path):
    """History: images were black."""
    with pytest.raises(ConfigurationError, match=f"must be a number; got {scale}"):
        adapters.StoredLora(tmp_path, scale, diffusers.StableDiffusion3Pipeline)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "writer"),
    [("stable_diffusion", "kohya"), *((n, "own") for n in ("stable_diffusion", "sdxl", "flux"))],
)
def test_training_goes_on_from_a_file_with_its_rank_and_layers(name, writer, tmp_path):
    targets = ["to_q", "to_out.0", "q_proj", "q"]
    file = save_lora(name, tmp_path / "lora", 1, rank=2, alpha=6, targets=targets)
    pipeline = tiny.build(name, tmp_path / "parts")
    pipeline.load_lora_weights(file, adapter_name="default")
    file = as_kohya_writes(file, 4) if writer == "kohya" else file
    lora = Lora(rank=16, lora_from=file)
    module = PipelineDiffusion(
        tiny.build(name, tmp_path / "parts"), lora=lora, train_text_encoder=True
    )
    for part in ("unet", "transformer", "text_encoder"):
        ours, theirs = (getattr(each, part, nn.Module()) for each in (module, pipeline))
        assert dict(ours.named_parameters()).keys() == dict(theirs.named_parameters()).keys()
        for key, layer in theirs.named_modules():
            if hasattr(layer, "get_delta_weight"):
                changes = (
                    each.get_submodule(key).get_delta_weight("default") for each in (ours, theirs)
                )
                torch.testing.assert_close(*changes)
        assert all(p.requires_grad == (".lora_" in key) for key, p in ours.named_parameters())
    assert any(".lora_" in key for key, _ in module.denoiser.named_parameters())
    with pytest.raises(
        ConfigurationError, match=r"has adapters of text_encoder.*train_text_encoder=true"
    ):
        PipelineDiffusion(tiny.build(name, tmp_path / "parts"), lora=lora)
    other = {"flux": "sdxl"}.get(name, "flux")
    with pytest.raises(
        (CheckpointError, ConfigurationError), match=r"another model|another file|cannot read"
    ):
        PipelineDiffusion(tiny.build(other, tmp_path / "other"), lora=lora, train_text_encoder=True)
