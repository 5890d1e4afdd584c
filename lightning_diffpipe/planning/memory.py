"""Memory that a rank needs, read off its program without a clock, and memory bought with time.

A layer that is *recomputed* (activation checkpointing) stores its inputs instead of its activations, and its
backward takes a forward longer. An early stage of 1F1B stores the activations of many microbatches, the last one
those of one: so stages recompute different shares of their layers, and have fewer layers where more are recomputed.

A *streamed* layer stores only what is trained of it on the device. Its frozen weights are copied there for each of
its runs, into one of two slots, while the layers before it compute:

    compute  | layer 0 | layer 1 | layer 2 | wait | layer 3 | layer 4 |     layers 1, 3 and 5 are streamed: the
    copy     | 1 ----- | 3 ---------------------- | 5 --------------- |     copy of 3 begins when 1 does

Its backward needs its weights, too, and so runs its forward again: a streamed layer is a recomputed one, whose
weights are copied for a forward and for a backward. A run takes longer by what the copy takes beyond the runs that
cover it. So streamed layers are spread evenly over a stage, and layers that are not cover the copies of others.

Here is what a profile becomes by that; `search.py` decides for which layers.

Sources:
    Checkpointing: Chen et al. (2016), https://arxiv.org/abs/1604.06174; a part of a stage only: Korthikanti et al.
    (2022), https://arxiv.org/abs/2205.05198.
    Prefetching of weights from host memory: Rhu et al. (2016), https://arxiv.org/abs/1602.08124 (vDNN); Ren et al.
    (2021), https://arxiv.org/abs/2101.06840 (ZeRO-Offload).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from lightning_diffpipe.planning.cost import CostModel, LayerRun
from lightning_diffpipe.planning.filling import LOOKAHEAD_BATCHES, EncodePart
from lightning_diffpipe.planning.instruction import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    ForwardNoGrad,
    Program,
)
from lightning_diffpipe.planning.profile import LayerProfile, ModelProfile, Seconds
from lightning_diffpipe.planning.schedule import Placement

_EXPECTED, _UNDER_WAY = 2, 3
"""Messages after a stage besides the activations it sent, and messages before it."""


NUM_SLOTS = 2
"""Slots of a rank for streamed layers, as large as its largest one: one runs while the next one is copied.
Likewise for optimizer states in host memory, as large as those of the largest parameter."""


class Waiting(NamedTuple):
    """Activations that wait for a backward: their samples, and the microbatches of these."""

    samples: float
    microbatches: int


def peak_samples_of(
    program: Program, stages: Sequence[int], sizes: Sequence[int]
) -> dict[int, Waiting]:
    """Returns, by stage of a rank, the most samples, and microbatches, whose activations wait for a backward."""
    samples, microbatches = dict.fromkeys(stages, 0.0), dict.fromkeys(stages, 0)
    most_samples, most_microbatches = dict(samples), dict(microbatches)
    for instruction in program:
        match instruction:
            case Forward(stage, microbatch):
                samples[stage] += sizes[microbatch]
                microbatches[stage] += 1
                most_samples[stage] = max(most_samples[stage], samples[stage])
                most_microbatches[stage] = max(most_microbatches[stage], microbatches[stage])
            case Backward(stage, microbatch) | BackwardWeight(stage, microbatch):
                samples[stage] -= sizes[microbatch]
                microbatches[stage] -= 1
    return {stage: Waiting(most_samples[stage], most_microbatches[stage]) for stage in stages}


class StageLoad(NamedTuple):
    """Share of a rank with one stage in the frozen work, independent of the cuts.

    Attributes:
        read: Samples whose encodings it reads.
        concurrent: Bytes of encodings that it computes while it holds activations.
        made: Bytes of encodings that it makes.
        working: Bytes on which a frozen layer runs.
        resident: Bytes of the encoders that it holds in training.
        before: Bytes on which it encodes all samples before training.
    """

    read: int = 0
    concurrent: float = 0.0
    made: float = 0.0
    working: float = 0.0
    resident: float = 0.0
    before: float = 0.0


@dataclass(frozen=True, slots=True)
class FrozenLoad:
    """Share of one rank in the frozen work, in samples; its cost depends on the cuts.

    Attributes:
        read: Number of samples whose encodings each stage reads in a step.
        made: Samples of all microbatches of which it encodes some: results are kept in tensors of whole
            microbatches until they have been exchanged.
        working: Samples on which a frozen layer runs at a time.
        fills: The rank makes the encodings of coming batches in bubbles, while it holds activations; otherwise
            before there are any.
        encodes: The rank holds the encoders.
    """

    read: Mapping[int, int]
    made: int
    working: int
    fills: bool
    encodes: bool = True

    def num_bytes(self, model: CostModel, runs: Sequence[LayerRun]) -> tuple[float, float]:
        """Returns bytes next to the activations, and those at another time, when there are none.

        There are none during encoding before the pipeline; during an exchange, for which what others read is
        packed, while what is read here arrives; and at its end, when that is joined, but not yet freed.
        """
        others = sum(
            model.read_bytes_per_sample(r) for s, r in enumerate(runs) if s not in self.read
        )
        read = sum(n * model.read_bytes_per_sample(runs[stage]) for stage, n in self.read.items())
        made, working = self._made_bytes(model), self.working * model.working_bytes_per_sample
        exchanged = read + max(read, self.made * others)
        return read + (made + working if self.fills else 0), made + max(working, exchanged)

    def of_stage(self, model: CostModel, stage: int) -> StageLoad:
        """Returns the load of a rank that holds one stage."""
        made, working = self._made_bytes(model), self.working * model.working_bytes_per_sample
        concurrent, resident = made + working if self.fills else 0.0, self.resident_bytes(model)
        before = self.bytes_before(model)
        return StageLoad(self.read[stage], concurrent, made, working, resident, before)

    def resident_bytes(self, model: CostModel) -> int:
        """Returns bytes of the encoders that the rank holds in training."""
        return model.frozen_bytes if self.encodes else 0

    def bytes_before(self, model: CostModel) -> int:
        """Returns bytes on which the rank encodes all samples before training, if it does: encoders, and work."""
        if not (self.encodes and model.offloaded_bytes):
            return 0
        encoders = model.frozen_bytes + model.offloaded_bytes
        return encoders + self.working * model.working_bytes_per_sample

    def _made_bytes(self, model: CostModel) -> float:
        return (
            self.made * model.encoding_bytes_per_sample * (LOOKAHEAD_BATCHES if self.fills else 1)
        )


def frozen_loads(
    placement: Placement,
    sizes: Sequence[int],
    parts: Sequence[EncodePart],
    group_size: int | None,
    fills: bool,
    num_encoding: int | None = None,
) -> tuple[FrozenLoad, ...]:
    """Returns the load of every rank; none if nothing is frozen.

    Args:
        placement: Ranks of each stage.
        sizes: Samples of each microbatch.
        parts: Samples that each rank encodes; of the next batch, with filling.
        group_size: Samples on which frozen layers run at a time; None for whole microbatches.
        fills: Whether frozen work runs in the bubbles of the batch before.
        num_encoding: Number of ranks that encode, the last ones; None for all.
    """
    if not parts:
        return ()
    if placement.num_ranks == 1:  # Frozen layers run where they are called.
        return (FrozenLoad({0: max(sizes)}, 0, max(sizes), False),)
    working = min(group_size or max(sizes), max(sizes))
    loads = []
    for rank in range(placement.num_ranks):
        read = {
            stage: sum(sizes[m] for m in placement.microbatches_of(stage, rank, len(sizes)))
            for stage in placement.stages_of(rank)
        }
        encoded = {part.microbatch for part in parts if part.rank == rank}
        encodes = rank >= placement.num_ranks - (num_encoding or placement.num_ranks)
        works_on = working if encodes else 0
        loads.append(FrozenLoad(read, sum(sizes[m] for m in encoded), works_on, fills, encodes))
    return tuple(loads)


def peak_memory_bytes(
    model: CostModel,
    peaks: Sequence[Mapping[int, Waiting]],
    runs: Sequence[LayerRun],
    loads: Sequence[FrozenLoad] = (),
    holders: Sequence[int] = (),
) -> tuple[int, ...]:
    """Returns bytes of every rank at its fullest moment; see `rank_bytes`."""
    rank_loads = loads or (None,) * len(peaks)
    return tuple(
        rank_bytes(model, of_stage, runs, load, holders)
        for of_stage, load in zip(peaks, rank_loads, strict=True)
    )


def rank_bytes(
    model: CostModel,
    peak: Mapping[int, Waiting],
    runs: Sequence[LayerRun],
    load: FrozenLoad | None,
    holders: Sequence[int] = (),
) -> int:
    """Returns bytes of one rank at its fullest moment.

    Weights, gradients and optimizer state of its stages, frozen encoders if it encodes, and the activations that
    wait for their backward, with the encodings there are, messages, the activations of the layer that is
    recomputed, and the slots for weights of streamed layers. A rank that holds several stages is taken to be at its
    fullest with all of them at once. `holders` are numbers of ranks by stage, in all pipelines; 1 if not given.

    Encoders that leave memory before training count alone: stages come to the device after them.
    """
    counts = holders or (1,) * len(runs)
    resident = sum([model.resident_bytes(runs[stage], counts[stage]) for stage in peak])
    active = sum(model.activation_bytes(runs[stage], *waiting) for stage, waiting in peak.items())
    active += message_bytes(model, peak, runs)
    if model.recomputes:
        active += max(recomputed_bytes(model, runs[s], waiting) for s, waiting in peak.items())
        active += max(slot_bytes(model, runs[stage]) for stage in peak)
    if model.offloads_optimizer:
        active += state_slot_bytes(model, [runs[stage] for stage in peak])
    if load is None:  # there are no encoders
        return round(resident + active)
    concurrent, alone = load.num_bytes(model, runs)
    training = load.resident_bytes(model) + resident + max(active + concurrent, alone)
    return round(max(training, load.bytes_before(model)))


def recomputed_bytes(model: CostModel, run: LayerRun, waiting: Waiting) -> float:
    """Returns bytes of the activations that the backward of a microbatch makes again, of one layer at a time."""
    each = waiting.samples / max(waiting.microbatches, 1)
    return model.recomputed_bytes_from(run.first, each)[run.stop]


def slot_bytes(model: CostModel, run: LayerRun) -> int:
    """Returns bytes of the slots for the weights of streamed layers."""
    return NUM_SLOTS * model.streamed_bytes_from(run.first)[run.stop]


def state_slot_bytes(model: CostModel, runs: Sequence[LayerRun]) -> float:
    """Returns bytes of the slots of a rank for optimizer states in host memory."""
    largest = max(model.parameter_state_bytes_from(run.first)[run.stop] for run in runs)
    return min(NUM_SLOTS * largest, sum(map(model.state_bytes, runs)))


def message_bytes(model: CostModel, peak: Mapping[int, Waiting], runs: Sequence[LayerRun]) -> float:
    """Returns bytes of the messages between one rank's stages and other ranks.

    An activation that was sent is kept until a message tells that it has arrived, which its gradient does at
    the latest, so one for each microbatch that waits. The edge after the stage has a gradient that has arrived
    and one that is expected, too; that before it an activation that is expected, and two gradients that no
    message has confirmed yet. Replicas of a neighbour may be further apart, which is not counted.
    """
    num_bytes = 0.0
    for stage, waiting in peak.items():
        run, (before, after) = runs[stage], boundary_samples(waiting)
        if stage + 1 not in peak:
            num_bytes += model.boundary_bytes(run, after)
        if stage - 1 not in peak and run.first:
            num_bytes += model.boundary_bytes(LayerRun(0, run.first), before)
    return num_bytes


def boundary_samples(waiting: Waiting) -> tuple[float, float]:
    """Returns samples of the messages before a stage, and after it; see `message_bytes`."""
    each = waiting.samples / max(waiting.microbatches, 1)
    return _UNDER_WAY * each, waiting.samples + _EXPECTED * each


_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of samples for which waits are computed: they fall with the samples, down to none."""


