"""A profile: what every layer of a model costs, as measured or modelled elsewhere.

Format `diffpipe-profile/1`, JSON. Times are in seconds for a number of samples, and are linear
between and beyond the measured counts (but do not fall beyond the largest); sizes are in bytes:

    {"format": "diffpipe-profile/1", "name": "sd21",
     "backbones": [{"name": "unet", "layers": [
        {"name": "down_blocks.0.resnets.0",
         "forward_s": {"1": 0.002, "4": 0.007}, "backward_s": {"1": 0.004, "4": 0.015},
         "weight_gradient_s": {"1": 0.002, "4": 0.007},
         "parameter_bytes": 1, "gradient_bytes": 1,
         "boundary_bytes_per_sample": 1, "activation_bytes_per_sample": 1}]}],
     "encoders": [{"name": "vae", "needs": [], "layers": [
        {"name": "...", "forward_s": {"1": 0.001}, "parameter_bytes": 1,
         "output_bytes_per_sample": 1}]}]}

Optional fields have a default in `LayerProfile`, `BackboneProfile`, `SequenceShares` and `EncoderProfile`:
`"repeated_s": {"1": 0.001}` of a backbone; `"results": [{"bytes_per_sample": 1, "readers": [0, 7]}]` of an encoder;
`"passes": [[0, 6], [6, 12]], "seen": {"forms": [[0.5, 0], [0.5, 6]], "shared": false}` of a backbone whose six
layers are called twice, for half of the microbatches (self-conditioning).
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise, takewhile

from lightning_diffpipe.errors import ProfileError
from lightning_diffpipe.planning.codec import Node, read_fields, stored, write

FORMAT = "diffpipe-profile/1"


@dataclass(frozen=True, slots=True)
class Seconds:
    """A time that depends on the number of samples: points `(samples, seconds)`, linear between and beyond.

    They ascend in samples. One point alone means proportional.

    Example:
        >>> Seconds(((1, 0.002), (4, 0.008))).at(2)
        0.004
    """

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        counts = [samples for samples, _ in self.points]
        if not counts or counts != sorted(set(counts)) or counts[0] < 1:
            raise ProfileError(f"times need ascending sample counts >= 1; got {self.points}")
        if any(not 0 <= seconds < float("inf") for _, seconds in self.points):
            raise ProfileError(f"times must be finite and >= 0; got {self.points}")

    @classmethod
    def of(cls, times: Mapping[int, float]) -> Seconds:
        """Makes times of a mapping of samples to seconds."""
        return cls(tuple(sorted(times.items())))

    @classmethod
    def per_sample(cls, seconds: float) -> Seconds:
        """Makes times that are proportional to the number of samples."""
        return cls(((1, seconds),))

    @classmethod
    def sum(cls, times: Sequence[Seconds]) -> Seconds:
        """Returns the times of all of them one after the other."""
        counts = {samples for seconds in times for samples, _ in seconds.points}
        return cls.of({n: sum(seconds.at(n) for seconds in times) for n in counts})

    def at(self, samples: float) -> float:
        """Returns seconds for that many samples.

        Beyond the last count never less than there; below the first never less than a sample's share of it.
        """
        if samples <= 0:
            return 0.0
        if len(self.points) == 1:
            measured, seconds = self.points[0]
            return seconds * samples / measured
        index = bisect_left(self.points, samples, key=lambda point: point[0])
        index = min(max(index, 1), len(self.points) - 1)
        (n0, t0), (n1, t1) = self.points[index - 1 : index + 1]
        if samples > n1 and t1 < t0:
            return t1  # fell by noise: far beyond, more samples would be free
        line_s = t0 + (t1 - t0) * (samples - n0) / (n1 - n0)
        return max(line_s, t0 * samples / n0) if samples < n0 else line_s

    def scaled(self, factor: float) -> Seconds:
        """Returns the same, that many times as long."""
        return Seconds(tuple((samples, factor * seconds) for samples, seconds in self.points))

    def plus(self, seconds: float) -> Seconds:
        """Returns times that are longer by some seconds, whatever the number of samples."""
        counts = {count for count, _ in self.points}
        return Seconds.of({n: self.at(n) + seconds for n in {*counts, 2 * max(counts)}})

    def to_plain(self) -> dict[str, float]:
        """Writes the JSON form."""
        return {str(samples): seconds for samples, seconds in self.points}

    @classmethod
    def from_node(cls, node: Node) -> Seconds:
        """Reads the JSON form."""
        times: dict[int, float] = {}
        for key, value in node.members():
            # Not "01" either, which would be the same number again; more digits are no sample count.
            if not key.isdecimal() or len(key) > 18 or str(int(key)) != key or key == "0":
                raise node.expected(f'numbers of samples such as "4" as keys, not {key!r}')
            times[int(key)] = value.number()
        if not times:
            raise node.expected("at least one measured number of samples")
        return cls.of(times)


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """A layer of a backbone.

    Attributes:
        name: Dotted name of the module, or several joined by `+`.
        weight_gradient_s: The part of the backward that only makes weight gradients; None if not measured.
        gradient_bytes: Bytes of its gradients: 0 for a frozen layer within the gradient path.
        boundary_bytes_per_sample: Bytes of every tensor that is alive across a cut after it.
        activation_bytes_per_sample: Bytes kept for the backward.
        flops_per_sample: Operations of its forward: those of matrix products, convolutions and attention,
            and one for each element that anything else writes; 0 if unknown.
        activation_bytes_per_microbatch: Bytes kept for the backward besides, once for each microbatch
            however large it is: under autocast every microbatch has casts of the weights of its own.
        gradient: Whether a gradient comes back to this call, or passes it.
        input_bytes_per_sample: Bytes of the inputs that no earlier layer reads: what stays of the activations where
            the backward computes them again. None where it may not, or that is unknown.
        streamable_bytes: Bytes of those of its parameters that are frozen, and that nothing else reads.
        largest_gradient_bytes: Bytes of the largest of its gradients; 0 if unknown.
        uncheckpointed: The layer as it is without activation checkpointing, where the backward recomputes its
            activations; see `memory.py`.
        streamed_bytes: Bytes of its parameters that are copied from host memory for each run, and do not count as
            `parameter_bytes`; see `memory.py`.
    """

    name: str
    forward_s: Seconds
    backward_s: Seconds
    weight_gradient_s: Seconds | None = None
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    boundary_bytes_per_sample: int = 0
    activation_bytes_per_sample: int = 0
    flops_per_sample: int = 0
    activation_bytes_per_microbatch: int = 0
    gradient: bool = True
    input_bytes_per_sample: int | None = None
    streamable_bytes: int = 0
    largest_gradient_bytes: int = 0
    uncheckpointed: LayerProfile | None = field(default=None, metadata={"never": True})
    streamed_bytes: int = stored(0, never=True)

    @classmethod
    def from_node(cls, node: Node) -> LayerProfile:
        """Reads the JSON form; a part of the backward is no longer than the whole."""
        layer = read_fields(cls, node)
        whole_s = dict(layer.backward_s.points)
        for samples, seconds in layer.weight_gradient_s.points if layer.weight_gradient_s else ():
            if seconds > whole_s.get(samples, seconds):
                what = f"at most the backward_s of {samples} samples, {whole_s[samples]:g}, of which it is a part"
                raise node["weight_gradient_s"][str(samples)].expected(what)
        return layer

    def weight_gradient_at(self, samples: float) -> float:
        """Returns seconds of the weight gradient: half of the backward, of two equal products, where not measured.

        Beyond the counts that were measured the two lines may cross: a part is never longer than the whole.
        """
        whole_s = self.backward_s.at(samples)
        if self.weight_gradient_s is not None:
            return min(self.weight_gradient_s.at(samples), whole_s)
        return whole_s / 2 if self.gradient_bytes else 0.0

    def scaled(self, share: float) -> LayerProfile:
        """Returns the layer with a share of its times."""
        weight = self.weight_gradient_s
        return replace(
            self,
            forward_s=self.forward_s.scaled(share),
            backward_s=self.backward_s.scaled(share),
            weight_gradient_s=None if weight is None else weight.scaled(share),
        )


ADDED_UP = (
    "parameter_bytes", "gradient_bytes", "activation_bytes_per_sample", "activation_bytes_per_microbatch",
    "flops_per_sample", "streamable_bytes",
)  # fmt: skip
"""Numbers of layers that add up to those of a run of layers, and are shared by the parts of a layer."""


@dataclass(frozen=True, slots=True)
class Skip:
    """A tensor that is read far after where it is made, as in a U-Net.

    Attributes:
        bytes_per_sample: Bytes of it; `boundary_bytes_per_sample` of the layers in between count it, too.
        made: Position of the layer that makes it.
        readers: Positions of the layers that read it, ascending; the number of layers stands for the loss.
    """

    bytes_per_sample: int
    made: int
    readers: tuple[int, ...]

    def moved(self, to: Callable[[int], int]) -> Skip:
        """Returns the same with other positions."""
        return Skip(self.bytes_per_sample, to(self.made), tuple(map(to, self.readers)))


@dataclass(frozen=True, slots=True)
class SequenceShares:
    """Frequencies of the call sequences of a step, counted in trials.

    Attributes:
        sequences: `(share, first call)`: a sequence calls the layers from this one on, the first one all of them.
        shared: All microbatches of a batch have the same; else each throws its own coin.
    """

    sequences: tuple[tuple[float, int], ...] = stored(((1.0, 0),), key="forms")
    shared: bool = True


@dataclass(frozen=True, slots=True)
class BackboneProfile:
    """A trainable denoiser: its layers in order.

    Attributes:
        repeated_s: Seconds that every stage but the first spends again on each microbatch, before its own
            layers: code at the top of the step that belongs to no layer (tokenizing, sampling noise).
            The first layer's `forward_s` has it once. None if unknown.
        split_s: Time by which the backward of all layers grows when it runs in two halves, inputs first
            and weights later (zero-bubble schedules). None if unknown.
        skips: Tensors that need not travel where both ends are on one rank, as far as they are known.
        passes: Half-open ranges of layers, equally long, that are calls of the same ones: all but the first
            have no parameters of their own. Empty if every layer is called once.
        chains: Names and first layers of joined backbones that run in opposite directions; see `joined`.
        seen: The call sequences of the step, of which this is the longest.
    """

    name: str
    layers: tuple[LayerProfile, ...]
    repeated_s: Seconds | None = None
    split_s: Seconds | None = None
    skips: tuple[Skip, ...] = ()
    passes: tuple[tuple[int, int], ...] = ()
    chains: tuple[tuple[str, int], ...] = stored((), never=True)
    seen: SequenceShares = SequenceShares()

    @classmethod
    def from_node(cls, node: Node) -> BackboneProfile:
        """Reads the JSON form, whose positions are those of its layers."""
        backbone = read_fields(cls, node)
        num_layers = len(backbone.layers)
        sequences = backbone.seen.sequences
        if not math.isclose(sum(share for share, _ in sequences), 1.0, abs_tol=1e-6) or (
            max(first for _, first in sequences) >= num_layers > 0
        ):
            raise node["seen"]["forms"].expected(
                f"pairs [share, first layer], whose shares sum to 1, of {num_layers} layers"
            )
        edges = [edge for both in backbone.passes for edge in both]
        lengths = {stop - first for first, stop in backbone.passes}
        if backbone.passes and (
            len(edges) < 4
            or len(lengths) != 1
            or min(lengths) < 1
            or edges != sorted(edges)
            or edges[-1] > num_layers
        ):
            raise node["passes"].expected(
                "two ranges of layers or more, [first, stop], equally long, one after the other, "
                f"{num_layers} at most"
            )
        nodes = node["skips"].elements() if backbone.skips else ()
        for skip, at in zip(backbone.skips, nodes, strict=True):
            readers = list(skip.readers)
            if readers != sorted(set(readers)) or not (
                readers and skip.made < readers[0] <= readers[-1] <= num_layers
            ):
                raise at["readers"].expected(
                    f"positions after layer {skip.made}, ascending, {num_layers} at most"
                )
        return backbone


@dataclass(frozen=True, slots=True)
class EncoderLayerProfile:
    """A layer of a frozen encoder; forward only.

    Attributes:
        follows_sample: Whether its results follow from the sample alone; None if unknown.
        offloaded: Whether results are stored before training, when its parameters leave memory.
    """

    name: str
    forward_s: Seconds
    parameter_bytes: int = 0
    output_bytes_per_sample: int = 0
    flops_per_sample: int = 0
    follows_sample: bool | None = None
    offloaded: bool = False


@dataclass(frozen=True, slots=True)
class FrozenResult:
    """Tensors of a frozen encoder, and positions of their readers, ascending; several backbones are counted on."""

    bytes_per_sample: int
    readers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EncoderProfile:
    """A frozen encoder.

    Attributes:
        needs: Encoders that must have finished first.
        results: Outputs that the backbone reads; if none is named, all outputs of the last layer, everywhere.
        cacheable: Whether most of it follows from the sample alone, and is slower to compute than to read; None if
            unknown.
        stored_bytes_per_sample: Bytes that `EncodingCache` would keep; 0 if unknown.
        splittable: Whether it gives the same when run on some samples of a microbatch only; None if unknown.
    """

    name: str
    layers: tuple[EncoderLayerProfile, ...]
    needs: tuple[str, ...] = ()
    results: tuple[FrozenResult, ...] = ()
    cacheable: bool | None = None
    stored_bytes_per_sample: int = 0
    splittable: bool | None = None

    @property
    def stored_first(self) -> tuple[bool, ...]:
        """Whether results of each layer can be stored before training, as far as is known."""
        cacheable = self.cacheable is not False
        seen = (layer.follows_sample for layer in self.layers)
        return tuple(cacheable if follows is None else follows for follows in seen)

    def read_at(self, moved: Callable[[tuple[int, ...]], tuple[int, ...]]) -> EncoderProfile:
        """Returns the same with other positions of the layers that read its results."""
        results = tuple(replace(r, readers=moved(r.readers)) for r in self.results)
        return replace(self, results=results)

    @property
    def result_bytes_per_sample(self) -> int:
        """Bytes of all that the backbone reads."""
        if not self.results:
            return self.layers[-1].output_bytes_per_sample
        return sum(result.bytes_per_sample for result in self.results)

    @property
    def disk_bytes_per_sample(self) -> int:
        """Bytes that storing takes, at least."""
        return self.stored_bytes_per_sample or self.result_bytes_per_sample


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """Everything the planner knows about a model.

    Attributes:
        memory_bytes_per_s: Rate at which the device reads and writes its memory; None if unknown, as in profiles
            that were measured.
        quantized: Whether some weights are stored in fewer bits than their type has.

    Raises:
        ProfileError: No backbone, a backbone without layers, names used twice, or encoders that
            need each other.
    """

    name: str
    backbones: tuple[BackboneProfile, ...]
    encoders: tuple[EncoderProfile, ...] = ()
    memory_bytes_per_s: float | None = None
    quantized: bool = False

    def __post_init__(self) -> None:
        if not self.backbones:
            raise ProfileError(f"profile {self.name!r} has no backbone; nothing can be trained")
        counts = [(b.name, len(b.layers)) for b in self.backbones]
        counts += [(e.name, len(e.layers)) for e in self.encoders]
        for name, num_layers in counts:
            if not num_layers:
                raise ProfileError(f"{name!r} of profile {self.name!r} has no layers")
        names = [name for name, _ in counts]
        if len(set(names)) < len(names):
            raise ProfileError(f"backbones and encoders need different names; got {names}")
        finished: set[str] = set()
        listed = {encoder.name for encoder in self.encoders}
        for encoder in self.encoders:
            if unknown := [name for name in encoder.needs if name not in listed]:
                raise ProfileError(f"encoder {encoder.name!r} needs {unknown[0]!r}, which is none")
        for _ in self.encoders:
            finished |= {e.name for e in self.encoders if finished.issuperset(e.needs)}
        if finished != listed:
            raise ProfileError(f"encoders need each other in a circle: {sorted(listed - finished)}")

    @property
    def layers(self) -> tuple[LayerProfile, ...]:
        """The layers of all backbones, one backbone after the other."""
        return tuple([layer for backbone in self.backbones for layer in backbone.layers])

    @property
    def frozen_layers(self) -> tuple[EncoderLayerProfile, ...]:
        """The layers of all encoders, one encoder after the other."""
        return tuple([layer for encoder in self.encoders for layer in encoder.layers])

    @property
    def whole_encoders(self) -> tuple[str, ...]:
        """Encoders that must run on whole microbatches, as far as is known."""
        return tuple(e.name for e in self.encoders if e.splittable is False)

    def trained_s(self, samples: float) -> float:
        """Returns seconds of one forward and backward of all backbones on one rank."""
        times_s = (x.forward_s.at(samples) + x.backward_s.at(samples) for x in self.layers)
        return sum(times_s)

    def to_json(self) -> str:
        """Writes `diffpipe-profile/1`, one layer a line."""
        return json.dumps({"format": FORMAT, **write(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str = "profile") -> ModelProfile:
        """Reads `diffpipe-profile/1`; a ProfileError names `source` and the first key that is wrong."""
        return read_fields(cls, Node.of_text(text, ProfileError, source, FORMAT), "format")


DISK_BYTES_PER_S = 200e6
"""Rate at which one rank reads, if nothing else is known: a network disk or a busy local one."""


def encoded_first(profile: ModelProfile) -> ModelProfile:
    """Returns the profile of a run that stores what encoders give before training.

    Layers that are stored take no time, but for the last one of an encoder, which takes that of reading. Their
    parameters leave memory, unless another call of the same module follows noise.
    """

    def stored_first(encoder: EncoderProfile) -> EncoderProfile:
        stored, layers = encoder.stored_first, list(encoder.layers)
        stays = {x.name for x, is_stored in zip(layers, stored, strict=True) if not is_stored}
        read_s = encoder.disk_bytes_per_sample / DISK_BYTES_PER_S
        for index in reversed([i for i, is_stored in enumerate(stored) if is_stored]):
            layer, time_s = layers[index], Seconds.per_sample(read_s)
            layers[index] = replace(layer, forward_s=time_s, offloaded=layer.name not in stays)
            read_s = 0.0
        return replace(encoder, layers=tuple(layers))

    return replace(profile, encoders=tuple(map(stored_first, profile.encoders)))


def joined(profile: ModelProfile, opposite: bool = False) -> ModelProfile:
    """Makes a profile of one backbone that has the layers of all, one after the other.

    Where they run in opposite directions they stay chains of their own, whose stages are on the same ranks: nothing
    crosses from one to the next, and `BackboneProfile.chains` names them. Else what the loss reads of a backbone
    crosses the cuts of all later ones.
    """
    if len(profile.backbones) == 1:
        return profile
    layers, skips, chains, passing = list[LayerProfile](), list[Skip](), [], 0
    total = len(profile.layers)
    split_s = [b.split_s for b in profile.backbones if b.split_s]
    for backbone in profile.backbones:
        start, num_layers = len(layers), len(backbone.layers)
        chains.append((backbone.name, start))
        for layer in backbone.layers:
            across = layer.boundary_bytes_per_sample + passing
            if opposite and layer is backbone.layers[-1]:
                across = 0
            layers.append(replace(layer, boundary_bytes_per_sample=across))
        # The loss, a reader after the last layer, comes after those of all backbones.
        joined_at = lambda at, by=start, stop=num_layers: (
            by + at if at < stop or opposite else total
        )
        skips += [skip.moved(joined_at) for skip in backbone.skips]
        passing += 0 if opposite else backbone.layers[-1].boundary_bytes_per_sample
    whole = BackboneProfile(
        "+".join(b.name for b in profile.backbones),
        tuple(layers),
        next((b.repeated_s for b in profile.backbones if b.repeated_s), None),
        Seconds.sum(split_s) if split_s else None,
        tuple(sorted(skips, key=lambda skip: (skip.bytes_per_sample, skip.made))),
        chains=tuple(chains) if opposite else (),
    )
    return replace(profile, backbones=(whole,))


def of_step(
    profile: ModelProfile, starts: Sequence[int], seen: SequenceShares | None = None
) -> ModelProfile:
    """Returns the profile of the layers of a step, with its backbones and call sequences.

    Args:
        profile: Costs of these layers, perhaps of a step that joins or separates other backbones.
        starts: First layers of the backbones of the step.
        seen: Call sequences of the step, which none of the layers' times tell; None if there is only one.
    """
    sizes = [len(backbone.layers) for backbone in profile.backbones[:-1]]
    if (*accumulate(sizes, initial=0),) != tuple(starts):
        profile = separated(joined(profile), starts)
    if seen is None or len(profile.backbones) > 1:
        return profile
    (backbone,) = profile.backbones
    return replace(profile, backbones=(replace(backbone, seen=seen),))


def separated(profile: ModelProfile, starts: Sequence[int]) -> ModelProfile:
    """Makes one backbone per chain of a profile of all their layers; as it is if there is one."""
    (whole,) = profile.backbones
    if len(starts) == 1 or whole.passes:
        return profile
    times_s = [layer.backward_s.at(1) for layer in whole.layers]
    backbones: list[BackboneProfile] = []
    for first, stop in pairwise((*starts, len(whole.layers))):
        passing = whole.layers[first - 1].boundary_bytes_per_sample if first else 0
        layers = [
            replace(x, boundary_bytes_per_sample=max(x.boundary_bytes_per_sample - passing, 0))
            for x in whole.layers[first:stop]
        ]
        share = sum(times_s[first:stop]) / (sum(times_s) or 1.0)
        inside = lambda at, first=first, stop=stop: min(at, stop) - first
        skips = [
            skip.moved(inside)
            for skip in whole.skips  # what the loss reads of the last layer skips nothing here
            if first <= skip.made < stop - 1
        ]
        modules = zip(*(layer.name.split(".") for layer in layers), strict=False)
        same = takewhile(lambda parts: len(set(parts)) == 1, modules)
        name = ".".join(part for part, *_ in same)
        if not name or name in {b.name for b in backbones} | {e.name for e in profile.encoders}:
            name = f"{name or 'backbone'}_{len(backbones)}"
        split_s = whole.split_s and whole.split_s.scaled(share)
        more = whole.repeated_s, split_s, tuple(skips)
        backbones.append(BackboneProfile(name, tuple(layers), *more))
    return replace(profile, backbones=tuple(backbones))
