"""Frozen layers of coming batches, run wherever a rank would otherwise wait.

    rank 1 | wait ------------ F0 | wait ---- F1 | B0 ...
           | vae.0 vae.1 vae.2    | vae.3 vae.0  |            (of the next batch; then of the one after it)

    step 7    take(7)   prepare(8, 9)   program of 7, its waits filled with layers of 8, then of 9   observe
    step 8    take(8)   prepare(10)     what is left of 8 first, then the program of 8, ...

A batch is laid out when it becomes known (`PreparedBatches`), with the groups of samples that this rank encodes of
it, and is compared with what was encoded when it is due; what a GPU has to compare is looked at a step later, so
that no host waits for it. How the groups are shared over ranks follows what steps have measured (`shares.py`).

A `Filler` has this rank's frozen parts of coming batches, in order, as runs that pause at every layer
(`graph/frozen.py`). At each wait it goes on, layer by layer, for as long as the wait is expected to last:

* *opportunistic*, where a wait blocks the host (gloo): until the message is there. A layer of which
  more than half would probably come after the message is not started, as being late delays every other
  rank; unless the message is overdue.
* *planned*, where waits are ordered on the device (NCCL): the host cannot know when a message arrives,
  so it puts as many layers before the wait as took its time in the steps before.

Both need two numbers, learnt while training (`FillingTimes`): how long each layer takes, and how long each
wait lasts. What is left of a batch is done when that batch is due.

With one batch known, a rank that has done its share of it idles beside another that has not, in every
step: ranks are never done at the same moment. With two it goes on with the batch after it, and has less to do
in the next step. So ranks are together on average only, and waits are empty when there is no work, rather
than when it is another rank's.

None of this changes any result: which samples a layer runs on together is fixed beforehand.

Source:
    DiffusionPipe, Tian et al. (2024), https://arxiv.org/abs/2405.01248, fills bubbles with frozen layers
    of the next batch as planned; running until the message arrives, and two batches early, is ours.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from lightning_diffpipe.clock import Clock
from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.graph.frozen import PausedRun
from lightning_diffpipe.planning.filling import LOOKAHEAD_BATCHES, SHARES_PERIOD
from lightning_diffpipe.planning.instruction import Encode, Instruction
from lightning_diffpipe.runtime.batch_layout import BatchLayout, StepWork
from lightning_diffpipe.runtime.frozen_work import FrozenWork
from lightning_diffpipe.runtime.microbatch import Comparison, Fingerprint
from lightning_diffpipe.runtime.recording import Recording
from lightning_diffpipe.runtime.shares import GroupShares

Upcoming = Sequence[tuple[Any, tuple[Any, ...]]]
"""Batches that come next, and the further arguments of their steps."""


@dataclass(frozen=True)
class Filling:
    """How bubbles are filled.

    Attributes:
        mode: `"opportunistic"` or `"planned"`, see `runtime/bubbles.py`; `None` by backend.
        adapts: Shares of the ranks follow what is measured.
        planned_shares: Weights of the ranks to begin with; equal if empty.
        lookahead_batches: Batches whose frozen layers may run before they are due.
    """

    mode: FillingMode | None = None
    adapts: bool = True
    planned_shares: tuple[float, ...] = ()
    lookahead_batches: int = LOOKAHEAD_BATCHES


class _Prepared(NamedTuple):
    """A batch that is not trained on yet; its frozen layers may be done."""

    batch_index: int
    fingerprint: Fingerprint
    step: StepWork


class _Past(NamedTuple):
    """What later steps need of one that is over; `ran` is None if its frozen work was not known before."""

    recording: Recording
    ended_s: float
    ran: Sequence[tuple[Any, Any]] | None
    num_groups: int
    total_groups: int


class PreparedBatches:
    """The coming batches that one rank knows of.

    Args:
        filling: How bubbles are filled.
        layout: Lays batches out.
        clock: The clock of this rank's device.

    Raises:
        ConfigurationError: Bubbles cannot be filled in this mode over the mesh's backend.

    Attributes:
        filler: Their frozen work, to be run in waits.
    """

    def __init__(self, filling: Filling, layout: BatchLayout, clock: Clock) -> None:
        mesh = layout.mesh
        if filling.mode == "opportunistic" and mesh.backend == "nccl":
            raise ConfigurationError(
                "bubbles cannot be filled until a message arrives (mode='opportunistic') over NCCL, where the "
                "host does not see messages arrive; use mode='planned' or None, or "
                "process_group_backend='gloo'"
            )
        mode = filling.mode or ("opportunistic" if mesh.backend == "gloo" else "planned")
        self.filler = Filler(FillingTimes(mode, clock))
        self._layout = layout
        self._clock = clock
        self._prepared: deque[_Prepared] = deque()
        self._last: _Past | None = None
        self._compared: tuple[int, Comparison] | None = None
        period = 1 if filling.lookahead_batches == 1 else SHARES_PERIOD
        self._shares = GroupShares(
            mesh.layout.ranks_per_pipeline,
            mesh.gathered,
            filling.adapts,
            filling.planned_shares,
            period,
        )

    def num_after(self, batch_index: int) -> int:
        """Returns how many batches after this one are known."""
        return sum(1 for prepared in self._prepared if prepared.batch_index > batch_index)

    def take(self, batch: Any, batch_index: int) -> StepWork | None:
        """Returns what earlier steps prepared for this batch; None if nothing.

        Raises:
            ConfigurationError: They prepared another batch under the same number. Of values on a GPU the next
                call tells, when they are there: the host waits for no device.
        """
        self.refuse_other_batch()
        if not self._prepared:
            return None
        if self._prepared[0].batch_index != batch_index:
            self.drop()
            return None
        prepared = self._prepared.popleft()
        if not self._layout.still_takes_its_forms(prepared.step):
            self.filler.drop_first()
            return None
        self._compared = batch_index, prepared.fingerprint.compare(Fingerprint.of(batch))
        if self._compared[1].is_known:
            self.refuse_other_batch()
        return prepared.step

    def refuse_other_batch(self) -> None:
        """Checks that the latest batch that was taken is the one that was prepared.

        Raises:
            ConfigurationError: It is another.
        """
        if self._compared is None:
            return
        (number, comparison), self._compared = self._compared, None
        if difference := comparison.difference():
            raise ConfigurationError(
                f"batch {number} is not the one whose frozen layers ran in the bubbles of batches "
                f"before: {difference}. Do not change batches in callbacks; change them in the data set "
                "or in on_after_batch_transfer, or train with filling=none"
            )

    def prepare(self, upcoming: Upcoming, batch_index: int) -> None:
        """Lays out batches after those it knows, so that their frozen layers can run in bubbles.

        Args:
            upcoming: Equally many on all ranks.
            batch_index: Number of the batch that is trained on now.
        """
        first = batch_index + 1 + len(self._prepared)
        for number, (batch, arguments) in enumerate(upcoming, first):
            counts = partial(self._shares.counts, batch_index=number)
            step = self._layout.lay_out(batch, number, arguments, counts)
            if step.frozen is None:
                return
            self._prepared.append(_Prepared(number, Fingerprint.of(batch), step))
            self.filler.add(step.frozen)

    def drop(self) -> None:
        """Forgets the batches that were to come: they will not, or others will."""
        self._prepared.clear()
        self.filler.cancel()

    def observe(self, step: StepWork, recording: Recording) -> None:
        """Lets the shares follow what was measured, a step later: by then a GPU has come by."""
        past, ended_s = self._last, time.perf_counter()
        ran = step.frozen.ran if step.frozen is not None and step.early else None
        num_groups = step.frozen.num_own_groups if step.frozen is not None else 0
        self._last = _Past(recording, ended_s, ran, num_groups, step.total_groups)
        if past is None or past.ran is None or not self._shares.adapts:
            return
        if past.ran:
            self._clock.wait_for(past.ran[-1][1])
        self._shares.observe(
            ended_s - past.ended_s,
            past.recording.compute_s + recording.begins_after_s(past.recording),
            sum(self._clock.seconds(start, stop) for start, stop in past.ran),
            past.num_groups,
            past.total_groups,
        )


FillingMode = Literal["opportunistic", "planned"]

_SMOOTHING = 0.3  # weight of the newest measurement
_POLL_S = 3e-4
_NO_WAIT_S = 2e-4  # a wait that took less did not wait
_SHRINK = 0.9  # what is made of a wait that was filled for too long, by an unknown time


class FillingTimes:
    """How long layers and waits take, learnt from the steps before, as long as training lives.

    On a GPU the answers come later: stamps are read once the device has passed them.

    Args:
        mode: See the file's head.
        clock: The clock of the rank's device.
    """

    def __init__(self, mode: FillingMode, clock: Clock) -> None:
        self.mode = mode
        self.clock = clock
        self._layers_s: dict[str, float] = {}
        self._waits_s: dict[Instruction, float] = {}
        self._unread: deque[tuple[str | Instruction, tuple[Any, ...]]] = deque()

    def note(self, what: str | Instruction, *stamps: Any) -> None:
        """Notes a layer between two stamps; or those where a wait began, was filled until, and ended."""
        self._unread.append((what, stamps))

    def settle(self) -> None:
        """Reads the measurements that the device has finished."""
        while self._unread and self.clock.is_past(self._unread[0][1][-1]):
            what, stamps = self._unread.popleft()
            spans_s = [self.clock.seconds(start, stop) for start, stop in pairwise(stamps)]
            seconds = sum(spans_s)
            if isinstance(what, str):
                before = self._layers_s.get(what, seconds)
                self._layers_s[what] = before + _SMOOTHING * (seconds - before)
                continue
            before = self._waits_s.get(what, seconds)
            if spans_s[1] <= _NO_WAIT_S:  # the message came before the last layer ended
                seconds = _SHRINK * min(spans_s[0], before)
            self._waits_s[what] = before + _SMOOTHING * (seconds - before)

    def layer_s(self, name: str) -> float | None:
        """Returns the seconds of a layer; `None` if it never ran."""
        return self._layers_s.get(name)

    def wait_s(self, wait: Instruction) -> float:
        """Returns the seconds that a wait will probably last; before it was measured what the mode assumes."""
        first_s = float("inf") if self.mode == "opportunistic" else 0.0
        return self._waits_s.get(wait, first_s)


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
        """Takes on the frozen work of the batch after those it has."""
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
            self._times.note(wait, start, filled, recording.end_of(wait))
        self._waits.clear()
        self._times.settle()

    def drop_first(self) -> None:
        """Gives up the frozen work of the batch that comes first."""
        work = self._works.popleft()
        if work.run is not None:
            work.run.cancel()

    def cancel(self) -> None:
        """Gives up all work."""
        while self._works:
            self.drop_first()
        self._waits.clear()

    def _go_on(self, work: _Work, goes_on: Callable[[str], bool], recording: Recording) -> bool:
        """Runs the part at hand; says whether it has ended, rather than paused before a layer."""
        times, part, start = self._times, work.todo[0], recording.stamp()
        running: list[tuple[str, Any]] = []  # the layer, and when it began
        num_layers = 0

        def end() -> None:
            if running:
                times.note(*running.pop(), times.clock.stamp())

        def begin(layer: str) -> bool:
            nonlocal num_layers
            end()
            if layer != _BEGINNING and not goes_on(layer):
                return False
            num_layers += 1
            running.append((layer, times.clock.stamp()))
            return True

        if work.run is None:
            begin(_BEGINNING)
            work.run = work.frozen.start(part)
        ended = work.run.advance_while(begin)
        if ended:
            end()
            work.frozen.add_results(part, work.run.results)
            work.run = None
            work.todo.pop(0)
        if num_layers:
            recording.add(Encode(part), start, early=True)
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
        self._budget_s = times.wait_s(wait)
        self._spent_s = 0.0
        self._start = times.clock.stamp()
        self._asks = times.mode == "opportunistic"
        self._is_ready = is_ready if self._asks else lambda: False
        self._refused_s = 0.0

    def allows(self, layer: str) -> bool:
        """Returns whether a layer should be started now; it counts as run if so."""
        times = self._times
        expected_s = times.layer_s(layer)
        if self._asks:
            self._spent_s = self._elapsed_s
            expected_s = expected_s or 0.0  # a rank that can look for the message may try
        elif expected_s is None:
            return False  # runs after the pipeline once, and is timed there
        self._refused_s = expected_s
        if self._is_ready() or self._spent_s + expected_s / 2 > self._budget_s:
            return False
        self._spent_s += expected_s
        return True

    def is_overdue(self) -> bool:
        """Waits; returns whether the message is not there when the refused layer would have been half done.

        Then the wait is longer than those before it, by an unknown time, and all layers may run.
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


_BEGINNING = "beginning"
"""Stands for what a step does before its first frozen layer."""
