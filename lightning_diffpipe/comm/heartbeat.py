"""Which rank was lost, and what it was doing: every rank says that it lives, each on a board that all can read.

A rank that is busy for long, as it loads a model or encodes prompts, looks from outside like one that is frozen,
and a connection that breaks does not say who is dead. So a thread of every rank writes a *beat* to the store where
ranks have met, with the phase that the rank is in, and reads those of the others while this rank waits for them:

    rank 0 | beat   beat   (frozen while encoding prompts)
    rank 1 | waits  waits  waits  waits for `timeout_s`: "rank 0 while encoding prompts: no sign of life"

    dead or frozen      no beat for `timeout_s`, or none any more when a connection has broken
    hung in its steps   beats, but has noted a step and then nothing for `timeout_s`
    slow                beats: waited for
    gone                said why, before it left

The store itself lives in one of the processes. If that one is killed, calls to it fail; if it is frozen, they never
return. Only the thread makes them, and who waits looks at the clock.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from lightning_diffpipe.comm.waiting import in_thread, in_words, lost
from lightning_diffpipe.errors import PipelineTimeoutError

Word = Literal[
    "busy",
    "step",  # it goes on, and will note more
    "done",
    "refused",  # it raised, and will broadcast what
    "gone",  # it raised, and will not come back
]

_BEATS_PER_TIMEOUT = 20
_LONGEST_PAUSE_S = 0.5  # between two beats
_LONGEST_LOOK_S = 0.02  # between two looks at what is waited for
_MISSED_BEATS = 4  # of a rank that is dead when a connection has broken
_GRACE_S = 0.5  # what ranks that refuse together need at most to arrive
_EXIT_S = 5.0  # for Python to end, on a busy machine
_BRIEFLY_S = 2.0  # for the store, where an error is already there


class Note(NamedTuple):
    """What a rank has written last.

    Attributes:
        turn: Of what all ranks do together.
        word: How it stands.
        phase: What it does, such as `"encoding prompts"`.
        text: More of it: the number of its step, or its error.
    """

    turn: int
    word: Word
    phase: str
    text: str


@dataclass
class _LastBeat:
    """The last value of a rank, when it was first read, and since when its note is the same."""

    value: tuple[int, Note]
    beat_s: float
    note_s: float


@dataclass
class _Board:
    """What the thread of a rank and the rank itself share."""

    store: Any
    name: str
    rank: int
    peers: list[int]
    pause_s: float
    own: Note = field(default=Note(0, "busy", "connecting", ""))
    seen: dict[int, _LastBeat] = field(default_factory=dict)
    num_rounds: int = 0
    wanted: int = 0  # rounds that somebody waits for
    read_s: float = 0.0
    error: Exception | None = None
    is_watching: bool = False
    is_closed: bool = False
    due: threading.Condition = field(default_factory=threading.Condition)

    def run(self) -> None:
        """Beats until it is closed, or the store is lost."""
        try:
            # Another connection: torch keeps its own for as long as it waits for a key. (torch 2.6 has one only.)
            store = self.store.clone() if hasattr(self.store, "clone") else self.store
        except Exception as error:
            self.error = error
            return
        while not self.is_closed:
            wanted, is_watching = self.wanted, self.is_watching
            try:
                store.set(f"{self.name}/{self.rank}", json.dumps([self.num_rounds, *self.own]))
                for rank in self.peers if is_watching else ():
                    key = f"{self.name}/{rank}"
                    if store.check([key]):
                        beat, *note = json.loads(store.get(key))
                        self._see(rank, (beat, Note(*note)), time.monotonic())
            except Exception as error:
                self.error = error
                return
            if is_watching:
                self.read_s = time.monotonic()
            with self.due:
                self.num_rounds += 1
                self.due.notify_all()
                if self.wanted == wanted:
                    self.due.wait_for(lambda: self.wanted > wanted or self.is_closed, self.pause_s)  # noqa: B023

    def _see(self, rank: int, value: tuple[int, Note], now_s: float) -> None:
        before = self.seen.get(rank)
        if before is None or before.value[1] != value[1]:
            self.seen = self.seen | {rank: _LastBeat(value, now_s, now_s)}
        elif before.value != value:
            self.seen = self.seen | {rank: _LastBeat(value, now_s, before.note_s)}

    def close(self) -> None:
        with self.due:
            self.is_closed = True
            self.due.notify_all()


class Heartbeat:
    """The board, as one rank sees it. Close it, or its thread goes on as long as the process.

    Args:
        store: Of a process group.
        name: Of the board; the same on all ranks, and no other's.
        rank: This one.
        num_ranks: All ranks.
        timeout_s: How long a rank may give no sign of life, or note no step after the first.
        host: Where the store is, for messages.
    """

    def __init__(
        self,
        store: Any,
        name: str,
        rank: int,
        num_ranks: int,
        timeout_s: float,
        host: str = "rank 0",
    ) -> None:
        self._rank, self._timeout_s, self._host = rank, timeout_s, host
        pause_s = min(timeout_s / _BEATS_PER_TIMEOUT, _LONGEST_PAUSE_S)
        peers = [r for r in range(num_ranks) if r != rank]
        self._board = _Board(store, name, rank, peers, pause_s)
        self._num_steps = 0
        self._unanswered = -1  # rounds that were there when the store was given up
        thread = threading.Thread(target=self._board.run, name="diffpipe-heartbeat", daemon=True)
        thread.start()
        # Before the interpreter goes, in the middle of a call of which it would end the process.
        self.close = weakref.finalize(self, _close, self._board, thread)

    @property
    def phase(self) -> str:
        """What this rank does."""
        return self._board.own.phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self._board.own = self._board.own._replace(phase=phase)

    def begin(self, phase: str) -> None:
        """Begins a turn, in which nothing is noted yet; all ranks do so together.

        Args:
            phase: What is done in it, to follow "while": `"drawing"`.
        """
        self._num_steps = 0
        self._board.own = Note(self._board.own.turn + 1, "busy", phase, "")

    def step(self) -> None:
        """Notes that this rank goes on; written with the next beat."""
        self._num_steps += 1
        self._board.own = self._board.own._replace(word="step", text=str(self._num_steps))

    def note(self, word: Word, text: str = "") -> None:
        """Notes how it stands, for all to read when this returns.

        Raises:
            PipelineTimeoutError: The store is lost.
        """
        self._board.own = self._board.own._replace(word=word, text=text)
        self._refresh(_BRIEFLY_S if word in ("refused", "gone") else self._timeout_s)

    def has_refusal(self) -> bool:
        """Returns whether another rank has refused in this turn."""
        with self._watching(), contextlib.suppress(PipelineTimeoutError):
            self._refresh(_BRIEFLY_S)
        return any(note.word == "refused" for _, note in self._notes())

    def wait(
        self, arrived: Callable[[], bool], what: str, give_up: Callable[[], None] = lambda: None
    ) -> None:
        """Waits, and looks after the other ranks meanwhile.

        Args:
            arrived: Whether the wait is over.
            what: Is waited for, for messages.
            give_up: Called once, if the others have not arrived a little later.

        Raises:
            PipelineTimeoutError: A rank gives no sign of life, is gone, or has noted a step and then none within
                the timeout; or the store is lost.
        """
        started_s, pause_s, has_given_up = time.monotonic(), 1e-4, False
        answered = self._answering()
        with self._watching():
            while not arrived():
                time.sleep(pause_s)
                pause_s = min(1.5 * pause_s, _LONGEST_LOOK_S)
                if not has_given_up and time.monotonic() - started_s > _GRACE_S:
                    has_given_up = True
                    give_up()
                if arrived():  # a board of ranks that are done may be gone
                    return
                answered(what)
                limit_s, reason = self._timeout_s, self._gone()
                limit, read_s = f"for {limit_s:g} s (timeout_s)", self._board.read_s
                steps = [rank for rank, note in self._notes() if note.word == "step"]
                seen = self._board.seen
                frozen = [rank for rank, last in seen.items() if read_s - last.beat_s > limit_s]
                silent = [rank for rank in steps if read_s - seen[rank].note_s > limit_s]
                if frozen and not reason:
                    reason = f"{self._called(frozen)}: no sign of life {limit}: frozen, or cut off"
                elif silent and not reason:
                    reason = f"{self._called(silent)}: no denoising step {limit}"
                if reason:
                    raise PipelineTimeoutError(self._waited(what, reason))

    def call(self, what: str, function: Callable[[], Any]) -> Any:
        """Returns what a function returns that may block for ever, as those do that use the store.

        Args:
            what: Is waited for, for messages.
            function: Goes on in a thread of its own if a rank is lost.

        Raises:
            PipelineTimeoutError: As in `wait`; or it failed because of a connection.
        """
        called = in_thread(function, "diffpipe-call")
        self.wait(called.done, what)
        with self.naming(what):
            return called.result()

    @contextlib.contextmanager
    def naming(self, what: str) -> Iterator[None]:
        """Turns the error of a broken connection into one that says who was lost, and in which phase.

        Raises:
            PipelineTimeoutError: Instead.
        """
        try:
            yield
        except RuntimeError as error:
            raise PipelineTimeoutError(self._waited(what, self.blame())) from error

    def blame(self) -> str:
        """Returns who was lost, when a connection has broken; takes as long as a few beats."""
        deadline_s = time.monotonic() + _MISSED_BEATS * self._board.pause_s + _GRACE_S
        with self._watching(), contextlib.suppress(PipelineTimeoutError):
            self._refresh(self._timeout_s)
            before = {rank: seen.value for rank, seen in self._board.seen.items()}
            while time.monotonic() < deadline_s:
                time.sleep(self._board.pause_s)
                if gone := self._gone():
                    return gone
            self._refresh(self._timeout_s)
            still = [rank for rank, seen in self._board.seen.items() if seen.value == before[rank]]
            return lost(self._called(still) if still else "a peer")
        return self._lost_store()

    # ------------------------------------------------------------------------------ private

    def _gone(self) -> str:
        gone = [(rank, note) for rank, note in self._notes() if note.word == "gone"]
        return f"{self._called([gone[0][0]])}, which stopped: {gone[0][1].text}" if gone else ""

    def _waited(self, what: str, reason: str) -> str:
        _end_in_spite_of_gloo()
        return f"rank {self._rank} waited for {what}: {reason}"

    def _called(self, ranks: list[int]) -> str:
        """Returns ranks with what the first of them was doing."""
        return f"{in_words(ranks)} while {self._board.seen[ranks[0]].value[1].phase}"

    def _lost_store(self) -> str:
        seen = self._board.seen.get(0)
        doing = f" while {seen.value[1].phase}" if seen and self._host == "rank 0" else ""
        if self._board.error is not None:
            said = str(self._board.error).split("\n", 1)[0]  # torch adds the stack in C++
            return f"{lost(f'{self._host}{doing}')} (it has the store where ranks meet: {said})"
        return (
            f"{self._host}{doing}: the store where ranks meet, which is there, has not answered for "
            f"{self._timeout_s:g} s (timeout_s): frozen, or cut off"
        )

    def _notes(self) -> list[tuple[int, Note]]:
        """Returns the notes of the other ranks, in this turn; a lost rank stays lost."""
        notes = [(rank, seen.value[1]) for rank, seen in sorted(self._board.seen.items())]
        turn = self._board.own.turn
        return [(rank, note) for rank, note in notes if note.turn == turn or note.word == "gone"]

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        was, self._board.is_watching = self._board.is_watching, True
        try:
            yield
        finally:
            self._board.is_watching = was

    def _refresh(self, limit_s: float) -> None:
        """Waits until all that is noted now is written, and read where others are watched."""
        board = self._board
        if board.num_rounds == self._unanswered:  # each try takes its time
            raise PipelineTimeoutError(self._waited("the store", self._lost_store()))
        with board.due:
            board.wanted += 1
            until = board.num_rounds + 2  # one may be under way
            board.due.notify_all()
        answered = self._answering(limit_s)
        while board.num_rounds < until:
            answered("the store")
            with board.due:
                board.wanted += 1
                board.due.notify_all()
                board.due.wait_for(lambda: board.num_rounds >= until, _LONGEST_LOOK_S)

    def _answering(self, limit_s: float | None = None) -> Callable[[str], None]:
        """Returns a check, to be called repeatedly, that raises if the store does not answer."""
        limit_s = self._timeout_s if limit_s is None else limit_s
        looked_s, unanswered_s, num_rounds = time.monotonic(), 0.0, self._board.num_rounds

        def check(what: str) -> None:
            nonlocal looked_s, unanswered_s, num_rounds
            now_s = time.monotonic()
            # A process that was frozen itself must not take that for the others' silence.
            unanswered_s += min(now_s - looked_s, 1.0)
            looked_s = now_s
            if self._board.num_rounds != num_rounds:
                unanswered_s, num_rounds = 0.0, self._board.num_rounds
            if self._board.error is not None or unanswered_s > limit_s:
                self._unanswered = num_rounds
                raise PipelineTimeoutError(self._waited(what, self._lost_store()))

        return check


@functools.cache
def _end_in_spite_of_gloo() -> None:
    """Ends this process some seconds after the last exit handler of Python: gloo's groups wait for what is left.

    They do so in a destructor, up to half an hour, where a peer is silent; only a thread in C goes on then. Others'
    handlers may upload for long. Threads of Python go on meanwhile, and one of them puts off that end; a handler
    that stops all of these for as long is cut short.
    """
    ends, nothing = threading.Event(), open(os.devnull, "w")  # noqa: PTH123, SIM115
    put_off = functools.partial(faulthandler.dump_traceback_later, _EXIT_S, exit=True, file=nothing)

    def put_off_while_python_runs() -> None:
        ends.wait()
        while True:
            put_off()
            time.sleep(_EXIT_S / 10)

    def end() -> None:
        put_off()  # the thread may not get its turn any more
        ends.set()

    atexit.register(end)
    with contextlib.suppress(RuntimeError):  # Python ends already
        threading.Thread(
            target=put_off_while_python_runs, name="diffpipe-exit", daemon=True
        ).start()


def _close(board: _Board, thread: threading.Thread) -> None:
    board.close()
    thread.join(timeout=1.0)
