"""Where processes of one machine meet."""

import os
import socket
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_diffpipe.cli import launch
from lightning_diffpipe.training.processes import _Launcher, open_meeting_place


def is_taken(port):
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return True
    return False


def test_the_default_process_group_takes_over_the_meeting_place():
    """History: the port was found free and given back, and rank 0 sometimes found it taken seconds later."""
    place = open_meeting_place()
    port = place.port
    assert is_taken(port)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo")
    del place
    assert is_taken(port)
    dist.barrier()
    dist.destroy_process_group()
    assert not is_taken(port)


def test_a_port_that_an_earlier_store_of_this_process_had_is_given_up(monkeypatch):
    """History: of 1500 places opened one after the other, 127 could not be taken over: "address already in use".

    PyTorch finds a closed store of the same port in its table instead of the open one.
    """
    opened, open_store = [], dist.TCPStore

    def first_ones_cannot_be_shared(host, port, **options):
        opened.append(port)
        if port and len(opened) < 5:
            raise dist.DistNetworkError("address already in use")
        return open_store(host, port, **options)

    monkeypatch.setattr(dist, "TCPStore", first_ones_cannot_be_shared)
    place = open_meeting_place()
    assert is_taken(place.port)
    assert [port == 0 for port in opened] == [True, False] * 3
    assert opened[-1] == place.port


def test_lightning_starts_processes_that_meet_at_an_open_place():
    launcher = _Launcher(LightningEnvironment(), num_processes=1, num_nodes=1)
    launcher._call_children_scripts()
    assert launcher.cluster_environment.main_port == int(os.environ["MASTER_PORT"])
    assert is_taken(int(os.environ["MASTER_PORT"]))


@pytest.mark.parametrize("name", ["MASTER_PORT", "STANDALONE_PORT"])
def test_a_port_that_was_asked_for_is_left_to_lightning(name, monkeypatch):
    monkeypatch.setenv(name, "29123")
    launcher = _Launcher(LightningEnvironment(), num_processes=1, num_nodes=1)
    launcher._call_children_scripts()
    assert launcher.meeting_place is None
    assert os.environ["MASTER_PORT"] == "29123"


def test_the_command_starts_processes_that_meet_at_an_open_place(monkeypatch):
    monkeypatch.setattr(
        launch.HydraConfig,
        "get",
        lambda: SimpleNamespace(mode=None, runtime=SimpleNamespace(output_dir="out")),
    )
    started = []

    class Child:
        returncode = 0

        def __init__(self, command, env):
            started.append((env["RANK"], is_taken(int(env["MASTER_PORT"]))))

        def wait(self, timeout=None):
            pass

        def poll(self):
            return 0

    monkeypatch.setattr(launch.subprocess, "Popen", Child)
    held = launch.on_ranks(3, lambda: is_taken(int(os.environ["MASTER_PORT"])))
    assert held
    assert started == [("1", True), ("2", True)]
