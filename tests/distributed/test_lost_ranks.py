"""A rank that is killed, frozen or stopped by SIGTERM, in any phase: the others say which, how and where, and end.

`benchmarks/reliability` tries all phases, on both ranks, by both launchers; here are some of them.
"""

import contextlib
import json
import os
import pathlib
import re
import selectors
import signal
import socket
import subprocess
import time

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from benchmarks.reliability.main import run_one
from lightning_diffpipe.comm.liveness import Liveness, _is_stopped, liveness
from lightning_diffpipe.errors import ConfigurationError, LostRankError, PipelineTimeoutError
from tests.distributed.scenarios import Settings, build, quick_strategy, quiet_trainer
from tests.distributed.tiny import Data
from tests.ranks import RankError, run_ranks
from tests.rows import row

pytestmark = pytest.mark.distributed


class DrawsWithTheWholeModel(L.Callback):
    """Stands for sampling after a step."""

    def on_train_batch_end(self, trainer, module, *arguments):
        with trainer.strategy.whole_model():
            module.head(torch.zeros(1, 12, dtype=torch.float64))


def fit_until_harmed(rank, phase, victim, harm, folder):
    """Trains, validates, saves and draws; one rank does itself harm at the beginning of a phase.

    Not before the other one has heard of the phase: a process that is killed may take along what it has just sent.
    """
    os.dup2(os.open(f"{folder}/screen", os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    take, enter, phase_of = liveness._take, liveness.enter, liveness._phase_of
    heard = pathlib.Path(folder) / "heard"

    def take_and_note(line, message):
        take(line, message)
        if line.rank == victim and line.phase == phase:
            heard.touch()

    def do_harm(name):
        if rank == victim and name == phase:
            until_s = time.monotonic() + 20.0
            while not heard.exists():
                assert time.monotonic() < until_s, "the other rank has not heard of the phase"
                time.sleep(0.01)
            harm()

    def enter_and_do_harm(name):
        enter(name)
        do_harm(name)

    @contextlib.contextmanager
    def phase_with_harm(name):
        with phase_of(name):
            do_harm(name)
            yield

    liveness._take, liveness.enter, liveness._phase_of = (
        take_and_note,
        enter_and_do_harm,
        phase_with_harm,
    )
    strategy = quick_strategy(num_stages=2, num_replicas=1, num_microbatches=2, timeout_s=60)
    saves = ModelCheckpoint(folder, every_n_train_steps=2)
    trainer = quiet_trainer(
        devices=2, strategy=strategy, enable_checkpointing=True, callbacks=[saves, DrawsWithTheWholeModel()]
    )  # fmt: skip
    trainer.fit(build(Settings()), datamodule=Data())


def die():
    os.kill(os.getpid(), signal.SIGKILL)


PHASES = (
    "aligning weights",
    "probing the step",
    "placing stages",
    "training with the whole model",
    "saving a checkpoint",
    "validating",
    "ending",
)


@pytest.mark.parametrize(
    ("phase", "victim"),
    [
        *((phase, number % 2) for number, phase in enumerate(PHASES)),
        *(row(phase, 1 - number % 2) for number, phase in enumerate(PHASES)),
    ],
)
def test_whoever_loses_a_rank_names_it_and_its_phase(tmp_path, phase, victim):
    """History: of 26 kills outside of steps none was named; gloo gave an address and a joke.

    Where torch's groups meet, nothing breaks, and the process is ended with a line.
    """
    with pytest.raises(RankError, match="ranks failed") as caught:
        run_ranks(fit_until_harmed, 2, phase, victim, die, str(tmp_path))
    text = str(caught.value)
    assert f"rank {victim} (exit code -9)" in text
    raised = text.split(f"--- rank {1 - victim} ")[1].split("--- rank")[0].strip()
    message = (
        raised if "Error" in raised else (tmp_path / "screen").read_text().strip()
    ).splitlines()[-1]
    assert f"lost rank {victim} ({phase}): its process has ended without a word" in message


def fail():
    raise ConfigurationError("the disk is full")


def test_the_error_of_a_rank_that_failed_is_named_by_those_that_lost_it(tmp_path):
    with pytest.raises(RankError, match="ranks failed") as caught:
        run_ranks(fit_until_harmed, 2, "saving a checkpoint", 1, fail, str(tmp_path))
    message = r"lost rank 1 \([\w ]+\): it failed with ConfigurationError: the disk is full; its own error"
    assert re.search(message, str(caught.value))


def stop():
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(("victim", "phase"), [(0, "probing the step"), (1, "validating")])
def test_sigterm_ends_all_ranks_in_any_phase(tmp_path, victim, phase):
    """History: before the first step it ended one process, and the others reported a lost connection."""
    with pytest.raises(RankError, match="ranks failed") as caught:
        run_ranks(fit_until_harmed, 2, phase, victim, stop, str(tmp_path))
    assert str(caught.value).count("lightning.pytorch.utilities.exceptions.SIGTERMException") == 2
    assert (tmp_path / "screen").read_text().count(f"SIGTERM to rank {victim} ({phase})") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "harm", "rank", "phase"),
    [
        ("torchrun", "KILL", 1, "training"),
        *(
            row(*case)
            for case in [
                ("Lightning", "STOP", 0, "saving a checkpoint"),
                ("Lightning", "KILL", 1, "starting processes"),
                ("torchrun", "KILL", 0, "starting processes"),
                ("torchrun", "STOP", 1, "starting processes"),
                ("Lightning", "STOP", 0, "starting processes"),
                ("Lightning", "KILL", 0, "training"),
                ("torchrun", "STOP", 1, "validating"),
                ("torchrun", "TERM", 0, "training"),
            ]
        ),
    ],
)
def test_nothing_is_left_of_a_run_that_came_to_harm(launcher, harm, rank, phase):
    """Within a minute; `benchmarks/reliability` measures how soon, on a machine that has nothing else to do.

    History: a rank that was frozen between two steps was waited for half an hour, and then lived on.
    """
    outcome = run_one(launcher, harm, rank, phase)
    assert outcome.seconds is not None, outcome.output
    assert outcome.code or harm == "TERM", outcome.output
    assert outcome.names(rank, phase), outcome.output


