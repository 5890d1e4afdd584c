"""A data loader that gives every rank of a pipeline the same batches: those that one process would train on.

All ranks of a pipeline load the same samples, but what a sample looks like may be random: crops, flips,
caption dropout. Those draws come from the main process or from loader workers, and Lightning seeds both
so that ranks differ, or lets them drift apart as soon as one rank draws one number more. Here every
batch is seeded by the run's seed, the data-parallel rank, the pass over the data (the epoch, and how often
a loader that is shorter than another one has begun anew in it) and its number in it, wherever it is loaded. So
what is in it depends neither on the number of workers nor on whether the pass was begun at its first batch: a run
that goes on in the middle of an epoch leaves out what has been trained on, as the loops of its checkpoint say.

The order is the user's. A sampler that draws from the global generators, as that of `shuffle=True` does, draws the
same in all pipelines; those side by side share its order out.

A wrong guess would train on mixed-up samples without any error, so the first batches of every pass are
compared over the pipeline.

For filling, the next batches are read before this one is trained on, and can be looked at. They are brought to the
device then, too, and once more by Lightning when they are due; hooks that change them on the way
(`on_after_batch_transfer`) may be random, and draw the same numbers each time.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import multiprocessing
import os
import select
import threading
import time
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any

import torch.utils._pytree as pytree
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    MapDataPipe,
)

from lightning_diffpipe.graph import rng
from lightning_diffpipe.graph.rng import derived_seed, isolated_random_numbers
from lightning_diffpipe.graph.versions import bytes_of
from lightning_diffpipe.runtime.upcoming import plain_bytes
from lightning_diffpipe.training.patching import patched
from lightning_diffpipe.training.pipeline import Pipeline

_NUM_COMPARED = 2
_TRANSFER_HOOKS = (
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
)


class AlignedLoader:
    """Wraps a loader; everything it does not do itself is the wrapped loader's.

    Args:
        loader: The user's loader, or a pipeline's share of it.
        seed: Seed of the run.
        data_parallel_rank: Which share of the data this rank's pipeline sees.
        place: Given the loader's length (None if it has none), tells where a pass begins, also of a resumed run, as
            `place_of` does. None if every pass shall draw the same numbers, as validation does.
        compare: Given a batch's checksum, raises if another rank of the pipeline has another.
        looks_ahead: Batches to read ahead.

    Attributes:
        loading_s: Seconds spent so far in waiting for batches of the wrapped loader.
    """

    def __init__(
        self,
        loader: Any,
        seed: int,
        data_parallel_rank: int,
        place: Callable[[int | None], tuple[int, int, int]] | None,
        compare: Callable[[int, int], None],
        looks_ahead: int = 0,
    ) -> None:
        self._loader = loader
        self.loading_s = 0.0
        self._looks_ahead = looks_ahead
        self._read: deque[tuple[Any, Any]] = deque()
        self._state_before: Any = None
        self._restored = False
        self._next = 0
        self._seed = seed
        self._data_parallel_rank = data_parallel_rank
        self._compare = compare
        self._place = place
        self._ended = 0, 0
        seed_workers(loader)
        batches = getattr(loader, "batch_sampler", None)
        samplers = getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)
        for sampler in {id(sampler): sampler for sampler in samplers}.values():
            if isinstance(sampler, DistributedSamplerWrapper):  # a share of an order of the user's
                order = sampler.dataset
                order._sampler = _SharedOrder(order._sampler, self._seed_of_order)
        self._numbered = _Numbered.of(loader)
        self._source = self._numbered.loader if self._numbered else loader

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        # Lightning reads sampler, dataset and more: without the user's sampler, `set_epoch` would never
        # arrive and every epoch would have the same order. A loader that is not stateful must not
        # look stateful.
        if "_loader" not in vars(self):  # not yet made, as one that is unpickled
            raise AttributeError(name)
        return getattr(unaligned(self.__dict__["_loader"]), name)

    @property
    def _iterator(self) -> Any:
        return self._source._iterator

    @_iterator.setter
    def _iterator(self, value: Any) -> None:
        # Lightning ends workers that stay, and then sets this: the loader must know that they are gone.
        self._source._iterator = value

    def __iter__(self) -> Iterator[Any]:
        batches = self._aligned_batches()
        read = self._read = deque()
        size = sized_len(self._source)
        while True:
            # Looking ahead asks no sampler for an end that the loop does not come to: it may draw once more there.
            while not read or (
                len(read) <= self._looks_ahead and (size is None or self._next < size)
            ):
                batch = next(batches, _END)
                if batch is _END:
                    break
                # A loop that reads no batch ahead would save this state after this batch.
                stateful = self._looks_ahead and _is_stateful(self._loader)
                read.append((batch, self._loader.state_dict() if stateful else None))
            if not read:
                break
            batch, self._state_before = read.popleft()
            yield batch
        self._state_before = None
        if self._place is not None:
            # Counted where passes end: Lightning may begin one twice before it takes a batch.
            epoch, *_ = self._place(None)
            self._ended = epoch, self._times_ended(epoch) + 1

    @property
    def ahead(self) -> list[Any]:
        """The batches that the pass gives next, as the loader made them; `looks_ahead`, fewer at its end."""
        return [batch for batch, _ in self._read]

    def _aligned_batches(self) -> Iterator[Any]:
        # Those of this pass that were trained on before the run was interrupted.
        size = sized_len(self._source)
        epoch, times_ended, done = self._place(size) if self._place else (0, 0, 0)
        if times_ended:
            self._ended = epoch, times_ended
        name = self._name_of_pass()
        first = 0
        if self._numbered is not None:
            first = done
            self._numbered.begin(
                partial(self._seed_of, name), partial(self._seed_of_order, name), done
            )
        elif self._restored:
            # By its own state, and a sampler that it asks first draws as in a whole pass.
            done, self._restored = 0, False
        skip = getattr(getattr(self._source, "dataset", None), "skip_batches", None)
        if skip is not None:
            first = done
            skip(done)
        if first < done:
            rank_zero_info(
                f"going on in the middle of an epoch: {done} batches are read and left out"
            )
        with isolated_random_numbers(self._seed_of(name, -1)):
            batches = iter(self._source)
        if skip is not None:
            skip(0)
        for number in itertools.count(first):
            with isolated_random_numbers(self._seed_of(name, number)):
                asked_s = time.perf_counter()
                batch = next(batches, _END)
                self.loading_s += time.perf_counter() - asked_s
            if batch is _END:
                return
            if number < done:
                continue
            self._next = number + 1
            if number - done < _NUM_COMPARED:
                self._compare(number, checksum(batch))
            yield batch

    def _name_of_pass(self) -> str:
        """Returns the epoch and, where a short loader begins anew next to a longer one, how often it has in it."""
        if self._place is None:
            return "0"
        epoch, *_ = self._place(None)
        times = self._times_ended(epoch)
        return f"{epoch}.{times}" if times else f"{epoch}"

    def _times_ended(self, epoch: int) -> int:
        return self._ended[1] if epoch == self._ended[0] else 0

    def _seed_of(self, name: str, number: int) -> int:
        return derived_seed(self._seed, "data", self._data_parallel_rank, name, number)

    def _seed_of_order(self, name: str | None = None, number: int = 0) -> int:
        """Returns the seed of an order of samples, the same in all pipelines."""
        return derived_seed(self._seed, "order", name or self._name_of_pass(), number)


_END = object()


class _Numbered:
    """Asks a loader's data set for batches by number, from any one on, each with a seed of its own.

    Stands for the loader's sampler in a copy of the loader. The data set seeds the random numbers of its process,
    the main one or a worker, whenever it is asked.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._asked = loader._index_sampler  # of whole batches, if the loader makes some
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        changes = {name: self, "dataset": _SeededSamples(loader.dataset), "_iterator": None}
        self.loader = _with(loader, **changes)
        self._pass: tuple[Any, ...] = ()

    @classmethod
    def of(cls, loader: Any) -> _Numbered | None:
        """Returns one for loaders that ask their data set and do it in torch's own way; None for any other."""
        if (
            not isinstance(loader, DataLoader)
            or isinstance(loader.dataset, IterableDataset | MapDataPipe)
            or type(loader).__iter__ is not DataLoader.__iter__
            or type(loader)._get_iterator is not DataLoader._get_iterator
            or _is_stateful(loader)
        ):
            return None
        return cls(loader)

    def begin(self, seed_of_batch: Any, seed_of_order: Any, first: int) -> None:
        """Says which pass is iterated over next, and from which batch on."""
        self._pass = seed_of_batch, seed_of_order, first

    def __len__(self) -> int:
        return len(self._asked)

    def __iter__(self) -> Iterator[Any]:
        (seed_of_batch, seed_of_order, first), asked = self._pass, None
        for number in itertools.count():
            with isolated_random_numbers(seed_of_order(number)):
                asked = iter(self._asked) if asked is None else asked
                wanted = next(asked, _END)
            if wanted is _END:
                return
            if number >= first:
                yield seed_of_batch(number), wanted


