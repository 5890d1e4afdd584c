"""A dry run of a pipeline's call, with a denoiser that predicts zeros: what its loop will do.

It runs on the rank that has all parts. It records what these answer (`record.py`), counts the steps, shows what the
denoiser is called with, and tells by NaN whether the loop's own code brings rows together.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.sampling.loop import (
    PipelineCall,
    Prediction,
    Step,
    attention_processors,
    latents_name,
    predicted_zeros,
    snapshot,
)
from lightning_diffpipe.sampling.record import LoopEnds, Record

_NAN = float("nan")


@dataclass
class Phase:
    """Steps in a row that call the same denoiser.

    Attributes:
        denoisers: Which; several if each step calls several.
        shape: Of the latents, those of all ranks.
        start: Steps before them.
        calls: For the first and the last of them that call any, arguments of each call.
        num_calls: For each of them, how many calls.
    """

    denoisers: tuple[str, ...]
    shape: torch.Size
    start: int = 0
    calls: list[list[dict[str, Any]]] = field(default_factory=list)
    num_calls: list[int] = field(default_factory=list)


@dataclass
class DryRun:
    """What a loop will do, found by running it with a denoiser that predicts zeros.

    Attributes:
        timesteps: One for each step, as the scheduler is given it.
        phases: Steps by the denoiser that they call.
        latents: What the first step is given.
        scheduler: As it is before the first step.
        step_arguments: Further arguments of that.
        channels: Channels of predictions that are looked at; None means all.
        mixes: Of what the loop's own code brings rows together: `"latents"`, `"predictions"`.
        by_place: The pipeline sets attention processors of its own, which may treat rows by their place in the
            batch, as those of perturbed-attention guidance do.
        record: What other parts answered.
    """

    timesteps: list[Any] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    latents: Tensor = field(default_factory=lambda: torch.empty(0))
    scheduler: Any = None
    step_arguments: dict[str, Any] = field(default_factory=dict)
    channels: int | None = None
    mixes: frozenset[str] = frozenset()
    by_place: bool = False
    record: Record = field(default_factory=Record)


def dry_run_of(call: PipelineCall) -> DryRun:
    """Runs the call on the rank that has all parts, without computing anything but what is before the loop.

    Raises:
        ConfigurationError: It runs no loop of denoiser calls and scheduler steps, or not with this scheduler.
        Exception: What the pipeline's own checks raise.
    """
    # Callbacks are for true latents.
    arguments = {n: each for n, each in call.arguments.items() if not n.startswith("callback")}
    quiet = replace(call, arguments=arguments)
    found = _one_run(quiet, None)
    if not found.phases:
        raise ConfigurationError(
            f"{type(call.pipeline).__name__} ran {len(found.timesteps)} scheduler steps with no call of its "
            f"{call.denoisers[0]} before one; a loop that can be sampled has at least one of each"
        )
    in_loop = found.record.in_loop
    if in_loop:  # which of these are controls?
        found.record.controls = {n: {} for n in in_loop if isinstance(call.parts[n], nn.Module)}
        again = _one_run(replace(quiet, record=found.record), len(found.timesteps))
        if found.record.controls.keys() < in_loop:
            again = _one_run(replace(quiet, record=found.record), len(found.timesteps))
        found.phases = again.phases
    here, num_steps = replace(quiet, record=found.record), min(2, len(found.timesteps))
    found.mixes = frozenset(
        what
        for what in ("latents", "predictions")
        if (what == "latents" and in_loop - found.record.controls.keys())
        or mixes_rows(here, num_steps, what)
    )
    return found


def _one_run(call: PipelineCall, num_steps: int | None) -> DryRun:
    """One run with a denoiser that predicts zeros; recorded unless it ends after a number of steps."""
    found = DryRun()
    waiting: dict[str, list[dict[str, Any]]] = {}
    processors = attention_processors(call.parts)
    begun = False

    def on_denoise(name: str, arguments: dict[str, Any]) -> Any:
        nonlocal begun
        begun = True
        found.record.in_loop |= found.record.asked_last
        waiting.setdefault(name, []).append(arguments)
        return predicted_zeros(call.parts[name], arguments, _NAN)

    def on_step(scheduler: Any, plain: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        prediction, t, sample = list(arguments.values())[1:4]
        if not found.timesteps:
            _refuse_predicted_variance(scheduler, prediction, sample)
            found.latents, found.scheduler = sample, copy.deepcopy(scheduler)
            found.scheduler.__class__ = type(scheduler).__mro__[1]
            found.by_place = attention_processors(call.parts) != processors
            found.step_arguments = snapshot(dict(list(arguments.items())[4:]))
            found.step_arguments.pop("return_dict", None)
            if sample.ndim > 3 and not prediction.isnan().any():
                found.channels = sample.shape[1]
        called, calls = tuple(sorted(waiting)), [each for name in waiting for each in waiting[name]]
        if called and (not found.phases or found.phases[-1].denoisers != called):
            start = len(found.timesteps) if found.phases else 0
            without = [0] * (len(found.timesteps) - start)
            found.phases.append(Phase(called, sample.shape, start, num_calls=without))
        if found.phases:
            phase = found.phases[-1]
            phase.num_calls.append(len(calls))
            phase.calls = [*phase.calls[:1], calls] if calls else phase.calls
        found.timesteps.append(t)
        waiting.clear()
        if len(found.timesteps) == num_steps:
            raise LoopEnds
        values = dict(arguments, **{list(arguments)[1]: prediction.nan_to_num()})
        return plain(**values)

    _run(call, on_denoise, on_step, found.record if num_steps is None else None, lambda: begun)
    return found


def mixes_rows(call: PipelineCall, num_steps: int, what: str) -> bool:
    """Whether the loop's own code brings rows of latents or predictions together, found by NaN in half of them."""
    found, left = False, num_steps
    before = torch.empty(0)  # the latents as they were handed back

    def on_denoise(name: str, arguments: dict[str, Any]) -> Any:
        nonlocal found
        given = arguments[latents_name(arguments)]
        if what == "latents" and given.ndim == before.ndim:
            axis = 1 if given.ndim == 3 else -2
            size = before.shape[axis] // 2
            found |= bool(given.narrow(axis, size, given.shape[axis] - size).isnan().any())
        out = predicted_zeros(call.parts[name], arguments)
        draw = torch.Generator().manual_seed(len(out[0]))
        drawn = [torch.randn(x.shape, generator=draw).to(x) for x in out]
        return Prediction(map(_half_marked, drawn) if what == "predictions" else drawn)

    def on_step(scheduler: Any, plain: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        nonlocal found, left, before
        step = Step(plain, arguments)
        own = _half_marked(torch.zeros_like(step[1])).isnan()
        found |= bool((step[1].isnan() & ~own).any())
        left -= 1
        if found or not left:
            raise LoopEnds
        before = step[3].nan_to_num()
        return step.answer(_half_marked(before) if what == "latents" else before)

    _run(call, on_denoise, on_step)
    return found


def _run(call: PipelineCall, *given: Any) -> None:
    """Runs a call up to the end of its loop, with generators as they were after it; see `PipelineCall.run`."""
    devices = [call.device] if call.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad(), contextlib.suppress(LoopEnds):
        call.run(*given)


def _half_marked(x: Tensor) -> Tensor:
    """A copy with NaN in the first half of the rows, or of the tokens."""
    axis = 1 if x.ndim == 3 else -2
    x = x.clone()
    x.narrow(axis, 0, x.shape[axis] // 2).fill_(_NAN)
    return x


def _refuse_predicted_variance(scheduler: Any, prediction: Tensor, sample: Tensor) -> None:
    """Raises ConfigurationError if the scheduler wants what the pipeline cuts off, which no step would survive."""
    plain = type(scheduler).__mro__[1]
    if "variance_type" not in inspect.signature(plain.__init__).parameters:
        return  # a config keeps settings of the scheduler it was made from
    kind = scheduler.config.variance_type
    if kind in ("learned", "learned_range") and prediction.shape[1] != 2 * sample.shape[1]:
        raise ConfigurationError(
            f"{plain.__name__} with variance_type={kind} takes a variance that the model predicts, but this "
            "pipeline hands it none; write variance_type=fixed_small into scheduler/scheduler_config.json, or "
            "take another scheduler"
        )
