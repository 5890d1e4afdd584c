"""One batch to plan with, from whatever a user passes as training data."""

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from lightning_diffpipe.example_batch import _first_batches


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
