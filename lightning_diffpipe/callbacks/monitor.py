"""Planned and measured, side by side: what the ranks of a pipeline do with their time.

    rank 0   stamps its instructions --.
    rank 1   stamps its instructions --+-- every n steps --> one timeline -> numbers, image, trace
    rank 2   stamps its instructions --'                     at the end   -> why it differs from the plan

Every rank stamps its instructions anyway. Now and then, at the same step on all ranks, the stamps of
that one step are brought to the first rank, where clocks are aligned and waits taken out. So a number that
is logged describes one whole step, and the steps between pay nothing. Images take longer than a step
may, and are drawn only as long as drawing stays below a given share of the run.
"""

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_diffpipe.errors import require_number
from lightning_diffpipe.files import write_atomically
from lightning_diffpipe.graph.step import count_samples
from lightning_diffpipe.host_memory import peak_resident_bytes
from lightning_diffpipe.planning.plan import PipelinePlan
from lightning_diffpipe.profiling.modelled import flops_per_sample, peak_flops
from lightning_diffpipe.runtime.engine import StepResult
from lightning_diffpipe.training.loader import PipelineLoader
from lightning_diffpipe.training.pipeline import Pipeline
from lightning_diffpipe.viewing.measured import (
    MeasuredStep,
    final_report,
    measured_timeline,
    occupation,
    typical_step,
    without_posts,
)
from lightning_diffpipe.viewing.plot import chrome_trace, plot

_EARLY_STEPS = (3, 10)
_IMAGE_S = 2.0  # what the first image is expected to take, matplotlib's import included


@dataclass
class _Interval:
    """Counts between two measurements; `all_steps` also has the first step, which averages of time leave out."""

    steps: int = 0
    samples: int = 0
    seconds: float = 0.0
    all_steps: int = 0


@dataclass
class _StepTimes:
    """Times around this rank's step, in seconds.

    Attributes:
        ended_s: End of the step before, with all that was measured; None if other work came between.
        between_s: Time from that end to `began_s`, the start of the step.
        loading_s: Part of it in which the data loader was waited for.
        loaders_s: Time spent in loaders until the end of the step before.
        drawing_s: Time spent on images of timelines so far.
    """

    ended_s: float | None = None
    began_s: float = 0.0
    between_s: float = 0.0
    loading_s: float = 0.0
    loaders_s: float = 0.0
    drawing_s: float = 0.0
    started_s: float = field(default_factory=time.perf_counter)


