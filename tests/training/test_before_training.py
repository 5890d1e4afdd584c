"""One batch to plan with, from whatever a user passes as training data."""

import random
import threading
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.training.before_training import _first_batches, example_batch, why_empty
from lightning_diffpipe.training.loader import AlignedLoader


class Counted:
    """A data set that notes what was asked of it."""

    def __init__(self, size=7):
        self.size, self.asked = size, []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.asked.append(index)
        return torch.tensor(float(index)) if isinstance(index, int) else torch.zeros(len(index))


class Stream(IterableDataset):
    """Samples without an index."""

    def __iter__(self):
        return iter(torch.arange(5.0))


def first(loader):
    return next(_first_batches(loader), None)


def test_samples_come_from_the_data_set_in_its_own_order_without_workers():
    data = Counted()
    loader = DataLoader(data, 3, shuffle=True, num_workers=2)
    assert first(loader).tolist() == [0, 1, 2]
    assert data.asked == [0, 1, 2]


def test_a_data_set_smaller_than_a_batch():
    assert first(DataLoader(Counted(2), 4)).tolist() == [0, 1]
    assert first(DataLoader(Counted(0), 4, sampler=[])) is None


def test_a_batch_sampler():
    sampler = BatchSampler(SequentialSampler(range(7)), 4, drop_last=False)
    assert first(DataLoader(Counted(), batch_sampler=sampler)).tolist() == [0, 1, 2, 3]


class Pictures(Counted):
    """Pictures of two sizes, by turns; asked for with a number, or with number and size."""

    def __getitem__(self, index):
        index, size = index if isinstance(index, tuple) else (index, 1 + index % 2)
        return torch.full((size,), float(index))


class Buckets(Sampler):
    """Batches of one picture size, in an order of their own for each pass."""

    batch_size, drop_last = 2, True

    def __init__(self, data):
        self.data, self.passes = data, 0

    def __iter__(self):
        self.passes += 1
        batches = [[4, 2], [1, 3], [5, 1]]
        yield from random.sample(batches, 3)


def test_a_batch_sampler_that_sorts_into_buckets_says_what_goes_together():
    """History: the first samples of the data set made up the batch, pictures of unlike sizes among them."""
    data = Pictures()
    sampler = Buckets(data)
    batches = {
        tuple(first(DataLoader(data, batch_sampler=sampler))[:, 0].tolist()) for _ in range(30)
    }
    assert batches == {(4, 2), (1, 3), (5, 1)}
    assert sampler.passes == 0, "the user's own sampler has moved"


def test_a_list_of_batches_is_a_batch_sampler():
    """History: it has no batch_size, so that automatic batching was thought to be off: KeyError: 0."""
    assert first(DataLoader(Counted(), batch_sampler=[[0, 2], [1, 3]])).tolist() == [0, 2]
    assert first(DataLoader(Counted(), batch_sampler=[])) is None


class AtResolution(Sampler):
    """Asks for samples at a size."""

    def __iter__(self):
        yield from [(3, 4), (0, 4), (1, 2)]


def test_a_sampler_may_ask_for_more_than_numbers():
    """History: the data set was asked for 0, 1, ... whatever its sampler gives."""
    batch = first(DataLoader(Pictures(), 2, sampler=AtResolution()))
    assert batch.tolist() == [[3.0] * 4, [0.0] * 4]
    named = {"a": torch.ones(1), "b": torch.zeros(1)}
    assert first(DataLoader(named, 2, sampler=["b", "a"])).tolist() == [[0.0], [1.0]]


def test_samples_that_a_sampler_leaves_out_are_not_asked_for():
    data = Counted()
    loader = DataLoader(data, 3, sampler=SubsetRandomSampler([1, 3, 5, 6]))
    assert set(first(loader).tolist()) < {1, 3, 5, 6}
    assert set(data.asked) < {1, 3, 5, 6}


def test_a_generator_of_a_sampler_stays_where_it_is():
    generator = torch.Generator().manual_seed(5)
    before = generator.get_state()
    assert (
        len(first(DataLoader(Counted(), 3, sampler=SubsetRandomSampler(range(7), generator)))) == 3
    )
    assert torch.equal(generator.get_state(), before)


