"""Pipelines that read reference images: losses and gradients of steps written by hand, in double precision."""

from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.modules import Lora, PipelineDiffusion
from tests.graph.emulate import relative_error, take_gradients
from tests.modules.tiny_parts import loss_of, perturb_adapters, tiny_latent_diffusion
from tests.predictor import tiny_pipelines as tiny
from tests.rows import row
from tests.zoo.double import in_double
from tests.zoo.editing import CALLS, batch_of
from tests.zoo.pipelines import build
from tests.zoo.qwen_processor import small_references

QWEN = ["QwenImageEditPipeline", "QwenImageEditPlusPipeline"]
NAMES = ["FluxKontextPipeline", *QWEN]


@pytest.fixture(autouse=True)
def _small():
    with small_references():
        yield


def module_of(name, folder, call=None, **options):
    pipeline = build(name, folder)
    return PipelineDiffusion(pipeline, call=call or CALLS[name], caption_dropout=0.0, **options)


# ------------------------------------------------------------------ steps written by hand


def pixels_of(images, height, width, dtype=np.float32):
    """As pipelines read files, in single precision: scaled by Lanczos, in [-1, 1]."""
    scaled = [Image.fromarray(i).resize((width, height), Image.Resampling.LANCZOS) for i in images]
    levels = np.stack([np.asarray(image, dtype) / 255 for image in scaled])
    return scaled, (2 * torch.from_numpy(levels).permute(0, 3, 1, 2) - 1).double()


