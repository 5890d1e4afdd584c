"""Ways to cut that others use: to compare with, and to choose by name.

PipeDream's partitioner is here twice: as published, and as its code does it. Both cut a chain over workers so that
the slowest of stages and links is as fast as possible; they know neither microbatches nor a flush, since PipeDream
has none. They disagree about what a replicated stage costs: the paper takes the longer of computing and summing
gradients, the code takes both; and the code looks at links only when it is told to
(`--activation_compression_ratio`).

Sources:
    PipeDream, Harlap et al. (2018), https://arxiv.org/abs/1806.03377: the recurrence.
    `optimizer/optimizer_graph_hierarchical.py` of https://github.com/msr-fiddle/pipedream: the code's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lightning_diffpipe.planning.chains import chain_cuts
from lightning_diffpipe.planning.cost import CostModel, LayerRun
from lightning_diffpipe.planning.options import PARTITIONS_WITH_REPLICAS, PlanOptions
from lightning_diffpipe.planning.partition import Cut, minimax_cuts, partition_fronts
from lightning_diffpipe.planning.proposals import Shape, replicas_of


def baseline_cuts(
    model: CostModel, options: PlanOptions, shape: Shape
) -> Iterator[tuple[Cut, ...]]:
    """The cuts that the rule named by `options.partition` makes of a shape.

    `uniform` (equal numbers of layers), `parameters` (equal parameter bytes) and `minimax` (the slowest
    stage as fast as possible) say nothing of replicas: all ways to share the ranks are proposed.
    `diffusionpipe` proposes the Pareto front of its recurrences, `diffusionpipe_exact` the same with the
    time that really hides a synchronisation, `pipedream` and `pipedream_code` the one cut of theirs; all
    of these choose the replicas as well, and propose nothing if others are asked for.
    """
    if options.partition in PARTITIONS_WITH_REPLICAS:
        wanted = set(replicas_of(options, shape)) if options.num_replicas != "auto" else None
        for cuts in _cuts_with_replicas(model, options.partition, shape):
            if wanted is None or tuple(replicas for _, _, replicas in cuts) in wanted:
                yield cuts
        return
    size, layers = shape.sizes[0], model.profile.backbones[0].layers
    if options.partition == "uniform":
        weights = [1.0] * len(layers)
    elif options.partition == "parameters":
        weights = [float(layer.parameter_bytes) for layer in layers]
    else:
        weights = [layer.forward_s.at(size) + layer.backward_s.at(size) for layer in layers]
    if shape.spec.opposite:
        firsts = chain_cuts(weights, model.starts, shape.num_ranks)
    else:
        firsts = minimax_cuts(weights, shape.num_stages)
    for replicas in replicas_of(options, shape):
        yield tuple(zip(firsts, (*firsts[1:], len(layers)), replicas, strict=True))


def _cuts_with_replicas(
    model: CostModel, partition: str, shape: Shape
) -> Iterator[tuple[Cut, ...]]:
    """What the rules propose that choose the replicas as well."""
    if partition in ("diffusionpipe", "diffusionpipe_exact"):
        yield from diffusionpipe_cuts(model, shape, partition == "diffusionpipe_exact")
        return
    rule = pipedream_published if partition == "pipedream" else pipedream_code
    found = rule(model, shape.num_ranks, shape.sizes[0], shape.num_stages)
    if found is not None:
        yield found.cuts


def diffusionpipe_cuts(
    model: CostModel, shape: Shape, exact: bool = False
) -> Iterator[tuple[Cut, ...]]:
    """The front of (W, Y), DiffusionPipe's recurrences.

    Differs from the paper in one point: a microbatch is not split over the replicas of a stage but the
    replicas take turns, so that a stage of `r` replicas takes `1 / r` of its time.

    Args:
        model: The cost model.
        shape: Everything but the cuts.
        exact: As printed, a stage's own last backward hides its synchronisation. In truth the last
            backwards of all stages in front of it do so as well, since it is done before them.
    """
    size, num_layers = shape.sizes[0], model.num_layers()

    def stage_cost(first: int, stop: int, replicas: int) -> tuple[float, float]:
        run = LayerRun(0, first, stop)
        backward_s = model.backward_s(run, size)
        busy_s = model.forward_s(run, size) + backward_s
        link_s = 0.0
        if stop < num_layers:
            link_s = 2 * model.cluster.p2p.seconds(model.boundary_bytes(run, size))
        group = replicas * shape.num_pipelines
        sync_s = model.cluster.all_reduce.all_reduce_s(model.gradient_bytes(run), group)
        hidden_s = model.backward_s(LayerRun(0, 0, stop), size) if exact else backward_s
        return max(busy_s / replicas, link_s), max(sync_s - hidden_s, 0.0)

    fronts = partition_fronts(num_layers, shape.num_ranks, shape.num_stages, stage_cost)
    for partition in fronts.get((shape.num_stages, shape.num_ranks), ()):
        yield partition.cuts


Cost = Callable[[int, int, int], float]


@dataclass(frozen=True, slots=True)
class PipeDreamPartition:
    """A cut and the time per batch that the recurrence promises for it."""

    slowest_s: float
    cuts: tuple[Cut, ...]


def pipedream_published(
    model: CostModel, num_ranks: int, samples: float, num_stages: int | None = None
) -> PipeDreamPartition | None:
    """The recurrence of the paper.

        T(i..j, m) = 1/m max(sum of T_l, sum of W_l)
        A(j, m)    = min over i, m' of max(A(i, m - m'), 2 C_i, T(i+1..j, m'))

    Args:
        model: The cost model. Replicas of a stage sum their gradients after every batch.
        num_ranks: Workers, all of which are used.
        samples: Samples of a batch.
        num_stages: Keep to so many stages; None leaves it to the recurrence, as PipeDream does.
    """
    link = model.cluster.all_reduce

    def stage_s(first: int, stop: int, replicas: int) -> float:
        run = LayerRun(0, first, stop)
        compute_s = model.forward_s(run, samples) + model.backward_s(run, samples)
        sync_s = link.all_reduce_s(model.gradient_bytes(run), replicas)
        return max(compute_s, sync_s) / replicas

    return _recurrence(model, num_ranks, samples, stage_s, links=True, num_stages=num_stages)


def pipedream_code(
    model: CostModel,
    num_ranks: int,
    samples: float,
    num_stages: int | None = None,
    *,
    links: bool = False,
) -> PipeDreamPartition | None:
    """What the published code computes, on one level of bandwidth.

    Args:
        model: The cost model.
        num_ranks: Workers, all of which are used.
        samples: Samples of a batch.
        num_stages: Keep to so many stages.
        links: Whether links count: the code's `--activation_compression_ratio 1`.
    """
    bandwidth = model.cluster.all_reduce.bandwidth_bytes_per_s

    def stage_s(first: int, stop: int, replicas: int) -> float:
        run = LayerRun(0, first, stop)
        compute_s = model.forward_s(run, samples) + model.backward_s(run, samples)
        passed = 4 * (replicas - 1) * model.parameter_bytes(run) / replicas
        return (compute_s + passed / bandwidth) / replicas

    return _recurrence(model, num_ranks, samples, stage_s, links=links, num_stages=num_stages)


def _recurrence(
    model: CostModel,
    num_ranks: int,
    samples: float,
    stage_s: Cost,
    *,
    links: bool,
    num_stages: int | None,
) -> PipeDreamPartition | None:
    """A(j, m), with the number of stages as one more index so that it can be prescribed."""
    num_layers = model.num_layers()
    most = min(num_stages or num_layers, num_ranks, num_layers)
    cost = {
        (first, stop, r): stage_s(first, stop, r)
        for first in range(num_layers)
        for stop in range(first + 1, num_layers + 1)
        for r in range(1, num_ranks + 1)
    }
    link_s = [0.0] * num_layers
    for stop in range(1, num_layers):
        num_bytes = model.boundary_bytes(LayerRun(0, 0, stop), samples)
        link_s[stop] = 2 * model.cluster.p2p.seconds(num_bytes) if links else 0.0

    best = {
        (j, m): PipeDreamPartition(cost[0, j, m], ((0, j, m),))
        for j in range(1, num_layers + 1)
        for m in range(1, num_ranks + 1)
    }
    by_stages = {1: best[num_layers, num_ranks]}
    for stages in range(2, most + 1):
        before, best = best, {}
        for j in range(stages, num_layers + 1):
            for m in range(stages, num_ranks + 1):
                slowest_s, choice = math.inf, None
                for i in range(stages - 1, j):
                    for r in range(1, m - stages + 2):
                        head = before.get((i, m - r))
                        if head is None or head.slowest_s >= slowest_s:
                            continue
                        found_s = max(head.slowest_s, link_s[i], cost[i, j, r])
                        if found_s < slowest_s:
                            slowest_s, choice = found_s, (head, (i, j, r))
                if choice is not None:
                    best[j, m] = PipeDreamPartition(slowest_s, (*choice[0].cuts, choice[1]))
        if (num_layers, num_ranks) in best:
            by_stages[stages] = best[num_layers, num_ranks]
    if num_stages is not None:
        return by_stages.get(num_stages)
    return min(by_stages.values(), key=lambda partition: partition.slowest_s)
