"""Real processes: bit-equal to the emulator, byte for byte."""

import pytest
import torch

from lightning_diffpipe.comm.links import ProcessLinks
from lightning_diffpipe.sampling.distrifusion import DistriFusion
from tests.ranks import run_ranks
from tests.sampling.distrifusion.emulate import emulate
from tests.sampling.distrifusion.models import request_for

pytestmark = pytest.mark.distributed

CASES = [
    ("sd", {"warmup_steps": 1}), ("sd", {"warmup_steps": 0, "calls_per_message": 3}),
    ("sd", {"warmup_steps": 1, "group_norm": "corrected"}), ("sd", {"mode": "synchronous"}),
    ("sd, two calls", {"warmup_steps": 1, "group_norm": "synchronous"}), ("pixart", {"warmup_steps": 1}),
    ("flux", {"warmup_steps": 1}), ("pixart", {"mode": "naive", "warmup_steps": 1}),
]  # fmt: skip
FOUR = [CASES[0], CASES[5]]


def links_of_all(world_size, timeout_s=20.0):
    return ProcessLinks.connect([list(range(world_size))], torch.device("cpu"), "gloo", timeout_s)


def sample_cases(rank, cases, world_size):
    links, results = links_of_all(world_size), []
    for name, options in cases:
        request = request_for(name, num_steps=3)
        sampler = DistriFusion(request.model, links, **options)
        latents = [sampler.sample(request) for _ in range(2 if not results else 1)]
        results.append((latents, dict(sampler.statistics.traffic.bytes_sent)))
    return results


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_equal_the_emulator_bit_for_bit(world_size):
    cases = CASES if world_size == 2 else FOUR
    ranks = run_ranks(sample_cases, world_size, cases, world_size)
    for i, (name, options) in enumerate(cases):
        wanted, samplers = emulate(request_for(name, num_steps=3), world_size, **options)
        for rank, sampler in enumerate(samplers):
            latents, sent = ranks[rank][i]
            assert all(torch.equal(x, wanted) for x in latents), (name, options)
            assert sent == dict(sampler.statistics.traffic.bytes_sent)
