"""A plan is followed only by the model it was made for."""

from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_diffpipe import find_plan
from lightning_diffpipe.errors import PlanError
from lightning_diffpipe.graph.probe import probe
from lightning_diffpipe.pipeline import cut_positions
from lightning_diffpipe.planning.cluster import Cluster
from lightning_diffpipe.planning.options import PlanOptions
from lightning_diffpipe.preparation import _given_plan
from lightning_diffpipe.profiling.estimate import estimate_profile


def graph_of(module):
    return probe(module, lambda module, batch: module(batch).mean(), torch.ones(2, 4))


MODULE = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
GRAPH = graph_of(MODULE)
PLAN = find_plan(estimate_profile(MODULE, GRAPH), Cluster(2), PlanOptions(8, num_stages=2))


def test_a_plan_names_the_layers_it_cuts():
    assert PLAN.layers == tuple(layer.name for layer in GRAPH.layers)
    assert cut_positions(PLAN, GRAPH) == (PLAN.stages[1].first_layer,)


def test_a_plan_for_another_model_of_as_many_layers_is_refused():
    """History: only the number of layers was compared, and any other model was cut as planned."""
    names = ("0", "1", "inner", "3")
    other = graph_of(nn.Sequential(OrderedDict(zip(names, MODULE, strict=True))))
    with pytest.raises(
        PlanError, match=r"layer 2 of its 4 is 2, but this module's is inner; make a plan for this"
    ):
        cut_positions(PLAN, other)
    assert cut_positions(replace(PLAN, layers=()), other) == cut_positions(PLAN, GRAPH)


def test_a_run_may_begin_with_the_last_batch_of_an_epoch():
    with pytest.warns(
        UserWarning, match=r"for 8 samples .* first batch of this run has 3: its times"
    ):
        assert _given_plan(PLAN, world_size=2, batch_size=3) is PLAN
