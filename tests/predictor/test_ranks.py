"""The Predictor on several ranks: pictures, messages, weights, errors."""

import shutil

import numpy as np
import pytest

from lightning_diffpipe.predictor import Predictor
from tests.predictor.scenarios import draw, draw_as_chosen, draw_each, failure_of_each, killed
from tests.predictor.tiny_pipelines import options_of, prompts_of
from tests.ranks import RankError, run_ranks

pytestmark = pytest.mark.distributed


@pytest.fixture
def job(folder_of):
    """Arguments of a scenario for a tiny pipeline."""

    def job(name, steps=3, changes=(), **options):
        settings = {"num_inference_steps": steps, "guidance_scale": 4.0, **options_of(name)}
        return folder_of(name), prompts_of(name), settings | dict(changes), options

    return job


def alone(job):
    """The same in one process, as diffusers does it."""
    path, prompts, settings, _ = job
    pictures = Predictor.from_pretrained(path, method="single")(prompts, **settings)
    return np.stack([np.asarray(picture) for picture in pictures])


def close(found, expected):
    """Equal but for rounding: batches of other sizes are summed in another order."""
    return np.abs(found.astype(int) - expected.astype(int)).max() <= 1


def drawn(jobs, num_ranks=2):
    """Pictures and report of each job, from rank 0; the others must have got None."""
    first, *others = run_ranks(draw_each, num_ranks, jobs)
    assert all(all(got_none) for got_none in others)
    return zip(jobs, first, strict=True)


def test_prompts_are_divided_over_the_data_axis(job):
    path, prompts, *rest = job("dit", method="single")
    jobs = [job("sdxl", method="single"), (path, prompts, *rest), (path, prompts[:1], *rest)]
    for each, (found, report) in drawn(jobs):
        assert len(found) == len(each[1])
        assert close(found, alone(each))
        assert report.mesh == "data=2"
        assert set(report.bytes_sent) == set()


def test_each_half_computes_one_branch_of_guidance(job):
    names = ("stable_diffusion", "pixart")
    for each, (found, report) in drawn([job(n, method="single", guidance=2) for n in names]):
        assert close(found, alone(each))
        assert set(report.bytes_sent) == {"prediction"}


def test_pipefusion_on_two_ranks_equals_one_rank_with_as_many_patches(job):
    names = ("pixart", "sd3", "flux", "dit")
    for each, (found, report) in drawn([job(n, method="pipefusion", num_patches=2) for n in names]):
        expected, _ = draw(0, *each)
        assert (found == expected).all()
        assert report.num_patches == 2
        assert set(report.bytes_sent) == {"hidden", "latents", "result"}
        assert report.planned is not None
        turns = [
            {(span.rank, span.instruction.microbatch) for span in timeline.spans}
            for timeline in (report.planned, report.measured)
        ]
        assert turns[0] == turns[1]
        # Both branches of guidance, one after the other, in the synchronous step; flux has none in its batch.
        assert len(turns[0]) == 2 * ((1 if each[0] == job("flux")[0] else 2) + 2 * 2)


def test_one_patch_or_only_synchronous_steps_equal_the_pipeline(job):
    jobs = [
        job("pixart", method="pipefusion", num_patches=1, warmup_steps=0),
        job("flux", method="pipefusion", num_patches=2, warmup_steps=9),
        job("pixart", method="pipefusion", num_patches=2, warmup_steps="auto", settled=0.0),
    ]
    reports = []
    for each, (found, report) in drawn(jobs):
        assert (found == alone(each)).all()
        reports.append(report)
    assert reports[-1].warmup_steps == 3  # the number that was found
    assert reports[-1].planned is not None


def test_exact_methods_equal_one_process(job):
    jobs = [
        job("stable_diffusion", method="distrifusion", warmup_steps=9),
        job("sdxl", method="synchronous"),
        job("pixart", method="sequence"),
        job("sd3", method="sequence"),
    ]
    for each, (found, _) in drawn(jobs):
        assert close(found, alone(each)), each


