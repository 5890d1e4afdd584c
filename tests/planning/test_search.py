"""The search against trying everything, with the same simulator."""

import cProfile
import functools
import pstats
import random
import subprocess
import sys
import time
from dataclasses import replace
from itertools import chain, combinations, islice, pairwise, product, starmap

import pytest
import torch

from benchmarks.schedules import steps as measured_steps
from lightning_diffpipe.errors import PlanError
from lightning_diffpipe.planning import cut_search, evaluation
from lightning_diffpipe.planning.cluster import Cluster, Link
from lightning_diffpipe.planning.cost import CostModel, LayerRun, PipelineLinks, pipeline_costs
from lightning_diffpipe.planning.cut_search import Bounds, Search
from lightning_diffpipe.planning.evaluation import Evaluator, Proposal, preference
from lightning_diffpipe.planning.filling import encode_parts, split_evenly
from lightning_diffpipe.planning.lowering import lower, prefix_frozen
from lightning_diffpipe.planning.memory import frozen_loads, peak_memory_bytes
from lightning_diffpipe.planning.options import PlanOptions
from lightning_diffpipe.planning.passes import schedule_of_passes
from lightning_diffpipe.planning.plan import PipelinePlan, check_options
from lightning_diffpipe.planning.profile import (
    BackboneProfile,
    EncoderLayerProfile,
    EncoderProfile,
    FrozenResult,
    LayerProfile,
    ModelProfile,
    Seconds,
    SequenceShares,
    joined,
    separated,
)
from lightning_diffpipe.planning.proposals import (
    Shape,
    all_cuts,
    count_of_cuts,
    replicas_of,
    shapes,
)
from lightning_diffpipe.planning.schedule import Placement
from lightning_diffpipe.planning.schedules import SCHEDULES
from lightning_diffpipe.planning.schedules.one_f_one_b import one_f_one_b
from lightning_diffpipe.planning.search import find_plan
from lightning_diffpipe.planning.simulator import makespan, outline_of, simulate
from lightning_diffpipe.viewing.report import explain
from tests.rows import row

from .profiles import (
    equal_profile,
    every_proposal,
    peak_samples,
    random_case,
    random_cluster,
    random_profile,
    several_backbones,
    tick_costs,
    twice,
    unet_profile,
)


def seeds(num_seeds, num_fast):
    """All of them in the whole suite, the first few in the fast subset."""
    return [
        pytest.param(seed, marks=() if seed < num_fast else pytest.mark.slow)
        for seed in range(num_seeds)
    ]


def every_count(options, samples):
    """All numbers of microbatches; those the search leaves out must not be missed."""
    wanted = options.num_microbatches
    counts = range(1, samples + 1) if wanted == "auto" else [wanted]
    return [M for M in counts if samples >= M]


def every_way(profile, cluster, options):
    """All pipelines, microbatches, cuts and replicas, without any cleverness."""
    batch, num_layers = options.global_batch_size, len(profile.backbones[0].layers)
    for pipelines in range(1, cluster.num_ranks + 1):
        if cluster.num_ranks % pipelines or batch % pipelines:
            continue
        ranks, samples = cluster.num_ranks // pipelines, batch // pipelines
        for M in every_count(options, samples):
            for S in range(1, min(ranks, num_layers) + 1):
                for marks in combinations(range(1, num_layers), S - 1):
                    for shares in combinations(range(1, ranks), S - 1):
                        edges, shares = (0, *marks, num_layers), (0, *shares, ranks)
                        replicas = [shares[s + 1] - shares[s] for s in range(S)]
                        yield pipelines, split_evenly(samples, M), edges, replicas


def every_interleaved_way(profile, cluster, options):
    """All pipelines, microbatches and cuts with two stages or more on every rank."""
    batch, num_layers = options.global_batch_size, len(profile.backbones[0].layers)
    for pipelines in (1, 2):
        ranks, samples = cluster.num_ranks // pipelines, batch // pipelines
        if cluster.num_ranks % pipelines or batch % pipelines or ranks < 2:
            continue
        for M in every_count(options, samples):
            for name, v in (("interleaved", 2), ("interleaved", 3), ("interleaved", 4), ("v", 2)):
                if not SCHEDULES[name].can_place(v * ranks, ranks, M):
                    continue
                for marks in combinations(range(1, num_layers), v * ranks - 1):
                    edges = (0, *marks, num_layers)
                    yield pipelines, split_evenly(samples, M), edges, ranks, name


def interleaved_step_and_memory(model, options, way):
    pipelines, sizes, edges, ranks, name = way
    runs = [LayerRun(a, b) for a, b in pairwise(edges)]
    placement = SCHEDULES[name].place(len(runs), ranks)
    return simulated(model, pipelines, sizes, runs, name, placement)


def step_and_memory(model, options, way):
    pipelines, sizes, edges, replicas = way
    runs = [LayerRun(a, b) for a, b in pairwise(edges)]
    placement = Placement.of_replicas(replicas)
    return simulated(model, pipelines, sizes, runs, options.schedule, placement)


