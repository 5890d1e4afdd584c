"""Batches of several shapes out of folders and shards: the numbers of one process, also resumed in an epoch."""

import csv
import re

import diffusers
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file

from lightning_diffpipe.data import ImageFolderDataModule, WebDatasetDataModule
from lightning_diffpipe.graph import rng
from lightning_diffpipe.graph.rng import derived_seed
from tests.command import run, run_on_forks
from tests.data.folders import shards_of, write_clips, write_ratios
from tests.distributed.scenarios import (
    SEED,
    Recorder,
    Settings,
    assert_equal_runs,
    build,
    check_parity,
    fit,
    fit_module,
    make,
    outcome,
    weights_of,
)
from tests.distributed.tiny import TinyPipeline
from tests.ranks import run_ranks
from tests.rows import row
from tests.zoo import pipelines

pytestmark = pytest.mark.distributed

OPTIONS = {"validation_share": 0.0, "num_workers": 0, "resolution": 32, "bucket_step": 8}


class InOrder(ImageFolderDataModule):
    """Batches in the order of the files, which plain Lightning has, too; the shortest clips first."""

    def batches(self, shuffle):
        batches = super().batches(shuffle)
        batches.shuffle = False
        batches.buckets = list(self.train_buckets.values())
        return batches


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        *(row("flux", None), row("sdxl", None)),
        *(row("wan", lengths) for lengths in [(5, 9), (9, 5), (1, 5), (13, 5, 9)]),
    ],
)
def test_buckets_teach_what_they_do_in_one_process(name, lengths, tmp_path):
    """Images of three ratios, or clips of several lengths. SDXL is told sizes and crops of each image."""
    options = {
        **OPTIONS, "folder": tmp_path, "buckets": True, "batch_size": 3, "last_batch": "smaller",
    }  # fmt: skip
    if lengths is None:
        write_ratios(tmp_path, 7, 3)
    else:
        write_clips(tmp_path, lengths, each=2)
        options |= {"num_frames": sorted(lengths)}
    check_parity(
        2, tolerance=1e-6, module={"name": name}, module_class=TinyPipeline, data_class=InOrder, data=options,
        trainer={"max_epochs": 1, "max_steps": -1}, strategy={"num_stages": 2},
    )  # fmt: skip


@pytest.mark.parametrize("last", ["filled", "smaller"])
def test_buckets_of_shards_teach_what_they_do_in_one_process(last, tmp_path):
    """With repeats and weights; plain Lightning has the order of shards and samples, too."""
    write_ratios(tmp_path, 7, 3)
    shards = [{"shards": shards_of(tmp_path, tmp_path, 2), "repeats": 2, "weight": 0.5}]
    options = {
        "train_shards": shards, "samples_per_epoch": 15, "num_workers": 0, "resolution": 32, "bucket_step": 8,
        "buckets": True, "batch_size": 3, "last_batch": last,
    }  # fmt: skip
    check_parity(
        2, tolerance=1e-6, module={"name": "flux"}, module_class=TinyPipeline,
        data_class=WebDatasetDataModule, data=options, trainer={"max_epochs": 1, "max_steps": -1},
        strategy={"num_stages": 2},
    )  # fmt: skip