def packed(latents):
    """Squares of two by two as tokens."""
    rows, columns = (n // 2 for n in latents.shape[-2:])
    squares = latents.reshape(len(latents), -1, rows, 2, columns, 2).permute(0, 2, 4, 1, 3, 5)
    return squares.reshape(len(latents), rows * columns, -1)


def flow(latents):
    """Noisy latents, times and target, as diffusers' scripts draw them, from the times of its scheduler."""
    u = torch.sigmoid(-torch.randn(len(latents)))
    sigmas = 1 - (u * 1000).long().double() / 1000
    noise = torch.randn(latents.shape)
    wide = sigmas.reshape(-1, *[1] * (latents.ndim - 1))
    return (1 - wide) * latents + wide * noise, sigmas, noise - latents


def by_hand_kontext(m, batch):
    """References are more tokens at the places of a second layer, as in `train_dreambooth_lora_flux_kontext.py`."""
    shift, scale = m.vae.config.shift_factor, m.vae.config.scaling_factor
    latents = (m.vae.encode(batch["image"]).latent_dist.sample() - shift) * scale
    noisy, sigmas, target = flow(latents)
    (images,) = batch["references"]
    _, pixels = pixels_of(images, *images.shape[1:3], np.float64)
    before = (m.vae.encode(pixels).latent_dist.mode() - shift) * scale
    options = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
    clip = m.tokenizer(batch["caption"], max_length=m.tokenizer.model_max_length, **options)
    words = m.tokenizer_2(batch["caption"], max_length=8, **options)

    def places(latents, layer):
        rows, columns = (torch.arange(n // 2) for n in latents.shape[-2:])
        return torch.cartesian_prod(torch.tensor([layer]), rows, columns).double()

    tokens = packed(noisy)
    predicted = m.transformer(
        torch.cat([tokens, packed(before)], 1),
        m.text_encoder_2(words.input_ids)[0],
        m.text_encoder(clip.input_ids).pooler_output,
        sigmas,
        torch.cat([places(noisy, 0), places(before, 1)]),
        torch.zeros(8, 3),
        guidance=torch.ones(len(noisy)) if m.transformer.config.guidance_embeds else None,
    ).sample
    return F.mse_loss(predicted[:, : tokens.shape[1]], packed(target))


def of_vae(m, encoded):
    shape = 1, -1, 1, 1, 1
    mean, std = (
        torch.tensor(getattr(m.vae.config, f"latents_{name}")).reshape(shape).double()
        for name in ("mean", "std")
    )
    return ((encoded - mean) / std)[:, :, 0]


def by_hand_qwen(m, batch, sizes, size_shown, words):
    """One sample at a time: its references are more tokens, and are shown to the text encoder before its words."""
    video = batch["image"].unsqueeze(2)
    latents = of_vae(m, m.vae.encode(video).latent_dist.sample())
    noisy, sigmas, target = flow(latents)
    drop, losses = m.pipeline.prompt_template_encode_start_idx, []
    for i, caption in enumerate(batch["caption"]):
        shown, tokens, shapes = [], [packed(noisy[i : i + 1])], [(1, 4, 4)]
        for images, (height, width) in zip(batch["references"], sizes, strict=True):
            scaled, pixels = pixels_of(images[i : i + 1], height, width)
            encoded = m.vae.encode(pixels.unsqueeze(2)).latent_dist.mode()
            tokens.append(packed(of_vae(m, encoded)))
            shapes.append((1, height // 8, width // 8))
            shown += scaled if size_shown is None else pixels_of(images[i : i + 1], *size_shown)[0]
        text = m.pipeline.prompt_template_encode.format(words.format(caption))
        read = m.processor(text=[text], images=shown, return_tensors="pt")
        given = "input_ids", "attention_mask", "pixel_values", "image_grid_thw"
        read = {name: read[name] for name in given}
        states = m.text_encoder(**read, output_hidden_states=True).hidden_states[-1][:, drop:]
        predicted = m.transformer(
            torch.cat(tokens, 1),
            encoder_hidden_states=states,
            timestep=sigmas[i : i + 1],
            img_shapes=[shapes],
        ).sample
        losses.append(F.mse_loss(predicted[:, :16], packed(target[i : i + 1])))
    return sum(losses) / len(losses)


BY_HAND = {
    "FluxKontextPipeline": by_hand_kontext,
    # 64 x 64 pixels, which the encoder is shown, too
    "QwenImageEditPipeline": lambda m, batch: by_hand_qwen(m, batch, [(64, 64)], None, "{}"),
    # references of their own shapes, of which the encoder is shown smaller ones, by their numbers
    "QwenImageEditPlusPipeline": lambda m, batch: by_hand_qwen(
        m, batch, [(64, 64), (32, 96)], (32, 32),
        "".join(f"Picture {n}: <|vision_start|><|image_pad|><|vision_end|>" for n in (1, 2)) + "{}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients_are_those_of_a_step_written_by_hand(name, tmp_path):
    module, batch = module_of(name, tmp_path).double().eval(), batch_of(name, dtype=torch.float64)
    with in_double():
        module.setup("fit")
        got = loss_of(module, batch)
        got.backward()
        gradients = take_gradients(module)
        torch.manual_seed(0)
        expected = BY_HAND[name](module, batch)
        expected.backward()
        error, where = relative_error(take_gradients(module), gradients)
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=0)
    assert error < 1e-10, where


# ------------------------------------------------------------------ what a pipeline is given


@pytest.mark.parametrize("name", QWEN)
def test_prompts_of_several_lengths_are_states_of_one_length(name, tmp_path):
    """Microbatches of one shape on every stage; what is added is masked."""
    module, batch, lengths = module_of(name, tmp_path).eval(), batch_of(name), []
    module.transformer.register_forward_pre_hook(
        lambda _, args, options: lengths.append(
            (
                options["encoder_hidden_states"].shape[1],
                options["encoder_hidden_states_mask"].sum(1),
            )
        ),
        with_kwargs=True,
    )
    loss_of(module, batch)
    for i in range(3):
        part = {n: x[i : i + 1] for n, x in batch.items() if n != "references"}
        loss_of(module, part | {"references": [each[i : i + 1] for each in batch["references"]]})
    padded, words = zip(*lengths[-4:], strict=True)
    assert len(set(padded)) == 1
    assert words[0].tolist() == [n.item() for n in words[1:]]
    assert len(set(words[0].tolist())) == 3


def test_each_part_is_called_once_for_all_samples(tmp_path):
    """History: a loop over samples called layers as often as a microbatch has samples, which cannot be cut."""
    module, calls = module_of(QWEN[1], tmp_path).eval(), []
    module.setup("fit")
    for part in (module.text_encoder, module.vae.encoder, module.transformer):
        part.register_forward_hook(lambda *_, part=part: calls.append(type(part).__name__))
    with mock.patch.object(type(module.processor), "__call__", autospec=True) as read:
        read.side_effect = type(module.processor).__mro__[1].__call__
        loss_of(module, batch_of(QWEN[1]))
    assert read.call_count == 3
    assert [name.removesuffix("ForConditionalGeneration") for name in calls] == [
        "QwenImageEncoder3d",  # of the images that are learnt
        "Qwen2_5_VL",
        *["QwenImageEncoder3d"] * 2,  # of the first and of the second references
        "QwenImageTransformer2DModel",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_what_a_model_cannot_learn_from_is_named(name, tmp_path):
    module, batch = module_of(name, tmp_path), batch_of(name)
    references = batch.pop("references")
    for wrong in (torch.from_numpy, np.float32):  # the first is what DataLoader makes of arrays
        with pytest.raises(ConfigurationError, match=f"{name} learns from .* numpy arrays, .* got"):
            loss_of(module, batch | {"references": [wrong(each) for each in references]})
    if name in QWEN:
        with pytest.raises(
            ConfigurationError,
            match=rf"{name} learns from batches with 'references', .* has image, cap",
        ):
            loss_of(module, batch)
    else:  # draws without an image, too
        loss_of(module, batch)
    if name != QWEN[1]:
        with pytest.raises(
            ConfigurationError, match=f"{name} edits one image, and each .* 2 refer"
        ):
            loss_of(module, batch | {"references": references * 2})


def test_references_for_a_model_that_edits_nothing_are_refused(tmp_path):
    """As they would be left out without a word."""
    batch = batch_of("FluxKontextPipeline")
    plain = PipelineDiffusion(tiny.build("flux", tmp_path), call={"max_sequence_length": 8})
    with pytest.raises(ConfigurationError, match="FluxPipeline edits no images, and batches have"):
        loss_of(plain, batch)
    with pytest.raises(ConfigurationError, match="LatentDiffusion edits no images"):
        loss_of(tiny_latent_diffusion(), batch)


def test_prompts_that_are_cut_are_warned_of(tmp_path):
    module = module_of(QWEN[0], tmp_path, call={"max_sequence_length": 420}).eval()
    module.setup("fit")
    module.on_train_start()
    with pytest.warns(UserWarning, match="captions have more tokens than the 420 that ByT5Tok"):
        loss_of(module, batch_of(QWEN[0]))


# ------------------------------------------------------------------ adapters and drawing


@pytest.mark.parametrize("name", [NAMES[2], *map(row, NAMES[:2])])
def test_adapters_open_in_diffusers_and_draw_the_same(name, tmp_path):
    module = module_of(name, tmp_path / "parts", lora=Lora(rank=2, alpha=6)).eval()
    plain, batch = build(name, tmp_path / "again"), batch_of(name, 2)
    module.setup("fit")
    perturb_adapters(module)
    module.save_lora(tmp_path / "lora")
    options = {**CALLS[name], "height": 32, "width": 32, "num_inference_steps": 2}
    if name == NAMES[0]:
        options |= {"max_area": 32 * 32, "_auto_resize": False}

    def drawn(pipeline):
        noise, images = torch.Generator().manual_seed(1), []
        for i, caption in enumerate(batch["caption"]):
            files = [Image.fromarray(each[i]) for each in batch["references"]]
            image = files if len(files) > 1 else files[0]
            own = {"prompt": caption, "image": image, "output_type": "pt", "generator": noise}
            images.append(pipeline(**options, **own)[0])
        return torch.cat(images)

    without = drawn(plain)
    plain.load_lora_weights(tmp_path / "lora")
    expected = drawn(plain)
    assert not torch.allclose(expected, without)
    steps = options.pop("num_inference_steps")
    if name == NAMES[0]:  # all at once
        options["generator"] = [torch.Generator().manual_seed(1)] * 2
    else:
        options["generator"] = torch.Generator().manual_seed(1)
    got = module.sample(batch["caption"], steps, condition=batch["references"], **options)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
