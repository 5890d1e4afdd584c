"""The frozen work of a batch: how ranks share it, and where it goes into bubbles.

Frozen encoders depend on nothing that is trained, so that any rank may encode any sample. Each rank takes a share
of the batch, and all exchange the results: each sample is encoded once, never once per stage. Without bubbles to
fill the shares are equal.

    batch of 8, 2 microbatches, 4 ranks       microbatch 0      microbatch 1
                                              | E0  |  E1  |    | E2  |  E3  |
                                               rank 0 rank 1     rank 2 rank 3

Frozen weights never change, so that the conditioning of batch t + 1 can be computed while batch t is trained: bit
for bit the same inputs, at no cost where a rank would have waited. What fits no bubble is left over and runs after
the pipeline; then all ranks exchange the results.

    rank 0 | F0 F1  . E0 B0 -- E2 B1 -- E3        E0: the first layers of the text encoder, say,
    rank 1 | E1 F0 B0 -- F1 B1 --  .  .           for some samples of the next batch

`fill_by_shares` decides what goes where: a rank takes so many samples through all frozen layers that all ranks are
done at the same time. A layer that does not fit into what is left of a bubble runs for as many samples as do fit,
and for the others later; so a piece never delays the pipeline. `weave` puts the pieces into the programs.
DiffusionPipe's own policy is in `benchmarks/filling_policies/`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from graphlib import TopologicalSorter
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from typing import NamedTuple

from lightning_diffpipe.errors import ScheduleError
from lightning_diffpipe.planning.instruction import (
    Encode,
    ExchangeFrozen,
    ForwardNoGrad,
    Instruction,
    ReduceGradients,
)
from lightning_diffpipe.planning.profile import EncoderProfile
from lightning_diffpipe.planning.schedule import Schedule
from lightning_diffpipe.planning.timeline import Timeline

LOOKAHEAD_BATCHES = 2
"""Batches whose frozen work may run ahead, if bubbles are filled. With one, ranks that have done their share of it
wait for each other in every step."""

SHARES_PERIOD = 16
"""Batches over which the shares of the ranks are whole numbers of groups, where frozen work runs several batches
ahead: of one batch a rank takes two groups, of the next three. With 4 batches of 4 groups, ranks differed by up
to 1/32 of the frozen work in every step, about as long as they waited."""


@dataclass(frozen=True, slots=True)
class EncodePart:
    """The frozen work for samples `start` to `stop` of one microbatch, counted within it."""

    index: int
    rank: int
    microbatch: int
    start: int
    stop: int

    @property
    def num_samples(self) -> int:
        """Samples of this part."""
        return self.stop - self.start


def split_evenly(num_samples: int, num_parts: int) -> tuple[int, ...]:
    """Returns sizes of `num_parts` parts: as even as possible, larger ones first.

    Example:
        >>> split_evenly(10, 4)
        (3, 3, 2, 2)
    """
    small, num_larger = divmod(num_samples, num_parts)
    return (small + 1,) * num_larger + (small,) * (num_parts - num_larger)


def cheapest_group_size(
    seconds: Callable[[int], float], microbatch_sizes: Sequence[int], num_ranks: int
) -> int:
    """Returns the samples on which frozen layers run at a time, given the time of so many through all of them.

    Ranks take whole groups, within `SHARES_PERIOD` batches; half of one is lost in them on average. The size, a
    power of two of which each rank gets at least two, for which a rank's groups and that loss take least time.

    Example:
        >>> cheapest_group_size(lambda samples: samples, [16, 16], num_ranks=2)
        1
        >>> cheapest_group_size(lambda samples: 1 + samples, [16, 16], num_ranks=2)
        8
    """
    share = sum(microbatch_sizes) / num_ranks
    most = max(1, min(int(share) // 2, *microbatch_sizes))
    sizes = [1 << shift for shift in range(most.bit_length())]
    lost = 0.5 / SHARES_PERIOD if num_ranks > 1 else 0.0
    return min(sizes, key=lambda size: (share / size + lost) * seconds(size))


def group_size_of(microbatch_sizes: Sequence[int], num_ranks: int) -> int:
    """Returns the samples on which frozen layers run at a time, where nothing is known of what that costs.

    Small groups balance better, and large ones run faster: groups have four samples where each rank then gets two
    of them, and more where it gets four. Of sizes within half of that, the one with the fewest half-empty groups is
    taken.

    Example:
        >>> group_size_of([16, 16], num_ranks=2), group_size_of([4, 4], 4), group_size_of([128] * 4, 8)
        (4, 1, 16)
    """
    samples = sum(microbatch_sizes)
    most = max(samples // (4 * num_ranks), min(4, samples // (2 * num_ranks)))
    most = max(1, min(most, min(microbatch_sizes)))

    def unused(group_size: int) -> int:
        return sum(-size % group_size for size in microbatch_sizes)

    return min(range(most // 2 + 1, most + 1), key=lambda size: (unused(size), -size))


def num_groups_of(microbatch_sizes: Sequence[int], group_size: int) -> int:
    """Groups of a batch; a group never spans two microbatches."""
    return len(group_samples(microbatch_sizes, group_size))


def group_samples(microbatch_sizes: Sequence[int], group_size: int) -> tuple[int, ...]:
    """Returns samples of every group of a batch, in order.

    Example:
        >>> group_samples([6, 3], group_size=4)
        (4, 2, 3)
    """
    return tuple(
        min(group_size, size - start)
        for size in microbatch_sizes
        for start in range(0, size, group_size)
    )


def grouped_s(seconds: Callable[[float], float], samples: float, group_size: int | None) -> float:
    """Returns seconds for samples that run group by group; in one go if `group_size` is None.

    Example:
        >>> grouped_s(lambda samples: 1 + samples, 5, group_size=2)
        8
    """
    if group_size is None or samples <= group_size:
        return seconds(samples)
    groups, rest = divmod(samples, group_size)
    return groups * seconds(group_size) + (seconds(rest) if rest else 0)


def encode_parts(
    microbatch_sizes: Sequence[int],
    num_ranks: int,
    splittable: bool = True,
    group_size: int = 1,
    groups: Sequence[int] | None = None,
    num_encoding: int | None = None,
) -> tuple[EncodePart, ...]:
    """Shares the frozen work of a batch over ranks.

    Args:
        microbatch_sizes: Samples of every microbatch, in order.
        num_ranks: Ranks that share the work.
        splittable: Whether frozen layers may run for some samples of a microbatch only; if not, each is one group.
        group_size: Samples of a group, which stays on one rank; the last of a microbatch may have fewer.
        groups: Number of groups that each rank takes; as even as possible if not given.
        num_encoding: Number of ranks that share them then, the last ones; None for all.

    Returns:
        The parts in the order of the samples, one for each microbatch a rank's run of groups touches.

    Raises:
        ScheduleError: `groups` do not add up.

    Example:
        >>> [(p.rank, p.microbatch, p.start, p.stop) for p in encode_parts([4, 2], num_ranks=2)]
        [(0, 0, 0, 3), (1, 0, 3, 4), (1, 1, 0, 2)]
    """
    if num_ranks < 1 or group_size < 1 or any(size < 1 for size in microbatch_sizes):
        raise ScheduleError(
            f"cannot share microbatches of {tuple(microbatch_sizes)} samples in groups of "
            f"{group_size} over {num_ranks} ranks"
        )
    if not splittable:
        group_size = max(microbatch_sizes)
    total = num_groups_of(microbatch_sizes, group_size)
    if groups is None:
        sharing = num_encoding or num_ranks
        bounds = [rank * total // sharing for rank in range(sharing + 1)]
        groups = [0] * (num_ranks - sharing) + [stop - start for start, stop in pairwise(bounds)]
    if sum(groups) != total or len(groups) != num_ranks or min(groups) < 0:
        raise ScheduleError(f"{total} groups cannot be shared as {tuple(groups)}")
    ranks = (rank for rank, count in enumerate(groups) for _ in range(count))
    starts = (
        (microbatch, start)
        for microbatch, size in enumerate(microbatch_sizes)
        for start in range(0, size, group_size)
    )
    # By group, in the order of the samples: its rank, its microbatch, and its first sample there.
    by_group = ((rank, *start) for rank, start in zip(ranks, starts, strict=True))
    parts: list[EncodePart] = []
    for (rank, microbatch), run in groupby(by_group, key=itemgetter(0, 1)):
        firsts = [first for _, _, first in run]
        stop = min(firsts[-1] + group_size, microbatch_sizes[microbatch])
        parts.append(EncodePart(len(parts), rank, microbatch, firsts[0], stop))
    return tuple(parts)


MARGIN = 1e-9
"""Relative slack that keeps rounding from turning a full bubble into a delay."""


@dataclass(frozen=True, slots=True)
class FrozenPiece:
    """One layer of a frozen encoder for samples `start` to `stop` of a pipeline's next batch, on one rank.

    `index` is the number that `Encode` names, `encoder` the position of the encoder in the profile.
    """

    index: int
    rank: int
    encoder: int
    layer: int
    start: int
    stop: int

    @property
    def num_samples(self) -> int:
        """Samples of this piece."""
        return self.stop - self.start


class FrozenLayer(NamedTuple):
    """A layer of frozen work, with its address and its time."""

    encoder: int
    layer: int
    seconds: Callable[[float], float]

    def slower(self, factor: float) -> FrozenLayer:
        """Returns the same on a rank that takes so many times as long."""
        if factor == 1:
            return self
        return self._replace(seconds=lambda samples: factor * self.seconds(samples))


class Placed(NamedTuple):
    """A piece and where it goes: into the gap of its rank that begins at `gap_s`, or after all."""

    piece: FrozenPiece
    duration_s: float
    gap_s: float | None


@dataclass(frozen=True, slots=True)
class Filled:
    """A schedule with frozen work in its bubbles.

    Attributes:
        schedule: The programs, with `Encode` and a final `ExchangeFrozen`.
        leftover_s: Time after the pipeline, on the rank with most of it.
    """

    schedule: Schedule
    pieces: tuple[FrozenPiece, ...]
    piece_s: tuple[float, ...]
    leftover_s: float


def frozen_layers(
    encoders: Sequence[EncoderProfile], group_size: int | None = None
) -> tuple[FrozenLayer, ...]:
    """Lists all frozen layers, run on `group_size` samples at a time (None: all), encoders by their needs."""
    names = {encoder.name: index for index, encoder in enumerate(encoders)}
    needs = {names[encoder.name]: [names[name] for name in encoder.needs] for encoder in encoders}
    order = TopologicalSorter(needs).static_order()
    return tuple(
        FrozenLayer(index, number, partial(grouped_s, layer.forward_s.at, group_size=group_size))
        for index in order
        for number, layer in enumerate(encoders[index].layers)
    )


def gaps_by_rank(timeline: Timeline) -> list[list[tuple[float, float]]]:
    """Returns the intervals `(start, stop)` in which a rank has nothing to do, until the last is done."""
    gaps: list[list[tuple[float, float]]] = [[] for _ in range(timeline.num_ranks)]
    now = [0.0] * timeline.num_ranks
    for span in sorted(timeline.spans, key=lambda span: span.start_s):
        if span.start_s > now[span.rank]:
            gaps[span.rank].append((now[span.rank], span.start_s))
        now[span.rank] = max(now[span.rank], span.stop_s)
    end_s = timeline.iteration_s
    for rank_gaps, done_s in zip(gaps, now, strict=True):
        if end_s > done_s:
            rank_gaps.append((done_s, end_s))
    return gaps


def weave(schedule: Schedule, timeline: Timeline, placed: Sequence[Placed]) -> Filled:
    """Puts pieces, in the order in which they run, into the programs of the pipeline alone."""
    starts = {(span.rank, span.instruction): span.start_s for span in timeline.spans}
    has_gradients = not all(isinstance(i, ForwardNoGrad) for _, i in schedule.staged())
    reduction = (ReduceGradients(),) if has_gradients else ()
    programs, end_s = [], timeline.iteration_s
    for rank, program in enumerate(schedule.programs):
        queue = deque(p for p in placed if p.piece.rank == rank)
        woven: list[Instruction] = []
        for instruction in (*program, *reduction):
            # A reduction that takes no time has no span: it comes after all gaps.
            start_s = starts.get((rank, instruction), end_s)
            while queue and queue[0].gap_s is not None and queue[0].gap_s < start_s:
                woven.append(Encode(queue.popleft().piece.index))
            woven.append(instruction)
        rest = (Encode(p.piece.index) for p in queue)
        programs.append((*woven, *rest, ExchangeFrozen()))
    after = [0.0] * schedule.num_ranks
    for p in placed:
        if p.gap_s is None:
            after[p.piece.rank] += p.duration_s
    pieces, piece_s = tuple(p.piece for p in placed), tuple(p.duration_s for p in placed)
    return Filled(replace(schedule, programs=tuple(programs)), pieces, piece_s, max(after))


def fill_by_shares(
    timeline: Timeline,
    layers: Sequence[FrozenLayer],
    steps: Sequence[int],
    num_encoding: int | None = None,
    slowness: Sequence[float] = (),
) -> tuple[Placed, ...]:
    """Places the frozen work of a batch on the last `num_encoding` ranks, or on all.

    `steps` are samples of the pieces that a rank takes or leaves; `slowness` tells how many times as long each rank
    takes as the layers say.
    """
    placed: list[Placed] = []
    idle, gaps = timeline.idle_by_rank_s(), gaps_by_rank(timeline)
    step_s = sum(layer.seconds(sum(steps)) for layer in layers) / len(steps)
    bounds = (0, *accumulate(steps))
    first, first_rank = 0, timeline.num_ranks - (num_encoding or timeline.num_ranks)
    for rank, count in enumerate(shares(idle[first_rank:], step_s, len(steps)), first_rank):
        start, stop = bounds[first], bounds[first + count]
        rank_layers = [layer.slower(slowness[rank]) for layer in layers] if slowness else layers
        placed += _fill_rank(gaps[rank], rank, rank_layers, start, stop - start, len(placed))
        first += count
    return tuple(placed)


def shares(idle_s: Sequence[float], group_s: float, num_groups: int) -> tuple[int, ...]:
    """Returns how many groups of samples each rank encodes, so that all are done at the same time.

    Example:
        >>> shares([4.0, 2.0, 0.0], group_s=1.0, num_groups=6), shares([0, 0], 1.0, 3)
        ((4, 2, 0), (2, 1))
    """
    # Every rank works until the same moment: `idle + level`, which may be before its bubbles end.
    ranked = sorted(idle_s, reverse=True)
    level = 0.0
    for count in range(1, len(ranked) + 1):
        level = (num_groups * group_s - sum(ranked[:count])) / count
        if count == len(ranked) or level + ranked[count] <= 0:
            break
    exact = [max(idle + level, 0.0) / group_s if group_s else 0.0 for idle in idle_s]
    return largest_remainders(exact, num_groups)


def largest_remainders(exact: Sequence[float], total: int) -> tuple[int, ...]:
    """Returns whole numbers near these that add up to a total: those with the largest remainders are rounded up.

    Example:
        >>> largest_remainders([2.5, 0.75, 0.75], 4)
        (2, 1, 1)
    """
    whole = [int(n + 1e-9) for n in exact]
    by_rest = sorted(range(len(exact)), key=lambda i: (whole[i] - exact[i], i))
    for position in range(total - sum(whole)):
        whole[by_rest[position % len(whole)]] += 1
    return tuple(whole)


def even_shares(busy_s: Sequence[float], group_s: float, num_groups: int) -> tuple[int, ...]:
    """Returns the shares with which all ranks are done at the same time, if none of them ever waits.

    Example:
        >>> even_shares([1.0, 3.0], group_s=1.0, num_groups=4)
        (3, 1)
    """
    return shares([max(busy_s) - busy for busy in busy_s], group_s, num_groups)


def all_done_s(busy_s: Sequence[float], counts: Sequence[int], group_s: float) -> float:
    """Returns when all ranks are done if none of them ever waits, each with so many groups.

    Example:
        >>> all_done_s([1.0, 3.0], (3, 1), group_s=1.0)
        4.0
    """
    return max(busy + count * group_s for busy, count in zip(busy_s, counts, strict=True))


def _fill_rank(
    gaps: Sequence[tuple[float, float]],
    rank: int,
    layers: Sequence[FrozenLayer],
    first_sample: int,
    samples: int,
    index: int,
) -> list[Placed]:
    """Places the layers for one rank's samples, gap after gap; what is left comes after the pipeline."""
    todo = deque((layer, first_sample) for layer in layers if samples)
    stop, placed = first_sample + samples, list[Placed]()
    after_all: tuple[float | None, float] = None, math.inf
    for gap_s, left_s in (*((a, (b - a) * (1 - MARGIN)) for a, b in gaps), after_all):
        while todo:
            layer, start = todo[0]
            fitting = stop - start
            if layer.seconds(fitting) > left_s:
                fitting = bisect_right(range(1, fitting), left_s, key=layer.seconds)
            if not fitting:
                break
            address = rank, layer.encoder, layer.layer, start, start + fitting
            piece = FrozenPiece(index + len(placed), *address)
            placed.append(Placed(piece, layer.seconds(fitting), gap_s))
            left_s -= placed[-1].duration_s
            todo.popleft()
            if start + fitting < stop:
                todo.appendleft((layer, start + fitting))
    return placed
