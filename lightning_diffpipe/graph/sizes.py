"""Sizes of the layers of a probed step: a profile in which only the times are missing.

All that a plan has to know of layers and that needs no run follows from the graph: bytes of weights, gradients and
results, operations, what crosses a cut, what is read far after it is made, which layers are called again.
`profiling/` puts times to it.

    graph  ->  sizes (this file)  ->  profile with times  ->  plan
"""

from collections.abc import Container, Hashable, Iterable, Mapping

from torch import nn

from lightning_diffpipe.graph.chains import passes, without_gradient
from lightning_diffpipe.graph.layer import ContainerCall, Layer, LayerGraph, TensorKey, Value
from lightning_diffpipe.graph.placement import held_bytes
from lightning_diffpipe.graph.streaming import streamable
from lightning_diffpipe.planning.profile import (
    BackboneProfile,
    EncoderLayerProfile,
    EncoderProfile,
    LayerProfile,
    ModelProfile,
    Seconds,
    Skip,
)

_SKIP_SHARE = 16
"""Tensors that skip less than this part of the path matter to no placement: stages are longer."""

_NOT_TIMED = Seconds.per_sample(0.0)


def encoder_name(layer: Layer) -> str:
    """Returns the encoder a frozen layer belongs to: its top-level module."""
    return f"frozen {layer.name.partition('.')[0]}"


def layers_by_encoder(graph: LayerGraph) -> dict[str, list[Layer]]:
    """Returns frozen layers by the name of their encoder, in the order of the calls."""
    groups: dict[str, list[Layer]] = {}
    for index in graph.frozen:
        layer = graph.layers[index]
        groups.setdefault(encoder_name(layer), []).append(layer)
    return groups


def layer_sizes(module: nn.Module, graph: LayerGraph, name: str | None = None) -> ModelProfile:
    """Returns a profile without times: one backbone, the trained path, and one encoder per frozen top-level module.

    A parameter counts for the first layer that reads it, one that only the loss reads for the last.

    Args:
        module: The module, whole.
        graph: Its layers, unfolded.
        name: Name of the profile; the module's class if not given.
    """
    sizes = {name: held_bytes(p) for name, p in module.named_parameters()}
    samples = graph.num_samples or 1
    boundaries, no_gradient = boundary_bytes(graph), without_gradient(graph)
    path = [graph.layers[index] for index in graph.path]
    counted, read_before, streams = set[str](), set[TensorKey](), streamable(module, graph)
    layers = []
    for position, layer in enumerate(path):
        read = layer.parameters | (graph.tail_parameters if layer is path[-1] else frozenset())
        names, counted = read - counted, counted | read
        inputs, read_before = layer.reads - read_before, read_before | layer.reads
        gradients = [sizes.get(key, 0) for key in names & graph.trained]
        # Computed again, it would write again.
        writes = layer.written_buffers or layer.written_parameters or layer.mutated
        layers.append(
            LayerProfile(
                name=layer.name,
                forward_s=_NOT_TIMED,
                backward_s=_NOT_TIMED,
                parameter_bytes=sum(sizes.get(key, 0) for key in names),
                gradient_bytes=sum(gradients),
                largest_gradient_bytes=max(gradients, default=0),
                boundary_bytes_per_sample=boundaries[position + 1] // samples,
                flops_per_sample=layer.cost_flops // samples,
                gradient=position not in no_gradient,
                input_bytes_per_sample=None
                if writes
                else sum(graph.spec(key).nbytes for key in inputs) // samples,
                streamable_bytes=sum(map(held_bytes, streams[layer.name].values())),
            )
        )
    backbone = BackboneProfile("backbone", tuple(layers), skips=skips(graph), passes=passes(graph))
    return ModelProfile(
        name or type(module).__name__,
        (backbone,),
        _encoders(graph, sizes),
        quantized=any(sizes[key] < p.nbytes for key, p in module.named_parameters()),
    )


def _encoders(graph: LayerGraph, sizes: Mapping[str, int]) -> tuple[EncoderProfile, ...]:
    """Returns frozen layers, grouped by the top-level module they belong to."""
    samples, profiles = graph.num_samples or 1, list[EncoderProfile]()
    for name, layers in layers_by_encoder(graph).items():
        needed = {encoder_name(graph.layers[d]) for layer in layers for d in layer.deps}
        earlier = {profile.name for profile in profiles}
        entries, claimed = [], set[str]()
        for layer in layers:
            names, claimed = layer.parameters - claimed, claimed | layer.parameters
            size = sum(sizes.get(key, 0) for key in names)
            per_sample = graph.output_bytes(layer) // samples, layer.cost_flops // samples
            entries.append(EncoderLayerProfile(layer.name, _NOT_TIMED, size, *per_sample))
        inputs = tuple(sorted((needed - {name}) & earlier))
        profiles.append(EncoderProfile(name, tuple(entries), inputs))
    return tuple(profiles)


