"""What is trained as an adapter (LoRA) is what is saved, loaded and drawn with."""

import json
import re
import sys
import warnings
from importlib.resources import files

import diffusers
import lightning as L
import peft
import pytest
import safetensors.torch
import torch
from omegaconf import OmegaConf
from torch import nn

from lightning_diffpipe.errors import CheckpointError, ConfigurationError
from lightning_diffpipe.model_sources import open_source
from lightning_diffpipe.modules import LatentDiffusion, Lora, PipelineDiffusion, adapters
from lightning_diffpipe.modules.part_files import BaseModel, sampled
from lightning_diffpipe.sampling.skeleton import load_weights
from tests.command import call
from tests.modules.tiny_parts import fit
from tests.predictor import tiny_pipelines as tiny


@pytest.fixture
def adapted(make_model):
    """A model whose U-Net and text encoder have adapters that change what comes out."""
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


def test_only_weights_that_adapters_change_are_copied_to_be_saved(adapted):
    """History: the whole part was, though mapped from its file, and once more in another type."""
    names = [n for n, _ in adapted.unet.named_parameters() if ".lora_" not in n]
    plain = dict(adapters.merged(adapted.unet).named_parameters())
    for name in names:
        before, after = adapted.unet.get_parameter(name), plain[name.replace(".base_layer", "")]
        assert torch.equal(before, after) == (not name.endswith(".base_layer.weight"))
        assert (before.data_ptr() == after.data_ptr()) == (".base_layer" not in name)
    cast = nn.Module.to(adapters.copied(adapted.unet), torch.float64)
    assert {p.dtype for p in cast.parameters()} == {torch.float64}
    assert {p.dtype for p in adapted.unet.parameters()} == {torch.float32}


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
    torch.testing.assert_close(drawn(source.module), drawn(adapted), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        lambda unet: unet.set_adapters("default", 0.3),
        lambda unet: unet.fuse_lora(),
        lambda unet: unet.disable_adapters(),
    ],
)
def test_a_checkpoint_keeps_what_was_done_to_adapters(change, adapted, tmp_path):
    """History: their weights were 1 again, and they were added twice if fused, and once though turned off."""
    change(adapted.unet)
    checkpoint = {"state_dict": adapted.state_dict(), "hyper_parameters": dict(adapted.hparams)}
    adapted.on_save_checkpoint(checkpoint)
    torch.save(checkpoint, tmp_path / "a.ckpt")
    loaded = LatentDiffusion.from_checkpoint(tmp_path / "a.ckpt")
    torch.testing.assert_close(drawn(loaded), drawn(adapted), atol=0, rtol=0)


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


def test_adapters_of_a_class_outside_of_diffusers_are_written(adapted, tmp_path):
    """History: the index of such a pipeline names its class by a list, which ended in a TypeError."""
    adapted.pipeline_index = {"_class_name": ["pipeline", "Mine"]}
    adapted.save_lora(tmp_path)
    assert (tmp_path / adapters.LORA_FILE).exists()


@pytest.fixture
def trained(make_model, batch, tmp_path):
    """Trains adapters of a model in a folder, and returns the module and what the checkpoint holds."""

    def train(path=tmp_path / "a.ckpt", change=None, callbacks=(), **options):
        if not (tmp_path / "model").exists():
            make_model("unet").save_pretrained(tmp_path / "model")
        lora = Lora(rank=2, **options)
        module = LatentDiffusion.from_pretrained(
            tmp_path / "model", lora=lora, train_text_encoder=True
        )
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if ".lora_" in name:
                    parameter.normal_(std=0.3)
            if change is not None:
                change(module)
        fit(module, batch, tmp_path, callbacks=[*callbacks]).save_checkpoint(path)
        return module, torch.load(path)

    return train


@pytest.mark.slow
def test_checkpoints_of_adapters_leave_the_model_to_its_folder(trained, tmp_path):
    """History: they held all frozen weights, 24 GB of a model with 12 billion."""
    module, checkpoint = trained()
    names = [n for n in module.state_dict() if ".lora_" in n]
    assert names == [n for n in checkpoint["state_dict"] if n in dict(module.named_parameters())]
    assert checkpoint["diffpipe_base"]["path"] == str(tmp_path / "model")
    _, whole = trained(tmp_path / "whole.ckpt", store_all=True)
    assert whole["state_dict"].keys() == module.state_dict().keys()
    sizes = [(tmp_path / f"{name}.ckpt").stat().st_size for name in ("a", "whole")]
    assert sizes[0] < 0.6 * sizes[1]  # configs and states of the optimizer are in both
    for name in ("a", "whole"):
        loaded = LatentDiffusion.from_checkpoint(tmp_path / f"{name}.ckpt")
        assert loaded.state_dict().keys() == module.state_dict().keys()
    loaded = LatentDiffusion.from_checkpoint(tmp_path / "a.ckpt")
    for key, value in module.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[key], value, rtol=0, atol=0)
    loaded.save_lora(tmp_path / "again")
    module.save_lora(tmp_path)
    again = stored(tmp_path / "again")
    assert all(torch.equal(value, again[key]) for key, value in stored(tmp_path).items())


