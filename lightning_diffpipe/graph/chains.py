"""Chains: several backbones that one step trains next to each other, found by what they read.

A cascade's base and super-resolution denoiser know nothing of each other: no trained layer of one reads what the
other gives, they share no trained parameter, and each adds a term of its own to the loss. Then their stages may run
in opposite directions. Whether the terms are independent is tried: the code after the last layer is run with random
numbers in place of what layers give, and the gradient of every chain must be the same whatever the other chains
give, NaN included.

Passes are stretches of the path in which the same layers are called again, found by their names: self-conditioning,
a teacher and a student of one network, consistency steps.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from lightning_diffpipe.graph.cut import StageCut, tail
from lightning_diffpipe.graph.interception import Interception
from lightning_diffpipe.graph.layer import LayerGraph, TensorKey
from lightning_diffpipe.graph.placement import own_tensors
from lightning_diffpipe.graph.step import StepCall
from lightning_diffpipe.graph.trial import untouched
from lightning_diffpipe.graph.view import StageView


@dataclass(frozen=True, slots=True)
class Chains:
    """The chains of a step.

    Attributes:
        starts: Positions of the trained path where they begin, ascending; `(0,)` if there is one.
        joined_by: If there is one: why it is no more, with what to do about it.
    """

    starts: tuple[int, ...]
    joined_by: str = ""


ONE_CHAIN = Chains((0,))


def find_chains(root: nn.Module, step: Callable[..., Any], batch: Any, graph: LayerGraph) -> Chains:
    """Returns the chains of a probed step; the module, whole and where the batch is, is left as it is."""
    starts = _starts(graph)
    if len(starts) == 1:
        return Chains(starts, _why_connected(graph))
    joined_by = _shared_parameter(graph, starts)
    if not joined_by and graph.weighted:
        joined_by = (
            'training_step returns a "weight" besides the loss, which counts for all backbones together; leave it '
            "out, and divide every loss by its own number"
        )
    if not joined_by:
        try:
            with untouched(root):
                before = _metrics(root)
                joined_by = _mixed_loss(root, step, batch, graph, starts)
                joined_by = joined_by or _updated(root, before)
        except Exception as error:  # of any code, on numbers that mean nothing
            joined_by = (
                "whether each backbone has a loss of its own cannot be found out: with random numbers in place of "
                f"layers the code after the last one ends with {type(error).__name__}: {error}"
            )
    return Chains((0,), joined_by) if joined_by else Chains(starts)


def _starts(graph: LayerGraph) -> tuple[int, ...]:
    """Returns positions after which only the loss reads what was made before, if two layers or more are between."""
    position = {layer: at for at, layer in enumerate(graph.path)}
    reaches = list(range(len(graph.path)))  # the last position that is connected with this one
    for at, layer in enumerate(graph.path):
        for maker in graph.layers[layer].deps & position.keys():
            reaches[position[maker]] = max(reaches[position[maker]], at)
    starts, until = [0], 0
    for at in range(len(graph.path)):
        if at > until and at - starts[-1] > 1 and at + 1 < len(graph.path):
            starts.append(at)
        until = max(until, reaches[at])
    return tuple(starts)


def _why_connected(graph: LayerGraph) -> str:
    path = set(graph.path)
    for layer in (graph.layers[i] for i in graph.path):
        for maker in sorted(layer.deps & path):
            source = graph.layers[maker].name
            if _owner(source) != _owner(layer.name):
                return (
                    f"{layer.name} reads what {source} gives, be it detached. Backbones that run in opposite "
                    "directions know nothing of each other: train the second on real inputs (of a cascade: on the "
                    "downsampled image, with noise), and give each conditioning layers of its own"
                )
    frozen = sorted({_owner(graph.layers[i].name) for i in graph.frozen})
    if frozen and graph.path:
        return (
            f"there is one backbone that is trained, {_owner(graph.path_names[0])}; frozen are "
            f"{', '.join(frozen)}, which run in bubbles (filling=auto). Train both, or use schedule=1f1b"
        )
    return "there is one backbone; use schedule=1f1b"


def _owner(name: str) -> str:
    return name.partition(".")[0]


def _shared_parameter(graph: LayerGraph, starts: tuple[int, ...]) -> str:
    remedy = "give each a copy of its own (copy.deepcopy), or use schedule=1f1b"
    reader: dict[str, tuple[int, str]] = {}
    for chain, (first, stop) in enumerate(pairwise((*starts, len(graph.path)))):
        for layer in (graph.layers[i] for i in graph.path[first:stop]):
            for name in sorted(layer.parameters & graph.trained):
                other, by = reader.setdefault(name, (chain, layer.name))
                if other != chain:
                    return f"the parameter {name} is read by {by} and by {layer.name}: {remedy}"
    if of_loss := graph.tail_parameters & graph.trained:
        return f"the loss itself reads the trained parameter {min(of_loss)}: {remedy}"
    return ""


def _mixed_loss(
    root: nn.Module,
    step: Callable[..., Any],
    batch: Any,
    graph: LayerGraph,
    starts: tuple[int, ...],
) -> str:
    """Says which chain's gradients depend on what another one gives."""
    end = tail(graph)
    keys = tuple(key for key in end.needed if graph.needs_gradient(key))
    call = StepCall(step, root, batch, written=graph.batch_writes)
    chain_of = {
        layer: chain
        for chain, (first, stop) in enumerate(pairwise((*starts, len(graph.path))))
        for layer in graph.path[first:stop]
    }
    with Interception(root).installed() as interception:
        view = StageView(root, graph, replace(end, received_gradients=keys), interception)
        for chain, start in enumerate(starts):
            chain_keys = {key for key in end.needed if chain_of.get(key[0], chain) == chain}
            by_filling = []
            for values in _fillings(graph, end, chain_keys):
                run = view.forward(call, seed=0, received=values, log=lambda *_: None)
                gradients = run.backward()
                by_filling.append([gradients[key] for key in sorted(chain_keys & {*keys})])
            if any(not _equal(by_filling[0], other) for other in by_filling[1:]):
                return (
                    f"the gradients of {_owner(graph.path_names[start])} depend on what other backbones give: the "
                    "loss is no sum of one for each. Add the losses, with constant weights, or use schedule=1f1b"
                )
    return ""


