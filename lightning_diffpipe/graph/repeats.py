"""Equal modules that are called with equal arguments are traced once.

Without values an operator takes a tenth of a millisecond of a processor, and the 57 blocks of Flux issue 9,300 of
them in each of three traces of a step. But they are blocks of two kinds. On fake tensors a call is decided by the
structure and the settings of its module, the shapes of its arguments, and the circumstances (autocast, whether
gradients are on). So the calls of two modules of a kind run. If they agree, the others get tensors of the same
shapes, which autograd connects with the same arguments and parameters, and the observer takes over its notes.

A call is taken for another one only if that has left no trace but its result: it wrote into no tensor and no
container that it was given, set no attribute, sampled no number on the host, read no tensor but its arguments and
its own weights, and returned nothing but new tensors, arguments and plain values. Modules with hooks, with
attributes that are more than plain values and objects made of such, or that share modules or parameters with
others, run each time.
"""

from __future__ import annotations

import contextlib
import enum
import operator
import types
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from lightning_diffpipe.graph import rng
from lightning_diffpipe.graph.fakes import TrackedFakeMode
from lightning_diffpipe.graph.layer import CONSTANT_TYPES, SameAs, storage_key
from lightning_diffpipe.graph.side_effects import num_transforms_around
from lightning_diffpipe.graph.versions import OF_EVERY_MODULE, autocasts

_HOOKS = tuple(name for name in OF_EVERY_MODULE if name.endswith(("_hooks", "_pre_hooks")))
_CONTAINERS = (list, tuple, dict)
_PLAIN = (*CONSTANT_TYPES, bytes, enum.Enum, type, types.BuiltinFunctionType, types.ModuleType)


class UnlikeError(Exception):
    """Something cannot be compared with others of its kind."""


@dataclass(frozen=True)
class _Made:
    """A tensor that a call returns: its shape, strides, type and device.

    `connected` are the arguments, by position among the leaves, and parameters, by name inside the module, that its
    gradient reaches; None if it needs none.
    """

    meta: tuple[Any, ...]
    connected: tuple[int | str, ...] | None


@dataclass(frozen=True)
class _Argument:
    index: int


@dataclass(frozen=True)
class Known:
    """The output of calls of a kind, as leaves of a tree, and what their observer has recorded."""

    spec: Any
    leaves: tuple[Any, ...]
    notes: Any


@dataclass(frozen=True)
class CallResults:
    """Results of calls of equal modules, of all copies of a module whose runs one kind of observer has seen.

    Attributes:
        structures: Numbers of modules, by what they compute by.
        ran: The first module that ran each call, and its result; None if that says nothing about others.
        known: Result that two modules gave for each call.
    """

    structures: dict[Hashable, int] = field(default_factory=dict)
    ran: dict[Hashable, tuple[str, Known | None]] = field(default_factory=dict)
    known: dict[Hashable, Known] = field(default_factory=dict)


