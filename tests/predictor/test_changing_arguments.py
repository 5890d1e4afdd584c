"""Arguments that change from step to step, or that a pipeline changes in place: drawn as by diffusers."""

import copy
import itertools

import diffusers
import pytest
import torch

from lightning_diffpipe.errors import ConfigurationError, SamplingError
from lightning_diffpipe.predictor import Predictor
from lightning_diffpipe.sampling.methods import MethodOptions
from tests.predictor.tiny_pipelines import options_of, unet, vae
from tests.rows import row
from tests.zoo import sample_pipelines
from tests.zoo.case import perturb

NUM_TOKENS, NUM_STEPS = 32, 4


class Changing(diffusers.DiffusionPipeline):
    """Packed tokens, whose denoiser and scheduler are given what changes in some steps."""

    def __init__(self, transformer, scheduler):
        super().__init__()
        self.register_modules(transformer=transformer, scheduler=scheduler)
        self.notes = []

    @torch.no_grad()
    def __call__(
        self, prompt_embeds, coords, changes=(), steps=(), how="replaced", branches=2, ends_at=9,
        scales=(), generator=None, callback_on_step_end=None,
    ):  # fmt: skip
        num = len(prompt_embeds)
        latents = torch.randn(num, NUM_TOKENS, 8, generator=generator)
        given = {
            "text": prompt_embeds, "coords": coords, "mask": torch.ones(num, 9),
            "time of samples": torch.ones(num, 1), "time of tokens": torch.ones(num, NUM_TOKENS),
        }  # fmt: skip
        given["stepped"] = torch.linspace(0.5, 1.0, num * NUM_TOKENS).reshape(num, NUM_TOKENS)
        if scales:  # as pipelines do with what they are given
            scales[:] = [2 * scale for scale in scales]
            self.notes.append(scales[0])
            given["text"].mul_(sum(self.notes))
        self.scheduler.set_timesteps(NUM_STEPS)
        for index, t in enumerate(self.scheduler.timesteps):
            for name in changes if index in steps else ():
                given[name] = given[name] if how == "in place" else given[name].clone()
                given[name].narrow(1, 0, 4 if given[name].shape[1] > 4 else 1).mul_(0.8)
            copies = branches if index < ends_at else 1

            def of_all(x, copies=copies):
                return torch.cat([x] * copies)

            noise = self.transformer(
                hidden_states=of_all(latents),
                encoder_hidden_states=of_all(given["text"]),
                timestep=of_all(t * given["time of samples"] * given["time of tokens"]),
                encoder_attention_mask=of_all(given["mask"]),
                video_coords=of_all(given["coords"]),
                return_dict=False,
            )[0]
            noise = sum(x * (0.5 + i) for i, x in enumerate(noise.chunk(copies)))
            stepped = {"per_token_timesteps": t * given["stepped"]} if "stepped" in changes else {}
            latents = self.scheduler.step(noise, t, latents, **stepped, return_dict=False)[0]
            if callback_on_step_end is not None:
                tensors = callback_on_step_end(self, index, t, {"prompt_embeds": given["text"]})
                given["text"] = tensors["prompt_embeds"]
        return (latents,)


@pytest.fixture(scope="module")
def changing(tmp_path_factory):
    torch.manual_seed(0)
    transformer = diffusers.LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=2, attention_head_dim=8,
        cross_attention_dim=16, num_layers=2, caption_channels=16,
    )  # fmt: skip
    perturb(transformer, torch.Generator().manual_seed(1))
    folder = tmp_path_factory.mktemp("changing")
    Changing(transformer, diffusers.FlowMatchEulerDiscreteScheduler()).save_pretrained(folder)
    diffusers.Changing = Changing
    yield folder
    del diffusers.Changing


def arguments(**further):
    draw = torch.Generator().manual_seed(2)
    coords = torch.rand(2, 3, NUM_TOKENS, generator=draw) * 8
    return {"prompt_embeds": torch.randn(2, 9, 16, generator=draw), "coords": coords, **further}


def expected_of(folder, given):
    given = copy.deepcopy(given) | {"generator": torch.Generator().manual_seed(0)}
    return Changing.from_pretrained(folder)(**given)[0]


