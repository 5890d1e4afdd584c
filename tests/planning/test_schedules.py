"""Every schedule's image, and its closed form where there is one.

PipeFusion on paper: its turns, and the bytes and messages that the tests expect of them.
"""

import random
from dataclasses import replace
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_diffpipe.errors import ConfigurationError, ScheduleError
from lightning_diffpipe.planning.filling import encode_parts
from lightning_diffpipe.planning.instruction import Backward, BackwardInput, BackwardWeight
from lightning_diffpipe.planning.lowering import lower, prefix_frozen
from lightning_diffpipe.planning.passes import schedule_of_passes, widened
from lightning_diffpipe.planning.schedule import Placement, check_laws
from lightning_diffpipe.planning.schedules import SCHEDULES, zero_bubble_v
from lightning_diffpipe.planning.schedules import v as v_placed
from lightning_diffpipe.planning.schedules.gpipe import gpipe
from lightning_diffpipe.planning.schedules.interleaved import interleaved
from lightning_diffpipe.planning.schedules.list_scheduling import bidirectional
from lightning_diffpipe.planning.schedules.one_f_one_b import (
    deep_one_f_one_b,
    one_f_one_b,
    zero_bubble,
)
from lightning_diffpipe.planning.schedules.pipedream import (
    admitted_batches,
    pipedream,
    pipedream_2bw,
    pipedream_vertical_sync,
    unrolled,
)
from lightning_diffpipe.planning.schedules.pipefusion import PipeFusionPlan
from lightning_diffpipe.planning.simulator import in_ticks, makespan, outline_of, simulate
from tests.sampling.traffic import CHANGE_BYTES, pipefusion_bytes, pipefusion_messages

from .profiles import check_golden, peak_alive, simulated

SIZES = list(product(range(1, 7), range(1, 10)))


def two_passes(S, M, spec=one_f_one_b, no_grad=None):
    """Stages of two passes over the same layers; the first one without gradients unless said otherwise."""
    base = Placement.of_replicas([1] * S)
    free = range(S) if no_grad is None else no_grad
    placement = Placement(2 * base.stage_ranks, no_grad=frozenset(free))
    return schedule_of_passes(spec, base, placement, M)


def opposite(S, M, ticks=(), chains=2):
    """Chains of S stages on S ranks."""
    return bidirectional.in_time(ticks)(bidirectional.place(chains * S, S), M)


UNEQUAL = {"forward": (1, 1, 1, 2, 2, 2), "backward": (2, 2, 2, 4, 4, 4)}

