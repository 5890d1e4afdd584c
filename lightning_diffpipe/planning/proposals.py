"""The proposals of the search: numbers of pipelines, microbatches and stages, and ways to cut."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, product
from math import comb, isqrt, prod

from lightning_diffpipe.errors import ConfigurationError, PartitionError
from lightning_diffpipe.planning.cost import CostModel, LayerRun
from lightning_diffpipe.planning.filling import split_evenly
from lightning_diffpipe.planning.options import (
    PARTITIONS_WITH_REPLICAS,
    PlanOptions,
    ranks_of_pipeline,
)
from lightning_diffpipe.planning.partition import Cut, chain_cuts, check_partition, partition_fronts
from lightning_diffpipe.planning.schedule import Placement, ScheduleSpec
from lightning_diffpipe.planning.schedules import SCHEDULES

MOST_UNEQUAL_RANKS = 8
"""Pipelines of more ranks give equal shares to all stages; there are too many other ways."""

FEW_SAMPLES = 12
"""Largest batch, in samples, for which all numbers of microbatches are tried."""

MOST_MICROBATCHES = 256
"""Largest number that is proposed where memory is not limited: more need less memory, but gain hardly any time."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Everything about a proposal except where it cuts; `sizes` are samples of a pipeline's microbatches."""

    num_pipelines: int
    num_ranks: int
    num_stages: int
    sizes: tuple[int, ...]
    schedule: str

    @property
    def stages_per_rank(self) -> int:
        """Number of stages on each rank."""
        return self.num_stages // self.num_ranks if self.spec.place else 1

    @property
    def spec(self) -> ScheduleSpec:
        """The schedule."""
        return SCHEDULES[self.schedule]

    def placement(self, replicas: Sequence[int] = ()) -> Placement:
        """Returns where the stages run, given the ranks of each."""
        if self.spec.place:
            return self.spec.place(self.num_stages, self.num_ranks)
        return Placement.of_replicas(replicas)


def is_long(shape: Shape) -> bool:
    """Returns whether a pipeline has so many microbatches that simulating it takes long; a rank alone is quick."""
    return shape.num_ranks > 1 and len(shape.sizes) > MOST_MICROBATCHES


def shapes(model: CostModel, options: PlanOptions) -> Iterator[Shape]:
    """Yields all shapes that meet the options.

    Raises:
        ConfigurationError: No number of pipelines or microbatches meets the options.
        PartitionError: More stages than layers or ranks.
    """
    specs = SCHEDULES.values() if options.schedule == "auto" else (SCHEDULES[options.schedule],)
    tried = [
        spec
        for spec in specs
        if (spec.auto or options.schedule != "auto") and spec.opposite == (len(model.starts) > 1)
    ]
    placed = [s for spec in tried if spec.place for s in _placed_shapes(model, options, spec)]
    yield from placed
    chained = tuple(spec.name for spec in tried if not spec.place)
    if not chained:
        if not placed:
            raise _cannot_place(model, options, tried[0])
        return
    try:
        yield from tuple(_chained_shapes(model, options, chained))
    except (ConfigurationError, PartitionError):
        if not placed:
            raise


def _chained_shapes(
    model: CostModel, options: PlanOptions, schedules: Sequence[str]
) -> Iterator[Shape]:
    """Yields shapes with one stage on each rank, or on several."""
    counts = pipeline_counts(model, options)
    free = options.num_stages == options.num_microbatches == options.num_replicas == "auto"
    for num_pipelines in counts:
        num_ranks = model.cluster.num_ranks // num_pipelines
        samples = options.global_batch_size // num_pipelines
        for num_stages in _stage_counts(model, options, num_ranks):
            if model.is_folded and num_stages != num_ranks:
                continue  # Stages of several passes have no replicas.
            if num_stages == 1 < num_ranks and free and model.cluster.num_ranks in counts:
                continue  # The same as one pipeline for each rank, which is proposed as well.
            for num_microbatches in microbatch_counts(model, options, num_pipelines):
                sizes = split_evenly(samples, num_microbatches)
                # Without a neighbour there is nothing to overlap: all schedules are the same.
                for schedule in schedules[:1] if num_stages == 1 else schedules:
                    takes = SCHEDULES[schedule].takes
                    if num_stages == 1 or takes(num_stages, num_microbatches):
                        yield Shape(num_pipelines, num_ranks, num_stages, sizes, schedule)


