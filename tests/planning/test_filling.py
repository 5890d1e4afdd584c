"""Frozen work in bubbles: laws, images, and what it gains.

The table of bubbles on DiffusionPipe's slides, from plans without filling.

Upper numbers: bubble ratio with the frozen part before the pipeline, on all ranks. Lower numbers:
bubble time over frozen time. One ratio of frozen to trained time gives all 48: x = 0.8944.

Source: DiffusionPipe, Tian et al. (MLSys 2024), slides; x and the reading of the lower row are ours.
"""

import random
from collections import defaultdict
from dataclasses import replace

import pytest

from benchmarks.filling_policies.diffusionpipe import fill_like_diffusionpipe
from lightning_diffpipe.planning.cluster import Cluster
from lightning_diffpipe.planning.filling import (
    SHARES_PERIOD,
    fill_by_shares,
    frozen_layers,
    shares,
    weave,
)
from lightning_diffpipe.planning.instruction import Encode, Staged
from lightning_diffpipe.planning.lowering import lower
from lightning_diffpipe.planning.options import PlanOptions
from lightning_diffpipe.planning.plan import PipelinePlan
from lightning_diffpipe.planning.profile import EncoderLayerProfile, EncoderProfile, Seconds
from lightning_diffpipe.planning.schedule import Placement
from lightning_diffpipe.planning.schedules.one_f_one_b import one_f_one_b
from lightning_diffpipe.planning.search import find_plan
from lightning_diffpipe.planning.simulator import simulate

from .profiles import check_golden, equal_profile, simulated

UNIFORM = [[1] * 24, [1] * 24]
LONG = [[1] * 12, [1, 1, 2, 2, 4, 4, 12, 3, 3, 2]]
POLICIES = ["diffusionpipe", "shares"]


def encoders_of(shape, total_s, batch, chained=False):
    """Layers in the given proportions, 2% of each independent of the number of samples."""
    weight = total_s / sum(map(sum, shape))
    encoders = []
    for i, layers in enumerate(shape):
        profiles = [
            EncoderLayerProfile(
                f"layer{j}", Seconds.of({1: (0.02 + 0.98 / batch) * w * weight, batch: w * weight})
            )
            for j, w in enumerate(layers)
        ]
        needs = ("encoder0",) if chained and i else ()
        encoders.append(EncoderProfile(f"encoder{i}", tuple(profiles), needs))
    return encoders


def filled_of(policy, schedule, encoders, batch):
    timeline = simulate(schedule)
    if policy == "diffusionpipe":  # the baseline that `benchmarks/filling_policies` compares with
        placed = fill_like_diffusionpipe(timeline, encoders, batch)
    else:
        placed = fill_by_shares(timeline, frozen_layers(encoders), [1] * batch)
    filled = weave(schedule, timeline, placed)
    return timeline, filled, simulated(lower(filled.schedule), encode=filled.piece_s)


CASES = [
    (policy, shape, S, M) for policy in POLICIES for shape in (UNIFORM, LONG) for S, M in
    [(1, 1), (2, 2), (2, 4), (3, 1), (4, 2), (4, 4), ((1, 3), 6), ((2, 1, 1), 5)]
]  # fmt: skip


@pytest.mark.parametrize(("policy", "shape", "S", "M"), CASES)
@pytest.mark.parametrize("chained", [False, True])
def test_laws_of_filling(policy, shape, S, M, chained):
    schedule = one_f_one_b(S if isinstance(S, int) else Placement.of_replicas(S), M)
    encoders = encoders_of(shape, 0.6 * schedule.num_ranks * M * 3, 32, chained)
    timeline, filled, after = filled_of(policy, schedule, encoders, 32)

    # The pipeline's own times are untouched.
    before_spans = {s.instruction: s for s in timeline.spans if isinstance(s.instruction, Staged)}
    for span in after.spans:
        if isinstance(span.instruction, Staged):
            assert span.start_s == pytest.approx(before_spans[span.instruction].start_s)
    # Every sample passes every layer exactly once, and every piece is run once, on its rank.
    samples = defaultdict(list)
    for piece in filled.pieces:
        samples[piece.encoder, piece.layer] += range(piece.start, piece.stop)
    assert all(sorted(seen) == list(range(32)) for seen in samples.values())
    assert len(samples) == sum(len(encoder.layers) for encoder in encoders)
    run = {
        i.part: r
        for r, p in enumerate(filled.schedule.programs)
        for i in p
        if isinstance(i, Encode)
    }
    assert run == {piece.index: piece.rank for piece in filled.pieces}
    # What is left over runs after the pipeline, and nothing else does.
    assert timeline.iteration_s <= after.iteration_s + 1e-9
    assert after.iteration_s <= timeline.iteration_s + filled.leftover_s + 1e-6


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("chained", [False, True])
def test_a_sample_passes_the_layers_in_order(policy, chained):
    schedule = one_f_one_b(4, 4)
    encoders = encoders_of(LONG, 40, 32, chained)
    _, filled, after = filled_of(policy, schedule, encoders, 32)
    order = {(l.encoder, l.layer): n for n, l in enumerate(frozen_layers(encoders))}
    spans = {s.instruction.part: s for s in after.spans if isinstance(s.instruction, Encode)}
    for rank in range(4):
        own = [p for p in filled.pieces if p.rank == rank]
        for sample in range(32):
            passed = sorted(
                (spans[p.index].start_s, order[p.encoder, p.layer], p.encoder, p.layer)
                for p in own
                if p.start <= sample < p.stop
            )
            for encoder in {p[2] for p in passed}:
                layers = [p[3] for p in passed if p[2] == encoder]
                assert layers == sorted(layers)
            if chained and policy == "shares":
                assert [p[1] for p in passed] == sorted(p[1] for p in passed)


