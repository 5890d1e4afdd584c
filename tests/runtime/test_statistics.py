"""State that layers keep (running statistics) is that of one process, and the only copy that is used."""

import pytest
import torch
from torch import nn

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.graph.cut import cut
from lightning_diffpipe.graph.probe import probe
from lightning_diffpipe.planning.schedule import Placement
from lightning_diffpipe.runtime.ownership import require_one_home, warn_of_statistics

WIDTH = 6


class Normed(nn.Module):
    """A frozen encoder in training mode, one in evaluation mode, and a trained path with batch norm."""

    def __init__(self):
        super().__init__()
        norm = nn.BatchNorm1d
        self.counting = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.quiet = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm(WIDTH)).eval()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = norm(WIDTH)
        for encoder in (self.counting, self.quiet):
            encoder.requires_grad_(False)

    def forward(self, batch):
        with torch.no_grad():
            target, condition = self.counting(batch), self.quiet(batch)
        x = self.norm(torch.tanh(self.first(batch + condition)))
        return (self.last(x) - target).square().mean()


class Twice(Normed):
    def forward(self, batch):
        return self.norm(self.last(self.norm(self.first(batch)))).square().mean()


def step(module, batch):
    return module(batch)


def test_only_layers_that_keep_nothing_run_in_advance(caplog):
    graph = probe(Normed(), step, torch.randn(4, WIDTH), max_share=1 / 30)
    ahead = {graph.layers[i].name for i in graph.frozen}
    assert ahead == {"counting.0", "quiet.0", "quiet.1"}
    warn_of_statistics(graph, cut(graph, [2]), Placement.of_replicas([1, 1]))
    assert "counting.1: not trained" in caplog.text
    assert "quiet" not in caplog.text


def test_replicas_that_share_out_statistics_are_named(caplog):
    root = Normed()
    root.counting.eval()
    graph = probe(root, step, torch.randn(4, WIDTH), max_share=1 / 30)
    pieces = cut(graph, [1])
    warn_of_statistics(graph, pieces, Placement.of_replicas([2, 1]))
    assert not caplog.text
    warn_of_statistics(graph, pieces, Placement.of_replicas([1, 2]))
    assert "stage 1 keeps statistics (norm." in caplog.text
    assert "each of its 2 replicas" in caplog.text


class Reads(Normed):
    def forward(self, batch):
        x = self.norm(self.first(batch))
        return self.last(x * self.norm.running_var.sqrt()).square().mean()


@pytest.mark.parametrize(
    ("module_class", "layers", "message"),
    [
        # History: each stage had the statistics of its own calls.
        (Twice, ["first", "norm", "last", "norm"], r"'norm\..*' is changed .* stage 0 and used on stage 1"),
        (Reads, ["first", "norm", "last"], r"'norm\.running_var' is changed"),
    ],
)  # fmt: skip
def test_state_that_two_stages_would_change_or_read_is_refused(module_class, layers, message):
    graph = probe(module_class(), step, torch.randn(4, WIDTH), max_share=1 / 30)
    assert [layer.name for layer in graph.layers] == layers
    with pytest.raises(ConfigurationError, match=message):
        require_one_home(graph, cut(graph, [2]))
    require_one_home(graph, cut(graph, [1]))
    require_one_home(graph, cut(graph, []))
