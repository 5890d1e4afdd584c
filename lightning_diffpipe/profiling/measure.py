"""Timing every layer of a module on this machine: `profile` for a module and one batch.

A `LayerTimer` runs the step for real at several sample counts, with stamps at the borders of its layers, until the
time allowed is used up. The first run at each count is profiler warm-up and does not count; counts take turns, so
that a disturbance of the machine meets them all. Medians over the repetitions, and means over equal layers, become
the profile. A module that is too large for the device is timed layer by layer instead.

A slow step is timed a few times only, and on a shared machine each layer of it is off by some per cent: a planner
would cut a transformer of equal blocks into unequal stages. Blocks that have the same weights' shapes, operations
and outputs are therefore timed as one, by the mean of all of them in a step, so that the step takes as long as
before:

    as timed   block.0 36   block.1 41   block.2 34   block.3 37   head 5
    averaged   block.0 37   block.1 37   block.2 37   block.3 37   head 5

torch reserves what it has freed of a GPU's memory for its next tensors. The driver counts that as used, and so do
other processes and libraries (NCCL). So it is counted as free here, and released once everything has been timed.
"""

import contextlib
import gc
import inspect
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from lightning_diffpipe.clock import Clock, clock_for
from lightning_diffpipe.errors import (
    ConfigurationError,
    GraphError,
    ProfileError,
    clear_variables,
    require_choice,
    require_number,
)
from lightning_diffpipe.graph.chains import find_chains
from lightning_diffpipe.graph.interception import Interception
from lightning_diffpipe.graph.layer import LayerGraph
from lightning_diffpipe.graph.placement import held_bytes, is_quantized_later
from lightning_diffpipe.graph.probe import probe, reprobe
from lightning_diffpipe.graph.sizes import equal_layers, layer_sizes
from lightning_diffpipe.graph.step import (
    BatchSpec,
    ModuleSplit,
    Step,
    StepCall,
    count_samples,
    take_samples,
)
from lightning_diffpipe.host_memory import keep_freed_memory, trim
from lightning_diffpipe.planning.profile import ModelProfile, separated
from lightning_diffpipe.profiling.layer_costs import (
    Encoding,
    MeasuredCosts,
    Splits,
    encodings,
    evened,
    found_by_running,
    split_seconds,
)
from lightning_diffpipe.profiling.step_run import (
    KeptBytes,
    OneByOneRun,
    Rounds,
    StepRun,
    StepTimes,
    current,
    kept_bytes,
    placeable,
    placed,
    saved_bytes,
    scratch_bytes,
    scratch_gradients,
    tree_to,
    undisturbed,
)

_log = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
"""`progress(what, share)`: what is being done, and how much of all is done, 0 to 1."""

_MIN_ROUNDS, _MAX_ROUNDS = 3, 30
_NOISE = 0.05  # where runs differ by less, as on a device of one's own, a few are enough
_MAX_COUNTS = 5
_COVERAGE = 3  # times the budget: rather fewer repetitions than times that are extrapolated
_MEMORY_SHARE = 0.5
"""Of a GPU's free memory that weights and gradients may take, so that activations fit as well."""


