import io
import json
import random
import re
import tarfile
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import webdataset as wds
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.data import has_len_all_ranks
from PIL import ExifTags, Image
from torch.utils.data import DataLoader

from lightning_diffpipe.data import ImageFolderDataModule, WebDatasetDataModule
from lightning_diffpipe.data.buckets import Shape
from lightning_diffpipe.data.listing import Listing
from lightning_diffpipe.data.pixels import Crop, to_pixels
from lightning_diffpipe.errors import ConfigurationError, DataError
from lightning_diffpipe.training.loader import PipelineLoader
from tests.data.folders import red_images, write_folder, write_shard


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
    held_back = [entry.caption for entry in data.validation_set.entries]
    assert data.held_back_captions(99) == held_back
    assert data.held_back_captions(2) == [held_back[0], held_back[len(held_back) // 2]]


@pytest.mark.parametrize("orientation", [1, 6])
def test_images_come_with_their_size_and_crop(orientation, tmp_path):
    """Of the upright image, as viewers show it, and where the crop begins in the scaled one."""
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "a"}')
    image = Image.new("RGB", (100, 40) if orientation == 1 else (40, 100))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    image.save(tmp_path / "a.png", exif=exif)
    data = ImageFolderDataModule(
        tmp_path, 20, validation_share=0, batch_size=1, num_workers=0, condition="edges"
    )
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert batch["original_size"].tolist() == [[40, 100]]
    assert batch["crops_coords_top_left"].tolist() == [[0, 15]]  # of 20 x 50


def write_conditions(folder, size=lambda width, height: (width, height)):
    """A second image for each, as blue as the first is red."""
    lines = []
    for line in (folder / "metadata.jsonl").read_text().split("\n"):
        entry = json.loads(line)
        name = f"condition_{entry['file_name']}"
        with Image.open(folder / entry["file_name"]) as image:
            red = image.getpixel((0, 0))[0]
            Image.new("RGB", size(*image.size), (0, 0, red)).save(folder / name)
        lines.append(json.dumps({**entry, "conditioning_image": name}))
    (folder / "metadata.jsonl").write_text("\n".join(lines))


@pytest.mark.parametrize("size", [lambda w, h: (w, h), lambda w, h: (round(w / 3), round(h / 3))])
def test_a_folder_may_name_a_second_image(tmp_path, size):
    write_folder(tmp_path)
    write_conditions(tmp_path, size)
    options = {"resolution": 16, "batch_size": 4, "num_workers": 0, "validation_share": 0.2}
    data = ImageFolderDataModule(tmp_path, condition="conditioning_image", **options)
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert batch["condition"].shape == (4, 3, 16, 16)
    torch.testing.assert_close(batch["condition"][:, 2], (batch["image"][:, 0] + 1) / 2)
    assert not batch["condition"][:, :2].any()
    assert data.held_back_conditions(3).shape == (3, 3, 16, 16)
    assert ImageFolderDataModule(tmp_path, condition="edges").hparams.condition == "edges"


def test_second_images_of_another_shape_are_refused(tmp_path):
    write_folder(tmp_path)
    write_conditions(tmp_path, lambda width, height: (width + 3, height))
    data = ImageFolderDataModule(tmp_path, condition="conditioning_image", validation_share=0.0)
    data.setup("fit")
    with pytest.raises(
        ConfigurationError,
        match=r"condition_0.png \(metadata.jsonl, line 1\) has 23x30 pixels, .*20x30",
    ):
        data.train_set[0]


def depth_map(size=20):
    """Grey levels of 16 bits, black above half."""
    levels = np.full((size, size), 32896, dtype=np.uint16)
    levels[size // 2 :] = 0
    return Image.fromarray(levels)


def test_images_of_16_bits_keep_their_levels(tmp_path):
    """Depth maps have 16 bits; cut off at 255, all of them is white."""
    assert depth_map().mode == "I;16"
    depth_map().save(tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as image:
        condition = (to_pixels(image, Crop(20, 20)) + 1) / 2
    expected = torch.zeros(3, 20, 20)
    expected[:, :10] = 128 / 255
    torch.testing.assert_close(condition, expected)
    with pytest.raises(ConfigurationError, match=r"32 bits \(mode F\).*8 or 16 bits"):
        to_pixels(depth_map().convert("F"), Crop(20, 20))


def test_a_line_without_a_second_image_is_named(tmp_path):
    write_folder(tmp_path)
    data = ImageFolderDataModule(tmp_path, condition="depth")
    with pytest.raises(
        ConfigurationError, match=r"line 1: .* 'text' and 'depth' \(the condition\)"
    ):
        data.setup("fit")


def test_what_a_checkpoint_keeps_of_a_folder_is_plain(tmp_path):
    """History: a folder given as a Path made checkpoints that could not be read again."""
    assert ImageFolderDataModule(tmp_path).hparams.folder == str(tmp_path)


def photograph(**options):
    """What a camera on its side keeps: the upper half of the scene, white, lies on the left."""
    image = Image.new("RGB", (20, 20))
    image.paste((255, 255, 255), (0, 0, 10, 20))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6  # turn by 90 degrees, clockwise
    file = io.BytesIO()
    image.save(file, exif=exif, **options)
    return file.getvalue()


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_photographs_stand_upright(tmp_path, form):
    """History: the orientation that cameras write was ignored, and models learned sideways images."""
    (tmp_path / "a.jpg").write_bytes(photograph(format=form))
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "a.jpg", "text": "a"}')
    data = ImageFolderDataModule(str(tmp_path), resolution=20, validation_share=0.0)
    data.setup("fit")
    image = data.train_set[0]["image"]
    assert (image[:, :8] > 0.9).all()
    assert (image[:, -8:] < -0.9).all()


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_captions_may_hold_any_character_that_json_allows(tmp_path, end):
    """History: lines were cut at U+2028, U+2029 and U+0085 inside of captions."""
    (tmp_path / "a.png").write_bytes(photograph(format="PNG"))
    captions = [f"a{character}b" for character in "\u2028\u2029\x85\u00e9"]
    lines = [
        json.dumps({"file_name": "a.png", "text": caption}, ensure_ascii=False)
        for caption in captions
    ]
    (tmp_path / "metadata.jsonl").write_bytes((end.join(lines) + end).encode())
    data = ImageFolderDataModule(str(tmp_path), validation_share=0.0)
    data.setup("fit")
    assert [entry.caption for entry in data.train_set.entries] == captions


@pytest.fixture
def shards(tmp_path):
    """Three shards of six red images each."""
    for shard in range(3):
        write_shard(tmp_path / f"{shard}.tar", red_images(range(6 * shard, 6 * shard + 6)))
    return str(tmp_path / "{0..2}.tar")


def data_of(shards, **options):
    defaults = {"samples_per_epoch": 18, "resolution": 8, "batch_size": 2, "num_workers": 0}
    return WebDatasetDataModule(shards, **{**defaults, **options})


def as_rank(data, epoch=0, rank=0, num_ranks=1):
    """Puts a data module into a trainer's hands."""
    sampling = {"rank": rank, "num_replicas": num_ranks}
    strategy = SimpleNamespace(distributed_sampler_kwargs=sampling)
    data.trainer = SimpleNamespace(current_epoch=epoch, strategy=strategy)
    return data


def captions(loader):
    return [int(caption) for batch in loader for caption in batch["caption"]]


def test_shards_give_batches_like_all_others(shards):
    data = data_of(shards, validation_shards=shards, batch_size=4)
    batches = list(data.train_dataloader())
    assert [batch["image"].shape for batch in batches] == [(4, 3, 8, 8)] * 4
    assert captions(data.val_dataloader()) == list(range(18))
    assert data.held_back_captions(3) == ["0", "1", "2"]
    assert data_of(shards).held_back_captions(3) == []


def test_shards_may_have_references(tmp_path):
    """They have any shape, are cut and mirrored as their image is, and each sample has all of them."""
    files, numbers = red_images(range(4)), np.random.default_rng(0)
    for key in range(4):
        for end, size in (("her.png", (8, 8)), ("hat.png", (12, 8))):
            pixels = numbers.integers(0, 256, (*size, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(stored := io.BytesIO(), "PNG")
            files[f"{key}.{end}"] = stored.getvalue()
            if end == "her.png":
                files[f"{key}.png"] = stored.getvalue()
    write_shard(tmp_path / "0.tar", dict(sorted(files.items())))
    shards = str(tmp_path / "0.tar")
    several = {"references": ["her.png", "hat.png"], "batch_size": 4, "samples_per_epoch": 4}
    data = data_of(shards, validation_shards=shards, flip=0.5, **several)
    (batch,) = data.train_dataloader()
    assert [(x.shape, x.dtype) for x in batch["references"]] == [((4, 8, 8, 3), np.uint8)] * 2
    seen = torch.from_numpy(batch["references"][0]).permute(0, 3, 1, 2) / 127.5 - 1
    torch.testing.assert_close(seen, batch["image"], rtol=0, atol=1e-6)
    for number, hat in enumerate(data.held_back_conditions(4)[1]):
        whole = np.asarray(Image.open(io.BytesIO(files[f"{number}.hat.png"])))
        assert np.array_equal(hat, whole[2:10])
    one = next(iter(data_of(shards, references="hat.png").train_dataloader()))
    assert len(one["references"]) == 1
    del files["3.hat.png"]
    write_shard(tmp_path / "0.tar", dict(sorted(files.items())))
    with pytest.raises(DataError, match=r"sample '3' of .* has no hat\.png"):
        list(data.val_dataloader())


def test_shards_may_have_second_images(tmp_path):
    files = red_images(range(4))
    files |= {name.replace(".png", ".cond.png"): f for name, f in files.items() if "png" in name}
    write_shard(tmp_path / "0.tar", dict(sorted(files.items())))
    shards = str(tmp_path / "0.tar")
    data = data_of(shards, validation_shards=shards, condition="cond.png")
    batch = next(iter(data.train_dataloader()))
    torch.testing.assert_close(batch["condition"], (batch["image"] + 1) / 2)
    assert data.held_back_conditions(3).shape == (3, 3, 8, 8)
    depth = io.BytesIO()
    depth_map().save(depth, "PNG")
    files["3.cond.png"] = depth.getvalue()
    write_shard(tmp_path / "0.tar", dict(sorted(files.items())))
    condition = list(data.val_dataloader())[1]["condition"][1]
    torch.testing.assert_close(condition[:, 0], torch.full((3, 8), 128 / 255))
    with Image.open(io.BytesIO(depth.getvalue())) as image:
        image.resize((10, 20)).save(wide := io.BytesIO(), "PNG")
    write_shard(tmp_path / "0.tar", dict(sorted((files | {"3.cond.png": wide.getvalue()}).items())))
    with pytest.raises(
        ConfigurationError, match=r"3.cond.png \(.*0.tar\) has 10x20 pixels, and 3.png"
    ):
        list(data.val_dataloader())
    made = next(iter(data_of(str(tmp_path / "0.tar"), condition="edges").train_dataloader()))
    assert made["condition"].max() < 1e-6  # images of one colour


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2, 5])
def test_an_epoch_of_shards_is_as_long_as_asked_for(shards, num_workers):
    """History: every worker gave a whole epoch, and a worker without a shard nothing."""
    options = {"samples_per_epoch": 8, "num_workers": num_workers}
    ranks = [as_rank(data_of(shards, **options), 0, rank, 2) for rank in (0, 1)]
    assert [len(captions(data.train_dataloader())) for data in ranks] == [4, 4]


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_epoch_of_shards_has_its_own_order(shards, num_workers):
    """History: every epoch gave the same samples in the same order."""
    data = as_rank(data_of(shards, num_workers=num_workers))
    loader = data.train_dataloader()
    first, again = captions(loader), captions(loader)
    assert first == again, "the order follows from the epoch alone"
    assert first != list(range(18))
    if not num_workers:
        assert sorted(first) == list(range(18))
    data.trainer.current_epoch = 1
    assert captions(loader) != first
    assert len(captions(as_rank(data_of(shards, samples_per_epoch=40)).train_dataloader())) == 40


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_epoch_of_shards_has_a_length(shards, num_workers, recwarn):
    """History: without one, a run of some epochs knew no number of steps for its learning rate; Lightning warned
    of it, and of the validation set that was not asked for."""
    data = data_of(shards, num_workers=num_workers)
    loader, one_process = data.train_dataloader(), SingleDeviceStrategy("cpu")
    assert len(loader) == len(list(loader)) == 9
    assert has_len_all_ranks(loader, one_process)
    has_len_all_ranks(data.val_dataloader(), one_process)
    assert not [w for w in recwarn if re.search("__len__|Total length", str(w.message))]


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_of_ones_own_is_shared_out_over_pipelines(tmp_path, num_workers):
    """As docs/data.md has it. History: nothing said how, and errors of both packages led in a circle."""
    for shard in range(4):
        write_shard(tmp_path / f"{shard}.tar", red_images(range(6 * shard, 6 * shard + 6)))

    def loader(rank):
        deal = wds.slice(rank, None, 2)
        shards = str(tmp_path / "{0..3}.tar")
        data = wds.WebDataset(shards, nodesplitter=deal, shardshuffle=100, seed=0)
        data = data.shuffle(1000, rng=random).decode("pil").to_tuple("png", "txt")
        data = data.map(lambda pair: torch.tensor(int(pair[1]))).batched(
            3, collation_fn=torch.stack
        )
        stream = DataLoader(data.with_epoch(4), batch_size=None, num_workers=num_workers)
        epochs = iter(range(9))
        place = lambda length: (next(epochs), 0, 0)
        return PipelineLoader(stream, None, True, 7, rank, place)

    first, same, other = loader(0), loader(0), loader(1)
    epochs = [torch.cat(list(first)).tolist() for _ in range(2)]
    assert epochs == [torch.cat(list(same)).tolist() for _ in range(2)]
    assert epochs[0] != epochs[1]
    beside = torch.cat(list(other)).tolist()
    assert not set(epochs[0]) & set(beside)
    assert len(epochs[0]) == len(beside) == 12 * max(1, num_workers)


def test_fewer_shards_than_pipelines_are_refused(shards):
    """History: pipelines without a shard had no batch, and the others waited for them."""
    with pytest.raises(ConfigurationError, match=r"3 shards .* to 4 data-parallel ranks"):
        as_rank(data_of(shards), num_ranks=4).train_dataloader()


def broken_files(folder):
    """What was found in folders of users: file, caption, and what is to be said of it."""
    whole = photograph(format="PNG")
    files = {
        "whole.png": whole,
        "cut.jpg": photograph(format="JPEG")[:-60],
        "text.png": b"no image at all",
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    depth_map().convert("F").save(folder / "levels.tiff")
    Image.new("1", (20000, 10000)).save(folder / "huge.png")
    return [*files, "levels.tiff", "huge.png"]


def listed(folder, names):
    """A data module of images, in this order."""
    lines = [json.dumps({"file_name": name, "text": name}) for name in names]
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    return lambda **options: ImageFolderDataModule(
        folder, resolution=8, validation_share=0.0, batch_size=1, num_workers=0, **options
    )


def test_an_image_that_cannot_be_read_is_named(tmp_path):
    """History: PIL's own words came, at whatever step it was drawn, and nothing said which of a million it was."""
    data = listed(tmp_path, broken_files(tmp_path))()
    data.setup("fit")
    reasons = ["truncated", "cannot identify", r"32 bits \(mode F\)", "decompression bomb"]
    for index, reason in enumerate(reasons, start=1):
        name = data.train_set.entries[index].path.name
        expected = rf"{name} \(metadata.jsonl, line {index + 1}\) cannot be used: (?s:.*){reason}"
        with pytest.raises(DataError, match=expected):
            data.train_set[index]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_images_that_cannot_be_read_are_left_out_and_counted(tmp_path, num_workers):
    make = listed(tmp_path, [*broken_files(tmp_path), "missing.png"])
    data = make(on_error="skip")
    data.num_workers = num_workers
    with pytest.warns(
        UserWarning, match=r"1 of 6 lines or files of .* were left out .*missing.png cannot be"
    ):
        data.setup("fit")
    loader = data.train_dataloader()
    assert [batch["caption"] for batch in loader] == [["whole.png"]] * 5
    with pytest.warns(UserWarning, match=r"4 of 5 samples \(train\) could not be read .*cut.jpg"):
        data.teardown("fit")


LINES = {
    b'{"file_name": "a.png", "text": null}': "'text' must be a text, but is null",
    b'{"file_name": "a.png", "text": "caf\xe9"}': "is no UTF-8",
    b'{"file_name": "b.png", "text": "b"}': "b.png cannot be found",
    b'{"file_name": "empty.png", "text": "b"}': r"empty.png is empty \(0 bytes\)",
    b'{"file_name": ".", "text": "b"}': "is no file",
    b'["a.png", "a"]': "expected 'file_name' and 'text', as in",
    b'{"file": "b"}': "expected 'file_name' and 'text', as in .* found '..file",
}


@pytest.mark.parametrize("line", LINES)
def test_a_line_that_cannot_be_used_is_named_before_training(tmp_path, line):
    """History: a caption that is null came through to the tokenizer, a file that is missing to a worker."""
    (tmp_path / "a.png").write_bytes(photograph(format="PNG"))
    (tmp_path / "empty.png").touch()
    (tmp_path / "metadata.jsonl").write_bytes(b'{"file_name": "a.png", "text": "a"}\n' + line)
    with pytest.raises(DataError, match=rf"metadata.jsonl, line 2: .*{LINES[line]}"):
        ImageFolderDataModule(tmp_path).setup("fit")


def test_an_epoch_takes_an_image_once_for_each_of_its_lines(tmp_path):
    (tmp_path / "a.png").write_bytes(photograph(format="PNG"))
    lines = [json.dumps({"file_name": "a.png", "text": text}) for text in ("a cat", "an animal")]
    (tmp_path / "metadata.jsonl").write_text("\n".join(lines))
    data = ImageFolderDataModule(tmp_path, validation_share=0.0, batch_size=1, num_workers=0)
    data.setup("fit")
    captions = sorted(batch["caption"][0] for batch in data.train_dataloader())
    assert captions == ["a cat", "an animal"]


def test_folders_without_images_to_train_on_are_refused(tmp_path):
    """History: an empty file ended in torch's own error about `num_samples=0`."""
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="lists no image; give each a line of metada"):
            ImageFolderDataModule(tmp_path).setup("fit")
        (tmp_path / "metadata.jsonl").touch()
    (tmp_path / "10_cats").mkdir()
    with pytest.raises(ConfigurationError, match=r"name its folders \(10_cats\), which"):
        ImageFolderDataModule(tmp_path).setup("fit")
    write_folder(tmp_path, 2)
    with pytest.raises(ConfigurationError, match=r"all 2 images .* are held back"):
        ImageFolderDataModule(tmp_path, validation_share=1.0).setup("fit")


def test_a_line_of_pixels_is_read_at_once():
    """History: it was scaled to 512 x 30 million pixels, of which 512 x 512 were used."""
    started_s = time.process_time()
    assert to_pixels(Image.new("RGB", (1, 60000), (255, 255, 255)), Crop(512, 512)).min() == 1
    assert time.process_time() - started_s < 2


def broken_shard(folder):
    """Two images, between them one cut short, one without a caption, and a caption that is no UTF-8."""
    files = {**red_images(range(4)), "4.png": red_images([4])["4.png"], **red_images([5])}
    files["1.png"] = files["1.png"][:40]
    files["2.txt"] = b"caf\xe9"
    write_shard(folder / "0.tar", files)
    return str(folder / "0.tar")


def test_samples_of_shards_that_cannot_be_read_are_named(shards, tmp_path):
    data = data_of(broken_shard(tmp_path))
    raw = list(data._stored(False, None, 0, 1))
    weights = {files["__url__"]: 1.0 for files in raw}
    for index, reason in (
        (1, r"1.png \(.*0.tar\) cannot be used: .*"),
        (2, "2.txt of .*0.tar: .* is no UTF-8"),
        (4, "sample '4' of .*0.tar has no txt"),
    ):
        read = lambda files: data._reader.read(data._entry(files, weights), Shape(8, 8))
        with pytest.raises(DataError, match=reason):
            read(raw[index])


@pytest.mark.parametrize("length", [0, 100, 600, 1024, 2048, 2055, 2100])
def test_a_shard_that_is_cut_short_is_named_once(length, shards, tmp_path):
    """History: the reason stood in the reason, with streams of Python; a cut in or at a later header was an end."""
    cut = tmp_path / "cut.tar"
    write_shard(cut, red_images(range(2)))
    cut.write_bytes(cut.read_bytes()[:length])
    with pytest.raises(
        DataError, match=r"^a shard cannot be read: unexpected end of .*cut\.tar"
    ) as refusal:
        next(iter(data_of(str(cut)).train_dataloader()))
    assert str(refusal.value).count("cannot be read") == str(refusal.value).count("cut.tar") == 1


def test_links_and_notes_in_a_shard_are_no_samples(tmp_path):
    """History: of a link, which webdataset skips, the shard could not be read."""
    write_shard(tmp_path / "a.tar", red_images(range(2)) | {"__meta__/notes.txt": b"no caption"})
    with tarfile.open(tmp_path / "a.tar", "a") as tar:
        link = tarfile.TarInfo("2.png")
        link.type, link.linkname = tarfile.SYMTYPE, "0.png"
        tar.addfile(link)
    data = data_of(str(tmp_path / "a.tar"), samples_per_epoch=2)
    assert sorted(captions(data.train_dataloader())) == [0, 1]


def test_samples_of_shards_that_cannot_be_read_are_left_out_and_counted(shards, tmp_path):
    """History: a shard that was cut short, or one sample, ended the run with tarfile's or PIL's own words."""
    path = broken_shard(tmp_path)
    (tmp_path / "1.tar").write_bytes((tmp_path / "2.tar").read_bytes()[:700])
    whole, pattern = str(tmp_path / "2.tar"), str(tmp_path / "{0..1}.tar")
    data = data_of(path, validation_shards=pattern, on_error="skip", samples_per_epoch=6)
    assert captions(data.val_dataloader()) == [0, 3, 5]
    assert sorted(captions(data.train_dataloader())) == [0, 0, 3, 3, 5, 5]
    with pytest.warns(UserWarning, match=r"\d+ times a sample or the rest of a shard"):
        data.teardown("fit")
    (tmp_path / "1.tar").write_bytes((tmp_path / "0.tar").read_bytes()[:200])
    none = data_of(str(tmp_path / "1.tar"), on_error="skip")
    with pytest.raises(ConfigurationError, match="hold no sample"):  # and not wait for one for ever
        next(iter(none.train_dataloader()))
    write_shard(tmp_path / "4.tar", {"0.png": b"no image", "0.txt": b"0"})
    with pytest.raises(ConfigurationError, match="hold no sample"):
        next(iter(data_of(str(tmp_path / "4.tar"), on_error="skip").train_dataloader()))
    with pytest.raises(DataError, match=r"1.tar"):
        list(data_of(whole, validation_shards=str(tmp_path / "1.tar")).val_dataloader())


def test_shards_that_are_not_there_are_named_before_training(shards, tmp_path):
    with pytest.raises(DataError, match=r"3.tar .* does not exist"):
        data_of(str(tmp_path / "{0..3}.tar")).train_dataloader()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        # History: these ended in csv's, json's and pathlib's own errors; the last one had one caption of two lines.
        (
            "metadata.csv",
            "file_name,text\na.png," + "x" * 200000,
            "line 1: field larger than field limit",
        ),
        ("metadata.jsonl", "[" * 100000, "line 1: expected 'file_name' and 'text'"),
        (
            "metadata.jsonl",
            '{"file_name": "a\\u0000.png", "text": ""}',
            "cannot be found .embedded null byte.",
        ),
        (
            "metadata.csv",
            'file_name,text\na.png,"x\nb.png,y\n',
            "unexpected end of data; quotes around a text must be",
        ),
    ],
)
def test_listings_that_cannot_be_read_are_named(name, content, message, tmp_path):
    for image in "ab":
        Image.new("RGB", (8, 8)).save(tmp_path / f"{image}.png")
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=f"{name}.*{message}"):
        Listing(tmp_path).read("raise")


