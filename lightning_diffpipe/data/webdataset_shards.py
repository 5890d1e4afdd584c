"""Tar shards in webdataset's layout: `000.jpg`, `000.txt`, `001.jpg`, `001.txt`, ...

A second image may lie next to each for a ControlNet, `000.cond.png` if the condition is called `"cond.png"`; a mask
and references alike.

Reading shards front to back keeps disks and object stores streaming where millions of small files
would not. The package `webdataset` is optional: `pip install lightning-diffpipe[webdataset]`.
"""

from __future__ import annotations

import io
import itertools
import logging
import re
import tarfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from PIL import ImageColor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_diffpipe.data.captioned import (
    MADE,
    Batch,
    CaptionedDataModule,
    Sample,
    collate,
    unchanged,
)
from lightning_diffpipe.data.pixels import Augmentation, read_reference, read_sample
from lightning_diffpipe.errors import ConfigurationError, DataError, require_number
from lightning_diffpipe.graph.rng import derived_seed, isolated_random_numbers

_log = logging.getLogger(__name__)
_IMAGES = ("jpg", "jpeg", "png", "webp")


class _Member(tarfile.TarInfo):
    """A tar header that raises where an archive is cut short.

    Python takes a truncated, missing or broken header after the first one for the end of the archive.
    """

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> tarfile.TarInfo:
        try:
            return super().fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"unexpected end of data ({error})") from error


class _Epochs(IterableDataset[Batch]):
    """Shuffled batches of one pipeline without end, cut into epochs, which all workers of a loader share out."""

    def __init__(self, data: WebDatasetDataModule, num_batches: int, rank: int) -> None:
        self._data, self._num_batches, self._rank = data, num_batches, rank
        self._skipped = self._num_read = 0

    def skip_batches(self, count: int) -> None:
        """Makes later epochs begin with a later batch, for a run that continues in the middle of one."""
        self._skipped = count

    def __len__(self) -> int:
        """Returns the number of batches of an epoch, over all workers, which a learning rate schedule needs."""
        return self._num_batches

    def __iter__(self) -> Iterator[Batch]:
        worker, count = _worker()
        # A loader asks its workers in turn, the first one for the first batch.
        return self._batches((worker + self._skipped) % count, count, self._skipped)

    def _batches(self, worker: int, count: int, skipped: int) -> Iterator[Batch]:
        data, epoch = self._data, getattr(self._data.trainer, "current_epoch", 0)
        stored = self._endless(epoch, worker, count)
        num_skipped = len(range(worker, skipped, count))
        before = data.batch_size * num_skipped
        if data.on_error == "raise":  # else it has to be read which samples are left out
            stored, before = itertools.islice(stored, before, None), 0
        samples = self._counted(data._read(data._augmentation, stored))
        for _ in itertools.islice(samples, before):
            pass
        for number in range(worker + count * num_skipped, self._num_batches, count):
            seed = derived_seed(data.hparams.seed, "augmentation", self._rank, epoch, number)
            with isolated_random_numbers(seed):
                batch = collate(list(itertools.islice(samples, data.batch_size)))
            yield batch

    def _counted(self, samples: Iterator[Sample]) -> Iterator[Sample]:
        for sample in samples:
            self._num_read += 1
            yield sample

    def _endless(self, epoch: int, worker: int, count: int) -> Iterator[Any]:
        data = self._data
        for repetition in itertools.count():
            sample, read_before = None, self._num_read
            seed = derived_seed(data.hparams.seed, "shards", epoch, repetition)
            for sample in data._stored(data.hparams.train_shards, seed, worker, count):
                yield sample
            if sample is None or (data.on_error == "skip" and self._num_read == read_before):
                raise ConfigurationError(
                    "training shards hold no sample with an image (jpg, jpeg, png or webp) and a txt that can be "
                    "read; warnings above say what was left out, if on_error=skip"
                )


class _HeldBack(IterableDataset[Batch]):
    """All batches of one pipeline in order; the last one may be smaller."""

    def __init__(self, data: WebDatasetDataModule) -> None:
        self._data = data

    def __iter__(self) -> Iterator[Batch]:
        samples = self._data._samples_held_back(*_worker())
        while batch := list(itertools.islice(samples, self._data.batch_size)):
            yield collate(batch)


def _worker() -> tuple[int, int]:
    """Returns the number of this worker of a loader, and that of all; of a loader without workers 0 and 1."""
    worker = get_worker_info()
    return (worker.id, worker.num_workers) if worker else (0, 1)


