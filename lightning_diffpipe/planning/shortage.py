"""The error where no plan fits into memory: the bytes that are short, and the smallest changes that would fit.

Changes are planned like anything else, so each comes with the step it promises: an option that was set, then
the model (adapters, 4 bits, encoders out of memory), smaller batches and more ranks, several of them together where
no single one suffices.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from lightning_diffpipe.errors import DiffPipeError, PlanError
from lightning_diffpipe.planning.cluster import Cluster
from lightning_diffpipe.planning.cost import CostModel, LayerRun
from lightning_diffpipe.planning.cut_search import Search, StageNeeds
from lightning_diffpipe.planning.evaluation import Evaluator, Proposal
from lightning_diffpipe.planning.memory import checkpointed, recomputable, streamable, streamed
from lightning_diffpipe.planning.options import PARTITIONS_WITH_REPLICAS, PlanOptions
from lightning_diffpipe.planning.partition import Cut
from lightning_diffpipe.planning.plan import PipelinePlan
from lightning_diffpipe.planning.profile import (
    EncoderLayerProfile,
    LayerProfile,
    ModelProfile,
    encoded_first,
)
from lightning_diffpipe.planning.proposals import (
    MOST_UNEQUAL_RANKS,
    Shape,
    baseline_cuts,
    is_long,
    replicas_of,
    shapes,
)
from lightning_diffpipe.planning.schedules import SCHEDULES

REMEDY_S = 5.0
"""Seconds spent on each option that might help where no plan fits."""

REMEDIES_S = 60.0
"""Seconds spent on all changes of model, batch and ranks, alone and together."""

WORTH_FREEING = 0.05
"""Share of the memory that encoders, or optimizer states, have to take for ranks to be planned without them."""

ADAPTER_SHARE = 0.02
"""Weights of adapters, as a share of those they are added to: rank 32 at a width of 3072."""

SHARE_OF_4_BITS = 0.28
"""Size of weights in 4 bits, with the scales of their blocks, as a share of that in 16."""

MOST_NAMED = 2
"""Remedies on the same ranks that are named."""

Plans = Callable[[ModelProfile, Cluster, PlanOptions, float, float], list[PipelinePlan]]
"""Finds plans that fit into memory with a step below some seconds, until some time by `time.perf_counter()`."""


def some_share_stages(model: CostModel, options: PlanOptions) -> bool:
    """Returns whether several ranks may hold the same stage."""
    return any(
        shape.num_pipelines * shape.num_ranks > shape.num_stages // shape.stages_per_rank
        for shape in shapes(model, options)
    )


def encoding_choices(model: CostModel, options: PlanOptions) -> list[PlanOptions]:
    """Returns the options with all ranks that may hold the encoders, and with fewer, where that frees memory."""
    limit, most = model.cluster.memory_bytes, model.cluster.num_ranks
    encoders = model.frozen_bytes + model.offloaded_bytes
    if options.encoding_ranks != "auto" or encoders < WORTH_FREEING * (limit or math.inf):
        return [options]
    counts = ("auto", *(2**shift for shift in range(most.bit_length()) if 2**shift < most))
    return [replace(options, encoding_ranks=count) for count in counts]


def offload_choices(model: CostModel, options: PlanOptions) -> tuple[str, ...]:
    """Returns where to store optimizer states, where that is left open and frees memory: on devices first."""
    if options.optimizer_offload != "auto":
        return (options.optimizer_offload,)
    states = model.state_bytes(LayerRun(0, model.num_layers)) / model.cluster.num_ranks
    frees = states >= WORTH_FREEING * (model.cluster.memory_bytes or math.inf)
    return ("none", "all") if frees else ("none",)


def nothing_proposed(model: CostModel, options: PlanOptions) -> PlanError | None:
    """Returns the error if there is no way to share the ranks among stages, else None."""
    proposed = tuple(shapes(model, options))
    if not any(any(replicas_of(options, shape)) for shape in proposed):
        stages = " or ".join(map(str, sorted({shape.num_stages for shape in proposed})))
        return PlanError(
            f"the ranks of a pipeline cannot be shared among {stages} stages: a stage gets no more ranks than "
            f"there are microbatches, and stages on more than {MOST_UNEQUAL_RANKS} ranks "
            "get equal shares; use another num_stages or more microbatches, or name the ranks of "
            "every stage in num_replicas"
        )
    if options.partition not in PARTITIONS_WITH_REPLICAS:
        return None
    if any(any(baseline_cuts(model, options, shape)) for shape in proposed):
        return None
    return PlanError(
        f"partition={options.partition} chooses the replicas itself, and never as num_replicas="
        f"{options.num_replicas} asks for; leave num_replicas=auto, or choose partition=auto"
    )


def nothing_fits(
    profile: ModelProfile, cluster: Cluster, options: PlanOptions, plans: Plans
) -> PlanError:
    """Returns the error: how much memory is short, and which changes would help, with the planned step of each."""
    limit = cluster.memory_bytes
    assert limit is not None
    if options.filling == "auto":
        options = replace(options, filling="none")
    least = profile
    if options.checkpointing == "auto":
        least = checkpointed(profile, recomputable(profile))
    if options.streaming == "auto" and options.checkpointing != "none":
        every = streamable(profile)
        least = streamed(checkpointed(least, every), every, cluster.host_bytes_per_s)
    shards = options.shard_optimizer is not False
    (*_, offload) = offload_choices(CostModel.of(least, cluster, options), options)
    saving = replace(options, shard_optimizer=shards, optimizer_offload=offload)
    calls = CostModel.of(least, cluster, saving)
    model, choices = Evaluator(calls, options).model, encoding_choices(calls, options)
    need, of = min(_least_memory(model, choice) for choice in (choices[0], *choices[1:2]))
    reason = f"{of[0]} needs {need:,} ({of[1]}), {need - limit:,} too many"
    limits = ", ".join(f"{each:,}" for each in cluster.rank_memory_bytes)
    if limits and need <= limit:
        reason = f"{of[0]} needs {need:,} ({of[1]}), and some ranks have less"
    elif need <= limit and cluster.host_memory_bytes:
        reason = f"what is copied from hosts then does not fit into {cluster.host_memory_bytes:,} bytes of each"
    elif need <= limit and options.filling != "none":  # which counts even shares
        reason = (
            f"{of[0]} would need {need:,} ({of[1]}) with even shares of the frozen work, but bubbles "
            "are uneven, and so are shares"
        )
    remedy = _other_options(profile, cluster, options, plans)
    remedy = remedy or _other_models(profile, cluster, options, plans)
    remedy = remedy or "use devices with more memory, or smaller samples"
    return PlanError(f"no plan fits into {limits or f'{limit:,}'} bytes a rank: {reason}; {remedy}")


def _other_options(
    profile: ModelProfile, cluster: Cluster, options: PlanOptions, plans: Plans
) -> str:
    """Returns the options without which something would fit, one alone or else all together."""
    freed = {
        "optimizer_offload": "all",
        "num_stages": "auto", "num_microbatches": "auto", "num_replicas": "auto", "data_parallel": "auto",
        "schedule": "auto", "filling": "none", "checkpointing": "auto", "streaming": "auto",
        "encoding_ranks": "auto", "shard_optimizer": True,
    }  # fmt: skip
    fixed = [n for n, value in freed.items() if getattr(options, n) not in ("auto", value)]

    def would_fit(names: Sequence[str]) -> str:
        changed = PlanOptions.from_dict(options.to_dict() | {name: freed[name] for name in names})
        if not (plan := _planned(profile, cluster, changed, plans)):
            return ""
        values = plan.options.to_dict()
        for name, layers in (("checkpointing", plan.recomputed), ("streaming", plan.streamed)):
            values[name] = "auto" if layers else "none"
        return ", ".join(f"{name}={values[name]}" for name in names)

    alone = [text for name in fixed if (text := would_fit([name]))]
    if alone:
        return f"{' or '.join(alone)} would fit"
    together = would_fit(fixed) if len(fixed) > 1 else ""
    return f"{together} together would fit" if together else ""


class _Change(NamedTuple):
    """What is changed, in words, and what it makes of a profile; of ranks and batches where it is not 0."""

    words: str
    of_profile: Callable[[ModelProfile], ModelProfile] | None = None
    num_ranks: int = 0
    num_batches: int = 0
    encodes_first: bool = False


class _Remedy(NamedTuple):
    """Changes that would fit, in the order in which they are preferred."""

    num_changes: int
    num_ranks: int
    step_s: float
    words: str


def _other_models(
    profile: ModelProfile, cluster: Cluster, options: PlanOptions, plans: Plans
) -> str:
    """Returns the fewest changes of model and batch that would fit, and those with more ranks, with their steps."""
    free = replace(
        options,
        num_stages="auto",
        num_microbatches="auto",
        num_replicas="auto",
        data_parallel="auto",
        encoding_ranks="auto",
        checkpointing="auto",
        streaming="auto",
    )
    kinds, until_s = _changes(profile, options), time.perf_counter() + REMEDIES_S

    def ranks_of(changes: Sequence[_Change]) -> int:
        return max(cluster.num_ranks, *(change.num_ranks for change in changes))

    def step_s(changes: Sequence[_Change]) -> float | None:
        changed, batches = profile, max(1, *(change.num_batches for change in changes))
        for change in changes:
            changed = change.of_profile(changed) if change.of_profile else changed
        narrowed = replace(
            free,
            global_batch_size=free.global_batch_size // batches,
            encode_first=free.encode_first or any(change.encodes_first for change in changes),
        )
        wider = replace(cluster, num_ranks=ranks_of(changes))
        plan = _planned(changed, wider, narrowed, plans, until_s)
        return batches * plan.planned.iteration_s if plan else None

    def fewest(always: Sequence[Sequence[_Change]], most: int) -> list[_Remedy]:
        """Returns what would fit of one change of each kind of as few kinds as possible."""
        every = [kind[-1] for kind in (*kinds, *always)]
        on_whole_batches = [change for change in every if not change.num_batches]
        if not any(step_s(some) for some in (on_whole_batches, every) if some):
            return []
        for count in range(max(len(always), 1), most + 1):
            found = list[_Remedy]()
            for chosen in itertools.combinations(kinds, count - len(always)):
                for changes in itertools.product(*chosen, *always):
                    if seconds := step_s(changes):
                        words = " and ".join(change.words for change in changes)
                        words = f"{words} ({seconds:.3g} s a step)"
                        found.append(_Remedy(count, ranks_of(changes), seconds, words))
                        break
            if found:
                return sorted(found)
        return []

    remedies = fewest((), len(kinds))[:MOST_NAMED]
    count, most = cluster.num_ranks, remedies[0].num_changes if remedies else len(kinds) + 1
    more = [n for n in (count + 1, 2 * count, 4 * count, 8 * count) if n < 65]
    if more and not (cluster.rank_memory_bytes or cluster.rank_speeds):
        remedies += fewest([[_Change(f"{n} ranks", num_ranks=n) for n in more]], most)[:1]
    remedies.sort(key=lambda remedy: remedy.num_changes)
    return " or ".join(remedy.words for remedy in remedies) + " would fit" if remedies else ""


def _changes(profile: ModelProfile, options: PlanOptions) -> list[list[_Change]]:
    """Returns what may be changed on the same ranks: of each kind the smallest change first."""
    kinds = list[list[_Change]]()
    if _trains_most(profile):
        kinds.append([_Change("adapters in place of all weights", _as_adapters)])
    if not profile.quantized:
        kinds.append([_Change("model.quantization=nf4", _in_4_bits)])
    if encoded_first(profile) != profile:
        kinds.append([_Change("encode_first=true", encoded_first, encodes_first=True)])
    size, schedule = options.global_batch_size, SCHEDULES.get(options.schedule)
    counts = [n for n in dict.fromkeys((2, size)) if size % n == 0 and size > 1]
    if counts and (schedule is None or schedule.flushes):  # else gradients are not accumulated
        kinds.append([
            _Change(f"trainer.accumulate_grad_batches={n} with batches of {size // n}", num_batches=n)
            for n in counts
        ])  # fmt: skip
    return kinds


def _trains_most(profile: ModelProfile) -> bool:
    trained = sum(layer.gradient_bytes for layer in profile.layers)
    return 2 * trained > sum(layer.parameter_bytes for layer in profile.layers)


def _as_adapters(profile: ModelProfile) -> ModelProfile:
    """Returns the profile with the gradients of adapters: a layer's backward makes those of its inputs."""

    def changed(layer: LayerProfile) -> LayerProfile:
        adapters = round(ADAPTER_SHARE * layer.gradient_bytes)
        weights = layer.parameter_bytes + adapters
        streamable_bytes = layer.streamable_bytes + layer.gradient_bytes
        return replace(
            layer,
            gradient_bytes=adapters,
            parameter_bytes=weights,
            streamable_bytes=streamable_bytes,
        )

    return _with_layers(profile, changed)


