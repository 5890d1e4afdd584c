"""What becomes of one tiny model when its training step is cut: the facts of a row of the table.

The plain, untouched step is the reference. Its loss and gradients are compared with the sum over all
stages, emulated in one process with NaN for everything that should not be read: random cuts into two
and into three stages at the finest level, and into three stages with containers folded.
"""

import random
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_diffpipe.graph.cut import cut
from lightning_diffpipe.graph.probe import fold, probe
from tests.graph.emulate import (
    Gradients,
    emulate,
    relative_error,
    shared_parameters,
    take_gradients,
)

from .case import Batch, Case, DenoisingStep
from .double import in_double

SEED = 1234
FLOOR = 1e-4
"""Gradients below this share of the largest one are judged by it. Deep U-Nets have gradients that
vanish in exact arithmetic (biases before a group norm), and twenty layers of rounding in them."""


@dataclass(frozen=True)
class Outcome:
    """The facts about one model.

    Attributes:
        num_parameters: Of the tiny model.
        num_layers: Layers that the probe found at its finest level.
        num_frozen: How many of them are frozen.
        probed_on_values: The probe had to run real values, as control flow depends on them.
        num_shared: Trained parameters that two stages hold, at most over all cuts.
        samples_apart: The loss of a batch is the mean of the losses of its samples, so that
            microbatches change nothing; None if the batch has one sample.
        loss_error: Largest relative deviation of the loss.
        gradient_error: Largest deviation of a gradient relative to its largest entry.
        worst: Name of that parameter.
        idle_blocks: Blocks without gradients: little would be proved about them.
    """

    num_parameters: int
    num_layers: int
    num_frozen: int
    probed_on_values: bool
    num_shared: int
    samples_apart: bool | None
    loss_error: float
    gradient_error: float
    worst: str
    idle_blocks: tuple[str, ...]


def step(module: DenoisingStep, batch: Batch) -> Tensor:
    """The step as a probe wants it."""
    return module.training_step(batch, 0)


def plain_gradients(root: DenoisingStep, batch: Batch) -> tuple[Tensor, Gradients]:
    """Loss and gradients of the step as one process computes them."""
    torch.manual_seed(SEED)
    loss = step(root, batch)
    loss.backward()
    return loss.detach(), take_gradients(root)


def measure(case: Case) -> Outcome:
    """Probes, cuts, folds and compares one case in double precision."""
    with in_double():
        root, batch = case.build()
        apart = samples_apart(root, batch, case.num_samples)
        loss, expected = plain_gradients(root, batch)
        graph = probe(root, step, batch, seed=SEED)
        choose = random.Random(case.name)
        errors, loss_error, num_shared = [], 0.0, 0
        for num_stages in (2, 3):
            positions = sorted(choose.sample(range(1, len(graph.path)), num_stages - 1))
            splits = [(graph, positions)]
            if num_stages == 3:
                splits.append(fold(root, step, batch, graph, positions, seed=SEED))
            for split, where in splits:
                plan = cut(split, where)
                got_loss, got = emulate(root, split, plan, step, batch, SEED)
                errors.append(relative_error(expected, got, FLOOR))
                loss_error = max(loss_error, abs(got_loss - loss).item() / abs(loss).item())
                num_shared = max(num_shared, len(shared_parameters(split, plan)))
    worst = max(errors)
    return Outcome(
        num_parameters=sum(p.numel() for p in root.parameters()), num_layers=len(graph.layers),
        num_frozen=len(graph.frozen), probed_on_values=graph.mode.startswith("real"), num_shared=num_shared,
        samples_apart=apart, loss_error=loss_error, gradient_error=worst[0], worst=worst[1],
        idle_blocks=idle_blocks(root, expected),
    )  # fmt: skip


def samples_apart(root: DenoisingStep, batch: Batch, num_samples: int) -> bool | None:
    """Whether the mean over a batch equals the mean over its samples, run one by one."""
    if num_samples == 1:
        return None
    parts = [{k: v[i : i + 1] for k, v in batch.items()} for i in range(num_samples)]
    with torch.no_grad():
        together = sum(x.square().mean() for x in root.outputs(batch))
        apart = [sum(x.square().mean() for x in root.outputs(part)) for part in parts]
    return bool(torch.isclose(together, sum(apart) / num_samples, rtol=1e-9))


def idle_blocks(root: nn.Module, gradients: Gradients) -> tuple[str, ...]:
    """Entries of outermost module lists few of whose parameters have a gradient: after a closed
    gate, say. Lists that are idle as a whole are unused or locked."""
    lists = [name for name, module in root.named_modules() if isinstance(module, nn.ModuleList)]
    outermost = [n for n in lists if not any(n.startswith(other + ".") for other in lists)]
    scale = max(g.abs().max() for g in gradients.values())
    moved = {name for name, g in gradients.items() if g.numel() and g.abs().max() > 1e-9 * scale}
    idle = []
    for name in outermost:
        shares = {
            f"{name}.{entry}": share_in(moved, f"{name}.{entry}.", module)
            for entry, module in root.get_submodule(name).named_children()
            if any(p.requires_grad and p.numel() for p in module.parameters())
        }
        if any(shares.values()):
            idle += [entry for entry, share in shares.items() if share < 0.3]
    return tuple(idle)


def share_in(moved: set[str], prefix: str, module: nn.Module) -> float:
    """How many of the parameters of a module are in a set of qualified names."""
    names = [prefix + n for n, p in module.named_parameters() if p.requires_grad and p.numel()]
    return len(moved.intersection(names)) / len(names)
