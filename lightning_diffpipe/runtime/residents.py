"""Who holds what of a module that is cut.

A rank keeps the parameters of its own stages and of all frozen layers. The first rank of a pipeline also
keeps what no training step reads (a VAE's decoder), for validation and sampling.

State that layers change (running statistics) stays on the stage that runs them, and is used nowhere else.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import nn

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.graph.cut import Cut
from lightning_diffpipe.graph.layer import LayerGraph
from lightning_diffpipe.planning.schedule import Placement

_log = logging.getLogger(__name__)


def residents_of(module: nn.Module, pieces: Cut, placement: Placement) -> list[frozenset[str]]:
    """Returns names of the parameters held at each position of a pipeline."""
    frozen = pieces.frozen.parameters
    held = [
        frozen.union(*(pieces.stages[stage].parameters for stage in placement.stages_of(local)))
        for local in range(placement.num_ranks)
    ]
    read = frozen.union(*(stage.parameters for stage in pieces.stages))
    held[0] |= {name for name, _ in module.named_parameters() if name not in read}
    return held


def owners_of(
    module: nn.Module, pieces: Cut, residents: Sequence[frozenset[str]], placement: Placement
) -> dict[str, int]:
    """Returns the position of the first holder of every entry of the state dict that is not the same everywhere.

    Args:
        module: The module.
        pieces: How it is cut.
        residents: Parameters held at each position.
        placement: Ranks of the stages.

    Returns:
        Entries that some rank lacks, or has an old copy of; on all ranks in the same order, in which they are sent.
    """
    canonical = {id(parameter): name for name, parameter in module.named_parameters()}
    owners = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        original = canonical[id(parameter)]
        holders = [local for local, held in enumerate(residents) if original in held]
        if len(holders) < len(residents):
            owners[name] = holders[0]
    if len(residents) == 1:
        return owners
    for stage in pieces.stages:  # statistics change on the stage that runs the layer
        owners |= dict.fromkeys(
            sorted(stage.written_buffers), placement.stage_ranks[stage.index][0]
        )
    return owners


def whereabouts(pieces: Cut, placement: Placement) -> dict[str, str]:
    """Returns, for error messages, where each parameter lives."""
    return {
        name: f"stage {stage.index} (rank {placement.stage_ranks[stage.index][0]} of the pipeline)"
        for stage in pieces.stages
        for name in sorted(stage.parameters)
    }


def require_one_home(graph: LayerGraph, pieces: Cut) -> None:
    """Refuses state that layers change on one stage and use on another.

    Raises:
        ConfigurationError: There is some; names the buffer and where it is used.
    """
    for stage in pieces.stages:
        for other in (pieces.frozen, *pieces.stages):
            layers = [graph.layers[i] for i in other.layers]
            used = frozenset().union(*(layer.buffers | layer.written_buffers for layer in layers))
            both = stage.written_buffers & used
            if both and other is not stage:
                where = "by a frozen layer" if other is pieces.frozen else f"on stage {other.index}"
                raise ConfigurationError(
                    f"the buffer {min(both)!r} is changed by a layer on stage {stage.index} and used {where}. "
                    "Every rank has its own copy, so these would disagree from the first step on. Let "
                    "training_step call the module that owns it once, or train on one rank "
                    "(num_stages=1, num_replicas=1)"
                )


def warn_of_statistics(graph: LayerGraph, pieces: Cut, placement: Placement) -> None:
    """Tells of statistics that cost speed, and of those that come from some of the samples only."""
    untrained: set[int] = set()  # they would be frozen if they had no state
    for layer in graph.layers:
        if layer.deps <= untrained and not layer.parameters & graph.trained:
            untrained.add(layer.index)
    names = sorted({graph.layers[i].name for i in untrained if graph.layers[i].written_buffers})
    if names and placement.num_ranks > 1:
        _log.warning(
            "%s: not trained, but in training mode it keeps statistics. So it runs as a part of a stage, with all "
            "that reads it, not in bubbles. If that is not meant, call .eval() on it before training",
            ", ".join(names),
        )
    for stage in pieces.stages:
        replicas = len(placement.stage_ranks[stage.index])
        if stage.written_buffers and replicas > 1:
            _log.warning(
                "stage %d keeps statistics (%s, ...), and each of its %d replicas sees a part of the microbatches: "
                "those of the first replica are kept. With num_replicas=1 they come from all samples",
                stage.index, min(stage.written_buffers), replicas,
            )  # fmt: skip
