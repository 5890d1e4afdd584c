"""One forward, one backward (1F1B): a schedule whose memory does not grow with microbatches.

Each rank first forwards just enough microbatches to keep the ranks below it busy (warm-up), then
alternates (steady), then drains (cooldown). At most `num_stages - stage` activations are alive.

    rank 0 | F0 F1 F2  .  .  .  . B0 --  . B1 --  . B2 --
    rank 1 |  . F0 F1  .  . B0 -- F2 B1 --  . B2 --  .  .
    rank 2 |  .  . F0 B0 -- F1 B1 -- F2 B2 --  .  .  .  .

With replicas each rank does the same with the microbatches that are its own.

Sources:
    PipeDream-Flush, Narayanan et al. (2021), https://arxiv.org/abs/2006.09503
    1F1B-RR (replicas): PipeDream, Narayanan et al. (2019), https://arxiv.org/abs/1806.03377
"""

from __future__ import annotations

from functools import partial

from lightning_diffpipe.planning.instruction import Backward, Forward, Program
from lightning_diffpipe.planning.schedule import Placement, ScheduleSpec


def one_f_one_b_program(
    placement: Placement, num_microbatches: int, rank: int, *, depth: int = 1
) -> Program:
    """The program of one rank.

    Args:
        placement: One stage on each rank; stages may have replicas.
        num_microbatches: Microbatches of the batch.
        rank: The rank.
        depth: Forwards before the first backward for each later rank. With 2 every link counts as a stage too.
            That keeps twice as many activations, and hides links that take as long as stages do: only then is
            an iteration never longer than `(num_microbatches + 2 num_stages - 2)` times the slowest stage or link.
    """
    (stage,) = placement.stages_of(rank)
    own = placement.microbatches_of(stage, rank, num_microbatches)
    num_warmup = min(warmup_forwards(placement, stage, depth), len(own))
    num_steady = len(own) - num_warmup

    warmup = [Forward(stage, m) for m in own[:num_warmup]]
    steady = [
        instruction
        for forward, backward in zip(own[num_warmup:], own[:num_steady], strict=True)
        for instruction in (Forward(stage, forward), Backward(stage, backward))
    ]
    cooldown = [Backward(stage, m) for m in own[num_steady:]]

    return (*warmup, *steady, *cooldown)


def warmup_forwards(placement: Placement, stage: int, depth: int = 1) -> int:
    """Forwards of one replica of a stage before its first backward; see `forwards_ahead`."""
    later_ranks = sum(len(ranks) for ranks in placement.stage_ranks[stage + 1 :])
    return forwards_ahead(len(placement.stage_ranks[stage]), later_ranks, depth)


def forwards_ahead(replicas: int, later_ranks: int, depth: int = 1) -> int:
    """One forward more for each rank after a stage, shared by its replicas.

    Without replicas this is `num_stages - stage - 1`; with them PipeDream's
    `(ranks from this stage on - 1) // replicas of this stage`.
    """
    return -(-depth * later_ranks // replicas)


one_f_one_b = ScheduleSpec("1f1b", one_f_one_b_program, auto=True)
deep_one_f_one_b = ScheduleSpec(
    "1f1b_deep",
    partial(one_f_one_b_program, depth=2),
    warmup_depth=2,
    auto=True,
    advice="another order",
)
