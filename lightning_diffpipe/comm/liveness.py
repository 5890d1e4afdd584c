"""Who is alive, and what each rank does: one connection from every rank to rank 0, beside all process groups.

    rank 1 ──┐  phase, every few seconds; what it failed with; that it leaves
    rank 2 ──┼── rank 0 ──> all others: who was lost, how, and in which phase
    rank 3 ──┘

A collective that breaks names an address, and one that waits for a rank that is stopped, or cut off by a dead
link, says nothing for as long as ranks may be busy between two steps. Here a thread of each process listens: one
that ends closes its connection at once, one that is stopped falls silent, and one that is busy does neither. So

    phase        turns what a lost rank raises, in anybody's collective, into an error with its rank, phase and end
    run          ends a process that would go on without the others: one that waits in vain, or is busy with itself

Threads outside of a run, such as those of a script between two fits, are left alone.
"""

from __future__ import annotations

import atexit
import contextlib
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
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from lightning_diffpipe.comm.waiting import in_thread
from lightning_diffpipe.errors import DiffPipeError, LostRankError, PipelineTimeoutError

LAUNCHER = "DIFFPIPE_LAUNCHER_PID"
"""Environment variable of processes that rank 0 started: its process."""

_log = logging.getLogger(__name__)
_KEY = "diffpipe/liveness"
_STARTING, _CONNECTING, _MET = "starting processes", "connecting", "setting up"
_PERIOD_S = 2.0  # between two signs of life, at most
_LEAST_SILENCE_S = 10.0  # a thread may wait so long for a busy machine, or the interpreter
_GRACE_S = 5.0  # for a rank that has lost another to end by its own error
_VERDICT_S = 3.0  # from a broken connection of a collective to one of ours
_RUN = ("MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID")  # alike in one run only
_BROKEN = re.compile(
    r"/gloo/|Gloo|ProcessGroup|NCCL|TCPStore|Connection (closed|reset) by peer|Connection refused|Broken pipe"
    r"|Operation timed out|[Ww]ait timeout|connectFullMesh"
)

Kind = Literal["ended", "failed", "silent", "signal", "followed"]


@dataclass(frozen=True)
class Loss:
    """How a rank was lost.

    Attributes:
        rank: Which.
        phase: What it was doing.
        kind: Its process ended without a word; it failed; it fell silent; it got a signal; it lost another rank.
        text: More of it.
        pid: Its process.
        host: Where that ran.
        run: In which of its runs it failed; a user may catch that, and begin another.
    """

    rank: int
    phase: str
    kind: Kind
    text: str = ""
    pid: int = 0
    host: str = ""
    run: int | None = None

    def __str__(self) -> str:
        end = {
            "ended": f"its process has ended without a word{self.text}",
            "failed": f"it failed with {self.text}; its own error says where",
            "silent": f"nothing was heard of it for {self.text}: it is stopped, or its host or link is dead",
            "signal": f"it got {self.text}",
            "followed": f"{self.text}; its own error says more",
        }[self.kind]
        return f"rank {self.rank} ({self.phase}): {end}"


class _Line:
    """A connection that carries short messages, and never blocks."""

    def __init__(self, peer: socket.socket, rank: int | None = None) -> None:
        peer.setblocking(False)
        self.socket, self.rank = peer, rank
        self.phase, self.pid, self.host = _STARTING, 0, ""
        self.heard_s = time.monotonic()
        self._incoming = self._outgoing = b""

    def send(self, **message: Any) -> None:
        """Sends, at once or with a later message; of a broken connection the reader will know."""
        self._outgoing += json.dumps(message).encode() + b"\n"
        with contextlib.suppress(OSError):
            self._outgoing = self._outgoing[self.socket.send(self._outgoing) :]

    def received(self) -> list[dict[str, Any]] | None:
        """Returns what has come; None at the end of the connection, or where it is not of this protocol."""
        try:
            data = self.socket.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            return None
        self.heard_s = time.monotonic()
        *whole, self._incoming = (self._incoming + data).split(b"\n")
        try:
            messages = [json.loads(each) for each in whole]
        except ValueError:  # of a stranger: a scanner of ports, perhaps
            return None
        return messages if all(isinstance(each, dict) for each in messages) else None


