"""What frozen encoders hand to the trained layers, and whether it could be stored.

Times are taken of the finest layers; a run folds containers that are all frozen into one layer again, and
what crosses to other ranks are the outputs of those. So results are read off a graph folded as if every
trained layer were a stage of its own. Whether they can be stored is found by running the frozen layers
twice with different random numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from lightning_diffpipe.errors import GraphError
from lightning_diffpipe.graph.cut import cut
from lightning_diffpipe.graph.fold import fold
from lightning_diffpipe.graph.frozen import FrozenView
from lightning_diffpipe.graph.interception import Interception
from lightning_diffpipe.graph.layer import Layer, LayerGraph, TensorKey
from lightning_diffpipe.graph.memo import repeatable, why_not_remembered
from lightning_diffpipe.graph.probe import Step
from lightning_diffpipe.planning.profile import FrozenResult

_log = logging.getLogger(__name__)

MIN_FLOPS_PER_BYTE = 10.0
"""As `EncodingCache` has it: layers that compute less for each byte they give are not stored."""

Repeatable = Callable[[LayerGraph], frozenset[str]]
"""Names the layers of a folded graph whose arguments do not follow noise or timesteps."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """What is known of an encoder's results; see `EncoderProfile`."""

    results: tuple[FrozenResult, ...]
    cacheable: bool | None
    stored_bytes_per_sample: int


def encoder_name(layer: Layer) -> str:
    """The encoder a frozen layer belongs to: its top-level module."""
    return f"frozen {layer.name.partition('.')[0]}"


def encodings(
    module: nn.Module, step: Step, batch: Any, graph: LayerGraph, steady: Repeatable | None = None
) -> dict[str, Encoding]:
    """The results of every encoder by its name; empty where the step cannot be folded.

    Args:
        module: The module.
        step: Module and batch to loss.
        batch: The batch the graph was probed with.
        graph: Its layers, unfolded.
        steady: Finds out what could be stored; unknown if not given.
    """
    if not graph.frozen:
        return {}
    try:
        folded, positions = fold(module, step, batch, graph, range(1, len(graph.path)))
    except GraphError as error:
        _log.info("what frozen layers hand over stays unknown: %s", error)
        return {}
    names: frozenset[str] | None = None
    try:
        names = steady(folded) if steady is not None else None
    except (GraphError, RuntimeError) as error:  # too little memory, say
        _log.info("whether encodings can be stored stays unknown: %s", error)
    encoders: dict[str, list[Layer]] = {}
    for index in folded.frozen:
        layer = folded.layers[index]
        encoders.setdefault(encoder_name(layer), []).append(layer)
    readers = _readers(folded, positions)
    return {name: _encoding(folded, layers, readers, names) for name, layers in encoders.items()}


def found_by_running(module: nn.Module, step: Step, batch: Any) -> Repeatable:
    """Runs the frozen layers twice on a batch, with different random numbers."""

    def steady(folded: LayerGraph) -> frozenset[str]:
        interception = Interception(module, folded.layer_names).install()
        try:
            view = FrozenView(module, folded, cut(folded, ()).frozen, interception)
            return repeatable(view, partial(step, module, batch), seed=0)
        finally:
            interception.uninstall()

    return steady


def _readers(folded: LayerGraph, positions: tuple[int, ...]) -> Mapping[TensorKey, list[int]]:
    """The stages that read each result, of as many stages as there are trained layers."""
    found: dict[TensorKey, list[int]] = {}
    for stage in cut(folded, positions).stages:
        for key in stage.frozen_received:
            found.setdefault(key, []).append(stage.index)
    return found


def _encoding(
    folded: LayerGraph,
    layers: list[Layer],
    readers: Mapping[TensorKey, list[int]],
    steady: frozenset[str] | None,
) -> Encoding:
    samples = folded.num_samples or 1
    read_by: dict[tuple[int, ...], int] = {}
    for layer in layers:
        for key in layer.tensor_keys:
            if key in readers:
                where = tuple(readers[key])
                read_by[where] = read_by.get(where, 0) + folded.spec(key).nbytes
    storable = [x for x in layers if not why_not_remembered(x, folded, MIN_FLOPS_PER_BYTE)]
    stored = [x for x in storable if steady is None or x.name in steady]
    flops = sum(layer.cost_flops for layer in layers)
    cacheable = 2 * sum(layer.cost_flops for layer in stored) > flops
    return Encoding(
        tuple(FrozenResult(size // samples, where) for where, size in sorted(read_by.items())),
        cacheable if steady is not None or not cacheable else None,
        sum(folded.spec(key).nbytes for x in stored for key in x.tensor_keys) // samples,
    )