class WebDatasetDataModule(CaptionedDataModule):
    """Captioned images from tar shards.

    Each pipeline reads its own samples, on one of its ranks: shards are dealt out by what the strategy names.

    Args:
        train_shards: Brace pattern of the training shards, such as `"data/{000..099}.tar"`.
        validation_shards: Brace pattern of the held-back shards; `None` for no validation.
        samples_per_epoch: Training samples in an epoch, over all ranks; a stream has no length. Every epoch begins
            with all shards in an order of its own.
        resolution: Width and height of the images, in pixels.
        shuffle_buffer: Samples held in memory, of which the next one is chosen.
        batch_size: Samples per batch on each data-parallel rank.
        num_workers: Worker processes that decode images; no more than a rank has shards are started.
        seed: Order of shards and samples; the same on every rank.
        condition: Condition of a ControlNet: `"edges"` of the image, or the extension under which shards have a
            second image, such as `"cond.png"`; None for nothing.
        references: References of a pipeline that edits images: the extension under which shards have another
            image, of any shape, or those of several, such as `["her.png", "hat.png"]`; None for nothing.
        on_error: Treatment of samples that cannot be used, and of the rest of shards that are cut short:
            `"raise"` ends the run with an error that names shard and sample, `"skip"` leaves them out and says
            their number.
        background: Colour that shows where images are transparent: a name, or such as `"#ff8000"`.
        mask: Mask of the loss: `"alpha"` for the images' alpha channel, or the extension under which shards
            have grey images, such as `"mask.png"`; None for everywhere.
        augmentation: Settings of `Augmentation`: flip, random_crop, shuffle_tags, drop_tags, keep_tags, trigger.

    Raises:
        ImportError: The package webdataset is missing.
        ConfigurationError: When a loader is made, there are fewer shards than data-parallel ranks, or one of them
            does not exist.
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
        references: str | Sequence[str] | None = None,
        on_error: Literal["raise", "skip"] = "raise",
        background: str = "white",
        mask: str | None = None,
        **augmentation: Any,
    ) -> None:
        super().__init__(batch_size, num_workers, on_error)
        ImageColor.getrgb(str(background))  # or it raises ValueError
        self._augmentation = Augmentation(**augmentation)
        self._references = [references] if isinstance(references, str) else list(references or ())
        if not (isinstance(train_shards, str) and isinstance(validation_shards, str | None)):
            given = f"train_shards={train_shards!r} and validation_shards={validation_shards!r}"
            raise ConfigurationError(f"{given} must be brace patterns of tar files")
        require_number("samples_per_epoch", samples_per_epoch, 1, whole=True)
        require_number("shuffle_buffer", shuffle_buffer, 0, whole=True)
        require_number("resolution", resolution, 1, whole=True)
        import webdataset  # of the extra lightning-diffpipe[webdataset]

        self._webdataset = webdataset
        self._left_out = torch.zeros(1 + num_workers, dtype=torch.int64).share_memory_()
        self.save_hyperparameters()

    def _data_parallel(self) -> tuple[int, int]:
        """Returns this rank's place among the data-parallel ranks, and their number."""
        strategy = getattr(self.trainer, "strategy", None)
        kwargs = getattr(strategy, "distributed_sampler_kwargs", None) or {}
        return kwargs.get("rank", 0), kwargs.get("num_replicas", 1)

    def _stored(self, shards: str, seed: int | None, worker: int = 0, count: int = 1) -> Any:
        """Returns the samples of a worker's shards once, as files by extension; in order without a seed."""
        wds = self._webdataset
        rank, num_ranks = self._data_parallel()
        stages = [
            wds.SimpleShardList(shards, seed=seed),
            wds.slice(rank, None, num_ranks),
            wds.slice(worker, None, count),
            partial(wds.tariterators.url_opener, handler=self._refuse_shard),
            self._files,
            partial(wds.tariterators.group_by_keys, handler=self._refuse_shard),
        ]
        if seed is not None:
            stages.append(wds.shuffle(self.hparams.shuffle_buffer, seed=seed))
        return wds.DataPipeline(*stages)

    def _files(self, shards: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yields files of opened shards for webdataset, which takes an empty dict for the end of a shard."""
        for shard in shards:
            try:
                with tarfile.open(None, "r|*", shard["stream"], tarinfo=_Member) as archive:
                    for member in archive:
                        # As webdataset does: no links and folders, and nothing about the archive itself.
                        if member.isreg() and not re.match(r"__[^/]*__($|/)", member.name):
                            data = archive.extractfile(member).read()  # type: ignore[union-attr]
                            yield {"fname": member.name, "data": data, "__url__": shard["url"]}
                        archive.members = []  # type: ignore[attr-defined]
            except Exception as error:  # of the archive, or of what unpacks or fetches it
                error.args = (*error.args, shard["url"])
                self._refuse_shard(error)
            yield {}

    def _refuse_shard(self, error: Exception) -> bool:
        """Returns whether to go on with the next shard."""
        if self.on_error == "raise":
            if isinstance(error, DataError):  # which webdataset hands over again
                raise DataError(error.args[0])
            text = " ".join(each for each in error.args if isinstance(each, str))
            raise DataError(
                f"a shard cannot be read: {text}. Write it again, or leave it out with on_error='skip'"
            ) from error
        self._count_left_out(error)
        return True

    def _count_left_out(self, error: Exception) -> None:
        worker = get_worker_info()
        self._left_out[worker.id + 1 if worker else 0] += 1
        _log.warning("left out (on_error=skip): %s", error)

    def _read(self, augmentation: Augmentation, stored: Iterable[Any]) -> Iterator[Sample]:
        """Yields samples of files, without those that are left out."""
        for files in stored:
            try:
                yield self._sample(augmentation, files)
            except DataError as error:
                if self.on_error == "raise":
                    raise
                self._count_left_out(error)

    def _sample(self, augmentation: Augmentation, files: Mapping[str, Any]) -> Sample:
        h = self.hparams
        where = f"sample {files['__key__']!r} of {files['__url__']}"
        kinds = {"condition": h.condition, "mask": h.mask}
        companions = {kind: end for kind, end in kinds.items() if end not in (*MADE, "alpha", None)}
        image = next((end for end in _IMAGES if end in files), None)
        needed = {f"image ({', '.join(_IMAGES)})": image, "txt": "txt"}
        needed |= {end: end for end in (*companions.values(), *self._references)}
        if missing := [name for name, end in needed.items() if end not in files]:
            raise DataError(f"{where} has no {' and no '.join(missing)}")
        try:
            caption = files["txt"].decode()
        except UnicodeDecodeError as error:
            raise DataError(f"the caption of {where} is no UTF-8 ({error.reason})") from error
        opened = lambda end: (io.BytesIO(files[end]), f"{end} of {where}")
        others = {kind: opened(end) for kind, end in companions.items()}
        crop, caption = augmentation.crop(h.resolution, h.resolution), augmentation.caption(caption)
        # Not by webdataset, which cuts images of 16 bits off at 255.
        arguments = io.BytesIO(files[image]), caption, crop, h.background, f"the image of {where}"
        sample = read_sample(*arguments, others, alpha=h.mask == "alpha")
        if h.condition in MADE:
            sample["condition"] = MADE[h.condition](sample["image"])
        if self._references:
            sample["references"] = [
                read_reference(io.BytesIO(files[end]), crop, h.background, f"{end} of {where}")
                for end in self._references
            ]
        return sample

    def teardown(self, stage: str) -> None:
        """Warns of the number of samples that were left out."""
        if count := int(self._left_out.sum()):
            rank_zero_warn(
                f"{count} times a sample or the rest of a shard could not be read and was left out (on_error=skip)"
            )

    def read_files(self) -> None:
        """Looks for all shards, before processes start; raises DataError for one that does not exist."""
        for shards in (self.hparams.train_shards, self.hparams.validation_shards):
            if shards is not None:
                self._shards(shards)

    def _shards(self, pattern: str) -> list[str]:
        names = self._webdataset.SimpleShardList(pattern).urls
        for name in names:
            if "://" not in name and not name.startswith("pipe:") and not Path(name).is_file():
                raise DataError(f"the shard {name} ({pattern}) does not exist")
        return names

    def _loader(self, stream: Any, shards: str) -> DataLoader:
        rank, num_ranks = self._data_parallel()
        num_shards = len(self._shards(shards))
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
            collate_fn=unchanged,
        )

    def train_dataloader(self) -> DataLoader:
        """Returns endless shuffled shards, cut into epochs of `samples_per_epoch`."""
        h, (rank, num_ranks) = self.hparams, self._data_parallel()
        batches = max(1, h.samples_per_epoch // (h.batch_size * num_ranks))
        # Lightning warns of every such length, as workers might all give the whole epoch. These share it out.
        warnings.filterwarnings("ignore", message="Your `IterableDataset` has `__len__` defined")
        return self._loader(_Epochs(self, batches, rank), h.train_shards)

    def val_dataloader(self) -> DataLoader | list:
        """Returns the held-back shards once, in order; an empty list without any."""
        shards = self.hparams.validation_shards
        return [] if shards is None else self._loader(_HeldBack(self), shards)

    def _samples_held_back(self, worker: int = 0, count: int = 1) -> Iterator[Sample]:
        stored = self._stored(self.hparams.validation_shards, None, worker, count)
        return self._read(self._augmentation.held_back(), stored)

    def _held_back(self, count: int) -> list[Sample]:
        if self.hparams.validation_shards is None:
            return []
        return list(itertools.islice(self._samples_held_back(), count))
