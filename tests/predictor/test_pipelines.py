"""Pipelines and arguments that nothing in the package knows of: their own loop draws, as in diffusers."""

import contextlib
import functools
import json
import shutil
from collections import Counter
from types import SimpleNamespace

import diffusers
import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.vae import Decoder, Encoder
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import PreTrainedModel

from lightning_diffpipe.errors import CheckpointError, ConfigurationError
from lightning_diffpipe.model_sources import check_request, open_source
from lightning_diffpipe.predictor import Predictor
from lightning_diffpipe.sampling.call import Call
from lightning_diffpipe.sampling.loop import Step, with_own_generators
from lightning_diffpipe.sampling.methods import MethodOptions
from lightning_diffpipe.sampling.source import Settings
from tests.modules.tiny_parts import save_checkpoint, tiny_cascade
from tests.predictor import tiny_pipelines as tiny
from tests.predictor.scenarios import BothBands, draw_each, failure_of_each_rank, latents_of_each
from tests.predictor.tiny_pipelines import build, options_of, prompts_of, random_image, unet, vae
from tests.ranks import run_ranks
from tests.rows import row
from tests.zoo.case import perturb
from tests.zoo.pipelines import build as build_any
from tests.zoo.sample_pipelines import drawn_by_two

SETTINGS = {"num_inference_steps": 4, "guidance_scale": 4.0}
SIZE = {"height": 32, "width": 32}


def mask():
    values = np.zeros((32, 32), dtype=np.uint8)
    values[8:24, 4:20] = 255
    return Image.fromarray(values)


def perturbed(part):
    perturb(part, torch.Generator().manual_seed(3))
    return part.eval()


def img2img(folder):
    parts = build("stable_diffusion", folder).components
    options = {"image": random_image(), "strength": 0.6}
    return diffusers.StableDiffusionImg2ImgPipeline(**parts, requires_safety_checker=False), options


def inpainting(folder):
    """With a U-Net that is given masks, in channels after the latents."""
    parts = build("stable_diffusion", folder).components | {"unet": perturbed(unet(in_channels=9))}
    options = {"image": random_image(), "mask_image": mask(), **SIZE}
    return diffusers.StableDiffusionInpaintPipeline(**parts, requires_safety_checker=False), options


def inpainting_by_mixing(folder):
    """Latents outside of the mask are replaced after each step, so that steps begin with others than they left."""
    parts = build("stable_diffusion", folder).components
    options = {"image": random_image(), "mask_image": mask(), "strength": 0.9, **SIZE}
    return diffusers.StableDiffusionInpaintPipeline(**parts, requires_safety_checker=False), options


def controlnet(folder):
    parts = build("stable_diffusion", folder).components
    control = diffusers.ControlNetModel.from_unet(
        parts["unet"], conditioning_embedding_out_channels=(4, 8)
    )
    pipeline = diffusers.StableDiffusionControlNetPipeline(
        **parts, controlnet=perturbed(control), requires_safety_checker=False
    )
    return pipeline, {"image": random_image(), **SIZE}


def several_controlnets(folder):
    """In a folder for each, which are one part; one of them stops early. History: such folders were not opened."""
    parts = build("stable_diffusion", folder).components
    controls = [
        perturbed(
            diffusers.ControlNetModel.from_unet(
                parts["unet"], conditioning_embedding_out_channels=(4, 8)
            )
        )
        for _ in range(2)
    ]
    for parameter in controls[1].parameters():
        parameter.data.mul_(0.5)
    pipeline = diffusers.StableDiffusionControlNetPipeline(
        **parts, controlnet=controls, requires_safety_checker=False
    )
    return pipeline, {
        "image": [random_image(), mask()],
        "controlnet_conditioning_scale": [1.0, 0.7],
        "control_guidance_end": [0.5, 1.0],
        **SIZE,
    }


def base(folder):
    """The first of two denoisers: hands its latents on after half of the steps."""
    return build("sdxl", folder), {**SIZE, "denoising_end": 0.5, "output_type": "latent"}


def refiner(folder):
    """The second of two denoisers: goes on from latents, for the last steps."""
    parts = build("sdxl", folder).components
    parts["unet"] = perturbed(
        unet(
            cross_attention_dim=16,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=16 + 5 * 8,
        )
    )
    parts |= {"text_encoder": None, "tokenizer": None}
    pipeline = diffusers.StableDiffusionXLImg2ImgPipeline(
        **parts, requires_aesthetics_score=True, add_watermarker=False
    )
    generator = torch.Generator().manual_seed(8)
    return pipeline, {
        "image": torch.randn(2, 4, 16, 16, generator=generator),
        "denoising_start": 0.5,
    }


def sd3_img2img(folder):
    parts = build("sd3", folder).components
    options = {"image": random_image(), "strength": 0.8, "max_sequence_length": 8}
    return diffusers.StableDiffusion3Img2ImgPipeline(**parts), options


def two_transformers(folder):
    """Wan 2.2: one for the noisy steps, another one for the others."""
    return build("wan_experts", folder), options_of("wan")


