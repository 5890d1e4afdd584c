"""Which dimensions count samples, learnt by running the step with one sample more.

A dimension that has `k * n` entries for `n` samples and `k * (n + 1)` for `n + 1` has `k` rows per
sample; one that does not change is shared by all samples. Comparing sizes with the number of samples
alone would be fooled by tables of the same length, and miss heads or frames folded into the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor


def count_samples(batch: Any) -> int | None:
    """Number of samples: dimension 0 of the first tensor, or else the length of the first list.

    Example:
        >>> count_samples({"image": torch.zeros(4, 3, 8, 8), "caption": ["a", "b", "c", "d"]})
        4
    """
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.ndim:
            return int(leaf.shape[0])
    if isinstance(batch, dict):
        return next((n for n in map(count_samples, batch.values()) if n is not None), None)
    return len(batch) if isinstance(batch, list | tuple) else None


def add_sample(batch: Any, num_samples: int) -> Any:
    """The batch with its first sample repeated at the end."""
    if isinstance(batch, Tensor):
        if batch.ndim == 0 or batch.shape[0] != num_samples:
            return batch
        return torch.cat([batch, batch[:1]])
    if isinstance(batch, dict):
        return type(batch)({k: add_sample(v, num_samples) for k, v in batch.items()})
    if isinstance(batch, list | tuple):
        if len(batch) == num_samples and not any(_has_samples(x, num_samples) for x in batch):
            return [*batch, batch[0]]
        items = [add_sample(x, num_samples) for x in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    if type(batch) in pytree.SUPPORTED_NODES:
        node = pytree.SUPPORTED_NODES[type(batch)]
        children, context = node.flatten_fn(batch)
        return node.unflatten_fn([add_sample(child, num_samples) for child in children], context)
    return batch


def _has_samples(tree: Any, num_samples: int) -> bool:
    return any(
        isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == num_samples
        for leaf in pytree.tree_leaves(tree)
    )


def rows(size: Any, more: Any, num_samples: int) -> int | None:
    """Rows per sample from the sizes at `n` and `n + 1` samples, None if there is no such pattern.

    Example:
        >>> rows(8, 12, 2), rows(77, 77, 2), rows(5, 7, 2)
        (4, 0, None)
    """
    if not (isinstance(size, int) and isinstance(more, int)):
        return None
    if size == more:
        return 0
    step = more - size
    return step if step > 0 and size == step * num_samples else None


def argument_rows(
    dims: Sequence[Any], more: Sequence[Any] | None, num_samples: int | None
) -> tuple[int | None, ...] | None:
    """Rows per sample of every leaf of the arguments; None if the arguments cannot be cut."""
    if more is None or num_samples is None or len(dims) != len(more):
        return None
    found: list[int | None] = []
    for size, larger in zip(dims, more, strict=True):
        if isinstance(size, str):  # not a tensor: the number of samples may be among its values
            if size != larger:
                return None
            found.append(None)
            continue
        found.append(rows(size, larger, num_samples))
        if found[-1] is None:
            return None
    return tuple(found) if any(found) else None


def output_rows(
    dims: Sequence[Any], more: Sequence[Any] | None, num_samples: int | None
) -> list[int | None]:
    """Rows per sample of every leaf of the outputs."""
    if more is None or num_samples is None or len(dims) != len(more):
        return [None] * len(dims)
    return [rows(size, larger, num_samples) for size, larger in zip(dims, more, strict=True)]