def group_size(model, sizes, num_ranks):
    """A rank alone runs frozen layers where they are called, on whole microbatches."""
    return max(sizes) if num_ranks == 1 else model.group_size(sizes, num_ranks)


@functools.cache
def scheduled(name, placement, sizes, parts):
    """What does not depend on the cut: the outline of the lowered programs, and the samples that wait."""
    schedule = SCHEDULES[name](placement, len(sizes))
    outline = outline_of(lower(prefix_frozen(schedule, parts)), range(len(sizes)))
    assert not outline.stuck
    return outline, peak_samples(schedule, sizes)


def simulated(model, pipelines, sizes, runs, name, placement):
    group = group_size(model, sizes, placement.num_ranks)
    parts = ()
    if model.profile.encoders:
        parts = encode_parts(sizes, placement.num_ranks, group_size=group)
    links = PipelineLinks(model.cluster, placement, pipelines)
    costs = pipeline_costs(model, links, runs, sizes, parts, group)
    outline, waiting = scheduled(name, placement, tuple(sizes), parts)
    loads = frozen_loads(placement, sizes, parts, group, fills=False)
    holders = [pipelines * len(ranks) for ranks in placement.stage_ranks]
    step_s = makespan(outline, costs) + costs.states_s
    return step_s, max(peak_memory_bytes(model, waiting, runs, loads, holders))


def brute_force(profile, cluster, options):
    model = CostModel.of(profile, cluster, options)
    found = [step_and_memory(model, options, way) for way in every_way(profile, cluster, options)]
    fitting = [
        s for s, need in found if cluster.memory_bytes is None or need <= cluster.memory_bytes
    ]
    return min(fitting, default=None), min(need for _, need in found)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*range(60), *range(1000, 1100), *map(row, range(1100, 1300))])
def test_the_search_is_optimal(seed):
    profile, cluster, batch = random_case(seed)
    options = PlanOptions(batch, num_microbatches=[1, 2, 3, 4][seed % 4] if batch > 4 else "auto")
    options = options if batch > 8 or seed % 2 else PlanOptions(batch)
    best_s, _ = brute_force(profile, cluster, options)
    assert find_plan(profile, cluster, options).planned.iteration_s == pytest.approx(best_s)


@pytest.mark.parametrize("seed", seeds(20, 10))
def test_the_search_is_optimal_where_backwards_have_two_parts(seed):
    """History: bounds took it that a gradient waits for whole backwards on its way to the first layer."""
    profile, cluster, batch = random_case(seed, max_layers=6)
    if seed % 2:
        profile = with_split(profile, {1: 0.2, 8: 2.0})
    options = PlanOptions(batch, num_microbatches=min(batch, 4), schedule="zero_bubble")
    best_s, _ = brute_force(profile, cluster, options)
    assert find_plan(profile, cluster, options).planned.iteration_s == pytest.approx(best_s)


def with_split(profile, split_s):
    (backbone,) = profile.backbones
    return replace(profile, backbones=(replace(backbone, split_s=Seconds.of(split_s)),))


def test_halves_of_a_backward_may_cost_more_than_the_bubbles_they_close():
    """History: halves were planned to take as long as the whole; on two cores they took 10 % longer."""
    free = equal_profile(num_layers=4, gradient_bytes=1)
    dear = with_split(free, {1: 8.0})  # as much as the backward itself

    def step_s(profile, schedule):
        options = PlanOptions(
            4, num_stages=4, num_replicas=1, data_parallel=1, num_microbatches=4, schedule=schedule
        )
        plan = find_plan(profile, Cluster(4), options)
        assert PipelinePlan.from_json(plan.to_json()) == plan
        return plan.planned.iteration_s

    assert step_s(free, "zero_bubble") < step_s(free, "1f1b") < step_s(dear, "zero_bubble")
    assert step_s(dear, "1f1b") == step_s(free, "1f1b")
    assert ModelProfile.from_json(dear.to_json()) == dear


def test_halves_cost_what_the_profile_says():
    split = with_split(equal_profile(num_layers=4), {1: 2.0})
    options = PlanOptions(4, num_stages=2, num_microbatches=4, schedule="zero_bubble")
    plan = find_plan(split, Cluster(2), options)
    assert PipelinePlan.from_json(plan.to_json()) == plan
    busy_s = [sum(s.duration_s for s in plan.timeline.spans if s.rank == r) for r in (0, 1)]
    two_layers_s, added_s = 2 * 3, 1  # the first stage sends no gradient: its backward stays whole
    assert busy_s == pytest.approx([4 * two_layers_s, 4 * (two_layers_s + added_s)])


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("num_layers", [16, 24, 32, 48])
@pytest.mark.parametrize("filling", ["none", "shares"])
def test_equal_layers_are_never_cut_worse_than_evenly(num_layers, schedule, filling):
    """History: where cuts are too many to try all, 8 ranks took 14 % longer than even stages."""
    profile = equal_profile(num_layers, 0.38, gradient_bytes=1)
    for num_ranks, num_microbatches in product((4, 8), (2, 4, 8)):
        wish = PlanOptions(
            num_ranks * 16, num_stages=num_ranks, num_microbatches=num_microbatches, num_replicas=1,
            schedule=schedule, filling=filling, data_parallel=1,
        )  # fmt: skip
        found, even = (
            find_plan(profile, Cluster(num_ranks), replace(wish, partition=rule))
            for rule in ("auto", "uniform")
        )
        assert preference(found) <= preference(even) * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(30, 5))
