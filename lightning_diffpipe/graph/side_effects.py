"""Side effects of a step: taking gradients, sampling numbers, setting attributes, hooking tensors.

All of it works in one process, and may not where every stage runs the step's code for itself. The probe notes it,
runs make up for it, and what nothing can make up for is refused.

* **Gradients and tangents** that a step takes itself (a penalty on a gradient, `torch.func.jvp`) would have to
  cross stages, and are refused between layers. Inside the forward of a module they are fine as long as nobody cuts
  it.
* **Generators** besides the global ones outlive the step. On one rank, whatever runs besides training leaves them
  as they are (`generators_preserved`).
* **Attributes** of modules: adapters off for a while, `.eval()` around a pass, other weights in `functional_call`.
  A step that is run in pieces, or left in the middle, leaves them half set for whoever comes next. So the probe
  notes which differ from the beginning of the step when a layer is called or returns, and runs restore them.
* **Gradient hooks** between layers (`h.register_hook(lambda g: 0.1 * g)`) see the whole gradient of their tensor in
  one process. Here every stage has the part of it that its own layers add, so all that reads the tensor must be
  within one stage. On all others tensors need no gradient, for which PyTorch would refuse a hook.
"""

import contextlib
import functools
import gc
import inspect
import itertools
import pickle
import random
import sys
import traceback
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.quasirandom import SobolEngine

from lightning_diffpipe.errors import GraphError
from lightning_diffpipe.graph import rng
from lightning_diffpipe.graph.fakes import SHARED_ATTRIBUTES
from lightning_diffpipe.graph.layer import CONSTANT_TYPES, Attribute

_TRANSFORMS = {"Vmap": "torch.vmap", "Grad": "torch.func.grad or vjp", "Jvp": "torch.func.jvp"}
_OWN = ("torch", "lightning", "lightning_utilities", "lightning_diffpipe.graph")
_INSIDE = "inside the forward of one small module, which then becomes one layer"


@contextlib.contextmanager
def gradients_noticed(taken: Callable[[str], None]) -> Iterator[None]:
    """Calls `taken` with the name of a function of `torch.autograd` that is about to take gradients.

    Both look up the engine when they are called, so that it does not matter by what name a model has imported them.
    """
    engine = torch.autograd._engine_run_backward

    def noticed(*args: Any, **kwargs: Any) -> Any:
        taken(f"torch.autograd.{inspect.currentframe().f_back.f_code.co_name}")  # type: ignore[union-attr]
        return engine(*args, **kwargs)

    torch.autograd._engine_run_backward = noticed
    try:
        yield
    finally:
        torch.autograd._engine_run_backward = engine


def refuse_gradients(name: str) -> None:
    """Raises GraphError for gradients that the step takes itself between layers, by a function of this name."""
    raise GraphError(
        f"the step computes gradients itself ({caller()} calls {name}), but in a pipeline they would have "
        "to cross stages. Return the loss and leave its gradient to the trainer (automatic optimization); "
        f"if the gradient is part of a model, compute it {_INSIDE}"
    )


def refuse_transformed(layer_name: str) -> None:
    """Raises GraphError if a layer is called inside a function transform: tangents would cross stages."""
    transform = transform_around()
    if transform is not None:
        raise GraphError(
            f"the step calls {layer_name} inside {transform} ({caller(into='/torch/_functorch/')}), but in a "
            "pipeline layers of other stages give and take plain tensors, without tangents. Do it "
            f"{_INSIDE}; what calls all of a model in this way, as MeanFlow does, cannot be cut into stages"
        )


def transform_around() -> str | None:
    """Returns the innermost function transform that the code runs in, by a name that users know."""
    transform = torch._C._functorch.peek_interpreter_stack()
    if transform is not None:
        kind = transform.key().name
        return _TRANSFORMS.get(kind, f"torch.func ({kind})")
    return "torch.autograd.forward_ad" if forward_ad._current_level >= 0 else None


def num_transforms_around() -> int:
    """Returns how many function transforms the code runs in."""
    transform = torch._C._functorch.peek_interpreter_stack()
    return (0 if transform is None else transform.level()) + forward_ad._current_level + 1


def stays_whole(name: str, doing: str) -> str:
    """Says that a module is one layer, and why."""
    return (
        f"{name} {doing}, so that it is one layer, and no pipeline is cut through it. Do that in a smaller module, "
        "if more stages are wanted"
    )


@functools.cache
def is_of(path: str, *packages: str) -> bool:
    """Returns whether a file that runs is in a package, wherever that is; folders of users may have its name."""
    loaded = [sys.modules[package] for package in packages if package in sys.modules]
    folders = [folder for package in loaded for folder in package.__path__]
    return any(Path(path).is_relative_to(folder) for folder in folders)


