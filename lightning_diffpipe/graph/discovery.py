"""Choosing layers that hold: no value leaves them by another way than being returned.

A first run, with one sample more, gives the tree of calls, from which layers are chosen by cost, and tells which
dimensions count samples; of all calls, so that it need not be repeated when containers are folded, nor for batches
of other sizes that agree with it. A second one follows all values; if one of them leaks out of a layer (an
attribute, a write into an argument), this layer is expanded and the second run repeated. Where the step does not
run with one sample more, calls other modules then, or is run on values, the tree is that of the batch itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from lightning_diffpipe.errors import GraphError
from lightning_diffpipe.graph import rng
from lightning_diffpipe.graph.backward import nodes_below
from lightning_diffpipe.graph.calltree import (
    CallNode,
    CallTree,
    callable_modules,
    choose_layers,
    has_backward_hooks,
    has_global_backward_hooks,
    uncalled_owners,
)
from lightning_diffpipe.graph.fakes import TrackedFakeMode, fake_batch, fake_copy
from lightning_diffpipe.graph.layer import (
    Layer,
    LayerGraph,
    LeadingDims,
    TensorKey,
    TensorSpec,
    dense_stride,
)
from lightning_diffpipe.graph.provenance import (
    Buffer,
    LayerRecord,
    LeakError,
    Tracer,
    calls_replaced,
    leading_dims,
    unfolded,
    values,
)
from lightning_diffpipe.graph.repeats import CallResults, Repeats
from lightning_diffpipe.graph.side_effects import NoHooksWithoutGradients, gradients_noticed
from lightning_diffpipe.graph.step import (
    BatchSpec,
    ModuleSplit,
    Step,
    add_sample,
    argument_rows,
    batch_signature,
    count_samples,
    fresh,
    loss_of,
    output_rows,
    weight_of,
)
from lightning_diffpipe.graph.versions import OF_EVERY_MODULE

_log = logging.getLogger(__name__)


RecordOf = Callable[[Any, Any], Any]
_Dims = LeadingDims | tuple[None, None]
_Rows = tuple[tuple[int | None, ...] | None, Sequence[int | None]]
_MoreSamples = Mapping[tuple[str, int, int], LeadingDims]
_MAX_EXPANSIONS = 50


@dataclasses.dataclass
class _Seen:
    """A call of a layer or container: the layers `first` .. `stop - 1`, and what was found there."""

    name: str
    first: int
    stop: int = 0
    found: Any = None

    @classmethod
    def among(
        cls, top: CallNode, layers: Collection[str], containers: Collection[str]
    ) -> list[_Seen]:
        """Returns the calls of layers and of containers around them that raised no error."""
        seen: list[_Seen] = []
        num_layers = 0

        def walk(node: CallNode) -> None:
            nonlocal num_layers
            for child in node.children:
                call = cls(child.name, num_layers, found=child.found)
                if is_layer := child.name in layers:
                    num_layers += 1
                if is_layer or child.name in containers:
                    seen.append(call)
                if not is_layer:
                    walk(child)
                call.stop = num_layers

        walk(top)
        return [call for call in seen if call.found is not None]


class _OtherCallsError(Exception):
    """The step calls other modules when it gets one sample more."""


class LayerLeakError(GraphError):
    """A value leaves a layer without being returned, so the layer must be expanded."""

    def __init__(self, layer_name: str, reader: str) -> None:
        super().__init__(
            f"a value made or changed inside {layer_name} is read by {reader}, though it is not returned"
        )
        self.layer_name = layer_name


@dataclasses.dataclass
class StepProbe:
    """One step on one batch, run again and again until the choice of layers holds.

    Attributes:
        batch_spec: Structure of a larger batch, if it is known.
        mode: `LayerGraph.mode` of the graph.
        fake_mode: The mode of fake tensors, None for real ones.
        original: The module that `module` is a copy of, if it is one.
        call_results: Results of the trace that found the graph which is traced again with other layers.
    """

    module: nn.Module
    step: Step
    batch: Any
    seed: int = 0
    batch_spec: BatchSpec | ModuleSplit | None = None
    mode: str = "real"
    fake_mode: TrackedFakeMode | None = None
    original: nn.Module | None = None
    call_results: CallResults = dataclasses.field(default_factory=CallResults)

    def __post_init__(self) -> None:
        self._tree: CallTree | None = None
        self._larger: CallTree | None = None  # with one sample more
        self._indivisible = ""  # why there is none: the step's error
        self._hooked: _Hooked | None = None  # before the latest run
        self._counted: list[tuple[dict[str, Any], dict[str, int]]] = []

    def on_fakes(self, mode: TrackedFakeMode) -> StepProbe:
        """Returns the same on a copy of the module without values."""
        copy, batch = fake_copy(self.module, mode), fake_batch(self.batch, mode)
        where = "fake", mode, self.module
        return StepProbe(copy, self.step, batch, 0, self.batch_spec, *where, self.call_results)

    def discover(self, max_share: float, layer_names: Sequence[str] | None) -> LayerGraph:
        """Chooses layers by cost, expands those that leak, and traces them."""
        if layer_names is not None:
            containers = set(self._callable()) - set(layer_names)
            return self.trace(layer_names, containers)
        leaky: set[str] = set()
        for _ in range(_MAX_EXPANSIONS):
            choose = lambda tree: choose_layers(self.module, tree.top, max_share, leaky)
            try:
                return self._trace_of(choose, leaky)
            except LayerLeakError as error:
                leaky.add(error.layer_name)
        raise GraphError(f"values leave layers without being returned: {sorted(leaky)[:5]}")

    def discover_named(self, names: Collection[str]) -> LayerGraph:
        """Takes modules of these names for layers; what is next to them has layers as coarse as can be.

        Raises:
            LayerLeakError: One of them must be expanded.
        """
        around = {name[:end] for name in names for end, sign in enumerate(name) if sign == "."}

        def choose(tree: CallTree) -> tuple[set[str], set[str]]:
            layers, containers = choose_layers(self.module, tree.top, math.inf, around)
            return layers | set(names) - containers, containers  # also those without parameters

        return self._trace_of(choose)

    def _trace_of(
        self, choose: Callable[[CallTree], tuple[set[str], set[str]]], leaky: Collection[str] = ()
    ) -> LayerGraph:
        if self._tree is None:
            self._larger = self._tree_of_more_samples() if self.fake_mode is not None else None
            self._tree = self._larger or self._call_tree(self._new(self.batch))
        try:
            return self.trace(*choose(self._tree), leaky)
        except _OtherCallsError:
            self._tree = self._call_tree(self._new(self.batch))
        return self.trace(*choose(self._tree), leaky)

    def trace(
        self,
        layers: Collection[str],
        containers: Collection[str],
        leaky: Collection[str] = (),
        known: LayerGraph | None = None,
    ) -> LayerGraph:
        """Follows all values through one run with these layers: modules whose outermost calls are layers.

        All `containers` stay expanded, those in `leaky` as they must. A `known` graph of the same step may have
        finer layers; random streams are seeded as there, and it may tell rows per sample, which saves a run.

        Raises:
            LayerLeakError: One of the layers must be expanded.
        """
        layers, fake = set(layers), self.fake_mode is not None
        # The calls of a run with one sample more must be those of this run.
        tree = self._tree if self._tree is self._larger else None
        callables = self._callable() if tree else ()
        # Results of calls, which name the layers; a fold need not run these again.
        call_results = self.call_results if known else CallResults()
        repeats = self._repeats(call_results, layers.union(known.fine_names if known else ()))
        tracer = Tracer(
            self.module, self.original, layers, containers, known, fake, callables, repeats
        )
        out, output_tags, tail = self._followed(tracer)
        if tree is not None and tree.names != tracer.names:
            raise _OtherCallsError
        # A fold does not wrap containers without layers inside, which the finer graph has seen called.
        watched = frozenset(uncalled_owners(self.module, tracer.called, layers))
        loss_nodes = set(nodes_below([loss_of(out).grad_fn]))
        tail_tags, trained = unfolded(tail), self._trained(loss_nodes)
        seeded = known.seeded if known else {r.name for r in tracer.records if r.drew}
        for record in () if known else tracer.records:
            record.num_seeds = int(record.name in seeded)
        of_more_samples, rows = self._rows(tracer, layers, containers, known)
        layers_run = _layers(tracer.records, trained, rows, loss_nodes)
        return LayerGraph(
            layers=layers_run,
            tail_reads=_keys(tail_tags),
            tail_parameters=_parameters(tail_tags),
            trained=trained,
            calls=tuple(call for call in tracer.calls if call.stop > call.first),
            fine_names=tuple(tracer.fine_names),
            seeded=frozenset(seeded),
            leaky=known.leaky if known else frozenset(leaky),
            watched=watched & known.watched if known else watched,
            signature=batch_signature(self.batch),
            num_samples=count_samples(self.batch, self.batch_spec),
            mode=self.mode,
            of_more_samples=of_more_samples,
            batch_spec=self.batch_spec,
            hooks=_readers_of_hooked(tracer, layers_run, output_tags),
            weighted=weight_of(out) is not None,
            # Of the code between layers:
            streams=tuple(values(tags) for tags in (*(r.reads for r in tracer.records), tail)),
            host_random=tracer.drew_host_random,
            folded=tuple(tracer.provenance.folded),
            glue_writes=frozenset(tracer.provenance.glue_writes),
            glue_parameter_writes=frozenset(tracer.provenance.glue_parameter_writes),
            autocast=frozenset(tracer.autocast),
            # A call that is answered from an earlier trace does not run; its generators are those of that graph.
            generators=tracer.provenance.generators.found()
            | (known.generators if known else frozenset()),
            toggled=tracer.attributes.toggled(),
            left=tracer.attributes.left(),
            counters=tracer.attributes.counters() if fake else {},
            changes_gradients=tracer.provenance.changes_gradients
            or (known is not None and known.changes_gradients)
            or has_global_backward_hooks()
            or any(map(has_backward_hooks, self.module.modules())),
            batch_writes=frozenset(tracer.provenance.batch_writes),
            call_results=call_results,
        )

    def _refuse_new_hooks(self) -> None:
        """Raises GraphError for a step that puts hooks on modules, on top of those of the runs before.

        Models of transformers put some once and for all, and note it in a private attribute, which stays.
        """
        hooks_before, notes_before = self._hooked or (set(), {})
        self._hooked = hooks, notes = _hooks_and_notes(self.module)
        more = sorted(hooks - hooks_before)
        recorded = [note for note, is_true in notes.items() if is_true and note not in notes_before]
        if more and not recorded:
            raise GraphError(
                f"the step puts a hook on {more[0][0] or 'the module'}, and leaves it there. It runs several times "
                "before training, after which attributes are what they were, and later for every microbatch; put "
                "hooks in __init__ or in setup, once, or remove them where the step ends"
            )

    def _followed(self, tracer: Tracer) -> tuple[Any, set[Any], set[Any]]:
        """Runs the step under a tracer; returns its result, that one's tags, and tags read after the last layer."""
        try:
            batch = self._new(self.batch)
            tracer.provenance.watch_batch(batch)
            out = self._run(tracer.run, batch)
            returned = tracer.provenance.of(out)
            return out, returned, returned | tracer.provenance.control | tracer.logged
        except LeakError as error:
            layer, reader = error.layer, error.reader
            tracer.attributes.undo()
        # Not above: as its context that error would keep the module alive, fake tensors and all.
        raise LayerLeakError(tracer.records[layer].name, reader)

    def _new(self, batch: Any) -> Any:
        if self.fake_mode is not None:
            return fresh(fake_batch(batch, self.fake_mode))
        return fresh(pytree.tree_map_only(Tensor, torch.clone, batch))

    def _run(self, around: Callable[[Callable[[], Any]], Any], batch: Any) -> Any:
        """Runs the step inside `around`, whose modes must see operators before the fake mode does."""
        if self._hooked is None:
            self._hooked = _hooks_and_notes(self.module)
            self._counted = [
                (state, {name: value for name, value in state.items() if type(value) is int})
                for state in map(vars, self.module.modules())
            ]
        rng.seed_all(self.seed, host=True)  # also of fake runs: coins fall the same on all ranks
        for state, numbers in self._counted:
            state.update(numbers)
        with torch.enable_grad(), self.fake_mode or contextlib.nullcontext():
            out = around(lambda: self.step(self.module, batch))
        self._refuse_new_hooks()
        return out

    def _call_tree(
        self, batch: Any, record_of: RecordOf | None = None, *, has_gradients: bool = True
    ) -> CallTree:
        """Runs the step and returns the tree of its calls, each with the record of its arguments and output."""
        tree = CallTree(self.module, record_of, self._repeats(CallResults()))
        names = self._callable()

        def record(call: Callable[[], Any]) -> Any:
            noticed = gradients_noticed(tree.note_gradients)
            with (
                calls_replaced(self.module, names, tree.wrap),
                tree.functions.counted(),
                noticed,
                torch.set_grad_enabled(has_gradients),
                tree,
            ):
                return call()

        with contextlib.nullcontext() if has_gradients else NoHooksWithoutGradients():
            self._run(record, batch)
        return tree

    def _tree_of_more_samples(self) -> CallTree | None:
        """Returns the tree of calls with one sample more, and what is seen there; None if the step does not run."""
        if isinstance(self.batch_spec, ModuleSplit):  # a sample may have rows anywhere
            return None
        record_of = lambda arguments, out: (leading_dims(arguments), leading_dims(out))
        try:
            with self.fake_mode or contextlib.nullcontext():
                larger = self.batch
                if num_samples := count_samples(self.batch, self.batch_spec):
                    larger = add_sample(self.batch, num_samples, self.batch_spec)
            is_fake = self.fake_mode is not None
            return self._call_tree(self._new(larger), record_of, has_gradients=is_fake)
        except GraphError:  # a refusal, with any number of samples
            raise
        except Exception as error:  # a step may insist on its batch size
            reason = str(error)  # not the error, which keeps its frames and their tensors
        if self.fake_mode is not None and self.original is not None:
            self.module = fake_copy(self.original, self.fake_mode)  # what that run has left is gone
            self.__post_init__()
        self._indivisible = reason
        return None

    def _repeats(self, call_results: CallResults, layers: Collection[str] = ()) -> Repeats | None:
        mode, names = self.fake_mode, self._callable()
        return None if mode is None else Repeats(self.module, mode, names, call_results, layers)

    def _callable(self) -> list[str]:
        # The original, as copies forget which modules are compiled.
        return callable_modules(self.original or self.module)

    def _trained(self, reached: Collection[Any]) -> frozenset[str]:
        names = {id(p): name for name, p in self.module.named_parameters()}
        variables = (getattr(node, "variable", None) for node in reached)
        trained = frozenset(names[id(v)] for v in variables if v is not None and id(v) in names)
        if not trained:
            raise GraphError(
                "no parameter gets a gradient from the loss; check requires_grad and torch.no_grad()"
            )
        return trained

    def _rows(
        self,
        tracer: Tracer,
        layers: Collection[str],
        containers: Collection[str],
        known: LayerGraph | None,
    ) -> tuple[_MoreSamples | None, list[_Rows]]:
        """Returns `LayerGraph.of_more_samples` and rows per sample of arguments and outputs of all layers."""
        records, num_samples = tracer.records, count_samples(self.batch, self.batch_spec)
        # Another call sequence of the step may give the same calls other samples.
        same_calls = known and known.fine_names == tuple(tracer.fine_names)
        dims = known.of_more_samples if known and same_calls else None
        more: list[_Dims] | None = None
        calls = list(map(_call_of, records))
        # Of calls without layers inside, several may have the same key.
        if dims and all(call in dims and call[1] < call[2] for call in calls):
            more = [dims[call] for call in calls]
        signature = batch_signature(self.batch)
        if known and more and known.signature != signature:
            same_structure = _structure(known.signature) == _structure(signature)
            rows = _known_rows(records, known, more, num_samples) if same_structure else None
            if rows is not None:
                return None, rows
            more = None
        if more is None:
            dims, more = self._dims_of_more_samples(tracer, layers, containers)
        return dims, [
            (
                argument_rows(record.argument_dims, more_in, num_samples),
                output_rows(record.output_dims, more_out, num_samples),
            )
            for record, (more_in, more_out) in zip(records, more, strict=True)
        ]

    def _dims_of_more_samples(
        self, tracer: Tracer, layers: Collection[str], containers: Collection[str]
    ) -> tuple[_MoreSamples | None, list[_Dims]]:
        """Returns, with one sample more, `LayerGraph.of_more_samples`, and leading dimensions by layer."""
        unknown: list[_Dims] = [(None, None)] * len(tracer.records)
        if self._tree is None or self.fake_mode is None:  # else it was made before
            self._larger = self._tree_of_more_samples()
        if self._larger is None:
            if self._indivisible:
                _log.info(
                    "frozen layers run on whole microbatches, and nothing of them can be stored, as the step does "
                    "not run with one sample more: %s", self._indivisible,
                )  # fmt: skip
            return None, unknown
        seen = _Seen.among(self._larger.top, layers, containers)
        of_layers = [call for call in seen if call.name in layers]
        if [call.name for call in of_layers] != [record.name for record in tracer.records]:
            return None, unknown
        bounds = [*(record.fine_start for record in tracer.records), len(tracer.fine_names)]
        dims: dict[tuple[str, int, int], LeadingDims] = {}
        for call in seen:
            dims.setdefault((call.name, bounds[call.first], bounds[call.stop]), call.found)
        return dims, [call.found for call in of_layers]

    def with_observed_strides(self, graph: LayerGraph) -> LayerGraph:
        """Returns the graph with strides as they really are, where the step calls the same layers."""
        stride = lambda leaf: dense_stride(leaf) if isinstance(leaf, Tensor) else None
        record_of = lambda arguments, out: list(map(stride, pytree.tree_leaves(out)))
        tree = self._call_tree(self._new(self.batch), record_of, has_gradients=False)
        seen = _Seen.among(tree.top, set(graph.layer_names), ())
        if tuple(call.name for call in seen) != graph.layer_names:
            return graph
        layers = [
            dataclasses.replace(
                layer,
                outputs=tuple(
                    dataclasses.replace(o, stride=observed) if isinstance(o, TensorSpec) else o
                    for o, observed in zip(layer.outputs, call.found, strict=True)
                ),
            )
            for layer, call in zip(graph.layers, seen, strict=True)
        ]
        return dataclasses.replace(graph, layers=tuple(layers))


