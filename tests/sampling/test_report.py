"""What a request is said to have taken, and how far its pictures are said to be from others."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.sampling.mesh import SamplingMesh
from lightning_diffpipe.sampling.methods import MethodOptions, Worker
from lightning_diffpipe.sampling.report import lpips_distances
from lightning_diffpipe.sampling.statistics import SamplingStatistics, Stopwatch
from lightning_diffpipe.sampling.world import World
from tests.sampling.models import STEPS, pixart_call

BLACK, WHITE = np.zeros((2, 3, 3), np.uint8), np.full((2, 3, 3), 255, np.uint8)


@pytest.fixture
def lpips(monkeypatch, tmp_path):
    """Stands for the package and for torchvision; takes what measures, and whether there are weights."""

    def install(measure, weights=True):
        def make(net, verbose):
            assert (net, verbose) == ("alex", False)
            assert weights, "the real package would download them now"
            return measure

        url = SimpleNamespace(IMAGENET1K_V1=SimpleNamespace(url="https://a.b/models/alexnet.pth"))
        models = SimpleNamespace(AlexNet_Weights=url)
        monkeypatch.setitem(sys.modules, "lpips", SimpleNamespace(LPIPS=make))
        monkeypatch.setitem(sys.modules, "torchvision", SimpleNamespace(models=models))
        monkeypatch.setitem(sys.modules, "torchvision.models", models)
        monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
        (tmp_path / "checkpoints").mkdir()
        if weights:
            (tmp_path / "checkpoints" / "alexnet.pth").touch()

    return install


def test_lpips_is_given_pictures_between_minus_one_and_one(lpips):
    given = []
    lpips(lambda a, b: given.extend([a, b]) or torch.tensor([[[[0.25]]]]))
    assert lpips_distances([(BLACK, WHITE)] * 2) == [0.25, 0.25]
    assert [x.shape for x in given] == [(1, 3, 2, 3)] * 4
    assert [x.unique().item() for x in given] == [-1.0, 1.0] * 2


def test_without_the_package_lpips_is_named_as_absent(monkeypatch):
    monkeypatch.setitem(sys.modules, "lpips", None)
    with pytest.raises(ConfigurationError, match=r"lpips cannot be imported .*; pip install lpips"):
        lpips_distances([(BLACK, WHITE)])


def test_the_weights_of_lpips_are_not_downloaded(lpips, tmp_path):
    lpips(None, weights=False)
    message = rf"download https://a.b/models/alexnet.pth to {tmp_path}/checkpoints/alexnet.pth"
    with pytest.raises(ConfigurationError, match=message):
        lpips_distances([(BLACK, WHITE)])


def test_pictures_that_are_too_small_for_lpips_do_not_end_the_command(lpips):
    """History: a traceback, after the pictures were drawn."""

    def measure(a, b):
        raise RuntimeError("Output size is too small")

    lpips(measure)
    with pytest.raises(ConfigurationError, match="it fails on pictures of 3x2 pixels: Output size"):
        lpips_distances([(BLACK, WHITE)])


def test_a_rank_without_a_prompt_reports_nothing_of_the_request_before():
    model, call = pixart_call()
    cpu = torch.device("cpu")
    source = SimpleNamespace(denoiser=model, weights=None)
    worker = Worker(
        source, MethodOptions("single", mesh=SamplingMesh()), World.alone(cpu), cpu, 1.0
    )
    worker.sample(call, lambda step: None, worker.load(call))
    assert len(worker.report().statistics.step_s) == STEPS
    worker.place.share_of = lambda num_samples: [(0, 0)]
    worker.sample(call, lambda step: None, worker.load(call))
    assert worker.report().statistics.step_s == []


def test_steps_take_the_time_of_the_device(monkeypatch):
    """History: on a GPU the seconds of a step were those in which the host asked for it."""
    stamps, done = iter([0.0, 2.0, 5.0]), []
    clock = SimpleNamespace(
        stamp=lambda: next(stamps),
        settle=lambda: done.append("settle"),
        seconds=lambda start, stop: done.append("read") or stop - start,
    )
    monkeypatch.setattr("lightning_diffpipe.sampling.statistics.clock_for", lambda device: clock)
    statistics = SamplingStatistics()
    watch = Stopwatch(statistics, 0, torch.device("cuda"))
    watch.step_done()
    watch.step_done()
    watch.stop()
    assert statistics.step_s == [2.0, 3.0]
    assert done == ["settle", "read", "read"]
