"""Frozen layers remembered: what a layer gave for a sample is stored, and returned the next time.

A frozen layer gives the same output for the same arguments, so its output for a sample is stored under a hash of
what it depends on: the layer's weights and structure, the sample's rows of every argument, and the size of the
group it ran in, as kernels are chosen by size, unless one group shall do for all. Nothing is declared, no sample
needs a number, and an argument that differs (another crop, a dropped caption) is simply another entry.

    arguments of a group -- per sample --> keys -- all known? --> outputs from the store
                                                 '-- else ----> run the whole group, store what was missing

New samples are not run alone, as a smaller group has other last bits.

What depends on noise or timesteps would never be found again. `repeatable` finds such layers by running the step
twice with different seeds; a VAE's posterior is sampled after its layers, so that its moments are stored and every
epoch samples again.
"""

import hashlib
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from lightning_diffpipe.errors import GraphError
from lightning_diffpipe.graph.calltree import tensors_in
from lightning_diffpipe.graph.frozen import FrozenView, relative_difference
from lightning_diffpipe.graph.layer import (
    CONSTANT_TYPES,
    Layer,
    LayerGraph,
    Opaque,
    SameAs,
    TensorSpec,
    dense_stride,
)
from lightning_diffpipe.graph.placement import is_placeholder
from lightning_diffpipe.graph.versions import bytes_of, circumstances, module_digest, version_of

_VERSION = 2


@dataclass(frozen=True)
class Entry:
    """The rows of each tensor of a layer's output for one sample, and its strides in that of the whole group."""

    tensors: tuple[Tensor, ...]
    strides: tuple[tuple[int, ...], ...]


class Store(Protocol):
    """A place for entries, by key."""

    def read(self, key: str) -> Entry | None:
        """Returns the entry of a key; None if there is none."""

    def write(self, key: str, entry: Entry) -> None:
        """Stores an entry."""


class LayerMemo:
    """Calls frozen layers through a store.

    Args:
        names: Modules that are remembered; calls of others just run.
        num_verified: Number of calls of each layer that were found and are computed all the same, and compared.
        any_size: Whether the result of a sample in a group of one size counts for all sizes: the same to rounding.
        changing: Indices of layers that are other calls of these modules, and just run.

    Attributes:
        found: Samples whose output was taken from the store, by layer.
        made: Samples that were computed, by layer.
        loaded: Gives the parameters of a layer their values inside, if they are offloaded.
    """

    def __init__(
        self,
        store: Store,
        names: frozenset[str],
        num_verified: int = 2,
        any_size: bool = False,
        changing: frozenset[int] = frozenset(),
    ) -> None:
        self.found, self.made = Counter[str](), Counter[str]()
        self.stores = True
        self.loaded: Callable[[Layer], AbstractContextManager[None]] = lambda layer: nullcontext()
        self._any_size = any_size
        self._store, self.names, self._changing = store, names, changing
        self._num_verified = num_verified
        self._verified: Counter[str] = Counter()
        self._digests: dict[int, tuple[str | None, list[tuple[int, int, int]]]] = {}

    def call(
        self, layer: Layer, module: nn.Module, args: Any, kwargs: Any, run: Callable[[], Any]
    ) -> Any:
        """Returns what a layer gives for these arguments; raises GraphError if something else is stored."""
        is_kept = layer.name in self.names and layer.index not in self._changing
        digest = self._digest(layer, module) if is_kept else None
        keys = None if digest is None else keys_of(layer, digest, args, kwargs, self._any_size)
        if keys is None:
            with self.loaded(layer):
                return run()
        entries = [self._store.read(key) for key in keys]
        stored = [entry for entry in entries if entry is not None]
        if len(stored) == len(keys):
            self.found[layer.name] += len(keys)
            tensors = tensors_in((args, kwargs))
            device = tensors[0].device if tensors else torch.device("cpu")
            remembered = _join(layer, stored, device)
            if self._verified[layer.name] < self._num_verified and not _is_away(module):
                self._verified[layer.name] += 1
                _compare(layer, remembered, run())
            return remembered
        self.made[layer.name] += len(keys)
        with self.loaded(layer):
            out = run()
        if self.stores:
            self._keep(layer, keys, entries, out)
        return out

    def _keep(
        self, layer: Layer, keys: Sequence[str], entries: Sequence[Entry | None], out: Any
    ) -> None:
        leaves = _tensor_leaves(layer, out)
        for sample, (key, entry) in enumerate(zip(keys, entries, strict=True)):
            if entry is None:
                rows = tuple(
                    (leaf[sample * n : (sample + 1) * n] if n else leaf).detach().cpu().contiguous()
                    for leaf, n in leaves
                )
                self._store.write(key, Entry(rows, tuple(dense_stride(leaf) for leaf, _ in leaves)))

    def _digest(self, layer: Layer, module: nn.Module) -> str | None:
        """Returns the digest of a layer; None from when its weights change, as each step would need another one."""
        if id(module) in self._digests and _is_away(module):
            return self._digests[id(module)][0]
        tensors = [*module.parameters(), *module.buffers()]
        # What changes when one is written, replaced or moved.
        state = [(id(tensor), version_of(tensor), tensor.data_ptr()) for tensor in tensors]
        if id(module) not in self._digests:
            self._digests[id(module)] = module_digest(module), state
        digest, state_before = self._digests[id(module)]
        if digest is None or state == state_before:
            return digest
        if module_digest(module) != digest:  # and not only moved
            digest = None
            warnings.warn(
                f"weights of {layer.name} were changed during training: it is computed from now on, and "
                "nothing that is stored of it is read",
                stacklevel=2,
            )
        self._digests[id(module)] = digest, state
        return digest


