"""Trial runs of a step: to probe, time and verify it, and to find which layers a microbatch will call.

They leave no trace, and nobody sees them: what they change is restored, what they print or log is dropped. Hooks
on modules belong to the model and run; hooks on gradients of parameters do not. Not restored is what a step keeps
where nobody looks: in an object of C that shows no memory, in slots of an object that has a `__dict__`, too, or
in a Python file that defines no class of the model.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import itertools
import logging
import operator
import sys
import types
import warnings
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from lightning_diffpipe.graph import rng
from lightning_diffpipe.graph.fakes import SHARED_ATTRIBUTES
from lightning_diffpipe.graph.placement import has_own_tensors, own_tensors, readable
from lightning_diffpipe.graph.versions import version_of

HooksOf = Mapping[nn.Parameter, tuple[Mapping[int, Callable[..., Any]], ...]]
"""By parameter, hooks on its gradient and those that follow its accumulation, by number."""


_KINDS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class _Forwarding(OrderedDict[int, Callable[..., Any]]):
    """A mapping that is empty for torch, and forwards what is registered or removed to the hooks that it replaces.

    These refer to it, as the handles that `register_hook` returns do so weakly.
    """

    def __init__(self, hooks: Any) -> None:
        super().__init__()
        self.hooks = hooks
        hooks.forwarding = self

    @classmethod
    def of(cls, hooks: Any) -> _Forwarding:
        """Returns the one for these hooks; handles of hooks that were registered inside refer to it."""
        return hooks.forwarding if hasattr(hooks, "forwarding") else cls(hooks)

    def __setitem__(self, number: int, hook: Callable[..., Any]) -> None:
        self.hooks[number] = hook

    def __contains__(self, number: object) -> bool:
        return number in self.hooks

    def __delitem__(self, number: int) -> None:
        del self.hooks[number]


@contextlib.contextmanager
def hooks_off(parameters: Iterable[nn.Parameter]) -> Iterator[HooksOf]:
    """Turns the user's hooks on gradients of parameters off inside; gives those there are.

    They shall see the gradient of a batch, once, as in one process; a backward gives that of one microbatch, on one
    of several ranks. A hook may put another one, which is called from the next batch on.
    """
    with torch._C.DisableTorchFunctionSubclass():  # placeholders refuse slowly what is read of them
        hooked = [p for p in parameters if p._backward_hooks or p._post_accumulate_grad_hooks]
    replaced = [(p, k, old) for p in hooked for k in _KINDS if (old := getattr(p, k))]
    hooks = {p: tuple(getattr(p, kind) or {} for kind in _KINDS) for p, _, _ in replaced}
    for parameter, kind, old in replaced:  # with None in their place torch would still call some
        setattr(parameter, kind, _Forwarding.of(old))
    try:
        yield hooks
    finally:
        for parameter, kind, old in replaced:
            setattr(parameter, kind, old)


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_CONTAINERS = frozenset({list, dict, set, deque, defaultdict, OrderedDict, Counter})
_MOST_ENTRIES = 1000  # of a container that is searched for others: each step does
_MOST_BYTES = 2**20  # of a tensor that is copied in case it is written in place
_STATES: tuple[type, ...] = (bool, int, float, str, type(None), Tensor, np.ndarray)
_LIBRARIES = {"torch", "lightning", "lightning_utilities", "lightning_diffpipe"}
_WITHOUT_STATE = _LIBRARIES | sys.stdlib_module_names - {"types", "argparse"}  # but for namespaces
_MISSING = object()


class _Places:
    """What cells of a function, or slots of an object, hold, by number; as far as this file asks it, a dict."""

    def __init__(self, places: Sequence[tuple[Any, str]]) -> None:
        self._places = places

    def __setitem__(self, number: int, value: Any) -> None:
        object.__setattr__(*self._places[number], value)

    def copy(self) -> dict[int, Any]:
        held = {}
        for number, place in enumerate(self._places):
            try:
                held[number] = object.__getattribute__(*place)
            except (AttributeError, ValueError):  # nothing was put there yet
                continue
        return held

    def values(self) -> Iterable[Any]:
        return self.copy().values()

    def items(self) -> Iterable[tuple[int, Any]]:
        return self.copy().items()

    def __iter__(self) -> Iterator[int]:
        return iter(self.copy())

    def __len__(self) -> int:
        return len(self._places)

    def clear(self) -> None:
        for number in self.copy():
            object.__delattr__(*self._places[number])

    def update(self, before: Any) -> None:
        for number, value in dict(before).items():
            self[number] = value


_MAPPINGS = (dict, types.MappingProxyType, _Places)


def _cells_of(function: Any) -> Any:
    function = inspect.unwrap(function)  # as `torch.no_grad()` has wrapped it
    cells = getattr(function, "__closure__", None)
    if cells is None or _is_librarys(function.__globals__.get("__name__", "")):
        return None
    with contextlib.suppress(ValueError):  # a cell is empty
        if all(isinstance(cell.cell_contents, type) for cell in cells):  # for `super()`
            return None
    return _Places([(cell, "cell_contents") for cell in cells])


def _is_librarys(module: str) -> bool:
    return module.partition(".")[0] in _WITHOUT_STATE


def _holders(values: Sequence[Any], depth: int = 3) -> Iterator[Any]:
    """Yields containers among values, attributes of objects, and what is inside of them."""
    while values and depth:
        # Asked of each kind, as there are thousands of values, before each batch.
        entries_of = {kind: _entries_of(kind) for kind in set(map(type, values))}
        level = [entries(v) for v in values if (entries := entries_of[type(v)]) is not None]
        level = [each for each in level if each is not None]  # of functions with nothing to keep
        yield from level
        small = [entries for entries in level if len(entries) <= _MOST_ENTRIES]
        values = [v for e in small for v in (e.values() if isinstance(e, _MAPPINGS) else e)]
        depth -= 1


def _entries_of(kind: type) -> Callable[[Any], Any] | None:
    """Returns what gives the container that a value of some kind is or has; None if code keeps no state there."""
    if kind in _CONTAINERS or (issubclass(kind, dict) and kind.update is dict.update):
        return lambda value: value
    if kind is types.FunctionType:
        return _cells_of
    if issubclass(kind, nn.Module | Tensor | type) or _is_librarys(kind.__module__):
        return None
    if kind.__dictoffset__:
        return vars
    slots = [vars(base) for base in kind.__mro__ if "__slots__" in vars(base)]
    names = [n for s in slots for n in s if isinstance(s[n], types.MemberDescriptorType)]
    return (lambda value: _Places([(value, name) for name in names])) if names else None


class _Rewound(Iterator[Any]):
    """An iterator that trial runs read, which gives what they got of it once more; else it behaves like that.

    A copy would share what it iterates over with the iterator itself, if that is one as well, as of `zip`. What is
    sent into a generator, it gets at once, and not again.
    """

    def __init__(self, source: Any) -> None:
        self.source, self.read, self.position = source, deque[Any](), 0

    def __next__(self) -> Any:
        if self.position == len(self.read):
            self.read.append(next(self.source))
        if not in_trial.get():
            return self.read.popleft()
        self.position += 1
        return self.read[self.position - 1]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked for while there is no source yet
            raise AttributeError(name)
        return getattr(self.source, name)

    def __len__(self) -> int:
        return len(self.source)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"{self.source!r} after {self.position}"


_COUNTED = (int, float, str, _Rewound)
_ARRAYS = (Tensor, np.ndarray)


def _is_iterator(kind: type) -> bool:
    """Returns whether a kind is one of iterators whose state is nowhere but in them: other objects' is restored."""
    others = nn.Module | Tensor | type | io.IOBase
    return hasattr(kind, "__next__") and _entries_of(kind) is None and not issubclass(kind, others)


