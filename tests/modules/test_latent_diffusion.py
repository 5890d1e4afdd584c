import json
import random
import warnings
from unittest import mock

import diffusers
import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging

from lightning_diffpipe.errors import CheckpointError, ConfigurationError
from lightning_diffpipe.model_sources import open_source
from lightning_diffpipe.modules import LatentDiffusion, PipelineDiffusion
from lightning_diffpipe.modules.latent_diffusion import drop_captions, tokenize
from tests.modules.tiny_parts import (
    SCHEDULERS,
    fit,
    loss_of,
    tiny_clip,
    tiny_text_encoder,
    tiny_tokenizer,
    tiny_transformer,
    tiny_unet,
    tiny_vae,
)


@pytest.mark.slow
def test_only_the_denoiser_is_trained(make_model, batch, tmp_path):
    model = make_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fit(model, batch, tmp_path)
    changed = {n.partition(".")[0] for n, v in model.state_dict().items() if not v.equal(before[n])}
    assert changed == {"unet"}


@pytest.mark.slow
def test_frozen_parts_stay_in_evaluation_mode(make_model, batch, tmp_path):
    model = make_model()
    model.train()
    assert model.unet.training
    assert not model.text_encoder.training
    assert not model.vae.training
    assert not any(p.requires_grad for p in model.vae.parameters())
    fit(model, batch, tmp_path)
    assert not any(module.training for module in model.text_encoder.modules())


def test_a_text_encoder_can_be_trained_along(make_model, batch):
    model = make_model(train_text_encoder=True).train()
    assert model.text_encoder.training
    loss_of(model, batch).backward()
    assert all(p.grad is not None for p in model.text_encoder.parameters())
    assert all(p.grad is None for p in model.vae.parameters())


def test_without_a_caption_all_samples_see_the_same_text(make_model, batch):
    model = make_model(caption_dropout=1.0).eval()
    other = {**batch, "caption": ["x"] * 4}
    assert loss_of(model, batch).equal(loss_of(model, other))
    model.hparams.caption_dropout = 0.0
    assert not loss_of(model, batch).equal(loss_of(model, other))


def test_caption_dropout_is_one_draw_per_sample(make_model):
    model = make_model(caption_dropout=0.3)
    torch.manual_seed(0)
    tokens = tokenize(model.tokenizer, ["digit four"] * 2000, model.device)
    dropped = (
        drop_captions(model.tokenizer, tokens, model.hparams.caption_dropout).attention_mask.sum(1)
        == 1
    )
    assert 0.25 < dropped.float().mean() < 0.35


def test_the_loss_is_fp32_under_bf16(make_model, batch):
    model = make_model()
    with torch.autocast("cpu", torch.bfloat16):
        assert loss_of(model, batch).dtype == torch.float32


def test_a_model_that_does_not_say_its_size_is_told_it(make_model):
    """History: `sample_size=None`, the default of diffusers' U-Net, ended in a TypeError about None."""
    model = make_model()
    model.unet.register_to_config(sample_size=None)
    with pytest.raises(ConfigurationError, match=r"sample_size is None.*give height and width"):
        model.sample(["a"], num_inference_steps=1)
    assert model.sample(["a"], 1, height=16, width=8).shape == (1, 3, 16, 8)


def test_captions_that_are_cut_are_counted_once(make_model, batch, tmp_path):
    """History: what a tokenizer does not read was left out without a word, of which diffusers warns in sampling."""
    model = make_model()
    length = model.tokenizer.model_max_length
    assert [len(c) < length for c in batch["caption"]] == [True, True, True, False]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(model, batch, tmp_path)
    said = [str(w.message) for w in caught if "are cut off" in str(w.message)]
    assert len(said) == 1
    assert f"1 of 4 captions have more tokens than the {length} that ByT5Tokenizer reads" in said[0]


@pytest.mark.parametrize("asks", [True, False])
def test_an_autoencoder_that_asks_for_float32_has_it_beside_bfloat16(make_model, batch, asks):
    model = make_model()
    model.vae.register_to_config(force_upcast=asks)
    latents = model.encode_images(batch["image"], sample=False)
    images = model.decode_latents(latents)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model.encode_images(batch["image"], sample=False), latents) == asks
        assert torch.equal(model.decode_latents(latents), images) == asks
        assert torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("given", [None, "float32", "bfloat16"])
