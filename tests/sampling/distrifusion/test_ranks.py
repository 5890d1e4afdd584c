"""Real processes: bit-equal to the emulator, byte for byte, and an end for all when one dies."""

import os
import time

import pytest
import torch

from lightning_diffpipe.comm.links import ProcessLinks
from lightning_diffpipe.errors import ConfigurationError, PipelineTimeoutError
from lightning_diffpipe.sampling.distrifusion import DistriFusion, emulate
from tests.ranks import run_ranks
from tests.sampling.distrifusion.models import build, request_for

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


def lose_a_rank(rank):
    links = links_of_all(2, timeout_s=6.0)
    request = request_for("sd")

    def on_step(step):
        if rank == 1 and step == 1:
            time.sleep(14.0)  # rank 0 may come to its wait seconds later

    started_s = time.monotonic()
    try:
        DistriFusion(request.model, links, warmup_steps=1, verify=False).sample(request, on_step)
    except PipelineTimeoutError as error:
        return str(error), time.monotonic() - started_s
    return "sampled", 0.0


@pytest.mark.slow
def test_a_rank_that_stops_answering_is_reported_and_nobody_hangs():
    results = run_ranks(lose_a_rank, 2, timeout_s=60.0)
    said, waited_s = results[0]
    assert "rank 0 waited for" in said
    assert "rank 1" in said
    assert waited_s < 30


def kill_a_rank(rank):
    links = links_of_all(2, timeout_s=20.0)
    request = request_for("sd")

    def on_step(step):
        if rank == 1 and step == 1:
            os.kill(os.getpid(), 9)

    try:
        DistriFusion(request.model, links, warmup_steps=1, verify=False).sample(request, on_step)
    except PipelineTimeoutError as error:
        raise AssertionError(f"as it should: {error}") from None


def test_a_killed_rank_ends_the_other_with_a_reason():
    with pytest.raises(AssertionError, match=r"as it should: rank 0 waited for .*lost rank 1"):
        run_ranks(kill_a_rank, 2, timeout_s=60.0)


def refuse_everywhere(rank):
    links = links_of_all(2)
    tiny = build("sd")
    request = request_for("sd", tiny._replace(latents=tiny.latents[..., :30, :]))
    try:
        DistriFusion(request.model, links).sample(request)
    except ConfigurationError as error:
        return str(error)


def test_refusals_reach_every_rank():
    said = run_ranks(refuse_everywhere, 2)
    assert said[0] == said[1]
    assert "30 rows" in said[0]
