"""A training step seen from outside: what goes in, what comes out, and what it leaves as it was.

In goes a batch. A pipeline runs the step on one microbatch again and again, and a step may change its batch. So
each run gets containers of its own, and copies of those tensors that the probe saw written. Out come a loss, maybe
a weight besides it, and what `self.log` was given.

Which parts of a batch have one entry per sample is known from its structure: tensors and arrays with so many rows,
lists with so many entries, tuples of so many strings. What holds batched parts, `[images, labels]`, is a container
however long it is; a pair of numbers is a value. Two pairs of captions may be either, so the structure of a full
batch is stored, and looked for in smaller ones. A module that knows better says it: see `ModuleSplit`.

Which dimensions of what layers take and give count samples is learnt by running the step with one sample more: one
that has `k * n` entries for `n` samples and `k * (n + 1)` for `n + 1` has `k` rows per sample. Comparing sizes with
the number of samples would be fooled by tables of the same length, and miss heads or frames folded into the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from lightning_diffpipe.errors import ConfigurationError, GraphError

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
class BatchSpec:
    """The parts of a batch that have one entry per sample, whatever their number.

    `spec` is the batch down to those parts, `per_sample` tells of each leaf whether it is one of them.
    """

    spec: pytree.TreeSpec
    per_sample: tuple[bool, ...]

    @classmethod
    def of(cls, batch: Any, num_samples: int) -> BatchSpec:
        """Decides by a batch. `k` entries that hold `k` things each are taken for parts of `k` samples."""
        return _decided(batch, num_samples)[1]

    def parts(self, batch: Any, num_samples: int) -> list[Any] | None:
        """Returns the leaves of another batch; None if that has another structure."""
        try:
            leaves = self.spec.flatten_up_to(batch)
        except Exception:  # of whatever containers compare
            return None

        def fits(leaf: Any, per_sample: bool) -> bool:
            inside = isinstance(leaf, list | tuple | dict) or type(leaf) in pytree.SUPPORTED_NODES
            if not per_sample:
                return not inside and not is_per_sample(leaf, num_samples)
            if isinstance(leaf, Tensor | np.ndarray):
                return leaf.ndim > 0 and len(leaf) == num_samples
            return isinstance(leaf, list | tuple) and len(leaf) == num_samples

        return leaves if all(map(fits, leaves, self.per_sample)) else None


@dataclass(frozen=True)
class ModuleSplit:
    """A module's own way to cut its batches, whose samples are more than rows: pairs, bags, graphs.

    Attributes:
        owner: Class of the module.
        split_batch: The module's method: a batch and sample counts to a batch for each count, in order.
        count_samples: The module's method, if any: the number of samples of a batch. Otherwise rows count.
    """

    owner: str
    split_batch: Callable[[Any, list[int]], Sequence[Any]]
    count_samples: Callable[[Any], int] | None

    @classmethod
    def of(cls, module: Any) -> ModuleSplit | None:
        """Returns a module's way to cut batches; None if it has no `split_batch`."""
        split_batch = getattr(module, "split_batch", None)
        if not callable(split_batch):
            return None
        count = getattr(module, "count_samples", None)
        return cls(type(module).__name__, split_batch, count if callable(count) else None)

    def split(self, batch: Any, sizes: Sequence[int]) -> list[Any]:
        """Cuts a batch; raises ConfigurationError if the module gave another number of batches, or others sizes."""
        parts = list(self.split_batch(batch, list(sizes)))
        counts = [count_samples(part, self) for part in parts]
        if counts != list(sizes):
            raise ConfigurationError(
                f"{self.owner}.split_batch(batch, {list(sizes)}) gave {len(parts)} batches of {counts} samples. "
                "Let it return one batch for each of the sizes; where a sample is not a row of the batch, but a "
                "pair, say, count_samples(batch) returns how many there are"
            )
        return parts


def change_samples(
    batch: Any,
    num_samples: int,
    changes: Sequence[Callable[[Any], Any]],
    batch_spec: BatchSpec | None = None,
) -> list[Any]:
    """Applies each change to all parts of the batch with one entry per sample; all else stays.

    `batch_spec` is that of a larger batch, which tells more surely; it is not used if this one has another.
    """
    leaves = batch_spec.parts(batch, num_samples) if batch_spec else None
    if batch_spec is None or leaves is None:
        leaves, batch_spec = _decided(batch, num_samples)
    cuts = list(zip(leaves, batch_spec.per_sample, strict=True))
    return [
        pytree.tree_unflatten(
            [change(leaf) if cut else leaf for leaf, cut in cuts], batch_spec.spec
        )
        for change in changes
    ]