def _copied(holder: Any) -> Any:
    if not holder:
        return ()  # without memory of its own: most of a module's are empty
    return holder.copy() if type(holder) in {*_CONTAINERS, _Places} else dict(holder)


def _is_same(now: Any, before: Any) -> bool:
    """Returns whether a container holds the very objects that it held, in their order."""
    same = len(now) == len(before) and all(map(operator.is_, now, before))
    if same and now and isinstance(now, _MAPPINGS):
        return all(map(operator.is_, now.values(), before.values()))
    return same


def _rebind(owner: Any, before: Mapping[str, Any], kinds: tuple[type, ...]) -> None:
    """Gives a module, class or file those of its attributes back that are of some kinds."""

    def is_state(value: Any) -> bool:
        # Sites of `Interception`, which outlive a trial.
        is_site = hasattr(type(value), "diffpipe_original")
        return value is _MISSING or (isinstance(value, kinds) and not is_site)

    now = vars(owner)
    if _is_same(now, before):
        return
    for name in [*before.keys(), *(now.keys() - before.keys())]:
        old, new = before.get(name, _MISSING), now.get(name, _MISSING)
        if old is new or name.startswith("__") or not (is_state(old) and is_state(new)):
            continue
        if old is _MISSING:
            type.__delattr__(owner, name) if isinstance(owner, type) else now.pop(name)
        else:
            _put(owner, name, old)


