"""What takes the place of a pipeline's parts while its `__call__` runs for something else than a picture.

Each passes on what it does not replace, so that configs, types and methods are those of the real part.
"""

from __future__ import annotations

import copy
import inspect
import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from transformers import BatchEncoding
from transformers.utils import ModelOutput

from lightning_diffpipe.errors import ConfigurationError

Draw = Callable[[Sequence[int]], Tensor]
"""Gives the noise of a shape."""


class Captured(Exception):
    """Ends a call once it has given what was wanted."""


def checked_arguments(pipeline: Any, arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """Runs a pipeline's call until it has checked its arguments, which needs no weights.

    Args:
        pipeline: Parts that the call looks at no sooner, such as text encoders, may be missing.
        arguments: Of the call.

    Returns:
        What was checked, by name; None where the call checks nothing, or fails before it does.

    Raises:
        ConfigurationError: What the check says.
    """
    found: dict[str, Any] = {}
    twin = copy.copy(pipeline)

    def check(*values: Any, **named: Any) -> None:
        try:
            pipeline.check_inputs(*values, **named)
        except ValueError as error:
            raise ConfigurationError(f"{type(pipeline).__name__}: {error}") from error
        bound = inspect.signature(pipeline.check_inputs).bind(*values, **named)
        found.update(bound.arguments)
        raise Captured

    twin.check_inputs = check
    try:
        twin(**arguments)
    except ConfigurationError:
        raise
    except Captured:
        return found
    except Exception:  # without weights a call may fail in any way; with them it will say why
        return None
    return None


class StandIn:
    """Something that is called, or asked, in the place of a real part."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # not yet made, as in a deep copy
            raise AttributeError(name)
        return getattr(self._real, name)


class TorchOfCall(StandIn):
    """The module `torch` as the methods of a pipeline see it: noise is ours, and so are times of samples.

    Args:
        draw: Gives the noise of a shape.
    """

    def __init__(self, draw: Draw) -> None:
        super().__init__(torch)
        self._draw = draw

    def randn(self, *size: Any, dtype: Any = None, **_: Any) -> Tensor:
        """Returns our noise."""
        return self.randn_tensor(
            size[0] if isinstance(size[0], tuple | list) else size, dtype=dtype
        )

    def randn_tensor(self, shape: Sequence[int], *_: Any, dtype: Any = None, **__: Any) -> Tensor:
        """Returns our noise, in the place of the function of diffusers."""
        return self._draw(shape).to(dtype=dtype)

    def tensor(self, data: Any, dtype: Any = None, device: Any = None, **options: Any) -> Tensor:
        """Makes a tensor; of `[t]` and `[t] * n` the times of the samples, where `t` is them all."""
        times = data[0] if isinstance(data, list) and data else None
        if isinstance(times, Tensor) and times.ndim and all(value is times for value in data):
            return times.to(device=device, dtype=dtype)
        if isinstance(
            data, Tensor
        ):  # class numbers, for one, which a list would read from the device
            return data.detach().clone().to(device=device, dtype=dtype)
        return torch.tensor(data, dtype=dtype, device=device, **options)


class OneTimestep(StandIn):
    """A scheduler with one step at given times, which scales and computes nothing.

    Args:
        real: The pipeline's scheduler.
        timesteps: One for each sample, `(B,)`.
        on_step: Gets prediction and sample, and returns what goes on as latents.
    """

    order, init_noise_sigma = 1, 1.0
    # Only the scheduler knows it; what computes with it becomes NaN, and not wrong by a little.
    sigmas = (math.nan, math.nan)

    def __init__(
        self, real: Any, timesteps: Tensor, on_step: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        super().__init__(real)
        self.timesteps = timesteps[None]
        self._on_step = on_step

    def __len__(self) -> int:
        return len(self._real)

    def set_timesteps(
        self,
        num_inference_steps: Any = None,
        device: Any = None,
        timesteps: Any = None,
        sigmas: Any = None,
        mu: Any = None,
        **others: Any,
    ) -> None:
        """Leaves the one timestep as it is."""

    def set_begin_index(self, begin_index: int = 0) -> None:
        """Begins at the one step."""

    def scale_model_input(self, sample: Tensor, timestep: Any = None) -> Tensor:
        """Returns the sample: it is made noisy at the scale that the denoiser is trained at."""
        return sample

    def step(
        self, model_output: Tensor, timestep: Any, sample: Tensor, *args: Any, **options: Any
    ) -> Any:
        """Returns what `on_step` makes of the prediction."""
        after = self._on_step(model_output, sample)
        if options.get("return_dict") is False:
            return (after, after)
        return types.SimpleNamespace(prev_sample=after, pred_original_sample=after)


class PaddingTokenizer(StandIn):
    """A tokenizer whose tensors have one length, and which makes no search for words that were cut off.

    Pipelines tokenize twice, the second time without a limit, and compare ids by value to warn of what was
    cut off. The second answer is shorter here than the first, so that there is nothing to compare.
    """

    def __init__(self, real: Any) -> None:
        super().__init__(real)
        self._text: Any = None
        self._answer: Any = None

    def __call__(self, text: Any = None, *args: Any, **options: Any) -> Any:
        """Tokenizes."""
        if not options.get("truncation") and options.get("padding") == "longest":
            if text == self._text:
                return BatchEncoding({name: ids[:, :1] for name, ids in self._answer.items()})
        elif options.get("truncation") and options.get("padding") in (True, "longest"):
            options["padding"] = "max_length"
        self._text, self._answer = text, self._real(text, *args, **options)
        return self._answer


class NoDecoder(StandIn):
    """An autoencoder that hands over what it shall decode, and ends the call.

    It says that it computes in float32, so that the pipeline does not round what it unpacks.
    """

    dtype = torch.float32

    def __init__(self, real: nn.Module, give: Callable[[Tensor], None]) -> None:
        super().__init__(real)
        self._give = give

    def decode(self, latents: Tensor, *args: Any, **options: Any) -> Any:
        """Ends the call."""
        self._give(latents)
        raise Captured


class DroppingEncoder(StandIn):
    """An autoencoder whose encodings of some samples are zeros, as a pipeline draws without a picture.

    Args:
        real: Encodes.
        shown: 1 for the samples whose encodings stay, 0 for the others, `(B,)`.
    """

    def __init__(self, real: Any, shown: Tensor) -> None:
        super().__init__(real)
        self._shown = shown

    def encode(self, pixels: Tensor, *args: Any, **options: Any) -> Any:
        """Encodes; what it returns has only the mode of a posterior."""
        mode = self._real.encode(pixels, *args, **options).latent_dist.mode()
        latents = mode * self._shown.to(mode).view(-1, *[1] * (mode.ndim - 1))
        return types.SimpleNamespace(latent_dist=types.SimpleNamespace(mode=lambda: latents))


@dataclass(frozen=True)
class TimeArgument:
    """How a pipeline that knows one time tells it to its denoiser.

    Attributes:
        time: The one, in the scheduler's terms.
        argument: Name or position of the denoiser's argument; None while it is not known.
        factor: The argument is `factor * time + offset`.
    """

    time: float
    argument: str | int | None = None
    factor: float = 1.0
    offset: float = 0.0


class TimedDenoiser(StandIn):
    """A denoiser that is given a time for each sample, whatever the pipeline gives it.

    Args:
        real: Computes.
        clock: Where the time is given, and how.
        timesteps: One for each sample, `(B,)`.
    """

    def __init__(self, real: Any, clock: TimeArgument, timesteps: Tensor) -> None:
        super().__init__(real)
        self._clock = clock
        self._timesteps = timesteps

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Calls the denoiser."""
        name, given = self._clock.argument, {**dict(enumerate(args)), **options}
        if name is not None:
            times = self._clock.factor * self._timesteps + self._clock.offset
            given[name] = times.to(given[name])
        return self._real(*(given[i] for i in range(len(args))), **{n: given[n] for n in options})


@dataclass(frozen=True)
class Place:
    """Where a denoiser is given a number that belongs to a sample, such as the height of its picture.

    Attributes:
        leaf: Which of the tensors among the denoiser's arguments, in the order of `pytree`.
        column: Along its last axis.
        argument: Of the pipeline's call, whose value it is.
        entry: Which number of that value.
    """

    leaf: int
    column: int
    argument: str
    entry: int


class SizedDenoiser(StandIn):
    """A denoiser that is given numbers for each sample where the pipeline gives it those of one.

    Args:
        real: Computes.
        places: Where they are given.
        sizes: The numbers, `(B, entries)`, by the argument of the pipeline's call.
    """

    def __init__(self, real: Any, places: Sequence[Place], sizes: Mapping[str, Tensor]) -> None:
        super().__init__(real)
        self._places = places
        self._sizes = sizes

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Calls the denoiser."""
        leaves, structure = pytree.tree_flatten((args, options))
        for place in self._places:
            common = leaves[place.leaf]
            columns = list(common.unbind(-1))
            own = self._sizes[place.argument][:, place.entry]
            columns[place.column] = own.to(common.device, common.dtype)
            leaves[place.leaf] = torch.stack(columns, -1)
        args, options = pytree.tree_unflatten(leaves, structure)
        return self._real(*args, **options)


class NotedEncoder(StandIn):
    """An autoencoder that notes in `pixels` what it encodes, in double precision.

    Kernels of lower precision sum in an order that depends on how many pictures there are.
    """

    def __init__(self, real: nn.Module) -> None:
        super().__init__(real)
        self.pixels: list[Tensor] = []
        self._wide: nn.Module | None = None

    def encode(self, pixels: Tensor, *args: Any, **options: Any) -> Any:
        """Encodes."""
        self.pixels.append(pixels)
        if self._wide is None:
            self._wide = copy.deepcopy(self._real).double()
        return self._wide.encode(pixels.double(), *args, **options)


class NoDenoiser(StandIn):
    """A denoiser that predicts zeros, and keeps what it was called with in `calls`."""

    def __init__(self, real: nn.Module) -> None:
        super().__init__(real)
        self.calls: list[Any] = []

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Notes the call."""
        self.calls.append((args, options))
        tensors = [v for v in pytree.tree_leaves((args, options)) if isinstance(v, Tensor)]
        latents = max(tensors, key=lambda tensor: tensor.ndim)
        shape, config = list(latents.shape), self._real.config
        if config.get("out_channels") and shape[1] == config.get("in_channels"):
            shape[1] = config["out_channels"]  # a variance after the mean, for one
        zeros = latents.new_zeros(shape)
        return (zeros,) if options.get("return_dict") is False else ModelOutput(sample=zeros)


class ReplayedEncoder(StandIn):
    """A text encoder that computes in the first run of a call, and answers further runs with that.

    All prompts must be the same: a run with more samples gets as many copies. `calls` are those of the last run.
    """

    def __init__(self, real: nn.Module) -> None:
        super().__init__(real)
        self.calls: list[Any] = []
        self._answers: list[Any] = []
        self._next = 0

    def rewind(self) -> None:
        """Begins another run."""
        self._next = 0
        self.calls.clear()

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Answers."""
        self.calls.append((args, options))
        samples = _num_samples((args, options))
        if self._next == len(self._answers):
            self._answers.append((samples, self._real(*args, **options)))
        computed, answer = self._answers[self._next]
        self._next += 1
        if computed == samples:
            return answer
        repeat: Callable[[Tensor], Tensor] = lambda t: (
            t[:1].expand(samples, *t.shape[1:]) if t.ndim and len(t) == computed else t
        )
        return pytree.tree_map_only(Tensor, repeat, answer)


def _num_samples(arguments: Any) -> int:
    return next((len(v) for v in pytree.tree_leaves(arguments) if isinstance(v, Tensor)), 1)
