"""Pipelines that edit reference images, on several ranks: the numbers of one process."""

import tempfile
from pathlib import Path

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_diffpipe.data.captioned import collate
from lightning_diffpipe.modules import Lora, Optimization, PipelineDiffusion
from tests.distributed.scenarios import Settings, assert_equal_runs, fit, reference
from tests.ranks import run_ranks
from tests.rows import row
from tests.zoo.double import in_double
from tests.zoo.editing import CALLS, CAPTIONS, batch_of
from tests.zoo.pipelines import build
from tests.zoo.qwen_processor import small_references

pytestmark = pytest.mark.distributed


class Editing(PipelineDiffusion):
    """One of the tiny ones; all of its adapters do something."""

    def __init__(self, name, lora):
        with tempfile.TemporaryDirectory() as folder:
            pipeline = build(name, Path(folder))
        super().__init__(
            pipeline,
            caption_dropout=0.0,
            call=CALLS.get(name, {"max_sequence_length": 256}),
            lora=Lora(rank=2) if lora else None,
            optimization=Optimization(lr=1e-2, warmup_steps=1),
        )
        generator = torch.Generator().manual_seed(1)
        for parameter_name, parameter in self.named_parameters():
            if ".lora_" in parameter_name:
                parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)

    def setup(self, stage):
        with small_references(), in_double():
            super().setup(stage)

    def losses(self, batch, generator=None):
        with small_references(), in_double():
            return super().losses(batch, generator)


class Edits(L.LightningDataModule):
    """Three samples, whose captions have three lengths."""

    def __init__(self, name, batch_size=3):
        super().__init__()
        self.name = name

    def train_dataloader(self):
        batch = batch_of(self.name, dtype=torch.float64)
        references = batch.pop("references")
        samples = [
            {n: batch[n][i] for n in batch}
            | ({"references": [each[i] for each in references]} if references else {})
            for i in range(len(CAPTIONS))
        ]
        return DataLoader(samples, batch_size=3, collate_fn=collate)


@pytest.mark.parametrize(
    ("name", "lora", "world_size", "microbatches"),
    [
        ("QwenImageEditPlusPipeline", True, 2, 3),
        row("QwenImageEditPlusPipeline", False, 2, 3),
        row("QwenImageEditPlusPipeline", False, 2, 2),  # two samples in a microbatch
        row("QwenImageEditPlusPipeline", True, 1, 1),
        row("QwenImageEditPipeline", False, 2, 3),
        row("QwenImageEditPipeline", True, 2, 3),
        row("FluxKontextPipeline", False, 2, 3),
        row("FluxKontextPipeline", True, 2, 3),
        # History: microbatches whose captions had other lengths than the first one's ended the run.
        row("QwenImagePipeline", True, 2, 3),
    ],
)
def test_it_learns_what_one_process_learns(name, lora, world_size, microbatches):
    settings = Settings(
        module={"name": name, "lora": lora},
        data={"name": name, "batch_size": 3},
        module_class=Editing,
        data_class=Edits,
        trainer={"max_steps": 3, "max_epochs": -1},
    )
    expected = reference(settings, microbatches)
    settings.strategy = {"num_stages": world_size, "num_microbatches": microbatches}
    outcomes = run_ranks(fit, world_size, settings, world_size)
    assert_equal_runs(outcomes, expected)
    assert not lora or all(g.abs().max() > 0 for g in expected.gradients[0].values())
    assert all((".lora_" in name) == lora for name in expected.gradients[0])
    assert {n.partition(".")[0] for n in expected.gradients[0]} == {"transformer"}
