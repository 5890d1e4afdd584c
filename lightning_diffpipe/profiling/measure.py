"""Timing every layer of a module on this machine.

The step is run for real at several sample counts, again and again until the time allowed is used up, with
stamps at the borders of its layers (`step_run`); medians over the repetitions become the profile. The
first run at each count is profiler warm-up and does not count. Sample counts take turns, so that a
disturbance of the machine meets them all alike.

A module that is too large for the device is timed layer by layer instead (`one_by_one`).
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_diffpipe.errors import GraphError, ProfileError
from lightning_diffpipe.graph.interception import Interception
from lightning_diffpipe.graph.layer import LayerGraph
from lightning_diffpipe.graph.probe import Step
from lightning_diffpipe.graph.samples import count_samples
from lightning_diffpipe.planning.profile import ModelProfile, Seconds
from lightning_diffpipe.profiling.assembly import LayerCost, assemble
from lightning_diffpipe.profiling.clock import clock_for
from lightning_diffpipe.profiling.glue import StepTimes, backward_s, forward_s, repeated_s
from lightning_diffpipe.profiling.state import (
    placed,
    scratch_gradients,
    take_samples,
    tree_to,
    undisturbed,
)
from lightning_diffpipe.profiling.step_run import SavedBytes, StepRun

_log = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
"""`progress(what, share)`: what is being done, and how much of all is done, 0 to 1."""

_MIN_ROUNDS, _MAX_ROUNDS = 3, 30
_MAX_COUNTS = 5


def measure_profile(
    module: nn.Module,
    step: Step,
    batch: Any,
    graph: LayerGraph,
    *,
    device: torch.device | str = "cpu",
    sample_counts: Sequence[int] | None = None,
    repeats: int | None = None,
    budget_s: float = 10.0,
    name: str | None = None,
    progress: Progress | None = None,
) -> ModelProfile:
    """Times all layers of a step, forward, backward and its weight-gradient part.

    Threads are used as this process is set to. The module is left bit-identical: gradients, buffers,
    training flags, random number generators. It is moved to the device meanwhile if it lives elsewhere.

    Args:
        module: The whole module.
        step: Module and batch to loss.
        batch: A batch at least as large as the largest sample count.
        graph: Its layers, unfolded, as `probe` found them.
        device: Where to measure.
        sample_counts: Counts to time at; 1, 2, 4, ... up to half of the batch (a pipeline has two
            microbatches at least), as far as `budget_s` reaches, if not given.
        repeats: Timed runs at each count; as many as fit into `budget_s` if not given, 3 at least.
        budget_s: Seconds to spend, about. A slow step may take longer: it runs four times at least.
        name: Name of the profile; the module's class if not given.
        progress: Is told how far it is.

    Raises:
        ProfileError: The step cannot be run at any of the sample counts.
        GraphError: The step calls other layers than in its probe.
    """
    device = torch.device(device)
    total = count_samples(batch)
    counts = tuple(sample_counts) if sample_counts else default_counts(total)
    if total is not None and max(counts) > total:
        raise ProfileError(
            f"cannot time {max(counts)} samples with a batch of {total}; "
            "give a larger batch, or smaller sample_counts"
        )
    with undisturbed(module), placed(module, device):
        bench = _Bench(module, step, tree_to(batch, device), graph, device, progress)
        rounds = bench.rounds(counts, repeats, budget_s, fixed=sample_counts is not None)
        saved = bench.saved_bytes()
    costs, repeated = layer_costs(graph, rounds, saved), repeated_seconds(graph, rounds)
    return assemble(name or type(module).__name__, module, graph, costs, repeated)


def default_counts(num_samples: int | None) -> tuple[int, ...]:
    """Powers of two up to half of the batch, five at most.

    Example:
        >>> default_counts(24), default_counts(1), default_counts(256)
        ((1, 2, 4, 8), (1,), (1, 2, 4, 8, 16))
    """
    largest = max((num_samples or 1) // 2, 1)
    counts = [2**i for i in range(largest.bit_length())]
    return tuple(counts[:_MAX_COUNTS])


Rounds = Mapping[int, tuple[Sequence[StepTimes], Sequence[StepTimes]]]
"""By sample count: steps with whole backward, and with that of inputs only."""


def repeated_seconds(graph: LayerGraph, rounds: Rounds) -> Seconds:
    """Median of the glue that every stage runs, by sample count."""
    return Seconds.of(
        {
            count: statistics.median(repeated_s(graph, times) for times in (*whole, *inputs))
            for count, (whole, inputs) in rounds.items()
        }
    )


def layer_costs(
    graph: LayerGraph,
    rounds: Rounds,
    saved_bytes_per_sample: Sequence[float],
) -> dict[int, LayerCost]:
    """Medians over repetitions, for every layer.

    Args:
        graph: The layers.
        rounds: Times of steps.
        saved_bytes_per_sample: Bytes kept for the backward, by layer.
    """
    forward: dict[int, list[float]] = {}
    backward: dict[int, list[float]] = {}
    inputs: dict[int, list[float]] = {}
    for count, (whole, without_weights) in rounds.items():
        forward[count] = _medians([forward_s(graph, t) for t in (*whole, *without_weights)])
        backward[count] = _medians([backward_s(graph, t) for t in whole])
        inputs[count] = _medians([backward_s(graph, t) for t in without_weights])
    costs = {}
    for layer in graph.layers:
        i = layer.index
        trains = bool(layer.parameters & graph.trained)
        weights = {n: max(backward[n][i] - inputs[n][i], 0.0) * trains for n in rounds}
        costs[i] = LayerCost(
            Seconds.of({n: forward[n][i] for n in rounds}),
            Seconds.of({n: backward[n][i] for n in rounds}),
            Seconds.of(weights),
            round(saved_bytes_per_sample[i]),
        )
    return costs


def _medians(rows: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.median(column) for column in zip(*rows, strict=True)]


class _Bench:
    """A module on its device, ready to run its step again and again."""

    def __init__(
        self,
        module: nn.Module,
        step: Step,
        batch: Any,
        graph: LayerGraph,
        device: torch.device,
        progress: Progress | None,
    ) -> None:
        self._module, self._step, self._batch, self._graph = module, step, batch, graph
        self._total, self._clock = count_samples(batch), clock_for(device)
        self._device = device
        self._progress = progress or (lambda what, share: None)
        self._largest = 1

    def rounds(
        self, counts: Sequence[int], repeats: int | None, budget_s: float, fixed: bool
    ) -> dict[int, tuple[list[StepTimes], list[StepTimes]]]:
        """Runs all counts in turn; by count: steps with whole backward, with that of inputs only."""
        with self._interception() as interception:
            start_s = time.perf_counter()
            run = partial(self._run, interception)
            counts = self._warm_up(run, counts, None if fixed else budget_s)
            self._largest = max(counts)
            results: dict[int, tuple[list[StepTimes], list[StepTimes]]] = {}
            for turn in range(repeats or _MAX_ROUNDS):
                spent_s = time.perf_counter() - start_s
                share = max(turn / (repeats or _MAX_ROUNDS), 0 if repeats else spent_s / budget_s)
                if repeats is None and turn >= _MIN_ROUNDS and share >= 1:
                    break
                for count in counts:
                    self._progress(f"{count} samples, run {turn + 1}", min(share, 1.0))
                    whole, without_weights = results.setdefault(count, ([], []))
                    whole.append(run(count, "whole"))
                    without_weights.append(run(count, "inputs"))
        self._progress("timed", 1.0)
        return results

    def saved_bytes(self) -> list[float]:
        """Bytes kept for the backward per sample, by layer."""
        known = [*self._module.parameters(), *self._module.buffers()]
        run = StepRun(self._graph, self._clock)
        with (
            self._interception() as interception,
            SavedBytes(run, known, len(self._graph.layers)) as saved,
        ):
            run.forward_only(self._call(self._largest), interception)
        return [num_bytes / self._largest for num_bytes in saved.num_bytes]

    @contextmanager
    def _interception(self) -> Iterator[Interception]:
        interception = Interception(self._module, self._graph.layer_names).install()
        drop = scratch_gradients(self._module, self._graph.trained)
        try:
            yield interception
        finally:
            drop()
            interception.uninstall()

    def _warm_up(
        self,
        run: Callable[[int, Any], StepTimes],
        counts: Sequence[int],
        budget_s: float | None,
    ) -> tuple[int, ...]:
        """Runs every count once; leaves out those that cannot be run, or would take too long."""
        usable: list[int] = []
        failure: Exception | None = None
        committed_s = 0.0
        for count in counts:
            self._progress(f"{count} samples, warm-up", 0.0)
            try:
                took_s = run(count, "whole").total_s
            except (torch.OutOfMemoryError, RuntimeError, ValueError) as error:
                # Too little memory, or a step that needs more samples (batch norm needs two).
                _log.warning("cannot time %d samples: %s", count, error)
                failure = error
                continue
            usable.append(count)
            committed_s += took_s * (2 * _MIN_ROUNDS + 1)
            if budget_s is not None and committed_s + 2 * took_s * (2 * _MIN_ROUNDS + 1) > budget_s:
                break
        if not usable:
            if isinstance(failure, GraphError):
                raise failure
            raise ProfileError(f"the step runs with none of {list(counts)} samples: {failure}")
        return tuple(usable)

    def _run(self, interception: Interception, count: int, backward: Any) -> StepTimes:
        return StepRun(self._graph, self._clock).measure(self._call(count), interception, backward)

    def _call(self, count: int) -> Callable[[], Any]:
        batch = self._batch
        if self._total is not None and count != self._total:
            batch = take_samples(batch, self._total, count)
        return partial(self._step, self._module, batch)
