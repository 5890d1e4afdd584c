"""Why is it not faster? The parts of a step, its bottleneck, and the one change that helps most.

Nothing here is a rule of thumb. Every part is found by simulating the same plan with that part taken
away; every change by planning again with that change. So each number is a promise of the simulator.
"""

import math
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from lightning_diffpipe.errors import DiffPipeError, require_number
from lightning_diffpipe.planning.cluster import Cluster
from lightning_diffpipe.planning.cost import CostModel, PipelineCosts, Table
from lightning_diffpipe.planning.evaluation import Evaluator, Proposal
from lightning_diffpipe.planning.instruction import Staged
from lightning_diffpipe.planning.partition import Stage
from lightning_diffpipe.planning.plan import SAME_STEP, PipelinePlan, PlannedChange, check_layers
from lightning_diffpipe.planning.profile import (
    DISK_BYTES_PER_S,
    EncoderProfile,
    ModelProfile,
    Seconds,
    encoded_first,
    joined,
)
from lightning_diffpipe.planning.savings import checkpointed, streamed
from lightning_diffpipe.planning.schedules import DEFAULT_SCHEDULE, SCHEDULES
from lightning_diffpipe.planning.search import find_plan
from lightning_diffpipe.viewing.text import count_of, percent, seconds, size

BEST = "the best of all plans"

BOTTLENECK = 0.03
"""Where no part costs this share of the step, ranks compute nearly all the time."""

WORTH_A_LINE = 1e-3
"""Parts and changes of a smaller share of the step get no line."""


@dataclass(frozen=True, slots=True)
class Saving:
    """A part of the step: what it would save if it took no time, or were perfect."""

    name: str
    saved_s: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """The parts of a planned step, and changes that would make it shorter.

    Attributes:
        parts: Seconds saved without each part, largest first. Parts overlap, so that they need not add up.
        changes: Changes that help, best first. Empty without a profile.
    """

    plan: PipelinePlan
    parts: tuple[Saving, ...]
    changes: tuple[PlannedChange, ...] = ()

    @property
    def bottleneck(self) -> str:
        """Name of the part that costs most, if it costs much."""
        step_s = self.plan.planned.iteration_s
        dear = [part.name for part in self.parts if part.saved_s >= BOTTLENECK * step_s]
        return dear[0] if dear else "computation"

    def __str__(self) -> str:
        planned = self.plan.planned
        step_s, limit_s = planned.iteration_s, planned.no_bubble_limit_s
        lines = [
            f"A step takes {seconds(step_s)}; its work, shared evenly, is {seconds(limit_s)} on each rank. "
            f"The rest, {percent(1 - limit_s / step_s if step_s else 0)}, is waiting for others and for "
            "links; more can only be won with less work."
        ]
        if planned.expected_s is not None:
            shares = ((percent(share), first) for share, first in self.plan.sequences)
            seen = ", ".join(
                f"{s} from stage {n} on" if n else f"{s} all stages" for s, n in shares
            )
            lines.append(
                f"That is its longest call sequence. Over all that were seen (of microbatches, {seen}) a "
                f"step is expected to take {seconds(planned.expected_s)} without filling; plans are chosen by that."
            )
        if self.plan.costs is not None:
            lines.append(f"Bottleneck: {self.bottleneck}.")
        lines += [
            f"  without {part.name}: {seconds(part.saved_s)} less ({percent(part.saved_s / step_s)})"
            for part in self.parts
        ]
        if planned.sent_bytes is not None and planned.chain_sent_bytes:
            less = percent(1 - planned.sent_bytes / planned.chain_sent_bytes)
            lines.append(
                f"Its ranks send each other {size(planned.sent_bytes)} a step; with one stage on each rank "
                f"it would be {size(planned.chain_sent_bytes)} ({less} less)."
            )
        if self.changes:
            lines.append("What would help, best first:")
        for change in self.changes:
            gain = percent(1 - change.iteration_s / step_s)
            lines.append(f"  {change.description}: {seconds(change.iteration_s)} ({gain} less)")
        return "\n".join(lines)


def explain(
    plan: PipelinePlan,
    profile: ModelProfile | None = None,
    cluster: Cluster | None = None,
    budget_s: float = 30.0,
    disk_bytes_per_s: float = DISK_BYTES_PER_S,
) -> Explanation:
    """Explains a plan.

    Args:
        plan: A plan with costs, as `find_plan` makes them; without costs only the limit is known.
        profile: With the cluster, lets changes be tried; without, those kept in the plan are listed. Where it is
            another measurement than the plan was made from, the plan's stages are simulated with it first.
        cluster: Ranks and links of the run; changes may use more ranks than it does.
        budget_s: Seconds to spend on changes; searches that take longer are cut short.
        disk_bytes_per_s: Rate at which each rank reads stored encodings.

    Raises:
        ConfigurationError: A rate that cannot be.
        PlanError: The profile is of other layers than the plan's.
    """
    require_number("disk_bytes_per_s", disk_bytes_per_s, above=0)
    if profile is not None and plan.options.encode_first:
        profile = encoded_first(profile)
    if profile is not None and cluster is not None:
        plan = _recosted(plan, profile, cluster)
    parts = () if plan.costs is None else _parts(plan, plan.costs)
    if profile is None or cluster is None:
        return Explanation(plan, parts, plan.changes)
    tries = _tries(plan, profile, cluster, disk_bytes_per_s)
    changes = sorted(_helpful(plan, tries, cluster, budget_s), key=lambda each: each.iteration_s)
    return Explanation(plan, parts, tuple(changes))