def test_an_autoencoder_alone_may_be_given_float32(make_model, batch, given, tmp_path):
    """It computes in it then, beside other parts of another type."""
    model = make_model()
    model.vae.register_to_config(force_upcast=False)
    model.save_pretrained(tmp_path)
    given = {"vae": given, "text_encoder": "bfloat16"}
    again = LatentDiffusion.from_pretrained(tmp_path, frozen_dtype=given)
    assert again.text_encoder.shared.weight.dtype == torch.bfloat16
    dtype = torch.bfloat16 if given["vae"] == "bfloat16" else torch.float32
    assert {p.dtype for p in again.vae.parameters()} == {dtype}
    latents = model.encode_images(batch["image"], sample=False)
    with torch.autocast("cpu", torch.bfloat16):
        found = again.encode_images(batch["image"], sample=False)
    assert torch.equal(found, latents) == (given["vae"] == "float32")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_lightnings_half_precisions_train(make_model, batch, tmp_path, precision):
    trainer = fit(make_model(), batch, tmp_path, precision=precision)
    assert trainer.callback_metrics["train/loss"].isfinite()


def test_training_step_reads_no_tensor_on_the_host(make_model, batch, monkeypatch):
    model = make_model()
    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_: pytest.fail("a tensor was read"))
    loss_of(model, batch)


def test_text_states_are_those_of_transformers_own_mask(make_model, batch):
    model = make_model()
    tokens = tokenize(model.tokenizer, batch["caption"], model.device)
    expected = model.text_encoder(tokens.input_ids, attention_mask=tokens.attention_mask)[0]
    torch.testing.assert_close(model.encode_text(tokens), expected)


@pytest.mark.parametrize("prediction", ["flow", "epsilon", "v"])
def test_samples_are_images_and_repeatable(make_model, prediction):
    model = make_model(prediction=prediction).eval()
    images = [
        model.sample(["a", "b"], 3, generator=torch.Generator().manual_seed(1)) for _ in range(2)
    ]
    assert images[0].shape == (2, 3, 8, 8)
    assert 0 <= images[0].min() <= images[0].max() <= 1
    assert images[0].equal(images[1])
    assert not images[0][0].equal(images[0][1])


def test_a_loaded_denoiser_is_ready_to_train_and_sampling_leaves_it_so(make_model, tmp_path):
    make_model().save_pretrained(tmp_path)
    model = LatentDiffusion.from_pretrained(tmp_path)
    assert model.unet.training
    model.unet.conv_in.eval()
    model.sample(["a"], 2)
    assert model.unet.training
    assert not model.unet.conv_in.training, "every module goes back to the mode it had"
    assert not model.vae.training


def test_sampling_leaves_training_random_numbers_alone(make_model):
    model = make_model().eval()
    state = torch.get_rng_state()
    model.sample(["a"], 2, generator=torch.Generator().manual_seed(1))
    assert torch.get_rng_state().equal(state)


def test_no_guidance_is_the_conditional_model_alone(make_model):
    model = make_model().eval()
    seed = lambda: torch.Generator().manual_seed(1)
    plain = model.sample(["a"], 3, guidance_scale=1.0, generator=seed())
    nearly = model.sample(["a"], 3, guidance_scale=1.0 + 1e-6, generator=seed())
    torch.testing.assert_close(plain, nearly, atol=1e-4, rtol=1e-4)


def test_a_learned_variance_is_left_out(make_model):
    model = make_model("transformer")
    model.transformer = tiny_transformer(learns_variance=True)
    states, mask = torch.zeros(2, 24, 16), torch.ones(2, 24)
    assert model.denoise(torch.zeros(2, 4, 4, 4), torch.ones(2), states, mask).shape == (2, 4, 4, 4)


