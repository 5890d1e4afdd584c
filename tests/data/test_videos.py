"""Videos of a folder: files and folders of frames."""

import importlib.util
import json
import struct

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_diffpipe.data import ImageFolderDataModule
from lightning_diffpipe.errors import ConfigurationError, DataError
from tests.data.folders import write_video

LEVELS = [30, 60, 90, 120, 150, 180, 210]  # of the frames, by which they are recognised


def listing(folder, name):
    (folder / "metadata.jsonl").write_text(json.dumps({"file_name": name, "text": "a clip"}))


def write_frames(folder):
    (folder / "clip").mkdir()
    for i, level in enumerate(LEVELS):
        pixels = np.full((20, 30, 3), level, dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "clip" / f"{i:03}.png")
    (folder / "clip" / "notes.txt").write_text("not a frame")
    listing(folder, "clip")


def write_mp4(folder):
    write_video(folder / "clip.mp4", (32, 16), LEVELS)
    listing(folder, "clip.mp4")


def module_of(folder, num_frames=5, **options):
    data = ImageFolderDataModule(
        folder, 16, validation_share=0, batch_size=1, num_workers=0, num_frames=num_frames, **options,
    )  # fmt: skip
    data.setup("fit")
    return data


@pytest.mark.parametrize("write", [write_frames, write_mp4])
def test_successive_frames_come_out_of_the_middle(write, tmp_path):
    write(tmp_path)
    batch = next(iter(module_of(tmp_path).train_dataloader()))
    assert batch["video"].shape == (1, 3, 5, 16, 16)
    assert batch["caption"] == ["a clip"]
    assert "image" not in batch
    got = (batch["video"][0].mean((0, 2, 3)) + 1) * 127.5
    torch.testing.assert_close(got, torch.tensor(LEVELS[1:6]).float(), atol=4, rtol=0)


def test_videos_are_read_as_viewers_show_them(tmp_path):
    """History: those of phones that were held upright were trained lying on their side."""
    av = pytest.importorskip("av")
    path = tmp_path / "clip.mp4"
    with av.open(str(path), "w") as file:
        stream = file.add_stream("libx264", rate=8)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        stream.codec_context.sample_aspect_ratio = 2  # 64 x 32 pixels that are squares
        pixels = np.zeros((32, 32, 3), np.uint8)
        pixels[:16] = 255
        for _ in range(5):
            file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        file.mux(stream.encode())
    data, start = bytearray(path.read_bytes()), path.read_bytes().index(b"tkhd") + 44
    # The matrix in the track's header: a quarter to the right, and back into the frame.
    data[start : start + 36] = struct.pack(
        ">9i", 0, 1 << 16, 0, -1 << 16, 0, 0, 32 << 16, 0, 1 << 30
    )
    path.write_bytes(data)
    listing(tmp_path, "clip.mp4")
    (batch,) = module_of(tmp_path, buckets=True, bucket_step=8).train_dataloader()
    assert batch["video"].shape[3:] == (24, 8)
    columns = batch["video"][0, 0, 0].mean(0)
    torch.testing.assert_close(columns[[0, -1]], torch.tensor([-1.0, 1.0]), atol=0.1, rtol=0)


def test_a_video_may_begin_with_an_image_of_its_own(tmp_path):
    write_frames(tmp_path)
    Image.new("RGB", (60, 40), (255, 51, 0)).save(tmp_path / "first.png")
    line = {"file_name": "clip", "text": "a clip", "image": "first.png"}
    (tmp_path / "metadata.jsonl").write_text(json.dumps(line))
    data = module_of(tmp_path, condition="image")
    batch = next(iter(data.train_dataloader()))
    expected = torch.tensor([1, 0.2, 0])[:, None, None].expand(3, 16, 16)
    torch.testing.assert_close(batch["condition"][0], expected)
    (tmp_path / "first.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"first\.png .*cannot be used"):
        next(iter(data.train_dataloader()))
    with pytest.raises(ConfigurationError, match="condition='edges' is for images"):
        module_of(tmp_path, condition="edges")


def test_first_frames_that_are_held_back_are_what_is_drawn_from(tmp_path):
    write_frames(tmp_path)
    data = ImageFolderDataModule(
        tmp_path, 16, validation_share=1, batch_size=1, num_workers=0, num_frames=5
    )
    data.setup("validate")
    expected = torch.full((1, 3, 16, 16), LEVELS[1] / 255)
    torch.testing.assert_close(data.held_back_conditions(1), expected)


def test_first_frames_of_several_sizes_are_not_taken(tmp_path):
    """History: a RuntimeError of torch.stack before training; the first batch has some of one size."""
    for name, size in (("a", (32, 16)), ("b", (16, 32))):
        (tmp_path / name).mkdir()
        for i in range(5):
            Image.new("RGB", size).save(tmp_path / name / f"{i}.png")
    lines = [json.dumps({"file_name": name, "text": name}) for name in "ab"]
    (tmp_path / "metadata.jsonl").write_text("\n".join(lines))
    options = {"validation_share": 1, "num_workers": 0, "num_frames": 5}
    data = ImageFolderDataModule(tmp_path, 16, buckets=True, bucket_step=8, **options)
    data.setup("validate")
    assert data.held_back_captions(2) == ["a", "b"]
    assert data.held_back_conditions(2) is None


def test_videos_that_cannot_be_used_are_named(tmp_path):
    write_frames(tmp_path)
    with pytest.raises(DataError, match="clip has 7 frames, and num_frames=9 are wanted"):
        module_of(tmp_path, 9).train_set[0]
    with pytest.raises(DataError, match=r"line 1: .* is no file"):
        module_of(tmp_path, None)


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_the_package_that_decodes_videos_is_named_before_training(on_error, tmp_path, monkeypatch):
    """History: every file was called broken, and on_error=skip left all of them out."""
    (tmp_path / "clip.mp4").write_bytes(b"a video")
    listing(tmp_path, "clip.mp4")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigurationError, match="the package av to be decoded; run: pip install"
    ) as e:
        module_of(tmp_path, on_error=on_error)
    assert not isinstance(e.value, DataError)


def test_frames_are_sorted_by_their_numbers(tmp_path):
    """History: frame10 came before frame2."""
    (tmp_path / "clip").mkdir()
    for i in range(12):
        Image.new("RGB", (16, 16), (20 * i,) * 3).save(tmp_path / "clip" / f"frame{i}.png")
    listing(tmp_path, "clip")
    video = module_of(tmp_path, 12).train_set[0]["video"]
    assert ((video[0, :, 0, 0] + 1) * 127.5).round().tolist() == [20.0 * i for i in range(12)]


def test_a_broken_video_is_named(tmp_path):
    pytest.importorskip("av")
    (tmp_path / "clip.mp4").write_bytes(b"no video")
    listing(tmp_path, "clip.mp4")
    with pytest.raises(DataError, match=r"clip\.mp4 \(metadata\.jsonl, line 1\) cannot be used"):
        module_of(tmp_path).train_set[0]
