"""From files to tensors: images, videos, and their companions such as masks.

Images are turned upright, scaled and cropped in one pass over what is kept, put on a background where they are
transparent, and converted to sRGB. Videos are decoded by PyAV, or are folders of frames.

Random crops, mirroring and orders of tags come from the global generators, which the run's seed, the epoch and the
number of the batch set (`training/loader.py`): a run that goes on in the middle of an epoch repeats them.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import IO, Any, TypeGuard

import numpy as np
import torch
from PIL import ExifTags, Image, ImageCms, ImageOps
from torch import Tensor

from lightning_diffpipe.data.captioned import Sample
from lightning_diffpipe.errors import ConfigurationError, DataError, require_flags, require_number

IMAGES = frozenset(
    {".avif", ".bmp", ".gif", ".jfif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"}
)
VIDEOS = frozenset({".avi", ".m4v", ".mkv", ".mov", ".mp4", ".webm"})
"""Endings by which files are found where no listing names them."""


@dataclass(frozen=True)
class Crop:
    """Scales an image until it covers a size, and crops it to that size.

    Attributes:
        height: Height of the crop, in pixels.
        width: Width of the crop.
        down: Place of the crop in the scaled image: 0 at the top, 1 at the bottom.
        across: 0 at the left, 1 at the right.
        flipped: Whether it is mirrored, left and right.
    """

    height: int
    width: int
    down: float = 0.5
    across: float = 0.5
    flipped: bool = False

    def place(self, width: int, height: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Returns width and height of an image of this size after scaling, and left and top of the crop."""
        scale = max(self.width / width, self.height / height)
        wide, high = max(self.width, round(scale * width)), max(self.height, round(scale * height))
        beyond = (wide - self.width) * self.across, (high - self.height) * self.down
        return (wide, high), (int(beyond[0]), int(beyond[1]))

    def of(self, image: Image.Image) -> Image.Image:
        """Returns the cropped image."""
        (wide, high), (left, top) = self.place(*image.size)
        across, down = image.width / wide, image.height / high
        right = min((left + self.width) * across, image.width)
        bottom = min((top + self.height) * down, image.height)
        box = left * across, top * down, right, bottom
        cropped = image.resize((self.width, self.height), Image.Resampling.LANCZOS, box)
        return ImageOps.mirror(cropped) if self.flipped else cropped


@dataclass(frozen=True)
class Augmentation:
    """Crops, mirroring and changes of captions, which may be random each time a sample is read.

    Attributes:
        flip: Share of the samples that are mirrored, left and right.
        random_crop: Crop anywhere, not in the middle.
        shuffle_tags: Mix the order of a caption's parts between commas.
        drop_tags: Share of the parts that are left out.
        keep_tags: Number of first parts that stay, in their places.
        trigger: Words put in front of captions that do not have them.

    Raises:
        ConfigurationError: A number that cannot be.
    """

    flip: float = 0.0
    random_crop: bool = False
    shuffle_tags: bool = False
    drop_tags: float = 0.0
    keep_tags: int = 0
    trigger: str | None = None

    def __post_init__(self) -> None:
        require_number("flip", self.flip, 0, 1)
        require_number("drop_tags", self.drop_tags, 0, 1)
        require_number("keep_tags", self.keep_tags, 0, whole=True)
        require_flags(random_crop=self.random_crop, shuffle_tags=self.shuffle_tags)
        if not isinstance(self.trigger, str | None):
            raise ConfigurationError(f"trigger={self.trigger!r} must be a text; put it in quotes")
        if self.keep_tags and not (self.shuffle_tags or self.drop_tags):
            raise ConfigurationError(
                f"keep_tags={self.keep_tags} keeps tags in front of others that are shuffled or dropped; add "
                "shuffle_tags=true or drop_tags=0.1"
            )

    def held_back(self) -> Augmentation:
        """Returns the augmentation of validation samples: the same each time."""
        still = {"shuffle_tags": False, "drop_tags": 0.0, "keep_tags": 0}
        return replace(self, flip=0.0, random_crop=False, **still)

    def crop(self, height: int, width: int) -> Crop:
        """Returns a crop of this size, sampled if crops or mirroring are random."""
        down, across = torch.rand(2).tolist() if self.random_crop else (0.5, 0.5)
        return Crop(height, width, down, across, bool(self.flip and torch.rand(()) < self.flip))

    def caption(self, text: str) -> str:
        """Returns a caption with those of its tags that are not dropped, shuffled or not, and the trigger."""
        if self.shuffle_tags or self.drop_tags:
            tags = [tag.strip() for tag in text.split(",")]
            leading, others = tags[: self.keep_tags], tags[self.keep_tags :]
            if self.drop_tags:
                kept = torch.rand(len(others)) >= self.drop_tags
                others = [tag for tag, stays in zip(others, kept.tolist(), strict=True) if stays]
            if self.shuffle_tags:
                others = [others[i] for i in torch.randperm(len(others))]
            text = ", ".join([*leading, *others])
        if self.trigger and self.trigger not in text:
            text = f"{self.trigger}, {text}" if text else self.trigger
        return text


