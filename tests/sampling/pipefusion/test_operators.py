"""What a block costs the host in patches: operators beside those of the model, after the first step.

PipeFusion with several ranks in a stage, which share the tokens of every patch.
"""

import copy
from collections import Counter

import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_diffpipe.comm.loopback import LoopbackNetwork
from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.sampling.pipefusion import PipeFusion
from lightning_diffpipe.sampling.request import OneProcess
from tests.rows import row
from tests.sampling import models
from tests.sampling.models import (
    build,
    flux,
    knowing,
    layout_of,
    pixart,
    request_for,
    sample_plainly,
)
from tests.sampling.ranks_in_threads import sample_together
from tests.sampling.traffic import assert_traffic_is_as_planned

PATCHES = 4
VIEWS = {"narrow", "alias", "expand", "view", "transpose", "slice", "unsqueeze", "select", "t"}
WAITS = {"_local_scalar_dense", "equal", "nonzero", "item", "is_nonzero"}
DEEP = {
    "pixart": lambda: pixart(num_layers=6),
    "flux": lambda: flux(num_single_layers=5),
    "flux, double": lambda: flux(num_layers=4),
}


class Operators(TorchDispatchMode):
    """Counts operators by name, and which of them came in the last step."""

    def __init__(self):
        super().__init__()
        self.counted, self.ends = Counter(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counted[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))

    def end_step(self, step):
        self.ends.append(self.counted.copy())

    @property
    def last_step(self):
        return self.ends[-1] - self.ends[-2]


def last_step(sampler, name, tiny):
    with Operators() as operators:
        sampler.sample(request_for(name, tiny=tiny), operators.end_step)
    return operators.last_step


def of_two_blocks(name, monkeypatch, count):
    """Operators of a step that a model with two blocks more has more."""
    monkeypatch.setitem(models.MODELS, "deep", DEEP[name])
    shallow = count(name.removesuffix(", double"))
    try:
        deep = count("deep")
    finally:
        layout_of.cache_clear()
    return Counter({n: deep[n] - shallow[n] for n in deep | shallow if deep[n] != shallow[n]})


def beside_the_model(name, monkeypatch):
    """Operators of two blocks in a step in patches that are not the model's own."""

    def in_patches(name):
        tiny = build(name)
        sampler = PipeFusion(tiny.model, num_patches=PATCHES, verify=False)
        return last_step(knowing(sampler, name, tiny), name, tiny)

    found = of_two_blocks(name, monkeypatch, in_patches)
    plain = of_two_blocks(name, monkeypatch, lambda n: last_step(OneProcess(), n, build(n)))
    return {n: found[n] - PATCHES * plain[n] for n in found if found[n] > PATCHES * plain[n]}


def num_launched(more):
    """Operators that are no views."""
    return sum(count for operator, count in more.items() if operator not in VIEWS)


@pytest.mark.parametrize("name", ["pixart", "flux", row("flux, double")])
def test_a_block_costs_three_operators_more_in_a_patch(name, monkeypatch):
    """Keys and values are written, two copies; a result that is no tensor of its own becomes one."""
    more = beside_the_model(name, monkeypatch)
    assert not WAITS & more.keys()
    assert more["copy_"] == 2 * 2 * PATCHES
    assert num_launched(more) <= 3 * 2 * PATCHES, more


def test_blocks_of_other_ranks_cost_nothing(monkeypatch):
    """History: each made a tensor, 43 x 12 us a turn for Flux on four ranks."""

    def on_first_rank(name):
        counted = []

        def make(model, links):
            sampler = PipeFusion(model, links, num_patches=PATCHES, split=[2], verify=False)
            sample = sampler.sample

            def counting(request):
                with Operators() as operators:
                    out = sample(request, operators.end_step)
                counted.append((links.rank, operators.last_step))
                return out

            sampler.sample = counting
            return sampler

        sample_together(name, build(name), 2, make)
        return dict(counted)[0]

    assert not of_two_blocks("flux", monkeypatch, on_first_rank)


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