def test_interleaved_stages_are_found_where_they_are_fastest(seed):
    """All schedules at once, against trying everything; and no bound is above what it bounds."""
    profile, cluster, batch = random_case(seed, max_layers=7)
    cluster = replace(cluster, num_ranks=2 + seed % 3)
    options, model = PlanOptions(batch, schedule="auto"), CostModel(profile, cluster)
    ways = list(every_interleaved_way(profile, cluster, options))
    steps = {way: interleaved_step_and_memory(model, options, way)[0] for way in ways}
    for way in ways[::7]:
        pipelines, sizes, edges, ranks, name = way
        shape = Shape(pipelines, ranks, len(edges) - 1, sizes, name)
        bounds = Bounds(model, shape, group_size(model, sizes, ranks))
        cuts = tuple((a, b, 1) for a, b in pairwise(edges))
        assert bounds.cuts_s(cuts) <= steps[way] + 1e-9
    plain = [replace(options, schedule=name) for name in ("1f1b", "1f1b_deep", "gpipe")]
    best_s = min([*steps.values(), *(brute_force(profile, cluster, o)[0] for o in plain)])
    found = find_plan(profile, cluster, options)
    assert found.planned.iteration_s == pytest.approx(best_s)
    assert PipelinePlan.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "batch", "step_s"),
    [(10, 4, 20, 195), (40, 8, 100, 1605), (10, 5, 25, 174)],
)
def test_divisors_of_the_batch_are_tried(num_layers, num_stages, batch, step_s):
    """History: only powers of two and three times them were, so that some microbatches were larger."""
    options = PlanOptions(batch, num_stages=num_stages, data_parallel=1)
    plan = find_plan(equal_profile(num_layers), Cluster(num_stages), options)
    assert plan.planned.iteration_s == pytest.approx(step_s)
    assert plan.num_microbatches == batch


@pytest.mark.parametrize("num_ranks", [5, 10])
def test_stages_are_interleaved_on_any_number_of_ranks(num_ranks):
    """History: no number of microbatches that was tried is a multiple of 5, so that none was possible."""
    options = PlanOptions(64, schedule="interleaved", data_parallel=1)
    plan = find_plan(equal_profile(20), Cluster(num_ranks), options)
    assert plan.num_microbatches % num_ranks == 0


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_unets_on_limited_links_are_folded_and_send_a_fifth(num_ranks):
    cluster = Cluster(num_ranks, p2p=Link(2e9, 1e-5))
    options = PlanOptions(64, "auto", 16, 1, 1, "auto")
    plan = find_plan(unet_profile(), cluster, options)
    assert plan.options.schedule == "v"
    assert plan.planned.sent_bytes <= 0.2 * plan.planned.chain_sent_bytes
    deep = find_plan(unet_profile(), cluster, replace(options, schedule="1f1b_deep"))
    assert plan.planned.iteration_s < 0.9 * deep.planned.iteration_s
    assert PipelinePlan.from_json(plan.to_json()) == plan
    blind = replace(unet_profile().backbones[0], skips=())
    assert ModelProfile.from_json(unet_profile().to_json()) == unet_profile()
    unaware = find_plan(ModelProfile("blind", (blind,)), cluster, replace(options, schedule="v"))
    assert unaware.planned.sent_bytes > 3 * plan.planned.sent_bytes


@pytest.mark.parametrize(("S", "M", "feedback_s"), [(2, 1, 0), (3, 5, 1), (4, 1, 7), (4, 4, 1)])
def test_a_self_conditioned_step_takes_as_long_as_the_paper_says(S, M, feedback_s):
    """Notes: max(M f, S f + T_F) + (M + S - 1)(f + b)."""
    profile = ModelProfile.from_json(twice(equal_profile(S), 1.0, feedback_s).to_json())
    options = PlanOptions(M, S, M, 1, 1)
    plan = find_plan(profile, Cluster(S, p2p=Link(1.0)), options)
    assert plan.planned.iteration_s == max(M, S + feedback_s) + (M + S - 1) * 3
    assert plan.num_passes == 2


def test_a_pass_that_some_microbatches_take_is_planned_by_its_share():
    half = twice(equal_profile(4, 0.3), 0.5)
    plan = find_plan(half, Cluster(2), PlanOptions(8, 2, 4, 1, 1))
    assert plan.sequences == ((0.5, 0), (0.5, 2))
    assert PipelinePlan.from_json(plan.to_json()) == plan
    assert str(explain(plan, half, Cluster(2), budget_s=1))


