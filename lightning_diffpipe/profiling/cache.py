"""Profiles on disk, so that a model is measured once for each thing its times depend on.

The name of a file is a digest of all that: layers, parameters, shapes and types of the batch and of every
layer's outputs (and thereby the precision), device, threads, versions of torch and of this package. Files are plain
`diffpipe-profile/1` JSON, fit for `diffpipe plan profile=...`. They are written aside and then renamed,
so that a reader never sees half of one. A file that cannot be read, or describes another model, is named in a
warning and measured anew.

    ~/.cache/lightning_diffpipe/profiles/LatentDiffusion-3f0c2a9b11d04e52.json
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import tempfile
import warnings
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_diffpipe.errors import ProfileError
from lightning_diffpipe.graph.layer import LayerGraph
from lightning_diffpipe.graph.probe import Step
from lightning_diffpipe.graph.samples import count_samples
from lightning_diffpipe.planning.profile import FORMAT, ModelProfile
from lightning_diffpipe.profiling.measure import Progress, default_counts, measure_profile

CACHE_VARIABLE = "DIFFPIPE_CACHE"
"""Environment variable that names the folder of the cache."""


def cache_folder() -> Path:
    """Where profiles are kept: `$DIFFPIPE_CACHE/profiles`, else below `~/.cache`."""
    given = os.environ.get(CACHE_VARIABLE)
    root = Path(given) if given else Path.home() / ".cache" / "lightning_diffpipe"
    return root.expanduser() / "profiles"


def cached_profile(
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
    folder: Path | None = None,
) -> ModelProfile:
    """The profile from the cache, else measured and kept there.

    Arguments are those of `measure_profile`, and `folder`: where profiles are kept, `cache_folder()` if
    not given. A cache that cannot be written costs a warning, not the profile.
    """
    counts = tuple(sample_counts or default_counts(count_samples(batch)))
    name = name or type(module).__name__
    path = profile_path(module, graph, torch.device(device), counts, name, folder)
    known = read_cached(path, graph)
    if known is not None:
        return known
    profile = measure_profile(
        module,
        step,
        batch,
        graph,
        device=device,
        sample_counts=sample_counts,
        repeats=repeats,
        budget_s=budget_s,
        name=name,
        progress=progress,
    )
    try:
        write_atomically(path, profile.to_json())
    except OSError as error:
        warnings.warn(f"cannot keep the profile at {path}: {error}", stacklevel=2)
    return profile


def profile_path(
    module: nn.Module,
    graph: LayerGraph,
    device: torch.device,
    sample_counts: Sequence[int],
    name: str,
    folder: Path | None = None,
) -> Path:
    """The file that holds, or will hold, a profile."""
    facts = {
        "format": FORMAT,
        "graph": graph.digest,
        "parameters": [
            (key, list(p.shape), str(p.dtype), p.requires_grad)
            for key, p in module.named_parameters()
        ],
        "sample_counts": list(sample_counts),
        "device": device_name(device),
        "num_threads": torch.get_num_threads() if device.type == "cpu" else None,
        "torch": torch.__version__,
        "lightning_diffpipe": _own_version(),
    }
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", name)
    return (folder or cache_folder()) / f"{readable}-{digest}.json"


def read_cached(path: Path, graph: LayerGraph) -> ModelProfile | None:
    """Reads a kept profile; None, with a warning that names the file, if it is not one of this graph."""
    if not path.exists():
        return None
    try:
        profile = ModelProfile.from_json(path.read_text(), str(path))
        _require_same_layers(profile, graph, path)
    except (ProfileError, OSError, UnicodeDecodeError) as error:
        warnings.warn(
            f"ignoring the kept profile {path}, and measuring anew: {error}", stacklevel=3
        )
        return None
    return profile


def _require_same_layers(profile: ModelProfile, graph: LayerGraph, path: Path) -> None:
    kept = [layer.name for backbone in profile.backbones for layer in backbone.layers]
    expected = [graph.layers[index].name for index in graph.path]
    if kept != expected:
        raise ProfileError(f"{path} describes another model ({profile.name})")


def write_atomically(path: Path, text: str) -> None:
    """Writes a file aside, then puts it in place.

    Raises:
        OSError: The folder cannot be made or written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.stem, delete=False) as file:
        file.write(text)
    try:
        Path(file.name).replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            Path(file.name).unlink()
        raise


def device_name(device: torch.device) -> str:
    """The product name of a device, as far as it is known.

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


def _own_version() -> str:
    try:
        return version("lightning-diffpipe")
    except PackageNotFoundError:  # run from a source tree
        return "source"