_Hooked = tuple[set[tuple[str, int]], dict[tuple[str, str], bool]]


def _hooks_and_notes(root: nn.Module) -> _Hooked:
    """Returns hooks of modules by owner and number, and private attributes with whether they are True."""
    hooks: set[tuple[str, int]] = set()
    notes: dict[tuple[str, str], bool] = {}
    for name, module in root.named_modules():
        on_outputs = module._forward_hooks, module._forward_pre_hooks
        on_gradients = module._backward_hooks, module._backward_pre_hooks
        hooks |= {(name, key) for key in itertools.chain(*on_outputs, *on_gradients)}
        attributes = vars(module)
        names = attributes.keys() - OF_EVERY_MODULE
        notes |= {(name, key): attributes[key] is True for key in names if key[0] == "_"}
    return hooks, notes


def _layers(
    records: Sequence[LayerRecord],
    trained: frozenset[str],
    rows: Sequence[_Rows],
    reached: Collection[Any],
) -> tuple[Layer, ...]:
    """Returns the layers of a trace; `reached` are the autograd nodes that the loss depends on."""
    layers: list[Layer] = []
    for record, (rows_in, rows_out) in zip(records, rows, strict=True):
        tags = unfolded(record.reads)
        reads, parameters = _keys(tags), _parameters(tags)
        # What keeps statistics must see all microbatches, in order: a stage runs it, trained or not.
        bound = parameters & trained or record.written_buffers
        frozen = not bound and all(layers[i].frozen for i, _ in reads)
        layers.append(
            Layer(
                index=record.index,
                name=record.name,
                reads=reads,
                parameters=parameters,
                cost_flops=record.cost,
                num_seeds=record.num_seeds,
                frozen=frozen,
                mutated=frozenset(record.mutated),
                spec=record.spec,
                outputs=tuple(
                    dataclasses.replace(o, rows=r) if isinstance(o, TensorSpec) else o
                    for o, r in zip(record.outputs, rows_out, strict=True)
                ),
                argument_rows=rows_in,
                fine=(record.fine_start, record.fine_start + record.num_fine),
                written_buffers=frozenset(record.written_buffers),
                buffers=frozenset(tag.name for tag in tags if isinstance(tag, Buffer)),
                written_parameters=frozenset(record.written_parameters),
                carries_gradient=any(node in reached for node in record.nodes),
            )
        )
    return tuple(layers)


