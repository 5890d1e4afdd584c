"""The oracle without processes: every model of the wish list, as a pipeline and as one process.

Double precision, M = 3 microbatches of 3, 2 and 2 samples, two and three stages, folded, frozen encoders
shared out over the ranks, three steps of AdamW on three batches. Compared are losses and gradients of every
step and the weights at the end. Parameters that start at zero are moved before, every trained layer has
to move, and frozen ones must not. The plain models also run with a microbatch of one sample; a VAE does
not, as fake tensors of one sample have other strides than real ones, and strides decide which noise
`randn_like` draws.
"""

import contextlib
import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.utils.checkpoint

from lightning_diffpipe.graph import rng
from lightning_diffpipe.graph.cut import uncut
from lightning_diffpipe.graph.layer import LayerGraph
from lightning_diffpipe.graph.probe import probe, reprobe
from lightning_diffpipe.graph.rng import derived_seed
from lightning_diffpipe.graph.step import batch_signature, loss_of, take_samples
from lightning_diffpipe.graph.view import StageView
from lightning_diffpipe.runtime.batch_layout import microbatch_sizes, num_samples, split
from tests.graph.emulate import intercepted, randomise, relative_error
from tests.graph.steps import (
    BUILDERS,
    DENOISERS,
    Block,
    Sequential,
    Skips,
    Tied,
    Tower,
    Twice,
    build,
    image_batch,
    rows,
    step,
)
from tests.rows import row
from tests.runtime.loopback import Loopback
from tests.zoo import CASES, in_double

SEED = 5
NUM_STEPS = 3  # of denoisers; small towers take five, in which weights may drift apart further
NUM_SAMPLES = 7  # microbatches of 3, 2 and 2
NUM_MICROBATCHES = 3