@pytest.mark.slow
def test_a_saved_folder_is_read_back_by_us_and_by_diffusers(make_model, tmp_path):
    model = make_model().eval()
    model.save_pretrained(tmp_path)
    again = LatentDiffusion.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)
    unet = diffusers.UNet2DConditionModel.from_pretrained(tmp_path, subfolder="unet")
    assert unet.conv_in.weight.equal(model.unet.conv_in.weight)
    assert diffusers.AutoencoderKL.from_pretrained(tmp_path / "vae").config.scaling_factor == 0.7
    diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(tmp_path, subfolder="scheduler")


def test_the_first_of_several_processes_saves(make_model, tmp_path, monkeypatch):
    """History: all processes of a pipeline wrote the same files at once."""
    model = make_model()
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    for rank, num_files in ((1, 0), (0, 1)):
        monkeypatch.setattr("torch.distributed.get_rank", lambda rank=rank: rank)
        model.save_pretrained(tmp_path / "saved")
        assert len(list(tmp_path.rglob("model_index.json"))) == num_files


def test_a_folder_is_left_whole_where_saving_fails(make_model, tmp_path, monkeypatch):
    model = make_model()
    model.save_pretrained(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def fail(folder):
        (folder / "config.json").write_text("{")
        raise OSError("no space left")

    monkeypatch.setattr(model.unet, "save_pretrained", fail)
    with pytest.raises(OSError, match="no space left"):
        model.save_pretrained(tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("last", ["unet", "transformer"])
def test_the_denoiser_saved_last_is_that_of_the_folder(make_model, tmp_path, last):
    """History: the index kept both, and `diffpipe sample` drew with the U-Net of an earlier training."""
    other = {"unet": "transformer", "transformer": "unet"}[last]
    stable_diffusion = make_model(other)
    stable_diffusion.pipeline_index = {"_class_name": "StableDiffusionPipeline"}
    stable_diffusion.save_pretrained(tmp_path)
    make_model(last).save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    assert index["_class_name"] == "LatentDiffusion"
    assert index[other] == [None, None]
    assert hasattr(LatentDiffusion.from_pretrained(tmp_path), last)
    source = open_source(tmp_path, False, torch.device("cpu"), torch.float32)
    assert type(source.denoiser).__name__ == index[last][1]


def test_two_denoisers_in_a_folder_are_refused(make_model, tmp_path):
    """Such folders were written before the index told which one is of the last training."""
    make_model("unet").save_pretrained(tmp_path)
    make_model("transformer").save_pretrained(tmp_path)
    path = tmp_path / "model_index.json"
    index = json.loads(path.read_text()) | {"unet": ["diffusers", "UNet2DConditionModel"]}
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="must have a unet or a transformer, and not both"):
        open_source(tmp_path, False, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize(
    ("offline", "message"),
    [
        (True, "nor a hub model on this machine; check the path, or allow downloads"),
        (
            False,
            r"that can be downloaded \(me/it is no.*\); check the path.* licence.*`hf auth login`",
        ),
    ],
)
def test_a_hub_model_that_cannot_be_read_says_why(offline, message, monkeypatch):
    """History: of a model whose licence had not been accepted it said to allow downloads, which were allowed."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    refusal = OSError("me/it is not a valid model identifier\nIf this is a private repository, ...")
    with (
        mock.patch.object(diffusers.DiffusionPipeline, "load_config", side_effect=refusal),
        pytest.raises(ConfigurationError, match=message),
    ):
        LatentDiffusion.from_pretrained("me/it")


def test_a_folder_may_leave_parts_to_another(make_model, tmp_path):
    """As the built-in transformer does, so that the package has its autoencoder and text encoder once."""
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    model = make_model("transformer")
    model.save_pretrained(whole)
    rest.mkdir()
    (whole / "transformer").rename(rest / "transformer")
    index = json.loads((whole / "model_index.json").read_text())
    (rest / "model_index.json").write_text(json.dumps(index | {"_other_parts": "../whole"}))
    again = LatentDiffusion.from_pretrained(rest)
    state = model.state_dict()
    assert all(value.equal(state[name]) for name, value in again.state_dict().items())
    again.save_pretrained(tmp_path / "saved")
    assert "_other_parts" not in (tmp_path / "saved" / "model_index.json").read_text()


def test_a_saved_folder_does_not_tell_where_its_parts_came_from(make_model, tmp_path):
    make_model().save_pretrained(tmp_path / "first")
    LatentDiffusion.from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "second")
    for path in (tmp_path / "second").rglob("*.json"):
        assert str(tmp_path) not in path.read_text(), path.name


def test_what_is_trained_has_fp32_and_the_rest_the_type_it_is_stored_in(make_model, tmp_path):
    make_model().save_pretrained(tmp_path, dtype=torch.float16)
    again = LatentDiffusion.from_pretrained(tmp_path)
    assert {p.dtype for p in again.denoiser.parameters()} == {torch.float32}
    own = again.text_encoder.encoder.block[0].layer[0].SelfAttention.q.weight
    assert own.dtype == torch.float16, "T5 asks for float32 in some others"
    assert {p.dtype for p in again.vae.parameters()} == {torch.float32}, "it asks for that"
    again = LatentDiffusion.from_pretrained(tmp_path, frozen_dtype="bfloat16")
    assert {p.dtype for p in again.vae.parameters()} == {torch.bfloat16}
    with pytest.raises(ConfigurationError, match="names the component 'decoder'; this model has"):
        LatentDiffusion.from_pretrained(tmp_path, frozen_dtype={"decoder": "bfloat16"})
    with pytest.raises(ConfigurationError, match="frozen_dtype='int4'; choose bfloat16, float16"):
        LatentDiffusion.from_pretrained(tmp_path, frozen_dtype="int4")


@pytest.mark.slow
def test_a_stable_diffusion_folder_stays_one(batch, tmp_path):
    torch.manual_seed(0)
    model = LatentDiffusion(
        tiny_vae(), tiny_clip(), tiny_tokenizer(), SCHEDULERS["epsilon"](), unet=tiny_unet()
    )
    model.save_pretrained(tmp_path)
    index_path = tmp_path / "model_index.json"
    text = index_path.read_text().replace('"LatentDiffusion"', '"StableDiffusionPipeline"')
    index_path.write_text(text.replace("{", '{"safety_checker": [null, null],', 1))
    again = LatentDiffusion.from_pretrained(tmp_path)
    again.save_pretrained(tmp_path / "copy")
    fit(again, batch, tmp_path).save_checkpoint(tmp_path / "last.ckpt")
    LatentDiffusion.from_checkpoint(tmp_path / "last.ckpt").save_pretrained(tmp_path / "trained")
    for folder in ("copy", "trained"):
        index = diffusers.DiffusionPipeline.load_config(tmp_path / folder)
        assert index["_class_name"] == "StableDiffusionPipeline"
        assert index["safety_checker"] == [None, None]


@pytest.mark.slow
def test_a_checkpoint_alone_rebuilds_the_model(make_model, batch, tmp_path):
    model = make_model(caption_dropout=0.25)
    trainer = fit(model, batch, tmp_path)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    again = LatentDiffusion.from_checkpoint(tmp_path / "last.ckpt")
    assert again.hparams.caption_dropout == 0.25
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert again.tokenizer.model_max_length == 24


@pytest.mark.slow
def test_a_checkpoint_of_lightnings_own_averaging_is_read(make_model, batch, tmp_path):
    """History: its callback is called EMA..., too, and a KeyError was raised in place of our averages."""
    averaging = EMAWeightAveraging(decay=0.5)
    model, seen = make_model(), {}

    class Notes(L.Callback):
        def on_train_end(self, trainer, module):
            trainer.save_checkpoint(tmp_path / "last.ckpt")
            seen[False] = {name: p.detach().clone() for name, p in module.named_parameters()}
            averages = averaging._average_model.module.named_parameters()
            seen[True] = {name: p.detach().clone() for name, p in averages}

    # Before the averages take the place of the weights, at the end.
    fit(model, batch, tmp_path, callbacks=[Notes(), averaging])
    assert any(not value.equal(seen[True][name]) for name, value in seen[False].items())
    for ema, expected in seen.items():
        again = LatentDiffusion.from_checkpoint(tmp_path / "last.ckpt", ema=ema)
        assert all(p.equal(expected[name]) for name, p in again.named_parameters())


def test_a_foreign_checkpoint_is_refused(tmp_path):
    torch.save({"state_dict": {}}, tmp_path / "x.ckpt")
    with pytest.raises(CheckpointError, match=r"x.ckpt holds no configs of its.* from_single_file"):
        LatentDiffusion.from_checkpoint(tmp_path / "x.ckpt")


@pytest.mark.parametrize("offline", [False, True])
@pytest.mark.parametrize("name", ["x.safetensors", "x.CKPT", "x.gguf", "folder"])
@pytest.mark.parametrize("cls", [LatentDiffusion, PipelineDiffusion])
def test_a_single_file_is_named_with_what_to_do(cls, name, offline, tmp_path, monkeypatch):
    """History: "not a valid JSON file", and advice on licences of the hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    (tmp_path / "folder").mkdir()
    for file in ("x.safetensors", "x.CKPT", "x.gguf", "folder/x.safetensors"):
        (tmp_path / file).write_bytes(b"\x80\x02\0\0\0\0\0\0{}")
    with pytest.raises(ConfigurationError, match=r"hub model\. A single file .*from_single_file"):
        cls.from_pretrained(tmp_path / name)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ConfigurationError, match=r"nowhere' is neither a folder"):
        LatentDiffusion.from_pretrained(tmp_path / "nowhere")


def test_a_missing_part_is_named(make_model, tmp_path):
    make_model().save_pretrained(tmp_path)
    path = tmp_path / "model_index.json"
    path.write_text(path.read_text().replace('"vae"', '"vea"'))
    with pytest.raises(ConfigurationError, match="has no 'vae', which LatentDiffusion needs"):
        LatentDiffusion.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("name", "class_name", "config", "message"),
    [
        ("transformer", "FluxTransformer2DModel", {}, "trains PixArt .* is a FluxTransformer2DModel"),
        ("unet", "UNet3DConditionModel", {}, "trains U-Nets .* is a UNet3DConditionModel"),
        ("unet", None, {"addition_embed_type": "text_time"}, r"added conditions \(text_time\)"),
        ("unet", None, {"in_channels": 9}, "takes 9 channels, and latents .* have 4: .* inpainting"),
    ],
)  # fmt: skip
def test_other_denoisers_are_refused_before_weights_are_read(
    make_model, tmp_path, name, class_name, config, message
):
    """History: all weights were read first, on every process; inpainting models failed in a convolution."""
    make_model(name).save_pretrained(tmp_path)
    for path in tmp_path.rglob("*.safetensors"):
        path.unlink()
    for path, changes in (
        (tmp_path / name / "config.json", config),
        (tmp_path / "model_index.json", {name: ["diffusers", class_name]} if class_name else {}),
    ):
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ConfigurationError, match=message):
        LatentDiffusion.from_pretrained(tmp_path)


