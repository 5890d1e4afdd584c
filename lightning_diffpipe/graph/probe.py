"""Runs a training step once and turns what happened into a layer graph.

The step runs up to three times on one batch: to record the tree of module calls and choose the layers
(`calltree`), to follow every value from layer to layer (`provenance`, `trace`), and with one sample
more, to learn which dimensions count samples. Under fake tensors this takes seconds and no memory at
any model size, and the module stays untouched. Steps whose code depends on values (`.item()`) are run
on real tensors instead; buffers, random number generators and training flags are put back.

    graph = probe(module, lambda module, batch: module.training_step(batch, 0), microbatch)
    print(graph)
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import nn

from lightning_diffpipe.errors import GraphError
from lightning_diffpipe.graph import rng
from lightning_diffpipe.graph.calltree import (
    CallTree,
    callable_modules,
    choose_layers,
    forward_replaced,
    uncalled_owners,
)
from lightning_diffpipe.graph.fake import (
    TrackedFakeMode,
    fake_batch,
    fake_copy,
    forget_fakes,
    untouched,
)
from lightning_diffpipe.graph.layer import (
    Layer,
    LayerGraph,
    TensorKey,
    TensorSpec,
    batch_signature,
    first_difference,
)
from lightning_diffpipe.graph.placement import is_placeholder
from lightning_diffpipe.graph.provenance import LeakError, Record
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

Mode = Literal["auto", "fake", "real"]
_MAX_EXPANSIONS = 50


def probe(
    root: nn.Module,
    step: Step,
    batch: Any,
    *,
    seed: int = 0,
    max_share: float = 1 / 32,
    mode: Mode = "auto",
    layer_names: Sequence[str] | None = None,
) -> LayerGraph:
    """Finds the layers of a step, what they read, which are frozen.

    Args:
        root: The module that holds all others; left as it is.
        step: Runs the step on a module (`root`, or a copy of it) and a batch.
        batch: One microbatch: a tree of tensors, samples along dimension 0.
        seed: Seeds the step in "real" mode.
        max_share: No layer should cost more than this share of the step, as far as modules allow.
        mode: "fake" runs without computing, "real" on values, "auto" tries fake first.
        layer_names: `LayerGraph.layer_names` of an earlier probe of the same step, unfolded, to keep its
            layers for a batch of another signature. See `reprobe` for folded graphs.

    Returns:
        The graph; equal on all ranks, whatever parameters live there.

    Raises:
        GraphError: The step cannot be cut: it takes gradients itself, has no trained parameter, reads
            parameters nobody registered, or differs from `layer_names`.
    """
    graph = _in_some_mode(
        root, step, batch, seed, mode, lambda run: run.discover(max_share, layer_names)
    )
    if layer_names is not None and graph.layer_names != tuple(layer_names):
        raise _other_sequence(layer_names, graph.layer_names)
    return graph


def reprobe(
    root: nn.Module, step: Step, batch: Any, graph: LayerGraph, *, seed: int = 0
) -> LayerGraph:
    """Probes a batch of another signature with the layers, folded or not, of a known graph.

    Raises:
        GraphError: The step calls other layers for this batch, or trains other parameters.
    """
    containers = {call.name for call in graph.calls}
    try:
        new = trace_layers(root, step, batch, graph, graph.layer_names, containers, seed=seed)
    except LayerLeakError as error:
        raise GraphError(f"this batch takes another way through the step: {error}") from error
    if (new.layer_names, new.fine_names) != (graph.layer_names, graph.fine_names):
        raise _other_sequence(graph.layer_names, new.layer_names)
    if new.trained != graph.trained or new.frozen != graph.frozen:
        odd = sorted(new.trained ^ graph.trained) or ["the frozen layers"]
        raise GraphError(
            f"a batch {new.signature} trains other parameters than {graph.signature}, e.g. {odd[0]}; "
            "every batch must train the same ones"
        )
    return new


def trace_layers(
    root: nn.Module,
    step: Step,
    batch: Any,
    graph: LayerGraph,
    layers: Collection[str],
    containers: Collection[str],
    *,
    seed: int = 0,
) -> LayerGraph:
    """Traces the step of a known graph with other layers, seeding random streams as that graph does.

    Args:
        root: The probed module.
        step: The probed step.
        batch: A microbatch.
        graph: Gives the granularity of random streams, and whether values are needed.
        layers: Modules whose outermost calls are layers.
        containers: Modules that stay expanded.
        seed: Seeds the step where it must be run on values.

    Raises:
        LayerLeakError: One of the layers must be expanded.
    """
    mode: Mode = "real" if graph.mode.startswith("real") else "auto"
    leaky = graph.leaky
    return _in_some_mode(
        root,
        step,
        batch,
        seed,
        mode,
        lambda run: run.trace(layers, containers, graph.fine_names, graph.seeded, leaky),
    )


def _other_sequence(expected: Sequence[str], got: Sequence[str]) -> GraphError:
    return GraphError(
        f"this batch calls other layers: {first_difference(expected, got)}. The step must call the same "
        "layers for every batch; move the branch inside the forward of one module"
    )


def _in_some_mode(
    root: nn.Module,
    step: Step,
    batch: Any,
    seed: int,
    mode: Mode,
    work: Callable[[_Probe], LayerGraph],
) -> LayerGraph:
    reason = "asked for"
    if mode in ("auto", "fake"):
        fake_mode = TrackedFakeMode()
        try:
            return _fake(root, step, batch, fake_mode, work)
        except GraphError as error:
            traceback.clear_frames(error.__traceback__)  # they keep fake tensors alive
            raise
        except Exception as error:  # any code may fail on tensors without values, in any way
            if mode == "fake":
                raise
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:120]}"
        finally:  # not earlier: the traceback of an error keeps everything alive
            forget_fakes(fake_mode)
        _log.info("probing on real tensors, as the step needs values (%s)", reason)
    if any(is_placeholder(p) for p in root.parameters()):
        _log.warning("probing a step that needs values while parameters live on other ranks")
    with untouched(root):
        rng.seed_all(seed, host=True)
        return work(_Probe(root, step, batch, seed, None, f"real ({reason})"))


def _fake(
    root: nn.Module,
    step: Step,
    batch: Any,
    mode: TrackedFakeMode,
    work: Callable[[_Probe], LayerGraph],
) -> LayerGraph:
    with rng.preserved(host=True):
        copy = fake_copy(root, mode)
        return work(_Probe(copy, step, fake_batch(batch, mode), 0, mode, "fake", root))


class _Probe:
    """One step, run again and again until the choice of layers holds."""

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
        before: tuple[Any, ...] = ()

        def traced(call: Callable[[], Any]) -> Any:
            nonlocal before
            before = rng.host_state()  # after seeding
            return tracer.run(call)

        try:
            out = self._run(traced, self._batch)
            tail = tracer.provenance.of(out) | tracer.provenance.control | tracer.logged
        except LeakError as error:
            raise LayerLeakError(tracer.records[error.layer].name, error.reader) from None
        host_random = before != rng.host_state()
        trained = self._trained(out)
        if seeded is None:
            seeded = {record.name for record in tracer.records if record.drew}
            for record in tracer.records:
                record.num_seeds = int(record.name in seeded)
        calls = tuple(call for call in tracer.calls if call.stop > call.first)
        known = {record.name for record in tracer.records} | {call.name for call in tracer.calls}
        return LayerGraph(
            layers=self._layers(tracer.records, trained, self._dims_of_more_samples(layers)),
            tail_reads=_keys(tail),
            tail_parameters=_parameters(tail),
            trained=trained,
            calls=calls,
            fine_names=tuple(tracer.fine_names),
            seeded=frozenset(seeded),
            leaky=frozenset(leaky),
            watched=frozenset(uncalled_owners(self._module, known, set(layers))),
            host_random=host_random,
            signature=batch_signature(self._batch),
            num_samples=count_samples(self._batch),
            mode=self._mode,
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

    def _dims_of_more_samples(self, layers: Collection[str]) -> list[tuple[list[Any], list[Any]]]:
        """Leading dimensions of arguments and outputs of all layers with one sample more, if it runs."""
        dims: list[tuple[list[Any], list[Any]]] = []
        inside = False

        def wrap(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
            def recorded(*args: Any, **kwargs: Any) -> Any:
                nonlocal inside
                if inside:
                    return forward(*args, **kwargs)
                inside = True
                try:
                    out = forward(*args, **kwargs)
                finally:
                    inside = False
                dims.append((leading_dims((args, kwargs)), leading_dims(out)))
                return out

            return recorded

        def record(call: Callable[[], Any]) -> Any:
            with self._recording(set(layers), wrap), torch.no_grad():
                return call()

        num_samples = count_samples(self._batch)
        try:
            with self._fake_mode or contextlib.nullcontext():
                larger = add_sample(self._batch, num_samples) if num_samples else self._batch
            self._run(record, larger)
        except Exception as error:  # a step may insist on its batch size
            _log.info("layers cannot be cut into samples: %s", error)
            return []
        return dims

    def _layers(
        self,
        records: Sequence[Record],
        trained: frozenset[str],
        more: Sequence[tuple[list[Any], list[Any]]],
    ) -> tuple[Layer, ...]:
        num_samples = count_samples(self._batch)
        pairs = more if len(more) == len(records) else [(None, None)] * len(records)
        layers: list[Layer] = []
        for record, (more_in, more_out) in zip(records, pairs, strict=True):
            reads, parameters = _keys(record.reads), _parameters(record.reads)
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


class LayerLeakError(GraphError):
    """A value leaves a layer without being returned, so the layer must be expanded."""

    def __init__(self, layer_name: str, reader: str) -> None:
        super().__init__(
            f"a value made or changed inside {layer_name} is read by {reader}, though it is not returned"
        )
        self.layer_name = layer_name


def _keys(tags: Collection[Any]) -> frozenset[TensorKey]:
    return frozenset(tag for tag in tags if isinstance(tag, tuple))


def _parameters(tags: Collection[Any]) -> frozenset[str]:
    return frozenset(tag for tag in tags if isinstance(tag, str))
