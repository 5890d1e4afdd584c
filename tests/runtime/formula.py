"""PipeDream's formula in one process: w(t+1) = w(t) - lr grad f(w1(t-S+1), ..., wS(t)).

It knows nothing of pipelines: it stores the whole model after every step, puts the model of a batch together from
the versions that the formula names for every stage, and steps one optimizer. Draining starts the formula again.
"""

import copy
from typing import Any

import torch

from lightning_diffpipe.graph import rng
from lightning_diffpipe.graph.rng import derived_seed
from lightning_diffpipe.runtime.batch_layout import microbatch_sizes, num_samples, split
from tests.graph.steps import step

SEED = 5
DELAYS = {
    "pipedream": lambda stage, stages: stages - 1 - stage,
    "pipedream_vertical_sync": lambda stage, stages: stages - 1,
    "pipedream_2bw": lambda stage, stages: 1,
}
"""By how many batches the weights of a stage are old; written from the papers, not from the code."""


class Formula:
    """One process that trains by the formula."""

    def __init__(
        self,
        root: Any,
        stage_of: dict[str, int],
        delays: list[int],
        optimizer: Any,
        microbatches: int,
    ):
        self.root = copy.deepcopy(root)
        self.parameters = {n: p for n, p in self.root.named_parameters() if n in stage_of}
        self.stage_of, self.delays, self.microbatches = stage_of, delays, microbatches
        self.optimizer = optimizer(self.parameters.values())
        self.scheduler = Scheduler(self.optimizer)
        self.drain()

    def drain(self) -> None:
        self.versions = [self.copied()]

    def copied(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.parameters.items()}

    def load(self, version_of) -> None:
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(self.versions[version_of(self.stage_of[name])][name])

    def train(self, batch: torch.Tensor, index: int) -> float:
        t = len(self.versions) - 1
        self.load(lambda stage: max(t - self.delays[stage], 0))
        self.optimizer.zero_grad()
        loss = self.loss(batch, index)
        loss.backward()
        self.clip()
        self.load(lambda stage: t)
        self.optimizer.step()
        self.scheduler.step()
        self.versions.append(self.copied())
        return float(loss.detach())

    def loss(self, batch: Any, index: int) -> torch.Tensor:
        """The mean over its samples."""
        loss, sizes = torch.zeros(()), microbatch_sizes(num_samples(batch), self.microbatches)
        for number, part in enumerate(split(batch, sizes)):
            rng.seed_all(derived_seed(SEED, 0, index, number), host=True)
            loss = loss + step(self.root, part) * sizes[number] / sum(sizes)
        return loss

    def clip(self) -> None:
        """Changes gradients before a step."""


class Scheduler(torch.optim.lr_scheduler.StepLR):
    """Lowers the learning rate and raises the weight decay with every step."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        super().__init__(optimizer, step_size=1, gamma=0.8)

    def step(self) -> None:
        super().step()
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.05 * self.last_epoch


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)
