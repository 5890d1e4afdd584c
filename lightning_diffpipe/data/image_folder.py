"""A folder of pictures with captions in `metadata.jsonl`, the layout of Hugging Face's ImageFolder.

    folder/metadata.jsonl      {"file_name": "cat.png", "text": "a cat on a sofa"}   one per line
    folder/cat.png

Pictures are turned upright, scaled so that the shorter side fits, then cropped in the middle. Which pictures are
held back follows from a hash of their file name. For a ControlNet a line may name a second picture of the same
shape (`condition="conditioning_image"`):

    {"file_name": "cat.png", "text": "a cat on a sofa", "conditioning_image": "cat_edges.png"}
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import Dataset

from lightning_diffpipe.data.captioned import CaptionedDataModule, Sample
from lightning_diffpipe.data.conditions import MADE, Conditioned
from lightning_diffpipe.errors import ConfigurationError, require_number


def to_square(picture: Image.Image, resolution: int) -> Tensor:
    """Scales the shorter side to `resolution` and crops the middle square.

    Args:
        picture: Any picture of 8 or 16 bits; turned as its EXIF orientation says, and converted to RGB.
        resolution: Width and height wanted, in pixels.

    Returns:
        Float32 in [-1, 1], `(3, resolution, resolution)`.

    Raises:
        ConfigurationError: The picture has values of 32 bits, of which nobody knows where white is.
    """
    # Cameras keep the sensor's rows and note how the picture was held; every viewer turns it.
    picture = ImageOps.exif_transpose(picture)
    scale = resolution / min(picture.size)
    width, height = (max(resolution, round(scale * side)) for side in picture.size)
    left, top = (width - resolution) // 2, (height - resolution) // 2
    resized = _in_8_bits(picture).convert("RGB").resize((width, height), Image.Resampling.LANCZOS)
    square = resized.crop((left, top, left + resolution, top + resolution))
    return torch.from_numpy(np.asarray(square).copy()).permute(2, 0, 1).float() / 127.5 - 1


def _in_8_bits(picture: Image.Image) -> Image.Image:
    """Depth maps and others with 16 bits, of which a conversion to RGB would make white."""
    if picture.mode in ("I", "F"):
        raise ConfigurationError(
            f"a picture has values of 32 bits (mode {picture.mode}), of which nobody knows where white is; write "
            "it with 8 or 16 bits"
        )
    if not picture.mode.startswith("I;16"):
        return picture
    levels = np.asarray(picture).astype(np.float32) / 257
    return Image.fromarray(levels.round().astype(np.uint8))


class _Entry(NamedTuple):
    """A line of `metadata.jsonl`: a picture, its caption, and the picture of its condition, if there is one."""

    path: Path
    caption: str
    condition: Path | None


def to_condition(picture: Image.Image, resolution: int) -> Tensor:
    """As `to_square`, in [0, 1], as ControlNets want what they are shown."""
    return (to_square(picture, resolution) + 1) / 2


def _read_metadata(
    folder: Path, caption_key: str, condition_key: str | None = None
) -> Iterator[_Entry]:
    path = folder / "metadata.jsonl"
    if not path.is_file():
        raise ConfigurationError(
            f"{path} does not exist; write one line per picture, such as "
            '{"file_name": "cat.png", "text": "a cat"}'
        )
    # JSON may hold U+2028 and other characters as they are, at which `splitlines` would cut.
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            condition = None if condition_key is None else folder / entry[condition_key]
            yield _Entry(folder / entry["file_name"], entry[caption_key], condition)
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            wanted = f"'file_name' and {caption_key!r}"
            if condition_key is not None:
                wanted = f"'file_name', {caption_key!r} and {condition_key!r} (the condition)"
            raise ConfigurationError(
                f"{path}, line {number}: expected a JSON object with {wanted}, but found {line[:80]!r}"
            ) from error


class _Pictures(Dataset[Sample]):
    def __init__(self, entries: list[_Entry], resolution: int) -> None:
        self.entries = entries
        self.resolution = resolution

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> Sample:
        path, caption, condition = self.entries[index]
        with Image.open(path) as picture:
            sample: Sample = {"image": to_square(picture, self.resolution), "caption": caption}
            if condition is not None:
                with Image.open(condition) as other:
                    require_same_shape(picture, str(path), other, str(condition))
                    sample["condition"] = to_condition(other, self.resolution)
        return sample


def require_same_shape(
    picture: Image.Image, name: str, condition: Image.Image, its_name: str
) -> None:
    """Refuses a condition that would be cut out elsewhere; it may be larger or smaller.

    Args:
        picture: What is learnt.
        name: Of it, for the message.
        condition: What belongs to it.
        its_name: Of the condition.

    Raises:
        ConfigurationError: Width and height have another ratio.
    """
    width, height = ImageOps.exif_transpose(picture).size
    its_width, its_height = ImageOps.exif_transpose(condition).size
    scale, shape = its_height / height, width / height
    # Where one was made from the other, in pixels of the condition.
    rounding = (1 + shape) * max(1, scale)
    if abs(its_width - width * scale) > rounding:
        raise ConfigurationError(
            f"{its_name} has {its_width}x{its_height} pixels, and {name} {width}x{height}: a condition must have "
            "the shape of its picture, as it says where in it something shall be. Scale it to the picture's size: "
            "tools that make conditions may have rounded its sides"
        )


class ImageFolderDataModule(CaptionedDataModule):
    """Pictures of a folder, captioned by its `metadata.jsonl`.

    Args:
        folder: Holds `metadata.jsonl` and the pictures it names.
        resolution: Width and height of the images, in pixels.
        caption_key: The key of `metadata.jsonl` that holds the caption.
        validation_share: Share of the pictures that is held back.
        batch_size: Samples per batch on each data-parallel rank.
        num_workers: Worker processes that decode pictures.
        condition: What a ControlNet is shown: `"edges"` of the picture, or the key of `metadata.jsonl` that names a
            second picture of the same shape; None for nothing.
    """

    def __init__(
        self,
        folder: str | Path,
        resolution: int = 512,
        caption_key: str = "text",
        validation_share: float = 0.02,
        batch_size: int = 16,
        num_workers: int = 4,
        condition: str | None = None,
    ) -> None:
        super().__init__(batch_size, num_workers)
        require_number("resolution", resolution, 1, whole=True)
        require_number("validation_share", validation_share, 0, 1)
        folder = str(folder)  # a checkpoint of plain values can be read without trusting it
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        """Reads `metadata.jsonl` and splits its lines.

        Raises:
            ConfigurationError: The file is missing, or a line of it is malformed.
        """
        h = self.hparams
        split: dict[bool, list[_Entry]] = {False: [], True: []}
        condition_key = None if h.condition in MADE else h.condition
        for entry in _read_metadata(Path(h.folder), h.caption_key, condition_key):
            digest = hashlib.sha256(entry.path.name.encode()).digest()
            share = int.from_bytes(digest[:8], "big") / 2**64
            split[share < h.validation_share].append(entry)
        self.train_set, self.validation_set = (
            _Pictures(split[held_back], h.resolution) for held_back in (False, True)
        )
        if h.condition in MADE:
            self.train_set = Conditioned(self.train_set, h.condition)
            self.validation_set = Conditioned(self.validation_set, h.condition)
