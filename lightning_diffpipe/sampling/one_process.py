"""One process: what all other samplers are compared with, and by how much they may differ."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from lightning_diffpipe.graph.float32 import rounding_of
from lightning_diffpipe.sampling.request import LoopInterruptedError, Request
from lightning_diffpipe.sampling.statistics import SamplingStatistics, measured


class OneProcess:
    """Samples in this process alone.

    Example:
        >>> latents = OneProcess().sample(request)  # doctest: +SKIP
    """

    def __init__(self) -> None:
        self.statistics = SamplingStatistics()

    def sample(self, request: Request, on_step: Callable[[int], None] | None = None) -> Tensor:
        """Runs one request; see `Sampler.sample`."""
        with request.inferring(), measured(self, request) as watch:
            loop, latents = request.loop(), request.latents
            for index in range(request.num_steps):
                try:
                    latents = loop.step(loop.guided(loop.predict()))
                except LoopInterruptedError:
                    break
                watch.step_done()
                if on_step is not None:
                    on_step(index)
        return latents


def tolerance_of(model: nn.Module, latents: Tensor, convolves_parts: bool = False) -> float:
    """The relative error that rounding may cause in a prediction, which guidance enlarges.

    The coarsest type counts: many pipelines keep latents in float32 for a model in bfloat16.

    Args:
        model: Whose weights count.
        latents: That it is given.
        convolves_parts: Whether convolutions, too, are given other shapes, as with bands. Where they may round to
            TF32, which they may unless torch is told otherwise, that counts; of products it always does.

    Example:
        >>> import torch
        >>> dtypes = (torch.float64, torch.float32, torch.bfloat16)
        >>> [f"{tolerance_of(nn.Module(), torch.zeros(1, dtype=dtype)):.0e}" for dtype in dtypes]
        ['1e-06', '1e-03', '1e-01']
    """
    given = (latents, *model.parameters())
    dtypes = {x.dtype for x in given if x.is_floating_point()}
    eps = max(rounding_of(dtype, latents.device, convolves_parts) for dtype in dtypes)
    return min(max(1e-6, 1e4 * eps), 0.1)