def _readers_of_hooked(
    tracer: Tracer, layers: Sequence[Layer], returned: Collection[Any]
) -> tuple[frozenset[int], ...]:
    """Returns the layers that read its tensor for each gradient hook; see `LayerGraph.hooks`."""
    path = [layer.index for layer in layers if not layer.frozen]
    reads = [(r.index, unfolded(r.reads)) for r in tracer.records]
    reads.append((len(layers), unfolded(returned)))
    by_hook = []
    for hook in tracer.provenance.hooks:
        readers = {index for index, tags in reads if hook in tags}
        if hook.made < hook.hooked:  # layers in between may have read it without a tag
            readers |= {index for index in path if hook.made <= index < hook.hooked}
            # A stage that ends earlier does not get to where the hook is put.
            readers.add(min((index for index in path if index >= hook.hooked), default=len(layers)))
        by_hook.append(frozenset(readers))
    return tuple(by_hook)


def _keys(tags: Collection[Any]) -> frozenset[TensorKey]:
    return frozenset(tag for tag in tags if isinstance(tag, tuple))


def _parameters(tags: Collection[Any]) -> frozenset[str]:
    return frozenset(tag for tag in tags if isinstance(tag, str))


def _call_of(record: LayerRecord) -> tuple[str, int, int]:
    return record.name, record.fine_start, record.fine_start + record.num_fine


