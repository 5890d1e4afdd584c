"""Source of a plan: given, or searched for measured layers and links.

    given plan ──────────────────────────────────────┐
    given profile, or layers timed here ─┐           ├─> rank 0's plan, as JSON, on every rank
    given cluster, or links timed here ──┴─ search ──┘

`basis_of` returns the costs, `plan_of_rank_0` the plan.
"""

import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import ceil
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

from torch import nn

from lightning_diffpipe.comm.bandwidth import measure_cluster, measure_links, with_memory
from lightning_diffpipe.comm.mesh import ProcessGroup, gathered_objects
from lightning_diffpipe.comm.rendezvous import agree
from lightning_diffpipe.comm.watcher import watcher
from lightning_diffpipe.errors import (
    ConfigurationError,
    DiffPipeError,
    LostRankError,
    PlanError,
    raised_by_all,
    require_flags,
)
from lightning_diffpipe.graph.placement import held_bytes
from lightning_diffpipe.graph.probed_step import ProbedStep
from lightning_diffpipe.host_memory import available_bytes
from lightning_diffpipe.planning.cluster import Cluster
from lightning_diffpipe.planning.codec import LARGEST
from lightning_diffpipe.planning.options import PlanOptions, ranks_of_pipeline
from lightning_diffpipe.planning.plan import PipelinePlan, check_options
from lightning_diffpipe.planning.profile import ModelProfile, of_step
from lightning_diffpipe.planning.schedules import SCHEDULES
from lightning_diffpipe.planning.search import find_plan
from lightning_diffpipe.profiling.layer_costs import estimate_profile
from lightning_diffpipe.profiling.measure import (
    LayerTimer,
    Progress,
    encodings_by_running,
    measure_costs,
    measure_profile,
)
from lightning_diffpipe.profiling.step_run import Rounds, middle, pooled, summed_up
from lightning_diffpipe.training.pipeline import Basis, Process

_log = logging.getLogger(__name__)

Auto = Literal["auto"]
EQUAL_SPEED = 0.6
"""Share of the speed of the fastest rank above which ranks count as equally fast: times are noisy."""

_TIMING_S = 1.0
_SOME_RANKS = 1024  # in place of the ranks there will be, which nobody knows yet
# What a fit has measured, for those after it.
_links: dict[Process, Cluster] = {}
_timed: WeakKeyDictionary[Any, dict[Any, tuple[ModelProfile, tuple[float, ...]]]] = (
    WeakKeyDictionary()
)
_ADAM_BYTES_FACTOR = 2.0  # the optimizer is made when the module has been cut


