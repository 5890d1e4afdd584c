"""Linear layers of texts: their inputs stay the same over the steps of a request, so they are computed once.

Nothing is believed: a layer that may be constant keeps a copy of its input and its result, and as long as the
next step brings an equal input, it gives the same result. A first unequal one ends this for the request.

The tensor that was copied is equal to its copy for as long as nothing has been written to it, which its version
tells without a look at the device. So is one that follows from results given again, by functions of nothing
else (PixArt's projection of captions is two layers with an activation between them). Another one, such as
prompts that a closure concatenates in every step, is compared, for which the host waits: once for all layers
that are given it. That is C times cheaper than a layer. Tensors made under `torch.inference_mode` have no
version, so their layers are computed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_FOLLOWED = frozenset({F.gelu, F.silu, torch.Tensor.view})
"""Functions whose result follows from their first argument and plain ones."""


@dataclass(frozen=True)
class _ComparedInput:
    """What is known of a tensor's content for as long as nothing is written to it.

    Attributes:
        tensor: Held, so that no other has its id.
        version: When it was looked at.
        copy: What it was compared with, or copied to.
        equal: Whether it has the same content.
    """

    tensor: Tensor
    version: int
    copy: Tensor
    equal: bool = True

    def is_of(self, x: Tensor) -> bool:
        return self.tensor is x and self.version == x._version


class Constants:
    """Results of layers in one call of the model, over the steps of one request.

    Args:
        candidates: Layers, by position among all linear layers, whose input holds no image.
    """

    def __init__(self, candidates: frozenset[int]) -> None:
        self._candidates = set(candidates)
        self._stored: dict[int, tuple[Tensor, Tensor, Any]] = {}
        # Copied in this step, by id, as layers share inputs; compared last, by id of the copy.
        self._copied: dict[int, _ComparedInput] = {}
        self._compared: dict[int, _ComparedInput] = {}
        # What tensors of this step follow from, the same in every step; by id, with the version they had.
        self._origins: dict[int, tuple[weakref.ref[Tensor], int, Any]] = {}
        self.num_reused = 0

    def start_step(self) -> None:
        """Inputs of the step before are let go of, but for one next to each copy."""
        self._copied.clear()
        self._origins.clear()

    def follow(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Notes what follows from a result that is given again."""
        if self._origins and func in _FOLLOWED and args:
            origin = self._origin(args[0])
            if origin is not None:
                self._note(out, (func, origin, repr(args[1:]), repr(kwargs)))

    def get(self, layer: int, x: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        """The result of a layer, which is known by its position among linear layers."""
        if layer not in self._candidates or x.is_inference():
            return compute()
        if layer not in self._stored:
            seen = self._copied.get(id(x))
            if seen is None or not seen.is_of(x):
                seen = _ComparedInput(x, x._version, x.clone())
                self._copied[id(x)] = self._compared[id(seen.copy)] = seen
            origin, out = self._origin(x), compute()
            # The model may write into its own.
            self._stored[layer] = (seen.copy, out.clone(), origin)
            return self._note(out, layer)
        before, out, origin = self._stored[layer]
        if (origin is not None and origin == self._origin(x)) or self._same(x, before):
            self.num_reused += 1
            return self._note(out.clone(), layer)
        self._candidates.discard(layer)
        del self._stored[layer]
        return compute()

    def _note(self, x: Tensor, origin: Any) -> Tensor:
        if not x.is_inference():
            self._origins[id(x)] = (weakref.ref(x), x._version, origin)
        return x

    def _origin(self, x: Tensor) -> Any:
        if id(x) not in self._origins:
            return None
        known, version, origin = self._origins[id(x)]
        return origin if known() is x and version == x._version else None

    def _same(self, x: Tensor, before: Tensor) -> bool:
        seen = self._compared[id(before)]
        if not seen.is_of(x):
            same_form = (x.shape, x.dtype) == (before.shape, before.dtype)
            seen = _ComparedInput(x, x._version, before, same_form and torch.equal(x, before))
            self._compared[id(before)] = seen
        return seen.equal
