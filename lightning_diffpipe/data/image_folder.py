"""A folder of images with captions in `metadata.jsonl`, the layout of Hugging Face's ImageFolder.

    folder/metadata.jsonl      {"file_name": "cat.png", "text": "a cat on a sofa"}   one per line
    folder/cat.png

Images are turned upright, converted to sRGB, put on a background where they are transparent, scaled so that the
shorter side fits, then cropped in the middle. Which images are held back follows from a hash of their path in the
folder. For a ControlNet, or a pipeline that edits images, a line may name a second image of the same shape
(`condition="conditioning_image"`):

    {"file_name": "cat.png", "text": "a cat on a sofa", "conditioning_image": "cat_edges.png"}

Where `num_frames` are asked for, files are videos that PyAV decodes (mp4, webm, gif, ...), or folders of frames:

    {"file_name": "cat.mp4", "text": "a cat jumps from a sofa"}
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import re
import stat
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Literal, NamedTuple

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from PIL import Image, ImageCms, ImageColor, ImageOps
from torch import Tensor
from torch.utils.data import Dataset

from lightning_diffpipe.data.captioned import MADE, CaptionedDataModule, Sample, share_of
from lightning_diffpipe.errors import ConfigurationError, DataError, require_number

_LONGEST = 8
"""Sides of an image in lengths of the shorter one; what lies beyond would be scaled, and then cut off."""


def to_square(image: Image.Image, resolution: int, background: str = "white") -> Tensor:
    """Scales the shorter side to `resolution` and crops the middle square.

    Args:
        image: Any image of 8 or 16 bits; turned as its EXIF orientation says, and converted to sRGB.
        resolution: Width and height wanted, in pixels.
        background: Colour that shows where the image is transparent, as PIL knows it.

    Returns:
        Float32 in [-1, 1], `(3, resolution, resolution)`.

    Raises:
        ConfigurationError: The image has values of 32 bits, of which nobody knows where white is.
    """
    # Cameras keep the sensor's rows and note how the image was held; every viewer turns it.
    image = ImageOps.exif_transpose(image)
    icc, key = image.info.get("icc_profile"), image.info.get("transparency")
    most = _LONGEST * min(image.size)
    if max(image.size) > most:  # a line of 60000 pixels would take 20 s to scale
        width, height = (min(side, most) for side in image.size)
        left, top = (image.width - width) // 2, (image.height - height) // 2
        image = image.crop((left, top, left + width, top + height))
    if image.mode in ("I", "F"):
        raise ConfigurationError(
            f"an image has values of 32 bits (mode {image.mode}), of which nobody knows where white is; write "
            "it with 8 or 16 bits"
        )
    if image.mode.startswith("I;16"):
        # Depth maps and others, of which a conversion to RGB would make white.
        values = np.asarray(image)
        levels = (values.astype(np.float32) / 257).round().astype(np.uint8)
        image = Image.fromarray(levels)
        if key is not None:
            image.putalpha(Image.fromarray(np.where(values == key, 0, 255).astype(np.uint8)))
    is_grey = image.mode in ("1", "L", "LA")
    if image.has_transparency_data:
        image = image.convert("LA" if is_grey else "RGBA")
    elif image.mode != "CMYK":
        image = image.convert("L" if is_grey else "RGB")
    size, (left, top) = _scaled_and_cropped(image.size, resolution)
    # With an alpha channel, colours are weighted by it: those that nobody sees do not bleed into others.
    square = image.resize(size, Image.Resampling.LANCZOS)
    square = square.crop((left, top, left + resolution, top + resolution))
    seen = _in_srgb(square.convert(square.mode.removesuffix("A")), icc)
    if "A" in square.getbands():
        behind = Image.new("RGB", seen.size, background)
        seen = Image.composite(seen, behind, square.getchannel("A"))
    return torch.from_numpy(np.asarray(seen).copy()).permute(2, 0, 1).float() / 127.5 - 1


def _in_srgb(image: Image.Image, icc: bytes | None) -> Image.Image:
    """Converts grey, RGB or CMYK to sRGB; as in viewers, a broken profile or one of other channels does nothing."""
    if icc:
        with contextlib.suppress(ImageCms.PyCMSError, OSError):
            profile = ImageCms.ImageCmsProfile(io.BytesIO(icc))
            mode = {"GRAY": "L", "RGB": "RGB", "CMYK": "CMYK"}.get(
                profile.profile.xcolor_space.strip()
            )
            if (image.mode, mode) == ("L", "RGB"):
                image = image.convert("RGB")
            if image.mode == mode:
                srgb = ImageCms.createProfile("sRGB")
                return ImageCms.profileToProfile(image, profile, srgb, outputMode="RGB")
    return image.convert("RGB")


def require_color(name: str) -> None:
    """Raises ConfigurationError for a background that PIL does not know."""
    try:
        ImageColor.getrgb(name)
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            f"background={name!r} is no colour; write a name such as 'white', or '#ff8000' (data.background)"
        ) from error


def _scaled_and_cropped(
    size: tuple[int, int], resolution: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns width and height of an image once it is scaled, and left and top of its middle square."""
    scale = resolution / min(size)
    width, height = (max(resolution, round(scale * side)) for side in size)
    return (width, height), ((width - resolution) // 2, (height - resolution) // 2)


def read_sample(
    file: IO[bytes] | Path,
    caption: str,
    condition: IO[bytes] | Path | None,
    resolution: int,
    background: str,
    names: tuple[str, str],
) -> Sample:
    """Reads an image and that of its condition, if there is one.

    Args:
        file: In any form that PIL knows.
        caption: Of the image.
        condition: A file, too.
        resolution: Width and height wanted, in pixels.
        background: As for `to_square`.
        names: What to call image and condition.

    Raises:
        DataError: A file cannot be read, or the two have other shapes; names what they are called.
    """
    with _reading(names[0]), Image.open(file) as image:
        sample: Sample = {"image": to_square(image, resolution, background), "caption": caption}
        # What models such as SDXL are told; section 2.2 of https://arxiv.org/abs/2307.01952
        upright = ImageOps.exif_transpose(image)
        _, (left, top) = _scaled_and_cropped(upright.size, resolution)
        sample["original_size"] = torch.tensor([upright.height, upright.width])
        sample["crops_coords_top_left"] = torch.tensor([top, left])
        if condition is not None:
            with _reading(names[1]), Image.open(condition) as other:
                require_same_shape(image, names[0], other, names[1])
                # In [0, 1], as ControlNets want it.
                sample["condition"] = (to_square(other, resolution, background) + 1) / 2
    return sample


def read_video(path: Path, num_frames: int, resolution: int, background: str = "white") -> Tensor:
    """Reads successive frames out of the middle of a video.

    Args:
        path: A file, or a folder whose images are the frames, in the order of the numbers in their names.
        num_frames: How many.
        resolution: Width and height wanted, in pixels.
        background: As for `to_square`.

    Returns:
        Float32 in [-1, 1], `(3, num_frames, resolution, resolution)`.

    Raises:
        DataError: It has fewer frames.
    """
    if path.is_file():
        frames = _decoded(path, num_frames, resolution, background)
    else:
        known = Image.registered_extensions()
        files = (file for file in path.iterdir() if file.suffix.lower() in known)
        files, frames = sorted(files, key=_by_number), []
        first = max(0, (len(files) - num_frames) // 2)
        for file in files[first : first + num_frames]:
            with Image.open(file) as image:
                frames.append(to_square(image, resolution, background))
    if len(frames) < num_frames:
        raise DataError(
            f"{path} has {len(frames)} frames, and num_frames={num_frames} are wanted (data.num_frames)"
        )
    return torch.stack(frames, 1)


def _by_number(path: Path) -> list[tuple[int, str]]:
    """Sorts `frame2` before `frame10`."""
    parts = re.split(r"(\d+)", path.name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def _decoded(path: Path, num_frames: int, resolution: int, background: str) -> list[Tensor]:
    import av

    with av.open(str(path)) as container:  # counts without decoding
        count = sum(packet.size > 0 for packet in container.demux(video=0))
    stop = max(0, (count - num_frames) // 2) + num_frames
    with av.open(str(path)) as container:
        # Packets of some codecs show nothing: where frames end early, those are read that there are.
        frames = deque(islice(container.decode(video=0), stop), maxlen=num_frames)
        images = (Image.fromarray(frame.to_ndarray(format="rgba")) for frame in frames)
        return [to_square(image, resolution, background) for image in images]


@contextlib.contextmanager
def _reading(name: str) -> Iterator[None]:
    """Names a file that cannot be read.

    Raises:
        DataError: For whatever a decoder meets in a broken file.
    """
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(
            f"{name} cannot be used: {error}. Mend or remove it, or leave such samples out with on_error='skip' "
            "(data.on_error=skip)"
        ) from error


class _Listed(NamedTuple):
    """A line of `metadata.jsonl`: an image, its caption, and the image of its condition, if there is one."""

    path: Path
    caption: str
    condition: Path | None
    line: int


def require_listing(folder: Path) -> None:
    """Refuses a folder without a listing.

    Raises:
        ConfigurationError: It has no `metadata.jsonl`.
    """
    if not (folder / "metadata.jsonl").is_file():
        raise ConfigurationError(
            f"folder={folder}: {folder / 'metadata.jsonl'} does not exist; write one line per image, such as "
            '{"file_name": "cat.png", "text": "a cat"}, or per video ("cat.mp4", or a folder of frames) with '
            "num_frames"
        )


@dataclass(frozen=True)
class _Lines:
    """What a folder's `metadata.jsonl` lists, by the keys of file, caption and perhaps condition."""

    folder: Path
    keys: Sequence[str]
    may_be_folders: bool

    def read(self, skip: bool) -> list[_Listed]:
        """Reads all lines.

        Args:
            skip: Leave out lines and files that cannot be used, and say how many.

        Raises:
            DataError: There is one.
            ConfigurationError: There is no such file, or nothing in it.
        """
        require_listing(self.folder)
        (found, errors), path = ([], []), self.folder / "metadata.jsonl"
        # JSON may hold U+2028 and other characters as they are, at which `splitlines` would cut.
        for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
            if not line.strip():
                continue
            try:
                found.append(self._entry(line, number, f"{path}, line {number}"))
            except DataError as error:
                if not skip:
                    raise
                errors.append(error)
        if errors:
            rank_zero_warn(
                f"{len(errors)} of {len(errors) + len(found)} lines were left out (on_error=skip). The first one: "
                f"{errors[0]}"
            )
        if not found:
            raise ConfigurationError(
                f"{path} lists no image{' that can be used' if errors else ''}; write one line for each"
            )
        return found

    def _entry(self, line: bytes, number: int, where: str) -> _Listed:
        try:
            entry = json.loads(line.decode("utf-8"))
            values = [entry[key] for key in self.keys]
        except UnicodeDecodeError as error:
            raise DataError(
                f"{where}: {line[:80]!r} is no UTF-8 ({error.reason}); write it in UTF-8"
            ) from error
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            *first, last = map(repr, self.keys)
            wanted = f"{', '.join(first)} and {last}{' (the condition)' if first[1:] else ''}"
            raise DataError(
                f"{where}: expected a JSON object with {wanted}, but found {line.decode()[:80]!r}"
            ) from error
        for key, value in zip(self.keys, values, strict=True):
            if not isinstance(value, str):
                raise DataError(f"{where}: {key!r} must be a text, but is {json.dumps(value)[:80]}")
        name, caption, *condition = values
        paths = [self.folder / each for each in (name, *condition)]
        for path in paths:
            if self.may_be_folders and path.is_dir():
                continue
            try:  # from outside, as images are opened in training only
                status = path.stat()
            except OSError as error:
                raise DataError(f"{where}: {path} cannot be found ({error.strerror})") from error
            if not stat.S_ISREG(status.st_mode):
                raise DataError(f"{where}: {path} is no file")
            if not status.st_size:
                raise DataError(f"{where}: {path} is empty (0 bytes)")
        return _Listed(paths[0], caption, paths[1] if condition else None, number)


@dataclass(eq=False)
class _Images(Dataset[Sample]):
    entries: list[_Listed]
    resolution: int
    background: str
    num_frames: int | None

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> Sample:
        path, caption, condition, line = self.entries[index]
        where = f" (metadata.jsonl, line {line})"
        names = f"{path}{where}", f"{condition}{where}"
        if self.num_frames is not None:
            with _reading(names[0]):
                return {
                    "video": read_video(path, self.num_frames, self.resolution, self.background),
                    "caption": caption,
                }
        return read_sample(path, caption, condition, self.resolution, self.background, names)


def require_same_shape(
    image: Image.Image, name: str, condition: Image.Image, its_name: str
) -> None:
    """Refuses a condition that would be cut out elsewhere; it may be larger or smaller.

    Args:
        image: What is learnt.
        name: Of it, for the message.
        condition: What belongs to it.
        its_name: Of the condition.

    Raises:
        DataError: Width and height have another ratio.
    """
    width, height = ImageOps.exif_transpose(image).size
    its_width, its_height = ImageOps.exif_transpose(condition).size
    scale, shape = its_height / height, width / height
    # Where one was made from the other, in pixels of the condition.
    rounding = (1 + shape) * max(1, scale)
    if abs(its_width - width * scale) > rounding:
        raise DataError(
            f"{its_name} has {its_width}x{its_height} pixels, and {name} {width}x{height}: a condition must have "
            "the shape of its image, as it says where in it something shall be. Scale it to the image's size: "
            "tools that make conditions may have rounded its sides"
        )


class ImageFolderDataModule(CaptionedDataModule):
    """Images of a folder, captioned by its `metadata.jsonl`.

    Args:
        folder: Holds `metadata.jsonl` and the images it names.
        resolution: Width and height of the images, in pixels.
        caption_key: The key of `metadata.jsonl` that holds the caption.
        validation_share: Share of the images that is held back.
        batch_size: Samples per batch on each data-parallel rank.
        num_workers: Worker processes that decode images.
        condition: What a ControlNet is shown, or a pipeline edits: `"edges"` of the image, or the key of
            `metadata.jsonl` that names a second image of the same shape; None for nothing.
        on_error: What becomes of lines and images that cannot be used: `"raise"` ends the run with an error that
            names file and line, `"skip"` leaves them out and says their number. Broken images are found when
            they are loaded; the next one takes the place of each.
        num_frames: Successive frames of each file, a video or a folder of frames, out of its middle; None for
            images.
        background: Colour that shows where images are transparent: a name, or such as `"#ff8000"`.
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
        on_error: Literal["raise", "skip"] = "raise",
        num_frames: int | None = None,
        background: str = "white",
    ) -> None:
        super().__init__(batch_size, num_workers, on_error)
        require_color(background)
        if num_frames is not None:
            require_number("num_frames", num_frames, 1, whole=True)
            if condition is not None:
                raise ConfigurationError(
                    f"condition={condition!r} is for images; leave it or num_frames={num_frames} out"
                )
        require_number("resolution", resolution, 1, whole=True)
        require_number("validation_share", validation_share, 0, 1)
        folder = str(folder)  # a checkpoint of plain values can be read without trusting it
        self.save_hyperparameters()

    def require_listing(self) -> None:
        """Refuses a folder without a listing before processes start; a module that is only read needs none.

        Raises:
            ConfigurationError: It has no `metadata.jsonl`.
        """
        require_listing(Path(self.hparams.folder))

    def setup(self, stage: str) -> None:
        """Reads `metadata.jsonl` and splits its lines.

        Raises:
            ConfigurationError: The file is missing, or all of its images are held back, or videos need a package
                that is missing.
            DataError: A line of it is malformed, or names an image that is not there.
        """
        h = self.hparams
        split: dict[bool, list[_Listed]] = {False: [], True: []}
        keys = ["file_name", h.caption_key]
        if h.condition and h.condition not in MADE:
            keys.append(h.condition)
        lines = _Lines(Path(h.folder), keys, may_be_folders=h.num_frames is not None)
        entries = lines.read(h.on_error == "skip")
        files = (entry.path for entry in entries if entry.path.is_file())
        decodes = h.num_frames is None or importlib.util.find_spec("av") is not None
        if not decodes and (file := next(files, None)):  # else each of them would be called broken
            raise ConfigurationError(
                f"{file} needs the package av to be decoded; run: pip install 'lightning-diffpipe[video]', or "
                "give folders of frames"
            )
        for entry in entries:  # by paths in the folder, which it keeps wherever it is moved
            name = Path(os.path.relpath(entry.path, h.folder)).as_posix()
            split[share_of(name) < h.validation_share].append(entry)
        if stage == "fit" and not split[False]:
            raise ConfigurationError(
                f"all {len(split[True])} images of {h.folder} are held back, and none is left to train on: add "
                f"images, or lower validation_share={h.validation_share} (data.validation_share)"
            )
        train_set, validation_set = (
            _Images(split[held], h.resolution, h.background, h.num_frames) for held in (False, True)
        )
        self._use(train_set, validation_set, h.condition if h.condition in MADE else None)