@pytest.mark.parametrize("schedule", ["interleaved", "auto"])
@pytest.mark.parametrize("num_without", [1, 2])
def test_a_pass_whose_last_layers_have_gradients_is_planned(num_without, schedule):
    """History: a bare assertion, as ranks with several stages waited for each other's gradients."""
    (backbone,) = equal_profile(8).backbones
    layers = (
        *(replace(layer, gradient=False) for layer in backbone.layers[:num_without]),
        *backbone.layers[num_without:],
    )
    twice = replace(backbone, layers=layers, passes=((0, 4), (4, 8)))
    profile = replace(equal_profile(8), backbones=(twice,))
    stages = "auto" if schedule == "auto" else 4
    options = PlanOptions(8, stages, 4, data_parallel=1, schedule=schedule)
    assert find_plan(profile, Cluster(2), options).num_passes == 2


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("seed", seeds(20, 6))
def test_passes_are_cut_alike_where_that_is_fastest(seed, schedule):
    """Against all cuts of the layers, each simulated call by call."""
    rng = random.Random(seed)
    once = random_profile(rng, rng.randint(3, 6))
    profile, cluster = joined(twice(once)), random_cluster(rng, 3)
    options = PlanOptions(6, 3, rng.choice([2, 3, 6]), data_parallel=1, schedule=schedule)
    plan = find_plan(profile, cluster, options)
    size = len(once.backbones[0].layers)
    assert [s.ranks for s in plan.stages] == [(0,), (1,), (2,)] * 2
    assert [s.first_layer + size for s in plan.stages[:3]] == [
        s.first_layer for s in plan.stages[3:]
    ]
    assert PipelinePlan.from_json(plan.to_json()) == plan
    evaluator = Evaluator(CostModel(profile, cluster), options)
    (shape,) = shapes(evaluator.model, options)
    cuts = all_cuts(evaluator.model, options, shape)
    best_s = min(evaluator.unfilled_plan(Proposal(shape, cut)).planned.iteration_s for cut in cuts)
    assert plan.planned.iteration_s == pytest.approx(best_s)


def test_plans_whose_passes_lie_apart_are_refused():
    plan = find_plan(twice(equal_profile(4)), Cluster(2), PlanOptions(4, 2, 2, data_parallel=1))
    stages = (
        *plan.stages[:2],
        replace(plan.stages[2], ranks=(1,)),
        replace(plan.stages[3], ranks=(0,)),
    )
    with pytest.raises(
        PlanError, match=r"stages\[2\]: pass 1 on ranks \[1\]; .* hold its layers once"
    ):
        replace(plan, stages=stages)


@pytest.mark.parametrize(("num_ranks", "num_stages", "batch"), [(1, 1, 1024), (2, 2, 600)])
def test_there_are_more_microbatches_where_fewer_do_not_fit(num_ranks, num_stages, batch):
    """History: 256 were the most, and an error said that nothing fits."""
    profile = equal_profile(2, activation_bytes_per_sample=100)
    cluster = Cluster(num_ranks, memory_bytes=210)
    options = PlanOptions(batch, num_stages=num_stages, data_parallel=1)
    plan = find_plan(profile, cluster, options)
    assert plan.num_microbatches == batch
    assert max(plan.planned.peak_memory_bytes) == 200


def test_pipelines_of_many_microbatches_are_planned_quickly():
    """History: of all numbers above 256 the largest was tried first, with every cut: half a minute."""
    profile = equal_profile(16, parameter_bytes=10, activation_bytes_per_sample=10)
    options, cluster = PlanOptions(20_000, 4, data_parallel=1), Cluster(4, memory_bytes=6000)
    start = time.process_time()
    plan = find_plan(profile, cluster, options)
    assert time.process_time() - start < 5
    # Four layers keep 160 bytes for each sample of a microbatch, four of which wait, beside 40 of weights.
    assert 256 < plan.num_microbatches <= 625
    assert 40 + 160 * (20_000 / 625) <= 6000


@pytest.mark.slow
def test_the_least_memory_counts_as_many_microbatches_as_there_can_be():
    """History: it was counted for up to 256 of them, though more would have been planned."""
    profile = equal_profile(4, activation_bytes_per_sample=10)
    options = PlanOptions(1000, num_stages=2, data_parallel=1)
    with pytest.raises(
        PlanError, match=r"the smallest needs 30 \(.*num_microbatches=1000\), 1 too"
    ):
        find_plan(profile, Cluster(2, memory_bytes=29), options)


@pytest.mark.parametrize("seed", seeds(40, 20))
def test_the_search_is_optimal_within_memory(seed):
    """Optimizer states are not shared, are, or are where that makes the step faster; on devices or on hosts."""
    profile, cluster, batch = random_case(seed, max_layers=6, memory=True)
    cluster = replace(cluster, host_bytes_per_s=20.0)
    shard, where = [False, True, "auto"][seed % 3], ["none", "all"][seed % 2]
    options = PlanOptions(
        batch, num_microbatches=min(batch, 4), shard_optimizer=shard, optimizer_offload=where
    )
    tried = (False, True) if shard == "auto" else (shard,)
    found = [brute_force(profile, cluster, replace(options, shard_optimizer=s)) for s in tried]
    best_s = min((step_s for step_s, _ in found if step_s is not None), default=None)
    least = min(need for _, need in found)
    if best_s is None:
        with pytest.raises(PlanError, match=rf"no plan fits into {cluster.memory_bytes:,} bytes"):
            find_plan(profile, cluster, options)
        assert least > cluster.memory_bytes
    else:
        plan = find_plan(profile, cluster, options)
        assert plan.planned.iteration_s == pytest.approx(best_s)
        assert max(plan.planned.peak_memory_bytes) <= cluster.memory_bytes


