"""All stages of a pipeline in one process, one after the other, in exact arithmetic.

A wrong prediction cannot pass: dummies are NaN, and so is every parameter that the cut does not put on a
stage, while that stage runs.
"""

import contextlib
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_diffpipe.graph.cut import Cut, cut, uncut
from lightning_diffpipe.graph.interception import Interception
from lightning_diffpipe.graph.layer import LayerGraph, TensorKey
from lightning_diffpipe.graph.probe import Mode, fold, probe
from lightning_diffpipe.graph.step import loss_of
from lightning_diffpipe.graph.view import StageView
from tests.graph.steps import step as plain_step

SEED = 1234
Step = Callable[[Any, Any], Any]
Gradients = dict[str, Tensor]


@contextlib.contextmanager
def foreign_parameters_nan(root: nn.Module, resident: Collection[str]) -> Iterator[None]:
    saved = [(p, p.data) for n, p in root.named_parameters() if n not in resident]
    for parameter, data in saved:
        parameter.data = torch.full((), float("nan"), dtype=data.dtype).expand(data.shape)
    try:
        yield
    finally:
        for parameter, data in saved:
            parameter.data = data


def take_gradients(root: nn.Module) -> Gradients:
    found = {n: p.grad for n, p in root.named_parameters() if p.grad is not None}
    root.zero_grad(set_to_none=True)
    return found


def shared_parameters(graph: LayerGraph, plan: Cut) -> dict[str, tuple[int, ...]]:
    """Trained parameters that several stages read, with these stages."""
    holders = {n: tuple(s.index for s in plan.stages if n in s.parameters) for n in graph.trained}
    return {name: where for name, where in holders.items() if len(where) > 1}


@contextlib.contextmanager
def intercepted(root: nn.Module) -> Iterator[Interception]:
    interception = Interception(root).install()
    try:
        yield interception
    finally:
        interception.uninstall()


def emulate(
    root: nn.Module,
    graph: LayerGraph,
    plan: Cut | Sequence[int],
    step: Step,
    batch: Any,
    seed: int,
    halves: bool = False,
) -> tuple[Tensor, Gradients]:
    """Loss and gradients of one batch as the sum over all stages, run in turn; backwards perhaps in two halves."""
    plan = plan if isinstance(plan, Cut) else cut(graph, plan)
    call = lambda: step(root, batch)
    mail: dict[TensorKey, Tensor] = {}
    back: dict[TensorKey, Tensor] = {}
    total: Gradients = {}
    holders: dict[str, list[int]] = {}
    with intercepted(root) as interception:
        with foreign_parameters_nan(root, plan.frozen.parameters), torch.no_grad():
            view = StageView(root, graph, plan.frozen, interception)
            frozen = {k: t.detach() for k, t in view.forward(call, seed=seed).outputs.items()}
        runs = []
        for stage in plan.stages:
            view = StageView(root, graph, stage, interception)
            assert set(mail) == set(stage.received)
            with foreign_parameters_nan(root, stage.parameters):
                run = view.forward(call, seed=seed, received={**frozen, **mail})
            runs.append(run)
            mail = {k: t.detach() for k, t in run.outputs.items()}
            assert set(mail) == set(stage.sent)
        loss = runs[-1].loss
        for stage, run in zip(reversed(plan.stages), reversed(runs), strict=True):
            assert set(back) == set(stage.sent_gradients)
            with foreign_parameters_nan(root, stage.parameters):
                back = run.backward_input(back) if halves else run.backward(back)
                run.backward_weight()
            for name, gradient in take_gradients(root).items():
                holders.setdefault(name, []).append(stage.index)
                total[name] = total[name] + gradient if name in total else gradient
    seen = {name for name, stages in holders.items() if len(stages) > 1}
    assert seen <= shared_parameters(graph, plan).keys(), f"unpredicted: {sorted(seen)[:3]}"
    return loss.detach(), total


def reference(
    root: nn.Module, step: Step, batch: Any, seed: int, graph: LayerGraph | None = None
) -> tuple[Tensor, Gradients]:
    """Loss and gradients of the plain callable; with a graph: unsplit, but seeded as a pipeline is."""
    root.zero_grad(set_to_none=True)
    if graph is None:
        torch.manual_seed(seed)
        loss = loss_of(step(root, batch))
        loss.backward()
    else:
        with intercepted(root) as interception:
            view = StageView(root, graph, uncut(graph), interception)
            run = view.forward(lambda: step(root, batch), seed=seed)
            loss = run.loss
            run.backward()
    return loss.detach(), take_gradients(root)


def relative_error(expected: Gradients, got: Gradients, floor: float = 1e-6) -> tuple[float, str]:
    """Largest deviation relative to the largest entry of its gradient, and where.

    Gradients below `floor` times the largest of all are judged by that: some vanish in exact arithmetic
    (biases of attention keys, or before a norm), so that all of them is rounding.
    """
    scale = max(g.abs().max().item() for g in expected.values())
    worst, where = 0.0, ""
    for name, a in expected.items():
        b = got.get(name)
        if b is None:
            if a.abs().max() > 0:
                return float("inf"), f"{name} is missing"
            continue
        if not (a - b).isfinite().all():
            return float("inf"), f"{name} is not finite"
        error = (a - b).abs().max().item() / max(a.abs().max().item(), floor * scale)
        if error > worst:
            worst, where = error, name
    extra = [n for n in got.keys() - expected.keys() if got[n].count_nonzero()]
    return (float("inf"), f"{extra[0]} has a gradient") if extra else (worst, where)


def check_split(
    root: nn.Module,
    pieces: tuple[LayerGraph, Any],
    step: Step,
    batch: Any,
    seed: int,
    expected: tuple[Tensor, Gradients],
    halves: bool = False,
) -> None:
    """The sum over the stages of a cut graph has a loss and gradients that are expected."""
    loss, gradients = emulate(root, *pieces, step, batch, seed, halves)
    error, where = relative_error(expected[1], gradients)
    assert loss == expected[0], f"loss {loss} instead of {expected[0]}, cut at {pieces[1]}"
    assert error < 1e-12, f"{where} is off by {error:.1e}, cut at {pieces[1]}"


def randomise(root: nn.Module) -> None:
    """Moves parameters that start at zero, so that nothing is trivially right."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in root.parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=p.dtype)
            p.add_(noise * (0.05 if p.dim() == 1 else 0.02))


def check_stages(
    root: nn.Module,
    batch: Any,
    max_share: float = 1 / 24,
    splits: Sequence[int] = (1, 2, 3, 4),
    mode: Mode = "real",
) -> LayerGraph:
    """Compares the sum over stages with the unsplit step, for random cuts, unfolded and folded."""
    randomise(root)
    graph = probe(root, plain_step, batch, max_share=max_share, mode=mode)
    loss, expected = reference(root, plain_step, batch, SEED, graph if graph.seeded else None)
    choice = random.Random(0)
    for num_stages in splits:
        positions = sorted(choice.sample(range(1, len(graph.path)), num_stages - 1))
        folded = fold(root, plain_step, batch, graph, positions)
        for pieces in ((graph, positions), folded):
            got_loss, got = emulate(root, *pieces, plain_step, batch, SEED)
            error, where = relative_error(expected, got)
            assert got_loss == loss, f"loss {got_loss} instead of {loss}, cut at {positions}"
            assert error < 1e-10, f"{where} is off by {error:.1e}, cut at {positions}"
    return graph
