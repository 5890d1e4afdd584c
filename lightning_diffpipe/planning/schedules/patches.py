"""Patches: the forward-only schedule of PipeFusion, as data.

Sampling has no backward pass, but it has many denoising steps. The latent is cut into patches which
follow each other through the stages; patch `p` of step `t` is "microbatch" `t P + p`. The first stage
needs the estimate of the same patch one step ago, which the last stage sends back. The other patches are
read from caches that may be one step old, so that nothing else has to be waited for:

    rank 0 | P0 P1 P2 P3 P4 P5  .  .
    rank 1 |  . P0 P1 P2 P3 P4 P5  .      2 steps of 3 patches on 3 ranks
    rank 2 |  .  . P0 P1 P2 P3 P4 P5

With at least as many patches as stages no rank ever waits after the first fill.

Source:
    PipeFusion, Fang et al. (2024), https://arxiv.org/abs/2405.14430
"""

from __future__ import annotations

from lightning_diffpipe.planning.instruction import ForwardNoGrad, Program
from lightning_diffpipe.planning.schedule import Schedule, as_placement


def patches(num_stages: int, num_patches: int, num_steps: int) -> Schedule:
    """All patches of all denoising steps, in order, on every rank.

    Args:
        num_stages: S, one rank each.
        num_patches: P.
        num_steps: Denoising steps.

    Returns:
        A schedule of `P * num_steps` "microbatches". With equal stages and free links it takes
        `(num_steps - 1) max(P, S) + P + S - 1` times the time of a stage on a patch.
    """
    placement = as_placement(num_stages)
    count = num_patches * num_steps

    def program(rank: int) -> Program:
        return tuple(ForwardNoGrad(rank, m) for m in range(count))

    programs = tuple(program(rank) for rank in range(num_stages))
    return Schedule(placement, count, programs, feedback_lag=num_patches)
