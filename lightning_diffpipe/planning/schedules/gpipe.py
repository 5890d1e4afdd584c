"""GPipe: all forwards, then all backwards. The simplest schedule, used as a reference.

Every rank keeps the activations of all its microbatches, so that memory grows with their number.

    rank 0 | F0 F1 F2  .  .  .  .  .  . B0 -- B1 -- B2 --
    rank 1 |  . F0 F1 F2  .  .  . B0 -- B1 -- B2 --  .  .
    rank 2 |  .  . F0 F1 F2 B0 -- B1 -- B2 --  .  .  .  .

Source: GPipe, Huang et al. (2019), https://arxiv.org/abs/1811.06965
"""

from lightning_diffpipe.planning.instruction import Backward, Forward, Program
from lightning_diffpipe.planning.schedule import Placement, ScheduleSpec


def _program(placement: Placement, num_microbatches: int, rank: int) -> Program:
    (stage,) = placement.stages_of(rank)
    microbatches = placement.microbatches_of(stage, rank, num_microbatches)
    return (*(Forward(stage, m) for m in microbatches), *(Backward(stage, m) for m in microbatches))


gpipe = ScheduleSpec("gpipe", _program, keeps_all=True, auto=True)
