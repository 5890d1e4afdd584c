"""The Predictor on several ranks: images, messages, weights, errors."""

import re
import shutil
import socket
from signal import SIGKILL, SIGSTOP
from types import SimpleNamespace

import diffusers
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from lightning_diffpipe.errors import DiffPipeError, GraphError
from lightning_diffpipe.predictor import Predictor
from lightning_diffpipe.sampling.digests import texts_of_folder
from tests.modules.tiny_parts import save_checkpoint, tiny_cascade
from tests.predictor.scenarios import (
    BothBands,
    cancelled,
    counts_tokens,
    draw,
    draw_as_chosen,
    draw_each,
    draw_in_spite,
    draw_with_a_slow_disk,
    expects_all_tokens,
    failure_of_each,
    failure_of_each_rank,
    hung_before_it_draws,
    latents_of_each,
    left,
    lost,
    refused_later,
    refused_over_nccl,
    requests_in_turn,
    second_latents_of_each,
    take_a_second,
    too_large,
)
from tests.predictor.tiny_pipelines import (
    PIPELINES,
    options_of,
    prompts_of,
    thresholding,
    with_scheduler,
)
from tests.ranks import RankError, run_ranks
from tests.rows import row

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
    images, _ = draw(0, path, prompts, settings, {"method": "single"})
    return images


def close(found, expected):
    """Equal but for rounding: batches of other sizes are summed in another order."""
    return np.abs(found.astype(int) - expected.astype(int)).max() <= 1


def drawn(jobs, num_ranks=2):
    """Images and report of each job, from rank 0; the others must have got None."""
    first, *others = run_ranks(draw_each, num_ranks, jobs)
    assert all(all(got_none) for got_none in others)
    return zip(jobs, first, strict=True)


def stochastic(job, to, scheduler):
    """The same with a scheduler that draws noise in every step."""
    path, *rest = job
    return (with_scheduler(path, to, scheduler), *rest)


def test_prompts_are_divided_over_the_data_axis(job, tmp_path):
    """Each rank draws its prompts' part of the noise, also where a pipeline, as DiT's, seeds no scheduler."""
    ancestral = diffusers.EulerAncestralDiscreteScheduler(steps_offset=1)
    drawing = diffusers.DDPMScheduler(clip_sample=False)
    sdxl = stochastic(job("sdxl", method="single"), tmp_path / "sdxl", ancestral)
    dit = stochastic(job("dit", method="single"), tmp_path / "dit", drawing)
    latent_bytes = 4 * 16 * 16 * 4
    several = {"num_images_per_prompt": 3, "negative_prompt": "bad"}
    # The second prompt's final latents go to rank 0; DiT has them twice. Of six images, three.
    sent = [
        {"result": latent_bytes},
        {"result": 2 * latent_bytes},
        {},
        {"result": 3 * latent_bytes},
    ]
    jobs = [sdxl, dit, (dit[0], dit[1][:1], *dit[2:])]
    jobs.append(job("stable_diffusion", method="single", changes=several))
    for expected, (each, (found, report)) in zip(sent, drawn(jobs), strict=True):
        assert len(found) == len(each[1]) * each[2].get("num_images_per_prompt", 1)
        assert close(found, alone(each))
        assert report.mesh == "data=2"
        assert report.bytes_sent == expected


