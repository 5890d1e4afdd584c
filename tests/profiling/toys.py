"""Small modules to profile, and a clock that does not mind a busy machine."""

import functools
import random
import time

import lightning as L
import numpy as np
import torch
from torch import nn

from lightning_diffpipe.graph.probe import probe

WIDTH = 24


class CpuClock:
    """Time this thread has computed: what other processes do meanwhile does not count."""

    def stamp(self):
        return time.thread_time()

    def settle(self):
        pass

    def seconds(self, start, stop):
        return stop - start


class Block(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.inner = nn.Linear(width, 4 * width)
        self.outer = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.outer(self.inner(x).relu())


class Normalizes(nn.BatchNorm1d):
    """Needs two samples and keeps no statistics, without which it could not be frozen."""

    def __init__(self, width):
        super().__init__(width, track_running_stats=False)


class Encoder(nn.Module):
    """Frozen, with batch norm and dropout."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.norm = Normalizes(width)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.norm(self.inner(x)))


class Toy(L.LightningModule):
    """A frozen encoder, noise, blocks with a skip, a head; draws from every source of random numbers."""

    def __init__(self, num_blocks=4, width=WIDTH):
        super().__init__()
        self.encoder = Encoder(width).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, width)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(()))
        self.num_steps = 0

    def training_step(self, batch, batch_idx):
        self.num_steps += 1
        self.calls = self.calls + 1
        self.seen += len(batch["x"])
        x = self.encoder(batch["x"])
        x = x + torch.randn_like(x) * (1 + random.random() + float(np.random.rand()))
        first = x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = block(x)
        loss = (self.head(x + first) - batch["x"]).square().mean()
        self.log("loss", loss)
        return loss


def step(module, batch):
    return module.training_step(batch, 0)


def toy(num_samples=8, **kwargs):
    """A module, its step, a batch and its graph."""
    module = Toy(**kwargs).train()
    return module, step, batch_of(num_samples, module.head.in_features), _graph_of(**kwargs)


def batch_of(num_samples, width=WIDTH):
    captions = [str(i) for i in range(num_samples)]
    return {"x": torch.randn(num_samples, width), "caption": captions}


@functools.cache
def _graph_of(**kwargs):
    module = Toy(**kwargs).train()
    return probe(module, step, batch_of(2, module.head.in_features), max_share=0.1)
