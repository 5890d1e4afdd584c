"""What is trained as an adapter (LoRA) is what is saved, loaded and drawn with."""

import json
import re
import sys
from importlib.resources import files

import diffusers
import pytest
import safetensors.torch
import torch
from omegaconf import OmegaConf
from torch import nn

from lightning_diffpipe.errors import CheckpointError, ConfigurationError
from lightning_diffpipe.model_sources import open_source
from lightning_diffpipe.modules import LatentDiffusion, Lora, PipelineDiffusion, adapters
from lightning_diffpipe.sampling.skeleton import load_weights
from tests.modules.tiny_parts import fit
from tests.predictor import tiny_pipelines as tiny


@pytest.fixture
def adapted(make_model):
    """A model whose U-Net and text encoder have adapters that change what comes out."""
    peft = pytest.importorskip("peft")
    model = make_model("unet")
    model.unet.requires_grad_(False)
    torch.manual_seed(1)
    options = {"r": 2, "init_lora_weights": False}
    model.unet.add_adapter(peft.LoraConfig(target_modules=["to_q", "to_out.0"], **options))
    model.text_encoder.add_adapter(peft.LoraConfig(target_modules=["q", "v"], **options))
    return model


def drawn(model):
    generator = torch.Generator().manual_seed(0)
    return model.sample(["a"], num_inference_steps=2, generator=generator)