def _put(owner: Any, name: Any, value: Any) -> None:
    """Sets an attribute of a module, class or file, or an entry of a dict or list."""
    if isinstance(owner, type):
        type.__setattr__(owner, name, value)
    else:
        (owner if isinstance(owner, dict | list | deque | _Places) else vars(owner))[name] = value


_users: weakref.WeakKeyDictionary[nn.Module, list[Any]] = weakref.WeakKeyDictionary()


def _users_code(root: nn.Module) -> list[Any]:
    """Returns the classes of modules that are no library's, and the files that define them."""
    if root not in _users:
        kinds = {kind for module in root.modules() for kind in type(module).__mro__}
        classes = [k for k in kinds if not _is_librarys(k.__module__)]
        files = {k.__module__ for k in classes} & sys.modules.keys()
        _users[root] = [*classes, *(sys.modules[file] for file in files)]
    return _users[root]


@contextlib.contextmanager
def _attributes_restored(
    root: nn.Module, modules: Sequence[nn.Module], alone: bool
) -> Iterator[None]:
    """Restores attributes of modules, classes and files, and what containers and objects among them hold.

    `alone` says that `modules` are all those of `root`; else a run may note what was done once and for all.
    """
    # The types of the attributes that are restored, by their owner.
    owners: dict[Any, tuple[type, ...]] = {root: (Iterator,)}
    owners |= dict.fromkeys(_users_code(root), (*_STATES, Iterator))
    owners |= dict.fromkeys(modules, (object,) if alone else (*_STATES, list, Iterator))
    values = [
        value
        for owner in owners
        for name, value in vars(owner).items()
        if name not in SHARED_ATTRIBUTES and name[:2] != "__"
        if alone or name not in _OF_EVERY_MODULE or name == "_buffers"
    ]
    owners |= {vars(root)[n]: _STATES for n in SHARED_ATTRIBUTES if vars(root).get(n) is not None}
    holders = list({id(each): each for each in _holders(values)}.values())
    # Parameters are not written by steps, and buffers are restored by themselves.
    tables = {id(vars(m).get(n)) for m in owners for n in ("_parameters", "_buffers", "_modules")}
    small = [h for h in holders if len(h) <= _MOST_ENTRIES and id(h) not in tables]
    with _iterators_rewound(owners, small):
        attributes = [(owner, _copied(vars(owner)) or {}, owners[owner]) for owner in owners]
        contents = [(holder, _copied(holder)) for holder in holders]
        for each in small:
            values += each.values() if isinstance(each, _MAPPINGS) else each
        try:
            with _written_restored(values):
                yield
        finally:
            for holder, before in contents:
                if not _is_same(holder, before):
                    holder.clear()
                    holder.extend(before) if hasattr(holder, "extend") else holder.update(before)
            for owner, before, kinds in attributes:
                _rebind(owner, before, kinds)


