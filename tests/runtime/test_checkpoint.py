"""A rank reads its own part of a whole state dict, and says what does not fit."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_diffpipe.errors import CheckpointError, ForeignLayerError
from lightning_diffpipe.graph.placement import place_parameters
from lightning_diffpipe.runtime.ownership import collect, owners_of_state, take_over

FIRST = SimpleNamespace(
    rank=0,
    local_rank=0,
    pipeline=0,
    layout=SimpleNamespace(ranks_per_pipeline=2),
    on_first=lambda value, _: [value],
)


def module_of_two_ranks():
    """Rank 0 holds the first layer, rank 1 the second; the statistics are everybody's."""
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    module.register_buffer("statistics", torch.zeros(2))
    for value in module.state_dict().values():
        value.zero_()
    return module, frozenset({"0.weight"}), {"0.weight": 0, "1.weight": 1}


def ones_like(module, **changes):
    return {name: torch.ones_like(value) for name, value in module.state_dict().items()} | changes


@pytest.mark.parametrize("owner", [0, 1])
def test_a_rank_takes_what_it_holds_and_what_all_hold(owner):
    """A replica is not the owner, from whom checkpoints are collected, and takes it, too."""
    module, resident, owners = module_of_two_ranks()
    take_over(ones_like(module), module, resident, {**owners, "0.weight": owner}, FIRST)
    taken = {name: value.mean().item() for name, value in module.state_dict().items()}
    assert taken == {"0.weight": 1.0, "1.weight": 0.0, "statistics": 1.0}


def test_names_and_shapes_that_do_not_fit_are_refused_before_anything_is_copied():
    """Names are, unless that is allowed."""
    module, resident, owners = module_of_two_ranks()
    state = ones_like(module, statistics=torch.ones(3))
    shapes = r"statistics has shape \(3,\) in the checkpoint and \(2,"
    with pytest.raises(CheckpointError, match=shapes):
        take_over(state, module, resident, owners, FIRST, strict=False)
    state = ones_like(module, extra=torch.ones(1))
    del state["1.weight"]
    names = r"1 names missing \['1.weight'\], 1 unknown \['extra'\]; set strict"
    with pytest.raises(CheckpointError, match=names):
        take_over(state, module, resident, owners, FIRST)
    assert module[0].weight.mean() == 0.0
    take_over(state, module, resident, owners, FIRST, strict=False)
    assert module[0].weight.mean() == 1.0


def test_entries_that_are_no_tensors_are_kept():
    """History: a module with `get_extra_state` could not be saved."""
    state = {"weight": torch.ones(2), "_extra_state": {"seen": 3}}
    saved = collect(state, {}, FIRST)
    assert torch.equal(saved["weight"], state["weight"])
    assert saved["_extra_state"] == {"seen": 3}


def test_renamed_entries_of_what_other_ranks_hold_are_theirs():
    """History: a renamed copy belonged to rank 0, which wrote its NaN; a copy cannot be made any more."""
    module, resident, owners = module_of_two_ranks()
    renamed = lambda: {name.replace("1.", "last."): v for name, v in module.state_dict().items()}
    extra = {"of_a_metric": torch.ones(2)}
    place_parameters(module, resident, "cpu", {"1.weight": "1.weight lives on rank 1"})
    assert owners_of_state(renamed() | extra, module, owners) == {"0.weight": 0, "last.weight": 1}
    for dtype in (torch.float16, torch.float8_e4m3fn):
        with pytest.raises(ForeignLayerError, match=r"1\.weight lives on rank 1, so that here"):
            [value.to(dtype) for value in renamed().values()]
