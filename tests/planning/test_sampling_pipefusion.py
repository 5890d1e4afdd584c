"""PipeFusion on paper: the picture, the closed forms against the simulation, and the paper's figures."""

from __future__ import annotations

from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.planning.cluster import Link
from lightning_diffpipe.planning.schedules.pipefusion import PipeFusionPlan
from tests.sampling.traffic import CHANGE_BYTES, pipefusion_bytes, pipefusion_messages


def picture(plan: PipeFusionPlan, synchronous: int = 2, patch: int = 1) -> str:
    n = plan.num_ranks
    return str(plan.timeline([synchronous] * n, [patch] * n))


def test_one_synchronous_step_then_patches():
    plan = PipeFusionPlan(num_steps=3, warmup_steps=1, num_patches=3, num_ranks=2)
    assert picture(plan, 3) == dedent("""\
        rank 0 | P0 -- --  .  .  . P1 P2 P3 P4 P5 P6  .
        rank 1 |  .  .  . P0 -- --  . P1 P2 P3 P4 P5 P6""")


def test_too_few_patches_leave_ranks_waiting_for_the_ring():
    plan = PipeFusionPlan(num_steps=2, warmup_steps=0, num_patches=2, num_ranks=3)
    assert picture(plan) == dedent("""\
        rank 0 | P0 P1  . P2 P3  .  .
        rank 1 |  . P0 P1  . P2 P3  .
        rank 2 |  .  . P0 P1  . P2 P3""")


def test_synchronous_steps_in_microbatches_overlap():
    plan = PipeFusionPlan(2, 2, 2, num_ranks=2, warmup_microbatches=2)
    assert picture(plan, 4) == dedent("""\
        rank 0 | P0 P1  . P2 P3  .
        rank 1 |  . P0 P1  . P2 P3""")


def closed_form_s(plan: PipeFusionPlan, synchronous_s: float, patch_s: float) -> float:
    """Seconds of a request with equal stages and free links, G visits and n microbatches.

    `W (n G + N - 1) / (n G)` stages on all tokens, since each of these steps waits for the one before it; then
    `S - W` steps of M patches, or of the time a patch takes through all ranks if that is longer, and the time until
    the last patch has left the last rank.
    """
    lag = (plan.num_ranks - 1) / plan.num_visits
    shares = plan.num_visits * plan.warmup_microbatches
    waves = (shares + plan.num_ranks - 1) / shares
    total = plan.num_synchronous * waves * synchronous_s
    patched = plan.num_steps - plan.num_synchronous
    if patched:
        period = max(plan.num_patches, 1 + lag)
        total += ((patched - 1) * period + plan.num_patches + lag) * patch_s
    return total


@given(
    st.integers(1, 6), st.integers(0, 6), st.integers(1, 6), st.integers(1, 5),
    st.integers(1, 2), st.integers(1, 3),
)  # fmt: skip
def test_the_closed_form_is_the_simulation(steps, warmup, patches, ranks, visits, microbatches):
    plan = PipeFusionPlan(steps, warmup, patches, ranks, visits, microbatches)
    expected = plan.timeline([12.0] * ranks, [5.0] * ranks).iteration_s
    assert closed_form_s(plan, 12.0, 5.0) == pytest.approx(expected)


def test_figures_of_the_paper():
    """98.5 % at M = N = 4 and 50 steps; speed-ups at 20 steps, M = N = 8, for some W."""
    assert PipeFusionPlan(50, 0, 4, 4).speed_up() / 4 == pytest.approx(0.98522, abs=1e-5)
    expected = {0: 7.66, 1: 5.74, 2: 4.59, 5: 2.86}
    for warmup, speed_up in expected.items():
        assert PipeFusionPlan(20, warmup, 8, 8).speed_up() == pytest.approx(speed_up, abs=0.005)
    halves = PipeFusionPlan(20, 1, 8, 8, warmup_microbatches=2)
    assert halves.speed_up() == pytest.approx(6.56, abs=0.005)


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
        "hidden": 10 * 100,
        "latents": 9 * 7,
        "result": (1 + 2) * 7,
        "sequence": 2 * 30 + 8 * 40,
        "statistics": 2 * 2 * CHANGE_BYTES,
        "control": 2 * 2,
    }
    sent = pipefusion_messages(plan, [1], attention_messages=4)
    turns = 2 + 8 * 2
    assert (sent["hidden"], sent["sequence"]) == (2 * turns, 4 * turns)


def test_every_turn_runs_once_on_every_rank():
    plan = PipeFusionPlan(4, 1, 3, 2, num_visits=2, warmup_microbatches=2)
    timeline = plan.timeline([4.0, 4.0], [1.0, 1.0])
    for rank in range(2):
        seen = [span.instruction.microbatch for span in timeline.spans_of(rank)]
        assert seen == [turn.index for turn in plan.turns for _ in range(2)]


def test_a_slow_link_delays_but_never_reorders():
    plan = PipeFusionPlan(3, 1, 2, 2)
    free = plan.timeline([2.0, 2.0], [1.0, 1.0])
    slow = plan.timeline(
        [2.0, 2.0], [1.0, 1.0], link=Link(10.0, 0.1), cut_bytes=[20], latent_bytes=5
    )
    assert slow.iteration_s > free.iteration_s
    assert [s.instruction for s in slow.spans_of(1)] == [s.instruction for s in free.spans_of(1)]


def test_a_plan_without_steps():
    with pytest.raises(ConfigurationError, match="at least one step"):
        PipeFusionPlan(0, 0, 1, 1)
