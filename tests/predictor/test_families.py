"""Every family against its pipeline: the formulas of one step, and what is left to the pipeline."""

import diffusers
import numpy as np
import pytest
import torch

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.sampling.families import family_of, intercepted
from lightning_diffpipe.sampling.families.source import Settings, draw_with
from lightning_diffpipe.sampling.one_process import OneProcess
from tests.predictor.tiny_pipelines import (
    PIPELINES,
    build,
    drawn_by,
    options_of,
    prompts_of,
)


def draw(pipeline, name, sample, guidance_scale=4.0, steps=3, **options):
    """Calls the pipeline with its loop replaced by `sample(call)`."""
    family = family_of(type(pipeline).__name__)
    guidance = {
        "scale": guidance_scale,
        "rescale": options.get("guidance_rescale", 0.0),
        "true_scale": options.get("true_cfg_scale", 1.0),
    }
    denoiser = getattr(pipeline, family.denoiser)
    with intercepted(family, denoiser, pipeline.scheduler, guidance, sample):
        return plain(pipeline, name, guidance_scale, steps, **options)


def plain(pipeline, name, guidance_scale=4.0, steps=3, **options):
    option = "class_labels" if name == "dit" else "prompt"
    with torch.no_grad():
        output = pipeline(
            **{option: prompts_of(name)},
            num_inference_steps=steps,
            guidance_scale=guidance_scale,
            generator=torch.Generator().manual_seed(5),
            output_type="np",
            **options_of(name),
            **options,
        )
        return drawn_by(output)


def one_process(pipeline):
    denoiser = getattr(pipeline, "unet", None) or pipeline.transformer

    def sample(call):
        travelled = call.packed().unpacked(torch.device("cpu"))
        return OneProcess().sample(travelled.request(denoiser))

    return sample


@pytest.mark.parametrize("guidance_scale", [4.0, 1.0])
@pytest.mark.parametrize("name", PIPELINES)
def test_pictures_equal_those_of_the_pipeline_bit_for_bit(name, guidance_scale, tmp_path):
    pipeline = build(name, tmp_path)
    expected = plain(pipeline, name, guidance_scale)
    found = draw(pipeline, name, one_process(pipeline), guidance_scale)
    assert (found == expected).all()
    assert expected.std() > 0.01


class WithoutNumber(diffusers.FluxPipeline):
    """No number says by default how strong guidance is, as in QwenImagePipeline."""

    def __call__(
        self, prompt, num_inference_steps, generator, output_type, height, width, max_sequence_length,
        guidance_scale=None,
    ):  # fmt: skip
        return super().__call__(
            prompt, num_inference_steps=num_inference_steps, generator=generator, output_type=output_type,
            height=height, width=width, max_sequence_length=max_sequence_length,
        )  # fmt: skip


class WithoutGuidance(WithoutNumber):
    """A pipeline that has no such argument."""

    def __call__(
        self,
        prompt,
        num_inference_steps,
        generator,
        output_type,
        height,
        width,
        max_sequence_length,
    ):
        options = {"height": height, "width": width, "max_sequence_length": max_sequence_length}
        return super().__call__(prompt, num_inference_steps, generator, output_type, **options)


@pytest.mark.parametrize("kind", [WithoutNumber, WithoutGuidance])
def test_pipelines_without_a_number_for_guidance(kind, tmp_path):
    """History: a family registered for one ended in a TypeError or KeyError."""
    pipeline = build("flux", tmp_path)
    pipeline = kind(**pipeline.components)
    settings = Settings(prompts_of("flux"), num_inference_steps=3, options=options_of("flux"))
    found = draw_with(pipeline, family_of("FluxPipeline"), settings, one_process(pipeline))
    expected = pipeline(
        prompts_of("flux"), 3, torch.Generator().manual_seed(0), "pil", **options_of("flux")
    )
    assert (np.stack(found) == np.stack(expected.images)).all()


class WithRequiredGuidance(diffusers.FluxPipeline):
    """Guidance has to be given."""

    def __call__(self, prompt, guidance_scale, generator=None, output_type=None):
        raise AssertionError("not called")


def test_an_argument_that_a_pipeline_requires_is_named(tmp_path):
    pipeline = WithRequiredGuidance(**build("flux", tmp_path).components)
    with pytest.raises(ConfigurationError, match="required positional argument: 'guidance_scale'"):
        draw_with(pipeline, family_of("FluxPipeline"), Settings(["a"]), one_process(pipeline))
