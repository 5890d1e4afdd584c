"""Why there is no batch to plan with; that the first one is, is in tests/distributed/test_data.py."""

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset

from lightning_diffpipe.training.before_training import why_empty


class Stream(IterableDataset):
    """Samples without an index."""

    def __iter__(self):
        return iter(torch.arange(5.0))


@pytest.mark.parametrize("shuffle", [True, False])
def test_fewer_samples_than_a_batch_make_none_where_the_rest_is_dropped(shuffle):
    """History: a plan was made for ten samples, nothing was trained, and the run ended without an error."""
    loader = DataLoader(range(10), 16, shuffle=shuffle, drop_last=True)
    for loaders in (loader, [loader], CombinedLoader({"a": loader})):
        assert why_empty(loaders) == (
            "10 training samples make no batch of 16, and smaller ones are left out (drop_last=True); set the "
            "batch size (data.batch_size) to 10 or less"
        )
    assert (
        why_empty(DataLoader(Stream(), 2))
        == "the training data loader is empty: it yields no batch"
    )