@contextlib.contextmanager
def _iterators_rewound(
    owners: Mapping[Any, tuple[type, ...]], holders: Sequence[Any]
) -> Iterator[None]:
    """Lets iterators among attributes and entries of containers give afterwards what they have given inside."""
    maps = [(owner, vars(owner)) for owner, kinds in owners.items() if kinds is not _STATES]
    maps += ((each, each) for each in holders if isinstance(each, dict | _Places))
    maps += ((each, dict(enumerate(each))) for each in holders if isinstance(each, list | deque))
    types = set[type]().union(*(map(type, entries.values()) for _, entries in maps))
    iterators = set(filter(_is_iterator, types))
    places = [
        (owner, name, value)
        for owner, entries in maps
        if not iterators.isdisjoint(map(type, entries.values()))
        for name, value in entries.items()
        if type(value) in iterators
    ]
    replays = {id(x): x if isinstance(x, _Rewound) else _Rewound(x) for _, _, x in places}
    for owner, name, value in places:
        _put(owner, name, replays[id(value)])
    positions = [replay.position for replay in replays.values()]
    try:
        yield
    finally:
        for replay, position in zip(replays.values(), positions, strict=True):
            replay.position = position
        for owner, name, value in places:
            if not (replay := replays[id(value)]).read:
                _put(owner, name, replay.source)


def plain_state(root: nn.Module) -> dict[str, list[Any]]:
    """Returns numbers, texts, small arrays and counts in attributes of modules (no metrics), classes and files."""
    codes = ((code.__name__, code) for code in _users_code(root))
    modules = ((name, m) for name, m in root.named_modules() if not has_own_tensors(m))
    held = lambda value: vars(value) if _entries_of(type(value)) is vars else value
    return {
        f"{prefix}.{name}".lstrip("."): [
            repr(leaf.tolist() if isinstance(leaf, _ARRAYS) else leaf)
            for leaf in pytree.tree_leaves(held(value))
            if isinstance(leaf, _COUNTED) or (isinstance(leaf, _ARRAYS) and _may_be_written(leaf))
        ]
        for prefix, owner in itertools.chain(modules, codes)
        for name, value in vars(owner).items()
        if name not in _OF_EVERY_MODULE and name[:2] != "__"
    }


def _may_be_written(value: Tensor | np.ndarray[Any, Any]) -> bool:
    """Returns whether a tensor or array is small, so that code may keep a state in it."""
    if isinstance(value, np.ndarray):
        return bool(value.flags.writeable) and value.nbytes <= _MOST_BYTES
    return (
        not (value.requires_grad or value.is_meta)
        and value.layout is torch.strided
        and 0 not in value.stride()  # torch refuses to write into expanded ones
        and value.nbytes <= _MOST_BYTES
    )


def _shows_memory(value: Any) -> bool:
    try:
        return not isinstance(value, np.ndarray) and not memoryview(value).readonly
    except (TypeError, ValueError, BufferError):
        return False


def _memory_of(value: Any) -> Any:
    """Returns a copy of an object whose memory can be written, such as an `array.array`; None of others."""
    try:
        view = memoryview(value)
        return copy.copy(value) if view.c_contiguous and view.nbytes <= _MOST_BYTES else None
    except (TypeError, ValueError, BufferError):
        return None