class PipelineMonitor(L.Callback):
    """Measures bubbles, filling, throughput and utilisation, and explains the way from plan to measurement.

    Logged through every logger, next to their planned values where there are any: `pipeline/step_s`,
    `samples_per_s`, `mfu`, `bubble_ratio`, `idle_s` of each rank, and `before_s`, `filled_s` and
    `leftover_s`, the frozen work of a rank on average before, during and after the pipeline; `grad_norm`; and of
    each rank the bytes of messages that it sent in a step, and its memory. With another strategy than diffpipe:
    samples and seconds only. A step is one batch, also when gradients accumulate. Loggers that keep artifacts
    (W&B) get the plan, the profile and the closing report.

    Args:
        every_n_steps: Steps between two measurements; the first are at steps 3 and 10.
        peak_flops: FLOP/s one device can do, for the MFU; looked up by the device's name if not given.
        images_share: Most of the run's time that may go into drawing images of timelines, the
            last one excepted, which is drawn when training is over.
        folder: Folder of report, image and trace, and of the plan with the profile and the cluster it was
            made from; the run's, as the logger has it, if not given. Without either nothing is written.
        progress_bar: Show bubble ratio and samples/s there.

    Attributes:
        numbers: Numbers that were logged last, by name.

    Raises:
        ConfigurationError: A number that cannot be.

    Example:
        >>> trainer = L.Trainer(strategy="diffpipe", callbacks=[PipelineMonitor()])  # doctest: +SKIP
    """

    def __init__(
        self,
        every_n_steps: int = 50,
        peak_flops: float | None = None,
        images_share: float = 0.005,
        folder: str | Path | None = None,
        progress_bar: bool = True,
    ) -> None:
        require_number("every_n_steps", every_n_steps, 1, whole=True)
        require_number("images_share", images_share, 0, 1)
        self.every_n_steps = every_n_steps
        self.peak_flops = peak_flops
        self.images_share = images_share
        self.folder = Path(folder) if folder is not None else None
        self.progress_bar = progress_bar
        self.samples: deque[MeasuredStep] = deque(maxlen=64)
        self.numbers: dict[str, float] = {}
        self._reset()

    def _reset(self) -> None:
        self.samples.clear()
        self.numbers.clear()
        self._num_steps = self._num_measured = 0
        self._interval = _Interval()
        self._clock = _StepTimes()
        self._last: tuple[StepResult, float] | None = None
        self._before_last: tuple[StepResult, float] | None = None
        self._written_to: Path | None = None
        self._flops = 0.0
        self._grad_norm: Tensor | None = None
        self._bytes_sent = 0

    # ------------------------------------------------------------------------------------- hooks

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Resets the counts, and chooses the folder, which all ranks must ask for together."""
        self._reset()
        run = run_folder(trainer)
        if not trainer.fast_dev_run:  # which leaves the files of other runs alone
            of_run = run / "pipeline" if trainer.loggers and run is not None else None
            self._written_to = self.folder or of_run
        pipeline = _pipeline(trainer)
        if pipeline is not None:
            self._flops = flops_per_sample(pipeline.graph)
            if trainer.is_global_zero:
                self._write_plan(trainer, pipeline)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Measures the time since the step before, and how much of it was loading."""
        clock = self._clock
        clock.began_s = time.perf_counter()
        clock.between_s = 0.0 if clock.ended_s is None else clock.began_s - clock.ended_s
        # Later callbacks, logging and checkpoints come in between, too, so loaders time themselves.
        waited_s = _loaders_s(trainer) - clock.loaders_s
        clock.loading_s = min(max(waited_s, 0.0), clock.between_s)

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any
    ) -> None:
        """Takes the norm of the gradients, not clipped yet, if a measurement precedes the next optimizer step."""
        first, pipeline = self._num_steps + 1, _pipeline(trainer)
        next_steps = range(first, first + trainer.accumulate_grad_batches)
        has_norm = pipeline is not None and not pipeline.plan.runs_free
        if has_norm and any(map(self._is_measured, next_steps)):
            self._grad_norm = trainer.strategy.gradient_norm()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Counts the step; at every n-th one all ranks collect its times."""
        clock = self._clock
        ended_s = time.perf_counter()
        self._num_steps += 1
        self._interval.all_steps += 1
        if self._num_steps > 1:  # the first step compiles, allocates and connects
            self._interval.steps += 1
            self._interval.samples += num_samples(trainer, batch) * pipeline_of(trainer)[1]
            self._interval.seconds += ended_s - clock.began_s + clock.between_s
        result = getattr(trainer.strategy, "last_step", None)
        if result is not None:
            self._before_last, self._last = self._last, (result, ended_s)
        if self._is_measured(self._num_steps):
            self._measure(trainer, pl_module, ended_s)
        clock.ended_s, clock.loaders_s = time.perf_counter(), _loaders_s(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stops the clock: what happens until the next batch is no part of a step."""
        self._clock.ended_s = None

    on_validation_end = on_train_epoch_end = on_validation_start  # as starting workers for an epoch

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Explains the run; a short run that was never measured shows its last but one step."""
        last = self._before_last or self._last
        if _pipeline(trainer) is not None and not self._num_measured and last:
            self._sample(trainer, *last)
        if not trainer.is_global_zero or not self.samples:
            return
        plan = getattr(trainer.strategy, "plan", None)
        report = self.report(plan)
        rank_zero_info(
            "\nPlanned and measured, a typical step of %d:\n\n%s\n", self._num_steps, report
        )
        if self._written_to is not None:
            with _going_on(self._written_to):
                write_atomically(self._written_to / "report.txt", report + "\n", durable=False)
                _log_artifact(trainer, self._written_to / "report.txt", "report")
            self._draw(trainer, plan)

    # --------------------------------------------------------------------------------- measuring

    def _is_measured(self, step: int) -> bool:
        return step % self.every_n_steps == 0 or step in _EARLY_STEPS

    def _measure(self, trainer: L.Trainer, module: L.LightningModule, ended_s: float) -> None:
        """Logs the numbers since the last measurement, and those of this step."""
        self._num_measured += 1
        numbers = self._throughput(trainer)
        pipeline = _pipeline(trainer)
        if pipeline is not None and self._last is not None:
            numbers |= self._of_ranks(pipeline)
            sample = self._sample(trainer, *self._last)
            if sample is not None:
                numbers |= self._numbers(trainer, sample)
        self._interval = _Interval()
        self.numbers |= numbers
        named = {f"pipeline/{name}": value for name, value in numbers.items()}
        for logger in trainer.loggers:
            logger.log_metrics(named, step=trainer.global_step)
        if self.progress_bar and trainer.is_global_zero:
            shown = {"bubble": "bubble_ratio", "samples/s": "samples_per_s"}
            for name, key in shown.items():
                if key in numbers:
                    module.log(name, numbers[key], prog_bar=True, logger=False, rank_zero_only=True)
        plan, start_s = getattr(trainer.strategy, "plan", None), time.perf_counter()
        allowed_s = self.images_share * (start_s - self._clock.started_s)
        has_time = self._clock.drawing_s + _IMAGE_S <= allowed_s
        can_draw = trainer.is_global_zero and plan is not None and self._written_to is not None
        if can_draw and self.samples and has_time:
            self._draw(trainer, plan)
            self._clock.drawing_s += time.perf_counter() - start_s

    def _throughput(self, trainer: L.Trainer) -> dict[str, float]:
        if not self._interval.seconds:
            return {}
        rate = self._interval.samples / self._interval.seconds
        numbers = {"samples_per_s": rate, "step_s": self._interval.seconds / self._interval.steps}
        peak = self.peak_flops or peak_flops(trainer.strategy.root_device, str(trainer.precision))
        if peak and self._flops:
            numbers["mfu"] = self._flops * rate / (peak * trainer.world_size)
        return numbers

    def _sample(self, trainer: L.Trainer, result: StepResult, end_s: float) -> MeasuredStep | None:
        """Brings one step's stamps together; a collective call of the ranks of a pipeline."""
        pipeline = _pipeline(trainer)
        mesh, spans = pipeline.mesh, list(result.recording.spans)
        with mesh.naming(mesh.pipeline_ranks):
            offsets_s, recorded = mesh.clock_offsets_s(), mesh.on_first(spans)
        if not recorded or not spans:
            return None
        if pipeline.plan.runs_free:  # each rank's step begins at a time of its own
            offsets_s = [min(span.start_s for span in spans) for spans in recorded]
            end_s -= offsets_s[0]
        timeline = measured_timeline(recorded, offsets_s, pipeline.plan.placement)
        ranks = zip(recorded, offsets_s, strict=True)
        began_s = min(span.start_s - ahead_s for spans, ahead_s in ranks for span in spans)
        after_s = max(end_s - began_s - timeline.iteration_s, 0.0)
        between_s, loading_s = self._clock.between_s, self._clock.loading_s
        sample = MeasuredStep(timeline, after_s + between_s - loading_s, loading_s)
        self.samples.append(sample)
        return sample

    def _numbers(self, trainer: L.Trainer, sample: MeasuredStep) -> dict[str, float]:
        pipeline = _pipeline(trainer)
        planned, spent = pipeline.plan.planned, occupation(sample.timeline)
        numbers = {
            "planned_step_s": planned.iteration_s,
            "planned_samples_per_s": planned.samples_per_s,
            "bubble_ratio": spent.bubble_ratio,
            "planned_bubble_ratio": planned.bubble_ratio,
            "iteration_s": spent.iteration_s,
            "loading_s": sample.loading_s,
            "before_s": statistics.fmean(spent.before_s),
            "filled_s": statistics.fmean(spent.filled_s),
            "leftover_s": statistics.fmean(spent.leftover_s),
        }
        return numbers | {f"idle_s/rank_{rank}": idle for rank, idle in enumerate(spent.idle_s)}

    def _of_ranks(self, pipeline: Pipeline) -> dict[str, float]:
        """Returns the gradients' norm, and each rank's bytes sent and memory; a collective call of its pipeline."""
        sent = pipeline.engine.num_bytes_sent
        per_step = (sent - self._bytes_sent) / max(self._interval.all_steps, 1)
        self._bytes_sent = sent
        numbers = {} if self._grad_norm is None else {"grad_norm": float(self._grad_norm)}
        self._grad_norm = None
        device, planned = pipeline.mesh.device, pipeline.plan.planned.peak_memory_bytes
        if device.type == "cuda":  # what tensors took, which is what is planned
            name, memory = "peak_memory_bytes", float(torch.cuda.max_memory_allocated(device))
        else:  # all that the process has, torch itself included
            name, memory = "peak_resident_bytes", peak_resident_bytes() or 0.0
        of_ranks = pipeline.mesh.gathered([per_step, memory], patient=True)
        for rank, (rank_sent, rank_memory) in enumerate(of_ranks):
            numbers[f"bytes_sent/rank_{rank}"] = rank_sent
            if rank_memory:
                numbers[f"{name}/rank_{rank}"] = rank_memory
        named = {f"planned_peak_memory_bytes/rank_{rank}": b for rank, b in enumerate(planned)}
        return numbers | named

    # ----------------------------------------------------------------------- images and report

    def _steady(self) -> list[MeasuredStep]:
        """Returns the sampled steps, without the first ones, which warm up, if there are others."""
        return list(self.samples)[len(_EARLY_STEPS) :] or list(self.samples)[-1:]

    def report(self, plan: PipelinePlan) -> str:
        """Returns the report at the end of a run, of one pipeline; see `final_report`."""
        return final_report(plan, self._steady())

    def _write_plan(self, trainer: L.Trainer, pipeline: Pipeline) -> None:
        """Writes the plan, and what it was made from unless it was given, for `diffpipe show` and `plan`."""
        if self._written_to is None:
            return
        files: dict[str, Any] = {"plan": pipeline.plan}
        if pipeline.basis is not None:
            files |= {"profile": pipeline.basis.profile, "cluster": pipeline.basis.cluster}
        with _going_on(self._written_to):
            for name, each in files.items():
                write_atomically(self._written_to / f"{name}.json", each.to_json())
                _log_artifact(trainer, self._written_to / f"{name}.json", name)

    def _draw(self, trainer: L.Trainer, plan: PipelinePlan) -> None:
        """Writes the image and the trace of a typical step, and gives them to loggers that take them."""
        measured = typical_step(self._steady()).timeline
        planned = {} if plan.costs is None else {"planned": plan.timeline}
        image, trace = self._written_to / "timeline.png", self._written_to / "trace.json"
        with _going_on(self._written_to):
            self._written_to.mkdir(parents=True, exist_ok=True)
            plot({**planned, "measured": without_posts(measured)}, image)
            write_atomically(trace, chrome_trace({**planned, "measured": measured}), durable=False)
            for logger in trainer.loggers:
                if hasattr(logger, "log_image"):
                    logger.log_image("pipeline/timeline", [str(image)], step=trainer.global_step)
            _log_artifact(trainer, trace, "trace")