def _is_away(module: nn.Module) -> bool:
    return any(map(is_placeholder, module.parameters()))


def why_not_remembered(layer: Layer, graph: LayerGraph, min_flops_per_byte: float) -> str:
    """Returns what keeps a frozen layer from being remembered; empty if nothing does.

    One that computes less for each byte it gives than `min_flops_per_byte` is quicker run than read.
    """
    if layer.draws_random:
        return "draws random numbers inside; call .eval() on it, or sample outside of its forward"
    if any(isinstance(output, Opaque) for output in layer.outputs):
        return "returns objects that cannot be stored"
    if not layer.splits_samples:
        return "has arguments or outputs without a dimension of samples"
    if layer.cost_flops < min_flops_per_byte * graph.output_bytes(layer):
        return "is quicker to compute than to read"
    return ""


def repeatable(view: FrozenView, call: Callable[[], Any], seed: int) -> frozenset[int]:
    """Returns indices of layers whose arguments do not follow the random numbers of a step.

    The frozen layers run twice, with different seeds. A layer counts as repeatable if at least half of the samples
    bring the same arguments both times: noise changes all of them, caption dropout a few.
    """
    recorders = []
    for run in range(2):
        recorder = _Recorder()
        view.remember(recorder)
        try:
            view.whole(call, seed=seed + run)
        finally:
            view.remember(None)
        recorders.append(recorder.keys)
    first, second = recorders
    equal: Counter[int] = Counter()
    for (index, keys), (_, others) in zip(first, second, strict=True):
        equal[index] += sum(2 * (a == b) - 1 for a, b in zip(keys, others, strict=True))
    return frozenset(index for index, surplus in equal.items() if surplus >= 0)


class _Recorder:
    """A memo that remembers keys only."""

    def __init__(self) -> None:
        self.keys: list[tuple[int, list[str]]] = []

    def call(
        self, layer: Layer, module: nn.Module, args: Any, kwargs: Any, run: Callable[[], Any]
    ) -> Any:
        keys = keys_of(layer, "", args, kwargs) if layer.splits_samples else None
        if keys is not None:
            self.keys.append((layer.index, keys))
        return run()


