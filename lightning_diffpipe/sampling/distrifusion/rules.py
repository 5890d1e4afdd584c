"""What operators do on a band of rows: a table, function -> rule.

| seen beyond the band | function | rule |
|---|---|---|
| kernels wider than one row | `conv2d` | rows of the neighbours; zeros only outside the picture |
| asymmetric padding | `F.pad` | rows of the neighbours instead of zeros; the convolution after it adds none |
| the first convolution | `conv2d` | its rows are cut from the whole latents, which every rank has: no message |
| statistics of the picture | `F.group_norm` | moments of all bands (`moments.py`) |
| self- and joint attention | `F.scaled_dot_product_attention` | keys and values of all bands; texts are local |
| keys and values of texts | `F.linear` | computed once, for as long as its input stays the same |
| nearest up-sampling, pooling in patches | `F.interpolate`, `F.avg_pool2d` | local |
| square grids of tokens | `Tensor.reshape` | the grid of the band |

Everything else acts on rows or tokens one by one, which `facts.py` has seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_diffpipe.sampling.distrifusion.geometry import unsupported, windows_of
from lightning_diffpipe.sampling.distrifusion.moments import normalised

if TYPE_CHECKING:
    from lightning_diffpipe.sampling.distrifusion.band_call import BandCall

Rule = Callable[..., Tensor]
"""`rule(call, *args, **kwargs)` answers a function call of the model on a band."""


def convolution(
    call: BandCall,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """A convolution with rows of the neighbours around the band."""
    rows, columns = windows_of(weight, stride, padding, dilation)
    if x is not call.padded:  # explicit padding already brought the rows
        x = call.with_halo(x, *rows.halo(x.shape[-2]))
    return F.conv2d(x, weight, bias, stride, (0, columns.padding), dilation, groups)


def pad(
    call: BandCall,
    x: Tensor,
    pad: Sequence[int],
    mode: str = "constant",
    value: float | None = None,
) -> Tensor:
    """Padding of rows with rows of the neighbours."""
    if len(pad) < 4 or not any(pad[2:]) or x.ndim < 4:
        return F.pad(x, pad, mode, value)
    if x.ndim != 4 or len(pad) > 4 or mode != "constant" or value or min(pad) < 0:
        raise unsupported(f"F.pad({tuple(pad)}, mode={mode!r})")
    call.padded = F.pad(call.with_halo(x, pad[2], pad[3]), tuple(pad[:2]))
    return call.padded


def group_norm(
    call: BandCall,
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Group norm with the moments of the whole picture."""
    moments = call.moments_of(x, num_groups)
    if moments is None:
        return F.group_norm(x, num_groups, weight, bias, eps)
    return normalised(x, num_groups, moments, weight, bias, eps)


def attention(
    call: BandCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> Tensor:
    """Attention to the keys and values of all bands."""
    joint = call.next_keys(key)
    if joint is not None:
        if attn_mask is not None or is_causal:
            raise unsupported("attention of the image with a mask")
        key, value = call.with_all_bands(key, value, joint)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, **kwargs
    )


def linear(call: BandCall, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer; of texts, computed once."""
    return call.constant(x, lambda: F.linear(x, weight, bias))


def interpolate(call: BandCall, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Nearest up-sampling repeats rows, each by itself."""
    mode = kwargs.get("mode", args[2] if len(args) > 2 else "nearest")
    if mode != "nearest":
        raise unsupported(f"F.interpolate(mode={mode!r})")
    return F.interpolate(x, *args, **kwargs)


def average_pool(
    call: BandCall,
    x: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Pooling in patches sees nothing beyond a band of whole patches."""
    k, s, p = (
        v if isinstance(v, int) else v[0] for v in (kernel_size, stride or kernel_size, padding)
    )
    if k != s or p or x.shape[-2] % s:
        raise unsupported(
            f"average pooling of {k} rows with stride {s} on a band of {x.shape[-2]} rows"
        )
    return F.avg_pool2d(x, kernel_size, stride, padding, *args, **kwargs)


def reshape(call: BandCall, x: Tensor, *shape: Any, **kwargs: Any) -> Tensor:
    """Code that puts tokens back on a square grid (DiT's) gets the grid of the band.

    It reshapes (B, h w, ...) to (B, h, w, p, q, C), with h = w, and (B, C, h, p, w, q) to (B, C, h p, w q).
    """
    sizes = (
        list(kwargs.get("shape", shape[0] if len(shape) == 1 else shape)) if kwargs or shape else []
    )
    grid = call.grid
    if grid and len(sizes) == 6 and x.ndim == 3 and sizes[1] == sizes[2] != grid[0]:
        call.regridded = True
        return x.reshape(sizes[0], *grid, *sizes[3:])
    if call.regridded and len(sizes) == 4 and x.ndim == 6:
        call.regridded = False
        return x.reshape(-1, x.shape[1], x.shape[2] * x.shape[3], x.shape[4] * x.shape[5])
    return x.reshape(*shape, **kwargs)


RULES: dict[Callable[..., Any], Rule] = {
    torch.conv2d: convolution,
    F.pad: pad,
    F.group_norm: group_norm,
    F.scaled_dot_product_attention: attention,
    F.linear: linear,
    F.interpolate: interpolate,
    F.avg_pool2d: average_pool,
    torch.Tensor.reshape: reshape,
}
"""Open for registration: a rule gets the `BandCall` and what the model gave the function."""
