"""Several tensors of different types, sent as one message.

What crosses a stage boundary is rarely one tensor: a U-Net's skips, a time embedding, masks of another dtype.
Sending them one by one costs a rendezvous each, so a message packs them into one flat byte buffer. Its layout is
known on both ends beforehand (shapes, dtypes and strides travel with the layer graph), so no header is ever sent.

Strides stay: `torch.randn_like(x)` fills memory in the order of `x`'s strides, so a receiver that
laid a tensor out differently would sample other noise. Sampling needs no strides: its messages (`pack`, `unpack`)
have no padding either, so that the bytes counted are those of the papers' formulas.

Batches of a data loader, and results of layers in evaluation, are anything that can be pickled. Their tensors
travel outside the pickle, by any backend, and keep their strides (`pickled_value`), wherever they are, in
containers or deep inside an object such as a distribution: pickled along, they would keep their sender's device.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_diffpipe.graph.layer import TensorSpec, num_spanned

_DEVICE = "device"  # of a rank, each its own
_ALIGNMENT_BYTES = 16  # the widest element (complex128) may be viewed at any offset


@dataclass(frozen=True)
class MessageLayout:
    """Tensors of a message, in order, with the start of each in its flat buffer, and the length of that."""

    specs: tuple[TensorSpec, ...]
    offsets_bytes: tuple[int, ...]
    num_bytes: int

    @classmethod
    def of(cls, specs: Sequence[TensorSpec]) -> MessageLayout:
        """Lays out tensors one after the other, aligned."""
        offsets, end = [], 0
        for spec in specs:
            offsets.append(end)
            end += -(-spec.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return cls(tuple(specs), tuple(offsets), end)

    def empty(self, device: torch.device) -> Tensor:
        """Allocates the flat byte buffer of one message on `device`."""
        return torch.empty(self.num_bytes, dtype=torch.uint8, device=device)

    def pack(self, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
        """Copies tensors into one buffer, or views a single dense tensor without a copy.

        Returns:
            A flat `uint8` tensor of `num_bytes` bytes. It may share memory with the only tensor
            given, which must then stay unchanged until the message has left.
        """
        if len(tensors) == 1:
            tensor, spec = tensors[0].detach(), self.specs[0]
            lies_as_sent = tensor.device == device and tensor.stride() == spec.stride
            if lies_as_sent and spec.nbytes == self.num_bytes:
                return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        buffer = self.empty(device)
        with torch.no_grad():
            if tensors:
                torch._foreach_copy_(self.unpack(buffer), list(tensors))
        return buffer

    def unpack(self, buffer: Tensor) -> list[Tensor]:
        """Views the tensors of a message inside its buffer, strides as they were sent."""
        flat = {dtype: buffer.view(dtype) for dtype in {spec.dtype for spec in self.specs}}
        starts = {dtype: whole.storage_offset() for dtype, whole in flat.items()}
        return [
            flat[s.dtype].as_strided(s.shape, s.stride, starts[s.dtype] + at // s.dtype.itemsize)
            for s, at in zip(self.specs, self.offsets_bytes, strict=True)
        ]


_ALLOCATED_BYTES = 64  # bytes; of everything torch allocates


class TensorShape(NamedTuple):
    """All that a receiver must know about a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @classmethod
    def of(cls, tensor: Tensor) -> TensorShape:
        """Returns the shape of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype)


def packed_shape(shapes: Sequence[TensorShape]) -> TensorShape:
    """Returns the shape of the message that holds tensors of some shapes: one as it is, several as bytes."""
    if len(shapes) == 1:
        return shapes[0]
    return TensorShape((sum(shape.nbytes for shape in shapes),), torch.uint8)


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Packs several tensors into one message; each is copied once, whatever its strides."""
    if len(tensors) == 1:
        return tensors[0]
    shapes = [TensorShape.of(x) for x in tensors]
    message = tensors[0].new_empty(packed_shape(shapes).shape, dtype=torch.uint8)
    places = message.split([shape.nbytes for shape in shapes])
    for place, x in zip(places, tensors, strict=True):
        if place.storage_offset() % x.element_size():
            place.copy_(as_bytes(x))
        else:
            place.view(x.dtype).view(x.shape).copy_(x)
    return message


def unpack(message: Tensor, shapes: Sequence[TensorShape], copy: bool = True) -> list[Tensor]:
    """Returns the tensors of a message.

    With `copy` each is in memory of its own, aligned as if it had been computed here; else views of the buffer, for
    those who only copy them elsewhere.
    """
    if len(shapes) == 1:
        return [message]
    pieces = message.split([shape.nbytes for shape in shapes])
    return [
        (p.clone() if copy or p.storage_offset() % s.dtype.itemsize else p)
        .view(s.dtype)
        .view(s.shape)
        for p, s in zip(pieces, shapes, strict=True)
    ]


