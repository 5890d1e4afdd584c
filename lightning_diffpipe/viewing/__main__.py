"""Prints the timeline of a schedule in ticks: forward 1, backward 2, free links.

python -m lightning_diffpipe.viewing 1f1b 4 8
"""

import sys

from lightning_diffpipe.errors import DiffPipeError
from lightning_diffpipe.planning.schedules import SCHEDULES
from lightning_diffpipe.planning.simulator import simulate


def main(arguments: list[str]) -> int:
    """Draws the schedule named by the command line; returns the exit status."""
    if len(arguments) != 3 or arguments[0] not in SCHEDULES:
        print(f"usage: SCHEDULE RANKS MICROBATCHES, with SCHEDULE one of {', '.join(SCHEDULES)}")
        return 2
    name, stages, microbatches = arguments
    try:
        spec, count = SCHEDULES[name], int(stages)
        several = spec.place and spec.place(spec.stages_per_rank[0] * count, count)
        timeline = simulate(spec(several or count, int(microbatches)))
    except (DiffPipeError, ValueError) as error:
        print(error)
        return 2
    print(timeline)
    print(f"bubble ratio {100 * timeline.bubble_ratio:.1f}%, {timeline.iteration_s:g} ticks")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
