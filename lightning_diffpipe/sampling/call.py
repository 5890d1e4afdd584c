"""One request without its model: plain values that rank 0 sends to all ranks.

A first run of the pipeline's call on rank 0 finds it (`dry_run.py`). Every rank, that one included, makes a
`Request` of it for its own copy, or its own part, of the denoiser:

    rank 0      prompts -> pipeline's own code, first run -> Call ── broadcast ──> all ranks
    all ranks   Call + denoiser -> Request -> sampler, which runs the pipeline's loop -> final latents
    rank 0      final latents -> pipeline's own code -> images
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.sampling.loop import (
    ExchangeBranches,
    PipelineCall,
    PipelineLoop,
    Prediction,
    latents_name,
    shapes_given,
    with_own_generators,
)
from lightning_diffpipe.sampling.record import Controlled, moved
from lightning_diffpipe.sampling.request import Denoise, Request
from lightning_diffpipe.sampling.schedulers import (
    PatchSchedulers,
    for_samples,
    on_host,
    random_states,
    sampling_from,
    takes_more,
    with_timesteps_on,
)


@dataclass
class Phase:
    """Steps in a row that call the same denoiser as often, with tensors of the same shapes.

    Attributes:
        shape: Shape of the latents of all ranks.
        start: Number of steps before the phase.
        calls: Arguments of each call, in the first and the last step that make any. An argument that is one object
            in both was the same in all steps between.
    """

    denoisers: tuple[str, ...]
    shape: torch.Size
    start: int = 0
    calls: list[list[dict[str, Any]]] = field(default_factory=list)
    num_calls: list[int] = field(default_factory=list)

    def goes_on(self, denoisers: tuple[str, ...], calls: list[dict[str, Any]]) -> bool:
        """Returns whether a step that makes such calls belongs to the phase."""
        first = self.calls[0] if self.calls else calls
        return self.denoisers == denoisers and shapes_given(first) == shapes_given(calls)


@dataclass(frozen=True)
class Samples:
    """The samples of a request, and where their rows are: row r belongs to sample (r // inner) % num.

        inner 1        without 0, without 1, with 0, with 1       two prompts with guidance, as most pipelines have
        inner 2        without 0, with 0, without 1, with 1
        inner frames   frames of 0, frames of 1

    Attributes:
        num: Number of samples; 1 if their rows are not known.
        latents: `inner` of the latents that the scheduler is given.
        inputs: `inner` of the latents that the denoiser is given.
        inner: `inner` of the denoiser's arguments by their places, 0 for those that all samples share. An argument
            that is not named has rows of samples if it has as many rows as the latents.
        reason: Reason for which ranks cannot divide the samples, or None.
        copies_first: Whether the loop copies the first prediction of a step before it asks for the second.
    """

    num: int
    latents: int = 1
    inputs: int = 1
    inner: Mapping[str, int] = field(default_factory=dict)
    reason: str | None = None
    copies_first: bool = False

    def rows(self, size: int, inner: int, samples: Collection[int]) -> list[int]:
        """Returns the rows of some samples, in order."""
        return [row for row in range(size) if (row // inner) % self.num in samples]

    def cut(
        self, arguments: Mapping[str, Any], num_rows: int, keep: Callable[[int, int], list[int]]
    ) -> dict[str, Any]:
        """Returns arguments of the denoiser with the rows that `keep(size, inner)` gives."""
        cut_values: dict[int, Any] = {}  # what was one tensor stays one

        def cut(value: Any, place: str) -> Any:
            if size := self._num_rows_at(place, value, num_rows):
                if id(value) not in cut_values:
                    rows = keep(*size)
                    is_list = isinstance(value, list)
                    cut_values[id(value)] = [value[r] for r in rows] if is_list else value[rows]
                return cut_values[id(value)]
            if isinstance(value, dict):
                return {name: cut(each, f"{place}.{name}") for name, each in value.items()}
            if type(value) in (list, tuple):
                return type(value)(cut(each, f"{place}.{i}") for i, each in enumerate(value))
            return value

        return {name: cut(value, name) for name, value in arguments.items()}

    def _num_rows_at(self, place: str, value: Any, num_rows: int) -> tuple[int, int] | None:
        """Returns the number of rows of an argument, and `inner`; None if it has no rows of samples.

        An argument without a place has rows of samples if it has `num_rows` of them, as the latents.
        """
        is_tensor = isinstance(value, Tensor) and value.ndim > 0
        size = len(value) if is_tensor or isinstance(value, list) else 0
        inner = self.inner.get(place, self.inputs if is_tensor and size == num_rows else 0)
        # A row alone, which `num` does not divide, is of all samples.
        return (size, inner) if size and inner and size % self.num == 0 else None


@dataclass
class Call:
    """One request, without the model.

    Attributes:
        pipeline: Call of the diffusers pipeline.
        phases: Steps by how they call denoisers: one phase, unless these take turns or guidance ends.
        timesteps: One for each step.
        whole: Latents of all ranks, as the first step is given them.
        scheduler: Scheduler in its state before the first step.
        num_samples: Samples of the request.
        step_arguments: Further arguments of `scheduler.step`, such as `eta`.
        channels: Channels of a prediction that the loop looks at; None means all.
        mixes: Tensors whose rows the loop's own code combines: `"latents"`, `"predictions"`; `"noise"` where it
            samples some by default generators.
        by_place: Attention may treat rows by their place in the batch, which is not cut into branches then.
        rows: Rows of the latents that this rank computes; None means all.
        mine: Samples that this rank computes; None means all.
        divided: Place where ranks divide branches of guidance: in the `"batch"`, or by `"calls"`; None for neither.
        index: Index of the branch that this rank computes.
        random_states: States of the default generators of the rank that made the call, that of the host first.
            Where the pipeline passes its scheduler no generator, noise is sampled by these, on all ranks alike.
        loop: Loop of this rank, once it has started.
        patch_schedulers: Schedulers of patches of the request that began last, once they have been used.
        samples_in: Rows of each sample, where they were observed (`observe_samples`).
    """

    pipeline: PipelineCall
    phases: list[Phase]
    timesteps: Tensor
    whole: Tensor
    scheduler: Any
    num_samples: int
    step_arguments: dict[str, Any] = field(default_factory=dict)
    channels: int | None = None
    mixes: frozenset[str] = frozenset()
    by_place: bool = False
    rows: list[int] | None = None
    mine: range | None = None
    divided: str | None = None
    index: int = 0
    random_states: list[Tensor] = field(default_factory=list)
    loop: list[PipelineLoop] = field(default_factory=list)
    patch_schedulers: list[list[PatchSchedulers]] = field(default_factory=list)
    samples_in: Samples | None = None

    @property
    def separable(self) -> Samples:
        """Samples that ranks can divide; in the layout of most pipelines, where it was not observed."""
        return self.samples_in or Samples(self.num_samples)

    @property
    def steps(self) -> list[list[dict[str, Any]]]:
        """Arguments of each call of the denoiser in the first and the last step of the first phase."""
        return [self.phases[0].calls[0], self.phases[0].calls[-1]]

    @property
    def denoiser(self) -> str:
        """Name of the denoiser that ranks share in the first phase."""
        return self.phases[0].denoisers[0]

    def phase(self, index: int, latents: Tensor) -> Call:
        """Returns the same request for the steps of one phase only, from this rank's latents before them."""
        phase, whole = self.phases[index], self.whole
        if index:
            whole = self.whole.to(latents.dtype, copy=True)
            whole[self.rows or slice(None)] = latents
        stop = phase.start + len(phase.num_calls)
        timesteps = self.timesteps[phase.start : stop]
        channels = None if self.channels is None else phase.shape[1]
        return replace(self, phases=[phase], timesteps=timesteps, whole=whole, channels=channels)

    @property
    def latents(self) -> Tensor:
        """Start noise of the samples of this rank."""
        return self.whole if self.rows is None else self.whole[self.rows]

    @property
    def expansion(self) -> int:
        """Rows of the denoiser's input for one row of the latents: 2 for guidance in the batch, 1 if none."""
        arguments, rows = self.steps[0][0], len(self.whole)
        if self.samples_in is not None:  # frames may be rows of the one and not of the other
            rows = self.samples_in.num * self._copies
        times, rest = divmod(len(arguments[latents_name(arguments)]), rows)
        return 1 if rest else times

    def refuse_steps(self, method: str) -> None:
        """Raises ConfigurationError unless every step calls the denoiser alike, which most methods need."""
        name = self.pipeline.name
        shapes = [tuple(phase.shape[1:]) for phase in self.phases]
        # Method single shares no more than branches of guidance.
        if len(set(shapes)) > 1 and method != "single":
            raise ConfigurationError(
                f"{name} denoises latents {' and then '.join(map(str, shapes))}: the later denoiser is given all "
                f"that the one before has sampled, of which with method={method} a rank has a part; sample with "
                "method=single, which divides the prompts"
            )
        for phase in self.phases:
            if len(phase.denoisers) > 1:
                raise ConfigurationError(
                    f"a step of {name} denoises with {' and '.join(phase.denoisers)}, and method={method} can "
                    "share one denoiser in a step; sample it with method=single, which divides the prompts"
                )
            if len(set(phase.num_calls)) > 1:
                counts = ", ".join(map(str, sorted(set(phase.num_calls))))
                guided, remedy = "", "method=single"
                if method == "single":
                    guided, remedy = ", guidance=2", "guidance=1"
                raise ConfigurationError(
                    f"the steps of {name} call its {phase.denoisers[0]} {counts} times, and with method={method}"
                    f"{guided} every step must look alike; leave out options that change single steps, or sample "
                    f"with {remedy}"
                )

    def refuse_rows(self, warmup_steps: int | str) -> None:
        """Raises ConfigurationError if the loop's own code would need rows that no rank has under PipeFusion."""
        name = self.pipeline.name
        if "latents" in self.mixes:
            raise ConfigurationError(
                f"between its calls of the denoiser {name} brings rows of the latents together, and with "
                "method=pipefusion a rank has some of the rows only; sample with method=sequence, distrifusion or "
                "single"
            )
        if "predictions" in self.mixes and warmup_steps == 0:
            raise ConfigurationError(
                f"{name} brings rows of predictions together, as guidance_rescale does, and without a synchronous "
                "step there are none of the later patches; take warmup_steps=1 or more"
            )

    def request(self, model: nn.Module, exchange: ExchangeBranches | None = None) -> Request:
        """Binds the call to a denoiser, or to this rank's part of it; branches of guidance are exchanged."""
        divided, controls = self.divided == "batch", self.pipeline.controls
        if controls or "listed" in self.steps[0][0]:
            model = Controlled(model, controls)
        started, schedulers = list[PipelineLoop](), list[PatchSchedulers]()
        if self.phases[0].start:  # goes on where the phase before has ended
            started, (schedulers,) = [*self.loop], self.patch_schedulers
        self.patch_schedulers[:] = [schedulers]
        options = self.of_own_rows(self.step_arguments)
        return Request(
            model=model,
            denoise=self.denoise(model),
            scheduler=copy.deepcopy(self.scheduler),  # schedulers count their steps
            timesteps=self.timesteps,
            latents=self.latents,
            scale_input=hasattr(self.scheduler, "scale_model_input"),
            step_kwargs=moved(with_own_generators(options, self.whole.device), self.whole.device),
            branches_in_batch=1 if divided or self.by_place else self.expansion * self._copies,
            begin=lambda: self._begin(model, exchange, started),
            patch_schedulers=schedulers,
        )

    def _begin(
        self, model: nn.Module, exchange: ExchangeBranches | None, started: list[PipelineLoop]
    ) -> PipelineLoop:
        """Begins a loop, or goes on with the next of those that have started with another denoiser."""
        compute = partial(self._compute, model)
        if started:
            started[0].change(self, compute)
            return started.pop(0)
        # All loops of a request begin with the same random numbers, as if there were one; the first ends the call.
        is_first = not self.loop
        head = sampling_from(self.random_states, self.whole.device, restores=not is_first)
        loop = PipelineLoop(self, compute, exchange, head, samples_noise=is_first)
        self.loop.append(loop)
        return loop

    def _compute(self, model: nn.Module, arguments: dict[str, Any]) -> Any:
        """Answers a call of the denoiser with the rows that this rank computes; others are NaN."""
        num_rows = len(arguments[latents_name(arguments)])
        rows = self._own_rows(num_rows)
        if rows is None:
            return model(**arguments)
        cut, times = self._cut(arguments), arguments.get("timestep")
        has_times = isinstance(times, Tensor) and times.ndim and len(times) > 1
        if self.divided == "batch" and has_times and cut["timestep"] is times:
            raise ConfigurationError(
                f"guidance=2 divides {num_rows} rows, but the pipeline gives its denoiser {len(times)} times "
                "that are not one for each row; leave guidance at 1"
            )
        out = model(**cut)[0]
        if self.divided == "batch":  # the answer has the rows of this branch, which is exchanged
            num_rows //= 2
            rows = [row - self.index * num_rows for row in rows]
        if len(rows) == num_rows:
            return Prediction((out,))
        whole = out.new_full((num_rows, *out.shape[1:]), math.nan)
        whole[rows] = out
        return Prediction((whole,))

    def _own_rows(self, num_rows: int) -> list[int] | None:
        """Returns the rows of the denoiser's input that this rank computes; None means all."""
        if self.mine is None and self.divided != "batch":
            return None
        return self._kept(num_rows, self.separable.inputs)

    def _kept(self, size: int, inner: int) -> list[int]:
        """Returns the rows, of `size` rows, of this rank's samples and branch of guidance."""
        rows, half = range(size), size // 2
        if self.divided == "batch":
            rows = rows[half * self.index : half * (self.index + 1)]
        if self.mine is None:
            return list(rows)
        return [row for row in rows if (row // inner) % self.separable.num in self.mine]

    def _cut(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Returns arguments of the denoiser with the rows that this rank computes."""
        return self.separable.cut(arguments, len(arguments[latents_name(arguments)]), self._kept)

    def denoise(self, model: nn.Module) -> Denoise:
        """Returns all calls of the denoiser in one step: `(latents, timestep) ->` a prediction of their shape.

        For looking at the model, not for sampling: what the loop does with predictions is left out.
        """

        def denoise(latents: Tensor, timestep: Tensor) -> Tensor:
            total: Tensor | None = None
            for number, arguments in enumerate(self._arguments_at(timestep)):
                if self.divided == "calls" and number != self.index:
                    continue
                if self._own_rows(len(arguments[latents_name(arguments)])) is not None:
                    arguments = self._cut(arguments)
                out = model(**_with_latents(arguments, latents))[0]
                for axis in _inserted(out, latents):
                    out = out.squeeze(axis)
                out = out[tuple(map(slice, latents.shape))]
                total = out if total is None else total + out
            assert total is not None
            return total

        return denoise

    def _arguments_at(self, timestep: Tensor) -> list[dict[str, Any]]:
        """Returns arguments of the denoiser in the first or the last step; at NaN, NaN where these two differ."""
        first, last = self.steps
        if not timestep.isnan():
            is_last = len(self.timesteps) > 1 and bool(timestep == self.timesteps[-1])
            # In containers of their own, which models may change.
            return pytree.tree_map(lambda x: x, last if is_last else first)

        def unknown(early: Any, late: Any) -> Any:
            if not isinstance(early, Tensor) or early is late:
                return math.nan if isinstance(early, float) and early != late else early
            dtype = early.dtype if early.is_floating_point() else torch.get_default_dtype()
            return torch.full_like(early, math.nan, dtype=dtype)

        return [
            pytree.tree_map(unknown, early, late) for early, late in zip(first, last, strict=True)
        ]

    @property
    def branches(self) -> int:
        """Branches of guidance that two halves of the ranks can compute: 2, or else 1."""
        try:
            for phase in self.phases:
                replace(self, phases=[phase]).branch(0)
        except ConfigurationError:
            return 1
        return 2

    def branch(self, index: int) -> Call:
        """Returns the same request with one branch of guidance only, for one half of the ranks.

        Where guidance is in the batch, rows `index::` of every per-sample argument; where the denoiser is
        called once per branch, that call.

        Raises:
            ConfigurationError: There are no two branches that can be divided.
        """
        calls, samples, at = self.steps[0], self.separable, f"in step {self.phases[0].start}"
        reason: str | None = None
        if len(calls) == 2:
            rows = [len(each[latents_name(each)]) for each in calls]
            if rows[0] != rows[1]:
                reason = (
                    f"{at} its two calls have {rows[0]} and {rows[1]} rows, as with skipped layers"
                )
            elif samples.copies_first:
                reason = "it copies the first prediction before the second is known"
        elif self.by_place:
            reason = "rows are treated by their place (it has attention processors of its own)"
        elif len(calls) > 2 or self.expansion != 2:
            reason = (
                f"{at} this request has one that can be divided, as with guidance_scale=1, with latents that hold "
                "both, and with more than two branches"
            )
        elif self.rows is not None and (len(self.whole) > samples.num or samples.inputs > 1):
            reason = "there are several rows in a row of a sample; data=1 would do"
        elif (
            samples.reason and not samples.inner
        ):  # else it is known which arguments have rows of samples
            reason = f"rows of samples are not known: {samples.reason}"
        if reason:
            raise ConfigurationError(
                "guidance=2 divides the two branches of guidance, and for the denoiser of "
                f"{self.pipeline.name} that cannot be: {reason}; leave guidance at 1"
            )
        return replace(self, index=index, divided="calls" if len(calls) == 2 else "batch")

    def samples(self, start: int, stop: int) -> Call:
        """Returns the same request for samples `start` to `stop` only, for data parallel ranks.

        Noise sampled in the loop is that of these samples in the whole request.

        Raises:
            ConfigurationError: The scheduler steps all samples together.
        """
        mine = range(start, stop)
        here, steps = self.rows_of(start, stop), dict(self.step_arguments)
        scheduler = self.scheduler
        if isinstance(steps.get("generator"), (list, tuple)):  # one for each sample
            steps["generator"] = [steps["generator"][i] for i in mine]
        elif here and not takes_more(scheduler):  # else the pipeline steps it alone, on all rows
            # Of a cascade, whose denoisers each begin with the first timestep, those of the first.
            timesteps = self.timesteps[: len(scheduler.timesteps)]
            scheduler = for_samples(scheduler, here, self.whole, timesteps)
        return replace(self, rows=here, mine=mine, scheduler=scheduler, step_arguments=steps)

    @property
    def num_shares(self) -> int:
        """Samples that ranks can divide; 1 if one rank has to sample all of them."""
        return 1 if self.separable.reason else self.separable.num

    def of_own_rows(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Returns further arguments of a step; of one with as many rows as the latents, this rank's rows."""

        def has_rows(x: Any) -> bool:
            return isinstance(x, Tensor) and x.ndim > 0 and len(x) == len(self.whole)

        return {n: x[self.rows] if self.rows and has_rows(x) else x for n, x in options.items()}

    def rows_of(self, start: int, stop: int) -> list[int]:
        """Returns the rows of the latents that belong to samples `start` to `stop` of those that can be divided."""
        size = len(self.whole)
        if self.num_shares == 1:
            return list(range(size)) if start < stop else []
        return self.separable.rows(size, self.separable.latents, range(start, stop))

    @property
    def _copies(self) -> int:
        """Copies of every sample in the latents themselves."""
        return len(self.whole) // self.num_samples

    def finish(self, latents: Tensor) -> Any:
        """Returns the pipeline's images for the final latents, on rank 0."""
        try:
            return self.loop[0].finish(latents)
        finally:
            self.close()

    def close(self) -> None:
        """Ends all loops that have started."""
        self.patch_schedulers.clear()
        while self.loop:
            self.loop.pop().close()

    def packed(self) -> Call:
        """Returns the call as it is sent to other ranks, on the host."""
        return replace(
            self._on("cpu"),
            scheduler=on_host(self.scheduler),
            step_arguments=moved(self.step_arguments, "cpu"),
            random_states=random_states(self.whole.device),
        )

    def unpacked(self, device: torch.device) -> Call:
        """Returns the inverse of `packed`, on a rank's own device."""
        return replace(self._on(device), scheduler=with_timesteps_on(self.scheduler, device))

    def _on(self, device: torch.device | str) -> Call:
        phases = [replace(each, calls=moved(each.calls, device)) for each in self.phases]
        whole, timesteps = moved((self.whole, self.timesteps), device)
        return replace(self, phases=phases, whole=whole, timesteps=timesteps)

    def sampling_alike(self, rank: int) -> AbstractContextManager[None]:
        """Gives default generators the states of rank 0's; afterwards other ranks get their own states back."""
        return sampling_from(self.random_states, self.latents.device, restores=rank > 0)


def _with_latents(arguments: Mapping[str, Any], latents: Tensor) -> dict[str, Any]:
    """Returns arguments of a denoiser, and of its controls, for other latents."""
    name = latents_name(arguments)
    changed = dict(arguments) | {name: _given(arguments[name], latents)}
    if "controls" in changed:
        changed["controls"] = [(n, _with_latents(each, latents)) for n, each in changed["controls"]]
    return changed


def _given(seen: Tensor, latents: Tensor) -> Tensor:
    """Returns the denoiser's input, in the layout of `seen`, for `latents` of one row for each sample."""
    repeated = torch.cat([latents.to(seen.dtype)] * (len(seen) // len(latents)))
    for axis in _inserted(seen, repeated):
        repeated = repeated.unsqueeze(axis)
    if repeated.ndim != seen.ndim:
        raise ConfigurationError(
            f"the denoiser is given {tuple(seen.shape)} for latents {tuple(latents.shape)}, and it is not known "
            "which axes are those of the latents, by which ranks divide them; sample with method=single"
        )
    for axis in range(1, seen.ndim):
        missing = seen.shape[axis] - repeated.shape[axis]
        if missing > 0:
            return torch.cat([repeated, seen.narrow(axis, repeated.shape[axis], missing)], axis)
    return repeated


def _inserted(seen: Tensor, latents: Tensor) -> list[int]:
    """Returns axes of one entry that a pipeline gives its latents for a denoiser of videos, such as frames.

    There may be further channels, too.
    """
    if seen.ndim != latents.ndim + 1 or latents.ndim < 4 or seen.shape[1] < latents.shape[1]:
        return []
    ones = [axis for axis in range(2, seen.ndim) if seen.shape[axis] == 1]
    return [axis for axis in ones if seen.squeeze(axis).shape[2:] == latents.shape[2:]][:1]
