"""Which parts of a batch have one entry per sample, and which dimensions count samples.

Of a batch that is known from its form: tensors and arrays with so many rows, lists with so many entries, tuples of
so many strings. A collate function may as well have put tensors of all samples into a list, `[images, labels]`, so
what holds batched parts is a container however long it is. A pair of numbers is a value. Two pairs of captions may
be either, so the form of a full batch is stored, and looked for in smaller ones.

Of what layers take and give it is learnt by running the step with one sample more. A dimension that has
`k * n` entries for `n` samples and `k * (n + 1)` for `n + 1` has `k` rows per sample; one that does not change is
shared by all samples. Comparing sizes with the number of samples alone would be fooled by tables of the same
length, and miss heads or frames folded into the batch.

A module that knows better says it: see `ModuleSplit`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from lightning_diffpipe.errors import ConfigurationError

_PLAIN = (str, bytes, int, float, bool, np.generic)


def is_per_sample(node: Any, num_samples: int) -> bool:
    """Returns whether a part of a batch has one entry for each of its samples.

    Example:
        >>> captions, sizes, pair = ("a", "b"), [(8, 8), (8, 9)], [torch.zeros(2), torch.ones(2)]
        >>> [is_per_sample(part, 2) for part in (captions, sizes, pair, (8, 8))]
        [True, True, False, False]
    """
    if isinstance(node, Tensor | np.ndarray):
        return node.ndim > 0 and node.shape[0] == num_samples
    if not isinstance(node, list | tuple) or len(node) != num_samples:
        return False
    if isinstance(node, tuple):
        return _is_texts(node)
    return not any(_holds_batched(item, num_samples) for item in node)


@dataclass(frozen=True)
class BatchForm:
    """Which parts of a batch have one entry per sample, whatever their number.

    Attributes:
        spec: The batch down to those parts.
        per_sample: For each leaf, whether it is one of them.
    """

    spec: pytree.TreeSpec
    per_sample: tuple[bool, ...]

    @classmethod
    def of(cls, batch: Any, num_samples: int) -> BatchForm:
        """Decides by a batch. Of `k` entries that hold `k` things each it takes them for parts of `k` samples."""
        return _decided(batch, num_samples)[1]

    def parts(self, batch: Any, num_samples: int) -> list[Any] | None:
        """Returns the leaves of another batch; None if that is of another form."""
        try:
            leaves = self.spec.flatten_up_to(batch)
        except Exception:  # of whatever containers compare
            return None
        fits = all(
            _num_entries(leaf) == num_samples if cut else _is_shared(leaf, num_samples)
            for leaf, cut in zip(leaves, self.per_sample, strict=True)
        )
        return leaves if fits else None


@dataclass(frozen=True)
class ModuleSplit:
    """A module's own way to cut its batches, whose samples are more than rows: pairs, bags, graphs.

    Attributes:
        owner: Class of the module.
        split_batch: The module's method: a batch and sample counts to a batch for each count, in order.
        count_samples: Its method, if it has one: the number of samples of a batch. Otherwise rows count.
    """

    owner: str
    split_batch: Callable[[Any, list[int]], Sequence[Any]]
    count_samples: Callable[[Any], int] | None

    @classmethod
    def of(cls, module: Any) -> ModuleSplit | None:
        """Returns the form of a module's batches; None if it has no `split_batch`."""
        split_batch = getattr(module, "split_batch", None)
        if not callable(split_batch):
            return None
        count = getattr(module, "count_samples", None)
        return cls(type(module).__name__, split_batch, count if callable(count) else None)

    def split(self, batch: Any, sizes: Sequence[int]) -> list[Any]:
        """Cuts a batch, and looks whether the module gave what it was asked for.

        Raises:
            ConfigurationError: It gave another number of batches, or others sizes.
        """
        parts = list(self.split_batch(batch, list(sizes)))
        found = [count_samples(part, self) for part in parts]
        if found != list(sizes):
            raise ConfigurationError(
                f"{self.owner}.split_batch(batch, {list(sizes)}) gave {len(parts)} batches of {found} samples. Let "
                "it return one batch for each of the sizes; where a sample is not a row of the batch, but a pair, "
                "say, count_samples(batch) returns how many there are"
            )
        return parts


def change_samples(
    batch: Any,
    num_samples: int,
    changes: Sequence[Callable[[Any], Any]],
    form: BatchForm | None = None,
) -> list[Any]:
    """Applies each change to all parts of the batch with one entry per sample; all else stays.

    Args:
        batch: A batch.
        num_samples: Samples in it.
        changes: What to make of the parts.
        form: That of a larger batch, which tells more surely; not used if this one has another.
    """
    leaves = form.parts(batch, num_samples) if form else None
    if form is None or leaves is None:
        leaves, form = _decided(batch, num_samples)
    cuts = list(zip(leaves, form.per_sample, strict=True))
    return [
        pytree.tree_unflatten([change(leaf) if cut else leaf for leaf, cut in cuts], form.spec)
        for change in changes
    ]


