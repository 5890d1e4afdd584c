"""What models do that a naive split gets wrong: each is exact, or refused with a reason.

Whose code runs, and from which state generators go on.
"""

import gc
import logging
import random
import sys
import weakref
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_diffpipe
from lightning_diffpipe.errors import GraphError
from lightning_diffpipe.graph.probe import probe
from lightning_diffpipe.graph.side_effects import caller, is_of, is_users
from tests.graph.emulate import check_stages, emulate
from tests.graph.steps import Tower, rows, step

MADE = ContextVar("MADE")  # which no trial run restores


class Layer(nn.Module):
    """Not residual, so that a block output is all there is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * 1.1


class Plain(Tower):
    block = Layer


CASES: dict[str, type[Tower]] = {}


def case(kind: type[Tower]) -> type[Tower]:
    CASES[kind.__name__] = kind
    return kind


@case
class GlueWritesIntoOutputs(Plain):
    def training_step(self, x, i):
        for block in self.blocks:
            x = block(x)
            x += 1
        return x.pow(2).mean()


@case
class GlueWritesIntoViewsOfOutputs(Plain):
    def training_step(self, x, i):
        skips = []
        for block in self.blocks:
            x = block(x)
            skips.append(x)
            x = x + 0
            x[:, :3] *= 2
        y = self.blocks[-1](x)
        y[:, 1].add_(skips[0][:, 2])
        y.mul_(1.5)
        return (y - skips[2]).pow(2).mean()


class WritesIntoInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(F.relu_(x))


@case
class LayerWritesIntoItsInput(Plain):
    block = WritesIntoInput

    def training_step(self, x, i):
        return self.run(x.clone()).pow(2).mean()


@case
class InputReadAfterALayerWroteIntoIt(Plain):
    def __init__(self):
        super().__init__()
        self.writers = nn.ModuleList([WritesIntoInput() for _ in range(2)])

    def training_step(self, x, i):
        h = self.blocks[0](x)
        y = self.writers[0](h)
        y = self.writers[1](self.blocks[1](y + h))
        return (self.blocks[2](self.blocks[3](y)) + h).pow(2).mean()


@case
class ControlFlowOnTrainedValues(Plain):
    def training_step(self, x, i):
        x = self.blocks[0](x)
        first = 1 + int(x.sum() > 1e9)
        for block in self.blocks[first:]:
            x = block(x) if x.mean() < 100 else x
        return x.pow(2).mean()


@case
class ValuesReadThroughNumpy(Plain):
    def training_step(self, x, i):
        x = self.blocks[0](x)
        weight = float(x.detach().numpy().mean())
        for block in self.blocks[1:]:
            x = block(x)
        return (x * weight).pow(2).mean()


class KeepsAFeature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        self.bank = self.first(x)
        return self.second(self.bank)


@case
class FeaturesTakenFromAnAttribute(Plain):
    def __init__(self):
        super().__init__()
        self.keeper = KeepsAFeature()

    def training_step(self, x, i):
        return (self.run(self.keeper(x)) + self.keeper.bank).pow(2).mean()


class KeepsHiddenStates(Plain):
    """An alignment loss (REPA) reads what the third block gave, where the model has kept it."""

    def __init__(self, place):
        super().__init__()
        self.place, self.kept, self.project = place, {}, nn.Linear(16, 16)
        keep = {
            "attribute": lambda out: setattr(self, "hidden", out),
            "attribute of a block": lambda out: setattr(self.blocks[2], "hidden", out),
            "reshaped attribute": lambda out: setattr(self, "hidden", out.view(-1, 4, 4)),
            "dict": lambda out: self.kept.update(hidden=out),
        }[place]
        if place == "attribute of a block":  # inside its own forward
            self.blocks[2].linear.register_forward_hook(lambda module, args, out: keep(out))
        else:
            self.blocks[2].register_forward_hook(lambda module, args, out: keep(out))

    def training_step(self, x, i):
        out = self.run(x)
        found = [
            vars(self).get("hidden"),
            vars(self.blocks[2]).get("hidden"),
            self.kept.get("hidden"),
        ]
        hidden = next(it for it in found if it is not None).reshape(-1, 16)
        return out.pow(2).mean() + 0.5 * (self.project(hidden) - x).pow(2).mean()


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize(
    "place", ["attribute", "attribute of a block", "reshaped attribute", "dict"]
)
def test_hidden_states_kept_in_attributes_for_the_loss(place, steps_before, caplog):
    """History: what an earlier step had left there could not be copied, so that the whole model ran on values."""
    root = KeepsHiddenStates(place).double()
    for _ in range(steps_before):
        root.training_step(rows().double(), 0)
    graph = check_stages(root, rows().double(), mode="auto", max_share=1 / 4)
    assert not graph.needs_values
    assert "without values" not in caplog.text
    assert {"blocks.5.linear", "blocks.5"} & set(graph.layer_names)


@case
class SelfConditioning(Plain):
    def training_step(self, x, i):
        with torch.no_grad():
            estimate = self.run(x)
        return self.run(x + estimate).pow(2).mean()


@dataclass
class Result:
    a: Tensor
    n: int = 3


class ReturnsAnObject(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.u, self.v = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Result:
        return Result(torch.tanh(self.v(torch.tanh(self.u(x)))))


class ReturnsATree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.u, self.v = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.u(x)
        return {"h": h, "same": h, "n": 3, "none": None, "list": [self.v(h), x]}


@case
class TreesObjectsAndConstants(Plain):
    num_blocks = 4

    def __init__(self):
        super().__init__()
        self.object, self.tree = ReturnsAnObject(), ReturnsATree()

    def training_step(self, x, i):
        out = self.object(x)
        tree = self.tree(out.a * out.n)
        x = tree["h"] + tree["list"][0] * tree["n"] + tree["list"][1] + 2 * tree["same"]
        return self.run(x).pow(2).mean()


@case
class StopGradientAndTeacher(Plain):
    def __init__(self):
        super().__init__()
        self.teacher = nn.ModuleList([Layer() for _ in range(3)])

    def training_step(self, x, i):
        with torch.no_grad():
            target = x
            for block in self.teacher:
                target = block(target)
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 2:
                middle = x.detach()
        return F.mse_loss(x, target) + (middle * x).mean()


@case
class BatchNormAndInplaceRelu(Tower):
    block = lambda self: nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True))


@case
class AttentionAndRecurrence(Plain):
    num_blocks = 2

    def __init__(self):
        super().__init__()
        self.attention = nn.ModuleList(
            [nn.MultiheadAttention(16, 2, batch_first=True) for _ in range(3)]
        )
        self.recurrent = nn.GRU(16, 16, batch_first=True)

    def training_step(self, x, i):
        x = self.run(x)[None]
        for attend in self.attention:
            x = x + attend(x, x, x)[0]
        return self.recurrent(x)[0].pow(2).mean()


@case
class TransformerWithDropout(Tower):
    num_blocks = 0

    def __init__(self):
        super().__init__()
        self.transformer = nn.Transformer(16, 2, 2, 2, 32, batch_first=True)

    def training_step(self, x, i):
        return self.transformer(x[None], x[None]).pow(2).mean()


class CachesATable(nn.Module):
    table: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        if CachesATable.table is None:
            CachesATable.table = torch.arange(16.0).to(x.dtype).cos()
        return self.linear(x) * CachesATable.table


@case
class TableCachedOnTheClass(Tower):
    block = CachesATable


@case
class TransposedOutputs(Tower):
    class block(Layer):
        def forward(self, x):
            return self.linear(x.t() if x.shape[0] == 16 else x).t()

    def training_step(self, x, i):
        y = self.run(x)
        return (y * torch.randn_like(y)).pow(2).mean()


@case
class LoggedFrozenValue(Plain):
    """A VAE under no_grad, without requires_grad_(False)."""

    def __init__(self):
        super().__init__()
        self.encoder = Layer()

    def training_step(self, x, i):
        with torch.no_grad():
            latents = self.encoder(x)
        self.log("norm", latents.norm())
        return F.mse_loss(self.run(latents + torch.randn_like(latents)), latents)


LONGEST = (
    "AttentionAndRecurrence",
    "BatchNormAndInplaceRelu",
    "TransformerWithDropout",
    "TreesObjectsAndConstants",
)


def check_case(name, share, splits):
    torch.manual_seed(0)
    root = CASES[name]().double()
    root.log = lambda *args, **kwargs: None
    check_stages(root, rows().double(), max_share=share, splits=splits, mode="auto")


@pytest.fixture
def all_objects_in_sight():
    """A probe looks for tensors that a step has left in caches, among all objects of the process."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("all_objects_in_sight")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in LONGEST else ()) for name in CASES],
)
def test_stages_add_up(name):
    check_case(name, share=1 / 4, splits=(2,))


