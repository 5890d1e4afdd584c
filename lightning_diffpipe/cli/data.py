"""`diffpipe data`: what of folders or tar shards is trained on, found out by reading all of them."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

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
    if OmegaConf.is_missing(config.data, "samples_per_epoch"):
        config.data.samples_per_epoch = 1  # which is found out here
    values = plain(config)
    if values["output"] is not None:
        require_writable(values["output"])
    announce_loading()
    from lightning_diffpipe.data import ImageFolderDataModule, WebDatasetDataModule
    from lightning_diffpipe.data.buckets import BucketBatches, described, grouped

    count = _counter(values["tokenizer"])
    module = hydra.utils.instantiate(config.data)
    if not isinstance(module, ImageFolderDataModule | WebDatasetDataModule):
        raise ConfigurationError(
            f"{type(module).__name__} lists no files; take data=image_folder or data=webdataset"
        )
    is_stream = isinstance(module, WebDatasetDataModule)
    with named({"folder": "data.folder"}):
        module.read_files()
    captions, broken, shown = dict[str, str](), list[DataError](), dict[Any, list[Any]]()
    shapes, counts = list[Any](), [0, 0]
    for entry, shape, repeats, sample in module.looked_at():
        counts[not repeats] += 1
        if isinstance(sample, DataError):
            broken.append(sample)
            if is_stream:
                continue  # no other sample takes its place
        else:
            captions[entry.called()] = sample["caption"]
            if len(shown.setdefault(shape, [])) < values["samples"]:
                shown[shape].append(sample)
        shapes += [shape] * repeats
    print(f"{counts[0]} files to train on, {counts[1]} held back\n")
    print(f"{'size':>22} {'samples':>8} {'batches':>8}   of an epoch")
    buckets = grouped(shapes)
    last = module.last_batch or "dropped"
    for shape, members in buckets.items():
        num_batches = len(BucketBatches([members], module.batch_size, last, shuffle=True))
        print(f"{shape!s:>22} {len(members):8d} {num_batches:8d}")
    print(f"\n{described(buckets, module.batch_size, module.last_batch)}")
    if is_stream:
        print(
            f"by one worker of one pipeline, each of which has buckets of its own, in an epoch of "
            f"data.samples_per_epoch={len(shapes)}"
        )
    longest = sorted(captions, key=lambda called: -count(captions[called])[0])[:_MOST]
    print("\nlongest captions:")
    for called in longest:
        print(f"  {count(captions[called])[1]}  {called}: {captions[called][:70]!r}")
    for what, errors in (("left out", [*module.left_out]), ("cannot be read", broken)):
        if errors:
            more = f"\n  and {len(errors) - _MOST} more" if len(errors) > _MOST else ""
            print(f"\n{len(errors)} {what}:", *errors[:_MOST], sep="\n  ", end=f"{more}\n")
    if values["output"] is not None:
        with file_errors("write", values["output"]):
            _sheet(shown).save(values["output"], "PNG")
        print(f"\nwrote {values['output']}")


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