EXAMPLES = {
    "passes": (two_passes(4, 4), {"activation": (0, 0, 0, 0, 2, 0, 0, 0)}),
    "passes_both_with_gradients": (two_passes(2, 3, no_grad=()), {}),
    "passes_teacher_last": (two_passes(3, 3, no_grad=(3, 4)), {}),
    "call_sequences": (two_passes(3, 4).starting_at((3, 0, 3, 0)), {}),
    "gpipe": (gpipe(4, 4), {}),
    "1f1b": (one_f_one_b(4, 6), {}),
    "1f1b_replicas_1_3": (one_f_one_b(Placement.of_replicas((1, 3)), 6), {}),
    "1f1b_deep": (deep_one_f_one_b(4, 6), {"activation": 1, "gradient": 1}),
    "zero_bubble": (zero_bubble(4, 6), {}),
    "pipedream": (unrolled(pipedream(4, 1), 8), {}),
    "pipedream_2bw": (unrolled(pipedream_2bw(3, 2), 4), {}),
    "pipedream_replicas_2_1": (unrolled(pipedream(Placement.of_replicas((2, 1)), 1), 6), {}),
    "interleaved": (interleaved(Placement.round_robin(6, 3), 6), {}),
    "v": (v_placed(v_placed.place(6, 3), 6), {}),
    "zero_bubble_v": (zero_bubble_v(zero_bubble_v.place(6, 3), 4), {}),
    "bidirectional": (opposite(4, 2), {}),
    "bidirectional_unequal": (opposite(3, 4, ticks=((1, 2),) * 3 + ((2, 4),) * 3), UNEQUAL),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_golden_timeline(name, update_golden):
    schedule, ticks = EXAMPLES[name]
    check_golden(name, f"{schedule}\n\n{simulated(schedule, **ticks)}", update_golden)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_laws_hold(name):
    lowered = lower(EXAMPLES[name][0])
    check_laws(lowered)
    simulate(lowered)


@pytest.mark.parametrize("feedback", [0, 0.5, 1.7])
def test_a_pass_without_gradients_takes_a_wave_more(feedback):
    for S, M in SIZES:
        into = (*(0 for _ in range(S)), feedback, *(0 for _ in range(S - 1)))
        step_s = simulated(two_passes(S, M), activation=into).iteration_s
        back = feedback if S > 1 else 0  # On one rank nothing has to travel.
        expected = max(M, S + back) + (M + S - 1) * 3
        if S == 2 and feedback > 1:  # On two ranks gradients wait after feedback on the same link.
            assert step_s >= expected - 1e-9
        else:
            assert step_s == pytest.approx(expected)


@pytest.mark.parametrize("name", ["v", "zero_bubble_v", "interleaved"])
def test_a_pass_without_gradients_is_a_wave_where_ranks_hold_two_stages(name):
    """History: it followed the order of the other pass, and a step with V placement took up to a third longer."""
    spec = SCHEDULES[name]
    for R, M in ((R, k * R) for R in (2, 3, 4) for k in (1, 2, 4)):
        base = spec.place(2 * R, R)
        twice = replace(base, stage_ranks=2 * base.stage_ranks, no_grad=frozenset(range(2 * R)))
        both, alone = schedule_of_passes(spec, base, twice, M), spec(base, M)
        more = 0 if name == "interleaved" else 2 * (R - 1)  # until the last stage has all of it
        step_s = simulate(alone).iteration_s + 2 * M + more
        assert simulate(both).iteration_s == pytest.approx(step_s)
        check_laws(lower(both))


@pytest.mark.slow
@pytest.mark.parametrize("spec", [one_f_one_b, zero_bubble, gpipe])
def test_microbatches_of_other_sequences_leave_passes_out(spec):
    """Every mixture runs without deadlock, and takes no longer than the sequence with all calls."""
    for S, M in product((2, 3, 4), (1, 2, 4)):
        full, plain = two_passes(S, M, spec), simulate(spec(S, M)).iteration_s
        for mixture in product((0, S), repeat=M):
            mixed = full.starting_at(mixture)
            check_laws(lower(mixed))
            step_s = simulate(mixed).iteration_s
            assert makespan(outline_of(mixed, (1,) * M), in_ticks(mixed)) == pytest.approx(step_s)
            assert plain - 1e-9 <= step_s <= simulate(full).iteration_s + 1e-9
        assert simulate(mixed).iteration_s == pytest.approx(plain)  # none estimates


@pytest.mark.parametrize("spec", [one_f_one_b, zero_bubble, gpipe])
def test_stages_before_a_schedule_run_as_passes_that_were_planned(spec):
    for S, M in product((1, 2, 3), (1, 4)):
        planned = two_passes(S, M, spec)
        assert widened(spec(S, M), planned.placement) == planned
        trained = two_passes(S, M, spec, no_grad=())
        assert widened(spec(S, M), trained.placement) == trained
        base = Placement.of_replicas([1] * S)
        three = Placement(3 * base.stage_ranks, no_grad=frozenset(range(2 * S)))
        assert widened(planned, three) == schedule_of_passes(spec, base, three, M)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [s for s in SCHEDULES.values() if s.flushes and not s.opposite])
def test_passes_of_which_any_stages_have_gradients_end(spec):
    """History: interleaved ranks waited for each other where the last stage of the first pass had a gradient."""
    for ranks, passes in product((2, 3), (2, 3)):
        base = spec.place(2 * ranks, ranks) if spec.place else Placement.of_replicas([1] * ranks)
        size = base.num_stages
        for number in range(1, size + 1):
            for without in combinations(range(size), number):
                earlier = product(range(0, (passes - 1) * size, size), without)
                no_grad = frozenset(first + stage for first, stage in earlier)
                placement = replace(base, stage_ranks=passes * base.stage_ranks, no_grad=no_grad)
                schedule = lower(schedule_of_passes(spec, base, placement, ranks))
                check_laws(schedule)
                simulate(schedule)


