"""List scheduling: whenever a rank is free, it takes the most urgent work that is ready.

For placements on which nobody knows a closed form: the order is found with times that only stand for their
proportions, and is run with whatever the work really takes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from operator import itemgetter

from lightning_diffpipe.planning.instruction import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    ForwardNoGrad,
    Program,
)
from lightning_diffpipe.planning.schedule import Placement

Work = Forward | ForwardNoGrad | Backward | BackwardInput | BackwardWeight
_WHOLE: tuple[type[Work], ...] = (Backward,)
_SPLIT: tuple[type[Work], ...] = (BackwardInput, BackwardWeight)


def list_schedule(
    placement: Placement,
    num_microbatches: int,
    ticks: Callable[[type[Work], int], float],
    urgency: Callable[[Work], tuple[float, ...]],
    most_in_flight: Callable[[int], float],
    splits_backward: bool = False,
    others: Sequence[Callable[[Work], tuple[float, ...]]] = (),
) -> tuple[Program, ...]:
    """The programs of all ranks; microbatches pass every stage in order.

    Args:
        placement: Where the stages run, each on one rank.
        num_microbatches: Of each backbone.
        ticks: Time of a kind of work on a stage; only proportions matter.
        urgency: The smallest is taken first.
        most_in_flight: Microbatches that a stage may have forwarded, and kept something of.
        splits_backward: Backwards run in two parts, where a stage sends a gradient on.
        others: Further urgencies; of the orders that they lead to the one is returned that ends first.
    """
    found = [
        _ListScheduling(
            placement, num_microbatches, ticks, each, most_in_flight, splits_backward
        ).run()
        for each in (urgency, *others)
    ]
    return min(found, key=itemgetter(0))[1]


class _ListScheduling:
    def __init__(
        self,
        placement: Placement,
        num_microbatches: int,
        ticks: Callable[[type[Work], int], float],
        urgency: Callable[[Work], tuple[float, ...]],
        most_in_flight: Callable[[int], float],
        splits_backward: bool,
    ) -> None:
        self.placement, self.num_microbatches = placement, num_microbatches
        self.ticks, self.urgency, self.most_in_flight = ticks, urgency, most_in_flight
        stages = range(placement.num_stages)
        self.backward = [  # the parts of a stage's backward; who sends no gradient gains nothing by two
            _SPLIT if splits_backward and placement.sends_gradient(stage) else _WHOLE
            for stage in stages
        ]
        kinds = (Forward, ForwardNoGrad, *_SPLIT, *_WHOLE)
        self.done: dict[type[Work], list[int]] = {k: [0 for _ in stages] for k in kinds}
        self.before = [placement.previous_stage(stage) for stage in stages]
        self.after = [  # the next stage that sends a gradient back
            next(
                (
                    s
                    for s in placement.backbone_of(stage)
                    if s > stage and s not in placement.no_grad
                ),
                None,
            )
            for stage in stages
        ]
        self.ended: dict[Work, float] = {}
        self.now = 0.0

    def run(self) -> tuple[float, tuple[Program, ...]]:
        """When the last rank is done, and the programs of all."""
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
                ready = [work for stage in stages[rank] for work in self._ready(stage)]
                if ready:
                    work = min(ready, key=self.urgency)
                    programs[rank].append(work)
                    self.done[type(work)][work.stage] += 1
                    free_at[rank] = self.now + self.ticks(type(work), work.stage)
                    self.ended[work] = free_at[rank]
                    heapq.heappush(events, free_at[rank])
        return max(free_at), tuple(map(tuple, programs))

    def _ready(self, stage: int) -> list[Work]:
        """The oldest work of each kind that could begin."""
        no_grad = stage in self.placement.no_grad
        kinds = (ForwardNoGrad,) if no_grad else (Forward, *self.backward[stage])
        oldest = (kind(stage, self.done[kind][stage]) for kind in kinds)
        return [w for w in oldest if w.microbatch < self.num_microbatches and self._is_ready(w)]

    def _is_ready(self, work: Work) -> bool:
        stage, microbatch = work.stage, work.microbatch
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
            own = Forward(stage, microbatch)
            needs = own if after is None else self.backward[after][0](after, microbatch)
        return needs is None or self.ended.get(needs, math.inf) <= self.now
