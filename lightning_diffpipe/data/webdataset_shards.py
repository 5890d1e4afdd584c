"""Tar shards in webdataset's layout: `000.jpg`, `000.txt`, `001.jpg`, `001.txt`, ...

A second image may lie next to each for a ControlNet, `000.cond.png` if the condition is called `"cond.png"`; a mask
and references alike. With buckets, samples wait, as they are stored, until there is a batch of their shape.

Reading shards front to back keeps disks and object stores streaming where millions of small files
would not. The package `webdataset` is optional: `pip install lightning-diffpipe[webdataset]`.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import logging
import re
import tarfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any, Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_diffpipe.data.buckets import Last, Shape
from lightning_diffpipe.data.captioned import (
    Batch,
    CaptionedDataModule,
    Sample,
    collate,
    no_loaders,
    share_of,
    unchanged,
)
from lightning_diffpipe.data.listing import Entry, decoded
from lightning_diffpipe.data.pixels import IMAGES, VIDEOS, Augmentation
from lightning_diffpipe.data.reader import Look, SampleReader, Source
from lightning_diffpipe.errors import ConfigurationError, DataError, require_number
from lightning_diffpipe.graph.rng import derived_seed, isolated_random_numbers

_log = logging.getLogger(__name__)
_Read = Callable[[], Sample]


class _File(io.BytesIO):
    """The content of a file in a shard, whose text is its name."""

    def __init__(self, content: bytes, name: str) -> None:
        super().__init__(content)
        self._name = name

    def __str__(self) -> str:
        return self._name


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
        self._skipped = 0

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
        seeds = (derived_seed(data.hparams.seed, "shards", epoch, n) for n in itertools.count())
        batches = data._gathered(False, data.last_batch, seeds, worker, count)
        for number in range(worker, self._num_batches, count):
            seed = derived_seed(data.hparams.seed, "augmentation", self._rank, epoch, number)
            with isolated_random_numbers(seed):
                reads = next(batches)
                batch = collate([read() for read in reads]) if number >= skipped else None
            if batch is not None:
                yield batch


class _HeldBack(IterableDataset[Batch]):
    """All batches of one pipeline in order; the last one may be smaller."""

    def __init__(self, data: WebDatasetDataModule) -> None:
        self._data = data

    def __iter__(self) -> Iterator[Batch]:
        for reads in self._data._batches_held_back(*_worker()):
            yield collate([read() for read in reads])


def _worker() -> tuple[int, int]:
    """Returns the number of this worker of a loader, and that of all; of a loader without workers 0 and 1."""
    worker = get_worker_info()
    return (worker.id, worker.num_workers) if worker else (0, 1)


class WebDatasetDataModule(CaptionedDataModule):
    """Captioned images from tar shards.

    Each pipeline reads its own samples, on one of its ranks: shards are dealt out by what the strategy names.

    Args:
        train_shards: Brace pattern of the training shards, such as `"data/{000..099}.tar"`; or a list of patterns,
            each a text or a mapping such as `{"shards": "cats/{0..9}.tar", "repeats": 10, "weight": 1.0}` (see
            `Source`).
        validation_shards: The held-back shards, likewise; `None` for none.
        validation_share: Share of the samples of `train_shards` that is held back instead, by a hash of the names
            of shard and sample. They are read out of all shards.
        samples_per_epoch: Training samples in an epoch, over all ranks; a stream has no length. Every epoch begins
            with all shards in an order of its own.
        resolution: Width and height of the images, in pixels; with buckets, the side of a square of their area.
        caption_key: The key of a JSON file next to each image (`000.json`) that holds the caption; None for a text
            (`000.txt`).
        shuffle_buffer: Samples held in memory, of which the next one is chosen.
        batch_size: Samples per batch on each data-parallel rank.
        num_workers: Worker processes that decode images; no more than a rank has shards are started.
        seed: Order of shards and samples; the same on every rank.
        condition: Condition of a ControlNet: `"edges"` of the image, or the extension under which shards have a
            second image, such as `"cond.png"`; None for nothing. With `num_frames` the image that a video begins
            with.
        references: References of a pipeline that edits images: the extension under which shards have another
            image, of any shape, or those of several, such as `["her.png", "hat.png"]`; None for nothing.
        on_error: Treatment of samples that cannot be used, and of the rest of shards that are cut short:
            `"raise"` ends the run with an error that names shard and sample, `"skip"` leaves them out and says
            their number.
        num_frames: Successive frames of each video (`000.mp4`), out of its middle; of several numbers each has the
            largest that it can. None for images.
        background: Colour that shows where images are transparent: a name, or such as `"#ff8000"`.
        buckets: Whether images keep about their ratio of sides, at about the same area (`buckets.py`), instead of
            the middle square.
        bucket_step: Number of pixels of which sides are multiples, with buckets.
        enlarge: Whether buckets may enlarge images.
        last_batch: Treatment of the samples of a bucket that wait for others when all shards of a worker have been
            read: `"filled"` with the same ones again, `"dropped"`, or trained as a `"smaller"` batch. Without
            buckets they wait for the shards to be read again. What waits at the end of an epoch is left out.
        mask: Mask of the loss: `"alpha"` for the images' alpha channel, or the extension under which shards
            have grey images, such as `"mask.png"`; None for everywhere.
        augmentation: Settings of `Augmentation`: flip, random_crop, shuffle_tags, drop_tags, keep_tags, trigger.
            With the last one images may have no caption.

    Attributes:
        left_out: What this process has left out, each once: the texts of its errors.

    Raises:
        ImportError: The package webdataset is missing.
        ConfigurationError: When a loader is made, there are fewer shards than data-parallel ranks, or one of them
            does not exist.
    """

    def __init__(
        self,
        train_shards: str | Sequence[str | Mapping[str, Any]],
        samples_per_epoch: int,
        validation_shards: str | Sequence[str | Mapping[str, Any]] | None = None,
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
        caption_key: str | None = None,
        num_frames: int | Sequence[int] | None = None,
        buckets: bool = False,
        bucket_step: int = 64,
        enlarge: bool = False,
        last_batch: Last = "filled",
        validation_share: float = 0.0,
        **augmentation: Any,
    ) -> None:
        super().__init__(batch_size, num_workers, on_error)
        given = f"train_shards={train_shards!r} and validation_shards={validation_shards!r}"
        refusal = f"{given} must be brace patterns of tar files"
        self._train = Source.several(train_shards, "shards", refusal)
        require_number("validation_share", validation_share, 0, 1)
        if validation_share and validation_shards is not None:
            raise ConfigurationError(
                f"validation_share={validation_share} and validation_shards={validation_shards!r} both hold "
                "samples back; leave one of them out"
            )
        self._validation = [replace(s, repeats=1) for s in self._train] if validation_share else []
        if validation_shards is not None:
            self._validation = Source.several(validation_shards, "shards", refusal)
            validation_shards = Source.plain(validation_shards, "shards", self._validation)
        require_number("samples_per_epoch", samples_per_epoch, 1, whole=True)
        require_number("shuffle_buffer", shuffle_buffer, 0, whole=True)
        import webdataset  # of the extra lightning-diffpipe[webdataset]

        self._webdataset = webdataset
        self.left_out: dict[str, None] = {}
        self._left_out = torch.zeros(1 + num_workers, dtype=torch.int64).share_memory_()
        train_shards = Source.plain(train_shards, "shards", self._train)
        num_frames = list(num_frames) if isinstance(num_frames, Sequence) else num_frames
        references = references if isinstance(references, str | None) else list(references)
        self.save_hyperparameters()
        sources = self._train + self._validation
        self._reader = SampleReader(self.hparams, Augmentation(**augmentation), sources)

    def _data_parallel(self) -> tuple[int, int]:
        """Returns this rank's place among the data-parallel ranks, and their number."""
        strategy = getattr(self.trainer, "strategy", None)
        kwargs = getattr(strategy, "distributed_sampler_kwargs", None) or {}
        return kwargs.get("rank", 0), kwargs.get("num_replicas", 1)

    @property
    def last_batch(self) -> Last | None:
        """Treatment of samples that wait when all shards are read; None if all samples have one shape."""
        return self.hparams.last_batch if self._reader.has_shapes else None

    def _stored(self, is_held_back: bool, seed: int | None, worker: int, count: int) -> Any:
        """Returns the samples of a worker's shards once, as files by extension; in order without a seed."""
        wds, share = self._webdataset, self.hparams.validation_share
        rank, num_ranks = self._data_parallel()
        stages = [
            wds.SimpleShardList(
                self._urls(self._validation if is_held_back else self._train), seed=seed
            ),
            wds.slice(rank, None, num_ranks),
            wds.slice(worker, None, count),
            partial(wds.tariterators.url_opener, handler=self._refuse_shard),
            self._files,
            partial(wds.tariterators.group_by_keys, handler=self._refuse_shard),
        ]
        if share:
            name = lambda files: f"{PurePath(files['__url__']).name}/{files['__key__']}"
            stages.append(wds.select(lambda files: (share_of(name(files)) < share) == is_held_back))
        if seed is not None:
            stages.append(wds.shuffle(self.hparams.shuffle_buffer, seed=seed))
        return wds.DataPipeline(*stages)

    def _samples(
        self, is_held_back: bool, seed: int | None, worker: int = 0, count: int = 1
    ) -> Iterator[tuple[Entry, Shape]]:
        """Yields what of a worker's shards can be used, once, with its shape."""
        weights = self._weights(self._validation if is_held_back else self._train)
        for files in self._stored(is_held_back, seed, worker, count):
            with self._leaving_out():
                entry = self._entry(files, weights)
                yield entry, self._reader.shape(entry)

    def looked_at(self) -> Iterator[Look]:
        """Yields each sample as it is trained on, once; what has no shape is in `left_out` only."""
        repeats, once = Counter(self._urls(self._train)), copy(self)
        once._train = [Source(url, weight=w) for url, w in self._weights(self._train).items()]
        for is_held_back, reader in enumerate((self._reader, self._reader.held_back())):
            if self._validation or not is_held_back:
                yield from reader.looked_at(
                    Look(entry, shape, 0 if is_held_back else repeats[entry.where])
                    for entry, shape in once._samples(bool(is_held_back), None)
                )

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

    @contextlib.contextmanager
    def _leaving_out(self) -> Iterator[None]:
        """Leaves out what raises DataError, unless `on_error` is `"raise"`."""
        try:
            yield
        except DataError as error:
            if self.on_error == "raise":
                raise
            self._count_left_out(error)

    def _count_left_out(self, error: Exception) -> None:
        worker = get_worker_info()
        self.left_out[str(error)] = None
        self._left_out[worker.id + 1 if worker else 0] += 1
        _log.warning("left out (on_error=skip): %s", error)

    def _gathered(
        self,
        is_held_back: bool,
        last: Last | None,
        seeds: Iterable[int | None],
        worker: int,
        count: int,
        size: int | None = None,
    ) -> Iterator[list[_Read]]:
        """Yields batches of one shape, as functions that read samples, out of a worker's shards once for each seed.

        What waits for a batch when shards have been read is treated as `last` says; None: it waits on.
        """
        size = size or self.batch_size
        reader = self._reader.held_back() if is_held_back else self._reader
        waiting: dict[Shape, list[_Read]] = {}
        for seed in seeds:
            num_batches = 0
            for entry, shape in self._samples(is_held_back, seed, worker, count):
                with self._leaving_out():
                    read = partial(reader.read, entry, shape)
                    if self.on_error == "skip":  # only what can be read takes a place in a batch
                        read = partial(lambda sample: sample, read())
                    waiting.setdefault(shape, []).append(read)
                if len(waiting.get(shape, ())) == size:
                    num_batches += 1
                    yield waiting.pop(shape)
            if last in ("filled", "smaller"):
                for reads in waiting.values():
                    num_batches += 1
                    filled = itertools.islice(itertools.cycle(reads), size)
                    yield reads if last == "smaller" else [*filled]
            if last is not None:
                waiting.clear()
            if seed is not None and not (num_batches or waiting):
                raise ConfigurationError(
                    "training shards hold no sample that can be read (warnings above say what was left out, if "
                    f"on_error=skip), all are held back (validation_share={self.hparams.validation_share}), or "
                    f"with last_batch=dropped there are fewer than the {size} of a batch in each bucket"
                )

    def _entry(self, files: Mapping[str, Any], weights: Mapping[str, float]) -> Entry:
        """Returns what a sample consists of; raises DataError if a part of it is missing."""
        h, url, reader = self.hparams, files["__url__"], self._reader
        others = {
            kind: key if isinstance(key, list) else [key] for kind, key in reader.companions.items()
        }
        endings = VIDEOS if reader.frames else IMAGES
        ends = list(itertools.chain(*others.values()))
        shown = next((e for e in files if f".{e}" in endings and e not in ends), None)
        text = "txt" if h.caption_key is None else "json"
        needed = {("video" if reader.frames else "image"): shown, **{end: end for end in ends}}
        needed |= {} if h.get("trigger") else {text: text}
        if missing := [name for name, end in needed.items() if end not in files]:
            raise DataError(
                f"sample {files['__key__']!r} of {url} has no {' and no '.join(missing)}"
            )
        called = lambda end: f"{files['__key__']}.{end}"
        caption = self._caption(files[text], f"{called(text)} of {url}") if text in files else ""
        opened = lambda end: _File(files[end], called(end))
        companions = {
            kind: tuple(map(opened, its)) if kind == "references" else opened(its[0])
            for kind, its in others.items()
        }
        return Entry(opened(shown), caption, companions, str(url), weights[url])

    def _caption(self, content: bytes, where: str) -> str:
        key, text = self.hparams.caption_key, decoded(content, where)
        if key is None:
            return " ".join(text.split())
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            if isinstance(caption := json.loads(text)[key], str):
                return caption
        raise DataError(f"{where}: expected a text under {key!r}, but found {text[:80]!r}")

    def teardown(self, stage: str) -> None:
        """Warns of the number of samples that were left out."""
        if count := int(self._left_out.sum()):
            rank_zero_warn(
                f"{count} times a sample or the rest of a shard could not be read and was left out (on_error=skip)"
            )

    def read_files(self) -> None:
        """Looks for all shards, before processes start; raises DataError for one that does not exist."""
        for shards in (self._train, self._validation):
            for name in self._urls(shards):
                if "://" not in name and not name.startswith("pipe:") and not Path(name).is_file():
                    patterns = ", ".join(each.path for each in shards)
                    raise DataError(f"the shard {name} ({patterns}) does not exist")

    def _urls(self, shards: list[Source]) -> list[str]:
        expand = self._webdataset.SimpleShardList
        return [url for each in shards for url in expand(each.path).urls * each.repeats]

    def _weights(self, shards: list[Source]) -> dict[str, float]:
        weights: dict[str, float] = {}
        for each in shards:
            for url in self._urls([each]):
                if weights.setdefault(url, each.weight) != each.weight:
                    raise ConfigurationError(
                        f"the shard {url} has the weights {weights[url]} and {each.weight}, as two patterns "
                        "name it; let one of them name it"
                    )
        return weights

    def _loader(self, stream: Any, shards: list[Source]) -> DataLoader:
        self.read_files()
        self._weights(shards)
        rank, num_ranks = self._data_parallel()
        num_shards = len(self._urls(shards))
        if num_shards < num_ranks:
            patterns = ", ".join(each.path for each in shards)
            raise ConfigurationError(
                f"{num_shards} shards ({patterns}) cannot be dealt out to {num_ranks} data-parallel ranks, each of "
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
        return self._loader(_Epochs(self, batches, rank), self._train)

    def val_dataloader(self) -> DataLoader | list:
        """Returns the held-back shards once, in order; an empty list without any."""
        return self._loader(_HeldBack(self), self._validation) if self._validation else no_loaders()

    def _batches_held_back(
        self, worker: int = 0, count: int = 1, size: int | None = None
    ) -> Iterator[list[_Read]]:
        once = [None] if self._validation else []
        return self._gathered(True, "smaller", once, worker, count, size)

    def _held_back(self, count: int) -> list[Sample]:
        reads = next(self._batches_held_back(size=count), [])
        return [read() for read in reads]