def test_samplers_that_cannot_be_copied():
    class Locked(Buckets):
        def __init__(self, data):
            super().__init__(data)
            self.lock = threading.Lock()

    assert len(first(DataLoader(Pictures(), batch_sampler=Locked(None)))) == 2
    used_up = ([index] for index in range(7))
    with pytest.raises(ConfigurationError, match=r"\(generator\) can be iterated over only once"):
        first(DataLoader(Counted(), batch_sampler=used_up))
    assert next(used_up) == [0]


def test_batches_of_indices_without_automatic_batching():
    """History: the data set was asked for one sample, and a batch was planned that no step would see."""
    sampler = BatchSampler(SequentialSampler(range(7)), 4, drop_last=False)
    assert first(DataLoader(Counted(), sampler=sampler, batch_size=None)).shape == (4,)


def test_a_data_set_that_gives_many_samples_at_once():
    class AtOnce(Counted):
        def __getitems__(self, indices):
            return [torch.tensor(-float(index)) for index in indices]

    assert first(DataLoader(AtOnce(), 3)).tolist() == [0, -1, -2]


@pytest.mark.parametrize("shuffle", [True, False])
def test_fewer_samples_than_a_batch_make_none_where_the_rest_is_dropped(shuffle):
    """History: a plan was made for ten samples, nothing was trained, and the run ended without an error."""
    loader = DataLoader(Counted(10), 16, shuffle=shuffle, drop_last=True)
    assert first(loader) is None
    assert first({"a": DataLoader(Counted(), 2), "b": loader}) is None
    for loaders in (loader, [loader], CombinedLoader({"a": loader})):
        assert why_empty(loaders) == (
            "10 training samples make no batch of 16, and smaller ones are left out (drop_last=True); set the "
            "batch size (data.batch_size) to 10 or less"
        )
    assert first(DataLoader(Counted(10), 10, shuffle=shuffle, drop_last=True)).shape == (10,)
    assert (
        why_empty(DataLoader(Stream(), 2))
        == "the training data loader is empty: it yields no batch"
    )


def test_more_samples_are_drawn_than_there_are():
    sampler = RandomSampler(range(3), replacement=True, num_samples=100)
    assert first(DataLoader(Counted(3), 8, sampler=sampler, drop_last=True)).shape == (8,)


def test_automatic_batching_switched_off():
    data = Counted()
    assert first(DataLoader(data, batch_size=None)).tolist() == 0
    assert data.asked == [0]


def test_an_iterable_data_set():
    assert first(DataLoader(Stream(), 2)).tolist() == [0, 1]


@pytest.mark.parametrize("combine", [lambda x: x, lambda x: CombinedLoader(x, "min_size")])
def test_several_loaders(combine):
    loaders = {"a": DataLoader(Counted(), 2), "b": [DataLoader(Counted(), 3)]}
    batch = first(combine(loaders))
    assert batch["a"].tolist() == [0, 1]
    assert batch["b"][0].tolist() == [0, 1, 2]


def test_any_iterable():
    assert first(iter([torch.ones(2)])).tolist() == [1, 1]


def test_a_list_of_batches_is_a_loader():
    """`Trainer.fit(module, [batch, batch])` trains on two batches."""
    assert first(CombinedLoader([DataLoader(Counted(), 2)]))[0].tolist() == [0, 1]


class Noisy(L.LightningModule):
    """Changes batches at random on their way to the device."""

    def training_step(self, batch, batch_idx):
        """Never run."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch + torch.rand(2)


def example_on_rank(rank, loader, sent):
    """The example batch of one rank; rank 0's is sent to all."""
    module, source = Noisy(), _DataLoaderSource(loader, "")
    strategy = SimpleNamespace(
        lightning_module=module,
        is_global_zero=rank == 0,
        broadcast=lambda batch: sent.append(batch) or sent[0],
        precision_plugin=Precision(),
        batch_to_device=module._apply_batch_transfer_handler,
    )
    trainer = SimpleNamespace(fit_loop=SimpleNamespace(_data_source=source))
    torch.manual_seed(rank)
    made, arguments = example_batch(trainer, strategy)
    assert arguments == (0,)
    return made


