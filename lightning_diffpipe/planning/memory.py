"""Memory that a rank needs, read off its program without a clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_diffpipe.planning.cost import CostModel, LayerRun
from lightning_diffpipe.planning.filling import LOOKAHEAD_BATCHES, EncodePart
from lightning_diffpipe.planning.instruction import Backward, BackwardWeight, Forward, Program
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
