"""Loaders that one rank of a pipeline reads: random numbers, orders and places, and what loops get of them."""

import queue
import random
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SubsetRandomSampler,
)

from lightning_diffpipe.comm.mesh import Mesh, RankLayout
from lightning_diffpipe.comm.packing import flat_bytes, pickled_value
from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.planning.schedule import Placement
from lightning_diffpipe.training.loader import Feed, PipelineLoader

CPU = torch.device("cpu")


class Augmented(Dataset):
    """Every sample is its index and three random numbers."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor([index, torch.rand(()).item(), random.random(), np.random.rand()])


class Stream(IterableDataset):
    """Five samples, of unknown number."""

    def __iter__(self):
        return (torch.rand(2) + index for index in range(5))


class Clock:
    """The place in a run that was not interrupted, as a trainer would tell it."""

    epoch = 0

    def __call__(self, length):
        return self.epoch, 0, 0


def aligned(loader, pipeline=0, clock=None, is_read=True):
    return PipelineLoader(loader, sized_len(loader), is_read, 7, pipeline, clock or Clock())


def one_pass(seed, num_workers=0, pipeline=0, epoch=0, shuffle=True):
    """What a rank loads whose own random state is `seed`."""
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
    loader = DataLoader(Augmented(), 4, shuffle=shuffle, num_workers=num_workers)
    clock = Clock()
    clock.epoch = epoch
    return torch.cat(list(aligned(loader, pipeline, clock)))


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_augmentation_differs_between_pipelines_and_epochs(num_workers):
    base = one_pass(1, num_workers, shuffle=False)
    other_pipeline = one_pass(1, num_workers, pipeline=1, shuffle=False)
    other_epoch = one_pass(1, num_workers, epoch=1, shuffle=False)
    for column in (1, 2, 3):  # torch, random, numpy
        assert not (base[:, column] == other_pipeline[:, column]).any()
        assert not (base[:, column] == other_epoch[:, column]).any()


def test_loading_leaves_the_random_state_of_the_rank_alone():
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    expected = torch.rand(()), random.random(), np.random.rand()
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    list(aligned(DataLoader(Augmented(), 4, shuffle=True)))
    assert (torch.rand(()), random.random(), np.random.rand()) == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_order_and_augmentation_are_those_of_the_epoch_whatever_the_rank_drew_before(num_workers):
    first, again = (one_pass(seed, num_workers, epoch=1) for seed in (1, 2))
    assert torch.equal(first, again), "also where a run is resumed"
    assert sorted(first[:, 0].tolist()) == list(range(8))
    assert len(first[:, 1:].unique()) == 24, "samples must differ in their augmentation"
    assert not torch.equal(first[:, 0], one_pass(1, num_workers)[:, 0])


def test_the_sampler_is_reached_through_the_wrapper():
    sampler = DistributedSampler(Augmented(), 2, 0, shuffle=True)
    loader = aligned(DataLoader(Augmented(), 2, sampler=sampler))
    assert loader.sampler is sampler
    assert loader.batch_sampler.sampler is sampler
    loader.sampler.set_epoch(4)
    assert sampler.epoch == 4
    assert len(loader) == 2


def epoch_of_two(epoch):
    """What a loader of two batches gives beside one of five, in one epoch: index and three random numbers."""
    clock = Clock()
    short = aligned(DataLoader(Augmented(), 4), 0, clock)
    long = aligned(list(range(5)), 0, clock)
    combined = CombinedLoader({"short": short, "long": long}, "max_size_cycle")
    iter(combined)  # Lightning begins a pass before it knows the epoch
    for clock.epoch in range(epoch + 1):
        batches = torch.stack([batch["short"] for batch, _, _ in combined])
    return batches


def test_a_short_loader_that_begins_anew_draws_other_random_numbers():
    """History: in every round of an epoch a few images beside many had the same crops and flips."""
    first, second = epoch_of_two(0), epoch_of_two(1)
    assert first.shape == (5, 4, 4)
    for column in (1, 2, 3):  # torch, random, numpy
        drawn = torch.cat([first, second])[..., column].flatten().tolist()
        assert len(set(drawn)) == 40
    assert torch.equal(first, epoch_of_two(0)), "ranks of a pipeline differ"


def test_an_epoch_that_is_begun_twice_is_the_same_one():
    clock = Clock()
    loader = aligned(DataLoader(Augmented(), 2), 0, clock)
    next(iter(loader))
    first = torch.stack(list(loader))
    clock.epoch = 1
    list(loader)
    clock.epoch = 0
    assert torch.equal(first, torch.stack(list(loader)))


def test_validation_draws_the_same_numbers_in_every_pass():
    loader = PipelineLoader(DataLoader(Augmented(), 4), 2, True, 7)
    assert torch.equal(torch.cat(list(loader)), torch.cat(list(loader)))


class Rotating(SubsetRandomSampler):
    """A sampler of the user's own that is told the epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch


