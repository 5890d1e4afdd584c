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

from dataclasses import replace

from lightning_diffpipe.planning.instruction import ForwardNoGrad
from lightning_diffpipe.planning.schedule import Placement, Schedule
from lightning_diffpipe.planning.schedules.one_f_one_b import one_f_one_b


def self_conditioning(
    stages: int | Placement, num_microbatches: int, *, deep_warmup: bool = False
) -> Schedule:
    """All forwards without gradients, then 1F1B; arguments as for `one_f_one_b`."""
    trained = one_f_one_b(stages, num_microbatches, deep_warmup=deep_warmup)
    placement = trained.placement

    def wave(rank: int) -> tuple[ForwardNoGrad, ...]:
        (stage,) = placement.stages_of(rank)
        own = placement.microbatches_of(stage, rank, num_microbatches)
        return tuple(ForwardNoGrad(stage, m) for m in own)

    programs = tuple((*wave(rank), *program) for rank, program in enumerate(trained.programs))
    return replace(trained, programs=programs, feedback_lag=0)
