"""What ranks say of their work on a request, each on a board that all can read.

Ranks that share nothing but the prompts owe each other no message while they sample, so nothing breaks when one of
them hangs, and no receive times out. So a rank notes that it goes on, and at last how it ended; those that are done
look what the others have noted while they wait for them.

    rank 0 | step  step  done   looks ...  looks: rank 1 has noted nothing for timeout_s
    rank 1 | step  (hangs)

A note belongs to a turn, which all ranks begin together. The board is the store of the default process group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning_diffpipe.errors import PipelineTimeoutError

Word = Literal[
    "step",  # it goes on
    "done",
    "refused",  # it raised, and will tell all others what
    "gone",  # it raised, and will not come back
]

_NOTES_PER_TIMEOUT = 20
_LONGEST_PAUSE_S = 0.02
_GRACE_S = 0.5  # what ranks that refuse together need at most to arrive


class Progress:
    """The board, as one rank sees it.

    Args:
        store: Of a process group.
        name: Of the board.
        rank: This one.
        num_ranks: All ranks.
        timeout_s: How long a rank that has noted a step may note nothing.
    """

    def __init__(self, store: Any, name: str, rank: int, num_ranks: int, timeout_s: float) -> None:
        self._store, self._name, self._timeout_s = store, name, timeout_s
        self._rank, self._peers = rank, [r for r in range(num_ranks) if r != rank]
        self._turn, self._num_steps, self._noted_s = 0, 0, 0.0
        self._pause_s = timeout_s / _NOTES_PER_TIMEOUT

    def start_turn(self) -> None:
        """Begins with nothing noted."""
        self._turn += 1
        self._num_steps, self._noted_s = 0, -self._timeout_s

    def step(self) -> None:
        """Notes that this rank goes on, at most once in a twentieth of the timeout."""
        self._num_steps += 1
        if time.monotonic() - self._noted_s > self._pause_s:
            self.note("step", str(self._num_steps))

    def note(self, word: Word, text: str = "") -> None:
        """Notes how it stands.

        Args:
            word: What is told.
            text: More of it.
        """
        self._noted_s = time.monotonic()
        self._store.set(self._key(self._rank), f"{self._turn} {word} {text}")

    def has_refusal(self) -> bool:
        """Whether another rank has refused in this turn."""
        return any(note.word == "refused" for note in self._notes())

    def watch(self, arrived: Callable[[], bool], give_up: Callable[[], None]) -> None:
        """Waits, and looks after the other ranks meanwhile.

        Args:
            arrived: Whether the wait is over.
            give_up: Called once, if the others have not arrived a little later.

        Raises:
            PipelineTimeoutError: A rank has noted a step, and then nothing within the timeout; or is gone.
        """
        started_s = looked_s = time.monotonic()
        changed: dict[_Note, float] = {}
        pause_s, waits = 1e-4, True
        while not arrived():
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
            now_s = time.monotonic()
            if waits and now_s - started_s > _GRACE_S:
                waits = False
                give_up()
            if now_s - looked_s > self._pause_s:
                looked_s = now_s
                notes = self._notes()
                changed = {note: changed.get(note, now_s) for note in notes}
                self._refuse_gone(notes)
                self._refuse_silent(changed, now_s)

    def _refuse_gone(self, notes: Sequence[_Note]) -> None:
        for note in notes:
            if note.word == "gone":
                raise PipelineTimeoutError(
                    f"rank {self._rank} waited for rank {note.rank}, which stopped: {note.text}"
                )

    def _refuse_silent(self, changed: dict[_Note, float], now_s: float) -> None:
        silent = [
            str(note.rank)
            for note, since_s in changed.items()
            if note.word == "step" and now_s - since_s > self._timeout_s
        ]
        if silent:
            ranks = f"rank{'s' * (len(silent) > 1)} {', '.join(silent)}"
            raise PipelineTimeoutError(
                f"rank {self._rank} waited for {ranks}: no denoising step for {self._timeout_s:g} s (timeout_s)"
            )

    def _notes(self) -> list[_Note]:
        """Of the other ranks, in this turn."""
        found = []
        for rank in self._peers:
            if self._store.check([self._key(rank)]):
                turn, word, text = self._store.get(self._key(rank)).decode().split(" ", 2)
                if int(turn) == self._turn:
                    found.append(_Note(rank, word, text))
        return found

    def _key(self, rank: int) -> str:
        return f"{self._name}/{rank}"


@dataclass(frozen=True)
class _Note:
    rank: int
    word: str
    text: str
