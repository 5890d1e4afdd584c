"""Cutting a batch into microbatches, whatever the batch is made of.

Tensors and numpy arrays are cut along dimension 0; lists and tuples of strings with one entry per sample
(captions, ids, sizes, pictures) along their length. Dicts, tuples and lists of batched tensors are containers and
keep their form. Scalars, `None` and zero-dimensional tensors go to every microbatch unchanged. A module may cut
its batches itself, with a method `split_batch`.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.graph.samples import (
    BatchForm,
    ModuleSplit,
    change_samples,
    count_samples,
    sample_counts,
)

_NUM_SAMPLED = 16  # elements of each tensor in a fingerprint


def num_samples(batch: Any, form: BatchForm | ModuleSplit | None = None) -> int:
    """Counts the samples of a batch, the common length of its tensors and lists; or asks the module.

    Raises:
        ConfigurationError: No tensor or list tells the number of samples, or they disagree; or there are
            tensors in a container that is not known to pytree.
    """
    if isinstance(form, ModuleSplit):
        return count_samples(batch, form) or 0
    _refuse_unknown_containers(batch)
    sizes = sample_counts(batch)
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
    """Returns sizes of the microbatches of a batch: as even as possible, larger ones first.

    Args:
        num_samples: Samples in the batch.
        num_microbatches: Microbatches the plan runs; fewer are made of fewer samples.

    Example:
        >>> microbatch_sizes(10, 4), microbatch_sizes(2, 4)
        ((3, 3, 2, 2), (1, 1))
    """
    count = max(1, min(num_samples, num_microbatches))
    small, larger = divmod(num_samples, count)
    return (small + 1,) * larger + (small,) * (count - larger)


def split(
    batch: Any, sizes: Sequence[int], form: BatchForm | ModuleSplit | None = None
) -> list[Any]:
    """Cuts a batch into microbatches of the given sizes, in order.

    Args:
        batch: Any nesting of dicts, lists, tuples and dataclasses known to pytree.
        sizes: Samples of each microbatch; they add up to the samples of the batch, by which one knows
            the parts that have one entry per sample.
        form: That of the batch the run was planned with, which tells more surely in small ones; or how the
            module cuts it.

    Returns:
        One batch of the same form for each size. Tensors and arrays are views.

    Example:
        >>> split({"x": torch.arange(3), "caption": ["a", "b", "c"], "scale": 2.0}, [2, 1])[1]
        {'x': tensor([2]), 'caption': ['c'], 'scale': 2.0}
    """
    if isinstance(form, ModuleSplit):
        return form.split(batch, sizes)
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    slices = [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    return change_samples(batch, sum(sizes), [itemgetter(piece) for piece in slices], form)


@dataclass(frozen=True)
class Fingerprint:
    """A few values of a batch, to recognise it by without reading all of it.

    Attributes:
        values: By device: up to 16 elements of every tensor there.
        plain: A checksum of all that is not a tensor, and of shapes and devices.
    """

    values: Mapping[str, Tensor]
    plain: int

    @classmethod
    def of(cls, batch: Any) -> Fingerprint:
        """Reads a batch; waits for no device."""
        leaves = pytree.tree_leaves(batch)
        plain = [
            (leaf.shape, str(leaf.device)) if isinstance(leaf, Tensor) else plain_bytes(leaf)
            for leaf in leaves
        ]
        taken: dict[str, list[Tensor]] = defaultdict(list)
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.numel():
                flat = leaf.detach().reshape(-1)
                sampled = flat[:: max(1, flat.numel() // _NUM_SAMPLED)][:_NUM_SAMPLED]
                taken[str(leaf.device)].append(sampled.to(torch.float64))
        values = {device: torch.cat(tensors) for device, tensors in taken.items()}
        return cls(values, zlib.crc32(repr(plain).encode()))

    def compare(self, other: Fingerprint) -> Comparison:
        """Begins to look for what tells two batches apart; waits for no device."""
        if self.plain != other.plain:
            return Comparison("captions, other plain values, shapes or devices differ")
        pairs = [(value, other.values[device]) for device, value in self.values.items()]
        counts = [(a.nan_to_num() != b.nan_to_num()).sum() for a, b in pairs]
        num_values = sum(value.numel() for value in self.values.values())
        return Comparison("", num_values, tuple(map(_on_its_way, counts)))


@dataclass(frozen=True)
class Comparison:
    """What tells two batches apart; values on a GPU are known when it has come by.

    Attributes:
        plain: What tells them apart beside values, in words.
        num_values: Values that are compared.
        counts: How many differ, by device: a tensor on the host, and what has to happen before it may be read.
    """

    plain: str
    num_values: int = 0
    counts: tuple[tuple[Tensor, torch.cuda.Event | None], ...] = ()

    @property
    def is_known(self) -> bool:
        """Whether `difference` waits for nothing."""
        return all(event is None for _, event in self.counts)

    def difference(self) -> str:
        """Returns what tells them apart, in words; empty if nothing does."""
        for _, event in self.counts:
            if event is not None:
                event.synchronize()
        differing = sum(int(count) for count, _ in self.counts)
        if differing:
            return f"{differing} of {self.num_values} compared values differ"
        return self.plain


def _on_its_way(count: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Returns a number on the host, or on its way there and when it will have arrived."""
    if count.device.type != "cuda":
        return count, None
    copy = torch.empty(count.shape, dtype=count.dtype, pin_memory=True)
    copy.copy_(count, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(count.device))
    return copy, event


def plain_bytes(leaf: Any) -> bytes:
    """Returns what can be compared between processes of a part of a batch that is no tensor.

    Of objects the type and the size, if they have one, as pictures do: their text may tell where in memory
    they lie.
    """
    if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
        return f"{leaf.dtype}{leaf.shape} {zlib.crc32(leaf.tobytes())}".encode()
    if leaf is None or isinstance(
        leaf, str | bytes | int | float | complex | np.generic | PurePath
    ):
        return repr(leaf).encode()
    size = getattr(leaf, "size", None)
    return f"{type(leaf).__qualname__} {size if isinstance(size, int | tuple) else ''}".encode()


def _refuse_unknown_containers(batch: Any) -> None:
    if not any(map(_holds_tensors, pytree.tree_leaves(batch))):
        return
    for path, leaf in pytree.tree_flatten_with_path(batch)[0]:
        if _holds_tensors(leaf):
            name = type(leaf).__name__
            raise ConfigurationError(
                f"{pytree.keystr(path) or 'the batch'} is a {name}, whose tensors cannot be cut into "
                "microbatches, as torch.utils._pytree does not know the type; give a dict, list or tuple, "
                "or register a dataclass with torch.utils._pytree.register_dataclass"
            )


def _holds_tensors(leaf: Any) -> bool:
    """Returns whether an object that pytree does not look into has tensors or arrays inside."""
    if leaf is None or isinstance(leaf, Tensor | np.ndarray | str | bytes | int | float):
        return False
    inside: list[Any] = [getattr(leaf, "__dict__", None)]
    if isinstance(leaf, Mapping):
        inside += leaf.values()
    elif isinstance(leaf, list | tuple | set):
        inside += leaf
    elif dataclasses.is_dataclass(leaf):
        inside += [getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)]
    return any(isinstance(part, Tensor | np.ndarray) for part in pytree.tree_leaves(inside))
