"""The simulator against closed forms.

What schedules look like: the images a person judges.
"""

import random
from dataclasses import replace
from math import lcm
from textwrap import dedent

import pytest

from benchmarks.filling_policies.diffusionpipe import Bubble, bubbles
from lightning_diffpipe.errors import ScheduleError
from lightning_diffpipe.planning.cluster import Cluster
from lightning_diffpipe.planning.cost import CostModel, LayerRun, PipelineLinks, pipeline_costs
from lightning_diffpipe.planning.filling import encode_parts, split_evenly
from lightning_diffpipe.planning.instruction import BackwardInput, BackwardWeight
from lightning_diffpipe.planning.lowering import lower, prefix_frozen
from lightning_diffpipe.planning.profile import BackboneProfile, LayerProfile, ModelProfile, Seconds
from lightning_diffpipe.planning.schedule import Placement, Schedule
from lightning_diffpipe.planning.schedules import SCHEDULES
from lightning_diffpipe.planning.schedules.gpipe import gpipe
from lightning_diffpipe.planning.schedules.one_f_one_b import deep_one_f_one_b, one_f_one_b
from lightning_diffpipe.planning.simulator import exchanged_s, makespan, outline_of, simulate
from lightning_diffpipe.planning.timeline import Timeline

from .profiles import random_case, simulated, tick_costs

SIZES = [(S, M) for S in range(1, 7) for M in range(1, 10)]


@pytest.mark.parametrize("link", [0, 0.1, 0.25, 0.5, 1.0, 1.5])
def test_balanced_1f1b_with_links_and_deep_warmup(link):
    """(M + S - 1) W + 2 (S - 1) c, where links are no slower than stages."""
    for S, M in SIZES:
        deep = simulated(deep_one_f_one_b(S, M), activation=link, gradient=link)
        assert deep.iteration_s == pytest.approx(3 * (M + S - 1) + 2 * (S - 1) * link)


@pytest.mark.parametrize("link", [0, 0.25, 1.0])
def test_a_sender_that_moves_its_messages_itself_computes_nothing_meanwhile(link):
    """Two ranks, GPipe: M (f + c) + f forward, M (b + c) + b back; by itself a message costs 2 c once."""
    for M in range(1, 10):
        links = {"activation": link, "gradient": link}
        costs = tick_costs(gpipe(2, M), holds_sender=True, **links)
        held = simulate(gpipe(2, M), costs)
        assert held.iteration_s == pytest.approx(M * (3 + 2 * link) + 3)
        assert makespan(outline_of(gpipe(2, M), [1] * M), costs) == held.iteration_s
        free = simulated(gpipe(2, M), **links)
        assert free.iteration_s == pytest.approx(3 * (M + 1) + 2 * link)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("seed", range(40))
def test_the_search_times_a_schedule_as_the_simulator_does(name, seed):
    """To the last bit, though it writes no messages down and takes equal microbatches for one."""
    rng = random.Random(seed)
    profile, cluster, _ = random_case(seed)
    num_layers, M = len(profile.backbones[0].layers), rng.randint(1, 9)
    num_stages = rng.randint(1, min(num_layers, 4))
    if SCHEDULES[name].place:
        num_ranks = rng.choice([r for r in range(1, num_stages + 1) if num_stages % r == 0])
        placement, M = Placement.round_robin(num_stages, num_ranks), M * num_ranks
    else:
        placement = Placement.of_replicas([rng.randint(1, 3) for _ in range(num_stages)])
    sizes = split_evenly(rng.randint(M, 3 * M), M)
    parts = encode_parts(sizes, placement.num_ranks) if profile.encoders else ()
    marks = sorted(rng.sample(range(1, num_layers), num_stages - 1))
    runs = [LayerRun(a, b) for a, b in zip((0, *marks), (*marks, num_layers), strict=True)]
    links = PipelineLinks(cluster, placement, num_pipelines=rng.randint(1, 2))
    costs = pipeline_costs(CostModel(profile, cluster), links, runs, sizes, parts)
    schedule = prefix_frozen(SCHEDULES[name](placement, M), parts)
    exact = simulate(lower(schedule), costs)
    assert makespan(outline_of(schedule, sizes), costs) == exact.iteration_s
    assert simulate(schedule, costs, sizes) == exact
    alone, start_s = SCHEDULES[name](placement, M), exchanged_s(parts, costs) if parts else 0.0
    assert makespan(outline_of(alone, sizes), costs, start_s) == exact.iteration_s


def test_slow_links_need_a_deep_warmup():
    def times(make):
        links = (0, 0.1, 0.25, 0.5, 1.0, 1.5)
        return [simulated(make(4, 4), activation=c, gradient=c).iteration_s for c in links]

    assert times(one_f_one_b) == pytest.approx([21.0, 22.0, 23.5, 26.0, 31.0, 36.0])
    assert times(deep_one_f_one_b) == pytest.approx([21.0, 21.6, 22.5, 24.0, 27.0, 30.0])


