"""Microbatches of all kinds and sizes find the graph that was made for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.utils._pytree as pytree
from torch import nn

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
