"""Does a model compute in parts what it computes as a whole? And if it fails in parts, why?

It is tried once, before the first request of a layout. The probe sees values that go from token to token, not
numbers that a block makes of shapes alone, such as positions counted from 0. So the first model input is computed
twice: in a synchronous step, which calls every block on what one process would give it, and in a step of patches
that follows a synchronous one *on the same latents*. Keys of the step before are then those of now, and the
predictions must agree. All ranks do it together, each with its own blocks, so no rank needs all weights.

    synchronous step | all tokens |                                        -> prediction
    two steps        | all tokens | patch 0 | patch 1 | patch 2 | ...      -> prediction, the same but for rounding

Where ranks share tokens and each has all weights, rank 0 also computes the first step alone. If predictions
differ, NaN is sent through the model once more, to name the operator that mixes tokens, if one does. Running out of
memory says nothing of a model, so it is an error of another kind.
"""

import contextlib
import gc
import logging
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from lightning_diffpipe.comm.links import Links
from lightning_diffpipe.errors import (
    ConfigurationError,
    DiffPipeError,
    LayoutError,
    clear_variables,
    is_out_of_memory,
)
from lightning_diffpipe.graph.versions import rounding_of
from lightning_diffpipe.sampling.request import OneProcess, Request
from lightning_diffpipe.sampling.tracing.layout import Layout
from lightning_diffpipe.sampling.tracing.marks import finite_placeholders, mixing_operator

REMEDY_OF_MEMORY = "take more stages or ranks, or sample fewer or smaller images at a time"
REMEDY_OF_PATCHES = "sample it in one process or with num_patches=1"

_log = logging.getLogger(__name__)

Predict = Callable[[Request], Tensor]
"""Runs a request that shows the model the same latents in every step, and returns the last prediction."""


