"""The search: which stages, replicas, microbatches, pipelines and schedule make the fastest step?

What costs memory or time is left out as long as the plan is the better for it: all ranks hold the encoders and all
optimizer states of their stages on their device, and no layer is recomputed or streamed, unless that does not fit.
Cuts are searched by `cut_search.py`. Where it does not fit:

    1. recompute everything that frees memory, and search the fastest cuts that fit
    2. with these cuts, stop recomputing on each rank while it fits, layers that save most seconds a byte first
    3. search the cuts again with what is still recomputed, as stages have become faster; until nothing changes
"""

import itertools
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from lightning_diffpipe.errors import ConfigurationError, DiffPipeError, PlanError
from lightning_diffpipe.planning.cluster import Cluster
from lightning_diffpipe.planning.cost import CostModel
from lightning_diffpipe.planning.cut_search import Search, fastest, fits
from lightning_diffpipe.planning.evaluation import (
    UNFILLED_SHARE,
    Evaluator,
    Known,
    Proposal,
    preference,
)
from lightning_diffpipe.planning.memory import (
    Waiting,
    checkpointed,
    recomputable,
    streamable,
    streamed,
    streamed_where_needed,
)
from lightning_diffpipe.planning.options import PlanOptions
from lightning_diffpipe.planning.plan import PipelinePlan
from lightning_diffpipe.planning.profile import LayerProfile, ModelProfile, encoded_first, joined
from lightning_diffpipe.planning.proposals import shapes
from lightning_diffpipe.planning.schedules import SCHEDULES
from lightning_diffpipe.planning.shortage import (
    encoding_choices,
    nothing_fits,
    nothing_proposed,
    offload_choices,
    some_share_stages,
)

WORTH_FILLING = 1e-3
"""Share of the step that filling has to gain; for less nothing is encoded early."""

MOST_ROUNDS = 3
"""Searches with fewer and fewer layers that are recomputed or streamed."""


class _State(NamedTuple):
    """The time of `time.perf_counter()` at which to stop, and what is known of schedules so far."""

    until_s: float
    known: Known


_Plans = Callable[[ModelProfile, Cluster, PlanOptions, float, _State], list[PipelinePlan]]


def find_plan(
    profile: ModelProfile,
    cluster: Cluster,
    options: PlanOptions,
    below_s: float = math.inf,
    within_s: float = math.inf,
) -> PipelinePlan:
    """Finds the fastest plan for all ranks of a cluster.

    Args:
        profile: Costs of the layers.
        cluster: Ranks and links.
        options: Wishes and limits.
        below_s: Only plans with a shorter step are of interest; saves time.
        within_s: Seconds after which the best plan found so far is good enough.

    Returns:
        The plan with the shortest simulated step among those that fit into memory; with filling, a tenth of the
        unfilled step counts too, as costs are never known exactly. Among equals the one with fewer stages, then
        fewer microbatches.

    Raises:
        ConfigurationError: The options cannot be met with these ranks and this batch.
        PartitionError: More stages than layers or ranks.
        PlanError: Nothing fits into memory; says by how much. Or nothing takes less than `below_s`, nothing was
            found within `within_s`, or the ranks cannot be shared among the stages.
    """
    if len(profile.backbones) > 1 and options.schedule == "auto":
        return _of_either_kind(profile, cluster, options, below_s, within_s)
    profile, options = _as_searched(profile, options)
    state = _State(time.perf_counter() + within_s, {})
    if options.checkpointing == "all":
        if not (every := recomputable(profile, frees_memory=False)):
            raise ConfigurationError(
                f"checkpointing=all, but profile {profile.name!r} has no layer that may be recomputed (that has "
                "input_bytes_per_sample); profile the model again, or leave checkpointing out"
            )
        profile = checkpointed(profile, every)
    if options.streaming == "all":
        if not (every := streamable(profile)):
            raise ConfigurationError(
                f"streaming=all, but profile {profile.name!r} has no layer that may be streamed (that may be "
                "recomputed, and has frozen weights that nothing else reads); leave it out"
            )
        profile = _Savings(streamed=every).of(profile, cluster)
    plans = _within_memory(profile, cluster, options, below_s, state)
    if not plans and below_s < math.inf:
        raise PlanError(f"no plan that fits into memory has a step below {below_s:.4g} s")
    if not plans and time.perf_counter() > state.until_s:
        raise PlanError(f"no plan was found within {within_s:.3g} s; give the search more time")
    if not plans:
        model = Evaluator(CostModel.of(profile, cluster, options), options).model
        no_proposal = nothing_proposed(model, options)
        within_memory = lambda profile, cluster, options, below_s, until_s: _within_memory(
            profile, cluster, options, below_s, state._replace(until_s=until_s)
        )
        raise no_proposal or nothing_fits(profile, cluster, options, within_memory)
    return min(plans, key=_with_effort)