@pytest.mark.slow
@pytest.mark.usefixtures("all_objects_in_sight")
@pytest.mark.parametrize("name", CASES)
def test_stages_of_the_finest_layers_add_up(name):
    check_case(name, share=1 / 40, splits=(1, 2, 3))


@pytest.mark.slow
@pytest.mark.usefixtures("all_objects_in_sight")
def test_no_fake_tensor_stays_in_a_cache():
    CachesATable.table = None
    probe(CASES["TableCachedOnTheClass"](), step, rows(), mode="fake")
    assert type(CachesATable.table) in (type(None), Tensor)


def test_fake_tensors_of_layers_that_leak_die_with_the_run(monkeypatch):
    """History: the context of the error that tells of a leak held the module, so that all objects were searched."""
    survived = lambda: pytest.fail("fake tensors survived a run")
    monkeypatch.setattr(gc, "get_objects", survived)
    check_case("InputReadAfterALayerWroteIntoIt", share=1 / 40, splits=(2,))


def test_no_fake_tensor_stays_in_a_log_record(caplog):
    """History: a record held the error of a step that insists on its batch size, with all its tensors."""
    made = []
    MADE.set(made)

    class Insists(Plain):
        def training_step(self, x, i):
            MADE.get().append(weakref.ref(x))
            assert len(x) == 2, "two samples"
            return self.run(x).pow(2).mean()

    caplog.set_level(logging.INFO, "lightning_diffpipe")
    graph = probe(Insists(), step, rows(2), mode="fake")
    assert "does not run with one sample more: two samples" in caplog.text
    assert graph.layers[0].argument_rows is None
    assert made
    assert [ref() for ref in made] == [None] * len(made)


