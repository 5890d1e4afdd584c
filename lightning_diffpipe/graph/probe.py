"""Runs a training step once and turns what happened into a layer graph; again, to make containers whole.

The step runs up to three times on one batch: to record the tree of module calls and choose the layers (`calltree`),
to follow every value from layer to layer (`provenance`), and with one sample more, to learn which dimensions count
samples. Under fake tensors this takes seconds and no memory at any model size, and the module stays untouched.
Steps whose code depends on values (`.item()`) are run on real tensors instead.

    graph = probe(module, lambda module, batch: module.training_step(batch, 0), microbatch)
    folded, positions = fold(module, step, microbatch, graph, positions)

`fold` traces the step again with every container that is within one stage as one layer. Cut at a fine level, a
residual stream `h + f(h) + g(...)` is glue, so that *all* its terms cross the boundary; as output of a whole block
only the sum does. Containers stay expanded whose glue samples numbers, or which hold much frozen work: only
what stays expanded is seeded and computed elsewhere.
"""

import logging
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

from torch import nn

from lightning_diffpipe.errors import ConfigurationError, GraphError, clear_variables
from lightning_diffpipe.graph.cut import cut
from lightning_diffpipe.graph.discovery import LayerLeakError, StepProbe
from lightning_diffpipe.graph.fakes import (
    NoCopyError,
    TrackedFakeMode,
    fakes_failing_quietly,
    forget_fakes,
    without_garbage_collection,
)
from lightning_diffpipe.graph.layer import LayerGraph, TensorKey, other_calls
from lightning_diffpipe.graph.repeats import CallResults
from lightning_diffpipe.graph.side_effects import generators_preserved, is_users
from lightning_diffpipe.graph.step import BatchSpec, ModuleSplit, Step
from lightning_diffpipe.graph.trial import untouched

_log = logging.getLogger(__name__)

Mode = Literal["auto", "fake", "real"]


def probe(
    root: nn.Module,
    step: Step,
    batch: Any,
    *,
    seed: int = 0,
    max_share: float = 1 / 32,
    mode: Mode = "auto",
    layer_names: Sequence[str] | None = None,
    batch_spec: BatchSpec | ModuleSplit | None = None,
) -> LayerGraph:
    """Finds the layers of a step, what they read, which are frozen.

    Args:
        root: The module that holds all others; left as it is.
        step: Runs the step on a module (`root`, or a copy of it) and a batch.
        batch: One microbatch: a tree of tensors, samples along dimension 0.
        seed: Seed of the step in "real" mode.
        max_share: No layer should cost more than this share of the step, as far as modules allow.
        mode: "fake" runs without computing, "real" on values, "auto" tries fake first.
        layer_names: `LayerGraph.layer_names` of an earlier probe of the same step, unfolded, to keep its layers
            for a batch of another signature. See `reprobe` for folded graphs.
        batch_spec: Structure of the batch that the microbatch was cut from, or how the module cuts it.

    Returns:
        The graph; equal on all ranks, whatever parameters live there.

    Raises:
        GraphError: The step cannot be cut: it takes gradients itself, has no trained parameter, reads parameters
            nobody registered, or differs from `layer_names`.
    """
    step_probe = StepProbe(root, step, batch, seed, batch_spec=batch_spec)
    graph = _in_some_mode(mode, step_probe, lambda run: run.discover(max_share, layer_names))
    if layer_names is not None and graph.layer_names != tuple(layer_names):
        raise _other_sequence(layer_names, graph.layer_names)
    return graph


def reprobe(
    root: nn.Module, step: Step, batch: Any, graph: LayerGraph, *, any_sequence: bool = False
) -> LayerGraph:
    """Probes a batch of another signature, or call sequence, with the layers, folded or not, of a known graph.

    With `any_sequence` it may call the layers in another order or number, and train fewer parameters then.

    Raises:
        GraphError: The step calls other layers for this batch, or trains other parameters.
    """
    containers, layers = {call.name for call in graph.calls}, set(graph.layer_names)
    frozen = {graph.layers[i].name for i in graph.frozen}
    while True:
        try:
            with generators_preserved(root):
                new = _traced(root, step, batch, graph, layers, containers)
            break
        except LayerLeakError as error:
            whole = error.layer_name
            inside = dict(root.get_submodule(whole).named_modules(prefix=whole))
            finest = {name for name, module in inside.items() if not any(module.children())}
            if not any_sequence or whole not in frozen - finest:
                way = f"this batch takes another way through the step: {error}"
                raise GraphError(way) from error
            # Every rank holds its weights. An autoencoder of videos keeps what it has seen of a clip so far.
            containers |= inside.keys() - finest
            layers = layers - {whole} | finest
    same_calls = (new.layer_names, new.fine_names) == (graph.layer_names, graph.fine_names)
    if not same_calls and not any_sequence:
        raise _other_sequence(graph.layer_names, new.layer_names)
    same_frozen = not same_calls or new.frozen == graph.frozen
    if not (same_frozen and new.trained <= graph.trained):
        more = sorted(new.trained - graph.trained)
        what = f"trains {more[0]}, which it did not" if more else "freezes other layers than"
        raise GraphError(
            f"for a batch {new.signature} the step {what} when it was probed. A hook, or a key, value or shape of "
            "the batch may decide that: let the first batch train all that any does (call the layer, and multiply "
            "by 0 what shall not count), or move the branch inside the forward of one module"
        )
    if new.weighted != graph.weighted:
        raise GraphError(
            'the step returns a "weight" besides the loss for some batches only; return it always'
        )
    return new


