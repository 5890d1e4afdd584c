"""From a module and one batch to a running pipeline.

    equal weights -> layers ------------> costs ------> plan ------> fold -> groups -> place -> engine
    comm/rendezvous  graph/probed_step    plan_source   plan_source  here

Three stations, each of which returns plain data once: which layers there are (`ProbedStep`), what they and the
links cost (`Basis`), what each rank does (`PipelinePlan`). Every rank builds the whole module on the host, agrees
on its weights, and probes it in the same way; rank 0 alone plans. Then each rank keeps its own stages and the
frozen layers, and gives the memory of everything else back.

With a plan, the module is cut, and this rank's part of it connected to the others':

    fold -> check -> groups -> who holds what -> probe -> place parameters -> engine
                                                   |
                                        verify: the last moment at which the module is whole

The plan says which layers each stage runs; from it follows what each rank holds, receives and sends. What a
pipeline would compute differently from one process is refused here, before anything is placed.
"""

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lightning_diffpipe.comm.mesh import Mesh, RankLayout
from lightning_diffpipe.comm.rendezvous import (
    agree,
    align_parameters,
    close_group,
    on_all_ranks,
    require_equal,
    world_group,
)
from lightning_diffpipe.comm.watcher import watcher
from lightning_diffpipe.errors import PlanError, raised_by_all
from lightning_diffpipe.graph.call_sequences import CallSequence, CallSequenceView, Moment
from lightning_diffpipe.graph.calltree import is_compiled
from lightning_diffpipe.graph.cut import Cut, require_hooks_within_stages
from lightning_diffpipe.graph.fakes import without_garbage_collection
from lightning_diffpipe.graph.interception import Interception
from lightning_diffpipe.graph.layer import LayerGraph
from lightning_diffpipe.graph.placement import place_parameters
from lightning_diffpipe.graph.probe import fold, reprobe
from lightning_diffpipe.graph.probed_step import ProbedStep, probe_step, refuse_own_generators
from lightning_diffpipe.graph.step import ModuleSplit, Step, StepCall, batch_signature
from lightning_diffpipe.graph.streaming import Weights, WeightStream, streamable
from lightning_diffpipe.graph.trial import untouched
from lightning_diffpipe.host_memory import keep_freed_memory
from lightning_diffpipe.planning.instruction import Encode, ExchangeFrozen
from lightning_diffpipe.planning.plan import PipelinePlan, check_layers
from lightning_diffpipe.planning.schedule import Schedule, messages_of_edge
from lightning_diffpipe.planning.schedules import SCHEDULES
from lightning_diffpipe.profiling.measure import bar
from lightning_diffpipe.profiling.step_run import placed, tree_to
from lightning_diffpipe.runtime.batch_layout import BatchLayout, microbatches, num_samples
from lightning_diffpipe.runtime.engine import Engine
from lightning_diffpipe.runtime.free_running import FreeRunningEngine
from lightning_diffpipe.runtime.optimizer_states import (
    OptimizerOffload,
    OptimizerSharding,
    stepping_ranks,
)
from lightning_diffpipe.runtime.ownership import (
    held_for_all_batches,
    in_no_layer,
    kept_for_later,
    owners_of,
    require_one_home,
    residents_of,
    warn_of_statistics,
    whereabouts,
)
from lightning_diffpipe.runtime.partitioned import PartitionedStepCache, cut_for
from lightning_diffpipe.runtime.reduction import GradientReducer, holders_of
from lightning_diffpipe.runtime.relay import RelayChannel, RelayView
from lightning_diffpipe.training.pipeline import Pipeline, Process, StepWatch
from lightning_diffpipe.training.plan_source import (
    PipelineOptions,
    basis_of,
    plan_of_rank_0,
    planned_layers,
)
from lightning_diffpipe.training.refusals import (
    refuse_ahead,
    refuse_backward_hooks,
    refuse_carried_state,
    refuse_changing_step,
    refuse_joined_chains,
    refuse_one_chain,
    refuse_shared_weights,
    refuse_stateful_glue,
    refuse_unrunnable,
    refuse_untrainable,
    refuse_written_weights,
    warn_of_whole_compiled,
)
from lightning_diffpipe.training.verification import MeanCheck, compare, run_whole
from lightning_diffpipe.viewing.text import waiting

_log = logging.getLogger(__name__)
_TOLD_S = 0.05


