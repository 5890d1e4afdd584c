"""Of equal blocks two are traced: graphs are those of a trace of all of them."""

import dataclasses
import functools
import random
from collections import Counter

import pytest
import torch
from torch import nn

from lightning_diffpipe.errors import GraphError
from lightning_diffpipe.graph import repeats
from lightning_diffpipe.graph.discovery import StepProbe
from lightning_diffpipe.graph.probe import fold, probe
from tests.zoo import CASES, in_double

NUM_BLOCKS = 6


class Block(nn.Module):
    """A block of two layers and glue: what is beside the stream is read by some of them only."""

    def __init__(self, index):
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.gate = nn.Parameter(torch.ones(8))
        self.register_buffer("table", torch.ones(8))

    def forward(self, x, time, unused=None):
        shift = time[:, None] * self.gate + self.table
        return x + self.outer(self.inner(self.norm(x) + shift).relu()), (x * 2).detach()


class Drawing(Block):
    """Draws random numbers of the device."""

    def forward(self, x, time, unused=None):
        return super().forward(nn.functional.dropout(x, 0.5), time)


class Attending(Block):
    """Holds an object of its own, as attention processors are."""

    class Processor:
        def __init__(self, heads):
            self.heads, self.settings = heads, {"scale": 0.5}

    def __init__(self, index):
        super().__init__(index)
        self.processor = self.Processor(2)

    def forward(self, x, time, unused=None):
        return super().forward(x * self.processor.settings["scale"], time)


class Named(Block):
    """Has linear layers that know their names, as those with adapters do."""

    def __init__(self, index):
        super().__init__(index)
        self.inner.notes = {"target": f"blocks.{index}.inner", "rank": 4}


class Hooking(Block):
    """Puts a hook on a tensor of its own; history: a fold that ran no such block did not know of hooks."""

    def forward(self, x, time, unused=None):
        y = x * 1
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient)
        return super().forward(y, time)


PLAIN = [Block, Drawing, Attending, Named, Hooking]


class Numbered(Block):
    """Knows its place."""

    def __init__(self, index):
        super().__init__(index)
        self.index = index

    def forward(self, x, time, unused=None):
        return super().forward(x * (self.index % 2), time)


class Configured(Block):
    """Is configured in bytes, differently each."""

    def __init__(self, index):
        super().__init__(index)
        self.config = {"scale": [bytes([index])]}

    def forward(self, x, time, unused=None):
        return super().forward(x * self.config["scale"][0][0], time)


class Counting(Block):
    """Counts its calls, in an attribute."""

    calls = 0

    def forward(self, x, time, unused=None):
        self.calls += 1
        return super().forward(x, time)


class Updating(Block):
    """Updates a buffer."""

    def forward(self, x, time, unused=None):
        self.table.mul_(0.9)
        return super().forward(x, time)


class Hooked(Block):
    """Has a hook."""

    def __init__(self, index):
        super().__init__(index)
        self.inner.register_forward_hook(lambda module, args, out: out * 2)


class Writing(Block):
    """Writes into its argument."""

    def forward(self, x, time, unused=None):
        x.mul_(2)
        return super().forward(x, time)


class Storing(Block):
    """Stores what the next block reads in a list that it is given, as autoencoders of videos do.

    History: a fold took later blocks for equal ones, which had stored nothing, and calls were others.
    """

    def forward(self, x, time, unused=None, stored=None):
        x, rest = super().forward(x if stored[0] is None else x + stored[0], time)
        stored[0] = x * 2
        return x, rest


class OnClass(Block):
    """Hands a value to the next block behind everybody's back."""

    hidden = None

    def forward(self, x, time, unused=None):
        if (before := OnClass.hidden) is not None:
            x = x + before
        x, rest = super().forward(x, time)
        OnClass.hidden = x * 2
        return x, rest


class Tossing(Block):
    """Throws a coin of Python."""

    def forward(self, x, time, unused=None):
        return super().forward(x * random.choice([1, 1]), time)


class Own(Block):
    """Holds what cannot be compared."""

    def __init__(self, index):
        super().__init__(index)
        self.function = lambda x: x * (index + 1)

    def forward(self, x, time, unused=None):
        return super().forward(self.function(x), time)


TRACES = [Numbered, Configured, Counting, Updating, Hooked, Writing, Storing, Tossing, Own]


class Model(nn.Module):
    def __init__(self, kind, shared=False):
        super().__init__()
        self.first, self.stores = nn.Linear(8, 8), kind is Storing
        self.blocks = nn.ModuleList(kind(i) for i in range(NUM_BLOCKS))
        self.frozen = nn.ModuleList(kind(i) for i in range(NUM_BLOCKS)).requires_grad_(False)
        if shared:
            for block in self.blocks:
                block.inner = self.blocks[0].inner

    def training_step(self, batch):
        OnClass.hidden = None
        code, more = batch["x"], {"stored": [None]} if self.stores else {}
        for block in self.frozen:
            code, _ = block(code, batch["time"], **more)
        x, kept = self.first(batch["x"]), []
        for i, block in enumerate(self.blocks):
            x, rest = block(x, batch["time"], code if i % 2 else None, **more)
            kept.append(rest)
        return (x - kept[3]).square().mean() + (code * kept[1]).mean()


