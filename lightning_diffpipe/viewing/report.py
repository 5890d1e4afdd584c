"""Pages of text: a plan (`report`), two (`diff`), costs (`cost_table`), and why it is not faster (`explain`).

The last has the parts of a step, its bottleneck, and the one change that helps most. None is a rule of thumb: every
part is found by simulating the same plan with that part taken away, each change by planning again with that change.
"""

import itertools
import json
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
from lightning_diffpipe.planning.memory import checkpointed, streamed
from lightning_diffpipe.planning.partition import Stage
from lightning_diffpipe.planning.plan import SAME_STEP, PipelinePlan, PlannedChange, check_layers
from lightning_diffpipe.planning.profile import (
    DISK_BYTES_PER_S,
    BackboneProfile,
    EncoderLayerProfile,
    EncoderProfile,
    LayerProfile,
    ModelProfile,
    Seconds,
    encoded_first,
    joined,
)
from lightning_diffpipe.planning.schedules import DEFAULT_SCHEDULE, SCHEDULES
from lightning_diffpipe.planning.search import find_plan
from lightning_diffpipe.viewing.text import (
    count_of,
    operations,
    percent,
    seconds,
    size,
    table,
)


def report(plan: PipelinePlan, max_columns: int = 120) -> str:
    """Returns the whole page: headline, table of stages, numbers, bottleneck, timeline."""
    parts = [headline(plan), stage_table(plan), numbers(plan)]
    if plan.costs is not None:
        parts.append(str(explain(plan)))
        parts.append(plan.timeline.render(max_columns=max_columns))
    return "\n\n".join(parts)


def headline(plan: PipelinePlan) -> str:
    """Returns a line that tells how ranks and samples are shared."""
    sizes = sorted(set(plan.microbatch_sizes), reverse=True)
    samples = " or ".join(str(n) for n in sizes) + (" samples" if max(sizes) > 1 else " sample")
    pipelines = count_of(plan.num_pipelines, "pipeline")
    stages = count_of(plan.num_stages, "stage")
    return (
        f"plan {plan.digest}: {plan.num_ranks} ranks as {pipelines} of {stages} "
        f"on {count_of(plan.ranks_per_pipeline, 'rank')}, "
        f"{count_of(plan.num_microbatches, 'microbatch', 'es')} of {samples}, "
        f"{plan.options.schedule}, filling {plan.options.filling}"
    )


def stage_table(plan: PipelinePlan) -> str:
    """Draws a table with a row for each stage."""
    times = ("forward", "backward", "to next", "reduce")
    header = ["stage", "ranks", "layers", "of", *times, "memory"]
    rows, costs, memory = [], plan.costs, plan.planned.peak_memory_bytes
    header += ["recomputed"] if plan.recomputed else []
    header += ["streamed"] if plan.streamed else []
    for stage in plan.stages:
        i, ranks = stage.index, plan.placement.stage_ranks[stage.index]
        where = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
        row = [str(i), where, f"{stage.first_layer}-{stage.last_layer}", stage.backbone]
        if costs is None:
            row += ["?"] * 4
        else:
            tables = costs.forward_s, costs.backward_s, costs.gradient_s
            times_s = [table[i][0] for table in tables]
            row += [seconds(time_s) for time_s in (*times_s, costs.reduce_s(ranks[0]))]
        row.append(size(max(memory[rank] for rank in ranks)) if memory else "?")
        if plan.recomputed:
            row.append(f"{len(stage.recomputed)} of {stage.num_layers}")
        if plan.streamed:
            row.append(_ranges(stage.streamed))
        rows.append(row)
    return table(header, rows)


def _ranges(numbers: Sequence[int]) -> str:
    """Returns ascending numbers in short, as `0-2, 5, 7-8`."""
    runs = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    ends = ([number for _, number in run] for _, run in runs)
    return ", ".join(f"{a}-{b}" if a < b else f"{a}" for a, *_, b in (run * 2 for run in ends))


def numbers(plan: PipelinePlan) -> str:
    """Returns lines on the planned step: its time, bubbles, frozen work, and memory that is moved."""
    planned = plan.planned
    lines = [
        f"step          {seconds(planned.iteration_s)}, {planned.samples_per_s:.4g} samples/s",
        f"bubble ratio  {percent(planned.bubble_ratio)}",
        f"no bubbles    {seconds(planned.no_bubble_limit_s)} at best",
    ]
    if planned.frozen_s:
        count, encoding_ranks = plan.ranks_per_pipeline, plan.options.encoding_ranks
        encoding = count if encoding_ranks == "auto" else encoding_ranks
        last = f"the last {encoding} ranks" if encoding > 1 else "the last rank"
        where = "each rank" if encoding == count else last
        lines.append(f"frozen work   {seconds(planned.frozen_s / encoding)} on {where}")
    if plan.options.encode_first:
        lines.append("encoders      in memory before training only (encode_first)")
    if plan.options.shard_optimizer is True:
        lines.append("optimizer     the ranks that hold a stage share its state")
    if planned.offloaded_bytes:
        most, copies = max(planned.offloaded_bytes), plan.costs.states_s if plan.costs else 0.0
        lines.append(
            f"optimizer     up to {size(most)} of states in host memory, copied there and back in {seconds(copies)}"
        )
    for rank, num_bytes in enumerate(planned.streamed_bytes):
        if num_bytes:
            copied = planned.copied_bytes[rank], planned.copied_s[rank]
            lines.append(
                f"streaming     rank {rank} has {size(num_bytes)} of weights in host memory, and copies "
                f"{size(copied[0])} in {seconds(copied[1])} a step"
            )
    if planned.iteration_s != planned.unfilled_iteration_s:
        lines.append(
            f"unfilled      {seconds(planned.unfilled_iteration_s)}, "
            f"bubble ratio {percent(planned.unfilled_bubble_ratio)}; "
            f"leftover {seconds(planned.leftover_s)}"
        )
    return "\n".join(lines)


