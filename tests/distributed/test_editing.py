"""Pipelines that edit reference images, on several ranks: the numbers of one process."""

import json
import tempfile
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from lightning_diffpipe.callbacks import EncodingCache
from lightning_diffpipe.data import ImageFolderDataModule
from lightning_diffpipe.data.captioned import collate
from lightning_diffpipe.modules import Lora, Optimization, PipelineDiffusion
from tests.distributed.scenarios import (
    Recorder,
    Settings,
    assert_equal_runs,
    fit,
    quick_strategy,
    quiet_trainer,
    reference,
)
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


def write_edits(folder):
    """Eight images of two shapes, half of them made from one reference, half from two of other shapes."""
    lines = []
    for i in range(8):
        references = [(32, 32)] if i % 2 else [(32, 32), (64, 32)]
        names = [f"{i}_{number}.png" for number in range(len(references))]
        own = (32, 32) if i < 4 else (64, 32)
        for name, size in zip([f"{i}.png", *names], [own, *references], strict=True):
            pixels = np.random.default_rng(i).integers(
                0, 256, (size[1], size[0], 3), dtype=np.uint8
            )
            Image.fromarray(pixels).save(folder / name)
        lines.append({"file_name": f"{i}.png", "text": "cat " * i, "references": names})
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))


class Mixed(Editing):
    """Samples of several numbers of references; encodings depend on them alone."""

    def __init__(self):
        super().__init__("QwenImageEditPlusPipeline", True)


def trained_on_a_folder(rank, folder, cache=None, num_stages=1):
    torch.manual_seed(0)
    module, recorder = Mixed().double(), Recorder()
    data = ImageFolderDataModule(
        folder, references="references", resolution=32, bucket_step=32, buckets=True, enlarge=True,
        batch_size=2, num_workers=0, validation_share=0.0,
    )  # fmt: skip
    caches = [EncodingCache(cache, min_flops_per_byte=0.0)] if cache else []
    trainer = quiet_trainer(
        devices=num_stages, strategy=quick_strategy(num_stages=num_stages, num_microbatches=2),
        max_epochs=2, callbacks=[recorder, *caches],
    )  # fmt: skip
    with small_references():
        trainer.fit(module, datamodule=data)
    return recorder.losses, [cache.memo for cache in caches]


@pytest.mark.slow
@pytest.mark.table
def test_stored_encodings_of_references_change_nothing(tmp_path):
    """Buckets have one number of references each; the second pass shows none to the text encoder again."""
    write_edits(tmp_path)
    plain, _ = trained_on_a_folder(0, tmp_path)
    stored, (memo,) = trained_on_a_folder(0, tmp_path, tmp_path / "cache")
    assert stored == plain
    assert len(plain) == 8
    assert memo.made["text_encoder"] == 8
    assert memo.found["text_encoder"] == 8


@pytest.mark.table
def test_buckets_of_references_on_two_stages_are_those_of_one_process(tmp_path):
    """Four buckets: two shapes of images, from one or two references."""
    write_edits(tmp_path)
    expected, _ = trained_on_a_folder(0, tmp_path)
    for losses, _ in run_ranks(trained_on_a_folder, 2, tmp_path, None, 2):
        torch.testing.assert_close(losses, expected, rtol=1e-9, atol=0)