class _SeededSamples(Dataset[Any]):
    """A data set that is asked for pairs of a seed and what is wanted; else the user's, as workers see it."""

    def __init__(self, samples: Any) -> None:
        vars(self)["_samples"] = samples

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of unpickling, before there is anything to ask
            raise AttributeError(name)
        return getattr(vars(self)["_samples"], name)

    def __setattr__(self, name: str, value: Any) -> None:  # by a worker_init_fn
        setattr(self._samples, name, value)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, asked: tuple[int, Any]) -> Any:
        seed, wanted = asked
        rng.seed_all(seed, host=True)
        return self._samples[wanted]

    def __getitems__(self, asked: tuple[int, Any]) -> Any:
        seed, wanted = asked
        rng.seed_all(seed, host=True)
        many = getattr(self._samples, "__getitems__", None)
        return many(wanted) if many else [self._samples[index] for index in wanted]


class _SharedOrder:
    """A sampler that draws the same order in every pipeline; what else it does is the user's."""

    def __init__(self, sampler: Any, seed: Callable[[], int]) -> None:
        self._sampler = sampler
        self._seed = seed

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:  # above all `set_epoch`
        return getattr(self.__dict__["_sampler"], name)

    def __iter__(self) -> Iterator[Any]:
        with isolated_random_numbers(self._seed()):
            return iter(list(self._sampler))


