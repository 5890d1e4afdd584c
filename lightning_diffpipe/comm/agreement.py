"""Yes or no, decided for all ranks together between steps: whether to stop, whether to validate.

The word travels along a tree, on the host, and rank 0 has it:

    rank 0 ─┬─ 1                    first ranks of pipelines answer to rank 0,
            ├─ 2                    all others to the first rank of their pipeline
            └─ 4 ─┬─ 5
                  └─ 6

Everybody waits for the word from above, and nobody for wishes from below: they are heard in the next round, when
they have long arrived. So a rank that is still busy with the step before keeps none waiting that has work to do.

Between steps ranks may be busy for long, saving or drawing. Rank 0, which does most of that, is waited for here, as
patiently as for weights; another rank is missed in the step, after `timeout_s`. One that is gone is missed at once.
"""

from __future__ import annotations

import datetime
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_diffpipe.comm.mesh import Mesh

_TAG = 3_666_666


class _Neighbour(NamedTuple):
    """A rank of the world one step up or down the tree, and where to talk to it."""

    rank: int
    group: dist.ProcessGroup | None


class _Message(NamedTuple):
    peer: int
    word: Tensor
    work: dist.Work | None


class Agreement:
    """Lets all ranks of the world decide alike; every rank must make the same calls.

    Args:
        mesh: This rank's groups.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._above, self._below = _neighbours(mesh)
        self._asked = False
        self._wishes: list[_Message] = []  # of the latest round, from below
        self._sent: list[_Message] = []  # kept, as gloo sends when the other end receives

    def of_any(self, wish: bool, last: bool = False) -> bool:
        """Whether any rank has wished for it; a wish takes a round for each step up the tree.

        Args:
            wish: This rank's.
            last: Wait for the wishes of this round, too, and leave nothing under way.

        Raises:
            PipelineTimeoutError: A neighbour in the tree is gone, or silent for too long.
        """
        self._await_all(self._sent)
        self._hear(wish)
        self._wishes = [self._receive(neighbour) for neighbour in self._below]
        if last:
            self._hear(wish)
        if self._above is not None:
            self._send(self._above, self._asked)
        decision = self._pass_down(self._asked)
        if last or decision:  # who goes now may not come back
            self._await_all(self._sent)
        return decision

    def of_first(self, decision: bool) -> bool:
        """What rank 0 has decided, whatever others would.

        Raises:
            PipelineTimeoutError: As `of_any`.
        """
        self._await_all(self._sent)
        return self._pass_down(decision)

    def _pass_down(self, decision: bool) -> bool:
        if self._above is not None:
            message = self._receive(self._above)
            self._await(message)
            decision = bool(message.word)
        for neighbour in self._below:
            self._send(neighbour, decision)
        return decision

    def _hear(self, wish: bool) -> None:
        words = [message.word for message in self._wishes]
        self._await_all(self._wishes)
        self._asked = self._asked or wish or any(map(bool, words))

    def _send(self, neighbour: _Neighbour, word: bool) -> None:
        buffer = torch.tensor([word], dtype=torch.uint8)
        with self._mesh.naming([neighbour.rank]):
            work = dist.isend(buffer, neighbour.rank, group=neighbour.group, tag=_TAG)
        self._sent.append(_Message(neighbour.rank, buffer, work))

    def _receive(self, neighbour: _Neighbour) -> _Message:
        buffer = torch.zeros(1, dtype=torch.uint8)
        with self._mesh.naming([neighbour.rank]):
            work = dist.irecv(buffer, neighbour.rank, group=neighbour.group, tag=_TAG)
        return _Message(neighbour.rank, buffer, work)

    def _await_all(self, messages: list[_Message]) -> None:
        while messages:
            self._await(messages.pop(0))

    def _await(self, message: _Message) -> None:
        assert message.work is not None
        with self._mesh.naming([message.peer]):
            message.work.wait(datetime.timedelta(seconds=self._mesh.patience_s))


def _neighbours(mesh: Mesh) -> tuple[_Neighbour | None, list[_Neighbour]]:
    """Whom this rank answers to, and who answers to it."""
    if mesh.local_rank:
        return _Neighbour(mesh.world_rank(0), mesh.transfers), []
    layout = mesh.layout
    below = [
        _Neighbour(mesh.world_rank(local), mesh.transfers)
        for local in range(1, layout.ranks_per_pipeline)
    ]
    firsts = [layout.pipeline_ranks(pipeline)[0] for pipeline in range(layout.num_pipelines)]
    if mesh.pipeline:
        return _Neighbour(firsts[0], mesh.data_parallel), below
    return None, [_Neighbour(first, mesh.data_parallel) for first in firsts[1:]] + below
