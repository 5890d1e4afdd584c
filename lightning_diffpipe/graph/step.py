"""A training step seen from outside: what goes in, and what comes out.

In goes a batch, each time as if the step ran for the first time. In one process a step runs once on its batch, and
may do with it what it likes: put `batch["image"] * 2 - 1` in place of the image, take the captions out, write into
a tensor. A pipeline runs it on one microbatch again and again, for every stage and every frozen part, and before
that to probe it. So each run gets containers of its own, and copies of those tensors that the probe saw written;
all others are shared, as copies would cost memory.

Out come a loss, maybe a weight beside it, and what `self.log` was given.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import torch.utils._pytree as pytree
from torch import Tensor, nn

from lightning_diffpipe.errors import ConfigurationError, GraphError

Step = Callable[[Any, Any], Any]
"""`step(module, batch)` returns the loss, or a mapping with the key "loss"."""


@dataclass(frozen=True)
class StepCall:
    """A step on one batch, to be run any number of times.

    Attributes:
        step: Module, batch and further arguments to loss.
        module: What it is run on.
        batch: Stays as it is.
        arguments: Further arguments.
        written: Tensors of the batch that the step writes in place; see `LayerGraph.batch_writes`.
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

    Args:
        batch: A batch.
        written: Places of tensors that will be written in place, as `pytree.keystr` tells them.

    Example:
        >>> batch = {"caption": ["a", "b"], "scale": 2.0}
        >>> fresh(batch).pop("caption"), batch
        (['a', 'b'], {'caption': ['a', 'b'], 'scale': 2.0})
    """
    if not written:
        return pytree.tree_map(_alias, batch)
    return pytree.tree_map_with_path(
        lambda path, leaf: leaf.clone() if pytree.keystr(path) in written else _alias(leaf), batch
    )


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
    """Returns the loss among what a step returned.

    Raises:
        GraphError: There is none, it is no scalar, or no gradient can flow from it.
    """
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
    found = f"shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else f"{weight!r}"
    raise GraphError(
        f'the step returned a "weight" of {found} beside the loss; return one number, which says how much the loss '
        "of a microbatch counts, such as the number of tokens it is a mean over"
    )


@dataclass(frozen=True)
class LoggedMetric:
    """A metric object of torchmetrics among what is logged, as it is at that moment.

    Attributes:
        attribute: Where the module has it.
        value: What it gave for the batch; None if it was updated only.
    """

    attribute: str
    value: Tensor | None


def logged_values(root: nn.Module, logged: Any) -> Any:
    """Returns arguments of a logging call that outlive the step: without graphs, metric objects as `LoggedMetric`.

    Raises:
        ConfigurationError: A metric object is no attribute of the module, so that other ranks cannot find theirs.
    """

    def detached(leaf: Any) -> Any:
        if isinstance(leaf, nn.ModuleDict):  # a collection of them
            return {name: detached(metric) for name, metric in leaf.items()}
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
