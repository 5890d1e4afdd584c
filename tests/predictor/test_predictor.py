"""The Predictor in one process: against diffusers' own pipelines, and what it refuses."""

import numpy as np
import pytest
import torch

from lightning_diffpipe import LatentDiffusion
from lightning_diffpipe.errors import CheckpointError, ConfigurationError
from lightning_diffpipe.predictor import Predictor
from tests.predictor.tiny_pipelines import PIPELINES, build, options_of, prompts_of

SETTINGS = {"num_inference_steps": 3, "guidance_scale": 4.0}


def as_array(pictures):
    return np.stack([np.asarray(picture) for picture in pictures])


def by_diffusers(path, name, seed=0, **settings):
    import diffusers

    pipeline = diffusers.DiffusionPipeline.from_pretrained(str(path))
    pipeline.set_progress_bar_config(disable=True)
    option = "class_labels" if name == "dit" else "prompt"
    generator = torch.Generator().manual_seed(seed)
    return as_array(
        pipeline(
            **{option: prompts_of(name)},
            **options_of(name),
            **SETTINGS | settings,
            generator=generator,
        ).images
    )


@pytest.mark.parametrize("name", PIPELINES)
def test_one_process_equals_the_pipeline_bit_for_bit(name, folder_of):
    expected = by_diffusers(folder_of(name), name)
    predictor = Predictor.from_pretrained(folder_of(name), method="single")
    found = predictor(prompts_of(name), **SETTINGS, **options_of(name))
    assert (as_array(found) == expected).all()
    assert expected.std() > 5
