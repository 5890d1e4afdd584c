"""One callable, cut into stages for every size of microbatch and every call sequence.

One probe does not see all: the last batch of an epoch is smaller, images come in several sizes, and coins choose
which layers a step calls. A signature, or a call sequence, that was not seen before is probed then, and cut so
that every layer runs on a rank that holds its weights: weights never move. A sequence with more calls than the
planned one gets stages before it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from lightning_diffpipe.errors import GraphError
from lightning_diffpipe.graph.call_sequences import (
    MOST_SEQUENCES,
    CallSequence,
    CallSequences,
    CallSequenceView,
    names_of,
    probed_sequence,
    too_many_sequences,
)
from lightning_diffpipe.graph.chains import without_gradient
from lightning_diffpipe.graph.cut import Cut, cut, tail, uncut
from lightning_diffpipe.graph.frozen import FrozenView
from lightning_diffpipe.graph.interception import Interception
from lightning_diffpipe.graph.layer import LayerGraph, first_difference, not_repeated
from lightning_diffpipe.graph.probe import reprobe, require_unchanged
from lightning_diffpipe.graph.side_effects import generators_preserved
from lightning_diffpipe.graph.step import BatchSpec, ModuleSplit, Step, StepCall, batch_signature
from lightning_diffpipe.graph.streaming import WeightStream
from lightning_diffpipe.graph.trial import untouched
from lightning_diffpipe.graph.view import DummyMemory, Memo, StageView
from lightning_diffpipe.planning.schedule import Placement
from lightning_diffpipe.runtime.stage import PartitionedStep


@dataclass(eq=False)
class PartitionedStepCache:
    """One cut step for each signature of a microbatch.

    Attributes:
        positions: Positions of its path before which it is cut.
        known: Graphs of other signatures and call sequences, made while all parameters had values.
        trials: Findings of trials of the step before training: the planned call sequence, whether microbatches of
            one batch may have several (else the first stands for all), and, if there were some, that the code
            after the last layer runs on NaN.
        sequences: Known call sequences, if there are several.
        recomputed: See `View`.
        stream: See `View`; None if the plan streams no layer of this rank.
        frozen_values: What frozen layers get in the latest batch; of microbatches whose sequence was determined.
    """

    root: nn.Module
    step: Step
    graph: LayerGraph
    positions: Sequence[int]
    placement: Placement
    local_rank: int
    interception: Interception
    device: torch.device
    known: Sequence[LayerGraph] = ()
    trials: CallSequences = field(default_factory=CallSequences)
    sequences: Sequence[CallSequence] = ()
    recomputed: frozenset[str] = frozenset()
    stream: WeightStream | None = None

    def __post_init__(self) -> None:
        planned = self.trials.widest
        self._planned_step = planned.of_step(self.step) if planned else self.step
        bounds = [0, *self.positions, len(self.graph.path)]
        stage_of = [s for s, (a, b) in enumerate(pairwise(bounds)) for _ in range(a, b)]
        self._planned = PlacedCalls(self.graph.path_names, tuple(stage_of), self.placement)
        # By signature: a shape may decide what is called, too.
        self._sequences: dict[str, list[CallSequence]] = {}
        self._first: tuple[str, CallSequence] | None = None
        self._graphs: dict[str, dict[CallSequence | tuple[str, ...], LayerGraph]] = {}
        self._views: dict[str, CallSequenceView] = {}
        self._made: dict[tuple[str, CallSequence], PartitionedStep] = {}
        self._cut_steps: dict[tuple[str, PlacedCalls], PartitionedStep] = {}
        self._memo: Memo | None = None
        self.frozen_values: list[Any] = []
        # A rank with all layers can run whatever is called, and determines sequences only where runs may differ:
        # for a step that has not varied yet that would be a second run of its code for nothing.
        trials, is_alone = self.trials, self.placement.num_ranks == 1
        self._only_runs = is_alone and len(trials.replays) == 1 and not trials.throws_coins
        self._dummies = DummyMemory()
        # The probe saw host tensors, whose types autocast leaves alone.
        if self.device.type == "cpu":
            self._add(self.graph)
        for other in self.known:
            self._add(other)

    def _add(self, graph: LayerGraph, sequence: CallSequence | None = None) -> LayerGraph:
        graphs = self._graphs.setdefault(graph.signature, {})
        same = (earlier for earlier in graphs.values() if earlier.digest == graph.digest)
        return graphs.setdefault(sequence or graph.layer_names, next(same, graph))

    @property
    def needs_values(self) -> bool:
        """Whether the step can be traced on values only, of which this rank holds a part."""
        return self.graph.needs_values

    @property
    def batch_spec(self) -> BatchSpec | ModuleSplit | None:
        """Structure of the batch that was planned with."""
        return self.graph.batch_spec

    def of(
        self, microbatch: Any, seed: int, arguments: tuple[Any, ...] = (), is_first: bool = True
    ) -> PartitionedStep:
        """Returns the cut step for a microbatch; probes sizes and call sequences that were not seen before.

        Args:
            microbatch: A part of a batch.
            seed: Seed of what the step samples between layers for it, coins above all.
            arguments: Further arguments of the step.
            is_first: Whether it is the first of its batch.

        Raises:
            GraphError: With these sizes the step calls layers that nobody holds, or needs values of other ranks.
        """
        key = batch_signature(microbatch)
        if key not in self._graphs:
            self._add(self._probed(key, microbatch, self._planned_step))
        graph = next(iter(self._graphs[key].values()))
        if key not in self._views:
            alike = graph.layer_names == self.graph.layer_names
            self._sequences[key] = list(self.sequences) if alike else []
            self._views[key] = CallSequenceView(
                self.root, graph, self.interception, self._dummies,
                bears_nan=bool(self.trials.replays), by_reads=self.trials.by_reads,
            )  # fmt: skip
        view, self.frozen_values = self._views[key], [] if is_first else self.frozen_values
        call = StepCall(self.step, self.root, microbatch, arguments, graph.batch_writes)
        if self._only_runs and not graph.counters:
            self._first = key, probed_sequence(graph)
        elif is_first or self.trials.throws_coins or self._first is None or self._first[0] != key:
            self._first = key, view.sequence_of(call, seed, self._sequences[key])
            self.frozen_values += view.frozen_values
        sequence = self._first[1]
        if (key, sequence) not in self._made:
            graph = self._graph_of(sequence, key, call, seed)
            self._made[key, sequence] = self._within(graph, self._calls_of(graph))
        return self._made[key, sequence]

    def of_batch(
        self, microbatches: Sequence[Any], seeds: Sequence[int], arguments: tuple[Any, ...] = ()
    ) -> list[PartitionedStep]:
        """Returns the cut steps of all microbatches of a batch, on the stages of that which needs most of them."""
        cuts = [
            self.of(microbatch, seed, arguments, not index)
            for index, (microbatch, seed) in enumerate(zip(microbatches, seeds, strict=True))
        ]
        widest = max(cuts, key=lambda step: step.placement.num_stages)
        if widest.placement == self._planned.placement:
            return cuts
        calls = self._calls_of(widest.graph)
        return [self._within(step.graph, calls) for step in cuts]

    def count(self) -> None:
        """Lets counters of the step show one batch more, however often the step was run for it."""
        if self._first is not None:
            self._views[self._first[0]].count()
            views = self._made[self._first].stage_views.values()
            self._only_runs = self._only_runs and not any(view.has_varied for view in views)

    def _graph_of(self, sequence: CallSequence, key: str, call: StepCall, seed: int) -> LayerGraph:
        """Returns the graph of a call sequence that one of the microbatches has now."""
        if sequence not in self._sequences[key]:
            if len(self._sequences[key]) == MOST_SEQUENCES:
                raise GraphError(too_many_sequences(MOST_SEQUENCES + 1))
            self._sequences[key].append(sequence)
        names = names_of(sequence)
        graph_key = sequence if sequence.reads else names
        if graph_key not in self._graphs[key]:
            with untouched(self.root), generators_preserved(self.root):
                _, replay = self._views[key].record(call, seed, call.arguments)
            graph = self._probed(key, call.batch, replay.of_step(self.step))
            if graph.layer_names != names:
                raise not_repeated(names, graph.layer_names)
            self._add(graph, sequence if sequence.reads else None)
        return self._graphs[key][graph_key]

    def _probed(self, key: str, microbatch: Any, step: Step) -> LayerGraph:
        try:
            return reprobe(self.root, step, microbatch, self.graph, any_sequence=True)
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
        """Traces a microbatch again; raises GraphError, with what has changed, if it was cut otherwise."""

        def step(module: nn.Module, batch: Any) -> Any:
            return self._planned_step(module, batch, *arguments)

        graphs = self._graphs.get(batch_signature(microbatch))
        graph = next(iter(graphs.values())) if graphs else self.graph
        require_unchanged(self.root, step, microbatch, graph)

    def remember(self, memo: Memo | None) -> None:
        """Calls frozen layers through a memo from now on; None calls them as they are."""
        self._memo = memo
        for partitioned in self._cut_steps.values():
            partitioned.remember(memo)

    def _within(self, graph: LayerGraph, calls: PlacedCalls) -> PartitionedStep:
        """Returns a graph, cut for the stages of placed calls."""
        key = graph.digest, calls
        if key in self._cut_steps:
            return self._cut_steps[key]
        pieces = self._cut(graph, calls)
        if pieces is None:
            raise self._does_not_fit(graph)
        root, interception, memory = self.root, self.interception, self._dummies
        views = {
            stage: StageView(
                root,
                graph,
                pieces.stages[stage],
                interception,
                memory,
                self.recomputed,
                self.stream,
            )
            for stage in calls.placement.stages_of(self.local_rank)
        }
        for view in views.values():
            view.may_vary = self._only_runs
        frozen, end = FrozenView(root, graph, pieces.frozen, interception, memory), None
        if len(calls.placement.first_stages) > 1 and pieces.num_stages - 1 in views:
            end = StageView(root, graph, tail(graph), interception, memory)
        partitioned = PartitionedStep(graph, pieces, views, frozen, calls.placement, end)
        partitioned.remember(self._memo)
        self._cut_steps[key] = partitioned
        return partitioned

    def _calls_of(self, graph: LayerGraph) -> PlacedCalls:
        """Returns the planned calls if a sequence fits on their stages, else its own, on ranks with the layers."""
        if self._cut(graph, self._planned) is not None:
            return self._planned
        calls = self._planned.extended(graph.path_names)
        if calls is None or len(self._planned.placement.first_stages) > 1:
            raise self._does_not_fit(graph)
        free = without_gradient(graph)
        trained = {s for i, s in enumerate(calls.stage_of) if i not in free}
        no_grad = frozenset(range(calls.placement.num_stages - 1)) - trained
        return replace(calls, placement=replace(calls.placement, no_grad=no_grad))

    def _cut(self, graph: LayerGraph, calls: PlacedCalls) -> Cut | None:
        """Returns a graph, cut for the stages of placed calls, if each layer is on a rank with its weights."""
        placement = calls.placement
        if graph.path_names == calls.names:
            return cut_for(graph, calls.positions, placement)
        for stages in aligned(graph.path_names, calls.names, calls.stage_of, placement):
            positions = [bisect_left(stages, s) for s in range(1, placement.num_stages)]
            pieces = cut_for(graph, positions, placement, may_be_empty=True)
            if not any(
                pieces.stages[s].is_last or pieces.stages[s].sent_gradients
                for s in placement.no_grad
            ):
                return pieces
        return None

    def _does_not_fit(self, graph: LayerGraph) -> GraphError:
        planned = self.graph
        return GraphError(
            f"the step has a sequence of {len(graph.path)} calls of trained layers that does not fit on the ranks "
            f"of the one that was planned, of {len(planned.path)}: "
            f"{first_difference(planned.path_names, graph.path_names)}. "
            "Let it take the longest sequence in one of its first batches, from which all is planned, or move "
            "the branch inside the forward of one module"
        )


@dataclass(frozen=True)
class PlacedCalls:
    """The layer calls of a sequence, in order, and where they run."""

    names: tuple[str, ...]
    stage_of: tuple[int, ...]
    placement: Placement

    @property
    def positions(self) -> list[int]:
        """Positions of the path before which the calls are cut."""
        return [bisect_left(self.stage_of, s) for s in range(1, self.placement.num_stages)]

    def extended(self, names: Sequence[str]) -> PlacedCalls | None:
        """Returns the calls of a longer sequence: its last ones on these stages, all others on stages before them.

        Returns:
            None if it calls a layer that no rank holds, or leaves out one that was planned.

        Example:
            >>> calls = PlacedCalls(tuple("ab"), (0, 1), Placement(((0,), (1,))))
            >>> calls.extended("abab").placement.stage_ranks
            ((0,), (1,), (0,), (1,))
        """
        ranks_by_name, stages = defaultdict[str, set[tuple[int, ...]]](set), list[int]()
        for name, stage in zip(self.names, self.stage_of, strict=True):
            ranks_by_name[name].add(self.placement.stage_ranks[stage])
        stage_ranks = [*reversed(self.placement.stage_ranks)]  # counted from the end
        at, now, last = len(self.names) - 1, 0, self.placement.num_stages - 1
        for name in reversed(names):
            if name not in ranks_by_name:
                return None
            if at >= 0 and self.names[at] == name:
                now, at = last - self.stage_of[at], at - 1
            elif stage_ranks[now] not in ranks_by_name[name]:
                at = -1  # from here on before all that was planned
                now = len(stage_ranks)
                stage_ranks.append(min(ranks_by_name[name]))
            stages.append(now)
        last = len(stage_ranks) - 1
        if len(set(stages)) <= last:
            return None
        placement = replace(self.placement, stage_ranks=tuple(reversed(stage_ranks)))
        return PlacedCalls(tuple(names), tuple(last - s for s in reversed(stages)), placement)


def aligned(
    names: Sequence[str], planned: Sequence[str], stage_of: Sequence[int], placement: Placement
) -> Iterator[list[int]]:
    """Yields ways to give the layer calls of a sequence to the stages of the planned one.

    A call goes to the stage of the planned call that it is equal to, counted from the end of the step, or from its
    beginning; one that has none goes to the nearest stage of its backbone whose rank holds the layer.

    Yields:
        For every call its stage, ascending.

    Example:
        >>> placement = Placement(((0,), (1,), (0,), (1,)))
        >>> next(aligned("xab", "xabab", [0, 0, 1, 2, 3], placement))
        [2, 2, 3]
    """
    last = placement.num_stages - 1
    places = [(placement.backbone_of(s), placement.stage_ranks[s]) for s in range(last + 1)]
    places_of = defaultdict(set)
    for name, stage in zip(planned, stage_of, strict=True):
        places_of[name].add(places[stage])
    for backwards in (True, False):
        step = -1 if backwards else 1
        calls, stages = list(zip(planned, stage_of, strict=True))[::step], list[int]()
        at, now = 0, last if backwards else 0
        for name in names[::step]:
            if at < len(calls) and calls[at][0] == name:
                now, at = calls[at][1], at + 1
            else:
                left = range(now, -1, -1) if backwards else range(now, last + 1)
                next_stage = next((s for s in left if places[s] in places_of[name]), None)
                if next_stage is None:
                    break
                now = next_stage
            stages.append(now)
        if len(stages) == len(names) and stages[::step] == sorted(stages):
            yield stages[::step]


def cut_for(
    graph: LayerGraph, positions: Sequence[int], placement: Placement, may_be_empty: bool = False
) -> Cut:
    """Cuts a graph; a rank alone runs frozen layers where they are called, not in advance."""
    firsts = placement.first_stages
    pieces = cut(graph, positions, placement.stage_ranks, firsts, may_be_empty)
    if placement.num_ranks > 1:
        return pieces
    nothing = replace(pieces.frozen, layers=frozenset(), sent=(), parameters=frozenset())
    return replace(pieces, frozen=nothing, stages=(uncut(graph),))
