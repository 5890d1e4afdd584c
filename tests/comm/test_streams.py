"""Queues of a GPU are asked for before its first use."""

import os

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies.parallel import ParallelStrategy

from lightning_diffpipe import DiffPipeStrategy, predictor
from lightning_diffpipe.comm.waiting import ask_for_queues
from lightning_diffpipe.errors import ConfigurationError

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


@pytest.fixture
def unused(monkeypatch):
    """A process that has not used CUDA, and in which nobody has said how many queues it shall have."""
    monkeypatch.setenv(QUEUES, "")  # restored after the test, whatever it sets
    monkeypatch.delenv(QUEUES)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)


@pytest.mark.parametrize(
    ("given", "is_initialized", "queues"),
    [
        (
            None,
            False,
            "32",
        ),  # History: with eight, a send could wait for a receive of another for ever.
        ("16", False, "16"),
        (None, True, None),  # processes started later would believe it
    ],
)
def test_all_queues_are_asked_for_unless_the_user_has_said_or_it_is_too_late(
    given, is_initialized, queues, unused, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_initialized)
    if given is not None:
        monkeypatch.setenv(QUEUES, given)
    assert ask_for_queues() == (queues == "32")
    assert os.environ.get(QUEUES) == queues


def test_one_queue_is_refused(unused, monkeypatch):
    """History: the value that Megatron asks for was accepted."""
    monkeypatch.setenv(QUEUES, "1")
    with pytest.raises(ConfigurationError, match=rf"{QUEUES}=1 leaves one queue .* {QUEUES}=32"):
        ask_for_queues()


@pytest.mark.parametrize(
    ("device", "ranks", "queues"), [("cuda:0", 2, "32"), ("cuda:0", 1, None), ("cpu", 2, None)]
)
def test_the_strategy_asks_before_it_sets_the_device(unused, monkeypatch, device, ranks, queues):
    class Sets(Exception):
        """Instead of setting the device."""

    def sets(strategy):
        raise Sets(os.environ.get(QUEUES))

    monkeypatch.setattr(ParallelStrategy, "setup_environment", sets)
    strategy = DiffPipeStrategy()
    strategy.parallel_devices = [torch.device(device)]
    strategy.cluster_environment = LightningEnvironment()
    strategy.cluster_environment.set_world_size(ranks)
    with pytest.raises(Sets) as error:
        strategy.setup_environment()
    assert error.value.args == (queues,)


@pytest.mark.parametrize(("world_size", "queues"), [("2", "32"), ("1", None)])
def test_a_predictor_of_several_ranks_asks_as_well(unused, monkeypatch, world_size, queues):
    monkeypatch.setenv("WORLD_SIZE", world_size)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    predictor._device("cuda:0")
    assert os.environ.get(QUEUES) == queues
