"""A training step as data, once it has been probed: its layers, their outputs, the readers of these.

A *layer* is one call of a module chosen by the probe. Everything between layers is *glue* and runs on every stage.
Layers form a directed acyclic graph in call order; a U-Net's skips are just edges of it.

    layer 0  unet.conv_in            reads {}                  -> (0, 0)
    layer 1  unet.down_blocks.0      reads {(0, 0)}            -> (1, 0) (1, 1) (1, 2)
    layer 2  unet.mid_block          reads {(1, 0)}            -> (2, 0)
    layer 3  unet.up_blocks.0        reads {(2, 0) (1, 2)}     -> (3, 0)

A tensor is named by a `TensorKey`: the index of its layer, and its position among the leaves of that layer's
output. All of this is plain data: picklable, and equal on all ranks (compare `digest`).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_diffpipe.errors import GraphError
from lightning_diffpipe.graph.step import BatchSpec, ModuleSplit

TensorKey = tuple[int, int]
"""(index of the layer, index of the tensor among the flattened leaves of the layer's output)."""

Attribute = tuple[str, str]
"""(qualified name of a module or parameter, name of its attribute)."""

FROZEN_SHARE = 0.1
"""A container whose frozen layers make more than this share of its cost stays expanded."""

CONSTANT_TYPES = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)
"""Stubs return outputs of these types as the probe saw them; they are compared where they are made."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and type of a tensor, so that memory for it can be reserved before it exists.

    Attributes:
        stride: Strides in elements, of the dense layout `torch.empty_like` would choose: random numbers of `*_like`
            fill memory in this order.
        device: Kind of device ("cpu", "cuda"); the index is this rank's business.
        rows: Rows of dimension 0 per sample; 0 if all samples share it, None if unknown.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str
    requires_grad: bool
    rows: int | None = None

    @classmethod
    def of(cls, tensor: Tensor, rows: int | None = None) -> TensorSpec:
        """Describes a tensor."""
        return cls(
            shape=tuple(tensor.shape),
            stride=dense_stride(tensor),
            dtype=tensor.dtype,
            device=tensor.device.type,
            requires_grad=tensor.requires_grad,
            rows=rows,
        )

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def of_samples(self, count: int) -> TensorSpec:
        """Describes the tensor of so many samples; the same where all share it, or nobody knows their rows."""
        if not self.rows:
            return self
        shape = (self.rows * count, *self.shape[1:])
        strided = torch.empty_strided(shape, self.stride, device="meta")
        return replace(self, shape=shape, stride=dense_stride(strided))

    def rows_of(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        """Returns the rows of some samples of such a tensor; all of it where they share it, or are unknown."""
        return tensor[start * self.rows : stop * self.rows] if self.rows else tensor

    def empty(self, device: torch.device | str | None = None) -> Tensor:
        """Reserves memory with the right strides, for receiving into."""
        place = device or self.device
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=place)

    def mismatch(self, tensor: Tensor) -> str:
        """Returns how a tensor differs in shape or type; empty if it does not."""
        if tensor.shape == self.shape and tensor.dtype == self.dtype:
            return ""
        return (
            f"{tensor.dtype} {tuple(tensor.shape)}, the probe saw {self.dtype} {tuple(self.shape)}"
        )


@dataclass(frozen=True, slots=True)
class SameAs:
    """An output leaf that is the very same tensor as an earlier leaf of the same layer."""

    leaf: int


@dataclass(frozen=True, slots=True)
class Opaque:
    """An output leaf of a type that cannot be sent to other stages."""

    type_name: str


@dataclass(frozen=True, slots=True)
class Layer:
    """One call of a chosen module.

    Attributes:
        reads: Tensors read by it, directly or through the glue that feeds it.
        parameters: Names of the parameters read by it or by the glue that feeds it.
        cost_flops: Forward cost: FLOPs of matrix products, elements written by all else.
        num_seeds: Numbers it takes from the stream of the glue to seed the private streams inside it.
        frozen: The value depends on no trained parameter, and neither it nor what it reads keeps state, so it may
            be computed in advance, anywhere.
        mutated: Output leaves that code outside writes in place.
        outputs: The leaves of the output: `TensorSpec`, `SameAs`, `Opaque` or a constant.
        argument_rows: For each leaf of (args, kwargs): rows per sample, 0 if shared by all samples, None if no
            tensor. None instead of the tuple if the layer cannot be cut into samples.
        fine: Half-open range of layers of the fine graph inside it.
        written_buffers: Names of the buffers it changes (running statistics).
        buffers: Names of the buffers it reads, its own and those of the glue that feeds it.
        written_parameters: Names of the parameters it changes (weights it normalizes itself).
        carries_gradient: A gradient of the loss reaches this call; not if it is made under `no_grad`, or detached.
    """

    index: int
    name: str
    reads: frozenset[TensorKey]
    parameters: frozenset[str]
    cost_flops: int
    num_seeds: int
    frozen: bool
    mutated: frozenset[int]
    spec: Any
    outputs: tuple[Any, ...]
    argument_rows: tuple[int | None, ...] | None = None
    fine: tuple[int, int] = (0, 0)
    written_buffers: frozenset[str] = frozenset()
    buffers: frozenset[str] = frozenset()
    written_parameters: frozenset[str] = frozenset()
    carries_gradient: bool = True

    @property
    def deps(self) -> frozenset[int]:
        """Indices of the layers whose outputs it reads."""
        return frozenset(layer for layer, _ in self.reads)

    @property
    def draws_random(self) -> bool:
        """Whether it samples random numbers."""
        return self.num_seeds > 0

    @property
    def tensor_keys(self) -> tuple[TensorKey, ...]:
        """Keys of all tensors among its outputs."""
        leaves = (i for i, out in enumerate(self.outputs) if isinstance(out, TensorSpec))
        return tuple((self.index, i) for i in leaves)

    @property
    def splits_samples(self) -> bool:
        """Whether shapes allow to run it on some of the samples only."""
        return self.argument_rows is not None and all(
            o.rows is not None for o in self.outputs if isinstance(o, TensorSpec)
        )


@dataclass(frozen=True, slots=True)
class ContainerCall:
    """One call of an expanded container: the layers `first` .. `stop - 1` were called inside it.

    Attributes:
        first: First layer called inside, or the next one to come if there is none.
        draws_random: Its own glue samples random numbers, so it must stay expanded (all stages sample them).
    """

    name: str
    first: int
    stop: int
    draws_random: bool


LeadingDims = tuple[list[Any], list[Any]]
"""Sizes of dimension 0 of all tensors among the arguments of a call, and among what it returns."""

Value = TensorKey | int
"""An output of a layer, or of a container: its position in `LayerGraph.folded`."""


@dataclass(frozen=True, slots=True)
class FoldedOutput:
    """An output of an expanded container, and its parts: one tensor, where the container is within one stage."""

    call: ContainerCall
    num_bytes: int
    parts: frozenset[Value]


@dataclass(frozen=True)
class LayerGraph:
    """Everything the probe found out about one callable and one batch signature.

    Attributes:
        tail_reads: Tensors read by the loss, by what is logged and by other results; likewise `tail_parameters`.
        fine_names: Module of every layer of the fine graph, in call order: the granularity at which random streams
            are seeded and frozen work can pause. Equal to `layer_names` before folding.
        seeded: Modules of the fine graph that get a private random stream.
        leaky: Containers that must stay expanded, as tensors leave them by other ways than returning.
        watched: Modules with parameters that the probe never saw called as glue or layer.
        host_random: The step samples from `random` or `numpy.random` as well.
        num_samples: Samples of the batch that was probed, None if unknown.
        mode: "fake", or "real" with the reason.
        streams: For each layer, and in the end for the loss, what is read with those as one value each, or empty.
        of_more_samples: Sizes with one sample more for calls of layers and containers, by name, first layer of the
            fine graph inside and one past the last; None if the step runs otherwise then, or fails, or if that of
            another batch told the rows per sample.
        glue_writes: Names of the buffers that glue changes; every stage changes a copy of its own.
        autocast: Under which autocast layers ran, such as `cuda torch.bfloat16`; that of a GPU leaves no other
            trace in a probe on the host.
        generators: Generators of random numbers besides the global ones that the step samples from.
        toggled: Attributes that differ somewhere in the step, and in the end are what they were.
        left: Further attributes that glue sets, and leaves.
        counters: Those of them that are whole numbers and change, with what is added after the last layer. None if
            the step could only be probed on values: what it counts is not known without them.
        hooks: For each gradient hook registered between layers the layers that read its tensor, or may have read
            it before; one past the last layer is the loss. Empty for `retain_grad`.
        changes_gradients: Hooks are put on tensors, by glue or inside of layers, or on modules, which may change
            gradients.
        batch_writes: Tensors of the batch that the step writes in place, as `pytree.keystr` tells their places.
        batch_spec: Parts of the planned batch that have one entry per sample, or the module's own way to cut it.
        call_results: Results of equal modules, for runs before training; see `repeats`.
    """

    layers: tuple[Layer, ...]
    tail_reads: frozenset[TensorKey]
    tail_parameters: frozenset[str]
    trained: frozenset[str]
    calls: tuple[ContainerCall, ...]
    fine_names: tuple[str, ...]
    seeded: frozenset[str]
    leaky: frozenset[str]
    watched: frozenset[str]
    host_random: bool
    signature: str
    num_samples: int | None
    mode: str = field(compare=False)
    folded: tuple[FoldedOutput, ...] = ()
    streams: tuple[frozenset[Value], ...] = ()
    of_more_samples: Mapping[tuple[str, int, int], LeadingDims] | None = field(
        default=None, compare=False, repr=False
    )
    glue_writes: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    glue_parameter_writes: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    autocast: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    generators: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    toggled: frozenset[Attribute] = field(default=frozenset(), compare=False, repr=False)
    left: frozenset[Attribute] = field(default=frozenset(), compare=False, repr=False)
    counters: Mapping[Attribute, int] = field(default_factory=dict, compare=False, repr=False)
    hooks: tuple[frozenset[int], ...] = field(default=(), compare=False, repr=False)
    changes_gradients: bool = field(default=False, compare=False, repr=False)
    batch_writes: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    batch_spec: BatchSpec | ModuleSplit | None = field(default=None, compare=False, repr=False)
    weighted: bool = False
    call_results: Any = field(default=None, compare=False, repr=False)

    @cached_property
    def path(self) -> tuple[int, ...]:
        """Indices of the layers of the trained path, in call order: what is cut into stages."""
        return tuple(layer.index for layer in self.layers if not layer.frozen)

    @cached_property
    def path_names(self) -> tuple[str, ...]:
        """Module of every layer of the trained path, in call order."""
        return tuple(self.layers[index].name for index in self.path)

    @cached_property
    def frozen(self) -> tuple[int, ...]:
        """Indices of the frozen layers, in call order."""
        return tuple(layer.index for layer in self.layers if layer.frozen)

    @cached_property
    def frozen_calls(self) -> frozenset[str]:
        """Modules around frozen layers, and no others."""
        inside = ((call.name, self.layers[call.first : call.stop]) for call in self.calls)
        return frozenset(
            name for name, layers in inside if layers and all(x.frozen for x in layers)
        )

    @cached_property
    def layer_names(self) -> tuple[str, ...]:
        """Module of every layer, in call order."""
        return tuple(layer.name for layer in self.layers)

    @cached_property
    def site_names(self) -> frozenset[str]:
        """Modules whose calls a view must see."""
        return frozenset(self.layer_names) | frozenset(self.fine_names) | self.watched

    @property
    def needs_values(self) -> bool:
        """Whether the step could only be probed on real values."""
        return self.mode.startswith("real")

    def stream(self, index: int) -> frozenset[Value]:
        """Returns what a layer reads, or after the last one the loss, with outputs of containers as one."""
        if self.streams:
            return self.streams[index]
        return self.layers[index].reads if index < len(self.layers) else self.tail_reads

    def spec(self, key: TensorKey) -> TensorSpec:
        """Returns what the tensor of a key looks like, or raises GraphError if there is none."""
        layer, leaf = key
        if 0 <= layer < len(self.layers) and 0 <= leaf < len(self.layers[layer].outputs):
            spec = self.layers[layer].outputs[leaf]
            if isinstance(spec, TensorSpec):
                return spec
        raise GraphError(f"{key} names no tensor of this graph of {len(self.layers)} layers")

    def needs_gradient(self, key: TensorKey) -> bool:
        """Returns whether a gradient for this tensor flows back to the stage that made it."""
        layer = self.layers[key[0]]
        return self.spec(key).requires_grad and layer.carries_gradient and not layer.frozen

    def is_mixed(self, call: ContainerCall) -> bool:
        """Returns whether a container holds trained layers and much frozen work."""
        layers = [self.layers[i] for i in range(call.first, call.stop)]
        total = sum(layer.cost_flops for layer in layers)
        frozen = sum(layer.cost_flops for layer in layers if layer.frozen)
        return not all(layer.frozen for layer in layers) and frozen > FROZEN_SHARE * total

    def output_bytes(self, layer: Layer) -> int:
        """Returns bytes of all tensors that a layer returns, for the batch that was probed."""
        return sum(self.spec(key).nbytes for key in layer.tensor_keys)

    @cached_property
    def folds(self) -> dict[Any, LayerGraph]:
        """Graphs of the same run with containers as layers, by what these are; see `probe.fold`."""
        return {}

    @cached_property
    def digest(self) -> str:
        """SHA-256 over all that stages must agree on; equal on all ranks, whatever their device."""
        lines = [self.signature, repr(sorted(self.tail_reads)), repr(sorted(self.tail_parameters))]
        lines += [repr(sorted(self.trained)), repr(self.fine_names), repr(sorted(self.seeded))]
        for layer in self.layers:
            lines.append(
                f"{layer.index} {layer.name} {layer.num_seeds} {layer.frozen} {layer.fine} "
            )
            lines.append(repr(layer.carries_gradient))
            lines.append(repr(tuple(map(sorted, (layer.reads, layer.parameters, layer.mutated)))))
            for out in layer.outputs:
                if isinstance(out, TensorSpec):
                    out = out.shape, out.stride, str(out.dtype), out.requires_grad
                lines.append(repr(out))
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def __str__(self) -> str:
        cost = sum(layer.cost_flops for layer in self.layers) or 1
        rows = [f"{len(self.layers)} layers, {len(self.frozen)} frozen, probed {self.mode}"]
        for layer in self.layers:
            kind = "frozen" if layer.frozen else "seeded" if layer.draws_random else ""
            share = 100 * layer.cost_flops / cost
            rows.append(f"{layer.index:4d} {share:5.1f}% {kind:6s} {layer.name}")
        return "\n".join(rows)


def dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """Returns strides that `torch.empty_like` would choose: those of the tensor where it is dense.

    Example:
        >>> dense_stride(torch.zeros(2, 3).t()), dense_stride(torch.zeros(1).expand(2, 3))
        ((1, 3), (3, 1))
    """
    if tensor.is_contiguous():
        return tuple(tensor.stride())
    return tuple(torch.empty_like(tensor, device="meta").stride())


def num_spanned(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Returns the number of elements of memory from the first to the last one of a tensor.

    Example:
        >>> num_spanned((2, 3), (3, 1)), num_spanned((2, 3), (1, 4)), num_spanned((0, 3), (3, 1))
        (6, 10, 0)
    """
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def storage_key(tensor: Tensor) -> int:
    """Returns what all tensors of one storage have in common, for as long as it is there."""
    return int(tensor.untyped_storage()._cdata)


