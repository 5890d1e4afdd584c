"""Interleaved 1F1B: every rank holds several stages, so that the pipeline fills faster.

With `v` stages on each rank a microbatch passes all ranks `v` times. A stage is `v` times as short, and
so is the time until the last rank has work: the bubble shrinks by `v`, messages multiply by `v`.

    rank 0 | 0F0 0F1 2F0 2F1   .   . 2B0  --   . 2B1  -- 0B0  -- 0B1  --
    rank 1 |   . 1F0 1F1 3F0 3B0  -- 3F1 3B1  -- 1B0  -- 1B1  --   .   .

The bubble ratio is `(R - 1) / (v M + R - 1)` for `R` ranks with equal stages and free links.

Source:
    Narayanan et al. (2021), https://arxiv.org/abs/2104.04473
"""

from __future__ import annotations

from lightning_diffpipe.errors import ScheduleError
from lightning_diffpipe.planning.instruction import Backward, Forward, Instruction, Program
from lightning_diffpipe.planning.schedule import Placement, Schedule


def interleaved(num_ranks: int, stages_per_rank: int, num_microbatches: int) -> Schedule:
    """1F1B over stages that go round the ranks.

    Args:
        num_ranks: R. Stage `s` runs on rank `s mod R`.
        stages_per_rank: v; 1 is plain 1F1B.
        num_microbatches: A multiple of `num_ranks`, since microbatches move in groups of `num_ranks`.

    Raises:
        ScheduleError: `num_microbatches` is no multiple of `num_ranks`.
    """
    if num_microbatches % num_ranks:
        raise ScheduleError(
            f"interleaved stages on {num_ranks} ranks need a multiple of {num_ranks} microbatches; "
            f"got {num_microbatches}"
        )
    placement = Placement.round_robin(num_ranks * stages_per_rank, num_ranks)
    programs = tuple(
        _program(rank, num_ranks, stages_per_rank, num_microbatches) for rank in range(num_ranks)
    )
    return Schedule(placement, num_microbatches, programs)


def _program(rank: int, num_ranks: int, stages_per_rank: int, num_microbatches: int) -> Program:
    total = num_microbatches * stages_per_rank
    # Two more for each rank below: one on the way down, one on the way back; and all other stages.
    num_warmup = 2 * (num_ranks - rank - 1) + (stages_per_rank - 1) * num_ranks
    if stages_per_rank == 1:
        num_warmup = num_ranks - rank - 1
    num_warmup = min(num_warmup, total)

    def nth(k: int) -> tuple[int, int]:
        """The k-th work item of a rank: (how many of its stages come before, microbatch)."""
        group, within = divmod(k, num_ranks * stages_per_rank)
        return within // num_ranks, group * num_ranks + within % num_ranks

    def forward(k: int) -> Forward:
        turn, microbatch = nth(k)
        return Forward(turn * num_ranks + rank, microbatch)

    def backward(k: int) -> Backward:
        turn, microbatch = nth(k)
        return Backward((stages_per_rank - 1 - turn) * num_ranks + rank, microbatch)

    warmup: list[Instruction] = [forward(k) for k in range(num_warmup)]
    steady = [
        instruction
        for k in range(total - num_warmup)
        for instruction in (forward(num_warmup + k), backward(k))
    ]
    cooldown = [backward(k) for k in range(total - num_warmup, total)]
    return (*warmup, *steady, *cooldown)
