"""Standing between the step and its modules, once and for all.

`forward` of some instances is replaced by a `Site`, which asks what is running: nothing (the call passes through,
or is refused if its parameters live elsewhere), or a *run* of some view, which decides. The run is found in a
context variable, so that a paused run in one thread and an active one in another coexist. Nothing else about the
module changes.

Activation checkpointing is intercepted, too: called by glue around layers, it would recompute stubs. So the glue
calls the function itself, and the layers called meanwhile are checkpointed one by one. Reentrant checkpointing
hides parameters from autograd until backward and is replaced by the other kind.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch.utils.checkpoint
from torch import nn

from lightning_diffpipe.errors import ForeignLayerError
from lightning_diffpipe.graph.calltree import attributes_replaced, callable_modules, put_back
from lightning_diffpipe.graph.placement import is_placeholder, readable

# Around what several threads put in place and take away. Entered twice where a search for cycles, inside, frees a
# module whose sites are still in place.
_lock = threading.RLock()


class Run:
    """Somebody who runs a step in his own way; here nothing is checkpointed, and what is logged is passed on.

    Attributes:
        checkpointing: Layers called now are to be checkpointed.
        checkpointed: Something was checkpointed, so that a backward will compute it again.
    """

    checkpointing = checkpointed = False

    def call(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answers the call of a module."""
        raise NotImplementedError

    def log(self, method: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Answers `self.log` (method "log") or `self.log_dict`."""
        return original(*args, **kwargs)

    def checkpoints_layers(self) -> bool:
        """Returns whether a checkpoint called now would enclose layers."""
        return False


class Site:
    """Replaces `forward` of one module instance. A call costs about half a microsecond.

    A copy or pickle of the module gets an ordinary bound method instead.
    """

    __slots__ = (
        "__dict__", "_interception", "_variable", "attribute", "diffpipe_original", "foreign", "module", "name",
    )  # fmt: skip

    def __init__(self, interception: Interception, name: str, module: nn.Module) -> None:
        compiled = module._compiled_call_impl is not None
        self.attribute = "_compiled_call_impl" if compiled else "forward"
        self.diffpipe_original: Callable[..., Any] = getattr(module, self.attribute)
        self._interception, self._variable = interception, interception.variable
        self.name, self.module = name, module
        self.foreign = ""
        functools.update_wrapper(self, self.diffpipe_original)  # keeps inspect.signature(forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Lets the active run answer; without one, calls the module or refuses."""
        run = self._variable.get() or self._interception.recomputing
        if run is not None:
            return run.call(self, args, kwargs)
        if self.foreign:
            raise ForeignLayerError(self.foreign)
        return self.diffpipe_original(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        original = self.diffpipe_original
        if getattr(original, "__self__", None) is self.module:
            return types.MethodType(original.__func__, copy.deepcopy(self.module, memo))
        return copy.deepcopy(original, memo)

    def __reduce__(self) -> Any:
        return getattr, (self.module, "forward")


class Interception:
    """All sites of one module; `names` are those from the start, and views add what they need."""

    def __init__(self, root: nn.Module, names: Collection[str] = ()) -> None:
        self.root = root
        self.variable: ContextVar[Run | None] = ContextVar("run", default=None)
        # Autograd runs CUDA nodes in threads of its own, which inherit no context variables.
        self.recomputing: Run | None = None
        self._names, self._watched = set(names), set[str]()
        self._sites: dict[str, Site] = {}
        # Sites in place: how many want them, what was there before.
        self._placed: dict[str, tuple[int, Any]] = {}
        self._undo: contextlib.ExitStack | None = None

    def install(self) -> Interception:
        """Puts all sites in place. Installing twice does nothing."""
        if self._undo is None:
            self._undo = contextlib.ExitStack()
            methods = [(m, getattr(self.root, m, None)) for m in ("log", "log_dict")]
            logs = [(self.root, m, _LogSite(self, m, log)) for m, log in methods if callable(log)]
            self._undo.enter_context(attributes_replaced(logs))
            self._undo.enter_context(_checkpoints_intercepted(self))
            self.watch(())
        return self

    def uninstall(self) -> None:
        """Puts everything back as it was."""
        if self._undo is not None:
            self._undo.close()
        self._undo = None
        self._sites.clear()
        self._watched.clear()

    @contextlib.contextmanager
    def installed(self) -> Iterator[Interception]:
        """Keeps all sites in place inside."""
        try:
            yield self.install()
        finally:
            self.uninstall()

    @contextlib.contextmanager
    def uninstalled_on_error(self) -> Iterator[None]:
        """Uninstalls everything if the body raises; after it, wrappers stay."""
        try:
            yield
        except BaseException:
            self.uninstall()
            raise

    def watch(self, names: Collection[str]) -> None:
        """Intercepts more modules. Parts of a compiled module cannot be seen and are left out."""
        self._names |= set(names)
        new = self._names - self._watched
        if self._undo is not None and new:
            self._watched |= new
            self._undo.enter_context(self.also_watching(new))

    @contextlib.contextmanager
    def also_watching(self, names: Collection[str]) -> Iterator[None]:
        """Intercepts more modules for some time, so that they cost nothing later.

        Threads may do so in any order: what several want is released by the last of them.
        """
        with _lock:
            visible = set(callable_modules(self.root)) if not names <= self._sites.keys() else set()
            modules = dict(self.root.named_modules()) if visible else {}
            for name in names & visible - self._sites.keys():
                self._sites[name] = Site(self, name, modules[name])
            sites = [self._sites[name] for name in sorted(names & self._sites.keys())]
            for site in sites:
                attributes = site.module.__dict__
                users, before = self._placed.get(site.name, (0, attributes.get(site.attribute)))
                self._placed[site.name] = (users + 1, before)
                attributes[site.attribute] = site
        try:
            yield
        finally:
            with _lock:
                for site in sites:
                    users, before = self._placed.pop(site.name)
                    if users > 1:
                        self._placed[site.name] = (users - 1, before)
                    else:
                        put_back(site.module, site.attribute, before)

    def refuse(self, owners: Mapping[str, str]) -> None:
        """Lets calls of modules that hold placeholders fail outside a step, with a message that names the owner.

        `owners` are by parameter, e.g. "stage 2 (rank 1)".
        """
        inside: dict[str, tuple[str, str]] = {}
        for name, module in self.root.named_modules():
            parameters = module._parameters.items()
            missing = next((k for k, p in parameters if p is not None and is_placeholder(p)), None)
            if missing is None or not name:
                continue
            self._names.add(name)
            parts = name.split(".")
            for depth in range(len(parts), 0, -1):
                inside.setdefault(".".join(parts[:depth]), (name, missing))
        self.watch(())
        for name, site in self._sites.items():
            inner, parameter = inside.get(name, ("", ""))
            where = owners.get(f"{inner}.{parameter}", "another rank")
            site.foreign = inner and (
                f"{name} was called outside a pipeline step, but its parameters live on {where}. During training "
                "a rank holds its own stage only: call the model inside training_step, validation_step or "
                "test_step, which run on all ranks together, or inside `with trainer.strategy.whole_model():` on "
                "all ranks; or use a Predictor to sample"
            )

    @contextlib.contextmanager
    def running(self, run: Run | None) -> Iterator[None]:
        """Lets a run answer all calls of this thread."""
        token, readers = self.variable.set(run), readable.set(run is not None)
        try:
            yield
        finally:
            self.variable.reset(token)
            readable.reset(readers)

    @contextlib.contextmanager
    def recomputed_by(self, run: Run) -> Iterator[None]:
        """Lets a run answer the calls of threads that belong to autograd."""
        self.recomputing, before = run, self.recomputing
        try:
            yield
        finally:
            self.recomputing = before

    def current(self) -> Run | None:
        """Returns who answers calls of this thread."""
        return self.variable.get() or self.recomputing


class _LogSite:
    """Replaces `log` or `log_dict` of the root."""

    def __init__(self, interception: Interception, method: str, original: Any) -> None:
        self._interception, self._method, self._original = interception, method, original
        functools.update_wrapper(self, original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = self._interception.variable.get()
        if run is None:
            return self._original(*args, **kwargs)
        return run.log(self._method, self._original, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        root = copy.deepcopy(self._interception.root, memo)
        return types.MethodType(self._original.__func__, root)

    def __reduce__(self) -> Any:
        return getattr, (self._interception.root, self._method)


_SINCE_2_14 = "_checkpoint_without_reentrant_generator_impl"


def generator_name() -> str:
    """Names the code that `torch.utils.checkpoint` runs around a function that it checkpoints without reentrance.

    torch 2.14 keeps the older name, for others, and calls the newer one itself.
    """
    if hasattr(torch.utils.checkpoint, _SINCE_2_14):
        return _SINCE_2_14
    return "_checkpoint_without_reentrant_generator"


_attached: list[Interception] = []
_originals: dict[str, Any] = {}


@contextlib.contextmanager
def _checkpoints_intercepted(interception: Interception) -> Iterator[None]:
    """Intercepts `torch.utils.checkpoint` below its entry point, so that early bindings are seen, too.

    diffusers and transformers keep the function in attributes and partials; all of them end in the two
    module-level names replaced here.
    """
    module = torch.utils.checkpoint
    with _lock:
        _attached.append(interception)
        if not _originals:
            ours = {generator_name(): _generator, "CheckpointFunction": _ReentrantCheckpoint}
            for name, replacement in ours.items():
                _originals[name] = getattr(module, name)
                setattr(module, name, replacement)
    try:
        yield
    finally:
        with _lock:
            _attached.remove(interception)
            while _originals and not _attached:
                setattr(module, *_originals.popitem())


def _current() -> Run | None:
    runs = (interception.current() for interception in _attached)
    return next((run for run in runs if run is not None), None)


def _generator(function: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
    run = _current()
    if run is not None and run.checkpoints_layers():
        before, run.checkpointing = run.checkpointing, True
        try:
            yield
        finally:
            run.checkpointing = before
        return
    if run is not None:  # private streams are seeded again in recomputation
        run.checkpointed = True
        if generator_name() == _SINCE_2_14:
            kwargs["preserve_rng_state"] = True
        else:
            args = (True, *args[1:])
    yield from _originals[generator_name()](function, *args, **kwargs)


class _ReentrantCheckpoint:
    """Stands for `CheckpointFunction`: non-reentrant while a view runs."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        if _current() is None:
            return _originals["CheckpointFunction"].apply(function, preserve_rng_state, *args)
        return torch.utils.checkpoint.checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state
        )


class _WithoutCheckpoints(Run):
    """Takes every checkpoint for one around layers, none of which is checkpointed."""

    def checkpoints_layers(self) -> bool:
        return True


def checkpointing_off() -> contextlib.AbstractContextManager[None]:
    """Lets checkpointed functions be called directly inside, as a probe does: it changes no value."""
    everywhere = Interception(nn.Module())
    everywhere.recomputing = _WithoutCheckpoints()
    return _checkpoints_intercepted(everywhere)
