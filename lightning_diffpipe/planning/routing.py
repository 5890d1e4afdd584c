"""How tensors get from the stage that makes them to those that read them.

A message leads from every stage to the next, and ranks that hold several stages keep what later ones of theirs
read. So a tensor travels only where no rank on its way has it: with V placement a U-Net's skip not at all.

    stages on 2 ranks, V      0      1      2      3        made by stage 0, read by stage 3
    rank                      0      1      1      0        handed on from stage 0 to 3, on rank 0

What comes back, a gradient, goes the same way back.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Route:
    """The way of one tensor.

    Attributes:
        sent_to: Stages to which the stage before sends it.
        handed: Pairs of stages on one rank: the second has it from the first.
    """

    sent_to: tuple[int, ...]
    handed: tuple[tuple[int, int], ...]

    @property
    def readers(self) -> frozenset[int]:
        """All stages that get it."""
        return frozenset({*self.sent_to, *(stage for _, stage in self.handed)})


NOWHERE = Route((), ())


@lru_cache(maxsize=4096)
def route(
    maker: int,
    readers: tuple[int, ...],
    homes: tuple[tuple[int, ...], ...] | None,
    through: frozenset[int] | None = None,
    known: Route = NOWHERE,
) -> Route:
    """The way on which a tensor is sent least often.

    Args:
        maker: The stage that makes it.
        readers: Later stages that read it, in ascending order.
        homes: By stage: the ranks that hold it; None if no two stages have the same.
        through: Stages it may pass; None for all. Where there is no way through them, it passes others, too.
        known: Where it goes anyway; a part of what is returned.

    Example:
        >>> route(0, (1, 3), ((0,), (1,), (1,), (0,)))
        Route(sent_to=(1,), handed=((0, 3),))
    """
    if homes is None:
        last = max((maker, *readers, *known.sent_to))
        return Route(tuple(range(maker + 1, last + 1)), ())
    sent, handed, have = set(known.sent_to), set(known.handed), {maker, *known.readers}
    for reader in readers:
        if reader in have:
            continue
        way = _shortest(reader, have, homes, through)
        for before, stage in way or _shortest(reader, have, homes, None):
            have.add(stage)
            if homes[before] == homes[stage]:
                handed.add((before, stage))
            else:
                sent.add(stage)
    return Route(tuple(sorted(sent)), tuple(sorted(handed)))


def _shortest(
    reader: int,
    have: Container[int],
    homes: Sequence[tuple[int, ...]],
    through: Iterable[int] | None,
) -> list[tuple[int, int]]:
    """Steps that lead to a reader from some stage that has the tensor; none if there is no way."""
    allowed = range(reader) if through is None else through
    found: dict[int, tuple[int, list[tuple[int, int]]]] = {reader: (0, [])}
    for stage in range(reader, -1, -1):  # ways lead from earlier stages to later ones only
        if stage not in found:
            continue
        cost, way = found[stage]
        for before in range(stage):
            local = homes[before] == homes[stage]
            if not local and before != stage - 1:
                continue
            if before not in allowed and before not in have:
                continue
            if before not in found or cost + (not local) < found[before][0]:
                found[before] = cost + (not local), [(before, stage), *way]
    ways = [(cost, -stage, way) for stage, (cost, way) in found.items() if stage in have]
    return min(ways)[2] if ways else []
