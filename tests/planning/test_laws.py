"""Laws that hold for every schedule that trains one backbone, at every size.

The text form of instructions parses back to the same instructions.
"""

import itertools
import random
from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_diffpipe.errors import ScheduleError
from lightning_diffpipe.planning.instruction import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Encode,
    ExchangeFrozen,
    Forward,
    ForwardNoGrad,
    Receive,
    ReduceGradients,
    Send,
    UpdateWeights,
    Wait,
    format_program,
    parse_instruction,
    parse_program,
)
from lightning_diffpipe.planning.lowering import lower
from lightning_diffpipe.planning.schedule import Placement, Schedule, check_laws
from lightning_diffpipe.planning.schedules import SCHEDULES
from lightning_diffpipe.planning.schedules.gpipe import gpipe
from lightning_diffpipe.planning.schedules.one_f_one_b import one_f_one_b
from lightning_diffpipe.planning.simulator import simulate
from lightning_diffpipe.planning.timeline import Span, Timeline

from .profiles import ALL, EQUAL, UNEQUAL, peak_alive, placement_of, simulated

CHAINS = {name: spec for name, spec in SCHEDULES.items() if not spec.place}
every_schedule = pytest.mark.parametrize("make", CHAINS.values(), ids=CHAINS.keys())


@every_schedule
def test_every_microbatch_goes_forward_then_backward_once_per_stage(make):
    for size, M in ALL:
        schedule = make(placement_of(size), M)
        done = defaultdict(list)
        for rank, i in schedule.staged():
            assert rank == schedule.placement.rank_of(i.stage, i.microbatch)
            done[i.stage, i.microbatch].append(type(i))
        assert set(done) == {(s, m) for s in range(schedule.num_stages) for m in range(M)}
        for work in done.values():
            trained = [kind for kind in work if kind is not ForwardNoGrad]
            assert trained in ([Forward, Backward], [Forward, BackwardInput, BackwardWeight])


@pytest.mark.slow
@every_schedule
def test_every_send_has_its_receive_in_the_same_order(make):
    for size, M in ALL:
        lowered = lower(make(placement_of(size), M))
        sent, received = defaultdict(list), defaultdict(list)
        for rank, program in enumerate(lowered.programs):
            for i in program:
                if isinstance(i, Send):
                    sent[rank, i.to_rank].append((i.kind, i.stage, i.microbatch))
                if isinstance(i, Receive):
                    received[i.from_rank, rank].append((i.kind, i.stage, i.microbatch))
        assert sent == received
        assert sum(map(len, sent.values())) == 2 * (lowered.num_stages - 1) * M
        check_laws(lowered)


@pytest.mark.slow
@every_schedule
def test_nothing_hangs_and_every_rank_reduces_last(make):
    for size, M in ALL:
        lowered = lower(make(placement_of(size), M))
        timeline = simulated(lowered, activation=0.3, gradient=0.3, reduce=1)
        assert len(timeline.spans) == sum(1 for _ in lowered.staged()) + lowered.num_ranks
        assert all(isinstance(program[-1], ReduceGradients) for program in lowered.programs)
        for rank in range(lowered.num_ranks):
            for before, after in pairwise(timeline.spans_of(rank)):
                assert before.stop_s <= after.start_s + 1e-9


def test_a_receive_is_posted_before_the_computation_that_precedes_its_wait():
    """So that a transfer overlaps that computation."""
    for size, M in UNEQUAL:
        for program in lower(one_f_one_b(placement_of(size), M)).programs:
            computed, posted_at = 0, {}
            for i in program:
                if isinstance(i, Receive):
                    posted_at[i.from_rank, i.kind, i.stage, i.microbatch] = computed
                if isinstance(i, Wait):
                    key = (i.from_rank, i.kind, i.stage, i.microbatch)
                    assert posted_at[key] < computed or computed == 0 or _is_repeat(program, i)
                if isinstance(i, (Forward, Backward)):
                    computed += 1


def _is_repeat(program, wait):
    """Two messages of one edge that are waited for with no computation in between."""
    return program[program.index(wait) - 1].__class__ in (Wait, Receive)


def test_1f1b_keeps_at_most_the_stages_below_it():
    for S, M in EQUAL:
        for stage, program in enumerate(one_f_one_b(S, M).programs):
            assert peak_alive(program) == min(S - stage, M)
        for program in gpipe(S, M).programs:
            assert peak_alive(program) == M


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
def test_bubble_ratio_matches_theory(make):
    for S, M in EQUAL:
        timeline = simulate(make(S, M))
        assert timeline.iteration_s == 3 * (M + S - 1)
        assert timeline.bubble_ratio == pytest.approx((S - 1) / (M + S - 1), abs=1e-12)


def test_nobody_is_idle_for_less_than_no_time():
    """History: a step without bubbles had -2e-16 of them by rounding; its plan was refused, and no run began."""
    draw = random.Random(0)
    for _ in range(200):
        ends_s = [0.0, *itertools.accumulate(draw.random() for _ in range(4))]
        works = list(enumerate(pairwise(ends_s)))
        spans = [Span(r, Forward(0, i), *times) for r in range(2) for i, times in works]
        timeline = Timeline(tuple(spans), 2)
        assert timeline.bubble_ratio >= 0
        assert min(timeline.idle_by_rank_s()) >= 0


