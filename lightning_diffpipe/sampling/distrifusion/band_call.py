"""One call of the model on a band of rows, and what is remembered of it from step to step.

A `BandCall` follows one call over the steps of a request: with guidance by two calls per step there are two, each
with its own buffers. While the model's own forward runs on the band, it answers the functions that have a rule:

| seen beyond the band | function | rule |
|---|---|---|
| kernels wider than one row | `conv2d` | rows of the neighbours; zeros only outside the image |
| asymmetric padding | `F.pad` | rows of the neighbours instead of zeros; the convolution after it adds none |
| the first convolution | `conv2d` | its rows are cut from the whole latents, which every rank has: no message |
| statistics of the image | `F.group_norm` | moments of all bands (below) |
| self- and joint attention | `F.scaled_dot_product_attention` | keys and values of all bands; texts are local |
| nearest up-sampling, pooling in patches | `F.interpolate`, `F.avg_pool2d` | local |
| square grids of tokens | `Tensor.reshape` | the grid of the band |

Everything else acts on rows or tokens one by one, which `analysis.py` has seen. Modules that are given texts only,
such as those that make keys and values of them, run once, for as long as their input stays the same.

**Group norm**: mean and variance of the whole image from those of the bands. With biased variances the law of
total variance is a sum of positive terms, so nothing cancels, and no rule that first estimates the moments of each
band can give a negative variance:

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
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_diffpipe.comm.packing import TensorShape
from lightning_diffpipe.errors import GraphError
from lightning_diffpipe.graph.interception import Run, Site
from lightning_diffpipe.sampling.distrifusion.analysis import CallAnalysis, JointKeys, ModelCall
from lightning_diffpipe.sampling.distrifusion.bands import (
    Bands,
    input_first,
    refuse,
    unsupported,
    windows_of,
)
from lightning_diffpipe.sampling.distrifusion.exchange import Constants, Exchange
from lightning_diffpipe.sampling.tracing.attention import Attend, Kernel, answer_attention

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


MODEL = "model"
"""The name of the model's own site; those inside begin with `model.`."""


@dataclass(frozen=True)
class StepKind:
    """A denoising step, with the data of other bands that it may read.

    Attributes:
        index: Number of the step, from 0.
        synchronous: Their data of this step.
        alone: Nothing (naive patches).
        keep: Data that the next step may read are stored, or sent.
    """

    index: int
    synchronous: bool
    alone: bool = False
    keep: bool = False


