"""Why is it slower than planned? The way from the planned step to the measured one, in parts that add up.

The planned schedule is simulated again and again, each time with one more kind of planned time replaced by
the measured one; what each replacement adds is its part. What is left between the last simulation and the
measured timeline is messages and waiting that the plan does not know, and what is left up to the whole
step lies outside the pipeline.

    planned step | forward | backward | frozen work | sums and exchanges | messages, waiting | outside
                 '--------------- simulated, measured times put in ------'                    = step

`final_report` says this at the end of a run, with what each rank did and both timelines.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_diffpipe.planning.instruction import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Encode,
    ExchangeFrozen,
    Forward,
    ForwardNoGrad,
    Instruction,
    ReduceGradients,
    Staged,
)
from lightning_diffpipe.planning.pipeline_costs import PipelineCosts
from lightning_diffpipe.planning.plan import PipelinePlan
from lightning_diffpipe.planning.schedule import Message
from lightning_diffpipe.planning.simulator import simulate
from lightning_diffpipe.planning.timeline import Timeline
from lightning_diffpipe.viewing.ascii import render, side_by_side
from lightning_diffpipe.viewing.measured import Occupation, occupation, without_posts
from lightning_diffpipe.viewing.units import percent, seconds

_FORWARD = (Forward, ForwardNoGrad)
_BACKWARD = (Backward, BackwardInput, BackwardWeight)
_MEETING = (ReduceGradients, ExchangeFrozen)

MESSAGES = "messages, and waiting that the plan does not know"
PIPELINE = "the pipeline; a plan without costs does not tell which part of it"
PACE = "the pipeline, whose pace the slowest rank or link sets, as it is not flushed"
OPTIMIZER = "optimizer, callbacks and logging, after the pipeline"
LOADING = "loading the next batch"

OTHER_MACHINE = (
    "The plan's times are not of this machine: they were counted (profile=flops), or measured elsewhere. "
    "Its order still runs; for times to compare, plan with profile=measure."
)
_MEASURE_ANEW = (
    "start again without `strategy.plan` and with `strategy.cluster=measure` (the default: links are measured at "
    "every start)"
)
REMEDIES = {
    "forward": "Layers take longer than when they were timed: other processes on these cores, more "
    "threads than cores, or a profile of another machine. Profile anew, on an idle machine.",
    "backward": "Backwards take longer than when they were timed: look for other processes on these "
    "cores and for swapping; profile anew.",
    "frozen work": "Frozen layers take longer than when they were timed, or run in smaller groups of "
    "samples; profile anew, or cache what they give (EncodingCache).",
    "sums and exchanges": f"Collectives are slower than planned: {_MEASURE_ANEW}, or use fewer replicas.",
    MESSAGES: f"Messages take longer than planned, or ranks are held up at random: {_MEASURE_ANEW}, use larger "
    "microbatches, or fewer stages.",
    PIPELINE: "The plan has no costs, so that nobody knows which part takes longer: plan anew, with `diffpipe "
    "plan` or by starting without `strategy.plan`.",
    PACE: "Without a flush batches overlap, so that parts of one do not add up to its time. Look in the trace for "
    "the rank that never waits: its layers, or its optimizer, which steps in the pipeline, take longer than "
    "planned.",
    OPTIMIZER: "The optimizer, callbacks and loggers run on every rank while no pipeline does: use a "
    "fused optimizer, log less often, check callbacks.",
    LOADING: "The data loader keeps the pipeline waiting: raise num_workers, or store the samples in "
    "a form that is quicker to read.",
}


@dataclass(frozen=True, slots=True)
class GapPart:
    """A part of the difference: its name, the seconds it adds, and how it compares with the plan."""

    name: str
    added_s: float
    ratio: float | None = None


@dataclass(frozen=True, slots=True)
class Gap:
    """The difference between a planned and a measured step.

    Attributes:
        planned_s: What the plan promises.
        pipeline_s: The measured timeline's length.
        step_s: The whole measured step.
        planned_ratio: Bubble ratio of the plan.
        measured_ratio: Bubble ratio of the measured timeline.
        parts: They add up to `step_s - planned_s`.
        unfilled_s: What the pipeline would have taken without filling, simulated with the measured
            times; None if nothing is filled.
    """

    planned_s: float
    pipeline_s: float
    step_s: float
    planned_ratio: float
    measured_ratio: float
    parts: tuple[GapPart, ...]
    unfilled_s: float | None = None

    @property
    def largest(self) -> GapPart | None:
        """The part that adds most, if any adds 2% of the planned step."""
        adding = [part for part in self.parts if part.added_s > 0.02 * self.planned_s]
        return max(adding, key=lambda part: part.added_s, default=None)

    def __str__(self) -> str:
        more = self.step_s / self.planned_s - 1 if self.planned_s else 0.0
        word = "more" if more >= 0 else "less"
        lines = [
            f"A step takes {seconds(self.step_s)}, {percent(abs(more))} {word} than the planned "
            f"{seconds(self.planned_s)}; bubble ratio {percent(self.measured_ratio)}, planned "
            f"{percent(self.planned_ratio)}."
        ]
        for part in self.parts:
            if abs(part.added_s) < 1e-3 * self.planned_s:
                continue
            ratio = "" if part.ratio is None else f" ({part.ratio:.2f} x its planned time)"
            signed = f"{'+' if part.added_s >= 0 else '-'}{seconds(abs(part.added_s))}"
            lines.append(f"  {signed:>10}  {part.name}{ratio}")
        if self.unfilled_s is not None:
            lines.append(self._gain())
        largest = self.largest
        if not 0.2 * self.planned_s < self.step_s < 5 * self.planned_s:
            lines.append(OTHER_MACHINE)
        else:
            lines.append(REMEDIES[largest.name] if largest else "It runs as planned.")
        return "\n".join(lines)

    def _gain(self) -> str:
        assert self.unfilled_s is not None
        saved_s = self.unfilled_s - self.pipeline_s
        if saved_s <= 0:
            return (
                f"Filling the bubbles gained nothing: {seconds(self.pipeline_s)} with it, "
                f"{seconds(self.unfilled_s)} without, simulated with the measured times."
            )
        return (
            f"Filling the bubbles saved {seconds(saved_s)} of each step: without it the pipeline "
            f"would take {seconds(self.unfilled_s)}, {self.unfilled_s / self.pipeline_s:.2f} x as long."
        )


def explain_gap(
    plan: PipelinePlan, measured: Timeline, after_s: float = 0.0, loading_s: float = 0.0
) -> Gap:
    """Explains a measured step.

    Args:
        plan: What was planned, with costs; without costs, or without a flush, only the whole difference is known.
        measured: A timeline of one iteration.
        after_s: Between two pipelines without loading: optimizer, callbacks, logging, checkpoints.
        loading_s: In which the data loader was waited for there.
    """
    pipeline_s = measured.iteration_s
    planned_s = plan.planned.iteration_s
    parts: list[GapPart] = []
    before_s = planned_s
    unfilled_s = None
    simulated = plan.costs is not None and not plan.runs_free
    if plan.costs is not None and simulated:
        substituted = _Measured(plan.costs, *_sums(measured))
        for name, kinds in _KINDS.items():
            substituted = substituted.using(kinds)
            now_s = simulate(plan.lowered, substituted).iteration_s
            parts.append(GapPart(name, now_s - before_s, _ratio(plan, measured, kinds)))
            before_s = now_s
        if plan.pieces:
            unfilled_s = _unfilled_s(plan, substituted)
    rest = MESSAGES if simulated else PACE if plan.runs_free else PIPELINE
    parts.append(GapPart(rest, pipeline_s - before_s))
    parts += [GapPart(OPTIMIZER, after_s), GapPart(LOADING, loading_s)]
    step_s = pipeline_s + after_s + loading_s
    ratio = plan.planned.bubble_ratio
    return Gap(
        planned_s, pipeline_s, step_s, ratio, measured.bubble_ratio, tuple(parts), unfilled_s
    )


_KINDS: Mapping[str, tuple[type[Instruction], ...]] = {
    "forward": _FORWARD,
    "backward": _BACKWARD,
    "frozen work": (Encode,),
    "sums and exchanges": _MEETING,
}


@dataclass(frozen=True)
class _Measured:
    """Planned costs, measured ones for some kinds of instructions; see `simulator.Costs`.

    Attributes:
        planned: What was planned.
        by_instruction: Measured seconds of every instruction.
        by_kind: For every kind of instruction, measured seconds of each rank.
        kinds: Of these the measured times count.
    """

    planned: PipelineCosts
    by_instruction: Mapping[Instruction, float]
    by_kind: Mapping[type[Instruction], Mapping[int, float]]
    kinds: tuple[type[Instruction], ...] = ()

    def using(self, kinds: tuple[type[Instruction], ...]) -> _Measured:
        """Returns these costs with measured times for more kinds."""
        return replace(self, kinds=(*self.kinds, *kinds))

    def compute_s(self, instruction: Compute) -> float:
        """See `Costs`; frozen pieces are cut anew at run time, so that only their sum is known."""
        planned_s = self.planned.compute_s(instruction)
        if not isinstance(instruction, self.kinds):
            return planned_s
        if isinstance(instruction, Encode):
            total_s = sum(self.planned.encode_s)
            return (
                planned_s * sum(self._ranks_s(Encode).values()) / total_s if total_s else planned_s
            )
        return self.by_instruction.get(instruction, planned_s)

    @property
    def holds_sender(self) -> bool:
        """See `Costs`."""
        return self.planned.holds_sender

    def message_s(self, message: Message) -> float:
        """See `Costs`."""
        return self.planned.message_s(message)

    def reduce_s(self, rank: int) -> float:
        """See `Costs`."""
        if ReduceGradients not in self.kinds:
            return self.planned.reduce_s(rank)
        return self._ranks_s(ReduceGradients).get(rank, 0.0)

    def exchange_s(self) -> float:
        """See `Costs`."""
        if ExchangeFrozen not in self.kinds:
            return self.planned.exchange_s()
        return max(self._ranks_s(ExchangeFrozen).values(), default=0.0)

    def _ranks_s(self, kind: type[Instruction]) -> Mapping[int, float]:
        return self.by_kind.get(kind, {})


def _sums(
    measured: Timeline,
) -> tuple[Mapping[Instruction, float], Mapping[type[Instruction], Mapping[int, float]]]:
    """Measured seconds by instruction, and by kind and rank: a simulation asks for each of them."""
    by_instruction: defaultdict[Instruction, float] = defaultdict(float)
    by_kind: defaultdict[type[Instruction], defaultdict[int, float]] = defaultdict(
        lambda: defaultdict(float)
    )
    for span in measured.spans:
        by_instruction[span.instruction] += span.duration_s
        by_kind[type(span.instruction)][span.rank] += span.duration_s
    return by_instruction, by_kind


def _ratio(
    plan: PipelinePlan, measured: Timeline, kinds: tuple[type[Instruction], ...]
) -> float | None:
    """Measured over planned time of all instructions of some kinds."""
    totals = [
        sum(s.duration_s for s in timeline.spans if isinstance(s.instruction, kinds))
        for timeline in (plan.timeline, measured)
    ]
    return totals[1] / totals[0] if totals[0] > 0 and totals[1] > 0 else None


def _unfilled_s(plan: PipelinePlan, costs: _Measured) -> float:
    """Returns the same pipeline with all frozen work before it, shared by all ranks."""
    programs = tuple(
        tuple(i for i in program if isinstance(i, Staged)) for program in plan.schedule.programs
    )
    bare = replace(plan.schedule, programs=programs)
    frozen_s = sum(costs.compute_s(Encode(piece.index)) for piece in plan.pieces)
    share_s = frozen_s / plan.ranks_per_pipeline
    return share_s + costs.exchange_s() + simulate(bare, costs).iteration_s


@dataclass(frozen=True)
class MeasuredStep:
    """One step, looked at closely.

    Attributes:
        timeline: What the ranks of the first pipeline did.
        after_s: Outside of the pipeline, on the first rank: after it, and before it without loading.
        loading_s: Before it, waiting for the data loader.
    """

    timeline: Timeline
    after_s: float
    loading_s: float


def typical_step(samples: Sequence[MeasuredStep]) -> MeasuredStep:
    """Returns the step of median length; of two in the middle the shorter one, as steps are only ever held up."""
    by_length = sorted(samples, key=lambda sample: sample.timeline.iteration_s)
    return by_length[(len(by_length) - 1) // 2]


def final_report(plan: PipelinePlan, samples: Sequence[MeasuredStep]) -> str:
    """Returns the difference in words, what each rank did, and both timelines.

    Args:
        plan: What was planned.
        samples: Steps of one run; the typical one is shown.
    """
    measured = typical_step(samples).timeline
    gap = explain_gap(
        plan,
        measured,
        statistics.median(sample.after_s for sample in samples),
        statistics.median(sample.loading_s for sample in samples),
    )
    lines = [str(gap), "", _table_of_ranks(occupation(measured))]
    if plan.costs is not None:
        lines += ["", _drawn(plan.timeline, without_posts(measured))]
    return "\n".join(lines)


def _drawn(planned: Timeline, measured: Timeline) -> str:
    """Both timelines on one scale of time, unless one would be a dot beside the other."""
    if planned.iteration_s < 3 * measured.iteration_s < 9 * planned.iteration_s:
        return side_by_side(planned, measured)
    pictures = {"planned": render(planned), "measured, on another scale": render(measured)}
    return "\n".join(f"{name}\n{picture}" for name, picture in pictures.items())


def _table_of_ranks(spent: Occupation) -> str:
    rows = zip(
        spent.busy_s, spent.idle_s, spent.before_s, spent.filled_s, spent.leftover_s, strict=True
    )
    lines = []
    for rank, (busy_s, idle_s, before_s, filled_s, leftover_s) in enumerate(rows):
        frozen = [
            f"{seconds(value)} {where}"
            for value, where in (
                (before_s, "before the pipeline"), (filled_s, "in bubbles"), (leftover_s, "left over")
            )
            if value
        ]  # fmt: skip
        text = f"rank {rank}: {seconds(busy_s)} at work, {seconds(idle_s)} idle"
        share = percent(idle_s / spent.iteration_s) if spent.iteration_s else "0%"
        lines.append(f"{text} ({share}){', frozen work ' + ', '.join(frozen) if frozen else ''}")
    return "\n".join(lines)
