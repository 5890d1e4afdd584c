"""Tar shards in webdataset's layout: `000.jpg`, `000.txt`, `001.jpg`, `001.txt`, ...

Reading shards front to back keeps disks and object stores streaming where millions of small files
would not. The package `webdataset` is optional: `pip install lightning-diffpipe[webdataset]`.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from lightning_diffpipe.data.captioned import collate
from lightning_diffpipe.data.image_folder import to_square
from lightning_diffpipe.errors import ConfigurationError


def _require_webdataset() -> Any:
    try:
        import webdataset
    except ImportError as error:
        raise ConfigurationError(
            "WebDatasetDataModule needs the package webdataset, which is not installed; "
            "run: pip install 'lightning-diffpipe[webdataset]'"
        ) from error
    return webdataset


class WebDatasetDataModule(L.LightningDataModule):
    """Captioned pictures from tar shards.

    Each data-parallel rank must read its own samples: shards are dealt out by the rank the strategy
    names, so that all stages of one pipeline see the same batches.

    Args:
        train_shards: Brace pattern of the training shards, such as `"data/{000..099}.tar"`.
        validation_shards: Brace pattern of the held-back shards; `None` for no validation.
        samples_per_epoch: Training samples in an epoch, over all ranks; a stream has no length.
        resolution: Width and height of the images, in pixels.
        shuffle_buffer: Samples held in memory to be drawn from.
        batch_size: Samples per batch on each data-parallel rank.
        num_workers: Worker processes that decode pictures.
        seed: Order of shards and samples; the same on every rank.
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
    ) -> None:
        super().__init__()
        self._webdataset = _require_webdataset()
        self.save_hyperparameters()

    def _data_parallel(self) -> tuple[int, int]:
        """Returns this rank's place among the data-parallel ranks, and their number."""
        strategy = getattr(self.trainer, "strategy", None)
        kwargs = getattr(strategy, "distributed_sampler_kwargs", None) or {}
        return kwargs.get("rank", 0), kwargs.get("num_replicas", 1)

    def _stream(self, shards: str, shuffle: bool) -> Any:
        wds, h = self._webdataset, self.hparams
        rank, num_ranks = self._data_parallel()
        stages = [wds.SimpleShardList(shards, seed=h.seed if shuffle else None)]
        stages.append(wds.slice(rank, None, num_ranks))
        stages += [wds.split_by_worker, wds.tarfile_to_samples()]
        if shuffle:
            stages.append(wds.shuffle(h.shuffle_buffer, seed=h.seed))
        stages += [
            wds.decode("pil"),
            wds.to_tuple("jpg;jpeg;png;webp", "txt"),
            wds.map(lambda pair: {"image": to_square(pair[0], h.resolution), "caption": pair[1]}),
            wds.batched(h.batch_size, collation_fn=collate, partial=not shuffle),
        ]
        return wds.DataPipeline(*stages)

    def _loader(self, stream: Any) -> DataLoader:
        return DataLoader(
            stream,
            batch_size=None,
            num_workers=self.hparams.num_workers,
            pin_memory=torch.cuda.is_available(),
        )

    def train_dataloader(self) -> DataLoader:
        """Endless shuffled shards, cut into epochs of `samples_per_epoch`."""
        _, num_ranks = self._data_parallel()
        batches = self.hparams.samples_per_epoch // (self.hparams.batch_size * num_ranks)
        stream = self._stream(self.hparams.train_shards, shuffle=True)
        return self._loader(stream.repeat().with_epoch(max(1, batches)))

    def val_dataloader(self) -> DataLoader | list:
        """The held-back shards once, in order; an empty list without any."""
        if self.hparams.validation_shards is None:
            return []
        return self._loader(self._stream(self.hparams.validation_shards, shuffle=False))
