"""From a module and one batch to a running pipeline.

    equal weights -> probe -> profile -> plan (rank 0, broadcast) -> fold -> groups -> place -> engine

Every rank builds the whole module on the host, agrees on its weights, and looks at it in the same way;
rank 0 alone plans. Then each rank keeps its own stages and the frozen layers, and gives the memory of
everything else back.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_diffpipe.errors import (
    ConfigurationError,
    DiffPipeError,
    GraphError,
    PlanError,
    raised_by_all,
)
from lightning_diffpipe.graph.layer import LayerGraph
from lightning_diffpipe.graph.probe import probe, probe_named
from lightning_diffpipe.graph.samples import Form
from lightning_diffpipe.host_memory import keep_freed_memory
from lightning_diffpipe.pipeline import Basis, Pipeline, Process, assemble
from lightning_diffpipe.planning.cluster import Cluster
from lightning_diffpipe.planning.options import PlanOptions
from lightning_diffpipe.planning.plan import PipelinePlan
from lightning_diffpipe.planning.plan_checks import check_wishes
from lightning_diffpipe.planning.profile import ModelProfile
from lightning_diffpipe.planning.search import find_plan
from lightning_diffpipe.profiling.bench import Rounds
from lightning_diffpipe.profiling.cache import cached_profile
from lightning_diffpipe.profiling.estimate import estimate_profile
from lightning_diffpipe.profiling.measure import Subject, splittable_encoders
from lightning_diffpipe.profiling.pooling import pooled, summed_up
from lightning_diffpipe.refusals import warn_of_whole_compiled
from lightning_diffpipe.runtime.links import gloo_of_all_hosts, least_memory_bytes, measure_cluster
from lightning_diffpipe.runtime.microbatch import num_samples, split
from lightning_diffpipe.runtime.partitioned import Step

_log = logging.getLogger(__name__)
Auto = Literal["auto"]
_NUM_PROBED_SAMPLES = 2
_PLANNING_TIMEOUT_S = 1800.0
_ADAM_BYTES_FACTOR = 2.0  # the optimizer is made when the module has been cut


@dataclass(frozen=True)
class PipelineOptions:
    """What a user may decide; the strategy's arguments, documented there.

    Attributes:
        averages_bytes_factor: Bytes of averaged weights for each byte of gradient; the strategy knows of
            them.
    """

    num_stages: int | Auto = "auto"
    num_microbatches: int | Auto = "auto"
    schedule: str = "1f1b"
    num_replicas: int | Sequence[int] | Auto = "auto"
    data_parallel: int | Auto = "auto"
    filling: str = "auto"
    frozen_group_size: int | Auto = "auto"
    plan: PipelinePlan | str | Path | None = None
    profile: Any = "measure"
    cluster: Any = "measure"
    seed: int | None = None
    check_finite: bool = False
    verify: bool = False
    optimizer_bytes_factor: float | Auto = "auto"
    averages_bytes_factor: float = 0.0

    def __post_init__(self) -> None:
        # What cannot be is refused before anything is done.
        self.wishes(1, self.data_parallel)

    def wishes(self, global_batch_size: int, data_parallel: int | Auto) -> PlanOptions:
        """What the planner is asked for.

        Raises:
            ConfigurationError: A value that cannot be.
        """
        factor = self.optimizer_bytes_factor
        options = PlanOptions(
            global_batch_size=global_batch_size,
            data_parallel=data_parallel,
            num_stages=self.num_stages,
            num_microbatches=self.num_microbatches,
            num_replicas=_as_tuple(self.num_replicas),
            schedule=self.schedule,
            filling=self.filling,
            frozen_group_size=self.frozen_group_size,
            optimizer_bytes_factor=_ADAM_BYTES_FACTOR if factor == "auto" else factor,
        )
        # Averages live as long as the optimizer's state, one for each trained weight.
        all_bytes = options.optimizer_bytes_factor + self.averages_bytes_factor
        return replace(options, optimizer_bytes_factor=all_bytes)


def prepare(
    module: nn.Module, step: Step, batch: Any, options: PipelineOptions, process: Process
) -> Pipeline:
    """Plans a module's pipeline and sets this rank's part of it up.

    Args:
        module: The whole module, on the host.
        step: Module and batch to loss.
        batch: A batch of one pipeline, on the host; equal on all ranks.
        options: The user's decisions.
        process: Where this rank runs.

    Raises:
        ConfigurationError: The module trains nothing, or the options do not fit it.
        PlanError: A given plan was made for another model or world.
        GraphError: The step cannot be cut at its layers.
    """
    with raised_by_all():
        _require_trainable(module)
    if process.device.type == "cpu":
        keep_freed_memory()
    world = _world_group(process)
    seed = _agree(_own_seed(options), world)
    _align_parameters(module, world)
    size = num_samples(batch)
    probed = min(_NUM_PROBED_SAMPLES, size)
    small = split(batch, [probed, size - probed])[0]
    planned = _agree(_planned_layers(options) if process.rank == 0 else (), world)
    form = Form.of(batch, size)
    graph = _on_all_ranks(lambda: _probed(module, step, small, form, seed, planned), world)
    with raised_by_all():
        _require_equal(graph.digest, world)
    warn_of_whole_compiled(module, graph)
    microbatch_size = None
    if isinstance(options.num_microbatches, int):
        microbatch_size = math.ceil(size / options.num_microbatches)
    subject = Subject(
        module, step, batch, graph, device=process.device, microbatch_size=microbatch_size
    )
    plan, basis = _plan_of_rank_0(subject, options, process, world)
    _close(world)
    pipeline = assemble(
        module,
        step,
        batch,
        small,
        graph,
        plan,
        process,
        seed=seed,
        check_finite=options.check_finite,
        verify=options.verify,
    )
    return replace(pipeline, basis=basis)


def _planned_layers(options: PipelineOptions) -> tuple[str, ...]:
    """The trained layers that a given plan or profile names; none where nothing is given.

    What cannot be read is told where it is needed.
    """
    try:
        if options.plan is not None:
            return _read_plan(options.plan).layers
        profile = _given_profile(options.profile)
    except (DiffPipeError, OSError, TypeError):
        return ()
    return () if profile is None else _layers_of(profile)


def _layers_of(profile: ModelProfile) -> tuple[str, ...]:
    return tuple(layer.name for backbone in profile.backbones for layer in backbone.layers)


def _probed(
    module: nn.Module, step: Step, batch: Any, form: Form, seed: int, planned: tuple[str, ...]
) -> LayerGraph:
    """The layers of a step: those that a plan or profile names, which may be finer, if this module has them."""
    graph = probe(module, step, batch, seed=seed, form=form)
    if not planned or graph.path_names == planned:
        return graph
    try:
        return probe_named(module, step, batch, graph, planned, seed=seed)
    except GraphError as error:
        _log.info("the layers of the given plan or profile are not those of this module: %s", error)
        return graph


def _plan_of_rank_0(
    subject: Subject,
    options: PipelineOptions,
    process: Process,
    world: dist.ProcessGroup | None,
) -> tuple[PipelinePlan, Basis | None]:
    """Rank 0's plan and what it was made from, or its reason why there is none, on every rank.

    All ranks time the layers at once, as they will run at once: cores share caches and memory.
    """
    cluster, profile = _cluster(options, process, world), None
    answer: str | DiffPipeError = ""
    try:
        profile = None if options.plan is not None else _profile(subject, options.profile, world)
        if process.rank == 0:
            profile = profile and _knowing_what_splits(subject, profile)
            answer = _make_plan(subject, profile, options, cluster, process).to_json()
    except DiffPipeError as error:
        answer = error
    answer = _agree(answer, world)
    if isinstance(answer, DiffPipeError):
        with raised_by_all():
            raise answer
    basis = None if profile is None else Basis(profile, cluster)
    return PipelinePlan.from_json(answer), basis


def _make_plan(
    subject: Subject,
    profile: ModelProfile | None,
    options: PipelineOptions,
    cluster: Cluster,
    process: Process,
) -> PipelinePlan:
    """Reads the plan that was given, or searches one."""
    if options.plan is not None:
        _warn_of_unused(options)
        plan = _given_plan(options.plan, process.world_size, num_samples(subject.batch))
        num_pipelines = process.world_size // plan.ranks_per_pipeline
        check_wishes(plan, options.wishes(1, options.data_parallel), num_pipelines)
        return plan
    assert profile is not None
    _require_runnable_filling(options.filling)
    data_parallel = _data_parallel(options, process.world_size)
    wishes = options.wishes(num_samples(subject.batch) * data_parallel, data_parallel)
    return find_plan(profile, cluster, wishes)


def _warn_of_unused(options: PipelineOptions) -> None:
    """Names what only matters for planning, where a plan is given."""
    unset = {
        "profile": ("measure", None),
        "cluster": ("measure",),
        "optimizer_bytes_factor": ("auto",),
    }
    unused = [name for name, values in unset.items() if getattr(options, name) not in values]
    if unused:
        _log.warning(
            "the plan is followed as it is, so that %s beside it changes nothing: leave it out, or plan anew "
            "with it, without plan", " and ".join(unused),
        )  # fmt: skip


def _knowing_what_splits(subject: Subject, profile: ModelProfile) -> ModelProfile:
    """The profile, with the encoders looked at here if it does not tell whether they can be split.

    It does not where it was estimated, or layers were timed one by one.
    """
    if any(encoder.splittable is None for encoder in profile.encoders):
        known = splittable_encoders(subject)
        profile = replace(
            profile,
            encoders=tuple(
                replace(e, splittable=known.get(e.name)) if e.splittable is None else e
                for e in profile.encoders
            ),
        )
    if whole := profile.whole_encoders:
        _log.warning(
            "%s mixes samples or draws random numbers: frozen layers run on whole "
            "microbatches, so that bubbles are filled in larger pieces", ", ".join(whole),
        )  # fmt: skip
    return profile


def _cluster(
    options: PipelineOptions, process: Process, world: dist.ProcessGroup | None
) -> Cluster:
    """The links between the ranks: given, or measured. A collective call.

    Without measured layers there is nothing to weigh them against, and they count as free. The memory of the
    smallest device is a limit all the same, on one rank as well, unless another one is given.
    """
    if isinstance(options.cluster, Cluster):
        return options.cluster
    if isinstance(options.cluster, Mapping):
        given = Cluster.from_dict({"num_ranks": process.world_size, **options.cluster})
        if given.memory_bytes is not None:
            return given
        return replace(given, memory_bytes=least_memory_bytes(world, process.device))
    if options.cluster != "measure":
        raise ConfigurationError(
            f"cluster must be 'measure', a Cluster or a mapping; got {options.cluster!r}"
        )
    if process.world_size == 1 or options.plan is not None or options.profile == "flops":
        memory_bytes = least_memory_bytes(world, process.device)
        return Cluster(process.world_size, memory_bytes=memory_bytes)
    group = dist.new_group(backend=process.backend)
    cluster = measure_cluster(group, process.device)
    _close(group)
    return cluster


def _require_runnable_filling(filling: str) -> None:
    """Refuses a policy that is planned only: results of a layer are not moved to run the next elsewhere.

    Raises:
        ConfigurationError: It is one.
    """
    if filling == "diffusionpipe":
        raise ConfigurationError(
            "filling='diffusionpipe' can be planned (diffpipe plan filling=diffusionpipe) but not run: it "
            "moves samples between ranks in the middle of an encoder. Use filling=shares, which keeps "
            "a sample on one rank, or filling=none"
        )


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


def planned_pipelines(options: PipelineOptions, world_size: int) -> int:
    """How many pipelines side by side the plan will have that `prepare` makes; one where it will fail."""
    try:
        if options.plan is not None:
            return max(world_size // _read_plan(options.plan).ranks_per_pipeline, 1)
        return _data_parallel(options, world_size)
    except (DiffPipeError, OSError):
        return 1


def _given_plan(plan: PipelinePlan | str | Path, world_size: int, batch_size: int) -> PipelinePlan:
    """The plan to follow, if it was made for these ranks and for batches at least as large.

    Raises:
        PlanError: It was not, or there is none.
        ConfigurationError: It can be planned only.
    """
    plan = _read_plan(plan)
    _require_runnable_filling(plan.options.filling)
    if world_size % plan.schedule.num_ranks:
        raise PlanError(
            f"the plan is for {plan.schedule.num_ranks} ranks per pipeline, which does not divide "
            f"the {world_size} ranks of this run"
        )
    told = (
        f"the plan is for {plan.samples_per_pipeline} samples of each pipeline (global_batch_size="
        f"{plan.options.global_batch_size}, data_parallel={plan.num_pipelines}), but the first batch of "
        f"this run has {batch_size}"
    )
    if batch_size > plan.samples_per_pipeline:
        raise PlanError(
            f"{told}: its memory is not planned. Plan with global_batch_size="
            f"{batch_size * plan.num_pipelines}, or load batches of {plan.samples_per_pipeline}"
        )
    if batch_size < plan.samples_per_pipeline:
        # As where a run goes on with the last batch of an epoch.
        warnings.warn(f"{told}: its times are not those of smaller batches", stacklevel=2)
    return plan


def _read_plan(plan: PipelinePlan | str | Path) -> PipelinePlan:
    if isinstance(plan, PipelinePlan):
        return plan
    path = Path(plan)
    if not path.is_file():
        raise PlanError(f"there is no plan at {path}")
    return PipelinePlan.from_json(path.read_text(errors="replace"), str(path))


def _profile(subject: Subject, source: Any, world: dist.ProcessGroup | None) -> ModelProfile:
    if source == "flops":
        return estimate_profile(subject.module, subject.graph)
    profile = _given_profile(source)
    if profile is None:
        agree, pool = partial(_agree, group=world), partial(pool_times, group=world)
        return cached_profile(subject, agree=agree, pool=pool)
    _require_layers(profile, subject)
    return profile


def _given_profile(source: Any) -> ModelProfile | None:
    """The profile that is given; None if there shall be one of this module.

    Raises:
        ConfigurationError: There is none at the path.
        ProfileError: The file is not one.
    """
    if isinstance(source, ModelProfile):
        return source
    if source in (None, "measure", "flops"):
        return None
    path = Path(source)
    if not path.is_file():
        raise ConfigurationError(
            f"profile={source!r} is neither 'measure', 'flops' nor a file that exists"
        )
    return ModelProfile.from_json(path.read_text(errors="replace"), str(path))


def _require_layers(profile: ModelProfile, subject: Subject) -> None:
    """Refuses a profile of other layers before anything is planned from it.

    Raises:
        ConfigurationError: It is one; names the first difference.
    """
    names, own = _layers_of(profile), subject.graph.path_names
    if names == own:
        return
    pairs = enumerate(zip(names, own, strict=False))
    odd = (f"layer {i} is {a} there and {b} here" for i, (a, b) in pairs if a != b)
    differ = next(odd, f"from layer {min(len(names), len(own))} on")
    raise ConfigurationError(
        f"the profile {profile.name!r} has {len(names)} layers, but the trained part of "
        f"{type(subject.module).__name__} has {len(own)}, and they differ: {differ}. Profile this module "
        "(diffpipe profile), or leave strategy.profile out"
    )


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


def _world_group(process: Process) -> dist.ProcessGroup | None:
    """A group for the preparation; patient, as rank 0 may measure for long."""
    if process.world_size == 1:
        return None
    patience_s = max(process.timeout_s, _PLANNING_TIMEOUT_S)
    with gloo_of_all_hosts():
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=patience_s))


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


def _on_all_ranks(make: Callable[[], Any], group: dist.ProcessGroup | None) -> Any:
    """What `make`, which talks to nobody, returns here; if it is refused on any rank, the same error on all."""
    if group is None:
        return make()
    value, error = None, None
    try:
        value = make()
    except DiffPipeError as raised:
        error = raised
    errors: list[DiffPipeError | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(errors, error, group=group)
    first = next((each for each in errors if each is not None), None)
    if first is not None:
        with (
            raised_by_all()
        ):  # this rank's own one, which knows where it was raised, if it says the same
            raise error if error is not None and str(error) == str(first) else first
    return value


def pool_times(rounds: Rounds, group: dist.ProcessGroup | None) -> Rounds:
    """The layer times of all ranks of a group; each sends one typical step, not all of its runs."""
    if group is None:
        return rounds
    ranks: list[Rounds] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(ranks, summed_up(rounds), group=group)
    return pooled(ranks)


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


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
