"""What a run of layers costs on a cluster: seconds, bytes on links, bytes in memory.

A `CostModel` answers for any run of layers, fast, since the partitioner asks many thousand times.
`PipelineCosts` answers for one pipeline, instruction by instruction, which is what the simulator
asks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

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
    _times: dict[tuple[int, float], _Sums] = field(default_factory=dict, repr=False, compare=False)
    _encode_s: dict[tuple[float, int | None], float] = field(
        default_factory=dict, repr=False, compare=False
    )
    _parts: dict[tuple[tuple[int, ...], int, int | None], tuple[EncodePart, ...]] = field(
        default_factory=dict, repr=False, compare=False
    )
    _group_sizes: dict[tuple[tuple[int, ...], int], int] = field(
        default_factory=dict, repr=False, compare=False
    )
    _bytes: dict[tuple[int, str], tuple[int, ...]] = field(
        default_factory=dict, repr=False, compare=False
    )
    _works: dict[tuple[int, tuple[int, ...]], tuple[float, ...]] = field(
        default_factory=dict, repr=False, compare=False
    )
    _needs: dict[tuple[int, float, int], tuple[float, ...]] = field(
        default_factory=dict, repr=False, compare=False
    )
    _read_bytes: dict[LayerRun, int] = field(default_factory=dict, repr=False, compare=False)
    _frozen: dict[str, int] = field(default_factory=dict, repr=False, compare=False)

    def num_layers(self, backbone: int = 0) -> int:
        """Layers of a backbone."""
        return len(self.profile.backbones[backbone].layers)

    @property
    def starts(self) -> tuple[int, ...]:
        """Where chains begin whose stages run apart, in opposite directions; `(0,)` if there is one."""
        return tuple([first for _, first in self.profile.backbones[0].chains]) or (0,)

    def sums(self, backbone: int, samples: float) -> _Sums:
        """Running sums of the times of all layers, for that many samples."""
        key = (backbone, samples)
        if key not in self._times:
            layers = self.profile.backbones[backbone].layers
            self._times[key] = _Sums(
                _running(layer.forward_s.at(samples) for layer in layers),
                _running(layer.backward_s.at(samples) for layer in layers),
                _running(_weight_gradient_s(layer, samples) for layer in layers),
            )
        return self._times[key]

    def work_s(self, backbone: int, sizes: tuple[int, ...]) -> tuple[float, ...]:
        """Running sums of forwards and backwards of all layers, for microbatches of these sizes together."""
        key = (backbone, sizes)
        if key not in self._works:
            total = [0.0] * (self.num_layers(backbone) + 1)
            for size, count in Counter(sizes).items():
                sums = self.sums(backbone, size)
                for i, (f, b) in enumerate(zip(sums.forward, sums.backward, strict=True)):
                    total[i] += count * (f + b)
            self._works[key] = tuple(total)
        return self._works[key]

    def need_bytes(self, backbone: int, samples: float, microbatches: int) -> tuple[float, ...]:
        """Running sums of what all layers keep, with activations of that many samples."""
        key = (backbone, samples, microbatches)
        if key not in self._needs:
            runs = [LayerRun(backbone, 0, stop) for stop in range(self.num_layers(backbone) + 1)]
            self._needs[key] = tuple(
                self.resident_bytes(run) + self.activation_bytes(run, samples, microbatches)
                for run in runs
            )
        return self._needs[key]

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
        return self._sum_bytes(run, "parameter_bytes", lambda layer: layer.parameter_bytes)

    def gradient_bytes(self, run: LayerRun) -> int:
        """Bytes of the gradients, as they are summed over replicas."""
        sums = self.gradient_sums(run.backbone)
        return sums[run.stop] - sums[run.first]

    def gradient_sums(self, backbone: int) -> tuple[int, ...]:
        """Running sums of the bytes of gradients of all layers."""
        return self._byte_sums(backbone, "gradient_bytes", lambda layer: layer.gradient_bytes)

    def activation_bytes(self, run: LayerRun, samples: float, microbatches: int = 1) -> float:
        """Bytes kept between forward and backward of so many samples, in so many microbatches."""
        key = "activation_bytes_per_sample"
        kept = samples * self._sum_bytes(run, key, lambda layer: layer.activation_bytes_per_sample)
        key = "activation_bytes_per_microbatch"
        fixed = self._sum_bytes(run, key, lambda layer: layer.activation_bytes_per_microbatch)
        return kept + microbatches * fixed

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
    def frozen_bytes(self) -> int:
        """Bytes of all frozen encoders; every rank holds them all, since any may encode."""
        layers = (layer for encoder in self.profile.encoders for layer in encoder.layers)
        return self._once("frozen", lambda: sum(layer.parameter_bytes for layer in layers))

    @property
    def encoding_bytes_per_sample(self) -> int:
        """Bytes that the encoders hand to the backbone."""
        encoders = self.profile.encoders
        return self._once("encoding", lambda: sum(e.result_bytes_per_sample for e in encoders))

    @property
    def working_bytes_per_sample(self) -> int:
        """Bytes of a frozen layer's input and output, where they are largest."""
        rows = ([0, *(x.output_bytes_per_sample for x in e.layers)] for e in self.profile.encoders)
        return self._once(
            "working", lambda: max((a + b for row in rows for a, b in pairwise(row)), default=0)
        )

    def read_bytes_per_sample(self, run: LayerRun) -> int:
        """Bytes of the encodings that a stage of these layers reads."""
        if run not in self._read_bytes:
            self._read_bytes[run] = sum(
                encoder.result_bytes_per_sample
                if not encoder.results
                else sum(
                    result.bytes_per_sample
                    for result in encoder.results
                    if any(run.first <= reader < run.stop for reader in result.readers)
                )
                for encoder in self.profile.encoders
            )
        return self._read_bytes[run]

    def group_size(self, sizes: tuple[int, ...], num_ranks: int) -> int:
        """Samples on which frozen layers run at a time: the cheapest, where the profile tells."""
        key = sizes, num_ranks
        if key not in self._group_sizes:
            layers = [layer for encoder in self.profile.encoders for layer in encoder.layers]
            measured = any(len(layer.forward_s.points) > 1 for layer in layers)
            self._group_sizes[key] = (
                cheapest_group_size(self.encode_s, sizes, num_ranks)
                if measured
                else group_size_of(sizes, num_ranks)
            )
        return self._group_sizes[key]

    def encode_parts(
        self, sizes: tuple[int, ...], num_ranks: int, group_size: int | None
    ) -> tuple[EncodePart, ...]:
        """Even shares of the frozen work; None as `group_size` if it cannot be split."""
        key = sizes, num_ranks, group_size
        if key not in self._parts:
            splittable = group_size is not None
            self._parts[key] = encode_parts(sizes, num_ranks, splittable, group_size or 1)
        return self._parts[key]

    def encode_s(self, samples: float, group_size: int | None = None) -> float:
        """All frozen encoders for that many samples, on one rank, a group at a time."""
        key = samples, group_size
        if key not in self._encode_s:
            layers = (layer for encoder in self.profile.encoders for layer in encoder.layers)
            self._encode_s[key] = sum(
                grouped_s(layer.forward_s.at, samples, group_size) for layer in layers
            )
        return self._encode_s[key]

    def resident_bytes(self, run: LayerRun) -> float:
        """Weights, gradients and optimizer state of a stage."""
        trained = self.gradient_bytes(run)
        return self.parameter_bytes(run) + trained * (1 + self.optimizer_bytes_factor)

    def _once(self, key: str, of: Callable[[], int]) -> int:
        """Bytes that do not change, counted once."""
        if key not in self._frozen:
            self._frozen[key] = of()
        return self._frozen[key]

    def _sum_bytes(self, run: LayerRun, key: str, of: Callable[[LayerProfile], int]) -> int:
        sums = self._byte_sums(run.backbone, key, of)
        return sums[run.stop] - sums[run.first]

    def _byte_sums(
        self, backbone: int, key: str, of: Callable[[LayerProfile], int]
    ) -> tuple[int, ...]:
        cached = self._bytes.get((backbone, key))
        if cached is None:
            layers = self.profile.backbones[backbone].layers
            cached = tuple(accumulate((of(layer) for layer in layers), initial=0))
            self._bytes[backbone, key] = cached
        return cached


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