class Repeats:
    """Recognises calls of modules, of those in `names`, that have run with equal ones in their place.

    A call of one of `layers` is also answered by its own run in an earlier trace, as its values leave it only by
    being returned.

    Attributes:
        candidates: Names of the modules of which there are others that are equal, outermost ones, and of layers.
    """

    def __init__(
        self,
        root: nn.Module,
        mode: TrackedFakeMode,
        names: Collection[str],
        call_results: CallResults,
        layers: Collection[str] = (),
    ) -> None:
        self._mode, self._call_results = mode, call_results
        self._earlier = dict(call_results.ran)
        self._parents = Counter(id(child) for m in root.modules() for child in m.children())
        self._owners = Counter(
            id(tensor)
            for module in root.modules()
            for tensors in (module._parameters, module._buffers)
            for tensor in tensors.values()
            if tensor is not None
        )
        self._names = {id(module): name for name, module in root.named_modules()}
        self._ids = dict[int, int | None]()
        for module in reversed(list(root.modules())):  # children before those that hold them
            self._number(module)
        repeated = {number for number, count in Counter(self._ids.values()).items() if count > 1}
        self.candidates: dict[str, nn.Module] = {}
        self._find(root, "", repeated - {None}, set(names))
        self.candidates |= {
            name: module
            for name, module in root.named_modules()
            if name in layers and self._ids[id(module)] is not None and any(module.children())
        }

    def call(self, name: str, args: Any, kwargs: Any, *more: Hashable) -> Call | None:
        """Returns a call that is about to be made; None if it must run, and nothing can be learnt from it.

        `more` is what else its observer's notes depend on.
        """
        module = self.candidates.get(name)
        if module is None:
            return None
        leaves, spec = pytree.tree_flatten((args, kwargs))
        first: dict[int, int] = {}
        try:
            arguments = tuple(
                (_meta(leaf), leaf.requires_grad, first.setdefault(storage_key(leaf), i))
                if isinstance(leaf, Tensor)
                else described(leaf)
                for i, leaf in enumerate(leaves)
            )
        except UnlikeError:
            return None
        where = torch.is_grad_enabled(), *autocasts(), torch.get_default_dtype()
        key = self._ids[id(module)], str(spec), arguments, where, more
        _, ran = self._call_results.ran.get(key, (name, ...))
        if num_transforms_around() or ran is None:
            return None
        return Call(self, key, name, module, (args, kwargs))

    def _number(self, module: nn.Module) -> int | None:
        """Returns a number that equal modules share; None for those that are like no other."""
        try:
            children = {name: self._ids.get(id(child)) for name, child in module.named_children()}
            if None in children.values():
                raise UnlikeError
            structure = self.structure_of(module), tuple(children.items())
        except UnlikeError:
            number = None
        else:
            numbers = self._call_results.structures
            number = numbers.setdefault(structure, len(numbers))
        self._ids[id(module)] = number
        return number

    def structure_of(self, module: nn.Module, but: str = "") -> Hashable:
        """Returns what a module itself computes by, but for one attribute, or raises UnlikeError."""
        attributes = vars(module)
        if self._parents[id(module)] > 1 or any(attributes.get(name) for name in _HOOKS):
            raise UnlikeError
        tensors = []
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None:
                tensors.append((name,))
                continue
            if self._owners[id(tensor)] > 1 or tensor._backward_hooks:
                raise UnlikeError
            tensors.append((name, _meta(tensor), tensor.requires_grad))
        path = self._names[id(module)]
        settings = tuple(
            (name, described(value, path))
            for name, value in attributes.items()
            if name not in OF_EVERY_MODULE and name != but
        )
        return type(module), tuple(tensors), settings

    def _find(
        self, module: nn.Module, name: str, repeated: Collection[int | None], names: set[str]
    ) -> None:
        for key, child in module.named_children():
            inside = f"{name}.{key}" if name else key
            if inside in names and self._ids[id(child)] in repeated and any(child.children()):
                self.candidates[inside] = child
            else:
                self._find(child, inside, repeated, names)

    def keep(self, key: Hashable, name: str, ran: Known | None) -> None:
        """Keeps what a call of a kind has returned; None if it says nothing about others."""
        first, before = self._call_results.ran.setdefault(key, (name, ran))
        if ran is None or ran != before:
            self._call_results.ran[key] = name, None
        elif first != name:
            self._call_results.known[key] = ran

    def known(self, key: Hashable, name: str) -> Known | None:
        """Returns what a call returns, if those of two modules have run and agreed, or it in an earlier trace."""
        first, ran = self._earlier.get(key, ("", None))
        return self._call_results.known.get(key) or (ran if first == name else None)

    def made(self, made: _Made) -> Tensor:
        """Returns a tensor without values."""
        with _disable_current_modes():
            return self._mode.empty(*made.meta)


