"""Batches that come next: laid out early, so that their frozen layers can run in bubbles.

    step 7    take(7)   prepare(8, 9)   program of 7, its waits filled with layers of 8, then of 9   observe
    step 8    take(8)   prepare(10)     what is left of 8 first, then the program of 8, ...

A batch is laid out when it becomes known (`PreparedBatches`), with the groups of samples that this rank encodes of
it. When its step begins it must hold the same objects, and tensors to which nobody has written since.

With one batch known, a rank that has done its share of it idles next to another that has not, in every step: ranks
are never done at the same moment. With two it goes on with the batch after it, and has less to do in the next step.
So ranks are together on average only, and waits are empty when there is no work, rather than when it is another
rank's. That is ours; DiffusionPipe (see `bubbles.py`) fills bubbles with frozen layers of the next batch only.

How many groups of samples each rank takes follows what steps have measured (`GroupShares`). Stages are never
quite equal, so ranks have unequal bubbles. Every rank measures how long a step keeps it busy without frozen work,
and what a group of samples costs it; from time to time all ranks exchange both numbers and compute new shares:

    busy    rank 0 |=========|              groups   5
            rank 1 |=============|                   3        busy + groups x group_s: equal

What looks better may not be: bubbles lie where they lie. So steps are timed as well, and shares that proved slower
are left again, for good. All numbers are medians of the steps between two checks, the lower of two: a validation or
a checkpoint between two steps says nothing about bubbles. Where frozen work runs several batches early, ranks need
to be together over several batches only, and may take two groups of one batch and three of the next:

    period of 4 batches, 4 groups each        rank 0 takes 9 of 16:  3 2 2 2
                                              rank 1 takes 7 of 16:  1 2 2 2

Shares decide who encodes a sample, never with which others: groups are fixed, so no result depends on them. With
`adapts=False` (`Trainer(deterministic=True)`) they stay as planned, so that two runs also take the same course.
"""

import functools
import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from lightning_diffpipe.clock import Clock
from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.graph.call_sequences import are_equal
from lightning_diffpipe.planning.filling import (
    LOOKAHEAD_BATCHES,
    SHARES_PERIOD,
    all_done_s,
    even_shares,
    largest_remainders,
)
from lightning_diffpipe.runtime.batch_layout import BatchLayout, StepWork
from lightning_diffpipe.runtime.bubbles import Filler, FillingMode, FillingTimes
from lightning_diffpipe.runtime.recording import Recording

Upcoming = Sequence[tuple[Any, tuple[Any, ...]]]
"""Batches that come next, and the further arguments of their steps."""


@dataclass(frozen=True)
class Filling:
    """Settings of bubble filling.

    Attributes:
        mode: `"opportunistic"` or `"planned"`, see `runtime/bubbles.py`; `None` by backend.
        adapts: Shares of the ranks follow what is measured.
        planned_shares: Weights of the ranks to begin with; equal if empty.
        lookahead_batches: Number of batches whose frozen layers may run in advance.
    """

    mode: FillingMode | None = None
    adapts: bool = True
    planned_shares: tuple[float, ...] = ()
    lookahead_batches: int = LOOKAHEAD_BATCHES


class _Prepared(NamedTuple):
    """A batch that is not trained on yet; its frozen layers may be done."""

    batch_index: int
    content: Sequence[tuple[Any, int | None]]
    step: StepWork


class _Past(NamedTuple):
    """Results of an ended step that later ones need; `ran` is None if its frozen work was not known before."""

    recording: Recording
    ended_s: float
    ran: Sequence[tuple[Any, Any]] | None
    num_groups: int
    total_groups: int