def _recosted(plan: PipelinePlan, profile: ModelProfile, cluster: Cluster) -> PipelinePlan:
    """Returns the plan's stages with these costs, or the plan itself where both promise the same step."""
    profile = joined(profile, opposite=plan.num_backbones > 1)
    names, what = [layer.name for layer in profile.layers], f"profile {profile.name!r}"
    remedy = "use the profile that the plan was made from, or one of the same layers"
    check_layers(plan, names, what, remedy)
    ranks = replace(cluster, num_ranks=plan.num_ranks)
    recomputing = checkpointed(profile, plan.recomputed)
    streaming = streamed(recomputing, plan.streamed, cluster.host_bytes_per_s)
    model = CostModel.of(streaming, ranks, plan.options)
    again = Evaluator(model, plan.options).plan(Proposal.of(plan, profile))
    old_s, new_s = plan.planned.iteration_s, again.planned.iteration_s
    return plan if math.isclose(new_s, old_s, rel_tol=SAME_STEP) else again


def _parts(plan: PipelinePlan, costs: PipelineCosts) -> tuple[Saving, ...]:
    """Measures each part by leaving it out of the simulation."""
    step_s = plan.planned.iteration_s
    nothing = tuple((0.0,) * len(costs.sizes) for _ in plan.stages)
    passes_s = zip(plan.stages, costs.forward_s, costs.backward_s, strict=True)
    stage_s = [(f[0] + b[0] * s.gradient) / s.num_replicas for s, f, b in passes_s]
    slowest = max(plan.stages, key=lambda stage: stage_s[stage.index])
    whole = "pipeline" if plan.num_stages > 1 else "backbone"
    frozen = "that fits no bubble" if plan.pieces else f"before the {whole}"
    unfrozen: dict[str, Any] = {"encode_s": (0.0,) * len(costs.encode_s), "all_gather_s": 0.0}
    links: dict[str, Any] = {"activation_s": nothing, "gradient_s": nothing}
    without = {
        f"frozen work {frozen}": replace(costs, **unfrozen),
        "links between stages": replace(costs, **links),
        "summing gradients": replace(costs, all_reduce_s=()),
        "copying optimizer states": replace(costs, offload_s=()),
        f"imbalance (stage {slowest.index} is the slowest)": _balanced(plan, costs),
    }
    saved = {name: step_s - plan.step_s(changed) for name, changed in without.items()}
    # Even so the slowest stage waits for the first work, and others for the last.
    busy_s = (sum(costs.compute_s(i) for i in p if isinstance(i, Staged)) for p in plan.programs)
    alone_s = plan.step_s(replace(costs, all_reduce_s=(), offload_s=(), **unfrozen, **links))
    # Waiting that frozen work has filled is none: no more than all bubbles can be won.
    bubbles_s = step_s - plan.planned.no_bubble_limit_s
    saved["pipeline warm-up and cooldown"] = min(alone_s - max(busy_s), bubbles_s)
    large = (Saving(name, s) for name, s in saved.items() if s > WORTH_A_LINE * step_s)
    return tuple(sorted(large, key=lambda part: -part.saved_s))


def _balanced(plan: PipelinePlan, costs: PipelineCosts) -> PipelineCosts:
    """Returns the same work shared evenly over the stages that do it: every rank computes for the same time."""

    def even(table: Table, stages: Sequence[Stage]) -> Table:
        ranks = sum(stage.num_replicas for stage in stages)
        totals = [sum(column) for column in zip(*(table[s.index] for s in stages), strict=True)]
        shares = {s.index: tuple(t * s.num_replicas / ranks for t in totals) for s in stages}
        return tuple(shares.get(index, row) for index, row in enumerate(table))

    trained = [stage for stage in plan.stages if stage.gradient]
    backward = even(costs.backward_s, trained)
    return replace(costs, forward_s=even(costs.forward_s, plan.stages), backward_s=backward)


class _Try(NamedTuple):
    """Other options than the plan's, everything else as it is; a step takes `more_s` longer than its plan says."""

    description: str
    changes: Mapping[str, Any]
    profile: ModelProfile
    more_s: float = 0.0


