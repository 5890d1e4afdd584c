"""Pipelines that animate the first frame of each clip: steps written by hand, stages, and what is refused."""

import copy

import diffusers
import pytest
import torch
import torch.nn.functional as F
import transformers
from PIL import Image
from torch.utils.data import DataLoader

from lightning_diffpipe import LatentDiffusion
from lightning_diffpipe.callbacks import SampleImages
from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.modules import Lora, PipelineDiffusion
from lightning_diffpipe.pipelines.stand_ins import is_followed, tensor_processor
from tests.distributed.scenarios import quiet_trainer
from tests.graph.emulate import check_stages, relative_error, take_gradients
from tests.modules.tiny_parts import loss_of
from tests.rows import row
from tests.zoo.double import in_double
from tests.zoo.image_to_video import CAPTIONS, KINDS, Animating, clips, pipeline_of
from tests.zoo.pipelines import SEEN, build


def module_of(kind, **options):
    module = Animating(kind, **options).eval()
    module.log = lambda *arguments, **settings: None
    module.setup("fit")
    return module


# ------------------------------------------------------------------ steps written by hand


def wide(values):
    return values.reshape(-1, 1, 1, 1, 1)


def ids_of(tokenizer, length):
    options = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
    return tokenizer(CAPTIONS, max_length=length, **options)


def sigmas_of(quantiles, shift):
    """Those of a scheduler with 1000 steps, which has them in float32."""
    shares = (1000 - (quantiles * 1000).floor()) / 1000
    return shift * shares / (1 + (shift - 1) * shares)


def flow(latents, shift):
    """Times as in diffusers' scripts for SD3, shifted as by the scheduler; Wan's own training has these, too."""
    sigmas = sigmas_of(torch.sigmoid(-torch.randn(len(latents))), shift)
    noise = torch.randn(latents.shape)
    return (1 - wide(sigmas)) * latents + wide(sigmas) * noise, sigmas, noise - latents


def wan_normalised(m, latents):
    mean, std = (wide(torch.tensor(getattr(m.vae.config, f"latents_{n}"))) for n in ("mean", "std"))
    return (latents - mean.view(1, -1, 1, 1, 1)) / std.view(1, -1, 1, 1, 1)


def wan_states(m, length):
    tokens = ids_of(m.tokenizer, length)
    states = m.text_encoder(tokens.input_ids, tokens.attention_mask).last_hidden_state
    return states * tokens.attention_mask[..., None]


def wan_beside(m, video):
    """What Wan is given of the image next to the noise: four channels that mark its frame, and its latents."""
    first = torch.cat([video[:, :, :1], torch.zeros_like(video[:, :, 1:])], 2)
    latents = wan_normalised(m, m.vae.encode(first).latent_dist.mode())
    marks = torch.zeros(len(latents), 4, *latents.shape[2:])
    marks[:, :, 0] = 1
    return torch.cat([marks, latents], 1)


def by_hand_wan21(m, video):
    latents = wan_normalised(m, m.vae.encode(video).latent_dist.sample())
    noisy, sigmas, target = flow(latents, 3.0)
    levels = (127.5 * (video[:, :, 0] + 1)).round().byte().permute(0, 2, 3, 1).numpy()
    pixels = m.image_processor([Image.fromarray(x) for x in levels], return_tensors="pt")
    seen = m.image_encoder(**pixels, output_hidden_states=True).hidden_states[-2]
    predicted = m.transformer(
        torch.cat([noisy, wan_beside(m, video)], 1), 1000 * sigmas, wan_states(m, 512), seen
    )
    return F.mse_loss(predicted.sample, target)