@pytest.mark.parametrize(
    ("programs", "complaint"),
    [
        (
            ["F0 B0", "F0"],
            "stage 1 does Forward for microbatch 0; each needs Forward, Backward or Fo",
        ),
        (["F0 B0 B0", "F0 B0"], "stage 0 does Forward, Backward, Backward for microbatch 0"),
        (["B0 F0", "F0 B0"], "does Backward, Forward for microbatch 0; .* in this order"),
        (["F0 I0", "F0 B0"], "stage 0 does Forward, BackwardInput for microbatch 0"),
        (["F0", "U0 F0"], "stage 0 does Forward for .*needs Forward, Backward or"),
        (["F0 B0 1F0", "B0"], "rank 0 runs 1F0, which belongs to rank 1"),
        (["F0 B0 F7", "F0 B0"], "rank 0 runs 0F7, but there are 2 stages and 1 microbatches"),
    ],
)
def test_broken_schedules_are_refused_by_name(programs, complaint):
    parsed = tuple(parse_program(text, stage) for stage, text in enumerate(programs))
    with pytest.raises(ScheduleError, match=complaint):
        check_laws(Schedule(Placement(((0,), (1,))), 1, parsed))


@pytest.mark.parametrize(
    ("rank", "old", "new", "complaint"),
    [
        (0, "1a0>1 ", "", "rank 0 makes 1a0>1, but never sends it"),
        (1, "a0?0 ", "", "rank 1 runs 1F0 without 1a0.0 before it"),
        (1, "a0<0 ", "", "rank 1 waits with 1a0.0, but posted no receive"),
        (0, "F0 1a0>1 ", "1a0>1 F0 ", "rank 0 sends 1a0>1 before it is made"),
        (1, "a1<0", "a1<0 a1<0", "rank 1 has 1a1<0 twice"),
        (
            1,
            "a0<0 a0?0 a1<0",
            "a1<0 a0<0 a0?0",
            "message 0 from rank 0 to rank 1: the activation of microbatch 0 for stage 1 is sent, "
            "but the activation of microbatch 1 for stage 1 is received",
        ),
    ],
)
def test_broken_communication_is_refused_by_name(rank, old, new, complaint):
    lowered = lower(one_f_one_b(2, 2))
    texts = [line.split("| ")[1] for line in str(lowered).splitlines()]
    assert old in texts[rank]
    texts[rank] = texts[rank].replace(old, new)
    programs = tuple(parse_program(text, stage) for stage, text in enumerate(texts))
    with pytest.raises(ScheduleError, match=complaint):
        check_laws(Schedule(lowered.placement, 2, programs))


numbers = st.integers(min_value=0, max_value=400)
kinds = st.sampled_from(["activation", "gradient"])
staged = [Forward, Backward, BackwardInput, BackwardWeight, ForwardNoGrad, UpdateWeights]
instructions = st.one_of(
    *(st.builds(make, stage=numbers, microbatch=numbers) for make in staged),
    *(st.builds(make, kinds, numbers, numbers, numbers) for make in (Send, Receive, Wait)),
    st.builds(Encode, numbers),
    st.just(ExchangeFrozen()),
    st.just(ReduceGradients()),
)


@pytest.mark.parametrize(
    ("instruction", "text"),
    [
        (Forward(2, 0), "2F0"),
        (Backward(2, 13), "2B13"),
        (BackwardInput(0, 1), "0I1"),
        (BackwardWeight(0, 1), "0W1"),
        (ForwardNoGrad(10, 1), "10P1"),
        (UpdateWeights(1, 4), "1U4"),
        (Send("activation", 2, 0, 3), "2a0>3"),
        (Receive("gradient", 2, 0, 1), "2g0<1"),
        (Encode(3), "E3"),
        (ExchangeFrozen(), "X"),
        (ReduceGradients(), "R"),
    ],
)
def test_every_instruction_has_a_text_form(instruction, text):
    assert str(instruction) == text
    assert parse_instruction(text) == instruction


@given(st.lists(instructions), st.one_of(st.none(), numbers))
def test_programs_round_trip(program, stage):
    assert parse_program(format_program(program, stage), stage) == tuple(program)


def test_the_stage_may_be_left_out_where_it_is_known():
    assert format_program((Forward(12, 0), Backward(12, 0)), stage=12) == "F0 B0"
    assert parse_program("F0 2B0", stage=1) == (Forward(1, 0), Backward(2, 0))
    with pytest.raises(ScheduleError, match=r"'F0' names no stage; write for example 0F0"):
        parse_instruction("F0")


@pytest.mark.parametrize(
    "text", ["", "F", "2F", "2Q0", "2a0", "2a0>", "E", "-1F0", "2f0", "x", "2F0 "]
)
def test_other_text_is_refused_by_name(text):
    with pytest.raises(ScheduleError, match="is no instruction; expected for example F0"):
        parse_instruction(text)
