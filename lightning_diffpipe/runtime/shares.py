"""Which share of a coming batch's frozen work each rank takes, so that all are done together.

Stages are never quite equal, so ranks have unequal bubbles. Every rank measures how long a step keeps it
busy without frozen work, and what a group of samples costs it; from time to time all ranks exchange both
numbers and compute the same new shares from them:

    busy    rank 0 |=========|              groups   5
            rank 1 |=============|                   3        busy + groups x group_s: equal

What looks better may not be: bubbles lie where they lie. So steps are timed as well, and shares that proved
slower are left again, for good. All numbers are medians of the steps between two looks, the lower of two: a
validation or a checkpoint between two steps says nothing about bubbles.

Where frozen work runs several batches early, ranks need to be together over several batches only. Then a rank
may take two groups of one batch and three of the next:

    period of 4 batches, 4 groups each        rank 0 takes 9 of 16:  3 2 2 2
                                              rank 1 takes 7 of 16:  1 2 2 2

Shares decide who encodes a sample, never with which others: groups are fixed, so no result depends on
them. With `adapts=False` (`Trainer(deterministic=True)`) they stay as planned, so that two runs
also take the same course.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable, Sequence

from lightning_diffpipe.planning.filling import all_done_s, even_shares

_WORTHWHILE = 0.5  # of a group's time must be won
_SLOWER = 1.01  # than the best that was tried
_AT_FIRST, _LATER = 4, 16  # steps between two looks


class GroupShares:
    """The shares of the ranks of one pipeline.

    Args:
        num_ranks: Ranks of the pipeline.
        gather: Brings a few numbers of each rank to all of them; a collective call.
        adapts: Follow what is measured.
        planned: Weights of the ranks to begin with; equal if not given.
        period: Batches over which shares are whole numbers of groups.

    Attributes:
        adapts: Whether the shares follow what is measured.
    """

    def __init__(
        self,
        num_ranks: int,
        gather: Callable[[Sequence[float]], list[list[float]]],
        adapts: bool = True,
        planned: Sequence[float] = (),
        period: int = 1,
    ) -> None:
        self._period = period
        self._gather = gather
        self.adapts = adapts and num_ranks > 1
        self._weights = list(planned) or [1.0] * num_ranks
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
        batches = _spread(self._counts_of_period(num_groups), self._period)
        return batches[batch_index % self._period]

    def _counts_of_period(self, num_groups: int) -> tuple[int, ...]:
        total = num_groups * self._period
        return _rounded([weight * total / sum(self._weights) for weight in self._weights])

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
        if not self._steps % (_AT_FIRST if self._steps <= _LATER else _LATER):
            self._adapt(total_groups)

    def _adapt(self, total: int) -> None:
        seen = (self._steps_s, self._busy_s, self._groups_s)
        gathered = self._gather([statistics.median_low(times or [0.0]) for times in seen])
        for times in seen:
            times.clear()
        known = [group for _, _, group in gathered if group > 0]
        if not known:
            return
        current = self._counts_of_period(total)
        self._tried[current] = max(step for step, _, _ in gathered)
        best = min(self._tried, key=lambda counts: (self._tried[counts], counts))
        if self._tried[current] > _SLOWER * self._tried[best]:
            self._weights = [float(count) for count in best]
            return
        busy_s = [busy * self._period for _, busy, _ in gathered]
        group_s = sum(known) / len(known)
        even = even_shares(busy_s, group_s, sum(current))  # all ranks would end together
        won_s = all_done_s(busy_s, current, group_s) - all_done_s(busy_s, even, group_s)
        if won_s > _WORTHWHILE * group_s and even not in self._tried:
            self._weights = [float(count) for count in even]


@functools.lru_cache(maxsize=16)
def _spread(counts: tuple[int, ...], period: int) -> tuple[tuple[int, ...], ...]:
    """Returns each rank's groups of a period, spread over its batches: by batch and rank.

    All batches have equally many groups, and a rank's differ by one at most. What its count leaves when divided
    is dealt out, rank by rank, going round the batches in bit-reversed order (van der Corput's sequence: 0, 2,
    1, 3 of 4), any run of which lies at nearly even distances.

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


def _rounded(exact: Sequence[float]) -> tuple[int, ...]:
    """Returns whole numbers with the same sum; the largest rests are rounded up."""
    whole = [int(share + 1e-9) for share in exact]
    by_rest = sorted(range(len(exact)), key=lambda rank: (whole[rank] - exact[rank], rank))
    for rank in by_rest[: round(sum(exact)) - sum(whole)]:
        whole[rank] += 1
    return tuple(whole)
