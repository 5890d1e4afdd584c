"""A module cut as planned, and this rank's part of it connected to the others'.

    fold -> check -> groups -> who holds what -> probe -> place parameters -> engine
                                                   |
                                        verify: the last moment at which the module is whole

The plan says which layers each stage runs; from it follows what each rank holds, receives and sends. What a
pipeline would compute differently from one process is refused here, before anything is placed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_diffpipe.comm.mesh import Mesh, RankLayout
from lightning_diffpipe.errors import ConfigurationError, PlanError, raised_by_all
from lightning_diffpipe.graph.chains import Chains, find_chains
from lightning_diffpipe.graph.cut import Cut
from lightning_diffpipe.graph.fake import untouched
from lightning_diffpipe.graph.forms import Forms, FormView, StepForm
from lightning_diffpipe.graph.interception import Interception
from lightning_diffpipe.graph.layer import LayerGraph
from lightning_diffpipe.graph.placement import place_parameters
from lightning_diffpipe.graph.probe import fold, reprobe
from lightning_diffpipe.graph.side_effects import require_hooks_within_stages
from lightning_diffpipe.graph.step import StepCall, batch_signature
from lightning_diffpipe.planning.instruction import (
    Encode,
    ExchangeFrozen,
    ForwardNoGrad,
)
from lightning_diffpipe.planning.laws import messages_of_edge
from lightning_diffpipe.planning.plan import PipelinePlan
from lightning_diffpipe.planning.schedule import Schedule
from lightning_diffpipe.planning.schedules import SCHEDULES
from lightning_diffpipe.profiling.state import placed
from lightning_diffpipe.runtime.batch_layout import BatchLayout
from lightning_diffpipe.runtime.engine import Engine
from lightning_diffpipe.runtime.free_running import FreeRunningEngine
from lightning_diffpipe.runtime.microbatch import microbatch_sizes, num_samples, split
from lightning_diffpipe.runtime.partitioned import PartitionedStepCache, Step, cut_for
from lightning_diffpipe.runtime.reduction import GradientReducer, holders_of
from lightning_diffpipe.runtime.relay import RelayChannel, RelayView
from lightning_diffpipe.runtime.residents import (
    owners_of,
    require_one_home,
    residents_of,
    warn_of_statistics,
    whereabouts,
)
from lightning_diffpipe.training.mean_check import MeanCheck
from lightning_diffpipe.training.pipeline import Pipeline, Process
from lightning_diffpipe.training.refusals import refuse_own_generators
from lightning_diffpipe.training.step_watch import StepWatch
from lightning_diffpipe.training.verification import WholeRun, compare, run_whole
from lightning_diffpipe.viewing.ascii import waiting

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProbedStep:
    """A step on a batch, and the layers it was found to call.

    Attributes:
        module: The whole module, on the host, equal on all ranks.
        step: Module and batch to loss.
        batch: One pipeline's batch, on the host.
        small: The batch the graph was probed with.
        graph: The layers.
        forms: Those that the step takes; the graph is that of the widest.
    """

    module: nn.Module
    step: Step
    batch: Any
    small: Any
    graph: LayerGraph
    forms: Forms

    @property
    def widest(self) -> Step:
        """The step in the form of the graph."""
        return self.forms.widest.of_step(self.step) if self.forms.widest else self.step


def assemble(
    probed: ProbedStep,
    plan: PipelinePlan,
    process: Process,
    *,
    seed: int,
    check_finite: bool = False,
    verify: bool = False,
) -> Pipeline:
    """Cuts a module as planned and connects this rank; every rank calls it at the same time.

    Args:
        probed: The module and its step; layers unfolded.
        plan: What all ranks do.
        process: Where this rank runs.
        seed: Seed of the run.
        check_finite: Look for NaN and infinity at stage boundaries.
        verify: Compare one batch with the whole module.

    Raises:
        PlanError: The plan was made for other layers.
        ConfigurationError: The step keeps state outside of layers, changes weights, or has its own generators.
        GraphError: `verify` found a difference.
    """
    probed, positions, schedule, pieces = _cut_as_planned(probed, plan)
    module, graph, placement = probed.module, probed.graph, schedule.placement
    if process.rank == 0:
        warn_of_statistics(graph, pieces, placement)
    mesh, holders = _connect(process, schedule, pieces, graph.trained)
    residents = residents_of(module, pieces, placement)
    resident = residents[mesh.local_rank]
    owners = owners_of(module, pieces, residents, placement)
    known = _planned_graphs(probed, plan, process.device)
    interception = Interception(module).install()
    with interception.uninstalled_on_error():
        if process.rank == 0:  # the last moment at which the module is whole
            _warn_unless_mean(probed, plan, interception)
        step_forms = _forms_of(probed, interception)
        whole = _run_whole(probed, plan, mesh, interception, seed) if verify else None
        place_parameters(module, resident, process.device)
        interception.refuse(whereabouts(pieces, placement))
        steps = PartitionedStepCache(
            module, probed.step, graph, positions, placement, mesh.local_rank, interception,
            process.device, known, probed.forms.widest, step_forms, probed.forms.throws_coins,
        )  # fmt: skip
        named = dict(module.named_parameters())
        trained = {n: named[n] for n in named if n in resident and n in graph.trained}
        size = None if plan.options.frozen_group_size == "auto" else plan.options.frozen_group_size
        layout = BatchLayout(module, probed.step, schedule, steps, mesh, seed, size)
        reducer = GradientReducer(mesh, trained, holders)
        engine = _engine(layout, reducer, check_finite, plan, list(trained.values()))
        if whole is not None:
            compare(module, engine, _on_device(probed.batch, process.device), trained, whole)
        relay = RelayView(module, interception, owners, RelayChannel(mesh))
        untrained = {name: p for name, p in named.items() if not p.requires_grad}
        watch = StepWatch(module, layout, _idle_here(module, resident - graph.trained), trained)
        return Pipeline(
            module, plan, graph, mesh, engine, resident, owners, trained, untrained, watch, seed,
            interception, relay,
        )  # fmt: skip


def _engine(
    layout: BatchLayout,
    reducer: GradientReducer,
    check_finite: bool,
    plan: PipelinePlan,
    trained: Sequence[nn.Parameter],
) -> Engine:
    """Returns what runs the plan, which may have no flush."""
    staleness = SCHEDULES[plan.options.schedule].staleness
    if staleness is None or not plan.runs_free:
        return Engine(layout, reducer, check_finite, picture=waiting)
    (stage,) = plan.placement.stages_of(layout.mesh.local_rank)
    delay = staleness(plan.placement, stage)
    return FreeRunningEngine(layout, reducer, trained, delay, check_finite)


def _require_own_parameters(plan: PipelinePlan, graph: LayerGraph, pieces: Cut) -> None:
    """Refuses what needs all stages of a batch at a time, where the pipeline is not flushed.

    Raises:
        ConfigurationError: Two stages hold a parameter, or the step returns a weight.
    """
    if not plan.runs_free:
        return
    name, remedy = plan.options.schedule, "choose a schedule that flushes, such as 1f1b"
    if graph.weighted:
        raise ConfigurationError(
            f'training_step returns a "weight" beside its loss, by which gradients are divided later, but with '
            f"schedule={name} stages step at different times; return a mean, or {remedy}"
        )
    holders: dict[str, int] = {}
    for stage in pieces.stages:
        for parameter in sorted(stage.parameters & graph.trained):
            if parameter in holders:
                raise ConfigurationError(
                    f"stages {holders[parameter]} and {stage.index} both train {parameter} (tied weights, a layer "
                    "that is called twice, or one that the step reads itself), but with "
                    f"schedule={name} each stage steps its own copy at another time, and they would come apart; "
                    f"{remedy}, or another num_stages"
                )
            holders[parameter] = stage.index


@raised_by_all()  # all have the same layers and plan
def _cut_as_planned(
    probed: ProbedStep, plan: PipelinePlan
) -> tuple[ProbedStep, tuple[int, ...], Schedule, Cut]:
    """Returns the step with folded layers, where they are cut, the schedule, and the pieces, if these can run."""
    module, step, small, graph = probed.module, probed.widest, probed.small, probed.graph
    positions = cut_positions(plan, graph)
    _require_chains(
        plan, find_chains(module, step, small, graph) if plan.num_backbones > 1 else None
    )
    graph, positions = fold(module, step, small, graph, positions)
    _require_stateless_glue(graph, plan)
    _require_unwritten_weights(graph, plan)
    if plan.ranks_per_pipeline > 1 and graph.generators:
        refuse_own_generators(module, step, small, graph)
    # Frozen parts are laid out anew for each batch, whose last one may be smaller.
    programs = tuple(
        tuple(i for i in program if not isinstance(i, Encode | ExchangeFrozen))
        for program in plan.schedule.programs
    )
    schedule = replace(plan.schedule, programs=programs)
    pieces = cut_for(graph, positions, schedule.placement)
    _require_runnable(schedule, pieces)
    _require_own_parameters(plan, graph, pieces)
    require_one_home(graph, pieces)
    require_hooks_within_stages(graph, pieces)
    return replace(probed, graph=graph), positions, schedule, pieces


def _connect(
    process: Process, schedule: Schedule, pieces: Cut, trained: frozenset[str]
) -> tuple[Mesh, Mapping[str, tuple[int, ...]]]:
    """Returns this rank's place among all ranks, its groups, and the ranks that hold each trained parameter."""
    layout = RankLayout(process.world_size, schedule.placement)
    mesh = Mesh(layout, process.rank, process.device, process.backend, process.timeout_s)
    holders = holders_of(pieces, mesh, trained)
    mesh.connect(messages_of_edge(schedule))
    mesh.connect_reductions(holders.values())
    return mesh, holders


