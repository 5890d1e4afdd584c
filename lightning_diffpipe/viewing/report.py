"""A plan as a page of text: what runs where, what it costs, what to expect, and what holds it up."""

from __future__ import annotations

from lightning_diffpipe.planning.plan import PipelinePlan
from lightning_diffpipe.viewing.ascii import render
from lightning_diffpipe.viewing.explain import explain
from lightning_diffpipe.viewing.units import percent, seconds, size, table


def report(plan: PipelinePlan, max_columns: int = 120) -> str:
    """The whole page: headline, table of stages, numbers, bottleneck, timeline."""
    parts = [headline(plan), stage_table(plan), numbers(plan)]
    if plan.costs is not None:
        parts.append(str(explain(plan)))
        parts.append(render(plan.timeline, max_columns=max_columns))
    return "\n\n".join(parts)


def headline(plan: PipelinePlan) -> str:
    """One line: how ranks and samples are shared."""
    sizes = sorted(set(plan.microbatch_sizes), reverse=True)
    samples = " or ".join(str(n) for n in sizes) + (" samples" if max(sizes) > 1 else " sample")
    pipelines = _count(plan.num_pipelines, "pipeline")
    stages = _count(plan.num_stages, "stage")
    return (
        f"plan {plan.digest}: {plan.num_ranks} ranks as {pipelines} of {stages} "
        f"on {_count(plan.ranks_per_pipeline, 'rank')}, "
        f"{_count(plan.num_microbatches, 'microbatch', 'es')} of {samples}, "
        f"{plan.options.schedule}, filling {plan.options.filling}"
    )


def _count(number: int, what: str, ending: str = "s") -> str:
    return f"{number} {what}{'' if number == 1 else ending}"


def stage_table(plan: PipelinePlan) -> str:
    """One row for each stage."""
    header = [
        "stage",
        "ranks",
        "layers",
        "of",
        "forward",
        "backward",
        "to next",
        "reduce",
        "memory",
    ]
    rows = []
    for stage in plan.stages:
        ranks = plan.placement.stage_ranks[stage.index]
        row = [
            str(stage.index),
            str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}",
            f"{stage.first_layer}-{stage.last_layer}",
            stage.backbone,
        ]
        if plan.costs is None:
            row += ["?"] * 4
        else:
            costs, i = plan.costs, stage.index
            row += [
                seconds(costs.forward_s[i][0]),
                seconds(costs.backward_s[i][0]),
                seconds(costs.gradient_s[i][0]),
                seconds(costs.reduce_s(ranks[0])),
            ]
        memory = plan.planned.peak_memory_bytes
        rows.append([*row, size(max(memory[rank] for rank in ranks)) if memory else "?"])
    return table(header, rows)


def numbers(plan: PipelinePlan) -> str:
    """What a step promises."""
    planned = plan.planned
    lines = [
        f"step          {seconds(planned.iteration_s)}, {planned.samples_per_s:.4g} samples/s",
        f"bubble ratio  {percent(planned.bubble_ratio)}",
        f"no bubbles    {seconds(planned.no_bubble_limit_s)} at best",
    ]
    if planned.frozen_s:
        share = planned.frozen_s / plan.ranks_per_pipeline
        lines.append(f"frozen work   {seconds(share)} on each rank")
    if planned.iteration_s != planned.unfilled_iteration_s:
        lines.append(
            f"unfilled      {seconds(planned.unfilled_iteration_s)}, "
            f"bubble ratio {percent(planned.unfilled_bubble_ratio)}; "
            f"leftover {seconds(planned.leftover_s)}"
        )
    return "\n".join(lines)
