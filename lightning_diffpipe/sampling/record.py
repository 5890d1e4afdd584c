"""Recorded answers of the parts of a pipeline, by which its call can be run again without them.

Text encoders and autoencoder are asked on rank 0 only, and once for a request, though the pipeline's own call runs
on all ranks, under PipeFusion once for each patch. Everybody asks the same questions in the same order:

    rank 0, first      Recorder    asks the real part, and keeps the answer
    everybody, after   Replayed    gives the answers in their order; on rank 0 the real part answers what follows
                       Controls    those that the loop calls for its denoiser only, computed with that
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from lightning_diffpipe.errors import ConfigurationError

_MODES = ("eval", "train", "requires_grad_", "to")
"""Methods of a module that pipelines call for their effect."""


class LoopEnds(BaseException):
    """Ends a call whose loop has run (no Exception, so that a pipeline does not swallow it)."""


@dataclass
class Record:
    """Answers of the parts of one call.

    Attributes:
        answers: Answers of calls before the loop, by part and method, in order.
        in_loop: Parts that are called inside the loop: all ranks need them.
        controls: Parts whose answers only a denoiser reads, such as ControlNets, with their answers, without
            values, by the shapes of their inputs.
        asked_last: Parts that were called since the last call of the denoiser; in the end, those of the tail.
        num_decoded: Rows that were to be decoded; None if the call ended without.
        is_encoding: Whether prompts are being encoded, of which the loop, too, is given the true answers.
    """

    answers: dict[str, list[Any]] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    in_loop: set[str] = field(default_factory=set)
    controls: dict[str, dict[str, Any]] = field(default_factory=dict)
    asked_last: set[str] = field(default_factory=set)
    num_decoded: int | None = None
    is_encoding: bool = False

    def on(self, device: torch.device | str) -> Record:
        """Returns the record with its tensors on a device."""
        answers, attributes = moved((self.answers, self.attributes), device)
        return replace(self, answers=answers, attributes=attributes, asked_last=set())


def moved(value: Any, device: torch.device | str) -> Any:
    """Moves a value's tensors to a device: those in containers and, one level deep, in attributes of objects."""
    copies: dict[int, torch.Tensor] = {}  # what was one tensor stays one

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            if id(leaf) not in copies:
                copies[id(leaf)] = leaf.to(device)
            return copies[id(leaf)]
        attributes = getattr(leaf, "__dict__", None)
        if attributes and any(isinstance(each, torch.Tensor) for each in attributes.values()):
            moved_leaf = object.__new__(type(leaf))
            vars(moved_leaf).update(
                {n: move(x) if isinstance(x, torch.Tensor) else x for n, x in attributes.items()}
            )
            return moved_leaf
        return leaf

    return pytree.tree_map(move, value)


class _Asked:
    """Stands for a part that can be called, counted, iterated over and indexed."""

    def _ask(self, name: str, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._ask("__call__", args, kwargs)

    def __len__(self) -> int:
        return self._ask("__len__", (), {})

    def __iter__(self) -> Iterator[Any]:  # over the layers of a text encoder
        return (getattr(self, str(index)) for index in range(len(self)))

    def __getitem__(self, index: int) -> Any:  # one of several ControlNets
        return getattr(self, str(range(len(self))[index]))


class Recorder(_Asked):
    """Stands for a part, and keeps what it answers."""

    def __init__(
        self, real: Any, path: str, record: Record, is_looping: Callable[[], bool]
    ) -> None:
        self.__dict__.update(_real=real, _path=path, _record=record, _is_looping=is_looping)
        record.attributes[f"{path}.__class__"] = type(real)

    @property
    def __class__(self) -> Any:  # pipelines look of which kind a part is
        return type(self.__dict__["_real"])

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._real, name)
        path = f"{self._path}.{name}"
        if name in _MODES and isinstance(self._real, nn.Module):
            return _then(value, self)
        if isinstance(value, nn.Module):
            return Recorder(value, path, self._record, self._is_looping)
        if callable(value) and not isinstance(value, type):
            return lambda *args, **kwargs: self._ask(name, args, kwargs)
        self._record.attributes.setdefault(path, value)
        return value

    def _ask(self, name: str, args: Any, kwargs: Any) -> Any:
        path, record = f"{self._path}.{name}", self._record
        ask = functools.partial(getattr(self._real, name), *args, **kwargs)
        shapes = [x.shape for x in pytree.tree_leaves((args, kwargs)) if torch.is_tensor(x)]
        if record.is_encoding or not (shapes and self._is_looping()):
            answer = ask()
            if not isinstance(answer, Iterator):
                record.answers.setdefault(path, []).append(answer)
                return copied(answer)
            # Parameters, of which type and device are looked at, or modules.
            kinds = [x.new_empty(0) for x in itertools.islice(answer, 1) if torch.is_tensor(x)]
            record.answers.setdefault(path, []).append(_Iterated(kinds))
            return ask()
        if name == "decode" and isinstance(self._real, nn.Module):
            record.num_decoded = len(next(iter((*args, *kwargs.values()))))
            raise LoopEnds
        # Latents are not real here, so that one answer of a shape is as good as another.
        record.asked_last.add(self._path.partition(".")[0])
        by_shape = self.__dict__.setdefault("_known", {})
        key = path, str(shapes)
        if key not in by_shape:
            by_shape[key] = ask()
        return copied(by_shape[key])


