"""Which cuts of a chain of stages fit into memory? What each stage needs, wherever it begins and ends.

Messages make a stage's need go up and down with where it is cut: a U-Net's boundaries differ tenfold. So cuts
that fit are not found by letting every stage reach as far as it can, as fast ones are; of all ways to cut, the
best is chosen stage by stage (`partition.best_chain`).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from lightning_diffpipe.planning.bounds import Bounds
from lightning_diffpipe.planning.cost import CostModel, LayerRun
from lightning_diffpipe.planning.evaluation import Frame
from lightning_diffpipe.planning.memory import Waiting, boundary_samples
from lightning_diffpipe.planning.partition import Cut, best_chain


class _Held(NamedTuple):
    """What one rank of a stage holds: activations, samples of encodings it reads, bytes of those it makes.

    Bytes of encodings are those beside activations; and those made, and worked on, while there are none.
    """

    waiting: Waiting
    read: int
    beside: float
    made: float
    working: float


@dataclass(frozen=True)
class StageNeeds:
    """Bytes that stages of a chain need, one stage on each rank.

    Attributes:
        model: The cost model.
        replicas: Ranks of every stage.
        held: By stage: what its ranks hold, each kind once.
    """

    model: CostModel
    replicas: tuple[int, ...]
    held: tuple[tuple[_Held, ...], ...]
    _edges: dict[Waiting, tuple[list[float], list[float]]] = field(
        default_factory=dict, repr=False, compare=False
    )

    @classmethod
    def of(cls, model: CostModel, frame: Frame) -> StageNeeds:
        """From what does not depend on where a proposal cuts."""
        placement = frame.pipeline.placement
        held: list[tuple[_Held, ...]] = []
        for stage, ranks in enumerate(placement.stage_ranks):
            kinds = set()
            for rank in ranks:
                beside, alone = (0, 0.0), (0.0, 0.0)
                if frame.loads:
                    load = frame.loads[rank]
                    beside, alone = load.beside_bytes(model, stage), load.alone_bytes(model)
                kinds.add(_Held(frame.pipeline.peak(rank)[stage], *beside, *alone))
            held.append(tuple(kinds))
        return cls(model, tuple(map(len, placement.stage_ranks)), tuple(held))

    def need_bytes(self, stage: int, first: int, stops: range) -> list[float]:
        """What a stage from `first` to each of `stops` needs on its fullest rank.

        Of an exchange counts what is read here, not what is packed for others, which depends on all cuts.
        """
        rows = [self._need_bytes(held, first, stops) for held in self.held[stage]]
        return rows[0] if len(rows) == 1 else [max(column) for column in zip(*rows, strict=True)]

    def _need_bytes(self, held: _Held, first: int, stops: range) -> list[float]:
        kept, resident = self.model.need_bytes(0, *held.waiting), self.model.need_bytes(0, 0, 0)
        front, behind = self._messages(held.waiting)
        fixed = self.model.frozen_bytes + held.beside + front[first] - kept[first]
        if not held.read and not held.made:
            return [fixed + kept[stop] + behind[stop] for stop in stops]
        alone = self.model.frozen_bytes + held.made - resident[first]
        read = [held.read * self.model.read_bytes_per_sample(LayerRun(0, first, s)) for s in stops]
        return [
            max(
                fixed + kept[stop] + behind[stop] + reads,
                alone + resident[stop] + max(held.working, 2 * reads),
            )
            for stop, reads in zip(stops, read, strict=True)
        ]

    def _messages(self, waiting: Waiting) -> tuple[list[float], list[float]]:
        """By layer: bytes of messages in front of a stage that begins there, and behind one that ends there."""
        if waiting not in self._edges:
            front, behind = boundary_samples(waiting)
            of = [self.model.boundary_bytes(LayerRun(0, 0, stop), 1) for stop in self._layers[1:]]
            sizes = [0.0, *of]
            self._edges[waiting] = (
                [front * size for size in sizes],
                [behind * size for size in sizes],
            )
        return self._edges[waiting]

    @property
    def _layers(self) -> range:
        return range(self.model.num_layers() + 1)

    def fastest(self, bounds: Bounds, limit_s: float) -> tuple[Cut, ...] | None:
        """Of the cuts that fit into memory the one with the smallest bound; None if none is below `limit_s`.

        Args:
            bounds: Of the same shape.
            limit_s: Seconds.
        """
        limit = self.model.cluster.memory_bytes or math.inf
        later = self._later_ranks
        starts = self._earliest_starts(bounds, limit_s)

        def fitting(stage: int, first: int, stops: range) -> Iterator[tuple[int, float]]:
            r = self.replicas[stage]
            furthest = bounds.reach(first, r, later[stage], limit_s)
            earliest = max(stops.start, starts[stage + 1])
            stops = range(earliest, min(stops.stop, furthest + 1))
            for stop, need in zip(stops, self.need_bytes(stage, first, stops), strict=True):
                if round(need) <= limit:
                    yield stop, bounds.stage_s(first, stop, r)

        return self._cuts(best_chain(self.model.num_layers(), len(self.replicas), fitting, limit_s))

    def _earliest_starts(self, bounds: Bounds, limit_s: float) -> list[int]:
        """By stage: the first layer at which it may begin, if stages from there on shall reach the last layer."""
        num_layers = self.model.num_layers()
        starts = [num_layers]
        for r, later in zip(reversed(self.replicas), reversed(self._later_ranks), strict=True):
            reach = partial(bounds.reach, r=r, later_ranks=later, limit_s=limit_s)
            starts.append(bisect_left(range(num_layers), starts[-1], key=reach))
        return starts[::-1]

    @property
    def _later_ranks(self) -> list[int]:
        """By stage: ranks of the stages after it."""
        return [sum(self.replicas[stage + 1 :]) for stage in range(len(self.replicas))]

    def smallest(self, below_bytes: float = math.inf) -> tuple[Cut, ...] | None:
        """The cut whose fullest rank needs least; None if all need `below_bytes` or more."""

        def needed(stage: int, first: int, stops: range) -> Iterator[tuple[int, float]]:
            kept = self.model.need_bytes(0, *self.held[stage][0].waiting)
            most = below_bytes - self.model.frozen_bytes + kept[first]
            stops = range(stops.start, min(stops.stop, bisect_right(kept, most)))
            return zip(stops, self.need_bytes(stage, first, stops), strict=True)

        num_layers = self.model.num_layers()
        return self._cuts(best_chain(num_layers, len(self.replicas), needed, below_bytes))

    def _cuts(self, edges: Sequence[int] | None) -> tuple[Cut, ...] | None:
        if edges is None:
            return None
        return tuple(zip(edges, edges[1:], self.replicas, strict=False))