def sd3_controlnet(folder):
    """Residuals for each block of a transformer."""
    parts = build("sd3", folder).components
    control = diffusers.SD3ControlNetModel.from_config(
        dict(parts["transformer"].config), num_layers=2, extra_conditioning_channels=0
    )
    pipeline = diffusers.StableDiffusion3ControlNetPipeline(**parts, controlnet=perturbed(control))
    return pipeline, {"control_image": random_image(), **options_of("sd3")}


def rescaled_video(folder):
    """Guidance of a transformer, rescaled by the deviation of all tokens."""
    sizes = {"height": 32, "width": 32, "num_frames": 5, "max_sequence_length": 8}
    return build_any("LTXPipeline", folder), {**sizes, "guidance_rescale": 0.7}


def rescaled(folder):
    return build("stable_diffusion", folder), {**SIZE, "guidance_rescale": 0.5}


def samples_in_a_list(folder):
    """A denoiser that takes each sample as a tensor, and each prompt."""
    return build_any("ZImagePipeline", folder), {**SIZE, "max_sequence_length": 8}


def with_timesteps(folder):
    return build("stable_diffusion", folder), {**SIZE, "timesteps": [901, 601, 301]}


def with_sigmas(folder):
    return build("flux", folder), {**options_of("flux"), "sigmas": [1.0, 0.7, 0.3]}


