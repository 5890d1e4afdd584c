"""Running a step once, and noting what its layers read, make and change.

A `Tracer` runs the step under `Provenance` and wraps three kinds of modules: layers, whose calls become records;
expanded containers, whose extent in the sequence of layers is recorded, and whether their own glue samples random
numbers; and, inside a folded layer, layers of the fine graph, which are counted, as each of them seeds a stream of
its own. Of several equal modules two are run (`repeats.py`).
"""

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_diffpipe.errors import GraphError
from lightning_diffpipe.graph import rng
from lightning_diffpipe.graph.calltree import (
    Forward,
    OwnFunctions,
    attributes_replaced,
    forward_replaced,
    inside_function,
    tensors_in,
)
from lightning_diffpipe.graph.interception import checkpointing_off
from lightning_diffpipe.graph.layer import (
    CONSTANT_TYPES,
    ContainerCall,
    LayerGraph,
    Opaque,
    SameAs,
    TensorSpec,
    storage_key,
)
from lightning_diffpipe.graph.provenance import LayerRecord, Observed, Provenance
from lightning_diffpipe.graph.repeats import Call, Repeats
from lightning_diffpipe.graph.side_effects import (
    FLAGGING,
    HOOKING,
    AttributeWrites,
    gradients_noticed,
    refuse_gradients,
    refuse_transformed,
)
from lightning_diffpipe.graph.step import LoggedMetric, logged_values
from lightning_diffpipe.graph.versions import autocasts

# Read the sizes of a packed sequence, their second argument, past the dispatcher.
_PACKED = {"_pad_packed_sequence", "lstm", "gru", "rnn_tanh", "rnn_relu"}


@dataclass(frozen=True)
class _CallNotes:
    """The record of a call inside a layer, to be taken over for an equal one.

    Attributes:
        arguments: The arguments that it reads, by position among the leaves.
        state: The module's own parameters and buffers that the call reads, by name inside the module.
        names: The modules that it calls, by name inside the module.
        fine_names: Names of them that are layers of the fine graph.
    """

    arguments: tuple[int, ...]
    state: tuple[str, ...]
    cost: int
    drew: bool
    names: tuple[str, ...]
    fine_names: tuple[str, ...]


_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


class _Functions(TorchFunctionMode):
    """Sees what the dispatcher does not: values that become Python objects, flags, hooks and generators."""

    def __init__(self, provenance: Provenance, attributes: AttributeWrites) -> None:
        super().__init__()
        self._provenance, self._attributes = provenance, attributes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":  # shapes and types, by far the most
            return func(*args)
        if name in ("numpy", "tolist", "__array__"):
            self._provenance.value_read(args)
        if name in _PACKED:
            lengths = [t for t in tensors_in(args[1:2]) if t.dtype == torch.int64]
            self._provenance.value_read(lengths)
        # `.to()` sets what is there.
        if func == _SET_DATA and storage_key(args[0]) != storage_key(args[1]):
            self._provenance.note_parameter_writes([args[0]])
        if func in HOOKING:
            self._provenance.hook(args[0], changes=func is HOOKING[0])
        if func in FLAGGING:
            self._attributes.record_flag(args[0])
        kwargs = kwargs or {}
        self._provenance.generators.note((*args, *kwargs.values()))
        return func(*args, **kwargs)


@contextlib.contextmanager
def calls_replaced(
    module: nn.Module,
    names: Collection[str],
    wrap: Callable[[str, Forward], Forward],
    log: Callable[[Any, Any], None] = lambda args, kwargs: None,
) -> Iterator[None]:
    """Wraps modules for a run of a probe: `self.log` calls `log(args, kwargs)`, and nothing is checkpointed."""
    sink = lambda *args, **kwargs: log(args, kwargs)
    methods = [(module, m, sink) for m in ("log", "log_dict") if hasattr(module, m)]
    with forward_replaced(module, names, wrap), attributes_replaced(methods), checkpointing_off():
        yield