def _in_4_bits(profile: ModelProfile) -> ModelProfile:
    """Returns the profile with frozen weights of 16 bits stored in 4, and a scale for each block of them.

    Each use reads them and writes plain ones; where it is unknown how fast, that takes no time. Where most weights
    are trained, it is the same: such a model is not quantized.
    """
    if _trains_most(profile):
        return profile
    s_per_byte = (1 + SHARE_OF_4_BITS) / (profile.memory_bytes_per_s or math.inf)

    def changed(layer: LayerProfile) -> LayerProfile:
        frozen = layer.parameter_bytes - layer.gradient_bytes
        use_s = frozen * s_per_byte
        return replace(
            layer,
            parameter_bytes=layer.gradient_bytes + round(SHARE_OF_4_BITS * frozen),
            streamable_bytes=round(SHARE_OF_4_BITS * layer.streamable_bytes),
            forward_s=layer.forward_s.plus(use_s),
            backward_s=layer.backward_s.plus(use_s if layer.gradient else 0.0),
        )

    def encoded(layer: EncoderLayerProfile) -> EncoderLayerProfile:
        return replace(
            layer,
            parameter_bytes=round(SHARE_OF_4_BITS * layer.parameter_bytes),
            forward_s=layer.forward_s.plus(layer.parameter_bytes * s_per_byte),
        )

    encoders = tuple(
        replace(encoder, layers=tuple(map(encoded, encoder.layers))) for encoder in profile.encoders
    )
    return replace(_with_layers(profile, changed), encoders=encoders)