def test_autocast_is_bit_equal_on_two_stages():
    class Mixed(Plain):
        def training_step(self, x, i):
            with torch.autocast("cpu", torch.bfloat16):
                return self.run(x).float().pow(2).mean()

    root = Mixed()
    graph = probe(root, step, rows(), max_share=1 / 4)
    loss = step(root, rows())
    got, _ = emulate(root, graph, [3], step, rows(), 0)
    assert got == loss


def stepped_by_hand(loss):
    loss.backward()
    return loss


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda loss: None, "returned NoneType"),
        (lambda loss: loss.expand(3), "return a scalar"),
        (lambda loss: loss.detach(), "no parameter gets a gradient"),
        (stepped_by_hand, "automatic optimization"),
    ],
)
def test_losses_that_cannot_be_trained_are_refused(returned, message):
    class Odd(Plain):
        def training_step(self, x, i):
            return returned(self.run(x).mean())

    with pytest.raises(GraphError, match=message):
        probe(Odd(), step, rows())


def test_modules_that_nobody_registered_are_refused():
    class Hidden(Plain):
        hidden = [Layer()]  # noqa: RUF012

        def training_step(self, x, i):
            return self.run(self.hidden[0](x)).pow(2).mean()

    with pytest.raises(GraphError, match="make its owner a submodule"):
        probe(Hidden(), step, rows())


