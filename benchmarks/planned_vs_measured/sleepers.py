"""Models that take their time: a frozen encoder and a chain of layers that sleep, forward and backward.

Sleeping ranks do not compete for cores, so that eight of them can be emulated on two.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn

from benchmarks.planned_vs_measured.models import Case
from benchmarks.sleeping import Sleeper

NUM_LAYERS, ENCODER_S = 16, 0.02


class SleepingModel(nn.Module):
    """Layers of 2 to 8 ms a sample, no two of them alike."""

    def __init__(self) -> None:
        super().__init__()
        choice = random.Random(0)
        self.encoder = Sleeper(ENCODER_S, None)
        self.layers = nn.ModuleList()
        for index in range(NUM_LAYERS):
            forward_s = choice.uniform(0.002, 0.008)
            self.layers.append(Sleeper(forward_s, choice.uniform(1.5, 2.5) * forward_s, index + 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with torch.no_grad():
            x = self.encoder(batch)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def zeros(size: int) -> Tensor:
    """A batch: only its size counts."""
    return torch.zeros(size, 4)


def sleeping(name: str, num_ranks: int, stages: int, microbatches: int, schedule: str) -> Case:
    """A row of emulated ranks; once from the start, as nothing competes with it for cores."""
    return Case(
        name, SleepingModel, 16, stages, microbatches, schedule, num_ranks, batch=zeros, turns=1
    )


SLEEPING = (
    sleeping("sleeping layers", 4, 4, 4, "1f1b"),
    sleeping("sleeping layers, GPipe", 4, 4, 8, "gpipe"),
    sleeping("sleeping layers", 8, 8, 8, "1f1b"),
    sleeping("sleeping layers, interleaved", 4, 8, 8, "interleaved"),
)