def test_passes_come_before_a_schedule_without_its_frozen_work():
    """History: a run with frozen layers ended where a step called its layers more often than planned."""
    planned = two_passes(2, 2)
    for pieces in (encode_parts([4, 4], num_ranks=2), ()):
        planned_with = prefix_frozen(one_f_one_b(2, 2), pieces)
        assert widened(planned_with, planned.placement) == planned


def test_work_of_a_stage_that_its_microbatch_leaves_out_is_refused():
    full = two_passes(2, 2)
    with pytest.raises(ScheduleError, match="0P0, which its microbatch leaves out"):
        check_laws(replace(full, starts=(2, 0)))


def test_passes_compose_with_halves_of_backwards_and_keep_nothing():
    for S, M in SIZES:
        for spec in (one_f_one_b, zero_bubble):
            plain, both = spec(S, M), two_passes(S, M, spec)
            assert list(map(peak_alive, plain.programs)) == list(map(peak_alive, both.programs))
            check_laws(lower(both))


def test_zero_bubble_leaves_a_third_of_the_bubble():
    for S, M in product(range(1, 9), (8, 9, 13, 16)):
        timeline = simulate(zero_bubble(S, M))
        assert timeline.iteration_s == 3 * M + S - 1
        assert timeline.bubble_ratio == pytest.approx((S - 1) / (3 * M + S - 1))
        assert max(peak_alive(program) for program in zero_bubble(S, M).programs) == min(S, M)


@pytest.mark.parametrize("spec", [zero_bubble, zero_bubble_v])
def test_backwards_stay_whole_where_no_gradient_is_sent_on(spec):
    """History: ZB-V planned halves there, of which the runtime's first did nothing; steps took 10 % longer."""
    for S, M in product((1, 2, 3, 4), (1, 2, 5, 9)):
        placement = spec.place(2 * S, S) if spec.place else Placement.of_replicas([1] * S)
        for _, instruction in spec(placement, M).staged():
            whole = not placement.sends_gradient(instruction.stage)
            assert not isinstance(
                instruction, (BackwardInput, BackwardWeight) if whole else Backward
            )


def test_zero_bubble_is_never_slower_than_1f1b():
    for S, M in SIZES:
        assert simulate(zero_bubble(S, M)).iteration_s <= simulate(one_f_one_b(S, M)).iteration_s


def test_interleaving_divides_the_bubble_by_the_stages_of_a_rank():
    for R, v, groups in product((1, 2, 3, 4), (1, 2, 3), (1, 2, 4)):
        M = groups * R
        timeline = simulate(interleaved(Placement.round_robin(v * R, R), M))
        assert timeline.iteration_s == 3 * (v * M + R - 1)
        assert timeline.bubble_ratio == pytest.approx((R - 1) / (v * M + R - 1))
        check_laws(lower(interleaved(Placement.round_robin(v * R, R), M)))


def test_interleaving_needs_whole_groups():
    with pytest.raises(ScheduleError, match="need a multiple of 4 microbatches; got 6"):
        interleaved(Placement.round_robin(8, 4), 6)


@pytest.mark.slow
@pytest.mark.parametrize("R", [2, 3, 4, 5, 8])
def test_v_has_the_bubble_of_two_interleaved_stages_and_zero_bubble_a_third_of_it(R):
    for M in (2 * R - 1, 2 * R, 3 * R, 16):
        placement = v_placed.place(2 * R, R)
        whole, halves = (simulate(spec(placement, M)) for spec in (v_placed, zero_bubble_v))
        assert whole.iteration_s == 3 * (2 * M + R - 1)
        assert halves.iteration_s == 6 * M + R - 1
        assert max(map(peak_alive, v_placed(placement, M).programs)) <= 4 * R - 2
        assert max(map(peak_alive, zero_bubble_v(placement, M).programs)) <= 3 * R + 1
        for spec in (v_placed, zero_bubble_v):
            check_laws(lower(spec(placement, M)))


@pytest.mark.parametrize(
    ("S", "times"), [(2, (6, 12, 24, 48)), (4, (12, 16, 27, 51)), (8, (24, 28, 36, 59))]
)
def test_two_backbones_in_opposite_directions(S, times):
    """Faster than one after the other without a flush between, (2 M + S - 1) (f + b)."""
    for M, expected in zip((1, 2, 4, 8), times, strict=True):
        assert simulate(opposite(S, M)).iteration_s == expected
        assert expected <= 3 * (2 * M + S - 1)