def take_samples(
    batch: Any, total: int, count: int, batch_spec: BatchSpec | ModuleSplit | None = None
) -> Any:
    """Returns the first `count` samples of a batch of `total`; all that has another length is shared by all."""
    if isinstance(batch_spec, ModuleSplit):
        return batch if count == total else batch_spec.split(batch, [count, total - count])[0]
    return change_samples(batch, total, [lambda part: part[:count]])[0]


def _decided(batch: Any, num_samples: int) -> tuple[list[Any], BatchSpec]:
    """Returns the leaves of a batch, and its structure."""

    def is_leaf(node: Any) -> bool:
        return is_per_sample(node, num_samples)

    leaves, spec = pytree.tree_flatten(batch, is_leaf=is_leaf)
    return leaves, BatchSpec(spec, tuple(map(is_leaf, leaves)))


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


def count_samples(batch: Any, batch_spec: BatchSpec | ModuleSplit | None = None) -> int | None:
    """Returns the number of samples: dimension 0 of the first tensor or array, else the length of the first list.

    A module that counts them itself (`ModuleSplit`) is asked.

    Example:
        >>> count_samples({"image": torch.zeros(4, 3, 8, 8), "caption": ["a", "b", "c", "d"]})
        4
    """
    if isinstance(batch_spec, ModuleSplit) and batch_spec.count_samples is not None:
        return int(batch_spec.count_samples(batch))
    leaves = pytree.tree_leaves(batch, is_leaf=_is_values)
    counts = [len(x) for x in leaves if isinstance(x, Tensor | np.ndarray) and x.ndim]
    counts += [len(x) for x in leaves if _is_values(x)]
    if not counts:
        lists = pytree.tree_leaves(batch, is_leaf=lambda node: isinstance(node, list))
        counts = [len(x) for x in lists if isinstance(x, list) and x]
    return counts[0] if counts else None


def add_sample(batch: Any, num_samples: int, batch_spec: BatchSpec | None = None) -> Any:
    """Returns the batch with its first sample repeated at the end; for its structure see `change_samples`."""

    def repeat(part: Any) -> Any:
        if isinstance(part, Tensor):
            return torch.cat([part, part[:1]])
        return np.concatenate([part, part[:1]]) if isinstance(part, np.ndarray) else part + part[:1]

    return change_samples(batch, num_samples, [repeat], batch_spec)[0]


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
    rows = output_rows(dims, more, num_samples)
    # Of what is no tensor the number of samples may be among its values.
    fits = (
        size == larger if isinstance(size, str) else size_rows is not None
        for size, larger, size_rows in zip(dims, more or (), rows, strict=False)
    )
    return tuple(rows) if any(rows) and all(fits) else None


def output_rows(
    dims: Sequence[Any], more: Sequence[Any] | None, num_samples: int | None
) -> list[int | None]:
    """Returns rows per sample of every leaf of the outputs."""
    if more is None or num_samples is None or len(dims) != len(more):
        return [None] * len(dims)
    return [rows(size, larger, num_samples) for size, larger in zip(dims, more, strict=True)]


Step = Callable[..., Any]
"""`step(module, batch, *arguments)` returns the loss, or a mapping with the key "loss"."""


@dataclass(frozen=True)
class StepCall:
    """A step on one batch, which stays as it is, to be run any number of times.

    `written` are tensors of the batch that the step writes in place; see `LayerGraph.batch_writes`.
    """

    step: Callable[..., Any]
    module: Any
    batch: Any
    arguments: tuple[Any, ...] = ()
    written: Collection[str] = ()

    def __call__(self) -> Any:
        """Runs the step."""
        return self.step(self.module, fresh(self.batch, self.written), *self.arguments)


def fresh(batch: Any, written: Collection[str] = ()) -> Any:
    """Returns a batch in new containers, on which a step can do nothing to the old one.

    Tensors in the places `written`, as `pytree.keystr` tells them, are copied.

    Example:
        >>> batch = {"caption": ["a", "b"], "scale": 2.0}
        >>> fresh(batch).pop("caption"), batch
        (['a', 'b'], {'caption': ['a', 'b'], 'scale': 2.0})
    """
    if written:
        return pytree.tree_map_with_path(
            lambda path, leaf: leaf.clone() if pytree.keystr(path) in written else _alias(leaf),
            batch,
        )
    # Written out for what most batches are made of, of which every run of a step gets one.
    if type(batch) is dict:
        return {key: fresh(part) for key, part in batch.items()}
    if type(batch) in (list, tuple):
        return type(batch)(map(fresh, batch))
    return _alias(batch) if isinstance(batch, Tensor | str) else pytree.tree_map(_alias, batch)