def _plans(
    profile: ModelProfile, cluster: Cluster, options: PlanOptions, below_s: float, state: _State
) -> list[PipelinePlan]:
    """Returns the best plans found that fit into memory, with and without filling if that is left open."""
    # Filled plans are compared by a little more than their step; so they may be above the limit by that.
    loose_s = below_s * (1 + 2 * UNFILLED_SHARE) if options.filling != "none" else below_s
    evaluator = Evaluator(CostModel.of(profile, cluster, options), options, state.known)
    plans = fastest(Search(evaluator, best_s=loose_s, until_s=state.until_s))
    if options.filling == "auto" and profile.encoders:
        found_s = min(map(_with_effort, plans), default=math.inf) / (1 + UNFILLED_SHARE)
        unfilled = evaluator.unfilled()
        plans += fastest(Search(unfilled, best_s=min(found_s, below_s), until_s=state.until_s))
    return [plan for plan in plans if plan.planned.iteration_s < below_s]


def _within_memory(
    profile: ModelProfile, cluster: Cluster, options: PlanOptions, below_s: float, state: _State
) -> list[PipelinePlan]:
    """Returns plans that fit into memory by the cheapest means that suffice.

    First no means at all; then fewer ranks that hold the encoders, sharded optimizer states, and recomputed layers;
    then optimizer states in host memory, or streamed layers; then both.
    """
    if cluster.memory_bytes is None:
        return _plans(profile, cluster, options, below_s, state)
    model = CostModel.of(profile, cluster, options)
    choices = encoding_choices(model, options)
    if choices[1:] or _may_recompute(profile, options):
        unlimited = replace(cluster, memory_bytes=None, rank_memory_bytes=())
        plans = _plans(profile, unlimited, options, below_s, state)
        if plans and fits(best := min(plans, key=_with_effort), cluster):
            return [best]
    if options.shard_optimizer == "auto" and some_share_stages(model, options):
        choices += [replace(narrowed, shard_optimizer=True) for narrowed in choices]
    recomputing = _Savings(_may_recompute(profile, options))
    may_stream = options.streaming == "auto" and options.checkpointing != "none"
    streaming = recomputing._replace(streamed=streamable(profile) if may_stream else frozenset())
    on_device: Sequence[_Plans] = [_plans, partial(_saving_where_needed, most=recomputing)]
    from_host = [partial(_saving_where_needed, most=streaming)] if streaming.streamed else []
    offload = offload_choices(model, options)

    def attempts(states: str, searches: Sequence[_Plans]) -> list[tuple[PlanOptions, _Plans]]:
        """Returns options and searches to try with optimizer states offloaded ("all") or not ("none")."""
        if states not in offload:
            return []
        narrowed = [replace(choice, optimizer_offload=states) for choice in choices]
        return list(itertools.product(narrowed, searches))

    plans = list[PipelinePlan]()
    # What costs least time comes first; the next level is tried where nothing of this one fits.
    for level in (
        attempts("none", on_device),
        attempts("all", on_device) + attempts("none", from_host),
        attempts("all", from_host),
    ):
        for narrowed, search in level:
            best_s = min((plan.planned.iteration_s for plan in plans), default=below_s)
            candidates = search(profile, cluster, narrowed, best_s, state)
            plans += [plan for plan in candidates if _fits_hosts(plan, cluster)]
        if plans:
            break
    return plans


def _fits_hosts(plan: PipelinePlan, cluster: Cluster) -> bool:
    """Returns whether hosts have enough memory for what their ranks copy from there."""
    on_hosts = sum((*plan.planned.streamed_bytes, *plan.planned.offloaded_bytes))
    num_hosts = plan.num_ranks / (cluster.ranks_per_host or plan.num_ranks)
    on_host = on_hosts * plan.num_pipelines / num_hosts
    return on_host <= (cluster.host_memory_bytes or math.inf)


def _may_recompute(profile: ModelProfile, options: PlanOptions) -> frozenset[int]:
    return recomputable(profile) if options.checkpointing == "auto" else frozenset()


class _Savings(NamedTuple):
    """Positions of the layers that are recomputed, and of those of them that are streamed."""

    recomputed: frozenset[int] = frozenset()
    streamed: frozenset[int] = frozenset()

    def of(self, profile: ModelProfile, cluster: Cluster) -> ModelProfile:
        recomputing = checkpointed(profile, self.recomputed | self.streamed)
        return streamed(recomputing, self.streamed, cluster.host_bytes_per_s)