class Call:
    """A call of one of several equal modules; `given` are its arguments, and `leaves` theirs."""

    def __init__(
        self, repeats: Repeats, key: Hashable, name: str, module: nn.Module, given: Any
    ) -> None:
        self._repeats, self._key, self._given = repeats, key, given
        leaves = pytree.tree_leaves(given)
        self._tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.name, self.module, self.leaves = name, module, leaves
        self.known = repeats.known(key, name)
        self.state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        if self.known is None:
            self._before = self._traces()

    def result(self) -> tuple[Any, list[Tensor]]:
        """Returns a result like that of the known call, without running this one, and the new tensors in it."""
        out: list[Any] = []
        new: list[Tensor] = []
        for leaf in self.known.leaves:
            if isinstance(leaf, _Argument):
                out.append(self.leaves[leaf.index])
            elif isinstance(leaf, SameAs):
                out.append(out[leaf.leaf])
            elif isinstance(leaf, _Made):
                out.append(self._connected(leaf))
                new.append(out[-1])
            else:
                out.append(leaf)
        return pytree.tree_unflatten(out, self.known.spec), new

    def keep(self, out: Any, notes: Any) -> None:
        """Keeps what the call has returned, if it has left no other trace.

        `notes` are what its observer has recorded; None if it saw what other calls cannot be taken to do.
        """
        ran = None
        with contextlib.suppress(UnlikeError):
            leaves, spec = pytree.tree_flatten(out)
            given = pytree.tree_leaves(self._given)
            is_given = len(given) == len(self.leaves) and all(map(operator.is_, given, self.leaves))
            if is_given and notes is not None and self._traces() == self._before:
                ran = Known(spec, tuple(self._kept(leaves)), notes)
        self._repeats.keep(self._key, self.name, ran)

    def inside(self, names: Iterable[str]) -> tuple[str, ...] | None:
        """Returns names of modules inside the module as it calls them; None if one is elsewhere."""
        names = list(names)
        if not all(name.startswith(self.name + ".") for name in names):
            return None
        return tuple(name[len(self.name) :] for name in names)

    def _traces(self) -> Any:
        """Returns what a call may change besides what it returns."""
        tensors = [*self._tensors, *self.state.values()]
        now = [id(tensor) for tensor in self.module.buffers()]
        try:
            modules = self.module.modules()  # whose calls are observed by another `forward`
            structures = [self._repeats.structure_of(module, but="forward") for module in modules]
        except UnlikeError:
            structures = [object()]
        return [x._version for x in tensors], now, structures, rng.host_state()

    def _kept(self, leaves: list[Any]) -> Iterable[Any]:
        places = {id(leaf): i for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)}
        storages = {storage_key(tensor) for tensor in (*self._tensors, *self.state.values())}
        before: dict[int, int] = {}
        for index, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                if not isinstance(leaf, CONSTANT_TYPES):
                    raise UnlikeError
                yield leaf
            elif id(leaf) in places:
                yield _Argument(places[id(leaf)])
            elif id(leaf) in before:
                yield SameAs(before[id(leaf)])
            elif storage_key(leaf) in storages:
                raise UnlikeError
            else:
                before[id(leaf)] = index
                yield _Made(_meta(leaf), self._reached(leaf) if leaf.requires_grad else None)

    def _reached(self, out: Tensor) -> tuple[int | str, ...]:
        """Returns the arguments and parameters below an output in the graph of autograd."""
        arguments = {
            (leaf.grad_fn, leaf.output_nr): i
            for i, leaf in enumerate(self.leaves)
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None
        }
        variables: dict[int, int | str] = {id(p): name for name, p in self.state.items()}
        variables |= {id(leaf): i for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)}
        reached: set[int | str] = set()
        seen: set[Any] = set()
        stack = [(out.grad_fn, out.output_nr)]
        while stack:
            node, number = stack.pop()
            if (node, number) in arguments:
                reached.add(arguments[node, number])
            elif node is not None and node not in seen:
                seen.add(node)
                variable = getattr(node, "variable", None)
                if variable is not None:
                    if id(variable) not in variables:
                        raise UnlikeError
                    reached.add(variables[id(variable)])
                stack.extend(node.next_functions)
        return tuple(sorted(reached, key=str))

    def _connected(self, made: _Made) -> Tensor:
        if made.connected is None:
            return self._repeats.made(made)
        sources = [self.leaves[x] if isinstance(x, int) else self.state[x] for x in made.connected]
        connect: Any = _Connected.apply
        return connect(lambda: self._repeats.made(made), *sources)  # type: ignore[no-any-return]


class _Connected(torch.autograd.Function):
    """A tensor whose gradient reaches others."""

    @staticmethod
    def forward(ctx: Any, make: Any, *sources: Tensor) -> Tensor:
        ctx.save_for_backward(*sources)
        output: Tensor = make()
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, *(torch.empty_like(source) for source in ctx.saved_tensors)


def _meta(tensor: Tensor) -> tuple[Any, ...]:
    """Returns the form of a fake tensor, or raises UnlikeError if it has values."""
    if type(tensor) is not FakeTensor or tensor.constant is not None:
        raise UnlikeError
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


def described(value: Any, own: str = "", around: tuple[int, ...] = ()) -> Hashable:
    """Returns a description of a setting that equal settings share, or raises UnlikeError.

    As a setting, the module's name `own` does not distinguish modules; `around` are enclosing objects.
    """
    if isinstance(value, str) and "." in value and f".{own}".endswith(f".{value}"):
        return "own name", value.count(".")
    if isinstance(value, float):
        return float, repr(value)  # also what is no number
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, types.FunctionType):
        if value.__closure__:
            raise UnlikeError
        return value
    if id(value) in around:
        return "around", around.index(id(value))
    around = *around, id(value)
    if type(value) in _CONTAINERS:
        items = value.items() if isinstance(value, dict) else value
        return type(value), tuple(described(item, own, around) for item in items)
    if isinstance(value, Tensor | nn.Module):
        raise UnlikeError
    try:
        parts = value.__reduce_ex__(4)  # all that it consists of, as for a copy
    except Exception as error:
        raise UnlikeError from error
    if isinstance(parts, str):
        raise UnlikeError
    parts = [list(part) if isinstance(part, Iterator) else part for part in parts]
    return type(value), tuple(described(part, own, around) for part in parts)