def test_generators_go_on_from_request_to_request_as_in_one_process(job, tmp_path):
    """History: those of rank 0 stood still under PipeFusion, so that a second image had noise of the first."""
    ancestral = diffusers.EulerAncestralDiscreteScheduler()
    drawing = diffusers.DDPMScheduler(clip_sample=False)  # DiT hands it no generator
    pixart = stochastic(job("pixart"), tmp_path / "pixart", ancestral)
    dit = stochastic(job("dit"), tmp_path / "dit", drawing)
    ways = [{"method": "pipefusion", "num_patches": 1}, {"method": "sequence"}]
    ways.append({"method": "pipefusion", "num_patches": 2, "warmup_steps": 9})
    jobs = [
        (*each[:3], {**way, "dtype": torch.float64})
        for each, ways_of in ((pixart, ways), (dit, ways[::2]))
        for way in ways_of
    ]
    exact = second_latents_of_each(
        0, [(*each[:3], {"method": "single", "dtype": torch.float64}) for each in jobs]
    )
    one_rank = second_latents_of_each(0, jobs)
    for found in (one_rank, *run_ranks(second_latents_of_each, 2, jobs)):
        for each, expected in zip(found, exact, strict=True):
            torch.testing.assert_close(each, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("is_checkpoint", [row(False), row(True)])
def test_a_cascade_on_two_ranks_is_that_of_one_process(is_checkpoint, tmp_path):
    """Bit for bit, also with noise in every step: each rank draws the noise of all prompts in both loops."""
    module = tiny_cascade()
    module.scheduler = diffusers.EulerAncestralDiscreteScheduler()
    path = tmp_path / ("last.ckpt" if is_checkpoint else "folder")
    save_checkpoint(module, path) if is_checkpoint else module.save_pretrained(path)
    settings = {"num_inference_steps": 3, "guidance_scale": 4.0, "seed": 1, "noise_level": 0.3}
    options = {"method": "single", "dtype": torch.float64}
    jobs = [(path, prompts, settings, options) for prompts in (["a", "b", "c"], ["a"])]
    jobs += [(path, ["a", "b"], settings, options | {"guidance": 2})]
    for each, (found, report) in drawn(jobs):
        expected, _ = draw(0, *each[:3], {"method": "single", "dtype": torch.float64})
        assert found.shape == expected.shape == (len(each[1]), 8, 8, 3)
        assert (found == expected).all()
        assert report.num_steps == 6


def requests_of(job):
    """One prompt, two prompts, and a taller image."""
    path, prompts, settings, _ = job
    tall = settings | {"height": 48}
    return path, [(prompts[:1], settings), (prompts, settings), (prompts, tall)]


def test_requests_in_a_row_equal_fresh_ones(job):
    """Once a second request was cut where it was fastest, whatever weights a rank had: images were black."""
    (path, requests), (unet, others) = map(requests_of, (job("pixart"), job("stable_diffusion")))
    stages, bands = {"method": "pipefusion", "num_patches": 2}, {"method": "distrifusion"}
    splits = [None, None, None, (1,)]  # blocks that a rank has no weights for, and reads
    costs = [[1, 1, 1, 1], [5, 1, 1, 1], [1, 1, 1, 5]]
    in_turn = [(path, [*requests, requests[0]], stages, splits, costs), (unet, others, bands)]
    fresh = [(unet, *request, bands) for request in others]
    (found, expected), (got_none, _) = run_ranks(requests_in_turn, 2, in_turn, fresh)
    assert all(all(each) for each in got_none)
    on_one_rank = [draw(0, path, *request, stages)[0] for request in requests]
    for images, other in zip(found[0], [*on_one_rank, on_one_rank[0]], strict=True):
        assert (images == other).all()
    for images, (other, _) in zip(found[1], expected, strict=True):
        assert (images == other).all()


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


def test_one_patch_or_only_synchronous_steps_equal_the_pipeline(job):
    jobs = [
        job("pixart", method="pipefusion", num_patches=1, warmup_steps=0),
        job("flux", method="pipefusion", num_patches=2, warmup_steps=9),
        job(
            "pixart", method="pipefusion", num_patches=2, warmup_steps="auto", warmup_threshold=0.0
        ),
    ]
    reports = []
    for each, (found, report) in drawn(jobs):
        assert (found == alone(each)).all()
        reports.append(report)
    assert reports[-1].warmup_steps == 3  # the number that was found


def test_in_bfloat16_ranks_equal_one_process(job, monkeypatch):
    """With as many patches, or as many bands. History: stages of Flux kept what depends on time for all steps."""
    coarse = {"dtype": torch.bfloat16}
    stages = {"method": "pipefusion", "num_patches": 2, **coarse}
    bands = {"method": "distrifusion", "warmup_steps": 1, **coarse}
    jobs = [job("flux", **stages), job("pixart", **stages), job("pixart", **bands)]
    jobs += [job("stable_diffusion", **bands)]
    found = run_ranks(latents_of_each, 2, jobs)
    expected = latents_of_each(0, jobs[:2])
    monkeypatch.setattr("lightning_diffpipe.sampling.methods.make_sampler", BothBands)
    expected += latents_of_each(
        0, [(*each[:3], {"method": "single", **coarse}) for each in jobs[2:]]
    )
    for number, latents in enumerate(expected):
        assert latents.dtype == torch.bfloat16
        assert all(torch.equal(rank[number], latents) for rank in found), number


def test_exact_methods_equal_one_process(job, tmp_path):
    drawing = diffusers.DDPMScheduler(clip_sample=False)
    jobs = [
        stochastic(job("dit", method="sequence"), tmp_path / "dit", drawing),
        job("stable_diffusion", method="distrifusion", warmup_steps=9),
        job("sdxl", method="synchronous"),
        # Every band steps all rows, with noise of rank 0's default generator.
        stochastic(job("dit", method="synchronous"), tmp_path / "bands", drawing),
        job("pixart", method="sequence"),
        job("sd3", method="sequence"),
    ]
    for each, (found, _) in drawn(jobs):
        assert close(found, alone(each)), each


def test_displaced_bands_on_two_ranks_equal_the_emulator(job, monkeypatch):
    """The pipeline's own code in one process, its denoising steps by both bands as threads: the same bits."""
    jobs = [
        job(name, method="distrifusion", warmup_steps=1) for name in ("pixart", "stable_diffusion")
    ]
    found = run_ranks(latents_of_each, 2, jobs)
    by_one = [(*each[:3], {"method": "single"}) for each in jobs]
    exact = latents_of_each(0, by_one)
    monkeypatch.setattr("lightning_diffpipe.sampling.methods.make_sampler", BothBands)
    for i, expected in enumerate(latents_of_each(0, by_one)):
        assert all(torch.equal(rank[i], expected) for rank in found)
        assert (expected - exact[i]).norm() > 1e-4 * exact[i].norm(), "staleness does not show"


def test_prompts_or_halves_of_guidance_or_shared_tokens_times_stages_or_bands(job, tmp_path):
    ancestral = diffusers.EulerAncestralDiscreteScheduler(steps_offset=1)
    halves = job("stable_diffusion", method="single", data=2, guidance=2)
    jobs = [
        stochastic(
            job("pixart", 4, method="pipefusion", num_patches=2, data=2), tmp_path / "a", ancestral
        ),
        stochastic(halves, tmp_path / "b", ancestral),
        job("pixart", 4, method="pipefusion", num_patches=2, guidance=2),
        job("stable_diffusion", method="distrifusion", warmup_steps=9, guidance=2),
        job("pixart", 4, method="pipefusion", num_patches=2, sequence=2, sequence_mode="ring"),
    ]
    meshes = ["data=2 x parallel=2", "data=2 x guidance=2"]
    meshes += ["guidance=2 x parallel=2"] * 2 + ["parallel=2 x sequence=2"]
    for mesh, (job_alone, (found, report)) in zip(meshes, drawn(jobs, 4), strict=True):
        path, prompts, settings, options = job_alone
        expected, _ = draw(
            0, path, prompts, settings, options | {"data": 1, "guidance": 1, "sequence": 1}
        )
        assert close(found, expected)
        assert report.mesh == mesh
    assert set(report.bytes_sent) == {"hidden", "latents", "sequence", "result"}
    assert report.resident_bytes[0] == report.resident_bytes[1] < report.whole_bytes


def test_each_rank_of_a_pipeline_holds_its_share_of_the_weights(job):
    [((path, *_), (_, report))] = drawn([job("pixart", method="pipefusion", num_patches=4)], 4)
    whole = Predictor.from_pretrained(path, method="single").source.denoiser
    in_blocks = [p.nbytes for n, p in whole.named_parameters() if "transformer_blocks" in n]
    shared = report.whole_bytes - sum(in_blocks)
    assert max(report.resident_bytes) <= sum(in_blocks) / 4 + shared
    assert sum(report.resident_bytes) == sum(in_blocks) + 4 * shared


@pytest.mark.parametrize("names", [["pixart"], row([*PIPELINES])])
def test_the_method_is_chosen_with_a_reason(names, job):
    """Three steps are drawn exactly."""
    for wish, why in (
        ({}, "single: 2 samples are divided"),
        ({"data": 1}, "single: halves of guidance"),  # of DiT, latents hold both
        ({"data": 1, "guidance": 1}, "3 steps are too few for stale activations, which need 8"),
    ):
        for each, (found, report) in drawn([job(name, method="auto", **wish) for name in names]):
            assert close(found, alone(each))
            assert report.reason.startswith(f"{report.method}: ")
            assert why in report.reason or names != ["pixart"]


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hook", "block", "why", "methods"),
    [
        row(counts_tokens, 1, "in 2 patches this model computes something else than on all tokens",
         ["pipefusion", "sequence", "distrifusion", "synchronous"]),
        (expects_all_tokens, 0, "in 2 patches this model fails, most likely because a block expects all tokens",
         ["pipefusion", "sequence", "distrifusion", "synchronous"]),
    ],
)  # fmt: skip
def test_a_choice_that_is_refused_leaves_the_next_one(hook, block, why, methods, job):
    """History: the user got the error. Of a model that fails in patches, only the rank does that has its block."""
    path, prompts, settings, _ = job("pixart", 8)
    arguments = (path, prompts, settings, {"data": 1, "guidance": 1, "num_patches": 2}, hook, block)
    (images, report, by_name), other = run_ranks(draw_in_spite, 2, *arguments)
    assert (images[0] == images[2]).all()
    assert (images[1] == images[2]).all()
    assert report.method == "single"
    assert f"; no pipefusion: {why}" in report.reason
    refused = re.findall("; no ([a-z]+):", report.reason)
    assert sorted(refused) == sorted(methods), "each is tried once"
    for said, seconds in (by_name, other):  # asked for by name, it is refused
        assert why in said
        assert seconds < 60, "half of timeout_s"


