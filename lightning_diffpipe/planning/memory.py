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


def peak_samples(schedule: Schedule, sizes: Sequence[int]) -> tuple[dict[int, float], ...]:
    """By rank and stage: the most samples whose activations wait for a backward.

    Args:
        schedule: The programs.
        sizes: Samples of each microbatch.
    """
    return tuple(
        {
            stage: peak_alive(program, _samples_of(stage, sizes))
            for stage in schedule.placement.stages_of(rank)
        }
        for rank, program in enumerate(schedule.programs)
    )


def _samples_of(own: int, sizes: Sequence[int]) -> Callable[[int, int], float]:
    """Samples of a microbatch on one stage, nothing on the others."""
    return lambda stage, microbatch: sizes[microbatch] if stage == own else 0


def peak_memory_bytes(
    model: CostModel, peaks: Sequence[dict[int, float]], runs: Sequence[LayerRun]
) -> tuple[int, ...]:
    """Bytes of every rank at its fullest moment.

    Weights, gradients and optimizer state of its stages, all frozen encoders, and the activations that
    wait for their backward. A rank that holds several stages is taken to be at its fullest with all of
    them at once.

    Args:
        model: The cost model.
        peaks: From `peak_samples`.
        runs: The layers of each stage.
    """
    return tuple(
        round(
            model.frozen_bytes
            + sum(
                model.resident_bytes(runs[stage]) + model.activation_bytes(runs[stage], samples)
                for stage, samples in of_stage.items()
            )
        )
        for of_stage in peaks
    )
