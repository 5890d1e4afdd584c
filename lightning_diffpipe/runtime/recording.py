"""When a rank did what in a step: stamps now, seconds when somebody asks.

On a GPU the seconds between two points are known only after the device has come by, so a step keeps
stamps, and reading `spans` is what waits. Nobody reads them in most steps.

    |-------- Wait --------|-- F0 --|  Wait  |-- B0 --|-- E1 --|
    |--- E0 ---|-- E0 --|     compute                  leftover
      frozen work inside a wait
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from lightning_diffpipe.clock import Clock
from lightning_diffpipe.planning.instruction import (
    Encode,
    ExchangeFrozen,
    Instruction,
    ReduceGradients,
    Staged,
    Wait,
)
from lightning_diffpipe.planning.timeline import Span


class Recording:
    """The stamps of one step on one rank.

    Args:
        rank: Position in the pipeline.
        clock: What time is read from.

    Attributes:
        started_s: When the step began, on the host's clock (`time.perf_counter`).
    """

    def __init__(self, rank: int, clock: Clock) -> None:
        self.started_s = time.perf_counter()
        self._rank = rank
        self._clock = clock
        self._origin = clock.stamp()
        self._entries: list[tuple[Instruction, Any, Any]] = []

    def stamp(self) -> Any:
        """This point in time."""
        return self._clock.stamp()

    def add(self, instruction: Instruction, start: Any) -> None:
        """Notes that an instruction ran from a stamp until now."""
        self._entries.append((instruction, start, self._clock.stamp()))

    def end_of(self, instruction: Instruction) -> Any:
        """The stamp at which an instruction ended; `None` if it has not."""
        return next((stop for done, _, stop in self._entries if done == instruction), None)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """What this rank did, in the order of starts, in seconds of the host's clock.

        A wait lasts until its message is there; pieces of frozen work (`Encode`) lie inside waits, or
        before and behind everything else. Read it when the step is over.
        """
        self._clock.settle()
        spans = [
            Span(self._rank, instruction, self._at_s(start), self._at_s(stop))
            for instruction, start, stop in self._entries
        ]
        return tuple(sorted(spans, key=lambda span: (span.start_s, -span.stop_s)))

    def _at_s(self, stamp: Any) -> float:
        return self.started_s + self._clock.seconds(self._origin, stamp)

    @property
    def compute_s(self) -> float:
        """Seconds of forwards and backwards."""
        return sum(s.duration_s for s in self.spans if isinstance(s.instruction, Staged))

    @property
    def waiting_s(self) -> float:
        """Seconds of waiting in which no frozen work ran either."""
        waits = [s for s in self.spans if isinstance(s.instruction, Wait | ExchangeFrozen)]
        filled_s = sum(s.duration_s for s in self._encodes if _lies_in(s, waits))
        return sum(s.duration_s for s in waits) - filled_s

    @property
    def filled_s(self) -> float:
        """Seconds of frozen work inside waits, and while gradients are summed."""
        waits = [s for s in self.spans if isinstance(s.instruction, _WAITS)]
        return sum(s.duration_s for s in self._encodes if _lies_in(s, waits))

    @property
    def leftover_s(self) -> float:
        """Seconds of frozen work behind the last stage instruction, outside waits."""
        last_s = self._last_compute_s
        return sum(s.duration_s for s in self._outside_waits if s.start_s >= last_s)

    @property
    def up_front_s(self) -> float:
        """Seconds of frozen work that the step itself had to wait for."""
        last_s = self._last_compute_s
        return sum(s.duration_s for s in self._outside_waits if s.start_s < last_s)

    @property
    def encode_s(self) -> float:
        """Seconds of all frozen work."""
        return sum(s.duration_s for s in self._encodes)

    @property
    def _encodes(self) -> list[Span]:
        return [s for s in self.spans if isinstance(s.instruction, Encode)]

    @property
    def _outside_waits(self) -> list[Span]:
        waits = [s for s in self.spans if isinstance(s.instruction, _WAITS)]
        return [s for s in self._encodes if not _lies_in(s, waits)]

    @property
    def _last_compute_s(self) -> float:
        return max((s.stop_s for s in self.spans if isinstance(s.instruction, Staged)), default=0.0)


_WAITS = (Wait, ExchangeFrozen, ReduceGradients)


def _lies_in(span: Span, others: Sequence[Span]) -> bool:
    return any(o.start_s <= span.start_s and span.stop_s <= o.stop_s for o in others)
