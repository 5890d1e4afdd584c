"""Decisions of all ranks of a run between two steps: yes or no, whether to stop, whether to validate.

Every rank sends rank 0 its request, and waits for the answer:

    rank 1   request k  --.      .--> answer k          the answer has all requests of round k - 1,
    rank 2   request k  --+-- 0 -+--> answer k          and rank 0's of round k
    rank 3   request k  --'      '--> answer k

Rank 0 waits for no request: they are read in the next round, when they have long arrived. So a rank that is still
busy with the step before delays none that has work to do.

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


class _Vote(NamedTuple):
    """A yes or no, on its way to or from a rank."""

    peer: int
    value: Tensor
    work: dist.Work


class Agreement:
    """Lets all ranks of the world decide together; every rank must make the same calls."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        # Of rank 0 only.
        self._others = [] if mesh.rank else list(range(1, mesh.layout.world_size))
        self._asked = False
        self._requests: list[_Vote] = []  # of the latest round
        self._sent: list[_Vote] = []  # until sent, as gloo sends when the other end receives

    def of_any(self, request: bool, last: bool = False) -> bool:
        """Returns whether any rank asks for it; the request of another rank than 0 counts in the next round.

        Args:
            request: This rank's.
            last: Wait for the requests of this round, too, and leave nothing under way.

        Raises:
            PipelineTimeoutError: A rank is gone, or silent for too long.
        """
        self._await_all(self._sent)
        self._read(request)
        self._requests = [self._start(dist.irecv, peer) for peer in self._others]
        if last:
            self._read(request)
        if self._mesh.rank:
            self._sent.append(self._start(dist.isend, 0, self._asked))
        decision = self._answer(self._asked)
        if last or decision:  # who goes now may not come back
            self._await_all(self._sent)
        return decision

    def of_first(self, decision: bool) -> bool:
        """Returns the decision of rank 0, whatever that of others; raises PipelineTimeoutError as `of_any` does."""
        self._await_all(self._sent)
        return self._answer(decision)

    def _answer(self, decision: bool) -> bool:
        if self._mesh.rank:
            answer = self._start(dist.irecv, 0)
            self._await_all([answer])
            return bool(answer.value)
        self._sent += [self._start(dist.isend, peer, decision) for peer in self._others]
        return decision

    def _read(self, request: bool) -> None:
        values = [vote.value for vote in self._requests]
        self._await_all(self._requests)
        self._asked = self._asked or request or any(map(bool, values))

    def _start(self, operation: Callable[..., Any], peer: int, value: bool = False) -> _Vote:
        buffer = torch.tensor([value], dtype=torch.uint8)
        with self._mesh.naming([peer]):
            work = operation(buffer, peer, group=self._mesh.world, tag=_TAG)
        return _Vote(peer, buffer, work)

    def _await_all(self, votes: list[_Vote]) -> None:
        while votes:
            vote = votes.pop(0)
            with self._mesh.naming([vote.peer]):
                vote.work.wait(datetime.timedelta(seconds=self._mesh.patience_s))
