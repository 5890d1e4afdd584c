"""Step caches of diffusers: on one rank what diffusers draws with them, on several ranks what one draws.

Models are float64, random and without zeros. Thresholds are such that some steps are skipped and some are not,
which the runs of blocks show.
"""

import copy
from collections import Counter

import pytest
import torch
from diffusers import hooks

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.sampling.distrifusion import DistriFusion, emulate
from lightning_diffpipe.sampling.methods import MethodOptions, fitted
from lightning_diffpipe.sampling.pipefusion import PipeFusion, SequenceParallel
from lightning_diffpipe.sampling.request import OneProcess
from lightning_diffpipe.sampling.step_caches import step_cache_named
from tests.rows import row
from tests.sampling.models import build, knowing, request_for
from tests.sampling.ranks_in_threads import sample_together

STEPS = 10
ALWAYS = (-1, 2000)  # timesteps
CACHES = {
    "first_block": hooks.FirstBlockCacheConfig(threshold=0.5),
    "mag": hooks.MagCacheConfig(
        threshold=0.2, num_inference_steps=STEPS, mag_ratios=[1.0, 1.01, 0.99, 1.02] * 2 + [1.0] * 2
    ),
    "pyramid_attention": hooks.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2, spatial_attention_timestep_skip_range=ALWAYS
    ),
    "taylor_seer": hooks.TaylorSeerCacheConfig(
        cache_interval=3, disable_cache_before_step=2, taylor_factors_dtype=torch.float64
    ),
    "taylor_seer, lite": hooks.TaylorSeerCacheConfig(
        cache_interval=3,
        disable_cache_before_step=2,
        taylor_factors_dtype=torch.float64,
        use_lite_mode=True,
    ),
    "faster": hooks.FasterCacheConfig(
        is_guidance_distilled=True,
        spatial_attention_timestep_skip_range=(-1, 800),
        spatial_attention_block_identifiers=("transformer_blocks",),
    ),
}
_IN_EVERY_BLOCK = ("ff.net.0.proj", "proj_mlp")


def counted(model):
    """Counts runs of blocks and of attention from now on, by layers of them."""
    runs = Counter()
    for name, module in model.named_modules():
        kind = "blocks" if name.endswith(_IN_EVERY_BLOCK) else "attention"
        if kind == "blocks" or name.endswith("attn.to_q") or name.endswith("attn1.to_q"):
            module.register_forward_hook(lambda *_, kind=kind: runs.update([kind]))
    return runs


def sampled_alone(name, cache, make=lambda model: OneProcess()):
    tiny = build(name)
    sampler = make(tiny.model)
    if hasattr(sampler, "layouts"):
        knowing(sampler, name, tiny)
    runs = counted(tiny.model)
    return sampler.sample(request_for(name, num_steps=STEPS, tiny=tiny, cache=cache)), runs


def sampled_together(name, cache, make, num_ranks=2):
    tiny, runs = build(name), []

    def counting(model, links):
        runs.append(counted(model))
        return make(model, links)

    latents, _ = sample_together(name, tiny, num_ranks, counting, num_steps=STEPS, cache=cache)
    return latents, runs


def patches(num_patches=4, warmup_steps=1):
    def make(model, *links):
        split = [*range(1, links[0].num_ranks)] if links else None  # else blocks run to be measured
        return PipeFusion(
            model, *links, num_patches=num_patches, warmup_steps=warmup_steps, split=split
        )

    return make


