"""Costs of schedules in tests, in ticks: a number for every stage, or one for each."""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_diffpipe.planning.instruction import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Encode,
    Forward,
    ForwardNoGrad,
)


@dataclass(frozen=True)
class TickCosts:
    """Answers as `PipelineCosts` does; links are timed by the stage that reads."""

    forward: float | Sequence[float] = 1
    backward: float | Sequence[float] = 2
    weight_gradient: float | Sequence[float] = 1
    no_grad: float | Sequence[float] = 1
    encode: float | Sequence[float] = 1
    activation: float | Sequence[float] = 0
    gradient: float | Sequence[float] = 0
    reduce: float = 0
    exchange: float = 0
    holds_sender: bool = False

    def _at(self, name, index):
        value = getattr(self, name)
        return float(value[index] if isinstance(value, Sequence) else value)

    def compute_s(self, instruction):
        match instruction:
            case Forward(stage):
                return self._at("forward", stage)
            case ForwardNoGrad(stage):
                return self._at("no_grad", stage)
            case Backward(stage):
                return self._at("backward", stage)
            case BackwardInput(stage):
                return self._at("backward", stage) - self._at("weight_gradient", stage)
            case BackwardWeight(stage):
                return self._at("weight_gradient", stage)
            case Encode(part):
                return self._at("encode", part)
        return 0.0

    def message_s(self, message):
        return self._at(message.kind, message.stage)

    def reduce_s(self, rank):
        return float(self.reduce)

    def exchange_s(self):
        return float(self.exchange)
