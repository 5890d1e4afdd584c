"""What the search tries: numbers of pipelines, microbatches and stages, and ways to cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import comb

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.planning.cost import CostModel
from lightning_diffpipe.planning.frozen_parts import split_evenly
from lightning_diffpipe.planning.options import PlanOptions
from lightning_diffpipe.planning.partition import Cut, check_partition
from lightning_diffpipe.planning.schedules import AUTO_SCHEDULES

MOST_UNEQUAL_RANKS = 8
"""Pipelines of more ranks give equal shares to all stages; there are too many other ways."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Everything about a proposal except where it cuts.

    Attributes:
        num_pipelines: Pipelines side by side.
        num_ranks: Ranks of one pipeline.
        num_stages: Stages of one pipeline.
        sizes: Samples of each microbatch of a pipeline.
        schedule: A name of `schedules.SCHEDULES`.
    """

    num_pipelines: int
    num_ranks: int
    num_stages: int
    sizes: tuple[int, ...]
    schedule: str


def shapes(model: CostModel, options: PlanOptions) -> Iterator[Shape]:
    """All shapes that meet the options.

    Raises:
        ConfigurationError: No number of pipelines or microbatches meets the options.
        PartitionError: More stages than layers or ranks.
    """
    schedules = AUTO_SCHEDULES if options.schedule == "auto" else (options.schedule,)
    counts = pipeline_counts(model, options)
    free = options.num_stages == options.num_microbatches == "auto"
    for num_pipelines in counts:
        num_ranks = model.cluster.num_ranks // num_pipelines
        samples = options.global_batch_size // num_pipelines
        for num_stages in _stage_counts(model, options, num_ranks):
            if num_stages == 1 < num_ranks and free and model.cluster.num_ranks in counts:
                continue  # The same as one pipeline for each rank, which is proposed as well.
            for num_microbatches in microbatch_counts(options, samples):
                sizes = split_evenly(samples, num_microbatches)
                # Without a neighbour there is nothing to overlap: all schedules are the same.
                for schedule in schedules[:1] if num_stages == 1 else schedules:
                    yield Shape(num_pipelines, num_ranks, num_stages, sizes, schedule)


def pipeline_counts(model: CostModel, options: PlanOptions) -> tuple[int, ...]:
    """How many pipelines may stand side by side: numbers that divide ranks and batch."""
    num_ranks, batch = model.cluster.num_ranks, options.global_batch_size
    possible = [p for p in range(1, num_ranks + 1) if num_ranks % p == 0 and batch % p == 0]
    if options.data_parallel != "auto":
        if options.data_parallel not in possible:
            raise ConfigurationError(
                f"data_parallel={options.data_parallel} must divide the {num_ranks} ranks and the "
                f"global batch of {batch} samples; possible are {possible}"
            )
        possible = [options.data_parallel]
    wanted = options.num_microbatches
    enough = [p for p in possible if wanted == "auto" or batch // p >= wanted]
    if not enough:
        raise ConfigurationError(
            f"num_microbatches={wanted} is more than the {batch // possible[0]} samples of a "
            "pipeline's batch; use fewer microbatches, fewer pipelines or a larger batch"
        )
    possible = enough
    fixed = _fixed_ranks(options)
    if fixed is not None:
        if num_ranks % fixed or num_ranks // fixed not in possible:
            raise ConfigurationError(
                f"stages with num_replicas={options.num_replicas} take {fixed} ranks, which do "
                f"not add up to the {num_ranks} ranks there are, in {possible} pipelines"
            )
        return (num_ranks // fixed,)
    stages = 1 if options.num_stages == "auto" else options.num_stages
    fitting = tuple(p for p in possible if num_ranks // p >= stages)
    if not fitting:
        check_partition(model.num_layers(), stages, num_ranks // possible[0])
    return fitting


def _fixed_ranks(options: PlanOptions) -> int | None:
    """Ranks of a pipeline, where the options fix them."""
    if isinstance(options.num_replicas, tuple):
        return sum(options.num_replicas)
    if options.num_replicas != "auto" and options.num_stages != "auto":
        return options.num_replicas * options.num_stages
    return None


def _stage_counts(model: CostModel, options: PlanOptions, num_ranks: int) -> tuple[int, ...]:
    num_layers, wanted = model.num_layers(), options.num_replicas
    if isinstance(wanted, tuple):
        check_partition(num_layers, len(wanted), num_ranks)
        return (len(wanted),)
    if options.num_stages != "auto":
        check_partition(num_layers, options.num_stages, num_ranks)
        return (options.num_stages,)
    return tuple(
        s
        for s in range(1, min(num_layers, num_ranks) + 1)
        if (wanted == "auto" or s * wanted == num_ranks)
        and (num_ranks <= MOST_UNEQUAL_RANKS or num_ranks % s == 0)
    )


def microbatch_counts(options: PlanOptions, samples: int) -> tuple[int, ...]:
    """Numbers of microbatches to try: powers of two, and three times them."""
    if options.num_microbatches != "auto":
        return (options.num_microbatches,)
    powers = {factor << shift for factor in (1, 3) for shift in range(12)}
    return tuple(sorted(count for count in powers if count <= min(samples, 256)))


def replicas_of(options: PlanOptions, shape: Shape) -> Iterator[tuple[int, ...]]:
    """Ways to share the ranks of a pipeline among its stages.

    With many ranks only equal shares. Shares that leave a replica without a microbatch are left
    out unless they are asked for.
    """
    wanted, num_stages = options.num_replicas, shape.num_stages
    if isinstance(wanted, tuple):
        yield wanted
        return
    if wanted != "auto":
        yield (wanted,) * num_stages
        return
    if shape.num_ranks > MOST_UNEQUAL_RANKS:
        if shape.num_ranks % num_stages == 0:
            yield (shape.num_ranks // num_stages,) * num_stages
        return
    most = len(shape.sizes) if num_stages > 1 else shape.num_ranks
    for marks in combinations(range(1, shape.num_ranks), num_stages - 1):
        replicas = tuple(b - a for a, b in pairwise((0, *marks, shape.num_ranks)))
        if max(replicas) <= most:
            yield replicas


def count_of_cuts(model: CostModel, shape: Shape) -> int:
    """In how many ways the layers and ranks of a shape can be shared among its stages."""
    return comb(model.num_layers() - 1, shape.num_stages - 1) * comb(
        shape.num_ranks - 1, shape.num_stages - 1
    )


def all_cuts(model: CostModel, options: PlanOptions, shape: Shape) -> Iterator[tuple[Cut, ...]]:
    """Every way to cut."""
    num_layers = model.num_layers()
    for replicas in replicas_of(options, shape):
        for marks in combinations(range(1, num_layers), shape.num_stages - 1):
            yield tuple(zip((0, *marks), (*marks, num_layers), replicas, strict=True))
