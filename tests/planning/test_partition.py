"""Ways to cut a chain, against trying everything."""

import random
from itertools import combinations, pairwise

import pytest

from lightning_diffpipe.errors import PartitionError
from lightning_diffpipe.planning.cluster import Cluster, Link
from lightning_diffpipe.planning.cost import CostModel, LayerRun
from lightning_diffpipe.planning.options import PARTITIONS, PlanOptions
from lightning_diffpipe.planning.partition import Stage, greedy_cuts, minimax_cuts, partition_fronts
from lightning_diffpipe.planning.proposals import pipedream_cuts
from lightning_diffpipe.planning.search import find_plan

from .profiles import random_case, random_cluster, random_profile


def every_cut(num_layers, num_stages, num_ranks):
    for marks in combinations(range(1, num_layers), num_stages - 1):
        for shares in combinations(range(1, num_ranks), num_stages - 1):
            replicas = [b - a for a, b in pairwise((0, *shares, num_ranks))]
            edges = pairwise((0, *marks, num_layers))
            yield [(first, stop, r) for (first, stop), r in zip(edges, replicas, strict=True)]


@pytest.mark.parametrize("seed", range(100))
def test_minimax_is_exact(seed):
    rng = random.Random(seed)
    times = [rng.uniform(0.1, 3) for _ in range(rng.randint(1, 9))]
    num_stages = rng.randint(1, len(times))

    def slowest(firsts):
        return max(sum(times[a:b]) for a, b in pairwise((*firsts, len(times))))

    ways = [(0, *marks) for marks in combinations(range(1, len(times)), num_stages - 1)]
    assert slowest(minimax_cuts(times, num_stages)) == pytest.approx(min(map(slowest, ways)))


def test_cuts_are_within_the_limits_of_every_stage():
    """Limits are any that do not fall with a later first layer, one after the other for each stage."""
    found = {True: 0, False: 0}
    for seed in range(3000):
        rng = random.Random(seed)
        num_layers, num_stages = rng.randint(1, 7), rng.randint(1, 4)
        limits = [
            sorted(min(num_layers, first + rng.randint(0, 3)) for first in range(num_layers))
            for _ in range(num_stages)
        ]

        def within(edges, limits=limits):
            return all(b <= limit[a] for limit, (a, b) in zip(limits, pairwise(edges), strict=True))

        marks = combinations(range(1, num_layers), num_stages - 1)
        possible = any(within((0, *inner, num_layers)) for inner in marks)
        cuts = greedy_cuts(num_layers, num_stages, lambda s, a, limits=limits: limits[s][a])
        assert (cuts is not None) == possible, (seed, limits, cuts)
        if cuts is not None:
            assert (cuts[0], cuts[-1], len(cuts)) == (0, num_layers, num_stages + 1)
            assert all(a < b for a, b in pairwise(cuts))
            assert within(cuts), (seed, limits, cuts)
        found[possible] += 1
    assert min(found.values()) > 300


@pytest.mark.parametrize("seed", range(100))
def test_the_dynamic_program_matches_brute_force(seed):
    """(M + 2S - 2) W + Y is smallest on the front; one number per state would miss it."""
    rng = random.Random(seed)
    L, S, M = rng.randint(4, 7), rng.randint(2, 3), rng.randint(1, 4)
    D = rng.randint(S, 5)
    forward = [rng.uniform(0.1, 1) for _ in range(L)]
    backward = [rng.uniform(0.2, 2) for _ in range(L)]
    gradient = [rng.uniform(0, 6) for _ in range(L)]

    def stage_cost(first, stop, r):
        sync_s = 2 * (r - 1) / r * sum(gradient[first:stop])
        busy_s = sum(forward[first:stop]) + sum(backward[first:stop])
        return busy_s / r, sync_s - sum(backward[first:stop]) / r

    def objective(W, Y):
        return (M + 2 * S - 2) * W + Y

    best = min(
        objective(max(w for w, _ in costs), max(y for _, y in costs))
        for cut in every_cut(L, S, D)
        for costs in [[stage_cost(*stage) for stage in cut]]
    )
    front = partition_fronts(L, D, S, stage_cost)[S, D]
    assert min(objective(p.slowest_s, p.sync_s) for p in front) == pytest.approx(best)
    assert [p.slowest_s for p in front] == sorted(p.slowest_s for p in front)
    assert [p.sync_s for p in front] == sorted((p.sync_s for p in front), reverse=True)


@pytest.mark.parametrize("seed", range(60))
def test_pipedream_matches_brute_force(seed):
    rng = random.Random(seed)
    L, D = rng.randint(2, 7), rng.randint(1, 4)
    model = CostModel(random_profile(rng, L), random_cluster(rng, D))

    def time_of(cut):
        times = []
        for first, stop, r in cut:
            run = LayerRun(first, stop)
            compute_s = model.forward_s(run, 4) + model.backward_s(run, 4)
            sync_s = model.cluster.all_reduce.all_reduce_s(model.gradient_bytes(run), r)
            times.append(max(compute_s, sync_s) / r)
            if stop < L:
                times.append(2 * model.cluster.p2p.seconds(model.boundary_bytes(run, 4)))
        return max(times)

    for S in range(1, min(L, D) + 1):
        (found,) = pipedream_cuts(model, D, 4, S)
        assert time_of(found) == pytest.approx(min(map(time_of, every_cut(L, S, D))))


@pytest.mark.parametrize("partition", PARTITIONS)
def test_no_baseline_beats_the_search(partition):
    for seed in range(20):
        profile, cluster, batch = random_case(seed)
        count = 2 if batch // cluster.num_ranks >= 2 else 1
        best = find_plan(profile, cluster, PlanOptions(batch, num_microbatches=count))
        options = PlanOptions(batch, num_microbatches=count, partition=partition)
        other = find_plan(profile, cluster, options)
        assert other.planned.iteration_s >= best.planned.iteration_s * (1 - 1e-9)


def test_uniform_and_by_parameters_cut_where_they_say():
    rng = random.Random(0)
    profile, cluster = random_profile(rng, 9), Cluster(3, p2p=Link(1e9))

    def firsts(partition):
        options = PlanOptions(6, num_stages=3, num_microbatches=2, partition=partition)
        return tuple(s.first_layer for s in find_plan(profile, cluster, options).stages)

    assert firsts("uniform") == (0, 3, 6)
    weights = [float(layer.parameter_bytes) for layer in profile.backbones[0].layers]
    assert firsts("parameters") == minimax_cuts(weights, 3)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (
            lambda: minimax_cuts([1, 1], 3),
            "cannot cut 2 layers into 3 stages; choose num_stages be",
        ),
        (lambda: Stage(0, "unet", 3, 2), "stage 0 needs at least one layer; got layers 3-2"),
        (lambda: Stage(1, "unet", 3, 4, 0), "stage 1 needs at least one replica; got 0"),
    ],
)
def test_what_cannot_be_cut_is_refused(make, complaint):
    with pytest.raises(PartitionError, match=complaint):
        make()