def _placed_shapes(model: CostModel, options: PlanOptions, spec: ScheduleSpec) -> Iterator[Shape]:
    """Yields shapes with several stages on each rank, without replicas."""
    stage_count, num_layers = options.num_stages, model.num_layers
    chains = [b - a for a, b in pairwise((*model.starts, num_layers))]  # lengths
    replicas = options.num_replicas if isinstance(options.num_replicas, tuple) else ()
    if replicas:
        stage_count = len(replicas)
    if options.num_replicas != "auto" and set(replicas or (options.num_replicas,)) != {1}:
        return
    for num_pipelines in _pipelines_possible(model, options):
        num_ranks = model.cluster.num_ranks // num_pipelines
        samples = options.global_batch_size // num_pipelines
        several = (len(chains),) if spec.opposite else spec.stages_per_rank
        counts = [v * num_ranks for v in several] if stage_count == "auto" else [stage_count]
        for num_stages in counts:
            if num_stages > num_layers:
                continue
            if chains[1:] and (num_stages != len(chains) * num_ranks or num_ranks > min(chains)):
                continue  # Chains in opposite directions have a stage on every rank.
            for num_microbatches in microbatch_counts(model, options, num_pipelines):
                if num_microbatches <= samples and spec.can_place(
                    num_stages, num_ranks, num_microbatches
                ):
                    sizes = split_evenly(samples, num_microbatches)
                    yield Shape(num_pipelines, num_ranks, num_stages, sizes, spec.name)