def _alias(leaf: Any) -> Any:
    """Returns the same values; an array is copied, as nobody sees who writes into it."""
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    if isinstance(leaf, Tensor) and not leaf.requires_grad:
        return leaf.detach()  # `requires_grad_()` of the step would stay, too
    return leaf


def batch_signature(batch: Any) -> str:
    """Returns shapes, dtypes and structure of a batch: batches of equal signature share one graph.

    Values of numbers and strings do not count, booleans and None do, as they steer control flow.

    Example:
        >>> import torch
        >>> batch_signature({"x": torch.zeros(2, 3), "captions": ["a", "b"], "null": None})
        "{'captions': [str, str], 'null': None, 'x': float32[2, 3]}"
    """
    if isinstance(batch, Tensor):
        order = "" if batch.is_contiguous() else f" strides {tuple(batch.stride())}"
        return f"{str(batch.dtype).removeprefix('torch.')}{list(batch.shape)}{order}"
    if isinstance(batch, dict):
        items = sorted(batch.items(), key=lambda item: str(item[0]))
        return "{" + ", ".join(f"{k!r}: {batch_signature(v)}" for k, v in items) + "}"
    if isinstance(batch, list | tuple):
        return "[" + ", ".join(map(batch_signature, batch)) + "]"
    if isinstance(batch, np.ndarray):
        return f"array {batch.dtype}{list(batch.shape)}"
    if batch is None or isinstance(batch, bool):
        return repr(batch)
    name = type(batch).__name__
    if type(batch) not in pytree.SUPPORTED_NODES:
        return name
    children, _ = pytree.SUPPORTED_NODES[type(batch)].flatten_fn(batch)
    return f"{name}({', '.join(map(batch_signature, children))})"


def loss_of(out: Any) -> Tensor:
    """Returns the loss that a step returned; raises GraphError if it is missing, no scalar, or without graph."""
    loss = out.get("loss") if isinstance(out, Mapping) else out
    if not isinstance(loss, Tensor):
        raise GraphError(
            f'the step returned {type(out).__name__}; return the loss, or a dict with the key "loss" '
            "(a step that skips batches by returning None cannot run as a pipeline)"
        )
    if loss.numel() != 1:
        raise GraphError(f"the loss has shape {tuple(loss.shape)}; return a scalar, e.g. its mean")
    return loss


def weight_of(out: Any) -> Tensor | float | None:
    """Reads the weight of a microbatch's loss, if the step says it: `{"loss": loss, "weight": num_tokens}`.

    Raises:
        GraphError: It is no number.
    """
    weight = out.get("weight") if isinstance(out, Mapping) else None
    if isinstance(weight, Tensor) and weight.numel() == 1:
        return weight.detach().reshape(())
    if weight is None or (isinstance(weight, Real) and not isinstance(weight, bool)):
        return None if weight is None else float(weight)
    shown = f"shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else f"{weight!r}"
    raise GraphError(
        f'the step returned a "weight" of {shown} besides the loss; return one number that says how much the loss '
        "of a microbatch counts, such as the number of tokens it is a mean over"
    )


@dataclass(frozen=True)
class LoggedMetric:
    """A logged metric object of torchmetrics, and its value for the batch; None if it was updated only."""

    attribute: str
    value: Tensor | None


def logged_values(root: nn.Module, logged: Any) -> Any:
    """Returns arguments of a logging call that outlive the step: without graphs, metric objects as `LoggedMetric`.

    Raises:
        ConfigurationError: A metric object is no attribute of the module, so that other ranks cannot find theirs.
    """

    def detached(leaf: Any) -> Any:
        if isinstance(leaf, nn.ModuleDict):  # a collection of them
            # Of metrics that share a state each would get a copy of it.
            shares = {"copy_state": False} if getattr(leaf, "_enable_compute_groups", False) else {}
            return {name: detached(metric) for name, metric in leaf.items(**shares)}
        if isinstance(leaf, Tensor):
            return leaf.detach()
        if not isinstance(leaf, nn.Module) or not hasattr(leaf, "_forward_cache"):
            return leaf  # no metric object of torchmetrics, which nobody needs to have installed
        attribute = next((name for name, module in root.named_modules() if module is leaf), None)
        if attribute is None:
            raise ConfigurationError(
                f"self.log was given a {type(leaf).__name__} that is no attribute of the module, so that other "
                "ranks cannot find theirs. Assign it to self in __init__, and log that"
            )
        value = leaf._forward_cache
        return LoggedMetric(attribute, None if value is None else value.detach())

    return pytree.tree_map(detached, logged)
