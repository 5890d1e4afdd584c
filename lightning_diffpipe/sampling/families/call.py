"""What all ranks need to know to sample one request: plain values that can be sent.

One rank encodes the prompts and draws the start noise; what it found is a `Call`. Every rank, that one
included, makes a `Request` of it for its own copy, or its own part, of the denoiser:

    rank 0      prompts -> pipeline's own code -> Call ── broadcast ──> all ranks
    all ranks   Call + denoiser -> Request -> sampler -> final latents
    rank 0      final latents -> pipeline's own code -> pictures
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.sampling.families.family import Family, family_named
from lightning_diffpipe.sampling.request import Combine, Denoise, Request
from lightning_diffpipe.sampling.schedulers import drawing_from, for_samples, on_host, random_states


@dataclass
class Call:
    """One request, without the model.

    Attributes:
        family: Name of the family whose formulas apply.
        arguments: For every call of the denoiser in one step, its arguments by name, without the
            latents and the timestep.
        latents: Start noise, `(B, ...)`.
        scheduler: The scheduler of the pipeline, its timesteps set.
        guidance: Numbers of the guidance formula: `scale`, `rescale`.
        expansion: Rows of the denoiser's input for one row of the latents: 2 for guidance in the batch.
        input_dtype: Type of the latents that the denoiser takes.
        step_arguments: Further arguments of `scheduler.step`, such as `eta`.
        divided: Where the branches of guidance were before they were divided over two halves of the
            ranks: `"batch"`, `"calls"`, or None if they are together.
        random_states: Of the default generators of the rank that made the call, that of the host first. Noise is
            drawn from these where the pipeline hands its scheduler no generator, on all ranks alike.
    """

    family: str
    arguments: list[dict[str, Any]]
    latents: Tensor
    scheduler: Any
    guidance: dict[str, float]
    expansion: int
    input_dtype: torch.dtype
    step_arguments: dict[str, Any] = field(default_factory=dict)
    divided: str | None = None
    random_states: list[Tensor] = field(default_factory=list)

    def request(self, model: nn.Module, exchange: Exchange | None = None) -> Request:
        """Binds the call to a denoiser.

        Args:
            model: The denoiser, or this rank's part of it.
            exchange: For one branch of guidance: makes both predictions, in order, of this one.
        """
        return Request(
            model=model,
            denoise=self.denoise(model),
            scheduler=copy.deepcopy(self.scheduler),  # schedulers count their steps
            timesteps=self.scheduler.timesteps,
            latents=self.latents,
            scale_input=hasattr(self.scheduler, "scale_model_input"),
            step_kwargs=dict(self.step_arguments),
            branches_in_batch=self.expansion * self._copies,
            combine=None if exchange is None else self._combine(exchange),
        )

    def denoise(self, model: nn.Module) -> Denoise:
        """The prediction as a function of (scaled latents, timestep): after guidance, or of one branch of it."""
        family, guidance = family_named(self.family), dict(self.guidance)

        def denoise(latents: Tensor, timestep: Tensor) -> Tensor:
            inputs = torch.cat([latents] * self.expansion) if self.expansion > 1 else latents
            outputs = []
            for arguments in self.arguments:
                given = {
                    family.latents_name: family.latents(inputs, guidance).to(self.input_dtype),
                    "timestep": family.timestep(timestep, inputs),
                }
                outputs.append(model(**given, **arguments)[0])
            if self.divided is not None:
                return family.needed(outputs[0], latents)
            return family.guide(outputs, latents, guidance)

        return denoise

    def _combine(self, exchange: Exchange) -> Combine:
        family, guidance = family_named(self.family), dict(self.guidance)

        def combine(prediction: Tensor, latents: Tensor) -> Tensor:
            pair = exchange(prediction)
            outputs = [torch.cat(pair)] if self.divided == "batch" else list(pair)
            return family.guide(outputs, latents, guidance)

        return combine

    @property
    def branches(self) -> int:
        """Predictions that guidance combines and that two halves of the ranks could share."""
        return max(len(self.arguments), self.expansion)

    def branch(self, index: int) -> Call:
        """The same request with one branch of guidance only, for one half of the ranks.

        Where guidance is in the batch, rows `index::` of every per-sample argument; where the denoiser is
        called once per branch, that call.
        """
        if len(self.arguments) > 1:
            return replace(self, arguments=[self.arguments[index]], divided="calls")
        if self.expansion == 1:
            raise ConfigurationError(
                "guidance=2 divides the two branches of classifier-free guidance, but this request has one "
                "that can be divided: raise guidance_scale above 1, or leave guidance at 1 (always so with "
                "the dit family, whose latents hold both)"
            )
        num_rows = self.expansion * len(self.latents)
        rows = range(index * len(self.latents), (index + 1) * len(self.latents))
        arguments = [_rows(a, rows, num_rows, family_named(self.family)) for a in self.arguments]
        return replace(self, arguments=arguments, expansion=1, divided="batch")

    def samples(self, start: int, stop: int) -> Call:
        """The same request for samples `start` to `stop` only, for data parallel ranks.

        Noise drawn on the way is that of these samples in the whole request.

        Raises:
            ConfigurationError: The scheduler cannot step samples apart.
        """
        family, num_samples = family_named(self.family), len(self.latents)
        here = self.rows_of(start, stop)
        rows = [e * num_samples + i for e in range(self.expansion) for i in here]
        num_rows = self.expansion * num_samples
        arguments = [_rows(a, rows, num_rows, family) for a in self.arguments]
        steps, scheduler = dict(self.step_arguments), self.scheduler
        if isinstance(steps.get("generator"), (list, tuple)):  # each draws for its own row
            steps["generator"] = [steps["generator"][i] for i in here]
        else:
            scheduler = for_samples(scheduler, here, self.latents)
        return replace(
            self,
            arguments=arguments,
            latents=self.latents[here],
            scheduler=scheduler,
            step_arguments=steps,
        )

    def rows_of(self, start: int, stop: int) -> list[int]:
        """Rows of the latents that belong to samples `start` to `stop`."""
        per_copy = self.num_samples
        return [c * per_copy + i for c in range(self._copies) for i in range(start, stop)]

    @property
    def num_samples(self) -> int:
        """Pictures this request draws."""
        return len(self.latents) // self._copies

    @property
    def _copies(self) -> int:
        """Copies of every sample in the latents themselves."""
        return family_named(self.family).doubled(self.guidance)

    def packed(self) -> Call:
        """The call as it travels: on the host, generators as their states."""
        arguments, latents, step_arguments = pytree.tree_map(
            _to("cpu"), (self.arguments, self.latents, self.step_arguments)
        )
        packed = {k: _Generator.of(v) for k, v in step_arguments.items()}
        return replace(
            self,
            arguments=arguments,
            latents=latents,
            scheduler=on_host(self.scheduler),
            step_arguments=packed,
            random_states=random_states(self.latents.device),
        )

    def unpacked(self, device: torch.device) -> Call:
        """The inverse of `packed`, on a rank's own device."""
        arguments, latents = pytree.tree_map(_to(device), (self.arguments, self.latents))
        twin = copy.copy(self.scheduler)
        if torch.is_tensor(getattr(twin, "timesteps", None)):
            twin.timesteps = twin.timesteps.to(device)
        steps = {k: _Generator.restored(v) for k, v in self.step_arguments.items()}
        return replace(
            self, arguments=arguments, latents=latents, scheduler=twin, step_arguments=steps
        )

    @contextmanager
    def drawing_alike(self, rank: int) -> Iterator[None]:
        """A context in which default generators go on from where those of rank 0 were.

        Args:
            rank: This one; on all but rank 0 default generators are as they were behind the context.
        """
        with drawing_from(self.random_states, self.latents.device, goes_back=rank > 0):
            yield


Exchange = Callable[[Tensor], tuple[Tensor, Tensor]]


def _to(device: torch.device | str) -> Callable[[Any], Any]:
    return lambda value: value.to(device) if isinstance(value, Tensor) else value


def _rows(arguments: Any, rows: Sequence[int], num_rows: int, family: Family) -> Any:
    """Takes rows of every argument that has one row per input of the denoiser."""
    return {
        name: value
        if name in family.shared
        else pytree.tree_map(
            lambda leaf: (
                leaf[list(rows)]
                if isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == num_rows
                else leaf
            ),
            value,
        )
        for name, value in arguments.items()
    }


@dataclass(frozen=True)
class _Generator:
    """A random number generator on its way to another process."""

    state: Tensor
    device: str

    @classmethod
    def of(cls, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(cls.of(v) for v in value)
        if not isinstance(value, torch.Generator):
            return value
        return cls(value.get_state(), value.device.type)

    @classmethod
    def restored(cls, value: Any) -> Any:
        """The inverse of `of`; every rank has generators of its own."""
        if isinstance(value, (list, tuple)):
            return type(value)(cls.restored(v) for v in value)
        if not isinstance(value, cls):
            return value
        generator = torch.Generator(value.device)
        generator.set_state(value.state)
        return generator
