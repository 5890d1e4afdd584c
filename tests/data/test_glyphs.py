import pytest
import torch

from lightning_diffpipe.data.glyphs import (
    Glyph,
    GlyphDataModule,
    GlyphDataset,
    draw,
    font_files,
    glyphs_of,
)
from lightning_diffpipe.errors import ConfigurationError


def as_text(image: torch.Tensor) -> list[str]:
    return ["".join(" .:*#"[min(level // 52, 4)] for level in row) for row in image.tolist()]


def test_matplotlib_ships_twelve_faces():
    assert sorted(font_files()) == [
        *("mono", "mono bold", "mono bold italic", "mono italic"),
        *("sans", "sans bold", "sans bold italic", "sans italic"),
        *("serif", "serif bold", "serif bold italic", "serif italic"),
    ]


def test_a_caption_names_character_and_face():
    assert (
        Glyph("\N{GREEK SMALL LETTER ALPHA}", "serif bold").caption
        == "greek small letter alpha, serif bold"
    )


def test_a_drawn_glyph_looks_like_itself():
    assert as_text(draw(Glyph("4", "sans bold"), 16)) == [
        "                ",
        "                ",
        "                ",
        "                ",
        "       *##      ",
        "      .###      ",
        "      #:##      ",
        "     #* ##      ",
        "    :#  ##      ",
        "    :######     ",
        "        ##      ",
        "        ##      ",
        "                ",
        "                ",
        "                ",
        "                ",
    ]


@pytest.mark.slow
def test_every_named_glyph_of_every_face_is_there():
    assert len(glyphs_of(["all"], list(font_files()))) > 45_000


def test_a_face_that_no_model_has_seen_is_there_if_asked_for():
    dataset = GlyphDataset("all", faces=["stix italic"], shifts_per_axis=1)
    assert len(dataset) == 62
    assert dataset[0]["caption"] == "digit zero, stix italic"
    assert not any("stix" in glyph.caption for glyph in GlyphDataset("all").glyphs)


def test_the_same_index_gives_the_same_pixels():
    first, second = GlyphDataset(), GlyphDataset()
    for index in (0, 7, len(first) - 1):
        assert torch.equal(first[index]["image"], second[index]["image"])
        assert first[index]["caption"] == second[index]["caption"]


def test_shifts_move_the_glyph_and_nothing_else():
    dataset = GlyphDataset(shifts_per_axis=3)
    middle = dataset[0]["image"]
    assert dataset.shifts[0] == (0, 0)
    for place, shift in enumerate(dataset.shifts):
        assert torch.equal(dataset[place]["image"], middle.roll(shift, (1, 2)))


def test_train_and_validation_share_no_pair_and_miss_none():
    parts = {s: set(GlyphDataset(s).glyphs) for s in ("train", "validation", "all")}
    assert not parts["train"] & parts["validation"]
    assert parts["train"] | parts["validation"] == parts["all"]
    assert 0.03 < len(parts["validation"]) / len(parts["all"]) < 0.07


def test_the_split_does_not_depend_on_resolution_alphabets_or_faces():
    def is_held_back(**kwargs):
        return Glyph("q", "sans bold") in GlyphDataset("validation", **kwargs).glyphs

    assert is_held_back()
    assert is_held_back(resolution=128)
    assert is_held_back(alphabets=["latin", "greek"], faces=["sans bold", "mono"])


@pytest.mark.parametrize("resolution", [16, 64, 200])
def test_batches_hold_images_in_range_and_captions(resolution):
    data = GlyphDataModule(resolution=resolution, batch_size=4)
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert batch["image"].shape == (4, 3, resolution, resolution)
    assert batch["image"].dtype == torch.float32
    assert batch["image"].min() == -1
    assert 0.5 < batch["image"].max() <= 1
    assert all(isinstance(caption, str) for caption in batch["caption"])


def test_an_unknown_alphabet_is_named_with_the_known_ones():
    with pytest.raises(ConfigurationError, match="unknown alphabet 'runes'; known: digits, latin"):
        GlyphDataset(alphabets=["runes"])


def test_an_even_number_of_shifts_is_refused():
    with pytest.raises(ConfigurationError, match="must be odd, but is 2"):
        GlyphDataset(shifts_per_axis=2)