class GoesOn(IterableDataset):
    """A stream that is its own iterator, and so goes on where it was."""

    place = -1

    def __iter__(self):
        return self

    def __next__(self):
        self.place += 1
        if self.place == 6:
            raise StopIteration
        return torch.full((2,), float(self.place))


def test_looking_at_a_stream_leaves_it_where_it_was():
    """History: the batch that was looked at was not trained on; one process trains on all."""
    loader = DataLoader(GoesOn(), 2)
    example_on_rank(0, loader, [])
    assert [batch[0, 0].item() for batch in loader] == [0, 2, 4]


class HoldsIterator(IterableDataset):
    def __init__(self):
        self.rows = iter(range(6))

    def __iter__(self):
        return (torch.full((2,), float(row)) for row in self.rows)


def test_a_stream_that_holds_an_iterator_is_named():
    """A copy of the stream holds the same one."""
    with pytest.warns(UserWarning, match=r"HoldsIterator\.rows is an iterator, .* not trained on"):
        example_on_rank(0, DataLoader(HoldsIterator(), 2), [])


@pytest.mark.parametrize("combine", [lambda x: x, lambda x: CombinedLoader({"a": x})])
def test_data_that_can_be_read_only_once_are_refused(combine):
    """History: a generator was empty when training began, which ended without a step and without a word."""
    loader = combine(batch for batch in DataLoader(Counted(), 2))
    with pytest.raises(
        ConfigurationError, match=r"data \(generator\) can be iterated over only once"
    ):
        example_on_rank(0, loader, [])


class BeginsAnew(GoesOn):
    """As loaders of NVIDIA DALI do when they have ended."""

    def __next__(self):
        try:
            return super().__next__()
        except StopIteration:
            self.place = -1
            raise


def test_an_iterator_that_may_begin_anew_is_named():
    with pytest.warns(UserWarning, match=r"data \(BeginsAnew\) is an iterator, .* with each pass"):
        example_on_rank(0, BeginsAnew(), [])


def test_random_batch_hooks_give_all_ranks_the_same_batch():
    """History: each rank drew with its own seed, so that steps that read values were planned differently."""
    sent = []
    first, second = (example_on_rank(rank, DataLoader(Counted(), 2), sent) for rank in (0, 1))
    assert torch.equal(first, second)


class OwnGenerator(Counted):
    """Samples with noise from a generator of the set's own."""

    def __init__(self, size=7):
        super().__init__(size)
        self.generator = torch.Generator().manual_seed(3)

    def __getitem__(self, index):
        return index + torch.rand(2, generator=self.generator)


class CountsPasses(IterableDataset):
    """Gives other samples in each pass."""

    passes = 0

    def __iter__(self):
        self.passes += 1
        return iter(torch.arange(5.0) + 10 * self.passes)


class OwnLoader:
    """A loader that is no DataLoader, and shuffles with numbers of its own."""

    def __init__(self):
        self.random = random.Random(3)

    def __iter__(self):
        return iter(torch.tensor(self.random.sample(range(100), 2)) for _ in range(3))


class Drawn(IterableDataset):
    """Random samples."""

    def __iter__(self):
        return (torch.rand(2) for _ in range(5))


@pytest.mark.parametrize(
    "make_loader",
    [
        lambda: DataLoader(OwnGenerator(), 2),
        lambda: DataLoader(CountsPasses(), 2),
        OwnLoader,
        lambda: DataLoader(Stream(), 2, generator=torch.Generator().manual_seed(3)),
        lambda: DataLoader(Drawn(), 2, num_workers=2, persistent_workers=True),
    ],
)
def test_looking_at_a_batch_leaves_all_ranks_at_the_same_place(make_loader):
    """History: only rank 0 looked, so what data count or draw by themselves was one batch further there, and
    workers that stay were seeded on all ranks but this; the first step was refused."""
    sent, passes = [], []
    for rank in (0, 1):
        loader = make_loader()
        example_on_rank(rank, loader, sent)
        passes.append(
            list(AlignedLoader(loader, 7, 0, lambda _: (0, 0, 0), lambda number, value: None))
        )
        if isinstance(loader, DataLoader) and loader.generator:
            passes[-1].append(loader.generator.get_state())
    for one, other in zip(*passes, strict=True):
        assert torch.equal(one, other)
