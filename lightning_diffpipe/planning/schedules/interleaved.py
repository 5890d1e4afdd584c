"""Interleaved 1F1B: every rank holds several stages, so that the pipeline fills faster.

With `v` stages on each rank a microbatch passes all ranks `v` times. A stage is `v` times as short, and
so is the time until the last rank has work: the bubble shrinks by `v`, messages multiply by `v`.

    rank 0 | 0F0 0F1 2F0 2F1   .   . 2B0  --   . 2B1  -- 0B0  -- 0B1  --
    rank 1 |   . 1F0 1F1 3F0 3B0  -- 3F1 3B1  -- 1B0  -- 1B1  --   .   .

The bubble ratio is `(R - 1) / (v M + R - 1)` for `R` ranks with equal stages and free links.

Source:
    Narayanan et al. (2021), https://arxiv.org/abs/2104.04473
"""

from collections.abc import Sequence

from lightning_diffpipe.planning.instruction import Backward, Forward, Program
from lightning_diffpipe.planning.schedule import Placement, ScheduleSpec
from lightning_diffpipe.planning.schedules.one_f_one_b import in_three_phases


def _program(placement: Placement, num_microbatches: int, rank: int) -> Program:
    stages, num_ranks = placement.stages_of(rank), placement.num_ranks
    # Two more for each rank below: one on the way down, one on the way back; and all other stages.
    num_warmup = 2 * (num_ranks - rank - 1) + (len(stages) - 1) * num_ranks
    if len(stages) == 1:
        num_warmup = num_ranks - rank - 1

    def in_groups(stages: Sequence[int]) -> list[tuple[int, int]]:
        """Yields stages and microbatches: a group passes all stages of the rank before the next one comes."""
        firsts = range(0, num_microbatches, num_ranks)
        return [(s, m) for first in firsts for s in stages for m in range(first, first + num_ranks)]

    forwards = [Forward(stage, m) for stage, m in in_groups(stages)]
    backwards = [Backward(stage, m) for stage, m in in_groups(stages[::-1])]
    return in_three_phases(forwards, backwards, num_warmup)


interleaved = ScheduleSpec(
    "interleaved",
    _program,
    place=Placement.round_robin,
    stages_per_rank=(2, 3, 4),  # more of them send more than they gain
    whole_groups=True,
    auto=True,
    advice="several stages on each rank",
)
