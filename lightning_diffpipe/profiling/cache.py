"""Profiles on disk, so that a model is measured once for each thing its times depend on.

The name of a file is a digest of all that: layers, parameters, shapes and types of the batch and of every
layer's outputs, autocast, how float32 and attention are computed, which modules checkpoint gradients, device,
threads, versions of torch and of this package. Files are plain
`diffpipe-profile/1` JSON, fit for `diffpipe plan profile=...`. They are written elsewhere and then renamed,
so that a reader never sees half of one. A file that cannot be read, or describes another model, is named in a
warning and measured anew. One that is read is first compared with a few runs of the step: a profile taken
while something else ran on the machine would spoil every plan from then on.

    ~/.cache/lightning_diffpipe/profiles/LatentDiffusion-3f0c2a9b11d04e52.json
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import nn

from lightning_diffpipe.errors import DiffPipeError, ProfileError
from lightning_diffpipe.files import write_atomically
from lightning_diffpipe.graph.float32 import float32_precisions
from lightning_diffpipe.graph.layer import LayerGraph
from lightning_diffpipe.planning.profile import FORMAT, ModelProfile
from lightning_diffpipe.profiling.measure import Subject, measure_profile
from lightning_diffpipe.profiling.step_times import Pool, alone

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
    folder: Path | None = None,
    agree: Callable[[ModelProfile | None], ModelProfile | None] = lambda known: known,
    pool: Pool = alone,
) -> ModelProfile:
    """Reads the profile from the cache if it is still true; else measures it and stores it there.

    A cache that cannot be written costs a warning, not the profile.

    Args:
        subject: What is measured.
        folder: Where profiles are stored; `cache_folder()` if not given.
        agree: Where several ranks measure at once: gives all of them the first one's profile, or
            its verdict that it has none that holds.
        pool: As for `measure_profile`.

    Raises:
        ProfileError: See `measure_profile`.
        GraphError: See `measure_profile`.
    """
    device = torch.device(subject.device)
    path = profile_path(
        subject.module, subject.graph, device, subject.counts, subject.title, folder
    )
    known = read_cached(path, subject.graph)
    holds = known is not None and still_holds(known, subject, str(path))
    known = agree(known if holds else None)
    if known is not None:
        return known
    profile = measure_profile(subject, pool)
    try:
        write_atomically(path, profile.to_json())
    except OSError as error:
        warnings.warn(f"cannot keep the profile at {path}: {error}", stacklevel=2)
    return profile


def still_holds(known: ModelProfile, subject: Subject, source: str) -> bool:
    """Runs the step a few times and compares; says so in a line if the profile does not hold.

    Times change without anything that names the file: another process on the cores, now or then, a
    warmer chip, other libraries. Bytes saved for the backward change with the code of a layer, which does not name
    it either.
    """
    if not subject.bench.fits:
        return True  # Layer by layer, a look would take as long as a profile.
    counts = [samples for samples, _ in known.backbones[0].layers[0].forward_s.points]
    quick = [count for count in counts if known.trained_s(count) <= _QUICK_S] or counts[:1]
    look = replace(
        subject,
        sample_counts=quick[-1:],
        repeats=_LOOKS,
        progress=None,
        looks_at_results=False,
    )
    try:
        found = measure_profile(look)
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
    frozen = (layer for encoder in profile.encoders for layer in encoder.layers)
    return profile.trained_s(samples) + sum(layer.forward_s.at(samples) for layer in frozen)


def _activation_bytes(profile: ModelProfile, samples: int) -> float:
    """Returns what the trained layers keep of a microbatch for their backwards."""
    layers = [layer for backbone in profile.backbones for layer in backbone.layers]
    return sum(
        layer.activation_bytes_per_sample * samples + layer.activation_bytes_per_microbatch
        for layer in layers
    )


def profile_path(
    module: nn.Module,
    graph: LayerGraph,
    device: torch.device,
    sample_counts: Sequence[int],
    name: str,
    folder: Path | None = None,
) -> Path:
    """Returns the file that holds, or will hold, a profile."""
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
        "lightning_diffpipe": _own_version(),
    }
    digest = hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:16]
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", name)
    return (folder or cache_folder()) / f"{readable}-{digest}.json"


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
        stored = [layer.name for backbone in profile.backbones for layer in backbone.layers]
        if tuple(stored) != graph.path_names:
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


def _own_version() -> str:
    try:
        return version("lightning-diffpipe")
    except PackageNotFoundError:  # run from a source tree
        return "source"
