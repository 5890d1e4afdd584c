"""Several tensors of known shapes as one message, without padding: what is counted is what the formulas say."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_diffpipe.sampling.links import TensorShape

_ALIGNMENT = 64  # bytes; of everything torch allocates


def packed_shape(shapes: Sequence[TensorShape]) -> TensorShape:
    """Of the message that holds tensors of some shapes: one as it is, several as bytes."""
    if len(shapes) == 1:
        return shapes[0]
    return TensorShape((sum(shape.nbytes for shape in shapes),), torch.uint8)


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """One message of several tensors; each is copied once, whatever its strides."""
    if len(tensors) == 1:
        return tensors[0]
    shapes = [TensorShape.of(x) for x in tensors]
    message = tensors[0].new_empty(packed_shape(shapes).shape, dtype=torch.uint8)
    places = message.split([shape.nbytes for shape in shapes])
    for place, x in zip(places, tensors, strict=True):
        if place.storage_offset() % x.element_size():
            place.copy_(x.contiguous().view(-1).view(torch.uint8))
        else:
            place.view(x.dtype).view(x.shape).copy_(x)
    return message


def unpack(message: Tensor, shapes: Sequence[TensorShape]) -> list[Tensor]:
    """The tensors of a message; each in memory of its own, aligned as if it had been computed here."""
    if len(shapes) == 1:
        return [message]
    return [p.clone().view(s.dtype).view(s.shape) for p, s in _pieces(message, shapes)]


def look_into(message: Tensor, shapes: Sequence[TensorShape]) -> list[Tensor]:
    """The tensors of a message where they lie, for those who only copy them elsewhere."""
    if len(shapes) == 1:
        return [message]
    return [
        (p.clone() if p.storage_offset() % s.dtype.itemsize else p).view(s.dtype).view(s.shape)
        for p, s in _pieces(message, shapes)
    ]


def _pieces(message: Tensor, shapes: Sequence[TensorShape]) -> Iterable[tuple[Tensor, TensorShape]]:
    return zip(message.split([shape.nbytes for shape in shapes]), shapes, strict=True)


def as_received(x: Tensor) -> Tensor:
    """The tensor laid out as if it had come in a message, since strides and alignment decide about last bits."""
    stride = 1
    for size, own in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        if own != stride:
            return x.clone(memory_format=torch.contiguous_format)
        stride *= size
    return x.clone() if x.data_ptr() % _ALIGNMENT else x
