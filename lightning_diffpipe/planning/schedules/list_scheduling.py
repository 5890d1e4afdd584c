"""List scheduling: whenever a rank is free, it takes the most urgent work that is ready.

For placements on which nobody knows a closed form: the order is found with times that only stand for their
proportions, and is run with whatever the work really takes.

**V**: one chain of twice as many stages as ranks, down the ranks and up again. Rank `r` of R holds stages `r`
and `2R - 1 - r`: the first and the last, the second and the last but one. So both ends of a U-Net's skip are on
one rank, and need not travel; nor does anything at the turning point.

    rank 0 | 0F0 0F1 0F2 3F0 3B0  -- 3F1 3F2 3B1  -- 3B2  -- 0B0  -- 0F3 0B1  -- ...
    rank 1 |   . 1F0 2F0 1F1 2F1 1F2 2F2 2B0  -- 1B0  -- 2B1  -- 1B1  -- 1F3 2F3 ...

With whole backwards forwards come first, and at most `2R - 1` microbatches are under way: with equal stages and
free links the bubble is that of two interleaved stages on a rank, `R - 1` times a stage's forward and backward;
with some numbers of ranks and microbatches a step takes up to 2 % longer. With backwards in two parts (ZB-V)
gradients of inputs come first, those of weights last, with the whole backwards of the first stage, for which
nobody waits; a bubble of `R - 1` forwards is left of it, with `2R - 1` microbatches or more.

**Bidirectional**: a cascade trains two backbones that know nothing of each other. Backbone A runs down the
ranks, backbone B up; each rank holds one stage of both. While A fills, B's far end works, and the reverse. Of
more than two, every second one runs up.

    rank 0 | 0F0 3F0 3B0  -- 0B0  -- 0F1 3F1 3B1  -- 0B1  --      A: stages 0 and 1, downwards
    rank 1 | 2F0 1F0 1B0  -- 2B0  -- 2F1 1F1 1B1  -- 2B1  --      B: stages 2 and 3, upwards

The order is found with the times of the stages, with at most `S - s` microbatches in flight on stage `s` of
each backbone. What is most urgent is tried in three ways, and the order is kept that ends first: backwards,
then forwards of the older microbatch; whatever most work depends on that is left of its backbone; or forwards,
by what is left of their microbatch.

Sources:
    Zero bubble on V placement: Pipeline Parallelism with Controllable Memory, Qi et al. (2024),
    https://arxiv.org/abs/2405.15362. Both ends of a skip on one rank: PULSE.
    Opposite directions: DiffusionPipe, Tian et al. (2024), https://arxiv.org/abs/2405.01248, and for two copies of
    one model Chimera, Li and Hoefler (2021), https://arxiv.org/abs/2107.06925. The greedy orders are ours.
"""

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from operator import itemgetter

from lightning_diffpipe.planning.instruction import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    ForwardNoGrad,
    Program,
)
from lightning_diffpipe.planning.schedule import Placement, ScheduleSpec, Ticks

Programs = tuple[Program, ...]
Work = Forward | ForwardNoGrad | Backward | BackwardInput | BackwardWeight
_WHOLE: tuple[type[Work], ...] = (Backward,)
_SPLIT: tuple[type[Work], ...] = (BackwardInput, BackwardWeight)


