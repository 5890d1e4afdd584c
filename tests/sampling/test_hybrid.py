"""PipeFusion with several ranks in a stage, which share the tokens of every patch."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.sampling.loopback import LoopbackNetwork
from lightning_diffpipe.sampling.pipefusion import PipeFusion
from tests.sampling.models import STEPS, build, request_for


def sample_hybrid(name, tiny, num_stages, ranks_per_stage, **options):
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
        return samplers[links.rank].sample(request_for(name, tiny=tiny._replace(model=model)))

    results = LoopbackNetwork(num_stages * ranks_per_stage, timeout_s=40).run(rank)
    traffic = (sampler.statistics.traffic.bytes_sent for sampler in samplers.values())
    return results, sum(traffic, Counter())


@pytest.mark.parametrize(
    "name",
    [
        "pixart",
        "sd3",
        pytest.param("flux", marks=pytest.mark.slow),
        pytest.param("qwen", marks=pytest.mark.slow),
        pytest.param("pixart, two calls", marks=pytest.mark.slow),
        pytest.param("wan, frames", marks=pytest.mark.slow),
    ],
)
def test_sharing_a_stage_does_not_change_the_result(name):
    tiny = build(name)
    # Each rank of the last stage sees rows of its own, and all must decide alike.
    warmup = {"warmup_steps": "auto", "settled": 10.0} if name == "sd3" else {"warmup_steps": 1}
    options = {"num_patches": 2, "warmup_microbatches": 2, **warmup}
    alone = PipeFusion(tiny.model, axis=tiny.axis, **options)
    expected = alone.sample(request_for(name, tiny=tiny))
    results, sent = sample_hybrid(name, tiny, 2, 2, **options)
    for result in results:
        torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-10)
    # What crosses the cut and what returns is spread over two links each, but is not more.
    layout = alone.prepare(request_for(name, tiny=tiny)).layout
    half = len(layout.block_names) // 2
    latent_bytes = expected.numel() * expected.element_size()
    if name == "pixart":
        assert half == 2
        assert sent["hidden"] == STEPS * layout.blocks[1].output_bytes
    assert sent["latents"] == (STEPS - 1) * latent_bytes
    assert sent["result"] == (1 + 2) * latent_bytes


def test_more_ranks_in_a_stage_than_rows_in_a_patch():
    with pytest.raises(ConfigurationError, match="at most 8 patches"):
        sample_hybrid("pixart", build("pixart"), 1, 2, num_patches=16)
