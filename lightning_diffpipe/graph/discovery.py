"""Choosing layers that hold: no value leaves them by another way than being returned.

A first run gives the tree of calls, from which layers are chosen by cost. A second one follows all values;
if one of them leaks out of a layer (an attribute, a write into an argument), this layer is expanded and
the second run repeated. A last one, with one sample more, tells which dimensions count samples.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from lightning_diffpipe.errors import GraphError
from lightning_diffpipe.graph import rng
from lightning_diffpipe.graph.calltree import (
    CallTree,
    callable_modules,
    choose_layers,
    forward_replaced,
    uncalled_owners,
)
from lightning_diffpipe.graph.fake import TrackedFakeMode
from lightning_diffpipe.graph.layer import (
    Layer,
    LayerGraph,
    TensorKey,
    TensorSpec,
    batch_signature,
    dense_stride,
)
from lightning_diffpipe.graph.provenance import LeakError, Record, unfolded, values
from lightning_diffpipe.graph.samples import add_sample, argument_rows, count_samples, output_rows
from lightning_diffpipe.graph.trace import (
    Tracer,
    checkpointing_off,
    leading_dims,
    logging_replaced,
    loss_of,
    trained_parameters,
)

_log = logging.getLogger(__name__)

Step = Callable[[Any, Any], Any]
"""`step(module, batch)` returns the loss, or a mapping with the key "loss"."""

Look = Callable[[str, Any, Any], Any]
_Dims = tuple[list[Any] | None, list[Any] | None]
_MAX_EXPANSIONS = 50


class LayerLeakError(GraphError):
    """A value leaves a layer without being returned, so the layer must be expanded."""

    def __init__(self, layer_name: str, reader: str) -> None:
        super().__init__(
            f"a value made or changed inside {layer_name} is read by {reader}, though it is not returned"
        )
        self.layer_name = layer_name


class StepProbe:
    """One step on one batch, run again and again until the choice of layers holds.

    Args:
        module: What the step is run on: the real module, or a fake copy of it.
        step: Runs the step.
        batch: A microbatch, fake if the module is.
        seed: Seeds real runs.
        fake_mode: The mode of fake tensors, None for real ones.
        mode: What the graph says about it.
        original: The module that `module` is a copy of, if it is one.
    """

    def __init__(
        self,
        module: nn.Module,
        step: Step,
        batch: Any,
        seed: int,
        fake_mode: TrackedFakeMode | None,
        mode: str,
        original: nn.Module | None = None,
    ) -> None:
        self._module, self._step, self._batch = module, step, batch
        self._seed, self._fake_mode, self._mode, self._original = seed, fake_mode, mode, original

    def discover(self, max_share: float, layer_names: Sequence[str] | None) -> LayerGraph:
        """Chooses layers by cost, expands those that leak, and traces them."""
        if layer_names is not None:
            containers = set(self._callable()) - set(layer_names)
            return self.trace(layer_names, containers, layer_names, None, ())
        tree = self._call_tree()
        leaky: set[str] = set()
        for _ in range(_MAX_EXPANSIONS):
            layers, containers = choose_layers(self._module, tree.top, max_share, leaky)
            try:
                return self.trace(layers, containers, layers, None, leaky)
            except LayerLeakError as error:
                leaky.add(error.layer_name)
        raise GraphError(f"values leave layers without being returned: {sorted(leaky)[:5]}")

    def trace(
        self,
        layers: Collection[str],
        containers: Collection[str],
        fine: Collection[str],
        seeded: Collection[str] | None,
        leaky: Collection[str],
    ) -> LayerGraph:
        """Follows all values through one run with these layers.

        Raises:
            LayerLeakError: One of them must be expanded.
        """
        fake = self._fake_mode is not None
        tracer = Tracer(self._module, self._original, layers, containers, fine, seeded, fake)
        try:
            out = self._run(tracer.run, self._batch)
            tail = tracer.provenance.of(out) | tracer.provenance.control | tracer.logged
        except LeakError as error:
            raise LayerLeakError(tracer.records[error.layer].name, error.reader) from None
        tail_tags, trained = unfolded(tail), self._trained(out)
        if seeded is None:
            seeded = {record.name for record in tracer.records if record.drew}
            for record in tracer.records:
                record.num_seeds = int(record.name in seeded)
        more = self._dims_of_more_samples(layers, [record.name for record in tracer.records])
        known = {record.name for record in tracer.records} | {call.name for call in tracer.calls}
        return LayerGraph(
            layers=self._layers(tracer.records, trained, more),
            tail_reads=_keys(tail_tags),
            tail_parameters=_parameters(tail_tags),
            trained=trained,
            calls=tuple(call for call in tracer.calls if call.stop > call.first),
            fine_names=tuple(tracer.fine_names),
            seeded=frozenset(seeded),
            leaky=frozenset(leaky),
            watched=frozenset(uncalled_owners(self._module, known, set(layers))),
            host_random=tracer.drew_host_random,
            signature=batch_signature(self._batch),
            num_samples=count_samples(self._batch),
            mode=self._mode,
            folded=tuple(tracer.provenance.folded),
            streams=tuple(values(tags) for tags in (*(r.reads for r in tracer.records), tail)),
        )

    def _run(self, around: Callable[[Callable[[], Any]], Any], batch: Any) -> Any:
        """Runs the step inside `around`, whose modes must see operators before the fake mode does."""
        if self._fake_mode is None:
            rng.seed_all(self._seed, host=True)
        with torch.enable_grad(), self._fake_mode or contextlib.nullcontext():
            return around(lambda: self._step(self._module, batch))

    def _call_tree(self) -> CallTree:
        tree, names = CallTree(), self._callable()

        def record(call: Callable[[], Any]) -> Any:
            with self._recording(names, tree.wrap), tree:
                return call()

        self._run(record, self._batch)
        return tree

    def _callable(self) -> list[str]:
        # The original, as copies forget which modules are compiled.
        return callable_modules(self._original or self._module)

    @contextlib.contextmanager
    def _recording(self, names: Collection[str], wrap: Callable[..., Any]) -> Iterator[None]:
        with (
            forward_replaced(self._module, names, wrap),
            logging_replaced(self._module, lambda args, kwargs: None),
            checkpointing_off(),
        ):
            yield

    def _trained(self, out: Any) -> frozenset[str]:
        names = {id(p): name for name, p in self._module.named_parameters()}
        trained = trained_parameters(loss_of(out), names)
        if not trained:
            raise GraphError(
                "no parameter gets a gradient from the loss; check requires_grad and torch.no_grad()"
            )
        return trained

    def _observe(self, layers: Collection[str], batch: Any, look: Look) -> list[Any]:
        """Runs the step without gradients and looks at arguments and output of every layer."""
        seen: list[Any] = []
        inside = False

        def wrap(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
            def observed(*args: Any, **kwargs: Any) -> Any:
                nonlocal inside
                if inside:
                    return forward(*args, **kwargs)
                inside = True
                try:
                    out = forward(*args, **kwargs)
                finally:
                    inside = False
                seen.append(look(name, (args, kwargs), out))
                return out

            return observed

        def observe(call: Callable[[], Any]) -> Any:
            with self._recording(set(layers), wrap), torch.no_grad():
                return call()

        self._run(observe, batch)
        return seen

    def _dims_of_more_samples(self, layers: Collection[str], names: list[str]) -> list[_Dims]:
        """Leading dimensions of arguments and outputs of all layers with one sample more, if it runs."""
        num_samples = count_samples(self._batch)
        try:
            with self._fake_mode or contextlib.nullcontext():
                larger = add_sample(self._batch, num_samples) if num_samples else self._batch
            seen = self._observe(layers, larger, _look_at_dims)
        except Exception as error:  # a step may insist on its batch size
            # As text: whoever keeps the record would keep the frames of the error, and their tensors.
            _log.info("layers cannot be cut into samples: %s", str(error))
            return [(None, None)] * len(names)
        if [name for name, _ in seen] != names:
            return [(None, None)] * len(names)
        return [dims for _, dims in seen]

    def with_observed_strides(self, graph: LayerGraph) -> LayerGraph:
        """The graph with strides as they really are, where the step calls the same layers."""
        seen = self._observe(graph.layer_names, self._batch, _look_at_strides)
        if tuple(name for name, _ in seen) != graph.layer_names:
            return graph
        layers = [
            dataclasses.replace(
                layer,
                outputs=tuple(
                    dataclasses.replace(o, stride=stride) if isinstance(o, TensorSpec) else o
                    for o, stride in zip(layer.outputs, strides, strict=True)
                ),
            )
            for layer, (_, strides) in zip(graph.layers, seen, strict=True)
        ]
        return dataclasses.replace(graph, layers=tuple(layers))

    def _layers(
        self,
        records: Sequence[Record],
        trained: frozenset[str],
        more: Sequence[_Dims],
    ) -> tuple[Layer, ...]:
        num_samples = count_samples(self._batch)
        layers: list[Layer] = []
        for record, (more_in, more_out) in zip(records, more, strict=True):
            tags = unfolded(record.reads)
            reads, parameters = _keys(tags), _parameters(tags)
            frozen = not (parameters & trained) and all(layers[i].frozen for i, _ in reads)
            rows = output_rows(record.output_dims, more_out, num_samples)
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
                        for o, r in zip(record.outputs, rows, strict=True)
                    ),
                    argument_rows=argument_rows(record.argument_dims, more_in, num_samples),
                    fine=(record.fine_start, record.fine_start + record.num_fine),
                    written_buffers=frozenset(record.written_buffers),
                )
            )
        return tuple(layers)


def _keys(tags: Collection[Any]) -> frozenset[TensorKey]:
    return frozenset(tag for tag in tags if isinstance(tag, tuple))


def _parameters(tags: Collection[Any]) -> frozenset[str]:
    return frozenset(tag for tag in tags if isinstance(tag, str))


def _look_at_dims(name: str, arguments: Any, out: Any) -> tuple[str, _Dims]:
    return name, (leading_dims(arguments), leading_dims(out))


def _look_at_strides(name: str, arguments: Any, out: Any) -> tuple[str, list[Any]]:
    leaves = pytree.tree_leaves(out)
    return name, [dense_stride(leaf) if isinstance(leaf, Tensor) else None for leaf in leaves]
