"""Evaluation of proposals: their simulated step time, their memory, and in the end a whole plan."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, cycle, pairwise
from typing import NamedTuple

from lightning_diffpipe.planning.cost import (
    CostModel,
    LayerRun,
    PipelineCosts,
    PipelineLinks,
    offloaded_bytes,
    pipeline_costs,
)
from lightning_diffpipe.planning.filling import (
    SHARES_PERIOD,
    EncodePart,
    all_done_s,
    even_shares,
    fill_by_shares,
    frozen_layers,
    group_samples,
    weave,
)
from lightning_diffpipe.planning.instruction import Compute
from lightning_diffpipe.planning.lowering import prefix_frozen
from lightning_diffpipe.planning.memory import (
    FrozenLoad,
    Waiting,
    copies,
    frozen_loads,
    peak_memory_bytes,
    peak_samples_of,
    rank_bytes,
    streamed_runs,
)
from lightning_diffpipe.planning.options import PlanOptions
from lightning_diffpipe.planning.partition import Cut, Stage, minimax_cuts
from lightning_diffpipe.planning.passes import folded, runs_of, schedule_of_passes, unrolled
from lightning_diffpipe.planning.plan import PipelinePlan, Planned
from lightning_diffpipe.planning.profile import ModelProfile
from lightning_diffpipe.planning.proposals import Shape
from lightning_diffpipe.planning.schedule import Placement, Schedule, ScheduleSpec, Ticks
from lightning_diffpipe.planning.schedules.pipedream import loop_program
from lightning_diffpipe.planning.simulator import (
    Outline,
    exchanged_s,
    makespan,
    outline_of,
    period_s,
    simulate,
)
from lightning_diffpipe.planning.timeline import Timeline

NUM_MIXTURES = 8
"""Number of sampled batches that stand for all, where each microbatch throws its own coin."""

TICKS = 24
"""Ticks that the average stage takes, where the order of work depends on times."""

UNFILLED_SHARE = 0.1
"""Weight of the unfilled step time in the comparison of filled plans; it decides where filled steps are equal."""


LINK_SHARE = 0.1
"""Weight of the time of all links, divided by the ranks, where a model has skips: many cuts take the same time
then, and the one that sends least is the safest, since messages cost the ranks more than is simulated."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A shape and where it cuts."""

    shape: Shape
    cuts: tuple[Cut, ...]

    @classmethod
    def of(cls, plan: PipelinePlan, profile: ModelProfile) -> Proposal:
        """Returns what a plan for a profile of one backbone decides."""
        shape = Shape(
            plan.num_pipelines,
            plan.ranks_per_pipeline,
            plan.num_stages,
            plan.microbatch_sizes,
            plan.options.schedule,
        )
        stages, passes = plan.stages[: plan.num_stages], profile.backbones[0].passes
        start, stop = passes[0] if passes else (0, plan.num_layers)
        firsts = (first - start for first in plan.first_layers[1 : plan.num_stages])
        edges = [0, *firsts, stop - start]
        replicas = (stage.num_replicas for stage in stages)
        return cls(shape, tuple((*ab, r) for ab, r in zip(pairwise(edges), replicas, strict=True)))

    @property
    def replicas(self) -> tuple[int, ...]:
        """Replicas of every stage."""
        return tuple(replicas for _, _, replicas in self.cuts)

    @property
    def runs(self) -> tuple[LayerRun, ...]:
        """Layers of every stage."""
        return tuple(LayerRun(first, stop) for first, stop, _ in self.cuts)


class Outlines(NamedTuple):
    """Peaks by rank, and outlines by first stages, of a placed schedule; they depend on no costs."""

    peaks: dict[int, dict[int, Waiting]]
    by_starts: dict[tuple[int, ...], Outline]


Known = dict[tuple[ScheduleSpec, Placement, Placement, tuple[int, ...]], Outlines]
"""What is known of placed schedules, shared by all evaluators of one search for a plan."""


