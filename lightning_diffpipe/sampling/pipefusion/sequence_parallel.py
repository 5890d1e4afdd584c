"""Sequence parallelism: every rank has the whole model and a part of the tokens, and nothing is stale.

The exact method: what comes out is what one process computes, up to rounding. Every call of attention
communicates, so it wants fast links; in return it needs no warm-up steps and suits models of few steps.

    rank 0    tokens 0-3 ──┬─ attention ─┬─ rest of the block ──┬─ ...
    rank 1    tokens 4-7 ──┘             └─ rest of the block ──┘

It is a stage of PipeFusion by itself, with one patch: rows of the latents are split over ranks, and text tokens of
joint attention as well. At the end of a step the ranks share their rows of the prediction, and each steps the
scheduler on all rows, so that any scheduler will do.

Source:
    DeepSpeed Ulysses, Jacobs et al. (2023), https://arxiv.org/abs/2309.14509
    Ring attention, Liu et al. (2023), https://arxiv.org/abs/2310.01889
"""

from torch import nn

from lightning_diffpipe.comm.links import Links
from lightning_diffpipe.planning.schedules.pipefusion import PipeFusionPlan
from lightning_diffpipe.sampling.pipefusion.sampler import PipeFusion
from lightning_diffpipe.sampling.pipefusion.sequence_attention import SequenceMode, refuse_mode
from lightning_diffpipe.sampling.rehearsal import Predict, rehearse_sharing
from lightning_diffpipe.sampling.request import Request
from lightning_diffpipe.sampling.tracing.layout import Layout


class SequenceParallel(PipeFusion):
    """Samples with tokens split over ranks, exactly.

    Args:
        model: The transformer, whole on every rank.
        links: Between the ranks; one rank alone if None.
        mode: "ulysses" trades tokens for heads, "ring" passes keys and values round.
        axis: Axis of the latents to cut; rows, or packed tokens, if None.
        verify: Fill everything that must not be read with NaN, and compare the first step of the first request of
            a layout with what rank 0 computes alone (`sampling/rehearsal.py`).
    """

    steps_all_rows = True

    def __init__(
        self,
        model: nn.Module,
        links: Links | None = None,
        *,
        mode: SequenceMode = "ulysses",
        axis: int | None = None,
        verify: bool = True,
    ) -> None:
        refuse_mode(mode, "mode")
        super().__init__(model, sequence_links=links, sequence_mode=mode, axis=axis, verify=verify)

    def _runs_in_parts(self, plan: PipeFusionPlan) -> bool:
        return self.sequence_links.num_ranks > 1

    def _rehearse(self, request: Request, layout: Layout, predict: Predict) -> None:
        rehearse_sharing(self.sequence_links, request, layout, predict)

    def _refuse(self, layout: Layout, request: Request) -> None:
        layout.split_units(self.sequence_links.num_ranks, "the number of ranks")