def shared_out(loader: Any, trainer: Any, num_replicas: int, rank: int) -> Any:
    """Returns a pipeline's share of a loader, in its order: of samples, or of its own sampler's batches.

    As Lightning has it, some of the first ones are seen twice where shares would differ in length.

    Args:
        loader: The user's.
        trainer: Knows whether the user shares it out (`use_distributed_sampler=False`).
        num_replicas: Pipelines side by side. One alone gets the loader itself.
        rank: Which of them asks.

    Returns:
        A copy; the loader itself if it is no map-style `DataLoader`, or is shared out already.
    """
    wanted = num_replicas > 1 and trainer._accelerator_connector.use_distributed_sampler
    if not wanted or not isinstance(loader, DataLoader):
        return loader
    batches = loader.batch_sampler
    own = getattr(batches, "sampler", None) if type(batches) is BatchSampler else None
    known = isinstance(own, DistributedSampler) or isinstance(loader.sampler, DistributedSampler)
    if known or isinstance(loader.dataset, IterableDataset):
        return loader
    share = partial(DistributedSamplerWrapper, num_replicas=num_replicas, rank=rank, shuffle=False)
    if batches is None:
        changes = {"sampler": share(loader.sampler)}
    elif own is None:
        changes = {"batch_sampler": share(batches)}
    else:
        sampler = share(own)
        batches = BatchSampler(sampler, batches.batch_size, batches.drop_last)
        changes = {"sampler": sampler, "batch_sampler": batches}
    return _with(loader, _diffpipe_whole=loader, **changes)


