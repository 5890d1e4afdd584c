"""Two halves of the ranks, one for each branch of guidance: the same result, and no row is sent twice."""

import copy
import functools

import pytest
import torch

from lightning_diffpipe.comm.links import Traffic, start_all_gather
from lightning_diffpipe.comm.loopback import LoopbackNetwork
from lightning_diffpipe.comm.packing import TensorShape
from lightning_diffpipe.sampling.distrifusion import DistriFusion, emulate
from lightning_diffpipe.sampling.pipefusion import PipeFusion, SequenceParallel
from lightning_diffpipe.sampling.request import OneProcess
from tests.sampling.models import STEPS, pixart_call


def sample_in_halves(model, call, num_ranks, make, per_rank=1):
    """Rank `branch * num_ranks + position`; `make(model, links, inside)` makes the sampler of a position."""
    stages = num_ranks // per_rank
    pipelines = [[LoopbackNetwork(stages) for _ in range(per_rank)] for _ in range(2)]
    inside = [[LoopbackNetwork(per_rank) for _ in range(stages)] for _ in range(2)]
    pairs = [LoopbackNetwork(2) for _ in range(num_ranks)]
    statistics = {}

    def rank(links):
        branch, position = divmod(links.rank, num_ranks)
        stage, share = divmod(position, per_rank)
        own, pair = copy.deepcopy(model), pairs[position].links[branch]

        def exchange(prediction):
            shapes = [TensorShape.of(prediction)] * 2
            return tuple(start_all_gather(pair, prediction, shapes, "prediction")())

        sampler = make(
            own, pipelines[branch][share].links[stage], inside[branch][stage].links[share]
        )
        result = sampler.sample(call.branch(branch).request(own, exchange))
        statistics[links.rank] = pair.traffic
        return result

    results = LoopbackNetwork(2 * num_ranks).run(rank)
    return results, functools.reduce(Traffic.plus, statistics.values())


def check(found, expected, num_predictions, num_messages):
    """Compares results, and counts what was sent, in bytes of whole latents and in messages."""
    results, traffic = found
    for result in results:
        torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-10)
    latent_bytes = expected.numel() * expected.element_size()
    assert traffic.bytes_sent == {"prediction": num_predictions * latent_bytes}
    assert traffic.messages_sent == {"prediction": num_messages}


def pipefusion(model, links, inside):
    return PipeFusion(model, links, num_patches=4, sequence_links=inside, verify=True)


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "per_rank"), [(1, 1), (2, 1), (2, 2)])
def test_pipefusion_sends_the_rows_of_a_patch(num_ranks, per_rank):
    """Once it was the whole prediction, for every patch, with its variance: eight times as much."""
    model, call = pixart_call()
    expected = PipeFusion(model, num_patches=4).sample(call.request(model))
    found = sample_in_halves(model, call, num_ranks, pipefusion, per_rank)
    check(found, expected, 2 * STEPS, 2 * per_rank * (1 + (STEPS - 1) * 4))


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_sequence_parallelism_sends_the_rows_of_a_rank(num_ranks):
    model, call = pixart_call()
    expected = OneProcess().sample(call.request(model))
    found = sample_in_halves(
        model, call, num_ranks, lambda m, links, inside: SequenceParallel(m, inside), num_ranks
    )
    check(found, expected, 2 * STEPS, 2 * num_ranks * STEPS)


@pytest.mark.slow
def test_bands_send_whole_predictions():
    """Every rank of a half steps all rows, so each sends the whole branch to its partner; but no variance."""
    model, call = pixart_call()
    expected, _ = emulate(call.request(model), 2, warmup_steps=1, verify=False)
    found = sample_in_halves(
        model, call, 2,
        lambda m, links, inside: DistriFusion(m, links, warmup_steps=1, verify=False),
    )  # fmt: skip
    check(found, expected, 2 * 2 * STEPS, 2 * 2 * STEPS)


@pytest.mark.slow
def test_an_automatic_warmup_ends_alike_in_both_halves():
    """Each half decides by the prediction after guidance, which both have."""
    model, call = pixart_call()
    found = []

    def make(m, links, inside):
        found.append(
            PipeFusion(m, links, num_patches=2, warmup_steps="auto", warmup_threshold=10.0)
        )
        return found[-1]

    results, _ = sample_in_halves(model, call, 2, make)
    assert all(torch.equal(result, results[0]) for result in results)
    assert {sampler.statistics.num_synchronous for sampler in found} == {1}
