"""Lets a pipeline's own `__call__` do everything but the denoising loop.

    pipeline(prompt, ...)     its own code: checks, prompts to embeddings, start noise, timesteps
      loop, first step:
        denoiser(...)         answered with zeros; its arguments are kept
        scheduler.step(...)   now everything is known: a `Call` goes to the sampler, which returns the
                              final latents; they are the answer
      loop, other steps:      answered with zeros, and with the final latents again
    its own code              decodes, makes pictures

So nothing of any pipeline is copied: xDiT has copies of 35 to 57 KB per pipeline, which lag behind. What is
left per kind of pipeline are the formulas in `family.py`.

The denoiser may be an empty skeleton here. The scheduler gets another class for the while, which survives
the deep copies that some callers make, and keeps the signature of `step`, which pipelines inspect.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.sampling.families.call import Call
from lightning_diffpipe.sampling.families.family import Family

Sample = Callable[[Call], Tensor]


class _Output(tuple):
    """What a denoiser returns: a tuple, or an object with `sample`."""

    __slots__ = ()

    @property
    def sample(self) -> Tensor:
        return self[0]


@contextmanager
def intercepted(
    family: Family,
    denoiser: nn.Module,
    scheduler: Any,
    guidance: Mapping[str, float],
    sample: Sample,
) -> Iterator[None]:
    """A context in which the loop over `denoiser` and `scheduler` is replaced by one call of `sample`.

    Args:
        family: Of the pipeline that will be called.
        denoiser: Its denoiser; weights are not needed.
        scheduler: Its scheduler; deep copies of it are intercepted, too.
        guidance: Numbers for the guidance formula.
        sample: Makes final latents of a call.

    Raises:
        ConfigurationError: When the pipeline was called: it did not run the loop this module expects.
    """
    plain = type(scheduler)
    forward = vars(denoiser).get("forward")  # somebody else may have put one there

    def release() -> None:
        if forward is None:
            vars(denoiser).pop("forward", None)
        else:
            denoiser.forward = forward

    def sample_released(call: Call) -> Tensor:
        stub = denoiser.forward
        release()
        try:
            return sample(call)
        finally:
            denoiser.forward = stub

    loop = _Loop(family, denoiser, dict(guidance), sample_released)

    @functools.wraps(plain.step)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        return loop.step(self, plain, *args, **kwargs)

    @functools.wraps(denoiser.forward)  # some pipelines look which arguments it takes
    def stub(*args: Any, **kwargs: Any) -> _Output:
        return loop.forward(*args, **kwargs)

    denoiser.forward = stub
    scheduler.__class__ = type(plain.__name__, (plain,), {"step": step})
    try:
        yield
    finally:
        release()
        scheduler.__class__ = plain
    loop.check()


class _Loop:
    def __init__(
        self, family: Family, denoiser: nn.Module, guidance: dict[str, float], sample: Sample
    ) -> None:
        self._family, self._denoiser, self._guidance = family, denoiser, guidance
        self._sample = sample
        self._signature = inspect.signature(denoiser.forward)
        self._arguments: list[dict[str, Any]] = []  # of the calls since the last step
        self._inputs: Tensor | None = None
        self._result: Tensor | None = None
        self._calls_per_step: list[int] = []
        self._num_steps = 0

    def forward(self, *args: Any, **kwargs: Any) -> _Output:
        arguments = dict(self._signature.bind(*args, **kwargs).arguments)
        arguments |= arguments.pop("kwargs", {})
        inputs = arguments.pop(self._family.latents_name)
        del arguments["timestep"]
        self._inputs = inputs
        self._arguments.append(arguments)
        channels = getattr(self._denoiser.config, "out_channels", None)
        if inputs.dim() != 4 or channels is None:
            return _Output((torch.zeros_like(inputs),))
        return _Output((inputs.new_zeros(len(inputs), channels, *inputs.shape[2:]),))

    def step(
        self,
        scheduler: Any,
        plain: type,
        model_output: Tensor,
        timestep: Any,
        sample: Tensor,
        *args: Any,
        return_dict: bool = True,
        **kwargs: Any,
    ) -> Any:
        if self._result is None:
            _refuse_predicted_variance(scheduler, plain, model_output, sample)
            self._result = self._sample(self._call(scheduler, plain, sample, kwargs))
            self._num_steps = len(scheduler.timesteps)
        self._calls_per_step.append(len(self._arguments))
        self._arguments = []
        if return_dict:
            return SimpleNamespace(prev_sample=self._result)
        return (self._result, self._result)

    def _call(self, scheduler: Any, plain: type, latents: Tensor, kwargs: dict[str, Any]) -> Call:
        assert self._inputs is not None
        if len(self._inputs) % len(latents):
            raise ConfigurationError(
                f"the denoiser takes {len(self._inputs)} rows for {len(latents)} latents; a family must "
                "have whole copies of the batch"
            )
        twin = copy.deepcopy(scheduler)
        twin.__class__ = plain
        return Call(
            family=self._family.name,
            arguments=self._arguments,
            latents=latents,
            scheduler=twin,
            guidance=self._guidance,
            expansion=len(self._inputs) // len(latents),
            input_dtype=self._inputs.dtype,
            step_arguments=kwargs,
        )

    def check(self) -> None:
        """The loop must have been the one whose timesteps were sampled, alike in all steps."""
        found = self._calls_per_step
        if len(found) != self._num_steps or len(set(found)) > 1:
            raise ConfigurationError(
                f"the pipeline ran {len(found)} denoising steps with {sorted(set(found))} calls of the "
                f"denoiser each, but its scheduler has {self._num_steps} timesteps and every step must "
                "look alike; leave out options that change single steps, such as skipped layers"
            )


def _refuse_predicted_variance(
    scheduler: Any, plain: type, model_output: Tensor, sample: Tensor
) -> None:
    """Raises ConfigurationError if the scheduler wants what the pipeline cuts off, which no step would survive."""
    if "variance_type" not in inspect.signature(plain.__init__).parameters:
        return  # a config keeps settings of the scheduler it was made from
    kind = scheduler.config.variance_type
    if kind in ("learned", "learned_range") and model_output.shape[1] != 2 * sample.shape[1]:
        raise ConfigurationError(
            f"{plain.__name__} with variance_type={kind} takes a variance that the model predicts, but this "
            "pipeline hands it none; write variance_type=fixed_small into scheduler/scheduler_config.json, or "
            "take another scheduler"
        )
