"""What PipeFusion costs: turns and seconds of one request, as pure arithmetic.

A *turn* is one run of the model on one part of its tokens: all of them in a synchronous step, one patch in
every other. Synchronous steps may be cut into microbatches of samples, so that ranks overlap in them, too. With
guidance by two calls of the model per step, each turn passes through the ranks twice (two *visits*).

    rank 0 | P0  . P1 P2 P3 P4 P5 P6  .       W = 1 synchronous step, S - W = 3 steps of M = 2 patches,
    rank 1 |  . P0  . P1 P2 P3 P4 P5 P6       N = 2 ranks; a patch takes half of what all tokens take

Symbols: S steps, W of them synchronous, M patches, N ranks, G visits, n microbatches of a synchronous step.

Source:
    PipeFusion, Fang et al. (2024), https://arxiv.org/abs/2405.14430
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.planning.cluster import Link
from lightning_diffpipe.planning.cost import PipelineCosts
from lightning_diffpipe.planning.instruction import ForwardNoGrad
from lightning_diffpipe.planning.schedule import Schedule, as_placement
from lightning_diffpipe.planning.simulator import simulate
from lightning_diffpipe.planning.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Turn:
    """One run of the model on one part.

    Attributes:
        index: Among all turns of the request; "microbatch" of its spans.
        step: Denoising step.
        patch: Which; None in a synchronous step.
        microbatch: `(k, n)`: the k-th of n equal shares of the samples.
        is_first: First of its step.
        is_last: Last of its step.
    """

    index: int
    step: int
    patch: int | None
    microbatch: tuple[int, int]
    is_first: bool
    is_last: bool


@dataclass(frozen=True, slots=True)
class PipeFusionPlan:
    """One request on paper.

    Attributes:
        num_steps: S.
        warmup_steps: W, synchronous; all steps are if there is one patch only.
        num_patches: M.
        num_ranks: N.
        num_visits: G, calls of the model in one step.
        warmup_microbatches: n.
        automatic: W is found while sampling, at least 1: after every synchronous step the last rank tells the
            others whether patches may flow from now on. Before that is known, W is S.
        ranks_per_stage: q, ranks that share the tokens of every patch. There are q pipelines of N ranks then,
            each of which carries its share of the tokens.

    Example:
        >>> plan = PipeFusionPlan(num_steps=20, warmup_steps=1, num_patches=8, num_ranks=8)
        >>> round(plan.speed_up(), 2)
        5.74
    """

    num_steps: int
    warmup_steps: int
    num_patches: int
    num_ranks: int
    num_visits: int = 1
    warmup_microbatches: int = 1
    automatic: bool = False
    ranks_per_stage: int = 1

    def __post_init__(self) -> None:
        small = min(
            self.num_steps, self.num_patches, self.num_ranks, self.num_visits, self.ranks_per_stage
        )
        if small < 1 or self.warmup_steps < 0 or self.warmup_microbatches < 1:
            raise ConfigurationError(
                "PipeFusion needs at least one step, patch, rank and visit, and no negative number of "
                f"warm-up steps; got {self}"
            )

    @property
    def num_synchronous(self) -> int:
        """Steps that compute all tokens at once."""
        if self.num_patches == 1:
            return self.num_steps
        return min(self.warmup_steps, self.num_steps)

    def may_be_last_synchronous(self, step: int) -> bool:
        """Returns whether patches may flow in the step after this one, which then reads what this one leaves."""
        if self.automatic and self.num_patches > 1:
            return step < min(self.num_synchronous, self.num_steps - 1)
        return step == self.num_synchronous - 1 < self.num_steps - 1

    def decides_after(self, turn: Turn) -> bool:
        """Returns whether the last rank then tells the others if there will be another synchronous step."""
        ends_step = turn.patch is None and turn.is_last
        return self.automatic and ends_step and self.may_be_last_synchronous(turn.step)

    @property
    def turns(self) -> tuple[Turn, ...]:
        """All turns, in order, the same on every rank."""
        out: list[Turn] = []
        for step in range(self.num_steps):
            n = self.warmup_microbatches
            parts: list[tuple[int | None, tuple[int, int]]]
            if step < self.num_synchronous:
                parts = [(None, (k, n)) for k in range(n)]
            else:
                parts = [(m, (0, 1)) for m in range(self.num_patches)]
            for i, (patch, share) in enumerate(parts):
                first, last = i == 0, i == len(parts) - 1
                out.append(Turn(len(out), step, patch, share, first, last))
        return tuple(out)

    def speed_up(self) -> float:
        """Returns the speed-up over one rank, with equal stages and free links.

        For n = G = 1 and M >= N that is `S N / (W N + S - W + (N - 1) / M)`.
        """
        stages_s = [1 / self.num_ranks] * self.num_ranks
        patches_s = [stage_s / self.num_patches for stage_s in stages_s]
        return self.num_steps / self.timeline(stages_s, patches_s).iteration_s

    def timeline(
        self,
        synchronous_s: Sequence[float],
        patch_s: Sequence[float],
        *,
        link: Link | None = None,
        cut_bytes: Sequence[int] = (),
        latent_bytes: int = 0,
    ) -> Timeline:
        """Simulates the plan, for stages and links as they are.

        Args:
            synchronous_s: For each rank, its stage on all tokens of all samples, all visits together.
            patch_s: For each rank, its stage on one patch, all visits together.
            link: Between consecutive ranks, and from the last to the first; free if None.
            cut_bytes: For each of the N - 1 cuts, bytes of everything that crosses it in one step.
            latent_bytes: Of the full latents.
        """
        link, cuts = link or Link(), cut_bytes or (0,) * (self.num_ranks - 1)
        turns = [turn for turn in self.turns for _ in range(self.num_visits)]
        schedule = self.schedule

        def visit_s(whole_s: float, part_s: float, turn: Turn) -> float:
            turn_s = whole_s if turn.patch is None else part_s
            return turn_s / (self.num_visits * turn.microbatch[1])

        def onward_s(num_bytes: int, turn: Turn) -> float:
            share = 1 / (turn.microbatch[1] if turn.patch is None else self.num_patches)
            return link.seconds(num_bytes * (share / self.num_visits))

        def back_s(maker: int) -> float:
            share = 1.0 if turns[maker].patch is None else 1 / self.num_patches
            return link.seconds(latent_bytes * share)

        # Visits cost the same that are of as many tokens, and read as many.
        kinds = tuple(
            (turn.patch is None) + 2 * (turns[maker].patch is None)
            for turn, maker in zip(turns, schedule.fed_by, strict=True)
        )
        stages_s = zip(synchronous_s, patch_s, strict=True)
        costs = PipelineCosts(
            sizes=kinds,
            forward_s=tuple(tuple([visit_s(*stage_s, t) for t in turns]) for stage_s in stages_s),
            backward_s=(),
            weight_gradient_s=(),
            activation_s=(
                tuple(map(back_s, schedule.fed_by)),
                *(tuple([onward_s(num_bytes, t) for t in turns]) for num_bytes in cuts),
            ),
            gradient_s=(),
        )
        timeline = simulate(schedule, costs, kinds)
        spans = (
            replace(s, instruction=ForwardNoGrad(s.rank, turns[s.instruction.microbatch].index))
            for s in timeline.spans
            if isinstance(s.instruction, ForwardNoGrad)
        )
        return Timeline(tuple(spans), self.num_ranks)

    @property
    def schedule(self) -> Schedule:
        """All turns on every rank, each visit a "microbatch" of its own.

        The first stage needs the rows of its patch of the step before, or all rows of the last synchronous step,
        which the last stage sends back.
        """
        fed_by: list[int] = []
        sent_back: dict[int | None, int] = {}
        for turn in self.turns:
            whole = sent_back.pop(None, -1)
            fed_by += [sent_back.pop(turn.patch, whole), *[-1] * (self.num_visits - 1)]
            if turn.patch is not None or turn.is_last:
                sent_back[turn.patch] = len(fed_by) - 1
        programs = tuple(
            tuple(ForwardNoGrad(rank, m) for m in range(len(fed_by)))
            for rank in range(self.num_ranks)
        )
        return Schedule(as_placement(self.num_ranks), len(fed_by), programs, tuple(fed_by))