def run_folder(trainer: L.Trainer) -> Path | None:
    """Returns a folder of this run's own, as its first logger has it; a collective call.

    A logger such as `WandbLogger()` that was given no folder names the working directory, where the next
    run would write over what this one left; then its name and the run's are added, as `ModelCheckpoint` does.
    """
    folder = trainer.log_dir
    if folder is None or not trainer.loggers:
        return None if folder is None else Path(folder)
    logger: Any = trainer.loggers[0]
    subfolders: tuple[str, ...] = ()
    if trainer.is_global_zero and Path(folder).resolve() == Path.cwd():
        _ = getattr(logger, "experiment", None)  # the run's name is known once it has started
        subfolders = (str(logger.name), str(logger.version))
    return Path(folder, *trainer.strategy.broadcast(subfolders))


@contextlib.contextmanager
def _going_on(folder: Path) -> Iterator[None]:
    """Warns where a report cannot be written: a full disk is no reason to end a training."""
    try:
        yield
    except OSError as error:
        rank_zero_warn(f"no report is written to {folder}, and training goes on: {error}")


def _log_artifact(trainer: L.Trainer, path: Path, kind: str) -> None:
    for logger in trainer.loggers:
        experiment = logger.experiment if hasattr(logger, "log_image") else None
        if callable(log := getattr(experiment, "log_artifact", None)):
            log(str(path), name=f"pipeline_{kind}", type=kind)


def _pipeline(trainer: L.Trainer) -> Pipeline | None:
    return getattr(trainer.strategy, "pipeline", None)


def _loaders_s(trainer: L.Trainer) -> float:
    """Returns seconds that were spent in training loaders so far; 0 where these do not measure it."""
    combined = trainer.fit_loop._combined_loader
    loaders = combined.flattened if combined is not None else ()
    return sum(loader.loading_s for loader in loaders if isinstance(loader, PipelineLoader))


def num_samples(trainer: L.Trainer, batch: Any) -> int:
    """Returns the number of samples of the batch that was trained on last; 0 if nothing tells it."""
    result = getattr(trainer.strategy, "last_step", None)
    return count_samples(batch) or 0 if result is None else int(result.num_samples)


def pipeline_of(trainer: L.Trainer) -> tuple[int, int]:
    """Returns the number of this pipeline among those that share out the data, and the number of these."""
    sampling = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
    return sampling.get("rank", 0), sampling.get("num_replicas", 1)