def prepare(
    module: nn.Module,
    step: Step,
    batch: Any,
    options: PipelineOptions,
    process: Process,
    arguments: tuple[Any, ...] = (),
    moments: Sequence[Moment] = (),
) -> Pipeline:
    """Plans a module's pipeline and sets this rank's part of it up.

    Args:
        module: The whole module, on the host.
        step: Module and batch to loss.
        batch: A batch of one pipeline, on the host; equal on all ranks.
        options: The user's decisions.
        process: Rank and device of this process.
        arguments: Further arguments of the step for the first batch.
        moments: Later moments of training, at which the step may call other layers.

    Raises:
        ConfigurationError: The module trains nothing, or the options do not fit it.
        PlanError: A given plan was made for another model or world.
        GraphError: The step cannot be cut at its layers.
    """
    with raised_by_all():
        refuse_untrainable(module)
        size = num_samples(batch, ModuleSplit.of(module))
    if process.device.type == "cpu":
        keep_freed_memory()
    before = watcher.seconds.copy()
    shows = process.rank == 0 and sys.stderr.isatty() and _log.isEnabledFor(logging.INFO)
    with without_garbage_collection():
        with watcher.inside("aligning weights"):
            world = world_group(process.world_size, process.timeout_s)
            own_seed = os.environ.get("PL_GLOBAL_SEED", torch.initial_seed())
            seed = agree(int(own_seed) if options.seed is None else options.seed, world)
            align_parameters(module, world)
        with watcher.inside("probing the step"):
            planned = agree(planned_layers(options) if process.rank == 0 else (), world)
            probe_all = partial(
                probe_step, module, step, batch, size, seed=seed, planned=planned,
                arguments=arguments, moments=moments, runs_ahead=process.world_size > 1,
            )  # fmt: skip
            with bar(shows, "probing the layers of a step", counted=False, stays=False):
                probed = on_all_ranks(probe_all, world)
            with raised_by_all():
                require_equal(probed.graph.digest, world)
                refuse_changing_step(probed.graph)
                refuse_one_chain(probed.chains, options)
            # One that reads a clock may have found another.
            sequences = replace(probed.sequences, carried=agree(probed.sequences.carried, world))
            probed = replace(probed, sequences=sequences)
        if sequences.moves_frozen and options.plan is None:
            _log.info(
                "what frozen layers get follows the step: they run in the step of their batch"
            )
            options = replace(options, filling="none")
        warn_of_whole_compiled(module, probed.graph)
        with bar(shows, "timing layers and links, and planning", stays=False) as report:
            basis = basis_of(probed, options, process, world, report)
            plan = plan_of_rank_0(probed, basis, options, process, world)
        with raised_by_all():
            refuse_ahead(plan, probed)
        close_group(world)
    with watcher.inside("placing stages"):
        pipeline = assemble(probed, plan, process, options, seed)
    if process.rank == 0:
        seconds = watcher.seconds - before
        told = (f"{what} {part_s:.1f} s" for what, part_s in seconds.items() if part_s >= _TOLD_S)
        _log.info("ready in %.1f s: %s", seconds.total(), ", ".join(told))
    return replace(pipeline, basis=basis)


_log = logging.getLogger(__name__)


