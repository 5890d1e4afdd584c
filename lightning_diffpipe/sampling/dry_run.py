"""Dry runs: the steps of a pipeline's loop and its rows, found without computing anything of the denoiser.

Rank 0, which has all parts, runs the pipeline's call with a denoiser that predicts zeros. That records what the
parts answer (`record.py`), counts the steps, shows what the denoiser is called with, and tells by NaN whether the
loop's own code brings rows together: a `Call`.

Ranks that divide samples, or the two branches of guidance, give the denoiser some of its rows. Sizes do not say
which: a text may have as many tokens as there are rows, frames may be in the batch, both branches of a sample may
follow each other. So further runs observe it:

    one sample more        what grows with the samples has rows of them, and nothing else has
    NaN in the last one    what becomes NaN is its rows; what still is NaN at the end the last step does not tell
"""

import contextlib
import copy
import inspect
import itertools
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.sampling.call import Call, Phase, Samples
from lightning_diffpipe.sampling.loop import (
    PipelineCall,
    Prediction,
    Step,
    attention_processors,
    callbacks_in,
    latents_name,
    predicted_zeros,
    same,
    settings_restored,
    with_own_generators,
)
from lightning_diffpipe.sampling.record import LoopEnds, Record, copied
from lightning_diffpipe.sampling.schedulers import random_states

_OF_PROMPTS = ("prompt", "prompts", "class_labels", "prompt_embeds")
_PER_PROMPT = ("num_images_per_prompt", "num_videos_per_prompt")
_log = logging.getLogger(__name__)


class InseparableError(Exception):
    """The rows of each sample cannot be determined; the message says why."""


def dry_run_of(call: PipelineCall) -> Call:
    """Runs the call on the rank that has all parts, computing only the code before the loop.

    Raises:
        ConfigurationError: It runs no loop of denoiser calls and scheduler steps, or not with this scheduler.
        Exception: The pipeline's own checks fail.
    """
    first = _ObservedRun(_for_trial(call), None)
    request, record, num_steps = first.request, first.record, len(first.timesteps)
    if not request.phases:
        raise ConfigurationError(
            f"{call.name} ran {num_steps} scheduler steps with no call of its "
            f"{call.denoisers[0]} before one; a loop that can be sampled has at least one of each"
        )
    in_loop = record.in_loop
    if in_loop:
        # Parts that the loop calls count as controls until a run shows that others than denoisers read them.
        record.controls = {n: {} for n in in_loop if isinstance(call.parts[n], nn.Module)}
        again = _ObservedRun(request.pipeline, num_steps)
        if record.controls.keys() < in_loop:
            again = _ObservedRun(request.pipeline, num_steps)
        request.phases = again.request.phases
    reads_latents = bool(in_loop - record.controls.keys())
    mixes = {"latents"} if reads_latents else set[str]()
    mixes |= {"noise"} if first.samples_noise else set()
    for what in ("latents", "predictions"):
        if what not in mixes and mixes_rows(request.pipeline, min(2, num_steps), what):
            mixes.add(what)
    rows, decoded = len(request.whole), record.num_decoded
    return replace(
        request,
        pipeline=replace(call, record=record),
        timesteps=torch.stack([torch.as_tensor(t).reshape(-1)[0] for t in first.timesteps]),
        num_samples=decoded if decoded and rows % decoded == 0 else rows,
        mixes=frozenset(mixes),
    )


def _for_trial(call: PipelineCall) -> PipelineCall:
    """Returns a call without callbacks, whose checks a user has for true latents, and with own generators."""
    callbacks = callbacks_in(call.arguments)
    others = {n: v for n, v in call.arguments.items() if n not in callbacks}
    return replace(call, arguments=with_own_generators(others))


