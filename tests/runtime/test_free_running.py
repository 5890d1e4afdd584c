"""PipeDream's loop against its formula: w(t+1) = w(t) - lr grad f(w1(t-S+1), ..., wS(t)), in double precision.

The oracle is one process that knows nothing of pipelines: it stores the whole model after every step, puts the
model together from the versions that the formula names for every stage, and steps one optimizer. Draining starts
the formula again.
"""

from dataclasses import replace

import pytest
import torch
import torch.utils.checkpoint

from lightning_diffpipe.planning.instruction import Encode, ExchangeFrozen, Staged
from lightning_diffpipe.planning.schedule import Schedule, check_laws
from lightning_diffpipe.planning.simulator import simulate
from tests.graph.steps import Block, Tower, step
from tests.planning.profiles import check_golden
from tests.runtime.formula import DELAYS, SEED, Formula, Scheduler, adam, momentum, sgd
from tests.runtime.loopback import Loopback
from tests.zoo import in_double


class Noisy(Tower):
    """A frozen encoder, noise that the step draws, and convolutions, of whose weights autograd keeps no view."""

    num_blocks = 4

    def __init__(self):
        super().__init__()
        self.encoder = Block().requires_grad_(False)
        convs = (torch.nn.Conv1d(1, 1, 3, padding=1) for _ in self.blocks)
        self.blocks = torch.nn.ModuleList(
            m for pair in zip(self.blocks, convs, strict=True) for m in pair
        )

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            z = self.encoder(batch) + 0.1 * torch.randn_like(batch)
        return (self.run(z[:, None]) - z[:, None]).pow(2).mean()


class Checkpointed(Noisy):
    """Recomputes its blocks in the backward, when the latest weights are others."""

    def run(self, x):
        x = x + 0 * self.blocks[0].linear.weight.sum()
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return x


def check(schedule, num_stages, microbatches, optimizer, module=Noisy, drains=(6,), num_batches=11):
    torch.manual_seed(1)
    with in_double():
        root = module().double()
        batches = [torch.randn(4, 16) for _ in range(num_batches)]
        pipeline = Loopback(
            root, step, batches[0], num_stages, microbatches, schedule=schedule, seed=SEED, max_share=1 / 30,
        )  # fmt: skip
        initial = {n: p.detach().clone() for n, p in root.named_parameters()}
        stages = enumerate(pipeline.pieces.stages)
        stage_of = {n: s for s, cut in stages for n in cut.parameters & pipeline.graph.trained}
        delays = [DELAYS[schedule](stage, num_stages) for stage in range(num_stages)]
        formula = Formula(root, stage_of, delays, optimizer, microbatches)
        schedulers = []
        for rank in pipeline.ranks:
            rank.engine.optimizers = [optimizer(rank.trained.values())]
            (own,) = rank.engine.optimizers
            schedulers.append(Scheduler(own))
        stored = [0] * num_stages
        for index, batch in enumerate(batches):
            expected, loss = formula.train(batch, index), pipeline.advance(batch, index)
            assert loss == pytest.approx(expected, rel=1e-10), f"batch {index}"
            for scheduler in schedulers:
                scheduler.step()
            counts = [1 + len(rank.engine.versions._stored) for rank in pipeline.ranks]
            stored = list(map(max, stored, counts))
            if index in drains or index == num_batches - 1:
                pipeline.drain()
                formula.drain()
                for name, value in pipeline.weights().items():
                    torch.testing.assert_close(
                        value, formula.parameters[name].detach(), rtol=1e-10, atol=1e-12
                    )
                    assert not torch.equal(value, initial[name]), f"{name} did not move"
        pipeline.close()
    return pipeline, stored


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [sgd, momentum, adam])
@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("schedule", DELAYS)
def test_weights_follow_the_formula(schedule, num_stages, optimizer):
    microbatches = {2: 1, 3: 2, 4: 4}[num_stages] if schedule == "pipedream_2bw" else 1
    pipeline, stored = check(schedule, num_stages, microbatches, optimizer)
    versions = [pipeline.spec.weight_versions(pipeline.placement, s) for s in range(num_stages)]
    assert stored == versions, "as many as the plan counts"


@pytest.mark.slow
@pytest.mark.parametrize("schedule", DELAYS)
def test_recomputed_layers_see_the_weights_they_went_forward_with(schedule):
    check(schedule, 3, 2 if schedule == "pipedream_2bw" else 1, momentum, Checkpointed)


def test_drained_after_every_batch_it_is_ordinary_training():
    check("pipedream", 3, 1, adam, drains=range(11))


def test_the_schedules_differ():
    """Parity tests pass for the wrong reason when versions never differ."""
    ends = []
    for schedule in ("pipedream", "pipedream_vertical_sync"):
        pipeline, _ = check(schedule, 3, 1, sgd, num_batches=6)
        ends.append(pipeline.weights())
    assert any(not torch.equal(ends[0][name], value) for name, value in ends[1].items())


def test_the_running_program_has_the_planned_timeline():
    """What four ranks run, batch by batch, is the golden image; with its messages it obeys all laws."""
    with in_double():
        torch.manual_seed(1)
        batches = [torch.randn(4, 16) for _ in range(8)]
        pipeline = Loopback(Noisy().double(), step, batches[0], 4, 1, schedule="pipedream")
        programs = [[] for _ in pipeline.ranks]
        for index, batch in enumerate(batches):
            for rank, ran in zip(pipeline.ranks, programs, strict=True):
                ran += rank.engine.begin(batch, index)[1]
        for rank, ran in zip(pipeline.ranks, programs, strict=True):
            ran += rank.engine.begin_drain()
        pipeline.close()
    frozen = (Encode, ExchangeFrozen)
    ran = [tuple(i for i in program if not isinstance(i, frozen)) for program in programs]
    running = Schedule(pipeline.placement, 8, tuple(ran))
    check_laws(running)
    computed = replace(
        running, programs=tuple(tuple(i for i in p if isinstance(i, Staged)) for p in ran)
    )
    check_golden("pipedream", f"{computed}\n\n{simulate(running)}", update=False)