@pytest.mark.slow
def test_two_backbones_keep_as_much_as_one_pipeline_each():
    rng = random.Random(0)
    for S, M in SIZES:
        for program in opposite(S, M, chains=rng.choice((2, 3, 4))).programs:
            for stage in {i.stage for i in program}:
                position = stage % S
                own = tuple(i for i in program if i.stage == stage)
                assert peak_alive(own) <= S - position


@pytest.mark.parametrize(
    ("replicas", "versions"), [((1, 1, 1, 1), (4, 3, 2, 1)), ((2, 1, 1), (2, 2, 1))]
)
def test_pipedream_keeps_a_version_for_each_batch_in_flight(replicas, versions):
    placement = Placement.of_replicas(replicas)
    stages = range(len(replicas))
    assert tuple(pipedream.weight_versions(placement, s) for s in stages) == versions
    assert admitted_batches(placement) == versions[0]
    assert {pipedream_vertical_sync.weight_versions(placement, s) for s in stages} == {versions[0]}
    assert {pipedream_2bw.weight_versions(placement, s) for s in stages} == {2}
    for rank, program in enumerate(unrolled(pipedream(placement, 1), 16).programs):
        assert peak_alive(program) == versions[placement.stages_of(rank)[0]]


@pytest.mark.parametrize("S", range(2, 6))
def test_pipedream_has_no_bubble_between_batches(S):
    """Draining costs (S - 1) (f + b) once, however many batches there are."""
    assert simulate(unrolled(pipedream(S, 1), 50)).iteration_s == 3 * (50 + S - 1)


@given(st.integers(1, 6), st.integers(0, 6), st.integers(1, 6), st.integers(1, 5))
def test_bytes_do_not_depend_on_patches_or_warmup(steps, warmup, patches, ranks):
    plan = PipeFusionPlan(steps, warmup, patches, ranks)
    sent = pipefusion_bytes(plan, [100] * (ranks - 1), 7)
    expected = {
        "hidden": steps * (ranks - 1) * 100,
        "latents": (steps - 1) * 7,
        "result": (ranks - 1) * 7,
    }
    assert sent == ({k: size for k, size in expected.items() if size} if ranks > 1 else {})


@given(st.integers(2, 8), st.integers(0, 3), st.integers(2, 6), st.integers(2, 5))
def test_messages(steps, warmup, patches, ranks):
    """(N - 1) (W + (S - W) M) between stages, W + (S - W - 1) M back."""
    if warmup >= steps:
        return
    sent = pipefusion_messages(PipeFusionPlan(steps, warmup, patches, ranks), [1] * (ranks - 1))
    turns = warmup + (steps - warmup) * patches
    assert sent["hidden"] == (ranks - 1) * turns
    assert sent["latents"] == turns - patches


def test_sharing_tokens_adds_what_the_ranks_of_a_stage_trade():
    """Two stages of two ranks: each pipeline carries half, and rows are put together once."""
    plan = PipeFusionPlan(10, 2, 2, num_ranks=2, automatic=True, ranks_per_stage=2)
    assert pipefusion_bytes(plan, [100], 7, attention_bytes=(30, 40)) == {
        "hidden": 10 * 100, "latents": 9 * 7, "result": (1 + 2) * 7, "sequence": 2 * 30 + 8 * 40,
        "statistics": 2 * 2 * CHANGE_BYTES, "control": 2 * 2,
    }  # fmt: skip
    sent = pipefusion_messages(plan, [1], attention_messages=4)
    turns = 2 + 8 * 2
    assert (sent["hidden"], sent["sequence"]) == (2 * turns, 4 * turns)


def test_turns_are_synchronous_steps_in_microbatches_then_patches():
    plan = PipeFusionPlan(3, 1, 3, 2, warmup_microbatches=2)
    found = [(t.step, t.patch, t.microbatch, t.is_first, t.is_last) for t in plan.turns]
    assert found[:2] == [(0, None, (0, 2), True, False), (0, None, (1, 2), False, True)]
    assert found[2:] == [
        (step, patch, (0, 1), patch == 0, patch == 2) for step in (1, 2) for patch in range(3)
    ]
    assert [t.index for t in plan.turns] == list(range(8))


def test_a_plan_without_steps():
    with pytest.raises(ConfigurationError, match="at least one step"):
        PipeFusionPlan(0, 0, 1, 1)