# ------------------------------------------------------------------------------- the mechanism itself


def lose_while_busy(rank):
    """Rank 1 is gone while rank 0 computes, and asks nobody for anything."""
    with liveness.run(rank):
        liveness.connect(rank, 2, 60.0)
        if rank == 1:
            time.sleep(0.5)
            die()
        time.sleep(600.0)


def test_a_rank_that_is_busy_with_itself_is_ended_when_the_others_are_gone():
    with pytest.raises(RankError, match=r"ranks failed\n(?s:.*)rank 0 \(exit code 1\)"):
        run_ranks(lose_while_busy, 2)


@pytest.mark.parametrize(
    "starter", ["the trainer", "a launcher", "the same shell, for another run"]
)
def test_a_rank_that_is_frozen_before_all_have_met_is_found_by_its_state(starter, monkeypatch):
    """History: under torchrun and SLURM it was waited for half an hour, as one that starts slowly."""
    place = {"MASTER_PORT": "29123"} if "another" in starter else {}
    frozen = subprocess.Popen(["sleep", "600"], env={**os.environ, **place, "RANK": "1"})
    frozen.send_signal(signal.SIGSTOP)
    watching = Liveness()
    watching._runs = 1
    if starter == "the trainer":
        watching.children = {1: frozen}
    else:
        monkeypatch.setattr(os, "getppid", os.getpid)
    while not _is_stopped(frozen.pid):
        time.sleep(0.01)
    try:
        for now_s in (100.0, 109.0):
            watching._look_for_processes(now_s)
            assert watching.loss() is None
        watching._look_for_processes(111.0)
    finally:
        frozen.kill()
        frozen.wait()
    message = "rank 1 (starting processes): nothing was heard of it for 10 s: it is stopped"
    assert str(watching.loss()).startswith(message) == (not place)


@pytest.mark.parametrize(
    ("signalled_s", "by_handler", "named"),
    [(0.0, False, True), (2.5, False, True), (2.5, True, True), (1.0, False, False)],
)
def test_a_rank_that_ends_before_all_have_met_is_named(signalled_s, by_handler, named, monkeypatch):
    """A launcher that has lost a rank sends SIGTERM to the others; one that is stopped itself, to all of them.

    History: under torchrun the others said only that they had got SIGTERM, under SLURM they waited on.
    """
    other = subprocess.Popen(["sleep", "600"], env={**os.environ, "RANK": "1"})
    monkeypatch.setattr(os, "getppid", os.getpid)
    watching = Liveness()
    watching._runs = 1
    watching._look_for_processes(1.0)
    while 1 not in watching._siblings:  # what a process was given is to be read once it runs
        watching._look_for_processes(1.0)
    other.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    watching._look_for_processes(2.0)
    assert watching.loss() is None  # its launcher has not noticed
    other.wait()
    watching._signalled_s = signalled_s
    if by_handler:
        watching.note_signal()
    watching._look_for_processes(2.5)
    message = "rank 1 (starting processes): its process has ended without a word"
    assert str(watching.loss()).startswith(message) == named


class BeyondADeadLink(torch.distributed.HashStore):
    """A store that never answers."""

    def get(self, key):
        time.sleep(600.0)


