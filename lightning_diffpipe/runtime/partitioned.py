"""One callable, cut into stages for every size of microbatch it is called with.

Which layers a step calls is known from one probe; shapes are not: the last batch of an epoch is smaller,
images come in several sizes. A signature that was not seen before is probed again and cut at the same
places. It is never planned again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lightning_diffpipe.errors import GraphError
from lightning_diffpipe.graph.cut import Cut, cut, uncut
from lightning_diffpipe.graph.frozen import FrozenView
from lightning_diffpipe.graph.interception import Interception
from lightning_diffpipe.graph.layer import LayerGraph, batch_signature
from lightning_diffpipe.graph.layer_run import DummyMemory, Memo
from lightning_diffpipe.graph.probe import reprobe, require_unchanged
from lightning_diffpipe.graph.samples import Form, OwnForm
from lightning_diffpipe.graph.view import StageView
from lightning_diffpipe.planning.schedule import Placement
from lightning_diffpipe.runtime.stage import PartitionedStep

Step = Callable[..., Any]
"""The user's step: module, batch and further arguments to loss."""


class PartitionedStepCache:
    """One cut step for each signature of a microbatch.

    Args:
        root: The module.
        step: The user's step.
        graph: The graph that was planned with.
        positions: Where its path is cut.
        placement: Ranks of the stages.
        local_rank: This rank's position.
        interception: The installed wrappers.
        device: Where this rank computes.
        known: Graphs of other signatures, made while all parameters had values.
    """

    def __init__(
        self,
        root: nn.Module,
        step: Step,
        graph: LayerGraph,
        positions: Sequence[int],
        placement: Placement,
        local_rank: int,
        interception: Interception,
        device: torch.device,
        known: Sequence[LayerGraph] = (),
    ) -> None:
        self._root = root
        self._step = step
        self._graph = graph
        self._positions = tuple(positions)
        self._stages = placement.stages_of(local_rank)
        self._placement = placement
        self._interception = interception
        self._made: dict[str, PartitionedStep] = {}
        self._memo: Memo | None = None
        self._dummies = DummyMemory()
        if device.type == "cpu":  # the probe saw host tensors, whose types autocast leaves alone
            self._made[graph.signature] = self._partition(graph)
        self._made |= {other.signature: self._partition(other) for other in known}

    @property
    def needs_values(self) -> bool:
        """Whether the step can be traced on values only, of which this rank holds a part."""
        return self._graph.needs_values

    @property
    def form(self) -> Form | OwnForm | None:
        """That of the batch that was planned with."""
        return self._graph.form

    def of(self, microbatch: Any) -> PartitionedStep:
        """The cut step for a microbatch; probes sizes that were not seen before.

        Raises:
            GraphError: With these sizes the step calls other layers, or it needs values that are not here.
        """
        key = batch_signature(microbatch)
        if key not in self._made:
            self._made[key] = self._partition(self._probed(key, microbatch))
        return self._made[key]

    def _probed(self, key: str, microbatch: Any) -> LayerGraph:
        try:
            return reprobe(self._root, self._step, microbatch, self._graph)
        except Exception as error:  # of the user's own code, say, which finds NaN
            if not self.needs_values:
                raise
            if isinstance(error, torch.OutOfMemoryError):
                raise GraphError(
                    f"microbatches {key} cannot be probed: the step needs values, so the whole model is run for "
                    f"that with all its activations, and memory ran out: {error}. Read no values in the step "
                    "(.item(), .nonzero(), `if tensor:`), so that nothing is run, or use smaller microbatches"
                ) from error
            raise GraphError(
                f"microbatches {key} were not probed before training, and cannot be now: the step needs values, "
                f"but parameters of other ranks are NaN here, and it ended with {type(error).__name__}: {error}. "
                "Let all batches have the size of the first (drop_last=True in the data loader), or read no "
                "values in the step (.item(), `if tensor:`)"
            ) from error

    def require_unchanged(self, microbatch: Any, arguments: tuple[Any, ...]) -> None:
        """Traces a microbatch again and compares with how it was cut.

        Raises:
            GraphError: The step has changed since; says what.
        """

        def step(module: nn.Module, batch: Any) -> Any:
            return self._step(module, batch, *arguments)

        made = self._made.get(batch_signature(microbatch))
        require_unchanged(self._root, step, microbatch, made.graph if made else self._graph)

    def remember(self, memo: Memo | None) -> None:
        """From now on frozen layers are called through a memo; None: as they are."""
        self._memo = memo
        for partitioned in self._made.values():
            partitioned.remember(memo)

    def _partition(self, graph: LayerGraph) -> PartitionedStep:
        pieces = cut_for(graph, self._positions, self._placement)
        root, interception, memory = self._root, self._interception, self._dummies
        views = {
            stage: StageView(root, graph, pieces.stages[stage], interception, memory)
            for stage in self._stages
        }
        frozen = (
            FrozenView(root, graph, pieces.frozen, interception, memory)
            if pieces.frozen.layers
            else None
        )
        partitioned = PartitionedStep(graph, pieces, views, frozen)
        partitioned.remember(self._memo)
        return partitioned


def cut_for(graph: LayerGraph, positions: Sequence[int], placement: Placement) -> Cut:
    """Cuts a graph; a rank alone runs frozen layers where they are called, not in advance."""
    pieces = cut(graph, positions, placement.stage_ranks)
    if placement.num_ranks > 1:
        return pieces
    nothing = replace(pieces.frozen, layers=frozenset(), sent=(), parameters=frozenset())
    return replace(pieces, frozen=nothing, stages=(uncut(graph),))
