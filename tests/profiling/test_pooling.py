"""Ranks that time layers at once, and plan with the times of all."""

import pytest
import torch
from torch import nn

from lightning_diffpipe.graph.probe import probe
from lightning_diffpipe.profiling.measure import Subject, measure_profile
from lightning_diffpipe.profiling.step_run import StepTimes, pooled, summed_up, typical


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


def subject_of(step):
    module = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 8)).train()
    batch = torch.randn(8, 16)
    graph = probe(module, lambda module, batch: module(batch).square().mean(), batch[:2])
    return Subject(
        module, step, batch, graph, sample_counts=(4,), repeats=3, looks_at_results=False
    )


def scaled(step, factor):
    row = lambda seconds: tuple(factor * second for second in seconds)
    return StepTimes(
        row(step.before), row(step.inside), factor * step.tail, row(step.backward), factor * step.backward_tail,
    )  # fmt: skip


def test_the_profile_has_the_median_over_ranks():
    """History: rank 0's times alone were planned with, in whatever minute its core had."""
    seen = {}

    def pool(rounds):
        (whole, inputs) = rounds[4]
        ranks = [
            {4: ([scaled(step, f) for step in whole], [scaled(step, f) for step in inputs])}
            for f in (1.0, 10.0, 30.0)
        ]
        seen["own"] = summed_up(rounds)
        return pooled([summed_up(rank) for rank in ranks])

    profile = measure_profile(subject_of(lambda module, batch: module(batch).square().mean()), pool)
    (own,) = seen["own"][4][0]
    assert profile.backbones[0].layers[0].backward_s.at(4) == pytest.approx(10 * own.backward[0])


def test_a_rank_that_cannot_measure_keeps_nobody_waiting():
    def failing(module, batch):
        raise ZeroDivisionError("this rank's data is broken")

    given = []
    with pytest.raises(ZeroDivisionError):
        measure_profile(subject_of(failing), given.append)
    assert given == [{}]
