"""Running a step again and again, at several sample counts, until the time allowed is used up.

The first run at each count is profiler warm-up and does not count. Sample counts take turns, so that a disturbance
of the machine meets them all. Where time is short, counts between the smallest and the largest are left out. A
module that is too large for the device is timed layer by layer instead.

torch reserves what it has freed of a GPU's memory for its next tensors. The driver counts that as used, and so do
other processes and libraries (NCCL). So it is counted as free here, and released once everything has been timed.
"""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from lightning_diffpipe.clock import clock_for
from lightning_diffpipe.errors import GraphError, ProfileError, clear_variables
from lightning_diffpipe.graph.interception import Interception
from lightning_diffpipe.graph.layer import LayerGraph
from lightning_diffpipe.graph.step import Step, StepCall, count_samples
from lightning_diffpipe.profiling.state import placed, scratch_gradients, take_samples, tree_to
from lightning_diffpipe.profiling.step_run import (
    KeptBytes,
    OneByOneRun,
    StepRun,
    kept_bytes,
    saved_bytes,
)
from lightning_diffpipe.profiling.step_times import Rounds, StepTimes

_log = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
"""`progress(what, share)`: what is being done, and how much of all is done, 0 to 1."""

Splits = Mapping[int, Sequence[float]]
"""By sample count: seconds of backwards in two halves; empty where a stage runs them as one."""

_MIN_ROUNDS, _MAX_ROUNDS = 3, 30
_COVERAGE = 3  # times the budget: rather fewer repetitions than times that are extrapolated
_MEMORY_SHARE = 0.5
"""Of a GPU's free memory that weights and gradients may take, so that activations fit as well."""