def by_hand_wan22(m, video):
    """Each expert at times of its own range, which count by their shares."""
    latents = wan_normalised(m, m.vae.encode(video).latent_dist.sample())
    table = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    is_high, normal = table.timesteps >= 900, torch.distributions.Normal(0, 1)
    share = normal.cdf(
        (is_high.sum() / 1000).logit()
    )  # times are sigmoids of minus a normal number
    losses = []
    for part in (m.transformer, m.transformer_2):
        quantiles = torch.rand(3)
        quantiles = share + (1 - share) * quantiles if losses else share * quantiles
        sigmas = sigmas_of(normal.icdf(quantiles).sigmoid(), 3.0)
        noise = torch.randn(latents.shape)
        noisy = (1 - wide(sigmas)) * latents + wide(sigmas) * noise
        given = torch.cat([noisy, wan_beside(m, video)], 1)
        predicted = part(given, 1000 * sigmas, wan_states(m, 8)).sample
        losses.append(F.mse_loss(predicted, noise - latents))
    return share * losses[0] + (1 - share) * losses[1]


def by_hand_wan22_5b(m, video):
    """The image's latents in the place of the first frame, whose tokens are told that they are without noise."""
    latents = wan_normalised(m, m.vae.encode(video).latent_dist.sample())
    noisy, sigmas, target = flow(latents, 3.0)
    first = wan_normalised(m, m.vae.encode(video[:, :, :1]).latent_dist.mode())
    noisy = torch.cat([first, noisy[:, :, 1:]], 2)
    tokens_per_frame = noisy.shape[-1] * noisy.shape[-2] // 4
    times = (1000 * sigmas)[:, None].repeat(1, noisy.shape[2] * tokens_per_frame)
    times[:, :tokens_per_frame] = 0
    predicted = m.transformer(noisy, times, wan_states(m, 8)).sample
    return F.mse_loss(predicted[:, :, 1:], target[:, :, 1:])


def by_hand_ltx(m, video):
    """As for Wan 2.2 of 5 billion weights, but that the image's latents are drawn, each clip's for itself."""
    mean, std = (x.reshape(1, -1, 1, 1, 1) for x in (m.vae.latents_mean, m.vae.latents_std))
    normalised = lambda x: (x - mean) * m.vae.config.scaling_factor / std
    noisy, sigmas, target = flow(normalised(m.vae.encode(video).latent_dist.sample()), 1.0)
    firsts = [m.vae.encode(clip[None, :, :1]).latent_dist.sample() for clip in video]
    noisy = torch.cat([normalised(torch.cat(firsts)), noisy[:, :, 1:]], 2)
    words, space = ids_of(m.tokenizer, 8), video.shape[-1] // noisy.shape[-1]
    times = (1000 * wide(sigmas)).expand(len(noisy), 1, *noisy.shape[2:]).clone()
    times[:, :, 0] = 0
    predicted = m.transformer(
        noisy.flatten(2).transpose(1, 2),
        m.text_encoder(words.input_ids)[0],
        times.flatten(1),
        words.attention_mask.bool(),
        *noisy.shape[2:],
        rope_interpolation_scale=(m.pipeline.vae_temporal_compression_ratio / 25, space, space),
    ).sample
    predicted = predicted.transpose(1, 2).reshape(noisy.shape)
    return F.mse_loss(predicted[:, :, 1:], target[:, :, 1:])


def by_hand_cogvideox(m, video, image_noise=None):
    """As diffusers' `train_cogvideox_image_to_video_lora.py`, whose weights make v of a loss of clean latents."""
    latents = m.vae.encode(video).latent_dist.sample().transpose(1, 2) * m.vae.config.scaling_factor
    timesteps, noise = torch.randint(1000, (len(latents),)), torch.randn(latents.shape)
    noisy = m.scheduler.add_noise(latents, noise, timesteps)
    images = video[:, :, :1]
    if image_noise is not None:
        mean, deviation = image_noise
        spread = torch.exp(mean + deviation * torch.randn(len(images)))
        images = images + wide(spread) * torch.randn(images.shape)
    firsts = [m.vae.encode(image[None]).latent_dist.sample() for image in images]
    first = torch.cat(firsts).transpose(1, 2) * m.vae.config.scaling_factor
    beside = torch.cat([first, torch.zeros_like(noisy[:, 1:])], 1)
    states = m.text_encoder(ids_of(m.tokenizer, 8).input_ids)[0]
    places = m.pipeline._prepare_rotary_positional_embeddings(32, 32, noisy.shape[1], "cpu")
    given = torch.cat([noisy, beside], 2)
    predicted = m.transformer(given, states, timesteps, image_rotary_emb=places).sample
    clean = m.scheduler.get_velocity(predicted, noisy, timesteps)
    weights = 1 / (1 - m.scheduler.alphas_cumprod[timesteps]).float()
    return (wide(weights) * (clean - latents).square()).mean()


