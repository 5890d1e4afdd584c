"""Pages of text: a plan (`report`), two of them (`diff`), and costs (`cost_table`)."""

import itertools
import json
from collections.abc import Iterator, Sequence

from lightning_diffpipe.planning.plan import PipelinePlan
from lightning_diffpipe.planning.profile import (
    BackboneProfile,
    EncoderLayerProfile,
    EncoderProfile,
    LayerProfile,
    ModelProfile,
)
from lightning_diffpipe.viewing.explain import explain
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
