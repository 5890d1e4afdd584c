"""Chains: several backbones trained by one step, each cut into a stage for every rank, in opposite directions.

What one chain leaves idle the other uses, so that the stages of both on a rank count together:

    rank              0        1        2             the joint partition makes the largest sum
    backbone A      a0 a1    a2 a3      a4            of what a rank has of A and of B as small
    backbone B      b4 b5      b3     b0 b1 b2        as can be

To all other schedules the backbones are one chain, the second behind the first.

Source:
    DiffusionPipe, Tian et al. (2024), https://arxiv.org/abs/2405.01248: the idea; the recurrence is ours.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise, takewhile

from lightning_diffpipe.errors import PartitionError
from lightning_diffpipe.planning.partition import even_cuts
from lightning_diffpipe.planning.profile import BackboneProfile, ModelProfile, Seconds, Skip

_FIRST_SLACK = 0.02


def joined(profile: ModelProfile, apart: bool = False) -> ModelProfile:
    """A profile of one backbone that has the layers of all, one behind the other; as it is if there is one.

    Args:
        profile: A profile.
        apart: Backbones stay chains of their own, whose stages lie on the same ranks: nothing crosses from one to
            the next, and `BackboneProfile.chains` names them. Else what the loss reads of the earlier
            ones passes all later ones.
    """
    if len(profile.backbones) == 1:
        return profile
    starts = tuple(accumulate((len(b.layers) for b in profile.backbones[:-1]), initial=0))
    layers, skips, passing = [], list[Skip](), 0
    for start, backbone in zip(starts, profile.backbones, strict=True):
        ends, num_layers = backbone.layers[-1].boundary_bytes_per_sample, len(backbone.layers)
        for layer in backbone.layers:
            across = layer.boundary_bytes_per_sample + passing
            if apart and layer is backbone.layers[-1]:
                across = 0
            layers.append(replace(layer, boundary_bytes_per_sample=across))
        skips += [
            Skip(
                skip.bytes_per_sample,
                start + skip.made,
                tuple([
                    start + reader if reader < num_layers or apart else sum(map(_size, profile.backbones))
                    for reader in skip.readers
                ]),
            )
            for skip in backbone.skips
        ]  # fmt: skip
        passing += 0 if apart else ends
    whole = BackboneProfile(
        "+".join(b.name for b in profile.backbones),
        tuple(layers),
        next((b.repeated_s for b in profile.backbones if b.repeated_s), None),
        _sum([b.split_s for b in profile.backbones if b.split_s]),
        tuple(sorted(skips, key=lambda skip: (skip.bytes_per_sample, skip.made))),
        chains=tuple(zip([b.name for b in profile.backbones], starts, strict=True))
        if apart
        else (),
    )
    return replace(profile, backbones=(whole,))


def separated(profile: ModelProfile, starts: Sequence[int]) -> ModelProfile:
    """A profile of one backbone per chain from that of all their layers in call order; as it is if there is one.

    Args:
        profile: A profile of one backbone.
        starts: Where its chains begin.
    """
    (whole,) = profile.backbones
    if len(starts) == 1 or whole.passes:
        return profile
    times_s = [layer.backward_s.at(1) for layer in whole.layers]
    backbones: list[BackboneProfile] = []
    for first, stop in pairwise((*starts, len(whole.layers))):
        passing = whole.layers[first - 1].boundary_bytes_per_sample if first else 0
        layers = [
            replace(
                layer, boundary_bytes_per_sample=max(layer.boundary_bytes_per_sample - passing, 0)
            )
            for layer in whole.layers[first:stop]
        ]
        share = sum(times_s[first:stop]) / (sum(times_s) or 1.0)
        skips = [
            Skip(
                skip.bytes_per_sample,
                skip.made - first,
                tuple([min(reader, stop) - first for reader in skip.readers]),
            )
            for skip in whole.skips
            if first
            <= skip.made
            < stop - 1  # what the loss reads of the last layer skips nothing here
        ]
        name = _common_name([layer.name for layer in layers])
        if not name or name in {b.name for b in backbones} | {e.name for e in profile.encoders}:
            name = f"{name or 'backbone'}_{len(backbones)}"
        split_s = whole.split_s and whole.split_s.scaled(share)
        backbones.append(
            BackboneProfile(name, tuple(layers), whole.repeated_s, split_s, tuple(skips))
        )
    return replace(profile, backbones=tuple(backbones))


def _common_name(names: Sequence[str]) -> str:
    """The modules that all names begin with."""
    parts = zip(*(name.split(".") for name in names), strict=False)
    return ".".join(part for part, *_ in takewhile(lambda same: len(set(same)) == 1, parts))


def _size(backbone: BackboneProfile) -> int:
    return len(backbone.layers)


def _sum(times: Sequence[Seconds]) -> Seconds | None:
    counts = {samples for seconds in times for samples, _ in seconds.points}
    return (
        Seconds.of({n: sum(seconds.at(n) for seconds in times) for n in counts}) if times else None
    )


def chain_cuts(
    weights: Sequence[float], starts: Sequence[int], num_ranks: int, slack: float = 0.0
) -> tuple[int, ...]:
    """Cuts all chains, neighbours in pairs, so that the fullest rank has as little as can be.

    Args:
        weights: Time, or bytes, of every layer.
        starts: Where the chains begin.
        num_ranks: Stages of every chain.
        slack: See `opposite_cuts`.

    Returns:
        The first layer of every stage.

    Raises:
        PartitionError: A chain has fewer layers than there are ranks.
    """
    firsts: list[int] = []
    chains = list(pairwise((*starts, len(weights))))
    for (first, stop), other in zip(chains[::2], [*chains[1::2], None], strict=False):
        if other is None:
            firsts += [first + cut for cut in even_cuts(weights[first:stop], num_ranks)]
            continue
        down, up = opposite_cuts(weights[first:stop], weights[slice(*other)], num_ranks, slack)
        firsts += [first + cut for cut in down] + [other[0] + cut for cut in up]
    return tuple(firsts)


def opposite_cuts(
    down: Sequence[float], up: Sequence[float], num_ranks: int, slack: float = 0.0
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Cuts two chains that run in opposite directions so that the fullest rank has as little as can be. Exact.

    The state after some ranks is how many layers of either chain they hold. Only states are visited in which no
    rank needs more than a limit, a little above an even share; where there is no way, the limit is raised. Of all
    ways that are as good, the one is taken whose stages are most even within each chain: then they fill and drain
    fastest.

    Args:
        down: Weight of every layer of the chain from the first rank to the last.
        up: Weight of every layer of the chain from the last rank to the first.
        num_ranks: Ranks; each gets a layer or more of either.
        slack: Share by which the fullest rank may have more than necessary, so that stages are more even.

    Returns:
        The first layer of every stage of both chains.

    Raises:
        PartitionError: A chain has fewer layers than there are ranks.

    Example:
        >>> opposite_cuts([1, 1, 1, 1], [4, 1, 1, 1, 1], num_ranks=2)
        ((0, 2), (0, 1))
    """
    if min(len(down), len(up)) < num_ranks:
        raise PartitionError(
            f"cannot cut backbones of {len(down)} and {len(up)} layers into {num_ranks} stages each; use fewer "
            "ranks for each pipeline, or a finer probe (a smaller max_share)"
        )
    a, b = [0.0, *accumulate(down)], [0.0, *accumulate(reversed(up))]
    fullest = lambda so_far, one, other: max(so_far, one + other)
    even_share, above, found = (a[-1] + b[-1]) / num_ranks, _FIRST_SLACK, None
    while found is None:
        found = _ways(a, b, num_ranks, even_share * (1 + above) + 1e-12, fullest)
        above *= 2
    most = found[0] * (1 + max(slack, 1e-9))
    uneven = lambda so_far, one, other: so_far + one * one + other * other
    _, edges = _ways(a, b, num_ranks, most, uneven) or found
    last = len(up)
    return tuple(i for i, _ in edges[:-1]), tuple(last - j for _, j in reversed(edges[1:]))


