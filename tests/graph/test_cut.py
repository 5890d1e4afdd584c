"""Cuts: what crosses them, who holds what, where to place them.

What is said to cross a cut, before anything is folded, crosses it in the stages that are made.

History: bytes were counted layer by layer, so that every term of a residual stream seemed to cross: eight
times the truth in the middle of a transformer, and interleaved stages were planned to be slow.
"""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_diffpipe.errors import PartitionError
from lightning_diffpipe.graph.cut import cut
from lightning_diffpipe.graph.layer import Layer, LayerGraph, TensorSpec
from lightning_diffpipe.graph.probe import fold, probe
from lightning_diffpipe.graph.sizes import boundary_bytes
from lightning_diffpipe.planning.schedule import Route, route


def make_graph(reads, tail, frozen=()):
    """Layer i reads the outputs 0 of the layers `reads[i]`; each has its own parameter."""
    spec = TensorSpec((2, 3), (3, 1), torch.float32, "cpu", True)
    layers = tuple(
        Layer(
            index=i, name=f"l{i}", reads=frozenset((j, 0) for j in read), parameters=frozenset({f"l{i}.w"}),
            cost_flops=1, num_seeds=0, frozen=i in frozen, mutated=frozenset(), spec=None, outputs=(spec,),
        )
        for i, read in enumerate(reads)
    )  # fmt: skip
    names = tuple(layer.name for layer in layers)
    return LayerGraph(
        layers=layers, tail_reads=frozenset((j, 0) for j in tail), tail_parameters=frozenset(),
        trained=frozenset(f"l{i}.w" for i in range(len(reads)) if i not in frozen), calls=(), fine_names=names,
        seeded=frozenset(), leaky=frozenset(), watched=frozenset(), host_random=False, signature="", num_samples=2,
        mode="fake",
    )  # fmt: skip


def test_a_skip_is_received_by_the_stages_between():
    graph = make_graph([(), (0,), (1,), (2,), (3, 1)], tail=(4,))
    stages = cut(graph, [2, 4]).stages
    assert [stage.received for stage in stages] == [(), ((1, 0),), ((1, 0), (3, 0))]
    assert [stage.sent for stage in stages] == [((1, 0),), ((1, 0), (3, 0)), ()]
    assert stages[1].needed == {(1, 0)}


def test_frozen_results_are_received_apart():
    graph = make_graph([(), (0,), (1,), (0, 2)], tail=(3, 0), frozen=(0,))
    pieces = cut(graph, [2])
    assert pieces.frozen.layers == {0}
    assert pieces.frozen.sent == ((0, 0),)
    assert [stage.frozen_received for stage in pieces.stages] == [((0, 0),), ((0, 0),)]
    assert pieces.stages[1].received == ((2, 0),)
    assert pieces.stages[1].received_gradients == ((2, 0),)


@st.composite
def graphs(draw):
    n = draw(st.integers(2, 9))
    reads = [draw(st.sets(st.integers(0, i - 1), max_size=3)) if i else set() for i in range(n)]
    tail = draw(st.sets(st.integers(0, n - 1), min_size=1, max_size=3)) | {n - 1}
    return make_graph(reads, tail)


@pytest.mark.slow
@given(graphs(), st.data())
def test_laws_of_cuts(graph, data):
    n = len(graph.path)
    positions = sorted(data.draw(st.sets(st.integers(1, n - 1), max_size=min(3, n - 1))))
    stages = cut(graph, positions).stages
    assert sorted(i for stage in stages for i in stage.layers) == list(range(n))
    for before, after in itertools.pairwise(stages):
        assert before.sent == after.received
        assert before.sent_gradients == after.received_gradients
        sizes = boundary_bytes(graph)[positions[before.index]]
        assert sizes == sum(graph.spec(key).nbytes for key in after.received)
    for stage in stages:
        own = {(i, 0) for i in stage.layers}
        assert stage.needed <= set(stage.received)
        assert set(stage.sent) <= own | set(stage.received)
        read = set().union(*(graph.layers[i].reads for i in stage.layers))
        assert (read | (graph.tail_reads if stage.is_last else set())) - own == stage.needed


@pytest.mark.parametrize("positions", [[0], [3], [2, 2], [2, 1]])
def test_empty_stages_are_refused(positions):
    graph = make_graph([(), (0,), (1,)], tail=(2,))
    with pytest.raises(PartitionError, match="every stage needs at least one layer"):
        cut(graph, positions)


def test_a_rank_keeps_what_its_later_stages_read():
    """With V placement a skip from the first stage to the last does not travel, nor does its gradient."""
    down_and_up, round_robin = ((0,), (1,), (1,), (0,)), ((0,), (1,), (0,), (1,))
    assert route(0, (1, 3), None) == Route((1, 2, 3), ())
    assert route(0, (1, 3), down_and_up) == Route((1,), ((0, 3),))
    assert route(0, (1, 3), round_robin) == Route((1,), ((1, 3),))
    graph = make_graph([(), (0,), (1,), (2, 0)], tail=(3,))
    assert (0, 0) in cut(graph, [1, 2, 3]).stages[2].message
    stages = cut(graph, [1, 2, 3], down_and_up).stages
    assert stages[2].message == ()
    assert stages[2].local == {1: ((1, 0),)}
    assert stages[3].message == ((2, 0),)
    assert stages[3].local == {0: ((0, 0),)}
    assert stages[3].local_gradients == {0: ((0, 0),)}


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
