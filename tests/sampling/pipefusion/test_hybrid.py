"""PipeFusion with several ranks in a stage, which share the tokens of every patch."""

import copy

import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler

from lightning_diffpipe.comm.loopback import LoopbackNetwork
from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.sampling.pipefusion import PipeFusion
from tests.sampling.models import build, knowing, request_for, sample_plainly
from tests.sampling.traffic import assert_traffic_is_as_planned


def sample_hybrid(name, tiny, num_stages, ranks_per_stage, scheduler=None, **options):
    """Rank `stage * ranks_per_stage + share`, each with a copy of the model."""
    pipelines = [LoopbackNetwork(num_stages, timeout_s=20) for _ in range(ranks_per_stage)]
    inside = [LoopbackNetwork(ranks_per_stage, timeout_s=20) for _ in range(num_stages)]
    samplers = {}

    def rank(links):
        stage, share = divmod(links.rank, ranks_per_stage)
        model = copy.deepcopy(tiny.model)
        samplers[links.rank] = PipeFusion(
            model, pipelines[share].links[stage], sequence_links=inside[stage].links[share],
            axis=tiny.axis, verify=True, **options,
        )  # fmt: skip
        if links.rank == 0:
            knowing(samplers[0], name, tiny)
        request = request_for(name, scheduler, tiny=tiny._replace(model=model))
        return samplers[links.rank].sample(request)

    results = LoopbackNetwork(num_stages * ranks_per_stage, timeout_s=40).run(rank)
    return results, [samplers[i] for i in sorted(samplers)]


NAMES = ["pixart", "sd3", "flux", "qwen", "pixart, two calls", "lumina2", "wan, frames"]
FAST = {("pixart", "ring")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=() if (name, mode) in FAST else pytest.mark.slow)
        for name in NAMES
        for mode in ("ulysses", "ring")
        if (name, mode) != ("lumina2", "ulysses")  # one group of keys is too few for two ranks
    ],
)
def test_sharing_a_stage_does_not_change_the_result(name, mode):
    tiny = build(name)
    # Each rank of the last stage sees rows of its own, and all must decide alike.
    warmup = (
        {"warmup_steps": "auto", "warmup_threshold": 10.0} if name == "sd3" else {"warmup_steps": 1}
    )
    options = {"num_patches": 2, "warmup_microbatches": 2, **warmup}
    alone = knowing(PipeFusion(tiny.model, axis=tiny.axis, **options), name, tiny)
    expected = alone.sample(request_for(name, tiny=tiny))
    results, samplers = sample_hybrid(name, tiny, 2, 2, sequence_mode=mode, **options)
    for result in results:
        torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-10)
    if name != "qwen":  # makes a mask from its tokens, which is collected besides
        assert_traffic_is_as_planned(samplers, request_for(name, tiny=tiny))


@pytest.mark.slow
@pytest.mark.parametrize("hide_unseen", [True, False])
def test_a_ring_without_a_synchronous_step(hide_unseen):
    """Nothing is known of other patches at first. Three ranks, which two heads would not do for."""
    tiny = build("sd3")
    options = {"num_patches": 2, "warmup_steps": 0, "hide_unseen": hide_unseen}
    alone = knowing(PipeFusion(tiny.model, **options), "sd3", tiny)
    expected = alone.sample(request_for("sd3", tiny=tiny))
    results, _ = sample_hybrid("sd3", tiny, 1, 3, sequence_mode="ring", **options)
    for result in results:
        torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-10)


def test_ranks_of_a_stage_step_no_scheduler_that_looks_at_all_rows():
    """History: with one patch nothing was refused, and each rank took thresholds of its own rows."""
    scheduler = DDPMScheduler(thresholding=True, sample_max_value=100.0)
    scheduler.set_timesteps(3)
    with pytest.raises(ConfigurationError, match="DDPMScheduler reads all rows of the latents"):
        sample_hybrid("pixart", build("pixart"), 1, 2, scheduler, num_patches=1)


@pytest.mark.parametrize("options", [{}, {"warmup_steps": 0}, {"warmup_microbatches": 2}])
def test_stages_of_one_rank_step_any_scheduler_with_one_patch(options):
    """The last one steps all rows at once: thresholds are those of one process."""
    tiny = build("pixart")
    scheduler = DDIMScheduler(clip_sample=False, thresholding=True, sample_max_value=100.0)
    plain = DDIMScheduler(clip_sample=False)
    for each in (scheduler, plain):
        each.set_timesteps(3)
    results, _ = sample_hybrid("pixart", tiny, 2, 1, scheduler, num_patches=1, **options)
    expected, without = (
        sample_plainly(request_for("pixart", each, tiny=tiny)) for each in (scheduler, plain)
    )
    for result in results:
        torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(expected, without), "thresholds do not show"


def test_more_ranks_in_a_stage_than_rows_in_a_patch():
    with pytest.raises(ConfigurationError, match="at most 8 patches"):
        sample_hybrid("pixart", build("pixart"), 1, 2, num_patches=16)


def test_more_ranks_in_a_stage_than_heads():
    with pytest.raises(
        ConfigurationError, match=r"at most 2 ranks, or ring .*sequence_mode='ring'"
    ):
        sample_hybrid("pixart", build("pixart"), 1, 3, num_patches=2)
