"""References: images that others are made from, read with them from folders."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_diffpipe.data import ImageFolderDataModule
from lightning_diffpipe.errors import DataError


def write(folder, lines):
    """Images of random pixels, and the metadata that name them: (name, size, references with sizes)."""
    numbers, entries = np.random.default_rng(0), []
    for name, size, references in lines:
        for each, (width, height) in ((name, size), *references):
            pixels = numbers.integers(0, 256, (height, width, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / each)
        names = [each for each, _ in references]
        entries.append({"file_name": name, "text": name, "references": names})
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, entries)))


def module_of(folder, **options):
    module = ImageFolderDataModule(
        folder, references="references", validation_share=0.0, num_workers=0, **options
    )
    module.setup("fit")
    return module


def test_an_image_comes_with_its_references(tmp_path):
    """The first ones of all samples, then the second ones, in 8 bits and cut as the image is."""
    write(
        tmp_path,
        [
            (f"{i}.png", (40, 32), [(f"{i}a.png", (32, 40)), (f"{i}b.png", (32, 32))])
            for i in range(3)
        ],
    )
    (batch,) = module_of(tmp_path, resolution=32, batch_size=3).train_dataloader()
    assert batch["image"].shape == (3, 3, 32, 32)
    assert [each.shape for each in batch["references"]] == [(3, 32, 32, 3)] * 2
    for i, name in enumerate(batch["caption"]):
        for each, letter in zip(batch["references"], "ab", strict=True):
            stored = np.asarray(Image.open(tmp_path / name.replace(".", f"{letter}.")))
            assert each.dtype == np.uint8
            top = (len(stored) - 32) // 2
            assert np.array_equal(each[i], stored[top : top + 32])


def test_a_pair_is_mirrored_and_cropped_together(tmp_path):
    write(tmp_path, [(f"{i}.png", (48, 48), [(f"{i}a.png", (48, 48))]) for i in range(8)])
    for i in range(8):
        Image.open(tmp_path / f"{i}.png").save(tmp_path / f"{i}a.png")
    module = module_of(tmp_path, resolution=32, batch_size=8, flip=0.5, random_crop=True)
    torch.manual_seed(0)
    (batch,) = module.train_dataloader()
    seen = torch.from_numpy(batch["references"][0]).permute(0, 3, 1, 2) / 127.5 - 1
    torch.testing.assert_close(seen, batch["image"], rtol=0, atol=1e-6)


def test_a_bucket_has_one_number_and_shape_of_references(tmp_path):
    kinds = [[(64, 64)], [(64, 32)], [(64, 64), (64, 64)], [(64, 64), (32, 64)]]
    lines = [
        (f"{i}.png", (64, 64), [(f"{i}_{n}.png", size) for n, size in enumerate(kinds[i % 4])])
        for i in range(8)
    ]
    write(tmp_path, lines)
    module = module_of(tmp_path, resolution=64, bucket_step=16, buckets=True, batch_size=2)
    assert {str(shape): len(m) for shape, m in module.train_buckets.items()} == {
        "64x64 of 64x64": 2,
        "64x64 of 64x32": 2,
        "64x64 of 64x64 + 64x64": 2,
        "64x64 of 64x64 + 32x64": 2,
    }
    shapes = {
        tuple(each.shape[1:3] for each in batch["references"])
        for batch in module.train_dataloader()
    }
    assert shapes == {tuple((h, w) for w, h in kind) for kind in kinds}
    # without buckets all are squares, and their number makes the batches
    squares = module_of(tmp_path, resolution=64, batch_size=2)
    assert sorted(map(len, squares.train_buckets.values())) == [4, 4]


@pytest.mark.parametrize("table", [False, True])
def test_one_reference_is_a_name_and_a_table_has_lists_as_texts(table, tmp_path):
    write(tmp_path, [("a.png", (32, 32), [("x.png", (32, 32)), ("y.png", (32, 32))])])
    (tmp_path / "metadata.jsonl").unlink()
    if table:
        lines = 'file_name,text,references\na.png,a,"[""x.png"", ""y.png""]"\ny.png,y,x.png\n'
        (tmp_path / "metadata.csv").write_text(lines)
    else:
        for name in "ay":
            (tmp_path / f"{name}.txt").write_text(name)
        (tmp_path / "x.png").unlink()
        (tmp_path / "references").mkdir()
        for name in "ay":
            Image.new("RGB", (32, 32)).save(tmp_path / "references" / f"{name}.png")
    module = module_of(tmp_path, resolution=32, batch_size=1)
    numbers = sorted(len(shape.references) for shape in module.train_buckets)
    assert numbers == ([1, 2] if table else [1])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (["gone.png"], r"metadata.jsonl, line 1: .*gone.png cannot be found"),
        ([], r"'references' must name a file, or several .* but is \[\]"),
        (["x.png", 3], r"'references' must name a file, or several .* but is \[\"x.png\", 3\]"),
        (None, r"'references' must name a file, or several .* but is null"),
    ],
)
def test_references_that_are_not_there_are_named_before_training(value, message, tmp_path):
    write(tmp_path, [("a.png", (32, 32), [("x.png", (32, 32))])])
    entry = {"file_name": "a.png", "text": "a", "references": value}
    (tmp_path / "metadata.jsonl").write_text(json.dumps(entry))
    with pytest.raises(DataError, match=message):
        module_of(tmp_path, resolution=32, batch_size=1)


def test_references_of_samples_that_are_held_back_are_drawn_to(tmp_path):
    write(tmp_path, [(f"{i}.png", (32, 32), [(f"{i}a.png", (32, 32))]) for i in range(4)])
    module = ImageFolderDataModule(
        tmp_path, references="references", validation_share=1.0, resolution=32, num_workers=0
    )
    module.setup("validate")
    (references,) = module.held_back_conditions(2)
    assert references.shape == (2, 32, 32, 3)