class Liveness:
    """This process's view of all ranks; one per process.

    Attributes:
        rank: This one.
        children: Processes that this one has started, by rank.
        agrees_on_signals: SIGTERM is noted here, and acted upon together with the other ranks.
        signals: Ranks that got a signal, with what they were doing.
    """

    def __init__(self) -> None:
        self.rank, self.children = 0, dict[int, "subprocess.Popen[bytes]"]()
        self.agrees_on_signals = False
        self._phases = ["between two runs"]
        self._lock = threading.RLock()
        self._lines: dict[int, _Line] = {}
        self._unknown: list[_Line] = []  # that have not said who they are
        self._left: set[int] = set()
        self._stopped_s: dict[int, float] = {}  # since when processes are stopped that start
        self._forget_run()
        self._silence_s, self._period_s = 0.0, _PERIOD_S
        self._runs = self._num_runs = self._connections = 0
        self._group: Any = None
        self._is_connected = self._is_ahead = False  # of the default process group
        self._server: socket.socket | None = None
        self._token = ""
        self._thread: threading.Thread | None = None

    def _forget_run(self) -> None:
        self.signals: dict[int, str] = {}
        self._losses: dict[int, Loss] = {}
        self._begun = -1
        self._changed: dict[tuple[int, int], bool] = {}  # by rank and batch
        self._siblings: dict[int, int] = {}  # before all have met, by rank
        self._signalled_s, self._end_s = 0.0, math.inf

    # --------------------------------------------------------------------------------- the main thread

    @property
    def phase(self) -> str:
        """What this rank does."""
        return self._phases[-1]

    def enter(self, name: str) -> None:
        """Begins another phase, in place of the present one; the others hear of it at once."""
        with self._lock:
            self._phases[-1] = name
            self._broadcast(phase=name)

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Enters a phase, and turns what a lost rank raises in it into an error that names the rank.

        Raises:
            LostRankError: A rank was lost, or a collective waited in vain.
        """
        with self._phase_of(name), self._explaining():
            yield

    @contextlib.contextmanager
    def run(self, rank: int) -> Iterator[None]:
        """Watches a run of several ranks: this process is ended if it would go on without the others.

        Raises:
            LostRankError: As for `inside`.
        """
        self.rank = rank
        self._forget_run()
        self._start()
        in_main = threading.current_thread() is threading.main_thread()
        before = -1
        if in_main:  # a signal is heard of even while the main thread waits outside of Python
            before = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        self._runs, self._num_runs = self._runs + 1, self._num_runs + 1
        self._wake.send(b"\0")  # the thread looks who else starts
        try:
            with self._phase_of(_STARTING):
                try:
                    with self._explaining():
                        yield
                except BaseException as error:  # the others hear of it before the phase is over
                    self._broadcast_failure(error)
                    raise
        finally:
            self._runs -= 1
            if in_main:
                signal.set_wakeup_fd(before)
            for loss in list(self._losses.values()):
                _end_frozen(loss)

    @contextlib.contextmanager
    def _phase_of(self, name: str) -> Iterator[None]:
        before = list(self._phases)
        try:
            with self._lock:
                self._phases.append(name)
                self._broadcast(phase=name)
            yield
        finally:
            with self._lock:
                self._phases = before
                self._broadcast(phase=self.phase)

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        except LostRankError:  # explained already
            raise
        except (PipelineTimeoutError, RuntimeError) as error:
            of_peers = isinstance(error, PipelineTimeoutError | dist.DistError)
            if not isinstance(error, DiffPipeError):
                of_peers = of_peers or bool(_BROKEN.search(str(error)))
            if of_peers and (self._runs or self._group is not None):
                raise self._explained(error) from error
            raise

    def connect(
        self, rank: int, num_ranks: int, timeout_s: float, store: dist.Store | None = None
    ) -> None:
        """Connects all ranks; collective.

        Args:
            rank: This one.
            num_ranks: All ranks.
            timeout_s: How long one may be silent.
            store: Where all have just met. The default process group is made next, and noted by another call,
                without a store. Where somebody else has made it before, ranks come when they like.

        Raises:
            LostRankError: A rank that has met the others does not connect.
        """
        group = dist.group.WORLD
        if num_ranks == 1:
            return
        if group is not None and (group is self._group or self._is_ahead):
            self._group, self._is_ahead = group, False
            self.enter(_MET)
            return
        self._start()
        self.rank, self._group, self._connections = rank, group, self._connections + 1
        self._is_connected, self._is_ahead = True, group is None
        with self._lock:
            self._leave()
            self._left.clear()
            self._silence_s = max(timeout_s, _LEAST_SILENCE_S)
            self._period_s = min(_PERIOD_S, timeout_s / 5)
        self.enter(_CONNECTING if self._is_ahead else _MET)
        store = store or dist.distributed_c10d._get_default_store()
        joins = self._join if rank else self._let_join
        key = f"{_KEY}/{self._connections}"
        # A store beyond a dead link never answers.
        connecting = in_thread(partial(joins, store, key, num_ranks), "diffpipe-connect")
        limit_s = self._silence_s if self._is_ahead else default_pg_timeout.total_seconds()
        if wait([connecting], limit_s).not_done:
            self._is_ahead, missing = False, min(self._unconnected(num_ranks), default=0)
            loss = Loss(missing, _CONNECTING, "silent", f"{limit_s:g} s")
            raise LostRankError(f"rank {rank} ({self.phase}) lost {loss}")
        connecting.result()

    def _let_join(self, store: dist.Store, key: str, num_ranks: int) -> None:
        """Lets all other ranks connect; waits for them where they have just met."""
        self._token = secrets.token_hex(8)
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        options: dict[str, Any] = {"family": family, "dualstack_ipv6": dual}
        self._server = server = socket.create_server(("", 0), backlog=num_ranks, **options)
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ)
        self._wake.send(b"\0")  # the thread looks at a longer list
        store.set(key, json.dumps([server.getsockname()[1], self._token, *_place()]))
        while self._is_ahead and any(
            not store.check([f"{key}/{rank}"]) for rank in self._unconnected(num_ranks)
        ):
            time.sleep(0.02)

    def _unconnected(self, num_ranks: int) -> set[int]:
        """Returns ranks that have not connected to rank 0, as it knows."""
        known = self._lines.keys() | self._losses.keys() | self._left
        return set() if self.rank else {*range(1, num_ranks)} - known

    def _join(self, store: dist.Store, key: str, num_ranks: int) -> None:
        """Connects to rank 0, where all have met or at the name that it has for its host."""
        port, token, pid, host = json.loads(store.get(key))
        names = dict.fromkeys([os.environ.get("MASTER_ADDR", "127.0.0.1"), host])
        try:
            line = _Line(_connected([*names], port, 0.75 * self._silence_s), 0)
        except OSError as error:
            _log.warning(
                "rank %d cannot reach rank 0 at port %s of %s (%s): when a rank is lost, the others may not be "
                "able to say which", self.rank, port, " or ".join(names), error,
            )  # fmt: skip
            store.set(f"{key}/{self.rank}", "cannot connect")
            return
        line.pid, line.host, line.phase = pid, host, self.phase
        line.send(token=token, rank=self.rank, place=_place())
        with self._lock:
            self._lines[0] = line
            self._selector.register(line.socket, selectors.EVENT_READ)
        self._wake.send(b"\0")

    def note_signal(self) -> None:
        """Lets all ranks know that this one got SIGTERM."""
        self._signalled_s = 0.0
        with self._lock:
            self._look_for_processes(time.monotonic())  # of which one's end may be the reason
            self.signals[self.rank] = self.phase
            self._broadcast(**{"signalled": self.rank, "in": self.phase})

    def begin_batch(self, number: int) -> None:
        """Notes which batch this rank has begun, and found nothing changed before it."""
        self._begun = number
        if self._changed:
            with self._lock:
                self._deny()

    def find_unchanged(self, number: int, ranks: Iterable[int], within_s: float) -> list[int]:
        """Returns which of some ranks begin a batch without the change that this one has found before it.

        Args:
            number: The batch.
            ranks: To wait for until they begin it.
            within_s: After so long those that did not come are not waited for any more.
        """
        with self._lock:
            self._say_whether_changed(number, True)
        asked = {(rank, number) for rank in ranks}
        deadline_s = time.monotonic() + within_s
        while not (asked <= self._changed.keys() or self._losses):
            if time.monotonic() > deadline_s:
                break
            time.sleep(0.01)
        return sorted(rank for rank, _ in asked if self._changed.get((rank, number)) is False)

    def _say_whether_changed(self, number: int, changed: bool) -> None:
        self._changed[self.rank, number] = changed
        self._broadcast(changed=changed, on=self.rank, before=number)

    def _deny(self) -> None:
        """Answers ranks that have found a change before a batch that this one has begun without."""
        for number in {before for _, before in self._changed if before <= self._begun}:
            if (self.rank, number) not in self._changed:
                self._say_whether_changed(number, False)

    def loss(self) -> Loss | None:
        """Returns the rank that was lost first, of those that were not lost because of another."""
        losses = sorted(self._losses.copy().values(), key=lambda loss: loss.kind == "followed")
        return losses[0] if losses else None

    def _explained(self, error: Exception) -> LostRankError:
        """Returns an error that says who was lost; or, if nobody was, what the others are doing."""
        until_s, may_still_hear = time.monotonic() + _VERDICT_S, True
        while may_still_hear:  # who was lost first
            time.sleep(0.02)
            with self._lock:
                loss, now_s = self.loss(), time.monotonic()
                heard_s = min((line.heard_s for line in self._lines.values()), default=now_s)
                is_open = loss is None or (loss.kind == "followed" and bool(self._lines))
                is_silent = loss is None and now_s - heard_s > 3 * self._period_s
                may_still_hear = is_silent or (is_open and now_s < until_s)
        here = f"rank {self.rank} ({self.phase})"
        first = f"{error}\n" if isinstance(error, PipelineTimeoutError) else ""
        if loss is not None:
            return LostRankError(f"{first}{here} lost {loss}", loss.kind == "signal")
        with self._lock:
            others = {line.rank: line.phase for line in self._lines.values()}
        others |= dict.fromkeys(self._left, "has left")
        said = [f"rank {rank}: {each}" for rank, each in sorted(others.items())]
        doing, raw = "; ".join(said) or "none answers", "" if first else f". torch said: {error}"
        return LostRankError(
            f"{first}{here} lost no rank, but could not communicate ({doing}){raw}"
        )

    def _broadcast_failure(self, error: BaseException) -> None:
        followed = isinstance(error, PipelineTimeoutError)
        kind: Kind = "followed" if followed else "failed"
        text = f"{type(error).__name__}: {error}".strip(": ").splitlines()[0]
        if self.rank in self.signals:
            kind, text = "signal", "SIGTERM"
        elif followed and (loss := self.loss()) is not None:
            text = f"it lost rank {loss.rank}"
        with self._lock:
            own = Loss(self.rank, self.phase, kind, text, *_place(), run=self._num_runs)
            self._broadcast(lost=asdict(own))

    # -------------------------------------------------------------------------------------- the thread

    def _start(self) -> None:
        if self._thread is None:
            atexit.register(self._leave)
            self._selector = selectors.DefaultSelector()
            self._wake, self._woken = socket.socketpair()
            self._wake.setblocking(False)
            self._selector.register(self._woken, selectors.EVENT_READ)
            self._thread = threading.Thread(
                target=self._listen, name="diffpipe-liveness", daemon=True
            )
            self._thread.start()

    def _listen(self) -> None:
        sent_s = 0.0
        while True:
            # Something may happen that no connection brings.
            watches = self._runs and (self._losses or self._signalled_s or not self._lines)
            pause_s = min(self._period_s, 0.25) if watches else self._period_s
            before_s = time.monotonic()
            ready = self._selector.select(pause_s)
            with self._lock:
                now_s = time.monotonic()
                if now_s - before_s > pause_s + 1.0:  # stopped, perhaps with all others
                    self._stopped_s.clear()
                    for line in self._lines.values():
                        line.heard_s = now_s
                for key, _ in ready:
                    self._hear(key.fileobj)
                if self._lines and now_s - sent_s > self._period_s:
                    sent_s = now_s
                    self._broadcast(phase=self.phase)
                for line in list(self._lines.values()):
                    if line.rank is not None and now_s - line.heard_s > self._silence_s:
                        silence = f"{self._silence_s:g} s"
                        self._lose(
                            Loss(line.rank, line.phase, "silent", silence, line.pid, line.host)
                        )
                self._look_for_processes(now_s)
            self._end_if_alone(now_s)

    def _hear(self, source: Any) -> None:
        if source is self._woken:
            if signal.SIGTERM in self._woken.recv(64) and self.rank not in self.signals:
                self._signalled_s = time.monotonic()
        elif source is self._server:
            with contextlib.suppress(OSError):
                line = _Line(source.accept()[0])
                self._selector.register(line.socket, selectors.EVENT_READ)
                self._unknown.append(line)
        else:
            every = [*self._lines.values(), *self._unknown]
            line = next((each for each in every if each.socket is source), None)
            if line is None:  # it was hung up just now
                return
            messages = line.received()
            if messages is None:
                self._lose_connection(line)
            for message in messages or ():
                if line.rank is None and message.get("token") != self._token:  # a stranger
                    self._drop(line)
                    return
                self._take(line, message)

    def _take(self, line: _Line, message: Mapping[str, Any]) -> None:
        if line.rank is None:
            self._unknown.remove(line)
            line.rank, line.phase = message["rank"], self.phase
            line.pid, line.host = message["place"]
            self._lines[message["rank"]] = line
            line.send(phase=self.phase)
            return
        match message:
            case {"phase": phase}:
                line.phase = phase
            case {"signalled": rank, "in": phase}:
                self.signals[rank] = phase
                self._pass_on(message)
            case {"changed": changed, "on": rank, "before": number}:
                self._changed[rank, number] = changed
                self._pass_on(message)
                self._deny()
            case {"lost": loss}:
                self._lose(Loss(**loss))
            case {"ended": _}:
                self._end_in(_GRACE_S)
            case {"left": rank}:
                self._left.add(rank)

    def _pass_on(self, message: Mapping[str, Any]) -> None:
        if self.rank == 0:
            self._broadcast(**message)

    def _lose_connection(self, line: _Line) -> None:
        self._drop(line)
        rank = line.rank
        if rank is None:
            return
        if rank in self._losses:
            self._end_in(_GRACE_S)
            self._pass_on({"ended": rank})
        elif rank in self._left:
            return
        elif rank in self.signals:
            self._lose(Loss(rank, self.signals[rank], "signal", "SIGTERM"))
        else:
            self._lose(Loss(rank, line.phase, "ended", self._status_of(rank), line.pid, line.host))

    def _end_in(self, seconds: float) -> None:
        self._end_s = min(self._end_s, time.monotonic() + seconds)

    def _lose(self, loss: Loss) -> None:
        known = loss.rank in self._losses or loss.rank == self.rank
        if known or loss.run not in (None, self._num_runs):
            return
        self._losses[loss.rank] = loss
        if not self._is_connected:  # nothing will break by itself
            self._end_in(0.0)
        else:  # where it failed, the others do so, too, perhaps
            self._end_in(_GRACE_S if loss.kind in ("ended", "silent") else self._silence_s)
        self._pass_on({"lost": asdict(loss)})

    def _look_for_processes(self, now_s: float) -> None:
        """Looks whether a process of this host has ended, or is stopped, that is not connected yet."""
        if not self._runs:
            return
        known = self._lines.keys() | self._losses.keys() | self._left
        for rank, child in self.children.items():
            code = child.poll()
            if rank not in known and code is not None and (code or not self._is_connected):
                self._lose(Loss(rank, _STARTING, "ended", self._status_of(rank), child.pid))
        parent = os.environ.get(LAUNCHER)
        starting = {rank: child.pid for rank, child in self.children.items()}
        starting |= {0: int(parent)} if self.rank and parent is not None else {}
        if not self._is_connected and not starting:
            starting = _siblings()
            for rank, pid in self._siblings.items() - starting.items():
                # A signal to all comes before they end; that of a launcher which has lost one, after.
                stopped = self.rank in self.signals or 0.0 < self._signalled_s < now_s
                if rank not in known | starting.keys() and not (
                    stopped or Path(f"/proc/{pid}").exists()
                ):
                    error = "; its error, if it had one, is above"
                    self._lose(Loss(rank, _STARTING, "ended", error, pid))
            self._siblings |= starting
        for rank, pid in starting.items():
            if rank in known or not _is_stopped(pid):
                self._stopped_s.pop(rank, None)
            elif now_s - self._stopped_s.setdefault(rank, now_s) > _LEAST_SILENCE_S:
                silence = f"{_LEAST_SILENCE_S:g} s"
                self._lose(Loss(rank, _STARTING, "silent", silence, pid, socket.gethostname()))
        if self.rank and 0 not in known and parent is not None and os.getppid() != int(parent):
            self._lose(Loss(0, _STARTING, "ended", self._status_of(0)))

    def _status_of(self, rank: int) -> str:
        """Returns how a process has ended, if it was started here."""
        child = self.children.get(rank)
        if child is None:
            return ", killed perhaps: by hand, by its host for want of memory, or by a crash of other code"
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(1.0)
        code = child.returncode
        if code is None or code >= 0:
            return f", with exit code {code}"
        return f", killed by {signal.Signals(-code).name}"

    def _end_if_alone(self, now_s: float) -> None:
        if not self._runs:
            return
        if now_s > self._end_s:
            loss = self.loss()
            why = f"rank {self.rank} ({self.phase}) lost {loss}"
            self._end(why, 128 + signal.SIGTERM if loss and loss.kind == "signal" else 1)
        overdue = self._signalled_s and now_s - self._signalled_s > _GRACE_S
        if overdue and not self.agrees_on_signals:
            self.note_signal()
            self._end(
                f"rank {self.rank} got SIGTERM ({self.phase}) and stops", 128 + signal.SIGTERM
            )

    def _end(self, why: str, code: int) -> None:
        """Ends this process, whatever its other threads do; they may hold any lock."""
        os.write(2, f"\nlightning_diffpipe: {why}. This process is ended, too\n".encode())
        for child in (*self.children.values(), *multiprocessing.active_children()):
            child.kill()
        for loss in list(self._losses.values()):
            _end_frozen(loss)
        os._exit(code)

    # --------------------------------------------------------------------------------------- both

    def _broadcast(self, **message: Any) -> None:
        for line in self._lines.values():
            line.send(**message)

    def _drop(self, line: _Line) -> None:
        if line in self._unknown:
            self._unknown.remove(line)
        else:
            self._lines = {rank: each for rank, each in self._lines.items() if each is not line}
        self._selector.unregister(line.socket)
        line.socket.close()

    def _leave(self) -> None:
        with self._lock:
            for line in list(self._lines.values()):
                line.send(left=self.rank)
                self._drop(line)
            if self._server is not None:
                self._selector.unregister(self._server)
                self._server.close()
                self._server = None

    def forget(self) -> None:
        """Closes connections in a forked process: they would look alive for as long as it lives."""
        if self._thread is not None:
            with contextlib.suppress(ValueError):  # of a thread that forked
                signal.set_wakeup_fd(-1)
            sockets = [line.socket for line in (*self._lines.values(), *self._unknown)]
            for each in (*sockets, self._server, self._wake, self._woken, self._selector):
                if each is not None:
                    each.close()
        self.__init__()  # type: ignore[misc]


def _connected(names: Sequence[str], port: int, within_s: float) -> socket.socket:
    """Connects to the first address that answers, of those that a host has by some names; all share the time.

    Raises:
        OSError: There is none; says why of each.
    """
    deadline_s, errors = time.monotonic() + within_s, dict[Any, str]()
    for number, name in enumerate(names):
        share_s = (deadline_s - time.monotonic()) / (len(names) - number)
        until_s = time.monotonic() + share_s
        look_up = partial(socket.getaddrinfo, name, port, type=socket.SOCK_STREAM)
        try:
            addresses = in_thread(look_up, "diffpipe-look-up").result(share_s)
        except (OSError, UnicodeError) as error:  # the latter of names that are none
            errors[name] = f"{name}: {str(error) or 'its name server does not answer'}"
            continue
        new = [each for each in addresses if each[-1] not in errors]
        for place, (family, kind, protocol, _, address) in enumerate(new):
            try:
                with contextlib.ExitStack() as unless_connected:
                    peer = unless_connected.enter_context(socket.socket(family, kind, protocol))
                    peer.settimeout(max(until_s - time.monotonic(), 0.1) / (len(new) - place))
                    peer.connect(address)
                    unless_connected.pop_all()
                    return peer
            except OSError as error:
                errors[address] = f"{address[0]}: {error}"
    raise OSError("; ".join(errors.values()))


def _place() -> tuple[int, str]:
    return os.getpid(), socket.gethostname()


def _siblings() -> dict[int, int]:
    """Returns processes that torchrun or srun has started for this run on this host, by rank; on Linux only."""
    found: dict[int, int] = {}
    for listed in Path(f"/proc/{os.getppid()}/task").glob("*/children"):
        with contextlib.suppress(OSError, ValueError):  # it has ended, or is not ours
            own = _started_with("self")
            for pid in set(listed.read_text().split()) - {str(os.getpid())}:
                other = _started_with(pid)
                rank = other.get("RANK", other.get("SLURM_PROCID"))
                # A shell may have started several runs, one of which it has stopped.
                if rank is not None and all(own.get(name) == other.get(name) for name in _RUN):
                    found[int(rank)] = int(pid)
    return found


def _started_with(pid: str) -> dict[str, str]:
    """Returns the environment that a process was given."""
    pairs = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(pair.partition("=")[::2] for pair in pairs)


def _is_stopped(pid: int) -> bool:
    """Returns whether a process of this host is stopped, by SIGSTOP or a terminal; known on Linux only."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def _end_frozen(loss: Loss) -> None:
    """Kills a silent process of this host that the same launcher started: nobody else would end it soon."""
    if loss.kind != "silent" or loss.host != socket.gethostname() or not loss.pid:
        return
    with contextlib.suppress(OSError, ValueError, IndexError):
        parent = int(Path(f"/proc/{loss.pid}/stat").read_text().rpartition(")")[2].split()[1])
        if loss.pid == os.getppid() or parent in (os.getpid(), os.getppid()):
            os.kill(loss.pid, signal.SIGKILL)


liveness = Liveness()
"""Of this process."""
os.register_at_fork(after_in_child=liveness.forget)
