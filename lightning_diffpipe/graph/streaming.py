"""Streamed layers: frozen weights that lie in host memory, and are copied to the device while earlier layers run.

    stream = WeightStream(module, {name: streamable(module, graph)[name] for name in planned}, stages, device)
    stream.follow(names)                       # of the layers that the step runs, in order
    stream.call(name, partial(layer, x))       # whenever a streamed layer runs
    stream.rest()                              # placeholders again

There are two slots, each as large as the largest layer. While the layer in one of them runs, the next one is copied
to the other: on a GPU by a stream of its own, on a CPU by a thread. What `follow` foretells only saves time: a
layer that comes out of turn is copied when it comes.

A slot may be written again as soon as another layer runs. In the forward this is so, as a streamed layer is a
recomputed one, of which autograd keeps nothing. In the backward it is, as autograd takes nodes in the reverse order
of their making: the nodes of a layer are done before one of an earlier layer asks for its activations.

Weights that are to be quantized are so before their first copy: on the host and in slots lie their packed tensors,
and while a layer runs, its parameters are quantized ones whose tensors are parts of a slot.

Source:
    Rhu et al. (2016), https://arxiv.org/abs/1602.08124 (vDNN).
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_diffpipe.graph.layer import LayerGraph, num_spanned
from lightning_diffpipe.graph.placement import (
    filled_placeholders,
    host_value,
    keep_on_host,
    value_to_stream,
)
from lightning_diffpipe.graph.versions import plain_tensors, with_plain_tensors

_ALIGNMENT = 64  # bytes, of tensors in a slot

Weights = Mapping[str, nn.Parameter]
"""Parameters by name."""


def streamable(module: nn.Module, graph: LayerGraph) -> dict[str, Weights]:
    """Returns frozen weights inside of each layer of the trained path that nothing else reads, by layer.

    Those in 4 bits of the layers of bitsandbytes are none: for the backward, their kernel keeps the memory that it
    has read, and not as a saved tensor, which the recomputation would bring from where the weight is then.
    """
    named = dict(module.named_parameters())
    readers = Counter(name for layer in graph.layers for name in layer.parameters)
    readers.update(graph.tail_parameters)

    def is_streamable(name: str) -> bool:
        parameter = named[name]
        is_frozen = name not in graph.trained and not parameter.requires_grad
        is_known = type(parameter) is nn.Parameter or is_traceable_wrapper_subclass(parameter)
        return is_frozen and is_known and readers[name] == 1

    return {
        layer.name: {
            name: named[name]
            for name in sorted(layer.parameters & named.keys())
            if name.startswith(f"{layer.name}.") and is_streamable(name)
        }
        for layer in (graph.layers[index] for index in graph.path)
    }


class _Slot:
    """Memory for the frozen weights of one layer.

    Attributes:
        views: By layer, for each of its parameters the part of the memory where its value goes, or a quantized
            parameter of such parts.
        address: Address of the storage that the memory is a part of.
        layer: The layer whose weights it has, or will have when `wait` has returned.
        wait: Waits for the copy.
        values: While open, parameters of the layer have their values.
    """

    def __init__(self, memory: Tensor, layers: Mapping[str, Weights]) -> None:
        self.views = {name: _laid_out(_on_host(each), memory) for name, each in layers.items()}
        self.address = memory.untyped_storage().data_ptr()
        self.layer: str | None = None
        self.wait: Callable[[], Any] = lambda: None
        self.values = contextlib.ExitStack()


class WeightStream:
    """Weights of the streamed layers of a rank.

    Args:
        root: The module.
        layers: Offloaded parameters by layer, whose values are quantized, if they are to be, one after the other on
            the device, and pinned if that is a GPU.
        stages: Streamed layers by stage, in the order of the forward.

    Attributes:
        slot_bytes: Bytes of both slots.
        num_bytes_copied: Bytes copied to the device so far.
    """

    def __init__(
        self,
        root: nn.Module,
        layers: Mapping[str, Weights],
        stages: Mapping[int, Sequence[str]],
        device: torch.device,
    ) -> None:
        self.layers, self.stages, self.num_bytes_copied = layers, stages, 0
        self.slot_bytes = 2 * max(_put_on_host(weights, device) for weights in layers.values())
        self._modules = {name: root.get_submodule(name) for name in layers}
        self._device, self._runs, self._next = device, tuple[str, ...](), 0
        # Made when the first layer runs: with `encode_first`, encoders are there until then. The second one runs.
        self._slots: list[_Slot] = []
        if device.type == "cuda":
            self._side = torch.cuda.Stream(device)
        else:
            self._thread = ThreadPoolExecutor(1, "weights")

    def follow(self, runs: tuple[str, ...]) -> None:
        """Notes the layers that a step will run, in order; steps after it are expected to be alike."""
        self._runs, self._next = runs, 0

    def call(self, layer: str, run: Callable[[], Any]) -> Any:
        """Runs a layer with its weights; copies what of them it returns."""
        if not self._slots:
            memory = torch.empty(self.slot_bytes, dtype=torch.uint8, device=self._device)
            self._slots = [_Slot(half, self.layers) for half in memory.chunk(2)]
        slot = self._slot_of(layer)
        slot.wait()
        slot.values.close()
        slot.values.enter_context(filled_placeholders(slot.views[layer], self._modules[layer]))
        self._slots = [other for other in self._slots if other is not slot] + [slot]
        ahead = [*self._runs[self._next :], *self._runs[: self._next]]
        if layer in ahead:  # else it comes out of turn
            self._next = (self._next + ahead.index(layer) + 1) % len(ahead)
            self._slot_of(self._runs[self._next])
        out = run()

        def is_weight(value: Any) -> bool:
            return isinstance(value, Tensor) and value.untyped_storage().data_ptr() == slot.address

        if not any(map(is_weight, pytree.tree_leaves(out))):
            return out
        return pytree.tree_map(lambda value: value.clone() if is_weight(value) else value, out)

    def _slot_of(self, layer: str) -> _Slot:
        """Returns the slot that has the weights of a layer; begins to copy them to one if there is none."""
        for slot in self._slots:
            if slot.layer == layer:
                return slot
        slot = self._slots[0]
        slot.values.close()
        slot.layer = layer
        pairs = [
            pair for p, view in slot.views[layer].items() for pair in _pairs(view, host_value(p))
        ]
        self.num_bytes_copied += sum(value.nbytes for _, value in pairs)
        slot.wait = self._begin(pairs)
        return slot

    def _begin(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], Any]:
        """Begins to copy to the first tensor of each pair; returns what waits for the copies."""

        def copy() -> None:
            for view, value in pairs:
                view.copy_(value, non_blocking=True)

        if self._device.type != "cuda":
            return self._thread.submit(copy).result
        # What has been started so far may still read the slot.
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            copy()
            copied = self._side.record_event()
        return lambda: torch.cuda.current_stream(self._device).wait_event(copied)

    def rest(self) -> None:
        """Makes all parameters placeholders again; the slots keep what they have."""
        for slot in self._slots:
            slot.values.close()

    def forget(self) -> None:
        """Frees the slots, when no copy is under way any more: values on the host may have been written."""
        self.rest()
        for slot in self._slots:
            slot.wait()
        self._slots = []

    def close(self) -> None:
        """Frees the slots, and ends the thread."""
        self.forget()
        if self._device.type != "cuda":
            self._thread.shutdown()


def _on_host(weights: Weights) -> dict[nn.Parameter, Tensor]:
    return {parameter: host_value(parameter) for parameter in weights.values()}


def _put_on_host(weights: Weights, device: torch.device) -> int:
    """Quantizes weights of a layer that wait for it, and pins all if a GPU shall copy them; returns their bytes."""
    values = {p: value_to_stream(p, device) for p in weights.values()}
    size = sum(_room(each) for value in values.values() for each in plain_tensors(value))
    if device.type == "cuda":
        # Memory from which a GPU can copy by itself.
        pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        there = _laid_out(values, pinned)
        for parameter, value in values.items():
            for view, each in _pairs(there[parameter], value):
                view.copy_(each)
        values = there
    for parameter, value in values.items():
        keep_on_host(parameter, value)
    return size


def _pairs(value: Tensor, other: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields plain tensors of two values that are laid out alike."""
    yield from zip(plain_tensors(value), plain_tensors(other), strict=True)


def _spanned_bytes(tensor: Tensor) -> int:
    return num_spanned(tensor.shape, tensor.stride()) * tensor.element_size()


def _room(tensor: Tensor) -> int:
    """Returns bytes of a slot for a plain tensor."""
    size = _spanned_bytes(tensor)
    return size + -size % _ALIGNMENT


def _laid_out(values: Mapping[nn.Parameter, Tensor], memory: Tensor) -> dict[nn.Parameter, Tensor]:
    """Returns values with the types, shapes and strides of others in a memory; quantized ones as parameters."""
    start = 0

    def view(tensor: Tensor) -> Tensor:
        nonlocal start
        part = memory[start : start + _spanned_bytes(tensor)].view(tensor.dtype)
        start += _room(tensor)
        return part.as_strided(tensor.shape, tensor.stride())

    with torch.no_grad():
        views = {p: with_plain_tensors(value, view) for p, value in values.items()}
    return {
        p: each if type(each) is Tensor else nn.Parameter(each, False) for p, each in views.items()
    }
