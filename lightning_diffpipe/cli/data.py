"""`diffpipe data`: what of a folder is trained on, found out by reading all of it once."""

import itertools
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from lightning_diffpipe.cli.launch import announce_loading
from lightning_diffpipe.cli.values import file_errors, named, plain, require_writable, verb
from lightning_diffpipe.errors import ConfigurationError, DataError

_MOST = 10
"""Files and captions that are listed; all are counted."""

_HEIGHT, _MARGIN = 128, 8
"""Of the images on a sheet, in pixels."""


@verb(
    "look at what is trained on: diffpipe data data.folder=IMAGES data.buckets=true output=sheet.png"
)
def data(config: DictConfig) -> None:
    """Prints buckets, captions and unreadable files of `data`, and writes images of some samples to `output`."""
    values = plain(config)
    if values["output"] is not None:
        require_writable(values["output"])
    announce_loading()
    from lightning_diffpipe.data import ImageFolderDataModule

    count = _counter(values["tokenizer"])
    module = hydra.utils.instantiate(config.data)
    if not isinstance(module, ImageFolderDataModule):
        raise ConfigurationError(f"{type(module).__name__} lists no files; take data=image_folder")
    with named({"folder": "data.folder"}):
        module.read_files()
    module.on_error = "raise"  # so that each file is looked at
    module.setup("validate")
    sets = module.train_set, module.validation_set
    captions, broken, shown = dict[str, str](), list[DataError](), dict[Any, list[Any]]()
    for shape, entry, sample in itertools.chain.from_iterable(map(_read, sets)):
        if isinstance(sample, DataError):
            broken.append(sample)
            continue
        captions[str(entry.path)] = sample["caption"]
        if len(shown.setdefault(shape, [])) < values["samples"]:
            shown[shape].append(sample)
    entries = [len({entry.path for entry in each.entries}) for each in sets]
    print(f"{entries[0]} files to train on, {entries[1]} held back\n")
    print(f"{'size':>22} {'samples':>8} {'batches':>8}   of an epoch")
    batches = module.batches(shuffle=True)
    for shape, members in module.train_buckets.items():
        print(f"{shape!s:>22} {len(members):8d} {batches.num_batches(len(members)):8d}")
    print(f"\n{module.described()}")
    longest = sorted(captions, key=lambda path: -count(captions[path])[0])[:_MOST]
    print("\nlongest captions:")
    for path in longest:
        print(f"  {count(captions[path])[1]}  {path}: {captions[path][:70]!r}")
    for what, errors in (("left out", module.left_out), ("cannot be read", broken)):
        if errors:
            more = f"\n  and {len(errors) - _MOST} more" if len(errors) > _MOST else ""
            print(f"\n{len(errors)} {what}:", *errors[:_MOST], sep="\n  ", end=f"{more}\n")
    if values["output"] is not None:
        with file_errors("write", values["output"]):
            _sheet(shown).save(values["output"], "PNG")
        print(f"\nwrote {values['output']}")


def _read(samples: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yields shape, entry and sample of each file; in place of the sample the error, if it cannot be read."""
    samples = getattr(samples, "samples", samples)  # without conditions that are made
    first = list({entry.path: index for index, entry in enumerate(samples.entries)}.values())

    def read(index: int) -> Any:
        try:
            return samples[index]
        except DataError as error:
            return error

    with ThreadPoolExecutor() as threads:
        for start in range(0, len(first), 64):  # samples of so many are in memory
            indices = first[start : start + 64]
            for index, sample in zip(indices, threads.map(read, indices), strict=True):
                yield samples.shapes[index], samples.entries[index], sample


def _counter(tokenizer: str | None) -> Callable[[str], tuple[int, str]]:
    """Returns a function (caption) -> (length by which captions are compared, text to print)."""
    if tokenizer is None:
        return lambda caption: (len(caption), f"{len(caption):5d} characters")
    from transformers import AutoTokenizer

    folders = sorted(Path(tokenizer).glob("tokenizer*/")) or [Path(tokenizer)]
    try:
        tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in folders]
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigurationError(f"tokenizer={tokenizer} cannot be opened: {reason}") from error

    def count(caption: str) -> tuple[int, str]:
        counts = [len(each(caption, verbose=False).input_ids) for each in tokenizers]
        most = ", ".join(
            f"{n:4d} of {t.model_max_length}" for n, t in zip(counts, tokenizers, strict=True)
        )
        return max(counts), f"{most} tokens"

    return count


def _sheet(shown: dict[Any, list[Any]]) -> Any:
    """Draws a row for each shape; what a mask leaves out is dark, and of a video its middle frame is shown."""
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    font = ImageFont.truetype(fonts / "DejaVuSans.ttf", 12)
    line, rows = 18, []
    for shape, samples in shown.items():
        width = round(_HEIGHT * shape.width / shape.height)
        across = max((width + _MARGIN) * len(samples), math.ceil(font.getlength(str(shape))))
        row = Image.new("RGB", (across + 2 * _MARGIN, _HEIGHT + 3 * line), "white")
        draw = ImageDraw.Draw(row)
        draw.text((_MARGIN, 2), str(shape), "black", font)
        for place, sample in enumerate(samples):
            pixels = (
                sample["video"][:, shape.num_frames // 2] if "video" in sample else sample["image"]
            )
            pixels = (pixels / 2 + 0.5) * (0.25 + 0.75 * sample.get("mask", 1.0))
            levels = (pixels * 255).round().byte().permute(1, 2, 0).numpy()
            left = _MARGIN + place * (width + _MARGIN)
            row.paste(Image.fromarray(levels).resize((width, _HEIGHT)), (left, line))
            caption = shown_text = " ".join(sample["caption"].split())
            # One line, which is shortened to the image's width.
            while caption and font.getlength(shown_text) > width:
                caption = caption[: -max(1, len(caption) // 8)]
                shown_text = f"{caption}\N{HORIZONTAL ELLIPSIS}"
            draw.text((left, line + _HEIGHT + 2), shown_text, "black", font)
        rows.append(row)
    sheet = Image.new(
        "RGB", (max(row.width for row in rows), sum(row.height for row in rows)), "white"
    )
    for place, row in enumerate(rows):
        sheet.paste(row, (0, sum(row.height for row in rows[:place])))
    return sheet
