"""The state of all ranks, and their phases: a thread of every process watches, over one connection to rank 0.

    rank 1 ──┐  its status: phase, progress, why it fails, that it leaves
    rank 2 ──┼── rank 0 ──> all others: every status that has changed
    rank 3 ──┘

A collective that breaks names an address, and one that waits for a rank that is stopped, or cut off by a dead
link, says nothing for as long as ranks may be busy between two steps. Here the kernel closes the connection of a
process that ends, one that is stopped falls silent, and one that is busy does neither. So

    inside       turns errors of any collective that a lost rank has broken into one with its rank, phase and end
    wait, call   give up a wait, outside of a run, when a rank is lost
    run          ends a process that would go on without the others, wherever it waits; one that gets SIGTERM
                 and does not come to act upon it; one that is busy for too long while another waits for it; and
                 all processes, where every rank waits in some collective

Processes outside of a run, such as scripts between two fits, are not ended.
"""

import atexit
import contextlib
import faulthandler
import itertools
import json
import logging
import math
import multiprocessing
import os
import re
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from lightning_diffpipe.comm.waiting import in_thread, in_words
from lightning_diffpipe.coroutine import thread_at_work
from lightning_diffpipe.errors import (
    ConfigurationError,
    DiffPipeError,
    LostRankError,
    PipelineTimeoutError,
)
from lightning_diffpipe.graph.side_effects import is_of

LAUNCHER = "DIFFPIPE_LAUNCHER_PID"
"""Environment variable of processes that a rank has started: that rank, and its process."""

_log = logging.getLogger(__name__)
_STARTING = "starting processes"
_TICK_S = 0.25  # between two checks
_PERIOD_S = 2.0  # between two signs of life, at most
_LEAST_SILENCE_S = 10.0  # a thread may wait so long for a busy machine, or the interpreter
_GRACE_S = 5.0  # for a rank that has lost another, or got SIGTERM, to end by itself
_VERDICT_S = 3.0  # from a broken connection of a collective to one of ours
_GIVE_UP_S = 0.5  # what ranks that refuse together need at most to arrive
_EXIT_S = 5.0  # for Python to end, on a busy machine
_MARGIN_S = 60.0  # by which collectives wait longer: they know neither rank nor place
_FRAMES_OF_A_WAIT = 5  # of torch's wrappers around a collective, or of a lock around a wait of ours
_WAITING = ("torch.distributed", "lightning_diffpipe.comm")
_FRAMES_OF_A_PLACE = 3  # a call may end in the standard library, in `queue.get` or a lock
_BY_SIGNAL = 128 + signal.SIGTERM
_BROKEN = re.compile(
    r"/gloo/|Gloo|ProcessGroup|NCCL|TCPStore|Connection (closed|reset) by peer|Connection refused|Broken pipe"
    r"|Operation timed out|[Ww]ait timeout|connectFullMesh"
)


@dataclass(frozen=True)
class Status:
    """The status of a rank, as it says itself, or another rank says of it once it is lost.

    Attributes:
        state: "left" if it said so before its process ended, "ended" if it did not, "silent" if it stopped sending.
        run: Number of its run; a user may catch a failure, and begin another run.
        failure: Reason why the rank was lost, or ends its run; empty if it does not.
        follows: Whether it ends its run because it lost another rank.
        signal: The phase in which it got SIGTERM; empty if it did not.
        turn: Number of the turn, which is what ranks of a Predictor do together, such as sampling.
        step: Steps in this turn so far; -1 before the first one; 0 when it is done, or has nothing to do.
        refuses: Whether it raised an error in this turn, which it will send to the others.
        waits: Whether it has been in one wait for other ranks for as long as a rank may be silent.
        process: Name of its process among those of all hosts (`_process`).
    """

    rank: int = 0
    phase: str = _STARTING
    state: Literal["alive", "left", "ended", "silent"] = "alive"
    run: int = 0
    failure: str = ""
    follows: bool = False
    signal: str = ""
    turn: int = 0
    step: int = 0
    refuses: bool = False
    waits: bool = False
    process: str = ""
    parent: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.signal or self.phase}): {self.failure}"


