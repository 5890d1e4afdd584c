"""The systems of benchmarks/bubble_filling compute the same gradients as one process, in double precision."""

import copy

import pytest
import torch
from torch import nn

from tests.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.distributed]
SYSTEMS = ("filled", "filled zero-bubble", "unfilled", "torch 1F1B", "torch GPipe", "DDP", "FSDP2")


def small_workload():
    from benchmarks.bubble_filling.workloads import LAYERS, Workload

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8)

        def forward(self, batch):
            return self.second(torch.tanh(self.first(batch["image"]))) + batch["noise"]

    torch.manual_seed(0)
    model = Workload(Encoder())
    model.denoiser = nn.Sequential(
        *[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(LAYERS)]
    )
    batch = {name: torch.randn(8, 3, width, dtype=torch.float64)
             for name, width in (("image", 6), ("noise", 8), ("target", 8))}  # fmt: skip
    return model.double(), batch


def errors_of(rank, microbatches):
    from benchmarks.bubble_filling import peers
    from benchmarks.two_ranks.main import worst_error

    model, batch = small_workload()
    reference = copy.deepcopy(model)
    reference.training_step(batch, 0).backward()
    wanted = peers.gradients(reference)
    found = {}
    for name in SYSTEMS:
        own = copy.deepcopy(model)
        step = peers.SYSTEMS[name](own, batch, microbatches, rank)
        errors = []
        for _ in range(3):  # the second and third read what was encoded in the bubbles before
            step()
            got = peers.gradients(own)
            errors.append(worst_error(got, wanted))
        found[name] = (max(errors), len(got))
    return found


def test_gradients_equal_one_process():
    results = run_ranks(errors_of, 2, 4)
    for name in SYSTEMS:
        assert max(result[name][0] for result in results) < 1e-11, name
        held = sum(result[name][1] for result in results)
        assert held == (32 if name in ("DDP", "FSDP2") else 16), name
