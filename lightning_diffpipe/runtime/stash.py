"""Tensors that live between instructions.

An instruction leaves what a later one needs under a key of (what, stage, microbatch) and the later one
takes it away, so at the end of a step the stash is empty; what is left over is a bug in the schedule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from lightning_diffpipe.errors import ScheduleError


class StashKey(NamedTuple):
    """What is stored, for which stage and microbatch."""

    what: str
    stage: int
    microbatch: int


class Stash:
    """Values stored from one instruction to another."""

    def __init__(self) -> None:
        self._values: dict[StashKey, Any] = {}

    def put(self, what: str, stage: int, microbatch: int, value: Any) -> None:
        """Stores a value.

        Raises:
            ScheduleError: The same thing is stored already: an instruction ran twice.
        """
        key = StashKey(what, stage, microbatch)
        if key in self._values:
            raise ScheduleError(
                f"{what} of stage {stage}, microbatch {microbatch} was made twice in one step"
            )
        self._values[key] = value

    def gather(
        self,
        what: str,
        stage: int,
        microbatch: int,
        values: dict[Any, Any],
        add: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        """Stores entries of a dict that comes in several parts; those that come again are added up."""
        stored = self._values.setdefault(StashKey(what, stage, microbatch), {})
        for key, value in values.items():
            stored[key] = add(stored[key], value) if add and key in stored else value

    def take(self, what: str, stage: int, microbatch: int) -> Any:
        """Hands a value out and forgets it.

        Raises:
            ScheduleError: Nothing is stored: the instruction that makes it has not run.
        """
        key = StashKey(what, stage, microbatch)
        if key not in self._values:
            raise ScheduleError(
                f"{what} of stage {stage}, microbatch {microbatch} is needed before it was made; "
                "the program of this rank is out of order"
            )
        return self._values.pop(key)

    def check_empty(self) -> None:
        """Checks that every value found its taker.

        Raises:
            ScheduleError: Something is left.
        """
        if self._values:
            left = ", ".join(f"{key.what} {key.stage}/{key.microbatch}" for key in self._values)
            raise ScheduleError(f"left over at the end of the step: {left}")

    def clear(self) -> None:
        """Drops everything, after an error."""
        self._values.clear()
