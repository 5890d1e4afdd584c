"""Waiting for messages while something else goes on: on the host in a thread, on a GPU in streams of their own.

On gloo a receive never reports that it is complete; only `wait` returns when it is. So a thread waits for
each operation that the rank asks about, and the rank looks at a flag.

On NCCL a receive is an operation of the device. In a side stream it waits for nothing but the memory of its buffer,
and may overtake everything that was computed since it got it. Each communicator has a stream of its own, too, and a
GPU has few queues for all of them. Streams that share one wait for each other: a receive then stands after a send
that the other end takes only when it has sent itself.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_diffpipe.errors import ConfigurationError, PipelineTimeoutError

_MOST_NAMED = 8
_Result = TypeVar("_Result")


def in_words(ranks: Sequence[int]) -> str:
    """Returns ranks as errors name them: "rank 3", or "ranks 1, 2", eight at the most."""
    more = ", ..." if len(ranks) > _MOST_NAMED else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:_MOST_NAMED]))}{more}"


def lost(peer: str) -> str:
    """Returns what errors say of a rank that is gone, whoever notices."""
    return f"lost {peer}, which stopped; its own error says why"


def no_message(
    rank: int, what: str, peer: str, waited_s: float, timeout_s: float
) -> PipelineTimeoutError:
    """Returns the error of a wait that ended without a message: its sender was lost, or silent for too long."""
    if waited_s < 0.9 * timeout_s:
        reason = lost(peer)
    else:
        reason = f"{peer} sent nothing for {waited_s:.0f} s (timeout_s={timeout_s:g})"
    return PipelineTimeoutError(f"rank {rank} waited for {what}: {reason}")


@contextlib.contextmanager
def naming(rank: int, what: str, peer: str, timeout_s: float) -> Iterator[None]:
    """Turns a broken connection or a wait in vain into a PipelineTimeoutError that says what was waited for."""
    started_s = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        waited_s = time.monotonic() - started_s
        raise no_message(rank, what, peer, waited_s, timeout_s) from error


def in_thread(function: Callable[[], _Result], name: str) -> Future[_Result]:
    """Calls a function that may never return, as one of a store beyond a dead link, in a thread of its own.

    It is left alone where nobody waits for it any more; Python ends without it.
    """
    future: Future[_Result] = Future()
    threading.Thread(target=_complete, args=(future, [function]), name=name, daemon=True).start()
    return future


def _complete(future: Future[Any], functions: list[Callable[[], Any]]) -> None:
    """Calls the only function of a list, to which nothing refers once it has returned: it may hold buffers."""
    try:
        result = functions.pop()()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


_QUEUES, _MOST_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS", "32"


def ask_for_queues() -> bool:
    """Asks CUDA for as many queues as it can have (8 unless asked), if the user has not said how many.

    Returns:
        Whether it was asked; CUDA listens before its first use only.

    Raises:
        ConfigurationError: The user has said one, in which ranks can wait for each other for ever.

    Source:
        https://github.com/NVIDIA/nccl/issues/783
    """
    if os.environ.get(_QUEUES) == "1":
        raise ConfigurationError(
            f"{_QUEUES}=1 leaves one queue for everything that a GPU does, where messages can wait for each other "
            f"for ever; unset it, or set {_QUEUES}={_MOST_QUEUES}"
        )
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
        """Begins operations inside in the stream of a peer, which waits for nothing but `memory_of` their buffer.

        Whoever reads the buffer waits for the operation first.
        """
        if memory is None:
            yield
            return
        if peer not in self._streams:
            self._streams[peer] = torch.cuda.Stream(buffer.device)
        self._streams[peer].wait_event(memory)
        with torch.cuda.stream(self._streams[peer]):
            yield