@pytest.mark.slow
def test_a_predictor_reads_the_model_below_adapters(trained, tmp_path):
    module, _ = trained()
    source = open_source(tmp_path / "a.ckpt", True, torch.device("cpu"), torch.float32)
    load_weights(source.denoiser, source.weights)
    torch.testing.assert_close(drawn(source.module), drawn(module), atol=1e-5, rtol=1e-5)
    (tmp_path / "model").rename(tmp_path / "moved")
    where = str(tmp_path / "model")
    for load in (
        LatentDiffusion.from_checkpoint,
        lambda path: open_source(path, False, torch.device("cpu"), torch.float32),
    ):
        with pytest.raises(CheckpointError, match=rf"{where}: .*, base=FOLDER\)"):
            load(tmp_path / "a.ckpt")
    options = {"base": tmp_path / "moved"}
    open_source(tmp_path / "a.ckpt", True, torch.device("cpu"), torch.float32, **options)
    assert torch.equal(
        drawn(LatentDiffusion.from_checkpoint(tmp_path / "a.ckpt", **options)), drawn(module)
    )
    with pytest.raises(ConfigurationError, match="moved is a whole model; leave it out"):
        open_source(tmp_path / "moved", False, torch.device("cpu"), torch.float32, **options)


@pytest.mark.slow
def test_another_model_below_adapters_is_refused(trained, make_model, tmp_path):
    _, checkpoint = trained()
    other = make_model("unet")
    with torch.no_grad():
        other.unet.conv_in.weight.add_(0.01)
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(
        CheckpointError, match=r"the unet here has other weights .*; open that model"
    ):
        LatentDiffusion.from_checkpoint(tmp_path / "a.ckpt", base=tmp_path / "other")
    now = LatentDiffusion.from_pretrained(
        tmp_path / "other", lora=Lora(rank=2), train_text_encoder=True
    )
    with pytest.raises(
        CheckpointError, match=r"the unet here has other weights .*; open that model"
    ) as raised:
        now.on_load_checkpoint(checkpoint)
    # History: it was left to rank 0 to say, whose host may have the right folder.
    assert not raised.value.is_of_all_ranks


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_precision_makes_no_other_model(dtype, trained, tmp_path):
    """History: values that float16 rounds first are others in bfloat16, so that such runs were refused."""
    module, _ = trained()
    left_out = module._base.left_out(module.parts)
    module.to(dtype).on_load_checkpoint(torch.load(tmp_path / "a.ckpt"))
    assert left_out.keys() == {"unet", "vae", "text_encoder"}
    assert module._base.left_out(module.parts) == left_out


def test_the_order_of_parts_is_that_in_the_file():
    """History: it was that of hashes, so that ranks said different errors, and files differed."""
    parts = {name: nn.Linear(1, 1).requires_grad_(False) for name in "jbgcahdief"}
    base = BaseModel.of("nowhere", parts)
    assert list(base.left_out(parts)) == list("jbgcahdief")


