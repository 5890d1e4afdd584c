"""Options of BubbleFilling; what it does is in tests/distributed/test_filling.py."""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.utilities import CombinedLoader

from lightning_diffpipe import DiffPipeStrategy
from lightning_diffpipe.callbacks import bubble_filling
from lightning_diffpipe.callbacks.bubble_filling import BubbleFilling
from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.training.loader import aligned


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "both"}, "mode='both' is unknown; use 'opportunistic', 'planned' or None"),
        (
            {"lookahead_batches": 0},
            "from 1 to 2, for which plans count memory; got 0.*filling=none",
        ),
        ({"lookahead_batches": 3}, "from 1 to 2.*got 3"),
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


class Numbers:
    """A loader that gives numbers and does not tell how many."""

    def __init__(self, first, count):
        self.first, self.count = first, count

    def __iter__(self):
        return iter(range(self.first, self.first + self.count))


def announced_and_came(iterables, mode, looks_ahead):
    """At each batch of a pass under Lightning's own fetcher: those that were announced, and that came."""
    loaders = {
        name: aligned(iterable, 7, 0, lambda _: (0, 0, 0), lambda number, value: None, looks_ahead)
        for name, iterable in iterables.items()
    }
    combined, fetcher = CombinedLoader(loaders, mode), _PrefetchDataFetcher()
    fetcher.setup(combined)
    iter(fetcher)
    loop = SimpleNamespace(_combined_loader=combined, _data_fetcher=fetcher)
    trainer = SimpleNamespace(fit_loop=loop, strategy=DiffPipeStrategy())
    trainer.strategy.lookahead_batches = looks_ahead
    announced, came = [], []
    for batch, _, _ in fetcher:
        came.append(batch)
        announced.append(bubble_filling._next_batches(trainer))
    return [(now, came[n + 1 :][: len(now)]) for n, now in enumerate(announced)]


@pytest.mark.parametrize("looks_ahead", [1, 2])
@pytest.mark.parametrize("mode", ["max_size_cycle", "min_size"])
@pytest.mark.parametrize("long", [Numbers(0, 8), list(range(8))])
def test_batches_that_are_announced_come(long, mode, looks_ahead):
    """History: where a short loader began anew beside one without a length, the batches after the next one were
    called the next ones, and the run ended, since a batch was not the one whose frozen layers had run."""
    steps = announced_and_came({"long": long, "short": [100, 101, 102]}, mode, looks_ahead)
    assert len(steps) == (8 if mode == "max_size_cycle" else 3)
    for announced, came in steps:
        assert announced == came
    assert [len(announced) for announced, _ in (steps[0], steps[-1])] == [looks_ahead, 0]