@pytest.mark.parametrize(
    ("shape", "x", "S", "M", "unfilled", "ratio", "speedup"),
    [
        (UNIFORM, 0.44, 2, 2, 25.7, 4.0, 1.299),
        (UNIFORM, 0.44, 4, 4, 33.8, 17.0, 1.267),
        (UNIFORM, 0.8944, 2, 2, 20.7, 0.3, 1.264),
        (UNIFORM, 0.8944, 4, 2, 43.5, 23.0, 1.379),
        (LONG, 0.44, 2, 4, 14.7, 0.2, 1.173),
        (LONG, 0.44, 4, 4, 33.8, 16.5, 1.267),
        (LONG, 0.8944, 2, 4, 11.6, 0.0, 1.132),
        (LONG, 0.8944, 4, 4, 27.8, 2.9, 1.327),
    ],
)
def test_what_filling_gains(shape, x, S, M, unfilled, ratio, speedup):
    """Toy costs: forward 1, backward 2, batch 64, frozen work of x times the trained work."""
    schedule, batch = one_f_one_b(S, M), 64
    encoders = encoders_of(shape, x * S * M * 3, batch)
    timeline, _, after = filled_of("diffusionpipe", schedule, encoders, batch)
    frozen_s = sum(layer.seconds(batch / S) for layer in frozen_layers(encoders))
    unfilled_s = timeline.iteration_s + frozen_s
    idle_s = sum(timeline.idle_by_rank_s())
    assert 100 * idle_s / (unfilled_s * S) == pytest.approx(unfilled, abs=0.06)
    assert 100 * after.bubble_ratio == pytest.approx(ratio, abs=0.06)
    assert unfilled_s / after.iteration_s == pytest.approx(speedup, abs=0.001)


def test_shares_are_done_at_the_same_time():
    for seed in range(50):
        rng = random.Random(seed)
        idle = [rng.uniform(0, 10) for _ in range(rng.randint(1, 6))]
        samples, sample_s = rng.randint(1, 60), rng.uniform(0.05, 1)
        found = shares(idle, sample_s, samples)
        assert sum(found) == samples
        ends = [n * sample_s - i for n, i in zip(found, idle, strict=True) if n]
        assert max(ends) - min(ends) <= 2 * sample_s + 1e-9
        rest = [-i for n, i in zip(found, idle, strict=True) if not n]
        assert all(end <= other + 2 * sample_s for end in ends for other in rest)


@pytest.mark.parametrize("policy", POLICIES)
def test_golden_timeline(policy, update_golden):
    encoders = encoders_of([[1, 1, 2], [1, 3]], 10, 4)
    _, filled, after = filled_of(policy, one_f_one_b(3, 3), encoders, 4)
    pieces = "\n".join(str(piece) for piece in filled.pieces)
    check_golden(f"filling_{policy}", f"{filled.schedule}\n\n{after}\n\n{pieces}", update_golden)


@pytest.mark.parametrize("filling", ["shares", "auto"])
def test_filled_plans(filling):
    profile = equal_profile(12, 0.44)
    options = PlanOptions(48, num_stages=4, num_microbatches=4, filling=filling)
    plan = find_plan(profile, Cluster(4), options)
    planned = plan.planned
    assert plan.options.filling == "shares"
    assert planned.iteration_s < 0.81 * planned.unfilled_iteration_s
    assert planned.bubble_ratio < planned.unfilled_bubble_ratio / 2
    assert planned.iteration_s >= planned.no_bubble_limit_s
    assert plan.timeline.iteration_s == pytest.approx(planned.iteration_s)
    assert PipelinePlan.from_json(plan.to_json()) == plan


