"""What a layer's time is: with the code between layers, over many runs, on several ranks.

A stage runs its own layers and the glue that feeds them, forward and backward, so the glue before a layer counts
for it, and the loss after the last layer for the last one. In this way the times of a stage's layers add up to the
time of the stage, and those of all layers to the time of the step.

Glue before a *frozen* layer runs twice in a pipeline, once with the frozen layers and once with the stages that
skip them, so it counts for the next layer of the path as well; glue inside a frozen container (an autoencoder's
residual additions) runs with the frozen layers only.

    |-- glue --| vae |-- glue --| conv_in | block |g| block |-- loss --|
    |<- vae      ->|
    |<- and ->|     |<- conv_in         ->|<block>|<-block           ->|

Stages after the first run the glue at the top of the step again (tokenizing captions, drawing noise), with
dummies: see `repeated_s`. What is left out is glue further down that later stages pass on their way to their own
first layer, such as additions in the forward of a U-Net.

Every rank times the same layers, each on its own device, as pipelines will run on all of them at once: one rank's
times may be those of a bad minute. So each rank reduces its runs to medians, and the median over ranks counts.
What a rank could not run (it had less memory, or less time) comes from those that could.

Medians of layers add up to less than a step: every step has its disturbances, each in another layer, and no
layer's median has any. Of a backward, on a shared machine, 6 to 8 % were missing. So they are scaled to what steps
take.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lightning_diffpipe.graph.layer import LayerGraph


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of one step, layer by layer.

    Attributes:
        before: Glue before each layer.
        inside: Forward of each layer.
        tail: Glue after the last one.
        backward: Backward of each layer with the glue that feeds it; 0 where no gradient arrives.
        backward_tail: Backward of the glue after the last layer.
    """

    before: tuple[float, ...]
    inside: tuple[float, ...]
    tail: float
    backward: tuple[float, ...]
    backward_tail: float

    @property
    def total_s(self) -> float:
        """The whole step."""
        return sum((*self.before, *self.inside, self.tail, *self.backward, self.backward_tail))


Rounds = Mapping[int, tuple[Sequence[StepTimes], Sequence[StepTimes]]]
"""Steps by sample count: with whole backward, and with that of inputs only."""


def forward_s(graph: LayerGraph, times: StepTimes) -> list[float]:
    """Returns the forward seconds of every layer with its glue."""
    seconds = [a + b for a, b in zip(times.before, times.inside, strict=True)]
    following: dict[int, int | None] = {}  # the next layer of the path
    upcoming: int | None = None
    for layer in reversed(graph.layers):
        upcoming = upcoming if layer.frozen else layer.index
        following[layer.index] = upcoming
    for index in graph.frozen:
        reader = following[index]
        if reader is not None and not _inside_frozen_container(graph, index):
            seconds[reader] += times.before[index]
    seconds[graph.path[-1]] += times.tail
    return seconds


def repeated_s(graph: LayerGraph, times: StepTimes) -> float:
    """Returns the seconds of the glue before the first layer of the path, which every stage runs."""
    return sum(
        times.before[index]
        for index in range(graph.path[0] + 1)
        if not _inside_frozen_container(graph, index)
    )


def backward_s(graph: LayerGraph, times: StepTimes) -> list[float]:
    """Returns the backward seconds of every layer with its glue."""
    seconds = list(times.backward)
    seconds[graph.path[-1]] += times.backward_tail
    return seconds


def _inside_frozen_container(graph: LayerGraph, index: int) -> bool:
    """Returns whether layer `index` and the one before it lie in one container of frozen layers only."""
    return any(
        call.first < index < call.stop
        and all(graph.layers[i].frozen for i in range(call.first, call.stop))
        for call in graph.calls
    )


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
    """Returns medians of columns, scaled so that they add up to the median sum of a row.

    Example:
        >>> typical([(1.0, 1.0, 4.0), (4.0, 1.0, 1.0), (1.0, 4.0, 1.0)])
        [2.0, 2.0, 2.0]
    """
    medians = [statistics.median(column) for column in zip(*rows, strict=True)]
    whole, parts = statistics.median(map(sum, rows)), sum(medians)
    return [whole / parts * median for median in medians] if parts > 0 else medians
