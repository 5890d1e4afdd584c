"""Generators of random numbers that outlive a step: no run can put them back, as it does the global ones."""

from __future__ import annotations

import gc
import pickle
import random
import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.quasirandom import SobolEngine

from lightning_diffpipe.graph import rng
from lightning_diffpipe.graph.fake import SHARED_ATTRIBUTES
from lightning_diffpipe.graph.layer import CONSTANT_TYPES


class OwnGenerators:
    """Finds out from which generators besides the global ones a step draws, and keeps for the next.

    Args:
        root: The module, about to run the step.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._host = {name: _picture(it) for name, it in _held(root).items() if _is_host(it)}
        self._drawn: list[weakref.ref[torch.Generator]] = []

    def note(self, arguments: Iterable[Any]) -> None:
        """A function of torch is called with these arguments (operators see copies of generators)."""
        for value in arguments:
            if isinstance(value, torch.Generator) and not rng.is_global(value):
                self._drawn.append(weakref.ref(value))

    def found(self) -> frozenset[str]:
        """When the step has ended: where those are that it drew from."""
        held = _held(self._root)
        names = {
            name
            for name, before in self._host.items()
            if name in held and _picture(held[name]) != before
        }
        drawn = {id(generator) for generator in self._alive()}
        named = {name for name, it in held.items() if id(it) in drawn}
        elsewhere = drawn - {id(held[name]) for name in named}
        if elsewhere:
            del held
            gc.collect()  # made in the step, it may wait in a cycle
            if elsewhere & {id(generator) for generator in self._alive()}:
                named.add("a torch.Generator kept outside of the module")
        return frozenset(names | named)

    def _alive(self) -> list[torch.Generator]:
        return [generator for ref in self._drawn if (generator := ref()) is not None]


_NEVER = {*SHARED_ATTRIBUTES, *vars(nn.Module())}  # where no generators are, thousands of times


def _held(root: nn.Module) -> dict[str, Any]:
    """Generators among the attributes of all modules, and among what those hold, by name."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for prefix, module in root.named_modules():
        for name, value in vars(module).items():
            if name in _NEVER or isinstance(value, CONSTANT_TYPES) or id(value) in seen:
                continue
            seen.add(id(value))
            path = f"{prefix}.{name}" if prefix else name
            if _is_generator(value):
                found[path] = value
                continue
            found |= {path + inside: it for inside, it in _inside(value) if _is_generator(it)}
    return found


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", it) for key, it in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{index}]", it) for index, it in enumerate(value))
    elif not isinstance(value, nn.Module | torch.Tensor | type) and hasattr(value, "__dict__"):
        yield from ((f".{key}", it) for key, it in vars(value).items())


def _is_generator(value: Any) -> bool:
    return isinstance(value, torch.Generator) or _is_host(value)


def _is_host(value: Any) -> bool:
    if isinstance(value, random.Random | SobolEngine):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(
        value, numpy.random.Generator | numpy.random.RandomState
    )


def _picture(generator: Any) -> bytes:
    """Its state, to be compared."""
    if isinstance(generator, SobolEngine):
        return pickle.dumps(generator.num_generated)
    if isinstance(generator, random.Random):
        return pickle.dumps(generator.getstate())
    bits = getattr(generator, "bit_generator", None)
    return pickle.dumps(bits.state if bits is not None else generator.get_state())
