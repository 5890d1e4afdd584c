"""How the frozen work of one batch is shared over the ranks of a pipeline.

Frozen encoders depend on nothing that is trained, so that any rank may encode any sample. Each rank
takes a share of the batch, and all exchange the results: each sample is encoded once, never once per
stage. Without bubbles to fill the shares are equal.

    batch of 8, 2 microbatches, 4 ranks       microbatch 0      microbatch 1
                                              | E0  |  E1  |    | E2  |  E3  |
                                               rank 0 rank 1     rank 2 rank 3
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lightning_diffpipe.errors import ScheduleError

BATCHES_AHEAD = 2
"""Batches whose frozen work may run before they are due, if bubbles are filled. With one, ranks that have done
their share of it wait for each other in every step."""

SHARES_PERIOD = 16
"""Batches over which the shares of the ranks are whole numbers of groups, where frozen work runs several batches
ahead: of one batch a rank takes two groups, of the next three. With 4 batches of 4 groups, ranks were apart by up
to 1/32 of the frozen work in every step, about as long as they waited."""


@dataclass(frozen=True, slots=True)
class EncodePart:
    """The frozen work for some samples of one microbatch.

    Attributes:
        index: Number of this part; what `Encode` names.
        rank: Rank of the pipeline that does it.
        microbatch: The microbatch whose samples these are.
        start: First sample, counted within the microbatch.
        stop: One past the last sample, counted within the microbatch.
    """

    index: int
    rank: int
    microbatch: int
    start: int
    stop: int

    @property
    def num_samples(self) -> int:
        """Samples of this part."""
        return self.stop - self.start


def split_evenly(num_samples: int, num_parts: int) -> tuple[int, ...]:
    """Sizes of `num_parts` parts: as even as possible, larger ones first.

    Example:
        >>> split_evenly(10, 4)
        (3, 3, 2, 2)
    """
    small, num_larger = divmod(num_samples, num_parts)
    return (small + 1,) * num_larger + (small,) * (num_parts - num_larger)


def cheapest_group_size(
    seconds: Callable[[int], float], microbatch_sizes: Sequence[int], num_ranks: int
) -> int:
    """Samples on which frozen layers run at a time, where it is known what that costs.

    Ranks take whole groups, within `SHARES_PERIOD` batches; half of one is lost in them on average. The size,
    a power of two of which each rank gets at least two, for which a rank's groups and that loss take least
    time.

    Args:
        seconds: Time of so many samples through all frozen layers at once.
        microbatch_sizes: Samples of every microbatch.
        num_ranks: Ranks that share the work.

    Example:
        >>> cheapest_group_size(lambda samples: samples, [16, 16], num_ranks=2)
        1
        >>> cheapest_group_size(lambda samples: 1 + samples, [16, 16], num_ranks=2)
        8
    """
    share = sum(microbatch_sizes) / num_ranks
    most = max(1, min(int(share) // 2, *microbatch_sizes))
    sizes = [1 << shift for shift in range(most.bit_length())]
    lost = 0.5 / SHARES_PERIOD if num_ranks > 1 else 0.0
    return min(sizes, key=lambda size: (share / size + lost) * seconds(size))


def group_size_of(microbatch_sizes: Sequence[int], num_ranks: int) -> int:
    """Samples on which frozen layers run at a time, where nothing is known of what that costs.

    A share is a number of groups, so small groups balance better, and large ones run faster: groups have
    four samples where each rank then gets two of them, and more where it gets four. Within half of that,
    the size that leaves the fewest groups half empty.

    Example:
        >>> group_size_of([16, 16], num_ranks=2), group_size_of([4, 4], 4), group_size_of([128] * 4, 8)
        (4, 1, 16)
        >>> group_size_of([16, 16, 16], num_ranks=2)
        4
    """
    samples = sum(microbatch_sizes)
    most = max(samples // (4 * num_ranks), min(4, samples // (2 * num_ranks)))
    most = max(1, min(most, min(microbatch_sizes)))

    def unused(group_size: int) -> int:
        return sum(-size % group_size for size in microbatch_sizes)

    return min(range(most // 2 + 1, most + 1), key=lambda size: (unused(size), -size))


def num_groups_of(microbatch_sizes: Sequence[int], group_size: int) -> int:
    """Groups of a batch; a group never spans two microbatches."""
    return len(group_samples(microbatch_sizes, group_size))


def group_samples(microbatch_sizes: Sequence[int], group_size: int) -> tuple[int, ...]:
    """Samples of every group of a batch, in order.

    Example:
        >>> group_samples([6, 3], group_size=4)
        (4, 2, 3)
    """
    return tuple(
        min(group_size, size - start)
        for size in microbatch_sizes
        for start in range(0, size, group_size)
    )


def grouped_s(seconds: Callable[[float], float], samples: float, group_size: int | None) -> float:
    """Seconds for samples that run group by group; in one go if `group_size` is None.

    Example:
        >>> grouped_s(lambda samples: 1 + samples, 5, group_size=2)
        8
    """
    if group_size is None or samples <= group_size:
        return seconds(samples)
    groups, rest = divmod(samples, group_size)
    return groups * seconds(group_size) + (seconds(rest) if rest else 0)


def encode_parts(
    microbatch_sizes: Sequence[int],
    num_ranks: int,
    splittable: bool = True,
    group_size: int = 1,
    groups: Sequence[int] | None = None,
) -> tuple[EncodePart, ...]:
    """Shares the frozen work of a batch.

    Args:
        microbatch_sizes: Samples of every microbatch, in order.
        num_ranks: Ranks that share the work.
        splittable: Whether frozen layers may run for some samples of a microbatch only. If they mix
            samples, every microbatch is one group.
        group_size: Samples of a group, which stays on one rank; the last of a microbatch may have
            fewer.
        groups: How many groups each rank takes; as even as possible if not given.

    Returns:
        The parts in the order of the samples, one for each microbatch a rank's run of groups touches.

    Raises:
        ScheduleError: There is no rank, a microbatch without samples, or `groups` do not add up.

    Example:
        >>> [(p.rank, p.microbatch, p.start, p.stop) for p in encode_parts([4, 2], num_ranks=2)]
        [(0, 0, 0, 3), (1, 0, 3, 4), (1, 1, 0, 2)]
    """
    if num_ranks < 1 or group_size < 1 or any(size < 1 for size in microbatch_sizes):
        raise ScheduleError(
            f"cannot share microbatches of {tuple(microbatch_sizes)} samples in groups of "
            f"{group_size} over {num_ranks} ranks"
        )
    if not splittable:
        group_size = max(microbatch_sizes)
    total = num_groups_of(microbatch_sizes, group_size)
    if groups is None:
        bounds = [rank * total // num_ranks for rank in range(num_ranks + 1)]
        groups = [stop - start for start, stop in pairwise(bounds)]
    if sum(groups) != total or len(groups) != num_ranks or min(groups) < 0:
        raise ScheduleError(f"{total} groups cannot be shared as {tuple(groups)}")
    owners = (rank for rank, count in enumerate(groups) for _ in range(count))
    pieces: list[tuple[int, int, int, int]] = []
    for microbatch, size in enumerate(microbatch_sizes):
        for start in range(0, size, group_size):
            rank, stop = next(owners), min(start + group_size, size)
            if pieces and pieces[-1][:2] == (rank, microbatch):
                start = pieces.pop()[2]
            pieces.append((rank, microbatch, start, stop))
    return tuple(EncodePart(index, *piece) for index, piece in enumerate(pieces))
