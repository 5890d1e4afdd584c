"""The plain loop over the steps of a scheduler: what all other samplers are compared with.

    for every timestep:   x = scheduler.step(denoise(scale(x), t), t, x)

The same operations in the same order as diffusers' pipelines, so its latents equal theirs bit for bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_diffpipe.sampling.request import Request
from lightning_diffpipe.sampling.statistics import SamplingStatistics, Stopwatch


class OneProcess:
    """Samples in this process alone.

    Example:
        >>> latents = OneProcess().sample(request)  # doctest: +SKIP
    """

    def __init__(self) -> None:
        self.statistics = SamplingStatistics()

    @torch.inference_mode()
    def sample(self, request: Request, on_step: Callable[[int], None] | None = None) -> Tensor:
        """Runs one request; see `Sampler.sample`."""
        self.statistics = SamplingStatistics()
        scheduler, latents = copy.deepcopy(request.scheduler), request.latents
        watch = Stopwatch(self.statistics, 0, latents.device)
        for index, timestep in enumerate(request.timesteps):
            inputs = latents
            if request.scale_input and hasattr(scheduler, "scale_model_input"):
                inputs = scheduler.scale_model_input(latents, timestep)
            prediction = request.guided(request.denoise(inputs, timestep), inputs)
            stepped = scheduler.step(prediction, timestep, latents, **request.step_kwargs)
            latents = stepped.prev_sample
            watch.step_done()
            if on_step is not None:
                on_step(index)
        watch.stop()
        return latents
