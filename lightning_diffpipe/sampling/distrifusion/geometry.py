"""What a kernel sees on one axis, and which operators have no rule for bands.

Output j of a window reads inputs  j s - p  ...  j s - p + r,  with stride s, padding p, reach r = d (k - 1):

    band of rows            |  0  1  2  3  |         k = 3, s = 1, p = 1
    reads               -1  |  0  1  2  3  |  4      above = p = 1, below = r - p - s + 1 = 1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_diffpipe.errors import GraphError

_WITHOUT_RULE = {
    F.conv_transpose2d,
    F.conv3d,
    F.max_pool2d,
    F.adaptive_avg_pool2d,
    F.adaptive_max_pool2d,
    F.instance_norm,
    F.batch_norm,
    F.grid_sample,
    F.unfold,
    F.fold,
    torch.roll,
}


def refuse(func: Any) -> None:
    """Refuses functions that are known to mix rows.

    Raises:
        GraphError: It is one.
    """
    if func in _WITHOUT_RULE:
        raise unsupported(func.__name__)


def input_first(
    args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Arguments of a function with its first one by position, by whatever name torch gives it.

    Example:
        >>> input_first((), {"input": 1, "weight": 2})
        ((1,), {'weight': 2})
    """
    name = next((name for name in ("input", "query") if name in kwargs), None)
    if args or name is None:
        return args, kwargs
    return (kwargs[name],), {key: value for key, value in kwargs.items() if key != name}


def unsupported(what: str) -> GraphError:
    """The error for an operator that bands cannot compute."""
    return GraphError(
        f"{what} mixes rows of the latents, and there is no rule for it on bands of rows; sample this model "
        "with PipeFusion, sequence parallelism or one process"
    )


@dataclass(frozen=True)
class Window:
    """A kernel on one axis.

    Attributes:
        reach: Inputs from the first to the last one a kernel reads, less one.
        stride: Inputs from one output to the next.
        padding: Zeros before and after the axis.
    """

    reach: int
    stride: int
    padding: int

    @property
    def is_patch(self) -> bool:
        """Every input is read once: nothing is seen beyond a band of whole patches."""
        return self.padding == 0 and self.reach == self.stride - 1

    @property
    def above(self) -> int:
        """Inputs read before a band."""
        return self.padding

    @property
    def below(self) -> int:
        """Inputs read after a band; negative if some of its own are not."""
        return self.reach - self.padding - self.stride + 1

    def outputs(self, size: int) -> int:
        """Outputs for so many inputs."""
        return (size + 2 * self.padding - self.reach - 1) // self.stride + 1

    def halo(self, rows: int) -> tuple[int, int]:
        """Rows a band needs of its neighbours, above and below.

        Raises:
            GraphError: The window does not fit bands of so many rows.
        """
        if rows % self.stride:
            raise unsupported(f"a convolution of stride {self.stride} on a band of {rows} rows")
        if self.padding and self.below < 0:
            raise unsupported("a convolution that leaves rows out at the lower border")
        if not self.padding and self.below > 0:
            raise unsupported("a convolution without padding, which makes the picture smaller,")
        return self.above, max(self.below, 0)


def windows_of(weight: Tensor, stride: Any, padding: Any, dilation: Any) -> tuple[Window, Window]:
    """The windows of a convolution on rows and columns."""
    strides, dilations = _pair(stride), _pair(dilation)
    reaches = [d * (k - 1) for k, d in zip(weight.shape[-2:], dilations, strict=True)]
    if isinstance(padding, str):
        paddings = [r // 2 if padding == "same" else 0 for r in reaches]
    else:
        paddings = list(_pair(padding))
    rows, columns = (Window(*v) for v in zip(reaches, strides, paddings, strict=True))
    return rows, columns


def _pair(value: Any) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    return (value[0], value[-1])
