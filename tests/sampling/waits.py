"""Finds where a denoising loop would wait for a device, on a machine that has none.

Parameters, latents and timesteps count as the device's, and so does all that is computed from them or made on their
device, which says that it is `cpu:1`. A copy to any other device is the host's. Tables that schedulers make are the
host's, as they are on a GPU.
"""

from __future__ import annotations

import copy
from collections import Counter

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_diffpipe.sampling.request import Request

DEVICE = torch.device("cpu:1")
"""The device, by name: torch takes it for the CPU."""

WAITS = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2"}
"""Operators whose results the host waits for: `item`, `bool`, comparisons, and shapes made of values."""


class Waits(TorchDispatchMode):
    """Counts what reads values of the device, by operator, as often as a step has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()
        self.ends: list[Counter[str]] = []
        self._copies = _Copies(self.counted)

    def __enter__(self):
        self._copies.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        return self._copies.__exit__(*error)

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


class _Copies(TorchFunctionMode):
    """Counts copies to the host as waits, and says where tensors are: on a CPU no operator of torch copies them."""

    def __init__(self, counted: Counter[str]) -> None:
        super().__init__()
        self.counted = counted

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func == Tensor.device.__get__:
            return DEVICE if of_device(args[0]) else func(*args)
        if func in (Tensor.cpu, Tensor.to):
            target = torch.device("cpu") if func is Tensor.cpu else target_of(*args, **kwargs)
            if target == DEVICE:
                return on_device(func(*args, **kwargs).view_as(args[0]))
            if target is not None and of_device(args[0]):
                self.counted["cpu"] += 1
                out = func(*args, **kwargs).clone()
                out.is_of_device = False
                return out
        elif func in (Tensor.tolist, Tensor.numpy) and of_device(args[0]):
            self.counted[func.__name__] += 1
        out = func(*args, **kwargs)
        return on_device(out) if kwargs.get("device") == DEVICE else out


def target_of(x: Tensor, *args, **kwargs) -> torch.device | None:
    """Returns where `x.to(...)` puts a tensor; None for where it is."""
    targets = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
    if targets:
        return DEVICE if of_device(targets[0]) else targets[0].device
    kwargs.pop("copy", None)
    device, *_ = torch._C._nn._parse_to(*args, **kwargs)
    return device


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