def _planned_graphs(
    probed: ProbedStep, plan: PipelinePlan, device: torch.device
) -> list[LayerGraph]:
    """Returns graphs of a batch's microbatches, if the step can only be probed on values, which are soon gone."""
    graph = probed.graph
    if not graph.needs_values:
        return []
    here = _on_device(probed.batch, device)
    sizes = microbatch_sizes(num_samples(here, graph.form), plan.num_microbatches)
    exemplars = probed.forms.exemplars if probed.forms.widest else ()
    steps = [form.of_step(probed.step) for form in exemplars] or [probed.step]
    try:
        with placed(probed.module, device):
            unlike = {batch_signature(part): part for part in split(here, sizes, graph.form)}
            return [
                reprobe(probed.module, step, part, graph, any_form=len(steps) > 1)
                for part in unlike.values()
                for step in steps
            ]
    except torch.OutOfMemoryError:
        _log.warning("the whole module does not fit on %s: microbatches are probed later", device)
        return []


def _warn_unless_mean(probed: ProbedStep, plan: PipelinePlan, interception: Interception) -> None:
    check = MeanCheck(probed.module, probed.widest, probed.batch, probed.graph, interception)
    if difference := check.difference(plan.num_microbatches):
        rank_zero_warn(difference)


def _idle_here(module: nn.Module, names: frozenset[str]) -> dict[str, nn.Parameter]:
    """Returns those that could be trained but get no gradient, and drops one from before training."""
    idle = {n: p for n, p in module.named_parameters() if n in names and p.requires_grad}
    for parameter in idle.values():
        parameter.grad = None
    return idle