@dataclass
class ListScheduling:
    """Finds orders of work; microbatches pass every stage in order.

    Attributes:
        ticks: Time of a kind of work on a stage; only proportions matter.
        most_in_flight: Microbatches that a stage may have forwarded, and kept something of.
        splits_backward: Backwards run in two parts, where a stage sends a gradient on.
    """

    placement: Placement
    num_microbatches: int
    ticks: Callable[[type[Work], int], float]
    most_in_flight: Callable[[int], float]
    splits_backward: bool = False

    def __post_init__(self) -> None:
        place, stages = self.placement, range(self.placement.num_stages)
        # The parts of a stage's backward; who sends no gradient gains nothing by two.
        self.backward = [
            _SPLIT if self.splits_backward and place.sends_gradient(stage) else _WHOLE
            for stage in stages
        ]
        self.kinds: list[tuple[type[Work], ...]] = [
            (ForwardNoGrad,) if stage in place.no_grad else (Forward, *self.backward[stage])
            for stage in stages
        ]
        self.before = [place.previous_stage(stage) for stage in stages]
        trained = [s for s in stages if s not in place.no_grad]
        # The next stage that sends a gradient back.
        self.after = [
            next((s for s in trained if s > stage and s in place.backbone_of(stage)), None)
            for stage in stages
        ]

    def programs(self, *urgencies: Callable[[Work], tuple[float, ...]]) -> Programs:
        """Makes the programs of all ranks.

        For each of some urgencies the work with the smallest is taken first; returns the order that ends first.
        """
        return min(map(self._run, urgencies), key=itemgetter(0))[1]

    def _run(self, urgency: Callable[[Work], tuple[float, ...]]) -> tuple[float, Programs]:
        """Returns when the last rank is done, and the programs of all."""
        kinds = (Forward, ForwardNoGrad, *_SPLIT, *_WHOLE)
        self.done: dict[type[Work], list[int]] = {k: [0] * len(self.backward) for k in kinds}
        self.ended: dict[Work, float] = {}
        self.now = 0.0
        ranks = range(self.placement.num_ranks)
        stages = [self.placement.stages_of(rank) for rank in ranks]
        free_at, programs = [0.0 for _ in ranks], [list[Work]() for _ in ranks]
        events = [0.0]
        while events:
            self.now = heapq.heappop(events)
            while events and events[0] == self.now:  # ranks that are done at once are seen at once
                heapq.heappop(events)
            for rank in ranks:
                if free_at[rank] > self.now:
                    continue
                ready = [
                    work
                    for stage in stages[rank]
                    for kind in self.kinds[stage]
                    if self._is_ready(work := kind(stage, self.done[kind][stage]))
                ]
                if ready:
                    work = min(ready, key=urgency)
                    programs[rank].append(work)
                    self.done[type(work)][work.stage] += 1
                    free_at[rank] = self.now + self.ticks(type(work), work.stage)
                    self.ended[work] = free_at[rank]
                    heapq.heappush(events, free_at[rank])
        return max(free_at), tuple(map(tuple, programs))

    def _is_ready(self, work: Work) -> bool:
        """Returns whether there is such work, and it could begin."""
        stage, microbatch = work.stage, work.microbatch
        if microbatch >= self.num_microbatches:
            return False
        needs: Work | None
        if isinstance(work, (Forward, ForwardNoGrad)):
            before = self.before[stage]
            in_flight = self.done[Forward][stage] - self.done[self.backward[stage][-1]][stage]
            if in_flight >= self.most_in_flight(stage):
                return False
            kind = ForwardNoGrad if before in self.placement.no_grad else Forward
            needs = None if before is None else kind(before, microbatch)
        elif isinstance(work, BackwardWeight):
            needs = BackwardInput(stage, microbatch)
        else:
            after = self.after[stage]
            forward = Forward(stage, microbatch)
            needs = forward if after is None else self.backward[after][0](after, microbatch)
        return needs is None or self.ended.get(needs, math.inf) <= self.now


def _down_and_up(num_stages: int, num_ranks: int, *, opposite: bool = False) -> Placement:
    """Places stages down the ranks and up again; if `opposite`, each way is a chain of its own."""
    starts, down = range(0, num_stages, num_ranks), range(num_ranks)
    ways = [(down, down[::-1])[number % 2] for number in range(len(starts))]
    stage_ranks = tuple((rank,) for way in ways for rank in way)
    return Placement(stage_ranks, first_stages=tuple(starts) if opposite else (0,))