HEADER = ("layer", "forward", "backward", "parameters", "boundary", "activations", "operations")


def cost_table(profile: ModelProfile, samples: int = 1) -> str:
    """Draws a table for each backbone and encoder, with a row for each layer.

    Times are for so many samples; boundary and activation bytes and operations are of one.
    """
    times = f"times of {samples} sample{'' if samples == 1 else 's'}"
    parts = [f"{profile.name}: {times}; boundary, activations and operations (forward) of one"]
    every: tuple[BackboneProfile | EncoderProfile, ...] = (*profile.backbones, *profile.encoders)
    for part in every:
        rows = []
        for layer in part.layers:
            if isinstance(layer, LayerProfile):
                crosses = layer.boundary_bytes_per_sample
            else:
                crosses = layer.output_bytes_per_sample
            rows.append(_row(layer.name, [layer], samples, size(crosses)))
        # What crosses a boundary does not add up.
        parts.append(f"{part.name}\n{table(HEADER, [*rows, _row('all', part.layers, samples)])}")
    return "\n\n".join(parts)


def _row(
    name: str,
    layers: Sequence[LayerProfile | EncoderLayerProfile],
    samples: int,
    boundary: str = "",
) -> list[str]:
    """Adds up layers; frozen ones have neither a backward nor activations."""
    trained = [layer for layer in layers if isinstance(layer, LayerProfile)]
    stored = sum(x.activation_bytes_per_sample + x.activation_bytes_per_microbatch for x in trained)
    return [
        name,
        seconds(sum(layer.forward_s.at(samples) for layer in layers)),
        seconds(sum(layer.backward_s.at(samples) for layer in trained)) if trained else "",
        size(sum(layer.parameter_bytes for layer in layers)),
        boundary,
        size(stored) if trained else "",
        operations(sum(layer.flops_per_sample for layer in layers)),
    ]


def diff(a: PipelinePlan, b: PipelinePlan) -> str:
    """Returns what changes from plan `a` to plan `b`.

    Example:
        stage 1 takes layers 4-7 instead of 4-6
        num_microbatches: 4 instead of 8
        step: 1.20 s instead of 1.10 s, 9.1% slower
    """
    if a.digest == b.digest:
        return f"the plans are the same ({a.digest})"
    old, new = a.options.to_dict(), b.options.to_dict()
    lines = [
        *([] if a.num_ranks == b.num_ranks else [f"ranks: {b.num_ranks} instead of {a.num_ranks}"]),
        *(f"{name}: {new[name]} instead of {old[name]}" for name in old if old[name] != new[name]),
        *_differences(a, b),
        *_changed_numbers(a, b),
    ]
    if lines:
        return "\n".join(lines)
    old, new = json.loads(a.to_json()), json.loads(b.to_json())  # costs, or pieces of frozen work
    names = sorted(n for n in (old.keys() | new.keys()) - {"digest"} if old.get(n) != new.get(n))
    return f"what they do is the same; other in the files: {', '.join(names)}"


def _differences(a: PipelinePlan, b: PipelinePlan) -> Iterator[str]:
    """Yields layers of other names (the first one), stages elsewhere, and programs in another order."""
    others = (i for i, (old, new) in enumerate(zip(a.layers, b.layers, strict=False)) if old != new)
    for i in itertools.islice(others, 1):
        yield f"another model: layer {i} is {b.layers[i]} instead of {a.layers[i]}"
    for old, new in zip(a.stages, b.stages, strict=False):
        if (old.first_layer, old.last_layer) != (new.first_layer, new.last_layer):
            yield (
                f"stage {new.index} takes layers {new.first_layer}-{new.last_layer} "
                f"instead of {old.first_layer}-{old.last_layer}"
            )
    yield from (f"{stage} is gone" for stage in a.stages[b.num_stages :])
    yield from (f"{stage} is new" for stage in b.stages[a.num_stages :])
    changed = [r for r, (p, q) in enumerate(zip(a.programs, b.programs, strict=False)) if p != q]
    if len(a.programs) == len(b.programs) and a.num_microbatches == b.num_microbatches and changed:
        ranks = ", ".join(str(rank) for rank in changed)
        yield f"the programs of ranks {ranks} order their work differently"


def _changed_numbers(a: PipelinePlan, b: PipelinePlan) -> Iterator[str]:
    old, new = a.planned, b.planned
    if old.iteration_s != new.iteration_s:
        yield (
            f"step: {seconds(new.iteration_s)} instead of {seconds(old.iteration_s)}, "
            f"{_change(old.iteration_s, new.iteration_s, 'slower', 'faster')}"
        )
    if round(old.samples_per_s, 9) != round(new.samples_per_s, 9):
        yield f"samples/s: {new.samples_per_s:.4g} instead of {old.samples_per_s:.4g}"
    if round(old.bubble_ratio, 4) != round(new.bubble_ratio, 4):
        yield f"bubble ratio: {percent(new.bubble_ratio)} instead of {percent(old.bubble_ratio)}"
    most, was = max(new.peak_memory_bytes, default=0), max(old.peak_memory_bytes, default=0)
    if most != was:
        change = _change(was, most, "more", "less")
        yield f"memory of the fullest rank: {size(most)} instead of {size(was)}, {change}"


def _change(old: float, new: float, up: str, down: str) -> str:
    if not old:
        return up if new > old else down
    return f"{percent(abs(new - old) / old)} {up if new > old else down}"


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