def by_hand_hunyuan(m, video, concat=False):
    """As Tencent's training of the model: nothing of the image is in the noise, as it is when a video is drawn."""
    scaled = lambda x: x * m.vae.config.scaling_factor
    latents = scaled(m.vae.encode(video).latent_dist.sample())
    noisy, sigmas, target = flow(latents, 1.0)
    first = scaled(m.vae.encode(video[:, :, :1]).latent_dist.mode())
    if concat:  # beside the noise, with a channel that marks its frame
        marks = torch.cat([torch.ones_like(first[:, :1]), torch.zeros_like(noisy[:, :1, 1:])], 2)
        given = torch.cat(
            [noisy, torch.cat([first, torch.zeros_like(noisy[:, :, 1:])], 2), marks], 1
        )
    else:  # in the place of the first frame, which counts in no loss
        given = torch.cat([first, noisy[:, :, 1:]], 2)
    prompts = copy.copy(m.pipeline)
    vars(prompts)["image_processor"] = tensor_processor(m.image_processor)
    settings = {"prompt_template": SEEN, "max_sequence_length": 24}
    every_other = {"image_embed_interleave": 2 if concat else 4}
    encoded = [
        prompts.encode_prompt((clip[None, :, 0] + 1) / 2, caption, **settings, **every_other)
        for clip, caption in zip(video, CAPTIONS, strict=True)
    ]
    states, pooled, mask = (torch.cat(values) for values in zip(*encoded, strict=True))
    guidance = None if concat else torch.full((len(noisy),), 1000.0)
    told = (1000 * sigmas, states, mask.to(states), pooled, guidance)
    predicted = m.transformer(given, *told).sample
    start = 0 if concat else 1
    return F.mse_loss(predicted[:, :, start:], target[:, :, start:])


def by_hand_hunyuan_concat(m, video):
    return by_hand_hunyuan(m, video, concat=True)


def by_hand_hunyuan15(m, video):
    """Beside the noise, with a channel that marks its frame, and as tokens of an encoder of images."""
    encoded = lambda x: [m.vae.encode(each[None]).latent_dist for each in x]
    scale = m.vae.config.scaling_factor
    latents = encoded(video)
    drawn = torch.randn(len(latents), *latents[0].mean.shape[1:])
    spread = torch.cat([each.std for each in latents])
    noisy, sigmas, target = flow(
        scale * (torch.cat([x.mean for x in latents]) + spread * drawn), 1.0
    )
    first = scale * torch.cat([x.mode() for x in encoded(video[:, :, :1])])
    beside = torch.cat([first, torch.zeros_like(noisy[:, :, 1:])], 2)
    marks = torch.zeros_like(noisy[:, :1])
    marks[:, :, 0] = 1
    seen = tensor_processor(m.feature_extractor)((video[:, :, 0] + 1) / 2)
    of_prompts = m.pipeline.encode_prompt(CAPTIONS, "cpu", noisy.dtype, len(CAPTIONS))
    predicted = m.transformer(
        torch.cat([noisy, beside, marks], 1), 1000 * sigmas, *of_prompts[:2], None, *of_prompts[2:],
        image_embeds=m.image_encoder(**seen).last_hidden_state,
    ).sample  # fmt: skip
    return F.mse_loss(predicted, target)


TOLERANCES = {"hunyuan15": (1e-7, 1e-6), "hunyuan": (1e-10, 1e-10), "wan21": (1e-5, 1e-2)}
"""Of losses and gradients, by the first word of a kind. What latents are multiplied with is found in float32, which
is exact for HunyuanVideo's 0.5 here. Wan 2.1's encoder of images sees a little of 8 bits rounded otherwise."""


