"""Costs for pictures and tests: small numbers instead of a profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_diffpipe.planning.instruction import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Encode,
    Forward,
    ForwardNoGrad,
    UpdateWeights,
)
from lightning_diffpipe.planning.schedule import Message

PerStage = float | Sequence[float]


@dataclass(frozen=True, slots=True)
class TickCosts:
    """Costs for pictures and tests: the same for every microbatch. A number, or one for each stage.

    Attributes:
        forward: Forward of one microbatch.
        backward: Whole backward; in two parts it takes as long.
        weight_gradient: The part of `backward` that is `BackwardWeight`.
        no_grad: Forward without gradients.
        encode: One part of the frozen work, or one number for each part.
        activation: Time on the link of an activation, by the stage that reads it.
        gradient: Time on the link of a gradient, by the stage that reads it.
        feedback: Time on the link from the last stage back to the first.
        reduce: Gradient reduction at the end.
        exchange: Exchange of frozen results.
        holds_sender: See `Costs`.
    """

    forward: PerStage = 1
    backward: PerStage = 2
    weight_gradient: PerStage = 1
    no_grad: PerStage = 1
    encode: PerStage = 1
    activation: PerStage = 0
    gradient: PerStage = 0
    feedback: float = 0
    reduce: float = 0
    exchange: float = 0
    holds_sender: bool = False

    def compute_s(self, instruction: Compute) -> float:
        """See `Costs`."""
        match instruction:
            case Forward(stage, _):
                return _at(self.forward, stage)
            case ForwardNoGrad(stage, _):
                return _at(self.no_grad, stage)
            case Backward(stage, _):
                return _at(self.backward, stage)
            case BackwardInput(stage, _):
                return _at(self.backward, stage) - _at(self.weight_gradient, stage)
            case BackwardWeight(stage, _):
                return _at(self.weight_gradient, stage)
            case UpdateWeights():
                return 0.0
            case Encode(part):
                return _at(self.encode, part)

    def message_s(self, message: Message) -> float:
        """See `Costs`."""
        match message.kind:
            case "activation" | "no_grad_activation":
                return _at(self.activation, message.stage)
            case "gradient":
                return _at(self.gradient, message.stage)
            case "feedback":
                return float(self.feedback)

    def reduce_s(self, rank: int) -> float:
        """See `Costs`."""
        return float(self.reduce)

    def exchange_s(self) -> float:
        """See `Costs`."""
        return float(self.exchange)


def _at(value: PerStage, index: int) -> float:
    return float(value[index] if isinstance(value, Sequence) else value)