def test_pixart_folders_with_the_old_class_are_read(make_model, tmp_path):
    model = make_model("transformer")
    model.save_pretrained(tmp_path)
    path = tmp_path / "model_index.json"
    path.write_text(path.read_text().replace("PixArtTransformer2DModel", "Transformer2DModel"))
    loaded = LatentDiffusion.from_pretrained(tmp_path)
    assert isinstance(loaded.transformer, diffusers.PixArtTransformer2DModel)


def test_an_inpainting_denoiser_in_memory_is_refused():
    parts = tiny_vae(), tiny_text_encoder(), tiny_tokenizer(), SCHEDULERS["flow"]()
    unet = diffusers.UNet2DConditionModel.from_config({**tiny_unet().config, "in_channels": 9})
    with pytest.raises(ConfigurationError, match="takes 9 channels"):
        LatentDiffusion(*parts, unet=unet)


def test_exactly_one_denoiser(make_model):
    parts = tiny_vae(), tiny_text_encoder(), tiny_tokenizer(), SCHEDULERS["flow"]()
    with pytest.raises(ConfigurationError, match="either unet or transformer; neither"):
        LatentDiffusion(*parts)


def test_a_tokenizer_without_length_is_refused(make_model, batch):
    model = make_model()
    model.tokenizer.model_max_length = int(1e30)
    with pytest.raises(ConfigurationError, match="model_max_length is"):
        loss_of(model, batch)


