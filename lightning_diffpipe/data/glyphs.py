"""A captioned image data set that every machine already has: named glyphs of the DejaVu fonts.

Training should run offline on a fresh machine, but data sets are downloads. matplotlib ships the
DejaVu fonts, and Unicode names every character, so a glyph comes with its caption:

    U+03B1 in DejaVuSerif-Bold  ->  "greek small letter alpha, serif bold"

Glyphs are drawn white on black at any resolution, on one baseline, centred by the width of their
ink. Small shifts multiply the data set. They are part of the index (`glyph * num_shifts + shift`)
rather than sampled, so that the same index gives the same pixels in every process.

Whether a (character, face) pair is held back follows from a hash of its caption: stable over
machines, resolutions and alphabets, and independent of the order of the files.
"""

import unicodedata
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import matplotlib
import numpy as np
import torch
from matplotlib.ft2font import FT2Font
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.utils.data import Dataset

from lightning_diffpipe.data.captioned import MADE, CaptionedDataModule, Sample, share_of
from lightning_diffpipe.errors import ConfigurationError, require_choice, require_number

Split = Literal["train", "validation", "all"]

# Inclusive ranges of code points.
ALPHABETS: dict[str, tuple[tuple[int, int], ...]] = {
    "digits": ((0x30, 0x39),),
    "latin": ((0x41, 0x5A), (0x61, 0x7A)),
    "greek": ((0x391, 0x3C9),),
    "cyrillic": ((0x400, 0x45F),),
    "punctuation": ((0x21, 0x2F), (0x3A, 0x40), (0x5B, 0x60), (0x7B, 0x7E)),
    "arrows": ((0x2190, 0x21FF),),
    "mathematics": ((0x2200, 0x22FF),),
    "all": ((0x21, 0x10FFFF),),
}
_FAMILIES = {"Sans": "sans", "SansMono": "mono", "Serif": "serif"}
_STYLES = {"Oblique": "italic", "Italic": "italic", "Bold": "bold", "": ""}
_STYLES |= {"BoldOblique": "bold italic", "BoldItalic": "bold italic"}


FURTHER_FACES = {"stix italic": "STIXGeneralItalic.ttf"}
"""By the name captions use, faces that the built-in models have never seen."""


class Glyph(NamedTuple):
    """A character in a face, for example `Glyph("α", "serif bold")`."""

    character: str
    face: str

    @property
    def caption(self) -> str:
        """Returns the caption, such as `"greek small letter alpha, serif bold"`."""
        return f"{unicodedata.name(self.character).lower()}, {self.face}"

    @property
    def share(self) -> float:
        """A number in [0, 1) that depends on the caption alone."""
        return share_of(self.caption)


def _folder_of_fonts() -> Path:
    return Path(matplotlib.get_data_path()) / "fonts" / "ttf"


@cache
def font_files() -> dict[str, Path]:
    """Returns the twelve text faces of DejaVu that matplotlib ships, by the name captions use."""
    faces = {}
    for path in sorted(_folder_of_fonts().glob("DejaVu*.ttf")):
        family, _, style = path.stem.removeprefix("DejaVu").partition("-")
        if family in _FAMILIES:  # the two "Display" faces hold a few symbols only
            faces[f"{_FAMILIES[family]} {_STYLES[style]}".strip()] = path
    return faces


@cache
def _known_faces() -> dict[str, Path]:
    return font_files() | {n: _folder_of_fonts() / file for n, file in FURTHER_FACES.items()}


_font, _characters_in = cache(ImageFont.truetype), cache(FT2Font)


def glyphs_of(alphabets: Sequence[str], faces: Sequence[str]) -> list[Glyph]:
    """Lists every named glyph of some alphabets in some faces, face by face.

    Args:
        alphabets: Names in `ALPHABETS`.
        faces: Names in `font_files()` or `FURTHER_FACES`.

    Returns:
        The glyphs that the fonts really hold.

    Raises:
        ConfigurationError: An alphabet or face is unknown.
    """
    for names, known, kind in ((alphabets, ALPHABETS, "alphabet"), (faces, _known_faces(), "face")):
        if unknown := sorted(set(names) - set(known)):
            raise ConfigurationError(f"unknown {kind} {unknown[0]!r}; known: {', '.join(known)}")
    ranges = [bounds for name in alphabets for bounds in ALPHABETS[name]]
    glyphs = []
    for face in faces:
        for point in sorted(_characters_in(str(_known_faces()[face])).get_charmap()):
            is_chosen = any(first <= point <= last for first, last in ranges)
            if is_chosen and unicodedata.name(chr(point), ""):
                glyphs.append(Glyph(chr(point), face))
    return glyphs


