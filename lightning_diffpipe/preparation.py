"""From a module and one batch to a running pipeline.

    equal weights -> probe -> profile -> plan (rank 0, broadcast) -> fold -> groups -> place -> engine

Every rank builds the whole module on the host, agrees on its weights, and looks at it in the same way;
rank 0 alone plans. Then each rank keeps its own stages and the frozen layers, and gives the memory of
everything else back.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_diffpipe.errors import CheckpointError, ConfigurationError, PlanError
from lightning_diffpipe.graph.cut import Cut
from lightning_diffpipe.graph.fold import fold
from lightning_diffpipe.graph.interception import Interception
from lightning_diffpipe.graph.layer import LayerGraph
from lightning_diffpipe.graph.placement import is_placeholder, place_parameters, restore_parameters
from lightning_diffpipe.graph.probe import probe
from lightning_diffpipe.graph.relay import RelayView
from lightning_diffpipe.planning.cluster import Cluster
from lightning_diffpipe.planning.instruction import Encode, ExchangeFrozen
from lightning_diffpipe.planning.laws import messages_of_edge
from lightning_diffpipe.planning.options import PlanOptions
from lightning_diffpipe.planning.plan import PipelinePlan
from lightning_diffpipe.planning.profile import ModelProfile
from lightning_diffpipe.planning.schedule import Placement, Schedule
from lightning_diffpipe.planning.search import find_plan
from lightning_diffpipe.profiling.estimate import estimate_profile
from lightning_diffpipe.runtime.engine import (
    Engine,
    PartitionedStepCache,
    Step,
    cut_for,
    holders_of,
)
from lightning_diffpipe.runtime.mesh import Layout, Mesh
from lightning_diffpipe.runtime.microbatch import num_samples, split
from lightning_diffpipe.runtime.reduction import GradientReducer
from lightning_diffpipe.runtime.relay import RelayChannel
from lightning_diffpipe.viewing.ascii import waiting

Auto = Literal["auto"]
_NUM_PROBED_SAMPLES = 2


@dataclass(frozen=True)
class PipelineOptions:
    """What a user may decide; the strategy's arguments, documented there."""

    num_stages: int | Auto = "auto"
    num_microbatches: int | Auto = "auto"
    schedule: str = "1f1b"
    num_replicas: int | Sequence[int] | Auto = "auto"
    data_parallel: int | Auto = "auto"
    filling: str = "auto"
    plan: PipelinePlan | str | Path | None = None
    profile: Any = "measure"
    seed: int | None = None
    check_finite: bool = False
    verify: bool = False


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
        seed: Seed of the run.
    """

    module: nn.Module
    plan: PipelinePlan
    graph: LayerGraph
    mesh: Mesh
    engine: Engine
    resident: frozenset[str]
    owners: dict[str, int]
    trained: dict[str, nn.Parameter]
    seed: int
    _interception: Interception
    _relay: RelayView

    @property
    def loss_dtype(self) -> torch.dtype:
        """The dtype a loss is returned in: double for modules in double precision."""
        dtypes = {parameter.dtype for parameter in self.trained.values()}
        return torch.float64 if torch.float64 in dtypes else torch.float32

    @contextlib.contextmanager
    def relayed(self) -> Generator[None, None, None]:
        """Inside, layers of other ranks answer with their results; all ranks in lock step."""
        with self._relay.active():
            yield

    def owners_by_index(self, optimizer: Optimizer) -> dict[int, int]:
        """For each parameter of an optimizer, in its numbering: the position that holds its state."""
        return {
            index: self.owners.get(name, 0)
            for index, name in enumerate(self._optimized_names(optimizer))
        }

    def resident_indices(self, optimizer: Optimizer) -> set[int]:
        """The parameters of an optimizer, in its numbering, that this rank holds."""
        names = self._optimized_names(optimizer)
        return {index for index, name in enumerate(names) if name in self.resident}

    def _optimized_names(self, optimizer: Optimizer) -> list[str]:
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]

    def compare_over_pipeline(self, number: int, checksum: int) -> None:
        """Checks that all ranks of the pipeline loaded the same batch.

        Raises:
            ConfigurationError: They did not.
        """
        size = self.mesh.layout.ranks_per_pipeline
        gathered = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
        dist.all_gather(gathered, torch.tensor([checksum]), group=self.mesh.control)
        values = [int(value) for value in gathered]
        if len(set(values)) > 1:
            raise ConfigurationError(
                f"batch {number} of this pass differs between the ranks of a pipeline (checksums "
                f"{values}); every stage must see the same samples. Let the data set draw random "
                "numbers from torch, random or numpy only, and keep the order of samples independent "
                "of the rank"
            )

    def load_state_dict(self, state: Mapping[str, Tensor], strict: bool = True) -> None:
        """Copies this rank's part of a whole state dict.

        Raises:
            CheckpointError: Names are missing or unknown, or shapes differ.
        """
        own = self.module.state_dict()
        missing, unknown = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
        if strict and (missing or unknown):
            raise CheckpointError(
                f"the checkpoint does not fit the module: {len(missing)} names missing "
                f"{missing[:3]}, {len(unknown)} unknown {unknown[:3]}; pass strict=False to load what fits"
            )
        for name in own.keys() & state.keys():
            if not isinstance(own[name], Tensor):
                continue
            if own[name].shape != state[name].shape:
                raise CheckpointError(
                    f"{name} has shape {tuple(state[name].shape)} in the checkpoint and "
                    f"{tuple(own[name].shape)} in the module"
                )
        local = {
            name: value
            for name, value in state.items()
            if self.owners.get(name, self.mesh.local_rank) == self.mesh.local_rank
            or name in self.resident
        }
        with torch.no_grad():
            for name in own.keys() & local.keys():
                if isinstance(own[name], Tensor):
                    own[name].copy_(local[name])

    def dismantle(self, whole: Mapping[str, Tensor], connected: bool = True) -> None:
        """Makes the module ordinary again: all parameters on the host, no wrappers, no groups.

        Args:
            whole: Tensors of other ranks by name.
            connected: Whether the other ranks are still there; if not, placeholders stay.
        """
        self._interception.uninstall()
        if not connected:
            return
        placeholders = [n for n, p in self.module.named_parameters() if is_placeholder(p)]
        restore_parameters(self.module, {name: whole[name] for name in placeholders})
        self.module.cpu()
        self.mesh.disconnect()


def prepare(
    module: nn.Module,
    step: Step,
    batch: Any,
    options: PipelineOptions,
    *,
    device: torch.device,
    backend: str,
    rank: int,
    world_size: int,
    timeout_s: float,
) -> Pipeline:
    """Plans a module's pipeline and sets this rank's part of it up.

    Args:
        module: The whole module, on the host.
        step: Module and batch to loss.
        batch: A batch of one pipeline, on the host; equal on all ranks.
        options: The user's decisions.
        device: Where this rank computes.
        backend: `"gloo"` or `"nccl"`.
        rank: World rank.
        world_size: All ranks.
        timeout_s: Longest wait for a message.

    Raises:
        ConfigurationError: The module trains nothing, or the options do not fit it.
        PlanError: A given plan was made for another model or world.
        GraphError: The step cannot be cut at its layers.
    """
    _require_trainable(module)
    world = _world_group(world_size, timeout_s)
    seed = _agree(_own_seed(options), world)
    _align_parameters(module, world)
    size = num_samples(batch)
    small = split(batch, [min(_NUM_PROBED_SAMPLES, size), size - min(_NUM_PROBED_SAMPLES, size)])[0]
    graph = probe(module, step, small, seed=seed)
    _require_equal(graph.digest, world)
    text = _make_plan(module, step, batch, graph, options, device, world_size) if rank == 0 else ""
    plan = PipelinePlan.from_json(_agree(text, world))
    _close(world)
    return _assemble(
        module,
        step,
        small,
        graph,
        plan,
        options,
        seed,
        device,
        backend,
        rank,
        world_size,
        timeout_s,
    )


def _assemble(
    module: nn.Module,
    step: Step,
    small: Any,
    graph: LayerGraph,
    plan: PipelinePlan,
    options: PipelineOptions,
    seed: int,
    device: torch.device,
    backend: str,
    rank: int,
    world_size: int,
    timeout_s: float,
) -> Pipeline:
    """Cuts the module as planned and connects this rank."""
    positions = cut_positions(plan, graph)
    graph, positions = fold(module, step, small, graph, positions)
    schedule = _without_frozen_parts(plan.schedule)
    mesh = Mesh(Layout(world_size, schedule.placement), rank, device, backend, timeout_s)
    pieces = cut_for(graph, positions, alone=schedule.num_ranks == 1)
    holders = holders_of(pieces, mesh, graph.trained)
    mesh.connect(messages_of_edge(schedule))
    mesh.connect_reductions(holders.values())

    residents = [_residents(module, pieces, mesh, local) for local in range(schedule.num_ranks)]
    resident = residents[mesh.local_rank]
    owners = _owners(module, pieces, residents)
    interception = Interception(module).install()
    place_parameters(module, resident, device)
    interception.refuse(_whereabouts(pieces, schedule.placement))
    parameters = dict(module.named_parameters())
    trained = {
        name: parameter
        for name, parameter in parameters.items()
        if name in graph.trained and name in resident
    }
    engine = Engine(
        module,
        step,
        schedule,
        PartitionedStepCache(
            module,
            step,
            graph,
            positions,
            schedule.placement,
            mesh.local_rank,
            interception,
            device,
        ),
        mesh,
        GradientReducer(mesh, trained, holders),
        seed,
        options.check_finite,
        picture=waiting,
    )
    relay = RelayView(module, interception, owners, RelayChannel(mesh))
    return Pipeline(
        module, plan, graph, mesh, engine, resident, owners, trained, seed,
        interception, relay,
    )  # fmt: skip


def cut_positions(plan: PipelinePlan, graph: LayerGraph) -> tuple[int, ...]:
    """Where a plan cuts the trained path of a graph.

    Raises:
        PlanError: The plan was made for other layers; names the first difference.
    """
    num_layers = len(graph.path)
    planned = plan.stages[-1].last_layer + 1
    if planned != num_layers:
        raise PlanError(
            f"the plan cuts {planned} layers, but this module has {num_layers}; "
            "make a plan for this module, or leave strategy.plan out"
        )
    return tuple(stage.first_layer for stage in plan.stages[1:])


def _make_plan(
    module: nn.Module,
    step: Step,
    batch: Any,
    graph: LayerGraph,
    options: PipelineOptions,
    device: torch.device,
    world_size: int,
) -> str:
    """Rank 0 decides: reads the plan it was given, or searches one."""
    if options.plan is not None:
        return _given_plan(options.plan, world_size).to_json()
    profile = _profile(module, step, batch, graph, options.profile, device)
    data_parallel = _data_parallel(options, world_size)
    plan_options = PlanOptions(
        global_batch_size=num_samples(batch) * data_parallel,
        data_parallel=data_parallel,
        num_stages=options.num_stages,
        num_microbatches=options.num_microbatches,
        num_replicas=_as_tuple(options.num_replicas),
        schedule=options.schedule,
        filling=options.filling,
    )
    return find_plan(profile, Cluster(num_ranks=world_size), plan_options).to_json()


def _data_parallel(options: PipelineOptions, world_size: int) -> int:
    """Pipelines side by side: what is left over when a pipeline's size is given, else one.

    The batch of the data loader is one pipeline's, so this cannot be left to the search.
    """
    if options.data_parallel != "auto":
        return int(options.data_parallel)
    stages, replicas = options.num_stages, _as_tuple(options.num_replicas)
    if isinstance(replicas, tuple):
        return max(world_size // sum(replicas), 1)
    if stages == "auto" or replicas == "auto":
        return 1
    return max(world_size // (stages * replicas), 1)


def _without_frozen_parts(schedule: Schedule) -> Schedule:
    """Frozen parts are laid out anew for each batch, whose last one may be smaller."""
    programs = tuple(
        tuple(i for i in program if not isinstance(i, Encode | ExchangeFrozen))
        for program in schedule.programs
    )
    return replace(schedule, programs=programs)


def _given_plan(plan: PipelinePlan | str | Path, world_size: int) -> PipelinePlan:
    if not isinstance(plan, PipelinePlan):
        path = Path(plan)
        if not path.is_file():
            raise PlanError(f"there is no plan at {path}")
        plan = PipelinePlan.from_json(path.read_text())
    if world_size % plan.schedule.num_ranks:
        raise PlanError(
            f"the plan is for {plan.schedule.num_ranks} ranks per pipeline, which does not divide "
            f"the {world_size} ranks of this run"
        )
    return plan


def _profile(
    module: nn.Module,
    step: Step,
    batch: Any,
    graph: LayerGraph,
    source: Any,
    device: torch.device,
) -> ModelProfile:
    if isinstance(source, ModelProfile):
        return source
    if source == "flops":
        return estimate_profile(module, graph)
    if source == "measure":
        from lightning_diffpipe.profiling.measure import measure_profile

        return measure_profile(module, step, batch, graph, device=device)
    path = Path(source)
    if not path.is_file():
        raise ConfigurationError(
            f"profile={source!r} is neither 'measure', 'flops' nor a file that exists"
        )
    return ModelProfile.from_json(path.read_text())


def _require_trainable(module: nn.Module) -> None:
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ConfigurationError(
            f"{type(module).__name__} has no trainable parameters, so there is nothing to pipeline; "
            "check requires_grad, or use another strategy"
        )


def _own_seed(options: PipelineOptions) -> int:
    """The seed asked for, else `seed_everything`'s, else this process's own."""
    if options.seed is not None:
        return options.seed
    return int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed()))


def _align_parameters(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Gives every rank rank 0's weights where they differ.

    Without `seed_everything` each process initialises other weights; from checkpoints they are
    equal, and then nothing but sums travels.
    """
    if group is None:
        return
    tensors = [*module.parameters(), *module.buffers()]
    sums = torch.stack([_checksum(tensor) for tensor in tensors]) if tensors else torch.zeros(0, 2)
    expected = sums.clone()
    dist.broadcast(expected, src=0, group=group)
    differs = (sums != expected).any(dim=1).to(torch.uint8)
    dist.all_reduce(differs, op=dist.ReduceOp.MAX, group=group)
    with torch.no_grad():
        for tensor, differing in zip(tensors, differs.tolist(), strict=True):
            if differing:
                value = tensor.detach().cpu().contiguous()
                dist.broadcast(value.reshape(-1).view(torch.uint8), src=0, group=group)
                tensor.copy_(value)