def first_difference(expected: Sequence[str], got: Sequence[str]) -> str:
    """Names the first position at which two sequences of calls differ, for error messages.

    Example:
        >>> first_difference(["a", "b"], ["a", "c"])
        'call 1 is c, expected b'
    """
    for i, (a, b) in enumerate(zip(expected, got, strict=False)):
        if a != b:
            return f"call {i} is {b}, expected {a}"
    return f"{len(got)} calls, expected {len(expected)}"


def other_calls(expected: Sequence[str], got: Sequence[str]) -> str:
    """Returns the first difference of two sequences of calls and what to do about it, for error messages."""
    difference, before, now = first_difference(expected, got), Counter(expected), Counter(got)
    repeated = [name for name in before if now[name] != before[name]]
    if before.keys() != now.keys() or not repeated:
        return (
            f"{difference}. The step must call the same layers for every batch; move the branch inside the "
            "forward of one module"
        )
    name = repeated[0]
    return (
        f"{difference}. {name} is called {now[name]} times, and {before[name]} times where it was probed, as if "
        "once for each sample: call it once for all samples of a microbatch (vae.disable_slicing(); all captions "
        "in one call of the text encoder), or move the loop inside the forward of one module"
    )


def not_repeated(expected: Sequence[str], got: Sequence[str]) -> GraphError:
    """Returns the error of a call sequence that a step does not take again when it is to be probed."""
    return GraphError(
        f"the step does not call the same {len(expected)} layers again with the same random numbers, counts and "
        f"arguments ({first_difference(expected, got)}): something else decides, such as a count in a dict, a "
        "class or a file. Keep it as a whole number in an attribute of the module that is set before training "
        "(self.count = 0 in __init__), or let batch_idx or self.trainer.global_step decide"
    )
