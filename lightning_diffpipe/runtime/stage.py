"""One microbatch through one stage: forward, backward, and what crosses its boundaries.

A stage runs the user's own callable through a `StageView`: foreign layers are stubs, its own layers
compute. This file turns views into the two operations a schedule knows, and boundaries into messages:

    forward   received tensors (from stage s-1) + frozen results  ->  tensors for stage s+1, or the loss
    backward  gradients of the tensors sent (from stage s+1)      ->  gradients of the tensors received

Tensors that a later stage of the same rank reads are passed to it, and their gradients passed back. What lives
between instructions is stored in a `Stash`: one leaves what a later one takes away, so that it is empty at the end
of a step, and what is left over is a bug in the schedule.

What the pipeline needs to know about a callable depends on the sizes of its microbatches, so there is
one `PartitionedStep` for each signature of a microbatch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from lightning_diffpipe.comm.packing import MessageLayout
from lightning_diffpipe.errors import BoundaryError, ScheduleError
from lightning_diffpipe.graph.cut import Cut
from lightning_diffpipe.graph.frozen import FrozenView
from lightning_diffpipe.graph.layer import LayerGraph, TensorKey
from lightning_diffpipe.graph.step import StepCall, logged_values
from lightning_diffpipe.graph.view import Memo, StageRun, StageView
from lightning_diffpipe.planning.schedule import Placement


@dataclass(frozen=True)
class TensorMessage:
    """Tensors that travel together, and their places in the buffer that is sent."""

    keys: tuple[TensorKey, ...]
    layout: MessageLayout

    @classmethod
    def of(cls, graph: LayerGraph, keys: tuple[TensorKey, ...]) -> TensorMessage:
        """Returns the message of outputs of a graph's layers."""
        return cls(keys, MessageLayout.of([*map(graph.spec, keys)]))

    def pack(self, tensors: Mapping[TensorKey, Tensor], device: torch.device) -> Tensor:
        """Returns the buffer, `(num_bytes,)` of `uint8` on the device; see `MessageLayout.pack`."""
        return self.layout.pack([tensors[key] for key in self.keys], device)

    def unpack(self, buffer: Tensor) -> dict[TensorKey, Tensor]:
        """Views the tensors in a buffer that was received."""
        return dict(zip(self.keys, self.layout.unpack(buffer), strict=True))


@dataclass
class PartitionedStep:
    """A callable cut into stages, for microbatches of one signature.

    Attributes:
        cut: Layers of each stage, and tensors that cross its boundaries.
        frozen_view: The frozen part; without layers if this call sequence has no frozen one.
        placement: Ranks of the stages: those planned, or with more before them for a sequence with more calls.
        tail_view: The code after the last layer alone, where the losses of several chains are put together.
    """

    graph: LayerGraph
    cut: Cut
    stage_views: dict[int, StageView]
    frozen_view: FrozenView
    placement: Placement
    tail_view: StageView | None = None

    @cached_property
    def first_stage(self) -> int:
        """The first stage with layers, or the last one: those before belong to passes that the step leaves out."""
        last = len(self.cut.stages) - 1
        return next((s.index for s in self.cut.stages if s.layers), last)

    @cached_property
    def returned(self) -> tuple[tuple[int, str], ...]:
        """Layers to whose outputs gradients come back from other stages, with their names; equal on all ranks."""
        stages = self.cut.stages
        sent = {key[0] for s in stages for key in s.sent_gradients if key[0] in s.layers}
        return tuple((index, self.graph.layers[index].name) for index in sorted(sent))

    def remember(self, memo: Memo | None) -> None:
        """Calls frozen layers through a memo from now on, or through none."""
        for view in (*self.stage_views.values(), self.frozen_view):
            view.remember(memo)

    @cached_property
    def messages(self) -> dict[str, tuple[TensorMessage, ...]]:
        """Messages that each stage receives, by their kind and then by stage.

        An `"activation"` comes from the stage before, a `"gradient"` from the stage after it, for the activations
        sent there; the last stage receives none.
        """
        stages = self.cut.stages
        tensors = {
            "activation": [stage.message for stage in stages],
            "gradient": [*(stage.message_gradients for stage in stages[1:]), ()],
        }
        message = partial(TensorMessage.of, self.graph)
        return {kind: tuple(map(message, of_stages)) for kind, of_stages in tensors.items()}


