"""Times of layers add up to a step that nobody looks at."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_diffpipe.profiling import bench
from lightning_diffpipe.profiling.glue import StepTimes
from lightning_diffpipe.profiling.looking import looking_s, without_looking
from tests.profiling.toys import toy

seconds = st.floats(0.0, 10.0)


class LookingOnly:
    """A clock on which nothing takes time but to look at it: a second."""

    def __init__(self):
        self._ticks = itertools.count()

    def stamp(self):
        return float(next(self._ticks))

    def settle(self):
        pass

    def seconds(self, start, stop):
        return stop - start


def test_a_step_takes_as_long_as_when_nobody_looks(monkeypatch):
    """History: on a quiet machine a U-Net's step was planned 6 % too long, as 119 layers were looked at."""
    monkeypatch.setattr(bench, "clock_for", lambda device: LookingOnly())
    module, step, batch, graph = toy()
    subject = bench.Bench(module, step, batch, graph, torch.device("cpu"), None)
    rounds, _, splits = subject.run((1, 2), repeats=3, budget_s=0.0, fixed=True)
    for whole, _ in rounds.values():
        assert [times.total_s for times in whole] == [pytest.approx(2.0)] * 3
    assert all(seconds <= 1.0 for of_count in splits.values() for seconds in of_count)


@st.composite
def steps(draw):
    count = draw(st.integers(1, 5))
    row = st.lists(seconds, min_size=count, max_size=count).map(tuple)
    return StepTimes(draw(row), draw(row), draw(seconds), draw(row), draw(seconds))


@given(steps(), seconds, seconds)
def test_no_layer_takes_less_than_nothing_or_more_than_before(step, forward_s, backward_s):
    (reduced,) = without_looking([step], (forward_s, backward_s))
    for before, after in zip(
        (*step.before, *step.inside, *step.backward),
        (*reduced.before, *reduced.inside, *reduced.backward),
        strict=True,
    ):
        assert 0.0 <= after <= before + 1e-9  # rounding
    assert step.total_s - reduced.total_s <= forward_s + backward_s + 1e-9
    assert (reduced.tail, reduced.backward_tail) == (step.tail, step.backward_tail)


@given(steps(), seconds, seconds)
def test_steps_that_are_slower_unobserved_stay_as_they_are(step, forward_s, backward_s):
    """A disturbance of the machine, as nothing is done then that is not done while looking."""
    unobserved = [(step.total_s + forward_s, step.total_s + backward_s)]
    added_s = looking_s([step], unobserved)
    assert max(added_s) == pytest.approx(0.0, abs=1e-9)
