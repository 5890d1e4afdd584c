"""Tiny pipelines that read reference images: Flux Kontext, Qwen-Image-Edit and Qwen-Image-Edit-Plus.

A processor shows references to the text encoder of the last two, which make them as large as what they draw in
earnest, a million pixels: here a few thousand.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import numpy as np
import torch
import transformers
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from torch import nn

from .case import perturb, silence
from .pipelines import LANGUAGE, PIPELINES, QWEN_VAE, VISION, build, denoiser, prepared

SPECIAL = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
NUM_REFERENCES = {
    "FluxKontextPipeline": 1,
    "QwenImageEditPipeline": 1,
    "QwenImageEditPlusPipeline": 2,
}
CALLS = {
    "FluxKontextPipeline": PIPELINES["FluxKontextPipeline"].call,
    "QwenImageEditPipeline": {"max_sequence_length": 480},
    "QwenImageEditPlusPipeline": {"max_sequence_length": 480},
}
CAPTIONS = ["make it snow", "x", "a very long dog who sits in the rain"]


@contextlib.contextmanager
def small_references() -> Iterator[None]:
    """Has Qwen's make references of about 64 x 64 pixels, and of 32 x 32 those that Plus shows to its encoder."""
    with contextlib.ExitStack() as stack:
        for module in (pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus):
            real = module.calculate_dimensions
            small = lambda area, ratio, real=real: real(max(area / 256, 32 * 32), ratio)
            stack.enter_context(mock.patch.object(module, "calculate_dimensions", small))
        yield


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


def build_editing(name: str, folder: Path, **parts: Any) -> Any:
    """One pipeline in evaluation mode, all weights of its denoiser perturbed; `parts` stand in for its own."""
    if name not in ("QwenImageEditPipeline", "QwenImageEditPlusPipeline"):
        return build(name, folder)
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    reads = processor()
    ids = reads.tokenizer.convert_tokens_to_ids(SPECIAL)
    names = "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"
    text = LANGUAGE | dict(
        vocab_size=400, max_position_embeddings=4096,
        rope_scaling={"rope_type": "default", "mrope_section": [1, 1, 2]},
    )  # fmt: skip
    config = transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config=VISION, **dict(zip(names, ids, strict=True))
    )
    made = {
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        "vae": QWEN_VAE["vae"](folder),
        "text_encoder": transformers.Qwen2_5_VLForConditionalGeneration(config),
        "tokenizer": reads.tokenizer,
        "processor": reads,
        "transformer": denoiser("QwenImageTransformer2DModel", joint_attention_dim=16)(folder),
    }
    pipeline = getattr(diffusers, name)(**{**made, **parts})
    for part in pipeline.components.values():
        if isinstance(part, nn.Module):
            silence(part.eval())
    perturb(pipeline.transformer, torch.Generator().manual_seed(0))
    return prepared(pipeline)


def batch_of(name: str, num_samples: int = 3, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Images of 32 pixels, captions of several lengths, and references of several shapes."""
    generator = np.random.default_rng(0)
    shapes = [(32, 32), (32, 64)][: NUM_REFERENCES.get(name, 0)]
    pixels = torch.randn(num_samples, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return {
        "image": pixels.to(dtype),
        "caption": CAPTIONS[:num_samples],
        "references": [
            generator.integers(0, 256, (num_samples, *shape, 3), dtype=np.uint8) for shape in shapes
        ],
    }
