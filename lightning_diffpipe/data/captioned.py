"""Base of all data modules of captioned images: loaders, and one kind of batch.

A sample is `{"image": (3, H, W) float in [-1, 1], "caption": str}`; a batch stacks the images and
lists the captions. Captions stay text, because only the model knows its tokenizer. For a ControlNet there is a
`"condition"`, too, `(3, H, W)` in [0, 1], made from the image itself (`"edges"`) or read with it. Images
that were scaled and cropped come with their size before (`"original_size"`, height and width) and where the crop
begins (`"crops_coords_top_left"`), `(2,)` each. A `"mask"`, `(1, H, W)` in [0, 1], says where the loss counts, and
a `"weight"` how much that of the sample does. For pipelines that edit images there are `"references"`, one or
several images of any size, `(h, w, 3)` in 8 bits, which stay on the host, where processors read them.
"""

import hashlib
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypedDict

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_diffpipe.errors import DataError, require_choice, require_number


class _Tensors(TypedDict, total=False):
    image: Tensor
    video: Tensor
    condition: Tensor
    references: list[np.ndarray]
    original_size: Tensor
    crops_coords_top_left: Tensor
    mask: Tensor
    weight: Tensor


class Sample(_Tensors):
    """One captioned image; `image` is `(3, H, W)`, float32 in [-1, 1]; `condition` alike, in [0, 1].

    Or a video, `(3, F, H, W)`, in place of the image. Sizes and crops are `(2,)`, in pixels.
    """

    caption: str


class Batch(_Tensors):
    """`B` captioned images; `image` is `(B, 3, H, W)`, float32 in [-1, 1]; `condition` alike, in [0, 1].

    Or videos, `(B, 3, F, H, W)`, in their place. Sizes and crops are `(B, 2)`, in pixels.
    """

    caption: list[str]


def collate(samples: list[Sample]) -> Batch:
    """Stacks `B` images, or videos, of one size, and lists captions; all have conditions and sizes, or none has.

    The first references of all samples are one array, `(B, h, w, 3)`, the second ones another.
    """
    batch: Batch = {"caption": [sample["caption"] for sample in samples]}
    for name in samples[0]:
        if name == "references":
            columns = zip(*(sample["references"] for sample in samples), strict=True)
            batch["references"] = [np.stack(column) for column in columns]
        elif name != "caption":
            batch[name] = torch.stack([sample[name] for sample in samples])
    return batch


def unchanged(batch: Batch) -> Batch:
    """Returns a batch in which references stay arrays, of which torch would make tensors."""
    return batch


def no_loaders() -> list[Any]:
    """Returns an empty list, which Lightning takes for a loader without batches, without its warning of that."""
    warnings.filterwarnings("ignore", message="Total length of .* across ranks is zero")
    return []