@contextlib.contextmanager
def _written_restored(values: Sequence[Any]) -> Iterator[None]:
    """Restores small tensors and arrays among values, however they are written in place."""
    written = [value for value in values if type(value) in (Tensor, np.ndarray)]
    states = list({id(value): value for value in written if _may_be_written(value)}.values())
    copies = [x.clone() if isinstance(x, Tensor) else x.copy() for x in states]
    shown = {kind for kind, value in {type(v): v for v in values}.items() if _shows_memory(value)}
    memories = [
        (v, before) for v in values if type(v) in shown and (before := _memory_of(v)) is not None
    ]
    versions = [version_of(x) if isinstance(x, Tensor) else 0 for x in states]
    try:
        yield
    finally:
        for memory, before in memories:
            if memoryview(memory).nbytes != memoryview(before).nbytes:
                memory[:] = before
            memoryview(memory).cast("B")[:] = memoryview(before).cast("B")
        for state, value, version in zip(states, copies, versions, strict=True):
            if isinstance(state, np.ndarray):
                state[...] = value
                continue
            if state.requires_grad and not state._is_view():
                state.detach_()  # the graph of what was added to it
            # Only what was written, as autograd may have saved it; a GPU would have to be waited for.
            is_host = state.device.type == "cpu"
            if not torch.equal(state, value) if is_host else version_of(state) != version:
                with torch.inference_mode(state.is_inference()):
                    state.copy_(value)


in_trial: ContextVar[bool] = ContextVar("in_trial", default=False)
"""Whether the step runs to find something out, and not to train."""


class _Muted:
    """A stream that drops what trial runs write, in whichever thread; what others write is passed on."""

    def __init__(self, shown: Any) -> None:
        self._shown = shown

    def write(self, text: str) -> int:
        return len(text) if in_trial.get() else int(self._shown.write(text) or 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shown, name)


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    """Hides what a step prints and logs inside; warnings, which come once only, are shown."""
    token, readers = in_trial.set(True), readable.set(True)
    show, handle = warnings.showwarning, logging.Logger.handle

    def shown(*args: Any, **kwargs: Any) -> None:
        inside = in_trial.set(False)
        try:
            show(*args, **kwargs)
        finally:
            in_trial.reset(inside)

    def handled(logger: logging.Logger, record: logging.LogRecord) -> None:
        is_own = record.name.startswith("lightning_diffpipe")
        if is_own or record.levelno >= logging.WARNING or not in_trial.get():
            handle(logger, record)

    warnings.showwarning, logging.Logger.handle = shown, handled  # type: ignore[method-assign]
    try:
        with (
            contextlib.redirect_stdout(_Muted(sys.stdout)),  # type: ignore[type-var]
            contextlib.redirect_stderr(_Muted(sys.stderr)),  # type: ignore[type-var]
        ):
            yield
    finally:
        warnings.showwarning, logging.Logger.handle = show, handle  # type: ignore[method-assign]
        in_trial.reset(token)
        readable.reset(readers)


@contextlib.contextmanager
def untouched(root: nn.Module, modules: Iterable[nn.Module] | None = None) -> Iterator[None]:
    """Makes the runs inside trials, which leave no trace: what they change is restored, what they print is hidden.

    Restored are buffers, metrics, random numbers, attributes of modules, of their classes and files, and lists,
    iterators and objects among these, but not inside of one with more than 1000 entries. Hooks on gradients of
    parameters are off. Tensors and arrays that are attributes are restored, too; those above 1 MiB, which may be
    tables, are not copied, so that what is written into them stays.

    Args:
        root: The module whose step is run; its lists and tensors are restored in any case.
        modules: Modules that the run may change otherwise; all if not given.
    """
    alone = modules is None
    modules = list(root.modules() if modules is None else modules)
    buffers = [b for module in modules for b in module._buffers.values() if b is not None]
    values = [buffer.detach().clone() for buffer in buffers]
    attributes = _attributes_restored(root, modules, alone)
    hooks = hooks_off(root.parameters() if alone else ())
    with _unseen(), hooks, rng.preserved(host=True), attributes:
        # A run changes copies: code that moved the states here may restore the tensors it found.
        for module, originals in own_tensors(modules):
            copies = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), originals)
            module.__dict__.update(copies)
        try:
            yield
        finally:
            with torch.no_grad():
                # Versions do not tell: batch norm changes its statistics without counting them up.
                for buffer, value in zip(buffers, values, strict=True):
                    buffer.copy_(value)
