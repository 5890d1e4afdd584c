"""The Predictor on several ranks: pictures, messages, weights, errors."""

import numpy as np
import pytest

from lightning_diffpipe.predictor import Predictor
from tests.predictor.scenarios import draw, failure, killed
from tests.predictor.tiny_pipelines import options_of, prompts_of
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed


def settings_of(name, steps=3):
    return {"num_inference_steps": steps, "guidance_scale": 4.0, **options_of(name)}


def alone(path, name, steps=3):
    predictor = Predictor.from_pretrained(path, method="single")
    return np.stack(
        [np.asarray(p) for p in predictor(prompts_of(name), **settings_of(name, steps))]
    )


def close(found, expected):
    """Equal but for rounding: batches of other sizes are summed in another order."""
    return np.abs(found.astype(int) - expected.astype(int)).max() <= 1


@pytest.mark.parametrize("name", ["stable_diffusion", "dit"])
def test_prompts_are_divided_over_the_data_axis(name, folder_of):
    path = folder_of(name)
    (found, report), other = run_ranks(
        draw, 2, path, prompts_of(name), settings_of(name), {"method": "single"}
    )
    assert close(found, alone(path, name))
    assert other
    assert report.mesh == "data=2"


@pytest.mark.parametrize("name", ["stable_diffusion", "pixart", "sd3"])
def test_each_half_computes_one_branch_of_guidance(name, folder_of):
    path = folder_of(name)
    (found, report), _ = run_ranks(
        draw, 2, path, prompts_of(name), settings_of(name), {"method": "single", "guidance": 2}
    )
    assert close(found, alone(path, name))
    assert set(report.bytes_sent) == {"prediction"}


@pytest.mark.parametrize("name", ["pixart", "sd3", "flux", "dit"])
def test_pipefusion_on_two_ranks_equals_one_rank_with_as_many_patches(name, folder_of):
    path = folder_of(name)
    options = {"method": "pipefusion", "num_patches": 2, "warmup_steps": 1}
    (found, report), _ = run_ranks(draw, 2, path, prompts_of(name), settings_of(name), options)
    (expected, _) = draw(0, path, prompts_of(name), settings_of(name), options)
    assert (found == expected).all()
    assert report.num_patches == 2
    assert set(report.bytes_sent) == {"hidden", "latents", "result"}


@pytest.mark.parametrize("name", ["pixart", "flux"])
@pytest.mark.parametrize("patches_and_warmup", [(1, 0), (2, 9)])
def test_one_patch_or_only_synchronous_steps_equal_the_pipeline(
    name, patches_and_warmup, folder_of
):
    path, (patches, warmup) = folder_of(name), patches_and_warmup
    options = {"method": "pipefusion", "num_patches": patches, "warmup_steps": warmup}
    (found, _), _ = run_ranks(draw, 2, path, prompts_of(name), settings_of(name), options)
    assert (found == alone(path, name)).all()


@pytest.mark.parametrize("name", ["stable_diffusion", "sdxl", "pixart"])
def test_distrifusion_with_synchronous_steps_equals_one_process(name, folder_of):
    path = folder_of(name)
    options = {"method": "distrifusion", "warmup_steps": 9}
    (found, _), _ = run_ranks(draw, 2, path, prompts_of(name), settings_of(name), options)
    assert close(found, alone(path, name))
