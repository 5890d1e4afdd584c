"""What each block costs on this machine, for splitting blocks over ranks."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from lightning_diffpipe.graph.calltree import Forward, forward_replaced
from lightning_diffpipe.sampling.layout import Layout
from lightning_diffpipe.sampling.request import Request


def measured_costs(layout: Layout, request: Request, repeats: int = 2) -> list[float]:
    """Seconds of each block in one call of `denoise`, in the order of `layout.block_names`.

    Blocks of one kind, told by their arithmetic, get the median of all of them, so that noise does not decide
    about the split. What the last block is followed by until the prediction is out is added to it.

    Args:
        layout: Of the model.
        request: Nothing in it is changed.
        repeats: Timed runs; one more is not timed.
    """
    runs = [_timed(layout, request) for _ in range(repeats + 1)][1:]
    by_kind: dict[int, list[float]] = {}
    for times, _ in runs:
        for block, seconds in zip(layout.blocks, times, strict=True):
            by_kind.setdefault(block.flops, []).append(seconds)
    total = dict.fromkeys(layout.block_names, 0.0)
    for block in layout.blocks:
        total[block.name] += statistics.median(by_kind[block.flops])
    costs = list(total.values())
    costs[-1] += statistics.median(end for _, end in runs)
    return costs


def _timed(layout: Layout, request: Request) -> tuple[list[float], float]:
    """Seconds of each call of a block, and of what comes behind the last."""
    names, times, inside, end_s = set(layout.block_names), [], False, 0.0
    device = request.latents.device

    def make(name: str, forward: Forward) -> Forward:
        def timed(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside, end_s
            if inside:
                return forward(*args, **kwargs)
            inside = True
            start_s = _now(device)
            try:
                return forward(*args, **kwargs)
            finally:
                end_s, inside = _now(device), False
                times.append(end_s - start_s)

        return timed

    with torch.inference_mode(), forward_replaced(request.model, names, make):
        request.denoise(request.latents, request.timesteps[0])
    return times, _now(device) - end_s


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