CHANGES = ("text", "coords", "mask", "time of samples", "time of tokens", "stepped")
STEPS = {"each": (1, 2, 3), "last": (3,), "middle": (1,)}
METHODS = (
    {"method": "single"},
    {"method": "sequence"},
    {"method": "pipefusion", "num_patches": 1},
    {"method": "pipefusion", "num_patches": 2, "warmup_steps": 9},
)
ABSENT = {"text_encoder": None, "tokenizer": None, "safety_checker": None}
PRODUCT = itertools.product([(each,) for each in CHANGES], STEPS, ("replaced", "in place"), METHODS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "steps", "how", "options"),
    [(CHANGES, steps, how, METHODS[2]) for steps in STEPS for how in ("replaced", "in place")]
    + [(CHANGES, "middle", "in place", options) for options in METHODS]
    + [row(*each) for each in PRODUCT],
)
def test_arguments_that_change_are_those_of_the_step(changes, steps, how, options, changing):
    """History: PipeFusion stepped every token of every step with the first step's timesteps, 1.7 of 4.8 off."""
    given = arguments(changes=changes, steps=STEPS[steps], how=how)
    found = Predictor.from_pretrained(changing, **options)(None, **given)
    expected = expected_of(changing, given)
    assert torch.equal(found, expected)
    assert not torch.equal(expected, expected_of(changing, arguments()))


@pytest.mark.slow
@pytest.mark.parametrize("options", METHODS[1:3])
def test_a_callback_that_changes_a_text_is_followed(options, changing):
    """History: what blocks had made of the first text was stored for the whole request."""

    def change(pipeline, index, t, tensors):
        return {n: x * 0.5 if index == 1 else x for n, x in tensors.items()}

    given = arguments(callback_on_step_end=change)
    found = Predictor.from_pretrained(changing, **options)(None, **given)
    assert torch.equal(found, expected_of(changing, given))
    assert not torch.equal(found, expected_of(changing, arguments()))


def test_tokens_of_a_patch_are_stepped_with_arguments_of_theirs(changing):
    """History: patches were refused such an argument, or stepped with all of it."""
    given = arguments(changes=("stepped",), steps=(1, 2))
    draw = {"method": "pipefusion", "num_patches": 2, "warmup_steps": 1}
    found = Predictor.from_pretrained(changing, **draw)(None, **given)
    expected = expected_of(changing, given)
    without = expected_of(changing, arguments())
    assert (found - expected).norm() < 0.3 * (without - expected).norm()


@pytest.mark.slow
@pytest.mark.parametrize("options", METHODS)
def test_what_a_pipeline_changes_in_place_no_other_run_sees(options, changing):
    """History: each run of the call, of which there are several, doubled the scales once more."""
    given = arguments(scales=[0.25, 0.5])
    expected, predictor = (
        expected_of(changing, given),
        Predictor.from_pretrained(changing, **options),
    )
    for _ in range(2):
        assert torch.equal(predictor(None, **given), expected)
    assert given["scales"] == [0.25, 0.5]


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "guidance_scale"), [(1.0, 1.0), (0.5, 1.0), (0.5, 5.0)])
def test_answers_of_an_adapter_that_the_pipeline_scales_in_place(scale, guidance_scale, tmp_path):
    """History: the scale was squared, and with guidance the answers were doubled twice, an error of torch."""
    given = request_of_an_adapter(tmp_path) | {
        "adapter_conditioning_scale": scale, "guidance_scale": guidance_scale,
    }  # fmt: skip
    found = Predictor.from_pretrained(tmp_path, "single")(None, **given)
    assert torch.equal(found, drawn_plainly(tmp_path, given))


def request_of_an_adapter(folder):
    """Saves a pipeline with a T2I-Adapter; returns a request."""
    torch.manual_seed(0)
    adapter = diffusers.T2IAdapter(
        in_channels=3, channels=[8, 16], num_res_blocks=1, downscale_factor=2
    )
    pipeline = diffusers.StableDiffusionAdapterPipeline(
        vae=vae(), unet=unet(), adapter=adapter, scheduler=diffusers.DDIMScheduler(),
        feature_extractor=None, requires_safety_checker=False, **ABSENT,
    )  # fmt: skip
    perturb(pipeline.unet, torch.Generator().manual_seed(1))
    pipeline.save_pretrained(folder)
    return {
        "prompt_embeds": torch.randn(1, 5, 16), "negative_prompt_embeds": torch.randn(1, 5, 16),
        "image": torch.rand(1, 3, 32, 32), "height": 32, "width": 32, "num_inference_steps": 2,
        "output_type": "latent",
    }  # fmt: skip


def drawn_plainly(folder, given):
    pipeline = diffusers.StableDiffusionAdapterPipeline.from_pretrained(folder, **ABSENT)
    return pipeline(**given, generator=torch.Generator().manual_seed(0)).images


