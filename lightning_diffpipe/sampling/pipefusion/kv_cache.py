"""Keys and values of one request: some fresh, some one step old, never of another request.

For every attention call there is one buffer over all its tokens. When a patch is computed, its keys and values
are written first and then it attends to the whole buffer, so that it sees the newest of everything:

    step 3, patch 1 of 4 attends to      patch 0    patch 1    patch 2    patch 3
    keys and values of step                 3          3          2          2

Synchronous steps, which compute all tokens at once, attend to what they compute and leave it in the buffer.
Without any, nothing has been written for the patches to come at step 0: their keys are hidden, which is better
than attending to zeros as the paper does (source: `sampler.py`).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_diffpipe.errors import LayoutError
from lightning_diffpipe.sampling.tracing.attention import Attend
from lightning_diffpipe.sampling.tracing.layout import Block, Part, Selection, TokenAxis


class AttentionCall(NamedTuple):
    """One call of self-attention in one run of a part.

    Attributes:
        place: Number of the block call, and of the attention call inside it.
        tokens: Owners of its keys.
        attend: Torch's attention.
        options: Options of attention, without the mask.
        q: `(B, heads, tokens, width)`; of the tokens of the part, and of a dummy text token if the block needs one.
        k: `(B, key heads, tokens, width)`, likewise.
        v: `(B, key heads, tokens, width of values)`, likewise.
        mask: Over the keys of the part, or over all keys.
    """

    place: tuple[int, int]
    block: Block
    tokens: TokenAxis
    part: Part
    attend: Attend
    options: Mapping[str, Any]
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None

    def own(self) -> Selection:
        """Returns the tokens of the part among all keys."""
        return self.tokens.owned(self.part)

    def own_mask(self) -> Tensor | None:
        """Returns the mask over the part's own keys; None if there is none, or one that is over all keys.

        Raises:
            LayoutError: It differs from query to query.
        """
        num_keys = len(self.tokens.input_of(self.part))
        is_of_part = self.mask is not None and self.mask.shape[-1] == num_keys != self.tokens.size
        if not is_of_part:
            return None
        if self.mask.shape[-2] != 1:
            raise LayoutError(
                f"{self.block.name} makes an attention mask of shape {tuple(self.mask.shape)} from its tokens; "
                "parts of the tokens need one that is the same for all queries"
            )
        return self.tokens.own_in_input(self.part).take(self.mask, -1)

    def answer(self) -> Tensor:
        """Computes attention of these queries to these keys."""
        return self.attend(self.q, self.k, self.v, attn_mask=self.mask, **self.options)


PartAttention = Callable[[AttentionCall], Tensor]
"""How tokens of a part, whose are query, key and value of the call, attend to all tokens."""


@dataclass
class _Buffer:
    """Keys, values and, where a mask is made from tokens, the mask of one attention call."""

    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    written: set[Part] = field(default_factory=set)  # patches


@dataclass
class KeysInShares:
    """Keys and values of one attention call that come one share after the other.

    Attributes:
        whole: Keys and values over all tokens, into which shares are written; None if nobody will read them.
        mask: Over all keys, if there is one.
        others: Selects keys that are there already, of other patches, when asked: that takes longer than what most
            calls of attention need; None in a synchronous step.
    """

    whole: tuple[Tensor, Tensor] | None
    mask: Tensor | None
    others: Callable[[], Selection] | None = None

    def put(self, place: Selection, k: Tensor, v: Tensor) -> None:
        """Writes a share to its place among all tokens."""
        for buffer, x in zip(self.whole or (), (k, v), strict=False):
            place.put(buffer, -2, x)

    def of_others(self) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """Keys, values and mask of other patches; None if there are none."""
        others = None if self.others is None or self.whole is None else self.others()
        if others is None or self.whole is None or not len(others):
            return None
        key, value = (others.take(x, -2) for x in self.whole)
        mask = None if self.mask is None else others.take(self.mask, -1)
        return key, value, mask


class KvCache:
    """Keys and values of one request, for PipeFusion.

    Args:
        patches: The patches, in the order in which they are computed.
        hide_unseen: Hide keys that have never been written, instead of attending to zeros.

    Attributes:
        keeps: Whether a synchronous step is stored, as it is if the step after it is to read it.
    """

    def __init__(self, patches: Sequence[Part], *, hide_unseen: bool = True) -> None:
        self._patches, self._hide_unseen = tuple(patches), hide_unseen
        self._buffers: dict[tuple[int, int], _Buffer] = {}
        self.keeps = False

    def attend(self, call: AttentionCall) -> Tensor:
        """Writes the part's keys and values, then attends to all that can be seen."""
        keys = self.in_shares(call)
        own = call.tokens.own_in_input(call.part)  # a dummy token's key and value belong to nobody
        keys.put(call.own(), own.take(call.k, -2), own.take(call.v, -2))
        if call.part.units is None or keys.whole is None:  # a synchronous step
            return call.answer()
        (key, value), mask = keys.whole, keys.mask
        if mask is not None and mask.shape[-2] == call.tokens.size > 1:  # one row for each query
            mask = call.tokens.input_of(call.part).take(mask, -2)
        written = self._buffers[call.place].written
        if self._hide_unseen and len(written) < len(self._patches):
            seen = self._keys_of(call, written)
            key, value = seen.take(key, -2), seen.take(value, -2)
            mask = mask if mask is None else seen.take(mask, -1)
        return call._replace(k=key, v=value, mask=mask).answer()

    def in_shares(self, call: AttentionCall) -> KeysInShares:
        """Begins a call of attention whose keys and values come one share after the other.

        Args:
            call: Its part is that of all shares together, without dummy text; its keys and values are those of one
                of the shares, and their number of tokens does not matter.
        """
        if call.part.units is None:
            views = self._synchronous_buffers(call) if self.keeps else None
            return KeysInShares(views, call.mask)
        buffer = self._buffer(call, len(call.k))
        mask = self._mask_over_all_keys(call, buffer)
        visible = set(buffer.written if self._hide_unseen else self._patches)
        others = partial(self._keys_of, call, visible - {call.part})
        buffer.written.add(call.part)
        return KeysInShares((buffer.key, buffer.value), mask, others)

    def _synchronous_buffers(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """Returns where a synchronous step, of all samples or of some, stores keys and values of all tokens."""
        is_whole_batch = call.part.samples is None
        # Of a microbatch, as many samples as a call on all of them had.
        num_samples = len(call.k) if is_whole_batch else call.block.sizes[call.place[1]].batch
        samples = call.part.samples_of(num_samples)
        buffer, mask = self._buffer(call, num_samples), call.mask
        # Only masks made from tokens will be needed; they have one row for all queries.
        if mask is not None and mask.shape[-1] == call.tokens.size and mask.shape[-2] == 1:
            if is_whole_batch:
                buffer.mask = mask.clone()
            else:
                if buffer.mask is None:
                    buffer.mask = mask.new_zeros(num_samples, *mask.shape[1:])
                buffer.mask[samples] = mask  # the same for all, or one for each
        buffer.written = set(self._patches)
        return buffer.key[samples], buffer.value[samples]

    def _mask_over_all_keys(self, call: AttentionCall, buffer: _Buffer) -> Tensor | None:
        """Returns the mask of a call over all keys: one of the part's keys joins those of other patches."""
        mask = call.own_mask()
        if mask is None:
            return call.mask
        if buffer.mask is None:
            visible = True if mask.dtype == torch.bool else 0.0
            buffer.mask = mask.new_full((*mask.shape[:-1], call.tokens.size), visible)
        call.own().put(buffer.mask, -1, mask.expand(*buffer.mask.shape[:-1], mask.shape[-1]))
        return buffer.mask

    def _buffer(self, call: AttentionCall, num_samples: int) -> _Buffer:
        if call.place not in self._buffers:
            # In memory, tokens of a head follow each other, though most models order heads of a token so: a patch
            # reads all keys once for every few of its queries: on CPUs that takes up to a fifth less time this way.
            key, value = (
                x.new_zeros((num_samples, *x.shape[1:-2], call.tokens.size, x.shape[-1]))
                for x in (call.k, call.v)
            )
            self._buffers[call.place] = _Buffer(key, value)
        return self._buffers[call.place]

    def _keys_of(self, call: AttentionCall, patches: Collection[Part]) -> Selection:
        """Returns where the keys of some patches are among all keys."""
        units = tuple(patch.units for patch in self._patches if patch in patches)
        text = next((patch.text for patch in patches if patch.text), None)
        return call.tokens.owned(Part(units, text))
