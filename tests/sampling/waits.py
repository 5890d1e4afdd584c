"""Finds where a denoising loop would wait for a device, on a machine that has none.

Parameters, latents and timesteps count as the device's, and so does all that is computed from them. A copy by
`Tensor.cpu` is the host's. Tables that schedulers make are the host's, as they are on a GPU.
"""

from __future__ import annotations

import copy
import threading
from collections import Counter

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_diffpipe.sampling.request import Request

WAITS = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2"}
"""Operators whose results the host waits for: `item`, `bool`, comparisons, and shapes made of values."""


class _OfThread(threading.local):
    waits: Waits | None = None


_OF_THREAD = _OfThread()


class Waits(TorchDispatchMode):
    """Counts what reads values of the device, by operator, as often as a step has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()
        self.ends: list[Counter[str]] = []

    def __enter__(self):
        _OF_THREAD.waits = self
        return super().__enter__()

    def __exit__(self, *error):
        _OF_THREAD.waits = None
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        out = func(*args, **(kwargs or {}))
        if any(map(of_device, given)):
            name = func._schema.name.removeprefix("aten::")
            masks = name in ("index", "index_put_") and any(x.dtype == torch.bool for x in given)
            if name in WAITS or masks:
                self.counted[name] += 1
            pytree.tree_map_only(Tensor, on_device, out)
        return out

    def end_step(self, step: int) -> None:
        self.ends.append(self.counted.copy())

    def after(self, num_steps: int) -> Counter[str]:
        return self.ends[-1] - self.ends[num_steps - 1]


def of_device(x: Tensor) -> bool:
    return getattr(x, "is_of_device", False)


def on_device(x: Tensor) -> Tensor:
    x.is_of_device = True
    return x


def request_on_device(request: Request) -> Request:
    """Puts what a request brings to a GPU on the device."""
    for x in (*request.model.parameters(), *request.model.buffers(), request.latents):
        on_device(x)
    request.scheduler = copy.deepcopy(request.scheduler)
    request.timesteps = on_device(request.timesteps.clone())
    request.scheduler.timesteps = request.timesteps
    return request


def copies_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets `Tensor.cpu` and `to("cpu")` copy, and counts them as waits of this thread, `tolist` and `numpy` too.

    History: copies of rank 1's first step counted as waits of rank 0, where that was a step ahead.
    """

    def count(x: Tensor, name: str) -> None:
        if of_device(x) and _OF_THREAD.waits is not None:
            _OF_THREAD.waits.counted[name] += 1

    def counting(name: str):
        read = getattr(Tensor, name)

        def count_and_read(x: Tensor, *args, **options):
            count(x, name)
            return read(x, *args, **options)

        return count_and_read

    def cpu(x: Tensor) -> Tensor:
        count(x, "cpu")
        copied = x.clone()
        copied.is_of_device = False
        return copied

    to = Tensor.to
    monkeypatch.setattr(Tensor, "cpu", cpu)
    monkeypatch.setattr(
        Tensor,
        "to",
        lambda x, *args, **options: cpu(x) if args == ("cpu",) else to(x, *args, **options),
    )
    for name in ("tolist", "numpy"):
        monkeypatch.setattr(Tensor, name, counting(name))
