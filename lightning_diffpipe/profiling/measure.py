"""Timing every layer of a module on this machine.

A `Subject` runs the step for real at several sample counts, with stamps at the borders of its layers; medians over
the repetitions, and means over equal layers, become the profile.

A slow step is timed a few times only, and on a shared machine each layer of it is off by some per cent. A planner
believes what it reads: it would cut a transformer of equal blocks into unequal stages. Blocks that have the same
weights' shapes, operations and outputs are therefore timed as one, by the mean of all of them in a step, so that
the step takes as long as before:

    as timed   block.0 36   block.1 41   block.2 34   block.3 37   head 5
    averaged   block.0 37   block.1 37   block.2 37   block.3 37   head 5

A disturbance makes all of them slower in that step; the median over steps leaves such steps out. What is computed
between layers, before one of them, keeps its own time going forward.
"""

import statistics
from collections.abc import Hashable, Sequence
from dataclasses import replace

from torch import nn

from lightning_diffpipe.errors import ProfileError
from lightning_diffpipe.graph.layer import LayerGraph
from lightning_diffpipe.graph.probe import reprobe
from lightning_diffpipe.graph.step import count_samples
from lightning_diffpipe.planning.profile import ModelProfile, Seconds
from lightning_diffpipe.profiling.bench import Splits, Subject, give_back
from lightning_diffpipe.profiling.layer_costs import (
    Encoding,
    LayerCost,
    assemble,
    encodings,
    found_by_running,
)
from lightning_diffpipe.profiling.state import current, placed, tree_to, undisturbed
from lightning_diffpipe.profiling.step_run import (
    KeptBytes,
    Pool,
    Rounds,
    StepTimes,
    alone,
    backward_s,
    forward_s,
    repeated_s,
    typical,
)


def measure_profile(subject: Subject, pool: Pool = alone) -> ModelProfile:
    """Times all layers of a step, forward, backward and its weight-gradient part.

    The module is left bit-identical, and moved to the device meanwhile if it lives elsewhere.

    Args:
        subject: What is measured.
        pool: Where several ranks measure at once, gives each of them the times of all.

    Raises:
        ProfileError: The step cannot be run at any of the sample counts.
        GraphError: The step calls other layers than in its probe.
    """
    total, counts = count_samples(subject.batch, subject.graph.form), subject.counts
    if total is not None and max(counts) > total:
        raise ProfileError(
            f"cannot time {max(counts)} samples with a batch of {total}; "
            "give a larger batch, or smaller sample_counts"
        )
    try:
        with current(subject.place):
            rounds, saved, split, known = _measured(subject)
            graph = graph_of_device(subject)
    except Exception:
        pool({})  # the other ranks wait for this one
        raise
    finally:
        give_back(subject.place)
    rounds = pool(rounds)
    costs, repeated = layer_costs(graph, rounds, saved), repeated_seconds(graph, rounds)
    return assemble(subject.title, subject.module, graph, costs, repeated, known, split)


def _measured(
    subject: Subject,
) -> tuple[Rounds, list[KeptBytes], Seconds | None, dict[str, Encoding]]:
    module, step, graph, known = subject.module, subject.step, subject.graph, {}
    with undisturbed(module):
        rounds, saved, splits = subject.run()
        if subject.looks_at_results and not subject.fits:
            known = encodings(module, step, subject.probed, graph)
        elif subject.looks_at_results:  # and whether they can be stored, and split
            with placed(module, subject.place):
                small = tree_to(subject.probed, subject.place)
                look = found_by_running(module, step, small)
                known = encodings(module, step, small, graph, look)
    split, groups = split_seconds(rounds, splits), equal_layers(subject.graph, subject.module)
    even = {
        count: ([averaged(t, groups) for t in whole], [averaged(t, groups) for t in inputs])
        for count, (whole, inputs) in rounds.items()
    }
    return even, saved, split, known


def graph_of_device(subject: Subject) -> LayerGraph:
    """Probes the types of layers on the device, where autocast may halve what it leaves alone on a host."""
    module, device = subject.module, subject.place
    if device.type == "cpu" or not subject.fits:
        return subject.graph
    with undisturbed(module), placed(module, device):
        return reprobe(module, subject.step, tree_to(subject.probed, device), subject.graph)