class Tracer:
    """Runs a step once and keeps what its layers read.

    Args:
        module: Real, or a fake copy of `original`.
        layers: Modules whose outermost calls are layers.
        known: Tells the layers of the fine graph, to be counted inside folded ones, and which of them sample random
            numbers; None: these are the finest, and that is to be found out.
        watched: Modules whose calls are recorded besides.
    """

    def __init__(
        self,
        module: nn.Module,
        original: nn.Module | None,
        layers: Collection[str],
        containers: Collection[str],
        known: LayerGraph | None,
        fake: bool,
        watched: Collection[str] = (),
        repeats: Repeats | None = None,
    ) -> None:
        self.names, self._watched, self._repeats = list[str](), watched, repeats
        self.provenance = Provenance(module, original)
        self.attributes = AttributeWrites(
            module, lambda: not self._in_fine, lambda: self.provenance.current is not None
        )
        self.calls: list[ContainerCall] = []
        self.fine_names: list[str] = []
        self.logged: set[Any] = set()
        self.drew_host_random = False
        self.autocast: set[str] = set()
        self._module, self._layers, self._containers = module, set(layers), set(containers)
        self._fine = set(known.fine_names if known else layers)
        self._seeded, self._fake = known.seeded if known else (), fake
        self._buffers = dict(module.named_buffers())
        self._functions = OwnFunctions()
        self._in_fine = False

    @property
    def records(self) -> list[LayerRecord]:
        """The layers, in call order."""
        return self.provenance.records

    @property
    def called(self) -> set[str]:
        """Names of the layers and containers that were called."""
        return {record.name for record in (*self.records, *self.calls)}

    def run(self, call: Callable[[], Any]) -> Any:
        """Runs the step.

        Raises:
            LeakError: A layer must be expanded.
            GraphError: The step takes gradients itself, or reads parameters nobody registered.
        """
        names = self._layers.union(self._containers, self._fine, self._watched)
        if self._repeats is not None:
            names |= self._repeats.candidates.keys()
        between = lambda: self.provenance.current is None
        with (
            calls_replaced(self._module, names, self._wrap, self._log),
            gradients_noticed(lambda name: refuse_gradients(name) if between() else None),
            self._functions.counted(),
            _Functions(self.provenance, self.attributes),
            self.attributes.recorded(),
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
            self.names.append(name)
            if self.provenance.current is not None:
                return self._inside(name, forward, args, kwargs)
            if name in self._layers:
                self.attributes.compare(name)
                out = self._layer(name, forward, args, kwargs)
                self.attributes.compare(name)
                return out
            if name in self._containers:
                return self._container(name, forward, args, kwargs)
            return forward(*args, **kwargs)

        return traced

    def _inside(self, name: str, forward: Forward, args: Any, kwargs: Any) -> Any:
        if name not in self._fine or self._in_fine:
            return self._once(name, forward, args, kwargs)
        self.attributes.compare(name)
        with self._fine_call(name):
            return self._once(name, forward, args, kwargs)

    def _once(self, name: str, forward: Forward, args: Any, kwargs: Any) -> Any:
        """Runs a call inside a layer, unless an equal one has run."""
        repeats = self._repeats
        call = repeats and repeats.call(name, args, kwargs, self._in_fine, self._functions.depth)
        if call is None:
            return forward(*args, **kwargs)
        if call.known is not None:
            return self._repeated(call)
        num_names, num_fine = len(self.names), len(self.fine_names)
        num_set = self.attributes.num_set
        with self.provenance.observed() as observed:
            out = forward(*args, **kwargs)
        names, fine = call.inside(self.names[num_names:]), call.inside(self.fine_names[num_fine:])
        sets_nothing = num_set == self.attributes.num_set
        is_inside = sets_nothing and names is not None and fine is not None
        call.keep(out, _notes_of(call, out, observed, names, fine) if is_inside else None)
        return out

    def _repeated(self, call: Call) -> Any:
        """Notes what a call does that is not run, and returns what it would return."""
        record = self.provenance.current
        notes: _CallNotes = call.known.notes
        out, tensors = call.result()
        read = [*(call.leaves[i] for i in notes.arguments), *(call.state[k] for k in notes.state)]
        self.provenance.repeat(read, tensors, notes.cost, notes.drew)
        self.names += (call.name + name for name in notes.names)
        fine_names = [call.name + name for name in notes.fine_names]
        self.fine_names += fine_names
        record.num_fine += len(fine_names)
        record.num_seeds += sum(name in self._seeded for name in fine_names)
        return out

    @contextlib.contextmanager
    def _fine_call(self, name: str) -> Iterator[None]:
        record = self.provenance.current
        self._in_fine = True
        self.fine_names.append(name)
        record.num_fine += 1
        record.num_seeds += name in self._seeded
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
        mode, fine_start = self.provenance, len(self.fine_names)
        record = LayerRecord(len(self.records), name, set(mode.control), fine_start=fine_start)
        record.argument_dims = leading_dims((args, kwargs))
        self.autocast.update(map(" ".join, autocasts()))
        self.records.append(record)
        state, host_state = None if self._fake else rng.capture(host=False), rng.host_state()
        mode.current = record
        try:
            with self._fine_call(name) if name in self._fine else contextlib.nullcontext():
                out = self._once(name, forward, args, kwargs)
            record.reads |= mode.of(out)  # what is passed through
            record.written_buffers |= self._replaced(name)
        finally:
            mode.current = None
        if state is not None:
            record.drew = rng.moved(state) is not None
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
                is_constant = isinstance(value, CONSTANT_TYPES)
                record.outputs.append(value if is_constant else Opaque(type(value).__name__))
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


def _notes_of(
    call: Call, out: Any, observed: Observed, names: tuple[str, ...], fine_names: tuple[str, ...]
) -> _CallNotes | None:
    """Returns what is recorded of a call; None if it read something from elsewhere."""
    leaves = {i: storage_key(x) for i, x in enumerate(call.leaves) if isinstance(x, Tensor)}
    state = {name: storage_key(x) for name, x in call.state.items()}
    read = observed.read | set(map(storage_key, tensors_in(out)))  # also what is passed through
    if read - observed.made - {*leaves.values(), *state.values()}:
        return None
    arguments = tuple(i for i, key in leaves.items() if key in read)
    state_read = tuple(name for name, key in state.items() if key in read)
    return _CallNotes(arguments, state_read, observed.cost, observed.drew, names, fine_names)


def leading_dims(tree: Any) -> list[Any]:
    """Returns the size of dimension 0 of every tensor leaf (-1 for scalars), other leaves as text."""
    return [
        (leaf.shape[0] if leaf.ndim else -1)
        if isinstance(leaf, Tensor)
        else (repr(leaf) if isinstance(leaf, CONSTANT_TYPES) else type(leaf).__name__)
        for leaf in pytree.tree_leaves(tree)
    ]
