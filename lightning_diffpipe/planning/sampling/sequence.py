"""What sequence parallelism costs: bytes and messages of one call of attention, as pure arithmetic.

N ranks hold a part of the tokens each, `t_0 .. t_{N-1}`, and all heads of them. Per call of attention

    Ulysses     heads for tokens, and back:    4 (N - 1) / N   e B t h   bytes of all ranks together
    ring        keys and values rotate:        2 (N - 1)       e B t h

for `t` tokens of width `h`, if heads and tokens divide evenly; the functions here count them as they are.

Source:
    DeepSpeed Ulysses, Jacobs et al. (2023), https://arxiv.org/abs/2309.14509
    Ring attention, Liu et al. (2023), https://arxiv.org/abs/2310.01889
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionSize:
    """One call of attention.

    Attributes:
        batch: Samples.
        heads: Of queries.
        key_heads: Of keys and values; fewer than `heads` with grouped queries.
        head_size: Width of a query or key.
        value_size: Width of a value.
        element_bytes: Of one number.
    """

    batch: int
    heads: int
    key_heads: int
    head_size: int
    value_size: int
    element_bytes: int


def share(total: int, rank: int, num_ranks: int) -> range:
    """The rank's part of some heads: contiguous, as equal as can be."""
    return range(total * rank // num_ranks, total * (rank + 1) // num_ranks)


def ulysses_bytes(size: AttentionSize, tokens: Sequence[int]) -> int:
    """Bytes sent by all ranks for one call.

    Args:
        size: Of the call.
        tokens: Of each rank.

    Example:
        >>> ulysses_bytes(AttentionSize(1, 4, 4, 8, 8, 2), [50, 50])     # 4 (N - 1) / N e B t h
        12800
    """
    n, total = len(tokens), 0
    for rank in range(n):
        for peer in range(n):
            if peer == rank:
                continue
            heads = len(share(size.heads, peer, n))
            key_heads = len(share(size.key_heads, peer, n))
            there = heads * size.head_size + key_heads * (size.head_size + size.value_size)
            back = len(share(size.heads, rank, n)) * size.value_size
            total += tokens[rank] * there + tokens[peer] * back
    return total * size.batch * size.element_bytes


def ring_bytes(size: AttentionSize, tokens: Sequence[int]) -> int:
    """Bytes sent by all ranks for one call.

    Args:
        size: Of the call.
        tokens: Of each rank.

    Example:
        >>> ring_bytes(AttentionSize(1, 4, 4, 8, 8, 2), [50, 50])       # 2 (N - 1) e B t h
        12800
    """
    width = size.key_heads * (size.head_size + size.value_size)
    return (len(tokens) - 1) * sum(tokens) * width * size.batch * size.element_bytes


def attention_bytes(mode: str, size: AttentionSize, tokens: Sequence[int]) -> int:
    """Bytes sent by all ranks for one call, by "ulysses" or "ring"."""
    return {"ulysses": ulysses_bytes, "ring": ring_bytes}[mode](size, tokens)


def attention_messages(mode: str, num_ranks: int) -> int:
    """Messages of all ranks for one call: there and back with Ulysses, once round in a ring."""
    return (2 if mode == "ulysses" else 1) * num_ranks * (num_ranks - 1)


def prediction_bytes(num_bytes: int, num_ranks: int) -> int:
    """Bytes sent by all ranks so that everybody has the prediction of one step."""
    return (num_ranks - 1) * num_bytes