def _saving_where_needed(
    profile: ModelProfile,
    cluster: Cluster,
    options: PlanOptions,
    below_s: float,
    state: _State,
    most: _Savings,
) -> list[PipelinePlan]:
    """Returns the best plans found that fit because they recompute or stream layers, as few as have to be.

    With all of them, steps do not tell which number of stages is fastest with fewer: each is tried.
    """
    plans = list[PipelinePlan]()
    if not any(most):
        return plans
    with_all = most.of(profile, cluster)
    slowdown = max(map(_slowdown, with_all.backbones[0].layers))
    model = CostModel.of(with_all, cluster, options)
    for count in sorted({shape.num_stages for shape in shapes(model, options)}):
        best_s = min((plan.planned.iteration_s for plan in plans), default=below_s)
        narrowed = replace(options, num_stages=count)
        plans += _saving_less(profile, cluster, narrowed, best_s * (1 + slowdown), state, most)
    return [plan for plan in plans if plan.planned.iteration_s < below_s]


def _slowdown(layer: LayerProfile) -> float:
    """Returns how much longer a layer takes that is recomputed or streamed, at most, as a share of its time."""
    if (whole := layer.uncheckpointed) is None:
        return 0.0
    times = [
        (
            layer.forward_s.at(count) + layer.backward_s.at(count),
            forward_s + whole.backward_s.at(count),
        )
        for count, forward_s in whole.forward_s.points
    ]
    return max((longer_s / whole_s - 1 for longer_s, whole_s in times if whole_s), default=0.0)


def _saving_less(
    profile: ModelProfile,
    cluster: Cluster,
    options: PlanOptions,
    most_s: float,
    state: _State,
    savings: _Savings,
) -> list[PipelinePlan]:
    """Returns plans that recompute and stream fewer and fewer layers; with all, steps may take `most_s`."""
    plans = list[PipelinePlan]()
    for _ in range(MOST_ROUNDS):
        with_some = savings.of(profile, cluster)
        candidates = _plans(with_some, cluster, options, most_s, state)
        if not candidates:
            break
        best = min(candidates, key=_with_effort)
        proposal = Proposal.of(best, with_some)
        fewer = _needed(profile, cluster, options, proposal, savings, best, state.known)
        faster = _evaluator(profile, cluster, options, fewer, state.known).plan(proposal)
        for plan in (faster, best):  # the first of equals counts
            if fits(plan, cluster) and _fits_hosts(plan, cluster):
                plans.append(plan)
        if fewer == savings or not any(fewer):
            break
        names = "num_stages", "num_microbatches", "data_parallel", "schedule"
        decided = {name: getattr(best.options, name) for name in names}
        savings, options, most_s = fewer, replace(options, **decided), math.inf
    return plans


def _evaluator(
    profile: ModelProfile, cluster: Cluster, options: PlanOptions, savings: _Savings, known: Known
) -> Evaluator:
    return Evaluator(CostModel.of(savings.of(profile, cluster), cluster, options), options, known)


def _needed(
    profile: ModelProfile,
    cluster: Cluster,
    options: PlanOptions,
    proposal: Proposal,
    savings: _Savings,
    plan: PipelinePlan,
    known: Known,
) -> _Savings:
    """Returns what of the savings a plan's cuts need to fit: less streaming first, then less recomputing."""
    evaluator = _evaluator(profile, cluster, options, savings, known)
    if savings.streamed:
        placement, runs = plan.placement, evaluator.runs(proposal)
        layers, still = evaluator.calls.backbone.layers, set[int]()
        for rank, peak in enumerate(plan.planned.peak_memory_bytes):
            rank_runs = [runs[stage] for stage in placement.stages_of(rank)]
            positions = (position for run in rank_runs for position in range(run.first, run.stop))
            sizes = {i: size for i in positions if (size := layers[i].streamed_bytes)}
            limit = cluster.memory_of(rank, placement.num_ranks) or 0
            still |= streamed_where_needed(sizes, max(limit - peak, 0))
        savings = _Savings(savings.recomputed | savings.streamed, frozenset(still))
        evaluator = _evaluator(profile, cluster, options, savings, known)
        plan = evaluator.plan(proposal)
    peaks = plan.planned.peak_memory_bytes
    return savings._replace(recomputed=_recomputed_where_needed(evaluator, proposal, peaks))


