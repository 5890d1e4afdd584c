import io
import json
import sys
import tarfile

import pytest
import torch
from PIL import Image

from lightning_diffpipe.data import ImageFolderDataModule, WebDatasetDataModule
from lightning_diffpipe.data.image_folder import to_square
from lightning_diffpipe.errors import ConfigurationError


def write_folder(folder, count=40):
    lines = []
    for i in range(count):
        Image.new("RGB", (20 + i, 30), (i, 0, 255)).save(folder / f"{i}.png")
        lines.append(json.dumps({"file_name": f"{i}.png", "text": f"picture {i}"}))
    (folder / "metadata.jsonl").write_text("\n".join(lines))


def test_a_folder_gives_squares_with_captions(tmp_path):
    write_folder(tmp_path)
    data = ImageFolderDataModule(
        str(tmp_path), resolution=16, validation_share=0.2, batch_size=4, num_workers=0
    )
    data.setup("fit")
    assert len(data.train_set) + len(data.validation_set) == 40
    batch = next(iter(data.train_dataloader()))
    assert batch["image"].shape == (4, 3, 16, 16)
    for image, caption in zip(batch["image"], batch["caption"], strict=True):
        red = int(caption.split()[1])
        assert torch.allclose(image[0], torch.tensor(red / 127.5 - 1))


def test_what_a_checkpoint_keeps_of_a_folder_is_plain(tmp_path):
    """History: a folder given as a Path made checkpoints that could not be read again."""
    assert ImageFolderDataModule(tmp_path).hparams.folder == str(tmp_path)


def test_squares_are_cut_from_the_middle():
    picture = Image.new("RGB", (30, 10))
    picture.paste((255, 255, 255), (10, 0, 20, 10))
    assert torch.equal(to_square(picture, 10), torch.ones(3, 10, 10))


def test_a_missing_index_says_what_to_write(tmp_path):
    data = ImageFolderDataModule(str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"metadata.jsonl does not exist; write one line"):
        data.setup("fit")


def test_a_malformed_line_is_named(tmp_path):
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "a"}\n{"file": "b"}')
    data = ImageFolderDataModule(str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"line 2: expected .* 'file_name' and 'text'"):
        data.setup("fit")


def test_webdataset_is_asked_for_when_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "webdataset", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'lightning-diffpipe\[webdataset\]'"):
        WebDatasetDataModule("x.tar", samples_per_epoch=1)


def test_shards_give_batches_like_all_others(tmp_path):
    pytest.importorskip("webdataset")
    with tarfile.open(tmp_path / "0.tar", "w") as tar:
        for i in range(6):
            picture = io.BytesIO()
            Image.new("RGB", (20, 20), (i, 0, 0)).save(picture, "PNG")
            for name, content in ((f"{i}.png", picture.getvalue()), (f"{i}.txt", b"red %d" % i)):
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
    shards = str(tmp_path / "0.tar")
    data = WebDatasetDataModule(
        shards,
        samples_per_epoch=6,
        validation_shards=shards,
        resolution=8,
        batch_size=2,
        num_workers=0,
    )
    batches = list(data.train_dataloader())
    assert [batch["image"].shape for batch in batches] == [(2, 3, 8, 8)] * 3
    assert [caption for batch in data.val_dataloader() for caption in batch["caption"]] == [
        f"red {i}" for i in range(6)
    ]
