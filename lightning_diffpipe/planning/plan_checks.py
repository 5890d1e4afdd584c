"""Whether the parts of a plan belong together: what somebody who edits one by hand gets wrong."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lightning_diffpipe.errors import PlanError
from lightning_diffpipe.planning.instruction import Encode
from lightning_diffpipe.planning.pipeline_costs import TABLES
from lightning_diffpipe.planning.schedules import DEFAULT_SCHEDULE

if TYPE_CHECKING:
    from lightning_diffpipe.planning.options import PlanOptions
    from lightning_diffpipe.planning.plan import PipelinePlan

SAME_STEP = 1e-6
"""Steps that differ by a smaller share are the same; sums of seconds depend on their order."""

_DEFAULTS = {"schedule": DEFAULT_SCHEDULE}
"""Of the strategy, where it is not `auto`: nobody has asked for it."""

_NAMES = (
    "num_stages", "num_microbatches", "num_replicas", "data_parallel", "schedule", "filling", "frozen_group_size",
)  # fmt: skip


def check_options(plan: PipelinePlan) -> None:
    """The options are those of these stages, and every pipeline and microbatch gets its samples.

    Raises:
        PlanError: Not so; says which, with the numbers.
    """
    options, replicas = plan.options, _replicas(plan)
    batch, pipelines, microbatches = (
        options.global_batch_size,
        plan.num_pipelines,
        plan.num_microbatches,
    )
    if batch % pipelines:
        raise PlanError(
            f"plan: options.global_batch_size: {batch} samples cannot be divided evenly among "
            f"data_parallel={pipelines} pipelines"
        )
    if plan.samples_per_pipeline < microbatches:
        raise PlanError(
            f"plan: options.num_microbatches: {microbatches} microbatches need a sample each, but a pipeline "
            f"has {plan.samples_per_pipeline} (global_batch_size={batch}, data_parallel={pipelines})"
        )
    if options.num_stages not in ("auto", plan.num_stages):
        raise PlanError(
            f"plan: options.num_stages: {options.num_stages}, but there are {plan.num_stages} stages"
        )
    named = options.num_replicas
    named = (named,) * plan.num_stages if isinstance(named, int) else named
    if named not in ("auto", replicas):
        raise PlanError(
            f"plan: options.num_replicas: {options.num_replicas}, but the stages have {list(replicas)}"
        )


def _replicas(plan: PipelinePlan) -> tuple[int, ...]:
    """Ranks of every stage; those of later passes are the same."""
    return tuple(stage.num_replicas for stage in plan.stages[: plan.num_stages])


def check_costs(plan: PipelinePlan) -> None:
    """Costs are there for every microbatch, stage, frozen part and rank, and are those of these stages.

    Raises:
        PlanError: A table has another length, or is of another cut; says which.
    """
    costs = plan.costs
    if costs is None:
        return
    if costs.sizes != plan.microbatch_sizes:
        raise PlanError(
            f"plan: costs.sizes: {list(costs.sizes)}, but microbatches have "
            f"{list(plan.microbatch_sizes)} samples"
        )
    ranks = plan.ranks_per_pipeline
    parts = 1 + max((part.index for part in plan.pieces or plan.frozen_parts), default=-1)
    rows = [(name, len(getattr(costs, name)), len(plan.stages), "stages") for name in TABLES]
    if costs.split_s:
        rows.append(("split_s", len(costs.split_s), len(plan.stages), "stages"))
    if costs.all_reduce_s:
        rows.append(("all_reduce_s", len(costs.all_reduce_s), ranks, "ranks"))
    if parts:  # with frozen layers that run where they are called, none is named
        rows.append(("encode_s", len(costs.encode_s), parts, "frozen parts"))
    for name, got, wanted, what in rows:
        if got != wanted:
            raise PlanError(f"plan: costs.{name}: {got} numbers, but there are {wanted} {what}")
    if costs.first_layers not in ((), plan.first_layers):
        raise PlanError(
            "plan: costs.first_layers: the costs are of stages that begin at layers "
            f"{list(costs.first_layers)}, but the plan's begin at {list(plan.first_layers)}; remove costs, or "
            "have these stages planned"
        )


def check_promise(plan: PipelinePlan) -> None:
    """The step that is promised is what the programs take by the plan's own costs.

    Raises:
        PlanError: Not so; names both.
    """
    if plan.costs is None:
        return
    promised_s, simulated_s = plan.planned.iteration_s, plan.step_s(plan.costs)
    if not math.isclose(promised_s, simulated_s, rel_tol=SAME_STEP, abs_tol=1e-12):
        raise PlanError(
            f"plan: planned.iteration_s: {promised_s:.7g} s are promised, but these programs take "
            f"{simulated_s:.7g} s by the plan's own costs; remove costs, whose step, memory and bubbles would be "
            "told for another plan, or let `diffpipe plan` make the plan, with the options that you want"
        )


def check_encodes(plan: PipelinePlan) -> None:
    """Every frozen part or piece is run once, on its rank.

    Raises:
        PlanError: Names the part.
    """
    known = {piece.index: piece.rank for piece in plan.pieces or plan.frozen_parts}
    for rank, program in enumerate(plan.programs):
        for part in (i.part for i in program if isinstance(i, Encode)):
            if known.pop(part, None) != rank:
                raise PlanError(
                    f"plan: programs.{rank}: E{part} is not a frozen part of this rank, or is run twice"
                )
    if known:
        raise PlanError(f"plan: programs: frozen part {min(known)} is never run")


def check_wishes(plan: PipelinePlan, wishes: PlanOptions, num_pipelines: int) -> None:
    """Nothing else is asked for than a plan does; what is left open is not compared.

    Args:
        plan: A plan that is followed as it is.
        wishes: What is asked for besides.
        num_pipelines: Pipelines that run side by side; a plan may be followed by more than it was made for.

    Raises:
        PlanError: Names every option that differs, with both values.
    """
    wanted = {name: getattr(wishes, name) for name in _NAMES}
    if isinstance(wishes.num_replicas, int):
        wanted["num_replicas"] = (wishes.num_replicas,) * plan.num_stages
    decided = _decided(plan, num_pipelines)
    odd = {
        name: value
        for name, value in decided.items()
        if wanted[name] not in ("auto", value, _DEFAULTS.get(name))
    }
    if odd:
        have = ", ".join(f"{name}={value}" for name, value in odd.items())
        asked = ", ".join(f"{name}={getattr(wishes, name)}" for name in odd)
        raise PlanError(
            f"the plan has {have}, but {asked} is asked for beside it, and a plan that is given is followed as it "
            f"is: leave {', '.join(odd)} out, or plan again with {asked}"
        )


def _decided(plan: PipelinePlan, num_pipelines: int) -> dict[str, object]:
    """What a plan decides, by option; without what is the same there however it is decided."""
    options, replicas = plan.options, _replicas(plan)
    decided: dict[str, object] = {
        "num_stages": plan.num_stages,
        "num_microbatches": plan.num_microbatches,
        "num_replicas": replicas,
        "data_parallel": num_pipelines,
    }
    if plan.num_stages > 1:
        decided["schedule"] = options.schedule
    encodes = any(isinstance(i, Encode) for program in plan.programs for i in program)
    if encodes and plan.ranks_per_pipeline > 1:
        decided["filling"] = options.filling
        if options.frozen_splittable and options.frozen_group_size != "auto":
            decided["frozen_group_size"] = options.frozen_group_size
    return decided
