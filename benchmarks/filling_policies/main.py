"""DiffusionPipe's filling against shares, simulated: 200 random pipelines, encoders and links.

    python benchmarks/filling_policies/main.py [profiles=200]

Both get the same bubbles, and layers that cost the same (in groups of samples, as they run). Samples of
DiffusionPipe change rank in the middle of an encoder; a piece waits for what it reads, which takes its bytes' time
on a link of its own: nothing else is on the way, and nothing is packed. Shares move nothing until the exchange of
results, which both end with and which is not charged. A rank's share is an average over many batches, as it runs.
"""

from __future__ import annotations

import random
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.filling_policies.diffusionpipe import fill_like_diffusionpipe
from lightning_diffpipe.planning.cost import PipelineCosts
from lightning_diffpipe.planning.filling import (
    SHARES_PERIOD,
    Filled,
    fill_by_shares,
    frozen_layers,
    group_samples,
    weave,
)
from lightning_diffpipe.planning.instruction import Encode, Staged
from lightning_diffpipe.planning.profile import EncoderLayerProfile, EncoderProfile, Seconds
from lightning_diffpipe.planning.schedule import Schedule
from lightning_diffpipe.planning.schedules.one_f_one_b import one_f_one_b
from lightning_diffpipe.planning.simulator import simulate


@dataclass(frozen=True)
class Case:
    """One pipeline and what is frozen beside it."""

    schedule: Schedule
    costs: PipelineCosts
    encoders: tuple[EncoderProfile, ...]
    batch: int
    group: int
    bytes_per_s: float
    moving_share: float

    def __str__(self) -> str:
        layers = "+".join(str(len(encoder.layers)) for encoder in self.encoders)
        return (
            f"{self.schedule.num_ranks} ranks, {self.schedule.num_microbatches} microbatches, {layers} frozen "
            f"layers, batch {self.batch} in groups of {self.group}, moving takes {self.moving_share:.2f} of it"
        )