class Bench:
    """Times the layers of one module.

    Args:
        module: The module.
        step: Module and batch to loss.
        batch: The largest batch there is.
        graph: The layers, unfolded.
        device: Where to measure.
        progress: Is called with how far it is.
    """

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
        self._total, self._clock = count_samples(batch, graph.form), clock_for(device)
        self._device = device
        self._progress = progress or (lambda what, share: None)

    def run(
        self, counts: Sequence[int], repeats: int | None, budget_s: float, fixed: bool
    ) -> tuple[Rounds, list[KeptBytes], Splits]:
        """Times all layers.

        Args:
            counts: Sample counts, ascending.
            repeats: Timed runs at each; as many as fit into `budget_s` if None.
            budget_s: Seconds to spend, about; up to three times as many where the counts need it.
            fixed: Run all of the counts, however long it takes.

        Returns:
            The times of steps; by layer the bytes saved for the backward; times of split backwards.

        Raises:
            ProfileError: The step runs at none of the counts.
            GraphError: It calls other layers than in its probe.
        """
        limit_s = None if fixed else _COVERAGE * budget_s
        if self.fits:
            try:
                return self._in_place(counts, repeats, budget_s, limit_s)
            except torch.OutOfMemoryError as error:
                clear_variables(error)
                _log.info("the step does not fit into %s; timing layer by layer", self._device)
            give_back(self._device)
        return *self._one_by_one(counts, repeats or _MIN_ROUNDS, limit_s), {}

    @cached_property
    def fits(self) -> bool:
        """Whether the whole module and its gradients leave enough of the device's memory.

        Decided once: memory is counted when nothing has been timed yet.
        """
        if self._device.type != "cuda":
            return True
        trained = self._graph.trained
        need = sum(
            p.numel() * p.element_size() * ((p.device != self._device) + (name in trained))
            for name, p in self._module.named_parameters()
        )
        return need < _MEMORY_SHARE * free_bytes(self._device)

    def _in_place(
        self,
        counts: Sequence[int],
        repeats: int | None,
        budget_s: float,
        limit_s: float | None,
    ) -> tuple[Rounds, list[KeptBytes], Splits]:
        batch = self._batch
        try:
            with placed(self._module, self._device):
                self._batch = tree_to(batch, self._device)
                rounds, splits = self._rounds(counts, repeats, budget_s, limit_s)
                saved = {count: self._saved_bytes(count) for count in {min(rounds), max(rounds)}}
                return rounds, kept_bytes(saved), splits
        finally:
            self._batch = batch

    def _one_by_one(
        self, counts: Sequence[int], repeats: int, limit_s: float | None
    ) -> tuple[Rounds, list[KeptBytes]]:
        rounds: dict[int, tuple[list[StepTimes], list[StepTimes]]] = {}
        saved: dict[int, list[int]] = {}
        with self._interception() as interception:

            def run(count: int) -> float:
                start_s = time.perf_counter()
                walk = OneByOneRun(self._graph, self._clock, self._device, repeats)
                rounds[count] = walk.walk(self._call(count), interception)
                saved[count] = walk.num_saved_bytes
                return time.perf_counter() - start_s

            self._runnable(run, counts, limit_s)
        return rounds, kept_bytes(saved)

    def _rounds(
        self,
        counts: Sequence[int],
        repeats: int | None,
        budget_s: float,
        limit_s: float | None,
    ) -> tuple[dict[int, tuple[list[StepTimes], list[StepTimes]]], dict[int, list[float]]]:
        """Runs all counts in turn."""
        scratch = scratch_gradients(self._module, self._graph.trained)
        with self._interception() as interception, scratch:
            start_s = time.perf_counter()
            run = partial(self._run, interception)
            runs = 3 * _MIN_ROUNDS + 1
            warm_up = lambda count: runs * run(count, "whole").total_s
            results: dict[int, tuple[list[StepTimes], list[StepTimes]]]
            results = {count: ([], []) for count in self._runnable(warm_up, counts, limit_s)}
            splits: dict[int, list[float]] = {count: [] for count in results}
            for turn in range(repeats or _MAX_ROUNDS):
                spent_s = time.perf_counter() - start_s
                share = max(turn / (repeats or _MAX_ROUNDS), 0 if repeats else spent_s / budget_s)
                if repeats is None and turn >= _MIN_ROUNDS and share >= 1:
                    break
                for count in tuple(results):
                    self._progress(f"{count} samples, run {turn + 1}", min(share, 1.0))
                    try:
                        # Either is first in turn: it finds caches full of something else.
                        for kind in (0, 1) if turn % 2 == 0 else (1, 0):
                            results[count][kind].append(run(count, ("whole", "inputs")[kind]))
                    except torch.OutOfMemoryError as error:
                        # Its warm-up found more memory, or less of it in pieces.
                        if len(results) == 1:
                            raise
                        self._without(count, error)
                        del results[count], splits[count]
                        continue
                    if turn < _MIN_ROUNDS:
                        splits[count] += self._split(interception, count)
        self._progress("timed", 1.0)
        return results, splits

    def _saved_bytes(self, count: int) -> list[int]:
        # A slice would count as large as the whole batch.
        batch = pytree.tree_map_only(torch.Tensor, torch.clone, self._samples(count))
        known = [*self._module.parameters(), *self._module.buffers()]
        run = StepRun(self._graph, self._clock)
        with self._interception() as interception, saved_bytes(run, known) as saved:
            run.forward_only(self._call_on(batch), interception)
        return saved

    @contextmanager
    def _interception(self) -> Iterator[Interception]:
        interception = Interception(self._module, self._graph.layer_names).install()
        try:
            yield interception
        finally:
            interception.uninstall()

    def _runnable(
        self, run: Callable[[int], float], counts: Sequence[int], limit_s: float | None
    ) -> tuple[int, ...]:
        """Runs all counts once; leaves out those that cannot be run, or would take too long.

        Args:
            run: Runs a count, and says how many seconds all runs at it will take.
            counts: Ascending.
            limit_s: Seconds there are for all of them.
        """
        usable: list[int] = []
        failure: Exception | None = None
        todo = list(counts)
        while todo:
            count = todo.pop(0)
            self._progress(f"{count} samples, warm-up", 0.0)
            try:
                needed_s = run(count)
                if not usable and limit_s is not None:
                    if needed_s < limit_s:  # the very first run set things up as well
                        needed_s = min(needed_s, run(count))
                    todo = spread(count, todo, needed_s / count, limit_s)
            except (torch.OutOfMemoryError, RuntimeError, ValueError) as error:
                # Too little memory, or a step that needs more samples (batch norm needs two).
                failure = self._without(count, error)
                continue
            usable.append(count)
        if not usable:
            if isinstance(failure, GraphError | torch.OutOfMemoryError):
                raise failure
            message = f"the step runs with none of {list(counts)} samples: {failure}"
            raise ProfileError(message) from failure
        return tuple(usable)

    def _without(self, count: int, error: Exception) -> Exception:
        """Goes on without a count that cannot be run, and without what its step left in memory."""
        _log.warning("cannot time %d samples: %s", count, error)
        clear_variables(error)
        give_back(self._device)
        return error

    def _run(self, interception: Interception, count: int, backward: Any) -> StepTimes:
        return StepRun(self._graph, self._clock).measure(self._call(count), interception, backward)

    def _split(self, interception: Interception, count: int) -> list[float]:
        run = StepRun(self._graph, self._clock)
        try:
            seconds = run.split_backward_s(self._call(count), interception)
        except (RuntimeError, AttributeError) as error:
            # Too little memory, or a node that runs once only: checkpointing of a model's own forgets its inputs.
            _log.info("what splitting the backward adds stays unknown: %s", error)
            return []
        return [] if seconds is None else [seconds]

    def _call(self, count: int) -> Callable[[], Any]:
        return self._call_on(self._samples(count))

    def _call_on(self, batch: Any) -> StepCall:
        return StepCall(self._step, self._module, batch, written=self._graph.batch_writes)

    def _samples(self, count: int) -> Any:
        if self._total is None or count == self._total:
            return self._batch
        return take_samples(self._batch, self._total, count, self._graph.form)


def spread(first: int, others: Sequence[int], per_sample_s: float, limit_s: float) -> list[int]:
    """Returns which other sample counts fit into a time, besides the first, as far apart as possible.

    The largest comes first: with a microbatch far above what was measured, a time would be extrapolated from
    counts at which activations still fit into a cache.

    Example:
        >>> spread(1, [2, 4, 8, 16], per_sample_s=1.0, limit_s=22)
        [4, 16]
    """
    chosen, left_s = [first], limit_s - first * per_sample_s
    candidates = set(others)
    while candidates:
        farthest = max(candidates, key=lambda n: (min(abs(math.log(n / c)) for c in chosen), n))
        candidates.remove(farthest)
        if farthest * per_sample_s <= left_s:
            chosen.append(farthest)
            left_s -= farthest * per_sample_s
    return sorted(chosen[1:])


def free_bytes(device: torch.device) -> int:
    """Returns bytes of a GPU that tensors of this process may still take."""
    free: int = torch.cuda.mem_get_info(device)[0]
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def give_back(device: torch.device) -> None:
    """Releases memory that no tensor uses to the driver."""
    if device.type == "cuda":
        gc.collect()  # activations may hang in cycles
        torch.cuda.empty_cache()
