"""What a block costs the host in patches: operators beside those of the model, after the first step."""

from collections import Counter

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_diffpipe.sampling.pipefusion import PipeFusion
from lightning_diffpipe.sampling.request import OneProcess
from tests.rows import row
from tests.sampling import models
from tests.sampling.models import build, flux, knowing, layout_of, pixart, request_for
from tests.sampling.ranks_in_threads import sample_together

PATCHES = 4
VIEWS = {"narrow", "alias", "expand", "view", "transpose", "slice", "unsqueeze", "select", "t"}
WAITS = {"_local_scalar_dense", "equal", "nonzero", "item", "is_nonzero"}
DEEP = {
    "pixart": lambda: pixart(num_layers=6),
    "flux": lambda: flux(num_single_layers=5),
    "flux, double": lambda: flux(num_layers=4),
}


class Operators(TorchDispatchMode):
    """Counts operators by name, and which of them came in the last step."""

    def __init__(self):
        super().__init__()
        self.counted, self.ends = Counter(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counted[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))

    def end_step(self, step):
        self.ends.append(self.counted.copy())

    @property
    def last_step(self):
        return self.ends[-1] - self.ends[-2]


def last_step(sampler, name, tiny):
    with Operators() as operators:
        sampler.sample(request_for(name, tiny=tiny), operators.end_step)
    return operators.last_step


def of_two_blocks(name, monkeypatch, count):
    """Operators of a step that a model with two blocks more has more."""
    monkeypatch.setitem(models.MODELS, "deep", DEEP[name])
    shallow = count(name.removesuffix(", double"))
    try:
        deep = count("deep")
    finally:
        layout_of.cache_clear()
    return Counter({n: deep[n] - shallow[n] for n in deep | shallow if deep[n] != shallow[n]})


def beside_the_model(name, monkeypatch):
    """Operators of two blocks in a step in patches that are not the model's own."""

    def in_patches(name):
        tiny = build(name)
        sampler = PipeFusion(tiny.model, num_patches=PATCHES, verify=False)
        return last_step(knowing(sampler, name, tiny), name, tiny)

    found = of_two_blocks(name, monkeypatch, in_patches)
    plain = of_two_blocks(name, monkeypatch, lambda n: last_step(OneProcess(), n, build(n)))
    return {n: found[n] - PATCHES * plain[n] for n in found if found[n] > PATCHES * plain[n]}


def num_launched(more):
    """Operators that are no views."""
    return sum(count for operator, count in more.items() if operator not in VIEWS)


@pytest.mark.parametrize("name", ["pixart", "flux", row("flux, double")])
def test_a_block_costs_three_operators_more_in_a_patch(name, monkeypatch):
    """Keys and values are written, two copies; a result that is no tensor of its own becomes one."""
    more = beside_the_model(name, monkeypatch)
    assert not WAITS & more.keys()
    assert more["copy_"] == 2 * 2 * PATCHES
    assert num_launched(more) <= 3 * 2 * PATCHES, more


def test_blocks_of_other_ranks_cost_nothing(monkeypatch):
    """History: each made a tensor, 43 x 12 us a turn for Flux on four ranks."""

    def on_first_rank(name):
        counted = []

        def make(model, links):
            sampler = PipeFusion(model, links, num_patches=PATCHES, split=[2], verify=False)
            sample = sampler.sample

            def counting(request):
                with Operators() as operators:
                    out = sample(request, operators.end_step)
                counted.append((links.rank, operators.last_step))
                return out

            sampler.sample = counting
            return sampler

        sample_together(name, build(name), 2, make)
        return dict(counted)[0]

    assert not of_two_blocks("flux", monkeypatch, on_first_rank)
