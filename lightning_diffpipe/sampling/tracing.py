"""Following values through a model without knowing it: NaN is the ink.

NaN survives every arithmetic operation, so what is NaN after a function has been reached by what was NaN before
 it. To read a whole map from indices to indices in few runs, each index gets a code word and run `b`
marks the indices whose word has bit `b`. All words have the same number of ones, so that a place reached by two
indices shows too many marks and can never be mistaken for a third:

    index       0     1     2     3     4     5
    code word  1100  1010  1001  0110  0101  0011        8 runs read a map of 70 indices

Booleans cannot be NaN; they are flipped and compared with an unmarked run.

Nearly all time of a run goes into the products of linear layers, whose numbers nobody looks at: one NaN in a row
makes the whole row NaN, whatever the weights are. `InkOnly` therefore multiplies nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Attend = Callable[..., Tensor]
"""`attend(query, key, value, **options)`, as torch's scaled dot-product attention."""

AttentionHandler = Callable[..., Tensor]
"""`handler(attend, query, key, value, **options)` answers a call of attention."""

UNREACHED, MIXED = -1, -2
_NAN = float("nan")
_ATTENTION = F.scaled_dot_product_attention  # its name may stand for something else later


class AttentionIntercepted(TorchFunctionMode):
    """Lets a handler answer every `scaled_dot_product_attention` of this thread."""

    def __init__(self, handler: AttentionHandler) -> None:
        super().__init__()
        self._handler = handler

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Calls the handler for attention, everything else as it is."""
        kwargs = kwargs or {}
        if func is not _ATTENTION:
            return func(*args, **kwargs)
        return answer_attention(self._handler, func, args, kwargs)


def answer_attention(
    handler: AttentionHandler, attend: Attend, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Tensor:
    """Hands a call of attention to a handler."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    options = dict(zip(names, args, strict=False)) | dict(kwargs)
    query, key, value = (options.pop(name) for name in names[:3])
    return handler(attend, query, key, value, **options)


class InkOnly(TorchFunctionMode):
    """Runs linear layers without multiplying: NaN goes where it would go, all other numbers mean nothing.

    Weights that are NaN themselves, and types that are cast on the way, are left to torch.

    Args:
        exactly: Skip only what is NaN throughout, so that all numbers are those of torch; but features differ where
            the weights are a placeholder, one number for all, or a norm after would make anything the same.

    Example:
        >>> with InkOnly():
        ...     F.linear(torch.tensor([[1.0, 2.0], [3.0, _NAN]]), torch.ones(3, 2)).isnan().any(1)
        tensor([False,  True])
    """

    def __init__(self, exactly: bool = False) -> None:
        super().__init__()
        self._exactly = exactly
        self._finite: dict[int, bool] = {}  # parameters live as long as their model

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Answers linear layers, calls everything else as it is."""
        if func is not F.linear:
            return func(*args, **(kwargs or {}))
        return self._linear(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        plain = input.is_floating_point() and input.dtype == weight.dtype and weight.ndim == 2
        if not plain or torch.is_autocast_enabled(input.device.type):
            return F.linear(input, weight, bias)
        reached = input.amax(-1, keepdim=True).isnan()  # in one pass
        skips = bool(reached.all()) if self._exactly else self._is_finite(weight, bias)
        if not skips:
            out = F.linear(input, weight, bias)
            if any(weight.stride()):
                return out
            features = torch.linspace(1, 2, len(weight), dtype=out.dtype, device=out.device)
            return out * features + features.square()
        # All features differ, as they would, so that nothing is divided by a difference of zero.
        numbers = torch.linspace(0.01, 0.02, len(weight), dtype=input.dtype, device=input.device)
        return torch.where(reached, _NAN, numbers)

    def _is_finite(self, *parameters: Tensor | None) -> bool:
        for p in (p for p in parameters if p is not None):
            if id(p) not in self._finite or not isinstance(p, nn.Parameter):
                # A placeholder is one number for all.
                one = p.detach().as_strided((), ()) if not any(p.stride()) else p
                self._finite[id(p)] = bool(one.isfinite().all())
            if not self._finite[id(p)]:
                return False
        return True


class CodeWords:
    """Code words of equal weight for `n` indices.

    Example:
        >>> words = CodeWords(6)
        >>> words.num_bits, words.weight
        (4, 2)
        >>> words.decode([torch.tensor([b, False]) for b in (True, False, True, False)]).tolist()
        [1, -1]
    """

    def __init__(self, n: int) -> None:
        self.num_bits = next(b for b in range(1, 64) if math.comb(b, b // 2) >= n)
        self.weight = max(self.num_bits // 2, 1)
        words = list(islice(combinations(range(self.num_bits), self.weight), n))
        self.marks = torch.zeros(self.num_bits, n, dtype=torch.bool)
        for index, bits in enumerate(words):
            self.marks[list(bits), index] = True
        self._index = {sum(1 << bit for bit in bits): index for index, bits in enumerate(words)}

    def decode(self, lines: Sequence[Tensor]) -> Tensor:
        """Which index reached each place.

        Args:
            lines: For every bit, which places were marked.

        Returns:
            For each place the index, `UNREACHED`, or `MIXED` if it was reached by several.
        """
        words = sum(line.long() << bit for bit, line in enumerate(lines)).tolist()
        known = self._index | {0: UNREACHED}
        return torch.tensor([known.get(word, MIXED) for word in words], dtype=torch.long)


def lines(x: Tensor, axis: int, base: Tensor | None = None) -> Tensor:
    """Which indices of `axis` hold a NaN anywhere; for booleans, which differ from `base`."""
    if x.is_floating_point() and x.numel():
        others = [a for a in range(x.ndim) if a != axis % x.ndim]
        return (x.amax(others) if others else x).isnan().cpu()  # in one pass
    changed = x ^ base if x.dtype == torch.bool else x.isnan()
    return changed.movedim(axis, 0).flatten(1).any(1).cpu()


def marked(x: Tensor, axis: int, mask: Tensor) -> Tensor:
    """A copy with NaN, or flipped booleans, at the marked indices of `axis`."""
    y = x.clone(memory_format=torch.contiguous_format)
    at = (*[slice(None)] * (axis % x.ndim), mask.to(x.device))
    if y.dtype == torch.bool:
        y[at] = ~y[at]
    else:
        y[at] = complex(_NAN, _NAN) if y.is_complex() else _NAN
    return y


def can_be_marked(x: Any) -> bool:
    """Whether NaN, or a flip, can be written into it."""
    return isinstance(x, Tensor) and (
        x.is_floating_point() or x.is_complex() or x.dtype == torch.bool
    )


def token_local(log: list[tuple[Tensor, Tensor | None]], strict: bool = False) -> AttentionHandler:
    """Stands in for attention: returns the query, so that a token reaches nothing but itself.

    Args:
        log: Gets key and mask of every call.
        strict: What is NaN in a key or value also reaches the output of its position, so that tokens
            mixed on the way there are seen.
    """

    def handler(
        attend: Attend,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        log.append((k, attn_mask))
        if strict and q.shape[-2] == k.shape[-2]:
            reached = (k.amax((1, -1), keepdim=True).isnan(), v.amax((1, -1), keepdim=True).isnan())
            q = q.masked_fill(reached[0] | reached[1], _NAN)
        return q

    return handler


def all_to_all(attend: Attend, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Stands in for attention: one NaN in a key or value reaches every output."""
    reached = k.isnan().any() | v.isnan().any()
    return q.masked_fill(reached, _NAN)
