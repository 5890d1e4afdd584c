"""What all data modules of captioned images share: loaders, and one kind of batch.

A sample is `{"image": (3, H, W) float in [-1, 1], "caption": str}`; a batch stacks the images and
lists the captions. Captions stay text, because only the model knows its tokenizer. For a ControlNet there is a
`"condition"` besides, `(3, H, W)` in [0, 1].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NotRequired, TypedDict

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_diffpipe.errors import require_number


class Sample(TypedDict):
    """One captioned image; `image` is `(3, H, W)`, float32 in [-1, 1]; `condition` alike, in [0, 1]."""

    image: Tensor
    caption: str
    condition: NotRequired[Tensor]


class Batch(TypedDict):
    """`B` captioned images; `image` is `(B, 3, H, W)`, float32 in [-1, 1]; `condition` alike, in [0, 1]."""

    image: Tensor
    caption: list[str]
    condition: NotRequired[Tensor]


def collate(samples: list[Sample]) -> Batch:
    """Stacks images and lists captions.

    Args:
        samples: `B` samples whose images have one size; all of them with conditions, or none.

    Returns:
        The batch.
    """
    batch: Batch = {
        "image": torch.stack([sample["image"] for sample in samples]),
        "caption": [sample["caption"] for sample in samples],
    }
    conditions = stacked_conditions(samples)
    if conditions is not None:
        batch["condition"] = conditions
    return batch


def stacked_conditions(samples: Sequence[Sample]) -> Tensor | None:
    """The conditions of some samples, `(N, 3, H, W)`; None if they have none."""
    if not samples or "condition" not in samples[0]:
        return None
    return torch.stack([sample["condition"] for sample in samples])


class CaptionedDataModule(L.LightningDataModule):
    """Loaders over two datasets of captioned images; subclasses set them in `setup`.

    Attributes:
        batch_size: Samples per batch on each data-parallel rank.
        num_workers: Worker processes of each loader.
        train_set: Samples trained on.
        validation_set: Samples held back.
    """

    train_set: Dataset[Sample]
    validation_set: Dataset[Sample]

    def __init__(self, batch_size: int, num_workers: int = 0) -> None:
        super().__init__()
        require_number("batch_size", batch_size, 1, whole=True)
        require_number("num_workers", num_workers, 0, whole=True)
        self.batch_size = batch_size
        self.num_workers = num_workers

    def _loader(self, dataset: Dataset[Sample], shuffle: bool) -> DataLoader[Sample]:
        return DataLoader(
            dataset,
            batch_size=self.batch_size,
            shuffle=shuffle,
            # A partial last batch would change the number of samples per microbatch in training.
            drop_last=shuffle,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
            collate_fn=collate,
        )

    def train_dataloader(self) -> DataLoader[Sample]:
        """Shuffled batches of `batch_size`, without the incomplete last one."""
        return self._loader(self.train_set, shuffle=True)

    def val_dataloader(self) -> DataLoader[Sample]:
        """All held-back samples, in order."""
        return self._loader(self.validation_set, shuffle=False)

    def held_back_captions(self, count: int) -> list[str]:
        """Up to `count` captions of the samples held back, spread over them, to be drawn while training."""
        return [sample["caption"] for sample in self._held_back(count)]

    def held_back_conditions(self, count: int) -> Tensor | None:
        """What a ControlNet is shown with these captions, `(N, 3, H, W)`; None if there is nothing."""
        return stacked_conditions(self._held_back(count))

    def _held_back(self, count: int) -> list[Sample]:
        there = len(self.validation_set)
        count = min(count, there)
        return [self.validation_set[i * there // count] for i in range(count)]
