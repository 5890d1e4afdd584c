"""Tar shards in webdataset's layout: `000.jpg`, `000.txt`, `001.jpg`, `001.txt`, ...

A second image may lie next to each for a ControlNet, `000.cond.png` if the condition is called `"cond.png"`; a mask
and references alike.

Reading shards front to back keeps disks and object stores streaming where millions of small files
would not. The package `webdataset` is optional: `pip install lightning-diffpipe[webdataset]`.
"""

import io
import itertools
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_diffpipe.data.augmentation import Augmentation
from lightning_diffpipe.data.captioned import (
    MADE,
    Batch,
    CaptionedDataModule,
    Sample,
    collate,
    unchanged,
)
from lightning_diffpipe.data.pixels import read_reference, read_sample, require_color
from lightning_diffpipe.errors import ConfigurationError, DataError, require_number
from lightning_diffpipe.graph.rng import derived_seed, isolated_random_numbers

_log = logging.getLogger(__name__)
_IMAGES = ("jpg", "jpeg", "png", "webp")


@dataclass(eq=False)
class _Epochs(IterableDataset[Batch]):
    """Shuffled batches of one rank without end, of which an epoch is so many, over all its workers.

    Attributes:
        stored: All samples of a worker's shards once, as they are stored, in an order that follows from a seed;
            given that, the worker and their number.
        read: Makes samples of them.
        leaves_out: Whether that leaves some out.
        epoch: Returns which epoch begins.
        num_batches: Batches of an epoch.
        batch_size: Samples of a batch.
        seed: Of all orders.
        rank: Whose batches these are, of those that read other shards.
    """

    stored: Callable[[int, int, int], Iterable[Any]]
    read: Callable[[Iterable[Any]], Iterator[Sample]]
    leaves_out: bool
    epoch: Callable[[], int]
    num_batches: int
    batch_size: int
    seed: int
    rank: int = 0
    _skipped: int = 0
    _num_read: int = 0

    def skip_batches(self, count: int) -> None:
        """Lets epochs that are started from now on begin with a later batch, as a run does that goes on in one."""
        self._skipped = count

    def __len__(self) -> int:
        """Returns the batches of an epoch, over all workers: what a learning rate schedule needs to know."""
        return self.num_batches

    def __iter__(self) -> Iterator[Batch]:
        information = get_worker_info()
        worker, count = (information.id, information.num_workers) if information else (0, 1)
        # A loader asks its workers in turn, the first one for the first batch.
        return self._batches((worker + self._skipped) % count, count, self._skipped)

    def _batches(self, worker: int, count: int, skipped: int) -> Iterator[Batch]:
        epoch = self.epoch()
        stored = self._endless(epoch, worker, count)
        before = self.batch_size * len(range(worker, skipped, count))
        if not self.leaves_out:  # else only those who read them know how many these are
            stored, before = itertools.islice(stored, before, None), 0
        samples = self._counted(self.read(stored))
        for _ in itertools.islice(samples, before):
            pass
        first = worker + count * len(range(worker, skipped, count))
        for number in range(first, self.num_batches, count):
            seed = derived_seed(self.seed, "augmentation", self.rank, epoch, number)
            with isolated_random_numbers(seed):
                batch = collate(list(itertools.islice(samples, self.batch_size)))
            yield batch

    def _counted(self, samples: Iterator[Sample]) -> Iterator[Sample]:
        for sample in samples:
            self._num_read += 1
            yield sample

    def _endless(self, epoch: int, worker: int, count: int) -> Iterator[Any]:
        for repetition in itertools.count():
            sample, read_before = None, self._num_read
            seed = derived_seed(self.seed, "shards", epoch, repetition)
            for sample in self.stored(seed, worker, count):
                yield sample
            if sample is None or (self.leaves_out and self._num_read == read_before):
                raise ConfigurationError(
                    "training shards hold no sample with an image (jpg, jpeg, png or webp) and a txt that can be "
                    "read; warnings above say what was left out, if on_error=skip"
                )


@dataclass(eq=False)
class _Once(IterableDataset[Batch]):
    """All batches of one rank in order; the last one may be smaller."""

    stored: Callable[[int, int], Iterable[Any]]
    read: Callable[[Iterable[Any]], Iterator[Sample]]
    batch_size: int

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        samples = self.read(self.stored(*((worker.id, worker.num_workers) if worker else (0, 1))))
        while batch := list(itertools.islice(samples, self.batch_size)):
            yield collate(batch)


