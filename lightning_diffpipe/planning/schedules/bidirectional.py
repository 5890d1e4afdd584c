"""Several backbones in opposite directions: one is busy where the other has its bubbles.

A cascade trains two backbones that know nothing of each other. Backbone A runs down the ranks, backbone
B up; each rank holds one stage of both. While A fills, B's far end works, and the reverse. Of more than two, every
second one runs up.

    rank 0 | 0F0 3F0 3B0  -- 0B0  -- 0F1 3F1 3B1  -- 0B1  --      A: stages 0 and 1, downwards
    rank 1 | 2F0 1F0 1B0  -- 2B0  -- 2F1 1F1 1B1  -- 2B1  --      B: stages 2 and 3, upwards

The order is found by list scheduling with the times of the stages, with at most `S - s` microbatches in flight on
stage `s` of each backbone. What is most urgent is tried in three ways, and the order is kept that ends first:
backwards, then forwards of the older microbatch; whatever most work depends on that is left of its backbone; or
forwards, by what is left of their microbatch.

Source:
    The idea: DiffusionPipe, Tian et al. (2024), https://arxiv.org/abs/2405.01248, and for two copies of
    one model Chimera, Li and Hoefler (2021), https://arxiv.org/abs/2107.06925; the order is ours.
"""

from __future__ import annotations

from functools import lru_cache

from lightning_diffpipe.planning.instruction import Forward, Program
from lightning_diffpipe.planning.schedule import Placement, ScheduleSpec, Ticks
from lightning_diffpipe.planning.schedules.greedy import Work, list_schedule


def _place(num_stages: int, num_ranks: int) -> Placement:
    down = tuple((rank,) for rank in range(num_ranks))
    starts = tuple(range(0, num_stages, num_ranks))
    both = [(down, down[::-1])[chain % 2] for chain in range(len(starts))]
    return Placement(tuple(ranks for one in both for ranks in one), first_stages=starts)


@lru_cache(maxsize=64)
def _programs(placement: Placement, num_microbatches: int, ticks: Ticks) -> tuple[Program, ...]:
    of_stage = ticks or ((1.0, 2.0),) * placement.num_stages
    left: dict[tuple[bool, int], float] = {}  # of a microbatch, from this work on
    pace: dict[int, float] = {}
    for stage in range(placement.num_stages):
        chain = placement.backbone_of(stage)
        back = sum(of_stage[s][1] for s in chain if s <= stage)
        left[False, stage] = back
        left[True, stage] = back + sum(map(sum, (of_stage[s] for s in chain if s > stage)))
        left[True, stage] += of_stage[stage][0]
        pace[stage] = max(sum(of_stage[s]) for s in chain)

    def by_age(work: Work) -> tuple[float, ...]:
        return isinstance(work, Forward), work.microbatch, work.stage

    def by_all_that_is_left(work: Work) -> tuple[float, ...]:
        later = (num_microbatches - 1 - work.microbatch) * pace[work.stage]
        return (-later - left[isinstance(work, Forward), work.stage], work.stage)

    def forwards_first(work: Work) -> tuple[float, ...]:
        is_forward = isinstance(work, Forward)
        return not is_forward, -left[is_forward, work.stage], work.microbatch, work.stage

    return list_schedule(
        placement,
        num_microbatches,
        lambda kind, stage: of_stage[stage][kind is not Forward],
        by_age,
        lambda stage: placement.backbone_of(stage).stop - stage,
        others=(by_all_that_is_left, forwards_first),
    )


def _program(placement: Placement, num_microbatches: int, rank: int, ticks: Ticks = ()) -> Program:
    return _programs(placement, num_microbatches, ticks)[rank]


bidirectional = ScheduleSpec(
    "bidirectional",
    _program,
    place=_place,
    stages_per_rank=(2,),
    opposite=True,
    timed=True,
    auto=True,
    advice="backbones in opposite directions",
)