def recomputable(profile: ModelProfile, frees_memory: bool = True) -> frozenset[int]:
    """Returns positions of layers of the one backbone that may be recomputed, or only where it frees memory."""
    return frozenset(
        position
        for position, layer in enumerate(profile.backbones[0].layers)
        if layer.gradient and (left := layer.input_bytes_per_sample) is not None
        if not frees_memory or left < layer.activation_bytes_per_sample
    )


def checkpointed(profile: ModelProfile, positions: Collection[int]) -> ModelProfile:
    """Returns the profile of a step that recomputes the layers at these positions of the one backbone, too."""
    (backbone,) = profile.backbones
    layers = list(backbone.layers)
    for position in positions:
        layer = layers[position]
        if layer.uncheckpointed:
            continue
        layers[position] = replace(
            layer,
            backward_s=Seconds.sum((layer.backward_s, layer.forward_s)),
            activation_bytes_per_sample=layer.input_bytes_per_sample or 0,
            activation_bytes_per_microbatch=0,
            uncheckpointed=layer,
        )
    return replace(profile, backbones=(replace(backbone, layers=tuple(layers)),))


def streamable(profile: ModelProfile) -> frozenset[int]:
    """Returns positions of layers of the one backbone whose frozen weights may be streamed."""
    backbone = profile.backbones[0]
    if backbone.passes:  # whose later calls read what is a part of the first
        return frozenset()
    return frozenset(
        position
        for position, layer in enumerate(backbone.layers)
        if layer.streamable_bytes and layer.gradient and layer.input_bytes_per_sample is not None
    )


