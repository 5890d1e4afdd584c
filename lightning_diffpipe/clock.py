"""Clocks: a stamp now, seconds between two stamps later.

The host's clock shows the time at once. On a GPU kernels run after they were asked for, so a stamp is
an event in the stream, and seconds are known once the device has caught up.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Measures what time passes between two points of a program."""

    def stamp(self) -> Any:
        """Marks this point."""

    def settle(self) -> None:
        """Waits until everything asked for so far, in whatever stream, has happened."""

    def wait_for(self, stamp: Any) -> None:
        """Waits until a stamp is past; for nothing after it, nor in other streams, as messages are."""

    def is_past(self, stamp: Any) -> bool:
        """Returns whether the seconds until a stamp are known without waiting."""

    def seconds(self, start: Any, stop: Any) -> float:
        """Seconds between two stamps that are past."""

    def sleep(self, seconds: float) -> None:
        """Lets time pass on the host."""


class _Sleeping:
    """What all clocks of real machines do alike."""

    def sleep(self, seconds: float) -> None:
        """See `Clock`."""
        time.sleep(seconds)


class HostClock(_Sleeping):
    """For work that is done when the call returns."""

    def stamp(self) -> float:
        """See `Clock`."""
        return time.perf_counter()

    def settle(self) -> None:
        """See `Clock`."""

    def wait_for(self, stamp: float) -> None:
        """See `Clock`."""

    def is_past(self, stamp: float) -> bool:
        """See `Clock`."""
        return True

    def seconds(self, start: float, stop: float) -> float:
        """See `Clock`."""
        return stop - start


class CudaClock(_Sleeping):
    """For work in the current stream of a GPU; gaps in which the GPU waits for the host count.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stamp(self) -> torch.cuda.Event:
        """See `Clock`."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def settle(self) -> None:
        """See `Clock`."""
        torch.cuda.synchronize(self._device)

    def wait_for(self, stamp: torch.cuda.Event) -> None:
        """See `Clock`."""
        stamp.synchronize()

    def is_past(self, stamp: torch.cuda.Event) -> bool:
        """See `Clock`."""
        return stamp.query()

    def seconds(self, start: torch.cuda.Event, stop: torch.cuda.Event) -> float:
        """See `Clock`."""
        return start.elapsed_time(stop) / 1e3


def clock_for(device: torch.device) -> Clock:
    """Returns the clock of a device."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
