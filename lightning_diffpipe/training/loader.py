"""Data are loaded once per pipeline: one of its ranks runs loaders, their workers and the hooks of transfer.

    first rank    next: reads a batch ---------.   on its device: hooks of transfer ---.   ahead: the same,
    others        next: is there one? <--------'   the batch as hooks left it <--------'   for batches after it

Lightning's loops are the same on all ranks, and go through a `Feed`: to them it is their `CombinedLoader`. What
they get of it stands for a batch (`Fetched`), until they ask for it on the device. So hooks are called when and as
often as in one process, on one rank, and every rank gets whole batches: its `training_step` reads them all. While
frozen layers run ahead, the batches after the present one come early (`Feed.ahead`), by the same way. The batch
with which a plan is made is the first one, and is read but once.

The order is the user's. A sampler that uses the global generators, as that of `shuffle=True` does, gives the
same in all pipelines; those side by side share its order out.

While a trainer fits, every batch has a seed of its own, from the run's seed, the pipeline, the pass over the data
(the epoch, and how often a loader that is shorter than another one has started over in it) and its number in it. So
what is in it depends neither on the number of workers nor on whether the pass was started at its first batch: a run
that goes on in the middle of an epoch leaves out what has been trained on, as the loops of its checkpoint say.
Elsewhere numbers are sampled as in one process, and the state of the first rank's generators is everyone's.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.data import _set_sampler_epoch, sized_len
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.core.hooks import DataHooks
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    MapDataPipe,
)

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.graph import rng
from lightning_diffpipe.graph.rng import derived_seed, isolated_random_numbers
from lightning_diffpipe.training.patching import patched


class PipelineLoader:
    """A loader, read on one rank of a pipeline only; everything it does not do itself is the wrapped loader's.

    Args:
        loader: The user's, or a pipeline's share of it.
        length: Batches, as the rank that reads it counts them; None if it cannot.
        is_read: Whether this rank reads it.
        seed: Seed of the run; None to leave the generators as they are.
        pipeline: Whose share of the data it is.
        place: Given the loader's length (None if it has none), tells where a pass begins, also of a resumed run, as
            `place_of` does. None if every pass shall use the same numbers, as validation does.

    Attributes:
        length: As given.
        loading_s: Seconds spent so far in waiting for batches of the wrapped loader.
    """

    def __init__(
        self,
        loader: Any,
        length: int | None,
        is_read: bool = True,
        seed: int | None = None,
        pipeline: int = 0,
        place: Callable[[int | None], tuple[int, int, int]] | None = None,
    ) -> None:
        self._loader, self.length, self._is_read = loader, length, is_read
        self.loading_s = 0.0
        self._restored = False
        self._seed = seed
        self._pipeline = pipeline
        self._place = place
        self._ended = 0, 0
        self._numbered, self._source = None, loader
        if seed is None or not is_read:
            return
        batches = getattr(loader, "batch_sampler", None)
        samplers = getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)
        for sampler in {id(sampler): sampler for sampler in samplers}.values():
            if isinstance(sampler, DistributedSamplerWrapper):  # a share of an order of the user's
                order = sampler.dataset
                order._sampler = _SharedOrder(order._sampler, self._seed_of_order)
        self._numbered = _Numbered.of(loader)
        self._source = self._numbered.loader if self._numbered else loader

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError(f"{type(self._loader).__name__} has no length")
        return self.length

    def __getattr__(self, name: str) -> Any:
        # Lightning reads sampler, dataset and more: without the user's sampler, `set_epoch` would never arrive and
        # every epoch would have the same order.
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

    def batches_of_all(self) -> list[Any] | None:
        """Returns what a data set is asked for in batches that have every sample of a share; None of a stream.

        It is called on the rank that reads, and uses no random numbers of training.
        """
        if self._numbered is None:
            return None
        loader, batches = self._loader, self._loader.batch_sampler
        sampler = getattr(batches, "sampler", None) or loader.sampler
        makers = (getattr(each, "generator", None) for each in (loader, batches, sampler))
        states = [(maker, maker.get_state()) for maker in makers if maker is not None]
        try:
            with isolated_random_numbers(self._seed_of_order("every sample")):
                if type(batches) is not BatchSampler:
                    return list(loader._index_sampler)
                samples, number = list(sampler), batches.batch_size
        finally:
            for maker, state in states:
                maker.set_state(state)
        if batches.drop_last:  # training knows whole batches only
            samples += samples[: -len(samples) % number]
        return [samples[first : first + number] for first in range(0, len(samples), number)]

    def read(self, batches: Sequence[Any], name: str) -> Iterator[Any]:
        """Reads batches of `batches_of_all`, on any rank; passes of other names use other random numbers."""
        seeded = [(self._seed_of(name, number), each) for number, each in enumerate(batches)]
        kind = "sampler" if self._loader.batch_sampler is None else "batch_sampler"
        changes = {"dataset": _SeededSamples(self._loader.dataset), kind: seeded, "_iterator": None}
        with isolated_random_numbers(self._seed_of(name, -1)):
            read = iter(_with(self._loader, **changes, persistent_workers=False))
        for number in range(len(batches)):
            with isolated_random_numbers(self._seed_of(name, number)):
                batch = next(read)
            yield batch

    @property
    def is_stateful(self) -> bool:
        """Whether the loader knows its place in a pass."""
        return _is_stateful(self._loader)

    def restore(self, state: Any) -> None:
        """Restores the position of a stateful loader."""
        self._loader.load_state_dict(state)
        self._restored = True

    def __iter__(self) -> Iterator[Any]:
        if not self._is_read:
            return iter(())
        return iter(self._source) if self._seed is None else self._seeded_pass()

    def _seeded_pass(self) -> Iterator[Any]:
        yield from self._batches()
        if self._place is not None:
            # Counted where passes end: Lightning may begin one twice before it takes a batch.
            epoch, *_ = self._place(None)
            self._ended = epoch, self._times_ended(epoch) + 1

    def _batches(self) -> Iterator[Any]:
        """Yields the batches of a pass, without the first `done`, which an interrupted run was trained on."""
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
            # By its own state, and a sampler that it asks first samples as in a whole pass.
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
            if number >= done:
                yield batch

    def _name_of_pass(self) -> str:
        """Returns the epoch and, where a short loader starts over next to a longer one, how often it has in it."""
        if self._place is None:
            return "0"
        epoch, *_ = self._place(None)
        times = self._times_ended(epoch)
        return f"{epoch}.{times}" if times else f"{epoch}"

    def _times_ended(self, epoch: int) -> int:
        return self._ended[1] if epoch == self._ended[0] else 0

    def _seed_of(self, name: str, number: int) -> int:
        return derived_seed(self._seed or 0, "data", self._pipeline, name, number)

    def _seed_of_order(self, name: str | None = None, number: int = 0) -> int:
        """Returns the seed of an order of samples, the same in all pipelines."""
        return derived_seed(self._seed or 0, "order", name or self._name_of_pass(), number)


class Fetched:
    """A batch that a loop of Lightning's has fetched; it gets the batch when it asks for it on a device.

    It is no dataclass, as Lightning copies these where it converts tensors to another type.

    Attributes:
        place: Number of the batch, and of the loader that made it.
        batch: The batch of the loader, on the rank that reads; as hooks left it, once it was on a device.
        states: States of stateful loaders, as if nothing had been read after it.
    """

    def __init__(self, feed: Feed, place: tuple[int, int], batch: Any, states: list[Any]) -> None:
        self.feed, self.place, self.batch, self.states = feed, place, batch, states
        self.device: torch.device | None = None


class Feed(CombinedLoader):
    """Gives Lightning's loops, on all ranks of a pipeline, what one of them loads.

    All ranks must make the same calls, as loops in lock step do.
    """

    strategy: Any

    @classmethod
    def of(cls, loader: Any, mode: Any, strategy: Any) -> Feed:
        """Returns one of the user's loader or loaders, which are combined in a mode if they are not yet."""
        if not isinstance(loader, CombinedLoader):
            loader = CombinedLoader(loader, mode)
        kind, feed = type(loader), copy.copy(loader)  # Lightning writes into it
        if not isinstance(loader, Feed):
            feed.__class__ = cls if kind is CombinedLoader else type(cls.__name__, (cls, kind), {})
        feed.strategy, feed._is_started = strategy, False
        feed._forget()
        return feed

    def __deepcopy__(self, memo: dict[int, Any]) -> Feed:
        return self  # of a trainer that is copied while it goes through its data

    def _forget(self) -> None:
        vars(self).pop("_has_hooks", None)
        self._batches = deque[Fetched]()  # read, and not given yet
        self._num_fetched = self._num_read = 0
        self._has_given = self._is_over = False
        self._states: list[Any] | None = None

    @property
    def _trainer(self) -> Any:
        return self.strategy.lightning_module.trainer

    @property
    def _is_read(self) -> bool:
        return bool(self.strategy.mesh.local_rank == 0)

    @property
    def _trains(self) -> bool:
        return self._trainer.fit_loop._combined_loader is self

    def __iter__(self) -> Feed:
        self._num_fetched = 0
        # Lightning begins some twice.
        if self._is_started and not (self._has_given or self._is_over):
            return self
        self._forget()
        # Goes on where a run was interrupted: Lightning restores its loops after the first batch has been read.
        is_first = self._trains and not self._is_started
        if loops := _loops_to_resume(self._trainer) if is_first else None:
            epoch, *_ = place_of(self._trainer, None)
            for loader in self.flattened if epoch else ():
                _set_sampler_epoch(loader, epoch)
            self._load_state_dicts(loops["fit_loop"]["state_dict"].get("combined_loader", []))
        self._is_started = True
        super().__iter__()
        lengths = self.strategy.mesh.from_first(
            [sized_len(each._loader) for each in self.flattened]
        )
        for loader, length in zip(self.flattened, lengths, strict=True):
            loader.length = length
        return self

    def __next__(self) -> Any:
        if self._num_fetched == len(self._batches) and not self._read():
            raise StopIteration
        fetched = self._batches[self._num_fetched]
        self._num_fetched += 1
        return fetched, *fetched.place

    def _read(self) -> bool:
        """Reads a batch; returns whether there was one."""
        batch, place, indices = None, None, None
        if self._is_read and not self._is_over:
            with contextlib.suppress(StopIteration):
                batch, *place = super().__next__()
                # Those of which Lightning takes note for whoever writes predictions.
                sampler = getattr(self.flattened[place[1]], "batch_sampler", None)
                if isinstance(sampler, _IndexBatchSamplerWrapper):
                    indices = sampler.seen_batch_indices[place[0]]
        if not self._is_over:
            asked_s = time.perf_counter()
            place, indices = self.strategy.mesh.from_first((place, indices))
            if not self._is_read:
                self.flattened[0].loading_s += time.perf_counter() - asked_s
        if place is None:
            if not self._is_over and not self._num_read:
                self._stop_without_batches()
            self._is_over = True
            return False
        if indices is not None and not self._is_read:
            sampler = self.flattened[place[1]].batch_sampler
            seen = getattr(sampler, "seen_batch_indices", [])  # Lightning begins it with a pass
            sampler.seen_batch_indices = [*seen[: place[0]], indices]
        states = self._present_states()
        self._batches.append(Fetched(self, tuple(place), batch, states))
        self._num_read += 1
        return True

    def _stop_without_batches(self) -> None:
        """Ends training with a pass that has no batch after one that had some: all others would have none."""
        loop = self._trainer.fit_loop
        if self._trains and loop.epoch_loop.batch_progress.total.ready:
            self._trainer.should_stop = True
            rank_zero_warn(
                f"training stops in epoch {self._trainer.current_epoch}, for which its loader gave no batch. An "
                "iterator, such as a generator, can be gone through once; give what begins again each time: a "
                "list, a DataLoader, or a class with __iter__"
            )

    def give(self, fetched: Fetched, device: torch.device) -> Any:
        """Returns a batch on a device, through the hooks of transfer; batches must be asked for in their order."""
        self._bring(fetched, device)
        assert self._batches.popleft() is fetched, "a batch was left out"
        self._num_fetched -= 1
        self._has_given, self._states = True, fetched.states
        return fetched.batch

    def every_sample(self) -> list[Any] | None:
        """Returns, for all ranks of the pipeline, `PipelineLoader.batches_of_all`; a collective call."""
        is_alone = len(self.flattened) == 1 and self.iterables is self.flattened[0]
        batches = self.flattened[0].batches_of_all() if is_alone and self._is_read else None
        return self.strategy.mesh.from_first(batches)

    def read(self, batches: Sequence[Any], name: str, device: torch.device) -> Iterator[Any]:
        """Reads batches (`PipelineLoader.read`) for this rank only, through the hooks of transfer."""
        (loader,) = self.flattened
        for number, batch in enumerate(loader.read(batches, name)):
            drawing = isolated_random_numbers(loader._seed_of(f"transfer of {name}", number))
            with drawing, patched(self.strategy, transfers=True):
                moved = self._moved(Fetched(self, (number, 0), batch, []), device)
            yield moved

    def ahead(self, count: int, device: torch.device) -> list[Any]:
        """Returns so many batches after the present one, or all that are left, on a device as `give` will."""
        while len(self._batches) < count and self._read():
            pass
        later = list(self._batches)[:count]
        for fetched in later:
            self._bring(fetched, device)
        return [fetched.batch for fetched in later]

    def _bring(self, fetched: Fetched, device: torch.device) -> None:
        if fetched.device == device:
            return
        state, mesh = None, self.strategy.mesh
        seed, alone = self._seed_of(fetched), mesh.layout.ranks_per_pipeline == 1
        if self._is_read:
            drawing: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
            if seed is not None and self._has_hooks:
                drawing = isolated_random_numbers(seed)
            with drawing, patched(self.strategy, transfers=True):
                fetched.batch = self._moved(fetched, device)
            state = rng.capture(host=True) if seed is None and not alone else None
        fetched.batch, state = mesh.from_first((fetched.batch, state))
        if state is not None:  # what the first rank has sampled so far, as one process would
            rng.restore(state)
        fetched.device = device

    @functools.cached_property
    def _has_hooks(self) -> bool:
        """Whether code of the user's takes part in transfers; to set its random numbers aside takes a while."""
        owners = self.strategy.lightning_module, self._trainer.datamodule
        return any(
            is_overridden(hook, owner, DataHooks) for owner in owners for hook in _TRANSFER_HOOKS
        )

    def _moved(self, fetched: Fetched, device: torch.device) -> Any:
        module, batch, (_, loader) = self.strategy.lightning_module, fetched.batch, fetched.place
        if fetched.device is not None:  # hooks have changed it already, for the plan
            return module._call_batch_hook("transfer_batch_to_device", batch, device, loader)
        batch = self.strategy.precision_plugin.convert_input(batch)
        batch = module._on_before_batch_transfer(batch, dataloader_idx=loader)
        return self.strategy.batch_to_device(batch, device, dataloader_idx=loader)

    def _seed_of(self, fetched: Fetched) -> int | None:
        """Returns the seed of hooks of transfer, from the batch's number in training or in the pass."""
        if self.strategy.seed is None:
            return None
        loop, stage = self._trainer.fit_loop.epoch_loop, "transfer"
        number = loop.batch_progress.total.ready
        if not self._trains:
            stage, number = "transfer of validation", loop.val_loop.batch_progress.current.ready
        elif loops := _loops_to_resume(self._trainer):
            number = loops["fit_loop"]["epoch_loop.batch_progress"]["total"]["ready"]
        number += self._batches.index(fetched)
        return derived_seed(self.strategy.seed, stage, self.strategy.mesh.pipeline, number)

    def reset(self) -> None:
        """Ends workers, and forgets what was read."""
        super().reset()
        self._forget()

    def _present_states(self) -> list[Any]:
        if not self._is_read:
            return []
        return [loader.state_dict() for loader in self.flattened if loader.is_stateful]

    def _state_dicts(self) -> list[Any]:
        ended = self._is_over and not self._batches
        return self._present_states() if self._states is None or ended else self._states

    def _load_state_dicts(self, states: list[Any]) -> None:
        stateful = [loader for loader in self.flattened if loader.is_stateful]
        if states and len(stateful) != len(states):
            raise ConfigurationError(
                f"{len(stateful)} training loaders know their place, but the checkpoint has the places of "
                f"{len(states)}; give the loaders of the run that was saved"
            )
        for loader, state in zip(stateful if self._is_read else (), states, strict=False):
            loader.restore(state)


