"""Videos as samples: files that PyAV decodes (mp4, webm, gif, ...), and folders of frames."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from lightning_diffpipe.data.image_folder import to_square
from lightning_diffpipe.errors import ConfigurationError, DataError


def read_video(path: Path, num_frames: int, resolution: int) -> Tensor:
    """Reads successive frames out of the middle of a video.

    Args:
        path: A file, or a folder whose pictures are the frames, in the order of their names.
        num_frames: How many.
        resolution: Width and height wanted, in pixels.

    Returns:
        Float32 in [-1, 1], `(3, num_frames, resolution, resolution)`.

    Raises:
        DataError: It has fewer frames.
        ConfigurationError: A file, and the package av is missing.
    """
    count = len(_pictures(path)) if path.is_dir() else sum(1 for _ in _decoded(path))
    if count < num_frames:
        raise DataError(
            f"{path} has {count} frames, and num_frames={num_frames} are wanted (data.num_frames)"
        )
    first = (count - num_frames) // 2
    frames = map(Image.open, _pictures(path)) if path.is_dir() else _decoded(path)
    wanted = islice(frames, first, first + num_frames)
    return torch.stack([to_square(frame, resolution) for frame in wanted], 1)


def _pictures(path: Path) -> list[Path]:
    return sorted(
        each for each in path.iterdir() if each.suffix.lower() in Image.registered_extensions()
    )


def _decoded(path: Path) -> Iterator[Image.Image]:
    try:
        import av
    except ImportError as error:
        raise ConfigurationError(
            f"{path} needs the package av to be decoded; run: pip install 'lightning-diffpipe[video]', or give "
            "folders of frames"
        ) from error
    with av.open(str(path)) as container:
        for frame in container.decode(video=0):
            yield frame.to_image()
