"""Attention over ranks that hold a part of the tokens each: exact, in two ways.

* Ulysses: before attention, ranks trade tokens for heads, so that each has all tokens of some heads; after it,
  they trade back. Heads must go round.
* Ring: keys and values travel round the ranks, and each attends to one rank's at a time. Partial results are
  merged by their normalisers, so any number of heads will do, at the price of more bytes.

A partial result is `o_i` with the logarithm of its normaliser, `n_i = log sum exp(scores)`, for each query. Those
of different keys are merged by these, whatever computed them:

    n = log(exp n_1 + exp n_2)        o = o_1 exp(n_1 - n) + o_2 exp(n_2 - n)

On GPUs, and on CPUs without a mask, a fused kernel computes one and never holds the scores. No kernel takes what is
left (masks, float64, head sizes beyond a kernel's), so a few queries at a time meet all keys of the part.

Inside a stage of PipeFusion the tokens are those of a patch, and keys and values of other patches are taken from
a cache. Under Ulysses a rank keeps some heads of all tokens. In a ring every rank keeps all heads of all tokens,
so that only those of the patch travel, and attends to the others while the first of them are under way:

    rank 0    other patches, own ── rank 1's ──          attends to
              own ->        <- rank 1's                  sends and receives

Source:
    DeepSpeed Ulysses, Jacobs et al. (2023), https://arxiv.org/abs/2309.14509
    Ring attention, Liu et al. (2023), https://arxiv.org/abs/2310.01889
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention

from lightning_diffpipe.comm.links import Links, exchange
from lightning_diffpipe.comm.packing import TensorShape, pack, packed_shape, unpack
from lightning_diffpipe.errors import ConfigurationError, LayoutError
from lightning_diffpipe.sampling.pipefusion.kv_cache import AttentionCall, KvCache
from lightning_diffpipe.sampling.tracing.attention import Attend, Kernel, kernels_of
from lightning_diffpipe.sampling.tracing.layout import Layout, Part, Selection, share

SequenceMode = Literal["ulysses", "ring"]

Attended = tuple[Tensor, Tensor]
"""Attention to some keys, and the logarithm of its normaliser; see `attention_part`."""

MOST_SCORE_BYTES = 1 << 26
"""Most bytes of a tensor of scores, unless one query needs more; two or three such tensors are alive."""

_WIDTHS = 8  # head sizes are multiples of it in the kernels of GPUs, which read 16 bytes at once
_NORMALISER_ERROR = 0.1  # of a kernel in 8 bits; logarithms to another base differ by 1
_RING = "ring attention (mode='ring'; sequence_mode='ring' with method=pipefusion)"


class _OverRanks:
    """The base of both ways; `share` returns the part that all ranks compute together, and that of each."""

    def __init__(
        self, links: Links, share: Callable[[Part], tuple[Part, Sequence[Part]]], inner: KvCache
    ) -> None:
        self._links, self._share, self._inner = links, share, inner
        self._peers = [rank for rank in range(links.num_ranks) if rank != links.rank]

    @classmethod
    def refuse(cls, layout: Layout, num_ranks: int) -> None:
        """Raises LayoutError if so many ranks cannot share the tokens of a model."""
        counts = sorted({block.num_text for block in layout.blocks})
        # A rank owns the same text tokens in all blocks: ranks divide them by their number.
        if num_ranks > 1 and len({count for count in counts if count}) > 1:
            raise LayoutError(
                f"blocks of the model have {', '.join(map(str, counts))} text tokens, of which a rank would own "
                "other ones in one block than in the next; take pipefusion with sequence=1, or single"
            )

    def attend(self, call: AttentionCall) -> Tensor:
        """Attends to the tokens of all ranks; raises LayoutError for keys that ranks cannot divide."""
        self._refuse_keys(call)
        together, parts = self._share(call.part)
        # Positions of each rank's tokens, among those of all ranks together.
        owned = [call.tokens.owned_among(part, together) for part in parts]
        own = call.tokens.own_in_input(call.part)
        if (size := call.k.shape[-2]) != own.size:
            raise LayoutError(
                f"{call.block.name} attends to {size} tokens of rank {self._links.rank}, and the others expect "
                f"{own.size}: the block makes some by itself; take method=single"
            )
        q, k, v = (own.take(x, -2) for x in (call.q, call.k, call.v))
        own_mask, mask = call.own_mask(), call.mask
        if own_mask is not None:
            mask = self._gathered_mask(own_mask, owned)
        tokens = call.tokens.without_dummy_text()
        whole_call = call._replace(tokens=tokens, part=together, q=q, k=k, v=v, mask=mask)
        out = self._attend(whole_call, parts, owned)
        if len(own) == own.size:
            return out
        with_dummy_text = out.new_zeros(*call.q.shape[:-1], out.shape[-1])
        own.put(with_dummy_text, -2, out)
        return with_dummy_text

    def _gathered_mask(self, own: Tensor, owned: Sequence[Selection]) -> Tensor:
        """Returns a mask over the keys of all ranks, of masks that each makes from its own tokens."""
        lead = tuple(own.shape[:-1])
        pieces = exchange(
            self._links,
            dict.fromkeys(self._peers, own),
            {peer: TensorShape((*lead, len(owned[peer])), own.dtype) for peer in self._peers},
            "sequence",
        )
        mask = own.new_zeros(*lead, owned[0].size)
        for rank, piece in (pieces | {self._links.rank: own}).items():
            owned[rank].put(mask, -1, piece)
        return mask

    def _refuse_keys(self, call: AttentionCall) -> None:
        """Raises LayoutError if there are keys of others than the tokens that a block is given."""
        num_queries, num_keys = call.q.shape[-2], call.k.shape[-2]
        if num_queries != num_keys and int((call.tokens.owner < -1).sum()) != call.block.num_text:
            raise LayoutError(
                f"{call.block.name} attends from {num_queries} tokens to {num_keys}, some of which do not attend "
                "themselves, as those of images as prompts in some models; ranks do not divide these: take "
                "pipefusion with sequence=1, or single"
            )

    def _attend(
        self, call: AttentionCall, parts: Sequence[Part], owned: Sequence[Selection]
    ) -> Tensor:
        """Answers a call without dummy text, whose part is that of all ranks together.

        Args:
            call: Its query, key and value are those of this rank's tokens.
            parts: What each rank computes.
            owned: Positions of the tokens of each rank among those of all ranks.
        """
        raise NotImplementedError


class Ulysses(_OverRanks):
    """All tokens of some heads on each rank."""

    @classmethod
    def refuse(cls, layout: Layout, num_ranks: int) -> None:
        """Raises ConfigurationError also if the heads of a model cannot be spread over so many ranks."""
        super().refuse(layout, num_ranks)
        for block in layout.blocks:
            for tokens, size in zip(block.attention, block.sizes, strict=True):
                if tokens is not None:
                    _refuse_heads(size.heads, size.key_heads, num_ranks)

    def _refuse_keys(self, call: AttentionCall) -> None:
        """Raises LayoutError also for text that does not attend itself: all of a token goes to the same places."""
        super()._refuse_keys(call)
        if call.q.shape[-2] != call.k.shape[-2]:
            raise LayoutError(
                f"{call.block.name} attends from {call.q.shape[-2]} tokens to {call.k.shape[-2]}, which Ulysses "
                f"does not divide; use {_RING}, or single"
            )

    def _attend(
        self, call: AttentionCall, parts: Sequence[Part], owned: Sequence[Selection]
    ) -> Tensor:
        """Trades tokens for heads, attends from all tokens with this rank's heads, and trades back."""
        me, mask = self._links.rank, call.mask
        _refuse_heads(call.q.shape[1], call.k.shape[1], self._links.num_ranks)
        heads, key_heads = self._heads(call.q.shape[1]), self._heads(call.k.shape[1])

        def heads_of(rank: int) -> list[Tensor]:
            ranges = (heads[rank], key_heads[rank], key_heads[rank])
            pairs = zip((call.q, call.k, call.v), ranges, strict=True)
            return [x.narrow(1, each.start, len(each)) for x, each in pairs]

        own = heads_of(me)
        shapes = {
            peer: [
                TensorShape((*x.shape[:-2], len(owned[peer]), x.shape[-1]), x.dtype) for x in own
            ]
            for peer in self._peers
        }
        incoming = self._links.start_exchange(
            {peer: pack(heads_of(peer)) for peer in self._peers},
            {peer: packed_shape(parts) for peer, parts in shapes.items()},
            "sequence",
        )
        qkv = [x.new_empty(*x.shape[:-2], owned[0].size, x.shape[-1]) for x in own]
        for of_all_tokens, x in zip(qkv, own, strict=True):  # while messages travel
            owned[me].put(of_all_tokens, -2, x)
        for peer, coming in incoming.items():
            parts = unpack(coming.wait(), shapes[peer], copy=False)
            for of_all_tokens, x in zip(qkv, parts, strict=True):
                owned[peer].put(of_all_tokens, -2, x)
        q, k, v = qkv
        if mask is not None and mask.ndim > 3 and mask.shape[1] > 1:  # one for each head
            mask = mask.narrow(1, heads[me].start, len(heads[me]))
        out = self._inner.attend(call._replace(q=q, k=k, v=v, mask=mask))
        return self._back(out, heads, owned)

    def _back(self, out: Tensor, heads: Sequence[range], owned: Sequence[Selection]) -> Tensor:
        """Trades heads of all tokens for tokens with all heads."""
        # The heads of a token side by side, as attention gives them and models want them.
        out, axis = out.transpose(1, 2), out.ndim - 3
        me, width = self._links.rank, out.shape[-1]
        lead = (*out.shape[:axis], len(owned[me]))
        incoming = self._links.start_exchange(
            {peer: owned[peer].take(out, axis).contiguous() for peer in self._peers},
            {
                peer: TensorShape((*lead, len(heads[peer]), width), out.dtype)
                for peer in self._peers
            },
            "sequence",
        )
        whole = out.new_empty(*lead, sum(map(len, heads)), width)
        of_heads = whole.split([len(each) for each in heads], axis + 1)
        owned[me].take_into(of_heads[me], out, axis)  # while messages travel
        for peer, coming in incoming.items():
            of_heads[peer].copy_(coming.wait())
        return whole.transpose(1, 2)

    def _heads(self, total: int) -> list[range]:
        n = self._links.num_ranks
        return [share(total, rank, n) for rank in range(n)]


