"""Frozen encodings on disk: computed in the first pass over the data, read in the others.

The other way to make frozen layers cheap; the report of a plan has a line "storing encodings" where that is
faster. Reading wins where the data are small and fixed and many passes are made; filling bubbles
wins where samples are augmented, captions are many, disks are slow, or the data are seen once, and it is
the only way for layers that depend on noise or timesteps, like the locked half of a ControlNet.

There is one file for each layer and sample, under the hash of what it depends on (`graph/memo.py`):

    <folder>/3f/3f0c2a9b11d0...    {"format": "diffpipe-encoding/1", "key": ..., "tensors": [...], "crc32": ...}
                                   raw bytes of the tensors

Any number of ranks, runs and machines may share a folder: a file is written elsewhere and renamed, so that a
reader sees all of it or nothing, and whoever writes the same key writes the same content. A file that
was cut short by a crash of the machine, or damaged, is named in a warning, removed and made again.
"""

import json
import warnings
import zlib
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import lightning as L
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.utils.data import IterableDataset

from lightning_diffpipe.comm.mesh import gathered_objects
from lightning_diffpipe.comm.watcher import watcher
from lightning_diffpipe.errors import (
    ConfigurationError,
    raised_by_all,
    require_flags,
    require_number,
)
from lightning_diffpipe.files import write_atomically
from lightning_diffpipe.graph.cut import cut
from lightning_diffpipe.graph.frozen import FrozenView
from lightning_diffpipe.graph.memo import Entry, LayerMemo, repeatable, why_not_remembered
from lightning_diffpipe.graph.placement import loaded
from lightning_diffpipe.graph.versions import bytes_of
from lightning_diffpipe.runtime.batch_layout import microbatches
from lightning_diffpipe.runtime.stage import PartitionedStep
from lightning_diffpipe.training.pipeline import Pipeline
from lightning_diffpipe.viewing.text import percent, size

_FORMAT = "diffpipe-encoding/1"
_USELESS_SHARE = 0.1
_MOST_DRAWS, _QUIET_DRAWS = 16, 3  # of a batch: until so many in a row bring nothing new