def _metrics(root: nn.Module) -> dict[int, list[Tensor]]:
    return {
        id(module): [leaf.detach().clone() for leaf in pytree.tree_leaves(tensors)]
        for module, tensors in own_tensors(root.modules())
    }


def _updated(root: nn.Module, before: Mapping[int, list[Tensor]]) -> str:
    """Says which metric object the step updates: where a chain ends it would see what others have not given."""
    now = _metrics(root)
    for name, module in root.named_modules():
        if id(module) in now and not _equal(before[id(module)], now[id(module)]):
            return (
                f"training_step updates the metric {name}, and would do so where each backbone ends; log numbers "
                "(self.log(name, value)), update it in validation, or use schedule=1f1b"
            )
    return ""


def _fillings(
    graph: LayerGraph, end: StageCut, own: Collection[TensorKey]
) -> list[dict[TensorKey, Tensor]]:
    """Returns the same random numbers each time in place of what a chain gives; others, then NaN, for the rest."""
    fillings = []
    for seed in (1, 2, None):
        of_own, of_others = torch.Generator().manual_seed(0), torch.Generator()
        of_others.manual_seed(seed or 0)
        values: dict[TensorKey, Tensor] = {}
        for key in sorted(end.needed):
            spec, generator = graph.spec(key), of_own if key in own else of_others
            value = 0.1 + 0.8 * torch.rand(spec.shape, generator=generator, dtype=torch.float64)
            if not spec.dtype.is_floating_point and not spec.dtype.is_complex:
                value = torch.zeros(spec.shape)
            elif seed is None and key not in own:
                value.fill_(float("nan"))
            values[key] = value.to(spec.device, spec.dtype)
        fillings.append(values)
    return fillings


def _equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))  # NaN is unlike all


def passes(graph: LayerGraph) -> tuple[tuple[int, int], ...]:
    """Finds half-open ranges of positions of the path, equally long and spaced, that call the same layers.

    Returns:
        At least two, with half of the path's operations or more; none if there are no such ranges.
    """
    names, path = graph.path_names, graph.path
    best: tuple[int, int, tuple[tuple[int, int], ...]] = (0, 0, ())
    for distance in range(2, len(names)):
        first = 0
        while first + distance < len(names):
            stop = first
            while stop + distance < len(names) and names[stop] == names[stop + distance]:
                stop += 1
            count = -(-(stop - first) // distance) + 1
            length = stop - first - (count - 2) * distance
            if count > 1 and length > 1:
                starts = [first + k * distance for k in range(count)]
                ranges = tuple((start, start + length) for start in starts)
                cost = sum(graph.layers[path[i]].cost_flops for a, b in ranges for i in range(a, b))
                best = max(best, (cost, count, ranges))
            first = stop + 1
    total = sum(graph.layers[i].cost_flops for i in path)
    return best[2] if 2 * best[0] >= total else ()


def without_gradient(graph: LayerGraph) -> frozenset[int]:
    """Returns positions of the path that no gradient reaches or passes: their stages need no backward."""
    carrying = [graph.layers[i].carries_gradient for i in graph.path]
    ranges = passes(graph)
    if not ranges:
        first = next((i for i, carries in enumerate(carrying) if carries), len(carrying))
        return frozenset(range(first))
    trained = [any(carrying[a:b]) for a, b in ranges]
    stops = [*(stop for _, stop in ranges[:-1]), len(carrying)]
    free: set[int] = set()
    for number, (start, stop) in enumerate(zip((0, *stops), stops, strict=False)):
        between = any(trained[:number]) and any(trained[number + 1 :])
        if not trained[number] and not between:
            free |= {i for i in range(start, stop) if not carrying[i]}
    return frozenset(free)
