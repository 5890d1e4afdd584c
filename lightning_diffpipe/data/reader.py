"""What folders and tar shards have in common: their settings, the shapes of samples, and how these are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, fields, replace
from itertools import islice
from pathlib import PurePath
from typing import Any, NamedTuple

import torch
from PIL import Image, ImageColor

from lightning_diffpipe.data.buckets import Shape, Sizes
from lightning_diffpipe.data.captioned import MADE, Sample
from lightning_diffpipe.data.listing import Entry
from lightning_diffpipe.data.pixels import (
    Augmentation,
    read_reference,
    read_sample,
    read_video,
    reading,
    size_of,
    to_pixels,
    too_short,
    video_size,
)
from lightning_diffpipe.errors import (
    ConfigurationError,
    DataError,
    require_choice,
    require_flags,
    require_number,
)


@dataclass(frozen=True)
class Source:
    """A folder of images, or a pattern of shards, among several.

    Attributes:
        path: Path of the folder, or the pattern.
        repeats: Number of times that an epoch takes each of its samples.
        weight: Weight of its losses, such as those of a prior next to a subject.

    Raises:
        ConfigurationError: A number that cannot be.
    """

    path: str
    repeats: int = 1
    weight: float = 1.0

    def __post_init__(self) -> None:
        require_number("repeats", self.repeats, 1, whole=True)
        require_number("weight", self.weight, 0)

    @classmethod
    def several(cls, given: Any, kind: str, refusal: str) -> list[Source]:
        """Returns the sources that a path names, a mapping of attributes, or a list of such.

        The path is called `kind` in mappings. What names none is refused in the words of `refusal`.
        """
        listed = [given] if isinstance(given, str | PurePath | Mapping) else given
        if not (isinstance(listed, Sequence) and listed):
            raise ConfigurationError(refusal)
        known, sources = [kind, *(each.name for each in fields(cls)[1:])], []
        for each in listed:
            values = each if isinstance(each, Mapping) else {kind: each}
            if not set(values) <= set(known):
                raise ConfigurationError(
                    f"{kind}={dict(values)} may have {', '.join(known)}; leave others out"
                )
            others = {name: value for name, value in values.items() if name != kind}
            sources.append(cls(str(values.get(kind)), **others))
        return sources

    @staticmethod
    def plain(given: Any, kind: str, sources: Sequence[Source]) -> Any:
        """Returns what was given as plain values: a checkpoint of such can be read without trusting it."""
        if isinstance(given, str | PurePath):
            return str(given)
        return [
            {kind: each.path, "repeats": each.repeats, "weight": each.weight} for each in sources
        ]


class Look(NamedTuple):
    """A sample as it is trained on, for those who look at data before.

    Attributes:
        repeats: Number of times that an epoch takes it; 0 if it is held back.
        sample: What is read of it, or the error of one that cannot be read.
    """

    entry: Entry
    shape: Shape
    repeats: int
    sample: Sample | DataError | None = None


class SampleReader:
    """Finds the shapes of samples, and reads them.

    Args:
        settings: Those of a data module that folders and shards share, by name.
        augmentation: Random crops, mirroring and captions.
        sources: Folders or shards; samples have weights if any of these is not 1.

    Raises:
        ConfigurationError: A setting that cannot be.
    """

    def __init__(
        self, settings: Any, augmentation: Augmentation, sources: Sequence[Source]
    ) -> None:
        h, self.augmentation = settings, augmentation
        ImageColor.getrgb(str(h.background))  # or it raises ValueError
        require_number("resolution", h.resolution, 1, whole=True)
        require_flags(buckets=h.buckets, enlarge=h.enlarge)
        if h.buckets:
            require_number("bucket_step", h.bucket_step, 1, h.resolution, whole=True)
        require_choice("last_batch", h.last_batch, ("filled", "dropped", "smaller"))
        self.frames: list[int] = []
        if h.num_frames is not None:
            is_several = isinstance(h.num_frames, Sequence) and h.num_frames
            self.frames = list(h.num_frames) if is_several else [h.num_frames]
            for number in self.frames:
                require_number("num_frames", number, 1, whole=True)
            self.frames.sort()
            computed = h.condition if h.condition in MADE else None
            others = {"condition": computed, "references": h.references, "mask": h.mask}
            for name, value in others.items():
                if value is not None:
                    raise ConfigurationError(
                        f"{name}={value!r} is for images; leave it or num_frames={h.num_frames} out"
                    )
        self.sizes = Sizes(h.resolution, h.bucket_step, h.enlarge) if h.buckets else None
        self.made = h.condition if h.condition in MADE else None
        keys = {"condition": h.condition, "references": h.references, "mask": h.mask}
        without_file = (*MADE, "alpha", None)
        self.companions = {kind: key for kind, key in keys.items() if key not in without_file}
        self._square, self._background = (h.resolution,) * 2, h.background
        self._alpha = h.mask == "alpha"
        self._is_weighted = any(source.weight != 1 for source in sources)

    @property
    def has_shapes(self) -> bool:
        """Whether images or videos may have several shapes."""
        return self.sizes is not None or len(self.frames) > 1

    def shape(self, entry: Entry) -> Shape:
        """Returns the shape that a sample gets, by headers of its files; raises DataError for broken ones."""
        size, frames = self._square, self.frames[0] if self.frames else None
        with reading(entry.called()):
            if self.frames and self.has_shapes:
                width, height, num_frames = video_size(entry.path)
                frames = max((n for n in self.frames if n <= num_frames), default=None)
                if frames is None:
                    raise too_short(entry.path, num_frames, self.frames[0])
                size = self.sizes.of(height, width) if self.sizes else size
            elif self.sizes:
                size = self._size(entry.path)
            references = []
            for file in entry.companions.get("references", ()):
                with reading(entry.called(file)):
                    references.append(self._size(file))
        return Shape(*size, frames, tuple(references))

    def _size(self, file: Any) -> tuple[int, int]:
        if self.sizes is None:
            return self._square
        with Image.open(file) as image:
            return self.sizes.of(*reversed(size_of(image)))

    def read(self, entry: Entry, shape: Shape) -> Sample:
        """Reads a sample in this shape; raises DataError if it cannot be read."""
        crop, sample = self.augmentation.crop(shape.height, shape.width), Sample()
        caption = self.augmentation.caption(entry.caption)
        if shape.num_frames is not None:
            with reading(entry.called()):
                video = read_video(entry.path, shape.num_frames, crop, self._background)
            sample = {"video": video, "caption": caption}
            for kind, file in entry.companions.items():
                with reading(entry.called(file)), Image.open(file) as image:
                    sample[kind] = (to_pixels(image, crop, self._background) + 1) / 2
        else:
            others = {kind: (file, entry.called(file)) for kind, file in entry.companions.items()}
            others.pop("references", None)
            called = self._background, entry.called(), others, self._alpha
            sample = read_sample(entry.path, caption, crop, *called)
        if self.made is not None:
            sample["condition"] = MADE[self.made](sample["image"])
        if shape.references:
            sample["references"] = []
            for file, (height, width) in zip(
                entry.companions["references"], shape.references, strict=True
            ):
                # Cut and mirrored as the image, as far as shapes allow.
                its_crop = replace(crop, height=height, width=width)
                reference = read_reference(file, its_crop, self._background, entry.called(file))
                sample["references"].append(reference)
        if self._is_weighted:
            sample["weight"] = torch.tensor(entry.weight)
        return sample

    def looked_at(self, looks: Iterable[Look]) -> Iterator[Look]:
        """Yields looks with their samples, of which 64 are in memory."""

        def look_at(look: Look) -> Look:
            try:
                return look._replace(sample=self.read(look.entry, look.shape))
            except DataError as error:
                return look._replace(sample=error)

        left = iter(looks)
        with ThreadPoolExecutor() as threads:
            while some := list(islice(left, 64)):
                yield from threads.map(look_at, some)

    def held_back(self) -> SampleReader:
        """Returns a reader of validation samples, without augmentation."""
        reader = copy(self)
        reader.augmentation = self.augmentation.held_back()
        return reader
