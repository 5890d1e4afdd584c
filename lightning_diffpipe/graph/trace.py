"""One traced run of the step: layer calls become records, containers become spans.

The tracer wraps three kinds of modules: layers (traced), expanded containers (their extent in the
sequence of layers is noted, and whether their own glue draws random numbers) and, inside a folded
layer, the layers of the fine graph (counted, as each of them seeds a stream of its own).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
import torch.utils.checkpoint
from torch import Tensor, nn

from lightning_diffpipe.errors import GraphError
from lightning_diffpipe.graph import rng
from lightning_diffpipe.graph.calltree import (
    Forward,
    OwnFunctions,
    forward_replaced,
    inside_function,
)
from lightning_diffpipe.graph.interception import generator_name
from lightning_diffpipe.graph.layer import CONSTANT_TYPES, ContainerCall, Opaque, SameAs, TensorSpec
from lightning_diffpipe.graph.provenance import LayerRecord, Provenance, ValueReads
from lightning_diffpipe.graph.side_effects import (
    AttributeWrites,
    gradients_refused,
    refuse_transformed,
)
from lightning_diffpipe.graph.step import LoggedMetric, logged_values

LOG_METHODS = ("log", "log_dict")


@contextlib.contextmanager
def logging_replaced(module: nn.Module, sink: Callable[..., None]) -> Iterator[None]:
    """Sends `self.log` and `self.log_dict` to `sink(args, kwargs)` for the time of a probe."""
    saved = {name: module.__dict__.get(name) for name in LOG_METHODS if hasattr(module, name)}
    for name in saved:
        module.__dict__[name] = lambda *args, **kwargs: sink(args, kwargs)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                del module.__dict__[name]
            else:
                module.__dict__[name] = value


@contextlib.contextmanager
def checkpointing_off() -> Iterator[None]:
    """Lets checkpointed functions be called directly inside: it changes no value. Sees any binding."""
    module: Any = torch.utils.checkpoint
    generator, function = getattr(module, generator_name()), module.CheckpointFunction

    class Plain:
        @staticmethod
        def apply(run: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            return run(*args)

    def plain_generator(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    setattr(module, generator_name(), plain_generator)
    module.CheckpointFunction = Plain
    try:
        yield
    finally:
        setattr(module, generator_name(), generator)
        module.CheckpointFunction = function


class Tracer:
    """Runs a step once and keeps what its layers read.

    Args:
        module: The module that runs (a fake copy, or the real one).
        original: The module it is a copy of, if it is.
        layers: Modules whose outermost calls are layers.
        containers: Expanded modules.
        fine: Modules of the layers of the fine graph, to be counted inside folded layers.
        seeded: Those of them that draw random numbers; None: find out.
        fake: Values are fake, so that states of generators tell nothing.
    """

    def __init__(
        self,
        module: nn.Module,
        original: nn.Module | None,
        layers: Collection[str],
        containers: Collection[str],
        fine: Collection[str],
        seeded: Collection[str] | None,
        fake: bool,
    ) -> None:
        self.provenance = Provenance(module, original)
        self.attributes = AttributeWrites(module, lambda: not self._in_fine)
        self.calls: list[ContainerCall] = []
        self.fine_names: list[str] = []
        self.logged: set[Any] = set()
        self.drew_host_random = False
        self.autocast: set[str] = set()
        self._module, self._layers, self._containers = module, set(layers), set(containers)
        self._fine, self._seeded, self.fake = set(fine), seeded, fake
        self._buffers = dict(module.named_buffers())
        self._functions = OwnFunctions()
        self._in_fine = False

    @property
    def records(self) -> list[LayerRecord]:
        """The layers, in call order."""
        return self.provenance.records

    def run(self, call: Callable[[], Any]) -> Any:
        """Runs the step.

        Raises:
            LeakError: A layer must be expanded.
            GraphError: The step takes gradients itself, or reads parameters nobody registered.
        """
        names = self._layers | self._containers | self._fine
        inside = lambda: self.provenance.current is not None
        with (
            forward_replaced(self._module, names, self._wrap),
            logging_replaced(self._module, self._log),
            checkpointing_off(),
            gradients_refused(inside),
            self._functions.counted(),
            ValueReads(self.provenance),
            self.attributes.noted(),
            self.provenance,
        ):
            before = rng.host_state()
            out = call()
            self.provenance.glue_writes |= self._replaced("")
            self.drew_host_random = before != rng.host_state()
            return out

    def _log(self, args: Any, kwargs: Any) -> None:
        self.logged |= self.provenance.of((args, kwargs))
        for leaf in pytree.tree_leaves(logged_values(self._module, (args, kwargs))):
            if isinstance(leaf, LoggedMetric):
                metric = self._module.get_submodule(leaf.attribute)
                state = [value for name, value in vars(metric).items() if name in metric._defaults]  # type: ignore[operator]
                self.logged |= self.provenance.of([metric._forward_cache, state])

    def _wrap(self, name: str, forward: Forward) -> Forward:
        def traced(*args: Any, **kwargs: Any) -> Any:
            if self.provenance.current is not None:
                return self._inside(name, forward, args, kwargs)
            if name in self._layers:
                self.attributes.look()
                out = self._layer(name, forward, args, kwargs)
                self.attributes.look()
                return out
            if name in self._containers:
                return self._container(name, forward, args, kwargs)
            return forward(*args, **kwargs)

        return traced

    def _inside(self, name: str, forward: Forward, args: Any, kwargs: Any) -> Any:
        if name not in self._fine or self._in_fine:
            return forward(*args, **kwargs)
        self.attributes.look()
        with self._fine_call(name):
            return forward(*args, **kwargs)

    @contextlib.contextmanager
    def _fine_call(self, name: str) -> Iterator[None]:
        record = self.provenance.current
        assert record is not None
        self._in_fine = True
        self.fine_names.append(name)
        record.num_fine += 1
        record.num_seeds += self._seeded is not None and name in self._seeded
        try:
            yield
        finally:
            self._in_fine = False

    def _container(self, name: str, forward: Forward, args: Any, kwargs: Any) -> Any:
        first, before = len(self.records), self.provenance.glue_drew
        self.provenance.glue_drew = False
        try:
            out = forward(*args, **kwargs)
        finally:
            drew = self.provenance.glue_drew
            call = ContainerCall(name, first, len(self.records), drew)
            self.calls.append(call)
            self.provenance.glue_drew = drew or before
        if call.stop > call.first:
            self.provenance.fold(call, out, (args, kwargs))
        return out

    def _layer(self, name: str, forward: Forward, args: Any, kwargs: Any) -> Any:
        if self._functions.depth:
            raise GraphError(inside_function(f"the code around {name}"))
        refuse_transformed(name)
        mode = self.provenance
        record = LayerRecord(
            len(self.records), name, set(mode.control), fine_start=len(self.fine_names)
        )
        record.argument_dims = leading_dims((args, kwargs))
        self.autocast |= {
            f"{kind} {torch.get_autocast_dtype(kind)}"
            for kind in ("cpu", "cuda")
            if torch.is_autocast_enabled(kind)
        }
        self.records.append(record)
        state, host_state = rng.capture(host=False), rng.host_state()
        mode.current = record
        try:
            with self._fine_call(name) if name in self._fine else contextlib.nullcontext():
                out = forward(*args, **kwargs)
            record.reads |= mode.of(out)  # what is passed through
            record.written_buffers |= self._replaced(name)
        finally:
            mode.current = None
        if not self.fake:
            record.drew = not _same(state, rng.capture(host=False))
        record.drew |= host_state != rng.host_state()
        return self._hand_out(record, out)

    def _replaced(self, name: str) -> set[str]:
        """Returns buffers of a module that were replaced since this was asked last: `self.mean = ...`.

        Those that a layer makes larger or smaller do not count: other ranks could not receive them.
        """
        before, now = self._buffers, dict(self._module.get_submodule(name).named_buffers(name))
        self._buffers = before | now
        return {
            key
            for key, buffer in now.items()
            if buffer is not (old := before.get(key, buffer))
            and self.provenance.keeps_state(old, buffer)
            and not (name and old.shape != buffer.shape)
        }

    def _hand_out(self, record: LayerRecord, out: Any) -> Any:
        """Gives every output a storage of its own, so that inputs passed through keep their tags."""
        flat, record.spec = pytree.tree_flatten(out)
        record.output_dims = leading_dims(out)
        seen: dict[int, int] = {}
        copies: list[Any] = []
        self.provenance.paused = True
        for leaf, value in enumerate(flat):
            if not isinstance(value, Tensor):
                known = isinstance(value, CONSTANT_TYPES)
                record.outputs.append(value if known else Opaque(type(value).__name__))
                copies.append(value)
            elif id(value) in seen:
                record.outputs.append(SameAs(seen[id(value)]))
                copies.append(copies[seen[id(value)]])
            else:
                seen[id(value)] = leaf
                record.outputs.append(TensorSpec.of(value))
                copies.append(value.clone())
                record.nodes.append(copies[-1].grad_fn)
                self.provenance.own(copies[-1], (record.index, leaf))
        self.provenance.paused = False
        return pytree.tree_unflatten(copies, record.spec)


def leading_dims(tree: Any) -> list[Any]:
    """Returns the size of dimension 0 of every tensor leaf (-1 for scalars), other leaves as text."""
    return [
        (leaf.shape[0] if leaf.ndim else -1)
        if isinstance(leaf, Tensor)
        else (repr(leaf) if isinstance(leaf, CONSTANT_TYPES) else type(leaf).__name__)
        for leaf in pytree.tree_leaves(tree)
    ]


def _same(a: rng.RandomState, b: rng.RandomState) -> bool:
    cuda = a.cuda is b.cuda or (a.cuda is not None and b.cuda is not None and a.cuda.equal(b.cuda))
    return a.cpu.equal(b.cpu) and cuda


def nodes_below(loss: Tensor) -> set[Any]:
    """Returns nodes of the autograd graph that a gradient of the loss reaches, found without running it."""
    seen: set[Any] = set()
    stack = [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        stack.extend(child for child, _ in node.next_functions)
    return seen
