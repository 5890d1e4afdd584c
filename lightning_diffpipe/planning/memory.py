"""How much a rank must hold: read off its program, without a clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_diffpipe.planning.cost import CostModel, LayerRun
from lightning_diffpipe.planning.instruction import Backward, BackwardWeight, Forward, Program
from lightning_diffpipe.planning.schedule import Schedule


def peak_alive(
    program: Program, size_of: Callable[[int, int], float] = lambda stage, microbatch: 1
) -> float:
    """The most that a rank keeps at a time between forwards and their backwards.

    Args:
        program: The program of the rank.
        size_of: Size of what `(stage, microbatch)` keeps; 1 counts microbatches.
    """
    alive = peak = 0.0
    for instruction in program:
        match instruction:
            case Forward(stage, microbatch):
                alive += size_of(stage, microbatch)
                peak = max(peak, alive)
            case Backward(stage, microbatch) | BackwardWeight(stage, microbatch):
                alive -= size_of(stage, microbatch)
    return peak


def peak_memory_bytes(
    model: CostModel, schedule: Schedule, runs: Sequence[LayerRun], sizes: Sequence[int]
) -> tuple[int, ...]:
    """Bytes of every rank at its fullest moment.

    Weights, gradients and optimizer state of its stages, all frozen encoders, and the activations
    that wait for their backward.
    """

    def kept(stage: int, microbatch: int) -> float:
        return model.activation_bytes(runs[stage], sizes[microbatch])

    totals = []
    for rank, program in enumerate(schedule.programs):
        stages = schedule.placement.stages_of(rank)
        resident = model.frozen_bytes + sum(model.resident_bytes(runs[stage]) for stage in stages)
        totals.append(round(resident + peak_alive(program, kept)))
    return tuple(totals)
