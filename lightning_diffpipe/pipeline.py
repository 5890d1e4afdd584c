"""One rank's side of a pipeline, assembled from a plan, and the module around it.

The plan says which layers each stage runs; from it follows what each rank holds, receives and sends. Every
rank makes its own part of that, and they connect.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_diffpipe.errors import ConfigurationError, PlanError, raised_by_all
from lightning_diffpipe.graph.cut import Cut
from lightning_diffpipe.graph.fold import fold
from lightning_diffpipe.graph.hooks import require_hooks_within_stages
from lightning_diffpipe.graph.interception import Interception
from lightning_diffpipe.graph.layer import LayerGraph, batch_signature
from lightning_diffpipe.graph.placement import (
    is_placeholder,
    leave_on_host,
    place_parameters,
    restore_parameters,
)
from lightning_diffpipe.graph.probe import reprobe
from lightning_diffpipe.graph.relay import RelayView
from lightning_diffpipe.graph.versions import Versions
from lightning_diffpipe.planning.cluster import Cluster
from lightning_diffpipe.planning.instruction import (
    Encode,
    ExchangeFrozen,
    ForwardNoGrad,
    UpdateWeights,
)
from lightning_diffpipe.planning.laws import messages_of_edge
from lightning_diffpipe.planning.plan import PipelinePlan
from lightning_diffpipe.planning.profile import ModelProfile
from lightning_diffpipe.planning.schedule import Schedule
from lightning_diffpipe.profiling.state import placed
from lightning_diffpipe.runtime.batch_layout import BatchLayout
from lightning_diffpipe.runtime.checkpoint import spread
from lightning_diffpipe.runtime.engine import Engine
from lightning_diffpipe.runtime.holding import (
    holders_of,
    owners_of,
    require_one_home,
    residents_of,
    warn_of_statistics,
    whereabouts,
)
from lightning_diffpipe.runtime.mesh import Layout, Mesh
from lightning_diffpipe.runtime.microbatch import microbatch_sizes, num_samples, split
from lightning_diffpipe.runtime.partitioned import PartitionedStepCache, Step, cut_for
from lightning_diffpipe.runtime.reduction import GradientReducer
from lightning_diffpipe.runtime.relay import RelayChannel
from lightning_diffpipe.step_watch import StepWatch
from lightning_diffpipe.verification import compare, run_whole
from lightning_diffpipe.viewing.ascii import waiting

_log = logging.getLogger(__name__)
_REQUIRES_GRAD = attrgetter("requires_grad")


@dataclass(frozen=True)
class Process:
    """Where a rank runs.

    Attributes:
        rank: World rank.
        world_size: All ranks.
        device: Where it computes.
        backend: `"gloo"` or `"nccl"`.
        timeout_s: Longest wait for a message.
    """

    rank: int
    world_size: int
    device: torch.device
    backend: str
    timeout_s: float


@dataclass(frozen=True)
class Basis:
    """What a plan was made from.

    Attributes:
        profile: What layers cost.
        cluster: What ranks and links there are; links count as free where layers were not timed.
    """

    profile: ModelProfile
    cluster: Cluster


@dataclass
class Pipeline:
    """One rank's pipeline, ready to run.

    Attributes:
        module: The whole module; foreign parameters are placeholders.
        plan: What all ranks do.
        graph: The layers that were cut.
        mesh: This rank's place and groups.
        engine: Runs steps.
        resident: Names of the parameters this rank holds.
        owners: Position in the pipeline of the first holder, for every entry of the state dict that
            is not held by all its ranks.
        trained: Parameters of this rank that get gradients, by name.
        untrained: Parameters of the module with `requires_grad=False`, by name.
        watch: Notices a step that is no longer the one that was probed.
        seed: Seed of the run.
        basis: What the plan was made from; None if the plan was given.
        runs_ahead: Frozen layers may still run before their batch is due.
    """

    module: nn.Module
    plan: PipelinePlan
    graph: LayerGraph
    mesh: Mesh
    engine: Engine
    resident: frozenset[str]
    owners: dict[str, int]
    trained: dict[str, nn.Parameter]
    untrained: dict[str, nn.Parameter]
    watch: StepWatch
    seed: int
    _interception: Interception
    _relay: RelayView
    basis: Basis | None = None
    runs_ahead: bool = True

    @cached_property
    def loss_dtype(self) -> torch.dtype:
        """The dtype a loss is returned in, alike on all ranks: double for modules in double precision."""
        parameters = dict(self.module.named_parameters())
        dtypes = {parameters[name].dtype for name in self.graph.trained}
        return torch.float64 if torch.float64 in dtypes else torch.float32

    @property
    def fills(self) -> bool:
        """Whether frozen layers of coming batches run in the bubbles of this one."""
        return (
            self.plan.options.filling != "none"
            and self.plan.ranks_per_pipeline > 1
            and bool(self.graph.frozen)
        )

    @cached_property
    def read_ahead(self) -> Versions:
        """Parameters and buffers that frozen layers read, but for those that layers write themselves."""
        layers = self.graph.layers
        written = frozenset().union(*(layer.written_buffers for layer in layers))
        parameters = frozenset().union(*(layers[i].parameters for i in self.graph.frozen))
        buffers = frozenset().union(*(layers[i].buffers for i in self.graph.frozen))
        return Versions(self.module, parameters, buffers - written)

    def stop_ahead_if_changed(self) -> bool:
        """Runs nothing ahead any more if what frozen layers read was changed between two steps.

        Returns:
            Whether it stopped just now.

        Raises:
            ConfigurationError: It became NaN, as what was written came from weights of other ranks.
        """
        if not self.runs_ahead or not self.read_ahead.changed():
            return False
        self.runs_ahead = False
        self.engine.drop_prepared()
        names = self.read_ahead.not_a_number() if self.plan.ranks_per_pipeline > 1 else []
        if names:
            raise ConfigurationError(
                f"{len(names)} tensors that frozen layers read became NaN between two steps, e.g. "
                f"{names[0]}. If they follow trained weights (a momentum teacher, a target network), mind that a "
                "rank holds only NaN in place of the weights of other stages: update them inside "
                "`with self.trainer.strategy.whole_model():`, on all ranks, which fetches what is read there"
            )
        return True

    def count_as_unchanged(self) -> None:
        """Frozen layers read other values from now on, rightly: nothing was changed behind anybody's back."""
        self.engine.drop_prepared()
        self.read_ahead.note()

    def refuse_unfrozen(self) -> None:
        """Checks that nothing was unfrozen since the pipeline was made; takes microseconds.

        Raises:
            ConfigurationError: Something was; names the first parameter.
        """
        if any(map(_REQUIRES_GRAD, self.untrained.values())):
            name = next(n for n, p in self.untrained.items() if p.requires_grad)
            raise ConfigurationError(
                f"parameters were unfrozen during training, e.g. {name}, but the plan was made with them "
                "frozen and computes no gradients for them, so they would never be trained. Unfreeze them "
                "before trainer.fit, and go on from a checkpoint"
            )

    @property
    def planned_shares(self) -> tuple[float, ...]:
        """How much of the frozen work each rank of the pipeline takes, as planned; empty if unknown."""
        samples = [0.0] * self.plan.ranks_per_pipeline
        for piece in self.plan.pieces:
            samples[piece.rank] += piece.num_samples
        return tuple(samples) if any(samples) else ()

    @contextlib.contextmanager
    def relayed(self) -> Generator[None, None, None]:
        """Inside, layers of other ranks answer with their results; all ranks in lock step."""
        with self._relay.active():
            yield

    def trained_by(self, optimizer: Optimizer) -> dict[str, nn.Parameter]:
        """Parameters of an optimizer among `trained`, by name."""
        members = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return {name: p for name, p in self.trained.items() if id(p) in members}

    def compare_over_pipeline(self, number: int, checksum: int) -> None:
        """Checks that all ranks of the pipeline loaded the same batch.

        Raises:
            ConfigurationError: They did not.
            PipelineTimeoutError: A rank is gone, or did not come in half an hour.
        """
        values = [int(row[0]) for row in self.mesh.gathered([checksum], patient=True)]
        if len(set(values)) > 1:
            raise ConfigurationError(
                f"batch {number} of this pass differs between the ranks of a pipeline (checksums "
                f"{values}); every stage must see the same samples. Let the data set draw random "
                "numbers from torch, random or numpy only, and keep the order of samples independent "
                "of the rank. A stream is shared out by trainer.distributed_sampler_kwargs; one of webdataset "
                "takes that as nodesplitter, not split_by_node, and rng=random for its shuffle, see "
                "docs/training.md"
            )

    def dismantle(self, connected: bool = True) -> None:
        """Makes the module ordinary again: all tensors up to date and on the host, no wrappers, no groups.

        Args:
            connected: Whether the other ranks are still there; if not, placeholders stay.
        """
        buffers = dict(self.module.named_buffers())
        # Not of `state_dict()`: it lacks some buffers, and modules may leave out or rename the rest.
        tensors = {**dict(self.module.named_parameters(remove_duplicate=False)), **buffers}
        whole = spread(tensors, self.owners, self.mesh) if connected else {}
        self.engine.close()
        self._interception.uninstall()
        if not connected:
            self.mesh.abort()
            leave_on_host(self.module)
            return
        placeholders = [n for n, p in self.module.named_parameters() if is_placeholder(p)]
        restore_parameters(self.module, {name: whole[name] for name in placeholders})
        for name in buffers.keys() & whole.keys():
            buffers[name].copy_(whole[name])
        self.module.cpu()
        self.mesh.disconnect()


