"""Sizes and placements over which the laws are checked."""

from lightning_diffpipe.planning.instruction import Backward, BackwardWeight, Forward
from lightning_diffpipe.planning.memory import peak_samples_of
from lightning_diffpipe.planning.schedule import Placement

EQUAL = [(S, M) for S in range(1, 9) for M in (1, 2, 3, 5, 8, 16)]

REPLICAS = [(1, 3), (3, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2), (3, 2, 1), (1, 2, 3), (4,)]
UNEQUAL = [(replicas, M) for replicas in REPLICAS for M in (1, 2, 3, 5, 8, 13)]


def placement_of(size: int | tuple[int, ...]) -> Placement:
    return Placement.of_replicas((1,) * size if isinstance(size, int) else size)


ALL = [*EQUAL, *UNEQUAL]


def peak_samples(schedule, sizes):
    """By rank and stage: the most samples, and microbatches, that wait for a backward."""
    stages_of = schedule.placement.stages_of
    return tuple(
        peak_samples_of(program, stages_of(rank), sizes)
        for rank, program in enumerate(schedule.programs)
    )


def peak_alive(program):
    """The most microbatches that a rank keeps at a time between forwards and their backwards."""
    alive = peak = 0
    for instruction in program:
        alive += isinstance(instruction, Forward)
        alive -= isinstance(instruction, (Backward, BackwardWeight))
        peak = max(peak, alive)
    return peak
