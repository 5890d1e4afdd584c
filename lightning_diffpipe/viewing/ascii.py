"""Schedules and timelines as text, for logs and for errors.

rank 1 |  . F0 F1  .  . B0 -- F2 B1 --  ?          <-- waits here
rank 2 |  .  . F0 B0 -- F1 B1 -- F2  .  .  .
"""

from __future__ import annotations

from lightning_diffpipe.errors import ScheduleError
from lightning_diffpipe.planning.instruction import Compute
from lightning_diffpipe.planning.schedule import Schedule
from lightning_diffpipe.planning.simulator import simulate
from lightning_diffpipe.planning.timeline import Span, Timeline, draw

ARROW = "<-- waits here"


def render(timeline: Timeline, tick_s: float | None = None, max_columns: int = 120) -> str:
    """Draws a timeline, one row for each rank; `str(timeline)` with a say in the scale.

    Args:
        timeline: Planned or measured.
        tick_s: Seconds of one cell; chosen if None.
        max_columns: Widest row, for a chosen tick.
    """
    return draw(timeline.spans, timeline.num_ranks, tick_s, max_columns)


def side_by_side(planned: Timeline, measured: Timeline, max_columns: int = 120) -> str:
    """Draws the planned and the measured timeline on the same scale of time, rank under rank."""
    end = max(planned.iteration_s, measured.iteration_s)
    tick_s = end / max(max_columns // 3, 8) if end else 1.0
    pairs = zip(
        render(planned, tick_s).splitlines(), render(measured, tick_s).splitlines(), strict=True
    )
    lines = []
    for plan, run in pairs:
        lines += [f"planned   {plan}", f"measured  {run}"]
    return "\n".join(lines)


def waiting(schedule: Schedule, at: int, rank: int) -> str:
    """Draws where a rank stands that waits too long.

    Args:
        schedule: The schedule of the pipeline, with communication.
        at: Index into the waiting rank's program of the instruction it stands at.
        rank: The waiting rank of the pipeline.

    Returns:
        The planned timeline of all ranks, in ticks (forward 1, backward 2), with the waiting rank's row ending
        where it stands.
    """
    try:
        timeline = simulate(schedule)
    except ScheduleError as deadlock:
        return str(deadlock)  # Then this is why the rank waits.
    program = schedule.programs[rank]
    # Communication takes no time on a rank, so that only computation makes spans.
    done = sum(1 for instruction in program[:at] if isinstance(instruction, Compute))
    kept: list[Span] = []
    for peer in range(schedule.num_ranks):
        spans = timeline.spans_of(peer)
        kept += spans[:done] if peer == rank else spans
    picture = draw(kept, schedule.num_ranks, tick_s=1.0).splitlines()
    stands_at = max((round(s.stop_s) for s in timeline.spans_of(rank)[:done]), default=0)
    head, cells = picture[rank].split("|", 1)
    width = len(cells) // max(round(max((s.stop_s for s in kept), default=1.0)), 1)
    here = program[at] if at < len(program) else "the end"
    picture[rank] = f"{head}|{cells[: stands_at * width]}{'?':>{width}}          {ARROW}: {here}"
    return "\n".join(picture)
