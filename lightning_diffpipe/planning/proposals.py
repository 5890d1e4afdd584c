"""What is worth simulating: proposals for the search, cheap to make and few enough to try all.

Where there are few ways to cut, all are proposed, so that the result is the optimum of the
simulator. Where there are many, the dynamic program proposes the Pareto front of each number of
stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import comb

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.planning.cost import CostModel, LayerRun
from lightning_diffpipe.planning.options import PlanOptions
from lightning_diffpipe.planning.partition import (
    Cut,
    check_partition,
    minimax_cuts,
    partition_fronts,
)
from lightning_diffpipe.planning.schedules import SCHEDULES

MOST_CUTS_TRIED = 400
"""Up to so many ways to cut, all are simulated."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One proposal.

    Attributes:
        cuts: First layer, one past the last layer and replicas of every stage.
        num_microbatches: Microbatches of one pipeline.
        num_pipelines: Pipelines side by side.
        schedule: A name of `SCHEDULES`.
    """

    cuts: tuple[Cut, ...]
    num_microbatches: int
    num_pipelines: int
    schedule: str


def candidates(model: CostModel, options: PlanOptions) -> Iterator[Candidate]:
    """All proposals that meet the options.

    Raises:
        ConfigurationError: No number of pipelines or microbatches meets the options.
        PartitionError: More stages than layers or ranks.
    """
    schedules = tuple(SCHEDULES) if options.schedule == "auto" else (options.schedule,)
    for num_pipelines in pipeline_counts(model, options):
        num_ranks = model.cluster.num_ranks // num_pipelines
        samples = options.global_batch_size // num_pipelines
        for num_microbatches in microbatch_counts(options, samples):
            size = samples / num_microbatches
            for cuts in _cuts(model, options, num_ranks, num_microbatches, size):
                if options.num_replicas == "auto" and _has_idle_replicas(cuts, num_microbatches):
                    continue
                for schedule in schedules:
                    yield Candidate(cuts, num_microbatches, num_pipelines, schedule)


def _has_idle_replicas(cuts: tuple[Cut, ...], num_microbatches: int) -> bool:
    """Whether some replica would never get a microbatch; all the same if one stage must have it."""
    return len(cuts) > 1 and max(replicas for _, _, replicas in cuts) > num_microbatches


def pipeline_counts(model: CostModel, options: PlanOptions) -> tuple[int, ...]:
    """How many pipelines may stand side by side: a number that divides ranks and batch."""
    num_ranks, batch = model.cluster.num_ranks, options.global_batch_size
    possible = [p for p in range(1, num_ranks + 1) if num_ranks % p == 0 and batch % p == 0]
    if options.data_parallel != "auto":
        if options.data_parallel not in possible:
            raise ConfigurationError(
                f"data_parallel={options.data_parallel} must divide the {num_ranks} ranks and the "
                f"global batch of {batch} samples; possible are {possible}"
            )
        return (options.data_parallel,)
    fixed = _fixed_ranks(options)
    if fixed is not None:
        if num_ranks % fixed or num_ranks // fixed not in possible:
            raise ConfigurationError(
                f"stages with num_replicas={options.num_replicas} take {fixed} ranks, which do "
                f"not add up to the {num_ranks} ranks there are"
            )
        return (num_ranks // fixed,)
    stages = 1 if options.num_stages == "auto" else options.num_stages
    fitting = tuple(p for p in possible if num_ranks // p >= stages)
    if not fitting:
        check_partition(model.num_layers(), stages, num_ranks)
    return fitting


def _fixed_ranks(options: PlanOptions) -> int | None:
    """Ranks of a pipeline, where the options fix them."""
    if isinstance(options.num_replicas, tuple):
        return sum(options.num_replicas)
    if options.num_replicas != "auto" and options.num_stages != "auto":
        return options.num_replicas * options.num_stages
    return None


def microbatch_counts(options: PlanOptions, samples: int) -> tuple[int, ...]:
    """Numbers of microbatches to try: powers of two, and three times them."""
    if options.num_microbatches != "auto":
        if options.num_microbatches > samples:
            raise ConfigurationError(
                f"num_microbatches={options.num_microbatches} is more than the {samples} samples "
                "of a pipeline's batch; use fewer microbatches, fewer pipelines or a larger batch"
            )
        return (options.num_microbatches,)
    powers = {factor << shift for factor in (1, 3) for shift in range(12)}
    return tuple(sorted(count for count in powers if count <= min(samples, 512)))


def _cuts(
    model: CostModel, options: PlanOptions, num_ranks: int, num_microbatches: int, size: float
) -> Iterator[tuple[Cut, ...]]:
    """Ways to cut the backbone for pipelines of so many ranks."""
    num_layers = model.num_layers()
    if options.num_stages == "auto":
        stage_counts = tuple(range(1, min(num_layers, num_ranks) + 1))
    else:
        check_partition(num_layers, options.num_stages, num_ranks)
        stage_counts = (options.num_stages,)
    if options.partition == "auto":
        yield from _optimal_cuts(model, options, stage_counts, num_ranks, size)
        return
    for num_stages in stage_counts:
        firsts = _baseline(model, options.partition, num_stages, size)
        for replicas in _replicas(options, num_stages, num_ranks):
            yield tuple(zip(firsts, (*firsts[1:], num_layers), replicas, strict=True))


def _baseline(model: CostModel, partition: str, num_stages: int, size: float) -> tuple[int, ...]:
    layers = model.profile.backbones[0].layers
    if partition == "uniform":
        weights = [1.0] * len(layers)
    elif partition == "parameters":
        weights = [float(layer.parameter_bytes) for layer in layers]
    else:
        weights = [layer.forward_s.at(size) + layer.backward_s.at(size) for layer in layers]
    return minimax_cuts(weights, num_stages)


def _replicas(options: PlanOptions, num_stages: int, num_ranks: int) -> Iterator[tuple[int, ...]]:
    """Ways to share ranks among stages."""
    wanted = options.num_replicas
    for marks in combinations(range(1, num_ranks), num_stages - 1):
        edges = (0, *marks, num_ranks)
        replicas = tuple(b - a for a, b in pairwise(edges))
        if wanted == "auto" or replicas == wanted or set(replicas) == {wanted}:
            yield replicas


def _optimal_cuts(
    model: CostModel,
    options: PlanOptions,
    stage_counts: tuple[int, ...],
    num_ranks: int,
    size: float,
) -> Iterator[tuple[Cut, ...]]:
    num_layers = model.num_layers()
    ways = sum(comb(num_layers - 1, s - 1) * comb(num_ranks - 1, s - 1) for s in stage_counts)
    if ways <= MOST_CUTS_TRIED:
        for num_stages in stage_counts:
            for replicas in _replicas(options, num_stages, num_ranks):
                for marks in combinations(range(1, num_layers), num_stages - 1):
                    yield tuple(zip((0, *marks), (*marks, num_layers), replicas, strict=True))
        return

    def stage_cost(first: int, stop: int, replicas: int) -> tuple[float, float]:
        run = LayerRun(0, first, stop)
        busy_s = model.forward_s(run, size) + model.backward_s(run, size)
        link_s = 0.0
        if stop < num_layers:
            link_s = 2 * model.cluster.p2p.seconds(model.boundary_bytes(run, size))
        sync_s = model.cluster.all_reduce.all_reduce_s(model.gradient_bytes(run), replicas)
        return max(busy_s / replicas, link_s), max(sync_s - model.backward_s(run, size), 0.0)

    fronts = partition_fronts(num_layers, num_ranks, max(stage_counts), stage_cost)
    for num_stages in stage_counts:
        for partition in fronts.get((num_stages, num_ranks), ()):
            yield partition.cuts
