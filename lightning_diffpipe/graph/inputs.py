"""The batch as a step finds it: each time as if it ran for the first time.

In one process a step runs once on its batch, and may do with it what it likes: put `batch["image"] * 2 - 1` in
place of the image, take the captions out, write into a tensor. A pipeline runs it on one microbatch again and
again, for every stage and every frozen part, and before that to probe it. So each run gets containers of its own,
and copies of those tensors that the probe saw written; all others are shared, as copies would cost memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.utils._pytree as pytree
from torch import Tensor


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
