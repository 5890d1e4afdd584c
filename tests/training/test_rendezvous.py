"""Where processes of one machine meet."""

import os
import re
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_diffpipe.cli import launch
from lightning_diffpipe.comm.rendezvous import open_store, rendezvous
from lightning_diffpipe.comm.watcher import Watcher
from lightning_diffpipe.errors import ConfigurationError, LostRankError, PipelineTimeoutError
from lightning_diffpipe.training.processes import _Launcher


def is_taken(port):
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return True
    return False


def test_the_default_process_group_takes_over_the_store():
    """History: the port was found free and given back, and rank 0 sometimes found it taken seconds later."""
    store = open_store()
    port = store.port
    assert is_taken(port)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo")
    del store
    assert is_taken(port)
    dist.barrier()
    dist.destroy_process_group()
    assert not is_taken(port)


def test_a_port_that_an_earlier_store_of_this_process_had_is_given_up(monkeypatch):
    """PyTorch finds a closed store of the same port in its table instead of the open one."""
    opened, make_store = [], dist.TCPStore

    def first_ones_cannot_be_shared(host, port, **options):
        opened.append(port)
        if port and len(opened) < 5:
            raise dist.DistNetworkError("address already in use")
        return make_store(host, port, **options)

    monkeypatch.setattr(dist, "TCPStore", first_ones_cannot_be_shared)
    store = open_store()
    assert is_taken(store.port)
    assert [port == 0 for port in opened] == [True, False] * 3
    assert opened[-1] == store.port


@pytest.fixture
def meet_at(monkeypatch):
    """Tells ranks where to meet: at a store, which stays open, or at a port."""
    places = []

    def at(place):
        places.append(place)
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(getattr(place, "port", place)))

    yield at
    places.clear()


def come(meet_at, num_come, num_ranks, patience_s, **options):
    """What each of the ranks that come is given, or raises: threads of this process, at a place of their own."""
    meet_at(open_store())
    watchers = [Watcher() for _ in range(num_come)]

    def one(rank):
        try:
            return rendezvous(rank, num_ranks, 60.0, patience_s, watcher=watchers[rank], **options)
        except PipelineTimeoutError as error:
            return error

    with ThreadPoolExecutor(num_come) as pool:
        outcomes = list(pool.map(one, range(num_come)))
    for each in watchers:
        each._leave()
    return outcomes


@pytest.mark.slow
def test_who_does_not_come_is_named(meet_at, caplog):
    """History: torch said nothing for half an hour, and then how many had come."""
    for error in come(meet_at, 2, 4, 3.0, notice_s=1.0):
        assert re.search(r"rank [01] could not meet all of 4 ranks at 127\.0\.0\.1:\d+", str(error))
        assert "within 3 s: ranks 2, 3 have not come: slow to start, stopped" in str(error)
    assert "within 1 s: ranks 2, 3 have not come" in caplog.text
    assert "it waits up to 3 s" in caplog.text


@pytest.mark.slow
def test_a_rank_that_comes_and_is_lost_is_named_by_those_that_wait(meet_at):
    """Before all have come. History: it was waited for as one that starts slowly, half an hour."""
    meet_at(open_store())
    watchers = [Watcher() for _ in range(3)]

    def be_lost():
        with pytest.raises(PipelineTimeoutError):
            rendezvous(1, 3, 60.0, 2.0, watcher=watchers[1])
        for connection in watchers[1]._connections:
            connection.socket.shutdown(socket.SHUT_RDWR)

    with ThreadPoolExecutor(2) as pool:
        pool.submit(be_lost)
        lost = (
            r"rank 0 \(between two runs\) lost rank 1 \(between two runs\): its process has ended"
        )
        with pytest.raises(LostRankError, match=lost):
            rendezvous(0, 3, 60.0, 60.0, watcher=watchers[0])


def test_a_process_that_ends_before_it_has_come_is_named_by_the_one_that_started_it(meet_at):
    meet_at(open_store())
    starting = Watcher()
    starting.children[1] = child = subprocess.Popen(["sleep", "600"])
    child.kill()
    lost = r"lost rank 1 \(starting processes\): its process has ended .*, killed by SIGKILL"
    with pytest.raises(LostRankError, match=lost), starting.run(0):
        rendezvous(0, 2, 60.0, 60.0, watcher=starting)


def test_two_groups_of_one_process_have_keys_of_their_own(meet_at):
    """History: the second one found what the first had left in the store."""
    meet_at(open_store())
    alone = Watcher()
    first, second = (rendezvous(0, 1, 60.0, 60.0, watcher=alone) for _ in range(2))
    first.set("key", "value")
    assert not second.check(["key"])


class BeyondADeadLink(dist.HashStore):
    """A store that never answers."""

    def get(self, key):
        time.sleep(600.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (True, "nobody has opened that place: rank 0, or the"),
        # History: rank 1 stood for ever in a call to the store.
        (False, "rank 0 has not come: slow to start"),
    ],
)
def test_a_place_that_is_closed_or_never_answers_is_given_up(
    answers, message, monkeypatch, meet_at
):
    meet_at(open_store().port)  # which is closed at once
    if not answers:
        monkeypatch.setattr(dist, "TCPStore", lambda *_, **__: BeyondADeadLink())
    with pytest.raises(PipelineTimeoutError, match=message):
        rendezvous(1, 2, 60.0, patience_s=1.0, watcher=Watcher())


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
    assert launcher.store is None
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


def test_a_port_that_another_process_has_is_named(meet_at):
    """History: the error said that nobody had opened the place within half an hour."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        meet_at(server.getsockname()[1])
        with pytest.raises(
            ConfigurationError, match=r"port \d+, .* in use by another .*MASTER_PORT"
        ):
            rendezvous(0, 2, 60.0, patience_s=60.0, watcher=Watcher())
