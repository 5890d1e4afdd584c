"""Batches that are known before they are due, and whose frozen layers run in the bubbles of earlier ones.

    step 7    take(7)   prepare(8, 9)   program of 7, its waits filled with layers of 8, then of 9   observe
    step 8    take(8)   prepare(10)     what is left of 8 first, then the program of 8, ...

A batch is laid out when it becomes known, with the groups of samples that this rank encodes of it, and is compared
with what was encoded when it is due; what a GPU has to compare is looked at a step later, so that no host waits for
it. How the groups are shared over ranks follows what steps have measured.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from lightning_diffpipe.clock import Clock
from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.planning.frozen_parts import BATCHES_AHEAD, SHARES_PERIOD
from lightning_diffpipe.runtime.batch_layout import BatchLayout, StepWork
from lightning_diffpipe.runtime.filling import Filler, FillingMode, FillingTimes
from lightning_diffpipe.runtime.microbatch import Comparison, Fingerprint
from lightning_diffpipe.runtime.recording import Recording
from lightning_diffpipe.runtime.shares import GroupShares

Upcoming = Sequence[tuple[Any, tuple[Any, ...]]]
"""Batches that come next, and the further arguments of their steps."""


@dataclass(frozen=True)
class Filling:
    """How bubbles are filled.

    Attributes:
        mode: `"opportunistic"` or `"planned"`, see `runtime/filling.py`; `None` by backend.
        adapts: Shares of the ranks follow what is measured.
        planned_shares: Weights of the ranks to begin with; equal if empty.
        batches_ahead: Batches whose frozen layers may run before they are due.
    """

    mode: FillingMode | None = None
    adapts: bool = True
    planned_shares: tuple[float, ...] = ()
    batches_ahead: int = BATCHES_AHEAD


@dataclass(frozen=True)
class _Prepared:
    """A batch that is not trained on yet; its frozen layers may be done.

    Attributes:
        batch_index: Its number since training began.
        fingerprint: Tells whether the batch that comes is the one that was encoded.
        step: What is left to do.
    """

    batch_index: int
    fingerprint: Fingerprint
    step: StepWork


class _Past(NamedTuple):
    """What is kept of a step that is over; `ran` is None if its frozen work was not known before."""

    recording: Recording
    ended_s: float
    ran: Sequence[tuple[Any, Any]] | None
    num_groups: int
    total_groups: int


class BatchesAhead:
    """What one rank knows of coming batches.

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
        period = 1 if filling.batches_ahead == 1 else SHARES_PERIOD
        self._shares = GroupShares(
            mesh.layout.ranks_per_pipeline,
            mesh.gathered,
            filling.adapts,
            filling.planned_shares,
            period,
        )

    def num_behind(self, batch_index: int) -> int:
        """Batches behind this one that are known."""
        return sum(1 for prepared in self._prepared if prepared.batch_index > batch_index)

    def take(self, batch: Any, batch_index: int) -> StepWork | None:
        """What earlier steps prepared for this batch, if they did.

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
        if not self._layout.still_takes_its_forms(self._prepared[0].step):
            self.drop()
            return None
        prepared = self._prepared.popleft()
        self._compared = batch_index, prepared.fingerprint.compare(Fingerprint.of(batch))
        if self._compared[1].is_known:
            self.refuse_other_batch()
        return prepared.step

    def refuse_other_batch(self) -> None:
        """Looks whether the latest batch that was taken is the one that was prepared.

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

    def prepare(self, upcoming: Upcoming, batch_index: int, accumulate: int) -> None:
        """Lays out batches behind those it knows, so that their frozen layers can run in bubbles.

        Args:
            upcoming: Equally many on all ranks.
            batch_index: Number of the batch that is trained on now.
            accumulate: Batches whose gradients are averaged before an optimizer step.
        """
        first = batch_index + 1 + len(self._prepared)
        for number, (batch, arguments) in enumerate(upcoming, first):
            counts = partial(self._shares.counts, batch_index=number)
            step = self._layout.lay_out(batch, number, accumulate, arguments, counts)
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
        ran = step.frozen.ran if step.frozen is not None and step.ahead else None
        num_groups = step.frozen.num_own_groups if step.frozen is not None else 0
        self._last = _Past(recording, ended_s, ran, num_groups, step.total_groups)
        if past is None or past.ran is None or not self._shares.adapts:
            return
        self._shares.observe(
            ended_s - past.ended_s,
            past.recording.compute_s + recording.begins_after_s(past.recording),
            self._clock_s(past.ran),
            past.num_groups,
            past.total_groups,
        )

    def _clock_s(self, stamps: Sequence[tuple[Any, Any]]) -> float:
        if stamps:
            self._clock.wait_for(stamps[-1][1])
        return sum(self._clock.seconds(start, stop) for start, stop in stamps)