def _checksum(tensor: Tensor) -> Tensor:
    """Two sums that tell different weights apart, NaN counted as a value."""
    value = torch.nan_to_num(tensor.detach().cpu().to(torch.float64).reshape(-1))
    weights = torch.arange(1, value.numel() + 1, dtype=torch.float64)
    return torch.stack([value.sum(), (value * (weights % 8191)).sum()])


def _world_group(world_size: int, timeout_s: float) -> dist.ProcessGroup | None:
    if world_size == 1:
        return None
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=max(timeout_s, 1800.0)))


def _close(group: dist.ProcessGroup | None) -> None:
    if group is not None:
        dist.destroy_process_group(group)


def _agree(value: Any, group: dist.ProcessGroup | None) -> Any:
    """Rank 0's value on every rank."""
    if group is None:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=group)
    return box[0]


def _require_equal(digest: str, group: dist.ProcessGroup | None) -> None:
    if group is None:
        return
    digests: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(digests, digest, group=group)
    if len(set(digests)) > 1:
        ranks = [rank for rank, other in enumerate(digests) if other != digests[0]]
        raise ConfigurationError(
            f"ranks {ranks} see other layers in training_step than rank 0; build the same module with "
            "the same options on every rank, and keep rank-dependent branches out of training_step"
        )