@dataclass(frozen=True)
class PipelineOptions:
    """Decisions of a user: the strategy's arguments, documented there.

    Attributes:
        averages_bytes_factor: Bytes of averaged weights for each byte of gradient; set by the strategy.
        encode_first: Whether encodings are stored before training; set by the strategy, too.
    """

    num_stages: int | Auto = "auto"
    num_microbatches: int | Auto = "auto"
    schedule: str = "1f1b"
    num_replicas: int | Sequence[int] | Auto = "auto"
    data_parallel: int | Auto = "auto"
    filling: str = "auto"
    frozen_group_size: int | Auto = "auto"
    encoding_ranks: int | Auto = "auto"
    checkpointing: str = "auto"
    streaming: str = "auto"
    shard_optimizer: bool | Auto = "auto"
    optimizer_offload: str = "auto"
    plan: PipelinePlan | str | Path | None = None
    profile: Any = "measure"
    cluster: Any = "measure"
    seed: int | None = None
    check_finite: bool = False
    verify: bool = False
    optimizer_bytes_factor: float | Auto = "auto"
    averages_bytes_factor: float = 0.0
    encode_first: bool = False

    def __post_init__(self) -> None:
        require_flags(check_finite=self.check_finite, verify=self.verify)
        # What cannot be is refused before anything is done.
        self.plan_options(1, self.data_parallel)
        if isinstance(self.cluster, Mapping):
            Cluster.from_dict({"num_ranks": self._ranks_of_cluster or _SOME_RANKS, **self.cluster})
        elif not isinstance(self.cluster, Cluster) and self.cluster != "measure":
            raise ConfigurationError(
                f"cluster must be 'measure', a Cluster or a mapping; got {self.cluster!r}"
            )

    def plan_options(self, global_batch_size: int, data_parallel: int | Auto) -> PlanOptions:
        """Returns what the planner is asked for.

        Raises:
            ConfigurationError: A value that cannot be.
        """
        planned = vars(self).keys() & {field.name for field in fields(PlanOptions)}
        values = {name: getattr(self, name) for name in planned}
        values |= {"global_batch_size": global_batch_size, "data_parallel": data_parallel}
        values["num_replicas"] = _as_tuple(self.num_replicas)
        if self.optimizer_bytes_factor == "auto":
            values["optimizer_bytes_factor"] = _ADAM_BYTES_FACTOR
        return PlanOptions(**values)

    @property
    def _ranks_of_cluster(self) -> int | None:
        """Number of ranks of the cluster that is given; None if it says nothing of that."""
        if not isinstance(self.cluster, Mapping):
            return getattr(self.cluster, "num_ranks", None)
        lists = (self.cluster.get(name) for name in ("rank_memory_bytes", "rank_speeds"))
        return self.cluster.get("num_ranks") or next((len(each) for each in lists if each), None)

    def refuse_for(self, num_ranks: int) -> None:
        """Refuses, before any process starts, a cluster of another number of ranks, and stages without a rank.

        Raises:
            ConfigurationError: There are too few ranks, or too many.
        """
        if self.plan is None and self._ranks_of_cluster not in (None, num_ranks):
            raise ConfigurationError(
                f"cluster has {self._ranks_of_cluster} ranks (num_ranks, rank_memory_bytes or rank_speeds), but "
                f"there are {num_ranks} (devices x num_nodes): start as many, or give figures for {num_ranks}"
            )
        spec = SCHEDULES.get(self.schedule)
        if spec is None or spec.place or self.num_stages == "auto" or self.plan is not None:
            return
        if self.num_stages > num_ranks:
            raise ConfigurationError(
                f"num_stages={self.num_stages} is more than the {num_ranks} ranks; choose between 1 and "
                f"{num_ranks}, more ranks, or schedule=interleaved, which gives each several stages"
            )

    def num_pipelines(self, world_size: int) -> int:
        """Pipelines side by side: what is left over when a pipeline's size is given, else one.

        The batch of the data loader is one pipeline's, so this cannot be left to the search.
        """
        if self.data_parallel != "auto":
            return int(self.data_parallel)
        ranks = ranks_of_pipeline(self.num_stages, _as_tuple(self.num_replicas))
        return 1 if ranks is None else max(world_size // ranks, 1)


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


def basis_of(
    probed: ProbedStep,
    options: PipelineOptions,
    process: Process,
    world: ProcessGroup | None,
    progress: Progress | None = None,
) -> Basis | None:
    """Returns what layers and links cost, given or measured; None if the plan is given. A collective call.

    All ranks time the layers at once, as they will run at once: cores share caches and memory.
    """
    if options.plan is not None:
        return None
    with watcher.inside("measuring links"):
        cluster = _cluster(options, process, world)
    basis, failure = None, None
    try:
        with watcher.inside("profiling layers"):
            timer = _timer(probed, options, process, progress)
            profile, speeds = _profile(timer, options.profile, world)
            if speeds and not cluster.rank_speeds:
                cluster = replace(cluster, rank_speeds=speeds)
            profile = of_step(profile, probed.chains.starts, probed.sequence_shares)
            if process.rank == 0:
                profile = _knowing_encoders(timer, profile, options.encode_first)
            basis = Basis(profile, cluster)
    except LostRankError:
        raise
    except DiffPipeError as error:
        failure = error
    _of_rank_0(failure, process, world)
    return basis


def _timer(
    probed: ProbedStep, options: PipelineOptions, process: Process, progress: Progress | None
) -> LayerTimer:
    """Returns what times the layers of a step for some options."""
    size, count = probed.num_samples, options.num_microbatches
    return LayerTimer(
        probed.module,
        probed.widest,
        probed.batch,
        probed.graph,
        device=process.device,
        microbatch_size=ceil(size / count) if isinstance(count, int) else None,
        budget_s=_TIMING_S,
        progress=progress,
        finds_results=process.world_size > 1 or options.encode_first,
        splits_backward=options.schedule in SCHEDULES
        and SCHEDULES[options.schedule].splits_backward,
        least_samples=probed.least_samples,
    )


def plan_of_rank_0(
    probed: ProbedStep,
    basis: Basis | None,
    options: PipelineOptions,
    process: Process,
    world: ProcessGroup | None,
) -> PipelinePlan:
    """Returns rank 0's plan, or raises its reason why there is none, on every rank; a collective call."""
    answer: str | DiffPipeError = ""
    if process.rank == 0:
        try:
            with watcher.inside("planning"):
                answer = _make_plan(probed, basis, options, process).to_json()
        except DiffPipeError as error:
            answer = error
    return PipelinePlan.from_json(_of_rank_0(answer, process, world))


def _of_rank_0(answer: Any, process: Process, world: ProcessGroup | None) -> Any:
    """Returns what rank 0 answers, on every rank; if that is an error, raises it there."""
    with watcher.inside("waiting for the plan" if process.rank else "planning"):
        answer = agree(answer, world)
    if isinstance(answer, DiffPipeError):
        with raised_by_all():
            raise answer
    return answer


def _make_plan(
    probed: ProbedStep, basis: Basis | None, options: PipelineOptions, process: Process
) -> PipelinePlan:
    """Reads the plan that was given, or searches one."""
    batch_size = probed.num_samples
    if options.plan is not None:
        plan = _given_plan(options.plan, process.world_size, batch_size)
        if options.cluster != "measure":
            _log.warning(
                "cluster is not read, as a given plan is followed as it is; leave it out, or plan again"
            )
        if plan.options.encode_first and not options.encode_first:
            raise PlanError(
                "the plan was made with encode_first=true, for ranks without encoders in training; add "
                "callbacks=cached callbacks.encoding_cache.encode_first=true, or plan again without it"
            )
        num_pipelines = process.world_size // plan.ranks_per_pipeline
        check_options(plan, options.plan_options(1, options.data_parallel), num_pipelines)
        return plan
    assert basis is not None
    profile, cluster = basis.profile, basis.cluster
    if process.device.type == "cuda" and cluster.host_memory_bytes is None:  # CPUs copy nothing
        free = int(min(available_bytes(), LARGEST))
        cluster = replace(cluster, host_memory_bytes=free)
    data_parallel = options.num_pipelines(process.world_size)
    asked = options.plan_options(batch_size * data_parallel, data_parallel)
    plan = find_plan(profile, cluster, asked)
    limit = batch_size // probed.least_samples  # of the number of microbatches
    if plan.num_microbatches <= limit:
        return plan
    if asked.num_microbatches != "auto":
        raise ConfigurationError(
            f"num_microbatches={asked.num_microbatches} leaves microbatches with one of the {batch_size} samples, "
            f"but batch norms in training mode need two. Use at most {limit}, larger batches, or nn.GroupNorm"
        )
    return find_plan(profile, cluster, replace(asked, num_microbatches=limit))


def planned_pipelines(options: PipelineOptions, world_size: int) -> int:
    """Returns how many pipelines side by side the plan will have that `prepare` makes; one where it will fail."""
    try:
        if options.plan is not None:
            return max(world_size // _read_plan(options.plan).ranks_per_pipeline, 1)
        return options.num_pipelines(world_size)
    except (DiffPipeError, OSError):
        return 1


def _given_plan(plan: PipelinePlan | str | Path, world_size: int, batch_size: int) -> PipelinePlan:
    """Returns the plan to follow, if it was made for these ranks and for batches at least as large."""
    plan = _read_plan(plan)
    if world_size % plan.schedule.num_ranks:
        raise PlanError(
            f"the plan is for {plan.schedule.num_ranks} ranks per pipeline, which does not divide "
            f"the {world_size} ranks of this run"
        )
    mismatch = (
        f"the plan is for {plan.samples_per_pipeline} samples of each pipeline (global_batch_size="
        f"{plan.options.global_batch_size}, data_parallel={plan.num_pipelines}), but the first batch of "
        f"this run has {batch_size}"
    )
    if batch_size > plan.samples_per_pipeline:
        raise PlanError(
            f"{mismatch}: its memory is not planned. Plan with global_batch_size="
            f"{batch_size * plan.num_pipelines}, or load batches of {plan.samples_per_pipeline}"
        )
    if batch_size < plan.samples_per_pipeline:
        # As where a run goes on with the last batch of an epoch.
        warnings.warn(f"{mismatch}: its times are not those of smaller batches", stacklevel=2)
    return plan


def _read_plan(plan: PipelinePlan | str | Path) -> PipelinePlan:
    if isinstance(plan, PipelinePlan):
        return plan
    path = Path(plan)
    if not path.is_file():
        raise PlanError(f"there is no plan at {path}")
    return PipelinePlan.from_json(path.read_text(errors="replace"), str(path))


def _cluster(options: PipelineOptions, process: Process, world: ProcessGroup | None) -> Cluster:
    """Returns the links between the ranks: given, or measured. A collective call.

    Without measured layers there is nothing to weigh them against, and they count as free. The memory of the
    devices is a limit all the same, on one rank as well, unless another one is given.
    """
    if isinstance(options.cluster, Cluster):
        return options.cluster
    if isinstance(options.cluster, Mapping):
        cluster = Cluster.from_dict({"num_ranks": process.world_size, **options.cluster})
        if cluster.memory_bytes is not None:
            return cluster
        return with_memory(cluster, world, process.device)
    if options.profile == "flops":
        return with_memory(Cluster(process.world_size), world, process.device)
    if process.world_size == 1:
        return measure_cluster(None, process.device)
    if not _by_all(process in _links, world):
        _links[process] = measure_links(process.backend, process.device)
    return _links[process]


def _by_all(known: bool, world: ProcessGroup | None) -> bool:
    """Returns whether all ranks know something: one may have failed where others have not."""
    return known if world is None else all(gathered_objects(known, world))


def _profile(
    timer: LayerTimer, source: Any, world: ProcessGroup | None
) -> tuple[ModelProfile, tuple[float, ...]]:
    """Estimates, reads or measures a profile of the module; with the speeds of the ranks, if they differ."""
    if source == "flops":
        return estimate_profile(timer.module, timer.graph), ()
    profile = _given_profile(source)
    if profile is None:
        profiles = _timed.setdefault(timer.module, {})
        kinds = timer.splits_backward, world is None, _switches(timer.module)
        key = timer.graph.digest, timer.counts, timer.place, kinds
        if not _by_all(key in profiles, world):
            profiles[key] = measured_by_all(timer, world)
        return profiles[key]
    names, called = tuple(layer.name for layer in profile.layers), timer.graph.path_names
    if names != called:
        pairs = enumerate(zip(names, called, strict=False))
        odd = (f"layer {i} is {a} there and {b} here" for i, (a, b) in pairs if a != b)
        differ = next(odd, f"from layer {min(len(names), len(called))} on")
        raise ConfigurationError(
            f"the profile {profile.name!r} has {len(names)} layers, but the trained part of "
            f"{type(timer.module).__name__} has {len(called)}, and they differ: {differ}. Profile this module "
            "(diffpipe profile), or leave strategy.profile out"
        )
    return profile, ()


def _switches(module: nn.Module) -> int:
    """Returns a number for what no graph shows: what modules are told, as to checkpoint, and sizes of weights."""
    sizes = ((name, held_bytes(parameter)) for name, parameter in module.named_parameters())
    switches = {
        (name, attribute, value)
        for name, part in module.named_modules()
        for attribute, value in vars(part).items()
        if isinstance(value, bool | str) and not attribute.startswith("_")
    }
    return hash((frozenset(switches), *sizes))


def _given_profile(source: Any) -> ModelProfile | None:
    """Returns the profile that is given; None if there shall be one of this module."""
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


def _knowing_encoders(timer: LayerTimer, profile: ModelProfile, encode_first: bool) -> ModelProfile:
    """Returns the profile, with the encoders observed here if it does not tell how they can be split and stored.

    It does not where it was estimated, or layers were timed one by one. On one rank nobody asks how to split them.
    """
    of_layers = profile.frozen_layers if encode_first else ()
    unknown = [e.splittable for e in profile.encoders] + [x.follows_sample for x in of_layers]
    if timer.finds_results and None in unknown:
        encodings = encodings_by_running(timer, stores=encode_first)
        encoders = [
            encodings[each.name].filled_in(each) if each.name in encodings else each
            for each in profile.encoders
        ]
        profile = replace(profile, encoders=tuple(encoders))
    if whole := profile.whole_encoders:
        _log.warning(
            "%s mixes samples or draws random numbers: frozen layers run on whole "
            "microbatches, so that bubbles are filled in larger pieces", ", ".join(whole),
        )  # fmt: skip
    return profile


def planned_layers(options: PipelineOptions) -> tuple[str, ...]:
    """Returns the trained layers that a given plan or profile names; none where nothing is given.

    What cannot be read is refused where it is needed.
    """
    try:
        if options.plan is not None:
            return _read_plan(options.plan).layers
        profile = _given_profile(options.profile)
    except (DiffPipeError, OSError, TypeError):
        return ()
    return () if profile is None else tuple(layer.name for layer in profile.layers)


def measured_by_all(
    timer: LayerTimer, world: ProcessGroup | None
) -> tuple[ModelProfile, tuple[float, ...]]:
    """Returns the profile by the times of all ranks, and the speeds of these, if they differ; a collective call.

    Each rank sends one typical step, not all of its runs. Where ranks are of unequal speed, times are those of the
    fast ones.
    """
    if world is None:
        return measure_profile(timer), ()
    try:
        costs = measure_costs(timer)
    except Exception:
        gathered_objects({}, world)  # the other ranks wait for this one
        raise
    ranks = gathered_objects(summed_up(costs.rounds), world)
    speeds = speeds_of(ranks)
    fast = (
        [each for each, speed in zip(ranks, speeds, strict=True) if speed > EQUAL_SPEED]
        if speeds
        else ranks
    )
    return costs._replace(rounds=pooled(fast)).profile(), tuple(speeds)


def speeds_of(ranks: Sequence[Rounds]) -> list[float]:
    """Returns the speed of each rank as a share of the fastest one's; none where they differ by chance only."""
    counts = set[int].intersection(*(set(rounds) for rounds in ranks))
    if not counts:
        return []
    steps = [middle(rounds[max(counts)][0]) for rounds in ranks]
    times_s = [sum((*step.before, *step.inside, *step.backward)) for step in steps]
    speeds = [min(times_s) / (step_s or 1.0) for step_s in times_s]
    return speeds if 0 < min(speeds) < EQUAL_SPEED else []
