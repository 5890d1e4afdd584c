"""Tar shards in webdataset's layout: `000.jpg`, `000.txt`, `001.jpg`, `001.txt`, ...

For a ControlNet a second picture may lie beside each: `000.cond.png`, if the condition is called `"cond.png"`.

Reading shards front to back keeps disks and object stores streaming where millions of small files
would not. The package `webdataset` is optional: `pip install lightning-diffpipe[webdataset]`.
"""

from __future__ import annotations

import io
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_diffpipe.data.captioned import Batch, Sample, collate, stacked_conditions
from lightning_diffpipe.data.conditions import MADE
from lightning_diffpipe.data.image_folder import require_same_shape, to_condition, to_square
from lightning_diffpipe.errors import ConfigurationError, require_number
from lightning_diffpipe.runtime.seeding import derived_seed


def _require_webdataset() -> Any:
    try:
        import webdataset
    except ImportError as error:
        raise ConfigurationError(
            "WebDatasetDataModule needs the package webdataset, which is not installed; "
            "run: pip install 'lightning-diffpipe[webdataset]'"
        ) from error
    return webdataset


class _Epochs(IterableDataset[Batch]):
    """Shuffled batches of one rank without end, of which an epoch is so many, over all its workers.

    Args:
        samples: All samples of this worker's shards once, in an order that follows from a seed.
        epoch: Tells which epoch begins.
        num_batches: Batches of an epoch.
        batch_size: Samples of a batch.
        seed: Of all orders.
    """

    def __init__(
        self,
        samples: Callable[[int], Iterator[Sample]],
        epoch: Callable[[], int],
        num_batches: int,
        batch_size: int,
        seed: int,
    ) -> None:
        self._samples, self._epoch, self._seed = samples, epoch, seed
        self._num_batches, self._batch_size = num_batches, batch_size

    def __len__(self) -> int:
        """Batches of an epoch, over all workers: what a learning rate schedule needs to know."""
        return self._num_batches

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()  # a loader asks its workers in turn
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        samples = self._endless(self._epoch())
        for _ in range(first, self._num_batches, step):
            yield collate(list(itertools.islice(samples, self._batch_size)))

    def _endless(self, epoch: int) -> Iterator[Sample]:
        for repetition in itertools.count():
            sample = None
            for sample in self._samples(derived_seed(self._seed, "shards", epoch, repetition)):
                yield sample
            if sample is None:
                raise ConfigurationError(
                    "training shards hold no sample with a picture (jpg, jpeg, png or webp) and a txt"
                )


