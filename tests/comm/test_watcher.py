"""Whom a rank misses, and whom it does not: ranks of a test are watchers of one process."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch.distributed as dist

from lightning_diffpipe.comm import watcher as module
from lightning_diffpipe.comm.watcher import Watcher, watcher
from lightning_diffpipe.errors import ConfigurationError, LostRankError, PipelineTimeoutError

TIMEOUT_S = 1.0


def closed_as_if_killed(rank):
    """Breaks a rank's connections without a word."""
    rank._note_end = lambda _: None
    for connection in list(rank._connections):
        connection.socket.shutdown(socket.SHUT_RDWR)


def frozen(rank):
    """Keeps a rank's thread from saying anything."""
    rank._send = lambda *_: None


def ended(rank):
    """Lets a rank's watcher end its process, but for the end itself."""
    with mock.patch.object(module.os, "_exit"):
        rank._end("rank 1 lost rank 7", 1)


def connected(num_ranks, timeout_s=TIMEOUT_S):
    ranks, store = [Watcher() for _ in range(num_ranks)], dist.HashStore()
    with ThreadPoolExecutor(num_ranks) as pool:
        for number, rank in enumerate(ranks):
            pool.submit(rank.connect, store, number, num_ranks, timeout_s)
    until(lambda: not any(rank.missing() for rank in ranks))
    return ranks


def until(condition):
    deadline_s = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.fixture
def ranks(monkeypatch):
    monkeypatch.setattr(module, "_LEAST_SILENCE_S", TIMEOUT_S)
    ranks = connected(3)
    for rank in ranks:
        rank.begin_turn("sampling")
    until(lambda: all(each.turn for rank in ranks for each in rank._statuses.values()))
    yield ranks
    for rank in ranks:
        rank._send = lambda *_: None
        rank._leave()


def wait(rank, seconds, meanwhile=lambda: None):
    """Waits so long; returns how often it gave up."""
    deadline, given_up = time.monotonic() + seconds, []

    def arrived():
        meanwhile()
        return time.monotonic() > deadline

    rank.wait(arrived, "the end", lambda: given_up.append(True))
    return len(given_up)


@pytest.mark.slow
@pytest.mark.parametrize("waiting", [0, 2])
@pytest.mark.parametrize(
    ("harm", "how"),
    [
        (frozen, "nothing was heard of it for 1 s: it is stopped, or its host or link is dead"),
        (closed_as_if_killed, "its process has ended without a word, killed perhaps: by hand"),
        (ended, "it was ended, as rank 1 lost rank 7"),
        (lambda rank: rank.fail(ValueError("no room")), "it failed with ValueError: no room; its own error"),
        (lambda rank: rank.fail(PipelineTimeoutError("rank 7")), "PipelineTimeoutError: rank 7; its own error"),
    ],
    ids=["frozen", "killed", "ended", "failed", "followed"],
)  # fmt: skip
def test_a_lost_rank_is_named_with_its_phase_on_all_others(waiting, harm, how, ranks):
    ranks[1].enter("encoding prompts")
    until(lambda: ranks[waiting]._statuses[1].phase == "encoding prompts")
    harm(ranks[1])
    with pytest.raises(LostRankError) as caught:
        wait(ranks[waiting], 20.0)
    assert f"rank {waiting} (sampling) lost rank 1 (encoding prompts): {how}" in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("harm", [frozen, closed_as_if_killed])
def test_rank_0_is_missed_as_others_are(harm, ranks):
    """Though all messages pass it."""
    harm(ranks[0])
    with pytest.raises(LostRankError, match=r"rank 2 \(sampling\) lost rank 0 \(sampling\)"):
        wait(ranks[2], 20.0)


