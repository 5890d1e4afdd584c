"""Which method samples fastest: every method on every mesh, on paper, and the best one with its reason.

Seconds of a step, for one rank's share f of the work (samples, branches of guidance) and n ranks beside it:

    one rank       f t
    sequence       f t / n + bytes / bandwidth + latency of every message      all waited for, exact
    pipefusion     M patches of g + (c + f b / M) / n, at least a round trip    after W synchronous steps
    distrifusion   max(1.1 f t / n, transport)                                 after W synchronous steps

t is the time of a step, b of the blocks in it, g of the code between them, c of what a call of a block costs
however few tokens it gets. Stale activations need steps that differ little, so few-step models
get an exact method. An exact method is also taken where it costs at most a tenth more.

Source:
    PipeFusion, Fang et al. (2024), https://arxiv.org/abs/2405.14430, section 4 and table 1
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lightning_diffpipe.planning.cluster import Link
from lightning_diffpipe.planning.sampling_pipefusion import PipeFusionPlan

MIN_STEPS = 8
"""With fewer denoising steps, only exact methods are considered."""

_TOLERANCE = 1.1
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
            weights. Ranks share them, patches do not.
        num_samples: Samples in the request.
        branches: Branches of guidance that can be divided: 1 or 2.
        num_blocks: Blocks that can be spread over ranks; 0 if the model cannot be sampled in patches.
        num_units: Smallest slices of rows.
        cut_bytes: What crosses a cut between two blocks in a step.
        latent_bytes: Of the latents.
        key_value_bytes: Keys and values of all self-attention calls of a step.
        sequence_bytes: Queries, keys, values and results of all self-attention calls of a step.
        num_attention: Self-attention calls of a step.
        halo_bytes: Rows at one border, of all convolutions of a step.
        num_norms: Normalisations over rows in a step.
        refusal: Why patches cannot flow through it, if they cannot.
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
    refusal: str = ""


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
        reason: One line; empty for candidates.
    """

    method: str
    seconds: float
    data: int
    guidance: int
    ranks: int
    num_patches: int | None = None
    warmup_steps: int | None = None
    reason: str = ""

    @property
    def is_exact(self) -> bool:
        """Whether it gives the pictures of one process, to rounding."""
        return self.method in ("single", "sequence", "synchronous")


def choose_sampling(
    profile: DenoiserProfile, link: Link, num_ranks: int, num_steps: int
) -> SamplingChoice:
    """The fastest way to sample a request, and why.

    Args:
        profile: Of the denoiser.
        link: Between any two ranks.
        num_ranks: All of them are used, unless nothing is gained.
        num_steps: Denoising steps.

    Example:
        >>> profile = DenoiserProfile(1.0, 0.01, 1, 1, 28, 64, 10**7, 10**5, 10**9, 2 * 10**9, 28)
        >>> slow = Link(bandwidth_bytes_per_s=1e9, latency_s=1e-4)
        >>> choice = choose_sampling(profile, slow, num_ranks=4, num_steps=20)
        >>> choice.method, choice.num_patches
        ('pipefusion', 4)
        >>> choose_sampling(profile, slow, num_ranks=4, num_steps=4).method
        'sequence'
    """
    found = list(candidates(profile, link, num_ranks, num_steps))
    best = min(found, key=lambda choice: choice.seconds)
    exact = min((c for c in found if c.is_exact), key=lambda choice: choice.seconds)
    chosen = exact if exact.seconds <= _TOLERANCE * best.seconds else best
    return _with_reason(chosen, found, profile, num_ranks, num_steps)


