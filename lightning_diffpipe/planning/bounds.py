"""How fast can a pipeline be at best? Lower bounds that prune the search, and the cuts that meet them.

Take one stage: layers `first` to `stop` on `r` ranks. Nothing reaches it before the layers in front of
it have forwarded a microbatch; then its busiest rank has `M / r` microbatches to work off; then the last
gradient must go back through the layers in front, or its own gradients must be summed. So

    step >= frozen + F(0, first) + work(first, stop) + max(B(0, first), sync(first, stop))

holds for every schedule of one backbone, however the other layers are cut. The bound of a stage
grows with `stop` and falls with `first`. Hence a cut that meets a given time is found greedily: let
every stage reach as far as it can.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from lightning_diffpipe.planning.cost import CostModel, LayerRun
from lightning_diffpipe.planning.frozen_parts import encode_parts, group_size_of
from lightning_diffpipe.planning.partition import Cut


@dataclass(frozen=True)
class Bounds:
    """Lower bounds for pipelines of a given size.

    Attributes:
        model: The cost model.
        sizes: Samples of each microbatch, larger ones first.
        num_ranks: Ranks of one pipeline.
        num_pipelines: Pipelines side by side.
        keeps_all: Whether the schedule keeps the activations of all microbatches, as GPipe does.
        frozen_splittable: See `PlanOptions`.
        frozen_first: Whether frozen work runs in front of the pipeline, rather than in its bubbles.
        stages_per_rank: More than one if stages are dealt out round robin.
    """

    model: CostModel
    sizes: tuple[int, ...]
    num_ranks: int
    num_pipelines: int = 1
    keeps_all: bool = False
    frozen_splittable: bool = True
    frozen_first: bool = True
    stages_per_rank: int = 1
    _works: dict[int, tuple[float, ...]] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def frozen_s(self) -> float:
        """Time of the frozen work in front of the pipeline."""
        if not self.model.profile.encoders or not self.frozen_first:
            return 0.0
        busy = [0.0] * self.num_ranks
        group = self.group_size
        for part in encode_parts(self.sizes, self.num_ranks, self.frozen_splittable, group or 1):
            busy[part.rank] += self.model.encode_s(part.num_samples, group)
        return max(busy)

    @property
    def group_size(self) -> int | None:
        """Samples on which frozen layers run at a time."""
        return group_size_of(self.sizes, self.num_ranks) if self.frozen_splittable else None

    @cached_property
    def all_work_s(self) -> float:
        """All work divided by all ranks: with filling, what full bubbles would give."""
        work_s = self._work_s(1)[-1]
        if self.model.profile.encoders and not self.frozen_first:
            share = sum(self.sizes) / self.num_ranks
            work_s += self.num_ranks * self.model.encode_s(share, self.group_size)
        return work_s / self.num_ranks

    @cached_property
    def _start_s(self) -> tuple[float, ...]:
        """By layer: earliest time at which a microbatch can reach it."""
        return self.model.sums(0, self.sizes[-1]).forward

    @cached_property
    def _end_s(self) -> tuple[float, ...]:
        """By layer: shortest time from there back to the first layer."""
        return self.model.sums(0, self.sizes[-1]).backward

    def _work_s(self, replicas: int) -> tuple[float, ...]:
        """Running sums over layers of the busiest replica's work."""
        if replicas not in self._works:
            total = [0.0] * (self.model.num_layers() + 1)
            for size, count in Counter(self.sizes[::replicas]).items():
                sums = self.model.sums(0, size)
                for i, (f, b) in enumerate(zip(sums.forward, sums.backward, strict=True)):
                    total[i] += count * (f + b)
            self._works[replicas] = tuple(total)
        return self._works[replicas]

    def stage_s(self, first: int, stop: int, replicas: int, back_s: float = 0.0) -> float:
        """The bound that one stage sets for the whole step; `back_s` on links to the first layer."""
        work = self._work_s(replicas)
        group = replicas * self.num_pipelines
        sync_s = 0.0
        if group > 1:
            num_bytes = self.model.gradient_bytes(LayerRun(0, first, stop))
            cluster = self.model.cluster
            links = (cluster.all_reduce, cluster.all_reduce_between_hosts or cluster.all_reduce)
            sync_s = min(link.all_reduce_s(num_bytes, group) for link in links)
        tail_s = max(self._end_s[first] + back_s, sync_s)
        return self.frozen_s + self._start_s[first] + work[stop] - work[first] + tail_s

    def cuts_s(self, cuts: Sequence[Cut]) -> float:
        """The bound of a whole cut; counts the way over every link to a stage and back as well."""
        bound_s, link_s = self.all_work_s, 0.0
        cluster, size = self.model.cluster, self.sizes[-1]
        links = (cluster.p2p, cluster.p2p_between_hosts or cluster.p2p)
        work = self._work_s(1)
        for stage, (first, stop, replicas) in enumerate(cuts):
            if stage == self.num_ranks and self._interleaves:
                break  # The later stages of every rank are counted with its first one.
            # Until its first stage is reached a rank has nothing to do, nor after that stage's last backward.
            later = cuts[stage + self.num_ranks :: self.num_ranks] if self._interleaves else ()
            more_s = sum(work[b] - work[a] for a, b, _ in later)
            bound_s = max(bound_s, link_s + more_s + self.stage_s(first, stop, replicas, link_s))
            num_bytes = self.model.boundary_bytes(LayerRun(0, first, stop), size)
            link_s += min(link.seconds(num_bytes) for link in links)
        return bound_s

    @property
    def _interleaves(self) -> bool:
        return self.stages_per_rank > 1

    def fits(self, first: int, stop: int, replicas: int, later_ranks: int) -> bool:
        """Whether a stage fits into memory, with that many ranks of the pipeline after it."""
        limit = self.model.cluster.memory_bytes
        if limit is None:
            return True
        run, own = LayerRun(0, first, stop), -(-len(self.sizes) // replicas)
        alive = own if self.keeps_all else min(-(-later_ranks // replicas) + 1, own)
        kept = alive * self.model.activation_bytes(run, self.sizes[0])
        return self.model.frozen_bytes + self.model.resident_bytes(run) + kept <= limit

    def cuts_within(self, limit_s: float, replicas: Sequence[int]) -> tuple[Cut, ...] | None:
        """Cuts whose stages are bound by at most `limit_s` and fit into memory; None if there are none.

        Args:
            limit_s: Seconds.
            replicas: Ranks of every stage.
        """
        num_layers, later_ranks = self.model.num_layers(), sum(replicas)
        first, cuts = 0, []
        for stage, r in enumerate(replicas):
            later_ranks -= r
            last = num_layers - (len(replicas) - stage - 1)
            stop = self._furthest(first, last, r, later_ranks, limit_s)
            if stop == first:
                return None
            cuts.append((first, stop, r))
            first = stop
        return tuple(cuts) if first == num_layers else None

    def _furthest(self, first: int, last: int, r: int, later_ranks: int, limit_s: float) -> int:
        """The furthest `stop <= last` of a stage that starts at `first`; `first` if there is none."""
        low, high = first, last
        while low < high:
            stop = (low + high + 1) // 2
            good = self.stage_s(first, stop, r) <= limit_s
            if good and self.fits(first, stop, r, later_ranks):
                low = stop
            else:
                high = stop - 1
        return low

    def best_cuts(
        self, replicas: Sequence[int], limit_s: float = math.inf, precision: float = 1e-3
    ) -> tuple[float, tuple[Cut, ...]] | None:
        """The cuts with the smallest bound, links aside.

        Args:
            replicas: Ranks of every stage.
            limit_s: Give up if no cut has a bound of at most this.
            precision: Relative error of the bound.

        Returns:
            A lower bound on the step, for any cuts with these replicas, and cuts that meet it within
            `precision`; None if there are none within `limit_s` or memory.
        """
        if self.all_work_s > limit_s or (cuts := self.cuts_within(limit_s, replicas)) is None:
            return None
        low, high = self.frozen_s, max(self.stage_s(*cut) for cut in cuts)
        while high - low > precision * high:
            middle = (low + high) / 2
            better = self.cuts_within(middle, replicas)
            if better is None:
                low = middle
            else:
                cuts, high = better, min(middle, max(self.stage_s(*cut) for cut in better))
        return low, cuts
