"""Cutting a chain of layers into stages, each on one or more ranks.

A stage is a run of consecutive layers. Its time on one microbatch bounds the pace of the whole pipeline, its
gradients must be summed over its replicas; a good cut makes both small at once. Two maxima over stages do not
compose into one number, so that the dynamic program keeps for each state the Pareto front of (slowest stage,
longest synchronisation) instead of the best sum: with the sum alone it would miss the optimum.

Several backbones that are trained by one step are chains, each cut into a stage for every rank, in opposite
directions. What one chain leaves idle the other uses, so that the stages of both on a rank count together:

    rank              0        1        2             the joint partition makes the largest sum
    backbone A      a0 a1    a2 a3      a4            of what a rank has of A and of B as small
    backbone B      b4 b5      b3     b0 b1 b2        as can be

Source:
    DiffusionPipe, Tian et al. (2024), https://arxiv.org/abs/2405.01248: the recurrences, and the idea of opposite
    directions; the front, and the joint partition, are ours.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TypeVar

from lightning_diffpipe.errors import PartitionError
from lightning_diffpipe.planning.codec import Node, read_fields, stored
from lightning_diffpipe.planning.schedule import Placement


@dataclass(frozen=True, slots=True)
class Stage:
    """A run of consecutive layers placed together.

    Attributes:
        index: Position in the pipeline; stage 0 reads the noisy latent.
        num_replicas: Ranks that hold a copy and take the microbatches in turn.
        ranks: Their positions in the pipeline; empty means those after the ranks of the stage before.
            Named where one rank holds several stages.
        pass_index: Number of the pass its calls belong to; the layers of stages of other passes with the same
            position are the same.
        gradient: Whether a gradient comes back to it; else it forwards only.
    """

    index: int
    backbone: str
    first_layer: int
    last_layer: int
    num_replicas: int = stored(1, minimum=1, always=True)
    ranks: tuple[int, ...] = ()
    pass_index: int = stored(0, key="pass")
    gradient: bool = True
    recomputed: tuple[int, ...] = ()
    streamed: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        odd = [i for i in self.recomputed if not self.first_layer <= i <= self.last_layer]
        if odd:
            raise PartitionError(
                f"stage {self.index} recomputes layer {odd[0]}, but has layers {self.first_layer}-{self.last_layer}"
            )
        if unlike := sorted({*self.streamed} - {*self.recomputed}):
            raise PartitionError(
                f"stage {self.index} streams layer {unlike[0]}, which it does not recompute; a backward needs the "
                "weights again"
            )
        if not 0 <= self.first_layer <= self.last_layer:
            raise PartitionError(
                f"stage {self.index} needs at least one layer; "
                f"got layers {self.first_layer}-{self.last_layer}"
            )
        if self.num_replicas < 1:
            raise PartitionError(
                f"stage {self.index} needs at least one replica; got {self.num_replicas}"
            )
        if self.ranks and len(self.ranks) != self.num_replicas:
            raise PartitionError(
                f"stage {self.index} has {self.num_replicas} replicas, "
                f"but names {len(self.ranks)} ranks: {list(self.ranks)}"
            )

    @classmethod
    def from_node(cls, node: Node) -> Stage:
        """Reads the JSON form; ranks that are named are replicas."""
        if "ranks" in node and "num_replicas" not in node and isinstance(node.value, dict):
            replicas = len(list(node["ranks"].elements()))
            node = replace(node, value=node.value | {"num_replicas": replicas})
        return read_fields(cls, node)

    @property
    def num_layers(self) -> int:
        """Layers of this stage."""
        return self.last_layer - self.first_layer + 1

    @property
    def stop(self) -> int:
        """One past the last layer."""
        return self.last_layer + 1

    def __str__(self) -> str:
        ranks = f" on {self.num_replicas} ranks" if self.num_replicas > 1 else ""
        return f"stage {self.index}: layers {self.first_layer}-{self.last_layer}{ranks}"


StageValues = Callable[[int, int, range], Iterable[tuple[int, float]]]
"""Maps a stage, its first layer and where it may stop to the stops that are possible, and what each costs."""

Cut = tuple[int, int, int]
"""A stage to be: (first layer, one past the last layer, replicas)."""

StageCost = Callable[[int, int, int], tuple[float, float]]
"""Maps a cut to (time of one microbatch, synchronisation time that nothing hides)."""


@dataclass(frozen=True, slots=True)
class Partition:
    """A way to cut a chain, with W, the time of the slowest stage, and Y, the longest sum that nothing hides."""

    slowest_s: float
    sync_s: float
    cuts: tuple[Cut, ...]


def check_partition(num_layers: int, num_stages: int, num_ranks: int) -> None:
    """Raises PartitionError for fewer layers, or fewer ranks, than stages."""
    if not 1 <= num_stages <= num_layers:
        raise PartitionError(
            f"cannot cut {num_layers} layers into {num_stages} stages; "
            f"choose num_stages between 1 and {num_layers}. Stages are cut from the first trained layer on; frozen "
            "layers before it run on all ranks. With num_stages=1 these share the samples of a batch"
        )
    if num_ranks < num_stages:
        raise PartitionError(
            f"cannot place {num_stages} stages on {num_ranks} ranks; "
            f"choose num_stages between 1 and {num_ranks}, or a schedule such as interleaved, "
            "which gives ranks several stages"
        )


def placement_of(stages: Sequence[Stage]) -> Placement:
    """Returns where stages run: on the ranks they name, else on consecutive ones.

    Raises:
        PartitionError: Some stages name their ranks and others do not.
        ScheduleError: The ranks are not numbered from 0 without gaps.
    """
    firsts = tuple(s.index for s in stages if not s.index or s.first_layer == 0)
    named = [stage for stage in stages if stage.ranks]
    if named and len(named) < len(stages):
        unnamed = next(stage.index for stage in stages if not stage.ranks)
        raise PartitionError(
            f"stage {named[0].index} names its ranks, but stage {unnamed} does not; name all or none"
        )
    if named:
        no_grad = frozenset(stage.index for stage in stages if not stage.gradient)
        return Placement(tuple(stage.ranks for stage in stages), firsts, no_grad)
    replicas = [stage.num_replicas for stage in stages]
    return Placement(Placement.of_replicas(replicas).stage_ranks, firsts)


def partition_fronts(
    num_layers: int, num_ranks: int, max_stages: int, stage_cost: StageCost
) -> dict[tuple[int, int], tuple[Partition, ...]]:
    """Finds all Pareto-optimal ways to cut L layers, for all numbers of stages up to S and of ranks up to D.

    Returns:
        For each `(stages, ranks)` the partitions of which none is better in both W and Y. Takes O(L² S D²) steps
        times the size of a front.
    """
    cost = {
        (first, stop, r): stage_cost(first, stop, r)
        for first in range(num_layers)
        for stop in range(first + 1, num_layers + 1)
        for r in range(1, num_ranks + 1)
    }
    front: dict[tuple[int, int], tuple[Partition, ...]] = {
        (stop, d): (Partition(*cost[0, stop, d], ((0, stop, d),)),)
        for stop in range(1, num_layers + 1)
        for d in range(1, num_ranks + 1)
    }
    out = {(1, d): front[num_layers, d] for d in range(1, num_ranks + 1)}
    for s in range(2, max_stages + 1):
        front = {
            (stop, d): _pareto(
                (max(before.slowest_s, t0), max(before.sync_s, y), before, (first, stop, r))
                for first in range(s - 1, stop)
                for r in range(1, d - s + 2)
                for t0, y in [cost[first, stop, r]]
                for before in front.get((first, d - r), ())
            )
            for stop in range(s, num_layers + 1)
            for d in range(s, num_ranks + 1)
        }
        out |= {(s, d): front[num_layers, d] for d in range(s, num_ranks + 1)}
    return out


def _pareto(points: Iterable[tuple[float, float, Partition, Cut]]) -> tuple[Partition, ...]:
    front, lowest = [], math.inf
    for slowest, sync, before, cut in sorted(points, key=lambda p: (p[0], p[1], p[3])):
        if sync < lowest - 1e-12:
            front.append(Partition(slowest, sync, (*before.cuts, cut)))
            lowest = sync
    return tuple(front)


def minimax_cuts(times: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Cuts a chain so that the slowest stage is as fast as possible, exactly; returns first layers of stages.

    Raises:
        PartitionError: More stages than layers.

    Example:
        >>> minimax_cuts([1, 1, 1, 3, 1, 1], num_stages=3)
        (0, 3, 4)
    """
    check_partition(len(times), num_stages, num_stages)
    ends = [0.0, *accumulate(times)]

    def within(limit: float) -> tuple[int, ...] | None:
        reach = lambda _, first: bisect_right(ends, ends[first] + limit) - 1
        return greedy_cuts(len(times), num_stages, reach)

    best = least_limit(within, ends[-1] / num_stages, ends[-1] * (1 + 1e-9), 1e-9)
    assert best is not None
    return best[1][:-1]