def as_bytes(tensor: Tensor) -> Tensor:
    """Returns the memory of a tensor, or of a copy in one piece: gloo does not know every dtype."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def as_received(x: Tensor) -> Tensor:
    """Lays a tensor out as if it had come in a message, since strides and alignment decide about last bits."""
    stride = 1
    if not x.numel():  # such as the text of a patch without
        return x
    for size, actual in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        if actual != stride:
            return x.clone(memory_format=torch.contiguous_format)
        stride *= size
    return x.clone() if x.data_ptr() % _ALLOCATED_BYTES else x


@dataclass(frozen=True)
class PickledValue:
    """A value on its way to other ranks, with numbers in place of tensors.

    Specs of these have strides as they are, on the host, or on the device of each rank.
    """

    pickled: bytes
    specs: tuple[TensorSpec, ...]

    def empty(self, device: torch.device) -> list[Tensor]:
        """Allocates the tensors on a receiver with this device, to be filled by way of `flat_bytes`."""
        return [
            torch.empty_strided(
                spec.shape, spec.stride, dtype=spec.dtype,
                device=device if spec.device == _DEVICE else "cpu", requires_grad=spec.requires_grad,
            )
            for spec in self.specs
        ]  # fmt: skip

    def put_together(self, tensors: Sequence[Tensor], device: torch.device) -> Any:
        """Returns the value with the tensors that were received."""
        return _Unpickler(self.pickled, tensors, device).load()


def pickled_value(
    value: Any, device: torch.device, keeps_gradients: bool = True
) -> tuple[PickledValue, list[Tensor]]:
    """Returns a value for other ranks: a pickle, and its tensors, which travel outside it.

    Tensors that are not dense, and those of classes of their own, stay in the pickle. Receivers take their device
    for that of this rank. With `keeps_gradients` tensors need gradients where they do here; else none does.

    Raises:
        Exception: It cannot be pickled; of any type, from code of the value's own.
    """
    pickler = _Pickler(device, keeps_gradients)
    pickler.dump(value)
    return PickledValue(pickler.file.getvalue(), tuple(pickler.specs)), pickler.tensors


class _Pickler(pickle.Pickler):
    """Pickles a value but for its dense tensors, each of which gets a number, and the device of this rank."""

    def __init__(self, device: torch.device, keeps_gradients: bool) -> None:
        self.file = io.BytesIO()
        super().__init__(self.file, pickle.HIGHEST_PROTOCOL)
        self._device, self._keeps_gradients = device.type, keeps_gradients
        self.tensors: list[Tensor] = []
        self.specs: list[TensorSpec] = []
        self._numbers: dict[int, int] = {}
        self._alive: list[Tensor] = []  # so that no other object gets the id of a numbered one

    def persistent_id(self, value: Any) -> Any:
        """Returns what stands in the pickle for a tensor or the device; None for anything else."""
        if isinstance(value, torch.device) and value.type == self._device:
            return _DEVICE
        if not isinstance(value, Tensor):
            return None
        odd = type(value) is not Tensor or value.layout != torch.strided or value.is_quantized
        odd = odd or value.is_conj() or value.is_neg() or value.is_meta
        if odd or (self._keeps_gradients and value.grad_fn is not None):
            return (value.cpu(),) if value.device.type not in ("cpu", "meta") else None
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self.tensors)
            self._alive.append(value)
            dense = value.detach()
            if num_spanned(dense.shape, dense.stride()) > 2 * dense.numel():
                dense = dense.contiguous()
            shape, stride = tuple(dense.shape), tuple(dense.stride())
            self.tensors.append(dense)
            where = _DEVICE if dense.device.type == self._device else "cpu"
            needs_gradient = value.requires_grad and self._keeps_gradients
            self.specs.append(TensorSpec(shape, stride, dense.dtype, where, needs_gradient))
        return self._numbers[id(value)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, pickled: bytes, tensors: Sequence[Tensor], device: torch.device) -> None:
        super().__init__(io.BytesIO(pickled))
        self._tensors, self._device = tensors, device

    def persistent_load(self, stands: Any) -> Any:
        if stands == _DEVICE:
            return self._device
        return self._tensors[stands] if isinstance(stands, int) else stands[0].to(self._device)


def flat_bytes(tensor: Tensor) -> Tensor:
    """Returns the memory of a tensor, with the gaps between its elements; a view."""
    length = num_spanned(tensor.shape, tensor.stride())
    return tensor.detach().as_strided((length,), (1,)).view(torch.uint8)