def _recomputed_where_needed(
    evaluator: Evaluator, proposal: Proposal, peak_memory_bytes: Collection[int]
) -> frozenset[int]:
    """Returns positions of the layers whose recomputation makes the cuts fit.

    The evaluator's profile, and the memory of every rank, are those with all layers recomputed that may be.
    """
    cluster, pipeline = evaluator.model.cluster, evaluator.frame(proposal).pipeline
    count = len(peak_memory_bytes)
    limits = [cluster.memory_of(rank, count) or 0 for rank in range(count)]
    largest_size, layers = max(proposal.shape.sizes), evaluator.calls.backbone.layers
    # By rank, and by position of a recomputed layer: bytes of activations that storing them would add for all
    # microbatches under way, and bytes of one microbatch, while its backward computes them again.
    stored: list[dict[int, tuple[float, float]]] = [{} for _ in peak_memory_bytes]
    s_per_byte: dict[int, float] = {}
    for stage, run in enumerate(evaluator.runs(proposal)):
        for position in range(run.first, run.stop):
            if (whole := layers[position].uncheckpointed) is None:
                continue
            for rank in pipeline.placement.stage_ranks[stage]:
                waiting = pipeline.peak(rank)[stage]
                one = Waiting(waiting.samples / max(waiting.microbatches, 1), 1)
                added = _stored_bytes(whole, waiting) - _stored_bytes(layers[position], waiting)
                stored[rank][position] = added, _stored_bytes(whole, one)
            # A streamed layer stays recomputed: its backward needs weights that are copied again.
            if layers[position].streamed_bytes:
                continue
            most_added = max(savings[position][0] for savings in stored if position in savings)
            s_per_byte[position] = whole.forward_s.at(largest_size) / max(most_added, 1.0)
    free_bytes = [
        limit - peak + _largest_bytes(savings)
        for limit, peak, savings in zip(limits, peak_memory_bytes, stored, strict=True)
    ]
    # Layers whose recomputation costs most time for the bytes it frees are the first to be stored.
    for position in sorted(s_per_byte, key=lambda each: (-s_per_byte[each], each)):
        ranks = [rank for rank, savings in enumerate(stored) if position in savings]
        rest = {r: {k: v for k, v in stored[r].items() if k != position} for r in ranks}
        if all(free_bytes[r] - stored[r][position][0] >= _largest_bytes(rest[r]) for r in ranks):
            for rank in ranks:
                free_bytes[rank] -= stored[rank][position][0]
                stored[rank] = rest[rank]
    return frozenset(position for savings in stored for position in savings)


def _largest_bytes(stored: Mapping[int, tuple[float, float]]) -> float:
    """Returns the most bytes of activations that a rank recomputes at a time."""
    return max((of_microbatch for _, of_microbatch in stored.values()), default=0.0)


def _stored_bytes(layer: LayerProfile, waiting: Waiting) -> float:
    of_samples = waiting.samples * layer.activation_bytes_per_sample
    return of_samples + waiting.microbatches * layer.activation_bytes_per_microbatch


def _as_searched(profile: ModelProfile, options: PlanOptions) -> tuple[ModelProfile, PlanOptions]:
    """Joins the backbones of the profile, and narrows the options to what is possible with it."""
    opposite = options.schedule != "auto" and SCHEDULES[options.schedule].opposite
    if opposite and len(profile.backbones) == 1:
        raise ConfigurationError(
            f"schedule={options.schedule} runs several backbones in opposite directions, and profile "
            f"{profile.name!r} has one ({profile.backbones[0].name}); use schedule=1f1b, or schedule=auto"
        )
    profile = joined(profile, opposite=opposite)
    if options.encode_first:
        if not any(any(encoder.stored_first) for encoder in profile.encoders):
            names = ", ".join(encoder.name for encoder in profile.encoders) or "it has none"
            raise ConfigurationError(
                f"encode_first=true stores what encoders give, but in profile {profile.name!r} results of none of "
                f"its encoders ({names}) follow from the sample alone; leave it out"
            )
        profile = encoded_first(profile)
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
    plans, failed = [], []
    chained = joined(profile)
    opposite = [spec.name for spec in SCHEDULES.values() if spec.auto and spec.opposite]
    tries = [(chained, "auto"), *((profile, name) for name in opposite)]
    for what, schedule in tries:
        narrowed = replace(options, schedule=schedule)
        try:
            plans.append(find_plan(what, cluster, narrowed, below_s, within_s / len(tries)))
        except DiffPipeError as error:
            failed.append(error)
    if not plans:
        raise failed[0]
    return min(plans, key=_with_effort)


def _with_effort(plan: PipelinePlan) -> float:
    """Returns what plans are compared by at last: filling has to gain something."""
    return preference(plan) * (1 + WORTH_FILLING * (plan.options.filling != "none"))
