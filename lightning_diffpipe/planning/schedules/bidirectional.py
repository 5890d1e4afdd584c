"""Two backbones in opposite directions: the one is busy where the other has its bubbles.

A cascade trains two backbones that know nothing of each other. Backbone A runs down the ranks, backbone
B up; each rank holds one stage of both. While A fills, B's far end works, and the reverse.

    rank 0 | 0F0 3F0 3B0  -- 0B0  -- 0F1 3F1 3B1  -- 0B1  --      A: stages 0 and 1, downwards
    rank 1 | 2F0 1F0 1B0  -- 2B0  -- 2F1 1F1 1B1  -- 2B1  --      B: stages 2 and 3, upwards

The order on each rank is found greedily: backwards first, then forwards of the older microbatch, with at
most `S - s` microbatches in flight on stage `s` of each backbone.

Source:
    The idea: DiffusionPipe, Tian et al. (2024), https://arxiv.org/abs/2405.01248, and for two copies of
    one model Chimera, Li and Hoefler (2021), https://arxiv.org/abs/2107.06925; the order is ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_diffpipe.planning.instruction import Backward, Forward, Instruction
from lightning_diffpipe.planning.schedule import Placement, Schedule


def bidirectional(
    num_stages: int,
    num_microbatches: int,
    *,
    forward: tuple[float, float] = (1, 1),
    backward: tuple[float, float] = (2, 2),
) -> Schedule:
    """Schedules two backbones of equally many stages over the same ranks.

    Args:
        num_stages: S, of each backbone; also the number of ranks.
        num_microbatches: Of each backbone.
        forward: Time of a stage's forward, for A and B. Only their proportions matter.
        backward: The same for the backward.
    """
    down = tuple((rank,) for rank in range(num_stages))
    placement = Placement(down + down[::-1], first_stages=(0, num_stages))
    greedy = _Greedy(placement, num_microbatches, forward, backward)
    while greedy.todo:
        greedy.start_what_can_start()
        greedy.advance()
    programs = tuple(tuple(program) for program in greedy.programs)
    return Schedule(placement, num_microbatches, programs)


@dataclass
class _Greedy:
    """List scheduling: whenever a rank is free, it takes the most urgent work that is ready."""

    placement: Placement
    num_microbatches: int
    forward: tuple[float, float]
    backward: tuple[float, float]
    now: float = 0.0
    ended: dict[Instruction, float] = field(default_factory=dict)
    free_at: dict[int, float] = field(default_factory=dict)
    in_flight: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        stages, microbatches = range(self.placement.num_stages), range(self.num_microbatches)
        self.todo: set[Forward | Backward] = {
            make(s, m) for make in (Forward, Backward) for s in stages for m in microbatches
        }
        self.programs: list[list[Instruction]] = [[] for _ in range(self.placement.num_ranks)]

    def start_what_can_start(self) -> None:
        """Gives every free rank its next work, if there is any."""
        for rank in range(self.placement.num_ranks):
            ready = [
                i
                for stage in self.placement.stages_of(rank)
                for i in self._next_of(stage)
                if self.free_at.get(rank, 0) <= self.now and self._is_ready(i)
            ]
            if ready:
                self._start(rank, min(ready, key=_urgency))

    def _next_of(self, stage: int) -> list[Forward | Backward]:
        """The oldest forward and the oldest backward of a stage that are still to do."""
        kinds: tuple[type[Forward] | type[Backward], ...] = (Backward, Forward)
        todo = (
            [m for m in range(self.num_microbatches) if k(stage, m) in self.todo] for k in kinds
        )
        return [kind(stage, left[0]) for kind, left in zip(kinds, todo, strict=True) if left]

    def _is_ready(self, i: Forward | Backward) -> bool:
        place = self.placement
        needs: Instruction | None
        if isinstance(i, Forward):
            before = place.previous_stage(i.stage)
            backbone = place.backbone_of(i.stage)
            if self.in_flight.get(i.stage, 0) >= backbone.stop - i.stage:
                return False
            needs = None if before is None else Forward(before, i.microbatch)
        else:
            after = place.next_stage(i.stage)
            own = Forward(i.stage, i.microbatch)
            needs = own if after is None else Backward(after, i.microbatch)
        return needs is None or self.ended.get(needs, float("inf")) <= self.now

    def _start(self, rank: int, i: Forward | Backward) -> None:
        which = 0 if i.stage < self.placement.num_stages // 2 else 1
        is_forward = isinstance(i, Forward)
        self.free_at[rank] = self.now + (self.forward if is_forward else self.backward)[which]
        self.ended[i] = self.free_at[rank]
        self.in_flight[i.stage] = self.in_flight.get(i.stage, 0) + (1 if is_forward else -1)
        self.todo.remove(i)
        self.programs[rank].append(i)

    def advance(self) -> None:
        """On to the next moment at which something ends."""
        self.now = min((t for t in self.ended.values() if t > self.now), default=self.now)


def _urgency(i: Forward | Backward) -> tuple[bool, int, int]:
    return isinstance(i, Forward), i.microbatch, i.stage
