"""PipeFusion: blocks are split over ranks, patches of the latents flow through them.

Each rank holds a contiguous range of blocks. The patches of one denoising step follow each other through the
ranks, and the patches of the next step follow those: patch m of step i + 1 may start as soon as patch m of step i
has come out, because everything else it attends to is taken from caches that are at most one step old.

    rank 0 | P0 --  .  . P1 P2 P3 P4 P5 P6  .      one synchronous step, three steps of two patches;
    rank 1 |  .  . P0 --  . P1 P2 P3 P4 P5 P6      all tokens take twice as long as a patch

The last rank steps the scheduler, patch by patch, and sends the rows back to the first. Text tokens are computed
once per step, together with one patch. What comes out depends on the number of patches and on the synchronous
steps, never on the number of ranks: one rank alone is the emulator.

Sequence parallelism is a stage of PipeFusion by itself, with one patch: every rank has the whole model and a part
of the tokens, those of the text included, and nothing is stale. Every call of attention communicates, so it needs
fast links; in return it is exact, has no warm-up and suits models of few steps. At the end of a step ranks share
their rows of the prediction, and each steps the scheduler on all rows, so that any scheduler will do.

    rank 0    tokens 0-3 ──┬─ attention ─┬─ rest of the block ──┬─ ...
    rank 1    tokens 4-7 ──┘             └─ rest of the block ──┘

Source:
    PipeFusion, Fang et al. (2024), https://arxiv.org/abs/2405.14430
    DeepSpeed Ulysses, Jacobs et al. (2023), https://arxiv.org/abs/2309.14509
    Ring attention, Liu et al. (2023), https://arxiv.org/abs/2310.01889
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from torch import Tensor, nn

from lightning_diffpipe.comm.links import Alone, Links
from lightning_diffpipe.errors import (
    ConfigurationError,
    PartitionError,
    require_choice,
    require_number,
)
from lightning_diffpipe.planning.partition import minimax_cuts
from lightning_diffpipe.planning.schedules.pipefusion import PipeFusionPlan
from lightning_diffpipe.sampling.pipefusion.patch import Stages, measured_costs
from lightning_diffpipe.sampling.pipefusion.run import PipeFusionRun, PipeFusionSetting
from lightning_diffpipe.sampling.pipefusion.sequence_attention import (
    SEQUENCE_MODES,
    SequenceMode,
)
from lightning_diffpipe.sampling.rehearsal import rehearse, rehearse_sharing
from lightning_diffpipe.sampling.report import SamplingStatistics, Stopwatch, measured
from lightning_diffpipe.sampling.request import Request, require_warmup
from lightning_diffpipe.sampling.schedulers import is_elementwise
from lightning_diffpipe.sampling.tracing.layout import Layout, Part
from lightning_diffpipe.sampling.tracing.probe import MAX_LAYOUTS, LayoutStore


class PipeFusion:
    """Samples with blocks split over ranks and patches flowing through them.

    Args:
        model: The transformer. Weights of blocks of other ranks are never used and may be placeholders.
        links: Between the ranks; one rank alone if None, which is the emulator of any number of ranks.
        num_patches: M. At least as many as ranks keeps all of them busy.
        warmup_steps: W, first steps that compute all tokens at once, as one process would; or "auto": until what
            the model is given in the next step differs by less than `warmup_threshold`.
        split: Blocks before which to cut, one fewer than ranks. None cuts by the cost measured in the first
            request, and keeps that for all further ones with the same blocks: ranks have weights for no other. A
            function is asked on rank 0, for each layout.
        hide_unseen: With W = 0, hide keys that have not been written yet instead of attending to zeros.
        warmup_threshold: Relative change of the model's input, the scaled latents, that ends the automatic warm-up.
        warmup_microbatches: Shares of the samples into which synchronous steps are cut, so that ranks overlap
            there. None cuts between the branches of guidance that are in the batch, if patches are to flow after
            these steps; it cuts nothing where the result has the bits of one process: with one patch, or with
            W >= steps. A number need not divide the samples, but there must be as many. Without effect on models
            whose samples cannot be separated, and for pipelines with several calls in a step, between which they
            compute with results, which have to be complete.
        sequence_links: Between the ranks of one stage, if it has several: they share the tokens of every patch.
            Then `links` join the ranks of equal position in their stages.
        sequence_mode: Attention over them: "ulysses" trades tokens for heads, "ring" passes keys and values round.
        axis: Axis of the latents to cut; rows, or packed tokens, if None. 2 cuts a video along time.
        verify: Fill everything that must not be read with NaN, and rehearse the first request of a layout: a step
            in patches against a synchronous one (`sampling/rehearsal.py`).

    Raises:
        ConfigurationError: An option is none of these, or out of range.

    Example:
        >>> sampler = PipeFusion(transformer, links, num_patches=4)          # doctest: +SKIP
        >>> latents = sampler.sample(request)                                # doctest: +SKIP
    """

    steps_all_rows = False

    def __init__(
        self,
        model: nn.Module,
        links: Links | None = None,
        *,
        num_patches: int = 1,
        warmup_steps: int | Literal["auto"] = 1,
        split: Sequence[int] | Callable[[Layout], Sequence[int]] | None = None,
        hide_unseen: bool = True,
        warmup_threshold: float = 0.1,
        warmup_microbatches: int | None = None,
        sequence_links: Links | None = None,
        sequence_mode: SequenceMode = "ulysses",
        axis: int | None = None,
        verify: bool = True,
    ) -> None:
        require_warmup(warmup_steps, warmup_threshold)
        require_number("num_patches", num_patches, 1, whole=True)
        if warmup_microbatches is not None:
            require_number("warmup_microbatches", warmup_microbatches, 1, whole=True)
        require_choice("sequence_mode", sequence_mode, list(SEQUENCE_MODES))
        self.model, self.links = model, links or Alone()
        self.sequence_links, self.sequence_mode = sequence_links or Alone(), sequence_mode
        self.num_patches, self.warmup_steps, self.split = num_patches, warmup_steps, split
        self.hide_unseen, self.verify = hide_unseen, verify
        self.warmup_threshold, self.warmup_microbatches = warmup_threshold, warmup_microbatches
        self.statistics = SamplingStatistics()
        self.positions: tuple[int, ...] = ()  # where blocks were cut for the last request
        self.layouts = LayoutStore(axis)
        self._by_number: dict[int, Layout] = {}  # the same on all ranks
        self._cuts: dict[tuple[str, ...], tuple[int, ...]] = {}  # where to cut, by names of blocks
        self._rehearsed: set[int] = set()  # numbers of layouts, the same on all ranks

    def prepare(self, request: Request) -> PipeFusionSetting:
        """Decides everything about a request; collective. Rank 0 probes, and broadcasts the layout.

        Raises:
            ConfigurationError: Patches, ranks or the scheduler do not fit; on all ranks.
            LayoutError: The model cannot be sampled in patches; on all ranks.
        """

        def decide() -> tuple[int, Layout | None, tuple[int, ...]]:
            """Returns the number of the layout, the layout if it is new to other ranks, and where to cut."""
            layout, positions = self._decide(request)
            known = [number for number, other in self._by_number.items() if other is layout]
            if known:
                return known[0], None, positions
            return max(self._by_number, default=-1) + 1, layout, positions

        # Rank 0 of the first stage decides for all of its stage, and each of these broadcasts to its pipeline.
        number, layout, self.positions = self.links.broadcast_object(
            lambda: self.sequence_links.broadcast_object(decide)
        )
        if layout is not None:
            self._by_number[number] = layout
            self._by_number.pop(number - MAX_LAYOUTS, None)
        return self.setting(self._by_number[number], self.positions, request)

    def setting(
        self, layout: Layout, positions: Sequence[int], request: Request
    ) -> PipeFusionSetting:
        """Returns the setting of a request whose layout and split are known."""
        n = self.sequence_links.num_ranks
        patches, shares = list[Part](), list[tuple[Part, ...]]()
        for m, units in enumerate(layout.split_units(self.num_patches)):
            parts = layout.split_range(units, n)
            # Text is computed with patch 0.
            patches.append(Part(units, None if m else (0, 1)))
            shares.append(tuple(Part(x, None if m else (k, n)) for k, x in enumerate(parts)))
        automatic = self.warmup_steps == "auto"
        plan = PipeFusionPlan(
            request.num_steps,
            request.num_steps if automatic else self.warmup_steps,
            self.num_patches,
            self.links.num_ranks,
            self._num_microbatches(layout, request),
            automatic,
            n,
        )
        stages = Stages.split(layout, positions)
        return PipeFusionSetting(layout, stages, tuple(patches), tuple(shares), plan)

    def _num_microbatches(self, layout: Layout, request: Request) -> int:
        """Returns the shares of the samples in synchronous steps.

        They decide about last bits, and are therefore the same for any number of ranks.
        """
        num_asked = self.warmup_microbatches
        several_calls = len(layout.blocks) > len(layout.block_names)
        if not layout.cuts_samples or (several_calls and request.begin is not None):
            return 1
        if num_asked is not None:
            if request.cache is not None and num_asked > 1:
                raise ConfigurationError(
                    f"warmup_microbatches={num_asked}: a step cache stores what it is given of all samples; leave "
                    "it out, or cache="
                )
            layout.refuse_microbatches(num_asked)
            return num_asked
        is_cut = self._has_turns_of_patches(request.num_steps) and request.cache is None
        return request.branches_in_batch if is_cut else 1

    def _has_turns_of_patches(self, num_steps: int) -> bool:
        automatic = self.warmup_steps == "auto"
        return self.num_patches > 1 and (automatic or self.warmup_steps < num_steps)

    def sample(
        self,
        request: Request,
        on_step: Callable[[int], None] | None = None,
        setting: PipeFusionSetting | None = None,
    ) -> Tensor:
        """Runs one request, for which it is prepared here unless that has been done; see `Sampler`.

        Raises:
            PipelineTimeoutError: Another rank stopped, or is too slow.
        """
        with request.inferring():
            setting = setting or self.prepare(request)
            self._rehearse_once(request, setting)
            with measured(self, request, self.links, self.sequence_links) as watch:
                run = PipeFusionRun(self, request, setting, watch)
                try:
                    return run.run(on_step)
                finally:
                    self.statistics.num_synchronous = run.plan.num_synchronous

    def _rehearse_once(self, request: Request, setting: PipeFusionSetting) -> None:
        """Rehearses the first request of a layout that is run in patches, or whose tokens ranks share."""
        shares_tokens = self.steps_all_rows and self.sequence_links.num_ranks > 1
        runs_in_parts = shares_tokens or self._has_turns_of_patches(request.num_steps)
        if not self.verify or not runs_in_parts:
            return
        layout = setting.layout
        number = next(n for n, other in self._by_number.items() if other is layout)
        if number in self._rehearsed:
            return

        def predict(still: Request) -> Tensor:
            plan = replace(setting.plan, num_steps=still.num_steps, warmup_steps=1, automatic=False)
            if still.num_steps == 1:
                plan = replace(plan, warmup_microbatches=1)
            watch = Stopwatch(SamplingStatistics(), request.latents.device)
            return PipeFusionRun(self, still, replace(setting, plan=plan), watch).run(None)

        if shares_tokens:
            rehearse_sharing(self.sequence_links, request, layout, predict)
        else:
            rehearse(self.links, request, layout, self.num_patches, predict)
        self._rehearsed.add(number)

    def _refuse(self, layout: Layout, request: Request) -> None:
        """Raises ConfigurationError unless rows can be shared, and can take steps separately."""
        num_sharing = self.sequence_links.num_ranks
        for units in layout.split_units(self.num_patches):
            layout.split_range(units, num_sharing)
        if self.num_patches * num_sharing > 1:  # each steps rows of its own
            scheduler, ndim = request.scheduler, request.latents.ndim
            if not is_elementwise(scheduler, request.timesteps, ndim, layout.axis):
                raise ConfigurationError(
                    f"{type(scheduler).__name__} reads all rows of the latents in one step "
                    "(thresholding, or noise that is not sampled by torch.randn), so patches cannot take steps "
                    "separately; switch that off, or use another scheduler such as DDIMScheduler, "
                    "FlowMatchEulerDiscreteScheduler, DPMSolverMultistepScheduler, EulerDiscreteScheduler or "
                    "UniPCMultistepScheduler"
                )

    def _decide(self, request: Request) -> tuple[Layout, tuple[int, ...]]:
        layout = self.layouts.layout_for(request)
        self._refuse(layout, request)
        SEQUENCE_MODES[self.sequence_mode].refuse(layout, self.sequence_links.num_ranks)
        if self.split is not None:
            split = self.split(layout) if callable(self.split) else self.split
            if len(split) != self.links.num_ranks - 1:
                raise ConfigurationError(
                    f"split={list(split)} makes {len(split) + 1} stages for "
                    f"{self.links.num_ranks} ranks; give {self.links.num_ranks - 1} positions"
                )
            return layout, tuple(split)
        if self.links.num_ranks == 1:
            return layout, ()
        names = tuple(layout.block_names)
        if names not in self._cuts:
            if self.links.num_ranks > len(names):
                raise PartitionError(
                    f"cannot spread {len(names)} blocks over {self.links.num_ranks} ranks; use at most "
                    f"{len(names)} ranks for the pipeline, and the others for guidance or for more prompts"
                )
            costs = measured_costs(layout, request)
            self._cuts[names] = minimax_cuts(costs, self.links.num_ranks)[1:]
        return layout, self._cuts[names]


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
        require_choice("mode", mode, list(SEQUENCE_MODES))
        super().__init__(model, sequence_links=links, sequence_mode=mode, axis=axis, verify=verify)

    def _refuse(self, layout: Layout, request: Request) -> None:
        layout.split_units(self.sequence_links.num_ranks, "the number of ranks")
