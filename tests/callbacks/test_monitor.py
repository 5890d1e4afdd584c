"""PipelineMonitor: what it logs, writes and says, on every rank and with any trainer."""

import csv
import json
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from torch.utils.data import default_collate

from lightning_diffpipe import ModelProfile, PipelineMonitor, PipelinePlan, find_plan
from lightning_diffpipe.callbacks.monitor import run_folder
from lightning_diffpipe.planning.cluster import Cluster
from lightning_diffpipe.planning.options import PlanOptions
from lightning_diffpipe.training.pipeline import Basis
from tests.distributed.scenarios import Settings, build, quick_strategy, quiet_trainer, reference
from tests.distributed.tiny import Data
from tests.planning.profiles import equal_profile
from tests.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def fit_monitored(rank, folder, world_size, trainer_options, strategy_options):
    """Trains with a monitor; returns its report, what it kept, and the losses."""
    monitor = PipelineMonitor(every_n_steps=2, peak_flops=1e9)
    losses = []

    class Keep(L.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            losses.append(float(outputs["loss"]))

        def on_train_end(self, trainer, module):
            self.plan = trainer.strategy.plan

    keep = Keep()
    strategy = quick_strategy(**strategy_options)
    logger = CSVLogger(folder, name="", version="") if folder else False
    trainer = quiet_trainer(
        devices=world_size, strategy=strategy, callbacks=[monitor, keep], logger=logger,
        **trainer_options,
    )  # fmt: skip
    trainer.fit(build(Settings()), datamodule=Data(size=36, batch_size=6))
    return losses, list(monitor.samples), monitor.report(keep.plan) if rank == 0 else ""


def read_metrics(folder):
    with (Path(folder) / "metrics.csv").open() as file:
        return [{k: v for k, v in row.items() if v} for row in csv.DictReader(file)]


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_with_accumulation_and_validation_in_mid_epoch(tmp_path):
    options = {"accumulate_grad_batches": 2, "val_check_interval": 3, "log_every_n_steps": 1}
    strategy = {"num_stages": 2, "num_microbatches": 3, "filling": "none"}
    (losses, samples, report), (_, others, _) = run_ranks(
        fit_monitored, 2, str(tmp_path), 2, options, strategy
    )
    assert losses == pytest.approx(
        reference(Settings(data={"size": 36}, trainer={"accumulate_grad_batches": 2}), 3).losses
    ), "looking must not change what is seen"
    assert len(samples) == 4, "batches 2, 3, 4 and 6"
    assert not others, "samples live on the first rank only"
    seen = set()
    for sample in samples:
        kinds = {str(span.instruction) for span in sample.timeline.spans if span.rank == 1}
        seen |= kinds
        assert {"1F0", "1B2", "R"} <= kinds
        assert any(kind.startswith("E") for kind in kinds)
        assert not any("?" in kind for kind in kinds), "waiting is not work"
        assert 0 < sample.timeline.bubble_ratio < 1
        for transfer in sample.timeline.transfers:
            assert transfer.stop_s >= transfer.start_s
    # Ended here before the last had come, by clocks that agree but roughly, an exchange is no span: not each time.
    assert "X" in seen
    logged = [row for row in read_metrics(tmp_path) if "pipeline/bubble_ratio" in row]
    assert len(logged) == 4
    last = {name: float(value) for name, value in logged[-1].items()}
    for name in ("step_s", "samples_per_s", "mfu", "planned_bubble_ratio", "planned_step_s",
                 "idle_s/rank_0", "idle_s/rank_1", "before_s", "filled_s", "leftover_s"):  # fmt: skip
        assert last[f"pipeline/{name}"] >= 0, name
    assert last["pipeline/grad_norm"] > 0
    for name in ("bytes_sent", "planned_peak_memory_bytes", "peak_resident_bytes"):
        assert min(last[f"pipeline/{name}/rank_{rank}"] for rank in (0, 1)) > 0, name
    assert "A step takes" in report
    assert "measured, on another scale" in report, "counted times are not seconds"
    assert "profile=measure" in report
    assert "rank 1: " in report
    folder = tmp_path / "pipeline"
    assert (folder / "report.txt").read_text().strip() == report.strip()
    assert (folder / "timeline.png").stat().st_size > 1000
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    named = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert named == {"planned", "measured"}
    assert {"0F0", "activation"} <= {event["name"] for event in events}
    kept = PipelinePlan.from_json((folder / "plan.json").read_text())
    profile = ModelProfile.from_json((folder / "profile.json").read_text())
    cluster = Cluster.from_json((folder / "cluster.json").read_text())
    assert find_plan(profile, cluster, kept.options) == kept, "the run's plan can be made again"


def test_of_a_plan_that_was_given_the_plan_alone_is_written(tmp_path):
    plan = find_plan(equal_profile(2), Cluster(1), PlanOptions(6, num_microbatches=2))
    pipeline = SimpleNamespace(plan=plan, basis=None)
    monitor = PipelineMonitor(folder=tmp_path)
    monitor._written_to = tmp_path / "new"
    monitor._write_plan(SimpleNamespace(loggers=[]), pipeline)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["plan.json"]
    pipeline.basis = Basis(equal_profile(2), Cluster(1))
    monitor._write_plan(SimpleNamespace(loggers=[]), pipeline)
    names = {path.name for path in (tmp_path / "new").iterdir()}
    assert names == {"plan.json", "profile.json", "cluster.json"}


def test_a_trial_run_leaves_the_files_of_others_alone(tmp_path):
    """History: `fast_dev_run` wrote over the plan and the report of a real run."""
    monitor = PipelineMonitor(folder=tmp_path)
    options = {"strategy": quick_strategy(), "callbacks": [monitor], "fast_dev_run": 3}
    quiet_trainer(**options).fit(build(Settings()), datamodule=Data())
    assert monitor.samples
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.distributed
def test_frozen_work_in_bubbles_is_seen(tmp_path):
    strategy = {"num_stages": 2, "num_microbatches": 3, "filling": "shares"}
    (_, samples, report), _ = run_ranks(fit_monitored, 2, str(tmp_path), 2, {}, strategy)
    logged = [row for row in read_metrics(tmp_path) if "pipeline/filled_s" in row]
    assert len(logged) == len(samples) == 4
    assert any(float(row["pipeline/filled_s"]) > 0 for row in logged)
    assert "Filling the bubbles" in report


@pytest.mark.slow
@pytest.mark.distributed
def test_two_pipelines_and_no_logger(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    strategy = {"num_stages": 1, "num_microbatches": 2, "data_parallel": 2}
    (_, samples, report), (_, others, _) = run_ranks(fit_monitored, 2, None, 2, {}, strategy)
    assert len(samples) == 2, "batches 2 and 3: each pipeline sees half of them"
    assert len(others) == 2, "each pipeline has a first rank"
    assert "A step takes" in report
    assert not list(tmp_path.iterdir()), "without logger and folder nothing is written"


class Runs:
    """A logger that writes into a common folder, as a bare `WandbLogger()`."""

    name, version = "project", None

    @property
    def experiment(self):
        self.version = "3f2a"


def test_a_folder_that_cannot_be_written_is_warned_of_and_training_goes_on(tmp_path):
    """History: a disk that was full of checkpoints ended the run in its closing report."""
    (tmp_path / "taken").write_text("no folder")
    monitor = PipelineMonitor(folder=tmp_path / "taken")
    trainer = quiet_trainer(strategy=quick_strategy(), max_steps=3, callbacks=[monitor])
    with pytest.warns(UserWarning, match="no report is written to .*taken, and training goes on"):
        trainer.fit(build(Settings()), datamodule=Data())
    assert trainer.global_step == 3


@pytest.mark.parametrize(
    ("folder", "own"), [(".", "project/3f2a"), ("outputs", "outputs"), (None, None)]
)
def test_a_run_has_a_folder_of_its_own(folder, own, tmp_path, monkeypatch):
    """History: a bare `WandbLogger()` made every run write over the plan and report of the one before."""
    monkeypatch.chdir(tmp_path)
    strategy = SimpleNamespace(broadcast=lambda value: value)
    trainer = SimpleNamespace(
        loggers=[Runs()], log_dir=folder, is_global_zero=True, strategy=strategy
    )
    assert run_folder(trainer) == (None if own is None else Path(own))


@pytest.mark.slow
def test_a_run_shorter_than_the_first_look_is_explained_too():
    _, samples, report = fit_monitored(
        0, None, 1, {"max_steps": 1}, {"num_stages": 1, "num_microbatches": 2}
    )
    assert len(samples) == 1
    assert "A step takes" in report


class SlowToRead(Data):
    """Takes 50 ms for a batch of two samples."""

    def train_dataloader(self):
        loader = super().train_dataloader()

        def collate(samples):
            time.sleep(0.05)
            return default_collate(samples)

        loader.collate_fn = collate
        return loader


class Dawdler(L.Callback):
    """A callback after the monitor, such as one that averages weights."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        time.sleep(0.5)


@pytest.mark.slow
def test_later_callbacks_are_no_loading():
    """History: whatever came after the monitor, checkpoints and averages, was blamed on the data loader."""
    monitor = PipelineMonitor(every_n_steps=2, progress_bar=False)
    strategy = quick_strategy(num_stages=1, num_microbatches=2)
    trainer = quiet_trainer(devices=1, strategy=strategy, callbacks=[monitor, Dawdler()])
    trainer.fit(build(Settings()), datamodule=SlowToRead(size=6, batch_size=2))
    assert len(monitor.samples) == 2
    for sample in monitor.samples:
        assert 0.05 <= sample.loading_s < sample.after_s
        assert sample.after_s >= 0.5


def test_without_a_pipeline_it_counts_samples(tmp_path):
    monitor = PipelineMonitor(every_n_steps=2)
    logger = CSVLogger(tmp_path, "", "")
    trainer = quiet_trainer(max_steps=4, callbacks=[monitor], logger=logger, limit_val_batches=0)
    trainer.fit(BoringModel())
    rates = [row for row in read_metrics(tmp_path) if "pipeline/samples_per_s" in row]
    assert len(rates) == 3
    assert not monitor.samples


@pytest.mark.parametrize(("age_s", "count"), [(100, 0), (300, 1)])
def test_images_wait_until_the_run_can_afford_them(age_s, count, tmp_path, monkeypatch):
    """Drawing takes seconds, and all other ranks wait for the one that draws: 1% of 100 s is less."""
    monitor, drawn = PipelineMonitor(images_share=0.01, folder=tmp_path, progress_bar=False), []
    monkeypatch.setattr(monitor, "_draw", lambda trainer, plan: drawn.append(plan))
    monitor._written_to = tmp_path
    monitor.samples.append(None)
    monitor._clock.started_s -= age_s
    strategy = SimpleNamespace(plan="plan", pipeline=None)
    trainer = SimpleNamespace(strategy=strategy, loggers=[], is_global_zero=True)
    monitor._measure(trainer, None, 0.0)
    assert drawn == ["plan"] * count


def test_throughput_sums_over_pipelines_and_mfu_over_devices():
    monitor = PipelineMonitor(peak_flops=1e12)
    monitor._interval.steps, monitor._interval.samples, monitor._interval.seconds = 4, 40, 2.0
    monitor._flops = 3e10

    class Trainer:
        world_size, precision = 2, "32-true"

        class strategy:
            root_device = torch.device("cpu")

    numbers = monitor._throughput(Trainer)
    assert numbers == {"samples_per_s": 20.0, "step_s": 0.5, "mfu": pytest.approx(0.3)}


def wandb_records(path):
    """What wandb wrote offline, by its own messages: records of a log in blocks of 32 KiB, as LevelDB has them."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts, records = path.read_bytes(), 7, b"", []
    assert data[:4] == b":W&B"
    while at + 7 < len(data):
        if 32768 - at % 32768 < 7:  # no room for a head
            at += 32768 - at % 32768
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if at + 7 + size > len(data):
            break
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            records.append(Record.FromString(parts))
            parts = b""
    return records


def ended_records(folder, patience_s=30):
    """The records of a run that has ended; a process of wandb's own writes them, at its own pace."""
    (path,) = Path(folder).glob("wandb/*run-*/*.wandb")
    until_s = time.monotonic() + patience_s
    while not (records := wandb_records(path)) or not records[-1].HasField("exit"):
        assert time.monotonic() < until_s, [record.WhichOneof("record_type") for record in records]
        time.sleep(0.1)
    return records


@pytest.mark.slow
def test_what_wandb_keeps_of_a_run(tmp_path):
    """History: no norm, no memory and no bytes were logged, and the plan, profile and report stayed on the disk."""
    logger = WandbLogger(save_dir=tmp_path, offline=True, id="abc123")
    monitor = PipelineMonitor(every_n_steps=4, folder=tmp_path / "pipeline", images_share=0)
    strategy = quick_strategy(num_stages=1, num_microbatches=2)
    trainer = quiet_trainer(
        devices=1, strategy=strategy, callbacks=[monitor], logger=logger, log_every_n_steps=2
    )
    norms, module = [], build(Settings())
    take = lambda _: norms.append(float(trainer.strategy.gradient_norm()))
    module.on_before_optimizer_step = take
    trainer.fit(module, datamodule=Data(size=36, batch_size=6))
    logger.experiment.finish()

    records = ended_records(tmp_path)
    assert {record.run.run_id for record in records if record.HasField("run")} == {"abc123"}
    rows = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
        for items in (record.history.item for record in records if record.HasField("history"))
    ]
    logged = Counter(
        (key, row["trainer/global_step"])
        for row in rows
        for key in row
        # Lightning gives the epoch along with whatever it logs.
        if key[0] != "_" and key not in ("epoch", "trainer/global_step")
    )
    assert logged
    assert max(logged.values()) == 1, "a metric twice for a step"
    steps = {key: [row[key] for row in rows if key in row] for key in set().union(*rows)}
    looked_at = (3, 4)
    assert steps["pipeline/grad_norm"] == pytest.approx([norms[step - 1] for step in looked_at])
    assert steps["pipeline/bytes_sent/rank_0"] == [0, 0], "nobody to send to"
    assert min(steps["pipeline/planned_peak_memory_bytes/rank_0"]) > 0
    assert min(steps["pipeline/peak_resident_bytes/rank_0"]) > 1e8
    kept = {record.artifact.name for record in records if record.HasField("artifact")}
    assert kept >= {f"pipeline_{kind}" for kind in ("plan", "profile", "report", "trace")}
