"""One forward, one backward (1F1B): a schedule whose memory does not grow with microbatches.

Each rank first forwards just enough microbatches to keep the ranks below it busy (warm-up), then
alternates (steady), then drains (cooldown). At most `num_stages - stage` activations are alive.

    rank 0 | F0 F1 F2  .  .  .  . B0 --  . B1 --  . B2 --
    rank 1 |  . F0 F1  .  . B0 -- F2 B1 --  . B2 --  .  .
    rank 2 |  .  . F0 B0 -- F1 B1 -- F2 B2 --  .  .  .  .

With replicas each rank does the same with the microbatches that are its own.

Zero bubble (ZB-H1) fills the gaps with the part of a backward that nobody waits for. A backward makes gradients of
inputs (I), which the stage before waits for, and gradients of weights (W), which nobody waits for. Stage `s` sends
the first on at once and runs the second `s` microbatches later, in places where 1F1B would idle. The first stage
sends no gradient on: its backward (B) stays whole. Every rank keeps the activations of up to `num_stages`
microbatches, as the first rank of 1F1B does.

    rank 0 | F0 F1 F2  .  . B0 -- F3 B1 -- B2 -- B3 --
    rank 1 |  . F0 F1  . I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    rank 2 |  .  . F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

If the three parts take equally long and there are at least as many microbatches as stages, an iteration
takes `3 M + S - 1` of them: a third of 1F1B's bubble remains.

Sources:
    PipeDream-Flush, Narayanan et al. (2021), https://arxiv.org/abs/2006.09503
    1F1B-RR (replicas): PipeDream, Narayanan et al. (2019), https://arxiv.org/abs/1806.03377
    Zero Bubble Pipeline Parallelism, Qi et al. (2023), https://arxiv.org/abs/2401.10241
"""

from collections.abc import Sequence
from functools import partial

from lightning_diffpipe.planning.instruction import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    Program,
)
from lightning_diffpipe.planning.schedule import Placement, ScheduleSpec


def one_f_one_b_program(
    placement: Placement, num_microbatches: int, rank: int, *, depth: int = 1
) -> Program:
    """Returns the program of one rank; each has one stage, and stages may have replicas.

    `depth` are forwards before the first backward for each later rank. With 2 every link counts as a stage too:
    that keeps twice as many activations, and hides transfers.
    """
    (stage,) = placement.stages_of(rank)
    microbatches = placement.microbatches_of(stage, rank, num_microbatches)
    forwards = [Forward(stage, m) for m in microbatches]
    backwards = [Backward(stage, m) for m in microbatches]
    return in_three_phases(forwards, backwards, warmup_forwards(placement, stage, depth))


def in_three_phases(
    forwards: Sequence[Forward], backwards: Sequence[Backward], num_warmup: int
) -> Program:
    """Returns equally many forwards and backwards, each in their order: warm-up, steady, cooldown."""
    num_warmup = min(num_warmup, len(forwards))
    warmup, cooldown = forwards[:num_warmup], backwards[len(backwards) - num_warmup :]
    steady = [i for pair in zip(forwards[num_warmup:], backwards, strict=False) for i in pair]
    return (*warmup, *steady, *cooldown)


def warmup_forwards(placement: Placement, stage: int, depth: int = 1) -> int:
    """Forwards of one replica of a stage before its first backward; see `forwards_ahead`."""
    later_ranks = sum(len(ranks) for ranks in placement.stage_ranks[stage + 1 :])
    return forwards_ahead(len(placement.stage_ranks[stage]), later_ranks, depth)


def forwards_ahead(replicas: int, later_ranks: int, depth: int = 1) -> int:
    """Counts one forward more for each rank after a stage, shared by its replicas.

    Without replicas this is `num_stages - stage - 1`; with them PipeDream's
    `(ranks from this stage on - 1) // replicas of this stage`.
    """
    return -(-depth * later_ranks // replicas)


def _zero_bubble_program(placement: Placement, num_microbatches: int, rank: int) -> Program:
    (stage,) = placement.stages_of(rank)
    microbatches = placement.microbatches_of(stage, rank, num_microbatches)
    num_warmup = min(warmup_forwards(placement, stage), len(microbatches))
    delay = min(stage, len(microbatches))

    program: list[Instruction] = [Forward(stage, m) for m in microbatches[:num_warmup]]
    for k, microbatch in enumerate(microbatches):
        if num_warmup + k < len(microbatches):
            program.append(Forward(stage, microbatches[num_warmup + k]))
        if not placement.sends_gradient(stage):
            program.append(Backward(stage, microbatch))
            continue
        program.append(BackwardInput(stage, microbatch))
        if k >= delay:
            program.append(BackwardWeight(stage, microbatches[k - delay]))
    program += [BackwardWeight(stage, m) for m in microbatches[len(microbatches) - delay :]]
    return tuple(program)


one_f_one_b = ScheduleSpec("1f1b", one_f_one_b_program, auto=True)
deep_one_f_one_b = ScheduleSpec(
    "1f1b_deep", partial(one_f_one_b_program, depth=2), auto=True, advice="another order"
)
zero_bubble = ScheduleSpec(
    "zero_bubble", _zero_bubble_program, splits_backward=True, advice="backwards in two parts"
)