class _ObservedRun:
    """A run with zeros as predictions: its steps, and how they call denoisers.

    Args:
        call: The pipeline's call.
        num_steps: Steps after which the run ends; None runs and records all of the call.

    Attributes:
        request: The `Call` that the run has observed.
        record: Answers of the parts, if they are recorded.
        timesteps: One for each step.
        samples_noise: Whether the loop's own code samples by default generators.
    """

    def __init__(self, call: PipelineCall, num_steps: int | None) -> None:
        nothing = torch.empty(0)
        self.record, self.timesteps = Record(), list[Any]()
        self.request = Call(replace(call, record=self.record), [], nothing, nothing, None, 0)
        self._parts, self._num_steps = call.parts, num_steps
        self._processors = attention_processors(call.parts)
        self._calls: dict[str, list[dict[str, Any]]] = {}  # since the last step, by denoiser
        self._is_looping = self._predicts_more = self.samples_noise = False
        self._random_states: list[Tensor] = []  # where the loop's own code begins
        recorded = self.record if num_steps is None else None
        _run(call, self._on_denoise, self._on_step, recorded, lambda: self._is_looping)

    def _on_denoise(self, name: str, arguments: dict[str, Any]) -> Any:
        self._is_looping = True
        self._look_for_noise()
        self.record.in_loop |= self.record.asked_last
        self._calls.setdefault(name, []).append(copied(arguments))  # pipelines may write into them
        out = predicted_zeros(self._parts[name], arguments, math.nan)
        self._predicts_more = bool(out[0].isnan().any())  # channels beyond those of the latents
        return out

    def _on_step(self, step: Step) -> Any:
        if not self.timesteps:  # the loop starts
            _refuse_predicted_variance(step)
            request = self.request
            request.whole, request.scheduler = step.sample, copy.deepcopy(step.scheduler)
            request.scheduler.__class__ = type(step.scheduler).__mro__[1]
            request.by_place = attention_processors(self._parts) != self._processors
            request.step_arguments = copied(with_own_generators(step.options))
            if self._predicts_more and not step.prediction.isnan().any():
                request.channels = step.sample.shape[1]
        self._add_calls(step)
        self.timesteps.append(step.timestep)
        self._calls.clear()
        if len(self.timesteps) == self._num_steps:
            raise LoopEnds
        self._look_for_noise()
        output = step.take(step.prediction.nan_to_num())
        self._random_states = random_states(self.request.pipeline.device)
        return output

    def _look_for_noise(self) -> None:
        now = random_states(self.request.pipeline.device)
        self.samples_noise |= not all(map(torch.equal, self._random_states, now))
        self._random_states = now

    def _add_calls(self, step: Step) -> None:
        phases, denoisers = self.request.phases, tuple(sorted(self._calls))
        calls = list(itertools.chain(*self._calls.values()))
        if calls and not (phases and phases[-1].goes_on(denoisers, calls)):
            start = len(self.timesteps) if phases else 0
            steps_before = [0] * (len(self.timesteps) - start)
            phases.append(Phase(denoisers, step.sample.shape, start, num_calls=steps_before))
        if not phases:
            return
        phase = phases[-1]
        phase.num_calls.append(len(calls))
        if calls:
            last = _as_first(phase.calls[0], phase.calls[-1], calls) if phase.calls else calls
            phase.calls = [*phase.calls[:1], last]


def _as_first(first: Any, before: Any, now: Any) -> Any:
    """Returns the arguments of a step, given the return value for the step before.

    What was the same in all steps so far is the object of the first step.
    """
    flat, spec = pytree.tree_flatten(now)
    (ones, one_spec), (others, other_spec) = map(pytree.tree_flatten, (first, before))
    if not one_spec == other_spec == spec:
        return now
    leaves = [a if a is b and same(a, c) else c for a, b, c in zip(ones, others, flat, strict=True)]
    return pytree.tree_unflatten(leaves, spec)