def _helpful(
    plan: PipelinePlan, tries: Iterable[_Try], cluster: Cluster, budget_s: float
) -> Iterator[PlannedChange]:
    """Yields the changes that make the step shorter, of those that can be planned within the budget."""
    until_s = time.perf_counter() + budget_s
    below_s = plan.planned.iteration_s * (1 - WORTH_A_LINE)
    for description, changes, profile, more_s in tries:
        left_s = max(until_s - time.perf_counter(), 0.0)  # those still to come share it
        try:
            options = replace(plan.options, **changes)
            changed = find_plan(profile, cluster, options, below_s, left_s / 2)
        except DiffPipeError:
            continue  # No faster, or not possible: too many stages, too few samples, too little memory.
        step_s = changed.planned.iteration_s + more_s
        if step_s < below_s:
            details = _moved(plan, changed)
            if description == BEST:
                pipelines = count_of(changed.num_pipelines, "pipeline")
                stages = count_of(changed.num_stages, "stage")
                microbatches = count_of(changed.num_microbatches, "microbatch", "es")
                details = f": {pipelines} of {stages}, {microbatches}, {changed.options.schedule}"
            yield PlannedChange(f"{description}{details}", step_s)


def _tries(
    plan: PipelinePlan, profile: ModelProfile, cluster: Cluster, disk_bytes_per_s: float
) -> Iterator[_Try]:
    """Yields what could be changed; stages are cut again where they must be."""
    as_planned: dict[str, Any] = {"frozen_group_size": "auto"}
    options = replace(plan.options, **as_planned)
    evaluator = Evaluator(CostModel(joined(profile), cluster), options)
    shape = Proposal.of(plan, joined(profile)).shape
    group_size = evaluator.group_size(shape) or max(plan.microbatch_sizes)
    if plan.options.frozen_group_size != group_size:  # else changed plans choose theirs again
        as_planned, options = {}, plan.options
    any_cut = {**as_planned, "num_replicas": "auto", "partition": "auto"}
    any_shape = dict.fromkeys(("num_stages", "num_microbatches", "data_parallel"), "auto") | any_cut
    count, stages = plan.num_microbatches, plan.num_stages
    for n in filter(None, (2 * count, count // 2)):
        yield _Try(count_of(n, "microbatch", "es"), {**as_planned, "num_microbatches": n}, profile)
    yield _Try("cutting the layers again", any_cut, profile)
    for n in filter(None, (stages - 1, stages + 1)):
        yield _Try(count_of(n, "stage"), {**any_cut, "num_stages": n}, profile)
    one_stage = {"num_stages": 1, "num_replicas": 1, "data_parallel": cluster.num_ranks}
    data_parallel = {**any_shape, **one_stage, "schedule": DEFAULT_SCHEDULE}
    yield _Try("no pipeline: plain data parallelism", data_parallel, profile)
    # All but those of which the profile says that their results do not follow from the sample alone.
    stored = [e.name for e in profile.encoders if e.cacheable is not False]
    if stored and not options.encode_first:
        stored_profile, sample_bytes = _with_stored(profile, stored)
        read_s = options.global_batch_size / cluster.num_ranks * sample_bytes / disk_bytes_per_s
        disk = f"{size(sample_bytes)} a sample, with callbacks=cached"
        change = f"storing encodings ({', '.join(stored)}), {disk}"
        yield _Try(change, as_planned, stored_profile, read_s)
    if profile.encoders and options.filling == "none":
        change = "frozen work in the bubbles (filling=auto)"
        yield _Try(change, {**as_planned, "filling": "auto"}, profile)
    for spec in SCHEDULES.values():
        if spec.advice:
            change = f"{spec.advice} (schedule={spec.name})"
            any_stages = {**any_cut, "num_stages": "auto"} if spec.place else any_cut
            base = any_stages if spec.place or spec.splits_backward else as_planned
            yield _Try(change, {**base, "schedule": spec.name}, profile)
    yield _Try(BEST, {**any_shape, "schedule": "auto"}, profile)


def _with_stored(profile: ModelProfile, names: Collection[str]) -> tuple[ModelProfile, int]:
    """Returns the profile of a run that reads results of some encoders, and their bytes of each sample.

    They take no time then, but stay in memory.
    """
    none, encoders, sample_bytes = Seconds.per_sample(0.0), list[EncoderProfile](), 0
    for encoder in profile.encoders:
        if encoder.name in names:
            sample_bytes += encoder.disk_bytes_per_sample
            layers = tuple(replace(layer, forward_s=none) for layer in encoder.layers)
            encoder = replace(encoder, layers=layers)
        encoders.append(encoder)
    return replace(profile, encoders=tuple(encoders)), sample_bytes


def _moved(plan: PipelinePlan, changed: PipelinePlan) -> str:
    """Returns where the new plan cuts, if it cuts the same number of stages elsewhere."""
    old, new = list(plan.first_layers[1:]), list(changed.first_layers[1:])
    if changed.num_stages == 1 or old == new:
        return ""
    replicas = [stage.num_replicas for stage in changed.stages]
    shares = f", replicas {replicas}" if len(set(replicas)) > 1 else ""
    return f", cut before layers {', '.join(map(str, new))}{shares}"
