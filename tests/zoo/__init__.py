"""Tiny denoisers of diffusers, as data: one table, several files by family.

`CASES` maps a name to its `Case`; `CASES[name].build()` gives a LightningModule with an ordinary
`training_step` and a batch. They prove that a pipeline computes what one process computes, for as
many classes as can be built on a CPU; `python -m tests.zoo.write_table` writes what came out to
`docs/models.md`.
"""

from . import (
    controlnets,
    transformers_audio,
    transformers_image,
    transformers_image_packed,
    transformers_other,
    transformers_video,
    transformers_wan,
    unets,
)
from .case import Case
from .double import in_double

FAMILIES = {
    "Image transformers": [*transformers_image.CASES, *transformers_image_packed.CASES],
    "Video transformers": [*transformers_video.CASES, *transformers_wan.CASES],
    "Audio, joint and other transformers": [*transformers_audio.CASES, *transformers_other.CASES],
    "U-Nets": unets.CASES,
    "ControlNets": controlnets.CASES,
}
CASES: dict[str, Case] = {case.name: case for cases in FAMILIES.values() for case in cases}

__all__ = ["CASES", "FAMILIES", "Case", "in_double"]
