"""`profile(module, batch)`: from an ordinary module and one batch to a profile; and profiles on disk.

A model is measured once for each thing its times depend on. The name of a file is a digest of all that: layers,
parameters, shapes and types of the batch and of every layer's outputs, autocast, how float32 and attention are
computed, which modules checkpoint gradients, device, threads, versions of torch and of this package. Files are
plain `diffpipe-profile/1` JSON, fit for `diffpipe plan profile=...`. One that cannot be read, or describes another
model, is named in a warning and measured anew. One that is read is first compared with a few runs of the step: a
profile taken while something else ran on the machine would spoil every plan from then on.

    ~/.cache/lightning_diffpipe/profiles/LatentDiffusion-3f0c2a9b11d04e52.json
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import logging
import os
import platform
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_diffpipe.errors import ConfigurationError, DiffPipeError, ProfileError
from lightning_diffpipe.files import write_atomically
from lightning_diffpipe.graph.chains import find_chains
from lightning_diffpipe.graph.layer import LayerGraph
from lightning_diffpipe.graph.probe import probe
from lightning_diffpipe.graph.step import BatchForm, ModuleSplit, Step, count_samples
from lightning_diffpipe.graph.versions import float32_precisions
from lightning_diffpipe.host_memory import keep_freed_memory
from lightning_diffpipe.planning.profile import FORMAT, ModelProfile, separated
from lightning_diffpipe.profiling.bench import Progress
from lightning_diffpipe.profiling.measure import Subject, measure_profile
from lightning_diffpipe.profiling.state import current, placeable, take_samples, tree_to
from lightning_diffpipe.profiling.step_run import Pool, alone

CACHE_VARIABLE = "DIFFPIPE_CACHE"
"""Environment variable that names the folder of the cache."""

TOLERANCE = 0.15
"""A stored profile holds if the step takes as long as it says, give or take this share."""

_BYTES_TOLERANCE = 0.01  # bytes are counted, not timed

_LOOKS, _QUICK_S = 3, 0.2
_CONTENT = 9  # raised when profiles say more, or something else; older files are not used
_log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Returns where profiles are stored: `$DIFFPIPE_CACHE/profiles`, else below `~/.cache`."""
    given = os.environ.get(CACHE_VARIABLE)
    root = Path(given) if given else Path.home() / ".cache" / "lightning_diffpipe"
    return root.expanduser() / "profiles"


def cached_profile(
    subject: Subject,
    agree: Callable[[ModelProfile | None], ModelProfile | None] = lambda known: known,
    pool: Pool = alone,
) -> ModelProfile:
    """Reads the profile from the cache if it is still true; else measures it and stores it there.

    Args:
        subject: What is measured.
        agree: Where several ranks measure at once: gives all of them the first one's profile, or its verdict that
            it has none that holds.
        pool: As for `measure_profile`, whose errors may be raised.
    """
    device = torch.device(subject.device)
    path = profile_path(subject.module, subject.graph, device, subject.counts, subject.title)
    known = read_cached(path, subject.graph)
    holds = known is not None and still_holds(known, subject, str(path))
    known = agree(known if holds else None)
    if known is not None:
        return known
    profile = measure_profile(subject, pool)
    store_profile(path, profile)
    return profile


def store_profile(path: Path, profile: ModelProfile) -> None:
    """Writes a profile to a file of the cache; where that is impossible, warns instead."""
    try:
        write_atomically(path, profile.to_json())
    except OSError as error:
        warnings.warn(f"cannot keep the profile at {path}: {error}", stacklevel=3)


def still_holds(known: ModelProfile, subject: Subject, source: str) -> bool:
    """Runs the step a few times and compares times and bytes; logs a line if the profile does not hold."""
    if not subject.fits:
        return True  # Layer by layer, a look would take as long as a profile.
    counts = [samples for samples, _ in known.backbones[0].layers[0].forward_s.points]
    quick = [count for count in counts if known.trained_s(count) <= _QUICK_S] or counts[:1]
    look = replace(subject, sample_counts=quick[-1:], repeats=_LOOKS, progress=None)
    try:
        found = measure_profile(replace(look, looks_at_results=False))
    except (DiffPipeError, torch.OutOfMemoryError):
        return False
    now_bytes, then_bytes = _activation_bytes(found, quick[-1]), _activation_bytes(known, quick[-1])
    if abs(now_bytes - then_bytes) > _BYTES_TOLERANCE * then_bytes:
        _log.warning(
            "the stored profile %s has %.4g MB of activations for %d samples, and now they are %.4g MB; "
            "measuring anew", source, then_bytes / 1e6, quick[-1], now_bytes / 1e6,
        )  # fmt: skip
        return False
    now_s, then_s = _step_s(found, quick[-1]), _step_s(known, quick[-1])
    holds = abs(now_s - then_s) <= TOLERANCE * min(now_s, then_s)
    if not holds:
        _log.warning(
            "the stored profile %s has %.3g ms for %d samples, and now they take %.3g ms; "
            "measuring anew", source, 1e3 * then_s, quick[-1], 1e3 * now_s,
        )  # fmt: skip
    return holds


def _step_s(profile: ModelProfile, samples: int) -> float:
    """Returns seconds of a step on one rank, frozen layers included."""
    frozen_s = sum(layer.forward_s.at(samples) for layer in profile.frozen_layers)
    return profile.trained_s(samples) + frozen_s


def _activation_bytes(profile: ModelProfile, samples: int) -> float:
    """Returns what the trained layers keep of a microbatch for their backwards."""
    return sum(
        layer.activation_bytes_per_sample * samples + layer.activation_bytes_per_microbatch
        for layer in profile.layers
    )


