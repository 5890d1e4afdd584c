"""Attributes of modules that a step sets on its way: adapters off for a while, `.eval()` around a pass.

A step that is run in pieces, or left in the middle, leaves them half set for whoever comes next. So the probe
notes which attributes differ from the beginning of the step when a layer is called or returns, and runs put them
back: all of them where frozen layers run, which come from another batch than everything around them; where a
stage is left before the end of the step, those that the step would have put back itself.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_diffpipe.graph.layer import CONSTANT_TYPES, Attribute

_MISSING = object()
_NEEDS_GRADIENT = "requires_grad"
_SETTERS = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]


class AttributeWrites(TorchFunctionMode):
    """Notes what a step sets in modules, and whether parameters need gradients, while it is active.

    Args:
        root: The module that holds all others.
        between: Says whether the code that runs now lies between layers of the fine graph.
    """

    def __init__(self, root: nn.Module, between: Callable[[], bool]) -> None:
        super().__init__()
        self._between = between
        self._modules = {id(module): name for name, module in root.named_modules()}
        self._parameters = {id(parameter): name for name, parameter in root.named_parameters()}
        self._before: dict[Attribute, tuple[Any, Any]] = {}
        self._unmoved: set[Attribute] = set()
        self._moved: set[Attribute] = set()
        self._of_glue: set[Attribute] = set()

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Notes writes inside."""
        original = nn.Module.__setattr__

        def set_attribute(module: nn.Module, name: str, value: Any) -> None:
            before = module.__dict__.get(name, _MISSING)
            original(module, name, value)
            owner = self._modules.get(id(module))
            # What is set to what it was may be set to something else by another microbatch: a coin, say.
            again = before is value and name != "training"
            if owner is not None and name in module.__dict__ and (again or before is not value):
                self._note((owner, name), module, before)

        nn.Module.__setattr__ = set_attribute  # type: ignore[method-assign, assignment]
        try:
            with self:
                yield
        finally:
            nn.Module.__setattr__ = original  # type: ignore[method-assign]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _SETTERS and (name := self._parameters.get(id(args[0]))) is not None:
            with torch._C.DisableTorchFunction():
                self._note((name, _NEEDS_GRADIENT), args[0], args[0].requires_grad)
        return func(*args, **(kwargs or {}))

    def _note(self, attribute: Attribute, owner: Any, before: Any) -> None:
        if attribute not in self._before:
            self._before[attribute] = owner, before
            self._unmoved.add(attribute)
        if self._between():
            self._of_glue.add(attribute)

    def look(self) -> None:
        """A layer is called, or has returned: notes what differs from the beginning of the step."""
        if self._unmoved:
            moved = {attribute for attribute in self._unmoved if not self._is_as_before(attribute)}
            self._unmoved -= moved
            self._moved |= moved

    def toggled(self) -> frozenset[Attribute]:
        """When the step has ended: what differed in between."""
        return frozenset(filter(self._is_as_before, self._moved))

    def left(self) -> frozenset[Attribute]:
        """When the step has ended: what was set between layers, and not put back.

        Without notes that something was done once and for all: a model of transformers notes that it has hooks, and
        would get them again in every run if its note were taken back. Such names are private; that of a coin which
        a step keeps is not.
        """
        left = self._of_glue - self.toggled()
        return frozenset(itertools.filterfalse(self._is_done_once, left))

    def _is_done_once(self, attribute: Attribute) -> bool:
        owner, before = self._before[attribute]
        is_private = attribute[1].startswith("_")
        return is_private and before is _MISSING and owner.__dict__.get(attribute[1]) is True

    def _is_as_before(self, attribute: Attribute) -> bool:
        owner, before = self._before[attribute]
        if isinstance(owner, nn.Module):
            return _same(before, owner.__dict__.get(attribute[1], _MISSING))
        with torch._C.DisableTorchFunction():
            return bool(owner.requires_grad == before)


def _same(value: Any, other: Any) -> bool:
    if value is other:
        return True
    return type(value) is type(other) and _is_plain(value) and bool(value == other)


def _is_plain(value: Any) -> bool:
    parts = value if isinstance(value, list | tuple) else [value]
    return all(isinstance(part, CONSTANT_TYPES) for part in parts)


class Attributes:
    """Some attributes of modules and parameters, to be put aside and put back.

    Args:
        root: The module that holds all others.
        names: Which ones.
    """

    def __init__(self, root: nn.Module, names: Collection[Attribute]) -> None:
        modules, parameters = dict(root.named_modules()), dict(root.named_parameters())
        self._places: list[tuple[dict[str, Any], str]] = [
            (modules[owner].__dict__, name) for owner, name in names if owner in modules
        ]
        self._parameters = [parameters[owner] for owner, _ in names if owner not in modules]

    def capture(self) -> tuple[list[Any], list[bool]]:
        """Returns the present values of the attributes."""
        values = [held.get(name, _MISSING) for held, name in self._places]
        return values, [parameter.requires_grad for parameter in self._parameters]

    def restore(self, state: tuple[list[Any], list[bool]]) -> None:
        """Makes them what they were."""
        values, flags = state
        for (held, name), value in zip(self._places, values, strict=True):
            if value is _MISSING:
                held.pop(name, None)
            else:
                held[name] = value
        for parameter, flag in zip(self._parameters, flags, strict=True):
            parameter.requires_grad_(flag)

    @contextlib.contextmanager
    def preserved(self) -> Iterator[None]:
        """Puts them back on exit."""
        state = self.capture()
        try:
            yield
        finally:
            self.restore(state)
