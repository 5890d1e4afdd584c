"""How long every method takes to sample on every mesh of the ranks, on paper.

Seconds of a step, for one rank's share f of the work (samples, branches of guidance) and n ranks in all:

    one rank       f t
    sequence       g + f b / n + trade                 all waited for, exact
    pipefusion     M patches of g + (c + f b / M q) / n + trade / M n, at least a round trip
                                                       after W synchronous steps
    distrifusion   max(1.1 f t / n, transport)         after W synchronous steps of 1.1 f t / n + transport

t is the time of a step, b of the blocks in it, g of the code between them, c of what a call of a block costs
however few tokens it gets. In PipeFusion q ranks share the tokens of each of n stages; q ranks that share tokens
trade, per rank and step, for keys and values of k bytes and for l calls of attention,

    Ulysses        2 k (q - 1) / q^2 / bandwidth  +  2 l (q - 1) latency         as many heads as ranks
    ring             k (q - 1) / q   / bandwidth  +    l (q - 1) latency

Halves of guidance exchange the rows that a rank owns, at the end of its part of a step.

Bandwidth and latency are those of a rank, not of a pair of ranks: whatever a rank sends to several others leaves
through one adapter, one message after the other. That is so with one network card per host, with one way from a GPU
to its switch, and where a processor handles every message, as with gloo; only ranks wired pair by pair would trade
faster, N - 1 times at most. Bands put up to 16 operators of a kind into a message in displaced steps.

Source:
    PipeFusion, Fang et al. (2024), https://arxiv.org/abs/2405.14430, section 4 and table 1
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lightning_diffpipe.planning.cluster import Link
from lightning_diffpipe.planning.sampling.pipefusion import PipeFusionPlan
from lightning_diffpipe.planning.sampling.wish import SamplingWish, mesh_of

MIN_STEPS = 8
"""With fewer denoising steps, only exact methods are considered."""

_CALLS_PER_MESSAGE = 16  # as `DistriFusion` does by default
_BAND = 1.1
"""What a band costs beyond its share: every function passes a hook that looks for convolutions and norms.
From 1.1 to 1.2 was measured on two ranks; see `benchmarks/sampling_speed`."""


@dataclass(frozen=True)
class DenoiserProfile:
    """One denoising step on one rank, measured.

    Attributes:
        step_s: Seconds of a step, for all samples and all branches of guidance.
        glue_s: Seconds of what is not in blocks; runs on every rank, for every patch.
        call_s: Seconds of all blocks that do not shrink with a patch: handing operators to the device, reading
            weights. Stages share them, patches and ranks of a stage do not.
        num_samples: Samples in the request.
        branches: Branches of guidance that can be divided: 1 or 2.
        num_blocks: Blocks that can be spread over ranks; 0 if the model cannot be sampled in patches.
        num_units: Smallest slices of rows.
        cut_bytes: What crosses a cut between two blocks in a step.
        latent_bytes: Of the latents.
        key_value_bytes: Keys and values of all self-attention calls of a step.
        sequence_bytes: Queries, keys, values and results of all self-attention calls of a step.
        num_attention: Self-attention calls of a step.
        halo_bytes: Rows at one border, of all convolutions of a step that read rows of neighbours.
        num_norms: Normalisations over rows in a step.
        num_calls: Calls of the model in a step: 2 for guidance by two calls.
        warmup_microbatches: Shares into which PipeFusion cuts a synchronous step.
        num_heads: Of queries, the fewest there are; 0 if that does not matter.
        num_key_heads: Of keys and values, the fewest.
        weight_bytes: Of all weights that are yet to be loaded; 0 if ranks hold them already, or they are not known.
        block_bytes: Of those that are in blocks, which stages share.
        activation_bytes: Most that a step holds at a time besides weights; 0 if it is not known.
        shares_tokens: Whether ranks can share its tokens, if it can be sampled in patches.
        refusal: Why patches cannot flow through it, if they cannot.
        num_halos: Convolutions of a step that read rows of neighbours.
    """

    step_s: float
    glue_s: float
    num_samples: int
    branches: int
    num_blocks: int
    num_units: int
    cut_bytes: int
    latent_bytes: int
    key_value_bytes: int
    sequence_bytes: int
    num_attention: int
    halo_bytes: int = 0
    num_norms: int = 0
    call_s: float = 0.0
    num_calls: int = 1
    warmup_microbatches: int = 1
    num_heads: int = 0
    num_key_heads: int = 0
    weight_bytes: int = 0
    block_bytes: int = 0
    activation_bytes: int = 0
    shares_tokens: bool = True
    refusal: str = ""
    num_halos: int = 0

    def spreads_heads(self, num_ranks: int) -> bool:
        """Whether Ulysses works on so many ranks."""
        heads, key_heads = self.num_heads, self.num_key_heads or self.num_heads
        if not heads:
            return True
        even = heads == key_heads or not (heads % num_ranks or key_heads % num_ranks)
        return num_ranks <= min(heads, key_heads) and even


@dataclass(frozen=True)
class SamplingChoice:
    """One way to sample.

    Attributes:
        method: Name, as in `Predictor.from_pretrained`.
        seconds: Expected time of the denoising loop.
        data: Size of the data axis; then of the guidance axis, and of the method's own.
        guidance: See `data`.
        ranks: See `data`.
        num_patches: Of PipeFusion.
        warmup_steps: Of approximate methods.
        sequence: Ranks that share the tokens of a stage of PipeFusion.
        sequence_mode: How ranks that share tokens attend, "ulysses" or "ring"; empty if none do.
        reason: One line; empty for candidates.
    """

    method: str
    seconds: float
    data: int
    guidance: int
    ranks: int
    num_patches: int | None = None
    warmup_steps: int | None = None
    sequence: int = 1
    sequence_mode: str = ""
    reason: str = ""

    @property
    def is_exact(self) -> bool:
        """Whether it gives the pictures of one process, to rounding."""
        return self.method in ("single", "sequence", "synchronous")

    @property
    def axes(self) -> dict[str, int]:
        """Sizes of all axes of the mesh."""
        own = {"sequence": self.ranks} if self.method == "sequence" else {"parallel": self.ranks}
        return {
            "data": self.data,
            "guidance": self.guidance,
            "parallel": 1,
            "sequence": self.sequence,
        } | own

    @property
    def mesh(self) -> str:
        """The axes that have several ranks, as text."""
        return mesh_of(self.axes)


@dataclass(frozen=True)
class _Share:
    """What the ranks next to each other have to do.

    Attributes:
        of_work: Share of all samples and branches.
        prediction_bytes: Of one prediction of one branch, for their samples.
        halves: Whether guidance is divided, so that predictions are exchanged.
    """

    of_work: float
    prediction_bytes: float
    halves: bool

    def exchange_s(self, link: Link, parts: int) -> float:
        """Seconds to exchange one of so many parts of a prediction with the other half."""
        return link.seconds(self.prediction_bytes / parts) if self.halves else 0.0


@dataclass(frozen=True)
class _Asked:
    """What all methods are weighed for.

    Attributes:
        profile: What a step costs.
        link: Of a rank.
        num_steps: Denoising steps.
        wish: What is given and not chosen.
    """

    profile: DenoiserProfile
    link: Link
    num_steps: int
    wish: SamplingWish


def candidates(
    profile: DenoiserProfile,
    link: Link,
    num_ranks: int,
    num_steps: int,
    wish: SamplingWish | None = None,
) -> Iterator[SamplingChoice]:
    """Every way to sample that is as wished, with its expected time. See `choose_sampling`."""
    wish = wish or SamplingWish()
    for choice in _of_ranks(_Asked(profile, link, num_steps, wish), num_ranks):
        if wish.admits(choice.method, choice.axes):
            yield choice


def _of_ranks(asked: _Asked, num_ranks: int) -> Iterator[SamplingChoice]:
    """Every method on every mesh, with the numbers that are wished."""
    profile = asked.profile
    for data in range(1, num_ranks + 1):
        if num_ranks % data or data > max(profile.num_samples, 1):
            continue
        for guidance in (1, 2):
            if (num_ranks // data) % guidance or guidance > profile.branches:
                continue
            of_samples = -(-profile.num_samples // data) / profile.num_samples
            share = _Share(of_samples / guidance, of_samples * profile.latent_bytes, guidance == 2)
            ranks = num_ranks // data // guidance
            for choice in _of_mesh(asked, share, ranks):
                yield replace(choice, data=data, guidance=guidance)
    yield SamplingChoice("single", asked.num_steps * profile.step_s, 1, 1, 1)


def _of_mesh(asked: _Asked, share: _Share, ranks: int) -> Iterator[SamplingChoice]:
    """Every method on the ranks that share one branch of some samples."""
    profile, link, num_steps = asked.profile, asked.link, asked.num_steps
    if ranks == 1:
        step_s = share.of_work * profile.step_s + share.exchange_s(link, 1)
        yield SamplingChoice("single", num_steps * step_s, 1, 1, 1)
        return
    can_share = bool(profile.num_blocks and profile.num_attention and profile.shares_tokens)
    if can_share and ranks <= profile.num_units:
        trade = _Trade.among(profile, share.of_work, ranks, mode=asked.wish.sequence_mode)
        blocks_s = share.of_work * (profile.step_s - profile.glue_s)
        step_s = share.of_work * profile.glue_s + blocks_s / ranks + trade.seconds(link)
        step_s += share.exchange_s(link, ranks)
        yield SamplingChoice("sequence", num_steps * step_s, 1, 1, ranks, sequence_mode=trade.mode)
    if ranks <= profile.num_units:
        yield from _bands(asked, share, ranks)
    if num_steps < MIN_STEPS:
        return
    for stages in (n for n in range(2, ranks + 1) if ranks % n == 0):
        per_stage = ranks // stages
        if stages > profile.num_blocks or (per_stage > 1 and not can_share):
            continue
        for patches in _patches(stages, profile.num_units // per_stage, asked.wish.num_patches):
            yield _pipefusion(asked, share, stages, per_stage, patches)


@dataclass(frozen=True)
class _Trade:
    """What a rank sends in one step to those it shares tokens with.

    Attributes:
        mode: How they attend.
        num_bytes: Of all calls of attention.
        num_messages: Of all calls of attention; each turn sends as many.
    """

    mode: str
    num_bytes: float
    num_messages: float

    @classmethod
    def among(
        cls,
        profile: DenoiserProfile,
        of_work: float,
        ranks: int,
        stages: int = 1,
        mode: str | None = None,
    ) -> _Trade:
        """Among some ranks that hold one of some stages; nothing if there is one rank."""
        peers, calls = ranks - 1, profile.num_attention / stages
        if not peers:
            return cls("", 0.0, 0.0)
        if (mode or ("ulysses" if profile.spreads_heads(ranks) else "ring")) == "ulysses":
            sent = of_work * profile.sequence_bytes * peers / ranks**2
            return cls("ulysses", sent / stages, 2 * calls * peers)
        sent = of_work * profile.key_value_bytes * peers / ranks
        return cls("ring", sent / stages, calls * peers)

    def seconds(self, link: Link, turns: int = 1, parts: int = 1) -> float:
        """Of some turns, which together compute one of so many parts of a step."""
        sent_s = self.num_bytes / parts / link.bandwidth_bytes_per_s
        return sent_s + turns * self.num_messages * link.latency_s


def _bands(asked: _Asked, share: _Share, ranks: int) -> Iterator[SamplingChoice]:
    """Bands of rows, waited for or one step old."""
    profile, link, num_steps = asked.profile, asked.link, asked.num_steps
    peers = (ranks - 1) / ranks
    sent = share.of_work * (profile.key_value_bytes * peers + 2 * profile.halo_bytes)
    sent_s = sent / link.bandwidth_bytes_per_s
    # Operators of each kind, and to how many ranks each sends: all others, or two neighbours.
    kinds = [(profile.num_attention, ranks - 1), (profile.num_norms, ranks - 1)]
    kinds.append((profile.num_halos, min(2, ranks - 1)))
    transport_s = sent_s + sum(count * peers_sent for count, peers_sent in kinds) * link.latency_s
    # Whole predictions: of the other bands first, then of the other branch of guidance.
    gather_s = link.seconds(share.prediction_bytes * peers) + share.exchange_s(link, 1)
    compute_s = _BAND * share.of_work * profile.step_s / ranks
    synchronous_s = compute_s + transport_s + gather_s
    yield SamplingChoice("synchronous", num_steps * synchronous_s, 1, 1, ranks)
    if num_steps >= MIN_STEPS:
        warmup = asked.wish.warmup_steps
        if warmup is None:
            warmup = 4 if num_steps < 30 else 1
        grouped = sum(-(-count // _CALLS_PER_MESSAGE) * peers_sent for count, peers_sent in kinds)
        grouped_s = sent_s + grouped * link.latency_s
        displaced_s = max(compute_s, grouped_s) + gather_s
        waited_for = min(warmup, num_steps)
        seconds = waited_for * synchronous_s + (num_steps - waited_for) * displaced_s
        yield SamplingChoice("distrifusion", seconds, 1, 1, ranks, None, warmup)


def _patches(stages: int, most: int, wished: int | None) -> list[int]:
    """Numbers of patches worth a thought; each patch has a row for every rank of a stage."""
    if wished is not None:
        return [wished] if wished <= most else []
    tried = {stages, stages + 1, 2 * stages, 4 * stages}
    return sorted({min(count, most) for count in tried if most})


def _pipefusion(
    asked: _Asked, share: _Share, stages: int, per_stage: int, patches: int
) -> SamplingChoice:
    profile, link, wish = asked.profile, asked.link, asked.wish
    warmup = 1 if wish.warmup_steps is None else wish.warmup_steps
    plan = PipeFusionPlan(
        asked.num_steps,
        warmup,
        patches,
        stages,
        num_visits=1 if share.halves else profile.num_calls,
        warmup_microbatches=1 if share.halves else profile.warmup_microbatches,
        ranks_per_stage=per_stage,
    )
    trade = _Trade.among(profile, share.of_work, per_stage, stages, wish.sequence_mode)
    glue_s, call_s = share.of_work * profile.glue_s, profile.call_s / stages
    blocks_s = share.of_work * (profile.step_s - profile.glue_s) / stages

    def stage_s(parts: int, turns: int) -> list[float]:
        """Seconds of every stage for one of so many parts of a step, which takes some turns."""
        computed = max(blocks_s - call_s, 0.0) / per_stage / parts
        each = turns * (glue_s + call_s) + computed + trade.seconds(link, turns, parts)
        return [each] * (stages - 1) + [each + share.exchange_s(link, parts * per_stage)]

    timeline = plan.timeline(
        stage_s(1, plan.warmup_microbatches),
        stage_s(patches, 1),
        link=link,
        cut_bytes=[round(share.of_work * profile.cut_bytes / per_stage)] * (stages - 1),
        latent_bytes=round(share.prediction_bytes / per_stage),
    )
    return SamplingChoice(
        "pipefusion", timeline.iteration_s, 1, 1, stages, patches, warmup, per_stage, trade.mode
    )