def greedy_cuts(
    num_layers: int, num_stages: int, reach: Callable[[int, int], int]
) -> tuple[int, ...] | None:
    """Cuts a chain into non-empty stages, each as long as it may be.

    `reach` gives one past the last layer that a stage may hold, given its number and its first layer; no less for a
    later first layer. Returns the first layer of every stage and the number of layers; None if there is no way.
    """
    stops, first = list[int](), 0
    for stage in range(num_stages):
        first = max(first, min(reach(stage, first), num_layers - (num_stages - stage - 1)))
        if first <= stage:
            return None
        stops.append(first)
    if first < num_layers:
        return None
    for stage in reversed(range(num_stages - 1)):  # those that hold nothing take a layer before
        stops[stage] = min(stops[stage], stops[stage + 1] - 1)
    edges = (0, *stops)
    if all(b <= reach(stage, a) for stage, (a, b) in enumerate(pairwise(edges))):
        return edges
    # A layer is too much for one stage and not for a later one, and the layer before is too much for it, too.
    ways: dict[int, tuple[int, ...]] = {0: (0,)}
    for stage in range(num_stages):
        most = num_layers - (num_stages - stage - 1)
        ways = {
            stop: (*firsts, stop)
            for first, firsts in ways.items()
            for stop in range(first + 1, min(reach(stage, first), most) + 1)
        }
    return ways.get(num_layers)


