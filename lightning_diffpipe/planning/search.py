"""The search: which stages, replicas, microbatches, pipelines and schedule make the fastest step?

Closed forms propose, the simulator decides: every proposal is run on paper, with all links, uneven
microbatches and frozen work, and the fastest that fits into memory wins.
"""

from __future__ import annotations

from dataclasses import replace

from lightning_diffpipe.errors import PlanError
from lightning_diffpipe.planning.cluster import Cluster
from lightning_diffpipe.planning.cost import CostModel, LayerRun
from lightning_diffpipe.planning.frozen_parts import encode_parts, split_evenly
from lightning_diffpipe.planning.lowering import lower, prefix_frozen
from lightning_diffpipe.planning.memory import peak_memory_bytes
from lightning_diffpipe.planning.options import PlanOptions
from lightning_diffpipe.planning.partition import Stage
from lightning_diffpipe.planning.pipeline_costs import pipeline_costs
from lightning_diffpipe.planning.plan import PipelinePlan, Planned
from lightning_diffpipe.planning.profile import ModelProfile
from lightning_diffpipe.planning.proposals import Candidate, candidates
from lightning_diffpipe.planning.schedule import Placement
from lightning_diffpipe.planning.schedules import SCHEDULES
from lightning_diffpipe.planning.simulator import simulate


def find_plan(profile: ModelProfile, cluster: Cluster, options: PlanOptions) -> PipelinePlan:
    """Finds the fastest plan.

    Args:
        profile: What layers cost.
        cluster: What ranks and links there are. All ranks are used.
        options: Wishes and limits.

    Returns:
        The plan with the shortest simulated step among those that fit into memory. Among equals the
        one with fewer stages, then fewer microbatches.

    Raises:
        ConfigurationError: The options cannot be met with these ranks and this batch.
        PartitionError: More stages than layers or ranks.
        PlanError: Nothing fits into memory; says by how much.
    """
    model = CostModel(profile, cluster, options.optimizer_bytes_factor)
    best: PipelinePlan | None = None
    smallest: PipelinePlan | None = None
    for candidate in candidates(model, options):
        plan = evaluate(model, options, candidate)
        need = max(plan.planned.peak_memory_bytes)
        if smallest is None or need < max(smallest.planned.peak_memory_bytes):
            smallest = plan
        fits = cluster.memory_bytes is None or need <= cluster.memory_bytes
        if fits and (best is None or _is_faster(plan, best)):
            best = plan
    if best is None:
        raise _nothing_fits(cluster, options, smallest)
    return best


def _is_faster(plan: PipelinePlan, best: PipelinePlan) -> bool:
    return plan.planned.iteration_s < best.planned.iteration_s * (1 - 1e-9)


def evaluate(model: CostModel, options: PlanOptions, candidate: Candidate) -> PipelinePlan:
    """Simulates one proposal and writes it down as a plan."""
    profile = model.profile
    placement = Placement.of_replicas([replicas for _, _, replicas in candidate.cuts])
    samples = options.global_batch_size // candidate.num_pipelines
    sizes = split_evenly(samples, candidate.num_microbatches)
    runs = [LayerRun(0, first, stop) for first, stop, _ in candidate.cuts]
    parts = (
        encode_parts(sizes, placement.num_ranks, options.frozen_splittable)
        if profile.encoders
        else ()
    )
    costs = pipeline_costs(model, placement, runs, sizes, candidate.num_pipelines, parts)
    schedule = SCHEDULES[candidate.schedule](placement, candidate.num_microbatches)
    if parts:
        schedule = prefix_frozen(schedule, parts)
    timeline = simulate(lower(schedule), costs)

    iteration_s = timeline.iteration_s
    work_s = sum(span.duration_s for span in timeline.spans)
    planned = Planned(
        iteration_s=iteration_s,
        bubble_ratio=timeline.bubble_ratio,
        unfilled_iteration_s=iteration_s,
        unfilled_bubble_ratio=timeline.bubble_ratio,
        frozen_s=sum(costs.encode_s),
        leftover_s=0.0,
        no_bubble_limit_s=work_s / placement.num_ranks,
        peak_memory_bytes=peak_memory_bytes(model, schedule, runs, sizes),
        samples_per_s=options.global_batch_size / iteration_s if iteration_s else 0.0,
    )
    resolved = replace(
        options,
        num_stages=len(candidate.cuts),
        num_microbatches=candidate.num_microbatches,
        num_replicas=tuple(replicas for _, _, replicas in candidate.cuts),
        data_parallel=candidate.num_pipelines,
        schedule=candidate.schedule,
        filling="none",
    )
    name = profile.backbones[0].name
    stages = tuple(
        Stage(index, name, first, stop - 1, replicas)
        for index, (first, stop, replicas) in enumerate(candidate.cuts)
    )
    return PipelinePlan(resolved, stages, schedule.programs, planned, costs)


def _nothing_fits(
    cluster: Cluster, options: PlanOptions, smallest: PipelinePlan | None
) -> PlanError:
    assert cluster.memory_bytes is not None
    if smallest is None:
        return PlanError(f"no plan meets {options} on {cluster.num_ranks} ranks")
    need = max(smallest.planned.peak_memory_bytes)
    return PlanError(
        f"no plan fits into {cluster.memory_bytes:,} bytes a rank: the smallest one found "
        f"(num_stages={smallest.num_stages}, num_microbatches={smallest.num_microbatches}) needs "
        f"{need:,}, {need - cluster.memory_bytes:,} too many"
    )
