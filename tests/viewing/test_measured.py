"""Measured timelines: clocks, waits and collectives; and the way from the planned to the measured step."""

from dataclasses import replace

import pytest

from lightning_diffpipe.planning.cluster import Cluster, Link
from lightning_diffpipe.planning.instruction import (
    Backward,
    Encode,
    ExchangeFrozen,
    Forward,
    ReduceGradients,
    Send,
    Wait,
)
from lightning_diffpipe.planning.lowering import lower
from lightning_diffpipe.planning.options import PlanOptions
from lightning_diffpipe.planning.schedule import Placement
from lightning_diffpipe.planning.schedules.one_f_one_b import one_f_one_b
from lightning_diffpipe.planning.search import find_plan
from lightning_diffpipe.planning.simulator import simulate
from lightning_diffpipe.planning.timeline import Span, Timeline
from lightning_diffpipe.viewing.measured import (
    LOADING,
    MESSAGES,
    OPTIMIZER,
    PACE,
    PIPELINE,
    explain_gap,
    measured_timeline,
    occupation,
    without_posts,
)

from ..planning.profiles import equal_profile

TWO = Placement.of_replicas([1, 1])


def noted_by(schedule, timeline):
    """What executors would note: every instruction of the program, waits filled in between."""
    recorded = []
    for rank, program in enumerate(schedule.programs):
        times = {s.instruction: s for s in timeline.spans_of(rank)}
        arrivals = {
            (t.message.wait()): t.stop_s for t in timeline.transfers if t.message.to_rank == rank
        }
        now, own = 0.0, []
        for instruction in program:
            if instruction in times:
                span = times[instruction]
                own.append(Span(rank, instruction, now, span.stop_s))
                if not isinstance(instruction, ReduceGradients | ExchangeFrozen):
                    own[-1] = replace(span)
                now = span.stop_s
            else:
                stop = max(now, arrivals.get(instruction, now))
                own.append(Span(rank, instruction, now, stop))
                now = stop
        recorded.append(own)
    return recorded


@pytest.mark.parametrize("offsets_s", [[0.0, 0.0, 0.0], [0.0, 17.25, -3.5]])
def test_a_planned_timeline_survives_the_way_through_the_ranks_notes(offsets_s):
    schedule = lower(one_f_one_b(3, 4))
    planned = simulate(schedule)
    recorded = [
        [replace(s, start_s=s.start_s + ahead, stop_s=s.stop_s + ahead) for s in own]
        for own, ahead in zip(noted_by(schedule, planned), offsets_s, strict=True)
    ]
    measured = measured_timeline(recorded, offsets_s, Placement.of_replicas([1, 1, 1]))
    assert str(without_posts(measured)) == str(planned)
    assert measured.bubble_ratio == pytest.approx(planned.bubble_ratio)
    assert {t.message for t in measured.transfers} == {t.message for t in planned.transfers}


def test_frozen_work_inside_a_wait_is_work():
    recorded = [
        [Span(0, Forward(0, 0), 0, 1), Span(0, Wait("gradient", 0, 0, 1), 1, 4),
         Span(0, Encode(0), 1.5, 3.5), Span(0, Backward(0, 0), 4, 6)],
        [Span(1, Wait("activation", 1, 0, 0), 0, 1), Span(1, Forward(1, 0), 1, 2),
         Span(1, Backward(1, 0), 2, 4)],
    ]  # fmt: skip
    spent = occupation(measured_timeline(recorded, [0.0, 0.0], TWO))
    assert spent.busy_s == (5.0, 3.0)
    assert spent.idle_s == (1.0, 3.0)
    assert spent.filled_s == (2.0, 0.0)
    assert spent.bubble_ratio == pytest.approx(4 / 12)


def test_the_first_to_come_to_an_exchange_wait_for_the_last():
    recorded = [
        [Span(0, Forward(0, 0), 0, 2), Span(0, ExchangeFrozen(), 2, 6)],
        [Span(1, Forward(1, 0), 0, 5), Span(1, ExchangeFrozen(), 5, 6)],
    ]
    spent = occupation(measured_timeline(recorded, [0.0, 0.0], TWO))
    assert spent.busy_s == (3.0, 6.0)
    assert spent.idle_s == (3.0, 0.0)


def test_frozen_work_that_runs_inside_an_exchange_is_counted_once():
    recorded = [
        [Span(0, Forward(0, 0), 0, 1), Span(0, ExchangeFrozen(), 1, 6), Span(0, Encode(3), 2, 4)]
    ]
    spent = occupation(measured_timeline(recorded, [0.0], Placement.of_replicas([1])))
    assert spent.busy_s == (6.0,)
    assert spent.leftover_s == (2.0,)


def test_gradient_sums_of_unshared_stages_do_not_wait_for_each_other():
    recorded = [
        [Span(0, Forward(0, 0), 0, 1), Span(0, ReduceGradients(), 1, 2)],
        [Span(1, Forward(1, 0), 0, 5), Span(1, ReduceGradients(), 5, 6)],
    ]
    timeline = measured_timeline(recorded, [0.0, 0.0], TWO)
    assert timeline.busy_s(0) == 2.0
    shared = measured_timeline(recorded, [0.0, 0.0], Placement(((0, 1),)))
    assert shared.busy_s(0) == 1.0


