"""The search for cuts: of one shape after another, the cuts with the fastest step that fit into memory.

Bounds propose, the simulator decides. Shapes are tried in the order of a rough estimate; a shape whose
lower bound is no better than the best step found so far is skipped without a simulation. Where there
are few ways to cut, all are tried, cheapest bound first, so that the result is the optimum of the
simulator. Where there are many, layers of the cuts with the smallest bound are moved for as long as that helps.

**Lower bounds** on the step time. Nothing reaches a stage of layers `first` to `stop` on `r` ranks until the
earlier layers have forwarded a microbatch; then its busiest rank has `M / r` microbatches to work off; then the
last gradient must go back through the earlier layers, or its own gradients must be summed. So

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
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice, pairwise

from lightning_diffpipe.planning.cluster import Cluster
from lightning_diffpipe.planning.cost import CostModel, LayerRun
from lightning_diffpipe.planning.evaluation import (
    UNFILLED_SHARE,
    Evaluator,
    Frame,
    Proposal,
    preference_s,
)
from lightning_diffpipe.planning.memory import (
    StageLoad,
    Waiting,
    boundary_samples,
    recomputed_bytes,
    slot_bytes,
    state_slot_bytes,
)
from lightning_diffpipe.planning.options import PlanOptions
from lightning_diffpipe.planning.partition import (
    Cut,
    best_chain,
    chain_cuts,
    greedy_cuts,
    least_limit,
    minimax_cuts,
    nested_cuts,
)
from lightning_diffpipe.planning.plan import PipelinePlan
from lightning_diffpipe.planning.proposals import (
    Shape,
    all_cuts,
    baseline_cuts,
    count_of_cuts,
    is_long,
    replicas_of,
    shapes,
)
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


MOST_CUTS_TRIED = 500
"""Up to so many ways to cut a shape, all are considered."""

HOPELESS = 1.05
"""Cuts whose bound is so many times the best step are not simulated."""

WORTH_MOVING = 1.2
"""Layers are moved from cuts whose step is below so many times the best; with slow links that gains up to 18 %."""

UNEVEN = (1.02, 1.05)
"""Loads of the fullest rank, in units of the mean, up to which cuts that send least are tried if there are skips;
in units of the least possible for the most even stages of chains in opposite directions."""

MOST_FINALISTS = 4
"""Number of the best proposals that are filled and simulated."""


def fastest(search: Search) -> list[PipelinePlan]:
    """Returns the best proposals as plans; none if nothing fits into memory."""
    model, options = search.model, search.options
    for shape in sorted(shapes(model, options), key=search.order):
        if search.is_over or search.is_done_with(shape):
            break
        search.try_shape(shape)
    # Filling is simulated at last only; until then an estimate of it ranks the proposals.
    finalists = search.history[-MOST_FINALISTS if search.evaluator.fills else -1 :]
    plans = [search.evaluator.plan(proposal) for proposal in reversed(finalists)]
    return [plan for plan in plans if fits(plan, model.cluster)]


def fits(plan: PipelinePlan, cluster: Cluster) -> bool:
    """Returns whether every rank of a plan has enough memory."""
    needs = plan.planned.peak_memory_bytes
    limits = (cluster.memory_of(rank, len(needs)) for rank in range(len(needs)))
    return all(limit is None or need <= limit for need, limit in zip(needs, limits, strict=True))


@dataclass
class Search:
    """State of a search: the best proposals so far.

    Attributes:
        best: The fastest proposal that fits into memory.
        best_s: Seconds of a step of `best`; until there is one, the step time to beat.
        history: All proposals that were the best for a while, in order.
        until_s: Time of `time.perf_counter()` at which to stop.
    """

    evaluator: Evaluator
    best: Proposal | None = None
    best_s: float = math.inf
    history: list[Proposal] = field(default_factory=list)
    until_s: float = math.inf

    @property
    def model(self) -> CostModel:
        """The cost model."""
        return self.evaluator.model

    @property
    def options(self) -> PlanOptions:
        """Wishes and limits."""
        return self.evaluator.options

    @property
    def is_over(self) -> bool:
        """Whether the time is used up."""
        return time.perf_counter() > self.until_s

    def bounds(self, shape: Shape) -> Bounds:
        """Returns lower bounds for a shape."""
        group_size = self.evaluator.group_size(shape)
        fills, num_encoding = self.evaluator.fills, self.evaluator.num_encoding(shape)
        return Bounds(self.model, shape, group_size, fills, num_encoding)

    def least_s(self, bounds: Bounds, pipeline_s: float) -> float:
        """Returns a lower bound on `Evaluator.step_s`, for cuts whose pipeline alone takes that long."""
        if not self.evaluator.fills:
            return pipeline_s
        return preference_s(max(pipeline_s, bounds.all_work_s), pipeline_s)

    def _most_s(self, bounds: Bounds) -> float:
        """Inverts `least_s`: returns the longest time of a pipeline alone with which a step may be the best."""
        if not self.evaluator.fills:
            return self.best_s
        left_s = self.best_s - bounds.all_work_s
        return min(self.best_s / (1 + UNFILLED_SHARE), left_s / UNFILLED_SHARE)

    def order(self, shape: Shape) -> tuple[bool, float, int, int]:
        """Returns by what shapes are sorted: long ones serve only where nothing else fits; the shortest do.

        The others are tried in the order of a guess at their steps; no result depends on it but the time.
        """
        num_microbatches = len(shape.sizes)
        if is_long(shape):
            return True, num_microbatches, shape.num_stages, num_microbatches
        sums = self.model.sums(shape.sizes[0])
        work_s = sums.forward[-1] + sums.backward[-1]
        steps = num_microbatches + (shape.num_stages - 1) / shape.stages_per_rank
        guess_s = self.evaluator.encode_share_s(shape) + steps * work_s / shape.num_ranks
        return False, guess_s, shape.num_stages, num_microbatches

    def try_shape(self, shape: Shape) -> None:
        """Improves `best` if some way to cut this shape does."""
        bounds = self.bounds(shape)
        may_be_better = self._is_better(self.least_s(bounds, bounds.work_s))
        limit = self.model.cluster.memory_bytes
        if not may_be_better or (limit is not None and self.least_bytes(shape) > limit):
            return
        every = all_cuts(self.model, self.options, shape)
        few = count_of_cuts(self.model, shape) <= MOST_CUTS_TRIED
        if self.options.partition != "auto":
            self._try_all(shape, baseline_cuts(self.model, self.options, shape))
        elif not shape.spec.flushes and shape.num_ranks > 1:
            # The slowest stage or link sets the pace, which PipeDream's recurrence makes fast.
            rules = ("pipedream", "minimax", "parameters")
            by_rule = (replace(self.options, partition=rule) for rule in rules)
            fast = (cut for options in by_rule for cut in baseline_cuts(self.model, options, shape))
            self._try_all(shape, every if few else set(fast))
        elif few:
            if shape.spec.opposite:  # the most even of cuts that are as good
                self._try_all(shape, (cuts for _, cuts in self._starts(shape, bounds)))
            bounded = sorted((bounds.cuts_s(cuts), cuts) for cuts in every)
            least_s = partial(self.least_s, bounds)
            # Lazily: what cannot be better than the best so far is left out as that gets better.
            self._try_all(shape, (cuts for s, cuts in bounded if self._is_better(least_s(s))))
        else:
            self._try_best_bounds(shape, bounds)

    def least_bytes(self, shape: Shape) -> float:
        """Returns what the fullest rank needs at least: an even share of the model with one microbatch."""
        model, whole = self.model, LayerRun(0, self.model.num_layers)
        slots = shape.num_stages // shape.stages_per_rank
        most_holders = (shape.num_ranks - slots + 1) * shape.num_pipelines
        need = model.resident_bytes(whole, most_holders)
        need += model.activation_bytes(whole, shape.sizes[-1])
        encoding_share = min(self.evaluator.num_encoding(shape) / slots, 1)
        return encoding_share * model.frozen_bytes + need / slots

    def _try_best_bounds(self, shape: Shape, bounds: Bounds) -> None:
        """Moves layers, from the cuts with the best bounds on, to where they are best."""
        starts = []
        for bound_s, cuts in sorted(self._starts(shape, bounds)):
            if not self._is_better(bound_s) or self.is_done_with(shape):
                break
            start = self._start(bounds, bound_s, Proposal(shape, cuts))
            if start is not None:
                starts.append((self._try(start), start.cuts))
        several = shape.spec.nested or shape.spec.opposite  # else the best way to share the ranks
        for step_s, cuts in sorted(starts)[: None if several else 1]:
            if step_s < WORTH_MOVING * self.best_s and not self.is_done_with(shape):
                self._climb(shape, cuts, bounds)

    def _start(self, bounds: Bounds, bound_s: float, start: Proposal) -> Proposal | None:
        """Returns where to start moving layers, if that may lead to the best, in less time than to simulate it.

        `start` has fast cuts; where they do not fit into memory, the fastest that do are returned. However layers
        are moved, the pipeline takes `bound_s` at least.
        """
        if not self._is_better(self.least_s(bounds, bound_s)) or self._is_hopeless(bounds, start):
            return None
        if self.evaluator.fits(start):
            return start
        if start.shape.stages_per_rank == 1 and not self.model.is_folded:
            needs = StageNeeds.of(self.model, self.evaluator.frame(start))
            cuts = needs.fastest(bounds, self._most_s(bounds))
            start = Proposal(start.shape, cuts or ())
            if cuts is None or self._is_hopeless(bounds, start):
                return None
        # A move of layers changes two stages: it does not help where more ranks than theirs are too full.
        most_helped = 2 * max(start.replicas)
        too_full = islice(self.evaluator.too_full(start), most_helped + 1)
        return start if len(list(too_full)) <= most_helped else None

    def _is_hopeless(self, bounds: Bounds, start: Proposal) -> bool:
        """Returns whether cuts are so slow that moving layers gains less."""
        return self.least_s(bounds, bounds.cuts_s(start.cuts)) >= HOPELESS * self.best_s

    def _starts(self, shape: Shape, bounds: Bounds) -> Iterator[tuple[float, tuple[Cut, ...]]]:
        """Yields cuts from which layers are moved, two for each share of ranks, with what no cut there beats."""
        limit_s = self._most_s(bounds)
        if shape.stages_per_rank == 1:
            for replicas in replicas_of(self.options, shape):
                best = bounds.best_cuts(replicas, limit_s)
                if best is not None:
                    yield best
                    # Those meet a bound of each stage alone, with early stages as long as it allows: lopsided.
                    firsts = minimax_cuts(self._work_s(shape), shape.num_stages)
                    ends = (*firsts[1:], self.model.num_layers)
                    yield best[0], tuple(zip(firsts, ends, replicas, strict=True))
        elif (least_s := bounds.frozen_s + bounds.work_s) < limit_s:
            work_s = self._work_s(shape)
            slacks = (0.0, *(uneven - 1 for uneven in UNEVEN if shape.spec.opposite))
            starts = [self.even_cuts(work_s, shape, slack) for slack in slacks]
            starts.append(self.even_cuts(self.resident_bytes(shape), shape))
            if shape.spec.nested and self.model.backbone.skips:
                least, crossing = max(work_s), self.model.nested_bytes
                limits = [max(uneven * sum(work_s) / shape.num_ranks, least) for uneven in UNEVEN]
                starts += [nested_cuts(work_s, shape.num_ranks, s, crossing) or () for s in limits]
            for firsts in filter(None, starts):
                yield least_s, tuple((a, b, 1) for a, b in pairwise((*firsts, len(work_s))))

    def even_cuts(
        self, weights: Sequence[float], shape: Shape, slack: float = 0.0
    ) -> tuple[int, ...]:
        """Returns first layers of stages so that no stage, or rank of opposite chains, has much more."""
        starts = self.model.starts
        return chain_cuts(weights, starts, shape.num_stages // len(starts), slack)

    def _work_s(self, shape: Shape) -> list[float]:
        """Returns seconds of every layer for a microbatch."""
        sums = self.model.sums(shape.sizes[0])
        ends = [f + b for f, b in zip(sums.forward, sums.backward, strict=True)]
        return [b - a for a, b in pairwise(ends)]

    def resident_bytes(self, shape: Shape) -> list[float]:
        """Returns bytes of every layer's weights, gradients, optimizer state and activations."""
        replicas = shape.num_ranks * shape.stages_per_rank // shape.num_stages
        sums = self.model.need_bytes(shape.sizes[0], 1, replicas * shape.num_pipelines)
        return [b - a for a, b in pairwise(sums)]

    def _is_better(self, step_s: float) -> bool:
        return step_s < self.best_s * (1 - 1e-9)

    def is_done_with(self, shape: Shape) -> bool:
        """Returns whether a long shape fits: the bound of its cuts, all but exact there, is a better guide."""
        return is_long(shape) and self.best is not None

    def _try_all(self, shape: Shape, cuts: Iterable[tuple[Cut, ...]]) -> None:
        for cut in cuts:
            if self.is_done_with(shape):
                break
            proposal = Proposal(shape, cut)
            if self.evaluator.fits(proposal):  # First, as a simulation takes longer.
                self._try(proposal)

    def _try(self, proposal: Proposal) -> float:
        """Simulates one proposal and keeps it if it is the best."""
        step_s = self.evaluator.step_s(proposal)
        if self._is_better(step_s) and self.evaluator.fits(proposal):
            self.best, self.best_s = proposal, step_s
            self.history.append(proposal)
        return step_s

    def _climb(self, shape: Shape, cuts: tuple[Cut, ...], bounds: Bounds) -> None:
        """Moves layers between neighbouring stages for as long as that makes the step shorter."""
        current_s = self.evaluator.step_s(Proposal(shape, cuts))
        improved = True
        while improved and not self.is_over:
            improved = False
            for moved in _neighbours(cuts, self.model.starts):
                proposal = Proposal(shape, moved)
                hopeless = self.least_s(bounds, bounds.cuts_s(moved)) >= max(current_s, self.best_s)
                if hopeless or self.is_over or not self.evaluator.fits(proposal):
                    continue  # Either takes far less time than a simulation.
                step_s = self._try(proposal)
                if step_s < current_s * (1 - 1e-4):
                    current_s, cuts, improved = step_s, moved, True
                    break


def _neighbours(cuts: tuple[Cut, ...], starts: Sequence[int]) -> Iterator[tuple[Cut, ...]]:
    """Yields cuts in which a stage gave layers to the next of its chain or took some; few layers come first."""
    for shift in (1, -1, 2, -2, 3, -3, 5, -5):
        for i in range(len(cuts) - 1):
            (first, middle, r), (_, stop, s) = cuts[i : i + 2]
            if first < middle + shift < stop and middle not in starts:
                moved = ((first, middle + shift, r), (middle + shift, stop, s))
                yield (*cuts[:i], *moved, *cuts[i + 2 :])
