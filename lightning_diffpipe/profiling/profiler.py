"""`profile(module, batch)`: from an ordinary module and one batch to a profile."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from lightning_diffpipe.errors import ConfigurationError, require_choice, require_number
from lightning_diffpipe.graph.chains import find_chains
from lightning_diffpipe.graph.layer import LayerGraph
from lightning_diffpipe.graph.probe import probe
from lightning_diffpipe.graph.step import BatchSpec, ModuleSplit, Step, count_samples, take_samples
from lightning_diffpipe.host_memory import keep_freed_memory
from lightning_diffpipe.planning.profile import ModelProfile, separated
from lightning_diffpipe.profiling.measure import LayerTimer, Progress, measure_profile
from lightning_diffpipe.profiling.state import current, placeable, tree_to

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
