"""Frozen layers, run once per batch and shared by all ranks of a pipeline.

Encoders (VAE, text encoders, locked halves of a ControlNet) are needed by several stages but trained by
none. Every rank holds them all. The plan cuts the samples of a batch into *frozen parts*, one or more
for each rank; each rank runs the frozen layers for its own parts only, and an exchange brings every
result to the ranks whose stages read it:

    rank 0 | E0 X F0 F1 ...        E0: samples 0-3 of the batch
    rank 1 | E1 X  . F0 ...        E1: samples 4-7

So no sample is encoded twice, however many stages there are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_diffpipe.comm.packing import MessageLayout
from lightning_diffpipe.comm.transport import MessageKey, Parcel, PendingWork, Transport
from lightning_diffpipe.graph.frozen import FrozenView, PausedRun
from lightning_diffpipe.graph.layer import TensorKey, dense_stride
from lightning_diffpipe.graph.sample_groups import join_samples
from lightning_diffpipe.planning.filling import EncodePart
from lightning_diffpipe.planning.schedule import Placement
from lightning_diffpipe.runtime.stage import MicrobatchWork


class FrozenWork:
    """The frozen parts of one step.

    Args:
        parts: All parts of the batch, those of other ranks too.
        group_size: Samples on which a layer runs at a time; `None` for a microbatch at a time.
        works: The microbatches of the step.
        placement: Which rank runs which stage.
        local_rank: This rank's position in its pipeline.
        device: Where results live.

    Attributes:
        ran: Stamps between which this rank encoded in bubbles.
    """

    def __init__(
        self,
        parts: Sequence[EncodePart],
        group_size: int | None,
        works: Sequence[MicrobatchWork],
        placement: Placement,
        local_rank: int,
        device: torch.device,
    ) -> None:
        self._parts, self._group_size, self._works = tuple(parts), group_size, works
        self._placement, self._local_rank, self._device = placement, local_rank, device
        self.ran: list[tuple[Any, Any]] = []
        self._results: dict[int, dict[TensorKey, Tensor]] = {}
        self._arriving: list[tuple[EncodePart, int, MessageLayout, Tensor]] = []
        self._exchange: PendingWork | None = None

    @property
    def own_parts(self) -> list[EncodePart]:
        """The parts this rank encodes."""
        return [part for part in self._parts if part.rank == self._local_rank]

    @property
    def num_own_groups(self) -> int:
        """Groups of samples this rank encodes."""
        return sum(
            1 if self._group_size is None else math.ceil(part.num_samples / self._group_size)
            for part in self.own_parts
        )

    def encode(self, index: int) -> None:
        """Runs the frozen layers for one of this rank's parts."""
        view, work, samples = self._work_of(index)
        self.add_results(index, view.whole(work.call, work.seed, samples, self._group_size))

    def start(self, index: int) -> PausedRun:
        """Prepares the frozen layers for one of this rank's parts; runs nothing."""
        view, work, samples = self._work_of(index)
        return view.start(work.call, work.seed, samples, self._group_size)

    def _work_of(self, index: int) -> tuple[FrozenView, MicrobatchWork, tuple[int, int] | None]:
        part = self._parts[index]
        work = self._works[part.microbatch]
        view = work.partitioned.frozen_view
        assert view is not None, "a plan with frozen parts for a step without frozen layers"
        if self._group_size is None:  # layers that mix samples run on whole microbatches
            return view, work, None
        return view, work, (part.start, part.stop)

    def add_results(self, index: int, results: dict[TensorKey, Tensor]) -> None:
        """Takes the results of a part that was started."""
        self._results[index] = results

    def exchange(self, transport: Transport) -> PendingWork:
        """Starts to send this rank's results to the ranks that read them, and to receive the others'.

        All of this rank's parts are encoded. A second call returns the exchange under way.
        """
        if self._exchange is not None:
            return self._exchange
        sends, receives = [], []
        for part in self._parts:
            for stage, reader in self._readers(part):
                if part.rank == self._local_rank != reader:
                    rows = list(self._rows(part, stage).values())
                    message = self._layout(part, stage).pack(rows, self._device)
                    sends.append(Parcel(MessageKey("frozen", stage, part.index), message, reader))
                elif reader == self._local_rank != part.rank:
                    layout = self._layout(part, stage)
                    buffer = layout.empty(self._device)
                    receives.append(
                        Parcel(MessageKey("frozen", stage, part.index), buffer, part.rank)
                    )
                    self._arriving.append((part, stage, layout, buffer))
        self._exchange = transport.exchange(sends, receives)
        return self._exchange

    def deliver(self) -> None:
        """Joins the parts of each microbatch; called when the exchange has ended."""
        joined: dict[tuple[int, int], list[tuple[EncodePart, dict[TensorKey, Tensor]]]] = {}
        for part, stage, layout, buffer in self._arriving:
            tensors = dict(zip(self._keys(part, stage), layout.unpack(buffer), strict=True))
            joined.setdefault((part.microbatch, stage), []).append((part, tensors))
        for part in self._parts:
            for stage, reader in self._readers(part):
                if part.rank == self._local_rank == reader:
                    own = self._rows(part, stage)
                    joined.setdefault((part.microbatch, stage), []).append((part, own))
        for (microbatch, stage), pieces in joined.items():
            work = self._works[microbatch]
            pieces.sort(key=lambda piece: piece[0].start)
            own = [tensors for _, tensors in pieces]
            work.frozen[stage] = join_samples(work.partitioned.graph, own)
        self._arriving.clear()
        self._results.clear()
        self._exchange = None

    def _readers(self, part: EncodePart) -> list[tuple[int, int]]:
        """Returns (stage, position) of every stage that reads results of this part."""
        stages = self._works[part.microbatch].partitioned.cut.stages
        return [
            (stage.index, self._placement.rank_of(stage.index, part.microbatch))
            for stage in stages
            if stage.frozen_received
        ]

    def _keys(self, part: EncodePart, stage: int) -> tuple[TensorKey, ...]:
        return self._works[part.microbatch].partitioned.cut.stages[stage].frozen_received

    def _layout(self, part: EncodePart, stage: int) -> MessageLayout:
        graph, specs = self._works[part.microbatch].partitioned.graph, []
        for spec in map(graph.spec, self._keys(part, stage)):
            if spec.rows:
                shape = (spec.rows * part.num_samples, *spec.shape[1:])
                strided = torch.empty_strided(shape, spec.stride, device="meta")
                spec = replace(spec, shape=shape, stride=dense_stride(strided))
            specs.append(spec)
        return MessageLayout.of(specs)

    def _rows(self, part: EncodePart, stage: int) -> dict[TensorKey, Tensor]:
        """Returns this part's own rows of its results."""
        graph = self._works[part.microbatch].partitioned.graph
        own = {}
        for key in self._keys(part, stage):
            tensor, rows = self._results[part.index][key], graph.spec(key).rows
            if rows and tensor.shape[0] != rows * part.num_samples:
                tensor = tensor[rows * part.start : rows * part.stop]
            own[key] = tensor
        return own
