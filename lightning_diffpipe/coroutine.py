"""Code that waits in the middle of itself, and goes on when it is resumed.

It waits in a thread of its own. The hand-off is strict: one of the two threads always waits, so the result does not
depend on who runs in between. The thread is reused for the next coroutine: in a new one all memory is first touched
again, which costs up to half of the time of an encoder.

Source:
    Coroutines by threads; greenlets would be cheaper to switch (0.3 instead of 20 microseconds), but
    share grad mode and autocast with their owner.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

_GRACE_S = 10.0  # for code that is in the middle of a layer when its owner is interrupted


class _Cancelled(BaseException):
    """Unwinds a paused coroutine (no Exception, so that its code does not swallow it)."""


class _Worker:
    """A thread that is reused by later coroutines."""

    _idle: list[_Worker] = []  # noqa: RUF012
    _lock = threading.Lock()

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._loop, name="diffpipe-coroutine", daemon=True).start()

    @classmethod
    def submit(cls, work: Callable[[], None]) -> None:
        """Runs a function in an idle thread, or in a new one if none is idle."""
        with cls._lock:
            worker = cls._idle.pop() if cls._idle else None
        (worker or cls())._work.put(work)

    def _loop(self) -> None:
        while True:
            work = self._work.get()
            work()
            del work  # it holds a batch
            with self._lock:
                self._idle.append(self)


os.register_at_fork(after_in_child=_Worker._idle.clear)  # it has none of these threads


_resumed: dict[int, Coroutine] = {}
"""By the thread that waits for it."""


def thread_at_work(thread: int) -> int:
    """Returns the thread that works for a thread: that of the coroutine it has resumed, or itself."""
    while (coroutine := _resumed.get(thread)) is not None and coroutine._thread:
        thread = coroutine._thread
    return thread


class Coroutine:
    """A function that can pause and be resumed, without gradients.

    Its owner waits for it without a limit, as for a call: where it hangs, the owner is busy (`comm/watcher.py`).
    `resume` and `cancel` belong to the owner's thread, `pause` to the function.

    Args:
        body: The function. Its context variables, function modes and autocast are those of whoever makes this.
        infers: Whether it runs in inference mode.

    Attributes:
        done: Nothing is left to run.
        is_cancelled: Whether it was cancelled, or ended with an error.
    """

    def __init__(self, body: Callable[[], Any], infers: bool = False) -> None:
        self.done = self.is_cancelled = False
        self._body: Callable[[], Any] | None = body
        self._is_started = False
        self._thread = 0
        self._error: BaseException | None = None
        self._settings = _ThreadSettings(infers)
        self._context = contextvars.copy_context()
        self._go, self._back = threading.Lock(), threading.Lock()  # held: wait for your turn
        self._go.acquire()
        self._back.acquire()

    def resume(self) -> None:
        """Runs the function until it pauses or ends; raises its error."""
        if self.done:
            return
        if not self._is_started:
            self._is_started = True
            _Worker.submit(lambda: self._context.run(self._work))
        on_gpu = torch.cuda.is_initialized()
        self._settings.stream = torch.cuda.current_stream() if on_gpu else None
        owner = threading.get_ident()
        _resumed[owner] = self
        self._go.release()
        try:
            self._back.acquire()
        except BaseException:  # interrupted: it must not run on alongside us
            self.is_cancelled = True
            self._back.acquire(timeout=_GRACE_S)  # it may never come back
            raise
        finally:
            del _resumed[owner]
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def pause(self) -> None:
        """Returns control to the owner, from inside, until `resume`."""
        if not self.is_cancelled:
            self._back.release()
            self._go.acquire()
            self._settings.follow_stream()
        if self.is_cancelled:
            raise _Cancelled

    def cancel(self) -> None:
        """Ends the function where it is paused, and frees its variables."""
        if self.done:
            return
        self.is_cancelled = True
        if self._is_started:
            self.resume()
        self.done = True
        self._body = None

    def _work(self) -> None:
        """Runs the whole function in the thread, pausing inside."""
        self._thread = threading.get_ident()
        self._go.acquire()
        try:
            if not self.is_cancelled:
                with self._settings.entered():
                    self._body()
        except _Cancelled:
            pass
        except BaseException as error:
            self._error, self.is_cancelled = error, True
        self._body = None
        self.done = True
        self._back.release()


class _ThreadSettings:
    """Settings that a thread does not inherit: autocast, function modes, CUDA device and stream, threads."""

    def __init__(self, infers: bool) -> None:
        self._infers = infers
        enabled = filter(torch.is_autocast_enabled, ("cpu", "cuda"))
        self._autocast = [(kind, torch.get_autocast_dtype(kind)) for kind in enabled]
        self._cache = torch.is_autocast_cache_enabled()
        self._modes = list(torch.overrides._get_current_function_mode_stack())
        self._threads = torch.get_num_threads()
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self.stream: Any = None

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        torch.set_num_threads(self._threads)
        if self._device is not None:
            torch.cuda.set_device(self._device)
        self.follow_stream()
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode() if self._infers else torch.no_grad())
            for mode in self._modes:
                stack.enter_context(mode)
            for kind, dtype in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=self._cache))
            yield

    def follow_stream(self) -> None:
        """Enters the stream that the owner uses now, so that order needs no events."""
        if self.stream is not None:
            torch.cuda.set_stream(self.stream)
