"""A plan: everything a run needs to know, as one JSON document with a digest.

Format `diffpipe-plan/1`:

    {"format": "diffpipe-plan/1", "digest": "...", "options": {...},
     "stages": [{"index": 0, "backbone": "unet", "first_layer": 0, "last_layer": 5,
                 "num_replicas": 1}],
     "layers": ["conv_in", ...],
     "programs": {"0": "F0 F1 ..."},
     "planned": {"iteration_s": 0.0, "bubble_ratio": 0.0, ...},
     "costs": {...}}

Programs say what is computed, not what is sent: `PipelinePlan.lowered` adds the communication,
which follows from them. Where a rank holds several stages, every stage names its ranks: stage 2 of
four on two ranks has `"ranks": [0]`. `layers` is optional; with it a plan is refused for a model of other
layers, without it only for one of another number of layers. `costs` is optional; with it a plan can be
shown and simulated without its profile. Who edits a plan removes `digest` and `costs`, which are of what it was.
`changes`, optional too, is what `diffpipe plan` found that would help.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from lightning_diffpipe.errors import DiffPipeError, PlanError
from lightning_diffpipe.planning.codec import Node, read_fields, read_value, stored, write
from lightning_diffpipe.planning.cost import PipelineCosts
from lightning_diffpipe.planning.filling import (
    EncodePart,
    FrozenPiece,
    encode_parts,
    group_size_of,
    split_evenly,
)
from lightning_diffpipe.planning.instruction import Encode, Program, format_program, parse_program
from lightning_diffpipe.planning.lowering import lower
from lightning_diffpipe.planning.options import PlanOptions
from lightning_diffpipe.planning.partition import Stage, placement_of
from lightning_diffpipe.planning.schedule import Placement, Schedule, check_laws
from lightning_diffpipe.planning.schedules import DEFAULT_SCHEDULE, SCHEDULES
from lightning_diffpipe.planning.schedules.pipedream import unrolled
from lightning_diffpipe.planning.simulator import period_s, simulate
from lightning_diffpipe.planning.timeline import Timeline

FORMAT = "diffpipe-plan/1"


@dataclass(frozen=True, slots=True)
class Planned:
    """The numbers a plan promises; times in seconds for one optimizer step.

    Attributes:
        bubble_ratio: Share of rank time in which nothing runs.
        unfilled_iteration_s: Step time in seconds without filling: frozen work before the pipeline.
        frozen_s: Frozen work of all ranks of a pipeline together.
        leftover_s: Frozen work that fitted no bubble, after the pipeline.
        no_bubble_limit_s: All work divided by all ranks: no schedule of this work can be faster.
        peak_memory_bytes: Bytes by rank of a pipeline; empty where it is not known, in plans written by hand.
        sent_bytes: Bytes that the ranks of a pipeline send each other in a step, there and back; None if unknown.
        chain_sent_bytes: The same of a chain of even stages, one on each rank, where a rank holds several.
        streamed_bytes: Bytes of weights of streamed layers, in host memory, by rank of a pipeline; empty if none.
        copied_bytes: Bytes of them that a step copies to the device, by rank.
        copied_s: Seconds that the copies take, most of them while layers compute, by rank.
        offloaded_bytes: Bytes of optimizer states in host memory by rank, which a step copies to the device and
            back; empty if there are none.
        expected_s: Mean time of a step over its call sequences, with frozen work before the pipeline, where there
            are several; the other numbers are of the longest.
    """

    iteration_s: float
    bubble_ratio: float
    unfilled_iteration_s: float
    unfilled_bubble_ratio: float
    frozen_s: float
    leftover_s: float
    no_bubble_limit_s: float
    peak_memory_bytes: tuple[int, ...]
    samples_per_s: float
    sent_bytes: int | None = None
    chain_sent_bytes: int | None = None
    expected_s: float | None = None
    streamed_bytes: tuple[int, ...] = ()
    copied_bytes: tuple[int, ...] = ()
    copied_s: tuple[float, ...] = ()
    offloaded_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedChange:
    """One change to the options, and the step it promises instead; see `viewing/report.py`."""

    description: str
    iteration_s: float


def _read_programs(plan: Node, key: str) -> tuple[Program, ...]:
    """Reads the programs by rank; where a rank has one stage, its number is left out."""
    stages: tuple[Stage, ...] = read_value(tuple[Stage, ...], plan["stages"])
    _check_stages(stages)
    placement: Placement = plan["stages"].made(placement_of, stages)
    texts = plan[key].check_keys(map(str, range(placement.num_ranks)))
    programs = []
    for rank in range(placement.num_ranks):
        text, stage = texts[str(rank)], placement.only_stage_of(rank)
        programs.append(text.made(parse_program, read_value(str, text), stage))
    return tuple(programs)


def _texts_of_programs(plan: PipelinePlan, name: str) -> dict[str, str]:
    return {
        str(rank): format_program(program, plan.placement.only_stage_of(rank))
        for rank, program in enumerate(plan.programs)
    }


_AS_TEXTS = {"read": _read_programs, "write": _texts_of_programs}


@dataclass(frozen=True)
class PipelinePlan:
    """Programs of all ranks, with the times and memory that are expected of them.

    Attributes:
        programs: Compute instructions of the ranks of one pipeline; frozen work included.
        costs: Costs that the predictions are computed from; None in plans written by hand.
        pieces: With filling, the frozen pieces of the next batch that `Encode` names.
        layers: Names of the layers that are cut, in order; empty where they are not known.
        sequences: `(share, first stage)` of the call sequences that the step had in trials, if several.
        changes: Changes that would shorten the step, best first, if they were tried. Advice only:
            it does not count for the digest.
    """

    options: PlanOptions
    stages: tuple[Stage, ...]
    programs: tuple[Program, ...] = field(metadata=_AS_TEXTS)
    planned: Planned
    costs: PipelineCosts | None = None
    pieces: tuple[FrozenPiece, ...] = ()
    layers: tuple[str, ...] = ()
    sequences: tuple[tuple[float, int], ...] = stored((), key="forms")
    changes: tuple[PlannedChange, ...] = ()

    def __post_init__(self) -> None:
        _check_stages(self.stages)
        if self.layers and len(self.layers) != self.num_layers:
            raise PlanError(
                f"plan: layers: {len(self.layers)} names, but the stages have {self.num_layers} layers"
            )
        if len(self.programs) != self.ranks_per_pipeline:
            raise PlanError(
                f"plan: programs: {len(self.programs)} programs, but the stages have "
                f"{self.ranks_per_pipeline} ranks"
            )
        if len(self.planned.peak_memory_bytes) not in (0, self.ranks_per_pipeline):
            raise PlanError(
                f"plan: planned.peak_memory_bytes: {len(self.planned.peak_memory_bytes)} numbers, but the "
                f"stages have {self.ranks_per_pipeline} ranks; give one for each, or none: []"
            )

    @property
    def num_pipelines(self) -> int:
        """Pipelines side by side."""
        return _resolved(self.options.data_parallel, "data_parallel")

    @property
    def num_microbatches(self) -> int:
        """Microbatches of one pipeline."""
        return _resolved(self.options.num_microbatches, "num_microbatches")

    @property
    def num_stages(self) -> int:
        """Stages of one pipeline, of one pass through its layers."""
        return len(self.stages) // self.num_passes

    @property
    def num_passes(self) -> int:
        """Number of passes of a step through the layers that are cut."""
        return 1 + self.stages[-1].pass_index

    @property
    def num_backbones(self) -> int:
        """Backbones whose stages run in opposite directions."""
        return len(self.placement.first_stages)

    @property
    def num_layers(self) -> int:
        """Layers that are cut into stages, of all backbones."""
        return self.first_layers[-1] + self.stages[-1].num_layers

    @cached_property
    def first_layers(self) -> tuple[int, ...]:
        """First layer of every stage; layers of several backbones are numbered consecutively."""
        before, firsts = 0, list[int]()
        for index, stage in enumerate(self.stages):
            if index and stage.backbone != self.stages[index - 1].backbone:
                before = firsts[-1] + self.stages[index - 1].num_layers
            firsts.append(before + stage.first_layer)
        return tuple(firsts)

    @cached_property
    def recomputed(self) -> frozenset[int]:
        """Layers whose activations the backward computes again, numbered as in `first_layers`."""
        stages = zip(self.stages, self.first_layers, strict=True)
        return frozenset(
            first + layer - stage.first_layer
            for stage, first in stages
            for layer in stage.recomputed
        )

    @cached_property
    def streamed(self) -> frozenset[int]:
        """Layers whose frozen weights are copied for each run, numbered as in `first_layers`."""
        return frozenset().union(*(self.streamed_of(stage.index) for stage in self.stages))

    def streamed_of(self, stage: int) -> tuple[int, ...]:
        """Returns those of one stage, ascending."""
        shift = self.first_layers[stage] - self.stages[stage].first_layer
        return tuple(layer + shift for layer in sorted(self.stages[stage].streamed))

    @property
    def ranks_per_pipeline(self) -> int:
        """Ranks of one pipeline."""
        return self.placement.num_ranks

    @property
    def num_ranks(self) -> int:
        """All ranks."""
        return self.num_pipelines * self.ranks_per_pipeline

    @property
    def samples_per_pipeline(self) -> int:
        """Samples of one pipeline's batch."""
        return self.options.global_batch_size // self.num_pipelines

    @property
    def microbatch_sizes(self) -> tuple[int, ...]:
        """Samples of each microbatch of a pipeline."""
        return split_evenly(self.samples_per_pipeline, self.num_microbatches)

    @cached_property
    def placement(self) -> Placement:
        """Assignment of the stages to the ranks of a pipeline."""
        return placement_of(self.stages)

    @cached_property
    def schedule(self) -> Schedule:
        """The programs as a schedule, without communication."""
        return Schedule(self.placement, self.num_microbatches, self.programs)

    @cached_property
    def lowered(self) -> Schedule:
        """The programs with communication: what the runtime runs."""
        return lower(self.schedule)

    @cached_property
    def frozen_parts(self) -> tuple[EncodePart, ...]:
        """The frozen parts of this batch that `Encode` names; none if the plan is filled."""
        if self.pieces or not self._encodes:
            return ()
        sizes, ranks = self.microbatch_sizes, self.ranks_per_pipeline
        group = self.options.frozen_group_size
        group = group_size_of(sizes, ranks) if group == "auto" else group
        splits, encoding_ranks = self.options.frozen_splittable, self.options.encoding_ranks
        num_encoding = None if encoding_ranks == "auto" else encoding_ranks
        return encode_parts(sizes, ranks, splits, group, num_encoding=num_encoding)

    @property
    def _encodes(self) -> bool:
        return any(isinstance(i, Encode) for program in self.programs for i in program)

    @cached_property
    def timeline(self) -> Timeline:
        """The planned timeline, in seconds or, without costs, in ticks; without a flush it has several batches."""
        if not self.runs_free:
            return simulate(self.lowered, self.costs)
        num_batches = 2 * self.ranks_per_pipeline + 2
        costs = self.costs.repeated(num_batches) if self.costs else None
        return simulate(unrolled(self.schedule, num_batches), costs)

    @property
    def runs_free(self) -> bool:
        """Whether batches follow each other without a flush."""
        return self.ranks_per_pipeline > 1 and not SCHEDULES[self.options.schedule].flushes

    def step_s(self, costs: PipelineCosts | None) -> float:
        """Returns seconds of a step, by these costs."""
        if self.runs_free and costs:
            return period_s(self.schedule, costs)
        return simulate(self.lowered, costs).iteration_s + (costs.states_s if costs else 0.0)

    @property
    def pipeline_s(self) -> float:
        """Planned seconds until optimizers step."""
        after_s = 0.0 if self.runs_free or not self.costs else self.costs.states_s
        return self.planned.iteration_s - after_s

    @property
    def digest(self) -> str:
        """A hash of all that ranks must agree on; equal plans have equal digests."""
        content = {key: value for key, value in write(self).items() if key != "changes"}
        text = json.dumps(_canonical(content), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def validate(self) -> None:
        """Raises PlanError if its parts do not belong together, its schedule breaks a law, or it never ends."""
        _check_options(self)
        _check_encodes(self)
        try:
            check_laws(self.lowered)
            simulate(self.lowered)
        except DiffPipeError as cause:
            raise PlanError(f"plan: programs: {cause}") from cause

    def to_json(self) -> str:
        """Writes `diffpipe-plan/1`."""
        head = {"format": FORMAT, "digest": self.digest}
        return json.dumps({**head, **write(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str = "plan") -> PipelinePlan:
        """Reads and validates `diffpipe-plan/1`; `source` names the file in errors.

        Raises:
            PlanError: Names the first key that is missing, unknown, or has a bad value; or says that the digest
                does not belong to the content, that a law is broken, or that it hangs.
        """
        node = Node.of_text(text, PlanError, source, FORMAT)
        plan = read_fields(cls, node, "format", optional=("digest",))
        plan.validate()
        if "digest" in node and node["digest"].value != plan.digest:
            raise node["digest"].expected(
                f'"{plan.digest}", the digest of this content (if you edited it, remove digest and costs)'
            )
        if plan.costs is not None and "digest" not in node:
            raise node["costs"].expected(
                "none in a plan without a digest: costs are of the plan that was edited, and so would be its times"
            )
        return plan


def _resolved(value: int | str, name: str) -> int:
    if not isinstance(value, int):
        raise PlanError(f"plan: options.{name}: a plan needs a number here; got {value!r}")
    return value


def _check_stages(stages: tuple[Stage, ...]) -> None:
    if not stages:
        raise PlanError("plan: stages: a plan needs at least one stage")
    for index, stage in enumerate(stages):
        if stage.index != index:
            raise PlanError(f"plan: stages[{index}].index: expected {index}; got {stage.index}")
        before = stages[index - 1] if index else None
        starts = 0 if before is None or before.backbone != stage.backbone else before.stop
        if stage.first_layer != starts:
            why = f"stage {index - 1} ends at layer {starts - 1}" if starts else "a backbone begins"
            raise PlanError(
                f"plan: stages[{index}].first_layer: stage {index} starts at layer "
                f"{stage.first_layer}, but {why}; stages must be contiguous"
            )
    size = sum(stage.pass_index == 0 for stage in stages)
    for stage in stages:
        number, position = divmod(stage.index, size or 1)
        if stage.pass_index != number or stage.ranks != stages[position].ranks:
            raise PlanError(
                f"plan: stages[{stage.index}]: pass {stage.pass_index} on ranks {list(stage.ranks)}; passes follow "
                f"each other, with equally many stages, and stage {position} of each lies on the same ranks "
                f"({list(stages[position].ranks)}), which hold its layers once"
            )
    if size < len(stages) and (len(stages) % (size or 1) or not stages[-1].gradient):
        raise PlanError(
            f"plan: stages: the first pass has {size} of {len(stages)} stages, and the last one computes the loss; "
            "all passes need equally many stages, and the last one a gradient"
        )


def _canonical(value: object) -> object:
    """Returns the same content with all numbers as floats, so that 1 and 1.0 are the same plan."""
    if isinstance(value, dict):
        return {key: _canonical(member) for key, member in value.items()}
    if isinstance(value, list):
        return [_canonical(element) for element in value]
    if isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value


SAME_STEP = 1e-6
"""Steps that differ by a smaller share are the same; sums of seconds depend on their order."""


def check_layers(plan: PipelinePlan, names: Sequence[str], what: str, remedy: str) -> None:
    """Raises PlanError if the layers that a plan cuts are not those of a model; names the first that differs."""
    if plan.num_layers != len(names):
        raise PlanError(
            f"the plan cuts {plan.num_layers} layers, but {what} has {len(names)}; {remedy}"
        )
    for position, (planned, name) in enumerate(zip(plan.layers, names, strict=False)):
        if planned != name:
            raise PlanError(
                f"the plan was made for another model: layer {position} of its {len(names)} is {planned}, "
                f"but that of {what} is {name}; {remedy}"
            )


def _check_options(plan: PipelinePlan) -> None:
    """Checks that the options are those of these stages, and every pipeline and microbatch gets its samples."""
    options, replicas = plan.options, _replicas(plan)
    batch, pipelines = options.global_batch_size, plan.num_pipelines
    microbatches = plan.num_microbatches
    if options.schedule == "auto":
        raise PlanError(
            f"plan: options.schedule: a plan needs the schedule of its programs; choose from {', '.join(SCHEDULES)}"
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
    return tuple(stage.num_replicas for stage in plan.stages[: plan.num_stages])


def _check_encodes(plan: PipelinePlan) -> None:
    """Checks that every frozen part or piece is run once, on its rank."""
    rank_of_part = {piece.index: piece.rank for piece in plan.pieces or plan.frozen_parts}
    for rank, program in enumerate(plan.programs):
        for part in (i.part for i in program if isinstance(i, Encode)):
            if rank_of_part.pop(part, None) != rank:
                raise PlanError(
                    f"plan: programs.{rank}: E{part} is not a frozen part of this rank, or is run twice"
                )
    if rank_of_part:
        raise PlanError(f"plan: programs: frozen part {min(rank_of_part)} is never run")


def check_options(plan: PipelinePlan, options: PlanOptions, num_pipelines: int) -> None:
    """Checks that nothing else is asked for than a plan does; it may be followed by any number of pipelines.

    Raises:
        PlanError: Names every option that differs, with both values.
    """
    decided, replicas = _decided(plan, num_pipelines), options.num_replicas
    asked = {name: getattr(options, name) for name in decided}
    if isinstance(replicas, int):
        asked["num_replicas"] = (replicas,) * plan.num_stages
    if options.schedule == DEFAULT_SCHEDULE:  # of the strategy: nobody has asked for it
        asked["schedule"] = "auto"
    odd = {name: value for name, value in decided.items() if asked[name] not in ("auto", value)}
    if odd:
        have = ", ".join(f"{name}={value}" for name, value in odd.items())
        listed = ", ".join(f"{name}={getattr(options, name)}" for name in odd)
        raise PlanError(
            f"the plan has {have}, but {listed} is asked for as well, and a given plan is followed as it "
            f"is: leave {', '.join(odd)} out, or plan again with {listed}"
        )


def _decided(plan: PipelinePlan, num_pipelines: int) -> dict[str, object]:
    """Returns what a plan decides, by option; without what is the same there however it is decided."""
    options = plan.options
    decided: dict[str, object] = {
        "num_stages": plan.num_stages,
        "num_microbatches": plan.num_microbatches,
        "num_replicas": _replicas(plan),
        "data_parallel": num_pipelines,
    }
    if plan.num_stages > 1:
        decided["schedule"] = options.schedule
    recomputes = plan.recomputed or options.checkpointing == "all"
    decided["checkpointing"] = options.checkpointing if recomputes else "none"
    streams = plan.streamed or options.streaming == "all"
    decided["streaming"] = options.streaming if streams else "none"
    decided["optimizer_offload"] = "all" if options.optimizer_offload == "all" else "none"
    if any(num_pipelines * len(ranks) > 1 for ranks in plan.placement.stage_ranks):
        decided["shard_optimizer"] = options.shard_optimizer is True
    if plan._encodes and plan.ranks_per_pipeline > 1:
        decided["filling"] = options.filling
        decided["encoding_ranks"] = options.encoding_ranks
        if options.frozen_splittable and options.frozen_group_size != "auto":
            decided["frozen_group_size"] = options.frozen_group_size
    return decided