def _run_whole(
    probed: ProbedStep, plan: PipelinePlan, mesh: Mesh, interception: Interception, seed: int
) -> WholeRun:
    """Runs one batch through all layers, where random numbers and types are those of training."""
    batch = _on_device(probed.batch, mesh.device)
    with placed(probed.module, mesh.device):
        return run_whole(
            probed.module, probed.step, probed.graph, interception, batch, plan.num_microbatches, seed,
            mesh.pipeline, probed.forms.widest,
        )  # fmt: skip


def _forms_of(probed: ProbedStep, interception: Interception) -> list[StepForm]:
    """Returns the forms that a step is known to take, in calls of a graph's layers; empty if there is only one."""
    module, graph, forms = probed.module, probed.graph, probed.forms
    if forms.widest is None:
        return []
    view, found = FormView(module, graph, interception), list[StepForm]()
    with untouched(module):
        for exemplar in forms.exemplars:
            call = StepCall(
                exemplar.of_step(probed.step), module, probed.small, (), graph.batch_writes
            )
            found.append(view.exemplar(call, exemplar.seed)[0])
    return found


def _on_device(batch: Any, device: torch.device) -> Any:
    """Returns a batch with all its tensors where this rank computes."""
    return pytree.tree_map_only(Tensor, lambda leaf: leaf.to(device), batch)