def random_case(rng: random.Random) -> Case:
    """Stages up to 20 % apart, one to three encoders of uneven layers, frozen work of 0.1 to 1 times the rest."""
    ranks, per_rank = rng.choice([2, 3, 4, 6, 8]), rng.choice([0.5, 1, 2])
    microbatches = max(1, round(ranks * per_rank))
    stages = [rng.uniform(0.8, 1.2) for _ in range(ranks)]
    forward, nothing = tuple((s,) * microbatches for s in stages), ((0.0,) * microbatches,) * ranks
    backward = tuple((2 * s,) * microbatches for s in stages)
    costs = PipelineCosts((1,) * microbatches, forward, backward, nothing, nothing, nothing)
    batch = microbatches * rng.choice([4, 8, 16])
    group = max(1, batch // (ranks * rng.choice([2, 4])))
    frozen_s = rng.uniform(0.1, 1) * 3 * sum(stages) * microbatches
    shape = [
        [rng.lognormvariate(0, 1) for _ in range(rng.randint(4, 24))]
        for _ in range(rng.randint(1, 3))
    ]
    tick_s = frozen_s / (batch * sum(map(sum, shape)))
    moving_share = 10 ** rng.uniform(-2, 0)
    encoders = []
    for number, weights in enumerate(shape):
        layers = [
            # A tenth of what one sample costs is there however many samples there are.
            EncoderLayerProfile(
                f"layer{index}",
                Seconds.of(
                    {1: 1.0 * weight * tick_s, batch: (0.1 + 0.9 * batch) * weight * tick_s}
                ),
                0,
                round(1e9 * weight * tick_s * moving_share * rng.uniform(0.5, 2)),
            )
            for index, weight in enumerate(weights)
        ]
        needs = ("encoder0",) if number and rng.random() < 0.3 else ()
        encoders.append(EncoderProfile(f"encoder{number}", tuple(layers), needs))
    schedule = one_f_one_b(ranks, microbatches)
    return Case(schedule, costs, tuple(encoders), batch, group, 1e9, moving_share)


def shares_s(case: Case) -> float:
    """A step filled by shares."""
    timeline, count = simulate(case.schedule, case.costs), case.schedule.num_microbatches
    # Of 16 batches a rank takes a whole number of groups: so of each on average sixteenths of one.
    layers = [
        layer._replace(seconds=lambda samples, of=layer.seconds: of(samples / SHARES_PERIOD))
        for layer in frozen_layers(case.encoders, case.group)
    ]
    steps = group_samples([SHARES_PERIOD * case.batch // count] * count, case.group)
    filled = weave(case.schedule, timeline, fill_by_shares(timeline, layers, steps))
    return step_s(case, filled, moves=False)


def diffusionpipe_s(case: Case, *, moves: bool, grouped: bool = True) -> float:
    """A step filled as DiffusionPipe does."""
    timeline = simulate(case.schedule, case.costs)
    placed = fill_like_diffusionpipe(
        timeline, case.encoders, case.batch, case.group if grouped else None
    )
    return step_s(case, weave(case.schedule, timeline, placed), moves=moves)


def step_s(case: Case, filled: Filled, *, moves: bool) -> float:
    """When all ranks are done: every rank in the order of its program, pieces after what they read."""
    schedule, pieces = filled.schedule, filled.pieces
    reads = [[] for _ in pieces]
    if moves:
        for piece in pieces:
            for before in pieces:
                common = min(piece.stop, before.stop) - max(piece.start, before.start)
                same = (before.encoder, before.layer + 1) == (piece.encoder, piece.layer)
                if same and common > 0 and before.rank != piece.rank:
                    layer = case.encoders[before.encoder].layers[before.layer]
                    travel_s = common * layer.output_bytes_per_sample / case.bytes_per_s
                    reads[piece.index].append((before.index, travel_s))
    clock, position = [0.0] * schedule.num_ranks, [0] * schedule.num_ranks
    made, encoded, moved = {}, {}, True
    inputs = [list(schedule.inputs_of(program)) for program in schedule.programs]
    outputs = [list(schedule.outputs_of(program)) for program in schedule.programs]
    while moved:
        moved = False
        for rank, program in enumerate(schedule.programs):
            while position[rank] < len(program):
                at, instruction = position[rank], program[position[rank]]
                if isinstance(instruction, Encode):
                    sources = reads[instruction.part]
                    if any(index not in encoded for index, _ in sources):
                        break
                    start = max([clock[rank], *(encoded[i] + s for i, s in sources)])
                    clock[rank] = encoded[instruction.part] = (
                        start + filled.piece_s[instruction.part]
                    )
                elif isinstance(instruction, Staged):
                    message = inputs[rank][at]
                    if message is not None and message not in made:
                        break
                    start = max(clock[rank], made[message] if message else 0.0)
                    clock[rank] = start + case.costs.compute_s(instruction)
                    if outputs[rank][at] is not None:
                        made[outputs[rank][at]] = clock[rank]
                position[rank] += 1
                moved = True
    assert all(p == len(program) for p, program in zip(position, schedule.programs, strict=True)), (
        "never ends"
    )
    return max(clock)


def main(profiles: int) -> None:
    """Prints the distribution of the ratio of steps, and the worst rows for shares."""
    rng = random.Random(22)
    rows = []
    for _ in range(profiles):
        case = random_case(rng)
        own_s, free_s = shares_s(case), diffusionpipe_s(case, moves=False)
        charged_s = diffusionpipe_s(case, moves=True)
        whole_s = diffusionpipe_s(case, moves=False, grouped=False)
        rows.append((own_s / charged_s, own_s / free_s, own_s / whole_s, case))
    names = ("transfers charged", "transfers free", "transfers free, pieces not in groups")
    for column, name in enumerate(names):
        ratios = sorted(row[column] for row in rows)
        marks = [ratios[round(q * (len(ratios) - 1))] for q in (0, 0.1, 0.5, 0.9, 1)]
        slower = sum(ratio > 1.01 for ratio in ratios)
        print(
            f"{name}: shares take {' '.join(f'{mark:.3f}' for mark in marks)} (least, 10 %, median, 90 %, most) "
            f"of DiffusionPipe's step, mean {statistics.fmean(ratios):.3f}; over 1 % slower: {slower} of {profiles}"
        )
    print("\nThe rows in which shares are slowest, transfers charged (and free):")
    for charged, free, _, case in sorted(rows, key=lambda row: -row[0])[:5]:
        print(f"  {charged:.3f} ({free:.3f})  {case}")


if __name__ == "__main__":
    main(int((sys.argv[1:] or ["profiles=200"])[0].removeprefix("profiles=")))
