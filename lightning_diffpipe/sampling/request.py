"""A request, and the protocol of the samplers that run it.

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

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_diffpipe.comm.links import Links
from lightning_diffpipe.errors import SamplingError, require_choice, require_number
from lightning_diffpipe.sampling.report import SamplingStatistics, measured
from lightning_diffpipe.sampling.schedulers import (
    PatchSchedulers,
    takes_generator,
    with_timesteps_on,
)
from lightning_diffpipe.sampling.step_caches import StepCache
from lightning_diffpipe.sampling.tracing.attention import KernelsAnswered

Denoise = Callable[[Tensor, Tensor], Tensor]
Rows = Callable[[Tensor], Tensor]
Complete = Callable[[int, Tensor], Tensor]


class LoopInterruptedError(SamplingError):
    """A loop takes fewer steps than announced, as after `pipe._interrupt = True` in a callback."""


@dataclass
class Request:
    """One denoising loop.

    Attributes:
        model: The U-Net or transformer that is made parallel.
        denoise: `(latents, timestep) -> prediction`, both of the latents' full shape, after guidance. Calls `model`
            once (guidance in the batch) or twice; all conditions are bound inside.
        scheduler: A diffusers scheduler whose timesteps are set. It is copied, never changed.
        timesteps: One for each denoising step, as the scheduler wants them.
        latents: The initial noise, full, equal on all ranks.
        scale_input: Call `scheduler.scale_model_input` before `denoise`.
        step_kwargs: Further arguments of `scheduler.step`, such as `eta` or `generator`.
        branches_in_batch: Branches of guidance that follow each other in the samples `model` is given: 2
            for guidance in the batch.
        patch_schedulers: Takes the schedulers of patches, or has those of the steps before this request; None if
            there are none before or after it.
        begin: Begins a loop of another kind, such as a pipeline's own. Then `denoise` need only call the model as
            that does, for looking at it.
        cache: Configuration of a step cache of diffusers, see `step_caches.py`; None computes every step.
        halves: Links to the rank that computes the other half of the samples, if branches are divided so.
        infers: Run in inference mode. Not where the model is being trained: a table that it computes once could not
            be saved for a backward.
    """

    model: nn.Module
    denoise: Denoise
    scheduler: Any
    timesteps: Tensor
    latents: Tensor
    scale_input: bool = True
    step_kwargs: Mapping[str, Any] = field(default_factory=dict)
    branches_in_batch: int = 1
    begin: Callable[[], Loop] | None = None
    patch_schedulers: list[PatchSchedulers] | None = None
    cache: Any = None
    halves: Sequence[Links] = ()
    infers: bool = True

    def loop(self) -> Loop:
        """Begins to denoise."""
        return Loop(self) if self.begin is None else self.begin()

    @contextlib.contextmanager
    def inferring(self) -> Iterator[None]:
        """Context in which the model runs: without gradients, and with attention kernels that can be replaced."""
        with torch.inference_mode() if self.infers else torch.no_grad(), KernelsAnswered():
            yield

    @functools.cached_property
    def host_schedule(self) -> tuple[Any, Tensor]:
        """A scheduler to copy, and its timesteps, both with timesteps on the host, for which it waits once."""
        return with_timesteps_on(self.scheduler, "cpu"), self.timesteps.cpu()

    @functools.cached_property
    def scaler(self) -> InputScaler:
        """Scales the model's input on ranks where no scheduler steps."""
        return InputScaler(self)

    @property
    def num_steps(self) -> int:
        """Denoising steps."""
        return len(self.timesteps)


