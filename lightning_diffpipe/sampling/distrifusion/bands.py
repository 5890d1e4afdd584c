"""Bands: which rows of the latents each rank computes, and which of its neighbours a kernel reads.

rows 0-3 | band 0        Every tensor that grows with the rows is cut in the same shares: latents,
rows 4-7 | band 1        activations of every resolution, tokens of the image. A band is a whole number
rows 8-9 | band 2        of *units*, the rows that the model's strides and patches take together.

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

from lightning_diffpipe.errors import ConfigurationError, GraphError

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


@dataclass(frozen=True)
class Bands:
    """The rows of all ranks, seen from one of them.

    Attributes:
        rows: Rows of each band of the latents, from the top.
        rank: Whose view this is.

    Example:
        >>> bands = Bands.split(32, 3, unit=4, rank=1)
        >>> bands.rows, bands.start, bands.part_of(8), bands.resized(6, 2)
        ((12, 12, 8), 12, (3, 3), 4)
    """

    rows: tuple[int, ...]
    rank: int

    @classmethod
    def split(cls, num_rows: int, num_bands: int, unit: int, rank: int) -> Bands:
        """Cuts rows into balanced bands of whole units, larger first; else raises ConfigurationError."""
        units, rest = divmod(num_rows, unit)
        if rest:
            raise ConfigurationError(
                f"the latents have {num_rows} rows, but strides and patches of this model take {unit} rows "
                f"together: choose a height of {units * unit or unit} or {(units + 1) * unit} rows"
            )
        if units < num_bands:
            raise ConfigurationError(
                f"{num_bands} bands, but the {num_rows} rows of the latents are {units} units of {unit} "
                f"rows, which this model takes together: use at most {units} ranks, or at least "
                f"{num_bands * unit} rows"
            )
        sizes = [units // num_bands + (band < units % num_bands) for band in range(num_bands)]
        return cls(tuple(unit * size for size in sizes), rank)

    @property
    def num_bands(self) -> int:
        """Number of bands, one for each rank."""
        return len(self.rows)

    @property
    def num_rows(self) -> int:
        """Rows of the latents."""
        return sum(self.rows)

    @property
    def size(self) -> int:
        """Rows of this rank's band."""
        return self.rows[self.rank]

    @property
    def start(self) -> int:
        """First row of this rank's band."""
        return sum(self.rows[: self.rank])

    @property
    def peers(self) -> list[int]:
        """All other ranks."""
        return [rank for rank in range(self.num_bands) if rank != self.rank]

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of all rows that each band has."""
        return tuple(rows / self.num_rows for rows in self.rows)

    def part_of(self, size: int) -> tuple[int, int]:
        """Returns the start and length of this band on a whole axis that grows with the rows."""
        return size * self.start // self.num_rows, size * self.size // self.num_rows

    def resized(self, size: int, rank: int) -> int:
        """Returns the length on another rank of an axis that has `size` on this one."""
        return size * self.rows[rank] // self.size


def refuse(func: Any) -> None:
    """Raises GraphError for functions that are known to mix rows."""
    if func in _WITHOUT_RULE:
        raise unsupported(func.__name__)


def input_first(
    args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Returns the arguments of a function with its first one by position, whatever its name is.

    Example:
        >>> input_first((), {"input": 1, "weight": 2})
        ((1,), {'weight': 2})
    """
    name = next((name for name in ("input", "query") if name in kwargs), None)
    if args or name is None:
        return args, kwargs
    return (kwargs[name],), {key: value for key, value in kwargs.items() if key != name}


def unsupported(what: str) -> GraphError:
    """Returns the error for an operator that bands cannot compute."""
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
    def below(self) -> int:
        """Inputs read after a band; negative if some of its own are not."""
        return self.reach - self.padding - self.stride + 1

    def outputs(self, size: int) -> int:
        """Outputs for so many inputs."""
        return (size + 2 * self.padding - self.reach - 1) // self.stride + 1

    def halo(self, rows: int) -> tuple[int, int]:
        """Returns the rows that a band needs from above and below; raises GraphError for bands of too few rows."""
        if rows % self.stride:
            raise unsupported(f"a convolution of stride {self.stride} on a band of {rows} rows")
        if self.padding and self.below < 0:
            raise unsupported("a convolution that leaves rows out at the lower border")
        if not self.padding and self.below > 0:
            raise unsupported("a convolution without padding, which makes the image smaller,")
        return self.padding, max(self.below, 0)


def windows_of(
    weight: Tensor, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, *_: Any
) -> tuple[Window, Window]:
    """Returns the windows on rows and columns of a convolution with these arguments after its input."""

    def pair(value: Any) -> Sequence[int]:
        return (value, value) if isinstance(value, int) else (value[0], value[-1])

    reaches = [d * (k - 1) for k, d in zip(weight.shape[-2:], pair(dilation), strict=True)]
    if isinstance(padding, str):
        padding = [r // 2 if padding == "same" else 0 for r in reaches]
    sizes = zip(reaches, pair(stride), pair(padding), strict=True)
    rows, columns = (Window(*each) for each in sizes)
    return rows, columns