def _refuse_predicted_variance(step: Step) -> None:
    """Raises ConfigurationError if the scheduler takes a variance that the pipeline cuts off a prediction."""
    plain = type(step.scheduler).__mro__[1]
    if "variance_type" not in inspect.signature(plain.__init__).parameters:
        return  # a config keeps settings of the scheduler it was made from
    kind = step.scheduler.config.variance_type
    has_variance = step.prediction.shape[1] == 2 * step.sample.shape[1]
    if kind in ("learned", "learned_range") and not has_variance:
        raise ConfigurationError(
            f"{plain.__name__} with variance_type={kind} takes a variance that the model predicts, but this "
            "pipeline passes it none; write variance_type=fixed_small into scheduler/scheduler_config.json, or "
            "take another scheduler"
        )


def mixes_rows(call: PipelineCall, num_steps: int, what: str) -> bool:
    """Returns whether the loop's own code combines rows of latents or predictions.

    The first half of the rows of `what` ("latents" or "predictions") is changed: to NaN, and to other numbers,
    since with NaN no comparison is true. What denoiser and scheduler are given of the second half has to stay.
    """
    plain, *changed = (_second_halves(call, num_steps, what, x) for x in (1.0, math.nan, 9.0))
    return any(len(x) != len(plain) or not all(map(torch.equal, plain, x)) for x in changed)


def _second_halves(call: PipelineCall, num_steps: int, what: str, factor: float) -> list[Tensor]:
    """Returns what a loop is given of the second half of the rows, if the first is multiplied; none if it fails."""
    halves, num_left, seeds = list[Tensor](), num_steps, itertools.count()
    latents_after = torch.empty(0)  # latents after the last step

    def half(x: Tensor, is_second: bool) -> Tensor:
        axis = 1 if x.ndim == 3 else -2
        size = x.shape[axis] // 2
        return x.narrow(axis, size, x.shape[axis] - size) if is_second else x.narrow(axis, 0, size)

    def with_other_half(x: Tensor) -> Tensor:
        x = x.clone()
        half(x, is_second=False).mul_(factor)
        return x

    def on_denoise(name: str, arguments: dict[str, Any]) -> Any:
        latents = arguments[latents_name(arguments)]
        if what == "latents" and (
            latents.ndim == latents_after.ndim or latents.ndim > latents_after.ndim >= 4
        ):
            halves.append(half(latents, is_second=True).clone())
        zeros = predicted_zeros(call.parts[name], arguments)
        noise = [_random(x, next(seeds)) for x in zeros]
        return Prediction(map(with_other_half, noise) if what == "predictions" else noise)

    def on_step(step: Step) -> Any:
        nonlocal num_left, latents_after
        halves.append(half(step.prediction, is_second=True).clone())
        num_left -= 1
        if not num_left:
            raise LoopEnds
        latents_after = step.sample.nan_to_num()
        return step.answer(with_other_half(latents_after) if what == "latents" else latents_after)

    return halves if _runs_marked(call, on_denoise, on_step) else []


def _runs_marked(call: PipelineCall, *given: Any, **options: Any) -> bool:
    """Runs a call with NaN among its numbers; returns whether its own code computes with them, as SVD does not."""
    try:
        _run(call, *given, **options)
    except (torch.OutOfMemoryError, InseparableError):
        raise
    except Exception:
        return False
    return True


def _run(
    call: PipelineCall, *given: Any, after: Callable[[Any], None] = lambda result: None
) -> None:
    """Runs a call up to the end of its loop, with generators as they were after it; see `PipelineCall.run`."""
    devices = [call.device] if call.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad(), contextlib.suppress(LoopEnds):
        after(call.run(*given))


def _random(like: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, generator=generator).to(like)


# ------------------------------------------------------------------------------------ samples


