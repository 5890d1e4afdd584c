"""Waiting in a thread of its own, so that a rank can work until its message is there.

On gloo a receive never reports that it is complete; only `wait` returns when it is. So one thread per rank
waits, for one operation at a time, and the rank looks at a flag.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Pending:
    """An operation that is being waited for."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait
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
        try:
            self._wait()
        except BaseException as error:
            self._error = error
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
