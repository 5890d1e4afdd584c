"""A folder of pictures with captions in `metadata.jsonl`, the layout of Hugging Face's ImageFolder.

    folder/metadata.jsonl      {"file_name": "cat.png", "text": "a cat on a sofa"}   one per line
    folder/cat.png

Pictures are turned upright, scaled so that the shorter side fits, then cropped in the middle. Which pictures are
held back follows from a hash of their file name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import Dataset

from lightning_diffpipe.data.captioned import CaptionedDataModule, Sample
from lightning_diffpipe.errors import ConfigurationError


def to_square(picture: Image.Image, resolution: int) -> Tensor:
    """Scales the shorter side to `resolution` and crops the middle square.

    Args:
        picture: Any picture; turned as its EXIF orientation says, and converted to RGB.
        resolution: Width and height wanted, in pixels.

    Returns:
        Float32 in [-1, 1], `(3, resolution, resolution)`.
    """
    # Cameras keep the sensor's rows and note how the picture was held; every viewer turns it.
    picture = ImageOps.exif_transpose(picture)
    scale = resolution / min(picture.size)
    width, height = (max(resolution, round(scale * side)) for side in picture.size)
    left, top = (width - resolution) // 2, (height - resolution) // 2
    resized = picture.convert("RGB").resize((width, height), Image.Resampling.LANCZOS)
    square = resized.crop((left, top, left + resolution, top + resolution))
    return torch.from_numpy(np.asarray(square).copy()).permute(2, 0, 1).float() / 127.5 - 1


def _read_metadata(folder: Path, caption_key: str) -> Iterator[tuple[Path, str]]:
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
            yield folder / entry["file_name"], entry[caption_key]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ConfigurationError(
                f"{path}, line {number}: expected a JSON object with 'file_name' and "
                f"{caption_key!r}, but found {line[:80]!r}"
            ) from error


class _Pictures(Dataset[Sample]):
    def __init__(self, entries: list[tuple[Path, str]], resolution: int) -> None:
        self.entries = entries
        self.resolution = resolution

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> Sample:
        path, caption = self.entries[index]
        with Image.open(path) as picture:
            return {"image": to_square(picture, self.resolution), "caption": caption}


class ImageFolderDataModule(CaptionedDataModule):
    """Pictures of a folder, captioned by its `metadata.jsonl`.

    Args:
        folder: Holds `metadata.jsonl` and the pictures it names.
        resolution: Width and height of the images, in pixels.
        caption_key: The key of `metadata.jsonl` that holds the caption.
        validation_share: Share of the pictures that is held back.
        batch_size: Samples per batch on each data-parallel rank.
        num_workers: Worker processes that decode pictures.
    """

    def __init__(
        self,
        folder: str | Path,
        resolution: int = 512,
        caption_key: str = "text",
        validation_share: float = 0.02,
        batch_size: int = 16,
        num_workers: int = 4,
    ) -> None:
        super().__init__(batch_size, num_workers)
        folder = str(folder)  # a checkpoint of plain values can be read without trusting it
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        """Reads `metadata.jsonl` and splits its lines.

        Raises:
            ConfigurationError: The file is missing, or a line of it is malformed.
        """
        split: dict[bool, list[tuple[Path, str]]] = {False: [], True: []}
        for path, caption in _read_metadata(Path(self.hparams.folder), self.hparams.caption_key):
            digest = hashlib.sha256(path.name.encode()).digest()
            share = int.from_bytes(digest[:8], "big") / 2**64
            split[share < self.hparams.validation_share].append((path, caption))
        self.train_set = _Pictures(split[False], self.hparams.resolution)
        self.validation_set = _Pictures(split[True], self.hparams.resolution)
