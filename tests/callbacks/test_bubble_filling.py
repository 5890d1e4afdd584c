"""Options of BubbleFilling; what it does is in tests/distributed/test_filling.py."""

import pytest
import torch

from lightning_diffpipe.callbacks import bubble_filling
from lightning_diffpipe.callbacks.bubble_filling import BubbleFilling
from lightning_diffpipe.errors import ConfigurationError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "both"}, "mode='both' is unknown; use 'opportunistic', 'planned' or None"),
        ({"batches_ahead": 0}, "from 1 to 2, for which plans count memory; got 0.*filling=none"),
        ({"batches_ahead": 3}, "from 1 to 2.*got 3"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        BubbleFilling(**options)


class Pinned(torch.Tensor):
    """Says that a GPU may fetch it by itself; where there is none, no memory can be pinned."""

    def is_pinned(self):
        return True


def test_copies_of_batches_stay_in_pinned_memory(monkeypatch):
    """History: copies of pinned batches were not pinned, and the host waited for each transfer."""
    asked = []

    def empty_like(tensor, pin_memory):
        asked.append(pin_memory)
        return torch.zeros(tensor.shape)

    monkeypatch.setattr(torch, "empty_like", empty_like)
    batch = torch.arange(3.0)
    for tensor in (batch, batch.as_subclass(Pinned)):
        copied = bubble_filling._copied(tensor)
        assert copied.tolist() == [0, 1, 2]
        assert copied.data_ptr() != batch.data_ptr()
    assert asked == [True]