def test_without_frozen_work_there_is_nothing_to_fill():
    options = PlanOptions(48, num_stages=4, num_microbatches=4, filling="auto")
    plan = find_plan(equal_profile(12), Cluster(4), options)
    assert (plan.options.filling, plan.pieces) == ("none", ())


@pytest.mark.slow
def test_filling_is_never_slower_than_not_filling():
    for seed in range(20):
        rng = random.Random(seed)
        profile = equal_profile(rng.randint(2, 8), rng.uniform(0.05, 1.5))
        S = rng.randint(1, min(4, len(profile.backbones[0].layers)))
        steps = [
            find_plan(
                profile, Cluster(S), PlanOptions(24, num_stages=S, filling=filling)
            ).planned.iteration_s
            for filling in ("none", "auto")
        ]
        assert steps[1] <= steps[0] * (1 + 1e-9)


@pytest.mark.parametrize("group_size", [1, 3, 4, 8])
def test_ranks_take_whole_groups_within_a_period(group_size):
    """The runtime moves whole groups only: plans in samples promised shares that no rank could take."""
    options = PlanOptions(
        40, num_stages=3, num_microbatches=4, filling="shares", frozen_group_size=group_size
    )
    plan = find_plan(equal_profile(9, 0.8), Cluster(3), options)
    step = max(1, group_size // SHARES_PERIOD)
    ends, done = {10 * m + end for m in range(4) for end in (*range(0, 10, step), 10)}, 0
    for rank in range(3):
        done += sum(p.num_samples for p in plan.pieces if p.rank == rank)
        assert done in ends
    assert plan.options.frozen_group_size == group_size


def test_groups_are_as_large_as_pays():
    """Half a group is lost in a period; what a group costs on top of its samples is paid for each."""
    chosen = []
    for overhead_s in (0.0, 0.03, 0.3, 30.0):
        times = Seconds.of({1: overhead_s + 1, 64: overhead_s + 64})
        encoder = EncoderProfile("vae", (EncoderLayerProfile("whole", times),))
        profile = replace(equal_profile(8), encoders=(encoder,))
        options = PlanOptions(128, num_stages=2, num_microbatches=4, filling="shares")
        chosen.append(find_plan(profile, Cluster(2), options).options.frozen_group_size)
    assert chosen == [1, 8, 32, 32]


def test_the_plan_that_needs_least_filling_is_preferred():
    """Costs are never known exactly: of cuts that are equally fast when filled, take the even one.

    A cut of 1 and 7 layers, all frozen work on the first rank, was planned as fast as an even one, and
    ran 12% slower, as encoders took longer than measured.
    """
    options = PlanOptions(32, num_stages=2, num_microbatches=4, filling="shares")
    frozen = encoders_of(UNIFORM, 0.9 * 8 * 3 * 32, 32)
    profile = replace(equal_profile(8), encoders=tuple(frozen))
    plan = find_plan(profile, Cluster(2), options)
    assert [stage.last_layer for stage in plan.stages] == [3, 7]


X = 0.8944
TABLE = {
    (4, 1): (61.3, 335.4),
    (4, 2): (44.2, 167.7),
    (4, 3): (34.5, 111.8),
    (4, 4): (28.4, 83.9),
    (3, 1): (51.4, 223.6),
    (3, 2): (34.5, 111.8),
    (3, 3): (26.0, 74.5),
    (3, 4): (20.9, 55.9),
    (2, 1): (34.5, 111.8),
    (2, 2): (20.9, 55.9),
    (2, 3): (15.0, 37.3),
    (2, 4): (11.7, 28.0),
}


@pytest.mark.parametrize(("S", "M"), TABLE)
@pytest.mark.parametrize(("layers_per_stage", "partition"), [(1, "auto"), (6, "uniform")])
def test_all_numbers_of_the_table(S, M, layers_per_stage, partition):
    options = PlanOptions(
        48, num_stages=S, num_microbatches=M, data_parallel=1, filling="none", partition=partition
    )
    plan = find_plan(equal_profile(S * layers_per_stage, X), Cluster(S), options)
    bubble_s = plan.planned.bubble_ratio * plan.planned.iteration_s
    frozen_s = plan.planned.frozen_s / S
    printed = (round(100 * plan.planned.bubble_ratio, 1), round(100 * bubble_s / frozen_s, 1))
    assert printed == TABLE[S, M]


def test_equal_stages_are_not_the_best_way_to_cut_equal_layers():
    """Later stages wait longer for their first work; with less of it they end earlier."""
    options = PlanOptions(48, num_stages=4, num_microbatches=4, data_parallel=1)
    plan = find_plan(equal_profile(12, X), Cluster(4), options)
    assert [stage.num_layers for stage in plan.stages] == [4, 3, 3, 2]
    assert plan.planned.bubble_ratio < 0.284
