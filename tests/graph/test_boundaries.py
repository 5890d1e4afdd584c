"""What is said to cross a cut, before anything is folded, crosses it in the stages that are made.

History: bytes were counted layer by layer, so that every term of a residual stream seemed to cross: eight
times the truth in the middle of a transformer, and interleaved stages were planned to be slow.
"""

import pytest
import torch
from torch import nn

from lightning_diffpipe.graph.cut import cut
from lightning_diffpipe.graph.probe import fold, probe
from lightning_diffpipe.graph.sizes import boundary_bytes

WIDTH = 16


class Block(nn.Module):
    """Two terms of a residual stream; the second is dear enough to be cut."""

    def __init__(self):
        super().__init__()
        self.attend, self.expand = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, *skips):
        x = x + self.attend(x)
        x = x + self.expand(x) + sum(skips)
        return x, x * 2


class Residual(nn.Module):
    """Blocks in a row, or with skips from the first half to the second as in a U-Net."""

    def __init__(self, skips):
        super().__init__()
        self.blocks, self.skips = nn.ModuleList(Block() for _ in range(6)), skips
        self.encoder = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x):
        x, kept = self.encoder(x), []
        for index, block in enumerate(self.blocks):
            x, skip = block(x, *([kept.pop()] if self.skips and index >= 3 else []))
            if self.skips and index < 3:
                kept.append(skip)
        return x.square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("skips", [False, True])
def test_bytes_are_those_of_folded_stages(skips):
    module, batch = Residual(skips).train(), torch.randn(4, WIDTH)
    step = lambda module, batch: module(batch)
    graph = probe(module, step, batch, max_share=0.01)
    sizes, tensor = boundary_bytes(graph), 4 * WIDTH * 4
    assert len(graph.path) == 12  # blocks were expanded
    for position in range(2, 12, 2):  # between blocks
        folded, positions = fold(module, step, batch, graph, (position,))
        sent = cut(folded, positions).stages[0].sent
        assert sizes[position] == sum(folded.spec(key).nbytes for key in sent)
        crossing = 1 + min(position // 2, 6 - position // 2) * skips
        assert sizes[position] == crossing * tensor


def test_inside_a_block_its_own_terms_cross():
    module, batch = Residual(skips=False).train(), torch.randn(4, WIDTH)
    graph = probe(module, lambda module, batch: module(batch), batch, max_share=0.01)
    sizes = boundary_bytes(graph)
    assert sizes[5] == 2 * 4 * WIDTH * 4  # the block's input, and its first term
