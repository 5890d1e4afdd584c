"""Stages: the calls of blocks that each rank runs, and the results that cross between ranks.

Blocks are split into contiguous ranges, one for each rank. A call of the model visits the ranks in order; with
guidance by two calls per step, every step visits them twice:

    calls        0  1  2  3 | 4  5  6  7       two calls of a model of four blocks
    rank 0       x  x       | x  x
    rank 1             x  x |       x  x
    messages         1           5             rank 0 to rank 1, one in each visit

A message holds the results of all calls on earlier ranks which a later rank reads, long skips included: they
travel from rank to rank along the chain.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from lightning_diffpipe.clock import clock_for
from lightning_diffpipe.errors import LayoutError, PartitionError
from lightning_diffpipe.graph.calltree import Forward
from lightning_diffpipe.sampling.request import Request
from lightning_diffpipe.sampling.tracing.layout import Layout
from lightning_diffpipe.sampling.tracing.marks import calls_answered


@dataclass(frozen=True)
class DenoiserStage:
    """One rank's part in one call of `denoise`.

    Attributes:
        own: Calls it runs.
        incoming: For each visit, the calls whose results it receives.
        outgoing: For each visit, the calls whose results it sends on.
        ends: The last own call of each visit.
        visit_of: For each call of any rank, the visit it belongs to.
        is_last: Whether this rank computes the prediction.
    """

    own: frozenset[int]
    incoming: tuple[tuple[int, ...], ...]
    outgoing: tuple[tuple[int, ...], ...]
    ends: tuple[int, ...]
    visit_of: tuple[int, ...]
    is_last: bool


@dataclass(frozen=True)
class Stages:
    """All ranks' stages.

    Attributes:
        blocks: Names of the blocks of each rank.
    """

    blocks: tuple[tuple[str, ...], ...]
    stages: tuple[DenoiserStage, ...]

    @classmethod
    def split(cls, layout: Layout, positions: Sequence[int]) -> Stages:
        """Cuts the blocks before increasing positions: rank r starts at block `positions[r - 1]`.

        Raises:
            PartitionError: A rank would have no block.
            LayoutError: A result would have to travel backwards.
        """
        names = layout.block_names
        bounds = [0, *positions, len(names)]
        if any(a >= b for a, b in itertools.pairwise(bounds)):
            raise PartitionError(
                f"cannot cut {len(names)} blocks at {list(positions)}: every rank needs at least one; "
                f"choose increasing positions between 1 and {len(names) - 1}, or fewer ranks"
            )
        owners = tuple(tuple(names[a:b]) for a, b in itertools.pairwise(bounds))
        rank_of_name = {name: rank for rank, names in enumerate(owners) for name in names}
        rank_of = [rank_of_name[block.name] for block in layout.blocks]
        # A call of an earlier rank after one of a later rank begins another visit.
        begins = (after < before for before, after in itertools.pairwise(rank_of))
        visit_of = tuple(itertools.accumulate(begins, initial=0))
        for visit in range(visit_of[-1] + 1):
            ranks = {rank for rank, at in zip(rank_of, visit_of, strict=True) if at == visit}
            if len(ranks) < len(owners):
                raise PartitionError(
                    f"one call of the model uses blocks of ranks {sorted(ranks)} only, of {len(owners)}; its "
                    f"blocks are called as {[block.name for block in layout.blocks]}. Choose a split in which "
                    "every call of the model passes through all ranks"
                )
        # From each rank to the next one; nothing comes before rank 0 or goes beyond the last.
        crossing = [_crossing(layout, rank_of, visit_of, rank) for rank in range(-1, len(owners))]
        stages = []
        for rank in range(len(owners)):
            calls = [call for call, owner in enumerate(rank_of) if owner == rank]
            last_of = {visit_of[call]: call for call in calls}
            ends = tuple(last_of[visit] for visit in range(max(visit_of) + 1))
            flow, is_last = crossing[rank : rank + 2], rank == len(owners) - 1
            stages.append(DenoiserStage(frozenset(calls), *flow, ends, visit_of, is_last))
        return cls(owners, tuple(stages))


def resident_parameters(model: nn.Module, layout: Layout, stages: Stages, rank: int) -> set[str]:
    """Returns the names of parameters a rank reads: of its blocks, and of everything that is no block.

    All others may be placeholders.
    """
    foreign = tuple(
        f"{name}." for owner, names in enumerate(stages.blocks) for name in names if owner != rank
    )
    return {
        name
        for name, _ in model.named_parameters()
        if not name.startswith(foreign) or name in layout.glue_parameters
    }


def measured_costs(layout: Layout, request: Request, repeats: int = 2) -> list[float]:
    """Measures the seconds of each block in one call of `denoise`, in the order of `layout.block_names`.

    Of calls of one kind the first few run, and all get the median of these but for the first. The last block's cost
    includes the code after it, up to the prediction.
    """
    times: dict[int, list[float]] = {}
    results: dict[int, Any] = {}
    kinds = [block.kind for block in layout.blocks]
    tail_s, clock = list[float](), clock_for(request.latents.device)

    def now_s() -> float:
        clock.settle()
        return time.perf_counter()

    for _ in range(repeats + 1):
        position, end_s = iter(kinds), 0.0

        def timed(
            name: str, forward: Forward, args: Any, kwargs: Any, position: Any = position
        ) -> Any:
            nonlocal end_s
            kind = next(position)
            if len(seconds := times.setdefault(kind, [])) <= repeats:
                start_s = now_s()
                results[kind] = forward(*args, **kwargs)
                seconds.append(now_s() - start_s)
            out = pytree.tree_map_only(Tensor, torch.clone, results[kind])
            end_s = now_s()
            return out

        with request.inferring(), calls_answered(request.model, layout.block_names, timed):
            request.denoise(request.latents, request.timesteps[0])
        tail_s.append(now_s() - end_s)
    total = dict.fromkeys(layout.block_names, 0.0)
    for block in layout.blocks:
        total[block.name] += statistics.median(times[block.kind][1:] or times[block.kind])
    costs = list(total.values())
    costs[-1] += statistics.median(tail_s[1:])
    return costs


def _crossing(
    layout: Layout, rank_of: Sequence[int], visit_of: Sequence[int], rank: int
) -> tuple[tuple[int, ...], ...]:
    """Returns the calls whose results cross from `rank` to the rank after it, in each visit."""
    end = len(layout.blocks)
    visits: list[list[int]] = [[] for _ in range(max(visit_of) + 1)]
    for call, readers in enumerate(layout.readers):
        ranks = [max(rank_of) if reader == end else rank_of[reader] for reader in readers]
        if any(reader < rank_of[call] for reader in ranks):
            raise LayoutError(
                f"the result of {layout.blocks[call].name} is read by a block of an earlier rank; "
                "choose another split, or one rank"
            )
        if rank_of[call] <= rank < max(ranks, default=-1):
            visits[visit_of[call]].append(call)
    return tuple(map(tuple, visits))