def _cannot_place(model: CostModel, options: PlanOptions, spec: ScheduleSpec) -> ConfigurationError:
    ranks = [model.cluster.num_ranks // p for p in _pipelines_possible(model, options)]
    if spec.opposite:
        sizes = [b - a for a, b in pairwise((*model.starts, model.num_layers))]
        return ConfigurationError(
            f"schedule={spec.name} gives every rank one stage of each of the {len(sizes)} backbones, which have "
            f"{sizes} layers: it needs pipelines of two ranks or more, and no more than {min(sizes)}, num_stages="
            f"auto or {len(sizes)} times the ranks of a pipeline, and no replicas; got num_stages="
            f"{options.num_stages}, num_microbatches={options.num_microbatches}, num_replicas="
            f"{options.num_replicas} and pipelines of {ranks} ranks"
        )
    twice = "exactly twice as many" if spec.most_per_rank == 2 else "twice as many, at least,"
    grouped = " num_microbatches a multiple of them too," if spec.whole_groups else ""
    return ConfigurationError(
        f"schedule={spec.name} gives every rank several stages: it needs pipelines of two ranks or more, "
        f"num_stages a multiple of the ranks of a pipeline ({twice} and no more than "
        f"the {model.num_layers} layers),{grouped} and no replicas; "
        f"got num_stages={options.num_stages}, num_microbatches={options.num_microbatches}, "
        f"num_replicas={options.num_replicas} and pipelines of {ranks} ranks"
    )


def _pipelines_possible(model: CostModel, options: PlanOptions) -> list[int]:
    """Returns how many pipelines may stand side by side: numbers that divide ranks and batch."""
    num_ranks, batch = model.cluster.num_ranks, options.global_batch_size
    possible = [p for p in range(1, num_ranks + 1) if num_ranks % p == 0 and batch % p == 0]
    if options.data_parallel == "auto":
        return possible
    if options.data_parallel not in possible:
        raise ConfigurationError(
            f"data_parallel={options.data_parallel} must divide the {num_ranks} ranks and the "
            f"global batch of {batch} samples; possible are {possible}"
        )
    return [options.data_parallel]


def pipeline_counts(model: CostModel, options: PlanOptions) -> tuple[int, ...]:
    """Returns how many pipelines with one stage or more on each rank may stand side by side."""
    num_ranks, batch = model.cluster.num_ranks, options.global_batch_size
    possible = _pipelines_possible(model, options)
    num_microbatches = options.num_microbatches
    enough = [p for p in possible if num_microbatches == "auto" or batch // p >= num_microbatches]
    if not enough:
        raise ConfigurationError(
            f"num_microbatches={num_microbatches} is more than the {batch // possible[0]} samples of a "
            "pipeline's batch; use fewer microbatches, fewer pipelines or a larger batch"
        )
    possible = enough
    fixed = ranks_of_pipeline(options.num_stages, options.num_replicas)
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
        check_partition(model.num_layers, stages, num_ranks // possible[0])
    if not any(_stage_counts(model, options, num_ranks // p) for p in fitting):
        raise ConfigurationError(
            f"num_replicas={options.num_replicas} alone needs pipelines of as many ranks or a multiple, for at "
            f"most {model.num_layers} stages (one a layer); possible are pipelines of "
            f"{[num_ranks // p for p in fitting]} ranks"
        )
    return fitting


def _stage_counts(model: CostModel, options: PlanOptions, num_ranks: int) -> tuple[int, ...]:
    num_layers, num_replicas = model.num_layers, options.num_replicas
    if isinstance(num_replicas, tuple):
        check_partition(num_layers, len(num_replicas), num_ranks)
        return (len(num_replicas),)
    if options.num_stages != "auto":
        check_partition(num_layers, options.num_stages, num_ranks)
        return (options.num_stages,)
    return tuple(
        s
        for s in range(1, min(num_layers, num_ranks) + 1)
        if (num_replicas == "auto" or s * num_replicas == num_ranks)
        and (num_ranks <= MOST_UNEQUAL_RANKS or num_ranks % s == 0)
    )


def microbatch_counts(
    model: CostModel, options: PlanOptions, num_pipelines: int
) -> tuple[int, ...]:
    """Returns numbers of microbatches to try.

    These are all for few samples. For more they are the divisors, which leave no microbatch larger than others,
    powers of two and three times them, and these times the ranks of a pipeline, for schedules that move groups.
    """
    if options.num_microbatches != "auto":
        return (options.num_microbatches,)
    samples = options.global_batch_size // num_pipelines
    if samples <= FEW_SAMPLES:
        return tuple(range(1, samples + 1))
    most = samples if model.cluster.memory_bytes is not None else min(samples, MOST_MICROBATCHES)
    num_ranks = model.cluster.num_ranks // num_pipelines
    powers = {factor << shift for factor in (1, 3) for shift in range(most.bit_length())}
    divisors = [d for d in range(1, isqrt(samples) + 1) if samples % d == 0]
    divisors += [samples // d for d in divisors]
    counts = {*powers, *(num_ranks * power for power in powers), *divisors}
    return tuple(sorted(count for count in counts if count <= most))


def replicas_of(options: PlanOptions, shape: Shape) -> Iterator[tuple[int, ...]]:
    """Yields ways to share the ranks of a pipeline among its stages.

    Many ranks get equal shares only. Shares that leave a replica without a microbatch are left out unless they
    are asked for.
    """
    num_replicas, num_stages = options.num_replicas, shape.num_stages
    if shape.stages_per_rank > 1:
        yield (1,) * num_stages
        return
    if isinstance(num_replicas, tuple):
        yield num_replicas
        return
    if num_replicas != "auto":
        yield (num_replicas,) * num_stages
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
    """Counts the ways in which the layers and ranks of a shape can be shared among its stages."""
    if len(model.starts) > 1:
        sizes = [b - a for a, b in pairwise((*model.starts, model.num_layers))]
        return prod(comb(size - 1, shape.num_ranks - 1) for size in sizes)
    cuts = comb(model.num_layers - 1, shape.num_stages - 1)
    if shape.stages_per_rank > 1:
        return cuts
    return cuts * comb(shape.num_ranks - 1, shape.num_stages - 1)


def all_cuts(model: CostModel, options: PlanOptions, shape: Shape) -> Iterator[tuple[Cut, ...]]:
    """Yields every way to cut."""
    num_layers, starts = model.num_layers, model.starts
    inner = shape.num_stages // len(starts) - 1
    for replicas in replicas_of(options, shape):
        chains = pairwise((*starts, num_layers))
        for marks in product(*(combinations(range(a + 1, b), inner) for a, b in chains)):
            firsts = [i for a, cuts in zip(starts, marks, strict=True) for i in (a, *cuts)]
            yield tuple(zip(firsts, (*firsts[1:], num_layers), replicas, strict=True))


def baseline_cuts(
    model: CostModel, options: PlanOptions, shape: Shape
) -> Iterator[tuple[Cut, ...]]:
    """Yields the cuts that the rule named by `options.partition` makes of a shape.

    `uniform` (equal numbers of layers), `parameters` (equal parameter bytes) and `minimax` (the slowest
    stage as fast as possible) say nothing of replicas: all ways to share the ranks are proposed.
    `diffusionpipe` proposes the Pareto front of its recurrences, `pipedream` the one cut of its own; both choose
    the replicas as well, and propose nothing if others are asked for.
    """
    if options.partition in PARTITIONS_WITH_REPLICAS:
        allowed = set(replicas_of(options, shape)) if options.num_replicas != "auto" else None
        if options.partition == "diffusionpipe":
            proposed = diffusionpipe_cuts(model, shape)
        else:
            proposed = pipedream_cuts(model, shape.num_ranks, shape.sizes[0], shape.num_stages)
        for cuts in proposed:
            if allowed is None or tuple(replicas for _, _, replicas in cuts) in allowed:
                yield cuts
        return
    size, layers = shape.sizes[0], model.backbone.layers
    if options.partition == "uniform":
        weights = [1.0] * len(layers)
    elif options.partition == "parameters":
        weights = [float(layer.parameter_bytes) for layer in layers]
    else:
        weights = [layer.forward_s.at(size) + layer.backward_s.at(size) for layer in layers]
    firsts = chain_cuts(weights, model.starts, shape.num_stages // len(model.starts))
    for replicas in replicas_of(options, shape):
        yield tuple(zip(firsts, (*firsts[1:], len(layers)), replicas, strict=True))


def diffusionpipe_cuts(model: CostModel, shape: Shape) -> Iterator[tuple[Cut, ...]]:
    """Finds the front of (W, Y) by DiffusionPipe's recurrences.

    Differs from the paper in one point: a microbatch is not split over the replicas of a stage but the
    replicas take turns, so that a stage of `r` replicas takes `1 / r` of its time.
    """
    size, num_layers = shape.sizes[0], model.num_layers

    def stage_cost(first: int, stop: int, replicas: int) -> tuple[float, float]:
        run = LayerRun(first, stop)
        backward_s = model.backward_s(run, size)
        busy_s = model.forward_s(run, size) + backward_s
        link_s = 0.0
        if stop < num_layers:
            link_s = 2 * model.cluster.p2p.seconds(model.boundary_bytes(run, size))
        group = replicas * shape.num_pipelines
        sync_s = model.cluster.all_reduce.all_reduce_s(model.gradient_bytes(run), group)
        return max(busy_s / replicas, link_s), max(sync_s - backward_s, 0.0)

    fronts = partition_fronts(num_layers, shape.num_ranks, shape.num_stages, stage_cost)
    for partition in fronts.get((shape.num_stages, shape.num_ranks), ()):
        yield partition.cuts


def pipedream_cuts(
    model: CostModel, num_ranks: int, samples: float, num_stages: int
) -> Iterator[tuple[Cut, ...]]:
    """Finds the one cut of PipeDream's recurrence, with the number of stages as one more index.

        T(i..j, m) = 1/m max(sum of T_l, sum of W_l)
        A(j, m)    = min over i, m' of max(A(i, m - m'), 2 C_i, T(i+1..j, m'))

    It makes the slowest of stages and links as fast as possible, and knows neither microbatches nor a flush;
    replicas sum their gradients after every batch of `samples`. The published code differs: it adds the time of the
    sums to that of a stage, and counts links only with a flag.

    Source:
        PipeDream, Harlap et al. (2018), https://arxiv.org/abs/1806.03377
    """
    cluster, num_layers = model.cluster, model.num_layers

    def stage_cost(first: int, stop: int, replicas: int) -> tuple[float, float]:
        run, before = LayerRun(first, stop), LayerRun(0, first)
        compute_s = model.forward_s(run, samples) + model.backward_s(run, samples)
        sync_s = cluster.all_reduce.all_reduce_s(model.gradient_bytes(run), replicas)
        link_s = 2 * cluster.p2p.seconds(model.boundary_bytes(before, samples)) if first else 0.0
        return max(compute_s / replicas, sync_s / replicas, link_s), 0.0

    fronts = partition_fronts(num_layers, num_ranks, num_stages, stage_cost)
    for partition in fronts.get((num_stages, num_ranks), ())[:1]:
        yield partition.cuts