def test_bad_input_is_refused_on_all_ranks(job, folder_of, tmp_path):
    broken = shutil.copytree(folder_of("pixart"), tmp_path / "broken")
    (broken / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    overflowing = shutil.copytree(folder_of("pixart"), tmp_path / "overflowing")
    file = overflowing / "transformer" / "diffusion_pytorch_model.safetensors"
    save_file(load_file(file) | {"proj_out.bias": load_file(file)["proj_out.bias"] * np.inf}, file)
    refused = with_scheduler(folder_of("pixart"), tmp_path / "refused", thresholding())
    unsendable = with_scheduler(
        folder_of("stable_diffusion"), tmp_path / "unsendable", diffusers.SASolverScheduler()
    )
    pixart = job("pixart")
    cases = {
        # History: rank 0 had an error of pickle, and the others waited for as long as it lived.
        "a part of it cannot be sent to other processes: ": (
            unsendable,
            *job("stable_diffusion", method="single")[1:],
        ),
        "SamplingError: final latents are not finite (ranks 0, 1; 3 steps in float32)": (
            overflowing,
            *pixart[1:],
        ),
        "DDIMScheduler reads all rows": (refused, *pixart[1:]),
        "cannot use 2 ranks as guidance=2, parallel=2": job("pixart", guidance=2, parallel=2),
        "num_patches=99, but the latents have 16 rows": job("pixart", num_patches=99),
        "num_patches=98, but": (
            pixart[0],
            pixart[1][:1],
            pixart[2],
            {"data": 2, "num_patches": 98},
        ),
        "LayoutError": job("stable_diffusion"),
        "divides the two branches": job("pixart", changes={"guidance_scale": 1.0}, guidance=2),
        "CheckpointError": (broken, *pixart[1:]),
        "prompts of this model are texts": (pixart[0], [4], *pixart[2:]),
        "warmup_microbatches=5, but the model is given 4 samples in a step": job(
            "pixart", num_patches=2, warmup_microbatches=5
        ),
    }
    first, second = run_ranks(failure_of_each, 2, list(cases.values()))
    assert first == second
    for message, said in zip(cases, first, strict=True):
        assert message in said


def stale(folder, to, name="transformer_blocks.3.ff.net.2.weight"):
    """A copy of a pipeline of which one tensor is that of a step before."""
    copied = shutil.copytree(folder, to)
    file = copied / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {name: tensors[name] * 1.00001}, file)
    return copied


