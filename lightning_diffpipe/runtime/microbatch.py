"""Cutting a batch into microbatches, whatever the batch is made of.

Every tensor is cut along dimension 0 and every list of plain values (captions, ids, file names) along
its length; dicts, tuples and lists of tensors are containers and keep their form. Scalars, `None` and
zero-dimensional tensors go to every microbatch unchanged.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from lightning_diffpipe.errors import ConfigurationError


def num_samples(batch: Any) -> int:
    """Counts the samples of a batch, the common length of its tensors and lists.

    Raises:
        ConfigurationError: No tensor or list tells the number of samples, or they disagree.
    """
    sizes = {path: size for path, leaf in _leaves(batch) if (size := _length(leaf)) is not None}
    if not sizes:
        raise ConfigurationError(
            f"the batch ({type(batch).__name__}) holds no tensor and no list, so it cannot be cut into "
            "microbatches; give `training_step` a batch whose tensors have samples in dimension 0"
        )
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{path or 'batch'}: {size}" for path, size in sizes.items())
        raise ConfigurationError(
            f"the parts of the batch have different numbers of samples ({listed}); "
            "put samples in dimension 0 everywhere, or move shared values out of the batch"
        )
    return next(iter(sizes.values()))


def microbatch_sizes(num_samples: int, num_microbatches: int) -> tuple[int, ...]:
    """Sizes of the microbatches of a batch: as even as possible, larger ones first.

    Args:
        num_samples: Samples in the batch.
        num_microbatches: Microbatches the plan runs.

    Raises:
        ConfigurationError: There are fewer samples than microbatches.

    Example:
        >>> microbatch_sizes(10, 4)
        (3, 3, 2, 2)
    """
    if num_samples < num_microbatches:
        raise ConfigurationError(
            f"a batch of {num_samples} samples cannot be cut into {num_microbatches} microbatches; "
            f"use a batch size of at least {num_microbatches} per pipeline, "
            f"num_microbatches <= {num_samples}, or drop_last=True in the data loader"
        )
    small, larger = divmod(num_samples, num_microbatches)
    return (small + 1,) * larger + (small,) * (num_microbatches - larger)


def split(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Cuts a batch into microbatches of the given sizes, in order.

    Args:
        batch: Any nesting of dicts, lists, tuples and dataclasses known to pytree.
        sizes: Samples of each microbatch; they add up to the samples of the batch.

    Returns:
        One batch of the same form for each size. Tensors are views.

    Example:
        >>> split({"x": torch.arange(3), "caption": ["a", "b", "c"], "scale": 2.0}, [2, 1])[1]
        {'x': tensor([2]), 'caption': ['c'], 'scale': 2.0}
    """
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [
        pytree.tree_map(
            lambda leaf, start=start, stop=start + size: _slice(leaf, start, stop),
            batch,
            is_leaf=_is_sample_list,
        )
        for start, size in zip(starts, sizes, strict=True)
    ]


@dataclass(frozen=True)
class Fingerprint:
    """A few values of a batch, to recognise it by without reading all of it.

    Attributes:
        values: Up to 16 elements of every tensor; on the batch's device.
        plain: A checksum of all that is not a tensor, and of the shapes.
    """

    values: Tensor
    plain: int

    @classmethod
    def of(cls, batch: Any) -> Fingerprint:
        """Reads a batch."""
        leaves = [leaf for _, leaf in _leaves(batch)]
        tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)]
        plain = [leaf.shape if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        taken = [_spread_out(tensor).to(torch.float64) for tensor in tensors if tensor.numel()]
        values = torch.cat(taken) if taken else torch.zeros(0, dtype=torch.float64)
        return cls(values, zlib.crc32(repr(plain).encode()))

    def difference(self, other: Fingerprint) -> str:
        """What tells two batches apart, in words; empty if nothing does."""
        if self.plain != other.plain:
            return "captions, other plain values or shapes differ"
        differing = int((self.values.nan_to_num() != other.values.nan_to_num()).sum())
        if differing:
            return f"{differing} of {self.values.numel()} compared values differ"
        return ""


def _spread_out(tensor: Tensor, num: int = 16) -> Tensor:
    """Elements from all over a tensor."""
    flat = tensor.reshape(-1)
    return flat[:: max(1, flat.numel() // num)][:num]


def _is_sample_list(node: Any) -> bool:
    """Whether a list holds one plain value per sample, rather than tensors or containers."""
    plain = (str, bytes, int, float, bool)
    return isinstance(node, list) and bool(node) and all(isinstance(item, plain) for item in node)


def _leaves(batch: Any) -> list[tuple[str, Any]]:
    flat, _ = pytree.tree_flatten_with_path(batch, is_leaf=_is_sample_list)
    return [(pytree.keystr(path), leaf) for path, leaf in flat]


def _length(leaf: Any) -> int | None:
    if isinstance(leaf, Tensor):
        return leaf.shape[0] if leaf.dim() else None
    return len(leaf) if _is_sample_list(leaf) else None


def _slice(leaf: Any, start: int, stop: int) -> Any:
    if isinstance(leaf, Tensor):
        return torch.narrow(leaf, 0, start, stop - start) if leaf.dim() else leaf
    return leaf[start:stop] if _is_sample_list(leaf) else leaf
