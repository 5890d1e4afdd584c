"""Ranks that time layers at once, and plan with the times of all."""

import pytest
import torch
from torch import nn

from lightning_diffpipe.graph.probe import probe
from lightning_diffpipe.profiling.measure import LayerTimer
from lightning_diffpipe.profiling.step_run import StepTimes, pooled, summed_up, typical
from lightning_diffpipe.training import plan_source
from lightning_diffpipe.training.plan_source import measured_by_all


def steps(*seconds):
    return [StepTimes((t, 0.0), (2 * t, 3 * t), t / 2, (4 * t, 5 * t), t / 4) for t in seconds]


def test_a_rank_sums_up_its_runs_by_medians():
    one = {2: (steps(1.0, 8.0, 2.0), steps(4.0, 4.0))}
    assert summed_up(one) == {2: (steps(2.0), steps(4.0))}


def test_typical_times_add_up_to_the_typical_step():
    """Steps have a disturbed layer, always another: no layer's median has one. One step was held up."""
    rows = [(5.0, 2.0, 3.0), (1.0, 6.0, 3.0), (1.0, 2.0, 7.0), (1.0, 2.0, 3.0), (1.0, 2.0, 47.0)]
    assert typical(rows) == pytest.approx([10 / 6 * median for median in (1.0, 2.0, 3.0)])
    assert typical([(0.0, 0.0), (0.0, 0.0)]) == [0.0, 0.0]


def test_what_a_rank_could_not_run_comes_from_the_others():
    """The third had too little memory for four samples; the second could not measure at all."""
    small, large = (steps(1.0), steps(0.5)), (steps(2.0), steps(1.5))
    other = (steps(3.0), steps(2.5))
    together = pooled([{2: small, 4: large}, {}, {2: other}])
    assert together == {2: (steps(1.0, 3.0), steps(0.5, 2.5)), 4: large}


def timer_of(step):
    module = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 8)).train()
    batch = torch.randn(8, 16)
    graph = probe(module, lambda module, batch: module(batch).square().mean(), batch[:2])
    return LayerTimer(
        module, step, batch, graph, sample_counts=(4,), repeats=3, finds_results=False
    )


def scaled(step, factor):
    row = lambda seconds: tuple(factor * second for second in seconds)
    return StepTimes(
        row(step.before), row(step.inside), factor * step.tail, row(step.backward), factor * step.backward_tail,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("factors", "middle", "expected"),
    [((1.0, 1.3, 1.5), 1.3, ()), ((1.0, 1.2, 30.0), 1.1, (1.0, 1 / 1.2, 1 / 30.0))],
)
def test_the_profile_has_the_median_over_fast_ranks(monkeypatch, factors, middle, expected):
    """History: rank 0's times alone were planned with, in whatever minute its core had."""
    gathered = []

    def ranks_of(rounds, world):
        gathered.append(rounds)
        (whole, inputs) = rounds[4]
        return [
            {4: ([scaled(step, f) for step in whole], [scaled(step, f) for step in inputs])}
            for f in factors
        ]

    monkeypatch.setattr(plan_source, "gathered_objects", ranks_of)
    timer = timer_of(lambda module, batch: module(batch).square().mean())
    profile, speeds = measured_by_all(timer, object())
    (own,) = gathered[0][4][0]
    assert profile.backbones[0].layers[0].backward_s.at(4) == pytest.approx(
        middle * own.backward[0]
    )
    assert speeds == pytest.approx(expected)


def test_a_rank_that_cannot_measure_keeps_nobody_waiting(monkeypatch):
    def failing(module, batch):
        raise ZeroDivisionError("this rank's data is broken")

    gathered = []
    monkeypatch.setattr(
        plan_source, "gathered_objects", lambda rounds, world: gathered.append(rounds)
    )
    with pytest.raises(ZeroDivisionError):
        measured_by_all(timer_of(failing), object())
    assert gathered == [{}]
