"""Keys and values of one request: some fresh, some one step old, never of another request.

For every attention call there is one buffer over all its tokens. When a patch is computed, its keys and values
are written first and then it attends to the whole buffer, so that it sees the newest of everything:

    step 3, patch 1 of 4 attends to      patch 0    patch 1    patch 2    patch 3
    keys and values of step                 3          3          2          2

Synchronous steps, which compute all tokens at once, attend to what they compute and leave it in the buffer.
Without any, nothing has been written for the patches to come at step 0: their keys are hidden, which is better
than attending to zeros as the paper does.

Source:
    PipeFusion, Fang et al. (2024), https://arxiv.org/abs/2405.14430
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_diffpipe.errors import LayoutError
from lightning_diffpipe.sampling.freshness import Freshness
from lightning_diffpipe.sampling.tracing.layout import Block
from lightning_diffpipe.sampling.tracing.marks import Attend
from lightning_diffpipe.sampling.tracing.tokens import Part, Selection, TokenAxis


@dataclass(frozen=True)
class AttentionCall:
    """One call of self-attention in one run of a part.

    Attributes:
        call: Number of the block call.
        number: Of the attention call inside it.
        block: The block.
        tokens: Owners of its keys.
        part: What is computed.
    """

    call: int
    number: int
    block: Block
    tokens: TokenAxis
    part: Part


class PartAttention(Protocol):
    """How tokens of a part attend to all tokens."""

    def attend(
        self, where: AttentionCall, attend: Attend, q: Tensor, k: Tensor, v: Tensor, **options: Any
    ) -> Tensor:
        """Answers an attention call whose query, key and value are those of the part."""


@dataclass
class _Buffer:
    """Keys, values and, where a mask is made from tokens, the mask of one attention call."""

    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    written: dict[Part, int] = field(default_factory=dict)  # patch -> step


@dataclass
class KeysInShares:
    """Keys and values of one attention call that come one share after the other.

    Attributes:
        whole: Keys and values over all tokens, into which shares are written; None if nobody will read them.
        mask: Over all keys, if there is one.
        others: Keys that are there already, of other patches; None in a synchronous step.
    """

    whole: tuple[Tensor, Tensor] | None
    mask: Tensor | None
    others: Selection | None = None

    def put(self, place: Selection, k: Tensor, v: Tensor) -> None:
        """Writes a share to its place among all tokens."""
        for buffer, x in zip(self.whole or (), (k, v), strict=False):
            place.put(buffer, buffer.ndim - 2, x)

    def of_others(self) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """Keys, values and mask of other patches; None if there are none."""
        others = self.others
        if others is None or self.whole is None or not len(others):
            return None
        key, value = (others.take(x, x.ndim - 2) for x in self.whole)
        mask = None if self.mask is None else others.take(self.mask, self.mask.ndim - 1)
        return key, value, mask


class KvCache:
    """Keys and values of one request, for PipeFusion.

    Args:
        patches: The patches, in the order in which they are computed.
        ghost: Blocks are fed a ghost token instead of no text.
        hide_unseen: Hide keys that have never been written, instead of attending to zeros.
        verify: Assert at every call that keys are as old as they should be.
        freshness: Where to note how old they are; None if nobody asks.
    """

    def __init__(
        self,
        patches: Sequence[Part],
        *,
        ghost: bool = False,
        hide_unseen: bool = True,
        verify: bool = False,
        freshness: Freshness | None = None,
    ) -> None:
        self._patches, self._ghost = tuple(patches), ghost
        self._hide_unseen, self._verify, self._freshness = hide_unseen, verify, freshness
        self._buffers: dict[tuple[int, int], _Buffer] = {}
        self._visible: dict[Any, Selection] = {}
        self._step, self._keep = -1, False

    def start_step(self, step: int, keep: bool) -> None:
        """Begins a denoising step.

        Args:
            step: Its index.
            keep: Whether what a synchronous step computes will be read by the step after it.
        """
        self._step, self._keep = step, keep

    def attend(
        self,
        where: AttentionCall,
        attend: Attend,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Writes the part's keys and values, then attends to all that can be seen."""
        if options.get("is_causal"):
            raise LayoutError(f"{where.block.name} attends causally; patches would see the future")
        if where.part.units is None:
            if self._keep:
                key, value = self._place_of_samples(where, k, v, attn_mask)
                key.copy_(k)
                value.copy_(v)
            self._note_synchronous(where)
            return attend(q, k, v, attn_mask=attn_mask, **options)
        buffer, mask = self._write(where, k, v, attn_mask)
        if mask is not None and mask.shape[-2] == where.tokens.size > 1:
            mask = self._fed(where).take(mask, mask.ndim - 2)
        self._look(where, buffer)
        key, value = buffer.key, buffer.value
        unseen = self._hide_unseen and len(buffer.written) < len(self._patches)
        if unseen:
            seen = self._seen(where, buffer)
            key, value = seen.take(key, key.ndim - 2), seen.take(value, value.ndim - 2)
            mask = mask if mask is None else seen.take(mask, mask.ndim - 1)
        return attend(q, key, value, attn_mask=mask, **options)

    def in_shares(
        self, where: AttentionCall, k: Tensor, v: Tensor, mask: Tensor | None
    ) -> KeysInShares:
        """Begins a call of attention whose keys and values come one share after the other.

        Args:
            where: The call; its part is that of all shares together, and has no ghost.
            k: Keys of one of the shares; its number of tokens does not matter.
            v: Values, likewise.
            mask: Over the keys of the part, or over all keys.
        """
        if where.part.units is None:
            views = self._place_of_samples(where, k, v, mask) if self._keep else None
            self._note_synchronous(where)
            return KeysInShares(views, mask)
        buffer = self._buffer(where, k, v, k.shape)
        own = where.tokens.owned(where.part, where.block.num_text)
        mask = self._over_all_keys(where, buffer, own, own, mask)
        others = self._others(where, buffer)
        buffer.written[where.part] = self._step
        self._look(where, buffer)
        return KeysInShares((buffer.key, buffer.value), mask, others)

    def _place_of_samples(
        self, where: AttentionCall, k: Tensor, v: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Where to store what a synchronous step computes for all tokens of some samples."""
        # Of other samples there may be one more or less.
        num_samples = where.block.sizes[where.number].batch if where.part.samples else k.shape[0]
        buffer = self._buffer(where, k, v, (num_samples, *k.shape[1:]))
        # Only masks made from tokens will be needed; they have one row for all queries.
        if mask is not None and mask.shape[-1] == where.tokens.size and mask.shape[-2] == 1:
            self._store_mask(where, buffer, mask)
        buffer.written = dict.fromkeys(self._patches, self._step)
        samples = where.part.samples_of(num_samples)
        return buffer.key[samples], buffer.value[samples]

    def _store_mask(self, where: AttentionCall, buffer: _Buffer, mask: Tensor) -> None:
        if where.part.samples is None:
            buffer.mask = mask.clone()
            return
        num_samples = buffer.key.shape[0]
        if buffer.mask is None:
            buffer.mask = mask.new_zeros(num_samples, *mask.shape[1:])
        buffer.mask[where.part.samples_of(num_samples)] = mask  # the same for all, or one for each

    def _write(
        self, where: AttentionCall, k: Tensor, v: Tensor, mask: Tensor | None
    ) -> tuple[_Buffer, Tensor | None]:
        """Writes keys and values of a patch; returns the mask over all keys."""
        own, fed = where.tokens.owned(where.part, where.block.num_text), self._fed(where)
        if len(own) < len(fed):  # the ghost's key and value belong to nobody
            mine = self._mine(where, own, fed)
            k, v = mine.take(k, k.ndim - 2), mine.take(v, v.ndim - 2)
        buffer = self._buffer(where, k, v, k.shape)
        own.put(buffer.key, k.ndim - 2, k)
        own.put(buffer.value, v.ndim - 2, v)
        buffer.written[where.part] = self._step
        return buffer, self._over_all_keys(where, buffer, own, fed, mask)

    def _over_all_keys(
        self,
        where: AttentionCall,
        buffer: _Buffer,
        own: Selection,
        fed: Selection,
        mask: Tensor | None,
    ) -> Tensor | None:
        """A mask over all keys, of one over the keys of a patch."""
        if mask is None or not mask.shape[-1] == len(fed) != where.tokens.size:
            return mask
        if mask.shape[-2] != 1:
            raise LayoutError(
                f"{where.block.name} makes an attention mask of shape {tuple(mask.shape)} from its tokens; "
                "patches need one that is the same for all queries"
            )
        if len(own) < len(fed):
            mask = self._mine(where, own, fed).take(mask, mask.ndim - 1)
        if buffer.mask is None:
            visible = True if mask.dtype == torch.bool else 0.0
            buffer.mask = mask.new_full((*mask.shape[:-1], where.tokens.size), visible)
        mask = mask.expand(*buffer.mask.shape[:-1], mask.shape[-1])
        own.put(buffer.mask, buffer.mask.ndim - 1, mask)
        return buffer.mask

    def _buffer(self, where: AttentionCall, k: Tensor, v: Tensor, shape: Sequence[int]) -> _Buffer:
        place = (where.call, where.number)
        if place not in self._buffers:
            lead = (*shape[:-2], where.tokens.size)
            # Tokens of a head lie side by side, though most models make those of a token do: a patch reads all
            # keys once for every few of its queries, and on CPUs that takes up to a fifth less time this way.
            self._buffers[place] = _Buffer(
                k.new_zeros((*lead, k.shape[-1])), v.new_zeros((*lead, v.shape[-1]))
            )
        return self._buffers[place]

    def _fed(self, where: AttentionCall) -> Selection:
        return where.tokens.fed(where.part, where.block.num_text, self._ghost)

    def _mine(self, where: AttentionCall, own: Selection, fed: Selection) -> Selection:
        """Which of the fed tokens are no ghosts."""
        key = ("mine", where.part, id(where.tokens))
        if key not in self._visible:
            mask = torch.isin(fed.index, own.index)
            self._visible[key] = Selection(len(fed), mask.nonzero().squeeze(1))
        return self._visible[key]

    def _seen(self, where: AttentionCall, buffer: _Buffer) -> Selection:
        """Keys that have been written at least once."""
        key = ("seen", frozenset(buffer.written), id(where.tokens))
        if key not in self._visible:
            num_text = where.block.num_text
            index = [where.tokens.owned(part, num_text).index for part in buffer.written]
            self._visible[key] = Selection(where.tokens.size, torch.cat(index).sort().values)
        return self._visible[key]

    def _others(self, where: AttentionCall, buffer: _Buffer) -> Selection:
        """Keys of other patches, those that may be seen."""
        seen = frozenset(buffer.written) if self._hide_unseen else frozenset(self._patches)
        key = ("others", where.part, seen, id(where.tokens))
        if key not in self._visible:
            num_text = where.block.num_text
            index = [
                where.tokens.owned(part, num_text).index for part in seen if part != where.part
            ]
            none = torch.zeros(0, dtype=torch.long)
            self._visible[key] = Selection(
                where.tokens.size, torch.cat([none, *index]).sort().values
            )
        return self._visible[key]

    def _look(self, where: AttentionCall, buffer: _Buffer) -> None:
        """Checks and notes how old the keys are that a patch is about to read, if asked to."""
        if self._verify:
            self._check(where, buffer)
        if self._freshness is None:
            return
        ages: Counter[int | None] = Counter()
        for patch in self._patches:
            written = buffer.written.get(patch)
            tokens = len(where.tokens.owned(patch, where.block.num_text))
            ages[None if written is None else self._step - written] += tokens
        self._note(where, self._patches.index(where.part), ages)

    def _note_synchronous(self, where: AttentionCall) -> None:
        """Notes that tokens of all patches read what is computed with them; once for all samples."""
        first, _ = where.part.samples or (0, 1)
        if self._freshness is not None and first == 0:
            for reader in range(len(self._patches)):
                self._note(where, reader, {0: where.tokens.size})

    def _note(self, where: AttentionCall, reader: int, ages: Mapping[int | None, int]) -> None:
        assert self._freshness is not None
        self._freshness.note(self._step, where.block.name, "key_value", reader, ages)

    def _check(self, where: AttentionCall, buffer: _Buffer) -> None:
        here = self._patches.index(where.part)
        for m, patch in enumerate(self._patches):
            step = self._step if m <= here else self._step - 1
            expected = step if step >= 0 else None
            assert buffer.written.get(patch) == expected, (where.block.name, here, m, self._step)
