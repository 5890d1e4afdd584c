"""The origin of every value: a dispatch mode that tags storages with layers and parameters.

While the step runs once, every operator passes by. Its outputs get the union of the tags of its inputs, so that,
when a layer starts, the tags of what it reads tell exactly which outputs of earlier layers and which parameters it
depends on, through any amount of glue. No knowledge about architectures enters.

Storages are tagged, not tensor objects: autograd makes new objects for views. Tags are a `TensorKey` (an output of
a layer), `Folded` (of a container), a string (a parameter), `Leak` (made or changed inside a layer and not, or not
yet, returned by it), `Buffer`, `Hooked`, or None (data: random, or from a storage that is neither parameter nor
buffer).

A `Tracer` runs the step under `Provenance` and wraps three kinds of modules: layers, whose calls become records;
expanded containers, whose extent in the sequence of layers is recorded, and whether their own glue samples random
numbers; and, inside a folded layer, layers of the fine graph, which are counted, as each of them seeds a stream of
its own. Of several equal modules two are run (`repeats.py`).
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_diffpipe.errors import GraphError
from lightning_diffpipe.graph import rng
from lightning_diffpipe.graph.calltree import (
    Forward,
    OwnFunctions,
    attributes_replaced,
    forward_replaced,
    inside_function,
    operator_cost,
    reads_values,
    tensors_in,
    written_tensors,
)
from lightning_diffpipe.graph.fakes import DEVICE_OF
from lightning_diffpipe.graph.interception import checkpointing_off
from lightning_diffpipe.graph.layer import (
    CONSTANT_TYPES,
    ContainerCall,
    FoldedOutput,
    LayerGraph,
    Opaque,
    SameAs,
    TensorSpec,
    Value,
    storage_key,
)
from lightning_diffpipe.graph.repeats import Call, Repeats
from lightning_diffpipe.graph.rng import draws
from lightning_diffpipe.graph.side_effects import (
    FLAGGING,
    HOOKING,
    AttributeWrites,
    GeneratorDraws,
    gradients_noticed,
    refuse_gradients,
    refuse_transformed,
)
from lightning_diffpipe.graph.step import LoggedMetric, logged_values
from lightning_diffpipe.graph.versions import autocasts

# Their schemas do not say that they change running statistics.
_BATCH_NORMS = {"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"}

# Shortens rows of an embedding that are read, each by itself and once: microbatches may do it one after the other.
_RENORMS = {"embedding_renorm_"}


@dataclass(frozen=True, slots=True)
class Leak:
    """Tag of a value that lives inside a layer."""

    layer: int


@dataclass(frozen=True, slots=True)
class Buffer:
    """Tag of what a buffer held when the step began."""

    name: str


@dataclass(frozen=True, slots=True)
class Hooked:
    """Tag of a tensor with a gradient hook of glue; hooks are numbered.

    `made` is the layer that was to come when the tensor was made, or an earlier one, `hooked` that when the hook
    was put.
    """

    made: int
    hooked: int
    number: int


@dataclass(frozen=True, eq=False, slots=True)
class Folded:
    """Tag of an output of a container, number `index` of `Provenance.folded`, with the tags of layers in it."""

    index: int
    tags: frozenset[Any]


class LeakError(Exception):
    """A value left a layer by another way than being returned; the layer has to be expanded."""

    def __init__(self, layer: int, reader: str) -> None:
        super().__init__(layer, reader)
        self.layer, self.reader = layer, reader


class EscapeError(Exception):
    """A fake copy reached back to the module it was copied from."""


@dataclass
class LayerRecord:
    """A layer while the probe runs."""

    index: int
    name: str
    reads: set[Any] = field(default_factory=set)
    nodes: list[Any] = field(default_factory=list)
    cost: int = 0
    drew: bool = False
    num_seeds: int = 0
    num_fine: int = 0
    fine_start: int = 0
    mutated: set[int] = field(default_factory=set)
    written_buffers: set[str] = field(default_factory=set)
    written_parameters: set[str] = field(default_factory=set)
    spec: Any = None
    outputs: list[Any] = field(default_factory=list)
    argument_dims: list[Any] = field(default_factory=list)
    output_dims: list[Any] = field(default_factory=list)


@dataclass
class Observed:
    """The work of a call inside a layer: storages it has read and made, `operator_cost`, whether it sampled."""

    read: set[int] = field(default_factory=set)
    made: set[int] = field(default_factory=set)
    cost: int = 0
    drew: bool = False


class Provenance(TorchDispatchMode):
    """Tags storages while a step runs; see the module docstring.

    Attributes:
        current: The layer being executed, None in glue.
        control: Tags that Python control flow may depend on from now on.
        generators: Those of its own that the step samples from.
        batch_writes: Tensors of the batch that were written, as `pytree.keystr` tells their places.
    """

    def __init__(self, module: nn.Module, original: nn.Module | None) -> None:
        super().__init__()
        self.records: list[LayerRecord] = []
        self.current: LayerRecord | None = None
        self.control: set[Any] = set()
        self.folded: list[FoldedOutput] = []
        self.glue_drew = False
        self.glue_writes: set[str] = set()
        self.glue_parameter_writes: set[str] = set()
        self.generators = GeneratorDraws(module)
        self.hooks: list[Hooked] = []
        self.changes_gradients = False
        self.batch_writes: set[str] = set()
        self._batch: dict[int, str] = {}
        self._read_buffers: set[int] = set()
        self._observed: list[Observed] = []  # calls inside a layer that run, outermost first
        self.paused = False
        self._tags: dict[int, tuple[StorageWeakRef, frozenset[Any]]] = {}
        self._owner: dict[int, tuple[int, int]] = {}
        self._buffer: dict[int, str] = {}
        self._parameter: dict[int, str] = {}
        self._parameters = {id(p) for p in module.parameters()}
        # Storages of the module a fake copy was made from: reading one means that the copy leaks.
        states = [*original.parameters(), *original.buffers()] if original else ()
        self._originals = set(map(storage_key, states))
        for name, buffer in module.named_buffers():
            self._buffer[self.set_tags(buffer, self._tags_of(buffer) | {Buffer(name)})] = name
        for name, parameter in module.named_parameters():
            self._parameter[self.set_tags(parameter, self._tags_of(parameter) | {name})] = name

    def watch_batch(self, batch: Any) -> None:
        """Notes from now on which tensors of a batch are written."""
        for path, leaf in pytree.tree_flatten_with_path(batch)[0]:
            if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
                self._batch[storage_key(leaf)] = pytree.keystr(path)

    def set_tags(self, tensor: Tensor, tags: Iterable[Any]) -> int:
        """Replaces the tags of a tensor's storage; the weak reference keeps its address unique. Returns its key."""
        storage, key = StorageWeakRef(tensor.untyped_storage()), storage_key(tensor)
        self._tags[key] = storage, frozenset(tags)
        return key

    def _tags_of(self, tensor: Tensor) -> frozenset[Any]:
        return self._tags.get(storage_key(tensor), (None, frozenset()))[1]

    def own(self, tensor: Tensor, key: tuple[int, int]) -> None:
        """Declares a tensor to be an output of a layer."""
        self.set_tags(tensor, {key})
        self._owner[storage_key(tensor)] = key

    def fold(self, call: ContainerCall, out: Any, arguments: Any) -> None:
        """Makes what a container returns one value each, besides what it only passes through."""
        passed = {storage_key(tensor) for tensor in tensors_in(arguments)}
        num_bytes: dict[int, int] = {}
        for tensor in tensors_in(out):
            size = tensor.numel() * tensor.element_size()
            num_bytes[storage_key(tensor)] = num_bytes.get(storage_key(tensor), 0) + size
        for tensor in {storage_key(t): t for t in tensors_in(out)}.values():
            tags = self._tags_of(tensor)
            parts = values(tags)
            if not parts or storage_key(tensor) in passed or any(isinstance(t, Leak) for t in tags):
                continue
            self.set_tags(tensor, {Folded(len(self.folded), unfolded(tags))})
            self.folded.append(FoldedOutput(call, num_bytes[storage_key(tensor)], parts))

    def _raw(self, tensors: list[Tensor]) -> set[Any]:
        tags: set[Any] = set()
        for tensor in tensors:
            key = storage_key(tensor)
            entry = self._tags.get(key)
            if entry is not None:
                tags |= entry[1]
                continue
            tags.add(None)
            if key in self._originals:
                raise EscapeError
            if isinstance(tensor, nn.Parameter) and id(tensor) not in self._parameters:
                raise GraphError(
                    f"the step reads a parameter of shape {tuple(tensor.shape)} that is not registered on "
                    "its module, so it would run on every stage; make its owner a submodule, e.g. "
                    "`self.encoder = encoder.requires_grad_(False)` instead of keeping it in a list"
                )
        return tags

    def of(self, tree: Any) -> set[Any]:
        """Returns tags of all tensors in a tree; raises LeakError if one lives inside another layer than this."""
        return self._outside(self._raw(tensors_in(tree)))

    def _outside(self, tags: set[Any]) -> set[Any]:
        """Returns tags without those of values inside the current layer; refuses those of values inside another."""
        inside = None if self.current is None else self.current.index
        for tag in tags:
            if isinstance(tag, Leak) and tag.layer != inside:
                reader = "code between layers" if self.current is None else self.current.name
                raise LeakError(tag.layer, reader)
        return {tag for tag in tags if not isinstance(tag, Leak)}

    def value_read(self, tree: Any) -> None:
        """Notes that a value becomes a Python object: all that follows may depend on it."""
        (self.control if self.current is None else self.current.reads).update(self.of(tree))
        for observed in self._observed:
            observed.read.update(map(storage_key, tensors_in(tree)))

    def hook(self, tensor: Tensor, changes: bool) -> None:
        """Notes a gradient hook that is put on a tensor, and may change its gradient.

        Only in glue do stages see parts of a gradient; one that is only retained may be a part.
        """
        self.changes_gradients |= changes
        if self.current is not None:
            return
        if not changes:
            self.hooks.append(Hooked(0, 0, len(self.hooks)))
            return
        tags = self.of(tensor)
        maker = 1 + max((tag[0] for tag in unfolded(tags) if isinstance(tag, tuple)), default=-1)
        self.hooks.append(Hooked(maker, len(self.records), len(self.hooks)))
        self.set_tags(tensor, tags | {self.hooks[-1]})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE_OF:
            return args[0].device
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        inputs = tensors_in((args, kwargs))
        raw = self._raw(inputs)
        read = self._outside(raw)
        name = func.overloadpacket.__name__
        # The random ones among `_like` depend on strides, too.
        is_like = name.endswith("_like") and not name.startswith("rand")
        reads_shape_only = name.startswith("new_") or is_like
        if reads_shape_only:
            read = set()
        if draws(func, args, kwargs):
            raw, read = raw | {None}, read | {None}
            if self.current is None:
                self.glue_drew = True
            else:
                self.current.drew = True
        input_keys = set(map(storage_key, inputs))
        self._read_buffers |= input_keys & self._buffer.keys()
        out = func(*args, **kwargs)
        if self.current is None and reads_values(func, args, kwargs):
            self.control |= read
        output_tags: Iterable[Any] = read
        if self.current is not None:
            self.current.reads |= read
            # Made of parameters and buffers only, as a cast weight is: every stage can make it again.
            if not all(isinstance(tag, str | Buffer) for tag in raw):
                output_tags = {Leak(self.current.index)}
            self.current.cost += operator_cost(func, args, kwargs, out)
        for tensor in tensors_in(out):
            if storage_key(tensor) not in input_keys:
                self.set_tags(tensor, output_tags)
        for observed in self._observed:
            observed.read |= set() if reads_shape_only else input_keys
            observed.made.update(set(map(storage_key, tensors_in(out))) - input_keys)
        if func._schema.is_mutable or name in _BATCH_NORMS:
            written = written_tensors(func, args, kwargs)
            if name not in _RENORMS:
                self.note_parameter_writes(written)
            self._note_writes(written, output_tags)
        return out

    @contextlib.contextmanager
    def observed(self) -> Iterator[Observed]:
        """Notes what a call inside a layer does."""
        observed, record = Observed(), self.current
        cost, drew, record.drew = record.cost, record.drew, False
        self._observed.append(observed)
        try:
            yield observed
        finally:
            self._observed.pop()
            observed.cost, observed.drew = record.cost - cost, record.drew
            record.drew |= drew

    def repeat(self, read: list[Tensor], made: list[Tensor], cost: int, drew: bool) -> None:
        """Notes what a call in a layer does that is not run: what it reads and makes, as operators would."""
        raw = self._raw(read) | ({None} if drew else set())
        outside = self._outside(raw)
        self.current.reads |= outside
        self.current.cost += cost
        self.current.drew |= drew
        keys = set(map(storage_key, read))
        self._read_buffers |= keys & self._buffer.keys()
        of_state = all(isinstance(tag, str | Buffer) for tag in raw)
        for tensor in made:
            self.set_tags(tensor, outside if of_state else {Leak(self.current.index)})
        for observed in self._observed:
            observed.read |= keys
            observed.made.update(map(storage_key, made))

    def note_parameter_writes(self, tensors: list[Tensor]) -> None:
        """Notes the parameters among tensors that glue or a layer changes."""
        names = {self._parameter[k] for k in map(storage_key, tensors) if k in self._parameter}
        writer = self.current
        (self.glue_parameter_writes if writer is None else writer.written_parameters).update(names)

    def _note_writes(self, tensors: list[Tensor], new: Iterable[Any]) -> None:
        inside = None if self.current is None else self.current.index
        for tensor in tensors:
            owner = self._owner.get(storage_key(tensor))
            if owner is not None and owner[0] != inside:
                self.records[owner[0]].mutated.add(owner[1])
            if (place := self._batch.get(storage_key(tensor))) is not None:
                self.batch_writes.add(place)
            is_own_state = False
            if (buffer := self._buffer.get(storage_key(tensor))) is not None:
                if self.current is None:
                    self.glue_writes.add(buffer)
                else:  # a module that updates running statistics of its own leaks nothing
                    self.current.written_buffers.add(buffer)
                    is_own_state = buffer.startswith(self.current.name + ".")
            if not is_own_state:
                self.set_tags(tensor, self._raw([tensor]).union(new))

    def keeps_state(self, old: Tensor, new: Tensor) -> bool:
        """Returns whether a buffer is replaced by what depends on its value before, or on layers.

        All else, such as a table for a length, comes out the same wherever it is made.
        """
        return storage_key(old) in self._read_buffers or bool(values(self._tags_of(new)))


def unfolded(tags: Iterable[Any]) -> frozenset[Any]:
    """Returns tags with those of layers in place of those of containers."""
    flat: set[Any] = set()
    for tag in tags:
        flat |= tag.tags if isinstance(tag, Folded) else {tag}
    return frozenset(flat)


def values(tags: Iterable[Any]) -> frozenset[Value]:
    """Returns outputs of layers and containers among tags."""
    return frozenset(
        tag.index if isinstance(tag, Folded) else tag
        for tag in tags
        if isinstance(tag, tuple | Folded)
    )


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