def candidates(
    profile: DenoiserProfile, link: Link, num_ranks: int, num_steps: int
) -> Iterator[SamplingChoice]:
    """Every way to sample, with its expected time."""
    for data in range(1, num_ranks + 1):
        if num_ranks % data or data > max(profile.num_samples, 1):
            continue
        for guidance in (1, 2):
            if (num_ranks // data) % guidance or guidance > profile.branches:
                continue
            ranks = num_ranks // data // guidance
            share = -(-profile.num_samples // data) / profile.num_samples / guidance
            # Halves of guidance exchange their predictions at every step.
            extra_s = link.seconds(share * profile.latent_bytes) if guidance == 2 else 0.0
            for choice in _of_mesh(profile, link, num_steps, share, ranks):
                seconds = choice.seconds + num_steps * extra_s * (choice.num_patches or 1)
                yield replace(choice, seconds=seconds, data=data, guidance=guidance)
    yield SamplingChoice("single", num_steps * profile.step_s, 1, 1, 1)


def _of_mesh(
    profile: DenoiserProfile, link: Link, num_steps: int, share: float, ranks: int
) -> Iterator[SamplingChoice]:
    """Every method on the ranks that share one branch of some samples."""
    step_s = share * profile.step_s
    if ranks == 1:
        yield SamplingChoice("single", num_steps * step_s, 1, 1, 1)
        return
    if profile.num_blocks and profile.num_attention:
        sent = share * profile.sequence_bytes * (ranks - 1) / ranks**2
        latency_s = 2 * profile.num_attention * (ranks - 1) * link.latency_s
        step = step_s / ranks + sent / link.bandwidth_bytes_per_s + latency_s
        yield SamplingChoice("sequence", num_steps * step, 1, 1, ranks)
    if ranks <= profile.num_units:
        yield from _bands(profile, link, num_steps, share, ranks)
    if num_steps >= MIN_STEPS and ranks <= profile.num_blocks:
        for patches in _patches(ranks, profile.num_units):
            seconds = _pipefusion_s(profile, link, num_steps, share, ranks, patches)
            yield SamplingChoice("pipefusion", seconds, 1, 1, ranks, patches, 1)


def _bands(
    profile: DenoiserProfile, link: Link, num_steps: int, share: float, ranks: int
) -> Iterator[SamplingChoice]:
    """Bands of rows, waited for or one step old."""
    peers = (ranks - 1) / ranks
    sent = share * (profile.key_value_bytes * peers + 2 * profile.halo_bytes)
    latency_s = (profile.num_attention + profile.num_norms) * (ranks - 1) * link.latency_s
    transport_s = sent / link.bandwidth_bytes_per_s + latency_s
    gather_s = link.seconds(share * profile.latent_bytes * peers)
    compute_s = _BAND * share * profile.step_s / ranks
    synchronous_s = compute_s + transport_s + gather_s
    yield SamplingChoice("synchronous", num_steps * synchronous_s, 1, 1, ranks)
    if num_steps >= MIN_STEPS:
        warmup = 4 if num_steps < 30 else 1
        displaced_s = max(compute_s, transport_s) + gather_s
        seconds = warmup * synchronous_s + (num_steps - warmup) * displaced_s
        yield SamplingChoice("distrifusion", seconds, 1, 1, ranks, None, warmup)


def _patches(ranks: int, num_units: int) -> list[int]:
    wished = {ranks, ranks + 1, 2 * ranks, 4 * ranks}
    return sorted({min(count, num_units) for count in wished})


def _pipefusion_s(
    profile: DenoiserProfile, link: Link, num_steps: int, share: float, ranks: int, patches: int
) -> float:
    plan = PipeFusionPlan(num_steps, 1, patches, ranks)
    glue_s = share * profile.glue_s
    call_s = profile.call_s / ranks
    blocks_s = share * (profile.step_s - profile.glue_s) / ranks
    timeline = plan.timeline(
        [glue_s + blocks_s] * ranks,
        [glue_s + call_s + max(blocks_s - call_s, 0.0) / patches] * ranks,
        link=link,
        cut_bytes=[round(share * profile.cut_bytes)] * (ranks - 1),
        latent_bytes=round(share * profile.latent_bytes),
    )
    return timeline.iteration_s


def _with_reason(
    chosen: SamplingChoice,
    found: list[SamplingChoice],
    profile: DenoiserProfile,
    num_ranks: int,
    num_steps: int,
) -> SamplingChoice:
    if num_ranks == 1:
        return replace(chosen, reason="there is one rank")
    others: dict[str, float] = {}
    for choice in found:
        if choice.method != chosen.method:
            others[choice.method] = min(choice.seconds, others.get(choice.method, choice.seconds))
    named = sorted(others.items(), key=lambda item: item[1])
    against = ", ".join(f"{method} {seconds:.3g} s" for method, seconds in named)
    reason = f"{chosen.method} is expected to take {chosen.seconds:.3g} s"
    reason += f" against {against}" if against else ""
    if num_steps < MIN_STEPS:
        reason += f"; {num_steps} steps are too few for stale activations, which need {MIN_STEPS}"
    elif chosen.is_exact and any(not c.is_exact and c.seconds < chosen.seconds for c in found):
        reason += "; it is exact and at most a tenth slower than the fastest"
    if profile.refusal and not profile.num_blocks:
        reason += f"; no pipefusion: {profile.refusal}"
    return replace(chosen, reason=reason)