@dataclass(frozen=True)
class LayerTimer:
    """A step whose layers are timed, and the effort for it.

    Attributes:
        batch: A batch at least as large as the largest sample count.
        sample_counts: Counts to time at; if not given 1, 2, 4, ... up to half of the batch (a pipeline has two
            microbatches at least), thinned out where `budget_s` does not reach.
        microbatch_size: Samples of a microbatch, where that is decided already: timed as well.
        repeats: Timed runs at each count; if not given 3, or 2 that agree and take half of `budget_s` with the
            warm-up; while they disagree as many as fit into `budget_s`.
        budget_s: Seconds to spend, about. A slow step may take three times as long, or longer: at least 5 runs.
        name: Name of the profile; the module's class if not given.
        least_samples: Fewer than these the step cannot be run on.
        finds_results: Whether to find results of frozen layers, too, and whether they could be stored and split.
        splits_backward: Whether to time backwards of inputs only, too, and in halves, for schedules that split.
    """

    module: nn.Module
    step: Step
    batch: Any
    graph: LayerGraph
    device: torch.device | str = "cpu"
    sample_counts: Sequence[int] | None = None
    microbatch_size: int | None = None
    repeats: int | None = None
    budget_s: float = 10.0
    name: str | None = None
    progress: Progress | None = None
    finds_results: bool = True
    splits_backward: bool = True
    least_samples: int = 1

    @property
    def counts(self) -> tuple[int, ...]:
        """Sample counts to time at."""
        total = count_samples(self.batch, self.graph.batch_spec)
        counts = self.sample_counts or default_counts(total, self.microbatch_size)
        return tuple(n for n in counts if n >= self.least_samples) or (self.least_samples,)

    @cached_property
    def place(self) -> torch.device:
        """The device, as its tensors name it: `cuda` is the current GPU."""
        return placeable(self.device)

    @property
    def _clock(self) -> Clock:
        return clock_for(self.place)

    def run(self) -> tuple[Rounds, list[KeptBytes], Splits]:
        """Times all layers at the sample counts: at all of them, if they were given.

        Returns the times of steps; by layer the bytes saved for the backward; times of split backwards.

        Raises:
            ProfileError: The step runs at none of the counts.
            GraphError: It calls other layers than in its probe.
        """
        if self.fits:
            try:
                with placed(self.module, self.place):
                    return replace(self, batch=tree_to(self.batch, self.place))._rounds()
            except torch.OutOfMemoryError as error:
                clear_variables(error)
                _log.info("the step does not fit into %s; timing layer by layer", self.place)
            give_back(self.place)
        return *self._one_by_one(), {}

    @cached_property
    def fits(self) -> bool:
        """Whether the whole module and its gradients leave enough of the device's memory.

        Decided once: memory is counted when nothing has been timed yet. On a CPU weights are where they are, but
        for those that are quantized when they are placed.
        """
        if self.place.type != "cuda":
            return not any(map(is_quantized_later, self.module.parameters()))
        named = dict(self.module.named_parameters())
        need = scratch_bytes([p for name, p in named.items() if name in self.graph.trained])
        need += sum(held_bytes(p) for p in named.values() if p.device != self.place)
        return need < _MEMORY_SHARE * free_bytes(self.place)

    def _one_by_one(self) -> tuple[Rounds, list[KeptBytes]]:
        repeats = self.repeats or _MIN_ROUNDS
        rounds: dict[int, tuple[list[StepTimes], list[StepTimes]]] = {}
        saved: dict[int, list[int]] = {}
        with self._interception() as interception:

            def run(count: int) -> float:
                start_s = time.perf_counter()
                walk = OneByOneRun(self.graph, self._clock, self.place, repeats)
                rounds[count] = walk.walk(self._call(count), interception)
                saved[count] = walk.num_saved_bytes
                return time.perf_counter() - start_s

            self._runnable(run)
        return rounds, kept_bytes(saved)

    def _rounds(self) -> tuple[Rounds, list[KeptBytes], Splits]:
        """Times every sample count once in each round, until rounds agree; returns times, saved bytes, splits."""
        repeats, saved = self.repeats, dict[int, list[int]]()
        tensors = [*self.module.parameters(), *self.module.buffers()]
        scratch = scratch_gradients(self.module, self.graph.trained)
        with self._interception() as interception, scratch:
            start_s = time.perf_counter()
            run = partial(self._run, interception)
            kinds = ("whole", "inputs") if self.splits_backward else ("whole",)
            # The warm-up itself, and in each round a run of each kind and one that splits the backward.
            min_runs = 1 + _MIN_ROUNDS * (len(kinds) + self.splits_backward)

            def warm_up(count: int) -> float:
                # A slice has the storage of the whole batch, whose bytes would be counted.
                samples = pytree.tree_map_only(torch.Tensor, torch.clone, self.samples(count))
                first = StepRun(self.graph, self._clock)
                saving = saved_bytes(first, tensors)
                times = first.measure(self._call_on(samples), interception, "whole", saving)
                saved[count] = first.num_saved_bytes
                return min_runs * times.total_s

            results: dict[int, tuple[list[StepTimes], list[StepTimes]]]
            results = {count: ([], []) for count in self._runnable(warm_up)}
            splits: dict[int, list[float]] = {count: [] for count in results}
            max_rounds = repeats or _MAX_ROUNDS
            for num_rounds in range(max_rounds):
                share_spent = 0 if repeats else (time.perf_counter() - start_s) / self.budget_s
                share_done = max(num_rounds / max_rounds, share_spent)
                steps = [whole for whole, _ in results.values()]
                agree = num_rounds > 1 and all(map(_agree, steps))
                are_many = num_rounds >= _MIN_ROUNDS
                is_enough = agree and (are_many or share_spent >= 0.5)
                if repeats is None and (is_enough or (are_many and share_done >= 1)):
                    break
                gc.collect(0)  # activations may hang in cycles
                for count, (whole, inputs_only) in tuple(results.items()):
                    self._report(f"{count} samples, run {num_rounds + 1}", min(share_done, 1.0))
                    try:
                        # Each kind is first in every other round, as the first run finds caches cold.
                        for kind in kinds if num_rounds % 2 == 0 else kinds[::-1]:
                            times = inputs_only if kind == "inputs" else whole
                            times.append(run(count, kind))
                    except torch.OutOfMemoryError as error:
                        # There was more memory in the warm-up, or it was less fragmented.
                        if len(results) == 1:
                            raise
                        self._without(count, error)
                        del results[count], splits[count]
                        continue
                    if self.splits_backward and num_rounds < _MIN_ROUNDS:
                        splits[count] += self._split(interception, count)
        self._report("timed", 1.0)
        return results, kept_bytes({count: saved[count] for count in results}), splits

    def _interception(self) -> AbstractContextManager[Interception]:
        return Interception(self.module, self.graph.layer_names).installed()

    def _runnable(self, run: Callable[[int], float]) -> tuple[int, ...]:
        """Runs all counts once; leaves out those that cannot be run, or for which `run` says too many seconds."""
        usable: list[int] = []
        failure: Exception | None = None
        todo, limit_s = list(self.counts), _COVERAGE * self.budget_s
        while todo:
            count = todo.pop(0)
            self._report(f"{count} samples, warm-up", 0.0)
            try:
                needed_s = run(count)
                if not usable and self.sample_counts is None:
                    rest = spread(count, todo, needed_s / count, limit_s)
                    if rest != todo and needed_s < limit_s:
                        # The very first run set things up as well.
                        needed_s = min(needed_s, run(count))
                        rest = spread(count, todo, needed_s / count, limit_s)
                    todo = rest
            except (torch.OutOfMemoryError, RuntimeError, ValueError) as error:
                # Too little memory, or a step that needs more samples (batch norm needs two).
                failure = self._without(count, error)
                continue
            usable.append(count)
        if not usable:
            if isinstance(failure, GraphError | torch.OutOfMemoryError):
                raise failure
            message = f"the step runs with none of {list(self.counts)} samples: {failure}"
            raise ProfileError(message) from failure
        return tuple(usable)

    def _without(self, count: int, error: Exception) -> Exception:
        """Goes on without a count that cannot be run, and without what its step left in memory."""
        _log.warning("cannot time %d samples: %s", count, error)
        clear_variables(error)
        give_back(self.place)
        return error

    def _run(self, interception: Interception, count: int, backward: Any) -> StepTimes:
        return StepRun(self.graph, self._clock).measure(self._call(count), interception, backward)

    def _split(self, interception: Interception, count: int) -> list[float]:
        run = StepRun(self.graph, self._clock)
        try:
            seconds = run.split_backward_s(self._call(count), interception)
        except (RuntimeError, AttributeError) as error:
            # Too little memory, or a node that runs once only: checkpointing of a model's own forgets its inputs.
            _log.info("what splitting the backward adds stays unknown: %s", error)
            return []
        return [] if seconds is None else [seconds]

    def _call(self, count: int) -> Callable[[], Any]:
        return self._call_on(self.samples(count))

    def _call_on(self, batch: Any) -> StepCall:
        return StepCall(self.step, self.module, batch, written=self.graph.batch_writes)

    @property
    def probed(self) -> Any:
        """The part of the batch with as many samples as the probe saw."""
        return self.samples(self.graph.num_samples)

    def samples(self, count: int | None) -> Any:
        """Returns the first samples of the batch; all of it where the number is unknown, here or there."""
        total = count_samples(self.batch, self.graph.batch_spec)
        if total is None or count is None or count == total:
            return self.batch
        return take_samples(self.batch, total, count, self.graph.batch_spec)

    def _report(self, what: str, share: float) -> None:
        if self.progress is not None:
            self.progress(what, share)


