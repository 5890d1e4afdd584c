"""All ranks of a pipeline load the same batches, whatever their own random state and workers do."""

import multiprocessing
import os
import random
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.utilities import CombinedLoader
from PIL import Image
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SubsetRandomSampler,
)

from lightning_diffpipe import DiffPipeStrategy
from lightning_diffpipe.training.before_training import _first_batches
from lightning_diffpipe.training.loader import AlignedLoader, checksum, seed_workers
from lightning_diffpipe.training.loader import aligned as wrapped


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


def ignore(number, value):
    pass


def aligned(loader, data_parallel_rank=0, clock=None, compare=ignore):
    return AlignedLoader(loader, 7, data_parallel_rank, clock or Clock(), compare)


def one_pass(seed, num_workers=0, data_parallel_rank=0, epoch=0, shuffle=True):
    """What a rank loads whose own random state is `seed`."""
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
    loader = DataLoader(Augmented(), 4, shuffle=shuffle, num_workers=num_workers)
    clock = Clock()
    clock.epoch = epoch
    return torch.cat(list(aligned(loader, data_parallel_rank, clock)))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_augmentation_and_order_do_not_depend_on_the_rank(num_workers):
    first, second = one_pass(1, num_workers), one_pass(2, num_workers)
    assert torch.equal(first, second)
    assert sorted(first[:, 0].tolist()) == list(range(8))
    assert len(first[:, 1:].unique()) == 24, "samples must differ in their augmentation"


@pytest.mark.parametrize("num_workers", [0, 2])
def test_augmentation_differs_between_pipelines_and_epochs(num_workers):
    base = one_pass(1, num_workers, shuffle=False)
    other_pipeline = one_pass(1, num_workers, data_parallel_rank=1, shuffle=False)
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


def test_shuffling_differs_per_epoch():
    assert not torch.equal(one_pass(1, epoch=0)[:, 0], one_pass(1, epoch=1)[:, 0])
    assert torch.equal(one_pass(1, epoch=1), one_pass(9, epoch=1)), "a resumed run goes on alike"


def test_the_sampler_is_reached_through_the_wrapper():
    sampler = DistributedSampler(Augmented(), 2, 0, shuffle=True)
    loader = aligned(DataLoader(Augmented(), 2, sampler=sampler))
    assert loader.sampler is sampler
    assert loader.batch_sampler.sampler is sampler
    loader.sampler.set_epoch(4)
    assert sampler.epoch == 4
    assert len(loader) == 2


def epoch_of_two(epoch, data_parallel_rank=0):
    """What a loader of two batches gives beside one of five, in one epoch: index and three random numbers."""
    clock = Clock()
    short = aligned(DataLoader(Augmented(), 4), data_parallel_rank, clock)
    long = aligned(list(range(5)), data_parallel_rank, clock)
    combined = CombinedLoader({"short": short, "long": long}, "max_size_cycle")
    iter(combined)  # Lightning begins a pass before it knows the epoch
    for clock.epoch in range(epoch + 1):
        batches = torch.stack([batch["short"] for batch, _, _ in combined])
    return batches


def test_a_short_loader_that_begins_anew_draws_other_random_numbers():
    """History: in every round of an epoch a few pictures beside many had the same crops and flips."""
    first, second = epoch_of_two(0), epoch_of_two(1)
    assert first.shape == (5, 4, 4)
    for column in (1, 2, 3):  # torch, random, numpy
        drawn = torch.cat([first, second])[..., column].flatten().tolist()
        assert len(set(drawn)) == 40
    assert torch.equal(first, epoch_of_two(0)), "ranks of a pipeline differ"


@pytest.mark.parametrize("looks_ahead", [0, 9])
def test_an_epoch_that_is_begun_twice_is_the_same_one(looks_ahead):
    clock = Clock()
    loader = wrapped(DataLoader(Augmented(), 2), 7, 0, clock, ignore, looks_ahead)
    next(iter(loader))
    first = torch.stack(list(loader))
    clock.epoch = 1
    list(loader)
    clock.epoch = 0
    assert torch.equal(first, torch.stack(list(loader)))


def test_validation_draws_the_same_numbers_in_every_pass():
    loader = AlignedLoader(DataLoader(Augmented(), 4), 7, 0, None, ignore)
    assert torch.equal(torch.cat(list(loader)), torch.cat(list(loader)))


class Rotating(SubsetRandomSampler):
    """A sampler of the user's own that is told the epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch


def one_pass_of_a_pipeline(pipeline, epoch, by_batches):
    """Indices that one of two pipelines loads, wrapped as Lightning wraps a user's sampler."""
    clock = Clock()
    clock.epoch = epoch
    sampler = Rotating(range(8))
    share = DistributedSamplerWrapper(sampler, num_replicas=2, rank=pipeline)
    how = {"batch_sampler": BatchSampler(share, 2, False)} if by_batches else {"sampler": share}
    torch.manual_seed(pipeline)
    loader = aligned(DataLoader(Augmented(), **how), pipeline, clock)
    share.set_epoch(epoch)
    assert sampler.epoch == epoch
    return torch.cat(list(loader))


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


@pytest.mark.parametrize("by_batches", [False, True])
def test_pipelines_share_one_order_of_a_sampler_of_the_user(by_batches):
    """History: each pipeline drew an order of its own, so samples were seen twice or never."""
    orders = []
    for epoch in (0, 1):
        first, second = (one_pass_of_a_pipeline(pipeline, epoch, by_batches) for pipeline in (0, 1))
        order = torch.stack([first[:, 0], second[:, 0]], 1).flatten().tolist()
        assert sorted(order) == list(range(8))
        assert not (first[:, 1] == second[:, 1]).any(), "same augmentation in both pipelines"
        orders.append(order)
    assert orders[0] != orders[1], "every epoch has the same order"


