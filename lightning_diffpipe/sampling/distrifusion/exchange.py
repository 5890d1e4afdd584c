"""Messages between bands, for this step or for the next one.

Operators that see beyond the band are *calls*, identified by their position in the forward, so that shared
weights and functional calls need no names. A call passes on its own fresh data and gets those of other bands:

    synchronous step     one message for each call and peer, waited for at once
    displaced step       data of the step before, which arrived long ago; the own ones travel meanwhile

                 call     0   1   2   3      0   1   2   3      0   1   2   3
    synchronous, then     <>  <>  <>  <>     o   o   o   o      o   o   o   o       <>  exchange now
    two displaced steps                       '---|   '---|                         |   one message for a range
                                              read one step later

In displaced steps a message carries a *range*: consecutive calls of one kind, as many as `calls_per_message`.
The first pass through the model yields all calls and their shapes; offsets into messages follow from them.
A displaced step that no displaced step follows sends nothing, and a synchronous one keeps nothing. Data carry the
step they were made in, and reading any but the step before raises, unless a step cache may skip steps.

What is read are views of the whole message, which is freed once the last call of its range is over. Only moments
are stored longer, for two more steps, and those of all calls of a range; their messages hold nothing else.

Modules that are given texts only have the same input in all steps, so they run once (`Constants`).
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from lightning_diffpipe.comm.links import Links, MessageKind, exchange, start_all_gather
from lightning_diffpipe.comm.packing import TensorShape, pack, packed_shape, unpack
from lightning_diffpipe.errors import GraphError

Shapes = Mapping[int, TensorShape]


Read = Callable[[], dict[int, Tensor]]
"""Returns the data of others by sender, waiting for what is still under way."""


class _Range:
    """Consecutive calls of one kind and dtype, which share a message to each peer."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._outgoing: dict[int, list[Tensor]] = defaultdict(list)
        self._expected: dict[int, list[TensorShape]] = defaultdict(list)

    def add(self, outgoing: Mapping[int, Tensor], expected: Shapes) -> Read:
        """Adds a call, with its data for each peer; returns a function that reads the peers' data of it."""
        self.num_calls += 1
        for peer, tensor in outgoing.items():
            self._outgoing[peer].append(tensor)
        places = {peer: len(self._expected[peer]) for peer in expected}
        for peer, shape in expected.items():
            self._expected[peer].append(shape)
        return lambda: {peer: self._received(peer)[place] for peer, place in places.items()}

    def send(self, links: Links, kind: MessageKind) -> None:
        """Sends the range, and posts the receives of the same range of the others."""
        shapes = self._expected
        packed: dict[tuple[int, ...], Tensor] = {}  # most peers get the same
        outgoing = {}
        for peer, tensors in self._outgoing.items():
            parts = tuple(map(id, tensors))
            packed[parts] = outgoing[peer] = packed[parts] if parts in packed else pack(tensors)
        expected = {peer: packed_shape(of_peer) for peer, of_peer in shapes.items()}
        incoming = links.start_exchange(outgoing, expected, kind)
        self._outgoing.clear()

        @functools.cache
        def received(peer: int) -> list[Tensor]:
            return unpack(incoming[peer].wait(), shapes[peer], copy=False)

        self._received = received