def test_a_rank_that_lost_another_is_named_after_that_one(ranks):
    ranks[1].fail(PipelineTimeoutError("waited in vain"))
    until(lambda: ranks[0].loss() is not None)
    assert ranks[0].loss().rank == 1
    ranks[2].fail(ValueError("no room"))
    until(lambda: ranks[0].loss().rank == 2)
    assert ranks[0].loss().failure.startswith("it failed with ValueError")


def test_the_phase_in_which_a_rank_fails_is_told_though_it_has_left_it(ranks):
    """History: it was that around it, as errors leave phases before the run ends."""
    with pytest.raises(OSError, match="full") as caught, ranks[1].inside("saving a checkpoint"):
        raise OSError("the disk is full")
    ranks[1].fail(caught.value)
    until(lambda: ranks[2].loss() is not None)
    assert str(ranks[2].loss()).startswith("rank 1 (saving a checkpoint): it failed with OSError")


def test_a_failure_counts_in_its_run_only_even_if_it_comes_first(ranks):
    """A user may catch an error, and begin again: ranks come there one after the other."""
    ranks[1].begin_run("sampling", 1)
    ranks[1].fail(ValueError("no room"))
    until(lambda: ranks[2]._statuses[1].failure)
    assert ranks[2].loss() is None
    ranks[2].begin_run("sampling", 2)
    assert ranks[2].loss().rank == 1
    ranks[2].begin_run("sampling", 2)
    assert ranks[2].loss() is None
    closed_as_if_killed(ranks[1])
    until(lambda: ranks[2].loss() is not None)
    ranks[2].begin_run("sampling", 2)
    assert ranks[2].loss().rank == 1, "it will not come back"


@pytest.mark.slow
def test_a_rank_that_leaves_is_not_lost(ranks):
    ranks[1]._leave()
    until(lambda: ranks[2]._statuses[1].state == "left")
    wait(ranks[2], 2 * TIMEOUT_S)
    with pytest.raises(LostRankError, match=r"lost no rank, but could not .*rank 1: has left"):
        ranks[2].call("numbers", lambda: (_ for _ in ()).throw(dist.DistNetworkError("reset")))


@pytest.mark.slow
def test_a_rank_that_goes_on_no_more_is_missed(ranks):
    ranks[1].step()
    until(lambda: ranks[0]._statuses[1].step)
    message = (
        r"rank 0 \(sampling\) waited for the end: rank 1 \(sampling\) lives, but has made no step"
    )
    with pytest.raises(PipelineTimeoutError, match=message):
        wait(ranks[0], 60.0)


@pytest.mark.slow
def test_a_rank_that_has_not_begun_is_missed_later(ranks):
    """History: gloo ended the wait, as when opening a model hung, and named no rank; idle ones are not to blame."""
    ranks[0].busy_timeout_s = 3 * TIMEOUT_S
    ranks[2].publish(step=0)
    message = r"rank 1 \(sampling\) lives, but has made no step for 3 s \(busy_timeout_s\)"
    with pytest.raises(PipelineTimeoutError, match=message):
        wait(ranks[0], 60.0)
    ranks[1].publish(step=0)
    with ranks[2].working():
        until(lambda: ranks[0]._statuses[2].step == -1)
    until(lambda: not any(each.step for each in ranks[0]._statuses.values()))
    wait(ranks[0], 4 * TIMEOUT_S)


@pytest.mark.slow
def test_a_rank_that_goes_on_slowly_or_has_not_begun_is_not_missed(ranks):
    assert wait(ranks[0], 3 * TIMEOUT_S, ranks[1].step) == 1


@pytest.mark.slow
def test_what_was_noted_in_an_earlier_turn_tells_nothing(ranks):
    ranks[1].step()
    ranks[2].publish(refuses=True)
    until(lambda: ranks[0].has_refusal() and ranks[0]._statuses[1].step)
    ranks[0].begin_turn("sampling")
    assert not ranks[0].has_refusal()
    wait(ranks[0], 3 * TIMEOUT_S)


