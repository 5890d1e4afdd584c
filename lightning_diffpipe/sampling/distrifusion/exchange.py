"""What bands send each other, in this step or for the next one.

Operators that see beyond the band are *calls*, identified by their position in the forward, so that shared
weights and functional calls need no names. A call hands in its own fresh data and gets those of other bands:

    synchronous step     one message for each call and peer, waited for at once
    displaced step       data of the step before, which arrived long ago; the own ones travel meanwhile

                 call     0   1   2   3      0   1   2   3      0   1   2   3
    synchronous, then     <>  <>  <>  <>     o   o   o   o      o   o   o   o       <>  exchange now
    two displaced steps                       '---|   '---|                         |   one message for a range
                                              read one step later

In displaced steps a message carries a *range*: consecutive calls of one kind, as many as `calls_per_message`.
The first pass through the model yields all calls and their shapes; offsets into messages follow from them.
A displaced step that no displaced step follows sends nothing, and a synchronous one keeps nothing. Data carry the
step they were made in, and reading any but the step before raises.

Linear layers of texts have the same input in all steps, so they are computed once (`Constants`).
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_diffpipe.comm.links import Incoming, Links, MessageKind, start_all_gather
from lightning_diffpipe.comm.packing import TensorShape, look_into, pack, packed_shape
from lightning_diffpipe.errors import GraphError
from lightning_diffpipe.sampling.statistics import Stopwatch

Shapes = Mapping[int, TensorShape]


@dataclass
class _Stale:
    """Data of one call, made at `step`: tensors, or parts of messages under way."""

    step: int
    tensors: dict[int, Tensor]
    parts: dict[int, tuple[_SharedMessage, int]] = field(default_factory=dict)

    def read(self) -> dict[int, Tensor]:
        self.tensors |= {peer: message.wait()[i] for peer, (message, i) in self.parts.items()}
        self.parts = {}
        return self.tensors


class _SharedMessage:
    """A range under way from one peer; waited for once, read by all its calls."""

    def __init__(
        self, incoming: Incoming, shapes: Sequence[TensorShape], stopwatch: Stopwatch
    ) -> None:
        self._incoming, self._shapes, self._stopwatch = incoming, shapes, stopwatch
        self._tensors: list[Tensor] | None = None

    def wait(self) -> list[Tensor]:
        if self._tensors is None:
            with self._stopwatch.waiting():
                self._tensors = look_into(self._incoming.wait(), self._shapes)
        return self._tensors


@dataclass
class _Range:
    """Consecutive calls of one kind and dtype that will share a message to each peer."""

    num_calls: int = 0
    outgoing: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    expected: dict[int, list[tuple[_Stale, TensorShape]]] = field(
        default_factory=lambda: defaultdict(list)
    )


class Exchange:
    """All exchanges of one call of the model in a denoising step, over the steps of one request.

    Attributes:
        age: Of what `swap` returned last, in denoising steps; None if that was nothing.
    """

    def __init__(self, links: Links, calls_per_message: int, stopwatch: Stopwatch) -> None:
        self.age: int | None = None
        self._links, self._calls_per_message = links, calls_per_message
        self._stopwatch = stopwatch
        self._stale: dict[int, _Stale] = {}
        self._signatures: dict[int, tuple[MessageKind, TensorShape]] = {}
        self._ranges: dict[tuple[MessageKind, torch.dtype], _Range] = {}
        self._step, self._synchronous, self._keep = -1, True, True

    def start_step(self, step: int, synchronous: bool, keep: bool) -> None:
        """Begins a step, to which calls belong from now on.

        Args:
            step: From 0.
            synchronous: Calls wait for the data of this step, and read nothing of the step before.
            keep: Whether what bands send each other in this step may be read by the step after it.
        """
        self._step, self._synchronous, self._keep = step, synchronous, keep
        if synchronous:
            self._stale.clear()

    def swap(
        self,
        kind: MessageKind,
        call: int,
        outgoing: Mapping[int, Tensor],
        expected: Shapes,
        own: TensorShape,
        fresh: bool = False,
    ) -> dict[int, Tensor] | None:
        """Hands in what other bands need, and gets what they handed in.

        Args:
            kind: What it is.
            call: Position of the operator in the forward.
            outgoing: By receiver.
            expected: By sender.
            own: Shape of the operator's input on this band, which must not change.
            fresh: Exchange the data of this step, whatever kind of step it is.

        Returns:
            By sender, of this step or of the step before; None in a displaced first step, which has none.

        Raises:
            GraphError: The forward took another course than in the first step.
        """
        self._check(kind, call, own)
        if fresh or self._synchronous:
            self.age = 0
            incoming = self._links.start_exchange(outgoing, expected, kind)
            with self._stopwatch.waiting():
                received = {peer: posted.wait() for peer, posted in incoming.items()}
            if not fresh and self._keep:
                self._stale[call] = _Stale(self._step, received)
            return received
        before = self._stale.pop(call, None)
        self.age = None if before is None else self._step - before.step
        if self._keep:
            self._stale[call] = self._later(kind, outgoing, expected)
        if before is None and self._step > 0:
            raise GraphError(
                f"call {call} ({kind}) of step {self._step} has no data of the step before"
            )
        if before is not None and before.step != self._step - 1:
            raise GraphError(
                f"call {call} ({kind}) of step {self._step} would read step {before.step}"
            )
        return None if before is None else before.read()

    def gather(self, mine: Tensor, shapes: Sequence[TensorShape]) -> list[Tensor]:
        """Gathers the predictions of all bands, in order, now."""
        wait = start_all_gather(self._links, mine, shapes, "prediction")
        with self._stopwatch.waiting():
            return wait()

    def stop_step(self) -> None:
        """Sends what has not filled a message."""
        for kind, dtype in list(self._ranges):
            self._send(kind, dtype)

    def _check(self, kind: MessageKind, call: int, own: TensorShape) -> None:
        signature = (kind, own)
        first = self._signatures.setdefault(call, signature)
        if first != signature:
            raise GraphError(
                f"call {call} of the model was {first[0]} of {tuple(first[1].shape)} in the first step, but "
                f"is {kind} of {tuple(own.shape)} in step {self._step}: bands need the same course of the "
                "forward in every step; use mode='synchronous'"
            )

    def _later(self, kind: MessageKind, outgoing: Mapping[int, Tensor], expected: Shapes) -> _Stale:
        stale = _Stale(self._step, {})
        dtype = next(x.dtype for x in (*outgoing.values(), *expected.values()))
        group = self._ranges.setdefault((kind, dtype), _Range())
        for peer, tensor in outgoing.items():
            group.outgoing[peer].append(tensor)
        for peer, shape in expected.items():
            group.expected[peer].append((stale, shape))
        group.num_calls += 1
        if group.num_calls == self._calls_per_message:
            self._send(kind, dtype)
        return stale

    def _send(self, kind: MessageKind, dtype: torch.dtype) -> None:
        """Sends a range, and posts the receives of the same range of the others."""
        group = self._ranges.pop((kind, dtype))
        shapes = {peer: [s for _, s in calls] for peer, calls in group.expected.items()}
        expected = {peer: packed_shape(of_peer) for peer, of_peer in shapes.items()}
        packed: dict[tuple[int, ...], Tensor] = {}  # most peers get the same
        outgoing = {}
        for peer, tensors in group.outgoing.items():
            parts = tuple(map(id, tensors))
            packed[parts] = outgoing[peer] = packed[parts] if parts in packed else pack(tensors)
        incoming = self._links.start_exchange(outgoing, expected, kind)
        for peer, calls in group.expected.items():
            message = _SharedMessage(incoming[peer], shapes[peer], self._stopwatch)
            for i, (stale, _) in enumerate(calls):
                stale.parts[peer] = (message, i)


_FOLLOWED = frozenset({F.gelu, F.silu, torch.Tensor.view})
"""Functions whose result follows from their first argument and plain ones."""


@dataclass(frozen=True)
class _ComparedInput:
    """What is known of a tensor's content, next to a copy, for as long as nothing is written to it."""

    tensor: Tensor  # so that no other has its id
    version: int
    copy: Tensor
    equal: bool = True

    def is_of(self, x: Tensor) -> bool:
        return self.tensor is x and self.version == x._version


class Constants:
    """Results of linear layers of texts in one call of the model, over the steps of one request.

    Nothing is believed: a layer that may be constant keeps a copy of its input and its result, and as long as the
    next step brings an equal input, it gives the same result. A first unequal one ends this for the request.

    The tensor that was copied is equal to its copy for as long as nothing has been written to it, which its version
    tells without a look at the device. So is one that follows from results given again, by functions of nothing
    else (PixArt's projection of captions is two layers with an activation between them). Another one, such as
    prompts that a closure concatenates in every step, is compared, for which the host waits: once for all layers
    that are given it. That is C times cheaper than a layer. Tensors made under `torch.inference_mode` have no
    version, so their layers are computed.

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
        """Returns the result of a layer, which is known by its position among linear layers."""
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