def _with(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """Returns a copy of a loader with other parts, which no loader lets anybody set."""
    made = copy.copy(loader)
    vars(made).update(changes)
    return made


class StatefulAlignedLoader(AlignedLoader):
    """An `AlignedLoader` around a loader that can be resumed in the middle of a pass."""

    def state_dict(self) -> Any:
        """Returns the loader's state, as if nothing had been read ahead."""
        return self._loader.state_dict() if self._state_before is None else self._state_before

    def load_state_dict(self, state: Any) -> None:
        """Puts the loader to where it was."""
        self._loader.load_state_dict(state)
        self._restored = True


def aligned(loader: Any, *arguments: Any, **options: Any) -> AlignedLoader:
    """Wraps a loader; Lightning asks the type of the result whether it can be resumed."""
    made = StatefulAlignedLoader if _is_stateful(loader) else AlignedLoader
    return made(loader, *arguments, **options)


def unaligned(loader: Any) -> Any:
    """Returns the loader itself, where an earlier run has wrapped it: `trainer.train_dataloader` of that run."""
    inner = loader._loader if isinstance(loader, AlignedLoader) else loader
    return vars(inner).get("_diffpipe_whole", inner) if isinstance(inner, DataLoader) else inner


def take_over(trainer: Any) -> None:
    """Keeps a trainer from what it does to loaders of several processes.

    It writes its own loaders into the user's `CombinedLoader`s, where they would be in the next run, with the
    samplers and ranks of this one, and so gets copies. In training it gives each process a sampler that shuffles,
    whatever the user's one does; there `shared_out` does what is to be done.
    """
    connector = trainer._data_connector
    vars(connector).pop("_requires_distributed_sampler", None)
    if trainer.state.fn == TrainerFn.FITTING:
        connector._requires_distributed_sampler = _wants_none
        # Every loader is, by the place in the epoch that its loops tell.
        message = "You're resuming from a checkpoint that ended before the epoch ended"
        warnings.filterwarnings("ignore", message=message)
    loops = (
        trainer.fit_loop,
        trainer.fit_loop.epoch_loop.val_loop,
        trainer.validate_loop,
        trainer.test_loop,
        trainer.predict_loop,
    )
    for source in (loop._data_source for loop in loops):
        source.dataloader = partial(_copied, type(source).dataloader, source)


def _wants_none(loader: Any) -> bool:
    """Says that a loader needs no sampler of Lightning; has a name, as trainers are pickled."""
    return False


def _copied(ask: Callable[[Any], Any], source: Any) -> Any:
    """Returns a source's loader; a copy of one that Lightning writes into."""
    loader = ask(source)
    return copy.copy(loader) if isinstance(loader, CombinedLoader) else loader


def place_of(trainer: Any, length: int | None) -> tuple[int, int, int]:
    """Returns the epoch whose passes begin now; how often a loader had ended in it, and batches it had given since.

    Both are zero but in the epoch that a run goes on in, also where Lightning does not know yet that it does: the
    first batch of a loader without a length is read while the run is set up, by `estimated_stepping_batches` before
    the loops are restored, and always before a processed epoch counts as completed.
    """
    loop = trainer.fit_loop
    loops = (trainer._checkpoint_connector._loaded_checkpoint or {}).get("loops")
    if loops:
        state = loops["fit_loop"]
        epochs, batches = state["epoch_progress"], state["epoch_loop.batch_progress"]
    else:
        epochs = loop.epoch_progress.state_dict()
        batches = loop.epoch_loop.batch_progress.state_dict()
    epoch, done = epochs["current"]["processed"], 0
    if (loops or loop.epoch_loop.restarting) and epochs["current"]["started"] > epoch:
        done = batches["current"]["processed"]
        if batches["is_last_batch"] and done:
            epoch, done = epoch + 1, 0
    if done and length and getattr(loop._combined_loader, "_mode", "") == "max_size_cycle":
        return epoch, *divmod(done, length)
    return epoch, 0, done


def _is_stateful(loader: Any) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def checksum(batch: Any) -> int:
    """Returns a number that differs for batches that differ in any value; of objects, in type or size."""
    total = 0
    for leaf in pytree.tree_leaves(batch):
        value = bytes_of(leaf) if isinstance(leaf, Tensor) else plain_bytes(leaf)
        total = zlib.crc32(value, total)
    return total


def seed_workers(loader: Any) -> None:
    """Lets workers be seeded alike on all ranks of a pipeline, unless the user does so, and end with their rank."""
    if not isinstance(loader, DataLoader) or not loader.num_workers:
        return
    if not loader.worker_init_fn:
        # From the iterator's base seed, which was drawn for this pass and pipeline; set before Lightning would
        # seed workers by the global rank, which differs inside a pipeline.
        loader.worker_init_fn = partial(pl_worker_init_function, rank=0)
    context: Any = loader.multiprocessing_context or multiprocessing
    method = context.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    outlives = method == "forkserver" and not isinstance(loader.worker_init_fn, _EndsWithRank)
    if outlives and hasattr(os, "pidfd_open"):
        loader.worker_init_fn = _EndsWithRank(loader.worker_init_fn)


class _EndsWithRank:
    """A `worker_init_fn` after which a worker of a fork server ends when the process that reads from it does.

    torch looks at the parent, which is the server, and that lives for as long as any of its children.
    """

    def __init__(self, initialize: Callable[[int], None]) -> None:
        self._initialize, self._reader = initialize, os.getpid()

    def __call__(self, worker: int) -> None:
        threading.Thread(target=self._watch, daemon=True).start()
        self._initialize(worker)

    def _watch(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            end = select.poll()
            end.register(os.pidfd_open(self._reader))
            end.poll()
        os._exit(1)


class SeededTransfer:
    """Seeds the batch hooks that a user wrote, in training and in its validations.

    Args:
        trainer: Whose module and data module have the hooks.
        pipeline: Whose batches are transferred.
        until: Gives the owners their hooks back when it is closed.
    """

    def __init__(self, trainer: Any, pipeline: Pipeline, until: contextlib.ExitStack) -> None:
        self._trainer, self._pipeline = trainer, pipeline
        self._ahead = 0
        for owner in (trainer.lightning_module, getattr(trainer, "datamodule", None)):
            for name in _TRANSFER_HOOKS if owner is not None else ():
                if is_overridden(name, owner):
                    seeded = self._seeded(getattr(owner, name))
                    until.enter_context(patched(owner, **{name: seeded}))

    @contextlib.contextmanager
    def of_later_batch(self, ahead: int) -> Generator[None, None, None]:
        """Lets hooks draw the random numbers of a later batch inside; 1 is the next."""
        # While a batch is trained on it counts as ready, so the next one has the number as it stands.
        with patched(self, _ahead=ahead - 1):
            yield

    def _seeded(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(hook)
        def seeded(*args: Any, **kwargs: Any) -> Any:
            with isolated_random_numbers(self._seed()):
                return hook(*args, **kwargs)

        return seeded

    def _seed(self) -> int:
        """Returns the seed of the batch that is transferred now, from its number in training, or in the pass."""
        loop, pipeline = self._trainer.fit_loop.epoch_loop, self._pipeline
        stage, number = "transfer", loop.batch_progress.total.ready + self._ahead
        if self._trainer.state.stage != RunningStage.TRAINING:
            stage, number = "transfer of validation", loop.val_loop.batch_progress.current.ready
        return derived_seed(pipeline.seed, stage, pipeline.mesh.pipeline, number)