def test_ranks_with_another_model_or_request_are_refused(job, folder_of, tmp_path):
    """History: each was drawn with, wrongly and without a word."""
    path, prompts, settings, options = pixart = job("pixart", num_patches=2)
    old = stale(path, tmp_path / "stale")
    other = shutil.copytree(path, tmp_path / "other")
    config = other / "transformer" / "config.json"
    config.write_text(config.read_text().replace('"norm_eps": 1e-06', '"norm_eps": 1e-05'))
    more = (path, prompts, settings | {"num_inference_steps": 4}, options)
    cases = {
        "rank 1 has transformer.transformer_blocks.3.ff.net.2.weight=": (
            old,
            prompts,
            settings,
            options,
        ),
        "rank 1 has transformer.config.norm_eps=1e-05, but rank 0 transformer.config.norm_eps=1e-06": (
            other,
            prompts,
            settings,
            options,
        ),
        "rank 1 has num_patches=3, but rank 0 num_patches=2": job("pixart", num_patches=3),
        "rank 1 has num_inference_steps=4, but rank 0 num_inference_steps=3": more,
        "prompts must be a list with at least one prompt": (path, [], settings, options),
        "no error": pixart,
    }
    first, second = run_ranks(failure_of_each_rank, 2, [(pixart, each) for each in cases.values()])
    assert first == second
    for message, said in zip(cases, first, strict=True):
        assert message in said
    for part in ("; 1 of", f"{old}", f"{path}", "stale or broken"):
        assert part in first[0]


