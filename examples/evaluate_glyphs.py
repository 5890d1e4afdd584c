"""How good are glyph weights? Images for a person, and numbers that agree with them.

    python examples/evaluate_glyphs.py [FOLDER] [--images DIR] [--alphabets digits latin]

Draws three rows per glyph: the font's, the autoencoder's reconstruction, and the sample for its
caption. Half of the glyphs are (character, face) pairs that the data module holds back. Reported are

* the PSNR of reconstructions, in dB;
* "character": the sample is nearest, over all characters, faces and small shifts, to a drawing of
  the character asked for (or within 5 % of the nearest, or to a look-alike: A, Α and А are one);
* "and face": it is also nearest to a drawing that is all but equal to the one asked for.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_diffpipe.callbacks.sample_images import image_grid
from lightning_diffpipe.data.glyphs import Glyph, GlyphDataset
from lightning_diffpipe.modules import LatentDiffusion
from lightning_diffpipe.modules.parts import built_in

ALPHABETS = ["digits", "latin", "greek", "cyrillic"]


class Judge:
    """Compares images with drawings of every glyph, at half resolution, under shifts of 6 pixels."""

    def __init__(self, dataset: GlyphDataset) -> None:
        self.glyphs = dataset.glyphs
        drawings = torch.stack([dataset[i]["image"][:1] for i in range(len(dataset))])
        self.templates = F.avg_pool2d(drawings / 2 + 0.5, 2)
        self.energy = self.templates.square().flatten(1).sum(1)

    def distances(self, halves: Tensor) -> Tensor:
        """Squared distances at the best shift, `(N, 1, h, w)` to `(N, num glyphs)`."""
        overlap = F.conv2d(F.pad(halves, (3, 3, 3, 3)), self.templates).flatten(2).amax(2)
        return halves.square().flatten(1).sum(1, keepdim=True) + self.energy - 2 * overlap

    def __call__(self, images: Tensor, wanted: list[Glyph]) -> tuple[float, float]:
        """Returns the shares of images with the right character, and with the right face too."""
        index = {glyph: i for i, glyph in enumerate(self.glyphs)}
        places = [index[glyph] for glyph in wanted]
        distances = self.distances(F.avg_pool2d(images[:, :1], 2))
        between = self.distances(self.templates[places])
        right_character = right_face = 0
        for row, (place, glyph) in enumerate(zip(places, wanted, strict=True)):
            nearest = int(distances[row].argmin())
            alike = bool(between[row, nearest] < 0.06 * self.energy[place])
            same = [i for i, g in enumerate(self.glyphs) if g.character == glyph.character]
            close = bool(distances[row, same].min() < 1.05 * distances[row, nearest])
            right_character += alike or close or self.glyphs[nearest].character == glyph.character
            right_face += alike
        return right_character / len(wanted), right_face / len(wanted)


def choose(split: str, count: int, alphabets: list[str]) -> list[dict]:
    """Takes `count` samples of a split, spread evenly in a fixed shuffled order."""
    dataset = GlyphDataset(split, alphabets=alphabets, shifts_per_axis=1)
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0))
    return [{**dataset[i], "glyph": dataset.glyphs[i]} for i in order[:count].tolist()]


def evaluate(model: LatentDiffusion, judge: Judge, chosen: list[dict], steps: int) -> Tensor:
    """Prints the numbers for some glyphs, and returns their three rows, `(N, 3 rows, 3, H, W)`."""
    images = torch.stack([sample["image"] for sample in chosen])
    with torch.no_grad():
        latents = model.encode_images(images, sample=False)
        reconstructions = model.decode_latents(latents)
    truth = images / 2 + 0.5
    psnr = -10 * (reconstructions - truth).square().mean((1, 2, 3)).log10().mean()
    start_s = time.perf_counter()
    samples = model.sample(
        [sample["caption"] for sample in chosen],
        num_inference_steps=steps,
        generator=torch.Generator().manual_seed(0),
    )
    rate = len(chosen) / (time.perf_counter() - start_s)
    glyphs = [sample["glyph"] for sample in chosen]
    for name, images in (("reconstruction", reconstructions), ("sample", samples)):
        character, face = judge(images, glyphs)
        print(f"  {name:15} character {character:.2f}   and face {face:.2f}")
    print(f"  PSNR of reconstructions {psnr:.1f} dB   samples/s {rate:.1f}")
    return torch.stack([truth, reconstructions, samples], dim=1)


def rows_of(images: Tensor, columns: int = 16) -> Tensor:
    """Orders `(N, 3, 3, H, W)` so that a grid shows truth, reconstruction and sample in rows."""
    groups = [part.transpose(0, 1).flatten(0, 1) for part in images.split(columns)]
    return torch.cat(groups)


def main() -> None:
    """Evaluates on pairs trained on and on pairs held back."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", default=built_in("glyphs"))
    parser.add_argument("--images", type=Path, default=Path("outputs/evaluate"))
    parser.add_argument("--count", type=int, default=96)
    parser.add_argument("--alphabets", nargs="+", default=ALPHABETS)
    parser.add_argument("--steps", type=int, default=25)
    arguments = parser.parse_args()
    model = LatentDiffusion.from_pretrained(arguments.folder).eval()
    judge = Judge(GlyphDataset("all", alphabets=ALPHABETS, shifts_per_axis=1))
    arguments.images.mkdir(parents=True, exist_ok=True)
    for split, title in (("train", "training pairs"), ("validation", "pairs held back")):
        chosen = choose(split, arguments.count, arguments.alphabets)
        print(f"{title}, {len(chosen)} glyphs:")
        images = evaluate(model, judge, chosen, arguments.steps)
        path = arguments.images / f"{split}.png"
        image_grid(rows_of(images), columns=16).save(path)
        print(f"  wrote {path}: rows are font, reconstruction, sample")


if __name__ == "__main__":
    main()