@dataclass
class MicrobatchWork:
    """A microbatch of a step, with all it needs to run.

    Attributes:
        index: Number of the microbatch in the step.
        call: Runs the user's step on this microbatch; takes nothing, returns the loss.
        loss_scale: The loss is multiplied by it before the backward: its share of the samples; if steps return
            weights, whose sum is known later, what is left of it, and the loss counts with its weight.
        frozen: Outputs of frozen layers that this rank's stages read; filled by the exchange.
        loss: Unscaled loss, on the last stage.
        weight: Weight in the mean over microbatches, on the last stage: samples, or what the step said.
        logged: Metrics that the user's step logged on the last stage, as (method, args, kwargs).
        ends: With several chains: what the loss reads of each, by its last stage.
        reached: Layers to whose outputs a gradient came from what reads them on this rank.
        batch: Number of the batch since the pipeline was empty, where batches follow each other without a flush.
    """

    index: int
    call: StepCall
    seed: int
    partitioned: PartitionedStep
    num_samples: int
    loss_scale: float = 1.0
    frozen: dict[int, dict[TensorKey, Tensor]] = field(default_factory=dict)
    loss: Tensor | None = None
    weight: Tensor | float = 0.0
    logged: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    ends: dict[int, dict[TensorKey, Tensor]] = field(default_factory=dict)
    reached: set[int] = field(default_factory=set)
    batch: int = 0


