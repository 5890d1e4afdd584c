"""A model that takes its time: layers that sleep for as long as a profile says, forward and backward.

Sleeping ranks do not compete for cores, so that eight of them can be emulated on two.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_diffpipe.planning.profile import (
    BackboneProfile,
    EncoderLayerProfile,
    EncoderProfile,
    LayerProfile,
    ModelProfile,
    Seconds,
)


@dataclass(frozen=True)
class Sleeping:
    """One row: a made-up model on emulated ranks."""

    name: str
    num_ranks: int
    num_stages: int
    num_microbatches: int
    schedule: str = "1f1b"
    batch_size: int = 16
    num_layers: int = 16
    seed: int = 0


SLEEPING = (
    Sleeping("sleeping layers", 4, 4, 4),
    Sleeping("sleeping layers, GPipe", 4, 4, 8, "gpipe"),
    Sleeping("sleeping layers", 8, 8, 8),
    Sleeping("sleeping layers, interleaved", 4, 8, 8, "interleaved"),
)


class Nap(torch.autograd.Function):
    """Sleeps in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:  # type: ignore[override]
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return gradient, None


class Sleeper(nn.Module):
    """A layer with a weight and a profile."""

    def __init__(self, forward_s: Seconds, backward_s: Seconds | None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4), requires_grad=backward_s is not None)
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.forward_s.at(len(x)))
        y = x * self.scale
        return y if self.backward_s is None else Nap.apply(y, self.backward_s.at(len(x)))


class SleepingModel(nn.Module):
    """A frozen encoder and a chain of trained layers."""

    def __init__(self, profile: ModelProfile) -> None:
        super().__init__()
        self.encoder = Sleeper(profile.encoders[0].layers[0].forward_s, None)
        self.layers = nn.ModuleList(
            Sleeper(layer.forward_s, layer.backward_s) for layer in profile.backbones[0].layers
        )

    def training_step(self, batch: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.encoder(batch)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def sleeper_of(case: Sleeping) -> tuple[ModelProfile, SleepingModel]:
    """A random profile with layers of 2 to 8 ms a sample, and a model that takes these times."""
    choice = random.Random(case.seed)
    layers = []
    for index in range(case.num_layers):
        forward = choice.uniform(0.002, 0.008)
        layers.append(
            LayerProfile(
                f"layers.{index}",
                Seconds.per_sample(forward),
                Seconds.per_sample(choice.uniform(1.5, 2.5) * forward),
            )
        )
    encoder = EncoderProfile(
        "frozen encoder", (EncoderLayerProfile("encoder", Seconds.per_sample(0.02)),)
    )
    profile = ModelProfile("sleeping", (BackboneProfile("backbone", tuple(layers)),), (encoder,))
    return profile, SleepingModel(profile)