@pytest.mark.parametrize("cache", CACHES)
def test_one_rank_draws_what_diffusers_draws(cache):
    found, runs = sampled_alone("flux", CACHES[cache])
    tiny = build("flux")
    request, config, now = request_for("flux", num_steps=STEPS, tiny=tiny), CACHES[cache], [0]
    config = copy.copy(config)
    if hasattr(config, "current_timestep_callback"):
        config.current_timestep_callback = lambda: now[0]
    tiny.model.enable_cache(config)
    own, latents = counted(tiny.model), request.latents
    with torch.inference_mode():
        for t in request.timesteps:
            now[0] = float(t)
            with tiny.model.cache_context("cond"):
                prediction = request.denoise(latents, t)
            latents = request.scheduler.step(prediction, t, latents).prev_sample
    assert torch.equal(found, latents)
    assert runs == own
    plain, every = sampled_alone("flux", None)
    assert every == {"blocks": 5 * STEPS, "attention": 5 * STEPS}
    assert runs.total() < every.total(), "nothing was skipped"
    assert not torch.equal(found, plain)


@pytest.mark.parametrize(
    ("name", "cache", "num_patches", "warmup_steps", "num_ranks"),
    [
        ("flux", "first_block", 4, 1, 2),
        ("flux", "mag", 4, 3, 3),
        ("flux", "pyramid_attention", 4, 1, 2),
        ("flux", "taylor_seer", 4, 1, 2),
        ("flux", "taylor_seer, lite", 4, 1, 2),
        ("pixart, two calls", "first_block", 3, 2, 2),
        row("flux", "first_block", 1, 1, 3),
        row("flux", "first_block", 4, 0, 2),
        row("flux", "first_block", 4, STEPS, 2),
        row("flux", "taylor_seer", 4, "auto", 2),
        row("pixart", "first_block", 4, 3, 2),
        row("pixart, two calls", "mag", 4, 1, 2),
        row("wan", "pyramid_attention", 4, 1, 2),
        row("sd3", "mag", 4, 1, 2),
    ],
)
def test_stages_draw_the_bits_of_one_rank(name, cache, num_patches, warmup_steps, num_ranks):
    """The emulator decides for each patch by itself, and stores for each patch by itself."""
    make, config = patches(num_patches, warmup_steps), CACHES[cache]
    expected, runs = sampled_alone(name, config, make)
    ranks, found = sampled_together(name, config, make, num_ranks)
    assert all(torch.equal(rank, expected) for rank in ranks)
    assert sum(found, Counter()) == runs
    without, every = sampled_alone(name, None, make)
    assert runs.total() < every.total(), "nothing was skipped"
    assert (expected - without).norm() < 0.1 * without.norm()


@pytest.mark.parametrize("cache", ["first_block", "taylor_seer", row("mag")])
def test_all_steps_synchronous_is_plain_caching(cache):
    expected, _ = sampled_alone("flux", CACHES[cache])
    found, _ = sampled_alone("flux", CACHES[cache], patches(4, STEPS))
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("name", "mode", "cache"),
    [
        ("flux", "ulysses", "first_block"),
        ("pixart", "ring", "first_block"),
        ("flux", "synchronous", "first_block"),
        ("flux", "ring", "taylor_seer"),
        ("flux", "synchronous", "pyramid_attention"),
        # Attention to texts is computed where that to images is not.
        ("pixart", "ulysses", "pyramid_attention"),
        row("flux", "ulysses", "mag"),
        row("flux", "ulysses", "faster"),
        row("flux", "synchronous", "mag"),
        row("flux", "synchronous", "faster"),
        row("pixart", "synchronous", "pyramid_attention"),
        row("pixart, two calls", "synchronous", "first_block"),
    ],
)
def test_ranks_that_share_tokens_skip_what_one_process_skips(name, mode, cache):
    def make(model, links):
        if mode == "synchronous":
            return DistriFusion(model, links, mode=mode, verify=False)
        sampler = SequenceParallel(model, links, mode=mode)
        sampler._rehearse_once = lambda *_: (
            None
        )  # which runs blocks, too; unread tokens are NaN as ever
        return sampler

    expected, runs = sampled_alone(name, CACHES[cache])
    ranks, found = sampled_together(name, CACHES[cache], make)
    for latents in ranks:
        torch.testing.assert_close(latents, expected, rtol=1e-10, atol=1e-10)
    assert found[1] == runs  # rank 0 also looks at the model