def _refuse_heads(heads: int, key_heads: int, num_ranks: int) -> None:
    most = min(heads, key_heads)
    if most < num_ranks:
        raise ConfigurationError(
            f"Ulysses spreads {most} heads over {num_ranks} ranks; use at most {most} ranks, or {_RING}"
        )
    if heads != key_heads and (heads % num_ranks or key_heads % num_ranks):
        raise ConfigurationError(
            f"Ulysses cannot spread {heads} heads in {key_heads} groups over {num_ranks} ranks; use a "
            f"divisor of {math.gcd(heads, key_heads)}, or {_RING}"
        )


class Ring(_OverRanks):
    """Keys and values of one rank after the other. Any number of heads will do."""

    def _attend(
        self, call: AttentionCall, parts: Sequence[Part], owned: Sequence[Selection]
    ) -> Tensor:
        """Attends to the keys of one rank after the other, and merges the results by their normalisers."""
        links, rank, n = self._links, self._links.rank, self._links.num_ranks
        q, k, v = call.q, call.k, call.v
        scale = call.options.get("scale") or 1 / math.sqrt(q.shape[-1])
        keys = self._inner.in_shares(call)
        # Positions of each rank's tokens among all tokens; `owned` are those among the tokens of the part.
        positions = [call.tokens.owned(part) for part in parts]
        if keys.mask is not None and keys.mask.shape[-2] == call.tokens.size > 1:
            keys.mask = positions[rank].take(keys.mask, -2)
        total: Attended | None = None
        for hop in range(n):
            source = (rank - hop) % n  # whose keys k and v are
            if hop < n - 1:
                num_tokens = len(owned[(source - 1) % n])
                shapes = [
                    TensorShape((*x.shape[:-2], num_tokens, x.shape[-1]), x.dtype) for x in (k, v)
                ]
                before, after = (rank - 1) % n, (rank + 1) % n
                expected = {before: packed_shape(shapes)}
                coming = links.start_exchange({after: pack([k, v])}, expected, "sequence")[before]
            others = keys.of_others() if hop == 0 else None
            if others is not None:
                total = attention_part(q, *others, scale, call.attend)
            keys.put(positions[source], k, v)
            mask = None if keys.mask is None else positions[source].take(keys.mask, -1)
            total = merged(total, attention_part(q, k, v, mask, scale, call.attend))
            if hop < n - 1:
                k, v = unpack(coming.wait(), shapes)
        return total[0].to(q.dtype)