def test_pipelines_share_one_order_when_a_short_loader_begins_anew():
    def rounds(pipeline):
        share = DistributedSamplerWrapper(Rotating(range(8)), num_replicas=2, rank=pipeline)
        loader = aligned(DataLoader(Augmented(), 2, sampler=share), pipeline)
        return [torch.cat(list(loader))[:, 0] for _ in range(2)]

    orders = []
    for first, second in zip(rounds(0), rounds(1), strict=True):
        orders.append(torch.stack([first, second], 1).flatten().tolist())
        assert sorted(orders[-1]) == list(range(8))
    assert orders[0] != orders[1]


def test_a_data_set_without_length_stays_without():
    loader = aligned(DataLoader(Stream(), 2))
    with pytest.raises(TypeError):
        len(loader)
    assert [len(batch) for batch in loader] == [2, 2, 1]


def test_workers_that_stay_can_be_ended_through_the_wrapper():
    """History: Lightning ends them after a run; the loader kept them, and its next pass failed: Queue is closed."""
    loader = DataLoader(Stream(), 2, num_workers=1, persistent_workers=True)
    combined = CombinedLoader(aligned(loader))
    first = [batch for batch, _, _ in combined]
    combined.reset()
    assert loader._iterator is None
    assert all(map(torch.equal, first, aligned(loader)))
    assert not hasattr(aligned([1]), "_iterator")


def test_a_worker_init_function_of_the_user_is_kept():
    own = lambda worker: None
    loader = DataLoader(Augmented(), num_workers=1, worker_init_fn=own)
    aligned(loader)
    assert loader.worker_init_fn is own


class Resumable:
    """A stateful loader: its state is the number of batches it has given."""

    given = 0

    def __iter__(self):
        while self.given < 4:
            self.given += 1
            yield torch.tensor([self.given - 1])

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]


def stands_for_strategy(seed=7):
    """What a feed asks of the strategy of one rank."""
    progress = SimpleNamespace(ready=0)
    loop = SimpleNamespace(batch_progress=SimpleNamespace(current=progress, total=progress))
    loop.val_loop = loop
    fit_loop = SimpleNamespace(epoch_loop=loop, _combined_loader=None)
    module = SimpleNamespace(
        trainer=SimpleNamespace(fit_loop=fit_loop, datamodule=None),
        _on_before_batch_transfer=lambda batch, dataloader_idx: batch,
    )
    return SimpleNamespace(
        mesh=Mesh(RankLayout(1, Placement(((0,),))), 0, CPU, "gloo", 1.0),
        lightning_module=module, precision_plugin=Precision(), seed=seed,
        batch_to_device=lambda batch, device, dataloader_idx: batch,
    )  # fmt: skip


def fed(loaders, mode="max_size_cycle", seed=7):
    """A feed as Lightning's loops make it ready."""
    feed = Feed.of(loaders, mode, stands_for_strategy(seed))
    feed.flattened = [
        PipelineLoader(one, sized_len(one), True, seed, 0, Clock()) for one in feed.flattened
    ]
    return feed


class Numbers:
    """A loader that gives numbers and does not tell how many."""

    def __init__(self, first, count):
        self.first, self.count = first, count

    def __iter__(self):
        return iter(range(self.first, self.first + self.count))


