"""A hundred random plans run to their end, on real processes, with the gradients of one process.

Stages, cuts, replicas, pipelines side by side, microbatches, batch sizes, schedule and the time every layer
takes are drawn at random; layers sleep, so that ranks overtake each other in ever new ways. A plan that
hangs is named by the watchdog that ends it.
"""

import contextlib
import copy
import os
import random
import sys
import threading
import time
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_diffpipe.comm.mesh import Mesh, RankLayout
from lightning_diffpipe.graph.interception import Interception
from lightning_diffpipe.graph.placement import place_parameters
from lightning_diffpipe.graph.probe import probe
from lightning_diffpipe.graph.step import batch_signature
from lightning_diffpipe.planning.schedule import Placement, messages_of_edge
from lightning_diffpipe.planning.schedules import SCHEDULES
from lightning_diffpipe.runtime import partitioned
from lightning_diffpipe.runtime.batch_layout import BatchLayout
from lightning_diffpipe.runtime.engine import Engine
from lightning_diffpipe.runtime.partitioned import PartitionedStepCache, cut_for
from lightning_diffpipe.runtime.reduction import GradientReducer, holders_of
from tests.distributed.scenarios import assert_close
from tests.ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

NUM_PLANS = 100
WORLD_SIZE = 4
NUM_BLOCKS = 7
WIDTH = 4
LONGEST_S = 15.0
CPU = torch.device("cpu")


class Sleeper(nn.Module):
    """A residual block that takes as long as it is given."""

    sleep_s = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        time.sleep(self.sleep_s)
        return x + torch.tanh(self.linear(x))


class Plain(nn.Module):
    """A frozen encoder, a tower with a skip over all of it, and a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(Sleeper() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch):
        x = self.encoder(batch)
        first = x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = block(x)
        return (self.head(x + first) @ self.blocks[0].linear.weight).pow(2).mean()


def step(module, batch):
    return module.training_step(batch)


@dataclass(frozen=True)
class RandomPlan:
    """What is drawn for one run; the same on every rank."""

    index: int
    positions: tuple[int, ...]
    replicas: tuple[int, ...]
    num_pipelines: int
    num_microbatches: int
    batch_sizes: tuple[int, ...]
    schedule: str

    @property
    def world_size(self) -> int:
        return self.num_pipelines * sum(self.replicas)


def draw(index: int, num_layers: int) -> RandomPlan:
    choice = random.Random(index)
    num_stages = choice.randint(1, WORLD_SIZE)
    replicas = [1] * num_stages
    for _ in range(choice.randint(0, WORLD_SIZE - num_stages)):
        replicas[choice.randrange(num_stages)] += 1
    num_pipelines = choice.randint(1, WORLD_SIZE // sum(replicas))
    num_microbatches = choice.randint(1, 6)
    return RandomPlan(
        index,
        tuple(sorted(choice.sample(range(1, num_layers), num_stages - 1))),
        tuple(replicas),
        num_pipelines,
        num_microbatches,
        tuple(choice.randint(num_microbatches, 2 * num_microbatches) for _ in range(num_pipelines)),
        choice.choice(["1f1b", "gpipe", "1f1b_deep"]),
    )


@contextlib.contextmanager
def watchdog(plan: RandomPlan):
    """Ends the process if a plan does not end, and says which."""

    def end():
        print(f"does not end: {plan}", file=sys.stderr, flush=True)
        os._exit(9)

    timer = threading.Timer(LONGEST_S, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Runner:
    """One rank through all plans; layers are probed once for each size of a microbatch."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        torch.manual_seed(0)
        self.module = Plain().double()
        probed = torch.zeros(2, WIDTH, dtype=torch.float64)
        self.graph = probe(self.module, step, probed, max_share=1 / NUM_BLOCKS)
        self.known = {}

    def reprobe(self, root, step, batch, graph, any_sequence):
        key = batch_signature(batch)
        if key not in self.known:
            self.known[key] = probe(
                self.module, step, batch, max_share=1, layer_names=graph.layer_names
            )
        return self.known[key]

    def run(self, plan: RandomPlan) -> None:
        """Runs one step and compares; ranks that the plan leaves out only help to make groups."""
        placement = Placement.of_replicas(plan.replicas)
        schedule = SCHEDULES[plan.schedule](placement, plan.num_microbatches)
        layout = RankLayout(plan.world_size, placement)
        mesh = Mesh(layout, self.rank, CPU, "gloo", LONGEST_S)
        pieces = cut_for(self.graph, plan.positions, placement)
        holders = holders_of(pieces, mesh, self.graph.trained)
        mesh.connect(messages_of_edge(schedule))
        mesh.connect_reductions(holders.values())
        if self.rank < plan.world_size:
            with watchdog(plan):
                self._train(plan, schedule, mesh, pieces, holders)
        mesh.disconnect()

    def _train(self, plan, schedule, mesh, pieces, holders) -> None:
        root = copy.deepcopy(self.module)
        choice = random.Random(f"{plan.index}/{self.rank}")
        for block in root.blocks:
            block.sleep_s = choice.choice([0, 0, 1e-4, 1e-3])
        stages = [pieces.stages[s].parameters for s in mesh.layout.stages_of(self.rank)]
        resident = frozenset().union(pieces.frozen.parameters, *stages)
        interception = Interception(root).install()
        place_parameters(root, resident, CPU)
        parameters = dict(root.named_parameters())
        trained = {name: parameters[name] for name in resident & self.graph.trained}
        steps = PartitionedStepCache(
            root, step, self.graph, plan.positions, schedule.placement, mesh.local_rank,
            interception, CPU,
        )  # fmt: skip
        reducer = GradientReducer(mesh, trained, holders)
        runner = Engine(BatchLayout(root, step, schedule, steps, mesh, plan.index), reducer)
        batches = self._batches(plan)
        result = runner.run_step(batches[mesh.pipeline], batch_index=0)
        loss, expected = self._reference(batches)
        for name, parameter in trained.items():
            assert_close(parameter.grad, expected[name], 1e-10, f"{plan}: {name}")
        if plan.num_pipelines == 1:
            assert abs(float(result.loss) - loss) < 1e-12, plan
        interception.uninstall()

    def _batches(self, plan: RandomPlan) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(plan.index)
        return [
            torch.randn(size, WIDTH, generator=generator, dtype=torch.float64)
            for size in plan.batch_sizes
        ]

    def _reference(self, batches):
        self.module.zero_grad()
        loss = step(self.module, torch.cat(batches))
        loss.backward()
        gradients = {n: p.grad for n, p in self.module.named_parameters() if p.grad is not None}
        assert gradients.keys() == self.graph.trained
        return float(loss.detach()), gradients


def run_plans(rank: int) -> int:
    """History: the patch named a module that no longer probed, so that every plan probed again."""
    runner = Runner(rank)
    sizes = set()
    with mock.patch.object(partitioned, "reprobe", runner.reprobe):
        for index in range(NUM_PLANS):
            plan = draw(index, len(runner.graph.path))
            runner.run(plan)
            sizes.add((len(plan.replicas), plan.num_microbatches))
    assert runner.known, "no microbatch of another size, or the patch does nothing"
    dist.barrier()
    return len(sizes)


def test_random_plans():
    shapes = run_ranks(run_plans, WORLD_SIZE, timeout_s=280.0)
    assert shapes == [4 * 6] * WORLD_SIZE, "not all numbers of stages and microbatches were drawn"