class Experts(nn.Module):
    """Sends each row to the expert that a router chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 2)
        self.experts = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: Tensor) -> Tensor:
        shares, chosen = self.router(x).softmax(-1).max(-1)
        out = x.clone()
        for number, expert in enumerate(self.experts):
            rows_of = (chosen == number).nonzero()[:, 0]
            if len(rows_of):
                out = out.index_add(0, rows_of, shares[rows_of, None] * expert(x[rows_of] + 0.1))
        return out


class KeepsLoads(nn.Module):
    """Notes in a buffer of its own how much passes between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()
        self.register_buffer("load", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        self.note(h.detach().abs().mean())
        return x + self.second(h)

    def note(self, load: Tensor) -> None:
        self.load.lerp_(load, 0.1)


class ReplacesLoads(KeepsLoads):
    def note(self, load: Tensor) -> None:
        self.load = self.load + load


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Experts, "blocks.0 calls layers on as many rows as values say, so that it is one layer"),
        (KeepsLoads, "blocks.0 changes the buffer 'blocks.0.load', so that it is one layer"),
        (ReplacesLoads, "blocks.0 changes the buffer 'load', so that it is one layer"),
    ],
)
def test_blocks_whose_layers_differ_from_batch_to_batch_or_keep_a_state_are_not_cut(
    kind, reason, caplog
):
    """History: experts were layers, and with a cut between them a batch that was routed otherwise ended the run."""
    torch.manual_seed(0)
    blocks = type("Blocks", (Tower,), {"block": kind, "num_blocks": 4})().double()
    graph = probe(blocks, step, rows(6).double(), max_share=1 / 30)
    assert graph.layer_names == tuple(f"blocks.{number}" for number in range(4))
    assert not graph.glue_writes
    assert reason in caplog.text
    for seed in range(3):  # other routes
        batch = torch.randn(6, 16, dtype=torch.float64, generator=torch.manual_seed(seed))
        expected = blocks.training_step(batch, 0)
        loss, _ = emulate(blocks, graph, (2,), step, batch, seed)
        assert float(loss) == pytest.approx(expected.item(), rel=1e-12)


PACKAGES = [
    str(Path(torch.__file__).parent / "nn" / "modules" / "module.py"),
    torch._functorch.eager_transforms.__file__,
    lightning.pytorch.trainer.trainer.__file__,
    sys.modules["lightning_utilities"].__file__,
    sys.modules["lightning_diffpipe.graph.probe"].__file__,
]
USERS = [
    "/home/me/lightning/train.py", "/home/me/torch/models/unet.py", "/home/me/lightning_diffpipe/graph/train.py",
    "/opt/conda/envs/lightning/lib/python3.11/site-packages/diffusers/models/attention.py",
    str(Path(torch.__file__).parent.parent / "torch_extras" / "unet.py"), "train.py", "<stdin>",
]  # fmt: skip


@pytest.mark.parametrize("path", PACKAGES)
def test_code_of_packages_is_not_the_users(path):
    assert not is_users(path)


@pytest.mark.parametrize("path", USERS)
def test_code_of_users_is_theirs_in_whatever_folder(path):
    """History: errors named no line of a project, or of an environment, that was called like a package."""
    assert is_users(path)
    assert not is_of(path, "lightning_diffpipe")


def test_errors_name_lines_of_a_project_called_like_a_package():
    names = {}
    code = compile("def call(caller):\n    return caller()\n", "/home/me/lightning/a.py", "exec")
    exec(code, names)
    assert names["call"](caller) == "/home/me/lightning/a.py:2"


def test_the_strategy_is_of_this_package():
    path = str(Path(lightning_diffpipe.__file__).parent / "training" / "strategy.py")
    assert is_of(path, "lightning_diffpipe")
    assert is_users(path)  # but no probe


class Draws(Tower):
    """Draws from a generator of a class that cannot be pickled."""

    def __init__(self):
        super().__init__()

        class Own(random.Random):
            pass

        self.own, self.idle = Own(1), Own(2)

    def training_step(self, batch, batch_idx):
        return self.run(batch + self.own.random()).pow(2).mean()


@pytest.mark.parametrize("mode", ["fake", "real"])
def test_generators_of_any_class_are_found(mode):
    """History: they were pickled to see whether they had moved; probes ended with "Can't pickle"."""
    assert probe(Draws(), step, rows(), max_share=1 / 4, mode=mode).generators == {"own"}