def probe_named(
    root: nn.Module,
    step: Step,
    batch: Any,
    graph: LayerGraph,
    names: Sequence[str],
    *,
    seed: int = 0,
) -> LayerGraph:
    """Probes a step again with other trained layers, given in call order; frozen ones outside of them stay.

    Raises:
        GraphError: They are not, or values leave them by another way than being returned.
    """
    inside = tuple(
        f"{name}." for name in names
    )  # the base of an adapter, where that is a layer as a whole
    frozen = (graph.layers[i].name for i in graph.frozen)
    layers = {*names, *(name for name in frozen if not name.startswith(inside))}
    step_probe = StepProbe(root, step, batch, seed, batch_spec=graph.batch_spec)
    new = _in_some_mode(_how_known(graph), step_probe, lambda run: run.discover_named(layers))
    if new.path_names != tuple(names):
        raise GraphError(f"the trained layers are others: {other_calls(names, new.path_names)}")
    return new


def require_unchanged(root: nn.Module, step: Step, batch: Any, graph: LayerGraph) -> None:
    """Traces a step again as it is now, with the counters and training flags of this moment.

    Raises:
        GraphError: The step reads, trains, samples or writes other things than the graph knows; says which.
    """
    now = reprobe(root, step, batch, graph)
    for old, new in zip(graph.layers, now.layers, strict=True):
        _require_known_reads(f"layer {new.name}", new.reads - old.reads, graph)
        _require_same("parameters read by layer " + new.name, old.parameters, new.parameters)
        buffers = old.written_buffers, new.written_buffers
        _require_same("buffers written by layer " + new.name, *buffers)
    _require_known_reads("the loss, or what is logged,", now.tail_reads - graph.tail_reads, graph)
    _require_same("parameters read by the loss", graph.tail_parameters, now.tail_parameters)
    seeded = probe(
        root, step, batch, layer_names=graph.fine_names, batch_spec=graph.batch_spec
    ).seeded
    _require_same("layers that sample random numbers", graph.seeded, seeded)


def _require_known_reads(reader: str, more: Collection[TensorKey], graph: LayerGraph) -> None:
    if more:
        layer, leaf = min(more)
        raise GraphError(
            f"{reader} now reads output {leaf} of {graph.layers[layer].name}, which it did not when the step "
            "was probed, so nobody sends it"
        )


def _require_same(what: str, before: Collection[str], now: Collection[str]) -> None:
    if odd := sorted(set(before) ^ set(now)):
        raise GraphError(f"{what} are others than when the step was probed, e.g. {odd[0]}")


def _traced(
    root: nn.Module,
    step: Step,
    batch: Any,
    graph: LayerGraph,
    layers: Collection[str],
    containers: Collection[str],
    seed: int = 0,
    call_results: CallResults | None = None,
) -> LayerGraph:
    """Traces the step of a known graph with other layers; random streams are seeded as in that graph.

    `call_results` is that of the graph, where nothing can have changed what its modules compute since.
    """
    shared = call_results or CallResults()
    step_probe = StepProbe(
        root, step, batch, seed, batch_spec=graph.batch_spec, call_results=shared
    )
    trace = lambda run: run.trace(layers, containers, known=graph)
    return _in_some_mode(_how_known(graph), step_probe, trace)


def _how_known(graph: LayerGraph) -> Mode:
    return "real" if graph.needs_values else "auto"


def _other_sequence(expected: Sequence[str], got: Sequence[str]) -> GraphError:
    return GraphError(f"this batch calls other layers: {other_calls(expected, got)}")


