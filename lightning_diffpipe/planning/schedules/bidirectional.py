"""Two backbones in opposite directions: the one is busy where the other has its bubbles.

A cascade trains two backbones that know nothing of each other. Backbone A runs down the ranks, backbone
B up; each rank holds one stage of both. While A fills, B's far end works, and the reverse.

    rank 0 | 0F0 3F0 3B0  -- 0B0  -- 0F1 3F1 3B1  -- 0B1  --      A: stages 0 and 1, downwards
    rank 1 | 2F0 1F0 1B0  -- 2B0  -- 2F1 1F1 1B1  -- 2B1  --      B: stages 2 and 3, upwards

The order on each rank is found greedily: backwards first, then forwards of the older microbatch, with at
most `S - s` microbatches in flight on stage `s` of each backbone.

Source:
    The idea: DiffusionPipe, Tian et al. (2024), https://arxiv.org/abs/2405.01248, and for two copies of
    one model Chimera, Li and Hoefler (2021), https://arxiv.org/abs/2107.06925; the order is ours.
"""

from __future__ import annotations

from lightning_diffpipe.planning.instruction import Forward
from lightning_diffpipe.planning.schedule import Placement, Schedule
from lightning_diffpipe.planning.schedules.greedy import list_schedule


def bidirectional(
    num_stages: int,
    num_microbatches: int,
    *,
    forward: tuple[float, float] = (1, 1),
    backward: tuple[float, float] = (2, 2),
) -> Schedule:
    """Schedules two backbones of equally many stages over the same ranks.

    Args:
        num_stages: S, of each backbone; also the number of ranks.
        num_microbatches: Of each backbone.
        forward: Time of a stage's forward, for A and B. Only their proportions matter.
        backward: The same for the backward.
    """
    down = tuple((rank,) for rank in range(num_stages))
    placement = Placement(down + down[::-1], first_stages=(0, num_stages))
    programs = list_schedule(
        placement,
        num_microbatches,
        lambda kind, stage: (forward if kind is Forward else backward)[stage // num_stages],
        lambda work: (isinstance(work, Forward), work.microbatch, work.stage),
        lambda stage: placement.backbone_of(stage).stop - stage,
    )
    return Schedule(placement, num_microbatches, programs)