def assemble(
    module: nn.Module,
    step: Step,
    batch: Any,
    small: Any,
    graph: LayerGraph,
    plan: PipelinePlan,
    process: Process,
    *,
    seed: int,
    check_finite: bool = False,
    verify: bool = False,
) -> Pipeline:
    """Cuts a module as planned and connects this rank; every rank calls it at the same time.

    Args:
        module: The whole module, on the host, equal on all ranks.
        step: Module and batch to loss.
        batch: One pipeline's batch, on the host.
        small: The batch the graph was probed with.
        graph: Its layers, unfolded.
        plan: What all ranks do.
        process: Where this rank runs.
        seed: Seed of the run.
        check_finite: Look for NaN and infinity at stage boundaries.
        verify: Compare one batch with the whole module.

    Raises:
        PlanError: The plan was made for other layers.
        ConfigurationError: The step keeps state outside of layers, changes weights, or draws from generators of
            its own.
        GraphError: `verify` found a difference.
    """
    graph, positions, schedule, pieces = _cut_as_planned(module, step, small, graph, plan)
    if process.rank == 0:
        warn_of_statistics(graph, pieces, schedule.placement)
    mesh, holders = _connect(process, schedule, pieces, graph.trained)

    residents = residents_of(module, pieces, schedule.placement)
    resident = residents[mesh.local_rank]
    owners = owners_of(module, pieces, residents, schedule.placement)
    known = _planned_graphs(module, step, batch, graph, plan, process.device)
    interception = Interception(module).install()
    whole = None
    here = _on_device(batch, process.device) if verify else None
    if verify:  # The last moment at which the module is whole.
        with placed(module, process.device):  # where random numbers and types are those of training
            whole = run_whole(
                module, step, graph, interception, here, plan.num_microbatches, seed, mesh.pipeline
            )
    place_parameters(module, resident, process.device)
    interception.refuse(whereabouts(pieces, schedule.placement))

    steps = PartitionedStepCache(
        module, step, graph, positions, schedule.placement, mesh.local_rank, interception,
        process.device, known,
    )  # fmt: skip
    trained = _trained_here(module, resident & graph.trained)
    layout = BatchLayout(module, step, schedule, steps, mesh, seed, _group_size(plan))
    reducer = GradientReducer(mesh, trained, holders)
    engine = Engine(layout, reducer, check_finite, picture=waiting)
    if whole is not None:
        compare(module, engine, here, trained, whole)
    relay = RelayView(module, interception, owners, RelayChannel(mesh))
    untrained = {name: p for name, p in module.named_parameters() if not p.requires_grad}
    idle = _idle_here(module, resident - graph.trained)
    watch = StepWatch(module, layout, idle)
    return Pipeline(
        module, plan, graph, mesh, engine, resident, owners, trained, untrained, watch, seed,
        interception, relay,
    )  # fmt: skip