@pytest.mark.parametrize("kind", [row(kind) if kind == "wan22" else kind for kind in KINDS])
def test_loss_and_gradients_are_those_of_a_step_written_by_hand(kind):
    module = module_of(kind)
    with in_double():
        batch = clips(dtype=torch.float64)
        loss = loss_of(module.double(), batch)
        loss.backward()
        got = take_gradients(module)
        torch.manual_seed(0)
        expected = globals()[f"by_hand_{kind}"](module, batch["video"])
        expected.backward()
    tolerance, of_gradients = TOLERANCES.get(kind.partition("_")[0], (1e-7, 1e-6))
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=0)
    error, where = relative_error(take_gradients(module), got)
    assert error < of_gradients, where


def test_noise_is_added_to_the_image_as_in_the_training_of_cogvideox():
    module, batch = module_of("cogvideox", image_noise=[-3.0, 0.5]), clips()
    loss = loss_of(module, batch)
    torch.manual_seed(0)
    expected = by_hand_cogvideox(module, batch["video"], (-3.0, 0.5))
    torch.testing.assert_close(loss, expected, rtol=2e-6, atol=0)
    torch.manual_seed(0)
    assert abs(by_hand_cogvideox(module, batch["video"]) / loss - 1) > 1e-5


class MixingLater(diffusers.HunyuanVideoImageToVideoPipeline):
    """Mixes the image into its noise in another method than that which draws it."""

    def drawn(self, shape):
        return torch.randn(shape)

    def prepare_latents(self, image, batch_size, channels, height, width, num_frames, *_):
        scale, frames = self.vae_scale_factor_spatial, (num_frames - 1) // 4 + 1
        first = self.vae.encode(image.unsqueeze(2)).latent_dist.mode()
        noise = self.drawn((batch_size, channels, frames, height // scale, width // scale))
        return 0.9 * noise + 0.1 * first, first


def test_a_pipeline_that_mixes_the_image_into_its_noise_elsewhere_is_refused():
    module = Animating("hunyuan")
    module.pipeline.__class__ = MixingLater
    module = PipelineDiffusion(module.pipeline, call=module.hparams.call)
    with pytest.raises(ConfigurationError, match=r"MixingLater mixes the image .* in the method"):
        module.setup("fit")


@pytest.mark.parametrize("num_long", [1, 3])
def test_captions_that_push_the_end_of_a_template_out_are_refused(num_long):
    """History: one of three ended in torch's error about shapes, and three trained on states cut elsewhere."""
    module, batch = module_of("hunyuan"), clips()
    batch["caption"] = ["a caption of too many bytes"] * num_long + CAPTIONS[num_long:]
    said = rf"{num_long} of 3 captions are too long.*max_sequence_length"
    with pytest.raises(ConfigurationError, match=said):
        loss_of(module, batch)


def test_parts_of_a_pipeline_of_conditions_train_as_one_that_animates(tmp_path):
    parts = pipeline_of("ltx", tmp_path / "parts").components
    diffusers.LTXConditionPipeline(**parts).save_pretrained(tmp_path / "ltx")
    with pytest.raises(ConfigurationError, match=r"samples from image.*pipeline_class"):
        PipelineDiffusion.from_pretrained(tmp_path / "ltx")
    named = {"pipeline_class": "LTXImageToVideoPipeline", "call": {"max_sequence_length": 8}}
    module = PipelineDiffusion.from_pretrained(tmp_path / "ltx", caption_dropout=0.0, **named)
    module.log = lambda *arguments, **settings: None
    module.eval().setup("fit")
    loss = loss_of(module, clips())
    torch.manual_seed(0)
    expected = by_hand_ltx(module, clips()["video"])
    torch.testing.assert_close(loss, expected, rtol=2e-6, atol=0)


@pytest.mark.parametrize("kind", ["ltx", row("cogvideox")])
def test_validations_draw_the_same_of_an_image(kind):
    """History: posteriors of images, and noise on them, were drawn from the global generator."""
    module, batch = module_of(kind, image_noise=[-1.0, 0.5]), clips()
    state, losses = torch.get_rng_state(), []
    for _ in range(2):
        losses.append(module.losses(batch, torch.Generator().manual_seed(0))["loss"])
    assert torch.equal(*losses)
    assert torch.equal(torch.get_rng_state(), state)


def test_another_image_takes_the_place_of_the_first_frame():
    module, batch = module_of("ltx"), clips()
    first = (batch["video"][:, :, 0] + 1) / 2
    expected = loss_of(module, batch)
    torch.testing.assert_close(loss_of(module, batch | {"condition": first}), expected)
    other = loss_of(module, batch | {"condition": first.flip(0)})
    assert abs(other / expected - 1) > 1e-5
    larger = first.repeat(1, 1, 2, 2)
    with pytest.raises(
        ConfigurationError, match=r"size of their videos, here \(32, 32\), and .* 64"
    ):
        loss_of(module, batch | {"condition": larger})


# ------------------------------------------------------------------ what training needs


@pytest.mark.parametrize("kind", ["ltx", *(row(kind) for kind in KINDS if kind != "ltx")])
def test_stages_add_up_to_one_process(kind):
    module = module_of(kind)
    with in_double():
        batch = clips(dtype=torch.float64)
        graph = check_stages(module.double(), batch, max_share=1 / 100, splits=(2, 3))
    frozen = {graph.layers[i].name.partition(".")[0] for i in graph.frozen}
    others = {
        "wan21": ["image_encoder"],
        "hunyuan": ["text_encoder_2"],
        "hunyuan15": ["image_encoder"],
    }
    assert frozen == {"vae", "text_encoder", *others.get(kind.partition("_")[0], [])}
    encodings = [graph.layers[i] for i in graph.frozen if graph.layers[i].name == "vae.encoder"]
    assert all(layer.splits_samples for layer in encodings)


def test_every_clip_is_drawn_from_an_image_of_its_own():
    module = module_of("wan22_5b")
    images = (clips()["video"][:2, :, 0] + 1) / 2
    size = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 2}
    drawn = module.sample(["a", "b"], condition=images, **size)
    assert drawn.shape == (2, 5, 3, 32, 32)
    assert not torch.allclose(drawn[0], drawn[1])
    with pytest.raises(
        ConfigurationError, match="WanImageToVideoPipeline samples from an image; give"
    ):
        module.sample(["a"], **size)


def test_clips_are_drawn_while_training_from_their_first_frames(tmp_path):
    module, batch = Animating("ltx"), clips()
    samples = [
        dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)
    ]
    drawing = SampleImages(every_n_steps=1, num_inference_steps=2, guidance_scale=1.0)
    trainer = quiet_trainer(max_steps=1, callbacks=[drawing], default_root_dir=tmp_path)
    trainer.fit(module, DataLoader(samples, batch_size=3))
    first = (batch["video"][:, :, 0] + 1) * 127.5
    torch.testing.assert_close(drawing.conditions.float(), first, rtol=0, atol=0.51)
    with Image.open(tmp_path / "samples" / "step_000001.png") as drawn:
        assert drawn.size == (5 * 32, 3 * 32)