@pytest.mark.parametrize(
    ("rank", "store"), [(0, torch.distributed.HashStore), (1, BeyondADeadLink)]
)
def test_a_rank_that_has_met_the_others_and_never_connects_is_named(rank, store, monkeypatch):
    """History: rank 0 asked nobody whether it has, and rank 1 stood for ever in a call to the store."""
    monkeypatch.setattr("lightning_diffpipe.comm.liveness._LEAST_SILENCE_S", 0.5)
    watching, other = Liveness(), 1 - rank
    message = rf"rank {rank} \(connecting\) lost rank {other} \(connecting\): nothing was heard of it for 0.5 s"
    with pytest.raises(LostRankError, match=message):
        watching.connect(rank, 2, 0.5, store())
    watching._leave()


def test_a_rank_that_says_that_it_cannot_connect_is_not_waited_for():
    """As where a firewall lets ranks meet at one port only."""
    watching, store = Liveness(), torch.distributed.HashStore()
    store.set("diffpipe/liveness/1/1", "cannot connect")
    watching.connect(0, 2, 60.0, store)
    watching._leave()


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
def joined(monkeypatch):
    """Connects rank 1 to a rank 0 whose names have some addresses, by name; returns its lines."""
    monkeypatch.setattr("lightning_diffpipe.comm.liveness._LEAST_SILENCE_S", 2.0)
    monkeypatch.setenv("MASTER_ADDR", "meeting.example")
    watching, store = Liveness(), torch.distributed.HashStore()
    store.set("diffpipe/liveness/1", json.dumps([29123, "secret", 1, "rank0.example"]))

    def join(**addresses):
        def look_up(name, *_, **__):
            found = addresses[name.partition(".")[0]]
            if isinstance(found, Exception):
                raise found
            return found

        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        watching.connect(1, 2, 1.0, store)
        return watching._lines

    yield join
    watching._leave()


def test_all_addresses_of_rank_0_have_their_share_of_the_time_to_connect(joined, caplog):
    """History: each had all of it, so that of two that lead nowhere a rank said that rank 0 was silent."""
    with that_never_answers("127.0.0.2") as first, that_never_answers("127.0.0.3") as second:
        assert not joined(meeting=[first, second], rank0=[second])
    assert "cannot reach rank 0 at port 29123 of meeting.example or rank0.example" in caplog.text
    assert "(127.0.0.2: timed out; 127.0.0.3: timed out)" in caplog.text


def test_a_name_that_is_none_is_said_with_the_addresses(joined, caplog):
    """History: Python's words for a label of 64 characters ended training."""
    with that_never_answers("127.0.0.2") as first:
        assert not joined(meeting=[first], rank0=UnicodeError("label too long"))
    assert "(127.0.0.2: timed out; rank0.example: label too long)" in caplog.text


def test_rank_0_is_reached_at_its_own_name_where_the_meeting_place_leads_elsewhere(joined):
    """As where a service passes on to rank 0 what comes to one port only."""
    with (
        that_never_answers("127.0.0.2") as first,
        socket.create_server(("127.0.0.3", 0)) as server,
    ):
        assert joined(meeting=[first], rank0=[(*first[:4], server.getsockname())])
        with server.accept()[0] as line:
            assert b"secret" in line.recv(1024)


def be_busy(rank):
    """Longer than the others wait for a sign of life."""
    with liveness.run(rank):
        from lightning_diffpipe.comm import liveness as module

        module._LEAST_SILENCE_S = silence_s = 3.0  # a busy machine may keep a thread for a second
        liveness.connect(rank, 2, silence_s)
        if rank == 0:
            time.sleep(1.5 * silence_s)
        torch.distributed.barrier()
        return liveness.loss()


def test_a_rank_that_is_busy_lives():
    """It signs from a thread of its own."""
    assert run_ranks(be_busy, 2) == [None, None]


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n\r\n", b"1\n", b'{"phase": "scanning"}\n{"phase": "scanning"}\n']
)
def test_a_stranger_who_connects_is_hung_up_on_and_ranks_are_heard_still(said):
    """History: the thread that listens ended, so that no loss was noticed any more."""
    watching = Liveness()
    watching._start()
    watching._token = "secret"
    watching._server = server = socket.create_server(("127.0.0.1", 0))
    watching._selector.register(server, selectors.EVENT_READ)
    watching._wake.send(b"\0")
    with socket.create_connection(server.getsockname(), timeout=20) as stranger:
        stranger.sendall(said)
        assert stranger.recv(64) == b""
    with socket.create_connection(server.getsockname(), timeout=20) as rank:
        message = {"token": "secret", "rank": 1, "place": [1, "host"]}
        rank.sendall(json.dumps(message).encode() + b"\n")
        assert b"phase" in rank.recv(64)
    watching._leave()


def test_errors_of_other_code_stay_as_they_are():
    """Only what collectives raise is explained, and that only where there are other ranks."""
    with pytest.raises(RuntimeError, match="a socket to store"), liveness.inside("training"):
        raise RuntimeError("a socket to store")
    with pytest.raises(PipelineTimeoutError) as caught, liveness.inside("training"):
        raise PipelineTimeoutError("of one process")
    assert not isinstance(caught.value, LostRankError)
