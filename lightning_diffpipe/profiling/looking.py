"""What looking at a step costs, taken off its times.

Stamps and hooks at the borders of layers take about the same time at each, whatever the layer does and on however
many samples. In a stage every call is intercepted, too, which takes less. A plan shall promise what a stage takes,
so the whole step is also run as one stage, unobserved, on as many samples as were probed:

    as looked at    conv 0.13   block 0.93   block 0.93   norm 0.06      2.05
    as one stage                                                         1.93
    without that    conv 0.10   block 0.90   block 0.90   norm 0.03      1.93
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from lightning_diffpipe.clock import Clock
from lightning_diffpipe.graph.view import StageView
from lightning_diffpipe.profiling.glue import StepTimes
from lightning_diffpipe.profiling.step_run import uncollected


def unobserved_s(view: StageView, clock: Clock, call: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of a forward and of a whole backward.

    Args:
        view: The whole step as one stage.
        clock: Takes three stamps.
        call: Runs the step and returns the loss.
    """
    with uncollected(), torch.enable_grad():
        clock.settle()
        start = clock.stamp()
        run = view.forward(call, seed=0, log=_muted)
        middle = clock.stamp()
        run.backward()
        end = clock.stamp()
    clock.settle()
    return clock.seconds(start, middle), clock.seconds(middle, end)


def _muted(method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Nothing is logged while measuring."""


def without_looking(steps: Sequence[StepTimes], added_s: tuple[float, float]) -> list[StepTimes]:
    """Steps without what looking adds, the same for every layer, as far as the layer took that long.

    Args:
        steps: Steps that were looked at.
        added_s: What that adds to a forward and to a backward, see `looking_s`.

    Example:
        >>> step = StepTimes((0.5, 0.0), (1.0, 3.0), 0.5, (0.0, 6.0), 0.0)
        >>> without_looking([step], (2.0, 2.0))
        [StepTimes(before=(0.0, 0.0), inside=(0.5, 2.0), tail=0.5, backward=(0.0, 4.0), backward_tail=0.0)]
    """
    forward_s, backward_s = added_s
    return [_reduced(step, forward_s, backward_s) for step in steps]


def looking_s(
    steps: Sequence[StepTimes], unobserved: Sequence[tuple[float, float]]
) -> tuple[float, float]:
    """What looking adds to a forward and to a backward; never less than nothing.

    Args:
        steps: Steps with whole backwards that were looked at.
        unobserved: Seconds of forward and backward of the same step as one stage.

    Example:
        >>> step = StepTimes((0.5,), (1.0,), 0.5, (6.0,), 0.0)
        >>> looking_s([step], [(1.5, 6.25)])
        (0.5, 0.0)
    """
    forward_s = statistics.median(sum((*s.before, *s.inside, s.tail)) for s in steps)
    backward_s = statistics.median(sum((*s.backward, s.backward_tail)) for s in steps)
    return (
        max(forward_s - statistics.median(forward for forward, _ in unobserved), 0.0),
        max(backward_s - statistics.median(backward for _, backward in unobserved), 0.0),
    )


def _reduced(step: StepTimes, forward_s: float, backward_s: float) -> StepTimes:
    each_s = forward_s / len(step.inside)
    reached = sum(1 for seconds in step.backward if seconds > 0)
    # Of a layer's forward the glue in front of it goes first: most of looking happens there.
    glue = [min(seconds, each_s) for seconds in step.before]
    return replace(
        step,
        before=tuple(s - off for s, off in zip(step.before, glue, strict=True)),
        inside=tuple(max(s - each_s + off, 0.0) for s, off in zip(step.inside, glue, strict=True)),
        backward=tuple(max(s - backward_s / max(reached, 1), 0.0) for s in step.backward),
    )
