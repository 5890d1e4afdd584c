"""A frozen run that waits in the middle of a model's code, and goes on when it is told to.

It is a coroutine (`coroutine.py`), and what threads share is swapped with it: the states of the random
number generators, the default dtype, which `precision="bf16-true"` changes inside a step, and attributes
of modules that the step sets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_diffpipe.errors import GraphError
from lightning_diffpipe.graph import rng
from lightning_diffpipe.graph.coroutine import Coroutine
from lightning_diffpipe.graph.interception import Interception
from lightning_diffpipe.graph.layer import TensorKey
from lightning_diffpipe.graph.side_effects import Attributes

if TYPE_CHECKING:
    from lightning_diffpipe.graph.frozen import FrozenRun


class PausedRun:
    """A frozen run that goes on in pieces. Its methods belong to one thread, the owner's.

    Attributes:
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
        self.num_layers_done = 0
        self._run, self._interception, self._call = run, interception, call
        self._run.pause = self._pause
        self._host = host_random
        with rng.preserved(self._host):
            rng.seed_all(seed, self._host)
            self._state = rng.capture(self._host)
        self._dtype = torch.get_default_dtype()
        self._attributes = attributes
        self._set: Any = None  # what they are inside; before the run begins, whatever they are
        self._goes_on: Callable[[str], bool] = lambda name: False
        self._coroutine = Coroutine(self._work)

    @property
    def done(self) -> bool:
        """Nothing is left to run."""
        return self._coroutine.done

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
        if not self.done or self._coroutine.is_cancelled:
            state = (
                "was cancelled" if self._coroutine.is_cancelled else "is not done; call finish()"
            )
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
            self._switch(self._coroutine.resume)
        return self.done

    def finish(self) -> dict[TensorKey, Tensor]:
        """Runs what is left."""
        self.advance(float("inf"))
        return self.results

    def cancel(self) -> None:
        """Unwinds the step where it is paused and frees what it holds."""
        if not self.done:
            self._switch(self._coroutine.cancel)

    def _switch(self, act: Callable[[], None]) -> None:
        """Hands control to the coroutine until it hands it back."""
        outside, dtype = rng.capture(self._host), torch.get_default_dtype()
        attributes = self._attributes.capture()
        rng.restore(self._state)
        torch.set_default_dtype(self._dtype)
        if self._set is not None:
            self._attributes.restore(self._set)
        try:
            act()
        finally:
            self._state, self._dtype = rng.capture(self._host), torch.get_default_dtype()
            self._set = self._attributes.capture()
            rng.restore(outside)
            torch.set_default_dtype(dtype)
            self._attributes.restore(attributes)

    def _work(self) -> None:
        """The whole step, pausing inside."""
        try:
            with self._interception.running(self._run):
                self._run.walk(self._call)
        except Exception as error:
            if self._run.at:
                error.add_note(f"in a frozen run, at layer {self._run.at}")
            raise
        finally:
            del self._call

    def _pause(self) -> None:
        """Called by the coroutine before every layer of the fine graph."""
        while self._coroutine.is_cancelled or not self._goes_on(self._run.at):
            self._coroutine.pause()
        self.num_layers_done += 1
