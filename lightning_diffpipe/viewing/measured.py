"""One timeline of all ranks from the times that each recorded, and the reasons why it is slower than planned.

A rank stamps every instruction with its own clock, waits included. Three things keep the notes of
several ranks from being a timeline:

* clocks differ: each rank's offset is subtracted, so that all times are rank 0's;
* waiting is not work: a `Wait`, or the wait for the loss, is dropped, and what ran inside it (frozen
  work, say) stays;
* in a collective, the first to come wait for the last: it begins when the last has come.

    as recorded    rank 0 | F0 F1 ?? ?? B0 -- ?? B1 --        ??: inside a wait
                rank 1 | ?? F0 B0 -- F1 B1 --
    timeline    rank 0 | F0 F1  .  . B0 --  . B1 --
                rank 1 |  . F0 B0 -- F1 B1 --  .  .

The way from the planned step to the measured one has parts that add up: the planned schedule is simulated again and
again, each time with one more kind of planned time replaced by the measured one; what each replacement adds is its
part. What is left between the last simulation and the measured timeline is messages and waiting that the plan does
not know, and what is left up to the whole step is outside the pipeline.

    planned step | forward | backward | frozen work | sums and exchanges | messages, waiting | outside
                 '--------------- simulated, measured times put in ------'                    = step

`final_report` says this at the end of a run, with what each rank did and both timelines.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from lightning_diffpipe.planning.cost import PipelineCosts, Table
from lightning_diffpipe.planning.instruction import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Encode,
    ExchangeFrozen,
    Forward,
    ForwardNoGrad,
    Instruction,
    Receive,
    ReduceGradients,
    Send,
    ShareResults,
    Staged,
    Wait,
)
from lightning_diffpipe.planning.plan import PipelinePlan
from lightning_diffpipe.planning.schedule import Message, Placement
from lightning_diffpipe.planning.simulator import group_of, simulate
from lightning_diffpipe.planning.timeline import Span, Timeline, Transfer
from lightning_diffpipe.viewing.text import percent, seconds, side_by_side, size, table


@dataclass(frozen=True, slots=True)
class Occupation:
    """Use that the ranks of a pipeline made of one iteration; seconds, by rank where there are several.

    Attributes:
        iteration_s: From the first instruction of any rank to the last.
        before_s: Frozen work before the pipeline begins anywhere.
        filled_s: Frozen work while the pipeline runs: in its bubbles.
        leftover_s: Frozen work after the pipeline has ended everywhere.
    """

    iteration_s: float
    bubble_ratio: float
    busy_s: tuple[float, ...]
    idle_s: tuple[float, ...]
    before_s: tuple[float, ...]
    filled_s: tuple[float, ...]
    leftover_s: tuple[float, ...]

    def __str__(self) -> str:
        lines = []
        for rank, (busy_s, idle_s) in enumerate(zip(self.busy_s, self.idle_s, strict=True)):
            places = "before the pipeline", "in bubbles", "left over"
            parts = zip((self.before_s, self.filled_s, self.leftover_s), places, strict=True)
            frozen = [f"{seconds(each[rank])} {where}" for each, where in parts if each[rank]]
            text = f"rank {rank}: {seconds(busy_s)} at work, {seconds(idle_s)} idle"
            share = percent(idle_s / self.iteration_s) if self.iteration_s else "0%"
            work = f", frozen work {', '.join(frozen)}" if frozen else ""
            lines.append(f"{text} ({share}){work}")
        return "\n".join(lines)


def measured_timeline(
    recorded: Sequence[Sequence[Span]], offsets_s: Sequence[float], placement: Placement
) -> Timeline:
    """Joins what the ranks of a pipeline recorded.

    Args:
        recorded: Instructions with their times, by rank, in the order of the program.
        offsets_s: Clock of each rank minus that of rank 0.
        placement: Ranks of each stage, which meet when gradients are summed.

    Returns:
        A timeline that begins at 0.
    """
    shifted = [
        [_earlier(replace(span, rank=rank), offset_s) for span in spans]
        for rank, (spans, offset_s) in enumerate(zip(recorded, offsets_s, strict=True))
    ]
    met = [[_shortened(span, shifted, placement) for span in of_rank] for of_rank in shifted]
    spans = sorted(
        (s for of_rank in met for s in _at_work(of_rank)), key=lambda s: (s.rank, s.start_s)
    )
    begin_s = min((span.start_s for span in spans), default=0.0)
    shifted_spans = tuple(_earlier(span, begin_s) for span in spans)
    return Timeline(shifted_spans, len(recorded), tuple(_transfers(shifted, begin_s)))


def _earlier(span: Span, by_s: float) -> Span:
    return replace(span, start_s=span.start_s - by_s, stop_s=span.stop_s - by_s)


def _transfers(recorded: list[list[Span]], begin_s: float) -> Iterator[Transfer]:
    """Yields every message from when it was sent until its reader went on, at most."""
    waits = {(span.rank, span.instruction): span for of_rank in recorded for span in of_rank}
    for span in chain.from_iterable(recorded):
        if isinstance(span.instruction, Send):
            message = Message.of(span.instruction, span.rank)
            wait = waits.get((message.to_rank, message.wait()))
            if wait is not None:
                stop_s = max(wait.stop_s, span.start_s) - begin_s
                yield Transfer(message, span.start_s - begin_s, stop_s)


def without_posts(timeline: Timeline) -> Timeline:
    """Returns the timeline without sends and receives, which take next to no time: for drawings."""
    spans = tuple(s for s in timeline.spans if not isinstance(s.instruction, Send | Receive))
    return replace(timeline, spans=spans)


def occupation(timeline: Timeline) -> Occupation:
    """Adds up what the ranks did."""
    ranks = range(timeline.num_ranks)
    staged = [span for span in timeline.spans if isinstance(span.instruction, Staged)]
    first_s = min((span.start_s for span in staged), default=0.0)
    last_s = max((span.stop_s for span in staged), default=0.0)
    frozen = [s for s in timeline.spans if isinstance(s.instruction, Encode)]

    def encoding_s(start_s: float, stop_s: float) -> tuple[float, ...]:
        return tuple(_overlap((s for s in frozen if s.rank == r), start_s, stop_s) for r in ranks)

    return Occupation(
        timeline.iteration_s,
        timeline.bubble_ratio,
        tuple(timeline.busy_s(rank) for rank in ranks),
        timeline.idle_by_rank_s(),
        encoding_s(0.0, first_s),
        encoding_s(first_s, last_s),
        encoding_s(last_s, timeline.iteration_s),
    )


def _overlap(spans: Iterable[Span], start_s: float, stop_s: float) -> float:
    return sum(max(min(s.stop_s, stop_s) - max(s.start_s, start_s), 0.0) for s in spans)


def _shortened(span: Span, recorded: list[list[Span]], placement: Placement) -> Span:
    """Lets a collective begin when the last rank of its group has come."""
    kind = span.instruction
    if not isinstance(kind, ExchangeFrozen | ReduceGradients):
        return span
    number = [s.instruction for s in recorded[span.rank] if s.start_s <= span.start_s].count(kind)
    arrivals = [
        [s.start_s for s in recorded[rank] if s.instruction == kind][number - 1 : number]
        for rank in group_of(placement, span.rank, kind)
    ]
    last_s = max((start for starts in arrivals for start in starts), default=span.start_s)
    return replace(span, start_s=min(max(span.start_s, last_s), span.stop_s))


def _at_work(spans: list[Span]) -> list[Span]:
    """Returns one rank's spans without waits, none inside another."""
    waits = Wait | ShareResults
    working = [s for s in spans if not isinstance(s.instruction, waits) and s.duration_s > 0]
    encodes = [s for s in working if isinstance(s.instruction, Encode)]
    working_spans: list[Span] = []
    for span in working:
        if isinstance(span.instruction, Encode):
            working_spans.append(span)
            continue
        # What is left of it around frozen work that ran while it was under way.
        now = span.start_s
        inside = (e for e in encodes if _overlap([e], span.start_s, span.stop_s))
        for other in sorted(inside, key=lambda s: s.start_s):
            if other.start_s > now:
                working_spans.append(replace(span, start_s=now, stop_s=other.start_s))
            now = max(now, other.stop_s)
        if now < span.stop_s:
            working_spans.append(replace(span, start_s=now))
    return working_spans


