"""Training of adapters goes on from a checkpoint, also on another number of stages."""

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from lightning_diffpipe.modules import Lora, Optimization, PipelineDiffusion
from tests.distributed.scenarios import check_parity, fit_module
from tests.distributed.tiny import TinyDiffusion
from tests.predictor import tiny_pipelines as tiny
from tests.ranks import run_in_turn, run_ranks
from tests.rows import row

pytestmark = pytest.mark.distributed


class Own(PipelineDiffusion):
    """Has a hook that does not call the one it replaces."""

    def on_save_checkpoint(self, checkpoint):
        checkpoint["own"] = True


def train(
    rank,
    world_size,
    model,
    folder,
    epochs,
    resumed,
    store_all,
    cls=PipelineDiffusion,
    averages=False,
):
    """Trains adapters of a tiny Flux on two batches in each epoch; saves after each."""
    module = cls.from_pretrained(
        model,
        lora=Lora(rank=2, store_all=store_all),
        call={"max_sequence_length": 8},
        caption_dropout=0.0,
        optimization=Optimization(lr=1e-2, warmup_steps=0, decay="constant"),
    )
    module.double()
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, 4, 3, 32, 32, generator=generator, dtype=torch.float64)
    batches = [{"image": each, "caption": ["a", "cat", "b 1", "x"]} for each in images]
    own = [EMAWeightAveraging(decay=0.5)] if averages else []
    fit_module(
        module, world_size, DataLoader(batches, batch_size=None), ckpt_path=resumed, max_epochs=epochs,
        enable_checkpointing=True, callbacks=[ModelCheckpoint(folder, "{epoch}", save_top_k=-1), *own],
    )  # fmt: skip
    return {n: p.detach() for n, p in module.named_parameters() if ".lora_" in n}


@pytest.mark.parametrize("store_all", [False, row(True)])
def test_they_go_on_from_a_checkpoint_on_other_stages(store_all, tmp_path):
    one, two, later = (tmp_path / name for name in ("one", "two", "later"))
    model = tmp_path / "model"
    tiny.build("flux", tmp_path / "parts").save_pretrained(model)
    straight = run_ranks(train, 1, 1, model, one, 2, None, store_all)[0]
    assert all(value.abs().max() > 1e-3 for n, value in straight.items() if ".lora_B." in n)
    runs = (
        (2, model, two, 1, None, store_all),
        (2, model, later, 2, one / "epoch=0.ckpt", store_all),
    )
    _, on_two = run_in_turn(train, 2, *runs)
    resumed = run_ranks(train, 1, 1, model, later, 2, two / "epoch=0.ckpt", store_all)
    for weights in (*on_two, *resumed):
        assert weights.keys() == straight.keys()
        torch.testing.assert_close(weights, straight, rtol=0, atol=1e-10)
    kept = [
        {n for n in torch.load(folder / "epoch=0.ckpt")["state_dict"] if ".lora_" not in n}
        for folder in (one, two)
    ]
    assert kept[0] == kept[1]
    assert any(n.endswith(".weight") for n in kept[0]) == store_all


@pytest.mark.parametrize("averages", [False, row(True)])
def test_they_go_on_with_averages_of_lightning_and_a_hook_of_ones_own(averages, tmp_path):
    """History: the strategy left weights out that averages have, and that only another hook says where they are."""
    model, folder = tmp_path / "model", tmp_path / "one"
    tiny.build("flux", tmp_path / "parts").save_pretrained(model)
    straight = run_ranks(train, 1, 1, model, folder, 2, None, False, Own, averages)[0]
    saved = torch.load(folder / "epoch=0.ckpt")
    assert saved["own"]
    assert ("diffpipe_base" in saved) != averages
    assert any(n.startswith("vae.") for n in saved["state_dict"]) == averages
    start = folder / "epoch=0.ckpt"
    resumed = run_ranks(train, 1, 1, model, tmp_path, 2, start, False, Own, averages)[0]
    torch.testing.assert_close(resumed, straight, rtol=0, atol=1e-10)


class Adapted(nn.Module):
    """A frozen linear layer under an adapter that can be turned off."""

    def __init__(self, base):
        super().__init__()
        self.base, self.is_on = base.requires_grad_(False), True
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x)) if self.is_on else self.base(x)


class Preferring(TinyDiffusion):
    """The same network without its adapters is the reference, as in preference optimization."""

    def __init__(self, reference_comes_first):
        super().__init__()
        self.requires_grad_(False)
        self.reference_comes_first = reference_comes_first
        for block in self.blocks:
            block.mix = Adapted(block.mix)

    def reference(self, *inputs):
        adapters = [module for module in self.modules() if isinstance(module, Adapted)]
        for adapter in adapters:
            adapter.is_on = False
        with torch.no_grad():
            out = super().denoise(*inputs)
        for adapter in adapters:
            adapter.is_on = True
        return out

    def denoise(self, *inputs):
        if self.reference_comes_first:
            reference = self.reference(*inputs)
            return super().denoise(*inputs) + 0.5 * reference
        return super().denoise(*inputs) + 0.5 * self.reference(*inputs)


@pytest.mark.parametrize(
    ("num_ranks", "first", "strategy"),
    [
        (2, False, {}),
        row(2, True, {}),
        row(3, False, {"filling": "none"}),
        row(3, True, {"encoding_ranks": 1}),
        row(2, False, {"num_stages": 4, "schedule": "v"}),
    ],
)
def test_a_reference_without_adapters_leaves_no_rank_old_ones(num_ranks, first, strategy):
    """History: ranks that ran the reference ahead kept copies of adapters that other stages train."""
    check_parity(
        num_ranks, module_class=Preferring, module={"reference_comes_first": first}, tolerance=1e-9,
        strategy={"num_stages": num_ranks, **strategy},
    )  # fmt: skip
