"""PipeDream: 1F1B without a flush. Ranks never wait for a batch to end; weights have versions.

Every microbatch is a batch of its own: its backward is followed at once by a step of the stage's
optimizer. The pipeline is never drained, at the price of weights that change between the forward and
the backward of a batch; so each stage keeps the versions that its batches in flight began with.

    rank 0 | F0 F1 F2  .  .  .  . B0 -- F3 B1 -- F4 B2 --  . B3 --  . B4 --
    rank 1 |  . F0 F1  .  . B0 -- F2 B1 -- F3 B2 -- F4 B3 --  . B4 --  .  .
    rank 2 |  .  . F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- F4 B4 --  .  .  .  .

(steps of the optimizer take no time here)

Source:
    PipeDream, Narayanan et al. (2019), https://arxiv.org/abs/1806.03377: 1F1B-RR, weight stashing.
"""

from __future__ import annotations

from dataclasses import replace

from lightning_diffpipe.planning.instruction import Backward, Instruction, Program, UpdateWeights
from lightning_diffpipe.planning.schedule import Placement, Schedule
from lightning_diffpipe.planning.schedules.one_f_one_b import one_f_one_b, warmup_forwards


def pipedream(stages: int | Placement, num_batches: int) -> Schedule:
    """1F1B in which every backward is followed by a step of the stage's optimizer.

    Args:
        stages: Number of stages, one rank each, or a placement with replicas, which take the batches
            in turn (1F1B-RR).
        num_batches: Batches until the pipeline is drained at last.
    """
    flushed = one_f_one_b(stages, num_batches)
    return replace(flushed, programs=tuple(map(_step_at_once, flushed.programs)))


def _step_at_once(program: Program) -> Program:
    stepped: list[Instruction] = []
    for instruction in program:
        stepped.append(instruction)
        if isinstance(instruction, Backward):
            stepped.append(UpdateWeights(instruction.stage, instruction.microbatch))
    return tuple(stepped)


def admitted_batches(placement: Placement) -> int:
    """NOAM: how many batches each rank of the first stage admits before its first backward is due.

    The ranks of the pipeline, divided by the ranks of the first stage, rounded up.
    """
    return -(-placement.num_ranks // len(placement.stage_ranks[0]))


def weight_versions(placement: Placement, stage: int) -> int:
    """Versions of its weights that each rank of a stage keeps: one for each batch in flight."""
    return warmup_forwards(placement, stage) + 1
