"""The origin of every value: a dispatch mode that tags storages with layers and parameters.

While the step runs once, every operator passes by. Its outputs get the union of the tags of its inputs, so that,
when a layer starts, the tags of what it reads tell exactly which outputs of earlier layers and which parameters it
depends on, through any amount of glue. No knowledge about architectures enters.

Storages are tagged, not tensor objects: autograd makes new objects for views. Tags are a `TensorKey` (an output of
a layer), `Folded` (of a container), a string (a parameter), `Leak` (made or changed inside a layer and not, or not
yet, returned by it), `Buffer`, `Hooked`, or None (data: random, or from a storage that is neither parameter nor
buffer).
"""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_diffpipe.errors import GraphError
from lightning_diffpipe.graph.calltree import (
    operator_cost,
    reads_values,
    tensors_in,
    written_tensors,
)
from lightning_diffpipe.graph.fakes import DEVICE_OF
from lightning_diffpipe.graph.layer import ContainerCall, FoldedOutput, Value, storage_key
from lightning_diffpipe.graph.rng import draws
from lightning_diffpipe.graph.side_effects import GeneratorDraws

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