def streamed(
    profile: ModelProfile, positions: Collection[int], host_bytes_per_s: float
) -> ModelProfile:
    """Returns the profile of a step that streams the layers at these positions of the one backbone.

    Args:
        profile: In which they are recomputed.
        positions: Positions of the layers.
        host_bytes_per_s: Rate of copies from host memory to a device.
    """
    (backbone,) = profile.backbones
    whole, layers, order = backbone.layers, list(backbone.layers), sorted(positions)
    for index, at in enumerate(order):
        layer, before, after = whole[at], order[index - 1], order[(index + 1) % len(order)]
        copy_s = layer.streamable_bytes / host_bytes_per_s
        # Forwards come from the streamed layer before it, backwards from the one after it.
        ahead, behind = _between(whole, before, at), _between(whole, at + 1, after + 1)
        layers[at] = replace(
            layer,
            forward_s=_with_wait(layer.forward_s, copy_s, [x.forward_s for x in ahead]),
            backward_s=_with_wait(layer.backward_s, copy_s, [x.backward_s for x in behind]),
            parameter_bytes=layer.parameter_bytes - layer.streamable_bytes,
            streamed_bytes=layer.streamable_bytes,
        )
    return replace(profile, backbones=(replace(backbone, layers=tuple(layers)),))


def _between(layers: Sequence[LayerProfile], first: int, stop: int) -> Sequence[LayerProfile]:
    """Returns layers from one position to another, over the end if that is before it."""
    return layers[first:stop] if first < stop else (*layers[first:], *layers[:stop])


