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

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

GroupNormRule = Literal["predicted", "corrected", "stale", "separate", "synchronous"]

_TINY = 1e-12
_LARGEST_PACE = 1.5
_LARGEST_LOG_CHANGE = 0.7


@dataclass
class Moments:
    """Biased variance and mean, `(samples, groups)` or, in float64, `(bands, samples, groups)`."""

    variance: Tensor
    mean: Tensor

    @classmethod
    def of(cls, x: Tensor, num_groups: int) -> Moments:
        """Returns the moments of one band `(samples, channels, ...)`, computed in at least float32."""
        return cls(*torch.var_mean(_grouped(x, num_groups), -1, correction=0))

    def packed(self, dtype: torch.dtype) -> Tensor:
        """Returns one tensor that can be sent, `(2, ...)`."""
        return torch.stack([self.variance, self.mean]).to(dtype)

    @classmethod
    def unpacked(cls, tensors: Sequence[Tensor]) -> Moments:
        """Returns the moments of all bands, from their messages."""
        stacked = torch.stack(list(tensors)).double()
        return cls(stacked[:, 0], stacked[:, 1])

    def combined(self, shares: Sequence[float]) -> Moments:
        """Returns the moments of the whole image, from those of the bands and the share of each."""
        share = _weights(tuple(shares), self.mean.device)
        mean = (share * self.mean).sum(0)
        difference = self.mean - mean
        squares = torch.addcmul(self.variance, difference, difference)
        return Moments((share * squares).sum(0), mean)

    def with_band(self, band: int, moments: Moments) -> Moments:
        """Returns a copy with other moments for one band."""
        variance, mean = self.variance.clone(), self.mean.clone()
        variance[band], mean[band] = moments.variance, moments.mean
        return Moments(variance, mean)

    @functools.cached_property
    def logarithmic(self) -> Tensor:
        """The logarithm of the variance, and the mean, `(..., 2, samples, groups)`."""
        return torch.stack([(self.variance + _TINY).log(), self.mean], -3)

    def band(self, band: int) -> Moments:
        """Returns the moments of one band."""
        return Moments(self.variance[band], self.mean[band])


def stale(before: Moments, now: Moments, band: int, shares: Sequence[float]) -> Moments:
    """Returns moments of the whole image if other bands are as one step ago, in `before`; `now` is of this band."""
    return before.with_band(band, now).combined(shares)


def corrected(
    before: Moments, now: Moments, band: int, shares: Sequence[float]
) -> tuple[Moments, Tensor]:
    """Returns moments of the whole image as if it had changed as much as this band did.

    Returns:
        Its moments, and how often the variance was negative and the band's own was taken.
    """
    whole, here = before.combined(shares), before.band(band)
    square = whole.variance + whole.mean**2
    square = square + (now.variance + now.mean**2) - (here.variance + here.mean**2)
    mean = whole.mean + now.mean - here.mean
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
    old = before.logarithmic
    last = None if earlier is None else old - earlier.logarithmic
    of_log, of_mean = _next_change(now.logarithmic - old[band], last, band).unbind(-3)
    factor = of_log.clamp(-_LARGEST_LOG_CHANGE, _LARGEST_LOG_CHANGE).exp()
    variance, mean = before.variance * factor, before.mean + of_mean
    variance[band], mean[band] = now.variance, now.mean
    return Moments(variance, mean).combined(shares)


def _next_change(change: Tensor, last: Tensor | None, band: int) -> Tensor:
    """Returns the change of all bands, from that of this band and the last of all, `(bands, ..., groups)`."""
    if last is None:
        return change
    own_last = last[band]
    products = (last * own_last).sum(-1, keepdim=True)
    size = products[band].clamp_min(_TINY)
    pace = ((change * own_last).sum(-1, keepdim=True) / size).clamp(0.0, _LARGEST_PACE)
    shared = (products / size).clamp(0.0, 1.0)
    surprise = torch.addcmul(change, pace, own_last, value=-1)
    return torch.addcmul(pace * last, shared, surprise)


@functools.cache
def _weights(shares: tuple[float, ...], device: torch.device) -> Tensor:
    """Returns `(bands, 1, 1)`, copied to the device once, for which the host waits."""
    with torch.inference_mode(False):
        return torch.tensor(shares, dtype=torch.float64, device=device)[:, None, None]


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
    # As a batch norm whose channels are the groups of all samples.
    mean, variance = (each.to(flat.dtype).flatten() for each in (moments.mean, moments.variance))
    out = F.batch_norm(flat.reshape(1, len(mean), -1), mean, variance, eps=eps)
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
