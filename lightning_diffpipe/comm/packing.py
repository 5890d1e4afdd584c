"""Several tensors of different types, sent as one message.

What crosses a stage boundary is rarely one tensor: a U-Net's skips, a time embedding, masks of another
dtype. Sending them one by one costs a rendezvous each, so a message packs them into one flat byte
buffer. Its layout is known on both ends beforehand (shapes, dtypes and strides travel with the layer
graph), so no header is ever sent.

Strides stay: `torch.randn_like(x)` fills memory in the order of `x`'s strides, so a receiver that
laid a tensor out differently would draw other noise. Sampling needs no strides: its messages (`pack`, `unpack`)
have no padding either, so that the bytes counted are those of the papers' formulas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_diffpipe.graph.layer import TensorSpec

_ALIGNMENT_BYTES = 16  # the widest element (complex128) may be viewed at any offset


@dataclass(frozen=True)
class MessageLayout:
    """Where each tensor lies in the flat buffer of a message.

    Attributes:
        specs: Shape, strides and dtype of each tensor, in order.
        offsets_bytes: Start of each tensor in the buffer.
        num_bytes: Length of the buffer.
    """

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

        Args:
            tensors: One tensor for each spec, of its shape and dtype; autograd history is dropped.
            device: Where the buffer shall live.

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
        for view, tensor in zip(self.unpack(buffer), tensors, strict=True):
            view.copy_(tensor.detach())
        return buffer

    def unpack(self, buffer: Tensor) -> list[Tensor]:
        """Views the tensors of a message inside its buffer, strides as they were sent."""
        views = []
        for spec, offset in zip(self.specs, self.offsets_bytes, strict=True):
            flat = buffer[offset : offset + spec.nbytes].view(spec.dtype)
            views.append(flat.as_strided(spec.shape, spec.stride))
        return views


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

    Args:
        message: From `pack`.
        shapes: Of the tensors.
        copy: Each in memory of its own, aligned as if it had been computed here; else where they lie, for those who
            only copy them elsewhere.
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
    for size, own in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        if own != stride:
            return x.clone(memory_format=torch.contiguous_format)
        stride *= size
    return x.clone() if x.data_ptr() % _ALLOCATED_BYTES else x