@pytest.mark.parametrize("cache", ["first_block", "pyramid_attention", row("taylor_seer")])
def test_bands_read_what_others_sent_when_they_last_computed(cache):
    """With a cache that skips nothing, displaced bands draw the bits that they draw without one."""

    def make(model, links):
        return DistriFusion(model, links, warmup_steps=2)

    never = {
        "first_block": hooks.FirstBlockCacheConfig(threshold=0.0),
        "pyramid_attention": hooks.PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=1
        ),
        "taylor_seer": hooks.TaylorSeerCacheConfig(disable_cache_before_step=STEPS),
    }
    expected, _ = emulate(request_for("flux", num_steps=STEPS), 2, warmup_steps=2)
    ranks, every = sampled_together("flux", never[cache], make)
    assert all(torch.equal(latents, expected) for latents in ranks)
    (latents, other), runs = sampled_together("flux", CACHES[cache], make)
    assert torch.equal(latents, other)
    assert runs[1].total() < every[1].total(), "nothing was skipped"
    assert 0 < (latents - expected).norm() < 0.05 * expected.norm()


def test_a_model_is_left_as_it_was():
    tiny = build("flux")
    with torch.inference_mode():
        before = tiny.denoise(tiny.model)(tiny.latents, torch.tensor(500.0))
        OneProcess().sample(request_for("flux", tiny=tiny, cache=CACHES["first_block"]))
        after = tiny.denoise(tiny.model)(tiny.latents, torch.tensor(500.0))
    assert torch.equal(before, after)
    left = {"forward", "_diffusers_hook"}
    assert not any(left & vars(module).keys() for module in tiny.model.modules())


@pytest.mark.parametrize(
    ("cache", "options", "reason"),
    [
        ("fast", {}, "cache='fast'; choose first_block"),
        (hooks.SeaCacheConfig(), {}, "or a configuration of diffusers"),
        ("first_block", {"compile": "blocks"}, "no place for what hooks decide"),
        ("faster", {"method": "pipefusion"}, "of which a patch has none"),
        ("faster", {"method": "sequence"}, "halves the samples"),
        (hooks.MagCacheConfig(calibrate=True), {"method": "sequence"}, "calibrate on one rank"),
        (
            hooks.FasterCacheConfig(attention_weight_callback=lambda _: 0.5),
            {},
            "a function as attention_weight_callback",
        ),
    ],
)
def test_what_cannot_be_cached_is_refused(cache, options, reason):
    with pytest.raises(ConfigurationError, match=reason):
        fitted(MethodOptions(**{"method": "single", "cache": cache} | options), 2)


@pytest.mark.parametrize(
    ("name", "cache", "reason"),
    [
        ("pixart", "taylor_seer", "cannot skip anything in a PixArtTransformer2DModel"),
        ("lumina2", "first_block", "cannot skip anything in a Lumina2"),
        ("sd3", "first_block", "its last block returns no text"),
    ],
)
def test_models_that_a_cache_does_not_know_are_refused(name, cache, reason):
    with pytest.raises(ConfigurationError, match=reason):
        OneProcess().sample(request_for(name, cache=CACHES[cache]))


def test_values_of_configurations_are_looked_at():
    """History: they ended in an error of torch or Python, when all weights had been read."""
    series = step_cache_named(hooks.TaylorSeerCacheConfig(taylor_factors_dtype="float32"))
    assert series.taylor_factors_dtype is torch.float32
    with pytest.raises(ConfigurationError, match=r"cache\.taylor_factors_dtype='int4'"):
        step_cache_named(hooks.TaylorSeerCacheConfig(taylor_factors_dtype="int4"))
    with pytest.raises(
        ConfigurationError, match=r"cache\.threshold must be a number >= 0; got 'a'"
    ):
        step_cache_named(hooks.FirstBlockCacheConfig(threshold="a"))