def is_users(path: str) -> bool:
    """Returns whether code of a file is the user's, or of a model: not of torch, Lightning or a probe."""
    return not is_of(path, *_OWN)


def caller(into: str = "") -> str:
    """Returns the user's line that runs; with `into`, the outermost one that calls a file with that in its path."""
    frames = [(f.filename.replace("\\", "/"), f.lineno) for f in traceback.extract_stack()]
    users = [i for i, (path, _) in enumerate(frames) if is_users(path)]
    calling = [i for i in users[:-1] if into and into in frames[i + 1][0]]
    if not users:
        return "it"
    path, line = frames[calling[0] if calling else users[-1]]
    return f"{path}:{line}"


class GeneratorDraws:
    """Finds out from which generators besides the global ones a step samples that is about to run."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._host = {name: _state_of(g) for name, g in _reached(root).items() if _is_host(g)}
        self._used = weakref.WeakSet[torch.Generator]()

    def note(self, arguments: Iterable[Any]) -> None:
        """Notes generators among the arguments of a function of torch (operators see copies of them)."""
        for value in arguments:
            if isinstance(value, torch.Generator) and not rng.is_global(value):
                self._used.add(value)

    def found(self) -> frozenset[str]:
        """Returns, when the step has ended, where the generators are that it sampled from."""
        generators = _reached(self._root)
        names = {
            name
            for name, before in self._host.items()
            if name in generators and _state_of(generators[name]) != before
        }
        used = set(map(id, self._used))
        named = {name for name, generator in generators.items() if id(generator) in used}
        elsewhere = used - {id(generators[name]) for name in named}
        if elsewhere:
            del generators
            gc.collect()  # made in the step, it may wait in a cycle
            if elsewhere & set(map(id, self._used)):
                named.add("a torch.Generator kept outside of the module")
        return frozenset(names | named)


_NEVER = {*SHARED_ATTRIBUTES, *vars(nn.Module())}  # where no generators are, thousands of times


def _reached(root: nn.Module) -> dict[str, Any]:
    """Returns generators by name: of files, among the attributes of all modules, and among what those hold."""
    generators = _of_files(root, _is_host)
    seen: set[int] = set()
    for prefix, module in root.named_modules():
        for name, value in vars(module).items():
            if name in _NEVER or isinstance(value, CONSTANT_TYPES) or id(value) in seen:
                continue
            seen.add(id(value))
            path = f"{prefix}.{name}" if prefix else name
            if _is_generator(value):
                generators[path] = value
                continue
            generators |= {path + inside: g for inside, g in _inside(value) if _is_generator(g)}
    return generators


@contextlib.contextmanager
def generators_preserved(root: nn.Module) -> Iterator[None]:
    """Restores generators that a step may sample from, besides the global ones, on exit."""
    generators = {id(g): g for g in (_reached(root) | _of_files(root, _is_generator)).values()}
    states = list(map(_state_and_setter, generators.values()))
    try:
        yield
    finally:
        for state, put_back in states:
            put_back(state)


def _state_and_setter(generator: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Returns the state of a generator, and what gives it another."""
    if isinstance(generator, SobolEngine):
        engine = generator
        go_to = lambda number: engine.reset().fast_forward(number) if number else engine.reset()
        return engine.num_generated, go_to
    if isinstance(generator, random.Random):
        return generator.getstate(), generator.setstate
    bits = getattr(generator, "bit_generator", None)
    if bits is not None:
        return bits.state, partial(setattr, bits, "state")
    return generator.get_state(), generator.set_state


def _of_files(root: nn.Module, wanted: Callable[[Any], bool]) -> dict[str, Any]:
    """Returns generators at the level of the files that define the modules, by name."""
    files = {kind.__module__ for module in root.modules() for kind in type(module).__mro__}
    return {
        f"{file}.{name}": value
        for file in files & sys.modules.keys()
        for name, value in vars(sys.modules[file]).items()
        if type(value) not in _NO_GENERATORS and wanted(value)
    }


# What files name most.
_NO_GENERATORS = {type, dict, str, types.FunctionType, types.ModuleType}


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif not isinstance(value, nn.Module | torch.Tensor | type) and hasattr(value, "__dict__"):
        yield from ((f".{key}", item) for key, item in vars(value).items())


def _is_generator(value: Any) -> bool:
    return _is_host(value) or (isinstance(value, torch.Generator) and not rng.is_global(value))


def _is_host(value: Any) -> bool:
    if isinstance(value, random.Random | SobolEngine):
        return not isinstance(value, random.SystemRandom)  # which has no state
    return isinstance(value, np.random.Generator | np.random.RandomState)


def _state_of(generator: Any) -> bytes:
    # Not the generator, of which a class of the user's own may not be picklable.
    return pickle.dumps(_state_and_setter(generator)[0])


