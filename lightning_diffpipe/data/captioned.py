"""What all data modules of captioned images share: loaders, and one kind of batch.

A sample is `{"image": (3, H, W) float in [-1, 1], "caption": str}`; a batch stacks the images and
lists the captions. Captions stay text, because only the model knows its tokenizer.
"""

from __future__ import annotations

from typing import TypedDict

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset


class Sample(TypedDict):
    """One captioned image; `image` is `(3, H, W)`, float32 in [-1, 1]."""

    image: Tensor
    caption: str


class Batch(TypedDict):
    """`B` captioned images; `image` is `(B, 3, H, W)`, float32 in [-1, 1]."""

    image: Tensor
    caption: list[str]


def collate(samples: list[Sample]) -> Batch:
    """Stacks images and lists captions.

    Args:
        samples: `B` samples whose images have one size.

    Returns:
        The batch.
    """
    return {
        "image": torch.stack([sample["image"] for sample in samples]),
        "caption": [sample["caption"] for sample in samples],
    }


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
        there = len(self.validation_set)
        count = min(count, there)
        return [self.validation_set[i * there // count]["caption"] for i in range(count)]
