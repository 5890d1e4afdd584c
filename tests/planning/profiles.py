"""Profiles and clusters for tests: equal layers, and random ones.

Golden timelines: images kept in files, whose changes a reviewer reads.

`pytest tests/planning tests/viewing --update-golden` rewrites them.

Costs of schedules in tests, in ticks: a number for every stage, or one for each.

Sizes and placements over which the laws are checked.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

from lightning_diffpipe.planning.cluster import Cluster, Link
from lightning_diffpipe.planning.cost import CostModel
from lightning_diffpipe.planning.evaluation import Evaluator, Proposal
from lightning_diffpipe.planning.instruction import Backward, BackwardWeight, Forward
from lightning_diffpipe.planning.memory import peak_samples_of
from lightning_diffpipe.planning.options import PlanOptions
from lightning_diffpipe.planning.profile import (
    BackboneProfile,
    EncoderLayerProfile,
    EncoderProfile,
    FrozenResult,
    LayerProfile,
    ModelProfile,
    Seconds,
    SequenceShares,
    Skip,
)
from lightning_diffpipe.planning.proposals import all_cuts, shapes
from lightning_diffpipe.planning.schedule import Placement
from lightning_diffpipe.planning.simulator import in_ticks, simulate


def equal_profile(num_layers=12, frozen_share=0.0, forward_s=1.0, backward_s=2.0, **sizes):
    """Layers of 1 + 2 seconds a sample; frozen work of `frozen_share` times all of them."""
    forward, backward = Seconds.per_sample(forward_s), Seconds.per_sample(backward_s)
    layers = [
        LayerProfile(f"layer{i}", forward, backward, None, **sizes) for i in range(num_layers)
    ]
    frozen_s = frozen_share * num_layers * (forward_s + backward_s)
    encoder = EncoderProfile("vae", (EncoderLayerProfile("whole", Seconds.per_sample(frozen_s)),))
    return ModelProfile(
        "equal", (BackboneProfile("unet", tuple(layers)),), (encoder,) if frozen_share else ()
    )


def several_backbones(*profiles):
    """One profile with the backbones of all, and the encoders of the first."""
    backbones = (replace(p.backbones[0], name=f"denoiser{i}") for i, p in enumerate(profiles))
    return replace(profiles[0], backbones=tuple(backbones))


def twice(profile, share=1.0, feedback_bytes=0):
    """A step that calls its layers twice, first without gradients, for a share of the microbatches."""
    (backbone,), nothing = profile.backbones, Seconds.per_sample(0.0)
    size = len(backbone.layers)
    first = [
        replace(x, backward_s=nothing, activation_bytes_per_sample=0, gradient=False)
        for x in backbone.layers
    ]
    first[-1] = replace(first[-1], boundary_bytes_per_sample=feedback_bytes)
    again = [replace(layer, parameter_bytes=0, gradient_bytes=0) for layer in backbone.layers]
    seen = (
        SequenceShares(((share, 0), (1 - share, size)), shared=False)
        if share < 1
        else SequenceShares()
    )
    passes = ((0, size), (size, 2 * size))
    both = replace(backbone, layers=(*first, *again), passes=passes, seen=seen)
    in_both = lambda readers: (*readers, *(size + reader for reader in readers))
    encoders = tuple(encoder.read_at(in_both) for encoder in profile.encoders)
    return replace(profile, backbones=(both,), encoders=encoders)


def unet_profile():
    """Times (ms), streams and skips (MB) of SDXL's U-Net at 1024 pixels on an H100, a microbatch of 8 samples."""
    streams, skips = (10.5, 5.2, 2.6), []
    layers: list[tuple[float, float]] = [(0.1, 10.5)]
    made = [(0, 10.5)]
    blocks = [[(5.4, 1)] * 2, [(3.5, 1), (8.3, 2)] * 2, [(3.3, 1), (4.4, 10)] * 2]
    for level, block in enumerate(blocks):
        for ms, count in block:
            layers += [(ms, streams[level])] * count
            if level == 0 or count > 1:
                made.append((len(layers) - 1, streams[level]))
        if level < 2:
            layers.append((0.6, streams[level] / 4))
            made.append((len(layers) - 1, streams[level] / 4))
    layers += [(4.2, 2.6), *[(4.4, 2.6)] * 10, (4.2, 2.6)]
    ups = [[(6.6, 1), (4.4, 10)] * 3, [(8.0, 1), (8.3, 2)] * 3, [(8.7, 1)] * 3]
    for level, block in zip((2, 1, 0), ups, strict=True):
        for ms, count in block:
            if count == 1:
                at, size = made.pop()
                skips.append((size, at, len(layers)))
            layers += [(ms, streams[level])] * count
        if level:
            layers.append((7.5, 2 * streams[level]))
    profiles = []
    for i, (ms, stream) in enumerate(layers):
        alive = stream + sum(size for size, at, reader in skips if at < i < reader)
        forward, backward = (Seconds.per_sample(share * ms / 8e3) for share in (1 / 3, 2 / 3))
        sizes = {"parameter_bytes": 10, "gradient_bytes": 10, "activation_bytes_per_sample": 10}
        profiles.append(
            LayerProfile(
                f"layer{i}", forward, backward, boundary_bytes_per_sample=int(1e6 * alive), **sizes
            )
        )
    known = tuple(Skip(int(1e6 * size), at, (reader,)) for size, at, reader in sorted(skips))
    return ModelProfile("unet", (BackboneProfile("unet", tuple(profiles), skips=known),))