SEQUENCE_MODES: dict[str, type[Ulysses] | type[Ring]] = {"ulysses": Ulysses, "ring": Ring}


def attention_part(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    attend: Attend | None = None,
) -> Attended:
    """Attends to some of the keys, and returns the logarithm of the normaliser, too.

    Args:
        q: `(batch, heads, queries, width)`.
        k: `(batch, key heads, keys, width)`; heads in groups of equal size share a key head.
        v: `(batch, key heads, keys, width of values)`.
        mask: Boolean, false where a key is hidden, or what is added to scores. A query that sees none of these keys
            gets zeros, and a normaliser of minus infinity.
        scale: Factor of scores.
        attend: The attention that is asked for; a kernel of the user's computes if there is no mask.

    Returns:
        `(batch, heads, queries, width of values)`, in the type of the queries or a wider one, and
        `(batch, heads, queries, 1)`, in float32 at least: in bfloat16 it would move weights by percents.
    """
    if k.shape[1] != q.shape[1]:  # grouped queries
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    if mask is None and isinstance(attend, Kernel):
        return attend.with_normaliser(q, k, v, scale)
    if mask is None and q.device.type == "cpu" and q.shape[-1] == v.shape[-1]:
        out, norm = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, scale=scale)
        return out, norm.unsqueeze(-1)
    if mask is None and q.device.type == "cuda":
        # Zeros up to a width that kernels take change no score; numbers of a head have to lie in a row.
        padded = [
            x
            if x.shape[-1] % _WIDTHS == 0 and x.stride(-1) == 1
            else F.pad(x, (0, -x.shape[-1] % _WIDTHS)).contiguous()
            for x in (q, k, v)
        ]
        # The first kernel is asked that takes these types and sizes on this GPU, and that is not turned off.
        params, width = SDPAParams(*padded, None, 0.0, False, False), v.shape[-1]
        kernels = torch.ops.aten
        if can_use_flash_attention(params):
            out, norm, *_ = kernels._scaled_dot_product_flash_attention(*padded, scale=scale)
            return out.narrow(-1, 0, width), norm.unsqueeze(-1)
        if can_use_efficient_attention(params):
            out, norm, *_ = kernels._scaled_dot_product_efficient_attention(
                *padded, None, compute_log_sumexp=True, scale=scale
            )
            norm = norm.narrow(-1, 0, q.shape[-2])  # filled up to a multiple of 32 queries
            return out.narrow(-1, 0, width), norm.unsqueeze(-1)
    return _in_blocks(q, k, v, mask, scale)