def rehearse(
    links: Links, request: Request, layout: Layout, num_patches: int, predict: Predict
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
    error = relative_error(patches, whole)
    _refuse_if_other(links, request, layout, where, error, REMEDY_OF_PATCHES)


def rehearse_sharing(links: Links, request: Request, layout: Layout, predict: Predict) -> None:
    """Compares a step of ranks that share tokens with one of rank 0 alone; collective.

    Where all tokens at once do not fit into rank 0's memory, nothing is compared.

    Raises:
        LayoutError: They differ by more than rounding, on all ranks; or the model fails, where it does.
        ConfigurationError: Memory does not suffice for a share of the tokens, where it does not.
    """
    where, remedy = f"with tokens shared by {links.num_ranks} ranks", "sample it with method=single"
    with failing(where, remedy):
        shared = predict(_showing(request, 1))
    error = error_against(
        links,
        lambda: OneProcess().sample(_showing(request, 1)),
        shared,
        "all tokens do not fit into memory at once; shared ones are not compared with them",
    )
    _refuse_if_other(links, request, layout, where, error, remedy)


def refuse_if_other(
    error: float,
    tolerance: float,
    where: str,
    whole: str,
    remedy: str,
    cause: Callable[[], str] = lambda: "",
) -> None:
    """Raises LayoutError, on all ranks, where the results of a model in parts and as a whole differ."""
    if not error <= tolerance:
        raise LayoutError(
            f"{where} this model computes something else than on {whole}: relative error {error:.1e}, allowed "
            f"are {tolerance:.0e}{cause()}; {remedy}, or pass verify=False if you accept this"
        )


def _refuse_if_other(
    links: Links, request: Request, layout: Layout, where: str, error: float, remedy: str
) -> None:
    model, latents = request.model, request.latents

    def mixing() -> str | None:
        with contextlib.suppress(Exception), finite_placeholders(model):
            t = request.timesteps[0]
            return mixing_operator(model, request.denoise, latents, layout.axis, t)
        return None  # a model that cannot be looked at is refused all the same

    def cause() -> str:
        if operator := links.broadcast_object(mixing):
            return f"; the first operator that mixes tokens is {operator}"
        return "; no operator was found that mixes tokens, so perhaps a block makes positions for them by itself"

    tolerance = tolerance_of(model, latents)
    refuse_if_other(error, tolerance, where, "all tokens", remedy, cause)


def _showing(request: Request, num_steps: int) -> Request:
    """Returns a request whose result is the prediction for the first model input, which each step repeats."""
    t = request.timesteps[:1]
    return replace(
        request,
        scheduler=_Still(num_steps),
        timesteps=t.expand(num_steps),
        latents=request.scaler.scale(request.latents, 0),
        scale_input=False,
        step_kwargs={},
        begin=None,
        patch_schedulers=None,
        cache=None,
    )


class _Still:
    """A scheduler that shows the model the same latents in every step, and returns the last prediction."""

    def __init__(self, num_steps: int) -> None:
        self._left = num_steps

    def step(self, prediction: Tensor, timestep: Tensor, latents: Tensor) -> SimpleNamespace:
        self._left -= 1
        if self._left:
            return SimpleNamespace(prev_sample=latents)
        # Some models predict a variance, too, after the channels.
        return SimpleNamespace(prev_sample=prediction[tuple(map(slice, latents.shape))])


def tolerance_of(model: nn.Module, latents: Tensor, convolves_parts: bool = False) -> float:
    """Returns the relative error that rounding may cause in a prediction, which guidance enlarges.

    The coarsest type counts: many pipelines keep latents in float32 for a model in bfloat16.

    Args:
        model: Module whose weights count.
        latents: Latents that the model is given.
        convolves_parts: Whether convolutions, too, are given other shapes, as with bands. Where they may round to
            TF32, which they may unless torch is told otherwise, that counts; of products it always does.

    Example:
        >>> import torch
        >>> dtypes = (torch.float64, torch.float32, torch.bfloat16)
        >>> [f"{tolerance_of(nn.Module(), torch.zeros(1, dtype=dtype)):.0e}" for dtype in dtypes]
        ['1e-06', '1e-03', '1e-01']
    """
    tensors = (latents, *model.parameters())
    dtypes = {x.dtype for x in tensors if x.is_floating_point()}
    eps = max(rounding_of(dtype, latents.device, convolves_parts) for dtype in dtypes)
    return min(max(1e-6, 1e4 * eps), 0.1)


def relative_error(parts: Any, whole: Any) -> float:
    """Returns the largest relative difference of two calls' results; one that overflows anyway says nothing."""
    errors = [0.0]
    for a, b in zip(pytree.tree_leaves(parts), pytree.tree_leaves(whole), strict=True):
        if isinstance(a, Tensor) and a.is_floating_point():
            if a.shape != b.shape:
                return math.inf
            if not b.isfinite().all():
                continue
            difference = (a - b).double().norm() / b.double().norm().clamp_min(1e-30)
            errors.append(math.inf if bool(difference.isnan()) else float(difference))
    return max(errors)


def error_against(links: Links, plain: Callable[[], Any], parts: Any, warning: str) -> float:
    """Returns the relative error of results against a plain call of rank 0; collective.

    Returns:
        0, with a warning, where memory does not suffice for that call.
    """

    def error_here() -> float:
        try:
            return relative_error(parts, plain())
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            _log.warning(warning)
            return 0.0
        finally:
            release_memory()

    error: float = links.broadcast_object(error_here)
    return error


# ------------------------------------------------------------------------------------ failures


@contextlib.contextmanager
def needing_memory(where: str, remedy: str) -> Iterator[None]:
    """Turns a lack of memory, which the model is not refused for, into a ConfigurationError on all ranks."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        forget_variables(error)
        reason = re.split(r"\. |\n", str(error), maxsplit=1)[0]
        raise ConfigurationError(
            f"this model needs more memory {where} than there is: {reason}; {remedy}"
        ) from error
    finally:
        release_memory()


@contextlib.contextmanager
def failing(
    where: str, remedy: str = REMEDY_OF_PATCHES, cause: str = "a block expects all tokens"
) -> Iterator[None]:
    """Gives a reason for errors of a model that runs on the whole, but not in parts.

    Raises:
        LayoutError: The model failed.
        ConfigurationError: Memory did not suffice, which says nothing of the model.
    """
    try:
        with needing_memory(where, REMEDY_OF_MEMORY):
            yield
    except DiffPipeError:
        raise
    except Exception as error:
        raise LayoutError(
            f"{where} this model fails, most likely because {cause}: "
            f"{type(error).__name__}: {error}; {remedy}"
        ) from error


def forget_variables(error: BaseException | None) -> None:
    """Clears variables of functions that an error ended: activations, and receives, which keep connections open."""
    clear_variables(error)
    gc.collect()


def release_memory() -> None:
    """Frees memory that torch caches from a call that is over; later calls need less, in other sizes."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
