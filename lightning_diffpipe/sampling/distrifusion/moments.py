"""Group norm over bands: mean and variance of the whole image from those of the bands.

With biased variances the law of total variance is a sum of positive terms, so nothing cancels, and no rule
that first estimates the moments of each band can give a negative variance:

    mean = sum_j share_j mean_j        variance = sum_j share_j (variance_j + (mean_j - mean)^2)

What a displaced step knows: its own band now, and every band one and two steps ago. The rules differ in what
they make of the other bands j, seen from band i; d is a change from one step to the next:

    synchronous   wait for their moments of now                        exact
    stale         as they were one step ago                            moments_j(t-1)
    separate      ignore them: the image is this band
    corrected     the whole image changed as much as this band       moments(t-1) + d_i(t)
    predicted     they go on as they did, at this band's pace g,       moments_j(t-1) + g d_j(t-1)
                  and share l_j of what surprised this band              + l_j (d_i(t) - g d_i(t-1))

                  g   = <d_i(t), d_i(t-1)> / |d_i(t-1)|^2     within [0, 1.5]
                  l_j = <d_j(t-1), d_i(t-1)> / |d_i(t-1)|^2   within [0, 1]

"Corrected" is right about changes that all bands share, as those that come with the time step; two bands share
most. With eight small bands each has changes of its own, the guess adds noise, and its variance, a difference,
can be negative (the band's own is then taken, as in the original). "Predicted" measures both: how steadily
statistics move along the path of the sampler, and how much of a change bands have in common. Means are predicted,
and logarithms of variances, so that these stay positive; g and l_j are one number for each sample and layer,
from all groups, so that a group that hardly moved decides nothing; a variance changes by at most a factor of
two. In the first displaced step, without two steps of history, changes are taken to be shared: g = 0, l_j = 1.

Source:
    DistriFusion, Li et al. (2024), https://arxiv.org/abs/2402.19481, section 4.3: the corrected rule
"""

import functools
import math
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

GroupNormRule = Literal["predicted", "corrected", "stale", "separate", "synchronous"]

_TINY = 1e-12  # of the square of a change
_LEAST_VARIANCE = 1e-20  # added, so that its logarithm is finite, and never taken off
_LARGEST_PACE = 1.5
_LARGEST_LOG_CHANGE = 0.7


def moments_of(x: Tensor, num_groups: int) -> Tensor:
    """Returns biased variance and mean of a band `(samples, channels, ...)`, `(2, samples, groups)`.

    They are computed in at least float32.
    """
    return torch.stack(torch.var_mean(_grouped(x, num_groups), -1, correction=0))


