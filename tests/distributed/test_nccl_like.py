"""Training and sampling where communicators and order are those of NCCL; see `tests/nccl_like.py`."""

import pytest
import torch
from torch import nn

from tests.distributed.scenarios import check_parity, fit
from tests.distributed.tiny import Coin
from tests.nccl_like import pretend_nccl
from tests.rows import row

pytestmark = pytest.mark.distributed


def fit_like_nccl(rank, settings, world_size):
    pretend_nccl()
    return fit(rank, settings, world_size)


INTERLEAVED, V = {"num_stages": 4, "schedule": "interleaved"}, {"num_stages": 4, "schedule": "v"}
ZERO_BUBBLE = {**V, "schedule": "zero_bubble_v"}
PLAIN = {"data": {"batch_size": 4}}
COINS = {"module_class": Coin, "data": {"batch_size": 8}}
SHORT = {
    "module": {"num_blocks": 6}, "data": {"batch_size": 4, "size": 7},
    "trainer": {"max_epochs": 2, "max_steps": -1},
}  # fmt: skip


@pytest.mark.parametrize(
    ("world_size", "num_microbatches", "strategy", "settings"),
    [
        # History: each rank's first call was a receive, and on NCCL none returned before the peer's send.
        (2, 2, INTERLEAVED, PLAIN),
        pytest.param(3, 2, {"num_stages": 2, "num_replicas": (1, 2)}, PLAIN, marks=pytest.mark.slow),
        # History: receives began as where all microbatches have the longest call sequence; a coin chooses it.
        (2, 4, {"num_stages": 2, "filling": "none"}, COINS),
        row(3, 8, {"num_stages": 3}, COINS),
        row(2, 4, ZERO_BUBBLE, COINS),
        row(2, 4, INTERLEAVED, COINS),
        # History: the same where the last batch of an epoch has fewer microbatches than the schedule.
        (2, 4, INTERLEAVED, SHORT),
        row(2, 4, ZERO_BUBBLE, SHORT),
        row(2, 4, V, SHORT),
    ],
)  # fmt: skip
def test_training_needs_no_tags_and_no_order_of_messages(
    world_size, num_microbatches, strategy, settings
):
    strategy = {"process_group_backend": "nccl", **strategy}
    check_parity(
        world_size, num_microbatches, tolerance=1e-9, run=fit_like_nccl, strategy=strategy, **settings
    )  # fmt: skip


class _WaitsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, device):
        ctx.device = device
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.device.synchronize()
        return gradient, None


def fit_while_waiting_for_devices(rank, settings, world_size):
    device, forward = pretend_nccl(), nn.LayerNorm.forward

    def waiting(layer, x):
        device.synchronize()
        return forward(layer, _WaitsInBackward.apply(x, device))

    nn.LayerNorm.forward = waiting
    outcome = fit(rank, settings, world_size)
    assert device.num_waits > 0
    return outcome


@pytest.mark.parametrize(
    ("world_size", "strategy"),
    [(2, {"num_stages": 2}), (2, INTERLEAVED), row(3, {"num_stages": 3})],
)
def test_layers_may_wait_for_the_whole_device(world_size, strategy):
    """History: the first rank waited in its first forward for the gradient of the activation it was to compute."""
    # So many blocks that each rank has one that waits.
    check_parity(
        world_size, 4, run=fit_while_waiting_for_devices, module={"num_blocks": 6}, data={"batch_size": 4},
        strategy={"process_group_backend": "nccl", "timeout_s": 20, **strategy},
    )  # fmt: skip
