"""Times of several ranks that measured at once, as those of one.

Every rank times the same layers, each on its own device, as pipelines will run on all of them at once. A planner
that took one rank's times would plan for that device's bad minute, or its luck:

    rank 0   block 41 ms      rank 1   block 36 ms   ->   block 38.5 ms

So each rank sums up its runs by medians, and the median over ranks counts. What a rank could not run (it
had less memory, or less time) comes from those that could.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from lightning_diffpipe.profiling.bench import Rounds
from lightning_diffpipe.profiling.glue import StepTimes

Pool = Callable[[Rounds], Rounds]
"""Gives all ranks the times of all ranks; each of them calls it once, one that could not measure with `{}`."""


def alone(rounds: Rounds) -> Rounds:
    """The pool of a rank that measures by itself."""
    return rounds


def summed_up(rounds: Rounds) -> Rounds:
    """One step for each sample count and kind of backward: medians over the runs, layer by layer."""
    return {count: ([middle(whole)], [middle(inputs)]) for count, (whole, inputs) in rounds.items()}


def pooled(ranks: Sequence[Rounds]) -> Rounds:
    """The steps of all ranks together, by sample count.

    Example:
        >>> step = StepTimes((0.0,), (3.0,), 0.0, (6.0,), 0.0)
        >>> {count: len(whole) for count, (whole, _) in
        ...  pooled([{1: ([step], [step])}, {}, {1: ([step], [step]), 2: ([step], [step])}]).items()}
        {1: 2, 2: 1}
    """
    counts = sorted({count for rounds in ranks for count in rounds})
    return {
        count: (
            [step for rounds in ranks if count in rounds for step in rounds[count][0]],
            [step for rounds in ranks if count in rounds for step in rounds[count][1]],
        )
        for count in counts
    }


def middle(steps: Sequence[StepTimes]) -> StepTimes:
    """The median of every time.

    Example:
        >>> middle([StepTimes((0.0,), (t,), 0.0, (2 * t,), 0.0) for t in (3.0, 4.0, 9.0)]).backward
        (8.0,)
    """
    column = lambda rows: tuple(map(statistics.median, zip(*rows, strict=True)))
    return StepTimes(
        column([step.before for step in steps]),
        column([step.inside for step in steps]),
        statistics.median(step.tail for step in steps),
        column([step.backward for step in steps]),
        statistics.median(step.backward_tail for step in steps),
    )