class BandCall(Run, TorchFunctionMode):
    """Runs the model's forward on this rank's band, over the steps of a request.

    Args:
        group_norm: Rule in displaced steps.
        skipped: Modules of the model that a step cache may skip.

    Attributes:
        fallbacks: Negative variances of the corrected rule, counted where they are.
    """

    def __init__(
        self,
        analysis: CallAnalysis,
        bands: Bands,
        exchange: Exchange,
        group_norm: GroupNormRule,
        skipped: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__()
        self._analysis, self._bands, self._exchange = analysis, bands, exchange
        self._group_norm = group_norm
        self._constants = Constants(analysis.constant)
        # Of all bands, by call of group norm and step; and of this one.
        self._moments: dict[int, dict[int, list[Tensor]]] = {}
        self._own_moments: dict[int, Tensor] = {}
        self.fallbacks: Tensor | int = 0
        self._suspended = False
        self._skipped = {f"{MODEL}.{name}" for name in skipped}
        # How many exchanges and calls of attention there are in each of these, by the number of its call.
        self._counted: dict[tuple[str, int], tuple[int, int]] = {}

    def forget(self) -> None:
        """Takes what was sent to this band and not read."""
        self._exchange.drain()

    def run(self, call: ModelCall, step: StepKind) -> Any:
        """Runs the forward on the band; returns its results, with those of all bands put together."""
        self._step, self._num_calls, self._num_attentions = step, 0, 0
        self.padded: Tensor | None = None
        self.grid: tuple[int, int] | None = None
        self.regridded = False
        self._turns: Counter[str] = Counter()
        leaves, tree = pytree.tree_flatten((call.args, call.kwargs))
        analysis, exchange = self._analysis, self._exchange
        self._whole = leaves[analysis.sample]
        self._band = self._cut(self._whole, -2).contiguous()
        leaves = [self._band if x is self._whole else x for x in leaves]
        for leaf, axis in analysis.sliced.items():
            leaves[leaf] = self._cut(leaves[leaf], axis)
        band_args, band_kwargs = pytree.tree_unflatten(leaves, tree)
        watched = analysis.embedders.keys() | analysis.constant | self._skipped
        exchange.start_step(step.index, step.synchronous, step.keep)
        with call.interception.also_watching(watched), call.interception.running(self), self:
            out = call.forward(*band_args, **band_kwargs)
        exchange.stop_step()
        del self._whole, self._band, self.padded
        results, tree = pytree.tree_flatten(out)
        for i, axis in analysis.outputs.items():
            own = results[i].contiguous()
            shapes = self._shapes(own, axis) | {self._bands.rank: TensorShape.of(own)}
            ordered = [shapes[rank] for rank in range(self._bands.num_bands)]
            results[i] = torch.cat(exchange.gather(own, ordered), axis)
        return pytree.tree_unflatten(results, tree)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._suspended:
            return func(*args, **kwargs)
        refuse(func)
        if func is F.scaled_dot_product_attention or isinstance(func, Kernel):
            return answer_attention(self.attend, func, args, kwargs)
        rule = RULES.get(func)
        if rule is None:
            return func(*args, **kwargs)
        args, kwargs = input_first(args, kwargs)
        return rule(self, *args, **kwargs)

    # ------------------------------------------------------------ modules

    def call(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answers a module: those that embed the latents embed all of them, those given a text only run once."""
        name, inputs = site.name, (*args, *kwargs.values())
        run = partial(site.diffpipe_original, *args, **kwargs)
        if name in self._analysis.constant and len(inputs) == 1:
            return self._constants.get(name, inputs[0], run)
        if self._suspended:
            return run()
        if name in self._skipped:
            self._turns[name] += 1
            calls, attentions = self._num_calls, self._num_attentions
            out = run()
            now = self._num_calls - calls, self._num_attentions - attentions
            # One that is skipped leaves the numbers of calls after it as they are.
            counted = self._counted.setdefault((name, self._turns[name]), now)
            self._num_calls, self._num_attentions = calls + counted[0], attentions + counted[1]
            return out
        axes = self._analysis.embedders.get(name)
        if axes is None or not any(x is self._band for x in inputs):
            return run()
        return self._embedded(site, args, kwargs, axes)

    def _embedded(
        self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any], axes: dict[int, int]
    ) -> Any:
        """Embeds all rows, since a band alone would get the positions of the top; returns those of the band."""
        whole = {id(self._band): self._whole}
        args = tuple(whole.get(id(x), x) for x in args)
        kwargs = {name: whole.get(id(x), x) for name, x in kwargs.items()}
        self._suspended = True
        try:
            out = site.diffpipe_original(*args, **kwargs)
        finally:
            self._suspended = False
        leaves, tree = pytree.tree_flatten(out)
        for i, axis in axes.items():
            rows, rest = divmod(self._bands.num_rows, self._analysis.unit)  # of tokens
            num_tokens = leaves[i].shape[axis]
            if leaves[i].ndim == 3 and not rest and num_tokens % rows == 0:
                self.grid = self._bands.part_of(rows)[1], num_tokens // rows
            leaves[i] = self._cut(leaves[i], axis).contiguous()
        return pytree.tree_unflatten(leaves, tree)

    # ------------------------------------------------------------ what rules ask for

    def with_halo(self, x: Tensor, above: int, below: int) -> Tensor:
        """Returns a band `(B, C, rows, W)` with rows of its neighbours, or zeros outside the image, around it.

        Raises:
            GraphError: Some band, of any rank, has fewer rows than its neighbours want of it.
        """
        rows, bands = x.shape[-2], self._bands
        if above == below == 0:
            return x
        if x is self._band:  # every rank has the whole latents
            whole = F.pad(self._whole, (0, 0, above, below))
            return whole.narrow(-2, bands.start, above + rows + below)
        fewest = min(bands.resized(rows, rank) for rank in range(bands.num_bands))
        if max(above, below) > fewest:  # on all ranks, so that none waits for those who refuse
            raise GraphError(
                f"a convolution reads {max(above, below)} rows beyond its band, but the smallest band has "
                f"{fewest} rows: use fewer ranks"
            )
        upper, lower = bands.rank - 1, bands.rank + 1
        shapes = {
            peer: TensorShape((*x.shape[:-2], size, x.shape[-1]), x.dtype)
            for peer, size in ((upper, above), (lower, below))
        }
        received: dict[int, Tensor] | None = None
        if not self._step.alone:
            neighbours = [peer for peer in shapes if 0 <= peer < bands.num_bands]
            # The upper neighbour reads `below` rows of this band, the lower one `above` rows. They are sent later,
            # and the model may write into what it has.
            edges = {upper: x[..., :below, :], lower: x[..., rows - above :, :]}
            dense = torch.contiguous_format
            received = self._exchange.swap(
                "halo",
                self._count(),
                {n: edges[n].clone(memory_format=dense) for n in neighbours if edges[n].numel()},
                {n: shapes[n] for n in neighbours if shapes[n].shape[-2]},
                TensorShape.of(x),
            )
        halos = [(received or {}).get(peer, x.new_zeros(shapes[peer].shape)) for peer in shapes]
        return torch.cat([halos[0], x, halos[1]], -2)

    def attend(
        self, attend: Attend, query: Tensor, key: Tensor, value: Tensor, **options: Any
    ) -> Tensor:
        """Attends to keys and values `(B, heads, tokens, D)` of all bands; texts are those of this band."""
        joint = self._analysis.keys[self._num_attentions]
        self._num_attentions += 1
        if joint is not None and not self._step.alone:
            if options.get("attn_mask") is not None or options.get("is_causal"):
                raise unsupported("attention of the image with a mask")
            key, value = self._with_all_bands(key, value, joint)
        return attend(query, key, value, **options)

    def _with_all_bands(
        self, key: Tensor, value: Tensor, joint: JointKeys
    ) -> tuple[Tensor, Tensor]:
        """Returns keys and values with those of the image of all bands; those of texts are this band's own."""
        start, stop = joint.before, key.shape[-2] - joint.after
        own = torch.stack([key[..., start:stop, :], value[..., start:stop, :]]).contiguous()
        others = self._exchange.swap(
            "key_value",
            self._count(),
            dict.fromkeys(self._bands.peers, own),
            self._shapes(own, -2),
            TensorShape.of(own),
        )
        if others is None:
            return key, value
        keys, values = zip(*self._in_order(own, others), strict=True)
        return (
            torch.cat([key[..., :start, :], *keys, key[..., stop:, :]], -2),
            torch.cat([value[..., :start, :], *values, value[..., stop:, :]], -2),
        )

    def moments_of(self, x: Tensor, num_groups: int) -> Tensor | None:
        """Returns the moments of the whole image, by the rule; None if it uses those of the band alone."""
        step = self._step
        rule = "synchronous" if step.synchronous else self._group_norm
        call = self._count()  # in every kind of step, so that later calls keep their positions
        if step.alone or rule == "separate":
            return None
        own = moments_of(x, num_groups)
        others = self._exchange.swap(
            "statistics",
            call,
            dict.fromkeys(self._bands.peers, own),
            dict.fromkeys(self._bands.peers, TensorShape.of(own)),
            TensorShape.of(x),
            fresh=self._group_norm == "synchronous",
        )
        own_before, self._own_moments[call] = self._own_moments.get(call), own
        if others is None:
            return None
        by_step = self._moments.setdefault(call, {})
        band, shares = self._bands.rank, self._bands.shares
        if rule == "synchronous":
            received = by_step[step.index] = self._in_order(own, others)
            by_step.pop(step.index - 2, None)
            return combined(received, shares)
        # What came now is of the step before, as what this band sent then.
        assert own_before is not None
        before = by_step[step.index - 1] = self._in_order(own_before, others)
        by_step.pop(step.index - 3, None)
        if rule == "predicted":
            return predicted(before, by_step.get(step.index - 2), own, band, shares)
        if rule == "corrected":
            moments, fallbacks = corrected(before, own, band, shares)
            self.fallbacks = self.fallbacks + fallbacks  # read on the host at the end
            return moments
        return stale(before, own, band, shares)

    # ------------------------------------------------------------ helpers

    def _count(self) -> int:
        self._num_calls += 1
        return self._num_calls - 1

    def _cut(self, x: Tensor, axis: int) -> Tensor:
        return x.narrow(axis, *self._bands.part_of(x.shape[axis]))

    def _shapes(self, own: Tensor, axis: int) -> dict[int, TensorShape]:
        """Returns the shapes on other bands of a tensor that grows with the rows on an axis."""
        shapes = {}
        for peer in self._bands.peers:
            sizes = list(own.shape)
            sizes[axis] = self._bands.resized(sizes[axis], peer)
            shapes[peer] = TensorShape(tuple(sizes), own.dtype)
        return shapes

    def _in_order(self, own: Tensor, others: dict[int, Tensor]) -> list[Tensor]:
        ranks = range(self._bands.num_bands)
        return [own if rank == self._bands.rank else others[rank] for rank in ranks]


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
    """Convolves with rows of the neighbours around the band."""
    rows, columns = windows_of(weight, bias, stride, padding, dilation)
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
    """Pads rows with rows of the neighbours."""
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
    """Normalises with the moments of the whole image."""
    moments = call.moments_of(x, num_groups)
    if moments is None:
        return F.group_norm(x, num_groups, weight, bias, eps)
    return normalised(x, num_groups, moments, weight, bias, eps)


def interpolate(call: BandCall, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Repeats rows, each by itself, as nearest up-sampling does; raises GraphError otherwise."""
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
    """Pools in patches, which see nothing beyond a band of whole patches; raises GraphError otherwise."""
    sizes = (kernel_size, stride or kernel_size, padding)
    k, s, p = (v if isinstance(v, int) else v[0] for v in sizes)
    if k != s or p or x.shape[-2] % s:
        raise unsupported(
            f"average pooling of {k} rows with stride {s} on a band of {x.shape[-2]} rows"
        )
    return F.avg_pool2d(x, kernel_size, stride, padding, *args, **kwargs)


def reshape(call: BandCall, x: Tensor, *shape: Any, **kwargs: Any) -> Tensor:
    """Gives code that puts tokens back on a square grid (DiT's) the grid of the band.

    It reshapes (B, h w, ...) to (B, h, w, p, q, C), with h = w, and (B, C, h, p, w, q) to (B, C, h p, w q).
    """
    sizes, grid = kwargs.get("shape", shape), call.grid
    if len(sizes) == 1 and not isinstance(sizes[0], int):
        (sizes,) = sizes
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
    F.interpolate: interpolate,
    F.avg_pool2d: average_pool,
    torch.Tensor.reshape: reshape,
}
"""Open for registration: a rule gets the `BandCall` and what the model gave the function."""