def _residents(module: nn.Module, pieces: Cut, mesh: Mesh, local_rank: int) -> frozenset[str]:
    """Parameters a position holds: its stages', all frozen layers', and on the first the unread."""
    stages = mesh.layout.placement.stages_of(local_rank)
    held = frozenset().union(
        pieces.frozen.parameters, *(pieces.stages[s].parameters for s in stages)
    )
    if local_rank == 0:
        read = frozenset().union(
            pieces.frozen.parameters, *(stage.parameters for stage in pieces.stages)
        )
        held |= {name for name, _ in module.named_parameters() if name not in read}
    return held


def _owners(module: nn.Module, pieces: Cut, residents: Sequence[frozenset[str]]) -> dict[str, int]:
    """First holder of every entry of the state dict that some rank lacks."""
    canonical = {id(parameter): name for name, parameter in module.named_parameters()}
    owners = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        original = canonical[id(parameter)]
        holding = [local for local, held in enumerate(residents) if original in held]
        if len(holding) < len(residents):
            owners[name] = holding[0]
    return owners


def _whereabouts(pieces: Cut, placement: Placement) -> dict[str, str]:
    """For error messages: where each parameter lives."""
    return {
        name: f"stage {stage.index} (rank {placement.stage_ranks[stage.index][0]} of the pipeline)"
        for stage in pieces.stages
        for name in stage.parameters
    }


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
