"""Tiny pipelines that read reference images: Flux Kontext, Qwen-Image-Edit and Qwen-Image-Edit-Plus."""

from typing import Any

import torch

from .pipelines import PIPELINES
from .qwen_processor import references

NUM_REFERENCES = {"FluxKontextPipeline": 1} | {
    name: entry.references for name, entry in PIPELINES.items() if entry.references
}
CALLS = {name: PIPELINES[name].call for name in NUM_REFERENCES}
CAPTIONS = ["make it snow", "x", "a very long dog who sits in the rain"]


def batch_of(name: str, num_samples: int = 3, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Images of 32 pixels, captions of several lengths, and references of several shapes."""
    pixels = torch.randn(num_samples, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return {
        "image": pixels.to(dtype),
        "caption": CAPTIONS[:num_samples],
        "references": references(NUM_REFERENCES.get(name, 0), num_samples),
    }
