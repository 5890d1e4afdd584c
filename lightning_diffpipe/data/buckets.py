"""Images of several shapes: each becomes one of a few sizes of the same area, and a batch has one size.

    resolution 512, step 64:   1024x256  896x256 ... 576x448  512x512  448x576 ... 256x1024

An image gets the size whose ratio of sides is nearest to its own. One that is smaller keeps its pixels: sides of
the size that are longer than its own are cut to multiples of the step. A bucket is all samples of one size (and
number of frames, of videos, or number and sizes of reference images); an epoch takes each of them once, in an order
of its own.

Source:
    Buckets of aspect ratios: NovelAI (2022), https://blog.novelai.net/novelai-improvements-on-stable-diffusion-e10d38db82ac
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle, islice
from typing import Any, Literal, NamedTuple

import torch
from torch.utils.data import Dataset, Sampler

from lightning_diffpipe.data.captioned import Batch, Sample, collate
from lightning_diffpipe.errors import ConfigurationError

Last = Literal["filled", "dropped", "smaller"]


class Shape(NamedTuple):
    """Height and width in pixels, of videos the number of frames, and heights and widths of reference images."""

    height: int
    width: int
    num_frames: int | None = None
    references: tuple[tuple[int, int], ...] = ()

    @property
    def num_pixels(self) -> int:
        """Pixels of all frames and references."""
        own = self.height * self.width * (self.num_frames or 1)
        return own + sum(height * width for height, width in self.references)

    def __str__(self) -> str:
        """Returns width x height, as images are described."""
        frames = "" if self.num_frames is None else f", {self.num_frames} frames"
        others = " + ".join(f"{width}x{height}" for height, width in self.references)
        return f"{self.width}x{self.height}{frames}" + f" of {others}" * bool(others)


@dataclass(frozen=True)
class Sizes:
    """The sizes that images are given.

    Attributes:
        resolution: Side of the square whose area no size exceeds; sides are between half and twice of it.
        step: Number of pixels of which sides are multiples.
        enlarge: Whether an image may be given a size in which it is enlarged.

    Example:
        >>> Sizes(512, 64).of(height=1080, width=1920), Sizes(512, 64).of(height=300, width=200)
        ((384, 640), (256, 192))
    """

    resolution: int
    step: int
    enlarge: bool = False

    @cached_property
    def all(self) -> list[tuple[int, int]]:
        """Heights and widths."""
        step, area, least = self.step, self.resolution**2, max(self.step, self.resolution // 2)
        first = math.ceil(least / step) * step
        wide = [(area // width // step * step, width) for width in range(first, area, step)]
        wide = [(high, width) for high, width in wide if least <= high <= width]
        return sorted({*wide, *((width, high) for high, width in wide)})

    def of(self, height: int, width: int) -> tuple[int, int]:
        """Returns height and width for an image of this size, or raises ConfigurationError below one step."""
        nearest = min(self.all, key=lambda size: abs(math.log(size[1] / size[0] * height / width)))
        if self.enlarge:
            return nearest
        high, wide = (
            min(side, length // self.step * self.step)
            for side, length in zip(nearest, (height, width), strict=True)
        )
        if not (high and wide):
            raise ConfigurationError(
                f"{width}x{height} pixels are less than one step of {self.step} (data.bucket_step), and nothing is "
                "enlarged without data.enlarge=true"
            )
        return high, wide


def grouped(shapes: Sequence[Shape]) -> dict[Shape, list[int]]:
    """Returns the indices of the samples of each shape, the largest group first."""
    groups: dict[Shape, list[int]] = {}
    for place, shape in enumerate(shapes):
        groups.setdefault(shape, []).append(place)
    return dict(sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])))


def small(buckets: Mapping[Shape, Sequence[int]], size: int) -> str:
    """Returns a text that names buckets smaller than a batch; empty if there are none."""
    few = [f"{shape}: {len(m)}" for shape, m in buckets.items() if len(m) < size]
    counts = f"{len(few)} of {len(buckets)} buckets have fewer than the {size} samples of"
    return f"{counts} a batch ({'; '.join(few)})" if few else ""


def described(buckets: Mapping[Shape, Sequence[int]], size: int, last: Last | None) -> str:
    """Returns a text with the number of batches in an epoch, and of samples that are repeated or left out.

    `last` is None where all samples have one shape.
    """
    batches = BucketBatches(list(buckets.values()), size, last or "dropped", shuffle=True)
    counts, num_batches = [len(members) for members in batches.buckets], len(batches)
    num_samples = sum(counts)
    more = num_batches * size - num_samples
    clause = {
        "filled": f"; {more} of these are seen again, to fill last batches",
        "dropped": f"; {-more} are left out in each epoch, of incomplete batches",
        "smaller": f"; {sum(count % size > 0 for count in counts)} of these are smaller",
    }[batches.last]
    text = f"{num_samples} samples in {len(counts)} buckets make {num_batches} batches of {size}"
    note = f". {small(buckets, size)}" if small(buckets, size) else ""
    return f"{text}{clause} (data.last_batch={last}){note}" if last else f"{text}{clause}"


@dataclass(eq=False)
class BucketBatches(Sampler[list[int]]):
    """Batches of places of samples, each out of one bucket.

    Attributes:
        buckets: Places of the samples of each bucket. An epoch begins with a batch of the first one, by which a run
            is planned: give that of the largest samples, which take most memory.
        last: Treatment of a bucket's last batch if it is incomplete: it is `"filled"` with samples of the bucket
            again, `"dropped"`, or is `"smaller"`.
        shuffle: Whether samples and batches come in a random order, by the global generator, or as they are given.
    """

    buckets: Sequence[Sequence[int]]
    batch_size: int
    last: Last
    shuffle: bool

    def __len__(self) -> int:
        """Returns the number of batches."""
        return sum(self.num_batches(len(members)) for members in self.buckets)

    def num_batches(self, count: int) -> int:
        """Returns how many batches a bucket of so many samples makes."""
        return count // self.batch_size if self.last == "dropped" else -(-count // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        batches = []
        for members in self.buckets:
            order = self._order(members)
            chosen = cycle(order) if self.last == "filled" else iter(order)
            batches += [
                list(islice(chosen, self.batch_size)) for _ in range(self.num_batches(len(members)))
            ]
        order = [*self._order(batches)]
        if order:
            order.insert(0, order.pop(order.index(batches[0])))
        return iter(order)

    def _order(self, values: Sequence[Any]) -> Sequence[Any]:
        if not self.shuffle:
            return values
        return [values[i] for i in torch.randperm(len(values)).tolist()]


@dataclass(eq=False)
class Batches(Dataset[Batch]):
    """Batches of another data set's samples, asked for by lists of places.

    In a loader without batches of its own (`batch_size=None`): so Lightning and this package share batches out to
    pipelines as they share samples.
    """

    samples: Dataset[Sample]
    num_batches: int

    def __len__(self) -> int:
        return self.num_batches

    def __getitem__(self, places: list[int]) -> Batch:  # type: ignore[override]
        return collate([self.samples[place] for place in places])
