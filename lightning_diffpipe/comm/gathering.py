"""What the ranks of a pipeline noted about a step, brought together on its first rank.

Every rank has a clock of its own. How far it is ahead is estimated by a few messages there and back: the
answer carries the peer's time, which is taken to lie half-way between departure and arrival of the
quickest round, so that the error is at most half of that round.

    first rank   t0 ------------.                 .------------> t1
    peer                         '--> t (its) ---'               ahead by t - (t0 + t1) / 2
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from lightning_diffpipe.comm.mesh import Mesh
from lightning_diffpipe.planning.timeline import Span

_TAG = 3_888_888
_ROUNDS = 6


def gather_spans(
    mesh: Mesh, spans: Sequence[Span], clock: Callable[[], float] = time.perf_counter
) -> tuple[list[list[Span]], list[float]] | None:
    """Brings the spans of all ranks of a pipeline to its first rank; a collective call.

    Args:
        mesh: This rank's groups.
        spans: What this rank noted.
        clock: The clock that stamped the spans.

    Returns:
        On the first rank of the pipeline, by position: the spans, and by how many seconds the clock is
        ahead of the first rank's. None elsewhere.

    Raises:
        PipelineTimeoutError: A rank is gone, or did not come in half an hour.
    """
    if mesh.layout.ranks_per_pipeline == 1:
        return [list(spans)], [0.0]
    with mesh.naming(mesh.pipeline_ranks):
        offsets_s = clock_offsets_s(mesh, clock)
        found = mesh.on_first(list(spans))
    return (found, offsets_s) if found else None


def clock_offsets_s(mesh: Mesh, clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """Returns seconds by which each rank's clock is ahead of the first rank's; a collective call.

    Returns:
        By position on the first rank of the pipeline; empty elsewhere.
    """
    buffer, group = torch.zeros(1, dtype=torch.float64), mesh.transfers
    first, *others = mesh.pipeline_ranks
    if mesh.local_rank:
        for _ in range(_ROUNDS):
            dist.recv(buffer, first, group=group, tag=_TAG)
            dist.send(buffer.fill_(clock()), first, group=group, tag=_TAG)
        return []
    offsets_s = [0.0]
    for peer in others:
        rounds = []
        for _ in range(_ROUNDS):
            start_s = clock()
            dist.send(buffer, peer, group=group, tag=_TAG)
            dist.recv(buffer, peer, group=group, tag=_TAG)
            stop_s = clock()
            rounds.append((stop_s - start_s, float(buffer) - (start_s + stop_s) / 2))
        offsets_s.append(min(rounds)[1])
    return offsets_s
