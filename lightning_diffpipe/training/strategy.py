"""`Trainer(strategy="diffpipe")`: Lightning's hooks, translated to a plan and an engine.

    Lightning calls             what happens                                          where
    setup_environment, barrier  processes start, meet and end                         processes.py
    setup                       probe, profile, plan, place parameters                preparation.py
    batch_to_device             one rank of a pipeline loads, the others get batches  loader.py
    training_step               the schedule runs forward and backward                runtime/engine.py
    (zero_grad)                 gradients have been taken away before                 runtime/reduction.py
    backward                    they are put back; nothing is computed
    clip_gradients              global norm over all stages                           runtime/reduction.py
    (before each batch)         ranks agree whether to stop, and when to validate     signals.py
    validation_step, test_step  every rank runs the step, layers answer for others    runtime/relay.py
    (metric.compute)            ranks that saw the same batches count once            metric_sync.py
    save, load                  one ordinary Lightning checkpoint, all names          checkpointing.py
    teardown                    the module is whole again on every rank

Loops, callbacks, loggers, optimizers and learning-rate schedulers are Lightning's own.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial, partialmethod
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_diffpipe.checkpoint_files import keep_last
from lightning_diffpipe.comm.mesh import Mesh, RankLayout
from lightning_diffpipe.comm.rendezvous import gloo_of_all_hosts
from lightning_diffpipe.comm.watcher import watcher
from lightning_diffpipe.errors import (
    ConfigurationError,
    PipelineTimeoutError,
    raised_by_all,
    require_choice,
    require_number,
)
from lightning_diffpipe.graph.building import built_bytes, built_in_files, materialize, refuse_unset
from lightning_diffpipe.graph.placement import take_from_file, take_from_files
from lightning_diffpipe.graph.rng import capture, derived_seed, isolated_random_numbers, restore
from lightning_diffpipe.graph.side_effects import generators_preserved
from lightning_diffpipe.graph.trial import in_trial
from lightning_diffpipe.graph.versions import Versions
from lightning_diffpipe.planning.filling import LOOKAHEAD_BATCHES
from lightning_diffpipe.planning.plan import PipelinePlan
from lightning_diffpipe.planning.schedule import Placement
from lightning_diffpipe.planning.schedules import SCHEDULES
from lightning_diffpipe.runtime.engine import StepResult
from lightning_diffpipe.runtime.free_running import FreeRunningEngine
from lightning_diffpipe.runtime.relay import NOT_IN_STEP
from lightning_diffpipe.training.before_training import (
    allow_runs,
    autocast_on_host,
    early_answers,
    first_batch,
    later_moments,
    put_off_runs,
    silence_watching,
    why_empty,
    without_loggers,
)
from lightning_diffpipe.training.checkpointing import CheckpointHooks, Division, refuse_divided
from lightning_diffpipe.training.loader import (
    Fetched,
    PipelineLoader,
    place_of,
    shared_out,
    take_over,
    unaligned,
)
from lightning_diffpipe.training.metric_sync import MetricSync, forget_elsewhere
from lightning_diffpipe.training.patching import patched
from lightning_diffpipe.training.pipeline import Pipeline
from lightning_diffpipe.training.plan_source import PipelineOptions, planned_pipelines
from lightning_diffpipe.training.preparation import prepare
from lightning_diffpipe.training.processes import ProcessHooks
from lightning_diffpipe.training.refusals import (
    hooks_come_later,
    refuse_arguments,
    refuse_kept_on_device,
    refuse_on_several_ranks,
    refuse_optimizers,
    refuse_optimizers_without_flush,
    refuse_undivided,
    refuse_unsupported,
    refuse_without_flush,
    refusing_norms_of_a_stage,
    warn_of_outputs,
)
from lightning_diffpipe.training.signals import GRACE_S, LockStep
from lightning_diffpipe.viewing.report import report

Auto = Literal["auto"]
_MANY_BYTES = 2**30


class DiffPipeStrategy(ProcessHooks, CheckpointHooks):
    """Trains a LightningModule as a pipeline over ranks, exactly as one process would.

    Args:
        num_stages: Stages the layers are cut into; `"auto"` lets the planner choose.
        num_microbatches: Slices each batch is cut into along dimension 0.
        schedule: `"1f1b"`, `"1f1b_deep"`, `"gpipe"`, `"zero_bubble"`, `"interleaved"`, `"v"`, `"zero_bubble_v"`,
            `"bidirectional"` (several backbones), or `"auto"`. Without flushes, which trains on weights that are
            some batches old: `"pipedream"` (weight stashing), `"pipedream_vertical_sync"` or `"pipedream_2bw"`.
        num_replicas: Ranks per stage: one number for all, a sequence with one number for each, or `"auto"`.
        data_parallel: Pipelines side by side on different data; `"auto"` uses ranks left over by
            `num_stages` and `num_replicas`.
        filling: Placement of frozen layers. `"shares"` runs those of the next batches while a rank waits;
            `"none"` runs a batch's own before the pipeline, spread over all ranks; `"auto"` takes the
            faster of the two that fits into memory.
        frozen_group_size: Samples on which frozen layers run at a time; `"auto"` weighs what small groups
            cost against how evenly they can be shared. Ranks take whole groups.
        encoding_ranks: Ranks of each pipeline that hold the frozen encoders and run them: so many of the last
            ones. `"auto"`: all, or as few as have to for the plan to fit.
        checkpointing: Layers whose activations the backward computes again instead of storing them: `"none"`;
            `"all"` for which that frees memory; `"auto"`, those of each stage that have to be for the plan to fit.
            What the module checkpoints itself stays as it is.
        streaming: Layers whose frozen weights are in host memory, pinned for GPUs, and are copied to the device for
            each run: `"none"`; `"all"`, as in tests; `"auto"`, those of each stage without which no plan would fit,
            also with recomputed layers, which all streamed ones are.
        shard_optimizer: The ranks that hold a stage, in all pipelines, share its optimizer state (ZeRO-1): each
            steps some of its parameters and sends them to the others, half as much again as to sum gradients.
            `"auto"`: where the plan would not fit otherwise, of ready-made modules (`Optimization`); optimizers of
            others are made when the plan is there.
        optimizer_offload: Optimizer states lie in host memory, pinned for GPUs, and come to the device bucket
            by bucket when the optimizer steps: `"none"`; `"all"`; `"auto"`: where no plan would fit without, also
            with recomputed layers and fewer encoders, of ready-made modules as above. Refused for optimizers that
            step parameters by each other's gradients, count their steps, or change weights in between.
        plan: A plan, or the path of one, to follow instead of searching. What is set above and is not
            what the plan has is refused; what is only planned with (`profile`, `cluster`,
            `optimizer_bytes_factor`) changes nothing.
        profile: `"measure"`, or `None`, times the layers of the model on this machine; `"flops"` derives
            times from operation counts; or a profile, or the path of one.
        cluster: `"measure"` times the links between the ranks while planning; or a `Cluster`, or its
            fields as a mapping.
        optimizer_bytes_factor: Bytes of optimizer state for each byte of gradient, where memory is
            planned: 0 for SGD, 1 with momentum, 2 for Adam, 6 for moments and a copy of the weights in
            float32 next to bfloat16. `"auto"` tries that of ready-made modules (`Optimization`), and counts
            Adam for others, whose is made later. The averages of an `EMA` are counted besides.
        timeout_s: Longest wait for a message, in seconds, before the run stops with an error.
        busy_timeout_s: Longest time, in seconds, in which a rank between two steps may give no sign of progress (a
            batch, a tensor of a checkpoint, another phase) while another waits for it. Saving, sampling, loading a
            batch or compiling may take so long; then the run ends, and says where the code of that rank stands.
        seed: Seed of all random numbers of training steps; `None` takes `seed_everything`'s.
        check_finite: Look for NaN and infinity in everything that crosses a stage boundary.
        max_diverged_steps: Optimizer steps in a row whose loss or gradients are not finite after which the run ends
            with an error; single ones may come by, as with 16 bits. No checkpoint is written with weights that are
            not finite, either. `None` looks at none of it.
        verify: Before training, compare loss and gradients of one batch with a run of the whole module
            on every rank; needs memory for both.
        state_dict_type: Checkpoints are `"full"`, one file that rank 0 writes, or `"sharded"`, a folder to which
            each of several ranks writes its part. `"sharded_async"`: from a copy in the memory of its host, while
            training goes on. `"auto"`: sharded where a file would not fit into the free memory of rank 0's host.
        process_group_backend: `"gloo"` or `"nccl"`; chosen by device if not given.

    Example:
        >>> trainer = L.Trainer(devices=2, strategy=DiffPipeStrategy(num_stages=2))  # doctest: +SKIP
    """

    strategy_name = "diffpipe"

    def __init__(
        self,
        num_stages: int | Auto = "auto",
        num_microbatches: int | Auto = "auto",
        schedule: str = "1f1b",
        num_replicas: int | tuple[int, ...] | list[int] | Auto = "auto",
        data_parallel: int | Auto = "auto",
        filling: str = "auto",
        frozen_group_size: int | Auto = "auto",
        encoding_ranks: int | Auto = "auto",
        checkpointing: str = "auto",
        streaming: str = "auto",
        shard_optimizer: bool | Auto = "auto",
        optimizer_offload: str = "auto",
        plan: PipelinePlan | str | Path | None = None,
        profile: Any = "measure",
        cluster: Any = "measure",
        timeout_s: float = 120.0,
        seed: int | None = None,
        check_finite: bool = False,
        verify: bool = False,
        process_group_backend: str | None = None,
        optimizer_bytes_factor: float | Auto = "auto",
        max_diverged_steps: int | None = 10,
        busy_timeout_s: float = 1800.0,
        state_dict_type: str = "auto",
        **unsupported: Any,
    ) -> None:
        if unsupported:
            parameters = inspect.signature(DiffPipeStrategy).parameters
            refuse_arguments(unsupported, parameters.keys() - {"unsupported"})
        if max_diverged_steps is not None:
            require_number("max_diverged_steps", max_diverged_steps, 1, whole=True)
        types = ("auto", "full", "sharded", "sharded_async")
        require_choice("state_dict_type", state_dict_type, types)
        super().__init__(timeout_s, busy_timeout_s, process_group_backend)
        self._state_dict_type = state_dict_type
        self.max_diverged_steps = max_diverged_steps
        self.pipeline: Pipeline | None = None
        self.division: Division | None = None
        self.last_saved: str | None = None
        self.last_step: StepResult | None = None
        self.upcoming: list[tuple[int, Any]] = []
        self._finished: list[StepResult] = []
        self.lookahead_batches = LOOKAHEAD_BATCHES
        self.seed: int | None = None
        self.transfers = False
        self._data_mesh: Mesh | None = None
        self._options = PipelineOptions(
            num_stages=num_stages, num_microbatches=num_microbatches, schedule=schedule,
            num_replicas=num_replicas, data_parallel=data_parallel, filling=filling,
            frozen_group_size=frozen_group_size, encoding_ranks=encoding_ranks,
            checkpointing=checkpointing, streaming=streaming, shard_optimizer=shard_optimizer,
            optimizer_offload=optimizer_offload, plan=plan, profile=profile, cluster=cluster, seed=seed,
            check_finite=check_finite, verify=verify, optimizer_bytes_factor=optimizer_bytes_factor,
        )  # fmt: skip
        self._arguments: tuple[Any, ...] = ()
        self._lock_step: LockStep | None = None
        self._metric_sync: MetricSync | None = None
        self._gradients: tuple[Tensor | None, ...] | None = None  # before the optimizer reads them
        self._accumulating = False
        self._failed = self._warned_of_outputs = False
        self._until_teardown = contextlib.ExitStack()

    def __deepcopy__(self, memo: dict[int, Any]) -> DiffPipeStrategy:
        """Returns itself: processes and groups are there once, and whoever copies a trainer means its callbacks."""
        return self

    @property
    def plan(self) -> PipelinePlan | None:
        """Plan of all ranks; known once training has been set up."""
        return self.pipeline.plan if self.pipeline else None

    @property
    def _running(self) -> Pipeline:
        assert self.pipeline is not None, "training is not set up"
        return self.pipeline

    @property
    def _trainer(self) -> Any:
        return self.lightning_module.trainer

    @property
    def is_one_stage(self) -> bool:
        """Whether every rank has been asked to hold the whole module."""
        return self._options.num_stages == 1 and self._options.plan is None

    @property
    def mesh(self) -> Mesh | None:
        """Ranks of each pipeline: of the plan, or of what is known before there is one, or without one."""
        return self.pipeline.mesh if self.pipeline else self._data_mesh

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Ranks of one pipeline see the same samples; pipelines see different ones."""
        if self.mesh is None:  # processes have not met
            return {"num_replicas": self.world_size, "rank": self.global_rank}
        return {"num_replicas": self.mesh.layout.num_pipelines, "rank": self.mesh.pipeline}

    # ------------------------------------------------------------------------------------ set-up

    def check_run(self, trainer: Any, arguments: dict[str, Any]) -> None:
        """Finds the checkpoint to go on from, before any process is started, and what a failed run has left."""
        self.refuse_alone()
        refuse_divided(arguments.get("model"))
        if trainer.state.fn == TrainerFn.FITTING:  # nothing is planned for anything else
            with raised_by_all():
                self._options.refuse_for(self.world_size)
        self.choose_checkpoint(trainer, arguments)

    def setup_environment(self) -> None:
        """Brings processes together, which shall go on from the same checkpoint, and says who loads data."""
        super().setup_environment()
        self.require_same_checkpoint()
        materialize(self.lightning_module)
        put_off_runs(self._trainer)
        self._share_data_out(self._trainer)

    def _share_data_out(self, trainer: Any) -> None:
        """Makes as many pipelines as a plan has, for data only: outside of `fit` each rank has a whole module."""
        number = planned_pipelines(self._options, self.world_size) if self.is_global_zero else 0
        number = int(self.broadcast(number))
        fits = trainer.state.fn == TrainerFn.FITTING
        size = self.world_size // number if self.world_size % number == 0 else self.world_size
        layout = RankLayout(self.world_size, Placement((tuple(range(size)),)))
        self._data_mesh = Mesh(layout, self.global_rank, self.root_device, "gloo", self.timeout_s)
        if self.world_size > 1:
            with gloo_of_all_hosts():
                self._data_mesh.connect()
        own_seed = os.environ.get("PL_GLOBAL_SEED", torch.initial_seed())
        seed = int(own_seed) if self._options.seed is None else self._options.seed
        self.seed = int(self.broadcast(seed)) if fits else None
        take_over(trainer, layout.num_pipelines)

    def barrier(self, name: str | None = None) -> None:
        """Waits for all ranks."""
        if name == "pre_setup":  # Lightning has prepared data, and asked for loggers, on rank 0
            allow_runs(self._trainer)
            restore(self.broadcast(capture(host=True)))
        super().barrier(name)

    def setup(self, trainer: Any) -> None:
        """Plans the pipeline and puts this rank's part of the module on its device."""
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        with raised_by_all():
            refuse_unset(self.lightning_module)
            refuse_unsupported(trainer, self)
            if fitting and self.world_size > 1:
                refuse_on_several_ranks(trainer, self)
            spec = SCHEDULES.get(self._options.schedule)
            if spec and not spec.flushes and self.world_size > 1:
                refuse_without_flush(trainer, spec.name)
        # Metrics count each batch once, and the transfer hook does not run again for a batch that was fetched.
        self._metric_sync = MetricSync(trainer, lambda: self.mesh, self._until_teardown)
        module: Any = self.lightning_module
        once = partial(_once, module._on_before_batch_transfer)
        self._until_teardown.enter_context(patched(module, _on_before_batch_transfer=once))
        self.model = self.precision_plugin.convert_module(self.model)
        self._failed = self._warned_of_outputs = False
        if fitting and 0 not in (
            trainer.limit_train_batches,
            trainer.max_epochs,
            trainer.max_steps,
        ):
            self.stop_requeueing()
            self.check_folders(trainer)
            keep_last(trainer)
            self._set_up_pipeline(trainer)
        else:  # no step is asked for
            self.model_to_device()
        if fitting:
            self._optimizers, self._lightning_optimizers, self.lr_scheduler_configs = [], [], []
            self.setup_optimizers(trainer)
        if self.plan is not None and len(self.plan.stages) > 1:
            with raised_by_all():
                refuse_optimizers(self.optimizers)
                if self.plan.runs_free:
                    refuse_optimizers_without_flush(self.optimizers, self.plan.options.schedule)
        sharding = self.pipeline and self.pipeline.sharding
        if self.plan is not None and (len(self.plan.stages) > 1 or sharding):
            for optimizer in self.optimizers:
                self._running.connect(optimizer)
        offload = self.pipeline and self.pipeline.optimizer_offload
        for states, refuse in ((sharding, refuse_undivided), (offload, refuse_kept_on_device)):
            if states:
                with raised_by_all():
                    refuse(self.optimizers, self._running.mesh)
                for optimizer in self.optimizers:
                    self._until_teardown.callback(states.attach(optimizer))
        self.setup_precision_plugin()
        self._take_over_clipping(trainer)

    def _take_over_clipping(self, trainer: Any) -> None:
        """Lets the pipeline clip gradients in Lightning's place, and without flushes drain before validation."""
        plugin: Any = self.precision_plugin
        if self.pipeline is not None and isinstance(self.pipeline.engine, FreeRunningEngine):
            self.pipeline.engine.optimizers = self.optimizers
            self.pipeline.engine.clip_value = trainer.gradient_clip_val
            # Where Lightning clips there are no gradients, which torch takes for an error.
            no_clipping = patched(plugin, clip_grad_by_value=lambda optimizer, clip_val: None)
            self._until_teardown.enter_context(no_clipping)
            loop = trainer.fit_loop.epoch_loop
            should_check = partial(self._drained_before, loop._should_check_val_fx)
            self._until_teardown.enter_context(patched(loop, _should_check_val_fx=should_check))
        elif self.pipeline is not None:
            # The precision plugin is the user's choice; its class name keys the scaler's state in
            # checkpoints, so the instance is given another method rather than the plugin another class.
            global_clipping = patched(plugin, clip_grad_by_norm=self.clip_by_global_norm)
            self._until_teardown.enter_context(global_clipping)
            if len(self.pipeline.plan.stages) > 1:
                trained = self.pipeline.trained.values()
                self._until_teardown.enter_context(refusing_norms_of_a_stage(trained))

    def _set_up_pipeline(self, trainer: Any) -> None:
        """Plans and assembles the pipeline from the first batch, and connects Lightning's hooks with it."""
        module = self.lightning_module
        # Lightning lets the module think it is on its device before anything was moved there.
        module.cpu()
        if (num_bytes := built_bytes(module)) > _MANY_BYTES:
            rank_zero_info(
                f"{num_bytes / 2**30:.1f} GiB of weights take memory of the host until layers are placed; modules "
                "of one's own that are built in configure_model take none"
            )
        batch, self._arguments = first_batch(trainer, self)
        silence_watching(trainer)
        options = replace(self._options, **self._told_by_callbacks(trainer), seed=self.seed)
        optimization = getattr(module, "optimization", None)
        if options.optimizer_bytes_factor == "auto" and hasattr(optimization, "state_bytes_factor"):
            options = replace(options, optimizer_bytes_factor=optimization.state_bytes_factor())
        if options.shard_optimizer == "auto" and options.plan is None:
            may_shard = hasattr(optimization, "may_be_shared") and optimization.may_be_shared()
            options = replace(options, shard_optimizer="auto" if may_shard else False)
        if options.optimizer_offload == "auto" and options.plan is None:
            may_offload = (
                hasattr(optimization, "may_be_offloaded") and optimization.may_be_offloaded()
            )
            options = replace(options, optimizer_offload="auto" if may_offload else "none")
        with hooks_come_later(), early_answers(self), generators_preserved(module):
            self.pipeline = prepare(
                module, self._run_training_step, batch, options, self.process, self._arguments,
                later_moments(trainer),
            )  # fmt: skip
        self._disconnect_data()
        sharding = self.pipeline.sharding
        self.division = Division(
            module, self.pipeline.owners, self.pipeline.mesh, sharding.ranks if sharding else {}
        )
        plan = self.pipeline.plan
        with raised_by_all():
            if plan.runs_free:
                refuse_without_flush(trainer, plan.options.schedule)
        forget_elsewhere(module, self.global_rank)
        rank_zero_info("\n%s\n", report(self.pipeline.plan))
        if self.world_size > 1:
            self._lock_step = LockStep(trainer, self.pipeline.mesh, self._until_teardown)
        if plan.ranks_per_pipeline > 1 and module.example_input_array is not None:
            example = module.example_input_array
            self._until_teardown.callback(setattr, module, "example_input_array", example)
            module.example_input_array = None
            rank_zero_info(
                "the model summary shows no sizes: no rank has the whole module to run example_input_array with"
            )
        for cache in _caches(trainer):
            cache.encode_all(trainer, self.pipeline)
        if self.pipeline.fills:
            from lightning_diffpipe.callbacks.bubble_filling import BubbleFilling

            if not any(isinstance(callback, BubbleFilling) for callback in trainer.callbacks):
                trainer.callbacks.insert(0, BubbleFilling())

    def _told_by_callbacks(self, trainer: Any) -> dict[str, Any]:
        """Returns options that callbacks decide: what averages take, and whether encoders leave memory."""
        from lightning_diffpipe.callbacks.ema import EMA

        averages = (callback for callback in trainer.callbacks if isinstance(callback, EMA))
        return {
            "averages_bytes_factor": sum(c.bytes_factor(self.lightning_module) for c in averages),
            "encode_first": bool(_caches(trainer)),
        }

    def _run_training_step(self, module: nn.Module, batch: Any, *arguments: Any) -> Any:
        """Runs the user's step as a function of module and batch; also on a copy when it is probed."""
        nothing = contextlib.nullcontext()
        quiet = without_loggers(self._trainer) if in_trial.get() else nothing
        # Once it is placed, what is streamed from the host is on the device when it runs.
        is_on_host = self.pipeline is None and next(module.parameters()).device != self.root_device
        types = autocast_on_host() if is_on_host else nothing
        plugin = self.precision_plugin
        with quiet, self._metric_sync.inside_step(), types, plugin.train_step_context():
            out = module.training_step(batch, *(arguments or self._arguments))
        if self.pipeline is None and not self._warned_of_outputs:  # it is being probed
            self._warned_of_outputs = warn_of_outputs(out)
        return out

    def model_to_device(self) -> None:
        """Moves a module that is not cut; a pipeline has placed its own part already."""
        if self.pipeline is not None:
            return
        module: Any = self.lightning_module
        module.to(self.root_device)
        for parameter in module.parameters():
            take_from_file(parameter)
        frozen = {name for name, p in module.named_parameters() if not p.requires_grad}
        versions = Versions(module, frozen, ())

        def take_back() -> None:
            if not versions.changed():
                take_from_files(module, frozen)

        self._until_teardown.callback(take_back)

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Modules are built on the host; only a rank's own part ever reaches its device."""
        with self.precision_plugin.tensor_init_context():
            yield

    @contextlib.contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        """Layers of `configure_model` take no memory until a rank places them."""
        with built_in_files(self.lightning_module):
            yield

    def process_dataloader(self, dataloader: Any) -> Any:
        """Lets one rank read a pipeline's batches as one process would; raises ConfigurationError without any."""
        dataloader, mesh, trainer = unaligned(dataloader), self.mesh, self._trainer
        if mesh is None:  # asked for outside of a run
            return dataloader
        dataloader = shared_out(dataloader, trainer, **self.distributed_sampler_kwargs)
        length = mesh.from_first(sized_len(dataloader))
        training = trainer.state.stage == RunningStage.TRAINING
        if training and length == 0:  # Lightning would end the run without an error
            with raised_by_all():
                raise ConfigurationError(why_empty(dataloader))
        place = partial(place_of, trainer) if training else None
        is_read = mesh.local_rank == 0
        return PipelineLoader(dataloader, length, is_read, self.seed, mesh.pipeline, place)

    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        """Moves a batch, or gets one from the rank that loads it."""
        watcher.note_batch()
        if isinstance(batch, Fetched):
            return batch.feed.give(batch, device or self.root_device)
        return super().batch_to_device(batch, device, dataloader_idx)

    # ------------------------------------------------------------------------------------- steps

    def training_step(self, batch: Any, *arguments: Any) -> Tensor:  # type: ignore[override]
        """Runs the schedule: all microbatches, forward and backward."""
        pipeline, trainer = self._running, self._trainer
        pipeline.refuse_unfrozen()
        number = trainer.fit_loop.epoch_loop.total_batch_idx
        _ = pipeline.read_ahead  # as it is before the first step; offloading compares with that
        if pipeline.fills and pipeline.stop_ahead_if_changed():
            self.upcoming = []
            self._refuse_change_alone(number)
            rank_zero_warn(
                "weights or numbers of frozen layers, or buffers that feed them, were changed during training, so "
                "what they gave for coming batches was thrown away, and they run in the step of their batch from "
                "now on"
            )
        else:
            watcher.note_batch()
        if isinstance(pipeline.engine, FreeRunningEngine):
            return self._step_without_flush(pipeline.engine, batch, arguments)
        accumulate = trainer.accumulate_grad_batches
        if trainer.fit_loop.batch_idx % accumulate == 0:
            pipeline.engine.reducer.take()
        self._arguments = arguments
        pipeline.watch.before_step(batch, arguments)
        upcoming, self.upcoming = self.upcoming, []
        later = lambda n: (arguments[0] + n, *arguments[1:]) if arguments else ()
        result = pipeline.engine.run_step(
            batch,
            number,
            accumulate,
            reduce_gradients=not self._accumulating,
            arguments=arguments,
            upcoming=[(coming, later(n)) for n, coming in upcoming],
            alarm=pipeline.watch.has_diverged(self.max_diverged_steps),
        )
        self._take_gradients()
        checks_gradients = self.max_diverged_steps is not None and not self._accumulating
        self._check(result, number, self._gradients if checks_gradients else None)
        if pipeline.fills:  # what layers wrote themselves does not count
            pipeline.read_ahead.note(before_update=not self._accumulating)
        return result.loss.to(pipeline.loss_dtype).requires_grad_()

    def _refuse_change_alone(self, number: int) -> None:
        """Refuses a change of what frozen layers read if not all ranks of the pipeline have found one.

        Only those that have meet here: ranks vote before the hooks in which weights may change, and another vote
        after them would cost every step a round trip. The others wait in their step for `timeout_s`.
        """
        watcher.enter("training, with frozen layers changed")
        try:
            self._running.mesh.gathered([number], patient=True)
        except PipelineTimeoutError as error:
            raise ConfigurationError(
                "weights or numbers of frozen layers, or buffers that feed them, were changed before batch "
                f"{number} on rank {self.global_rank}, but not on all ranks of its pipeline: the others would "
                "train on what the old ones gave. Change them on all ranks alike, from what all have"
            ) from error
        watcher.enter("training")

    def _step_without_flush(
        self, engine: FreeRunningEngine, batch: Any, arguments: tuple[Any, ...]
    ) -> Tensor:
        """Forwards a batch, and trains on one from before; logs what is known by now."""
        pipeline, trainer = self._running, self._trainer
        loop = trainer.fit_loop.epoch_loop
        self._arguments = arguments
        pipeline.watch.before_step(batch, arguments)
        alarm = pipeline.watch.has_diverged(self.max_diverged_steps)
        self._restore_gradients()
        self._finished += engine.advance(batch, loop.total_batch_idx, arguments, alarm)
        self._take_gradients()
        is_last_step = 0 < trainer.max_steps <= trainer.global_step + 1
        if loop.batch_progress.is_last_batch or is_last_step:
            self.drain()
        results = self._log_finished()
        pipeline.read_ahead.note(before_update=True)
        loss = results[-1].loss if results else torch.tensor(torch.nan, device=self.root_device)
        return loss.to(pipeline.loss_dtype).requires_grad_()

    def _log_finished(self) -> list[StepResult]:
        """Logs the results of batches that have come back, and checks whether training diverges."""
        results, self._finished = self._finished, []
        for result in results:
            self._check(result, result.batch_index)
            self._trainer.lightning_module.log("batch", float(result.batch_index), on_epoch=False)
        return results

    def _drained_before(self, checks_validation: Callable[[Any], bool], fetcher: Any) -> bool:
        """Returns whether validation follows a batch; before it, or the end, nothing is under way.

        Callbacks that look at weights when validation begins, or training ends, find those after the last batch.
        """
        trainer = self._trainer
        checks = checks_validation(fetcher)
        engine = self._running.engine
        assert isinstance(engine, FreeRunningEngine)
        if (checks or trainer.should_stop) and not (engine.is_empty and not self._finished):
            self.drain()
            trainer.lightning_module._current_fx_name = "training_step"
            self._log_finished()
            trainer.lightning_module._current_fx_name = None
            trainer._logger_connector.on_batch_end()
            trainer._logger_connector.update_train_step_metrics()
        return checks

    def drain(self) -> None:
        """Takes back all that is under way without a flush, so that weights are those after the last batch.

        It precedes every use of the weights. A collective call of all ranks; does nothing if nothing is under way.
        """
        engine = self.pipeline.engine if self.pipeline else None
        if not isinstance(engine, FreeRunningEngine) or engine.is_empty:
            return
        pipeline = self._running
        with pipeline.watch.as_in_steps():
            self._restore_gradients()
            self._finished += engine.drain()
            self._take_gradients()

    def _check(
        self, result: StepResult, number: int, gradients: Sequence[Tensor | None] | None = ()
    ) -> None:
        """Checks whether training diverges (`StepWatch.after_step`), and logs what the last stage has logged."""
        watch, step = self._running.watch, self._trainer.global_step
        watch.refuse_divergence(self.max_diverged_steps, step, result)
        watch.after_step(result.loss, number, gradients)
        self.last_step = result
        for logged in result.logged:
            options: dict[str, Any] = {"batch_size": result.num_samples, **logged.options}
            value: Any = logged.value
            if (attribute := options.get("metric_attribute")) is not None:
                # Updated on the last stage; Lightning computes and resets every rank's at the end of the epoch.
                value = self.lightning_module.get_submodule(attribute)
                value._forward_cache = logged.value if options.pop("has_value") else None
                self._metric_sync.trained[attribute] = value
            self.lightning_module.log(logged.name, value, **options)

    def _take_gradients(self) -> None:
        """Takes the gradients away from their parameters after the schedule.

        Lightning zeroes gradients after `training_step`, in which the schedule computes them, and before
        `backward`, which then has nothing left to compute. Left in place they would train nothing, without error.
        """
        self._gradients = self._running.engine.reducer.take()

    def _restore_gradients(self) -> None:
        if self._gradients is not None:
            self._running.engine.reducer.restore(self._gradients)
            self._gradients = None

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Restores the gradients of the schedule; nothing is left to compute."""
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        if not self._running.plan.runs_free:  # else weights were updated already
            self._restore_gradients()
        closure_loss = self.precision_plugin.post_backward(closure_loss, self.lightning_module)
        self.post_backward(closure_loss)
        return closure_loss

    def _evaluate(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Runs the user's step on every rank in lock step; each layer runs where it lives."""
        step = getattr(self.lightning_module, name)
        with self.precision_plugin.forward_context():
            if self.pipeline is None:
                return step(*args, **kwargs)
            pipeline = self.pipeline
            self.drain()
            if self._lock_step is not None:
                self._lock_step.stop_pipeline_together()
            seed = derived_seed(pipeline.seed, name, pipeline.mesh.pipeline, *map(str, args[1:]))
            with pipeline.relayed(), isolated_random_numbers(seed), pipeline.changed_by_layers():
                return step(*args, **kwargs)

    validation_step = partialmethod(_evaluate, "validation_step")  # type: ignore[assignment]
    test_step = partialmethod(_evaluate, "test_step")  # type: ignore[assignment]
    predict_step = partialmethod(_evaluate, "predict_step")  # type: ignore[assignment]

    @contextlib.contextmanager
    def whole_model(self) -> Generator[None, None, None]:
        """Lets all ranks of a pipeline use the whole module, in lock step, e.g. to sample.

        Inside, a call of a layer that lives on another rank returns that rank's result. Every rank
        of the pipeline must enter it and make the same calls with the same arguments.
        """
        if self.pipeline is None:
            if in_trial.get() and self.world_size > 1 and not self.is_one_stage:
                raise ConfigurationError(NOT_IN_STEP)
            yield
            return
        if self.transfers:
            raise ConfigurationError(
                "whole_model() takes all ranks of a pipeline, but hooks of transfer run on the one that loads its "
                "data; use the whole model in the step, or in a hook such as on_train_batch_start"
            )
        self.drain()
        with watcher.inside(f"{watcher.phase} with the whole model"), self.pipeline.relayed():
            yield

    def is_resident(self, name: str) -> bool:
        """Returns whether this rank holds a parameter, given by its fully qualified name."""
        return self.pipeline is None or name in self.pipeline.resident

    @contextlib.contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Leaves gradients this rank's own inside: another batch of the window will follow."""
        with patched(self, _accumulating=True):
            yield

    # ---------------------------------------------------------------------------------- clipping

    def clip_by_global_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Scales the gradients of an optimizer so that their norm over all stages is bounded."""
        if clip_val > 0:
            pipeline = self._running
            pipeline.engine.reducer.clip(pipeline.trained_by(optimizer), clip_val)

    def gradient_norm(self, optimizer: Optimizer | None = None, norm_type: float = 2.0) -> Tensor:
        """Returns the norm of the gradients of all stages, equal on every rank; a collective call.

        Args:
            optimizer: Only its parameters take part; all trained parameters if not given.
            norm_type: Order of the norm.
        """
        pipeline = self._running
        if pipeline.plan.runs_free:
            raise ConfigurationError(
                f"there is no norm over all stages with schedule={pipeline.plan.options.schedule}: they have "
                "gradients of different batches at a time; choose a schedule that flushes, such as 1f1b"
            )
        trained = pipeline.trained if optimizer is None else pipeline.trained_by(optimizer)
        return pipeline.engine.reducer.global_norm(trained, norm_type)

    # -------------------------------------------------------------------------- phases, and the end

    def _enter(self, phase: str) -> None:
        """Tells the other ranks what this one does; weights are those after the last batch."""
        self.drain()
        if self.pipeline is not None:
            silence_watching(self._trainer)  # hooks that were put since
        watcher.enter(phase)

    on_train_start = on_validation_end = partialmethod(_enter, "training")  # type: ignore[assignment]
    on_validation_start = partialmethod(_enter, "validating")  # type: ignore[assignment]
    on_test_start = partialmethod(_enter, "testing")  # type: ignore[assignment]
    on_predict_start = partialmethod(_enter, "predicting")  # type: ignore[assignment]

    def on_train_end(self) -> None:
        """Checks the last step, after which none comes that would, and handles a signal that came in it."""
        watcher.enter("ending")
        self.drain()
        if self.pipeline is not None:
            self.pipeline.watch.finish()
            self.refuse_diverged("training has ended")
        self.finish_saving()
        if self._lock_step is not None:
            self._lock_step.stop_together(last=True)

    def on_exception(self, exception: BaseException) -> None:
        """Notes the failure: nothing collective may follow, as other ranks may be gone.

        A checkpoint that is being written has time to become whole: on SIGTERM, when all ranks stop, as long as it
        takes, else a few seconds.
        """
        self.give_up_saving(None if isinstance(exception, SIGTERMException) else GRACE_S)
        self._failed = True
        super().on_exception(exception)

    def teardown(self) -> None:
        """Makes the module whole again on every rank, on the host, and gives everything back."""
        if not self._failed:
            self.finish_saving()  # what hooks at the end have saved
        self._until_teardown.close()
        self.upcoming, self._finished = [], []
        self._lock_step = self._metric_sync = None
        self._gradients = None
        if self.pipeline is not None:
            pipeline, self.pipeline = self.pipeline, None
            pipeline.dismantle(connected=not self._failed)
        self._disconnect_data()
        super().teardown()

    def _disconnect_data(self) -> None:
        if self._data_mesh is not None:
            self._data_mesh.disconnect()


def _caches(trainer: Any) -> list[Any]:
    """Returns the callbacks that store encodings before training."""
    from lightning_diffpipe.callbacks.encoding_cache import EncodingCache

    return [c for c in trainer.callbacks if isinstance(c, EncodingCache) and c.encode_first]


def _once(hook: Callable[..., Any], batch: Any, dataloader_idx: int = 0) -> Any:
    """Runs a hook on a batch that was not fetched; has a name, as trainers are pickled."""
    return batch if isinstance(batch, Fetched) else hook(batch, dataloader_idx)