def default_counts(num_samples: int | None, microbatch_size: int | None = None) -> tuple[int, ...]:
    """Returns powers of two up to half of the batch, five at most; if that is known, up to the microbatch, and it.

    Example:
        >>> default_counts(24), default_counts(1), default_counts(24, 3), default_counts(256, microbatch_size=64)
        ((1, 2, 4, 8), (1,), (1, 2, 3), (1, 2, 4, 8, 16, 64))
    """
    total = num_samples or 1
    most = min(microbatch_size or max(total // 2, 1), total)
    counts = [2**i for i in range(most.bit_length())][:_MAX_COUNTS]
    return tuple(sorted({*counts, most} if microbatch_size else counts))


def spread(first: int, others: Sequence[int], per_sample_s: float, limit_s: float) -> list[int]:
    """Returns which other sample counts fit into a time, besides the first, at distances as large as possible.

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


def _agree(steps: Sequence[StepTimes]) -> bool:
    """Returns whether the middle half of the runs differs by little; a single slow one decides nothing.

    Two differ by twice as much as their middle half.
    """
    seconds = [step.total_s for step in steps]
    first, _, third = statistics.quantiles(seconds, n=4, method="inclusive")
    return third <= (1 + _NOISE) * first


def free_bytes(device: torch.device) -> int:
    """Returns bytes of a GPU that tensors of this process may still take."""
    free: int = torch.cuda.mem_get_info(device)[0]
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def give_back(device: torch.device) -> None:
    """Releases memory that no tensor uses to the driver, or to the kernel."""
    if device.type == "cuda":
        gc.collect()  # activations may hang in cycles
        torch.cuda.empty_cache()
    else:
        trim()


def measure_profile(timer: LayerTimer) -> ModelProfile:
    """Measures what the layers of a step cost on this rank; see `measure_costs`."""
    return measure_costs(timer).profile()


def measure_costs(timer: LayerTimer) -> MeasuredCosts:
    """Times all layers of a step, forward, backward and its weight-gradient part.

    The module is left bit-identical, and moved to the device meanwhile if it lives elsewhere.

    Raises:
        ProfileError: The step cannot be run at any of the sample counts.
        GraphError: The step calls other layers than in its probe.
    """
    total, counts = count_samples(timer.batch, timer.graph.batch_spec), timer.counts
    if total is not None and max(counts) > total:
        raise ProfileError(
            f"cannot time {max(counts)} samples with a batch of {total}; "
            "give a larger batch, or smaller sample_counts"
        )
    try:
        with current(timer.place):
            with undisturbed(timer.module):
                rounds, saved, splits = timer.run()
                known = _encodings_of_device(timer) if timer.finds_results else {}
            graph = graph_of_device(timer)
    finally:
        give_back(timer.place)
    sizes = layer_sizes(timer.module, graph, timer.name)
    alike = equal_layers(timer.module, timer.graph)
    split_s = split_seconds(rounds, splits)
    return MeasuredCosts(sizes, graph, evened(rounds, alike), saved, split_s, known)


def _encodings_of_device(timer: LayerTimer) -> dict[str, Encoding]:
    """Returns results of encoders by name; if the module fits on the device, also whether to store them."""
    module, step, graph = timer.module, timer.step, timer.graph
    if not timer.fits:
        return encodings(module, step, timer.probed, graph)
    with placed(module, timer.place):
        small = tree_to(timer.probed, timer.place)
        return encodings(module, step, small, graph, found_by_running(module, step, small))


def graph_of_device(timer: LayerTimer) -> LayerGraph:
    """Probes the types of layers on the device, where autocast may halve what it leaves alone on a host."""
    module, device = timer.module, timer.place
    if device.type == "cpu" or not timer.fits:
        return timer.graph
    with undisturbed(module), placed(module, device):
        return reprobe(module, timer.step, tree_to(timer.probed, device), timer.graph)


def encodings_by_running(timer: LayerTimer, stores: bool) -> dict[str, Encoding]:
    """Returns by name what encoders give for the probed samples, on the device of the module.

    They run on all samples at once, one by one and, if `stores`, with other random numbers.
    """
    module, step, small = timer.module, timer.step, timer.probed
    with undisturbed(module):
        observe = found_by_running(module, step, small, stores)
        return encodings(module, step, small, timer.graph, observe)


_NUM_PROBED_SAMPLES = 2


def profile(
    module: nn.Module,
    batch: Any,
    *,
    step: Step | None = None,
    device: torch.device | str | None = None,
    sample_counts: Sequence[int] | None = None,
    repeats: int | None = None,
    budget_s: float = 10.0,
    name: str | None = None,
    max_share: float = 1 / 32,
    progress: bool = False,
) -> ModelProfile:
    """Measures what every layer of a module costs in training; leaves the module bit-identical.

    Args:
        module: A LightningModule, or any module together with a `step`.
        batch: A batch as `training_step` gets it, on the host or the device.
        step: Module and batch to loss; `training_step` if not given.
        device: Device to measure on; the module's own, if not given.
        sample_counts: Numbers of samples to measure; 1, 2, 4, ... up to half of the batch if not given.
        repeats: Timed runs at each number; as many as fit into `budget_s` if not given.
        budget_s: Seconds to spend, about.
        name: Name of the profile; the module's class if not given.
        max_share: No layer should cost more than this share of the step.
        progress: Show a progress bar.

    Raises:
        ConfigurationError: The module has no `training_step`, and no step was given; or a number is not positive.
        GraphError: The step cannot be cut into layers.
        ProfileError: It cannot be run at these numbers of samples.

    Example:
        >>> module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
        >>> step = lambda module, batch: module(batch).mean()
        >>> found = profile(module, torch.ones(4, 4), step=step, budget_s=0.1)
        >>> [layer.name for layer in found.backbones[0].layers]
        ['0', '1']
    """
    step = step or default_step(module)
    numbers = [("budget_s", budget_s), ("repeats", repeats)]
    for what, number in [*numbers, *(("sample_counts", count) for count in sample_counts or ())]:
        if number is not None:
            require_number(what, number, above=0)
    home = next((p.device for p in module.parameters()), torch.device("cpu"))
    place = placeable(home if device is None else device)
    if place.type == "cpu":
        keep_freed_memory()  # as training will
    batch = tree_to(batch, home)
    with current(home):
        graph, starts = _probed(module, step, batch, max_share)
    with bar(progress) as report:
        timer = LayerTimer(
            module, step, batch, graph, device=place, sample_counts=sample_counts,
            repeats=repeats, budget_s=budget_s, name=name, progress=report,
        )  # fmt: skip
        return separated(measure_profile(timer), starts)


def _probed(
    module: nn.Module, step: Step, batch: Any, max_share: float
) -> tuple[LayerGraph, tuple[int, ...]]:
    batch_spec: BatchSpec | ModuleSplit | None = ModuleSplit.of(module)
    total = count_samples(batch, batch_spec)
    if total is not None:
        batch_spec = batch_spec or BatchSpec.of(batch, total)
        if total > _NUM_PROBED_SAMPLES:
            batch = take_samples(batch, total, _NUM_PROBED_SAMPLES, batch_spec)
    graph = probe(module, step, batch, max_share=max_share, batch_spec=batch_spec)
    return graph, find_chains(module, step, batch, graph).starts


def default_step(module: nn.Module) -> Step:
    """Returns a step that calls `training_step`, with the batch's index if it takes one.

    Raises:
        ConfigurationError: There is no `training_step`.
    """
    training_step = getattr(module, "training_step", None)
    if not callable(training_step):
        raise ConfigurationError(
            f"{type(module).__name__} has no training_step; "
            "pass step=lambda module, batch: ... that returns the loss"
        )
    takes_index = len(inspect.signature(training_step).parameters) > 1
    arguments = (0,) if takes_index else ()
    return lambda module, batch: module.training_step(batch, *arguments)


_MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def in_precision(step: Step, precision: str, device: str) -> Step:
    """Returns a step under the autocast of a Lightning precision; raises ConfigurationError for an unknown one."""
    require_choice("precision", precision, ("32-true", *_MIXED))
    if precision == "32-true":
        return step

    def cast(module: Any, batch: Any) -> Any:
        with torch.autocast(torch.device(device).type, _MIXED[precision]):
            return step(module, batch)

    return cast


@contextlib.contextmanager
def bar(
    wanted: bool, what: str = "profiling", *, counted: bool = True, stays: bool = True
) -> Iterator[Progress | None]:
    """Shows a progress bar on standard error, if `wanted`; with the share if `counted`, for good if it `stays`."""
    if not wanted:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:28}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=not stays) as shown:
        task = shown.add_task(what, total=1.0 if counted else None)
        report: Callable[[str, float], None] = lambda what, share: shown.update(
            task, description=what, completed=share
        )
        yield report