_T = TypeVar("_T")


def least_limit(
    within: Callable[[float], _T | None], low: float, high: float, precision: float
) -> tuple[float, _T] | None:
    """Finds the least limit for which there is a way, by bisection down to a relative precision.

    `within` returns a way within a limit, or None: always below `low`. Returns a limit below which there is no way,
    and a way little above it; None if there is none within `high`.
    """
    if (best := within(high)) is None:
        return None
    while high - low > precision * high:
        middle = (low + high) / 2
        if (way := within(middle)) is None:
            low = middle
        else:
            high, best = middle, way
    return low, best


def nested_cuts(
    times: Sequence[float], num_ranks: int, most: float, crossing: Callable[[int, int], float]
) -> tuple[int, ...] | None:
    """Cuts a chain for V placement so that least crosses, with at most so much work on every rank.

    Args:
        times: Time of every layer.
        num_ranks: R. Rank `r` gets the `r`-th stage of 2 R from the front and that from the back.
        most: The most work that a rank may get.
        crossing: Bytes that cross two cuts, before a layer and before a later one, between which all inner ranks
            have their layers.

    Returns:
        The first layer of every stage; None if there is no such way.

    Example:
        >>> nested_cuts([1, 1, 1, 1, 1, 1], 2, most=3, crossing=lambda a, b: abs(a - 2))
        (0, 2, 4, 5)
    """
    ends = [0.0, *accumulate(times)]
    most *= 1 + 1e-9
    crosses = lru_cache(maxsize=None)(crossing)
    level: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {(0, len(times)): (0.0, ())}
    for inner in range(num_ranks - 1, 0, -1):
        reached: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {}
        for (a, b), (cost, edges) in level.items():
            for c in range(a + 1, b):
                left = most - (ends[c] - ends[a])
                if left < 0:
                    break
                lowest = max(c + 2 * inner, bisect_left(ends, ends[b] - left))
                highest = min(b - 1, bisect_right(ends, ends[c] + inner * most) - 1)
                for d in range(lowest, highest + 1):
                    dearer = cost + crosses(c, d)
                    if (c, d) not in reached or dearer < reached[c, d][0]:
                        reached[c, d] = dearer, (*edges, c, d)
        level = reached
    ways = [
        (cost, a, b, edges) for (a, b), (cost, edges) in level.items() if ends[b] - ends[a] <= most
    ]
    if not ways:
        return None
    _, a, b, edges = min(ways)
    turn = min(max(bisect_left(ends, (ends[a] + ends[b]) / 2), a + 1), b - 1)
    return (0, *sorted({*edges, turn}))


def best_chain(
    num_layers: int, replicas: Sequence[int], values: StageValues, below: float = math.inf
) -> tuple[Cut, ...] | None:
    """Cuts a chain so that the dearest stage is as cheap as possible, whatever stages cost. Exact.

    `values` gives the cost of a stage by where it stops; a stop that is left out is not possible. Only stages that
    cost less than `below` are of interest. Returns None if there is no such way.

    Example:
        >>> times = [1, 1, 1, 3, 1, 1]
        >>> best_chain(6, (1, 1, 1), lambda stage, first, stops: [(s, sum(times[first:s])) for s in stops])
        ((0, 3, 1), (3, 4, 1), (4, 6, 1))
    """
    best: dict[int, tuple[float, tuple[Cut, ...]]] = {0: (-math.inf, ())}
    for stage, r in enumerate(replicas):
        later = len(replicas) - stage - 1
        reached: dict[int, tuple[float, tuple[Cut, ...]]] = {}
        for first, (before, cuts) in best.items():
            stops = range(first + 1 if later else num_layers, num_layers - later + 1)
            for stop, value in values(stage, first, stops):
                dearest = max(before, value)
                if dearest < below and (stop not in reached or dearest < reached[stop][0]):
                    reached[stop] = dearest, (*cuts, (first, stop, r))
        best = reached
    return best[num_layers][1] if num_layers in best else None