class Checkpointed(Tower):
    """Blocks that are recomputed in the backward, dropout included."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.dropout.p = 0.3

    def training_step(self, batch, batch_idx):
        x = batch.clone().requires_grad_()
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return x.pow(2).mean()


TOWERS = {
    "sequential with dropout": (Sequential, 1 / 32),
    "tied weights": (Tied, 1 / 30),
    "layers called twice": (Twice, 1 / 30),
    "long skips": (Skips, 1 / 4),
    "activation checkpointing": (Checkpointed, 1 / 4),
}


class OneProcess:
    """The reference: one process, microbatch after microbatch; gradients are left in `.grad`.

    Layers that draw random numbers do so from streams of their own in a pipeline; a step with such layers
    is run uncut but seeded in the same way, every other one without anything of ours around it.
    """

    def __init__(self, root: Any, graph: LayerGraph) -> None:
        self.root, self.graph = root, graph
        self._graphs: dict[str, LayerGraph] = {graph.signature: graph}

    def run_step(self, batch: Any, batch_index: int) -> float:
        self.root.zero_grad(set_to_none=True)
        total = 0.0
        sizes = microbatch_sizes(num_samples(batch), NUM_MICROBATCHES)
        for index, part in enumerate(split(batch, sizes)):
            seed = derived_seed(SEED, 0, batch_index, index)
            run = self._seeded if self.graph.seeded else self._plain
            total += run(part, seed, sizes[index] / sum(sizes))
        return total

    def _plain(self, part: Any, seed: int, share: float) -> float:
        rng.seed_all(seed, host=True)
        loss = loss_of(step(self.root, part)) * share
        loss.backward()
        return float(loss.detach())

    def _seeded(self, part: Any, seed: int, share: float) -> float:
        key = batch_signature(part)
        if key not in self._graphs:
            self._graphs[key] = reprobe(self.root, step, part, self.graph)
        graph = self._graphs[key]
        with intercepted(self.root) as interception:
            view = StageView(self.root, graph, uncut(graph), interception)
            run = view.forward(lambda: step(self.root, part), seed=seed)
            run.backward(loss_scale=share)
        return float(run.loss.detach()) * share


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.0)


def check(root: Any, batches: list[Any], max_share=1 / 32) -> Any:
    """Trains some steps as pipelines and as one process, and compares everything.

    Every rank of the first pipeline probes microbatches of other sizes for itself, with placeholders for
    what it does not hold; in the others one rank does it for all.
    """
    randomise(root)
    initial = {name: value.detach().clone() for name, value in root.named_parameters()}
    graph = probe(
        root, step, take_samples(batches[0], num_samples(batches[0]), 2), max_share=max_share
    )
    alone = OneProcess(copy.deepcopy(root), graph)
    with contextlib.ExitStack() as stack:
        pipelines = []
        for num in (2, 3):
            pipeline = Loopback(
                root, step, batches[0], num, NUM_MICROBATCHES, seed=SEED, fine=graph,
                shares_probes=bool(pipelines),
            )  # fmt: skip
            pipelines.append(stack.enter_context(pipeline))
        optimizers = [adam(alone.root.parameters())]
        optimizers += [each for pipeline in pipelines for each in pipeline.optimizers(adam)]
        for index, batch in enumerate(batches):
            loss = alone.run_step(batch, index)
            for pipeline in pipelines:
                check_step(pipeline, alone.root, loss, batch, index)
            for optimizer in optimizers:
                optimizer.step()
    for pipeline in pipelines:
        check_weights(pipeline, alone.root, initial)
    return pipelines


def check_step(
    pipeline: Loopback, alone: Any, expected_loss: float, batch: Any, index: int
) -> None:
    """Runs one step of a pipeline; loss and gradients equal those of one process."""
    pipeline.zero_grad()
    loss = pipeline.run_step(batch, index)
    expected = {n: p.grad for n, p in alone.named_parameters() if p.grad is not None}
    error, where = relative_error(expected, pipeline.gradients())
    what = f"{len(pipeline.ranks)} ranks, step {index}"
    assert abs(loss - expected_loss) <= 1e-9 * abs(expected_loss), f"{what}: loss"
    assert error < (1e-9 if index == 0 else 1e-6), f"{what}: {where} off by {error}"


def check_weights(pipeline: Loopback, alone: Any, initial: dict[str, torch.Tensor]) -> None:
    """Weights equal those of one process; each trained layer moved, nothing frozen did."""
    trained, parameters = pipeline.weights(), dict(alone.named_parameters())
    assert trained.keys() == pipeline.fine.trained
    for name, value in trained.items():
        error = (value - parameters[name]).abs().max() / parameters[name].abs().max()
        assert error < 1e-9, f"{name} is off by {error:.1e}"
    moved = {n for n, v in trained.items() if (v - initial[n]).abs().max() > 1e-4}
    # The last block of a joint transformer computes queries of the text for nothing: exact zeros.
    used = {n for n, p in parameters.items() if p.grad is not None and p.grad.abs().max() > 1e-12}
    for index in pipeline.fine.path:
        layer = pipeline.fine.layers[index]
        own = set(layer.parameters) & used
        assert not own or own & moved, f"nothing in {layer.name} was trained"
    assert len(used) > 0.9 * len(trained)
    for rank in pipeline.ranks:
        for name, value in rank.module.named_parameters():
            if name in pipeline.pieces.frozen.parameters:
                assert torch.equal(value, initial[name]), f"frozen {name} moved"


# These are cut in tests/graph/test_stages.py.
LEFT_TO_TABLES = {
    *("SDXL", "LoRA", "dropout", "dropout, activation checkpointing", "text encoder trained along"),
    *DENOISERS[4:],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [row(n) if n in LEFT_TO_TABLES else n for n in BUILDERS])
def test_latent_diffusion(name):
    with in_double():
        batches = [image_batch(NUM_SAMPLES, seed) for seed in range(NUM_STEPS)]
        pipelines = check(build(name), batches)
    for pipeline in pipelines:
        assert all(pipeline.encodes), f"frozen parts per rank: {pipeline.encodes}"


class InInferenceMode(Tower):
    """Encodes in inference mode, as samplers do, and goes on with the result outside of it."""

    num_blocks = 3

    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.Sequential(Block(), Block()).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        with torch.inference_mode():
            z = self.encoder(batch + torch.randn_like(batch))
        return (self.run(z * 1.5) - z).pow(2).mean()


@pytest.mark.slow
def test_frozen_encoders_in_inference_mode():
    """History: no cut ran, as what stands for the encoder on other stages was made in that mode, too."""
    with in_double():
        batches = [rows(NUM_SAMPLES).double() + seed for seed in range(2)]
        pipelines = check(InInferenceMode().double(), batches, max_share=1 / 6)
    for pipeline in pipelines:
        assert all(pipeline.encodes), f"frozen parts per rank: {pipeline.encodes}"


@pytest.mark.slow
@pytest.mark.parametrize("name", [row(n) if n in LEFT_TO_TABLES else n for n in DENOISERS])
def test_denoisers_of_diffusers(name):
    case = dataclasses.replace(CASES[name], num_samples=NUM_SAMPLES)
    with in_double():
        root, _ = case.build()
        generator = torch.Generator().manual_seed(1)
        batches = [
            {key: draw(NUM_SAMPLES, generator) for key, draw in case.batch.items()}
            for _ in range(NUM_STEPS)
        ]
        check(root, batches)


@pytest.mark.slow
@pytest.mark.parametrize("name", TOWERS)
def test_towers(name):
    make, max_share = TOWERS[name]
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(5, 16, generator=generator).double() for _ in range(5)]
    with in_double():
        check(make().double(), batches, max_share=max_share)
