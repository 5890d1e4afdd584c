"""What a request is said to have taken, and how far its pictures are said to be from others."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lightning_diffpipe.sampling.mesh import SamplingMesh
from lightning_diffpipe.sampling.methods import MethodOptions, Worker
from lightning_diffpipe.sampling.report import lpips_distance
from lightning_diffpipe.sampling.world import World
from tests.sampling.models import STEPS
from tests.sampling.test_guidance_halves import pixart_call


def test_lpips_is_given_pictures_between_minus_one_and_one(monkeypatch):
    given = []

    def make(net, verbose):
        assert (net, verbose) == ("alex", False)
        return lambda a, b: given.extend([a, b]) or torch.tensor([[[[0.25]]]])

    monkeypatch.setitem(sys.modules, "lpips", SimpleNamespace(LPIPS=make))
    black, white = np.zeros((2, 3, 3), np.uint8), np.full((2, 3, 3), 255, np.uint8)
    assert lpips_distance(black, white) == 0.25
    assert [x.shape for x in given] == [(1, 3, 2, 3)] * 2
    assert [x.unique().item() for x in given] == [-1.0, 1.0]


@pytest.mark.parametrize("absent", [None, SimpleNamespace()])
def test_without_lpips_there_is_no_distance(absent, monkeypatch):
    monkeypatch.setitem(sys.modules, "lpips", absent)
    assert lpips_distance(np.zeros((1, 1, 3)), np.zeros((1, 1, 3))) is None


def test_a_rank_without_a_prompt_reports_nothing_of_the_request_before():
    model, call = pixart_call()
    cpu = torch.device("cpu")
    source = SimpleNamespace(denoiser=model, weights=None)
    worker = Worker(
        source, MethodOptions("single", mesh=SamplingMesh()), World.alone(cpu), cpu, 1.0
    )
    worker.sample(call, lambda step: None)
    assert len(worker.report().statistics.step_s) == STEPS
    worker.place.share_of = lambda num_samples: [(0, 0)]
    worker.sample(call, lambda step: None)
    assert worker.report().statistics.step_s == []