class WebDatasetDataModule(L.LightningDataModule):
    """Captioned pictures from tar shards.

    Each data-parallel rank must read its own samples: shards are dealt out by the rank the strategy
    names, so that all stages of one pipeline see the same batches.

    Args:
        train_shards: Brace pattern of the training shards, such as `"data/{000..099}.tar"`.
        validation_shards: Brace pattern of the held-back shards; `None` for no validation.
        samples_per_epoch: Training samples in an epoch, over all ranks; a stream has no length. Every epoch begins
            with all shards in an order of its own.
        resolution: Width and height of the images, in pixels.
        shuffle_buffer: Samples held in memory to be drawn from.
        batch_size: Samples per batch on each data-parallel rank.
        num_workers: Worker processes that decode pictures; no more than a rank has shards are started.
        seed: Order of shards and samples; the same on every rank.
        condition: What a ControlNet is shown: `"edges"` of the picture, or the extension under which shards have a
            second picture, such as `"cond.png"`; None for nothing.

    Raises:
        ConfigurationError: The package webdataset is missing; or, when a loader is made, there are fewer shards
            than data-parallel ranks.
    """

    def __init__(
        self,
        train_shards: str,
        samples_per_epoch: int,
        validation_shards: str | None = None,
        resolution: int = 512,
        shuffle_buffer: int = 1000,
        batch_size: int = 16,
        num_workers: int = 4,
        seed: int = 0,
        condition: str | None = None,
    ) -> None:
        super().__init__()
        for name, value, least in (
            *(("samples_per_epoch", samples_per_epoch, 1), ("shuffle_buffer", shuffle_buffer, 0)),
            *(("resolution", resolution, 1), ("batch_size", batch_size, 1)),
            ("num_workers", num_workers, 0),
        ):
            require_number(name, value, least, whole=True)
        self._webdataset = _require_webdataset()
        self.save_hyperparameters()

    def _data_parallel(self) -> tuple[int, int]:
        """Returns this rank's place among the data-parallel ranks, and their number."""
        strategy = getattr(self.trainer, "strategy", None)
        kwargs = getattr(strategy, "distributed_sampler_kwargs", None) or {}
        return kwargs.get("rank", 0), kwargs.get("num_replicas", 1)

    def _stream(self, shards: str, seed: int | None) -> Any:
        """This worker's samples once; in order without a seed."""
        wds, h = self._webdataset, self.hparams
        rank, num_ranks = self._data_parallel()
        stages = [
            wds.SimpleShardList(shards, seed=seed),
            wds.slice(rank, None, num_ranks),
            wds.split_by_worker,
            wds.tarfile_to_samples(),
        ]
        if seed is not None:
            stages.append(wds.shuffle(h.shuffle_buffer, seed=seed))
        stages += [
            wds.to_tuple("jpg;jpeg;png;webp", "txt", *self._extensions),
            wds.map(self._sample),
        ]
        return wds.DataPipeline(*stages)

    @property
    def _extensions(self) -> list[str]:
        """Of the condition's pictures, where they come with the data."""
        condition = self.hparams.condition
        return [] if condition is None or condition in MADE else [condition]

    def _sample(self, members: tuple[bytes, ...]) -> Sample:
        h = self.hparams
        picture, caption, *conditions = members
        # Not by webdataset, which cuts pictures of 16 bits off at 255.
        image = Image.open(io.BytesIO(picture))
        sample: Sample = {"image": to_square(image, h.resolution), "caption": caption.decode()}
        if conditions:
            condition = Image.open(io.BytesIO(conditions[0]))
            require_same_shape(
                image, f"the picture of {sample['caption']!r}", condition, h.condition
            )
            sample["condition"] = to_condition(condition, h.resolution)
        elif h.condition is not None:
            sample["condition"] = MADE[h.condition](sample["image"])
        return sample

    def _loader(self, stream: Any, shards: str) -> DataLoader:
        rank, num_ranks = self._data_parallel()
        num_shards = len(self._webdataset.SimpleShardList(shards))
        if num_shards < num_ranks:
            raise ConfigurationError(
                f"{num_shards} shards ({shards}) cannot be dealt out to {num_ranks} data-parallel ranks, each of "
                f"which reads its own; write at least {num_ranks} shards, or train with fewer pipelines"
            )
        return DataLoader(
            stream,
            batch_size=None,
            num_workers=min(self.hparams.num_workers, len(range(rank, num_shards, num_ranks))),
            pin_memory=torch.cuda.is_available(),
        )

    def train_dataloader(self) -> DataLoader:
        """Endless shuffled shards, cut into epochs of `samples_per_epoch`."""
        h, (_, num_ranks) = self.hparams, self._data_parallel()
        batches = max(1, h.samples_per_epoch // (h.batch_size * num_ranks))
        stream = _Epochs(
            lambda seed: iter(self._stream(h.train_shards, seed)),
            lambda: getattr(self.trainer, "current_epoch", 0),
            batches,
            h.batch_size,
            h.seed,
        )
        # Lightning warns of every such length, as workers might all give the whole epoch. These share it out.
        warnings.filterwarnings("ignore", message="Your `IterableDataset` has `__len__` defined")
        return self._loader(stream, h.train_shards)

    def val_dataloader(self) -> DataLoader | list:
        """The held-back shards once, in order; an empty list without any."""
        shards = self.hparams.validation_shards
        if shards is None:
            return []
        stream = self._stream(shards, None)
        batched = self._webdataset.batched(self.hparams.batch_size, collation_fn=collate)
        return self._loader(stream.compose(batched), shards)

    def held_back_captions(self, count: int) -> list[str]:
        """The first captions of the held-back shards, up to `count`, for pictures to be drawn in training."""
        return [sample["caption"] for sample in self._held_back(count)]

    def held_back_conditions(self, count: int) -> Tensor | None:
        """What a ControlNet is shown with these captions, `(N, 3, H, W)`; None if there is nothing."""
        return stacked_conditions(self._held_back(count))

    def _held_back(self, count: int) -> list[Sample]:
        shards = self.hparams.validation_shards
        return [] if shards is None else list(itertools.islice(self._stream(shards, None), count))