def splittable_encoders(subject: Subject) -> dict[str, bool | None]:
    """Returns by name whether encoders give the same when they run on some samples only; None if unknown.

    They run where the module is, on the samples that were probed: together, and one by one.
    """
    module, step, small = subject.module, subject.step, subject.probed
    with undisturbed(module):
        look = found_by_running(module, step, small, stores=False)
        known = encodings(module, step, small, subject.graph, look)
    return {name: encoding.splittable for name, encoding in known.items()}


def repeated_seconds(graph: LayerGraph, rounds: Rounds) -> Seconds:
    """Returns the median of the glue that every stage runs, by sample count."""
    return Seconds.of(
        {
            count: statistics.median(repeated_s(graph, times) for times in (*whole, *inputs))
            for count, (whole, inputs) in rounds.items()
        }
    )


def split_seconds(rounds: Rounds, splits: Splits) -> Seconds | None:
    """Returns what a backward in two halves takes longer than the whole one; `None` if it was not timed."""
    added: dict[int, float] = {}
    for count, seconds in splits.items():
        if seconds:
            whole_s = statistics.median(sum(t.backward) + t.backward_tail for t in rounds[count][0])
            added[count] = max(statistics.median(seconds) - whole_s, 0.0)
    return Seconds.of(added) if added else None


def layer_costs(
    graph: LayerGraph, rounds: Rounds, saved: Sequence[KeptBytes]
) -> dict[int, LayerCost]:
    """Returns typical times of every layer."""
    forward: dict[int, list[float]] = {}
    backward: dict[int, list[float]] = {}
    inputs: dict[int, list[float]] = {}
    for count, (whole, without_weights) in rounds.items():
        forward[count] = typical([forward_s(graph, t) for t in (*whole, *without_weights)])
        backward[count] = typical([backward_s(graph, t) for t in whole])
        # Of a trained layer without such times half of the backward is for its weights.
        halves = [seconds / 2 for seconds in backward[count]]
        timed = [backward_s(graph, t) for t in without_weights]
        inputs[count] = typical(timed) if timed else halves
    costs = {}
    for layer in graph.layers:
        i = layer.index
        trains = bool(layer.parameters & graph.trained)
        weights = {n: max(backward[n][i] - inputs[n][i], 0.0) * trains for n in rounds}
        costs[i] = LayerCost(
            Seconds.of({n: forward[n][i] for n in rounds}),
            Seconds.of({n: backward[n][i] for n in rounds}),
            Seconds.of(weights),
            *map(round, saved[i]),
        )
    return costs


def equal_layers(graph: LayerGraph, module: nn.Module) -> list[list[int]]:
    """Groups layers that do the same work, by what the probe has seen of them."""
    parameters = dict(module.named_parameters())
    groups: dict[Hashable, list[int]] = {}
    for layer in graph.layers:
        shapes = [
            (tuple(parameters[name].shape), name in graph.trained)
            for name in layer.parameters
            if name in parameters
        ]
        outputs = [
            (spec.shape, spec.stride, spec.dtype, spec.requires_grad)
            for spec in map(graph.spec, layer.tensor_keys)
        ]
        # The first trained layer passes no gradient on, which saves a third of its work.
        passes_gradient = any(graph.spec(key).requires_grad for key in layer.reads)
        work = (
            layer.cost_flops,
            layer.frozen,
            layer.carries_gradient,
            passes_gradient,
            tuple(sorted(shapes)),
            tuple(outputs),
            len(graph.stream(layer.index)),
        )
        groups.setdefault(work, []).append(layer.index)
    return list(groups.values())


def averaged(times: StepTimes, groups: Sequence[Sequence[int]]) -> StepTimes:
    """Gives all layers of a group their mean time in a step.

    Example:
        >>> times = StepTimes((0, 0, 0), (3.0, 5.0, 1.0), 0, (6.0, 8.0, 2.0), 0)
        >>> averaged(times, [[0, 1], [2]]).inside
        (4.0, 4.0, 1.0)
    """
    inside, backward = list(times.inside), list(times.backward)
    for group in groups:
        for seconds in (inside, backward):
            mean = statistics.fmean(seconds[index] for index in group)
            for index in group:
                seconds[index] = mean
    return replace(times, inside=tuple(inside), backward=tuple(backward))