@raised_by_all()  # all have the same layers and plan
def _cut_as_planned(
    module: nn.Module, step: Step, small: Any, graph: LayerGraph, plan: PipelinePlan
) -> tuple[LayerGraph, tuple[int, ...], Schedule, Cut]:
    """The folded layers, the cut positions among them, the schedule, and the pieces, if all that can be run."""
    graph, positions = fold(module, step, small, graph, cut_positions(plan, graph))
    _require_stateless_glue(graph, plan)
    _require_unwritten_weights(graph, plan)
    _require_global_generators(graph, plan)
    schedule = _without_frozen_parts(plan.schedule)
    _require_runnable(schedule)
    pieces = cut_for(graph, positions, alone=schedule.num_ranks == 1)
    require_one_home(graph, pieces)
    require_hooks_within_stages(graph, pieces)
    return graph, positions, schedule, pieces


def _connect(
    process: Process, schedule: Schedule, pieces: Cut, trained: frozenset[str]
) -> tuple[Mesh, Mapping[str, tuple[int, ...]]]:
    """This rank's place among all ranks, its groups, and the ranks that hold each trained parameter."""
    layout = Layout(process.world_size, schedule.placement)
    mesh = Mesh(layout, process.rank, process.device, process.backend, process.timeout_s)
    holders = holders_of(pieces, mesh, trained)
    mesh.connect(messages_of_edge(schedule))
    mesh.connect_reductions(holders.values())
    return mesh, holders


