"""Images of several shapes: what each becomes, and which batches an epoch has."""

import json
import math
import re
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from lightning_diffpipe.cli.data import _sheet
from lightning_diffpipe.data import ImageFolderDataModule
from lightning_diffpipe.data.buckets import Shape, Sizes, described
from lightning_diffpipe.errors import ConfigurationError, DataError
from lightning_diffpipe.training.loader import PipelineLoader, shared_out
from tests.command import call
from tests.data.folders import shards_of, write_clips, write_ratios, write_video


def module_of(folder, **options):
    defaults = {"validation_share": 0.0, "batch_size": 4, "num_workers": 0}
    data = ImageFolderDataModule(
        folder, **{"resolution": 64, "buckets": True, "bucket_step": 8, **defaults, **options}
    )
    data.setup("fit")
    return data


@pytest.fixture(scope="module")
def ratios(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ratios")
    write_ratios(folder)
    return folder


sides = st.integers(1, 3000)


@given(sides, sides, st.sampled_from([64, 100, 512]), st.sampled_from([8, 16, 64]), st.booleans())
def test_sizes_keep_ratio_and_area(height, width, resolution, step, enlarge):
    sizes = Sizes(resolution, step, enlarge)
    if not enlarge and min(height, width) < step:
        with pytest.raises(ConfigurationError, match=f"{width}x{height} pixels are less than"):
            sizes.of(height, width)
        return
    high, wide = sizes.of(height, width)
    assert high % step == wide % step == 0
    assert step**2 <= high * wide <= resolution**2
    distance = lambda size: abs(math.log(size[1] / size[0]) - math.log(width / height))
    nearest = min(sizes.all, key=distance)
    if enlarge or (nearest[0] <= height and nearest[1] <= width):
        assert distance((high, wide)) == pytest.approx(distance(nearest))
    else:
        assert high <= height
        assert wide <= width
        assert high > min(nearest[0], height) - step
        assert wide > min(nearest[1], width) - step


def passes(data, num_pipelines, num_epochs=2):
    """Batches of each epoch, as each pipeline gets them."""
    trainer = SimpleNamespace(_accelerator_connector=SimpleNamespace(use_distributed_sampler=True))
    epochs = [[] for _ in range(num_epochs)]
    for rank in range(num_pipelines):
        share = shared_out(data.train_dataloader(), trainer, num_pipelines, rank)
        begun = iter(range(num_epochs))
        epoch = {}
        place = lambda length, rank=rank, epoch=epoch: (epoch["now"], 0, 0)
        loader = PipelineLoader(share, len(share), True, 7, rank, place)
        for epoch["now"] in begun:
            epochs[epoch["now"]].append(list(loader))
        if data.num_workers:
            loader._iterator._shutdown_workers()  # what a garbage collection does takes them ten seconds
    return epochs


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("num_pipelines", [1, 2])
@pytest.mark.parametrize("last", ["filled", "dropped", "smaller"])
def test_an_epoch_takes_each_sample_once(ratios, last, num_pipelines, num_workers):
    data = module_of(ratios, last_batch=last, num_workers=num_workers)
    counts = {shape: len(members) for shape, members in data.train_buckets.items()}
    assert sum(counts.values()) == 200
    assert len(counts) == 11  # 96x48 and 100x50 become one size
    num_batches = sum(n // 4 if last == "dropped" else math.ceil(n / 4) for n in counts.values())
    orders = []
    for pipelines in passes(data, num_pipelines):
        assert len({len(batches) for batches in pipelines}) == 1  # pipelines step together
        dealt = [batch for step in zip(*pipelines, strict=True) for batch in step]
        again = dealt[num_batches:]  # where pipelines do not divide them
        assert len(again) == -num_batches % num_pipelines
        dealt = dealt[:num_batches]
        for batch in dealt:
            assert len(batch["caption"]) == 4 or last == "smaller"
            height, width = batch["image"].shape[-2:]
            for caption in batch["caption"]:
                index = int(caption.split(",")[0].removeprefix("cat "))
                shown = data.train_set.shapes[
                    [e.path.stem for e in data.train_set.entries].index(str(index))
                ]
                assert (shown.height, shown.width) == (height, width)
        seen = Counter(caption for batch in dealt for caption in batch["caption"])
        expected = {
            "filled": 200,
            "smaller": 200,
            "dropped": sum(n // 4 * 4 for n in counts.values()),
        }
        assert len(seen) == expected[last]
        assert sum(seen.values()) == (num_batches * 4 if last == "filled" else len(seen))
        assert max(seen.values()) <= (2 if last == "filled" else 1)
        orders.append([batch["caption"] for batch in dealt])
    assert orders[0] != orders[1]
    assert [[b["caption"] for b in p[0]] for p in passes(data, num_pipelines)] == [
        order[::num_pipelines] for order in orders
    ] or num_batches % num_pipelines


def test_an_epoch_begins_with_the_largest_samples(tmp_path):
    """By which the run is planned: one of clips of 5 frames does not know what 13 take."""
    write_clips(tmp_path, (5, 9, 5, 13), each=4)
    data = module_of(tmp_path, num_frames=[5, 9, 13], batch_size=2, resolution=16)
    for _ in range(3):
        lengths = [batch["video"].shape[2] for batch in data.train_dataloader()]
        assert lengths[0] == 13
        assert sorted(lengths) == [5] * 4 + [9] * 2 + [13] * 2


def test_what_an_epoch_is_is_said_with_counts(ratios):
    def said(**options):
        data = module_of(ratios, **options)
        return described(data.train_buckets, data.batch_size, data.last_batch)

    assert said(last_batch="filled").startswith(
        "200 samples in 11 buckets make 55 batches of 4; 20 of these are seen again, to fill last batches ("
    )
    assert "make 48 batches of 4; 8 are left out in each epoch, of" in said(last_batch="dropped")
    assert "make 55 batches of 4; 7 of these are smaller" in said(last_batch="smaller")
    text = said(batch_size=17)
    assert "4 of 11 buckets have fewer than the 17 samples of a batch (" in text
    with pytest.raises(
        ConfigurationError,
        match=r"of 11 buckets have fewer than the 17 samples of a batch .*: 16.* would never",
    ):
        module_of(ratios, batch_size=17, last_batch="dropped")


@pytest.mark.parametrize("flip", [0.0, 1.0])
@pytest.mark.parametrize("buckets", [False, True])
def test_what_is_told_of_a_crop_is_what_is_seen(tmp_path, flip, buckets):
    """Red says where a pixel was across the image, green where down; mirrored, the image is another one."""
    width, height = 230, 101
    across, down = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    pixels = np.stack([across, down, 0 * down], -1).round().astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("a")
    data = module_of(
        tmp_path, resolution=48, bucket_step=16, buckets=buckets, flip=flip, random_crop=True, batch_size=1,
    )  # fmt: skip
    corners = set()
    for _ in range(8):
        sample = data.train_set[0]
        assert sample["original_size"].tolist() == [height, width]
        top, left = sample["crops_coords_top_left"].tolist()
        corners.add((top, left))
        high, wide = sample["image"].shape[-2:]
        assert (high, wide) == ((32, 64) if buckets else (48, 48))
        scale = max(high / height, wide / width)
        x = (torch.arange(wide) + left + 0.5) / (scale * width) * 2 - 1
        y = (torch.arange(high) + top + 0.5) / (scale * height) * 2 - 1
        seen = sample["image"][:, 2:-2, 2:-2]
        torch.testing.assert_close(seen[0].mean(0), (-x if flip else x)[2:-2], atol=0.03, rtol=0)
        torch.testing.assert_close(seen[1].mean(1), y[2:-2], atol=0.03, rtol=0)
    assert len(corners) > 3


def test_nothing_that_is_held_back_differs_from_time_to_time(ratios):
    options = {
        "random_crop": True,
        "flip": 0.5,
        "shuffle_tags": True,
        "drop_tags": 0.5,
        "trigger": "sks",
    }
    data = module_of(ratios, validation_share=0.2, **options)
    first, again = (list(data.val_dataloader()) for _ in range(2))
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one["image"], other["image"])
        assert one["caption"] == other["caption"]
        assert all(text.startswith("sks, cat ") for text in one["caption"])
    assert sum(len(batch["caption"]) for batch in first) == len(data.validation_set)
    condition = module_of(ratios, validation_share=0.2, condition="edges")
    assert condition.held_back_conditions(3).shape[0] == 3  # all of one shape


def test_tags_are_mixed_behind_those_that_are_kept(ratios):
    data = module_of(ratios, shuffle_tags=True, keep_tags=1, trigger="sks")
    texts = {data.train_set[0]["caption"] for _ in range(40)}
    assert len(texts) == 6
    for text in texts:
        trigger, first, *others = text.split(", ")
        assert (trigger, first, sorted(others)) == ("sks", "cat 0", ["fog", "grey", "small"])
    data = module_of(ratios, drop_tags=0.5, keep_tags=1)
    texts = {data.train_set[0]["caption"] for _ in range(80)}
    tags = ["grey", "fog", "small"]
    subsets = [[t for i, t in enumerate(tags) if n >> i & 1] for n in range(8)]
    assert texts == {", ".join(["cat 0", *subset]) for subset in subsets}
    assert module_of(ratios, trigger="cat").train_set[0]["caption"] == "cat 0, grey, fog, small"


def test_folders_have_repeats_and_weights(tmp_path):
    for name, count in (("subject", 3), ("prior", 5)):
        (tmp_path / name).mkdir()
        write_ratios(tmp_path / name, count)
    subject = {"folder": tmp_path / "subject", "repeats": 10}
    data = module_of([subject, {"folder": str(tmp_path / "prior"), "weight": 0.5}])
    assert data.hparams.folder[0] == {
        "folder": str(tmp_path / "subject"),
        "repeats": 10,
        "weight": 1.0,
    }
    batches = list(data.train_dataloader())
    assert all(batch["weight"].shape == (len(batch["caption"]),) for batch in batches)
    names = Counter(entry.path.parent.name for entry in data.train_set.entries)
    assert names == {"subject": 30, "prior": 5}
    weights = {
        e.path.parent.name: data.train_set[i]["weight"].item()
        for i, e in enumerate(data.train_set.entries)
    }
    assert weights == {"subject": 1.0, "prior": 0.5}
    assert "weight" not in module_of([tmp_path / "subject", tmp_path / "prior"]).train_set[0]


@pytest.mark.parametrize("source", ["alpha", "masks", "key"])
def test_masks_are_cropped_with_their_images(tmp_path, source):
    image = np.zeros((40, 80, 4), np.uint8)
    image[..., 3] = 255
    image[:, 60:, 0] = 255
    image[:, 60:, 3] = 0 if source == "alpha" else 255
    Image.fromarray(image).save(tmp_path / "a.png")
    (tmp_path / "masks").mkdir()
    mask = np.full((20, 40), 255, np.uint8)
    mask[:, 30:] = 0
    Image.fromarray(mask).save(tmp_path / "masks" / "a.png")
    if source == "key":
        line = {"file_name": "a.png", "text": "a", "where": "masks/a.png"}
        (tmp_path / "metadata.jsonl").write_text(json.dumps(line))
    else:
        (tmp_path / "a.txt").write_text("a")
    name = {"alpha": "alpha", "masks": "masks", "key": "where"}[source]
    data = module_of(tmp_path, resolution=40, bucket_step=4, mask=name, flip=1.0, batch_size=1)
    (batch,) = data.train_dataloader()
    mask = batch["mask"]
    assert mask.shape == (1, 1, *batch["image"].shape[-2:])
    wide = mask.shape[-1]
    assert mask[..., : wide // 4 - 1].max() < 0.1
    assert mask[..., wide // 4 + 1 :].min() > 0.9
    Image.new("L", (40, 40)).save(tmp_path / "masks" / "a.png")
    if source != "alpha":
        with pytest.raises(
            DataError,
            match=r"masks/a.png \(.*\) has 40x40 pixels, and .*a.png \(.*80x40: a mask must",
        ):
            data.train_set[0]


LISTINGS = {
    "metadata.jsonl": json.dumps({"file_name": "a.png", "text": "a cat, big"}),
    "metadata.csv": 'file_name,text\na.png,"a cat, big"\n',
    "a.txt": "a cat,\n big \n",
}


@pytest.mark.parametrize("name", LISTINGS)
def test_captions_are_read_from_any_listing(tmp_path, name):
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    Image.new("RGB", (64, 64)).save(tmp_path / ".hidden.png")
    (tmp_path / name).write_text("\ufeff" * (name != "metadata.jsonl") + LISTINGS[name])
    (tmp_path / "folder").mkdir()
    data = module_of(tmp_path)
    assert [data.train_set[i]["caption"] for i in range(len(data.train_set))] == ["a cat, big"]


BAD = {
    "lonely captions": (
        {"b.txt": "b", "c.txt": "c"},
        r"2 caption files have no image beside them: b.txt, c.txt\. ",
    ),
    "lonely images": ({"b.png": None}, r"1 images have no caption: b.png\. "),
    "two captions": (
        {"metadata.jsonl": '{"file_name": "a.png", "text": "a dog"}'},
        r"a.png has two captions: a.txt says 'a', and metadata.jsonl, line 1 'a dog'",
    ),
    "two listings": (LISTINGS, r"has both metadata.jsonl and metadata.csv; remove one"),
    "other columns": (
        {"metadata.csv": "image,text\na.png,a\n"},
        r"metadata.csv, line 2: expected 'file_name' and 'text', as",
    ),
    "a short row": (
        {"metadata.csv": "file_name,text\na.png\n"},
        r"metadata.csv, line 2: 'text' must be a text, but is null",
    ),
    "no mask": ({"masks/b.png": None}, r"a.png has no mask: .*masks/a.png is not there"),
    "small": (
        {"b.png": (4, 99), "b.txt": "b"},
        r"b.png \(b.txt\) cannot be used: 4x99 pixels are less than one step of 8 ",
    ),
    "broken": (
        {"b.png": "no image", "b.txt": "b"},
        r"b.png \(b.txt\) cannot be used: cannot identify image file",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_folders_are_refused_before_training(tmp_path, name):
    files, message = BAD[name]
    for file, content in {"a.png": None, "a.txt": "a", **files}.items():
        path = tmp_path / file
        path.parent.mkdir(exist_ok=True)
        if isinstance(content, str):
            path.write_text(content)
        else:
            Image.new("RGB", content or (64, 64)).save(path)
    options = {"mask": "masks"} if name == "no mask" else {}
    with pytest.raises(ConfigurationError, match=message):
        module_of(tmp_path, **options)
    left_out = {"lonely captions": 2, "lonely images": 1, "small": 1, "broken": 1}
    if name in left_out:
        with pytest.warns(
            UserWarning, match=rf"{left_out[name]} of \d .* were left out \(on_error=skip\)"
        ):
            data = module_of(tmp_path, on_error="skip", batch_size=1)
        assert [batch["caption"] for batch in data.train_dataloader()] == [["a"]]
    if name == "lonely images":
        data = module_of(tmp_path, trigger="sks", batch_size=1)
        captions = {batch["caption"][0] for batch in data.train_dataloader()}
        assert captions == {"sks", "sks, a"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"last_batch": "x"}, "last_batch='x'; choose filled, dropped or smaller"),
        ({"on_error": "ignore"}, "on_error='ignore'; choose raise or skip"),
        ({"bucket_step": 65}, "bucket_step must be a whole number >= 1 and <= 64; got 65"),
        (
            {"keep_tags": 1},
            "keep_tags=1 keeps tags in front of others that are shuffled or dropped",
        ),
        ({"drop_tags": 2}, "drop_tags must be a number >= 0 and <= 1"),
        ({"flip": 1.5}, "flip must be a number >= 0 and <= 1"),
        ({"random_crop": 2}, "random_crop must be true or false; got 2"),
        ({"mask": "alpha", "num_frames": 2}, "mask='alpha' is for images"),
        ({"references": "others", "num_frames": 2}, "references='others' is for images"),
        ({"condition": "edges", "num_frames": 2}, "condition='edges' is for images"),
        ({"folder": [{"folder": "a", "repeats": 0}]}, "repeats must be a whole number >= 1"),
        (
            {"folder": [{"folder": "a", "num_repeats": 2}]},
            "may have folder, repeats, weight; leave",
        ),
        ({"folder": "nowhere"}, "folder=nowhere does not exist; name one with images"),
    ],
)
def test_settings_that_cannot_be_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        module_of(**{"folder": "any", **options})


def test_an_image_that_cannot_be_read_is_replaced_by_one_of_its_size(tmp_path):
    write_ratios(tmp_path, 36)
    path = tmp_path / "12.png"
    path.write_bytes(path.read_bytes()[:-60])  # its header is whole
    data = module_of(tmp_path, on_error="skip", last_batch="smaller")
    seen = Counter(caption for batch in data.train_dataloader() for caption in batch["caption"])
    assert len(seen) == 35
    assert set(seen) == {f"cat {i}, grey, fog, small" for i in range(36) if i != 12}
    (twice,) = (caption for caption, count in seen.items() if count == 2)
    assert twice.split(",")[0] in ("cat 0", "cat 24")  # as wide and high
    with pytest.warns(UserWarning, match=r"1 of 36 samples \(train\) could not be read"):
        data.teardown("fit")


@pytest.mark.parametrize("buckets", [False, True])
def test_clips_of_several_lengths_have_the_most_frames_they_can(tmp_path, buckets):
    write_clips(tmp_path, (5, 9, 14))
    data = module_of(tmp_path, num_frames=[9, 5, 13], buckets=buckets, batch_size=2, resolution=16)
    sizes = Counter(tuple(batch["video"].shape[2:]) for batch in data.train_dataloader())
    assert sizes == {(n, 16, 16): 2 for n in (5, 9, 13)}
    with pytest.raises(DataError, match="has 5 frames, and num_frames=6 are wanted"):
        module_of(tmp_path, num_frames=[6, 9])


def test_videos_say_their_size_without_being_decoded(tmp_path):
    for name, size, count in (("a", (64, 32), 9), ("b", (32, 64), 5)):
        write_video(tmp_path / f"{name}.mp4", size, range(0, 20 * count, 20))
        (tmp_path / f"{name}.txt").write_text(name)
    data = module_of(tmp_path, num_frames=[1, 5, 9], resolution=32, batch_size=1)
    shapes = {tuple(batch["video"].shape[2:]) for batch in data.train_dataloader()}
    assert shapes == {(9, 24, 40), (5, 40, 24)}


def test_a_sheet_has_captions_of_several_lines_and_whole_sizes():
    """History: the first ended in an error of the font, and the second was cut beside narrow images."""
    grey = {"image": torch.zeros(3, 8, 2), "caption": "two\nlines"}
    sheet = _sheet({Shape(1024, 16): [grey]})
    assert sheet.height == 128 + 3 * 18
    beyond = sheet.crop((40, 0, sheet.width, 18)).getcolors()
    assert len(beyond) > 1, "the size is wider than its images"


@pytest.mark.slow
def test_a_command_shows_what_is_trained_on(tmp_path, capsys, monkeypatch):
    images, sheet = tmp_path / "images", tmp_path / "sheet.png"
    images.mkdir()
    write_ratios(images, 36)
    (images / "12.png").write_bytes((images / "12.png").read_bytes()[:-60])
    (images / "alone.txt").write_text("nothing")
    (images / "3.txt").write_text("a long " * 20)
    size = ("data.resolution=64", "data.bucket_step=32", "data.batch_size=4")
    command = ("data", f"data.folder={images}", "data.buckets=true", *size, f"output={sheet}")
    code, _, err = call(capsys, monkeypatch, *command)
    assert code == 2
    assert "1 caption files have no image beside them: alone.txt." in err
    skips = ("data.on_error=skip", "data.validation_share=0")
    code, out, err = call(capsys, monkeypatch, *command, *skips)
    assert code == 0, err
    rows = dict(re.findall(r"^ +(\d+x\d+) +(\d+) +\d+$", out, re.MULTILINE))
    assert sum(map(int, rows.values())) == 36
    assert "36 samples in 5 buckets make 12 batches of 4; 12 of these are seen again" in out
    assert re.search(
        rf"longest captions:\n +139 characters  {images}/3.png \(3.txt\): 'a long", out
    )
    assert re.search(r"1 left out:\n  .*alone.txt: caption files have no image", out)
    assert re.search(r"1 cannot be read:\n  .*12.png \(12.txt\) cannot be used", out)
    with Image.open(sheet) as drawn:
        assert drawn.height == 5 * (128 + 3 * 18)
        assert len(drawn.getcolors(drawn.width * drawn.height)) > 100
    (images / "alone.txt").unlink()
    shards = "data=webdataset", f'data.train_shards="{shards_of(images, tmp_path, 3)}"'
    code, of_shards, err = call(capsys, monkeypatch, "data", *shards, *command[2:], *skips)
    assert code == 0, err
    rows["64x64"] = str(int(rows["64x64"]) - 1)  # no other takes the broken one's place in a stream
    assert dict(re.findall(r"^ +(\d+x\d+) +(\d+) +\d+$", of_shards, re.MULTILINE)) == rows
    assert "35 samples in 5 buckets make 12 batches of 4; 13 of these are seen again" in of_shards
    assert "in an epoch of data.samples_per_epoch=35" in of_shards
    assert re.search(r"1 cannot be read:\n  12.png \(.*1.tar\) cannot be used", of_shards)
    code, _, err = call(capsys, monkeypatch, "data", f"data.folder={images}", "tokenizer=nowhere")
    assert code == 2
    assert err.splitlines()[-1].startswith("diffpipe data: tokenizer=nowhere cannot be opened: ")
