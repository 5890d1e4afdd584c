"""How fast can a pipeline be at best? Lower bounds that prune the search, and the cuts that meet them.

Take one stage: layers `first` to `stop` on `r` ranks. Nothing reaches it until the earlier layers
have forwarded a microbatch; then its busiest rank has `M / r` microbatches to work off; then the last
gradient must go back through the earlier layers, or its own gradients must be summed. So

    step >= frozen + F(0, first) + work(first, stop) + max(B(0, first), sync(first, stop))

holds for every schedule of one backbone with whole backwards, however the other layers are cut. The
bound of a stage grows with `stop` and falls with `first`. Hence a cut that meets a given time is found
greedily: let every stage reach as far as it can, if only so far as the stage before it.

Of a whole cut more is known. The first gradient reaches a stage when a microbatch has been through all
stages after it and back. If its rank has forwarded all that its warm-up lets it before, it waits:

    step >= the above + max(0, F(first, L) + B(stop, L) - warm-up forwards)

Messages make a stage's need of memory go up and down with where it is cut: a U-Net's boundaries differ tenfold. So
cuts that fit are not found by letting every stage reach as far as it can, as fast ones are; of all ways to cut, the
best is chosen stage by stage, from what each stage needs wherever it begins and ends (`StageNeeds`).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import NamedTuple

from lightning_diffpipe.planning.cluster import Link
from lightning_diffpipe.planning.cost import CostModel, LayerRun
from lightning_diffpipe.planning.evaluation import Frame
from lightning_diffpipe.planning.filling import BATCHES_AHEAD, EncodePart
from lightning_diffpipe.planning.memory import Waiting, boundary_samples
from lightning_diffpipe.planning.partition import Cut, best_chain
from lightning_diffpipe.planning.schedule import Placement
from lightning_diffpipe.planning.schedules.one_f_one_b import forwards_ahead

_SLACK = 1e-9
"""Relative; keeps rounding from hiding a stage that just fits."""


@dataclass(frozen=True)
class Bounds:
    """Lower bounds for pipelines of a given size.

    Attributes:
        model: The cost model.
        sizes: Samples of each microbatch, larger ones first.
        num_ranks: Ranks of one pipeline.
        num_pipelines: Pipelines side by side.
        keeps_all: Whether the schedule keeps the activations of all microbatches, as GPipe does.
        group_size: Samples on which frozen layers run at a time; None for whole microbatches.
        frozen_first: Whether frozen work runs before the pipeline, rather than in its bubbles.
        placement: Where stages run, if ranks hold several.
        splits_backward: Whether weight gradients may be made after the gradient has been sent on, as
            zero-bubble schedules do: then the way back to the first layer bounds nothing.
        warmup_depth: Forwards of a rank before its first backward, for each rank after it.
    """

    model: CostModel
    sizes: tuple[int, ...]
    num_ranks: int
    num_pipelines: int = 1
    keeps_all: bool = False
    group_size: int | None = None
    frozen_first: bool = True
    placement: Placement | None = None
    splits_backward: bool = False
    warmup_depth: int = 1
    _works: dict[int, tuple[float, ...]] = field(default_factory=dict, repr=False, compare=False)
    _synced: dict[tuple[int, Link], tuple[float, ...]] = field(
        default_factory=dict, repr=False, compare=False
    )

    @cached_property
    def frozen_s(self) -> float:
        """Time of the frozen work before the pipeline."""
        if not self.model.profile.encoders or not self.frozen_first:
            return 0.0
        busy = [0.0] * self.num_ranks
        for part in self._parts:
            busy[part.rank] += self.model.encode_s(part.num_samples, self.group_size)
        return max(busy)

    @cached_property
    def _parts(self) -> tuple[EncodePart, ...]:
        """The frozen work as ranks share it."""
        return self.model.encode_parts(self.sizes, self.num_ranks, self.group_size)

    @cached_property
    def all_work_s(self) -> float:
        """All work divided by all ranks: with filling, what full bubbles would give."""
        work_s = self._work_s(1)[-1]
        if self.model.profile.encoders and not self.frozen_first:
            share = sum(self.sizes) / self.num_ranks
            group = self.group_size or self.sizes[0]
            work_s += self.num_ranks * self.model.encode_s(share, group)
        return work_s / self.num_ranks

    @cached_property
    def _start_s(self) -> tuple[float, ...]:
        """By layer: earliest time at which a microbatch can reach it."""
        return self.model.sums(0, self.sizes[-1]).forward

    @cached_property
    def _end_s(self) -> tuple[float, ...]:
        """By layer: shortest time from there back to the first layer."""
        if self.splits_backward or self.model.is_folded:
            return (0.0,) * (self.model.num_layers() + 1)
        return self.model.sums(0, self.sizes[-1]).backward

    def _work_s(self, replicas: int) -> tuple[float, ...]:
        """Running sums over layers of the busiest replica's work."""
        if replicas not in self._works:
            self._works[replicas] = self.model.work_s(0, self.sizes[::replicas])
        return self._works[replicas]

    def stage_s(self, first: int, stop: int, replicas: int, back_s: float = 0.0) -> float:
        """The bound that one stage sets for the whole step; `back_s` on links to the first layer."""
        work = self._work_s(replicas)
        group = replicas * self.num_pipelines
        sync_s = 0.0
        if group > 1:
            num_bytes = self._gradient_bytes[stop] - self._gradient_bytes[first]
            sync_s = min(link.all_reduce_s(num_bytes, group) for link in self._reduce_links)
        tail_s = max(self._end_s[first] + back_s * (not self.splits_backward), sync_s)
        return self.frozen_s + self._start_s[first] + work[stop] - work[first] + tail_s

    def cuts_s(self, cuts: Sequence[Cut]) -> float:
        """The bound of a whole cut; counts the way over every link to a stage and back as well."""
        bound_s, link_s = self.all_work_s, 0.0
        work = self._work_s(1)
        if len(self.model.starts) > 1:
            assert self.placement is not None, "chains that run apart have a stage on every rank"
            ranks = [self.placement.stages_of(rank) for rank in range(self.num_ranks)]
            busiest = max(sum(work[cuts[s][1]] - work[cuts[s][0]] for s in its) for its in ranks)
            return max(bound_s, self.frozen_s + busiest)
        for stage, (first, stop, replicas) in enumerate(cuts):
            more_s = 0.0
            if self.placement:
                (rank,) = self.placement.stage_ranks[stage]
                its_first, *later = self.placement.stages_of(rank)
                if stage != its_first:
                    continue  # The later stages of every rank are counted with its first one.
                # Until that is reached a rank has nothing to do, nor after that stage's last backward.
                more_s = sum(work[cuts[s][1]] - work[cuts[s][0]] for s in later)
            bound_s = max(bound_s, link_s + more_s + self.stage_s(first, stop, replicas, link_s))
            link_s += self._link_s(first, stop)
        return bound_s

    def pipeline_s(self, cuts: Sequence[Cut]) -> float:
        """The bound of a whole cut with the wait for the first gradient; leaves frozen work in bubbles out."""
        if self.placement or self.model.is_folded:
            return self.cuts_s(cuts)
        links_s = [self._link_s(first, stop) for first, stop, _ in cuts]
        bound_s, before_s, after_s = 0.0, 0.0, sum(links_s)
        largest_s = self.model.sums(0, self.sizes[0]).forward
        later_ranks = sum(replicas for _, _, replicas in cuts)
        for (first, stop, replicas), link_s in zip(cuts, links_s, strict=True):
            later_ranks -= replicas
            own_s = before_s + self.stage_s(first, stop, replicas, before_s)
            back_s = 2 * after_s + self._start_s[-1] - self._start_s[first]
            back_s += self._end_s[-1] - self._end_s[stop]
            own = -(-len(self.sizes) // replicas)
            warmup = forwards_ahead(replicas, later_ranks, self.warmup_depth)
            ahead = own if self.keeps_all else min(warmup + 1, own)  # before its first backward
            ahead_s = ahead * (largest_s[stop] - largest_s[first])
            bound_s = max(bound_s, own_s + max(0.0, back_s - ahead_s))
            before_s, after_s = before_s + link_s, after_s - link_s
        return bound_s

    def _link_s(self, first: int, stop: int) -> float:
        """Time, at least, of a message over the cut after these layers; nothing after the last."""
        if stop == self.model.num_layers() or (
            self.placement and self.model.profile.backbones[0].skips
        ):
            return 0.0  # skips may stay where they are
        cluster = self.model.cluster
        num_bytes = self.model.boundary_bytes(LayerRun(0, first, stop), self.sizes[-1])
        links = (cluster.p2p, cluster.p2p_between_hosts or cluster.p2p)
        return min(link.seconds(num_bytes) for link in links)

    def fits(self, first: int, stop: int, replicas: int, later_ranks: int) -> bool:
        """Whether a stage fits into memory, with that many ranks of the pipeline after it."""
        limit = self.model.cluster.memory_bytes
        if limit is None:
            return True
        run = LayerRun(0, first, stop)
        alive = self.alive_sizes(replicas, later_ranks)
        kept = self.model.activation_bytes(run, sum(alive), len(alive))
        kept += self.model.resident_bytes(run) + self._encoding_bytes(run, replicas)
        return self.model.frozen_bytes + kept <= limit

    def alive_sizes(self, replicas: int, later_ranks: int) -> tuple[int, ...]:
        """Samples of the microbatches whose activations the first replica of a stage keeps at least, at a time."""
        own = self.sizes[::replicas]
        return own if self.keeps_all else own[: forwards_ahead(replicas, later_ranks) + 1]

    def _encoding_bytes(self, run: LayerRun, replicas: int) -> float:
        """Encodings that are held with activations, at least."""
        if not self.model.profile.encoders:
            return 0.0
        if self.num_ranks == 1:
            return self.sizes[0] * self.model.read_bytes_per_sample(run)
        read = sum(self.sizes[::replicas]) * self.model.read_bytes_per_sample(run)
        return read if self.frozen_first else read + self._made_bytes

    @cached_property
    def _made_bytes(self) -> float:
        """With filling: what every rank has made for coming batches, and works on, at least."""
        made = [0] * self.num_ranks
        for rank, microbatch in {(part.rank, part.microbatch) for part in self._parts}:
            made[rank] += self.sizes[microbatch]
        group = min(self.group_size or self.sizes[0], self.sizes[0])
        working = group * self.model.working_bytes_per_sample
        return BATCHES_AHEAD * min(made) * self.model.encoding_bytes_per_sample + working

    @cached_property
    def _gradient_bytes(self) -> tuple[int, ...]:
        """Running sums over layers."""
        return self.model.gradient_sums(0)

    @cached_property
    def _reduce_links(self) -> tuple[Link, ...]:
        """The links over which gradients may be summed."""
        cluster = self.model.cluster
        return (cluster.all_reduce, cluster.all_reduce_between_hosts or cluster.all_reduce)

    def cuts_within(self, limit_s: float, replicas: Sequence[int]) -> tuple[Cut, ...] | None:
        """Cuts whose stages are bound by at most `limit_s` and fit into memory; None only if there are none.

        Messages are not counted as memory. Where a layer is too much for one stage and not for a later one, the
        cuts are a start only, and may be above the limits.

        Args:
            limit_s: Seconds.
            replicas: Ranks of every stage.
        """
        num_layers, later_ranks = self.model.num_layers(), sum(replicas)
        first, stops = 0, []
        for stage, r in enumerate(replicas):
            later_ranks -= r
            last = num_layers - (len(replicas) - stage - 1)
            first = self._furthest(first, last, r, later_ranks, limit_s)
            if first <= stage:
                return None
            stops.append(first)
        if first < num_layers:
            return None
        for stage in reversed(
            range(len(stops) - 1)
        ):  # Stages that hold nothing take a layer from those before.
            stops[stage] = min(stops[stage], stops[stage + 1] - 1)
        return tuple(zip((0, *stops), stops, replicas, strict=False))

    def _furthest(self, first: int, last: int, r: int, later_ranks: int, limit_s: float) -> int:
        """The furthest `stop <= last` of a stage that starts at `first`; `first` if there is none."""
        stop = min(last, self.reach(first, r, later_ranks, limit_s))
        while stop > first and not (
            self.stage_s(first, stop, r) <= limit_s and self.fits(first, stop, r, later_ranks)
        ):
            stop -= 1
        return max(stop, first)

    def reach(self, first: int, r: int, later_ranks: int, limit_s: float) -> int:
        """No stage that starts at `first` reaches further; looked up in running sums, with a little slack."""
        stop = self._furthest_in_time(first, r, limit_s + _SLACK * abs(limit_s))
        if self.model.cluster.memory_bytes is not None:
            stop = min(stop, self._furthest_in_memory(first, r, later_ranks))
        return stop

    def _furthest_in_time(self, first: int, r: int, limit_s: float) -> int:
        work = self._work_s(r)
        left_s = limit_s - self.frozen_s - self._start_s[first] + work[first]
        stop = bisect_right(work, left_s - self._end_s[first]) - 1
        group = r * self.num_pipelines
        if group == 1:
            return stop
        summed = self._gradient_bytes
        synced = bisect_right(summed, summed[first]) - 1  # layers without gradients
        for link in self._reduce_links:
            latency_s, byte_s = _linear(link, group)
            until = bisect_right(
                self._synced_s(r, link), left_s - latency_s + byte_s * summed[first]
            )
            synced = max(synced, until - 1)
        return min(stop, synced)

    def _synced_s(self, r: int, link: Link) -> tuple[float, ...]:
        """Running sums over layers of work and of summing gradients over one link."""
        if (r, link) not in self._synced:
            _, byte_s = _linear(link, r * self.num_pipelines)
            pairs = zip(self._work_s(r), self._gradient_bytes, strict=True)
            self._synced[r, link] = tuple(w + byte_s * g for w, g in pairs)
        return self._synced[r, link]

    def _furthest_in_memory(self, first: int, r: int, later_ranks: int) -> int:
        limit = self.model.cluster.memory_bytes
        assert limit is not None
        alive = self.alive_sizes(r, later_ranks)
        needs = self.model.need_bytes(0, sum(alive), len(alive))
        left = limit - self.model.frozen_bytes + needs[first]
        return bisect_right(needs, left * (1 + _SLACK)) - 1

    def best_cuts(
        self, replicas: Sequence[int], limit_s: float = math.inf, precision: float = 1e-3
    ) -> tuple[float, tuple[Cut, ...]] | None:
        """The cuts with the smallest bound, without links.

        Args:
            replicas: Ranks of every stage.
            limit_s: Give up if no cut has a bound of at most this.
            precision: Relative error of the bound.

        Returns:
            A lower bound on the step, for any cuts with these replicas, and cuts that meet it within
            `precision`, or come close (see `cuts_within`); None if there are none within `limit_s` or memory.
        """
        if self.all_work_s > limit_s or (cuts := self.cuts_within(limit_s, replicas)) is None:
            return None
        cuts_s = max(self.stage_s(*cut) for cut in cuts)
        low, high = self.frozen_s, min(limit_s, cuts_s)
        while high - low > precision * high:
            middle = (low + high) / 2
            better = self.cuts_within(middle, replicas)
            if better is None:
                low = middle
            else:
                better_s = max(self.stage_s(*cut) for cut in better)
                high = min(middle, better_s)
                cuts, cuts_s = (better, better_s) if better_s < cuts_s else (cuts, cuts_s)
        return low, cuts


def _linear(link: Link, num_ranks: int) -> tuple[float, float]:
    """Latency, and seconds for each byte, of an all-reduce."""
    latency_s = link.latency_s
    return latency_s, 2 * (num_ranks - 1) / num_ranks / link.bandwidth_bytes_per_s


class _Held(NamedTuple):
    """What one rank of a stage holds: activations, samples of encodings it reads, bytes of those it makes.

    Bytes of encodings are those with activations; and those made, and worked on, while there are none.
    """

    waiting: Waiting
    read: int
    beside: float
    made: float
    working: float


@dataclass(frozen=True)
class StageNeeds:
    """Bytes that stages of a chain need, one stage on each rank.

    Attributes:
        model: The cost model.
        replicas: Ranks of every stage.
        held: By stage: what its ranks hold, each kind once.
    """

    model: CostModel
    replicas: tuple[int, ...]
    held: tuple[tuple[_Held, ...], ...]
    _edges: dict[Waiting, tuple[list[float], list[float]]] = field(
        default_factory=dict, repr=False, compare=False
    )

    @classmethod
    def of(cls, model: CostModel, frame: Frame) -> StageNeeds:
        """From what does not depend on where a proposal cuts."""
        placement = frame.pipeline.placement
        held: list[tuple[_Held, ...]] = []
        for stage, ranks in enumerate(placement.stage_ranks):
            kinds = set()
            for rank in ranks:
                beside, alone = (0, 0.0), (0.0, 0.0)
                if frame.loads:
                    load = frame.loads[rank]
                    beside, alone = load.beside_bytes(model, stage), load.alone_bytes(model)
                kinds.add(_Held(frame.pipeline.peak(rank)[stage], *beside, *alone))
            held.append(tuple(kinds))
        return cls(model, tuple(map(len, placement.stage_ranks)), tuple(held))

    def need_bytes(self, stage: int, first: int, stops: range) -> list[float]:
        """What a stage from `first` to each of `stops` needs on its fullest rank.

        Of an exchange counts what is read here, not what is packed for others, which depends on all cuts.
        """
        rows = [self._need_bytes(held, first, stops) for held in self.held[stage]]
        return rows[0] if len(rows) == 1 else [max(column) for column in zip(*rows, strict=True)]

    def _need_bytes(self, held: _Held, first: int, stops: range) -> list[float]:
        kept, resident = self.model.need_bytes(0, *held.waiting), self.model.need_bytes(0, 0, 0)
        before, after = self._messages(held.waiting)
        fixed = self.model.frozen_bytes + held.beside + before[first] - kept[first]
        if not held.read and not held.made:
            return [fixed + kept[stop] + after[stop] for stop in stops]
        alone = self.model.frozen_bytes + held.made - resident[first]
        read = [held.read * self.model.read_bytes_per_sample(LayerRun(0, first, s)) for s in stops]
        return [
            max(
                fixed + kept[stop] + after[stop] + reads,
                alone + resident[stop] + max(held.working, 2 * reads),
            )
            for stop, reads in zip(stops, read, strict=True)
        ]

    def _messages(self, waiting: Waiting) -> tuple[list[float], list[float]]:
        """By layer: bytes of messages before a stage that begins there, and after one that ends there."""
        if waiting not in self._edges:
            before, after = boundary_samples(waiting)
            of = [self.model.boundary_bytes(LayerRun(0, 0, stop), 1) for stop in self._layers[1:]]
            sizes = [0.0, *of]
            self._edges[waiting] = (
                [before * size for size in sizes],
                [after * size for size in sizes],
            )
        return self._edges[waiting]

    @property
    def _layers(self) -> range:
        return range(self.model.num_layers() + 1)

    def fastest(self, bounds: Bounds, limit_s: float) -> tuple[Cut, ...] | None:
        """Of the cuts that fit into memory the one with the smallest bound; None if none is below `limit_s`.

        Args:
            bounds: Of the same shape.
            limit_s: Seconds.
        """
        limit = self.model.cluster.memory_bytes or math.inf
        later = self._later_ranks
        starts = self._earliest_starts(bounds, limit_s)

        def fitting(stage: int, first: int, stops: range) -> Iterator[tuple[int, float]]:
            r = self.replicas[stage]
            furthest = bounds.reach(first, r, later[stage], limit_s)
            earliest = max(stops.start, starts[stage + 1])
            stops = range(earliest, min(stops.stop, furthest + 1))
            for stop, need in zip(stops, self.need_bytes(stage, first, stops), strict=True):
                if round(need) <= limit:
                    yield stop, bounds.stage_s(first, stop, r)

        return self._cuts(best_chain(self.model.num_layers(), len(self.replicas), fitting, limit_s))

    def _earliest_starts(self, bounds: Bounds, limit_s: float) -> list[int]:
        """By stage: the first layer at which it may begin, if stages from there on shall reach the last layer."""
        num_layers = self.model.num_layers()
        starts = [num_layers]
        for r, later in zip(reversed(self.replicas), reversed(self._later_ranks), strict=True):
            reach = partial(bounds.reach, r=r, later_ranks=later, limit_s=limit_s)
            starts.append(bisect_left(range(num_layers), starts[-1], key=reach))
        return starts[::-1]

    @property
    def _later_ranks(self) -> list[int]:
        """By stage: ranks of the stages after it."""
        return [sum(self.replicas[stage + 1 :]) for stage in range(len(self.replicas))]

    def smallest(self, below_bytes: float = math.inf) -> tuple[Cut, ...] | None:
        """The cut whose fullest rank needs least; None if all need `below_bytes` or more."""

        def needed(stage: int, first: int, stops: range) -> Iterator[tuple[int, float]]:
            kept = self.model.need_bytes(0, *self.held[stage][0].waiting)
            most = below_bytes - self.model.frozen_bytes + kept[first]
            stops = range(stops.start, min(stops.stop, bisect_right(kept, most)))
            return zip(stops, self.need_bytes(stage, first, stops), strict=True)

        num_layers = self.model.num_layers()
        return self._cuts(best_chain(num_layers, len(self.replicas), needed, below_bytes))

    def _cuts(self, edges: Sequence[int] | None) -> tuple[Cut, ...] | None:
        if edges is None:
            return None
        return tuple(zip(edges, edges[1:], self.replicas, strict=False))
