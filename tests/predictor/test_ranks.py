"""The Predictor on several ranks: pictures, messages, weights, errors."""

import shutil

import numpy as np
import pytest

from lightning_diffpipe.predictor import Predictor
from tests.predictor.scenarios import draw, failure, killed
from tests.predictor.tiny_pipelines import options_of, prompts_of
from tests.ranks import RankError, run_ranks

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


@pytest.mark.parametrize("name", ["pixart", "sd3"])
def test_sequence_parallelism_is_exact(name, folder_of):
    path = folder_of(name)
    (found, report), _ = run_ranks(
        draw, 2, path, prompts_of(name), settings_of(name), {"method": "sequence"}
    )
    assert close(found, alone(path, name))
    assert report.mesh == "sequence=2"


@pytest.mark.parametrize(
    ("name", "method"), [("pixart", "pipefusion"), ("stable_diffusion", "distrifusion")]
)
def test_halves_of_guidance_times_stages_or_bands(name, method, folder_of):
    path, settings = folder_of(name), settings_of(name, 4)
    options = {"method": method, "warmup_steps": 1 if method == "pipefusion" else 9}
    options |= {"num_patches": 2} if method == "pipefusion" else {}
    four = options | {"guidance": 2}
    (found, report), *_ = run_ranks(draw, 4, path, prompts_of(name), settings, four)
    expected, _ = draw(0, path, prompts_of(name), settings, options)
    assert close(found, expected)
    assert report.mesh == "guidance=2 x parallel=2"


def test_each_rank_of_a_pipeline_holds_its_share_of_the_weights(folder_of):
    path = folder_of("pixart")
    options = {"method": "pipefusion", "num_patches": 4}
    (_, report), *_ = run_ranks(draw, 4, path, prompts_of("pixart"), settings_of("pixart"), options)
    whole = Predictor.from_pretrained(path, method="single").source.denoiser
    blocks = sum(
        p.nbytes for n, p in whole.named_parameters() if n.startswith("transformer_blocks")
    )
    shared = report.whole_bytes - blocks
    assert max(report.resident_bytes) <= blocks / 4 + shared
    assert sum(report.resident_bytes) == blocks + 4 * shared


@pytest.mark.parametrize(
    ("name", "options", "changes", "message"),
    [
        (
            "pixart",
            {"guidance": 2, "parallel": 2},
            {},
            "cannot use 2 ranks as guidance=2, parallel=2",
        ),
        ("pixart", {}, {"height": 33}, "have to be divisible by 8"),
        ("pixart", {"num_patches": 99}, {}, "num_patches=99, but the latents have 16 rows"),
        ("stable_diffusion", {}, {}, "LayoutError"),
        ("pixart", {"guidance": 2}, {"guidance_scale": 1.0}, "divides the two branches"),
    ],
)
def test_bad_input_is_told_on_all_ranks(name, options, changes, message, folder_of):
    said = run_ranks(
        failure, 2, folder_of(name), prompts_of(name), settings_of(name) | changes, options
    )
    assert all(message in text for text in said), said
    assert said[0] == said[1]


def test_missing_weights_are_told_on_all_ranks(folder_of, tmp_path):
    path = shutil.copytree(folder_of("pixart"), tmp_path / "broken")
    (path / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    said = run_ranks(failure, 2, path, prompts_of("pixart"), settings_of("pixart"), {})
    assert all("CheckpointError" in text for text in said), said


@pytest.mark.parametrize("method", ["pipefusion", "distrifusion"])
def test_a_killed_rank_ends_the_others(method, folder_of, tmp_path):
    options = {"method": method, "timeout_s": 10.0}
    arguments = (folder_of("pixart"), prompts_of("pixart"), settings_of("pixart", 9), options)
    with pytest.raises(RankError, match=r"rank 1 \(exit code -9\)"):
        run_ranks(killed, 2, *arguments, 1, tmp_path / "told", timeout_s=40.0)
    told = (tmp_path / "told").read_text()
    assert told.startswith("PipelineTimeoutError"), told
    assert "rank 1" in told


def test_the_method_is_chosen_with_a_reason(folder_of):
    (found, report), _ = run_ranks(
        draw,
        2,
        folder_of("pixart"),
        prompts_of("pixart"),
        settings_of("pixart"),
        {"method": "auto"},
    )
    assert close(found, alone(folder_of("pixart"), "pixart"))  # three steps: an exact method
    assert "is expected to take" in report.reason
