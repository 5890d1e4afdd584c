"""A frozen run that waits in the middle of a model's code, and goes on when it is told to.

It waits in a thread of its own. The hand-off is strict: one of the two threads always waits, and what
threads share is swapped with it: the states of the random number generators, the default dtype, which
`precision="bf16-true"` changes inside a step, and attributes of modules that the step sets. So the result
does not depend on who runs in between. The thread is kept for the next run: in a new one all memory is
first touched again, which costs up to half of the time of an encoder.

Source:
    Coroutines by threads; greenlets would be cheaper to switch (0.3 instead of 20 microseconds), but
    share grad mode and autocast with the trainer.
"""

from __future__ import annotations

import contextlib
import contextvars
import queue
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_diffpipe.errors import GraphError
from lightning_diffpipe.graph import rng
from lightning_diffpipe.graph.attributes import Attributes
from lightning_diffpipe.graph.interception import Interception
from lightning_diffpipe.graph.layer import TensorKey

if TYPE_CHECKING:
    from lightning_diffpipe.graph.frozen import FrozenRun


class _Cancelled(BaseException):
    """Unwinds a paused run (no Exception, so that a model does not swallow it)."""


class _Worker:
    """A thread that is kept for later runs."""

    _idle: list[_Worker] = []  # noqa: RUF012
    _lock = threading.Lock()

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._loop, name="diffpipe-frozen", daemon=True).start()

    @classmethod
    def submit(cls, work: Callable[[], None]) -> None:
        """Runs something in an idle thread, or in a new one if none is idle."""
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


class PausedRun:
    """A frozen run that goes on in pieces. Its methods belong to one thread, the owner's.

    Attributes:
        done: Nothing is left to run.
        num_layers_done: Layers of the fine graph that were started.
    """

    def __init__(
        self,
        run: FrozenRun,
        interception: Interception,
        call: Callable[[], Any],
        seed: int,
        host_random: bool,
        attributes: Attributes,
    ) -> None:
        self.done, self.num_layers_done = False, 0
        self._run, self._interception, self._call = run, interception, call
        self._run.pause = self._pause
        self._host = host_random
        with rng.preserved(self._host):
            rng.seed_all(seed, self._host)
            self._state = rng.capture(self._host)
        self._dtype = torch.get_default_dtype()
        self._attributes = attributes
        self._set: Any = None  # what they are inside; before the run begins, whatever they are
        self._goes_on: Callable[[str], bool] = _never
        self._cancelled = self._started = False
        self._error: BaseException | None = None
        self._settings = _ThreadSettings()
        self._context = contextvars.copy_context()
        self._go, self._back = threading.Lock(), threading.Lock()  # held: wait for your turn
        self._go.acquire()
        self._back.acquire()

    @property
    def next_layer(self) -> str:
        """The layer in front of which it is paused; empty before the first piece and after the last."""
        return "" if self.done else self._run.at

    @property
    def results(self) -> dict[TensorKey, Tensor]:
        """The results, when done; see `FrozenView.whole`.

        Raises:
            GraphError: The run is not done.
        """
        if not self.done or self._cancelled:
            state = "was cancelled" if self._cancelled else "is not done; call finish()"
            raise GraphError(f"the frozen run {state}")
        return self._run.results()

    def advance(self, num_layers: float = 1) -> bool:
        """Runs at most so many layers of the fine graph; says whether all is done.

        Raises:
            Exception: Whatever the step raised, with the name of the layer added.
        """
        left = num_layers

        def goes_on(_name: str) -> bool:
            nonlocal left
            left -= 1
            return left >= 0

        return self.advance_while(goes_on)

    def advance_while(self, goes_on: Callable[[str], bool]) -> bool:
        """Runs layers of the fine graph for as long as a function says yes; says whether all is done.

        Args:
            goes_on: Called with the name of the next layer in front of every one, in the run's own
                thread, which costs no switch between threads.

        Raises:
            Exception: As `advance`.
        """
        if not self.done:
            self._goes_on = goes_on
            self._switch()
        return self.done

    def finish(self) -> dict[TensorKey, Tensor]:
        """Runs what is left."""
        self.advance(float("inf"))
        return self.results

    def cancel(self) -> None:
        """Unwinds the step where it is paused and frees what it holds."""
        if self.done:
            return
        self._cancelled = True
        if self._started:
            self._switch()
        self.done = True

    def _switch(self) -> None:
        """Hands control to the worker until it hands it back."""
        outside, dtype = rng.capture(self._host), torch.get_default_dtype()
        attributes = self._attributes.capture()
        rng.restore(self._state)
        torch.set_default_dtype(self._dtype)
        if self._set is not None:
            self._attributes.restore(self._set)
        if not self._started:
            self._started = True
            _Worker.submit(lambda: self._context.run(self._work))
        self._settings.stream = _current_stream()
        self._go.release()
        try:
            self._back.acquire()
        except BaseException:  # interrupted: the worker must not run on beside us
            self._cancelled = True
            self._back.acquire()
            raise
        finally:
            self._state, self._dtype = rng.capture(self._host), torch.get_default_dtype()
            self._set = self._attributes.capture()
            rng.restore(outside)
            torch.set_default_dtype(dtype)
            self._attributes.restore(attributes)
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _work(self) -> None:
        """What the worker does: the whole step, pausing inside."""
        self._go.acquire()
        try:
            with self._settings.entered(), self._interception.running(self._run):
                self._run.walk(self._call)
        except _Cancelled:
            pass
        except BaseException as error:
            if self._run.at:
                error.add_note(f"in a frozen run, at layer {self._run.at}")
            self._error, self._cancelled = error, True
        del self._call
        self.done = True
        self._back.release()

    def _pause(self) -> None:
        """Called by the worker before every layer of the fine graph."""
        while not self._cancelled and not self._goes_on(self._run.at):
            self._back.release()
            self._go.acquire()
            self._settings.follow_stream()
        if self._cancelled:
            raise _Cancelled
        self.num_layers_done += 1


def _never(_name: str) -> bool:
    return False


class _ThreadSettings:
    """What a thread does not inherit: autocast, CUDA device and stream, number of threads."""

    def __init__(self) -> None:
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in ("cpu", "cuda")
        ]
        self._cache = torch.is_autocast_cache_enabled()
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
            stack.enter_context(torch.no_grad())
            for kind, dtype, enabled in self._autocast:
                if enabled:
                    stack.enter_context(
                        torch.autocast(kind, dtype, enabled, cache_enabled=self._cache)
                    )
            yield

    def follow_stream(self) -> None:
        """Work goes to the stream the owner is using now, so that order needs no events."""
        if self.stream is not None:
            torch.cuda.set_stream(self.stream)


def _current_stream() -> Any:
    return torch.cuda.current_stream() if torch.cuda.is_initialized() else None