def combined(bands: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """Returns the moments of the whole image, in float64, from those of its bands and the share of each."""
    return _of_image(torch.stack(list(bands), 1).double(), shares)


def stale(before: Sequence[Tensor], now: Tensor, band: int, shares: Sequence[float]) -> Tensor:
    """Returns moments of the whole image if other bands are as one step ago, in `before`; `now` is of this band."""
    return combined([*before[:band], now, *before[band + 1 :]], shares)


def corrected(
    before: Sequence[Tensor], now: Tensor, band: int, shares: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Returns moments of the whole image as if it had changed as much as this band did.

    Returns:
        Its moments, and how often the variance was negative and the band's own was taken.
    """
    values = torch.stack([*before, now], 1).double()
    moments = _of_image(values, shares, band)
    negative = moments[0] < 0
    torch.where(negative, values[0, -1], moments[0], out=moments[0])
    return moments, negative.sum()


def predicted(
    before: Sequence[Tensor],
    earlier: Sequence[Tensor] | None,
    now: Tensor,
    band: int,
    shares: Sequence[float],
) -> Tensor:
    """Lets other bands go on as they did since `earlier`, two steps ago, and share what surprised this band.

    Returns:
        Moments of the whole image.
    """
    # Of all bands one step ago, and of this one now; then the same one step earlier.
    rows = [*before, now, *(() if earlier is None else (*earlier, before[band]))]
    num_bands = len(before)
    least, log_range, shared_range, tiny = _constants(num_bands, band, now.shape[-1], now.device)
    values = torch.stack(rows, 1) + least
    values[0].log_()
    old = values[:, :num_bands]
    if earlier is None:
        change = (values[:, num_bands] - old[:, band])[:, None].expand_as(old)
    else:
        changes = values[:, : num_bands + 1] - values[:, num_bands + 1 :]
        products = torch.addcmul(tiny, changes, changes[:, band, None]).sum(-1, keepdim=True)
        shared = (products / products[:, band, None]).clamp_(*shared_range)
        change = changes * shared[:, -1:]  # at this band's pace
        surprise = changes[:, -1] - change[:, band]
        change = change.addcmul_(shared, surprise[:, None])[:, :-1]
    next_values = old + change.clamp(*log_range)
    next_values[0].exp_()
    return _of_image(next_values, shares)


def _of_image(values: Tensor, shares: Sequence[float], band: int | None = None) -> Tensor:
    """Returns `(2, samples, groups)` of the whole image from `(2, bands, samples, groups)`.

    With a band they are those that "corrected" takes; after all bands one step ago `values` has this one now.
    """
    forms = _linear_forms(tuple(shares), band, values.device).expand(2, -1, -1)
    out = forms.bmm(values.flatten(2))
    left, right = out[1, 1:].chunk(2)
    out[0, 0, :, None, None].baddbmm_(left.T[:, None], right.T[..., None])
    return out[:, 0].unflatten(-1, values.shape[2:])


@functools.cache
@torch.inference_mode(False)
def _linear_forms(shares: tuple[float, ...], band: int | None, device: torch.device) -> Tensor:
    """Returns `(1 + 2 k, bands)`: a sum of bands, and k pairs whose products of means add to that of variances.

    "Corrected" adds the change d of this band to the moments of the image, whose variance then is
    variance + d(variance) - 2 (mean - mean_band) d(mean). Copied to the device once, for which the host waits.
    """
    share = torch.tensor(shares, dtype=torch.float64)
    # Each from the mean of the image.
    deviations = torch.eye(len(shares), dtype=torch.float64) - share
    total, left, right = share[None], share[:, None] * deviations, deviations
    if band is not None:
        total, left, right = (F.pad(form, (0, 1)) for form in (total, left, right))
        change = torch.zeros_like(total)
        change[0, band], change[0, -1] = -1.0, 1.0
        left, right = torch.cat([left, 2 * right[band, None]]), torch.cat([right, change])
        total = total + change
    return torch.cat([total, left, right]).to(device)


@functools.cache
@torch.inference_mode(False)
def _constants(
    num_bands: int, band: int, num_groups: int, device: torch.device
) -> tuple[Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor]:
    """Returns what "predicted" adds to variances, bounds of changes and of shares, and what it adds to products.

    What this band does now is known, so that its change has no bounds. Copied to the device once.
    """
    wide = functools.partial(torch.zeros, dtype=torch.float64)
    least, tiny, most = wide(2, 1, 1, 1), wide(num_bands + 1, 1, 1), wide(num_bands + 1, 1, 1) + 1.0
    least[0], tiny[band], most[-1] = _LEAST_VARIANCE, _TINY / num_groups, _LARGEST_PACE
    log = wide(2, num_bands, 1, 1) + math.inf
    log[0], log[0, band] = _LARGEST_LOG_CHANGE, math.inf
    least, tiny, most, log = (constant.to(device) for constant in (least, tiny, most, log))
    return least, (-log, log), (torch.zeros_like(most), most), tiny


def normalised(
    x: Tensor,
    num_groups: int,
    moments: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """Normalises groups with given moments, computed in at least float32."""
    flat = _grouped(x, num_groups)
    # As a batch norm whose channels are the groups of all samples.
    variance, mean = moments.to(flat.dtype).flatten(1)
    flat = flat.reshape(1, len(mean), -1)
    out, *_ = torch.native_batch_norm(flat, None, None, mean, variance, False, 0.0, eps)
    out = out.reshape(x.shape)
    affine = [
        p.to(flat.dtype).view(-1, *[1] * (x.ndim - 2)) for p in (bias, weight) if p is not None
    ]
    if len(affine) == 2:
        out = torch.addcmul(affine[0], out, affine[1])
    elif affine:
        out = out + affine[0] if weight is None else out * affine[0]
    return out.to(x.dtype)


def _grouped(x: Tensor, num_groups: int) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.to(wide).reshape(x.shape[0], num_groups, -1)
