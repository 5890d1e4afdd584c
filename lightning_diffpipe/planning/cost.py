"""What a run of layers costs on a cluster: seconds, bytes on links, bytes in memory.

A `CostModel` answers for any run of layers, fast, since the partitioner asks many thousand times.
`PipelineCosts` answers for one pipeline, instruction by instruction, which is what the simulator
asks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from itertools import accumulate, pairwise
from typing import Any, Concatenate, ParamSpec, TypeVar

from lightning_diffpipe.planning.cluster import Cluster
from lightning_diffpipe.planning.filling import (
    EncodePart,
    cheapest_group_size,
    encode_parts,
    group_size_of,
    grouped_s,
)
from lightning_diffpipe.planning.profile import LayerProfile, ModelProfile
from lightning_diffpipe.planning.routing import route
from lightning_diffpipe.planning.schedule import Placement


@dataclass(frozen=True, slots=True)
class LayerRun:
    """Layers `first` (inclusive) to `stop` (exclusive) of a backbone."""

    backbone: int
    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class _Sums:
    """Running sums over the layers of a backbone: entry `i` is the sum of the first `i` layers."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight_gradient: tuple[float, ...]


_P = ParamSpec("_P")
_R = TypeVar("_R")


def _remembered(
    method: Callable[Concatenate[CostModel, _P], _R],
) -> Callable[Concatenate[CostModel, _P], _R]:
    """A method that is computed once for the same arguments; the partitioner asks many thousand times."""

    @wraps(method)
    def wrapped(model: CostModel, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        key = (method, args, *kwargs.items())
        if key not in model._memo:
            model._memo[key] = method(model, *args, **kwargs)
        return model._memo[key]  # type: ignore[no-any-return]

    return wrapped


@dataclass(frozen=True, slots=True)
class CostModel:
    """A profile on a cluster.

    Attributes:
        profile: What layers cost.
        cluster: What links cost, and how much memory there is.
        optimizer_bytes_factor: Bytes of optimizer state for each byte of gradient; 2 for Adam.
        is_folded: Layers stand for all calls of theirs in several passes.
    """

    profile: ModelProfile
    cluster: Cluster
    optimizer_bytes_factor: float = 2.0
    is_folded: bool = False
    _memo: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    def num_layers(self, backbone: int = 0) -> int:
        """Layers of a backbone."""
        return len(self.profile.backbones[backbone].layers)

    @property
    def starts(self) -> tuple[int, ...]:
        """Where chains begin whose stages run apart, in opposite directions; `(0,)` if there is one."""
        return tuple([first for _, first in self.profile.backbones[0].chains]) or (0,)

    @_remembered
    def sums(self, backbone: int, samples: float) -> _Sums:
        """Running sums of the times of all layers, for that many samples."""
        layers = self.profile.backbones[backbone].layers
        return _Sums(
            _running(layer.forward_s.at(samples) for layer in layers),
            _running(layer.backward_s.at(samples) for layer in layers),
            _running(_weight_gradient_s(layer, samples) for layer in layers),
        )

    @_remembered
    def work_s(self, backbone: int, sizes: tuple[int, ...]) -> tuple[float, ...]:
        """Running sums of forwards and backwards of all layers, for microbatches of these sizes together."""
        total = [0.0] * (self.num_layers(backbone) + 1)
        for size, count in Counter(sizes).items():
            sums = self.sums(backbone, size)
            for i, (f, b) in enumerate(zip(sums.forward, sums.backward, strict=True)):
                total[i] += count * (f + b)
        return tuple(total)

    @_remembered
    def need_bytes(self, backbone: int, samples: float, microbatches: int) -> tuple[float, ...]:
        """Running sums of what all layers keep, with activations of that many samples."""
        runs = [LayerRun(backbone, 0, stop) for stop in range(self.num_layers(backbone) + 1)]
        return tuple(
            self.resident_bytes(run) + self.activation_bytes(run, samples, microbatches)
            for run in runs
        )

    def forward_s(self, run: LayerRun, samples: float) -> float:
        """Forward of a microbatch of that many samples."""
        sums = self.sums(run.backbone, samples).forward
        repeated = self.profile.backbones[run.backbone].repeated_s
        again_s = repeated.at(samples) if repeated is not None and run.first else 0.0
        return again_s + sums[run.stop] - sums[run.first]

    def backward_s(self, run: LayerRun, samples: float) -> float:
        """Whole backward of a microbatch."""
        sums = self.sums(run.backbone, samples).backward
        return sums[run.stop] - sums[run.first]

    def weight_gradient_s(self, run: LayerRun, samples: float) -> float:
        """The part of the backward that only makes weight gradients."""
        sums = self.sums(run.backbone, samples).weight_gradient
        return sums[run.stop] - sums[run.first]

    def split_s(self, run: LayerRun, samples: float) -> float:
        """What two halves of the backward take longer than the whole."""
        backbone = self.profile.backbones[run.backbone]
        whole_s = self.sums(run.backbone, samples).backward[-1]
        if backbone.split_s is None or not whole_s:
            return 0.0
        return backbone.split_s.at(samples) * self.backward_s(run, samples) / whole_s

    def parameter_bytes(self, run: LayerRun) -> int:
        """Bytes of the parameters."""
        return self._sum_bytes(run, "parameter_bytes")

    def gradient_bytes(self, run: LayerRun) -> int:
        """Bytes of the gradients, as they are summed over replicas."""
        sums = self.gradient_sums(run.backbone)
        return sums[run.stop] - sums[run.first]

    def gradient_sums(self, backbone: int) -> tuple[int, ...]:
        """Running sums of the bytes of gradients of all layers."""
        return self._byte_sums(backbone, "gradient_bytes")

    def activation_bytes(self, run: LayerRun, samples: float, microbatches: int = 1) -> float:
        """Bytes kept between forward and backward of so many samples, in so many microbatches."""
        of_samples = samples * self._sum_bytes(run, "activation_bytes_per_sample")
        return of_samples + microbatches * self._sum_bytes(run, "activation_bytes_per_microbatch")

    def boundary_bytes(self, run: LayerRun, samples: float) -> float:
        """Bytes of all tensors that are alive across the cut after the run."""
        layers = self.profile.backbones[run.backbone].layers
        last = run.stop == len(layers)
        return 0.0 if last else samples * layers[run.stop - 1].boundary_bytes_per_sample

    def crossing_bytes(self, runs: Sequence[LayerRun], placement: Placement) -> tuple[int, ...]:
        """Bytes of a sample after every stage that have to travel: without what later ranks have already."""
        crossing = [round(self.boundary_bytes(run, 1)) for run in runs]
        if placement.num_stages == placement.num_ranks:
            return tuple(crossing)
        stops = [run.stop for run in runs]
        for skip in self.profile.backbones[0].skips:
            maker, *readers = (
                min(bisect_right(stops, at), len(runs) - 1) for at in (skip.made, *skip.readers)
            )
            later = tuple(sorted({stage for stage in readers if stage > maker}))
            if later:
                way = route(maker, later, placement.stage_ranks)
                for stage in range(maker, later[-1]):
                    if stage + 1 not in way.sent_to:
                        crossing[stage] -= skip.bytes_per_sample
        return tuple(max(num_bytes, 0) for num_bytes in crossing)

    def nested_bytes(self, first: int, stop: int) -> float:
        """Bytes of a sample that cross two cuts if the layers before `first` and from `stop` on share a rank."""
        layers, num_bytes = self.profile.backbones[0].layers, 0.0
        for cut in (first, stop):
            num_bytes += layers[cut - 1].boundary_bytes_per_sample
        for skip in self.profile.backbones[0].skips:
            inside = any(first <= reader < stop for reader in skip.readers)
            if skip.made < first and skip.readers[-1] >= stop:
                num_bytes -= (1 if inside else 2) * skip.bytes_per_sample
        return num_bytes

    @property
    @_remembered
    def frozen_bytes(self) -> int:
        """Bytes of all frozen encoders; every rank holds them all, since any may encode."""
        return sum(layer.parameter_bytes for e in self.profile.encoders for layer in e.layers)

    @property
    @_remembered
    def encoding_bytes_per_sample(self) -> int:
        """Bytes that the encoders hand to the backbone."""
        return sum(encoder.result_bytes_per_sample for encoder in self.profile.encoders)

    @property
    @_remembered
    def working_bytes_per_sample(self) -> int:
        """Bytes of a frozen layer's input and output, where they are largest."""
        rows = ([0, *(x.output_bytes_per_sample for x in e.layers)] for e in self.profile.encoders)
        return max((a + b for row in rows for a, b in pairwise(row)), default=0)

    @_remembered
    def read_bytes_per_sample(self, run: LayerRun) -> int:
        """Bytes of the encodings that a stage of these layers reads."""
        return sum(
            encoder.result_bytes_per_sample
            if not encoder.results
            else sum(
                result.bytes_per_sample
                for result in encoder.results
                if any(run.first <= reader < run.stop for reader in result.readers)
            )
            for encoder in self.profile.encoders
        )

    @_remembered
    def group_size(self, sizes: tuple[int, ...], num_ranks: int) -> int:
        """Samples on which frozen layers run at a time: the cheapest, where the profile tells."""
        layers = [layer for encoder in self.profile.encoders for layer in encoder.layers]
        if any(len(layer.forward_s.points) > 1 for layer in layers):  # measured
            return cheapest_group_size(self.encode_s, sizes, num_ranks)
        return group_size_of(sizes, num_ranks)

    @_remembered
    def encode_parts(
        self, sizes: tuple[int, ...], num_ranks: int, group_size: int | None
    ) -> tuple[EncodePart, ...]:
        """Even shares of the frozen work; None as `group_size` if it cannot be split."""
        return encode_parts(sizes, num_ranks, group_size is not None, group_size or 1)

    @_remembered
    def encode_s(self, samples: float, group_size: int | None = None) -> float:
        """All frozen encoders for that many samples, on one rank, a group at a time."""
        layers = (layer for encoder in self.profile.encoders for layer in encoder.layers)
        return sum(grouped_s(layer.forward_s.at, samples, group_size) for layer in layers)

    def resident_bytes(self, run: LayerRun) -> float:
        """Weights, gradients and optimizer state of a stage."""
        trained = self.gradient_bytes(run)
        return self.parameter_bytes(run) + trained * (1 + self.optimizer_bytes_factor)

    def _sum_bytes(self, run: LayerRun, name: str) -> int:
        sums = self._byte_sums(run.backbone, name)
        return sums[run.stop] - sums[run.first]

    @_remembered
    def _byte_sums(self, backbone: int, name: str) -> tuple[int, ...]:
        layers = self.profile.backbones[backbone].layers
        return tuple(accumulate((getattr(layer, name) for layer in layers), initial=0))


def _running(times: Iterable[float]) -> tuple[float, ...]:
    return tuple(accumulate(times, initial=0.0))


def _weight_gradient_s(layer: LayerProfile, samples: float) -> float:
    """Half of the backward where it was not measured: two products of the same size.

    Beyond the counts that were measured the two lines may cross: a part is never longer than the whole.
    """
    whole_s = layer.backward_s.at(samples)
    if layer.weight_gradient_s is not None:
        return min(layer.weight_gradient_s.at(samples), whole_s)
    return whole_s / 2 if layer.gradient_bytes else 0.0
