"""Which method samples fastest: the best of all methods on all meshes, and its reason.

Stale activations need steps that differ little, so few-step models get an exact method. An exact method is also
taken where it costs at most a tenth more. What the methods cost is in `sampling_candidates.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from lightning_diffpipe.planning.cluster import Link
from lightning_diffpipe.planning.sampling_candidates import (
    MIN_STEPS,
    DenoiserProfile,
    SamplingChoice,
    candidates,
)

_TOLERANCE = 1.1


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
    reason = _reason(chosen, found, profile, num_ranks, num_steps)
    return replace(chosen, reason=reason)


def _reason(
    chosen: SamplingChoice,
    found: Sequence[SamplingChoice],
    profile: DenoiserProfile,
    num_ranks: int,
    num_steps: int,
) -> str:
    if num_ranks == 1:
        return "there is one rank"
    others = _best_by([c for c in found if c.method != chosen.method], lambda c: c.method)
    reason = f"{chosen.method} is expected to take {chosen.seconds:.3g} s"
    reason += f" against {_listed(others)}" if others else ""
    meshes = _best_by([c for c in found if c.method == chosen.method], lambda c: c.mesh)
    meshes.pop(chosen.mesh)
    if meshes:
        reason += f"; on {chosen.mesh}, since other meshes take longer: {_listed(meshes, 2)}"
    if chosen.sequence_mode == "ring":
        ranks = chosen.axes["sequence"]
        reason += f"; in a ring, since heads cannot be spread over {ranks} ranks"
    if num_steps < MIN_STEPS:
        reason += f"; {num_steps} steps are too few for stale activations, which need {MIN_STEPS}"
    elif chosen.is_exact and any(not c.is_exact and c.seconds < chosen.seconds for c in found):
        reason += "; it is exact and at most a tenth slower than the fastest"
    if profile.refusal and not profile.num_blocks:
        reason += f"; no pipefusion: {profile.refusal}"
    return reason


def _best_by(
    found: Sequence[SamplingChoice], name: Callable[[SamplingChoice], str]
) -> dict[str, float]:
    """Seconds of the fastest of each name."""
    best: dict[str, float] = {}
    for choice in found:
        best[name(choice)] = min(choice.seconds, best.get(name(choice), choice.seconds))
    return best


def _listed(seconds: dict[str, float], most: int | None = None) -> str:
    """The fastest first."""
    named = sorted(seconds.items(), key=lambda item: item[1])[:most]
    return ", ".join(f"{name} {value:.3g} s" for name, value in named)
