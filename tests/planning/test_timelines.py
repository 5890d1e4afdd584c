"""What schedules look like: the images a person judges."""

from textwrap import dedent

import pytest

from benchmarks.filling_policies.diffusionpipe import Bubble, bubbles
from lightning_diffpipe.errors import ScheduleError
from lightning_diffpipe.planning.filling import encode_parts
from lightning_diffpipe.planning.lowering import lower, prefix_frozen
from lightning_diffpipe.planning.schedule import Placement, Schedule
from lightning_diffpipe.planning.schedules.one_f_one_b import deep_one_f_one_b, one_f_one_b
from lightning_diffpipe.planning.simulator import simulate
from lightning_diffpipe.planning.timeline import Timeline

from .ticks import simulated


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
