"""Two plans side by side, in words and numbers: what differs, and what it costs or gains."""

from __future__ import annotations

import json
from collections.abc import Iterator

from lightning_diffpipe.planning.plan import PipelinePlan
from lightning_diffpipe.viewing.units import percent, seconds, size


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
        *_layers(a, b),
        *_stages(a, b),
        *_programs(a, b),
        *_numbers(a, b),
    ]
    return "\n".join(lines) or _parts(a, b)


def _parts(a: PipelinePlan, b: PipelinePlan) -> str:
    """Names the parts of the files that differ, where nothing above says so: costs, or pieces of frozen work."""
    old, new = json.loads(a.to_json()), json.loads(b.to_json())
    names = sorted(n for n in (old.keys() | new.keys()) - {"digest"} if old.get(n) != new.get(n))
    return f"what they do is the same; other in the files: {', '.join(names)}"


def _layers(a: PipelinePlan, b: PipelinePlan) -> Iterator[str]:
    """The first layer of another name; nothing if a plan does not name its layers."""
    for position, (old, new) in enumerate(zip(a.layers, b.layers, strict=False)):
        if old != new:
            yield f"another model: layer {position} is {new} instead of {old}"
            return


def _stages(a: PipelinePlan, b: PipelinePlan) -> Iterator[str]:
    for old, new in zip(a.stages, b.stages, strict=False):
        if (old.first_layer, old.last_layer) != (new.first_layer, new.last_layer):
            yield (
                f"stage {new.index} takes layers {new.first_layer}-{new.last_layer} "
                f"instead of {old.first_layer}-{old.last_layer}"
            )
    for stage in a.stages[b.num_stages :]:
        yield f"{stage} is gone"
    for stage in b.stages[a.num_stages :]:
        yield f"{stage} is new"


def _programs(a: PipelinePlan, b: PipelinePlan) -> Iterator[str]:
    same_shape = len(a.programs) == len(b.programs) and a.num_microbatches == b.num_microbatches
    changed = [r for r, (p, q) in enumerate(zip(a.programs, b.programs, strict=False)) if p != q]
    if same_shape and changed:
        ranks = ", ".join(str(rank) for rank in changed)
        yield f"the programs of ranks {ranks} order their work differently"


def _numbers(a: PipelinePlan, b: PipelinePlan) -> Iterator[str]:
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
