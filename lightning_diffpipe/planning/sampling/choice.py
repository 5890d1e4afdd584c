"""Which method samples fastest: the best of all methods on all meshes, and its reason.

Stale activations need steps that differ little, so few-step models get an exact method. An exact method is also
taken where it costs at most a tenth more. What needs more memory than a rank has is left out, and so is what is not
as wished, or was chosen before and did not work. How long the methods take is in `candidates.py`.

Bytes that a rank needs besides what it holds already. Of weights w, b of them in blocks, keys and values k of all
calls of attention, and activations a of one step, with one rank's share f of the work (samples, branches of
guidance):

    one rank       w + f a
    sequence       w + f a / n
    synchronous    w + f a                                  rank 0 looks at all rows once
    distrifusion   w + f max(a, a / n + k)                  and then keys and values of all bands
    pipefusion     w - b + b / n + f (a + k / n) / q        in a ring, keys and values of all q ranks

Of k a band holds what others sent, and one message of its own under way to all of them. n ranks are next to each
other; in PipeFusion they are stages, and q ranks share the tokens of each. Synchronous steps of PipeFusion
compute all tokens at once, so patches save no activations. Blocks count as equally large.

Source:
    PipeFusion, Fang et al. (2024), https://arxiv.org/abs/2405.14430, table 1, for memory
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.planning.cluster import Link
from lightning_diffpipe.planning.sampling.candidates import (
    MIN_STEPS,
    DenoiserProfile,
    SamplingChoice,
    candidates,
)
from lightning_diffpipe.planning.sampling.wish import SamplingWish

_TOLERANCE = 1.1


def choose_sampling(
    profile: DenoiserProfile,
    link: Link,
    num_ranks: int,
    num_steps: int,
    memory_bytes: int | None = None,
    wish: SamplingWish | None = None,
) -> SamplingChoice:
    """The fastest way to sample a request, and why.

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
        there_is = candidates(profile, link, num_ranks, num_steps)
        raise ConfigurationError(_refusal(wish, list(there_is), num_ranks))
    needs = {choice: memory_of_rank(profile, choice) for choice in every}
    limit = math.inf if memory_bytes is None else max(memory_bytes, min(needs.values()))
    found = [choice for choice in every if needs[choice] <= limit]
    best = min(found, key=lambda choice: choice.seconds)
    exact = [c for c in found if c.is_exact and c.seconds <= _TOLERANCE * best.seconds]
    chosen = min(exact, key=lambda choice: choice.seconds, default=best)
    reason = _reason(chosen, found, profile, num_ranks, num_steps)
    if memory_bytes is not None:
        reason += _ruled_out(needs, memory_bytes)
    if profile.num_blocks and (wish.num_patches or 0) > profile.num_units:
        reason += f"; no pipefusion: num_patches={wish.num_patches}, but there are {profile.num_units} rows"
    reason += "".join(f"; {refusal}" for refusal in wish.refused)
    return replace(chosen, reason=reason)


def memory_of_rank(profile: DenoiserProfile, choice: SamplingChoice) -> int:
    """Bytes that the rank which needs most of them needs.

    Args:
        profile: Of the denoiser.
        choice: How to sample.

    Example:
        >>> profile = DenoiserProfile(1.0, 0.0, 1, 1, 4, 64, 0, 0, key_value_bytes=800, sequence_bytes=0,
        ...     num_attention=4, weight_bytes=5000, block_bytes=4000, activation_bytes=100)
        >>> memory_of_rank(profile, SamplingChoice("sequence", 1.0, 1, 1, ranks=2))
        5050
        >>> memory_of_rank(profile, SamplingChoice("pipefusion", 1.0, 1, 1, ranks=2, num_patches=2))
        3500
    """
    samples = math.ceil(profile.num_samples / choice.data) / profile.num_samples
    share, ranks = samples / choice.guidance, choice.ranks
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


def _refusal(wish: SamplingWish, there_is: Sequence[SamplingChoice], num_ranks: int) -> str:
    meshes: dict[str, list[str]] = {}
    for choice in there_is:
        named = meshes.setdefault(choice.method, [])
        named += [choice.mesh] * (choice.mesh not in named)
    said = "; ".join(f"{method} on {', '.join(names)}" for method, names in meshes.items())
    return f"method=auto cannot use {num_ranks} ranks as {wish}; these fit this request: {said}"


def _ruled_out(needs: Mapping[SamplingChoice, int], memory_bytes: int) -> str:
    """Says which methods do not fit on any mesh, and what they need."""
    least = _best_by(needs, lambda choice: choice.method, needs.__getitem__)
    too_large = {method: need for method, need in least.items() if need > memory_bytes}
    if not too_large:
        return ""
    said = ", ".join(f"{method} {need / 1e9:.3g} GB" for method, need in sorted(too_large.items()))
    reason = f"; a rank has {memory_bytes / 1e9:.3g} GB left, too little for {said}"
    return reason + (": what needs least is taken" if len(too_large) == len(least) else "")


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
    found: Iterable[SamplingChoice],
    name: Callable[[SamplingChoice], str],
    cost: Callable[[SamplingChoice], float] = lambda choice: choice.seconds,
) -> dict[str, float]:
    """The lowest cost of each name: seconds, or what is asked for."""
    best: dict[str, float] = {}
    for choice in found:
        best[name(choice)] = min(cost(choice), best.get(name(choice), math.inf))
    return best


def _listed(seconds: dict[str, float], most: int | None = None) -> str:
    """The fastest first."""
    named = sorted(seconds.items(), key=lambda item: item[1])[:most]
    return ", ".join(f"{name} {value:.3g} s" for name, value in named)
