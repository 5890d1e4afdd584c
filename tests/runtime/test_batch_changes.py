"""A step may change its batch: every stage, frozen part and probe sees it as if it ran for the first time."""

import copy
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_diffpipe.graph.call_sequences import CallSequences
from lightning_diffpipe.graph.probe import probe
from lightning_diffpipe.graph.probed_step import ProbedStep
from lightning_diffpipe.graph.step import fresh
from lightning_diffpipe.profiling.measure import profile
from lightning_diffpipe.training.verification import run_whole
from tests.graph.emulate import intercepted, relative_error
from tests.runtime.loopback import Loopback
from tests.zoo import in_double

WIDTH = 6


class WritesIntoInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(F.leaky_relu_(x, 0.3))


class Denoiser(nn.Module):
    """A frozen encoder and a trained path; subclasses change the batch before or after them."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.path = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def loss(self, image, text):
        with torch.no_grad():
            condition = self.encoder(image)
        return (self.path(torch.tanh(image + condition)) - text).square().mean()


class PutsInPlace(Denoiser):
    def forward(self, batch):
        batch["image"] = batch["image"] * 2 - 1
        return self.loss(batch["image"], batch["text"])


class WritesInPlace(Denoiser):
    def forward(self, batch):
        batch["image"].mul_(2).sub_(1)
        return self.loss(batch["image"], batch["text"])


class WritesBehindTheLayers(Denoiser):
    def forward(self, batch):
        text = batch["text"]
        loss = self.loss(batch["image"], text[:, :WIDTH])
        text[0] += 1
        return loss + text.mean() * loss


class TakesOut(Denoiser):
    def forward(self, batch):
        text = batch.pop("text")
        return self.loss(batch.pop("image"), text)


class ChangesShape(Denoiser):
    def forward(self, batch):
        image = batch["image"].unsqueeze_(1)
        return self.loss(image.squeeze(1), batch["text"])


class WritesWithinALayer(Denoiser):
    def __init__(self):
        super().__init__()
        self.first = WritesIntoInput()

    def forward(self, batch):
        return self.loss(self.first(batch["image"]), batch["text"])


class NeedsValues(WritesInPlace):
    def forward(self, batch):
        return super().forward(batch) * float(batch["text"].sum() < 1e9)


KINDS = [
    PutsInPlace, WritesInPlace, WritesBehindTheLayers, TakesOut, ChangesShape, WritesWithinALayer, NeedsValues
]  # fmt: skip


def step(module, batch):
    return module(batch)


def pairs():
    return {"image": torch.randn(6, WIDTH), "text": torch.randn(6, WIDTH)}


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_one_process(kind):
    """History: what one run of the step had changed the next one found; images were scaled twice."""
    torch.manual_seed(0)
    with in_double():
        alone, batch = kind().double(), pairs()
        before = copy.deepcopy(batch)
        parts = [{key: value[i : i + 2].clone() for key, value in batch.items()} for i in (0, 2, 4)]
        loss = sum(step(alone, part) / 3 for part in parts)
        loss.backward()
        expected = {n: p.grad for n, p in alone.named_parameters() if p.grad is not None}
        with Loopback(alone, step, batch, num_stages=2, num_microbatches=3) as pipeline:
            for index in range(2):  # a batch may come again
                pipeline.zero_grad()
                assert pipeline.run_step(batch, index) == pytest.approx(loss.item(), rel=1e-12)
                assert relative_error(expected, pipeline.gradients())[0] < 1e-12
    torch.testing.assert_close(batch, before, rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["fake", "real"])
def test_tensors_that_are_written_are_noted(mode):
    """Only those are copied for every run."""
    written = {
        kind: probe(kind(), step, pairs(), mode=mode).batch_writes
        for kind in (PutsInPlace, WritesInPlace, WritesBehindTheLayers, WritesWithinALayer)
    }
    assert list(written.values()) == [set(), {"['image']"}, {"['text']"}, {"['image']"}]


def test_verification_and_profiles_leave_the_batch_alone():
    module, batch = WritesInPlace(), pairs()
    before = copy.deepcopy(batch)
    profile(module, batch, step=step, repeats=1, sample_counts=(2, 6))
    graph = probe(module, step, batch)
    probed = ProbedStep(module, step, batch, batch, graph, CallSequences())
    with intercepted(module) as interception:
        run_whole(probed, interception, batch, 3, seed=0)
    torch.testing.assert_close(batch, before, rtol=0, atol=0)


class Pair(NamedTuple):
    image: torch.Tensor
    sizes: list


def test_containers_keep_their_type():
    batch = {
        "pair": Pair(torch.ones(2), [(8, 8), (8, 9)]),
        "array": torch.ones(2).numpy(),
        "plain": (1, None),
    }
    new = fresh(batch, {"['pair'].image"})
    assert isinstance(new["pair"], Pair)
    assert new["pair"].sizes == batch["pair"].sizes
    assert new["plain"] == (1, None)
    new["pair"].sizes.pop()
    new["pair"].image.mul_(2)
    new["array"] *= 2
    assert (batch["pair"].image == 1).all()
    assert (batch["array"] == 1).all()
    assert len(batch["pair"].sizes) == 2