def observe_samples(call: Call) -> Call:
    """Returns the call with the observed rows of its samples, on the rank that has all parts.

    Ranks that divide samples or branches of guidance have to know. Text encoders run once more, on one more sample.
    """
    num = math.prod(count_samples(call.pipeline.arguments))
    samples = Samples(num)
    first_call = call.steps[0][0]
    try:
        with settings_restored(call.pipeline.parts):
            copies_first = len(call.steps[0]) == 2 and _copies_first_prediction(call)
            samples = replace(samples, copies_first=copies_first)
            rows, name = _rows_per_sample(call, num)
            samples = replace(samples, inner=inner_of(rows, name, 1, first_call))
            if num > 1:
                latents, inputs = _orders(call, num)
                inner = inner_of(rows, name, inputs, first_call)
                samples = replace(samples, inner=inner, latents=latents, inputs=inputs)
    except InseparableError as error:
        samples = replace(samples, reason=str(error))
        _log.warning(
            "samples of %s cannot be divided, so that one rank computes all: %s",
            call.pipeline.name,
            error,
        )
    return replace(call, samples_in=samples)


def _copies_first_prediction(call: Call) -> bool:
    """Returns whether the loop copies the first of two predictions before it asks for the second.

    The first is NaN, and is overwritten in place once the second is asked for: a copy is NaN still. Not by zeros,
    by whose norm some divide.
    """
    answers, is_copied = list[Tensor](), False

    def on_denoise(name: str, arguments: dict[str, Any]) -> Any:
        out = predicted_zeros(call.pipeline.parts[name], arguments)
        answers.append(out[0])
        for i, answer in enumerate(answers):
            answer.copy_(_random(answer, i)) if len(answers) > 1 else answer.fill_(math.nan)
        return out

    def on_step(step: Step) -> Any:
        nonlocal is_copied
        is_copied = bool(step.prediction.isnan().any())
        raise LoopEnds

    return not _runs_marked(_for_trial(call.pipeline), on_denoise, on_step) or is_copied


def _rows_per_sample(call: Call, num: int) -> tuple[dict[str, int], str]:
    """Returns rows of the denoiser's arguments for each sample, and the name of the one with the latents."""
    trial = _for_trial(call.pipeline)
    parameters = inspect.signature(getattr(type(trial.pipeline), trial.method)).parameters
    reason: Exception | None = None
    for num_more, arguments in with_more_samples(trial.arguments, parameters):
        record = replace(trial.record, answers={})  # text encoders have to be asked
        more = replace(trial, arguments=arguments, record=record)
        try:
            request = _ObservedRun(more, len(call.timesteps)).request
            rows = dict[str, int]()
            for phase, larger in zip(call.phases, request.phases, strict=True):
                calls = itertools.chain(*phase.calls), itertools.chain(*larger.calls)
                for pair in zip(*calls, strict=True):
                    of_call = rows_by_place(*pair, num, num_more)
                    rows |= {n: max(each, rows.get(n, 0)) for n, each in of_call.items()}
            name = latents_name(call.steps[0][0])
            if rows[name] and len(request.whole) * num == len(call.whole) * num_more:
                return rows, name
            reason = reason or InseparableError("latents have as many rows for more samples")
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            reason = reason or error
    raise InseparableError(str(reason)) from reason


