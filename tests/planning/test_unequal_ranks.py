"""Ranks of unequal memory and speed: cuts follow both, against all cuts tried."""

import random
from itertools import combinations, pairwise

import pytest

from lightning_diffpipe.errors import ConfigurationError, PlanError
from lightning_diffpipe.planning.cluster import Cluster
from lightning_diffpipe.planning.cost import CostModel
from lightning_diffpipe.planning.cut_search import MOST_CUTS_TRIED
from lightning_diffpipe.planning.evaluation import Evaluator, Proposal
from lightning_diffpipe.planning.options import PlanOptions
from lightning_diffpipe.planning.proposals import Shape, count_of_cuts
from lightning_diffpipe.planning.search import find_plan

from .profiles import equal_profile, random_profile


def layers_of(plan):
    return [stage.num_layers for stage in plan.stages]


def test_cuts_follow_speed_and_memory():
    """Twelve equal layers: eight where work is done twice as fast, and fewer where there is no room for them."""
    profile, options = equal_profile(12, parameter_bytes=100), PlanOptions(8, 2, 8, data_parallel=1)
    fast_first = find_plan(profile, Cluster(2, rank_speeds=(1.0, 0.5)), options)
    assert layers_of(fast_first) == [8, 4]
    assert layers_of(find_plan(profile, Cluster(2, rank_speeds=(0.5, 1.0)), options)) == [4, 8]
    equal_s = find_plan(profile, Cluster(2), options).planned.iteration_s
    assert fast_first.planned.iteration_s == pytest.approx(4 / 3 * equal_s, rel=0.1)
    need = find_plan(profile, Cluster(2), options).planned.peak_memory_bytes
    assert layers_of(find_plan(profile, Cluster(2), options)) == [6, 6]
    small = Cluster(2, rank_memory_bytes=(round(0.7 * need[0]), 2 * need[1]))
    plan = find_plan(profile, small, options)
    assert plan.num_stages == 2
    assert layers_of(plan)[0] < 6
    assert plan.planned.peak_memory_bytes[0] <= small.rank_memory_bytes[0]


@pytest.mark.parametrize("seed", range(6))
def test_plans_are_the_best_of_all_cuts(seed):
    """Where there are too many cuts to try all, within 2 %."""
    choice = random.Random(seed)
    num_ranks, num_layers = choice.choice([(2, 12), (3, 12), (3, 40)])
    profile = random_profile(choice, num_layers)
    speeds = [choice.choice([0.4, 0.6, 1.0]) for _ in range(num_ranks - 1)]
    speeds.insert(choice.randrange(num_ranks), 1.0)
    cluster = Cluster(num_ranks, rank_speeds=tuple(speeds))
    options = PlanOptions(8, num_ranks, 4, num_replicas=1, data_parallel=1)
    plan = find_plan(profile, cluster, options)
    model = CostModel(profile, cluster)
    evaluator, shape = Evaluator(model, options), Shape(1, num_ranks, num_ranks, (2,) * 4, "1f1b")
    best_s = min(
        evaluator.step_s(
            Proposal(shape, tuple((a, b, 1) for a, b in pairwise((0, *cut, num_layers))))
        )
        for cut in combinations(range(1, num_layers), num_ranks - 1)
    )
    loose = 1.02 if count_of_cuts(model, shape) > MOST_CUTS_TRIED else 1 + 1e-9
    assert plan.planned.iteration_s <= best_s * loose


def test_lists_for_other_ranks_are_refused():
    with pytest.raises(
        ConfigurationError, match="rank_memory_bytes has 3 numbers, but there are 2 ranks"
    ):
        Cluster(2, rank_memory_bytes=(1, 2, 3))
    for speeds in ((0.5, 0.5), (2.0, 1.0), (0.0, 1.0)):
        with pytest.raises(ConfigurationError, match="shares of the speed of the fastest rank"):
            Cluster(2, rank_speeds=speeds)


def test_frozen_work_in_bubbles_takes_longer_on_slower_ranks():
    choice = random.Random(1)
    profile = random_profile(choice, 8, frozen=True)
    plan = find_plan(
        profile,
        Cluster(2, rank_speeds=(1.0, 0.5)),
        PlanOptions(8, 2, 4, data_parallel=1, filling="shares"),
    )
    assert plan.timeline.iteration_s == pytest.approx(plan.planned.iteration_s)
    assert plan.pieces


@pytest.mark.slow
def test_ranks_without_room_are_named():
    profile = equal_profile(12, parameter_bytes=100)
    options = PlanOptions(8, 2, 8, data_parallel=1)
    with pytest.raises(
        PlanError, match=r"into 2,000, 50 bytes a rank: .*, and some ranks have less"
    ):
        find_plan(profile, Cluster(2, rank_memory_bytes=(2000, 50)), options)