def share_of(name: str) -> float:
    """Returns a number in [0, 1) that depends on a name alone, by which samples are held back."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def edges(image: Tensor) -> Tensor:
    """Returns how steep grey levels are (Sobel's gradient): 0 in even areas, 1 between black and white.

    The image is `(3, H, W)` in [-1, 1]; what is returned `(3, H, W)` in [0, 1], three times the same.
    """
    grey = F.pad(image.mean(0)[None], (1, 1, 1, 1), mode="replicate")[0]
    # Slices: a convolution of one small image takes five times as long.
    down, across = (part[:-2] + 2 * part[1:-1] + part[2:] for part in (grey, grey.T))
    gradient = torch.hypot(down[:, 2:] - down[:, :-2], (across[:, 2:] - across[:, :-2]).T) / 8
    return gradient.clamp(max=1).expand(3, -1, -1)


MADE: dict[str, Callable[[Tensor], Tensor]] = {"edges": edges}
"""Conditions that are made from the image, by name."""


class Conditioned(Dataset[Sample]):
    """Samples of another data set, with conditions made from their images by a function in `MADE`."""

    def __init__(self, samples: Dataset[Sample], condition: str) -> None:
        self.samples = samples
        self.condition = condition

    def __len__(self) -> int:
        return len(self.samples)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Sample:
        sample = self.samples[index]
        return {**sample, "condition": MADE[self.condition](sample["image"])}


class Readable(Dataset[Sample]):
    """Samples of another data set, where the next one that can be read stands for each that cannot.

    Args:
        samples: The data set; raises `DataError` for a sample that cannot be read.
        groups: Places of samples that may stand for each other; None: all may.

    Attributes:
        left_out: Errors of samples that could not be read so far, in any process that has loaded some.
    """

    def __init__(
        self, samples: Dataset[Sample], groups: Iterable[Sequence[int]] | None = None
    ) -> None:
        self.samples = samples
        self._alike = {place: group for group in groups or () for place in group}
        self.left_out = torch.zeros(len(self), dtype=torch.bool).share_memory_()

    def __len__(self) -> int:
        return len(self.samples)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Sample:
        alike = self._alike.get(index, range(len(self)))
        start = alike.index(index)
        for place in (index, *alike[start + 1 :], *alike[:start]):
            if not self.left_out[place]:
                try:
                    return self.samples[place]
                except DataError:
                    self.left_out[place] = True
        raise DataError(f"no sample of one size can be read. {self.why(index)}")

    def why(self, place: int) -> str:
        """Returns the error of a sample; empty if it can be read by now."""
        try:
            self.samples[place]
        except DataError as error:
            return str(error)
        return ""


class CaptionedDataModule(L.LightningDataModule):
    """Loaders over two datasets of captioned images; subclasses set them in `setup`.

    Attributes:
        batch_size: Samples per batch on each data-parallel rank.
        num_workers: Worker processes of each loader.
        on_error: Treatment of samples that cannot be read: `"raise"` ends the run, `"skip"` takes the next one,
            and says their number at the end.
        train_set: Samples trained on.
        validation_set: Samples held back.
    """

    train_set: Dataset[Sample]
    validation_set: Dataset[Sample]

    def __init__(
        self, batch_size: int, num_workers: int = 0, on_error: Literal["raise", "skip"] = "raise"
    ) -> None:
        super().__init__()
        require_number("batch_size", batch_size, 1, whole=True)
        require_number("num_workers", num_workers, 0, whole=True)
        require_choice("on_error", on_error, ("raise", "skip"))
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.on_error = on_error

    def _use(
        self,
        train_set: Dataset[Sample],
        validation_set: Dataset[Sample],
        condition: str | None,
        groups: Sequence[Iterable[Sequence[int]] | None] = (None, None),
    ) -> None:
        """Sets both data sets, with conditions made from the images if `condition` names some in `MADE`.

        `groups` has, for both, places of the samples of one size; None where all have it.
        """
        data_sets = (train_set, validation_set)
        if condition is not None:
            data_sets = tuple(Conditioned(samples, condition) for samples in data_sets)
        if self.on_error == "skip":
            data_sets = tuple(map(Readable, data_sets, groups))
        self.train_set, self.validation_set = data_sets

    def teardown(self, stage: str) -> None:
        """Warns how many samples were left out."""
        for name in ("train", "validation"):
            samples = getattr(self, f"{name}_set", None)
            if isinstance(samples, Readable) and (count := int(samples.left_out.sum())):
                first = samples.why(int(samples.left_out.nonzero()[0]))
                rank_zero_warn(
                    f"{count} of {len(samples)} samples ({name}) could not be read and were left out "
                    f"(on_error=skip). The first one: {first}"
                )

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
        """Returns shuffled batches of `batch_size`, without the incomplete last one."""
        return self._loader(self.train_set, shuffle=True)

    def val_dataloader(self) -> DataLoader[Sample] | list[Any]:
        """Returns all held-back samples, in order; an empty list without any."""
        held_back = self.validation_set
        return self._loader(held_back, shuffle=False) if len(held_back) else no_loaders()

    def held_back_captions(self, count: int) -> list[str]:
        """Returns up to `count` captions of the samples held back, spread over them, for samples in training."""
        return [sample["caption"] for sample in self._held_back(count)]

    def held_back_conditions(self, count: int) -> Tensor | list[np.ndarray] | None:
        """Returns conditions of these captions, `(N, 3, H, W)`, or their references; None if there is nothing.

        Of videos without a condition it is the first frame, the condition of models that animate an image,
        and nothing if they have several sizes.
        """
        samples = self._held_back(count)
        if samples and "references" in samples[0]:
            return collate(samples)["references"]
        if not samples or not {"condition", "video"} & samples[0].keys():
            return None
        first = [
            s["condition"] if "condition" in s else (s["video"][:, 0] + 1) / 2 for s in samples
        ]
        return torch.stack(first) if len({image.shape for image in first}) == 1 else None

    def _held_back(self, count: int) -> list[Sample]:
        indices = self._drawn_from()
        count = min(count, len(indices))
        return [self.validation_set[indices[i * len(indices) // count]] for i in range(count)]

    def _drawn_from(self) -> Sequence[int]:
        """Returns the indices of samples held back whose captions may be prompts of samples in training."""
        return range(len(self.validation_set))