@pytest.mark.parametrize("name", ["LTXPipeline", "LTXImageToVideoPipeline"])
def test_noise_that_decoders_are_told_of_is_no_noise_of_training(name, tmp_path):
    """History: LTX from 0.9.1 on was refused, as its call draws noise for its decoder, by default none of it."""
    losses = []
    for is_told in (False, True):
        pipeline = build(name, tmp_path)
        pipeline.vae.register_to_config(timestep_conditioning=is_told)
        module = PipelineDiffusion(pipeline, caption_dropout=0.0, call={"max_sequence_length": 8})
        module.log = lambda *arguments, **settings: None
        module.eval().setup("fit")
        losses.append(loss_of(module, clips()))
    assert torch.equal(*losses)
    noisy = {"max_sequence_length": 8, "decode_timestep": 0.05}
    with pytest.raises(ConfigurationError, match="encodings cannot be normalised"):
        PipelineDiffusion(pipeline, call=noisy).setup("fit")


@pytest.mark.parametrize("resample", [Image.Resampling.BILINEAR, Image.Resampling.BICUBIC])
@pytest.mark.parametrize("shape", [(28, 28), (48, 80), (240, 136)])
def test_images_are_prepared_as_their_processor_does(shape, resample):
    size = {"height": 28, "width": 28}
    real = transformers.CLIPImageProcessor(
        size={"shortest_edge": 28}, crop_size=size, resample=resample
    )
    levels = torch.randint(256, (2, 3, *shape), generator=torch.Generator().manual_seed(0)).byte()
    images = [Image.fromarray(x.permute(1, 2, 0).numpy()) for x in levels]
    expected = real(images, return_tensors="pt").pixel_values
    got = tensor_processor(real)(images=levels / 255).pixel_values
    difference = 255 * (got - expected) * torch.tensor(real.image_std)[:, None, None]
    assert difference.abs().max() < 2.01
    assert (difference.abs() > 0.5).float().mean() < 0.15
    assert is_followed(real)
    real.do_rescale, real.rescale_factor = True, 1.0
    assert not is_followed(real)


