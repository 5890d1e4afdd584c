"""Text for people: seconds, bytes and tables; and schedules and timelines as they run.

rank 1 |  . F0 F1  .  . B0 -- F2 B1 --  ?          <-- waits here
rank 2 |  .  . F0 B0 -- F1 B1 -- F2  .  .  .

`python -m lightning_diffpipe.viewing.text 1f1b 4 8` draws a schedule for 4 ranks and 8 microbatches in ticks: a
forward takes 1, a backward 2, a message 0.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace

from lightning_diffpipe.errors import ScheduleError
from lightning_diffpipe.planning.instruction import Compute
from lightning_diffpipe.planning.schedule import Schedule
from lightning_diffpipe.planning.schedules import SCHEDULES
from lightning_diffpipe.planning.simulator import simulate
from lightning_diffpipe.planning.timeline import Timeline

ARROW = "<-- waits here"


def side_by_side(planned: Timeline, measured: Timeline, max_columns: int = 120) -> str:
    """Draws the planned and the measured timeline on the same scale of time, rank under rank."""
    end = max(planned.iteration_s, measured.iteration_s)
    tick_s = end / max(max_columns // 3, 8) if end else 1.0
    images = (timeline.render(tick_s).splitlines() for timeline in (planned, measured))
    lines = []
    for plan, run in zip(*images, strict=True):
        lines += [f"planned   {plan}", f"measured  {run}"]
    return "\n".join(lines)


def waiting(schedule: Schedule, at: int, rank: int) -> str:
    """Draws where a rank stands that waits too long: at instruction number `at` of its lowered program.

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
    done_spans = timeline.spans_of(rank)[:done]
    shown = [*(span for span in timeline.spans if span.rank != rank), *done_spans]
    image = replace(timeline, spans=tuple(shown)).render(tick_s=1.0).splitlines()
    stands_at = max((round(span.stop_s) for span in done_spans), default=0)
    head, cells = image[rank].split("|", 1)
    width = len(cells) // max(round(max((s.stop_s for s in shown), default=1.0)), 1)
    here = program[at] if at < len(program) else "the end"
    image[rank] = f"{head}|{cells[: stands_at * width]}{'?':>{width}}          {ARROW}: {here}"
    return "\n".join(image)


def seconds(value: float) -> str:
    """Writes seconds with three digits and a unit.

    Example:
        >>> seconds(0.0123), seconds(2.5), seconds(0.00000042)
        ('12.3 ms', '2.50 s', '0.42 us')
    """
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(value) >= scale or unit == "us":
            break
    number = value / scale
    digits = 0 if abs(number) >= 100 else 1 if abs(number) >= 10 else 2
    return f"{number:.{digits}f} {unit}" if value else "0 s"


def size(num_bytes: float) -> str:
    """Writes bytes with a binary prefix.

    Example:
        >>> size(3 * 2**30), size(1500), size(12)
        ('3.0 GiB', '1.5 KiB', '12 B')
    """
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def operations(flops: float) -> str:
    """Writes operations with a decimal prefix; a question mark if unknown.

    Example:
        >>> operations(2.96e12), operations(1500), operations(0)
        ('2.96 TFLOP', '1.50 kFLOP', '?')
    """
    for unit, scale in (("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6), ("kFLOP", 1e3)):
        if flops >= scale:
            return f"{flops / scale:.2f} {unit}"
    return f"{flops:.0f} FLOP" if flops else "?"


def percent(share: float) -> str:
    """Returns a share of one.

    Example:
        >>> percent(0.2837)
        '28.4%'
    """
    return f"{100 * share:.1f}%"


def count_of(number: int, what: str, ending: str = "s") -> str:
    """Writes a number of things.

    Example:
        >>> count_of(1, "stage"), count_of(8, "microbatch", "es")
        ('1 stage', '8 microbatches')
    """
    return f"{number} {what}{'' if number == 1 else ending}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligns columns to the right, but the first column to the left.

    Example:
        >>> print(table(["stage", "time"], [["0", "1 s"], ["1", "12 s"]]))
        stage  time
        0       1 s
        1      12 s
    """
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = []
    for row in (header, *rows):
        cells = [f"{row[0]:<{widths[0]}}"]
        cells += [f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[1] not in SCHEDULES:
        sys.exit(f"usage: SCHEDULE RANKS MICROBATCHES, with SCHEDULE one of {', '.join(SCHEDULES)}")
    spec, num_ranks, num_microbatches = SCHEDULES[sys.argv[1]], *map(int, sys.argv[2:])
    placement = spec.place and spec.place(spec.stages_per_rank[0] * num_ranks, num_ranks)
    timeline = simulate(spec(placement or num_ranks, num_microbatches))
    print(timeline)
    print(f"bubble ratio {percent(timeline.bubble_ratio)}, {timeline.iteration_s:g} ticks")
