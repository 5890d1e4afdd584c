"""Parameters of other ranks take no memory, and come back."""

import copy
import io
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, NAdam, RMSprop
from torchmetrics import MeanMetric

from lightning_diffpipe.errors import ForeignLayerError, GraphError
from lightning_diffpipe.graph.placement import is_placeholder, place_parameters, restore_parameter
from lightning_diffpipe.graph.probe import probe, reprobe
from lightning_diffpipe.graph.trial import untouched
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
    for name in gone:
        restore_parameter(name, root.get_parameter(name), values[name])
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
        restore_parameter("bias", root.blocks[0].linear.bias, torch.zeros(3))


READS = {
    "a norm": lambda p, root: p.norm(),
    "a number": lambda p, root: p.sum().item(),
    "a float of an element": lambda p, root: float(p[0, 0]),
    "a comparison": lambda p, root: p == 1,
    "a branch": lambda p, root: bool(p.isnan().any()),
    "a list": lambda p, root: p.tolist(),
    "rows": lambda p, root: list(p),
    "an array": lambda p, root: p.detach().cpu().numpy(),
    "a clone": lambda p, root: p.detach().clone(),
    "a copy": lambda p, root: copy.deepcopy(p),
    "a copy of its module": lambda p, root: copy.deepcopy(root),
    "a file": lambda p, root: torch.save(root.state_dict(), io.BytesIO()),
    "a file of its module": lambda p, root: torch.save(root, io.BytesIO()),
    "a sum with another": lambda p, root: 1.0 + p,
    "an average": lambda p, root: torch.zeros(p.shape).lerp_(p, 0.1),
    "an average of many": lambda p, root: torch._foreach_lerp_(
        [torch.zeros(p.shape)], [p.data], 0.1
    ),
    "a stack": lambda p, root: torch.stack([p, p]),
    "one vector of all": lambda p, root: nn.utils.parameters_to_vector(root.parameters()),
    "a call of its module": lambda p, root: nn.functional.linear(torch.zeros(1, 16), p),
    "another type of its module": lambda p, root: root.double(),
    "another type of a state dict": lambda p, root: [v.half() for v in root.state_dict().values()],
    "its transposed": lambda p, root: p.T,
    "a view": lambda p, root: p.data.view(-1),
    "a write": lambda p, root: p.data.mul_(2),
    "a write of rows": lambda p, root: p.data.__setitem__(0, 1.0),
    "other values": lambda p, root: p.copy_(torch.zeros(p.shape)),
    "other data": lambda p, root: setattr(p, "data", torch.zeros(p.shape)),
    "values of nn.init": lambda p, root: nn.init.zeros_(p),
    "an output": lambda p, root: torch.add(torch.ones(p.shape), 1, out=p),
}


@pytest.mark.parametrize("kind", READS)
@torch.no_grad()
def test_who_reads_or_writes_what_another_rank_holds_hears_whose_it_is(kind):
    """History: it was NaN, and so were averages by hand, teachers and norms, without an error."""
    root = Tower()
    where = {"blocks.4.linear.weight": "stage 1 (rank 1)"}
    place_parameters(root, first_half(root), "cpu", where)
    parameter = root.blocks[4].linear.weight
    with pytest.raises(ForeignLayerError, match=r"lives on .*is_resident.*whole_model.*EMA"):
        READS[kind](parameter, root)
    with pytest.raises(
        ForeignLayerError, match=r"^blocks\.4\.linear\.weight lives on stage 1 \(rank 1\), so"
    ):
        parameter.norm()


@pytest.mark.parametrize("make", [SGD, Adam, AdamW, Adagrad, Adafactor, RMSprop, NAdam])
def test_what_asks_for_shapes_only_goes_on(make):
    root, whole = Tower(), Tower()
    whole.load_state_dict(root.state_dict())
    place_parameters(root, first_half(root), "cpu", {})
    foreign = root.blocks[4].linear.weight
    assert isinstance(foreign, nn.Parameter)
    assert (foreign.shape, foreign.dtype, foreign.grad) == ((16, 16), torch.float32, None)
    assert (len(foreign), foreign.numel(), foreign.device.type) == (16, 256, "cpu")
    assert "another rank" in repr(foreign)
    optimizer = make(root.parameters(), lr=0.1)
    for _ in range(2):
        root.blocks[0](rows()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.state_dict()
    root.to("cpu").requires_grad_(False).requires_grad_(True).train()
    assert root.state_dict().keys() == whole.state_dict().keys()
    assert is_placeholder(root.state_dict()["blocks.4.linear.weight"])
    assert root.load_state_dict({}, strict=False).unexpected_keys == []
    with untouched(root):
        assert foreign.isnan().all(), "in steps it is read by every stage"
    for name, value in whole.named_parameters():
        if name not in first_half(root):
            restore_parameter(name, root.get_parameter(name), value)
    assert type(foreign) is nn.Parameter
    assert torch.equal(foreign, whole.blocks[4].linear.weight)


def test_scales_of_quantized_weights_move_with_them():
    """History: a `QuantState` of bitsandbytes stayed on the host, where no kernel of a GPU finds it."""
    for held in ("blocks.0.", "blocks.1."):
        root, places = Tower(), []
        root.blocks[0].linear.weight.quant_state = SimpleNamespace(to=places.append)
        names = [name for name, _ in root.named_parameters() if name.startswith(held)]
        place_parameters(root, names, "cpu")
        assert places == ([torch.device("cpu")] if held == "blocks.0." else []), (
            "only what the rank holds"
        )
