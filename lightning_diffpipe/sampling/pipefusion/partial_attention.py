"""Attention to some of the keys at a time, and how what was found so is put together.

A part is a result and the logarithm of its normaliser, for each query: `o_i` and `n_i = log sum exp(scores)`.
Parts of different keys are merged by their normalisers, whatever computed them:

    n = log(exp n_1 + exp n_2)        o = o_1 exp(n_1 - n) + o_2 exp(n_2 - n)

On GPUs, and on CPUs without a mask, a fused kernel computes a part and never holds the scores. No kernel takes what
is left (masks, float64, head sizes beyond a kernel's), so a few queries at a time meet all keys of the part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention

MOST_SCORE_BYTES = 1 << 26
"""Most bytes of a tensor of scores, unless one query needs more; two or three such tensors are alive."""

_WIDTHS = 8  # head sizes are multiples of it in the kernels of GPUs, which read 16 bytes at once

Part = tuple[Tensor, Tensor]


def attention_part(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Part:
    """Attention to some of the keys: the result and the logarithm of its normaliser.

    Args:
        q: `(batch, heads, queries, width)`.
        k: `(batch, key heads, keys, width)`; heads in groups of equal size share a key head.
        v: `(batch, key heads, keys, width of values)`.
        mask: Boolean, false where a key is hidden, or what is added to scores. A query that sees none of these keys
            gets zeros, and a normaliser of minus infinity.
        scale: Of scores.

    Returns:
        `(batch, heads, queries, width of values)`, in the type of the queries or a wider one, and
        `(batch, heads, queries, 1)`, in float32 at least: in bfloat16 it would move weights by percents.
    """
    if k.shape[1] != q.shape[1]:  # grouped queries
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    if mask is not None:
        return _in_blocks(q, k, v, mask, scale)
    if q.device.type == "cpu" and q.shape[-1] == v.shape[-1]:
        out, norm = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, scale=scale)
        return out, norm.unsqueeze(-1)
    if q.device.type == "cuda":
        return _by_kernel_of_gpu(q, k, v, scale)
    return _in_blocks(q, k, v, None, scale)


def merged(total: Part | None, part: Part) -> Part:
    """Attention to the keys of both."""
    if total is None:
        return part
    norm = torch.logaddexp(total[1], part[1])
    weigh = [_weights(n, norm, n) for n in (total[1], part[1])]
    return total[0] * weigh[0] + part[0] * weigh[1], norm


def _by_kernel_of_gpu(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Part:
    """Asks the first kernel that takes these types and sizes on this GPU, and that is not turned off."""
    width, (q, k, v) = v.shape[-1], map(_aligned, (q, k, v))
    asked = SDPAParams(q, k, v, None, 0.0, False, False)
    if can_use_flash_attention(asked):
        out, norm, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, scale=scale)
    elif can_use_efficient_attention(asked):
        out, norm, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, None, compute_log_sumexp=True, scale=scale
        )
        norm = norm.narrow(-1, 0, q.shape[-2])  # the kernel fills it up to a multiple of 32 queries
    else:
        return _in_blocks(q, k, v.narrow(-1, 0, width), None, scale)
    return out.narrow(-1, 0, width), norm.unsqueeze(-1)


def _aligned(x: Tensor) -> Tensor:
    """Pads with zeros to a width that kernels take, which changes no score; puts numbers of a head in a row."""
    missing = -x.shape[-1] % _WIDTHS
    if missing:
        return F.pad(x, (0, missing))
    return x if x.stride(-1) == 1 else x.contiguous()


def _in_blocks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Part:
    """A few queries after the other, so that scores of all queries and keys never exist together."""
    wide = torch.promote_types(q.dtype, torch.float32)
    keys, v = k.to(wide).transpose(-2, -1), v.to(wide)
    batch, heads, num_queries, _ = q.shape
    out = q.new_empty(batch, heads, num_queries, v.shape[-1], dtype=wide)
    norms = q.new_empty(batch, heads, num_queries, 1, dtype=wide)
    of_one_query = max(batch * heads * k.shape[-2] * wide.itemsize, 1)
    step = max(MOST_SCORE_BYTES // of_one_query, 1)
    blocks = [x.split(step, 2) for x in (q, out, norms)]
    masks: Sequence[Tensor | None] = [mask] * len(blocks[0])
    if mask is not None and mask.shape[-2] > 1:
        masks = mask.split(step, -2)
    for queries, block, norm, seen in zip(*blocks, masks, strict=True):
        scores = (queries.to(wide) @ keys).mul_(scale)
        if seen is not None:
            hides = seen.dtype == torch.bool
            scores = scores.masked_fill_(~seen, -math.inf) if hides else scores + seen
        norm.copy_(scores.logsumexp(-1, keepdim=True))
        block.copy_(_weights(scores, norm, norm) @ v)
    return out, norms


def _weights(scores: Tensor, norm: Tensor, own: Tensor) -> Tensor:
    """Weights of scores under a normaliser; zero where the own one says that no key is seen. NaN stays NaN."""
    return (scores - norm).exp_().masked_fill_(own == -math.inf, 0.0)
