"""PipeDream: 1F1B without a flush. Ranks never wait for a batch to end; weights have versions.

A rank's loop runs free: with each batch that it forwards it takes back one that went out before, and its own
optimizer steps at once. The pipeline is drained only where weights are read, at the price of weights that
change between the forward and the backward of a batch; so each stage stores the versions that batches in flight
began with.

    rank 0 | F0 F1 F2  .  .  .  . B0 -- F3 B1 -- F4 B2 --  . B3 --  . B4 --
    rank 1 |  . F0 F1  .  . B0 -- F2 B1 -- F3 B2 -- F4 B3 --  . B4 --  .  .
    rank 2 |  .  . F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- F4 B4 --  .  .  .  .

(steps of the optimizer take no time here)

With w(t) after t steps, batch t = 0, 1, ... of S stages 1..S is trained on

    pipedream                  w1(t-S+1), w2(t-S+2), ..., wS(t)    weight stashing
    pipedream_vertical_sync    w1(t-S+1), w2(t-S+1), ..., wS(t-S+1)
    pipedream_2bw              w1(t-1), ..., wS(t-1)               two buffered weights, several microbatches

and w(t+1) = w(t) - lr grad f, by any optimizer that treats each parameter by itself; w(t) with t < 0 is w(0).

Sources:
    PipeDream, Narayanan et al. (2019), https://arxiv.org/abs/1806.03377: weight stashing, vertical sync.
    PipeDream-2BW, Narayanan et al. (2021), https://arxiv.org/abs/2006.09503: two buffered weights.
"""

from dataclasses import replace

from lightning_diffpipe.planning.instruction import (
    Backward,
    Encode,
    ExchangeFrozen,
    Forward,
    Instruction,
    Program,
    UpdateWeights,
)
from lightning_diffpipe.planning.schedule import Placement, Schedule, ScheduleSpec
from lightning_diffpipe.planning.schedules.one_f_one_b import one_f_one_b_program, warmup_forwards


def admitted_batches(placement: Placement) -> int:
    """Returns NOAM: how many batches each rank of the first stage admits before its first backward.

    It is the number of ranks of the pipeline, divided by that of the first stage, rounded up.
    """
    return -(-placement.num_ranks // len(placement.stage_ranks[0]))


pipedream = ScheduleSpec("pipedream", one_f_one_b_program, staleness=warmup_forwards)
pipedream_vertical_sync = ScheduleSpec(
    "pipedream_vertical_sync",
    one_f_one_b_program,
    staleness=lambda placement, stage: admitted_batches(placement) - 1,
)
pipedream_2bw = ScheduleSpec(
    "pipedream_2bw", one_f_one_b_program, staleness=lambda placement, stage: 1, accumulates=True
)
"""Called with stages and microbatches these give one batch by itself; `unrolled` has many follow each other."""


def unrolled(batch: Schedule, num_batches: int) -> Schedule:
    """Makes a schedule of batches that follow without a flush, until the pipeline is drained at last."""
    placement, per_batch = batch.placement, batch.num_microbatches
    programs = tuple(
        loop_program(
            placement, rank, per_batch, range(num_batches), drains=True, front=frozen_front(program)
        )
        for rank, program in enumerate(batch.programs)
    )
    return replace(batch, num_microbatches=num_batches * per_batch, programs=programs)


def frozen_front(program: Program) -> Program:
    """Returns the frozen work before a batch."""
    return tuple(i for i in program if isinstance(i, Encode | ExchangeFrozen))


def loop_program(
    placement: Placement,
    rank: int,
    per_batch: int,
    batches: range,
    *,
    drains: bool = False,
    front: Program = (),
) -> Program:
    """Returns a part of the endless program of a rank, whose stages may have replicas.

    Microbatches are numbered through from the first of the `batches` that it forwards. With `drains` all that are
    under way are taken back after them; `front` runs before each batch.
    """
    (stage,) = placement.stages_of(rank)
    lag = warmup_forwards(placement, stage) * len(placement.stage_ranks[stage])
    program: list[Instruction] = []

    def take_back(microbatch: int) -> None:
        if placement.rank_of(stage, microbatch) == rank:
            program.append(Backward(stage, microbatch))
            if (microbatch + 1) % per_batch == 0:
                program.append(UpdateWeights(stage, microbatch))

    end = batches.stop * per_batch
    for microbatch in range(batches.start * per_batch, end):
        if microbatch % per_batch == 0:
            program += front
        if placement.rank_of(stage, microbatch) == rank:
            program.append(Forward(stage, microbatch))
        if microbatch >= lag:
            take_back(microbatch - lag)
    if drains:
        for microbatch in range(max(end - lag, 0), end):
            take_back(microbatch)
    return tuple(program)
