"""Ranks agree what their messages travel over, by the GPUs that they have and not by how they were started.

What a request is said to have taken.
"""

import logging
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lightning_diffpipe.comm.links import ProcessLinks
from lightning_diffpipe.errors import CheckpointError
from lightning_diffpipe.sampling import world
from lightning_diffpipe.sampling.methods import MethodOptions, Worker
from lightning_diffpipe.sampling.report import SamplingStatistics, Stopwatch
from lightning_diffpipe.sampling.world import SamplingMesh, World
from tests.ranks import run_ranks
from tests.sampling.models import STEPS, pixart_call

CPU, CUDA0, CUDA1 = torch.device("cpu"), torch.device("cuda:0"), torch.device("cuda:1")
# Device, name of its GPU and host of each rank; what is agreed, and what the first rank says.
CASES = [
    # One GPU is visible to each process, as under srun --gpus-per-task=1: both call it cuda:0.
    ([(CUDA0, "a", "one"), (CUDA0, "b", "one")], "nccl", "2 ranks travel over nccl"),
    ([(CUDA0, "a", "one"), (CUDA0, "b", "two")], "nccl", "2 ranks travel over nccl"),
    ([(CUDA0, "a", "one"), (CUDA1, "b", "one")], "nccl", "2 ranks travel over nccl"),
    ([(CUDA0, "a", "one"), (CUDA0, "a", "one")], "gloo", "ranks 0 and 1 share one of one; set LOCAL_RANK"),
    ([(CUDA0, "a", "one"), (CPU, "", "one")], "gloo", "but rank 1 computes on a CPU"),
    ([(CPU, "", "one"), (CPU, "", "one")], "gloo", "2 ranks travel over gloo"),
]  # fmt: skip


def backends(rank, cases):
    """What each rank uses and says in each case."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("lightning_diffpipe").setLevel(logging.INFO)
    logging.getLogger("lightning_diffpipe").addHandler(handler)
    dist.is_nccl_available = lambda: True
    used = []
    for places in cases:
        device, gpu, host = places[rank]
        torch.cuda.get_device_properties = lambda device, gpu=gpu: SimpleNamespace(uuid=gpu)
        world.socket.gethostname = lambda host=host: host
        joined = world.join_world(device, timeout_s=20)
        used.append(joined.backend)
        joined.links.disconnect()
    return used, messages


@pytest.mark.distributed
def test_nccl_is_used_exactly_if_each_rank_has_a_gpu_of_its_own():
    """History: ranks of two hosts, or with one visible GPU each, sent everything through host memory."""
    found = run_ranks(backends, 2, [places for places, _, _ in CASES])
    assert [used for used, _ in found] == [[backend for _, backend, _ in CASES]] * 2
    (_, messages), (_, of_others) = found
    for said, (_, _, expected) in zip(messages, CASES, strict=True):
        assert expected in said
    assert not of_others


def refuses(rank, who):
    """What each rank raises if some of them refuse."""

    def make():
        if rank in who:
            raise CheckpointError("weights are missing")

    joined = world.join_world(CPU, timeout_s=20)
    try:
        joined.agree("loading", make)
    except CheckpointError as error:
        return str(error), error.is_of_all_ranks
    finally:
        joined.links.disconnect()


@pytest.mark.distributed
def test_what_one_rank_refuses_is_an_error_of_all():
    """Rank 0 may tell it for all."""
    assert run_ranks(refuses, 2, [1]) == [("weights are missing", True)] * 2


def test_torch_without_nccl_is_named():
    places = [("one", gpu, gpu == "a") for gpu in ("a", "b")]
    assert world._why_not_nccl(places) == "torch has no NCCL on rank 1"


def waits_for_a_plain_object(rank):
    links = ProcessLinks.connect([[0, 1]], torch.device("cpu"), timeout_s=4, patience_s=30)
    found = links.broadcast_object(lambda: time.sleep(6) or "a layout")
    links.disconnect()
    return found


@pytest.mark.distributed
def test_in_training_a_rank_may_probe_for_longer_than_messages_are_waited_for():
    """History: drawing samples ended a training run where the first probe took longer than timeout_s."""
    assert run_ranks(waits_for_a_plain_object, 2) == ["a layout"] * 2


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
