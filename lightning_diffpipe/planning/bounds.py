"""Lower bounds on the step time of a pipeline, which prune the search, and the cuts that meet them.

Nothing reaches a stage of layers `first` to `stop` on `r` ranks until the earlier layers have forwarded a
microbatch; then its busiest rank has `M / r` microbatches to work off; then the last gradient must go back through
the earlier layers, or its own gradients must be summed. So

    step >= frozen + F(0, first) + work(first, stop) + max(B(0, first), sync(first, stop))

holds for every schedule of one backbone; with backwards in two parts without `B(0, first)`. The bound of a stage
grows with `stop` and falls with `first`. Hence a cut that meets a given time is found greedily: let every stage
reach as far as it can, if only so far as the stage before it.

Messages make a stage's need of memory go up and down with where it is cut: a U-Net's boundaries differ tenfold. So
of all cuts that fit the best is chosen stage by stage, from what each stage needs wherever it begins and ends
(`StageNeeds`).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

from lightning_diffpipe.planning.cost import CostModel, LayerRun
from lightning_diffpipe.planning.evaluation import Frame
from lightning_diffpipe.planning.memory import (
    StageLoad,
    Waiting,
    boundary_samples,
    recomputed_bytes,
    slot_bytes,
    state_slot_bytes,
)
from lightning_diffpipe.planning.partition import Cut, best_chain, greedy_cuts, least_limit
from lightning_diffpipe.planning.proposals import Shape
from lightning_diffpipe.planning.schedule import Placement
from lightning_diffpipe.planning.schedules.one_f_one_b import forwards_ahead

_SLACK = 1e-9
"""Relative; keeps rounding from hiding a stage that just fits."""


@dataclass(frozen=True)
class Bounds:
    """Lower bounds for the pipelines of a shape.

    Frozen layers run on `group_size` samples at a time, None for whole microbatches, and `fills` bubbles or runs
    before the pipeline, on the last `num_encoding` ranks.
    """

    model: CostModel
    shape: Shape
    group_size: int | None = None
    fills: bool = False
    num_encoding: int | None = None
    _works: dict[int, tuple[float, ...]] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def frozen_s(self) -> float:
        """Time of the frozen work before the pipeline."""
        if not self.model.profile.encoders or self.fills:
            return 0.0
        busy = [0.0] * self.shape.num_ranks
        ranks = self.shape.num_ranks, self.group_size, self.num_encoding or self.shape.num_ranks
        for part in self.model.encode_parts(self.shape.sizes, *ranks):
            busy[part.rank] += self.model.encode_s(part.num_samples, self.group_size)
        return max(busy)

    @cached_property
    def work_s(self) -> float:
        """The work of the pipeline divided by all ranks."""
        return self._work_s(1)[-1] / self.shape.num_ranks

    @cached_property
    def all_work_s(self) -> float:
        """All work divided by all ranks: with filling, what full bubbles would give."""
        if not (self.model.profile.encoders and self.fills):
            return self.work_s
        share = sum(self.shape.sizes) / self.shape.num_ranks
        return self.work_s + self.model.encode_s(share, self.group_size or self.shape.sizes[0])

    @cached_property
    def _end_s(self) -> tuple[float, ...]:
        """Returns for each layer the shortest time from there back to the first layer."""
        if self.shape.spec.splits_backward or self.model.is_folded:
            return (0.0,) * (self.model.num_layers + 1)
        return self.model.sums(self.shape.sizes[-1]).backward

    def _work_s(self, replicas: int) -> tuple[float, ...]:
        """Returns running sums over layers of the busiest replica's work."""
        if replicas not in self._works:
            self._works[replicas] = self.model.work_s(self.shape.sizes[::replicas])
        return self._works[replicas]

    def stage_s(self, first: int, stop: int, replicas: int, back_s: float = 0.0) -> float:
        """Returns the bound that one stage sets for the whole step; `back_s` on links to the first layer."""
        return self._stage_s_from(first, replicas, back_s)(stop)

    def _stage_s_from(
        self, first: int, replicas: int, back_s: float = 0.0
    ) -> Callable[[int], float]:
        """Returns `stage_s` for a given first layer, as a function of where the stage stops."""
        work, gradient_bytes = self._work_s(replicas), self.model.byte_sums("gradient_bytes")
        group, done_s = replicas * self.shape.num_pipelines, work[first]
        # The earliest time at which a microbatch can reach the layer.
        start_s = self.frozen_s + self.model.sums(self.shape.sizes[-1]).forward[first]
        end_s = self._end_s[first] + (0.0 if self.shape.spec.splits_backward else back_s)
        if group == 1:
            return lambda stop: start_s + work[stop] - done_s + max(end_s, 0.0)
        cluster = self.model.cluster
        links = {cluster.all_reduce, cluster.all_reduce_between_hosts or cluster.all_reduce}

        def bound_s(stop: int) -> float:
            num_bytes = gradient_bytes[stop] - gradient_bytes[first]
            sync_s = min([link.all_reduce_s(num_bytes, group) for link in links])
            return start_s + work[stop] - done_s + max(end_s, sync_s)

        return bound_s

    def cuts_s(self, cuts: Sequence[Cut]) -> float:
        """Returns the bound of a whole cut; counts the way over every link to a stage and back as well.

        Frozen work counts only where it runs before the pipeline.
        """
        bound_s, link_s = self.work_s, 0.0
        work = self._work_s(1)
        if len(self.model.starts) > 1:
            assert self._placement is not None, (
                "chains in opposite directions have a stage on every rank"
            )
            ranks = [self._placement.stages_of(rank) for rank in range(self.shape.num_ranks)]
            busiest = max(sum(work[cuts[s][1]] - work[cuts[s][0]] for s in its) for its in ranks)
            return max(bound_s, self.frozen_s + busiest)
        cluster, size = self.model.cluster, self.shape.sizes[-1]
        links = (cluster.p2p, cluster.p2p_between_hosts or cluster.p2p)
        # Where ranks hold several stages, skips may stay where they are.
        stays_on_rank = bool(self._placement and self.model.backbone.skips)
        for stage, (first, stop, replicas) in enumerate(cuts):
            more_s = 0.0
            if self._placement:
                (rank,) = self._placement.stage_ranks[stage]
                its_first, *later = self._placement.stages_of(rank)
                if stage != its_first:
                    continue  # The later stages of every rank are counted with its first one.
                # Until that is reached a rank has nothing to do, nor after that stage's last backward.
                more_s = sum(work[cuts[s][1]] - work[cuts[s][0]] for s in later)
            bound_s = max(bound_s, link_s + more_s + self.stage_s(first, stop, replicas, link_s))
            if stop < self.model.num_layers and not stays_on_rank:
                num_bytes = self.model.boundary_bytes(LayerRun(first, stop), size)
                link_s += min(link.seconds(num_bytes) for link in links)
        return bound_s

    @cached_property
    def _placement(self) -> Placement | None:
        return self.shape.placement() if self.shape.spec.place else None

    def reach(self, first: int, replicas: int, later_ranks: int, limit_s: float) -> int:
        """Returns how far a stage from `first` on can reach to be bound by `limit_s`, and to fit into memory.

        Its memory is that of weights and activations, with that many ranks of the pipeline after it.
        """
        stop, limit = self.model.num_layers, self.model.cluster.memory_bytes
        if limit is not None:
            alive = self.alive_sizes(replicas, later_ranks)
            shared = self.model.shards_optimizer  # else one sum serves all
            num_holders = replicas * self.shape.num_pipelines if shared else 1
            needs = self.model.need_bytes(sum(alive), len(alive), num_holders)
            encodes = later_ranks < (self.num_encoding or self.shape.num_ranks)
            left = limit - encodes * self.model.frozen_bytes + needs[first]
            stop = bisect_right(needs, left * (1 + _SLACK)) - 1
        stops, bound_s = range(first + 1, stop + 1), self._stage_s_from(first, replicas)
        return first + bisect_right(stops, limit_s * (1 + _SLACK), key=bound_s)

    def alive_sizes(self, replicas: int, later_ranks: int) -> tuple[int, ...]:
        """Returns samples of the microbatches whose activations a first replica keeps at least, at a time."""
        sizes = self.shape.sizes[::replicas]
        num_ahead = (
            len(sizes) if self.shape.spec.keeps_all else forwards_ahead(replicas, later_ranks)
        )
        return sizes[: num_ahead + 1]

    def best_cuts(
        self, replicas: Sequence[int], limit_s: float = math.inf
    ) -> tuple[float, tuple[Cut, ...]] | None:
        """Returns the cuts with the smallest bound, without links and messages, given the ranks of every stage.

        Returns:
            A lower bound on the step, for any cuts with these replicas, and cuts that meet it within a thousandth;
            None if there are none within `limit_s` or memory.
        """
        num_layers, later = self.model.num_layers, ranks_after(replicas)

        def within(limit: float) -> tuple[int, ...] | None:
            reach = lambda stage, first: self.reach(first, replicas[stage], later[stage], limit)
            return greedy_cuts(num_layers, len(replicas), reach)

        if self.work_s > limit_s:
            return None
        most_s = max(self.stage_s(0, num_layers, r) for r in set(replicas))
        best = least_limit(within, self.frozen_s, min(limit_s, most_s), 1e-3)
        return best and (best[0], tuple(zip(best[1], best[1][1:], replicas, strict=False)))