_FIRST_SLACK = 0.02
"""Share above the mean load that the fullest rank may have, for chains in opposite directions, at first."""


def chain_cuts(
    weights: Sequence[float], starts: Sequence[int], num_stages: int, slack: float = 0.0
) -> tuple[int, ...]:
    """Cuts all chains, neighbours in pairs, so that the fullest rank has as little as can be.

    Returns the first layer of every stage; raises PartitionError if a chain has fewer layers than stages.
    """
    firsts: list[int] = []
    chains = list(pairwise((*starts, len(weights))))
    for (first, stop), other in zip(chains[::2], [*chains[1::2], None], strict=False):
        if other is None:
            firsts += [first + cut for cut in minimax_cuts(weights[first:stop], num_stages)]
            continue
        down, up = opposite_cuts(weights[first:stop], weights[slice(*other)], num_stages, slack)
        firsts += [first + cut for cut in down] + [other[0] + cut for cut in up]
    return tuple(firsts)


def opposite_cuts(
    down: Sequence[float], up: Sequence[float], num_ranks: int, slack: float = 0.0
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Cuts two chains that run in opposite directions so that the fullest rank has as little as can be. Exact.

    The state after some ranks is how many layers of either chain they hold. Only states are visited in which no
    rank needs more than a limit, a little above an even share; where there is no way, the limit is raised. Of all
    ways that are as good, the one is taken whose stages are most even within each chain: then they fill and drain
    fastest.

    Args:
        down: Weight of every layer of the chain from the first rank to the last.
        up: Weight of every layer of the chain from the last rank to the first.
        num_ranks: Ranks; each gets a layer or more of either.
        slack: Share by which the fullest rank may have more than necessary, so that stages are more even.

    Returns:
        The first layer of every stage of both chains.

    Raises:
        PartitionError: A chain has fewer layers than there are ranks.

    Example:
        >>> opposite_cuts([1, 1, 1, 1], [4, 1, 1, 1, 1], num_ranks=2)
        ((0, 2), (0, 1))
    """
    if min(len(down), len(up)) < num_ranks:
        raise PartitionError(
            f"cannot cut backbones of {len(down)} and {len(up)} layers into {num_ranks} stages each; use fewer "
            "ranks for each pipeline, or a finer probe (a smaller max_share)"
        )
    a, b = [0.0, *accumulate(down)], [0.0, *accumulate(reversed(up))]
    fullest = lambda so_far, one, other: max(so_far, one + other)
    even_share, above, best = (a[-1] + b[-1]) / num_ranks, _FIRST_SLACK, None
    while best is None:
        best = _cheapest_cuts(a, b, num_ranks, even_share * (1 + above) + 1e-12, fullest)
        above *= 2
    most = best[0] * (1 + max(slack, 1e-9))
    uneven = lambda so_far, one, other: so_far + one * one + other * other
    _, edges = _cheapest_cuts(a, b, num_ranks, most, uneven) or best
    last = len(up)
    return tuple(i for i, _ in edges[:-1]), tuple(last - j for _, j in reversed(edges[1:]))


_CostAndCuts = tuple[float, tuple[tuple[int, int], ...]]


def _cheapest_cuts(
    a: Sequence[float],
    b: Sequence[float],
    num_ranks: int,
    limit: float,
    cost: Callable[[float, float, float], float],
) -> _CostAndCuts | None:
    """Cuts two chains, given as running sums, at least cost, so that no rank has more than `limit` of both.

    The sums of the second chain are from its end. `cost(so_far, one, other)` adds a rank with `one` of the first
    chain and `other` of the second to the cost of the ranks before it. Returns the cost and, for each rank and the
    end, the numbers of layers of both chains before it; None if there are no such cuts.
    """
    level: dict[tuple[int, int], _CostAndCuts] = {(0, 0): (0.0, ((0, 0),))}
    for later in range(num_ranks - 1, -1, -1):
        reached: dict[tuple[int, int], _CostAndCuts] = {}
        least = a[-1] + b[-1] - (later + 1e-9) * limit  # what ranks up to this one must have
        for (i, j), (so_far, edges) in level.items():
            for k in range(i + 1 if later else len(a) - 1, len(a) - later):
                left = limit - (a[k] - a[i])
                if left < 0:
                    break
                lowest = max(j + 1 if later else len(b) - 1, bisect_left(b, least - a[k]))
                for m in range(lowest, min(len(b) - later, bisect_right(b, b[j] + left))):
                    value = cost(so_far, a[k] - a[i], b[m] - b[j])
                    if (k, m) not in reached or value < reached[k, m][0]:
                        reached[k, m] = value, (*edges, (k, m))
        level = reached
    return level.get((len(a) - 1, len(b) - 1))