@pytest.mark.slow
def test_a_saved_folder_draws_what_the_adapters_draw(adapted, make_model, tmp_path):
    """History: names of adapters went into the folder, and attention was loaded with random weights."""
    before = sorted(adapted.state_dict())
    adapted.save_pretrained(tmp_path)
    loaded = LatentDiffusion.from_pretrained(tmp_path)
    assert sorted(loaded.state_dict()) == sorted(make_model("unet").state_dict())
    torch.testing.assert_close(drawn(loaded), drawn(adapted), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(drawn(loaded), drawn(make_model("unet")), atol=1e-3)
    assert sorted(adapted.state_dict()) == before, "the module in memory goes on training"
    open_source(tmp_path, False, torch.device("cpu"), torch.float32)


@pytest.mark.slow
def test_adapters_that_are_off_or_fused_are_saved_as_they_draw(adapted, tmp_path):
    adapted.unet.disable_adapters()
    adapted.text_encoder.disable_adapters()
    adapted.save_pretrained(tmp_path / "off")
    torch.testing.assert_close(
        drawn(LatentDiffusion.from_pretrained(tmp_path / "off")), drawn(adapted)
    )
    adapted.unet.enable_adapters()
    adapted.unet.fuse_lora()
    adapted.save_pretrained(tmp_path / "fused")
    loaded = LatentDiffusion.from_pretrained(tmp_path / "fused")
    torch.testing.assert_close(drawn(loaded), drawn(adapted))


@pytest.mark.slow
def test_a_checkpoint_alone_rebuilds_a_model_with_adapters(adapted, batch, tmp_path):
    """History: ended in a list of missing keys, and `diffpipe sample` said that a download broke off."""
    trainer = fit(adapted, batch, tmp_path)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    loaded = LatentDiffusion.from_checkpoint(tmp_path / "a.ckpt")
    assert loaded.unet.active_adapters() == ["default"]
    torch.testing.assert_close(drawn(loaded), drawn(adapted), atol=0, rtol=0)
    source = open_source(tmp_path / "a.ckpt", True, torch.device("cpu"), torch.float32)
    load_weights(source.denoiser, source.weights)
    torch.testing.assert_close(drawn(source._module), drawn(adapted), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_adapters_without_settings_are_refused_with_the_remedy(adapted, make_model, tmp_path):
    """Such folders and checkpoints were written before settings were kept."""
    checkpoint = {"state_dict": adapted.state_dict(), "hyper_parameters": dict(adapted.hparams)}
    adapted.on_save_checkpoint(checkpoint)
    for stored in checkpoint["diffpipe_parts"].values():
        del stored["adapters"]
    torch.save(checkpoint, tmp_path / "a.ckpt")
    for load in (
        LatentDiffusion.from_checkpoint,
        lambda path: open_source(path, False, torch.device("cpu"), torch.float32),
    ):
        with pytest.raises(CheckpointError, match=r"weights of adapters .*save_pretrained\(folder"):
            load(tmp_path / "a.ckpt")
    make_model("unet").save_pretrained(tmp_path / "folder")
    names = adapted.unet.state_dict()
    path = tmp_path / "folder" / "unet" / "diffusion_pytorch_model.safetensors"
    safetensors.torch.save_file({name: value.contiguous() for name, value in names.items()}, path)
    with pytest.raises(CheckpointError, match="weights of adapters"):
        LatentDiffusion.from_pretrained(tmp_path / "folder")
    with pytest.raises(CheckpointError, match="weights of adapters"):
        open_source(tmp_path / "folder", False, torch.device("cpu"), torch.float32)


def test_a_missing_peft_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    settings = {"configs": {"default": json.dumps({})}, "active": ["default"]}
    with pytest.raises(CheckpointError, match=r"pip install 'lightning-diffpipe\[lora\]'"):
        adapters.add_adapters(nn.Linear(1, 1), settings)


def lora_of(name, folder, text=True, **options):
    """A module with adapters of large numbers, its text encoders', too."""
    lora = Lora(rank=2, alpha=6, **options)
    module = PipelineDiffusion(tiny.build(name, folder / "a"), lora=lora, train_text_encoder=text)
    with torch.no_grad():
        for key, parameter in module.named_parameters():
            if ".lora_" in key:
                parameter.normal_(std=0.3)
    return module


ATTENTION = r"\.encoder\.layers\.\d\.self_attn\.(q|k|v|out)_proj\.lora_[AB]\.weight"
UNET = r"unet\..*\.attn[12]\.processor\.to_(q|k|v|out)_lora\.(down|up)\.weight"
MMDIT = r"transformer\.(single_)?transformer_blocks\.\d\.attn\.to_(q|k|v|out\.0)\.lora_[AB]\.weight"
CLIP = rf"text_encoder(_2)?\.text_model{ATTENTION}"


@pytest.mark.parametrize(
    ("name", "known", "unknown"),
    [
        ("stable_diffusion", f"{UNET}|{CLIP}", "none"),
        ("sdxl", f"{UNET}|{CLIP}", "none"),
        ("sd3", f"{MMDIT}|{CLIP}", r"text_encoder_3\.encoder\.block\..*"),
        ("flux", f"{MMDIT}|{CLIP}", r"text_encoder_2\.encoder\.block\..*"),
    ],
)
def test_tensors_have_the_names_that_comfyui_took(name, known, unknown, tmp_path):
    """Its own loader was run on such files, and took all but those of T5."""
    lora_of(name, tmp_path).save_lora(tmp_path)
    assert not [n for n in stored(tmp_path) if not re.fullmatch(f"{known}|{unknown}", n)]


def test_names_of_a_models_first_code_are_read_by_diffusers_as_its_own(tmp_path):
    """Those of the recipe for Wan, which ComfyUI knows by these only."""
    layers = r"blocks\.\d\.(attn[12]\.to_(q|k|v|out\.0)|ffn\.net\.(0\.proj|2))"
    module = lora_of("wan", tmp_path, text=False, targets=layers)
    recipe = files("lightning_diffpipe.conf") / "experiment" / "wan_lora.yaml"
    names = OmegaConf.load(str(recipe)).save_lora_names
    module.save_lora(tmp_path / "own")
    module.save_lora(tmp_path / "first", names)
    assert not set(stored(tmp_path / "own")) & set(stored(tmp_path / "first"))
    assert len(stored(tmp_path / "own")) == 4 * (2 * 4 + 2) * 2  # blocks, layers, matrices
    own, first = (diffusers.WanPipeline.lora_state_dict(tmp_path / n) for n in ("own", "first"))
    assert own.keys() == first.keys()
    assert all(torch.equal(value, first[name]) for name, value in own.items())


def stored(folder):
    return safetensors.torch.load_file(folder / adapters.LORA_FILE)


def test_names_that_cannot_be_given_are_refused(tmp_path):
    module = lora_of("stable_diffusion", tmp_path)
    for names, message in (
        ({"(": "x"}, r"save_lora_names has '\(': 'x', no regular expression"),
        ({"unet": r"\1"}, "invalid group reference"),
        ({".*": "x"}, "give two tensors of the LoRA the name xx"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            module.save_lora(tmp_path, names)
