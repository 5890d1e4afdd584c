"""Frozen weights that come from host memory: memory, waits, copies, and which layers."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from lightning_diffpipe.errors import ConfigurationError, PartitionError, PlanError
from lightning_diffpipe.planning.cluster import Cluster
from lightning_diffpipe.planning.cost import CostModel
from lightning_diffpipe.planning.evaluation import Evaluator, Proposal
from lightning_diffpipe.planning.instruction import Backward, Forward
from lightning_diffpipe.planning.memory import (
    checkpointed,
    copies,
    streamed,
    streamed_runs,
    streamed_where_needed,
)
from lightning_diffpipe.planning.options import PlanOptions
from lightning_diffpipe.planning.partition import Stage
from lightning_diffpipe.planning.plan import PipelinePlan
from lightning_diffpipe.planning.profile import LayerProfile, Seconds
from lightning_diffpipe.planning.proposals import shapes
from lightning_diffpipe.planning.search import find_plan
from lightning_diffpipe.viewing.report import explain, report
from tests.planning.profiles import TWO_STAGES, best_of_costs, profile_of


def layer(name, forward_s=1.0, frozen=100):
    """Adapters of ten bytes on frozen weights."""
    return LayerProfile(
        name,
        Seconds.per_sample(forward_s),
        Seconds.per_sample(forward_s),
        parameter_bytes=frozen + 10,
        gradient_bytes=10,
        boundary_bytes_per_sample=5,
        activation_bytes_per_sample=30,
        input_bytes_per_sample=5,
        streamable_bytes=frozen,
    )


EIGHT = profile_of(map(layer, "abcdefgh"))
ONE_STAGE = PlanOptions(4, num_stages=1, num_microbatches=4, data_parallel=1, num_replicas=1)
ADAPTERS = 10 * (1 + 1 + 2)  # with gradients and moments


def planned(memory_bytes=None, profile=EIGHT, rate=100.0, options=TWO_STAGES, ranks=2, **changes):
    cluster = Cluster(ranks, memory_bytes=memory_bytes, host_bytes_per_s=rate)
    return find_plan(profile, cluster, replace(options, **changes))


def test_memory_by_hand():
    """Stages of four layers: without streaming 400 bytes of frozen weights, with it two slots of 100."""
    none, every = planned(checkpointing="all"), planned(streaming="all")
    assert [stage.streamed for stage in every.stages] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert all(stage.recomputed == stage.streamed for stage in every.stages)
    peaks = none.planned.peak_memory_bytes, every.planned.peak_memory_bytes
    assert [a - b for a, b in zip(*peaks, strict=True)] == [200, 200]
    assert every.planned.peak_memory_bytes[1] == 4 * ADAPTERS + 4 * 5 + 30 + 200 + 15
    assert every.planned.streamed_bytes == (400, 400)
    assert PipelinePlan.from_json(every.to_json()) == every


@pytest.mark.parametrize("memory_bytes", [None, 660])
def test_nothing_is_streamed_where_something_fits_without(memory_bytes):
    without = planned(memory_bytes, streaming="none")
    assert not without.streamed
    assert planned(memory_bytes).planned == without.planned


@pytest.mark.parametrize("seed", range(30))
def test_as_little_is_streamed_as_has_to_be(seed):
    """Of what is streamed, less than two of the largest layers would have room."""
    rng = random.Random(seed)
    profile = profile_of(
        layer(str(i), rng.uniform(0.5, 2), rng.choice([80, 100, 150]))
        for i in range(rng.randint(6, 12))
    )
    every = planned(None, profile, streaming="all").planned.peak_memory_bytes
    without = planned(None, profile, checkpointing="all", streaming="none").planned
    limit = int(max(every) + rng.random() * (max(without.peak_memory_bytes) - max(every)))
    plan = planned(limit, profile)
    assert max(plan.planned.peak_memory_bytes) <= limit
    for rank, (stage, peak) in enumerate(
        zip(plan.stages, plan.planned.peak_memory_bytes, strict=True)
    ):
        sizes = [profile.layers[i].streamable_bytes for i in stage.streamed]
        if sizes:
            assert plan.planned.streamed_bytes[rank] == sum(sizes)
            assert sum(sizes) > 2 * max(sizes), "two slots hold two layers"
            assert limit - peak < 2 * max(sizes)


def test_streamed_layers_are_spread_over_a_stage():
    plan = planned(950, options=ONE_STAGE, ranks=1, num_microbatches=1, global_batch_size=1)
    (stage,) = plan.stages
    gaps = {b - a for a, b in pairwise(stage.streamed)}
    assert len(stage.streamed) in range(3, 8)
    assert max(gaps) - min(gaps) <= 1, stage.streamed


def test_a_run_waits_for_what_no_other_run_covers():
    """Copies take 3 s and runs 1 s: all wait for 2; of every other layer for 1, as two runs cover a copy."""
    recomputed = checkpointed(EIGHT, range(8))

    def times(positions, rate):
        layers = streamed(recomputed, positions, rate).layers
        return [x.forward_s.at(1) for x in layers], [x.backward_s.at(1) for x in layers]

    assert times(range(8), 100 / 3) == ([3.0] * 8, [3.0] * 8)
    assert times(range(8), 100 / 0.9) == ([1.0] * 8, [2.0] * 8), "nothing waits"
    assert times(range(0, 8, 2), 100 / 3) == ([2.0, 1.0] * 4, [2.0] * 8)
    layers = streamed(recomputed, range(8), 100 / 3).layers
    assert [layers[0].forward_s.at(n) for n in (1, 2, 3, 4)] == [3.0, 3.0, 3.0, 4.0]


def simulated_s(layers, order, rate):
    """A rank that runs layers in this order: two slots, one copy at a time, begun with the run before."""
    runs = [i for i, _, _ in order if layers[i].streamed_bytes]
    slots, free_s, now_s, ends = [None, None], 0.0, 0.0, {}
    position, last = 0, None

    def copy(i):
        nonlocal free_s
        slots[1 if last == slots[0] else 0] = i
        free_s = max(free_s, now_s) + layers[i].streamed_bytes / rate
        ends[i] = free_s

    for i, kind, _ in order:
        if layers[i].streamed_bytes:
            if i not in slots:
                copy(i)
            now_s, last, position = max(now_s, ends[i]), i, position + 1
            if position < len(runs) and runs[position] not in slots:
                copy(runs[position])
        whole = layers[i].uncheckpointed
        now_s += whole.forward_s.at(1) + (whole.backward_s.at(1) if kind == "B" else 0)
    return now_s


@pytest.mark.parametrize("seed", range(20))
def test_planned_steps_are_those_of_slots_and_copies(seed):
    """The plan leaves out what two slots save where a forward turns into a backward."""
    rng = random.Random(seed)
    count, samples = rng.randint(6, 12), 6
    profile = profile_of(
        layer(str(i), rng.uniform(0.8, 1.2), rng.randint(80, 120)) for i in range(count)
    )
    positions, rate = range(0, count, rng.choice([1, 2, 3])), 100 / rng.uniform(0.5, 4)
    costs = streamed(checkpointed(profile, range(count)), positions, rate)
    model = CostModel(costs, Cluster(1, host_bytes_per_s=rate))
    options = replace(ONE_STAGE, global_batch_size=samples, num_microbatches=samples)
    (shape,) = shapes(model, options)
    planned_s = Evaluator(model, options).plan(Proposal(shape, ((0, count, 1),))).planned
    order = []
    for m in range(samples):
        order += [(i, "F", m) for i in range(count)] + [(i, "B", m) for i in range(count)[::-1]]
    ratio = planned_s.iteration_s / simulated_s(costs.layers, order, rate)
    assert 0.98 < ratio < 1.2


def ring(runs, steps=3):
    """What two slots copy in the last of some steps."""
    slots, last = [None, None], None
    for _ in range(steps):
        copied = []
        for run, coming in zip(runs, [*runs[1:], *runs[:1]], strict=True):
            for wanted in (run, coming):
                if wanted not in slots:
                    slots[1 if last == slots[0] else 0] = wanted
                    copied.append(wanted)
                last = run
    return copied


@pytest.mark.parametrize("seed", range(50))
def test_copies_are_those_of_two_slots(seed):
    rng = random.Random(seed)
    runs = [rng.randrange(5) for _ in range(rng.randint(1, 30))]
    assert sorted(copies(runs)) == sorted(ring(runs))
    assert copies(()) == ()


def test_runs_follow_the_program():
    program = (Forward(0, 0), Forward(1, 0), Backward(1, 0), Backward(0, 0))
    assert streamed_runs(program, {0: (1, 2), 1: (4, 5, 6)}) == (1, 2, 4, 5, 6, 6, 5, 4, 2, 1)


def test_what_two_slots_hold_need_not_be_streamed():
    assert streamed_where_needed(dict.fromkeys(range(4), 10), room=20) == frozenset()
    assert len(streamed_where_needed(dict.fromkeys(range(4), 10), room=19)) == 3


def best_of_all(profile, cluster, options):
    """Every cut with every set of streamed layers, the others recomputed."""
    every, rate = range(len(profile.layers)), cluster.host_bytes_per_s
    costs = lambda positions: streamed(checkpointed(profile, every), positions, rate)
    return best_of_costs(costs, len(every), cluster, options)


@pytest.mark.slow
def test_plans_are_next_to_the_best_of_all_choices():
    ratios = []
    for seed in range(12):
        rng = random.Random(seed)
        profile = profile_of(
            layer(str(i), rng.uniform(1, 2), rng.randint(80, 120)) for i in range(8)
        )
        rate = 100 / rng.uniform(0.5, 4)
        every = planned(None, profile, rate, streaming="all").planned.peak_memory_bytes
        limit = max(every) + rng.randint(0, 150)
        cluster = Cluster(2, memory_bytes=limit, host_bytes_per_s=rate)
        options = replace(TWO_STAGES, checkpointing="all")
        found = find_plan(profile, cluster, options)
        assert max(found.planned.peak_memory_bytes) <= limit
        ratios.append(found.planned.iteration_s / best_of_all(profile, cluster, options))
    assert max(ratios) < 1.2


def test_the_report_names_the_layers_and_what_they_cost():
    plan = planned(480)
    text = report(plan)
    assert "streamed" in text
    assert "of weights in host memory, and copies" in text
    cluster = Cluster(2, memory_bytes=480, host_bytes_per_s=100)
    assert explain(plan, EIGHT, cluster).plan == plan, "its costs are found again"


def test_the_advice_names_streaming():
    with pytest.raises(PlanError, match=r"; streaming=auto would fit$"):
        planned(480, streaming="none")
    with pytest.raises(PlanError, match=r"; checkpointing=auto would fit$"):
        planned(480, checkpointing="none")


def test_bad_input():
    with pytest.raises(
        ConfigurationError, match=r"streaming=all copies weights .* checkpointing=none"
    ):
        replace(TWO_STAGES, streaming="all", checkpointing="none")
    with pytest.raises(ConfigurationError, match="streaming='some'; choose auto"):
        replace(TWO_STAGES, streaming="some")
    fixed = profile_of(replace(x, streamable_bytes=0) for x in EIGHT.layers)
    with pytest.raises(ConfigurationError, match="streaming=all, but profile 'model' has no layer"):
        planned(None, fixed, streaming="all")
    with pytest.raises(PlanError, match="no plan fits"):
        planned(480, fixed)
    with pytest.raises(
        PartitionError, match="stage 0 streams layer 1, which it does not recompute"
    ):
        Stage(0, "backbone", 0, 3, recomputed=(0,), streamed=(1,))
    with pytest.raises(ConfigurationError, match="host_bytes_per_s must be a number > 0; got 0"):
        Cluster(2, host_bytes_per_s=0)


def test_hosts_have_room_for_what_is_streamed():
    """Two copies of the model would stream more than two halves of it, and be faster."""
    options, limits = PlanOptions(4), {"memory_bytes": 600, "host_bytes_per_s": 1e3}
    options = replace(options, optimizer_offload="none")
    plans = [
        find_plan(EIGHT, Cluster(2, **limits, host_memory_bytes=host), options)
        for host in (None, 1600, 1599)
    ]
    assert [plan.num_pipelines for plan in plans] == [2, 2, 1]
    assert plans[0].planned.streamed_bytes == (800,)
    assert plans[2].planned.iteration_s > plans[0].planned.iteration_s
    with pytest.raises(
        PlanError, match="what is copied from hosts then does not fit into 400 bytes of each; "
    ):
        find_plan(EIGHT, Cluster(2, **limits, host_memory_bytes=400), options)