def _found_once(programs: Callable[..., Programs]) -> Callable[..., Program]:
    """Returns a function for the program of one rank, which finds those of all ranks once and remembers them."""
    remembered = lru_cache(maxsize=64)(programs)

    def program(
        placement: Placement, num_microbatches: int, rank: int, **how: bool | Ticks
    ) -> Program:
        return remembered(placement, num_microbatches, **how)[rank]

    return program


def chain_programs(
    placement: Placement,
    num_microbatches: int,
    most_in_flight: int,
    splits_backward: bool,
    later_first: bool = True,
) -> Programs:
    """Returns programs for placed stages, with so many microbatches under way at a time; see `ListScheduling`.

    With `later_first`, of work for one microbatch the later stage comes first.
    """
    order: dict[type[Work], int] = {Forward: 0, ForwardNoGrad: 0, Backward: 1}
    if splits_backward:
        order = {BackwardInput: 0, Forward: 1, ForwardNoGrad: 1, BackwardWeight: 2, Backward: 2}
    sign = -1 if later_first else 1
    orders = ListScheduling(
        placement,
        num_microbatches,
        lambda kind, stage: 2 if kind is Backward else 1,
        lambda stage: most_in_flight if stage == 0 else num_microbatches,
        splits_backward,
    )
    return orders.programs(lambda work: (order[type(work)], work.microbatch, sign * work.stage))


@_found_once
def _v_program(placement: Placement, num_microbatches: int, splits_backward: bool) -> Programs:
    num_ranks = placement.num_ranks
    most = num_ranks + (num_ranks + 1) // 4 if splits_backward else 2 * num_ranks - 1
    return chain_programs(placement, num_microbatches, most, splits_backward, not splits_backward)


v = ScheduleSpec(
    "v",
    partial(_v_program, splits_backward=False),
    place=_down_and_up,
    stages_per_rank=(2,),
    most_per_rank=2,
    nested=True,
    auto=True,
    advice="both ends of skips on one rank",
)
zero_bubble_v = replace(
    v,
    name="zero_bubble_v",
    program=partial(_v_program, splits_backward=True),
    splits_backward=True,
    auto=False,
    advice="backwards in two parts, both ends of skips on one rank",
)


@_found_once
def _bidirectional_program(
    placement: Placement, num_microbatches: int, ticks: Ticks = ()
) -> Programs:
    of_stage = ticks or ((1.0, 2.0),) * placement.num_stages
    left: dict[tuple[bool, int], float] = {}  # of a microbatch, from this work on
    pace: dict[int, float] = {}
    for stage in range(placement.num_stages):
        chain = placement.backbone_of(stage)
        back = sum(of_stage[s][1] for s in chain if s <= stage)
        left[False, stage] = back
        left[True, stage] = back + sum(map(sum, (of_stage[s] for s in chain if s > stage)))
        left[True, stage] += of_stage[stage][0]
        pace[stage] = max(sum(of_stage[s]) for s in chain)

    def by_age(work: Work) -> tuple[float, ...]:
        return isinstance(work, Forward), work.microbatch, work.stage

    def by_all_that_is_left(work: Work) -> tuple[float, ...]:
        later = (num_microbatches - 1 - work.microbatch) * pace[work.stage]
        return (-later - left[isinstance(work, Forward), work.stage], work.stage)

    def forwards_first(work: Work) -> tuple[float, ...]:
        is_forward = isinstance(work, Forward)
        return not is_forward, -left[is_forward, work.stage], work.microbatch, work.stage

    orders = ListScheduling(
        placement,
        num_microbatches,
        lambda kind, stage: of_stage[stage][kind is not Forward],
        lambda stage: placement.backbone_of(stage).stop - stage,
    )
    return orders.programs(by_age, by_all_that_is_left, forwards_first)


bidirectional = ScheduleSpec(
    "bidirectional",
    _bidirectional_program,
    place=partial(_down_and_up, opposite=True),
    stages_per_rank=(2,),
    opposite=True,
    timed=True,
    auto=True,
    advice="backbones in opposite directions",
)