def _structure(signature: str) -> str:
    """Returns the signature of a batch without sizes, which batches of the same structure share."""
    return re.sub(r"\d+|(, )?\bstr\b", "", signature)


def _known_rows(
    records: Sequence[LayerRecord],
    known: LayerGraph,
    dims: Sequence[LeadingDims],
    num_samples: int | None,
) -> list[_Rows] | None:
    """Returns rows per sample as known for another batch, with sizes `dims` of one sample more, if they agree."""

    def agree(now: Sequence[Any], rows: Sequence[int | None], other: Sequence[Any]) -> bool:
        return len(now) == len(rows) == len(other) and all(
            size == (r * num_samples if r and num_samples else before)
            for size, r, before in zip(now, rows, other, strict=True)
        )

    rows_of = lambda layer: [o.rows if isinstance(o, TensorSpec) else None for o in layer.outputs]
    of_call = {(la.name, *la.fine): (la.argument_rows, rows_of(la)) for la in known.layers}
    rows_by_layer: list[_Rows] = []
    for record, (dims_in, dims_out) in zip(records, dims, strict=True):
        rows_in, rows_out = of_call.get(_call_of(record), (None, ()))
        if not agree(record.output_dims, rows_out, dims_out):
            return None
        if rows_in is not None and not agree(record.argument_dims, rows_in, dims_in):
            return None
        rows_by_layer.append((rows_in, rows_out))
    return rows_by_layer
