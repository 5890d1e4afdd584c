"""Parameters of other ranks take no memory, and come back."""

import copy

import lightning as L
import pytest
import torch
from torchmetrics import MeanMetric

from lightning_diffpipe.errors import GraphError
from lightning_diffpipe.graph.placement import is_placeholder, place_parameters, restore_parameters
from lightning_diffpipe.graph.probe import probe, reprobe
from tests.graph.steps import Tower, rows, step


def first_half(root):
    return {n for n, _ in root.named_parameters() if int(n.split(".")[1]) < 3}


def test_foreign_parameters_keep_identity_and_shape_but_no_memory():
    root = Tower()
    before = dict(root.named_parameters())
    gone = place_parameters(root, first_half(root), "cpu")
    assert set(gone) == before.keys() - first_half(root)
    for name, parameter in root.named_parameters():
        assert parameter is before[name]
        assert is_placeholder(parameter) == (name in gone)
        assert parameter.untyped_storage().nbytes() == (
            4 if name in gone else 4 * parameter.numel()
        )
    assert root.blocks[4].linear.weight.isnan().all()


class Lit(L.LightningModule):
    """Has what `.to()` moves besides parameters."""

    def __init__(self):
        super().__init__()
        self.mean = MeanMetric()
        self.register_buffer("table", torch.zeros(3))


def test_modules_know_where_they_are():
    """History: on a GPU `self.device` was the host, and so was every tensor made there."""
    root, there = Lit(), torch.device("meta")  # the only other device a CPU has
    place_parameters(root, set(), there)
    assert root.device == root.table.device == root.mean.mean_value.device == there


def test_optimizers_step_over_placeholders():
    root = Tower()
    optimizer = torch.optim.AdamW(root.parameters(), weight_decay=0.1)
    place_parameters(root, first_half(root), "cpu")
    for parameter in root.parameters():
        if not is_placeholder(parameter):
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert root.blocks[4].linear.weight.untyped_storage().nbytes() == 4


def test_values_come_back_with_their_strides():
    root = Tower()
    root.blocks[4].linear.weight.data = torch.randn(16, 16).t()
    values = copy.deepcopy(root.state_dict())
    gone = place_parameters(root, first_half(root), "cpu")
    restore_parameters(root, {name: values[name] for name in gone})
    assert all(torch.equal(value, values[name]) for name, value in root.state_dict().items())
    assert root.blocks[4].linear.weight.stride() == (1, 16)
    assert not any(is_placeholder(p) for p in root.parameters())


def test_ranks_with_different_parameters_see_the_same_graph():
    root = Tower()
    graph = probe(root, step, rows(4))
    digests = set()
    for resident in (first_half(root), set()):
        part = copy.deepcopy(root)
        place_parameters(part, resident, "cpu")
        digests.add(reprobe(part, step, rows(3), graph).digest)
    assert digests == {reprobe(root, step, rows(3), graph).digest}


def test_impossible_requests_are_refused():
    root = Tower()
    with pytest.raises(GraphError, match=r"do not exist, e\.g\. head"):
        place_parameters(root, {"head"}, "cpu")
    place_parameters(root, set(), "cpu")
    with pytest.raises(GraphError, match="was freed on this rank"):
        place_parameters(root, {"blocks.0.linear.weight"}, "cpu")
    with pytest.raises(GraphError, match=r"has shape \(16,\), its value \(3,\)"):
        restore_parameters(root, {"blocks.0.linear.bias": torch.zeros(3)})
