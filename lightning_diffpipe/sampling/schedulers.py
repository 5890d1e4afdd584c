"""Schedulers in patches: one copy for each patch, each seeing its own rows only.

A scheduler's step is elementwise in the latents for nearly all samplers, so rows can take steps separately, by
copies with a history of their own. Whether that holds is not looked up in a list but tried: two halves take steps
by two copies through all timesteps and compared with the whole. Thresholding by quantiles, Brownian trees and
whatever else reads all rows fails the test and is refused by name.

Noise is no obstacle: what a copy samples is cut out of noise of full shape, sampled once per step from the
request's own generator, so that a stochastic sampler, too, gives what it gives in one process. The same holds for
ranks that divide the samples among them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_diffpipe.errors import ConfigurationError


class PatchSchedulers:
    """Steps patches of a request, (start, length) on an axis of the latents, by copies of its scheduler."""

    def __init__(
        self,
        scheduler: Any,
        step_kwargs: Mapping[str, Any],
        slices: Sequence[tuple[int, int]],
        axis: int,
    ) -> None:
        if takes_more(scheduler):
            raise ConfigurationError(
                f"{type(scheduler).__name__} takes more in a step than prediction, timestep and sample, and rows "
                "are divided for steps of these alone; sample with method=single, sequence or distrifusion"
            )
        scheduler = with_timesteps_on(scheduler, "cpu")
        self._copies = [copy.deepcopy(scheduler) for _ in slices]
        for each in self._copies:
            if hasattr(each, "is_scale_input_called"):  # scaled by `InputScaler`
                each.is_scale_input_called = True
        self._step_kwargs, self._slices, self._axis = dict(step_kwargs), list(slices), axis
        self._noise = _NoiseOfWhole(axis)

    def going_on(self, earlier: list[PatchSchedulers] | None) -> PatchSchedulers:
        """Returns the schedulers of the steps before, if there are any; else these, which are recorded.

        Raises:
            ConfigurationError: They step other rows.
        """
        if earlier is None:
            return self
        if not earlier:
            earlier.append(self)
        if earlier[0]._slices != self._slices:
            raise ConfigurationError(
                f"two denoisers of a pipeline cut the latents into rows {earlier[0]._slices} and {self._slices}, "
                "between which schedulers cannot go on; take num_patches=1 or method=sequence"
            )
        return earlier[0]

    def step(
        self,
        latents: Tensor,
        prediction: Tensor,
        t: Tensor,
        patch: int | None,
        kwargs: Mapping[str, Any],
    ) -> None:
        """Takes the rows of a patch, or of all, one step further in the full latents, in place.

        `kwargs` are further arguments of this step, but for generators, which the request has itself.
        """
        kwargs = dict(kwargs) | {n: x for n, x in self._step_kwargs.items() if n == "generator"}
        for m in range(len(self._slices)) if patch is None else (patch,):
            start, length = self._slices[m]
            if m == 0:
                self._noise.begin_step()
            rows = latents.narrow(self._axis, start, length)
            options = {n: self._cut(n, x, latents, start, length) for n, x in kwargs.items()}
            with self._noise.of(range(start, start + length), latents.shape[self._axis]):
                predicted = _dense(prediction.narrow(self._axis, start, length))
                out = self._copies[m].step(predicted, t, _dense(rows), **options)
            rows.copy_(out.prev_sample if hasattr(out, "prev_sample") else out[0])

    def _cut(self, name: str, x: Any, latents: Tensor, start: int, length: int) -> Any:
        """Returns an argument cut to some rows, along the axis of the latents, as samples come first in both."""
        at, size = latents.ndim + self._axis, latents.shape[self._axis]
        if not isinstance(x, Tensor) or length == size or size not in x.shape[1:]:
            return x
        if x.ndim <= at or x.shape[at] != size:
            raise ConfigurationError(
                f"the scheduler is given {name}={tuple(x.shape)} for latents {tuple(latents.shape)}, and it is not "
                "known which axis patches cut; take num_patches=1 or method=sequence"
            )
        return _dense(x.narrow(at, start, length))


def is_elementwise(scheduler: Any, timesteps: Tensor, ndim: int, axis: int) -> bool:
    """Tries whether stepping two halves with two copies equals stepping the whole, over all timesteps.

    On the host, wherever the scheduler is, and with no generator touched but the host's, which is put back.

    Raises:
        ConfigurationError: Its step fails, or takes other arguments; names the scheduler.
    """
    scheduler, timesteps = on_host(scheduler), timesteps.cpu()
    shape = [1, 2, *[4] * (ndim - 2)]
    shape[axis] = 4
    generator = torch.Generator().manual_seed(0)
    start, *predictions = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for _ in range(len(timesteps) + 1)
    )
    takes_one = takes_generator(scheduler)

    def latents_after(slices: Sequence[tuple[int, int]]) -> Tensor:
        """Returns the latents after all timesteps, each of the slices by a copy of its own."""
        x = start.clone()
        seeded = {"generator": torch.Generator().manual_seed(1)} if takes_one else {}
        schedulers = PatchSchedulers(scheduler, seeded, slices, axis)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(2)  # torch.manual_seed would seed GPUs, too
            for t, prediction in zip(timesteps, predictions, strict=True):
                for m in range(len(slices)):
                    schedulers.step(x, prediction, t, m, seeded)
        return x

    try:
        whole, halves = latents_after([(0, 4)]), latents_after([(0, 2), (2, 2)])
    except Exception as error:
        raise ConfigurationError(
            f"{type(scheduler).__name__} fails when it steps a prediction of the latents' shape, in parts or at "
            f"once: {type(error).__name__}: {error}; one that takes a predicted variance needs "
            "variance_type=fixed_small, or choose another scheduler or method=single"
        ) from error
    return torch.allclose(whole, halves, rtol=1e-7, atol=1e-9, equal_nan=True)


def on_host(scheduler: Any) -> Any:
    """Returns a copy whose tensors are on the host."""
    copied = copy.copy(scheduler)
    vars(copied).update(pytree.tree_map_only(Tensor, lambda x: x.cpu(), dict(vars(scheduler))))
    return copied


def with_timesteps_on(scheduler: Any, device: torch.device | str) -> Any:
    """Returns a shallow copy with timesteps on a device; on the host tables are indexed without a wait."""
    copied = copy.copy(scheduler)
    if isinstance(getattr(copied, "timesteps", None), Tensor):
        copied.timesteps = copied.timesteps.to(device)
    return copied


class HostTimesteps:
    """Timesteps of a schedule on the host, copied at once: copying one for each step would wait each time."""

    def __init__(self) -> None:
        self._schedule: Tensor | None = None

    def of(self, t: Any, schedule: Any) -> Any:
        """Returns a timestep `()` on the host if it is an entry of the schedule `(steps,)`, else as it is."""
        if not isinstance(t, Tensor) or not isinstance(schedule, Tensor) or t.ndim:
            return t
        index, rest = divmod(t.data_ptr() - schedule.data_ptr(), schedule.element_size())
        is_like_it = (t.dtype, t.device) == (schedule.dtype, schedule.device)
        if rest or not is_like_it or not schedule.is_contiguous() or not 0 <= index < len(schedule):
            return t
        if schedule is not self._schedule:
            self._schedule, self._on_host = schedule, schedule.cpu()
        return self._on_host[index]


def takes_more(scheduler: Any) -> bool:
    """Returns whether its step takes further arguments before prediction, timestep and sample."""
    names = list(inspect.signature(scheduler.step).parameters)
    usual = ["model_output", "timestep", "sample"]
    return set(usual) <= set(names) and names[:3] != usual


def takes_generator(scheduler: Any) -> bool:
    """Returns whether its step takes noise from a generator that it is given."""
    return "generator" in inspect.signature(scheduler.step).parameters


class _NoiseOfWhole(TorchFunctionMode):
    """Answers `torch.randn` for some rows of an axis with these rows of noise for all.

    Within a step, the n-th call of a part gets its rows of the n-th noise of full shape, which is sampled
    when the first part asks for it.
    """

    def __init__(self, axis: int) -> None:
        super().__init__()
        self._axis = axis
        self._noises: list[Tensor] = []  # of full shape, in this step
        self._num_calls: Counter[int] = Counter()  # by the first row of a part
        self._rows: Sequence[int] = ()
        self._size = 0

    def begin_step(self) -> None:
        """Lets following calls sample new noise."""
        self._noises.clear()
        self._num_calls.clear()

    def of(self, rows: Sequence[int], size: int) -> _NoiseOfWhole:
        """Sets the rows, of `size`, to answer for."""
        self._rows, self._size = rows, size
        return self

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Replaces noise of as many rows as the part has."""
        rows, axis, kwargs = self._rows, self._axis, kwargs or {}
        arguments = None if len(rows) == self._size else _noise_arguments(func, args, kwargs)
        if arguments is None:
            return func(*args, **kwargs)
        shape, options = arguments
        if not -len(shape) <= axis < len(shape) or shape[axis] != len(rows):
            return torch.randn(shape, **options)
        number = self._num_calls[rows[0]]
        self._num_calls[rows[0]] += 1
        if number == len(self._noises):
            shape[axis] = self._size
            self._noises.append(torch.randn(shape, **options))
        noise = self._noises[number]
        return noise.index_select(axis, torch.tensor(rows, device=noise.device))


