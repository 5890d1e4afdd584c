"""One process: what all other samplers are compared with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_diffpipe.sampling.request import LoopInterruptedError, Request
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
        loop, latents = request.loop(), request.latents
        watch = Stopwatch(self.statistics, 0, latents.device)
        for index in range(request.num_steps):
            try:
                latents = loop.step(loop.guided(loop.predict()))
            except LoopInterruptedError:
                break
            watch.step_done()
            if on_step is not None:
                on_step(index)
        watch.stop()
        return latents
