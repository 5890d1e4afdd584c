"""The text form of instructions parses back to the same instructions."""

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
