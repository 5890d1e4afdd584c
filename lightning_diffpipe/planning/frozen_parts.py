"""How the frozen work of one batch is shared over the ranks of a pipeline.

Frozen encoders depend on nothing that is trained, so that any rank may encode any sample. Each rank
takes an equal share of the batch, and all exchange the results: each sample is encoded once,
never once per stage.

    batch of 8, 2 microbatches, 4 ranks       microbatch 0      microbatch 1
                                              | E0  |  E1  |    | E2  |  E3  |
                                               rank 0 rank 1     rank 2 rank 3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_diffpipe.errors import ScheduleError


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


def encode_parts(
    microbatch_sizes: Sequence[int], num_ranks: int, splittable: bool = True
) -> tuple[EncodePart, ...]:
    """Shares the frozen work of a batch evenly.

    Args:
        microbatch_sizes: Samples of every microbatch, in order.
        num_ranks: Ranks that share the work.
        splittable: Whether frozen layers may run for some samples of a microbatch only. If they mix
            samples, whole microbatches go round robin.

    Returns:
        The parts in the order of the samples. Rank `r` of `R` gets samples `[rB/R, (r+1)B/R)` of
        the batch of `B`, one part for each microbatch it touches.

    Raises:
        ScheduleError: There is no rank, or a microbatch without samples.

    Example:
        >>> [(p.rank, p.microbatch, p.start, p.stop) for p in encode_parts([4, 2], num_ranks=2)]
        [(0, 0, 0, 3), (1, 0, 3, 4), (1, 1, 0, 2)]
    """
    if num_ranks < 1 or any(size < 1 for size in microbatch_sizes):
        raise ScheduleError(
            f"cannot share microbatches of {tuple(microbatch_sizes)} samples over {num_ranks} ranks"
        )
    pieces: list[tuple[int, int, int, int]] = []
    if not splittable:
        pieces = [(m % num_ranks, m, 0, size) for m, size in enumerate(microbatch_sizes)]
    else:
        batch_size, offset = sum(microbatch_sizes), 0
        for microbatch, size in enumerate(microbatch_sizes):
            for rank in range(num_ranks):
                start = max(rank * batch_size // num_ranks - offset, 0)
                stop = min((rank + 1) * batch_size // num_ranks - offset, size)
                if start < stop:
                    pieces.append((rank, microbatch, start, stop))
            offset += size
    return tuple(EncodePart(index, *piece) for index, piece in enumerate(pieces))
