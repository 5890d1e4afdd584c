"""The search: which stages, replicas, microbatches, pipelines and schedule make the fastest step?

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

from lightning_diffpipe.errors import ConfigurationError, DiffPipeError, PlanError
from lightning_diffpipe.planning.bounds import Bounds, StageNeeds
from lightning_diffpipe.planning.cluster import Cluster
from lightning_diffpipe.planning.cost import CostModel, LayerRun
from lightning_diffpipe.planning.evaluation import (
    UNFILLED_SHARE,
    Evaluator,
    Proposal,
    preference,
    preference_s,
)
from lightning_diffpipe.planning.options import PARTITIONS_WITH_REPLICAS, PlanOptions
from lightning_diffpipe.planning.partition import Cut, chain_cuts, minimax_cuts, nested_cuts
from lightning_diffpipe.planning.plan import PipelinePlan
from lightning_diffpipe.planning.profile import ModelProfile, joined
from lightning_diffpipe.planning.proposals import (
    MOST_UNEQUAL_RANKS,
    Shape,
    all_cuts,
    baseline_cuts,
    count_of_cuts,
    is_long,
    replicas_of,
    shapes,
)
from lightning_diffpipe.planning.recomputation import (
    checkpointed,
    recomputable,
    recomputed_where_needed,
)
from lightning_diffpipe.planning.schedules import SCHEDULES

MOST_CUTS_TRIED = 500
"""Up to so many ways to cut a shape, all are considered."""

HOPELESS = 1.05
"""Cuts whose bound is so many times the best step are not simulated."""

WORTH_MOVING = 1.2
"""Layers are moved from cuts whose step is below so many times the best; with slow links that gains up to 18 %."""

UNEVEN = (1.02, 1.05)
"""Loads of the fullest rank, in units of the mean, up to which cuts that send least are tried if there are skips;
in units of the least possible for the most even stages of chains in opposite directions."""

REMEDY_S = 5.0
"""Seconds spent on each option that might help where no plan fits."""

WORTH_FILLING = 1e-3
"""Share of the step that filling has to gain; for less nothing is encoded early."""

WORTH_FREEING = 0.05
"""Share of the memory that encoders have to take for ranks to be planned without them."""

MOST_ROUNDS = 3
"""Searches with fewer and fewer layers that are recomputed."""

MOST_FINALISTS = 4
"""Number of the best proposals that are filled and simulated."""


def find_plan(
    profile: ModelProfile,
    cluster: Cluster,
    options: PlanOptions,
    below_s: float = math.inf,
    within_s: float = math.inf,
) -> PipelinePlan:
    """Finds the fastest plan.

    Args:
        profile: Costs of the layers.
        cluster: Ranks and links. All ranks are used.
        options: Wishes and limits.
        below_s: Only plans with a shorter step are of interest; saves time.
        within_s: Seconds after which the best plan found so far is good enough.

    Returns:
        The plan with the shortest simulated step among those that fit into memory; with filling, a
        tenth of the unfilled step counts too, as costs are never known exactly. Among equals the one
        with fewer stages, then fewer microbatches.

    Raises:
        ConfigurationError: The options cannot be met with these ranks and this batch.
        PartitionError: More stages than layers or ranks.
        PlanError: Nothing fits into memory; says by how much. Or nothing takes less than `below_s`, nothing
            was found within `within_s`, or the ranks cannot be shared among the stages.
    """
    if len(profile.backbones) > 1 and options.schedule == "auto":
        return _of_either_kind(profile, cluster, options, below_s, within_s)
    profile, options = _as_searched(profile, options)
    until_s = time.perf_counter() + within_s
    if options.checkpointing == "all":
        if not (every := recomputable(profile, frees_memory=False)):
            raise ConfigurationError(
                f"checkpointing=all, but profile {profile.name!r} has no layer that may be recomputed (that has "
                "input_bytes_per_sample); profile the model again, or leave checkpointing out"
            )
        profile = checkpointed(profile, every)
    plans = _within_memory(profile, cluster, options, below_s, until_s)
    if not plans and below_s < math.inf:
        raise PlanError(f"no plan that fits into memory has a step below {below_s:.4g} s")
    if not plans and time.perf_counter() > until_s:
        raise PlanError(f"no plan was found within {within_s:.3g} s; give the search more time")
    if not plans:
        least = _cost_model(
            checkpointed(profile, _may_recompute(profile, options)), cluster, options
        )
        model = Evaluator(least, options).model
        raise _nothing_proposed(model, options) or _nothing_fits(model, options)
    return min(plans, key=_with_effort)


def _cost_model(profile: ModelProfile, cluster: Cluster, options: PlanOptions) -> CostModel:
    return CostModel(profile, cluster, options.optimizer_bytes_factor)


def _plans(
    profile: ModelProfile, cluster: Cluster, options: PlanOptions, below_s: float, until_s: float
) -> list[PipelinePlan]:
    """Returns the best plans found that fit into memory, with and without filling if that is left open."""
    # Filled plans are compared by a little more than their step; so they may be above the limit by that.
    loose_s = below_s * (1 + 2 * UNFILLED_SHARE) if options.filling != "none" else below_s
    evaluator = Evaluator(_cost_model(profile, cluster, options), options)
    plans = _fastest(Search(evaluator, best_s=loose_s, until_s=until_s))
    if options.filling == "auto" and profile.encoders:
        found_s = min(map(_with_effort, plans), default=math.inf) / (1 + UNFILLED_SHARE)
        unfilled = evaluator.unfilled()
        plans += _fastest(Search(unfilled, best_s=min(found_s, below_s), until_s=until_s))
    return [plan for plan in plans if plan.planned.iteration_s < below_s]


def _within_memory(
    profile: ModelProfile, cluster: Cluster, options: PlanOptions, below_s: float, until_s: float
) -> list[PipelinePlan]:
    """Returns plans that fit into memory, the best of which are those with less work if they fit.

    Where they do not, fewer ranks hold the encoders, or layers are recomputed, or both.
    """
    choices = _encoding_choices(_cost_model(profile, cluster, options), options)
    if cluster.memory_bytes is None or not (choices[1:] or _may_recompute(profile, options)):
        return _plans(profile, cluster, options, below_s, until_s)
    boundless = replace(cluster, memory_bytes=None)
    plans = _plans(profile, boundless, options, below_s, until_s)
    if plans and _fits(fastest := min(plans, key=_with_effort), cluster):
        return [fastest]
    plans = []
    for wishes in choices:
        for find in (_plans, _recomputing_where_needed):
            best_s = min((plan.planned.iteration_s for plan in plans), default=below_s)
            plans += find(profile, cluster, wishes, best_s, until_s)
    return plans


def _encoding_choices(model: CostModel, options: PlanOptions) -> list[PlanOptions]:
    """Returns the options with all ranks that may hold the encoders, and with fewer, where that frees memory."""
    limit, most = model.cluster.memory_bytes, model.cluster.num_ranks
    if options.encoding_ranks != "auto" or model.frozen_bytes < WORTH_FREEING * (limit or math.inf):
        return [options]
    counts = ("auto", *(2**shift for shift in range(most.bit_length()) if 2**shift < most))
    return [replace(options, encoding_ranks=count) for count in counts]


def _may_recompute(profile: ModelProfile, options: PlanOptions) -> frozenset[int]:
    return recomputable(profile) if options.checkpointing == "auto" else frozenset()


def _recomputing_where_needed(
    profile: ModelProfile, cluster: Cluster, options: PlanOptions, below_s: float, until_s: float
) -> list[PipelinePlan]:
    """Returns the best plans found that fit because they recompute layers, as few as have to be."""
    plans, positions = list[PipelinePlan](), _may_recompute(profile, options)
    for _ in range(MOST_ROUNDS if positions else 0):
        with_some = checkpointed(profile, positions)
        found = _plans(with_some, cluster, options, math.inf, until_s)
        if not found:
            break
        best = min(found, key=_with_effort)
        proposal = Proposal.of(best, with_some)
        evaluator = Evaluator(_cost_model(with_some, cluster, options), options)
        needed = recomputed_where_needed(evaluator, proposal, best.planned.peak_memory_bytes)
        with_fewer = checkpointed(profile, needed)
        faster = Evaluator(_cost_model(with_fewer, cluster, options), options).plan(proposal)
        plans += [plan for plan in (best, faster) if _fits(plan, cluster)]
        if needed == positions or not needed:
            break
        positions, options = needed, _with_shape_of(options, best)
    return [plan for plan in plans if plan.planned.iteration_s < below_s]


def _fits(plan: PipelinePlan, cluster: Cluster) -> bool:
    limit = cluster.memory_bytes
    return limit is None or max(plan.planned.peak_memory_bytes) <= limit


def _with_shape_of(options: PlanOptions, plan: PipelinePlan) -> PlanOptions:
    """Returns the options with everything decided as in a plan, but where it cuts."""
    names = "num_stages", "num_microbatches", "data_parallel", "schedule"
    return replace(options, **{name: getattr(plan.options, name) for name in names})


def _as_searched(profile: ModelProfile, options: PlanOptions) -> tuple[ModelProfile, PlanOptions]:
    """Joins the backbones of the profile, and narrows the options to what is possible with it."""
    opposite = options.schedule != "auto" and SCHEDULES[options.schedule].opposite
    if opposite and len(profile.backbones) == 1:
        raise ConfigurationError(
            f"schedule={options.schedule} runs several backbones in opposite directions, and profile "
            f"{profile.name!r} has one ({profile.backbones[0].name}); use schedule=1f1b, or schedule=auto"
        )
    profile = joined(profile, apart=opposite)
    passes, spec = profile.backbones[0].passes, SCHEDULES.get(options.schedule)
    if spec is not None and not spec.flushes:
        if passes:
            raise ConfigurationError(
                f"schedule={spec.name} steps the optimizer of a stage as soon as a batch has come back through it, "
                "but this step passes through its layers several times, so that their gradients are of different "
                "batches; choose a schedule that flushes, such as 1f1b"
            )
        # One rank for each stage, and no bubbles.
        replicas = 1 if options.num_replicas == "auto" else options.num_replicas
        options = replace(options, num_replicas=replicas, filling="none")
    if profile.whole_encoders:
        options = replace(options, frozen_splittable=False)
    if passes and options.num_stages != "auto" and options.num_stages > passes[0][1] - passes[0][0]:
        # More stages than a pass has layers: cut the calls of all of them, as if layers were others each time.
        chain = replace(profile.backbones[0], passes=())
        profile = replace(profile, backbones=(chain,))
    return profile, options


def _of_either_kind(
    profile: ModelProfile, cluster: Cluster, options: PlanOptions, below_s: float, within_s: float
) -> PipelinePlan:
    """Returns the best plan for several backbones: as one chain, or in opposite directions."""
    found, failed = [], []
    chained = joined(profile)
    opposite = [spec.name for spec in SCHEDULES.values() if spec.auto and spec.opposite]
    tries = [(chained, "auto"), *((profile, name) for name in opposite)]
    for what, schedule in tries:
        wish = replace(options, schedule=schedule)
        try:
            found.append(find_plan(what, cluster, wish, below_s, within_s / len(tries)))
        except DiffPipeError as error:
            failed.append(error)
    if not found:
        raise failed[0]
    return min(found, key=_with_effort)


def _with_effort(plan: PipelinePlan) -> float:
    """Returns what plans are compared by at last: filling has to gain something."""
    return preference(plan) * (1 + WORTH_FILLING * (plan.options.filling != "none"))


def _fastest(search: Search) -> list[PipelinePlan]:
    """Returns the best proposals as plans; none if nothing fits into memory."""
    model, options = search.model, search.options
    for shape in sorted(shapes(model, options), key=search.order):
        if search.is_over or search.is_done_with(shape):
            break
        search.try_shape(shape)
    # Filling is simulated at last only; until then an estimate of it ranks the proposals.
    finalists = search.history[-MOST_FINALISTS if search.evaluator.fills else -1 :]
    plans = [search.evaluator.plan(proposal) for proposal in reversed(finalists)]
    return [plan for plan in plans if _fits(plan, model.cluster)]


@dataclass
class Search:
    """State of a search: the best proposals so far.

    Attributes:
        evaluator: Simulates proposals.
        best: The fastest proposal that fits into memory.
        best_s: Its step; until there is one, the step that it has to beat.
        history: All proposals that were the best for a while, in order.
        until_s: When to stop, by `time.perf_counter()`.
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
        """Returns what `Evaluator.step_s` gives at least for cuts whose pipeline alone takes at least so long."""
        if not self.evaluator.fills:
            return pipeline_s
        return preference_s(max(pipeline_s, bounds.all_work_s), pipeline_s)

    def _most_s(self, bounds: Bounds) -> float:
        """Turns `least_s` round: what a pipeline alone may take at most to be better than the best so far."""
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
            wishes = (replace(self.options, partition=rule) for rule in rules)
            fast = (cut for wish in wishes for cut in baseline_cuts(self.model, wish, shape))
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
        holders = shape.num_stages // shape.stages_per_rank
        need = model.resident_bytes(whole) + model.activation_bytes(whole, shape.sizes[-1])
        encoding_share = min(self.evaluator.num_encoding(shape) / holders, 1)
        return encoding_share * model.frozen_bytes + need / holders

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
                found = bounds.best_cuts(replicas, limit_s)
                if found is not None:
                    yield found
                    # Those meet a bound of each stage alone, with early stages as long as it allows: lopsided.
                    firsts = minimax_cuts(self._work_s(shape), shape.num_stages)
                    ends = (*firsts[1:], self.model.num_layers)
                    yield found[0], tuple(zip(firsts, ends, replicas, strict=True))
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
        """Returns first layers of stages so that no stage, or rank of chains that run apart, has much more."""
        starts = self.model.starts
        return chain_cuts(weights, starts, shape.num_stages // len(starts), slack)

    def _work_s(self, shape: Shape) -> list[float]:
        """Returns seconds of every layer for a microbatch."""
        sums = self.model.sums(shape.sizes[0])
        ends = [f + b for f, b in zip(sums.forward, sums.backward, strict=True)]
        return [b - a for a, b in pairwise(ends)]

    def resident_bytes(self, shape: Shape) -> list[float]:
        """Returns bytes of every layer's weights, gradients, optimizer state and activations."""
        factor, size = 1 + self.options.optimizer_bytes_factor, shape.sizes[0]
        return [
            layer.parameter_bytes
            + factor * layer.gradient_bytes
            + size * layer.activation_bytes_per_sample
            + layer.activation_bytes_per_microbatch
            for layer in self.model.backbone.layers
        ]

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


def _nothing_proposed(model: CostModel, options: PlanOptions) -> PlanError | None:
    """Says why there is no way to share the ranks among stages, if there is none."""
    found = tuple(shapes(model, options))
    if not any(any(replicas_of(options, shape)) for shape in found):
        stages = " or ".join(map(str, sorted({shape.num_stages for shape in found})))
        return PlanError(
            f"the ranks of a pipeline cannot be shared among {stages} stages: a stage gets no more ranks than "
            f"there are microbatches, and stages on more than {MOST_UNEQUAL_RANKS} ranks "
            "get equal shares; use another num_stages or more microbatches, or name the ranks of "
            "every stage in num_replicas"
        )
    if options.partition not in PARTITIONS_WITH_REPLICAS:
        return None
    if any(any(baseline_cuts(model, options, shape)) for shape in found):
        return None
    return PlanError(
        f"partition={options.partition} chooses the replicas itself, and never as num_replicas="
        f"{options.num_replicas} asks for; leave num_replicas=auto, or choose partition=auto"
    )


def _nothing_fits(model: CostModel, options: PlanOptions) -> PlanError:
    """Says by how much memory is short, and which single option would help."""
    limit = model.cluster.memory_bytes
    assert limit is not None
    if options.filling == "auto":
        options = replace(options, filling="none")
    wishes = _encoding_choices(model, options)
    need, of = min(_least_memory(model, wish) for wish in (wishes[0], *wishes[1:2]))
    freed = {
        "num_stages": "auto", "num_microbatches": "auto", "num_replicas": "auto",
        "data_parallel": "auto", "schedule": "auto", "filling": "none",
    }  # fmt: skip
    fixed = [name for name in freed if getattr(options, name) not in ("auto", "none")]
    alone = [text for name in fixed if (text := _would_fit(model, options, {name: freed[name]}))]
    remedy = f"{' or '.join(alone)} would fit" if alone else "use more ranks or smaller batches"
    if not alone and len(fixed) > 1:
        together = _would_fit(model, options, {name: freed[name] for name in fixed})
        remedy = f"{together} together would fit" if together else remedy
    reason = f"{of[0]} needs {need:,} ({of[1]}), {need - limit:,} too many"
    if need <= limit and options.filling != "none":  # which counts even shares
        reason = (
            f"{of[0]} would need {need:,} ({of[1]}) with even shares of the frozen work, but bubbles "
            "are uneven, and so are shares"
        )
    return PlanError(f"no plan fits into {limit:,} bytes a rank: {reason}; {remedy}")


def _would_fit(model: CostModel, options: PlanOptions, changes: dict[str, str]) -> str:
    """Returns the values a plan finds for options that are changed, as text; empty if nothing fits."""
    changed = PlanOptions.from_dict({**options.to_dict(), **changes})
    until_s = time.perf_counter() + REMEDY_S
    try:
        plans = _fastest(Search(Evaluator(model, changed), until_s=until_s))
    except DiffPipeError:
        return ""
    if not plans:
        return ""
    found = plans[0].options.to_dict()
    return ", ".join(f"{name}={found[name]}" for name in changes)


def _least_memory(model: CostModel, options: PlanOptions) -> tuple[int, tuple[str, str]]:
    """Returns what the smallest of all cuts needs on its fullest rank, and in words whether and which it is.

    After `REMEDY_S` the smallest found so far counts; the long shapes, which take longest, come last.
    """
    search, until_s = Search(Evaluator(model, options)), time.perf_counter() + REMEDY_S
    found: tuple[float, int, int] = (math.inf, 0, 0)  # among equals the one with fewer stages
    smallest = "the smallest"
    for shape in sorted(shapes(model, options), key=lambda s: (is_long(s), search.least_bytes(s))):
        if search.least_bytes(shape) > found[0]:
            continue
        if found[1] and time.perf_counter() > until_s:
            smallest = "the smallest found"
            break
        for cuts in _small_cuts(search, shape, found[0] + 1):
            need = max(search.evaluator.peak_bytes(Proposal(shape, cuts)))
            found = min(found, (need, shape.num_stages, len(shape.sizes)))
    where = f"num_stages={found[1]}, num_microbatches={found[2]}"
    return int(found[0]), (smallest, where)


def _small_cuts(search: Search, shape: Shape, below: float) -> Iterator[tuple[Cut, ...]]:
    """Yields for every share of ranks the cut that needs least, where some need less than `below` bytes."""
    if search.options.partition != "auto":
        yield from baseline_cuts(search.model, search.options, shape)
        return
    weights = search.resident_bytes(shape)
    edges = (*search.even_cuts(weights, shape), len(weights))
    for replicas in replicas_of(search.options, shape):
        cuts = tuple(zip(edges, edges[1:], replicas, strict=False))
        if shape.stages_per_rank == 1 and not search.model.is_folded:
            proposal = Proposal(shape, cuts)
            needs = StageNeeds.of(search.model, search.evaluator.frame(proposal))
            most = min(below, max(search.evaluator.peak_bytes(proposal)) + 1)
            cuts = needs.smallest(most) or cuts
        yield cuts
