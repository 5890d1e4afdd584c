"""Zero bubble (ZB-H1): the part of a backward that nobody waits for fills the gaps of 1F1B.

A backward makes gradients of inputs (I), which the stage before waits for, and gradients of weights
(W), which nobody waits for. Stage `s` sends the first on at once and runs the second `s` microbatches
later, in places where 1F1B would idle. The first stage sends no gradient on: its backward (B) stays whole.
Every rank keeps the activations of up to `num_stages` microbatches, as the first rank of 1F1B does.

    rank 0 | F0 F1 F2  .  . B0 -- F3 B1 -- B2 -- B3 --
    rank 1 |  . F0 F1  . I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    rank 2 |  .  . F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

If the three parts take equally long and there are at least as many microbatches as stages, an iteration
takes `3 M + S - 1` of them: a third of 1F1B's bubble remains.

Source:
    Zero Bubble Pipeline Parallelism, Qi et al. (2023), https://arxiv.org/abs/2401.10241
"""

from __future__ import annotations

from lightning_diffpipe.planning.instruction import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    Program,
)
from lightning_diffpipe.planning.schedule import Placement, ScheduleSpec
from lightning_diffpipe.planning.schedules.one_f_one_b import warmup_forwards


def _program(placement: Placement, num_microbatches: int, rank: int) -> Program:
    """The program of one rank."""
    (stage,) = placement.stages_of(rank)
    own = placement.microbatches_of(stage, rank, num_microbatches)
    num_warmup = min(warmup_forwards(placement, stage), len(own))
    delay = min(stage, len(own))

    program: list[Instruction] = [Forward(stage, m) for m in own[:num_warmup]]
    for k, microbatch in enumerate(own):
        if num_warmup + k < len(own):
            program.append(Forward(stage, own[num_warmup + k]))
        if not placement.sends_gradient(stage):
            program.append(Backward(stage, microbatch))
            continue
        program.append(BackwardInput(stage, microbatch))
        if k >= delay:
            program.append(BackwardWeight(stage, own[k - delay]))
    program += [BackwardWeight(stage, m) for m in own[len(own) - delay :]]
    return tuple(program)


zero_bubble = ScheduleSpec(
    "zero_bubble", _program, splits_backward=True, advice="backwards in two parts"
)
