"""What is said of a run when it is over: why its steps took longer than planned, and what each rank did."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_diffpipe.planning.plan import PipelinePlan
from lightning_diffpipe.planning.timeline import Timeline
from lightning_diffpipe.viewing.ascii import render, side_by_side
from lightning_diffpipe.viewing.gap import explain_gap
from lightning_diffpipe.viewing.measured import Occupation, occupation, without_posts
from lightning_diffpipe.viewing.units import percent, seconds


@dataclass(frozen=True)
class Sample:
    """One step, looked at closely.

    Attributes:
        timeline: What the ranks of the first pipeline did.
        after_s: Outside of the pipeline, on the first rank: behind it, and before it without loading.
        loading_s: Before it, waiting for the data loader.
    """

    timeline: Timeline
    after_s: float
    loading_s: float


def typical(samples: Sequence[Sample]) -> Sample:
    """The step of median length; of two in the middle the shorter one, as steps are only ever held up."""
    by_length = sorted(samples, key=lambda sample: sample.timeline.iteration_s)
    return by_length[(len(by_length) - 1) // 2]


def closing_report(plan: PipelinePlan, samples: Sequence[Sample]) -> str:
    """The difference in words, what each rank did, and both timelines.

    Args:
        plan: What was planned.
        samples: Steps of one run; the typical one is shown.
    """
    measured = typical(samples).timeline
    gap = explain_gap(
        plan,
        measured,
        statistics.median(sample.after_s for sample in samples),
        statistics.median(sample.loading_s for sample in samples),
    )
    lines = [str(gap), "", _table_of_ranks(occupation(measured))]
    if plan.costs is not None:
        lines += ["", _drawn(plan.timeline, without_posts(measured))]
    return "\n".join(lines)


def _drawn(planned: Timeline, measured: Timeline) -> str:
    """Both timelines on one scale of time, unless one would be a dot beside the other."""
    if planned.iteration_s < 3 * measured.iteration_s < 9 * planned.iteration_s:
        return side_by_side(planned, measured)
    pictures = {"planned": render(planned), "measured, on another scale": render(measured)}
    return "\n".join(f"{name}\n{picture}" for name, picture in pictures.items())


def _table_of_ranks(spent: Occupation) -> str:
    rows = zip(
        spent.busy_s, spent.idle_s, spent.in_front_s, spent.filled_s, spent.leftover_s, strict=True
    )
    lines = []
    for rank, (busy_s, idle_s, front_s, filled_s, leftover_s) in enumerate(rows):
        frozen = [
            f"{seconds(value)} {where}"
            for value, where in (
                (front_s, "in front"), (filled_s, "in bubbles"), (leftover_s, "left over")
            )
            if value
        ]  # fmt: skip
        text = f"rank {rank}: {seconds(busy_s)} at work, {seconds(idle_s)} idle"
        share = percent(idle_s / spent.iteration_s) if spent.iteration_s else "0%"
        lines.append(f"{text} ({share}){', frozen work ' + ', '.join(frozen) if frozen else ''}")
    return "\n".join(lines)