def random_ticks(rng, S, slowest_link):
    """Random times of stages and links, and W, the slowest of these 2S - 1."""
    forward = [rng.uniform(0.2, 1) for _ in range(S)]
    backward = [rng.uniform(1, 2.5) * f for f in forward]
    activation = [0, *(rng.uniform(0, slowest_link) for _ in range(S - 1))]
    gradient = [rng.uniform(0, slowest_link) for _ in range(S)]
    stages = [f + b for f, b in zip(forward, backward, strict=True)]
    links = [activation[s + 1] + gradient[s] for s in range(S - 1)]
    names = "forward", "backward", "activation", "gradient"
    ticks = dict(zip(names, (forward, backward, activation, gradient), strict=True))
    return ticks, max(stages + links)


def excess_s(spec, slowest_link, ramps):
    """How much longer than (M + ramps (S - 1)) W random pipelines take."""
    for seed in range(400):
        rng = random.Random(seed)
        S, M = rng.randint(1, 6), rng.randint(1, 8)
        ticks, slowest = random_ticks(rng, S, slowest_link)
        yield simulated(spec(S, M), **ticks).iteration_s - (M + ramps * (S - 1)) * slowest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "slowest_link", "ramps", "holds"),
    [
        (one_f_one_b, 0, 1, True),
        (deep_one_f_one_b, 1.2, 2, True),
        (one_f_one_b, 1.2, 2, False),  # with links as slow as stages it needs a deep warm-up
    ],
)
def test_the_bound_of_the_dynamic_program(spec, slowest_link, ramps, holds):
    assert (max(excess_s(spec, slowest_link, ramps)) <= 1e-9) == holds


@pytest.mark.parametrize("seed", range(12))
def test_with_unequal_replicas_the_slowest_stage_sets_the_rate(seed):
    """Free links: a microbatch more takes max (f + b) / r with a deep warm-up, max f / r + max b / r in GPipe."""
    rng = random.Random(seed)
    replicas = [rng.randint(1, 3) for _ in range(rng.randint(2, 4))]
    forward = [rng.randint(1, 6) for _ in replicas]
    backward = [rng.randint(1, 12) for _ in replicas]
    placement = Placement.of_replicas(replicas)
    turn = lcm(*replicas)  # microbatches until all replicas have had equally many

    def rate_s(make):
        shorter, longer = (
            simulated(make(placement, M), forward=forward, backward=backward).iteration_s
            for M in (20 * turn, 21 * turn)
        )
        return (longer - shorter) / turn

    slowest = lambda times: max(t / r for t, r in zip(times, replicas, strict=True))
    both = [f + b for f, b in zip(forward, backward, strict=True)]
    assert rate_s(deep_one_f_one_b) == pytest.approx(slowest(both))
    assert rate_s(gpipe) == pytest.approx(slowest(forward) + slowest(backward))


def test_a_pipeline_bound_by_a_link_takes_the_time_of_the_link():
    """One link of 5 in a pipeline of stages of 1 + 2: eight messages one after the other."""
    timeline = simulated(gpipe(2, 8), activation=5)
    assert timeline.iteration_s == 1 + 8 * 5 + 1 + 2 * 8 + 2
    transfers = [t for t in timeline.transfers if t.message.kind == "activation"]
    assert [(t.start_s, t.stop_s) for t in transfers] == [(1 + 5 * m, 6 + 5 * m) for m in range(8)]


def crossing_profile(num_layers, backward, weights):
    """Layers whose weight gradients overtake their backward beyond what was measured."""
    layer = LayerProfile(
        "", Seconds.of({8: 0.5, 16: 0.6}), Seconds.of(backward), Seconds.of(weights)
    )
    layers = tuple(replace(layer, name=f"layer{i}") for i in range(num_layers))
    return ModelProfile("crossing", (BackboneProfile("unet", layers),))


@pytest.mark.parametrize(
    ("backward", "weights"),
    [
        ({8: 1.00, 16: 1.02}, {8: 0.30, 16: 0.40}),
        ({8: 1.00, 16: 0.50}, {8: 0.30, 16: 0.40}),
        ({8: 0.1, 16: 0.2}, {8: 0.1, 16: 0.2}),
        ({4: 0.7}, {8: 1.4, 16: 2.9}),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 8, 12, 128])
def test_nothing_takes_less_than_no_time(backward, weights, size):
    """History: backward and weight gradients are lines that cross; a backward of inputs took -2 s."""
    profile = crossing_profile(8, backward, weights)
    model, placement = CostModel(profile, Cluster(2)), Placement.of_replicas([1, 1])
    runs = [LayerRun(0, 3), LayerRun(3, 8)]
    costs = pipeline_costs(model, PipelineLinks(model.cluster, placement), runs, (size,) * 4)
    schedule = lower(SCHEDULES["zero_bubble"](placement, 4))
    works = [i for _, i in schedule.staged()]
    assert {BackwardInput, BackwardWeight} <= set(map(type, works))
    assert min(map(costs.compute_s, works)) >= 0
    for stage, run in enumerate(runs):
        halves = BackwardInput(stage, 0), BackwardWeight(stage, 0)
        assert sum(map(costs.compute_s, halves)) == pytest.approx(model.backward_s(run, size))
    timeline = simulate(schedule, costs)
    for rank in range(2):
        stamps = [t for span in timeline.spans_of(rank) for t in (span.start_s, span.stop_s)]
        assert stamps == sorted(stamps)


