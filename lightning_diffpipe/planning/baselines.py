"""Ways to cut that others use: to compare with, and to choose by name."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_diffpipe.planning.chains import chain_cuts
from lightning_diffpipe.planning.cost import CostModel, LayerRun
from lightning_diffpipe.planning.options import PARTITIONS_WITH_REPLICAS, PlanOptions
from lightning_diffpipe.planning.partition import Cut, minimax_cuts, partition_fronts
from lightning_diffpipe.planning.pipedream import pipedream_code, pipedream_published
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
