"""Which method samples fastest, on which mesh of the ranks: the time and memory of every way, on paper.

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

Halves of guidance exchange the rows that a rank owns, at the end of its part of a step. Bandwidth and latency are
those of a rank, not of a pair of ranks: whatever a rank sends to several others leaves through one adapter, one
message after the other. Only ranks wired pair by pair would trade faster, N - 1 times at most. Bands put up to 16
operators of a kind into a message in displaced steps.

Bytes that a rank needs besides what it holds already. Of weights w, b of them in blocks, keys and values k of all
calls of attention, and activations a of one step:

    one rank       w + f a
    sequence       w + f a / n
    synchronous    w + f a                                  rank 0 looks at all rows once
    distrifusion   w + f max(a, a / n + k)                  and then keys and values of all bands
    pipefusion     w - b + b / n + f (a + k / n) / q        in a ring, keys and values of all q ranks

Of k a band holds what others sent, and one message of its own under way to all of them. Synchronous steps of
PipeFusion compute all tokens at once, so patches save no activations. Blocks count as equally large.

The fastest way is taken, with two exceptions: stale activations need steps that differ little, so few-step models
get an exact method; and an exact method is also taken where it costs at most a tenth more.

Source:
    PipeFusion, Fang et al. (2024), https://arxiv.org/abs/2405.14430, section 4 and table 1
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.planning.cluster import Link
from lightning_diffpipe.planning.schedules.pipefusion import PipeFusionPlan

MIN_STEPS = 8
"""With fewer denoising steps, only exact methods are considered."""

_TOLERANCE = 1.1
_CALLS_PER_MESSAGE = 16  # as `DistriFusion` does by default
_BAND = 1.1
"""What a band costs beyond its share: every function passes a hook that looks for convolutions and norms.
From 1.1 to 1.2 was measured on two ranks; see `benchmarks/sampling_speed`."""

_AXES = ("data", "guidance", "parallel", "sequence")


def mesh_of(axes: Mapping[str, int]) -> str:
    """Returns the axes that have several ranks, as text.

    Example:
        >>> mesh_of({"data": 2, "guidance": 1, "parallel": 4, "sequence": 1})
        'data=2 x parallel=4'
    """
    return " x ".join(f"{name}={size}" for name, size in axes.items() if size > 1) or "one rank"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A choice that turned out not to work.

    Attributes:
        method: Its name.
        reason: Why, in a clause.
        axes: Sizes of the axes of the mesh that does not work; None if the method does not, on any mesh.
    """

    method: str
    reason: str
    axes: Mapping[str, int] | None = None

    def __str__(self) -> str:
        where = "" if self.axes is None else f" on {mesh_of(self.axes)}"
        return f"no {self.method}{where}: {self.reason}"


@dataclass(frozen=True, slots=True)
class SamplingWish:
    """Values that are given and not chosen; None leaves one to the choice.

    Methods without patches or synchronous steps at the start fit whatever is asked of those.

    Attributes:
        num_patches: Of PipeFusion.
        warmup_steps: Of PipeFusion and DistriFusion.
        data: Size of the data axis of the mesh; so are the next three.
        guidance: Of the guidance axis.
        parallel: Of the axis of stages or bands.
        sequence: Of the sequence axis.
        sequence_mode: How ranks that share tokens attend, "ulysses" or "ring".
        methods: Those that may be taken.
        refused: What was chosen before, and did not work.
    """

    num_patches: int | None = None
    warmup_steps: int | None = None
    data: int | None = None
    guidance: int | None = None
    parallel: int | None = None
    sequence: int | None = None
    sequence_mode: str | None = None
    methods: tuple[str, ...] | None = None
    refused: tuple[Refusal, ...] = ()

    def admits(self, method: str, axes: Mapping[str, int]) -> bool:
        """Returns whether a method on a mesh is as asked.

        Example:
            >>> mesh = {"data": 1, "guidance": 2, "parallel": 4, "sequence": 1}
            >>> SamplingWish(parallel=4).admits("pipefusion", mesh)
            True
            >>> SamplingWish(data=2, guidance=2).admits("pipefusion", mesh)
            False
            >>> mixes_tokens = Refusal("pipefusion", "tokens are mixed")
            >>> SamplingWish(refused=(mixes_tokens,)).admits("pipefusion", mesh)
            False
        """
        if any(r.method == method and r.axes in (None, axes) for r in self.refused):
            return False
        if self.methods is not None and method not in self.methods:
            return False
        return all(getattr(self, name) in (None, axes[name]) for name in _AXES)

    def __str__(self) -> str:
        sizes = ((name, getattr(self, name)) for name in _AXES)
        given = [f"{name}={size}" for name, size in sizes if size is not None]
        if self.methods is not None:
            given.append(f"a method among {', '.join(self.methods)}")
        return ", ".join(given)


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
        """Returns whether Ulysses works on so many ranks."""
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
        parallel, sequence = self.ranks, self.sequence
        if self.method == "sequence":
            parallel, sequence = 1, self.ranks
        return dict(zip(_AXES, (self.data, self.guidance, parallel, sequence), strict=True))

    @property
    def mesh(self) -> str:
        """The axes that have several ranks, as text."""
        return mesh_of(self.axes)


