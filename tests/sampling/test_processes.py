"""Real processes on gloo: the same bits as one process, whatever the number of ranks."""

import time

import pytest
import torch

from lightning_diffpipe.comm.links import ProcessLinks
from lightning_diffpipe.graph.placement import place_parameters
from lightning_diffpipe.sampling.pipefusion import PipeFusion
from lightning_diffpipe.sampling.pipefusion.stages import resident_parameters
from tests.ranks import run_ranks
from tests.sampling.models import build, request_for
from tests.sampling.traffic import (
    cut_bytes,
    messages_per_call,
    pipefusion_bytes,
    pipefusion_messages,
)

pytestmark = pytest.mark.distributed
CPU = torch.device("cpu")
OPTIONS = {"num_patches": 4, "warmup_steps": 1, "warmup_microbatches": 2, "verify": True}


def pipefusion(rank, world_size, names):
    """Each rank holds nothing but its own blocks; results and what was sent."""
    links = ProcessLinks.connect([range(world_size)], CPU, timeout_s=20)
    out = {}
    for name in names:
        tiny = build(name)
        sampler = PipeFusion(tiny.model, links, axis=tiny.axis, **OPTIONS)
        request = request_for(name, tiny=tiny)
        setting = sampler.prepare(request)
        own = resident_parameters(tiny.model, setting.layout, setting.stages, rank)
        place_parameters(tiny.model, own, CPU)
        result = sampler.sample(request)
        latent_bytes = result.numel() * result.element_size()
        planned = pipefusion_bytes(
            setting.plan, cut_bytes(setting.stages, setting.layout), latent_bytes
        )
        messages = pipefusion_messages(setting.plan, messages_per_call(setting.stages))
        traffic = sampler.statistics.traffic
        sent = (dict(traffic.bytes_sent), dict(traffic.messages_sent))
        out[name] = (result, sent, (planned, messages))
    links.disconnect()
    return out


@pytest.mark.parametrize(
    ("world_size", "names"),
    [(2, ["pixart, two calls", "dit", "sd3", "flux"]), (4, ["pixart", "wan"])],
)
def test_ranks_equal_the_emulator(world_size, names):
    ranks = run_ranks(pipefusion, world_size, world_size, names)
    for name in names:
        tiny = build(name)
        expected = PipeFusion(tiny.model, axis=tiny.axis, **OPTIONS).sample(
            request_for(name, tiny=tiny)
        )
        assert all(torch.equal(rank[name][0], expected) for rank in ranks), name
        for i in range(2):
            total: dict[str, int] = {}
            for rank in ranks:
                for kind, count in rank[name][1][i].items():
                    total[kind] = total.get(kind, 0) + count
            assert total == ranks[0][name][2][i], name


def waits_for_a_plain_object(rank):
    links = ProcessLinks.connect([[0, 1]], CPU, timeout_s=4, patience_s=30)
    found = links.broadcast_object(lambda: time.sleep(6) or "a layout")
    links.disconnect()
    return found


def test_in_training_a_rank_may_probe_for_longer_than_messages_are_waited_for():
    """History: drawing samples ended a training run where the first probe took longer than timeout_s."""
    assert run_ranks(waits_for_a_plain_object, 2) == ["a layout"] * 2
