"""`Trainer(strategy="diffpipe")`: Lightning's hooks, translated to a plan and an engine.

    Lightning calls             what happens                                         where
    setup                       probe, profile, plan, place parameters               preparation.py, pipeline.py
    training_step               the schedule runs forward and backward               runtime/engine.py
    (zero_grad)                 gradients have been set aside before Lightning's own zeroing
    backward                    they are put back; nothing is computed
    clip_gradients              global norm over all stages                          runtime/reduction.py
    validation_step, test_step  every rank runs the step, layers answer for each other  graph/relay.py
    save, load                  one ordinary Lightning checkpoint, all names          checkpointing.py
    teardown                    the module is whole again on every rank

Why gradients are set aside: Lightning zeroes them after `training_step` and before `backward`, so a
schedule that leaves them in place trains nothing, without any error.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections.abc import Generator
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import (
    _distributed_is_initialized,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer

from lightning_diffpipe.checkpointing import CheckpointHooks
from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.example_batch import example_batch
from lightning_diffpipe.loader import aligned
from lightning_diffpipe.pipeline import Pipeline, Process
from lightning_diffpipe.planning.frozen_parts import BATCHES_AHEAD
from lightning_diffpipe.planning.plan import PipelinePlan
from lightning_diffpipe.preparation import PipelineOptions, prepare
from lightning_diffpipe.refusals import refuse_arguments, refuse_unsupported
from lightning_diffpipe.runtime.checkpoint import spread
from lightning_diffpipe.runtime.engine import StepResult
from lightning_diffpipe.runtime.seeding import derived_seed, isolated_random_numbers
from lightning_diffpipe.transfer import SeededTransfer
from lightning_diffpipe.viewing.report import report

_log = logging.getLogger(__name__)

Auto = Literal["auto"]
_GRACE_S = 5.0


class DiffPipeStrategy(CheckpointHooks):
    """Trains a LightningModule as a pipeline over ranks, exactly as one process would.

    Args:
        num_stages: Stages the layers are cut into; `"auto"` lets the planner choose.
        num_microbatches: Slices each batch is cut into along dimension 0.
        schedule: `"1f1b"`, `"gpipe"`, `"zero_bubble"`, `"interleaved"`, or `"auto"`.
        num_replicas: Ranks per stage: one number for all, a sequence with one number for each, or
            `"auto"`.
        data_parallel: Pipelines side by side on different data; `"auto"` uses ranks left over by
            `num_stages` and `num_replicas`.
        filling: Where frozen layers run. `"shares"` runs those of the next batches while a rank waits;
            `"none"` runs a batch's own before the pipeline, spread over all ranks; `"auto"` takes the
            faster of the two that fits into memory.
        frozen_group_size: Samples on which frozen layers run at a time; `"auto"` weighs what small groups
            cost against how evenly they can be shared. Ranks take whole groups.
        plan: A plan, or the path of one, to use instead of searching.
        profile: `"measure"` times the layers of the model on this machine; `"flops"` derives times
            from operation counts; or a profile, or the path of one.
        cluster: `"measure"` times the links between the ranks while planning; or a `Cluster`, or its
            fields as a mapping.
        timeout_s: Longest wait for a message, in seconds, before the run stops with an error.
        seed: Seed of all random numbers of training steps; `None` takes `seed_everything`'s.
        check_finite: Look for NaN and infinity in everything that crosses a stage boundary.
        verify: Before training, compare loss and gradients of one small batch with a run of the whole
            module on one rank; needs memory for both.
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
        plan: PipelinePlan | str | Path | None = None,
        profile: Any = "measure",
        cluster: Any = "measure",
        timeout_s: float = 120.0,
        seed: int | None = None,
        check_finite: bool = False,
        verify: bool = False,
        process_group_backend: str | None = None,
        **unsupported: Any,
    ) -> None:
        if unsupported:
            refuse_arguments(unsupported)
        super().__init__()
        if timeout_s <= 0:
            raise ConfigurationError(f"timeout_s must be positive; got {timeout_s}")
        self.timeout_s = float(timeout_s)
        self.num_nodes = 1
        self.pipeline: Pipeline | None = None
        self.last_step: StepResult | None = None
        self.upcoming: list[tuple[int, Any]] = []
        self.batches_ahead = BATCHES_AHEAD
        self._transferred_ahead = 0
        self._options = PipelineOptions(
            num_stages=num_stages,
            num_microbatches=num_microbatches,
            schedule=schedule,
            num_replicas=num_replicas,
            data_parallel=data_parallel,
            filling=filling,
            frozen_group_size=frozen_group_size,
            plan=plan,
            profile=profile,
            cluster=cluster,
            seed=seed,
            check_finite=check_finite,
            verify=verify,
        )
        self._backend = process_group_backend
        self._arguments: tuple[Any, ...] = ()
        self._gradients: dict[str, Tensor | None] | None = None
        self._accumulating = False
        self._failed = False
        self._clip_grad_by_norm: Any = None
        self._transfer: SeededTransfer | None = None

    # ------------------------------------------------------------------ ranks, devices, launching

    @property
    def is_distributed(self) -> bool:
        """Lightning gives only its own strategies a distributed sampler unless they say this."""
        return True

    @property
    def root_device(self) -> torch.device:
        """The device this rank computes on."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Ranks on this host."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def plan(self) -> PipelinePlan | None:
        """What each rank does; known once training has been set up."""
        return self.pipeline.plan if self.pipeline else None

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Ranks of one pipeline see the same samples; pipelines see different ones."""
        if self.pipeline is None:
            return {"num_replicas": self.world_size, "rank": self.global_rank}
        mesh = self.pipeline.mesh
        return {"num_replicas": mesh.layout.num_pipelines, "rank": mesh.pipeline}

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = _SubprocessScriptLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes
            )

    def set_world_ranks(self) -> None:
        """Tells the environment and Lightning's rank-zero helpers which rank this is."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(
                self.node_rank * self.num_processes + self.local_rank
            )
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = fabric_rank_zero_only.rank = self.global_rank

    def setup_environment(self) -> None:
        """Sets the device and joins the default process group."""
        super().setup_environment()
        reset_seed()
        self.set_world_ranks()
        assert self.cluster_environment is not None
        self._backend = self._backend or _get_default_process_group_backend_for_device(
            self.root_device
        )
        # Processes start, download and save at their own pace; only messages of a step are urgent.
        patience_s = max(self.timeout_s, default_pg_timeout.total_seconds())
        _init_dist_connection(
            self.cluster_environment, self._backend, timeout=timedelta(seconds=patience_s)
        )

    # ------------------------------------------------------------------------------------ set-up

    def setup(self, trainer: Any) -> None:
        """Plans the pipeline and puts this rank's part of the module on its device."""
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        self._failed = False
        refuse_unsupported(trainer, self)
        self.model = self.precision_plugin.convert_module(self.model)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            self._set_up_pipeline(trainer)
            self._reset_optimizers()
            self.setup_optimizers(trainer)
        else:
            self.model_to_device()
        self.setup_precision_plugin()
        if fitting:
            self._clip_by_global_norm()

    def _set_up_pipeline(self, trainer: Any) -> None:
        module = self.lightning_module
        assert module is not None
        batch, arguments = example_batch(trainer, self)
        self._arguments = arguments
        self.pipeline = prepare(
            module,
            self._run_training_step,
            batch,
            self._options,
            Process(
                self.global_rank,
                self.world_size,
                self.root_device,
                str(self._backend),
                self.timeout_s,
            ),
        )
        rank_zero_info("\n%s\n", report(self.pipeline.plan))
        self._transfer = SeededTransfer(
            [
                owner
                for owner in (module, getattr(trainer, "datamodule", None))
                if owner is not None
            ],
            lambda: self._transfer_seed(trainer),
        )
        if self.pipeline.fills:
            self._add_bubble_filling(trainer)

    def _add_bubble_filling(self, trainer: Any) -> None:
        from lightning_diffpipe.callbacks.bubble_filling import BubbleFilling

        if not any(isinstance(callback, BubbleFilling) for callback in trainer.callbacks):
            trainer.callbacks.insert(0, BubbleFilling())

    def _transfer_seed(self, trainer: Any) -> int | None:
        """Seeds the hooks that change a training batch, by its number since training began."""
        if self.pipeline is None or trainer.state.stage != RunningStage.TRAINING:
            return None
        mesh, progress = self.pipeline.mesh, trainer.fit_loop.epoch_loop.batch_progress
        number = progress.total.ready + self._transferred_ahead
        return derived_seed(self.pipeline.seed, "transfer", mesh.pipeline, number)

    @contextlib.contextmanager
    def transferring(self, ahead: int) -> Generator[None, None, None]:
        """Inside, batch hooks draw the random numbers of a later batch; 1 is the next."""
        # While a batch is trained on it counts as ready, so the next one has the number as it stands.
        self._transferred_ahead = ahead - 1
        try:
            yield
        finally:
            self._transferred_ahead = 0

    def _run_training_step(self, module: nn.Module, batch: Any, *arguments: Any) -> Any:
        """The user's step as a function of module and batch; also run on a copy when probed."""
        with self.precision_plugin.train_step_context():
            return module.training_step(batch, *(arguments or self._arguments))

    def _reset_optimizers(self) -> None:
        self._optimizers, self._lightning_optimizers, self.lr_scheduler_configs = [], [], []

    def model_to_device(self) -> None:
        """Moves a module that is not cut; a pipeline has placed its own part already."""
        if self.pipeline is None:
            assert self.lightning_module is not None
            self.lightning_module.to(self.root_device)

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Modules are built on the host; only a rank's own part ever reaches its device."""
        with self.precision_plugin.tensor_init_context():
            yield

    def process_dataloader(self, dataloader: Any) -> Any:
        """Makes all ranks of a pipeline see the same batches, random augmentation included."""
        if self.pipeline is None:
            return dataloader
        assert self.lightning_module is not None
        trainer, pipeline = self.lightning_module.trainer, self.pipeline
        training = trainer.state.stage == RunningStage.TRAINING
        return aligned(
            dataloader,
            pipeline.seed,
            pipeline.mesh.pipeline,
            pass_index=(lambda: trainer.current_epoch) if training else (lambda: 0),
            compare=pipeline.compare_over_pipeline,
            looks_ahead=self.batches_ahead if training and pipeline.fills else 0,
        )

    # ------------------------------------------------------------------------------------- steps

    def training_step(self, batch: Any, *arguments: Any) -> Tensor:  # type: ignore[override]
        """Runs the schedule: all microbatches, forward and backward."""
        assert self.pipeline is not None
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        accumulate = trainer.accumulate_grad_batches
        parameters = self.pipeline.trained
        if trainer.fit_loop.batch_idx % accumulate == 0:
            for parameter in parameters.values():
                parameter.grad = None
        self._arguments = arguments
        result = self.pipeline.engine.run_step(
            batch,
            trainer.fit_loop.epoch_loop.total_batch_idx,
            accumulate,
            reduce_gradients=not self._accumulating,
            arguments=arguments,
            upcoming=self._take_upcoming(arguments),
        )
        self.last_step = result
        self._gradients = {name: parameter.grad for name, parameter in parameters.items()}
        for parameter in parameters.values():
            parameter.grad = None
        for logged in result.logged:
            self.lightning_module.log(logged.name, logged.value, **logged.options)
        return result.loss.to(self.pipeline.loss_dtype).requires_grad_()

    def _take_upcoming(self, arguments: tuple[Any, ...]) -> list[tuple[Any, tuple[Any, ...]]]:
        """Batches that come next and are not known to the engine, with the arguments of their steps."""
        upcoming, self.upcoming = self.upcoming, []
        return [
            (batch, (arguments[0] + ahead, *arguments[1:]) if arguments else ())
            for ahead, batch in upcoming
        ]

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Puts the gradients of the schedule back; nothing is left to compute."""
        assert self.pipeline is not None
        assert self.lightning_module is not None
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        assert self._gradients is not None
        for name, parameter in self.pipeline.trained.items():
            parameter.grad = self._gradients[name]
        self._gradients = None
        closure_loss = self.precision_plugin.post_backward(closure_loss, self.lightning_module)
        self.post_backward(closure_loss)
        return closure_loss

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the user's step on every rank in lock step; each layer runs where it lives."""
        return self._evaluate("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """As `validation_step`."""
        return self._evaluate("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """As `validation_step`."""
        return self._evaluate("predict_step", *args, **kwargs)

    def _evaluate(self, name: str, *args: Any, **kwargs: Any) -> Any:
        step = getattr(self.lightning_module, name)
        with self.precision_plugin.forward_context():
            if self.pipeline is None:
                return step(*args, **kwargs)
            pipeline = self.pipeline
            seed = derived_seed(pipeline.seed, name, pipeline.mesh.pipeline, *map(str, args[1:]))
            with self.whole_model(), isolated_random_numbers(seed):
                return step(*args, **kwargs)

    @contextlib.contextmanager
    def whole_model(self) -> Generator[None, None, None]:
        """Lets all ranks of a pipeline use the whole module, in lock step, e.g. to sample.

        Inside, a call of a layer that lives on another rank returns that rank's result. Every rank
        of the pipeline must enter it and make the same calls with the same arguments.
        """
        if self.pipeline is None:
            yield
            return
        with self.pipeline.relayed():
            yield

    def is_resident(self, name: str) -> bool:
        """Whether this rank holds a parameter, given by its fully qualified name."""
        return self.pipeline is None or name in self.pipeline.resident

    @contextlib.contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Inside, gradients stay this rank's own: another batch of the window will follow."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    # ---------------------------------------------------------------------------------- clipping

    def _clip_by_global_norm(self) -> None:
        # The precision plugin is the user's choice; its class name keys the scaler's state in
        # checkpoints, so the instance is given another method rather than the plugin another class.
        self._clip_grad_by_norm = self.precision_plugin.clip_grad_by_norm
        self.precision_plugin.clip_grad_by_norm = self.clip_by_global_norm  # type: ignore[method-assign]

    def clip_by_global_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Scales the gradients of an optimizer so that their norm over all stages is bounded."""
        if clip_val <= 0:
            return
        norm = self.gradient_norm(optimizer)
        scale = (clip_val / (norm + 1e-6)).clamp(max=1.0)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(scale.to(parameter.grad.device, parameter.grad.dtype))

    def gradient_norm(self, optimizer: Optimizer | None = None, norm_type: float = 2.0) -> Tensor:
        """The norm of the gradients of all stages, equal on every rank; a collective call.

        Args:
            optimizer: Only its parameters take part; all trained parameters if not given.
            norm_type: Order of the norm.
        """
        assert self.pipeline is not None
        trained = self.pipeline.trained
        if optimizer is not None:
            members = {id(p) for group in optimizer.param_groups for p in group["params"]}
            trained = {name: p for name, p in trained.items() if id(p) in members}
        return self.pipeline.engine.reducer.global_norm(trained, norm_type)

    # ------------------------------------------------------------------------------- collectives

    def barrier(self, name: str | None = None) -> None:
        """Waits for all ranks."""
        if not _distributed_is_initialized():
            return
        if dist.get_backend() == "nccl":
            dist.barrier(device_ids=[self.root_device.index])
        else:
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Gives an object of one rank to all."""
        if not _distributed_is_initialized():
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces a tensor over all ranks; stages of a pipeline hold equal values."""
        if isinstance(tensor, Tensor):
            return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)
        return tensor

    # ---------------------------------------------------------------------------------- the end

    def on_exception(self, exception: BaseException) -> None:
        """Nothing collective may follow: other ranks may be gone.

        Processes started by this one get a few seconds to say what went wrong on their side. On NCCL
        nobody else would ever end them, as a lost peer closes no connection.
        """
        self._failed = True
        if (
            self._backend == "nccl"
        ):  # its watchdog may end the process before Python prints the error
            _log.error("rank %d stops: %r", self.global_rank, exception)
        if isinstance(self._launcher, _SubprocessScriptLauncher):
            deadline_s = time.monotonic() + _GRACE_S
            while time.monotonic() < deadline_s and any(
                p.poll() is None for p in self._launcher.procs
            ):
                time.sleep(0.1)
            self._launcher.kill(signal.SIGKILL)

    def teardown(self) -> None:
        """Makes the module whole again on every rank, on the host, and gives everything back."""
        if self._clip_grad_by_norm is not None:
            self.precision_plugin.clip_grad_by_norm = self._clip_grad_by_norm  # type: ignore[method-assign]
            self._clip_grad_by_norm = None
        if self._transfer is not None:
            self._transfer.uninstall()
        self.upcoming, self._transfer = [], None
        if self.pipeline is not None:
            pipeline, self.pipeline = self.pipeline, None
            whole = {}
            if not self._failed:
                assert self.lightning_module is not None
                whole = spread(self.lightning_module.state_dict(), pipeline.owners, pipeline.mesh)
            pipeline.dismantle(whole, connected=not self._failed)
        super().teardown()
