"""Sequence parallelism: every rank has the whole model and a part of the tokens, and nothing is stale.

The exact method: what comes out is what one process computes, up to rounding. Every call of attention
communicates, so it wants fast links; in return it needs no warm-up steps and suits models of few steps.

    rank 0    tokens 0-3 ──┬─ attention ─┬─ rest of the block ──┬─ ...
    rank 1    tokens 4-7 ──┘             └─ rest of the block ──┘

Rows of the latents are split over ranks, text tokens of joint attention as well. At the end of a step the
ranks share their rows of the prediction, and each steps the scheduler on all rows, so that any scheduler will
do.

Source:
    DeepSpeed Ulysses, Jacobs et al. (2023), https://arxiv.org/abs/2309.14509
    Ring attention, Liu et al. (2023), https://arxiv.org/abs/2310.01889
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_diffpipe.comm.links import Alone, Links
from lightning_diffpipe.graph.interception import Interception
from lightning_diffpipe.planning.instruction import ForwardNoGrad
from lightning_diffpipe.sampling.pipefusion.patch import PartRunner, Slices
from lightning_diffpipe.sampling.pipefusion.run import collect_rows, guided
from lightning_diffpipe.sampling.pipefusion.sequence_attention import (
    SEQUENCE_MODES,
    Mode,
    refuse_mode,
)
from lightning_diffpipe.sampling.pipefusion.stages import Stages
from lightning_diffpipe.sampling.rehearsal import rehearse_sharing
from lightning_diffpipe.sampling.request import Request
from lightning_diffpipe.sampling.statistics import SamplingStatistics, Stopwatch, measured
from lightning_diffpipe.sampling.tracing.layout import WHOLE, Layout, Part
from lightning_diffpipe.sampling.tracing.probe import MAX_LAYOUTS, LayoutStore


class SequenceParallel:
    """Samples with tokens split over ranks, exactly.

    Args:
        model: The transformer, whole on every rank.
        links: Between the ranks; one rank alone if None.
        mode: "ulysses" trades tokens for heads, "ring" passes keys and values round.
        axis: Axis of the latents to cut; rows, or packed tokens, if None.
        verify: Fill everything that must not be read with NaN, and compare the first step of the first request of
            a layout with what rank 0 computes alone (`sampling/rehearsal.py`).
    """

    def __init__(
        self,
        model: nn.Module,
        links: Links | None = None,
        *,
        mode: Mode = "ulysses",
        axis: int | None = None,
        verify: bool = True,
    ) -> None:
        refuse_mode(mode, "mode")
        self.model, self.links, self.mode, self.verify = model, links or Alone(), mode, verify
        self.statistics = SamplingStatistics()
        self.layout: Layout  # of the last request
        self.layouts = LayoutStore(axis)
        # On rank 0, which finds layouts; as many as it knows again.
        self._rehearsed: list[Layout] = []

    def prepare(self, request: Request) -> Layout:
        """Finds the layout; collective. Rank 0 probes, and broadcasts the layout.

        Raises:
            ConfigurationError: There are more ranks than rows, or than heads for Ulysses; on all ranks.
            LayoutError: The model cannot be sampled in parts; on all ranks.
        """

        def decide() -> Layout:
            layout = self.layouts.layout_for(request)
            layout.split_units(self.links.num_ranks, "the number of ranks")
            SEQUENCE_MODES[self.mode].refuse(layout, self.links.num_ranks)
            return layout

        self.layout = self.links.broadcast_object(decide)
        return self.layout

    def sample(self, request: Request, on_step: Callable[[int], None] | None = None) -> Tensor:
        """Runs one request; see `Sampler`."""
        with request.inferring():
            layout = self.prepare(request)
            self._rehearse_once(request, layout)
            with measured(self, request, self.links) as watch:
                return self.run(request, layout, watch, on_step)

    def _rehearse_once(self, request: Request, layout: Layout) -> None:
        if not self.verify or self.links.num_ranks == 1:
            return
        known = self._rehearsed
        if self.links.broadcast_object(lambda: all(each is not layout for each in known)):

            def predict(still: Request) -> Tensor:
                watch = Stopwatch(SamplingStatistics(), self.links.rank, request.latents.device)
                return self.run(still, layout, watch)

            rehearse_sharing(self, request, layout, predict)
            if self.links.rank == 0:
                self._rehearsed = [*self._rehearsed, layout][-MAX_LAYOUTS:]

    def _parts(self, layout: Layout) -> list[Part]:
        n = self.links.num_ranks
        units = layout.split_units(n, "the number of ranks")
        return [Part(units[k], text=(k, n)) for k in range(n)] if n > 1 else [WHOLE]

    def run(
        self,
        request: Request,
        layout: Layout,
        watch: Stopwatch,
        on_step: Callable[[int], None] | None = None,
    ) -> Tensor:
        """All steps of a request whose layout is known; see `sample`."""
        links, parts = self.links, self._parts(layout)
        interception = Interception(self.model)
        runner = PartRunner(
            layout,
            Stages.split(layout, ()).stages[0],
            interception,
            SEQUENCE_MODES[self.mode](links, lambda part: (WHOLE, parts), layout.ghost),
            request.latents.device,
            float("nan") if self.verify else 0.0,
        )
        loop, latents = request.loop(), request.latents
        predict: Callable[[], Tensor] = loop.predict
        if loop.mixes:
            predict = partial(loop.predict, complete=lambda _, x: self._whole(x, layout, parts))
        with interception.installed():
            for step in range(request.num_steps):
                runner.start_step()
                with watch.working(ForwardNoGrad(links.rank, step)):
                    run = runner.run(predict, parts[links.rank], _refuse, _refuse)
                    assert run.prediction is not None
                    prediction = guided(loop, run.prediction, layout, parts[links.rank].units)
                    if not loop.mixes:
                        prediction = self._whole(prediction, layout, parts)
                    latents = loop.step(prediction)
                watch.step_done()
                if on_step is not None:
                    on_step(step)
        links.finish()
        return latents

    def _whole(self, prediction: Tensor, layout: Layout, parts: list[Part]) -> Tensor:
        """A prediction with the rows of all ranks."""
        if len(parts) == 1:
            return prediction
        collect_rows(self.links, layout, prediction, parts, "prediction")
        return prediction


def _refuse(visit: int, *slices: Slices) -> Any:
    raise AssertionError("a rank with all blocks sends and receives nothing")