class Exchange:
    """All exchanges of one call of the model in a denoising step, over the steps of one request.

    Args:
        calls_per_message: Calls of one kind that share a message, in displaced steps.
        skips: Whether all ranks may skip a call in some steps; then the data of its last step is read.
    """

    def __init__(self, links: Links, calls_per_message: int, skips: bool = False) -> None:
        self._links, self._calls_per_message, self._skips = links, calls_per_message, skips
        self._stale: dict[int, tuple[int, Read]] = {}  # by call: of which step
        self._signatures: dict[int, tuple[MessageKind, TensorShape]] = {}
        self._ranges: dict[tuple[MessageKind, torch.dtype], _Range] = {}
        self._step, self._synchronous, self._keep = -1, True, True

    def start_step(self, step: int, synchronous: bool, keep: bool) -> None:
        """Begins a step, to which calls belong from now on.

        Args:
            step: From 0.
            synchronous: Calls wait for the data of this step, and read nothing of the step before.
            keep: Whether the step after this one may read data that bands send in this one.
        """
        self._step, self._synchronous, self._keep = step, synchronous, keep
        if synchronous and not self._skips:
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
        """Sends the data that other bands need, and returns theirs.

        Args:
            kind: Kind of the data.
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
            received = exchange(self._links, outgoing, expected, kind)
            if not fresh and self._keep:
                self._stale[call] = self._step, lambda: received
            return received
        sent_in, read = self._stale.pop(call, (None, dict[int, Tensor]))
        if self._keep:
            self._stale[call] = self._step, self._later(kind, outgoing, expected)
        if sent_in is None:
            if self._step > 0:
                raise GraphError(
                    f"call {call} ({kind}) of step {self._step} has no data of the step before"
                )
            return None
        if sent_in != self._step - 1 and not self._skips:
            raise GraphError(f"call {call} ({kind}) of step {self._step} would read step {sent_in}")
        return read()

    def gather(self, mine: Tensor, shapes: Sequence[TensorShape]) -> list[Tensor]:
        """Gathers the predictions of all bands, in order, now."""
        return start_all_gather(self._links, mine, shapes, "prediction")()

    def drain(self) -> None:
        """Waits for what others sent for a step that was skipped."""
        while self._stale:
            _, (_, read) = self._stale.popitem()
            read()

    def stop_step(self) -> None:
        """Sends data that have not filled a message."""
        for (kind, _), unfilled in self._ranges.items():
            unfilled.send(self._links, kind)
        self._ranges.clear()

    def _check(self, kind: MessageKind, call: int, own: TensorShape) -> None:
        signature = (kind, own)
        first = self._signatures.setdefault(call, signature)
        if first != signature:
            raise GraphError(
                f"call {call} of the model was {first[0]} of {tuple(first[1].shape)} in the first step, but "
                f"is {kind} of {tuple(own.shape)} in step {self._step}: bands need the same course of the "
                "forward in every step; sample it in one process"
            )

    def _later(self, kind: MessageKind, outgoing: Mapping[int, Tensor], expected: Shapes) -> Read:
        """Adds a call to the message of its range, which is sent once it is full; returns how to read it."""
        dtype = next(x.dtype for x in (*outgoing.values(), *expected.values()))
        group = self._ranges.setdefault((kind, dtype), _Range())
        read = group.add(outgoing, expected)
        if group.num_calls == self._calls_per_message:
            self._ranges.pop((kind, dtype)).send(self._links, kind)
        return read


class Constants:
    """Results of modules that are given a text only, in one call of the model, over the steps of one request.

    An input is copied, and as long as the next step brings an equal one, the stored result is returned; a first
    unequal one ends this for the request. A tensor that has not been written to since, which its version tells
    without a look at the device, is equal; so is a stored result. Others, such as prompts that a closure
    concatenates in every step, are compared, for which the host waits: once for all modules that are given it.
    Tensors made under `torch.inference_mode` have no version, so modules that are given these run.

    Args:
        candidates: Names of modules.
    """

    def __init__(self, candidates: frozenset[str]) -> None:
        self._candidates = set(candidates)
        self._stored: dict[str, tuple[Tensor, Tensor, tuple[int, int]]] = {}

    def get(self, name: str, x: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        """Returns the result of a module for its only tensor."""
        if name not in self._candidates or x.is_inference():
            return compute()
        if name in self._stored:
            given, out, versions = self._stored.pop(name)
            if not _is_whole_view(x, given) or x._version != versions[0]:
                self._candidates.discard(name)
                return compute()
            if out._version != versions[1]:  # the model has written into what it got
                out = compute()
        else:
            out = compute()
        if not out.is_inference():
            self._stored[name] = x, out, (x._version, out._version)
        return out


def _is_whole_view(x: Tensor, other: Tensor) -> bool:
    """Returns whether a tensor is another one, or a view of all of it, with which it shares its version."""
    # Another tensor over the same memory, as `x.data` is, has a version of its own.
    owners = [y if y._base is None else y._base for y in (x, other)]
    places = [(y.data_ptr(), y.stride(), y.shape, y.dtype) for y in (x, other)]
    return owners[0] is owners[1] and places[0] == places[1]
