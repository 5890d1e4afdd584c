"""No gradient shares memory with another one, nor with a message on its way.

Microbatches of one sample, so that parameters are shaped like activations; parameters that are added to each
other, and as views. Messages are read when they are received, as late as a network may. The reference adds up
gradients of all microbatches itself, as autograd's own accumulation shares memory, too.
"""

import copy

import pytest
import torch
from torch import nn

from tests.runtime.loopback import Loopback
from tests.zoo import in_double

LENGTH, WIDTH = 6, 4
NUM_MICROBATCHES = 4


class Positions(nn.Module):
    """A block that adds its parameters to each other and to what comes in."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.rows, self.columns = (nn.Parameter(torch.randn(LENGTH, WIDTH)) for _ in range(2))
        self.learned, self.delta = (nn.Parameter(torch.randn(1, LENGTH, WIDTH)) for _ in range(2))
        self.bias, self.shift = (
            nn.Parameter(torch.randn(WIDTH)),
            nn.Parameter(torch.randn(2, 3, WIDTH)),
        )

    def forward(self, x):
        x = x + (self.rows[None] + self.columns[None])
        x = torch.tanh(self.linear(x + (self.learned + self.delta))) + self.bias
        return x.view(-1, 2, 3, WIDTH).add(self.shift[None]).view(-1, LENGTH, WIDTH)


class Reshapes(Positions):
    """Reads its input as a view only, and adds a view: both get views of one gradient."""

    def forward(self, x):
        return super().forward(x.view(-1, LENGTH * WIDTH).add(self.rows.view(1, -1)).view_as(x))


class Chain(nn.Module):
    def __init__(self, block, num_blocks=4):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(num_blocks))


def step(module, batch):
    x = batch
    for block in module.blocks:
        x = block(x)
    return x.pow(2).mean() + sum(block.bias.sum() for block in module.blocks)


def summed_gradients(module, batch):
    names, parameters = zip(*module.named_parameters(), strict=True)
    total = [torch.zeros_like(parameter) for parameter in parameters]
    for sample in batch.split(1):
        found = torch.autograd.grad(step(module, sample) / len(batch), parameters)
        total = [a + b for a, b in zip(total, found, strict=True)]
    return dict(zip(names, total, strict=True))


SCHEDULES = {
    "1f1b": {"num_stages": 3},
    "gpipe": {"num_stages": 3},
    "zero_bubble": {"num_stages": 3},
    "interleaved": {"num_stages": 4, "num_ranks": 2},
    "v": {"num_stages": 4, "num_ranks": 2},
    "zero_bubble_v": {"num_stages": 4, "num_ranks": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("block", [Positions, Reshapes])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_parameters_shaped_like_activations(schedule, block):
    """History: one gradient of two parameters, to which all microbatches but the first were added twice."""
    torch.manual_seed(0)
    with in_double():
        module = Chain(block).double()
        batch = torch.randn(NUM_MICROBATCHES, LENGTH, WIDTH)
        expected = summed_gradients(copy.deepcopy(module), batch)
        with Loopback(
            module, step, batch, num_microbatches=NUM_MICROBATCHES, schedule=schedule,
            leaves_late=True, **SCHEDULES[schedule],
        ) as pipeline:  # fmt: skip
            pipeline.run_step(batch, 0)
            got = pipeline.gradients()
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-10, atol=1e-12, msg=name)