class Alternating(TinyPipeline):
    """Draws for batches, in turn, what the first and what the second of two pipelines draws."""

    def training_step(self, batch, batch_idx):
        number = self.trainer.fit_loop.epoch_loop.total_batch_idx
        rng.seed_all(derived_seed(SEED, number % 2, number // 2, 0), host=True)
        return super().training_step(batch, batch_idx)


def test_pipelines_side_by_side_train_on_batches_of_unequal_sizes(tmp_path):
    """One process does it with two batches for each step."""
    write_ratios(tmp_path, 6, 2)
    options = {**OPTIONS, "folder": tmp_path, "buckets": True, "batch_size": 3}
    settings = Settings(
        module={"name": "flux"}, module_class=Alternating, data_class=InOrder, data=options,
        trainer={"max_epochs": 2, "accumulate_grad_batches": 2},
    )  # fmt: skip
    module, recorder, sizes = build(settings), Recorder(), []
    module.on_train_batch_start = lambda batch, number: sizes.append(batch["image"].shape)
    initial = weights_of(module)
    trainer = fit_module(module, 0, InOrder(**options), callbacks=[recorder], **settings.trainer)
    expected = outcome(trainer, module, recorder, initial)
    pairs = list(zip(expected.losses[::2], expected.losses[1::2], strict=True))
    expected.losses = [sum(pair) for pair in pairs]  # Lightning has halved them
    assert any(one != other for one, other in zip(sizes[::2], sizes[1::2], strict=True))
    settings.module_class, settings.strategy = TinyPipeline, {"num_stages": 1, "num_replicas": 1}
    settings.strategy["num_microbatches"] = 1
    settings.trainer = {"max_epochs": 2, "use_distributed_sampler": True}
    assert_equal_runs(run_ranks(fit, 2, settings, 2), expected, 1e-6)


class Noted(TinyPipeline):
    """Notes what it is trained on."""

    def on_train_batch_start(self, batch, batch_idx):
        super().on_train_batch_start(batch, batch_idx)
        (pixels,) = (batch[name] for name in ("image", "video") if name in batch)
        self.seen = [*getattr(self, "seen", []), (batch["caption"], pixels.double().sum().item())]


def interrupted(rank, world_size, data_class, data, path):
    """Trains two epochs; then again from the middle of the second one."""
    runs = []
    for resumed in (None, path):
        module, recorder = make(Noted, name="flux"), Recorder()
        saves = ModelCheckpoint(path.parent, path.stem, every_n_train_steps=7, save_top_k=-1)
        fit_module(
            module, world_size, data_class(**data), ckpt_path=resumed, max_epochs=2,
            enable_checkpointing=True, callbacks=[recorder] if resumed else [recorder, saves],
        )  # fmt: skip
        runs.append((module.seen, recorder.losses, weights_of(module)))
    return runs


@pytest.mark.parametrize("kind", ["folder", row("shards"), row("shards, skip")])
def test_buckets_go_on_in_the_middle_of_an_epoch(tmp_path, kind):
    """Orders, crops, flips and tags of a resumed run are those of one that was not interrupted."""
    write_ratios(tmp_path, 11, 3)
    changes = {"flip": 0.5, "random_crop": True, "shuffle_tags": True, "keep_tags": 1}
    data = {**OPTIONS, "folder": tmp_path, "buckets": True, "batch_size": 3, **changes}
    data_class = ImageFolderDataModule
    if kind != "folder":
        del data["folder"]
        if kind == "shards, skip":
            (tmp_path / "4.png").write_bytes((tmp_path / "4.png").read_bytes()[:-30])
        shards = shards_of(tmp_path, tmp_path, 2)
        share = 0.3 if kind == "shards" else 0.0
        data |= {"train_shards": shards, "samples_per_epoch": 15, "validation_share": share}
        data["on_error"] = "skip" if kind == "shards, skip" else "raise"
        data_class = WebDatasetDataModule
    runs = [(n, data_class, data, tmp_path / f"of_{n}.ckpt") for n in (1, 2)]
    ((seen, losses, weights), _), *_ = alone = run_ranks(interrupted, 1, *runs[0])
    assert len(seen) == 10
    assert seen[: len(seen) // 2] != seen[len(seen) // 2 :]
    for (own_seen, own_losses, own_weights), again in (
        *alone,
        *run_ranks(interrupted, 2, *runs[1]),
    ):
        assert own_seen == seen
        assert own_losses == pytest.approx(losses, rel=1e-6)
        torch.testing.assert_close(weights, own_weights, rtol=0, atol=1e-6)
        assert again[0] == seen[7:]
        assert again[1] == own_losses[7:]
        assert all(torch.equal(again[2][name], value) for name, value in own_weights.items())


def losses_of(folder):
    with next(folder.rglob("metrics.csv")).open() as lines:
        return [float(row["train/loss"]) for row in csv.DictReader(lines) if row["train/loss"]]


@pytest.mark.table
@pytest.mark.slow
@pytest.mark.parametrize(
    ("experiment", "pipeline", "num_samples", "num_buckets", "settings"),
    [
        (
            "sdxl_lora",
            "StableDiffusionXLPipeline",
            200,
            5,
            ("data.resolution=64", "data.flip=0.5", "strategy.num_microbatches=2"),
        ),
        (
            "wan_lora",
            "WanPipeline",
            42,
            3,
            ("data.resolution=32", "data.num_frames=[5,9,13]", "strategy.num_microbatches=3"),
        ),
    ],
    ids=["images of twelve ratios", "clips of three lengths"],
)
def test_a_folder_and_one_command(
    experiment, pipeline, num_samples, num_buckets, settings, tmp_path
):
    """Adapters out of buckets, on two ranks as on one; then from the middle of the epoch again."""
    samples = tmp_path / "samples"
    samples.mkdir()
    write_ratios(samples) if num_samples == 200 else write_clips(samples, each=14)
    model, saved, batch_size = tmp_path / "model", tmp_path / "saved", num_samples // 12
    pipelines.build(pipeline, tmp_path / "parts").save_pretrained(model)
    command = (
        *("train", f"experiment={experiment}", f"model.path={model}", f"data.folder={samples}"),
        *("data.buckets=true", "data.bucket_step=32", f"data.batch_size={batch_size}", *settings),
        *("model.optimization.lr=0.01", "model.optimization.warmup_steps=0"),
        *("data.shuffle_tags=true", "data.trigger=sks", "data.validation_share=0"),
        *("trainer=cpu", "trainer.devices=2", "strategy=two_stages", "strategy.profile=flops"),
        *("logger=csv", "callbacks=training", "num_threads=1", "data.num_workers=0"),
        *("trainer.max_steps=-1", "trainer.max_epochs=1", "trainer.log_every_n_steps=1"),
    )
    half = "callbacks.checkpoint.every_n_train_steps=10", "+callbacks.checkpoint.save_top_k=-1"

    def trained(name, *further, run=run_on_forks):
        to = f"save_lora={tmp_path / name}", f"hydra.run.dir={tmp_path / f'run_{name}'}"
        done = run(*command, *further, *to, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        adapters = load_file(tmp_path / name / "pytorch_lora_weights.safetensors")
        return done.stdout + done.stderr, losses_of(tmp_path / f"run_{name}"), adapters

    said, losses, adapters = trained("saved", *half)
    pattern = (
        rf"{num_samples} samples in (\d+) buckets make (\d+) batches of {batch_size}; (\d+) of"
    )
    buckets, batches, repeated = map(int, re.search(pattern, said).groups())
    assert batches * batch_size - repeated == num_samples
    assert buckets == num_buckets
    assert len(losses) == batches
    diffusion = diffusers.DiffusionPipeline.from_pretrained(model)
    diffusion.load_lora_weights(saved)
    assert diffusion.get_list_adapters()
    assert all(
        x.abs().max() > 0.01
        for name, x in adapters.items()
        if "lora_B" in name or "lora.up" in name
    )
    _, alone, _ = trained("alone", "trainer.devices=1", "strategy.num_stages=1", run=run)
    assert losses == pytest.approx(alone, rel=1e-3)
    (checkpoint,) = (tmp_path / "run_saved").rglob("*10.ckpt")
    plan = tmp_path / "run_saved/pipeline/plan.json"  # that of the batch it begins with may differ
    _, later, again = trained("again", f"ckpt_path={checkpoint}", f"strategy.plan={plan}")
    assert later == losses[10:]
    assert adapters.keys() == again.keys()
    assert all(torch.equal(value, again[name]) for name, value in adapters.items())
