"""Frozen layers, run once per batch and shared by all ranks, wherever a rank would otherwise wait.

Encoders (VAE, text encoders, locked halves of a ControlNet) are needed by several stages but trained by
none. Every rank holds them all. The plan cuts the samples of a batch into *frozen parts*, one or more
for each rank; each rank runs the frozen layers for its own parts only (`FrozenWork`), and an exchange brings every
result to the ranks whose stages read it, so that no sample is encoded twice, however many stages there are:

    rank 0 | E0 X F0 F1 ...        E0: samples 0-3 of the batch
    rank 1 | E1 X  . F0 ...        E1: samples 4-7

From the second batch of an epoch on they have run in the bubbles of the one before:

    rank 1 | wait ------------ F0 | wait ---- F1 | B0 ...
           | vae.0 vae.1 vae.2    | vae.3 vae.0  |            (of the next batch; then of the one after it)

A `Filler` has this rank's frozen parts of coming batches (`upcoming.py`), in order, as runs that pause at every
layer (`graph/frozen.py`). At each wait it goes on, layer by layer, for as long as the wait is expected to last:

* *opportunistic*, where a wait blocks the host (gloo): until the message is there. A layer of which
  more than half would probably come after the message is not started, as being late delays every other
  rank; unless the message is overdue.
* *planned*, where waits are ordered on the device (NCCL): the host cannot know when a message arrives,
  so it puts as many layers before the wait as took its time in the steps before.

Both need two numbers, learnt while training (`FillingTimes`): how long each layer takes, and how long each
wait lasts. What is left of a batch is done when its step begins. None of this changes any result: which samples a
layer runs on together is fixed beforehand.

Source:
    DiffusionPipe, Tian et al. (2024), https://arxiv.org/abs/2405.01248, fills bubbles with frozen layers
    of the next batch as planned; running until the message arrives is ours.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_diffpipe.clock import Clock
from lightning_diffpipe.comm.packing import MessageLayout
from lightning_diffpipe.comm.transport import MessageKey, Parcel, PendingWork, Transport
from lightning_diffpipe.errors import GraphError
from lightning_diffpipe.graph.frozen import FrozenView, PausedRun, join_samples
from lightning_diffpipe.graph.layer import TensorKey
from lightning_diffpipe.planning.filling import EncodePart
from lightning_diffpipe.planning.instruction import Encode, Instruction
from lightning_diffpipe.planning.schedule import Placement
from lightning_diffpipe.runtime.recording import Recording
from lightning_diffpipe.runtime.stage import MicrobatchWork, TensorMessage

FillingMode = Literal["opportunistic", "planned"]

_BEGINNING = "beginning"  # what a step does before its first frozen layer
_SMOOTHING = 0.3  # weight of the newest measurement
_POLL_S = 3e-4
_NO_WAIT_S = 2e-4  # a wait that took less did not wait
_SHRINK = 0.9  # what is made of a wait that was filled for too long, by an unknown time


@dataclass(eq=False)
class FrozenWork:
    """The frozen parts of one step.

    Attributes:
        parts: All parts of the batch, those of other ranks too.
        group_size: Samples on which a layer runs at a time; `None` for a microbatch at a time.
        ran: Stamps between which this rank encoded in bubbles.
    """

    parts: Sequence[EncodePart]
    group_size: int | None
    works: Sequence[MicrobatchWork]
    placement: Placement
    local_rank: int
    device: torch.device
    ran: list[tuple[Any, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._results: dict[int, dict[TensorKey, Tensor]] = {}
        self._arriving: list[tuple[EncodePart, int, TensorMessage, Tensor]] = []
        self._exchange: PendingWork | None = None

    @property
    def own_parts(self) -> list[EncodePart]:
        """The parts this rank encodes."""
        return [part for part in self.parts if part.rank == self.local_rank]

    @property
    def num_own_groups(self) -> int:
        """Groups of samples this rank encodes."""
        return sum(
            1 if self.group_size is None else math.ceil(part.num_samples / self.group_size)
            for part in self.own_parts
        )

    def encode(self, index: int) -> None:
        """Runs the frozen layers for one of this rank's parts."""
        view, work, samples = self._work_of(index)
        self.add_results(index, view.whole(work.call, work.seed, samples, self.group_size))

    def start(self, index: int) -> PausedRun:
        """Prepares the frozen layers for one of this rank's parts; runs nothing."""
        view, work, samples = self._work_of(index)
        return view.start(work.call, work.seed, samples, self.group_size)

    def _work_of(self, index: int) -> tuple[FrozenView, MicrobatchWork, tuple[int, int] | None]:
        part = self.parts[index]
        work = self.works[part.microbatch]
        view = work.partitioned.frozen_view
        if self.group_size is None:  # layers that mix samples run on whole microbatches
            return view, work, None
        return view, work, (part.start, part.stop)

    def add_results(self, index: int, results: dict[TensorKey, Tensor]) -> None:
        """Takes the results of a part that was started."""
        self._results[index] = results

    def exchange(self, transport: Transport) -> PendingWork:
        """Starts to send this rank's results to the ranks that read them, and to receive the others'.

        All of this rank's parts are encoded. A second call returns the exchange under way.
        """
        if self._exchange is not None:
            return self._exchange
        sends, receives = [], []
        for part in self.parts:
            for stage, reader in self._readers(part):
                key = MessageKey("frozen", stage, part.index)
                if part.rank == self.local_rank != reader:
                    rows = self._rows(part, stage)
                    buffer = self._message(part, stage).pack(rows, self.device)
                    sends.append(Parcel(key, buffer, reader))
                elif reader == self.local_rank != part.rank:
                    message = self._message(part, stage)
                    buffer = message.layout.empty(self.device)
                    receives.append(Parcel(key, buffer, part.rank))
                    self._arriving.append((part, stage, message, buffer))
        self._exchange = transport.exchange(sends, receives)
        return self._exchange

    def deliver(self) -> None:
        """Joins the parts of each microbatch; called when the exchange has ended."""
        # By microbatch and stage, by the first sample of the part.
        pieces = defaultdict[tuple[int, int], dict[int, dict[TensorKey, Tensor]]](dict)
        for part, stage, message, buffer in self._arriving:
            pieces[part.microbatch, stage][part.start] = message.unpack(buffer)
        for part in self.own_parts:
            for stage, reader in self._readers(part):
                if reader == self.local_rank:
                    pieces[part.microbatch, stage][part.start] = self._rows(part, stage)
        for (microbatch, stage), by_start in pieces.items():
            work, ordered = self.works[microbatch], [by_start[start] for start in sorted(by_start)]
            work.frozen[stage] = join_samples(work.partitioned.graph, ordered)
        self._arriving.clear()
        self._results.clear()
        self._exchange = None

    def _readers(self, part: EncodePart) -> list[tuple[int, int]]:
        """Returns (stage, position) of every stage that reads results of this part."""
        stages = self.works[part.microbatch].partitioned.cut.stages
        return [
            (stage.index, self.placement.rank_of(stage.index, part.microbatch))
            for stage in stages
            if stage.frozen_received
        ]

    def _keys(self, part: EncodePart, stage: int) -> tuple[TensorKey, ...]:
        return self.works[part.microbatch].partitioned.cut.stages[stage].frozen_received

    def _message(self, part: EncodePart, stage: int) -> TensorMessage:
        graph, keys = self.works[part.microbatch].partitioned.graph, self._keys(part, stage)
        specs = [graph.spec(key).of_samples(part.num_samples) for key in keys]
        return TensorMessage(keys, MessageLayout.of(specs))

    def _rows(self, part: EncodePart, stage: int) -> dict[TensorKey, Tensor]:
        """Returns this part's own rows of its results."""
        graph = self.works[part.microbatch].partitioned.graph
        own_rows = {}
        for key in self._keys(part, stage):
            tensor, rows = self._results[part.index][key], graph.spec(key).rows
            if rows and tensor.shape[0] != rows * part.num_samples:
                tensor = tensor[rows * part.start : rows * part.stop]
            own_rows[key] = tensor
        return own_rows