def test_pixart_of_1024_pixels_is_given_the_size_as_in_diffusers(batch):
    """History: such models could be neither trained nor sampled; a default of the class asks for the size."""
    transformer = diffusers.PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=8, num_layers=1,
        cross_attention_dim=24, caption_channels=16, sample_size=128,
    )  # fmt: skip
    assert transformer.config.use_additional_conditions is None
    scheduler = SCHEDULERS["epsilon"]()
    parts = (tiny_vae(), tiny_text_encoder(), tiny_tokenizer())
    model = LatentDiffusion(*parts, scheduler, transformer=transformer)
    loss_of(model, batch).backward()
    assert all(p.grad is not None for p in transformer.adaln_single.parameters())

    vae, text_encoder, tokenizer = parts
    pipeline = diffusers.PixArtAlphaPipeline(tokenizer, text_encoder, vae, transformer, scheduler)
    pipeline.set_progress_bar_config(disable=True)
    seen = []
    handle = transformer.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["added_cond_kwargs"]), with_kwargs=True
    )
    size = {"height": 16, "width": 8, "num_inference_steps": 1}
    model.sample(["a"], **size)
    states = torch.zeros(1, 4, 16)
    mask = torch.ones(1, 4)
    pipeline(
        prompt_embeds=states, prompt_attention_mask=mask, negative_prompt=None, negative_prompt_embeds=states,
        negative_prompt_attention_mask=mask, use_resolution_binning=False, output_type="latent", **size,
    )  # fmt: skip
    handle.remove()
    ours, theirs = seen
    assert ours.keys() == theirs.keys() == {"resolution", "aspect_ratio"}
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name])