def boundary_bytes(graph: LayerGraph) -> tuple[int, ...]:
    """Returns bytes that cross a cut before each position of the path (0 .. len(path)).

    Containers before the cut count as folded: of a residual stream only the sum crosses. These are the sizes for
    the batch the graph was probed with; what the loss reads crosses the end.
    """
    path = graph.path
    foldable = _foldable(graph)
    crossing: set[Value] = set(graph.stream(len(graph.layers)))
    sizes = [0] * (len(path) + 1)
    for k in range(len(path), 0, -1):
        if k < len(path):
            crossing |= graph.stream(path[k])
        stop = path[k] if k < len(path) else len(graph.layers)
        sizes[k] = _crossing_bytes(graph, crossing, stop, foldable)
    return tuple(sizes)


def _crossing_bytes(
    graph: LayerGraph, wanted: Iterable[Value], stop: int, foldable: Container[ContainerCall]
) -> int:
    """Returns bytes of what was made before layer `stop` on the path, among what is wanted later."""
    total, seen, stack = 0, set(wanted), list(wanted)
    while stack:
        value = stack.pop()
        if not isinstance(value, int):
            made_before = value[0] < stop and not graph.layers[value[0]].frozen
            total += graph.spec(value).nbytes if made_before else 0
            continue
        output = graph.folded[value]
        if output.call.stop <= stop and output.call in foldable:
            total += output.num_bytes
        else:
            stack += output.parts - seen
            seen |= output.parts
    return total


def skips(graph: LayerGraph) -> tuple[Skip, ...]:
    """Returns tensors of the path that are read far after they are made, those of a container by its last layer."""
    path, samples = graph.path, graph.num_samples or 1
    at = {layer: position for position, layer in enumerate(path)}
    foldable = _foldable(graph)
    readers: dict[Value, set[int]] = {}
    for position, reader in enumerate((*path, len(graph.layers))):
        stack, seen = list(graph.stream(reader)), set[Value]()
        while stack:
            value = stack.pop()
            output = graph.folded[value] if isinstance(value, int) else None
            if output and (len(output.parts) == 1 or output.call not in foldable):
                stack += output.parts - seen  # passed through as it is, or never whole
                seen |= output.parts
            else:
                readers.setdefault(value, set()).add(position)
    long_reads = []
    for value, positions in readers.items():
        if isinstance(value, int):
            folded = graph.folded[value]
            inside, size = range(folded.call.first, folded.call.stop), folded.num_bytes
        else:
            inside, size = range(value[0], value[0] + 1), graph.spec(value).nbytes
        maker = max((at[layer] for layer in inside if layer in at), default=len(path))
        later = tuple(sorted(position for position in positions if position > maker))
        if later and later[-1] - maker >= max(2, len(path) // _SKIP_SHARE):
            long_reads.append((size, maker, later))
    return tuple(Skip(size // samples, maker, later) for size, maker, later in sorted(long_reads))


def _foldable(graph: LayerGraph) -> set[ContainerCall]:
    """Returns the containers that become one layer of a stage if they are within it."""

    def folds(call: ContainerCall) -> bool:
        on_path = any(not graph.layers[i].frozen for i in range(call.first, call.stop))
        stays = call.draws_random or call.name in graph.leaky or graph.is_mixed(call)
        return on_path and not stays

    return set(filter(folds, graph.calls))


def equal_layers(module: nn.Module, graph: LayerGraph) -> list[list[int]]:
    """Groups layers that do the same work, by what the probe has seen of them."""
    parameters = dict(module.named_parameters())
    groups: dict[Hashable, list[int]] = {}
    for layer in graph.layers:
        shapes = [
            (tuple(parameters[name].shape), name in graph.trained)
            for name in layer.parameters
            if name in parameters
        ]
        outputs = [
            (spec.shape, spec.stride, spec.dtype, spec.requires_grad)
            for spec in map(graph.spec, layer.tensor_keys)
        ]
        # The first trained layer passes no gradient on, which saves a third of its work.
        passes_gradient = any(graph.spec(key).requires_grad for key in layer.reads)
        kind = layer.cost_flops, layer.frozen, layer.carries_gradient, passes_gradient
        tensors = tuple(sorted(shapes)), tuple(outputs), len(graph.stream(layer.index))
        groups.setdefault((kind, tensors), []).append(layer.index)
    return list(groups.values())
