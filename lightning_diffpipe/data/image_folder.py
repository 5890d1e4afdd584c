"""Folders of images or videos with captions (`listing.py`), in one size, or in buckets of several (`buckets.py`).

Which images are held back follows from a hash of their path in the folder. For a ControlNet, or a pipeline that
edits images, there may be a second image of the same shape next to each (`condition="conditioning_image"`), and a
mask that says where the loss counts (`mask="masks"`):

    {"file_name": "cat.png", "text": "a cat on a sofa", "conditioning_image": "cat_edges.png"}

Pipelines that make an image from others of any shape learn from `references` (`listing.py`).

Where `num_frames` are asked for, files are videos that PyAV decodes (mp4, webm, gif, ...), or folders of frames.
"""

import importlib.util
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.utils.data import DataLoader, Dataset

from lightning_diffpipe.data.buckets import (
    Batches,
    BucketBatches,
    Last,
    Shape,
    described,
    grouped,
    small,
)
from lightning_diffpipe.data.captioned import CaptionedDataModule, Sample, share_of, unchanged
from lightning_diffpipe.data.listing import Entry, Listing
from lightning_diffpipe.data.pixels import Augmentation
from lightning_diffpipe.data.reader import Look, SampleReader, Source
from lightning_diffpipe.errors import ConfigurationError, DataError, require_number


@dataclass(eq=False)
class FolderSamples(Dataset[Sample]):
    """Images or videos of folders, each in its shape."""

    entries: list[Entry]
    shapes: list[Shape]
    reader: SampleReader

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> Sample:
        return self.reader.read(self.entries[index], self.shapes[index])


class ImageFolderDataModule(CaptionedDataModule):
    """Images or videos of folders, captioned by `metadata.jsonl`, `metadata.csv` or texts next to them.

    Args:
        folder: Holds images and their captions; or a list of folders, each a path or a mapping such as
            `{"folder": "cats", "repeats": 10, "weight": 1.0}` (see `Source`).
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
        require_number("validation_share", validation_share, 0, 1)
        for name, value in (("condition", condition), ("references", references), ("mask", mask)):
            if value == "" or not isinstance(value, str | None):
                raise ConfigurationError(f"{name}={value!r} must be one key, or a folder")
        refusal = f"folder={folder!r} names no folder; name one with images"
        self._folders = Source.several(folder, "folder", refusal)
        self._split: list[dict[str, Any]] = []
        self.left_out: list[DataError] = []
        folder = Source.plain(folder, "folder", self._folders)
        num_frames = list(num_frames) if isinstance(num_frames, Sequence) else num_frames
        self.save_hyperparameters()
        self._reader = SampleReader(self.hparams, Augmentation(**augmentation), self._folders)

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
            names = ", ".join(folder.path for folder in self._folders)
            raise ConfigurationError(
                f"all {len(held_back['entries'])} images of {names} are held back, and none is left to train on: "
                f"add images, or lower validation_share={h.validation_share} (data.validation_share)"
            )
        if stage == "fit" and self.last_batch:
            rank_zero_info(described(self.train_buckets, self.batch_size, self.last_batch))
        self._use(
            FolderSamples(*train.values(), self._reader),
            FolderSamples(*held_back.values(), self._reader.held_back()),
            None,
            [list(self.train_buckets.values()), list(self.validation_buckets.values())],
        )

    def read_files(self) -> None:
        """Reads listings, and with buckets headers of images, once; for `setup`, with its errors."""
        if self._split:
            return
        h = self.hparams
        split: list[dict[str, Any]] = [{"entries": [], "shapes": []} for _ in range(2)]
        for folder in self._folders:
            path = Path(folder.path)
            listing = Listing(
                path,
                h.caption_key,
                self._reader.companions,
                bool(self._reader.frames),
                not h.get("trigger"),
            )
            entries, errors = listing.read(self.on_error)
            files = [
                entry.path for entry in entries if self._reader.frames and entry.path.is_file()
            ]
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
        few = small(self.train_buckets, self.batch_size)
        if self.last_batch == "dropped" and few:
            raise ConfigurationError(
                f"{few} and would never be trained on: take last_batch=filled or smaller (data.last_batch), or "
                "lower data.batch_size"
            )
        self._split = split

    def looked_at(self) -> Iterator[Look]:
        """Yields each image or video as it is trained on, once."""
        self.read_files()
        readers = self._reader, self._reader.held_back()
        for is_held_back, (each, reader) in enumerate(zip(self._split, readers, strict=True)):
            repeats, found = Counter[Any](), dict[Any, Any]()
            for entry, shape in zip(*each.values(), strict=True):
                repeats[entry.path, shape] += not is_held_back
                found[entry.path, shape] = entry, shape
            yield from reader.looked_at(Look(*found[key], count) for key, count in repeats.items())

    def _with_shapes(
        self, entries: list[Entry], errors: list[DataError]
    ) -> Iterable[tuple[Entry, Shape]]:
        """Yields each entry with its shape; adds to the errors if its header cannot be read."""
        if not self._reader.has_shapes:
            yield from ((entry, self._reader.shape(entry)) for entry in entries)
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
    def last_batch(self) -> Last | None:
        """Treatment of a bucket's last batch; None if all samples have one shape."""
        several = self.hparams.references is not None  # one, or two, or in several shapes
        return self.hparams.last_batch if self._reader.has_shapes or several else None

    def _shape(self, entry: Entry) -> Shape | DataError:
        try:
            return self._reader.shape(entry)
        except DataError as error:
            return error

    def batches(self, shuffle: bool) -> BucketBatches:
        """Returns the indices of each batch, for training (shuffled) or validation."""
        if not shuffle:
            held_back = list(self.validation_buckets.values())
            return BucketBatches(held_back, self.batch_size, "smaller", shuffle)
        largest_first = sorted(self.train_buckets, key=lambda shape: -shape.num_pixels)
        buckets = [self.train_buckets[shape] for shape in largest_first]
        return BucketBatches(buckets, self.batch_size, self.last_batch or "dropped", shuffle)

    def _loader(self, dataset: Dataset[Sample], shuffle: bool) -> DataLoader[Any]:
        if self.last_batch is None:
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
