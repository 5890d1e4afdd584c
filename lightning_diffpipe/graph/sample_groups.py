"""Which rows of tensors belong to some samples of a microbatch, for layers that run on a group at a time.

With `samples=(start, stop)` a layer runs on some samples of the microbatch only: its arguments are cut before it,
its outputs padded after it, and the glue sees full shapes. With `group_size` it runs on so many samples at a time.
Kernels are chosen by size, so results are equal bit for bit only where the groups are: they begin at multiples of
`group_size`, on any rank and at any time.

A layer may be run on parts of a batch if it draws nothing and all its arguments and outputs have a dimension of
samples. Whether it mixes samples inside shows when results of groups are compared with those of all samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from lightning_diffpipe.errors import GraphError
from lightning_diffpipe.graph.layer import Layer, LayerGraph, TensorKey, TensorSpec
from lightning_diffpipe.graph.versions import rounding_of

Samples = tuple[int, int]
"""A half-open range of samples."""


def why_not_splittable(layer: Layer) -> str:
    """Returns what keeps a frozen layer from running on some of the samples only; empty if nothing is seen."""
    if layer.draws_random:
        return "draws random numbers, which depend on the number of samples"
    if not layer.splits_samples:
        return "has arguments or outputs without a dimension of samples"
    return ""


def sample_groups(start: int, stop: int, size: int) -> tuple[Samples, ...]:
    """Cuts a range of samples at the multiples of a size.

    Example:
        >>> sample_groups(2, 9, 4)
        ((2, 4), (4, 8), (8, 9))
    """
    cuts = [start, *range((start // size + 1) * size, stop, size), stop]
    return tuple(itertools.pairwise(cuts))


def join_samples(
    graph: LayerGraph, parts: Sequence[Mapping[TensorKey, Tensor]]
) -> dict[TensorKey, Tensor]:
    """Puts the results of runs on consecutive ranges of samples together."""
    joined: dict[TensorKey, Tensor] = {}
    for key, first in parts[0].items():
        spec = graph.spec(key)
        if not spec.rows:
            joined[key] = first
            continue
        joined[key] = spec.empty(first.device)
        torch.cat([part[key] for part in parts], out=joined[key])
    return joined


def rows_of(layer: Layer, flat: list[Any], group: Samples) -> list[Any]:
    """Returns arguments of a layer, of tensors with rows of samples those of a group."""
    start, stop = group
    known = layer.argument_rows or ()
    if len(known) != len(flat):
        raise GraphError(
            f"{layer.name} was called with {len(flat)} arguments, the probe saw {len(known)}"
        )
    return [
        value[start * rows : stop * rows] if rows and isinstance(value, Tensor) else value
        for value, rows in zip(flat, known, strict=True)
    ]


def put_rows(layer: Layer, flat: list[Any], group: Samples, padded: dict[int, Tensor]) -> None:
    """Copies the rows of a group into tensors of the whole microbatch, one for each leaf."""
    start, stop = group
    for leaf, (value, expected) in enumerate(zip(flat, layer.outputs, strict=False)):
        if isinstance(expected, TensorSpec) and expected.rows and isinstance(value, Tensor):
            if leaf not in padded:
                padded[leaf] = expected.empty(value.device).zero_()
            padded[leaf][start * expected.rows : stop * expected.rows].copy_(value)


def with_rows(out: Any, padded: dict[int, Tensor]) -> Any:
    """Returns the output of the last group, its rows of samples replaced by those of all groups."""
    flat, spec = pytree.tree_flatten(out)
    seen = {id(flat[leaf]): whole for leaf, whole in padded.items()}
    joined = [
        padded[leaf] if leaf in padded else seen.get(id(value), value)
        for leaf, value in enumerate(flat)
    ]
    return pytree.tree_unflatten(joined, spec)


def relative_difference(value: Tensor, expected: Tensor) -> float:
    """Returns the largest difference of two tensors by the largest expected value; infinite for unlike integers."""
    if torch.equal(value, expected):
        return 0.0
    if not value.dtype.is_floating_point:
        return float("inf")
    scale = expected.abs().max().clamp_min(1e-30)
    return float(((value - expected).abs().max() / scale).nan_to_num(float("inf")))


def tolerance_of(graph: LayerGraph, layers: Iterable[int], value: Tensor) -> float:
    """Returns by how much a result may differ, as kernels are chosen by size, and parts of a batch round otherwise.

    It is that of the coarsest type on the way: under autocast a text encoder's products are bfloat16, and the
    norm after them makes float32 of it.
    """
    if not value.dtype.is_floating_point:
        return 0.0
    specs = (spec for i in layers for spec in graph.layers[i].outputs)
    dtypes = {value.dtype} | {spec.dtype for spec in specs if isinstance(spec, TensorSpec)}
    for kind, dtype in map(str.split, graph.autocast):
        if kind == value.device.type:
            dtypes.add(getattr(torch, dtype.removeprefix("torch.")))
    floating = [dtype for dtype in dtypes if dtype.is_floating_point]
    eps = max(rounding_of(dtype, value.device) for dtype in floating)
    return min(0.1, 1e4 * eps)