def _decided(batch: Any, num_samples: int) -> tuple[list[Any], BatchForm]:
    """Returns the leaves of a batch, and its form."""

    def is_leaf(node: Any) -> bool:
        return is_per_sample(node, num_samples)

    leaves, spec = pytree.tree_flatten(batch, is_leaf=is_leaf)
    return leaves, BatchForm(spec, tuple(map(is_leaf, leaves)))


def sample_counts(batch: Any) -> dict[str, int]:
    """Returns what each part of a batch says how many samples there are; equal numbers in a batch that can be cut.

    Example:
        >>> sample_counts({"image": torch.zeros(2, 3), "caption": ["a", "b"], "scale": 2.0})
        {"['image']": 2, "['caption']": 2}
    """
    first = count_samples(batch)
    if first is None:
        return {}

    def is_leaf(node: Any) -> bool:
        return _is_values(node) or is_per_sample(node, first)

    flat, _ = pytree.tree_flatten_with_path(batch, is_leaf=is_leaf)
    return {
        pytree.keystr(path): len(leaf)
        for path, leaf in flat
        if (leaf.ndim > 0 if isinstance(leaf, Tensor | np.ndarray) else is_leaf(leaf))
    }


def count_samples(batch: Any, form: BatchForm | ModuleSplit | None = None) -> int | None:
    """Returns the number of samples: dimension 0 of the first tensor or array, else the length of the first list.

    A module that counts them itself (`ModuleSplit`) is asked.

    Example:
        >>> count_samples({"image": torch.zeros(4, 3, 8, 8), "caption": ["a", "b", "c", "d"]})
        4
    """
    if isinstance(form, ModuleSplit) and form.count_samples is not None:
        return int(form.count_samples(batch))
    return next(_first_counts(batch), None)


def add_sample(batch: Any, num_samples: int, form: BatchForm | None = None) -> Any:
    """Returns the batch with its first sample repeated at the end; for its form see `change_samples`."""

    def repeat(part: Any) -> Any:
        if isinstance(part, Tensor):
            return torch.cat([part, part[:1]])
        return np.concatenate([part, part[:1]]) if isinstance(part, np.ndarray) else part + part[:1]

    return change_samples(batch, num_samples, [repeat], form)[0]


def _num_entries(part: Any) -> int | None:
    if isinstance(part, Tensor | np.ndarray):
        return part.shape[0] if part.ndim else None
    return len(part) if isinstance(part, list | tuple) else None


def _is_shared(leaf: Any, num_samples: int) -> bool:
    """Returns whether a part still is a leaf, and has not come to have an entry per sample."""
    inside = isinstance(leaf, list | tuple | dict) or type(leaf) in pytree.SUPPORTED_NODES
    return not inside and not is_per_sample(leaf, num_samples)


def _first_counts(batch: Any) -> Iterator[int]:
    """Returns lengths of tensors and arrays; of lists of values; of other lists. Only the first counts."""
    leaves = pytree.tree_leaves(batch, is_leaf=_is_values)
    yield from (
        int(leaf.shape[0]) for leaf in leaves if isinstance(leaf, Tensor | np.ndarray) and leaf.ndim
    )
    yield from (len(leaf) for leaf in leaves if _is_values(leaf))
    leaves = pytree.tree_leaves(batch, is_leaf=lambda node: isinstance(node, list))
    yield from (len(leaf) for leaf in leaves if isinstance(leaf, list) and leaf)


def _is_texts(node: tuple[Any, ...]) -> bool:
    """Returns whether a tuple holds texts, some of which may be missing; what has named fields is a record."""
    return (
        not hasattr(node, "_fields")
        and all(item is None or isinstance(item, str | bytes) for item in node)
        and any(item is not None for item in node)
    )


def _is_values(node: Any) -> bool:
    """Returns whether a node holds nothing but one plain value per sample, whatever their number."""
    if isinstance(node, tuple):
        return _is_texts(node)
    return (
        isinstance(node, list)
        and all(item is None or isinstance(item, _PLAIN) for item in node)
        and any(item is not None for item in node)
    )


def _holds_batched(item: Any, num_samples: int) -> bool:
    if item is None or isinstance(item, _PLAIN):
        return False

    if not isinstance(item, list) and is_per_sample(item, num_samples):
        return True
    # Written out for lists and tuples, of which there may be one for each sample: pytree takes longer.
    inside = item if isinstance(item, list | tuple) else pytree.tree_leaves(item, _is_values)
    return any(_holds_batched(part, num_samples) for part in inside if part is not item)


def rows(size: Any, more: Any, num_samples: int) -> int | None:
    """Returns rows per sample from the sizes at `n` and `n + 1` samples, None if there is no such pattern.

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
    """Returns rows per sample of every leaf of the arguments; None if the arguments cannot be cut."""
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
    """Returns rows per sample of every leaf of the outputs."""
    if more is None or num_samples is None or len(dims) != len(more):
        return [None] * len(dims)
    return [rows(size, larger, num_samples) for size, larger in zip(dims, more, strict=True)]
