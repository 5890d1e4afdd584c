"""What frozen encoders hand to the trained layers, whether it could be stored, and whether they can be split.

Times are taken of the finest layers; a run folds containers that are all frozen into one layer again, and
what crosses to other ranks are the outputs of those. So results are read off a graph folded as if every
trained layer were a stage of its own. Whether they can be stored is found by running the frozen layers
twice with different random numbers; whether they give the same for some of the samples only, by running them on
single samples.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_diffpipe.errors import GraphError
from lightning_diffpipe.graph.cut import cut
from lightning_diffpipe.graph.frozen import FrozenView, why_not_splittable
from lightning_diffpipe.graph.interception import Interception
from lightning_diffpipe.graph.layer import Layer, LayerGraph, TensorKey
from lightning_diffpipe.graph.memo import repeatable, why_not_remembered
from lightning_diffpipe.graph.probe import fold
from lightning_diffpipe.graph.step import Step, StepCall
from lightning_diffpipe.planning.profile import FrozenResult

_log = logging.getLogger(__name__)

MIN_FLOPS_PER_BYTE = 10.0
"""As `EncodingCache` has it: layers that compute less for each byte they give are not stored."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen of the layers of a folded graph while they ran.

    Attributes:
        steady: Names of those whose arguments do not follow noise or timesteps.
        mixing: Names of those that give other values for single samples than for all.
    """

    steady: frozenset[str]
    mixing: frozenset[str]


Look = Callable[[LayerGraph], Seen]


@dataclass(frozen=True, slots=True)
class Encoding:
    """What is known of an encoder's results; see `EncoderProfile`."""

    results: tuple[FrozenResult, ...]
    cacheable: bool | None
    stored_bytes_per_sample: int
    splittable: bool | None


def encoder_name(layer: Layer) -> str:
    """Returns the encoder a frozen layer belongs to: its top-level module."""
    return f"frozen {layer.name.partition('.')[0]}"


def encodings(
    module: nn.Module, step: Step, batch: Any, graph: LayerGraph, look: Look | None = None
) -> dict[str, Encoding]:
    """Returns the results of every encoder by its name; empty where the step cannot be folded.

    Args:
        module: The module.
        step: Module and batch to loss.
        batch: The batch the graph was probed with.
        graph: Its layers, unfolded.
        look: Runs them, to find out what could be stored, and split; unknown if not given.
    """
    if not graph.frozen:
        return {}
    try:
        folded, positions = fold(module, step, batch, graph, range(1, len(graph.path)))
    except GraphError as error:
        _log.info("what frozen layers hand over stays unknown: %s", error)
        return {}
    seen: Seen | None = None
    try:
        seen = look(folded) if look is not None else None
    except (GraphError, RuntimeError) as error:  # too little memory, say
        _log.info("whether encodings can be stored, or split, stays unknown: %s", error)
    encoders: dict[str, list[Layer]] = {}
    for index in folded.frozen:
        layer = folded.layers[index]
        encoders.setdefault(encoder_name(layer), []).append(layer)
    readers: dict[TensorKey, list[int]] = {}  # as many stages as there are trained layers
    for stage in cut(folded, positions).stages:
        for key in stage.frozen_received:
            readers.setdefault(key, []).append(stage.index)
    return {name: _encoding(folded, layers, readers, seen) for name, layers in encoders.items()}


def found_by_running(module: nn.Module, step: Step, batch: Any, stores: bool = True) -> Look:
    """Runs the frozen layers on a batch and on its samples, and with other random numbers.

    Args:
        module: The module.
        step: Module and batch to loss.
        batch: The batch the graph was probed with, where the module is.
        stores: Also find out what could be stored.
    """

    def look(folded: LayerGraph) -> Seen:
        interception = Interception(module, folded.layer_names).install()
        call = StepCall(step, module, batch, written=folded.batch_writes)
        try:
            view = FrozenView(module, folded, cut(folded, ()).frozen, interception)
            steady = repeatable(view, call, seed=0) if stores else frozenset()
            return Seen(steady, view.mixing(call, seed=0))
        finally:
            interception.uninstall()

    return look


def _encoding(
    folded: LayerGraph,
    layers: list[Layer],
    readers: Mapping[TensorKey, list[int]],
    seen: Seen | None,
) -> Encoding:
    samples = folded.num_samples or 1
    read_by: dict[tuple[int, ...], int] = {}
    for layer in layers:
        for key in layer.tensor_keys:
            if key in readers:
                where = tuple(readers[key])
                read_by[where] = read_by.get(where, 0) + folded.spec(key).nbytes
    storable = [x for x in layers if not why_not_remembered(x, folded, MIN_FLOPS_PER_BYTE)]
    stored = [x for x in storable if seen is None or x.name in seen.steady]
    flops = sum(layer.cost_flops for layer in layers)
    cacheable = 2 * sum(layer.cost_flops for layer in stored) > flops
    splittable: bool | None = False
    if not any(map(why_not_splittable, layers)):
        splittable = None if seen is None else seen.mixing.isdisjoint(x.name for x in layers)
    return Encoding(
        tuple(FrozenResult(size // samples, where) for where, size in sorted(read_by.items())),
        cacheable if seen is not None or not cacheable else None,
        sum(folded.spec(key).nbytes for x in stored for key in x.tensor_keys) // samples,
        splittable,
    )
