"""Microbatches of all kinds and sizes find the graph that was made for them."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
import torch.utils._pytree as pytree
from torch import nn

from lightning_diffpipe.errors import GraphError
from lightning_diffpipe.graph.call_sequences import CallSequences
from lightning_diffpipe.graph.probe import probe
from lightning_diffpipe.graph.probed_step import ProbedStep
from lightning_diffpipe.training.preparation import _planned_graphs
from tests.runtime.loopback import Loopback


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))


@dataclass
class Batch:
    """A batch that users register with pytree."""

    x: torch.Tensor
    captions: list[str]


pytree.register_dataclass(Batch)


def test_batches_of_a_registered_dataclass_are_distinguished_by_their_sizes():
    """History: all of them had one signature, so that the graph of two samples was used for any number."""
    module, batch = layers(), Batch(torch.randn(6, 4), list("abcdef"))

    def step(module, batch):
        assert len(batch.captions) == len(batch.x)
        return module(batch.x).square().mean()

    with Loopback(module, step, batch, num_stages=2, num_microbatches=2) as ranks:
        assert {layer.outputs[0].rows for layer in ranks.graph.layers} == {1}
        loss = ranks.run_step(batch, 0)
    torch.testing.assert_close(loss, step(module, batch).item())


def guarded(module, batch):
    loss = module(batch).square().mean()
    if not torch.isfinite(loss):
        raise FloatingPointError("diverged")
    return loss


def test_a_step_that_reads_values_is_probed_in_all_planned_sizes_while_they_are_there():
    """History: the first microbatch of another size was probed on NaN, and the user's own check ended it."""
    module, batch, plan = layers(), torch.randn(5, 4), SimpleNamespace(num_microbatches=2)
    graph = probe(module, guarded, batch[:2])
    probed = ProbedStep(module, guarded, batch, batch[:2], graph, CallSequences())
    known = _planned_graphs(probed, plan, torch.device("cpu"))
    assert [other.num_samples for other in known] == [3, 2]
    assert known[0].layer_names == graph.layer_names
    plain = probe(module, lambda module, batch: module(batch).mean(), batch[:2])
    probed = replace(probed, graph=plain)
    assert not _planned_graphs(probed, plan, torch.device("cpu"))


def greedy(module, batch):
    loss = module(batch).square().mean()
    if not torch.isfinite(loss):
        raise torch.OutOfMemoryError("tried to allocate 40 GiB")
    return loss


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (guarded, r"float32\[3, 4\] were not probed .* needs values, .* FloatingPointError: diverged.*drop_last"),
        # History: its message was that parameters of other ranks are NaN.
        (greedy, r"\[3, 4\] cannot .* memory ran out: tried to .* Read no values"),
    ],
)  # fmt: skip
def test_a_size_that_cannot_be_probed_says_why(step, message):
    batch = torch.randn(6, 4)
    ranks = Loopback(layers(), step, batch, num_stages=2, num_microbatches=2)
    with ranks, pytest.raises(GraphError, match=message):
        ranks.run_step(batch, 0)


def test_dummies_of_all_sizes_share_the_memory_of_the_largest():
    """History: every size of batch had dummies of its own, as large as outputs that were no dummies, for good."""
    plain = lambda module, batch: module(batch).square().mean()
    with Loopback(layers(), plain, torch.randn(4, 4), num_stages=2, num_microbatches=1) as ranks:
        for size in (3, 8, 5):
            batch = torch.randn(size, 4)
            torch.testing.assert_close(ranks.run_step(batch, 0), plain(layers(), batch).item())
    memories = [rank.engine.layout.steps._dummies._largest for rank in ranks.ranks]
    # The call sequence of a microbatch is found with dummies for all layers.
    assert [[memory.numel() for memory in found.values()] for found in memories] == [[8 * 4]] * 2
    assert all(memory.isnan().all() for memory in memories[1].values())


def test_writing_into_dummies_is_refused():
    module, writes = layers(), []

    def step(module, batch):
        first = module[0](batch)
        second = module[1](first)
        if writes:
            first.detach().zero_()
        return module[2:](second).square().mean()

    batch = torch.randn(2, 4)
    with Loopback(module, step, batch, num_stages=4, num_microbatches=1) as ranks:
        ranks.run_step(batch, 0)
        writes.append(True)
        with pytest.raises(GraphError, match=r"writes in place into a torch.float32 output"):
            ranks.run_step(batch, 1)