class _Missing(int):
    """Stands for an attribute that is not there, from which a step counts as from 0."""


_MISSING = _Missing()
_NEEDS_GRADIENT = "requires_grad"
FLAGGING = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]


class AttributeWrites:
    """Notes what a step sets in modules, and whether parameters need gradients, while it is active.

    Args:
        between: Callback: whether the code that runs now is between layers of the fine graph.
        inside: Callback: whether it is inside of a layer, which may hold several of the fine graph.
    """

    def __init__(
        self, root: nn.Module, between: Callable[[], bool], inside: Callable[[], bool]
    ) -> None:
        self._between, self._inside, self.num_set = between, inside, 0
        self._root, self._kinds = root, {type(module) for module in root.modules()}
        self._weights = {
            id(module): module._parameters | module._buffers for module in root.modules()
        }
        self._swapped: set[Attribute] = set()
        self._modules = {id(module): name for name, module in root.named_modules()}
        self._parameters = {id(parameter): name for name, parameter in root.named_parameters()}
        self._before: dict[Attribute, tuple[Any, Any]] = {}
        self._unmoved: set[Attribute] = set()
        self._moved: set[Attribute] = set()
        self._set: dict[Attribute, Any] = {}
        self._at_layer: dict[Attribute, Any] = {}
        self._of_glue: set[Attribute] = set()
        self._of_layers: set[Attribute] = set()

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Records what is set in modules inside; of parameters, `record_flag` does.

        Their own classes are changed, as Python forgets all that it knows of a class and those below it whenever it
        is: below `nn.Module` are thousands.
        """
        recording = {"__setattr__": self._recording, "__delattr__": self._recording_deletion}
        replaced = [
            (kind, name, vars(kind).get(name), recorded(getattr(kind, name)))
            for kind in self._kinds
            for name, recorded in recording.items()
        ]
        for kind, name, _, recorder in replaced:
            setattr(kind, name, recorder)
        try:
            yield
        finally:
            for kind, name, before, _ in replaced:
                if before is None:
                    delattr(kind, name)
                else:
                    setattr(kind, name, before)

    def _recording_deletion(self, original: Callable[..., None]) -> Callable[..., None]:
        def delete_attribute(module: nn.Module, name: str) -> None:
            if (
                module_name := self._modules.get(id(module))
            ) is not None and name in module.__dict__:
                self._record((module_name, name), module, module.__dict__[name])
            original(module, name)

        return delete_attribute

    def _recording(self, original: Callable[..., None]) -> Callable[..., None]:
        def set_attribute(module: nn.Module, name: str, value: Any) -> None:
            before = _shown(module, name)
            original(module, name, value)
            owner = self._modules.get(id(module))
            # What is set to what it was may be set to something else by another microbatch: a coin, say.
            again = before is value and name != "training"
            if owner is not None and name in module.__dict__:
                self._set[owner, name] = value
                if again or before is not value:
                    self._record((owner, name), module, before)

        return set_attribute

    def record_flag(self, parameter: Any) -> None:
        """Records that it is about to be said whether a parameter needs a gradient."""
        if (name := self._parameters.get(id(parameter))) is not None:
            with torch._C.DisableTorchFunction():
                self._record((name, _NEEDS_GRADIENT), parameter, parameter.requires_grad)

    def _record(self, attribute: Attribute, owner: Any, before: Any) -> None:
        self.num_set += 1
        if attribute not in self._before:
            self._before[attribute] = owner, before
            self._unmoved.add(attribute)
        if self._between():
            self._of_glue.add(attribute)
        if self._inside():
            self._of_layers.add(attribute)

    def compare(self, layer: str) -> None:
        """Records what differs from the beginning of the step, when a layer is called or has returned."""
        path = layer.split(".")
        above = (self._root.get_submodule(".".join(path[:depth])) for depth in range(len(path)))
        inside = self._root.get_submodule(layer).modules()
        self._swapped |= self._other_weights(itertools.chain(above, inside))
        if self._unmoved:
            moved = {attribute for attribute in self._unmoved if not self._is_as_before(attribute)}
            self._unmoved -= moved
            self._moved |= moved
        self._at_layer = {attribute: self._now(attribute) for attribute in self._of_glue}

    def undo(self) -> None:
        """Restores what a step has set that ended with an error, but for notes of what is done once and for all."""
        for attribute, (_, before) in self._before.items():
            if not self._is_done_once(attribute):
                Attributes(self._root, [attribute]).restore([before])

    def toggled(self) -> frozenset[Attribute]:
        """Returns, when the step has ended, what differed in between."""
        swapped = self._swapped - self._other_weights(self._root.modules())
        return frozenset(swapped.union(filter(self._is_as_before, self._moved)))

    def left(self) -> frozenset[Attribute]:
        """Returns, when the step has ended, what was set between layers and not restored.

        Without notes of what is done once and for all.
        """
        left = self._of_glue - self.toggled()
        return frozenset(itertools.filterfalse(self._is_done_once, left))

    def _is_done_once(self, attribute: Attribute) -> bool:
        """Returns whether an attribute notes that something was done once and for all.

        A model of transformers notes that it has hooks, and would get them again in every run if its note were
        taken back. Such names are private; that of a coin which a step keeps is not.
        """
        owner, before = self._before[attribute]
        is_private = attribute[1].startswith("_")
        return is_private and before is _MISSING and owner.__dict__.get(attribute[1]) is True

    def counters(self) -> dict[Attribute, int]:
        """Returns, when the step has ended, integers that glue changed, and by how much after the last layer."""
        increments = {}
        for attribute in self.left():
            before, now = self._before[attribute][1], self._now(attribute)
            # One that is set again after the last layer may be anything but a first 1.
            counts = before is not _MISSING or attribute in self._at_layer or now == 1
            if type(now) is int and isinstance(before, int) and before != now and counts:
                # Where layers are stubs, what they count is there after the last one only.
                is_stubbed = attribute in self._of_layers
                last = before if is_stubbed else self._at_layer.get(attribute, before)
                increments[attribute] = now - last
        return increments

    def _other_weights(self, modules: Iterable[nn.Module]) -> set[Attribute]:
        """Returns parameters and buffers in whose place is, for now, another tensor, as in `functional_call`."""
        return {
            (self._modules[id(part)], name)
            for part in modules
            for name, before in self._weights.get(id(part), {}).items()
            if _table(part, name).get(name) is not before
        }

    def _now(self, attribute: Attribute) -> Any:
        """Returns what the step has set; that of a replay may put it back in the end."""
        attributes = self._before[attribute][0].__dict__
        return self._set.get(attribute, _MISSING) if attribute[1] in attributes else _MISSING

    def _is_as_before(self, attribute: Attribute) -> bool:
        owner, before = self._before[attribute]
        if isinstance(owner, nn.Module):
            return _same(before, self._now(attribute))
        with torch._C.DisableTorchFunction():
            return bool(owner.requires_grad == before)


def _table(module: nn.Module, name: str) -> dict[str, Any]:
    """Returns where a module has its parameter, buffer or attribute of this name."""
    tables = module._parameters, module._buffers
    return next((table for table in tables if name in table), vars(module))


def _shown(module: nn.Module, name: str) -> Any:
    """Returns a tensor or an attribute of a module, or else the number of its class that it hides."""
    of_class = inspect.getattr_static(type(module), name, _MISSING)
    return _table(module, name).get(name, of_class if type(of_class) is int else _MISSING)


def _same(value: Any, other: Any) -> bool:
    if value is other:
        return True
    parts = value if isinstance(value, list | tuple) else [value]
    is_plain = all(isinstance(part, CONSTANT_TYPES) for part in parts)
    return is_plain and type(value) is type(other) and bool(value == other)


def _owner(root: nn.Module, name: str) -> Any:
    parent, _, last = name.rpartition(".")
    module = root.get_submodule(parent)
    parameter = module._parameters.get(last)
    return module.get_submodule(last) if parameter is None else parameter


class Attributes:
    """Some attributes of modules and parameters, to be captured and restored."""

    def __init__(self, root: nn.Module, names: Collection[Attribute]) -> None:
        self._places = [(_owner(root, owner), attribute) for owner, attribute in names]

    def capture(self) -> list[Any]:
        """Returns the present values of the attributes."""
        return [
            _shown(owner, name) if isinstance(owner, nn.Module) else owner.requires_grad
            for owner, name in self._places
        ]

    def restore(self, values: Sequence[Any]) -> None:
        """Restores captured values."""
        for (owner, name), value in zip(self._places, values, strict=True):
            if not isinstance(owner, nn.Module):
                owner.requires_grad_(value)
            elif value is _MISSING:
                _table(owner, name).pop(name, None)
            else:
                _table(owner, name)[name] = value

    @contextlib.contextmanager
    def preserved(self) -> Iterator[None]:
        """Restores them on exit."""
        state = self.capture()
        try:
            yield
        finally:
            self.restore(state)


HOOKING = (Tensor.register_hook, Tensor.retain_grad)


class _NoHandle:
    """The handle of a hook that was never put."""

    def remove(self) -> None:
        """Does nothing, as there is no hook."""


class NoHooksWithoutGradients(TorchFunctionMode):
    """Inside, hooks are put on tensors that need gradients only; on others nothing happens."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in HOOKING and not args[0].requires_grad:
            return _NoHandle() if func is HOOKING[0] else None
        return func(*args, **(kwargs or {}))