def _with_layers(
    profile: ModelProfile, change: Callable[[LayerProfile], LayerProfile]
) -> ModelProfile:
    (backbone,) = profile.backbones
    layers = tuple(map(change, backbone.layers))
    return replace(profile, backbones=(replace(backbone, layers=layers),))


def _planned(
    profile: ModelProfile,
    cluster: Cluster,
    options: PlanOptions,
    plans: Plans,
    until_s: float = math.inf,
) -> PipelinePlan | None:
    """Returns the fastest plan that is found within `REMEDY_S`, and until some time; None if none is."""
    until_s = min(until_s, time.perf_counter() + REMEDY_S)
    try:
        candidates = plans(profile, cluster, options, math.inf, until_s)
    except DiffPipeError:
        return None
    return min(candidates, key=lambda plan: plan.planned.iteration_s, default=None)


def _least_memory(model: CostModel, options: PlanOptions) -> tuple[int, tuple[str, str]]:
    """Returns what the smallest of all cuts needs on its fullest rank, and in words whether and which it is.

    After `REMEDY_S` the smallest found so far counts; the long shapes, which take longest, come last.
    """
    search, until_s = Search(Evaluator(model, options)), time.perf_counter() + REMEDY_S
    least: tuple[float, int, int] = (math.inf, 0, 0)  # among equals the one with fewer stages
    smallest = "the smallest"
    for shape in sorted(shapes(model, options), key=lambda s: (is_long(s), search.least_bytes(s))):
        if search.least_bytes(shape) > least[0]:
            continue
        if least[1] and time.perf_counter() > until_s:
            smallest = "the smallest found"
            break
        for cuts in _small_cuts(search, shape, least[0] + 1):
            need = max(search.evaluator.peak_bytes(Proposal(shape, cuts)))
            least = min(least, (need, shape.num_stages, len(shape.sizes)))
    where = f"num_stages={least[1]}, num_microbatches={least[2]}"
    return int(least[0]), (smallest, where)


def _small_cuts(search: Search, shape: Shape, below: float) -> Iterator[tuple[Cut, ...]]:
    """Yields for every share of ranks the cut that needs least, where some need less than `below` bytes."""
    if search.options.partition != "auto":
        yield from baseline_cuts(search.model, search.options, shape)
        return
    weights = search.resident_bytes(shape)
    edges = (*search.even_cuts(weights, shape), len(weights))
    for replicas in replicas_of(search.options, shape):
        cuts = tuple(zip(edges, edges[1:], replicas, strict=False))
        if shape.stages_per_rank == 1 and not search.model.is_folded:
            proposal = Proposal(shape, cuts)
            needs = StageNeeds.of(search.model, search.evaluator.frame(proposal))
            most = min(below, max(search.evaluator.peak_bytes(proposal)) + 1)
            cuts = needs.smallest(most) or cuts
        yield cuts
