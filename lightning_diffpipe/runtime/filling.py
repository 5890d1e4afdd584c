"""Frozen layers of coming batches, run wherever a rank would otherwise wait.

    rank 1 | wait ------------ F0 | wait ---- F1 | B0 ...
           | vae.0 vae.1 vae.2    | vae.3 vae.0  |            (of the next batch; then of the one behind it)

A `Filler` holds this rank's frozen parts of coming batches, in order, as runs that pause at every layer.
At each wait it goes on, layer by layer, for as long as the wait is expected to last:

* *opportunistic*, where a wait blocks the host (gloo): until the message is there. A layer of which
  more than half would probably come after the message is not started, as being late delays every other
  rank; unless the message is overdue.
* *planned*, where waits are ordered on the device (NCCL): the host cannot know when a message arrives,
  so it puts as many layers in front of the wait as took its time in the steps before.

Both need two numbers, learnt while training: how long each layer takes (`Pace`), and how long each
wait lasts (`Budgets`). What is left of a batch is done when that batch is due.

With one batch ahead, a rank that has done its share of it idles beside another that has not, in every
step: ranks are never done at the same moment. With two it goes on with the batch behind, and has less to do
in the next step. So ranks are together on average only, and waits are empty when there is no work, rather
than when it is another rank's.

None of this changes any result: which samples a layer runs on together is fixed beforehand.

Source:
    DiffusionPipe, Tian et al. (2024), https://arxiv.org/abs/2405.01248, fills bubbles with frozen layers
    of the next batch as planned; running until the message arrives, and further ahead, is ours.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_diffpipe.clock import Clock
from lightning_diffpipe.graph.frozen import PausedRun
from lightning_diffpipe.planning.instruction import Encode, Instruction
from lightning_diffpipe.runtime.frozen import FrozenWork
from lightning_diffpipe.runtime.recording import Recording

FillingMode = Literal["opportunistic", "planned"]

_SMOOTHING = 0.3  # weight of the newest measurement
_POLL_S = 3e-4
_NO_WAIT_S = 2e-4  # a wait that took less did not wait
_SHRINK = 0.9  # what is made of a wait that was filled for too long, nobody knows by how much


@dataclass
class Pace:
    """How long the layers take, learnt from their last runs.

    Attributes:
        clock: What times them; on a GPU the answer comes later.
    """

    clock: Clock
    _seconds: dict[str, float] = field(default_factory=dict)
    _open: list[tuple[str, Any, Any]] = field(default_factory=list)

    def note(self, name: str, start: Any, stop: Any) -> None:
        """A layer ran between two stamps."""
        self._open.append((name, start, stop))

    def settle(self) -> None:
        """Takes in what the device has come by."""
        while self._open and self.clock.is_past(self._open[0][2]):
            name, start, stop = self._open.pop(0)
            seconds = self.clock.seconds(start, stop)
            before = self._seconds.get(name, seconds)
            self._seconds[name] = before + _SMOOTHING * (seconds - before)

    def expected_s(self, name: str) -> float | None:
        """Seconds of a layer; `None` if it never ran."""
        return self._seconds.get(name)


@dataclass
class Budgets:
    """How long each wait of the program lasts, learnt from the steps before.

    Attributes:
        clock: What times them.
        first_s: What is assumed of a wait that was never measured.
    """

    clock: Clock
    first_s: float
    _seconds: dict[Instruction, float] = field(default_factory=dict)
    _open: list[tuple[Instruction, Any, Any, Any]] = field(default_factory=list)

    def note(self, wait: Instruction, start: Any, filled: Any, stop: Any) -> None:
        """A wait began, was filled for a while, and ended."""
        self._open.append((wait, start, filled, stop))

    def settle(self) -> None:
        """Takes in what the device has come by."""
        while self._open and self.clock.is_past(self._open[0][3]):
            wait, start, filled, stop = self._open.pop(0)
            filled_s, rest_s = self.clock.seconds(start, filled), self.clock.seconds(filled, stop)
            before = self._seconds.get(wait, filled_s + rest_s)
            overshot = rest_s <= _NO_WAIT_S  # the message came before the last layer ended
            seconds = _SHRINK * min(filled_s, before) if overshot else filled_s + rest_s
            self._seconds[wait] = before + _SMOOTHING * (seconds - before)

    def expected_s(self, wait: Instruction) -> float:
        """Seconds the wait will probably last."""
        return self._seconds.get(wait, self.first_s)


class FillingTimes:
    """What filling has learnt of layers and waits; lives as long as training.

    Args:
        mode: See the file's head.
        clock: The clock of the rank's device.
    """

    def __init__(self, mode: FillingMode, clock: Clock) -> None:
        self.mode = mode
        self.clock = clock
        self.pace = Pace(clock)
        self.budgets = Budgets(clock, float("inf") if mode == "opportunistic" else 0.0)

    def settle(self) -> None:
        """Takes in the measurements that are complete by now."""
        self.pace.settle()
        self.budgets.settle()


class Filler:
    """This rank's frozen parts of coming batches, run in pieces.

    Args:
        times: What it learns of layers and waits.
    """

    def __init__(self, times: FillingTimes) -> None:
        self._times = times
        self._works: deque[_Work] = deque()
        self._waits: list[tuple[Instruction, Any, Any]] = []

    @property
    def done(self) -> bool:
        """Nothing is left to run."""
        return all(not work.todo for work in self._works)

    def add(self, frozen: FrozenWork) -> None:
        """Takes on the frozen work of the batch behind those it has."""
        self._works.append(_Work(frozen, [part.index for part in frozen.own_parts]))

    def fill(self, wait: Instruction, is_ready: Callable[[], bool], recording: Recording) -> None:
        """Runs layers until the wait is over, or would be before the next layer is done.

        Args:
            wait: The instruction the rank stands at.
            is_ready: Whether it can go on.
            recording: Of the running step.
        """
        filled = start = recording.stamp()
        limit = _Limit(self._times, wait, is_ready)
        while not self.done:
            work = next(work for work in self._works if work.todo)
            begins = work.run is not None or limit.allows(_BEGINNING)
            ended = begins and self._go_on(work, limit.allows, recording)
            filled = recording.stamp()
            if not ended and not limit.is_overdue():
                break
        self._waits.append((wait, start, filled))

    def finish(self, frozen: FrozenWork, recording: Recording) -> None:
        """Runs what is left of a batch that is due; nothing if it was never added."""
        if not self._works or self._works[0].frozen is not frozen:
            return
        work = self._works[0]
        while work.todo:
            self._go_on(work, lambda _name: True, recording)
        self._works.popleft()

    def learn(self, recording: Recording) -> None:
        """Learns from the waits of a step that is over."""
        for wait, start, filled in self._waits:
            self._times.budgets.note(wait, start, filled, recording.end_of(wait))
        self._waits.clear()
        self._times.settle()

    def cancel(self) -> None:
        """Gives up all work; nothing of it is kept."""
        for work in self._works:
            if work.run is not None:
                work.run.cancel()
        self._works.clear()
        self._waits.clear()

    def _go_on(self, work: _Work, goes_on: Callable[[str], bool], recording: Recording) -> bool:
        """Runs the part at hand; says whether it has ended, rather than paused in front of a layer."""
        part, start = work.todo[0], recording.stamp()
        if work.run is None:
            lap = _Lap(self._times.pace, goes_on, _BEGINNING)
            work.run = work.frozen.start(part)
        else:
            lap = _Lap(self._times.pace, goes_on)
        ended = work.run.advance_while(lap.goes_on)
        if ended:
            lap.end()
            work.frozen.keep(part, work.run.results)
            work.run = None
            work.todo.pop(0)
        if lap.num_layers:
            recording.add(Encode(part), start, ahead=True)
            work.frozen.ran.append((start, recording.stamp()))
        return ended


@dataclass
class _Work:
    """The frozen work of one batch, and how far it is."""

    frozen: FrozenWork
    todo: list[int]
    run: PausedRun | None = None


class _Limit:
    """How far a wait may be filled."""

    def __init__(
        self, times: FillingTimes, wait: Instruction, is_ready: Callable[[], bool]
    ) -> None:
        self._times = times
        self._budget_s = times.budgets.expected_s(wait)
        self._spent_s = 0.0
        self._start = times.clock.stamp()
        self._asks = times.mode == "opportunistic"
        self._is_ready = is_ready if self._asks else _never
        self._refused_s = 0.0

    def allows(self, layer: str) -> bool:
        """Whether a layer should be started now; it counts as run if so."""
        times = self._times
        expected_s = times.pace.expected_s(layer)
        if self._asks:
            self._spent_s = self._elapsed_s
            expected_s = expected_s or 0.0  # whoever can look for the message may try
        elif expected_s is None:
            return False  # runs behind the pipeline once, and is timed there
        self._refused_s = expected_s
        if self._is_ready() or self._spent_s + expected_s / 2 > self._budget_s:
            return False
        self._spent_s += expected_s
        return True

    def is_overdue(self) -> bool:
        """Waits; says yes if the message is not there when the refused layer would have been half done.

        Then the wait is longer than those before it, nobody knows by how much, and all layers may run.
        """
        until_s = self._budget_s + self._refused_s / 2
        while self._asks and not self._is_ready():
            if self._elapsed_s > until_s:
                self._budget_s = float("inf")
                return True
            self._times.clock.sleep(_POLL_S)
        return False

    @property
    def _elapsed_s(self) -> float:
        clock = self._times.clock
        now = clock.stamp()
        clock.wait_for(now)  # a GPU is asked for no more than it can do until the message
        return clock.seconds(self._start, now)


class _Lap:
    """Times layers of a run, each from its start to the start of the next."""

    def __init__(
        self, pace: Pace, goes_on: Callable[[str], bool], layer: str | None = None
    ) -> None:
        self.num_layers = 0
        self._pace = pace
        self._goes_on = goes_on
        self._layer: str | None = None
        self._start: Any = None
        if layer is not None:
            self._begin(layer)

    def goes_on(self, layer: str) -> bool:
        """Ends the layer before; asks whether the next one shall run."""
        self.end()
        if not self._goes_on(layer):
            return False
        self._begin(layer)
        return True

    def end(self) -> None:
        """The layer that is running has ended."""
        if self._layer is not None:
            self._pace.note(self._layer, self._start, self._pace.clock.stamp())
            self._layer = None

    def _begin(self, layer: str) -> None:
        self.num_layers += 1
        self._layer, self._start = layer, self._pace.clock.stamp()


_BEGINNING = "beginning"
"""Stands for what a step does in front of its first frozen layer."""


def _never() -> bool:
    return False
