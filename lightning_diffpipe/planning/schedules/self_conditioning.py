"""Self-conditioning: 1F1B behind a wave of forwards without gradients, whose result is fed back.

The model first estimates the clean image without gradients; the estimate returns from the last stage to
the first and becomes an input of the forward that is trained. All estimates of the batch come first, so
that the trained part is plain 1F1B and the wave keeps no activations.

    rank 0 | P0 P1 P2 F0 F1 F2  .  .  .  . B0 --  . B1 --  . B2 --
    rank 1 |  . P0 P1 P2 F0 F1  .  . B0 -- F2 B1 --  . B2 --  .  .
    rank 2 |  .  . P0 P1 P2 F0 B0 -- F1 B1 -- F2 B2 --  .  .  .  .

With equal stages, free links and a feedback of `T_F`, an iteration takes
`max(M f, S f + T_F) + (M + S - 1)(f + b)`.

Source:
    The extra forward: DiffusionPipe, Tian et al. (2024), https://arxiv.org/abs/2405.01248; the order
    and the closed form are ours.
"""

from __future__ import annotations

from lightning_diffpipe.planning.instruction import ForwardNoGrad, Program
from lightning_diffpipe.planning.schedule import Placement
from lightning_diffpipe.planning.schedules.one_f_one_b import one_f_one_b_program
from lightning_diffpipe.planning.schedules.spec import ScheduleSpec


def _program(placement: Placement, num_microbatches: int, rank: int) -> Program:
    """The program of one rank."""
    (stage,) = placement.stages_of(rank)
    own = placement.microbatches_of(stage, rank, num_microbatches)
    wave = [ForwardNoGrad(stage, m) for m in own]
    return (*wave, *one_f_one_b_program(placement, num_microbatches, rank))


self_conditioning = ScheduleSpec("self_conditioning", _program, feedback_lag=0)
