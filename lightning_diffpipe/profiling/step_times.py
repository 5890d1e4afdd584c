"""What a layer's time is when there is code between layers.

A stage runs its own layers and the glue that feeds them, forward and backward, so the glue in front of
a layer counts for it, and the loss behind the last layer for the last one. In this way the times of a
stage's layers add up to the time of the stage, and those of all layers to the time of the step.

Glue in front of a *frozen* layer runs twice in a pipeline, once with the frozen layers and once with the
stages that skip them, so it counts for the next layer of the path as well; glue inside a frozen
container (an autoencoder's residual additions) runs with the frozen layers only.

    |-- glue --| vae |-- glue --| conv_in | block |g| block |-- loss --|
    |<- vae      ->|
    |<- and ->|     |<- conv_in         ->|<block>|<-block           ->|

Stages after the first run the glue at the top of the step again (tokenizing captions, drawing noise), with
dummies: see `repeated_s`. What is left out is glue further down that later stages pass on their way to their
own first layer, such as additions in the forward of a U-Net; it is small, as dummies need not be computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_diffpipe.graph.layer import LayerGraph


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of one step, layer by layer, as the clock told them.

    Attributes:
        before: Glue in front of each layer.
        inside: Forward of each layer.
        tail: Glue behind the last one.
        backward: Backward of each layer with the glue that feeds it; 0 where no gradient arrives.
        backward_tail: Backward of the glue behind the last layer.
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


def forward_s(graph: LayerGraph, times: StepTimes) -> list[float]:
    """Forward of every layer with its glue."""
    seconds = [a + b for a, b in zip(times.before, times.inside, strict=True)]
    following = _next_on_path(graph)
    for index in graph.frozen:
        if following[index] is not None and not _inside_frozen_container(graph, index):
            seconds[following[index]] += times.before[index]
    seconds[graph.path[-1]] += times.tail
    return seconds


def repeated_s(graph: LayerGraph, times: StepTimes) -> float:
    """Glue in front of the first layer of the path, which every stage runs."""
    return sum(
        times.before[index]
        for index in range(graph.path[0] + 1)
        if not _inside_frozen_container(graph, index)
    )


def backward_s(graph: LayerGraph, times: StepTimes) -> list[float]:
    """Backward of every layer with its glue."""
    seconds = list(times.backward)
    seconds[graph.path[-1]] += times.backward_tail
    return seconds


def _next_on_path(graph: LayerGraph) -> Sequence[int | None]:
    following: list[int | None] = []
    upcoming: int | None = None
    for layer in reversed(graph.layers):
        upcoming = upcoming if layer.frozen else layer.index
        following.append(upcoming)
    return following[::-1]


def _inside_frozen_container(graph: LayerGraph, index: int) -> bool:
    """Returns whether layer `index` and the one before it lie in one container of frozen layers only."""
    return any(
        call.first < index < call.stop
        and all(graph.layers[i].frozen for i in range(call.first, call.stop))
        for call in graph.calls
    )