_Way = tuple[float, tuple[tuple[int, int], ...]]


def _ways(
    a: Sequence[float],
    b: Sequence[float],
    num_ranks: int,
    limit: float,
    cost: Callable[[float, float, float], float],
) -> _Way | None:
    """The cheapest way to cut two chains if no rank needs more than a limit.

    Args:
        a: Running sums over one chain.
        b: Running sums over the other, from its end.
        num_ranks: Ranks.
        limit: The most that a rank may have of both together.
        cost: Of a way, from that of a shorter one and what the next rank has of either chain.

    Returns:
        Its cost, and how many layers of either chain lie in front of each rank, and in all; None if there is none.
    """
    level: dict[tuple[int, int], _Way] = {(0, 0): (0.0, ((0, 0),))}
    for later in range(num_ranks - 1, -1, -1):
        reached: dict[tuple[int, int], _Way] = {}
        least = a[-1] + b[-1] - (later + 1e-9) * limit  # what ranks up to this one must have
        for (i, j), (so_far, edges) in level.items():
            for k in range(i + 1 if later else len(a) - 1, len(a) - later):
                left = limit - (a[k] - a[i])
                if left < 0:
                    break
                lowest = max(j + 1 if later else len(b) - 1, bisect_left(b, least - a[k]))
                for m in range(lowest, min(len(b) - later, bisect_right(b, b[j] + left))):
                    value = cost(so_far, a[k] - a[i], b[m] - b[j])
                    if (k, m) not in reached or value < reached[k, m][0]:
                        reached[k, m] = value, (*edges, (k, m))
        level = reached
    return level.get((len(a) - 1, len(b) - 1))