@pytest.mark.parametrize("looks_ahead", [0, 1, 2])
@pytest.mark.parametrize("mode", ["max_size_cycle", "min_size"])
@pytest.mark.parametrize("long", [Numbers(0, 8), list(range(8))])
def test_batches_that_are_shown_early_come(long, mode, looks_ahead):
    """History: where a short loader started again, the batches after the next one were called the next ones."""
    loaders = {"long": long, "short": [100, 101, 102]}
    combined = CombinedLoader(loaders, mode)
    expected = [batch for batch, _, _ in combined]
    feed, fetcher = fed(loaders, mode), _PrefetchDataFetcher()
    fetcher.setup(feed)
    iter(fetcher)
    came = []
    for fetched, *_ in fetcher:
        came.append(fetched.feed.give(fetched, CPU))
        later = expected[len(came) : len(came) + looks_ahead]
        assert feed.ahead(looks_ahead, CPU) == later
    assert came == expected
    assert len(came) == (8 if mode == "max_size_cycle" else 3)
    assert fetcher.done


def test_a_pass_that_is_begun_again_before_a_batch_is_given_goes_on():
    """So the batch that a plan is made with is the first one, also of a stream that goes on."""
    feed = fed(iter(range(3)))
    iter(feed)
    assert feed.ahead(1, CPU) == [0]
    assert [feed.give(fetched, CPU) for fetched, *_ in feed] == [0, 1, 2]
    assert list(feed) == []


@pytest.mark.parametrize("looks_ahead", [0, 1, 2])
def test_the_state_of_a_loader_is_that_of_the_batch_that_was_given(looks_ahead):
    """History: one batch read ahead was lost at every resume in the middle of an epoch."""
    feed, states = fed(Resumable()), []
    for number, (fetched, *_) in enumerate(feed, 1):
        feed.give(fetched, CPU)
        feed.ahead(looks_ahead, CPU)
        states += feed._state_dicts()
        assert states[-1] == {"given": number}
    assert len(states) == 4
    other = fed(Resumable())
    other._load_state_dicts(states[1:2])
    assert [other.give(fetched, CPU).item() for fetched, *_ in other] == [2, 3]
    with pytest.raises(ConfigurationError, match=r"1 training loaders know .* of 2"):
        other._load_state_dicts(states[:2])
    assert fed([1])._state_dicts() == []


class Hands:
    """Stands for the mesh of one of two ranks, each in a thread."""

    def __init__(self, local_rank, box):
        self.local_rank, self.pipeline, self._box = local_rank, 0, box
        self.layout = SimpleNamespace(ranks_per_pipeline=2)

    def from_first(self, value=None):
        if self.local_rank == 0:
            self._box.put(pickled_value(value, CPU))
            return value
        pickled, tensors = self._box.get(timeout=10)
        received = pickled.empty(CPU)
        for own, other in zip(tensors, received, strict=True):
            flat_bytes(other).copy_(flat_bytes(own))
        return pickled.put_together(received, CPU)


class Tensors:
    """Batches, of which nobody knows how many there are; on one rank."""

    def __init__(self, rank, count):
        self.rank, self.count = rank, count

    def __iter__(self):
        assert self.rank == 0, "a rank reads that shall not"
        return ({"x": torch.full((2, 3), float(n)), "name": str(n)} for n in range(self.count))


@pytest.mark.parametrize("looks_ahead", [0, 2])
def test_other_ranks_get_what_the_first_one_loads(looks_ahead):
    """With Lightning's fetcher, which fetches a batch ahead of a loader without length, through two passes."""
    box, hooks = queue.SimpleQueue(), []

    def run(rank):
        strategy = stands_for_strategy()
        strategy.mesh = Hands(rank, box)
        module = strategy.lightning_module
        module._on_before_batch_transfer = lambda batch, dataloader_idx: hooks.append(rank) or batch
        loaders = {"long": Tensors(rank, 5), "short": Tensors(rank, 2)}
        feed = Feed.of(loaders, "max_size_cycle", strategy)
        feed.flattened = [
            PipelineLoader(one, None, rank == 0, 7, 0, Clock()) for one in feed.flattened
        ]
        fetcher, seen = _PrefetchDataFetcher(), []
        fetcher.setup(feed)
        for _ in range(2):
            for fetched, *place in fetcher:
                batch = fetched.feed.give(fetched, CPU)
                seen.append((batch, place, fetcher.done, feed.ahead(looks_ahead, CPU)))
        return seen

    with ThreadPoolExecutor(2) as ranks:
        first, second = ranks.map(run, range(2))
    assert box.empty()
    assert len(first) == len(second) == 10
    assert repr(first) == repr(second)
    assert [done for *_, done, _ in first] == ([False] * 4 + [True]) * 2
    assert hooks == [0] * 10
