"""Cutting the trained path into stages: what each stage runs, holds, receives and sends.

The boundary of a cut is every tensor made before it and read after it; a tensor that skips stages passes through
those between, unless an earlier stage of the same rank has it (`route` in `planning/schedule.py`). Frozen layers
are no part of any stage: wherever they run, their results reach the stages that read them as `frozen_received`.

    path:      l0   l1  |  l2   l3  |  l4   loss
    reads:               l1        l1 (skip), l3
    received:            (1, 0)      (1, 0) passed through, (3, 0)
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from lightning_diffpipe.errors import GraphError, PartitionError
from lightning_diffpipe.graph.layer import LayerGraph, TensorKey
from lightning_diffpipe.planning.schedule import Route, route


@dataclass(frozen=True, slots=True)
class StageCut:
    """The work of one stage. Tuples of keys are sorted, so that both ends of a message agree.

    Attributes:
        index: Position in the pipeline; -1 for the frozen layers.
        received: Tensors that come from earlier stages, including those only passed on.
        message: Tensors of `received` that the stage before sends.
        local: Tensors of `received` that an earlier stage of the same rank passes on in memory, by that stage.
        sent: Tensors that go to later stages, including those passed through; for the frozen layers: all results
            that some stage reads.
        frozen_received: Results of frozen layers that are read here.
        needed: Tensors that must be real here; all others are dummies.
        received_gradients: Tensors of `received` for which a gradient goes back.
        sent_gradients: Tensors of `sent` for which a gradient comes back.
        parameters: Parameters that must be resident, trained or not.
        written_buffers: Buffers that change here and nowhere else.
        sees_all: All that the loss reads is real here. With several chains each computes its own part of the loss,
            and what the others give is missing; `sent` is what the rank that joins the parts reads of it.
    """

    index: int
    layers: frozenset[int]
    received: tuple[TensorKey, ...]
    message: tuple[TensorKey, ...]
    local: Mapping[int, tuple[TensorKey, ...]]
    sent: tuple[TensorKey, ...]
    frozen_received: tuple[TensorKey, ...]
    needed: frozenset[TensorKey]
    received_gradients: tuple[TensorKey, ...]
    sent_gradients: tuple[TensorKey, ...]
    parameters: frozenset[str]
    written_buffers: frozenset[str]
    is_last: bool
    sees_all: bool = True

    @property
    def message_gradients(self) -> tuple[TensorKey, ...]:
        """Tensors of `message` for which a gradient goes back."""
        return self._with_gradients(self.message)

    @property
    def local_gradients(self) -> Mapping[int, tuple[TensorKey, ...]]:
        """Tensors of `local` for which a gradient goes back."""
        return {stage: self._with_gradients(keys) for stage, keys in self.local.items()}

    def _with_gradients(self, keys: tuple[TensorKey, ...]) -> tuple[TensorKey, ...]:
        return tuple(key for key in keys if key in self.received_gradients)


@dataclass(frozen=True, slots=True)
class Cut:
    """The trained path cut into stages.

    Attributes:
        positions: Cuts of the path: stage s starts at position `positions[s - 1]` of the path.
    """

    positions: tuple[int, ...]
    frozen: StageCut
    stages: tuple[StageCut, ...]

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.stages)


def cut(
    graph: LayerGraph,
    positions: Sequence[int],
    stage_ranks: Sequence[tuple[int, ...]] | None = None,
    first_stages: Sequence[int] = (0,),
    may_be_empty: bool = False,
) -> Cut:
    """Cuts the trained path before the given positions into stages, with everything that crosses between them.

    Args:
        graph: The probed step.
        positions: Increasing positions in `graph.path`; none means a single stage.
        stage_ranks: Ranks that hold each stage; None if every stage has ranks of its own.
        first_stages: First stages of chains that know nothing of each other; see `planning.profile.joined`.
        may_be_empty: Stages may have no layers: those of passes that this call sequence leaves out.

    Raises:
        PartitionError: A stage would have no layer.
    """
    path = graph.path
    bounds = [0, *positions, len(path)]
    if positions and not may_be_empty and any(a >= b for a, b in pairwise(bounds)):
        raise PartitionError(
            f"cannot cut a path of {len(path)} layers at {list(positions)}: every stage needs at least one "
            f"layer; choose increasing positions between 1 and {len(path) - 1}, or fewer stages, or "
            "a finer probe (a smaller max_share)"
        )
    runs = [frozenset(path[a:b]) for a, b in pairwise(bounds)]
    last = len(runs) - 1
    frozen = frozenset(graph.frozen)
    ends = {stop - 1: range(first, stop) for first, stop in pairwise((*first_stages, last + 1))}
    read_at_end = {
        s: frozenset(k for k in graph.tail_reads if k[0] in frozen.union(*(runs[i] for i in chain)))
        for s, chain in ends.items()
    }
    reads = []
    for s, layers in enumerate(runs):
        keys = read_at_end.get(s, frozenset()).union(*(graph.layers[i].reads for i in layers))
        reads.append(frozenset(key for key in keys if key[0] not in layers))
    routes = _routes(graph, runs, reads, ends, stage_ranks)
    of_stages = enumerate(zip(runs, reads, strict=True))
    stages = tuple(_stage_cut(graph, s, *both, routes, s in ends) for s, both in of_stages)
    if len(ends) > 1:
        parts = {s: tuple(sorted(k for k in read_at_end[s] if k[0] not in frozen)) for s in ends}
        stages = tuple(
            replace(stage, sent=parts[stage.index], sees_all=False) if stage.is_last else stage
            for stage in stages
        )
    results = tuple(sorted(k for k in set().union(*reads) if k[0] in frozen))
    frozen_cut = replace(_stage_cut(graph, -1, frozen, frozenset(), {}, False), sent=results)
    return Cut(tuple(positions), frozen_cut, stages)


def _routes(
    graph: LayerGraph,
    stage_layers: Sequence[frozenset[int]],
    reads: Sequence[frozenset[TensorKey]],
    ends: Container[int],
    stage_ranks: Sequence[tuple[int, ...]] | None,
) -> dict[TensorKey, _TensorRoute]:
    """Returns the route of each tensor that another stage reads, and of its gradient."""
    several = stage_ranks and len(set(stage_ranks)) < len(stage_ranks)
    shared = tuple(stage_ranks) if stage_ranks and several else None
    stage_of = {layer: s for s, layers in enumerate(stage_layers) for layer in layers}
    carrying = frozenset(
        s
        for s, layers in enumerate(stage_layers)
        if s in ends or any(graph.layers[k].carries_gradient for k in layers)
    )
    routes: dict[TensorKey, _TensorRoute] = {}
    for key in sorted({key for keys in reads for key in keys if key[0] in stage_of}):
        maker = stage_of[key[0]]
        readers = tuple(s for s, keys in enumerate(reads) if key in keys)
        back = readers if graph.needs_gradient(key) else ()
        returned = route(maker, tuple(s for s in back if s in carrying), shared, carrying)
        there = route(maker, readers, shared, None, returned)
        routes[key] = _TensorRoute(there, returned.readers)
    return routes


def uncut(graph: LayerGraph) -> StageCut:
    """Returns all layers, frozen ones included, as one stage: the reference for all cuts."""
    return _stage_cut(graph, 0, frozenset(range(len(graph.layers))), frozenset(), {}, True)


def tail(graph: LayerGraph) -> StageCut:
    """Returns the code after the last layer, as a stage that runs no layer at all."""
    return _stage_cut(graph, 0, frozenset(), graph.tail_reads, {}, True)


@dataclass(frozen=True, slots=True)
class _TensorRoute:
    """The route of a tensor to its readers, and the stages from which a gradient of it comes back."""

    route: Route
    returned_by: frozenset[int]


def _stage_cut(
    graph: LayerGraph,
    index: int,
    layers: frozenset[int],
    needed: frozenset[TensorKey],
    routes: Mapping[TensorKey, _TensorRoute],
    is_last: bool,
) -> StageCut:
    """Returns the part of a stage in a cut, given the tensors that it `needed` from other layers."""
    parameters = frozenset().union(*(graph.layers[i].parameters for i in layers))
    frozen = tuple(sorted(k for k in needed if graph.layers[k[0]].frozen))
    message = tuple(key for key, way in routes.items() if index in way.route.sent_to)
    local: dict[int, list[TensorKey]] = {}
    readers: dict[TensorKey, set[int]] = {}
    for key, way in routes.items():
        for before, stage in (*((s - 1, s) for s in way.route.sent_to), *way.route.local):
            if before == index:
                readers.setdefault(key, set()).add(stage)
        for before, stage in way.route.local:
            if stage == index:
                local.setdefault(before, []).append(key)
    received = tuple(sorted({*message, *(key for keys in local.values() for key in keys)}))
    return StageCut(
        index=index,
        layers=layers,
        received=received,
        message=message,
        local={before: tuple(keys) for before, keys in sorted(local.items())},
        sent=tuple(readers),
        frozen_received=frozen,
        needed=needed,
        received_gradients=tuple(k for k in received if index in routes[k].returned_by),
        sent_gradients=tuple(k for k, to in readers.items() if to & routes[k].returned_by),
        parameters=parameters | (graph.tail_parameters if is_last else frozenset()),
        written_buffers=frozenset().union(*(graph.layers[i].written_buffers for i in layers)),
        is_last=is_last,
    )


def require_hooks_within_stages(graph: LayerGraph, pieces: Cut) -> None:
    """Raises GraphError for a hook on a gradient that comes from several stages; names what reads its tensor."""
    tail = len(graph.layers)
    stage_of = {layer: stage.index for stage in pieces.stages for layer in stage.layers}
    stage_of[tail] = len(pieces.stages) - 1
    for readers in graph.hooks:
        stages = {stage_of[reader] for reader in readers if reader in stage_of}
        if len(stages) > 1:
            names = [graph.layers[i].name if i < tail else "the loss" for i in sorted(readers)]
            raise GraphError(
                f"training_step registers a gradient hook between layers, on a tensor that {len(stages)} stages "
                f"read (as {names[0]} and {names[-1]}). Each would run it on its own part of the gradient. "
                "Register the hook inside the forward of the layer that makes the tensor, which sees all of it; or "
                "to scale a gradient write h * s + (h * (1 - s)).detach()"
            )