@pytest.mark.parametrize("num_bytes", [1000, 1 << 20])
def test_a_digest_of_a_file_is_that_of_no_other_tensor(num_bytes, tmp_path):
    """Of a small tensor any byte, of a large one any that a step of an optimizer changes."""
    tensor = torch.randn(num_bytes // 4)
    changed = tensor * 1.001
    if num_bytes == 1000:
        changed = tensor.clone()
        changed[77] += 1.0
    found = []
    for i, each in enumerate((tensor, changed, tensor.reshape(2, -1), tensor)):
        (folder := tmp_path / f"{i}" / "part").mkdir(parents=True)
        save_file({"w": each.contiguous()}, folder / "a.safetensors")
        found.append(texts_of_folder(folder)["part.w"])
    assert len(set(found)) == 3
    assert found[0] == found[3]


def test_a_closed_predictor_and_a_module_in_stages_are_refused_on_all_ranks(job):
    """History: a closed one ended in an AttributeError, here only, and NaN of other stages was drawn with."""
    for closed, divided in run_ranks(refused_later, 2, *job("dit", method="single")):
        assert closed == "this predictor is closed; make another one"
        assert "this rank holds only its stage of the module" in divided


@pytest.mark.parametrize(
    ("name", "options", "kind"),
    [
        ("pixart", {"method": "pipefusion", "num_patches": 4}, KeyboardInterrupt),
        row("pixart", {"method": "pipefusion", "num_patches": 4}, GraphError),
        ("dit", {"method": "single"}, ValueError),
    ],
)
def test_requests_are_drawn_after_one_that_was_cancelled(name, options, kind, job):
    """By all ranks, or by one of them; what this package refuses is told to all."""
    each = job(name, 4, **options)
    who = [(0, 1), (1,)]
    found = run_ranks(cancelled, 2, *each, who, kind)
    both, one = zip(*([end for end, _ in errors] for errors, _ in found), strict=True)
    # Of two that are cancelled together one may hear of the other first.
    assert kind.__name__ in both
    assert set(both) <= {kind.__name__, "LostRankError"}
    assert one == (kind.__name__ if kind is GraphError else "LostRankError", kind.__name__)
    for errors, _ in found:
        assert not any("timeout_s" in said for _, said in errors), "nobody waits so long"
    expected, _ = draw(0, *each)
    assert close(found[0][1], expected)


def test_nothing_more_is_drawn_over_nccl_after_an_error_in_the_middle(job):
    """What was posted there cannot be taken back."""
    path, prompts, settings, _ = job("dit", 2)
    predictor = Predictor.from_pretrained(path, method="single", alone=True)
    predictor._world = SimpleNamespace(backend="nccl", num_ranks=2)
    error = ValueError("enough")
    error.is_of_all_ranks = True
    with pytest.raises(ValueError, match="enough"), predictor._ending_together():
        raise error
    with pytest.raises(DiffPipeError, match=r"ValueError\('enough'\); over NCCL"):
        predictor(prompts, **settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hook", "why", "later"),
    [
        row(
            too_large,
            "this model needs more memory in a synchronous step than there is",
            "an earlier request ended in the middle",
        ),
        (counts_tokens, "this model computes something else than on all tokens", "no error"),
    ],
)
def test_over_nccl_a_refusal_is_the_end_if_messages_are_under_way(hook, why, later, job):
    """History: the next request read what the other rank had sent for the one that did not fit into memory."""
    each = job("pixart", method="pipefusion", num_patches=2, timeout_s=6.0)
    first, second = run_ranks(refused_over_nccl, 2, *each, hook)
    assert first == second
    assert why in first[0]
    assert later in first[1]


@pytest.mark.slow
def test_a_rank_without_a_prompt_waits_for_the_others(job):
    """Longer than for a message: six steps of a second."""
    path, prompts, settings, options = job("dit", 6, method="single", timeout_s=4.0)
    slowly = (path, prompts[:1], settings | {"on_step": take_a_second}, options)
    [(_, (found, _))] = drawn([slowly])
    assert len(found) == 1


@pytest.mark.slow
def test_a_rank_that_reads_its_weights_slowly_is_waited_for(job):
    """Longer than for a message. History: the others did for `timeout_s` only, and ended the request."""
    slowly = {"timeout_s": 4.0}
    jobs = [
        job("pixart", method="pipefusion", num_patches=2, **slowly),
        job("stable_diffusion", method="distrifusion", **slowly),
    ]
    drawn_by_first, _ = run_ranks(draw_with_a_slow_disk, 2, jobs)
    for each, (found, _) in zip(jobs, drawn_by_first, strict=True):
        assert len(found) == len(each[1])


DRAW = "lightning_diffpipe.sampling.source.images_of"
OPEN = "lightning_diffpipe.predictor.open_source"
LOAD = "lightning_diffpipe.sampling.methods.load_weights"
GATHER = "lightning_diffpipe.predictor.Worker.gather"
CONNECT = "lightning_diffpipe.predictor.Worker"


@pytest.mark.parametrize(
    ("victim", "when", "how", "phase", "method"),
    [
        (0, DRAW, SIGSTOP, "encoding prompts", "single"),
        row(0, "", SIGSTOP, "sampling", "single"),
        (0, DRAW, SIGKILL, "encoding prompts", "single"),
        (1, "", SIGKILL, "sampling", "pipefusion"),
        row(1, OPEN, SIGKILL, "opening the model", "single"),
        row(0, OPEN, SIGSTOP, "opening the model", "single"),
        row(1, CONNECT, SIGSTOP, "choosing a method", "single"),
        row(0, CONNECT, SIGSTOP, "choosing a method", "single"),
        row(1, LOAD, SIGSTOP, "reading weights and probing", "single"),
        row(0, LOAD, SIGKILL, "reading weights and probing", "single"),
        row(1, GATHER, SIGSTOP, "sampling", "single"),
        row(0, "", SIGKILL, "sampling", "single"),
        row(2, "", SIGKILL, "sampling", "distrifusion"),
    ],
)
def test_a_rank_that_is_killed_or_frozen_is_named_with_what_it_did(
    victim, when, how, phase, method, job, tmp_path
):
    """History: ranks stood for ever in a call to the store of a rank that was frozen."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    # A killed one is known by its connections; a frozen one is still there when the others have told.
    timeout_s, grace_s = (20.0, 30.0) if how == SIGKILL else (4.0, 0.5)
    if when == GATHER:  # where others wait for tensors, which they do no longer than `timeout_s`
        timeout_s = 20.0
    settings = job("dit" if method == "single" else "pixart", 9, method=method, timeout_s=timeout_s)
    arguments = (port, *settings, victim, when, how, phase, tmp_path)
    with pytest.raises(RankError, match=rf"rank {victim} \(exit code -9\)"):
        run_ranks(lost, 3, *arguments, group_timeout_s=None, grace_s=grace_s)
    errors = {rank: (tmp_path / str(rank)).read_text() for rank in {0, 1, 2} - {victim}}
    for rank, each in errors.items():
        silence_s = max(timeout_s, 10.0)
        why = f"nothing was heard of it for {silence_s:g} s"
        why = why if how == SIGSTOP else "its process has ended"
        assert each.startswith(f"LostRankError: rank {rank} "), each
        assert re.search(rf"rank {rank} \([\w ]+\) lost rank {victim} \({phase}\): {why}", each), (
            each
        )


def test_a_rank_that_fails_after_drawing_says_so_before_it_leaves(job):
    """History: it went without a word, and the others named it beside, or before, who was lost first."""
    path, prompts, settings, options = job("dit", method="single", timeout_s=20.0)
    errors = run_ranks(left, 3, path, prompts[:1], settings, options)
    assert errors[0] == "DiffPipeError: no room for the images"
    for rank in (1, 2):
        assert errors[rank] == (
            f"LostRankError: rank {rank} (sampling) lost rank 0 (sampling): it failed with DiffPipeError: no room "
            "for the images; its own error says where"
        )


@pytest.mark.slow
def test_a_rank_that_hangs_before_it_draws_is_named_and_prints_its_stack(job, tmp_path):
    """History: gloo's error ended the others after half an hour, and named nobody."""
    with pytest.raises(RankError, match="ranks failed"):
        run_ranks(
            hung_before_it_draws,
            2,
            *job("dit", method="single", data=2, timeout_s=4.0, busy_timeout_s=12.0),
            tmp_path,
        )
    message = (
        "rank 1 (reading weights and probing) lives, but has made no step for 12 s (busy_timeout_s)"
    )
    assert message in (tmp_path / "0").read_text()
    assert "in never_read" in (tmp_path / "screen 1").read_text()