@dataclass(frozen=True)
class PlacedSchedule:
    """Schedule and placement, shared by proposals that differ in their cuts and the time of frozen work."""

    spec: ScheduleSpec
    base: Placement
    placement: Placement
    sizes: tuple[int, ...]
    links: PipelineLinks
    known: Outlines

    def schedule(self) -> Schedule:
        """Makes the schedule without frozen work each time, as many large ones would slow down everything else."""
        count = len(self.sizes)
        if self.placement is self.base:
            return self.spec(self.base, count)
        return schedule_of_passes(self.spec, self.base, self.placement, count)

    def peak(self, rank: int) -> dict[int, Waiting]:
        """Returns `peak_samples_of` a rank; most pipelines that do not fit are known by their first ranks."""
        peaks = self.known.peaks
        if rank not in peaks:
            stages, sizes = self.placement.stages_of(rank), self.sizes
            if self.runs_free:
                in_a_row = range(self.base.num_stages)
                program = loop_program(self.base, rank, len(sizes), in_a_row, drains=True)
                sizes *= len(in_a_row)
            elif self.placement is self.base:
                program = self.spec.program(self.base, len(sizes), rank)
            else:
                program = self.schedule().programs[rank]
            peaks[rank] = peak_samples_of(program, stages, sizes)
        return peaks[rank]

    @property
    def runs_free(self) -> bool:
        """Whether batches follow each other without a flush."""
        return not self.spec.flushes and self.base.num_ranks > 1

    @cached_property
    def holders(self) -> tuple[int, ...]:
        """Ranks of all pipelines that hold each stage."""
        return tuple(self.links.num_pipelines * len(ranks) for ranks in self.placement.stage_ranks)

    def weight_versions(self, rank: int) -> int:
        """Returns versions of its weights that a rank stores."""
        if not self.runs_free:
            return 1
        return max(self.spec.weight_versions(self.base, s) for s in self.base.stages_of(rank))

    @property
    def peaks(self) -> tuple[dict[int, Waiting], ...]:
        """Largest amounts of waiting activations of every rank; see `peak`."""
        return tuple(map(self.peak, range(self.placement.num_ranks)))

    def outline(self, starts: tuple[int, ...]) -> Outline:
        """Returns what decides how long it takes if microbatches begin at these stages; made when simulated."""
        outlines = self.known.by_starts
        if starts not in outlines:
            outlines[starts] = outline_of(self.schedule().starting_at(starts), self.sizes)
        return outlines[starts]


@dataclass(frozen=True)
class Frame:
    """Everything but the cuts: shared by proposals that differ in these alone."""

    pipeline: PlacedSchedule
    parts: tuple[EncodePart, ...]
    loads: tuple[FrozenLoad, ...]
    need_bytes: dict[tuple[int, tuple[LayerRun, ...]], int] = field(default_factory=dict)


_Key = tuple[Shape, tuple[tuple[int, ...], ...], frozenset[int], Ticks]