class PreparedBatches:
    """The coming batches that one rank knows of.

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
        self._answer: tuple[Tensor, torch.cuda.Event | None, int] | None = None
        period = 1 if filling.lookahead_batches == 1 else SHARES_PERIOD
        self._shares = GroupShares(
            mesh.layout.ranks_per_pipeline,
            mesh.gathered,
            filling.adapts,
            filling.planned_shares,
            period,
            layout.num_encoding,
        )

    def num_after(self, batch_index: int) -> int:
        """Returns how many batches after this one are known."""
        return sum(1 for prepared in self._prepared if prepared.batch_index > batch_index)

    def take(self, batch: Any, batch_index: int) -> StepWork | None:
        """Returns what was prepared for a batch, or None.

        Raises:
            ConfigurationError: The batch was changed since, or what the step makes of it for frozen layers, as it
                depends on what a hook or the optimizer sets; of that GPUs tell in the batch after it.
        """
        self._examine()  # of a GPU, for which nobody has waited
        if not self._prepared:
            return None
        if self._prepared[0].batch_index != batch_index:
            self.drop()
            return None
        prepared = self._prepared.popleft()
        before, now = prepared.content, _content(batch)
        same = len(before) == len(now) and all(
            a is b and version == other
            for (a, version), (b, other) in zip(before, now, strict=True)
        )
        if not same:
            raise ConfigurationError(
                f"batch {batch_index} was changed after frozen layers had run for it in the bubbles of batches "
                "before. Do not change batches in callbacks or in on_train_batch_start; change them in the data "
                "set or in on_after_batch_transfer, or train with filling=none"
            )
        if not self._layout.still_has_its_sequences(prepared.step):
            if prepared.step.frozen is not None:
                self.filler.drop_first()
            return None
        equal = are_equal(prepared.step.frozen_values, self._layout.steps.frozen_values)
        self._answer = (*begin_copy_to_host(equal), batch_index)
        if self._answer[1] is None:
            self._examine()
        return prepared.step

    def _examine(self) -> None:
        (equal, event, number), self._answer = self._answer or (True, None, 0), None
        if event is not None:
            event.synchronize()
        if not equal:
            raise ConfigurationError(
                f"what training_step computes for frozen layers of batch {number} was changed after they had run "
                "in bubbles of batches before: it depends on what a hook or the optimizer sets. Start again, or go "
                "on from a checkpoint, with strategy.filling=none, so that they run in the step of their batch"
            )

    def prepare(self, upcoming: Upcoming, batch_index: int) -> None:
        """Lays out later batches, equally many on all ranks, so that their frozen layers can run in bubbles."""
        first = batch_index + 1 + len(self._prepared)
        for number, (batch, arguments) in enumerate(upcoming, first):
            counts = partial(self._shares.counts, batch_index=number)
            step = self._layout.lay_out(batch, number, arguments, counts)
            self._prepared.append(_Prepared(number, _content(batch), step))
            if step.frozen is not None:  # else a coin leaves its frozen layers out
                self.filler.add(step.frozen)

    def drop(self) -> None:
        """Forgets the batches that were to come: they will not, or others will."""
        self._prepared.clear()
        self.filler.cancel()

    def observe(self, step: StepWork, recording: Recording) -> None:
        """Adapts the shares to what was measured, a step later: by then a GPU has reached the stamps."""
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


def _content(batch: Any) -> list[tuple[Any, int | None]]:
    """Returns what a batch holds, tensors with a number that every write to them raises."""
    leaves = pytree.tree_leaves(batch)
    counts_writes = lambda leaf: isinstance(leaf, Tensor) and not leaf.is_inference()
    return [(leaf, leaf._version if counts_writes(leaf) else None) for leaf in leaves]


def begin_copy_to_host(value: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Returns a tensor on the host, and the event after which it has the values; None if it has them now."""
    if value.device.type != "cuda":
        return value, None
    copy = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    copy.copy_(value, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(value.device))
    return copy, event


_WORTHWHILE = 0.5  # of a group's time must be won
_SLOWER = 1.01  # than the best that was tried
_AT_FIRST, _LATER = 4, 16  # steps between two checks


