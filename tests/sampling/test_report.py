"""What a request is said to have taken."""

from types import SimpleNamespace

import torch

from lightning_diffpipe.sampling.methods import MethodOptions, Worker
from lightning_diffpipe.sampling.report import SamplingStatistics, Stopwatch
from lightning_diffpipe.sampling.world import SamplingMesh, World
from tests.sampling.models import STEPS, pixart_call


def test_a_rank_without_a_prompt_reports_nothing_of_the_request_before():
    model, call = pixart_call()
    cpu = torch.device("cpu")
    source = SimpleNamespace(denoiser=model, weights=None)
    worker = Worker(
        source, MethodOptions("single", mesh=SamplingMesh()), World.alone(cpu), cpu, 1.0
    )
    worker.sample(call, lambda step: None, worker.load(call))
    assert len(worker.report().step_s) == STEPS
    worker.mesh_links.shares_of = lambda num_samples: [(0, 0)]
    worker.sample(call, lambda step: None, worker.load(call))
    assert worker.report().step_s == []


def test_steps_take_the_time_of_the_device(monkeypatch):
    """History: on a GPU the seconds of a step were those in which the host asked for it."""
    stamps, done = iter([0.0, 2.0, 5.0]), []
    clock = SimpleNamespace(
        stamp=lambda: next(stamps),
        settle=lambda: done.append("settle"),
        seconds=lambda start, stop: done.append("read") or stop - start,
    )
    monkeypatch.setattr("lightning_diffpipe.sampling.report.clock_for", lambda device: clock)
    statistics = SamplingStatistics()
    watch = Stopwatch(statistics, torch.device("cuda"))
    watch.step_done()
    watch.step_done()
    watch.stop()
    assert statistics.step_s == [2.0, 3.0]
    assert done == ["settle", "read", "read"]