def test_a_call_that_never_returns_is_given_up_when_a_rank_is_lost(ranks):
    """As those of a store beyond a dead link."""
    closed_as_if_killed(ranks[1])
    with pytest.raises(LostRankError, match="lost rank 1"):
        ranks[0].call("connections", lambda: time.sleep(600.0))


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n\r\n", b"1\n", b'{"rank": 1}\n', b'{"token": 1, "rank": 1}\n']
)
def test_a_stranger_who_connects_is_hung_up_on_and_ranks_are_heard_still(said, ranks):
    """History: the thread that listens ended, so that no loss was noticed any more."""
    address = "localhost", ranks[0]._server.getsockname()[1]
    with socket.create_connection(address, timeout=20) as stranger:
        stranger.sendall(said)
        assert stranger.recv(64) == b""
    ranks[1].enter("decoding latents")
    until(lambda: ranks[0]._statuses[1].phase == "decoding latents")


WATCHES_NO_MORE = """
import time
from lightning_diffpipe.comm.watcher import watcher
watcher._check_connections = lambda now_s: 1 / 0
with watcher.run(0):
    time.sleep(60.0)
"""


@pytest.mark.slow
def test_a_watcher_that_fails_ends_its_process_with_its_error():
    """History: its thread ended silently, so that no loss was noticed any more."""
    ended = subprocess.run(
        [sys.executable, "-c", WATCHES_NO_MORE], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 1
    message = "rank 0 (starting processes) cannot watch the other ranks: ZeroDivisionError"
    assert message in ended.stderr
    assert "Traceback" in ended.stderr


HANGS = """
import ctypes, sys, threading, time, torch.distributed as dist
from lightning_diffpipe.comm import watcher as module
from lightning_diffpipe.comm.watcher import watcher
import signal
module._GRACE_S = module._LEAST_SILENCE_S = 1.0

def handler(*_):
    watcher.note_signal()
    if sys.argv[1] == "stop":
        raise SystemExit(3)

signal.signal(signal.SIGTERM, handler)
watcher.at_sigterm = sys.argv[1]
with watcher.run(0):
    watcher.connect(dist.HashStore(), 0, 1, 0.5)
    watcher.enter("validating")
    print("hangs", flush=True)
    if sys.argv[2] == "C++":
        mutex, library = ctypes.create_string_buffer(64), ctypes.CDLL(None)
        while True:
            library.pthread_mutex_lock(mutex)
    elif sys.argv[2] == "a lock":
        threading.Lock().acquire() and threading.Event().wait()
    else:
        while True:
            time.sleep(0.1)
"""


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("at_sigterm", "where"),
    [("stop", "C++"), ("agree", "C++"), ("agree", "a lock"), ("agree", "Python")],
)
def test_sigterm_ends_a_process_wherever_it_waits(at_sigterm, where):
    """History: in training it was noted, and acted upon before the next batch, which never came."""
    with subprocess.Popen(
        [sys.executable, "-c", HANGS, at_sigterm, where],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout.readline() == "hangs\n"
            time.sleep(1.0)  # it will soon
            process.send_signal(signal.SIGTERM)
            said = process.communicate(timeout=60)[1]
        finally:
            process.kill()
    assert process.returncode == 143, said
    assert "SIGTERM" in said
    assert "(validating)" in said


@contextlib.contextmanager
def that_never_answers(address):
    """An address of this host at which connections are neither taken nor refused, as beyond a dead link."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.bind((address, 0))
        server.listen(0)
        for _ in range(3):  # more than it lets wait
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        yield socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", server.getsockname()


@pytest.fixture
def join(monkeypatch):
    """Connects rank 1 to a rank 0 whose names have some addresses, by name."""
    monkeypatch.setattr(module, "_LEAST_SILENCE_S", 2.0)
    monkeypatch.setenv("MASTER_ADDR", "master.example")
    watching, store = Watcher(), dist.HashStore()
    store.set("diffpipe/0/1", json.dumps([29123, "secret", "rank0.example"]))

    def join(**addresses):
        of_numbers = socket.getaddrinfo

        def look_up(name, *arguments, **options):
            found = addresses.get(name.partition(".")[0])
            if isinstance(found, Exception):
                raise found
            return found or of_numbers(name, *arguments, **options)

        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        watching.connect(store, 1, 2, 1.0)

    yield join
    watching._leave()


@pytest.mark.slow
def test_all_addresses_of_rank_0_share_the_time_to_connect(join):
    """History: each had all of it, so that of two that lead nowhere a rank said that rank 0 was silent."""
    started_s = time.monotonic()
    with (
        that_never_answers("127.0.0.2") as first,
        that_never_answers("127.0.0.3") as second,
        pytest.raises(ConfigurationError) as caught,
    ):
        join(master=[first, second], rank0=[second])
    assert "at port 29123 of master.example or rank0.example" in str(caught.value)
    assert "(127.0.0.2: timed out; 127.0.0.3: timed out)" in str(caught.value)
    assert time.monotonic() - started_s < 10.0


@pytest.mark.slow
def test_a_name_that_is_none_is_said_with_the_addresses(join):
    """History: Python's words for a label of 64 characters ended training."""
    with that_never_answers("127.0.0.2") as first, pytest.raises(ConfigurationError) as caught:
        join(master=[first], rank0=UnicodeError("label too long"))
    assert "rank0.example: label too long" in str(caught.value)


@pytest.mark.slow
def test_rank_0_is_reached_at_its_own_name_where_the_master_address_leads_elsewhere(join):
    """As where a service passes on to rank 0 what comes to one port only."""
    with that_never_answers("127.0.0.2") as first, socket.create_server(("127.0.0.3", 0)) as server:
        join(master=[first], rank0=[(*first[:4], server.getsockname())])
        with server.accept()[0] as connection:
            assert b"secret" in connection.recv(1024)


def test_errors_of_other_code_stay_as_they_are():
    """Only what collectives raise is explained, and that only where there are other ranks."""
    with pytest.raises(RuntimeError, match="a socket to store"), watcher.inside("training"):
        raise RuntimeError("a socket to store")
    with pytest.raises(PipelineTimeoutError) as caught, watcher.inside("training"):
        raise PipelineTimeoutError("of one process")
    assert not isinstance(caught.value, LostRankError)


def test_a_forked_process_holds_no_connection(ranks):
    """It would look alive for as long as that lives, as workers of a data loader may."""
    pid = os.fork()
    if pid == 0:
        for rank in ranks:
            rank.forget()
        time.sleep(60.0)
        os._exit(0)
    try:
        closed_as_if_killed(ranks[1])
        until(lambda: ranks[0].loss() is not None)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


ENDING = """
import atexit, sys, time
from lightning_diffpipe.comm import watcher as module

class Group:
    def __del__(self, sleep=time.sleep):
        sleep(600.0)  # as gloo's, whose peer is silent

def upload():
    time.sleep(float(sys.argv[1]))
    print("uploaded", flush=True)

module._EXIT_S = 3.0
atexit.register(upload)
group = Group()
module.watcher._losses[1] = module.Status(1, failure="nothing was heard of it")
module.watcher.refuse_loss()
"""


@pytest.mark.slow
@pytest.mark.parametrize("upload_s", [0.0, 5.0])
def test_a_process_that_has_lost_a_rank_ends_when_exit_handlers_of_others_are_over(upload_s):
    """History: Python had five seconds to end, which cut an upload short; before, it waited for half an hour."""
    command = [sys.executable, "-c", ENDING, str(upload_s)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.stdout.split() == ["uploaded"], ended.stderr
    assert "LostRankError: rank 0 (between two runs) lost rank 1" in ended.stderr
    assert ended.returncode == 1  # though it was still waiting