def image(text):
    return dedent(text).strip("\n")


def test_1f1b_with_fewer_microbatches_than_stages():
    assert str(simulate(one_f_one_b(4, 2))) == image("""
        rank 0 | F0 F1  .  .  .  .  .  .  .  . B0 --  . B1 --
        rank 1 |  . F0 F1  .  .  .  .  . B0 --  . B1 --  .  .
        rank 2 |  .  . F0 F1  .  . B0 --  . B1 --  .  .  .  .
        rank 3 |  .  .  . F0 B0 -- F1 B1 --  .  .  .  .  .  .
    """)


def test_1f1b_with_two_replicas_in_front():
    schedule = one_f_one_b(Placement.of_replicas((2, 1, 1)), 4)
    assert str(simulated(schedule, forward=(2, 1, 1), backward=(4, 2, 2))) == image("""
        rank 0 | F0 -- F2 --  .  .  .  . B0 -- -- --  .  . B2 -- -- --  .  .  .
        rank 1 | F1 -- F3 --  .  .  .  .  .  .  . B1 -- -- --  .  . B3 -- -- --
        rank 2 |  .  . F0 F1  .  . B0 -- F2 B1 -- F3 B2 --  . B3 --  .  .  .  .
        rank 3 |  .  .  . F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 --  .  .  .  .  .  .
    """)


def test_frozen_work_runs_first_on_all_ranks():
    schedule = lower(prefix_frozen(one_f_one_b(2, 2), encode_parts([4, 4], num_ranks=2)))
    assert str(simulated(schedule, encode=2, exchange=1, reduce=2)) == image("""
        rank 0 | E0 --  X F0 F1  .  . B0 --  . B1 --  R --
        rank 1 | E1 --  X  . F0 B0 -- F1 B1 --  R --  .  .
    """)


def test_deep_warmup_hides_slow_links():
    assert str(simulated(deep_one_f_one_b(3, 4), activation=1, gradient=1)) == image("""
        rank 0 | F0 F1 F2 F3  .  .  .  .  .  .  . B0 --  . B1 --  . B2 --  . B3 --
        rank 1 |  .  . F0 F1 F2  .  .  . B0 -- F3 B1 --  . B2 --  . B3 --  .  .  .
        rank 2 |  .  .  .  . F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 --  .  .  .  .  .  .
    """)


def test_real_durations_are_drawn_to_scale():
    ticks = {"forward": (0.0031, 0.0029), "backward": (0.0071, 0.0052)}
    rows = str(simulated(one_f_one_b(2, 4), **ticks)).splitlines()
    assert len(rows[0]) <= 120 + len("rank 0 |")
    assert all(f"F{m}" in row and f"B{m}" in row for row in rows for m in range(4))


def test_bubbles_of_1f1b_on_four_ranks():
    timeline = simulate(one_f_one_b(4, 4))
    ranks = lambda bubble: ",".join(map(str, bubble.ranks))
    shown = [f"[{b.start_s:g},{b.stop_s:g}) {ranks(b)}" for b in bubbles(timeline)]
    assert " ".join(shown) == (
        "[0,1) 1,2,3 [1,2) 2,3 [2,3) 3 [4,6) 0,1,2 [6,8) 0,1 [8,10) 0 [12,13) 0 [13,14) 1 [14,15) 2 "
        "[15,16) 0,3 [16,17) 1,3 [17,18) 2,3 [18,19) 0,2,3 [19,21) 1,2,3"
    )
    assert bubbles(timeline)[0] == Bubble(0, 1, (1, 2, 3))


def test_an_empty_timeline():
    timeline = Timeline((), num_ranks=2)
    assert (timeline.iteration_s, timeline.bubble_ratio, bubbles(timeline)) == (0, 0, ())
    assert str(timeline) == "rank 0 |\nrank 1 |"


def test_a_message_that_is_never_sent_is_a_deadlock():
    good = one_f_one_b(3, 3)
    programs = (*good.programs[:2], good.programs[2][:-1])
    with pytest.raises(ScheduleError) as error:
        simulate(Schedule(good.placement, 3, programs))
    assert str(error.value) == image("""
        rank 1 waits for the gradient of microbatch 2 for stage 1, which rank 2 never sends

            rank 0 | F0 F1 F2  .  .  .  . B0 --  . B1 --  ?
            rank 1 |  . F0 F1  .  . B0 -- F2 B1 --  .  .  ?          <-- waits here
            rank 2 |  .  . F0 B0 -- F1 B1 -- F2  .  .  .
    """)


def test_two_ranks_that_wait_for_each_other_are_a_deadlock():
    good = one_f_one_b(2, 2)
    first = (*good.programs[0][:1], *good.programs[0][2:], good.programs[0][1])  # F0 B0 B1 F1
    with pytest.raises(ScheduleError, match=r"rank 0 waits for .* each waits for the other"):
        simulate(Schedule(good.placement, 2, (first, good.programs[1])))