class _Connection:
    """A connection for short messages, which never blocks; its rank is not known before the first message."""

    def __init__(self, peer: socket.socket, rank: int | None = None) -> None:
        peer.setblocking(False)
        self.socket, self.rank, self.heard_s = peer, rank, time.monotonic()
        self._incoming = self._outgoing = b""

    def send(self, **message: Any) -> None:
        """Sends a message, at once or with a later one; the end of a connection is seen by `received`."""
        self._outgoing += json.dumps(message).encode() + b"\n"
        with contextlib.suppress(OSError):
            self._outgoing = self._outgoing[self.socket.send(self._outgoing) :]

    def received(self) -> list[dict[str, Any]] | None:
        """Returns new messages; None at the end of the connection, or if they are not of this protocol."""
        try:
            data = self.socket.recv(1 << 16)
            self.heard_s = time.monotonic()
            *whole, self._incoming = (self._incoming + data).split(b"\n")
            messages = [json.loads(each) for each in whole]
        except BlockingIOError:
            return []
        except (OSError, ValueError):  # the latter of another program: a scanner of ports, perhaps
            return None
        return messages if data and all(isinstance(each, dict) for each in messages) else None


class Watcher:
    """This process's view of all ranks; one per process.

    Attributes:
        children: Processes of other ranks that this one has started, by rank.
        at_sigterm: "ignore" if the handler of SIGTERM is not ours, "stop" if it ends the run, "agree" if it waits
            for the other ranks.
        seconds: Seconds in each phase, until another was entered.
        busy_timeout_s: Longest time in which a rank may give no sign of progress while another waits, in seconds.
    """

    def __init__(self) -> None:
        self.status, self.num_ranks = Status(phase="between two runs"), 1
        self.children: dict[int, subprocess.Popen[bytes]] = {}
        self.seconds, self._counted_s = Counter[str](), time.monotonic()
        self.at_sigterm: Literal["ignore", "stop", "agree"] = "ignore"
        self.busy_timeout_s = default_pg_timeout.total_seconds()
        self._lock = threading.RLock()
        self._connections: list[_Connection] = []
        self._statuses: dict[int, Status] = {}  # of the other ranks
        self._moved_s: dict[int, float] = {}  # when each rank's status changed last
        self._losses: dict[int, Status] = {}
        self._timeout_s, self._silence_s, self._period_s = math.inf, _LEAST_SILENCE_S, _PERIOD_S
        self._runs = self._num_connects = 0
        self._has_given_up = False  # a wait, which may still go on in C++
        self._signal_phase, self._signal_limit_s = "", _GRACE_S
        self._signalled_s = math.inf  # when SIGTERM came
        self._end_s = math.inf  # when this process is ended, as another was lost
        self._running = 0  # identifier of the thread in the run
        # Frame and instruction of its wait, at the last check.
        self._waits_in: tuple[int, int] | None = None
        self._waits_since_s = math.inf
        self._waited_s = -math.inf  # the last check at which it was in a wait
        self._reported_s = -math.inf  # start of the busy time that was reported last
        self._server: socket.socket | None = None
        self._token = ""
        self._thread: threading.Thread | None = None

    # --------------------------------------------------------------------------------- the main thread

    @property
    def phase(self) -> str:
        """Name of this rank's present work."""
        return self.status.phase

    @property
    def patience_s(self) -> float:
        """Limit of a collective in which a rank may be busy, in seconds; the watcher ends it before."""
        return max(self.busy_timeout_s, default_pg_timeout.total_seconds()) + _MARGIN_S

    @property
    def signals(self) -> dict[int, str]:
        """Phases of the ranks that got SIGTERM in this run, by rank."""
        everyone = (self.status, *self._statuses.copy().values())
        run = self.status.run
        return {each.rank: each.signal for each in everyone if each.signal and each.run == run}

    def publish(self, **changes: Any) -> None:
        """Changes this rank's status, and sends it to the others at once."""
        with self._lock:
            self.status = replace(self.status, **changes)
            self._moved_s[self.status.rank] = time.monotonic()
            self._send(self.status)

    def enter(self, phase: str) -> None:
        """Begins another phase, in place of the present one."""
        self._count_seconds()
        self.publish(phase=phase)

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Enters a phase, in which errors of collectives that a lost rank has broken name that rank.

        Raises:
            LostRankError: A rank was lost, or a collective waited in vain.
        """
        before = self.phase
        self._count_seconds()
        self.publish(phase=name)
        try:
            with self.explaining():
                yield
        except BaseException as error:
            with contextlib.suppress(AttributeError):  # of one that takes none
                error._phase = getattr(error, "_phase", self.phase)  # type: ignore[attr-defined]
            raise
        finally:
            self._count_seconds()
            self.publish(phase=before)

    def _count_seconds(self) -> None:
        now_s = time.monotonic()
        self.seconds[self.phase] += now_s - self._counted_s
        self._counted_s = now_s

    @contextlib.contextmanager
    def run(self, rank: int) -> Iterator[None]:
        """Watches a run of several ranks: this process is ended if it would go on without the others.

        Raises:
            LostRankError: As for `inside`.
        """
        phase = self.phase
        self._start()
        in_main = threading.current_thread() is threading.main_thread()
        if in_main:  # a signal is heard of even while the main thread waits outside of Python
            before = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        self.begin_run(_STARTING, rank)
        self._runs += 1
        try:
            with self.explaining():
                yield
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            self._runs -= 1
            if in_main:
                signal.set_wakeup_fd(before)
            self._kill_silent()
            self.publish(phase=phase)

    def begin_run(self, phase: str, rank: int) -> None:
        """Begins a run: failures of an earlier one do not count, but ranks that are gone stay so."""
        with self._lock:
            self._end_s = self._signalled_s = math.inf
            self._signal_phase, self._signal_limit_s = "", _GRACE_S
            self._losses.clear()
            self._has_given_up = False
            self._running = threading.get_ident()
            place = {"process": _process(os.getpid()), "parent": _process(os.getppid())}
            run, turn = self.status.run + 1, self.status.turn
            self.status = Status(rank, phase, run=run, turn=turn, **place)
            for status in self._statuses.values():
                self._record_failure(status)
        self.publish()

    def fail(self, error: BaseException) -> None:
        """Publishes why this rank ends its run."""
        loss, follows = self.loss(), isinstance(error, PipelineTimeoutError)
        text = f"{type(error).__name__}: {error}".strip(": ").splitlines()[0]
        failure = f"it failed with {text}; its own error says where"
        if follows:
            text = text if loss is None else f"it lost rank {loss.rank}"
            failure = f"{text}; its own error says more"
        if self._signal_phase:
            failure = "it got SIGTERM"
        phase = getattr(error, "_phase", self.phase)
        self.publish(failure=failure, follows=follows, phase=phase, signal=self._signal_phase)

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Turns a broken connection, or a timeout, inside into a LostRankError that names the rank."""
        try:
            yield
        except LostRankError:  # explained already
            raise
        except (PipelineTimeoutError, RuntimeError) as error:
            of_peers = isinstance(error, PipelineTimeoutError | dist.DistError)
            if not isinstance(error, DiffPipeError):
                of_peers = of_peers or bool(_BROKEN.search(str(error)))
            if of_peers and self.num_ranks > 1:
                raise self._explained(error) from error
            raise

    def loss(self) -> Status | None:
        """Returns the status of the rank that was lost first, preferably of one that did not lose another."""
        return min(self._losses.copy().values(), key=lambda each: each.follows, default=None)

    def refuse_loss(self) -> None:
        """Raises LostRankError if a rank is lost."""
        if (loss := self.loss()) is not None:
            self._has_given_up = True
            raise LostRankError(f"{self._here} lost {loss}", bool(loss.signal))

    @property
    def _here(self) -> str:
        return f"rank {self.status.rank} ({self.phase})"

    def _explained(self, error: Exception) -> LostRankError:
        """Returns an error that says which rank was lost; or, if none was, what the others are doing."""
        until_s = time.monotonic() + _VERDICT_S
        self._has_given_up = True
        while not self._knows_why(until_s):
            time.sleep(0.02)
        first, loss = f"{error}\n" if isinstance(error, PipelineTimeoutError) else "", self.loss()
        if loss is not None:
            return LostRankError(f"{first}{self._here} lost {loss}", bool(loss.signal))
        others = sorted(self._statuses.copy().items())
        doing = [f"rank {n}: {'has left' if s.state == 'left' else s.phase}" for n, s in others]
        return LostRankError(
            f"{first}{self._here} lost no rank, but could not communicate "
            f"({'; '.join(doing) or 'none answers'}){'' if first else f'. torch said: {error}'}"
        )

    def _knows_why(self, until_s: float) -> bool:
        """Returns whether no more can be learnt, after a collective broke, of which rank was lost first."""
        with self._lock:
            loss, now_s = self.loss(), time.monotonic()
            if (loss is not None and not loss.follows) or self.has_refusal():
                return True
            heard_s = [each.heard_s for each in self._connections if each.rank is not None]
            is_silent = (
                now_s - min(heard_s, default=now_s) > 3 * self._period_s
            )  # and counts as lost soon
            return not is_silent and now_s >= until_s

    def begin_turn(self, phase: str) -> None:
        """Begins a turn, which is what all ranks of a Predictor do together."""
        self.publish(phase=phase, turn=self.status.turn + 1, refuses=False, step=-1)

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Marks this rank as busy inside, also between two turns: other ranks of a Predictor wait for it."""
        step = self.status.step
        self.publish(step=step or -1)
        try:
            yield
        finally:
            self.publish(step=step and self.status.step)

    def step(self) -> None:
        """Counts a step of this turn; sent with the next sign of life."""
        self._moved_s[self.status.rank] = time.monotonic()
        self.status = replace(self.status, step=max(self.status.step, 0) + 1)

    def has_refusal(self) -> bool:
        """Returns whether another rank has refused in this turn."""
        others, turn = self._statuses.copy().values(), self.status.turn
        return any(each.refuses and each.turn == turn for each in others)

    def wait(
        self, arrived: Callable[[], bool], what: str, give_up: Callable[[], None] = lambda: None
    ) -> None:
        """Waits for `what` while the other ranks live; calls `give_up` once if that takes a little longer.

        Raises:
            PipelineTimeoutError: A rank is lost; or it lives, but has made no step for `timeout_s`, or no sign of
                progress before the first one for `busy_timeout_s`.
        """
        started_s, pause_s, has_given_up = time.monotonic(), 1e-4, False
        while not arrived():
            time.sleep(pause_s)
            pause_s, now_s = min(1.5 * pause_s, 0.02), time.monotonic()
            if not has_given_up and now_s - started_s > _GIVE_UP_S:
                has_given_up = True
                give_up()
            statuses, moved_s = self._statuses.copy(), self._moved_s.copy()
            if arrived():  # a rank that has done its work may have ended
                return
            self.refuse_loss()
            for status in statuses.values():
                limit_s, name = self._limit_of(status)
                if now_s - moved_s[status.rank] > limit_s:
                    self._has_given_up = True
                    raise PipelineTimeoutError(
                        f"{self._here} waited for {what}: rank {status.rank} ({status.phase}) lives, but has made "
                        f"no step for {limit_s:g} s ({name})"
                    )

    def _limit_of(self, status: Status) -> tuple[float, str]:
        """Returns how long another rank may make no step of this turn, in seconds, and the name of that limit."""
        if status.turn != self.status.turn or not status.step:  # it is not waited for
            return math.inf, ""
        of_step = self._timeout_s, "timeout_s"
        if status.step > 0:
            return of_step
        # Before the first step a rank may be busy, or wait for another.
        return (
            (math.inf, "")
            if status.waits
            else max(of_step, (self.busy_timeout_s, "busy_timeout_s"))
        )

    def call(self, what: str, function: Callable[[], Any]) -> Any:
        """Calls a function that may block for ever, in a thread; returns its result, or raises as `wait` does."""
        called = in_thread(function, "diffpipe-call")
        self.wait(called.done, what)
        with self.explaining():
            return called.result()

    def note_batch(self) -> None:
        """Notes progress, for this process only: each batch, and each tensor of a model, has the whole timeout."""
        self._moved_s[self.status.rank], self._waits_in = time.monotonic(), None

    def note_signal(self) -> None:
        """Publishes that this rank got SIGTERM; for its handler, which may interrupt any call."""
        self._signal_phase = self._signal_phase or self.phase
        self._signal_limit_s = self._silence_s  # its main thread runs Python
        if self._thread is not None:
            with contextlib.suppress(OSError):
                self._wake.send(bytes([signal.SIGTERM]))

    # ------------------------------------------------------------------------------------- connections

    def connect(self, store: dist.Store, rank: int, num_ranks: int, timeout_s: float) -> str:
        """Connects to rank 0, whose address is in the store, or opens the server to which the others connect.

        Args:
            store: Store of the ranks; its timeout is that of the wait for rank 0.
            rank: Rank of this process.
            num_ranks: Number of all ranks.
            timeout_s: Longest silence of a rank, in seconds.

        Returns:
            A prefix of keys in the store that no other call returns.

        Raises:
            ConfigurationError: Rank 0 cannot be reached.
        """
        self._start()
        with self._lock:
            self._timeout_s, self._silence_s = timeout_s, max(timeout_s, _LEAST_SILENCE_S)
            self._period_s = min(_PERIOD_S, timeout_s / 5)
            self._num_connects += 1
            # The store of torchrun may have seen an attempt that failed.
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            key = f"diffpipe/{attempt}/{self._num_connects}"
            if self.num_ranks == num_ranks and (self._connections or self._server):
                return key
            self._leave()
            self._statuses.clear()
            self._losses.clear()
            self.num_ranks = num_ranks
            self.status = replace(self.status, rank=rank, state="alive")
        if rank == 0:
            dual = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if dual else socket.AF_INET
            server = socket.create_server(
                ("", 0), family=family, dualstack_ipv6=dual, backlog=num_ranks
            )
            server.setblocking(False)
            self._server, self._token = server, secrets.token_hex(8)
            self._selector.register(server, selectors.EVENT_READ, server)
            self._wake.send(b"\0")  # the thread looks at a longer list
            port = server.getsockname()[1]
            store.set(key, json.dumps([port, self._token, socket.gethostname()]))
            return key
        port, token, host = json.loads(store.get(key))
        names = [os.environ.get("MASTER_ADDR", "127.0.0.1"), host]
        connection = _Connection(_connected(names, port, 0.75 * self._silence_s), 0)
        with self._lock:
            connection.send(token=token, **asdict(self.status))
            self._connections.append(connection)
            self._selector.register(connection.socket, selectors.EVENT_READ, connection)
        self._wake.send(b"\0")
        return key

    def missing(self) -> list[int]:
        """Returns the ranks that have not connected, as far as this one knows."""
        return sorted({*range(self.num_ranks)} - self._statuses.keys() - {self.status.rank})

    def _leave(self) -> None:
        with self._lock:
            if self._connections:
                self.publish(state="left")
            for connection in self._connections.copy():
                self._hang_up(connection)
            if self._server is not None:
                self._selector.unregister(self._server)
                self._server.close()
                self._server = None

    def _hang_up(self, connection: _Connection) -> None:
        self._connections.remove(connection)
        self._selector.unregister(connection.socket)
        connection.socket.close()

    def limit_exit(self) -> None:
        """Ends this process some seconds after Python's last exit handler, where a wait was given up.

        Destructors of gloo's groups wait up to half an hour for a silent peer, without the interpreter's lock, so
        that only a thread in C can end the process. The handler that was registered first is called last.
        """
        if self._has_given_up:
            nothing = open(os.devnull, "w")  # noqa: PTH123, SIM115
            faulthandler.dump_traceback_later(_EXIT_S, exit=True, file=nothing)

    def forget(self) -> None:
        """Closes connections in a forked process: they would look alive for as long as it lives."""
        if self._thread is not None:
            with contextlib.suppress(ValueError):  # of a thread that forked
                signal.set_wakeup_fd(-1)
            every = [each.socket for each in self._connections]
            for each in (*every, self._server, self._wake, self._woken, self._selector):
                if each is not None:
                    each.close()
        self.__init__()  # type: ignore[misc]

    # -------------------------------------------------------------------------------------- the thread

    def _start(self) -> None:
        if self._thread is None:
            atexit.register(self._leave)
            self._selector = selectors.DefaultSelector()
            self._wake, self._woken = socket.socketpair()
            self._wake.setblocking(False)
            self._selector.register(self._woken, selectors.EVENT_READ, self._woken)
            name = "diffpipe-watcher"
            self._thread = threading.Thread(target=self._watch, name=name, daemon=True)
            self._thread.start()

    def _watch(self) -> None:
        said_s = 0.0
        while self._thread is not None:
            try:
                before_s = time.monotonic()
                ready = self._selector.select(_TICK_S)
                with self._lock:
                    now_s = time.monotonic()
                    if now_s - before_s > _TICK_S + 1.0:  # stopped, perhaps with all others
                        for each in self._connections:
                            each.heard_s = now_s
                    for key, _ in ready:
                        self._hear(key.data)
                    if now_s - said_s >= self._period_s:
                        said_s = now_s
                        self._send(self.status)
                    self._check_connections(now_s)
                    self._check_wait(now_s)
                    self._check_work(now_s)
                self._end_if_needed(now_s)
            except Exception as error:  # or nobody would watch, and nobody know it
                _log.exception("the other ranks are watched no more")
                self._end(f"{self._here} cannot watch the other ranks: {error!r}", 1)

    def _hear(self, source: Any) -> None:
        if source is self._woken:
            if signal.SIGTERM in self._woken.recv(64) and self.at_sigterm != "ignore":
                self._signal_phase = self._signal_phase or self.phase
                self._signalled_s = min(self._signalled_s, time.monotonic())
                self.publish(signal=self._signal_phase)
        elif source is self._server:
            with contextlib.suppress(OSError):
                stranger = _Connection(source.accept()[0])
                self._selector.register(stranger.socket, selectors.EVENT_READ, stranger)
                self._connections.append(stranger)
        elif source in self._connections and not self._read(source):  # else it was closed just now
            self._hang_up(source)
            if source.rank is not None and self._status(source.rank).state != "left":
                self._note_end(source.rank)

    def _read(self, connection: _Connection) -> bool:
        """Notes the statuses that came over a connection; returns whether it goes on."""
        messages = connection.received()
        for message in messages or ():
            token = message.pop("token", None)
            if connection.rank is None and token != self._token:
                return False
            status = Status(**message)
            if connection.rank is None:
                connection.rank = status.rank
                for each in (self.status, *self._statuses.values()):
                    connection.send(**asdict(each))
            self._note(status)
        return messages is not None

    def _status(self, rank: int) -> Status:
        return self._statuses.get(rank, Status(rank))

    def _note(self, status: Status) -> None:
        """Stores another rank's status if it has changed; rank 0 passes it on."""
        rank, this_rank = status.rank, self.status.rank
        if rank != this_rank and status != self._statuses.get(rank):
            self._statuses[rank], self._moved_s[rank] = status, time.monotonic()
            if this_rank == 0:
                self._send(status)
            self._record_failure(status)

    def _record_failure(self, status: Status) -> None:
        is_gone = status.state != "alive"
        if status.failure and (is_gone or status.run == self.status.run):
            self._losses.setdefault(status.rank, status)
            # The others may fail by the same error, and say more.
            limit_s = _GRACE_S if is_gone else self._silence_s
            self._end_s = min(self._end_s, time.monotonic() + limit_s)

    def _send(self, status: Status) -> None:
        for connection in self._connections:
            if connection.rank not in (None, status.rank):
                connection.send(**asdict(status))

    def _check_connections(self, now_s: float) -> None:
        """Notes ranks that are silent, and processes started by a rank that ended before they connected."""
        for connection in self._connections:
            if connection.rank is None or now_s - connection.heard_s <= self._silence_s:
                continue
            if (status := self._status(connection.rank)).state == "alive":
                silence = f"nothing was heard of it for {self._silence_s:g} s"
                failure = f"{silence}: it is stopped, or its host or link is dead"
                self._note(replace(status, state="silent", failure=failure))
        if self._runs:
            ended = [rank for rank, child in self.children.items() if child.poll() is not None]
            if LAUNCHER in os.environ:
                launcher, pid = map(int, os.environ[LAUNCHER].split())
                ended += [launcher] if os.getppid() != pid else []
            for rank in set(ended) - self._statuses.keys():
                self._note_end(rank)

    def _check_wait(self, now_s: float) -> None:
        """Publishes whether this rank's run has been in one wait for others for as long as a rank may be silent."""
        innermost = sys._current_frames().get(thread_at_work(self._running))
        frames = itertools.islice(traceback.walk_stack(innermost), _FRAMES_OF_A_WAIT)
        is_wait = any(is_of(frame.f_code.co_filename, *_WAITING) for frame, _ in frames)
        # Not the frame itself: with it this thread would own its variables, such as groups that are slow to end.
        place = (id(innermost), innermost.f_lasti) if innermost and is_wait else None
        if place is not None:
            self._waited_s = now_s
        if place is None or place != self._waits_in:
            self._waits_in, self._waits_since_s = place, now_s
        waits = now_s - self._waits_since_s > self._silence_s
        if waits != self.status.waits:
            self.publish(waits=waits)

    def _check_work(self, now_s: float) -> None:
        """Reports where this rank's code stands while another waits, and ends it after `busy_timeout_s`."""
        ranks = [n for n, each in self._statuses.items() if each.waits and each.state == "alive"]
        since_s = max(self._moved_s.get(self.status.rank, now_s), self._waited_s)
        busy_s, at_work = now_s - since_s, self._runs or self.status.step
        if not (ranks and at_work) or self.status.waits or busy_s <= self._silence_s:
            return
        innermost = sys._current_frames().get(thread_at_work(self._running))
        what = f"no sign of progress for {busy_s:.0f} s while {in_words(ranks)} waited for it"
        is_over = self._runs and busy_s > self.busy_timeout_s
        if innermost is not None and (is_over or since_s != self._reported_s):
            stack, self._reported_s = traceback.extract_stack(innermost), since_s
            places = [f"{each.filename}:{each.lineno} in {each.name}" for each in reversed(stack)]
            place = ", called at ".join(places[:_FRAMES_OF_A_PLACE])
            _log.warning(
                "%s gave %s (busy_timeout_s=%g). It stands at\n%s",
                self._here, what, self.busy_timeout_s, "".join(stack.format()),
            )  # fmt: skip
            if is_over:
                failure = f"it gave {what} (busy_timeout_s={self.busy_timeout_s:g}), at {place}"
                self.publish(failure=failure)
                self._end(f"{self._here}: {failure}", 1)

    def _note_end(self, rank: int) -> None:
        """Notes the end of a process, with its failure if it has sent one."""
        status, child = self._status(rank), self.children.get(rank)
        how = "killed perhaps: by hand, by its host for want of memory, or by a crash of other code"
        if child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(1.0)
            code = child.returncode
            how = f"with exit code {code}"
            if code is not None and code < 0:
                how = f"killed by {signal.Signals(-code).name}"
        failure = f"its process has ended without a word, {how}"
        if status.signal:
            failure = "it got SIGTERM"
        self._note(replace(status, state="ended", failure=status.failure or failure))

    def _end_if_needed(self, now_s: float) -> None:
        """Ends this process if it has lost a rank, if all ranks wait, or if it does not act upon SIGTERM."""
        if not self._runs:
            return
        if now_s > self._end_s and (loss := self.loss()) is not None:
            self._end(f"{self._here} lost {loss}", _BY_SIGNAL if loss.signal else 1)
        everyone, moved_s = [self.status, *self._statuses.values()], max(self._moved_s.values())
        all_wait = len(everyone) == self.num_ranks > 1 and all(each.waits for each in everyone)
        if all_wait and now_s - moved_s > 2 * self._period_s:
            doing = "; ".join(f"rank {each.rank}: {each.phase}" for each in everyone)
            self._end(
                f"{self._here} has waited for {self._silence_s:g} s (timeout_s) in one collective, as all others "
                f"have ({doing}): they have not all come to the same one, so that it would never end. What "
                "communicates, in hooks and callbacks, too, belongs on all ranks or on none",
                1,
            )
        if self.at_sigterm == "stop" and now_s - self._signalled_s > self._signal_limit_s:
            self._end(f"{self._here} got SIGTERM and stops", _BY_SIGNAL)
        if self.at_sigterm == "agree" and (signals := self.signals):
            waited_s = now_s - max(self._moved_s.values(), default=now_s)
            if waited_s > self._silence_s:
                to = ", ".join(f"rank {rank} ({phase})" for rank, phase in signals.items())
                why = f"SIGTERM to {to}: {self._here} did not go on for {waited_s:.0f} s"
                self._end(why, _BY_SIGNAL)

    def _end(self, why: str, code: int) -> None:
        """Ends this process, whatever its other threads do; they may hold any lock.

        The others are told why: what it says itself may be lost with its host.
        """
        if not self.status.failure and code != _BY_SIGNAL:
            self.publish(failure=f"it was ended, as {why}", follows=self.loss() is not None)
        os.write(2, f"\nlightning_diffpipe: {why}. This process is ended, too\n".encode())
        for child in (*self.children.values(), *multiprocessing.active_children()):
            child.kill()
        self._kill_silent()
        os._exit(code)

    def _kill_silent(self) -> None:
        """Kills silent processes of this host that the same launcher started: no other would end them soon."""
        of_launcher = {_process(os.getpid()), _process(os.getppid())}
        for status in list(self._losses.values()):
            if status.state == "silent" and of_launcher & {status.process, status.parent}:
                with contextlib.suppress(OSError):
                    os.kill(int(status.process.rpartition(" ")[2]), signal.SIGKILL)