class Replayed(_Asked):
    """Stands for a part, and gives its recorded answers."""

    def __init__(
        self, path: str, record: Record, real: Any, device: torch.device, counts: Counter[str]
    ) -> None:
        self.__dict__.update(_path=path, _record=record, _real=real, _device=device, _counts=counts)

    @property
    def __class__(self) -> Any:  # pipelines look of which kind a part is
        attributes = self.__dict__
        return attributes["_record"].attributes.get(f"{attributes['_path']}.__class__", Replayed)

    def __getattr__(self, name: str) -> Any:
        path = f"{self._path}.{name}"
        if name in _MODES and (self._real is None or isinstance(self._real, nn.Module)):
            return _then(getattr(self._real, name, None), self)
        if path in self._record.answers:
            return lambda *args, **kwargs: self._ask(name, args, kwargs)
        if name == "device":
            return self._device
        if path in self._record.attributes:
            return self._record.attributes[path]
        if f"{path}.__class__" in self._record.attributes:
            inner = getattr(self._real, name, None)
            return Replayed(path, self._record, inner, self._device, self._counts)
        if self._real is None:
            if callable(getattr(self.__class__, name, None)):
                return lambda *args, **kwargs: self._ask(name, args, kwargs)
            raise AttributeError(
                f"{self._path} is on rank 0 only, which was not asked for its {name}"
            )
        return getattr(self._real, name)

    def _ask(self, name: str, args: Any, kwargs: Any) -> Any:
        def ask() -> Any:
            if self._real is None:
                raise ConfigurationError(
                    f"{self._path} is on rank 0 only, which did not ask for its {name} in its first run, without "
                    "callbacks. All ranks call these: encode before the request, and look at images on rank 0 alone"
                )
            return getattr(self._real, name)(*args, **kwargs)

        return next_answer(self._record, f"{self._path}.{name}", self._counts, ask)


def next_answer(record: Record, path: str, num_calls: Counter[str], ask: Callable[[], Any]) -> Any:
    """Returns the next recorded answer of a method, and asks after the last of them."""
    answers, index = record.answers.get(path, []), num_calls[path]
    num_calls[path] += 1
    return copied(answers[index]) if index < len(answers) else ask()


def _then(method: Callable[..., Any] | None, part: Any) -> Callable[..., Any]:
    """Returns a method that changes the real module, if there is one, and returns its stand-in."""

    def changed(*args: Any, **kwargs: Any) -> Any:
        if method is not None:
            method(*args, **kwargs)
        return part

    return changed


class _Iterated(list[Any]):
    """The items of an iterator."""


def copied(value: Any) -> Any:
    """Copies a value, with all that is in it, so that its reader may change it.

    Modules, functions and generators are not copied, and neither is what cannot be.
    """
    if isinstance(value, _Iterated):
        return iter(value)
    memo: dict[int, Any] = {}  # what was one object stays one

    def own(leaf: Any) -> Any:
        if callable(leaf) or isinstance(leaf, torch.Generator):
            return leaf
        if isinstance(leaf, torch.Tensor):
            return memo.setdefault(id(leaf), leaf.clone())
        try:
            return copy.deepcopy(leaf, memo)
        except Exception:  # a file that is open, perhaps
            return leaf

    return pytree.tree_map(own, value)


