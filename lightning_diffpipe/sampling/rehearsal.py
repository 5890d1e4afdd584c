"""Does a model compute in patches what it computes on all tokens? Tried once, before the first request of a layout.

The probe sees values that go from token to token, not numbers that a block makes of shapes alone, such as
positions counted from 0. So the first model input is computed twice: in a synchronous step, which calls every
block on what one process would give it, and in a step of patches that follows a synchronous one *on the same
latents*. Keys of the step before are then those of now, and the predictions must agree. All ranks do it together,
each with its own blocks, so no rank needs all weights.

    synchronous step | all tokens |                                        -> prediction
    two steps        | all tokens | patch 0 | patch 1 | patch 2 | ...      -> prediction, the same but for rounding

Where ranks share tokens and each has all weights, rank 0 computes the first step alone besides. If predictions
differ, NaN is sent through the model once more, to name the operator that mixes tokens, if one does (`leaks.py`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_diffpipe.errors import DiffPipeError, LayoutError
from lightning_diffpipe.sampling.leaks import mixing_operator
from lightning_diffpipe.sampling.memory import is_out_of_memory, needing_memory
from lightning_diffpipe.sampling.one_process import OneProcess
from lightning_diffpipe.sampling.pipefusion_run import PipeFusionRun
from lightning_diffpipe.sampling.probe import finite_placeholders
from lightning_diffpipe.sampling.request import Request
from lightning_diffpipe.sampling.rounding import tolerance_of
from lightning_diffpipe.sampling.schedulers import InputScaler
from lightning_diffpipe.sampling.statistics import SamplingStatistics, Stopwatch

if TYPE_CHECKING:
    from lightning_diffpipe.sampling.layout import Layout
    from lightning_diffpipe.sampling.pipefusion import PipeFusion, PipeFusionSetting
    from lightning_diffpipe.sampling.sequence_parallel import SequenceParallel

_REMEDY = "sample it in one process or with num_patches=1"
_REMEDY_OF_SHARING = "sample it with method=single"
_REMEDY_OF_MEMORY = "take more stages or ranks, or draw fewer or smaller pictures at a time"
_log = logging.getLogger(__name__)


def rehearse(sampler: PipeFusion, request: Request, setting: PipeFusionSetting) -> None:
    """Compares a step in patches with a synchronous one; collective.

    Args:
        sampler: Whose options count.
        request: The first of its layout; nothing in it is changed.
        setting: What was decided about it.

    Raises:
        LayoutError: They differ by more than rounding, on all ranks; or the model fails in patches, where it does.
        ConfigurationError: Memory does not suffice, where it does not.
    """
    with needing_memory("in a synchronous step", _REMEDY_OF_MEMORY):
        whole = _prediction(sampler, request, setting, 1)
    if not whole.isfinite().all():
        return  # nothing to compare with; final latents that are not finite are refused with a reason of their own
    where = f"in {len(setting.patches)} patches"
    with failing(where, _REMEDY):
        patches = _prediction(sampler, request, setting, 2)
    error = _relative_error(patches, whole)
    _refuse_if_other(sampler, request, setting.layout, where, error, _REMEDY)


def rehearse_sharing(sampler: SequenceParallel, request: Request, layout: Layout) -> None:
    """Compares a step of ranks that share tokens with one of rank 0 alone; collective.

    Where all tokens at once do not fit into rank 0's memory, nothing is compared.

    Args:
        sampler: Whose options count.
        request: The first of its layout; nothing in it is changed.
        layout: Of the request.

    Raises:
        LayoutError: They differ by more than rounding, on all ranks; or the model fails, where it does.
        ConfigurationError: Memory does not suffice for a share of the tokens, where it does not.
    """
    still, where = _showing(request, 1), f"with tokens shared by {sampler.links.num_ranks} ranks"
    watch = Stopwatch(SamplingStatistics(), sampler.links.rank, request.latents.device)
    with failing(where, _REMEDY_OF_SHARING):
        shared = sampler.run(still, layout, watch)

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
    sampler: PipeFusion | SequenceParallel,
    request: Request,
    layout: Layout,
    where: str,
    error: float,
    remedy: str,
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


@contextlib.contextmanager
def failing(
    where: str, remedy: str = _REMEDY, cause: str = "a block expects all tokens"
) -> Iterator[None]:
    """Gives a reason for errors of a model that runs on all tokens, but not otherwise.

    Args:
        where: How it is run.
        remedy: What to do about it.
        cause: What is most likely.

    Raises:
        LayoutError: The model failed.
        ConfigurationError: Memory did not suffice, which says nothing of the model.
    """
    try:
        with needing_memory(where, _REMEDY_OF_MEMORY):
            yield
    except DiffPipeError:
        raise
    except Exception as error:
        raise LayoutError(
            f"{where} this model fails, most likely because {cause}: "
            f"{type(error).__name__}: {error}; {remedy}"
        ) from error


def _prediction(
    sampler: PipeFusion, request: Request, setting: PipeFusionSetting, num_steps: int
) -> Tensor:
    """Of the first model input, in a synchronous step, or in patches after one."""
    plan = replace(setting.plan, num_steps=num_steps, warmup_steps=1, automatic=False)
    if num_steps == 1:
        plan = replace(plan, warmup_microbatches=1)
    watch = Stopwatch(SamplingStatistics(), sampler.links.rank, request.latents.device)
    run = PipeFusionRun(sampler, _showing(request, num_steps), replace(setting, plan=plan), watch)
    return run.run(None)


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
