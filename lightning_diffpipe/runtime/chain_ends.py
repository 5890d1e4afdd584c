"""The loss of a step that trains several chains, put together behind the schedule.

Every chain ends with the code behind the last layer, on its own rank, and computes its gradients there; what other
chains give is NaN to it, and so are the loss and most of what is logged. So when all microbatches are through, what
the loss reads travels to the rank on which the last chain ends, and that code runs once more, without gradients, on
real values: the loss and all metrics are those of one process, to the last bit.

    rank 0 | ...  0B1  5B1  <- ends of chain A, then the loss of every microbatch     (chain B ends here)
    rank 2 | ...  3B1  2B1  -> ends of chain A                                        (chain A ends here)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_diffpipe.comm.packing import MessageLayout
from lightning_diffpipe.comm.transport import Exchange, MessageKey, Parcel, Transport
from lightning_diffpipe.graph.layer import TensorKey
from lightning_diffpipe.planning.schedule import Placement
from lightning_diffpipe.runtime.stage import MicrobatchWork, StageRunner


class ChainEnds:
    """Brings what the loss reads of all chains to one rank.

    Args:
        placement: Where the stages run.
        local_rank: This rank's position in its pipeline.
        device: Where messages live.
        runner: Runs the code behind the last layer.
    """

    def __init__(
        self, placement: Placement, local_rank: int, device: torch.device, runner: StageRunner
    ) -> None:
        self._placement, self._local_rank, self._device = placement, local_rank, device
        self._runner = runner
        firsts = placement.first_stages
        self._last_stages = tuple(placement.backbone_of(first)[-1] for first in firsts)
        self._reporter = placement.rank_of(self._last_stages[-1], 0)
        self._arriving: list[tuple[MicrobatchWork, int, MessageLayout, Tensor]] = []

    def gather(self, works: Sequence[MicrobatchWork], transport: Transport) -> Exchange | None:
        """Begins to send this rank's ends, or to receive those of others; `None` if there is one chain."""
        sends, receives = [], []
        for stage in self._last_stages if len(self._last_stages) > 1 else ():
            rank = self._placement.rank_of(stage, 0)
            if rank == self._reporter or self._local_rank not in (rank, self._reporter):
                continue
            for work in works:
                key, layout = MessageKey("end", stage, work.index), _layout(work, stage)
                if self._local_rank == rank:
                    tensors = list(work.ends.pop(stage).values())
                    sends.append(Parcel(key, layout.pack(tensors, self._device), self._reporter))
                else:
                    buffer = layout.empty(self._device)
                    receives.append(Parcel(key, buffer, rank))
                    self._arriving.append((work, stage, layout, buffer))
        return transport.exchange(sends, receives) if sends or receives else None

    def report(self, works: Sequence[MicrobatchWork]) -> None:
        """Computes loss and metrics of all microbatches where all ends are; called when they have arrived."""
        for work, stage, layout, buffer in self._arriving:
            work.ends[stage] = dict(zip(_keys(work, stage), layout.unpack(buffer), strict=True))
        self._arriving.clear()
        if len(self._last_stages) > 1 and self._local_rank == self._reporter:
            for work in works:
                self._runner.report(self._last_stages[-1], work)


def _keys(work: MicrobatchWork, stage: int) -> tuple[TensorKey, ...]:
    return work.partitioned.cut.stages[stage].sent


def _layout(work: MicrobatchWork, stage: int) -> MessageLayout:
    return MessageLayout.of([work.partitioned.graph.spec(key) for key in _keys(work, stage)])
