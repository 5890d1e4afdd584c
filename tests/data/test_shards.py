"""Tar shards have the settings of folders: buckets, repeats, weights, videos and captions out of JSON."""

import json
from collections import Counter

import pytest
import torch

from lightning_diffpipe.data import ImageFolderDataModule, WebDatasetDataModule
from lightning_diffpipe.errors import ConfigurationError, DataError
from tests.data.folders import red_images, shards_of, write_ratios, write_shard, write_video

SIZES = {"resolution": 64, "batch_size": 3, "num_workers": 0, "bucket_step": 16}


def module_of(shards, count, **options):
    return WebDatasetDataModule(shards, samples_per_epoch=count, **{**SIZES, **options})


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("last", ["filled", "dropped", "smaller"])
def test_shards_have_the_buckets_of_folders(tmp_path, last, num_workers):
    """What the shards of a worker hold is one pass: each sample in the shape that a folder gives it."""
    write_ratios(tmp_path, 20, 4)
    shards, num_passes = shards_of(tmp_path, tmp_path, 2), max(1, num_workers)
    options = {"buckets": True, "last_batch": last, "num_workers": num_workers}
    folder = ImageFolderDataModule(tmp_path, validation_share=0, **SIZES, buckets=True)
    folder.setup("fit")
    shapes = {
        folder.train_set.entries[place].caption: shape
        for shape, places in folder.train_buckets.items()
        for place in places
    }
    counts = Counter()
    for shard in range(num_passes):
        stems = sorted(str(i) for i in range(20))[shard::num_passes]
        numbers = Counter(shapes[f"cat {stem}, grey, fog, small"] for stem in stems)
        down = last == "dropped"
        counts += Counter({s: n // 3 if down else -(-n // 3) for s, n in numbers.items()})
    data = module_of(shards, 3 * counts.total(), **options)
    batches = list(data.train_dataloader())
    seen = Counter(batch["image"].shape[-2:] for batch in batches)
    # Workers take turns: where one has fewer batches in a pass it begins another one, as a stream has no end.
    assert seen.keys() == {shape[:2] for shape in counts}
    if not num_workers:
        assert seen == {shape[:2]: number for shape, number in counts.items()}
        captions = Counter(caption for batch in batches for caption in batch["caption"])
        assert set(captions.values()) <= {1, 2} if last == "filled" else {1}
        assert len(captions) == 20 or last == "dropped"
    for batch in batches:
        assert {shapes[caption][:2] for caption in batch["caption"]} == {batch["image"].shape[-2:]}
    assert {len(batch["caption"]) for batch in batches} <= ({3, 2, 1} if last == "smaller" else {3})


def test_buckets_that_make_no_batch_are_refused(tmp_path):
    write_ratios(tmp_path, 4, 4)
    data = module_of(shards_of(tmp_path, tmp_path), 8, buckets=True, last_batch="dropped")
    with pytest.raises(ConfigurationError, match="fewer than the 3 of a batch in each bucket"):
        next(iter(data.train_dataloader()))


def test_samples_that_cannot_be_read_keep_no_batch_waiting(tmp_path):
    """With a broken image in the middle of the file, which its header does not tell."""
    write_ratios(tmp_path, 10, 2)
    (tmp_path / "4.png").write_bytes((tmp_path / "4.png").read_bytes()[:-30])
    shards = shards_of(tmp_path, tmp_path)
    options = {"buckets": True, "on_error": "skip", "last_batch": "smaller"}
    data = module_of(shards, 12, **options)
    captions = [caption for batch in data.train_dataloader() for caption in batch["caption"]]
    assert sorted(int(caption.split()[1].strip(",")) for caption in captions) == [
        *range(4),
        *range(5, 10),
    ]
    with pytest.raises(DataError, match=r"4.png \(.*0.tar\) cannot be used"):
        list(module_of(shards, 12, buckets=True).train_dataloader())


def test_shards_have_repeats_weights_and_captions_in_json(tmp_path):
    files = red_images(range(6))
    for i in range(6):
        files[f"{i}.json"] = json.dumps({"caption": f"red {i}", "url": "x"}).encode()
        del files[f"{i}.txt"]
    for shard, numbers in enumerate((range(2), range(2, 6))):
        own = {name: each for name, each in files.items() if int(name[0]) in numbers}
        write_shard(tmp_path / f"{shard}.tar", dict(sorted(own.items())))
    shards = [
        {"shards": str(tmp_path / "0.tar"), "repeats": 3},
        {"shards": str(tmp_path / "1.tar"), "weight": 0.5},
    ]
    options = {"caption_key": "caption", "batch_size": 2, "resolution": 8}
    data = module_of(shards, 10, validation_shards=shards[1:], **options)
    batches = [*data.train_dataloader(), *data.val_dataloader()]
    weights = {
        caption: weight
        for batch in batches
        for caption, weight in zip(batch["caption"], batch["weight"].tolist(), strict=True)
    }
    assert weights == {f"red {i}": 1.0 if i < 2 else 0.5 for i in range(6)}
    counts = Counter(caption for batch in batches[:5] for caption in batch["caption"])
    assert counts == {f"red {i}": 3 if i < 2 else 1 for i in range(6)}
    assert WebDatasetDataModule(**data.hparams).hparams == data.hparams
    other = {**options, "caption_key": "text"}
    with pytest.raises(DataError, match=r"json of .*tar: expected a text under 'text', but found"):
        next(iter(module_of(shards, 10, **other).train_dataloader()))
    with pytest.raises(ConfigurationError, match="may have shards, repeats, weight; leave others"):
        module_of([{"folder": "x"}], 10)
    with pytest.raises(ConfigurationError, match=r"0.tar has the weights 1.0 and 0.5"):
        module_of([*shards, {**shards[0], "weight": 0.5}], 10, **options).train_dataloader()


def test_videos_of_shards_are_those_of_folders(tmp_path):
    for i, length in enumerate((5, 9, 9, 5)):
        write_video(tmp_path / f"{i}.mp4", (32, 48), range(20 * i, 20 * i + length))
        (tmp_path / f"{i}.txt").write_text(f"clip {i}")
    options = {"num_frames": [5, 9], "buckets": True, "resolution": 32, "batch_size": 2}
    folder = ImageFolderDataModule(tmp_path, validation_share=0, **{**SIZES, **options})
    folder.setup("fit")
    of_folder = {sample["caption"]: sample["video"] for sample in folder.train_set}
    data = module_of(shards_of(tmp_path, tmp_path), 4, **options)
    (one, other) = data.train_dataloader()
    assert {one["video"].shape[2], other["video"].shape[2]} == {5, 9}
    for batch in (one, other):
        for caption, video in zip(batch["caption"], batch["video"], strict=True):
            assert torch.equal(video, of_folder[caption])
    with pytest.raises(DataError, match=r"[03].mp4 has 5 frames, and num_frames=9"):
        list(module_of(shards_of(tmp_path, tmp_path), 4, num_frames=9).train_dataloader())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_share_of_shards_is_held_back(tmp_path, num_workers):
    """Each sample is either trained on or held back, by its name alone, and is read once for validation."""
    for i in range(4):
        files = red_images(range(20 * i, 20 * i + 20)).values()
        names = (f"{i:02}.{end}" for i in range(20) for end in ("png", "txt"))
        write_shard(tmp_path / f"{i}.tar", dict(zip(names, files, strict=True)))
    shards = {"shards": str(tmp_path / "{0..3}.tar"), "repeats": 2}
    options = {"validation_share": 0.3, "resolution": 8, "batch_size": 4}
    options["num_workers"] = num_workers
    data = module_of(shards, 1000, **options)
    seen = {caption for batch in data.train_dataloader() for caption in batch["caption"]}
    held_back = [caption for batch in data.val_dataloader() for caption in batch["caption"]]
    assert 10 < len(held_back) == len(set(held_back)) < 40
    assert seen == {str(i) for i in range(80)} - set(held_back)
    of_shards = [{int(c) % 20 for c in held_back if int(c) // 20 == i} for i in range(4)]
    assert len(set(map(frozenset, of_shards))) == 4, "names are those in shards"
    assert set(data.held_back_captions(3)) <= set(held_back)
    looks = list(data.looked_at())
    assert {look.sample["caption"] for look in looks if not look.repeats} == set(held_back)
    assert {look.repeats for look in looks} == {0, 2}
    assert len(looks) == 80
    if not num_workers:
        with pytest.raises(ConfigurationError, match=r"all are held back \(validation_share=1\)"):
            next(iter(module_of(shards, 9, **options | {"validation_share": 1}).train_dataloader()))
        with pytest.raises(ConfigurationError, match="both hold samples back"):
            module_of(shards, 9, validation_shards=shards, **options)
