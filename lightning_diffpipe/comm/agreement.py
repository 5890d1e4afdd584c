"""Decisions of all ranks of a run between two steps: yes or no, whether to stop, whether to validate.

The answer travels along a tree, on the host, and comes from rank 0:

    rank 0 ─┬─ 1                    first ranks of pipelines answer to rank 0,
            ├─ 2                    all others to the first rank of their pipeline
            └─ 4 ─┬─ 5
                  └─ 6

Every rank waits for the answer from above, and none for requests from below: they are read in the next round, when
they have long arrived. So a rank that is still busy with the step before delays none that has work to do.

Between steps ranks may be busy for long, saving or sampling. Rank 0, which does most of that, is waited for as
patiently as for weights here; another is missed in the step, after `timeout_s`. One that is gone is missed at once.
"""

import datetime
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_diffpipe.comm.mesh import Mesh

_TAG = 3_666_666


_Neighbour = tuple[int, dist.ProcessGroup | None]
"""A rank of the world one step up or down the tree, and where to talk to it."""


class _Vote(NamedTuple):
    """A yes or no, on its way to or from a rank."""

    peer: int
    value: Tensor
    work: dist.Work


class Agreement:
    """Lets all ranks of the world decide together; every rank must make the same calls."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        layout = mesh.layout
        self._above: _Neighbour | None = None
        self._below: list[_Neighbour] = []
        if mesh.local_rank:
            self._above = mesh.world_rank(0), mesh.transfers
        else:
            firsts = range(0, layout.world_size, layout.ranks_per_pipeline)
            if mesh.pipeline:
                self._above = firsts[0], mesh.data_parallel
            else:
                self._below = [(first, mesh.data_parallel) for first in firsts[1:]]
            self._below += [(rank, mesh.transfers) for rank in mesh.pipeline_ranks[1:]]
        self._asked = False
        self._requests: list[_Vote] = []  # of the latest round, from below
        self._sent: list[_Vote] = []  # until sent, as gloo sends when the other end receives

    def of_any(self, request: bool, last: bool = False) -> bool:
        """Returns whether any rank asks for it; a request takes a round for each step up the tree.

        Args:
            request: This rank's.
            last: Wait for the requests of this round, too, and leave nothing under way.

        Raises:
            PipelineTimeoutError: A neighbour in the tree is gone, or silent for too long.
        """
        self._await_all(self._sent)
        self._read(request)
        self._requests = [self._start(dist.irecv, neighbour) for neighbour in self._below]
        if last:
            self._read(request)
        if self._above is not None:
            self._sent.append(self._start(dist.isend, self._above, self._asked))
        decision = self._pass_down(self._asked)
        if last or decision:  # who goes now may not come back
            self._await_all(self._sent)
        return decision

    def of_first(self, decision: bool) -> bool:
        """Returns what rank 0 has decided, whatever others would; raises PipelineTimeoutError as `of_any` does."""
        self._await_all(self._sent)
        return self._pass_down(decision)

    def _pass_down(self, decision: bool) -> bool:
        if self._above is not None:
            message = self._start(dist.irecv, self._above)
            self._await(message)
            decision = bool(message.value)
        self._sent += [self._start(dist.isend, neighbour, decision) for neighbour in self._below]
        return decision

    def _read(self, request: bool) -> None:
        values = [message.value for message in self._requests]
        self._await_all(self._requests)
        self._asked = self._asked or request or any(map(bool, values))

    def _start(
        self, operation: Callable[..., Any], neighbour: _Neighbour, value: bool = False
    ) -> _Vote:
        (rank, group), buffer = neighbour, torch.tensor([value], dtype=torch.uint8)
        with self._mesh.naming([rank]):
            return _Vote(rank, buffer, operation(buffer, rank, group=group, tag=_TAG))

    def _await_all(self, messages: list[_Vote]) -> None:
        while messages:
            self._await(messages.pop(0))

    def _await(self, message: _Vote) -> None:
        with self._mesh.naming([message.peer]):
            message.work.wait(datetime.timedelta(seconds=self._mesh.patience_s))
