"""Several backbones: cut together, in opposite directions; and as one chain."""

import random
from dataclasses import replace
from itertools import combinations, pairwise, product

import pytest

from lightning_diffpipe.errors import PartitionError
from lightning_diffpipe.planning.cluster import Cluster, Link
from lightning_diffpipe.planning.options import PlanOptions
from lightning_diffpipe.planning.partition import chain_cuts, opposite_cuts
from lightning_diffpipe.planning.profile import SequenceShares, Skip, joined, of_step, separated
from lightning_diffpipe.planning.search import find_plan

from .profiles import equal_profile, random_cluster, random_profile, several_backbones


def of_ranks(down, up, cuts, num_ranks):
    """What every rank has of either chain."""
    (a, b), ranks = cuts, range(num_ranks)
    a, b = (*a, len(down)), (*b, len(up))
    return [(sum(down[a[r]:a[r + 1]]), sum(up[b[-r - 2]:b[-r - 1]])) for r in ranks]  # fmt: skip


@pytest.mark.parametrize("seed", range(60))
def test_the_joint_partition_is_the_best_of_all(seed):
    """Compared with brute force: first the fullest rank counts, then how even the stages are."""
    rng = random.Random(seed)
    R = rng.randint(1, 4)
    down, up = (
        [rng.choice((0, 1, 5, rng.random())) for _ in range(rng.randint(R, 7))] for _ in "ab"
    )

    def value(cuts):
        shares = of_ranks(down, up, cuts, R)
        return round(max(map(sum, shares)), 9), sum(a * a + b * b for a, b in shares)

    of_chain = (combinations(range(1, len(chain)), R - 1) for chain in (down, up))
    best = min(value(((0, *a), (0, *b))) for a, b in product(*map(list, of_chain)))
    assert value(opposite_cuts(down, up, R)) == pytest.approx(best)
    slack = value(opposite_cuts(down, up, R, slack=0.1))
    assert slack[0] <= 1.1 * best[0] + 1e-9
    assert slack[1] <= best[1] + 1e-9


def test_more_backbones_are_cut_in_pairs():
    weights = [1, 1, 1, 1, 4, 1, 1, 1, 1, 2, 2, 1, 1]
    assert chain_cuts(weights, (0, 4, 9), 2) == (0, 2, 4, 5, 9, 11)
    with pytest.raises(PartitionError, match="backbones of 4 and 5 layers into 5 stages"):
        chain_cuts(weights, (0, 4, 9), 5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_a_cascade_never_takes_longer_than_the_best_of_both_kinds_of_schedules(seed):
    rng = random.Random(seed)
    parts = [random_profile(rng, rng.randint(4, 9)) for _ in range(rng.choice((2, 2, 3)))]
    profile = several_backbones(*parts)
    cluster, options = random_cluster(rng, rng.choice((2, 4))), PlanOptions(8, data_parallel=1)
    found = {
        schedule: find_plan(profile, cluster, replace(options, schedule=schedule))
        for schedule in ("1f1b", "bidirectional", "auto")
    }
    planned_s = {schedule: plan.planned.iteration_s for schedule, plan in found.items()}
    assert planned_s["auto"] <= min(planned_s.values()) * (1 + 1e-9)
    plan = found["bidirectional"]
    assert plan.num_backbones == len(profile.backbones)
    for backbone in profile.backbones:
        own = [stage for stage in plan.stages if stage.backbone == backbone.name]
        assert [stage.first_layer for stage in own[1:]] == [stage.stop for stage in own[:-1]]
        assert own[-1].stop == len(backbone.layers)


def test_opposite_directions_leave_fewer_bubbles_than_a_chain():
    """Without frozen work; for two ranks there are none at all."""
    both = several_backbones(equal_profile(8), equal_profile(8))
    options = PlanOptions(16, num_microbatches=4, num_replicas=1, data_parallel=1)
    for ranks, bubble in ((2, 0.0), (4, 3 / 27), (8, 12 / 36)):
        chain, opposite = (
            find_plan(both, Cluster(ranks), replace(options, schedule=schedule)).planned
            for schedule in ("1f1b", "bidirectional")
        )
        assert opposite.bubble_ratio == pytest.approx(bubble)
        assert opposite.iteration_s <= 0.8 * chain.iteration_s


def test_the_order_follows_the_times_of_the_stages():
    """An upscaler of five times the base's work; by equal times a step would take longer."""
    both = several_backbones(equal_profile(6), equal_profile(6, forward_s=5, backward_s=10))
    plan = find_plan(
        both, Cluster(3), PlanOptions(12, schedule="bidirectional", num_microbatches=6)
    )
    assert plan.planned.bubble_ratio < 0.2


def test_backbones_come_apart_as_they_were_joined():
    cluster = Cluster(2, p2p=Link(1.0))
    a, b = (equal_profile(n, boundary_bytes_per_sample=n).backbones[0] for n in (4, 6))
    a = replace(a, name="a", skips=(Skip(2, 0, (2,)),))
    a = replace(a, layers=tuple(replace(x, name=f"a.{x.name}") for x in a.layers))
    b = replace(b, name="b", skips=(Skip(3, 0, (4, 6)),))
    b = replace(b, layers=tuple(replace(x, name=f"b.{x.name}") for x in b.layers))
    both = replace(equal_profile(4), backbones=(a, b))
    whole = joined(both)
    assert [x.boundary_bytes_per_sample for x in whole.backbones[0].layers] == [4] * 4 + [10] * 6
    assert whole.backbones[0].skips == (Skip(2, 0, (2,)), Skip(3, 4, (8, 10)))
    assert separated(whole, (0, 4)) == both
    assert separated(whole, (0,)) == whole
    assert of_step(whole, (0, 4)) == of_step(both, (0, 4)) == both
    assert of_step(both, (0,)) == whole
    seen = SequenceShares(((0.5, 0), (0.5, 4)))
    assert of_step(both, (0,), seen).backbones[0] == replace(whole.backbones[0], seen=seen)
    separate = joined(both, opposite=True).backbones[0]
    assert [x.boundary_bytes_per_sample for x in separate.layers] == [4, 4, 4, 0, 6, 6, 6, 6, 6, 0]
    plan = find_plan(both, cluster, PlanOptions(4, schedule="bidirectional", num_microbatches=2))
    at_cuts = [plan.costs.activation_s[stage][0] for stage in range(4)]
    assert at_cuts[0] == at_cuts[2] == 0.0, "nothing crosses from one backbone to the other"
    assert plan.layers == tuple(layer.name for backbone in (a, b) for layer in backbone.layers)
    assert list(pairwise(plan.first_layers))[1] == (plan.first_layers[1], 4)
