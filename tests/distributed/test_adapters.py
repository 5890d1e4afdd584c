"""Training of adapters goes on from a checkpoint on another number of stages."""

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_diffpipe.modules import Lora, Optimization, PipelineDiffusion
from tests.distributed.scenarios import quick_strategy, quiet_trainer
from tests.predictor import tiny_pipelines as tiny
from tests.ranks import run_in_turn, run_ranks

pytestmark = pytest.mark.distributed


def train(rank, world_size, folder, epochs, resumed):
    """Trains adapters of a tiny Flux on two batches in each epoch; saves after each."""
    module = PipelineDiffusion(
        tiny.build("flux", folder / f"parts{world_size}_{rank}"),
        lora=Lora(rank=2),
        call={"max_sequence_length": 8},
        caption_dropout=0.0,
        optimization=Optimization(lr=1e-2, warmup_steps=0, decay="constant"),
    )
    module.double()
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, 4, 3, 32, 32, generator=generator, dtype=torch.float64)
    batches = [{"image": each, "caption": ["a", "cat", "b 1", "x"]} for each in images]
    trainer = quiet_trainer(
        devices=world_size,
        strategy=quick_strategy(num_stages=world_size, num_microbatches=2),
        max_epochs=epochs,
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(folder, "{epoch}", save_top_k=-1)],
    )
    trainer.fit(module, DataLoader(batches, batch_size=None), ckpt_path=resumed)
    return {n: p.detach() for n, p in module.named_parameters() if ".lora_" in n}


def test_they_go_on_from_a_checkpoint_on_other_stages(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    straight = run_ranks(train, 1, 1, one, 2, None)[0]
    assert all(value.abs().max() > 1e-3 for n, value in straight.items() if ".lora_B." in n)
    later = tmp_path / "later"
    _, on_two = run_in_turn(train, 2, (2, two, 1, None), (2, later, 2, one / "epoch=0.ckpt"))
    for weights in (*on_two, *run_ranks(train, 1, 1, later, 2, two / "epoch=0.ckpt")):
        assert weights.keys() == straight.keys()
        for name, value in straight.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-10)
