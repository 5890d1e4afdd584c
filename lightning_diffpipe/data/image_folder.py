"""Folders of images or videos with captions (`listing.py`), in one size, or in buckets of several (`buckets.py`).

Which images are held back follows from a hash of their path in the folder. For a ControlNet, or a pipeline that
edits images, there may be a second image of the same shape next to each (`condition="conditioning_image"`), and a
mask that says where the loss counts (`mask="masks"`):

    {"file_name": "cat.png", "text": "a cat on a sofa", "conditioning_image": "cat_edges.png"}

Pipelines that make an image from others of any shape learn from `references` (`listing.py`).

Where `num_frames` are asked for, files are videos that PyAV decodes (mp4, webm, gif, ...), or folders of frames.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path, PurePath
from typing import Any, Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from PIL import Image, ImageColor
from torch.utils.data import DataLoader, Dataset

from lightning_diffpipe.data.buckets import Batches, BucketBatches, Last, Shape, Sizes, grouped
from lightning_diffpipe.data.captioned import (
    MADE,
    CaptionedDataModule,
    Sample,
    share_of,
    unchanged,
)
from lightning_diffpipe.data.listing import Entry, Listing
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
class Folder:
    """A folder of images among several.

    Attributes:
        folder: Path of the folder.
        repeats: Number of times that an epoch takes each of its images.
        weight: Weight of its losses, such as those of a prior next to a subject.

    Raises:
        ConfigurationError: A number that cannot be.
    """

    folder: str
    repeats: int = 1
    weight: float = 1.0

    def __post_init__(self) -> None:
        require_number("repeats", self.repeats, 1, whole=True)
        require_number("weight", self.weight, 0)

    @classmethod
    def of(cls, given: Any) -> Folder:
        """Returns the folder that a path, or a mapping of its attributes, names."""
        if isinstance(given, str | PurePath):
            return cls(str(given))
        known = [each.name for each in fields(cls)]
        if not set(given) <= set(known):
            raise ConfigurationError(
                f"folder={dict(given)} may have {', '.join(known)}; leave others out"
            )
        return cls(**{**given, "folder": str(given.get("folder"))})


@dataclass(eq=False)
class FolderSamples(Dataset[Sample]):
    """Images or videos of folders.

    Attributes:
        augmentation: Random crops, mirroring and captions.
        background: Colour that shows where images are transparent.
        alpha: Whether the alpha channel is the mask.
        is_weighted: Whether samples have weights.
    """

    entries: list[Entry]
    shapes: list[Shape]
    augmentation: Augmentation
    background: str
    alpha: bool
    is_weighted: bool

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> Sample:
        entry, shape = self.entries[index], self.shapes[index]
        crop = self.augmentation.crop(shape.height, shape.width)
        caption = self.augmentation.caption(entry.caption)
        sample: Sample
        if shape.num_frames is not None:
            with reading(entry.called()):
                video = read_video(entry.path, shape.num_frames, crop, self.background)
            sample = {"video": video, "caption": caption}
            for kind, file in entry.companions.items():
                with reading(entry.called(file)), Image.open(file) as image:
                    sample[kind] = (to_pixels(image, crop, self.background) + 1) / 2
        else:
            others = {kind: (file, entry.called(file)) for kind, file in entry.companions.items()}
            others.pop("references", None)
            sample = read_sample(
                entry.path, caption, crop, self.background, entry.called(), others, self.alpha
            )
        if shape.references:
            sample["references"] = []
            for file, (height, width) in zip(
                entry.companions["references"], shape.references, strict=True
            ):
                # Cut and mirrored as the image, as far as shapes allow.
                its_crop = replace(crop, height=height, width=width)
                reference = read_reference(file, its_crop, self.background, entry.called(file))
                sample["references"].append(reference)
        if self.is_weighted:
            sample["weight"] = torch.tensor(entry.weight)
        return sample


class ImageFolderDataModule(CaptionedDataModule):
    """Images or videos of folders, captioned by `metadata.jsonl`, `metadata.csv` or texts next to them.

    Args:
        folder: Holds images and their captions; or a list of folders, each a path or a mapping such as
            `{"folder": "cats", "repeats": 10, "weight": 1.0}` (see `Folder`).
        resolution: Width and height of the images, in pixels; with buckets, the side of a square of their area.
        caption_key: The key of the metadata that holds the caption.
        validation_share: Share of the images that is held back.
        batch_size: Samples per batch on each data-parallel rank.
        num_workers: Worker processes that decode images.
        condition: Condition of a ControlNet, or image to edit: `"edges"` of the image, or the key of the
            metadata that names a second image of the same shape, or a folder of such images; None for nothing.
            With `num_frames` the image that a video begins with; None then for its first frame.
        references: Images of which a pipeline makes each: the key of the metadata that names one image
            or a list of them, of any shape, or a folder with one for each; None for nothing. They get sizes as
            images do, and a batch has one number and shape of them.
        on_error: Treatment of lines and images that cannot be used: `"raise"` ends the run with an error that
            names file and line, `"skip"` leaves them out and says their number. Broken images are found when
            they are loaded; the next one of the same size takes the place of each.
        num_frames: Successive frames of each file, a video or a folder of frames, out of its middle; of several
            numbers each has the largest that it can. None for images.
        background: Colour that shows where images are transparent: a name, or such as `"#ff8000"`.
        buckets: Whether images keep about their ratio of sides, at about the same area (`buckets.py`), instead of
            the middle square.
        bucket_step: Number of pixels of which sides are multiples, with buckets.
        enlarge: Whether buckets may enlarge images.
        last_batch: Treatment of a bucket's last batch in an epoch if it is incomplete: it is `"filled"` with
            samples of the bucket again, `"dropped"`, or is `"smaller"`. Without buckets it is dropped.
        mask: Mask of the loss: the key of the metadata that names a grey image of the same shape, or a folder
            of such images, or `"alpha"` for the images' own alpha channel; None for everywhere.
        augmentation: Settings of `Augmentation`: flip, random_crop, shuffle_tags, drop_tags, keep_tags, trigger.
            With the last one images may have no caption.

    Attributes:
        train_buckets: Places in `train_set` of the samples of each shape, once it is set up.
        validation_buckets: Places in `validation_set`, likewise.
        left_out: Errors of lines and files that were left out.
    """

    train_buckets: dict[Shape, list[int]]
    validation_buckets: dict[Shape, list[int]]

    def __init__(
        self,
        folder: str | Path | Sequence[str | Path | Mapping[str, Any]],
        resolution: int = 512,
        caption_key: str = "text",
        validation_share: float = 0.02,
        batch_size: int = 16,
        num_workers: int = 4,
        condition: str | None = None,
        references: str | None = None,
        on_error: Literal["raise", "skip"] = "raise",
        num_frames: int | Sequence[int] | None = None,
        background: str = "white",
        buckets: bool = False,
        bucket_step: int = 64,
        enlarge: bool = False,
        last_batch: Last = "filled",
        mask: str | None = None,
        **augmentation: Any,
    ) -> None:
        super().__init__(batch_size, num_workers, on_error)
        ImageColor.getrgb(str(background))  # or it raises ValueError
        require_number("resolution", resolution, 1, whole=True)
        require_number("validation_share", validation_share, 0, 1)
        require_flags(buckets=buckets, enlarge=enlarge)
        for name, value in (("condition", condition), ("references", references), ("mask", mask)):
            if value == "" or not isinstance(value, str | None):
                raise ConfigurationError(f"{name}={value!r} must be one key, or a folder")
        if buckets:
            require_number("bucket_step", bucket_step, 1, resolution, whole=True)
        require_choice("last_batch", last_batch, ("filled", "dropped", "smaller"))
        self._frames: list[int] = []
        if num_frames is not None:
            is_several = isinstance(num_frames, Sequence) and num_frames
            self._frames = list(num_frames) if is_several else [num_frames]
            for number in self._frames:
                require_number("num_frames", number, 1, whole=True)
            self._frames.sort()
            computed = condition if condition in MADE else None
            others = {"condition": computed, "references": references, "mask": mask}
            for name, value in others.items():
                if value is not None:
                    raise ConfigurationError(
                        f"{name}={value!r} is for images; leave it or num_frames={num_frames} out"
                    )
        self._augmentation = Augmentation(**augmentation)
        folders = [folder] if isinstance(folder, str | PurePath | Mapping) else folder
        if not (isinstance(folders, Sequence) and folders):
            raise ConfigurationError(f"folder={folder!r} names no folder; name one with images")
        self._folders = [Folder.of(each) for each in folders]
        self._sizes = Sizes(resolution, bucket_step, enlarge) if buckets else None
        self._split: list[dict[str, Any]] = []
        self.left_out: list[DataError] = []
        # A checkpoint of plain values can be read without trusting it.
        is_one = isinstance(folder, str | PurePath)
        folder = str(folder) if is_one else [vars(each) for each in self._folders]
        num_frames = self._frames if isinstance(num_frames, Sequence) else num_frames
        self.save_hyperparameters()

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Heights and widths that images may be given; smaller ones are multiples of the step, too."""
        return self._sizes.all if self._sizes else [(self.hparams.resolution,) * 2]

    def setup(self, stage: str) -> None:
        """Reads listings, and with buckets the sizes of images; splits them, and says what an epoch is.

        Raises:
            ConfigurationError: A folder is missing, all images are held back, buckets would be lost, or videos need
                a package that is missing.
            DataError: A line or a file cannot be used.
        """
        self.read_files()
        h, (train, held_back) = self.hparams, self._split
        if stage == "fit" and not train["entries"]:
            names = ", ".join(folder.folder for folder in self._folders)
            raise ConfigurationError(
                f"all {len(held_back['entries'])} images of {names} are held back, and none is left to train on: "
                f"add images, or lower validation_share={h.validation_share} (data.validation_share)"
            )
        if stage == "fit" and self._has_buckets:
            rank_zero_info(self.described())
        is_weighted = any(folder.weight != 1 for folder in self._folders)
        common = h.background, h.mask == "alpha", is_weighted
        self._use(
            FolderSamples(*train.values(), self._augmentation, *common),
            FolderSamples(*held_back.values(), self._augmentation.held_back(), *common),
            h.condition if h.condition in MADE else None,
            [list(self.train_buckets.values()), list(self.validation_buckets.values())],
        )

    def described(self) -> str:
        """Returns a text with the number of batches in an epoch, and of samples that are repeated or left out."""
        batches = self.batches(shuffle=True)
        size, counts = self.batch_size, [len(members) for members in batches.buckets]
        num_samples, num_batches = sum(counts), len(batches)
        text = (
            f"{num_samples} samples in {len(counts)} buckets make {num_batches} batches of {size}"
        )
        more = num_batches * size - num_samples
        text += {
            "filled": f"; {more} of these are seen again, to fill last batches",
            "dropped": f"; {-more} are left out in each epoch, of incomplete batches",
            "smaller": f"; {sum(count % size > 0 for count in counts)} of these are smaller",
        }[batches.last]
        small = f". {self._small()}" if self._small() else ""
        return f"{text} (data.last_batch={batches.last}){small}" if self._has_buckets else text

    def read_files(self) -> None:
        """Reads listings, and with buckets headers of images, once; for `setup`, with its errors."""
        if self._split:
            return
        h = self.hparams
        keys = {"condition": h.condition, "references": h.references, "mask": h.mask}
        without_file = {*MADE, "alpha", None}
        companions = {kind: key for kind, key in keys.items() if key not in without_file}
        split: list[dict[str, Any]] = [{"entries": [], "shapes": []} for _ in range(2)]
        for folder in self._folders:
            path = Path(folder.folder)
            listing = Listing(
                path, h.caption_key, companions, bool(self._frames), not h.get("trigger")
            )
            entries, errors = listing.read(self.on_error)
            files = [entry.path for entry in entries if self._frames and entry.path.is_file()]
            if files and importlib.util.find_spec("av") is None:  # else each would be called broken
                raise ConfigurationError(
                    f"{files[0]} needs the package av to be decoded; run: pip install "
                    "'lightning-diffpipe[video]', or give folders of frames"
                )
            count = len(entries) + len(errors)
            for entry, shape in self._with_shapes(entries, errors):
                name = Path(os.path.relpath(entry.path, path)).as_posix()
                is_held_back = share_of(name) < h.validation_share
                for _ in range(1 if is_held_back else folder.repeats):
                    split[is_held_back]["entries"].append(entry._replace(weight=folder.weight))
                    split[is_held_back]["shapes"].append(shape)
            if errors:
                rank_zero_warn(
                    f"{len(errors)} of {count} lines or files of {path} were left out (on_error=skip). The first "
                    f"one: {errors[0]}"
                )
            self.left_out += errors
        self.train_buckets, self.validation_buckets = (grouped(each["shapes"]) for each in split)
        if self._has_buckets and h.last_batch == "dropped" and (small := self._small()):
            raise ConfigurationError(
                f"{small} and would never be trained on: take last_batch=filled or smaller (data.last_batch), or "
                "lower data.batch_size"
            )
        self._split = split

    def _small(self) -> str:
        """Returns a text that names buckets smaller than a batch; empty if there are none."""
        size, buckets = self.batch_size, self.train_buckets
        small = [f"{shape}: {len(m)}" for shape, m in buckets.items() if len(m) < size]
        counts = f"{len(small)} of {len(buckets)} buckets have fewer than the {size} samples of"
        return f"{counts} a batch ({'; '.join(small)})" if small else ""

    def _with_shapes(
        self, entries: list[Entry], errors: list[DataError]
    ) -> Iterable[tuple[Entry, Shape]]:
        """Yields each entry with its shape; adds to the errors if its header cannot be read."""
        if not self._has_buckets:
            side, frames = self.hparams.resolution, self._frames[0] if self._frames else None
            yield from ((entry, Shape(side, side, frames)) for entry in entries)
            return
        with ThreadPoolExecutor(16) as threads:  # which wait for a disk or a network
            for entry, shape in zip(entries, threads.map(self._shape, entries), strict=True):
                if isinstance(shape, Shape):
                    yield entry, shape
                elif self.on_error == "raise":
                    threads.shutdown(cancel_futures=True)
                    raise shape
                else:
                    errors.append(shape)

    @property
    def _has_buckets(self) -> bool:
        several = self.hparams.references is not None  # one, or two, or in several shapes
        return self._sizes is not None or len(self._frames) > 1 or several

    def _shape(self, entry: Entry) -> Shape | DataError:
        """Returns the shape that an entry gets, by its header, or the error if it cannot be used."""
        side, frames = self.hparams.resolution, None
        try:
            with reading(entry.called()):
                if self._frames:
                    width, height, num_frames = video_size(entry.path)
                    frames = max((n for n in self._frames if n <= num_frames), default=None)
                    if frames is None:
                        raise too_short(entry.path, num_frames, self._frames[0])
                else:
                    with Image.open(entry.path) as image:
                        width, height = size_of(image)
                sized = self._sizes.of if self._sizes else lambda *_: (side, side)
                size, references = sized(height, width), []
            for file in entry.companions.get("references", ()):
                with reading(entry.called(file)), Image.open(file) as image:
                    references.append(sized(*reversed(size_of(image))))
            return Shape(*size, frames, tuple(references))
        except DataError as error:
            return error

    def batches(self, shuffle: bool) -> BucketBatches:
        """Returns the indices of each batch, for training (shuffled) or validation."""
        if not shuffle:
            held_back = list(self.validation_buckets.values())
            return BucketBatches(held_back, self.batch_size, "smaller", shuffle)
        last = self.hparams.last_batch if self._has_buckets else "dropped"
        return BucketBatches(list(self.train_buckets.values()), self.batch_size, last, shuffle)

    def _loader(self, dataset: Dataset[Sample], shuffle: bool) -> DataLoader[Any]:
        if not self._has_buckets:
            return super()._loader(dataset, shuffle)
        batches = self.batches(shuffle)
        return DataLoader(
            Batches(dataset, len(batches)),
            batch_size=None,
            sampler=batches,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
            collate_fn=unchanged,  # torch would make tensors of references, which are arrays
        )

    def _drawn_from(self) -> Sequence[int]:
        one_shape = self.hparams.condition or self.hparams.references
        if one_shape is None or not self.validation_buckets:
            return super()._drawn_from()
        return next(iter(self.validation_buckets.values()))