def test_captions_are_found_however_names_are_written(tmp_path):
    """History: a name with an accent of macOS, or `CAT.TXT`, had no caption."""
    for name, text in (("ba\u0308r", "b\u00e4r.txt"), ("CAT", "CAT.TXT")):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{name}.PNG")
        (tmp_path / text).write_text(text)
    entries, _ = Listing(tmp_path).read("raise")
    assert [entry.caption for entry in entries] == ["CAT.TXT", "b\u00e4r.txt"]


def test_images_that_are_passed_over_are_counted(tmp_path):
    """History: with a trigger, photographs of a phone (`.heic`) were left out without a word."""
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    for name in ("b.heic", "c.heic", "d.mp4", "a.npz", "README.md", "sizes.json"):
        (tmp_path / name).touch()
    with pytest.warns(
        UserWarning, match=r"by their endings: 2 \.heic, 1 \.mp4; num_frames=17 .* reads videos"
    ):
        Listing(tmp_path, needs_captions=False).read("raise")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trigger": 3}, "trigger=3 must be a text; put it in quotes"),
        ({"mask": ""}, "mask='' must be one key, or a folder"),
        ({"num_frames": []}, r"num_frames must be a whole number >= 1; got \[\]"),
        ({"num_frames": [5, "x"]}, "num_frames must be a whole number >= 1; got 'x'"),
    ],
)
def test_settings_that_would_fail_later_are_refused(options, message, tmp_path):
    """History: these ended in a TypeError, took captions for masks, or trained on images."""
    with pytest.raises(ConfigurationError, match=message):
        ImageFolderDataModule(tmp_path, **options)


def test_two_companions_of_one_image_are_refused_by_name(tmp_path):
    """History: the last by name was taken without a word."""
    (tmp_path / "masks").mkdir()
    for name in ("a.png", "masks/a.png", "masks/a.webp"):
        Image.new("RGB", (32, 32)).save(tmp_path / name)
    listing = Listing(tmp_path, companions={"mask": "masks"}, needs_captions=False)
    with pytest.raises(
        DataError, match=r"a.png has 2 files as its mask: .*masks has a.png, a.webp"
    ):
        listing.read("raise")
