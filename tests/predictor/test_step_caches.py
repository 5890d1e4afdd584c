"""Step caches with the Predictor: several ranks draw what one draws with the same cache."""

import pytest
import torch
from diffusers import FasterCacheConfig, FirstBlockCacheConfig, PyramidAttentionBroadcastConfig

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.predictor import Predictor
from lightning_diffpipe.sampling.step_caches import refuse_cache_of
from tests.predictor.scenarios import final_latents
from tests.predictor.tiny_pipelines import options_of, prompts_of
from tests.ranks import run_ranks

STEPS = 8
FIRST_BLOCK = FirstBlockCacheConfig(threshold=0.4)
ATTENTION = PyramidAttentionBroadcastConfig(spatial_attention_block_skip_range=2)


def latents_of(path, name, **options):
    """Final latents of two equal requests."""
    settings = {"num_inference_steps": STEPS, "guidance_scale": 3.0, **options_of(name)}
    return final_latents(path, [(prompts_of(name), settings)] * 2, dtype=torch.float64, **options)


def draw_each(rank, path, name, several):
    return [latents_of(path, name, **options) for options in several]


@pytest.mark.distributed
def test_ranks_draw_what_one_rank_draws_with_the_same_cache(folder_of):
    """Halves of guidance in the batch decide by both branches; a second request begins anew."""
    path, halves = folder_of("pixart"), {"method": "single", "guidance": 2}
    patches = {"method": "pipefusion", "num_patches": 2}
    jobs = [
        halves | {"cache": FIRST_BLOCK},
        patches | {"cache": FIRST_BLOCK},
        patches | {"cache": ATTENTION},
    ]
    ranks = run_ranks(draw_each, 2, path, "pixart", jobs)
    for job, options in enumerate(jobs):
        alone = {name: value for name, value in options.items() if name != "guidance"}
        expected, again = latents_of(path, "pixart", **alone)
        plain, _ = latents_of(path, "pixart", **alone | {"cache": None})
        assert torch.equal(expected, again)
        assert 1e-6 < (expected - plain).norm() / plain.norm() < 0.2
        tolerance = 1e-10 if "guidance" in options else 0.0
        for found in ranks:
            for latents in found[job]:
                torch.testing.assert_close(latents, expected, rtol=tolerance, atol=tolerance)


def test_a_cache_that_only_the_model_knows_is_refused(folder_of):
    """History: a probe took what hooks had stored for what blocks compute."""
    with Predictor.from_pretrained(folder_of("flux"), method="pipefusion") as predictor:
        predictor.source.denoiser.enable_cache(FIRST_BLOCK)
        # History: with the same one for the Predictor, that diffusers has such hooks already was all it said.
        refuse_cache_of(predictor.source.denoiser, FIRST_BLOCK)
        with pytest.raises(ConfigurationError, match="give cache= to the Predictor"):
            predictor(prompts_of("flux")[:1], num_inference_steps=2, **options_of("flux"))


def test_a_cache_that_finds_nothing_to_skip_is_refused_before_weights_are_read(folder_of):
    """History: it was refused by the first request, when every rank had read its weights."""
    reason = "diffusers cannot skip anything in a PixArtTransformer2DModel"
    for method in ("pipefusion", "auto"):
        with pytest.raises(ConfigurationError, match=reason):
            Predictor.from_pretrained(folder_of("pixart"), method, cache="taylor_seer")


def test_a_cache_whose_hooks_fail_is_refused_with_what_it_needs(folder_of):
    """History: `cache="faster"`, which takes all latents for videos, ended in an error of torch."""
    settings = {"num_inference_steps": 4, **options_of("pixart")}
    path, prompts = folder_of("pixart"), prompts_of("pixart")
    reason = "FasterCacheConfig: the hook of diffusers fails on .* tensor_format=BCHW for images"
    with (
        Predictor.from_pretrained(path, "single", cache="faster") as predictor,
        pytest.raises(ConfigurationError, match=reason),
    ):
        predictor(prompts, **settings)
    images = FasterCacheConfig(tensor_format="BCHW", attention_weight_callback=None)
    with Predictor.from_pretrained(path, "single", cache=images) as predictor:
        assert len(predictor(prompts, **settings)) == 2