def test_a_data_set_without_length_stays_without():
    loader = aligned(DataLoader(Stream(), 2))
    with pytest.raises(TypeError):
        len(loader)
    assert [len(batch) for batch in loader] == [2, 2, 1]


def test_objects_are_compared_by_type_and_size():
    """History: their text may hold an address, so equal pictures were called different on every rank."""
    first, second, wider = (Image.new("L", (width, 2)) for width in (2, 2, 3))
    assert checksum([first, object]) == checksum([second, object])
    assert checksum([first]) != checksum([wider])


def test_large_arrays_are_compared_in_every_value():
    """History: the text of a large array leaves out its middle."""
    array = np.zeros(2000)
    other = array.copy()
    other[1000] = 1
    assert checksum({"x": array}) == checksum({"x": array.copy()}) != checksum({"x": other})


def test_only_a_stateful_loader_looks_stateful():
    class Stateful(DataLoader):
        def state_dict(self):
            return {"position": 3}

    assert not hasattr(aligned(DataLoader(Augmented())), "state_dict")
    assert aligned(Stateful(Augmented())).state_dict() == {"position": 3}


def test_workers_that_stay_can_be_ended_through_the_wrapper():
    """History: Lightning ends them after a run; the loader kept them, and its next pass failed: Queue is closed."""
    loader = DataLoader(Stream(), 2, num_workers=1, persistent_workers=True)
    combined = CombinedLoader(aligned(loader))
    first = [batch for batch, _, _ in combined]
    combined.reset()
    assert loader._iterator is None
    assert all(map(torch.equal, first, aligned(loader)))
    assert not hasattr(aligned([1]), "_iterator")


def test_any_iterable_can_be_a_loader():
    assert list(aligned([1, 2, 3])) == [1, 2, 3]


def test_a_loader_of_an_earlier_run_is_taken_apart():
    """History: `trainer.val_dataloaders` of one run, given to another, compared batches over ranks of the first."""
    compared = []
    inner = DataLoader(Augmented(), 4)
    earlier = aligned(inner, compare=lambda *found: compared.append(found))
    assert DiffPipeStrategy().process_dataloader(earlier) is inner
    assert next(_first_batches({"a": earlier}))["a"][:, 0].tolist() == [0, 1, 2, 3]
    assert not compared


def test_a_worker_init_function_of_the_user_is_kept():
    own = lambda worker: None
    loader = DataLoader(Augmented(), num_workers=1, worker_init_fn=own)
    aligned(loader)
    assert loader.worker_init_fn is own


def test_the_first_batches_are_compared():
    seen = []
    list(aligned(DataLoader(Augmented(), 1), compare=lambda *found: seen.append(found)))
    assert [number for number, _ in seen] == [0, 1]
    assert seen[0][1] != seen[1][1]


def test_checksums_see_every_value():
    batch = {"x": torch.arange(6).view(2, 3).t(), "name": ["a", "b"], "n": 3}
    for other in (
        {**batch, "name": ["a", "c"]},
        {**batch, "n": 4},
        {**batch, "x": batch["x"] + 1},
    ):
        assert checksum(other) != checksum(batch)
    assert checksum({**batch, "x": batch["x"].contiguous()}) == checksum(batch)


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


@pytest.mark.parametrize(
    ("looks_ahead", "expected"),
    [
        (0, [[], [], [], []]),
        (1, [[1], [2], [3], []]),
        (2, [[1, 2], [2, 3], [3], []]),
    ],
)
def test_looking_ahead_shows_the_batches_that_come_next(looks_ahead, expected):
    """History: a search for the learning rate, which asks for none of them, kept all its batches in memory."""
    loader = wrapped(Resumable(), 7, 0, Clock(), ignore, looks_ahead=looks_ahead)
    assert loader.ahead == []
    seen = [(int(batch), list(map(int, loader.ahead))) for batch in loader]
    assert seen == list(enumerate(expected))


def test_the_state_of_a_loader_is_that_without_looking_ahead():
    """History: one batch read ahead was lost at every resume in the middle of an epoch."""
    states = {}
    for looks_ahead in (0, 1, 2):
        loader = wrapped(Resumable(), 7, 0, Clock(), ignore, looks_ahead=looks_ahead)
        states[looks_ahead] = [(int(batch), loader.state_dict()) for batch in loader]
    assert states[0] == states[1] == states[2]
    assert isinstance(wrapped(Resumable(), 7, 0, Clock(), ignore), _Stateful)
    assert not isinstance(wrapped([1], 7, 0, Clock(), ignore), _Stateful)


class Processes(Dataset):
    """Gives the process that was asked."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return os.getpid()


def read_and_be_killed(answer):
    """Reads from a worker of a fork server, says which process that is, and gets SIGKILL."""
    loader = DataLoader(Processes(), num_workers=1, multiprocessing_context="forkserver")
    seed_workers(loader)
    answer.send(int(next(iter(loader))))
    os.kill(os.getpid(), 9)


@pytest.mark.skipif(
    not hasattr(os, "pidfd_open"), reason="asks the kernel for the end of a process"
)
def test_workers_of_a_fork_server_end_with_the_process_that_reads_from_them():
    """History: they stayed for ever, as their parent, which torch watches, is the server."""
    here, there = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("fork")
    reader = context.Process(target=read_and_be_killed, args=(there,))
    reader.start()
    there.close()
    worker, deadline_s = Path(f"/proc/{here.recv()}"), time.monotonic() + 10
    reader.join()
    assert reader.exitcode == -9
    while worker.exists() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not worker.exists()
