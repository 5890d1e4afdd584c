"""What is sampled, and who can do it.

A request is everything one denoising loop needs, as plain Python objects: the model that is made parallel,
the user's own closure around it, a scheduler with its timesteps, and the noise to start from. The closure
`denoise` is run on full shapes on every rank, so patchify, guidance, concatenated conditions and selected
channels need no code here:

    def denoise(latents, t):
        noise = transformer(torch.cat([latents, latents]), prompts, t.expand(2 * len(latents)))
        without, with_prompt = noise.chunk(2)
        return without + 4.5 * (with_prompt - without)

    request = Request(transformer, denoise, scheduler, scheduler.timesteps, noise)
    latents = PipeFusion(transformer, links, num_patches=4).sample(request)

A request and what it caches end with `sample`: two in a row give the same as two fresh ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from lightning_diffpipe.sampling.statistics import SamplingStatistics

Denoise = Callable[[Tensor, Tensor], Tensor]
Combine = Callable[[Tensor, Tensor], Tensor]


@dataclass
class Request:
    """One denoising loop.

    Attributes:
        model: The U-Net or transformer that is made parallel.
        denoise: `(latents, timestep) -> prediction`, both of the latents' full shape, after guidance unless there
            is `combine`. Calls `model` once (guidance in the batch) or twice; all conditions are bound inside.
        scheduler: A diffusers scheduler whose timesteps are set. It is copied, never changed.
        timesteps: One for each denoising step, as the scheduler wants them.
        latents: The initial noise, full, equal on all ranks.
        scale_input: Call `scheduler.scale_model_input` in front of `denoise`.
        step_kwargs: Further arguments of `scheduler.step`, such as `eta` or `generator`.
        branches_in_batch: Branches of guidance that follow each other in the samples `model` is given: 2
            for guidance in the batch.
        combine: `(prediction, latents) -> prediction after guidance`, where `denoise` computes one branch and
            another rank the other: sends this rank's prediction there. A sampler may give it any rows, the same on
            both ranks, and calls it equally often on both.
    """

    model: nn.Module
    denoise: Denoise
    scheduler: Any
    timesteps: Tensor
    latents: Tensor
    scale_input: bool = True
    step_kwargs: Mapping[str, Any] = field(default_factory=dict)
    branches_in_batch: int = 1
    combine: Combine | None = None

    def guided(self, prediction: Tensor, latents: Tensor) -> Tensor:
        """The prediction after guidance.

        Args:
            prediction: What `denoise` gave, or some rows of it.
            latents: What `denoise` was given, the same rows.
        """
        return prediction if self.combine is None else self.combine(prediction, latents)

    @property
    def num_steps(self) -> int:
        """Denoising steps."""
        return len(self.timesteps)


class Sampler(Protocol):
    """Runs requests, on this rank's part."""

    statistics: SamplingStatistics
    """Of the last request."""

    def sample(self, request: Request, on_step: Callable[[int], None] | None = None) -> Tensor:
        """Runs one request, on all ranks together, without gradients.

        Args:
            request: The same on all ranks.
            on_step: Called with the index of each denoising step this rank has done its part of.

        Returns:
            The final latents, of full shape, on every rank.
        """