def assemble(
    probed: ProbedStep, plan: PipelinePlan, process: Process, options: PipelineOptions, seed: int
) -> Pipeline:
    """Cuts a module as planned and connects this rank; every rank calls it at the same time.

    Args:
        probed: The module and its step; layers unfolded.
        plan: Plan of all ranks.
        process: Rank and device of this process.
        options: Decisions of the user besides the plan: `check_finite`, `verify`.
        seed: Seed of the run.

    Raises:
        PlanError: The plan was made for other layers.
        ConfigurationError: The step keeps state outside of layers, changes weights, or has its own generators.
        GraphError: `verify` found a difference.
    """
    unfolded = probed.graph
    probed, positions, schedule, pieces = _cut_as_planned(probed, plan)
    recomputed = frozenset(unfolded.path_names[i] for i in plan.recomputed)
    module, graph, placement = probed.module, probed.graph, schedule.placement
    if any(map(is_compiled, module.modules())):
        # A stage compiles its forward when those before it have, and its backward when those after it have.
        process = replace(process, timeout_s=2 * schedule.num_stages * process.timeout_s)
    layout = RankLayout(process.world_size, placement)
    mesh = Mesh(layout, process.rank, process.device, process.backend, process.timeout_s)
    holders = holders_of(pieces, mesh, graph.trained)
    mesh.connect(messages_of_edge(schedule))
    mesh.connect_reductions(holders.values())
    encoding_ranks = plan.options.encoding_ranks
    num_encoding = placement.num_ranks if encoding_ranks == "auto" else encoding_ranks
    # `holders` of a trained parameter sum its gradients; `residents` are the names of all parameters that each rank
    # holds; the owner of an entry of the state dict that not all ranks hold is the first holder, which saves it.
    residents = residents_of(module, pieces, placement, num_encoding)
    resident = residents[mesh.local_rank]
    owners = owners_of(module, pieces, residents, placement)
    graphs = _planned_graphs(probed, plan, process.device)
    interception = Interception(module).install()
    with interception.uninstalled_on_error():
        if process.rank == 0:  # the last moment at which the module is whole
            warn_of_statistics(graph, pieces, placement)
            if difference := MeanCheck(probed, interception).difference(plan.num_microbatches):
                rank_zero_warn(difference)
        sequences = _known_sequences(probed, interception)
        one_process = None
        if options.verify:  # on the device: random numbers and types are those of training there
            batch, count = tree_to(probed.batch, mesh.device), plan.num_microbatches
            with placed(module, mesh.device):
                one_process = run_whole(probed, interception, batch, count, seed, mesh.pipeline)
        stage_ranks = whereabouts(pieces, placement)  # for error messages
        by_stage, weights = _streamed(module, unfolded, plan, mesh.local_rank)
        streamed_names = frozenset(name for of_layer in weights.values() for name in of_layer)
        later = frozenset[str]()  # parameters that stay on the host until all samples are encoded
        if plan.options.encode_first and not (plan.runs_free or options.verify):
            later = (kept_for_later(module, graph) & resident) - streamed_names
        place_parameters(module, resident, process.device, stage_ranks, later | streamed_names)
        parameters = dict(module.named_parameters())
        streamed = {name: p for name, p in parameters.items() if name in streamed_names}
        # Placing may have put other objects in place of the parameters that `_streamed` returned.
        weights = {layer: {n: streamed[n] for n in of_layer} for layer, of_layer in weights.items()}
        stream = WeightStream(module, weights, by_stage, process.device) if weights else None
        interception.refuse(stage_ranks)
        steps = PartitionedStepCache(
            module, probed.step, graph, positions, placement, mesh.local_rank, interception,
            process.device, graphs, probed.sequences, sequences, recomputed, stream,
        )  # fmt: skip
        trained = {n: p for n, p in parameters.items() if n in resident and n in graph.trained}
        size = None if plan.options.frozen_group_size == "auto" else plan.options.frozen_group_size
        layout = BatchLayout(module, probed.step, schedule, steps, mesh, seed, size, num_encoding)
        reducer = GradientReducer(mesh, trained, holders)
        engine = _engine(layout, reducer, options.check_finite, plan, list(trained.values()))
        if one_process is not None:
            compare(module, engine, tree_to(probed.batch, process.device), trained, one_process)
        untrained = {name: p for name, p in parameters.items() if not p.requires_grad}
        not_trained = resident - graph.trained
        idle = {n: p for n, p in parameters.items() if n in not_trained and p.requires_grad}
        for parameter in idle.values():
            parameter.grad = None  # left by code that ran before training
        watch, sharding = StepWatch(module, layout, idle), None
        if plan.options.shard_optimizer is True and any(len(r) > 1 for r in holders.values()):
            sizes = {n: parameters[n].numel() * parameters[n].element_size() for n in holders}
            sharding = OptimizerSharding(mesh, trained, holders, stepping_ranks(sizes, holders))
        return Pipeline(
            module, plan, graph, mesh, engine, residents, owners, trained, untrained, watch, seed,
            interception, RelayView(module, interception, owners, RelayChannel(mesh)),
            sharding,
            OptimizerOffload(mesh.device) if plan.options.optimizer_offload == "all" else None,
            offloaded=streamed, later={name: parameters[name] for name in later},
        )  # fmt: skip


def _streamed(
    module: nn.Module, graph: LayerGraph, plan: PipelinePlan, local_rank: int
) -> tuple[dict[int, list[str]], dict[str, Weights]]:
    """Returns the streamed layers of a rank by stage, and their frozen weights."""
    names = {
        stage: [graph.path_names[i] for i in plan.streamed_of(stage)]
        for stage in plan.placement.stages_of(local_rank)
    }
    frozen_weights = streamable(module, graph) if plan.streamed else {}
    weights = {name: frozen_weights[name] for of_stage in names.values() for name in of_stage}
    if empty := [name for name, tensors in weights.items() if not tensors]:
        raise PlanError(
            f"the plan streams {empty[0]}, which has no frozen weights of its own; plan again for this module"
        )
    return names, weights