def draw(glyph: Glyph, resolution: int) -> Tensor:
    """Returns a glyph, white on black, as grey levels of 8 bits, `(resolution, resolution)` in pixels."""
    image = Image.new("L", (resolution, resolution), 0)
    pen = ImageDraw.Draw(image)
    font = _font(str(_known_faces()[glyph.face]), int(0.69 * resolution))
    left, _, right, _ = pen.textbbox((0, 0), glyph.character, font=font, anchor="ls")
    position = (resolution / 2 - (left + right) / 2, 0.72 * resolution)
    pen.text(position, glyph.character, fill=255, font=font, anchor="ls")
    return torch.from_numpy(np.asarray(image).copy())


class GlyphDataset(Dataset[Sample]):
    """Glyphs with captions, each at several small shifts.

    Args:
        split: Pairs of character and face to hold: `"train"`, `"validation"`, or `"all"`.
        resolution: Width and height, in pixels.
        alphabets: Names in `ALPHABETS`.
        faces: Names in `font_files()` or `FURTHER_FACES`; `None` for the twelve of DejaVu.
        validation_share: Share of the pairs that are held back, by a hash of their captions.
        shifts_per_axis: Odd; 1 for unshifted glyphs only, 3 for nine shifts, and so on.
    """

    def __init__(
        self,
        split: Split = "train",
        resolution: int = 64,
        alphabets: Sequence[str] = ("digits", "latin"),
        faces: Sequence[str] | None = None,
        validation_share: float = 0.05,
        shifts_per_axis: int = 3,
    ) -> None:
        require_number("resolution", resolution, 1, whole=True)
        require_number("validation_share", validation_share, 0, 1)
        if shifts_per_axis % 2 == 0:
            raise ConfigurationError(f"shifts_per_axis must be odd, but is {shifts_per_axis}")
        self.resolution = resolution
        pixels = round(3 * resolution / 64)
        count = shifts_per_axis if split != "validation" else 1
        steps = [round(pixels * (i - count // 2) / max(count // 2, 1)) for i in range(count)]
        # Down and right, on a square grid around zero, the unshifted one first.
        shifts = ((y, x) for y in steps for x in steps)
        self.shifts = sorted(shifts, key=lambda s: (abs(s[0]) + abs(s[1]), s))
        self.glyphs = [
            glyph
            for glyph in glyphs_of(alphabets, list(faces or font_files()))
            if split == "all" or (glyph.share < validation_share) == (split == "validation")
        ]

    def __len__(self) -> int:
        return len(self.glyphs) * len(self.shifts)

    def __getitem__(self, index: int) -> Sample:
        glyph = self.glyphs[index // len(self.shifts)]
        pixels = draw(glyph, self.resolution)
        # Rolling is shifting: glyphs keep an empty border.
        pixels = torch.roll(pixels, self.shifts[index % len(self.shifts)], dims=(0, 1))
        image = (pixels.float() / 127.5 - 1).expand(3, -1, -1)
        return {"image": image, "caption": glyph.caption}


class GlyphDataModule(CaptionedDataModule):
    """Named glyphs of the DejaVu fonts; nothing to download.

    Args:
        batch_size: Samples per batch on each data-parallel rank.
        num_workers: Worker processes; drawing a glyph takes about a tenth of a millisecond.
        condition: Condition of a ControlNet: `"edges"` of the image, or None.
        glyphs: Arguments of `GlyphDataset`: resolution, alphabets, faces, validation_share, shifts_per_axis.

    Raises:
        ConfigurationError: A value that cannot be, such as an unknown condition.
    """

    def __init__(
        self,
        batch_size: int = 32,
        num_workers: int = 0,
        condition: str | None = None,
        **glyphs: Any,
    ) -> None:
        super().__init__(batch_size, num_workers)
        require_choice("condition", condition, (None, *MADE))
        # What cannot be is refused before processes start; listing takes no time.
        if not len(GlyphDataset("train", **glyphs)):
            values = ", ".join(f"{name}={value}" for name, value in glyphs.items())
            raise ConfigurationError(
                f"no glyph is left to train on with {values}; add alphabets, or lower validation_share"
            )
        self._glyphs = glyphs
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        """Lists the glyphs of both splits."""
        train, held_back = (GlyphDataset(s, **self._glyphs) for s in ("train", "validation"))
        self._use(train, held_back, self.hparams.condition)
