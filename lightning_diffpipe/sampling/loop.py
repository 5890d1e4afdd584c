"""A pipeline's own loop, run step by step: its `__call__`, paused where it calls the denoiser and its scheduler.

    pipeline(prompt, ...)     its own code: checks, prompts to embeddings, start noise, timesteps
      loop, each step:
        denoiser(...)         pauses; a sampler computes the answer, alone or with other ranks
        scheduler.step(...)   pauses; a sampler steps, or gives the latents of the step of another rank
      its own code            unpacks and decodes the final latents, on rank 0

So nothing of any pipeline is copied, and nothing about it is declared: guidance of any kind, callbacks and images
as input are its own code. The call is run several times. The first run, of rank 0, has a denoiser that predicts
zeros: it records what text encoders and the like answer (`record.py`), counts the steps and shows what the denoiser
is called with (`dry_run.py`). Further runs, on any rank, are answered from that record. They always see latents of
full shape; what this rank does not compute is NaN there.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import math
import re
import types
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from diffusers import ConfigMixin
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_diffpipe.coroutine import Coroutine
from lightning_diffpipe.errors import ConfigurationError, SamplingError
from lightning_diffpipe.graph.fakes import shapes_without_values
from lightning_diffpipe.sampling.record import (
    Controlled,
    Controls,
    Record,
    Recorder,
    Replayed,
    copied,
    moved,
    next_answer,
)
from lightning_diffpipe.sampling.request import Complete, Loop, LoopInterruptedError, Rows
from lightning_diffpipe.sampling.schedulers import HostTimesteps, takes_generator

_DENOISER = re.compile(r"(transformer|unet|prior|upscaler)(_\d+)?")
_LATENTS = ("sample", "hidden_states", "x", "latents")
_SHAPES: WeakKeyDictionary[nn.Module, dict[torch.Size, torch.Size]] = WeakKeyDictionary()
Compute = Callable[[dict[str, Any]], Any]
ExchangeBranches = Callable[[Tensor], tuple[Tensor, Tensor]]


def denoisers_among(names: Any) -> list[str]:
    """Returns the names of parts that denoise; the first is the one that ranks share."""
    return sorted(name for name in names if _DENOISER.fullmatch(name))


# ------------------------------------------------------------------------------------ running the call


@dataclass
class PipelineCall:
    """The call of a pipeline with its arguments, which can be run many times.

    Attributes:
        pipeline: It, or a shallow copy without its parts.
        parts: The parts that are here, by name.
        names: Names of all parts; the record answers for those that are not on this rank.
        absent: Parts that the pipeline does without.
        record: Recorded answers of the parts.
    """

    pipeline: Any
    method: str
    arguments: Mapping[str, Any]
    parts: dict[str, Any]
    names: tuple[str, ...]
    device: torch.device
    absent: frozenset[str] = frozenset()
    record: Record | None = None

    @property
    def name(self) -> str:
        """Class of the pipeline, for messages."""
        return type(self.pipeline).__name__

    @property
    def denoisers(self) -> list[str]:
        """Names of the parts that denoise."""
        return denoisers_among(n for n in self.names if n not in self.absent)

    @property
    def needed(self) -> list[str]:
        """Parts that every rank needs, since the loop calls them; without the first denoiser."""
        return [*self.denoisers[1:], *sorted(self.record.in_loop)]

    @property
    def controls(self) -> dict[str, nn.Module]:
        """Parts whose answers only a denoiser reads, such as ControlNets."""
        return {name: self.parts[name] for name in self.record.controls}

    def run(
        self,
        on_denoise: Callable[[str, dict[str, Any]], Any],
        on_step: Callable[[Step], Any],
        record: Record | None = None,
        is_looping: Callable[[], bool] = lambda: True,
    ) -> Any:
        """Runs the call, and returns the pipeline's result.

        Args:
            on_denoise: (denoiser, arguments by name) -> its return value.
            on_step: (step of the scheduler) -> its return value.
            record: Record into this, instead of answering from the one that is there.
            is_looping: Whether the loop has started, for the record.
        """
        pipeline = copy.copy(self.pipeline)  # what the call sets on it no other run sees
        attributes = vars(pipeline)
        if isinstance(pipeline, nn.Module):
            attributes["_modules"] = {}
        else:
            containers = {n: x for n, x in attributes.items() if type(x) in (list, dict, set)}
            attributes.update(copied(containers))
        num_calls: Counter[str] = Counter()  # of each part and method, in this run
        replayed = self.record or Record()
        controls = Controls(replayed.controls, self.parts, self.device)

        def stand_in(name: str, part: Any) -> Any:
            """Returns what the pipeline has in place of a part."""
            if name in self.absent:
                return None
            if name == "scheduler":
                return _stepping_by(part, controls.forgotten_after(on_step))
            if name in self.denoisers:
                return answered_by(part, _of_samples(controls.read_by(on_denoise, name)))
            if isinstance(part, ConfigMixin) and not isinstance(part, nn.Module):
                part = copy.deepcopy(part)  # guiders count steps, and have momentum
            if record is not None:
                return Recorder(part, name, record, is_looping)
            if name in replayed.controls:
                return answered_by(part, functools.partial(controls.ask, name))
            if name in replayed.in_loop:
                return part
            return Replayed(name, replayed, part, self.device, num_calls)

        attributes |= {name: stand_in(name, self.parts.get(name)) for name in self.names}
        if callable(method := getattr(pipeline, "encode_prompt", None)):
            # As a whole, since it answers much less than the parts that it asks.
            recording = _recorded(method, record), _replayed(method, replayed, num_calls)
            attributes["encode_prompt"] = recording[record is None]
        attributes["_progress_bar_config"] = {"disable": True}
        call = getattr(pipeline, self.method) if self.method != "__call__" else pipeline
        # Every run samples the same, and what it changes in place no other run sees.
        arguments = copied(with_own_generators(self.arguments))
        leaves = pytree.tree_leaves(arguments)
        result = call(**arguments)
        if record is None:  # generators of the request go on as if it had run once
            for argument, used in zip(pytree.tree_leaves(self.arguments), leaves, strict=True):
                if isinstance(argument, torch.Generator):
                    argument.set_state(used.get_state())
        return result

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state that other ranks get: the scheduler as the only part, and no functions as arguments."""
        pipeline = copy.copy(self.pipeline)
        attributes = vars(pipeline)
        for name in (*self.names, "_modules", "_trainer", "_fabric"):
            attributes.pop(name, None)
        if isinstance(pipeline, nn.Module):
            attributes["_modules"] = {}
        return {
            "pipeline": pipeline,
            "method": self.method,
            "arguments": moved({n: v for n, v in self.arguments.items() if not callable(v)}, "cpu"),
            "parts": {"scheduler": self.parts["scheduler"]},
            "names": self.names,
            "absent": self.absent,
            "device": torch.device("cpu"),
            "record": self.record.on("cpu"),
        }

    def here(
        self, parts: Mapping[str, Any], device: torch.device, functions: Mapping[str, Any]
    ) -> PipelineCall:
        """Returns the call on another rank, with its parts, and with functions, which are not sent."""
        arguments = moved(with_own_generators(self.arguments, device), device)
        pipeline = copy.copy(self.pipeline)
        if isinstance(pipeline, nn.Module):
            vars(pipeline)["_device"] = device
        return replace(
            self,
            pipeline=pipeline,
            arguments=arguments | functions,
            parts={**self.parts, **parts},
            device=device,
            record=self.record.on(device),
        )


