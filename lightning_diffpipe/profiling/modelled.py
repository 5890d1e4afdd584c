"""Profiles of models one cannot run here: exact sizes, modelled times.

    profile = modelled_profile("flux", device_model="h100")

The model is built from its published configuration on the meta device, its training step is probed like
any other, and then run without values under a clock that shows what a device on paper would need
(`device_model`). So parameter, boundary and activation bytes and FLOPs are those of the real model, and times are
estimates, marked as modelled in the profile's name. It takes seconds; the result is cached.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

import torch

from lightning_diffpipe.clock import HostClock
from lightning_diffpipe.errors import ConfigurationError, ProfileError
from lightning_diffpipe.files import write_atomically
from lightning_diffpipe.graph.interception import Interception
from lightning_diffpipe.graph.layer import LayerGraph
from lightning_diffpipe.graph.probe import probe
from lightning_diffpipe.planning.profile import FORMAT, ModelProfile
from lightning_diffpipe.profiling.cache import cache_folder
from lightning_diffpipe.profiling.device_model import (
    DeviceModel,
    ModelledClock,
    device_named,
    fused_attention,
)
from lightning_diffpipe.profiling.encodings import Seen, encodings
from lightning_diffpipe.profiling.known_models import KNOWN_MODELS, KnownModel, KnownTraining
from lightning_diffpipe.profiling.layer_costs import assemble
from lightning_diffpipe.profiling.measure import layer_costs, repeated_seconds
from lightning_diffpipe.profiling.state import scratch_gradients
from lightning_diffpipe.profiling.step_run import KeptBytes, SavedBytes, StepRun, kept_bytes
from lightning_diffpipe.profiling.step_times import StepTimes

_NUM_PROBED_SAMPLES = 2
_VERSION = 7
"""Of what is modelled, and how: stored profiles of another one are not used."""


def modelled_profile(
    name: str,
    *,
    resolution: int | None = None,
    dtype: str = "bfloat16",
    device_model: str | DeviceModel = "h100",
    sample_counts: Sequence[int] = (1, 8),
    max_share: float = 1 / 32,
    cache: bool = True,
) -> ModelProfile:
    """Returns the profile of a well-known model on a device on paper.

    Args:
        name: A key of `KNOWN_MODELS`: sd21, controlnet, sdxl, sd3, flux, pixart.
        resolution: Pixels along an edge; as published if not given.
        dtype: Type of weights, gradients and activations.
        device_model: A name of `DEVICES`, or a device of your own.
        sample_counts: Numbers of samples to model; linear between and beyond.
        max_share: No layer should cost more than this share of the step, as far as modules allow.
        cache: Look in the cache first, and keep the result there.

    Raises:
        ConfigurationError: There is no such model, device or type, or the resolution does not fit.
    """
    known, device = _known(name), device_named(device_model)
    resolution = resolution or known.resolution
    if resolution < 64 or resolution % 64:
        raise ConfigurationError(
            f"resolution={resolution} does not fit {known.title}; give a multiple of 64"
        )
    inputs = [
        FORMAT, _VERSION, name, resolution, dtype, asdict(device), [*sample_counts], max_share,
        torch.__version__, *map(version, ("diffusers", "transformers")),
    ]  # fmt: skip
    digest = hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:16]
    path = cache_folder() / f"modelled-{name}-{digest}.json"
    if cache and path.exists():
        try:
            return ModelProfile.from_json(path.read_text(), str(path))
        except (ProfileError, OSError, UnicodeDecodeError) as error:
            warnings.warn(f"ignoring the stored profile, and modelling anew: {error}", stacklevel=2)
    title = f"{name} at {resolution} in {dtype}, modelled on {device.name}"
    profile = _model(known, title, resolution, _dtype(dtype), device, sample_counts, max_share)
    if cache:
        try:
            write_atomically(path, profile.to_json())
        except OSError as error:
            warnings.warn(f"cannot keep the profile at {path}: {error}", stacklevel=2)
    return profile


@dataclass(frozen=True)
class ModelOnPaper:
    """What to model, as a value: nothing is done before `profile()`; arguments of `modelled_profile`.

    Raises:
        ConfigurationError: There is no such model, device or type.
    """

    name: str
    device: str = "h100"
    dtype: str = "bfloat16"
    resolution: int | None = None

    def __post_init__(self) -> None:
        _known(self.name)
        device_named(self.device)
        _dtype(self.dtype)

    def profile(self) -> ModelProfile:
        """Models it, or takes it from the cache."""
        return modelled_profile(
            self.name, device_model=self.device, dtype=self.dtype, resolution=self.resolution
        )


def _model(
    known: KnownModel,
    title: str,
    resolution: int,
    dtype: torch.dtype,
    device: DeviceModel,
    sample_counts: Sequence[int],
    max_share: float,
) -> ModelProfile:
    training = KnownTraining(known, dtype)
    step = lambda module, batch: module.training_step(batch)
    batch = training.batch(_NUM_PROBED_SAMPLES, resolution)
    with fused_attention():
        graph = probe(training, step, batch, max_share=max_share)
        interception = Interception(training, graph.layer_names).install()
        rounds: dict[int, tuple[list[StepTimes], list[StepTimes]]] = {}
        with scratch_gradients(training, graph.trained):
            for count in sample_counts:
                call = partial(step, training, training.batch(count, resolution))
                rounds[count] = (
                    [_run(graph, device, call, interception, "whole")],
                    [_run(graph, device, call, interception, "inputs")],
                )
        saved = _saved_bytes(graph, training, batch, interception)
        interception.uninstall()
        handed = encodings(training, step, batch, graph, _seen_on_paper)
    costs, repeated = layer_costs(graph, rounds, saved), repeated_seconds(graph, rounds)
    return assemble(title, training, graph, costs, repeated, handed)


def _seen_on_paper(graph: LayerGraph) -> Seen:
    """Returns what is known of frozen layers without running them.

    All but a locked denoiser, which reads noise, follow from the sample alone; none mixes samples.
    """
    names = (graph.layers[index].name for index in graph.frozen)
    steady = frozenset(name for name in names if not name.startswith("denoiser"))
    return Seen(steady, mixing=frozenset())


def _run(
    graph: LayerGraph, device: DeviceModel, call: Any, interception: Interception, backward: Any
) -> StepTimes:
    with ModelledClock(device) as clock:
        return StepRun(graph, clock).measure(call, interception, backward)


def _saved_bytes(
    graph: LayerGraph, training: KnownTraining, batch: Any, interception: Interception
) -> list[KeptBytes]:
    run = StepRun(graph, HostClock())
    known = [*training.parameters(), *training.buffers()]
    with SavedBytes(run, known, len(graph.layers)) as saved:
        run.forward_only(partial(training.training_step, batch), interception)
    return kept_bytes({_NUM_PROBED_SAMPLES: saved.num_bytes})


def _known(name: str) -> KnownModel:
    if name not in KNOWN_MODELS:
        raise ConfigurationError(
            f"there is no known model {name!r}; choose one of {', '.join(KNOWN_MODELS)}, "
            "or measure a profile with `diffpipe profile`"
        )
    return KNOWN_MODELS[name]


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigurationError(f"dtype={name!r} is none; choose bfloat16, float16 or float32")
    return dtype
