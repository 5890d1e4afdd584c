"""Messages: many tensors of any type in one buffer, exactly as they were."""

from collections import Counter, namedtuple

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from lightning_diffpipe.comm.mesh import Mesh, RankLayout
from lightning_diffpipe.comm.packing import MessageLayout, flat_bytes, pickled_value
from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.graph.layer import TensorSpec
from lightning_diffpipe.planning.schedule import Placement

CPU = torch.device("cpu")


def specs(*tensors):
    return [TensorSpec.of(tensor) for tensor in tensors]


def test_dtypes_mix_in_one_message():
    tensors = [
        torch.randn(3, 5), torch.randn(2, 2, dtype=torch.float64), torch.tensor([True, False, True]),
        torch.arange(7), torch.randn(3).to(torch.bfloat16), torch.randn(2, dtype=torch.complex64),
        torch.tensor(2.5), torch.empty(0, 4),
    ]  # fmt: skip
    layout = MessageLayout.of(specs(*tensors))
    received = layout.unpack(layout.pack(tensors, CPU).clone())
    assert all(
        torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(tensors, received, strict=True)
    )


def test_a_message_is_packed_by_one_operator_besides_a_view_of_each_tensor():
    """History: five operators for each tensor, and four to take it apart: a boundary of a U-Net has nine."""
    tensors = [torch.randn(2, size) for size in range(1, 10)]
    layout = MessageLayout.of(specs(*tensors))
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        buffer = layout.pack(tensors, CPU)
    packing = Counter({event.key: event.count for event in seen.key_averages()})
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        layout.unpack(buffer)
    unpacking = Counter({event.key: event.count for event in seen.key_averages()})
    assert packing["aten::as_strided"] == unpacking["aten::as_strided"] == 9
    assert packing["aten::_foreach_copy_"] == 1
    assert max(packing["aten::view"], unpacking["aten::view"]) <= 1
    assert not packing["aten::slice"] + packing["aten::detach"] + unpacking["aten::slice"]


@pytest.mark.parametrize("num_tensors", [1, 2])
def test_strides_survive(num_tensors):
    """`randn_like` fills memory in stride order, so other strides would draw other noise."""
    tensor = torch.randn(2, 4, 6, 3).contiguous(memory_format=torch.channels_last)
    tensors = [tensor] * num_tensors
    layout = MessageLayout.of(specs(*tensors))
    (received, *_) = layout.unpack(layout.pack(tensors, CPU).clone())
    assert received.stride() == tensor.stride()
    generators = [torch.Generator().manual_seed(0) for _ in range(2)]
    noise = [
        torch.empty_like(t).normal_(generator=g)
        for t, g in zip((tensor, received), generators, strict=True)
    ]
    assert torch.equal(*noise)


def test_one_dense_tensor_is_not_copied():
    tensor = torch.randn(4, 6).t()
    buffer = MessageLayout.of(specs(tensor)).pack([tensor], CPU)
    assert buffer.data_ptr() == tensor.data_ptr()


def test_expanded_and_sliced_tensors_are_made_dense():
    tensors = [torch.randn(1, 3).expand(4, 3), torch.randn(4, 6)[:, ::2]]
    layout = MessageLayout.of(specs(*tensors))
    received = layout.unpack(layout.pack(tensors, CPU))
    assert all(torch.equal(a, b) for a, b in zip(tensors, received, strict=True))
    assert layout.num_bytes == 2 * 48


def test_gradients_do_not_travel_with_values():
    tensor = torch.randn(3, requires_grad=True) * 2
    layout = MessageLayout.of(specs(tensor, tensor))
    assert not layout.pack([tensor, tensor], CPU).requires_grad


Pair = namedtuple("Pair", "image caption")


def sent(value):
    """What a receiver makes of a value."""
    pickled, tensors = pickled_value(value, CPU)
    received = pickled.empty(CPU)
    for own, other in zip(tensors, received, strict=True):
        flat_bytes(other).copy_(flat_bytes(own))
    return pickled.put_together(received, CPU)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 5),
        torch.randn(2, 4, 6, 3).contiguous(memory_format=torch.channels_last),
        torch.randn(4, 6).t(),
        torch.randn(3, 4)[:, 1:3],
        torch.randn(64)[::16],
        torch.randn(1, 3).expand(4, 3),
        torch.randn(2, 2, dtype=torch.complex64),
        torch.randn(3).to(torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor(2.5),
        torch.empty(0, 4),
        torch.randn(3, requires_grad=True),
        torch.eye(3).to_sparse(),
        torch.randn(2, dtype=torch.complex64).conj(),
        torch.nn.Parameter(torch.randn(2)),
    ],
)
def test_tensors_of_a_batch_lie_as_they_did(tensor):
    batch = {"pair": Pair(tensor, ["a", "b"]), "again": tensor, "size": (3, 4), "none": None}
    received = sent(batch)
    other = received["pair"].image
    assert received["again"] is other
    assert received["pair"].caption == ["a", "b"]
    assert (received["size"], received["none"]) == ((3, 4), None)
    assert type(other) is type(tensor)
    assert (other.dtype, other.requires_grad) == (tensor.dtype, tensor.requires_grad)
    assert torch.equal(other.to_dense(), tensor.to_dense())
    if tensor.layout == torch.strided and tensor.numel() > 4:
        assert other.stride() == tensor.stride()
    if tensor.numel():
        assert other.layout != torch.strided or other.data_ptr() != tensor.data_ptr()


def test_what_cannot_be_pickled_is_named():
    mesh = Mesh(RankLayout(2, Placement.of_replicas([1, 1])), 0, CPU, "gloo", 1.0)
    with pytest.raises(ConfigurationError, match=r"cannot be sent .*lambda.* can be pickled"):
        mesh.from_first({"later": lambda: 0})