def to_pixels(image: Image.Image, crop: Crop, background: str = "white") -> Tensor:
    """Returns a crop of an image, upright and in sRGB.

    Args:
        image: Any image of 8 or 16 bits; turned as its EXIF orientation says, and converted to sRGB.
        crop: Size and place of the crop.
        background: Colour that shows where the image is transparent, as PIL knows it.

    Returns:
        Float32 in [-1, 1], `(3, height, width)` of the crop.

    Raises:
        ConfigurationError: The image has values of 32 bits, of which nobody knows where white is.
    """
    # Cameras keep the sensor's rows and note how the image was held; every viewer turns it.
    image = ImageOps.exif_transpose(image)
    icc, key = image.info.get("icc_profile"), image.info.get("transparency")
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
    # With an alpha channel, colours are weighted by it: those that nobody sees do not bleed into others.
    cropped = crop.of(image)
    seen = _in_srgb(cropped.convert(cropped.mode.removesuffix("A")), icc)
    if "A" in cropped.getbands():
        behind = Image.new("RGB", seen.size, background)
        seen = Image.composite(seen, behind, cropped.getchannel("A"))
    return torch.from_numpy(np.asarray(seen).copy()).permute(2, 0, 1).float() / 127.5 - 1


def _to_mask(image: Image.Image, crop: Crop) -> Tensor:
    """Returns a crop of a mask, `(1, height, width)` in [0, 1]: levels, and 0 where it is transparent."""
    image = ImageOps.exif_transpose(image)  # a copy
    image.info.pop("icc_profile", None)
    return (to_pixels(image, crop, "black")[:1] + 1) / 2


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


def size_of(image: Image.Image) -> tuple[int, int]:
    """Returns width and height of an image that stands upright, by its header alone."""
    # Not by the method of PNG files, which decodes them for what follows the pixels.
    turned = Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1) in (5, 6, 7, 8)
    return (image.height, image.width) if turned else image.size


def read_sample(
    file: IO[bytes] | Path,
    caption: str,
    crop: Crop,
    background: str,
    name: str,
    companions: Mapping[str, tuple[IO[bytes] | Path, str]],
    alpha: bool = False,
) -> Sample:
    """Reads an image and its companions.

    Args:
        file: File of the image, in any format of PIL.
        caption: Caption of the image.
        crop: Crop of the image, and of the files next to it.
        background: Argument of `to_pixels`.
        name: Name of the file in messages.
        companions: Files of a `"condition"` and a `"mask"`, as far as there are some, with their names.
        alpha: Whether the image's own alpha channel is the mask.

    Raises:
        DataError: A file cannot be read, or one next to the image has another shape; names what they are called.
    """
    with reading(name), Image.open(file) as image:
        sample: Sample = {"image": to_pixels(image, crop, background), "caption": caption}
        # What models such as SDXL are told; section 2.2 of https://arxiv.org/abs/2307.01952
        width, height = ImageOps.exif_transpose(image).size
        (wide, _), (left, top) = crop.place(width, height)
        left = wide - crop.width - left if crop.flipped else left
        sample["original_size"] = torch.tensor([height, width])
        sample["crops_coords_top_left"] = torch.tensor([top, left])
        if alpha:
            channel = ImageOps.exif_transpose(image).convert("RGBA").getchannel("A")
            sample["mask"] = _to_mask(channel, crop)
        for kind, (its_file, its_name) in companions.items():
            with reading(its_name), Image.open(its_file) as other:
                require_same_shape(image, name, other, its_name, kind)
                if kind == "mask":
                    sample[kind] = _to_mask(other, crop)
                else:
                    sample[kind] = (to_pixels(other, crop, background) + 1) / 2
    return sample


def read_reference(file: IO[bytes] | Path, crop: Crop, background: str, name: str) -> np.ndarray:
    """Reads an image that another one is made from; it may have any shape.

    Returns:
        What the crop keeps of it, `(height, width, 3)` in 8 bits.

    Raises:
        DataError: It cannot be read.
    """
    with reading(name), Image.open(file) as image:
        levels = (to_pixels(image, crop, background) + 1) * 127.5
        return levels.round().byte().permute(1, 2, 0).contiguous().numpy()