def _recorded(method: Callable[..., Any], record: Record | None) -> Callable[..., Any]:
    """Returns a method whose answers are recorded, instead of those of the parts that it asks."""

    @functools.wraps(method)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        before = {name: [*answers] for name, answers in record.answers.items()}
        record.is_encoding = True
        answer = method(*args, **kwargs)
        record.answers, record.is_encoding = before, False
        record.answers.setdefault(method.__name__, []).append(answer)
        return copied(answer)

    return recorded


def _replayed(
    method: Callable[..., Any], record: Record, num_calls: Counter[str]
) -> Callable[..., Any]:
    """Returns a method that gives its recorded answers in their order, and runs after the last of them."""

    @functools.wraps(method)
    def replayed(*args: Any, **kwargs: Any) -> Any:
        ask = functools.partial(method, *args, **kwargs)
        return next_answer(record, method.__name__, num_calls, ask)

    return replayed


class _EqualToBase(type):
    """A class that compares equal to its base: pipelines compare the classes of schedulers."""

    def __eq__(cls, other: object) -> bool:
        return any(other is each for each in cls.__mro__[:2])

    def __hash__(cls) -> int:
        return hash(cls.__mro__[1])


def _stepping_by(scheduler: Any, on_step: Callable[..., Any]) -> Any:
    """Returns a copy of a scheduler whose steps, and those of its own copies, `on_step` computes."""
    plain = type(scheduler)
    if not hasattr(plain, "step"):
        raise ConfigurationError(
            f"{plain.__name__} has no method `step`, by which a loop is followed; take another scheduler"
        )
    signature = inspect.signature(plain.step)

    @functools.wraps(plain.step)  # pipelines look which arguments it takes
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        return on_step(Step(plain.step, signature.bind(self, *args, **kwargs).arguments))

    stepping = copy.deepcopy(scheduler)
    meta = type(_EqualToBase.__name__, (_EqualToBase, type(plain)), {})  # that of an ABC is another
    stepping.__class__ = meta(plain.__name__, (plain,), {"step": step})
    return stepping


