"""Weights that are copied to a slot when their layer runs: in any order, in any type and layout."""

import random

import pytest
import torch
from torch import nn

from lightning_diffpipe.graph.placement import host_value, is_placeholder, place_parameters
from lightning_diffpipe.graph.probe import probe
from lightning_diffpipe.graph.streaming import WeightStream, streamable
from lightning_diffpipe.planning.memory import copies

CPU = torch.device("cpu")


class Part(nn.Module):
    """Frozen weights of several types and layouts, one of them empty."""

    def __init__(self, index):
        super().__init__()
        torch.manual_seed(index)
        values = {
            "single": torch.randn(3, 5),
            "halved": torch.randn(7).bfloat16(),
            "last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
            "bytes": torch.randint(0, 255, (5 + index,), dtype=torch.uint8),
            "empty": torch.zeros(0, 4),
        }
        for name, value in values.items():
            self.register_parameter(name, nn.Parameter(value, requires_grad=False))

    def forward(self):
        return {name: value.clone() for name, value in self.named_parameters()}


def streaming(count=4):
    """A stream of some parts, and their values."""
    parts = nn.ModuleDict({str(index): Part(index) for index in range(count)})
    values = {name: part() for name, part in parts.items()}
    names = [name for name, _ in parts.named_parameters()]
    layers = {name: dict(part.named_parameters()) for name, part in parts.items()}
    place_parameters(parts, names, CPU, later=names)
    return parts, values, WeightStream(parts, layers, {0: list(parts)}, CPU)


def assert_values(got, wanted):
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert got[name].dtype == value.dtype
        assert got[name].stride() == value.stride()
        assert torch.equal(got[name], value)


@pytest.mark.parametrize("seed", range(6))
def test_each_run_has_its_weights_whatever_was_foretold(seed):
    """Even seeds run what was foretold, and copy what is planned; odd ones anything."""
    rng, (parts, values, stream) = random.Random(seed), streaming()
    steps = [[str(rng.randrange(4)) for _ in range(12)]] * 3
    copied = []
    for step in steps:
        before = stream.num_bytes_copied
        stream.follow(tuple(step) if seed % 2 == 0 else tuple(rng.choices("0123", k=5)))
        for name in step:
            assert_values(stream.call(name, parts[name]), values[name])
        stream.rest()
        assert all(map(is_placeholder, parts.parameters()))
        copied.append(stream.num_bytes_copied - before)
    if seed % 2 == 0:
        sizes = {name: sum(value.nbytes for value in of.values()) for name, of in values.items()}
        assert copied[-1] == sum(sizes[name] for name in copies(steps[0]))
    stream.close()


def test_weights_that_a_layer_returns_stay_as_they_are():
    parts, values, stream = streaming()
    kept = [stream.call(name, lambda p=part: p.single) for name, part in parts.items()]
    for weight, value in zip(kept, values.values(), strict=True):
        assert torch.equal(weight, value["single"])


def test_written_values_are_copied_anew():
    parts, values, stream = streaming()
    stream.call("0", parts["0"])
    stream.rest()
    host_value(parts["0"].single).add_(1)
    assert torch.equal(stream.call("0", parts["0"])["single"], values["0"]["single"])
    stream.forget()
    assert torch.equal(stream.call("0", parts["0"])["single"], values["0"]["single"] + 1)


class Step(nn.Module):
    """Layers that are frozen, trained, adapted, tied, and called twice."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.frozen, self.adapted, self.twice, self.one, self.other = (
            nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(5)
        )
        self.other[0].weight = self.one[0].weight
        for layer in (self.frozen, self.adapted, self.twice, self.one, self.other):
            layer.requires_grad_(False)
        self.adapted[1].bias.requires_grad_(True)

    def forward(self, x):
        x = self.twice(self.twice(self.adapted(self.frozen(self.first(x)))))
        return self.other(self.one(x)).sum()


def test_streamed_are_frozen_weights_that_one_layer_reads():
    module = Step()
    graph = probe(module, lambda module, batch: module(batch), torch.randn(2, 4))
    weights = {name for each in streamable(module, graph).values() for name in each}
    frozen = {
        name
        for name, parameter in module.named_parameters()
        if not parameter.requires_grad and not name.startswith("twice.")
    }
    assert weights == frozen - {"one.0.weight"}
