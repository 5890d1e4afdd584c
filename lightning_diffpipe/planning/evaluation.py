"""From a proposal to its numbers: simulated step, memory, and at last a whole plan."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from lightning_diffpipe.planning.cost import CostModel, LayerRun
from lightning_diffpipe.planning.execution import Execution, execution_of
from lightning_diffpipe.planning.frozen_parts import EncodePart, encode_parts
from lightning_diffpipe.planning.instruction import Compute
from lightning_diffpipe.planning.lowering import lower, prefix_frozen
from lightning_diffpipe.planning.memory import peak_memory_bytes, peak_samples
from lightning_diffpipe.planning.options import PlanOptions
from lightning_diffpipe.planning.partition import Cut, Stage
from lightning_diffpipe.planning.pipeline_costs import PipelineCosts, PipelineLinks, pipeline_costs
from lightning_diffpipe.planning.plan import PipelinePlan, Planned
from lightning_diffpipe.planning.proposals import Shape
from lightning_diffpipe.planning.schedule import Placement, Schedule
from lightning_diffpipe.planning.schedules import SCHEDULES
from lightning_diffpipe.planning.simulator import makespan, simulate


@dataclass(frozen=True, slots=True)
class Proposal:
    """A shape and where it cuts."""

    shape: Shape
    cuts: tuple[Cut, ...]

    @property
    def replicas(self) -> tuple[int, ...]:
        """Replicas of every stage."""
        return tuple(replicas for _, _, replicas in self.cuts)

    @property
    def runs(self) -> tuple[LayerRun, ...]:
        """Layers of every stage."""
        return tuple(LayerRun(0, first, stop) for first, stop, _ in self.cuts)


@dataclass(frozen=True, slots=True)
class Frame:
    """What proposals share that differ only in where they cut."""

    schedule: Schedule
    execution: Execution
    links: PipelineLinks
    parts: tuple[EncodePart, ...]
    peaks: tuple[dict[int, float], ...]


@dataclass
class Evaluator:
    """Simulates proposals; remembers what does not depend on where they cut."""

    model: CostModel
    options: PlanOptions
    _frames: dict[tuple[Shape, tuple[int, ...]], Frame] = field(default_factory=dict)
    _steps: dict[Proposal, float] = field(default_factory=dict)

    def parts(self, shape: Shape) -> tuple[EncodePart, ...]:
        """The frozen parts of a shape."""
        if not self.model.profile.encoders:
            return ()
        return encode_parts(shape.sizes, shape.num_ranks, self.options.frozen_splittable)

    def frame(self, proposal: Proposal) -> Frame:
        """What does not depend on where a proposal cuts."""
        shape = proposal.shape
        key = (shape, proposal.replicas)
        if key not in self._frames:
            placement, parts = Placement.of_replicas(proposal.replicas), self.parts(shape)
            schedule = SCHEDULES[shape.schedule](placement, len(shape.sizes))
            schedule = prefix_frozen(schedule, parts)
            execution = execution_of(lower(schedule)).by_size(shape.sizes)
            links = PipelineLinks(self.model.cluster, placement, shape.num_pipelines)
            self._frames[key] = Frame(
                schedule, execution, links, parts, peak_samples(schedule, shape.sizes)
            )
        return self._frames[key]

    def costs(self, proposal: Proposal) -> PipelineCosts:
        """What the simulator needs."""
        frame = self.frame(proposal)
        sizes = proposal.shape.sizes
        return pipeline_costs(self.model, frame.links, proposal.runs, sizes, frame.parts)

    def step_s(self, proposal: Proposal) -> float:
        """The simulated time of a step."""
        if proposal not in self._steps:
            execution = self.frame(proposal).execution
            self._steps[proposal] = makespan(execution, self.costs(proposal))
        return self._steps[proposal]

    def peak_bytes(self, proposal: Proposal) -> tuple[int, ...]:
        """Memory of every rank."""
        return peak_memory_bytes(self.model, self.frame(proposal).peaks, proposal.runs)

    def fits(self, proposal: Proposal) -> bool:
        """Whether every rank has enough memory."""
        limit = self.model.cluster.memory_bytes
        return limit is None or max(self.peak_bytes(proposal)) <= limit

    def plan(self, proposal: Proposal) -> PipelinePlan:
        """Writes a proposal down as a plan."""
        shape, schedule, costs = proposal.shape, self.frame(proposal).schedule, self.costs(proposal)
        timeline = simulate(lower(schedule), costs)
        iteration_s, bubble_ratio = timeline.iteration_s, timeline.bubble_ratio
        computed = (s for s in timeline.spans if isinstance(s.instruction, Compute))
        work_s = sum(span.duration_s for span in computed)
        batch_size = self.options.global_batch_size
        planned = Planned(
            iteration_s=iteration_s,
            bubble_ratio=bubble_ratio,
            unfilled_iteration_s=iteration_s,
            unfilled_bubble_ratio=bubble_ratio,
            frozen_s=sum(costs.encode_s),
            leftover_s=0.0,
            no_bubble_limit_s=work_s / shape.num_ranks,
            peak_memory_bytes=self.peak_bytes(proposal),
            samples_per_s=batch_size / iteration_s if iteration_s else 0.0,
        )
        resolved = replace(
            self.options,
            num_stages=shape.num_stages,
            num_microbatches=len(shape.sizes),
            num_replicas=proposal.replicas,
            data_parallel=shape.num_pipelines,
            schedule=shape.schedule,
            filling="none",
        )
        backbone = self.model.profile.backbones[0].name
        stages = tuple(
            Stage(index, backbone, first, stop - 1, replicas)
            for index, (first, stop, replicas) in enumerate(proposal.cuts)
        )
        return PipelinePlan(resolved, stages, schedule.programs, planned, costs)
