"""Clocks: a stamp now, seconds between two stamps later.

The host's clock shows the time at once. On a GPU kernels run after they were asked for, so a stamp is
an event in the stream, and seconds are known once the device has caught up.
"""

import time
from typing import Any

import torch


class Clock:
    """Measures the seconds between two points of a program, for work that is done when its call returns."""

    def stamp(self) -> Any:
        """Marks this point."""
        return time.perf_counter()

    def settle(self) -> None:
        """Waits until all work so far, in any stream, is done."""

    def wait_for(self, stamp: Any) -> None:
        """Waits until a stamp is past; for nothing after it, nor in other streams, as messages are."""

    def is_past(self, stamp: Any) -> bool:
        """Returns whether the seconds until a stamp are known without waiting."""
        return True

    def seconds(self, start: Any, stop: Any) -> float:
        """Returns the seconds between two stamps that are past."""
        return stop - start

    def sleep(self, seconds: float) -> None:
        """Lets time pass on the host."""
        time.sleep(seconds)


class CudaClock(Clock):
    """For work in the current stream of a GPU; gaps in which the GPU waits for the host count."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stamp(self) -> torch.cuda.Event:
        """Records an event in the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def settle(self) -> None:
        """Waits for the whole device."""
        torch.cuda.synchronize(self._device)

    def wait_for(self, stamp: torch.cuda.Event) -> None:
        """Waits until the device has passed an event."""
        stamp.synchronize()

    def is_past(self, stamp: torch.cuda.Event) -> bool:
        """Returns whether the device has passed an event."""
        return stamp.query()

    def seconds(self, start: torch.cuda.Event, stop: torch.cuda.Event) -> float:
        """Returns the seconds between two events that the device has passed."""
        return start.elapsed_time(stop) / 1e3


def clock_for(device: torch.device) -> Clock:
    """Returns the clock of a device."""
    return CudaClock(device) if device.type == "cuda" else Clock()
