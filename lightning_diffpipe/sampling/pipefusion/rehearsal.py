"""Does a model compute in patches what it computes on all tokens? Tried once, before the first request of a layout.

The probe sees values that go from token to token, not numbers that a block makes of shapes alone, such as
positions counted from 0. So the first model input is computed twice: in a synchronous step, which calls every
block on what one process would give it, and in a step of patches that follows a synchronous one *on the same
latents*. Keys of the step before are then those of now, and the predictions must agree. All ranks do it together,
each with its own blocks, so no rank needs all weights.

    synchronous step | all tokens |                                        -> prediction
    two steps        | all tokens | patch 0 | patch 1 | patch 2 | ...      -> prediction, the same but for rounding

Where ranks share tokens and each has all weights, rank 0 computes the first step alone besides. If predictions
differ, NaN is sent through the model once more, to name the operator that mixes tokens, if one does.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Protocol

from torch import Tensor, nn

from lightning_diffpipe.comm.links import Links
from lightning_diffpipe.errors import LayoutError
from lightning_diffpipe.sampling.memory import (
    REMEDY_OF_MEMORY,
    REMEDY_OF_PATCHES,
    failing,
    is_out_of_memory,
    needing_memory,
)
from lightning_diffpipe.sampling.one_process import OneProcess, tolerance_of
from lightning_diffpipe.sampling.request import InputScaler, Request
from lightning_diffpipe.sampling.tracing.layout import Layout
from lightning_diffpipe.sampling.tracing.marks import mixing_operator
from lightning_diffpipe.sampling.tracing.probe import finite_placeholders

_REMEDY_OF_SHARING = "sample it with method=single"
_log = logging.getLogger(__name__)


class Rehearsed(Protocol):
    """A sampler that computes a request in parts."""

    model: nn.Module
    links: Links


Predict = Callable[[Request], Tensor]
"""What a sampler makes of a request that shows the model the same latents in every step: its last prediction."""


def rehearse(
    sampler: Rehearsed, request: Request, layout: Layout, num_patches: int, predict: Predict
) -> None:
    """Compares a step in patches with a synchronous one; collective.

    Raises:
        LayoutError: They differ by more than rounding, on all ranks; or the model fails in patches, where it does.
        ConfigurationError: Memory does not suffice, where it does not.
    """
    with needing_memory("in a synchronous step", REMEDY_OF_MEMORY):
        whole = predict(_showing(request, 1))
    if not whole.isfinite().all():
        return  # nothing to compare with; final latents that are not finite are refused with a reason of their own
    where = f"in {num_patches} patches"
    with failing(where):
        patches = predict(_showing(request, 2))
    error = _relative_error(patches, whole)
    _refuse_if_other(sampler, request, layout, where, error, REMEDY_OF_PATCHES)


def rehearse_sharing(
    sampler: Rehearsed, request: Request, layout: Layout, predict: Predict
) -> None:
    """Compares a step of ranks that share tokens with one of rank 0 alone; collective.

    Where all tokens at once do not fit into rank 0's memory, nothing is compared.

    Raises:
        LayoutError: They differ by more than rounding, on all ranks; or the model fails, where it does.
        ConfigurationError: Memory does not suffice for a share of the tokens, where it does not.
    """
    where = f"with tokens shared by {sampler.links.num_ranks} ranks"
    with failing(where, _REMEDY_OF_SHARING):
        shared = predict(_showing(request, 1))

    def error_of_sharing() -> float:
        try:
            whole = OneProcess().sample(_showing(request, 1))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            _log.warning(
                "all tokens do not fit into memory at once; shared ones are not compared with them"
            )
            return 0.0
        return _relative_error(shared, whole) if whole.isfinite().all() else 0.0

    error: float = sampler.links.broadcast_object(error_of_sharing)
    _refuse_if_other(sampler, request, layout, where, error, _REMEDY_OF_SHARING)


def _relative_error(found: Tensor, whole: Tensor) -> float:
    return float((found - whole).double().norm() / whole.double().norm().clamp_min(1e-30))


def _refuse_if_other(
    sampler: Rehearsed, request: Request, layout: Layout, where: str, error: float, remedy: str
) -> None:
    tolerance = tolerance_of(sampler.model, request.latents)
    if error <= tolerance:
        return

    def mixing() -> str | None:
        with contextlib.suppress(Exception), finite_placeholders(sampler.model):
            model, latents, t = sampler.model, request.latents, request.timesteps[0]
            return mixing_operator(model, request.denoise, latents, layout.axis, t)
        return None  # a model that cannot be looked at is refused all the same

    operator = sampler.links.broadcast_object(mixing)
    cause = f"the first operator that mixes tokens is {operator}"
    if operator is None:
        cause = "no operator was found that mixes tokens, so perhaps a block makes positions for them by itself"
    raise LayoutError(
        f"{where} this model computes something else than on all tokens: relative error {error:.1e}, allowed "
        f"are {tolerance:.0e}; {cause}; {remedy}, or pass verify=False if you accept this"
    )


def _showing(request: Request, num_steps: int) -> Request:
    """A request whose result is the prediction for the first model input, shown that many times."""
    t = request.timesteps[:1]
    return replace(
        request,
        scheduler=_Still(num_steps),
        timesteps=t.expand(num_steps),
        latents=InputScaler(request).scale(request.latents, t[0], 0),
        scale_input=False,
        step_kwargs={},
        begin=None,
        stepped=None,
    )


class _Still:
    """A scheduler that shows the model the same latents in every step, and returns the last prediction."""

    def __init__(self, num_steps: int) -> None:
        self._left = num_steps

    def step(self, prediction: Tensor, timestep: Tensor, latents: Tensor) -> SimpleNamespace:
        """The latents as they are, until the last step."""
        self._left -= 1
        if self._left:
            return SimpleNamespace(prev_sample=latents)
        # Some models predict a variance, too, after the channels.
        return SimpleNamespace(prev_sample=prediction[tuple(map(slice, latents.shape))])