def test_halves_of_guidance_or_shared_tokens_times_stages_or_bands(job):
    jobs = [
        job("pixart", 4, method="pipefusion", num_patches=2, guidance=2),
        job("stable_diffusion", method="distrifusion", warmup_steps=9, guidance=2),
        job("pixart", 4, method="pipefusion", num_patches=2, sequence=2, sequence_mode="ring"),
    ]
    meshes = ["guidance=2 x parallel=2"] * 2 + ["parallel=2 x sequence=2"]
    for mesh, (job_alone, (found, report)) in zip(meshes, drawn(jobs, 4), strict=True):
        path, prompts, settings, options = job_alone
        expected, _ = draw(0, path, prompts, settings, options | {"guidance": 1, "sequence": 1})
        assert close(found, expected)
        assert report.mesh == mesh
    assert set(report.bytes_sent) == {"hidden", "latents", "sequence", "result"}
    assert report.resident_bytes[0] == report.resident_bytes[1] < report.whole_bytes


@pytest.mark.slow
def test_videos_of_two_calls_a_step(job):
    jobs = [
        job("wan", method="pipefusion", num_patches=2),
        job("wan", method="single", guidance=2, data=1),
        job("wan", method="sequence"),
    ]
    (in_patches, _), *exact = (result for _, result in drawn(jobs))
    expected, _ = draw(0, *jobs[0])
    assert expected.shape == (2, 5, 64, 32, 3)
    assert (in_patches == expected).all()
    for found, report in exact:
        assert close(found, alone(jobs[1])), report


def test_each_rank_of_a_pipeline_holds_its_share_of_the_weights(job):
    [((path, *_), (_, report))] = drawn([job("pixart", method="pipefusion", num_patches=4)], 4)
    whole = Predictor.from_pretrained(path, method="single").source.denoiser
    in_blocks = [p.nbytes for n, p in whole.named_parameters() if "transformer_blocks" in n]
    shared = report.whole_bytes - sum(in_blocks)
    assert max(report.resident_bytes) <= sum(in_blocks) / 4 + shared
    assert sum(report.resident_bytes) == sum(in_blocks) + 4 * shared


def test_the_method_is_chosen_with_a_reason(job):
    [(each, (found, report))] = drawn([job("pixart", method="auto")])
    assert close(found, alone(each))  # three steps: an exact method
    assert "is expected to take" in report.reason


@pytest.mark.slow
def test_a_choice_in_patches_is_that_method_by_name_and_is_kept(job):
    wish = {"data": 1, "guidance": 1, "num_patches": 3, "warmup_steps": 2}
    path, prompts, settings, _ = job("pixart", 8)
    first, _ = run_ranks(draw_as_chosen, 2, path, prompts, settings, wish)
    found, chosen, later, (expected, by_name) = first
    assert (found == expected).all()
    for report in (chosen, later):
        assert (report.method, report.mesh) == ("pipefusion", "parallel=2")
        assert (report.num_patches, report.warmup_steps) == (3, 2)
    assert chosen.bytes_sent == by_name.bytes_sent
    assert later.reason == chosen.reason


def test_bad_input_is_told_on_all_ranks(job, folder_of, tmp_path):
    broken = shutil.copytree(folder_of("pixart"), tmp_path / "broken")
    (broken / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    cases = {
        "cannot use 2 ranks as guidance=2, parallel=2": job("pixart", guidance=2, parallel=2),
        "have to be divisible by 8": job("pixart", changes={"height": 33}),
        "num_patches=99, but the latents have 16 rows": job("pixart", num_patches=99),
        "LayoutError": job("stable_diffusion"),
        "divides the two branches": job("pixart", changes={"guidance_scale": 1.0}, guidance=2),
        "CheckpointError": (broken, *job("pixart")[1:]),
        "cannot use 2 ranks as data=3; these fit this request: sequence on sequence=2": job(
            "pixart", method="auto", data=3
        ),
        "no method takes nonsense": job("pixart", method="auto", nonsense=1),
    }
    first, second = run_ranks(failure_of_each, 2, list(cases.values()))
    assert first == second
    for message, said in zip(cases, first, strict=True):
        assert message in said


@pytest.mark.parametrize("method", ["pipefusion", "distrifusion"])
def test_a_killed_rank_ends_the_others(method, job, tmp_path):
    arguments = (*job("pixart", 9, method=method, timeout_s=10.0), 1, tmp_path / "told")
    with pytest.raises(RankError, match=r"rank 1 \(exit code -9\)"):
        run_ranks(killed, 2, *arguments, timeout_s=40.0)
    told = (tmp_path / "told").read_text()
    assert told.startswith("PipelineTimeoutError"), told
    assert "rank 1" in told
