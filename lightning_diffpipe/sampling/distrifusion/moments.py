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

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

GroupNormRule = Literal["predicted", "corrected", "stale", "separate", "synchronous"]

_TINY = 1e-12
_LARGEST_PACE = 1.5
_LARGEST_LOG_CHANGE = 0.7


@dataclass
class Moments:
    """Biased variance and mean, `(samples, groups)` or `(bands, samples, groups)`, in float64."""

    variance: Tensor
    mean: Tensor

    @classmethod
    def of(cls, x: Tensor, num_groups: int) -> Moments:
        """Returns the moments of one band `(samples, channels, ...)`, computed in at least float32."""
        flat = _grouped(x, num_groups)
        variance, mean = torch.var_mean(flat, -1, correction=0)
        return cls(variance.double(), mean.double())

    def packed(self, dtype: torch.dtype) -> Tensor:
        """Returns one tensor that can be sent, `(2, ...)`."""
        return torch.stack([self.variance, self.mean]).to(dtype)

    @classmethod
    def unpacked(cls, tensors: Sequence[Tensor]) -> Moments:
        """Returns the moments of all bands, from what they sent."""
        stacked = torch.stack([tensor.double() for tensor in tensors])
        return cls(stacked[:, 0], stacked[:, 1])

    def combined(self, shares: Sequence[float]) -> Moments:
        """Returns the moments of the whole image, from those of the bands and what share of it each is."""
        # Filled on the device; a list would be copied there, for which the host waits.
        share = torch.stack([self.mean.new_full((1, 1), share) for share in shares])
        mean = (share * self.mean).sum(0)
        return Moments((share * (self.variance + (self.mean - mean) ** 2)).sum(0), mean)

    def with_band(self, band: int, own: Moments) -> Moments:
        """Returns a copy with other moments for one band."""
        variance, mean = self.variance.clone(), self.mean.clone()
        variance[band], mean[band] = own.variance, own.mean
        return Moments(variance, mean)

    def band(self, band: int) -> Moments:
        """Returns the moments of one band."""
        return Moments(self.variance[band], self.mean[band])


def stale(before: Moments, now: Moments, band: int, shares: Sequence[float]) -> Moments:
    """Returns moments of the whole image if other bands are as one step ago, in `before`; `now` is of this band."""
    return before.with_band(band, now).combined(shares)


def corrected(
    before: Moments, now: Moments, band: int, shares: Sequence[float]
) -> tuple[Moments, Tensor]:
    """Takes the whole image to have changed as much as this band did.

    Returns:
        Its moments, and how often the variance was negative and the band's own was taken.
    """
    whole, own = before.combined(shares), before.band(band)
    square = whole.variance + whole.mean**2
    square = square + (now.variance + now.mean**2) - (own.variance + own.mean**2)
    mean = whole.mean + now.mean - own.mean
    variance = square - mean**2
    negative = variance < 0
    return Moments(torch.where(negative, now.variance, variance), mean), negative.sum()


def predicted(
    before: Moments, earlier: Moments | None, now: Moments, band: int, shares: Sequence[float]
) -> Moments:
    """Lets other bands go on as they did since `earlier`, two steps ago, and share what surprised this band.

    Returns:
        Moments of the whole image.
    """
    last = None if earlier is None else before.mean - earlier.mean
    mean = before.mean + _next_change(now.mean - before.mean[band], last, band)
    old = _log(before)
    last = None if earlier is None else old - _log(earlier)
    change = _next_change(_log(now) - old[band], last, band)
    change = change.clamp(-_LARGEST_LOG_CHANGE, _LARGEST_LOG_CHANGE)
    return stale(Moments(before.variance * change.exp(), mean), now, band, shares)


def _next_change(own: Tensor, last: Tensor | None, band: int) -> Tensor:
    """Returns the change of all bands, from that of this band and the last of all, `(bands, samples, groups)`."""
    if last is None:
        return own
    own_last = last[band]
    size = own_last.square().sum(-1, keepdim=True).clamp_min(_TINY)
    pace = ((own * own_last).sum(-1, keepdim=True) / size).clamp(0.0, _LARGEST_PACE)
    shared = ((last * own_last).sum(-1, keepdim=True) / size).clamp(0.0, 1.0)
    return pace * last + shared * (own - pace * own_last)


def _log(moments: Moments) -> Tensor:
    return (moments.variance + _TINY).log()


def normalised(
    x: Tensor,
    num_groups: int,
    moments: Moments,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """Normalises groups with given moments, computed in at least float32."""
    flat = _grouped(x, num_groups)
    scale = torch.rsqrt(moments.variance + eps).to(flat.dtype)
    flat = (flat - moments.mean.to(flat.dtype)[..., None]) * scale[..., None]
    out, shape = flat.reshape(x.shape), (1, -1) + (1,) * (x.ndim - 2)
    if weight is not None:
        out = out * weight.to(flat.dtype).reshape(shape)
    if bias is not None:
        out = out + bias.to(flat.dtype).reshape(shape)
    return out.to(x.dtype)


def _grouped(x: Tensor, num_groups: int) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.to(wide).reshape(x.shape[0], num_groups, -1)