class Loop:
    """A denoising loop that is run step by step; here that of a request alone, as diffusers' pipelines have it.

    It does `x = scheduler.step(denoise(scale(x), t), t, x)` for every timestep, the same operations in the same
    order, so its latents equal theirs bit for bit. A pipeline's own loop goes on in its own way (`loop.py`).

    Attributes:
        is_divided: Another rank computes the other branch of guidance.
        mixes: It brings rows of predictions together, so that it has to be given all of them.
        steps_no_rows: This rank steps no part of the latents.
        is_shared: Ranks or patches share calls of the denoiser, which have to be as in the first run.
        on_change: Called before a call of the denoiser with other conditions than in the step before, of which the
            first run saw the same in all steps; None if nobody stores what is made of them.
        sample: The latents that the scheduler is given in this step.
    """

    is_divided = mixes = steps_no_rows = is_shared = False
    on_change: Callable[[], None] | None = None

    def __init__(self, request: Request) -> None:
        self._request, self.sample, self._index = request, request.latents, -1
        scheduler, self._on_host = request.host_schedule
        self._scheduler = copy.deepcopy(scheduler)

    def predict(
        self, latents: Tensor | None = None, again: bool = False, complete: Complete | None = None
    ) -> Tensor:
        """Goes on to the next step of the scheduler.

        Args:
            latents: Latents after the step before, if another made it; None if `step` did, and at the start.
            again: Compute the predictions of this step again, those before being incomplete.
            complete: `(number, prediction)` of each call of the denoiser in this step -> with rows of other ranks
                and patches, as far as the loop has to see them.

        Returns:
            The prediction; where another rank computes the other branch of guidance, that of this one.
        """
        request = self._request
        self._index += not again
        t = request.timesteps[self._index]
        if latents is not None:
            self.sample = latents
            return request.denoise(request.scaler.scale(latents, self._index), t)
        inputs = self.sample
        if request.scale_input and hasattr(self._scheduler, "scale_model_input"):
            inputs = self._scheduler.scale_model_input(inputs, self._on_host[self._index])
        return request.denoise(inputs, t)

    @property
    def given(self) -> tuple[Tensor, Mapping[str, Any]]:
        """The timestep that the scheduler is given in this step, on the host, and its further arguments."""
        return self._on_host[self._index], self._request.step_kwargs

    def skip(self, latents: Tensor | None) -> None:
        """Takes a step along that another loop computes; see `predict`."""
        self._index += 1

    def guided(
        self, prediction: Tensor, take: Rows = lambda x: x, put: Callable[..., Any] = Tensor.copy_
    ) -> Tensor:
        """Returns the prediction after guidance: as it is, unless another rank computes the other branch.

        Args:
            prediction: Return value of `predict`.
            take: Returns the part of it that counts, which alone is sent to the rank of the other branch.
            put: Puts something of that shape back into a prediction.
        """
        return prediction

    def step(self, prediction: Tensor) -> Tensor:
        """Takes the step with the loop's own scheduler; returns the latents after it."""
        t, options = self.given
        out = self._scheduler.step(prediction, t, self.sample, **options)
        self.sample = out.prev_sample if hasattr(out, "prev_sample") else out[0]
        return self.sample


class InputScaler:
    """`scale_model_input` on ranks that never step the scheduler.

    Some schedulers scale by the steps they have taken, and not by the timestep alone: KDPM2 takes every second
    model input between two noise levels. So a copy takes all steps, on zeros, and each step is
    scaled by what the copy was before it.
    """

    def __init__(self, request: Request) -> None:
        # The scheduler before each step; none if the model is given the latents as they are.
        self._states: list[Any] = []
        if not request.scale_input or not hasattr(request.scheduler, "scale_model_input"):
            return
        scheduler, self._timesteps = request.host_schedule
        scheduler = copy.deepcopy(scheduler)
        zeros = request.latents.new_zeros((1,) * request.latents.ndim)
        if scheduler.scale_model_input(zeros, self._timesteps[0]) is zeros:
            return
        options = {"generator": torch.Generator()} if takes_generator(scheduler) else {}
        with torch.random.fork_rng(devices=[]):
            for t in self._timesteps:
                scheduler.scale_model_input(zeros, t)
                self._states.append(copy.copy(scheduler))
                scheduler.step(zeros, t, zeros, **options)

    def scale(self, latents: Tensor, step: int) -> Tensor:
        """Returns the input of `denoise` at a step."""
        if not self._states:
            return latents
        return self._states[step].scale_model_input(latents, self._timesteps[step])


def require_warmup(warmup_steps: Any, warmup_threshold: Any = 0.0) -> None:
    """Raises ConfigurationError for a sampler warm-up, or a threshold for its end, that is no number."""
    if isinstance(warmup_steps, str):
        require_choice("warmup_steps", warmup_steps, ("a number, 0 or more,", "auto"))
    else:
        require_number("warmup_steps", warmup_steps, 0, whole=True)
    require_number("warmup_threshold", warmup_threshold, 0)


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


class OneProcess:
    """Samples in this process alone.

    Example:
        >>> latents = OneProcess().sample(request)  # doctest: +SKIP
    """

    def __init__(self) -> None:
        self.statistics = SamplingStatistics()

    def sample(self, request: Request, on_step: Callable[[int], None] | None = None) -> Tensor:
        """Runs one request; see `Sampler.sample`."""
        cache = StepCache(request)
        with request.inferring(), measured(self, request) as watch, cache.installed():
            loop, latents = request.loop(), request.latents
            for index in range(request.num_steps):
                cache.begin(index)
                try:
                    latents = loop.step(loop.guided(loop.predict()))
                except LoopInterruptedError:
                    break
                watch.step_done()
                if on_step is not None:
                    on_step(index)
        return latents