def _process(number: int) -> str:
    """Returns a name of a process of this host that no process of another host or container has."""
    path = Path("/proc/self/ns/pid")
    namespace = path.stat().st_ino if path.exists() else ""
    return f"{socket.gethostname()} {namespace} {number}"


def _connected(names: list[str], port: int, within_s: float) -> socket.socket:
    """Connects to the first address that answers, of which all share the time; or raises ConfigurationError."""
    addresses, errors = dict[Any, None](), dict[Any, str]()
    for name in names:
        try:
            resolved = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
            addresses |= dict.fromkeys(each[-1][:2] for each in resolved)
        except (OSError, UnicodeError) as error:  # the latter of names that are none
            errors[name] = f"{name}: {error}"
    for address in addresses:
        try:
            return socket.create_connection(address, timeout=within_s / len(addresses))
        except OSError as error:
            errors[address] = f"{address[0]}: {error}"
    raise ConfigurationError(
        f"rank 0 cannot be reached at port {port} of {' or '.join(names)} ({'; '.join(errors.values())}): ranks "
        "connect to each other at ports that they choose; open them between hosts, or set MASTER_ADDR to an "
        "address of rank 0's host"
    )


watcher = Watcher()
"""Of this process."""
os.register_at_fork(after_in_child=watcher.forget)
atexit.register(watcher.limit_exit)