class Stash:
    """Values stored from one instruction to another."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, int, int], Any] = {}  # by what, stage and microbatch

    def put(self, what: str, stage: int, microbatch: int, value: Any) -> None:
        """Stores a value.

        Raises:
            ScheduleError: The same thing is stored already: an instruction ran twice.
        """
        key = what, stage, microbatch
        if key in self._values:
            raise ScheduleError(
                f"{what} of stage {stage}, microbatch {microbatch} was made twice in one step"
            )
        self._values[key] = value

    def gather(
        self,
        what: str,
        stage: int,
        microbatch: int,
        values: dict[Any, Any],
        add: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        """Stores entries of a dict that comes in several parts; those that come again are added up."""
        stored = self._values.setdefault((what, stage, microbatch), {})
        for key, value in values.items():
            stored[key] = add(stored[key], value) if add and key in stored else value

    def take(self, what: str, stage: int, microbatch: int) -> Any:
        """Returns a value and forgets it.

        Raises:
            ScheduleError: Nothing is stored: the instruction that makes it has not run.
        """
        key = what, stage, microbatch
        if key not in self._values:
            raise ScheduleError(
                f"{what} of stage {stage}, microbatch {microbatch} is needed before it was made; "
                "the program of this rank is out of order"
            )
        return self._values.pop(key)

    def check_empty(self) -> None:
        """Checks that every value found its taker.

        Raises:
            ScheduleError: Something is left.
        """
        if self._values:
            left = ", ".join(f"{what} {stage}/{number}" for what, stage, number in self._values)
            raise ScheduleError(f"left over at the end of the step: {left}")

    def clear(self) -> None:
        """Drops everything, after an error."""
        self._values.clear()


@dataclass(eq=False)
class StageRunner:
    """Runs forwards and backwards of the stages one rank holds.

    Attributes:
        stash: Received and produced tensors between instructions.
        weights_of: Inside, weights are those with which a microbatch goes through forward and backward; the only
            ones, unless they have versions.
    """

    stash: Stash
    device: torch.device
    check_finite: bool = False
    weights_of: Callable[[MicrobatchWork], AbstractContextManager[None]] = field(
        default=lambda work: contextlib.nullcontext()
    )

    def forward(self, stage: int, work: MicrobatchWork) -> None:
        """Runs one microbatch through one stage; its outputs stay attached for the backward."""
        with self.weights_of(work):
            self.stash.put("run", stage, work.index, self._run(stage, work))

    def forward_no_grad(self, stage: int, work: MicrobatchWork) -> None:
        """Runs one microbatch through a stage to which no gradient comes back; keeps what others read."""
        with torch.no_grad():
            self._run(stage, work)

    def _run(self, stage: int, work: MicrobatchWork) -> StageRun:
        cut = work.partitioned.cut
        view = work.partitioned.stage_views[stage]
        run = self._walk(view, stage, work, self._received(stage, work))
        if not cut.stages[stage].sees_all:
            work.ends[stage] = self._of(run, cut.stages[stage].sent)
        if cut.stages[stage].is_last:
            return run
        if message := cut.stages[stage + 1].message:
            self.stash.put("sent", stage + 1, work.index, self._of(run, message))
        for later in cut.stages[stage + 1 :]:
            if stage in later.local:
                tensors = self._of(run, later.local[stage])
                self.stash.gather("local", later.index, work.index, tensors)
        return run

    def report(self, stage: int, work: MicrobatchWork) -> None:
        """Runs the code after the last layer again, on what all chains gave, for its values."""
        view, ends = work.partitioned.tail_view, {}
        assert view is not None, "the last chain ends on another rank"
        for tensors in work.ends.values():
            ends |= tensors
        work.ends.clear()
        with torch.no_grad():
            self._walk(view, stage, work, ends)

    @staticmethod
    def _walk(
        view: StageView, stage: int, work: MicrobatchWork, received: Mapping[TensorKey, Tensor]
    ) -> StageRun:
        """Runs the step as a view sees it, and notes its loss and what it logs, if these are real there."""
        root = view.root
        run = view.forward(
            work.call,
            seed=work.seed,
            received={**received, **work.frozen.get(stage, {})},
            log=lambda *called: work.logged.append((called[0], *logged_values(root, called[1:]))),
        )
        if view.cut.is_last and view.cut.sees_all:
            assert run.loss is not None
            work.loss = run.loss.detach()
            work.weight = work.num_samples if run.weight is None else run.weight
        return run

    @staticmethod
    def _of(run: StageRun, keys: tuple[TensorKey, ...]) -> dict[TensorKey, Tensor]:
        return {key: run.outputs[key].detach() for key in keys}

    def backward(self, stage: int, work: MicrobatchWork) -> None:
        """Backpropagates one microbatch through one stage and frees its activations."""
        run: StageRun = self.stash.take("run", stage, work.index)
        with self.weights_of(work):
            upstream = run.backward(self._gradients(stage, work), work.loss_scale)
        work.reached |= run.reached
        self._keep_upstream(stage, work, upstream)

    def backward_input(self, stage: int, work: MicrobatchWork) -> None:
        """Runs the half of a backward that the stage before waits for."""
        run: StageRun = self.stash.take("run", stage, work.index)
        upstream = run.backward_input(self._gradients(stage, work), work.loss_scale)
        self._keep_upstream(stage, work, upstream)
        self.stash.put("weights", stage, work.index, run)

    def backward_weight(self, stage: int, work: MicrobatchWork) -> None:
        """Runs the half that no stage waits for, and frees the activations."""
        run: StageRun = self.stash.take("weights", stage, work.index)
        run.backward_weight()
        work.reached |= run.reached

    def _keep_upstream(
        self, stage: int, work: MicrobatchWork, upstream: dict[TensorKey, Tensor]
    ) -> None:
        cut = work.partitioned.cut.stages[stage]
        if keys := cut.message_gradients:
            of_message = {key: upstream[key] for key in keys}
            self.stash.put("upstream", stage - 1, work.index, of_message)
        for before, keys in cut.local_gradients.items():
            returned = {key: upstream[key] for key in keys}
            if returned:
                self.stash.gather("returned", before, work.index, returned, torch.add)

    def outgoing_buffer(self, kind: str, stage: int, work: MicrobatchWork) -> Tensor:
        """Returns the message into `stage`: what the stage before it produced, or gradients of what it sent."""
        what = "sent" if kind == "activation" else "upstream"
        message = work.partitioned.messages[kind][stage]
        tensors = self._taken(what, stage, work, message.keys)
        self._check(kind, stage, work, tensors)
        return message.pack(tensors, self.device)

    def incoming_buffer(self, kind: str, stage: int, work: MicrobatchWork) -> Tensor:
        """Returns an empty buffer of the right size for a message."""
        return work.partitioned.messages[kind][stage].layout.empty(self.device)

    def unpack(self, kind: str, stage: int, work: MicrobatchWork, buffer: Tensor) -> None:
        """Unpacks a received message, for the instruction that will need it."""
        message = work.partitioned.messages[kind][stage]
        if message.keys:
            self.stash.put(kind, stage, work.index, message.unpack(buffer))

    def _received(self, stage: int, work: MicrobatchWork) -> dict[TensorKey, Tensor]:
        """Returns what a stage gets from earlier ones, of its own rank and of others."""
        cut = work.partitioned.cut.stages[stage]
        message = self._taken("activation", stage, work, cut.message)
        return {**message, **self._taken("local", stage, work, cut.local)}

    def _gradients(self, stage: int, work: MicrobatchWork) -> dict[TensorKey, Tensor]:
        """Returns gradients of what a stage gave to later ones."""
        partitioned = work.partitioned
        message = partitioned.messages["gradient"][stage]
        gradients = self._taken("gradient", stage, work, message.keys)
        later = partitioned.cut.stages[stage + 1 :]
        returns = any(cut.local_gradients.get(stage) for cut in later)
        for key, returned in self._taken("returned", stage, work, returns).items():
            gradients[key] = gradients[key] + returned if key in gradients else returned
        return gradients

    def _taken(
        self, what: str, stage: int, work: MicrobatchWork, expected: object
    ) -> dict[TensorKey, Tensor]:
        """Returns what the stash has; nothing where nothing is expected."""
        tensors: dict[TensorKey, Tensor] = {}
        return self.stash.take(what, stage, work.index) if expected else tensors

    def _check(
        self, kind: str, stage: int, work: MicrobatchWork, tensors: Mapping[TensorKey, Tensor]
    ) -> None:
        if not self.check_finite:
            return
        for key, tensor in tensors.items():
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                where = f"into stage {stage}" if kind == "activation" else f"back to stage {stage}"
                name = work.partitioned.graph.layers[key[0]].name
                of = "output" if kind == "activation" else "gradient of the output"
                count = int((~torch.isfinite(tensor)).sum())
                raise BoundaryError(
                    f"the {of} of layer {name!r} is not finite on its way {where} "
                    f"({count} of {tensor.numel()} values, microbatch {work.index}); "
                    "check the learning rate and the precision, or clip gradients. A step that reads more than "
                    "when it was probed, from some epoch on, reads NaN, too"
                )
