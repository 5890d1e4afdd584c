"""One file per schedule, one pure function each: a placement and a count in, a `Schedule` out.

`SCHEDULES` lists those that train one backbone with one stage on each rank, by the name that
options and plans use; `INTERLEAVED` is the one with several. `schedule_of` makes any of them.
"""

from collections.abc import Callable

from lightning_diffpipe.planning.schedule import Placement, Schedule
from lightning_diffpipe.planning.schedules.gpipe import gpipe
from lightning_diffpipe.planning.schedules.interleaved import interleaved
from lightning_diffpipe.planning.schedules.one_f_one_b import one_f_one_b
from lightning_diffpipe.planning.schedules.self_conditioning import self_conditioning
from lightning_diffpipe.planning.schedules.zero_bubble import zero_bubble


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
