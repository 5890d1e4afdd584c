"""The search for cuts: of one shape after another, the cuts with the fastest step that fit into memory.

Bounds propose, the simulator decides. Shapes are tried in the order of a rough estimate; a shape whose
lower bound is no better than the best step found so far is skipped without a simulation. Where there
are few ways to cut, all are tried, cheapest bound first, so that the result is the optimum of the
simulator. Where there are many, layers of the cuts with the smallest bound are moved for as long as that helps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, pairwise

from lightning_diffpipe.planning.bounds import Bounds, StageNeeds
from lightning_diffpipe.planning.cluster import Cluster
from lightning_diffpipe.planning.cost import CostModel, LayerRun
from lightning_diffpipe.planning.evaluation import UNFILLED_SHARE, Evaluator, Proposal, preference_s
from lightning_diffpipe.planning.options import PlanOptions
from lightning_diffpipe.planning.partition import Cut, chain_cuts, minimax_cuts, nested_cuts
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
