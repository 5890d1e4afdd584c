"""Waiting for messages while something else goes on: on the host in a thread, on a GPU in streams of their own.

On gloo a receive never reports that it is complete; only `wait` returns when it is. So one thread per rank
waits, for one operation at a time, and the rank looks at a flag.

On NCCL a receive is an operation of the device. In a side stream it waits for nothing but the memory of its buffer,
and may overtake everything that was computed since it got it. Each communicator has a stream of its own, too, and a
GPU has few queues for all of them. Streams that share one wait for each other: a receive then stands after a send
that the other end takes only when it has sent itself.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_diffpipe.errors import PipelineTimeoutError

_MOST_NAMED = 8


def in_words(ranks: Sequence[int]) -> str:
    """Returns ranks as errors name them: "rank 3", or "ranks 1, 2", eight at the most."""
    more = ", ..." if len(ranks) > _MOST_NAMED else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:_MOST_NAMED]))}{more}"


def no_message(
    rank: int, what: str, peer: str, waited_s: float, timeout_s: float
) -> PipelineTimeoutError:
    """Returns the error of a wait that ended without a message: its sender was lost, or silent for too long."""
    if waited_s < 0.9 * timeout_s:
        reason = f"lost {peer}, which stopped; its own error says why"
    else:
        reason = f"{peer} sent nothing for {waited_s:.0f} s (timeout_s={timeout_s:g})"
    return PipelineTimeoutError(f"rank {rank} waited for {what}: {reason}")


class Pending:
    """An operation that is being waited for."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait: Callable[[], None] | None = wait
        self._over = threading.Event()
        self._error: BaseException | None = None

    def is_over(self, within_s: float = 0.0) -> bool:
        """Returns whether `result` would return, or raise, at once; waits so long for it."""
        return self._over.wait(within_s) if within_s else self._over.is_set()

    def result(self) -> None:
        """Blocks until it is over.

        Raises:
            Exception: Whatever the wait raised.
        """
        self._over.wait()
        if self._error is not None:
            raise self._error

    def run(self) -> None:
        """Waits; called by the thread."""
        wait, self._wait = self._wait, None  # which may refer to this, and to buffers
        assert wait is not None
        try:
            wait()
        except BaseException as error:
            self._error = error
        del wait
        self._over.set()


class Waiter:
    """A thread that waits for one operation after the other; started when it is first needed."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Pending | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def watch(self, wait: Callable[[], None]) -> Pending:
        """Lets the thread call `wait`, which blocks until something is there."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="diffpipe-waiter", daemon=True)
            self._thread.start()
        pending = Pending(wait)
        self._queue.put(pending)
        return pending

    def close(self) -> None:
        """Ends the thread once it has nothing to wait for."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread = None

    def _loop(self) -> None:
        while (pending := self._queue.get()) is not None:
            pending.run()
            del pending  # it holds a buffer


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
