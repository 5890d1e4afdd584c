"""What is logged is put into one table, at a price that follows what is logged now.

State that layers keep (running statistics) is that of one process, and the only copy that is used.
"""

from types import SimpleNamespace

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_diffpipe.comm import mesh
from lightning_diffpipe.comm.mesh import Mesh, RankLayout
from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.graph.cut import cut
from lightning_diffpipe.graph.probe import probe
from lightning_diffpipe.planning.schedule import Placement
from lightning_diffpipe.runtime.ownership import require_one_home, warn_of_statistics
from lightning_diffpipe.runtime.results import ResultSharing


class Alone:
    """Stands for `torch.distributed`: the other rank has nothing to tell."""

    ReduceOp = dist.ReduceOp

    def get_world_size(self, group):
        return 2

    def all_reduce(self, table, group, **options):
        return object()

    def all_gather_object(self, box, own, group):
        box[:] = [{}, own]


@pytest.fixture
def sharing(monkeypatch):
    """Results of the last of two stages."""
    monkeypatch.setattr(mesh, "dist", Alone())
    layout = RankLayout(2, Placement.of_replicas([1, 1]))
    return ResultSharing(Mesh(layout, 1, torch.device("cpu"), "gloo", timeout_s=9.0), 1)


def works(*metrics, size=2, **options):
    """Microbatches with loss 1, 2, ... that log so."""
    return [
        SimpleNamespace(
            loss=torch.tensor(float(number)),
            num_samples=size,
            weight=size,
            partitioned=SimpleNamespace(returned={}),
            reached=set(),
            logged=[("log", (name, value), options) for name, value in logged.items()],
        )
        for number, logged in enumerate(metrics, 1)
    ]


def shared(sharing, microbatches):
    sharing.start(microbatches)
    loss, _, logged = sharing.finish()
    return float(loss), {entry.name: float(entry.value) for entry in logged}


class Counts(TorchDispatchMode):
    """Counts operations of torch."""

    num_calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.num_calls += 1
        return function(*args, **(kwargs or {}))


def test_names_of_earlier_steps_cost_nothing(sharing):
    """History: with names that vary, such as one for each timestep, every step filled in all there ever were."""
    microbatches = works({"a": 1.0}, {"a": 2.0, "z": 5.0}, {})
    assert shared(sharing, microbatches) == (2.0, {"a": 1.5, "z": 5.0})
    with Counts() as before:
        sharing.start(microbatches)
    sharing.finish()
    shared(sharing, works({f"loss/t{number}": 0.0 for number in range(1000)}))
    with Counts() as after:
        sharing.start(microbatches)
    assert after.num_calls <= before.num_calls
    assert sharing.finish()[0] == 2
    assert shared(sharing, microbatches) == (2.0, {"a": 1.5, "z": 5.0})


@pytest.mark.parametrize(
    "number", [numpy.float32(3), numpy.float64(0.1), 2**24 + 1, numpy.int64(3), True]
)
def test_numbers_of_any_kind_are_logged(sharing, number):
    """History: the last rank refused what numpy's mean of float32 gives, after minutes of planning."""
    assert shared(sharing, works({"a": number})) == (1.0, {"a": float(number)})


@pytest.mark.parametrize(
    ("value", "kind"),
    [(torch.ones(2, 1), r"Tensor of shape \(2, 1\)"), ("3", "str"), (None, "NoneType")],
)
def test_what_is_no_number_is_named_with_its_metric(sharing, value, kind):
    """History: the error told its type only, of a step that may log dozens."""
    with pytest.raises(
        ConfigurationError, match=rf"^self\.log\('bad', \.\.\.\) was given a {kind};"
    ):
        shared(sharing, works({"good": 1.0, "bad": value}))


@pytest.mark.parametrize(
    "options", [{"reduce_fx": lambda values: values}, {"sync_dist_group": (n for n in ())}]
)
def test_options_that_cannot_travel_are_named_with_their_metric(sharing, options):
    """History: it was a bare PicklingError, which named neither."""
    shared(sharing, works({"known": 1.0}))
    (option,) = options
    with pytest.raises(ConfigurationError, match=rf"^self\.log\('bad', \.\.\., {option}=<.*'mean'"):
        sharing.start(works({"fresh": 1.0}) + works({"bad": 1.0}, **options))


WIDTH = 6


class Normed(nn.Module):
    """A frozen encoder in training mode, one in evaluation mode, and a trained path with batch norm."""

    def __init__(self):
        super().__init__()
        norm = nn.BatchNorm1d
        self.counting = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.quiet = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm(WIDTH)).eval()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = norm(WIDTH)
        for encoder in (self.counting, self.quiet):
            encoder.requires_grad_(False)

    def forward(self, batch):
        with torch.no_grad():
            target, condition = self.counting(batch), self.quiet(batch)
        x = self.norm(torch.tanh(self.first(batch + condition)))
        return (self.last(x) - target).square().mean()


class Twice(Normed):
    def forward(self, batch):
        return self.norm(self.last(self.norm(self.first(batch)))).square().mean()


def step(module, batch):
    return module(batch)


def test_only_layers_that_keep_nothing_run_in_advance(caplog):
    graph = probe(Normed(), step, torch.randn(4, WIDTH), max_share=1 / 30)
    ahead = {graph.layers[i].name for i in graph.frozen}
    assert ahead == {"counting.0", "quiet.0", "quiet.1"}
    warn_of_statistics(graph, cut(graph, [2]), Placement.of_replicas([1, 1]))
    assert "counting.1: not trained" in caplog.text
    assert "quiet" not in caplog.text


def test_replicas_that_share_out_statistics_are_named(caplog):
    root = Normed()
    root.counting.eval()
    graph = probe(root, step, torch.randn(4, WIDTH), max_share=1 / 30)
    pieces = cut(graph, [1])
    warn_of_statistics(graph, pieces, Placement.of_replicas([2, 1]))
    assert not caplog.text
    warn_of_statistics(graph, pieces, Placement.of_replicas([1, 2]))
    assert "stage 1 keeps statistics (norm." in caplog.text
    assert "each of its 2 replicas" in caplog.text


class Reads(Normed):
    def forward(self, batch):
        x = self.norm(self.first(batch))
        return self.last(x * self.norm.running_var.sqrt()).square().mean()


@pytest.mark.parametrize(
    ("module_class", "layers", "message"),
    [
        # History: each stage had the statistics of its own calls.
        (Twice, ["first", "norm", "last", "norm"], r"'norm\..*' is changed .* stage 0 and used on stage 1"),
        (Reads, ["first", "norm", "last"], r"'norm\.running_var' is changed"),
    ],
)  # fmt: skip
def test_state_that_two_stages_would_change_or_read_is_refused(module_class, layers, message):
    graph = probe(module_class(), step, torch.randn(4, WIDTH), max_share=1 / 30)
    assert [layer.name for layer in graph.layers] == layers
    with pytest.raises(ConfigurationError, match=message):
        require_one_home(graph, cut(graph, [2]))
    require_one_home(graph, cut(graph, [1]))
    require_one_home(graph, cut(graph, []))
