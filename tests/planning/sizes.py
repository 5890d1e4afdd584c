"""Sizes and placements over which the laws are checked."""

from lightning_diffpipe.planning.schedule import Placement

EQUAL = [(S, M) for S in range(1, 9) for M in (1, 2, 3, 5, 8, 16)]

REPLICAS = [(1, 3), (3, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2), (3, 2, 1), (1, 2, 3), (4,)]
UNEQUAL = [(replicas, M) for replicas in REPLICAS for M in (1, 2, 3, 5, 8, 13)]


def placement_of(size: int | tuple[int, ...]) -> Placement:
    return Placement.of_replicas((1,) * size if isinstance(size, int) else size)


ALL = [*EQUAL, *UNEQUAL]
