"""Gradients of parameters, each in memory of its own.

Autograd gives a parameter its first gradient without a copy, if nobody else holds that tensor, and adds all later
ones to it in place. But a tensor that nobody else holds may be a view of memory that somebody does hold:

    rows[None] + columns[None]           both first gradients are views of one tensor, and every later one
                                         would be added to both
    x.view(1, h, w, d) + positions       the gradient of x goes to the stage before, and may still be on its
                                         way when the next microbatch adds to that of the positions
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor


@contextlib.contextmanager
def in_own_memory(
    parameters: Iterable[Tensor], others: Callable[[], Sequence[Tensor | None]]
) -> Iterator[None]:
    """Runs a backward inside; copies first gradients that share memory afterwards.

    Args:
        parameters: Get gradients inside.
        others: Asked afterwards for tensors that must not change with a gradient.
    """
    first = [parameter for parameter in parameters if parameter.grad is None]
    yield
    taken = set(map(_memory, others())) if first else set()
    for parameter in first:
        if parameter.grad is None:
            continue
        memory = _memory(parameter.grad)
        if memory is not None and memory in taken:
            parameter.grad = parameter.grad.clone()
        taken.add(memory)


def _memory(tensor: Tensor | None) -> int | None:
    """Returns where a tensor lies; None if not in one piece of memory."""
    if tensor is None or tensor.layout != torch.strided:
        return None
    return tensor.untyped_storage().data_ptr()