def _orders(call: Call, num: int) -> tuple[int, int]:
    """Returns the orders of rows of the latents and of the denoiser's input (`Samples.rows`)."""
    reason = InseparableError("its latents have rows of other things than samples")
    for inner in range(1, len(call.whole) // num + 1):
        try:
            if len(call.whole) % (num * inner) == 0:
                return inner, _MarkedSampleRun(call, num, inner).inputs
        except InseparableError as error:
            reason = error
    raise reason


class _MarkedSampleRun:
    """A run in which the last sample is NaN after each step, and must reach nothing but its own rows.

    Args:
        call: The request.
        num: Its samples.
        inner: Order of the rows of the latents that is tried.

    Attributes:
        inputs: Order of the rows of the denoiser's input.

    Raises:
        InseparableError: Other rows are reached, so that this order is wrong, or samples are mixed.
    """

    def __init__(self, call: Call, num: int, inner: int) -> None:
        self._num, self._inner, self.inputs = num, inner, 1
        self._num_steps = self._num_left = len(call.timesteps)
        parts = self._parts = dict(call.pipeline.parts)
        for name, part in parts.items():
            if isinstance(part, nn.Module) and hasattr(part, "decode"):
                parts[name] = copy.copy(part)
                vars(parts[name])["decode"] = self._decode
        run = replace(_for_trial(call.pipeline), parts=parts)
        if not _runs_marked(run, self._on_denoise, self._on_step, after=self._refuse_marked):
            raise InseparableError("its loop fails where a sample is NaN")

    def _on_denoise(self, name: str, arguments: dict[str, Any]) -> Any:
        latents = arguments[latents_name(arguments)]
        zeros = predicted_zeros(self._parts[name], arguments)[0]
        out = _random(zeros, self._num_left)
        if self._num_left < self._num_steps:
            marked, size = sorted(rows_with_nan(latents)), len(latents)
            last, of_samples = {self._num - 1}, Samples(self._num)
            orders = range(1, size // self._num + 1)
            fitting = (each for each in orders if of_samples.rows(size, each, last) == marked)
            inputs = next(fitting, None)
            if inputs is None:
                raise InseparableError("the pipeline's own code brings samples together")
            self.inputs = inputs
            out[marked] = math.nan
        elif self._num_left == 1 and len(latents) > self._num:
            raise InseparableError("one step does not show the order of rows of its guidance")
        return Prediction((out,))

    def _on_step(self, step: Step) -> Any:
        marked = Samples(self._num).rows(len(step.sample), self._inner, {self._num - 1})
        if not rows_with_nan(step.prediction) | rows_with_nan(step.sample) <= set(marked):
            raise InseparableError("its loop brings samples together")
        self._num_left -= 1
        after = _random(step.sample, self._num_left)
        if self._num_left > 0:
            after[marked] = math.nan
        return step.answer(after)

    def _decode(self, *args: Any, **options: Any) -> Any:
        self._refuse_marked(args, options)
        raise LoopEnds

    def _refuse_marked(self, *values: Any) -> None:
        leaves = [x for x in pytree.tree_leaves(values) if isinstance(x, Tensor)]
        if any(bool(x.isnan().any()) for x in leaves):
            raise InseparableError("what it samples is not known from its last step alone")


def count_samples(arguments: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the number of prompts that a pipeline is given, and of samples for each."""
    values = [arguments[name] for name in _OF_PROMPTS if arguments.get(name) is not None]
    prompts = len(values[0]) if values and isinstance(values[0], list | tuple | Tensor) else 1
    each = [arguments[name] for name in _PER_PROMPT if arguments.get(name)]
    return arguments.get("batch_size") or prompts, each[0] if each else 1


def with_more_samples(
    arguments: Mapping[str, Any], known: Collection[str]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields arguments for more samples, with their number, for a pipeline that takes arguments of `known` names.

    The first that can be sampled will do.
    """
    prompts, each = count_samples(arguments)

    def of(num: int, changed: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """Returns the arguments with some changed, and with one generator and start noise for `num` samples."""
        others = dict(arguments) | dict(changed)
        if isinstance(others.get("generator"), list):
            others["generator"] = others["generator"][0]
        if isinstance(start := others.get("latents"), Tensor):
            others["latents"] = torch.cat([start, start])[: len(start) // (prompts * each) * num]
        return num, others

    def longer(kinds: type | tuple[type, ...]) -> dict[str, Any]:
        """Returns the lists with an entry of these types for each prompt, with one entry more."""
        lists = {
            n: [*v, v[0]]
            for n, v in arguments.items()
            if isinstance(v, list) and len(v) == prompts and isinstance(v[0], kinds)
        }
        if "batch_size" in arguments:
            lists["batch_size"] = prompts + 1
        return lists

    tensors = {
        name: torch.cat([v, v[:1]])
        for name, v in arguments.items()
        if isinstance(v, Tensor) and v.ndim and len(v) == prompts and name != "latents"
    }
    every = longer(object) | tensors
    numbers = {n for n, v in every.items() if isinstance(v, list) and isinstance(v[0], int | float)}
    # Two layers to skip are not those of two prompts, unless the pipeline wants three for three.
    if numbers := numbers.difference(_OF_PROMPTS):
        yield of((prompts + 1) * each, {n: v for n, v in every.items() if n not in numbers})
    yield of((prompts + 1) * each, every)
    yield of((prompts + 1) * each, longer((str, int)))
    # An image, which is no list, for each prompt.
    plain = (str, int, float, list, tuple, dict, Tensor, torch.Generator, type(None))
    images = {n: [v] * (prompts + 1) for n, v in arguments.items() if not isinstance(v, plain)}
    yield of((prompts + 1) * each, every | images)
    for name in set(_PER_PROMPT) & set(known):  # where only one prompt is taken
        yield of(prompts * (each + 1), {name: each + 1})


def rows_by_place(one: Any, more: Any, num: int, num_more: int, place: str = "") -> dict[str, int]:
    """Compares arguments for some samples and for more; returns rows for each sample, by place; 0 if shared.

    Raises InseparableError if something has samples otherwise than in rows.
    """
    if isinstance(one, Tensor) and isinstance(more, Tensor):
        sizes, sizes_more = list(one.shape), list(more.shape)
    elif isinstance(one, list | tuple) and isinstance(more, list | tuple):
        sizes, sizes_more = [len(one)], [len(more)]
        if sizes == sizes_more:
            inside = [(each, more[i], f"{place}.{i}") for i, each in enumerate(one)]
            return _together(place, inside, num, num_more)
    elif isinstance(one, dict) and isinstance(more, dict) and one.keys() == more.keys():
        inside = [(v, more[n], f"{place}.{n}" if place else n) for n, v in one.items()]
        return _together(place, inside, num, num_more)
    elif type(one) is not type(more) or (isinstance(one, int | str) and one != more):
        raise InseparableError(f"{place} is another for {num_more} samples than for {num}")
    else:
        return {}
    if sizes == sizes_more:
        return {place: 0}
    if sizes[0] * num_more != sizes_more[0] * num or sizes[1:] != sizes_more[1:]:
        raise InseparableError(
            f"{place} has sizes {tuple(sizes)} for {num} samples and {tuple(sizes_more)} for {num_more}"
        )
    return {place: sizes[0] // num}


def _together(place: str, inside: list[Any], num: int, num_more: int) -> dict[str, int]:
    rows = {place: 0} if place else {}
    for few, more, inner_place in inside:
        rows |= rows_by_place(few, more, num, num_more, inner_place)
    return rows


def inner_of(places: Mapping[str, int], name: str, inputs: int, arguments: Any) -> dict[str, int]:
    """Returns `inner` of all arguments of a call of the denoiser, given that of its latents.

    Args:
        places: Rows for each sample, from `rows_by_place`.
        name: Name of the argument with the latents.
        inputs: `inner` of these.
        arguments: Arguments of that call.

    Raises:
        InseparableError: An argument has other rows than the latents, in an order that is not known.
    """
    inner = {}
    for place, each in places.items():
        times, rest = divmod(each, places[name])
        if each <= 1 or (each == places[name]):
            inner[place] = min(each, 1) * (inputs if each == places[name] else 1)
            continue
        value = arguments
        for key in place.split("."):
            value = value[key if isinstance(value, dict) else int(key)]
        rows = value.unflatten(0, (-1, times)) if isinstance(value, Tensor) and not rest else None
        if rows is None or not torch.equal(rows, rows[:, :1].expand_as(rows)):
            raise InseparableError(
                f"{place} has {each} rows for each sample, and {name} {places[name]}, in an order that is not known"
            )
        inner[place] = inputs * times
    return inner


def rows_with_nan(x: Tensor) -> set[int]:
    """Returns the rows that have NaN entries."""
    return set(x.isnan().flatten(1).any(1).nonzero().flatten().tolist())