def _engine(
    layout: BatchLayout,
    reducer: GradientReducer,
    check_finite: bool,
    plan: PipelinePlan,
    trained: Sequence[nn.Parameter],
) -> Engine:
    staleness = SCHEDULES[plan.options.schedule].staleness
    if staleness is None or not plan.runs_free:
        return Engine(layout, reducer, check_finite, image=waiting)
    (stage,) = plan.placement.stages_of(layout.mesh.local_rank)
    delay = staleness(plan.placement, stage)
    return FreeRunningEngine(layout, reducer, trained, delay, check_finite)


@raised_by_all()  # all have the same layers and plan
def _cut_as_planned(
    probed: ProbedStep, plan: PipelinePlan
) -> tuple[ProbedStep, tuple[int, ...], Schedule, Cut]:
    """Returns the step with folded layers, where they are cut, the schedule, and the pieces, if these can run."""
    module, step, small, graph = probed.module, probed.widest, probed.small, probed.graph
    positions = cut_positions(plan, graph)
    if plan.num_backbones > 1:
        refuse_joined_chains(plan, probed.chains)
    graph, positions = fold(module, step, small, graph, positions)
    refuse_stateful_glue(graph, plan)
    refuse_backward_hooks(module, graph, plan)
    refuse_written_weights(graph, plan)
    if plan.ranks_per_pipeline > 1 and graph.generators:
        refuse_own_generators(graph)
    refuse_carried_state(probed.sequences.carried, plan)
    # Frozen parts are laid out again for each batch, whose last one may be smaller.
    programs = tuple(
        tuple(i for i in program if not isinstance(i, Encode | ExchangeFrozen))
        for program in plan.schedule.programs
    )
    schedule = replace(plan.schedule, programs=programs)
    pieces = cut_for(graph, positions, schedule.placement)
    # Without flushes no two ranks may train the same.
    outside = frozenset() if plan.runs_free else in_no_layer(module, graph)
    between = probed.sequences.read | outside
    graph, pieces = held_for_all_batches(module, graph, pieces, between)
    refuse_unrunnable(schedule, pieces)
    refuse_shared_weights(plan, graph, pieces)
    require_one_home(graph, pieces)
    require_hooks_within_stages(graph, pieces)
    return replace(probed, graph=graph), positions, schedule, pieces


def _planned_graphs(
    probed: ProbedStep, plan: PipelinePlan, device: torch.device
) -> list[LayerGraph]:
    """Returns graphs of a batch's microbatches, if the step can only be probed on values, which are soon gone."""
    graph = probed.graph
    if not graph.needs_values:
        return []
    here = tree_to(probed.batch, device)
    replays = probed.sequences.replays if probed.sequences.widest else ()
    steps = [replay.of_step(probed.step) for replay in replays] or [probed.step]
    try:
        with placed(probed.module, device):
            parts = microbatches(here, plan.num_microbatches, graph.batch_spec)
            unlike = {batch_signature(part): part for part in parts}
            return [
                reprobe(probed.module, step, part, graph, any_sequence=len(steps) > 1)
                for part in unlike.values()
                for step in steps
            ]
    except torch.OutOfMemoryError:
        _log.warning("the whole module does not fit on %s: microbatches are probed later", device)
        return []


def _known_sequences(probed: ProbedStep, interception: Interception) -> list[CallSequence]:
    """Returns the known call sequences of a step, in calls of a graph's layers; empty if there is only one."""
    module, graph, trials = probed.module, probed.graph, probed.sequences
    if trials.widest is None:
        return []
    view = CallSequenceView(module, graph, interception, bears_nan=True, by_reads=trials.by_reads)
    sequences: list[CallSequence] = []
    with untouched(module):
        for replay in trials.replays:
            call = StepCall(
                replay.of_step(probed.step), module, probed.small, (), graph.batch_writes
            )
            sequences.append(view.record(call, replay.seed)[0])
    return sequences


def cut_positions(plan: PipelinePlan, graph: LayerGraph) -> tuple[int, ...]:
    """Returns where a plan cuts the trained path of a graph; raises PlanError with the first other layer."""
    remedy = "make a plan for this module, or leave strategy.plan out"
    check_layers(plan, graph.path_names, "this module", remedy)
    return plan.first_layers[1:]
