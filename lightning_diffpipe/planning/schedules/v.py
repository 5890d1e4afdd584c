"""V: one chain of twice as many stages as ranks, down the ranks and up again.

Rank `r` of R holds stages `r` and `2R - 1 - r`: the first and the last, the second and the last but one. So
both ends of a U-Net's skip lie on one rank, and need not travel; nor does anything at the turning point.

    rank 0 | 0F0 0F1 0F2 3F0 3B0  -- 3F1 3F2 3B1  -- 3B2  -- 0B0  -- 0F3 0B1  -- ...
    rank 1 |   . 1F0 2F0 1F1 2F1 1F2 2F2 2B0  -- 1B0  -- 2B1  -- 1B1  -- 1F3 2F3 ...

The order is found by list scheduling. With whole backwards forwards come first, and at most `2R - 1`
microbatches are under way: with equal stages and free links the bubble is that of two interleaved stages on
a rank, `R - 1` times a stage's forward and backward; with some numbers of ranks and microbatches a step takes up
to 2 % longer. With backwards in two parts (ZB-V) gradients of inputs come first, those of weights last, with the
whole backwards of the first stage, for which nobody waits; a bubble of `R - 1` forwards is left of it, with
`2R - 1` microbatches or more.

Sources:
    Zero bubble on this placement: Pipeline Parallelism with Controllable Memory, Qi et al. (2024),
    https://arxiv.org/abs/2405.15362. Both ends of a skip on one rank: PULSE. The greedy orders are ours.
"""

from __future__ import annotations

from functools import lru_cache, partial

from lightning_diffpipe.planning.instruction import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Program,
)
from lightning_diffpipe.planning.schedule import Placement, ScheduleSpec
from lightning_diffpipe.planning.schedules.greedy import Work, list_schedule


def _place(num_stages: int, num_ranks: int) -> Placement:
    down = tuple((rank,) for rank in range(num_ranks))
    assert num_stages == 2 * num_ranks, "see `ScheduleSpec.can_place`"
    return Placement(down + down[::-1])


@lru_cache(maxsize=64)
def _programs(
    placement: Placement, num_microbatches: int, splits_backward: bool
) -> tuple[Program, ...]:
    num_ranks = placement.num_ranks
    if splits_backward:
        most = num_ranks + (num_ranks + 1) // 4
        order: dict[type[Work], int] = {
            BackwardInput: 0,
            Forward: 1,
            BackwardWeight: 2,
            Backward: 2,
        }
    else:
        most, order = 2 * num_ranks - 1, {Forward: 0, Backward: 1}
    up = 1 if splits_backward else -1

    return list_schedule(
        placement,
        num_microbatches,
        lambda kind, stage: 2 if kind is Backward else 1,
        lambda work: (order[type(work)], work.microbatch, up * work.stage),
        lambda stage: most if stage == 0 else num_microbatches,
        splits_backward,
    )


def _program(
    placement: Placement, num_microbatches: int, rank: int, *, splits_backward: bool
) -> Program:
    return _programs(placement, num_microbatches, splits_backward)[rank]


v = ScheduleSpec(
    "v",
    partial(_program, splits_backward=False),
    place=_place,
    stages_per_rank=(2,),
    most_per_rank=2,
    nested=True,
    auto=True,
    advice="both ends of skips on one rank",
)
zero_bubble_v = ScheduleSpec(
    "zero_bubble_v",
    partial(_program, splits_backward=True),
    place=_place,
    stages_per_rank=(2,),
    most_per_rank=2,
    nested=True,
    splits_backward=True,
    advice="backwards in two parts, both ends of skips on one rank",
)
