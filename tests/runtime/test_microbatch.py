"""Microbatches: what is cut, what is kept, and what is refused."""

import pytest
import torch

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.runtime.microbatch import microbatch_sizes, num_samples, split


def test_sizes_are_even_and_complete():
    for samples in range(1, 40):
        for count in range(1, samples + 1):
            sizes = microbatch_sizes(samples, count)
            assert len(sizes) == count
            assert sum(sizes) == samples
            assert max(sizes) - min(sizes) <= 1


def test_a_batch_smaller_than_its_microbatches_is_refused():
    with pytest.raises(ConfigurationError, match="batch of 3 samples cannot be cut into 4"):
        microbatch_sizes(3, 4)


def test_tensors_and_lists_are_cut_and_containers_kept():
    batch = {
        "x": torch.arange(5),
        "text": list("abcde"),
        "pair": (torch.arange(10).view(5, 2), 7),
        "t": torch.tensor(3),
    }
    first, second = split(batch, [3, 2])
    assert first["text"] == ["a", "b", "c"]
    assert second["x"].tolist() == [3, 4]
    assert second["pair"][0].tolist() == [[6, 7], [8, 9]]
    assert second["pair"][1] == 7
    assert second["t"] is batch["t"]


def test_a_list_of_tensors_is_a_container():
    """DataLoader turns (x, y) samples into a list [x, y], which must not be cut in two."""
    x, y = split([torch.arange(4), torch.arange(4, 8)], [2, 2])[1]
    assert x.tolist() == [2, 3]
    assert y.tolist() == [6, 7]


def test_parts_of_different_lengths_are_refused_by_name():
    with pytest.raises(ConfigurationError, match=r"\['x'\]: 4, \['y'\]: 3"):
        num_samples({"x": torch.zeros(4), "y": torch.zeros(3)})


def test_a_batch_without_samples_is_refused():
    with pytest.raises(ConfigurationError, match="no tensor and no list"):
        num_samples({"a": 1})
