"""Clusters as JSON, as runs and `diffpipe profile` write them.

Ranks of unequal memory and speed: cuts follow both, against all cuts tried.
"""

import json
import random
import re
from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from lightning_diffpipe.errors import ConfigurationError, PlanError
from lightning_diffpipe.planning.cluster import Cluster, Link
from lightning_diffpipe.planning.cost import CostModel
from lightning_diffpipe.planning.cut_search import MOST_CUTS_TRIED
from lightning_diffpipe.planning.evaluation import Evaluator, Proposal
from lightning_diffpipe.planning.options import PlanOptions
from lightning_diffpipe.planning.proposals import Shape, count_of_cuts
from lightning_diffpipe.planning.search import find_plan

from .profiles import equal_profile, random_profile

MEASURED = Cluster(
    4, 2, 80_000_000_000, Link(3e9, 1e-5, holds_sender=True), Link(2e9, 3e-5), Link(1e8, 1e-4)
)


@pytest.mark.parametrize(
    "cluster", [Cluster(1), Cluster(2, p2p=Link(latency_s=1e-6), device="a100"), MEASURED]
)
def test_clusters_round_trip(cluster):
    assert Cluster.from_json(cluster.to_json()) == cluster
    assert Cluster.from_dict(cluster.to_dict()) == cluster
    assert "Infinity" not in cluster.to_json()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"format": "x"}, 'c.json: format: expected "diffpipe-cluster/1"; got "x"'),
        ({"num_ranks": 0}, "c.json: num_ranks: expected a whole number >= 1; got 0"),
        ({"ranks": 2}, "c.json: unknown key 'ranks'; known keys here: format, num_ranks"),
        ({"p2p": {"latency_s": -1}}, "c.json: p2p.latency_s: expected a number >= 0; got -1"),
    ],
)
def test_bad_cluster_files(changes, complaint):
    text = json.dumps({**json.loads(MEASURED.to_json()), **changes})
    with pytest.raises(ConfigurationError, match=re.escape(complaint)):
        Cluster.from_json(text, "c.json")


@pytest.mark.parametrize("link", ["p2p", "all_reduce", "p2p_between_hosts"])
@pytest.mark.parametrize("key", ["bandwidth_bytes_per_s", "latency_s"])
def test_one_value_of_a_link_is_changed_alone(link, key):
    """History: a new latency made the rest of a measured link infinitely fast, without a word."""
    changed = MEASURED.changed({link: {key: 7.0}})
    assert changed == replace(MEASURED, **{link: replace(getattr(MEASURED, link), **{key: 7.0})})


def test_a_link_between_hosts_that_was_not_measured_is_changed_from_that_inside_one():
    changed = MEASURED.changed({"all_reduce_between_hosts": {"latency_s": 1.0}, "num_ranks": 8})
    between = replace(MEASURED.all_reduce, latency_s=1.0)
    assert changed == replace(MEASURED, num_ranks=8, all_reduce_between_hosts=between)


@pytest.mark.parametrize(
    ("ranks", "gigabytes_per_s"),
    [
        ((0, 8), 20),
        ((0, 1, 8, 9), 35),
        ((0, 1, 2, 3, 8), 20),
        (tuple(range(16)), 140),
        ((0, 7), 230),
    ],
)
def test_sums_between_hosts_run_over_the_adapters_of_their_ranks_alone(ranks, gigabytes_per_s):
    """History: two pipelines over two hosts, whose groups have one adapter a host, were planned with all eight."""
    inside, single, all_ranks = Link(230e9, 3e-5), Link(20e9, 2e-5), Link(140e9, 6e-5)
    cluster = Cluster(16, 8, None, inside, inside, single, all_ranks)
    n = len(ranks)
    ring_s = 2 * (n - 1) / n * 3e9 / (gigabytes_per_s * 1e9)
    latency_s = 3e-5 if ranks == (0, 7) else 6e-5
    found_s = cluster.all_reduce_among(ranks).all_reduce_s(3e9, n)
    assert found_s == pytest.approx(latency_s + ring_s)


def test_an_adapter_that_ranks_of_a_host_share_is_not_divided():
    """As gloo has it: one ring over all ranks is as fast as a message between hosts."""
    cluster = Cluster(4, 2, None, Link(3e9), Link(2e9), Link(1e9), Link(0.9e9))
    assert cluster.all_reduce_among((0, 2)) == Link(0.9e9)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"p2p": {"latency": 1}}, "unknown key 'p2p.latency'"),
        ({"p2p": 3}, "p2p: expected an object; got 3"),
    ],
)
def test_bad_changes_of_a_cluster(values, complaint):
    with pytest.raises(ConfigurationError, match=re.escape(complaint)):
        MEASURED.changed(values)


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
