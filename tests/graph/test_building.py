"""Modules whose parameters are in files until they are placed: what they take, and the values they have."""

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.graph.building import built_in_files, materialize, refuse_unset
from lightning_diffpipe.graph.placement import is_in_file, place_parameters
from lightning_diffpipe.host_memory import trim
from tests.distributed.stored import LINUX

WIDTH = 2048  # 16 MiB


def anonymous_bytes():
    """Memory of this process that no file has, but for what is free again."""
    trim()
    return int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024


def layers(number=8):
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(number)))


@LINUX
@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_only_what_is_placed_takes_memory(place):
    root, before = nn.Module(), anonymous_bytes()
    torch.manual_seed(3)
    with built_in_files(root), torch.device(place):
        root.layers = layers()
    num_bytes = sum(p.nbytes for p in root.parameters())
    assert anonymous_bytes() - before < num_bytes / 8
    torch.manual_seed(3)
    expected = layers(3)[2].weight
    resident = {n for n, _ in root.named_parameters() if n.startswith(("layers.1.", "layers.2."))}
    before = anonymous_bytes()
    place_parameters(root, resident, "cpu")
    assert num_bytes / 8 < anonymous_bytes() - before < num_bytes * 3 / 8
    assert torch.equal(root.layers[2].weight, expected)


def test_what_code_does_to_parameters_stays():
    """Ties, layouts and types; parameters that are made by copying or converting are moved when all are there."""
    root = nn.Module()
    with built_in_files(root):
        root.conv = nn.Conv2d(64, 64, 3).to(memory_format=torch.channels_last)
        root.head, root.tail = nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False)
        root.tail.weight = root.head.weight
        root.average = copy.deepcopy(root.head).bfloat16().requires_grad_(False)
        root.average.weight[0] = 7
    assert root.tail.weight is root.head.weight
    assert root.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert (root.average.weight[0] == 7).all()
    assert all(map(is_in_file, root.parameters())) is False  # a small bias
    assert all(is_in_file(p) for p in root.parameters() if p.ndim > 1)
    place_parameters(root, [n for n, _ in root.named_parameters()], "cpu")
    assert not any(map(is_in_file, root.parameters()))
    assert root.conv.weight.is_contiguous(memory_format=torch.channels_last)


def sharing(layer):
    return nn.Sequential(nn.Sequential(layer), nn.Sequential(layer), nn.Linear(4, 4))


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.LSTM(8, 8),
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)),
        lambda: nn.Transformer(16, 2, 1, 1, 32, batch_first=True),
        lambda: nn.Sequential(nn.Embedding(9, 9, padding_idx=2), nn.GroupNorm(3, 9)),
        lambda: sharing(nn.Linear(4, 4)),
    ],
)
def test_layers_of_torch_are_reset_in_the_order_of_constructors(build):
    torch.manual_seed(5)
    expected = build().state_dict()
    with torch.device("meta"):
        root = build()
    torch.manual_seed(5)
    materialize(root)
    refuse_unset(root)
    torch.testing.assert_close(expected, root.state_dict(), rtol=0, atol=0)
    if isinstance(root, nn.LSTM):
        assert all(map(torch.equal, root._flat_weights, root.parameters()))


class Table(nn.Module):
    """Has a buffer that no checkpoint has."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.arange(5), persistent=False)


def test_what_has_got_no_value_is_named():
    with torch.device("meta"):
        root = nn.Sequential(nn.Linear(2, 2), Table())
    with pytest.raises(ConfigurationError, match=r"^0.weight is on the meta device since"):
        refuse_unset(root)
    materialize(root)
    with pytest.raises(ConfigurationError, match=r"^1.table .* no reset_parameters.* of its Table"):
        refuse_unset(root)
    root[1].table = torch.arange(5)
    refuse_unset(root)


def test_without_room_for_files_layers_are_in_memory(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    root = nn.Module()
    with pytest.warns(UserWarning, match="let TMPDIR have room"), built_in_files(root):
        root.head = nn.Linear(256, 256)
    assert not is_in_file(root.head.weight)
