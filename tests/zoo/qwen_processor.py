"""The processor of Qwen-Image-Edit in tiny, and references as small.

A processor shows references to the text encoder of these pipelines, which make them as large as what they draw in
earnest, a million pixels: here a few thousand.
"""

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import transformers
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus

SPECIAL = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]


_REAL = {
    module: module.calculate_dimensions
    for module in (pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus)
}

_LOCK, _INSIDE = threading.Lock(), []


@contextlib.contextmanager
def small_references() -> Iterator[None]:
    """Has Qwen's make references of about 64 x 64 pixels, and of 32 x 32 those that Plus shows to its encoder.

    The same in another such context: steps whose frozen layers run early are in several at a time.
    """
    with _LOCK:
        _INSIDE.append(None)
        for module, real in _REAL.items():
            small = lambda area, ratio, real=real: real(max(area / 256, 32 * 32), ratio)
            module.calculate_dimensions = small
    try:
        yield
    finally:
        with _LOCK:
            _INSIDE.pop()
            for module, real in _REAL.items() if not _INSIDE else ():
                module.calculate_dimensions = real


class Processor(transformers.Qwen2_5_VLProcessor):
    """Reads images and texts, and needs no torchvision as videos do."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, **_: Any) -> None:
        self.image_token = SPECIAL[0]
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        transformers.ProcessorMixin.__init__(self, image_processor, tokenizer)

    @classmethod
    def from_pretrained(cls, folder: Any, **_: Any) -> Any:
        images = transformers.Qwen2VLImageProcessor.from_pretrained(folder)
        return cls(images, transformers.ByT5Tokenizer.from_pretrained(folder))


# Under the name of which diffusers saves it, and finds it where a test puts it there.
Processor.__module__ = transformers.Qwen2_5_VLProcessor.__module__
Processor.__name__ = Processor.__qualname__ = "Qwen2_5_VLProcessor"


def processor() -> Processor:
    tokenizer = transformers.ByT5Tokenizer(model_max_length=4096)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    sizes = {"shortest_edge": 28 * 28, "longest_edge": 64 * 64}
    return Processor(transformers.Qwen2VLImageProcessor(size=sizes), tokenizer)


@contextlib.contextmanager
def opened() -> Iterator[None]:
    """Has diffusers, and pickle, open this processor where a folder names that of Qwen."""
    read, home = Processor.from_pretrained, sys.modules[Processor.__module__]
    with (
        mock.patch.object(transformers.ProcessorMixin, "from_pretrained", read),
        mock.patch.object(home, Processor.__name__, Processor),
    ):
        yield


def references(number: int, num_samples: int) -> list[np.ndarray]:
    """So many for each sample, of several shapes."""
    generator, shapes = np.random.default_rng(0), [(32, 32), (32, 64)][:number]
    return [generator.integers(0, 256, (num_samples, *shape, 3), np.uint8) for shape in shapes]
