"""GPipe: all forwards, then all backwards. The simplest schedule, used as a reference.

Every rank keeps the activations of all its microbatches, so that memory grows with their number.

    rank 0 | F0 F1 F2  .  .  .  .  .  . B0 -- B1 -- B2 --
    rank 1 |  . F0 F1 F2  .  .  . B0 -- B1 -- B2 --  .  .
    rank 2 |  .  . F0 F1 F2 B0 -- B1 -- B2 --  .  .  .  .

Source: GPipe, Huang et al. (2019), https://arxiv.org/abs/1811.06965
"""

from __future__ import annotations

from lightning_diffpipe.planning.instruction import Backward, Forward, Program
from lightning_diffpipe.planning.schedule import Placement, Schedule, as_placement


def gpipe(stages: int | Placement, num_microbatches: int) -> Schedule:
    """Forwards all microbatches, then backpropagates all, in the same order.

    Args:
        stages: Number of stages, one rank each, or a placement with replicas (one stage on each
            rank).
        num_microbatches: Microbatches of the batch.
    """
    placement = as_placement(stages)
    ranks = range(placement.num_ranks)
    programs = tuple(gpipe_program(placement, num_microbatches, rank) for rank in ranks)
    return Schedule(placement, num_microbatches, programs)


def gpipe_program(placement: Placement, num_microbatches: int, rank: int) -> Program:
    """The program of one rank."""
    (stage,) = placement.stages_of(rank)
    own = placement.microbatches_of(stage, rank, num_microbatches)
    return (*(Forward(stage, m) for m in own), *(Backward(stage, m) for m in own))
