"""Streams beside the one that computes, in which receives of NCCL begin.

A receive needs the memory of its buffer, and may overtake everything that was computed since it got it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor


class SideStreams:
    """One stream of the GPU for each peer; nothing on other devices."""

    def __init__(self) -> None:
        self._streams: dict[int, torch.cuda.Stream] = {}

    @staticmethod
    def memory_of(buffer: Tensor) -> torch.cuda.Event | None:
        """Marks the point from which on a new buffer is free to be written."""
        if not buffer.is_cuda:
            return None
        return torch.cuda.current_stream(buffer.device).record_event()

    @contextlib.contextmanager
    def beside(self, peer: int, buffer: Tensor, memory: torch.cuda.Event | None) -> Iterator[None]:
        """Inside, operations begin in a stream that waits for the memory of a buffer, and for nothing else.

        Args:
            peer: Whose stream.
            buffer: What will be written. Whoever reads it waits for the operation first.
            memory: From `memory_of`.
        """
        if memory is None:
            yield
            return
        if peer not in self._streams:
            self._streams[peer] = torch.cuda.Stream(buffer.device)
        self._streams[peer].wait_event(memory)
        with torch.cuda.stream(self._streams[peer]):
            yield
