"""What is measured: steps whose layers sleep, what they cost, and which of them are compared with each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from benchmarks.sleeping import Sleeper
from lightning_diffpipe.graph.probe import probe
from lightning_diffpipe.planning.cluster import Cluster, Link
from lightning_diffpipe.planning.profile import LayerProfile, ModelProfile, Seconds
from lightning_diffpipe.profiling.layer_costs import estimate_profile

NUM_LAYERS, NUM_FROZEN = 16, 4
SAMPLE_SHAPE = (64, 4)
SAMPLE_BYTES = 4 * 64 * 4


class SleepingStep(nn.Module):
    """Equal layers in one chain, after a frozen encoder if it takes time.

    Args:
        forward_s: Seconds a sample of a layer; the gradients of its inputs and weights take as long each.
        frozen_s: Seconds a sample of the encoder.
    """

    def __init__(self, forward_s: float, frozen_s: float = 0.0) -> None:
        super().__init__()
        layers = NUM_FROZEN if frozen_s else 0
        self.encoder = nn.Sequential(*[Sleeper(frozen_s / NUM_FROZEN, None) for _ in range(layers)])
        self.layers = nn.ModuleList(
            Sleeper(forward_s, forward_s, weight_s=forward_s) for _ in range(NUM_LAYERS)
        )

    def training_step(self, batch: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.encoder(batch)
        return self.denoise(x).square().mean()

    def denoise(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class TwoBackbones(SleepingStep):
    """Two chains of half as many layers, which know nothing of each other."""

    def training_step(self, batch: Tensor) -> Tensor:
        losses, half = [], NUM_LAYERS // 2
        for layers in (self.layers[:half], self.layers[half:]):
            x = batch
            for layer in layers:
                x = layer(x)
            losses.append(x.square().mean())
        return torch.stack(losses).sum()


class SelfConditioning(SleepingStep):
    """Calls all layers without gradients first, and trains on what they give."""

    def denoise(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            estimate = super().denoise(x)
        return super().denoise(x + estimate)


class LongChain(SleepingStep):
    """The same work in layers of their own for both passes, as if nobody knew that they are called twice.

    The backward of the first pass takes no time.
    """

    def __init__(self, forward_s: float, frozen_s: float = 0.0) -> None:
        super().__init__(forward_s, frozen_s)
        self.first = nn.ModuleList(Sleeper(forward_s, 0.0) for _ in range(NUM_LAYERS))

    def denoise(self, x: Tensor) -> Tensor:
        estimate = x
        for layer in self.first:
            estimate = layer(estimate)
        return super().denoise(x + estimate)


class UNet(SleepingStep):
    """Each layer of the second half reads what its counterpart in the first half gave."""

    def denoise(self, x: Tensor) -> Tensor:
        half, skips = NUM_LAYERS // 2, []
        for layer in self.layers[:half]:
            x = layer(x)
            skips.append(x)
        for layer in self.layers[half:]:
            x = layer(x + skips.pop())
        return x


def step(module: nn.Module, part: Tensor) -> Tensor:
    """Module and batch to loss."""
    return module.training_step(part)


@dataclass(frozen=True)
class Case:
    """One row.

    Attributes:
        name: Of the step.
        make: The module of it: a layer's and the encoder's seconds for a sample.
        schedule: Name of a schedule.
        num_stages: Stages of one pass over all backbones.
        num_microbatches: Of a batch.
        num_samples: Of a batch.
        x: Frozen work, as a share of the trained forward and backward.
        filled: Whether frozen work runs in bubbles; else before the pipeline, on all ranks.
        link_share: Seconds that one tensor of a microbatch takes over a link, as a share of a layer's forward.
    """

    name: str
    make: Callable[[float, float], nn.Module]
    schedule: str
    num_stages: int
    num_microbatches: int
    num_samples: int = 16
    x: float = 0.0
    filled: bool = False
    link_share: float = 0.0

    def module(self, num_ranks: int, work_s: float) -> nn.Module:
        """Of a size that gives every rank so many seconds of trained forward and backward in a batch."""
        sample_s = work_s * num_ranks / self.num_samples
        return self.make(sample_s / (3 * NUM_LAYERS), self.x * sample_s)

    def cluster(self, num_ranks: int, work_s: float) -> Cluster:
        """Links that are free, or which the sender holds while it sends."""
        if not self.link_share:
            return Cluster(num_ranks)
        forward_s = work_s * num_ranks / (3 * NUM_LAYERS)  # of a layer and a batch
        bytes_per_s = self.num_samples * SAMPLE_BYTES / (self.link_share * forward_s)
        return Cluster(num_ranks, p2p=Link(bytes_per_s, holds_sender=True))


def profile_of(module: nn.Module, batch: Tensor) -> ModelProfile:
    """What the layers sleep, in the profile of the probed step."""
    profile = estimate_profile(module, probe(module, step, batch[:2]))
    (backbone,) = profile.backbones
    per_sample, sleepers = Seconds.per_sample, dict(module.named_modules())

    def timed(layer: LayerProfile) -> LayerProfile:
        sleeper = sleepers[layer.name]
        weight_s = sleeper.weight_s * layer.gradient
        return replace(
            layer,
            forward_s=per_sample(sleeper.forward_s),
            backward_s=per_sample(sleeper.backward_s * layer.gradient + weight_s),
            weight_gradient_s=per_sample(weight_s),
        )

    encoders = tuple(
        replace(encoder, splittable=True, layers=tuple(
            replace(layer, forward_s=per_sample(sleepers[layer.name].forward_s))
            for layer in encoder.layers
        ))
        for encoder in profile.encoders
    )  # fmt: skip
    layers = tuple(map(timed, backbone.layers))
    return replace(profile, backbones=(replace(backbone, layers=layers),), encoders=encoders)


def every_schedule(num_ranks: int) -> list[list[Case]]:
    """All schedules, of one backbone and of two, with few microbatches and with twice as many."""
    few, many = num_ranks, 2 * num_ranks
    one = [
        *((name, num_ranks, m) for m in (few, many) for name in ("1f1b", "gpipe", "zero_bubble")),
        *((name, 2 * num_ranks, few) for name in ("interleaved", "v", "zero_bubble_v")),
        ("pipedream", num_ranks, 1),
        ("pipedream_vertical_sync", num_ranks, 1),
        ("pipedream_2bw", num_ranks, few),
    ]
    two = [("1f1b", num_ranks, few), ("bidirectional", 2 * num_ranks, few)]
    return [
        [Case("one backbone", SleepingStep, *choice) for choice in one],
        [Case("two backbones", TwoBackbones, *choice) for choice in two],
    ]


def steps_of_other_kinds(num_ranks: int) -> list[list[Case]]:
    """Self-conditioning, a U-Net over slow links, and zero-bubble schedules with frozen work in their bubbles."""
    samples = 16 * num_ranks  # so that frozen work can be shared out evenly
    names = {"one long chain": LongChain, "self-conditioning": SelfConditioning}
    groups = [
        [
            Case(name, make, "1f1b", num_ranks, num_ranks, samples, 0.43, filled)
            for filled in (False, True)
            for name, make in names.items()
        ],
        [
            Case("U-Net", UNet, name, stages, num_ranks, samples, link_share=0.25)
            for name, stages in (("1f1b", num_ranks), ("v", 2 * num_ranks))
        ],
    ]
    if num_ranks == 8:
        schedules = {"1f1b": 8, "zero_bubble": 8, "zero_bubble_v": 16}
        groups += [
            [
                Case("one backbone", SleepingStep, name, stages, 4, samples, x, filled=x > 0)
                for name, stages in schedules.items()
            ]
            for x in (0.0, 0.1, 0.38, 0.6, 0.9)
        ]
    return groups


PARTS = {"schedules": every_schedule, "steps": steps_of_other_kinds}