@dataclass(frozen=True)
class Answer:
    """Stands for what a control answers, among the arguments of the denoiser that reads it."""

    call: int
    leaf: int


class Controls:
    """Parts whose results only a denoiser reads, such as ControlNets: ranks compute them as a part of it.

    So they are answered with tensors without memory, and what they were asked is given to the denoiser instead, as
    its argument `controls`: names and arguments, for which every `Answer` among its other arguments stands.

    Args:
        known: Answers of each control, without values, by shapes of its arguments; further ones are added,
            and a control that has other readers is taken out.
        parts: The parts that are here, by name.
        device: Device of this rank.
    """

    def __init__(
        self, known: dict[str, dict[str, Any]], parts: Mapping[str, nn.Module], device: torch.device
    ) -> None:
        self._known, self._parts, self._device = known, parts, device
        self._asked: list[tuple[str, dict[str, Any], list[Any]]] = []
        self._read: set[int] = set()

    def ask(self, name: str, arguments: dict[str, Any]) -> Any:
        """Answers a call of a control."""
        shapes = [x.shape for x in pytree.tree_leaves(arguments) if torch.is_tensor(x)]
        past = self._known.setdefault(name, {})
        if str(shapes) not in past:
            answer = self._parts[name](**arguments)
            past[str(shapes)] = pytree.tree_map_only(torch.Tensor, lambda x: x.to("meta"), answer)

        def unknown(x: torch.Tensor) -> torch.Tensor:
            return torch.full((), math.nan, dtype=x.dtype, device=self._device).expand(x.shape)

        answer = pytree.tree_map_only(torch.Tensor, unknown, past[str(shapes)])
        self._asked.append((name, arguments, pytree.tree_leaves(answer)))
        return answer

    def read_by(self, on_denoise: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Gives a denoiser the calls of the controls whose answers it reads."""

        def denoise(arguments: dict[str, Any]) -> Any:
            leaf_ids = {id(x) for x in pytree.tree_leaves(arguments)}
            controls: list[tuple[str, dict[str, Any]]] = []
            places: dict[int, Answer] = {}
            for control, control_arguments, leaves in self._asked:
                mine = {id(x): i for i, x in enumerate(leaves) if torch.is_tensor(x)}
                if mine.keys() & leaf_ids:
                    places |= {x: Answer(len(controls), i) for x, i in mine.items()}
                    controls.append((control, control_arguments))
            if not controls:
                return on_denoise(name, arguments)
            self._read |= places.keys() & leaf_ids
            linked = pytree.tree_map(lambda x: places.get(id(x), x), arguments)
            return on_denoise(name, linked | {"controls": controls})

        return denoise

    def forgotten_after(self, on_step: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that calls `on_step` with the calls of controls in this step forgotten."""

        def step(*given: Any) -> Any:
            for name, _, leaves in self._asked:
                if any(torch.is_tensor(x) and id(x) not in self._read for x in leaves):
                    self._known.pop(name, None)
            self._asked, self._read = [], set()
            return on_step(*given)

        return step


class Controlled(nn.Module):
    """A denoiser with the parts that answer for it alone, such as ControlNets; ranks share all their layers."""

    def __init__(self, denoiser: nn.Module, controls: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.denoiser = denoiser
        self.controls = nn.ModuleDict(controls)

    def forward(
        self,
        controls: Sequence[tuple[str, dict[str, Any]]] = (),
        listed: str | None = None,
        **arguments: Any,
    ) -> Any:
        """Calls the denoiser.

        Args:
            controls: Names and arguments of calls of controls.
            listed: The argument of the denoiser that takes samples as a list, and is given as one tensor; then so
                is what it returns.
            arguments: Arguments of the denoiser, with an `Answer` for each tensor that a control returns.
        """
        answers = [pytree.tree_leaves(self.controls[name](**of_call)) for name, of_call in controls]

        def answered(x: Any) -> Any:
            return answers[x.call][x.leaf] if isinstance(x, Answer) else x

        arguments = pytree.tree_map(answered, arguments)
        if listed is None:
            return self.denoiser(**arguments)
        out = self.denoiser(**arguments | {listed: list(arguments[listed].unbind())})
        return (torch.stack(list(out[0])),)