def keys_of(
    layer: Layer, digest: str, args: Any, kwargs: Any, any_size: bool = False
) -> list[str] | None:
    """Returns a key for each sample of a call on a group of samples; None if an argument cannot be hashed.

    With `any_size` keys are the same for groups of all sizes.
    """
    flat, spec = pytree.tree_flatten((args, kwargs))
    rows = layer.argument_rows
    if rows is None or len(rows) != len(flat):
        return None
    counts = (len(x) // n for x, n in zip(flat, rows, strict=True) if isinstance(x, Tensor) and n)
    num_samples = next(counts, None)
    if num_samples is None:
        return None
    size = "any" if any_size else num_samples
    common = hashlib.sha256(f"{_VERSION} {layer.name} {digest} {size} {spec}".encode())
    common.update(circumstances().encode())
    of_sample: list[tuple[Tensor, int]] = []
    for value, n in zip(flat, rows, strict=True):
        if isinstance(value, Tensor):
            common.update(f"{value.dtype} {tuple(value.shape[1:])} {dense_stride(value)};".encode())
            if n:
                of_sample.append((value.detach().cpu(), n))
            else:
                common.update(bytes_of(value))
        elif isinstance(value, CONSTANT_TYPES):
            common.update(f"{value!r};".encode())
        else:
            return None
    keys = []
    for sample in range(num_samples):
        hashed = common.copy()
        for value, n in of_sample:
            hashed.update(bytes_of(value[sample * n : (sample + 1) * n]))
        keys.append(hashed.hexdigest())
    return keys


def _tensor_leaves(layer: Layer, out: Any) -> list[tuple[Tensor, int]]:
    """Returns the tensors of an output, each once, with their rows per sample."""
    flat = pytree.tree_leaves(out)
    return [
        (flat[leaf], spec.rows or 0)
        for leaf, spec in enumerate(layer.outputs)
        if isinstance(spec, TensorSpec)
    ]


def _join(layer: Layer, entries: Sequence[Entry], device: torch.device) -> Any:
    """Returns the output of a group, from the entries of its samples."""
    flat: list[Any] = []
    number = 0
    for expected in layer.outputs:
        if isinstance(expected, TensorSpec):
            rows = [entry.tensors[number] for entry in entries]
            stride = entries[0].strides[number]
            number += 1
            if not expected.rows:
                empty = torch.empty_strided(rows[0].shape, stride, dtype=rows[0].dtype)
                flat.append(empty.copy_(rows[0]).to(device))
                continue
            shape = (sum(row.shape[0] for row in rows), *rows[0].shape[1:])
            # In the order of dimensions of the group, which may have been larger or smaller.
            stride = dense_stride(torch.empty_strided(shape, stride, device="meta"))
            joined = torch.empty_strided(shape, stride, dtype=rows[0].dtype)
            torch.cat(rows, out=joined)
            flat.append(joined.to(device))
        elif isinstance(expected, SameAs):
            flat.append(flat[expected.leaf])
        else:
            flat.append(expected)
    return pytree.tree_unflatten(flat, layer.spec)


def _compare(layer: Layer, remembered: Any, computed: Any) -> None:
    """Requires stored and computed outputs to be equal, up to the rounding of kernels chosen by position."""
    pairs = zip(_tensor_leaves(layer, remembered), _tensor_leaves(layer, computed), strict=True)
    for (stored, _), (value, _) in pairs:
        difference = relative_difference(stored, value)
        tolerance = 1e4 * torch.finfo(value.dtype).eps if value.is_floating_point() else 0.0
        if difference > min(tolerance, 0.1):
            raise GraphError(
                f"the stored output of {layer.name} differs from what it gives now by {difference:.1e} "
                "of its largest value, for the same arguments and weights: it depends on something "
                "else. Delete the folder of stored encodings, and train without them"
            )