def answered_by(part: nn.Module, answer: Callable[[dict[str, Any]], Any]) -> nn.Module:
    """Returns a shallow copy of a denoiser, or of another part, whose calls `answer` computes."""
    answered = copy.copy(part)
    vars(answered).update(vars(part))
    for name, value in vars(part).items():
        if isinstance(value, OrderedDict) and "hooks" in name:
            vars(answered)[name] = OrderedDict()  # the part itself runs them
    vars(answered)["_compiled_call_impl"] = None
    signature = inspect.signature(type(part).forward)

    @functools.wraps(type(part).forward)  # pipelines look which arguments it takes
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        arguments = dict(signature.bind(self, *args, **kwargs).arguments)
        arguments.pop(next(iter(signature.parameters)))
        return answer(arguments | arguments.pop("kwargs", {}))

    vars(answered)["forward"] = types.MethodType(forward, answered)
    return answered


def _of_samples(answer: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
    """Adapts an `answer` for one tensor of samples to a denoiser that takes its samples as a list.

    Its argument `listed` says which of the others was a list; `Controlled` makes it one again.
    """

    def denoise(arguments: dict[str, Any]) -> Any:
        lists = {
            n: value
            for n, value in arguments.items()
            if isinstance(value, list) and all(isinstance(x, Tensor) and x.ndim > 2 for x in value)
        }
        name = next((n for n, value in lists.items() if len({x.shape for x in value}) == 1), None)
        if name is None or any(_is_batch(n, value) for n, value in arguments.items()):
            return answer(arguments)
        stacked = torch.stack(arguments[name])
        predictions = answer(arguments | {name: stacked, "listed": name})[0]
        return Prediction((list(predictions.unbind()),))

    return denoise


def callbacks_in(arguments: Mapping[str, Any]) -> set[str]:
    """Returns the names of the arguments of a pipeline's call that are callbacks."""
    return {n for n, value in arguments.items() if n.startswith("callback") and callable(value)}


def _is_batch(name: str, value: Any) -> bool:
    return isinstance(value, Tensor) and (name in _LATENTS or value.ndim >= 3)


@contextlib.contextmanager
def settings_restored(parts: Mapping[str, Any]) -> Iterator[None]:
    """Restores types and attention processors of parts at the end.

    A pipeline that changes them (SDXL decodes in float32, perturbed-attention guidance has processors of its own)
    takes that back at the end of its call, which neither a first run nor a request that fails reaches.
    """
    modules = [part for part in parts.values() if isinstance(part, nn.Module)]
    tensors = [x for each in modules for x in itertools.chain(each.parameters(), each.buffers())]
    dtypes = [(x, x.dtype) for x in tensors]
    processors = attention_processors(parts)
    try:
        yield
    finally:
        for tensor, dtype in dtypes:
            if tensor.dtype != dtype:
                tensor.data = tensor.data.to(dtype)
        for layer, processor in processors:
            if layer.processor is not processor:
                layer.set_processor(processor)


def attention_processors(parts: Mapping[str, Any]) -> list[tuple[nn.Module, Any]]:
    """Returns the attention layers of parts, with the processor that each has."""
    modules = [part for part in parts.values() if isinstance(part, nn.Module)]
    layers = [x for each in modules for x in each.modules() if hasattr(x, "set_processor")]
    return [(layer, layer.processor) for layer in layers]


def with_own_generators(
    arguments: Mapping[str, Any], device: torch.device | None = None
) -> dict[str, Any]:
    """Returns arguments with generators of their own, in the same states; of `device` if of its type."""
    own: dict[int, torch.Generator] = {}  # samples may share one

    def copy_of(generator: torch.Generator) -> torch.Generator:
        if id(generator) not in own:
            place = generator.device
            place = device if device and device.type == place.type else place
            own[id(generator)] = torch.Generator(place).set_state(generator.get_state())
        return own[id(generator)]

    return pytree.tree_map_only(torch.Generator, copy_of, dict(arguments))


def latents_name(arguments: Mapping[str, Any]) -> str:
    """Returns the argument that takes the latents; raises ConfigurationError if none takes all in one tensor."""
    for name in _LATENTS:
        if isinstance(arguments.get(name), Tensor):
            return name
    for name, value in arguments.items():
        if _is_batch(name, value):
            return name
    raise ConfigurationError(
        "the denoiser takes each sample as a tensor of its own, of other shapes, and no rank can share such a "
        "list; sample it with diffusers alone"
    )


def shapes_given(calls: Iterable[Mapping[str, Any]]) -> list[str]:
    """Returns the tensors that a denoiser is given by name in some calls, with their shapes."""
    named = [item for arguments in calls for item in arguments.items()]
    return [f"{name}={tuple(x.shape)}" for name, x in named if isinstance(x, Tensor)]


def same(one: Any, other: Any) -> bool:
    """Returns whether two leaves of arguments are equal, as far as they are tensors or plain values."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    return not isinstance(one, float | int | str) or one == other


class StepOutput(NamedTuple):
    """The result of a scheduler's step: a tuple, or an object with these names."""

    prev_sample: Tensor
    pred_original_sample: Tensor


class Prediction(tuple):
    """The result of a denoiser: a tuple, or an object with `sample`, or another name of its only tensor."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Tensor:
        if name.startswith("__"):
            raise AttributeError(name)
        return self[0]


def predicted_zeros(
    denoiser: nn.Module, arguments: Mapping[str, Any], beyond: float = 0.0
) -> Prediction:
    """Returns a prediction of zeros, with other values in channels beyond those of the latents."""
    latents = arguments[latents_name(arguments)]
    out = latents.new_zeros(_shape_of_prediction(denoiser, arguments, latents))
    if latents.ndim > 3 and out.shape[1] == 2 * latents.shape[1]:
        out[:, latents.shape[1] :] = beyond
    return Prediction((out,))


def _shape_of_prediction(
    denoiser: nn.Module, arguments: Mapping[str, Any], latents: Tensor
) -> torch.Size:
    """Returns the shape by the denoiser's config, or by a fake call if several axes may be that of channels."""
    in_channels = getattr(denoiser.config, "in_channels", None)
    channels = getattr(denoiser.config, "out_channels", None)
    if channels is None and getattr(denoiser.config, "learn_sigma", False):
        channels = 2 * in_channels
    if channels in (None, in_channels):
        return latents.shape
    axes = [axis for axis in range(1, latents.ndim) if latents.shape[axis] == in_channels]
    if latents.ndim > 3 and len(axes) == 1:
        before, after = latents.shape[: axes[0]], latents.shape[axes[0] + 1 :]
        return torch.Size((*before, channels, *after))
    shapes = _SHAPES.setdefault(denoiser, {})
    if latents.shape not in shapes:
        try:
            shapes[latents.shape] = shapes_without_values(Controlled(denoiser, {}), arguments)[0]
        except Exception:  # its control flow asks for values, or it is no denoiser
            return latents.shape
    return shapes[latents.shape]


# ------------------------------------------------------------------------------------ step by step


@dataclass(eq=False)
class _Denoise:
    """The loop is paused in a call of a denoiser."""

    name: str
    arguments: dict[str, Any]
    answer: Any = None


class Step:
    """The loop is paused in a step of its scheduler.

    Args:
        plain: The scheduler's own `step`.
        arguments: Arguments of that call by name, the scheduler first.

    Attributes:
        prediction: Prediction of the denoiser, after guidance.
        timestep: Timestep of this step.
        sample: The latents before it.
    """

    def __init__(self, plain: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        self._plain, self._arguments = plain, dict(arguments)
        self.scheduler = next(iter(arguments.values()))
        # Some schedulers have other names, and some another order.
        self._names = ["model_output", "timestep", "sample"]
        if not arguments.keys() >= set(self._names):
            self._names = list(arguments)[1:4]
        self.prediction, self.timestep, self.sample = (arguments[name] for name in self._names)

    @property
    def options(self) -> dict[str, Any]:
        """Its further arguments, such as `eta`."""
        options = dict(list(self._arguments.items())[1:])
        return {n: x for n, x in options.items() if n not in (*self._names, "return_dict")}

    def with_timestep_of(self, timesteps: HostTimesteps) -> Step:
        """Returns the same step with its timestep on the host, so that tables are indexed without a wait."""
        schedule = getattr(self.scheduler, "timesteps", None)
        on_host = {self._names[1]: timesteps.of(self.timestep, schedule)}
        return Step(self._plain, self._arguments | on_host)

    def take(self, prediction: Tensor, sample: Tensor | None = None, **options: Any) -> Any:
        """Takes the step, with another prediction or sample; returns what the scheduler itself returns."""
        changed = {self._names[0]: prediction} | options
        if sample is not None:
            changed[self._names[2]] = sample
        return self._plain(**self._arguments | changed)

    def answer(self, latents: Tensor) -> Any:
        """Returns the output of a scheduler whose step was taken elsewhere."""
        return StepOutput(latents, latents)

    def count(self) -> None:
        """Takes this step on zeros with the scheduler: some scale model inputs by the steps they have taken."""
        zeros = self.sample.new_zeros((1,) * self.sample.ndim)
        options = {"generator": torch.Generator()} if takes_generator(self.scheduler) else {}
        with torch.random.fork_rng(devices=[]):
            self.take(zeros, zeros, **options)

    def sample_noise(self, from_default: bool) -> None:
        """Samples noise for all rows, so that generators, or default ones, go on as where the step is taken."""
        devices = [self.sample.device] if self.sample.device.type == "cuda" else []
        with torch.random.fork_rng(devices, enabled=not from_default):
            self.take(torch.zeros_like(self.prediction), torch.zeros_like(self.sample))


class PipelineLoop(Loop):
    """A pipeline's call in the middle of its loop. One thread owns it.

    Args:
        call: The `Call` that is run. What goes in and comes out has the rows of this rank only.
        compute: Answers a call of the denoiser that ranks share, given its arguments.
        exchange: Sends the prediction of this rank's branch of guidance, and returns those of both.
        head: Context of the code before the first call of the denoiser.
        samples_noise: Sample the noise of steps that other ranks take, so that generators among the call's
            arguments go on as in one process; the default ones, too, if this rank steps no patch.
    """

    def __init__(
        self,
        call: Any,
        compute: Compute,
        exchange: ExchangeBranches | None,
        head: contextlib.AbstractContextManager[None],
        samples_noise: bool,
    ) -> None:
        self.call, self.compute, self.exchange = call, compute, exchange
        self.head, self.samples_noise, self._pipeline = head, samples_noise, call.pipeline
        self.is_divided, self.mixes = call.divided is not None, "predictions" in call.mixes
        self.is_shared = self.is_divided
        self._complete: Complete | None = None
        self._coroutine = Coroutine(self._run, infers=torch.is_inference_mode_enabled())
        self._event: _Denoise | Step | None = None
        self._answer: Any = None
        self._asked: list[_Denoise] = []  # calls of the first denoiser in this step
        self._fixed: dict[int, list[Any]] = {}  # by call in a step; see `_look_for_changes`
        self._step_output: Any = None
        self._timesteps = HostTimesteps()
        self._result: Any = None

    # --- inside -----------------------------------------------------------------------------------

    @property
    def _branch(self) -> int | None:
        """Index of the branch of guidance that this rank computes; None if it computes both."""
        return self.call.index if self.is_divided else None

    @property
    def _by_calls(self) -> bool:
        """Whether the branches of guidance are two calls of the denoiser, and not two halves of its batch."""
        return self.call.divided == "calls"

    def _run(self) -> None:
        self._result = self._pipeline.run(
            lambda name, arguments: self._wait(_Denoise(name, arguments)),
            lambda step: self._wait(step.with_timestep_of(self._timesteps)),
        )
        self._event = None

    def _wait(self, event: _Denoise | Step) -> Any:
        self._event = event
        self._coroutine.pause()
        answer, self._answer = self._answer, None
        return answer

    # --- called by its owner ------------------------------------------------------------------------

    def predict(
        self, latents: Tensor | None = None, again: bool = False, complete: Complete | None = None
    ) -> Tensor:
        """See `Loop`."""
        self._complete = complete
        if again:
            # Those that the loop has read were computed on other samples; they are completed in place.
            for number, event in enumerate(self._asked):
                if event is not self._event and self._branch in (None, number):
                    event.answer[0].copy_(self._computed(event)[0])
        else:
            self.skip(latents)
        while isinstance(self._event, _Denoise):
            own_branch = self._answered(self._event)
            if own_branch is not None:
                return self._cut(own_branch[:, : self.call.channels])
        if self.is_shared:
            self._refuse_other_calls(at_end=True)
        return self._cut(self._at_step().prediction)

    def change(self, call: Any, compute: Compute) -> None:
        """Changes to another denoiser, whose loop begins with this loop's latents after the last step."""
        self._run_to_step()
        self.call, self.compute = call, compute
        self._fixed.clear()
        if self._step_output is None:  # the step was another rank's
            event = self._at_step()
            self._count(event)
            self._step_output = event.answer(self._embedded(call.latents))

    def _answered(self, event: _Denoise) -> Tensor | None:
        """Answers a call of a denoiser, and goes on.

        Returns:
            Where another rank has to give the other branch of guidance first, that of this rank; see `guided`.
        """
        if event.name != self.call.denoiser:  # which every rank has
            part = self._pipeline.parts[event.name]
            if event.arguments.keys() & {"controls", "listed"}:
                part = Controlled(part, self._pipeline.controls)
            self._go_on(part(**event.arguments))
            return None
        if event not in self._asked:
            self._asked.append(event)
        if self._branch is None:
            event.answer = self._computed(event)
            self._go_on(event.answer)
            return None
        if not self._by_calls:  # half of the batch
            return self._computed(event)[0]
        number = len(self._asked) - 1
        if number == self._branch:
            event.answer = Prediction((self._computed(event)[0],))
        else:
            event.answer = self._unknown(event)
        if number == 1:
            return self._asked[self._branch].answer[0]
        self._go_on(Prediction(event.answer))
        return None

    def _computed(self, event: _Denoise) -> Any:
        """Returns the answer of the denoiser, with rows of other ranks and patches if the loop reads these."""
        if self.is_shared:
            self._refuse_other_calls()
        if self.on_change is not None and self._conditions_changed(event):
            self.on_change()
        out = self.compute(event.arguments)
        if self._complete is None:
            return out
        return Prediction((self._complete(self._asked.index(event), out[0]),))

    def _refuse_other_calls(self, at_end: bool = False) -> None:
        """Raises ConfigurationError if calls of a step, so far or `at_end`, are not as in the first run."""
        recorded = shapes_given(self.call.steps[0])
        shapes = shapes_given(event.arguments for event in self._asked)
        if shapes != (recorded if at_end else recorded[: len(shapes)]):
            num_calls = f"{len(self._asked)} calls in a step"
            other = [shape for shape in shapes if shape not in recorded] or [num_calls]
            raise ConfigurationError(
                f"{self._pipeline.name} gives its {self.call.denoiser} {', '.join(other)}, unlike in its first "
                "run, which has no callbacks: one has ended guidance, perhaps. Ranks and patches rely on what that "
                "has shown: leave the callback out, or sample with method=single on one rank"
            )

    def _conditions_changed(self, event: _Denoise) -> bool:
        """Returns whether an argument differs from the step before that did not change in the first run.

        The first run has recorded one object for what was the same in all its steps.
        """
        number, latents = self._asked.index(event), pytree.MappingKey(latents_name(event.arguments))

        def conditions(arguments: Any) -> list[Any]:
            leaves = pytree.tree_leaves_with_path(arguments)
            return [x for path, x in leaves if path[-1] != latents]

        first, last = (conditions(calls[number]) for calls in self.call.steps)
        now = conditions(event.arguments)
        fixed = [x for x, a, b in zip(now, first, last, strict=False) if a is b]
        before = self._fixed.get(number)
        if before is not None and len(fixed) == len(before) and all(map(same, fixed, before)):
            return False
        self._fixed[number] = copied(fixed)
        return True

    def guided(
        self, prediction: Tensor, take: Rows = lambda x: x, put: Callable[..., Any] = Tensor.copy_
    ) -> Tensor:
        """See `Loop`."""
        if self._branch is None:
            return prediction
        assert isinstance(self._event, _Denoise)
        event = self._event
        branches = []
        for values in self.exchange(take(prediction).contiguous()):
            whole = torch.full_like(prediction, math.nan)
            put(whole, values)
            branches.append(self._embedded(whole))
        num_channels = branches[0].shape[1]
        if self._by_calls:
            # Of the other call this rank has answered NaN, which the loop has not read yet.
            other = 1 - self._branch
            self._asked[other].answer[0][:, :num_channels].copy_(branches[other])
            self._go_on(Prediction(event.answer))
        else:
            answer = self._unknown(event)[0]
            answer[:, :num_channels].copy_(torch.cat(branches))
            self._go_on(Prediction((answer,)))
        return self._cut(self._at_step().prediction)

    @property
    def sample(self) -> Tensor:
        """See `Loop`."""
        return self._cut(self._at_step().sample)

    @property
    def given(self) -> tuple[Tensor, Mapping[str, Any]]:
        """See `Loop`."""
        step = self._at_step()
        return step.timestep, self.call.of_own_rows(step.options)

    def step(self, prediction: Tensor) -> Tensor:
        """See `Loop`."""
        self._step_output = self._at_step().take(self._embedded(prediction))
        return self._cut(self._step_output[0])

    def finish(self, latents: Tensor) -> Any:
        """Runs the code after the last step; returns the pipeline's result, or raises SamplingError."""
        if self._coroutine.done:  # interrupted
            return self._result
        self._run_to_step()
        step = self._at_step()
        if self._step_output is None:
            with torch.inference_mode():  # as in the steps before
                self._count(step)
        alone = self._step_output is not None and self.call.rows is None
        self._go_on(self._step_output if alone else step.answer(latents))
        if self._event is not None:
            raise SamplingError(
                f"{self._pipeline.name} goes on denoising after the last step that its first run, "
                "with a denoiser that predicts zeros, had shown"
            )
        return self._result

    def close(self) -> None:
        """Ends the loop where it is paused, and frees its tensors."""
        self._coroutine.cancel()
        self._event = self._step_output = None
        self._asked.clear()

    def skip(self, latents: Tensor | None) -> None:
        """See `Loop`."""
        self._run_to_step()
        self._asked = []
        if self._event is None:  # not started
            with self.head:
                self._go_on(None)
        elif latents is None:
            output, self._step_output = self._step_output, None
            self._go_on(output)
        else:
            self._count(self._event)
            self._go_on(self._event.answer(self._embedded(latents)))

    def _count(self, step: Step) -> None:
        """Takes a step of another rank with this loop's scheduler, so that its counters and noise agree."""
        if self.samples_noise:
            step.sample_noise(from_default=self.steps_no_rows)
        else:
            step.count()

    def _unknown(self, event: _Denoise) -> Prediction:
        """Returns a prediction of NaN, in place of one that another rank computes."""
        zeros = predicted_zeros(self._pipeline.parts[event.name], event.arguments)
        return Prediction(torch.full_like(x, math.nan) for x in zeros)

    def _run_to_step(self) -> None:
        """Runs to the next step of the scheduler; predictions before it, which this rank does not need, are NaN."""
        while isinstance(self._event, _Denoise):
            self._go_on(self._unknown(self._event))

    def _go_on(self, answer: Any) -> None:
        self._answer = answer
        self._coroutine.resume()

    def _at_step(self) -> Step:
        if not isinstance(self._event, Step):
            is_alone = self.call.rows is None and self._branch is None
            raise (LoopInterruptedError if is_alone else SamplingError)(
                f"{self._pipeline.name} ended its loop earlier than its first run had shown; a "
                "callback may interrupt it only where one rank samples all prompts by itself, with method=single"
            )
        return self._event

    def _cut(self, x: Tensor) -> Tensor:
        """Returns the rows of this rank's samples."""
        return x if self.call.rows is None else x[self.call.rows]

    def _embedded(self, x: Tensor) -> Tensor:
        """Puts rows of this rank's samples among those of all, which are NaN: the inverse of `_cut`."""
        if self.call.rows is None:
            return x
        if isinstance(self._event, Step):
            num_rows = len(self._event.sample)
        else:
            assert isinstance(self._event, _Denoise)
            num_rows = len(self._event.arguments[latents_name(self._event.arguments)])
            num_rows //= 1 if self._by_calls else 2
        whole = x.new_full((num_rows, *x.shape[1:]), math.nan)
        whole[self.call.rows] = x
        return whole