@dataclass
class Evaluator:
    """Simulates proposals; remembers what does not depend on where they cut."""

    model: CostModel
    options: PlanOptions
    known: Known = field(default_factory=dict)
    _pipelines: dict[_Key, PlacedSchedule] = field(default_factory=dict)
    _frames: dict[_Key, Frame] = field(default_factory=dict)
    _steps: dict[Proposal, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.calls = self.model
        backbone = self.model.backbone
        if backbone.passes or len(backbone.seen.sequences) > 1:
            profile = folded(self.model.profile)
            self.model = replace(self.model, profile=profile, is_folded=True, _memo={})

    def runs(self, proposal: Proposal) -> tuple[LayerRun, ...]:
        """Returns the calls of every stage, of all passes; a rank alone runs them as they come."""
        backbone = self.calls.backbone
        if not backbone.passes:
            return proposal.runs
        if proposal.shape.num_ranks == 1:
            return (LayerRun(0, len(backbone.layers)),)
        return runs_of(backbone, proposal.cuts)

    def unfilled(self) -> Evaluator:
        """Returns the same without filling; what has been found of pipelines without frozen work is shared."""
        options = replace(self.options, filling="none")
        return Evaluator(self.calls, options, self.known, self._pipelines)

    @property
    def fills(self) -> bool:
        """Whether frozen work goes into bubbles."""
        return self.options.filling != "none" and bool(self.model.profile.encoders)

    def parts(self, shape: Shape) -> tuple[EncodePart, ...]:
        """Returns the frozen parts before the pipeline."""
        if not self.model.profile.encoders:
            return ()
        group_size, num_encoding = self.group_size(shape), self.num_encoding(shape)
        return self.model.encode_parts(shape.sizes, shape.num_ranks, group_size, num_encoding)

    def num_encoding(self, shape: Shape) -> int:
        """Returns how many ranks of a pipeline encode, the last ones."""
        count = self.options.encoding_ranks
        return shape.num_ranks if count == "auto" else min(count, shape.num_ranks)

    def group_size(self, shape: Shape) -> int | None:
        """Returns samples on which frozen layers run at a time; None for whole microbatches.

        Those that cannot be split run so, and those of a rank alone: they run where they are called.
        """
        size = self.options.frozen_group_size
        if not self.options.frozen_splittable or shape.num_ranks == 1:
            return None
        num_encoding = self.num_encoding(shape)
        return self.model.group_size(shape.sizes, num_encoding) if size == "auto" else size

    def encode_share_s(self, shape: Shape) -> float:
        """Returns seconds of frozen work of each rank that encodes if all of them take equal shares."""
        group = self.group_size(shape) or max(shape.sizes)
        return self.model.encode_s(sum(shape.sizes) / self.num_encoding(shape), group)

    def share_steps(self, shape: Shape) -> tuple[int, ...]:
        """Returns samples of every piece of a batch that a rank may take or leave, on average over batches.

        Parts of groups, as a rank may take another number of groups of the next batch; without groups whole
        microbatches.
        """
        group = self.group_size(shape)
        size = max(1, group // SHARES_PERIOD) if group else max(shape.sizes)
        return group_samples(shape.sizes, size)

    def frame(self, proposal: Proposal) -> Frame:
        """Returns what does not depend on where a proposal cuts."""
        shape = proposal.shape
        base = shape.placement(proposal.replicas)
        placement = base
        backbone = self.calls.backbone
        if backbone.passes and shape.num_ranks > 1:
            placement = unrolled(base, backbone, self.runs(proposal))
        ticks: Ticks = ()
        if shape.spec.timed:  # in parts of the average: cuts that differ little have one order
            model, size = self.model, shape.sizes[0]
            times = [(model.forward_s(r, size), model.backward_s(r, size)) for r in proposal.runs]
            unit = sum(map(sum, times)) / (TICKS * len(times)) or 1.0
            ticks = tuple((round(f / unit, 0), round(b / unit, 0)) for f, b in times)
        key = (shape, placement.stage_ranks, placement.no_grad, ticks)
        if key not in self._frames:
            if key not in self._pipelines:
                links = PipelineLinks(self.model.cluster, placement, shape.num_pipelines)
                spec = shape.spec.in_time(ticks)
                placed = spec, base, placement, shape.sizes
                known = self.known.setdefault(placed, Outlines({}, {}))
                self._pipelines[key] = PlacedSchedule(*placed, links, known)
            pipeline, parts, group = self._pipelines[key], self.parts(shape), self.group_size(shape)
            loads = frozen_loads(
                pipeline.placement, shape.sizes, parts, group, self.fills, self.num_encoding(shape)
            )
            self._frames[key] = Frame(pipeline, () if self.fills else parts, loads)
        return self._frames[key]

    def costs(self, proposal: Proposal) -> PipelineCosts:
        """Returns what the simulator needs."""
        frame = self.frame(proposal)
        sizes, links = proposal.shape.sizes, frame.pipeline.links
        group = self.group_size(proposal.shape)
        return pipeline_costs(self.calls, links, self.runs(proposal), sizes, frame.parts, group)

    def step_s(self, proposal: Proposal) -> float:
        """Simulates a step; with filling, estimates one, by which proposals are compared.

        The estimate: bubbles are filled without a loss, by shares as fine as they get. Often many cuts then
        take the same time, as frozen work evens out any of them, and the one that needs least of that is
        the safest: costs are never known exactly. So a little of the unfilled step is added.
        """
        if proposal not in self._steps:
            costs, frame, shape = self.costs(proposal), self.frame(proposal), proposal.shape
            if frame.pipeline.runs_free:
                step_s = period_s(prefix_frozen(frame.pipeline.schedule(), frame.parts), costs)
            else:
                step_s = self._expected_s(proposal, costs)
            if self.model.backbone.skips:
                step_s += LINK_SHARE * costs.link_s() / shape.num_ranks
            if self.fills:
                busy_s = [0.0] * shape.num_ranks
                for stage, times in enumerate(zip(costs.forward_s, costs.backward_s, strict=True)):
                    in_turn = cycle(frame.pipeline.placement.stage_ranks[stage])
                    for rank, forward_s, backward_s in zip(in_turn, *times, strict=False):
                        busy_s[rank] += forward_s + backward_s
                num_shares, encoding = len(self.share_steps(shape)), self.num_encoding(shape)
                share_s = encoding * self.encode_share_s(shape) / num_shares
                busy_s = busy_s[-encoding:]
                done_s = all_done_s(busy_s, even_shares(busy_s, share_s, num_shares), share_s)
                step_s = preference_s(max(step_s, done_s), step_s)
            self._steps[proposal] = step_s + self._states_s(proposal, costs)
        return self._steps[proposal]

    def _states_s(self, proposal: Proposal, costs: PipelineCosts) -> float:
        """Returns seconds after the pipeline in which optimizer states are copied; none if it is not flushed."""
        return 0.0 if self.frame(proposal).pipeline.runs_free else costs.states_s

    def _expected_s(self, proposal: Proposal, costs: PipelineCosts) -> float:
        """Returns the mean time of the pipeline over the call sequences of its microbatches, in seconds."""
        frame, seen = self.frame(proposal), self.calls.backbone.seen
        pipeline, start_s = frame.pipeline, exchanged_s(frame.parts, costs) if frame.parts else 0.0
        if len(seen.sequences) == 1:
            return makespan(pipeline.outline(()), costs, start_s)
        if proposal.shape.num_ranks == 1:  # stages leave calls out only as a whole
            costs = pipeline_costs(self.model, pipeline.links, proposal.runs, proposal.shape.sizes)
            return makespan(pipeline.outline(()), costs, start_s)
        starts, size = self._first_stages(proposal), len(proposal.shape.sizes)
        shares = [share for share, _ in seen.sequences]
        if seen.shared:
            mixtures = [(start,) * size for start in starts]
        else:
            rng = random.Random(0)
            mixtures = [tuple(rng.choices(starts, shares, k=size)) for _ in range(NUM_MIXTURES)]
            shares = [1 / NUM_MIXTURES] * NUM_MIXTURES
        steps_s = (makespan(pipeline.outline(mixture), costs, start_s) for mixture in mixtures)
        return sum(share * step_s for share, step_s in zip(shares, steps_s, strict=True))

    def _first_stages(self, proposal: Proposal) -> tuple[int, ...]:
        """Returns for each call sequence the first stage that it does not leave out."""
        stops = [run.stop for run in self.runs(proposal)]
        sequences = self.calls.backbone.seen.sequences
        return tuple(bisect_right(stops, first) for _, first in sequences)

    def peak_bytes(self, proposal: Proposal) -> tuple[int, ...]:
        """Returns the memory of every rank."""
        frame, runs = self.frame(proposal), self.runs(proposal)
        pipeline = frame.pipeline
        peaks = peak_memory_bytes(self.calls, pipeline.peaks, runs, frame.loads, pipeline.holders)
        return tuple(b + self._version_bytes(proposal, rank) for rank, b in enumerate(peaks))

    def _version_bytes(self, proposal: Proposal, rank: int) -> int:
        """Returns bytes of earlier weights that a rank stores; only what is trained has versions."""
        pipeline, runs = self.frame(proposal).pipeline, self.runs(proposal)
        size = sum(self.calls.gradient_bytes(runs[s]) for s in pipeline.placement.stages_of(rank))
        return round((pipeline.weight_versions(rank) - 1) * size)

    def fits(self, proposal: Proposal) -> bool:
        """Returns whether every rank has enough memory; cheap for cuts that share stages with earlier ones."""
        return next(self.too_full(proposal), None) is None

    def too_full(self, proposal: Proposal) -> Iterator[int]:
        """Yields the ranks that have not enough memory."""
        cluster, runs = self.model.cluster, self.runs(proposal)
        if cluster.memory_bytes is None:
            return
        frame = self.frame(proposal)
        for rank in range(proposal.shape.num_ranks):
            peak = frame.pipeline.peak(rank)
            key = (rank, tuple([runs[stage] for stage in peak]))
            need = frame.need_bytes.get(key)
            if need is None:
                load = frame.loads[rank] if frame.loads else None
                need = rank_bytes(self.calls, peak, runs, load, frame.pipeline.holders)
                need += self._version_bytes(proposal, rank)
                frame.need_bytes[key] = need
            limit: int | None = cluster.memory_bytes
            if cluster.rank_memory_bytes:
                limit = cluster.memory_of(rank, proposal.shape.num_ranks)
            if limit is not None and need > limit:
                yield rank

    def plan(self, proposal: Proposal) -> PipelinePlan:
        """Writes a proposal down as a plan, filled if that is asked for and helps."""
        unfilled = self.unfilled().unfilled_plan(proposal)
        plans = [unfilled]
        if self.fills:
            plans.append(self.filled_plan(proposal, unfilled))
        if self.options.filling not in ("none", "auto"):
            plans = plans[-1:]
        return min(plans, key=preference)

    def unfilled_plan(self, proposal: Proposal) -> PipelinePlan:
        """Returns the plan whose frozen work runs before the pipeline, not in its bubbles."""
        frame, costs = self.frame(proposal), self.costs(proposal)
        schedule = prefix_frozen(frame.pipeline.schedule(), frame.parts)
        timeline = simulate(schedule, costs, costs.sizes)
        iteration_s = timeline.iteration_s + self._states_s(proposal, costs)
        bubble_ratio = timeline.bubble_ratio
        offloaded = offloaded_bytes(self.calls, frame.pipeline.links, self.runs(proposal))
        limit_s = _no_bubble_limit_s(timeline)
        streamed, copied = self._copies(proposal, schedule)
        if frame.pipeline.runs_free:  # steps overlap: the time of one is the period
            iteration_s = period_s(schedule, costs)
            bubble_ratio = max(1 - limit_s / iteration_s, 0.0) if iteration_s else 0.0
        planned = Planned(
            iteration_s=iteration_s,
            bubble_ratio=bubble_ratio,
            unfilled_iteration_s=iteration_s,
            unfilled_bubble_ratio=bubble_ratio,
            frozen_s=math.fsum(costs.encode_s),
            leftover_s=0.0,
            no_bubble_limit_s=limit_s,
            peak_memory_bytes=self.peak_bytes(proposal),
            samples_per_s=self.options.global_batch_size / (iteration_s or math.inf),
            **self._sent_bytes(proposal),
            streamed_bytes=streamed,
            copied_bytes=copied,
            copied_s=tuple(n / self.model.cluster.host_bytes_per_s for n in copied),
            offloaded_bytes=tuple(map(round, offloaded)),
        )
        sequences: tuple[tuple[float, int], ...] = ()
        seen = self.calls.backbone.seen
        if len(seen.sequences) > 1:
            states_s = self._states_s(proposal, costs)
            planned = replace(planned, expected_s=self._expected_s(proposal, costs) + states_s)
            # Of each call sequence: its share of the microbatches, and the stage at which it begins.
            shares = (share for share, _ in seen.sequences)
            sequences = tuple(zip(shares, self._first_stages(proposal), strict=True))
        shape = proposal.shape
        decided = replace(
            self.options,
            num_stages=shape.num_stages,
            num_microbatches=len(shape.sizes),
            num_replicas=proposal.replicas,
            data_parallel=shape.num_pipelines,
            schedule=shape.schedule,
            filling="none",
            frozen_group_size=self.group_size(shape) or max(shape.sizes),
            encoding_ranks=self.num_encoding(shape),
            shard_optimizer=self.options.shard_optimizer is True,
            optimizer_offload="all" if self.calls.offloads_optimizer else "none",
        )
        return PipelinePlan(
            decided,
            self._stages(proposal),
            schedule.programs,
            planned,
            costs,
            layers=tuple(layer.name for layer in self.calls.backbone.layers),
            sequences=sequences,
        )

    def _sent_bytes(self, proposal: Proposal) -> dict[str, int]:
        """Returns what its ranks send each other, and what those of a chain would; see `Planned`."""
        model, shape = self.calls, proposal.shape
        placement = self.frame(proposal).pipeline.placement
        stage_ranks, samples = placement.stage_ranks, 2 * sum(shape.sizes)
        crossing = model.crossing_bytes(self.runs(proposal), placement)
        between_ranks = (
            b
            for b, here, there in zip(crossing, stage_ranks, stage_ranks[1:], strict=False)
            if here != there
        )
        sent = {"sent_bytes": samples * sum(between_ranks)}
        if shape.spec.place and not shape.spec.opposite:
            work = model.work_s(shape.sizes)
            firsts = minimax_cuts([b - a for a, b in pairwise(work)], shape.num_ranks)
            boundaries = (model.boundary_bytes(LayerRun(0, first), 1) for first in firsts[1:])
            sent["chain_sent_bytes"] = samples * round(sum(boundaries))
        return sent

    def _copies(
        self, proposal: Proposal, schedule: Schedule
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns bytes of each rank's streamed weights, and of their copies in a step."""
        layers, placement = self.calls.backbone.layers, schedule.placement
        streamed = {
            stage: [i for i in range(run.first, run.stop) if layers[i].streamed_bytes]
            for stage, run in enumerate(self.runs(proposal))
        }
        weights, copied = list[int](), list[int]()
        if not any(streamed.values()):
            return (), ()
        for rank, program in enumerate(schedule.programs):
            its = {i for stage in placement.stages_of(rank) for i in streamed[stage]}
            weights.append(sum(layers[i].streamed_bytes for i in its))
            of_step = copies(streamed_runs(program, streamed))
            copied.append(sum(layers[i].streamed_bytes for i in of_step))
        return tuple(weights), tuple(copied)

    def filled_plan(self, proposal: Proposal, unfilled: PipelinePlan) -> PipelinePlan:
        """Plans frozen work of the next batch in the bubbles of this one."""
        pipeline, sizes = self.frame(proposal).pipeline, proposal.shape.sizes
        group, schedule = self.group_size(proposal.shape), pipeline.schedule()
        costs = self.costs(proposal)
        timeline = simulate(schedule, costs, sizes)
        layers = frozen_layers(self.model.profile.encoders, group)
        num_encoding = self.num_encoding(proposal.shape)
        steps = self.share_steps(proposal.shape)
        slowness = pipeline.links.slowness
        placed = fill_by_shares(timeline, layers, steps, num_encoding, slowness)
        filled = weave(schedule, timeline, placed)
        costs = replace(costs, encode_s=filled.piece_s)
        timeline = simulate(filled.schedule, costs, sizes)
        starts = (0, *accumulate(sizes))
        parts = {
            EncodePart(0, piece.rank, m, 0, size)
            for piece in filled.pieces
            for m, size in enumerate(sizes)
            if piece.start < starts[m] + size and starts[m] < piece.stop
        }
        loads = frozen_loads(pipeline.placement, sizes, tuple(parts), group, True, num_encoding)
        runs = self.runs(proposal)
        peaks = peak_memory_bytes(self.calls, pipeline.peaks, runs, loads, pipeline.holders)
        iteration_s = timeline.iteration_s + self._states_s(proposal, costs)
        planned = replace(
            unfilled.planned,
            iteration_s=iteration_s,
            bubble_ratio=timeline.bubble_ratio,
            no_bubble_limit_s=_no_bubble_limit_s(timeline),
            frozen_s=math.fsum(filled.piece_s),
            leftover_s=filled.leftover_s,
            peak_memory_bytes=peaks,
            samples_per_s=self.options.global_batch_size / (iteration_s or math.inf),
        )
        return replace(
            unfilled,
            options=replace(unfilled.options, filling="shares"),
            programs=filled.schedule.programs,
            planned=planned,
            costs=costs,
            pieces=filled.pieces,
        )

    def _stages(self, proposal: Proposal) -> tuple[Stage, ...]:
        placement, size = self.frame(proposal).pipeline.placement, proposal.shape.num_stages
        # Ranks are named where they are not those after the ranks of the stage before.
        several = placement.num_stages > placement.num_ranks
        backbone = self.model.backbone
        chains, stages = backbone.chains or ((backbone.name, 0),), list[Stage]()
        layers = self.calls.backbone.layers
        for index, run in enumerate(self.runs(proposal)):
            name, start = chains[bisect_right(self.model.starts, run.first) - 1]
            stages.append(
                Stage(
                    index,
                    name,
                    run.first - start,
                    run.stop - 1 - start,
                    proposal.replicas[index % size],
                    placement.stage_ranks[index] if several else (),
                    index // size,
                    index not in placement.no_grad,
                    tuple(
                        i - start for i in range(run.first, run.stop) if layers[i].uncheckpointed
                    ),
                    tuple(
                        i - start for i in range(run.first, run.stop) if layers[i].streamed_bytes
                    ),
                )
            )
        return tuple(stages)


def preference_s(filled_s: float, unfilled_s: float) -> float:
    """Returns what plans are compared by: the step, and a little of what it would be if nothing were filled.

    Example:
        >>> preference_s(2.0, unfilled_s=3.0) < preference_s(2.0, unfilled_s=4.0)
        True
    """
    return filled_s + UNFILLED_SHARE * unfilled_s


def preference(plan: PipelinePlan) -> float:
    """Returns by what the best of several plans is chosen; see `preference_s`."""
    planned = plan.planned
    saved_s = planned.unfilled_iteration_s - planned.iteration_s
    unfilled_s = planned.unfilled_iteration_s if planned.expected_s is None else planned.expected_s
    return preference_s(max(unfilled_s - saved_s, 0.0), unfilled_s)


def _no_bubble_limit_s(timeline: Timeline) -> float:
    computed = (span for span in timeline.spans if isinstance(span.instruction, Compute))
    return sum(span.duration_s for span in computed) / timeline.num_ranks
