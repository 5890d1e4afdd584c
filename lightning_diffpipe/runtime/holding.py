"""Who holds what of a module that is cut.

A rank keeps the parameters of its own stages and of all frozen layers. The first rank of a pipeline also
keeps what no training step reads (a VAE's decoder), for validation and sampling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from lightning_diffpipe.graph.cut import Cut
from lightning_diffpipe.planning.schedule import Placement
from lightning_diffpipe.runtime.mesh import Mesh


def residents_of(module: nn.Module, pieces: Cut, placement: Placement) -> list[frozenset[str]]:
    """Names of the parameters held at each position of a pipeline."""
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
    """Position of the first holder of every entry of the state dict that is not the same everywhere.

    Args:
        module: The module.
        pieces: How it is cut.
        residents: Parameters held at each position.
        placement: Ranks of the stages.

    Returns:
        Entries that some rank lacks, or has an old copy of.
    """
    canonical = {id(parameter): name for name, parameter in module.named_parameters()}
    owners = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        original = canonical[id(parameter)]
        holding = [local for local, held in enumerate(residents) if original in held]
        if len(holding) < len(residents):
            owners[name] = holding[0]
    for stage in pieces.stages:  # statistics change on the stage that runs the layer
        owners |= dict.fromkeys(stage.written_buffers, placement.stage_ranks[stage.index][0])
    return owners


def holders_of(pieces: Cut, mesh: Mesh, trained: frozenset[str]) -> Mapping[str, tuple[int, ...]]:
    """World ranks that hold each trained parameter, over all pipelines."""
    stages_of: dict[str, set[int]] = {}
    for stage in pieces.stages:
        for name in stage.parameters & trained:
            stages_of.setdefault(name, set()).add(stage.index)
    return {name: mesh.layout.ranks_of_stages(stages) for name, stages in stages_of.items()}


def whereabouts(pieces: Cut, placement: Placement) -> dict[str, str]:
    """For error messages: where each parameter lives."""
    return {
        name: f"stage {stage.index} (rank {placement.stage_ranks[stage.index][0]} of the pipeline)"
        for stage in pieces.stages
        for name in stage.parameters
    }