def needs_by_cut(profile, num_ranks, options):
    """What the fullest rank of every way to cut needs, and the evaluator that says so."""
    model = CostModel.of(profile, Cluster(num_ranks), options)
    evaluator = Evaluator(model, options)
    proposals = every_proposal(evaluator)
    return evaluator, {found: max(evaluator.peak_bytes(found)) for found in proposals}


def check_limits(profile, num_ranks, options, shares_of_least, slower):
    """Near the least memory of all cuts a plan is found, so much slower at most than the best; below it none."""
    evaluator, needs = needs_by_cut(profile, num_ranks, options)
    least = min(needs.values())
    for share in shares_of_least:
        limit = int(share * least)
        plan = find_plan(profile, Cluster(num_ranks, memory_bytes=limit), options)
        assert max(plan.planned.peak_memory_bytes) <= limit
        best_s = min(evaluator.step_s(found) for found, need in needs.items() if need <= limit)
        assert best_s * (1 - 1e-9) <= plan.planned.iteration_s <= slower * best_s
    with pytest.raises(PlanError, match=rf"the smallest needs {least:,} .*, 1 too many"):
        find_plan(profile, Cluster(num_ranks, memory_bytes=least - 1), options)


def layers_that_keep(rng, num_layers, boundaries, activations):
    """Layers of nearly the same time and 8 bytes of weights and gradients, with messages and activations."""

    def layer(i):
        forward, backward = (Seconds.per_sample(scale * rng.uniform(0.8, 1.2)) for scale in (1, 2))
        sizes = (4, 4, rng.choice(boundaries), rng.choice(activations))
        return LayerProfile(f"layer{i}", forward, backward, None, *sizes)

    layers = tuple(map(layer, range(num_layers)))
    return ModelProfile("keeping", (BackboneProfile("unet", layers),))


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(14, 4))
def test_a_cut_that_fits_is_found_among_more_than_can_be_tried(seed):
    """History: stages were filled to the limit before messages were counted, and most ranks were then too full."""
    profile = layers_that_keep(random.Random(seed), 20, [1], range(2, 9))
    options = PlanOptions(16, 4, 8, num_replicas=1, data_parallel=1, optimizer_offload="none")
    model = CostModel(profile, Cluster(4))
    (shape,) = shapes(model, options)
    assert count_of_cuts(model, shape) > cut_search.MOST_CUTS_TRIED
    check_limits(profile, 4, options, (1, 1.05, 1.2), slower=1.001)


