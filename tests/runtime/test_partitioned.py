"""Microbatches of all kinds and sizes find the graph that was made for them."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.utils._pytree as pytree
from torch import nn

from lightning_diffpipe.errors import GraphError
from lightning_diffpipe.graph.probe import probe
from lightning_diffpipe.pipeline import _planned_graphs
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


def test_batches_of_a_registered_dataclass_are_told_apart_by_their_sizes():
    """History: all of them had one signature, so that the graph of two samples was used for any number."""
    module, batch = layers(), Batch(torch.randn(6, 4), list("abcdef"))

    def step(module, batch):
        assert len(batch.captions) == len(batch.x)
        return module(batch.x).square().mean()

    ranks = Loopback(module, step, batch, num_stages=2, num_microbatches=2)
    assert [layer.outputs[0].rows for layer in ranks.graph.layers] == [1] * len(ranks.graph.layers)
    loss = ranks.run_step(batch, 0)
    ranks.close()
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
    known = _planned_graphs(module, guarded, batch, graph, plan, torch.device("cpu"))
    assert [other.num_samples for other in known] == [3, 2]
    assert known[0].layer_names == graph.layer_names
    plain = probe(module, lambda module, batch: module(batch).mean(), batch[:2])
    assert not _planned_graphs(module, None, batch, plain, plan, torch.device("cpu"))


def test_a_size_that_was_not_planned_says_why_values_are_missing():
    batch = torch.randn(6, 4)
    ranks = Loopback(layers(), guarded, batch, num_stages=2, num_microbatches=2)
    with pytest.raises(
        GraphError,
        match=r"float32\[3, 4\] were not probed .* needs values, .* FloatingPointError: diverged.*drop_last",
    ):
        ranks.run_step(batch, 0)
    ranks.close()
