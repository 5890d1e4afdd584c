"""Gradients of a schedule, out of reach of whoever zeroes gradients before they are used.

Lightning zeroes them after `training_step`, in which the schedule makes them, and before `backward`, which
then has nothing left to compute. Left in place they would train nothing, without any error.

    forget      at the first batch of an accumulation window
    set_aside   behind the schedule: parameters have no gradients
    put_back    where others would run backward
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn


class GradientsAside:
    """Holds the gradients of one rank between the schedule and the optimizer.

    Args:
        parameters: The parameters of this rank that get gradients.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = tuple(parameters)
        self._gradients: tuple[Tensor | None, ...] | None = None

    def forget(self) -> None:
        """Drops gradients of steps before; the schedule adds to what it finds."""
        for parameter in self._parameters:
            parameter.grad = None

    def set_aside(self) -> None:
        """Takes the gradients away from their parameters, without a copy."""
        self._gradients = tuple(parameter.grad for parameter in self._parameters)
        self.forget()

    def put_back(self) -> None:
        """Gives the parameters what was set aside, if anything was."""
        if self._gradients is None:
            return
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        self._gradients = None