def run(module, batch):
    return module.training_step(batch)


def batch_of(num_samples=3):
    generator = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randn, generator=generator)
    return {"x": draw(num_samples, 5, 8), "time": draw(num_samples, 1)}


@pytest.fixture
def repeated(monkeypatch):
    """Counts the calls that ran and those that did not, of modules that have equals."""
    counts, call = Counter(), repeats.Repeats.call

    def counted(self, name, *args):
        made = call(self, name, *args)
        counts["run" if made is None or made.known is None else "repeated"] += (
            name in self.candidates
        )
        return made

    monkeypatch.setattr(repeats.Repeats, "call", counted)
    return counts


def both(look, monkeypatch):
    """What a look finds, and what it finds where every call runs; or what is raised."""

    def tried():
        try:
            return look()
        except GraphError as error:
            return str(error)

    found = tried()
    with monkeypatch.context() as patched:
        patched.setattr(StepProbe, "_repeats", lambda self, *_: None)
        return found, tried()


def same(graph, other):
    """Whether two graphs agree, or two errors."""
    if isinstance(graph, str) or isinstance(other, str):
        return graph == other
    fields = [field.name for field in dataclasses.fields(graph) if field.name != "call_results"]
    return all(getattr(graph, name) == getattr(other, name) for name in fields)


@pytest.mark.slow
@pytest.mark.parametrize("max_share", [0.3, pytest.param(0.05, marks=pytest.mark.table), 0.01])
@pytest.mark.parametrize("kind", [*PLAIN, *TRACES, OnClass])
def test_graphs_are_those_of_a_look_at_all_blocks(kind, max_share, repeated, monkeypatch):
    module = Model(kind)
    look = lambda: probe(module, run, batch_of(), max_share=max_share)
    graph, every = both(look, monkeypatch)
    assert same(graph, every)
    assert repeated["repeated"] > 0 or kind not in PLAIN
    assert repeated["repeated"] == 0 or kind not in TRACES
    if not isinstance(graph, str) and len(graph.path) > 2:
        split = [1, len(graph.path) // 2]
        again = lambda: dataclasses.replace(graph)  # which knows no folded graphs
        folded, every = both(lambda: fold(module, run, batch_of(), again(), split)[0], monkeypatch)
        assert same(folded, every)


def test_what_is_shared_is_looked_at_each_time(repeated, monkeypatch):
    module = Model(Block, shared=True)
    assert same(*both(lambda: probe(module, run, batch_of(), max_share=0.05), monkeypatch))
    assert repeated["run"] > 0  # of the frozen ones


@pytest.mark.parametrize("num_blocks", [6, 60])
def test_probing_takes_as_many_calls_however_deep_a_model_is(num_blocks, repeated, monkeypatch):
    monkeypatch.setattr(f"{__name__}.NUM_BLOCKS", num_blocks)
    graph = probe(Model(Block), run, batch_of(), max_share=0.05)
    assert len(graph.layers) >= num_blocks
    # Two of each kind, in two looks: the frozen ones, and trained ones with a code and without.
    assert repeated["run"] <= 2 * 2 * 4


@pytest.mark.parametrize("alike", [True, False])
def test_a_fold_runs_no_block_that_its_probe_has_run(alike, repeated, monkeypatch):
    module = Model(Block)
    for i, block in enumerate([] if alike else [*module.blocks, *module.frozen]):
        block.norm.eps = 1e-5 * (i + 1)
    graph = probe(module, run, batch_of(), max_share=0.3)
    stages = range(1, len(graph.path))

    def runs_of_fold():
        repeated.clear()
        folded, every = both(
            lambda: fold(module, run, batch_of(), dataclasses.replace(graph), stages)[0],
            monkeypatch,
        )
        assert same(folded, every)
        return repeated["run"]

    assert runs_of_fold() == 0 < repeated["repeated"]
    module.blocks[2].norm.eps = module.blocks[4].norm.eps = 1e-3  # equals of each other only
    assert runs_of_fold() == 2


_DEEPER = ("num_layers", "depth", "num_single_layers", "num_refiner_layers", "n_layers")


def deeper(case):
    """The same model with seven blocks where it has two."""
    config = {name: 7 if name in _DEEPER and x else x for name, x in case.config.items()}
    return dataclasses.replace(case, config=config)


@pytest.mark.table
@pytest.mark.parametrize(
    "name",
    [
        case.name
        for case in CASES.values()
        if case.reason is None and case.make is None and set(case.config) & set(_DEEPER)
    ],
)
def test_deep_denoisers_of_diffusers(name, repeated, monkeypatch):
    with in_double():
        try:
            root, batch = deeper(CASES[name]).build()
        except Exception as error:
            pytest.skip(f"not to be made deeper so: {error}")
        step = lambda module, batch: module.training_step(batch, 0)
        try:
            step(root, batch)
        except Exception as error:
            pytest.skip(f"not to be made deeper so: {error}")
        graph, every = both(lambda: probe(root, step, batch), monkeypatch)
        assert same(graph, every)
        if not isinstance(graph, str):
            middle = [len(graph.path) // 2]
            again = lambda graph=graph: dataclasses.replace(graph)  # which knows no folded graphs
            folded, every = both(lambda: fold(root, step, batch, again(), middle)[0], monkeypatch)
            assert same(folded, every)
