"""Modules that are built in `configure_model` take no memory until a rank places its layers of them."""

import contextlib
import functools

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_diffpipe.graph.placement import is_in_file, is_placeholder
from tests.distributed.scenarios import SEED, fit_module, weights_of
from tests.ranks import RankError, run_ranks
from tests.rows import row

WIDTH = 128  # so that matrices are in files

PLACES = {"plain": contextlib.nullcontext, "meta": lambda: torch.device("meta")}


class Block(nn.Module):
    """Has layers of torch, one of which is initialised by its parent, and a scale of its own."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.empty(WIDTH))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.orthogonal_(self.layer.weight)
        self.scale.data.normal_()  # past all counts

    def forward(self, x):
        x = x + self.attention(x, x, x)[0]
        return x + self.scale * self.layer(self.norm(x))


class Built(L.LightningModule):
    """Makes its layers in `configure_model`, a frozen one among them."""

    def __init__(self, place):
        super().__init__()
        self.place, self.frozen, self.initial, self.before = place, None, {}, {}

    def configure_model(self):
        if self.frozen is not None:
            return
        with PLACES[self.place]():
            self.frozen = nn.Linear(8, WIDTH).requires_grad_(False)
            self.encoder = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
            self.blocks = nn.Sequential(*(Block() for _ in range(4)))
            self.head = nn.Linear(WIDTH, 8)

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            hidden = self.encoder(self.frozen(batch))
        return self.head(self.blocks(hidden)).square().mean()

    def train_dataloader(self):
        self.initial = weights_of(self)  # asked for when there is no plan yet
        large = (p for p in self.parameters() if p.nbytes >= 2**16)
        self.before = {"in files": all(map(is_in_file, large))}
        generator = torch.Generator().manual_seed(5)
        samples = torch.randn(18, 3, 8, dtype=torch.float64, generator=generator)
        return DataLoader(samples, batch_size=6)

    def on_train_start(self):
        own = {n: p for n, p in self.named_parameters() if not is_placeholder(p)}
        assert not any(map(is_in_file, own.values()))
        assert own.keys() == set(
            filter(getattr(self.trainer.strategy, "is_resident", None), self.initial)
        )
        self.before["own"] = sum(p.nbytes for p in own.values())

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.before.setdefault("losses", []).append(float(outputs["loss"]))

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class Scaled(nn.Module):
    """Has no `reset_parameters`."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        return x @ self.scale


class WithoutReset(Built):
    """Has a layer that only a checkpoint can give values on the meta device."""

    def configure_model(self):
        super().configure_model()
        with PLACES[self.place]():
            self.blocks.append(Scaled())


def train(rank, module_class, place, world_size, seed, options):
    """Trains on a rank; each has another state of its generator if there is no `seed`."""
    torch.manual_seed(100 + rank if seed is None else seed)
    module = module_class(place)
    fit_module(module, world_size, None, precision="64-true", **options)
    return module.initial, weights_of(module), module.before


def on_ranks(world_size, place="plain", module_class=Built, seed=SEED, **options):
    arguments = module_class, place, world_size, seed, options
    return run_ranks(train, world_size, *arguments)


assert_same = functools.partial(torch.testing.assert_close, rtol=0, atol=0)


@pytest.mark.distributed
@pytest.mark.parametrize("place", ["plain", row("meta")])
def test_layers_of_configure_model_are_those_of_one_process(place):
    """History: on the meta device they ended both ranks with an error of torch."""
    [(initial, weights, alone)] = on_ranks(1, place)
    ranks = on_ranks(2, place)
    for first, last, seen in ranks:
        assert seen["in files"]
        assert seen["losses"] == pytest.approx(alone["losses"], rel=1e-10, abs=0)
        assert_same(first, initial)
        torch.testing.assert_close(last, weights, rtol=0, atol=1e-11)
    assert not torch.equal(initial["head.weight"], weights["head.weight"])
    assert torch.equal(initial["encoder.weight"], weights["encoder.weight"])
    assert all(seen["own"] < 0.8 * alone["own"] for *_, seen in ranks)


@pytest.mark.distributed
def test_numbers_are_those_of_lightning():
    torch.manual_seed(SEED)
    expected = Built("plain")
    fit_module(expected, 0, None, precision="64-true", max_steps=1)
    [(initial, *_)] = on_ranks(1, max_steps=1)
    assert_same(initial, expected.initial)


@pytest.mark.distributed
def test_ranks_without_a_seed_get_the_numbers_of_rank_0():
    (one, first, _), (other, second, seen) = on_ranks(2, seed=None, max_steps=1)
    assert seen["in files"]
    [(initial, weights, _)] = on_ranks(1, seed=100, max_steps=1)
    for drawn in (one, other):
        assert_same(drawn, initial)
    for last in (first, second):
        torch.testing.assert_close(last, weights, rtol=0, atol=1e-11)


@pytest.mark.distributed
def test_a_checkpoint_wins(tmp_path):
    path = tmp_path / "last.ckpt"
    torch.manual_seed(SEED)
    module = WithoutReset("plain")
    fit_module(module, 0, None, precision="64-true", max_steps=1).save_checkpoint(path)
    with pytest.raises(RankError, match=r"blocks.4.scale was made on the meta .* pass ckpt_path"):
        on_ranks(2, "meta", WithoutReset)
    for initial, _, seen in on_ranks(2, "meta", WithoutReset, ckpt_path=path, max_steps=2):
        assert seen["in files"]
        assert_same(initial, weights_of(module))
