"""One file per schedule, one pure function each: a placement and a count in, a `Schedule` out.

`SCHEDULES` lists those that train one backbone with one stage on each rank, by the name that
options and plans use; `INTERLEAVED` is the one with several. `schedule_of` makes any of them.
"""

from collections.abc import Callable
from functools import partial

from lightning_diffpipe.planning.instruction import Program
from lightning_diffpipe.planning.schedule import Placement, Schedule
from lightning_diffpipe.planning.schedules.gpipe import gpipe, gpipe_program
from lightning_diffpipe.planning.schedules.interleaved import interleaved, interleaved_program
from lightning_diffpipe.planning.schedules.one_f_one_b import one_f_one_b, one_f_one_b_program
from lightning_diffpipe.planning.schedules.self_conditioning import (
    self_conditioning,
    self_conditioning_program,
)
from lightning_diffpipe.planning.schedules.zero_bubble import zero_bubble, zero_bubble_program


def deep_one_f_one_b(stages: int | Placement, num_microbatches: int) -> Schedule:
    """1F1B with a warm-up deep enough to hide slow links."""
    return one_f_one_b(stages, num_microbatches, deep_warmup=True)


SCHEDULES: dict[str, Callable[[int | Placement, int], Schedule]] = {
    "1f1b": one_f_one_b,
    "1f1b_deep": deep_one_f_one_b,
    "gpipe": gpipe,
    "zero_bubble": zero_bubble,
    "self_conditioning": self_conditioning,
}

INTERLEAVED = "interleaved"

SCHEDULE_NAMES = (*SCHEDULES, INTERLEAVED)

PROGRAMS: dict[str, Callable[[Placement, int, int], Program]] = {
    "1f1b": one_f_one_b_program,
    "1f1b_deep": partial(one_f_one_b_program, deep_warmup=True),
    "gpipe": gpipe_program,
    "zero_bubble": zero_bubble_program,
    "self_conditioning": self_conditioning_program,
    INTERLEAVED: interleaved_program,
}
"""The program of one rank alone: given where stages run, how many microbatches there are, and the rank."""

AUTO_SCHEDULES = ("1f1b", "1f1b_deep", "gpipe", INTERLEAVED)
"""Those that do the same work in another order. The others change it: they split backwards, which not
every module allows, or add a forward."""


def schedule_of(name: str, placement: Placement, num_microbatches: int) -> Schedule:
    """The schedule of that name.

    Args:
        name: One of `SCHEDULE_NAMES`.
        placement: Where the stages run; for `INTERLEAVED` dealt out round robin.
        num_microbatches: Microbatches of a pipeline.

    Raises:
        ScheduleError: The schedule cannot be made for so many microbatches.
    """
    if name != INTERLEAVED:
        return SCHEDULES[name](placement, num_microbatches)
    num_ranks = placement.num_ranks
    return interleaved(num_ranks, placement.num_stages // num_ranks, num_microbatches)
