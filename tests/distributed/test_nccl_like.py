"""Training and sampling where communicators and order are those of NCCL; see `tests/nccl_like.py`."""

import pytest
import torch
from torch import nn

from tests.distributed.scenarios import Settings, assert_equal_runs, fit, reference
from tests.distributed.tiny import Coin
from tests.nccl_like import pretend_nccl
from tests.ranks import run_ranks
from tests.rows import row

pytestmark = pytest.mark.distributed


def fit_like_nccl(rank, settings, world_size):
    pretend_nccl()
    return fit(rank, settings, world_size)


@pytest.mark.parametrize(
    ("world_size", "strategy"),
    [
        (2, {"num_stages": 4, "schedule": "interleaved"}),
        pytest.param(3, {"num_stages": 2, "num_replicas": (1, 2)}, marks=pytest.mark.slow),
    ],
)
def test_training_needs_no_tags_and_no_order_of_first_messages(world_size, strategy):
    """History: each rank's first call was a receive, and on NCCL none returned before the peer's send."""
    settings = Settings(trainer={"max_steps": 2, "max_epochs": -1}, data={"batch_size": 4})
    expected = reference(settings, 2)
    settings.strategy = {"num_microbatches": 2, "process_group_backend": "nccl", **strategy}
    outcomes = run_ranks(fit_like_nccl, world_size, settings, world_size)
    assert_equal_runs(outcomes, expected, 1e-10)


@pytest.mark.parametrize(
    ("world_size", "num_microbatches", "strategy"),
    [
        (2, 4, {"filling": "none"}),
        row(3, 8, {}),
        row(2, 4, {"schedule": "zero_bubble_v", "num_stages": 4}),
        row(2, 4, {"schedule": "interleaved", "num_stages": 4}),
    ],
)
def test_coins_mix_microbatches_of_several_forms(world_size, num_microbatches, strategy):
    """History: receives began as where all microbatches take the longest form."""
    settings = Settings(
        module_class=Coin, trainer={"max_steps": 3, "max_epochs": -1}, data={"batch_size": 8}
    )
    trains_like_one_process(settings, world_size, num_microbatches, strategy)


@pytest.mark.parametrize(
    ("world_size", "num_microbatches", "strategy"),
    [
        (2, 4, {"schedule": "interleaved", "num_stages": 4}),
        row(2, 4, {"schedule": "zero_bubble_v", "num_stages": 4}),
        row(2, 4, {"schedule": "v", "num_stages": 4}),
    ],
)
def test_the_last_batch_of_an_epoch_has_fewer_microbatches(world_size, num_microbatches, strategy):
    """History: as above, where the full schedule's receives begin before instructions that were not there."""
    settings = Settings(
        {"num_blocks": 6}, trainer={"max_epochs": 2}, data={"batch_size": 4, "size": 7}
    )
    trains_like_one_process(settings, world_size, num_microbatches, strategy)


def trains_like_one_process(settings, world_size, num_microbatches, strategy):
    expected = reference(settings, num_microbatches)
    options = {"num_microbatches": num_microbatches, "process_group_backend": "nccl"}
    settings.strategy = {"num_stages": world_size, **options, **strategy}
    outcomes = run_ranks(fit_like_nccl, world_size, settings, world_size)
    assert_equal_runs(outcomes, expected, 1e-9)


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
    [
        (2, {"num_stages": 2, "num_microbatches": 4}),
        (2, {"num_stages": 4, "schedule": "interleaved", "num_microbatches": 4}),
        row(3, {"num_stages": 3, "num_microbatches": 4}),
    ],
)
def test_layers_may_wait_for_the_whole_device(world_size, strategy):
    """History: receives began before what they depend on. The first rank waited in its first forward, for
    memory that cuDNN's benchmark gave back, for the gradient of the activation it was about to compute.
    """
    trainer = {"max_steps": 2, "max_epochs": -1}
    # So many that each rank has one that waits.
    settings = Settings({"num_blocks": 6}, trainer=trainer, data={"batch_size": 4})
    expected = reference(settings, 4)
    settings.strategy = {"process_group_backend": "nccl", "timeout_s": 20, **strategy}
    outcomes = run_ranks(fit_while_waiting_for_devices, world_size, settings, world_size)
    assert_equal_runs(outcomes, expected, 1e-10)
