"""Owners of the parts of a module that is cut, and its conversion to one ordinary state dict and back.

A rank holds the parameters of its own stages, and those of all frozen layers if it encodes. The first rank of a
pipeline also holds what no training step reads (a VAE's decoder), for validation and sampling. State that layers
change (running statistics) stays on the stage that runs them, and is used nowhere else.

A full checkpoint looks as if one process had written it: every tensor under its fully qualified name. `collect`
brings the tensors that rank 0 does not hold to it, those of optimizers, too, one at a time, through host memory, so
that nothing but rank 0's state has to fit anywhere; of several pipelines the first takes part, as the others hold
copies, or all where they share optimizer states. `spread` does the reverse for every rank of a pipeline, when
training has ended and the module shall be whole again. `take_over` reads a rank's part of such a state dict.
Entries that are no tensors (`get_extra_state`) are those of rank 0.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from lightning_diffpipe.comm.mesh import Mesh
from lightning_diffpipe.comm.packing import as_bytes
from lightning_diffpipe.errors import CheckpointError, ConfigurationError
from lightning_diffpipe.graph.cut import Cut
from lightning_diffpipe.graph.layer import Layer, LayerGraph
from lightning_diffpipe.planning.schedule import Placement

_log = logging.getLogger(__name__)


def residents_of(
    module: nn.Module, pieces: Cut, placement: Placement, num_encoding: int
) -> list[frozenset[str]]:
    """Returns names of the parameters held at each position of a pipeline; its last `num_encoding` ranks encode."""
    frozen, first = pieces.frozen.parameters, placement.num_ranks - num_encoding
    residents = [
        (frozen if local >= first else frozenset()).union(
            *(pieces.stages[stage].parameters for stage in placement.stages_of(local))
        )
        for local in range(placement.num_ranks)
    ]
    read = frozen.union(*(stage.parameters for stage in pieces.stages))
    residents[0] |= {name for name, _ in module.named_parameters() if name not in read}
    return residents


def held_for_all_batches(
    module: nn.Module, graph: LayerGraph, pieces: Cut, between: frozenset[str]
) -> tuple[LayerGraph, Cut]:
    """Returns a step and its stages that hold, and train, what only some batches read.

    A stage holds all parameters of the modules that it calls, whatever they read of them for the batch that was
    probed; all stages those that are in no layer, so that only the code between layers can read them.
    """
    named = dict(module.named_parameters())

    def inside(layers: Iterable[Layer]) -> frozenset[str]:
        prefixes = tuple(f"{layer.name}." for layer in layers)
        return frozenset(name for name in named if name.startswith(prefixes))

    names = lambda stage: inside(graph.layers[i] for i in stage.layers)
    stages = tuple(replace(s, parameters=s.parameters | names(s) | between) for s in pieces.stages)
    more = between | inside(layer for layer in graph.layers if layer.carries_gradient)
    trained = graph.trained | {name for name in more if named[name].requires_grad}
    # Where a frozen call leaves out what others train (adapters that are off), a copy of it would grow old.
    held = pieces.frozen.parameters | (names(pieces.frozen) - trained)
    frozen = replace(pieces.frozen, parameters=held)
    return replace(graph, trained=trained), replace(pieces, frozen=frozen, stages=stages)


def in_no_layer(module: nn.Module, graph: LayerGraph) -> frozenset[str]:
    """Returns names of the parameters that are in no layer, and in no module that is called."""
    layers = tuple(f"{name}." for name in (*graph.layer_names, *graph.watched))
    return frozenset(n for n, _ in module.named_parameters() if not n.startswith(layers))


def kept_for_later(module: nn.Module, graph: LayerGraph) -> frozenset[str]:
    """Returns names of the parameters inside of trained layers that frozen layers and the loss do not read."""
    frozen = (graph.layers[index].parameters for index in graph.frozen)
    read = graph.tail_parameters.union(*frozen)
    inside = tuple(f"{name}." for name in graph.path_names)
    return frozenset(
        name
        for name, parameter in module.named_parameters()
        if name.startswith(inside) and name not in read and type(parameter) is nn.Parameter
    )


def owners_of(
    module: nn.Module, pieces: Cut, residents: Sequence[frozenset[str]], placement: Placement
) -> dict[str, int]:
    """Returns the position of the first holder of every entry of the state dict that is not the same everywhere.

    Returns:
        Entries that some rank lacks, or has an old copy of; on all ranks in the same order, in which they are sent.
    """
    canonical = {id(parameter): name for name, parameter in module.named_parameters()}
    owners = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        original = canonical[id(parameter)]
        holders = [local for local, names in enumerate(residents) if original in names]
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
    """Raises ConfigurationError for a buffer that layers change on one stage and use on another."""
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
    """Warns of statistics that cost speed, and of those that come from some of the samples only."""
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
                "those of the first replica count. With num_replicas=1 they come from all samples",
                stage.index, min(stage.written_buffers), replicas,
            )  # fmt: skip


def collect(state: Mapping[Any, Any], owners: Mapping[Any, int], mesh: Mesh) -> dict[Any, Any]:
    """Brings the entries of a state together on world rank 0.

    Args:
        state: This rank's entries, tensors or values with tensors inside of lists and dicts. Those of other owners
            may be there, too, as placeholders.
        owners: For entries not held everywhere: the world rank that holds them, in the first pipeline if any does.
        mesh: This rank's groups.

    Returns:
        On world rank 0 all entries, tensors on the host, in the order of its own state and then of the owners;
        elsewhere an empty dict.
    """
    of_world = max(owners.values(), default=0) >= mesh.layout.ranks_per_pipeline
    if mesh.pipeline != 0 and not of_world:
        return {}
    entries = {key: value for key, value in state.items() if owners.get(key, 0) == mesh.rank}
    # Shapes and types. A tensor of a class of its own comes with its content, on the host: whoever unpickles one of
    # a GPU puts it there, on a card that may be full.
    outlines = mesh.on_first(
        pytree.tree_map_only(
            Tensor,
            lambda x: torch.empty_like(x, device="meta") if _is_plain(x) else x.detach().cpu(),
            entries if mesh.rank else {},
        ),
        of_world,
    )
    if mesh.rank != 0:
        for value in filter(_is_plain, pytree.tree_leaves(entries)):
            mesh.send_to_first(as_bytes(_on_host(value)), of_world)
        return {}
    whole: dict[Any, Any] = pytree.tree_map(_on_host, entries)
    for owner, outline in enumerate(outlines[1:], start=1):
        received = partial(_received, owner=owner, mesh=mesh, of_world=of_world)
        whole |= pytree.tree_map_only(_is_plain, received, outline)
    return {key: whole[key] for key in {**state, **whole} if key in whole}


def owners_of_state(
    state: Mapping[str, Any], module: nn.Module, owners: Mapping[str, int]
) -> dict[str, int]:
    """Returns owners of the entries of a state dict that may call parameters otherwise than their module.

    Returns:
        As for `collect`, by the names of the state dict. Under an unknown name, what shares memory with a
        parameter or buffer belongs to its owner, anything else to rank 0.
    """
    tensors = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers()),
    }
    by_memory = {tensor.data_ptr(): name for name, tensor in tensors.items() if tensor.numel()}
    owners_by_key = {}
    for key, value in state.items():
        name = key
        if key not in tensors and isinstance(value, Tensor):
            name = by_memory.get(value.data_ptr(), key)
        if name in owners:
            owners_by_key[key] = owners[name]
    return owners_by_key


def spread(
    tensors: Mapping[str, Tensor], owners: Mapping[str, int], mesh: Mesh
) -> Iterator[tuple[str, Tensor]]:
    """Gives every rank of a pipeline the tensors it lacks, one at a time.

    Args:
        tensors: This rank's by name; placeholders of the right shape and dtype for those of other owners.
        owners: As for `collect`.
        mesh: This rank's groups.

    Yields:
        The whole tensors on the host, for all names in `owners`.
    """
    for name, owner in owners.items():
        tensor = tensors[name]
        is_owner = mesh.local_rank == owner
        value = _on_host(tensor) if is_owner else torch.empty(tensor.shape, dtype=tensor.dtype)
        mesh.broadcast(as_bytes(value), owner)
        yield name, value


def take_over(
    state: Mapping[str, Tensor],
    module: nn.Module,
    resident: Set[str],
    owners: Mapping[str, int],
    mesh: Mesh,
    strict: bool = True,
) -> None:
    """Copies this rank's part of a whole state dict into the module: what is resident, and buffers that it owns.

    Raises:
        CheckpointError: Names are missing or unknown, or shapes differ.
    """
    target = module.state_dict()
    refuse_misfit(state, target, strict)
    with torch.no_grad():
        for name in _common_tensors(state, target):
            if name in resident or owners.get(name, mesh.local_rank) == mesh.local_rank:
                target[name].copy_(state[name])


def refuse_misfit(state: Mapping[str, Any], own: Mapping[str, Any], strict: bool) -> None:
    """Raises CheckpointError that says in few words why a state dict does not fit: other names, or other shapes."""
    missing, unknown = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    if strict and (missing or unknown):
        raise CheckpointError(
            f"the checkpoint does not fit the module: {len(missing)} names missing "
            f"{missing[:3]}, {len(unknown)} unknown {unknown[:3]}; set strict_loading=False on the module "
            "to load what fits"
        )
    for name in _common_tensors(state, own):
        if own[name].shape != state[name].shape:
            raise CheckpointError(
                f"{name} has shape {tuple(state[name].shape)} in the checkpoint and "
                f"{tuple(own[name].shape)} in the module"
            )


def _common_tensors(state: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    return [name for name, value in own.items() if name in state and isinstance(value, Tensor)]


def _is_plain(value: Any) -> bool:
    return type(value) in (Tensor, nn.Parameter)


def _received(like: Tensor, owner: int, mesh: Mesh, of_world: bool) -> Tensor:
    value = torch.empty(like.shape, dtype=like.dtype)
    mesh.receive_from(as_bytes(value), owner, of_world)
    return value


def _on_host(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().to("cpu", copy=False).contiguous()
