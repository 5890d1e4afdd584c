"""Folders and tar shards of images with captions, as users have them."""

import io
import json
import tarfile

import numpy as np
import pytest
from PIL import Image

RATIOS = [
    *((64, 64), (64, 48), (48, 64), (96, 48), (48, 96), (80, 40)),
    *((40, 80), (100, 50), (72, 56), (56, 72), (120, 40), (40, 120)),
]
"""Width and height of twelve kinds of images."""


def write_folder(folder, count=40):
    lines = []
    for i in range(count):
        Image.new("RGB", (20 + i, 30), (i, 0, 255)).save(folder / f"{i}.png")
        lines.append(json.dumps({"file_name": f"{i}.png", "text": f"image {i}"}))
    (folder / "metadata.jsonl").write_text("\n".join(lines))


def write_ratios(folder, count=200, ratios=12):
    """Images of so many ratios of sides, each with a text beside it."""
    for i in range(count):
        pixels = np.random.default_rng(i).integers(0, 255, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize(RATIOS[i % ratios]).save(folder / f"{i}.png")
        (folder / f"{i}.txt").write_text(f"cat {i}, grey, fog, small\n")


def write_clips(folder, lengths=(5, 9, 13), each=4):
    """Videos as folders of frames, each with a text beside it."""
    for i in range(len(lengths) * each):
        clip = folder / f"clip{i}"
        clip.mkdir()
        for frame in range(lengths[i % len(lengths)]):
            Image.new("RGB", (32, 32), (20 * frame, i, 0)).save(clip / f"{frame}.png")
        (folder / f"clip{i}.txt").write_text(f"clip {i}")


def write_video(path, size, levels):
    """A video of grey frames of some levels."""
    av = pytest.importorskip("av")
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=8)
        (stream.width, stream.height), stream.pix_fmt = size, "yuv420p"
        for level in levels:
            pixels = np.full((*reversed(size), 3), level, dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())


def red_images(numbers):
    """Files of a shard: for each number a red image, and the number as its caption."""
    files = {}
    for number in numbers:
        image = io.BytesIO()
        Image.new("RGB", (20, 20), (number, 0, 0)).save(image, "PNG")
        files |= {f"{number}.png": image.getvalue(), f"{number}.txt": b"%d" % number}
    return files


def write_shard(path, files):
    """Writes a shard of files, given by name."""
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))


def shards_of(folder, path, num_shards=1):
    """Writes a folder's images, or videos, and their captions into so many shards; returns their pattern."""
    files = sorted(file for file in folder.iterdir() if file.suffix != ".tar")
    stems = sorted({file.stem for file in files})
    for shard in range(num_shards):
        own = [file for file in files if file.stem in stems[shard::num_shards]]
        write_shard(path / f"{shard}.tar", {file.name: file.read_bytes() for file in own})
    return str(path / f"{{0..{num_shards - 1}}}.tar")