def cut_positions(plan: PipelinePlan, graph: LayerGraph) -> tuple[int, ...]:
    """Returns where a plan cuts the trained path of a graph.

    Raises:
        PlanError: The plan was made for other layers; names the first difference.
    """
    names = graph.path_names
    remedy = "make a plan for this module, or leave strategy.plan out"
    if plan.num_layers != len(names):
        raise PlanError(
            f"the plan cuts {plan.num_layers} layers, but this module has {len(names)}; {remedy}"
        )
    for position, (planned, name) in enumerate(zip(plan.layers, names, strict=False)):
        if planned != name:
            raise PlanError(
                f"the plan was made for another model: layer {position} of its {len(names)} is {planned}, "
                f"but this module's is {name}; {remedy}"
            )
    return plan.first_layers[1:]


def _require_chains(plan: PipelinePlan, chains: Chains | None) -> None:
    """Refuses a plan that runs backbones apart which this module trains together.

    Raises:
        PlanError: It is one; says what joins them.
    """
    firsts = tuple(plan.first_layers[stage] for stage in plan.placement.first_stages)
    if chains and chains.starts != firsts:
        why = chains.joined_by or f"its backbones begin at layers {list(chains.starts)}"
        raise PlanError(
            f"the plan runs {len(firsts)} backbones in opposite directions, which begin at layers {list(firsts)}, "
            f"but not with this module: {why}"
        )


def _require_stateless_glue(graph: LayerGraph, plan: PipelinePlan) -> None:
    """Refuses state that every stage would keep for itself.

    Raises:
        ConfigurationError: The step changes a buffer outside of the layers of a graph, folded as planned.
    """
    if plan.ranks_per_pipeline > 1 and graph.glue_writes:
        name = min(graph.glue_writes)
        raise ConfigurationError(
            f"training_step changes the buffer {name!r} outside of a layer. Every stage has its own copy and "
            "runs a part of the step only, so stages would disagree from then on. Change it in "
            "on_train_batch_end from logged metrics, or in the forward of a module with parameters that "
            "owns it and is not cut"
        )


def _require_unwritten_weights(graph: LayerGraph, plan: PipelinePlan) -> None:
    """Refuses steps that change weights, which would happen for every microbatch, and on every stage.

    Raises:
        ConfigurationError: The step itself does, or the forward of a layer that several microbatches go through.
    """
    if graph.glue_parameter_writes:
        raise ConfigurationError(
            f"training_step changes {len(graph.glue_parameter_writes)} parameters itself, e.g. "
            f"{min(graph.glue_parameter_writes)}, but it runs for every microbatch, on every stage, and before "
            "training to time its layers. Change them in on_train_batch_end, where "
            "self.trainer.strategy.is_resident(name); if they follow other weights (a momentum teacher, a target "
            "network), inside `with self.trainer.strategy.whole_model():`, on all ranks"
        )
    if plan.num_microbatches == 1 and plan.ranks_per_pipeline == 1:
        return
    for layer in graph.layers:
        if layer.written_parameters:
            raise ConfigurationError(
                f"the forward of {layer.name} changes the parameter {min(layer.written_parameters)!r}, but "
                "other microbatches, whose gradients are not there yet, have read it, and it would be changed for "
                "each of them. Compute with a changed copy (weight = normalize(self.weight)), and change the "
                "parameter itself in on_train_batch_start, where self.trainer.strategy.is_resident(name)"
            )


def _require_runnable(schedule: Schedule, pieces: Cut) -> None:
    """Refuses programs that do not fit where gradients of this module go.

    Raises:
        PlanError: They forward a stage without gradients that get some, or have no backward for it.
    """
    for stage in schedule.placement.no_grad:
        if pieces.stages[stage].is_last or pieces.stages[stage].sent_gradients:
            raise PlanError(
                f"the plan has no backward for stage {stage}, but this module's gradients pass it; make a plan for "
                "this module, or leave strategy.plan out"
            )
    runs_without = not schedule.placement.no_grad
    for program in schedule.programs:
        for instruction in program:
            if runs_without and isinstance(instruction, ForwardNoGrad):
                raise PlanError(
                    f"the plan has {instruction}, a forward that keeps nothing for a backward, but its stages "
                    'have "gradient": true; make a plan for this module, or leave strategy.plan out'
                )