def test_a_list_that_the_denoiser_takes_apart_is_whole_in_each_run(tmp_path, on_two):
    """History: what rank 0 had compared with had taken the residuals, and its band had none: an AttributeError."""
    given = request_of_an_adapter(tmp_path)
    found = on_two(tmp_path, "synchronous", given)
    torch.testing.assert_close(found, drawn_plainly(tmp_path, given), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("options", METHODS)
def test_guidance_that_ends_in_the_middle_is_drawn_as_in_one_process(options, changing):
    """History: half the batch met what had been computed for all of it, an error of torch."""
    given = arguments(ends_at=2)
    found = Predictor.from_pretrained(changing, **options)(None, **given)
    assert torch.equal(found, expected_of(changing, given))
    assert not torch.equal(found, expected_of(changing, arguments()))


@pytest.fixture
def on_two(monkeypatch):
    """Draws a request on two ranks, each a thread."""
    monkeypatch.setattr(sample_pipelines, "prepared", lambda pipeline: pipeline)

    def draw(folder, method, given, **options):
        request = {"prompts": None, **given}
        return sample_pipelines.drawn_by_two(folder, MethodOptions(method, **options), [request])[0]

    return draw


@pytest.mark.parametrize(
    ("method", "options"),
    [("pipefusion", {"num_patches": 1}), row("sequence", {}), row("single", {"data": 2})],
)
def test_two_ranks_draw_what_changes_from_step_to_step(method, options, changing, on_two):
    given = arguments(changes=CHANGES, steps=(1,), how="in place", ends_at=2)
    found = on_two(changing, method, given, **options)
    torch.testing.assert_close(found, expected_of(changing, given), rtol=1e-5, atol=1e-5)


def test_halves_of_guidance_that_ends_are_refused_before_anything_is_drawn(changing, on_two):
    """History: one half waited for a prediction of another size, which ends the process in gloo."""
    steps = []
    given = arguments(ends_at=2) | {"on_step": lambda *each: steps.append(each)}
    with pytest.raises(
        ConfigurationError, match="in step 2 this request has one that can be divided"
    ):
        on_two(changing, "single", given, guidance=2)
    assert not steps


SKIPPED = {
    "skip_guidance_layers": [1], "skip_layer_guidance_start": -1.0, "skip_layer_guidance_stop": 1.1,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "options"),
    [("pipefusion", {"num_patches": 2, "warmup_steps": 9}), row("sequence", {})],
)
def test_a_step_whose_calls_differ_in_size_is_drawn_on_two_ranks(
    method, options, folder_of, on_two
):
    """History: guidance met half of the first call's rows before the other half was there, and latents were NaN."""
    given = {**options_of("sd3"), **SKIPPED, "num_inference_steps": 3, "output_type": "latent"}
    given["prompts"] = ["a", "b"]
    expected = Predictor.from_pretrained(folder_of("sd3"), "single")(**given)
    found = on_two(folder_of("sd3"), method, given, **options)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(
        ConfigurationError, match=r"in step 0 its two calls have 4 and 2 rows, as with skip"
    ):
        on_two(folder_of("sd3"), "single", given, guidance=2)


def test_a_list_of_numbers_as_long_as_the_prompts_is_shared_by_them(folder_of, on_two):
    """History: of two layers to skip and two prompts, each rank skipped one, and samples were off by a tenth."""
    given = {**options_of("sd3"), **SKIPPED, "num_inference_steps": 3, "output_type": "latent"}
    given |= {"prompts": ["a", "b"], "skip_guidance_layers": [0, 1]}
    expected = Predictor.from_pretrained(folder_of("sd3"), "single")(**given)
    found = on_two(folder_of("sd3"), "single", given, data=2)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["a batch", "a call"])
@pytest.mark.parametrize("options", METHODS[1:3])
def test_a_callback_that_ends_guidance_is_refused_by_name(options, ends, changing, folder_of):
    """History: half of a batch met what had been computed for all of it, an error of torch."""

    def end(pipeline, index, t, tensors):
        pipeline._guidance_scale = 0.0
        if ends == "a call":
            return tensors
        return {name: x.chunk(2)[-1] for name, x in tensors.items()}

    name = "sd3" if ends == "a batch" else "wan"
    given = {**options_of(name), "num_inference_steps": 3, "callback_on_step_end": end}
    names = ["prompt_embeds", "pooled_prompt_embeds"] if ends == "a batch" else ["prompt_embeds"]
    with pytest.raises(ConfigurationError, match="leave the callback out, or sample with method="):
        Predictor.from_pretrained(folder_of(name), **options)(
            ["a"], callback_on_step_end_tensor_inputs=names, **given
        )


def test_final_latents_that_are_not_finite_are_refused(changing):
    with pytest.raises(SamplingError, match=r"not finite .* in float32\): lower guidance"):
        Predictor.from_pretrained(changing, "single")(None, **arguments(scales=[1e38]))
