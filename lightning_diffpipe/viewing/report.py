"""Pages of text: a plan (`report`), what layers cost (`cost_table`), what a cache gains (`cache_advice`)."""

from __future__ import annotations

import math

from lightning_diffpipe.planning.caching import CacheAdvice
from lightning_diffpipe.planning.plan import PipelinePlan
from lightning_diffpipe.planning.profile import (
    BackboneProfile,
    EncoderLayerProfile,
    EncoderProfile,
    LayerProfile,
    ModelProfile,
)
from lightning_diffpipe.viewing.ascii import render
from lightning_diffpipe.viewing.explain import explain
from lightning_diffpipe.viewing.units import count_of, operations, percent, seconds, size, table


def report(plan: PipelinePlan, max_columns: int = 120) -> str:
    """Returns the whole page: headline, table of stages, numbers, bottleneck, timeline."""
    parts = [headline(plan), stage_table(plan), numbers(plan)]
    if plan.costs is not None:
        parts.append(str(explain(plan)))
        parts.append(render(plan.timeline, max_columns=max_columns))
    return "\n\n".join(parts)


def headline(plan: PipelinePlan) -> str:
    """Says in one line how ranks and samples are shared."""
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
    """Returns what a step promises."""
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


HEADER = ("layer", "forward", "backward", "parameters", "boundary", "activations", "operations")


def cost_table(profile: ModelProfile, samples: int = 1) -> str:
    """Draws a table for each backbone and encoder, with a row for each layer.

    Args:
        profile: What is shown.
        samples: Times are for so many; boundary and activation bytes and operations are of one.
    """
    times = f"times of {samples} sample{'' if samples == 1 else 's'}"
    parts = [f"{profile.name}: {times}; boundary, activations and operations (forward) of one"]
    every: tuple[BackboneProfile | EncoderProfile, ...] = (*profile.backbones, *profile.encoders)
    for part in every:
        rows = [_row(layer, samples) for layer in part.layers]
        parts.append(f"{part.name}\n{table(HEADER, [*rows, _sum(part.layers, samples)])}")
    return "\n\n".join(parts)


def _row(layer: LayerProfile | EncoderLayerProfile, samples: int) -> list[str]:
    """Writes the row of a layer; a frozen one has neither a backward nor activations."""
    backward = activations = ""
    if isinstance(layer, LayerProfile):
        boundary = layer.boundary_bytes_per_sample
        backward = seconds(layer.backward_s.at(samples))
        activations = size(_activation_bytes(layer))
    else:
        boundary = layer.output_bytes_per_sample
    return [
        layer.name,
        seconds(layer.forward_s.at(samples)),
        backward,
        size(layer.parameter_bytes),
        size(boundary),
        activations,
        operations(layer.flops_per_sample),
    ]


def _activation_bytes(layer: LayerProfile) -> int:
    """Sums the activation bytes of a microbatch of one sample."""
    return layer.activation_bytes_per_sample + layer.activation_bytes_per_microbatch


def _sum(
    layers: tuple[LayerProfile, ...] | tuple[EncoderLayerProfile, ...], samples: int
) -> list[str]:
    """Returns the last row; what crosses a boundary does not add up."""
    trained = [layer for layer in layers if isinstance(layer, LayerProfile)]
    return [
        "all",
        seconds(sum(layer.forward_s.at(samples) for layer in layers)),
        seconds(sum(layer.backward_s.at(samples) for layer in trained)) if trained else "",
        size(sum(layer.parameter_bytes for layer in layers)),
        "",
        size(sum(map(_activation_bytes, trained))) if trained else "",
        operations(sum(layer.flops_per_sample for layer in layers)),
    ]


def cache_advice(advice: CacheAdvice) -> str:
    """Says what storing encodings would gain and cost, and how to do it; see `planning/caching.py`."""
    lines = ["Cache or fill? Encodings of frozen layers can be stored instead of made anew."]
    if advice.cached:
        gain = advice.filled_step_s - advice.cached_step_s
        change = percent(abs(gain) / advice.filled_step_s) if advice.filled_step_s else "0%"
        disk = f"{size(advice.sample_bytes)} a sample"
        if advice.disk_bytes is not None:
            disk += f", {size(advice.disk_bytes)} in all"
        disk += f"; each rank reads {advice.disk_bytes_per_s / 1e6:g} MB/s (disk_bytes_per_s)"
        passes = advice.break_even_passes
        first = "never" if math.isinf(passes) else f"from pass {math.floor(passes) + 1}"
        lines += [
            f"  as planned  {seconds(advice.filled_step_s)} a step",
            f"  stored      {seconds(advice.cached_step_s)} a step ({change} {'less' if gain >= 0 else 'more'}), "
            f"{seconds(advice.writing_s)} of it reading: {', '.join(advice.cached)}",
            f"  on disk     {disk}",
            f"  pays        {first}" + ("" if math.isinf(passes) else " over the data on"),
        ]
    if advice.computed:
        names = ", ".join(advice.computed)
        why = "follows noise or other random numbers, or is quicker to compute"
        lines.append(f"  computed    {names}: {why}")
    if not advice.cached:
        lines.append("  Nothing can be stored: fill bubbles.")
    elif not advice.use_cache:
        lines.append("  Not worth a disk: storing saves less than 2%.")
    else:
        unknown = "; the profile does not say whether encodings follow from the sample alone"
        doubt = "" if advice.certain else unknown
        lines += [
            f"  Worth it if samples come back unchanged (no random crops, captions not redrawn{doubt}):",
            '  EncodingCache("encodings") among the callbacks, or diffpipe train callbacks=cached',
        ]
    return "\n".join(lines)