_FORWARD = (Forward, ForwardNoGrad)
_BACKWARD = (Backward, BackwardInput, BackwardWeight)
_OfKinds = tuple[str, tuple[type[Instruction], ...], dict[str, Any]]

MESSAGES = "messages, and waiting that the plan does not know"
PIPELINE = "the pipeline; a plan without costs does not tell which part of it"
PACE = "the pipeline, whose pace the slowest rank or link sets, as it is not flushed"
OPTIMIZER = "optimizer, callbacks and logging, after the pipeline"
LOADING = "loading the next batch"

OTHER_MACHINE = (
    "The plan's times are not of this machine: they were counted (profile=flops), or measured elsewhere. "
    "Its order still runs; for times to compare, plan with profile=measure."
)
_MEASURE_AGAIN = (
    "start again without `strategy.plan` and with `strategy.cluster=measure` (the default: links are measured at "
    "every start)"
)
REMEDIES = {
    "forward": "Layers take longer than when they were timed: other processes on these cores, more "
    "threads than cores, or a profile of another machine. Profile again, on an idle machine.",
    "backward": "Backwards take longer than when they were timed: look for other processes on these "
    "cores and for swapping; profile again.",
    "frozen work": "Frozen layers take longer than when they were timed, or run in smaller groups of "
    "samples; profile again, or cache what they give (EncodingCache).",
    "sums and exchanges": f"Collectives are slower than planned: {_MEASURE_AGAIN}, or use fewer replicas.",
    MESSAGES: f"Messages take longer than planned, or ranks are held up at random: {_MEASURE_AGAIN}, use larger "
    "microbatches, or fewer stages.",
    PIPELINE: "The plan has no costs, so that nobody knows which part takes longer: plan again, with `diffpipe "
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

    def __str__(self) -> str:
        ratio = "" if self.ratio is None else f" ({self.ratio:.2f} x its planned time)"
        signed = f"{'+' if self.added_s >= 0 else '-'}{seconds(abs(self.added_s))}"
        return f"  {signed:>10}  {self.name}{ratio}"


@dataclass(frozen=True, slots=True)
class Gap:
    """The difference between a planned and a measured step.

    Attributes:
        pipeline_s: The measured timeline's length.
        planned_ratio: Bubble ratio of the plan.
        parts: They add up to `step_s - planned_s`.
        unfilled_s: Step time of the pipeline without filling, simulated with the measured
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
        lines += [str(p) for p in self.parts if abs(p.added_s) >= 1e-3 * self.planned_s]
        if self.unfilled_s is not None:
            saved_s, without = self.unfilled_s - self.pipeline_s, seconds(self.unfilled_s)
            lines.append(
                f"Filling the bubbles saved {seconds(saved_s)} of each step: without it the pipeline "
                f"would take {without}, {self.unfilled_s / self.pipeline_s:.2f} x as long."
                if saved_s > 0
                else f"Filling the bubbles gained nothing: {seconds(self.pipeline_s)} with it, "
                f"{without} without, simulated with the measured times."
            )
        largest = self.largest
        if not 0.2 * self.planned_s < self.step_s < 5 * self.planned_s:
            lines.append(OTHER_MACHINE)
        else:
            lines.append(REMEDIES[largest.name] if largest else "It runs as planned.")
        return "\n".join(lines)


def explain_gap(
    plan: PipelinePlan, measured: Timeline, after_s: float = 0.0, loading_s: float = 0.0
) -> Gap:
    """Explains a measured step.

    Args:
        plan: The plan with its costs; without costs, or without a flush, only the whole difference is known.
        measured: A timeline of one iteration.
        after_s: Between two pipelines without loading: optimizer, callbacks, logging, checkpoints.
        loading_s: Time there in which the data loader was waited for.
    """
    pipeline_s, planned_s = measured.iteration_s, plan.pipeline_s
    parts, unfilled_s = list[GapPart](), None
    rest = PACE if plan.runs_free else PIPELINE
    if plan.costs is not None and not plan.runs_free:
        rest = MESSAGES
        parts, costs = _computed_parts(plan, plan.costs, measured)
        unfilled_s = _unfilled_s(plan, costs) if plan.pieces else None
    explained_s = planned_s + sum(part.added_s for part in parts)
    parts.append(GapPart(rest, pipeline_s - explained_s))
    parts += [GapPart(OPTIMIZER, after_s), GapPart(LOADING, loading_s)]
    step_s, bubbles = pipeline_s + after_s + loading_s, plan.planned.bubble_ratio
    return Gap(
        planned_s, pipeline_s, step_s, bubbles, measured.bubble_ratio, tuple(parts), unfilled_s
    )


def _computed_parts(
    plan: PipelinePlan, costs: PipelineCosts, measured: Timeline
) -> tuple[list[GapPart], PipelineCosts]:
    """Returns what each kind of work adds when measured seconds replace planned ones, and the costs so measured."""
    parts, before_s = list[GapPart](), plan.pipeline_s
    for name, kinds, fields in _as_measured(costs, measured):
        costs = replace(costs, **fields)
        now_s = simulate(plan.lowered, costs).iteration_s
        should_s, took_s = (
            sum(s.duration_s for s in timeline.spans if isinstance(s.instruction, kinds))
            for timeline in (plan.timeline, measured)
        )
        ratio = took_s / should_s if should_s > 0 and took_s > 0 else None
        parts.append(GapPart(name, now_s - before_s, ratio))
        before_s = now_s
    return parts, costs


def _as_measured(costs: PipelineCosts, measured: Timeline) -> Iterator[_OfKinds]:
    """Yields kinds of work, by name, with the fields of the costs in which measured seconds replace planned ones.

    Frozen pieces are cut again at run time, so that only their sum is known.
    """
    took_s: defaultdict[Instruction, float] = defaultdict(float)
    nothing_s = [0.0] * measured.num_ranks
    ranks_s: defaultdict[type[Instruction], list[float]] = defaultdict(nothing_s.copy)
    for span in measured.spans:
        took_s[span.instruction] += span.duration_s
        ranks_s[type(span.instruction)][span.rank] += span.duration_s

    yield "forward", _FORWARD, {"forward_s": _with_measured(costs.forward_s, took_s, _FORWARD)}
    halves = {
        "backward_s": _with_measured(costs.backward_s, took_s, _BACKWARD),
        "weight_gradient_s": _with_measured(costs.weight_gradient_s, took_s, (BackwardWeight,)),
        "split_s": (),  # was measured with them
    }
    yield "backward", _BACKWARD, halves
    share = sum(ranks_s[Encode]) / (sum(costs.encode_s) or 1.0)
    yield "frozen work", (Encode,), {"encode_s": tuple(share * s for s in costs.encode_s)}
    sums_s, exchange_s = tuple(ranks_s[ReduceGradients]), max(ranks_s[ExchangeFrozen])
    collectives = {"all_reduce_s": sums_s, "all_gather_s": exchange_s}
    yield "sums and exchanges", (ReduceGradients, ExchangeFrozen), collectives


def _with_measured(
    planned: Table, took_s: Mapping[Instruction, float], kinds: tuple[type[Staged], ...]
) -> Table:
    """Returns a table of seconds by stage and microbatch, those of some kinds as measured where they ran."""

    def cell(planned_s: float, stage: int, microbatch: int) -> float:
        measured = [took_s[i] for kind in kinds if (i := kind(stage, microbatch)) in took_s]
        return sum(measured) if measured else planned_s

    return tuple(
        tuple(cell(planned_s, stage, m) for m, planned_s in enumerate(row))
        for stage, row in enumerate(planned)
    )


def _unfilled_s(plan: PipelinePlan, costs: PipelineCosts) -> float:
    """Returns the same pipeline with all frozen work before it, shared by all ranks."""
    bare = plan.schedule.only(lambda i: isinstance(i, Staged))
    frozen_s = sum(costs.compute_s(Encode(piece.index)) for piece in plan.pieces)
    share_s = frozen_s / plan.ranks_per_pipeline
    return share_s + costs.exchange_s() + simulate(bare, costs).iteration_s


@dataclass(frozen=True)
class MeasuredStep:
    """Measurements of one step.

    Attributes:
        timeline: Measured timeline of the first pipeline.
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
    """Returns the difference in words, what each rank did, and both timelines, of a typical step."""
    measured = typical_step(samples).timeline
    after_s = statistics.median(sample.after_s for sample in samples)
    loading_s = statistics.median(sample.loading_s for sample in samples)
    gap = explain_gap(plan, measured, after_s, loading_s)
    lines = [str(gap), "", str(occupation(measured))]
    if plan.costs is None:
        return "\n".join(lines)
    planned, shown = plan.timeline, without_posts(measured)
    if planned.iteration_s < 3 * shown.iteration_s < 9 * planned.iteration_s:
        lines += ["", side_by_side(planned, shown)]
    else:  # on one scale one of them would be a dot
        lines += ["", "planned", str(planned), "measured, on another scale", str(shown)]
    return "\n".join(lines)


_NUMBERS: dict[str, tuple[str, Callable[[float], str]]] = {
    "step_s": ("step", seconds),
    "samples_per_s": ("samples/s", "{:.4g}".format),
    "bubble_ratio": ("bubble ratio", percent),
    "mfu": ("model FLOPs utilisation", percent),
    "loading_s": ("waiting for data, a step", seconds),
    "peak_memory_bytes": ("memory of tensors, at most", size),
    "peak_resident_bytes": ("memory of the process, at most", size),
    "bytes_sent": ("sent in a step", size),
}


def number_table(numbers: Mapping[str, float]) -> str:
    """Returns a table of the numbers that a monitor logs, planned and measured.

    They are by name, `samples_per_s`, or by name and rank, `bytes_sent/rank_1`; planned ones begin with `planned_`.
    """
    planned = {n.removeprefix("planned_"): x for n, x in numbers.items() if "planned_" in n}
    rows = []
    for name, (what, shown) in _NUMBERS.items():
        for key in (key for key in numbers if key.partition("/")[0] == name):
            rank = key.partition("/rank_")[2]
            plan = shown(planned[key]) if key in planned else ""
            rows.append([f"{what}, rank {rank}" if rank else what, plan, shown(numbers[key])])
    return table(["", "planned", "measured"], rows)
