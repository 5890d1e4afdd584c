"""Does a model compute in patches what it computes on all tokens? Tried once, before the first request of a layout.

The probe sees values that go from token to token, not numbers that a block makes of shapes alone, such as
positions counted from 0. So the first model input is computed twice: in a synchronous step, which calls every
block on what one process would give it, and in a step of patches that follows a synchronous one *on the same
latents*. Keys of the step before are then those of now, and the predictions must agree. All ranks do it together,
each with its own blocks, so no rank needs all weights.

    synchronous step | all tokens |                                        -> prediction
    two steps        | all tokens | patch 0 | patch 1 | patch 2 | ...      -> prediction, the same but for rounding
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_diffpipe.errors import DiffPipeError, LayoutError
from lightning_diffpipe.sampling.pipefusion_run import PipeFusionRun
from lightning_diffpipe.sampling.request import Request
from lightning_diffpipe.sampling.schedulers import InputScaler
from lightning_diffpipe.sampling.statistics import SamplingStatistics, Stopwatch

if TYPE_CHECKING:
    from lightning_diffpipe.sampling.pipefusion import PipeFusion, PipeFusionSetting

_REMEDY = "sample it in one process or with num_patches=1"


def rehearse(sampler: PipeFusion, request: Request, setting: PipeFusionSetting) -> None:
    """Compares a step in patches with a synchronous one; collective.

    Args:
        sampler: Whose options count.
        request: The first of its layout; nothing in it is changed.
        setting: What was decided about it.

    Raises:
        LayoutError: They differ by more than rounding, on all ranks; or the model fails in patches, where it does.
    """
    whole = _prediction(sampler, request, setting, 1)
    if not whole.isfinite().all():
        return  # nothing to compare with; final latents that are not finite are refused with a reason of their own
    with _failing_in(len(setting.patches)):
        patches = _prediction(sampler, request, setting, 2)
    error = float((patches - whole).double().norm() / whole.double().norm().clamp_min(1e-30))
    tolerance = tolerance_of(request.latents, *sampler.model.parameters())
    if not error <= tolerance:
        raise LayoutError(
            f"in {len(setting.patches)} patches this model computes something else than on all tokens: "
            f"relative error {error:.1e}, allowed are {tolerance:.0e}, most likely because a block makes positions "
            f"for its tokens by itself; {_REMEDY}, or pass verify=False if you accept this"
        )


@contextlib.contextmanager
def _failing_in(num_patches: int) -> Iterator[None]:
    """Gives a reason for errors of a model that runs on all tokens, but not on some."""
    try:
        yield
    except DiffPipeError:
        raise
    except Exception as error:
        raise LayoutError(
            f"in {num_patches} patches this model fails ({type(error).__name__}: {error}), most likely because "
            f"a block expects all tokens; {_REMEDY}"
        ) from error


def tolerance_of(latents: Tensor, *weights: Tensor) -> float:
    """The relative error that rounding may cause in a prediction, which guidance enlarges.

    The coarsest type counts: many pipelines keep latents in float32 for a model in bfloat16.

    Example:
        >>> dtypes = (torch.float64, torch.float32, torch.bfloat16)
        >>> [f"{tolerance_of(torch.zeros(1, dtype=dtype)):.0e}" for dtype in dtypes]
        ['1e-06', '1e-03', '1e-01']
    """
    eps = max(torch.finfo(x.dtype).eps for x in (latents, *weights) if x.is_floating_point())
    if latents.is_cuda and latents.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32:
        eps = max(eps, 2.0**-11)
    return min(max(1e-6, 1e4 * eps), 0.1)


def _prediction(
    sampler: PipeFusion, request: Request, setting: PipeFusionSetting, num_steps: int
) -> Tensor:
    """Of the first model input, in a synchronous step, or in patches behind one."""
    plan = replace(setting.plan, num_steps=num_steps, warmup_steps=1, automatic=False)
    if num_steps == 1:
        plan = replace(plan, warmup_microbatches=1)
    t = request.timesteps[:1]
    still = replace(
        request,
        scheduler=_Still(num_steps),
        timesteps=t.expand(num_steps),
        latents=InputScaler(request).scale(request.latents, t[0], 0),
        scale_input=False,
        step_kwargs={},
        combine=None,
    )
    watch = Stopwatch(SamplingStatistics(), sampler.links.rank)
    return PipeFusionRun(sampler, still, replace(setting, plan=plan), watch).run(None)


class _Still:
    """A scheduler that shows the model the same latents in every step, and returns the last prediction."""

    def __init__(self, num_steps: int) -> None:
        self._left = num_steps

    def step(self, prediction: Tensor, timestep: Tensor, latents: Tensor) -> SimpleNamespace:
        """The latents as they are, until the last step."""
        self._left -= 1
        if self._left:
            return SimpleNamespace(prev_sample=latents)
        # Some models predict a variance, too, behind the channels.
        return SimpleNamespace(prev_sample=prediction[tuple(map(slice, latents.shape))])