def test_a_transformer_with_other_inputs_is_refused():
    """History: an SD3 folder was read, and its first step asked a config for what only PixArt's has."""
    parts = tiny_vae(), tiny_text_encoder(), tiny_tokenizer(), SCHEDULERS["flow"]()
    other = torch.nn.Linear(1, 1)
    with pytest.raises(ConfigurationError, match="trains PixArt transformers; this is a Linear"):
        LatentDiffusion(*parts, transformer=other)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("prediction", ["flow", "epsilon", "v"])
def test_self_conditioning_estimates_as_often_as_it_is_asked_to(
    make_model, batch, prediction, precision
):
    """The first pass of a step gets no gradient; the second, of the same weights, all of them."""
    model = make_model("unet", prediction, in_channels=8, self_conditioning=0.5)
    calls = []
    model.unet.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    counts = []
    for seed in range(8):
        calls.clear()
        random.seed(seed)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
            loss_of(model, batch, seed).backward()
        assert calls in ([True], [False, True])
        assert all(p.grad is not None for p in model.unet.parameters())
        counts.append(len(calls))
        model.zero_grad(set_to_none=True)
    assert set(counts) == {1, 2}
    images = model.sample(["a", "b"], num_inference_steps=3)
    assert images.shape == (2, 3, 8, 8)
    assert images.isfinite().all()


@pytest.mark.parametrize("prediction", ["flow", "epsilon", "v"])
def test_an_estimate_from_the_right_prediction_is_the_clean_latent(make_model, prediction):
    schedule = make_model("unet", prediction).noise_schedule
    clean = torch.randn(64, 4, 2, 2).clamp(-3, 3)
    noisy, timesteps, target, _ = schedule.corrupt(clean)
    estimate = schedule.clean(noisy, target, timesteps)
    torch.testing.assert_close(estimate, clean, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize(
    ("channels", "share", "message"),
    [
        (4, 0.5, "self_conditioning=0.5 needs 8 input channels, 4 for noisy .* in_channels=8"),
        (8, None, "takes 8 channels, .* or give self_conditioning"),
        (8, 1.5, "self_conditioning.*1.5"),
        (8, -0.1, "self_conditioning.*-0.1"),
    ],
)
def test_self_conditioning_that_cannot_be_is_refused(make_model, channels, share, message):
    with pytest.raises(ConfigurationError, match=message):
        make_model(in_channels=channels, self_conditioning=share)
