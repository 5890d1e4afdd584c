"""What the host does in a step besides what plain Lightning does, in calls of functions."""

import sys

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_diffpipe import DiffPipeStrategy
from lightning_diffpipe.graph.trial import untouched
from tests.distributed.scenarios import quiet_trainer

STEPS, FIRST = 6, 3


class Counted(L.Callback):
    """Counts calls, of Python and of C, from the end of step `FIRST` to the end of the last one."""

    def __init__(self):
        self.calls = 0

    def note(self, frame, event, argument):
        self.calls += event in ("call", "c_call")

    def on_train_batch_end(self, trainer, *arguments):
        if trainer.global_step == FIRST:
            sys.setprofile(self.note)
        elif trainer.global_step == STEPS:
            sys.setprofile(None)


class Deep(L.LightningModule):
    """A frozen encoder, and so many trained layers."""

    def __init__(self, depth):
        super().__init__()
        self.encoder = nn.Linear(4, 4).requires_grad_(False)
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(depth)))

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            encoded = self.encoder(batch)
        loss = self.layers(encoded + torch.randn_like(encoded)).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def calls_of_a_step(depth, strategy, batch_size=2):
    counted = Counted()
    trainer = quiet_trainer(devices=1, max_steps=STEPS, strategy=strategy, callbacks=[counted])
    trainer.fit(Deep(depth), DataLoader(torch.randn(batch_size * STEPS, 4), batch_size))
    return counted.calls / (STEPS - FIRST)


def test_one_rank_calls_little_besides_what_plain_lightning_does():
    """For each layer with two parameters, and for a step."""
    more = {
        depth: calls_of_a_step(
            depth, DiffPipeStrategy(num_stages=1, num_microbatches=1, profile="flops")
        )
        - calls_of_a_step(depth, "auto")
        for depth in (8, 40)
    }
    for_each_layer = (more[40] - more[8]) / 32
    assert for_each_layer <= 3.1  # now and then a call is of another thread
    assert more[8] <= 1150


def test_a_microbatch_takes_few_calls():
    """The module's own are 125 of them. History: 698."""
    of_steps = {
        number: calls_of_a_step(
            8, DiffPipeStrategy(num_stages=1, num_microbatches=number, profile="flops"), 8
        )
        for number in (2, 4)
    }
    assert (of_steps[4] - of_steps[2]) / 2 <= 660


def test_a_trial_calls_nothing_for_each_value_that_it_may_have_to_put_back():
    """History: seven for each, as before each batch of a pipeline the step runs on stubs."""
    calls = {}
    for number in (0, 1000):
        kind = type("Many", (nn.Module,), {f"value_{i}": i for i in range(number)})
        root, counted = kind(), Counted()
        root.many = dict.fromkeys(range(number), "value")
        with untouched(root, ()):
            pass  # classes are found once
        sys.setprofile(counted.note)
        with untouched(root, ()):
            root.many.clear()
        sys.setprofile(None)
        assert len(root.many) == number
        calls[number] = counted.calls
    assert calls[1000] - calls[0] <= 20