def test_a_cut_that_fits_is_found_where_encoders_need_most():
    """History: what ranks encode before the pipeline was left out, and "no plan fits" by -90 bytes."""
    times = Seconds.per_sample(1.0), Seconds.per_sample(2.0)
    weights = [100] * 5 + [20] * 10 + [100] * 5
    layers = tuple(
        LayerProfile(f"layer{i}", *times, None, w, 0, 0, 0) for i, w in enumerate(weights)
    )
    vae = EncoderLayerProfile("vae", times[0], output_bytes_per_sample=500)
    encoder = EncoderProfile("vae", (vae,), results=(FrozenResult(1, (0,)),))
    profile = ModelProfile("encoding", (BackboneProfile("unet", layers),), (encoder,))
    options = PlanOptions(40, 4, 40, num_replicas=1, data_parallel=1)
    plan = find_plan(profile, Cluster(4, memory_bytes=900), options)
    assert max(plan.planned.peak_memory_bytes) <= 900


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "1f1b_deep", "gpipe", "zero_bubble"])
@pytest.mark.parametrize("seed", seeds(30, 6))
def test_a_cut_that_fits_is_found_whatever_layers_and_messages_weigh(seed, schedule, monkeypatch):
    """History: a layer too much for an early stage, but not for a later one, ended the search as well."""
    monkeypatch.setattr(cut_search, "MOST_CUTS_TRIED", 0)
    rng = random.Random(seed)
    num_ranks = rng.randint(2, 4)
    profile = layers_that_keep(rng, rng.randint(5, 9), [1, 5, 30], [1, 3, 360])
    stages, microbatches = rng.randint(2, num_ranks), rng.choice([3, 4, 8])
    options = PlanOptions(
        8, stages, microbatches, data_parallel=1, schedule=schedule, shard_optimizer=seed % 2 == 0,
        optimizer_offload=["none", "all"][seed // 2 % 2],
    )  # fmt: skip
    check_limits(profile, num_ranks, options, (1, 1.1, 1.3), slower=1.3)


@pytest.mark.parametrize("seed", seeds(60, 20))
def test_moving_layers_comes_close_to_the_optimum(seed, monkeypatch):
    """Where there are too many cuts to try all; the optimum is missed by 2% at most here."""
    profile, cluster, batch = random_case(seed)
    options = PlanOptions(batch, num_microbatches=min(batch, 4))
    best_s = find_plan(profile, cluster, options).planned.iteration_s
    monkeypatch.setattr(cut_search, "MOST_CUTS_TRIED", 0)
    assert find_plan(profile, cluster, options).planned.iteration_s <= 1.02 * best_s


@pytest.mark.slow
@pytest.mark.parametrize("filling", ["none", "shares"])
@pytest.mark.parametrize("schedule", [name for name, spec in SCHEDULES.items() if spec.flushes])
@pytest.mark.parametrize("seed", [*seeds(8, 2), *map(row, range(8, 15))])
def test_no_proposal_is_faster_than_the_bound_that_rules_it_out(seed, schedule, filling):
    """For every order of work, links that take as long as stages, replicas, and frozen work in bubbles."""
    rng = random.Random(seed)
    num_layers, num_ranks = rng.randint(8, 12), rng.randint(2, 4)
    profile = random_profile(rng, num_layers, frozen=filling != "none" or rng.random() < 0.5)
    options = PlanOptions(12, schedule=schedule, filling=filling)
    if SCHEDULES[schedule].opposite:
        others = [random_profile(rng, rng.randint(4, 8)) for _ in range(rng.randint(1, 2))]
        profile = joined(several_backbones(profile, *others), opposite=True)
        num_layers = len(profile.backbones[0].layers)
    model = CostModel(profile, random_cluster(rng, num_ranks))
    search = Search(Evaluator(model, options))
    for shape in shapes(search.model, options):
        bounds = search.bounds(shape)
        for replicas in replicas_of(options, shape):
            marks = sorted(rng.sample(range(1, num_layers), shape.num_stages - 1))
            cuts = tuple(zip((0, *marks), (*marks, num_layers), replicas, strict=True))
            if len(search.model.starts) > 1:
                cuts = rng.choice(list(islice(all_cuts(search.model, options, shape), 300)))
            least_s = search.least_s(bounds, bounds.cuts_s(cuts))
            assert least_s <= search.evaluator.step_s(Proposal(shape, cuts)) + 1e-9
            if shape.stages_per_rank == 1:
                assert bounds.best_cuts(replicas)[0] <= bounds.cuts_s(cuts) + 1e-9


def gap_of_filling(seed):
    """How much worse the found plan is than the best of all cuts, all of them filled and simulated."""
    rng = random.Random(seed)
    num_layers, num_ranks = rng.randint(2, 6), rng.randint(2, 3)
    profile, cluster = random_profile(rng, num_layers, frozen=True), random_cluster(rng, num_ranks)
    options = PlanOptions(
        rng.choice([4, 6, 8, 12]),
        num_stages=rng.choice([2, min(num_layers, num_ranks)]),
        num_microbatches=rng.randint(3, 4),
        data_parallel=1,
        filling="shares",
    )
    evaluator = Evaluator(CostModel(profile, cluster), options)
    best = min(preference(evaluator.plan(each)) for each in every_proposal(evaluator))
    return preference(find_plan(profile, cluster, options)) / best - 1


@pytest.mark.slow
def test_filled_plans_are_the_best_of_all_cuts_but_for_a_few():
    """Cuts are compared by an estimate in which frozen work fills bubbles without a loss.

    A batch of few samples, each of them as long as a bubble, does not: 3 of these 150 plans are up to 6.8 %
    worse than the best.
    """
    gaps = [gap_of_filling(seed) for seed in range(150)]
    assert min(gaps) >= -1e-9
    assert max(gaps) < 0.07
    assert sum(gap > 1e-9 for gap in gaps) <= 3


def test_a_rank_alone_runs_frozen_layers_on_whole_microbatches():
    """History: it was charged for groups that it does not make, and a pipeline was taken instead."""
    profile = equal_profile(4, frozen_share=0.1)
    encoder = profile.encoders[0]
    layer = replace(encoder.layers[0], forward_s=Seconds.of({1: 4.0, 16: 10.0}))
    profile = replace(profile, encoders=(replace(encoder, layers=(layer,)),))
    for group in ("auto", 1):
        options = PlanOptions(32, num_stages=1, data_parallel=2, frozen_group_size=group)
        plan = find_plan(profile, Cluster(2), options)
        assert plan.num_microbatches == 1
        assert plan.planned.iteration_s == pytest.approx(16 * 12 + 10)
        assert plan.options.frozen_group_size == 16


def test_nothing_is_filled_where_there_is_no_bubble():
    """History: a rank alone "filled" its frozen work after its own step, for a gain of rounding."""
    plan = find_plan(equal_profile(8, 0.3), Cluster(4), PlanOptions(64, filling="auto"))
    assert (plan.num_stages, plan.options.filling) == (1, "none")


def num_calls(*arguments, **options):
    """How many functions a search calls: the same on a busy machine, where seconds are not.

    In a process of its own: what other tests leave behind in one adds hundreds of thousands.
    """
    code = f"from tests.planning import test_search as t; print(t.calls_here(*{arguments}, **{options}))"
    return int(subprocess.run([sys.executable, "-c", code], check=True, stdout=-1).stdout)


def calls_here(num_layers, num_ranks, batch, memory=0.3, **options):
    rng = random.Random(1)
    profile = random_profile(rng, num_layers, frozen=True)
    model = CostModel(profile, Cluster(num_ranks))
    whole = LayerRun(0, num_layers)
    need = model.resident_bytes(whole) + model.activation_bytes(whole, 1)
    link = Link(300, 0.05)
    cluster = Cluster(num_ranks, 8, int(memory * need), link, link)
    fixed = {"shard_optimizer": False, "optimizer_offload": "none"}
    options = PlanOptions(batch, **fixed | options)
    with cProfile.Profile() as calls:
        find_plan(profile, cluster, options)
    return pstats.Stats(calls).total_calls


@pytest.mark.slow
def test_sixty_layers_on_eight_ranks_are_planned_in_a_second():
    """Some six million calls take one. Here with a model that fits no rank, which leaves most to be tried."""
    assert num_calls(60, 8, 64, 0.6, num_stages=8, num_microbatches=16) < 0.25e6
    assert num_calls(60, 8, 64) < 2.2e6
    assert num_calls(60, 8, 64, shard_optimizer="auto") < 5e6  # a second search
    assert num_calls(60, 8, 64, schedule="auto") < 4.5e6


@pytest.mark.slow
@pytest.mark.table
def test_two_hundred_layers_on_64_ranks_are_planned_in_two_seconds():
    """With frozen work in bubbles, in four."""
    assert num_calls(200, 64, 512) < 12.5e6
    assert num_calls(200, 64, 512, filling="auto") < 25e6


@pytest.mark.parametrize("seed", seeds(20, 10))
def test_a_limit_on_the_step_changes_no_plan(seed):
    profile, cluster, batch = random_case(seed, max_layers=6)
    options = PlanOptions(batch, filling=["none", "auto"][seed % 2])
    found = find_plan(profile, cluster, options)
    step_s = found.planned.iteration_s
    below = find_plan(profile, cluster, options, below_s=1.001 * step_s)
    assert below.planned.iteration_s == pytest.approx(step_s)
    with pytest.raises(PlanError, match="no plan that fits into memory has a step below"):
        find_plan(profile, cluster, options, below_s=0.999 * step_s)


@pytest.mark.parametrize("seed", range(30))
def test_a_plan_is_what_was_asked_for(seed):
    """So that a run may name a plan and the options it was made with."""
    rng = random.Random(seed)
    profile, cluster, batch = random_case(seed)
    if seed % 3 == 0:
        profile = replace(
            profile, encoders=tuple(replace(e, splittable=False) for e in profile.encoders)
        )
    wishes = PlanOptions(
        2 * batch,
        num_stages=rng.choice(
            ["auto", 1, min(2, cluster.num_ranks, len(profile.backbones[0].layers))]
        ),
        num_microbatches=rng.choice(["auto", 2, 4]),
        schedule=rng.choice(["1f1b", "gpipe", "zero_bubble", "auto"]),
        filling=rng.choice(["none", "shares", "auto"]),
        frozen_group_size=rng.choice(["auto", 1, 2]),
    )
    plan = find_plan(profile, cluster, wishes)
    check_options(plan, wishes, plan.num_pipelines)
    check_options(plan, plan.options, plan.num_pipelines)
    check_options(plan, replace(wishes, data_parallel=3), 3)


@pytest.mark.parametrize("seed", seeds(12, 3))
def test_without_a_flush_the_slowest_stage_sets_the_pace(seed):
    """With links that cost nothing; and no cut has a faster slowest stage."""
    rng = random.Random(seed)
    num_layers, num_ranks = rng.randint(5, 9), rng.randint(2, 4)
    profile = random_profile(rng, num_layers)
    options = PlanOptions(8, num_stages=num_ranks, schedule="pipedream")
    model = CostModel(profile, Cluster(num_ranks))

    def pace_s(edges):
        runs = [LayerRun(first, stop) for first, stop in pairwise(edges)]
        return max(model.forward_s(run, 8) + model.backward_s(run, 8) for run in runs)

    marks = combinations(range(1, num_layers), num_ranks - 1)
    plan = find_plan(profile, Cluster(num_ranks), options)
    assert plan.planned.iteration_s == pytest.approx(
        min(pace_s((0, *m, num_layers)) for m in marks)
    )
    edges = [stage.first_layer for stage in plan.stages]
    assert plan.planned.iteration_s == pytest.approx(pace_s((*edges, num_layers)))


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream_vertical_sync", "pipedream_2bw"])
def test_weight_versions_are_in_the_memory_of_a_plan(schedule):
    """100 bytes of weights in each of 4 stages; what else a rank holds is what a batch of its own needs."""
    profile = equal_profile(4, parameter_bytes=100, gradient_bytes=100)
    options = PlanOptions(8, num_stages=4, schedule=schedule, optimizer_bytes_factor=0)
    memory = find_plan(profile, Cluster(4), options).planned.peak_memory_bytes
    versions = {"pipedream": (4, 3, 2, 1), "pipedream_2bw": (2, 2, 2, 2)}.get(
        schedule, (4, 4, 4, 4)
    )
    assert memory == tuple(100 + 100 * count for count in versions)
    with pytest.raises(PlanError, match="no plan fits"):
        find_plan(profile, Cluster(4, memory_bytes=max(memory) - 1), options)


PASSES = (8.0, 3.0, 5.0, 2.0, 2.0), (1.0, 2.0, 1.0, 2.0, 5.0)
"""Forwards of five layers in two passes, the first without gradients; backwards take twice as long."""


def expected_s(cut, num_microbatches):
    """Of eight samples on two ranks, in order: a quarter of the steps takes both passes."""
    sums = [sum(part) for times in PASSES for part in (times[:cut], times[cut:])]
    forward = [8 / num_microbatches * each for each in sums]
    base = Placement.of_replicas([1, 1])
    placement = Placement(2 * base.stage_ranks, no_grad=frozenset({0, 1}))
    schedule = schedule_of_passes(one_f_one_b, base, placement, num_microbatches)
    backward = [2 * each for each in forward]
    costs = tick_costs(schedule, forward=forward, backward=backward)
    full, bare = (
        simulate(schedule.starting_at([start] * num_microbatches), costs).iteration_s
        for start in (0, 2)
    )
    return 0.25 * full + 0.75 * bare


@pytest.mark.parametrize("shared", [True, False])
def test_the_expected_time_over_sequences_is_minimised(shared):
    """History: the time of the longest sequence was, for which another cut is best."""
    layers = [
        LayerProfile(f"layer{i}", Seconds.per_sample(s), Seconds.per_sample(2 * s * trained), gradient=trained)
        for trained, times in zip((False, True), PASSES, strict=True)
        for i, s in enumerate(times)
    ]  # fmt: skip
    seen = SequenceShares(((0.25, 0), (0.75, 5)), shared)
    backbone = BackboneProfile("x", tuple(layers), passes=((0, 5), (5, 10)), seen=seen)
    profile = ModelProfile("self-conditioned", (backbone,))
    assert ModelProfile.from_json(profile.to_json()) == profile
    best = find_plan(profile, Cluster(2), PlanOptions(8, num_stages=2, data_parallel=1))
    assert PipelinePlan.from_json(best.to_json()) == best
    assert best.sequences == ((0.25, 0), (0.75, 2))
    cuts = product(range(1, 5), (1, 2, 4, 8))
    assert best.planned.expected_s == pytest.approx(
        min(starmap(expected_s, cuts)), rel=1e-9 if shared else 0.1
    )
    assert "25.0% all stages, 75.0% from stage 2 on" in str(explain(best))


@functools.cache
def measured_profile(make, x, num_samples, num_ranks):
    """The step of all cases that differ in the schedule only."""
    case = measured_steps.Case("any", make, "1f1b", 1, 1, num_samples, x)
    batch = torch.zeros(num_samples, *measured_steps.SAMPLE_SHAPE)
    return measured_steps.profile_of(case.module(num_ranks, 0.01), batch)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("part", measured_steps.PARTS)
def test_what_the_benchmark_of_schedules_measures_can_be_planned(part, num_ranks):
    for case in chain.from_iterable(measured_steps.PARTS[part](num_ranks)):
        profile = measured_profile(case.make, case.x, case.num_samples, num_ranks)
        if case.make is measured_steps.TwoBackbones:
            profile = separated(profile, (0, measured_steps.NUM_LAYERS // 2))
        options = PlanOptions(
            case.num_samples, num_stages=case.num_stages, num_microbatches=case.num_microbatches,
            schedule=case.schedule, filling="shares" if case.filled else "none", data_parallel=1,
            frozen_group_size=1,
        )  # fmt: skip
        planned = find_plan(profile, case.cluster(num_ranks, 0.01), options).planned
        assert planned.iteration_s >= planned.no_bubble_limit_s * (1 - 1e-9)


def test_searches_for_one_plan_share_what_depends_on_no_costs(monkeypatch):
    """History: each number of stages, with other layers recomputed, made the same outlines anew: nine of ten."""
    made = []

    def outlined(schedule, sizes):
        made.append((schedule.placement.stage_ranks, schedule.programs, tuple(sizes)))
        return outline_of(schedule, sizes)

    monkeypatch.setattr(evaluation, "outline_of", outlined)
    sizes = {
        "parameter_bytes": 10,
        "gradient_bytes": 10,
        "activation_bytes_per_sample": 20,
        "input_bytes_per_sample": 1,
    }
    profile = equal_profile(12, **sizes)
    find_plan(profile, Cluster(4, memory_bytes=250), PlanOptions(16))
    assert len(made) == len(set(made)) > 5
