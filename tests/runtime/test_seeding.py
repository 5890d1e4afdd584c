"""Seeds that ranks share."""

import random

import numpy as np
import torch

from lightning_diffpipe.graph import rng
from lightning_diffpipe.graph.rng import isolated_random_numbers


def test_all_generators_are_seeded_and_put_back(monkeypatch):
    """History: that of a GPU was not, and ranks validated with noise of their own."""
    gpu = torch.Generator()  # stands for that of a GPU
    monkeypatch.setattr(rng, "_cuda_generator", lambda: gpu)

    def draw():
        return [
            random.random(), np.random.rand(), float(torch.rand(())),
            float(torch.rand((), generator=gpu)),
        ]  # fmt: skip

    drawn = []
    for _ in range(2):
        before = rng.capture(host=True)
        with isolated_random_numbers(7):
            drawn.append(draw())
        after = rng.capture(host=True)
        assert torch.equal(before.cpu, after.cpu)
        assert torch.equal(before.cuda, after.cuda)
        assert before.host[0] == after.host[0]
        draw()
    assert drawn[0] == drawn[1]