class EncodingCache(L.Callback):
    """Stores the outputs of frozen layers for each sample, and reads them in later passes.

    Losses are those of a run without it: an entry is found by a hash of everything the layer depends on, so
    that other weights, settings, crops, captions or precisions are other entries. A layer whose weights change
    in training is computed from then on (a write through `.data` leaves no trace). Layers that sample random
    numbers, or whose inputs follow noise or timesteps, are computed as ever; what is stored of a VAE are the
    moments, so that each pass samples its own latents. Any number of ranks and runs may share the folder.

    After a pass over the data in which a rank computed no sample, encoders leave its memory: their parameters are
    those of their files, or are written to one, and are loaded for a new sample, a layer at a time, or where
    validation and sampling call them.

    Args:
        folder: Folder of the files; ranks on several hosts may share it or have their own.
        max_bytes: The run stops storing, not reading, after so many bytes; None: no limit.
        min_flops_per_byte: Layers that compute less than this for each byte they give are not stored.
        encode_first: Encode and store all samples before training, in a folder that all ranks share; encoders then
            leave memory, and plans count so. All layers whose outputs follow from the sample are stored, and what a
            sample gave in a batch of one size counts for all sizes, the same to rounding. For data that are the
            same in each pass; captions that the step drops now and then may be among them.

    Raises:
        ConfigurationError: A number that cannot be. When `fit` begins with `encode_first`: samples differ from pass
            to pass, or are a stream, nothing of them can be stored, or not all of it.

    Example:
        >>> trainer = L.Trainer(strategy="diffpipe",
        ...                     callbacks=[EncodingCache("encodings")])  # doctest: +SKIP
    """

    def __init__(
        self,
        folder: str | Path,
        max_bytes: int | None = None,
        min_flops_per_byte: float = 10.0,
        encode_first: bool = False,
    ) -> None:
        require_flags(encode_first=encode_first)
        if max_bytes is not None:
            require_number("max_bytes", max_bytes, 0)
        self.folder = Path(folder)
        self.max_bytes = max_bytes
        self.min_flops_per_byte = 0.0 if encode_first else min_flops_per_byte
        self.encode_first = encode_first
        self.memo: LayerMemo | None = None
        self.refused: dict[str, str] = {}
        self._changing: dict[int, str] = {}
        self._store: EncodingStore | None = None
        self._passes = 0
        self._found_before = (0, 0)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Forgets the encodings of an earlier run."""
        self.memo, self._store, self._passes, self._found_before = None, None, 0, (0, 0)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Warns if there is no pipeline, so that it does nothing."""
        if getattr(trainer.strategy, "pipeline", None) is None:
            rank_zero_warn(
                "EncodingCache does nothing without strategy='diffpipe', which finds the frozen layers"
            )

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Chooses the layers that can be stored, with the first batch."""
        pipeline: Pipeline | None = getattr(trainer.strategy, "pipeline", None)
        if pipeline is not None and self.memo is None:
            self._begin(trainer, pipeline, batch if _encoding_ranks(pipeline)[1] else None)

    def _begin(self, trainer: L.Trainer, pipeline: Pipeline, batch: Any) -> None:
        """Lets a memo answer calls of layers whose outputs for a batch can be stored; of none without one."""
        names = frozenset[str]() if batch is None else self._choose(trainer, pipeline, batch)
        mesh, share = pipeline.mesh, self.max_bytes and self.max_bytes // trainer.world_size
        self._store = EncodingStore(self.folder, share)
        changing = frozenset(self._changing)
        self.memo = LayerMemo(self._store, names, any_size=self.encode_first, changing=changing)
        named = dict(pipeline.module.named_parameters())
        self.memo.loaded = lambda layer: loaded(map(named.__getitem__, layer.parameters))
        pipeline.engine.layout.steps.remember(self.memo if names else None)
        for stored, refused in mesh.on_first((sorted(names), sorted(self.refused.items())))[-1:]:
            rank_zero_info(
                "Encodings stored in %s: %s. Computed: %s", self.folder, ", ".join(stored) or "nothing",
                "; ".join(f"{name} {why}" for name, why in refused) or "-",
            )  # fmt: skip

    @watcher.inside("encoding the data")
    def encode_all(self, trainer: L.Trainer, pipeline: Pipeline) -> None:
        """Stores all encodings, each encoding rank a part, and loads stages in the place of encoders; collective.

        Raises:
            ConfigurationError: They cannot be stored; on all ranks.
        """
        feed = trainer.fit_loop._combined_loader
        indices = feed.every_sample()
        if indices is None:
            _refuse(
                "needs one DataLoader, of data that can be asked for all of their samples; this is a stream, or "
                "there are several. Leave it out: encodings are then stored as samples come"
            )
        index, count = _encoding_ranks(pipeline)
        batches = (indices[index::count] or indices[:1]) if count else []
        device, refusal = trainer.strategy.root_device, ""
        read = feed.read(batches, "encoding", device)
        # In step, as no rank is waited for for longer than half an hour.
        for number in range(max(_of_all(trainer, -(-len(indices) // _num_encoding(pipeline))))):
            batch = next(read, None)
            if number == 0:
                again = next(feed.read(batches[:1], "again", device), None)
                refusal = self._begin_with(trainer, pipeline, batch, again)
            elif batch is not None:
                self._encode(trainer, pipeline, batch, number)
            if refusal := next(filter(None, _of_all(trainer, refusal or self._store.why_full)), ""):
                _refuse(f"stores all samples before training, but {refusal}")
        self._require_shared(trainer)
        num_new = sum(_of_all(trainer, self.memo.made.total()))
        self.memo.found.clear()
        self.memo.made.clear()
        freed = _of_all(trainer, pipeline.offload(self._spared(), self.folder))
        pipeline.load_stages()
        rank_zero_info(
            "All samples are encoded; %d results of layers were new. Encoders have left the memory of ranks: %s",
            num_new, ", ".join(f"{rank} ({size(num_bytes)})" for rank, num_bytes in enumerate(freed) if num_bytes),
        )  # fmt: skip

    def _begin_with(self, trainer: L.Trainer, pipeline: Pipeline, batch: Any, again: Any) -> str:
        """Stores the first batch, which has been read twice; returns the reason if training cannot rely on that."""
        if batch is not None:  # without a store, in which layers that mix samples would not be seen
            self._run(trainer, pipeline, batch, 0)
        self._begin(trainer, pipeline, batch)
        if batch is None:
            return ""
        if not self.memo.names:
            reasons = "; ".join(f"{name} {why}" for name, why in sorted(self.refused.items()))
            return f"there is nothing to store: {reasons or 'no layer is frozen'}. Leave it out"
        self._encode(trainer, pipeline, batch, 0)
        if self._store.why_full:
            return self._store.why_full
        before = self.memo.made.copy()
        self._run(trainer, pipeline, again, 0)
        if changed := sorted(self.memo.made - before):
            return (
                f"a batch that was read twice brought {changed[0]} other samples: they differ from pass to pass "
                "(random crops, flips, shuffled tags?). Switch that off (of a folder of images by data.flip=0 "
                "data.random_crop=false data.shuffle_tags=false), or leave encode_first out: encoders then stay in "
                "memory"
            )
        return ""

    def _encode(self, trainer: L.Trainer, pipeline: Pipeline, batch: Any, number: int) -> None:
        """Stores the encodings of a batch for several random numbers of the step, which may drop captions."""
        draw, last_new, results = 0, 0, self.memo.made
        while draw - last_new <= _QUIET_DRAWS and draw < _MOST_DRAWS:
            before = results.total()
            self._run(trainer, pipeline, batch, _MOST_DRAWS * number + draw)
            last_new = draw if results.total() > before else last_new
            draw += 1

    def _run(self, trainer: L.Trainer, pipeline: Pipeline, batch: Any, number: int) -> None:
        """Runs the frozen layers for a batch, with random numbers by a number, through the memo if there is one."""
        step = pipeline.engine.layout.lay_out(batch, number, trainer.strategy._arguments)
        for work in step.works:
            view = _frozen_view(pipeline, work.partitioned)
            view.remember(self.memo)
            view.whole(work.call, work.seed, None, step.frozen and step.frozen.group_size)

    def _require_shared(self, trainer: L.Trainer) -> None:
        """Refuses a folder of one rank that others do not see."""
        store = self._store
        keys = filter(None, _of_all(trainer, store.last_key))
        if not all(_of_all(trainer, all(store.path(key).exists() for key in keys))):
            _refuse(
                f"needs a folder that all ranks share, but some do not see in {self.folder} what others have "
                "stored; give one on a disk of all hosts (callbacks.encoding_cache.folder)"
            )

    def _choose(self, trainer: L.Trainer, pipeline: Pipeline, batch: Any) -> frozenset[str]:
        """Returns names of modules whose outputs are stored; `refused` has reasons for other frozen ones."""
        steps = pipeline.engine.layout.steps
        microbatch = microbatches(batch, pipeline.plan.num_microbatches, steps.batch_spec)[0]
        partitioned = steps.of(microbatch, pipeline.seed)
        graph = partitioned.graph
        reasons = {
            layer.name: why_not_remembered(layer, graph, self.min_flops_per_byte)
            for layer in graph.layers
            if layer.frozen
        }
        if not all(reasons.values()):
            call = partial(trainer.strategy._run_training_step, pipeline.module, microbatch)
            view = _frozen_view(pipeline, partitioned)
            steady = repeatable(view, call, pipeline.seed)
            left = [layer for layer in graph.layers if layer.frozen and not reasons[layer.name]]
            self._changing = {x.index: x.name for x in left if x.index not in steady}
            for name in {x.name for x in left} - {x.name for x in left if x.index in steady}:
                reasons[name] = "depends on noise, timesteps or other random numbers of the step"
        self.refused = {name: why for name, why in reasons.items() if why}
        return frozenset(name for name, why in reasons.items() if not why)

    def _spared(self) -> frozenset[str]:
        """Returns names of modules that nothing calls once all samples are stored."""
        return self.memo.names - {*self._changing.values()}

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stops storing what is never found again."""
        if self.memo is None:
            return
        self._passes += 1
        num_found, num_made = self.memo.found.total(), self.memo.made.total()
        now = (num_found - self._found_before[0], num_made - self._found_before[1])
        self._found_before = (num_found, num_made)
        useless = sum(now) > 0 and now[0] < _USELESS_SHARE * sum(now)
        if self._passes > 1 and now[0] and not now[1] and _covers_data(trainer):
            try:
                trainer.strategy.pipeline.offload(self._spared(), self.folder)
            except OSError as error:  # the disk is full
                warnings.warn(f"encoders stay in memory: {error}", stacklevel=2)
        # A pass over a part of the data brings other samples than those before, which will come back.
        if self._passes > 1 and useless and self.memo.stores and _covers_data(trainer):
            self.memo.stores = False
            rank_zero_warn(
                f"only {percent(now[0] / sum(now))} of the samples of this pass had been stored: they "
                "differ from pass to pass (random crops or flips?). Nothing more is stored; fill the "
                "bubbles instead, or augment after encoding"
            )

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Logs how many encodings were read, computed and written."""
        if self.memo is None or self._store is None:
            return
        pipeline = trainer.strategy.pipeline
        counts = self.memo.found.total(), self.memo.made.total(), self._store.bytes_written
        num_read, fresh, written = map(sum, zip(*pipeline.mesh.gathered(counts), strict=True))
        rank_zero_info(
            "Encodings: %d read (%s), %d computed, %s written to %s",
            num_read, percent(num_read / max(num_read + fresh, 1)), fresh, size(written), self.folder,
        )  # fmt: skip


@raised_by_all()
def _refuse(why: str) -> NoReturn:
    raise ConfigurationError(f"encode_first=true {why}")


def _of_all(trainer: L.Trainer, value: Any) -> list[Any]:
    """Returns plain data of all ranks, on all of them."""
    return [value] if trainer.world_size == 1 else gathered_objects(value, None)


def _num_encoding(pipeline: Pipeline) -> int:
    return pipeline.engine.layout.num_encoding or pipeline.mesh.layout.ranks_per_pipeline


def _encoding_ranks(pipeline: Pipeline) -> tuple[int, int]:
    """Returns the number of this rank among those that encode, and their count; 0 and 0 for other ranks."""
    count = _num_encoding(pipeline)
    index = pipeline.mesh.local_rank - (pipeline.mesh.layout.ranks_per_pipeline - count)
    return (index, count) if index >= 0 else (0, 0)


def _frozen_view(pipeline: Pipeline, partitioned: PartitionedStep) -> FrozenView:
    """Returns the view of the frozen layers, also on one rank, which otherwise runs them where they are called."""
    view = partitioned.frozen_view
    if view.cut.layers:
        return view
    interception = next(iter(partitioned.stage_views.values())).interception
    pieces = cut(partitioned.graph, ())
    return FrozenView(pipeline.module, partitioned.graph, pieces.frozen, interception)


def _covers_data(trainer: L.Trainer) -> bool:
    """Returns whether each pass has most of the samples; False for streams and samplers without a length."""
    combined = trainer.fit_loop._combined_loader
    strategy = trainer.strategy
    share = 1 / strategy.distributed_sampler_kwargs["num_replicas"]
    for loader in combined.flattened:
        data = getattr(loader, "dataset", None)
        num_drawn = sized_len(getattr(loader, "sampler", None))
        num_batches, size_of_data = sized_len(loader), sized_len(data)
        if isinstance(data, IterableDataset) or None in (num_drawn, num_batches, size_of_data):
            return False
        if trainer.num_training_batches < num_batches or num_drawn < share * size_of_data / 2:
            return False
    return True


class EncodingStore:
    """Entries of a memo as files.

    Args:
        folder: Folder of the files; made if it is not there.
        max_bytes: This process stops writing after so many bytes; None: no limit.

    Attributes:
        bytes_written: Bytes that this process has written.
        why_full: Reason why nothing is written any more; empty while entries are written.
        last_key: Key of the entry that was read or written last; empty if none was.
    """

    def __init__(self, folder: str | Path, max_bytes: int | None = None) -> None:
        self.folder = Path(folder)
        self.max_bytes = max_bytes
        self.bytes_written = 0
        self.why_full = self.last_key = ""
        self.folder.mkdir(parents=True, exist_ok=True)

    def path(self, key: str) -> Path:
        """Returns the file of a key."""
        return self.folder / key[:2] / key

    def read(self, key: str) -> Entry | None:
        """Returns the entry of a key; None if there is none, or if its file is damaged, which a warning names."""
        path = self.path(key)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            warnings.warn(f"cannot read the stored encoding {path}: {error}", stacklevel=2)
            return None
        self.last_key = key
        try:
            return _parse(content, key)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            warnings.warn(
                f"the stored encoding {path} is damaged ({error}); it is removed and made again",
                stacklevel=2,
            )
            path.unlink(missing_ok=True)
            return None

    def write(self, key: str, entry: Entry) -> None:
        """Stores an entry, unless the limit is reached or the disk is full, of which it warns once."""
        if self.why_full:
            return
        payload = b"".join(map(bytes_of, entry.tensors))
        tensors = []
        for tensor, stride in zip(entry.tensors, entry.strides, strict=True):
            dtype, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
            tensors.append({"dtype": dtype, "shape": shape, "stride_in_group": list(stride)})
        crc32 = zlib.crc32(payload)
        header = {"format": _FORMAT, "key": key, "tensors": tensors, "crc32": crc32}
        content = json.dumps(header).encode() + b"\n" + payload
        if self.max_bytes is not None and self.bytes_written + len(content) > self.max_bytes:
            self._stop(f"its share of {self.max_bytes} bytes is used up")
            return
        try:
            write_atomically(self.path(key), content, durable=False)
        except OSError as error:
            self._stop(str(error))
            return
        self.bytes_written += len(content)
        self.last_key = key

    def _stop(self, why: str) -> None:
        self.why_full = why
        warnings.warn(
            f"no more encodings are stored in {self.folder}: {why}. Training goes on; what is stored is "
            "used, the rest is computed",
            stacklevel=3,
        )


def _parse(content: bytes, key: str) -> Entry:
    head, newline, payload = content.partition(b"\n")
    if not newline:
        raise ValueError("it has no header")
    header: Any = json.loads(head)
    if header["format"] != _FORMAT or header["key"] != key:
        raise ValueError(f"its header says {header['format']!r}, key {header['key']!r}")
    if zlib.crc32(payload) != header["crc32"]:
        raise ValueError(f"the checksum of its {len(payload)} bytes is wrong")
    tensors, start = [], 0
    for described in header["tensors"]:
        dtype = getattr(torch, described["dtype"])
        shape = torch.Size(described["shape"])
        stop = start + shape.numel() * dtype.itemsize
        tensor = torch.empty(shape, dtype=dtype)
        if stop > start:
            raw = torch.frombuffer(bytearray(payload[start:stop]), dtype=torch.uint8)
            tensor = raw.view(dtype).reshape(shape)
        tensors.append(tensor)
        start = stop
    strides = tuple(tuple(described["stride_in_group"]) for described in header["tensors"])
    return Entry(tuple(tensors), strides)