# ------------------------------------------------------------------ what is refused


def test_clips_that_are_missing_or_of_other_lengths_are_named():
    module, batch = module_of("ltx"), clips(6)
    with pytest.raises(ConfigurationError, match=r"of 5, 9, 13, \.\.\. frames, .* have 6; take 5"):
        loss_of(module, batch)
    with pytest.raises(ConfigurationError, match=r"of 5, 9, 13, \.\.\. frames, .* have 1; take 5"):
        loss_of(module, clips(1))
    images = {"image": batch["video"][:, :, 0], "caption": CAPTIONS}
    with pytest.raises(
        ConfigurationError, match=r"with 'video', .*\(data.num_frames\); this one has"
    ):
        loss_of(module, images)


def test_noise_for_other_pipelines_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="expected two numbers"):
        Animating("ltx", image_noise=[0.1])
    build("LTXPipeline", tmp_path / "parts").save_pretrained(tmp_path / "ltx")
    with pytest.raises(ConfigurationError, match="an image, which LTXPipeline does not"):
        LatentDiffusion.from_pretrained(tmp_path / "ltx", image_noise=[-3.0, 0.5])
    options = {"image_noise": [-3.0, 0.5], "pipeline_class": "LTXImageToVideoPipeline"}
    module = LatentDiffusion.from_pretrained(tmp_path / "ltx", **options)
    assert module.step.image_noise == (-3.0, 0.5)
    module.save_pretrained(tmp_path / "saved")
    assert LatentDiffusion.from_pretrained(tmp_path / "saved").step.animates
    with pytest.raises(ConfigurationError, match="pipeline_class names the pipeline 'LTX'"):
        LatentDiffusion.from_pretrained(tmp_path / "ltx", pipeline_class="LTX")


@pytest.mark.parametrize("kind", ["ltx", row("wan22"), row("hunyuan")])
def test_adapters_open_in_diffusers(kind, tmp_path):
    adapted = module_of(kind, lora=Lora(rank=2, alpha=6))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_B" in name:
                parameter.normal_(std=0.3)
    adapted.save_lora(tmp_path / "lora")
    plain = pipeline_of(kind, tmp_path / "again")
    plain.load_lora_weights(tmp_path / "lora")
    if kind == "wan22":
        folder = tmp_path / "lora" / "transformer_2"
        plain.load_lora_weights(folder, load_into_transformer_2=True)
    image = Image.effect_noise((32, 32), 100).convert("RGB")
    size = {
        "height": 32,
        "width": 32,
        "num_frames": 5,
        "num_inference_steps": 2,
        **adapted.hparams.call,
    }

    def drawn(pipeline):
        noise = torch.Generator().manual_seed(1)
        return pipeline(image, "a", generator=noise, output_type="pt", **size).frames

    expected = drawn(adapted.pipeline)
    assert not torch.allclose(drawn(pipeline_of(kind, tmp_path / "bare")), expected)
    # Decoders enlarge rounding, of 5e-7 in the latents of HunyuanVideo.
    torch.testing.assert_close(drawn(plain), expected, rtol=0, atol=2e-5)