def _with_wait(own: Seconds, copy_s: float, covering: Sequence[Seconds]) -> Seconds:
    """Returns the times of a run with the wait for its copy, which begins when those that cover it do."""
    covered = Seconds.sum(covering)
    counts = {*(count for count, _ in own.points), *_COUNTS}
    return Seconds.of({n: own.at(n) + max(copy_s - covered.at(n), 0.0) for n in counts})


def streamed_where_needed(sizes: Mapping[int, int], room: float) -> frozenset[int]:
    """Returns which streamed layers of a rank still have to be where it has room for some, spread evenly.

    Args:
        sizes: Bytes of the streamed weights by position, ascending.
        room: Bytes that the rank has left while it streams all of them.

    Example:
        >>> sorted(streamed_where_needed(dict.fromkeys(range(8), 10), room=40))
        [0, 2, 4, 6]
    """
    slots, total = NUM_SLOTS * max(sizes.values(), default=0), sum(sizes.values())
    if total <= room + slots:  # without streaming there are no slots
        return frozenset()
    needed, saved = dict(sizes), 0.0
    for position, size in sizes.items():
        saved += size * room / total
        if saved >= size:
            saved -= size
            del needed[position]
    return frozenset(needed)


_Layer = TypeVar("_Layer")


def streamed_runs(
    program: Program, streamed_layers: Mapping[int, Sequence[_Layer]]
) -> tuple[_Layer, ...]:
    """Returns the streamed layers that a program of a rank runs, in order."""
    runs = list[_Layer]()
    for instruction in program:
        match instruction:
            case Forward(stage, _) | ForwardNoGrad(stage, _):
                runs += streamed_layers.get(stage, ())
            case Backward(stage, _) | BackwardInput(stage, _):
                runs += reversed(streamed_layers.get(stage, ()))
    return tuple(runs)


def copies(runs: Sequence[int]) -> tuple[int, ...]:
    """Returns the copies of a step, by layer and in order, where steps with the same runs follow each other.

    The copy for the next run begins with each run, unless a slot has that layer still.

    Example:
        >>> copies((1, 2, 3, 3, 2, 1))
        (3, 1)
    """
    other: int | None = None  # what the slot has that the running layer does not have
    for _ in range(2):  # the second time slots are full from the beginning
        copied = list[int]()
        for run, coming in zip(runs, [*runs[1:], *runs[:1]], strict=True):
            if coming not in (run, other):
                copied.append(coming)
            if coming != run:
                other = run
    return tuple(copied) if runs else ()