def random_times(rng, scale):
    per_sample, overhead = rng.uniform(0.1, 1) * scale, rng.uniform(0, 0.3) * scale
    return Seconds.of({1: overhead + per_sample, 8: overhead + 8 * per_sample})


def random_profile(rng, num_layers, frozen=False):
    layers = []
    for i in range(num_layers):
        scale = rng.uniform(0.5, 1.5)
        layers.append(
            LayerProfile(
                f"layer{i}", random_times(rng, scale), random_times(rng, 2 * scale), None,
                parameter_bytes=rng.randint(1, 50), gradient_bytes=rng.randint(0, 50),
                boundary_bytes_per_sample=rng.randint(1, 20), activation_bytes_per_sample=rng.randint(1, 20),
            )
        )  # fmt: skip
    whole = EncoderLayerProfile("whole", random_times(rng, 2), 20, 4)
    encoder = EncoderProfile("vae", (whole,), (), (FrozenResult(3, (0, num_layers - 1)),))
    return ModelProfile(
        "random", (BackboneProfile("unet", tuple(layers)),), (encoder,) if frozen else ()
    )


def random_cluster(rng, num_ranks, memory_bytes=None):
    return Cluster(
        num_ranks,
        memory_bytes=memory_bytes,
        p2p=Link(rng.choice([10, 50, 1000]), rng.uniform(0, 0.3)),
        all_reduce=Link(rng.choice([5, 50, 1000]), rng.uniform(0, 0.5)),
    )


def random_case(seed, max_layers=8, max_ranks=4, memory=False):
    rng = random.Random(seed)
    num_layers, num_ranks = rng.randint(1, max_layers), rng.randint(1, max_ranks)
    profile = random_profile(rng, num_layers, frozen=rng.random() < 0.5)
    limit = rng.randint(300, 2500) if memory else None
    return profile, random_cluster(rng, num_ranks, limit), rng.choice([4, 6, 8, 12])


def every_proposal(evaluator):
    model, options = evaluator.model, evaluator.options
    for shape in shapes(model, options):
        yield from (Proposal(shape, cuts) for cuts in all_cuts(model, options, shape))


TWO_STAGES = PlanOptions(4, num_stages=2, num_microbatches=4, num_replicas=1, data_parallel=1)


def profile_of(layers):
    return ModelProfile("model", (BackboneProfile("backbone", tuple(layers)),))


def best_of_costs(costs, num_layers, cluster, options):
    """Shortest step, in seconds, of every cut that fits, with the costs for every set of positions of layers."""
    every = range(num_layers)
    chosen = (positions for n in range(num_layers + 1) for positions in combinations(every, n))
    evaluators = (Evaluator(CostModel(costs(each), cluster), options) for each in chosen)
    fitting = (e.step_s(p) for e in evaluators for p in filter(e.fits, every_proposal(e)))
    return min(fitting, default=math.inf)


TESTS = Path(__file__).parent.parent


def check_golden(name: str, text: str, update: bool, folder: str = "planning") -> None:
    path = TESTS / folder / "golden" / f"{name}.txt"
    if update:
        path.write_text(text.rstrip() + "\n")
    assert text.rstrip() == path.read_text().rstrip()


def tick_costs(schedule, reduce=0, exchange=0, encode=1, holds_sender=False, **by_stage):
    """The costs of `in_ticks` with others in place of `forward`, `activation` ..., by the stage that reads them."""
    costs, count = in_ticks(schedule), schedule.num_microbatches

    def row(ticks, length):
        return tuple(ticks) if isinstance(ticks, Sequence) else (ticks,) * length

    tables = {
        f"{name}_s": tuple((ticks,) * count for ticks in row(value, schedule.num_stages))
        for name, value in by_stage.items()
    }
    return replace(
        costs,
        encode_s=row(encode, len(costs.encode_s)),
        all_reduce_s=(reduce,) * schedule.num_ranks,
        all_gather_s=exchange,
        holds_sender=holds_sender,
        **tables,
    )


def simulated(schedule, **ticks):
    return simulate(schedule, tick_costs(schedule, **ticks))


EQUAL = [(S, M) for S in range(1, 9) for M in (1, 2, 3, 5, 8, 16)]

REPLICAS = [(1, 3), (3, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2), (3, 2, 1), (1, 2, 3), (4,)]
UNEQUAL = [(replicas, M) for replicas in REPLICAS for M in (1, 2, 3, 5, 8, 13)]


def placement_of(size: int | tuple[int, ...]) -> Placement:
    return Placement.of_replicas((1,) * size if isinstance(size, int) else size)


ALL = [*EQUAL, *UNEQUAL]


def peak_samples(schedule, sizes):
    """By rank and stage: the most samples, and microbatches, that wait for a backward."""
    stages_of = schedule.placement.stages_of
    return tuple(
        peak_samples_of(program, stages_of(rank), sizes)
        for rank, program in enumerate(schedule.programs)
    )


def peak_alive(program):
    """The most microbatches that a rank keeps at a time between forwards and their backwards."""
    alive = peak = 0
    for instruction in program:
        alive += isinstance(instruction, Forward)
        alive -= isinstance(instruction, (Backward, BackwardWeight))
        peak = max(peak, alive)
    return peak
