"""Measured times of the instructions of a rank in a step: stamps now, seconds when they are read.

On a GPU the seconds between two points are known only after the device has passed them, so a step stores
stamps, and reading `spans` is what waits. Nobody reads them in most steps.

    |-- E0 --|-------- Wait --------|-- F0 --|  Wait  |-- B0 --|
     leftover |--- E1 ---|-- E1 --|     compute
                frozen work inside a wait
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

from lightning_diffpipe.clock import Clock
from lightning_diffpipe.planning.instruction import (
    Encode,
    ExchangeFrozen,
    Instruction,
    ReduceGradients,
    ShareResults,
    Staged,
    Wait,
)
from lightning_diffpipe.planning.timeline import Span


class Recording:
    """The stamps of one step on one rank, which began at `started_s` of the host's `time.perf_counter`."""

    def __init__(self, rank: int, clock: Clock) -> None:
        self.started_s = time.perf_counter()
        self._rank = rank
        self._clock = clock
        self._origin = clock.stamp()
        self._stamped: list[_Stamped] = []

    def stamp(self) -> Any:
        """Returns a stamp of this point in time."""
        return self._clock.stamp()

    def add(self, instruction: Instruction, start: Any) -> Any:
        """Notes that an instruction ran from a stamp until now; returns the stamp of now."""
        stop = self._clock.stamp()
        self._stamped.append(_Stamped(instruction, start, stop))
        return stop

    def end_of(self, instruction: Instruction) -> Any:
        """Returns the stamp at which an instruction ended; `None` if it has not."""
        return next((e.stop for e in self._stamped if e.instruction == instruction), None)

    def begins_after_s(self, earlier: Recording) -> float:
        """Returns the seconds from the last instruction of an earlier step to this one, on the device.

        A host is done with a step of a GPU long before the GPU is.
        """
        self._clock.wait_for(self._origin)
        return self._clock.seconds(earlier._stamped[-1].stop, self._origin)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Spans of this rank, in the order of starts, in seconds of the host's clock.

        A wait lasts until its message is there; pieces of frozen work (`Encode`) are inside waits, or
        before everything else. Read it when the step is over.
        """
        if self._stamped:
            self._clock.wait_for(self._stamped[-1].stop)

        def at_s(stamp: Any) -> float:
            return self.started_s + self._clock.seconds(self._origin, stamp)

        spans = [
            Span(self._rank, entry.instruction, at_s(entry.start), at_s(entry.stop))
            for entry in self._stamped
        ]
        return tuple(sorted(spans, key=lambda span: (span.start_s, -span.stop_s)))

    @property
    def compute_s(self) -> float:
        """Seconds of forwards and backwards."""
        return sum(s.duration_s for s in self.spans if isinstance(s.instruction, Staged))

    @property
    def waiting_s(self) -> float:
        """Seconds of waiting in which no frozen work ran either."""
        idle = Wait | ExchangeFrozen | ShareResults
        waits = [s for s in self.spans if isinstance(s.instruction, idle)]
        filled_s = sum(s.duration_s for s in self._encodes if _lies_in(s, waits))
        return sum(s.duration_s for s in waits) - filled_s

    @property
    def filled_s(self) -> float:
        """Seconds of frozen work inside waits, and while gradients or results are summed."""
        waits = [s for s in self.spans if isinstance(s.instruction, _WAITS)]
        return sum(s.duration_s for s in self._encodes if _lies_in(s, waits))

    @property
    def encode_s(self) -> float:
        """Seconds of all frozen work."""
        return sum(s.duration_s for s in self._encodes)

    @property
    def _encodes(self) -> list[Span]:
        return [s for s in self.spans if isinstance(s.instruction, Encode)]


class _Stamped(NamedTuple):
    instruction: Instruction
    start: Any
    stop: Any


_WAITS = (Wait, ExchangeFrozen, ReduceGradients, ShareResults)


def _lies_in(span: Span, others: Sequence[Span]) -> bool:
    return any(o.start_s <= span.start_s and span.stop_s <= o.stop_s for o in others)
