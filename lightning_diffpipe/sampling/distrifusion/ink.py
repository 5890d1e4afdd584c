"""Marking rows with NaN and watching how far they get: one run of the model, in which nothing mixes rows.

NaN survives arithmetic, so what is NaN after a function has been reached by what was NaN before it.
Operators that mix rows, and for which bands have a rule, are replaced by stand-ins of the same shapes that do
not. A mark then stays in its rows; if it does not, the model mixes rows in a way that no rule knows.

    operator                 stand-in
    attention                the query
    group norm               its input
    convolution              the pixel under the centre of the kernel, averaged over channels

Reading: `tracing.py` follows single tokens through blocks of a transformer with the same ink.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_diffpipe.sampling.distrifusion.geometry import (
    Window,
    input_first,
    refuse,
    windows_of,
)

_VIEWS = {"__getitem__", "narrow", "split", "chunk", "unbind", "select", "index_select", "__get__"}


@dataclass
class Marks:
    """What one run has shown.

    Attributes:
        keys: For each attention call, which positions of the keys are marked.
        unreached: Linear layers, by their position among linear layers, whose input has tokens and no mark.
        units: Rows of the latents for one row after each convolution.
        spreader: The first function that had marked and clean rows before it and none clean after it.
        num_untouched: Linear layers before the first attention that tells texts of the image, which its
            stand-in does not: after it, what is not marked may depend on the image all the same.
    """

    keys: list[Tensor] = field(default_factory=list)
    unreached: list[int] = field(default_factory=list)
    units: list[float] = field(default_factory=list)
    spreader: str | None = None
    num_untouched: int | None = None


class Ink(TorchFunctionMode):
    """Lets the model run with stand-ins, and takes notes.

    Args:
        num_rows: Of the latents.
        name_spreaders: Look at every function's output for marks everywhere; slow.
    """

    def __init__(self, num_rows: int, name_spreaders: bool = False) -> None:
        super().__init__()
        self.marks, self._num_rows, self._name = Marks(), num_rows, name_spreaders
        self.num_exchanging = 0
        self._num_linear = 0
        self._rules: dict[Any, Callable[..., Tensor]] = {
            torch.conv2d: self._conv2d,
            F.group_norm: self._group_norm,
            F.scaled_dot_product_attention: self._attention,
            F.linear: self._linear,
        }

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Calls the stand-in, or the function as it is."""
        kwargs = kwargs or {}
        refuse(func)
        rule = self._rules.get(func)
        if rule is not None:
            args, kwargs = input_first(args, kwargs)
        out = (rule or func)(*args, **kwargs)
        if self._name and self.marks.spreader is None and func not in self._rules:
            self._watch(func, (args, kwargs), out)
        return out

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        self.num_exchanging += 1
        keys = key.isnan().any(-1).flatten(0, -2).any(0)
        self.marks.keys.append(keys)
        if self.marks.num_untouched is None and keys.any() and not query.isnan().any(-1).all():
            self.marks.num_untouched = self._num_linear
        size = value.shape[-1]
        return (
            query
            if query.shape[-1] == size
            else query.mean(-1, keepdim=True).expand(*query.shape[:-1], size)
        )

    def _group_norm(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.num_exchanging += 1
        return x.clone()

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.ndim >= 3 and not x.isnan().any():
            self.marks.unreached.append(self._num_linear)
        self._num_linear += 1
        return F.linear(x, weight, bias)

    def _conv2d(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        rows, columns = windows_of(weight, stride, padding, dilation)
        if not rows.is_patch:
            self.num_exchanging += 1
        picked = x[..., _centres(rows, x.shape[-2], x.device), :]
        picked = picked[..., _centres(columns, x.shape[-1], x.device)]
        self.marks.units.append(self._num_rows / picked.shape[-2])
        mixed = picked.mean(-3, keepdim=True)
        return mixed.repeat(*[1] * (x.ndim - 3), weight.shape[0], 1, 1)

    def _watch(self, func: Any, inputs: Any, out: Any) -> None:
        name = getattr(func, "__name__", str(func))
        outputs = [x for x in pytree.tree_leaves(out) if _is_float(x) and x.numel() > 1]
        if name in _VIEWS or not outputs or not all(x.isnan().all() for x in outputs):
            return
        marked = [x.isnan() for x in pytree.tree_leaves(inputs) if _is_float(x)]
        if marked and not any(bool(x.all()) for x in marked) and any(bool(x.any()) for x in marked):
            self.marks.spreader = name


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _centres(window: Window, size: int, device: torch.device) -> Tensor:
    """The input index under the centre of the kernel, for every output index."""
    first = (window.reach // 2) - window.padding
    return (torch.arange(window.outputs(size), device=device) * window.stride + first).clamp(
        0, size - 1
    )


def lines(x: Tensor, axis: int) -> Tensor:
    """Which indices of an axis hold a mark anywhere."""
    return x.isnan().movedim(axis, 0).flatten(1).any(1)