_TRANSFER_HOOKS = (
    "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer",
)  # fmt: skip
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
        """Sets which pass is iterated over next, and from which batch on."""
        self._pass = seed_of_batch, seed_of_order, first

    def __len__(self) -> int:
        return len(self._asked)

    def __iter__(self) -> Iterator[Any]:
        (seed_of_batch, seed_of_order, first), requests = self._pass, None
        for number in itertools.count():
            # Who asks has put its random numbers aside, and the samples get a seed of their own.
            rng.seed_all(seed_of_order(number), host=True)
            requests = iter(self._asked) if requests is None else requests
            request = next(requests, _END)
            if request is _END:
                return
            if number >= first:
                yield seed_of_batch(number), request


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
        seed, index = asked
        rng.seed_all(seed, host=True)
        return self._samples[index]

    def __getitems__(self, asked: tuple[int, Any]) -> Any:
        seed, indices = asked
        rng.seed_all(seed, host=True)
        read_many = getattr(self._samples, "__getitems__", None)
        return read_many(indices) if read_many else [self._samples[index] for index in indices]


class _SharedOrder:
    """A sampler that gives the same order in every pipeline; what else it does is the user's."""

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
        rank: The rank that asks.

    Returns:
        A copy; the loader itself if it is no map-style `DataLoader`, or is shared out already.
    """
    divides = num_replicas > 1 and trainer._accelerator_connector.use_distributed_sampler
    if not divides or not isinstance(loader, DataLoader):
        return loader
    batches = loader.batch_sampler
    # Those of Lightning, too, in predictions.
    samplers = getattr(batches, "sampler", None), loader.sampler
    is_divided = any(isinstance(sampler, DistributedSampler) for sampler in samplers)
    if is_divided or isinstance(loader.dataset, IterableDataset):
        return loader
    base = samplers[0] if type(batches) is BatchSampler else None
    share = partial(DistributedSamplerWrapper, num_replicas=num_replicas, rank=rank, shuffle=False)
    if batches is None:
        changes = {"sampler": share(loader.sampler)}
    elif base is None:
        changes = {"batch_sampler": share(batches)}
    else:
        sampler = share(base)
        batches = BatchSampler(sampler, batches.batch_size, batches.drop_last)
        changes = {"sampler": sampler, "batch_sampler": batches}
    return _with(loader, _diffpipe_whole=loader, **changes)


def _with(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """Returns a copy of a loader with other parts, which no loader lets anybody set."""
    changed = copy.copy(loader)
    vars(changed).update(changes)
    return changed


def unaligned(loader: Any) -> Any:
    """Returns the loader itself, where an earlier run has wrapped it: `trainer.train_dataloader` of that run."""
    inner = loader._loader if isinstance(loader, PipelineLoader) else loader
    return vars(inner).get("_diffpipe_whole", inner) if isinstance(inner, DataLoader) else inner


def take_over(trainer: Any, num_pipelines: int) -> None:
    """Keeps a trainer from what it does to loaders of several processes, and gives its loops a `Feed` each.

    It would write its own loaders into the user's `CombinedLoader`s, where they would be in the next run, with the
    samplers and ranks of this one. It would also give each process a sampler, which shuffles in training whatever
    the user's one does; `shared_out` does what is to be done. Predictions of several pipelines are its own
    business: those who write them ask its sampler for indices.
    """
    connector = trainer._data_connector
    vars(connector).pop("_requires_distributed_sampler", None)
    if trainer.state.fn != TrainerFn.PREDICTING or num_pipelines == 1:
        connector._requires_distributed_sampler = _wants_none
    # Every loader is, by the place in the epoch that its loops tell.
    message = "You're resuming from a checkpoint that ended before the epoch ended"
    warnings.filterwarnings("ignore", message=message)
    modes: dict[Any, Any] = {trainer.fit_loop: "max_size_cycle"}
    evaluating = trainer.validate_loop, trainer.test_loop, trainer.predict_loop
    modes |= dict.fromkeys((trainer.fit_loop.epoch_loop.val_loop, *evaluating), "sequential")
    for loop, mode in modes.items():
        source = loop._data_source
        source.dataloader = partial(_fed, type(source).dataloader, source, mode, trainer.strategy)


def _wants_none(loader: Any) -> bool:
    """Returns that a loader needs no sampler of Lightning; has a name, as trainers are pickled."""
    return False


def _fed(ask: Callable[[Any], Any], source: Any, mode: Any, strategy: Any) -> Feed:
    return Feed.of(ask(source), mode, strategy)


def _loops_to_resume(trainer: Any) -> Any:
    """Returns the states of the loops to go on with, as long as Lightning sets a run up; else None."""
    return (trainer._checkpoint_connector._loaded_checkpoint or {}).get("loops")


def place_of(trainer: Any, length: int | None) -> tuple[int, int, int]:
    """Returns the epoch whose passes begin now; how often a loader had ended in it, and batches it had given since.

    Both are zero but in the epoch that a run goes on in, also where Lightning does not know yet that it does: the
    first batch of a loader without a length is read while the run is set up, by `estimated_stepping_batches` before
    the loops are restored, and always before a processed epoch counts as completed.
    """
    loop = trainer.fit_loop
    if loops := _loops_to_resume(trainer):
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


@contextlib.contextmanager
def telling_place(trainer: Any, epoch: int) -> Iterator[None]:
    """Sets a trainer to the epoch and the step that a run goes on at: Lightning restores its loops later.

    A data set may ask for them when a pass begins, to order or leave out its samples.
    """
    loop = trainer.fit_loop
    automatic = loop.epoch_loop.automatic_optimization
    steps = automatic.optim_progress
    if loops := _loops_to_resume(trainer):
        steps = type(steps)()
        steps.load_state_dict(loops["fit_loop"]["epoch_loop.automatic_optimization.optim_progress"])
    epochs = patched(loop.epoch_progress.current, processed=epoch, completed=epoch)
    with epochs, patched(automatic, optim_progress=steps):
        yield


def _is_stateful(loader: Any) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