def test_frozen_work_is_counted_where_it_ran():
    recorded = [
        [Span(0, Encode(0), 0, 1), Span(0, Forward(0, 0), 1, 2), Span(0, Encode(1), 2, 3),
         Span(0, Backward(0, 0), 3, 5), Span(0, Encode(2), 5, 7), Span(0, Send("gradient", 0, 0, 1), 7, 8)],
    ]  # fmt: skip
    spent = occupation(measured_timeline(recorded, [0.0], Placement.of_replicas([1])))
    assert (spent.before_s, spent.filled_s, spent.leftover_s) == ((1.0,), (1.0,), (2.0,))


def test_nothing_noted_is_an_empty_timeline():
    spent = occupation(measured_timeline([[], []], [0.0, 0.0], TWO))
    assert spent.iteration_s == 0.0
    assert spent.bubble_ratio == 0.0


# ----------------------------------------------------------------------------------- the gap


def plan_of(filling="none"):
    profile = equal_profile(8, frozen_share=0.4, boundary_bytes_per_sample=100_000)
    cluster = Cluster(2, p2p=Link(1e7, 0.001))
    return find_plan(
        profile,
        cluster,
        PlanOptions(global_batch_size=8, num_stages=2, num_microbatches=4, filling=filling),
    )


def scaled(timeline, factor, kinds):
    """The timeline with instructions of some kinds longer, and everything after them later."""
    spans = []
    for rank in range(timeline.num_ranks):
        late = 0.0
        for span in timeline.spans_of(rank):
            more = span.duration_s * (factor - 1) if isinstance(span.instruction, kinds) else 0.0
            spans.append(
                replace(span, start_s=span.start_s + late, stop_s=span.stop_s + late + more)
            )
            late += more
    return Timeline(tuple(spans), timeline.num_ranks)


@pytest.mark.parametrize("filling", ["none", "shares"])
def test_a_run_as_planned_has_no_gap(filling):
    plan = plan_of(filling)
    gap = explain_gap(plan, plan.timeline)
    assert gap.step_s == pytest.approx(gap.planned_s)
    for part in gap.parts:
        assert abs(part.added_s) < 1e-9 * gap.planned_s, part
    assert gap.largest is None
    assert "It runs as planned." in str(gap)


@pytest.mark.parametrize("filling", ["none", "shares"])
def test_parts_add_up_and_blame_what_is_slow(filling):
    plan = plan_of(filling)
    measured = scaled(plan.timeline, 1.5, Backward)
    gap = explain_gap(plan, measured, after_s=0.01, loading_s=0.002)
    added = {part.name: part.added_s for part in gap.parts}
    assert sum(added.values()) == pytest.approx(gap.step_s - gap.planned_s)
    assert added[OPTIMIZER] == 0.01
    assert added[LOADING] == 0.002
    assert gap.largest.name == "backward"
    assert gap.largest.ratio == pytest.approx(1.5)
    assert "1.50 x its planned time" in str(gap)


class Counted(tuple):
    """Counts how often somebody goes through it."""

    scans = 0

    def __iter__(self):
        Counted.scans += 1
        return super().__iter__()


def test_the_way_is_found_in_a_few_passes_over_what_was_measured():
    """History: every instruction was looked for in all spans, so that large runs ended with minutes of it."""
    plan = plan_of()
    measured = Timeline(Counted(plan.timeline.spans), 2)
    Counted.scans = 0
    explain_gap(plan, measured)
    assert Counted.scans < 20


@pytest.mark.parametrize("slow", [ReduceGradients, Forward])
def test_links_to_measure_anew_are_named_as_they_are_configured(slow):
    """History: it said `cluster=measure`, which the trainer does not know."""
    plan = find_plan(
        equal_profile(8, gradient_bytes=10**6), Cluster(2, all_reduce=Link(1e6)),
        PlanOptions(8, num_stages=1, num_microbatches=1, data_parallel=2),
    )  # fmt: skip
    gap = explain_gap(plan, scaled(plan.timeline, 1.5, slow))
    assert ("`strategy.cluster=measure`" in str(gap)) == (slow is ReduceGradients)


def test_what_no_instruction_explains_is_messages():
    plan = plan_of()
    late = tuple(replace(s, start_s=2 * s.start_s, stop_s=2 * s.start_s + s.duration_s)
                 for s in plan.timeline.spans)  # fmt: skip
    gap = explain_gap(plan, Timeline(late, 2))
    assert gap.largest.name == MESSAGES
    assert "`strategy.cluster=measure` (the default" in str(gap)


def test_filling_says_what_it_saved():
    plan = plan_of("shares")
    gap = explain_gap(plan, plan.timeline)
    assert gap.unfilled_s == pytest.approx(plan.planned.unfilled_iteration_s, rel=0.02)
    assert "Filling the bubbles saved" in str(gap)
    assert explain_gap(plan_of(), plan_of().timeline).unfilled_s is None


def test_a_plan_without_costs_is_compared_as_a_whole():
    plan = plan_of()
    bare = replace(plan, costs=None)
    gap = explain_gap(bare, plan.timeline)
    assert [part.name for part in gap.parts] == [PIPELINE, OPTIMIZER, LOADING]


def test_without_a_flush_the_slowest_rank_sets_the_pace():
    """History: it was said that the plan had no costs."""
    options = PlanOptions(4, num_stages=2, num_microbatches=1, schedule="pipedream")
    plan = find_plan(equal_profile(8), Cluster(2), options)
    text = str(explain_gap(plan, Timeline(plan.timeline.spans, 2)))
    assert PACE in text
    assert "without costs" not in text
