"""Streams beside the one that computes, in which receives of NCCL begin.

A receive needs the memory of its buffer, and may overtake everything that was computed since it got it.

Each communicator has a stream of its own, too, and a GPU has few queues for all of them. Streams that share one
wait for each other: a receive then stands after a send that the other end takes only when it has sent itself.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_QUEUES, _MOST_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS", "32"


def ask_for_queues() -> bool:
    """Asks CUDA for as many queues as it can have (8 unless asked), if the user has not said how many.

    Returns:
        Whether it was asked; CUDA listens before its first use only.

    Source:
        https://github.com/NVIDIA/nccl/issues/783
    """
    if _QUEUES in os.environ or torch.cuda.is_initialized():
        return False
    os.environ[_QUEUES] = _MOST_QUEUES
    return True


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

    @staticmethod
    def entered(device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """Returns the stream that computes now on a device, for another thread to enter.

        A sum of gloo over tensors of a GPU lets the stream of whoever waits for it wait for the copy back. A
        thread of its own begins in the default stream of the first GPU.
        """
        if device.type != "cuda":
            return contextlib.nullcontext()
        return torch.cuda.stream(torch.cuda.current_stream(device))

    @contextlib.contextmanager
    def receiving(
        self, peer: int, buffer: Tensor, memory: torch.cuda.Event | None
    ) -> Iterator[None]:
        """Begins operations inside in a stream that waits for the memory of a buffer, and for nothing else.

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