def read_video(
    path: Path | IO[bytes], num_frames: int, crop: Crop, background: str = "white"
) -> Tensor:
    """Reads successive frames out of the middle of a video.

    Args:
        path: A file, its content, or a folder whose images are the frames, in the order of the numbers in their
            names.
        num_frames: Number of frames.
        crop: Crop of each frame.
        background: Argument of `to_pixels`.

    Returns:
        Float32 in [-1, 1], `(3, num_frames, height, width)`.

    Raises:
        DataError: It has fewer frames.
    """
    if not _is_folder(path):
        frames = _decoded(path, num_frames, crop, background)
    else:
        files, frames = _frames(path), []
        first = max(0, (len(files) - num_frames) // 2)
        for file in files[first : first + num_frames]:
            with Image.open(file) as image:
                frames.append(to_pixels(image, crop, background))
    if len(frames) < num_frames:
        raise too_short(path, len(frames), num_frames)
    return torch.stack(frames, 1)


def video_size(path: Path | IO[bytes]) -> tuple[int, int, int]:
    """Returns width, height and number of frames of a video, a file or a folder, as it is shown."""
    if _is_folder(path):
        files = _frames(path)
        if not files:
            raise too_short(path, 0, 1)
        with Image.open(files[0]) as image:
            return *size_of(image), len(files)
    with _opened(path) as container:
        count = container.streams.video[0].frames or _count(container)
    with _opened(path) as container:  # whose first frame says how the camera was held
        return *_shown(next(container.decode(video=0)), container).size, count


def too_short(path: Path | IO[bytes], there: int, wanted: int) -> DataError:
    """Returns the error of a video with fewer frames than needed."""
    return DataError(
        f"{path} has {there} frames, and num_frames={wanted} are wanted (data.num_frames)"
    )


def _is_folder(path: Path | IO[bytes]) -> TypeGuard[Path]:
    return isinstance(path, Path) and path.is_dir()


def _frames(folder: Path) -> list[Path]:
    endings = Image.registered_extensions()
    files = (file for file in folder.iterdir() if file.suffix.lower() in endings)
    return sorted(files, key=_by_number)


def _by_number(path: Path) -> list[tuple[int, str]]:
    """Sorts `frame2` before `frame10`."""
    parts = re.split(r"(\d+)", path.name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def _count(container: Any) -> int:
    return sum(packet.size > 0 for packet in container.demux(video=0))


@contextlib.contextmanager
def _opened(path: Path | IO[bytes]) -> Iterator[Any]:
    import av

    if not isinstance(path, Path):
        path.seek(0)
    with av.open(str(path) if isinstance(path, Path) else path) as container:
        if not container.streams.video:
            raise ValueError("there is sound in it, and no video")
        yield container


def _shown(frame: Any, container: Any) -> Image.Image:
    """Returns a frame as viewers show it: rotated as recorded, and scaled to square pixels."""
    image = Image.fromarray(frame.to_ndarray(format="rgba"))
    if ratio := container.streams.video[0].sample_aspect_ratio:  # None and 0: squares
        image = image.resize((max(1, round(image.width * ratio)), image.height))
    return image.rotate(frame.rotation, expand=True)  # by quarters, which moves pixels only


def _decoded(path: Path | IO[bytes], num_frames: int, crop: Crop, background: str) -> list[Tensor]:
    with _opened(path) as container:  # counts without decoding
        count = _count(container)
    stop = max(0, (count - num_frames) // 2) + num_frames
    with _opened(path) as container:
        # Packets of some codecs show nothing: where frames end early, those are read that there are.
        frames = deque(islice(container.decode(video=0), stop), maxlen=num_frames)
        return [to_pixels(_shown(frame, container), crop, background) for frame in frames]


@contextlib.contextmanager
def reading(name: str) -> Iterator[None]:
    """Turns whatever a decoder raises for a broken file into a DataError that names the file."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(
            f"{name} cannot be used: {error}. Mend or remove it, or leave such samples out with on_error='skip' "
            "(data.on_error=skip)"
        ) from error


def require_same_shape(
    image: Image.Image, name: str, condition: Image.Image, its_name: str, kind: str
) -> None:
    """Raises DataError for a condition or mask (`kind`) of another ratio of sides, whose crop would differ."""
    width, height = ImageOps.exif_transpose(image).size
    its_width, its_height = ImageOps.exif_transpose(condition).size
    scale, shape = its_height / height, width / height
    # Where one was made from the other, in pixels of the condition.
    rounding = (1 + shape) * max(1, scale)
    if abs(its_width - width * scale) > rounding:
        raise DataError(
            f"{its_name} has {its_width}x{its_height} pixels, and {name} {width}x{height}: a {kind} must have "
            "the shape of its image, as it says where in it something shall be. Scale it to the image's size: "
            "tools that make such images may have rounded its sides"
        )
