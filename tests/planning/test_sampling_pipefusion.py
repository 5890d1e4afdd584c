"""PipeFusion on paper: its turns, and the bytes and messages that the tests expect of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.planning.schedules.pipefusion import PipeFusionPlan
from tests.sampling.traffic import CHANGE_BYTES, pipefusion_bytes, pipefusion_messages


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