def ranks_after(replicas: Sequence[int]) -> list[int]:
    """Returns for each stage the ranks of the stages after it."""
    return [sum(replicas[stage + 1 :]) for stage in range(len(replicas))]


@dataclass(frozen=True)
class StageNeeds:
    """Bytes that stages of a chain need, one stage on each rank.

    Attributes:
        held: Stored activations and other loads of the ranks of each stage, each pair once.
        limits: Memory of the smallest rank of each stage, in bytes.
        holders: Number of ranks of all pipelines that hold each stage.
        boundary_bytes: Bytes of a sample that cross a cut before every layer, and after the last.
    """

    model: CostModel
    replicas: tuple[int, ...]
    held: tuple[frozenset[tuple[Waiting, StageLoad]], ...]
    limits: tuple[float, ...]
    holders: tuple[int, ...]
    boundary_bytes: tuple[float, ...]

    @classmethod
    def of(cls, model: CostModel, frame: Frame) -> StageNeeds:
        """Reads the needs off what does not depend on where a proposal cuts."""

        def held_by(stage: int, rank: int) -> tuple[Waiting, StageLoad]:
            load = frame.loads[rank].of_stage(model, stage) if frame.loads else StageLoad()
            return frame.pipeline.peak(rank)[stage], load

        ranks = frame.pipeline.placement.stage_ranks
        loads = (frozenset(held_by(stage, r) for r in group) for stage, group in enumerate(ranks))
        stops = range(1, model.num_layers + 1)
        boundaries = 0.0, *(model.boundary_bytes(LayerRun(0, stop), 1) for stop in stops)
        count, memory_of = frame.pipeline.placement.num_ranks, model.cluster.memory_of
        limits = (min(memory_of(r, count) or math.inf for r in group) for group in ranks)
        holders = frame.pipeline.holders if model.shards_optimizer else (1,) * len(ranks)
        return cls(model, tuple(map(len, ranks)), tuple(loads), tuple(limits), holders, boundaries)

    def need_bytes(self, stage: int, first: int, stops: range) -> list[float]:
        """Returns what a stage from `first` to each of `stops` needs on its fullest rank.

        An exchange counts with what is read here, not with what is packed for others, which depends on all cuts.
        """
        model, boundary, rows = self.model, self.boundary_bytes, []
        num_holders = self.holders[stage]
        resident = model.need_bytes(0, 0, num_holders)
        for waiting, load in self.held[stage]:
            prefix = model.need_bytes(*waiting, num_holders)
            before, after = boundary_samples(waiting)
            fixed = load.resident + load.concurrent + before * boundary[first] - prefix[first]
            needs = [fixed + prefix[stop] + after * boundary[stop] for stop in stops]
            if model.recomputes:
                runs = [LayerRun(first, stop) for stop in stops]
                again = (recomputed_bytes(model, r, waiting) + slot_bytes(model, r) for r in runs)
                needs = [need + more for need, more in zip(needs, again, strict=True)]
            if model.offloads_optimizer:
                slots = (state_slot_bytes(model, [LayerRun(first, stop)]) for stop in stops)
                needs = [need + more for need, more in zip(needs, slots, strict=True)]
            if load.read or load.made:
                alone = load.resident + load.made - resident[first]
                of_sample = model.read_bytes_from(first)
                read = [load.read * of_sample[stop] for stop in stops]
                needs = [
                    max(need + reads, alone + resident[stop] + max(load.working, 2 * reads))
                    for stop, need, reads in zip(stops, needs, read, strict=True)
                ]
            if load.before:
                needs = [max(need, load.before) for need in needs]
            rows.append(needs)
        return rows[0] if len(rows) == 1 else [max(column) for column in zip(*rows, strict=True)]

    def fastest(self, bounds: Bounds, limit_s: float) -> tuple[Cut, ...] | None:
        """Finds, of the cuts that fit into memory, that of the smallest bound; None if none is below `limit_s`."""
        num_layers = self.model.num_layers
        reaches = [
            partial(bounds.reach, replicas=r, later_ranks=later, limit_s=limit_s)
            for r, later in zip(self.replicas, ranks_after(self.replicas), strict=True)
        ]
        # From the last stage: where it may begin if all others get to the end.
        starts = [num_layers]
        for reach in reversed(reaches):
            starts.append(bisect_left(range(num_layers), starts[-1], key=reach))

        def fitting(stage: int, first: int, stops: range) -> Iterator[tuple[int, float]]:
            earliest = max(stops.start, starts[-stage - 2])
            stops = range(earliest, min(stops.stop, reaches[stage](first) + 1))
            for stop, need in zip(stops, self.need_bytes(stage, first, stops), strict=True):
                if round(need) <= self.limits[stage]:
                    yield stop, bounds.stage_s(first, stop, self.replicas[stage])

        return best_chain(num_layers, self.replicas, fitting, limit_s)

    def smallest(self, below_bytes: float = math.inf) -> tuple[Cut, ...] | None:
        """Finds the cut whose fullest rank needs least; None if all need `below_bytes` or more."""

        def needed(stage: int, first: int, stops: range) -> Iterator[tuple[int, float]]:
            prefix = self.model.need_bytes(*max(self.held[stage])[0], self.holders[stage])
            most = below_bytes - min(load.resident for _, load in self.held[stage]) + prefix[first]
            stops = range(stops.start, min(stops.stop, bisect_right(prefix, most)))
            return zip(stops, self.need_bytes(stage, first, stops), strict=True)

        return best_chain(self.model.num_layers, self.replicas, needed, below_bytes)
