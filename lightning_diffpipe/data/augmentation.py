"""What differs each time a sample is seen: crop, mirroring, order of tags.

Numbers come from the global generators, which the run's seed, the epoch and the number of the batch set
(`training/loader.py`): a run that goes on in the middle of an epoch repeats them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from lightning_diffpipe.data.pixels import Crop
from lightning_diffpipe.errors import ConfigurationError, require_flags, require_number


@dataclass(frozen=True)
class Augmentation:
    """How images are cropped and mirrored, and captions changed.

    Attributes:
        flip: Share of the samples that are mirrored, left and right.
        random_crop: Crop anywhere, not in the middle.
        shuffle_tags: Mix the order of a caption's parts between commas.
        keep_tags: So many of the first ones stay where they are.
        trigger: Words put in front of captions that do not have them.

    Raises:
        ConfigurationError: A number that cannot be.
    """

    flip: float = 0.0
    random_crop: bool = False
    shuffle_tags: bool = False
    keep_tags: int = 0
    trigger: str | None = None

    def __post_init__(self) -> None:
        require_number("flip", self.flip, 0, 1)
        require_number("keep_tags", self.keep_tags, 0, whole=True)
        require_flags(random_crop=self.random_crop, shuffle_tags=self.shuffle_tags)
        if self.keep_tags and not self.shuffle_tags:
            raise ConfigurationError(
                f"keep_tags={self.keep_tags} keeps tags in front of others that are shuffled; add shuffle_tags=true"
            )

    def held_back(self) -> Augmentation:
        """Returns what becomes of samples that are held back: the same each time."""
        return replace(self, flip=0.0, random_crop=False, shuffle_tags=False, keep_tags=0)

    def crop(self, height: int, width: int) -> Crop:
        """Draws what is kept of an image, so many pixels."""
        down, across = torch.rand(2).tolist() if self.random_crop else (0.5, 0.5)
        return Crop(height, width, down, across, bool(self.flip and torch.rand(()) < self.flip))

    def caption(self, text: str) -> str:
        """Draws a caption."""
        if self.shuffle_tags:
            tags = [tag.strip() for tag in text.split(",")]
            kept, others = tags[: self.keep_tags], tags[self.keep_tags :]
            text = ", ".join([*kept, *(others[i] for i in torch.randperm(len(others)))])
        if self.trigger and self.trigger not in text:
            text = f"{self.trigger}, {text}" if text else self.trigger
        return text
