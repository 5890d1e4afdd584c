"""Times of several ranks that measured at once, as those of one.

Every rank times the same layers, each on its own device, as pipelines will run on all of them at once. A planner
that took one rank's times would plan for that device's bad minute, or its luck:

    rank 0   block 41 ms      rank 1   block 36 ms   ->   block 38.5 ms

So each rank sums up its runs by medians, and the median over ranks counts. What a rank could not run (it
had less memory, or less time) comes from those that could.

Medians of layers add up to less than a step: every step has its disturbances, each in another layer, and no layer's
median has any. Of a backward, on a shared machine, 6 to 8 % were missing. So they are scaled to what steps take.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from lightning_diffpipe.profiling.bench import Rounds
from lightning_diffpipe.profiling.step_times import StepTimes

Pool = Callable[[Rounds], Rounds]
"""Gives all ranks the times of all ranks; each of them calls it once, one that could not measure with `{}`."""


def alone(rounds: Rounds) -> Rounds:
    """Returns the pool of a rank that measures by itself."""
    return rounds


def summed_up(rounds: Rounds) -> Rounds:
    """Reduces runs to one step for each sample count and kind of backward: medians, layer by layer."""
    return {count: ([middle(whole)], [middle(inputs)]) for count, (whole, inputs) in rounds.items()}


def pooled(ranks: Sequence[Rounds]) -> Rounds:
    """Returns the steps of all ranks together, by sample count.

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
    """Reduces several steps to one of typical times, forward and backward.

    Example:
        >>> middle([StepTimes((0.0,), (t,), 0.0, (2 * t,), 0.0) for t in (3.0, 4.0, 9.0)]).backward
        (8.0,)
    """
    num_layers = len(steps[0].inside)
    *forward, tail = typical([(*step.before, *step.inside, step.tail) for step in steps])
    *backward, backward_tail = typical([(*step.backward, step.backward_tail) for step in steps])
    return StepTimes(
        tuple(forward[:num_layers]),
        tuple(forward[num_layers:]),
        tail,
        tuple(backward),
        backward_tail,
    )


def typical(rows: Sequence[Sequence[float]]) -> list[float]:
    """Medians of columns, scaled so that they add up to the median sum of a row.

    Example:
        >>> typical([(1.0, 1.0, 4.0), (4.0, 1.0, 1.0), (1.0, 4.0, 1.0)])
        [2.0, 2.0, 2.0]
    """
    medians = [statistics.median(column) for column in zip(*rows, strict=True)]
    whole, parts = statistics.median(map(sum, rows)), sum(medians)
    return [whole / parts * median for median in medians] if parts > 0 else medians