class WebDatasetDataModule(CaptionedDataModule):
    """Captioned images from tar shards.

    Each pipeline reads its own samples, on one of its ranks: shards are dealt out by what the strategy names.

    Args:
        train_shards: Brace pattern of the training shards, such as `"data/{000..099}.tar"`.
        validation_shards: Brace pattern of the held-back shards; `None` for no validation.
        samples_per_epoch: Training samples in an epoch, over all ranks; a stream has no length. Every epoch begins
            with all shards in an order of its own.
        resolution: Width and height of the images, in pixels.
        shuffle_buffer: Samples held in memory to be drawn from.
        batch_size: Samples per batch on each data-parallel rank.
        num_workers: Worker processes that decode images; no more than a rank has shards are started.
        seed: Order of shards and samples; the same on every rank.
        condition: What a ControlNet is shown: `"edges"` of the image, or the extension under which shards have a
            second image, such as `"cond.png"`; None for nothing.
        references: What a pipeline that edits images makes each from: the extension under which shards have another
            image, of any shape, or those of several, such as `["her.png", "hat.png"]`; None for nothing.
        on_error: What becomes of samples that cannot be used, and of the rest of shards that are cut short:
            `"raise"` ends the run with an error that names shard and sample, `"skip"` leaves them out and says
            their number.
        background: Colour that shows where images are transparent: a name, or such as `"#ff8000"`.
        mask: Where the loss counts: `"alpha"` for the images' alpha channel, or the extension under which shards
            have grey images, such as `"mask.png"`; None for everywhere.
        augmentation: Settings of `Augmentation`: flip, random_crop, shuffle_tags, keep_tags, trigger.

    Raises:
        ConfigurationError: The package webdataset is missing; or, when a loader is made, there are fewer shards
            than data-parallel ranks, or one of them is not there.
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
        require_color(background)
        self._augmentation = Augmentation(**augmentation)
        self._references = [references] if isinstance(references, str) else list(references or ())
        for name, value, least in (
            ("samples_per_epoch", samples_per_epoch, 1),
            ("shuffle_buffer", shuffle_buffer, 0),
            ("resolution", resolution, 1),
        ):
            require_number(name, value, least, whole=True)
        try:
            import webdataset
        except ImportError as error:
            raise ConfigurationError(
                "WebDatasetDataModule needs the package webdataset, which is not installed; "
                "run: pip install 'lightning-diffpipe[webdataset]'"
            ) from error
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
            wds.tarfile_to_samples(handler=self._refuse_shard),
        ]
        if seed is not None:
            stages.append(wds.shuffle(self.hparams.shuffle_buffer, seed=seed))
        return wds.DataPipeline(*stages)

    def _refuse_shard(self, error: Exception) -> bool:
        """Returns whether to go on with the next shard."""
        if self.on_error == "raise":
            text = " ".join(map(str, error.args))
            raise DataError(
                f"a shard cannot be read: {text}. Write it anew, or leave it out with on_error='skip'"
            ) from error
        self._count_left_out(error)
        return True

    def _count_left_out(self, error: Exception) -> None:
        worker = get_worker_info()
        self._left_out[worker.id + 1 if worker else 0] += 1
        _log.warning("left out (on_error=skip): %s", error)

    def _read(self, augmentation: Augmentation, stored: Iterable[Any]) -> Iterator[Sample]:
        """Makes samples of files, except for those that are left out."""
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
        missing = [
            name
            for name, end in (
                (f"image ({', '.join(_IMAGES)})", image),
                ("txt", "txt"),
                *((end, end) for end in (*companions.values(), *self._references)),
            )
            if end not in files
        ]
        if missing:
            raise DataError(f"{where} has no {' and no '.join(missing)}")
        try:
            caption = files["txt"].decode()
        except UnicodeDecodeError as error:
            raise DataError(f"the caption of {where} is no UTF-8 ({error.reason})") from error
        others = {
            kind: (io.BytesIO(files[end]), f"{end} of {where}") for kind, end in companions.items()
        }
        crop, caption = augmentation.crop(h.resolution, h.resolution), augmentation.caption(caption)
        # Not by webdataset, which cuts images of 16 bits off at 255.
        given = io.BytesIO(files[image]), caption, crop, h.background, f"the image of {where}"
        sample = read_sample(*given, others, alpha=h.mask == "alpha")
        if h.condition in MADE:
            sample["condition"] = MADE[h.condition](sample["image"])
        if self._references:
            sample["references"] = [
                read_reference(io.BytesIO(files[end]), crop, h.background, f"{end} of {where}")
                for end in self._references
            ]
        return sample

    def teardown(self, stage: str) -> None:
        """Says how many samples were left out."""
        if count := int(self._left_out.sum()):
            rank_zero_warn(
                f"{count} times a sample or the rest of a shard could not be read and was left out (on_error=skip)"
            )

    def _loader(self, stream: Any, shards: str) -> DataLoader:
        rank, num_ranks = self._data_parallel()
        names = self._webdataset.SimpleShardList(shards).urls
        for name in names:
            path = Path(name)
            if (
                "://" not in name
                and not name.startswith("pipe:")
                and not (path.is_file() and path.stat().st_size)
            ):
                there = "is empty (0 bytes)" if path.is_file() else "does not exist"
                raise DataError(f"the shard {name} ({shards}) {there}")
        num_shards = len(names)
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
        stream = _Epochs(
            partial(self._stored, h.train_shards),
            partial(self._read, self._augmentation),
            h.on_error == "skip",
            lambda: getattr(self.trainer, "current_epoch", 0),
            batches,
            h.batch_size,
            h.seed,
            rank,
        )
        # Lightning warns of every such length, as workers might all give the whole epoch. These share it out.
        warnings.filterwarnings("ignore", message="Your `IterableDataset` has `__len__` defined")
        return self._loader(stream, h.train_shards)

    def val_dataloader(self) -> DataLoader | list:
        """Returns the held-back shards once, in order; an empty list without any."""
        shards = self.hparams.validation_shards
        if shards is None:
            return []
        read = partial(self._read, self._augmentation.held_back())
        return self._loader(
            _Once(partial(self._stored, shards, None), read, self.batch_size), shards
        )

    def _held_back(self, count: int) -> list[Sample]:
        shards = self.hparams.validation_shards
        if shards is None:
            return []
        samples = self._read(self._augmentation.held_back(), self._stored(shards, None))
        return list(itertools.islice(samples, count))