def share_of_samples(profile: DenoiserProfile, data: int) -> float:
    """Returns the share of the samples that each of so many parts of the data axis has at most."""
    return math.ceil(profile.num_samples / data) / profile.num_samples


def candidates(
    profile: DenoiserProfile,
    link: Link,
    num_ranks: int,
    num_steps: int,
    wish: SamplingWish | None = None,
) -> Iterator[SamplingChoice]:
    """Yields every way to sample that is as wished, with its expected time. See `choose_sampling`."""
    wish = wish or SamplingWish()
    found: list[SamplingChoice] = []
    for data in range(1, num_ranks + 1):
        if num_ranks % data or data > max(profile.num_samples, 1):
            continue
        for guidance in range(1, min(profile.branches, 2) + 1):
            ranks, rest = divmod(num_ranks // data, guidance)
            if not rest:
                found += _Ways(profile, link, num_steps, wish, data, guidance, ranks)
    found.append(SamplingChoice("single", num_steps * profile.step_s, 1, 1, 1))
    yield from (choice for choice in found if wish.admits(choice.method, choice.axes))


@dataclass(frozen=True)
class _Ways:
    """All ways to sample in which so many ranks share one branch of some samples; see `candidates`.

    Attributes:
        data: Size of the data axis.
        guidance: Size of the guidance axis; of two halves each sends its predictions to the other.
        ranks: Ranks that share the work.
    """

    profile: DenoiserProfile
    link: Link
    num_steps: int
    wish: SamplingWish
    data: int
    guidance: int
    ranks: int

    def __iter__(self) -> Iterator[SamplingChoice]:
        profile, ranks = self.profile, self.ranks
        if ranks == 1:
            step_s = self.of_work * profile.step_s + self.exchange_s(1)
            yield self.way("single", self.num_steps * step_s)
            return
        can_share = bool(profile.num_blocks and profile.num_attention and profile.shares_tokens)
        if can_share and ranks <= profile.num_units:
            mode, trade_s = self.trade(ranks)
            blocks_s = (profile.step_s - profile.glue_s) / ranks
            step_s = self.of_work * (profile.glue_s + blocks_s) + trade_s + self.exchange_s(ranks)
            yield self.way("sequence", self.num_steps * step_s, sequence_mode=mode)
        if ranks <= profile.num_units:
            yield from self.bands()
        if self.num_steps < MIN_STEPS:
            return
        for stages in (n for n in range(2, ranks + 1) if ranks % n == 0):
            per_stage = ranks // stages
            if stages > profile.num_blocks or (per_stage > 1 and not can_share):
                continue
            # Each patch has a row for every rank of a stage.
            most, wished = profile.num_units // per_stage, self.wish.num_patches
            tried = {min(n, most) for n in (stages, stages + 1, 2 * stages, 4 * stages)}
            for patches in sorted(tried) if wished is None else (wished,):
                if 0 < patches <= most:
                    yield self.pipefusion(stages, per_stage, patches)

    @property
    def of_work(self) -> float:
        """The share of all samples and branches."""
        return share_of_samples(self.profile, self.data) / self.guidance

    @property
    def prediction_bytes(self) -> float:
        """Bytes of one prediction of one branch, for their samples."""
        return share_of_samples(self.profile, self.data) * self.profile.latent_bytes

    def way(self, method: str, seconds: float, **more: Any) -> SamplingChoice:
        """Makes a choice of these ranks, or of as many as `more` says."""
        own = {"data": self.data, "guidance": self.guidance, "ranks": self.ranks}
        return SamplingChoice(method, seconds, **(own | more))

    def exchange_s(self, parts: int) -> float:
        """Returns seconds to swap one of so many parts of a prediction with the other half of guidance."""
        return self.link.seconds(self.prediction_bytes / parts) if self.guidance == 2 else 0.0

    def trade(
        self, ranks: int, stages: int = 1, turns: int = 1, parts: int = 1
    ) -> tuple[str, float]:
        """Returns how ranks that share tokens attend, and seconds of what they send each other.

        Args:
            ranks: Of a stage; there are no messages if it is one.
            stages: Of the pipeline.
            turns: Runs of the stage; each sends the messages of all its calls of attention.
            parts: The turns compute one of so many parts of a step.
        """
        profile, peers = self.profile, ranks - 1
        if not peers:
            return "", 0.0
        mode = self.wish.sequence_mode or ("ulysses" if profile.spreads_heads(ranks) else "ring")
        if mode == "ulysses":
            num_bytes, messages = profile.sequence_bytes * peers / ranks**2, 2 * peers
        else:
            num_bytes, messages = profile.key_value_bytes * peers / ranks, peers
        sent_s = self.of_work * num_bytes / stages / parts / self.link.bandwidth_bytes_per_s
        return (
            mode,
            sent_s + turns * messages * profile.num_attention / stages * self.link.latency_s,
        )

    def bands(self) -> Iterator[SamplingChoice]:
        """Yields methods with bands of rows, which are waited for or one step old."""
        profile, link, num_steps, others = self.profile, self.link, self.num_steps, self.ranks - 1
        peers = others / self.ranks
        sent = self.of_work * (profile.key_value_bytes * peers + 2 * profile.halo_bytes)
        sent_s = sent / link.bandwidth_bytes_per_s
        # Operators of each kind, and to how many ranks each sends: all others, or two neighbours.
        kinds = [(profile.num_attention, others), (profile.num_norms, others)]
        kinds.append((profile.num_halos, min(2, others)))

        def transport_s(operators_of_a_message: int) -> float:
            messages = sum(-(-count // operators_of_a_message) * to for count, to in kinds)
            return sent_s + messages * link.latency_s

        # Whole predictions: of the other bands first, then of the other branch of guidance.
        gather_s = link.seconds(self.prediction_bytes * peers) + self.exchange_s(1)
        compute_s = _BAND * self.of_work * profile.step_s / self.ranks
        synchronous_s = compute_s + transport_s(1) + gather_s
        yield self.way("synchronous", num_steps * synchronous_s)
        if num_steps < MIN_STEPS:
            return
        warmup = self.wish.warmup_steps
        if warmup is None:
            warmup = 4 if num_steps < 30 else 1
        displaced_s = max(compute_s, transport_s(_CALLS_PER_MESSAGE)) + gather_s
        waited_for = min(warmup, num_steps)
        seconds = waited_for * synchronous_s + (num_steps - waited_for) * displaced_s
        yield self.way("distrifusion", seconds, warmup_steps=warmup)

    def pipefusion(self, stages: int, per_stage: int, patches: int) -> SamplingChoice:
        """Makes a choice with stages of so many ranks, which share the tokens of every patch."""
        profile, halves = self.profile, self.guidance == 2
        warmup = 1 if self.wish.warmup_steps is None else self.wish.warmup_steps
        plan = PipeFusionPlan(
            self.num_steps,
            warmup,
            patches,
            stages,
            num_visits=1 if halves else profile.num_calls,
            warmup_microbatches=1 if halves else profile.warmup_microbatches,
            ranks_per_stage=per_stage,
        )
        glue_s, call_s = self.of_work * profile.glue_s, profile.call_s / stages
        blocks_s = self.of_work * (profile.step_s - profile.glue_s) / stages

        def stage_s(parts: int, turns: int) -> list[float]:
            """Returns seconds of every stage for one of so many parts of a step, which takes some turns."""
            computed = max(blocks_s - call_s, 0.0) / per_stage / parts
            _, trade_s = self.trade(per_stage, stages, turns, parts)
            each = turns * (glue_s + call_s) + computed + trade_s
            return [each] * (stages - 1) + [each + self.exchange_s(parts * per_stage)]

        timeline = plan.timeline(
            stage_s(1, plan.warmup_microbatches),
            stage_s(patches, 1),
            link=self.link,
            cut_bytes=[round(self.of_work * profile.cut_bytes / per_stage)] * (stages - 1),
            latent_bytes=round(self.prediction_bytes / per_stage),
        )
        return self.way(
            "pipefusion",
            timeline.iteration_s,
            ranks=stages,
            num_patches=patches,
            warmup_steps=warmup,
            sequence=per_stage,
            sequence_mode=self.trade(per_stage)[0],
        )


def choose_sampling(
    profile: DenoiserProfile,
    link: Link,
    num_ranks: int,
    num_steps: int,
    memory_bytes: int | None = None,
    wish: SamplingWish | None = None,
) -> SamplingChoice:
    """Chooses the fastest way to sample a request, and says why.

    Args:
        profile: Of the denoiser.
        link: Between any two ranks.
        num_ranks: All of them are used, unless nothing is gained.
        num_steps: Denoising steps.
        memory_bytes: What every rank has left for the denoiser; None means that it is no limit. If nothing
            fits, what needs least is taken.
        wish: What is given and not chosen, and what was refused.

    Raises:
        ConfigurationError: Nothing is as wished; the message lists what there is.

    Example:
        >>> profile = DenoiserProfile(1.0, 0.01, 1, 1, 28, 64, 10**7, 10**5, 10**9, 2 * 10**9, 28)
        >>> slow = Link(bandwidth_bytes_per_s=1e9, latency_s=1e-4)
        >>> choice = choose_sampling(profile, slow, num_ranks=4, num_steps=20)
        >>> choice.method, choice.num_patches
        ('pipefusion', 4)
        >>> choose_sampling(profile, slow, num_ranks=4, num_steps=4).method
        'sequence'
    """
    wish = wish or SamplingWish()
    every = list(candidates(profile, link, num_ranks, num_steps, wish))
    if not every:
        meshes: dict[str, dict[str, None]] = {}
        for choice in candidates(profile, link, num_ranks, num_steps):
            meshes.setdefault(choice.method, {})[choice.mesh] = None
        named = "; ".join(f"{method} on {', '.join(names)}" for method, names in meshes.items())
        raise ConfigurationError(
            f"method=auto cannot use {num_ranks} ranks as {wish}; these fit this request: {named}"
        )
    needs = {choice: memory_of_rank(profile, choice) for choice in every}
    limit = math.inf if memory_bytes is None else max(memory_bytes, min(needs.values()))
    found = [choice for choice in every if needs[choice] <= limit]
    best = min(found, key=lambda choice: choice.seconds)
    exact = [c for c in found if c.is_exact and c.seconds <= _TOLERANCE * best.seconds]
    chosen = min(exact, key=lambda choice: choice.seconds, default=best)
    reasons = _reasons(chosen, found, profile, num_ranks, num_steps)
    least = _best_by(needs, lambda choice: choice.method, needs.__getitem__)
    left = math.inf if memory_bytes is None else memory_bytes
    if too_large := {method: need for method, need in least.items() if need > left}:
        named = ", ".join(f"{name} {need / 1e9:.3g} GB" for name, need in sorted(too_large.items()))
        taken = ": what needs least is taken" if len(too_large) == len(least) else ""
        reasons.append(f"a rank has {left / 1e9:.3g} GB left, too little for {named}{taken}")
    if profile.num_blocks and (wish.num_patches or 0) > profile.num_units:
        reasons.append(
            f"no pipefusion: num_patches={wish.num_patches}, but there are {profile.num_units} rows"
        )
    return replace(chosen, reason="; ".join((*reasons, *map(str, wish.refused))))


def memory_of_rank(profile: DenoiserProfile, choice: SamplingChoice) -> int:
    """Returns bytes of the rank that needs most of them.

    Example:
        >>> profile = DenoiserProfile(1.0, 0.0, 1, 1, 4, 64, 0, 0, key_value_bytes=800, sequence_bytes=0,
        ...     num_attention=4, weight_bytes=5000, block_bytes=4000, activation_bytes=100)
        >>> memory_of_rank(profile, SamplingChoice("sequence", 1.0, 1, 1, ranks=2))
        5050
        >>> memory_of_rank(profile, SamplingChoice("pipefusion", 1.0, 1, 1, ranks=2, num_patches=2))
        3500
    """
    share, ranks = share_of_samples(profile, choice.data) / choice.guidance, choice.ranks
    weights = float(profile.weight_bytes)
    activations, kept = profile.activation_bytes / ranks, 0.0
    if choice.method in ("synchronous", "distrifusion"):
        activations += profile.key_value_bytes if choice.method == "distrifusion" else 0.0
        activations = max(activations, profile.activation_bytes)
    elif choice.method == "pipefusion":
        of_blocks = math.ceil(profile.num_blocks / ranks) / profile.num_blocks
        weights -= (1 - of_blocks) * profile.block_bytes
        activations = profile.activation_bytes / choice.sequence
        kept = of_blocks * profile.key_value_bytes
        kept /= 1 if choice.sequence_mode == "ring" else choice.sequence
    return math.ceil(weights + share * (activations + kept))


def _reasons(
    chosen: SamplingChoice,
    found: Sequence[SamplingChoice],
    profile: DenoiserProfile,
    num_ranks: int,
    num_steps: int,
) -> list[str]:
    """Says in clauses what was compared, and what was left out."""
    if num_ranks == 1:
        return ["there is one rank"]
    others = _best_by([c for c in found if c.method != chosen.method], lambda c: c.method)
    against = f" against {_listed(others)}" if others else ""
    reasons = [f"{chosen.method} is expected to take {chosen.seconds:.3g} s{against}"]
    meshes = _best_by([c for c in found if c.method == chosen.method], lambda c: c.mesh)
    meshes.pop(chosen.mesh)
    if meshes:
        reasons.append(f"on {chosen.mesh}, since other meshes take longer: {_listed(meshes, 2)}")
    if chosen.sequence_mode == "ring":
        ranks = chosen.axes["sequence"]
        reasons.append(f"in a ring, since heads cannot be spread over {ranks} ranks")
    if num_steps < MIN_STEPS:
        reasons.append(
            f"{num_steps} steps are too few for stale activations, which need {MIN_STEPS}"
        )
    elif chosen.is_exact and any(not c.is_exact and c.seconds < chosen.seconds for c in found):
        reasons.append("it is exact and at most a tenth slower than the fastest")
    if profile.refusal and not profile.num_blocks:
        reasons.append(f"no pipefusion: {profile.refusal}")
    return reasons


def _best_by(
    found: Iterable[SamplingChoice],
    name: Callable[[SamplingChoice], str],
    cost: Callable[[SamplingChoice], float] = lambda choice: choice.seconds,
) -> dict[str, float]:
    """Returns the lowest cost of each name: seconds, or what is asked for."""
    best: dict[str, float] = {}
    for choice in found:
        best[name(choice)] = min(cost(choice), best.get(name(choice), math.inf))
    return best


def _listed(seconds: dict[str, float], most: int | None = None) -> str:
    """Lists the fastest first."""
    named = sorted(seconds.items(), key=lambda item: item[1])[:most]
    return ", ".join(f"{name} {value:.3g} s" for name, value in named)