@dataclass(eq=False)
class GroupShares:
    """The shares of the ranks of one pipeline.

    Attributes:
        gather: Brings a few numbers of each rank to all of them; a collective call.
        adapts: Whether the shares follow what is measured, if there are several ranks.
        planned: Weights of the ranks to begin with; equal if not given.
        period: Batches over which shares are whole numbers of groups.
        num_encoding: Number of ranks that encode, the last ones; None for all.
    """

    num_ranks: int
    gather: Callable[[Sequence[float]], list[list[float]]]
    adapts: bool = True
    planned: Sequence[float] = ()
    period: int = 1
    num_encoding: int | None = None

    def __post_init__(self) -> None:
        encoding = self.num_encoding or self.num_ranks
        self.adapts = self.adapts and encoding > 1
        self._others = self.num_ranks - encoding
        self._weights = list(self.planned) or [0.0] * self._others + [1.0] * encoding
        self._steps = 0
        self._steps_s: list[float] = []
        self._busy_s: list[float] = []
        self._groups_s: list[float] = []
        self._tried: dict[tuple[int, ...], float] = {}

    def counts(self, num_groups: int, batch_index: int = 0) -> tuple[int, ...]:
        """Returns the groups of a batch for each rank; they add up.

        Example:
            >>> GroupShares(2, gather=list, planned=[3, 1]).counts(8)
            (6, 2)
            >>> shares = GroupShares(2, gather=list, planned=[9, 7], period=4)
            >>> [shares.counts(4, batch_index) for batch_index in range(4)]
            [(3, 1), (2, 2), (2, 2), (2, 2)]
        """
        batches = _spread(self._counts_of_period(num_groups), self.period)
        return batches[batch_index % self.period]

    def _counts_of_period(self, num_groups: int) -> tuple[int, ...]:
        total = num_groups * self.period
        exact = [weight * total / sum(self._weights) for weight in self._weights]
        return largest_remainders(exact, total)

    def observe(
        self, step_s: float, busy_s: float, encode_s: float, num_groups: int, total_groups: int
    ) -> None:
        """Takes in a step; every rank of the pipeline must call it after the same steps.

        Args:
            step_s: Seconds since the step before.
            busy_s: Seconds this rank was busy with anything but frozen work.
            encode_s: Seconds of its share of the frozen work of a batch.
            num_groups: Groups of that share.
            total_groups: Groups of that batch, over all ranks.
        """
        if not self.adapts:
            return
        self._steps_s.append(step_s)
        self._busy_s.append(busy_s)
        if num_groups:
            self._groups_s.append(encode_s / num_groups)
        self._steps += 1
        if self._steps % (_AT_FIRST if self._steps <= _LATER else _LATER):
            return
        seen = (self._steps_s, self._busy_s, self._groups_s)
        gathered = self.gather([statistics.median_low(times or [0.0]) for times in seen])
        for times in seen:
            times.clear()
        groups_s = [group for _, _, group in gathered if group > 0]
        if not groups_s:
            return
        current = self._counts_of_period(total_groups)
        self._tried[current] = max(step for step, _, _ in gathered)
        best = min(self._tried, key=lambda counts: (self._tried[counts], counts))
        if self._tried[current] > _SLOWER * self._tried[best]:
            self._weights = [float(count) for count in best]
            return
        busy_s = [busy * self.period for _, busy, _ in gathered]
        group_s = sum(groups_s) / len(groups_s)
        # All that encode would end together.
        even = (0,) * self._others + even_shares(busy_s[self._others :], group_s, sum(current))
        won_s = all_done_s(busy_s, current, group_s) - all_done_s(busy_s, even, group_s)
        if won_s > _WORTHWHILE * group_s and even not in self._tried:
            self._weights = [float(count) for count in even]


@functools.lru_cache(maxsize=16)
def _spread(counts: tuple[int, ...], period: int) -> tuple[tuple[int, ...], ...]:
    """Returns each rank's groups of a period, spread over its batches: by batch and rank.

    All batches have equally many groups, and a rank's differ by one at most. What its count leaves when divided
    is dealt out, rank by rank, going round the batches in bit-reversed order (van der Corput's sequence: 0, 2,
    1, 3 of 4), any run of which has nearly even distances.

    Example:
        >>> _spread((5, 3), period=4)
        ((2, 0), (1, 1), (1, 1), (1, 1))
    """
    order = sorted(range(period), key=lambda batch: f"{batch:016b}"[::-1])
    batches = [[count // period for count in counts] for _ in range(period)]
    rests = [rank for rank, count in enumerate(counts) for _ in range(count % period)]
    for batch, rank in zip(itertools.cycle(order), rests, strict=False):
        batches[batch][rank] += 1
    return tuple(map(tuple, batches))