def _in_some_mode(
    mode: Mode, step_probe: StepProbe, work: Callable[[StepProbe], LayerGraph]
) -> LayerGraph:
    """Works on a fake copy of the module, or on the module itself."""
    reason = "asked for"
    if mode in ("auto", "fake"):
        with without_garbage_collection():
            outcome = _without_values(step_probe, work, allow_failure=mode == "auto")
        if isinstance(outcome, LayerGraph):
            if outcome.num_samples != 1:
                return outcome
            # The strides of a single sample are ambiguous, and fake kernels decide otherwise than real ones; random
            # numbers of `*_like` depend on them. So one forward pass finds the real ones.
            try:
                with untouched(step_probe.module):
                    return step_probe.with_observed_strides(outcome)
            except Exception as error:
                _log.info("keeping the strides of the fake probe: %s", str(error))
                return outcome
        reason = outcome
    with untouched(step_probe.module):
        return work(replace(step_probe, mode=f"real ({reason})"))


_READ_NO_VALUES = (
    "Read no values in the step (.item(), .nonzero(), x[mask], `if tensor:`), and look numbers up by index "
    "tensors, as in sigmas[indices]"
)


def _without_values(
    step_probe: StepProbe, work: Callable[[StepProbe], LayerGraph], allow_failure: bool
) -> LayerGraph | str:
    """Returns the graph of a run on fake tensors, or why the step cannot be run on them."""
    mode = TrackedFakeMode()
    try:
        return _on_fakes(step_probe, work, mode)
    except (GraphError, ConfigurationError) as error:  # a refusal, with values or without
        clear_variables(error)  # among them are fake tensors
        raise
    except Exception as error:  # any code may fail on tensors without values, in any way
        if not allow_failure:
            raise
        what, advice = "the step cannot be run on tensors without values", _READ_NO_VALUES
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, NoCopyError):
            what, advice = "the module cannot be copied", "Keep outside of it what cannot be"
            reason = str(error)
        reason = reason.partition("\n")[0][:140]
        lines = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename)]
        where = f", {lines[-1].filename}:{lines[-1].lineno}" if lines else ""
        _log.warning(
            "%s (%s%s), so that it is probed by running the whole model several times, with all activations and "
            "without checkpointing, on every rank: that takes large models much time and memory. %s",
            what, reason, where, advice,
        )  # fmt: skip
        return reason
    finally:  # not earlier: the traceback of an error keeps everything alive
        forget_fakes(mode)


def _on_fakes(
    step_probe: StepProbe, work: Callable[[StepProbe], LayerGraph], mode: TrackedFakeMode
) -> LayerGraph:
    """Works on a fake copy, which dies with this frame, before `forget_fakes` looks for what survived."""
    # What fakes do not know is no error: the probe goes on with real values.
    with fakes_failing_quietly(), untouched(step_probe.module, ()):
        return work(step_probe.on_fakes(mode))


def fold(
    root: nn.Module,
    step: Step,
    batch: Any,
    graph: LayerGraph,
    positions: Sequence[int],
    *,
    seed: int = 0,
) -> tuple[LayerGraph, tuple[int, ...]]:
    """Turns every container that is within one stage, or is all frozen, into one layer of a fine graph.

    Returns:
        The folded graph, and the same cuts as positions in its path. Random numbers are seeded as in the fine
        graph, so results are the same.
    """
    cut(graph, positions)  # refuses impossible positions
    bounds = pairwise([0, *positions, len(graph.path)])
    stage_of = {layer: s for s, (a, b) in enumerate(bounds) for layer in graph.path[a:b]}
    stages_of_call = lambda call: {stage_of.get(i) for i in range(call.first, call.stop)} - {None}
    expanded = graph.leaky | {
        call.name
        for call in graph.calls
        if len(stages_of_call(call)) > 1 or call.draws_random or graph.is_mixed(call)
    }
    while True:  # until every layer that is folded belongs to one stage, or is all frozen
        layers = {*graph.layer_names, *(call.name for call in graph.calls)} - expanded
        key = frozenset(layers), frozenset(expanded), seed
        try:
            if key not in graph.folds:
                known = graph.call_results
                graph.folds[key] = _traced(root, step, batch, graph, layers, expanded, seed, known)
        except LayerLeakError as error:
            expanded |= {error.layer_name}
            continue
        folded = graph.folds[key]
        if folded.fine_names != graph.fine_names:
            raise GraphError(
                "the step called other layers when it was run again; seed all it samples"
            )
        stages = [
            next((stage_of[i] for i in range(*layer.fine) if i in stage_of), None)
            for layer in folded.layers
        ]
        # Trained layers have a stage, and frozen ones have none.
        misplaced = {
            layer.name
            for layer, stage in zip(folded.layers, stages, strict=True)
            if (stage is None) != layer.frozen
        }
        if not misplaced:
            break
        if misplaced <= expanded:
            raise GraphError(f"cannot fold {sorted(misplaced)[:3]}")
        expanded |= misplaced
    on_path = [stage for stage in stages if stage is not None]
    return folded, tuple(on_path.index(s) for s in range(1, len(positions) + 1))
