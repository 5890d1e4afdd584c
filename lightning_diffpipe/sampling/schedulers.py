"""Schedulers in patches: one copy for each patch, each seeing its own rows only.

A scheduler's step is elementwise in the latents for nearly all samplers, so rows can be stepped apart, each by a
copy with a history of its own. Whether that holds is not looked up in a list but tried: two halves are stepped
by two copies through all timesteps and compared with the whole. Thresholding by quantiles, Brownian trees and
whatever else looks at all rows fails the test and is refused by name.

Noise is no obstacle: what a copy draws is cut out of noise of full shape, drawn once per step from the request's
own generator, so that a stochastic sampler, too, gives what it gives in one process.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.sampling.request import Request


class PatchSchedulers:
    """Steps the patches of one request.

    Args:
        scheduler: With timesteps set; copied for each patch.
        step_kwargs: Further arguments of its `step`.
        slices: Start and length of each patch on the axis.
        axis: Of the latents, that is cut.
    """

    def __init__(
        self,
        scheduler: Any,
        step_kwargs: Mapping[str, Any],
        slices: Sequence[tuple[int, int]],
        axis: int,
    ) -> None:
        self._copies = [copy.deepcopy(scheduler) for _ in slices]
        for each in self._copies:
            if hasattr(each, "is_scale_input_called"):  # scaled by `InputScaler`
                each.is_scale_input_called = True
        self._step_kwargs, self._slices, self._axis = dict(step_kwargs), list(slices), axis
        self._noise = _NoiseOfWhole(axis)

    def step(self, latents: Tensor, prediction: Tensor, t: Tensor, patch: int | None) -> None:
        """Takes the latents one step further, in place.

        Args:
            latents: Full.
            prediction: Of full shape; only the patch's rows are read.
            t: The timestep.
            patch: Which; None means all.
        """
        for m in range(len(self._slices)) if patch is None else (patch,):
            start, length = self._slices[m]
            if m == 0:
                self._noise.forget()
            rows = latents.narrow(self._axis, start, length)
            with self._noise.of(start, length, latents.shape[self._axis]):
                out = self._copies[m].step(
                    _dense(prediction.narrow(self._axis, start, length)),
                    t,
                    _dense(rows),
                    **self._step_kwargs,
                )
            rows.copy_(out.prev_sample if hasattr(out, "prev_sample") else out[0])


class InputScaler:
    """`scale_model_input` on ranks that never step the scheduler.

    Args:
        request: Its scheduler is copied.
    """

    def __init__(self, request: Request) -> None:
        scheduler = request.scheduler
        wanted = request.scale_input and hasattr(scheduler, "scale_model_input")
        self._scheduler = copy.deepcopy(scheduler) if wanted else None
        self._first: int | None = None

    def scale(self, latents: Tensor, t: Tensor, step: int) -> Tensor:
        """What `denoise` is given at a step."""
        if self._scheduler is None:
            return latents
        if self._first is not None:
            # Schedulers count in `step`, which is not called here.
            self._scheduler._step_index = self._first + step
        scaled: Tensor = self._scheduler.scale_model_input(latents, t)
        self._first = getattr(self._scheduler, "_step_index", None) if step == 0 else self._first
        return scaled


def refuse_unless_elementwise(request: Request, axis: int) -> None:
    """Tries whether patches can be stepped apart.

    Args:
        request: Nothing in it is changed.
        axis: Of the latents, that is cut.

    Raises:
        ConfigurationError: They cannot; names the scheduler.
    """
    if not is_elementwise(request.scheduler, request.timesteps, request.latents.ndim, axis):
        raise ConfigurationError(
            f"{type(request.scheduler).__name__} looks at all rows of the latents in one step "
            "(thresholding, or noise that is not drawn by torch.randn), so patches cannot be stepped "
            "apart; switch that off, or use another scheduler such as FlowMatchEulerDiscreteScheduler, "
            "DDIMScheduler, DPMSolverMultistepScheduler, EulerDiscreteScheduler or UniPCMultistepScheduler"
        )


def is_elementwise(scheduler: Any, timesteps: Tensor, ndim: int, axis: int) -> bool:
    """Whether stepping two halves with two copies equals stepping the whole, over all timesteps."""
    shape = [1, 2, *[4] * (ndim - 2)]
    shape[axis] = 4
    draw = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=draw, dtype=torch.float64)
    predictions = [torch.randn(shape, generator=draw, dtype=torch.float64) for _ in timesteps]
    takes_generator = "generator" in inspect.signature(scheduler.step).parameters

    def run(slices: Sequence[tuple[int, int]]) -> Tensor:
        x = start.clone()
        seeded = {"generator": torch.Generator().manual_seed(1)} if takes_generator else {}
        schedulers = PatchSchedulers(scheduler, seeded, slices, axis)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            for t, prediction in zip(timesteps, predictions, strict=True):
                for m in range(len(slices)):
                    schedulers.step(x, prediction, t, m)
        return x

    whole, halves = run([(0, 4)]), run([(0, 2), (2, 2)])
    return torch.allclose(whole, halves, rtol=1e-7, atol=1e-9, equal_nan=True)


class _NoiseOfWhole(TorchFunctionMode):
    """Answers `torch.randn` for a patch with the patch's rows of noise for the whole."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self._axis = axis
        self._drawn: dict[Any, Tensor] = {}
        self._turns: Counter[int] = Counter()
        self._rows = (0, 0, 0)

    def forget(self) -> None:
        """A new step begins."""
        self._drawn.clear()
        self._turns.clear()

    def of(self, start: int, length: int, size: int) -> _NoiseOfWhole:
        """For a patch: its first row, its rows, all rows."""
        self._rows = (start, length, size)
        return self

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Replaces draws of the patch's shape."""
        kwargs = dict(kwargs or {})
        start, length, size = self._rows
        if func is torch.randn_like:
            like, args = args[0], args[1:]
            kwargs.setdefault("dtype", like.dtype)
            kwargs.setdefault("device", like.device)
            func, args = torch.randn, (tuple(like.shape),)
        if func is not torch.randn or length == size:
            return func(*args, **kwargs)
        shape = list(kwargs.pop("size", None) or (args if isinstance(args[0], int) else args[0]))
        if len(shape) < -self._axis or shape[self._axis] != length:
            return func(shape, **kwargs)
        turn = self._turns[start]
        self._turns[start] += 1
        if turn not in self._drawn:
            shape[self._axis] = size
            self._drawn[turn] = func(shape, **kwargs)
        return _dense(self._drawn[turn].narrow(self._axis, start, length))


def _dense(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)
