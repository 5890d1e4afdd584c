"""Attribution of glue, on paper."""

from dataclasses import dataclass

import pytest

from lightning_diffpipe.graph.layer import ContainerCall
from lightning_diffpipe.planning.cluster import Cluster
from lightning_diffpipe.planning.cost import CostModel, LayerRun
from lightning_diffpipe.planning.profile import BackboneProfile, LayerProfile, ModelProfile, Seconds
from lightning_diffpipe.profiling.layer_costs import backward_s, forward_s, repeated_s
from lightning_diffpipe.profiling.step_run import StepTimes


@dataclass
class Entry:
    index: int
    frozen: bool


class Graph:
    """As much of a `LayerGraph` as attribution reads; "f" is a frozen layer, "t" one of the path."""

    def __init__(self, kinds, calls=()):
        self.layers = tuple(Entry(i, kind == "f") for i, kind in enumerate(kinds))
        self.frozen = tuple(i for i, kind in enumerate(kinds) if kind == "f")
        self.path = tuple(i for i, kind in enumerate(kinds) if kind == "t")
        self.calls = tuple(ContainerCall("container", *span, draws_random=False) for span in calls)


def times(before, inside, tail=0.0, backward=None, backward_tail=0.0):
    return StepTimes(
        tuple(before), tuple(inside), tail, tuple(backward or [0.0] * len(inside)), backward_tail
    )


@pytest.mark.parametrize(
    ("graph", "tail", "expected_s"),
    [
        # Glue counts for the layer that it feeds, and the loss for the last one.
        (Graph("tt"), 16, [11, 20 + 2 + 16]),
        # In front of a frozen layer it counts for the path, too; not inside a frozen container, but in a mixed one.
        (Graph("ftft"), 16, [11, 20 + 2 + 1, 34, 40 + 8 + 4 + 16]),
        (Graph("fft", calls=[(0, 2)]), 0, [11, 22, 30 + 4 + 1]),
        (Graph("fft", calls=[(0, 3)]), 0, [11, 22, 30 + 4 + 1 + 2]),
        # A frozen layer behind the path keeps its own.
        (Graph("tf"), 16, [11 + 16, 22]),
    ],
)
def test_what_glue_counts_for(graph, tail, expected_s):
    count = len(graph.layers)
    glue_s, layers_s = [1, 2, 4, 8][:count], [10, 20, 30, 40][:count]
    assert forward_s(graph, times(glue_s, layers_s, tail=tail)) == expected_s


def test_the_backward_of_the_loss_counts_for_the_last_layer():
    graph = Graph("ftt")
    whole = times([0] * 3, [0] * 3, backward=[0, 5, 6], backward_tail=2)
    assert backward_s(graph, whole) == [0, 5, 6 + 2]


def test_total_is_the_whole_step():
    whole = times([1, 2], [10, 20], tail=4, backward=[5, 6], backward_tail=2)
    assert whole.total_s == pytest.approx(50)


def test_glue_at_the_top_is_repeated_by_every_stage():
    graph = Graph("ffttft", calls=[(0, 2)])
    whole = times([1, 2, 4, 8, 16, 32], [0] * 6)
    assert repeated_s(graph, whole) == 1 + 4  # not what lies between the frozen layers 0 and 1


def test_a_later_stage_pays_for_it_again():
    layers = tuple(
        LayerProfile(name, Seconds.per_sample(1.0), Seconds.per_sample(2.0)) for name in "ab"
    )
    backbone = BackboneProfile("backbone", layers, Seconds.per_sample(0.25))
    profile = ModelProfile("two layers", (backbone,))
    model = CostModel(profile, Cluster(2))
    assert model.forward_s(LayerRun(0, 2), 4) == 8
    assert model.forward_s(LayerRun(0, 1), 4) == 4
    assert model.forward_s(LayerRun(1, 2), 4) == 4 + 1
    assert ModelProfile.from_json(profile.to_json()) == profile