class Unfreezes(L.Callback):
    """Trains the autoencoder from the second batch on."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 1:
            module.vae.quant_conv.requires_grad_(True)
            module.vae.quant_conv.weight.data.add_(1)


def test_what_a_callback_begins_to_train_is_stored(trained, tmp_path):
    """History: it was left to the folder, whose digest still fitted, and loading gave the weights from before."""
    module, checkpoint = trained(callbacks=[Unfreezes()])
    assert checkpoint["diffpipe_base"]["samples"].keys() == {"unet", "text_encoder"}
    loaded = LatentDiffusion.from_checkpoint(tmp_path / "a.ckpt")
    torch.testing.assert_close(loaded.vae.state_dict(), module.vae.state_dict(), rtol=0, atol=0)


@pytest.mark.slow
def test_the_folder_below_adapters_is_not_written_over(trained, tmp_path):
    """History: every checkpoint of the run was lost, as the model that it needs was another one."""
    module, _ = trained()
    for each in (module, LatentDiffusion.from_checkpoint(tmp_path / "a.ckpt")):
        with pytest.raises(ConfigurationError, match=r"model has the model below .*store_all=true"):
            each.save_pretrained(tmp_path / "saved" / ".." / "model")
    LatentDiffusion.from_checkpoint(tmp_path / "a.ckpt").save_pretrained(tmp_path / "saved")
    trained(store_all=True)[0].save_pretrained(tmp_path / "model")


@pytest.mark.slow
def test_a_base_is_kept_by_its_whole_path_or_not_at_all(trained, tmp_path, monkeypatch):
    """History: a folder named from here was looked for elsewhere later, and `store_all` had no effect."""
    trained()
    monkeypatch.chdir(tmp_path)
    for store_all in (False, True):
        lora = Lora(rank=2, store_all=store_all)
        module = LatentDiffusion.from_checkpoint(tmp_path / "a.ckpt", base="model", lora=lora)
        assert module._base is None if store_all else module._base.path == str(tmp_path / "model")


def test_a_base_that_nothing_is_read_from_is_refused(trained, tmp_path):
    """History: it was ignored, as if it were that of the checkpoint."""
    trained(store_all=True)
    said = r"base=other is for checkpoints .*; leave it out"
    with pytest.raises(ConfigurationError, match=said):
        LatentDiffusion.from_checkpoint(tmp_path / "a.ckpt", base="other")
    with pytest.raises(ConfigurationError, match=said):
        open_source(tmp_path / "a.ckpt", False, torch.device("cpu"), torch.float32, base="other")


def test_samples_have_first_and_last_of_many_values():
    """History: places were counted in single precision, and one past the end of a large table was looked at."""
    table = torch.zeros(2**24 + 4, dtype=torch.int8)
    for place in (0, -1):
        table[place] = 1
        assert sampled(table)[place] == 1
    assert sampled(torch.zeros(0)).numel() == 0


@pytest.mark.parametrize(
    "change", ["a name", "a shape", "a value", "all values by a part in a million"]
)
def test_another_model_is_noticed(change):
    """By names, shapes and samples, in any precision."""
    make = lambda rows=64: nn.Sequential(nn.Linear(64, rows)).requires_grad_(False)
    part = make()
    base, weights = BaseModel.of("folder", {"unet": part}), dict(part.named_parameters())
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        rounded = nn.Sequential(nn.Linear(64, 64)).requires_grad_(False).to(dtype)
        rounded.load_state_dict(part.state_dict())
        assert base.fits("unet", dict(rounded.named_parameters()))
        assert BaseModel.of("folder", {"unet": rounded}).fits("unet", weights)
    weights["0.weight"] = {
        "a name": weights.pop("0.bias"),
        "a shape": make(32)[0].weight,
        "a value": weights["0.weight"] + (torch.arange(64) == 63),
    }.get(change, weights["0.weight"] * (1 + 1e-6))
    assert not base.fits("unet", weights)


@pytest.mark.slow
def test_parts_that_are_no_longer_those_of_the_folder_are_stored(trained, tmp_path):
    module, checkpoint = trained(change=lambda module: module.vae.encoder.conv_in.weight.add_(0.01))
    assert {"unet", "text_encoder"} == checkpoint["diffpipe_base"]["samples"].keys()
    loaded = LatentDiffusion.from_checkpoint(tmp_path / "a.ckpt")
    for key, value in module.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[key], value, rtol=0, atol=0)


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
        # History: these two were raw errors.
        ({"unet": r"\g<foo>"}, "unknown group name 'foo'"),
        (
            {"x{99999999999}": ""},
            "no regular expression with what replaces it: the repetition number",
        ),
        ({".*": "x"}, "give two tensors of the LoRA the name xx"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            module.save_lora(tmp_path, names)


@pytest.mark.slow
def test_what_cannot_be_written_is_refused_before_training(tmp_path, capsys, monkeypatch):
    """History: two tensors of one name were found when all was trained, and so was a folder that must stay."""
    tiny.build("flux", tmp_path / "a").save_pretrained(tmp_path / "model")
    model = ("model=pretrained", f"model.path={tmp_path / 'model'}", "adapter=lora")
    saved = (f"save_lora={tmp_path / 'saved'}", "save_lora_names={lora_.: x}", "trainer.devices=1")
    further = ("trainer.max_steps=1", "logger=none", f"hydra.run.dir={tmp_path / 'run'}")
    code, _, err = call(capsys, monkeypatch, "train", *model, *saved, *further)
    assert code != 0
    assert "save_lora_names give two tensors of the LoRA the name transformer." in err
    over = (f"save_to={tmp_path / 'model'}", *further)
    code, _, err = call(capsys, monkeypatch, "train", *model, "trainer.devices=1", *over)
    assert code != 0
    assert f"{tmp_path / 'model'} has the model below the adapters" in err
    assert not list(tmp_path.rglob("*.ckpt"))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("flux", True, r"LoRAs of transformer, text_encoder only, .* text_encoder_2 \(T5EncoderM"),
        ("pixart", False, "PixArtAlphaPipeline of diffusers loads LoRAs of no part only"),
        ("flux", False, None),
        ("sdxl", True, None),
    ],
)
def test_adapters_that_diffusers_does_not_load_are_named(name, text, said, tmp_path):
    """History: they were written without a word, and an image of diffusers was drawn without them."""
    module = lora_of(name, tmp_path, text)
    with warnings.catch_warnings() if said is None else pytest.warns(UserWarning, match=said):
        warnings.simplefilter("error" if said is None else "always")
        module.save_lora(tmp_path)
    found = {name.partition(".")[0] for name in stored(tmp_path)}
    assert found == {n.partition(".")[0] for n, p in module.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("settings", [{"modules_to_save": ["conv_in"]}, {"bias": "all"}])
def test_what_a_lora_file_cannot_hold_is_refused(settings, tmp_path):
    """History: the file was written, and diffusers refused it."""
    module = PipelineDiffusion(tiny.build("stable_diffusion", tmp_path / "a"))
    module.unet.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q"], **settings))
    with pytest.raises(ConfigurationError, match=r"conv_in\.\w+ of the unet is trained along"):
        module.save_lora(tmp_path)


def test_adapters_of_embeddings_are_refused(tmp_path):
    """History: diffusers drew without them, and `alpha / rank` was missing in their numbers."""
    module = lora_of("stable_diffusion", tmp_path, targets=["to_q", "token_embedding"])
    with pytest.raises(
        ConfigurationError, match=r"embedding_A of the text_encoder .*_pretrained\("
    ):
        module.save_lora(tmp_path)


def test_the_one_adapter_that_is_active_is_written(tmp_path):
    """History: any name but `default` ended in a KeyError, and of two the one of this name was written."""
    module = PipelineDiffusion(tiny.build("stable_diffusion", tmp_path / "a"))
    module.unet.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q"]), "style")
    module.save_lora(tmp_path)
    assert all("to_q" in name for name in stored(tmp_path))
    module.unet.add_adapter(peft.LoraConfig(r=2, target_modules=["to_k"]))
    module.unet.set_adapter("style")
    module.save_lora(tmp_path)
    assert all("to_q" in name for name in stored(tmp_path))
    module.unet.set_adapter(["style", "default"])
    with pytest.raises(
        ConfigurationError, match=r"\(style, default\) 2 are active; choose one: modu"
    ):
        module.save_lora(tmp_path)


def test_what_get_peft_model_wraps_is_written_under_its_own_names(tmp_path):
    """History: names began with `base_model.model`, which diffusers does not know."""
    config = peft.LoraConfig(r=2, target_modules=["to_q"])
    pipeline = tiny.build("stable_diffusion", tmp_path / "a")
    pipeline.unet = peft.get_peft_model(pipeline.unet, config)
    PipelineDiffusion(pipeline).save_lora(tmp_path / "wrapped")
    module = PipelineDiffusion(tiny.build("stable_diffusion", tmp_path / "b"))
    module.unet.add_adapter(config)
    module.save_lora(tmp_path / "added")
    assert stored(tmp_path / "wrapped").keys() == stored(tmp_path / "added").keys()


LAYERS = ["to_q", "to_k", "to_v", "to_out.0", "q_proj", "k_proj", "v_proj", "out_proj"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rank": 4}, r"lora_A\.default\.weight has \(4, \d+\) now, \(2, \d+\) there\. Go on with"),
        ({"alpha": 7}, r"has \{'default': 3\.5\} now, \{'default': 3\.0\} there"),
        ({"targets": ["to_q", "q_proj"]}, r"k_proj\.lora_A\.default\.weight has None now, \(2, \d+\) there"),
        ({"targets": ["to_q", "fc1", "fc2", "q_proj", "k_proj"]},
         r"fc1\.lora_A\.default\.weight has \(2, \d+\) now, None there"),
        (None, r"has None now, \(2, \d+\) there"),
        ({"dropout": 0.5, "targets": LAYERS}, None),
    ],
)  # fmt: skip
def test_training_goes_on_with_the_adapters_of_the_checkpoint_only(options, said, tmp_path):
    """History: another alpha scaled what was trained, and `strict_loading=False` was the remedy for others."""
    module = lora_of("stable_diffusion", tmp_path)
    checkpoint = {"state_dict": module.state_dict()}
    module.on_save_checkpoint(checkpoint)
    lora = None if options is None else Lora(**{"rank": 2, "alpha": 6, **options})
    pipeline = tiny.build("stable_diffusion", tmp_path / "a")
    now = PipelineDiffusion(pipeline, lora=lora, train_text_encoder=True)
    if said is None:
        now.on_load_checkpoint(checkpoint)
        now.load_state_dict(checkpoint["state_dict"])
        return
    with pytest.raises(CheckpointError, match=said) as raised:
        now.on_load_checkpoint(checkpoint)
    assert raised.value.is_of_all_ranks
    now.strict_loading = False
    now.on_load_checkpoint(checkpoint)
