"""Layers that take their time without using a core, so that eight ranks can be emulated on two."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

_TIMER_S = 1.5e-4  # sleeping takes about this much longer than asked for


def nap(seconds: float) -> None:
    """Sleeps, the last moment awake, so that it takes as long as it should."""
    until_s = time.perf_counter() + seconds
    time.sleep(max(seconds - _TIMER_S, 0.0))
    while time.perf_counter() < until_s:
        pass


class Nap(torch.autograd.Function):
    """Sleeps in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:  # type: ignore[override]
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        nap(ctx.seconds)
        return gradient, None


class Sleeper(nn.Module):
    """A layer with a weight that takes its time for each sample.

    Args:
        forward_s: Seconds a sample.
        backward_s: Seconds a sample; None for a frozen layer.
        rows: Of its weight. The profiler evens the times of layers whose weights have the same shape.
        weight_s: Seconds a sample of its weight gradient, besides those of its backward.
    """

    def __init__(
        self, forward_s: float, backward_s: float | None, rows: int = 1, weight_s: float = 0.0
    ) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(rows, 4), requires_grad=backward_s is not None)
        self.forward_s, self.backward_s, self.weight_s = forward_s, backward_s, weight_s

    def forward(self, x: Tensor) -> Tensor:
        nap(self.forward_s * len(x))
        scale = Nap.apply(self.scale, self.weight_s * len(x)) if self.weight_s else self.scale
        y = x * scale.mean(0)
        return y if self.backward_s is None else Nap.apply(y, self.backward_s * len(x))
