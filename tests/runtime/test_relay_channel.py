"""A result of any type reaches the other ranks, its tensors on their devices."""

import dataclasses
import io
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.models.modeling_outputs import AutoencoderKLOutput

from lightning_diffpipe.comm import mesh
from lightning_diffpipe.comm.mesh import Mesh, RankLayout
from lightning_diffpipe.errors import ForeignLayerError
from lightning_diffpipe.planning.schedule import Placement
from lightning_diffpipe.runtime.relay import RelayChannel

CPU, ELSEWHERE = torch.device("cpu"), torch.device("meta")


class NoTensors(pickle.Pickler):
    """A tensor in a pickle comes back on a device of whoever wrote it."""

    def persistent_id(self, value: Any) -> None:
        assert not isinstance(value, torch.Tensor | torch.device), f"pickled: {value}"


class Wire:
    """Stands for `torch.distributed`: what the owner, who is asked first, sends is what the other receives."""

    def __init__(self):
        self.sent = []

    def broadcast_object_list(self, box, src, group):
        if self.owner_sends:
            file = io.BytesIO()
            NoTensors(file).dump(box)
            self.sent.append(file.getvalue())
        else:
            box[:] = pickle.loads(self.sent.pop(0))

    def barrier(self, group):
        pass

    def broadcast(self, buffer, src, group, async_op):
        if self.owner_sends:
            self.sent.append(buffer)
        else:
            buffer.copy_(self.sent.pop(0))
        return SimpleNamespace(wait=lambda: None)


@pytest.fixture
def relayed(monkeypatch):
    """Sends a value from rank 0 to rank 1, and returns what that one gets."""
    wire = Wire()
    monkeypatch.setattr(mesh, "dist", wire)
    placement = Placement.of_replicas([1, 1])

    def on(rank, device, output):
        wire.owner_sends = rank == 0
        own = Mesh(RankLayout(2, placement), rank, device, "gloo", 1.0)
        return RelayChannel(own)(0, output)

    def send(output, device=CPU):
        assert on(0, CPU, output) is output
        got = on(1, device, None)
        assert not wire.sent, "something was sent that nobody receives"
        return got

    send.on = on
    return send


@dataclasses.dataclass
class Plain:
    """Not registered with pytree."""

    values: torch.Tensor
    again: torch.Tensor
    device: torch.device
    name: str = "a"


def test_tensors_inside_objects_arrive_on_the_device_of_the_rank(relayed):
    """History: they were pickled, and came back on the owner's device, so that rank 1 computed on rank 0's."""
    normal = torch.distributions.Normal(torch.randn(2, 3), torch.ones(2, 3))
    posterior = DiagonalGaussianDistribution(torch.randn(1, 4, 2, 2))
    shared = torch.randn(3)
    output = (normal, {"latent": AutoencoderKLOutput(posterior)}, Plain(shared, shared, CPU))
    got_normal, got_latent, plain = relayed(output)
    assert torch.equal(got_normal.loc, normal.loc)
    assert torch.equal(got_normal.scale, normal.scale)
    assert torch.equal(got_latent["latent"].latent_dist.mode(), posterior.mode())
    assert torch.equal(plain.values, shared)
    assert plain.values is plain.again
    assert plain.name == "a"
    normal, latent, plain = relayed(output, ELSEWHERE)
    found = [normal.loc, normal.scale, latent["latent"].latent_dist.parameters, plain.values]
    assert {tensor.device for tensor in found} == {ELSEWHERE}
    assert plain.device == ELSEWHERE


@pytest.mark.parametrize("output", [None, 3, torch.randn(2, 3), [torch.empty(0, 4), "x"]])
def test_plain_outputs(relayed, output):
    """History: a tensor without elements arrived as its description."""
    got = relayed(output)
    assert type(got) is type(output)
    expected, got = (pytree.tree_leaves(value) for value in (output, got))
    assert [str(leaf) for leaf in got] == [str(leaf) for leaf in expected]


def test_what_cannot_travel_is_refused_on_all_ranks(relayed):
    """History: the owner raised pickle's error, and the other ranks waited for it until the timeout."""
    reason = r"a layer returns a function, which cannot be sent .*return tensors"
    with pytest.raises(ForeignLayerError, match=reason):
        relayed.on(0, CPU, lambda: None)
    with pytest.raises(ForeignLayerError, match=reason):
        relayed.on(1, CPU, None)
