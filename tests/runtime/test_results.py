"""What is logged is put into one table, at a price that follows what is logged now."""

from types import SimpleNamespace

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_diffpipe.comm import mesh
from lightning_diffpipe.comm.mesh import Mesh, RankLayout
from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.planning.schedule import Placement
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