def _planned_graphs(
    module: nn.Module,
    step: Step,
    batch: Any,
    graph: LayerGraph,
    plan: PipelinePlan,
    device: torch.device,
) -> list[LayerGraph]:
    """Graphs of the microbatches of a batch, if the step can only be probed on values: soon they are gone."""
    if not graph.needs_values:
        return []
    here = _on_device(batch, device)
    parts = split(here, microbatch_sizes(num_samples(batch), plan.num_microbatches))
    try:
        with placed(module, device):
            unlike = {batch_signature(part): part for part in parts}
            return [reprobe(module, step, part, graph) for part in unlike.values()]
    except torch.OutOfMemoryError:
        _log.warning("the whole module does not fit on %s: microbatches are probed later", device)
        return []


def _trained_here(module: nn.Module, names: frozenset[str]) -> dict[str, nn.Parameter]:
    """Parameters of this rank that get gradients, in the module's order."""
    return {name: p for name, p in module.named_parameters() if name in names}


def _idle_here(module: nn.Module, names: frozenset[str]) -> dict[str, nn.Parameter]:
    """Those that could be trained but get no gradient; the rest of one from before training is dropped."""
    idle = {n: p for n, p in module.named_parameters() if n in names and p.requires_grad}
    for parameter in idle.values():
        parameter.grad = None
    return idle


def _group_size(plan: PipelinePlan) -> int | None:
    """Samples on which frozen layers run at a time; None if the plan leaves it open."""
    size = plan.options.frozen_group_size
    return None if size == "auto" else size


def _on_device(batch: Any, device: torch.device) -> Any:
    """A batch with all its tensors where this rank computes."""
    return pytree.tree_map_only(Tensor, lambda leaf: leaf.to(device), batch)


def cut_positions(plan: PipelinePlan, graph: LayerGraph) -> tuple[int, ...]:
    """Where a plan cuts the trained path of a graph.

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
    return tuple(stage.first_layer for stage in plan.stages[1:])


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


def _require_global_generators(graph: LayerGraph, plan: PipelinePlan) -> None:
    """Refuses random numbers that no seed of a microbatch governs.

    Raises:
        ConfigurationError: The step draws from a generator that outlives it.
    """
    if plan.ranks_per_pipeline > 1 and graph.generators:
        raise ConfigurationError(
            f"training_step draws random numbers from {min(graph.generators)}, which outlives the step. Every "
            "rank has its own copy, and draws from it at other times and more or less often than the next, so "
            "stages and frozen layers would see different numbers. Draw from torch's global generator, which "
            "is kept in step on all ranks (leave `generator=` out), or make one inside the step, seeded "
            "with a number from the global one"
        )


def _require_runnable(schedule: Schedule) -> None:
    """Says before anything starts that a schedule can be planned, but not run yet.

    Raises:
        PlanError: It has instructions the executor does not know.
    """
    for program in schedule.programs:
        for instruction in program:
            if isinstance(instruction, ForwardNoGrad | UpdateWeights):
                raise PlanError(
                    f"the plan's schedule has {instruction}, which can be simulated but not run yet; "
                    "choose another schedule"
                )


def _without_frozen_parts(schedule: Schedule) -> Schedule:
    """Frozen parts are laid out anew for each batch, whose last one may be smaller."""
    programs = tuple(
        tuple(i for i in program if not isinstance(i, Encode | ExchangeFrozen))
        for program in schedule.programs
    )
    return replace(schedule, programs=programs)