class FillingTimes:
    """Seconds of layers and waits, measured in earlier steps of the training.

    On a GPU the answers come later: stamps are read once the device has passed them. The mode, see the file's head,
    says what is expected of a wait that was not measured.
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

    def read(self) -> None:
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
    """This rank's frozen parts of coming batches, run in pieces."""

    def __init__(self, times: FillingTimes) -> None:
        self._times = times
        self._works: deque[_Work] = deque()
        self._waits: list[tuple[Instruction, Any, Any]] = []

    @property
    def done(self) -> bool:
        """Nothing is left to run."""
        return not any(work.can_go_on for work in self._works)

    def add(self, frozen: FrozenWork) -> None:
        """Takes on the frozen work of the batch after those it has."""
        self._works.append(_Work(frozen, [part.index for part in frozen.own_parts]))

    def fill(self, wait: Instruction, is_ready: Callable[[], bool], recording: Recording) -> None:
        """Runs layers until the wait is over, or would be before the next layer is done."""
        filled = start = recording.stamp()
        limit = _Limit(self._times, wait, is_ready)
        while not self.done:
            work = next(work for work in self._works if work.can_go_on)
            begins = work.run is not None or limit.allows(_BEGINNING)
            try:
                ended = begins and self._go_on(work, limit.allows, recording)
            except GraphError:
                # Its call sequence is another one now: what decides, such as a counter, is of this batch.
                work.run, work.is_postponed, ended = None, True, True
            filled = recording.stamp()
            if not ended and not limit.is_overdue():
                break
        self._waits.append((wait, start, filled))

    def finish(self, frozen: FrozenWork, recording: Recording) -> None:
        """Runs the rest of the frozen work of a batch that is needed now; nothing if it was never added."""
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
        self._times.read()

    def drop_first(self) -> None:
        """Discards the frozen work of the next batch."""
        work = self._works.popleft()
        if work.run is not None:
            work.run.cancel()

    def cancel(self) -> None:
        """Discards all work."""
        while self._works:
            self.drop_first()
        self._waits.clear()

    def _go_on(self, work: _Work, goes_on: Callable[[str], bool], recording: Recording) -> bool:
        """Runs the current part; returns whether it has ended, rather than paused before a layer."""
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
            recording.add(Encode(part), start)
            work.frozen.ran.append((start, recording.stamp()))
        return ended


@dataclass
class _Work:
    """The frozen work of one batch, and its progress; what is postponed runs when the batch is needed."""

    frozen: FrozenWork
    todo: list[int]
    run: PausedRun | None = None
    is_postponed: bool = False

    @property
    def can_go_on(self) -> bool:
        return bool(self.todo) and not self.is_postponed


class _Limit:
    """Limit up to which a wait may be filled."""

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
        """Waits until the refused layer would be half done; returns whether the message is not there by then.

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