def profile_path(
    module: nn.Module,
    graph: LayerGraph,
    device: torch.device,
    sample_counts: Sequence[int],
    name: str,
) -> Path:
    """Returns the file that holds, or will hold, a profile."""
    own_version = "source"  # run from a source tree
    with contextlib.suppress(PackageNotFoundError):
        own_version = version("lightning-diffpipe")
    inputs = {
        "format": FORMAT,
        "content": _CONTENT,
        "graph": graph.digest,
        "parameters": [
            (key, list(p.shape), str(p.dtype), p.requires_grad)
            for key, p in module.named_parameters()
        ],
        "autocast": sorted(graph.autocast),
        "kernels": _kernels(module),
        "sample_counts": list(sample_counts),
        "device": device_name(device),
        "num_threads": torch.get_num_threads() if device.type == "cpu" else None,
        "torch": torch.__version__,
        "lightning_diffpipe": own_version,
    }
    digest = hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:16]
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", name)
    return cache_folder() / f"{readable}-{digest}.json"


def _kernels(module: nn.Module) -> list[object]:
    """Returns what decides which kernels run and is seen in no tensor: precision, attention, checkpoints."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    attention = (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
    )
    processors = {type(getattr(m, "processor", None)).__name__ for m in module.modules()}
    checkpointing = [
        name for name, m in module.named_modules() if getattr(m, "gradient_checkpointing", False)
    ]
    return [*float32_precisions(), cudnn.benchmark, *attention, sorted(processors), checkpointing]


def read_cached(path: Path, graph: LayerGraph) -> ModelProfile | None:
    """Reads a stored profile; None, with a warning that names the file, if it is not one of this graph."""
    if not path.exists():
        return None
    try:
        profile = ModelProfile.from_json(path.read_text(), str(path))
        if tuple(layer.name for layer in profile.layers) != graph.path_names:
            raise ProfileError(f"it describes another model ({profile.name})")
    except (ProfileError, OSError, UnicodeDecodeError) as error:
        warnings.warn(
            f"ignoring the stored profile {path}, and measuring anew: {error}", stacklevel=3
        )
        return None
    return profile


def device_name(device: torch.device) -> str:
    """Returns the product name of a device, as far as it is known.

    Example:
        >>> device_name(torch.device("meta"))
        'meta'
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


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
    cache: bool = False,
    progress: bool = False,
) -> ModelProfile:
    """Measures what every layer of a module costs in training; leaves the module bit-identical.

    Args:
        module: A LightningModule, or any module together with a `step`.
        batch: A batch as `training_step` gets it, on the host or the device.
        step: Module and batch to loss; `training_step` if not given.
        device: Where to measure; where the module is, if not given.
        sample_counts: Numbers of samples to measure; 1, 2, 4, ... up to half of the batch if not given.
        repeats: Timed runs at each number; as many as fit into `budget_s` if not given.
        budget_s: Seconds to spend, about.
        name: Name of the profile; the module's class if not given.
        max_share: No layer should cost more than this share of the step.
        cache: Look in the cache first, and keep the result there.
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
        if number is not None and not number > 0:
            raise ConfigurationError(f"{what} must be positive; got {number}")
    home = next((p.device for p in module.parameters()), torch.device("cpu"))
    place = placeable(home if device is None else device)
    if place.type == "cpu":
        keep_freed_memory()  # as training will
    batch = tree_to(batch, home)
    with current(home):
        graph, starts = _probed(module, step, batch, max_share)
    with bar(progress) as report:
        subject = Subject(
            module, step, batch, graph, device=place, sample_counts=sample_counts,
            repeats=repeats, budget_s=budget_s, name=name, progress=report,
        )  # fmt: skip
        found = cached_profile(subject) if cache else measure_profile(subject)
        return separated(found, starts)


def _probed(
    module: nn.Module, step: Step, batch: Any, max_share: float
) -> tuple[LayerGraph, tuple[int, ...]]:
    form: BatchForm | ModuleSplit | None = ModuleSplit.of(module)
    total = count_samples(batch, form)
    if total is not None:
        form = form or BatchForm.of(batch, total)
        if total > _NUM_PROBED_SAMPLES:
            batch = take_samples(batch, total, _NUM_PROBED_SAMPLES, form)
    graph = probe(module, step, batch, max_share=max_share, form=form)
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
    """Runs a step under the autocast of a Lightning precision.

    Raises:
        ConfigurationError: An unknown precision.
    """
    if precision == "32-true":
        return step
    if precision not in _MIXED:
        raise ConfigurationError(
            f"unknown precision={precision!r}; choose one of 32-true, {', '.join(_MIXED)}"
        )

    def cast(module: Any, batch: Any) -> Any:
        with torch.autocast(torch.device(device).type, _MIXED[precision]):
            return step(module, batch)

    return cast


@contextlib.contextmanager
def bar(
    wanted: bool, what: str = "profiling", *, counted: bool = True, stays: bool = True
) -> Iterator[Progress | None]:
    """Shows a progress bar on standard error, if `wanted`.

    Args:
        wanted: Whether there shall be one.
        what: What takes a while.
        counted: Whether it will be called with how far that is.
        stays: Whether it is left there in the end.
    """
    if not wanted:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:28}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=not stays) as drawn:
        task = drawn.add_task(what, total=1.0 if counted else None)
        report: Callable[[str, float], None] = lambda what, share: drawn.update(
            task, description=what, completed=share
        )
        yield report