def refuse_without_normaliser(model: nn.Module, device: torch.device) -> None:
    """Raises ConfigurationError if a kernel of the model's attention gives no normaliser; tries on a few tokens."""
    # Weights in 8 bits are cast before they meet anything.
    computes = (p for p in model.parameters() if p.is_floating_point() and p.element_size() > 1)
    dtype = next((p.dtype for p in computes), torch.float32)
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 16, 64, generator=generator).to(device, dtype)
    _, expected = attention_part(q, k, v, None, 0.125)
    for kernel in kernels_of(model):
        try:
            for order in (kernel.tokens_first, not kernel.tokens_first):
                kernel.tokens_first = order
                _, norm = kernel.with_normaliser(q, k, v, 0.125)
                if (norm - expected).abs().max() < _NORMALISER_ERROR:
                    break
            else:
                raise ValueError("other numbers than the logarithms of normalisers")
            continue
        except Exception as error:  # a kernel's own, for want of such a result or of a device
            reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigurationError(
            f"attention={kernel.name}: a ring merges results by their normalisers, which this kernel does not give "
            f"({reason}); take mode='ulysses' (sequence_mode with method=pipefusion), or another kernel"
        )


def merged(total: Attended | None, part: Attended) -> Attended:
    """Merges attention to different keys."""
    if total is None:
        return part
    norm = torch.logaddexp(total[1], part[1])
    weigh = [_weights(n, norm, n) for n in (total[1], part[1])]
    return total[0] * weigh[0] + part[0] * weigh[1], norm


def _in_blocks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Attended:
    """Takes a few queries after the other, so that scores of all queries and keys never exist together."""
    wide = torch.promote_types(q.dtype, torch.float32)
    keys, v = k.to(wide).transpose(-2, -1), v.to(wide)
    batch, heads, num_queries, _ = q.shape
    # The heads of a token side by side in memory, as kernels have them, of which models take views.
    out = q.new_empty(batch, num_queries, heads, v.shape[-1], dtype=wide).transpose(1, 2)
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


def _weights(scores: Tensor, norm: Tensor, own_norm: Tensor) -> Tensor:
    """Weighs scores by a normaliser: with zero where the own one says that no key is seen. NaN stays NaN."""
    return (scores - norm).exp_().masked_fill_(own_norm == -math.inf, 0.0)
