"""The turns of one request under PipeFusion, as pure arithmetic.

A *turn* is one run of the model on one part of its tokens: all of them in a synchronous step, one patch in
every other. Synchronous steps may be cut into microbatches of samples, so that ranks overlap in them, too.

    rank 0 | P0  . P1 P2 P3 P4 P5 P6  .       W = 1 synchronous step, S - W = 3 steps of M = 2 patches,
    rank 1 |  . P0  . P1 P2 P3 P4 P5 P6       N = 2 ranks; a patch takes half of what all tokens take

Symbols: S steps, W of them synchronous, M patches, N ranks, n microbatches of a synchronous step.

Source:
    PipeFusion, Fang et al. (2024), https://arxiv.org/abs/2405.14430
"""

from dataclasses import dataclass

from lightning_diffpipe.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Turn:
    """One run of the model on one part.

    Attributes:
        index: Among all turns of the request.
        patch: None in a synchronous step.
        microbatch: `(k, n)`: the k-th of n equal shares of the samples.
        is_first: First of its denoising step.
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
        warmup_microbatches: n.
        automatic: W is found while sampling, at least 1: after every synchronous step the last rank tells the
            others whether patches may flow from now on. Before that is known, W is S.
        ranks_per_stage: q, ranks that share the tokens of every patch. There are q pipelines of N ranks then,
            each of which carries its share of the tokens.

    Example:
        >>> len(PipeFusionPlan(num_steps=20, warmup_steps=1, num_patches=8, num_ranks=8).turns)
        153
    """

    num_steps: int
    warmup_steps: int
    num_patches: int
    num_ranks: int
    warmup_microbatches: int = 1
    automatic: bool = False
    ranks_per_stage: int = 1

    def __post_init__(self) -> None:
        small = min(self.num_steps, self.num_patches, self.num_ranks, self.ranks_per_stage)
        if small < 1 or self.warmup_steps < 0 or self.warmup_microbatches < 1:
            raise ConfigurationError(
                "PipeFusion needs at least one step, patch and rank, and no negative number of "
                f"warm-up steps; got {self}"
            )

    @property
    def num_synchronous(self) -> int:
        """Steps that compute all tokens at once."""
        return self.num_steps if self.num_patches == 1 else min(self.warmup_steps, self.num_steps)

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
