"""Samplers whose messages have no tags and whose communicators are NCCL's; see `tests/nccl_like.py`."""

import pytest
import torch
from torch import nn

from lightning_diffpipe.comm import links
from lightning_diffpipe.comm.links import ProcessLinks
from lightning_diffpipe.comm.packing import TensorShape
from lightning_diffpipe.sampling.distrifusion import DistriFusion, emulate
from lightning_diffpipe.sampling.pipefusion import PipeFusion, SequenceParallel
from tests.nccl_like import pretend_nccl
from tests.ranks import run_ranks
from tests.rows import row
from tests.sampling.distrifusion import models as banded
from tests.sampling.models import build, request_for, sample_plainly

pytestmark = pytest.mark.distributed
CPU = torch.device("cpu")
PATCHES = {"num_patches": 4, "warmup_steps": "auto", "warmup_threshold": 0.5, "verify": False}
BANDS = {"warmup_steps": 1, "group_norm": "corrected"}


def wait_for_device_in_layers(device):
    """From now on every linear layer first waits for the whole device."""
    forward = nn.Linear.forward

    def waiting(layer, x):
        device.synchronize()
        return forward(layer, x)

    nn.Linear.forward = waiting


def sample_all(rank, waits, num_ranks):
    device = pretend_nccl()
    if waits:
        wait_for_device_in_layers(device)
    links = ProcessLinks.connect([range(num_ranks)], CPU, "nccl", timeout_s=8)
    tiny = build("sd3")
    pipefusion = PipeFusion(tiny.model, links, axis=tiny.axis, **PATCHES)
    drawn = [pipefusion.sample(request_for("sd3", tiny=tiny))]
    request = banded.request_for("sd", num_steps=3)
    drawn.append(DistriFusion(request.model, links, **BANDS).sample(request))
    for mode in ("ring", "ulysses")[: 4 - num_ranks]:  # heads of which there are two
        tiny = build("sd3")
        sampler = SequenceParallel(tiny.model, links, mode=mode, verify=False)
        drawn.append(sampler.sample(request_for("sd3", tiny=tiny)))
    assert bool(device.num_waits) == waits
    return drawn


@pytest.mark.parametrize(("waits", "num_ranks"), [row(False, 2), (True, 2), row(True, 3)])
def test_samplers_need_no_tags_and_no_order_of_first_messages(waits, num_ranks):
    """History: both ranks of a pair first received, and on NCCL neither call returned."""
    tiny = build("sd3")
    serial = sample_plainly(request_for("sd3"))
    patches = PipeFusion(tiny.model, axis=tiny.axis, **PATCHES).sample(
        request_for("sd3", tiny=tiny)
    )
    bands, _ = emulate(banded.request_for("sd", num_steps=3), num_ranks, **BANDS)
    for drawn in run_ranks(sample_all, num_ranks, waits, num_ranks):
        for latents, expected in zip(drawn, [patches, bands, serial, serial], strict=False):
            torch.testing.assert_close(latents, expected, rtol=1e-10, atol=1e-10)


def communicators_made(rank):
    device = pretend_nccl()
    made, open_edge = [], links.open_edge
    links.open_edge = lambda group, *pair: made.append(tuple(pair[:2])) or open_edge(group, *pair)
    counts = []
    for chained in (True, False):
        found = ProcessLinks.connect([[0, 1, 2]], CPU, "nccl", timeout_s=8, chained=chained)
        if chained:  # the last stage has the result
            [found.send(torch.ones(1), to, "result") for to in range(2) if found.rank == 2]
            if found.rank < 2:
                found.receive(TensorShape((1,), torch.float32), 2, "result").wait()
        found.disconnect()
        counts.append(len(made))
        made.clear()
    assert device
    return counts


def test_edges_that_carry_no_message_have_no_communicator():
    """History: N(N - 1) for each axis, 56 on eight ranks, where a chain of stages needs 14 and bands none."""
    assert run_ranks(communicators_made, 3) == [[4, 0]] * 3