KINDS = {
    f.__name__: f
    for f in (
        img2img, inpainting, inpainting_by_mixing, controlnet, several_controlnets, base, refiner, sd3_img2img,
        sd3_controlnet, two_transformers, rescaled, rescaled_video, with_timesteps,
        with_sigmas, samples_in_a_list,
    )
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folder, options and images of diffusers alone, by the name of the kind."""
    made = {}

    def saved(kind):
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            pipeline, options = KINDS[kind](folder / "vocabularies")
            pipeline.save_pretrained(folder / "pipeline")
            path = folder / "pipeline"
            made[kind] = path, options, by_diffusers(path, **options)
        return made[kind]

    return saved


by_diffusers = functools.partial(tiny.by_diffusers, **SETTINGS)


def same(found, expected):
    return np.array_equal(
        np.asarray([np.asarray(x) for x in found]), np.asarray([np.asarray(x) for x in expected])
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_one_process_draws_what_diffusers_draws(kind, saved):
    path, options, expected = saved(kind)
    predictor = Predictor.from_pretrained(path, "single")
    torch.manual_seed(0)
    found = predictor(prompts_of("any"), **SETTINGS, **options)
    assert same(found, expected)
    assert np.std([np.asarray(each) for each in found]) > 0.01


TWO_RANKS = [
    ("img2img", {"method": "single"}), ("inpainting", {"method": "distrifusion", "warmup_steps": 9}),
    ("inpainting_by_mixing", {"method": "single", "guidance": 2}),
    ("controlnet", {"method": "distrifusion", "warmup_steps": 9}),
    ("several_controlnets", {"method": "distrifusion", "warmup_steps": 9}),
    ("base", {"method": "distrifusion", "warmup_steps": 9}), ("base", {"method": "single", "guidance": 2}),
    ("refiner", {"method": "distrifusion", "warmup_steps": 9}),
    ("sd3_img2img", {"method": "pipefusion", "num_patches": 1}), ("two_transformers", {"method": "sequence"}),
    ("two_transformers", {"method": "pipefusion", "num_patches": 2, "warmup_steps": 9}),
    ("sd3_controlnet", {"method": "pipefusion", "num_patches": 1}),
    ("rescaled_video", {"method": "pipefusion", "num_patches": 1}),
    ("rescaled", {"method": "distrifusion", "warmup_steps": 9}),
    ("with_timesteps", {"method": "distrifusion", "warmup_steps": 9}),
    ("with_sigmas", {"method": "pipefusion", "warmup_steps": 9}), ("samples_in_a_list", {"method": "sequence"}),
    ("samples_in_a_list", {"method": "pipefusion", "warmup_steps": 9}),
]  # fmt: skip
CHOSEN = [(kind, {"method": "auto"}) for kind in KINDS]
SHARED = [(kind, {"method": "auto", "data": 1, "guidance": 1}) for kind in KINDS]


@pytest.mark.distributed
@pytest.mark.parametrize(
    "cases", [pytest.param(TWO_RANKS, id="each kind"), row(CHOSEN), row(SHARED)]
)
def test_two_ranks_draw_what_one_process_draws(cases, saved):
    """Prompts, tokens or rows are divided, those of a ControlNet, too."""
    jobs = []
    for kind, options in cases:
        path, arguments, _ = saved(kind)
        jobs.append((path, prompts_of("any"), {**SETTINGS, **arguments}, options))
    first, second = run_ranks(draw_each, 2, jobs)
    assert all(second)
    for (kind, options), (found, _) in zip(cases, first, strict=True):
        expected = np.asarray([np.asarray(each) for each in saved(kind)[2]])
        difference = np.abs(found.astype(float) - expected.astype(float)).max()
        rounding = 1 if found.dtype == np.uint8 else 1e-5 * max(1.0, np.abs(expected).max())
        assert difference <= rounding, (kind, options)


@pytest.mark.distributed
def test_patches_on_two_ranks_equal_one_rank(saved):
    """A ControlNet runs patch by patch; guidance is rescaled with later patches of the step before.

    Each of two denoisers has a sampler warm-up of its own.
    """
    kinds, jobs = (
        (
            "sd3_img2img", "sd3_controlnet", "rescaled_video", "two_transformers", "samples_in_a_list",
        ),
        [],
    )  # fmt: skip
    for kind in kinds:
        path, options, _ = saved(kind)
        patches = {"method": "pipefusion", "num_patches": 2}
        jobs.append((path, prompts_of("any"), {**SETTINGS, **options}, patches))
    drawn, _ = run_ranks(draw_each, 2, jobs)
    for kind, (found, _), (alone, _) in zip(kinds, drawn, draw_each(0, jobs), strict=True):
        assert (found == alone).all(), kind
        assert not same(found, saved(kind)[2]), kind


@pytest.mark.distributed
def test_bands_of_several_controlnets_equal_the_emulator(saved, monkeypatch):
    """Each band of the U-Net with that of all its ControlNets, as threads of one process: the same bits."""
    path, options, _ = saved("several_controlnets")
    bands = {"method": "distrifusion", "warmup_steps": 1}
    job = (path, prompts_of("any"), {**SETTINGS, **options})
    found = run_ranks(latents_of_each, 2, [(*job, bands)])
    by_one = [(*job, {"method": "single"})]
    (exact,) = latents_of_each(0, by_one)
    monkeypatch.setattr("lightning_diffpipe.sampling.methods.make_sampler", BothBands)
    (expected,) = latents_of_each(0, by_one)
    assert all(torch.equal(latents, expected) for (latents,) in found)
    assert (expected - exact).norm() > 1e-4 * exact.norm(), "staleness does not show"


def draw_and_refine(rank, first, second, prompts, jobs):
    """Latents of one pipeline, halfway, are given on to another one on all ranks, as the documentation says."""
    drawn = []
    for options in jobs:
        with (
            Predictor.from_pretrained(first, **options) as base,
            Predictor.from_pretrained(second, **options) as refiner,
        ):
            torch.manual_seed(rank)
            settings = {**SETTINGS, **SIZE, "denoising_end": 0.5, "output_type": "latent"}
            shared = [base(prompts, **settings)]
            torch.distributed.broadcast_object_list(shared)
            settings = {**SETTINGS, "denoising_start": 0.5, "output_type": "np"}
            drawn.append(refiner(prompts, image=shared[0], **settings))
    return drawn


@pytest.mark.distributed
def test_a_base_and_its_refiner_on_two_ranks_draw_what_diffusers_draws(saved):
    (first, _, latents), (second, _, _) = saved("base"), saved("refiner")
    given = {"image": torch.as_tensor(latents), "denoising_start": 0.5, "output_type": "np"}
    expected = by_diffusers(second, **given)
    jobs = [{"method": "single"}, {"method": "single", "guidance": 2}]
    jobs.append({"method": "distrifusion", "warmup_steps": 9})
    found, others = run_ranks(draw_and_refine, 2, first, second, prompts_of("any"), jobs)
    assert others == [None] * len(jobs)
    for options, images in zip(jobs, found, strict=True):
        assert np.abs(images - expected).max() <= 1e-4, options
    unrefined = by_diffusers(second, **given | {"image": torch.zeros_like(given["image"])})
    assert np.abs(unrefined - expected).max() > 0.1, "the latents of the first do not show"


@contextlib.contextmanager
def counted():
    """How often text encoders and the two halves of autoencoders are called, by their classes."""
    counts = Counter()

    def count(module, arguments):
        if isinstance(module, PreTrainedModel | Encoder | Decoder):
            counts[type(module).__name__] += 1

    handle = register_module_forward_pre_hook(count)
    try:
        yield counts
    finally:
        handle.remove()


@pytest.mark.slow
def test_head_and_tail_run_once_for_all_patches(saved):
    """Three text encoders, for prompts and without, and an autoencoder, which encodes an image and decodes two."""
    path, options, _ = saved("sd3_img2img")
    with counted() as expected:
        by_diffusers(path, **options)
    assert expected["Encoder"] == expected["Decoder"] == 1
    assert expected["T5EncoderModel"] == 2
    predictor = Predictor.from_pretrained(path, "pipefusion", num_patches=2)
    for _ in range(2):
        with counted() as counts:
            predictor(prompts_of("any"), **SETTINGS, **options)
        assert counts == expected


@pytest.mark.parametrize("kind", ["controlnet", "sd3_controlnet"])
def test_a_controlnet_is_shared_with_the_denoiser_that_reads_it(kind, saved):
    path, options, _ = saved(kind)
    predictor = Predictor.from_pretrained(path, "single")
    calls = []
    sample = predictor._sample
    predictor._sample = lambda packed: calls.append(packed) or sample(packed)
    predictor(prompts_of("any"), **SETTINGS, **options)
    assert calls[0].mixes == frozenset()
    [(name, given)] = calls[0].steps[0][0]["controls"]
    assert name == "controlnet"
    assert given["controlnet_cond"].ndim == 4


def test_what_cannot_be_shared_is_refused_by_name(saved):
    path, arguments, _ = saved("rescaled_video")
    predictor = Predictor.from_pretrained(path, num_patches=2, warmup_steps=0)
    with pytest.raises(ConfigurationError, match="LTXPipeline brings rows of predictions together"):
        predictor(prompts_of("any"), **SETTINGS, **arguments)


@pytest.mark.parametrize(
    ("method", "remedy"), [("sequence", "with method=single$"), ("single", "with guidance=1$")]
)
def test_steps_that_differ_are_refused_with_another_method(method, remedy):
    """History: halves of guidance with method=single were told to take method=single."""
    phase = SimpleNamespace(shape=(2, 4, 8, 8), denoisers=["transformer"], num_calls=[1, 2])
    call = SimpleNamespace(pipeline=SimpleNamespace(name="APipeline"), phases=[phase])
    with pytest.raises(ConfigurationError, match=f"transformer 1, 2 times.*sample {remedy}"):
        Call.refuse_steps(call, method)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["np", "pt", "latent"])
def test_types_of_output(kind, folder_of):
    path, options = folder_of("stable_diffusion"), {**SIZE, "output_type": kind}
    found = Predictor.from_pretrained(path, "single")(prompts_of("any"), **SETTINGS, **options)
    expected = by_diffusers(path, **options)
    assert type(found) is type(expected)
    assert same(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["PNDMScheduler", "HeunDiscreteScheduler", "KDPM2DiscreteScheduler", "LCMScheduler"]
)
def test_schedulers_that_step_more_often_than_asked(name, folder_of, tmp_path):
    pipeline = diffusers.DiffusionPipeline.from_pretrained(str(folder_of("stable_diffusion")))
    config = pipeline.scheduler.config
    pipeline.scheduler = getattr(diffusers, name).from_config(config)
    pipeline.save_pretrained(tmp_path)
    steps = []
    with Predictor.from_pretrained(tmp_path, "single") as predictor:
        found = predictor(
            prompts_of("any"), on_step=lambda *each: steps.append(each), **SETTINGS, **SIZE
        )
    assert same(found, by_diffusers(tmp_path, **SIZE))
    assert steps == [(i + 1, len(steps)) for i in range(len(steps))]


def test_a_callback_changes_latents_and_guidance(folder_of):
    seen = []

    def callback(pipeline, index, timestep, kwargs):
        seen.append(index)
        if index == 1:
            kwargs["latents"] = kwargs["latents"] * 0.9
        return kwargs

    options = {**SIZE, "callback_on_step_end": callback}
    path = folder_of("stable_diffusion")
    found = Predictor.from_pretrained(path, "single")(prompts_of("any"), **SETTINGS, **options)
    assert seen == [0, 1, 2, 3]
    assert same(found, by_diffusers(path, **options))
    with pytest.raises(ConfigurationError, match="under PipeFusion ends for one patch after"):
        Predictor.from_pretrained(folder_of("pixart"), num_patches=2)(
            prompts_of("any"), **SETTINGS, **options_of("pixart"), callback=callback
        )


def test_a_callback_is_refused_where_ranks_decide_the_number_of_patches(folder_of):
    """History: it was refused for a number that is given only, and else changed latents in the middle of a step."""
    request = {"prompts": ["a"], **SETTINGS, **options_of("sd3")}
    request["callback_on_step_end"] = lambda pipeline, index, timestep, kwargs: kwargs
    with pytest.raises(ConfigurationError, match="under PipeFusion ends for one patch after"):
        drawn_by_two(folder_of("sd3"), MethodOptions("pipefusion"), [request])


def test_a_callback_may_interrupt_the_loop(folder_of):
    """History: it ended in "ended its loop earlier than its first run had shown"."""

    def stop(pipeline, index, timestep, kwargs):
        pipeline._interrupt = index == 1
        return kwargs

    options = {**SIZE, "callback_on_step_end": stop}
    path = folder_of("stable_diffusion")
    with Predictor.from_pretrained(path, "single") as predictor:
        found = predictor(prompts_of("any"), **SETTINGS, **options)
    assert same(found, by_diffusers(path, **options))
    assert not same(found, by_diffusers(path, **SIZE))


class Careless(diffusers.PixArtSigmaPipeline):
    """Draws its start noise from the default generator."""

    def prepare_latents(self, *args):
        return super().prepare_latents(*args[:6], None, *args[7:])


@pytest.mark.slow
def test_every_patch_begins_with_the_same_noise_of_the_default_generator(
    folder_of, tmp_path, monkeypatch
):
    """History: the loop of each patch drew other numbers before its first step."""
    pipeline = diffusers.DiffusionPipeline.from_pretrained(str(folder_of("pixart")))
    Careless(**pipeline.components).save_pretrained(tmp_path)
    monkeypatch.setattr(diffusers, "Careless", Careless, raising=False)
    torch.manual_seed(5)
    noise = torch.randn(2, 4, 16, 16)
    settings = {**SETTINGS, **options_of("pixart"), "output_type": "latent"}
    patches = {"num_patches": 2, "warmup_steps": 0}
    expected = Predictor.from_pretrained(folder_of("pixart"), **patches)(
        prompts_of("any"), latents=noise, **settings
    )
    predictor = Predictor.from_pretrained(tmp_path, **patches)
    torch.manual_seed(5)
    found = predictor(prompts_of("any"), **settings)
    assert found.shape[-1] == 16
    assert torch.equal(found, expected)


def test_one_side_that_a_pipeline_would_ignore_is_refused(folder_of):
    """History: Stable Diffusion drew its own size, as it does in diffusers, without a word."""
    predictor = Predictor.from_pretrained(folder_of("stable_diffusion"), "single")
    with pytest.raises(
        ConfigurationError, match=r"would ignore height=64 without a width, and sample .* give both"
    ):
        predictor(prompts_of("any"), **SETTINGS, height=64)
    [image] = Predictor.from_pretrained(folder_of("sdxl"), "single")(["a"], **SETTINGS, height=64)
    assert image.size == (32, 64)


@pytest.mark.slow
def test_embeddings_take_the_place_of_prompts_and_a_generator_that_of_the_seed(folder_of):
    draw = torch.Generator().manual_seed(1)
    embeds = {
        n: torch.randn(2, 12, 16, generator=draw)
        for n in ("prompt_embeds", "negative_prompt_embeds")
    }
    path, generators = (
        folder_of("stable_diffusion"),
        [torch.Generator().manual_seed(4) for _ in "ab"],
    )
    predictor = Predictor.from_pretrained(path, "single")
    for _ in range(2):  # the generator goes on, as in diffusers
        found = predictor(None, **SETTINGS, **SIZE, **embeds, generator=generators[0])
        expected = by_diffusers(path, **SIZE, **embeds, generator=generators[1])
        assert same(found, expected)
    several = [[torch.Generator().manual_seed(i) for i in range(2)] for _ in "ab"]
    for _ in range(2):
        found = predictor(prompts_of("any"), **SETTINGS, **SIZE, generator=several[0])
        assert same(found, by_diffusers(path, **SIZE, generator=several[1]))


def test_samples_may_share_a_generator(folder_of):
    """History: each drew from a copy of it, and all got the same noise."""
    path, ours, theirs = folder_of("stable_diffusion"), *(torch.Generator() for _ in "ab")
    predictor = Predictor.from_pretrained(path, "single")
    found = predictor(prompts_of("any"), **SETTINGS, **SIZE, generator=[ours.manual_seed(4)] * 2)
    assert same(found, by_diffusers(path, **SIZE, generator=[theirs.manual_seed(4)] * 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("stable_diffusion", {"latents": torch.full((2, 4, 16, 16), torch.nan)},
         "latents must be finite; 2048 of its 2048 entries are infinite or NaN"),
        ("stable_diffusion", {"prompt_embeds": torch.eye(8, 16)[None].log()},
         "prompt_embeds must be finite; 120 of its 128 entries"),
        ("stable_diffusion", {"ip_adapter_image_embeds": [torch.full((1, 4), torch.inf)]},
         "ip_adapter_image_embeds must be finite; 4 of its 4 entries"),
        ("stable_diffusion", {"latents": torch.zeros(2, 3, 16, 16)},
         r"cannot be given latents=\(2, 3, 16, 16\): its unet fails on what becomes of that"),
        ("stable_diffusion", {"latents": torch.zeros(3, 4, 16, 16)}, r"latents=\(3, 4, 16, 16\)"),
        ("stable_diffusion", {"prompt_embeds": torch.zeros(1, 8, 5), "guidance_scale": 1.0},
         r"cannot be given prompt_embeds=\(1, 8, 5\): its unet fails"),
        ("pixart", {"latents": torch.zeros(3, 4, 16, 16)}, r"latents=\(3, 4, 16, 16\): its transformer"),
    ],
)  # fmt: skip
def test_tensors_that_the_denoiser_cannot_take_are_named_before_anything_is_drawn(
    kind, options, message, folder_of, capfd
):
    """History: NaN were final latents that are not finite, please report; wrong shapes an error of torch."""
    predictor = Predictor.from_pretrained(folder_of(kind), "single")
    predictor._sample = lambda *_: pytest.fail("ranks have begun")
    prompts = None if "prompt_embeds" in options else ["a", "b"]
    with pytest.raises(ConfigurationError, match=message):
        predictor(prompts, num_inference_steps=2, **options_of(kind) | options)
    assert "Traceback" not in capfd.readouterr().err, "torch reports what fails on fake tensors"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"callback_on_step_end_tensor_inputs": ["noise"]}, r"tensor_inputs` has to be in .*noise"),
        ({"callback_on_step_end": 3}, "'int' object is not callable"),
        ({"image": random_image(), "strength": 0.1},
         "strength=0.1 of num_inference_steps=4 is less than a step: raise either"),
    ],
)  # fmt: skip
def test_what_no_loop_can_use_is_refused_before_anything_is_drawn(options, message, folder_of):
    """History: what callbacks ask for was checked by each rank in the middle, and ended in a bare ValueError."""
    cls = "StableDiffusionImg2ImgPipeline" if "image" in options else None
    predictor = Predictor.from_pretrained(
        folder_of("stable_diffusion"), "single", pipeline_class=cls
    )
    predictor._sample = lambda *_: pytest.fail("ranks have begun")
    with pytest.raises(ConfigurationError, match=message):
        predictor(["a", "b"], num_inference_steps=4, **options)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["single", "pipefusion"])
def test_a_request_leaves_no_attention_processors_behind(method, tmp_path):
    """History: perturbed-attention guidance had its own in the denoiser from the first run on, and for ever."""
    parts = build("pixart", tmp_path / "words").components
    pipeline = diffusers.PixArtSigmaPAGPipeline(**parts, pag_applied_layers=["blocks.1"])
    pipeline.save_pretrained(tmp_path / "saved")
    options = {"method": method, "warmup_steps": 4} | (
        {"num_patches": 2} if method == "pipefusion" else {}
    )
    predictor = Predictor.from_pretrained(tmp_path / "saved", **options)
    for scale in (3.0, 0.0):
        options = options_of("pixart") | {"pag_scale": scale}
        found = predictor(prompts_of("any"), **SETTINGS, **options)
        assert same(found, by_diffusers(tmp_path / "saved", **options))


def test_a_batch_of_perturbed_attention_is_not_cut_into_branches(tmp_path):
    """Its processors take halves of the batch apart: history, of one half they ended in a ValueError."""
    parts = build("pixart", tmp_path / "words").components
    pipeline = diffusers.PixArtSigmaPAGPipeline(**parts, pag_applied_layers=["blocks.1"])
    pipeline.save_pretrained(tmp_path / "saved")
    predictor = Predictor.from_pretrained(tmp_path / "saved", "single")
    calls, sample = [], predictor._sample
    predictor._sample = lambda packed: calls.append(packed) or sample(packed)
    predictor(["a"], 2, guidance_scale=1.0, pag_scale=3.0, **options_of("pixart"))
    assert calls[0].expansion == 2
    assert calls[0].request(predictor.source.denoiser).branches_in_batch == 1
    with pytest.raises(ConfigurationError, match="has attention processors of its own"):
        calls[0].branch(0)


@pytest.mark.slow
def test_a_request_that_failed_leaves_the_decoder_in_its_type(folder_of, tmp_path):
    """History: SDXL's stayed in float32 after its first run, and the next request ended in a traceback."""
    pipeline = diffusers.DiffusionPipeline.from_pretrained(str(folder_of("sdxl")))
    pipeline.vae.register_to_config(force_upcast=True)
    pipeline.save_pretrained(tmp_path)
    predictor = Predictor.from_pretrained(tmp_path, "single", dtype=torch.float16)

    def stop(done, steps):
        raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        predictor(prompts_of("any"), **SETTINGS, **SIZE, on_step=stop)
    assert predictor.source._pipeline.vae.dtype == torch.float16
    assert predictor(prompts_of("any"), **SETTINGS, **SIZE)


def test_a_scheduler_whose_numbers_are_on_the_device_counts_along():
    """`meta` stands for a GPU: history, zeros on the host were stepped by flow matching's sigmas there."""
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(2, device="meta")
    scheduler.set_begin_index(0)
    latents = torch.zeros(1, 4, 8, 8, device="meta")
    given = {"self": scheduler, "model_output": latents, "timestep": scheduler.timesteps[0]}
    Step(type(scheduler).step, given | {"sample": latents}).count()
    assert scheduler.step_index == 1


def test_a_generator_of_a_gpu_is_that_of_the_own_one_on_other_ranks(monkeypatch):
    """History: rank 1 drew with a generator of rank 0's GPU for tensors of its own, which torch refuses."""
    made = []

    class Recorded(torch.Generator):
        def __new__(cls, device="cpu"):
            made.append(str(device))
            return super().__new__(cls)

    class OfGpu(Recorded):
        device = torch.device("cuda:0")

    monkeypatch.setattr(torch, "Generator", Recorded)
    taken = {"generator": [OfGpu(), Recorded()]}
    made.clear()
    with_own_generators(taken, torch.device("cuda:1"))
    with_own_generators(taken)
    assert made == ["cuda:1", "cpu", "cuda:0", "cpu"]


class Own(diffusers.StableDiffusionPipeline):
    """A pipeline of one's own: guidance by a call for each branch, and momentum."""

    def seen(self, latents):
        return latents

    @torch.no_grad()
    def __call__(
        self, prompt, num_inference_steps=4, guidance_scale=4.0, generator=None, output_type="pil"
    ):
        given, free = self.encode_prompt(prompt, "cpu", 1, True)
        self.scheduler.set_timesteps(num_inference_steps)
        latents = torch.randn(len(prompt), 4, 16, 16, generator=generator)
        latents, momentum = latents * self.scheduler.init_noise_sigma, 0.0
        for t in self.scheduler.timesteps:
            x = self.scheduler.scale_model_input(self.seen(latents), t)
            a, b = (self.unet(x, t, encoder_hidden_states=each).sample for each in (given, free))
            momentum = (a - b) + 0.5 * momentum
            latents = self.scheduler.step(b + guidance_scale * momentum, t, latents).prev_sample
        images = self.vae.decode(latents / self.vae.config.scaling_factor).sample
        return diffusers.ImagePipelineOutput(
            self.image_processor.postprocess(images, output_type=output_type)
        )


class Doubled(Own):
    """Asks a ControlNet once in each step, and two denoisers with its residuals."""

    def __init__(self, vae, text_encoder, tokenizer, unet, scheduler, unet_2, controlnet):
        diffusers.DiffusionPipeline.__init__(self)
        self.register_modules(
            vae=vae, text_encoder=text_encoder, tokenizer=tokenizer, unet=unet,
            scheduler=scheduler, unet_2=unet_2, controlnet=controlnet,
        )  # fmt: skip
        self.image_processor = diffusers.image_processor.VaeImageProcessor(vae_scale_factor=2)

    @torch.no_grad()
    def __call__(self, prompt, num_inference_steps=4, guidance_scale=4.0, generator=None, **_):
        given, _ = self.encode_prompt(prompt, "cpu", 1, False)
        self.scheduler.set_timesteps(num_inference_steps)
        latents = torch.randn(len(prompt), 4, 16, 16, generator=generator)
        condition = (
            torch.linspace(0, 1, 32 * 32 * 3).reshape(1, 3, 32, 32).expand(len(prompt), -1, -1, -1)
        )
        for t in self.scheduler.timesteps:
            x = self.scheduler.scale_model_input(latents, t)
            down, mid = self.controlnet(x, t, given, condition, return_dict=False)
            residuals = {
                "down_block_additional_residuals": down,
                "mid_block_additional_residual": mid,
            }
            parts = (self.unet, self.unet_2)
            a, b = (p(x, t, encoder_hidden_states=given, **residuals).sample for p in parts)
            latents = self.scheduler.step((a + b) / 2, t, latents).prev_sample
        images = self.vae.decode(latents / self.vae.config.scaling_factor).sample
        return diffusers.ImagePipelineOutput(self.image_processor.postprocess(images))


@pytest.mark.slow
def test_two_denoisers_of_a_step_read_one_controlnet(folder_of, tmp_path, monkeypatch):
    """History: the second one was handed `controls`, and ended in a TypeError."""
    pipeline = diffusers.DiffusionPipeline.from_pretrained(str(folder_of("stable_diffusion")))
    control = diffusers.ControlNetModel.from_unet(
        pipeline.unet, conditioning_embedding_out_channels=(4, 8)
    )
    parts = {"unet_2": perturbed(unet()), "controlnet": perturbed(control)}
    for name in ("vae", "text_encoder", "tokenizer", "unet", "scheduler"):
        parts[name] = getattr(pipeline, name)
    own = Doubled(**parts)
    own.save_pretrained(tmp_path)
    monkeypatch.setattr(diffusers, "Doubled", Doubled, raising=False)
    expected = own(prompts_of("any"), generator=torch.Generator().manual_seed(0)).images
    predictor = Predictor.from_pretrained(tmp_path, "single")
    assert same(predictor(prompts_of("any"), **SETTINGS), expected)
    with pytest.raises(ConfigurationError, match="denoises with unet and unet_2"):
        Predictor.from_pretrained(tmp_path, "pipefusion", num_patches=2)(
            prompts_of("any"), **SETTINGS
        )


class Centred(Own):
    """Looks at the mean of all rows of the latents."""

    def seen(self, latents):
        return latents - latents.mean(-2, keepdim=True)


def test_latents_whose_rows_are_mixed_are_refused_in_patches(folder_of, tmp_path, monkeypatch):
    pipeline = diffusers.DiffusionPipeline.from_pretrained(str(folder_of("stable_diffusion")))
    Centred(**pipeline.components, requires_safety_checker=False).save_pretrained(tmp_path)
    monkeypatch.setattr(diffusers, "Centred", Centred, raising=False)
    with pytest.raises(ConfigurationError, match="Centred brings rows of the latents together"):
        Predictor.from_pretrained(tmp_path, num_patches=2)(prompts_of("any"), **SETTINGS)


def test_a_pipeline_of_ones_own(folder_of, tmp_path, monkeypatch):
    pipeline = diffusers.DiffusionPipeline.from_pretrained(str(folder_of("stable_diffusion")))
    own = Own(**pipeline.components, requires_safety_checker=False)
    own.save_pretrained(tmp_path)
    own.set_progress_bar_config(disable=True)
    monkeypatch.setattr(diffusers, "Own", Own, raising=False)
    expected = own(prompts_of("any"), generator=torch.Generator().manual_seed(0)).images
    found = Predictor.from_pretrained(tmp_path, "single")(prompts_of("any"), **SETTINGS)
    assert same(found, expected)


def test_parts_of_ones_own_and_an_autoencoder_that_saves_memory(folder_of):
    path = folder_of("stable_diffusion")
    pipeline = diffusers.DiffusionPipeline.from_pretrained(str(path))
    pipeline.scheduler = diffusers.UniPCMultistepScheduler.from_config(pipeline.scheduler.config)
    pipeline.vae = perturbed(vae())
    pipeline.vae.enable_slicing()
    pipeline.vae.enable_tiling()
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    expected = pipeline(prompts_of("any"), **SETTINGS, **SIZE, generator=generator).images
    scheduler = diffusers.UniPCMultistepScheduler.from_config(pipeline.scheduler.config)
    own = {"scheduler": scheduler, "vae": perturbed(vae())}
    own["vae"].load_state_dict(pipeline.vae.state_dict())
    with Predictor.from_pretrained(
        path, "single", **own, vae_tiling=True, vae_slicing=True
    ) as predictor:
        assert same(predictor(prompts_of("any"), **SETTINGS, **SIZE), expected)
        assert predictor.source._pipeline.vae.use_tiling
    with pytest.raises(ConfigurationError, match=r"unet=\.\.\. cannot be given"):
        Predictor.from_pretrained(path, "single", unet=pipeline.unet)


def stale_part(folder, to, part):
    """A copy of a pipeline of which one tensor of one part is that of a step before."""
    copied = shutil.copytree(folder, to)
    file = copied / part / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    name = max(tensors)
    save_file(tensors | {name: tensors[name] * 1.00001}, file)
    return copied, name


def test_a_part_that_another_class_of_pipeline_does_not_take_is_not_read(saved, tmp_path):
    path = shutil.copytree(saved("controlnet")[0], tmp_path / "without")
    shutil.rmtree(path / "controlnet")
    Predictor.from_pretrained(path, "single", pipeline_class="StableDiffusionPipeline")


def test_configs_of_all_controlnets_are_compared(saved, tmp_path):
    """History: ranks drew with other configs than rank 0 where these were not those of the first."""
    path, _, _ = saved("several_controlnets")
    digests = []
    for order in ("rgb", "bgr"):
        folder = shutil.copytree(path, tmp_path / order)
        config = folder / "controlnet_1" / "config.json"
        read = json.loads(config.read_text())
        config.write_text(json.dumps(read | {"controlnet_conditioning_channel_order": order}))
        source = open_source(folder, False, torch.device("cpu"), torch.float32)
        digests.append(source.texts("controlnet"))
    assert digests[0] != digests[1]


def test_each_of_several_controlnets_is_looked_at(saved, tmp_path):
    """Where requests are checked, where ranks are compared, and where weights are missing."""
    path, options, _ = saved("several_controlnets")
    settings = Settings(prompts_of("any"), **SETTINGS, options=options)
    source = open_source(path, False, torch.device("cpu"), torch.float32)
    check_request(source, settings)
    old, name = stale_part(path, tmp_path / "stale", "controlnet_1")
    stale = open_source(old, False, torch.device("cpu"), torch.float32)
    assert source.texts("controlnet") != stale.texts("controlnet")
    file = old / "controlnet_1" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    save_file({n: x for n, x in tensors.items() if n != name}, file)
    with pytest.raises(
        CheckpointError, match=f"controlnet_1 lacks 1 of .* tensors of ControlNetModel: {name}"
    ):
        Predictor.from_pretrained(old, "single")


@pytest.mark.distributed
def test_ranks_with_another_second_denoiser_or_controlnet_are_refused(tmp_path):
    """History: those of the first denoiser only were compared, and each was drawn with without a word."""
    cases, jobs = [], []
    parts = {"two_transformers": "transformer_2", "sd3_controlnet": "controlnet"}
    for kind, part in parts.items():
        pipeline, options = KINDS[kind](tmp_path / kind)
        path = tmp_path / kind / "saved"
        pipeline.save_pretrained(path)
        old, name = stale_part(path, tmp_path / kind / "stale", part)
        rest = (["a cat 1"], {"num_inference_steps": 3, **options}, {"method": "sequence"})
        cases.append(f"rank 1 has {part}.{name}=")
        jobs.append([(path, *rest), (old, *rest)])
        jobs.append([(path, *rest)] * 2)
    prompts, settings = ["digit four"], {"num_inference_steps": 2}
    cascade = tiny_cascade()
    save_checkpoint(cascade, tmp_path / "cascade.ckpt")
    with torch.no_grad():
        cascade.upscaler.conv_out.bias.mul_(1.001)
    save_checkpoint(cascade, tmp_path / "stale.ckpt")
    files = [tmp_path / name for name in ("cascade.ckpt", "stale.ckpt")]
    jobs.append([(file, prompts, settings, {"method": "single"}) for file in files])
    first, second = run_ranks(failure_of_each_rank, 2, jobs)
    assert first == second
    for i, message in enumerate(cases):
        assert message in first[2 * i]
        assert "; 1 of" in first[2 * i]
        assert first[2 * i + 1] == "no error"
    assert "rank 1 has upscaler.conv_out.bias=" in first[-1]


@pytest.mark.parametrize("fails", [False, True])
def test_no_loop_is_left_behind(fails, folder_of):
    """Loops that are not run to their end would hold activations, or wait in threads for ever."""
    predictor, calls = Predictor.from_pretrained(folder_of("pixart"), num_patches=4), []

    def stop(done, steps):
        raise ValueError("enough")

    sample = predictor._sample
    predictor._sample = lambda packed: calls.append(packed) or sample(packed)
    options = {**SETTINGS, **options_of("pixart"), "on_step": stop if fails else None}
    with pytest.raises(ValueError, match="enough") if fails else contextlib.nullcontext():
        predictor(prompts_of("any"), **options)
    assert calls[0].loop == []