def for_samples(
    scheduler: Any, rows: Sequence[int], latents: Tensor, timesteps: Tensor | None = None
) -> Any:
    """Makes a scheduler sample noise for all samples and keep that of some, for ranks that divide the samples.

    Raises:
        ConfigurationError: It steps all samples together; names the scheduler.
    """
    num_rows = len(latents)
    timesteps = scheduler.timesteps if timesteps is None else timesteps
    if not is_elementwise(scheduler, timesteps, latents.ndim, -latents.ndim):
        raise ConfigurationError(
            f"{type(scheduler).__name__} reads all samples in one step, or its noise is not sampled by "
            "torch.randn, so they cannot be divided over ranks: leave data at 1, or use another scheduler"
        )
    plain, noise = type(scheduler), _NoiseOfWhole(0)

    @functools.wraps(plain.step)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        noise.begin_step()
        with noise.of(rows, num_rows):
            return plain.step(self, *args, **kwargs)

    dividing = copy.deepcopy(scheduler)
    dividing.__class__ = type(plain.__name__, (plain,), {"step": step})  # survives further copies
    return dividing


def random_states(device: torch.device) -> list[Tensor]:
    """Returns the states of the default generators: that of the host first, then that of a GPU."""
    on_device = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *on_device]


@contextlib.contextmanager
def sampling_from(
    states: Sequence[Tensor], device: torch.device, restores: bool = True
) -> Iterator[None]:
    """Sets the states of the default generators (`random_states`); restores those before, unless told not to."""
    with torch.random.fork_rng([device] if device.type == "cuda" else [], enabled=restores):
        for state in states[:1]:
            torch.set_rng_state(state)
        for state in states[1:]:
            torch.cuda.set_rng_state(state, device)
        yield


def _noise_arguments(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[int], dict[str, Any]] | None:
    """Returns shape and options of a call that samples normal noise; None for all other functions."""
    options = dict(kwargs)
    if func is torch.randn_like:
        like = args[0]
        return list(like.shape), {"dtype": like.dtype, "device": like.device} | options
    if func is not torch.randn:
        return None
    size = options.pop("size", None) or (args if isinstance(args[0], int) else args[0])
    return list(size), options


def _dense(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)
